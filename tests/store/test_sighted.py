"""The SQL for what was seen in folders, and an index from before it was kept by directory."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api import SCHEMA_MIGRATIONS as MIGRATIONS
from tests.api import (
    VERSION,
    Candidate,
    FolderSums,
    Index,
    Member,
    Memo,
    ModelFolder,
    Scope,
    StatKey,
    Store,
    Trust,
    scan,
)
from tests.store.files import WEIGHTS, digest_of, write

A, B = bytes([1]) * 32, bytes([2]) * 32


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "index.sqlite3", wal=True)
    yield index
    index.close()


def scope(*folders: int, min_size: int = 1, exclude: tuple[str, ...] = ()) -> Scope:
    return Scope(home="f", boot="boot", folders=folders, min_size=min_size, exclude=exclude)


class Seeing:
    """Puts sightings into an index: `see(b"/m/a", inode=1, size=10)`."""

    def __init__(self, index: Index, folder: str = "/m") -> None:
        self._index = index
        self.number = index.set_folder(Path(folder), program="")

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
            self._index.set_directory(directory, self.number), name, size,
            self._index.filesystem_number(filesystem), inode, 3, 4, links, 512,
        )  # fmt: skip
        self._index.put_seen([row])
        key = (filesystem, inode, size, 3, 4, racy)
        if sample is not None:
            self._index.learn("sample", [(*key, sample)])
        if digest is not None:
            self._index.learn("blake3", [(*key, digest)])


@pytest.fixture
def see(index: Index) -> Seeing:
    return Seeing(index)


def stat_of(inode: int, *, size: int = 10, mtime: int = 3, ctime: int = 4) -> os.stat_result:
    fields = (0o100444, inode, 1, 2, 0, 0, size, 0, 0, 0)
    return os.stat_result(fields, {"st_mtime_ns": mtime, "st_ctime_ns": ctime, "st_blocks": 1})


def members(index: Index, where: Scope, *, with_racy: bool = True) -> list[Member]:
    return [Member(*row) for row in index.members(where, with_racy=with_racy)]


class TestFolders:
    def test_what_was_given_stays_given_and_a_program_stays_known(self, index: Index) -> None:
        first = index.set_folder(Path("/m"), program="ComfyUI", given=True, walked=False)
        assert index.set_folder(Path("/m"), program="", given=False) == first
        (known,) = index.known_folders()
        assert (known.is_given, known.program, known.files) == (True, "ComfyUI", 0)
        assert index.folder_number(Path("/m")) == first
        assert index.folder_number(Path("/n")) is None

    def test_files_and_sizes_are_summed(self, index: Index, see: Seeing) -> None:
        see(b"/m/a", inode=1, size=10)
        see(b"/m/b/c", inode=2, size=5)
        Seeing(index, "/n")
        known = {each.path: (each.files, each.size) for each in index.known_folders()}
        assert known == {Path("/m"): (2, 15), Path("/n"): (0, 0)}

    def test_a_dropped_folder_takes_its_sightings_with_it(self, index: Index, see: Seeing) -> None:
        see(b"/m/a", inode=1)
        Seeing(index, "/n")(b"/n/a", inode=2)
        assert index.drop_folder(Path("/m"))
        assert not index.drop_folder(Path("/m"))
        assert [each.path for each in index.sightings_of_size(10)] == [Path("/n/a")]


class TestDirectories:
    def test_what_was_seen_in_some(self, index: Index, see: Seeing) -> None:
        see(b"/m/a", inode=1)
        see(b"/m/\xff\n/b", inode=2)
        index.set_directory(b"/m/empty", see.number)
        found = index.seen_in([b"/m", b"/m/\xff\n", b"/m/empty", b"/m/unknown"])
        assert {path: (folder, names) for path, (_, folder, names) in found.items()} == {
            b"/m": (see.number, {b"a": (10, 1, 1, 3, 4, 1, 512)}),
            b"/m/\xff\n": (see.number, {b"b": (10, 1, 2, 3, 4, 1, 512)}),
            b"/m/empty": (see.number, {}),
        }
        assert index.seen_in([]) == {}

    def test_one_may_change_to_another_folder(self, index: Index, see: Seeing) -> None:
        see(b"/m/a", inode=1)
        other = index.set_folder(Path("/"), program="")
        number = index.set_directory(b"/m", other)
        assert index.seen_in([b"/m"])[b"/m"][:2] == (number, other)

    def test_names_are_dropped_and_directories_kept(self, index: Index, see: Seeing) -> None:
        for path in (b"/m/a", b"/m/b", b"/m/x/c", b"/m/y/d"):
            see(path, inode=1)
        number = index.set_directory(b"/m", see.number)
        index.drop_seen([(number, b"a"), (number, b"unknown")])
        index.keep_directories(see.number, {number})
        assert [each.path for each in index.sightings_of_size(10)] == [Path("/m/b")]

    def test_filesystems_are_numbered_once(self, index: Index) -> None:
        numbers = [index.filesystem_number(name) for name in ("f", "g", "f")]
        assert numbers[0] == numbers[2] != numbers[1]


class TestSums:
    def test_each_inode_counts_once_in_each_folder_and_in_all(
        self, index: Index, see: Seeing
    ) -> None:
        other = Seeing(index, "/n")
        see(b"/m/a", inode=1, links=1)
        see(b"/m/b", inode=2, links=3)
        see(b"/m/c", inode=2, links=3)
        other(b"/n/d", inode=2, links=3)
        other(b"/n/e", inode=2, links=1, filesystem="g")
        other(b"/n/f", inode=3, links=2)
        found = {each.folder: each for each in index.folder_sums(scope(1, 2))}
        assert found == {
            1: FolderSums(1, files=3, logical=30, physical=1024, shared=512),
            2: FolderSums(2, files=3, logical=30, physical=1536, shared=1024),
            0: FolderSums(0, files=6, logical=60, physical=2048, shared=512),
        }

    def test_only_what_is_asked_for(self, index: Index, see: Seeing) -> None:
        Seeing(index, "/n")(b"/n/x", inode=9)
        see(b"/m/a", inode=1)
        see(b"/m/no/b", inode=2, links=2)
        found = {each.folder: each.files for each in index.folder_sums(scope(1, exclude=("no",)))}
        assert found == {1: 1, 0: 1}
        assert index.folder_sums(scope()) == []


class TestMembers:
    def test_sizes_that_only_one_name_has_are_left_out(self, index: Index, see: Seeing) -> None:
        see(b"/m/a", inode=1, size=10)
        see(b"/m/b", inode=2, size=10)
        see(b"/m/c", inode=3, size=11)
        assert list(index.shared_sizes(scope(1))) == [(10, 2)]
        assert {row.path for row in members(index, scope(1))} == {b"/m/a", b"/m/b"}
        assert members(index, scope(1, min_size=11)) == []

    def test_the_order_is_that_of_groups(self, index: Index, see: Seeing) -> None:
        for number, (size, digest) in enumerate(
            [(5, B), (9, A), (5, None), (9, B), (5, A), (9, A), (5, B), (9, None)]
        ):
            see(b"/m/%d" % number, inode=number, size=size, digest=digest)
        found = [(row.size, row.digest) for row in members(index, scope(1))]
        assert found == [
            (9, None), (9, A), (9, A), (9, B), (5, None), (5, A), (5, B), (5, B),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("key", "is_valid"),
        [((10, 3, 4), True), ((11, 3, 4), False), ((10, 2, 4), False), ((10, 3, 5), False)],
    )
    def test_a_memory_counts_while_the_file_is_the_same(
        self, index: Index, see: Seeing, key: tuple[int, int, int], is_valid: bool
    ) -> None:
        see(b"/m/a", inode=1)
        see(b"/m/b", inode=2)
        index.put_memo("f", 1, Memo(key=StatKey(*key), is_racy=False, values={"blake3": A.hex()}))
        digests = {row.path: row.digest for row in members(index, scope(1))}
        assert digests == {b"/m/a": A if is_valid else None, b"/m/b": None}
        (first, _) = sorted(index.candidates(scope(1), [10]))
        assert first == Candidate(b"/m/a", 10, "f", 1, 3, 4, A if is_valid else None, None)

    def test_inodes_of_another_filesystem_are_others(self, index: Index, see: Seeing) -> None:
        see(b"/m/a", inode=1, digest=A)
        see(b"/m/b", inode=1, filesystem="g")
        assert {row.path: row.digest for row in members(index, scope(1))} == {
            b"/m/a": A,
            b"/m/b": None,
        }

    def test_racy_memories_count_only_for_who_has_just_renewed_them(
        self, index: Index, see: Seeing
    ) -> None:
        see(b"/m/a", inode=1, digest=A, racy=1)
        see(b"/m/b", inode=2, sample=b"s", racy=1)
        (first, second) = sorted(members(index, scope(1)), key=lambda row: row.inode)
        assert (first.digest, second.sample) == (A, b"s")
        (first, second) = sorted(
            members(index, scope(1), with_racy=False), key=lambda row: row.inode
        )
        assert (first.digest, second.sample) == (None, None)
        assert [each[6:] for each in index.candidates(scope(1), [10])] == [(None, None)] * 2

    @pytest.mark.parametrize(
        ("trust", "unsynced", "is_there", "is_known"),
        [
            (Trust.VERIFIED, None, True, True), (Trust.VERIFIED, "boot", True, True),
            (Trust.VERIFIED, "older boot", True, False), (Trust.RELINKED, None, True, False),
            (Trust.UNPROVEN, None, True, False), (Trust.LOST, None, False, False),
            (Trust.TRASHED, None, False, False),
        ],
    )  # fmt: skip
    def test_blobs_are_members_and_vouch_for_their_files(
        self, index: Index, see: Seeing, trust: Trust, unsynced: str | None, is_there: bool,
        is_known: bool,
    ) -> None:  # fmt: skip
        see(b"/m/a", inode=1)
        index.add_blob(A.hex(), stat_of(1), trust=trust, unsynced=unsynced)
        found = members(index, scope(1))
        assert [row.inode for row in found if row.path is None] == ([1] if is_there else [])
        digests = [row.digest for row in found if row.path is not None]
        assert digests == ([A if is_known else None] if is_there else [])
        assert list(index.shared_sizes(scope(1))) == ([(10, 1)] if is_there else [])
        assert index.sizes_of_blobs([10, 11]) == ([(10, 1)] if is_there else [])

    def test_blobs_do_not_vouch_for_files_of_other_filesystems(
        self, index: Index, see: Seeing
    ) -> None:
        see(b"/m/a", inode=1, filesystem="g")
        index.add_blob(A.hex(), stat_of(1))
        assert [row.digest for row in members(index, scope(1)) if row.path] == [None]

    def test_by_samples_the_store_is_not_asked(self, index: Index, see: Seeing) -> None:
        see(b"/m/a", inode=1, sample=b"s")
        see(b"/m/b", inode=2, sample=b"s", digest=A)
        index.add_blob(A.hex(), stat_of(3))
        found = [Member(*row) for row in index.members(scope(1), "sample")]
        assert sorted((row.inode, row.digest) for row in found) == [(1, b"s"), (2, b"s")]

    def test_rows_are_those_of_the_moment_it_began(self, index: Index, see: Seeing) -> None:
        for number in range(3000):
            see(b"/m/%d" % number, inode=number)
        rows = index.members(scope(1))
        next(rows)
        index.drop_folder(Path("/m"))
        assert sum(1 for _ in rows) == 2999

    def test_seen_files_come_by_inode(self, index: Index, see: Seeing) -> None:
        see(b"/m/b", inode=2, sample=b"s")
        see(b"/m/a", inode=1, links=2, digest=A)
        see(b"/m/c", inode=1, links=2)
        see(b"/m/d", inode=3)
        index.add_blob(B.hex(), stat_of(3))
        found = list(index.seen(scope(1)))
        assert [each.path.name for each in found] == ["a", "c", "b", "d"]
        assert [each.digest for each in found] == [A.hex(), A.hex(), "", B.hex()]
        assert [each.is_compared for each in found] == [True, True, True, True]
        assert [each.is_blob for each in found] == [False, False, False, True]


class TestVersion1:
    """An index of version 1 with rows in it: what was seen is forgotten, all else is kept."""

    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        """A store with a blob and a file, its index as version 1 had it."""
        with Store(tmp_path / "store") as store:
            store.pin(store.put_stream([WEIGHTS]).digest, "mine")
            store.place(digest_of(WEIGHTS), tmp_path / "placed.gguf")
            path = write(tmp_path / "models" / "a.gguf", age=100)
            store.digest_of(path, ["blake3", "sha256"])
            store.add_folder(tmp_path / "models", program="ComfyUI")
            new = store.volume.layout.index
        connection = sqlite3.connect(new)
        connection.executescript(
            "DROP TABLE sightings; DROP TABLE directories; DROP TABLE filesystems;"
            " DROP INDEX memos_sha256; ALTER TABLE memos DROP COLUMN sample;"
            " PRAGMA user_version = 1;"
        )
        start = MIGRATIONS[0].index("CREATE TABLE sightings")
        end = MIGRATIONS[0].index("CREATE TABLE memos")
        connection.executescript(MIGRATIONS[0][start:end])
        connection.execute("UPDATE folders SET walked_at = 1")
        connection.execute(
            "INSERT INTO sightings SELECT ?, id, 5, 'f', 1, 2, 3 FROM folders",
            (os.fsencode(path),),
        )
        connection.commit()
        connection.close()
        return tmp_path / "store"

    def test_is_brought_up_to_date(self, old: Path, tmp_path: Path) -> None:
        path = tmp_path / "models" / "a.gguf"
        with Store(old) as store:
            index = store.volume.index
            assert index._value("PRAGMA user_version") == VERSION  # noqa: SLF001
            assert index.is_sound()
            assert store.sightings(5) == []
            (folder,) = store.folders()
            assert (folder.path, folder.program) == (path.parent, "ComfyUI")
            assert (folder.is_given, folder.walked_at, folder.files) == (True, None, 0)
            blob = store.get(digest_of(WEIGHTS))
            assert [str(owner) for owner, _ in store.holders_of(blob)] == ["pin mine"]
            assert [link.path for link in store.links_of(blob)] == [tmp_path / "placed.gguf"]
            memo = index.memo(store.volume.filesystem, path.stat().st_ino)
            assert memo is not None
            assert set(memo.values) == {"blake3", "sha256"}

    def test_the_next_scan_sees_everything_again(self, old: Path, tmp_path: Path) -> None:
        with Store(old) as store:
            found = scan(store, [ModelFolder(path=tmp_path / "models")], min_size=1)
            assert (found.total.files, found.groups) == (1, 1)
            assert [each.path.name for each in store.sightings(len(WEIGHTS))] == ["a.gguf"]
            assert store.volume.index.is_sound()

    def test_a_second_process_finds_it_done(self, old: Path) -> None:
        with Store(old) as first, Store(old) as second:
            assert [each.path for each in first.folders()] == [
                each.path for each in second.folders()
            ]
