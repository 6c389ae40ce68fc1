"""What is found, grouped and counted is shown by tests/folders; here, how it is said."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.folders import scan as scanning
from tests.cli.running import Here, Smartcache
from tests.folders.trees import SIZE, Machine, content, safetensors, write
from tests.store.files import allocated, link_count, snapshot

SMALL = ("--min-size", "4KiB")
pytestmark = pytest.mark.usefixtures("own_places")
EXPLAINED = "This scan has changed nothing."
ODD = b"/b\n\xff\x1b]0;title\x07\x9b31m \xc3\xa4.safetensors"
SHOWN = r"b\n\xff\x1b]0;title\x07\x9b31m ä.safetensors"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two equal files and one of the same size with other bytes."""
    folder = tmp_path / "models"
    write(folder / "a.safetensors", content(1), mtime=1_600_000_000)
    write(folder / "b.safetensors", content(1))
    write(folder / "c.safetensors", content(2))
    return folder


class TestForPeople:
    def test_every_program_is_a_row_with_its_folder(self, sc: Here, machine: Machine) -> None:
        before = snapshot(machine.home)
        done = sc("scan", *SMALL)
        assert snapshot(machine.home) == before
        assert (done.stdout + done.stderr).count("changed nothing") == 1
        lines = done.stdout.splitlines()
        table = lines[: lines.index("")]
        assert table[0].split() == [
            "PROGRAM", "FILES", "SIZE", "ON", "DISK", "SHARED", "DUPLICATE", "FOLDER",
        ]  # fmt: skip
        for program, folder in machine.folder.items():
            (row,) = [row for row in table if row.endswith(f"~/{folder.relative_to(machine.home)}")]
            assert row.startswith(program)
        assert table[-1].startswith("TOTAL ")
        assert "stable-diffusion-webui-forge/embeddings" not in done.stdout
        assert "3 empty)" in done.stderr

    @pytest.mark.usefixtures("machine")
    def test_the_largest_groups_come_first_with_the_survivor_marked(self, sc: Here) -> None:
        text = sc("scan", *SMALL, "--groups", "1").stdout
        head, first, *others = text.split("\n\n")[1].splitlines()
        assert head.startswith("65.5 KB × 7, 393 KB to free: Stable Diffusion XL · ")  # noqa: RUF001
        assert "stabilityai/stable-diffusion-xl-base-1.0" in head
        # A1111 keys its own cache on the time of the file, so its file stays.
        assert first.split()[:2] == ["stays", "A1111"]
        assert [line.split()[0] for line in others] == ["duplicate"] * 6
        assert "... and 4 smaller groups; --all shows them" in text

    def test_all_shows_every_group_with_every_path(self, sc: Here, tmp_path: Path) -> None:
        for number in range(12):
            write(tmp_path / "many" / f"{number}.pt", content(1))
            for name in ("x", "y"):
                write(tmp_path / "many" / name / f"{number}.pt", content(100 + number))
        text = sc("scan", tmp_path / "many", *SMALL).stdout
        assert text.count(" to free: ") == 10
        assert "  ... and 3 more\n" in text
        whole = sc("scan", tmp_path / "many", *SMALL, "--all").stdout
        assert whole.count(" to free: ") == 13
        assert whole.count("duplicate  ") == 11 + 12
        assert "more" not in whole
        assert "exclude each other" in sc("scan", "--all", "--groups", "3", code=2).error

    @pytest.mark.usefixtures("machine")
    def test_says_at_the_end_what_dedup_would_free(self, sc: Here) -> None:
        for words in ([], ["--quick"], ["--all"], ["--groups", "0"]):
            last = sc("scan", *SMALL, *words).stdout.splitlines()[-1]
            assert "'smartcache dedup --min-size 4KiB' would free " in last, words
            assert "1.05 MB" in last, words
            assert "5 groups" in last, words

    def test_counts_with_the_checks_of_dedup_and_names_the_option_that_includes_more(
        self, sc: Here, pair: Path
    ) -> None:
        """What save_pretrained writes has mode 0600."""
        (pair / "b.safetensors").chmod(0o600)
        for name in ("d", "e"):
            write(pair / f"{name}.safetensors", content(3))
        (pair / "e.safetensors").chmod(0o4755)
        text = sc("scan", pair, *SMALL).stdout
        nothing, more, stays = text.splitlines()[-3:]
        assert nothing == f"Links could free nothing here. {EXPLAINED}"
        assert more == "65.5 KB more with --allow mode (1 file differs in permissions)."
        assert stays == "65.5 KB stays as it is (1 file: has a special mode)."
        plan = sc("dedup", pair, *SMALL, "--allow", "mode", "-n")
        assert "Would replace 1 duplicate file and free 65.5 KB." in plan.stdout
        assert "1 file becomes readable by you only." in plan.stdout

    def test_the_command_it_names_can_be_pasted(self, sc: Here, tmp_path: Path) -> None:
        folder = tmp_path / "my models"
        write(folder / "a.db", content(1))
        write(folder / "b.db", content(1))
        done = sc(
            "scan", folder, "--any-file", "--min-size", "4KiB", "--exclude", "*.o", "--groups", "3"
        )
        line = next(each for each in done.stdout.splitlines() if " would free " in each)
        words = shlex.split(line.split("`")[1])
        assert words == [
            "smartcache", "dedup", str(folder), "--min-size", "4KiB", "--exclude", "*.o",
            "--any-file",
        ]  # fmt: skip
        assert sc(*words[1:], "-n", "--json").json["planned_size"] == SIZE

    def test_an_empty_path_is_an_error_and_not_this_folder(self, sc: Here) -> None:
        for words in (["scan"], ["dedup", "-n"], ["folders", "add"], ["add"]):
            assert "A path is empty" in sc(*words, "", code=2).stderr, words

    def test_one_folder_needs_no_total_and_may_have_nothing_to_free(
        self, sc: Here, pair: Path
    ) -> None:
        (pair / "b.safetensors").unlink()
        lines = sc("scan", pair, *SMALL).stdout.splitlines()
        assert lines[1].startswith("- ")
        assert [line for line in lines if line.startswith("TOTAL")] == []
        assert lines[-1] == f"No file is here twice. {EXPLAINED}"

    @pytest.mark.usefixtures("machine")
    def test_the_second_scan_reads_nothing(
        self, sc: Here, pass_time: Callable[[float], None]
    ) -> None:
        pass_time(3)  # what was written a moment before it is read is read again
        assert "read nothing" not in sc("scan", *SMALL).stderr
        assert "read nothing" in sc("scan", *SMALL).stderr

    def test_a_quick_one_says_that_it_proves_nothing(self, sc: Here, pair: Path) -> None:
        text = sc("scan", pair, *SMALL, "--quick").stdout
        assert "likely 65.5 KB to free" in text
        assert text.splitlines()[-1].endswith("if this group is proven equal.")
        (group,) = sc("scan", pair, *SMALL, "--quick", "--json").json["groups"]
        assert group["digest"] is None

    def test_fits_the_terminal(self, program: Smartcache, machine: Machine) -> None:
        for columns in (80, 140):
            folders = machine.folder.values()
            text = program.at_terminal("scan", *folders, *SMALL, columns=columns).stdout
            plain = text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
            table = plain[1 : plain.index("")] + [line for line in plain if line[:2] == "  "]
            assert max(map(len, table)) <= columns


class TestForPrograms:
    def test_every_folder_has_integer_bytes_and_how_it_was_found(
        self, sc: Here, machine: Machine
    ) -> None:
        done = sc("scan", *SMALL, "--json")
        document = done.json
        folders = {each["path"]: each for each in document["folders"]}
        for program, path in machine.folder.items():
            assert folders[str(path)]["program"] == program
        extra = folders[str(machine.comfyui_extra)]
        assert "extra_model_paths.yaml" in extra["found_by"]
        assert (extra["files"], extra["logical"], extra["is_given"]) == (1, SIZE, False)
        assert document["freeable"] == document["total"]["freeable"] == machine.duplicate_bytes
        assert sum(each["freeable"] for each in folders.values()) == machine.duplicate_bytes
        assert (document["problems"], document["busy"], document["warnings"]) == ([], [], [])
        assert document["is_quick"] is False
        found = {
            frozenset(name["path"] for copy in group["copies"] for name in copy["names"]): group
            for group in document["groups"]
        }
        for shared in machine.shared.values():
            group = found.pop(frozenset(map(str, shared.paths)))
            assert group["size"] == SIZE
            assert group["freeable"] == SIZE * (len(shared.paths) - 1)
            assert len(group["digest"]) == 64
            assert [copy["role"] for copy in group["copies"]].count("stays") == 1
        assert not found

    def test_quiet_prints_what_could_be_replaced(self, sc: Here, machine: Machine) -> None:
        paths = sc("scan", *SMALL, "-q").ids
        everything = {str(path) for each in machine.shared.values() for path in each.paths}
        assert len(paths) == len(set(paths)) == len(everything) - len(machine.shared)
        assert set(paths) < everything
        assert str(machine.shared["sdxl"].paths[0]) in paths

    def test_names_are_printed_byte_by_byte_but_do_not_command_a_terminal(
        self, program: Smartcache, pair: Path
    ) -> None:
        name = os.fsencode(pair) + ODD
        os.rename(os.fsencode(pair / "b.safetensors"), name)
        scan = ("scan", pair, *SMALL)
        for options, end in ((["-q"], b"\n"), (["-0"], b"\0"), (["-q", "--null"], b"\0")):
            assert os.fsencode(program(*scan, *options).stdout) == name + end
        (group,) = program(*scan, "--json").json["groups"]
        assert group["copies"][1]["names"][0]["path"] == os.fsdecode(name)
        assert program.at_terminal(*scan, "-q").stdout == f"{pair}/{SHOWN}\n"
        assert SHOWN in program(*scan).stdout


class TestWhatIsCompared:
    def test_links_are_no_duplicates_and_none_is_left(self, sc: Here, pair: Path) -> None:
        sc("scan", pair, *SMALL)
        assert {link_count(path) for path in pair.iterdir()} == {1}
        (pair / "b.safetensors").unlink()
        os.link(pair / "a.safetensors", pair / "hard.safetensors")
        (pair / "soft.safetensors").symlink_to("a.safetensors")
        document = sc("scan", pair, *SMALL, "--json").json
        assert document["groups"] == []
        assert document["total"]["files"] == 3
        assert document["total"]["physical"] == 2 * allocated(pair / "a.safetensors")

    def test_a_copy_with_a_name_outside_is_told_apart(
        self, sc: Here, pair: Path, tmp_path: Path
    ) -> None:
        write(pair / "d.safetensors", content(1))
        for name in ("a", "b"):
            os.link(pair / f"{name}.safetensors", tmp_path / name)
        (group,) = sc("scan", pair, *SMALL, "--json").json["groups"]
        roles = {copy["names"][0]["path"][-13]: copy["role"] for copy in group["copies"]}
        assert roles == {"a": "stays", "b": "other names", "d": "duplicate"}
        assert group["freeable"] == SIZE

    def test_small_excluded_and_edited_files_are_left_out(self, sc: Here, pair: Path) -> None:
        document = sc("scan", pair, "--json").json
        assert (document["groups"], document["min_size"]) == ([], 1 << 20)
        assert sc("scan", pair, *SMALL, "--exclude", "b.*", "-q").ids == []
        for name in ("x.db", "y.db"):
            write(pair / name, content(7))
        assert len(sc("scan", pair, *SMALL, "-q").ids) == 1
        assert len(sc("scan", pair, *SMALL, "-q", "--any-file").ids) == 2
        assert "65.5 KB more with --any-file (2 files" in sc("scan", pair, *SMALL).stdout
        assert sc("scan", pair, *SMALL, "--json").json["editable"] == SIZE
        assert "edit in place" not in sc("scan", pair, *SMALL, "--any-file").stdout

    @pytest.mark.usefixtures("machine")
    def test_some_programs_however_they_are_written(self, sc: Here) -> None:
        for name in ("lm studio", "LM Studio", "lmstudio", "LM-STUDIO"):
            document = sc("scan", "--program", name, "--json", *SMALL).json
            assert {each["program"] for each in document["folders"]} == {"LM Studio"}
        document = sc("scan", "--program", "ollama", "--program", "gpt4all", "--json", *SMALL).json
        assert {each["program"] for each in document["folders"]} == {"Ollama", "GPT4All"}
        assert document["freeable"] == SIZE

    def test_copies_on_another_filesystem_are_told(
        self, sc: Here, pair: Path, elsewhere: Path
    ) -> None:
        shutil.copy2(pair / "a.safetensors", elsewhere / "far.safetensors")
        done = sc("scan", pair, elsewhere, *SMALL)
        assert "other disk  " in done.stdout
        assert "copies on other filesystems, which links cannot free" in done.stdout
        document = sc("scan", pair, elsewhere, *SMALL, "--json").json
        assert (document["freeable"], document["elsewhere"]) == (SIZE, SIZE)
        (pair / "b.safetensors").unlink()  # links reach none now
        done = sc("scan", pair, elsewhere, *SMALL)
        assert "65.5 KB × 2: " in done.stdout  # noqa: RUF001
        assert done.stdout.splitlines()[-1] == f"Links could free nothing here. {EXPLAINED}"


class TestFolders:
    def test_no_folder_at_all_is_no_failure_and_tells_where_it_looked(self, sc: Here) -> None:
        text = sc("scan").stdout
        assert text.startswith("No model folder was found. Looked at:\n")
        assert "~/.ollama/models" in text
        assert text.endswith("Name a folder to scan it: smartcache scan FOLDER\n")
        assert sc("scan", "--json").json["folders"] == []
        assert sc("scan", "-q").stdout == ""
        text = sc("scan", "--program", "ollama").stdout
        assert text.startswith("No model folder of Ollama was found. Looked at:\n")
        assert "ComfyUI" not in text

    def test_what_is_no_folder_is_an_error_before_anything(
        self, sc: Here, pair: Path, home: Path
    ) -> None:
        for words, error in (
            (["scan", pair, "nowhere"], "No such file: nowhere"),
            (["dedup", pair, "nowhere", "-y"], "No such file: nowhere"),
            (["report", "nowhere"], "No such file: nowhere"),
            (["scan", pair / "a.safetensors"], f"{pair}/a.safetensors is not a folder"),
        ):
            done = sc(*words, code=1)
            assert done.error == error
            assert done.hint
        assert not home.exists()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_places_that_cannot_be_read_are_warned_of_and_counted(
        self, sc: Here, pair: Path
    ) -> None:
        (pair / "secret").mkdir(mode=0)
        done = sc("scan", pair, *SMALL)
        (pair / "secret").chmod(0o755)
        assert f"Warning: {pair}/secret: Permission denied" in done.stderr
        assert "1 place could not be looked at" in done.stderr

    def test_strange_settings_and_folders_that_are_gone_are_warned_of(
        self, sc: Here, machine: Machine, pair: Path
    ) -> None:
        (machine.home / "ComfyUI/extra_model_paths.yaml").write_text("a: [")
        done = sc("scan", *SMALL, "--json")
        assert done.stderr.count("Warning: ") == len(done.json["warnings"]) == 1
        sc("folders", "add", pair)
        shutil.rmtree(pair)
        assert f"Warning: {pair} is not there now" in sc("scan").stderr


def test_damaged_models_are_named_by_every_command_that_looks_at_models(
    sc: Here, pair: Path
) -> None:
    cut = write(pair / "cut.safetensors", safetensors(1)[:-1])
    write(pair / "empty.gguf", b"")
    words = " ".join(sc("scan", pair, *SMALL).stdout.split())
    named = "cut.safetensors is shorter than its header says, empty.gguf is empty"
    assert f"Damaged: {named}. Download again to repair." in words
    found = sc("scan", pair, *SMALL, "--json").json["damaged"]
    assert [each["path"] for each in found] == [str(cut), str(pair / "empty.gguf")]
    for command in (("report", pair), ("doctor",)):
        text = sc(*command).stdout
        assert "cut.safetensors" in text, command
        assert "empty.gguf" in text, command


def test_ctrl_c_says_that_it_was_not_in_vain(
    sc: Here, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scanning, "scan_folders", interrupted)
    text = sc("scan", pair, code=130).stderr
    assert "nothing is left half done" in text
    assert "the next scan goes on from there" in text
