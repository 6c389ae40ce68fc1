"""Sharing blocks and asking where they lie, on filesystems that can do it and on those that cannot.

Only answers that no filesystem at hand gives are injected.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.system import kernel
from smartcache.system.filesystems import mount_of
from smartcache.system.kernel import Extent
from tests.store.files import raising
from tests.store.reflink_disks import DISKS, reflink_disk

if sys.platform != "linux":
    pytest.skip("Linux system calls", allow_module_level=True)

import fcntl

BLOCK = 4096
DATA = random.Random(3).randbytes(50_001)


@pytest.fixture(scope="module", params=DISKS)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with reflink_disk(request.param, tmp_path_factory.mktemp("disk")) as point:
        yield point


class Pair:
    """Two open files, for reading only."""

    def __init__(self, first: Path, second: Path) -> None:
        self.paths = (first, second)
        self.a = os.open(first, os.O_RDONLY)
        self.b = os.open(second, os.O_RDONLY)

    def share(self, length: int | None = None, offset: int = 0) -> int | None:
        length = os.fstat(self.a).st_size if length is None else length
        return kernel.dedupe_range(self.a, offset, length, self.b, offset)

    def close(self) -> None:
        os.close(self.a)
        os.close(self.b)


@pytest.fixture
def pair(disk: Path, tmp_path: Path) -> Iterator[Pair]:
    """Two equal files."""
    yield from _equal_files(disk, tmp_path.name, DATA)


def _equal_files(disk: Path, name: str, data: bytes) -> Iterator[Pair]:
    paths = (disk / f"{name}-a", disk / f"{name}-b")
    for path in paths:
        path.write_bytes(data)
    pair = Pair(*paths)
    yield pair
    pair.close()
    for path in paths:
        path.unlink()


def places(fd: int) -> list[tuple[int, int | None, int]]:
    found = kernel.extents(fd)
    assert found is not None
    return [(extent.logical, extent.physical, extent.length) for extent in found]


def is_shared(fd: int) -> list[bool]:
    return [extent.is_shared for extent in kernel.extents(fd) or ()]


class TestSharing:
    def test_equal_files_use_the_same_blocks_and_keep_their_times(self, pair: Pair) -> None:
        """Not even the change time moves: hashes that were remembered stay valid."""
        assert not kernel.shares_blocks(pair.a, pair.b)
        os.sync()
        before = [os.stat(path) for path in pair.paths]
        assert pair.share() == len(DATA)
        assert kernel.shares_blocks(pair.a, pair.b)
        for path, old in zip(pair.paths, before, strict=True):
            now = os.stat(path)
            assert (now.st_mtime_ns, now.st_ctime_ns) == (old.st_mtime_ns, old.st_ctime_ns)
            assert path.read_bytes() == DATA
        assert is_shared(pair.a) == is_shared(pair.b) == [True]

    def test_a_write_afterwards_is_seen_in_one_file_only(self, pair: Pair) -> None:
        pair.share()
        with pair.paths[1].open("r+b") as file:
            file.write(b"edited")
        assert pair.paths[0].read_bytes() == DATA
        assert not kernel.shares_blocks(pair.a, pair.b)

    @pytest.mark.parametrize("at", [0, len(DATA) - 1])
    def test_files_that_differ_are_not_touched(self, pair: Pair, at: int) -> None:
        with pair.paths[1].open("r+b") as file:
            file.seek(at)
            file.write(bytes([DATA[at] ^ 1]))
        assert pair.share() == 0
        assert is_shared(pair.b) == [False]

    def test_no_more_than_a_chunk_is_done_at_once(
        self, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel, "DEDUPE_SIZE", 4 * BLOCK)
        for pair in _equal_files(disk, tmp_path.name, DATA):
            assert pair.share() == 4 * BLOCK
            assert not kernel.shares_blocks(pair.a, pair.b)
            assert pair.share(offset=4 * BLOCK) == 4 * BLOCK
            assert pair.share(length=len(DATA) - 8 * BLOCK, offset=8 * BLOCK) == 4 * BLOCK
            rest = len(DATA) - 12 * BLOCK
            assert pair.share(length=rest, offset=12 * BLOCK) == rest
            # However it came about: where the pieces follow each other they are one extent.
            assert kernel.shares_blocks(pair.a, pair.b)

    def test_asking_for_no_bytes_changes_nothing(self, pair: Pair) -> None:
        before = places(pair.b)
        assert pair.share(length=0) == 0
        assert places(pair.b) == before

    def test_an_immutable_file_is_refused(self, pair: Pair) -> None:
        done = subprocess.run(
            ["chattr", "+i", str(pair.paths[1])], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("no chattr")
        try:
            with pytest.raises(PermissionError):
                pair.share()
        finally:
            subprocess.run(["chattr", "-i", str(pair.paths[1])], check=True)

    def test_files_on_two_filesystems_are_refused(self, pair: Pair, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(DATA)
        with (tmp_path / "file").open("rb") as far:
            with pytest.raises(OSError, match="cross-device") as caught:
                kernel.dedupe_range(pair.a, 0, len(DATA), far.fileno(), 0)
            assert caught.value.errno == errno.EXDEV
            assert not kernel.shares_blocks(pair.a, far.fileno())


class TestExtents:
    def test_a_file_just_written_is_given_its_place_first(self, pair: Pair) -> None:
        ((logical, physical, length),) = places(pair.a)
        assert logical == 0
        assert physical
        assert length >= len(DATA)

    def test_holes_are_left_out(self, disk: Path, tmp_path: Path) -> None:
        path = disk / tmp_path.name
        with path.open("wb") as file:
            file.truncate(100 * BLOCK)
            os.pwrite(file.fileno(), DATA[:BLOCK], 50 * BLOCK)
        with path.open("rb") as file:
            ((logical, _, length),) = places(file.fileno())
        assert (logical, length) == (50 * BLOCK, BLOCK)

    def test_reserved_blocks_that_were_never_written_are_no_extents(
        self, disk: Path, tmp_path: Path
    ) -> None:
        with (disk / tmp_path.name).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 100 * BLOCK)
            os.pwrite(file.fileno(), DATA[:BLOCK], 0)
            os.fsync(file.fileno())
            ((logical, _, length),) = places(file.fileno())
        assert (logical, length) == (0, BLOCK)

    def test_a_file_in_many_pieces_is_listed_to_its_end(self, disk: Path, tmp_path: Path) -> None:
        """More than the kernel is asked for at a time."""
        path = disk / tmp_path.name
        with path.open("wb") as file:
            for number in range(1300):
                os.pwrite(file.fileno(), DATA[:BLOCK], 2 * number * BLOCK)
        with path.open("rb") as file:
            found = places(file.fileno())
        assert [logical for logical, _, _ in found] == [2 * n * BLOCK for n in range(1300)]

    def test_bytes_inside_the_metadata_have_no_place(self, disk: Path, tmp_path: Path) -> None:
        if mount_of(disk).fstype != "btrfs":
            pytest.skip("only btrfs keeps small files so")
        for pair in _equal_files(disk, tmp_path.name, b"small"):
            assert kernel.extents(pair.a) == (
                Extent(logical=0, physical=None, length=BLOCK, is_shared=False),
            )
            assert pair.share() == len(b"small")
            assert not kernel.shares_blocks(pair.a, pair.b)
            assert not kernel.shares_blocks(pair.a, pair.a)

    def test_compressed_files_that_share_are_recognised(self, tmp_path: Path) -> None:
        with reflink_disk("btrfs", tmp_path, options="compress-force=zstd") as disk:
            for pair in _equal_files(disk, "file", bytes(range(256)) * 4000):
                assert not kernel.shares_blocks(pair.a, pair.b)
                assert pair.share(length=48 * BLOCK) == 48 * BLOCK  # ends inside an extent
                assert pair.share() == os.fstat(pair.a).st_size
                assert kernel.shares_blocks(pair.a, pair.b)


class TestUnsupported:
    def test_a_filesystem_in_memory(self) -> None:
        memory = Path("/dev/shm")  # noqa: S108
        if not os.access(memory, os.W_OK) or mount_of(memory).fstype != "tmpfs":
            pytest.skip("no tmpfs at /dev/shm")
        for pair in _equal_files(memory, f"smartcache-test-{os.getpid()}", DATA):
            assert kernel.extents(pair.a) is None
            assert pair.share() is None
            assert not kernel.shares_blocks(pair.a, pair.a)

    def test_whatever_the_refusal_is_called_and_a_damaged_disk_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for pair in _equal_files(tmp_path, "file", DATA):
            for code in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                monkeypatch.setattr(fcntl, "ioctl", raising(code))
                assert kernel.extents(pair.a) is None, errno.errorcode[code]
                assert pair.share() is None, errno.errorcode[code]
            monkeypatch.setattr(fcntl, "ioctl", raising(errno.EIO))
            with pytest.raises(OSError, match="Input/output"):
                kernel.extents(pair.a)
            with pytest.raises(OSError, match="Input/output"):
                pair.share()

    def test_a_refusal_of_the_one_file_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = errno.EOPNOTSUPP

        def ioctl(_fd: int, _request: int, buffer: bytearray) -> int:
            buffer[-8:-4] = (-code).to_bytes(4, sys.byteorder, signed=True)
            return 0

        monkeypatch.setattr(fcntl, "ioctl", ioctl)
        for pair in _equal_files(tmp_path, "file", DATA):
            assert pair.share() is None
            code = errno.EIO
            with pytest.raises(OSError, match="Input/output"):
                pair.share()
