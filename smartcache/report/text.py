"""A report in words: sections of sentences and tables, for whoever prints them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smartcache.report.figures import Across, Disk, Report, SharedFile, Sums
from smartcache.report.naming import from_home, left_words
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import SetInfo

MOST_ROWS = 20
_MOST_FILES = 10
_MOST_PATHS = 4
_ENOUGH_OF_ID = 12
_SUMS = ("FILES", "SIZE", "ON DISK", "SAVED", "DUPLICATE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, a table (numbers first, then what they are about), and sentences below it."""

    title: str
    columns: tuple[str, ...] = ()
    """All but the last are numbers."""
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def sections(report: Report, *, dedup: str, allowing: str = "") -> Iterator[Section]:
    """Go through the parts of a report; a part with nothing to say is left out.

    `dedup` is the command that frees the duplicates in the folders of this report, `allowing` the
    one that includes what it leaves alone without an option.
    """
    total = report.total
    yield Section(
        title="All folders",
        columns=(*_SUMS, ""),
        rows=(_sums(total, f"{_count(len(report.folders), 'folder')}"),),
        notes=tuple(_summary(report, dedup, allowing)),
    )
    if report.disks:
        yield _disks(report.disks)
    yield _table("By program", "PROGRAM", report.programs)
    yield _table("By kind of file", "KIND", report.kinds)
    if report.repos:
        yield _table("By repo", "REPO", report.repos)
    if report.most_shared:
        yield _most_shared(report.most_shared)
    if report.across:
        yield _across(report.across, report.elsewhere)
    if report.artifact_sets:
        yield _artifact_sets(report.artifact_sets)


def _summary(report: Report, dedup: str, allowing: str) -> Iterator[str]:
    total = report.total
    if total.saved:
        yield f"Sharing saves {format_size(total.saved)}: files with several names, stored once."
    else:
        yield "No file is shared yet."
    if total.freeable:
        size = format_size(total.freeable)
        yield f"{dedup} would free {size} more."
    elif report.left or report.elsewhere:
        yield "Links could free nothing here."
    elif not report.uncompared:
        rest = "" if report.prunable else ": there is nothing to free"
        yield f"No file is here twice{rest}."
    yield from left_words([each for each in report.left if each.options])
    if allowing:
        yield f"Run {allowing} to include that."
    yield from left_words([each for each in report.left if not each.options])
    if report.uncompared:
        files = _count(report.uncompared, "file")
        yield f"{files} never compared with others of the same size: 'smartcache scan' would."
    if report.prunable:
        size = format_size(report.prunable)
        yield f"{size} can be freed. Run 'smartcache prune'."
    if report.damaged:
        more = len(report.damaged) - MOST_ROWS
        named = ", ".join(f"{each.path.name} {each.reason}" for each in report.damaged[:MOST_ROWS])
        named += f" and {more:,} more" if more > 0 else ""
        yield f"Damaged: {named}. Download again to repair."


def _disks(disks: tuple[Disk, ...]) -> Section:
    return Section(
        title="Room on disk",
        columns=("FREE", "PRUNE FREES", "DISK"),
        rows=tuple(
            (format_size(each.free), format_size(each.prunable), str(each.path)) for each in disks
        ),
    )


def _table(title: str, label: str, rows: tuple[Sums, ...]) -> Section:
    more = len(rows) - MOST_ROWS
    return Section(
        title=title,
        columns=(*_SUMS, label),
        rows=tuple(_sums(row, _label(row.label)) for row in rows[:MOST_ROWS]),
        notes=(f"... and {more:,} more; --json has them all",) if more > 0 else (),
    )


def _sums(row: Sums, label: str) -> tuple[str, ...]:
    sizes = (row.logical, row.physical, row.saved, row.freeable)
    return (f"{row.files:,}", *map(format_size, sizes), label)


def _label(label: str) -> str:
    """Return a label; a folder of no program is its own, and is shown from the home."""
    return from_home(Path(label)) if label.startswith("/") else label


def _most_shared(files: tuple[SharedFile, ...]) -> Section:
    return Section(
        title="Shared most",
        columns=("NAMES", "SIZE", "SAVED", "FILE"),
        rows=tuple(
            (f"{len(each.paths):,}", format_size(each.size), format_size(each.saved), each.label)
            for each in files[:_MOST_FILES]
        ),
    )


def _across(groups: tuple[Across, ...], elsewhere: int) -> Section:
    return Section(
        title="Duplicated across filesystems",
        columns=("SIZE", "ELSEWHERE", "FILE"),
        rows=tuple(row for each in groups[:_MOST_FILES] for row in _across_rows(each)),
        notes=(f"{format_size(elsewhere)} that links cannot free: they need one filesystem.",),
    )


def _across_rows(group: Across) -> Iterator[tuple[str, ...]]:
    yield format_size(group.size), format_size(group.elsewhere), group.label
    for path in group.paths[:_MOST_PATHS]:
        yield "", "", f"at {from_home(path)}"
    if len(group.paths) > _MOST_PATHS:
        yield "", "", f"and at {len(group.paths) - _MOST_PATHS:,} more"


def _artifact_sets(sets: tuple[tuple[SetInfo, int], ...]) -> Section:
    reclaimable = sum(freeable for _, freeable in sets)
    artifacts = _count(sum(info.artifacts for info, _ in sets), "artifact")
    size = format_size(sum(info.on_disk for info, _ in sets))
    notes = [f"{artifacts} in {_count(len(sets), 'set')}, {size} on disk."]
    if reclaimable:
        notes.append(f"'smartcache prune' would free {format_size(reclaimable)} of that.")
    if len(sets) > MOST_ROWS:
        notes.insert(0, f"... and {len(sets) - MOST_ROWS:,} more; --json has them all")
    return Section(
        title="Computed tensors",
        columns=("ARTIFACTS", "LIVE", "ON DISK", "CAN BE FREED", "SET"),
        rows=tuple(
            (
                f"{info.artifacts:,}",
                *map(format_size, (info.live, info.on_disk, freeable)),
                _set_label(info),
            )
            for info, freeable in sets[:MOST_ROWS]
        ),
        notes=tuple(notes),
    )


def _set_label(info: SetInfo) -> str:
    """Return the name of a set with enough of its id to name it by."""
    problem = f": {info.problem}" if info.problem else ""
    return f"{info.name}/{info.id[:_ENOUGH_OF_ID]}{problem}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
