"""How much is read to find out which files are equal: as little as possible, and only once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from smartcache.folders import scan as scanning
from smartcache.folders.scan import SAMPLE_MIN_SIZE, compare, look
from smartcache.folders.scan import scan_folders as scan
from smartcache.progress import Progress, silent
from smartcache.store.catalog import Scope
from smartcache.store.hashes import HEAD_SIZE, TAIL_SIZE, Learned
from smartcache.store.store import Store
from smartcache.system.kernel import StatKey
from tests.folders.counting import Recorded, bytes_read, files_opened, groups_of, plain
from tests.folders.trees import content, write
from tests.store.files import digest_of

MiB = 1 << 20
SIZE = 3 * MiB


@pytest.fixture(autouse=True)
def _old_files(pass_time: Callable[[float], None]) -> None:
    """No file is so young that it would be read again."""
    pass_time(60)


def compared(
    store: Store,
    folder: Path,
    *,
    is_quick: bool = False,
    sizes: Iterable[int] | None = None,
    progress: Progress = silent,
) -> Learned:
    _, scope = look(store, plain(folder), min_size=1)
    wanted = None if sizes is None else set(sizes)
    return compare(store, scope, sizes=wanted, is_quick=is_quick, progress=progress)


def known(store: Store, folder: Path) -> dict[str, str]:
    """The digests that are remembered, by name."""
    return {each.path.name: each.digest for each in store.sighted([folder]) if each.digest}


class TestWhatIsRead:
    def test_a_size_that_one_file_has_is_not_read(self, store: Store, folder: Path) -> None:
        for number in range(5):
            write(folder / f"{number}.gguf", content(1, 5000 + number))
        with files_opened(folder) as opened:
            assert compared(store, folder).size == 0
        assert opened == []

    def test_names_of_one_inode_are_not_read_and_of_several_each_once(
        self, store: Store, folder: Path
    ) -> None:
        for name, count in (("a.gguf", 0), ("b.gguf", 2)):
            path = write(folder / name, content(1, 5000))
            os.link(path, folder / f"link-{name}")
            with files_opened(folder) as opened:
                assert compared(store, folder).size == count * 5000
            assert len(opened) == count

    def test_large_files_are_read_in_full_only_if_their_ends_are_equal(
        self, store: Store, folder: Path
    ) -> None:
        ends, insides = (0, SIZE - 1, SIZE - TAIL_SIZE, HEAD_SIZE - 1), (HEAD_SIZE, SIZE // 2)
        data = content(1, SIZE)
        for at in ends:
            write(folder / f"{at}.gguf", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        write(folder / "other.gguf", content(2, SIZE))
        _, scope = look(store, plain(folder), min_size=1)
        before = bytes_read()
        assert compare(store, scope, is_quick=False, progress=silent).size == 0
        assert bytes_read() - before < 5 * (HEAD_SIZE + TAIL_SIZE) + 400_000
        assert known(store, folder) == {}
        for at in (*insides, SIZE - TAIL_SIZE - 1):
            write(folder / f"{at}.gguf", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert compared(store, folder).size == 3 * SIZE, "what is inside is not sampled"
        assert len(set(known(store, folder).values())) == 3
        write(folder / "copy.gguf", content(2, SIZE))
        assert compared(store, folder).size == 2 * SIZE
        assert known(store, folder)["copy.gguf"] == digest_of(content(2, SIZE))

    def test_small_files_are_hashed_at_once(self, store: Store, folder: Path) -> None:
        size = SAMPLE_MIN_SIZE - 1
        for number in range(3):
            write(folder / f"{number}.gguf", content(number, size))
        with files_opened(folder) as opened:
            assert compared(store, folder).size == 3 * size
        assert len(opened) == 3

    def test_with_a_blob_of_that_size_a_single_file_is_read(
        self, store: Store, folder: Path
    ) -> None:
        write(folder / "a.gguf", content(1, SIZE))
        store.put_stream([content(2, SIZE)])
        assert compared(store, folder).size == SIZE
        assert compared(store, folder).size == 0

    def test_a_file_that_is_the_only_blob_of_its_size_is_not(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.gguf", content(1, SIZE))
        store.adopt(path)
        with files_opened(folder) as opened:
            assert compared(store, folder).size == 0
            os.link(path, folder / "b.gguf")  # its row is not proof any more
            assert compared(store, folder).size == 0
        assert opened == []

    def test_what_the_store_knows_of_its_blobs_is_not_read(
        self, store: Store, folder: Path
    ) -> None:
        first = write(folder / "a.gguf", content(1, SIZE))
        second = write(folder / "b.gguf", content(1, SIZE))
        store.adopt(first)
        with files_opened(folder) as opened:
            found = scan(store, plain(folder), min_size=1)
        assert (found.hashed, groups_of(found)) == (SIZE, [[[first], [second]]])
        assert set(opened) <= {os.fsencode(first), os.fsencode(second)}

    def test_what_anybody_has_hashed_before_is_not_read(self, store: Store, folder: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            store.digest_of(write(folder / name, content(1, 5000)))
        with files_opened(folder) as opened:
            assert compared(store, folder).size == 0
        assert opened == []
        assert len(set(known(store, folder).values())) == 1

    def test_quick_only_the_ends(self, store: Store, folder: Path) -> None:
        for name in ("a", "b"):
            write(folder / f"{name}.gguf", content(1, SIZE))
        _, scope = look(store, plain(folder), min_size=1)
        before = bytes_read()
        assert compare(store, scope, is_quick=True, progress=silent).size == 0
        assert bytes_read() - before < 2 * (HEAD_SIZE + TAIL_SIZE) + 400_000
        with files_opened(folder) as opened:
            compare(store, scope, is_quick=True, progress=silent)
        assert opened == []

    def test_only_the_sizes_asked_for(self, store: Store, folder: Path) -> None:
        for size in (5000, 6000):
            for name in ("a", "b"):
                write(folder / f"{name}-{size}.gguf", content(1, size))
        assert compared(store, folder, sizes=[6000]).size == 2 * 6000
        assert compared(store, folder, sizes=[]).size == 0
        assert compared(store, folder).size == 2 * 5000

    def test_many_sizes_are_compared_in_portions(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scanning, "_CHUNK_FILES", 4)
        expected = []
        for number in range(15):
            data = content(number, 5000 + number)
            expected.append([[write(folder / f"{n}{number}", data)] for n in "ab"])
        found = scan(store, plain(folder), min_size=1, any_file=True)
        assert groups_of(found) == sorted(expected)


class TestMemory:
    def test_a_racy_sample_is_no_reason_not_to_compare(self, store: Store, folder: Path) -> None:
        """What was read of a file that was changed right then says nothing of its bytes now."""
        old = [write(folder / f"{number}.gguf", content(number, SIZE)) for number in range(4)]
        young = write(folder / "young.gguf", content(1, SIZE))
        _, scope = look(store, plain(folder), min_size=1)
        compare(store, scope, is_quick=True, progress=silent)
        st = young.stat()
        row = (store.volume.filesystem, st.st_ino, *StatKey.of(st), 1, None, b"a racy sample...")
        with store.catalog.write():
            store.catalog.learn([row])
        found = scan(store, plain(folder), min_size=1)
        assert groups_of(found) == [[[old[1]], [young]]]

    @pytest.mark.parametrize("first", ["sample", "blake3"])
    def test_sample_and_digest_are_kept_beside_each_other(
        self, store: Store, folder: Path, first: str
    ) -> None:
        for name in ("a", "b"):
            write(folder / f"{name}.gguf", content(1, SIZE))
        compared(store, folder, is_quick=first == "sample")
        compared(store, folder, is_quick=first != "sample")
        with files_opened(folder) as opened:
            compared(store, folder, is_quick=True)
            compared(store, folder)
        assert opened == []

    def test_other_hashes_are_kept_too(self, store: Store, folder: Path) -> None:
        paths = [write(folder / f"{name}.gguf", content(1, 5000)) for name in "ab"]
        before = store.digest_of(paths[0], ["sha256"]).values["sha256"]
        compared(store, folder)
        with files_opened(folder) as opened:
            assert store.digest_of(paths[0], ["sha256"]).values["sha256"] == before
        assert opened == []

    def test_of_other_bytes_nothing_is_kept(self, store: Store, folder: Path) -> None:
        paths = [write(folder / f"{name}.gguf", content(1, 5000)) for name in "ab"]
        store.digest_of(paths[0], ["sha256"])
        paths[0].write_bytes(content(2, 5000))
        compared(store, folder)
        memo = store.catalog.memos(store.volume.filesystem, [paths[0].stat().st_ino]).get(
            paths[0].stat().st_ino
        )
        assert memo is not None
        assert memo.digest == digest_of(content(2, 5000))
        assert set(store.known_hashes([paths[0]])[paths[0]]) == {"blake3"}


class TestProgress:
    @pytest.mark.parametrize("is_quick", [True, False])
    def test_it_reaches_what_was_announced(
        self, store: Store, folder: Path, is_quick: bool
    ) -> None:
        for name, seed, size in (
            ("a", 1, SIZE), ("b", 1, SIZE), ("c", 2, SIZE), ("d", 1, 5000), ("e", 2, 5000),
            ("alone", 1, 7000),
        ):  # fmt: skip
            write(folder / f"{name}.gguf", content(seed, size))
        os.link(folder / "a.gguf", folder / "link.gguf")
        for _ in range(2):
            seen = Recorded()
            compared(store, folder, is_quick=is_quick, progress=seen)
            assert seen.totals["Comparing"] == 4 * SIZE + 2 * 5000
            assert seen.done["Comparing"] == 4 * SIZE + 2 * 5000

    def test_of_a_whole_scan(self, store: Store, folder: Path) -> None:
        for name in "abc":
            write(folder / f"{name}.gguf", content(1, 5000))
        seen = Recorded()
        scan(store, plain(folder), min_size=1, progress=seen)
        assert seen.units == {"Looking at files": "items", "Comparing": "bytes"}
        assert seen.done["Looking at files"] == 3
        assert seen.done["Comparing"] == seen.totals["Comparing"] == 3 * 5000


def test_what_could_not_be_read_is_named(store: Store, folder: Path) -> None:
    paths = [write(folder / f"{name}.gguf", content(1, SIZE)) for name in "abc"]
    _, scope = look(store, plain(folder), min_size=1)
    paths[0].unlink()
    with open(paths[1], "r+b"):
        found = compare(store, scope, is_quick=False, progress=silent)
    assert found.busy == [os.fsencode(paths[1])]
    assert found.problems == [(os.fsencode(paths[0]), "No such file or directory")]


def test_a_scope_without_files(store: Store) -> None:
    scope = Scope(home="f", boot="b", folders=())
    assert compare(store, scope, is_quick=False, progress=silent) == Learned()
