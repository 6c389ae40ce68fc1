"""Artifact sets as commands show them: which are meant, what they take, and their words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._session import Session
from smartcache.cli._words import ago, counted, short
from smartcache.errors import BadSetNameError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import (
        ArtifactSets,
        SetInfo,
        SetPlan,
        SetResult,
        SetVerifyReport,
        SetVictim,
        Shown,
        TensorSpec,
    )

MORE = "More is freed once more of a pack is dead: 'artifacts compact --force' does not wait."
_MOST_NAMED = 5
_USAGE = ("SET~", "ARTIFACTS>", "LIVE>", "ON DISK>", "CAN BE FREED>", "USED>")
_VICTIMS = ("SET~", "ARTIFACTS>", "FREES>", "WHY")
_REASONS = {
    "removed": "the whole set",
    "deleted": "asked for",
    "expired": "past their time",
    "unused": "not used for long",
    "over size": "over the size",
    "dead": "space of what is gone",
}


@contextmanager
def all_sets(session: Session) -> Iterator[ArtifactSets]:
    """Open the store for its sets; where there is none yet, say so and give no set."""
    from smartcache.cache import sets_of

    with session.store_as_it_is() as store:
        yield sets_of(store)


@contextmanager
def sets_to_fill(session: Session, *, create: bool) -> Iterator[ArtifactSets]:
    """Open the store for its sets, made if it may be."""
    if not create:
        with all_sets(session) as sets:
            yield sets
        return
    with session.cache() as cache:
        yield cache.sets


def chosen(sets: ArtifactSets, words: Sequence[str]) -> list[SetInfo]:
    """Return the sets that words name, each once; all of them without words."""
    if not words:
        return sets.infos()
    found = {info.path: info for word in words for info in named(sets, word)}
    return list(found.values())


def named(sets: ArtifactSets, word: str) -> list[SetInfo]:
    """Return the sets that one word names: a name stands for all of it, an id for one."""
    found = sets.find(word)
    if len(found) > 1 and any(info.name != word for info in found):
        raise several(word, found)
    return found


def one(sets: ArtifactSets, word: str) -> SetInfo:
    """Return the one set that a word names; BadSetNameError if there are several."""
    found = sets.find(word)
    if len(found) > 1:
        raise several(word, found)
    return found[0]


def several(word: str, found: Sequence[SetInfo]) -> BadSetNameError:
    """Return the error for a word that does not say which set is meant."""
    names = ", ".join(label(info) for info in found[:_MOST_NAMED])
    more = " ..." if found[_MOST_NAMED:] else ""
    return BadSetNameError(
        f"{word!r} stands for {len(found)} sets", hint=f"Name one of them: {names}{more}"
    )


def label(info: SetInfo | SetVerifyReport) -> str:
    """Return a set as people see it, short, and as commands take it."""
    return f"{info.name}/{short(info.id)}"


def entry(info: SetInfo) -> dict[str, object]:
    """Return a set for programs."""
    return {
        **picked(info, "name id path created_at used_at artifacts live on_disk options"),
        "fingerprint": None if info.fingerprint is None else info.fingerprint.to_json(),
        "problem": info.problem,
    }


def readable(value: object) -> object:
    """Return a value of an artifact as JSON can show it."""
    from smartcache.artifacts import TensorSpec, shown

    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else repr(key): readable(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [readable(item) for item in value]
    if isinstance(value, TensorSpec):
        return {"kind": value.kind, "dtype": value.dtype, "shape": value.shape}
    return value.hex() if isinstance(value, (bytes, bytearray)) else shown(value)


def warn_of_problems(infos: Iterable[SetInfo]) -> None:
    """Say which sets cannot be read, and what helps."""
    unread = [info for info in infos if info.problem]
    for info in unread:
        out.warn(f"{label(info)}: {info.problem}")
    for cure in dict.fromkeys(info.cure for info in unread if info.cure):
        out.talk(cure)


# what they hold


class Field(NamedTuple):
    """A field that artifacts of a set have."""

    name: str
    kind: str
    shapes: list[str]
    """Of a tensor: all that there are."""


def fields_of(kinds: Iterable[tuple[Shown, ...]]) -> list[Field]:
    """Return the fields that artifacts have."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for part in (part for parts in kinds for part in parts):
        spec = part.tensor
        what = part.problem or ("values" if spec is None else f"{spec.kind} {dtype_of(spec)}")
        shapes = found.setdefault((part.name, what), {})
        if spec is not None:
            shapes[shape_of(spec)] = None
    return [Field(name, what, list(shapes)) for (name, what), shapes in found.items()]


def dtype_of(spec: TensorSpec) -> str:
    """Return the name of a dtype as people write it."""
    if spec.kind == "torch":
        return spec.dtype
    import numpy as np

    dtype = np.dtype(spec.dtype)
    return dtype.name if dtype.isnative else spec.dtype


def shape_of(spec: TensorSpec) -> str:
    """Return a shape as people write it."""
    return f"[{', '.join(map(str, spec.shape))}]"


# what they take


def usage_rows(usage: Sequence[tuple[SetInfo, int]]) -> list[list[str]]:
    """Return the lines of `df` about sets; none without any."""
    if not usage:
        return []
    sets = counted(len(usage), "set")
    artifacts = counted(sum(info.artifacts for info, _ in usage), "artifact")
    on_disk, live = sum(info.on_disk for info, _ in usage), sum(info.live for info, _ in usage)
    freeable = sum(size for _, size in usage)
    return [
        ["  artifact sets", format_size(on_disk), f"{sets}, {artifacts}"],
        ["    live", format_size(live), "what can still be read"],
        ["    to be freed", format_size(freeable), "past its time, or dead"],
    ]


def show_usage(usage: Iterable[tuple[SetInfo, int]]) -> None:
    """Show every set, the largest first."""
    rows = (
        [
            label(info),
            f"{info.artifacts:,}",
            format_size(info.live),
            format_size(info.on_disk),
            format_size(freeable),
            "-" if info.used_at is None else ago(info.used_at),
        ]
        for info, freeable in sorted(usage, key=lambda each: -each[0].on_disk)
    )
    out.table(_USAGE, rows)


def usage_documents(usage: Iterable[tuple[SetInfo, int]]) -> list[dict[str, object]]:
    """Return what each set takes, for programs."""
    return [
        {
            "name": info.full_name,
            **picked(info, "artifacts live on_disk"),
            "reclaimable": freeable,
            "used_at": info.used_at,
            "problem": info.problem,
        }
        for info, freeable in usage
    ]


# what verifying has found


def say_damage(reports: Sequence[SetVerifyReport]) -> None:
    """Name every damage, and what helps against it."""
    for report in reports:
        for text in report.damage:
            out.line(f"  {label(report)}: {text}")
        if report.damaged:
            more = len(report.damaged) - _MOST_NAMED
            others = f" and {more:,} more" if more > 0 else ""
            out.line(f"    {', '.join(report.damaged[:_MOST_NAMED])}{others}")
    if not any(report.damage for report in reports):
        out.line("No damage was found.")
    for cure in dict.fromkeys(report.cure for report in reports if report.cure):
        out.talk(cure)


def damaged_sets(reports: Iterable[SetVerifyReport]) -> list[str]:
    """Return the whole names of the sets in which something is damaged."""
    return [f"{report.name}/{report.id}" for report in reports if report.damage]


def report_documents(reports: Iterable[SetVerifyReport]) -> list[dict[str, object]]:
    """Return what verifying has found, for programs."""
    return [
        {
            "name": f"{report.name}/{report.id}",
            "items": report.artifacts,
            **picked(report, "read_size damage damaged cure"),
        }
        for report in reports
    ]


# plans


def show_plan(plan: SetPlan, *, as_talk: bool) -> None:
    """Show what a plan would free, set by set."""
    rows = (
        [
            label(victim.info),
            f"{victim.artifacts:,}" if victim.artifacts else "-",
            format_size(victim.size),
            _REASONS[victim.reason],
        ]
        for victim in plan.victims
    )
    out.table(_VICTIMS, rows, as_talk=as_talk)


def what_goes(plan: SetPlan) -> str:
    """Return "2 sets with 30 artifacts", "30 artifacts", or "" where only dead room goes."""
    sets = sum(victim.reason == "removed" for victim in plan.victims)
    artifacts = counted(plan.artifacts, "artifact")
    if not sets:
        return artifacts if plan.artifacts else ""
    return f"{counted(sets, 'set')} with {artifacts}" if plan.artifacts else counted(sets, "set")


def plan_document(plan: SetPlan, result: SetResult | None) -> dict[str, object]:
    """Return a plan, and what came of it, for programs."""
    return {
        "dry_run": result is None,
        "victims": [_victim(victim) for victim in plan.victims],
        "planned_size": plan.freed_size,
        "sets": 0 if result is None else result.sets,
        "artifacts": 0 if result is None else result.artifacts,
        "freed_size": 0 if result is None else result.freed_size,
        "problems": () if result is None else result.problems,
        "warnings": plan.warnings,
    }


def _victim(victim: SetVictim) -> dict[str, object]:
    return {"set": victim.info.full_name, **picked(victim, "reason artifacts size keys")}
