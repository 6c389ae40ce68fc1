from __future__ import annotations

import os
from pathlib import Path

import pytest

from smartcache.store.store import Store
from tests.cli.running import Here
from tests.store.files import snapshot, write


def test_says_what_works_where_the_store_will_be_without_leaving_a_trace(
    sc: Here, home: Path, models: Path
) -> None:
    before = snapshot(models)
    done = sc("doctor", models)
    assert f"{home} (store, does not exist)" in done.stdout
    assert "works: " in done.stdout
    assert "smartcache " in done.stdout
    assert snapshot(models) == before
    assert sc("doctor", "-q").stdout == ""


def test_the_document_has_versions_places_abilities_and_findings(
    sc: Here, models: Path, home: Path
) -> None:
    document = sc("doctor", "--json", models).json
    store, folder = document["places"]
    assert (store["path"], store["role"]) == (str(home), "store")
    assert (folder["path"], folder["role"]) == (str(models), "folder")
    assert set(folder["abilities"]) == {"reflink", "lease"}
    assert isinstance(folder["free"], int)
    assert document["versions"]["smartcache"]
    assert {each["level"] for each in store["findings"]} <= {"ok", "note", "warning"}
    assert document["level"] != "problem"


def test_every_pool_is_looked_at_as_a_store(sc: Here, home: Path, elsewhere: Path) -> None:
    assert "another filesystem" in sc("doctor", elsewhere).stdout
    with Store(home) as store:
        store.add_pool(elsewhere / ".smartcache")
    places = sc("doctor", "--json").json["places"]
    assert [(each["path"], each["role"]) for each in places] == [
        (str(home), "store"),
        (str(elsewhere / ".smartcache"), "store"),
    ]


def test_a_store_of_a_newer_format_is_a_problem(sc: Here, home: Path) -> None:
    home.mkdir()
    (home / "format").write_text("99\n")
    done = sc("doctor", code=1)
    assert "problem:" in done.stdout
    assert sc("doctor", "-q", code=1).ids == [str(home)]
    assert sc("doctor", "--json", code=1).json["level"] == "problem"
    assert os.listdir(home) == ["format"]


def test_an_unreadable_index_is_no_problem_it_is_a_memory(sc: Here, home: Path) -> None:
    write(home.parent / "x.bin")
    sc("add", "x.bin")
    blobs = sc.digests()
    for file in home.glob("index.sqlite3*"):
        file.write_bytes(b"no database" * 1000)
    assert "is damaged" in sc("doctor").stderr
    assert sc.digests() == blobs


def test_the_other_package_of_that_name_is_named_with_what_removes_it(
    sc: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`smartcache` on PyPI is somebody else's: it has the same import name."""
    assert "Another package" not in sc("doctor").stdout
    metadata = "Metadata-Version: 2.1\nName: smartcache\nVersion: 0.0.2\n"
    write(tmp_path / "site" / "smartcache-0.0.2.dist-info" / "METADATA", metadata.encode())
    monkeypatch.syspath_prepend(tmp_path / "site")
    (found,) = sc("doctor", "--json").json["problems"]
    assert found["level"] == "warning"
    assert "smartcache 0.0.2" in found["text"]
    assert "pip uninstall smartcache" in found["hint"]
    assert "pip install --force-reinstall --no-deps smartcache-hub" in found["hint"]
    assert "pip uninstall smartcache" in " ".join(sc("doctor").stdout.split())
