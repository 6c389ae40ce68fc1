from __future__ import annotations

import errno
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api import (
    Algorithm,
    BadDigestError,
    DamagedBlobError,
    DigestMismatchError,
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    NoSpaceError,
    Owner,
    Store,
    StoreUnwritableError,
    Trust,
    probe,
)
from tests.api import store_digest as digest
from tests.api import store_lanes as lanes
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    digest_of,
    edit,
    inode_of,
    link_count,
    mode_of,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may do that"
)

SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
AtPoint = Callable[[str, Callable[[], object]], None]


def blob_path(store: Store, digest: str = digest_of(WEIGHTS)) -> Path:
    return Path(store.volume.layout.blob(digest))


def read(store: Store, digest: str) -> bytes:
    with store.open(digest) as file:
        return file.read()


def come_to_write(path: Path) -> None:
    """Open a file for writing as far as a lease lets one: the waiting is left out."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return


@contextmanager
def written_by_another_process(path: Path) -> Iterator[None]:
    program = "import sys; file = open(sys.argv[1], 'r+b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        try:
            yield
        finally:
            child.communicate()
    assert child.returncode == 0


def needs_leases(directory: Path) -> None:
    if not probe(directory).lease:
        pytest.skip("no leases on this filesystem")


class TestAdopted:
    def test_the_file_becomes_the_blob_where_it_is(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors", mode=0o640)
        st = os.stat(path)
        blob = store.adopt(path)
        now = os.stat(path)
        assert blob.digest == digest_of(WEIGHTS)
        assert inode_of(blob_path(store)) == st.st_ino == now.st_ino
        assert (now.st_size, now.st_mtime_ns) == (st.st_size, st.st_mtime_ns)
        assert (now.st_uid, now.st_gid) == (st.st_uid, st.st_gid)
        assert path.read_bytes() == WEIGHTS
        assert list(folder.iterdir()) == [path]

    @pytest.mark.parametrize(("before", "after"), [(0o644, 0o444), (0o775, 0o555), (0o600, 0o400)])
    def test_only_permission_to_write_goes(
        self, store: Store, folder: Path, before: int, after: int
    ) -> None:
        path = write(folder / "a.safetensors", mode=before)
        store.adopt(path)
        assert mode_of(path) == after

    def test_the_path_is_recorded_as_a_hard_link(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        (link,) = store.links_of(store.adopt(path))
        assert (link.path, link.kind, link.inode) == (path, "hardlink", inode_of(path))

    def test_its_row_says_that_we_did_not_sync_it(self, store: Store, folder: Path) -> None:
        blob = store.adopt(write(folder / "a.safetensors"))
        assert (blob.unsynced, blob.links) == (store.volume.boot, 2)

    def test_after_another_boot_it_is_hashed_before_use(self, store: Store, folder: Path) -> None:
        """Power loss may have taken bytes that were never synced, with nothing in stat to show."""
        blob = store.adopt(write(folder / "a.safetensors"))
        store.volume.boot = "another boot"
        assert read(store, blob.digest) == WEIGHTS
        assert store.get(blob.digest).unsynced is None

    def test_the_size_and_the_name_do_not_matter(self, store: Store, folder: Path) -> None:
        assert store.adopt(write(folder / "config.json", b"{}")).size == 2

    def test_names_need_not_be_utf_8(self, store: Store, folder: Path) -> None:
        path = write(folder / os.fsdecode(b"caf\xe9 \xff.safetensors"))
        (link,) = store.links_of(store.adopt(path))
        assert link.path == path
        store.plan_undo().execute()
        assert mode_of(path) == 0o644

    def test_hashes_asked_for_become_aliases(self, store: Store, folder: Path) -> None:
        blob = store.adopt(write(folder / "a.safetensors"), algorithms=["sha256"])
        assert store.find("sha256", SHA256) == blob

    def test_announced_hashes_are_taken_in_either_case(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        blob = store.adopt(path, expected={"sha256": SHA256.upper()})
        assert store.find("sha256", SHA256) == blob

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

    def test_a_file_written_just_now_is_proven_under_a_lease(
        self, store: Store, folder: Path
    ) -> None:
        needs_leases(folder)
        assert store.adopt(write(folder / "a.safetensors", age=0)).trust == Trust.VERIFIED

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_a_file_written_just_now_is_hashed_before_each_use_for_a_while(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a.safetensors", age=0)
        blob = store.adopt(path)
        assert blob.trust == Trust.UNPROVEN
        assert read(store, blob.digest) == WEIGHTS
        pass_time(3)
        assert read(store, blob.digest) == WEIGHTS
        assert store.get(blob.digest).trust == Trust.VERIFIED

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_a_second_write_in_one_tick_is_found(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.safetensors", age=0)
        blob = store.adopt(path)
        st = path.stat()
        edit(path)
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        with pytest.raises(DamagedBlobError):
            store.open(blob.digest)

    def test_an_owner_holds_what_it_adopts(self, store: Store, folder: Path) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        blob = store.adopt(write(folder / "a.safetensors"), owner=owner)
        assert [(o.name, state) for o, state in store.holders_of(blob)] == [("models", "live")]
        (link,) = store.links_of(blob)
        assert link.owner is not None


class TestAlreadyThere:
    def test_a_duplicate_is_not_touched(self, store: Store, folder: Path) -> None:
        store.put_stream([WEIGHTS])
        path = write(folder / "a.safetensors")
        before = (snapshot(folder), os.stat(path).st_ctime_ns)
        (adoption,) = store.adopt_many([path], algorithms=["sha256"])
        assert (adoption.outcome, adoption.digest) == ("duplicate", digest_of(WEIGHTS))
        assert (snapshot(folder), os.stat(path).st_ctime_ns) == before
        assert store.find("sha256", SHA256) is not None
        assert store.history() == []

    def test_a_file_that_is_the_blob_already_is_present(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        store.adopt(path)
        (adoption,) = store.adopt_many([path])
        assert adoption.outcome == "present"
        assert len(store.history()) == 1

    def test_a_present_file_gets_the_aliases_asked_for(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        store.adopt(path)
        blob = store.adopt(path, algorithms=["sha256"])
        assert store.find("sha256", SHA256) == blob

    @pytest.mark.parametrize("before", ["nothing", "present", "duplicate"])
    def test_another_hash_than_announced_is_refused_whatever_the_store_has(
        self, store: Store, folder: Path, before: str
    ) -> None:
        path = write(folder / "a.safetensors")
        if before == "present":
            store.adopt(path)
        elif before == "duplicate":
            store.put_stream([WEIGHTS])
        state = snapshot(folder)
        with pytest.raises(DigestMismatchError):
            store.adopt(path, expected={"sha256": "1" * 64})
        assert snapshot(folder) == state
        assert store.find("sha256", "1" * 64) is None

    @pytest.mark.parametrize("before", ["present", "duplicate"])
    def test_an_owner_holds_the_blob_that_was_there(
        self, store: Store, folder: Path, before: str
    ) -> None:
        path = write(folder / "a.safetensors")
        if before == "present":
            store.adopt(path)
        else:
            store.put_stream([WEIGHTS])
        owner = Owner(kind="folder", name="models", path=folder)
        blob = store.adopt(path, owner=owner)
        assert [o.name for o, _ in store.holders_of(blob)] == ["models"]

    def test_a_second_name_of_an_adopted_file_is_present(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        os.link(path, folder / "b.safetensors")
        store.adopt(path)
        (adoption,) = store.adopt_many([folder / "b.safetensors"])
        assert adoption.outcome == "present"

    def test_two_names_of_one_file_adopted_at_once_leave_it_read_only(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.safetensors")
        os.link(path, folder / "b.safetensors")
        outcomes = [a.outcome for a in store.adopt_many([path, folder / "b.safetensors"])]
        assert sorted(outcomes) == ["adopted", "present"]
        assert mode_of(blob_path(store)) == 0o444
        store.plan_undo().execute()
        assert mode_of(path) == 0o644
        assert inode_of(path) == inode_of(folder / "b.safetensors")

    def test_two_equal_files_adopted_at_once_are_one_blob_and_a_duplicate(
        self, store: Store, folder: Path
    ) -> None:
        paths = [write(folder / name) for name in ("a.safetensors", "b.safetensors")]
        found = {a.path: a.outcome for a in store.adopt_many(paths)}
        assert sorted(found.values()) == ["adopted", "duplicate"]
        for path, outcome in found.items():
            assert mode_of(path) == (0o444 if outcome == "adopted" else 0o644)

    def test_a_good_file_takes_the_place_of_a_damaged_blob(
        self, store: Store, folder: Path
    ) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        edit(blob_path(store))
        path = write(folder / "a.safetensors")
        (adoption,) = store.adopt_many([path])
        assert adoption.outcome == "adopted"
        assert read(store, digest) == WEIGHTS
        assert inode_of(blob_path(store)) == inode_of(path)


class TestRefused:
    """What must not be adopted stays as it is, with a reason; the store stays empty."""

    def refused(self, store: Store, path: Path, folder: Path) -> FileSkippedError:
        before = snapshot(folder)
        with pytest.raises(FileSkippedError) as caught:
            store.adopt(path)
        assert snapshot(folder) == before
        assert list(store.blobs()) == []
        assert store.history() == []
        return caught.value

    @pytest.mark.parametrize(
        "name",
        [
            "abc.incomplete",
            "model.safetensors.INCOMPLETE",
            "sha256-abc-partial",
            "sha256-abc-partial-0",
            "model.tmp",
            "model.safetensors.part",
            "model.gguf.crdownload",
            "model.gguf.aria2",
            "model.download",
            "model.lock",
        ],
    )
    def test_an_unfinished_download(self, store: Store, folder: Path, name: str) -> None:
        assert self.refused(store, write(folder / name), folder).reason == "incomplete download"

    def test_an_empty_file(self, store: Store, folder: Path) -> None:
        assert self.refused(store, write(folder / "a.bin", b""), folder).reason == "empty"

    def test_a_directory(self, store: Store, folder: Path) -> None:
        (folder / "a.bin").mkdir()
        assert self.refused(store, folder / "a.bin", folder).reason == "not a regular file"

    def test_a_fifo(self, store: Store, folder: Path) -> None:
        os.mkfifo(folder / "a.bin")
        assert self.refused(store, folder / "a.bin", folder).reason == "not a regular file"

    def test_a_socket(self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)  # its path may be 107 bytes long
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("a.bin")
            assert self.refused(store, folder / "a.bin", folder).reason == "not a regular file"

    @as_root
    def test_a_device(self, store: Store, folder: Path) -> None:
        try:
            os.mknod(folder / "null", 0o020666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("no permission to make devices")
        assert self.refused(store, folder / "null", folder).reason == "not a regular file"

    def test_a_symlink_to_a_directory(self, store: Store, folder: Path) -> None:
        (folder / "real").mkdir()
        (folder / "a.bin").symlink_to("real")
        assert self.refused(store, folder / "a.bin", folder).reason == "not a regular file"

    @as_root
    def test_a_file_of_another_user(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        os.chown(path, 12345, 12345)
        assert self.refused(store, path, folder).reason == "belongs to another user"

    @pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1644])
    def test_a_special_mode(self, store: Store, folder: Path, mode: int) -> None:
        path = write(folder / "a.safetensors", mode=mode)
        if mode_of(path) != mode:
            pytest.skip("this user cannot set that mode")
        assert self.refused(store, path, folder).reason == "has a special mode"

    def test_another_filesystem(self, store: Store, elsewhere: Path) -> None:
        path = write(elsewhere / "a.safetensors")
        assert self.refused(store, path, elsewhere).reason == "other filesystem"

    def test_another_filesystem_among_many(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        far, near = write(elsewhere / "a.bin"), write(folder / "a.bin")
        found = {a.path: a for a in store.adopt_many([far, near])}
        assert found[near].outcome == "adopted"
        error = found[far].error
        assert isinstance(error, FileSkippedError)
        assert error.reason == "other filesystem"

    def test_a_file_that_another_process_writes(self, store: Store, folder: Path) -> None:
        needs_leases(folder)
        path = write(folder / "a.safetensors")
        with written_by_another_process(path):
            assert isinstance(self.refused(store, path, folder), FileBusyError)
        assert store.adopt(path).digest == digest_of(WEIGHTS)

    def test_a_file_that_this_process_writes(self, store: Store, folder: Path) -> None:
        needs_leases(folder)
        path = write(folder / "a.safetensors")
        with path.open("r+b"):
            assert self.refused(store, path, folder).reason == "busy"

    @pytest.mark.parametrize("name", ["missing", "dangling"])
    def test_what_is_not_there(self, store: Store, folder: Path, name: str) -> None:
        (folder / "dangling").symlink_to("nowhere")
        with pytest.raises(FileNotFoundError):
            store.adopt(folder / name)

    def test_what_is_no_hash(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        with pytest.raises(BadDigestError):
            store.adopt(path, expected={"sha256": "abc"})
        assert mode_of(path) == 0o644

    @pytest.mark.parametrize("algorithm", ["blake3", "sha256", "git-sha1"])
    def test_another_hash_than_announced(
        self, store: Store, folder: Path, algorithm: Algorithm
    ) -> None:
        path = write(folder / "a.safetensors")
        before = snapshot(folder)
        with pytest.raises(DigestMismatchError):
            store.adopt(path, expected={algorithm: "0" * (40 if algorithm == "git-sha1" else 64)})
        assert snapshot(folder) == before
        assert list(store.blobs()) == []


class TestMode:
    """Whatever goes wrong after the file was made read-only gives its mode back."""

    @as_root
    def test_a_writer_who_comes_after_the_link_gets_the_file_back(
        self, store: Store, folder: Path, at_point: AtPoint
    ) -> None:
        needs_leases(folder)
        path = write(folder / "a.safetensors", mode=0o664)
        before = snapshot(folder)
        at_point("adopt: linked", lambda: come_to_write(path))
        with pytest.raises(FileChangedError):
            store.adopt(path)
        assert snapshot(folder) == before
        assert link_count(path) == 1
        assert not blob_path(store).exists()
        assert list(store.blobs()) == []

    def test_a_file_that_is_replaced_meanwhile_stays(
        self, store: Store, folder: Path, at_point: AtPoint
    ) -> None:
        path = write(folder / "a.safetensors")
        at_point("adopt: journaled", lambda: os.replace(write(folder / "new", OTHER), path))
        with pytest.raises(FileSkippedError):
            store.adopt(path)
        assert (path.read_bytes(), mode_of(path), link_count(path)) == (OTHER, 0o644, 1)
        assert list(store.blobs()) == []

    def test_a_file_that_is_removed_meanwhile_is_gone(
        self, store: Store, folder: Path, at_point: AtPoint
    ) -> None:
        path = write(folder / "a.safetensors")
        os.link(path, folder / "b.safetensors")
        at_point("adopt: read-only", path.unlink)
        with pytest.raises(FileSkippedError):
            store.adopt(path)
        assert mode_of(folder / "b.safetensors") == 0o644
        assert not path.exists()

    @pytest.mark.parametrize(
        ("code", "error"),
        [(errno.ENOSPC, NoSpaceError), (errno.EROFS, StoreUnwritableError), (errno.EIO, OSError)],
        ids=["ENOSPC", "EROFS", "EIO"],
    )
    def test_a_link_that_fails_gives_the_mode_back(
        self,
        store: Store,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        code: int,
        error: type[Exception],
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        path = write(folder / "a.safetensors")
        before = snapshot(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", fail)
            with pytest.raises(error):
                store.adopt(path)
        assert snapshot(folder) == before
        with Store(store.root) as again:
            assert again.history() == []
        assert snapshot(folder) == before

    @pytest.mark.parametrize("fails", ["read", "link"])
    def test_a_file_that_the_disk_cannot_read_is_named_and_the_others_are_adopted(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        paths = [write(folder / f"{n}.bin", WEIGHTS + bytes([n])) for n in range(4)]
        bad, inode = paths[1], inode_of(paths[1])
        read, link = lanes.read_at, os.link

        def read_but_one(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if os.fstat(fd).st_ino == inode:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(fd, buffers, offset)

        def link_but_one(source: str, target: str, **more: int) -> None:
            if source == bad.name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            link(source, target, **more)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            if fails == "read":
                patch.setattr(digest, "read_at", read_but_one)
            else:
                patch.setattr(os, "link", link_but_one)
            found = {each.path: each for each in store.adopt_many(paths)}
        assert [found[path].outcome for path in paths] == [
            "adopted",
            "skipped",
            "adopted",
            "adopted",
        ]
        error = found[bad].error
        assert isinstance(error, OSError)
        assert error.errno == errno.EIO
        assert (mode_of(bad), link_count(bad)) == (0o644, 1)
        assert store.verify(full=True).unindexed == []

    def test_a_file_with_another_hash_than_announced_is_named_and_the_others_are_adopted(
        self, store: Store, folder: Path
    ) -> None:
        right, wrong = write(folder / "a.bin"), write(folder / "b.bin", OTHER)
        found = list(store.adopt_many([wrong, right], expected={"sha256": SHA256}))
        assert {each.path: each.outcome for each in found} == {right: "adopted", wrong: "skipped"}
        (error,) = (each.error for each in found if each.error is not None)
        assert isinstance(error, DigestMismatchError)
        assert mode_of(wrong) == 0o644

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
        store.plan_undo().execute()
        assert {mode_of(path) for path in paths} == {0o644}

    def test_a_full_journal_stops_before_the_file_is_touched(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        path = write(folder / "a.safetensors")
        before = (snapshot(folder), os.stat(path).st_ctime_ns)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(NoSpaceError):
            store.adopt(path)
        assert (snapshot(folder), os.stat(path).st_ctime_ns) == before


class TestMany:
    def test_each_file_has_an_outcome(self, store: Store, folder: Path) -> None:
        good = [write(folder / f"{n}.bin", OTHER + bytes([n])) for n in range(5)]
        empty = write(folder / "empty.bin", b"")
        gone = folder / "gone.bin"
        found = {a.path: a for a in store.adopt_many([*good, empty, gone])}
        assert {found[path].outcome for path in good} == {"adopted"}
        assert found[empty].outcome == found[gone].outcome == "skipped"
        assert isinstance(found[empty].error, FileSkippedError)
        assert isinstance(found[gone].error, FileNotFoundError)

    def test_more_files_than_a_chunk_are_all_adopted_and_undone_together(
        self, store: Store, folder: Path
    ) -> None:
        paths = [write(folder / f"{n}.bin", n.to_bytes(2)) for n in range(300)]
        before = snapshot(folder)
        assert {a.outcome for a in store.adopt_many(paths)} == {"adopted"}
        assert sum(1 for _ in store.blobs()) == 300
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

    def test_no_lease_or_descriptor_remains(self, store: Store, folder: Path) -> None:
        paths = [write(folder / f"{n}.bin", OTHER + bytes([n])) for n in range(5)]
        list(store.adopt_many([*paths, write(folder / "a.tmp")]))
        before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        more = [write(folder / f"more{n}.bin", WEIGHTS + bytes([n])) for n in range(5)]
        list(store.adopt_many([*more, write(folder / "b.bin", b"")]))
        if sys.platform == "linux":
            assert len(os.listdir("/proc/self/fd")) == before
        assert list(store.volume.layout.tmp.iterdir()) == []
