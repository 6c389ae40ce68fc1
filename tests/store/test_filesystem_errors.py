"""Full disks, read-only disks, other disks, and files with as many links as there can be.

Every error of the filesystem becomes an error of ours that says what to do, and changes nothing.
The errors are real ones, of real filesystems, wherever the system lets a test make some.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from blake3 import blake3

from tests.api import (
    CannotLinkError,
    FileSkippedError,
    NoSpaceError,
    Store,
    StoreError,
    StoreUnwritableError,
    mount_of,
)
from tests.api import blobs_explained as explained
from tests.processes.children import Child
from tests.store.reflink_disks import reflink_disk
from tests.store.small_disks import PAGE, Disk, bind, in_own_namespace

if sys.platform != "linux":
    pytest.skip("mount namespaces and /dev/shm", allow_module_level=True)

SIZE = 20 * PAGE
DATA = random.Random(1).randbytes(SIZE)
OTHER_DATA = random.Random(2).randbytes(SIZE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as made:
        yield made


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem than `tmp_path`."""
    shared_memory = Path("/dev/shm")  # noqa: S108 - a filesystem that every Linux has
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem")
    with tempfile.TemporaryDirectory(dir=shared_memory) as name:
        yield Path(name)


def snapshot(folder: Path) -> dict[str, object]:
    """What a user can see of files: names, bytes, modes, inodes, links and times."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        st = path.lstat()
        data = blake3(path.read_bytes()).hexdigest()[:8] if path.is_file() else ""
        found[str(path.relative_to(folder))] = (
            f"{data} {stat.filemode(st.st_mode)} links={st.st_nlink} {st.st_ino} {st.st_mtime_ns}"
        )
    return found


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


# a full disk


class Full:
    """A small disk with a store, and files of a user that a job is to work on."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.root = disk.point / "store"
        self.files = disk.point / "files"
        self.files.mkdir()
        self.store = Store(self.root)
        self.known = self.store.put_stream([DATA]).digest
        self.store.pin(self.known)

    def put(self) -> None:
        self.store.put_stream([OTHER_DATA], size=SIZE)

    def put_unannounced(self) -> None:
        self.store.put_stream([OTHER_DATA[:100], OTHER_DATA[100:]])

    def put_file(self) -> None:
        self.store.put_file(self.files / "new.safetensors")

    def place_copy(self) -> None:
        self.store.place(self.known, self.files / "placed.safetensors", kind="copy")

    def place_hardlink(self) -> None:
        self.store.place(self.known, self.files / "placed.safetensors", kind="hardlink")

    def place_symlink(self) -> None:
        self.store.place(self.known, self.files / "placed.safetensors", kind="symlink")

    def place_over(self) -> None:
        path = self.files / "new.safetensors"
        self.store.place(self.known, path, kind="hardlink", overwrite=True)

    def adopt(self) -> None:
        self.store.adopt(self.files / "new.safetensors")

    def replace(self) -> None:
        self.store.replace(self.files / "same.safetensors", self.known)

    def pin(self) -> None:
        self.store.pin(self.known, "another")

    def forget(self) -> None:
        self.store.unpin(self.known)
        self.store.forget(self.known)

    def state(self) -> dict[str, object]:
        """Everything that a job that failed must leave as it was."""
        found = snapshot(self.root / "blobs")
        blobs = {
            name: text for name, text in found.items() if (self.root / "blobs" / name).is_file()
        }
        waiting = {f"tmp/{name}": "there" for name in os.listdir(self.root / "tmp")}
        return {**snapshot(self.files), **blobs, **waiting}

    def renew(self) -> None:
        """Give the user's files the state they have before the job."""
        (self.files / "new.safetensors").write_bytes(OTHER_DATA)
        os.link(self.files / "new.safetensors", self.files / "the same file")
        (self.files / "same.safetensors").write_bytes(DATA)

    def fill_page_of_journal(self) -> None:
        """Let the next line of the journal need another page."""
        path = self.root / "journal.jsonl"
        with open(path, "ab") as file:
            file.write(b"\n" * (-path.stat().st_size % PAGE))


Job = Callable[[Full], None]
JOBS: list[Job] = [
    Full.put, Full.put_unannounced, Full.put_file, Full.place_copy, Full.place_hardlink,
    Full.place_symlink, Full.place_over, Full.adopt, Full.replace, Full.pin,
]  # fmt: skip


BRINGING_BYTES = (Full.put, Full.put_unannounced, Full.put_file, Full.place_copy)


def fails_or_works(job: Job, where: Path, *, journal_fits: bool) -> tuple[int, list[str]]:
    """Try a job with 0, 1, 2 ... free pages until it works; return how many it needs."""
    problems: list[str] = []
    # With less than the bytes themselves need, one number is as good as another.
    skipped = range(3, SIZE // PAGE - 2) if job in BRINGING_BYTES else ()
    for free in sorted({*range(100)} - {*skipped}):
        (where / str(free)).mkdir()
        full = Full(Disk(where / str(free) / "disk", 200 * PAGE))
        full.renew()
        if not journal_fits:
            full.fill_page_of_journal()
        found, works = try_it(job, full, free)
        problems += [f"with {free} pages: {problem}" for problem in found]
        full.store.close()
        if works:
            return free, problems
    raise AssertionError("it never worked")


def try_it(job: Job, full: Full, free: int) -> tuple[list[str], bool]:
    before = full.state()
    full.disk.fill(but=free)
    works = False
    problems: list[str] = []
    try:
        job(full)
        works = True
    except NoSpaceError as error:
        problems = [f"{error}; {change}" for change in differences(before, full.state())]
        if error.errno != errno.ENOSPC:
            problems.append(f"{error}; errno is {error.errno}")
    full.disk.clear()
    if not works:
        try:
            job(full)
        except StoreError as error:
            problems.append(f"not even with space: {error}")
    with full.store.open(full.known) as blob:
        assert blob.read() == DATA
    report = full.store.verify(full=True)
    if (report.damaged, report.missing, report.unindexed) != ([], [], []):
        problems.append(str(report))
    if names := os.listdir(full.root / "tmp"):
        problems.append(f"left in tmp: {names}")
    return problems, works


@pytest.mark.parametrize("journal_fits", [True, False], ids=["index", "journal"])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job.__name__))
def test_a_job_on_a_full_disk_does_nothing_and_works_when_there_is_space(
    job: Job, journal_fits: bool, tmp_path: Path
) -> None:
    """Whichever write is the one that finds no room: of bytes, journal or index."""
    needed, problems = in_own_namespace(
        lambda: fails_or_works(job, tmp_path, journal_fits=journal_fits)
    )
    assert "\n".join(problems) == ""
    assert needed > 0, "the disk was not full"


def test_a_store_cannot_be_made_on_a_full_disk(tmp_path: Path) -> None:
    def make() -> list[str]:
        disk = Disk(tmp_path / "disk", 60 * PAGE)
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


def test_placing_on_a_full_disk_leaves_nothing_there(tmp_path: Path) -> None:
    def place() -> list[str]:
        disk = Disk(tmp_path / "disk", 60 * PAGE)
        with Store(tmp_path / "store") as store:
            digest = store.put_stream([DATA]).digest
            (disk.point / "old.safetensors").write_bytes(b"old")
            disk.fill(but=5)
            for name in ("new.safetensors", "old.safetensors"):
                with pytest.raises(NoSpaceError):
                    store.place(digest, disk.point / name, overwrite=True)
            assert (disk.point / "old.safetensors").read_bytes() == b"old"
            found = sorted(os.listdir(disk.point))
            disk.clear()
            assert store.place(digest, disk.point / "new.safetensors").kind == "copy"
            assert (disk.point / "new.safetensors").read_bytes() == DATA
            return found

    assert in_own_namespace(place) == ["filler", "old.safetensors"]


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_what_is_explained_once_is_not_explained_again(code: int, tmp_path: Path) -> None:
    error = StoreUnwritableError("Cannot lock this or that", errno=code)
    with pytest.raises(StoreUnwritableError) as raised, explained(tmp_path):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "code",
    [
        errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY,
        errno.EINVAL,
    ],
    ids=errno.errorcode.get,
)  # fmt: skip
def test_where_a_hard_link_does_not_work_the_next_kind_is_made(
    code: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = store.put_stream([DATA]).digest
    refuse_links(monkeypatch, store.path_of(digest), code)
    link = store.place(digest, tmp_path / "a.safetensors")
    assert link.kind in ("copy", "reflink")
    assert link.path.read_bytes() == DATA
    with pytest.raises(CannotLinkError) as raised:
        store.place(digest, tmp_path / "b.safetensors", kind="hardlink")
    assert os.strerror(code) in raised.value.message
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "store"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_a_hard_link_that_fails_for_lack_of_room_is_no_reason_to_copy(
    code: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = store.put_stream([DATA]).digest
    refuse_links(monkeypatch, store.path_of(digest), code)
    with pytest.raises(OSError, match=os.strerror(code) if code == errno.EIO else "No space"):
        store.place(digest, tmp_path / "a.safetensors", kind="hardlink")
    assert sorted(os.listdir(tmp_path)) == ["store"]
    assert not store.verify(full=True).has_damage


def refuse_links(monkeypatch: pytest.MonkeyPatch, blob: Path, code: int) -> None:
    """Let the filesystem refuse every hard link to a blob."""
    real = os.link

    def refusing(source: str, target: str, **options: object) -> None:
        if os.fspath(source) == str(blob):
            raise OSError(code, os.strerror(code), source, None, target)
        real(source, target, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", refusing)


# a read-only disk


def test_a_store_on_a_read_only_disk_says_so(tmp_path: Path) -> None:
    def use() -> list[str]:
        disk = Disk(tmp_path / "disk", 400 * PAGE)
        Store(disk.point / "store").close()
        disk.make_read_only()
        messages = []
        for name in ("store", "new"):
            with pytest.raises(StoreUnwritableError) as raised, Store(disk.point / name) as store:
                store.put_stream([DATA])
            messages.append(raised.value.hint)
        assert raised.value.errno == errno.EROFS
        return messages

    assert all("SMARTCACHE_HOME" in hint for hint in in_own_namespace(use))


def test_placing_on_a_read_only_disk_says_so(tmp_path: Path) -> None:
    def place() -> list[str]:
        disk = Disk(tmp_path / "disk", 60 * PAGE)
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


# as many links as there can be


@pytest.fixture
def many_links(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file that has as many links as ext4 allows, and the folder with the other ones."""
    if mount_of(tmp_path).fstype != "ext4":
        pytest.skip("ext4 allows 65,000 links; others allow more")
    path, folder = tmp_path / "a.safetensors", tmp_path / "links"
    path.write_bytes(DATA)
    os.utime(path, ns=(10**18, 10**18))
    folder.mkdir()
    for number in range(64_999):
        os.link(path, folder / str(number))
    yield path, folder
    shutil.rmtree(folder)


def test_a_blob_with_as_many_links_as_there_can_be_gets_another_inode(
    store: Store, many_links: tuple[Path, Path], tmp_path: Path
) -> None:
    path, folder = many_links
    before = path.stat()
    with pytest.raises(FileSkippedError):
        store.adopt(path)
    assert path.stat().st_mode == before.st_mode, "no room for our link: nothing was changed"
    (folder / "0").unlink()
    digest = store.adopt(path, algorithms=["sha256"]).digest
    store.pin(digest)
    links = [
        store.place(digest, tmp_path / f"{number}.safetensors", kind="hardlink")
        for number in range(2)
    ]
    blob = os.stat(store.path_of(digest))
    assert [link.path.stat().st_ino for link in links] == [blob.st_ino, blob.st_ino]
    assert blob.st_nlink == 3
    assert (path.stat().st_ino, path.stat().st_nlink) == (before.st_ino, 64_999)
    assert not stat.S_IMODE(blob.st_mode) & 0o222
    assert [holder.kind for holder, _ in store.holders_of(store.get(digest))] == ["pin"]
    assert store.find("sha256", store.aliases_of(store.get(digest))["sha256"]) is not None
    report = store.verify(full=True)
    assert (report.has_damage, report.unindexed) == (False, [])
    assert os.listdir(store.root / "tmp") == []
    assert all(undone.is_undone for undone in store.plan_undo().execute())
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(before.st_mode)
    assert path.read_bytes() == DATA


def test_a_link_too_many_is_handled_where_the_limit_is_not_known(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filesystems differ in how many links they allow: the error is put in by hand."""
    digest = store.put_stream([DATA]).digest
    inode = os.stat(store.path_of(digest)).st_ino
    real = os.link

    def limited(source: str, target: str, **options: object) -> None:
        if os.stat(source).st_ino == inode and "store" not in str(target):
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), source, None, target)
        real(source, target, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", limited)
    link = store.place(digest, tmp_path / "a.safetensors", kind="hardlink")
    assert link.path.samefile(store.path_of(digest))
    assert link.path.read_bytes() == DATA
    assert not store.verify(full=True).has_damage


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
