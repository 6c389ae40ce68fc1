from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.api import Store
from tests.cli.running import Here, Smartcache
from tests.hub.caches import blocks_below, commit_of, hf, make_repo
from tests.hub_server import Hub
from tests.store.files import OTHER, WEIGHTS, allocated, write

A, B = commit_of(1), commit_of(2)
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two repos; the second has two revisions."""
    path = tmp_path / "hub"
    make_repo(path, {"config.json": b"{}", "m.safetensors": WEIGHTS}, name="models--org--a")
    make_repo(path, {"x.parquet": OTHER}, name="datasets--org--b", commit=A, ref="old")
    make_repo(path, {"x.parquet": OTHER + b"!"}, name="datasets--org--b", commit=B)
    return path


def test_columns_and_totals(sc: Here, cache: Path, home: Path) -> None:
    done = sc("hub", "ls", "--cache-dir", cache)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["REPO", "SIZE", "OWN", "SHARED", "ACCESSED", "REFS"]
    assert [line.split()[0] for line in lines[1:]] == ["dataset/org/b", "model/org/a"]
    assert lines[2].split()[1:3] == ["100", "KB"]
    assert "2 repos, 240 KB by name" in done.stderr
    assert not home.exists()


def test_the_document_has_bytes_and_times(sc: Here, cache: Path) -> None:
    document = sc("hub", "ls", "--cache-dir", cache, "--json").json
    _, repo = document["repos"]
    folder = cache / "models--org--a"
    assert (repo["id"], repo["repo_id"], repo["repo_type"]) == ("model/org/a", "org/a", "model")
    assert (repo["size"], repo["own_size"]) == (2 + len(WEIGHTS), blocks_below(folder))
    assert (repo["shared_size"], repo["in_store_size"]) == (0, 0)
    assert (repo["revisions"], repo["refs"], repo["path"]) == ([A], ["main"], str(folder))
    assert repo["modified_at"].endswith("Z")
    assert document["allocated"] == blocks_below(cache)


def test_sizes_are_those_of_hf_cache_ls(hub: Hub, sc: Here, cache: Path) -> None:
    theirs = json.loads(hf(hub, cache, "cache", "ls", "--format", "json"))
    ours = sc("hub", "ls", "--cache-dir", cache, "--json").json["repos"]
    assert {each["repo_id"]: each["refs"] for each in theirs} == {
        each["repo_id"]: each["refs"] for each in ours
    }
    sizes = {each["repo_id"]: f"{each['size'] / 1000:.1f}K" for each in ours}
    assert {each["repo_id"]: each["size"] for each in theirs} == sizes


def test_what_the_store_has_too_is_told(sc: Here, cache: Path, home: Path) -> None:
    blob = (cache / "models--org--a" / "snapshots" / A / "m.safetensors").resolve()
    with Store(home) as store:
        store.adopt(blob)
    done = sc("hub", "ls", "--cache-dir", cache)
    assert "if you delete repos another way, run 'smartcache prune' afterwards." in done.stderr
    _, repo = sc("hub", "ls", "--cache-dir", cache, "--json").json["repos"]
    assert (repo["in_store_size"], repo["shared_size"]) == (allocated(blob), 0)


def test_revisions(sc: Here, cache: Path) -> None:
    done = sc("hub", "ls", "--cache-dir", cache, "--revisions")
    assert [line.split()[1] for line in done.stdout.splitlines()[1:]] == [
        min(A, B)[:12], max(A, B)[:12], A[:12],
    ]  # fmt: skip
    rows = sc("hub", "ls", "--cache-dir", cache, "--revisions", "--json").json["revisions"]
    assert {row["revision"]: row["refs"] for row in rows if row["repo_id"] == "org/b"} == {
        A: ["old"], B: ["main"],
    }  # fmt: skip


def test_ids_compose_with_rm(sc: Here, cache: Path) -> None:
    here = ("--cache-dir", cache)
    assert sc("hub", "ls", *here, "-q").ids == ["dataset/org/b", "model/org/a"]
    ids = sc("hub", "ls", *here, "-q", "--revisions").ids
    assert sorted(ids) == sorted([f"dataset/org/b@{A}", B, f"model/org/a@{A}"])
    sc("hub", "rm", *ids, *here, "-y")
    assert sc("hub", "ls", *here, "-q").ids == []
    assert sc("hub", "ls", *here).stdout == "No repo is cached.\n"


@pytest.mark.parametrize(
    ("test", "ids"),
    [
        ("size>120KB", ["dataset/org/b"]),
        ("size<=120KB", ["model/org/a"]),
        ("own>1GB", []),
        ("shared=0", ["dataset/org/b", "model/org/a"]),
        ("type=dataset", ["dataset/org/b"]),
        ("type!=dataset", ["model/org/a"]),
        ("refs=old", ["dataset/org/b"]),
        ("modified>1h", []),
        ("accessed<1h", ["dataset/org/b", "model/org/a"]),
        ("used<1h", ["dataset/org/b", "model/org/a"]),
        ("used>1h", []),
    ],
)
def test_filters(test: str, ids: list[str], sc: Here, cache: Path) -> None:
    assert sc("hub", "ls", "--cache-dir", cache, "-q", "--filter", test).ids == ids


def test_order_and_limit(sc: Here, cache: Path) -> None:
    ls = ("hub", "ls", "--cache-dir", cache, "-q")
    assert sc(*ls, "--sort", "size:asc").ids == ["model/org/a", "dataset/org/b"]
    assert sc(*ls, "--sort", "own").ids == ["dataset/org/b", "model/org/a"]
    assert sc(*ls, "--sort", "used").ids == sc(*ls, "--sort", "accessed").ids
    assert sc(*ls, "--sort", "name:desc", "--limit", "1").ids == ["model/org/a"]


@pytest.mark.parametrize("words", [("--filter", "size"), ("--filter", "size>x"), ("--sort", "x")])
def test_bad_words_are_bad_usage(words: tuple[str, str], sc: Here, cache: Path) -> None:
    done = sc("hub", "ls", "--cache-dir", cache, *words, code=2)
    assert done.error
    assert done.hint.startswith("Write ")


class TestCaches:
    def test_the_default_one_and_known_ones(self, program: Smartcache, cache: Path) -> None:
        other = Path.home() / ".cache" / "huggingface" / "hub"
        make_repo(other, {"m.bin": WEIGHTS}, name="models--org--home")
        assert program("hub", "ls", "-q").ids == ["model/org/home"]
        program("folders", "add", cache)
        program("scan")
        assert program("hub", "ls", "-q").ids == ["dataset/org/b", "model/org/a", "model/org/home"]
        assert "CACHE" in program("hub", "ls").stdout.splitlines()[0]

    def test_none(self, program: Smartcache) -> None:
        done = program("hub", "ls")
        assert done.stdout == "No repo is cached.\n"
        assert "There is no HF cache at" in done.stderr

    def test_one_that_was_named_must_be_there(self, sc: Here, tmp_path: Path) -> None:
        done = sc("hub", "ls", "--cache-dir", tmp_path / "nowhere", code=1)
        assert done.error == f"There is no HF cache at {tmp_path / 'nowhere'}"

    def test_unfinished_downloads_and_odd_names(self, program: Smartcache, tmp_path: Path) -> None:
        folder = make_repo(
            tmp_path / "hub", {"a.bin": WEIGHTS}, name=os.fsdecode(b"models--\xff--n")
        )
        write(folder / "blobs" / "x.incomplete")
        done = program("hub", "ls", "--cache-dir", tmp_path / "hub")
        assert "model/\\xff/n" in done.stdout
        assert "1 download (100 KB) not finished." in done.stderr
        quiet = program("hub", "ls", "--cache-dir", tmp_path / "hub", "-q")
        assert os.fsencode(quiet.stdout) == b"model/\xff/n\n"
        assert program("hub", "ls", "--cache-dir", tmp_path / "hub", "--json").json["repos"]
