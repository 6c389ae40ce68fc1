from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.api import Owner, Store, format_size
from tests.cli.running import Here, Smartcache
from tests.hub.caches import blocks_below, commit_of, make_repo
from tests.store.files import OTHER, WEIGHTS, allocated, snapshot, write

A, B = commit_of(1), commit_of(2)
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "hub"
    make_repo(path, {"m.safetensors": WEIGHTS}, name="models--org--a")
    make_repo(path, {"x.bin": OTHER}, name="models--org--b", commit=A, ref="old")
    make_repo(path, {"x.bin": OTHER + b"!"}, name="models--org--b", commit=B)
    return path


def adopt(home: Path, cache: Path) -> Path:
    """Make the weights of org/a a blob, as a download does; return the name in the cache."""
    folder = cache / "models--org--a" / "snapshots" / A
    blob = (folder / "m.safetensors").resolve()
    with Store(home) as store:
        digest = store.adopt(blob).digest
        owner = Owner(kind="repo", name=f"model/org/a@{A}", path=folder, root=cache)
        store.own(owner, [digest])
    return blob


def test_says_what_it_freed(sc: Here, cache: Path, home: Path) -> None:
    taken = blocks_below(cache / "models--org--a")
    done = sc("hub", "rm", "org/a", "--cache-dir", cache, "-y", "--json").json
    assert (done["planned_size"], done["freed_size"]) == (taken, taken)
    assert os.listdir(cache) == ["models--org--b"]
    assert not home.exists()


def test_blobs_of_the_store_go_too_and_both_numbers_are_told(
    sc: Here, cache: Path, home: Path
) -> None:
    blob = adopt(home, cache)
    size, taken = allocated(blob), blocks_below(cache / "models--org--a")
    planned = sc("hub", "rm", "org/a", "--cache-dir", cache, "-n")
    assert "with 1 blob of the store" in planned.stdout
    done = sc("hub", "rm", "org/a", "--cache-dir", cache, "-y", "--json").json
    assert (done["planned_files_size"], done["planned_blobs_size"]) == (taken - size, size)
    assert (done["freed_size"], done["blobs_removed"]) == (taken, 1)
    assert sc.digests() == []


def test_kept_blobs(sc: Here, cache: Path, home: Path) -> None:
    adopt(home, cache)
    done = sc("hub", "rm", "org/a", "--cache-dir", cache, "-y", "--keep-blobs")
    assert "stay: held by the store (--keep-blobs)" in done.stdout
    assert len(sc.digests()) == 1


def test_dry_run_changes_nothing(sc: Here, cache: Path) -> None:
    before = snapshot(cache)
    done = sc("hub", "rm", "org/a", "org/b@old", "--cache-dir", cache, "--dry-run")
    assert "Would remove 1 repo and 1 revision" in done.stdout
    assert snapshot(cache) == before
    assert sc("hub", "rm", "org/b@old", "--cache-dir", cache, "-n", "-q").ids == [
        f"model/org/b@{A}"
    ]


def test_it_asks(program: Smartcache, cache: Path) -> None:
    words = ("hub", "rm", "org/a", "--cache-dir", cache)
    before = snapshot(cache)
    assert "not a terminal" in program(*words, code=1).error
    refused = program.at_terminal(*words, answer="n\n")
    assert (refused.code, snapshot(cache)) == (1, before)
    done = program.at_terminal(*words, answer="y\n")
    assert "Remove 1 repo for good and free" in done.stdout
    assert (done.code, os.listdir(cache)) == (0, ["models--org--b"])


def test_one_revision(sc: Here, cache: Path) -> None:
    done = sc("hub", "rm", f"org/b@{A[:8]}", "--cache-dir", cache, "-y")
    assert done.stdout.startswith("Removed 1 revision, freed ")
    assert os.listdir(cache / "models--org--b" / "snapshots") == [B]


def test_the_repo_and_one_of_its_revisions(sc: Here, cache: Path) -> None:
    done = sc("hub", "rm", "org/b", "org/b@old", "--cache-dir", cache, "-y")
    assert done.stdout.startswith("Removed 1 repo, ")


@pytest.mark.parametrize(
    ("word", "error", "hint"),
    [
        ("org/aa", "No HF cache here has model/org/aa", "Did you mean model/org/a"),
        ("dataset/org/a", "No HF cache here has dataset/org/a", "Did you mean model/org/a?"),
        ("org/b@nope", "'nope' is not a revision of model/org/b", "It has"),
        ("f" * 40, f"No HF cache here has the revision {'f' * 40}", "hub ls"),
        (A, f"{A} is a revision of several repos", f"model/org/a@{A[:12]}"),
    ],
)
def test_what_is_not_there_is_an_error_and_nothing_goes(
    word: str, error: str, hint: str, sc: Here, cache: Path
) -> None:
    before = snapshot(cache)
    done = sc("hub", "rm", "org/a", word, "--cache-dir", cache, "-y", code=1)
    assert done.error == error
    assert hint in done.hint
    assert snapshot(cache) == before


def test_a_repo_in_two_caches_goes_from_both(sc: Here, cache: Path, tmp_path: Path) -> None:
    make_repo(tmp_path / "two", {"m.safetensors": WEIGHTS}, name="models--org--a")
    caches = ("--cache-dir", cache, "--cache-dir", tmp_path / "two")
    assert len(sc("hub", "rm", "org/a", *caches, "-n", "--json").json["removals"]) == 2
    sc("hub", "rm", "org/a", *caches, "-y")
    assert os.listdir(tmp_path / "two") == []


def test_nothing_named_is_bad_usage(sc: Here) -> None:
    assert sc("hub", "rm", code=2).error


class TestPrune:
    @pytest.fixture
    def cache(self, sc: Here) -> Path:
        """An HF cache that is known: a repo whose branch has moved on, and a killed download."""
        path = Path.home() / ".cache/huggingface/hub"
        make_repo(path, {"m.bin": WEIGHTS, "same": OTHER}, commit=A, ref="")
        folder = make_repo(path, {"m.bin": WEIGHTS + b"!", "same": OTHER}, commit=B)
        for pointer in (folder / "snapshots" / A).iterdir():
            os.utime(pointer, (1_600_000_000,) * 2, follow_symlinks=False)
        write(folder / "blobs" / f"{'a' * 64}.12345678.incomplete", OTHER)
        sc("scan", "-q")
        return path

    def test_what_no_ref_points_to_and_what_is_partial_goes(self, sc: Here, cache: Path) -> None:
        folder = cache / "models--org--name"
        planned = sc("hub", "prune", "--dry-run")
        assert "Would remove 1 revision and 1 partial download and free " in planned.stdout
        before = blocks_below(cache)
        done = sc("hub", "prune", "-y", "--json").json
        assert done["planned_size"] == done["freed_size"] == before - blocks_below(cache)
        assert done["freed_size"] >= len(WEIGHTS) + len(OTHER)
        assert os.listdir(folder / "snapshots") == [B]
        assert len(os.listdir(folder / "blobs")) == 2
        assert (folder / "snapshots" / B / "same").read_bytes() == OTHER
        assert sc("hub", "prune", "-y").stdout.startswith("Nothing to prune")

    def test_a_dry_run_changes_nothing_and_quiet_names_what_would_go(
        self, sc: Here, cache: Path
    ) -> None:
        before = snapshot(cache)
        revision, partial = sc("hub", "prune", "-n", "-q").ids
        assert revision == f"model/org/name@{A}"
        assert partial.endswith(".incomplete")
        assert snapshot(cache) == before

    def test_it_asks(self, program: Smartcache, cache: Path) -> None:
        before = snapshot(cache)
        done = program.at_terminal("hub", "prune", answer="n\n")
        assert "Remove 1 revision and 1 partial download for good and free" in done.stdout
        assert (done.code, snapshot(cache)) == (1, before)

    @pytest.mark.usefixtures("cache")
    def test_prune_names_it_with_what_it_would_free(self, sc: Here) -> None:
        sc("add", "--no-pin", write(Path("x.bin"), WEIGHTS))
        size = sc("hub", "prune", "-n", "--json").json["planned_size"]
        words = "more: revisions that no ref points to, and partial downloads."
        for done in (sc("prune", "-n"), sc("prune", "-y"), sc("prune")):
            text = " ".join(done.stdout.split())
            assert f"'smartcache hub prune' would free {format_size(size)} {words}" in text
        sc("hub", "prune", "-y")
        assert "hub prune" not in sc("prune").stdout

    def test_only_what_was_not_read_for_long(self, sc: Here, cache: Path) -> None:
        for blob in (cache / "models--org--name" / "blobs").iterdir():
            os.utime(blob)
        done = sc("hub", "prune", "--unused-for", "1d", "-n", "--json").json
        assert [each["revisions"] for each in done["removals"]] == [[]]
