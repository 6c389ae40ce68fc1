"""`smartcache config`: what is in force, from where, and a file that loses nothing."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path

import pytest

from tests.api import SETTINGS, default_of, edited
from tests.cli.running import ROOT, Here

OLD = """\
# My settings.
threads = 4  # of eight; "#" too

home = "/data/#store" # here
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "etc" / "config.toml"
    path.parent.mkdir()
    path.write_text(OLD)
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("SMARTCACHE_CONFIG", str(path))
    return path


def test_list_has_every_setting_with_its_source(
    sc: Here, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", "5m")
    document = sc("config", "list", "--json", "--home", "x").json
    found = {each["name"]: (each["value"], each["source"]) for each in document["settings"]}
    assert list(found) == list(SETTINGS)
    assert found["home"] == (str(Path("x").absolute()), "argument")
    assert found["lock_timeout"] == (300, "variable")
    assert found["threads"] == (4, "file")
    assert found["everywhere"] == (False, "default")
    lines = sc("config", "list").stdout.splitlines()
    assert ["lock_timeout", "300", "SMARTCACHE_LOCK_TIMEOUT"] in [line.split() for line in lines]
    assert sc("config", "list", "-q").ids == list(SETTINGS)


def test_get_prints_one_and_path_the_file(sc: Here, file: Path) -> None:
    assert sc("config", "get", "threads").stdout == "4\n"
    assert sc("config", "get", "everywhere").stdout == "false\n"
    assert sc("config", "path").stdout == f"{file}\n"
    assert "Did you mean 'threads'?" in sc("config", "get", "thread", code=2).hint


def test_set_changes_one_line_and_keeps_comments_and_order(sc: Here, file: Path) -> None:
    sc("config", "set", "threads", "8")
    assert file.read_text() == OLD.replace("threads = 4 ", "threads = 8 ")
    sc("config", "set", "home", "/data/new")
    assert '\nhome = "/data/new" # here\n' in file.read_text()
    text = file.read_text()
    sc("config", "set", "lock_timeout", "5m")
    assert file.read_text() == f'{text}lock_timeout = "5m"\n'


def test_unset_takes_a_setting_out(sc: Here, file: Path) -> None:
    assert sc("config", "unset", "home").stdout.startswith("home is ")
    assert tomllib.loads(file.read_text()) == {"threads": 4}
    before = file.read_text()
    sc("config", "unset", "everywhere")
    assert file.read_text() == before


def test_what_cannot_be_used_is_refused_and_the_file_stays(sc: Here, file: Path) -> None:
    for words, message in (
        (["threads", "many"], "threads: not a number"),
        (["threads", "1", "2"], "threads: takes one value"),
        (["artifacts_max_size", "big"], "artifacts_max_size: "),
        (["home", "a\nb"], "not a value for a file"),
        (["nonsense", "1"], "unknown setting 'nonsense'"),
    ):
        assert message in sc("config", "set", *words, code=2).error
        assert file.read_text() == OLD, words
    assert os.listdir(file.parent) == [file.name]
    file.write_text("threads = = 4\n")
    assert "not TOML" in sc("config", "set", "threads", "2", code=2).error
    assert file.read_text() == "threads = = 4\n"


def test_a_bad_value_in_the_file_can_be_set_right(sc: Here, file: Path) -> None:
    file.write_text('threads = "many"\n')
    assert "threads: not a number" in sc("config", "list", code=2).error
    sc("config", "set", "threads", "2")
    assert file.read_text() == "threads = 2\n"


def test_the_file_is_made_if_there_is_none(sc: Here, file: Path) -> None:
    file.unlink()
    file.parent.rmdir()
    sc("config", "set", "keep_writable", "yes")
    assert file.read_text() == "keep_writable = true\n"


def test_a_symlink_stays_one_and_the_mode_stays(sc: Here, file: Path) -> None:
    real = file.rename(file.with_name("dotfiles.toml"))
    real.chmod(0o640)
    file.symlink_to(real.name)
    sc("config", "set", "threads", "2")
    assert file.is_symlink()
    assert "threads = 2" in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_variable_that_wins_is_named(
    sc: Here, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTCACHE_THREADS", "5")
    done = sc("config", "set", "threads", "2")
    assert "SMARTCACHE_THREADS wins over the file: threads is 5" in done.stderr


def test_a_key_in_a_text_or_a_table_is_not_the_setting() -> None:
    text = 'a = """\nthreads = 1\n"""\n[table]\nthreads = 2\n'
    assert (
        edited(text, "threads", "3")
        == 'a = """\nthreads = 1\n"""\nthreads = 3\n[table]\nthreads = 2\n'
    )
    assert edited(text, "threads", None) == text
    assert edited("a = 1", "threads", "3") == "a = 1\nthreads = 3\n"


def test_the_docs_have_every_setting_with_its_variable_and_text() -> None:
    page = (ROOT / "docs/settings.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 4]
    said = {row[0].strip("| `"): (row[1].strip("`"), row[3].removesuffix(" |")) for row in rows}
    assert said == {name: (each.variable, each.text) for name, each in SETTINGS.items()}
    assert default_of("link_min_size") == 64 << 10
