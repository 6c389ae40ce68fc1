"""The SQL for what was seen in folders, and an index of an older version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.store.catalog import Candidate, Catalog, FolderSums, Member, Scope
from smartcache.store.index import Index
from smartcache.store.records import Trust
from tests.store.files import row

A, B = bytes([1]) * 32, bytes([2]) * 32


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    index = Index(tmp_path / "index.sqlite3", wal=True)
    yield Catalog(index)
    index.close()


def scope(*folders: int, min_size: int = 1, exclude: tuple[str, ...] = ()) -> Scope:
    return Scope(home="f", boot="boot", folders=folders, min_size=min_size, exclude=exclude)


class Seeing:
    """Puts sightings into a catalog: `see(b"/m/a", inode=1, size=10)`."""

    def __init__(self, catalog: Catalog, folder: str = "/m") -> None:
        self._catalog = catalog
        self.number = catalog.set_folder(Path(folder), program="")

    def __call__(
        self,
        path: bytes,
        *,
        inode: int,
        size: int = 10,
        links: int = 1,
        filesystem: str = "f",
        digest: bytes | None = None,
        sample: bytes | None = None,
        racy: int = 0,
    ) -> None:
        directory, name = os.path.split(path)
        row = (
            self._catalog.set_directory(directory, self.number), name, size,
            self._catalog.filesystem_number(filesystem), inode, 3, 4, links, 512,
        )  # fmt: skip
        self._catalog.put_seen([row])
        key = (filesystem, inode, size, 3, 4, racy)
        if sample is not None:
            self._catalog.learn([(*key, None, sample)])
        if digest is not None:
            self._catalog.learn([(*key, digest, None)])


@pytest.fixture
def see(catalog: Catalog) -> Seeing:
    return Seeing(catalog)


def stat_of(inode: int, *, size: int = 10, mtime: int = 3, ctime: int = 4) -> os.stat_result:
    fields = (0o100444, inode, 1, 2, 0, 0, size, 0, 0, 0)
    return os.stat_result(fields, {"st_mtime_ns": mtime, "st_ctime_ns": ctime, "st_blocks": 1})


def members(catalog: Catalog, where: Scope, *, with_racy: bool = True) -> list[Member]:
    return [Member(*row) for row in catalog.members(where, with_racy=with_racy)]


class TestFolders:
    def test_what_was_given_stays_given_and_a_program_stays_known(self, catalog: Catalog) -> None:
        first = catalog.set_folder(Path("/m"), program="ComfyUI", given=True, walked=False)
        assert catalog.set_folder(Path("/m"), program="", given=False) == first
        (known,) = catalog.known_folders()
        assert (known.is_given, known.program, known.files) == (True, "ComfyUI", 0)
        assert catalog.folder_number(Path("/m")) == first
        assert catalog.folder_number(Path("/n")) is None

    def test_files_and_sizes_are_summed(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1, size=10)
        see(b"/m/b/c", inode=2, size=5)
        Seeing(catalog, "/n")
        known = {each.path: (each.files, each.size) for each in catalog.known_folders()}
        assert known == {Path("/m"): (2, 15), Path("/n"): (0, 0)}

    def test_a_dropped_folder_takes_its_sightings_with_it(
        self, catalog: Catalog, see: Seeing
    ) -> None:
        see(b"/m/a", inode=1)
        Seeing(catalog, "/n")(b"/n/a", inode=2)
        assert catalog.drop_folder(Path("/m"))
        assert not catalog.drop_folder(Path("/m"))
        assert [each.path for each in catalog.sightings_of_size(10)] == [Path("/n/a")]


class TestDirectories:
    def test_what_was_seen_in_some(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1)
        see(b"/m/\xff\n/b", inode=2)
        catalog.set_directory(b"/m/empty", see.number)
        found = catalog.seen_in([b"/m", b"/m/\xff\n", b"/m/empty", b"/m/unknown"])
        assert {path: (folder, names) for path, (_, folder, names) in found.items()} == {
            b"/m": (see.number, {b"a": (10, 1, 1, 3, 4, 1, 512)}),
            b"/m/\xff\n": (see.number, {b"b": (10, 1, 2, 3, 4, 1, 512)}),
            b"/m/empty": (see.number, {}),
        }
        assert catalog.seen_in([]) == {}

    def test_one_may_change_to_another_folder(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1)
        other = catalog.set_folder(Path("/"), program="")
        number = catalog.set_directory(b"/m", other)
        assert catalog.seen_in([b"/m"])[b"/m"][:2] == (number, other)

    def test_names_are_dropped_and_directories_kept(self, catalog: Catalog, see: Seeing) -> None:
        for path in (b"/m/a", b"/m/b", b"/m/x/c", b"/m/y/d"):
            see(path, inode=1)
        number = catalog.set_directory(b"/m", see.number)
        catalog.drop_seen([(number, b"a"), (number, b"unknown")])
        catalog.keep_directories(see.number, {number})
        assert [each.path for each in catalog.sightings_of_size(10)] == [Path("/m/b")]

    def test_filesystems_are_numbered_once(self, catalog: Catalog) -> None:
        numbers = [catalog.filesystem_number(name) for name in ("f", "g", "f")]
        assert numbers[0] == numbers[2] != numbers[1]


class TestSums:
    def test_each_inode_counts_once_in_each_folder_and_in_all(
        self, catalog: Catalog, see: Seeing
    ) -> None:
        other = Seeing(catalog, "/n")
        see(b"/m/a", inode=1, links=1)
        see(b"/m/b", inode=2, links=3)
        see(b"/m/c", inode=2, links=3)
        other(b"/n/d", inode=2, links=3)
        other(b"/n/e", inode=2, links=1, filesystem="g")
        other(b"/n/f", inode=3, links=2)
        found = {each.folder: each for each in catalog.folder_sums(scope(1, 2))}
        assert found == {
            1: FolderSums(1, files=3, logical=30, physical=1024, shared=512),
            2: FolderSums(2, files=3, logical=30, physical=1536, shared=1024),
            0: FolderSums(0, files=6, logical=60, physical=2048, shared=512),
        }

    def test_only_what_is_asked_for(self, catalog: Catalog, see: Seeing) -> None:
        Seeing(catalog, "/n")(b"/n/x", inode=9)
        see(b"/m/a", inode=1)
        see(b"/m/no/b", inode=2, links=2)
        found = {each.folder: each.files for each in catalog.folder_sums(scope(1, exclude=("no",)))}
        assert found == {1: 1, 0: 1}
        assert catalog.folder_sums(scope()) == []


class TestMembers:
    def test_sizes_that_only_one_name_has_are_left_out(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1, size=10)
        see(b"/m/b", inode=2, size=10)
        see(b"/m/c", inode=3, size=11)
        assert list(catalog.shared_sizes(scope(1))) == [(10, 2)]
        assert {row.path for row in members(catalog, scope(1))} == {b"/m/a", b"/m/b"}
        assert members(catalog, scope(1, min_size=11)) == []

    def test_the_order_is_that_of_groups(self, catalog: Catalog, see: Seeing) -> None:
        for number, (size, digest) in enumerate(
            [(5, B), (9, A), (5, None), (9, B), (5, A), (9, A), (5, B), (9, None)]
        ):
            see(b"/m/%d" % number, inode=number, size=size, digest=digest)
        found = [(row.size, row.digest) for row in members(catalog, scope(1))]
        assert found == [
            (9, None), (9, A), (9, A), (9, B), (5, None), (5, A), (5, B), (5, B),
        ]  # fmt: skip

    def test_a_memory_counts_while_the_file_is_the_same(
        self, catalog: Catalog, see: Seeing
    ) -> None:
        see(b"/m/a", inode=1)
        see(b"/m/b", inode=2)
        for key in ((10, 3, 4), (11, 3, 4), (10, 2, 4), (10, 3, 5)):
            catalog.learn([("f", 1, *key, 0, A, None)])
            known = A if key == (10, 3, 4) else None
            with row(key):
                digests = {each.path: each.digest for each in members(catalog, scope(1))}
                assert digests == {b"/m/a": known, b"/m/b": None}
                (first, _) = sorted(catalog.candidates(scope(1), [10]))
                assert first == Candidate(b"/m/a", 10, "f", 1, 3, 4, known, None)

    def test_inodes_of_another_filesystem_are_others(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1, digest=A)
        see(b"/m/b", inode=1, filesystem="g")
        assert {row.path: row.digest for row in members(catalog, scope(1))} == {
            b"/m/a": A,
            b"/m/b": None,
        }

    def test_racy_memories_count_only_for_who_has_just_renewed_them(
        self, catalog: Catalog, see: Seeing
    ) -> None:
        see(b"/m/a", inode=1, digest=A, racy=1)
        see(b"/m/b", inode=2, sample=b"s", racy=1)
        for with_racy, known in ((True, (A, b"s")), (False, (None, None))):
            found = members(catalog, scope(1), with_racy=with_racy)
            (first, second) = sorted(found, key=lambda each: each.inode)
            assert (first.digest, second.sample) == known
        assert [each[6:] for each in catalog.candidates(scope(1), [10])] == [(None, None)] * 2

    def test_blobs_are_members_and_vouch_for_their_files(
        self, catalog: Catalog, see: Seeing
    ) -> None:
        see(b"/m/a", inode=1)
        rows = [
            (Trust.VERIFIED, None, True, True), (Trust.VERIFIED, "boot", True, True),
            (Trust.VERIFIED, "older boot", True, False), (Trust.UNPROVEN, None, True, False),
            (Trust.LOST, None, False, False),
        ]  # fmt: skip
        for trust, unsynced, is_there, is_known in rows:
            catalog.index.add_blob(A.hex(), stat_of(1), trust=trust, unsynced=unsynced)
            with row(trust, unsynced):
                found = members(catalog, scope(1))
                assert [each.inode for each in found if each.path is None] == [1] * is_there
                digests = [each.digest for each in found if each.path is not None]
                assert digests == [A if is_known else None] * is_there
                assert list(catalog.shared_sizes(scope(1))) == [(10, 1)] * is_there
                assert catalog.sizes_of_blobs([10, 11]) == [(10, 1)] * is_there

    def test_blobs_do_not_vouch_for_files_of_other_filesystems(
        self, catalog: Catalog, see: Seeing
    ) -> None:
        see(b"/m/a", inode=1, filesystem="g")
        catalog.index.add_blob(A.hex(), stat_of(1))
        assert [row.digest for row in members(catalog, scope(1)) if row.path] == [None]

    def test_by_samples_the_store_is_not_asked(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1, sample=b"s")
        see(b"/m/b", inode=2, sample=b"s", digest=A)
        catalog.index.add_blob(A.hex(), stat_of(3))
        found = [Member(*row) for row in catalog.members(scope(1), "sample")]
        assert sorted((row.inode, row.digest) for row in found) == [(1, b"s"), (2, b"s")]

    def test_rows_are_those_of_the_moment_it_began(self, catalog: Catalog, see: Seeing) -> None:
        for number in range(3000):
            see(b"/m/%d" % number, inode=number)
        rows = catalog.members(scope(1))
        next(rows)
        catalog.drop_folder(Path("/m"))
        assert sum(1 for _ in rows) == 2999

    def test_seen_files_come_by_inode(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/b", inode=2, sample=b"s")
        see(b"/m/a", inode=1, links=2, digest=A)
        see(b"/m/c", inode=1, links=2)
        see(b"/m/d", inode=3)
        catalog.index.add_blob(B.hex(), stat_of(3))
        found = list(catalog.seen(scope(1)))
        assert [each.path.name for each in found] == ["a", "c", "b", "d"]
        assert [each.digest for each in found] == [A.hex(), A.hex(), "", B.hex()]
        assert [each.is_compared for each in found] == [True, True, True, True]
        assert [each.is_blob for each in found] == [False, False, False, True]
