"""Blobs: `link`, `pin`, `unpin`, `rm`, and `publish` for all of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import click

from smartcache.cli._command import FILE, asks, command, never_asks
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session, holders, one_entry
from smartcache.cli._tables import Column
from smartcache.cli._words import counted, named, short
from smartcache.errors import (
    BlobInUseError,
    BlobNotFoundError,
    DestinationExistsError,
    StoreError,
)
from smartcache.sizes import format_size
from smartcache.store import DEFAULT_PIN, KINDS, Kind

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.store import Blob, Forgotten, PublishPlan, SharedBlob, Store
    from smartcache.system import Algorithm

_KIND_NAMES = {"hardlink": "a hard link", "reflink": "a reflink", "symlink": "a symlink"}
_DIGESTS = click.argument("digests", metavar="DIGEST...", nargs=-1, required=True)


@command(
    "link",
    examples=(
        ("smartcache link 3fa9c41be27d ~/ComfyUI/models/vae/sdxl.safetensors", "by the best kind"),
        ("smartcache link sha256:51a0c2... model.gguf", "by the hash the Hub or Ollama knows"),
        ("smartcache link 3fa9 model.pt --kind symlink", "a kind of your choice, or an error"),
    ),
)
@click.argument("digest")
@click.argument("path", type=FILE)
@click.option(
    "--kind", type=click.Choice(KINDS), default="auto", show_default=True,
    help="auto: a hard link or reflink where possible, else a copy.",
)  # fmt: skip
@click.option("-f", "--force", is_flag=True, help="Replace the file at PATH.")
@never_asks
@click.pass_obj
def link_command(
    session: Session, *, digest: str, path: Path, kind: Kind, force: bool, dry_run: bool
) -> None:
    """Put a blob at a path.

    Small files and those that programs edit in place (json, txt, yaml, ...) are copied, unless a
    kind is asked for. A hard link is read-only, like the blob. What only a shared store has is
    first copied from there into yours; give its whole digest or sha256.
    """
    from pathlib import Path

    with session.store() as store:
        blob, origin = _wanted(store, digest, dry_run=dry_run)
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
            text = f"Would put {short(blob.digest)} ({format_size(blob.size)}) at {target}{origin}"
        else:
            try:
                with one_entry(store, f"link {target}"):
                    made = store.place(
                        blob.digest, target, kind=kind, overwrite=force, progress=bars
                    )
            except DestinationExistsError as error:
                error.hint = "Choose another path, or replace it with --force."
                raise
            document["kind"] = made.kind
            what = _KIND_NAMES.get(made.kind, "a copy")
            text = f"{target} is {what} of {short(blob.digest)} ({format_size(blob.size)}){origin}"
        out.show(
            human=lambda: out.line(text), document=lambda: document, ids=lambda: [target]
        )  # fmt: skip


def _wanted(store: Store, text: str, *, dry_run: bool) -> tuple[Blob | SharedBlob, str]:
    """Return the blob that a user means; what only a shared store has is brought, and said."""
    from smartcache.system import is_digest

    try:
        return holders(store, text)[0][1], ""
    except BlobNotFoundError:
        algorithm, colon, value = text.rpartition(":")
        if not colon and not is_digest(value.lower()):
            raise
        asked = cast("Algorithm", algorithm or "blake3")
        found = next(store.find_shared(asked, value), None)
        if found is None:
            raise
        if dry_run:
            return found, f", from the shared store {found.store.root}"
        blob = store.bring(asked, value, progress=bars)
        if blob is None:
            raise
        return blob, ", brought from a shared store"


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
@never_asks
@click.pass_obj
def pin_command(session: Session, *, digests: tuple[str, ...], name: str, dry_run: bool) -> None:
    """Keep blobs until they are unpinned.

    Prune and rm leave a pinned blob alone. A blob may have several pins; it is kept until the last
    one is gone.
    """
    with session.store() as store:
        found = [pair for text in digests for pair in holders(store, text)]
        if not dry_run:
            for holder, blob in found:
                holder.pin(blob.digest, name)
        text = f"{'Would pin' if dry_run else 'Pinned'} {_blobs(found)} as {name!r}"
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
@never_asks
@click.pass_obj
def unpin_command(
    session: Session, *, digests: tuple[str, ...], name: str | None, dry_run: bool
) -> None:
    """Unpin blobs.

    The blobs stay until `smartcache prune` frees what nothing holds.
    """
    with session.store() as store:
        found = [pair for text in digests for pair in holders(store, text)]
        ended = []
        for holder, blob in found:
            pins = [
                owner.name
                for owner, _ in holder.holders_of(blob)
                if owner.kind == "pin" and name in (None, owner.name)
            ]
            if pins and not dry_run:
                holder.unpin(blob.digest, name)
            if pins:
                ended.append((holder, blob))
            else:
                out.warn(f"{short(blob.digest)} is not pinned{f' as {name!r}' if name else ''}")
        text = f"{'Would unpin' if dry_run else 'Unpinned'} {_blobs(ended)}"
        _show_pins(ended, text, name, dry_run=dry_run)


def _blobs(found: list[tuple[Store, Blob]]) -> str:
    return counted(len({blob.digest for _, blob in found}), "blob")


def _show_pins(
    found: list[tuple[Store, Blob]], text: str, name: str | None, *, dry_run: bool
) -> None:
    digests = list(dict.fromkeys(blob.digest for _, blob in found))
    out.show(
        human=lambda: out.line(text),
        document=lambda: {"dry_run": dry_run, "name": name, "digests": digests},
        ids=lambda: digests,
    )


@command(
    "rm",
    examples=(
        ("smartcache rm 3fa9c41be27d", "to the trash; 'smartcache undo --last' brings it back"),
        ('smartcache rm -y $(smartcache ls -q --filter "used>90d" --filter pinned=no)', "many"),
        ("smartcache rm --now 3fa9c41be27d", "for good"),
    ),
)
@_DIGESTS
@click.option("--now", is_flag=True, help="Remove for good, without the trash: no undo.")
@asks
@click.pass_obj
def rm_command(
    session: Session, *, digests: tuple[str, ...], now: bool, dry_run: bool, yes: bool
) -> None:
    """Remove blobs that nothing holds.

    They go to the trash, and `smartcache undo` brings them back; `smartcache prune` empties
    it. Files outside the store that share the bytes stay as they are.
    """
    with session.store() as store:
        found = list(dict.fromkeys(pair for text in digests for pair in holders(store, text)))
        for holder, blob in found:
            _refuse_held(holder, blob)
        removed: list[Forgotten] = []
        if not dry_run:
            _ask_to_remove(found, now=now, yes=yes)
            names = [short(blob.digest) for _, blob in found]
            with one_entry(store, f"rm {named(names, 'blob')}"):
                removed = [each.forget(blob.digest, to_trash=not now) for each, blob in found]
        out.show(
            human=lambda: _say_removed(found, removed, now=now, dry_run=dry_run),
            document=lambda: _removal(found, removed, now=now, dry_run=dry_run),
            ids=lambda: dict.fromkeys(blob.digest for _, blob in found),
        )


def _refuse_held(store: Store, blob: Blob) -> None:
    """Raise before anything is removed if one of the blobs cannot be; `forget` looks once more."""
    names = [str(owner) for owner, _ in store.holders_of(blob)]
    names += [
        f"symlink {link.path}"
        for link in store.links_of(blob)
        if link.kind == "symlink" and link.path.is_symlink()
    ]
    if not names:
        return
    is_pin = any(owner.kind == "pin" for owner, _ in store.holders_of(blob))
    hint = f"Unpin it first with 'smartcache unpin {short(blob.digest)}' first." if is_pin else None
    message = f"{short(blob.digest)} is held by {', '.join(names)}; nothing was removed"
    raise BlobInUseError(message, hint=hint, digest=blob.digest, holders=names)


def _ask_to_remove(found: list[tuple[Store, Blob]], *, now: bool, yes: bool) -> None:
    if not yes and out.mode == "human":
        _show_victims(found, as_talk=True)
    where = "for good" if now else "to the trash"
    size = format_size(sum(blob.size for _, blob in found))
    out.confirm(f"Remove {counted(len(found), 'blob')} ({size}) {where}?", yes=yes)


def _show_victims(found: list[tuple[Store, Blob]], *, as_talk: bool) -> None:
    columns = [
        Column(title="DIGEST"),
        Column(title="SIZE", right=True),
        Column(title="LINKS", right=True),
    ]
    rows = ([short(b.digest), format_size(b.size), str(b.links - 1)] for _, b in found)
    out.table(columns, rows, as_talk=as_talk)


def _say_removed(
    found: list[tuple[Store, Blob]], removed: list[Forgotten], *, now: bool, dry_run: bool
) -> None:
    size = format_size(sum(blob.size for _, blob in found))
    blobs = counted(len(found), "blob")
    if dry_run:
        _show_victims(found, as_talk=False)
        out.line(f"Would remove {blobs} ({size}) {'for good' if now else 'to the trash'}.")
    elif now:
        out.line(f"Removed {blobs}, freed {format_size(sum(each.freed_size for each in removed))}.")
    else:
        out.line(f"Moved {blobs} ({size}) to the trash.")
        out.talk(
            "'smartcache undo --last' brings back what was moved, 'smartcache prune' frees it."
        )


def _removal(
    found: list[tuple[Store, Blob]], removed: list[Forgotten], *, now: bool, dry_run: bool
) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "to_trash": not now,
        "blobs": [
            {"digest": blob.digest, "size": blob.size, "root": store.root} for store, blob in found
        ],
        "removed": len(removed),
        "freed_size": sum(each.freed_size for each in removed),
    }


@command(
    "publish",
    examples=(
        ("smartcache publish --dry-run", "what everybody could read"),
        ("smartcache publish --home /srv/models", "let everybody read the models of /srv/models"),
        ("smartcache publish --off", "take it back"),
    ),
)
@click.option("--off", is_flag=True, help="Close the store to others again.")
@asks
@click.pass_obj
def publish_command(session: Session, *, off: bool, dry_run: bool, yes: bool) -> None:
    """Let every user of this machine read the blobs of the store.

    Nobody else can write, and nothing but blobs can be read. Others name the store in their
    settings (shared_stores) and get verified copies of what they need instead of downloads. A file
    that others cannot read stays private. What is added later is published too.
    """
    with session.store() as store:
        if off:
            _close_to_others(store, dry_run=dry_run)
            return
        plan = store.plan_publish()
        for warning in plan.warnings:
            out.warn(f"{warning}.")
        blobs = f"{counted(plan.blobs, 'blob')} ({format_size(plan.size)})"
        if not dry_run:
            if not plan.is_published:
                out.confirm(f"Let every user read {blobs} of {plan.root}?", yes=yes)
            plan.execute()
        verb = "could read" if dry_run else "can read"
        out.show(
            human=lambda: _say_published(plan, f"Every user {verb} {blobs} of {plan.root}."),
            document=lambda: {
                "dry_run": dry_run,
                "root": plan.root,
                "is_published": plan.is_published or not dry_run,
                "blobs": plan.blobs,
                "size": plan.size,
                "without_sha256": plan.unnamed,
                "closed_to_others": plan.closed,
                "changed": plan.changed,
                "warnings": plan.warnings,
            },
            ids=lambda: [plan.root],
        )


def _say_published(plan: PublishPlan, text: str) -> None:
    from smartcache.system import effective_user, user_name

    out.line(text)
    if plan.closed:
        out.line(f"Still private: {counted(plan.closed, 'blob')} (the file is closed to others).")
    if plan.changed:
        out.line(f"Left out: {counted(plan.changed, 'blob')} (changed: run 'smartcache verify').")
    if plan.unnamed:
        out.line(f"By digest only: {counted(plan.unnamed, 'blob')} (no sha256 is known).")
    owner = effective_user()
    out.talk(f'Others use it with shared_stores = ["{plan.root}"] in their config.toml')
    if owner != 0:
        out.talk(f'and shared_store_owners = ["{user_name(owner)}"], if they trust you.')


def _close_to_others(store: Store, *, dry_run: bool) -> None:
    was_published = store.is_published
    if was_published and not dry_run:
        store.unpublish()
    verb = "Would close" if dry_run else "Closed"
    text = f"{verb} {store.root} to others." if was_published else f"{store.root} is not published."
    out.show(
        human=lambda: out.line(text),
        document=lambda: {
            "dry_run": dry_run,
            "root": store.root,
            "is_published": store.is_published,
        },
        ids=lambda: [store.root],
    )
