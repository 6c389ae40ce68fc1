from __future__ import annotations

import os
from pathlib import Path

import pytest

import smartcache
from smartcache import SmartCache, Store, StoreError, load_settings


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
        assert store.get(blob.digest).id == blob.id


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


def test_the_public_names_are_all_there() -> None:
    for name in smartcache.__all__:
        assert getattr(smartcache, name) is not None
    assert set(smartcache.__all__) <= set(dir(smartcache))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        smartcache.nonsense  # type: ignore[attr-defined]  # noqa: B018


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
