from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.api import Store
from tests.cli.running import Here
from tests.store.files import OTHER, WEIGHTS, snapshot

A, B = hashlib.sha256(WEIGHTS).hexdigest(), hashlib.sha256(OTHER).hexdigest()
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def blob(home: Path) -> Path:
    """A blob of WEIGHTS whose sha256 is known."""
    with Store(home) as store:
        return store.path_of(store.put_stream([WEIGHTS], algorithms=["sha256"]).digest)


class TestPrint:
    def test_the_document_is_the_mapping(self, sc: Here, blob: Path) -> None:
        assert sc("hub", "mapping", "--json").json == {A: str(blob)}

    def test_quiet_prints_the_hashes(self, sc: Here, blob: Path) -> None:
        assert blob.exists()
        assert sc("hub", "mapping", "-q").ids == [A]

    def test_people_get_a_table(self, sc: Here, blob: Path) -> None:
        lines = sc("hub", "mapping").stdout.splitlines()
        assert lines[0].split() == ["SHA256", "SIZE", "PATH"]
        assert lines[1].split() == [A[:12], "100", "KB", str(blob)]
        assert len(lines) == 2

    def test_of_a_store_that_knows_nothing(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        assert sc("hub", "mapping").stdout == "No file is known by its sha256 yet.\n"
        assert sc("hub", "mapping", "--json").json == {}
        assert sc("hub", "mapping", "-q").ids == []

    def test_without_a_store_none_is_made(self, sc: Here, home: Path) -> None:
        assert sc("hub", "mapping", "--json").json == {}
        assert sc("hub", "mapping", "-q").ids == []
        assert sc("hub", "mapping").stdout == "No file is known by its sha256 yet.\n"
        assert not home.exists()


class TestOutput:
    def test_writes_a_file_with_sizes(self, sc: Here, blob: Path, tmp_path: Path) -> None:
        done = sc("hub", "mapping", "--output", "known.json")
        assert done.stdout == "Wrote 1 file to known.json.\n"
        assert json.loads((tmp_path / "known.json").read_bytes()) == {
            "format": 1,
            "files": {A: {"path": str(blob), "size": len(WEIGHTS)}},
        }
        document = sc("hub", "mapping", "--output", "known.json", "--json").json
        assert document == {"path": "known.json", "files": 1}
        assert sc("hub", "mapping", "--output", "known.json", "-q").ids == ["known.json"]

    def test_where_it_cannot_be_written(self, sc: Here, blob: Path) -> None:
        assert blob.exists()
        assert "No such file" in sc("hub", "mapping", "--output", "no/known.json", code=1).error

    def test_without_a_store(self, sc: Here, tmp_path: Path, home: Path) -> None:
        assert "no store" in sc("hub", "mapping", "--output", "known.json", code=1).error
        assert not (tmp_path / "known.json").exists()
        assert not home.exists()


class TestImport:
    @pytest.fixture
    def document(self, tmp_path: Path, models: Path) -> Path:
        path = tmp_path / "known.json"
        path.write_text(json.dumps({B: str(models / "sub" / "c.gguf")}))
        return path

    def test_says_what_is_known_now(self, sc: Here, document: Path, models: Path) -> None:
        before = snapshot(models)
        done = sc("hub", "mapping", "--import", document)
        assert done.stdout == "Downloads know 1 file (70 KB).\n"
        (folder,) = sc("folders", "ls", "--json").json["folders"]
        assert (folder["path"], folder["is_given"], folder["files"]) == (
            str(models / "sub"), False, 1,
        )  # fmt: skip
        assert snapshot(models) == before

    def test_what_is_wrong_is_a_warning_and_a_failure(
        self, sc: Here, document: Path, models: Path
    ) -> None:
        missing = models / "missing"
        document.write_text(
            json.dumps({A: str(models / "a.safetensors"), B: str(missing), "x": str(models)})
        )
        done = sc("hub", "mapping", "--import", document, code=1)
        assert done.stdout == "Downloads know 1 file (100 KB); 2 were refused.\n"
        assert f"Warning: {missing}: no such file or directory\n" in done.stderr
        assert f"Warning: {models}: its key is not a sha256\n" in done.stderr

    def test_the_document(self, sc: Here, document: Path, models: Path) -> None:
        path = str(models / "sub" / "c.gguf")
        known = sc("hub", "mapping", "--import", document, "--json").json
        assert known == {
            "files": [{"sha256": B, "path": path, "size": len(OTHER)}],
            "refused": [],
        }
        assert sc("hub", "mapping", "--import", document, "-q").ids == [B]

    @pytest.mark.parametrize(
        ("text", "message"), [("{", "is not a JSON document"), ("[]", "is not a mapping of files")]
    )
    def test_what_is_no_mapping(self, text: str, message: str, sc: Here, document: Path) -> None:
        document.write_text(text)
        done = sc("hub", "mapping", "--import", document, code=1)
        assert done.error == f"{document} {message}"
        assert "--output" in done.hint

    def test_a_file_that_is_not_there(self, sc: Here) -> None:
        assert "no.json" in sc("hub", "mapping", "--import", "no.json", code=1).error

    def test_not_together_with_output(self, sc: Here, document: Path) -> None:
        done = sc("hub", "mapping", "--import", document, "--output", "x", code=2)
        assert "cannot be used together" in done.error
