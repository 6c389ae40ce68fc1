"""Sets as the rest of smartcache sees them: measured, pruned and verified beside the blobs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.api import ArtifactSet, SmartCache
from tests.api import holder_Holder as Holder


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SmartCache]:
    with SmartCache(tmp_path / "store") as cache:
        yield cache


def fill(cache: SmartCache, name: str = "latents", *, ttl: float | None = None) -> ArtifactSet:
    latents = cache.artifacts(name, fingerprint={})
    for number in range(10):
        latents.put(f"key-{number}", np.full(1000, number), ttl=ttl)
    latents.close()
    return latents


def holder_of(cache: SmartCache) -> Holder:
    (holder,) = cache.holders()
    return holder


def test_without_sets_there_is_no_holder_and_nothing_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from smartcache import SmartCache\n"
        f"with SmartCache({str(tmp_path / 'store')!r}) as cache: print(cache.holders())\n"
        "print([name for name in sys.modules if name.startswith('smartcache.artifacts')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_usage_adds_up(cache: SmartCache) -> None:
    for name in ("captions", "latents"):
        fill(cache, name)
    usage = holder_of(cache).usage()
    assert [part.name.partition("/")[0] for part in usage.parts] == ["captions", "latents"]
    assert usage.items == 20
    assert usage.on_disk == sum(part.on_disk for part in usage.parts) >= usage.live > 20 * 8000
    assert usage.reclaimable == 0
    infos = {f"{info.name}/{info.id}": info for info in cache.artifact_sets()}
    assert all(infos[part.name].live == part.live for part in usage.parts)


def test_a_plan_frees_what_nobody_wants_and_says_what_came_back(cache: SmartCache) -> None:
    fill(cache, "gone", ttl=0.01)
    fill(cache, "kept")
    with cache.artifacts("kept", fingerprint={}) as latents:
        latents.delete_many(["key-0", "key-1"])
    time.sleep(1.1)
    holder = holder_of(cache)
    plan = holder.plan_prune()
    assert {(each.name.partition("/")[0], each.reason) for each in plan.victims} == {
        ("gone", "expired"),
        ("kept", "dead"),
    }
    assert plan.items == 10
    assert plan.freed_size == holder.usage().reclaimable
    result = plan.execute()
    assert (result.items, result.problems) == (10, ())
    assert result.freed_size == pytest.approx(plan.freed_size, rel=0.2)
    assert not holder.plan_prune().victims
    with cache.artifacts("kept", fingerprint={}) as latents:
        assert len(latents) == 8


def test_what_came_into_use_meanwhile_stays(cache: SmartCache) -> None:
    fill(cache, ttl=0.01)
    time.sleep(1.1)
    plan = holder_of(cache).plan_prune()
    with cache.artifacts("latents", fingerprint={}) as latents:
        latents.put("key-3", "made anew")
    plan.execute()
    with cache.artifacts("latents", fingerprint={}) as latents:
        assert list(latents) == ["key-3"]


def test_a_set_that_cannot_be_read_stands_in_nobodys_way(cache: SmartCache) -> None:
    broken = fill(cache, "broken")
    fill(cache, "sound", ttl=0.01)
    (broken.path / "index.sqlite3").write_bytes(b"no database" * 1000)
    time.sleep(1.1)
    holder = holder_of(cache)
    problems = {part.name.partition("/")[0]: part.problem for part in holder.usage().parts}
    assert problems["broken"]
    assert not problems["sound"]
    plan = holder.plan_prune()
    assert "broken" in plan.warnings[0]
    assert plan.execute().items == 10
    for full in (False, True):
        report = holder.verify(full=full)
        damage = {part.name.partition("/")[0]: part for part in report.parts}
        assert damage["broken"].damage
        assert "--rebuild" in damage["broken"].cure
        assert not damage["sound"].damage
        assert report.has_damage


def test_only_a_full_look_reads_artifacts(cache: SmartCache) -> None:
    latents = fill(cache)
    (pack,) = latents.path.glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    holder = holder_of(cache)
    assert not holder.verify().has_damage
    (part,) = holder.verify(full=True).parts
    assert part.damage == ("1 artifact is damaged",)
    assert len(part.damaged) == 1
    assert not holder.verify(full=True).has_damage  # it is gone, and can be computed again
