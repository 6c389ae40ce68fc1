from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import scan_folders as scan
from smartcache.report.figures import Report, make_report
from smartcache.store.store import Store
from tests.folders.trees import SIZE, content, gguf, hf_repo, safetensors, write


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def one(tmp_path: Path) -> ModelFolder:
    (tmp_path / "one").mkdir()
    return ModelFolder(path=tmp_path / "one", program="One")


@pytest.fixture
def two(tmp_path: Path) -> ModelFolder:
    (tmp_path / "two").mkdir()
    return ModelFolder(path=tmp_path / "two")


def made(store: Store, *folders: ModelFolder) -> Report:
    return make_report(store, folders, min_size=4096)


class TestSavings:
    def test_names_of_one_file_bear_equal_parts(
        self, store: Store, one: ModelFolder, two: ModelFolder
    ) -> None:
        file = write(one.path / "a.safetensors", safetensors(1))
        os.link(file, one.path / "b.safetensors")
        os.link(file, two.path / "c.safetensors")
        report = made(store, one, two)
        rows = {row.label: row for row in report.programs}
        # Three names save two files: each name bears a third of that.
        assert report.total.saved == 2 * SIZE
        assert rows["One"].saved + rows[str(two.path)].saved == 2 * SIZE
        assert abs(rows["One"].saved - 2 * rows[str(two.path)].saved) <= 3
        assert (rows["One"].files, rows["One"].logical, rows["One"].physical) == (2, 2 * SIZE, SIZE)
        (shared,) = report.most_shared
        assert (len(shared.paths), shared.saved) == (3, 2 * SIZE)

    def test_names_outside_the_folders_save_nothing_here(
        self, store: Store, one: ModelFolder, tmp_path: Path
    ) -> None:
        os.link(write(one.path / "a.pt", content(1)), tmp_path / "outside")
        report = made(store, one)
        assert report.total.saved == 0
        assert report.most_shared == ()

    def test_of_known_duplicates_what_could_be_freed_counts_where_it_lies(
        self, store: Store, one: ModelFolder, two: ModelFolder
    ) -> None:
        write(one.path / "a.gguf", gguf(1), mtime=1_600_000_000)
        write(two.path / "b.gguf", gguf(1))
        scan(store, [one, two], min_size=4096)
        report = made(store, one, two)
        assert {row.label: row.freeable for row in report.programs} == {
            "One": 0,
            str(two.path): SIZE,
        }
        assert [(row.label, row.freeable) for row in report.kinds] == [("gguf", SIZE)]
        assert report.total.freeable == SIZE

    def test_the_most_shared_have_the_most_names(self, store: Store, one: ModelFolder) -> None:
        large = write(one.path / "large.pt", content(1, 10 * SIZE))
        os.link(large, one.path / "large2.pt")
        small = write(one.path / "small.pt", content(2))
        for number in range(3):
            os.link(small, one.path / f"small{number}.pt")
        counts = [len(each.paths) for each in made(store, one).most_shared]
        assert counts == [4, 2]


class TestKindsAndRepos:
    def test_blobs_named_by_hashes_are_told_by_their_bytes(
        self, store: Store, tmp_path: Path
    ) -> None:
        cache = tmp_path / "hub"
        hf_repo(cache, "org/a", {"x.safetensors": safetensors(1), "config.json": b"{}"})
        hf_repo(cache, "org/b", {"y.gguf": gguf(2)})
        report = made(store, ModelFolder(path=cache, program="Hugging Face"))
        kinds = {row.label: row.files for row in report.kinds}
        assert (kinds["safetensors"], kinds["gguf"]) == (1, 1)
        repos = {row.label: row for row in report.repos}
        assert repos["org/a"].logical >= SIZE
        assert repos["org/b"].files >= 1

    def test_small_files_are_told_by_their_names(self, store: Store, one: ModelFolder) -> None:
        write(one.path / "small.gguf", b"x")
        write(one.path / "small", gguf(1, 4000))
        kinds = {row.label: row.files for row in made(store, one).kinds}
        assert kinds == {"gguf": 1, "other": 1}

    def test_files_of_no_repo_are_in_no_row(self, store: Store, one: ModelFolder) -> None:
        write(one.path / "a.pt", content(1))
        assert made(store, one).repos == ()


class TestUncompared:
    def test_files_of_equal_size_are_counted_until_they_are_scanned(
        self, store: Store, one: ModelFolder
    ) -> None:
        for seed in range(3):
            write(one.path / f"{seed}.pt", content(seed))
        write(one.path / "alone.pt", content(9, SIZE + 1))
        assert made(store, one).uncompared == 3
        scan(store, [one], min_size=4096)
        assert made(store, one).uncompared == 0

    def test_nothing_is_hashed(self, store: Store, one: ModelFolder) -> None:
        for seed in range(2):
            write(one.path / f"{seed}.pt", content(1))
        made(store, one)
        assert made(store, one).total.freeable == 0


class TestAcross:
    def test_what_lies_on_two_filesystems(
        self, store: Store, one: ModelFolder, elsewhere: Path
    ) -> None:
        file = write(one.path / "a.pt", content(1))
        shutil.copy2(file, elsewhere / "b.pt")
        far = ModelFolder(path=elsewhere)
        scan(store, [one, far], min_size=4096)
        report = made(store, one, far)
        (across,) = report.across
        assert (across.size, across.elsewhere, report.elsewhere) == (SIZE, SIZE, SIZE)
        assert set(across.paths) == {file, elsewhere / "b.pt"}
