"""What is restored is shown by tests/store/test_undo.py; here, how it is said what to undo."""

from __future__ import annotations

from pathlib import Path

import pytest

from smartcache.store.store import Store
from tests.cli.running import Here, Smartcache
from tests.store.files import WEIGHTS, digest_of, snapshot, write


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
    assert (first["ops"], first["size"]) == (["adopt"], 70_000)
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
    journal = home / "journal.jsonl"
    text = journal.read_text().replace(first, f"aa{first[2:]}").replace(second, f"aa{second[2:]}")
    journal.write_text(text)
    done = changed("undo", "aa", "-y", code=2)
    assert done.error.endswith("'aa' is the beginning of several IDs")
    assert f"aa{first[2:]}" in done.hint
    assert f"aa{second[2:]}" in done.hint
    assert changed("undo", "", "-y", code=1).error == "There is no change  to undo"
    done = changed("undo", f"aa{first[2:]}", "00000000", "-y", code=1)
    assert done.error == "There is no change 00000000 to undo"
    assert "--list" in done.hint
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
    for words in (["--last"], ["--all"], ["9f3a61c2"]):
        assert sc("undo", *words, code=1).error == "There is nothing to undo", words
    for words in (["--last", "--all"], ["abc", "--last"], ["--list", "--all"]):
        assert "exclude each other" in sc("undo", *words, code=2).error, words


def test_entries_of_all_volumes_are_one_history(changed: Here, home: Path, elsewhere: Path) -> None:
    with Store(home) as store:
        store.add_volume(elsewhere / ".smartcache")
    file = write(elsewhere / "m.pt", b"m" * 5000)
    changed("add", "--adopt", file)
    history = changed("undo", "--list", "--json").json["history"]
    assert [each["root"] for each in history] == [str(home)] * 2 + [str(elsewhere / ".smartcache")]
    assert f"{elsewhere}/.smartcache" in changed("undo", "--list").stdout
    changed("undo", "--last", "-y")
    assert file.stat().st_mode & 0o200
