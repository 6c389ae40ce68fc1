"""The figures themselves are those of tests/store/test_usage.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.api import Store
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


class TestFolders:
    def test_each_is_shown_with_what_the_store_has_too_and_all_together(
        self, filled: Here, models: Path
    ) -> None:
        document = filled("df", "--json", models, models / "sub").json
        whole, below = document["folders"]
        assert (whole["path"], below["path"]) == (str(models), str(models / "sub"))
        assert (whole["files"], below["files"], whole["linked_inside"]) == (5, 1, 1)
        assert whole["shared_with_store"] == allocated(models / "d.gguf")
        # The total counts what lies in both once.
        assert document["total"]["physical"] == whole["physical"]
        lines = filled("df", models, models / "sub").stdout.splitlines()
        assert lines[0].startswith("FOLDER ")
        assert lines[-1].startswith("all together ")

    def test_a_store_is_not_needed_and_one_that_cannot_be_opened_no_obstacle(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        (folder,) = sc("df", "--json", models).json["folders"]
        assert (folder["files"], folder["shared_with_store"]) == (3, 0)
        assert not home.exists()
        home.mkdir()
        (home / "format").write_text("999\n")
        done = sc("df", "--json", models)
        assert done.json["folders"][0]["files"] == 3
        assert "Warning: " in done.stderr
        assert "nowhere" in sc("df", "nowhere", code=1).error

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_what_cannot_be_read_is_named(self, sc: Here, models: Path) -> None:
        (models / "sub").chmod(0)
        done = sc("df", models)
        (models / "sub").chmod(0o755)
        assert f"Warning: {models / 'sub'}: Permission denied" in done.stderr
        assert "at least" in done.stderr
