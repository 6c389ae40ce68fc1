"""What scripts/mutants does; its --help says what that is."""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 300
NOT_A_KILL = (
    "ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "Failed: Timeout",
    "_pytest.outcomes.Exit",
)  # fmt: skip
"""How a test fails that says nothing about the line that was broken."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line of the product (`old`, once in `file`), its broken form, and who must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    why: str


def mutants() -> list[Mutant]:
    """Return all that the list has."""
    text = (ROOT / "tests/mutants.toml").read_text("utf-8")
    return [Mutant(**each) for each in tomllib.loads(text)["mutant"]]


class Copy:
    """A copy of the project, in which one mutant at a time is broken; children use it too."""

    def __init__(self, folder: Path, room: Path) -> None:
        self.folder, self.room, self.clock = folder, room, 1_000_000_000
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
        self.environment = {**kept, "PYTHONPATH": str(folder), "CI": "1"}
        command = [sys.executable, "-c", "import smartcache; print(smartcache.__file__)"]
        found = subprocess.check_output(command, cwd="/", env=self.environment, text=True)
        if Path(found.strip()).parent != folder / "smartcache":
            sys.exit(f"Error: the tests would run on {found.strip()}, not on the copy.")

    def judge(self, mutant: Mutant | None, tests: str) -> str:
        """Run tests with a mutant; say "killed", "survived", or why that cannot be said."""
        if mutant is None:
            return self._run(tests)
        path = self.folder / mutant.file
        before, times = path.read_text("utf-8"), path.stat()
        if before.count(mutant.old) != 1:
            return f"not applied: its line is there {before.count(mutant.old)} times"
        try:
            path.write_text(before.replace(mutant.old, mutant.new), "utf-8")
            # Bytecode is told by time (in seconds) and size: no two mutants may agree in both.
            self.clock += 1
            os.utime(path, (self.clock, self.clock))
            return self._run(tests)
        finally:
            path.write_text(before, "utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _run(self, tests: str) -> str:
        report = self.room / "report.xml"
        report.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
            "--assert=plain",  # in CI pytest would compare 100 KB line by line, for minutes
            f"--basetemp={self.room / 'tests'}", f"--junitxml={report}", *shlex.split(tests),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            text, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return f"no verdict: not done in {PATIENCE} s"
        if process.returncode == 0:
            passed = any(word in text for word in (" passed", "passed,"))
            return "survived" if passed else "no verdict: every test was skipped"
        failure = None if not report.exists() else ET.parse(report).find(".//failure")  # noqa: S314
        if process.returncode != 1 or failure is None:
            return f"no verdict: pytest ended with {process.returncode}: {text.strip()[-300:]}"
        message = failure.get("message") or ""
        if message.startswith(NOT_A_KILL):
            return f"no verdict: {message[:200]}"
        return "killed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", add_help=False)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    wanted = {word for words in options.only for word in words.split(",") if word}
    numbered = [(str(number), each) for number, each in enumerate(mutants(), 1)]
    if unknown := wanted - {word for number, each in numbered for word in (number, each.name)}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [(n, each) for n, each in numbered if not wanted or {n, each.name} & wanted]
    if options.list:
        for number, each in chosen:
            print(f"{number:>3} {each.name:34} {each.file}\n    {each.why}")
        return 0
    memory = Path("/dev/shm")  # noqa: S108 - the one tmpfs that every Linux has
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mutants-", dir=place) as name:
        rooms = queue.SimpleQueue[Copy]()
        for job in range(options.jobs):
            folder, room = Path(name, str(job), "project"), Path(name, str(job), "room")
            room.mkdir(parents=True)
            rooms.put(Copy(folder, room))

        def run(title: str, mutant: Mutant | None, tests: str) -> tuple[str, str]:
            copy, began = rooms.get(), time.monotonic()
            try:
                verdict = copy.judge(mutant, tests)
            finally:
                rooms.put(copy)
            print(f"{title:40} {verdict}  ({time.monotonic() - began:.0f} s)", flush=True)
            return title, verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            whole = dict.fromkeys(each.tests for _, each in chosen) if options.check else {}
            first = pool.map(lambda tests: run(f"unbroken: {tests}", None, tests), whole)
            bad = [title for title, verdict in first if verdict != "survived"]
            titled = [(f"{number:>3} {each.name}", each) for number, each in chosen]
            ended = pool.map(lambda each: run(each[0], each[1], each[1].tests), titled)
            bad += [title for title, verdict in ended if verdict != "killed"]
    print(f"{len(chosen)} mutants, {len(bad)} that did not die", *bad, sep="\n  ")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
