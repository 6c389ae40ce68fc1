"""What must hold after an operation was disturbed; checks yield a sentence for every fault."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blake3 import blake3

from smartcache.errors import NothingToUndoError
from smartcache.store.store import Store
from smartcache.system.sqlite import signed
from tests.processes.worlds import Operation, State, World, blobs_in, state_of

Way = Literal["fresh", "inherited"]
"""fresh: the child opens the store, which is verified before the operation is run again. inherited:
the child uses a store that its parent opened and used, and the operation is run again at once."""

WAYS: tuple[Way, ...] = ("fresh", "inherited")


@dataclass(frozen=True, slots=True)
class Reference:
    """How an uninterrupted run ends, and how undoing everything after it ends."""

    done: State
    undone: State | None


def uninterrupted(operation: Operation, world: World, run: Callable[[Store], None]) -> Reference:
    """Run an operation to its end; what must hold after a disturbance must hold then, too."""
    operation.begin(world)
    with world.open() as store:
        run(store)
    world.spoiled = set()
    if operation.ends_store:
        problems = [*remains_of_the_store(world), *lost_files(world, None)]
        reference = Reference(state_of(world, None), None)
    else:
        with world.open() as store:
            problems = list(_harm_and_verdict(world, store))
            done = state_of(world, store)
            stuck = undo_everything(store)
            reference = Reference(done, state_of(world, store))
            problems += [*not_as_at_the_start(world), *leftovers(world, store)]
            problems += [f"not undone: {op} {name}" for op, name in sorted(stuck)]
    if problems:
        raise AssertionError("\n".join([f"{operation}, not interrupted:", *problems]))
    return reference


def aftermath(
    operation: Operation, reference: Reference, world: World, *, way: Way = "fresh"
) -> Iterator[str]:
    """Yield the faults now, after the next run, and after undo."""
    yield from as_done(operation, reference, world, way=way)
    if not operation.ends_store:
        with world.open() as store:
            yield from _undone(world, store, reference)


def as_done(
    operation: Operation, reference: Reference, world: World, *, way: Way = "fresh"
) -> Iterator[str]:
    """Yield the faults now, and after the next run."""
    with world.open() as store:
        found = _harm(world, store) if way == "inherited" else _harm_and_verdict(world, store)
        yield from (f"before the next run: {problem}" for problem in found)
        operation.run(world, store)
    if operation.ends_store:
        yield from remains_of_the_store(world)
        yield from lost_files(world, None)
        yield from reference.done.differences(state_of(world, None))
        return
    with world.open() as store:
        has_orphans = way == "inherited" and bool(store.verify(full=True).unindexed)
        if has_orphans:
            # Bytes that a killed removal left are blobs again: the next removal takes them.
            operation.run(world, store)
    with world.open() as store:
        world.spoiled = set()
        yield from _harm_and_verdict(world, store)
        yield from reference.done.differences(state_of(world, store))


def bytes_lost(operation: Operation, world: World) -> Iterator[str]:
    """Yield the bytes that are lost now, and after the next run."""
    with world.open() as store:
        yield from lost_files(world, store)
        operation.run(world, store)
    if operation.ends_store:
        yield from lost_files(world, None)
        return
    with world.open() as store:
        yield from lost_files(world, store)
        if store.verify(full=True).has_damage:
            yield f"verify finds {store.verify(full=True)}"
        yield from (f"tmp/{name} was left" for name in os.listdir(store.volume.layout.tmp))


def _undone(world: World, store: Store, reference: Reference) -> Iterator[str]:
    for op, name in sorted(undo_everything(store)):
        yield f"not undone: {op} {name}"
    if reference.undone is not None:
        differences = reference.undone.differences(state_of(world, store))
        yield from (f"after undo: {difference}" for difference in differences)
    yield from not_as_at_the_start(world)
    yield from leftovers(world, store)


def _harm_and_verdict(world: World, store: Store) -> Iterator[str]:
    yield from _harm(world, store)
    yield from _verdict(world, store)


def _harm(world: World, store: Store) -> Iterator[str]:
    yield from lost_files(world, store)
    yield from wrong_modes(world, store)
    yield from leftovers(world, store)


def lost_files(world: World, store: Store | None) -> Iterator[str]:
    """Every name has bytes it may have; where it may be absent, the store has the user's bytes."""
    for name, allowed in world.allowed.items():
        path = world.at(name)
        if path.is_file():
            if path.read_bytes() not in allowed:
                yield f"{name} has other bytes"
        elif os.path.lexists(path):
            yield f"{name} leads nowhere"
        elif None not in allowed:
            yield f"{name} is gone"
        elif name in world.originals and (store is None or not _is_kept(world, store, name)):
            yield f"{name} is gone, and its bytes are not in the store"


def _is_kept(world: World, store: Store, name: str) -> bool:
    path = Path(store.volume.layout.blob(world.digests[name]))
    return path.is_file() and path.read_bytes() == world.originals[name].data


def wrong_modes(world: World, store: Store) -> Iterator[str]:
    """A file that shares a blob is read-only; every other one has its own mode and time."""
    for name, original in world.originals.items():
        path = world.at(name)
        if not os.path.lexists(path):
            continue
        st = os.lstat(path)
        mode = stat.S_IMODE(st.st_mode)
        if _is_linked(world, store, name, st):
            if mode != original.mode & ~0o222:
                yield f"{name} shares a blob and has mode {mode:o}"
        elif (mode, st.st_mtime_ns) != (original.mode, original.mtime_ns):
            late = (st.st_mtime_ns - original.mtime_ns) / 1e9
            yield f"{name} shares no blob; mode {mode:o}, not {original.mode:o}; time {late:+} s"


def _is_linked(world: World, store: Store, name: str, st: os.stat_result) -> bool:
    blob = store.volume.layout.blob(world.digests[name])
    if os.path.lexists(blob) and os.path.samestat(st, os.lstat(blob)):
        return True
    link = store.volume.index.link(world.at(name))
    return link is not None and link.kind == "hardlink" and link.inode == signed(st.st_ino)


def leftovers(world: World, store: Store) -> Iterator[str]:
    """Nothing of ours is in `tmp/` or beside the user's files; blobs are whole and read-only."""
    yield from (f"tmp/{name} was left" for name in sorted(os.listdir(store.volume.layout.tmp)))
    for name in world.names():
        if name not in world.allowed:
            yield f"{name} was left beside the user's files"
    for path in blobs_in(store.volume.layout):
        if path.name in world.spoiled:
            continue
        if blake3(path.read_bytes()).hexdigest() != path.name:
            yield f"blob {path.name} has other bytes"
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        if mode & 0o222:
            yield f"blob {path.name} has mode {mode:o}"


def _verdict(world: World, store: Store) -> Iterator[str]:
    report = store.verify(full=True)
    for what in ("damaged", "missing", "stray", "writable", "dead_links"):
        found = [item for item in getattr(report, what) if item not in world.spoiled]
        if found:
            yield f"verify finds {what}: {found}"


def undo_everything(store: Store) -> set[tuple[str, str]]:
    """Undo all that can be undone; return the changes that could not be."""
    try:
        undone = store.plan_undo().execute()
    except NothingToUndoError:
        return set()
    return {(u.change.op, u.change.path.name) for u in undone if not u.is_undone}


def not_as_at_the_start(world: World) -> Iterator[str]:
    """After undo every file of the user has its bytes, mode, time and names."""
    for name, original in world.originals.items():
        try:
            st = os.lstat(world.at(name))
        except FileNotFoundError:
            yield f"after undo, {name} is gone"
            continue
        if not stat.S_ISREG(st.st_mode) or world.at(name).read_bytes() != original.data:
            yield f"after undo, {name} has other bytes"
        mode = stat.S_IMODE(st.st_mode)
        if (mode, st.st_mtime_ns) != (original.mode, original.mtime_ns):
            late = (st.st_mtime_ns - original.mtime_ns) / 1e9
            yield f"after undo, {name} has mode {mode:o}, not {original.mode:o}; time {late:+} s"
    for twins in world.twins:
        if len({os.lstat(world.at(name)).st_ino for name in twins}) != 1:
            yield f"after undo, {sorted(twins)} are not one file any more"


def remains_of_the_store(world: World) -> Iterator[str]:
    """After eject there is nothing of the store, and no file of the user is still read-only."""
    if world.root.exists():
        yield "the store is still there"
    for leftover in world.directory.glob("store.*"):
        yield f"{leftover.name} was left"
        shutil.rmtree(leftover)
    for name in world.names():
        if name not in world.allowed:
            yield f"{name} was left beside the user's files"
        elif not os.lstat(world.at(name)).st_mode & 0o200:
            yield f"{name} is still read-only"
