"""Whatever the files are, `dedup` changes no byte, and undo gives everything back exactly.

Random trees in several folders: duplicates, hard links, modes, times, owners, attributes and names
of any bytes. A run may be interrupted anywhere, as by Ctrl-C, and be undone or go on.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

if sys.platform != "linux":
    pytest.skip("owners and leases", allow_module_level=True)

from smartcache.folders.dedup import DedupPlan, plan_dedup
from smartcache.store.store import Store
from smartcache.store.userfile import Allowance
from smartcache.system import faults
from tests.folders.counting import Interrupting
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
from tests.store.files import snapshot

IS_ROOT = os.geteuid() == 0
FOLDERS = (b"one", b"two", b"one/inner", b"odd \xff\n")
NO_SLASH = bytes.maketrans(b"/\0", b"_0")
SUFFIXES = (b".pt", b".safetensors", b".gguf", b".db", b"")
MODE, MTIME, BYTES = 1, 3, 4
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
    stems = st.binary(min_size=1, max_size=6).map(lambda raw: raw.translate(NO_SLASH))
    parts = st.sampled_from(FOLDERS), st.just(b"/n"), stems, st.sampled_from(SUFFIXES)
    return st.tuples(*parts).map(b"".join)


def nodes() -> st.SearchStrategy[Node]:
    owners = [(0, 0), (0, 0), (0, NOBODY), (NOBODY, NOBODY)] if IS_ROOT else [(-1, -1)]
    return st.builds(
        Node,
        content=st.integers(0, 3),
        mode=st.sampled_from((0o644, 0o644, 0o644, 0o664, 0o600, 0o755, 0o444, 0o4755, 0o2644)),
        mtime_ns=st.integers(0, 3).map(lambda n: LONG_AGO + n * 999_999_937),
        owner=st.sampled_from(owners),
        attribute=st.sampled_from((b"", b"", b"", b"x", b"y")),
        names=st.lists(names(), min_size=1, max_size=3, unique=True).map(tuple),
    )


def trees() -> st.SearchStrategy[list[Node]]:
    return st.lists(nodes(), min_size=2, max_size=10).map(_without_repeated_names)


def _without_repeated_names(found: list[Node]) -> list[Node]:
    taken: set[bytes] = set()
    result = []
    for node in found:
        if free := tuple(name for name in node.names if name not in taken):
            taken.update(free)
            result.append(replace(node, names=free))
    return result


def data_of(number: int) -> bytes:
    """Two of the contents differ in the last byte only; sizes are equal but for one."""
    size = 9000 if number == 3 else 8192
    data = random.Random(min(number, 1)).randbytes(size)
    return data[:-1] + bytes([number])


class Tree:
    """A directory with the files of a tree, and what they were at the start."""

    def __init__(self, directory: Path, tree: list[Node]) -> None:
        self.top = directory / "files"
        self.folders = [self.top / os.fsdecode(folder) for folder in FOLDERS]
        for folder in self.folders:
            folder.mkdir(parents=True)
        for node in tree:
            first, *others = (self.top / os.fsdecode(name) for name in node.names)
            first.write_bytes(data_of(node.content))
            if node.attribute:
                os.setxattr(first, b"user.note", node.attribute)
            os.chown(first, *node.owner)
            first.chmod(node.mode)
            os.utime(first, ns=(node.mtime_ns, node.mtime_ns))
            for other in others:
                os.link(first, other)
        self.before = self.facts()

    def facts(self) -> dict[Path, tuple[Any, ...]]:
        """Everything about every name: its first twin, mode, owner, time, bytes, attributes."""
        found: dict[Path, tuple[Any, ...]] = {}
        for name, (kind, *fact) in snapshot(self.top).items():
            if kind == "file":
                path = self.top / name
                notes = [os.getxattr(path, each) for each in os.listxattr(path) if "user" in each]
                found[path] = (*fact, notes)
        return found

    def assert_whole(self, plan: DedupPlan) -> None:
        """Same names, bytes and sizes; a name shows its own time, or that of its survivor."""
        now = self.facts()
        assert now.keys() == self.before.keys()
        assert {path: fact[BYTES] for path, fact in now.items()} == {
            path: fact[BYTES] for path, fact in self.before.items()
        }
        groups = {path: [g.survivor, *g.replaced] for g in plan.groups for path in g.replaced}
        for path, fact in now.items():
            allowed = {self.before[each][MTIME] for each in (path, *groups.get(path, ()))}
            assert fact[MTIME] in allowed, path
        assert leftovers(self.top) == []


@contextmanager
def made(tree: list[Node]) -> Iterator[tuple[Tree, Store]]:
    directory = Path(tempfile.mkdtemp(prefix="smartcache-test-"))
    try:
        with open_store(directory / "store") as store:
            yield Tree(directory, tree), store
    finally:
        shutil.rmtree(directory)


ALLOWANCES: st.SearchStrategy[frozenset[Allowance]] = st.sampled_from((frozenset(), ALL))


def two_names(first: bytes, second: bytes, mode: int = 0o644, later: int = 0) -> Node:
    owner = (0, 0) if IS_ROOT else (-1, -1)
    return Node(0, mode, LONG_AGO + later, owner, b"", (first, second))


TWO_NAMES_EACH = [two_names(b"one/a%d.pt" % n, b"two/b%d.pt" % n, later=n) for n in range(3)]
LIKE_THE_BLOB = [
    two_names(b"one/a.pt", b"two/a.pt"), two_names(b"one/b.pt", b"two/b.pt", 0o444),
]  # fmt: skip
"""The second file shows what the first one does when it has become the blob."""
NEIGHBOURS = [
    two_names(b"one/n0.pt", b"one/n\x01.pt"), two_names(b"one/n00.pt", b"one/n000.pt", 0o444),
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
        used = allocated_in(files.top)
        result = plan.execute()
        assert (result.replaced, result.skipped) == (plan.files, ())
        assert used - allocated_in(files.top) == result.freed
        assert result.freed == plan.freed_size
        files.assert_whole(plan)
        before, after = (
            sum(bool(fact[MODE] & 0o222) for fact in facts.values())
            for facts in (files.before, files.facts())
        )
        assert before - after == plan.read_only
        assert planned(store, *files.folders, allow=allow, any_file=any_file).files == 0
        assert undo_everything(store) == []
        assert files.facts() == files.before
        assert list(store.blobs()) == []
        assert not store.verify(full=True).has_damage


@pytest.mark.parametrize("is_reopened", [False, True], ids=["same process", "next open"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["undo", "go on"])
@settings(max_examples=EXAMPLES // 2)
@given(tree=trees(), allow=ALLOWANCES, moment=st.integers(1, 12), at_points=st.booleans())
@example(tree=TWO_NAMES_EACH, allow=frozenset(), moment=1, at_points=False)
@example(tree=LIKE_THE_BLOB, allow=frozenset(), moment=3, at_points=True)
@example(tree=NEIGHBOURS, allow=frozenset(), moment=3, at_points=True)
@example(tree=TWO_NAMES_EACH, allow=frozenset(), moment=2, at_points=False)
def test_an_interruption_anywhere_leaves_every_file_whole_and_can_be_undone(
    goes_on: bool, is_reopened: bool, tree: list[Node], allow: frozenset[Allowance], moment: int,
    at_points: bool,
) -> None:  # fmt: skip
    with made(tree) as (files, store):
        plan = planned(store, *files.folders, allow=allow)
        interrupting = Interrupting(moment)
        faults.hook = interrupting.tick if at_points else None
        try:
            plan.execute(interrupting)
            event("came to its end")
        except KeyboardInterrupt:
            event("interrupted")
        finally:
            faults.hook = None
        if is_reopened:
            store.close()
        with open_store(store.root) if is_reopened else nullcontext(store) as again:
            files.assert_whole(plan)
            if goes_on:
                plan = planned(again, *files.folders, allow=allow)
                result = plan.execute()
                assert (result.replaced, result.skipped) == (plan.files, ())
                assert planned(again, *files.folders, allow=allow).files == 0
            assert undo_everything(again) == []
        with open_store(store.root) as last:
            assert undo_everything(last) == []
            assert files.facts() == files.before
            assert not last.verify(full=True).has_damage
            assert list(last.layout.tmp.glob("*")) == []
