"""A real set in a real directory, driven at random by two processes, and a plain dict beside it.

Processes die in the middle of a write, the machine is started again, footers are cut off, the index
is lost, packs come from another folder, and they are so small that they are filled, compacted and
unlinked all the time. After every step:

- both processes find the same keys as the dict, values and metadata exactly equal, in memory as on
  the disk;
- footers say exactly what the records say, the newest record of each key is what the set returns,
  and its figures add up: all of that read without the package;
- samples that are held are what they were, whatever became of their artifact.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from smartcache.artifacts import Sample
from smartcache.artifacts.engine import engine as artifacts_engine
from tests.artifacts.exact import exactly
from tests.artifacts.opening import engine_of
from tests.artifacts.packreader import ARTIFACT, live_size, newest_of, packs_of, shared_size
from tests.artifacts.peer import VALUES, Actor, Clock, Peer, Puts, value_of
from tests.processes.children import Child

SOAK_FACTOR = 20
clock_gettime_ns = time.clock_gettime_ns
KEYS = ("a", "b", "c", "d", "e", "f" * 300)
METADATA = (None, {"n": 1}, "text")
LIVES = (None, None, None, 10.0, 40.0)
WEIGHTS = {
    "put": 4, "put_several": 2, "delete": 3, "compute": 1, "touch": 1, "pin": 2, "compact": 3,
    "both_change_one_key": 3, "time_passes": 1, "evict": 1, "rebuild": 1, "the_index_is_lost": 1,
    "reopen": 1, "a_process_dies": 2, "hold_a_sample": 2, "let_samples_go": 1, "batch": 1,
    "look_without_writing": 1, "footers_are_cut_off": 2, "the_machine_starts_again": 1,
    "a_pack_comes_from_elsewhere": 1,
}  # fmt: skip


class Act(NamedTuple):
    """One thing that happens. In one strategy: rules of their own would leave many out."""

    what: str
    key: str
    other: str
    number: int
    by_peer: bool
    flag: bool


acts = st.builds(
    Act,
    st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]),
    st.sampled_from(KEYS),
    st.sampled_from(KEYS),
    st.integers(0, 59),
    st.booleans(),
    st.booleans(),
)


@dataclass(frozen=True)
class Held:
    """What the model knows of an artifact."""

    number: int
    metadata: object
    put_at: float
    order: int
    used_at: float
    expires_at: float | None = None
    is_pinned: bool = False

    def is_past(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now and not self.is_pinned


class SetMachine(RuleBasedStateMachine):
    def __init__(self, directory: Path, clock: Clock, peer: Peer) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=directory))
        self.clock = clock
        self.peer = peer
        self.own = Actor()
        self.model: dict[str, Held] = {}
        self.samples: list[tuple[str, Sample, Held]] = []
        self.orders = itertools.count()
        self.boots = itertools.count()
        self.elsewhere = itertools.count()
        self.open()

    def open(self) -> None:
        self.own.open(self.directory / "sets")
        self.peer.open(self.directory / "sets")

    def close(self) -> None:
        self.samples_are_what_they_were()
        self.samples.clear()
        self.own.close()
        self.peer.close()

    def teardown(self) -> None:
        try:
            report = self.own.opened.verify()
            assert not report.damage
            self.the_index_is_lost()
            self.agrees()
        finally:
            self.samples.clear()
            self.own.close()
            self.peer.close()
            shutil.rmtree(self.directory)

    def actor(self, is_peer: bool) -> Actor | Peer:
        return self.peer if is_peer else self.own

    @initialize(first=st.permutations(range(VALUES)))
    def begin_with_some_artifacts(self, first: list[int]) -> None:
        for key, number in zip(KEYS, first, strict=False):
            self.put(Act("put", key, key, number, number % 3 == 0, flag=False))
        self.settle()

    @rule(some=st.lists(acts, min_size=1, max_size=6))
    def happens(self, some: list[Act]) -> None:
        for act in some:
            getattr(self, act.what)(act)
            self.settle()

    def settle(self) -> None:
        """Let both see what the other has put."""
        self.peer.flush()
        self.own.flush()

    # what happens

    def put(self, act: Act) -> None:
        metadata, ttl = METADATA[act.number % 3], LIVES[act.number % 5]
        puts = [(act.key, act.number % VALUES)]
        self.actor(act.by_peer).put(puts, metadata, ttl)
        self.was_put(puts, metadata, ttl)

    def put_several(self, act: Act) -> None:
        """So many that packs are filled and sealed."""
        puts = [(key, (act.number + n) % VALUES) for n, key in enumerate(KEYS[act.number % 5 :])]
        self.actor(act.by_peer).put(puts)
        self.was_put(puts)

    def was_put(self, puts: Puts, metadata: object = None, ttl: float | None = None) -> None:
        now = self.clock.now
        for key, number in puts:
            before = self.alive().get(key)
            self.model[key] = Held(
                number, metadata, now, next(self.orders), now,
                expires_at=None if ttl is None else now + ttl,
                is_pinned=before is not None and before.is_pinned,
            )  # fmt: skip

    def compute(self, act: Act) -> None:
        number = act.number % VALUES
        before = self.alive().get(act.key)
        found = self.actor(act.by_peer).compute(act.key, number)
        if before is None:
            self.was_put([(act.key, number)])
        assert found == exactly(value_of(number if before is None else before.number))

    def delete(self, act: Act) -> None:
        chosen = [act.key, act.other] if act.flag else [act.key]
        found = self.actor(act.by_peer).delete(chosen)
        for key, was_there in zip(chosen, found, strict=True):
            assert was_there or key not in self.alive()
            assert key in self.model or not was_there
            self.model.pop(key, None)

    def touch(self, act: Act) -> None:
        assert self.actor(act.by_peer).touch(act.key) == (act.key in self.alive())
        if act.key in self.alive():
            self.model[act.key] = replace(self.model[act.key], used_at=self.clock.now)

    def pin(self, act: Act) -> None:
        assert self.actor(act.by_peer).pin(act.key, act.flag) == (act.key in self.alive())
        if act.key in self.alive():
            self.model[act.key] = replace(self.model[act.key], is_pinned=act.flag)

    def compact(self, act: Act) -> None:
        self.actor(act.by_peer).compact(act.flag)

    def both_change_one_key(self, act: Act) -> None:
        """The later one is right."""
        for n, is_peer in ((act.number % 5, act.by_peer), (act.number // 5, not act.by_peer)):
            if n % 5:
                puts = [(act.key, n % VALUES)]
                self.actor(is_peer).put(puts)
                self.was_put(puts)
            elif self.actor(is_peer).delete([act.key]) == [True]:
                self.model.pop(act.key, None)
        self.actor(act.flag).flush()
        self.actor(not act.flag).flush()

    def time_passes(self, act: Act) -> None:
        self.clock.now += act.number % 20

    def evict(self, act: Act) -> None:
        before = self.alive()
        size = self.live_size()
        bound = max(1, size * (act.number + 1) // 40)
        for _ in range(3):  # what another process notes as used in this moment is left
            self.own.evict(bound)
        after = set(self.own.opened)
        held = {key for key, _, _ in self.samples}
        free = [key for key, each in before.items() if not each.is_pinned and key not in held]
        gone = before.keys() - after
        assert gone <= set(free)
        assert not gone or size > bound
        assert self.live_size() <= bound or gone == set(free)
        for key in gone:
            del self.model[key]

    def rebuild(self, act: Act) -> None:
        self.actor(act.by_peer).rebuild()

    def the_index_is_lost(self, _: Act | None = None) -> None:
        self.close()
        for path in (self.directory / "sets").glob("*/*/index.sqlite3*"):
            path.unlink()
        self.open()

    def look_without_writing(self, act: Act) -> None:
        assert self.actor(act.by_peer).contents_read_only() == self.expected()

    def footers_are_cut_off(self, act: Act) -> None:
        """At any byte: what they say is in the records as well."""
        path = self.own.opened.path
        self.close()
        for number, pack in enumerate(packs_of(path)):
            found = pack.footers()
            if found and (act.flag or number % 2):
                at = found[0][0].offset
                os.truncate(pack.path, at + act.number * 7 % (len(pack.data) - at))
        self.open()

    def the_machine_starts_again(self, _: Act) -> None:
        self.close()
        boot, origin = next(self.boots), clock_gettime_ns(time.CLOCK_BOOTTIME)
        self.own.reboot(boot, origin)
        self.peer.reboot(boot, origin)
        self.open()

    def a_pack_comes_from_elsewhere(self, act: Act) -> None:
        """Its artifacts, and its deletions, are newer than all that was there."""
        other = Actor()
        other.open(self.directory / f"elsewhere {next(self.elsewhere)}")
        puts = [(act.key, act.number % VALUES), (act.other, act.number // 5)]
        engine_of(other.opened).look_at = 1 << 60  # it would compact its deletion away
        other.put(puts)
        if act.by_peer:
            other.close()  # so that there are two footers
            other.open(self.directory / other.sets.root.name)
            engine_of(other.opened).look_at = 1 << 60
        gone = act.key if act.flag and not self.is_pinned(act.key) else ""
        if gone:
            other.delete([gone])
        path = other.opened.path
        other.close()
        for pack in sorted(packs_of(path), key=lambda pack: max(e.seq for e in pack.records)):
            assert self.own.take_in(str(pack.path)) > 0
        self.was_put(puts)
        self.model.pop(gone, None)

    def reopen(self, _: Act) -> None:
        self.close()
        self.open()

    def a_process_dies(self, act: Act) -> None:
        """What it was told to keep is there as soon as somebody opens the set, or computes."""
        puts = [(act.key, act.number % VALUES), (act.other, act.number // 5)]
        with Child(lambda: self.own.die(puts, is_torn=act.flag)) as child, pytest.raises(EOFError):
            child.result()
        self.was_put(puts)
        if act.by_peer:
            self.own.opened.get_or_compute("new", lambda: 1)
            self.own.delete(["new"])
        else:
            self.reopen(act)

    def hold_a_sample(self, act: Act) -> None:
        if act.key in self.alive() and len(self.samples) < 3:
            self.samples.append((act.key, self.own.opened[act.key], self.model[act.key]))

    def let_samples_go(self, _: Act) -> None:
        self.samples.clear()

    def batch(self, act: Act) -> None:
        some = [key for key, each in self.alive().items() if each.number % 4 == 1] * 2
        if some:
            values = [value_of(self.model[key].number) for key in some]
            found = self.actor(act.by_peer).batch(some)
            assert found["n"] == [value["n"] for value in values]  # type: ignore[index]
            assert [row.tobytes() for row in found["x"]] == [
                value["x"].tobytes()  # type: ignore[index]
                for value in values
            ]

    # what must be true

    @invariant()
    def agrees(self) -> None:
        expected = self.expected()
        assert self.own.contents() == expected
        assert self.peer.contents() == expected
        for key in KEYS:
            assert (key in self.own.opened) == (key in expected)
        self.packs_say_the_same()

    def packs_say_the_same(self) -> None:
        """Read without the package: every record, every footer, and what they come to."""
        packs = packs_of(self.own.opened.path)
        found = newest_of(packs, self.instance())
        now = self.clock.now
        pinned = {b"\x02" + key.encode() for key, each in self.model.items() if each.is_pinned}
        assert {
            key
            for key, (_, each, _) in found.items()
            if not each.expires or each.expires > now or key in pinned
        } == {b"\x02" + key.encode() for key in self.alive()}
        for actor in (self.own, self.peer):
            artifacts, live, on_disk, dead = actor.figures()
            assert artifacts == len(found)
            assert live == sum(each.size for _, each, _ in found.values()) + shared_size(found)
            assert on_disk == sum(len(pack.data) for pack in packs)
            notes = sum(
                each.size for pack in packs for each in pack.records if each.kind != ARTIFACT
            )
            assert 0 <= on_disk - live - dead <= 64 * len(packs) + notes

    @invariant()
    def the_packs_alone_tell_the_same(self) -> None:
        path = self.own.opened.path
        root = self.directory / "copy"
        copied = root / path.parent.name / path.name
        copied.mkdir(parents=True)
        for file in [path / "set.json", *path.glob("*.pack")]:
            shutil.copyfile(file, copied / file.name)
        again = Actor()
        again.open(root)
        assert again.contents() == self.expected()
        again.close()
        shutil.rmtree(root)

    @invariant()
    def samples_are_what_they_were(self) -> None:
        for _, sample, held in self.samples:
            assert exactly(sample.value()) == exactly(value_of(held.number))
            assert sample.metadata == held.metadata

    # the model

    def expected(self) -> dict[str, tuple[object, object, bool]]:
        return {
            key: (exactly(value_of(each.number)), each.metadata, each.is_pinned)
            for key, each in self.alive().items()
        }

    def alive(self) -> dict[str, Held]:
        now = self.clock.now
        return {key: each for key, each in self.model.items() if not each.is_past(now)}

    def is_pinned(self, key: str) -> bool:
        return key in self.alive() and self.model[key].is_pinned

    def instance(self) -> bytes:
        return bytes.fromhex(engine_of(self.own.opened).folder.instance)

    def live_size(self) -> int:
        return live_size(self.own.opened.path, self.instance().hex())


@pytest.mark.timeout(3600)  # what fails is shrunk for five minutes
@pytest.mark.parametrize(
    ("where", "examples"), [pytest.param("tmp_path", 5, marks=pytest.mark.soak), ("elsewhere", 12)]
)
def test_a_set_agrees_with_a_plain_model(
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    soak: bool,
    where: str,
    examples: int,
) -> None:
    """On the disk, and (faster) in memory."""
    caplog.set_level(logging.ERROR, "smartcache")
    directory: Path = request.getfixturevalue(where)
    clock = Clock()
    with Peer(clock) as peer:
        monkeypatch.setattr(time, "time", clock)
        monkeypatch.setattr(time, "clock_gettime_ns", clock_gettime_ns)
        monkeypatch.setattr(artifacts_engine, "boot_id", lambda: "boot")
        run_state_machine_as_test(
            lambda: SetMachine(directory, clock, peer),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples * SOAK_FACTOR if soak else examples,
                stateful_step_count=10,
                deadline=None,
                database=None,
                # The same examples every day; `--soak` looks for new ones.
                derandomize=not soak,
                suppress_health_check=list(HealthCheck),
            ),
        )
