"""What every benchmark needs: medians, a row per figure, and the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

rounds = 3
"""Medians are of this many rounds; a test that only wants to see the script run sets it to 1."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: ours, the peer's, their ratio, and what we aim at."""

    job: str
    ours: str
    peer: str
    ratio: str
    aim: str
    holds: bool | None


@dataclass(slots=True)
class Table:
    """The figures of one run, printed as Markdown."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know beside the figures; printed below them."""

    def add(
        self,
        job: str,
        ours: str,
        *,
        peer: str = "",
        ratio: float | None = None,
        aim: str = "",
        holds: bool | None = None,
    ) -> None:
        """Add a figure and show it at once on stderr."""
        text = "" if ratio is None else f"{ratio:.2f}"
        self.rows.append(Row(job, ours, peer, text, aim, holds))
        print(f"{job}: {ours} {peer} {text}", file=sys.stderr)

    def show(self, *, as_json: bool) -> None:
        """Print the table as Markdown, or as JSON."""
        if as_json:
            rows = [asdict(row) for row in self.rows]
            found = {"machine": machine(), "title": self.title, "rows": rows, "notes": self.notes}
            print(json.dumps(found, indent=2))
            return
        print(f"### {self.title}\n\n{machine()}\n")
        print("| job | smartcache | peer | ratio | aim | |\n|---|---|---|---|---|---|")
        for row in self.rows:
            mark = {True: "met", False: "**missed**", None: ""}[row.holds]
            print(f"| {row.job} | {row.ours} | {row.peer} | {row.ratio} | {row.aim} | {mark} |")
        if self.notes:
            print("\n" + "\n".join(f"- {note}" for note in self.notes))


def machine() -> str:
    """Name the machine: processor, cores, memory, system, Python, filesystem."""
    cpu = platform.processor() or platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = ""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal"):
            memory = f", {int(line.split()[1]) // 1_000_000} GB"
    return (
        f"{cpu}, {os.cpu_count()} cores{memory}, {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}"
    )


def median_seconds(work: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Return the median time of `work` over three rounds; `before` runs untimed before each."""
    return statistics.median(seconds_of(work, before) for _ in range(rounds))


def seconds_of(work: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Return the time one call takes."""
    if before is not None:
        before()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def child_seconds(*command: str) -> float:
    """Return the time a whole Python process takes, as a user waits for it."""
    return seconds_of(
        lambda: subprocess.run([sys.executable, *command], check=True, capture_output=True)
    )


@dataclass(frozen=True, slots=True)
class Run:
    """What a program took from its start to its end."""

    seconds: float
    processor: float
    """User and system time of all its threads."""
    peak: float
    """Megabytes of memory, at least `floor`."""
    floor: float
    """Less than this cannot be told: the kernel counts what this process used when it started the
    other."""

    def __str__(self) -> str:
        memory = f"{self.peak:.0f} MB" if self.peak > self.floor else f"< {self.floor:.0f} MB"
        digits = 2 if self.seconds >= 0.1 else 3
        return f"{self.seconds:.{digits}f} s ({self.processor:.{digits}f} s CPU), {memory}"


def measured(
    command: list[str], *, environment: Mapping[str, str], output: int = subprocess.DEVNULL
) -> Run:
    """Run a program to its end and say what it took; the script ends if the program fails."""
    floor = _own_peak()
    start = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"exit {child.returncode}: {' '.join(command)}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, floor)


def median_run(runs: list[Run]) -> Run:
    """Return the run whose time is the median; its other figures belong to it."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _own_peak() -> float:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024 + 1  # rounded up: never taken for the other's own
    return 0.0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
