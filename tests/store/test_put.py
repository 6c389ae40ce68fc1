"""Bytes that come into the store, from a stream or a file, and how they are handed out."""

from __future__ import annotations

import errno
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from smartcache.errors import (
    BadDigestError,
    BlobNotFoundError,
    DigestMismatchError,
    FileChangedError,
    FileSkippedError,
    NoSpaceError,
    SizeMismatchError,
    StoreUnwritableError,
)
from smartcache.store.records import Trust
from smartcache.store.store import Store
from smartcache.system import kernel
from smartcache.system.hashing import Algorithm
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    blob_path,
    digest_of,
    edit,
    git_sha1_of,
    inode_of,
    link_count,
    mode_of,
    raising,
    read,
    row,
    sha256_of,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")

DIGEST = digest_of(WEIGHTS)
SHA256, GIT_SHA1 = sha256_of(WEIGHTS), git_sha1_of(WEIGHTS)
WRONG: list[tuple[Algorithm, str]] = [
    ("blake3", "0" * 64),
    ("sha256", "1" * 64),
    ("git-sha1", "2" * 40),
]


def contents(store: Store) -> dict[str, tuple[object, ...]]:
    """What is in the store, apart from the files of the index and the journal."""
    files = {"index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "journal.jsonl", "lock"}
    return {name: seen for name, seen in snapshot(store.root).items() if name not in files}


def untouched() -> Iterator[bytes]:
    raise AssertionError("it was read")
    yield b""


class TestStream:
    def test_bytes_become_a_blob_named_by_their_blake3(self, store: Store) -> None:
        """Read-only, whole, proven, of one name, and nothing else remains."""
        words = memoryview(WEIGHTS).cast("I")
        streams = (
            [WEIGHTS], [WEIGHTS[:1], b"", WEIGHTS[1:]], (bytearray(WEIGHTS),), [words],
            io.BytesIO(WEIGHTS), iter([WEIGHTS]),
        )  # fmt: skip
        inodes = set()
        for stream in streams:
            with row(stream):
                blob = store.put_stream(stream)  # type: ignore[arg-type]
                assert (blob.digest, blob.size) == (DIGEST, len(WEIGHTS))
                assert read(store) == WEIGHTS
                inodes.add(inode_of(blob_path(store)))
        assert len(inodes) == len(list(store.blobs())) == 1
        assert (blob.trust, blob.unsynced) == (Trust.VERIFIED, None)
        assert blob.is_held_only_by_smartcache
        assert (mode_of(blob_path(store)), link_count(blob_path(store))) == (0o444, 1)
        assert list(store.volume.layout.tmp.iterdir()) == []

    def test_a_stream_without_bytes_is_a_blob_without_bytes(self, store: Store) -> None:
        blob = store.put_stream([])
        assert (blob.size, read(store, blob.digest)) == (0, b"")

    def test_hashes_asked_for_become_aliases_and_later_ones_are_added(self, store: Store) -> None:
        aliases: dict[Algorithm, str] = {}
        for algorithm, value in (("sha256", SHA256), ("git-sha1", GIT_SHA1)):
            blob = store.put_stream([WEIGHTS], algorithms=[algorithm])  # type: ignore[list-item]
            aliases[algorithm] = str(value)  # type: ignore[index]
            assert store.aliases_of(blob) == aliases
            assert store.find(algorithm, value.upper()) == blob  # type: ignore[arg-type]

    def test_progress_is_told_every_byte(self, store: Store) -> None:
        watch = Watch()
        store.put_stream([WEIGHTS[:9], WEIGHTS[9:]], size=len(WEIGHTS), progress=watch)
        assert (watch.total, watch.unit, watch.done) == (len(WEIGHTS), "bytes", len(WEIGHTS))

    def test_an_announced_size_and_hashes_that_are_right_are_accepted(
        self, store: Store, folder: Path
    ) -> None:
        announced: Mapping[Algorithm, str] = {
            "blake3": DIGEST.upper(),
            "sha256": SHA256.upper(),
            "git-sha1": GIT_SHA1,
        }
        blob = store.put_stream([WEIGHTS], size=len(WEIGHTS), expected=announced)
        assert store.put_file(write(folder / "a.bin"), expected=announced) == blob
        assert store.find("sha256", SHA256) == blob


class TestRefused:
    def test_bytes_other_than_announced_leave_nothing(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.bin")
        before = (snapshot(folder), contents(store))
        for size in (0, 1, len(WEIGHTS) - 1, len(WEIGHTS) + 1):
            with row(size), pytest.raises(SizeMismatchError) as caught:
                store.put_stream([WEIGHTS], size=size)
            assert vars(caught.value)["expected"] == size
        for algorithm, value in WRONG:
            with row(algorithm), pytest.raises(DigestMismatchError) as wrong:
                store.put_stream([WEIGHTS], expected={"sha256": SHA256, algorithm: value})
            error = vars(wrong.value)
            assert (error["algorithm"], error["expected"]) == (algorithm, value)
            assert error["found"] in (DIGEST, SHA256, GIT_SHA1)
            with row(algorithm), pytest.raises(DigestMismatchError):
                store.put_file(path, expected={algorithm: value})
        assert (snapshot(folder), contents(store)) == before
        assert list(store.blobs()) == []

    def test_an_endless_stream_is_read_no_further_than_announced(self, store: Store) -> None:
        given = itertools.count()
        with pytest.raises(SizeMismatchError):
            store.put_stream((bytes(1000) for _ in zip(given, range(1000))), size=5000)  # noqa: B905
        assert next(given) == 6

    def test_a_wrong_hash_is_refused_even_if_the_blob_is_there(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        with pytest.raises(DigestMismatchError):
            store.put_stream([WEIGHTS], expected={"sha256": "1" * 64})
        assert store.find("sha256", "1" * 64) is None
        assert read(store) == WEIGHTS

    def test_what_cannot_succeed_is_refused_before_a_byte_is_read(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for value in ("", "abc", "g" * 64, "0" * 63, "0" * 65):
            with row(value), pytest.raises(BadDigestError):
                store.put_stream(untouched(), expected={"sha256": value})
        with pytest.raises(BadDigestError):
            store.put_stream(untouched(), algorithms=["md5"])  # type: ignore[list-item]
        monkeypatch.setattr(kernel, "_c_function", lambda *_: lambda *_: errno.ENOSPC)
        with pytest.raises(NoSpaceError):
            store.put_stream(untouched(), size=10)
        assert list(store.volume.layout.tmp.iterdir()) == []

    def test_a_stream_that_breaks_off_leaves_nothing(self, store: Store) -> None:
        def broken() -> Iterator[bytes]:
            yield WEIGHTS
            raise ConnectionError("the line went dead")

        before = contents(store)
        with pytest.raises(ConnectionError):
            store.put_stream(broken())
        assert contents(store) == before

    def test_a_disk_that_fails_is_said_and_leaves_nothing(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = contents(store)
        errors: dict[int, type[Exception]] = {
            errno.ENOSPC: NoSpaceError, errno.EDQUOT: NoSpaceError,
            errno.EROFS: StoreUnwritableError, errno.EACCES: StoreUnwritableError,
            errno.EIO: OSError,
        }  # fmt: skip
        for code, error in errors.items():
            monkeypatch.setattr(os, "fsync", raising(code))
            with row(errno.errorcode[code]), pytest.raises(error):
                store.put_stream([WEIGHTS])
        assert contents(store) == before
        assert list(store.blobs()) == []


class TestDamagedBefore:
    """Whoever brings the right bytes gets a whole blob, whatever lies under its name."""

    def test_right_bytes_take_the_place_of_a_damaged_blob(self, store: Store, folder: Path) -> None:
        """With a row and without one, from a stream and from a file."""
        path = write(folder / "a.safetensors")
        puts: tuple[Callable[[], object], ...] = (
            lambda: store.put_stream([WEIGHTS]),
            lambda: store.put_file(path),
        )
        for put in puts:
            for forgotten in (False, True):
                put()
                edit(blob_path(store))
                if forgotten:
                    store.volume.index.clear()
                put()
                assert read(store) == WEIGHTS, f"without a row: {forgotten}"
        assert len(list(store.volume.layout.bad.iterdir())) == 4

    def test_a_whole_blob_without_a_row_is_proven_and_used(self, store: Store) -> None:
        inode = store.put_stream([WEIGHTS]).inode
        store.volume.index.clear()
        assert store.put_stream([WEIGHTS]).inode == inode

    def test_a_file_that_the_memo_knows_brings_a_lost_blob_back(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a.safetensors")
        pass_time(10)
        store.digest_of(path)
        store.put_file(path)
        blob_path(store).unlink()
        store.put_file(path)
        assert read(store) == WEIGHTS


class TestCopiedFile:
    def test_the_file_is_not_touched_and_the_blob_has_its_time(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.safetensors", mode=0o640)
        before = (snapshot(folder), os.stat(path).st_ctime_ns)
        blob = store.put_file(path)
        assert (snapshot(folder), os.stat(path).st_ctime_ns) == before
        assert blob.inode != inode_of(path)
        assert blob.key.mtime_ns == os.stat(path).st_mtime_ns
        assert read(store) == WEIGHTS

    def test_a_file_may_be_meant_from_here_lie_behind_a_symlink_or_have_a_name_of_any_kind(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(folder / "a.incomplete")
        (folder / "link").symlink_to("a.incomplete")
        monkeypatch.chdir(folder)
        for path in ("a.incomplete", folder / "link"):
            assert store.put_file(path).digest == DIGEST, path

    def test_a_file_on_another_filesystem_is_copied(self, store: Store, elsewhere: Path) -> None:
        blob = store.put_file(write(elsewhere / "a.bin"), algorithms=["sha256"])
        assert read(store) == WEIGHTS
        assert store.find("sha256", SHA256) == blob

    def test_what_is_no_file_is_refused(self, store: Store, folder: Path) -> None:
        os.mkfifo(folder / "fifo")
        write(folder / "empty", b"")
        reasons = {folder: "not a regular file", folder / "fifo": "not a regular file",
                   Path("/dev/null"): "not a regular file", folder / "empty": "empty"}  # fmt: skip
        for path, reason in reasons.items():
            with row(path), pytest.raises(FileSkippedError) as caught:
                store.put_file(path)
            assert caught.value.reason == reason
        with pytest.raises(FileNotFoundError):
            store.put_file(folder / "none")

    def test_a_remembered_file_is_not_read_again_but_checked_against_announced_hashes(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a.bin")
        store.put_file(path)
        pass_time(10)
        store.digest_of(path, ["blake3", "sha256"])
        watch = Watch()
        store.put_file(path, progress=watch)
        assert watch.done == 0
        with pytest.raises(DigestMismatchError):
            store.put_file(path, expected={"sha256": "1" * 64})
        assert store.put_file(path, expected={"sha256": SHA256}).digest == DIGEST

    def test_a_file_that_changes_or_grows_meanwhile_does_not_become_a_blob(
        self, store: Store, folder: Path
    ) -> None:
        store.volume.unable.add((store.volume.device, "reflink"))  # read it, where it could share
        for offset in (0, len(WEIGHTS)):
            path = write(folder / "a.bin")
            watch = Watch(lambda path=path, offset=offset: edit(path, OTHER, offset=offset))  # type: ignore[misc]
            with row(offset), pytest.raises((SizeMismatchError, FileChangedError)):
                store.put_file(path, progress=watch)
        for blob in store.blobs():
            assert digest_of(read(store, blob.digest)) == blob.digest

    def test_a_link_of_a_blob_that_was_made_writable_can_be_put(
        self, store: Store, folder: Path
    ) -> None:
        """The store sets the mode back, which changes the file's change time: that was us."""
        path = write(folder / "a.bin")
        store.adopt(path)
        path.chmod(0o644)
        assert store.put_file(path).digest == DIGEST


class TestHandingOut:
    def test_a_digest_is_taken_in_either_case(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        for asked in (DIGEST, DIGEST.upper()):
            assert read(store, asked) == store.path_of(asked).read_bytes() == WEIGHTS
            assert store.get(asked).digest == DIGEST

    def test_what_is_unknown_or_no_digest_is_refused(self, store: Store) -> None:
        asks: list[Callable[[str], object]] = [
            store.open, store.path_of, store.get, store.remove, store.pin,
        ]  # fmt: skip
        for ask in asks:
            with row(ask), pytest.raises(BlobNotFoundError):
                ask("0" * 64)
            for text in ("", "zz", "0" * 63, "0" * 65, "../" * 22):
                with row(ask, text), pytest.raises(BadDigestError):
                    ask(text)

    def test_resolve_takes_beginnings_and_aliases(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS], algorithms=["sha256"])
        for text in (DIGEST, DIGEST[:8].upper(), f"sha256:{SHA256}"):
            assert store.resolve(text) == blob, text
        with pytest.raises(BadDigestError):
            store.resolve(DIGEST[:3])
        for text in ("0000", "0" * 64, f"sha256:{'0' * 64}"):
            with row(text), pytest.raises(BlobNotFoundError):
                store.resolve(text)

    def test_a_beginning_of_several_digests_is_refused_with_all_of_them(self, store: Store) -> None:
        first: dict[str, bytes] = {}
        for number in itertools.count():
            data = number.to_bytes(4)
            twin = first.setdefault(digest_of(data)[:4], data)
            if twin != data:
                break
        digests = sorted(store.put_stream([each]).digest for each in (data, twin))
        with pytest.raises(BadDigestError) as caught:
            store.resolve(digests[0][:4])
        assert vars(caught.value)["matches"] == digests

    def test_a_blob_in_another_inode_is_hashed_and_used(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        path = blob_path(store)
        os.replace(write(path.with_name("new"), mode=0o444), path)
        assert read(store) == WEIGHTS
        assert store.get(DIGEST).inode == inode_of(path)

    def test_a_blob_made_writable_is_made_read_only_again_when_it_is_used(
        self, store: Store
    ) -> None:
        store.put_stream([WEIGHTS])
        blob_path(store).chmod(0o666)
        assert read(store) == WEIGHTS
        assert mode_of(blob_path(store)) & 0o222 == 0

    def test_a_blob_that_vanished_is_not_found(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        blob_path(store).unlink()
        with pytest.raises(BlobNotFoundError) as caught:
            store.open(DIGEST)
        assert "verify --repair" in caught.value.hint

    def test_an_open_blob_outlives_its_removal(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        with store.open(DIGEST) as file:
            store.remove(DIGEST)
            assert file.read() == WEIGHTS
