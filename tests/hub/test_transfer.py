"""Hashing a file while somebody writes it: a head start, never a proof."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smartcache.errors import DigestMismatchError
from smartcache.hub.bring import Bringing
from smartcache.hub.outcome import Watch as outcome_Watch
from smartcache.hub.places import CachePlace
from smartcache.hub.records import PlannedFile, RemoteFile, Repo
from smartcache.hub.transfer import Followed
from smartcache.store.store import Store
from smartcache.system.hashing import Algorithm, Hashes
from tests.hub.clients import sha256, weights

ALGORITHMS: tuple[Algorithm, ...] = ("blake3", "sha256")
NAME = "a" * 64


def follow(directory: Path, size: int | None = None) -> Followed:
    return Followed(directory, NAME, ALGORITHMS, size)


def begin(directory: Path, data: bytes = b"") -> Path:
    path = directory / f"{NAME}.1234.incomplete"
    path.write_bytes(data)
    return path


def finish(path: Path) -> Path:
    return path.rename(path.with_name(NAME))


def right(data: bytes) -> dict[str, str]:
    return {"blake3": blake3(data).hexdigest(), "sha256": sha256(data)}


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


class TestFollowed:
    @settings(max_examples=60)
    @given(
        pieces=st.lists(st.tuples(st.binary(max_size=2000), st.integers(0, 2)), max_size=12),
        has_size=st.booleans(),
    )
    def test_what_is_only_appended_to_is_hashed_right(
        self, pieces: list[tuple[bytes, int]], has_size: bool
    ) -> None:
        data = b"".join(piece for piece, _ in pieces)
        with tempfile.TemporaryDirectory() as name:
            followed = follow(Path(name), len(data) if has_size else None)
            path = begin(Path(name))
            buffer = bytearray(700)
            followed.step(buffer)
            for piece, steps in pieces:
                append(path, piece)
                for _ in range(steps):
                    followed.step(buffer)
            found = followed.finish(finish(path))
        assert found is not None
        assert found.values == right(data)
        assert found.size == len(data)

    def test_a_file_that_begins_again_is_hashed_again(self, tmp_path: Path) -> None:
        followed, path, buffer = follow(tmp_path), begin(tmp_path, b"x" * 1000), bytearray(4096)
        assert followed.step(buffer)
        os.truncate(path, 0)
        assert not followed.step(buffer)
        append(path, b"y" * 3000)
        found = followed.finish(finish(path))
        assert found is not None
        assert found.values == right(b"y" * 3000)

    def test_another_inode_than_the_followed_one_is_not_known(self, tmp_path: Path) -> None:
        followed, path = follow(tmp_path), begin(tmp_path, b"x" * 1000)
        assert followed.step(bytearray(4096))
        other = tmp_path / "other"
        other.write_bytes(b"x" * 1000)
        assert followed.finish(other) is None
        assert path.exists()

    def test_a_file_that_was_never_found_or_is_gone_is_not_known(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes(b"x")
        assert follow(tmp_path).finish(path) is None
        followed = follow(tmp_path)
        begin(tmp_path, b"x")
        assert followed.step(bytearray(10))
        assert followed.finish(tmp_path / "missing") is None
        assert follow(tmp_path / "no folder").step(bytearray(10)) is False

    def test_older_files_and_those_of_others_are_not_followed(self, tmp_path: Path) -> None:
        old = begin(tmp_path, b"x" * 10)
        os.utime(old, (time.time() - 100, time.time() - 100))
        (tmp_path / f"{'b' * 64}.1.incomplete").write_bytes(b"other")
        (tmp_path / NAME).write_bytes(b"finished before")
        assert follow(tmp_path).step(bytearray(10)) is False

    def test_a_symlink_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"x" * 10)
        (tmp_path / f"{NAME}.1.incomplete").symlink_to(tmp_path / "secret")
        assert follow(tmp_path).step(bytearray(10)) is False

    def test_after_the_end_nothing_is_read(self, tmp_path: Path) -> None:
        followed, path = follow(tmp_path), begin(tmp_path, b"x" * 10)
        assert followed.step(bytearray(100))
        with followed:
            pass
        append(path, b"more")
        assert followed.step(bytearray(100)) is False
        assert followed.finish(path) is None


class TestThreads:
    def test_many_files_are_followed_at_once(self, tmp_path: Path) -> None:
        rng = random.Random(4)
        names = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(6)]
        data = {name: rng.randbytes(rng.randrange(1, 300_000)) for name in names}

        def write(name: str) -> None:
            path = tmp_path / f"{name}.x.incomplete"
            with path.open("wb", buffering=0) as file:
                for start in range(0, len(data[name]), 40_000):
                    file.write(data[name][start : start + 40_000])
            path.rename(tmp_path / name)

        with ExitStack() as stack:
            followed = {
                name: stack.enter_context(Followed(tmp_path, name, ALGORITHMS, len(data[name])))
                for name in names
            }
            threads = [threading.Thread(target=write, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for name in names:
                found = followed[name].finish(tmp_path / name)
                assert found is None or found.values == right(data[name])

    def test_its_thread_ends_with_the_block(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        with follow(tmp_path):
            (thread,) = set(threading.enumerate()) - before
        thread.join(60)
        assert not thread.is_alive()


def change(path: Path, kind: str, data: bytes, number: int) -> None:
    """Do what a writer may do to an unfinished file."""
    size = path.stat().st_size
    if kind == "append":
        append(path, data)
    elif kind == "truncate":
        os.truncate(path, number % (size + 1))
    elif kind == "begin again":
        path.write_bytes(data)
    elif kind == "swap":
        path.unlink()
        path.write_bytes(data)
    else:
        with path.open("r+b") as file:
            file.seek(number % (size + 1))
            file.write(data)


KINDS = ("append", "truncate", "begin again", "swap", "overwrite")
steps = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.binary(min_size=1, max_size=300), st.integers(0, 1000),
        st.integers(0, 2),
    ),
    max_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def arrivals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Path]]:
    """One store for all examples, and a folder on its filesystem."""
    root = tmp_path_factory.mktemp("proof")
    with Store(root / "store") as store:
        yield store, root


class TestProof:
    """Whatever was followed: what is accepted has the announced bytes, and only that is."""

    @settings(max_examples=30)
    @example(steps=[("append", b"x" * 300, 0, 1), ("overwrite", b"y", 5, 0)], is_right=True)
    @example(steps=[("append", b"x" * 300, 0, 1), ("overwrite", b"y", 5, 0)], is_right=False)
    @given(steps=steps, is_right=st.booleans())
    def test_a_wrong_head_start_changes_nothing(
        self,
        arrivals: tuple[Store, Path],
        steps: list[tuple[str, bytes, int, int]],
        is_right: bool,
    ) -> None:
        store, root = arrivals
        with tempfile.TemporaryDirectory(dir=root) as name:
            target = CachePlace(cache_dir=Path(name), repo=Repo("model", "o/n"), commit="c" * 40)
            directory = target.folder / "blobs"
            directory.mkdir(parents=True)
            path, buffer = begin(directory, weights(1, 70_000)), bytearray(1 << 17)
            followed = follow(directory)
            followed.step(buffer)
            seen = [path.read_bytes()]
            for kind, data, number, count in steps:
                change(path, kind, data, number)
                seen.append(path.read_bytes())
                for _ in range(count):
                    followed.step(buffer)
            path = finish(path)
            hashes = followed.finish(path)
            final = path.read_bytes()
            announced = final if is_right else seen[0] + b"!"
            check(store, target, path, announced, hashes)

    @pytest.mark.parametrize("is_weight", [True, False])
    def test_hashes_of_bytes_that_were_there_before_prove_nothing(
        self, arrivals: tuple[Store, Path], tmp_path: Path, is_weight: bool
    ) -> None:
        """The file was right when it was followed; then somebody changed it."""
        store, _ = arrivals
        target = CachePlace(cache_dir=tmp_path, repo=Repo("model", "o/n"), commit="c" * 40)
        path = tmp_path / ("x.bin" if is_weight else "x.json")
        data = weights(50, 70_000)
        path.write_bytes(data[:-1] + b"?")
        lie = Hashes(
            size=len(data), values={"blake3": blake3(data).hexdigest(), "sha256": sha256(data)}
        )
        file = RemoteFile(path=path.name, size=len(data), etag=sha256(data))
        planned = PlannedFile(file=file, source="fetch", is_large=True, is_weight=is_weight)
        with pytest.raises(DigestMismatchError):
            bringing(store, target).prove(planned, path, lie)
        assert path.stat().st_nlink == 1
        assert store.find("sha256", sha256(data)) is None


def bringing(store: Store, place: CachePlace) -> Bringing:
    return Bringing(store, place, watch=outcome_Watch(is_new=lambda _: True))


def check(
    store: Store, target: CachePlace, path: Path, announced: bytes, hashes: Hashes | None
) -> None:
    final = path.read_bytes()
    file = RemoteFile(path="m.bin", size=len(announced), etag=sha256(announced))
    planned = PlannedFile(file=file, source="fetch", is_large=True, is_weight=True)
    arrivals = bringing(store, target)
    if final == announced:
        if not final:
            return
        digest = arrivals.prove(planned, path, hashes)
        assert digest == blake3(final).hexdigest()
        assert store.hashes_of(digest).get("sha256") == sha256(final)
        assert store.path_of(digest).read_bytes() == final
    else:
        with pytest.raises(DigestMismatchError):
            arrivals.prove(planned, path, hashes)
        assert store.find("sha256", sha256(announced)) is None
