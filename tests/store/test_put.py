from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.api import (
    DEFAULT_PIN,
    Algorithm,
    BadDigestError,
    BlobNotFoundError,
    DamagedBlobError,
    DigestMismatchError,
    FileChangedError,
    FileSkippedError,
    NoSpaceError,
    SizeMismatchError,
    Store,
    StoreUnwritableError,
    Trust,
)
from tests.api import store_kernel as kernel
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

SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
GIT_SHA1 = hashlib.sha1(b"blob %d\0" % len(WEIGHTS) + WEIGHTS, usedforsecurity=False).hexdigest()
WRONG: list[tuple[Algorithm, str]] = [
    ("blake3", "0" * 64),
    ("sha256", "1" * 64),
    ("git-sha1", "2" * 40),
]


def blob_path(store: Store, digest: str) -> Path:
    return Path(store.volume.layout.blob(digest))


def contents(store: Store) -> dict[str, tuple[object, ...]]:
    """What is in the store, apart from the files of the index and the journal."""
    found = snapshot(store.root)
    files = {"index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "journal.jsonl", "lock"}
    return {name: value for name, value in found.items() if name not in files}


def read(store: Store, digest: str) -> bytes:
    with store.open(digest) as file:
        return file.read()


class TestStream:
    @pytest.mark.parametrize(
        "stream",
        [
            [WEIGHTS],
            [WEIGHTS[:1], b"", WEIGHTS[1:]],
            (bytearray(WEIGHTS),),
            [memoryview(WEIGHTS)],
            io.BytesIO(WEIGHTS),
        ],
        ids=["bytes", "several", "bytearray", "memoryview", "file object"],
    )
    def test_bytes_become_a_blob_named_by_their_blake3(
        self, store: Store, stream: list[bytes]
    ) -> None:
        if isinstance(stream, io.BytesIO):
            stream.seek(0)
        blob = store.put_stream(stream)
        assert (blob.digest, blob.size) == (digest_of(WEIGHTS), len(WEIGHTS))
        assert blob_path(store, blob.digest).read_bytes() == WEIGHTS
        assert read(store, blob.digest) == WEIGHTS

    def test_words_of_several_bytes_are_counted_in_bytes(self, store: Store) -> None:
        words = memoryview(WEIGHTS).cast("I")
        blob = store.put_stream([words], size=len(WEIGHTS))  # type: ignore[list-item]
        assert blob.size == len(WEIGHTS)

    def test_a_stream_without_bytes_is_a_blob_without_bytes(self, store: Store) -> None:
        blob = store.put_stream([])
        assert blob.size == 0
        assert read(store, blob.digest) == b""

    def test_a_blob_is_read_only_and_held_only_by_smartcache(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS])
        assert mode_of(blob_path(store, blob.digest)) == 0o444
        assert blob.is_held_only_by_smartcache
        assert blob.trust == Trust.VERIFIED
        assert blob.unsynced is None

    def test_nothing_remains_in_tmp(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        assert list(store.volume.layout.tmp.iterdir()) == []

    def test_the_same_bytes_again_are_the_same_blob(self, store: Store) -> None:
        first = store.put_stream([WEIGHTS])
        before = contents(store)
        second = store.put_stream([WEIGHTS[:7], WEIGHTS[7:]])
        assert (first.id, first.inode) == (second.id, second.inode)
        assert contents(store) == before
        assert [blob.digest for blob in store.blobs()] == [first.digest]

    def test_hashes_asked_for_become_aliases(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS], algorithms=["sha256", "git-sha1"])
        assert store.aliases_of(blob) == {"git-sha1": GIT_SHA1, "sha256": SHA256}
        for algorithm, value in (("sha256", SHA256), ("git-sha1", GIT_SHA1)):
            assert store.find(algorithm, value.upper()) == blob  # type: ignore[arg-type]

    def test_git_sha1_needs_no_announced_size(self, store: Store) -> None:
        blob = store.put_stream(iter([WEIGHTS]), algorithms=["git-sha1"])
        assert store.aliases_of(blob) == {"git-sha1": GIT_SHA1}

    def test_xet_is_computed_from_what_was_written(self, store: Store, folder: Path) -> None:
        hf_xet = pytest.importorskip("hf_xet")
        (found,) = hf_xet.hash_files([str(write(folder / "a"))])
        blob = store.put_stream([WEIGHTS], algorithms=["xet"])
        assert store.aliases_of(blob) == {"xet": str(found.hash)}

    def test_a_later_put_adds_aliases_to_the_blob(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS], algorithms=["sha256"])
        store.put_stream([WEIGHTS], algorithms=["git-sha1"])
        assert store.aliases_of(blob) == {"git-sha1": GIT_SHA1, "sha256": SHA256}

    def test_progress_is_told_every_byte(self, store: Store) -> None:
        watch = Watch()
        store.put_stream([WEIGHTS[:9], WEIGHTS[9:]], size=len(WEIGHTS), progress=watch)
        assert (watch.total, watch.unit, watch.done) == (len(WEIGHTS), "bytes", len(WEIGHTS))

    def test_an_announced_size_and_hashes_that_are_right_are_accepted(self, store: Store) -> None:
        announced: Mapping[Algorithm, str] = {
            "blake3": digest_of(WEIGHTS).upper(),
            "sha256": SHA256.upper(),
            "git-sha1": GIT_SHA1,
        }
        blob = store.put_stream([WEIGHTS], size=len(WEIGHTS), expected=announced)
        assert store.find("sha256", SHA256) == blob


class TestRefusedStream:
    @pytest.mark.parametrize("announced", [0, 1, len(WEIGHTS) - 1, len(WEIGHTS) + 1])
    def test_another_size_than_announced_leaves_nothing(self, store: Store, announced: int) -> None:
        before = contents(store)
        with pytest.raises(SizeMismatchError) as caught:
            store.put_stream([WEIGHTS], size=announced)
        assert vars(caught.value)["expected"] == announced
        assert contents(store) == before
        assert list(store.blobs()) == []

    def test_an_endless_stream_is_read_no_further_than_announced(self, store: Store) -> None:
        given = 0

        def endless() -> Iterator[bytes]:
            nonlocal given
            while given < 1000:
                given += 1
                yield bytes(1000)

        with pytest.raises(SizeMismatchError):
            store.put_stream(endless(), size=5000)
        assert given == 6

    @pytest.mark.parametrize(("algorithm", "value"), WRONG)
    def test_another_hash_than_announced_leaves_nothing(
        self, store: Store, algorithm: Algorithm, value: str
    ) -> None:
        before = contents(store)
        with pytest.raises(DigestMismatchError) as caught:
            store.put_stream([WEIGHTS], expected={algorithm: value})
        error = vars(caught.value)
        assert (error["algorithm"], error["expected"]) == (algorithm, value)
        assert error["found"] in (digest_of(WEIGHTS), SHA256, GIT_SHA1)
        assert contents(store) == before
        assert list(store.blobs()) == []

    def test_every_announced_hash_must_be_right(self, store: Store) -> None:
        with pytest.raises(DigestMismatchError):
            store.put_stream([WEIGHTS], expected={"sha256": SHA256, "git-sha1": "2" * 40})
        assert list(store.blobs()) == []

    def test_a_wrong_hash_is_refused_even_if_the_blob_is_there(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS])
        with pytest.raises(DigestMismatchError):
            store.put_stream([WEIGHTS], expected={"sha256": "1" * 64})
        assert store.find("sha256", "1" * 64) is None
        assert read(store, blob.digest) == WEIGHTS

    @pytest.mark.parametrize("value", ["", "abc", "g" * 64, "0" * 63, "0" * 65])
    def test_a_hash_that_is_none_is_refused_before_a_byte_is_read(
        self, store: Store, value: str
    ) -> None:
        def untouched() -> Iterator[bytes]:
            raise AssertionError("it was read")
            yield b""

        with pytest.raises(BadDigestError):
            store.put_stream(untouched(), expected={"sha256": value})

    def test_an_unknown_algorithm_is_refused(self, store: Store) -> None:
        with pytest.raises(BadDigestError):
            store.put_stream([WEIGHTS], algorithms=["md5"])  # type: ignore[list-item]

    def test_a_stream_that_breaks_off_leaves_nothing(self, store: Store) -> None:
        def broken() -> Iterator[bytes]:
            yield WEIGHTS
            raise ConnectionError("the line went dead")

        before = contents(store)
        with pytest.raises(ConnectionError):
            store.put_stream(broken())
        assert contents(store) == before

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            (errno.ENOSPC, NoSpaceError),
            (errno.EDQUOT, NoSpaceError),
            (errno.EROFS, StoreUnwritableError),
            (errno.EACCES, StoreUnwritableError),
        ],
        ids=["ENOSPC", "EDQUOT", "EROFS", "EACCES"],
    )
    def test_a_full_or_read_only_disk_is_said_and_leaves_nothing(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
    ) -> None:
        def fail(_: int) -> None:
            raise OSError(code, os.strerror(code))

        before = contents(store)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(error):
            store.put_stream([WEIGHTS])
        assert contents(store) == before
        assert list(store.blobs()) == []

    def test_a_disk_without_room_for_the_announced_size_is_known_before_a_byte_is_read(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def untouched() -> Iterator[bytes]:
            raise AssertionError("it was read")
            yield b""

        monkeypatch.setattr(kernel, "_c_function", lambda *_: lambda *_: errno.ENOSPC)
        with pytest.raises(NoSpaceError):
            store.put_stream(untouched(), size=10)
        assert list(store.volume.layout.tmp.iterdir()) == []

    def test_other_errors_of_the_disk_pass_through(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            store.put_stream([WEIGHTS])


class TestDamagedBefore:
    """Whoever brings the right bytes gets a whole blob, whatever lies under its name."""

    def test_right_bytes_take_the_place_of_a_damaged_blob(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS])
        edit(blob_path(store, blob.digest))
        store.put_stream([WEIGHTS])
        assert read(store, blob.digest) == WEIGHTS
        assert len(list(store.volume.layout.bad.iterdir())) == 1

    def test_right_bytes_take_the_place_of_a_damaged_blob_without_a_row(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        edit(blob_path(store, digest))
        store.volume.index.clear()
        store.put_stream([WEIGHTS])
        assert read(store, digest) == WEIGHTS

    def test_a_whole_blob_without_a_row_is_proven_and_used(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        inode = inode_of(blob_path(store, digest))
        store.volume.index.clear()
        assert store.put_stream([WEIGHTS]).inode == inode

    def test_a_lost_blob_comes_back_with_its_aliases_and_owners(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS], algorithms=["sha256"]).digest
        store.pin(digest, "mine")
        blob_path(store, digest).unlink()
        assert store.verify().missing == [digest]
        blob = store.put_stream([WEIGHTS])
        assert store.find("sha256", SHA256) == blob
        assert [owner.name for owner, _ in store.holders_of(blob)] == ["mine"]

    def test_a_copied_file_takes_the_place_of_a_damaged_blob(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.safetensors")
        digest = store.put_file(path).digest
        edit(blob_path(store, digest))
        store.put_file(path)
        assert read(store, digest) == WEIGHTS

    def test_a_file_that_the_memo_knows_brings_a_lost_blob_back(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a.safetensors")
        pass_time(10)
        digest = store.digest_of(path).digest
        store.put_file(path)
        blob_path(store, digest).unlink()
        store.put_file(path)
        assert read(store, digest) == WEIGHTS


class TestCopiedFile:
    def test_the_file_is_not_touched(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors", mode=0o640)
        before = (snapshot(folder), os.stat(path).st_ctime_ns)
        blob = store.put_file(path)
        assert (snapshot(folder), os.stat(path).st_ctime_ns) == before
        assert blob.inode != inode_of(path)
        assert read(store, blob.digest) == WEIGHTS

    def test_the_blob_has_the_time_of_the_file(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        blob = store.put_file(path)
        assert blob.key.mtime_ns == os.stat(path).st_mtime_ns

    def test_a_relative_path_is_meant_from_here(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(folder / "a.bin")
        monkeypatch.chdir(folder)
        assert store.put_file("a.bin").digest == digest_of(WEIGHTS)

    def test_a_symlink_stands_for_the_file_behind_it(self, store: Store, folder: Path) -> None:
        write(folder / "a.bin")
        (folder / "link").symlink_to("a.bin")
        assert store.put_file(folder / "link").digest == digest_of(WEIGHTS)

    def test_a_file_on_another_filesystem_is_copied(self, store: Store, elsewhere: Path) -> None:
        blob = store.put_file(write(elsewhere / "a.bin"), algorithms=["sha256"])
        assert read(store, blob.digest) == WEIGHTS
        assert store.find("sha256", SHA256) == blob

    def test_names_of_unfinished_downloads_can_be_copied(self, store: Store, folder: Path) -> None:
        assert store.put_file(write(folder / "a.incomplete")).digest == digest_of(WEIGHTS)

    @pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "fifo"])
    def test_what_is_no_file_is_refused(
        self, store: Store, folder: Path, make: Callable[[Path], None]
    ) -> None:
        make(folder / "a.bin")
        with pytest.raises(FileSkippedError) as caught:
            store.put_file(folder / "a.bin")
        assert caught.value.reason == "not a regular file"

    def test_a_device_is_refused(self, store: Store) -> None:
        with pytest.raises(FileSkippedError):
            store.put_file("/dev/null")

    def test_an_empty_file_is_refused(self, store: Store, folder: Path) -> None:
        with pytest.raises(FileSkippedError) as caught:
            store.put_file(write(folder / "a.bin", b""))
        assert caught.value.reason == "empty"

    @pytest.mark.parametrize("how", ["copy", "move"])
    def test_a_file_that_is_not_there_is_the_plain_error(
        self, store: Store, folder: Path, how: str
    ) -> None:
        with pytest.raises(FileNotFoundError):
            store.put_file(folder / "a.bin", how=how)  # type: ignore[arg-type]

    @pytest.mark.parametrize("how", ["copy", "move"])
    def test_announced_hashes_are_taken_in_either_case(
        self, store: Store, folder: Path, how: str
    ) -> None:
        path = write(folder / "a.bin")
        blob = store.put_file(path, how=how, expected={"sha256": SHA256.upper()})  # type: ignore[arg-type]
        assert store.find("sha256", SHA256) == blob

    @pytest.mark.parametrize("how", ["copy", "move"])
    @pytest.mark.parametrize(("algorithm", "value"), WRONG)
    def test_another_hash_than_announced_leaves_file_and_store_alone(
        self, store: Store, folder: Path, how: str, algorithm: Algorithm, value: str
    ) -> None:
        path = write(folder / "a.bin")
        before = (snapshot(folder), contents(store))
        with pytest.raises(DigestMismatchError):
            store.put_file(path, how=how, expected={algorithm: value})  # type: ignore[arg-type]
        assert (snapshot(folder), contents(store)) == before
        assert list(store.blobs()) == []

    def test_a_remembered_file_is_checked_against_announced_hashes_too(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a.bin")
        store.put_file(path)
        pass_time(10)
        store.digest_of(path, ["blake3", "sha256"])
        with pytest.raises(DigestMismatchError):
            store.put_file(path, expected={"sha256": "1" * 64})
        assert store.put_file(path, expected={"sha256": SHA256}).digest == digest_of(WEIGHTS)

    def test_a_remembered_file_is_not_read_again(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a.bin")
        store.put_file(path)
        pass_time(10)
        store.digest_of(path)
        watch = Watch()
        store.put_file(path, progress=watch)
        assert watch.done == 0

    def test_a_file_that_changes_meanwhile_is_refused(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.bin")
        store.volume.unable.add((store.volume.device, "reflink"))  # read it, where it could share
        with pytest.raises(FileChangedError):
            store.put_file(path, progress=Watch(lambda: edit(path)))
        for blob in store.blobs():
            assert digest_of(read(store, blob.digest)) == blob.digest

    def test_a_link_of_a_blob_that_was_made_writable_can_be_put(
        self, store: Store, folder: Path
    ) -> None:
        """The store sets the mode back, which changes the file's change time: that was us."""
        path = write(folder / "a.bin")
        digest = store.adopt(path).digest
        path.chmod(0o644)
        assert store.put_file(path).digest == digest

    def test_a_file_that_grows_meanwhile_does_not_become_a_blob(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.bin")
        store.volume.unable.add((store.volume.device, "reflink"))
        with pytest.raises((SizeMismatchError, FileChangedError)):
            store.put_file(path, progress=Watch(lambda: edit(path, OTHER, offset=len(WEIGHTS))))
        assert list(store.blobs()) == []


class TestMovedFile:
    def test_the_name_goes_and_the_bytes_are_pinned(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        inode = inode_of(path)
        blob = store.put_file(path, how="move")
        assert list(folder.iterdir()) == []
        assert inode_of(blob_path(store, blob.digest)) == inode
        assert [owner.name for owner, _ in store.holders_of(blob)] == [DEFAULT_PIN]
        assert read(store, blob.digest) == WEIGHTS
        assert mode_of(blob_path(store, blob.digest)) == 0o444

    def test_the_row_counts_the_links_that_remain(self, store: Store, folder: Path) -> None:
        blob = store.put_file(write(folder / "a.safetensors"), how="move")
        assert store.get(blob.digest).is_held_only_by_smartcache
        assert store.links_of(blob) == []

    def test_undo_brings_the_file_back_as_it_was(self, store: Store, folder: Path) -> None:
        write(folder / "a.safetensors", mode=0o600, age=12345)
        before = snapshot(folder)
        blob = store.put_file(folder / "a.safetensors", how="move")
        assert [done.note for done in store.plan_undo(last=True).execute()] == [""]
        assert snapshot(folder) == before
        assert store.holders_of(store.get(blob.digest)) == []

    def test_a_file_whose_bytes_are_a_blob_already_is_moved_too(
        self, store: Store, folder: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        write(folder / "a.safetensors", mode=0o600)
        before = snapshot(folder)
        blob = store.put_file(folder / "a.safetensors", how="move")
        assert list(folder.iterdir()) == []
        assert [owner.name for owner, _ in store.holders_of(blob)] == [DEFAULT_PIN]
        store.plan_undo(last=True).execute()
        assert snapshot(folder) == before

    def test_a_file_from_another_filesystem_is_moved_too(
        self, store: Store, elsewhere: Path
    ) -> None:
        write(elsewhere / "a.bin", mode=0o640)
        before = snapshot(elsewhere)
        blob = store.put_file(elsewhere / "a.bin", how="move")
        assert list(elsewhere.iterdir()) == []
        assert read(store, blob.digest) == WEIGHTS
        store.plan_undo(last=True).execute()
        assert snapshot(elsewhere) == before

    def test_another_name_of_the_file_stays_as_it_was(self, store: Store, folder: Path) -> None:
        """Only one name was given to smartcache: the other must not become read-only."""
        path = write(folder / "a.safetensors")
        os.link(path, folder / "b.safetensors")
        store.put_file(path, how="move")
        assert mode_of(folder / "b.safetensors") == 0o644
        edit(folder / "b.safetensors")
        assert read(store, digest_of(WEIGHTS)) == WEIGHTS

    def test_an_adopted_file_that_is_moved_comes_back_as_it_was_at_first(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.safetensors", mode=0o664)
        before = snapshot(folder)
        store.adopt(path)
        store.put_file(path, how="move")
        store.plan_undo().execute()
        assert snapshot(folder) == before

    def test_a_symlink_is_refused(self, store: Store, folder: Path) -> None:
        write(folder / "a.bin")
        (folder / "link").symlink_to("a.bin")
        with pytest.raises(FileSkippedError):
            store.put_file(folder / "link", how="move")
        assert (folder / "link").is_symlink()

    @pytest.mark.parametrize("name", ["a.incomplete", "a.tmp", "a-partial.bin"])
    def test_an_unfinished_download_is_refused(self, store: Store, folder: Path, name: str) -> None:
        with pytest.raises(FileSkippedError) as caught:
            store.put_file(write(folder / name), how="move")
        assert caught.value.reason == "incomplete download"
        assert (folder / name).exists()

    def test_a_file_that_is_replaced_at_the_last_moment_stays(
        self, store: Store, folder: Path, at_point: Callable[[str, Callable[[], object]], None]
    ) -> None:
        path = write(folder / "a.safetensors")
        at_point("move in: pinned", lambda: os.replace(write(folder / "new", OTHER), path))
        with pytest.raises(FileChangedError):
            store.put_file(path, how="move")
        assert path.read_bytes() == OTHER

    def test_a_later_unpin_lets_prune_free_it(self, store: Store, folder: Path) -> None:
        blob = store.put_file(write(folder / "a.safetensors"), how="move")
        assert store.plan_prune().victims == ()
        assert store.unpin(blob.digest) == [DEFAULT_PIN]
        assert [victim.digest for victim in store.plan_prune().victims] == [blob.digest]


class TestHandingOut:
    @pytest.mark.parametrize("upper", [False, True], ids=["lower case", "upper case"])
    def test_open_and_path_of_take_a_digest_in_either_case(self, store: Store, upper: bool) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        asked = digest.upper() if upper else digest
        assert read(store, asked) == WEIGHTS
        assert store.path_of(asked).read_bytes() == WEIGHTS
        assert store.get(asked).digest == digest

    def test_an_unknown_digest_is_not_found(self, store: Store) -> None:
        for ask in (store.open, store.path_of, store.get, store.resolve, store.forget):
            with pytest.raises(BlobNotFoundError):
                ask("0" * 64)

    @pytest.mark.parametrize("text", ["", "zz", "0" * 63, "0" * 65, "../" * 22])
    def test_what_is_no_digest_is_refused(self, store: Store, text: str) -> None:
        for ask in (store.open, store.path_of, store.get, store.forget, store.pin):
            with pytest.raises(BadDigestError):
                ask(text)

    def test_resolve_takes_beginnings_and_aliases(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS], algorithms=["sha256"])
        for text in (blob.digest, blob.digest[:8].upper(), f"sha256:{SHA256}"):
            assert store.resolve(text) == blob
        with pytest.raises(BadDigestError):
            store.resolve(blob.digest[:3])
        with pytest.raises(BlobNotFoundError):
            store.resolve("0000")
        with pytest.raises(BlobNotFoundError):
            store.resolve(f"sha256:{'0' * 64}")

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

    @pytest.mark.parametrize(
        "harm",
        [
            edit,
            lambda path: os.truncate(path, 10),
            lambda path: os.replace(write(path.with_name("new"), OTHER), path),
            lambda path: edit(path, b"more", offset=len(WEIGHTS)),
        ],
        ids=["flipped", "truncated", "replaced", "grown"],
    )
    def test_a_damaged_blob_is_never_handed_out(
        self, store: Store, harm: Callable[[Path], None]
    ) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        path = blob_path(store, digest)
        if not os.access(path, os.W_OK):
            path.chmod(0o644)
        harm(path)
        damaged = path.read_bytes()
        with pytest.raises(DamagedBlobError):
            store.open(digest)
        with pytest.raises(BlobNotFoundError):
            store.open(digest)
        (bad,) = store.volume.layout.bad.iterdir()
        assert bad.name.startswith(digest)
        assert bad.read_bytes() == damaged
        assert not path.exists()

    def test_an_edit_with_the_time_set_back_is_seen_by_the_change_time(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        path = blob_path(store, digest)
        st = path.stat()
        edit(path)
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        with pytest.raises(DamagedBlobError):
            store.open(digest)

    def test_a_blob_in_another_inode_is_hashed_and_used(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        path = blob_path(store, digest)
        os.replace(write(path.with_name("new"), mode=0o444), path)
        assert read(store, digest) == WEIGHTS
        assert store.get(digest).inode == inode_of(path)

    def test_a_blob_made_writable_is_made_read_only_again_when_it_is_used(
        self, store: Store
    ) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        path = blob_path(store, digest)
        path.chmod(0o666)
        assert read(store, digest) == WEIGHTS
        assert mode_of(path) & 0o222 == 0

    def test_a_link_made_by_somebody_else_is_noted_for_a_later_hash(
        self, store: Store, folder: Path
    ) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        os.link(blob_path(store, digest), folder / "theirs")
        assert read(store, digest) == WEIGHTS
        blob = store.get(digest)
        assert (blob.trust, blob.links) == (Trust.RELINKED, 2)
        store.verify(full=True)
        assert store.get(digest).trust == Trust.VERIFIED

    def test_a_blob_that_vanished_is_not_found(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        blob_path(store, digest).unlink()
        with pytest.raises(BlobNotFoundError) as caught:
            store.open(digest)
        assert "verify --repair" in caught.value.hint

    def test_an_open_blob_outlives_its_removal(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        with store.open(digest) as file:
            store.forget(digest, to_trash=False)
            assert file.read() == WEIGHTS

    def test_blobs_are_regular_files_of_one_link(self, store: Store) -> None:
        path = store.path_of(store.put_stream([WEIGHTS]).digest)
        assert stat.S_ISREG(path.lstat().st_mode)
        assert link_count(path) == 1
