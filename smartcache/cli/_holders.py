"""What is in a store besides blobs, as `df`, `prune`, `verify` and `eject` show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from smartcache.cli._output import out
from smartcache.cli._tables import Column
from smartcache.cli._words import ago, counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.store.holder import (
        Freeable,
        Holder,
        HolderPlan,
        HolderReport,
        HolderResult,
        HolderUsage,
        Part,
    )
    from smartcache.store.store import Store

_MOST_KEYS = 5
_PARTS = (
    Column(title="SET", gives_way=True),
    Column(title="ARTIFACTS", right=True),
    Column(title="LIVE", right=True),
    Column(title="ON DISK", right=True),
    Column(title="CAN BE FREED", right=True),
    Column(title="USED", right=True),
)
_VICTIMS = (
    Column(title="SET", gives_way=True),
    Column(title="ARTIFACTS", right=True),
    Column(title="FREES", right=True),
    Column(title="WHY"),
)
_REASONS = {"expired": "past their time", "dead": "room of what is gone"}


def holders(stores: Sequence[Store]) -> list[Holder]:
    """Return what keeps something besides blobs; it all lies in the first of the volumes."""
    from smartcache.cache import holders_of

    return holders_of(stores[0]) if stores else []


def prunable(stores: Sequence[Store]) -> int:
    """Return what `prune` would free now, on all volumes."""
    from smartcache.cache import prunable_size

    return prunable_size(stores[0]) if stores else 0


def say_prunable(size: int) -> None:
    """Say what only smartcache holds and nobody wants, and how it is freed; nothing for nothing."""
    if size:
        out.paragraph(
            f"{format_size(size)} are held only by smartcache; 'smartcache prune' frees them."
        )


def shortened_name(name: str) -> str:
    """Return the name of a part without most of its hash."""
    head, _, tail = name.rpartition("/")
    return f"{head}/{short(tail)}"


# df


def usage_rows(usages: Iterable[HolderUsage]) -> list[list[str]]:
    """Return the lines about what is kept besides blobs; none without any."""
    rows = []
    for usage in usages:
        if usage.parts:
            sets, artifacts = counted(len(usage.parts), "set"), counted(usage.items, "artifact")
            rows += [
                ["  artifact sets", format_size(usage.on_disk), f"{sets}, {artifacts}"],
                ["    live", format_size(usage.live), "records that are wanted"],
                ["    to be freed", format_size(usage.reclaimable), "past its time, or dead"],
            ]
    return rows


def show_parts(usage: HolderUsage) -> None:
    """Show every part."""
    rows = (
        [
            shortened_name(part.name),
            f"{part.items:,}",
            format_size(part.live),
            format_size(part.on_disk),
            format_size(part.reclaimable),
            "-" if part.used_at is None else ago(part.used_at),
        ]
        for part in sorted(usage.parts, key=lambda part: -part.on_disk)
    )
    out.table(_PARTS, rows)


def warn_of_parts(usages: Iterable[HolderUsage]) -> None:
    """Name the parts of which nothing is known."""
    for part in (part for usage in usages for part in usage.parts):
        if part.problem:
            out.warn(f"{shortened_name(part.name)}: {part.problem}")


def part_document(part: Part) -> dict[str, object]:
    """Return a part for programs."""
    return {
        "name": part.name,
        "artifacts": part.items,
        "live": part.live,
        "on_disk": part.on_disk,
        "reclaimable": part.reclaimable,
        "used_at": part.used_at,
        "problem": part.problem,
    }


# prune


def show_victims(plans: Iterable[HolderPlan], *, as_talk: bool) -> None:
    """Show what would be freed in the parts."""
    victims: list[Freeable] = [victim for plan in plans for victim in plan.victims]
    rows = (
        [
            shortened_name(victim.name),
            f"{victim.items:,}" if victim.items else "-",
            format_size(victim.size),
            _REASONS.get(victim.reason, victim.reason),
        ]
        for victim in victims
    )
    out.table(_VICTIMS, rows, as_talk=as_talk)


def prune_document(
    plans: Sequence[HolderPlan], results: Sequence[HolderResult]
) -> dict[str, object]:
    """Return what is freed in the parts, for programs."""
    return {
        "victims": [
            {
                "name": victim.name,
                "reason": victim.reason,
                "artifacts": victim.items,
                "size": victim.size,
            }
            for plan in plans
            for victim in plan.victims
        ],
        "planned_size": sum(plan.freed_size for plan in plans),
        "removed": sum(result.items for result in results),
        "freed_size": sum(result.freed_size for result in results),
        "problems": [text for result in results for text in result.problems],
    }


# verify


def say_parts(report: HolderReport) -> None:
    """Name every damage, and what helps against it."""
    for part in report.parts:
        for text in part.damage:
            out.line(f"  {shortened_name(part.name)}: {text}")
        if part.damaged:
            more = len(part.damaged) - _MOST_KEYS
            others = f" and {more:,} more" if more > 0 else ""
            out.line(f"    {', '.join(part.damaged[:_MOST_KEYS])}{others}")
    if not report.has_damage:
        out.line("No damage was found.")
    for cure in dict.fromkeys(part.cure for part in report.parts if part.cure):
        out.talk(cure)
