from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.running import Here
from tests.store.files import OTHER, WEIGHTS, digest_of, edit, mode_of

LARGE, SMALL = digest_of(WEIGHTS), digest_of(OTHER)


@pytest.fixture
def filled(sc: Here, models: Path) -> Here:
    sc("add", models / "a.safetensors", models / "sub/c.gguf")
    return sc


def blob(home: Path, digest: str = LARGE) -> Path:
    return home / "blobs" / digest[:2] / digest


def test_a_sound_store_exits_with_0(filled: Here) -> None:
    done = filled("verify")
    assert done.stdout == "Checked 2 blobs.\nNo damage was found.\n"


def test_full_hashes_everything(filled: Here) -> None:
    (store,) = filled("verify", "--full", "--json").json["stores"]
    assert store["is_full"]
    assert store["hashed_size"] == len(WEIGHTS) + len(OTHER)


def test_a_missing_blob_is_named_and_exits_with_3(filled: Here, home: Path) -> None:
    blob(home).unlink()
    done = filled("verify", code=3)
    assert f"1 missing: {LARGE[:12]}" in done.stdout
    assert "--repair" in done.stderr


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_a_damaged_blob_is_named_and_moved_away(
    options: list[str], filled: Here, home: Path
) -> None:
    edit(blob(home))
    done = filled("verify", "--json", *options, code=3)
    assert done.json["has_damage"]
    assert done.json["stores"][0]["damaged"] == [LARGE]
    assert "Warning: " in done.stderr
    assert not blob(home).exists()
    assert len(os.listdir(home / "bad")) == 1


def test_quiet_prints_what_is_damaged_or_missing(filled: Here, home: Path) -> None:
    edit(blob(home))
    blob(home, SMALL).unlink()
    assert set(filled("verify", "-q", "--full", code=3).ids) == {LARGE, SMALL}


def test_repair_heals_from_a_link_outside(filled: Here, home: Path, tmp_path: Path) -> None:
    filled("link", LARGE, "x.pt", "--kind", "copy")
    blob(home).unlink()
    document = filled("verify", "--repair", "--json").json
    assert document["stores"][0]["healed"] == [LARGE]
    assert not document["has_damage"]
    assert blob(home).read_bytes() == WEIGHTS


def test_what_repair_cannot_heal_is_still_damage(filled: Here, home: Path, models: Path) -> None:
    blob(home).unlink()
    shutil.rmtree(models)
    done = filled("verify", "--repair", code=3)
    assert "Get the files again" in done.stderr


def test_a_link_that_is_gone_is_told_and_no_damage(filled: Here, tmp_path: Path) -> None:
    filled("link", LARGE, "x.pt", "--kind", "hardlink")
    (tmp_path / "x.pt").unlink()
    assert f"1 links that are gone: {tmp_path}/x.pt" in filled("verify").stdout


def test_an_unindexed_blob_is_told(filled: Here, home: Path) -> None:
    (home / "index.sqlite3").unlink()
    done = filled("verify")
    assert "was missing" in done.stderr
    assert "Checked 2 blobs" in done.stdout


def test_a_writable_blob_is_told_and_set_back(filled: Here, home: Path) -> None:
    blob(home).chmod(0o644)
    assert "1 writable" in filled("verify").stdout
    assert mode_of(blob(home)) == 0o444


def test_without_a_store_there_is_nothing_to_verify(sc: Here, home: Path) -> None:
    assert sc("verify", "--json").json["stores"] == []
    assert sc("verify", "--rebuild", "-y", "--json").json["rebuilt"] is None
    assert not home.exists()


class TestRebuild:
    @pytest.mark.parametrize("content", [b"no database" * 1000, b"", None])
    def test_makes_an_index_that_is_damaged_or_gone(
        self, content: bytes | None, filled: Here, home: Path
    ) -> None:
        for file in home.glob("index.sqlite3*"):
            file.unlink()
        if content is not None:
            (home / "index.sqlite3").write_bytes(content)
        document = filled("verify", "--rebuild", "-y", "--json").json
        assert document["rebuilt"] == 2
        assert set(filled.digests()) == {LARGE, SMALL}
        assert set(filled.digests("--filter", "pinned=yes")) == {LARGE, SMALL}

    def test_other_commands_name_the_cure(self, filled: Here, home: Path) -> None:
        for file in home.glob("index.sqlite3*"):
            file.write_bytes(b"no database" * 1000)
        for name in ("ls", "df", "verify"):
            assert "verify --rebuild" in filled(name, code=1).hint

    def test_asks_first(self, filled: Here) -> None:
        assert "not a terminal" in filled("verify", "--rebuild", code=1).error
        assert filled("prune", "-n").stdout.startswith("Nothing to prune")

    def test_a_dry_run_counts_only(self, filled: Here) -> None:
        done = filled("verify", "--rebuild", "--dry-run")
        assert done.stdout == "Would make the index again from 2 blobs.\n"
        assert filled("prune", "-n").stdout.startswith("Nothing to prune")

    @pytest.mark.parametrize("places", [["new"], ["new", "newer"]])
    def test_works_at_the_old_place_of_a_moved_store(
        self, places: list[str], filled: Here, tmp_path: Path
    ) -> None:
        for name in places:
            filled("mv", tmp_path / name, "-y")
        for file in (tmp_path / places[-1]).glob("index.sqlite3*"):
            file.write_bytes(b"no database" * 1000)
        assert filled("verify", "--rebuild", "-y", "--json").json["rebuilt"] == 2
        assert filled("dir").stdout == f"{tmp_path / places[-1]}\n"


def test_a_dry_run_needs_something_to_try(filled: Here) -> None:
    filled("verify", "--dry-run", code=2)
