"""Sets in a tier: what one machine has computed, another one reads."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from smartcache import SmartCache
from smartcache.artifacts import ArtifactSet
from smartcache.config import load_settings
from smartcache.errors import (
    ArtifactNotFoundError,
    DamagedObjectError,
    MissingObjectError,
    TierError,
)
from smartcache.remote import Tier, attach_set, pull_set, push_set
from tests.remote import places

HERE = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def value(key: str, size: int = 20_000) -> np.ndarray[Any, Any]:
    return np.random.default_rng(list(key.encode())).standard_normal(size).astype("f4")


def keys_of(count: int, first: int = 0) -> list[str]:
    return [f"key{number:04}" for number in range(first, first + count)]


def fill(opened: ArtifactSet, keys: list[str]) -> None:
    opened.put_many((key, {"tensor": value(key), "name": key}) for key in keys)


def check(opened: ArtifactSet, keys: list[str]) -> None:
    """Read everything, alone and in batches, in another order than it was put."""
    mixed = random.Random(0).sample(keys, len(keys))
    for start in range(0, len(mixed), 16):
        some = mixed[start : start + 16]
        batch = opened.get_batch(some)
        assert batch["name"] == some
        for row, key in zip(batch["tensor"], some, strict=True):
            assert (np.asarray(row) == value(key)).all()
    assert (opened.get(keys[0])["tensor"] == value(keys[0])).all()


def chunks_of(opened: ArtifactSet) -> list[Path]:
    return sorted(path for path in opened.path.glob("far/*/*") if path.is_file())


@contextmanager
def opened(cache: SmartCache, tier: Tier | None = None) -> Iterator[ArtifactSet]:
    with cache.artifacts("latents", fingerprint={"vae": "x"}, tier=tier) as found:
        yield found


def test_what_a_machine_pushes_another_reads(tier: Tier, a: SmartCache, b: SmartCache) -> None:
    keys = keys_of(150)
    with opened(a) as mine:
        fill(mine, keys)
        first = push_set(mine, tier)
        assert (first.objects, first.skipped) == (1, 0)
        assert push_set(mine, tier).objects == 0
    with opened(b, tier) as theirs:
        assert sorted(theirs) == keys
        assert not chunks_of(theirs), "nothing but footers is fetched to know what there is"
        check(theirs, keys)
        assert chunks_of(theirs)
    with opened(b) as again:  # no tier is named: it stays attached
        check(again, keys)
        assert again.stats().artifacts == len(keys)
        assert again.verify().damage == []


def test_what_is_put_and_deleted_here_counts(nas: Tier, a: SmartCache, b: SmartCache) -> None:
    keys = keys_of(6)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        theirs.put(keys[0], {"tensor": value("own"), "name": "own"})
        assert theirs.delete(keys[1])
        for _ in range(2):
            assert theirs.get(keys[0])["name"] == "own"
            assert keys[1] not in theirs
            assert len(theirs) == 5
            theirs.compact(force=True)
        attach_set(theirs, nas)
        assert keys[1] not in theirs
    with opened(b) as again:
        assert again.get(keys[0])["name"] == "own"
        assert keys[1] not in again


def test_of_several_packs_in_a_tier_the_last_put_counts(
    nas: Tier, a: SmartCache, b: SmartCache, tmp_path: Path
) -> None:
    """Two machines put the same keys in turn; the packs' own order says nothing about that."""
    keys = keys_of(8)
    with SmartCache(tmp_path / "c") as c, opened(a) as first, opened(c) as second:
        for number, key in enumerate(keys):
            for each, name in ((first, "first"), (second, "second"))[:: 1 if number % 2 else -1]:
                each.put(key, {"name": f"{name} {number}"})
                time.sleep(0.002)  # the clocks of two machines are never that equal
        first.put("gone", {"name": "x"})
        second.put("gone", {"name": "y"})
        second.delete("gone")
        push_set(first, nas)
        push_set(second, nas)
    expected = [f"{'second' if number % 2 else 'first'} {number}" for number in range(8)]
    with opened(b, nas) as theirs:
        assert [theirs.get(key)["name"] for key in keys] == expected
        assert "gone" not in theirs
        pull_set(b.sets, nas, "latents")
    with opened(b) as theirs:
        assert not theirs.far_packs()
        assert [theirs.get(key)["name"] for key in keys] == expected
        assert "gone" not in theirs
        theirs.compact(force=True)
        assert [theirs.get(key)["name"] for key in keys] == expected


def test_a_pulled_set_needs_no_tier(tier: Tier, a: SmartCache, b: SmartCache) -> None:
    keys = keys_of(60)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, tier)
    with opened(b, tier) as theirs:
        check(theirs, keys[:16])
        done = pull_set(b.sets, tier, f"latents/{theirs.id}")
        assert (done.objects, done.skipped) == (1, 0)
        check(theirs, keys)
        assert not chunks_of(theirs)
        assert pull_set(b.sets, tier, "latents").skipped == 1
    with pytest.raises(MissingObjectError, match="has no set other"):
        pull_set(b.sets, tier, "other")


def test_compacted_packs_leave_the_tier_and_lost_ones_do_not(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:
    keys = keys_of(40)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
        with opened(b, nas) as theirs:
            selection = theirs.select(keys)
            fill(mine, keys[:30])
            mine.compact(force=True)
            push_set(mine, nas)
            document = nas.document("sets", f"latents.{mine.id}")
            assert document is not None
            here = {path.stem for path in mine.path.glob("*.pack")}
            assert document["content"]["packs"].keys() == here
            attach_set(theirs, nas)
            assert theirs.far_packs().keys() == here
            assert [np.asarray(row).tolist() for row in selection.read([3, 35])["tensor"]] == [
                value(keys[3]).tolist(), value(keys[35]).tolist(),
            ]  # fmt: skip
    lost = next((a.sets.root / "latents").glob("*/*.pack"))
    lost.unlink()
    with opened(a) as mine:
        push_set(mine, nas)
        attach_set(mine, nas)
        check(mine, keys)  # the tier had the only copy, and has it still
        mine.detach(lost.stem)
        push_set(mine, nas, exact=True)
        document = nas.document("sets", f"latents.{mine.id}")
        assert document is not None
        assert lost.stem not in document["content"]["packs"]


def objects_of(nas: Tier) -> list[Path]:
    assert nas.folder is not None
    return sorted((nas.folder / "objects").glob("*/*"), key=lambda path: -path.stat().st_size)


def test_a_wrong_byte_in_a_tier_is_named_and_never_served(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:
    keys = keys_of(60)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    pack = objects_of(nas)[0]
    data = pack.read_bytes()
    pack.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    with opened(b, nas) as theirs:
        with pytest.raises(DamagedObjectError, match="gave other bytes of object"):
            theirs.get(keys[0])
        with pytest.raises(DamagedObjectError):
            theirs.get_batch(keys)
        assert len(theirs) == len(keys), "nothing is called missing that the tier has damaged"
        pack.write_bytes(data[:1000])
        with pytest.raises(TierError):
            theirs.get(keys[50])
        pack.unlink()
        with pytest.raises(MissingObjectError):
            theirs.get(keys[50])
        pack.write_bytes(data)
        check(theirs, keys)


def test_a_chunk_that_this_disk_has_damaged_is_fetched_again(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:
    keys = keys_of(60)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        check(theirs, keys)
        for path in chunks_of(theirs):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    with opened(b) as theirs:
        check(theirs, keys)
        for path in chunks_of(theirs):
            path.write_bytes(b"short")
    with opened(b) as theirs:
        check(theirs, keys)
        assert theirs.stats().damaged == 0


def test_chunks_stay_within_their_bound(nas: Tier, a: SmartCache, tmp_path: Path) -> None:
    keys = keys_of(1200)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    bound = 64 * MIB  # the least: sixteen chunks
    few = load_settings(home=tmp_path / "b", remote_max_size=bound)
    with SmartCache(settings=few) as b, opened(b, nas) as theirs:
        for start in range(0, 1200, 50):
            check(theirs, keys[start : start + 50])
            kept = sum(path.stat().st_size for path in chunks_of(theirs))
            assert kept <= bound + 8 * MIB
        check(theirs, keys)


def test_a_tier_that_is_away(nas: Tier, a: SmartCache, b: SmartCache, tmp_path: Path) -> None:
    keys = keys_of(300)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        check(theirs, keys[:16])
    assert nas.folder is not None
    nas.folder.rename(tmp_path / "away")
    far = Tier("nas", nas.url, {}, nas.abilities)
    with opened(b, far) as theirs:  # a warning, and what was fetched can be read
        assert sorted(theirs) == keys
        check(theirs, keys[:16])
        with pytest.raises(TierError):
            theirs.get(keys[-1])
    with SmartCache(tmp_path / "new") as c, pytest.raises(TierError), opened(c, far):
        pass


def test_a_set_of_another_name_is_not_mixed_up(nas: Tier, a: SmartCache, b: SmartCache) -> None:
    with opened(a) as mine:
        fill(mine, keys_of(3))
        push_set(mine, nas)
    with b.artifacts("latents", fingerprint={"vae": "y"}, tier=nas) as other:
        assert len(other) == 0
    document = nas.document("sets", next(name for _, name in nas.documents("sets")))
    assert document is not None
    with b.artifacts("latents", fingerprint={"vae": "y"}) as other:
        nas.change("sets", f"latents.{other.id}",
                   lambda _: (document["objects"], document["content"]))  # fmt: skip
        with pytest.raises(Exception, match="pack of another set"):
            attach_set(other, nas)
        assert len(other) == 0


def test_many_processes_and_threads_read_through(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:  # fmt: skip
    keys = keys_of(200)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        theirs.get(keys[0])
        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                try:
                    check(theirs, keys[number::3])
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: check(theirs, keys[number::4]), range(4)))
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        again = pickle.loads(pickle.dumps(theirs))  # noqa: S301
        check(again, keys)
        again.close()


def test_what_cannot_be_written_is_read_all_the_same(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:
    keys = keys_of(60)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas):
        pass
    with b.artifacts("latents", fingerprint={"vae": "x"}, read_only=True) as theirs:
        before = sorted(os.listdir(theirs.path))
        check(theirs, keys)
        assert sorted(os.listdir(theirs.path)) == before


KILLED = """
import sys
from pathlib import Path
from smartcache import SmartCache
from smartcache.remote import Tier, pull_set, push_set
home, url, what = sys.argv[1:]
tier = Tier("nas", url)
with SmartCache(home) as cache:
    print("begun", flush=True)
    if what == "pull":
        pull_set(cache.sets, tier, "latents")
    else:
        with cache.artifacts("latents", fingerprint={"vae": "x"}, tier=tier) as opened:
            if what == "push":
                push_set(opened, tier)
            else:
                for key in list(opened):
                    opened.get(key)
"""


@pytest.mark.parametrize("what", ["push", "pull", "read"])
def test_killed_in_the_middle_and_run_again(
    nas: Tier, a: SmartCache, tmp_path: Path, what: str
) -> None:
    keys = keys_of(500)
    with opened(a) as mine:
        for start in range(0, 500, 100):
            fill(mine, keys[start : start + 100])
            mine.close()
            mine = a.artifacts("latents", fingerprint={"vae": "x"})  # noqa: PLW2901
            with mine.sealed():
                pass
        if what != "push":
            push_set(mine, nas)
        mine.close()
    home = tmp_path / ("a" if what == "push" else "b")
    command = [sys.executable, "-c", KILLED, str(home), nas.url, what]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    for number in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"begun\n"
            time.sleep(0.02 + 0.06 * number)
            child.kill()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    with SmartCache(tmp_path / "c") as c, opened(c, nas) as theirs:
        check(theirs, keys)
    if what != "push":
        with SmartCache(home) as b, opened(b) as theirs:
            if what == "pull":
                assert nas.folder is not None
                shutil.rmtree(nas.folder)
                assert not theirs.far_packs()
            check(theirs, keys)


def test_a_server_that_is_cut_off_in_the_middle_of_a_batch(
    moto: str, a: SmartCache, b: SmartCache, tmp_path: Path
) -> None:
    keys = keys_of(150)
    with places.Wire(int(moto.rpartition(":")[2])) as wire:
        tier = places.s3_tier(f"http://127.0.0.1:{wire.port}", tmp_path.name)
        with opened(a) as mine:
            fill(mine, keys)
            push_set(mine, tier)
        with opened(b, tier) as theirs:
            wire.left = 5 * MIB
            with pytest.raises(TierError):
                check(theirs, keys)
            assert wire.cuts
            wire.left = None
            check(theirs, keys)
            assert len(theirs) == len(keys)


def test_ctrl_c_does_not_wait_for_a_slow_server(moto: str, a: SmartCache, tmp_path: Path) -> None:
    keys = keys_of(1600)  # 16 pieces, of which four are on their way and take 2.6 seconds each
    port = int(moto.rpartition(":")[2])
    with places.Wire(port) as wire:
        tier = places.s3_tier(f"http://127.0.0.1:{wire.port}", tmp_path.name)
        with opened(a) as mine:
            fill(mine, keys)
        wire.pause = 0.02
        line = f'Tier("nas", {tier.url!r}, {dict(tier.options)!r})'
        code = KILLED.replace('Tier("nas", url)', line)
        command = [sys.executable, "-c", code, str(tmp_path / "a"), tier.url, "push"]
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"begun\n"
            time.sleep(1)
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
            child.wait(timeout=8)
        assert child.returncode == -signal.SIGINT
        wire.pause = 0.0
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        with SmartCache(tmp_path / "c") as c, opened(c, tier) as theirs:
            check(theirs, keys[::40])


class Hosts(RuleBasedStateMachine):
    """Two machines and a tier against a plain model of who knows what."""

    KEYS = ("k1", "k2", "k3")
    hosts = st.sampled_from(["a", "b"])
    names = st.sampled_from(KEYS)

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.folder = Path(tempfile.mkdtemp(prefix="smartcache-hosts-"))
        self.tier = Tier("nas", (self.folder / "nas").as_uri()).begin()
        self.caches = {name: SmartCache(self.folder / name) for name in "ab"}
        self.sets = {name: self.open(name) for name in "ab"}
        self.clock = 0
        # By machine and key: when something was put or deleted there, and what (None: deleted).
        self.own: dict[str, dict[str, tuple[int, int | None]]] = {"a": {}, "b": {}}
        self.pushed: dict[str, dict[str, tuple[int, int | None]]] = {"a": {}, "b": {}}
        self.seen: dict[str, dict[str, tuple[int, int | None]]] = {"a": {}, "b": {}}

    def open(self, name: str) -> ArtifactSet:
        return self.caches[name].artifacts("s", fingerprint={})

    @rule(host=hosts, key=names)
    def put(self, host: str, key: str) -> None:
        self.clock += 1
        self.sets[host].put(key, {"n": self.clock, "tensor": np.full(50, self.clock)})
        self.own[host][key] = self.clock, self.clock

    @rule(host=hosts, key=names)
    def delete(self, host: str, key: str) -> None:
        self.clock += 1
        was_there = self.expected(host, key) is not None
        assert self.sets[host].delete(key) == was_there
        if was_there:
            self.own[host][key] = self.clock, None

    @rule(host=hosts)
    def push(self, host: str) -> None:
        push_set(self.sets[host], self.tier)
        self.pushed[host] = dict(self.own[host])

    @rule(host=hosts)
    def attach(self, host: str) -> None:
        attach_set(self.sets[host], self.tier)
        self.see(host)

    @rule(host=hosts)
    def pull(self, host: str) -> None:
        if any(True for _ in self.tier.documents("sets")):
            pull_set(self.caches[host].sets, self.tier, "s")
            self.see(host)

    @rule(host=hosts)
    def open_again(self, host: str) -> None:
        self.sets[host].close()
        self.sets[host] = self.open(host)

    def see(self, host: str) -> None:
        other = "b" if host == "a" else "a"
        self.seen[host] = dict(self.pushed[other])

    def expected(self, host: str, key: str) -> int | None:
        for known in (self.own[host], self.seen[host]):
            if key in known:
                return known[key][1]
        return None

    @invariant()
    def each_machine_has_what_it_should(self) -> None:
        if not hasattr(self, "sets"):
            return
        for host, opened in self.sets.items():
            for key in self.KEYS:
                found = opened.get(key)
                assert (None if found is None else found["n"]) == self.expected(host, key)
                if found is not None:
                    assert (found["tensor"] == found["n"]).all()

    def teardown(self) -> None:
        if hasattr(self, "sets"):
            for opened in self.sets.values():
                opened.close()
            for cache in self.caches.values():
                cache.close()
            shutil.rmtree(self.folder)


TestHosts = Hosts.TestCase
TestHosts.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_an_artifact_that_is_nowhere(nas: Tier, a: SmartCache) -> None:
    with opened(a, nas) as mine:
        assert mine.get("x") is None
        with pytest.raises(ArtifactNotFoundError):
            mine.get_batch(["x"])
