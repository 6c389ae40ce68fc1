"""Which copy survives, what a group could free, and sums over all groups."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smartcache.folders.groups import KEPT, Group, Grouping, Tally
from smartcache.folders.programs import ModelFolder
from smartcache.store.catalog import MemberRow
from tests.folders.counting import Unhindered

HOME, OTHER = "home", "other"
FOLDERS = {
    1: ModelFolder(path=Path("/x/a")),
    2: ModelFolder(path=Path("/x/a-b"), program="ComfyUI"),
    3: ModelFolder(path=Path("/x/webui"), program="A1111"),
    4: ModelFolder(path=Path("/x/forge"), program="Forge"),
    5: ModelFolder(path=Path(os.fsdecode(b"/x/\xff")), program="LM Studio"),
}
STORE = ModelFolder(path=Path("/store"), program="smartcache")
DIGEST = bytes(range(32))


def is_blob_elsewhere(filesystem: str, inode: int) -> bool:
    """Whether the volume on the other filesystem has an inode."""
    return filesystem == OTHER and inode % 7 == 0


def world(*, any_file: bool = False, is_proven: bool = True) -> Grouping:
    return Grouping(
        folders=FOLDERS,
        store=STORE,
        blob_path=lambda digest: STORE.path / digest,
        is_blob=is_blob_elsewhere,
        checks=Unhindered(),
        any_file=any_file,
        is_proven=is_proven,
    )


def row(
    inode: int,
    *,
    name: str = "m.safetensors",
    folder: int = 1,
    filesystem: str = HOME,
    links: int = 1,
    mtime: int = 5,
    size: int = 100,
    allocated: int = 4096,
    digest: bytes | None = DIGEST,
    sample: bytes | None = None,
) -> MemberRow:
    path = os.fsencode(FOLDERS[folder].path / f"{inode}" / name)
    return (size, digest, filesystem, inode, path, folder, links, allocated, mtime, sample)


def blob(inode: int, *, links: int = 1, size: int = 100, digest: bytes = DIGEST) -> MemberRow:
    return (size, digest, HOME, inode, None, 0, links, 4096, 9, None)


def made(*rows: MemberRow, any_file: bool = False) -> Group:
    group = world(any_file=any_file).group(list(rows))
    assert group is not None
    return group


def left_of(group: Group) -> int:
    return sum(skip.size for skip in group.skipped)


class TestGroups:
    def test_names_of_one_inode_are_one_copy(self) -> None:
        rows = [row(1, name="a.gguf", links=2), row(1, name="b.gguf", links=2)]
        assert world().group(rows) is None
        group = made(*rows, row(2))
        assert [len(copy.names) for copy in group.copies] == [2, 1]

    def test_inodes_of_two_filesystems_with_one_number_are_two(self) -> None:
        assert len(made(row(1), row(1, filesystem=OTHER)).copies) == 2

    def test_a_blob_alone_or_with_its_own_file_is_no_group(self) -> None:
        assert world().group([blob(1)]) is None
        assert world().group([blob(1, links=2), row(1, links=2)]) is None

    def test_a_blob_that_no_folder_has_is_a_copy_in_the_store(self) -> None:
        group = made(blob(1), row(2))
        first = group.copies[0]
        assert (first.path, first.names[0].folder) == (STORE.path / DIGEST.hex(), STORE)
        assert (first.is_blob, group.freeable) == (True, 4096)
        for links, outside in ((1, 0), (2, 1), (3, 2)):
            assert made(blob(1, links=links), row(2)).copies[0].outside_names == outside

    def test_likely_groups_have_no_digest(self) -> None:
        group = world(is_proven=False).group([row(1), row(2)])
        assert group is not None
        assert group.digest == ""
        assert made(row(1), row(2)).digest == DIGEST.hex()

    def test_unknown_bytes_make_no_group(self) -> None:
        rows = [row(1, digest=None), row(2, digest=None), row(3), row(4)]
        (group,) = world().groups(rows)
        assert sorted(copy.inode for copy in group.copies) == [3, 4]

    def test_equal_digests_of_different_sizes_make_no_group(self) -> None:
        """Samples may be equal by chance of their sizes; members follow each other by size."""
        assert list(world().groups([row(1, size=10), row(2, size=9)])) == []


def test_which_copy_survives() -> None:
    edited = row(1, name="a.db", mtime=1)
    keyed = row(3, folder=3, mtime=9)
    outside = row(2, links=3, mtime=9)
    cases: dict[str, tuple[list[MemberRow], int]] = {
        "a blob before all": (
            [row(1, mtime=1), row(2, folder=3), row(3, links=2), row(4, links=2, mtime=9),
             blob(4, links=2)], 4,
        ),
        "a blob of a volume elsewhere": (
            [row(7, filesystem=OTHER, mtime=9), row(8, filesystem=OTHER)], 7,
        ),
        "then the file of a program that keys on its time": ([row(1, mtime=1), outside, keyed], 3),
        "as Forge does": ([row(1, mtime=1), outside, row(3, folder=4, mtime=9)], 3),
        "of two such files the oldest": ([keyed, row(2, folder=4, mtime=8)], 2),
        "any of its names may be that program's": (
            [row(1, mtime=1), row(2, links=2, mtime=9), row(2, links=2, folder=3, mtime=9)], 2,
        ),
        "then one with names outside": ([row(1, mtime=1), outside], 2),
        "then the oldest": ([row(1, mtime=3), row(2, mtime=1), row(3, mtime=2)], 2),
        "then the first by the bytes of its path": ([row(1), row(2, folder=2)], 2),
        "not one that programs edit": ([edited, row(2, mtime=2), row(3, mtime=3)], 2),
    }  # fmt: skip
    for what, (rows, survivor) in cases.items():
        assert made(*rows).copies[0].inode == survivor, what
    assert made(row(1, mtime=1), outside).freeable == 4096


class TestGains:
    def test_each_filesystem_keeps_one(self) -> None:
        here = [row(number, mtime=number) for number in (1, 2, 3)]
        there = [row(number, filesystem=OTHER, mtime=number) for number in (4, 5)]
        group = made(*here, *there)
        assert (group.freeable, group.elsewhere) == (3 * 4096, 4096)

    def test_copies_with_names_outside_give_nothing_back(self) -> None:
        group = made(row(1, links=2), row(2, links=2), row(3))
        assert group.freeable == 4096
        assert sorted(copy.gain for copy in group.copies) == [0, 0, 4096]

    def test_disk_blocks_count(self) -> None:
        """A sparse file gives back what it takes."""
        sparse = row(1, allocated=0, mtime=9, size=1 << 30)
        assert made(sparse, row(2, size=1 << 30)).freeable == 0

    def test_what_programs_edit_is_left_out_unless_asked_for(self) -> None:
        rows = (row(1, name="a.db"), row(2, name="b.db"))
        for any_file, expected in ((False, (0, 2 * 4096)), (True, (4096, 0))):
            group = made(*rows, any_file=any_file)
            assert (group.freeable, left_of(group)) == expected
        # One name of such a kind is enough.
        group = made(row(1, name="a.db", links=2), row(1, links=2), row(2, mtime=1))
        assert (group.freeable, left_of(group)) == (0, 4096)


# sums over groups, by building each


def some_rows(seed: int, most: int) -> list[MemberRow]:
    """Rows as the index gives them: by size, those of unknown bytes first, then by digest."""
    chance = random.Random(seed)
    inodes = itertools.count(1)
    rows: list[MemberRow] = []
    for size in range(most, 0, -1):
        for digest in (None, b"1" * 32, b"2" * 32):
            has_blob = False
            for _ in range(chance.choice([0, 1, 2, 2, 3, 4])):
                is_blob = digest is not None and not has_blob and chance.random() < 0.1
                has_blob |= is_blob
                rows += some_names(chance, next(inodes), size, digest, is_blob=is_blob)
    return rows


def some_names(
    chance: random.Random, inode: int, size: int, digest: bytes | None, *, is_blob: bool
) -> list[MemberRow]:
    """The rows of one inode, plain ones mostly."""
    is_odd = chance.random() < 0.4
    names = chance.choice([1, 2, 3]) if is_odd else 1
    links = names + is_blob + (chance.choice([0, 1]) if is_odd else 0)
    filesystem = OTHER if is_odd and not is_blob and chance.random() < 0.5 else HOME
    links += is_blob_elsewhere(filesystem, inode)  # the name that the volume there has for it
    mtime, allocated = chance.choice([1, 1, 2]), chance.choice([0, 4096, 8192])
    sample = chance.choice([None, b"s", b"t", b"u", b"v"])
    kinds = ["gguf", "safetensors", "db"] if is_odd else ["gguf"]
    rows = [
        row(
            inode, name=f"{number}.{chance.choice(kinds)}", digest=digest, size=size,
            folder=chance.choice(list(FOLDERS) if is_odd else [1, 2, 5]), filesystem=filesystem,
            links=links, mtime=mtime, allocated=allocated, sample=sample,
        )
        for number in range(names)
    ]  # fmt: skip
    if is_blob and digest is not None:
        rows.append(
            (*blob(inode, links=links, size=size, digest=digest)[:7], allocated, mtime, None)
        )
    return rows


all_rows = st.builds(some_rows, st.integers(0, 1 << 32), st.integers(1, 4))


@given(rows=all_rows, any_file=st.booleans())
@hypothesis_settings(max_examples=hypothesis_settings().max_examples * 3)
def test_sums_are_those_of_the_groups(rows: list[MemberRow], any_file: bool) -> None:
    where = world(any_file=any_file)
    found = list(where.groups(rows))
    tally = Tally(where, rows)
    assert tally.freeable == sum(group.freeable for group in found)
    assert tally.elsewhere == sum(group.elsewhere for group in found)
    every_kind = sum(group.freeable for group in world(any_file=True).groups(rows))
    assert sum(each.size for each in tally.left() if each.options) == every_kind - tally.freeable
    assert tally.groups == sum(group.freeable > 0 for group in found)
    by_folder: dict[int, int] = defaultdict(int)
    numbers = {folder.path: number for number, folder in FOLDERS.items()}
    for group in found:
        firsts = {copy.filesystem: copy for copy in reversed(group.copies)}
        for copy in group.copies:
            first = firsts[copy.filesystem]
            if copy is not first and copy.is_linkable and first.is_linkable:
                by_folder[numbers.get(copy.names[0].folder.path, 0)] += copy.gain
    assert {n: size for n, size in tally.by_folder.items() if size} == {
        n: size for n, size in by_folder.items() if size
    }
    assert sum(tally.by_folder.values()) == tally.freeable


@given(rows=all_rows)
def test_the_best_groups_are_those_with_the_most_to_free(rows: list[MemberRow]) -> None:
    tally = Tally(world(), rows)
    every_kind = {(each.size, each.digest): each for each in world(any_file=True).groups(rows)}
    found = [
        each
        for each in world().groups(rows)
        if each.freeable or each.elsewhere or every_kind[each.size, each.digest].freeable
    ]
    best = list(tally.best(len(rows)))
    key = [(each.freeable, each.elsewhere) for each in best]
    assert key == sorted(((each.freeable, each.elsewhere) for each in found), reverse=True)
    assert {each.digest + str(each.size) for each in best} == {
        each.digest + str(each.size) for each in found
    }
    assert list(tally.best(2)) == best[:2]
    assert tally.has_all


@pytest.mark.parametrize("count", [KEPT - 1, KEPT, KEPT + 1, 3 * KEPT])
def test_of_many_groups_the_best_are_kept(count: int) -> None:
    gains = [(number * 7919) % 10007 + 1 for number in range(count)]
    rows: list[MemberRow] = []
    for number, each in enumerate(gains):
        digest = number.to_bytes(32, "big")
        rows += [row(2 * number + side, digest=digest, allocated=each) for side in (1, 2)]
    tally = Tally(world(), rows)
    found = [group.freeable for group in tally.best(KEPT)]
    assert found == sorted(gains, reverse=True)[:KEPT]
    assert tally.has_all == (count <= KEPT)


@given(rows=all_rows)
def test_sizes_that_may_hold_unknown_duplicates_are_named(rows: list[MemberRow]) -> None:
    """Every pair of files of one size must be known to be equal or not, or be compared."""
    tally = Tally(world(), rows)
    unknown = {
        a[0]
        for a, b in itertools.combinations(rows, 2)
        if a[0] == b[0] and a[2:4] != b[2:4] and (a[1] is None or b[1] is None)
        if a[9] is None or b[9] is None or a[9] == b[9]
    }
    assert tally.unresolved == unknown
