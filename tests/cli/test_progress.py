"""Bars are for people who wait: on a terminal, after half a second, gone at the end."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from smartcache.cli import _output as cli_output
from smartcache.cli import _progress
from smartcache.cli._output import out
from smartcache.cli._progress import Bars, Share
from smartcache.progress import Progress
from tests.cli.running import Here, Smartcache, Terminal
from tests.store.files import Watch

GIGABYTE = 10**9


class Screen(io.StringIO):
    """A terminal that remembers what was drawn over and over, and the lines that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[str] = []
        self.lines = [""]
        self._column = 0

    def write(self, text: str) -> int:
        self.drawn.extend(line.rstrip() for line in text.split("\r")[1:])
        for piece in re.split(r"([\r\n])", text):
            if piece == "\n":
                self.lines.append("")
            if piece in ("\r", "\n"):
                self._column = 0
                continue
            line = self.lines[-1]
            end = self._column + len(piece)
            self.lines[-1] = line[: self._column] + piece + line[end:]
            self._column = end
        return len(text)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal of 100 columns that is drawn on from the first moment on."""
    screen = Screen()
    for module in (_progress, cli_output):
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=screen))
    monkeypatch.setattr(out, "mode", "human")
    monkeypatch.setattr(out, "can_show_bars", lambda: True)
    monkeypatch.setattr(_progress, "terminal_width", lambda _: 100)
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    monkeypatch.setattr(_progress, "_STEP", 0.001)
    return screen


@pytest.fixture
def drawn(screen: Screen) -> list[str]:
    return screen.drawn


def wait_for(lines: list[str], text: str) -> str:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = [line for line in lines if text in line]
        if found:
            return found[-1]
        time.sleep(0.001)
    raise AssertionError(lines)


def test_a_bar_shows_how_far_how_fast_how_long_and_with_what(drawn: list[str]) -> None:
    bars: Progress = Bars()
    with bars("Hashing", 4 * GIGABYTE, "bytes") as job:
        job.describe("model.safetensors")
        job.advance(GIGABYTE)
        line = wait_for(drawn, "25%")
    assert line.startswith("Hashing  [####------------]  25%  1 GB/4 GB  ")
    assert re.search(r"/s  \d+ \w+ left  model.safetensors$", line)
    assert drawn[-1] == ""


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_name_of_the_file_gives_way_to_the_time_that_is_left(
    columns: int, drawn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "terminal_width", lambda _: columns)
    with Bars()("Restoring files", 4 * GIGABYTE, "bytes") as job:
        job.describe("diffusion_pytorch_model-00001-of-00003.fp16.safetensors")
        job.advance(GIGABYTE)
        line = wait_for(drawn, "25%")
    assert " left" in line
    assert len(line) < columns
    assert line.endswith("ensors" if columns > 60 else " left")


def test_items_are_counted(drawn: list[str]) -> None:
    with Bars()("Pruning", 10) as job:
        job.advance(5)
        assert "50%  5/10" in wait_for(drawn, "5/10")


def test_without_a_total_or_an_advance_time_is_shown(drawn: list[str]) -> None:
    with Bars()("Waiting"):
        assert wait_for(drawn, "Waiting") == "Waiting  0 seconds"


def test_the_job_opened_last_is_drawn(drawn: list[str]) -> None:
    bars = Bars()
    with bars("Outer", 10):
        with bars("Inner", 10):
            wait_for(drawn, "Inner")
        drawn.clear()
        wait_for(drawn, "Outer")


def test_more_than_the_total_is_all(drawn: list[str]) -> None:
    """A file that grew while it was copied."""
    with Bars()("Copying", 10, "bytes") as job:
        job.advance(25)
        assert "100%" in wait_for(drawn, "Copying")


def test_closing_twice_does_no_harm(drawn: list[str]) -> None:
    job = Bars()("Copying", 10)
    job.close()
    job.close()


def test_a_warning_is_never_on_the_line_of_a_bar(screen: Screen) -> None:
    """The thread that draws and the one that warns take turns."""
    with Bars()("Undoing", 4 * GIGABYTE, "bytes") as job:
        wait_for(screen.drawn, "Undoing")
        for number in range(200):
            job.advance(1_000_000)
            out.warn(f"number {number}")
            time.sleep(0.001)
    warnings = [line.strip() for line in screen.lines if line.strip()]
    assert warnings == [f"Warning: number {number}" for number in range(200)]


def test_a_share_counts_exactly_its_part() -> None:
    whole = Watch()
    known, read = Share(whole, 100), Share(whole, 50)
    with read("x", 50, "bytes") as job:
        job.advance(30)
        job.advance(30)
    read.finish()
    known.finish()
    assert whole.done == 150


def big(path: Path, size: int = 12 * GIGABYTE) -> Path:
    """A file that takes seconds to hash and no room on the disk."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_long_job_shows_a_bar_at_a_terminal(
    sc: Here, program: Smartcache, tmp_path: Path
) -> None:
    file = big(tmp_path / "big.safetensors")
    with Terminal(program, "add", "--adopt", file, columns=80) as terminal:
        terminal.read_until(" left  big.safetensors")
        assert re.search(r"\rAdopting +\d+%  [\d.]+ [MG]B/12 GB  ", terminal.text)
        terminal.process.terminate()


@pytest.mark.parametrize("option", ["--json", "-q"])
def test_programs_get_no_bar_even_at_a_terminal(
    option: str, program: Smartcache, models: Path
) -> None:
    assert "\r" not in program.at_terminal("add", option, models / "a.safetensors").stdout


def test_a_short_job_shows_none(program: Smartcache, models: Path) -> None:
    assert "\r " not in program.at_terminal("add", models / "a.safetensors").stdout
