"""The figures of the store, against what the filesystem says.

That they are right after anything that can be done is in `test_stateful`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smartcache.errors import DamagedBlobError
from smartcache.store.store import Store
from smartcache.store.usage import PoolUsage
from tests.store.files import WEIGHTS, Watch, allocated, blob_path, edit, killed, row, write

if sys.platform == "win32":
    pytest.skip("link counts and blocks as POSIX has them", allow_module_level=True)


def du(*paths: Path) -> int:
    """The bytes on the disk of all files there, each once, as `du` sees them; folders take none."""
    files = [each for path in paths for each in (path.rglob("*") if path.is_dir() else [path])]
    names = "\0".join(str(each) for each in files if each.is_file() and not each.is_symlink())
    command = ["du", "--block-size=1", "--total", "--files0-from=-"]
    done = subprocess.run(command, input=names, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1].split()[0])


def figures(usage: PoolUsage) -> tuple[int, ...]:
    names = ("blobs", "logical", "physical", "shared", "only_smartcache", "pinned", "saved")
    return tuple(getattr(usage, name) for name in names)


def test_of_an_empty_store_everything_is_nothing(store: Store) -> None:
    usage = store.usage()
    assert (figures(usage), usage.reclaimable, usage.total) == ((0,) * 7, 0, 0)
    assert (usage.root, store.root.exists()) == (store.root, False)
    watch = Watch()
    store.put_stream([b"1"])
    store.put_stream([b"2"])
    store.usage(progress=watch)
    assert (watch.labels, watch.done) == (["Looking at blobs"], 2)


def test_a_pin_of_the_damaged_file_before_is_no_name_of_its_blob(
    store: Store, folder: Path
) -> None:
    """A kill came between the new blob and its pins, which keep it nevertheless."""
    digest = store.put_stream([WEIGHTS]).digest
    store.pin(digest)
    edit(blob_path(store))
    with pytest.raises(DamagedBlobError):
        store.open(digest)
    path = write(folder / "a.safetensors")
    killed(lambda: store.adopt(path), "linked")
    assert store.recover() == []
    for names in (1, 0):
        usage, blocks = store.usage(), allocated(blob_path(store))
        assert (usage.only_smartcache, usage.reclaimable) == ((1 - names) * blocks, 0)
        path.unlink(missing_ok=True)
        assert store.plan_prune().execute().removed == 0


def test_a_blob_counts_once_and_each_further_name_is_saved(store: Store, folder: Path) -> None:
    """Holes take nothing. Names that come and go, pins and copies are seen at once."""
    path, size = write(folder / "sparse.bin"), 3_000_000
    os.truncate(path, size)
    digest, blocks = store.adopt(path).digest, allocated(path)
    assert blocks < size
    path.unlink()
    paths = [folder / f"{name}.safetensors" for name in "abc"]
    for names in range(4):
        alone = 0 if names else blocks
        for pinned in (0, 1):
            with row(names, pinned):
                logical, saved = max(1, names) * size, max(0, names - 1) * blocks
                assert figures(store.usage()) == (
                    1, logical, blocks, blocks - alone, alone, alone * pinned, saved,
                )  # fmt: skip
                assert store.usage().reclaimable == alone * (1 - pinned)
                store.unpin(digest) if pinned else store.pin(digest)
        if names < 3:
            store.place(digest, paths[names], kind="hardlink")
    for path in paths:
        store.place(digest, path.with_suffix(".json"), kind="copy")
        path.unlink()
    assert store.usage().reclaimable == blocks
    os.rename(blob_path(store, digest), folder / "taken away")
    assert figures(store.usage()) == (0,) * 7


def test_each_pool_and_what_lies_beside_the_blobs_is_counted_by_place(
    store: Store, elsewhere: Path, digest: str
) -> None:
    edit(blob_path(store))
    store.verify()
    pool = store.add_pool(elsewhere / "pool")
    store.put_stream([WEIGHTS], pool=pool)
    store.pin(digest)
    places = {
        "bad": store.layout.bad,
        "tmp": store.layout.tmp,
        "sets": store.layout.sets / "a" / "1",
    }
    for place in places.values():
        os.link(write(place / "file", WEIGHTS), place / "again")
        (place / "symlink").symlink_to(store.root / "format")
    usage = store.usage()
    assert [each.root for each in usage.pools] == [store.root, pool.root]
    assert figures(usage.pools[0]) == (0,) * 7
    assert figures(usage.pools[1]) == figures(usage)
    assert usage.physical == du(*pool.blobs.glob("??")) == usage.pinned
    for name, place in places.items():
        assert getattr(usage, name) == du(place) > 0, name
    assert usage.index == du(*store.root.glob("index.sqlite3*"), *store.root.glob("journal*"))
    others = [store.root / name for name in ("format", "lock", "blobs/CACHEDIR.TAG")]
    assert usage.total == du(store.root, pool.root) - du(*others, pool.blobs / "CACHEDIR.TAG")
