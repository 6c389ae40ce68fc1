"""A program forked from a warm parent cannot be told from one that was started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import PATIENCE, Smartcache, Terminal, ended_by
from tests.cli.warm import Forked
from tests.store.files import WEIGHTS, write


@pytest.fixture
def both(home: Path, tmp_path: Path) -> Iterator[tuple[Smartcache, Smartcache]]:
    made = Smartcache(cwd=tmp_path, is_warm=False), Smartcache(cwd=tmp_path)
    yield made
    for program in made:
        program.end()


def test_it_says_and_returns_the_same(both: tuple[Smartcache, Smartcache], tmp_path: Path) -> None:
    """Its words, directory and environment are its own; the order of the lines says who flushes."""
    other = {"SMARTCACHE_HOME": str(tmp_path / "other é")}
    write(tmp_path / "\udcff.bin", WEIGHTS)
    for words, env, code in (
        (["dir"], other, 0),
        (["add", "--dry-run", "--json", "\udcff.bin"], None, 0),
        (["nonsense"], None, 2),
        (["rm", "-y", "zzzz"], None, 1),
    ):
        real, forked = (program(*words, env=env, code=code) for program in both)
        assert forked == real
    assert forked.stderr


def test_it_has_the_umask_of_the_test(both: tuple[Smartcache, Smartcache], tmp_path: Path) -> None:
    modes = []
    old = os.umask(0o077)
    try:
        for number, program in enumerate(both):
            program("--home", f"store {number}", "folders", "add", ".")
            modes.append(
                {os.lstat(path).st_mode for path in (tmp_path / f"store {number}").iterdir()}
            )
    finally:
        os.umask(old)
    assert modes[0] == modes[1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_it_ends_as_an_interpreter_does(both: tuple[Smartcache, Smartcache]) -> None:
    ends = []
    for program in both:
        with open("/dev/full", "w") as full:
            process = program.start("--help", stdout=full.fileno())
            _, stderr = process.communicate(timeout=PATIENCE)
        ends.append((process.returncode, stderr))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(
    both: tuple[Smartcache, Smartcache], models: Path, number: signal.Signals
) -> None:
    """At a question, on a terminal."""
    codes = []
    both[0]("add", "--no-pin", models / "a.safetensors")
    for program in both:
        with Terminal(program, "prune") as terminal:
            terminal.read_until("[y/N]")
            assert isinstance(terminal.process, Forked) == program.is_warm
            codes.append(ended_by(number, terminal.process))
    assert codes[0] == codes[1] == (130 if number == signal.SIGINT else -number)


def test_settings_of_the_interpreter_want_a_start(both: tuple[Smartcache, Smartcache]) -> None:
    process = both[1].start("dir", env={"PYTHONUNBUFFERED": "yes"})
    assert isinstance(process, subprocess.Popen)
    process.communicate(timeout=PATIENCE)
