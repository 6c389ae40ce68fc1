"""Whatever the files are, `dedup` changes no byte, and undo gives everything back exactly.

Random trees in several folders: duplicates, hard links, modes, times, owners, attributes and names
of any bytes. A run may be interrupted anywhere, as by Ctrl-C, and be undone or go on.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

if sys.platform != "linux":
    pytest.skip("owners and leases", allow_module_level=True)

from smartcache.folders.dedup import DedupPlan, plan_dedup
from smartcache.store.changes.userfile import Allowance
from smartcache.store.store import Store
from smartcache.system import faults
from tests.folders.deduping import (
    ALL,
    allocated_in,
    leftovers,
    open_store,
    planned,
    scanned,
    undo_everything,
)
from tests.processes.children import NOBODY
from tests.store.files import Watch

IS_ROOT = os.geteuid() == 0
FOLDERS = (b"one", b"two", b"one/inner", b"odd \xff\n")
SUFFIXES = (b".pt", b".safetensors", b".gguf", b".db", b"")
LONG_AGO = 1_500_000_000_000_000_000
EXAMPLES = settings().max_examples // 4
"""Each takes a fifth of a second; twenty times as many under `--soak`."""


@dataclass(frozen=True)
class Node:
    """An inode: which content, its metadata, and the names it has."""

    content: int
    mode: int
    mtime_ns: int
    owner: tuple[int, int]
    attribute: bytes
    names: tuple[bytes, ...]


def names() -> st.SearchStrategy[bytes]:
    stems = st.binary(min_size=1, max_size=6).map(
        lambda raw: raw.replace(b"/", b"_").replace(b"\0", b"0")
    )
    return st.builds(
        lambda folder, stem, suffix: folder + b"/n" + stem + suffix,
        st.sampled_from(FOLDERS),
        stems,
        st.sampled_from(SUFFIXES),
    )


def nodes() -> st.SearchStrategy[Node]:
    owners = [(0, 0), (0, 0), (0, NOBODY), (NOBODY, NOBODY)] if IS_ROOT else [(-1, -1)]
    return st.builds(
        Node,
        content=st.integers(0, 3),
        mode=st.sampled_from((0o644, 0o644, 0o644, 0o664, 0o600, 0o755, 0o444, 0o4755, 0o2644)),
        mtime_ns=st.integers(LONG_AGO, LONG_AGO + 3).map(
            lambda n: LONG_AGO + (n % 4) * 999_999_937
        ),
        owner=st.sampled_from(owners),
        attribute=st.sampled_from((b"", b"", b"", b"x", b"y")),
        names=st.lists(names(), min_size=1, max_size=3, unique=True).map(tuple),
    )


def trees() -> st.SearchStrategy[list[Node]]:
    return st.lists(nodes(), min_size=2, max_size=10, unique_by=lambda node: node.names[0]).map(
        _without_repeated_names
    )


def _without_repeated_names(found: list[Node]) -> list[Node]:
    taken: set[bytes] = set()
    result = []
    for node in found:
        free = tuple(name for name in node.names if name not in taken)
        taken.update(free)
        if free:
            result.append(Node(**{**vars(node), "names": free}))
    return result


def data_of(number: int) -> bytes:
    """Two of the contents differ in the last byte only; sizes are equal but for one."""
    size = 9000 if number == 3 else 8192
    data = random.Random(min(number, 1)).randbytes(size)
    return data[:-1] + bytes([number])


class Tree:
    """A directory with the files of a tree, and what they were at the start."""

    def __init__(self, directory: Path, tree: list[Node]) -> None:
        self.top = os.fsencode(directory / "files")
        for folder in FOLDERS:
            os.makedirs(os.path.join(self.top, folder))
        for node in tree:
            first, *others = (os.path.join(self.top, name) for name in node.names)
            with open(first, "xb") as file:
                file.write(data_of(node.content))
            if node.attribute:
                os.setxattr(first, b"user.note", node.attribute)
            os.chown(first, *node.owner)
            os.chmod(first, node.mode)
            os.utime(first, ns=(node.mtime_ns, node.mtime_ns))
            for other in others:
                os.link(first, other)
        self.before = self.facts()

    @property
    def folders(self) -> list[Path]:
        return [Path(os.fsdecode(os.path.join(self.top, folder))) for folder in FOLDERS]

    def facts(self) -> dict[bytes, tuple[object, ...]]:
        """Everything about every name: bytes, mode, time, owner, attributes, and its twins."""
        found: dict[bytes, tuple[object, ...]] = {}
        twins: dict[int, list[bytes]] = {}
        for directory, _, files in os.walk(self.top):
            for name in files:
                path = os.path.join(directory, name)
                seen = os.lstat(path)
                twins.setdefault(seen.st_ino, []).append(path)
                with open(path, "rb") as file:
                    data = file.read()
                note = os.getxattr(path, b"user.note") if b"user.note" in _attributes(path) else b""
                found[path] = (
                    data,
                    seen.st_mtime_ns,
                    stat.S_IMODE(seen.st_mode),
                    (seen.st_uid, seen.st_gid),
                    note,
                )
        for paths in twins.values():
            for path in paths:
                found[path] = (*found[path], tuple(sorted(paths)))
        return found

    def assert_whole(self, plan: DedupPlan) -> None:
        """Same names, bytes and sizes; a name shows its own time, or that of its survivor."""
        now = self.facts()
        assert now.keys() == self.before.keys()
        survivors = {
            os.fsencode(path): [os.fsencode(s) for s in (group.survivor, *group.spares)]
            for group in plan.groups
            for path in group.replaced
        }
        for path, (data, mtime, *_) in self.before.items():
            assert now[path][0] == data, path
            allowed = {mtime, *(self.before[s][1] for s in survivors.get(path, []))}
            assert now[path][1] in allowed, path
        assert leftovers(Path(os.fsdecode(self.top))) == []


def _attributes(path: bytes) -> list[bytes]:
    return [os.fsencode(name) for name in os.listxattr(path)]


@contextmanager
def made(tree: list[Node]) -> Iterator[tuple[Tree, Store]]:
    directory = Path(tempfile.mkdtemp(prefix="smartcache-test-"))
    try:
        with open_store(directory / "store") as store:
            yield Tree(directory, tree), store
    finally:
        shutil.rmtree(directory)


ALLOWANCES: st.SearchStrategy[frozenset[Allowance]] = st.sampled_from((frozenset(), ALL))

TWO_NAMES_EACH = [
    Node(0, 0o644, LONG_AGO + n, (0, 0) if IS_ROOT else (-1, -1), b"",
         (b"one/a%d.pt" % n, b"two/b%d.pt" % n))
    for n in range(3)
]  # fmt: skip


@settings(max_examples=EXAMPLES)
@given(tree=trees(), allow=ALLOWANCES, any_file=st.booleans())
@example(tree=TWO_NAMES_EACH, allow=frozenset(), any_file=False)
def test_undo_restores_everything_exactly(
    tree: list[Node], allow: frozenset[Allowance], any_file: bool
) -> None:
    with made(tree) as (files, store):
        found = scanned(store, *files.folders, any_file=any_file)
        assert plan_dedup(store, found).freed_size == found.freeable, "the scan promised it"
        plan = plan_dedup(store, found, allow=allow)
        more = sum(each.size for each in found.left if each.options)
        if allow and any_file:
            assert plan.freed_size == found.freeable + more, "with these options"
        event("planned" if plan.files else "nothing to do")
        assert files.facts() == files.before
        blobs = store.volume.layout.blobs
        used = allocated_in(Path(os.fsdecode(files.top)), blobs)
        result = plan.execute()
        assert (result.replaced, result.skipped) == (plan.files, ())
        assert used - allocated_in(Path(os.fsdecode(files.top)), blobs) == result.freed
        assert result.freed == plan.freed_size
        files.assert_whole(plan)
        assert planned(store, *files.folders, allow=allow, any_file=any_file).files == 0
        assert undo_everything(store) == []
        assert files.facts() == files.before
        assert list(store.blobs()) == []
        assert not store.verify(full=True).has_damage


class _InterruptedError(KeyboardInterrupt):
    """Ctrl-C at a moment of our choice."""


class Interrupting(Watch):
    """A `Progress`, and a hook of the fault points, that raises at the n-th call."""

    def __init__(self, countdown: int) -> None:
        super().__init__()
        self._left = countdown

    def tick(self, _: object = None) -> None:
        self._left -= 1
        if self._left == 0:
            raise _InterruptedError

    def advance(self, amount: int = 1) -> None:
        super().advance(amount)
        self.tick()


def _interrupted(
    store: Store, files: Tree, allow: frozenset[Allowance], moment: int, *, at_points: bool
) -> DedupPlan:
    """Run `dedup` until a moment; return its plan."""
    plan = planned(store, *files.folders, allow=allow)
    interrupting = Interrupting(moment)
    faults.hook = interrupting.tick if at_points else None
    try:
        plan.execute(interrupting)
        event("came to its end")
    except _InterruptedError:
        event("interrupted")
    finally:
        faults.hook = None
    return plan


def _undo(store: Store, files: Tree, allow: frozenset[Allowance]) -> None:
    assert undo_everything(store) == []


def _go_on(store: Store, files: Tree, allow: frozenset[Allowance]) -> None:
    plan = planned(store, *files.folders, allow=allow)
    result = plan.execute()
    assert (result.replaced, result.skipped) == (plan.files, ())
    assert planned(store, *files.folders, allow=allow).files == 0
    assert undo_everything(store) == []


@pytest.mark.parametrize("is_reopened", [False, True], ids=["same process", "next open"])
@pytest.mark.parametrize("then", [_undo, _go_on], ids=["undo", "go on"])
@settings(max_examples=EXAMPLES // 2)
@given(tree=trees(), allow=ALLOWANCES, moment=st.integers(1, 12), at_points=st.booleans())
@example(tree=TWO_NAMES_EACH, allow=frozenset(), moment=1, at_points=False)
@example(tree=TWO_NAMES_EACH, allow=frozenset(), moment=2, at_points=False)
def test_an_interruption_anywhere_leaves_every_file_whole_and_can_be_undone(
    then: Callable[[Store, Tree, frozenset[Allowance]], None],
    is_reopened: bool,
    tree: list[Node],
    allow: frozenset[Allowance],
    moment: int,
    at_points: bool,
) -> None:
    with made(tree) as (files, store):
        plan = _interrupted(store, files, allow, moment, at_points=at_points)
        if not is_reopened:
            files.assert_whole(plan)
            then(store, files, allow)
        else:
            store.close()
            with open_store(store.root) as again:
                files.assert_whole(plan)
                assert not again.verify(full=True).has_damage
                then(again, files, allow)
        with open_store(store.root) as last:
            assert undo_everything(last) == []
            assert files.facts() == files.before
            assert not last.verify(full=True).has_damage
            assert os.listdir(last.volume.layout.tmp) == []
