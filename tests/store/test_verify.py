"""The store is compared with the disk, healed from what is left, and its index made again."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    IndexDamagedError,
    PruneRefusedError,
    SmartcacheError,
)
from smartcache.store.records import Owner, Trust
from smartcache.store.store import Store
from smartcache.store.upkeep.verify import VerifyReport, rebuild, replace_damaged_index
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    blob_path,
    digest_of,
    edit,
    in_turn,
    inode_of,
    mode_of,
    read,
    row,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)


def findings(report: VerifyReport) -> dict[str, list[object]]:
    names = ("damaged", "missing", "unindexed", "stray", "writable", "dead_links", "healed")
    return {name: list(getattr(report, name)) for name in names if getattr(report, name)}


def holders(store: Store, digest: str = DIGEST) -> list[str]:
    return [str(owner) for owner, _ in store.holders_of(store.get(digest))]


def linked_paths(store: Store, digest: str = DIGEST) -> list[Path]:
    return [link.path for link in store.links_of(store.get(digest))]


class TestFindings:
    def test_a_sound_store_has_none(self, store: Store, folder: Path) -> None:
        store.put_stream([OTHER])
        store.adopt(write(folder / "a.safetensors"))
        for kind in ("hardlink", "copy"):
            store.place(DIGEST, folder / kind, kind=kind)
        for full in (False, True):
            report = store.verify(full=full, repair=True)
            assert findings(report) == {}
            assert (report.has_damage, report.blobs, report.is_full) == (False, 2, full)

    @pytest.mark.usefixtures("digest")
    def test_quick_hashes_nothing_that_stat_vouches_for_and_full_every_byte(
        self, store: Store
    ) -> None:
        store.put_stream([OTHER])
        report = store.verify()
        assert (report.blobs, report.hashed_size) == (2, 0)
        watch = Watch()
        size = len(WEIGHTS) + len(OTHER)
        assert store.verify(full=True, progress=watch).hashed_size == size
        assert (watch.done, watch.total, watch.unit) == (size, size, "bytes")

    def test_a_missing_blob_is_named_kept_in_mind_and_no_victim_of_prune(
        self, store: Store, digest: str
    ) -> None:
        store.pin(digest)
        blob_path(store).unlink()
        for _ in range(2):
            report = store.verify()
            assert findings(report) == {"missing": [digest]}
            assert report.has_damage
        assert store.plan_prune().victims == ()
        with pytest.raises(BlobNotFoundError):
            store.pin(digest)
        store.put_stream([WEIGHTS])
        assert findings(store.verify(full=True)) == {}
        assert store.aliases_of(store.get(digest))
        assert holders(store) == ["pin kept"]

    def test_a_writable_blob_is_hashed_and_made_read_only(self, store: Store, digest: str) -> None:
        for full in (False, True):
            blob_path(store).chmod(0o666)
            report = store.verify(full=full)
            assert findings(report) == {"writable": [digest]}
            assert (report.has_damage, mode_of(blob_path(store))) == (False, 0o444)
            assert findings(store.verify(full=full)) == {}

    def test_a_file_that_shares_a_damaged_inode_is_left_alone(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        edit(folder / "a.safetensors")
        before = snapshot(folder)
        for _ in range(2):
            report = store.verify(repair=True)
            assert (report.has_damage, report.healed) == (True, []), "it is not forgotten"
        assert snapshot(folder) == before

    def test_quick_names_a_blob_without_a_row_and_full_gives_it_one(
        self, store: Store, digest: str
    ) -> None:
        store.volume.index.clear()
        store.volume.index.drop_lost()
        for full in (False, False, True):
            assert findings(store.verify(full=full)) == {"unindexed": [digest]}
        assert findings(store.verify()) == {}
        assert read(store) == WEIGHTS

    def test_a_damaged_blob_without_a_row_is_found_and_moved_away(
        self, store: Store, digest: str
    ) -> None:
        store.volume.index.clear()
        store.volume.index.drop_lost()
        edit(blob_path(store))
        report = store.verify(full=True)
        assert findings(report) == {"damaged": [digest], "unindexed": [digest]}
        assert not blob_path(store).exists()
        assert len(list(store.volume.layout.bad.iterdir())) == 1

    def test_what_is_no_blob_is_named_and_left_alone(self, store: Store, digest: str) -> None:
        blobs = store.volume.layout.blobs
        strays = [blobs / "note.txt", blobs / digest[:2] / "x", blobs / "zz" / digest]
        for stray in strays:
            write(stray, b"mine")
        report = store.verify(full=True, repair=True)
        assert sorted(report.stray) == sorted(strays)
        assert not report.has_damage
        assert {stray.read_bytes() for stray in strays} == {b"mine"}

    def test_a_blob_that_is_removed_properly_meanwhile_is_no_finding(self, store: Store) -> None:
        ways: dict[str, Callable[[], object]] = {
            "rm": lambda: store.remove(DIGEST),
            "prune": lambda: store.plan_prune().execute(),
        }
        for name, remove in ways.items():
            store.put_stream([WEIGHTS])
            assert findings(store.verify(progress=Watch(remove))) == {}, name

    def test_dead_links_are_named_and_forgotten_on_repair(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """A copy that is gone harms nobody: it is forgotten in silence."""
        for kind in ("hardlink", "copy"):
            for name in (b"\x01", b"a", b"\xff", b"\xff\xff"):
                path = folder / os.fsdecode(kind.encode() + name)
                store.place(digest, path, kind=kind)
                path.unlink()
        report = store.verify()
        assert len(report.dead_links) == 4
        assert not any("copy" in path.name for path in report.dead_links)
        assert findings(store.verify(repair=True)) == {"dead_links": report.dead_links}
        assert (findings(store.verify()), linked_paths(store)) == ({}, [])


class TestRepair:
    def test_a_lost_blob_is_healed_from_what_is_left_of_it(
        self, store: Store, folder: Path
    ) -> None:
        """From a link, which shares again if it is read-only, or a copy of the user's."""
        sources: dict[str, tuple[str, int, bool]] = {
            "link": ("hardlink", 0o444, True),
            "link made writable": ("hardlink", 0o644, False),
            "copy": ("copy", 0o644, False),
        }
        for name, (kind, mode, is_shared) in sources.items():
            with row(name):
                store.put_stream([WEIGHTS], algorithms=["sha256"])
                store.pin(DIGEST, "mine")
                path = folder / name
                store.place(DIGEST, path, kind=kind)  # type: ignore[arg-type]
                blob_path(store).unlink()
                path.chmod(mode)
                before = snapshot(folder)
                assert store.verify(full=True).healed == [], "nobody asked for it"
                report = store.verify(repair=True)
                assert findings(report) == {"missing": [DIGEST], "healed": [DIGEST]}
                assert not report.has_damage
                assert (inode_of(blob_path(store)) == inode_of(path)) is is_shared
                assert mode_of(blob_path(store)) == 0o444
                assert snapshot(folder) == before
                assert read(store) == WEIGHTS
                assert set(store.aliases_of(store.get(DIGEST))) == {"sha256"}
                assert (holders(store), linked_paths(store)) == (["pin mine"], [path])
                store.unpin(DIGEST)
                store.plan_undo().execute()

    def test_a_damaged_blob_is_healed_and_keeps_all_that_was_known_of_it(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """In place, or replaced by another file: then its link is whole and shares again."""
        store.pin(digest, "mine")
        aliases = store.aliases_of(store.get(digest))
        copy = store.place(digest, folder / "c.json", kind="copy").path
        link = store.place(digest, folder / "b.safetensors", kind="hardlink").path
        for number in range(2):
            if number:
                edit(blob_path(store))
            else:
                os.replace(write(folder / "x", OTHER, mode=0o444), blob_path(store))
            report = store.verify(repair=True)
            assert findings(report) == {"damaged": [DIGEST], "healed": [DIGEST]}
            assert not report.has_damage
            assert store.aliases_of(store.get(digest)) == aliases
            assert (holders(store), linked_paths(store)) == (["pin mine"], [link, copy])
            assert (inode_of(link) == inode_of(blob_path(store))) is (number == 0)
            assert read(store) == WEIGHTS

    def test_a_lost_blob_is_healed_from_another_volume_unless_that_is_damaged(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        other = store.add_volume(elsewhere / ".smartcache")
        other.put_stream([WEIGHTS])
        blob_path(store).unlink()
        assert store.verify(repair=True).healed == [digest]
        assert read(store) == WEIGHTS
        edit(blob_path(other))
        edit(blob_path(store))
        report = store.verify(repair=True)
        assert (report.healed, report.has_damage) == ([], True)

    def test_an_edited_copy_heals_nothing(self, store: Store, folder: Path, digest: str) -> None:
        store.place(digest, folder / "a.json", kind="copy")
        edit(folder / "a.json")
        blob_path(store).unlink()
        report = store.verify(repair=True)
        assert (report.healed, report.has_damage) == ([], True)
        assert not blob_path(store).exists()


def remove_index(store: Store) -> None:
    store.close()
    for path in store.root.glob("index.sqlite3*"):
        path.unlink()


class TestRebuild:
    def test_everything_on_the_disk_is_found_again(self, store: Store, folder: Path) -> None:
        store.put_stream([OTHER])
        store.adopt(write(folder / "a.safetensors"), algorithms=["sha256", "git-sha1"])
        store.replace(write(folder / "b.safetensors"), DIGEST)
        for kind in ("hardlink", "copy"):
            store.place(DIGEST, folder / kind, kind=kind)
        store.pin(DIGEST, "mine")
        before, files = self.facts(store), snapshot(folder)
        watch = Watch()
        assert store.rebuild(progress=watch) == watch.done == watch.total == 2
        assert self.facts(store) == before
        assert snapshot(folder) == files
        assert findings(store.verify(full=True)) == {}

    def facts(self, store: Store) -> list[object]:
        return [
            (
                blob.digest,
                blob.size,
                blob.inode,
                store.aliases_of(blob),
                [(link.path, link.kind, link.inode) for link in store.links_of(blob)],
                [(owner.kind, owner.name) for owner, _ in store.holders_of(blob)],
            )
            for blob in store.blobs()
        ]

    def test_what_is_not_on_the_disk_any_more_is_not_recorded(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        gone = store.put_stream([OTHER], algorithms=["sha256"])
        lost = store.aliases_of(gone)["sha256"]
        blob_path(store, gone.digest).unlink()
        for name in ("gone", "other", "kept"):
            store.place(digest, folder / name, kind="hardlink")
        (folder / "gone").unlink()
        os.replace(write(folder / "new", OTHER), folder / "other")
        store.own(Owner(kind="folder", name="m", path=folder), [digest])
        store.rebuild()
        assert store.find("sha256", lost) is None
        assert [blob.digest for blob in store.blobs()] == [digest]
        assert linked_paths(store) == [folder / "kept"]
        assert store.owners() == [], "only the index knew them: prune is careful"

    def test_a_lost_index_is_rebuilt_at_open_and_prune_waits_until_links_are_confirmed(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.put_stream([OTHER])
        store.pin(digest, "mine")
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        ways: dict[str, Callable[[], object]] = {
            "removed": lambda: remove_index(store),
            "empty": in_turn(lambda: remove_index(store), store.volume.layout.index.touch),
            "without its log": store.volume.layout.index.unlink,
        }
        for name, lose in ways.items():
            lose()
            for _ in range(2):
                with row(name), Store(store.root) as again:
                    found = {blob.digest: read(again, blob.digest) for blob in again.blobs()}
                    assert found == {DIGEST: WEIGHTS, digest_of(OTHER): OTHER}
                    assert holders(again) == ["pin mine"]
                    assert linked_paths(again) == [folder / "a.safetensors"]
                    with pytest.raises(PruneRefusedError):
                        again.plan_prune()
        with Store(store.root) as again:
            again.confirm_links()
            assert again.plan_prune().execute().removed == 1
            assert read(again) == WEIGHTS
            assert findings(again.verify(full=True)) == {}

    def test_rows_made_this_way_are_hashed_before_use(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        edit(blob_path(store))
        remove_index(store)
        with Store(store.root) as again:
            assert again.get(digest).trust == Trust.UNPROVEN
            with pytest.raises(DamagedBlobError):
                again.place(digest, folder / "a.safetensors", kind="hardlink")

    def test_what_held_lost_bytes_holds_them_again_when_they_come_back(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """Neither the index nor the bytes were there for a while; the journal remembers."""
        path = folder / "a.safetensors"
        store.pin(digest, "mine")
        store.place(digest, path, kind="hardlink")
        store.put_stream([OTHER])
        store.pin(digest_of(OTHER))
        store.unpin(digest_of(OTHER))
        store.plan_prune().execute()
        blob_path(store).unlink()
        remove_index(store)
        with Store(store.root) as again:
            assert again.verify().missing == [digest]
            again.put_stream([WEIGHTS])
            assert holders(again) == ["pin mine"]
            assert again.plan_prune(after_rebuild=True).victims == ()
            assert not again.verify().has_damage
            again.plan_eject(drop_pinned=True).execute()
        assert path.read_bytes() == WEIGHTS


def use_everything(root: Path) -> None:
    with Store(root) as store:
        store.put_stream([b"more"])
        store.verify(full=True)
        store.pin(DIGEST, "again")


class TestDamagedIndex:
    def test_it_is_named_and_can_be_made_again(self, store: Store, digest: str) -> None:
        store.put_stream([OTHER])
        store.pin(digest)
        store.close()
        index = store.root / "index.sqlite3"
        size = index.stat().st_size
        noise = random.Random(5).randbytes(size)
        harms: dict[str, Callable[[bytes], bytes]] = {
            "all": lambda _: noise,
            "header": lambda sound: b"no database at all" + sound[18:],
            "all but the first page": lambda sound: sound[:4096] + noise[4096:],
            "cut in half": lambda sound: sound[: size // 2 + 100],
        }
        for name, harm in harms.items():
            with row(name):
                index.write_bytes(harm(index.read_bytes()))
                with pytest.raises(IndexDamagedError) as caught:
                    use_everything(store.root)
                assert "--rebuild" in caught.value.hint
                volume = replace_damaged_index(store.root, store.settings)
                assert rebuild(volume) >= 2
                volume.close()
                with Store(store.root) as again:
                    assert read(again) == WEIGHTS
                    assert "pin kept" in holders(again)
                    with pytest.raises(PruneRefusedError):
                        again.plan_prune()
                    assert not again.verify(full=True).has_damage
                assert any("index" in path.name for path in (store.root / "bad").iterdir())
                connection = sqlite3.connect(index)
                assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                connection.close()

    def test_bytes_flipped_in_it_are_never_anything_but_damage_to_it(
        self, store: Store, tmp_path: Path, digest: str
    ) -> None:
        """Tables that lack a column, texts that are none, numbers without sense, circles."""
        store.pin(digest)
        store.place(digest, tmp_path / "a.safetensors", kind="hardlink")
        store.close()
        path = store.root / "index.sqlite3"
        sound, chance = path.read_bytes(), random.Random(7)
        for turn in range(60):
            data = bytearray(sound)
            end = 4096 if turn % 2 else len(sound)  # the schema, or all pages
            for place in chance.sample([n for n in range(100, end) if sound[n]], 3):
                data[place] = chance.randrange(256)
            remove_index(store)
            path.write_bytes(data)
            try:
                use_everything(store.root)
                with Store(store.root) as again:
                    again.usage()
                    again.owners()
            except SmartcacheError as error:
                assert isinstance(error, IndexDamagedError | BlobNotFoundError), turn  # noqa: PT017

    def test_a_sound_index_is_not_replaced(self, store: Store, digest: str) -> None:
        store.close()
        replace_damaged_index(store.root, store.settings).close()
        with Store(store.root) as again:
            assert [blob.digest for blob in again.blobs()] == [digest]
        assert list((store.root / "bad").iterdir()) == []
