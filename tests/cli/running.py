"""Running `smartcache`: what went in, what came out, on which stream, with which code."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from click.testing import CliRunner

from smartcache.cli import main
from tests.cli.warm import Forked, parent

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
Process: TypeAlias = "subprocess.Popen[str] | Forked"


@dataclass(frozen=True)
class Result:
    """One run. `json` and `ids` read what was printed for programs."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:  # noqa: ANN401 - whatever the document holds
        return json.loads(self.stdout)

    @property
    def ids(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def error(self) -> str:
        """The message of a failure: one line, then at most one hint, and never a traceback."""
        lines = self.stderr.splitlines()
        position = next(n for n, line in enumerate(lines) if line.startswith("Error: "))
        rest = lines[position + 1 :]
        assert [line[:6] for line in rest] in ([], ["Hint: "]), self.stderr
        assert "Traceback" not in self.stderr
        return lines[position].removeprefix("Error: ")

    @property
    def hint(self) -> str:
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("Hint: ")]
        return line.removeprefix("Hint: ")


class Here:
    """`sc("ls", "-q")`: the program in this process, without a terminal."""

    def __call__(self, *words: str | Path, code: int = 0) -> Result:
        done = CliRunner().invoke(main, [str(word) for word in words])
        result = Result(done.exit_code, done.stdout, done.stderr)
        assert result.code == code, f"{result}\n{done.exc_info}"
        return result

    def digests(self, *words: str | Path) -> list[str]:
        return self("ls", "-q", *words).ids


class Smartcache:
    """`program("ls", "-q")`: the program as a process of its own, without a terminal."""

    def __init__(self, *, cwd: Path, is_warm: bool = True) -> None:
        self.cwd = cwd
        self.is_warm = is_warm
        """Whether it is forked from a process that has imported it, which is quicker."""
        self._started: list[Process] = []

    def end(self) -> None:
        """End what a failed test has left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def __call__(
        self, *words: str | Path, code: int = 0, env: dict[str, str] | None = None
    ) -> Result:
        process = self.start(*words, env=env)
        stdout, stderr = process.communicate(timeout=PATIENCE)
        result = Result(process.wait(), stdout, stderr)
        assert result.code == code, result
        return result

    def start(
        self,
        *words: str | Path,
        env: dict[str, str] | None = None,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> Process:
        process = self.begin(words, env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        self._started.append(process)
        return process

    def begin(
        self,
        words: Sequence[str | Path],
        more: dict[str, str] | None,
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        start_new_session: bool = False,
    ) -> Process:
        """Start the program with these streams, by a fork if that is the same."""
        env = environment(more)
        if self.is_warm and parent().serves(env):
            return Forked(
                [str(word) for word in words],
                cwd=self.cwd,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=start_new_session,
            )
        return subprocess.Popen(
            command(*words),
            cwd=self.cwd,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
            text=True,
            errors="surrogateescape",
        )

    def at_terminal(self, *words: str | Path, answer: str = "", columns: int = 100) -> Result:
        """Run with a terminal; `answer` is typed when the program asks. All output is `stdout`."""
        with Terminal(self, *words, columns=columns) as terminal:
            if answer:
                terminal.read_until("[y/N]")
                terminal.type(answer)
            text = terminal.read_to_end()
            return Result(terminal.process.wait(PATIENCE), text, "")


class Terminal:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, program: Smartcache, *words: str | Path, columns: int = 100) -> None:
        self._ours, theirs = pty.openpty()
        subprocess.run(["stty", "cols", str(columns)], stdin=theirs, check=True)
        self.process = program.begin(
            words, None, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.text:
            assert time.monotonic() < deadline, self.text[-500:]
            assert self._read(), self.text[-500:]

    def read_to_end(self) -> str:
        while self._read():
            pass
        return self.text.replace("\r\n", "\n")

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], PATIENCE)[0]:
            return False
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # EIO: the other side is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def age(home: Path, digest: str, days: int) -> None:
    """Let a blob be last used and added so many days ago."""
    then = int(time.time()) - days * 86_400
    index = sqlite3.connect(home / "index.sqlite3")
    with index:
        values = (then, then, bytes.fromhex(digest))
        index.execute("UPDATE hashes SET used_at = ?, added_at = ? WHERE digest = ?", values)
    index.close()


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "smartcache", *map(str, words)]


def environment(more: dict[str, str] | None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(more or {})}


def ended_by(number: int, process: Process) -> int:
    """Signal until it ends: one that comes just before it waits for an answer is seen after it."""
    while True:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(5)  # a busy machine takes its time; a second one would kill it
