"""All sets of a store: opened, listed, removed, and kept within a bound together.

`ArtifactSets` is what the rest of smartcache knows of artifacts. Listing changes no artifact, but
counts what a killed process has left without rows, as everyone does who opens a set. A set that
cannot be read is listed with its problem; it stands in nobody's way.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from smartcache.artifacts import bounds, compaction, verifying
from smartcache.artifacts.artifactset import ArtifactSet
from smartcache.artifacts.engine import SetEngine, closed_here, flush_open, open_engine
from smartcache.artifacts.figures import SetInfo, describe
from smartcache.artifacts.fingerprint import Fingerprint
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.packs import PackFiles
from smartcache.artifacts.recovery import Rebuilt, recover
from smartcache.artifacts.setfolder import Options, SetFolder, check_folder, check_name, is_id
from smartcache.errors import (
    ArtifactError,
    BadSetNameError,
    IndexDamagedError,
    NoSpaceError,
    SetIndexDamagedError,
    SmartcacheError,
    StoreError,
    StoreUnwritableError,
)
from smartcache.progress import Progress, silent
from smartcache.store.locks import lock
from smartcache.store.statkey import allocated_bytes

_REMOVED = re.compile(r"\.removed-[0-9a-f]{32}-[0-9a-f]{8}")
_UNASKED = 256 << 20
"""Bytes that a process writes to a set at most before it measures all sets together again."""
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

    sets: int
    artifacts: int
    freed_size: int
    """What the filesystem has given back."""
    problems: tuple[str, ...] = ()


class ArtifactSets:
    """The sets in one folder."""

    def __init__(
        self,
        root: Path,
        *,
        threads: int = 2,
        max_size: int | None = None,
        ttl: float | None = None,
    ) -> None:
        self.root = root
        self._threads = min(threads, 2)
        self._max_size = max_size
        self._ttl = ttl

    def open(
        self,
        name: str,
        fingerprint: Mapping[str, object] | Fingerprint,
        *,
        max_size: float | None = None,
        ttl: float | timedelta | None = None,
        evictable: bool | None = None,
        durable: bool | None = None,
    ) -> ArtifactSet:
        """Open the set of a name and a fingerprint, made if it is not there.

        Options that are given are kept with the set; the others stay as they are. `math.inf` takes
        a `max_size` or a `ttl` back.
        """
        made = fingerprint if isinstance(fingerprint, Fingerprint) else Fingerprint.of(fingerprint)
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        given = {"max_size": max_size, "ttl": seconds, "evictable": evictable, "durable": durable}
        changes = {
            key: None if value == math.inf else value
            for key, value in given.items()
            if value is not None
        }
        folder = SetFolder.make(self.root, name, made, replace(Options(), **changes))  # type: ignore[arg-type]
        folder = folder.with_options(replace(folder.options, **changes))  # type: ignore[arg-type]
        return self._opened(folder)

    def open_id(self, info: SetInfo) -> ArtifactSet:
        """Open a set that is there."""
        return self._opened(SetFolder.read(info.path))

    def _opened(self, folder: SetFolder) -> ArtifactSet:
        most = self._max_size
        return ArtifactSet(
            folder, threads=self._threads, longest=self._ttl,
            make_room=None if most is None else self.make_room,
            room_step=min(_UNASKED, (most or 0) // 16),
        )  # fmt: skip

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
        folders = [path for path in self.folders() if name in (None, path.parent.name)]
        return [self._info(path) for path in folders]

    def _info(self, path: Path) -> SetInfo:
        try:
            with self._engine(path) as engine:
                return describe(engine)
        except (SmartcacheError, OSError) as error:
            return SetInfo(
                name=path.parent.name, id=path.name, fingerprint=None, path=path, created_at=None,
                used_at=None, options=Options(), on_disk=_size_of(path), problem=str(error),
                cure=error.hint if isinstance(error, SmartcacheError) else "",
            )  # fmt: skip

    def find(self, text: str) -> list[SetInfo]:
        """Return the sets that a text names: a name, an id or the beginning of one, or name/id."""
        name, _, beginning = text.partition("/")
        found = [
            each
            for each in self.infos()
            if (each.name == name and each.id.startswith(beginning))
            or (not beginning and len(text) >= 4 and each.id.startswith(text))  # noqa: PLR2004
        ]
        if not found:
            raise BadSetNameError(
                f"There is no set {text!r}", hint="'smartcache artifacts ls' shows what is there."
            )
        return found

    @contextmanager
    def _engine(self, path: Path) -> Iterator[SetEngine]:
        engine = open_engine(SetFolder.read(path))
        try:
            yield engine
        finally:
            engine.release()

    # removing

    def plan_remove(self, infos: list[SetInfo]) -> SetPlan:
        """Plan to remove whole sets."""
        victims = tuple(
            SetVictim(
                info=each, reason="removed", artifacts=each.artifacts, size=_size_of(each.path)
            )
            for each in infos
        )
        return SetPlan(victims=victims, _execute=lambda plan, _: self._remove(plan))

    def _remove(self, plan: SetPlan) -> SetResult:
        freed = artifacts = sets = 0
        problems = []
        for victim in plan.victims:
            path = victim.info.path
            size = _size_of(path)
            try:
                _remove_folder(path)
            except (SmartcacheError, OSError) as error:
                problems.append(f"{path}: {error}")
                continue
            freed, artifacts, sets = freed + size, artifacts + victim.artifacts, sets + 1
        return SetResult(sets=sets, artifacts=artifacts, freed_size=freed, problems=tuple(problems))

    def plan_prune(
        self,
        infos: list[SetInfo] | None = None,
        *,
        max_size: int | None = None,
        unused_for: timedelta | None = None,
    ) -> SetPlan:
        """Plan to remove what is past its time and dead records; and, if asked, old artifacts.

        `unused_for`: artifacts that were not used for so long; `max_size`: the least recently used
        of all sets, until the rest fits. Pinned ones and sets that are not evictable stay.
        """
        chosen = [each for each in (self.infos() if infos is None else infos) if not each.problem]
        since = None if unused_for is None else int(time.time() - unused_for.total_seconds())
        over = 0 if max_size is None else sum(each.live for each in chosen) - max_size
        found: list[tuple[SetInfo, bounds.Victim]] = []
        warnings = []
        for info in chosen:
            with self._engine(info.path) as engine:
                found += [
                    (info, each)
                    for each in bounds.victims(engine, free=max(0, over), unused_since=since)
                ]
        found = _cut(found, over)
        left = over - sum(victim.size for _, victim in found)
        if max_size is not None and left > 0:
            warnings.append("What must not be evicted is larger than that: the limit is exceeded")
        return SetPlan(
            victims=tuple(self._set_victims(chosen, found)), warnings=tuple(warnings),
            _execute=lambda plan, progress: self._prune(found, plan, progress),
        )  # fmt: skip

    def _set_victims(
        self, chosen: list[SetInfo], found: list[tuple[SetInfo, bounds.Victim]]
    ) -> Iterator[SetVictim]:
        for info in chosen:
            own = [victim for each, victim in found if each is info]
            for reason in ("expired", "unused", "over size"):
                some = [victim for victim in own if victim.reason == reason]
                if some:
                    yield SetVictim(
                        info=info, reason=reason, artifacts=len(some),
                        size=sum(each.size for each in some),
                        keys=tuple(key_text(each.key) for each in some),
                    )  # fmt: skip
            with self._engine(info.path) as engine:
                dead = sum(
                    compaction.dead_size(pack)
                    for pack in compaction.worth_compacting(engine, share=_PRUNED)
                )
            if dead:
                yield SetVictim(info=info, reason="dead", artifacts=0, size=dead)

    def _prune(
        self, found: list[tuple[SetInfo, bounds.Victim]], plan: SetPlan, progress: Progress
    ) -> SetResult:
        artifacts = freed = 0
        problems = []
        paths = dict.fromkeys(victim.info.path for victim in plan.victims)
        for path in paths:
            try:
                with self._engine(path) as engine:
                    own = [victim for info, victim in found if info.path == path]
                    artifacts += bounds.evict(engine, iter(own)).artifacts
                    freed += compaction.compact(engine, share=_PRUNED, progress=progress).freed
            except (SmartcacheError, OSError) as error:
                problems.append(f"{path}: {error}")
        return SetResult(sets=0, artifacts=artifacts, freed_size=freed, problems=tuple(problems))

    def make_room(self) -> None:
        """Evict the least recently used artifacts of all sets until they fit the common bound."""
        if self._max_size is None:
            return
        infos = [each for each in self.infos() if not each.problem]
        if sum(each.live for each in infos) > self._max_size:
            self.plan_prune(infos, max_size=self._max_size * 9 // 10).execute()

    # looking after

    def verify(
        self, infos: list[SetInfo] | None = None, *, progress: Progress = silent
    ) -> list[verifying.SetVerifyReport]:
        """Read everything of sets again."""
        reports = []
        for info in self.infos() if infos is None else infos:
            try:
                with self._engine(info.path) as engine:
                    reports.append(verifying.verify(engine, progress=progress))
            except (SmartcacheError, OSError):
                report = verifying.SetVerifyReport(name=info.name, id=info.id)
                report.is_index_sound = False
                reports.append(report)
        return reports

    def rebuild(self, info: SetInfo, *, progress: Progress = silent) -> Rebuilt:
        """Make the index of a set again from its packs, also if it is no database any more."""
        folder = SetFolder.read(info.path)
        path = folder.path / "index.sqlite3"
        flush_open(folder.path)
        try:
            return _rebuilt(folder, progress)
        except (IndexDamagedError, SetIndexDamagedError):
            stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.rename(f"{path}{suffix}", f"{path}.damaged-{stamp}{suffix}")
            return _rebuilt(folder, progress)


def _rebuilt(folder: SetFolder, progress: Progress) -> Rebuilt:
    try:
        index = folder.open_index()
    except (NoSpaceError, StoreUnwritableError):
        raise
    except StoreError as error:
        if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise
        raise SetIndexDamagedError(error.message, path=folder.path) from error
    try:
        if not index.is_sound():
            raise SetIndexDamagedError(f"The index of {folder.path} is damaged", path=folder.path)
        packs = PackFiles(folder.path, bytes.fromhex(folder.id))
        return recover(index, packs, folder, progress=progress)
    finally:
        index.close()


def _cut(
    found: list[tuple[SetInfo, bounds.Victim]], over: int
) -> list[tuple[SetInfo, bounds.Victim]]:
    """Keep what goes anyway, and of the rest the least recently used until it is enough."""
    anyway = [each for each in found if each[1].reason != "over size"]
    rest = sorted((each for each in found if each[1].reason == "over size"), key=_used_at)
    freed = sum(victim.size for _, victim in anyway)
    for each in rest:
        if freed >= over:
            break
        anyway.append(each)
        freed += each[1].size
    return anyway


def _used_at(each: tuple[SetInfo, bounds.Victim]) -> int:
    return each[1].used_at


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
        lock(path / "lock", exclusive=True, timeout=5, what="removing", name=name),
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
