"""Plans about parts of sets: artifacts to delete, packs to compact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smartcache.artifacts import bounds, compaction, writing
from smartcache.artifacts.engine import SetEngine, open_engine
from smartcache.artifacts.figures import SetInfo
from smartcache.artifacts.inspecting import find_key
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.sets import SetPlan, SetResult, SetVictim
from smartcache.errors import SmartcacheError
from smartcache.progress import Progress


def plan_delete(info: SetInfo, keys: Iterable[str]) -> SetPlan:
    """Plan to delete artifacts by their keys, or the beginnings of these.

    ArtifactNotFoundError, or BadKeyError for a beginning of several, before anything is done. Room
    comes back when a pack is half dead; what has to wait for that is no part of the result.
    """
    engine = open_engine(SetFolder.read(info.path))
    try:
        found = list(dict.fromkeys(find_key(engine, key) for key in keys))
        rows = engine.index.entries(found)
        size = sum(bounds.own_size(engine, entry) for entry in rows.values())
    finally:
        engine.release()
    victim = SetVictim(
        info=info, reason="deleted", artifacts=len(found), size=size,
        keys=tuple(map(key_text, found)),
    )  # fmt: skip
    return SetPlan(victims=(victim,), _execute=lambda _, progress: _delete(info, found, progress))


def _delete(info: SetInfo, keys: Sequence[bytes], progress: Progress) -> SetResult:
    engine = open_engine(SetFolder.read(info.path))
    try:
        count = writing.delete(engine, keys)
        engine.sync_all()
        engine.flush()
        freed = compaction.compact(engine, progress=progress).freed
    finally:
        engine.release()
    return SetResult(sets=0, artifacts=count, freed_size=freed)


def plan_compact(infos: Iterable[SetInfo], *, force: bool = False) -> SetPlan:
    """Plan to compact packs that are half dead; with `force` all that have anything dead."""
    victims = []
    warnings = []
    for info in infos:
        try:
            size = _dead(info, force=force)
        except (SmartcacheError, OSError) as error:
            warnings.append(f"{info.name}/{info.id} cannot be compacted: {error}")
            continue
        if size:
            victims.append(SetVictim(info=info, reason="dead", artifacts=0, size=size))
    return SetPlan(
        victims=tuple(victims), warnings=tuple(warnings),
        _execute=lambda plan, progress: _compact(plan, progress, force=force),
    )  # fmt: skip


def _dead(info: SetInfo, *, force: bool) -> int:
    engine = open_engine(SetFolder.read(info.path))
    try:
        packs = compaction.worth_compacting(engine, force=force)
        return sum(map(compaction.dead_size, packs))
    finally:
        engine.release()


def _compact(plan: SetPlan, progress: Progress, *, force: bool) -> SetResult:
    freed = 0
    problems = []
    for victim in plan.victims:
        try:
            engine: SetEngine = open_engine(SetFolder.read(victim.info.path))
            try:
                freed += compaction.compact(engine, force=force, progress=progress).freed
            finally:
                engine.release()
        except (SmartcacheError, OSError) as error:
            problems.append(f"{victim.info.path}: {error}")
    return SetResult(sets=0, artifacts=0, freed_size=freed, problems=tuple(problems))
