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


class TestStore:
    def test_tells_shared_held_and_freeable_bytes_apart(self, filled: Here, models: Path) -> None:
        (usage,) = filled("df", "--json").json["stores"]
        a, c, e = (allocated(models / name) for name in ("a.safetensors", "sub/c.gguf", "e.bin"))
        assert usage["blobs"] == 3
        assert usage["physical"] == a + c + e
        assert usage["shared"] == c
        assert usage["only_smartcache"] == a + e
        assert usage["reclaimable"] == e
        assert usage["logical"] == len(WEIGHTS) + 2 * len(OTHER) + 50_000
        assert usage["saved"] == c

    def test_is_a_short_table_for_people(self, filled: Here, home: Path) -> None:
        text = filled("df").stdout
        assert text.startswith(f"{home}\n")
        assert list(figures(text)) == [
            "blobs", "logical", "on disk", "shared", "only here", "can be freed", "saved",
        ]  # fmt: skip
        assert figures(text)["logical"] == "290 KB"

    def test_sees_files_that_were_deleted_by_others_at_once(
        self, filled: Here, models: Path
    ) -> None:
        size = allocated(models / "d.gguf")
        (before,) = filled("df", "--json").json["stores"]
        (models / "d.gguf").unlink()
        (models / "sub/c.gguf").unlink()
        (after,) = filled("df", "--json").json["stores"]
        assert (before["shared"], after["shared"]) == (size, 0)
        assert after["reclaimable"] == before["reclaimable"] + size
        assert after["reclaimable"] == filled("prune", "-n", "--json").json["planned_size"]

    def test_verbose_shows_the_smaller_parts_and_the_owners(self, filled: Here) -> None:
        text = filled("df", "-v").stdout
        assert {"trash", "bad", "tmp", "sets", "index", "all of it"} <= figures(text).keys()
        assert re.search(r"^OWNER +BLOBS +SIZE +ON DISK +ALONE +STATE$", text, re.MULTILINE)
        assert re.search(r"^pin kept +1 +100 KB .* live$", text, re.MULTILINE)

    def test_owners_are_in_the_document(self, filled: Here) -> None:
        (usage,) = filled("df", "--json").json["stores"]
        (owner,) = usage["owners"]
        assert (owner["kind"], owner["name"], owner["blobs"]) == ("pin", "kept", 1)

    def test_after_a_rebuild_it_says_why_prune_refuses(self, filled: Here) -> None:
        filled("verify", "--rebuild", "-y")
        assert "prune refuses" in filled("df").stderr

    def test_quiet_prints_the_roots(self, filled: Here, home: Path) -> None:
        assert filled("df", "-q").ids == [str(home)]

    def test_every_volume_is_shown(self, filled: Here, home: Path, elsewhere: Path) -> None:
        with Store(home) as store:
            store.add_volume(elsewhere / ".smartcache")
        filled("add", "--adopt", write(elsewhere / "m.pt"))
        roots = [usage["root"] for usage in filled("df", "--json").json["stores"]]
        assert roots == [str(home), str(elsewhere / ".smartcache")]
        assert f"\n{elsewhere}/.smartcache\n" in filled("df").stdout

    def test_without_a_store_there_is_nothing_and_nothing_is_made(
        self, sc: Here, home: Path
    ) -> None:
        assert sc("df").stdout == ""
        assert sc("df", "--json").json == {"stores": [], "folders": []}
        assert not home.exists()


class TestFolders:
    def test_each_is_shown_and_all_together(self, filled: Here, models: Path) -> None:
        document = filled("df", "--json", models, models / "sub").json
        whole, below = document["folders"]
        assert (whole["path"], below["path"]) == (str(models), str(models / "sub"))
        assert (whole["files"], below["files"]) == (5, 1)
        # The total counts what lies in both once.
        assert document["total"]["physical"] == whole["physical"]
        assert whole["linked_inside"] == 1
        text = filled("df", models, models / "sub").stdout
        assert text.splitlines()[0].startswith("FOLDER ")
        assert text.splitlines()[-1].startswith("all together ")

    def test_what_the_store_has_too_is_known(self, filled: Here, models: Path) -> None:
        (folder,) = filled("df", "--json", models).json["folders"]
        assert folder["shared_with_store"] == allocated(models / "d.gguf")

    def test_needs_no_store(self, sc: Here, models: Path, home: Path) -> None:
        (folder,) = sc("df", "--json", models).json["folders"]
        assert folder["files"] == 3
        assert folder["shared_with_store"] == 0
        assert not home.exists()

    def test_a_store_that_cannot_be_opened_is_told_and_no_obstacle(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        home.mkdir()
        (home / "format").write_text("999\n")
        done = sc("df", "--json", models)
        assert done.json["folders"][0]["files"] == 3
        assert "Warning: " in done.stderr

    def test_a_missing_one_is_an_error(self, sc: Here) -> None:
        done = sc("df", "nowhere", code=1)
        assert "nowhere" in done.error
        assert done.hint

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_what_cannot_be_read_is_named(self, sc: Here, models: Path) -> None:
        (models / "sub").chmod(0)
        done = sc("df", models)
        (models / "sub").chmod(0o755)
        assert f"Warning: {models / 'sub'}: Permission denied" in done.stderr
        assert "at least" in done.stderr
