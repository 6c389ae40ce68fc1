"""The tables of the index: every question it answers, every version, no row too many."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from smartcache.errors import IndexDamagedError, StoreError, StoreFormatError
from smartcache.store.catalog import Catalog
from smartcache.store.index import SCHEMA, VERSION, Index
from smartcache.store.records import Memo, Owner, Sighting, Trust
from smartcache.store.store import Store
from smartcache.store.upkeep.verify import rebuild, replace_damaged_index
from smartcache.system.kernel import StatKey
from smartcache.system.sqlite import connect, signed
from tests.processes.children import Child
from tests.store.files import row, write

A, B, C = ("aa" * 32, "ab" * 32, "cc" * 32)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "index.sqlite3", wal=True)
    yield index
    index.close()


def stat_of(inode: int = 7, *, size: int = 100, links: int = 1, blocks: int = 8) -> os.stat_result:
    fields = (0o100444, inode, 1, links, 0, 0, size, 0, 0, 0)
    more = {"st_mtime_ns": 11, "st_ctime_ns": 22, "st_blocks": blocks}
    return os.stat_result(fields, more)


class TestSchema:
    def test_a_new_index_has_the_newest_version(self, index: Index) -> None:
        assert version_of(index.path) == VERSION
        assert index.is_new
        assert index.is_sound()

    def test_an_index_of_a_newer_version_is_refused_and_left_alone(self, store: Store) -> None:
        store.close()
        path = store.volume.layout.index
        for newer in (VERSION + 1, 999):
            with closing(sqlite3.connect(path)) as connection:
                connection.execute(f"PRAGMA user_version = {newer}")
            with row(newer), pytest.raises(StoreFormatError, match=f"schema {newer}"):
                Store(store.root)
            assert version_of(path) == newer

    def test_an_index_of_an_older_version_is_made_again_when_asked_for(self, store: Store) -> None:
        digest = store.put_stream([b"kept"]).digest
        store.close()
        with closing(sqlite3.connect(store.volume.layout.index)) as connection:
            connection.execute(f"PRAGMA user_version = {VERSION - 1}")
        with pytest.raises(IndexDamagedError, match=f"schema {VERSION - 1}") as caught:
            Store(store.root)
        assert "verify --rebuild" in caught.value.hint
        with closing(replace_damaged_index(store.root, store.settings)) as volume:
            rebuild(volume)
        with Store(store.root) as again, again.open(digest) as file:
            assert file.read() == b"kept"

    def test_a_schema_that_fails_leaves_no_table(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "index.sqlite3"
        broken = f"{SCHEMA}; CREATE TABLE extra (x); CREATE TABLE extra (x)"
        monkeypatch.setattr(Index, "schema", broken)
        with pytest.raises(StoreError):
            Index(path, wal=True)
        assert version_of(path) == 0
        assert not tables_of(path)

    def test_processes_that_open_a_new_index_at_once_all_get_it(self, tmp_path: Path) -> None:
        path = tmp_path / "index.sqlite3"

        def open_it(number: int) -> None:
            index = Index(path, wal=True)
            index.set_note(str(number), "x")
            index.close()

        with ExitStack() as stack:
            children = [stack.enter_context(Child(partial(open_it, n))) for n in range(6)]
            for child in children:
                child.result()
        index = Index(path, wal=True)
        assert [index.note(str(number)) for number in range(6)] == ["x"] * 6
        index.close()

    def test_network_filesystems_get_a_rollback_journal(self, tmp_path: Path) -> None:
        for wal, mode in ((True, "wal"), (False, "delete")):
            for before in (True, False):
                Index(tmp_path / "index.sqlite3", wal=before).close()
                path = tmp_path / "index.sqlite3"
                connection, _ = connect(path, SCHEMA, VERSION, wal=wal, create=False)
                found = connection.execute("PRAGMA journal_mode").fetchone()[0]
                connection.close()
                assert found == mode, before

    def test_its_directory_may_have_any_name(self, tmp_path: Path) -> None:
        names = [b"a?b#c%20d", b"\xff\xfe", b"it's; DROP", "模型".encode()]
        for name in names:
            directory = tmp_path / os.fsdecode(name)
            directory.mkdir()
            Index(directory / "index.sqlite3", wal=True).close()
            assert (directory / "index.sqlite3").exists(), name
        assert len(os.listdir(tmp_path)) == len(names)

    def test_a_closed_index_is_an_error_to_use(self, index: Index) -> None:
        index.close()
        with pytest.raises(StoreError, match="closed"):
            index.blob(A)
        index.close()


class TestTransactions:
    def test_a_block_that_fails_leaves_nothing_also_of_blocks_within_it(self, index: Index) -> None:
        def fail() -> None:
            with index.write():
                index.add_blob(A, stat_of())
                with index.write():
                    index.add_blob(B, stat_of())
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert index.blob(A) is index.blob(B) is None

    def test_removals_are_committed_through_to_the_disk(self, index: Index) -> None:
        level = "PRAGMA synchronous"
        for durable, expected in ((True, 2), (False, 1)):
            with index.write(durable=durable):
                assert index.number(level) == expected
            assert index.number(level) == 1

    def test_a_copy_holds_what_was_committed(self, index: Index, tmp_path: Path) -> None:
        index.add_blob(A, stat_of())
        index.backup(tmp_path / "copy.sqlite3")
        with closing(Index(tmp_path / "copy.sqlite3", wal=True)) as copy:
            assert copy.blob(A) is not None

    def test_notes_are_set_and_removed(self, index: Index) -> None:
        assert index.note("x") is None
        index.set_note("x", "1")
        index.set_note("x", "2")
        assert index.note("x") == "2"
        index.set_note("x", None)
        assert index.note("x") is None


class TestBlobs:
    def test_inode_numbers_have_64_bits_without_a_sign(
        self, store: Store, index: Index, folder: Path
    ) -> None:
        """In rows of blobs, links, memos and files that were seen, whatever their names."""
        path = folder / os.fsdecode(b"\xff\xfe")
        memo = Memo(key=StatKey(1, 2, 3), is_racy=False, digest=A)
        catalog = store.catalog
        for inode in (0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1):
            with row(inode):
                blob = index.add_blob(A, stat_of(inode))
                found = index.blob_by_inode(inode)
                assert found is not None
                assert (found.id, found.inode) == (blob, signed(inode))
                assert set(index.blobs_in([inode, 5])) == {signed(inode)}
                index.add_link("/a", blob, kind="hardlink", filesystem="f", inode=inode, owner=None)
                link = index.link("/a")
                assert link is not None
                assert link.inode == signed(inode)
                catalog.learn([("f", signed(inode), *memo.key, 0, bytes.fromhex(A), None)])
                assert catalog.memos("f", [inode]) == {signed(inode): memo}
                key = StatKey(9, 10**18, 10**18 + 1)
                seen = Sighting(path=path, size=9, filesystem="f", inode=inode, key=key)
                catalog.add_sighting(seen)
                (again,) = store.sightings(9)
                assert (again.path, again.key, again.inode) == (path, key, signed(inode))

    def test_adding_again_renews_the_row_and_keeps_its_id(self, index: Index) -> None:
        first = index.add_blob(A, stat_of(1), unsynced="boot", trust=Trust.UNPROVEN)
        second = index.add_blob(A, stat_of(2, links=3))
        blob = index.blob(A)
        assert blob is not None
        assert first == second == blob.id
        assert (blob.inode, blob.links, blob.trust, blob.unsynced) == (2, 3, Trust.VERIFIED, None)

    def test_beginnings_of_digests_are_found(self, index: Index) -> None:
        for digest in (A, B, C):
            index.add_blob(digest, stat_of())
        assert index.digests_starting_with("aa") == [A]
        assert index.digests_starting_with("a") == [A, B]
        assert index.digests_starting_with("b") == []

    def test_blobs_come_in_every_order_and_by_pages(self, index: Index) -> None:
        for digest, size, used in ((B, 1, 30), (A, 3, 10), (C, 2, 20)):
            index.touch(index.add_blob(digest, stat_of(size=size)), used)
        for order, digests in (("digest", [A, B, C]), ("size", [A, C, B]), ("used", [B, C, A]),
                               ("oldest", [A, C, B])):  # fmt: skip
            assert [blob.digest for blob in index.blobs(order=order)] == digests, order
        assert [blob.digest for blob in index.records()] == [A, B, C]

    def test_totals_count_what_is_there(self, index: Index) -> None:
        index.add_blob(A, stat_of(1, size=10, links=1, blocks=8))
        index.add_blob(B, stat_of(2, size=20, links=3, blocks=16))
        index.mark_gone(index.add_blob(C, stat_of(3, size=1000)))
        totals = index.totals()
        assert (totals.blobs, totals.size, totals.allocated) == (2, 30, 24 * 512)
        assert totals.only_allocated == 8 * 512

    def test_dropping_a_blob_drops_what_hangs_on_it(self, index: Index) -> None:
        blob = index.add_blob(A, stat_of(), hashes={"sha256": B})
        owner = index.add_owner(Owner(kind="pin", name="x"))
        index.hold(owner, blob)
        index.add_link("/a", blob, kind="copy", filesystem="f", inode=1, owner=owner)
        index.drop_blob(blob)
        assert index.blob_by_hash("sha256", B) is None
        assert index.link("/a") is None
        assert index.holders_of(blob) == []
        assert len(index.owners()) == 1

    def test_dropping_an_owner_keeps_blobs_and_links(self, index: Index) -> None:
        blob = index.add_blob(A, stat_of())
        owner = index.add_owner(Owner(kind="pin", name="x"))
        index.hold(owner, blob)
        index.add_link("/a", blob, kind="copy", filesystem="f", inode=1, owner=owner)
        index.drop_owner(owner)
        link = index.link("/a")
        assert link is not None
        assert link.owner is None
        assert index.holders_of(blob) == []

    def test_clearing_keeps_what_is_known_of_files_and_volumes(self, index: Index) -> None:
        catalog = Catalog(index)
        for digest in (A, C):
            index.add_blob(digest, stat_of(), hashes={"sha256": B})
        index.add_owner(Owner(kind="pin", name="x"))
        catalog.learn([("f", 1, 1, 2, 3, 0, bytes.fromhex(A), None)])
        index.add_volume(Path("/mnt/v"), "f")
        index.clear()
        index.drop_lost()
        assert (list(index.blobs()), index.owners()) == ([], [])
        memo = Memo(key=StatKey(1, 2, 3), is_racy=False, digest=A)
        assert catalog.memos("f", [1]) == {1: memo}
        index.drop_unused_hashes()
        known = index.hashes_of([A, C])
        assert known == {A: {"blake3": A, "sha256": B}, C: {"blake3": C}}
        assert index.volumes() == [(Path("/mnt/v"), "f")]

    def test_links_are_walked_in_order_of_their_bytes(self, index: Index) -> None:
        blob = index.add_blob(A, stat_of())
        names = [b"/\x01", b"/a", b"/a/b", b"/\xc3\xa9", b"/\xff"]
        for name in reversed(names):
            path = os.fsdecode(name)
            index.add_link(path, blob, kind="copy", filesystem="f", inode=1, owner=None)
        walked: list[bytes] = []
        after = ""
        while page := index.links_after(after, 2):
            walked += [os.fsencode(link.path) for link in page]
            after = str(page[-1].path)
        assert walked == names

    def test_volumes_come_and_go(self, index: Index) -> None:
        path = Path(os.fsdecode(b"/mnt/\xff"))
        index.add_volume(path, "f")
        index.add_volume(path, "g")
        assert index.volumes() == [(path, "g")]


class TestSightings:
    def sighting(self, path: Path) -> Sighting:
        st = path.stat()
        return Sighting(
            path=path, size=st.st_size, filesystem="f", inode=st.st_ino, key=StatKey.of(st)
        )

    def test_files_are_found_by_their_exact_size(self, store: Store, folder: Path) -> None:
        paths = [write(folder / name, data) for name, data in (("a", b"123"), ("b", b"1234"))]
        seen = [self.sighting(path) for path in paths]
        for each in (*seen, *seen):
            store.catalog.add_sighting(each)
        assert store.sightings(3) == seen[:1]
        assert store.sightings(4) == seen[1:]
        assert store.sightings(5) == []


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def tables_of(path: Path) -> dict[str, str]:
    """The schema by name, without comments: SQLite keeps those of a script, the store has none."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
        return {name: " ".join(re.sub("--[^\n]*", "", sql).split()) for name, sql in rows}
