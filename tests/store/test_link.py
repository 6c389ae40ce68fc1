"""A user's file becomes a blob, or a link of one with the same bytes, or stays exactly as it is."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from smartcache.store.store import Store
from smartcache.store.userfile import Allowance
from smartcache.system import kernel
from smartcache.system.hashing import Algorithm
from tests.processes.children import NOBODY
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    adopt,
    allocated,
    blob_path,
    come_to_write,
    dedup,
    digest_of,
    edit,
    edit_with_time_set_back,
    inode_of,
    link_count,
    mode_of,
    raising,
    read,
    rot,
    row,
    sha256_of,
    snapshot,
    undo,
    write,
    written_by_another_process,
)

if sys.platform != "linux":
    pytest.skip("leases and extended attributes", allow_module_level=True)

DIGEST, SHA256 = digest_of(WEIGHTS), sha256_of(WEIGHTS)
ALL: frozenset[Allowance] = frozenset(("group", "mode", "xattr"))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root does this")
with_leases = pytest.mark.usefixtures("with_leases")


@pytest.fixture
def path(folder: Path) -> Path:
    return write(folder / "a.safetensors")


@pytest.fixture(params=["become", "exchange"])
def _blob(request: pytest.FixtureRequest, store: Store) -> None:
    """Without a blob of its bytes a file becomes one; else it is exchanged with a link of it."""
    if request.param == "exchange":
        store.put_stream([WEIGHTS])


both_ways = pytest.mark.usefixtures("_blob")


class TestBecome:
    def test_the_file_becomes_the_blob_where_it_is(self, store: Store, path: Path) -> None:
        st = os.stat(path)
        (result,) = adopt(store, path)
        now, blob = os.stat(path), store.get(DIGEST)
        assert (result.outcome, result.digest, result.freed) == ("became", DIGEST, 0)
        assert inode_of(blob_path(store)) == st.st_ino == now.st_ino
        assert (now.st_size, now.st_mtime_ns) == (st.st_size, st.st_mtime_ns)
        assert (now.st_uid, now.st_gid, mode_of(path)) == (st.st_uid, st.st_gid, 0o444)
        assert list(path.parent.iterdir()) == [path]
        assert (blob.links, blob.names, store.names_of(DIGEST)) == (2, 1, [path])
        assert store.blob_at(path) == blob

    def test_of_a_symlink_the_file_behind_it_is_meant(self, store: Store, folder: Path) -> None:
        """As in the snapshots of HF caches."""
        real, pointer = write(folder / "blobs" / "a"), folder / "snapshots" / "model.safetensors"
        pointer.parent.mkdir()
        pointer.symlink_to("../blobs/a")
        (result,) = adopt(store, pointer)
        assert (result.path, inode_of(blob_path(store))) == (real, inode_of(real))
        assert os.readlink(pointer) == "../blobs/a"
        write(folder / "private" / "a", OTHER)
        (folder / "shared").symlink_to(folder / "private")
        before = snapshot(folder)
        for path in (pointer, folder / "shared" / "a"):
            for replace in (False, True):
                (result,) = adopt(store, path, follow=False, replace=replace)
                assert result.outcome == "skipped"
        assert snapshot(folder) == before

    def test_bytes_that_are_a_blob_already_are_a_duplicate_and_not_touched(
        self, store: Store, path: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        before = (snapshot(path.parent), os.stat(path).st_ctime_ns)
        (result,) = adopt(store, path, algorithms=["sha256"])
        assert (result.outcome, result.digest) == ("duplicate", DIGEST)
        assert (snapshot(path.parent), os.stat(path).st_ctime_ns) == before
        assert store.find("sha256", SHA256) is not None
        assert store.history() == []

    def test_hashes_asked_for_and_announced_are_remembered(self, store: Store, path: Path) -> None:
        blob = store.adopt(path, expected={"sha256": SHA256.upper()})
        assert store.find("sha256", SHA256) == blob
        store.adopt(path, algorithms=["git-sha1"])
        assert store.hashes_of(DIGEST).keys() == {"sha256", "git-sha1"}

    @pytest.mark.parametrize("replace", [False, True])
    def test_names_of_one_file_are_one_blob(self, store: Store, path: Path, replace: bool) -> None:
        twin = path.with_name("b.safetensors")
        os.link(path, twin)
        before = snapshot(path.parent)
        assert [each.outcome for each in adopt(store, path, twin, replace=replace)] == [
            "became", "present"
        ]  # fmt: skip
        for name in (path, twin):
            (again,) = adopt(store, name, replace=replace)
            assert again.outcome == "present"
        assert len(store.history()) == 1
        assert (mode_of(path), store.get(DIGEST).links) == (0o444, 3)
        assert undo(store) == []
        assert snapshot(path.parent) == before

    def test_of_equal_files_the_first_becomes_the_blob(self, store: Store, folder: Path) -> None:
        paths = [write(folder / name) for name in ("b.safetensors", "a.safetensors")]
        assert [each.outcome for each in adopt(store, *paths)] == ["became", "duplicate"]
        assert [mode_of(path) for path in paths] == [0o444, 0o644]
        undo(store)
        assert [each.outcome for each in dedup(store, *paths)] == ["became", "linked"]
        assert inode_of(paths[0]) == inode_of(paths[1])

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_a_young_blob_is_hashed_before_each_use_for_a_while(
        self, store: Store, folder: Path
    ) -> None:
        """A second write in one tick is found."""
        for name, data in (("a.bin", WEIGHTS), ("b.bin", OTHER)):
            assert adopt(store, write(folder / name, data, age=0))[0].outcome == "became"
        assert read(store) == WEIGHTS
        edit_with_time_set_back(folder / "b.bin")
        with pytest.raises(DamagedBlobError):
            store.open(digest_of(OTHER))


@pytest.mark.usefixtures("digest")
class TestExchange:
    def test_the_file_becomes_a_link_of_the_blob(
        self, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        freed = allocated(path)
        monkeypatch.chdir(path.parent)
        result = store.link(path.name, DIGEST.upper())
        assert (result.outcome, result.freed) == ("linked", freed)
        assert inode_of(path) == inode_of(blob_path(store))
        assert (path.read_bytes(), mode_of(path)) == (WEIGHTS, 0o444)
        assert os.listdir(path.parent) == [path.name]
        assert (store.get(DIGEST).links, store.names_of(DIGEST)) == (2, [path])
        again = store.link(path, DIGEST)
        assert (again.outcome, again.freed) == ("present", 0)
        assert len(store.history()) == 1

    @with_leases
    def test_one_written_just_now_that_all_may_write_is_linked_too(
        self, store: Store, folder: Path
    ) -> None:
        (result,) = dedup(store, write(folder / "a.bin", mode=0o666, age=0))
        assert result.outcome == "linked"

    def test_another_name_of_the_file_keeps_its_bytes_so_nothing_is_freed(
        self, store: Store, path: Path
    ) -> None:
        second = path.with_name("b.safetensors")
        os.link(path, second)
        assert store.link(path, DIGEST).freed == 0
        assert (link_count(second), mode_of(second)) == (1, 0o644)
        freed = allocated(second)
        assert store.link(second, DIGEST).freed == freed

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_old_files_are_linked_and_young_ones_left(
        self, store: Store, path: Path, pass_time: Callable[[float], None]
    ) -> None:
        (result,) = dedup(store, write(path, age=0))
        assert isinstance(result.error, FileChangedError)
        assert link_count(path) == 1
        pass_time(10)
        assert dedup(store, path)[0].outcome == "linked"

    def test_a_blob_that_was_pruned_meanwhile_is_the_file_itself(
        self, store: Store, path: Path
    ) -> None:
        watch = Watch(lambda: store.plan_prune().execute())
        (result,) = dedup(store, path, progress=watch)
        assert (result.outcome, watch.done) == ("became", len(WEIGHTS))
        assert read(store) == WEIGHTS

    def test_a_blob_that_was_written_to_is_not_linked(self, store: Store, path: Path) -> None:
        edit(blob_path(store))
        (result,) = dedup(store, path)
        assert (result.outcome, read(store)) == ("became", WEIGHTS)


class TestRot:
    """Hashes of an earlier day say what to try, never what to delete."""

    @pytest.mark.parametrize("rotten", ["a.bin", "b.bin", "c.bin"])
    @pytest.mark.parametrize("is_blob", [False, True])
    def test_the_good_one_is_never_let_go_and_the_rotten_one_is_named(
        self, store: Store, folder: Path, rotten: str, is_blob: bool,
        pass_time: Callable[[float], None],
    ) -> None:  # fmt: skip
        paths = [write(folder / name, age=9999) for name in ("a.bin", "b.bin", "c.bin")]
        pass_time(10)
        for path in paths:
            store.digest_of(path)
        if is_blob:
            adopt(store, folder / rotten)
        bad = rot(folder / rotten, store)
        assert store.digest_of(folder / rotten).digest == DIGEST, "nothing shows it"
        digests = dict.fromkeys(paths, DIGEST)
        found = {each.path: each for each in dedup(store, *paths, digests=digests)}
        good = [path for path in paths if path.name != rotten]
        assert [path.read_bytes() for path in good] == [WEIGHTS, WEIGHTS]
        assert inode_of(good[0]) == inode_of(good[1])
        error = found[folder / rotten].error
        assert isinstance(error, DamagedBlobError if is_blob else DigestMismatchError)
        assert (folder / rotten).read_bytes() == bad
        assert read(store) == WEIGHTS
        undo(store)
        assert [path.read_bytes() for path in good] == [WEIGHTS, WEIGHTS]


class TestAnnounced:
    @both_ways
    @pytest.mark.parametrize("is_present", [False, True])
    def test_other_hashes_than_announced_are_refused_whatever_the_store_has(
        self, store: Store, path: Path, is_present: bool
    ) -> None:
        if is_present:
            dedup(store, path)
        before, count = snapshot(path.parent), len(store.history())
        wrong: dict[Algorithm, str] = {"blake3": "0" * 64, "sha256": "1" * 64, "git-sha1": "2" * 40}
        for algorithm, value in wrong.items():
            with row(algorithm), pytest.raises(DigestMismatchError):
                store.adopt(path, expected={algorithm: value})
        for digest, error in (("0" * 64, DigestMismatchError), ("zz", BadDigestError)):
            with row(digest), pytest.raises(error):
                store.link(path, digest)
        with pytest.raises(BadDigestError):
            store.adopt(path, expected={"sha256": "abc"})
        assert (snapshot(path.parent), len(store.history())) == (before, count)
        assert store.find("sha256", "1" * 64) is None


class TestRefused:
    """What must not be linked stays as it is, with a reason, whether there is a blob or not."""

    def refused(self, store: Store, path: Path) -> FileSkippedError:
        before = snapshot(path.parent)
        for replace in (False, True):
            (result,) = adopt(store, path, replace=replace, allow=ALL)
            assert result.outcome == "skipped"
        assert snapshot(path.parent) == before
        assert store.history() == []
        assert isinstance(result.error, FileSkippedError)
        return result.error

    @both_ways
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

    @both_ways
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
        if os.geteuid() == 0:  # root too: an inode's owner can change the bytes of all its links
            os.chown(write(folder / "theirs"), 12345, 12345)
            reasons["theirs"] = "belongs to another user"
            with suppress(PermissionError):  # in a container
                os.mknod(folder / "null", 0o020666, os.makedev(1, 3))
                reasons["null"] = "not a regular file"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            for name, reason in reasons.items():
                with row(name):
                    assert self.refused(store, folder / name).reason == reason
        (folder / "dangling").symlink_to("nowhere")
        for name in ("missing", "dangling"):
            with row(name), pytest.raises(FileNotFoundError):
                store.adopt(folder / name)
        with pytest.raises(FileNotFoundError):
            store.link(folder / "missing", DIGEST)

    @both_ways
    def test_a_file_on_a_filesystem_without_a_pool(
        self, store: Store, path: Path, elsewhere: Path
    ) -> None:
        far = write(elsewhere / "a.safetensors")
        assert self.refused(store, far).reason == "other filesystem"
        found = {each.path: each.outcome for each in dedup(store, far, path)}
        assert found[path] in ("became", "linked")
        assert found[far] == "skipped"

    @both_ways
    @with_leases
    def test_a_file_that_somebody_writes(self, store: Store, path: Path) -> None:
        with written_by_another_process(path):
            assert isinstance(self.refused(store, path), FileBusyError)
        with path.open("r+b"):
            assert self.refused(store, path).reason == "busy"
        assert dedup(store, path)[0].outcome in ("became", "linked")


class TestRaced:
    """Somebody comes while the file is linked: theirs counts, and nothing of it is lost."""

    def left_alone(self, store: Store, path: Path) -> None:
        assert os.listdir(path.parent) == [path.name]
        blob = blob_path(store)
        assert not blob.exists() or inode_of(blob) != inode_of(path)
        assert not store.verify(full=True).has_damage
        with Store(store.root) as again:
            assert again.history() == []
            assert again.unfinished() == []
            assert again.names_of(DIGEST) == []

    @as_root
    @with_leases
    @pytest.mark.parametrize("point", ["read-only", "linked", "temporary", "exchanged"])
    def test_a_writer_who_waits_for_our_lease_gets_the_file_back(
        self, store: Store, path: Path, at_point: AtPoint, point: str
    ) -> None:
        """Its open() has resolved the old file already: that one must keep the name."""
        if point in ("temporary", "exchanged"):
            store.put_stream([WEIGHTS])
        inode, descriptor = inode_of(path), os.open(path, os.O_RDONLY)
        try:
            old = Path(f"/proc/self/fd/{descriptor}")
            at_point(point, lambda: come_to_write(old))
            with pytest.raises(FileSkippedError):
                store.link(path, DIGEST)
        finally:
            os.close(descriptor)
        assert (inode_of(path), mode_of(path), link_count(path)) == (inode, 0o644, 1)
        self.left_alone(store, path)

    @pytest.mark.usefixtures("digest")
    @with_leases
    def test_a_late_writer_gets_a_file_with_all_that_was_written_and_its_attributes(
        self, store: Store, path: Path, at_point: AtPoint
    ) -> None:
        """Its old inode has no name any more: what is in it is copied."""
        give_attribute(path)
        if os.geteuid() == 0:
            give_group(path)
        before = everything(path.parent)
        with path.open("rb") as file:
            old = Path(f"/proc/self/fd/{file.fileno()}")
            at_point("old removed", lambda: come_to_write(old))
            (result,) = dedup(store, path, allow=ALL)
        assert isinstance(result.error, FileBusyError)
        assert everything(path.parent) == before
        self.left_alone(store, path)

    @pytest.mark.parametrize("point", ["journal: begun", "read-only", "temporary"])
    @pytest.mark.parametrize("exchange", ["with_leases", "no_exchange"])
    def test_a_file_renamed_over_it_or_deleted_meanwhile_stays_so(
        self, store: Store, folder: Path, at_point: AtPoint, point: str, exchange: str,
        request: pytest.FixtureRequest,
    ) -> None:  # fmt: skip
        request.getfixturevalue(exchange)
        if point == "temporary" or (point, exchange) == ("journal: begun", "with_leases"):
            store.put_stream([WEIGHTS])
        new, path = folder.with_name("new"), folder / "a.safetensors"
        os.link(write(path), folder.with_name("second"))
        at_point(point, lambda: os.replace(write(new, OTHER), path))
        (result,) = dedup(store, path)
        assert result.outcome == "skipped"
        assert path.read_bytes() == OTHER
        assert mode_of(folder.with_name("second")) == 0o644
        self.left_alone(store, path)
        at_point(point, path.unlink)
        (result,) = dedup(store, write(path))
        assert result.outcome == "skipped"
        assert list(folder.iterdir()) == []

    @pytest.mark.usefixtures("digest")
    def test_a_file_renamed_over_it_after_the_exchange_stays(
        self, store: Store, path: Path, at_point: AtPoint
    ) -> None:
        new = write(path.with_name("new"), OTHER)
        at_point("exchanged", lambda: os.replace(new, path))
        (result,) = dedup(store, path)
        assert result.outcome in ("linked", "skipped")
        assert path.read_bytes() == OTHER
        assert os.listdir(path.parent) == [path.name]
        assert not store.verify(full=True).has_damage

    @pytest.mark.usefixtures("no_leases")
    @both_ways
    def test_without_leases_a_write_before_the_names_move_is_seen_by_stat(
        self, store: Store, path: Path, at_point: AtPoint,
        pass_time: Callable[[float], None], request: pytest.FixtureRequest,
    ) -> None:  # fmt: skip
        is_exchange = request.node.callspec.params["_blob"] == "exchange"
        pass_time(10)
        at_point("temporary" if is_exchange else "read-only", lambda: edit(path))
        with pytest.raises(FileSkippedError):
            store.link(path, DIGEST)
        assert (path.read_bytes(), mode_of(path)) == (b"EDITED" + WEIGHTS[6:], 0o644)
        self.left_alone(store, path)

    @pytest.mark.usefixtures("no_leases", "digest")
    def test_without_leases_a_write_with_its_time_set_back_is_seen_too(
        self, store: Store, path: Path, pass_time: Callable[[float], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """They come when it is hashed, and a link of ours begins to hold the blob."""

        def link(*names: str, real: Callable[..., None] = os.link, **more: int) -> None:
            real(*names, **more)
            monkeypatch.setattr(os, "link", real)
            edit_with_time_set_back(path)

        pass_time(10)
        monkeypatch.setattr(os, "link", link)
        assert dedup(store, path)[0].outcome == "became"
        assert path.read_bytes() == b"EDITED" + WEIGHTS[6:]
        assert read(store) == WEIGHTS

    @pytest.mark.usefixtures("digest")
    @pytest.mark.parametrize("point", ["journal: begun", "temporary", "exchanged", "old removed"])
    def test_no_file_of_another_folder_is_touched_when_its_own_is_swapped(
        self, store: Store, folder: Path, at_point: AtPoint, point: str
    ) -> None:
        """Whoever can write above a folder can put a symlink to another one in its place."""
        shared, private = folder / "shared", folder / "private"
        path = write(shared / "a.safetensors")
        write(private / path.name, OTHER)
        before = snapshot(private)

        def lead_elsewhere() -> None:
            shared.rename(folder / "away")
            shared.symlink_to(private)

        at_point(point, lead_elsewhere)
        dedup(store, path)
        assert snapshot(private) == before
        assert os.listdir(folder / "away") == [path.name]
        assert (folder / "away" / path.name).read_bytes() == WEIGHTS


@pytest.mark.parametrize("count", [2, 20])
def test_bytes_are_on_the_disk_before_other_files_become_links_of_them(
    count: int, store: Store, folder: Path, at_point: AtPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut nobody else has what was written a minute ago; many are synced at once."""
    survivors = [write(folder / f"a{n}.bin", WEIGHTS + bytes([n])) for n in range(count)]
    copies = [write(folder / f"b{n}.bin", WEIGHTS + bytes([n])) for n in range(count)]
    synced: set[int] = set()
    before: list[set[int]] = []

    def of_one(fd: int, real: Callable[[int], None] = os.fdatasync) -> None:
        real(fd)
        synced.add(os.fstat(fd).st_ino)

    def of_all(fd: int, real: Callable[[int], None] = kernel.sync_filesystem) -> None:
        real(fd)
        synced.update(map(inode_of, survivors))

    monkeypatch.setattr(os, "fdatasync", of_one)
    monkeypatch.setattr(kernel, "sync_filesystem", of_all)
    at_point("temporary", lambda: before.append(set(synced)))
    assert {each.outcome for each in dedup(store, *survivors, *copies)} == {"became", "linked"}
    assert before == [set(map(inode_of, survivors))]


class TestFailing:
    @both_ways
    def test_a_disk_that_fails_is_said_and_leaves_the_file_as_it_was(
        self, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = snapshot(path.parent)
        errors: dict[int, type[Exception]] = {
            errno.ENOSPC: NoSpaceError, errno.EROFS: StoreUnwritableError, errno.EIO: OSError,
            errno.EMLINK: FileSkippedError,
        }  # fmt: skip
        for code, error in errors.items():
            with row(errno.errorcode[code]), monkeypatch.context() as patch:
                patch.setattr(os, "link", raising(code))
                with pytest.raises(error):
                    store.link(path, DIGEST)
            assert snapshot(path.parent) == before
        assert (store.recover(), store.history()) == ([], [])

    @pytest.mark.parametrize("fails", ["preadv", "link"])
    def test_a_file_that_fails_is_named_and_the_others_are_linked(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        paths = [write(folder / f"{n}.bin", WEIGHTS + bytes([n])) for n in range(4)]
        bad, inode, real = paths[1], inode_of(paths[1]), getattr(os, fails)

        def but_one(what: int | str, *args: object, **more: object) -> object:
            if what == bad.name or (isinstance(what, int) and os.fstat(what).st_ino == inode):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(what, *args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, fails, but_one)
            found = {each.path: each for each in adopt(store, *paths)}
        outcomes = {path: "skipped" if path == bad else "became" for path in paths}
        assert {path: each.outcome for path, each in found.items()} == outcomes
        assert vars(found[bad].error).get("errno", errno.EIO) == errno.EIO
        assert (mode_of(bad), link_count(bad)) == (0o644, 1)


class TestMany:
    @pytest.mark.parametrize("replace", [False, True])
    def test_more_files_than_a_chunk_are_all_linked_and_undone_together(
        self, store: Store, folder: Path, replace: bool
    ) -> None:
        """Each has its outcome, and no lease, descriptor or file of ours remains.

        Names may be long and need not be UTF-8; progress is told every byte.
        """
        names = [*map("{}.bin".format, range(598)), "模" * 80, os.fsdecode(b"\xff\xfe.bin")]
        paths = [write(folder / name, (n // 2).to_bytes(2)) for n, name in enumerate(names)]
        empty, gone = write(folder / "empty.bin", b""), folder / "gone.bin"
        before, descriptors, watch = snapshot(folder), os.listdir("/proc/self/fd"), Watch()
        results = adopt(store, *paths, empty, gone, replace=replace, progress=watch)
        assert watch.done == watch.total == 1200
        found = {each.path: each for each in results}
        ours = [found[path].outcome for path in paths]
        assert ours == ["became", "linked" if replace else "duplicate"] * 300
        assert isinstance(found[empty].error, FileSkippedError)
        assert isinstance(found[gone].error, FileNotFoundError)
        assert len(os.listdir("/proc/self/fd")) <= len(descriptors) + 8, "databases and the lock"
        assert list((store.root / "tmp").iterdir()) == []
        (batch,) = store.history()
        assert (batch.changes, batch.size) == (600, 1200) if replace else (300, 600)
        assert undo(store) == []
        assert snapshot(folder) == before
        assert list(store.blobs()) == []

    def test_calls_that_share_a_batch_are_one_entry(self, store: Store, folder: Path) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        with store.batch("all at once") as batch:
            dedup(store, write(folder / "b.bin"), batch=batch)
            store.place(digest, folder / "c.bin", kind="hardlink", batch=batch)
        (found,) = store.history()
        assert (found.id, found.label, found.changes) == (batch.id, "all at once", 2)
        assert [change.path.name for change in batch.changes] == ["b.bin", "c.bin"]
        assert batch.freed > 0


# what a link would change besides the permission to write


ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


def access_list(user: int, mask: int = 6) -> bytes:
    """A list that lets one more user read and write."""
    entries = [(1, 6, -1), (2, 6, user), (4, 4, -1), (0x10, mask, -1), (0x20, 4, -1)]
    packed = [struct.pack("<HHi", *entry) for entry in entries]
    return struct.pack("<I", 2) + b"".join(packed)


def everything(folder: Path) -> dict[str, object]:
    """A snapshot, and the extended attributes."""
    found: dict[str, object] = {}
    for name, facts in snapshot(folder).items():
        names = os.listxattr(folder / name, follow_symlinks=False)
        attributes = {n: os.getxattr(folder / name, n, follow_symlinks=False) for n in names}
        found[name] = (facts, attributes)
    return found


def give_group(path: Path) -> None:
    os.chown(path, -1, 54321)


def give_attribute(path: Path) -> None:
    try:
        os.setxattr(path, "user.note", b"\0mine\xff")
        os.setxattr(path, "user.empty", b"")
    except OSError:
        pytest.skip("no extended attributes on this filesystem")


def give_access(path: Path) -> None:
    try:
        os.setxattr(path, ACCESS, access_list(12345))
    except OSError:
        pytest.skip("no access control lists on this filesystem")
    path.chmod(0o644)  # what the blob has; that is the mask now


SPECIALS = [
    pytest.param((give_group, "group", "different group"), marks=as_root),
    (lambda path: path.chmod(0o600), "mode", "different permissions"),
    (lambda path: path.chmod(0o755), "mode", "different permissions"),
    (give_attribute, "xattr", "has extended attributes"),
    (give_access, "xattr", "has extended attributes"),
]
special = pytest.mark.parametrize(
    "case", SPECIALS, ids=["group", "0600", "0755", "attribute", "list"]
)
Case = tuple[Callable[[Path], None], Allowance, str]


class TestAllowed:
    @special
    def test_only_what_is_allowed_is_linked_and_undo_gives_it_back(
        self, store: Store, folder: Path, case: Case
    ) -> None:
        change, needed, reason = case
        adopt(store, write(folder / "a.safetensors"))
        path = write(folder / "b.safetensors")
        change(path)
        before, rest = everything(folder), ALL - {needed}
        for allow in (*combinations(rest, 0), *combinations(rest, 2)):
            (result,) = dedup(store, path, allow=frozenset(allow))
            assert isinstance(result.error, FileSkippedError)
            assert (result.error.reason, everything(folder)) == (reason, before)
        assert dedup(store, path, allow=frozenset({needed}))[0].outcome == "linked"
        assert inode_of(path) == inode_of(blob_path(store))
        assert (mode_of(path), os.listxattr(path)) == (0o444, [])
        assert [done.note for done in store.plan_undo(last=True).execute()] == [""]
        assert everything(folder) == before
        assert inode_of(path) != inode_of(blob_path(store))

    @pytest.mark.usefixtures("digest")
    def test_what_a_folder_gives_to_new_files_is_not_given_by_undo(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "b.safetensors")
        try:
            os.setxattr(folder, DEFAULT, access_list(12345))
        except OSError:
            pytest.skip("no access control lists on this filesystem")
        before = everything(folder)
        assert dedup(store, path)[0].outcome == "linked"
        undo(store)
        assert everything(folder) == before

    @pytest.mark.usefixtures("digest")
    @as_root
    def test_a_group_is_given_back_even_if_only_that_is_different(
        self, store: Store, folder: Path
    ) -> None:
        """Same mode and time as the blob, and the blob has another inode since."""
        path, copy = write(folder / "b.safetensors", mode=0o444), write(folder / "copy")
        shutil.copystat(blob_path(store), path)
        shutil.copystat(blob_path(store), copy)
        give_group(path)
        before = everything(folder)
        dedup(store, path, allow=frozenset({"group"}))
        os.replace(copy, blob_path(store))
        shutil.copystat(path, write(folder / "copy"))
        assert undo(store) == []
        assert everything(folder)[path.name] == before[path.name]


groups = st.sampled_from([0, 12345, NOBODY])
modes = st.sampled_from([0o644, 0o600, 0o444, 0o664, 0o755])
attributes = st.dictionaries(
    st.sampled_from(["user.a", "user.b", "trusted.c"]), st.binary(max_size=50), max_size=2
)
times = st.integers(10**18, 1_700_000_000 * 10**9)


@as_root
@settings(max_examples=settings().max_examples // 8)
@given(
    kinds=st.lists(
        st.tuples(groups, modes, times, attributes, st.booleans()), min_size=2, max_size=5
    )
)
def test_undo_of_paths_restores_whatever_files_there_were(
    kinds: list[tuple[int, int, int, dict[str, bytes], bool]],
) -> None:
    """But for names of one file: who asks for them gets files. Undo of all: `tests.folders`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "models"
        for number, (gid, mode, mtime_ns, values, has_twin) in enumerate(kinds):
            path = write(folder / f"{number}.bin")
            os.chown(path, -1, gid)
            path.chmod(mode)
            for key, value in values.items():
                os.setxattr(path, key, value)
            os.utime(path, ns=(mtime_ns, mtime_ns))
            if has_twin:
                os.link(path, folder / f"{number}-twin.bin")
        before, paths = everything(folder), sorted(folder.iterdir())
        with Store(Path(name) / "store") as store:
            results = dedup(store, *paths, allow=ALL)
            assert {result.outcome for result in results} <= {"became", "linked", "present"}
            assert {inode_of(path) for path in paths} == {inode_of(paths[0])}
            assert {done.note for done in store.plan_undo(paths=paths).execute()} == {""}
        assert apart(everything(folder)) == apart(before)


def apart(found: dict[str, object]) -> dict[str, object]:
    """What `everything` says, but for which names are one file and who may write them."""
    kinds = {name: (facts[2] & 0o555, facts[3:], more) for name, (facts, more) in found.items()}  # type: ignore[misc,has-type]
    return dict(kinds)
