"""A world to kill processes in: a user's files, a store, and a description of both."""

from __future__ import annotations

import os
import random
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

from smartcache.config import load_settings
from smartcache.store.store import Store
from smartcache.store.volume import Layout
from smartcache.system.kernel import extents

SETTLED_NS = 1_700_000_000_000_000_000
"""A time long ago: nothing waits for a young file's clock tick to pass."""


@dataclass(frozen=True, slots=True)
class Original:
    """A user's file as it was before smartcache."""

    data: bytes
    mode: int
    mtime_ns: int


class World:
    """A directory with a user's files and a store; `elsewhere` is one on another filesystem.

    `allowed` says for every name which contents it may have from the start of the
    operation on (None: it may be absent). `spoiled` are the blobs that the operation is to heal.
    `has_reflinks`: it lies on a filesystem where files can share blocks; `inodes` are those the
    user's files had.
    """

    def __init__(
        self, directory: Path, elsewhere: Path | None = None, *, has_reflinks: bool = False
    ) -> None:
        self.directory = directory
        self.elsewhere = elsewhere
        self.files = directory / "files"
        self.root = directory / "store"
        self.originals: dict[str, Original] = {}
        self.twins: set[frozenset[str]] = set()
        self.allowed: dict[str, set[bytes | None]] = {}
        self.digests: dict[str, str] = {}
        self.spoiled: set[str] = set()
        self.has_reflinks = has_reflinks
        self.inodes: set[int] = set()
        for place in filter(None, (directory, elsewhere)):
            place.mkdir(parents=True)
        for folder in self.folders.values():
            folder.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for place in filter(None, (self.directory, self.elsewhere)):
            shutil.rmtree(place, ignore_errors=True)

    @property
    def places(self) -> list[Path]:
        """The directories this world consists of."""
        return [place for place in (self.directory, self.elsewhere) if place is not None]

    def open(self) -> Store:
        return Store(self.root, settings=load_settings(home=self.root, threads=2))

    @property
    def folders(self) -> dict[str, Path]:
        """The folders of user's files, by what their names begin with."""
        folders = {"": self.files}
        if self.elsewhere is not None:
            folders["far/"] = self.elsewhere / "files"
        return folders

    def at(self, name: str) -> Path:
        """Return the path of a name; "far/..." is on the other filesystem."""
        prefix = "far/" if name.startswith("far/") else ""
        return self.folders[prefix] / name.removeprefix(prefix)

    def names(self) -> list[str]:
        """Return the names of all user's files that are there now."""
        return sorted(
            prefix + os.path.relpath(os.path.join(where, name), folder)
            for prefix, folder in self.folders.items()
            for where, _, names in os.walk(folder)
            for name in names
        )

    def write(self, name: str, data: bytes, *, mode: int = 0o644) -> Path:
        """Make a user's file, last changed long ago, each at a time of its own."""
        path = self.at(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        mtime_ns = SETTLED_NS + len(self.originals) * 1_000_000_007
        path.chmod(mode)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        self.inodes.add(path.stat().st_ino)
        self.originals[name] = Original(data, mode, mtime_ns)
        self.allowed[name] = {data}
        self.digests[name] = blake3(data).hexdigest()
        return path

    def link(self, name: str, to: str) -> Path:
        """Make a second name of a user's file."""
        os.link(self.at(to), self.at(name))
        self.originals[name] = self.originals[to]
        self.allowed[name] = {self.originals[to].data}
        self.digests[name] = self.digests[to]
        self.twins.add(frozenset((name, to)))
        return self.at(name)

    def may_vanish(self, name: str) -> None:
        """Say that the operation removes a name, or brings it back."""
        self.allowed[name].add(None)


def content(seed: int, size: int) -> bytes:
    """Return bytes that are the same in every process."""
    return random.Random(seed).randbytes(size)


class NotDoneError(Exception):
    """An operation says that it did not do all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`prepare` makes the world before; `run` does the operation, and may be called again.

    `spoil` is done when the store was closed after that; then the next opening is what is
    disturbed, and only then the operation is run. `takes`: the user's files that it makes links or
    lets share blocks. `is_one_step`: it does all of it or nothing.
    """

    name: str
    prepare: Callable[[World, Store], None]
    run: Callable[[World, Store], None]
    spoil: Callable[[World], None] | None = None
    takes: tuple[str, ...] = ()
    is_one_step: bool = False
    needs_elsewhere: bool = False
    needs_reflinks: bool = False
    ends_store: bool = False

    def __str__(self) -> str:
        return self.name

    def begin(self, world: World) -> None:
        """Make the world in which the operation is disturbed."""
        with world.open() as store:
            self.prepare(world, store)
        if self.spoil is not None:
            self.spoil(world)

    def start(self, world: World) -> Callable[[], None]:
        """Open the store; return what is to be disturbed: the operation, or the opening itself."""
        if self.spoil is not None:
            return lambda: world.open().close()
        store = world.open()
        return lambda: self.run(world, store)


@dataclass(slots=True, kw_only=True)
class State:
    """What a world looks like, in terms that are equal for two worlds with the same history."""

    files: dict[str, tuple[object, ...]] = field(default_factory=dict)
    shared: set[frozenset[str]] = field(default_factory=set)
    blobs: set[str] = field(default_factory=set)
    side: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, tuple[object, ...]] = field(default_factory=dict)
    links: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def differences(self, other: State) -> Iterator[str]:
        """Name what is different in `other`."""
        for name in ("files", "shared", "blobs", "side", "rows", "links"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if isinstance(mine, dict):
                for key in sorted({*mine, *theirs}):
                    if mine.get(key) != theirs.get(key):
                        yield f"{name}[{key!r}] is {theirs.get(key)}, not {mine.get(key)}"
            else:
                yield f"{name}: too many: {list(theirs - mine)}, missing: {list(mine - theirs)}"


def state_of(world: World, store: Store | None) -> State:
    """Describe the user's files and, where there is a store, what it has and remembers."""
    state = State()
    inodes: dict[tuple[int, int], set[str]] = {}
    for name in world.names():
        path = world.at(name)
        st = os.lstat(path)
        data = zlib.crc32(path.read_bytes())
        state.files[name] = (data, oct(stat.S_IMODE(st.st_mode)), st.st_mtime_ns)
        if world.has_reflinks:
            state.files[name] += (st.st_ino in world.inodes, _shared_size(path))
        inodes.setdefault((st.st_dev, st.st_ino), set()).add(name)
    if store is not None:
        names = {digest: name for name, digest in reversed(world.digests.items())}
        for path in blobs_in(store.volume.layout):
            st = os.lstat(path)
            name = names.get(path.name, path.name)
            state.blobs.add(name)
            inodes.setdefault((st.st_dev, st.st_ino), set()).add(f"blob of {name}")
        _remembered(state, store, names)
    state.shared = {frozenset(group) for group in inodes.values() if len(group) > 1}
    return state


def _shared_size(path: Path) -> int:
    with path.open("rb") as file:
        return sum(e.length for e in extents(file.fileno()) or () if e.is_shared)


def _remembered(state: State, store: Store, names: dict[str, str]) -> None:
    layout, index = store.volume.layout, store.volume.index
    found = sorted(name.partition(".")[0] for name in os.listdir(layout.bad))
    state.side["bad"] = [names.get(name, name) for name in found]
    owners = {owner.id: str(owner) for owner in index.owners()}
    for blob in list(index.blobs()):
        holders = sorted(str(owner) for owner in index.holders_of(blob.id))
        aliases = sorted(store.aliases_of(blob))
        state.rows[names.get(blob.digest, blob.digest)] = (blob.size, holders, aliases)
        for link in index.links_of(blob.id):
            owner = None if link.owner is None else owners[link.owner]
            state.links[link.path.name] = (link.kind, names.get(link.digest), owner)


def blobs_in(layout: Layout) -> list[Path]:
    """Return every file under `blobs/`."""
    return sorted(
        path for path in layout.blobs.glob("**/*") if path.is_file() and path != layout.tag
    )
