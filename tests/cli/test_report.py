from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Here, Smartcache
from tests.folders.trees import SIZE, Machine, content, write
from tests.store.files import snapshot

SMALL = ("--min-size", "4KiB")
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def scanned(sc: Here, machine: Machine) -> Here:
    """A machine whose duplicates are known."""
    assert machine.duplicate_bytes
    sc("scan", *SMALL, "-q")
    return sc


class TestText:
    def test_its_parts(self, scanned: Here) -> None:
        text = scanned("report", *SMALL).stdout
        parts = ["All folders", "By program", "By kind of file", "By repo", "Not read for 3 months"]
        assert [line for line in text.splitlines() if line in parts] == parts
        assert "'smartcache dedup --min-size 4KiB' would free 1.05 MB more." in text

    def test_after_dedup_it_says_what_that_saves(self, scanned: Here) -> None:
        scanned("dedup", *SMALL, "-y")
        text = scanned("report", *SMALL).stdout
        assert "Sharing saves 1.05 MB" in text
        assert "Shared most" in text
        assert re.search(r"^ +7 +65.5 KB +393 KB +Stable Diffusion XL · ", text, re.MULTILINE)

    def test_before_a_scan_it_says_what_was_never_compared(
        self, sc: Here, machine: Machine
    ) -> None:
        sc("folders", "add", machine.comfyui)
        before = snapshot(machine.home)
        text = sc("report", *SMALL).stdout
        assert re.search(r"^\d+ files never compared .*'smartcache scan'", text, re.MULTILINE)
        assert snapshot(machine.home) == before

    def test_fits_the_terminal(self, program: Smartcache, machine: Machine) -> None:
        program("dedup", *machine.folder.values(), *SMALL, "-y")
        text = program.at_terminal("report", *machine.folder.values(), *SMALL, columns=80).stdout
        plain = text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
        assert max(map(len, plain)) <= 80


class TestForPrograms:
    def test_the_document_adds_up(self, scanned: Here, machine: Machine) -> None:
        document = scanned("report", *SMALL, "--json").json
        total = document["total"]
        assert total["freeable"] == machine.duplicate_bytes
        for part in ("programs", "kinds"):
            for figure in ("files", "logical", "saved", "freeable"):
                assert sum(row[figure] for row in document[part]) == total[figure]
        assert {row["label"] for row in document["programs"]} == set(machine.folder)
        assert {row["label"] for row in document["kinds"]} >= {"safetensors", "gguf", "ckpt/bin"}
        repos = {row["label"]: row for row in document["repos"]}
        assert {"openai/clip-vit-large-patch14", "datasets/nlp/rows", "llama3:8b"} <= repos.keys()
        assert repos["stabilityai/stable-diffusion-xl-base-1.0"]["files"] == 5
        assert document["uncompared"] == 0
        assert document["problems"] == document["warnings"] == []

    def test_every_path_of_what_is_shared(self, scanned: Here, machine: Machine) -> None:
        scanned("dedup", *SMALL, "-y", "-q")
        first = scanned("report", *SMALL, "--json").json["most_shared"][0]
        assert set(first["paths"]) == {str(path) for path in machine.shared["sdxl"].paths}
        assert first["saved"] == 6 * SIZE

    def test_quiet_prints_what_nobody_has_read_for_long(
        self, sc: Here, tmp_path: Path, program: Smartcache
    ) -> None:
        name = os.fsencode(tmp_path) + b"/m/old\n\xff.pt"
        write(Path(os.fsdecode(name)), content(1))
        write(tmp_path / "m/new.pt", content(2), mtime=2_000_000_000)
        sc("scan", tmp_path / "m", *SMALL)
        done = program("report", tmp_path / "m", *SMALL, "-q", "--older-than", "1y")
        assert os.fsencode(done.stdout) == name + b"\n"


def test_markdown(scanned: Here) -> None:
    lines = scanned("report", *SMALL, "--markdown").stdout.splitlines()
    assert lines[0].startswith("# Model files on this machine, ")
    assert "## By program" in lines
    position = lines.index("## By program")
    assert lines[position + 2] == "| FILES | SIZE | ON DISK | SAVED | DUPLICATE | PROGRAM |"
    assert all(line.count("|") == 7 for line in lines[position + 2 : position + 10])


def test_what_cannot_be_meant_is_refused(sc: Here) -> None:
    for mode in ("--json", "-q"):
        assert "exclude each other" in sc("report", "--markdown", mode, code=2).error
        assert "exclude each other" in sc("report", "--html", "a.html", mode, code=2).error
    assert "not an age" in sc("report", "--older-than", "old", code=2).error


def test_one_program(scanned: Here) -> None:
    document = scanned("report", *SMALL, "--only", "ollama", "--json").json
    assert [row["label"] for row in document["programs"]] == ["Ollama"]


def page_data(sc: Here) -> Any:  # noqa: ANN401 - whatever the page holds
    text = sc("report", *SMALL, "--html", "-").stdout
    (found,) = re.findall(r'id="data">(.*?)</script>', text)
    return json.loads(found)


class TestPage:
    def test_is_written_whole_and_its_path_is_printed(self, scanned: Here, tmp_path: Path) -> None:
        assert scanned("report", *SMALL, "--html", "-").stdout.startswith("<!doctype html>")
        before = set(os.listdir(tmp_path))
        done = scanned("report", *SMALL, "--html", "a.html")
        assert done.stdout == f"{tmp_path / 'a.html'}\n"
        text = (tmp_path / "a.html").read_text("utf-8")
        assert text.startswith("<!doctype html>")
        assert text.endswith("</html>\n")
        assert "smartcache dedup --min-size=4096" in text
        assert set(os.listdir(tmp_path)) == before | {"a.html"}

    def test_its_commands_do_what_they_promise(self, scanned: Here) -> None:
        def freed_by(command: str) -> int:
            size: int = scanned(*shlex.split(command)[1:], "-y", "--json").json["freed_size"]
            return size

        page = page_data(scanned)
        group, action = page["groups"][-1], page["actions"][0]
        freed = freed_by(group["command"])
        assert freed >= group["freeable"] > 0
        assert freed + freed_by(action["command"]) == action["size"] == page["total"]["freeable"]
        assert page_data(scanned)["groups"] == []

    def test_what_was_deleted_since_the_last_look_can_be_freed(
        self, scanned: Here, machine: Machine
    ) -> None:
        scanned("dedup", *SMALL, "-y")
        for path in machine.shared["sdxl"].paths:
            path.unlink()
        page = page_data(scanned)
        assert page["total"]["store"] == SIZE
        (action,) = [each for each in page["actions"] if each["command"] == "smartcache prune"]
        assert action["size"] == SIZE
        assert scanned("prune", "-y", "--json").json["freed_size"] == SIZE

    def test_replaces_an_older_page_and_nothing_else(self, scanned: Here, tmp_path: Path) -> None:
        page, other = tmp_path / "a.html", write(tmp_path / "b.html", b"<!doctype html>mine")
        link = tmp_path / "link.html"
        link.symlink_to(page)
        scanned("report", *SMALL, "--html", page)
        inode = page.stat().st_ino
        scanned("report", *SMALL, "--html", link)
        assert link.is_symlink()
        assert page.stat().st_ino != inode
        done = scanned("report", *SMALL, "--html", other, code=1)
        assert done.error == f"{other} exists and is not a report"
        assert "--force" in done.hint
        assert other.read_bytes() == b"<!doctype html>mine"
        scanned("report", *SMALL, "--html", other, "--force")
        assert b"smartcache report" in other.read_bytes()

    def test_a_place_where_it_cannot_be(self, scanned: Here, tmp_path: Path) -> None:
        """Said before anything is looked at, also with --force."""
        os.mkfifo(tmp_path / "fifo")
        for place, message in (
            (tmp_path, f"{tmp_path} is a folder"),
            (tmp_path / "no/a.html", f"There is no folder {tmp_path / 'no'}"),
            (tmp_path / "fifo", f"{tmp_path / 'fifo'} is not a file"),
        ):
            assert scanned("report", "--html", place, "--force", code=1).error == message
        assert "--html FILE" in scanned("report", "--open", code=2).hint
        assert "needs a file" in scanned("report", "--html", "-", "--open", code=2).error

    def test_opens_in_the_browser(self, program: Smartcache, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        program("scan", tmp_path / "m")
        browser = tmp_path / "browser"
        browser.write_text('#!/bin/sh\necho "$1" > opened\n')
        browser.chmod(0o755)
        words = ("report", tmp_path / "m", "--html", "a b.html", "--open")
        done = program(*words, env={"BROWSER": str(browser)})
        assert done.stdout == f"{tmp_path / 'a b.html'}\n"
        assert (tmp_path / "opened").read_text() == f"file://{tmp_path}/a%20b.html\n"
