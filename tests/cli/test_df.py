"""The figures themselves are those of tests/store/test_usage.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smartcache.store.store import Store
from tests.cli.running import Here
from tests.store.files import OTHER, WEIGHTS, allocated, digest_of, write


@pytest.fixture
def filled(sc: Here, models: Path) -> Here:
    """A pinned copy, an adopted file with another link, and a copy that nobody holds."""
    sc("add", models / "a.safetensors")
    sc("add", "--adopt", models / "sub/c.gguf")
    sc("link", digest_of(OTHER), models / "d.gguf", "--kind", "hardlink")
    sc("add", "--no-pin", write(models / "e.bin", b"e" * 50_000))
    return sc


def figures(text: str) -> dict[str, str]:
    found = re.findall(r"^ +([a-z ]+?) {2,}([\d.,]+(?: [KMGT]?B)?)", text, re.MULTILINE)
    return dict(found)


def test_a_store_is_a_short_table_for_people_and_bytes_for_programs(
    filled: Here, models: Path, home: Path
) -> None:
    text = filled("df").stdout
    assert text.startswith(f"{home}\n")
    assert list(figures(text)) == [
        "blobs", "logical", "on disk", "shared", "only here", "can be freed", "saved",
    ]  # fmt: skip
    assert figures(text)["logical"] == "290 KB"
    (usage,) = filled("df", "--json").json["stores"]
    a, c, e = (allocated(models / name) for name in ("a.safetensors", "sub/c.gguf", "e.bin"))
    assert (usage["blobs"], usage["physical"], usage["shared"]) == (3, a + c + e, c)
    assert (usage["only_smartcache"], usage["reclaimable"], usage["saved"]) == (a + e, e, c)
    assert usage["logical"] == len(WEIGHTS) + 2 * len(OTHER) + 50_000
    (owner,) = usage["owners"]
    assert (owner["kind"], owner["name"], owner["blobs"]) == ("pin", "kept", 1)
    assert filled("df", "-q").ids == [str(home)]


def test_verbose_shows_the_smaller_parts_and_the_owners(filled: Here) -> None:
    text = filled("df", "-v").stdout
    assert {"bad", "tmp", "sets", "index", "all of it"} <= figures(text).keys()
    assert re.search(r"^OWNER +BLOBS +SIZE +ON DISK +ALONE +STATE$", text, re.MULTILINE)
    assert re.search(r"^pin kept +1 +100 KB .* live$", text, re.MULTILINE)
    filled("verify", "--rebuild", "-y")
    assert "prune refuses" in filled("df").stderr


def test_every_volume_is_shown(filled: Here, home: Path, elsewhere: Path) -> None:
    with Store(home) as store:
        store.add_volume(elsewhere / ".smartcache")
    filled("add", "--adopt", write(elsewhere / "m.pt"))
    roots = [usage["root"] for usage in filled("df", "--json").json["stores"]]
    assert roots == [str(home), str(elsewhere / ".smartcache")]
    assert f"\n{elsewhere}/.smartcache\n" in filled("df").stdout


def test_without_a_command_programs_get_the_same(filled: Here, home: Path) -> None:
    assert filled("--json").json == filled("df", "--json").json
    assert filled("-q").ids == filled("--quiet").ids == [str(home)]
    assert "--json excludes --quiet" in filled("--json", "-q", code=2).error
    done = filled("--json", "ls", code=2)
    assert (done.error, done.stdout) == ("Write --json after the command.", "")


def test_without_a_command_and_a_store_programs_are_told_that_there_is_none(
    sc: Here, home: Path
) -> None:
    assert sc("--json").json == {"stores": []}
    assert sc("-q").ids == []
    assert not home.exists()
