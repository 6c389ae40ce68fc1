from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.running import Here
from tests.store.files import WEIGHTS, inode_of, mode_of, write


@pytest.fixture
def linked(sc: Here, models: Path) -> Path:
    """A folder in which a and b are one read-only file since a dedup."""
    sc("dedup", models, "--min-size", "4KiB", "-y")
    assert inode_of(models / "a.safetensors") == inode_of(models / "b.safetensors")
    return models


def test_after_the_store_was_deleted_files_can_be_written_again(
    sc: Here, linked: Path, home: Path
) -> None:
    shutil.rmtree(home)
    done = sc("separate", "-r", linked, "-y")
    assert done.stdout == "Separated 2 files.\n"
    assert inode_of(linked / "a.safetensors") != inode_of(linked / "b.safetensors")
    assert mode_of(linked / "a.safetensors") == mode_of(linked / "b.safetensors") == 0o644
    assert (linked / "b.safetensors").read_bytes() == WEIGHTS
    assert not home.exists()
    assert sc("separate", "-r", linked, "-y").stdout.startswith("Nothing to separate")


def test_with_a_store_nothing_is_left_to_undo(sc: Here, linked: Path) -> None:
    done = sc("separate", linked / "a.safetensors", linked / "b.safetensors", "-y")
    assert "are held only by smartcache; 'smartcache prune' frees them." in done.stdout
    assert "nothing to undo" in sc("undo", "--list").stdout
    assert sc("prune", "-n", "--json").json["planned_size"] >= len(WEIGHTS)


def test_the_plan_says_what_it_would_do_and_need(sc: Here, linked: Path) -> None:
    done = sc("separate", "-r", linked, "--dry-run")
    assert done.stdout.splitlines()[-1] == "Would separate 2 files (needs 200 KB)."
    document = sc("separate", "-r", linked, "-n", "--json").json
    assert (document["needed_size"], document["separated"]) == (2 * len(WEIGHTS), 0)
    assert [each["what"] for each in document["files"]] == ["copy", "copy"]


def test_a_folder_is_an_error_without_r(sc: Here, linked: Path) -> None:
    done = sc("separate", linked, "-y", code=1)
    assert done.error == f"{linked} is a folder"
    assert "-r" in done.hint
    assert "nowhere" in sc("separate", "nowhere", "-y", code=1).error


def test_what_must_stay_is_named_and_the_rest_is_done(sc: Here, linked: Path) -> None:
    (linked / "link").symlink_to(linked / "b.safetensors")
    done = sc("separate", linked / "link", linked / "a.safetensors", "-y", code=1)
    assert "link stays as it is: it is a symlink" in done.stderr
    assert done.stdout == "Separated 1 file.\n"


def test_a_store_that_cannot_be_opened_is_no_obstacle(sc: Here, home: Path, models: Path) -> None:
    a = write(models / "x.bin", mode=0o444)
    os.link(a, models / "y.bin")
    home.mkdir()
    (home / "format").write_text("999\n")
    done = sc("separate", a, "-y")
    assert "without telling the store" in done.stderr
    assert mode_of(a) == 0o644
