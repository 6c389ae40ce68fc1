from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api import SCHEMA_MIGRATIONS as MIGRATIONS
from tests.api import (
    VERSION,
    Index,
    LinkKind,
    Memo,
    Owner,
    Sighting,
    StatKey,
    Store,
    StoreError,
    StoreFormatError,
    Trust,
    connect,
    signed,
    store_schema,
)
from tests.store.files import WEIGHTS, write

HUGE = [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
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

    @pytest.mark.parametrize("old", range(VERSION))
    def test_an_index_of_every_older_version_is_brought_up_to_date(
        self, tmp_path: Path, old: int
    ) -> None:
        path = tmp_path / "index.sqlite3"
        connection = sqlite3.connect(path)
        for script in MIGRATIONS[:old]:
            connection.executescript(script)
        connection.execute(f"PRAGMA user_version = {old}")
        connection.close()
        index = Index(path, wal=True)
        try:
            assert index.is_new == (old == 0)
            blob = index.add_blob(A, stat_of(), aliases={"sha256": B})
            assert index.aliases_of(blob) == {"sha256": B}
            assert index.is_sound()
        finally:
            index.close()
        assert version_of(path) == VERSION
        assert tables_of(path) == tables_of_a_new_index(tmp_path)

    @pytest.mark.parametrize("newer", [VERSION + 1, 999])
    def test_an_index_of_a_newer_version_is_refused_and_left_alone(
        self, store: Store, newer: int
    ) -> None:
        store.put_stream([WEIGHTS])
        store.close()
        connection = sqlite3.connect(store.volume.layout.index)
        connection.execute(f"PRAGMA user_version = {newer}")
        connection.close()
        with pytest.raises(StoreFormatError, match=f"schema {newer}"):
            Store(store.root)
        assert version_of(store.volume.layout.index) == newer

    def test_a_migration_that_fails_leaves_the_old_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "index.sqlite3"
        Index(path, wal=True).close()
        broken = (*MIGRATIONS, "CREATE TABLE extra (x); CREATE TABLE extra (x)")
        monkeypatch.setattr(store_schema, "MIGRATIONS", broken)
        monkeypatch.setattr(store_schema, "VERSION", VERSION + 1)
        with pytest.raises(StoreError):
            Index(path, wal=True)
        assert version_of(path) == VERSION
        assert "extra" not in tables_of(path)

    def test_processes_that_open_a_new_index_at_once_all_get_it(self, tmp_path: Path) -> None:
        program = (
            "import sys; from pathlib import Path; from smartcache.store.index import Index\n"
            "sys.stdin.read(); index = Index(Path(sys.argv[1]), wal=True)\n"
            "index.set_note(sys.argv[2], 'x'); index.close()"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        path = tmp_path / "index.sqlite3"
        children = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(path), str(number)],
                stdin=subprocess.PIPE,
                env=environment,
            )
            for number in range(6)
        ]
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        assert [child.wait() for child in children] == [0] * 6
        index = Index(path, wal=True)
        try:
            assert [index.note(str(number)) for number in range(6)] == ["x"] * 6
        finally:
            index.close()

    @pytest.mark.parametrize(("wal", "mode"), [(True, "wal"), (False, "delete")])
    def test_network_filesystems_get_a_rollback_journal(
        self, tmp_path: Path, wal: bool, mode: str
    ) -> None:
        for before in (True, False):
            Index(tmp_path / "index.sqlite3", wal=before).close()
            connection = connect(tmp_path / "index.sqlite3", wal=wal, create=False)
            found = connection.execute("PRAGMA journal_mode").fetchone()[0]
            connection.close()
            assert found == mode

    @pytest.mark.parametrize("name", [b"a?b#c%20d", b"\xff\xfe", b"it's; DROP", "模型".encode()])
    def test_its_directory_may_have_any_name(self, tmp_path: Path, name: bytes) -> None:
        directory = tmp_path / os.fsdecode(name)
        directory.mkdir()
        index = Index(directory / "index.sqlite3", wal=True)
        try:
            index.add_blob(A, stat_of())
        finally:
            index.close()
        assert (directory / "index.sqlite3").exists()
        assert [path.name for path in tmp_path.iterdir()] == [directory.name]

    def test_a_closed_index_is_an_error_to_use(self, index: Index) -> None:
        index.close()
        with pytest.raises(StoreError, match="closed"):
            index.blob(A)
        index.close()


class TestTransactions:
    def test_a_block_that_fails_leaves_nothing(self, index: Index) -> None:
        def fail() -> None:
            with index.write():
                index.add_blob(A, stat_of())
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert index.blob(A) is None

    def test_a_block_within_a_block_is_part_of_it(self, index: Index) -> None:
        def fail() -> None:
            with index.write():
                with index.write():
                    index.add_blob(A, stat_of())
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert index.blob(A) is None

    @pytest.mark.parametrize("durable", [True, False])
    def test_removals_are_committed_through_to_the_disk(self, index: Index, durable: bool) -> None:
        level = "PRAGMA synchronous"
        with index.write(durable=durable):
            assert index._value(level) == (2 if durable else 1)  # noqa: SLF001
        assert index._value(level) == 1  # noqa: SLF001

    def test_a_copy_holds_what_was_committed(self, index: Index, tmp_path: Path) -> None:
        index.add_blob(A, stat_of())
        index.backup(tmp_path / "copy.sqlite3")
        copy = Index(tmp_path / "copy.sqlite3", wal=True)
        try:
            assert copy.blob(A) is not None
        finally:
            copy.close()

    def test_notes_are_set_and_removed(self, index: Index) -> None:
        assert index.note("x") is None
        index.set_note("x", "1")
        index.set_note("x", "2")
        assert index.note("x") == "2"
        index.set_note("x", None)
        assert index.note("x") is None


class TestBlobs:
    @pytest.mark.parametrize("inode", HUGE)
    def test_inode_numbers_have_64_bits_without_a_sign(self, index: Index, inode: int) -> None:
        blob = index.add_blob(A, stat_of(inode))
        found = index.blob_by_inode(inode)
        assert found is not None
        assert (found.id, found.inode) == (blob, signed(inode))
        assert set(index.blobs_in([inode, 5])) == {signed(inode)}
        index.add_link("/a", blob, kind="hardlink", filesystem="f", inode=inode, owner=None)
        link = index.link("/a")
        assert link is not None
        assert link.inode == signed(inode)
        memo = Memo(key=StatKey(1, 2, 3), is_racy=False, values={"blake3": A})
        index.put_memo("f", inode, memo)
        assert index.memo("f", inode) == memo

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

    def test_orders(self, index: Index) -> None:
        ids = [
            index.add_blob(digest, stat_of(size=size)) for digest, size in ((B, 1), (A, 3), (C, 2))
        ]
        for blob, used in zip(ids, (30, 10, 20), strict=True):
            index.touch(blob, used)
        found = {
            order: [blob.digest for blob in index.blobs(order=order)]
            for order in ("digest", "size", "used", "oldest")
        }
        assert found == {
            "digest": [A, B, C],
            "size": [A, C, B],
            "used": [B, C, A],
            "oldest": [A, C, B],
        }

    def test_pages_go_through_all(self, index: Index) -> None:
        for digest in (A, B, C):
            index.add_blob(digest, stat_of())
        assert [b.digest for b in index.blobs_after(b"", 2)] == [A, B]
        assert [b.digest for b in index.blobs_after(bytes.fromhex(B), 2)] == [C]

    def test_totals_count_what_is_there(self, index: Index) -> None:
        index.add_blob(A, stat_of(1, size=10, links=1, blocks=8))
        index.add_blob(B, stat_of(2, size=20, links=3, blocks=16))
        index.mark_gone(index.add_blob(C, stat_of(3, size=1000)))
        totals = index.totals()
        assert (totals.blobs, totals.size, totals.allocated) == (2, 30, 24 * 512)
        assert (totals.only_blobs, totals.only_allocated) == (1, 8 * 512)
        assert (totals.links, totals.linked_size) == (4, 10 + 60)

    def test_dropping_a_blob_drops_what_hangs_on_it(self, index: Index) -> None:
        blob = index.add_blob(A, stat_of(), aliases={"sha256": B})
        owner = index.add_owner(Owner(kind="pin", name="x"))
        index.hold(owner, blob)
        index.add_link("/a", blob, kind="copy", filesystem="f", inode=1, owner=owner)
        index.drop_blob(blob)
        assert index.blob_by_alias("sha256", B) is None
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
        index.add_blob(A, stat_of(), aliases={"sha256": B})
        index.add_owner(Owner(kind="pin", name="x"))
        memo = Memo(key=StatKey(1, 2, 3), is_racy=False, values={"blake3": A})
        index.put_memo("f", 1, memo)
        index.add_volume(Path("/mnt/v"), "f")
        index.clear()
        index.drop_lost()
        assert (list(index.blobs()), index.owners()) == ([], [])
        assert index.memo("f", 1) == memo
        assert index.volumes() == [(Path("/mnt/v"), "f")]

    def test_links_are_walked_in_order_of_their_bytes(self, index: Index) -> None:
        blob = index.add_blob(A, stat_of())
        names = [b"/\x01", b"/a", b"/a/b", b"/\xc3\xa9", b"/\xff"]
        for name in reversed(names):
            kind: LinkKind = "symlink" if b"a" in name else "copy"
            index.add_link(
                os.fsdecode(name),
                blob,
                kind=kind,
                filesystem="f",
                inode=1,
                owner=None,
            )
        walked: list[bytes] = []
        after = ""
        while page := index.links_after(after, 2):
            walked += [os.fsencode(link.path) for link in page]
            after = str(page[-1].path)
        assert walked == names
        found = index.links_after("", 10, kind="symlink")
        assert [os.fsencode(link.path) for link in found] == [b"/a", b"/a/b"]

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
        assert store.sight(folder, seen, program="test", given=True) == 2
        assert store.sightings(3) == seen[:1]
        assert store.sightings(4) == seen[1:]
        assert store.sightings(5) == []

    def test_a_new_walk_replaces_what_was_seen_in_that_folder(
        self, store: Store, folder: Path, tmp_path: Path
    ) -> None:
        first, second = (self.sighting(write(folder / name, b"123")) for name in "ab")
        other = self.sighting(write(tmp_path / "other" / "c", b"123"))
        store.sight(folder, [first, second])
        store.sight(tmp_path / "other", [other])
        store.sight(folder, [second])
        assert store.sightings(3) == [second, other]
        assert store.sight(folder, []) == 0
        assert store.sightings(3) == [other]

    @pytest.mark.parametrize("inode", HUGE)
    def test_names_and_inodes_may_be_anything(self, store: Store, folder: Path, inode: int) -> None:
        path = folder / os.fsdecode(b"\xff\xfe")
        seen = Sighting(
            path=path, size=9, filesystem="f", inode=inode, key=StatKey(9, 10**18, 10**18 + 1)
        )
        store.sight(folder, [seen])
        (found,) = store.sightings(9)
        assert (found.path, found.key, found.inode) == (path, seen.key, signed(inode))


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


def tables_of(path: Path) -> dict[str, str]:
    """The schema by name, without comments: SQLite keeps those of a script, the store has none."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
        return {name: " ".join(re.sub("--[^\n]*", "", sql).split()) for name, sql in rows}
    finally:
        connection.close()


def tables_of_a_new_index(directory: Path) -> dict[str, str]:
    Index(directory / "new.sqlite3", wal=True).close()
    return tables_of(directory / "new.sqlite3")
