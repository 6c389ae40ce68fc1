"""How long `smartcache CMD -h` takes, for every command, beside `python -c "import click"`.

    python scripts/bench/startup.py [--runs 9] [COMMAND...]

Medians of the CPU time of whole processes, with bytecode cached. A command whose help costs more
than 1.5 times `import click` is marked. The ratio is what counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence

import click

MOST = 1.5


def leaves(group: click.Group) -> list[str]:
    """Every command that does something: "ls", "hub ls"."""
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            found += [f"{name} {each}" for each in leaves(command)]
        else:
            found.append(name)
    return found


def seconds(command: Sequence[str]) -> float:
    """Run a program once; return its CPU time, which other programs disturb less than the clock."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, float]:
    """Return the median of each, all taken in turn, so that a busy moment meets them all."""
    for each in commands.values():
        seconds(each)  # writes the bytecode
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, each in commands.items():
            taken[name].append(seconds(each))
    return {name: statistics.median(times) for name, times in taken.items()}


def run() -> int:
    """Measure and print; 1 if a command is too slow."""
    parser = argparse.ArgumentParser(description="Measure the start-up of commands.")
    parser.add_argument("--runs", type=int, default=9, help="runs of each; the median counts")
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="default: all")
    arguments = parser.parse_args()

    from smartcache.cli import main

    names = arguments.words or ["", *leaves(main)]
    python = [sys.executable, "-c"]
    click_alone = 'python -c "import click"'
    program = "import sys; from smartcache.cli import main; main(sys.argv[1:])"
    commands = {click_alone: [*python, "import click"]}
    commands |= {name: [*python, program, *name.split(), "-h"] for name in names}
    medians = measure(commands, arguments.runs)
    base = medians.pop(click_alone)
    print(f"{click_alone:28}{base * 1000:7.1f} ms")
    for name, median in medians.items():
        mark = "  too slow" if median > MOST * base else ""
        print(f"{f'smartcache {name} -h':28}{median * 1000:7.1f} ms {median / base:5.2f}{mark}")
    return int(any(median > MOST * base for median in medians.values()))


if __name__ == "__main__":
    sys.exit(run())
