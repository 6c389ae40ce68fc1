"""What goes and what stays is shown by tests/store/test_prune.py; here, what is said and asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smartcache.store.store import Store
from tests.cli.running import PATIENCE, Here, Smartcache, age
from tests.store.files import OTHER, WEIGHTS, allocated, digest_of, write

LARGE, SMALL = digest_of(WEIGHTS), digest_of(OTHER)


@pytest.fixture
def filled(sc: Here, models: Path) -> Here:
    """Two blobs that only the store has."""
    sc("add", "--no-pin", models / "a.safetensors", models / "sub/c.gguf")
    return sc


def test_what_was_planned_goes_and_what_came_back_is_said(filled: Here, models: Path) -> None:
    freed = allocated(models / "a.safetensors") + allocated(models / "sub/c.gguf")
    done = filled("prune", "-n")
    assert LARGE[:12] in done.stdout
    assert "Would remove 2 blobs and free" in done.stdout
    planned = filled("prune", "--dry-run", "--json").json
    assert (planned["removed"], planned["freed_size"]) == (0, 0)
    document = filled("prune", "-y", "--json").json
    assert document["victims"] == planned["victims"]
    assert {each["digest"] for each in document["victims"]} == {LARGE, SMALL}
    assert (document["removed"], document["freed_size"]) == (2, freed)
    assert document["planned_size"] == freed
    assert filled.digests() == []
    assert "Removed" not in filled("prune", "-y").stdout


def test_age_and_size_limit_it(filled: Here, home: Path) -> None:
    age(home, SMALL, days=40)
    assert filled("prune", "-n", "-q", "--unused-for", "30d").ids == [SMALL]
    age(home, LARGE, days=50)
    assert filled("prune", "-y", "-q", "--max-size", "80KB").ids == [LARGE]
    filled("pin", SMALL)
    assert "Warning: " in filled("prune", "-y", "--max-size", "1KB").stderr
    for option, value in (("--max-size", "big"), ("--max-size", "-1"), ("--unused-for", "5 eons")):
        done = filled("prune", "-y", f"{option}={value}", code=2)
        assert f"Invalid value for '{option}'" in done.error
        assert done.hint.startswith("Write ")
    assert filled.digests() == [SMALL]


def test_bad_files_go_only_when_asked(filled: Here, home: Path) -> None:
    (home / "bad" / f"{LARGE}.1").write_bytes(b"damaged")
    assert LARGE in filled("prune", "-y", "-q").ids
    assert os.listdir(home / "bad")
    filled("prune", "-y", "--bad")
    assert os.listdir(home / "bad") == []


def test_a_long_plan_is_cut_unless_verbose(sc: Here, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.bin", f"{n}".encode() * 1000) for n in range(30)]
    sc("add", "--no-pin", *files)
    short, whole = sc("prune", "-n"), sc("prune", "-n", "-v")
    assert short.stdout.splitlines()[21] == "... and 10 more; -v shows all"
    assert len(whole.stdout.splitlines()) == 1 + 30 + 1


def test_every_pool_is_pruned(filled: Here, home: Path, elsewhere: Path) -> None:
    with Store(home) as store:
        pool = store.add_pool(elsewhere / ".smartcache")
        store.put_stream([b"z" * 5000], pool=pool)
    document = filled("prune", "-y", "--json").json
    assert document["removed"] == 3
    roots = {str(home), str(elsewhere / ".smartcache")}
    assert {each["pool"] for each in document["victims"]} == roots


@pytest.mark.usefixtures("filled")
def test_waits_for_another_process_and_says_for_what(program: Smartcache, home: Path) -> None:
    with Store(home) as store, store.locked("test"):
        waiting = program.start("prune", "-y", "--json")
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("Waiting: ")
        assert waiting.poll() is None
    stdout, _ = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 0
    assert '"removed": 2' in stdout
