from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from smartcache.cli._output import printable
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import scan_folders as scan
from smartcache.report import html
from smartcache.report.figures import Report, Sums, make_report
from smartcache.store.store import Store
from tests.folders.trees import SIZE, hf_repo, safetensors, write
from tests.report.values import (
    COMFYUI,
    GB,
    HOSTILE,
    PLAIN,
    copy,
    group,
    report,
    seen,
    set_info,
)

NOTHING = html.Beside()


def document(made: Report, beside: html.Beside = NOTHING, **words: list[str]) -> Any:  # noqa: ANN401
    """The data of a page, as its script reads it."""
    return data_of(html.render(html.document(made, beside, clean=printable, **words)))


def data_of(page: str) -> Any:  # noqa: ANN401 - whatever the page holds
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def leaves(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        if "children" in node:
            yield from leaves(node["children"])
        else:
            yield node


class TestMap:
    def test_program_then_folders_then_file(self) -> None:
        files = (
            (seen("loras/a.pt", 3, inode=1),),
            (seen("unet/deep/er/b.pt", 5, inode=2),),
            (seen("c.pt", 7, inode=3, folder=PLAIN),),
        )
        made = document(report(folders=(COMFYUI, PLAIN), files=files))
        comfyui, plain = made["map"]
        assert (comfyui["name"], plain["name"]) == ("ComfyUI", "/p")
        assert [node["name"] for node in comfyui["children"]] == ["loras", "unet/deep/er"]
        (leaf,) = comfyui["children"][1]["children"]
        assert (leaf["name"], leaf["bytes"], leaf["path"]) == (
            "b.pt", 5, "/c/models/unet/deep/er/b.pt",
        )  # fmt: skip

    def test_names_of_one_file_bear_equal_parts_that_add_up(self) -> None:
        same = tuple(seen(f"{name}.pt", 100, inode=1, links=3) for name in "abc")
        found = list(leaves(document(report(files=(same,)))["map"]))
        assert [leaf["bytes"] for leaf in found] == [34, 33, 33]
        assert {(leaf["state"], leaf["disk"], leaf["file"]) for leaf in found} == {
            ("shared", 100, 0)
        }

    def test_what_dedup_would_replace_is_marked(self) -> None:
        files = ((seen("a.pt", GB, inode=1),), (seen("b.pt", GB, inode=2),))
        twice = group(copy(1, "/c/models/a.pt"), copy(2, "/c/models/b.pt"))
        found = leaves(document(report(files=files, groups=(twice,)))["map"])
        assert {leaf["name"]: leaf["state"] for leaf in found} == {
            "a.pt": "own", "b.pt": "duplicate",
        }  # fmt: skip

    def test_of_very_many_files_the_smallest_are_counted_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(html, "MOST_FILES", 3)
        files = tuple((seen(f"{n}.pt", n, inode=n),) for n in range(1, 10))
        found = leaves(document(report(files=files))["map"])
        assert {leaf["name"]: leaf["bytes"] for leaf in found} == {
            "7.pt": 7, "8.pt": 8, "9.pt": 9, "6 smaller files": 21,
        }  # fmt: skip

    def test_tensors_and_what_only_smartcache_holds_take_room_too(self) -> None:
        info = set_info(f"latents/{'ab' * 16}", on_disk=50)
        beside = html.Beside(only_smartcache=70)
        made = document(report(artifact_sets=((info, 10),), prunable=60), beside)
        assert [(leaf["name"], leaf["bytes"]) for leaf in leaves(made["map"])] == [
            ("latents/abababababab", 50), ("Held only by smartcache", 70),
        ]  # fmt: skip
        (action,) = made["actions"]
        assert (action["command"], action["size"]) == ("smartcache prune", 60)


class TestCommands:
    def test_look_at_the_folders_that_the_report_looked_at(self) -> None:
        made = document(
            report(total=Sums(label="total", freeable=5), uncompared=2),
            program=["smartcache", "--home", "/my store"],
            options=["--min-size=9"],
            folders=["/c/models"],
        )
        assert [each["command"] for each in made["actions"]] == [
            "smartcache --home '/my store' dedup --min-size=9 /c/models",
            "smartcache --home '/my store' scan --min-size=9 /c/models",
        ]

    def test_a_group_names_the_folders_its_copies_are_in(self) -> None:
        twice = group(copy(1, "/c/models/a.pt"), copy(2, "/p/b.pt", folder=PLAIN))
        apart = group(copy(1, "/c/a"), copy(2, "/p/b", filesystem="uuid:2"), elsewhere=GB)
        first, second = document(
            report(groups=(apart, twice)), options=["--only=ComfyUI", "--min-size=9"]
        )["groups"]
        assert first["command"] == "smartcache dedup --min-size=9 /c/models /p"
        assert [each["role"] for each in first["copies"]] == ["stays", "duplicate"]
        assert second["command"] == ""

    @pytest.mark.parametrize("word", [*HOSTILE, "a b", "it's\n\udcff0", "-n"])
    def test_a_shell_takes_any_word_back_as_it_was(self, word: str) -> None:
        line = html.shell(["printf", "%s", word])
        assert line.isprintable()
        done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
        assert done.stdout == os.fsencode(word)


class TestPage:
    def test_names_are_data_that_no_parser_takes_for_markup(self) -> None:
        files = tuple((seen(name, 5, inode=n),) for n, name in enumerate(HOSTILE))
        page = html.render(html.document(report(files=files), NOTHING, clean=printable))
        empty = html.render(html.document(report(), NOTHING, clean=printable))
        assert page.count("<") == empty.count("<")
        assert "{{script}} {{data}}" in page
        assert not re.search("[\u2028\u2029\u202e\x1b\udc80-\udcff]", page)
        paths = {leaf["path"] for leaf in leaves(data_of(page)["map"])}
        assert paths == {printable(f"/c/models/{name}") for name in HOSTILE}

    def test_the_policy_lets_nothing_run_but_what_is_in_it(self) -> None:
        page = html.render(html.document(report(), NOTHING, clean=printable))
        (policy,) = re.findall(r'Security-Policy" content="([^"]*)"', page)
        (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        assert policy == (
            f"default-src 'none'; script-src '{sha256(script)}'; style-src '{sha256(style)}'; "
            "base-uri 'none'; form-action 'none'"
        )
        assert not re.search(r"https?://|innerHTML|insertAdjacent|document\.write|eval\(", page)


def sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class TestFigures:
    """With real files: the page has the figures of the other forms."""

    def test_they_are_those_of_the_report(self, store: Store, tmp_path: Path) -> None:
        folders = [
            ModelFolder(path=tmp_path / "hub", program="Hugging Face"),
            ModelFolder(path=tmp_path / "other"),
        ]
        unet, encoder, extra = (safetensors(n) for n in (1, 2, 3))
        first = hf_repo(folders[0].path, "org/first", {"unet/x.pt": unet, "te/y.pt": encoder})
        second = hf_repo(folders[0].path, "org/second", {"te/y.pt": encoder, "unet/x.pt": extra})
        second["te/y.pt"].unlink()
        second["te/y.pt"].hardlink_to(first["te/y.pt"])
        write(folders[1].path / "copy.pt", unet)
        scan(store, folders, min_size=4096)
        made = make_report(store, folders, min_size=4096, is_detailed=True)
        data = document(made, html.look_beside(store, made))
        assert sum(leaf["bytes"] for leaf in leaves(data["map"])) == made.total.physical
        assert data["total"]["freeable"] == SIZE == sum(each["freeable"] for each in data["groups"])
        hub = data["folders"][0]
        assert hub["only"] + hub["shared"] == hub["physical"]
        (component,) = data["components"]
        assert (component["name"], component["files"], component["size"]) == ("te", 1, SIZE)
        assert component["repos"] == ["model/org/first", "model/org/second"]
        assert [each["command"] for each in data["repos"]] == [
            "smartcache hub rm model/org/first", "smartcache hub rm model/org/second",
        ]  # fmt: skip


def test_sets_have_their_age() -> None:
    then = datetime(2025, 1, 1, tzinfo=UTC)
    (row,) = document(report(artifact_sets=((set_info("a/b", at=then), 0),)))["sets"]
    assert (row["created"], row["used"]) == ("2025-01-01T00:00:00+00:00",) * 2
