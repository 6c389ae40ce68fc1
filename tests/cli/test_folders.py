from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.running import Here, Smartcache
from tests.folders.trees import SIZE, Machine, comfyui, content, write
from tests.store.files import snapshot

SMALL = ("--min-size", "4KiB")
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    """A folder that no program has."""
    write(tmp_path / "extra" / "a.safetensors", content(1))
    write(tmp_path / "extra" / "b.safetensors", content(1))
    return tmp_path / "extra"


class TestAdd:
    def test_is_scanned_from_now_on(self, sc: Here, extra: Path) -> None:
        before = snapshot(extra)
        done = sc("folders", "add", extra)
        assert done.stdout == f"Added {extra}.\n"
        assert "'smartcache scan'" in done.stderr
        (folder,) = sc("scan", *SMALL, "--json").json["folders"]
        assert (folder["path"], folder["is_given"], folder["files"]) == (str(extra), True, 2)
        assert snapshot(extra) == before

    def test_the_program_is_recognised(self, sc: Here, tmp_path: Path) -> None:
        models = comfyui(tmp_path / "c")
        assert sc("folders", "add", models).stdout == f"Added {models} (ComfyUI).\n"
        document = sc("folders", "add", models, "--json").json
        assert document == {"folders": [{"path": str(models), "program": "ComfyUI"}]}

    def test_symlinks_are_resolved(self, sc: Here, extra: Path, tmp_path: Path) -> None:
        (tmp_path / "way").symlink_to(extra)
        assert sc("folders", "add", "way", "-q").ids == [str(extra)]

    def test_must_be_a_folder_but_neither_the_root_nor_the_home_unless_insisted_on(
        self, sc: Here, extra: Path, home: Path
    ) -> None:
        for word in ("nowhere", "extra/a.safetensors"):
            done = sc("folders", "add", extra, word, code=1)
            assert word in done.error
            assert done.hint
        Path.home().mkdir()
        for folder in (Path("/"), Path.home(), Path.home().parent):
            done = sc("folders", "add", folder, code=1)
            assert str(folder) in done.error
            assert "--force" in done.hint
        assert not home.exists()
        sc("folders", "add", Path.home(), "--force")
        assert sc("folders", "ls", "-q").ids == [str(Path.home())]


class TestLs:
    @pytest.mark.usefixtures("machine")
    def test_shows_given_and_discovered_ones(self, sc: Here, extra: Path) -> None:
        sc("folders", "add", extra)
        before = sc("folders", "ls").stdout
        assert before.splitlines()[0].split() == [
            "PROGRAM", "HOW", "FILES", "SIZE", "WALKED", "FOLDER",
        ]  # fmt: skip
        (row,) = [line for line in before.splitlines() if line.endswith(str(extra))]
        assert row.split()[:5] == ["-", "given", "-", "-", "never"]
        sc("scan", *SMALL)
        after = sc("folders", "ls").stdout
        (row,) = [line for line in after.splitlines() if line.endswith("~/.ollama/models")]
        assert row.split()[:3] == ["Ollama", "discovered", "9"]

    @pytest.mark.usefixtures("machine")
    def test_after_dedup_only_what_was_given_is_called_given(self, sc: Here, extra: Path) -> None:
        def given() -> list[tuple[str, str]]:
            found = sc("folders", "ls", "--json").json["folders"]
            assert all(each["is_given"] == (each["how"] == "given") for each in found)
            return [(each["how"], each["path"]) for each in found if each["is_given"]]

        sc("dedup", *SMALL, "-y")
        assert given() == []
        sc("dedup", extra, *SMALL, "-y")
        assert given() == [("given", str(extra))]

    def test_the_document_has_bytes_and_times(self, sc: Here, extra: Path) -> None:
        sc("folders", "add", extra)
        sc("scan", *SMALL)
        (folder,) = sc("folders", "ls", "--json").json["folders"]
        assert folder.pop("walked_at").endswith("Z")
        assert folder == {
            "how": "given", "path": str(extra), "program": "", "is_given": True, "files": 2,
            "size": 2 * SIZE,
        }  # fmt: skip

    def test_without_a_store_the_discovered_ones_are_shown_and_none_is_made(
        self, sc: Here, machine: Machine, home: Path
    ) -> None:
        paths = sc("folders", "ls", "-q").ids
        assert {str(path) for path in machine.folder.values()} <= set(paths)
        assert not home.exists()

    def test_names_are_printed_byte_by_byte(self, program: Smartcache, tmp_path: Path) -> None:
        name = os.fsencode(tmp_path) + b"/m\n\xff"
        os.mkdir(name)
        program("folders", "add", os.fsdecode(name))
        assert name + b"\n" in os.fsencode(program("folders", "ls", "-q").stdout)


class TestRm:
    def test_forgets_it_and_touches_no_file(self, sc: Here, extra: Path) -> None:
        sc("folders", "add", extra)
        before = snapshot(extra)
        assert sc("folders", "rm", extra).stdout == "Forgot 1 folder; no file was touched.\n"
        assert sc("folders", "ls", "-q").ids == []
        assert snapshot(extra) == before

    def test_one_that_is_gone_from_the_disk(self, sc: Here, tmp_path: Path) -> None:
        (tmp_path / "gone").mkdir()
        sc("folders", "add", "gone")
        (tmp_path / "gone").rmdir()
        done = sc("folders", "rm", "gone", "other", code=1)
        assert done.error == "other is not remembered"
        assert "folders ls" in done.hint
        assert sc("folders", "rm", "gone", "-q").ids == [str(tmp_path / "gone")]
        assert "'smartcache folders add PATH'" in sc("folders", "ls").stderr


class TestIgnore:
    def test_no_scan_dedup_or_report_looks_there_any_more(self, sc: Here, extra: Path) -> None:
        sc("folders", "add", extra)
        write(extra / "old" / "c.safetensors", content(1))
        assert sc("scan", *SMALL, "--json").json["freeable"] == 2 * SIZE
        assert sc("folders", "ignore", extra / "old").stdout == f"Ignored: {extra}/old\n"
        (folder,) = sc("scan", *SMALL, "--json").json["folders"]
        assert folder["files"] == 2
        assert sc("dedup", *SMALL, "-n", "--json").json["files"] == 1
        assert sc("report", "--json").json["total"]["files"] == 2
        assert f"Ignored: {extra}/old" in sc("folders", "ls").stdout
        sc("folders", "ignore", "--remove", extra / "old")
        assert sc("scan", *SMALL, "--json").json["freeable"] == 2 * SIZE

    def test_a_whole_folder_is_left_alone_even_if_named(self, sc: Here, extra: Path) -> None:
        sc("folders", "add", extra)
        sc("folders", "ignore", "extra")
        assert sc("scan", *SMALL, "--json").json["folders"] == []
        done = sc("scan", extra, *SMALL)
        assert f"{extra} is ignored" in done.stderr
        (folder,) = sc("folders", "ls", "--json").json["folders"]
        assert folder["how"] == "ignored"
        assert sc("folders", "ignore", extra / "..", "--remove", code=1).error.endswith(
            "is not ignored"
        )

    def test_patterns_match_names_of_files_and_folders(self, sc: Here, extra: Path) -> None:
        write(extra / "sub [1]" / "d.safetensors", content(1))
        write(extra / "sub 1" / "e.ckpt", content(1))
        sc("folders", "ignore", "*.ckpt", extra / "sub [1]")
        (folder,) = sc("scan", extra, *SMALL, "--json").json["folders"]
        assert folder["files"] == 2

    def test_a_store_inside_a_folder_stays_hidden_whatever_is_ignored(
        self, sc: Here, extra: Path
    ) -> None:
        sc("--home", extra / "store", "add", extra / "a.safetensors")
        sc("folders", "ignore", "*.sqlite3")
        (folder,) = sc("--home", extra / "store", "scan", extra, *SMALL, "--json").json["folders"]
        assert folder["files"] == 2

    def test_a_folder_that_does_not_exist_is_an_error(self, sc: Here) -> None:
        done = sc("folders", "ignore", "no/where", code=1)
        assert done.error == "no/where does not exist"


class TestDownloads:
    def test_are_looked_at_for_downloads_only(self, sc: Here) -> None:
        for name in "ab":
            write(Path.home() / "Downloads" / f"{name}.safetensors", content(1))
        done = sc("folders", "ls")
        assert "for downloads" in done.stdout
        assert "~/Downloads" in done.stdout
        assert "for downloads only" in done.stderr
        assert sc("scan", *SMALL, "--json").json["folders"] == []
        assert sc("dedup", *SMALL, "-n", "--json").json["files"] == 0
