"""Equal files that use the same blocks (reflinks), on real filesystems that can do it.

Nothing that a program can see changes, so nothing is journaled and nothing can be undone. Only
answers that no filesystem at hand gives are injected.
"""

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
from smartcache.errors import FileBusyError, FileSkippedError
from smartcache.store.reflink import Shared
from smartcache.store.store import Store
from smartcache.system import kernel
from smartcache.system.filesystems import mount_of, probe
from smartcache.system.kernel import Extent
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
    row,
    snapshot,
    write,
)
from tests.store.reflink_disks import DISKS, reflink_disk
from tests.store.small_disks import bind

if sys.platform != "linux":
    pytest.skip("Linux system calls", allow_module_level=True)

import fcntl

BLOCK = 4096
CHUNK = kernel.DEDUPE_SIZE
DIGEST = digest_of(WEIGHTS)
LARGE = random.Random(7).randbytes(CHUNK + 5000)
AT_BEGIN = pytest.mark.parametrize("point", ["share: begun", "share: part shared"])


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


def share(store: Store, source: Path, target: Path, digest: str = DIGEST) -> Shared:
    (result,) = store.share_many([(source, target, digest)])
    return result


def why(result: Shared) -> str:
    """Why a file was not shared."""
    assert isinstance(result.error, FileSkippedError)
    return result.error.reason


def are_one(first: Path, second: Path) -> bool:
    with first.open("rb") as a, second.open("rb") as b:
        return kernel.shares_blocks(a.fileno(), b.fileno())


def extents(path: Path) -> list[Extent]:
    with path.open("rb") as file:
        return list(kernel.extents(file.fileno()) or ())


def shared_size(path: Path) -> int:
    return sum(extent.length for extent in extents(path) if extent.is_shared)


def all_of(path: Path) -> dict[str, object]:
    """Everything that a program can see of a file."""
    st = os.lstat(path)
    names = [name for name in dir(st) if name.startswith("st_") and "atime" not in name]
    seen: dict[str, object] = {name: getattr(st, name) for name in names}
    seen["xattrs"] = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return seen | {"bytes": path.read_bytes()}


class TestShared:
    def test_the_blocks_are_shared_and_nothing_that_can_be_seen_changes(
        self, store: Store, source: Path, target: Path
    ) -> None:
        """Not even the change time: hashes that were remembered stay valid."""
        os.setxattr(target, "user.note", b"mine")
        target.chmod(0o400)
        os.sync()
        before = [all_of(path) for path in (source, target)]
        result = share(store, source, target)
        assert (result.outcome, result.freed, result.error) == ("shared", allocated(target), None)
        assert result.digest == DIGEST
        assert are_one(source, target)
        assert [all_of(path) for path in (source, target)] == before
        again = share(store, source, target)
        assert (again.outcome, again.freed, again.error) == ("present", 0, None)

    def test_there_is_nothing_to_undo_and_eject_leaves_them_so(
        self, store: Store, source: Path, target: Path
    ) -> None:
        """They have no tie to the store, and giving them their own blocks would need space."""
        share(store, source, target)
        assert not store.layout.exists()
        store.put_stream([OTHER])
        before = all_of(target)
        plan = store.plan_eject()
        assert (plan.needed_size, plan.changes) == (0, ())
        plan.execute()
        assert are_one(source, target)
        assert all_of(target) == before

    def test_only_blocks_that_nobody_else_shares_are_freed(
        self, store: Store, folder: Path, source: Path, target: Path
    ) -> None:
        third = write(folder / "c.safetensors")
        assert share(store, target, third).freed > 0
        result = share(store, source, target)
        assert (result.outcome, result.freed) == ("shared", 0)
        assert share(store, source, third).freed > 0

    def test_a_writer_afterwards_changes_his_file_only_and_the_rest_stays_shared(
        self, store: Store, source: Path, target: Path
    ) -> None:
        share(store, source, target)
        edit(target, offset=50_000)
        assert source.read_bytes() == WEIGHTS
        assert target.read_bytes() == WEIGHTS[:50_000] + b"EDITED" + WEIGHTS[50_006:]
        edit(target, WEIGHTS[50_000:50_006], offset=50_000)
        assert not are_one(source, target)
        result = share(store, source, target)
        assert (result.outcome, result.freed) == ("shared", BLOCK)
        assert are_one(source, target)

    @pytest.mark.parametrize(
        ("size", "holes"), [(CHUNK, 0), (CHUNK + 1, 0), (2 * CHUNK + 4097, 0), (9, 10_000_000)]
    )
    def test_large_files_are_shared_in_chunks_and_holes_stay_holes(
        self, store: Store, folder: Path, size: int, holes: int
    ) -> None:
        data, watch = random.Random(size).randbytes(size), Watch()
        paths = [write(folder / name, data) for name in ("a.bin", "b.bin")]
        for path in paths:
            os.truncate(path, size + holes)
        whole = (*paths, digest_of(data + bytes(holes)))
        (result,) = store.share_many([whole], progress=watch)  # type: ignore[list-item]
        assert result.freed == allocated(paths[1]) < size + BLOCK
        assert are_one(*paths)
        assert (watch.done, watch.unit) == (size + holes, "bytes")

    def test_of_many_each_is_shared_or_says_why_not(
        self, store: Store, folder: Path, source: Path
    ) -> None:
        """Names may be long and need not be UTF-8; two names of a file are shared once."""
        names = [*map(str, range(5)), os.fsdecode(b"\xff\xfe.bin"), "模" * 80 + ".bin"]
        paths = [write(folder / name) for name in names]
        bad, twin = write(folder / "bad.bin", OTHER), folder / "twin.bin"
        os.link(paths[0], twin)
        wanted = [*paths[:3], bad, *paths[3:], twin]
        found = {each.path: each for each in store.share_many((source, p, DIGEST) for p in wanted)}
        assert {found[path].outcome for path in paths} == {"shared"}
        assert (found[bad].outcome, found[twin].outcome) == ("skipped", "present")
        assert all(are_one(source, path) for path in paths)
        assert inode_of(paths[0]) == inode_of(twin)

    def test_the_owner_of_a_read_only_file_needs_no_permission_to_write(self, place: Path) -> None:
        folder = place / "nobody"
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)

        def work() -> tuple[str, bool]:
            paths = [write(folder / name, mode=0o444) for name in ("a.bin", "b.bin")]
            with Store(folder / "store") as store:
                return share(store, paths[0], paths[1]).outcome, are_one(*paths)

        with Child(work, user=NOBODY) as child:
            assert child.result() == ("shared", True)

    def test_an_older_kernel_gets_a_descriptor_for_writing(
        self, store: Store, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = kernel.dedupe_range

        def dedupe(a: int, at: int, length: int, b: int, to: int) -> int | None:
            if fcntl.fcntl(b, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
                raise PermissionError(1, "Operation not permitted")
            return real(a, at, length, b, to)

        monkeypatch.setattr(kernel, "dedupe_range", dedupe)
        before = all_of(target)
        assert share(store, source, target).outcome == "shared"
        assert all_of(target) == before

    def test_root_gets_a_reflink_because_0444_does_not_keep_it_from_writing(
        self, store: Store, folder: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        link = store.place(DIGEST, folder / "a.safetensors")
        assert link.kind == ("hardlink" if os.geteuid() else "reflink")

    def test_a_store_that_keeps_files_writable_places_and_shares_with_blobs(
        self, place: Path, folder: Path, target: Path
    ) -> None:
        settings = load_settings(home=place / "store", keep_writable=True)
        with Store(place / "store", settings=settings) as store:
            store.put_stream([WEIGHTS])
            link = store.place(DIGEST, folder / "c.safetensors")
            assert link.kind == "reflink"
            assert are_one(store.path_of(DIGEST), link.path)
            assert mode_of(link.path) & 0o200
            assert share(store, store.path_of(DIGEST), link.path).outcome == "present"
            assert share(store, store.path_of(DIGEST), target).outcome == "shared"
            assert mode_of(target) == 0o644
            assert not store.verify(full=True).has_damage


class TestRefused:
    """What is not shared stays exactly as it is, with a reason."""

    def refused(self, store: Store, source: Path, target: Path) -> FileSkippedError:
        before = snapshot(target.parent)
        result = share(store, source, target)
        assert (result.outcome, result.freed) == ("skipped", 0)
        assert isinstance(result.error, FileSkippedError)
        assert snapshot(target.parent) == before
        return result.error

    @pytest.mark.parametrize("at", [0, 50_000, len(WEIGHTS) - 1])
    def test_other_bytes(self, store: Store, source: Path, target: Path, at: int) -> None:
        edit(target, bytes([WEIGHTS[at] ^ 1]), offset=at)
        assert self.refused(store, source, target).reason == "different"
        assert shared_size(target) == 0

    def test_what_is_no_file_of_the_same_size_here(
        self, store: Store, folder: Path, source: Path, elsewhere: Path
    ) -> None:
        (folder / "link.bin").symlink_to(write(folder / "real.bin"))
        (folder / "directory").mkdir()
        os.mkfifo(folder / "fifo")
        reasons = {
            write(folder / "other", OTHER): "different",
            write(folder / "a.incomplete"): "incomplete download",
            write(folder / f"sha256-{64 * 'a'}-partial"): "incomplete download",
            write(folder / "empty", b""): "empty",
            folder / "link.bin": "not a regular file",
            folder / "directory": "not a regular file",
            folder / "fifo": "not a regular file",
            folder / "missing": "was removed",
            write(elsewhere / "b.bin"): "other filesystem",
        }
        for path, reason in reasons.items():
            with row(path):
                assert self.refused(store, source, path).reason == reason
                if reason not in ("empty", "incomplete download"):
                    assert self.refused(store, path, source).reason == reason

    def test_a_file_that_somebody_has_open_for_writing(
        self, store: Store, source: Path, target: Path
    ) -> None:
        with target.open("r+b"):
            assert isinstance(self.refused(store, source, target), FileBusyError)
        assert share(store, source, target).outcome == "shared"

    def test_what_cannot_be_changed(
        self, store: Store, source: Path, target: Path, place: Path
    ) -> None:
        bound = place / "bound"
        bind(target.parent, bound, read_only=True)
        try:
            assert self.refused(store, source, bound / target.name).reason == "read-only filesystem"
        finally:
            subprocess.run(["umount", str(bound)], check=True)
        if subprocess.run(["chattr", "+i", target], capture_output=True, check=False).returncode:
            pytest.skip("no chattr")
        try:
            assert self.refused(store, source, target).reason == "cannot be changed"
        finally:
            subprocess.run(["chattr", "-i", target], check=True)

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
        first, second = write(folder / "a.bin", LARGE), write(folder / "b.bin", LARGE[:-1] + b"?")
        result = share(store, first, second, digest_of(LARGE))
        assert (result.outcome, why(result)) == ("skipped", "different")
        assert result.freed == shared_size(second) == CHUNK
        assert second.read_bytes() == LARGE[:-1] + b"?"


def test_a_filesystem_without_reflinks_is_said_so(tmp_path: Path) -> None:
    if probe(tmp_path).reflink:
        pytest.skip("this one has them")
    paths = [write(tmp_path / name) for name in ("a.bin", "b.bin")]
    with Store(tmp_path / "store") as store:
        result = share(store, paths[0], paths[1])
    assert (result.outcome, why(result)) == ("skipped", "not supported here")


class TestRaced:
    @pytest.mark.parametrize("point", ["share: begun", "share: part shared", "share: shared"])
    def test_a_write_in_between_is_not_lost(
        self, store: Store, source: Path, target: Path, at_point: AtPoint, point: str
    ) -> None:
        at_point(point, lambda: edit(target))
        assert (share(store, source, target).outcome == "skipped") == (point == "share: begun")
        assert target.read_bytes() == b"EDITED" + WEIGHTS[6:]
        assert source.read_bytes() == WEIGHTS

    @AT_BEGIN
    def test_a_file_that_is_cut_in_between_differs(
        self, store: Store, folder: Path, at_point: AtPoint, point: str
    ) -> None:
        """The kernel calls a range beyond the end not supported."""
        first, second = write(folder / "a.bin", LARGE), write(folder / "b.bin", LARGE)
        at_point(point, lambda: os.truncate(second, 10))
        assert why(share(store, first, second, digest_of(LARGE))) == "different"
        assert (first.read_bytes() == LARGE, second.read_bytes()) == (True, LARGE[:10])

    def test_a_file_renamed_over_it_stays(
        self, store: Store, folder: Path, source: Path, target: Path, at_point: AtPoint
    ) -> None:
        at_point("share: begun", lambda: os.replace(write(folder / "new", OTHER), target))
        share(store, source, target)
        assert target.read_bytes() == OTHER


class TestExtents:
    """Where the blocks of a file lie."""

    def test_a_file_just_written_is_given_its_place_first(self, source: Path) -> None:
        (extent,) = extents(source)
        assert extent.logical == 0
        assert extent.physical
        assert extent.length >= len(WEIGHTS)

    def test_holes_and_reserved_blocks_are_left_out(self, folder: Path) -> None:
        with (folder / "holes").open("wb") as file:
            file.truncate(100 * BLOCK)
            os.pwrite(file.fileno(), WEIGHTS[:BLOCK], 50 * BLOCK)
        with (folder / "reserved").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 100 * BLOCK)
            os.pwrite(file.fileno(), WEIGHTS[:BLOCK], 0)
            os.fsync(file.fileno())
        for name, at in (("holes", 50 * BLOCK), ("reserved", 0)):
            (extent,) = extents(folder / name)
            assert (extent.logical, extent.length) == (at, BLOCK)

    def test_a_file_in_many_pieces_is_listed_to_its_end(self, folder: Path) -> None:
        """More than the kernel is asked for at a time."""
        with (folder / "pieces").open("wb") as file:
            for number in range(1300):
                os.pwrite(file.fileno(), WEIGHTS[:BLOCK], 2 * number * BLOCK)
        found = [extent.logical for extent in extents(folder / "pieces")]
        assert found == [2 * n * BLOCK for n in range(1300)]
