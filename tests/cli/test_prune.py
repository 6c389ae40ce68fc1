from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.api import Owner, Store
from tests.cli.running import Here, Smartcache, age
from tests.store.files import OTHER, WEIGHTS, allocated, digest_of, write

LARGE, SMALL = digest_of(WEIGHTS), digest_of(OTHER)


@pytest.fixture
def filled(sc: Here, models: Path) -> Here:
    """Two blobs that nobody holds."""
    sc("add", "--no-pin", models / "a.safetensors", models / "sub/c.gguf")
    return sc


def test_removes_what_nobody_holds_and_says_what_came_back(
    filled: Here, models: Path, home: Path
) -> None:
    freed = allocated(models / "a.safetensors") + allocated(models / "sub/c.gguf")
    document = filled("prune", "-y", "--json").json
    assert document["removed"] == 2
    assert document["freed_size"] == document["planned_size"] == freed
    assert {each["digest"] for each in document["victims"]} == {LARGE, SMALL}
    assert filled.digests() == []
    assert "Removed" not in filled("prune", "-y").stdout


def test_a_dry_run_shows_the_same_and_removes_nothing(filled: Here) -> None:
    planned = filled("prune", "--dry-run", "--json").json
    assert planned["removed"] == planned["freed_size"] == 0
    assert len(filled.digests()) == 2
    done = filled("prune", "-n")
    assert LARGE[:12] in done.stdout
    assert "Would remove 2 blobs and free" in done.stdout
    assert filled("prune", "-y", "--json").json["victims"] == planned["victims"]


def test_gc_does_the_same(filled: Here) -> None:
    assert set(filled("gc", "-y", "-q").ids) == {LARGE, SMALL}
    assert filled.digests() == []


def test_unused_for_keeps_the_younger(filled: Here, home: Path) -> None:
    age(home, SMALL, days=40)
    assert filled("prune", "-y", "-q", "--unused-for", "30d").ids == [SMALL]
    assert filled.digests() == [LARGE]


def test_max_size_removes_the_least_recently_used(filled: Here, home: Path) -> None:
    age(home, LARGE, days=1)
    assert filled("prune", "-y", "-q", "--max-size", "80KB").ids == [LARGE]
    assert filled.digests() == [SMALL]


def test_max_size_says_what_it_could_not_reach(filled: Here) -> None:
    filled("pin", LARGE)
    assert "Warning: " in filled("prune", "-y", "--max-size", "1KB").stderr


def test_empties_the_trash(filled: Here, home: Path) -> None:
    filled("rm", "-y", LARGE)
    assert LARGE in filled("prune", "-y", "-q").ids
    assert os.listdir(home / "trash") == []


def test_what_was_in_the_trash_cannot_be_undone_any_more(filled: Here) -> None:
    filled("rm", "-y", LARGE)
    filled("prune", "-y")
    assert filled("undo", "--list", "-q").ids == []


def test_bad_files_go_only_when_asked(filled: Here, home: Path) -> None:
    (home / "bad" / f"{LARGE}.1").write_bytes(b"damaged")
    filled("prune", "-y")
    assert os.listdir(home / "bad")
    filled("prune", "-y", "--bad")
    assert os.listdir(home / "bad") == []


def test_what_an_unmounted_drive_owns_is_kept_unless_dropped(
    filled: Here, home: Path, tmp_path: Path
) -> None:
    drive = tmp_path / "drive"
    (drive / "models").mkdir(parents=True)
    with Store(home) as store:
        owner = Owner(kind="folder", name="drive", path=drive / "models", root=drive)
        store.own(owner, [LARGE])
    shutil.rmtree(drive)
    done = filled("prune", "-y", "-q")
    assert done.ids == [SMALL]
    assert "Warning: folder drive is not mounted" in done.stderr
    assert filled("prune", "-y", "-q", "--drop-away").ids == [LARGE]


def test_refuses_after_a_rebuild_unless_allowed(filled: Here) -> None:
    filled("verify", "--rebuild", "-y")
    done = filled("prune", "-y", code=1)
    assert "rebuilt" in done.error
    assert "--after-rebuild" in done.hint
    assert len(filled.digests()) == 2
    assert filled("prune", "-y", "--after-rebuild", "--json").json["removed"] == 2


def test_refuses_where_it_cannot_ask(filled: Here) -> None:
    assert "not a terminal" in filled("prune", code=1).error
    assert len(filled.digests()) == 2


def test_asks_with_the_plan_at_a_terminal(filled: Here, program: Smartcache) -> None:
    done = program.at_terminal("prune", answer="y\n")
    assert LARGE[:12] in done.stdout
    assert "Remove 2 blobs for good and free" in done.stdout
    assert filled.digests() == []


def test_a_long_plan_is_cut_unless_verbose(sc: Here, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.bin", f"{n}".encode() * 1000) for n in range(30)]
    sc("add", "--no-pin", *files)
    short, whole = sc("prune", "-n"), sc("prune", "-n", "-v")
    assert short.stdout.splitlines()[21] == "... and 10 more; -v shows all"
    assert len(whole.stdout.splitlines()) == 1 + 30 + 1


def test_without_a_store_there_is_nothing_to_prune(sc: Here, home: Path) -> None:
    assert sc("prune", "-y").stdout == "Nothing to prune.\n"
    assert sc("prune", "--json").json["victims"] == []
    assert not home.exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--max-size", "big"), ("--max-size", "-1"), ("--unused-for", "5 parsecs")],
)
def test_a_bad_size_or_age_is_explained(option: str, value: str, filled: Here) -> None:
    done = filled("prune", "-y", f"{option}={value}", code=2)
    assert f"Invalid value for '{option}'" in done.error
    assert done.hint.startswith("Write ")
    assert len(filled.digests()) == 2


def test_every_volume_is_pruned(filled: Here, home: Path, elsewhere: Path) -> None:
    with Store(home) as store:
        neighbour = store.add_volume(elsewhere / ".smartcache")
        neighbour.put_stream([b"z" * 5000])
    document = filled("prune", "-y", "--json").json
    assert document["removed"] == 3
    assert {each["root"] for each in document["victims"]} == {
        str(home),
        str(elsewhere / ".smartcache"),
    }


def test_waits_for_another_process_and_says_for_what(
    filled: Here, program: Smartcache, home: Path
) -> None:
    with Store(home) as store, store.volume.guard("test"):
        waiting = program.start("prune", "-y", "--json")
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
        assert line.startswith("Waiting: ")
        assert waiting.poll() is None
    stdout, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert '"removed": 2' in stdout
