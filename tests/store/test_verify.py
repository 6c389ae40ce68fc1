"""The store is compared with the disk, healed from what is left, and its index made again."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from smartcache import errors
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import look
from smartcache.store import DEFAULT_PIN
from smartcache.store.store import Store
from smartcache.store.verify import VerifyReport
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    adopt,
    blob_path,
    dedup,
    digest_of,
    edit,
    in_turn,
    inode_of,
    link_count,
    mode_of,
    read,
    row,
    sha256_of,
    snapshot,
    undo,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST, SHA256 = digest_of(WEIGHTS), sha256_of(WEIGHTS)


def findings(report: VerifyReport) -> dict[str, list[object]]:
    names = ("damaged", "stray", "writable", "healed")
    return {name: list(getattr(report, name)) for name in names if getattr(report, name)}


class TestFindings:
    def test_a_sound_store_has_none_and_full_hashes_it(self, store: Store, folder: Path) -> None:
        store.put_stream([OTHER])
        adopt(store, write(folder / "a.safetensors"))
        for kind in ("hardlink", "copy"):
            store.place(DIGEST, folder / kind, kind=kind)
        for full in (False, True):
            watch, size = Watch(), len(WEIGHTS) + len(OTHER) if full else 0
            report = store.verify(full=full, repair=True, progress=watch)
            assert findings(report) == {}
            assert (report.has_damage, report.blobs, report.is_full) == (False, 2, full)
            assert report.hashed_size == size
            assert (watch.done, watch.unit) == ((size, "bytes") if full else (2, "items"))

    def test_a_writable_blob_is_hashed_and_made_read_only(
        self, store: Store, digest: str, pass_time: Callable[[float], None]
    ) -> None:
        """Also one that is believed, because it was hashed since."""
        for full in (False, True):
            blob_path(store).chmod(0o666)
            pass_time(10)
            store.digest_of(blob_path(store))
            report = store.verify(full=full)
            assert findings(report) == {"writable": [digest]}
            assert (report.has_damage, mode_of(blob_path(store))) == (False, 0o444)
            assert findings(store.verify(full=full)) == {}

    def test_what_is_no_blob_is_named_and_left_alone(self, store: Store, digest: str) -> None:
        blobs = store.layout.blobs
        strays = [blobs / "note.txt", blobs / digest[:2] / "x", blobs / "zz" / digest]
        for stray in strays:
            write(stray, b"mine")
        report = store.verify(full=True, repair=True)
        assert (sorted(report.stray), report.has_damage) == (sorted(strays), False)
        assert {stray.read_bytes() for stray in strays} == {b"mine"}
        assert [blob.digest for blob in store.blobs()] == [digest]

    def test_a_blob_that_is_removed_meanwhile_or_gone_is_no_finding(self, store: Store) -> None:
        ways: dict[str, Callable[[], object]] = {
            "rm": lambda: store.remove(DIGEST),
            "prune": lambda: store.plan_prune().execute(),
            "by hand": lambda: blob_path(store).unlink(),
        }
        for name, remove in ways.items():
            store.put_stream([OTHER])
            store.put_stream([WEIGHTS])
            with row(name):
                assert findings(store.verify(full=True, progress=Watch(remove))) == {}
                assert findings(store.verify(repair=True)) == {}

    def test_a_file_that_takes_its_place_meanwhile_counts(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """A right one is never the one that goes."""
        edit(blob_path(store))
        for data, found in ((WEIGHTS, {}), (OTHER, {"damaged": [digest]})):
            new = write(folder / "a", data, mode=0o444)
            watch = Watch(lambda new=new: new.replace(blob_path(store)))  # type: ignore[misc]
            assert findings(store.verify(full=True, progress=watch)) == found
            assert store.has(digest) is not bool(found)


class TestRepair:
    def test_what_has_the_bytes_heals(self, store: Store, folder: Path, elsewhere: Path) -> None:
        """By the command that finds it, or by a later one."""
        pool = store.add_pool(elsewhere / "pool")
        path = folder / "a.bin"
        sources: dict[str, Callable[[], object]] = {
            "scanned": lambda: scan(store, write(path)),
            "put": lambda: store.put_file(write(path)),
            "copy": lambda: store.place(DIGEST, path, kind="copy"),
            "known to the journal": lambda: (
                adopt(store, write(path)),
                write_anew(path),
                store.rebuild(),
                store.put_stream([WEIGHTS], algorithms=["sha256"]),
            ),
            "pool": lambda: store.put_stream([WEIGHTS], pool=pool),
        }
        for number, (name, make) in enumerate(sources.items()):
            with row(name):
                if name != "known to the journal":
                    store.put_stream([WEIGHTS], algorithms=["sha256"])
                make()
                store.pin(DIGEST)
                edit(blob_path(store))
                before = snapshot(folder)
                if number % 2:  # else by one command
                    assert store.verify().damaged == [DIGEST]
                report = store.verify(repair=True)
                assert findings(report) == {"damaged": [DIGEST], "healed": [DIGEST]}
                assert not report.has_damage
                assert (read(store), mode_of(blob_path(store))) == (WEIGHTS, 0o444)
                assert blob_path(store).samefile(store.layout.pins / DEFAULT_PIN / DIGEST)
                assert store.hashes_of(DIGEST) == {"sha256": SHA256}
                assert snapshot(folder) == before
                assert findings(store.verify(full=True, repair=True)) == {}
                for left in (*store.layout.bad.iterdir(), *folder.iterdir()):
                    left.unlink()
                store.unpin(DIGEST)
                for blob in store.blobs():
                    blob.path.unlink()

    def test_what_was_edited_heals_nothing(
        self, store: Store, folder: Path, elsewhere: Path, digest: str
    ) -> None:
        """Files that share the damaged inode are left alone, and it is not forgotten."""
        pool = store.add_pool(elsewhere / "pool")
        store.put_stream([WEIGHTS], pool=pool)
        link = store.place(digest, folder / "a.safetensors", kind="hardlink").path
        copy = store.place(digest, folder / "a.json", kind="copy").path
        for path in (link, copy, Path(pool.blob(digest))):
            edit(path)
        before = snapshot(folder)
        for _ in range(2):
            report = store.verify(repair=True)
            assert (set(report.damaged), report.healed) == ({digest}, [])
            assert report.has_damage
        assert snapshot(folder) == before
        assert not store.has(digest)
        write(folder / "a.json")
        assert not store.verify(repair=True).has_damage
        assert (read(store), inode_of(link) == inode_of(blob_path(store))) == (WEIGHTS, False)


def scan(store: Store, path: Path) -> None:
    """Do what a scan does with a file that may be equal to others."""
    look(store, [ModelFolder(path=path.parent)])
    store.digest_of(path)


def write_anew(path: Path) -> Path:
    """Let another file with the same bytes take a name."""
    return write(path.with_name("new")).replace(path)


def remove_index(store: Store) -> None:
    store.close()
    for path in store.root.glob("index.sqlite3*"):
        path.unlink()


class TestIndex:
    """It is a memory: without it nothing is lost, and blobs are hashed before their next use."""

    def test_without_it_everything_is_there_and_undone_as_before(
        self, store: Store, folder: Path, elsewhere: Path, pass_time: Callable[[float], None]
    ) -> None:
        pool = store.add_pool(elsewhere / "pool")
        ways: dict[str, Callable[[], object]] = {
            "rebuilt": store.rebuild,
            "removed": lambda: remove_index(store),
            "empty": in_turn(lambda: remove_index(store), store.layout.index.touch),
            "without its log": store.layout.index.unlink,
        }
        for name, lose in ways.items():
            a, b = write(folder / "a.safetensors"), write(folder / "b.safetensors")
            before = snapshot(folder)
            with row(name), Store(store.root) as again:
                dedup(again, a, b)
                again.pin(DIGEST, "mine")
                again.put_stream([OTHER], pool=pool)
                facts = [(each.digest, each.pins, each.links, each.pool) for each in again.blobs()]
                lose()
            with row(name), Store(store.root) as again:
                assert [(e.digest, e.pins, e.links, e.pool) for e in again.blobs()] == facts
                assert again.names_of(DIGEST) == [a, b], "the journal knows them"
                assert (read(again), read(again, digest_of(OTHER))) == (WEIGHTS, OTHER)
                pass_time(10)
                assert [again.verify().hashed_size for _ in range(2)][1] == 0
                assert [each.digest for each in again.plan_prune().victims] == [digest_of(OTHER)]
                assert again.unpin(DIGEST) == ["mine"]
                assert undo(again) == []
                assert snapshot(folder) == before
                store = again

    def test_a_rebuild_counts_blobs_and_believes_none(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.put_stream([OTHER])
        watch = Watch()
        edit(blob_path(store))
        assert store.rebuild(progress=watch) == watch.done == 2
        for use in (
            lambda: store.place(digest, folder / "a.safetensors", kind="hardlink"),
            lambda: store.open(digest),
        ):
            with pytest.raises((errors.DamagedBlobError, errors.BlobNotFoundError)):
                use()
        report = store.verify()
        assert (report.blobs, report.hashed_size) == (1, len(OTHER))
        assert (os.listdir(folder), link_count(blob_path(store, digest_of(OTHER)))) == ([], 1)

    def test_damage_in_it_costs_no_more_than_hashing(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """Tables that lack a column, texts that are none, numbers without sense, circles."""
        store.pin(digest)
        store.put_stream([OTHER])
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        store.close()
        index = store.root / "index.sqlite3"
        sound, chance = index.read_bytes(), random.Random(7)
        noise = chance.randbytes(len(sound))
        harmed = [noise, b"no database at all" + sound[18:], sound[:4096] + noise[4096:],
                  sound[: len(sound) // 2 + 100]]  # fmt: skip
        for turn in range(60):
            flipped = bytearray(sound)
            end = 4096 if turn % 2 else len(sound)  # the schema, or all pages
            for place in chance.sample([n for n in range(100, end) if sound[n]], 3):
                flipped[place] = chance.randrange(256)
            harmed.append(bytes(flipped))
        for number, data in enumerate(harmed):
            remove_index(store)
            index.write_bytes(data)
            with row(number):
                try:
                    with Store(store.root) as again:
                        use_everything(again)
                except errors.SmartcacheError:  # found in the middle
                    with Store(store.root) as again:
                        again.rebuild()
                        use_everything(again)
                with closing(sqlite3.connect(index)) as connection:
                    if number < 4:
                        found = connection.execute("PRAGMA integrity_check").fetchone()
                        assert found == ("ok",)
        assert any("index" in path.name for path in store.layout.bad.iterdir())


def use_everything(store: Store) -> None:
    store.put_stream([b"more"])
    assert not store.verify(full=True).has_damage
    assert (read(store), read(store, digest_of(OTHER))) == (WEIGHTS, OTHER)
    store.usage()
    store.folders()
    assert store.get(DIGEST).pins == ("kept",)
