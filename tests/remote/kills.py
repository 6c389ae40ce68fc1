"""Push and pull killed with SIGKILL at any moment, and begun again. Run as a program.

    python -m tests.remote.kills push|pull FOLDER

obstore does not survive a fork, so this process never uses it: every push, pull and look is that of
a child. Prints what is wrong, a line each.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from smartcache.cache import SmartCache
from smartcache.progress import Job, Progress, silent
from smartcache.remote import Tier, plan_pull, plan_push, verify_tier
from tests.hub.bundles import everything, faults_of, two_repos
from tests.processes.children import Child
from tests.processes.killing import Moment, die_at, in_child, points_of, was_killed
from tests.processes.points import POINTS

WORDS = ("org/first", "org/second", "datasets/org/data")


def push(root: Path, progress: Progress = silent) -> None:
    with SmartCache(root / "a") as smart:
        tier = Tier("nas", (root / "nas").as_uri())
        for step in plan_push(smart.store, smart.sets, tier, WORDS, caches=[root / "from"]):
            step.execute(progress)


def pull(root: Path, progress: Progress = silent) -> None:
    with SmartCache(root / "b") as smart:
        tier = Tier("nas", (root / "nas").as_uri())
        for step in plan_pull(smart.store, smart.sets, tier, WORDS, cache_dir=root / "to"):
            step.execute(progress)


def dying(nth: int) -> Progress:
    """Return a progress that ends the process when bytes have arrived for the nth time."""
    calls = 0

    class Dying(Job):
        __slots__ = ()

        def advance(self, amount: int = 1) -> None:
            nonlocal calls
            calls += amount > 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda *_: Dying()


def killed(action: Callable[[], None]) -> Iterator[str]:
    if not was_killed(in_child(action)):
        yield "it was not killed"


def faults_of_tier(root: Path) -> list[str]:
    """Return what is wrong with the tier: a document needs what is not there, or is wrong."""
    report = verify_tier(Tier("nas", (root / "nas").as_uri()))
    return [f"{each.kind} {each.digest}: {each.reason}" for each in report.findings]


def faults_here(root: Path) -> list[str]:
    """Return what is wrong with the machine that pulls."""
    with SmartCache(root / "b") as smart:
        damaged = ["the store is damaged"] * smart.store.verify(full=True).has_damage
    return damaged + faults_of(root / "to")


def prepare(template: Path, root: Path) -> Path:
    shutil.copytree(template, root, symlinks=True)
    return root


def killed_push(root: Path, act: Callable[[Path], None]) -> Iterator[str]:
    """Kill a push; yield what is wrong then, and after the next one."""
    yield from killed(lambda: act(root))
    yield from Child(lambda: faults_of_tier(root)).result()
    Child(lambda: push(root)).result()
    yield from Child(lambda: faults_of_tier(root)).result()
    Child(lambda: pull(root)).result()
    if everything(root / "from") != everything(root / "to"):
        yield "what was pulled is not what was pushed"


def killed_pull(root: Path, act: Callable[[Path], None]) -> Iterator[str]:
    """Kill a pull; yield what is wrong then, and after the next one."""
    yield from killed(lambda: act(root))
    yield from Child(lambda: faults_here(root)).result()
    Child(lambda: pull(root)).result()
    yield from Child(lambda: faults_here(root)).result()
    if everything(root / "from") != everything(root / "to"):
        yield "what was pulled is not what was pushed"
    yield from (f"left: {path}" for path in (root / "b" / "tmp").iterdir())


def at(moment: Moment, run: Callable[[Path], None]) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        die_at(moment)
        run(root)

    return act


def problems(what: str, folder: Path) -> Iterator[str]:
    template = folder / "template"
    template.mkdir()
    two_repos(template / "from")
    Child(lambda: Tier("nas", (template / "nas").as_uri()).begin()).result()
    for name in ("a", "b"):
        Child(lambda name=name: SmartCache(template / name).close()).result()  # type: ignore[misc]
    run, judge = (push, killed_push) if what == "push" else (pull, killed_pull)
    if what == "pull":
        Child(lambda: push(template)).result()
    whole = prepare(template, folder / "whole")
    moments = Child(lambda: points_of(lambda: run(whole))).result()
    named = [each for each in moments if each.place.startswith((f"{what}:", "import:"))]
    if missing := POINTS[what] - {each.place for each in named}:
        yield f"not reached: {missing}"
    cases: dict[str, Callable[[Path], None]] = {str(each): at(each, run) for each in named}
    for nth in (1, 3):
        cases[f"the {nth}. piece"] = lambda root, nth=nth: run(root, dying(nth))  # type: ignore[misc]
    for number, (name, act) in enumerate(cases.items()):
        root = prepare(template, folder / str(number))
        yield from (f"killed at {name}: {each}" for each in judge(root, act))
        shutil.rmtree(root)


if __name__ == "__main__":
    found = list(problems(sys.argv[1], Path(sys.argv[2])))
    print(*found, sep="\n")  # noqa: T201 - it is a program
    sys.exit(bool(found))
