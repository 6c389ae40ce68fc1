"""Sets of artifacts as `df`, `prune` and `verify` see them, beside the blobs of the store.

A set that cannot be read has a problem of its own, and stands in the way of no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from smartcache.artifacts.engine import SetEngine, open_engine
from smartcache.artifacts.figures import SetInfo
from smartcache.artifacts.rows import Pack
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.sets import ArtifactSets, SetPlan
from smartcache.artifacts.verifying import SetVerifyReport
from smartcache.errors import SetFormatError, SmartcacheError
from smartcache.progress import Progress, silent
from smartcache.store.holder import (
    Freeable,
    HolderPlan,
    HolderReport,
    HolderResult,
    HolderUsage,
    Part,
    PartReport,
)

REBUILD: Final = "'smartcache artifacts verify --rebuild' makes an index again from the packs."
COMPUTE: Final = "What is damaged counts as missing and is computed again when needed."


def name_of(info: SetInfo) -> str:
    """Return the whole name of a set, by which every command finds it."""
    return f"{info.name}/{info.id}"


class SetsHolder:
    """All sets of a store, as one `Holder`."""

    noun = "artifact set"
    item = "artifact"

    def __init__(self, sets: ArtifactSets) -> None:
        self._sets = sets

    def usage(self) -> HolderUsage:
        """Return what each set takes; what is past its time counts as wanted until it goes."""
        return HolderUsage(parts=tuple(self._part(info) for info in self._sets.infos()))

    def _part(self, info: SetInfo) -> Part:
        reclaimable, problem = 0, info.problem
        try:
            if not problem:
                reclaimable = self._sets.plan_prune([info]).freed_size
        except (SmartcacheError, OSError) as error:
            problem = str(error)
        return Part(
            name=name_of(info), items=info.artifacts, live=info.live, on_disk=info.on_disk,
            reclaimable=reclaimable, used_at=info.used_at, problem=problem,
        )  # fmt: skip

    def plan_prune(self) -> HolderPlan:
        """Plan to delete what is past its time and to compact: no artifact that is wanted goes."""
        plans: list[SetPlan] = []
        warnings: list[str] = []
        for info in self._sets.infos():
            try:
                if info.problem:
                    warnings.append(f"{name_of(info)} cannot be pruned: {info.problem}")
                else:
                    plans.append(self._sets.plan_prune([info]))
            except (SmartcacheError, OSError) as error:
                warnings.append(f"{name_of(info)} cannot be pruned: {error}")
        return HolderPlan(
            victims=tuple(
                Freeable(
                    name=name_of(victim.info), reason=victim.reason,
                    items=victim.artifacts, size=victim.size,
                )
                for plan in plans
                for victim in plan.victims
            ),
            warnings=tuple(warnings),
            _execute=lambda progress: _execute(plans, progress),
        )  # fmt: skip

    def verify(self, *, full: bool = False, progress: Progress = silent) -> HolderReport:
        """Look at the index and the packs of every set; with `full` compare every checksum."""
        infos = self._sets.infos()
        if not full:
            return HolderReport(parts=tuple(_look_at(info) for info in infos))
        reports = self._sets.verify(infos, progress=progress)
        return HolderReport(parts=tuple(map(told, infos, reports)))


def _execute(plans: list[SetPlan], progress: Progress) -> HolderResult:
    results = [plan.execute(progress) for plan in plans if plan.victims]
    return HolderResult(
        items=sum(result.artifacts for result in results),
        freed_size=sum(result.freed_size for result in results),
        problems=tuple(text for result in results for text in result.problems),
    )


def _look_at(info: SetInfo) -> PartReport:
    """Check what shows without reading artifacts: the index, and size and header of each pack."""
    try:
        engine = open_engine(SetFolder.read(info.path))
    except (SmartcacheError, OSError) as error:
        cure = error.hint if isinstance(error, SmartcacheError) else ""
        return PartReport(name=name_of(info), damage=(str(error),), cure=cure)
    try:
        damage = list(_damage(engine))
    except (SmartcacheError, OSError) as error:
        damage = [str(error)]
    finally:
        engine.release()
    return PartReport(
        name=name_of(info),
        items=info.artifacts,
        damage=tuple(damage),
        cure=REBUILD if damage else "",
    )


def _damage(engine: SetEngine) -> Iterator[str]:
    if not engine.index.is_sound():
        yield "its index is damaged"
        return
    for pack in engine.index.packs().values():
        problem = _problem(engine, pack)
        if problem and engine.index.pack(pack.number) is not None:  # else it was compacted just now
            yield problem


def _problem(engine: SetEngine, pack: Pack) -> str:
    """Say what is wrong with a pack; empty: nothing that shows."""
    try:
        size = engine.packs[pack.number].size
    except FileNotFoundError:
        return f"pack {pack.number} is missing"
    except (OSError, SetFormatError) as error:
        return f"pack {pack.number}: {error}"
    short = pack.watermark - size
    return f"pack {pack.number} is {short:,} bytes too short" if short > 0 else ""


def told(info: SetInfo, report: SetVerifyReport) -> PartReport:
    """Return in words what verifying a set has found."""
    damage = []
    if not report.is_index_sound:
        damage.append(info.problem or "its index is damaged")
    damage += [f"pack {number} is missing or not a pack" for number in report.missing_packs]
    if report.damaged:
        some = "artifact is" if len(report.damaged) == 1 else "artifacts are"
        damage.append(f"{len(report.damaged):,} {some} damaged")
    cure = "" if not damage else COMPUTE if report.is_index_sound else info.cure or REBUILD
    return PartReport(
        name=name_of(info), items=report.artifacts, read_size=report.read_size,
        damage=tuple(damage), damaged=tuple(report.damaged), cure=cure,
    )  # fmt: skip
