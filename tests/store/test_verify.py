from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api import (
    BlobNotFoundError,
    DamagedBlobError,
    IndexDamagedError,
    Owner,
    Store,
    Trust,
    VerifyReport,
    rebuild,
    replace_damaged_index,
)
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    digest_of,
    edit,
    inode_of,
    mode_of,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)


@pytest.fixture
def digest(store: Store) -> str:
    return store.put_stream([WEIGHTS], algorithms=["sha256"]).digest


def blob_path(store: Store, digest: str = DIGEST) -> Path:
    return Path(store.volume.layout.blob(digest))


def findings(report: VerifyReport) -> dict[str, list[object]]:
    names = ("damaged", "missing", "unindexed", "stray", "writable", "dead_links", "healed")
    return {name: list(getattr(report, name)) for name in names if getattr(report, name)}


def read(store: Store, digest: str = DIGEST) -> bytes:
    with store.open(digest) as file:
        return file.read()


def set_time_back(path: Path, act: Callable[[Path], None]) -> None:
    st = path.stat()
    act(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


class TestSound:
    @pytest.mark.parametrize("full", [False, True])
    def test_a_sound_store_has_no_findings(self, store: Store, folder: Path, full: bool) -> None:
        store.put_stream([OTHER])
        store.adopt(write(folder / "a.safetensors"))
        for kind in ("hardlink", "symlink", "copy"):
            store.place(DIGEST, folder / kind, kind=kind)
        report = store.verify(full=full, repair=True)
        assert findings(report) == {}
        assert not report.has_damage
        assert (report.blobs, report.is_full) == (2, full)

    @pytest.mark.usefixtures("digest")
    def test_quick_hashes_nothing_that_stat_vouches_for(self, store: Store) -> None:
        store.verify()
        report = store.verify()
        assert (report.blobs, report.hashed_size) == (1, 0)

    @pytest.mark.usefixtures("digest")
    def test_full_hashes_every_byte_with_progress(self, store: Store) -> None:
        store.put_stream([OTHER])
        watch = Watch()
        report = store.verify(full=True, progress=watch)
        size = len(WEIGHTS) + len(OTHER)
        assert (report.hashed_size, watch.done, watch.total) == (size, size, size)
        assert watch.unit == "bytes"

    def test_a_link_made_by_somebody_else_is_worked_off_by_a_hash(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        os.link(blob_path(store), folder / "theirs")
        report = store.verify()
        assert report.hashed_size == len(WEIGHTS)
        blob = store.get(digest)
        assert (blob.trust, blob.links) == (Trust.VERIFIED, 2)


class TestDamage:
    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize(
        "harm",
        [
            edit,
            lambda path: os.truncate(path, 10),
            lambda path: edit(path, b"more", offset=len(WEIGHTS)),
            lambda path: os.replace(write(path.with_name("new"), OTHER), path),
            lambda path: set_time_back(path, edit),
        ],
        ids=["flipped", "truncated", "grown", "replaced", "time set back"],
    )
    def test_quick_and_full_find_what_stat_can_show(
        self, store: Store, digest: str, harm: Callable[[Path], None], full: bool
    ) -> None:
        blob_path(store).chmod(0o644)
        harm(blob_path(store))
        blob_path(store).chmod(0o444)
        damaged = blob_path(store).read_bytes()
        report = store.verify(full=full)
        assert findings(report) == {"damaged": [digest]}
        assert report.has_damage
        (bad,) = store.volume.layout.bad.iterdir()
        assert bad.read_bytes() == damaged
        assert not blob_path(store).exists()
        with pytest.raises(BlobNotFoundError):
            store.get(digest)

    def test_full_finds_what_the_disk_forgot_without_a_trace_in_stat(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """Bit rot: another inode made to look like the recorded one in the index."""
        os.replace(write(folder / "rotten", b"R" + WEIGHTS[1:], mode=0o444), blob_path(store))
        store.volume.index.refresh(store.get(digest).id, os.stat(blob_path(store)), Trust.VERIFIED)
        assert findings(store.verify()) == {}
        assert store.verify(full=True).damaged == [digest]

    def test_a_lost_blob_keeps_its_row_for_whoever_brings_the_bytes(
        self, store: Store, digest: str
    ) -> None:
        store.pin(digest)
        edit(blob_path(store))
        store.verify()
        assert store.verify().missing == [digest]
        store.put_stream([WEIGHTS])
        assert findings(store.verify(full=True)) == {}
        assert store.aliases_of(store.get(digest))
        assert store.holders_of(store.get(digest))

    def test_a_missing_blob_is_named(self, store: Store, digest: str) -> None:
        blob_path(store).unlink()
        report = store.verify()
        assert findings(report) == {"missing": [digest]}
        assert report.has_damage

    @pytest.mark.parametrize("full", [False, True])
    def test_a_writable_blob_is_hashed_and_made_read_only(
        self, store: Store, digest: str, full: bool
    ) -> None:
        blob_path(store).chmod(0o666)
        report = store.verify(full=full)
        assert findings(report) == {"writable": [digest]}
        assert not report.has_damage
        assert mode_of(blob_path(store)) == 0o444

    def test_a_file_that_shares_a_damaged_inode_is_left_alone(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        edit(folder / "a.safetensors")
        before = snapshot(folder)
        assert store.verify(repair=True).has_damage
        assert snapshot(folder) == before


class TestOrphans:
    def test_quick_names_a_blob_without_a_row_and_full_gives_it_one(
        self, store: Store, digest: str
    ) -> None:
        store.volume.index.clear()
        store.volume.index.drop_lost()
        assert findings(store.verify()) == {"unindexed": [digest]}
        assert findings(store.verify()) == {"unindexed": [digest]}
        assert findings(store.verify(full=True)) == {"unindexed": [digest]}
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

    def test_what_is_no_blob_is_named_and_left_alone(self, store: Store, digest: str) -> None:
        blobs = store.volume.layout.blobs
        strays = [blobs / "note.txt", blobs / digest[:2] / "x", blobs / "zz" / digest]
        for stray in strays:
            write(stray, b"mine")
        report = store.verify(full=True, repair=True)
        assert sorted(report.stray) == sorted(strays)
        assert not report.has_damage
        assert all(stray.read_bytes() == b"mine" for stray in strays)

    @pytest.mark.parametrize("act", ["forget", "prune", "trash"])
    def test_a_blob_that_is_removed_properly_meanwhile_is_no_finding(
        self, store: Store, digest: str, act: str
    ) -> None:
        def remove() -> None:
            if act == "prune":
                store.plan_prune().execute()
            else:
                store.forget(digest, to_trash=act == "trash")

        assert findings(store.verify(progress=Watch(remove))) == {}


class TestLinks:
    def test_dead_links_are_named_and_forgotten_on_repair(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """A copy that is gone harms nobody: it is forgotten in silence."""
        paths = [folder / kind for kind in ("hardlink", "symlink")]
        for path in [*paths, folder / "copy"]:
            store.place(digest, path, kind=path.name)  # type: ignore[arg-type]
            path.unlink()
        assert findings(store.verify()) == {"dead_links": paths}
        assert not store.verify().has_damage
        assert findings(store.verify(repair=True)) == {"dead_links": paths}
        assert findings(store.verify()) == {}
        assert store.links_of(store.get(digest)) == []

    def test_names_that_are_not_utf_8_do_not_stop_the_walk(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        paths = [folder / os.fsdecode(name) for name in (b"\x01", b"a", b"\xff", b"\xff\xff")]
        for path in paths:
            store.place(digest, path, kind="hardlink")
            path.unlink()
        assert store.verify().dead_links == paths


class TestRepair:
    def test_a_replaced_blob_is_healed_from_the_file_it_was_adopted_from(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.safetensors")
        store.adopt(path)
        os.replace(write(folder / "x", OTHER, mode=0o444), blob_path(store))
        report = store.verify(repair=True)
        assert findings(report) == {"damaged": [DIGEST], "healed": [DIGEST]}
        assert not report.has_damage
        assert inode_of(blob_path(store)) == inode_of(path)
        assert read(store) == WEIGHTS

    def test_a_missing_blob_is_healed_from_a_link(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        blob_path(store).unlink()
        report = store.verify(repair=True)
        assert findings(report) == {"missing": [digest], "healed": [digest]}
        assert inode_of(blob_path(store)) == inode_of(folder / "a.safetensors")
        assert mode_of(blob_path(store)) == 0o444

    def test_a_file_the_user_made_writable_is_copied_not_shared(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = folder / "a.safetensors"
        store.place(digest, path, kind="hardlink")
        blob_path(store).unlink()
        path.chmod(0o644)
        assert store.verify(repair=True).healed == [digest]
        assert inode_of(blob_path(store)) != inode_of(path)
        assert mode_of(path) == 0o644

    def test_a_missing_blob_is_healed_from_a_copy(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.json", kind="copy")
        before = snapshot(folder)
        blob_path(store).unlink()
        assert store.verify(repair=True).healed == [digest]
        assert inode_of(blob_path(store)) != inode_of(folder / "a.json")
        assert snapshot(folder) == before
        assert read(store) == WEIGHTS

    def test_a_missing_blob_is_healed_from_another_volume(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        store.add_volume(elsewhere / ".smartcache").put_stream([WEIGHTS])
        blob_path(store).unlink()
        assert store.verify(repair=True).healed == [digest]
        assert read(store) == WEIGHTS

    @pytest.mark.usefixtures("digest")
    def test_a_damaged_neighbour_heals_nothing(self, store: Store, elsewhere: Path) -> None:
        other = store.add_volume(elsewhere / ".smartcache")
        other.put_stream([WEIGHTS])
        edit(blob_path(other))
        blob_path(store).unlink()
        report = store.verify(repair=True)
        assert report.healed == []
        assert report.has_damage

    def test_an_edited_file_heals_nothing(self, store: Store, folder: Path, digest: str) -> None:
        store.place(digest, folder / "a.json", kind="copy")
        edit(folder / "a.json")
        blob_path(store).unlink()
        report = store.verify(repair=True)
        assert report.healed == []
        assert report.has_damage
        assert not blob_path(store).exists()

    def test_without_repair_nothing_is_healed(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.json", kind="copy")
        blob_path(store).unlink()
        assert store.verify(full=True).healed == []
        assert not blob_path(store).exists()

    def test_aliases_owners_and_links_are_as_before(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.pin(digest, "mine")
        store.place(digest, folder / "a.json", kind="copy")
        aliases = store.aliases_of(store.get(digest))
        edit(blob_path(store))
        store.verify(repair=True)
        blob = store.get(digest)
        assert store.aliases_of(blob) == aliases
        assert [owner.name for owner, _ in store.holders_of(blob)] == ["mine"]
        assert [link.path for link in store.links_of(blob)] == [folder / "a.json"]


class TestRebuild:
    def test_everything_on_the_disk_is_found_again(self, store: Store, folder: Path) -> None:
        store.put_stream([OTHER])
        store.adopt(write(folder / "a.safetensors"))
        write(folder / "b.safetensors")
        store.replace(folder / "b.safetensors", DIGEST)
        for kind in ("hardlink", "symlink", "copy"):
            store.place(DIGEST, folder / kind, kind=kind)
        store.pin(DIGEST, "mine")
        before = self.facts(store)
        files = snapshot(folder)
        assert store.rebuild() == 2
        assert self.facts(store) == before
        assert snapshot(folder) == files
        assert findings(store.verify(full=True)) == {}

    def test_other_hashes_of_what_is_still_there_are_kept(self, store: Store) -> None:
        kept = store.put_stream([WEIGHTS], algorithms=["sha256", "git-sha1"])
        gone = store.put_stream([OTHER], algorithms=["sha256"])
        before, lost = store.aliases_of(kept), store.aliases_of(gone)
        blob_path(store, gone.digest).unlink()
        store.rebuild()
        found = store.find("sha256", before["sha256"])
        assert found is not None
        assert found.digest == kept.digest
        assert store.aliases_of(found) == before
        assert store.find("sha256", lost["sha256"]) is None
        assert [blob.digest for blob in store.blobs()] == [kept.digest]

    def test_rows_made_this_way_are_hashed_before_use(self, store: Store, digest: str) -> None:
        edit(blob_path(store))
        store.rebuild()
        assert store.get(digest).trust == Trust.UNPROVEN
        with pytest.raises(DamagedBlobError):
            store.open(digest)

    def test_a_lost_index_is_rebuilt_at_open(self, store: Store, folder: Path, digest: str) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        store.close()
        for path in store.root.glob("index.sqlite3*"):
            path.unlink()
        with Store(store.root) as again:
            assert read(again) == WEIGHTS
            links = again.links_of(again.get(digest))
            assert [link.path for link in links] == [folder / "a.safetensors"]

    def test_a_lost_index_with_its_log_left_behind_is_rebuilt_too(
        self, store: Store, digest: str
    ) -> None:
        store.volume.layout.index.unlink()
        with Store(store.root) as again:
            assert read(again) == WEIGHTS
            assert [blob.digest for blob in again.blobs()] == [digest]

    def test_symlinks_and_pins_of_a_blob_that_is_missing_hold_it_when_it_comes_back(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="symlink")
        pinned = store.put_stream([OTHER]).digest
        store.pin(pinned, "mine")
        for name in (digest, pinned):
            blob_path(store, name).unlink()
        store.rebuild()
        store.confirm_links()
        store.put_stream([WEIGHTS])
        store.put_stream([OTHER])
        assert store.plan_prune().victims == ()
        store.plan_eject(drop_pinned=True).execute()
        assert (folder / "a.safetensors").read_bytes() == WEIGHTS

    def test_links_that_are_gone_or_others_now_are_not_recorded(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        for name in ("gone", "other", "kept"):
            store.place(digest, folder / name, kind="hardlink")
        (folder / "gone").unlink()
        os.replace(write(folder / "new", OTHER), folder / "other")
        store.rebuild()
        assert [link.path.name for link in store.links_of(store.get(digest))] == ["kept"]

    def test_owners_that_only_the_index_knew_are_gone_so_prune_is_careful(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="m", path=folder), [digest])
        store.rebuild()
        assert store.owners() == []

    def test_progress_is_told(self, store: Store) -> None:
        for number in range(5):
            store.put_stream([bytes([number])])
        watch = Watch()
        assert store.rebuild(progress=watch) == 5
        assert (watch.done, watch.total) == (5, 5)

    @pytest.mark.usefixtures("digest")
    @pytest.mark.parametrize("harm", ["garbage", "half"])
    def test_a_damaged_index_is_named_and_can_be_replaced(self, store: Store, harm: str) -> None:
        store.close()
        index = store.volume.layout.index
        data = index.read_bytes()
        index.write_bytes(b"no database " * 1000 if harm == "garbage" else data[: len(data) // 2])
        with pytest.raises(IndexDamagedError) as caught:
            self.use(store.root)
        assert "--rebuild" in caught.value.hint
        volume = replace_damaged_index(store.root, store.settings)
        try:
            assert rebuild(volume) == 1
        finally:
            volume.close()
        assert any(path.name.startswith("index.sqlite3") for path in (store.root / "bad").iterdir())
        with Store(store.root) as again:
            assert read(again) == WEIGHTS

    def use(self, root: Path) -> None:
        with Store(root) as store:
            store.verify(full=True)

    def facts(self, store: Store) -> list[object]:
        return [
            (
                blob.digest,
                blob.size,
                blob.inode,
                [(link.path, link.kind, link.inode) for link in store.links_of(blob)],
                [(owner.kind, owner.name) for owner, _ in store.holders_of(blob)],
            )
            for blob in store.blobs()
        ]
