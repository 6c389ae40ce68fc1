"""Full disks, read-only disks, other disks, and files that cannot be linked or changed.

Every error of the filesystem becomes an error of ours that says what to do, and changes nothing.
The errors are real ones, of real filesystems, wherever the system lets a test make some. What each
operation does on a full or read-only disk is in `tests.processes.test_operations`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from blake3 import blake3

from smartcache.errors import CannotLinkError, FileSkippedError, NoSpaceError, StoreUnwritableError
from smartcache.store.blobs import explained
from smartcache.store.store import Store
from tests.processes.children import Child
from tests.store.files import snapshot
from tests.store.reflink_disks import reflink_disk
from tests.store.small_disks import PAGE, Disk, bind, in_own_namespace

if sys.platform != "linux":
    pytest.skip("mount namespaces and /dev/shm", allow_module_level=True)

SIZE = 20 * PAGE
DATA = random.Random(1).randbytes(SIZE)
OTHER_DATA = random.Random(2).randbytes(SIZE)


# a full disk


def test_a_store_cannot_be_made_on_a_full_disk(tmp_path: Path) -> None:
    def make() -> list[str]:
        disk = Disk(tmp_path / "disk", 80 * PAGE)
        disk.fill()
        with pytest.raises(NoSpaceError):
            Store(disk.point / "store")
        disk.clear()
        with Store(disk.point / "store") as store:
            return [store.put_stream([b"bytes"]).digest]

    assert in_own_namespace(make)


def fill(point: Path, *, but: int) -> None:
    """Leave so many blocks of 1 KB free."""
    with open(point / "filler", "wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(1024))
        os.fsync(file.fileno())
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - but * 1024)
        os.fsync(file.fileno())


def test_no_process_dies_without_a_word_where_blocks_are_smaller_than_pages(
    tmp_path: Path,
) -> None:
    """SQLite maps its shared memory with holes in it: with these numbers it was a SIGBUS."""

    def use(root: Path) -> str:
        try:
            with Store(root) as store:
                for number in range(40):
                    store.volume.index.add_volume(Path(f"/{number}" * 100), "f")
                return "works"
        except NoSpaceError as error:
            return str(error).partition(" ")[0]

    with reflink_disk("ext4", tmp_path) as point:
        with Store(point / "store") as store:
            store.put_stream([DATA])
        (point / "store" / "reserve").unlink(missing_ok=True)
        answers = set()
        for blocks in (4, 9, 18, 24, 31, 36, 66, 80, 1000):
            fill(point, but=blocks)
            with Child(lambda: use(point / "store")) as child:
                answers.add(child.result())
            (point / "filler").unlink()
        assert answers == {"No", "works"}


@pytest.mark.parametrize(
    ("code", "kind", "hint"),
    [
        (errno.ENOSPC, NoSpaceError, "prune"),
        (errno.EDQUOT, NoSpaceError, "prune"),
        (errno.EROFS, StoreUnwritableError, "SMARTCACHE_HOME"),
        (errno.EIO, OSError, ""),
    ],
    ids=["full", "quota", "read-only", "broken disk"],
)
def test_a_write_that_fails_changes_nothing_and_says_what_to_do(
    code: int,
    kind: type[OSError],
    hint: str,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where nothing can be mounted, and quotas and broken disks: put in by hand."""
    real = os.write

    def failing(descriptor: int, data: bytes) -> int:
        if len(data) == SIZE:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(kind) as raised:
        store.put_stream([DATA])
    assert hint in getattr(raised.value, "hint", "")
    assert raised.value.errno == code
    monkeypatch.undo()
    assert os.listdir(store.root / "tmp") == []
    assert list(store.blobs()) == []
    assert store.put_stream([DATA]).size == SIZE


def test_what_is_explained_once_is_not_explained_again(tmp_path: Path) -> None:
    for code in (errno.ENOSPC, errno.EACCES):
        error = StoreUnwritableError("Cannot lock this or that", errno=code)
        with pytest.raises(StoreUnwritableError) as raised, explained(tmp_path):
            raise error
        assert raised.value is error


def test_where_a_hard_link_does_not_work_the_next_kind_is_made(store: Store, folder: Path) -> None:
    digest = store.put_stream([DATA]).digest
    for code in (
        errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY,
        errno.EINVAL,
    ):  # fmt: skip
        name = errno.errorcode[code]
        with links_refused(store.path_of(digest), code):
            link = store.place(digest, folder / f"{name}.safetensors")
            assert link.kind in ("copy", "reflink"), name
            assert link.path.read_bytes() == DATA, name
            with pytest.raises(CannotLinkError) as raised:
                store.place(digest, folder / "b.safetensors", kind="hardlink")
        assert os.strerror(code) in raised.value.message, name
        assert os.listdir(folder) == [f"{name}.safetensors"]
        link.path.unlink()


def test_a_hard_link_that_fails_for_lack_of_room_is_no_reason_to_copy(
    store: Store, folder: Path
) -> None:
    digest = store.put_stream([DATA]).digest
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        with (
            links_refused(store.path_of(digest), code),
            pytest.raises(OSError, match=os.strerror(code) if code == errno.EIO else "No space"),
        ):
            store.place(digest, folder / "a.safetensors", kind="hardlink")
        assert os.listdir(folder) == [], errno.errorcode[code]
    assert not store.verify(full=True).has_damage


def test_a_name_too_many_is_made_all_the_same(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filesystems differ in how many links a file may have: the error is put in by hand."""
    digest = store.put_stream([DATA]).digest
    inode, real = os.stat(store.path_of(digest)).st_ino, os.link

    def limited(source: str, target: str, **options: object) -> None:
        if os.stat(source).st_ino == inode:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), source, None, target)
        real(source, target, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", limited)
    assert store.place(digest, folder / "a.safetensors").path.read_bytes() == DATA
    assert os.listdir(folder) == ["a.safetensors"]
    assert not store.verify(full=True).has_damage


@contextmanager
def links_refused(blob: Path, code: int) -> Iterator[None]:
    """Let the filesystem refuse every hard link to a blob."""
    real = os.link

    def refusing(source: str, target: str, **options: object) -> None:
        if os.fspath(source) == str(blob):
            raise OSError(code, os.strerror(code), source, None, target)
        real(source, target, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refusing)
        yield


# a read-only disk


def test_a_store_cannot_be_made_on_a_read_only_disk(tmp_path: Path) -> None:
    def use() -> tuple[int | None, str]:
        disk = Disk(tmp_path / "disk", 400 * PAGE)
        disk.make_read_only()
        with pytest.raises(StoreUnwritableError) as raised:
            Store(disk.point / "new")
        return raised.value.errno, raised.value.hint

    code, hint = in_own_namespace(use)
    assert code == errno.EROFS
    assert "SMARTCACHE_HOME" in hint


def test_placing_on_a_read_only_disk_says_so(tmp_path: Path) -> None:
    def place() -> list[str]:
        disk = Disk(tmp_path / "disk", 80 * PAGE)
        disk.make_read_only()
        with Store(tmp_path / "store") as store:
            digest = store.put_stream([DATA]).digest
            with pytest.raises(StoreUnwritableError) as raised:
                store.place(digest, disk.point / "a.safetensors")
            assert store.place(digest, tmp_path / "a.safetensors").path.exists()
            assert raised.value.errno == errno.EROFS
            return [raised.value.message]

    (message,) = in_own_namespace(place)
    assert "Read-only file system" in message


# another disk


def test_a_blob_is_copied_to_another_filesystem(store: Store, elsewhere: Path) -> None:
    digest = store.put_stream([DATA]).digest
    link = store.place(digest, elsewhere / "a.safetensors")
    assert link.kind == "copy"
    assert link.path.read_bytes() == DATA
    assert stat.S_IMODE(link.path.stat().st_mode) & 0o200, "a copy is the user's own"
    with pytest.raises(CannotLinkError):
        store.place(digest, elsewhere / "b.safetensors", kind="hardlink")
    assert os.listdir(elsewhere) == ["a.safetensors"]
    near = store.place(digest, store.root.parent / "near.safetensors")
    assert near.kind in ("hardlink", "reflink"), "the failure there says nothing about here"


def test_files_on_another_filesystem_are_neither_adopted_nor_replaced(
    store: Store, elsewhere: Path
) -> None:
    digest = store.put_stream([DATA]).digest
    path, other = elsewhere / "a.safetensors", elsewhere / "b.safetensors"
    path.write_bytes(DATA)
    other.write_bytes(OTHER_DATA)
    before = snapshot(elsewhere)
    for attempt in (lambda: store.adopt(other), lambda: store.replace(path, digest)):
        with pytest.raises(FileSkippedError) as raised:
            attempt()
        assert raised.value.reason == "other filesystem"
    assert [a.outcome for a in store.adopt_many([other])] == ["skipped"]
    assert [r.outcome for r in store.replace_many([(path, digest)])] == ["skipped"]
    assert snapshot(elsewhere) == before


def test_a_volume_on_the_other_filesystem_is_preferred_there(store: Store, elsewhere: Path) -> None:
    digest = store.put_stream([DATA]).digest
    volume = store.add_volume(elsewhere / ".smartcache")
    assert store.place(digest, elsewhere / "before.safetensors").kind == "copy"
    volume.put_stream([DATA])
    there = store.place(digest, elsewhere / "a.safetensors")
    assert there.kind in ("hardlink", "reflink")
    here = store.place(digest, store.root.parent / "a.safetensors")
    assert here.kind in ("hardlink", "reflink")
    assert [link.path for link in volume.links_of(volume.get(digest))] == [there.path]
    path = elsewhere / "b.safetensors"
    path.write_bytes(OTHER_DATA)
    assert store.adopt(path).digest == blake3(OTHER_DATA).hexdigest()
    assert path.samefile(volume.path_of(blake3(OTHER_DATA).hexdigest()))
    twin = elsewhere / "c.safetensors"
    twin.write_bytes(OTHER_DATA)
    assert store.replace(twin, blake3(OTHER_DATA).hexdigest()).outcome == "replaced"
    assert twin.samefile(path)


def test_files_seen_through_another_mount_of_the_same_disk_are_left_alone(tmp_path: Path) -> None:
    """In containers two volumes may be one disk: the same device, and yet no links across."""

    def use() -> list[str]:
        (tmp_path / "models").mkdir()
        bind(tmp_path / "models", tmp_path / "bound")
        path, twin = tmp_path / "bound" / "a.safetensors", tmp_path / "bound" / "b.safetensors"
        path.write_bytes(OTHER_DATA)
        twin.write_bytes(DATA)
        before = snapshot(tmp_path / "bound")
        reasons = []
        with Store(tmp_path / "store") as store:
            digest = store.put_stream([DATA]).digest
            for attempt in (lambda: store.adopt(path), lambda: store.replace(twin, digest)):
                with pytest.raises(FileSkippedError) as raised:
                    attempt()
                reasons.append(raised.value.reason)
            assert store.history() == []
        assert snapshot(tmp_path / "bound") == before
        return reasons

    assert in_own_namespace(use) == ["other filesystem", "other filesystem"]


def test_a_link_that_fails_through_another_mount_still_works_elsewhere(tmp_path: Path) -> None:
    def use() -> list[str]:
        (tmp_path / "models").mkdir()
        bind(tmp_path / "models", tmp_path / "bound")
        with Store(tmp_path / "store") as store:
            digest = store.put_stream([DATA]).digest
            return [
                store.place(digest, tmp_path / name / "c.safetensors").kind
                for name in ("bound", ".")
            ]

    there, here = in_own_namespace(use)
    assert there in ("copy", "reflink")
    assert here in ("hardlink", "reflink")


# files that cannot be changed


def test_one_file_that_cannot_be_changed_does_not_stop_the_others(
    store: Store, tmp_path: Path
) -> None:
    """An immutable file: not even root can make it read-only or link it."""
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    twins = [tmp_path / f"twin-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        data = random.Random(number).randbytes(SIZE)
        path.write_bytes(data)
        os.utime(path, ns=(10**18, 10**18))
        twins[number].write_bytes(data)
        os.utime(twins[number], ns=(10**18, 10**18))
    with immutable(paths[1]):
        adopted = list(store.adopt_many(paths))
        assert sorted((a.path.name, a.outcome) for a in adopted) == [
            ("0.safetensors", "adopted"),
            ("1.safetensors", "skipped"),
            ("2.safetensors", "adopted"),
        ]
        assert not store.verify(full=True).unindexed
    digests = [store.put_file(path).digest for path in paths]
    with immutable(twins[1]):
        replaced = list(store.replace_many(zip(twins, digests, strict=True)))
        assert sorted((r.path.name, r.outcome) for r in replaced) == [
            ("twin-0.safetensors", "replaced"),
            ("twin-1.safetensors", "skipped"),
            ("twin-2.safetensors", "replaced"),
        ]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".smartcache")]
    assert stat.S_IMODE(paths[1].stat().st_mode) & 0o200


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    with open(path, "rb") as file:
        flags = bytearray(8)
        try:
            fcntl.ioctl(file, _GET_FLAGS, flags)
            fcntl.ioctl(file, _SET_FLAGS, bytes([flags[0] | _IMMUTABLE, *flags[1:]]))
        except OSError as error:
            pytest.skip(f"cannot make a file immutable: {error.strerror}")
        try:
            yield
        finally:
            fcntl.ioctl(file, _SET_FLAGS, bytes(flags))


_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10
