"""What is found and healed is shown by tests/store/test_verify.py; here, words and exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.running import Here
from tests.store.files import OTHER, WEIGHTS, digest_of, edit, mode_of, write

LARGE, SMALL = digest_of(WEIGHTS), digest_of(OTHER)


@pytest.fixture
def filled(sc: Here, models: Path) -> Here:
    sc("add", models / "a.safetensors", models / "sub/c.gguf")
    return sc


def blob(home: Path, digest: str = LARGE) -> Path:
    return home / "blobs" / digest[:2] / digest


def spoil_index(root: Path, content: bytes | None = b"no database" * 1000) -> None:
    for file in root.glob("index.sqlite3*"):
        file.unlink()
    if content is not None:
        (root / "index.sqlite3").write_bytes(content)


def test_a_sound_store_exits_with_0(filled: Here) -> None:
    assert filled("verify").stdout == "Checked 2 blobs.\nNo damage was found.\n"
    store = filled("verify", "--full", "--json").json
    assert (store["is_full"], store["hashed_size"]) == (True, len(WEIGHTS) + len(OTHER))
    filled("verify", "--dry-run", code=2)  # there is nothing to try


def test_a_damaged_blob_is_healed_from_a_copy_if_there_is_one(
    filled: Here, home: Path, tmp_path: Path
) -> None:
    filled("scan", tmp_path / "models", "--min-size", "4KiB")
    for digest in (LARGE, SMALL):
        edit(blob(home, digest))
    (tmp_path / "models/sub/c.gguf").unlink()
    done = filled("verify", code=3)
    assert f"2 damaged, moved to bad/: {min(LARGE, SMALL)[:12]}" in done.stdout
    assert "--repair" in done.stderr
    done = filled("verify", "--repair", "--json", code=3)
    assert done.json["healed"] == [LARGE]
    assert blob(home).read_bytes() == WEIGHTS
    assert "Get the files again" in filled("verify", "--repair", code=3).stderr


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_a_damaged_blob_is_named_and_moved_away(
    options: list[str], filled: Here, home: Path
) -> None:
    edit(blob(home))
    done = filled("verify", "--json", *options, code=3)
    assert done.json["has_damage"]
    assert done.json["damaged"] == [LARGE]
    assert "Warning: " in done.stderr
    assert not blob(home).exists()
    assert len(os.listdir(home / "bad")) == 1
    edit(blob(home, SMALL))
    assert filled("verify", "-q", "--full", code=3).ids == [SMALL]


def test_what_is_no_damage_is_told(filled: Here, home: Path) -> None:
    blob(home).chmod(0o644)
    write(home / "blobs" / "notes.txt", b"mine")
    text = filled("verify").stdout
    assert "1 writable" in text
    assert f"1 of unknown kind among the blobs, left alone: {home}/blobs/notes.txt" in text
    assert mode_of(blob(home)) == 0o444
    spoil_index(home, None)
    assert "Checked 2 blobs" in filled("verify").stdout


class TestRebuild:
    @pytest.mark.parametrize("content", [b"no database" * 1000, b"", None])
    def test_makes_an_index_that_is_damaged_or_gone(
        self, content: bytes | None, filled: Here, home: Path
    ) -> None:
        spoil_index(home, content)
        assert set(filled.digests()) == {LARGE, SMALL}
        assert filled("verify", "--rebuild", "-y", "--json").json["rebuilt"] == 2
        assert set(filled.digests()) == {LARGE, SMALL}
        assert set(filled.digests("--filter", "pinned=yes")) == {LARGE, SMALL}
