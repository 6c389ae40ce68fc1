from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smartcache.sizes import format_size
from tests.cli.running import Here, Smartcache
from tests.folders.trees import SIZE, Machine, content, hf_repo, write
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
        parts = ["All folders", "Room on disk", "By program", "By kind of file", "By repo"]
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

    def test_quiet_prints_the_folders(self, scanned: Here, machine: Machine) -> None:
        lines = scanned("report", *SMALL, "-q").stdout.splitlines()
        assert {str(path) for path in machine.folder.values()} <= set(lines)


def test_what_cannot_be_meant_is_refused(sc: Here) -> None:
    for mode in ("--json", "-q"):
        assert "exclude each other" in sc("report", "--html", "a.html", mode, code=2).error
    assert "--html FILE" in sc("report", "--force", code=2).hint


def test_one_program(scanned: Here) -> None:
    document = scanned("report", *SMALL, "--program", "ollama", "--json").json
    assert [row["label"] for row in document["programs"]] == ["Ollama"]


def page_data(sc: Here, *words: Path) -> Any:  # noqa: ANN401 - whatever the page holds
    text = sc("report", *SMALL, "--html", "-", *words).stdout
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


def tiles(nodes: list[Any], *above: str) -> Iterator[tuple[str, ...]]:
    """The way to each tile of the map."""
    for node in nodes:
        if "children" in node:
            yield from tiles(node["children"], *above, node["name"])
        else:
            yield (*above, node["name"])


class TestLinksOutOfAFolder:
    """Programs' folders are followed to where their symlinks lead."""

    @pytest.fixture
    def comfyui(self, tmp_path: Path) -> Path:
        folder = tmp_path / "ComfyUI/models"
        write(folder / "loras/a.safetensors", content(1))
        write(folder / "checkpoints/b.safetensors", content(2))
        return folder

    def test_a_file_there_has_its_whole_path(self, sc: Here, comfyui: Path, tmp_path: Path) -> None:
        """Not what is left if as many characters are cut as the folder's path has."""
        embeddings = tmp_path / "another place of that length/embeddings"
        write(embeddings / "deep/c.safetensors", content(3))
        (comfyui / "embeddings").symlink_to(embeddings)
        sc("scan", comfyui, *SMALL, "-q")
        page = page_data(sc, comfyui)
        assert set(tiles(page["map"])) == {
            ("ComfyUI", "loras", "a.safetensors"),
            ("ComfyUI", "checkpoints", "b.safetensors"),
            ("ComfyUI", f"{embeddings}/deep", "c.safetensors"),
        }
        assert str(embeddings / "deep/c.safetensors") in str(page["map"])

    def test_so_has_one_whose_path_only_begins_like_the_folder(
        self, sc: Here, comfyui: Path
    ) -> None:
        more = comfyui.with_name("models-2")
        write(more / "c.safetensors", content(3))
        (comfyui / "more").symlink_to(more)
        sc("scan", comfyui, *SMALL, "-q")
        assert ("ComfyUI", str(more), "c.safetensors") in set(tiles(page_data(sc, comfyui)["map"]))

    def test_so_has_a_blob_of_a_repo_that_lies_elsewhere(self, sc: Here, tmp_path: Path) -> None:
        hub = tmp_path / "hub"
        hf_repo(hub, "org/here", {"x.safetensors": content(1)})
        blob = hf_repo(tmp_path / "disk", "org/model", {"y.safetensors": content(2)})
        (hub / "models--org--model").symlink_to(tmp_path / "disk/models--org--model")
        sc("scan", hub, *SMALL, "-q")
        found = set(tiles(page_data(sc, hub)["map"]))
        (path,) = blob.values()
        assert ("Hugging Face", "org/here", "x.safetensors") in found
        assert ("Hugging Face", str(path.parent), path.name) in found


class TestLeftAlone:
    """Equal files that dedup replaces only with an option: no part of a report hides them."""

    @pytest.fixture
    def pair(self, sc: Here, tmp_path: Path) -> Path:
        folder = tmp_path / "two of them"
        for name, mode in (("a", 0o644), ("b", 0o600)):
            write(folder / f"{name}.safetensors", content(1)).chmod(mode)
        sc("scan", folder, *SMALL, "-q")
        return folder

    def test_text_says_what_scan_says_and_the_command(self, sc: Here, pair: Path) -> None:
        said = "65.5 KB more with --allow mode (1 file differs in permissions)."
        text = sc("report", pair, *SMALL).stdout
        assert said in sc("scan", pair, *SMALL).stdout
        assert said in text
        assert "twice" not in text
        (line,) = re.findall(r"Run `(.*)` to include that.", text)
        assert line == f"smartcache dedup '{pair}' --allow mode --min-size 4KiB"
        assert sc(*shlex.split(line)[1:], "-y", "--json").json["freed_size"] == SIZE

    def test_so_does_the_page(self, sc: Here, pair: Path) -> None:
        page = page_data(sc, pair)
        (action,) = page["actions"]
        said = "65.5 KB more with --allow mode (1 file differs in permissions)."
        assert (action["text"], action["size"], action["certain"]) == (said, SIZE, False)
        (group,) = page["groups"]
        assert (group["left"], group["reasons"]) == (SIZE, ["different permissions"])
        for line in (group["command"], action["command"]):
            plan = sc(*shlex.split(line)[1:], "-n", "--json").json
            assert plan["planned_size"] == SIZE, line

    def test_what_no_option_includes_has_no_command(self, sc: Here, pair: Path) -> None:
        (pair / "b.safetensors").chmod(0o4755)
        sc("scan", pair, *SMALL, "-q")
        page = page_data(sc, pair)
        (action,) = page["actions"]
        assert action["text"] == "65.5 KB stays as it is (1 file: has a special mode)."
        assert (action["size"], action["command"], page["groups"][0]["command"]) == (SIZE, "", "")

    def test_copies_on_two_disks_are_here_twice(
        self, sc: Here, tmp_path: Path, elsewhere: Path
    ) -> None:
        for folder in (tmp_path / "m", elsewhere):
            write(folder / "a.safetensors", content(1))
        sc("scan", tmp_path / "m", elsewhere, *SMALL, "-q")
        text = sc("report", tmp_path / "m", elsewhere, *SMALL).stdout
        assert "twice" not in text
        assert "Links could free nothing here." in text


class TestDisks:
    def test_free_room_and_what_prune_would_free(
        self, sc: Here, tmp_path: Path, elsewhere: Path
    ) -> None:
        for folder in (tmp_path / "m", elsewhere):
            write(folder / "a.safetensors", content(1))
        alone = write(tmp_path / "alone.bin", content(2))
        sc("add", "--no-pin", alone)
        os.link(alone, tmp_path / "m/alone.bin")  # links do not count again
        sc("scan", tmp_path / "m", elsewhere, *SMALL, "-q")
        folders = (tmp_path / "m", elsewhere)
        disks = sc("report", *folders, *SMALL, "--json").json["disks"]
        would = sc("prune", "-n", "--json").json["planned_size"]
        assert would == SIZE
        by_device = {os.stat(each["path"]).st_dev: each for each in disks}
        assert len(by_device) == len(disks) == 2
        near, far = (by_device[os.stat(folder).st_dev] for folder in folders)
        assert (near["prunable"], far["prunable"]) == (would, 0)
        for disk in disks:
            free = shutil.disk_usage(disk["path"]).free
            assert abs(disk["free"] - free) < 1 << 30  # others write there too
        page = page_data(sc, *folders)
        assert [(each["path"], each["prunable"]) for each in page["disks"]] == [
            (each["path"], each["prunable"]) for each in disks
        ]
        text = sc("report", *folders, *SMALL).stdout
        for disk in disks:
            size = format_size(disk["prunable"])
            assert re.search(rf"^ *[\d.]+ \w+ +{size}  {disk['path']}$", text, re.MULTILINE)

    def test_a_disk_is_one_line_however_many_folders_are_on_it(
        self, sc: Here, tmp_path: Path
    ) -> None:
        for name in "abc":
            write(tmp_path / name / "x.pt", content(1))
        sc("scan", *(tmp_path / name for name in "abc"), *SMALL, "-q")
        assert len(sc("report", *"abc", *SMALL, "--json").json["disks"]) == 1


def test_without_a_store_it_counts_and_makes_nothing(sc: Here, tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"m/{name}.pt", content(1))
    before = snapshot(tmp_path)
    document = sc("report", "m", *SMALL, "--json").json
    assert (document["total"]["files"], document["uncompared"]) == (2, 2)
    assert (document["prunable"], len(document["disks"])) == (0, 1)
    assert "2 files never compared" in sc("report", "m", *SMALL).stdout
    assert sum(1 for _ in tiles(page_data(sc, tmp_path / "m")["map"])) == 2
    assert snapshot(tmp_path) == before
