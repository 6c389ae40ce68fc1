"""Blobs: `link`, `pin`, `unpin`, `rm`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, asks, command, dry_run
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session, meant
from smartcache.cli._words import counted, short
from smartcache.errors import BlobInUseError, DestinationExistsError, StoreError
from smartcache.sizes import format_size
from smartcache.store import DEFAULT_PIN, KINDS, Kind

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.store.records import Blob
    from smartcache.store.store import Store

_KIND_NAMES = {"hardlink": "a hard link", "reflink": "a reflink", "copy": "a copy"}
_DIGESTS = click.argument("digests", metavar="DIGEST...", nargs=-1, required=True)


@command(
    "link",
    examples=(
        ("smartcache link 3fa9c41be27d ~/ComfyUI/models/vae/sdxl.safetensors", "by the best kind"),
        ("smartcache link sha256:51a0c2... model.gguf", "by the hash the Hub or Ollama knows"),
        ("smartcache link 3fa9 model.pt --kind copy", "a kind of your choice, or an error"),
    ),
)
@click.argument("digest")
@click.argument("path", type=FILE)
@click.option(
    "--kind", type=click.Choice(KINDS), default="auto", show_default=True,
    help="auto: a hard link or reflink where possible, else a copy.",
)  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Replace the file at PATH.")
@dry_run
@click.pass_obj
def link_command(
    session: Session, *, digest: str, path: Path, kind: Kind, force: bool, dry_run: bool
) -> None:
    """Put a blob at a path.

    Small files and those that programs edit in place (json, txt, yaml, ...) are copied, unless a
    kind is asked for. A hard link is read-only, like the blob.
    """
    from pathlib import Path

    with session.store() as store:
        blob = meant(store, digest)
        target = Path(os.path.abspath(path))
        _refuse_bad_target(target)
        document: dict[str, object] = {
            "dry_run": dry_run,
            "digest": blob.digest,
            "size": blob.size,
            "path": target,
            "kind": kind,
        }
        if dry_run:
            text = f"Would put {short(blob.digest)} ({format_size(blob.size)}) at {target}"
        else:
            try:
                made = store.place(
                    blob.digest, target, kind=kind, overwrite=force, label=f"link {target}",
                    progress=bars,
                )  # fmt: skip
            except DestinationExistsError as error:
                error.hint = "Choose another path, or replace it with --force."
                raise
            document["kind"] = made.kind
            what = _KIND_NAMES[made.kind]
            text = f"{target} is {what} of {short(blob.digest)} ({format_size(blob.size)})"
        out.show(
            human=lambda: out.line(text), document=lambda: document, ids=lambda: [target]
        )  # fmt: skip


def _refuse_bad_target(target: Path) -> None:
    if target.is_dir():
        message = f"{target} is a directory"
        hint = "Give the path of the file to make, with its name."
        raise DestinationExistsError(message, hint=hint, path=target)
    if not target.parent.is_dir():
        raise StoreError(f"There is no directory {target.parent}", hint="Make it first.")


@command(
    "pin",
    examples=(
        ("smartcache pin 3fa9c41be27d", f'keep it, under the name "{DEFAULT_PIN}"'),
        ("smartcache pin $(smartcache ls -q --limit 5) --name favourites", "the five largest"),
    ),
)
@_DIGESTS
@click.option("--name", default=DEFAULT_PIN, show_default=True, help="The name of the pin.")
@dry_run
@click.pass_obj
def pin_command(session: Session, *, digests: tuple[str, ...], name: str, dry_run: bool) -> None:
    """Keep blobs until they are unpinned.

    Prune and rm leave a pinned blob alone. A blob may have several pins; it is kept until the last
    one is gone.
    """
    with session.store() as store:
        found = _all_meant(store, digests)
        if not dry_run:
            for blob in found:
                store.pin(blob.digest, name)
        text = f"{'Would pin' if dry_run else 'Pinned'} {counted(len(found), 'blob')} as {name!r}"
        _show_pins(found, text, name, dry_run=dry_run)


@command(
    "unpin",
    examples=(
        ("smartcache unpin 3fa9c41be27d", "remove all pins of a blob"),
        ("smartcache unpin $(smartcache ls -q --filter pin=favourites) --name favourites", "a pin"),
    ),
)
@_DIGESTS
@click.option("--name", help="Remove only the pin of this name.")
@dry_run
@click.pass_obj
def unpin_command(
    session: Session, *, digests: tuple[str, ...], name: str | None, dry_run: bool
) -> None:
    """Unpin blobs.

    The blobs stay until `smartcache prune` frees what has no other name.
    """
    with session.store() as store:
        ended = []
        for blob in _all_meant(store, digests):
            if bool(blob.pins) if name is None else name in blob.pins:
                ended.append(blob)
                if not dry_run:
                    store.unpin(blob.digest, name)
            else:
                out.warn(f"{short(blob.digest)} is not pinned{f' as {name!r}' if name else ''}")
        text = f"{'Would unpin' if dry_run else 'Unpinned'} {counted(len(ended), 'blob')}"
        _show_pins(ended, text, name, dry_run=dry_run)


def _all_meant(store: Store, words: tuple[str, ...]) -> list[Blob]:
    """Return the blobs that words mean, each once."""
    found = (meant(store, word) for word in words)
    return list({blob.digest: blob for blob in found}.values())


def _show_pins(blobs: list[Blob], text: str, name: str | None, *, dry_run: bool) -> None:
    digests = [blob.digest for blob in blobs]
    out.show(
        human=lambda: out.line(text),
        document=lambda: {"dry_run": dry_run, "name": name, "digests": digests},
        ids=lambda: digests,
    )


@command(
    "rm",
    examples=(
        ("smartcache rm 3fa9c41be27d", "asks, then removes it"),
        ('smartcache rm -y $(smartcache ls -q --filter "used>90d" --filter pinned=no)', "many"),
    ),
)
@_DIGESTS
@asks
@click.pass_obj
def rm_command(session: Session, *, digests: tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Remove blobs that are not pinned.

    They are deleted; this cannot be undone. Files outside the store that share the bytes stay as
    they are.
    """
    with session.store() as store:
        found = _all_meant(store, digests)
        for blob in found:
            _refuse_pinned(blob)
        freed: list[int] = []
        if not dry_run:
            if not yes and out.mode == "human":
                _show_victims(found, as_talk=True)
            size = format_size(sum(blob.size for blob in found))
            out.confirm(f"Remove {counted(len(found), 'blob')} ({size})?", yes=yes)
            freed = [store.remove(blob.digest) for blob in found]
        out.show(
            human=lambda: _say_removed(found, freed, dry_run=dry_run),
            document=lambda: {
                "dry_run": dry_run,
                "blobs": [{"digest": blob.digest, "size": blob.size} for blob in found],
                "removed": len(freed),
                "freed_size": sum(freed),
            },
            ids=lambda: [blob.digest for blob in found],
        )


def _refuse_pinned(blob: Blob) -> None:
    """Raise before anything is removed if one of the blobs cannot be; `remove` looks once more."""
    if blob.pins:
        hint = f"Unpin it first: 'smartcache unpin {short(blob.digest)}'."
        message = f"{short(blob.digest)} is pinned ({', '.join(blob.pins)}); nothing was removed"
        raise BlobInUseError(message, hint=hint, digest=blob.digest)


def _show_victims(found: list[Blob], *, as_talk: bool) -> None:
    columns = ("DIGEST", "SIZE>", "LINKS>")
    rows = ([short(b.digest), format_size(b.size), f"{b.names:,}"] for b in found)
    out.table(columns, rows, as_talk=as_talk)


def _say_removed(found: list[Blob], freed: list[int], *, dry_run: bool) -> None:
    blobs = counted(len(found), "blob")
    if dry_run:
        _show_victims(found, as_talk=False)
        size = format_size(sum(blob.size for blob in found))
        out.line(f"Would remove {blobs} ({size}).")
    else:
        out.line(f"Removed {blobs}, freed {format_size(sum(freed))}.")
