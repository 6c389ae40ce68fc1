"""`hub ls`, `rm`, `prune`, `verify`: words, ids and figures.

What they do to HF caches is shown by tests/hub.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from smartcache.sizes import format_size
from smartcache.store.store import Store
from tests.cli.running import Here, Smartcache
from tests.hub.caches import blocks_below, commit_of, hf, make_repo
from tests.hub_server import Hub, etag_of
from tests.store.files import OTHER, WEIGHTS, allocated, edit, snapshot, write

A, B = commit_of(1), commit_of(2)
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two repos; the second has two revisions."""
    path = tmp_path / "hub"
    files = {"config.json": b"{}", "m.safetensors": WEIGHTS}
    make_repo(path, files, name="models--org--a", listing=True)
    make_repo(path, {"x.parquet": OTHER}, name="datasets--org--b", commit=A, ref="old")
    make_repo(path, {"x.parquet": OTHER + b"!"}, name="datasets--org--b", commit=B)
    return path


def weights_of(cache: Path) -> Path:
    """The blob of the weights of org/a."""
    return (cache / "models--org--a" / "snapshots" / A / "m.safetensors").resolve()


def adopt(home: Path, cache: Path) -> Path:
    """Make the weights of org/a a blob, as a download does; return the name in the cache."""
    blob = weights_of(cache)
    with Store(home) as store:
        store.adopt(blob)
    return blob


class TestLs:
    def test_columns_and_totals(self, sc: Here, cache: Path, home: Path) -> None:
        done = sc("hub", "ls", "--cache-dir", cache)
        lines = done.stdout.splitlines()
        assert lines[0].split() == ["REPO", "SIZE", "OWN", "SHARED", "ACCESSED", "REFS"]
        assert [line.split()[0] for line in lines[1:]] == ["dataset/org/b", "model/org/a"]
        assert lines[2].split()[1:3] == ["100", "KB"]
        assert "2 repos, 240 KB by name" in done.stderr
        assert not home.exists()
        adopt(home, cache)
        done = sc("hub", "ls", "--cache-dir", cache)
        assert "if you delete repos another way, run 'smartcache prune' afterwards." in done.stderr

    def test_the_document_has_bytes_and_times(self, sc: Here, cache: Path, home: Path) -> None:
        document = sc("hub", "ls", "--cache-dir", cache, "--json").json
        _, repo = document["repos"]
        folder = cache / "models--org--a"
        assert (repo["id"], repo["repo_id"], repo["repo_type"]) == ("model/org/a", "org/a", "model")
        assert (repo["size"], repo["own_size"]) == (2 + len(WEIGHTS), blocks_below(folder))
        assert (repo["shared_size"], repo["in_store_size"]) == (0, 0)
        assert (repo["revisions"], repo["refs"], repo["path"]) == ([A], ["main"], str(folder))
        assert repo["modified_at"].endswith("Z")
        assert document["allocated"] == blocks_below(cache)
        blob = adopt(home, cache)
        _, repo = sc("hub", "ls", "--cache-dir", cache, "--json").json["repos"]
        assert (repo["in_store_size"], repo["shared_size"]) == (allocated(blob), 0)

    def test_sizes_are_those_of_hf_cache_ls(self, hub: Hub, sc: Here, cache: Path) -> None:
        theirs = json.loads(hf(hub, cache, "cache", "ls", "--format", "json"))
        ours = sc("hub", "ls", "--cache-dir", cache, "--json").json["repos"]
        assert {each["repo_id"]: (each["refs"], each["size"]) for each in theirs} == {
            each["repo_id"]: (each["refs"], f"{each['size'] / 1000:.1f}K") for each in ours
        }

    def test_ids_of_repos_and_revisions_compose_with_rm(self, sc: Here, cache: Path) -> None:
        here = ("--cache-dir", cache)
        done = sc("hub", "ls", *here, "--revisions")
        assert [line.split()[1] for line in done.stdout.splitlines()[1:]] == [
            min(A, B)[:12], max(A, B)[:12], A[:12],
        ]  # fmt: skip
        rows = sc("hub", "ls", *here, "--revisions", "--json").json["revisions"]
        refs = {row["revision"]: row["refs"] for row in rows if row["repo_id"] == "org/b"}
        assert refs == {A: ["old"], B: ["main"]}
        assert sc("hub", "ls", *here, "-q").ids == ["dataset/org/b", "model/org/a"]
        ids = sc("hub", "ls", *here, "-q", "--revisions").ids
        assert sorted(ids) == sorted([f"dataset/org/b@{A}", B, f"model/org/a@{A}"])
        sc("hub", "rm", *ids, *here, "-y")
        assert sc("hub", "ls", *here, "-q").ids == []

    def test_filters_and_orders(self, sc: Here, cache: Path) -> None:
        a, b = "model/org/a", "dataset/org/b"
        expected = {
            "--filter size>120KB": [b], "--filter size<=120KB": [a], "--filter own>1GB": [],
            "--filter shared=0": [b, a], "--filter type=dataset": [b],
            "--filter type!=dataset": [a], "--filter refs=old": [b], "--filter modified>1h": [],
            "--filter accessed<1h": [b, a], "--filter used<1h": [b, a], "--filter used>1h": [],
            "--sort size:asc": [a, b], "--sort own": [b, a], "--sort name:desc --limit 1": [a],
        }  # fmt: skip
        ls = ("hub", "ls", "--cache-dir", cache)
        assert {line: sc(*ls, "-q", *line.split()).ids for line in expected} == expected
        assert sc(*ls, "-q", "--sort", "used").ids == sc(*ls, "-q", "--sort", "accessed").ids
        for line in ("--filter size", "--filter size>x", "--sort x"):
            assert sc(*ls, *line.split(), code=2).hint.startswith("Write "), line

    def test_the_default_cache_and_known_ones(self, program: Smartcache, cache: Path) -> None:
        assert "There is no HF cache at" in program("hub", "ls").stderr
        other = Path.home() / ".cache" / "huggingface" / "hub"
        make_repo(other, {"m.bin": WEIGHTS}, name="models--org--home")
        assert program("hub", "ls", "-q").ids == ["model/org/home"]
        program("folders", "add", cache)
        program("scan")
        assert program("hub", "ls", "-q").ids == ["dataset/org/b", "model/org/a", "model/org/home"]
        assert "CACHE" in program("hub", "ls").stdout.splitlines()[0]
        nowhere = cache / "nowhere"
        error = program("hub", "ls", "--cache-dir", nowhere, code=1).error
        assert error == f"There is no HF cache at {nowhere}"

    def test_unfinished_downloads_and_odd_names(self, program: Smartcache, tmp_path: Path) -> None:
        folder = make_repo(
            tmp_path / "hub", {"a.bin": WEIGHTS}, name=os.fsdecode(b"models--\xff--n")
        )
        write(folder / "blobs" / "x.incomplete")
        ls = ("hub", "ls", "--cache-dir", tmp_path / "hub")
        done = program(*ls)
        assert "model/\\xff/n" in done.stdout
        assert "1 download (100 KB) not finished." in done.stderr
        assert os.fsencode(program(*ls, "-q").stdout) == b"model/\xff/n\n"
        assert program(*ls, "--json").json["repos"]


class TestRm:
    def test_says_what_it_freed(self, sc: Here, cache: Path, home: Path) -> None:
        taken = blocks_below(cache / "models--org--a")
        done = sc("hub", "rm", "org/a", "--cache-dir", cache, "-y", "--json").json
        assert (done["planned_size"], done["freed_size"]) == (taken, taken)
        assert os.listdir(cache) == ["datasets--org--b"]
        assert not home.exists()

    def test_blobs_of_the_store_go_too_unless_kept(self, sc: Here, cache: Path, home: Path) -> None:
        blob = adopt(home, cache)
        size, taken = allocated(blob), blocks_below(cache / "models--org--a")
        words = ("hub", "rm", "org/a", "--cache-dir", cache)
        kept = sc(*words, "-n", "--keep-blobs").stdout
        assert "stay: held by the store (--keep-blobs)" in kept
        assert "with 1 blob of the store" in sc(*words, "-n").stdout
        done = sc(*words, "-y", "--json").json
        assert (done["planned_files_size"], done["planned_blobs_size"]) == (taken - size, size)
        assert (done["freed_size"], done["blobs_removed"]) == (taken, 1)
        assert sc.digests() == []

    def test_one_revision_or_the_repo(self, sc: Here, cache: Path) -> None:
        here = ("--cache-dir", cache)
        done = sc("hub", "rm", "org/a", "datasets/org/b@old", *here, "--dry-run")
        assert "Would remove 1 repo and 1 revision" in done.stdout
        done = sc("hub", "rm", "datasets/org/b", "datasets/org/b@old", *here, "--dry-run")
        assert "Would remove 1 repo and free" in done.stdout
        done = sc("hub", "rm", f"dataset/org/b@{A[:8]}", *here, "-y")
        assert done.stdout.startswith("Removed 1 revision, freed ")
        assert os.listdir(cache / "datasets--org--b" / "snapshots") == [B]

    def test_what_is_not_there_is_an_error_and_nothing_goes(self, sc: Here, cache: Path) -> None:
        before = snapshot(cache)
        for word, error, hint in (
            ("org/aa", "No HF cache here has model/org/aa", "Did you mean model/org/a"),
            ("dataset/org/a", "No HF cache here has dataset/org/a", "Did you mean "),
            ("datasets/org/b@nope", "'nope' is not a revision of dataset/org/b", "It has"),
            ("f" * 40, f"No HF cache here has the revision {'f' * 40}", "hub ls"),
            (A, f"{A} is a revision of several repos", f"model/org/a@{A[:12]}"),
        ):
            done = sc("hub", "rm", "org/a", word, "--cache-dir", cache, "-y", code=1)
            assert done.error == error
            assert hint in done.hint, word
        assert sc("hub", "rm", code=2).error
        assert snapshot(cache) == before

    def test_a_repo_in_two_caches_goes_from_both(
        self, sc: Here, cache: Path, tmp_path: Path
    ) -> None:
        make_repo(tmp_path / "two", {"m.safetensors": WEIGHTS}, name="models--org--a")
        caches = ("--cache-dir", cache, "--cache-dir", tmp_path / "two")
        assert len(sc("hub", "rm", "org/a", *caches, "-y", "--json").json["removals"]) == 2
        assert os.listdir(tmp_path / "two") == []


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
        revision, partial = sc("hub", "prune", "-n", "-q").ids
        assert revision == f"model/org/name@{A}"
        assert partial.endswith(".incomplete")
        before = blocks_below(cache)
        done = sc("hub", "prune", "-y", "--json").json
        assert done["planned_size"] == done["freed_size"] == before - blocks_below(cache)
        assert done["freed_size"] >= len(WEIGHTS) + len(OTHER)
        assert os.listdir(folder / "snapshots") == [B]
        assert len(os.listdir(folder / "blobs")) == 2
        assert (folder / "snapshots" / B / "same").read_bytes() == OTHER
        assert sc("hub", "prune", "-y").stdout.startswith("Nothing to prune")

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


class TestVerify:
    def test_damage_is_listed_and_exits_with_3(self, sc: Here, cache: Path) -> None:
        words = ("hub", "verify", "--cache-dir", cache)
        done = sc(*words)
        assert done.stdout == "Checked 4 files of 2 repos: 240 KB.\nNo damage was found.\n"
        for more, is_dry in (((), False), (("--dry-run",), True)):
            document = sc(*words, "--repair", "--json", *more).json
            assert not document["has_damage"]
            assert document["repair"]["dry_run"] is is_dry
        damaged = weights_of(cache)
        edit(damaged)
        before = snapshot(cache)
        done = sc(*words, code=3)
        assert f"model/org/a@{A[:12]} m.safetensors" in done.stdout
        assert "--repair" in done.stderr
        (mismatch,) = sc(*words, "--json", code=3).json["mismatches"]
        assert mismatch == {
            "kind": "mismatch", "repo": "model/org/a", "revision": A, "path": "m.safetensors",
            "blob": damaged.name, "algorithm": "sha256", "expected": damaged.name,
            "actual": etag_of("m.bin", damaged.read_bytes()), "cache_dir": str(cache),
            "file": str(cache / "models--org--a" / "snapshots" / A / "m.safetensors"),
        }  # fmt: skip
        assert sc(*words, "-q", code=3).ids == ["model/org/a"]
        done = sc(*words, "datasets/org/b")  # only the repos that are named
        assert done.stdout.startswith("Checked 2 files of 1 repo")
        sc(*words, "org/a", "datasets/org/b", "--full", code=3)
        assert snapshot(cache) == before
        assert "org/c" in sc(*words, "org/c", code=1).error
        assert sc(*words, "datasets/org/b@main", code=2).hint
        assert "--repair" in sc(*words, "-n", code=2).error

    def test_repair(self, program: Smartcache, cache: Path, home: Path) -> None:
        damaged = weights_of(cache)
        edit(damaged)
        bytes_of_it = damaged.read_bytes()
        done = program("hub", "verify", "--repair", "--cache-dir", cache, "-y", code=3)
        assert "Moved 1 damaged file to bad/, removed 1 pointer." in done.stdout
        (bad,) = (home / "bad").iterdir()
        assert bad.read_bytes() == bytes_of_it
        assert not damaged.exists()
        after = program("hub", "verify", "--cache-dir", cache)
        assert "1 file: listed by the Hub, not downloaded." in after.stderr

    def test_a_repair_that_is_not_wanted_changes_nothing(self, sc: Here, cache: Path) -> None:
        edit(weights_of(cache))
        before = snapshot(cache)
        words = ("hub", "verify", "--repair", "--cache-dir", cache)
        assert "not a terminal" in sc(*words, code=1).error
        assert snapshot(cache) == before

    def test_without_a_store_it_finds_the_same_and_makes_none(
        self, sc: Here, cache: Path, home: Path
    ) -> None:
        words = ("hub", "verify", "--cache-dir", cache)
        assert sc(*words).stdout.startswith("Checked 4 files of 2 repos: 240 KB.")
        damaged = weights_of(cache)
        edit(damaged)
        document = sc(*words, "--json", code=3).json
        assert [each["blob"] for each in document["mismatches"]] == [damaged.name]
        assert document["root"] is None
        assert not home.exists()

    @pytest.mark.parametrize("words", [(), ("--full",), ("--repair", "-n")])
    def test_to_look_changes_nothing_in_the_cache(
        self, sc: Here, cache: Path, home: Path, words: tuple[str, ...]
    ) -> None:
        """Not even what a killed download has left half-made, for which --repair is."""
        half_made = cache / "models--org--a" / "blobs" / f"{'a' * 64}.12345678.incomplete"
        write(half_made, OTHER)
        edit(weights_of(cache))
        before = snapshot(cache)
        sc("hub", "verify", "--cache-dir", cache, *words, code=3)
        assert snapshot(cache) == before
        assert not home.exists()
        sc("hub", "verify", "--cache-dir", cache, "--repair", "-y", code=3)
        assert not half_made.exists()

    def test_names_of_any_bytes(self, program: Smartcache, tmp_path: Path) -> None:
        name = os.fsdecode(b"\xff\n.bin")
        folder = make_repo(tmp_path / "odd", {name: WEIGHTS})
        edit((folder / "snapshots" / A / name).resolve())
        words = ("hub", "verify", "--cache-dir", tmp_path / "odd")
        assert "\\xff\\n.bin" in program(*words, code=3).stdout
        assert program(*words, "--json", code=3).json["mismatches"][0]["path"] == name


@pytest.mark.parametrize(
    "words",
    [
        ("import", "{bundle}", "--cache-dir", "other"),
        ("export", "org/a", "out.tar"),
        ("rm", "org/a"),
        ("prune",),
        ("verify", "--repair"),
    ],
)
def test_a_dry_run_without_a_store_leaves_nothing(
    sc: Here, cache: Path, home: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    given = ("--cache-dir", cache)
    sc("hub", "export", "org/a", "bundle.tar", *given)
    assert not home.exists()
    before = snapshot(tmp_path)
    words = tuple(word.format(bundle=tmp_path / "bundle.tar") for word in words)
    done = sc("hub", *words, *(() if "--cache-dir" in words else given), "-n")
    assert done.stdout
    assert snapshot(tmp_path) == before
