"""A file of the user's becomes a blob where it is, or stays exactly as it is, with a reason."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from smartcache.errors import (
    BadDigestError,
    DamagedBlobError,
    DigestMismatchError,
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    NoSpaceError,
    StoreUnwritableError,
)
from smartcache.store.records import Owner, Trust
from smartcache.store.store import Store
from smartcache.system.hashing import Algorithm
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    blob_path,
    come_to_write,
    digest_of,
    edit_with_time_set_back,
    inode_of,
    link_count,
    mode_of,
    raising,
    read,
    row,
    sha256_of,
    snapshot,
    undo,
    write,
    written_by_another_process,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")

DIGEST, SHA256 = digest_of(WEIGHTS), sha256_of(WEIGHTS)


@pytest.fixture
def path(folder: Path) -> Path:
    return write(folder / "a.safetensors")


class TestAdopted:
    def test_the_file_becomes_the_blob_where_it_is(self, store: Store, path: Path) -> None:
        """Its row says that we did not sync it, and the path is recorded as a link."""
        st = os.stat(path)
        owner = Owner(kind="folder", name="models", path=path.parent)
        blob = store.adopt(path, owner=owner)
        now = os.stat(path)
        assert (blob.digest, blob.unsynced, blob.links) == (DIGEST, store.volume.boot, 2)
        assert inode_of(blob_path(store)) == st.st_ino == now.st_ino
        assert (now.st_size, now.st_mtime_ns) == (st.st_size, st.st_mtime_ns)
        assert (now.st_uid, now.st_gid) == (st.st_uid, st.st_gid)
        assert path.read_bytes() == WEIGHTS
        assert list(path.parent.iterdir()) == [path]
        (link,) = store.links_of(blob)
        assert (link.path, link.kind, link.inode) == (path, "hardlink", st.st_ino)
        assert link.owner is not None
        assert [(o.name, state) for o, state in store.holders_of(blob)] == [("models", "live")]

    def test_only_permission_to_write_goes(self, store: Store, folder: Path) -> None:
        """Whatever the size and name of the file, which need not be UTF-8."""
        for number, (before, after) in enumerate(((0o644, 0o444), (0o775, 0o555), (0o600, 0o400))):
            path = write(folder / os.fsdecode(b"\xe9 \xff%d" % number), b"%d" % number, mode=before)
            (link,) = store.links_of(store.adopt(path))
            assert (link.path, mode_of(path)) == (path, after)
            undo(store)
            assert mode_of(path) == before

    def test_hashes_asked_for_and_announced_become_aliases(self, store: Store, path: Path) -> None:
        blob = store.adopt(path, expected={"sha256": SHA256.upper()})
        assert store.find("sha256", SHA256) == blob
        store.adopt(path, algorithms=["git-sha1"])
        assert set(store.aliases_of(blob)) == {"sha256", "git-sha1"}

    def test_a_symlink_lets_the_file_behind_it_be_adopted(self, store: Store, folder: Path) -> None:
        """HF snapshots are symlinks into `blobs/`: the real file counts, the pointer stays."""
        real = write(folder / "blobs" / "a")
        pointer = folder / "snapshots" / "model.safetensors"
        pointer.parent.mkdir()
        pointer.symlink_to("../blobs/a")
        blob = store.adopt(pointer)
        assert [link.path for link in store.links_of(blob)] == [real]
        assert inode_of(blob_path(store)) == inode_of(real)
        assert os.readlink(pointer) == "../blobs/a"

    @pytest.mark.usefixtures("with_leases")
    def test_a_file_written_just_now_is_proven_under_a_lease(
        self, store: Store, folder: Path
    ) -> None:
        assert store.adopt(write(folder / "a.safetensors", age=0)).trust == Trust.VERIFIED

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_a_file_written_just_now_is_hashed_before_each_use_for_a_while(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        """A second write in one tick is found."""
        blob = store.adopt(write(folder / "a.safetensors", age=0))
        other = store.adopt(write(folder / "b.safetensors", OTHER, age=0))
        assert blob.trust == Trust.UNPROVEN
        assert read(store) == WEIGHTS
        edit_with_time_set_back(folder / "b.safetensors")
        with pytest.raises(DamagedBlobError):
            store.open(other.digest)
        pass_time(3)
        assert read(store) == WEIGHTS
        assert store.get(blob.digest).trust == Trust.VERIFIED


class TestAlreadyThere:
    def test_a_duplicate_is_not_touched(self, store: Store, path: Path) -> None:
        store.put_stream([WEIGHTS])
        before = (snapshot(path.parent), os.stat(path).st_ctime_ns)
        (adoption,) = store.adopt_many([path], algorithms=["sha256"])
        assert (adoption.outcome, adoption.digest) == ("duplicate", DIGEST)
        assert (snapshot(path.parent), os.stat(path).st_ctime_ns) == before
        assert store.find("sha256", SHA256) is not None
        assert store.history() == []

    def test_a_file_that_is_the_blob_already_is_present_by_all_its_names(
        self, store: Store, path: Path
    ) -> None:
        os.link(path, path.with_name("b.safetensors"))
        store.adopt(path)
        for name in ("a.safetensors", "b.safetensors"):
            (adoption,) = store.adopt_many([path.with_name(name)])
            assert adoption.outcome == "present", name
        assert len(store.history()) == 1

    @pytest.mark.parametrize("before", ["nothing", "present", "duplicate"])
    def test_announced_hashes_and_owners_count_whatever_the_store_has(
        self, store: Store, path: Path, before: str
    ) -> None:
        if before == "present":
            store.adopt(path)
        elif before == "duplicate":
            store.put_stream([WEIGHTS])
        state = snapshot(path.parent)
        wrong: dict[Algorithm, str] = {"blake3": "0" * 64, "sha256": "1" * 64, "git-sha1": "2" * 40}
        for algorithm, value in wrong.items():
            with row(algorithm), pytest.raises(DigestMismatchError):
                store.adopt(path, expected={algorithm: value})
        with pytest.raises(BadDigestError):
            store.adopt(path, expected={"sha256": "abc"})
        assert snapshot(path.parent) == state
        assert store.find("sha256", "1" * 64) is None
        blob = store.adopt(path, owner=Owner(kind="folder", name="models", path=path.parent))
        assert [o.name for o, _ in store.holders_of(blob)] == ["models"]

    def test_two_names_of_one_file_adopted_at_once_leave_it_read_only(
        self, store: Store, path: Path
    ) -> None:
        twin = path.with_name("b.safetensors")
        os.link(path, twin)
        outcomes = [a.outcome for a in store.adopt_many([path, twin])]
        assert sorted(outcomes) == ["adopted", "present"]
        assert mode_of(blob_path(store)) == 0o444
        undo(store)
        assert mode_of(path) == 0o644
        assert inode_of(path) == inode_of(twin)

    def test_two_equal_files_adopted_at_once_are_one_blob_and_a_duplicate(
        self, store: Store, folder: Path
    ) -> None:
        paths = [write(folder / name) for name in ("a.safetensors", "b.safetensors")]
        found = {a.path: a.outcome for a in store.adopt_many(paths)}
        assert sorted(found.values()) == ["adopted", "duplicate"]
        for path, outcome in found.items():
            assert mode_of(path) == (0o444 if outcome == "adopted" else 0o644)


class TestRefused:
    """What must not be adopted stays as it is, with a reason; the store stays empty."""

    def refused(self, store: Store, path: Path) -> FileSkippedError:
        before = snapshot(path.parent)
        with pytest.raises(FileSkippedError) as caught:
            store.adopt(path)
        assert snapshot(path.parent) == before
        assert (list(store.blobs()), store.history()) == ([], [])
        return caught.value

    def test_an_unfinished_download(self, store: Store, folder: Path) -> None:
        names = (
            "abc.incomplete", "model.safetensors.INCOMPLETE", f"sha256-{64 * 'a'}-partial",
            f"sha256-{64 * 'a'}-partial-0", "model.tmp", "model.safetensors.part",
            "model.gguf.crdownload", "model.gguf.aria2", "model.download", "model.lock",
        )  # fmt: skip
        for name in names:
            with row(name):
                error = self.refused(store, write(folder / name))
                assert error.reason == "incomplete download"

    def test_what_is_no_ordinary_file_of_the_user(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folder / "directory").mkdir()
        (folder / "link").symlink_to("directory")
        os.mkfifo(folder / "fifo")
        monkeypatch.chdir(folder)  # the path of a socket may be 107 bytes long
        reasons = dict.fromkeys(("directory", "link", "fifo", "socket"), "not a regular file")
        write(folder / "empty", b"")
        reasons["empty"] = "empty"
        for mode in (0o4755, 0o2755, 0o1644):
            if mode_of(write(folder / oct(mode), mode=mode)) == mode:
                reasons[oct(mode)] = "has a special mode"
        if os.geteuid() == 0:
            os.chown(write(folder / "theirs"), 12345, 12345)
            reasons["theirs"] = "belongs to another user"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            for name, reason in reasons.items():
                with row(name):
                    assert self.refused(store, folder / name).reason == reason
        (folder / "dangling").symlink_to("nowhere")
        for name in ("missing", "dangling"):
            with row(name), pytest.raises(FileNotFoundError):
                store.adopt(folder / name)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
    def test_a_device(self, store: Store, folder: Path) -> None:
        try:
            os.mknod(folder / "null", 0o020666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("no permission to make devices")
        assert self.refused(store, folder / "null").reason == "not a regular file"

    def test_another_filesystem(self, store: Store, path: Path, elsewhere: Path) -> None:
        far = write(elsewhere / "a.safetensors")
        assert self.refused(store, far).reason == "other filesystem"
        found = {a.path: a for a in store.adopt_many([far, path])}
        assert (found[path].outcome, found[far].outcome) == ("adopted", "skipped")
        assert isinstance(found[far].error, FileSkippedError)

    @pytest.mark.usefixtures("with_leases")
    def test_a_file_that_somebody_writes(self, store: Store, path: Path) -> None:
        with written_by_another_process(path):
            assert isinstance(self.refused(store, path), FileBusyError)
        with path.open("r+b"):
            assert self.refused(store, path).reason == "busy"
        assert store.adopt(path).digest == DIGEST


class TestMode:
    """Whatever goes wrong after the file was made read-only gives its mode back."""

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root opens a read-only file for writing")
    @pytest.mark.usefixtures("with_leases")
    def test_a_writer_who_comes_after_the_link_gets_the_file_back(
        self, store: Store, path: Path, at_point: AtPoint
    ) -> None:
        before = snapshot(path.parent)
        at_point("adopt: linked", lambda: come_to_write(path))
        with pytest.raises(FileChangedError):
            store.adopt(path)
        assert (snapshot(path.parent), link_count(path)) == (before, 1)
        assert not blob_path(store).exists()
        assert list(store.blobs()) == []

    def test_a_file_that_is_replaced_or_removed_meanwhile_stays_so(
        self, store: Store, path: Path, at_point: AtPoint
    ) -> None:
        second = path.with_name("b.safetensors")
        os.link(path, second)
        at_point("adopt: read-only", path.unlink)
        with pytest.raises(FileSkippedError):
            store.adopt(path)
        assert (path.exists(), mode_of(second)) == (False, 0o644)
        new = write(path.with_name("new"), OTHER)
        at_point("adopt: journaled", lambda: os.replace(new, second))
        with pytest.raises(FileSkippedError):
            store.adopt(second)
        assert (second.read_bytes(), mode_of(second), link_count(second)) == (OTHER, 0o644, 1)
        assert list(store.blobs()) == []

    def test_a_disk_that_fails_gives_the_mode_back(
        self, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A journal that cannot be written stops before the file is touched."""
        before = snapshot(path.parent)
        errors: dict[int, type[Exception]] = {
            errno.ENOSPC: NoSpaceError, errno.EROFS: StoreUnwritableError, errno.EIO: OSError,
        }  # fmt: skip
        for code, error in errors.items():
            with row(errno.errorcode[code]), monkeypatch.context() as patch:
                patch.setattr(os, "link", raising(code))
                with pytest.raises(error):
                    store.adopt(path)
            assert snapshot(path.parent) == before
        with Store(store.root) as again:
            assert again.history() == []
        changed = os.stat(path).st_ctime_ns
        monkeypatch.setattr(os, "fsync", raising(errno.ENOSPC))
        with pytest.raises(NoSpaceError):
            store.adopt(path)
        assert (snapshot(path.parent), os.stat(path).st_ctime_ns) == (before, changed)

    @pytest.mark.parametrize("fails", ["read", "link", "hash"])
    def test_a_file_that_fails_is_named_and_the_others_are_adopted(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        paths = [write(folder / f"{n}.bin", WEIGHTS + bytes([n])) for n in range(4)]
        bad, inode = paths[1], inode_of(paths[1])
        real_read, real_link = os.preadv, os.link

        def read_but_one(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if os.fstat(fd).st_ino == inode:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real_read(fd, buffers, offset)

        def link_but_one(source: str, target: str, **more: int) -> None:
            if source == bad.name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real_link(source, target, **more)  # type: ignore[arg-type]

        expected: dict[Algorithm, str] = {}
        with monkeypatch.context() as patch:
            if fails == "read":
                patch.setattr(os, "preadv", read_but_one)
            elif fails == "link":
                patch.setattr(os, "link", link_but_one)
            else:
                paths = [bad, paths[0]]
                expected["sha256"] = sha256_of(paths[1].read_bytes())
            found = {each.path: each for each in store.adopt_many(paths, expected=expected)}
        outcomes = {path: "skipped" if path == bad else "adopted" for path in paths}
        assert {path: each.outcome for path, each in found.items()} == outcomes
        error = found[bad].error
        assert isinstance(error, DigestMismatchError if fails == "hash" else OSError)
        assert fails == "hash" or vars(error).get("errno", error.errno) == errno.EIO
        assert (mode_of(bad), link_count(bad)) == (0o644, 1)
        assert store.verify(full=True).unindexed == []

    def test_a_failure_in_the_middle_leaves_rows_for_what_was_done(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths = [write(folder / f"{n}.bin", WEIGHTS + bytes([n])) for n in range(4)]
        real = os.link

        def fail_third(source: str, target: str, **more: int) -> None:
            if source == paths[2].name:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(source, target, **more)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", fail_third)
            with pytest.raises(NoSpaceError):
                list(store.adopt_many(paths))
        adopted = [path for path in paths if link_count(path) == 2]
        assert len(adopted) == 2
        assert {mode_of(path) for path in adopted} == {0o444}
        assert {mode_of(path) for path in paths if path not in adopted} == {0o644}
        assert sorted(blob.inode for blob in store.blobs()) == sorted(map(inode_of, adopted))
        assert store.verify(full=True).unindexed == []
        undo(store)
        assert {mode_of(path) for path in paths} == {0o644}


class TestMany:
    def test_more_files_than_a_chunk_are_all_adopted_and_undone_together(
        self, store: Store, folder: Path
    ) -> None:
        """Each has its outcome, and no lease or descriptor remains."""
        paths = [write(folder / f"{n}.bin", n.to_bytes(2)) for n in range(300)]
        empty, gone = write(folder / "empty.bin", b""), folder / "gone.bin"
        before, descriptors = snapshot(folder), os.listdir("/proc/self/fd")
        found = {a.path: a for a in store.adopt_many([*paths, empty, gone])}
        assert {found[path].outcome for path in paths} == {"adopted"}
        assert found[empty].outcome == found[gone].outcome == "skipped"
        assert isinstance(found[empty].error, FileSkippedError)
        assert isinstance(found[gone].error, FileNotFoundError)
        assert len(os.listdir("/proc/self/fd")) <= len(descriptors) + 3, "more than the journal's"
        assert list(store.volume.layout.tmp.iterdir()) == []
        (batch,) = store.history()
        assert (batch.changes, batch.ops, batch.size) == (300, ("adopt",), 600)
        store.plan_undo([batch.id]).execute()
        assert snapshot(folder) == before
        assert list(store.blobs()) == []

    def test_old_files_are_hashed_together_with_progress(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        paths = [write(folder / f"{n}.bin", OTHER + bytes([n])) for n in range(3)]
        pass_time(10)
        watch = Watch()
        assert len(list(store.adopt_many(paths, progress=watch))) == 3
        assert watch.done == watch.total == 3 * (len(OTHER) + 1)
