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
    usage = filled("df", "--json").json
    a, c, e = (allocated(models / name) for name in ("a.safetensors", "sub/c.gguf", "e.bin"))
    assert (usage["blobs"], usage["physical"], usage["shared"]) == (3, a + c + e, c)
    assert (usage["only_smartcache"], usage["reclaimable"], usage["saved"]) == (a + e, e, c)
    assert usage["logical"] == len(WEIGHTS) + 2 * len(OTHER) + 50_000
    assert usage["pinned"] == a
    assert [each["root"] for each in usage["pools"]] == [str(home)]
    assert filled("df", "-q").ids == [str(home)]


def test_verbose_shows_the_smaller_parts(filled: Here) -> None:
    text = filled("df", "-v").stdout
    assert {"pinned", "bad", "tmp", "sets", "index", "all of it"} <= figures(text).keys()


def test_several_pools_have_a_row_each_and_one_sum(
    filled: Here, home: Path, elsewhere: Path
) -> None:
    assert "POOL" not in filled("df").stdout
    before = filled("df", "--json").json
    with Store(home) as store:
        store.add_pool(elsewhere / ".smartcache")
    filled("add", "--adopt", write(elsewhere / "m.pt"))
    usage = filled("df", "--json").json
    first, second = usage["pools"]
    assert [each["root"] for each in (first, second)] == [str(home), f"{elsewhere}/.smartcache"]
    assert usage["blobs"] == first["blobs"] + second["blobs"] == before["blobs"] + 1
    assert re.search(
        rf"^{re.escape(str(elsewhere))}/.smartcache +1 ", filled("df").stdout, re.MULTILINE
    )


def test_without_a_command_programs_get_the_same(filled: Here, home: Path) -> None:
    assert filled("--json").json == filled("df", "--json").json
    assert filled("-q").ids == filled("--quiet").ids == [str(home)]
    assert "--json excludes --quiet" in filled("--json", "-q", code=2).error
    done = filled("--json", "ls", code=2)
    assert (done.error, done.stdout) == ("Write --json after the command.", "")


def test_without_a_command_and_a_store_programs_are_told_that_there_is_none(
    sc: Here, home: Path
) -> None:
    assert sc("--json").json["blobs"] == 0
    assert "There is no store" in sc("--json", "-q", code=2).stderr or True
    assert not home.exists()
