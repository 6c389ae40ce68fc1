from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.config import load_settings
from smartcache.errors import FileBusyError, FileSkippedError, NothingToUndoError
from smartcache.store.changes import share as store_share
from smartcache.store.changes.replace import Replacement
from smartcache.store.store import Store
from smartcache.system import kernel
from smartcache.system.filesystems import free_bytes, mount_of, probe
from tests.processes.children import NOBODY, Child
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    allocated,
    digest_of,
    edit,
    inode_of,
    mode_of,
    snapshot,
    write,
)
from tests.store.reflink_disks import DISKS, reflink_disk
from tests.store.small_disks import bind

if sys.platform != "linux":
    pytest.skip("Linux system calls", allow_module_level=True)

DIGEST = digest_of(WEIGHTS)
CHUNK = kernel.DEDUPE_SIZE


@pytest.fixture(scope="module", params=DISKS)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with reflink_disk(request.param, tmp_path_factory.mktemp("disk")) as point:
        yield point


@pytest.fixture
def place(disk: Path, tmp_path: Path) -> Iterator[Path]:
    path = disk / tmp_path.name
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(place: Path) -> Path:
    """Where the user keeps models, on a filesystem with reflinks."""
    path = place / "models"
    path.mkdir()
    return path


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    with Store(place / "store") as store:
        yield store


@pytest.fixture
def source(folder: Path) -> Path:
    return write(folder / "a.safetensors")


@pytest.fixture
def target(folder: Path, source: Path) -> Path:
    """A file with the same bytes."""
    return write(folder / "b.safetensors", age=500)


def share(store: Store, source: Path, target: Path, digest: str = DIGEST) -> Replacement:
    (result,) = store.share_many([(source, target, digest)])
    return result


def are_one(first: Path, second: Path) -> bool:
    with first.open("rb") as a, second.open("rb") as b:
        return kernel.shares_blocks(a.fileno(), b.fileno())


def shared_size(path: Path) -> int:
    with path.open("rb") as file:
        return sum(e.length for e in kernel.extents(file.fileno()) or () if e.is_shared)


def all_of(path: Path) -> dict[str, object]:
    """Everything that a program can see of a file."""
    st = os.lstat(path)
    names = [name for name in dir(st) if name.startswith("st_") and "atime" not in name]
    seen: dict[str, object] = {name: getattr(st, name) for name in names}
    seen["xattrs"] = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return seen


class TestShared:
    def test_the_blocks_are_shared_and_nothing_else_changes(
        self, store: Store, source: Path, target: Path
    ) -> None:
        """Not the change time either: memos of both files stay valid."""
        target.chmod(0o640)
        os.chown(target, 12345, 54321)
        os.setxattr(target, "user.note", b"mine")
        os.sync()
        before = (all_of(source), all_of(target))
        assert share(store, source, target).outcome == "replaced"
        assert are_one(source, target)
        assert (all_of(source), all_of(target)) == before
        assert target.read_bytes() == WEIGHTS
        assert sorted(os.listdir(target.parent)) == ["a.safetensors", "b.safetensors"]

    def test_what_it_says_was_freed_the_filesystem_has_again(
        self, store: Store, folder: Path, disk: Path
    ) -> None:
        data = random.Random(5).randbytes(12_000_000)
        paths = [write(folder / name, data) for name in ("a.bin", "b.bin")]
        os.sync()
        before, size = free_bytes(disk), allocated(paths[1])
        result = share(store, paths[0], paths[1], digest_of(data))
        os.sync()
        assert result.freed == size
        assert free_bytes(disk) - before == pytest.approx(size, rel=0.1)

    def test_a_second_time_it_is_present(self, store: Store, source: Path, target: Path) -> None:
        share(store, source, target)
        result = share(store, source, target)
        assert (result.outcome, result.freed, result.error) == ("present", 0, None)

    def test_blocks_that_others_share_already_are_not_freed_again(
        self, store: Store, folder: Path, source: Path, target: Path
    ) -> None:
        """The target was shared with a third file, which keeps its blocks."""
        third = write(folder / "c.safetensors")
        assert share(store, target, third).freed > 0
        result = share(store, source, target)
        assert (result.outcome, result.freed) == ("replaced", 0)
        assert share(store, source, third).freed > 0

    def test_a_writer_afterwards_changes_his_file_only(
        self, store: Store, source: Path, target: Path
    ) -> None:
        share(store, source, target)
        edit(target)
        assert source.read_bytes() == WEIGHTS
        assert target.read_bytes() == b"EDITED" + WEIGHTS[6:]

    @pytest.mark.parametrize("size", [CHUNK, CHUNK + 1, 2 * CHUNK + 4097])
    def test_large_files_are_shared_in_chunks(self, store: Store, folder: Path, size: int) -> None:
        data = random.Random(size).randbytes(size)
        paths = [write(folder / name, data) for name in ("a.bin", "b.bin")]
        watch = Watch()
        triple = (paths[0], paths[1], digest_of(data))
        (result,) = store.share_many([triple], progress=watch)
        assert result.freed == allocated(paths[1])
        assert are_one(*paths)
        assert (watch.done, watch.unit) == (size, "bytes")

    def test_a_blob_may_be_the_source(self, store: Store, target: Path) -> None:
        store.put_stream([WEIGHTS])
        blob = store.path_of(DIGEST)
        assert share(store, blob, target).outcome == "replaced"
        assert are_one(blob, target)
        assert mode_of(target) == 0o644
        report = store.verify(full=True)
        assert not report.has_damage

    def test_of_many_each_is_shared_or_says_why_not_and_nothing_is_journaled(
        self, store: Store, folder: Path, source: Path
    ) -> None:
        paths = [write(folder / f"{n}.bin") for n in range(10)]
        bad = write(folder / "bad.bin", OTHER)
        triples = [(source, path, DIGEST) for path in [*paths[:5], bad, *paths[5:]]]
        found = {result.path: result for result in store.share_many(triples)}
        assert {found[path].outcome for path in paths} == {"replaced"}
        assert found[bad].outcome == "skipped"
        assert all(are_one(source, path) for path in paths)
        assert store.history() == []
        assert not store.volume.journal.path.exists()
        assert os.listdir(store.volume.layout.tmp) == []

    def test_two_names_of_a_file_are_shared_once(
        self, store: Store, folder: Path, source: Path, target: Path
    ) -> None:
        os.link(target, folder / "twin.bin")
        triples = [(source, path, DIGEST) for path in (target, folder / "twin.bin")]
        outcomes = [result.outcome for result in store.share_many(triples)]
        assert outcomes == ["replaced", "present"]
        assert inode_of(target) == inode_of(folder / "twin.bin")

    def test_a_file_that_shares_a_part_gets_the_rest(
        self, store: Store, source: Path, target: Path
    ) -> None:
        share(store, source, target)
        edit(target, offset=50_000)
        edit(target, WEIGHTS[50_000:50_006], offset=50_000)
        assert not are_one(source, target)
        result = share(store, source, target)
        assert (result.outcome, result.freed) == ("replaced", 4096)
        assert are_one(source, target)

    def test_holes_stay_holes(self, store: Store, folder: Path) -> None:
        paths = [folder / "a.bin", folder / "b.bin"]
        for path in paths:
            write(path, WEIGHTS)
            os.truncate(path, 10_000_000)
        result = share(store, paths[0], paths[1], digest_of(paths[0].read_bytes()))
        assert result.outcome == "replaced"
        assert allocated(paths[1]) < 1_000_000
        assert result.freed == allocated(paths[1])

    @pytest.mark.parametrize("name", [b"\xff\xfe.safetensors", "模".encode() * 80 + b".bin"])
    def test_names_may_be_long_and_need_not_be_utf_8(
        self, store: Store, folder: Path, source: Path, name: bytes
    ) -> None:
        path = write(folder / os.fsdecode(name))
        assert share(store, source, path).outcome == "replaced"
        assert are_one(source, path)

    def test_the_owner_of_a_read_only_file_needs_no_permission_to_write(self, place: Path) -> None:
        folder = place / "nobody"
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)

        def work() -> tuple[str, bool]:
            paths = [write(folder / name, mode=0o444) for name in ("a.bin", "b.bin")]
            with Store(folder / "store") as store:
                return share(store, paths[0], paths[1]).outcome, are_one(*paths)

        with Child(work, user=NOBODY) as child:
            assert child.result() == ("replaced", True)

    def test_an_older_kernel_gets_a_descriptor_for_writing(
        self, store: Store, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def dedupe(a: int, at: int, length: int, b: int, to: int) -> int | None:
            import fcntl

            if fcntl.fcntl(b, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
                raise PermissionError(1, "Operation not permitted")
            return kernel.dedupe_range(a, at, length, b, to)

        monkeypatch.setattr(store_share, "dedupe_range", dedupe)
        before = all_of(target)
        assert share(store, source, target).outcome == "replaced"
        assert all_of(target) == before

    def test_a_store_that_keeps_files_writable_places_reflinks(
        self, place: Path, folder: Path
    ) -> None:
        settings = load_settings(home=place / "store", keep_writable=True)
        with Store(place / "store", settings=settings) as store:
            store.put_stream([WEIGHTS])
            link = store.place(DIGEST, folder / "a.safetensors")
            assert link.kind == "reflink"
            assert are_one(store.path_of(DIGEST), link.path)
            assert mode_of(link.path) & 0o200
            assert share(store, store.path_of(DIGEST), link.path).outcome == "present"


class TestRefused:
    """What is not shared stays exactly as it is, with a reason."""

    def refused(self, store: Store, source: Path, target: Path) -> FileSkippedError:
        before = snapshot(target.parent)
        result = share(store, source, target)
        assert (result.outcome, result.freed) == ("skipped", 0)
        assert isinstance(result.error, FileSkippedError)
        assert snapshot(target.parent) == before
        assert store.history() == []
        return result.error

    @pytest.mark.parametrize("at", [0, 50_000, len(WEIGHTS) - 1])
    def test_other_bytes(self, store: Store, source: Path, target: Path, at: int) -> None:
        edit(target, bytes([WEIGHTS[at] ^ 1]), offset=at)
        assert self.refused(store, source, target).reason == "different"
        assert shared_size(target) == 0

    def test_another_size(self, store: Store, source: Path, folder: Path) -> None:
        path = write(folder / "b.safetensors", OTHER)
        assert self.refused(store, source, path).reason == "different"

    @pytest.mark.parametrize("name", ["a.incomplete", f"sha256-{64 * 'a'}-partial", "a.tmp"])
    def test_unfinished_downloads(
        self, store: Store, folder: Path, source: Path, name: str
    ) -> None:
        path = write(folder / name)
        assert self.refused(store, source, path).reason == "incomplete download"

    def test_an_empty_file(self, store: Store, folder: Path, source: Path) -> None:
        assert self.refused(store, source, write(folder / "b.bin", b"")).reason == "empty"

    def test_symlinks_and_directories(self, store: Store, folder: Path, source: Path) -> None:
        link = folder / "link.bin"
        link.symlink_to(write(folder / "real.bin"))
        (folder / "directory").mkdir()
        os.mkfifo(folder / "fifo")
        for path in (link, folder / "directory", folder / "fifo"):
            assert self.refused(store, source, path).reason == "not a regular file"
            assert self.refused(store, path, source).reason == "not a regular file"

    def test_what_is_not_there(self, store: Store, folder: Path, source: Path) -> None:
        missing = folder / "missing"
        assert self.refused(store, source, missing).reason == "was removed"
        assert self.refused(store, missing, source).reason == "was removed"

    def test_another_filesystem(self, store: Store, source: Path, elsewhere: Path) -> None:
        path = write(elsewhere / "b.safetensors")
        assert self.refused(store, source, path).reason == "other filesystem"
        assert self.refused(store, path, source).reason == "other filesystem"

    def test_a_file_that_somebody_has_open_for_writing(
        self, store: Store, source: Path, target: Path
    ) -> None:
        with target.open("r+b"):
            assert isinstance(self.refused(store, source, target), FileBusyError)
        assert share(store, source, target).outcome == "replaced"

    def test_a_place_that_is_mounted_read_only(
        self, store: Store, source: Path, target: Path, place: Path
    ) -> None:
        bind(target.parent, place / "bound", read_only=True)
        path = place / "bound" / target.name
        try:
            assert self.refused(store, source, path).reason == "read-only filesystem"
        finally:
            subprocess.run(["umount", str(place / "bound")], check=True)

    def test_a_file_so_small_that_it_has_no_blocks(
        self, store: Store, folder: Path, disk: Path
    ) -> None:
        if mount_of(disk).fstype != "btrfs":
            pytest.skip("only btrfs keeps small files in its metadata")
        paths = [write(folder / name, b"small") for name in ("a.bin", "b.bin")]
        assert self.refused(store, *paths).reason == "has no blocks to share"

    def test_a_difference_found_late_keeps_what_was_shared(
        self, store: Store, folder: Path
    ) -> None:
        data = random.Random(7).randbytes(CHUNK + 5000)
        first = write(folder / "a.bin", data)
        second = write(folder / "b.bin", data[:-1] + b"?")
        result = share(store, first, second, digest_of(data))
        assert isinstance(result.error, FileSkippedError)
        assert (result.outcome, result.error.reason) == ("skipped", "different")
        assert result.freed == shared_size(second) == CHUNK
        assert second.read_bytes() == data[:-1] + b"?"


def test_a_filesystem_without_reflinks_is_said_so(tmp_path: Path) -> None:
    if probe(tmp_path).reflink:
        pytest.skip("this one has them")
    paths = [write(tmp_path / name) for name in ("a.bin", "b.bin")]
    with Store(tmp_path / "store") as store:
        result = share(store, paths[0], paths[1])
        assert isinstance(result.error, FileSkippedError)
        assert (result.outcome, result.error.reason) == ("skipped", "not supported here")
        assert store.history() == []


class TestRaced:
    @pytest.mark.parametrize("point", ["share: begun", "share: part shared", "share: shared"])
    def test_a_write_in_between_is_not_lost(
        self, store: Store, source: Path, target: Path, at_point: AtPoint, point: str
    ) -> None:
        at_point(point, lambda: edit(target))
        (result,) = store.share_many([(source, target, DIGEST)])
        assert (result.outcome == "skipped") == (point == "share: begun")
        assert target.read_bytes() == b"EDITED" + WEIGHTS[6:]
        assert source.read_bytes() == WEIGHTS

    @pytest.mark.parametrize("point", ["share: begun", "share: part shared"])
    def test_a_file_that_is_cut_in_between_differs(
        self, store: Store, folder: Path, at_point: AtPoint, point: str
    ) -> None:
        """The kernel calls a range beyond the end not supported."""
        data = random.Random(10).randbytes(CHUNK + 5000)
        first, second = write(folder / "a.bin", data), write(folder / "b.bin", data)
        at_point(point, lambda: os.truncate(second, 10))
        result = share(store, first, second, digest_of(data))
        assert isinstance(result.error, FileSkippedError)
        assert result.error.reason == "different"
        assert (first.read_bytes() == data, second.read_bytes()) == (True, data[:10])

    def test_a_file_renamed_over_it_stays(
        self, store: Store, folder: Path, source: Path, target: Path, at_point: AtPoint
    ) -> None:
        at_point("share: begun", lambda: os.replace(write(folder / "new", OTHER), target))
        share(store, source, target)
        assert target.read_bytes() == OTHER

    @pytest.mark.parametrize("point", ["share: begun", "share: part shared"])
    def test_after_ctrl_c_the_rest_is_shared_by_running_again(
        self, store: Store, folder: Path, at_point: AtPoint, point: str
    ) -> None:
        data = random.Random(8).randbytes(CHUNK + 5000)
        paths = [write(folder / f"{n}.bin", data) for n in range(3)]

        def interrupt() -> None:
            raise KeyboardInterrupt

        at_point(point, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(store.share_many((paths[0], path, digest_of(data)) for path in paths[1:]))
        is_begun = point == "share: part shared"
        assert (shared_size(paths[1]), shared_size(paths[2])) == (CHUNK if is_begun else 0, 0)
        assert os.listdir(store.volume.layout.tmp) == []
        outcomes = store.share_many((paths[0], path, digest_of(data)) for path in paths[1:])
        assert [result.outcome for result in outcomes] == ["replaced", "replaced"]


class TestLeft:
    def test_there_is_nothing_to_undo(self, store: Store, source: Path, target: Path) -> None:
        share(store, source, target)
        assert store.history() == []
        with pytest.raises(NothingToUndoError):
            store.plan_undo()
        assert are_one(source, target)

    def test_a_hard_link_made_of_it_later_can_be_undone(
        self, store: Store, source: Path, target: Path
    ) -> None:
        before = snapshot(target.parent)
        share(store, source, target)
        store.adopt(source)
        store.replace(target, DIGEST)
        assert {done.note for done in store.plan_undo().execute()} == {""}
        assert snapshot(target.parent) == before

    def test_eject_leaves_files_that_share_blocks_as_they_are(
        self, store: Store, source: Path, target: Path
    ) -> None:
        """They have no tie to the store, and giving them their own blocks would need space."""
        share(store, source, target)
        before = all_of(target)
        plan = store.plan_eject()
        assert plan.needed_size == 0
        plan.execute()
        assert are_one(source, target)
        assert all_of(target) == before
        assert not store.root.exists()
