"""Bars are for people who wait: on a terminal, after half a second, gone at the end."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.api import Bars, Progress, Share, out
from tests.api import cli_progress as _progress
from tests.cli.running import Here, Smartcache, Terminal
from tests.store.files import Watch

GIGABYTE = 10**9


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a watched terminal would be told to show, from the first moment on."""
    lines: list[str] = []
    monkeypatch.setattr(out, "mode", "human")
    monkeypatch.setattr(out, "can_show_status", lambda: True)
    monkeypatch.setattr(out, "status", lines.append)
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    monkeypatch.setattr(_progress, "_STEP", 0.001)
    return lines


def wait_for(lines: list[str], text: str) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [line for line in lines if text in line]
        if found:
            return found[-1]
        time.sleep(0.001)
    raise AssertionError(lines)


def test_a_bar_shows_how_far_how_fast_and_how_long(drawn: list[str]) -> None:
    bars: Progress = Bars()
    with bars("Hashing", 4 * GIGABYTE, "bytes") as job:
        job.advance(GIGABYTE)
        line = wait_for(drawn, "25%")
    assert line.startswith("Hashing  [####------------]  25%  1 GB/4 GB  ")
    assert re.search(r"/s  \d+ \w+ left", line)
    assert drawn[-1] == ""


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
    with Terminal(program, "add", "--adopt", file) as terminal:
        terminal.read_until("12 GB")
        assert re.search(r"\rHashing  \[[#-]+\] +\d+%  ", terminal.text)
        terminal.process.terminate()


@pytest.mark.parametrize("option", ["--json", "-q"])
def test_programs_get_no_bar_even_at_a_terminal(
    option: str, program: Smartcache, models: Path
) -> None:
    assert "\r" not in program.at_terminal("add", option, models / "a.safetensors").stdout


def test_a_short_job_shows_none(program: Smartcache, models: Path) -> None:
    assert "\x1b[K" not in program.at_terminal("add", models / "a.safetensors").stdout
