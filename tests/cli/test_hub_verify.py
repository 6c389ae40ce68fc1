from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.running import Here, Smartcache
from tests.hub.caches import commit_of, make_repo
from tests.hub_server import etag_of
from tests.store.files import OTHER, WEIGHTS, edit, snapshot

A = commit_of(1)
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "hub"
    files = {"config.json": b"{}", "m.safetensors": WEIGHTS}
    make_repo(path, files, name="models--org--a", listing=True)
    make_repo(path, {"x.bin": OTHER}, name="models--org--b")
    return path


@pytest.fixture
def damaged(cache: Path) -> Path:
    """The weights of org/a, changed in place."""
    blob = (cache / "models--org--a" / "snapshots" / A / "m.safetensors").resolve()
    edit(blob)
    return blob


def test_whole(sc: Here, cache: Path) -> None:
    done = sc("hub", "verify", "--cache-dir", cache)
    assert done.stdout == "Checked 3 files of 2 repos: 170 KB.\nNo damage was found.\n"
    assert sc("hub", "verify", "--cache-dir", cache, "-q").ids == []


def test_damage_is_listed_and_exits_with_3(sc: Here, cache: Path, damaged: Path) -> None:
    before = snapshot(cache)
    done = sc("hub", "verify", "--cache-dir", cache, code=3)
    assert f"model/org/a@{A[:12]} m.safetensors" in done.stdout
    assert "--repair" in done.stderr
    document = sc("hub", "verify", "--cache-dir", cache, "--json", code=3).json
    (mismatch,) = document["mismatches"]
    assert mismatch == {
        "kind": "mismatch", "repo": "model/org/a", "revision": A, "path": "m.safetensors",
        "blob": damaged.name, "algorithm": "sha256", "expected": damaged.name,
        "actual": etag_of("m.bin", damaged.read_bytes()), "cache_dir": str(cache),
        "file": str(cache / "models--org--a" / "snapshots" / A / "m.safetensors"),
    }  # fmt: skip
    assert sc("hub", "verify", "--cache-dir", cache, "-q", code=3).ids == ["model/org/a"]
    assert snapshot(cache) == before


@pytest.mark.usefixtures("damaged")
def test_only_the_repos_that_were_named(sc: Here, cache: Path) -> None:
    done = sc("hub", "verify", "org/b", "--cache-dir", cache)
    assert done.stdout.startswith("Checked 1 file of 1 repo")
    sc("hub", "verify", "org/a", "org/b", "--full", "--cache-dir", cache, code=3)
    assert "org/c" in sc("hub", "verify", "org/c", "--cache-dir", cache, code=1).error
    assert sc("hub", "verify", "org/b@main", "--cache-dir", cache, code=2).hint


def test_repair(program: Smartcache, cache: Path, damaged: Path, home: Path) -> None:
    words = ("hub", "verify", "--repair", "--cache-dir", cache)
    before = snapshot(cache)
    assert "Would move 1 damaged file" in program(*words, "--dry-run", code=3).stdout
    assert "not a terminal" in program(*words, code=1).error
    assert snapshot(cache) == before
    bytes_of_it = damaged.read_bytes()
    done = program(*words, "-y", code=3)
    assert "Moved 1 damaged file to bad/, removed 1 pointer." in done.stdout
    (bad,) = (home / "bad").iterdir()
    assert bad.read_bytes() == bytes_of_it
    assert not damaged.exists()
    after = program("hub", "verify", "--cache-dir", cache)
    assert "1 file: listed by the Hub, not downloaded." in after.stderr


def test_a_repair_says_whether_it_was_a_dry_run_also_where_nothing_is_damaged(
    sc: Here, cache: Path
) -> None:
    words = ("hub", "verify", "--repair", "--json", "--cache-dir", cache)
    for more, is_dry in (((), False), (("--dry-run",), True)):
        done = sc(*words, *more)
        assert not done.json["has_damage"]
        assert done.json["repair"]["dry_run"] is is_dry


def test_dry_run_is_for_repair(sc: Here, cache: Path) -> None:
    assert "--repair" in sc("hub", "verify", "-n", "--cache-dir", cache, code=2).error


def test_names_of_any_bytes(program: Smartcache, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\n.bin")
    folder = make_repo(tmp_path / "odd", {name: WEIGHTS})
    edit((folder / "snapshots" / A / name).resolve())
    done = program("hub", "verify", "--cache-dir", tmp_path / "odd", code=3)
    assert "\\xff\\n.bin" in done.stdout
    document = program("hub", "verify", "--cache-dir", tmp_path / "odd", "--json", code=3).json
    assert document["mismatches"][0]["path"] == name
