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

from smartcache import errors
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


def contents(store: Store) -> list[object]:
    """What the store has of bytes, whole or half."""
    pool = store.pools()[0]
    return [snapshot(each) for each in (pool.blobs, pool.pins, pool.tmp, pool.bad)]


def untouched() -> Iterator[bytes]:
    raise AssertionError("it was read")
    yield b""


class TestStream:
    def test_bytes_become_a_read_only_blob_named_by_their_blake3(self, store: Store) -> None:
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
        assert (blob.is_only_in_store, blob.names, blob.pins) == (True, 0, ())
        assert (mode_of(blob_path(store)), link_count(blob_path(store))) == (0o444, 1)
        assert os.listdir(store.layout.tmp) == []
        assert read(store, store.put_stream([]).digest) == b""

    def test_hashes_asked_for_are_kept_and_later_ones_added(self, store: Store) -> None:
        known: dict[Algorithm, str] = {}
        values: dict[Algorithm, str] = {"sha256": SHA256, "git-sha1": GIT_SHA1}
        for algorithm, value in values.items():
            blob = store.put_stream([WEIGHTS], algorithms=[algorithm])
            known[algorithm] = value
            assert store.hashes_of(blob.digest) == known
            assert store.find(algorithm, value.upper()) == blob

    def test_what_was_announced_rightly_is_accepted_and_progress_told_every_byte(
        self, store: Store, folder: Path
    ) -> None:
        values: Mapping[Algorithm, str] = {
            "blake3": DIGEST.upper(), "sha256": SHA256.upper(), "git-sha1": GIT_SHA1,
        }  # fmt: skip
        watch, size = Watch(), len(WEIGHTS)
        chunks = [WEIGHTS[:9], WEIGHTS[9:]]
        blob = store.put_stream(chunks, size=size, expected=values, progress=watch)
        assert (watch.total, watch.unit, watch.done) == (size, "bytes", size)
        assert store.put_file(write(folder / "a.bin"), expected=values).inode == blob.inode


class TestRefused:
    @pytest.mark.parametrize("data", [OTHER, WEIGHTS])
    def test_other_bytes_than_announced_leave_none(
        self, store: Store, folder: Path, data: bytes
    ) -> None:
        """Whether they are a blob already or not."""
        store.put_stream([data])
        path = write(folder / "a.bin")
        before = (snapshot(folder), contents(store))
        for size in (0, 1, len(WEIGHTS) - 1, len(WEIGHTS) + 1):
            with row(size), pytest.raises(errors.SizeMismatchError) as caught:
                store.put_stream([WEIGHTS], size=size)
            assert vars(caught.value)["expected"] == size
        for algorithm, value in WRONG:
            with row(algorithm), pytest.raises(errors.DigestMismatchError) as wrong:
                store.put_stream([WEIGHTS], expected={"sha256": SHA256, algorithm: value})
            error = vars(wrong.value)
            assert (error["algorithm"], error["expected"]) == (algorithm, value)
            assert error["found"] in (DIGEST, SHA256, GIT_SHA1)
            with row(algorithm), pytest.raises(errors.DigestMismatchError):
                store.put_file(path, expected={algorithm: value})
        assert (snapshot(folder), contents(store)) == before
        assert store.find("sha256", "1" * 64) is None

    def test_an_endless_stream_is_read_no_further_than_announced(self, store: Store) -> None:
        given = itertools.count()
        with pytest.raises(errors.SizeMismatchError):
            store.put_stream((bytes(1000) for _ in zip(given, range(1000))), size=5000)  # noqa: B905
        assert next(given) == 6

    def test_what_cannot_succeed_is_refused_before_a_byte_is_read(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for value in ("", "abc", "g" * 64, "0" * 63, "0" * 65):
            with row(value), pytest.raises(errors.BadDigestError):
                store.put_stream(untouched(), expected={"sha256": value})
        with pytest.raises(errors.BadDigestError):
            store.put_stream(untouched(), algorithms=["md5"])  # type: ignore[list-item]
        monkeypatch.setattr(kernel, "_c_function", lambda *_: lambda *_: -errno.ENOSPC)
        with pytest.raises(errors.NoSpaceError):
            store.put_stream(untouched(), size=10)
        assert os.listdir(store.pools()[0].tmp) == []

    def test_a_stream_that_breaks_off_leaves_nothing(self, store: Store) -> None:
        def broken() -> Iterator[bytes]:
            yield WEIGHTS
            raise ConnectionError("the line went dead")

        with pytest.raises(ConnectionError):
            store.put_stream(broken())
        assert [os.listdir(store.layout.tmp), list(store.blobs())] == [[], []]

    def test_a_disk_that_fails_is_said_with_what_to_do(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put_stream([OTHER])
        before = contents(store)
        rows: list[tuple[int, type[OSError], str]] = [
            (errno.ENOSPC, errors.NoSpaceError, "prune"),
            (errno.EDQUOT, errors.NoSpaceError, "prune"),
            (errno.EROFS, errors.StoreUnwritableError, "SMARTCACHE_HOME"),
            (errno.EACCES, errors.StoreUnwritableError, "SMARTCACHE_HOME"),
            (errno.EIO, OSError, ""),
        ]  # fmt: skip
        for code, kind, hint in rows:
            with row(errno.errorcode[code]):
                monkeypatch.setattr(os, "fsync", raising(code))
                with pytest.raises(kind) as raised:
                    store.put_stream([WEIGHTS])
                monkeypatch.undo()
                assert hint in getattr(raised.value, "hint", "")
                assert (raised.value.errno, contents(store)) == (code, before)


class TestCopiedFile:
    def test_the_file_is_untouched_and_the_blob_has_its_time(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The path may be relative, and a symlink; the name does not matter."""
        path = write(folder / "a.incomplete", mode=0o640)
        (folder / "link").symlink_to(path)
        monkeypatch.chdir(folder)
        before = (snapshot(folder), os.stat(path).st_ctime_ns)
        for given in ("a.incomplete", folder / "link"):
            blob = store.put_file(given)
            assert (snapshot(folder), os.stat(path).st_ctime_ns) == before
            assert blob.inode != inode_of(path)
            assert blob.mtime_ns == os.stat(path).st_mtime_ns
            assert (mode_of(blob.path), read(store)) == (0o440, WEIGHTS)

    def test_bytes_come_to_the_pool_that_was_asked_for_from_wherever_they_are(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        """Unasked to that of its own filesystem, or home where there is none."""
        far = write(elsewhere / "a.bin")
        assert store.put_file(far).pool == store.root
        there = store.add_pool(elsewhere / "pool")
        home = store.pools()[0]
        rows: list[tuple[Callable[[], object], Path]] = [
            (lambda: store.put_file(far), there.root),
            (lambda: store.put_file(far, pool=home), home.root),
            (lambda: store.put_file(write(folder / "b.bin"), pool=there), there.root),
            (lambda: store.put_stream([WEIGHTS], pool=there), there.root),
            (lambda: store.put_stream([WEIGHTS]), home.root),
        ]
        for number, (put, root) in enumerate(rows):
            for blob in list(store.blobs()):
                blob.path.unlink()
            with row(number):
                put()
                (blob,) = store.blobs()
                assert (blob.pool, blob.path.read_bytes()) == (root, WEIGHTS)

    def test_what_is_no_file_is_refused(self, store: Store, folder: Path) -> None:
        os.mkfifo(folder / "fifo")
        write(folder / "empty", b"")
        reasons = {folder: "not a regular file", folder / "fifo": "not a regular file",
                   Path("/dev/null"): "not a regular file", folder / "empty": "empty"}  # fmt: skip
        for path, reason in reasons.items():
            with row(path), pytest.raises(errors.FileSkippedError) as caught:
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
        with pytest.raises(errors.DigestMismatchError):
            store.put_file(path, expected={"sha256": "1" * 64})
        assert store.put_file(path, expected={"sha256": SHA256}).digest == DIGEST

    @pytest.mark.parametrize("offset", [0, len(WEIGHTS)], ids=["changes", "grows"])
    def test_a_file_that_changes_meanwhile_does_not_become_a_blob(
        self, offset: int, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel, "clone", lambda *_: False)  # read, where it could share
        path = write(folder / "a.bin")
        watch = Watch(lambda: edit(path, OTHER, offset=offset))
        with pytest.raises((errors.SizeMismatchError, errors.FileChangedError)):
            store.put_file(path, progress=watch)
        for blob in store.blobs():
            assert digest_of(read(store, blob.digest)) == blob.digest

    def test_a_lost_blob_comes_back_from_its_own_link_and_its_pin_leaves_that(
        self, store: Store, folder: Path
    ) -> None:
        """The pin was a name of the file that is copied: our own unlink moves its change time."""
        store.adopt(path := write(folder / "a.safetensors"))
        store.pin(DIGEST)
        blob_path(store).unlink()
        assert store.put_file(path).digest == DIGEST
        assert (link_count(path), link_count(blob_path(store))) == (1, 2)
        assert store.digest_of(path).digest == DIGEST

    def test_the_blob_that_is_there_is_proven_and_kept_or_else_made_anew(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        """Forgotten; its link made writable; deleted by hand, though the file was read before."""
        path = write(folder / "a.bin")
        inode = store.adopt(path).inode
        for change in (store.rebuild, lambda: path.chmod(0o644)):
            change()
            for blob in (store.put_file(path), store.put_stream([WEIGHTS])):
                assert (blob.inode, mode_of(blob.path)) == (inode, 0o444)
        pass_time(10)
        store.digest_of(path)
        blob_path(store).unlink()
        store.put_file(path)
        assert (read(store), inode_of(blob_path(store)) == inode) == (WEIGHTS, False)


class TestHandingOut:
    def test_what_is_unknown_or_no_digest_is_refused(self, store: Store, folder: Path) -> None:
        asks: list[Callable[[str], object]] = [
            store.open, store.path_of, store.get, store.remove, store.pin,
            store.unpin, lambda digest: store.place(digest, folder / "a"),
        ]  # fmt: skip
        for ask in asks:
            with row(ask), pytest.raises(errors.BlobNotFoundError):
                ask("0" * 64)
            for text in ("", "zz", "0" * 63, "0" * 65, "../" * 22):
                with row(ask, text), pytest.raises(errors.BadDigestError):
                    ask(text)
        assert os.listdir(folder) == []

    def test_resolve_takes_beginnings_of_one_digest_and_other_hashes(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS], algorithms=["sha256"])
        for text in (DIGEST, DIGEST[:8].upper(), f"sha256:{SHA256}"):
            assert store.resolve(text) == blob, text
        for text in (DIGEST, DIGEST.upper()):
            assert read(store, text) == store.path_of(text).read_bytes() == WEIGHTS
            assert store.get(text) == blob
        with pytest.raises(errors.BadDigestError):
            store.resolve(DIGEST[:3])
        for text in ("0000", "0" * 64, f"sha256:{'0' * 64}"):
            with row(text), pytest.raises(errors.BlobNotFoundError):
                store.resolve(text)
        first: dict[str, bytes] = {}
        for number in itertools.count():
            data = number.to_bytes(4)
            twin = first.setdefault(digest_of(data)[:4], data)
            if twin != data:
                break
        digests = sorted(store.put_stream([each]).digest for each in (data, twin))
        with pytest.raises(errors.BadDigestError) as caught:
            store.resolve(digests[0][:4])
        assert vars(caught.value)["matches"] == digests

    def test_a_blob_may_be_another_file_or_writable_or_gone(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        path = blob_path(store)
        os.replace(write(path.with_name("new"), mode=0o666), path)
        assert (read(store), mode_of(path)) == (WEIGHTS, 0o444)
        assert store.get(DIGEST).inode == inode_of(path)
        with store.open(DIGEST) as file:
            path.unlink()
            assert file.read() == WEIGHTS, "an open one outlives its removal"
        with pytest.raises(errors.BlobNotFoundError) as caught:
            store.open(DIGEST)
        assert "smartcache ls" in caught.value.hint
