from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smartcache import SmartCache, Store, StoreError, load_settings
from smartcache.cache import prunable_size, usage_of_sets
from smartcache.errors import SetFormatError, StoreUnwritableError


def test_without_arguments_the_settings_say_where_it_is() -> None:
    with SmartCache() as cache:
        assert cache.store.root == load_settings().home
        assert str(cache.store.root) == os.environ["SMARTCACHE_HOME"]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_home_can_be_given(tmp_path: Path, kind: type[str | Path]) -> None:
    with SmartCache(kind(tmp_path / "here")) as cache:
        assert cache.store.root == tmp_path / "here"
        assert cache.settings.home == tmp_path / "here"


def test_settings_can_be_given(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path / "here", threads=1, keep_writable=True)
    with SmartCache(settings=settings) as cache:
        assert cache.settings == settings
        assert cache.store.settings == settings
        assert cache.store.root == tmp_path / "here"


def test_a_given_home_counts_more_than_that_of_given_settings(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path / "there", threads=1)
    with SmartCache(tmp_path / "here", settings=settings) as cache:
        assert cache.store.root == tmp_path / "here"
        assert cache.settings.threads == 1
    assert not (tmp_path / "there").exists()


def test_its_store_is_the_same_for_everybody(tmp_path: Path) -> None:
    with SmartCache(tmp_path / "here") as cache, Store(tmp_path / "here") as store:
        blob = cache.store.put_stream([b"bytes"])
        assert store.get(blob.digest).inode == blob.inode


def test_leaving_the_block_closes_the_store(tmp_path: Path) -> None:
    with SmartCache(tmp_path / "here") as cache:
        blob = cache.store.put_stream([b"bytes"])
    with pytest.raises(StoreError, match="closed"):
        cache.store.get(blob.digest)


def test_downloads_may_reuse_what_a_browser_saved_but_it_is_not_scanned(tmp_path: Path) -> None:
    saved = Path.home() / "Downloads" / "m.safetensors"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(b"bytes")
    with SmartCache(tmp_path / "here") as cache:
        cache.look_again()
        (folder,) = [each for each in cache.store.folders() if each.path == saved.parent]
        assert (folder.files, folder.is_given) == (1, False)
        assert saved.parent not in [
            each.folder.path for each in cache.scan().folders if each.folder
        ]


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    cache = SmartCache(tmp_path / "here")
    cache.close()
    cache.close()


def test_an_error_in_the_block_closes_the_store_and_passes_through(tmp_path: Path) -> None:
    def fail(cache: SmartCache) -> None:
        with cache:
            raise KeyError("x")

    cache = SmartCache(tmp_path / "here")
    with pytest.raises(KeyError):
        fail(cache)
    with pytest.raises(StoreError):
        cache.store.get("0" * 64)


def test_folders_are_scanned_and_freed_of_duplicates(tmp_path: Path) -> None:
    for name in ("a/x.safetensors", "b/y.safetensors"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(bytes(range(256)) * 8192)
    with SmartCache(tmp_path / "store") as cache:
        assert cache.scan(tmp_path / "a", tmp_path / "b", min_size=3 << 20).groups == 0
        found = cache.scan(tmp_path / "a", tmp_path / "b")
        assert found.freeable == 2 << 20
        assert cache.scan(tmp_path / "a", tmp_path / "b", exclude=["y.*"]).freeable == 0
        result = cache.plan_dedup(found).execute()
        assert (result.replaced, result.freed) == (1, 2 << 20)
        assert cache.scan(tmp_path / "a", tmp_path / "b").freeable == 0
    assert os.path.samefile(tmp_path / "a/x.safetensors", tmp_path / "b/y.safetensors")


def test_keeping_files_writable_is_a_setting(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path / "store", keep_writable=True)
    with SmartCache(settings=settings) as cache:
        found = cache.scan(tmp_path)
        assert cache.plan_dedup(found).groups == ()


def test_without_artifacts_nothing_of_them_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from smartcache.cache import SmartCache, prunable_size, usage_of_sets\n"
        f"with SmartCache({str(tmp_path / 'store')!r}) as cache:\n"
        "    print(prunable_size(cache.store), usage_of_sets(cache.store))\n"
        "print(sorted({'smartcache.artifacts', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 []", "[]"]


class TestArtifacts:
    def test_what_each_set_takes_and_what_can_be_freed_of_it(self, tmp_path: Path) -> None:
        with SmartCache(tmp_path / "store") as cache:
            for name in ("captions", "latents"):
                with cache.artifacts(name, fingerprint={}) as opened:
                    opened.put_many((f"key-{n}", np.full(1000, n)) for n in range(10))
                    opened.delete_many(["key-0", "key-1"] if name == "latents" else [])
            (captions, none), (latents, some) = usage_of_sets(cache.store)
            assert (captions.name, none, latents.name) == ("captions", 0, "latents")
            assert 16_000 < some < latents.on_disk - latents.live + 1000
            assert prunable_size(cache.store) == some
            plan = cache.sets.plan_prune()
            assert [(each.info.name, each.reason) for each in plan.victims] == [("latents", "dead")]
            assert plan.execute().freed_size == pytest.approx(some, abs=4096)
            assert usage_of_sets(cache.store)[1][1] == 0

    def test_a_bound_can_be_taken_back(self, tmp_path: Path) -> None:
        with SmartCache(tmp_path / "store") as cache:
            cache.artifacts("latents", fingerprint={}, max_size=10**9, ttl=60).close()
            cache.artifacts("latents", fingerprint={}, ttl=math.inf).close()
            (info,) = cache.artifact_sets()
            assert (info.options.max_size, info.options.ttl) == (10**9, None)
            cache.artifacts("latents", fingerprint={}, max_size=math.inf).close()
            (info,) = cache.artifact_sets()
            assert info.options.max_size is None

    def test_read_only_writes_nothing_and_needs_the_set_to_be_there(self, tmp_path: Path) -> None:
        with SmartCache(tmp_path / "store") as cache:
            with pytest.raises(SetFormatError, match="There is no set 'latents'"):
                cache.artifacts("latents", fingerprint={}, read_only=True)
            with cache.artifacts("latents", fingerprint={}) as latents:
                latents.put("a", 1)
            latents.path.chmod(0o770)  # as somebody else may have it: it is not trusted
            before = {path: path.stat().st_mtime_ns for path in latents.path.rglob("*")}
            with cache.artifacts("latents", fingerprint={}, read_only=True) as reading:
                assert reading.get("a") == 1
                for each in (reading, reading["a"]):
                    moved = pickle.loads(pickle.dumps(each))  # noqa: S301 - our own
                    assert (moved.get("a") if each is reading else moved.value()) == 1
                with pytest.raises(StoreUnwritableError, match="for reading only"):
                    reading.put("b", 2)
            assert {path: path.stat().st_mtime_ns for path in latents.path.rglob("*")} == before
