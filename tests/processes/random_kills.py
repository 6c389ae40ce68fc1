"""Kill commands at random moments, from outside, and look at everything after each kill.

`python -m tests.processes.random_kills --rounds 500 [--user 65534]` does so for as long as one
likes; a few rounds are a test.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

from smartcache.errors import NothingToUndoError
from smartcache.store.store import Store
from tests.folders.deduping import deduplicated, leftovers, open_store, undo_everything
from tests.processes.children import Child, folder_of
from tests.processes.worlds import World, content, differences

COMMANDS = ("dedup", "undo", "eject", "prune")


def make_world(folder: Path) -> World:
    """Twelve contents, four copies of each, some with two names; and what prune removes."""
    world = World(folder)
    for number in range(48):
        mode = (0o644, 0o664, 0o640)[number % 3]
        world.write(f"{number % 4}/{number}.pt", content(number % 12, 20_000), mode=mode)
    for number in (3, 14, 25):
        world.link(f"3/twin {number}.pt", to=f"{number % 4}/{number}.pt")
    return world


def run(command: str, world: World) -> None:
    with open_store(world.root) as store:
        if command == "dedup":
            deduplicated(store, world.files)
        elif command == "undo":
            with suppress(NothingToUndoError):
                store.plan_undo().execute()
        elif command == "eject":
            store.plan_eject().execute()
        else:
            for number in range(8):
                store.put_stream([content(100 + number, 20_000)])
            store.plan_prune().execute()


def check(world: World, store: Store) -> None:
    """Every file is whole, under its name; nothing of ours is beside."""
    problems = [f"left open: {each}" for each in (*store.recover(), *store.unfinished())]
    problems += [f"left: {name}" for name in leftovers(world.files)]
    found = world.facts()
    wanted = {name: fact.data for name, fact in world.before.items()}
    problems += differences(wanted, {name: fact.data for name, fact in found.items()})
    assert not problems, "\n".join(problems)


def check_undone(world: World) -> None:
    """Names of one file that were deduped again after half an undo are files of their own."""
    facts = (world.before, world.facts())
    before, now = ({n: f._replace(names=frozenset()) for n, f in each.items()} for each in facts)
    problems = differences(before, now)
    assert not problems, "\n".join(problems)


def kill_at_random(folder: Path, rounds: int, seed: int = 0) -> Counter[str]:
    """Run commands in a world, each killed at a random moment; return how often each was."""
    chance, counts, longest = random.Random(seed), Counter[str](), dict.fromkeys(COMMANDS, 0.2)
    with make_world(folder) as world:
        for number in range(rounds):
            command = COMMANDS[number % len(COMMANDS)]
            if command != "dedup" and chance.random() < 0.7:
                run("dedup", world)  # something to do
            started, child = time.monotonic(), Child(partial(run, command, world))
            time.sleep(chance.random() * longest[command])
            is_killed, took = child.end(), time.monotonic() - started
            longest[command] = longest[command] * 1.2 if is_killed else min(longest[command], took)
            counts[f"{command} {'killed' if is_killed else 'ended'}"] += 1
            with open_store(world.root) as store:
                check(world, store)
                if number % 7 == 0:
                    assert undo_everything(store) == []
                    check_undone(world)
        with open_store(world.root) as store:
            assert not store.verify(full=True).has_damage
            assert undo_everything(store) == []
        check_undone(world)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--user", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with folder_of(given.user) as folder:
        work = partial(kill_at_random, folder / "world", given.rounds, given.seed)
        print(dict(Child(work, user=given.user).result()))  # noqa: T201 - what it is run for


if __name__ == "__main__":
    main()
