"""What is restored is shown by tests/store/test_undo.py; here, how it is said what to undo."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from smartcache.store.store import Store
from tests.cli.running import Here, Smartcache
from tests.store.files import WEIGHTS, digest_of, inode_of, mode_of, snapshot, write


@pytest.fixture
def changed(sc: Here, models: Path) -> Here:
    """Two entries of the history: a file adopted, then a link made."""
    sc("add", "--adopt", models / "sub/c.gguf")
    sc("add", models / "a.safetensors")
    sc("link", digest_of(WEIGHTS), models / "l.pt", "--kind", "hardlink")
    return sc


def test_the_list_has_ids_times_and_sizes_and_says_how_to_go_on(
    changed: Here, models: Path
) -> None:
    first, second = changed("undo", "--list", "--json").json["history"]
    assert (first["hows"], first["size"]) == (["become"], 70_000)
    assert second["at"].endswith("Z")
    done = changed("undo")
    assert done.stdout == changed("undo", "--list").stdout
    assert f"add --adopt {models}/sub/c.gguf" in done.stdout
    assert "--last or --all" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["ID", "WHEN", "FILES", "SIZE", "WHAT"]
    assert lines[2].startswith(second["id"])
    assert changed("undo", "--list", "-q").ids == [first["id"], second["id"]]


def test_the_last_entry(changed: Here, models: Path) -> None:
    assert changed("undo", "--last", "-y").stdout == "Undid 1 of 1 change.\n"
    assert not (models / "l.pt").exists()
    assert len(changed("undo", "--list", "-q").ids) == 1


def test_an_entry_by_its_id_or_the_beginning_of_it(changed: Here, models: Path) -> None:
    first, second = changed("undo", "--list", "-q").ids
    assert changed("undo", first, "-y", "-q").ids == [first]
    assert (models / "sub/c.gguf").stat().st_mode & 0o200
    assert changed("undo", "-q").ids == [second]
    assert changed("undo", second[:7], "-y", "-q").ids == [second]


def test_a_beginning_of_several_ids_is_an_error_that_names_them(changed: Here, home: Path) -> None:
    first, second = changed("undo", "-q").ids
    with closing(sqlite3.connect(home / "journal.sqlite3")) as journal, journal:
        journal.execute("UPDATE changes SET batch = 'aa' || substr(batch, 3)")
    done = changed("undo", "aa", "-y", code=2)
    assert done.error.endswith("'aa' is the beginning of several IDs")
    assert f"aa{first[2:]}" in done.hint
    assert f"aa{second[2:]}" in done.hint
    assert "A path is empty" in changed("undo", "", "-y", code=2).error
    done = changed("undo", "00000000", "-y", code=1)
    assert done.error == "There is no change 00000000 to undo"
    assert "--list" in done.hint
    done = changed("undo", f"aa{first[2:]}", "models", "-y", code=2)
    assert "IDs and paths exclude each other" in done.error
    assert len(changed("undo", "-q").ids) == 2


def test_all(sc: Here, models: Path) -> None:
    before = snapshot(models)
    sc("add", "--adopt", "-r", models)
    sc("link", digest_of(WEIGHTS), models / "x.pt")
    done = sc("undo", "--all", "--dry-run")
    assert f"{models}/sub/c.gguf" in done.stdout
    assert "Would undo 3 changes" in done.stdout
    document = sc("undo", "--all", "-y", "--json").json
    assert document["undone"] == len(document["changes"]) == 3
    assert snapshot(models) == before


def test_a_file_changed_since_is_left_alone_and_named(changed: Here, models: Path) -> None:
    (models / "l.pt").unlink()
    write(models / "l.pt", b"mine now")
    done = changed("undo", "--all", "-y", code=1)
    assert f"Warning: {models}/l.pt: " in done.stderr
    assert done.stdout == "Undid 1 of 2 changes.\n"
    assert (models / "l.pt").read_bytes() == b"mine now"


@pytest.mark.usefixtures("changed")
def test_the_plan_is_shown_before_the_question(program: Smartcache, models: Path) -> None:
    done = program.at_terminal("undo", "--last", answer="yes\n")
    assert "remove the link" in done.stdout
    assert not (models / "l.pt").exists()


def test_nothing_to_undo_is_an_error_and_so_are_two_ways_to_say_it(sc: Here, home: Path) -> None:
    Store(home).close()
    for words in (["--last"], ["--all"]):
        assert sc("undo", *words, code=1).error == "There is nothing to undo", words
    assert sc("undo", "9f3a61c2", code=1).error == "There is no change 9f3a61c2 to undo"
    for words in (["--last", "--all"], ["abc", "--last"], ["--list", "--all"]):
        assert "exclude each other" in sc("undo", *words, code=2).error, words


def test_entries_of_all_pools_are_one_history(changed: Here, home: Path, elsewhere: Path) -> None:
    with Store(home) as store:
        store.add_pool(elsewhere / ".smartcache")
    file = write(elsewhere / "m.pt", b"m" * 5000)
    changed("add", "--adopt", file)
    history = changed("undo", "--list", "--json").json["history"]
    assert [each["hows"] for each in history] == [["become"], ["create"], ["become"]]
    changed("undo", "--last", "-y")
    assert file.stat().st_mode & 0o200


class TestPaths:
    """Files that are named: with an entry, without one, renamed, and without any store."""

    @pytest.fixture
    def linked(self, sc: Here, models: Path) -> Path:
        """A folder in which a and b are one read-only file since a dedup."""
        sc("dedup", models, "--min-size", "4KiB", "-y", "--read-only")
        assert inode_of(models / "a.safetensors") == inode_of(models / "b.safetensors")
        return models

    def test_each_is_a_file_of_its_own_again(self, sc: Here, linked: Path) -> None:
        a, b = linked / "a.safetensors", linked / "b.safetensors"
        done = sc("undo", a, b, "-y")
        assert done.stdout == "Undid 2 of 2 changes.\n"
        assert inode_of(a) != inode_of(b)
        assert mode_of(a) == mode_of(b) == 0o644
        assert a.read_bytes() == b.read_bytes() == WEIGHTS
        assert "nothing to undo" in sc("undo", "--list").stdout
        assert sc("prune", "-n", "--json").json["planned_size"] == 0
        assert sc("undo", a, "-y").stdout.startswith("Nothing to undo")

    def test_the_plan_says_what_it_would_do_and_need(self, sc: Here, linked: Path) -> None:
        before = snapshot(linked)
        done = sc("undo", "-r", linked, "--dry-run")
        assert done.stdout.splitlines()[-1].startswith("Would undo 2 changes (needs ")
        document = sc("undo", "-r", linked, "-n", "--json").json
        assert (len(document["changes"]), document["undone"]) == (2, 0)
        assert snapshot(linked) == before

    def test_a_renamed_file_is_said_and_its_entry_stays_until_it_is_named(
        self, sc: Here, linked: Path
    ) -> None:
        new = (linked / "b.safetensors").rename(linked / "new.safetensors")
        done = sc("undo", "--all", "-y", code=1)
        assert f"Warning: {linked}/b.safetensors: renamed " in done.stderr
        assert "renamed" in {
            each["outcome"] for each in sc("undo", "--all", "-y", "--json", code=1).json["changes"]
        }
        sc("undo", new, "-y")
        assert (mode_of(new), new.stat().st_nlink) == (0o644, 1)

    def test_after_the_store_was_deleted_files_can_be_written_again(
        self, sc: Here, linked: Path, home: Path
    ) -> None:
        shutil.rmtree(home)
        a, b = linked / "a.safetensors", linked / "b.safetensors"
        assert sc("undo", "-r", linked, "-y").stdout == "Undid 2 of 2 changes.\n"
        assert inode_of(a) != inode_of(b)
        assert mode_of(a) == mode_of(b) == 0o644
        assert not home.exists()

    def test_a_folder_is_an_error_without_r(self, sc: Here, linked: Path) -> None:
        done = sc("undo", linked, "-y", code=1)
        assert done.error == f"{linked} is a directory"
        assert "-r" in done.hint
        assert "nowhere" in sc("undo", "nowhere", "-y", code=1).error
        assert "-r" in sc("undo", "-r", code=2).hint

    def test_what_must_stay_is_named_and_the_rest_is_done(self, sc: Here, linked: Path) -> None:
        (linked / "link").symlink_to(linked / "b.safetensors")
        done = sc("undo", linked / "link", linked / "a.safetensors", "-y", code=1)
        assert "link stays as it is: it is a symlink" in done.stderr
        assert done.stdout == "Undid 1 of 1 change.\n"


class TestForget:
    """What a dead process left, in a folder that cannot be looked at any more."""

    @pytest.fixture
    def unfinished(self, sc: Here, models: Path, home: Path) -> Here:
        sc("add", "--adopt", models / "a.safetensors")
        with closing(sqlite3.connect(home / "journal.sqlite3")) as journal, journal:
            journal.execute("UPDATE changes SET state = 'begun'")
        os.rename(models, models.with_name("moved"))
        models.mkdir()
        return sc

    def test_it_is_said_until_it_is_closed_and_stops_nobody(
        self, unfinished: Here, tmp_path: Path
    ) -> None:
        write(tmp_path / "new.pt", b"new")
        unfinished("add", "--adopt", "new.pt")
        assert "Warning: Unfinished: " in unfinished().stderr
        findings = unfinished("doctor", "--json").json["problems"]
        assert any("Unfinished: " in each["text"] for each in findings)
        assert "Would close" in unfinished("undo", "--forget", "-n").stdout
        assert unfinished("undo", "--forget", "-y").stdout == "Closed 1 entry.\n"
        assert "Unfinished" not in unfinished().stderr
        assert unfinished("undo", "--forget").stdout == "Nothing is unfinished.\n"
