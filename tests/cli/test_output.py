"""Tables, JSON and names: what people and programs are shown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.cli._json import encoded, plain
from smartcache.cli._output import printable
from smartcache.cli._tables import Column, cut, render, shortened, text_width
from tests.cli.running import Here, Smartcache
from tests.store.files import WEIGHTS, write


class TestTables:
    COLUMNS = (
        Column(title="ID"),
        Column(title="SIZE", right=True),
        Column(title="FILE", gives_way=True),
    )

    def lines(self, *rows: list[str], width: int | None = None) -> list[str]:
        return list(render(list(self.COLUMNS), rows, width))

    def test_columns_are_as_wide_as_what_is_in_them(self) -> None:
        assert self.lines(["a", "1 B", "/x"], ["bcd", "20 KB", "/long/y"]) == [
            "ID    SIZE  FILE",
            "a      1 B  /x",
            "bcd  20 KB  /long/y",
        ]

    def test_no_rows_no_table(self) -> None:
        assert self.lines() == []

    def test_without_titles_there_is_no_heading(self) -> None:
        columns = [Column(title=""), Column(title="", right=True)]
        assert list(render(columns, [["a", "1"], ["b", "20"]], None)) == ["a   1", "b  20"]

    def test_one_column_gives_way_in_the_middle(self) -> None:
        line = self.lines(["a", "1 B", "/home/user/models/x.safetensors"], width=36)[1]
        assert len(line) == 36
        assert line.startswith("a    1 B  /home")
        assert line.endswith("x.safetensors")
        assert "…" in line

    def test_a_long_table_is_written_as_it_comes(self) -> None:
        """A million rows must not wait for the last one, nor be kept."""
        taken = 0

        def rows() -> Iterator[list[str]]:
            nonlocal taken
            for taken in range(100_000):  # noqa: B007
                yield ["x", "1 B", "f"]

        lines = render(list(self.COLUMNS), rows(), None)
        next(lines)
        assert taken < 2000

    def test_wide_characters_take_two_columns(self) -> None:
        assert text_width("模型") == 4
        assert text_width("e\N{COMBINING ACUTE ACCENT}") == 1
        lines = self.lines(["模", "1 B", "f"], ["ab", "1 B", "f"])
        assert lines[1] == "模   1 B  f"
        assert lines[2] == "ab   1 B  f"

    @given(st.text(), st.integers(min_value=2, max_value=60))
    def test_what_is_cut_fits(self, text: str, width: int) -> None:
        assert text_width(shortened(text, width)) <= max(width, 0)

    def test_of_a_path_that_ends_with_a_hash_the_hash_goes_first(self) -> None:
        path = f"~/hub/models--org--name/blobs/{'0123456789abcdef' * 4}"
        assert shortened(path, 60) == "~/hub/models--org--name/blobs/01234567…"
        assert shortened(path, len(path)) == path
        assert shortened(path, 30).endswith("/blobs/01234567…")

    def test_a_heading_is_cut_at_its_end(self) -> None:
        assert cut("Stable Diffusion XL", 10) == "Stable Di…"
        assert cut("SDXL", 4) == "SDXL"
        assert text_width(cut("日本語モデル", 6)) <= 6


class TestNames:
    def test_can_neither_break_a_line_nor_command_the_terminal(self) -> None:
        shown = {
            "modèle 模型.pt": "modèle 模型.pt",
            "two\nlines": r"two\nlines",
            "\x1b]0;title\x07": r"\x1b]0;title\x07",
            os.fsdecode(b"\xff.pt"): r"\xff.pt",
            "right\N{RIGHT-TO-LEFT OVERRIDE}left": r"right\u202eleft",
        }
        assert {name: printable(name) for name in shown} == shown

    @given(st.binary())
    def test_of_any_bytes_are_printable(self, data: bytes) -> None:
        assert printable(os.fsdecode(data)).isprintable()


@dataclass(frozen=True)
class Value:
    path: Path
    at: datetime
    kinds: tuple[str, ...] = ()
    _execute: object = field(default=None)


class TestJson:
    def test_times_have_their_offset(self) -> None:
        moment = datetime(2026, 11, 16, 2, 30, 41, 5, tzinfo=UTC)
        assert plain(moment) == "2026-11-16T02:30:41Z"
        eastern = moment.astimezone(timezone(timedelta(hours=-5)))
        assert plain(eastern) == "2026-11-15T21:30:41-05:00"

    def test_values_are_their_public_fields(self) -> None:
        value = Value(Path("/x"), datetime(2026, 1, 1, tzinfo=UTC), ("a",))
        assert plain(value) == {"path": "/x", "at": "2026-01-01T00:00:00Z", "kinds": ["a"]}

    def test_sets_are_sorted(self) -> None:
        assert plain({"names": {"b", "a"}}) == {"names": ["a", "b"]}

    def test_is_ascii_and_keeps_every_byte_of_a_name(self) -> None:
        name = os.fsdecode(b"\xff\xe6\xa8\xa1.pt")
        text = "".join(encoded({"path": Path(name)}))
        assert text.isascii()
        assert json.loads(text)["path"] == name

    def test_a_stream_is_one_list(self) -> None:
        for rows in ([], [{"n": 1}], [{"n": 1}, {"n": 2}, {"n": 3}]):
            assert json.loads("".join(encoded(iter(rows)))) == rows

    def test_what_cannot_be_written_is_a_fault(self) -> None:
        with pytest.raises(TypeError):
            list(encoded({"x": object()}))


class TestTerminal:
    def test_errors_are_coloured_where_somebody_looks(
        self, program: Smartcache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "\x1b[31mError:\x1b[0m" in program.at_terminal("rm", "zzzz").stdout
        assert "\x1b" not in program("rm", "zzzz", code=1).stderr
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b[31m" not in program.at_terminal("rm", "zzzz").stdout

    def test_colours_can_be_asked_for_and_refused(self, program: Smartcache) -> None:
        for words, env, is_coloured in (
            (["--color", "always"], {"NO_COLOR": "1"}, True),
            ([], {"FORCE_COLOR": "1"}, True),
            ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
            (["--color", "never"], {"FORCE_COLOR": "1"}, False),
        ):
            done = program(*words, "rm", "zzzz", code=1, env=env)
            assert ("\x1b[31mError:\x1b[0m" in done.stderr) == is_coloured, (words, env)

    def test_what_stays_and_what_becomes_a_link_have_their_colours(
        self, program: Smartcache, models: Path
    ) -> None:
        words = ("dedup", models, "--min-size", "1", "-n")
        coloured = program("--color", "always", *words).stdout
        assert re.search(r"^\x1b\[32m *stays *\x1b\[0m", coloured, re.MULTILINE)
        assert re.search(r"^\x1b\[36m *link *\x1b\[0m", coloured, re.MULTILINE)
        assert re.sub(r"\x1b\[\d+m", "", coloured) == program(*words).stdout

    def test_long_sentences_wrap_at_words(self, program: Smartcache, tmp_path: Path) -> None:
        write(tmp_path / "m.gguf", WEIGHTS)
        done = program.at_terminal("add", "--adopt", "m.gguf", columns=40)
        sentence = "Adopted files are read-only now;\n'smartcache undo --last' takes that\nback.\n"
        assert done.stdout.endswith(sentence)

    def test_an_id_is_never_cut_but_a_path_is(self, program: Smartcache, tmp_path: Path) -> None:
        path = write(tmp_path / ("long " * 30) / "m.gguf", WEIGHTS)
        program("add", "--adopt", path)
        (entry,) = program("undo", "-q").ids
        (row,) = program.at_terminal("undo", columns=80).stdout.splitlines()[1:2]
        assert row.startswith(f"{entry}  ")
        assert len(row) <= 80
        assert "…" in row

    def test_a_terminal_without_unicode_gets_escapes(
        self, program: Smartcache, tmp_path: Path
    ) -> None:
        (tmp_path / "modèle.pt").write_bytes(b"x" * 100)
        env = {"PYTHONIOENCODING": "ascii"}
        assert r"mod\xe8le.pt" in program("add", "modèle.pt", env=env).stdout


def test_an_error_with_line_breaks_stays_one_line(sc: Here) -> None:
    assert sc("add", "no\nsuch\nfile", code=1).error == r"No such file: no\nsuch\nfile"
