"""Listing sets of artifacts: `artifacts ls`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import all_sets, chosen, entry, warn_of_problems
from smartcache.cli._command import command
from smartcache.cli._filters import Field, Fields
from smartcache.cli._output import out
from smartcache.cli._session import Session
from smartcache.cli._words import ago, counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import Difference, SetInfo

_MOST_DIFFERENCES = 8
_FIELDS: Fields[SetInfo] = Fields(
    {
        "name": Field("word", lambda info: info.name),
        "size": Field("size", lambda info: info.on_disk),
        "live": Field("size", lambda info: info.live),
        "artifacts": Field("number", lambda info: info.artifacts),
        "used": Field("time", lambda info: info.used_at),
        "created": Field("time", lambda info: info.created_at),
    },
    "Write size>1GB, live>1GB, artifacts<100, used>30d, created<1w or name=NAME.",
)
_COLUMNS = ("SET~", "ID", "ARTIFACTS>", "LIVE>", "ON DISK>", "USED>")
_LONG_AGO = datetime.fromtimestamp(0, UTC)


@command(
    "ls",
    examples=(
        ("smartcache artifacts ls", "all sets by name, and how those of one name differ"),
        ("smartcache artifacts ls sdxl-latents", "those of one name"),
        ("smartcache artifacts ls --sort size --limit 5", "the largest"),
        ('smartcache artifacts rm $(smartcache artifacts ls -q --filter "used>90d")', "ids for rm"),
    ),
)
@click.argument("words", nargs=-1, metavar="[NAME]...")
@click.option(
    "--filter", "tests", type=_FIELDS.condition, multiple=True, metavar="EXPR",
    help="Only those that match: name, size, live, artifacts, used, created.",
)  # fmt: skip
@click.option(
    "--sort", type=_FIELDS.order, default="name", metavar="KEY[:DIR]", show_default=True,
    help="By name, size, live, artifacts, used or created; :asc or :desc.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most N.")
@click.pass_obj
def ls_command(
    session: Session,
    *,
    words: tuple[str, ...],
    tests: tuple[Callable[[SetInfo], bool], ...],
    sort: tuple[str, bool],
    limit: int | None,
) -> None:
    """List the sets of artifacts, and how sets of one name differ.

    A set belongs to a name and a fingerprint: what its artifacts depend on. LIVE is what can
    still be read, ON DISK all packs, with what is dead in them. Sets of one name are each compared
    with the one that was used last.
    """
    with all_sets(session) as sets:
        infos = chosen(sets, words)
    rows = [info for info in infos if all(test(info) for test in tests)]
    rows = _FIELDS.sorted(rows, sort)[:limit]
    warn_of_problems(rows)
    out.show(
        human=lambda: _show(rows, is_any=bool(infos)),
        document=lambda: {
            "sets": [_entry(info, infos) for info in rows],
            "artifacts": sum(info.artifacts for info in rows),
            "live": sum(info.live for info in rows),
            "on_disk": sum(info.on_disk for info in rows),
        },
        ids=lambda: [info.full_name for info in rows],
    )


def _show(rows: Sequence[SetInfo], *, is_any: bool) -> None:
    if not rows:
        out.line("No set matches." if is_any else "There are no artifacts.")
        return
    out.table(_COLUMNS, map(_cells, rows))
    for info, other, differences in _compared(rows):
        out.line()
        out.line(f"{info.name} {short(info.id)} differs from {short(other.id)}:")
        for each in differences[:_MOST_DIFFERENCES]:
            out.line(f"  {each}")
        if differences[_MOST_DIFFERENCES:]:
            out.line(f"  ... and {len(differences) - _MOST_DIFFERENCES:,} more; --json has all")
    artifacts = counted(sum(info.artifacts for info in rows), "artifact")
    size = format_size(sum(info.on_disk for info in rows))
    out.talk(f"{counted(len(rows), 'set')}, {artifacts}, {size} on disk.")


def _cells(info: SetInfo) -> list[str]:
    return [
        info.name,
        short(info.id),
        "?" if info.problem else f"{info.artifacts:,}",
        "?" if info.problem else format_size(info.live),
        format_size(info.on_disk),
        "-" if info.used_at is None else ago(info.used_at),
    ]


def _compared(rows: Sequence[SetInfo]) -> Iterator[tuple[SetInfo, SetInfo, list[Difference]]]:
    """Go through sets of one name, each with the last used of that name and what differs."""
    known = sorted((row for row in rows if row.fingerprint is not None), key=lambda row: row.name)
    for _, group in groupby(known, key=lambda row: row.name):
        same = list(group)
        last = _last_used(same)
        for info in same:
            if info is not last:
                yield info, last, _differences(info, last)


def _last_used(infos: Sequence[SetInfo]) -> SetInfo:
    return max(infos, key=lambda info: (info.used_at or _LONG_AGO, info.created_at or _LONG_AGO))


def _differences(info: SetInfo, other: SetInfo) -> list[Difference]:
    if info.fingerprint is None or other.fingerprint is None:
        return []
    return info.fingerprint.differences(other.fingerprint)


def _entry(info: SetInfo, infos: Sequence[SetInfo]) -> dict[str, object]:
    same = [each for each in infos if each.name == info.name and each.fingerprint is not None]
    last = _last_used(same) if same else info
    return {
        **entry(info),
        "differs_from": None if last is info else last.id,
        "differences": [
            {"path": each.path, "mine": repr(each.mine), "theirs": repr(each.theirs)}
            for each in _differences(info, last)
        ],
    }
