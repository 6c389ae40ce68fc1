"""All sets of a store: opened, listed, removed, and kept within a bound together.

`ArtifactSets` is what the rest of smartcache knows of artifacts. Listing changes nothing. A set
that cannot be read is listed with its problem, and stands in nobody's way.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from smartcache.artifacts.artifactset import ArtifactSet, SetInfo, describe
from smartcache.artifacts.engine import compact, recover, write
from smartcache.artifacts.engine.compact import Victim
from smartcache.artifacts.engine.engine import Engine, closed_here, engine_of
from smartcache.artifacts.engine.far import Far
from smartcache.artifacts.engine.recover import Rebuilt, SetVerifyReport
from smartcache.artifacts.inspect import ArtifactInfo, Shown, find_key, inspect, structures
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.memory import Memory
from smartcache.artifacts.setfolder import (
    Fingerprint,
    Options,
    SetFolder,
    check_folder,
    check_name,
    is_id,
)
from smartcache.artifacts.values.compression import Rule, check_rule, need_packages
from smartcache.errors import ArtifactError, BadSetNameError, SetFormatError, SmartcacheError
from smartcache.progress import Progress, silent
from smartcache.system.kernel import allocated_bytes
from smartcache.system.locks import store_lock

_REMOVED = re.compile(r"\.removed-[0-9a-f]{32}-[0-9a-f]{8}")
_UNASKED = 256 << 20
"""Bytes that a process writes to a set at most before it measures all sets together again."""
_LISTED = "'smartcache artifacts ls' shows what is there."
_PRUNED = 1 / 64
"""Of a pack: so much must be dead for `prune` to copy the rest of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetVictim:
    """Artifacts of one set that would go, or all of it."""

    info: SetInfo
    reason: str
    artifacts: int
    size: int
    """Bytes on the disk that it is expected to give back."""
    keys: tuple[str, ...] = ()
    """Those of the artifacts; empty: the whole set, or nothing but dead records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPlan:
    """What would be removed from sets; `execute` reports what was."""

    victims: tuple[SetVictim, ...]
    warnings: tuple[str, ...] = ()
    _execute: Callable[[SetPlan, Progress], SetResult] = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """The bytes that are expected to come back."""
        return sum(victim.size for victim in self.victims)

    @property
    def artifacts(self) -> int:
        """How many artifacts would go."""
        return sum(victim.artifacts for victim in self.victims)

    def execute(self, progress: Progress = silent) -> SetResult:
        """Remove it, each looked at again right before."""
        return self._execute(self, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """What was removed."""

    sets: int = 0
    artifacts: int = 0
    freed_size: int = 0
    """What the filesystem has given back."""
    problems: tuple[str, ...] = ()


class ArtifactSets:
    """The sets in one folder."""

    def __init__(
        self,
        root: str | Path,
        *,
        threads: int = 2,
        max_size: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] | None = None,
        far: Far | None = None,
    ) -> None:
        """Take the folder; `clock` is for tests, in place of the time of day.

        `far` says how packs are read that lie in tiers.
        """
        self.root = Path(root)
        self._clock = clock
        self._threads = min(threads, 2)
        self._max_size = max_size
        self._ttl = ttl
        self._far = far

    def open(  # noqa: PLR0913 - a set has so many options
        self,
        name: str,
        fingerprint: Mapping[str, object] | Fingerprint,
        *,
        max_size: float | None = None,
        ttl: float | timedelta | None = None,
        evictable: bool | None = None,
        durable: bool | None = None,
        unused_for: float | timedelta | None = None,
        compression: Rule | None = None,
        memory: float | str | Memory | None = None,
        read_only: bool = False,
    ) -> ArtifactSet:
        """Open the set of a name and a fingerprint, made if it is not there.

        Options that are given are kept with the set; the others stay as they are. `math.inf` takes
        a `max_size`, a `ttl` or an `unused_for` back. `memory` is of this process alone. With
        `read_only` nothing is written, not even when artifacts are used: it works on a read-only
        filesystem, and with the set of another user.
        """
        made = fingerprint if isinstance(fingerprint, Fingerprint) else Fingerprint.of(fingerprint)
        if read_only:
            path = self.root / check_name(name) / made.id(name)
            if not path.exists():
                hint = f"Open it without read_only to make it; {_LISTED}"
                message = f"There is no set {name!r} with this fingerprint in {self.root}"
                raise SetFormatError(message, hint=hint, path=path)
            return self._opened(SetFolder.read(path, read_only=True), memory, read_only=True)
        if compression is not None:
            check_rule(compression)
            need_packages(compression)
        given = {
            "max_size": max_size, "evictable": evictable, "durable": durable,
            "ttl": ttl.total_seconds() if isinstance(ttl, timedelta) else ttl,
            "unused_for": (
                unused_for.total_seconds() if isinstance(unused_for, timedelta) else unused_for
            ),
            "compression": dict(compression) if isinstance(compression, Mapping) else compression,
        }  # fmt: skip
        changes = {
            key: None if value == math.inf else value
            for key, value in given.items()
            if value is not None
        }
        folder = SetFolder.make(self.root, name, made, replace(Options(), **changes))  # type: ignore[arg-type]
        folder = folder.with_options(replace(folder.options, **changes))  # type: ignore[arg-type]
        return self._opened(folder, memory)

    def open_id(self, info: SetInfo) -> ArtifactSet:
        """Open a set that is there."""
        return self._opened(SetFolder.read(info.path), None)

    def _opened(
        self, folder: SetFolder, memory: float | str | Memory | None, *, read_only: bool = False
    ) -> ArtifactSet:
        most = None if read_only else self._max_size
        if memory is not None and not isinstance(memory, Memory):
            memory = Memory(memory)
        return ArtifactSet(
            folder, threads=self._threads, longest=self._ttl,
            make_room=None if most is None else self.make_room,
            room_step=min(_UNASKED, (most or 0) // 16), read_only=read_only, memory=memory,
            clock=self._clock, elsewhere=self._far,
        )  # fmt: skip

    def _engine(self, path: Path) -> AbstractContextManager[Engine]:
        return engine_of(path, clock=self._clock, far=self._far)

    # looking

    def folders(self) -> list[Path]:
        """Return the folders of all sets, in order; what a killed removal has left is cleared."""
        found = []
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.root)):
                with suppress(NotADirectoryError, FileNotFoundError):
                    inner = sorted(os.listdir(self.root / name))
                    found += [self.root / name / each for each in inner if is_id(each)]
                    for each in filter(_REMOVED.fullmatch, inner):
                        _clear(self.root / name / each)
        return found

    def infos(self, name: str | None = None) -> list[SetInfo]:
        """Return what there is; a set that cannot be read has a `problem`."""
        if name is not None:
            check_name(name)
        return [_info(path) for path in self.folders() if name in (None, path.parent.name)]

    def usage(self) -> list[tuple[SetInfo, int]]:
        """Return what there is, and how many bytes of each set `plan_prune` would free."""
        infos = self.infos()
        victims = self.plan_prune(infos).victims
        return [(info, sum(v.size for v in victims if v.info is info)) for info in infos]

    def find(self, text: str) -> list[SetInfo]:
        """Return the sets that a text names: a name, an id or the beginning of one, or name/id."""
        name, _, beginning = text.partition("/")
        found = [
            each
            for each in self.folders()
            if (each.parent.name == name and each.name.startswith(beginning))
            or (not beginning and len(text) >= 4 and each.name.startswith(text))  # noqa: PLR2004
        ]
        if not found:
            raise BadSetNameError(f"There is no set {text!r}", hint=_LISTED)
        return [_info(each) for each in found]

    def structures(self, info: SetInfo) -> list[tuple[Shown, ...]]:
        """Return the parts of each kind of artifact that a set has; values are left out."""
        with self._engine(info.path) as engine:
            return structures(engine)

    def inspect(self, info: SetInfo, key: str) -> ArtifactInfo:
        """Return what an artifact is, by its key or the beginning of it."""
        with self._engine(info.path) as engine:
            return inspect(engine, find_key(engine, key))

    # removing

    def plan_remove(self, infos: Iterable[SetInfo]) -> SetPlan:
        """Plan to remove whole sets."""
        victims = tuple(
            SetVictim(
                info=each, reason="removed", artifacts=each.artifacts, size=_size_of(each.path)
            )
            for each in infos
        )

        def execute(plan: SetPlan, _: Progress) -> SetResult:
            return _each(plan, _removed)

        return SetPlan(victims=victims, _execute=execute)

    def plan_delete(self, info: SetInfo, keys: Iterable[str]) -> SetPlan:
        """Plan to delete artifacts by their keys, or the beginnings of these.

        ArtifactNotFoundError, or BadKeyError for a beginning of several, before anything is done.
        Room comes back when a pack is half dead; what has to wait for that is not in the result.
        """
        with self._engine(info.path) as engine:
            found = list(dict.fromkeys(find_key(engine, key) for key in keys))
            places = [engine.catalog.find(key, expired=True) for key in found]
        size = sum(place.size for place in places if place is not None)
        victim = SetVictim(
            info=info, reason="deleted", artifacts=len(found), size=size,
            keys=tuple(map(key_text, found)),
        )  # fmt: skip

        def execute(_: SetPlan, progress: Progress) -> SetResult:
            with self._engine(info.path) as engine:
                count = write.delete(engine, found)
                engine.sync_all()
                freed = compact.compact(engine, progress=progress).freed
            return SetResult(artifacts=count, freed_size=freed)

        return SetPlan(victims=(victim,), _execute=execute)

    def plan_compact(self, infos: Iterable[SetInfo], *, force: bool = False) -> SetPlan:
        """Plan to compact packs that are half dead; with `force` all that have anything dead."""
        victims, warnings = [], []
        for info in infos:
            try:
                with self._engine(info.path) as engine:
                    size = sum(each.dead for each in compact.worth_compacting(engine, force=force))
            except (SmartcacheError, OSError) as error:
                warnings.append(f"{info.full_name} cannot be compacted: {error}")
                continue
            if size:
                victims.append(SetVictim(info=info, reason="dead", artifacts=0, size=size))

        def execute(plan: SetPlan, progress: Progress) -> SetResult:
            def one(victim: SetVictim) -> SetResult:
                with self._engine(victim.info.path) as engine:
                    done = compact.compact(engine, force=force, progress=progress)
                return SetResult(freed_size=done.freed)

            return _each(plan, one)

        return SetPlan(victims=tuple(victims), warnings=tuple(warnings), _execute=execute)

    def plan_prune(
        self,
        infos: Sequence[SetInfo] | None = None,
        *,
        max_size: int | None = None,
        unused_for: timedelta | None = None,
    ) -> SetPlan:
        """Plan to remove what is past its time and dead records; and, if asked, old artifacts.

        `unused_for`: artifacts that were not used for so long; `max_size`: the least recently used
        of all sets, until the rest fits. Pinned ones and sets that are not evictable stay. A set
        that cannot be read is a warning.
        """
        now = (self._clock or time.time)()
        since = None if unused_for is None else int(now - unused_for.total_seconds())
        chosen = self.infos() if infos is None else infos
        over = 0 if max_size is None else sum(each.live for each in chosen) - max_size
        found: list[tuple[SetInfo, Victim]] = []
        dead: dict[str, int] = {}
        warnings = []
        for info in chosen:
            try:
                if info.problem:
                    raise ArtifactError(info.problem)
                with self._engine(info.path) as engine:
                    some = compact.victims(engine, free=max(0, over), unused_since=since)
                    found += [(info, victim) for victim in some]
                    worth = compact.worth_compacting(engine, share=_PRUNED)
                    dead[info.full_name] = sum(use.dead for use in worth)
            except (SmartcacheError, OSError) as error:
                warnings.append(f"{info.full_name} cannot be pruned: {error}")
        found = _cut(found, over)
        if max_size is not None and over > sum(victim.size for _, victim in found):
            warnings.append("What must not be evicted is larger than that: the limit is exceeded")
        victims = [
            victim
            for info in chosen
            for victim in _by_reason(info, found, dead.get(info.full_name, 0))
        ]  # fmt: skip

        def execute(plan: SetPlan, progress: Progress) -> SetResult:
            return _pruned(plan, found, progress)

        return SetPlan(victims=tuple(victims), warnings=tuple(warnings), _execute=execute)

    def make_room(self) -> None:
        """Evict the least recently used artifacts of all sets until they fit the common bound."""
        if self._max_size is None:
            return
        infos = [each for each in self.infos() if not each.problem]
        if sum(each.live for each in infos) > self._max_size:
            self.plan_prune(infos, max_size=self._max_size * 9 // 10).execute()

    # looking after

    def verify(
        self,
        infos: Sequence[SetInfo] | None = None,
        *,
        full: bool = True,
        progress: Progress = silent,
    ) -> list[SetVerifyReport]:
        """Read everything of sets again; without `full` only what shows without reading it."""
        reports = []
        for info in self.infos() if infos is None else infos:
            try:
                with self._engine(info.path) as engine:
                    reports.append(recover.verify(engine, full=full, progress=progress))
            except (SmartcacheError, OSError) as error:
                cure = error.hint if isinstance(error, SmartcacheError) else ""
                reports.append(
                    SetVerifyReport(name=info.name, id=info.id, problem=str(error), cure=cure)
                )
        return reports

    def rebuild(self, info: SetInfo, *, progress: Progress = silent) -> Rebuilt:
        """Make the footers of a set again, where they are missing, from the records."""
        with self._engine(info.path) as engine:
            return recover.rebuild(engine, progress=progress)


def _info(path: Path) -> SetInfo:
    try:
        with engine_of(path) as engine:
            return describe(engine)
    except (SmartcacheError, OSError) as error:
        return SetInfo(
            name=path.parent.name, id=path.name, fingerprint=None, path=path, created_at=None,
            used_at=None, options=Options(), on_disk=_size_of(path), problem=str(error),
            cure=error.hint if isinstance(error, SmartcacheError) else "",
        )  # fmt: skip


def _each(plan: SetPlan, act: Callable[[SetVictim], SetResult]) -> SetResult:
    """Do something for every victim; what goes wrong with one stops no other."""
    done: list[SetResult] = []
    problems: list[str] = []
    for victim in plan.victims:
        try:
            done.append(act(victim))
        except (SmartcacheError, OSError) as error:
            problems.append(f"{victim.info.path}: {error}")
    return SetResult(
        sets=sum(each.sets for each in done), artifacts=sum(each.artifacts for each in done),
        freed_size=sum(each.freed_size for each in done), problems=tuple(problems),
    )  # fmt: skip


def _removed(victim: SetVictim) -> SetResult:
    size = _size_of(victim.info.path)
    _remove_folder(victim.info.path)
    return SetResult(sets=1, artifacts=victim.artifacts, freed_size=size)


def _cut(found: list[tuple[SetInfo, Victim]], over: int) -> list[tuple[SetInfo, Victim]]:
    """Keep what goes anyway, and of the rest the least recently used until it is enough."""
    anyway = [each for each in found if each[1].reason != "over size"]
    rest = [each for each in found if each[1].reason == "over size"]
    freed = sum(victim.size for _, victim in anyway)
    for each in sorted(rest, key=lambda each: (each[1].used_at, each[1].seq)):
        if freed >= over:
            break
        anyway.append(each)
        freed += each[1].size
    return anyway


def _by_reason(
    info: SetInfo, found: list[tuple[SetInfo, Victim]], dead: int
) -> Iterator[SetVictim]:
    own = [victim for each, victim in found if each is info]
    for reason in ("expired", "unused", "over size"):
        some = [victim for victim in own if victim.reason == reason]
        if some:
            yield SetVictim(
                info=info, reason=reason, artifacts=len(some),
                size=sum(each.size for each in some),
                keys=tuple(key_text(each.key) for each in some),
            )  # fmt: skip
    if dead:
        yield SetVictim(info=info, reason="dead", artifacts=0, size=dead)


def _pruned(plan: SetPlan, found: list[tuple[SetInfo, Victim]], progress: Progress) -> SetResult:
    artifacts = freed = 0
    problems = []
    for path in dict.fromkeys(victim.info.path for victim in plan.victims):
        try:
            with engine_of(path) as engine:
                own = [victim for info, victim in found if info.path == path]
                artifacts += compact.evict(engine, own).artifacts
                freed += compact.compact(engine, share=_PRUNED, progress=progress).freed
        except (SmartcacheError, OSError) as error:
            problems.append(f"{path}: {error}")
    return SetResult(artifacts=artifacts, freed_size=freed, problems=tuple(problems))


def _size_of(path: Path) -> int:
    """Return the disk blocks that a folder takes."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += allocated_bytes(os.lstat(os.path.join(folder, name)))
    return total


def _remove_folder(path: Path) -> None:
    """Remove the folder of a set that nobody writes to; it is gone in one step, or not at all."""
    if not path.is_dir():
        return
    check_folder(path)
    name = f"the set {path}"
    with (
        closed_here(path),
        store_lock(path / "lock", "removing", timeout=5, name=name),
    ):
        gone = path.with_name(f".removed-{path.name}-{secrets.token_hex(4)}")
        try:
            path.rename(gone)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be removed: {error.strerror}") from error
    try:
        shutil.rmtree(gone)
    except FileNotFoundError:  # another process has begun to clear it
        _clear(gone)
    with suppress(OSError):
        path.parent.rmdir()


def _clear(gone: Path) -> None:
    """Remove what is left of a set whose removal was killed."""
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        gone.parent.rmdir()
