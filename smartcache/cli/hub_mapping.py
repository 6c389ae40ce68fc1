"""{sha256: path} for scripts: `hub mapping`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, command
from smartcache.cli._failures import FAILED, BadUsageError
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._tables import Column
from smartcache.cli._words import counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import CacheMapping, ImportedMapping, MappedFile

_COLUMNS = (
    Column(title="SHA256"),
    Column(title="SIZE", right=True),
    Column(title="PATH", gives_way=True),
)


@command(
    "mapping",
    examples=(
        ("smartcache hub mapping --json", "{sha256: path}, for scripts"),
        ("smartcache hub mapping --output known.json", "with sizes, to a file"),
        ("smartcache hub mapping --import known.json", "hash what it names, and know it"),
    ),
)
@click.option("--output", type=FILE, metavar="FILE", help="Write it to a file, with sizes.")
@click.option(
    "--import", "source", type=FILE, metavar="FILE", help="Hash the files that a mapping names."
)
@click.pass_context
def mapping_command(ctx: click.Context, *, output: Path | None, source: Path | None) -> None:
    """Print or read {sha256: path} of everything known.

    That is every blob and every file of a known folder whose sha256 was computed and that has not
    changed since. Imported files are read, never changed; downloads can then use them.
    """
    from smartcache.hub import cache_mapping, import_mapping

    if output is not None and source is not None:
        raise BadUsageError("--output and --import cannot be used together", hint="Give one.")
    session = ctx.ensure_object(Session)
    if source is not None:
        with session.store(create=True) as store:
            found = import_mapping(store, source, progress=bars)
        _show_import(found)
        if found.refused:
            ctx.exit(FAILED)
        return
    if output is not None:
        with session.store() as store:
            _export(cache_mapping(store), output)
        return
    with session.stores() as stores:
        _print(cache_mapping(stores[0]) if stores else None)


def _print(known: CacheMapping | None) -> None:
    nothing: Mapping[str, Path] = {}
    out.show(
        human=lambda: _show_table(known),
        document=lambda: nothing if known is None else {f.sha256: f.path for f in known.files()},
        ids=lambda: nothing if known is None else known,
    )


def _show_table(known: CacheMapping | None) -> None:
    files = iter(()) if known is None else known.files()
    first = next(files, None)
    if first is None:
        out.line("No file is known by its sha256 yet.")
        return
    out.table(_COLUMNS, (_row(each) for each in chain((first,), files)))


def _row(file: MappedFile) -> list[str]:
    return [short(file.sha256), format_size(file.size), str(file.path)]


def _export(known: CacheMapping, output: Path) -> None:
    count = known.export_json(output)
    out.show(
        human=lambda: out.line(f"Wrote {counted(count, 'file')} to {output}."),
        document=lambda: {"path": output, "files": count},
        ids=lambda: [output],
    )


def _show_import(found: ImportedMapping) -> None:
    for each in found.refused:
        out.warn(f"{each.path or each.sha256}: {each.reason}")
    size = format_size(sum(each.size for each in found.files))
    refused = f"; {len(found.refused):,} were refused" if found.refused else ""
    out.show(
        human=lambda: out.line(
            f"Downloads know {counted(len(found.files), 'file')} ({size}){refused}."
        ),
        document=lambda: {"files": found.files, "refused": found.refused},
        ids=lambda: [each.sha256 for each in found.files],
    )
