"""Which copy survives, what a group could free, and sums over all groups."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smartcache.folders.groups import Grouping, Tally
from smartcache.folders.programs import ModelFolder
from smartcache.store.catalog import Member
from tests.folders.counting import Unhindered

HOME, OTHER = 1, 2
FOLDERS = {
    1: ModelFolder(path=Path("/x/a")),
    2: ModelFolder(path=Path("/x/a-b"), program="ComfyUI"),
    3: ModelFolder(path=Path("/x/webui"), program="A1111"),
    4: ModelFolder(path=Path("/x/forge"), program="Forge"),
    5: ModelFolder(path=Path(os.fsdecode(b"/x/\xff")), program="LM Studio"),
}
BLOBS = ModelFolder(path=Path("/store/blobs"), program="smartcache")
POOL = 9
DIGEST = bytes(range(32))


def world(*, any_file: bool = False) -> Grouping:
    return Grouping(
        folders=FOLDERS, pools={POOL: BLOBS}, filesystem=str, checks=Unhindered(),
        any_file=any_file,
    )  # fmt: skip


def row(
    inode: int, *, name: str = "m.safetensors", folder: int = 1, filesystem: int = HOME,
    links: int = 1, mtime: int = 5, size: int = 100, allocated: int = 4096,
    digest: bytes | None = DIGEST,
) -> Member:  # fmt: skip
    directory = os.fsencode({**FOLDERS, POOL: BLOBS}[folder].path / f"{inode}")
    return Member(
        size, digest, None, filesystem, inode, directory, os.fsencode(name), folder, links,
        allocated, mtime, 7, 0o644, 0, 0,
    )  # fmt: skip


def blob(inode: int, *, links: int = 1, filesystem: int = HOME, mtime: int = 9) -> Member:
    return row(
        inode, name=DIGEST.hex(), folder=POOL, links=links, filesystem=filesystem, mtime=mtime
    )


EDITED = [row(1, name="a.db"), row(2, name="b.db")]
KEYED = row(3, folder=3, mtime=9)
OUTSIDE = row(2, links=3, mtime=9)
GROUPS: dict[str, tuple[list[Member], tuple[int, ...] | None]] = {
    "names of one inode": ([row(1, name="a.gguf", links=2), row(1, links=2)], None),
    "and a copy": ([row(1, name="a.gguf", links=2), row(1, links=2), row(2)], (1, 2, 4096, 0, 0)),
    "one number on two filesystems": ([row(1), row(1, filesystem=OTHER)], (1, 2, 0, 4096, 0)),
    "each filesystem keeps one": (
        [row(1), row(2), row(3), row(4, filesystem=OTHER), row(5, filesystem=OTHER)],
        (1, 5, 3 * 4096, 4096, 0),
    ),
    "a blob alone": ([blob(1)], None),
    "a blob with its own file": ([blob(1, links=2), row(1, links=2)], None),
    "a blob that no folder has": ([blob(1), row(2)], (1, 2, 4096, 0, 0)),
    "unknown bytes": ([row(1, digest=None), row(2, digest=None)], None),
    "equal digests of different sizes": ([row(1, size=10), row(2, size=9)], None),
    "names outside give nothing back": (
        [row(1, links=2), row(2, links=2), row(3)], (1, 3, 4096, 0, 0),
    ),
    "a sparse file gives back what it takes": (
        [row(1, allocated=0, mtime=9), row(2)], (2, 2, 0, 0, 0),
    ),
    "what programs edit": (EDITED, (1, 2, 0, 0, 2 * 4096)),
    "by one name of such a kind": (
        [row(1, name="a.db", links=2), row(1, links=2), row(2, mtime=1)], (2, 2, 0, 0, 4096),
    ),
    # who survives
    "a blob before all": (
        [row(1, mtime=1), row(2, folder=3), row(3, links=2), row(4, links=2, mtime=9),
         blob(4, links=2)], (4, 4, 2 * 4096, 0, 0),
    ),
    "a blob of another pool": (
        [row(7, filesystem=OTHER, mtime=9, links=2), row(8, filesystem=OTHER),
         blob(7, filesystem=OTHER, mtime=9, links=2)], (7, 2, 4096, 0, 0),
    ),
    "then the file of a program that keys on its time": (
        [row(1, mtime=1), OUTSIDE, KEYED], (3, 3, 4096, 0, 0),
    ),
    "as Forge does": ([row(1, mtime=1), row(3, folder=4, mtime=9)], (3, 2, 4096, 0, 0)),
    "of two such files the oldest": ([KEYED, row(2, folder=4, mtime=8)], (2, 2, 4096, 0, 0)),
    "any of its names may be that program's": (
        [row(1, mtime=1), row(2, links=2, mtime=9), row(2, links=2, folder=3, mtime=9)],
        (2, 2, 4096, 0, 0),
    ),
    "then one with names outside": ([row(1, mtime=1), OUTSIDE], (2, 2, 4096, 0, 0)),
    "then the oldest": (
        [row(1, mtime=3), row(2, mtime=1), row(3, mtime=2)], (2, 3, 2 * 4096, 0, 0),
    ),
    "then the first by the bytes of its path": ([row(1), row(2, folder=2)], (2, 2, 4096, 0, 0)),
    "not one that programs edit": (
        [row(1, name="a.db", mtime=1), row(2, mtime=2), row(3, mtime=3)], (2, 3, 4096, 0, 4096),
    ),
}  # fmt: skip
"""Members, and the survivor, the number of copies, what is to free, elsewhere and left alone."""


@pytest.mark.parametrize("what", GROUPS)
def test_what_makes_a_group_which_copy_survives_and_what_it_could_free(what: str) -> None:
    rows, expected = GROUPS[what]
    found = [
        (each.copies[0].inode, len(each.copies), each.freeable, each.elsewhere,
         sum(skip.size for skip in each.skipped))
        for each in world().groups(rows)
    ]  # fmt: skip
    assert found == ([] if expected is None else [expected])


def test_a_blob_has_its_path_in_the_store_and_knows_its_names_outside() -> None:
    for links, outside in ((1, 0), (2, 1), (3, 2)):
        (group,) = world().groups([blob(1, links=links), row(2)])
        first = group.copies[0]
        assert (first.path, first.names[0].folder) == (BLOBS.path / "1" / DIGEST.hex(), BLOBS)
        assert (first.is_blob, first.outside_names, group.digest) == (True, outside, DIGEST.hex())


# sums over groups, by building each


def some_rows(seed: int, most: int) -> list[Member]:
    """Rows as the index gives them: the largest first; plain ones mostly."""
    chance = random.Random(seed)
    inodes = itertools.count(1)
    rows: list[Member] = []
    for size in range(most, 0, -1):
        for digest in (None, b"1" * 32, b"2" * 32):
            copies = chance.choice([0, 1, 2, 2, 3, 4])
            stored = chance.randrange(10) if digest else -1
            for number in range(copies):
                is_odd, is_blob = chance.random() < 0.4, number == stored
                names = chance.choice([1, 2, 3]) if is_odd else 1
                first = row(
                    next(inodes), digest=digest, size=size, mtime=chance.choice([1, 1, 2]),
                    filesystem=chance.choice([HOME, OTHER]) if is_odd and not is_blob else HOME,
                    links=names + is_blob + (chance.choice([0, 1]) if is_odd else 0),
                    allocated=chance.choice([0, 4096, 8192]),
                )  # fmt: skip
                for name in range(names):
                    kind = chance.choice(["gguf", "safetensors", "db"]) if is_odd else "gguf"
                    folder = chance.choice(list(FOLDERS) if is_odd else [1, 2, 5])
                    place = row(first.inode, folder=folder, name=f"{name}.{kind}")
                    rows.append(
                        first._replace(
                            directory=place.directory, name=place.name, folder=place.folder
                        )
                    )
                if is_blob:
                    place = blob(first.inode)
                    rows.append(first._replace(directory=place.directory, folder=POOL))
    return rows


@given(
    rows=st.builds(some_rows, st.integers(0, 1 << 32), st.integers(1, 4)), any_file=st.booleans()
)
@hypothesis_settings(max_examples=hypothesis_settings().max_examples * 3)
def test_sums_are_those_of_the_groups_and_the_best_come_first(
    rows: list[Member], any_file: bool
) -> None:
    where = world(any_file=any_file)
    found = list(where.groups(rows))
    every_kind = {(each.size, each.digest): each for each in world(any_file=True).groups(rows)}
    tally = Tally(where)
    tally.add(rows)
    assert tally.freeable == sum(group.freeable for group in found)
    assert tally.elsewhere == sum(group.elsewhere for group in found)
    more = sum(group.freeable for group in every_kind.values()) - tally.freeable
    assert sum(each.size for each in tally.left() if each.options) == more
    assert tally.groups == sum(group.freeable > 0 for group in found)
    by_folder = Counter[int]()
    numbers = {folder.path: number for number, folder in FOLDERS.items()}
    for group in found:
        firsts = {copy.filesystem: copy for copy in reversed(group.copies)}
        for copy in group.copies:
            first = firsts[copy.filesystem]
            if copy is not first and copy.is_linkable and first.is_linkable:
                by_folder[numbers.get(copy.names[0].folder.path, 0)] += copy.gain
    assert +tally.by_folder == +by_folder
    assert tally.by_folder.total() == tally.freeable

    matter = [
        each
        for each in found
        if each.freeable or each.elsewhere or every_kind[each.size, each.digest].freeable
    ]
    best = list(tally.best(len(rows)))
    gains = [(each.freeable, each.elsewhere) for each in best]
    assert gains == sorted(((each.freeable, each.elsewhere) for each in matter), reverse=True)
    assert {(each.size, each.digest) for each in best} == {
        (each.size, each.digest) for each in matter
    }
    assert list(tally.best(2)) == best[:2]
    assert tally.count == len(matter)
