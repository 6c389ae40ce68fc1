from __future__ import annotations

from pathlib import Path

import pytest

from smartcache.folders.programs import ModelFolder
from smartcache.report.naming import Known, Naming, from_home
from tests.folders.trees import gguf, hf_repo, safetensors, write
from tests.report.values import PLAIN, copy, group


class TestKnown:
    def test_a_title_comes_before_the_file(self) -> None:
        assert str(Known(title="Ink", file="v3.safetensors")) == "Ink · v3.safetensors"

    def test_what_a_program_calls_it_is_better_than_the_file(self) -> None:
        assert str(Known(name="llama3:8b", file="sha256-00")) == "llama3:8b"

    def test_a_title_that_the_name_says_too_is_said_once(self) -> None:
        assert str(Known(title="ink", file="Ink.safetensors")) == "Ink.safetensors"


class TestNaming:
    def test_one_copy_that_a_program_knows_names_all(self, tmp_path: Path) -> None:
        data = safetensors(1)
        cache = tmp_path / "hub"
        blob = hf_repo(cache, "org/model", {"unet/x.safetensors": data})["unet/x.safetensors"]
        folder = ModelFolder(path=cache, program="Hugging Face")
        other = write(tmp_path / "abc.safetensors", data)
        found = group(copy(1, str(other), folder=PLAIN), copy(2, str(blob), folder=folder))
        known = Naming().of(found)
        assert known.name == "org/model · unet/x.safetensors"
        assert known.file == "abc.safetensors"

    def test_a_title_is_read_from_the_file(self, tmp_path: Path) -> None:
        file = write(tmp_path / "m.gguf", gguf(1, name="Some Llama"))
        known = Naming().of(group(copy(1, str(file), folder=PLAIN)))
        assert str(known) == "Some Llama · m.gguf"

    def test_a_blob_of_the_store_names_nothing(self, tmp_path: Path) -> None:
        ours = ModelFolder(path=tmp_path, program="smartcache")
        file = write(tmp_path / "m.bin", b"x")
        blob = copy(1, str(tmp_path / "blobs"), folder=ours, is_blob=True)
        assert str(Naming().of(group(blob, copy(2, str(file), folder=PLAIN)))) == "m.bin"

    def test_a_hash_is_shown_only_if_there_is_nothing_else(self, tmp_path: Path) -> None:
        hashed = copy(1, str(tmp_path / ("0" * 64)), folder=PLAIN)
        named = copy(2, str(tmp_path / "vae.pt"), folder=PLAIN)
        assert str(Naming().of(group(hashed, named))) == "vae.pt"
        assert str(Naming().of(group(hashed))) == "0" * 64


class TestFromHome:
    def test_what_lies_in_the_home_is_shown_from_there(self) -> None:
        assert from_home(Path.home() / "a" / "b") == "~/a/b"
        assert from_home(Path.home()) == "~"

    def test_what_lies_elsewhere_is_shown_in_full(self) -> None:
        assert from_home(Path("/mnt/models")) == "/mnt/models"
        assert from_home(Path(f"{Path.home()}2/x")) == f"{Path.home()}2/x"

    def test_a_home_that_is_a_symlink_is_one_under_both_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "home").symlink_to("real")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert from_home(tmp_path / "home" / "x") == "~/x"
        assert from_home(tmp_path / "real" / "x") == "~/x"
