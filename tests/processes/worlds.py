"""A world to disturb: a user's files, a store, and all that can be seen of both."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from blake3 import blake3

from smartcache.config import load_settings
from smartcache.errors import NothingToUndoError
from smartcache.store.store import Store
from smartcache.store.undo import ONLY

SETTLED_NS = 1_700_000_000_000_000_000
"""A time long ago: nothing waits for a young file's clock tick to pass."""
BYSTANDER = "other/bystander.bin"


def content(seed: int, size: int) -> bytes:
    """Return bytes that are the same in every process."""
    return random.Random(seed).randbytes(size)


class Fact(NamedTuple):
    """All that a user can see of a file; `names` are those that the same file has."""

    data: str
    mode: str
    owner: tuple[int, int]
    mtime_ns: int
    attributes: tuple[tuple[str, bytes], ...]
    names: frozenset[str]


Facts = dict[str, Fact]


class World:
    """A directory with a user's files and a store; `drive` is one on another filesystem.

    `before` are the files as they were before smartcache came; `given_up` those that an operation
    was told to overwrite; `inodes` those of all. `spoiled`: a blob that it is to heal.
    """

    def __init__(self, directory: Path, drive: Path | None = None) -> None:
        self.directory, self.drive = directory, drive
        self.files, self.root = directory / "files", directory / "store"
        self._places = {"": self.files, "other/": directory / "other"}
        if drive is not None:
            self._places["drive/"] = drive / "models"
        self.before: Facts = {}
        self.given_up: set[str] = set()
        self.inodes: set[int] = set()
        self.spoiled = ""
        for place in self._places.values():
            place.mkdir(parents=True)
        self.write(BYSTANDER, content(9, 3000))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for place in filter(None, (self.directory, self.drive)):
            shutil.rmtree(place, ignore_errors=True)

    def open(self) -> Store:
        return Store(self.root, settings=load_settings(home=self.root, threads=2))

    def at(self, name: str) -> Path:
        """Return the path of a name; "drive/..." is on the other filesystem."""
        first, slash, rest = name.partition("/")
        place = self._places.get(first + slash) if slash else None
        return self.files / name if place is None else place / rest

    def write(self, name: str, data: bytes, *, mode: int = 0o644, attribute: bytes = b"") -> Path:
        """Make a user's file, last changed long ago, each at a time of its own."""
        path = self.at(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        if attribute:
            os.setxattr(path, "user.note", attribute)
        path.chmod(mode)
        mtime_ns = SETTLED_NS + len(self.before) * 1_000_000_007
        os.utime(path, ns=(mtime_ns, mtime_ns))
        self.before[name] = fact_of(path, {name})
        self.inodes.add(path.stat().st_ino)
        return path

    def link(self, name: str, to: str) -> None:
        """Make a second name of a user's file."""
        os.link(self.at(to), self.at(name))
        for each in (name, to):
            self.before[each] = self.before[to]._replace(names=frozenset((name, to)))

    def facts(self) -> Facts:
        """Look at all files of the user that are there now, by name."""
        found: dict[str, Path] = {}
        for prefix, place in self._places.items():
            for folder, _, names in os.walk(place):
                paths = (Path(folder, name) for name in names)
                found |= {f"{prefix}{path.relative_to(place)}": path for path in paths}
        inodes: dict[tuple[int, int], set[str]] = {}
        for name, path in found.items():
            st = path.lstat()
            inodes.setdefault((st.st_dev, st.st_ino), set()).add(name)
        groups = {name: names for names in inodes.values() for name in names}
        return {name: fact_of(path, groups[name]) for name, path in sorted(found.items())}


def fact_of(path: Path, names: Iterable[str]) -> Fact:
    st = path.lstat()
    if not stat.S_ISREG(st.st_mode):
        return Fact("no file", oct(st.st_mode), (st.st_uid, st.st_gid), 0, (), frozenset(names))
    return Fact(
        blake3(path.read_bytes()).hexdigest()[:12], oct(stat.S_IMODE(st.st_mode)),
        (st.st_uid, st.st_gid), st.st_mtime_ns,
        tuple((each, os.getxattr(path, each)) for each in sorted(os.listxattr(path))),
        frozenset(names),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`prepare` makes the world before; `run` does the operation, and may be called again.

    `needs`: "drive", a second filesystem; "reflinks", one where files can share blocks.
    `is_unwritten`: nothing is written down of what it does at a free path, or with files that were
    never linked. So after a kill undo leaves it, and one hidden name may be left.
    """

    name: str
    prepare: Callable[[World, Store], None]
    run: Callable[[World, Store], None]
    ends_store: bool = False
    needs: str = ""
    is_unwritten: bool = False

    def __str__(self) -> str:
        return self.name

    def begin(self, world: World) -> None:
        """Make the world in which the operation is disturbed."""
        with world.open() as store:
            self.prepare(world, store)


# what must hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """How an operation ends that nobody disturbs: the files before, after, and after undo.

    `blobs` after it: how many links each has. `never`: undone without the operation.
    """

    start: Facts
    end: Facts
    blobs: dict[str, int]
    undone: Facts
    never: Facts


def reference_of(operation: Operation, new_world: Callable[[], World]) -> Reference:
    """Run an operation to its end; what must hold after a disturbance must hold then, too."""
    with new_world() as world:
        operation.begin(world)
        start = world.facts()
        with world.open() as store:
            problems = undo_everything(store)
        never = world.facts()
        problems += _not_as_before(world, never, set())
    with new_world() as world:
        operation.begin(world)
        with world.open() as store:
            operation.run(world, store)
        with world.open() as store:
            if not operation.ends_store:
                store.adopt(world.at(BYSTANDER))
            end, blobs = world.facts(), blobs_of(world)
            problems += undo_everything(store)
            undone = world.facts()
        problems += _not_as_before(world, undone, world.given_up)
    assert not problems, "\n".join([f"{operation}, undisturbed:", *problems])
    return Reference(start=start, end=end, blobs=blobs, undone=undone, never=never)


def _not_as_before(world: World, found: Facts, but: set[str]) -> list[str]:
    kept = {name: fact for name, fact in world.before.items() if name not in but}
    return differences(kept, {name: fact for name, fact in found.items() if name in kept})


def recovered(
    operation: Operation, reference: Reference, world: World, opened: Store | None = None
) -> Iterator[str]:
    """Yield the faults after recovery, and after undo."""
    with opened or world.open() as store:
        yield from (f"left open: {each}" for each in (*store.recover(), *store.unfinished()))
        _clear(operation, world)
        found = world.facts()
        yield from either(_apart(reference.start), _apart(reference.end), _apart(found))
        if world.root.exists():
            yield from damage(store, world.spoiled)
        yield from undo_everything(store)
        yield from (f"still in the history: {each}" for each in store.history())
    problems = either(reference.never, reference.undone, world.facts())
    if problems and operation.is_unwritten:
        problems = either(reference.never, reference.end, world.facts())
    yield from (f"after undo, {each}" for each in problems)


def gone_on(
    operation: Operation, reference: Reference, world: World, store: Store, *, at_once: bool
) -> Iterator[str]:
    """Yield the faults after the next operation, after this one was run again, and after undo.

    `at_once`: this one is the next operation.
    """
    _clear(operation, world)
    if not operation.ends_store and not at_once:
        store.adopt(world.at(BYSTANDER))
        yield from (f"left open: {each}" for each in store.unfinished())
        found = either(_apart(reference.start), _apart(reference.end), _apart(world.facts()))
        yield from (f"after the next operation, {each}" for each in found)
        yield from (f"tmp/{name} was left" for name in os.listdir(world.root / "tmp"))
    operation.run(world, store)
    if not operation.ends_store:
        store.adopt(world.at(BYSTANDER))  # the operation may have been an undo
    yield from (f"{each.name} was left" for each in world.directory.glob("store.*"))
    found = differences(reference.end, world.facts())
    found += differences(reference.blobs, blobs_of(world))
    yield from (f"run again, {each}" for each in found)
    if not operation.ends_store:
        yield from damage(store, world.spoiled)
        yield from undo_everything(store)
        found = differences(reference.undone, world.facts())
        if operation.is_unwritten:
            found = either(reference.end, reference.undone, world.facts())
        yield from (f"after undo, {each}" for each in found)


def _clear(operation: Operation, world: World) -> None:
    for left in world.files.glob(".*.smartcache") if operation.is_unwritten else ():
        left.unlink()


def _apart(facts: Facts) -> Facts:
    """Files without which of them are one: in between that is open."""
    return {name: fact._replace(names=frozenset()) for name, fact in facts.items()}


def either(one: Facts, other: Facts, found: Facts) -> list[str]:
    """Name the files that are neither as in the one nor as in the other."""
    return [
        f"{name} is {found.get(name)}, neither {one.get(name)} nor {other.get(name)}"
        for name in sorted({*one, *other, *found})
        if found.get(name) not in (one.get(name), other.get(name))
    ]


def differences(wanted: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Name what is not as it should be."""
    return [
        f"{name} is {found.get(name)}, not {wanted.get(name)}"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]


def blobs_of(world: World) -> dict[str, int]:
    """Return every file under `blobs/`, and how many links it has; pins and damaged ones, too."""
    roots = [world.root] if world.drive is None else [world.root, world.drive / "pool"]
    return {
        str(path.relative_to(root)).partition(".")[0]: path.stat().st_nlink
        for root in roots
        for place in ("blobs", "pins", "bad")
        for path in (root / place).rglob("*")
        if path.is_file() and path.name != "CACHEDIR.TAG"
    }


def damage(store: Store, spoiled: str) -> list[str]:
    """Say what is wrong with blobs: their bytes, modes, or whether they are blobs at all."""
    report = store.verify(full=True)
    return [
        f"verify finds {what}: {found}"
        for what in ("damaged", "stray", "writable")
        if (found := [each for each in getattr(report, what) if each not in spoiled])
    ]


def undo_everything(store: Store) -> list[str]:
    """Undo all that can be undone; say what could not be, but for the last copy of some bytes."""
    try:
        undone = store.plan_undo().execute()
    except NothingToUndoError:
        return []
    back = {u.path for u in undone if u.is_undone}  # two rows may tell of one path
    left = [u for u in undone if not u.is_undone and u.path not in back and u.note != ONLY]
    return [f"not undone: {u.path.name}: {u.outcome} {u.note}" for u in left]
