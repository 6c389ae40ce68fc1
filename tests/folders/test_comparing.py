"""How much is read to find out which files are equal: as little as possible, and only once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.folders import scan as scanning
from smartcache.folders.scan import Scan
from smartcache.folders.scan import scan_folders as scan
from smartcache.progress import Progress, silent
from smartcache.store.catalog import RACY, Learned
from smartcache.store.hashes import HEAD_SIZE, TAIL_SIZE
from smartcache.store.store import Store
from smartcache.system.filesystems import filesystem_id
from smartcache.system.kernel import StatKey
from smartcache.system.sqlite import signed
from tests.folders.counting import Recorded, bytes_read, files_opened, groups_of, plain
from tests.folders.trees import content, write
from tests.store.files import adopt, digest_of

MiB = 1 << 20
SIZE = 3 * MiB


@pytest.fixture(autouse=True)
def _old_files(pass_time: Callable[[float], None]) -> None:
    """No file is so young that it would be read again."""
    pass_time(60)


def scanned(
    store: Store, folder: Path, *, is_quick: bool = False, progress: Progress = silent
) -> Scan:
    return scan(
        store, plain(folder), min_size=1, any_file=True, is_quick=is_quick, progress=progress
    )


def known(store: Store, folder: Path) -> dict[str, str]:
    """The digests that are remembered, by name."""
    return {each.path.name: each.digest for each in store.sighted([folder]) if each.digest}


READ: dict[str, tuple[str, int]] = {
    "each a size of its own": ("1:5000 1:5001 2:5002", 0),
    "names of one inode": ("1:5000 link", 0),
    "one inode with two names, and a copy": ("1:5000 link 1:5000", 2),
    "several of a size": ("1:5000 2:5000 3:5000 1:6000", 3),
}
"""Files by seed and size, "link" one more name of the one before; how many are read."""


class TestWhatIsRead:
    @pytest.mark.parametrize("what", READ)
    def test_sizes_that_several_files_have_each_file_once_and_none_again(
        self, store: Store, folder: Path, what: str
    ) -> None:
        words, count = READ[what]
        path = folder
        for number, word in enumerate(words.split()):
            if word == "link":
                os.link(path, folder / f"{number}.bin")
            else:
                seed, size = map(int, word.split(":"))
                path = write(folder / f"{number}.bin", content(seed, size))
        for expected in (count, 0):
            with files_opened(folder) as opened:
                assert scanned(store, folder).hashed == expected * 5000
            assert len(opened) == expected

    def test_a_new_copy_is_found_by_reading_it_alone(self, store: Store, folder: Path) -> None:
        paths = [write(folder / f"{name}.bin", content(1, SIZE)) for name in "ab"]
        assert scanned(store, folder).hashed == 2 * SIZE
        paths.append(write(folder / "c.bin", content(1, SIZE)))
        before = bytes_read()
        with files_opened(folder) as opened:
            assert scanned(store, folder).hashed == SIZE
        assert set(opened) == {os.fsencode(paths[2])}
        assert bytes_read() - before < SIZE + TAIL_SIZE + HEAD_SIZE + 400_000
        assert groups_of(scanned(store, folder)) == [[[path] for path in paths]]

    def test_quick_only_the_ends_so_that_groups_are_likely(
        self, store: Store, folder: Path
    ) -> None:
        """Models of one kind have equal heads; here the tails are equal too."""
        ends = content(8, MiB), content(9, MiB)
        large = [write(folder / f"{seed}.bin", content(seed, MiB).join(ends)) for seed in (1, 2)]
        write(folder / "other.bin", content(3, SIZE))
        small = [
            write(folder / name, content(seed, 5000))
            for name, seed in zip("abc", (1, 1, 2), strict=True)
        ]
        before = bytes_read()
        found = scanned(store, folder, is_quick=True)
        assert bytes_read() - before < 3 * (HEAD_SIZE + TAIL_SIZE) + 400_000
        assert (found.is_quick, found.hashed) == (True, 0)
        assert groups_of(found) == sorted([[[path] for path in large], [[a] for a in small[:2]]])
        likely, other = found.largest()
        assert (likely.digest, found.freeable) == ("", likely.freeable + other.freeable)
        assert likely.freeable == likely.copies[1].allocated
        with files_opened(folder) as opened:
            scanned(store, folder, is_quick=True)
        assert opened == []
        whole = scanned(store, folder)
        assert groups_of(whole) == [[[a] for a in small[:2]]], "the bytes tell"
        assert whole.hashed == 2 * SIZE + 3 * 5000

    def test_large_files_are_read_in_full_only_if_their_ends_are_equal(
        self, store: Store, folder: Path
    ) -> None:
        ends, insides = (0, SIZE - 1, SIZE - TAIL_SIZE, HEAD_SIZE - 1), (HEAD_SIZE, SIZE // 2)
        data = content(1, SIZE)
        for at in ends:
            write(folder / f"{at}.bin", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        write(folder / "other.bin", content(2, SIZE))
        before = bytes_read()
        assert scanned(store, folder).hashed == 0
        assert bytes_read() - before < 5 * (HEAD_SIZE + TAIL_SIZE) + 400_000
        assert known(store, folder) == {}
        for at in (*insides, SIZE - TAIL_SIZE - 1):
            write(folder / f"{at}.bin", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert scanned(store, folder).hashed == 3 * SIZE, "what is inside is not sampled"
        assert len(set(known(store, folder).values())) == 3
        write(folder / "copy.bin", content(2, SIZE))
        assert scanned(store, folder).hashed == 2 * SIZE
        assert known(store, folder)["copy.bin"] == digest_of(content(2, SIZE))

    def test_with_a_blob_of_that_size_a_single_file_is_read(
        self, store: Store, folder: Path
    ) -> None:
        for size, seed, hashed in ((5000, 2, 5000), (SIZE, 2, 0), (SIZE + 1, 1, SIZE + 1)):
            write(folder / f"{size}.bin", content(1, size))
            store.put_stream([content(seed, size)])
            assert scanned(store, folder).hashed == hashed, "large ones if their ends are equal"
            assert scanned(store, folder).hashed == 0

    def test_what_the_store_knows_of_its_blobs_is_not_read(
        self, store: Store, folder: Path
    ) -> None:
        first = write(folder / "a.bin", content(1, SIZE))
        adopt(store, first)
        with files_opened(folder) as opened:
            assert scanned(store, folder).hashed == 0
            os.link(first, folder / "c.bin")  # its row is not proof any more
            assert scanned(store, folder).hashed == 0
        assert opened == [], "the only blob of its size"
        second = write(folder / "b.bin", content(1, SIZE))
        found = scanned(store, folder)
        assert groups_of(found) == [[[first, folder / "c.bin"], [second]]]

    def test_what_anybody_has_hashed_before_is_not_read(self, store: Store, folder: Path) -> None:
        for name in ("a.bin", "b.bin"):
            store.digest_of(write(folder / name, content(1, 5000)))
        with files_opened(folder) as opened:
            assert scanned(store, folder).hashed == 0
        assert opened == []
        assert len(set(known(store, folder).values())) == 1

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
        old = [write(folder / f"{number}.bin", content(number, SIZE)) for number in range(4)]
        young = write(folder / "young.bin", content(1, SIZE))
        scanned(store, folder, is_quick=True)
        st = young.stat()
        number = store.catalog.filesystem_number(filesystem_id(young))
        sample = b"a racy sample..."
        row = Learned(number, signed(st.st_ino), StatKey.of(st), 0, None, sample, RACY)
        store.catalog.learn([row])
        found = scan(store, plain(folder), min_size=1)
        assert groups_of(found) == [[[old[1]], [young]]]

    @pytest.mark.parametrize("first", ["sample", "digest"])
    def test_sample_and_digest_are_kept_beside_each_other(
        self, store: Store, folder: Path, first: str
    ) -> None:
        for name in ("a", "b"):
            write(folder / f"{name}.bin", content(1, SIZE))
        scanned(store, folder, is_quick=first == "sample")
        scanned(store, folder, is_quick=first != "sample")
        with files_opened(folder) as opened:
            scanned(store, folder, is_quick=True)
            scanned(store, folder)
        assert opened == []


@pytest.mark.parametrize("is_quick", [True, False])
def test_progress_reaches_what_was_announced(store: Store, folder: Path, is_quick: bool) -> None:
    for name, seed, size in (
        ("a", 1, SIZE), ("b", 1, SIZE), ("c", 2, SIZE), ("d", 1, 5000), ("e", 2, 5000),
        ("alone", 1, 7000),
    ):  # fmt: skip
        write(folder / f"{name}.bin", content(seed, size))
    os.link(folder / "a.bin", folder / "link.bin")
    for total in (3 * SIZE + 2 * 5000, None):
        seen = Recorded()
        scanned(store, folder, is_quick=is_quick, progress=seen)
        assert {name: each.unit for name, each in seen.items()} == {
            "Looking at files": "items", **({"Comparing": "bytes"} if total else {}),
        }  # fmt: skip
        assert seen["Looking at files"].done == 7
        assert total is None or seen["Comparing"].done == seen["Comparing"].total == total
