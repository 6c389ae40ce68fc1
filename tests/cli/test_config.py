"""`smartcache config`: what is in force, from where, and which file to edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from smartcache.config import SETTINGS
from tests.cli.running import ROOT, Here


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "etc" / "config.toml"
    path.parent.mkdir()
    path.write_text("threads = 4  # of eight\n")
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("SMARTCACHE_CONFIG", str(path))
    return path


def test_every_setting_has_its_value_and_source(
    sc: Here, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", "5m")
    document = sc("--home", "x", "config", "--json").json
    found = {each["name"]: (each["value"], each["source"]) for each in document["settings"]}
    assert list(found) == list(SETTINGS)
    assert found["home"] == (str(Path("x").absolute()), "argument")
    assert found["lock_timeout"] == (300, "variable")
    assert found["threads"] == (4, "file")
    assert found["everywhere"] == (False, "default")
    lines = sc("config").stdout.splitlines()
    assert ["lock_timeout", "300", "SMARTCACHE_LOCK_TIMEOUT"] in [line.split() for line in lines]


def test_the_file_to_edit_is_named_also_before_it_exists(
    sc: Here, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert f"edit {file}: threads = 4" in sc("config").stderr
    assert sc("config", "-q").ids == [str(file)]
    assert sc("config", "--json").json["exists"] is True
    monkeypatch.delenv("SMARTCACHE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    usual = tmp_path / "none/smartcache/config.toml"
    assert f"create {usual}: threads = 4" in sc("config").stderr
    assert sc("config", "-q").ids == [str(usual)]
    document = sc("config", "--json").json
    assert (document["file"], document["exists"]) == (str(usual), False)
    usual.parent.mkdir(parents=True)
    usual.write_text("threads = 4\n")
    assert ["threads", "4", "file"] in [line.split() for line in sc("config").stdout.splitlines()]


def test_a_bad_value_is_named_with_the_file(sc: Here, file: Path) -> None:
    file.write_text('threads = "many"\n')
    assert f"{file}: threads: not such a number" in sc("config", code=2).error
    file.unlink()
    assert f"a file that does not exist: {file}" in sc("config", code=2).error


def test_the_docs_have_every_setting_with_its_variable_and_text() -> None:
    page = (ROOT / "docs/settings.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 4]
    said = {row[0].strip("| `"): (row[1].strip("`"), row[3].removesuffix(" |")) for row in rows}
    assert said == {name: (each.variable, each.text) for name, each in SETTINGS.items()}
