"""What reads through from a tier, where the disk, the network or somebody else gets in the way."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smartcache import SmartCache
from smartcache.remote import Tier, push_set
from tests.remote.test_sets import HERE, MIB, check, chunks_of, fill, keys_of, opened


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond a size: a write stops in the middle, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_loses_no_artifact(nas: Tier, a: SmartCache, b: SmartCache) -> None:
    keys = keys_of(100)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        with files_up_to(3 * MIB):
            check(theirs, keys)
        assert sorted(theirs) == keys
        sizes = {path.stat().st_size for path in chunks_of(theirs)}
        assert all(size <= 3 * MIB for size in sizes), "what was not written whole has no name"
        check(theirs, keys)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_something_else_where_a_chunk_should_be(
    nas: Tier, a: SmartCache, b: SmartCache, what: str
) -> None:
    keys = keys_of(60)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        folder = theirs.path / "far" / next(iter(theirs.far_packs()))
        if what == "folder":
            (folder / "00000000").mkdir(parents=True)
        else:
            folder.parent.mkdir()
            folder.write_bytes(b"something else")
        check(theirs, keys)


ENDING = """
import sys, time
from smartcache import SmartCache
from smartcache.remote import Tier
home, url = sys.argv[1:]
read = Tier.read
def slowly(self, *args):
    time.sleep(0.5)
    return read(self, *args)
Tier.read = slowly
cache = SmartCache(home)
opened = cache.artifacts("latents", fingerprint={"vae": "x"}, tier=Tier("nas", url))
selection = opened.select(sorted(opened))
selection.announce(range(len(selection)))
print("ends", flush=True)
"""


def test_a_program_that_ends_does_not_wait_for_all_that_was_announced(
    nas: Tier, a: SmartCache, tmp_path: Path
) -> None:
    with opened(a) as mine:
        mine.put_many((f"k{n}", {"tensor": bytes(4 * MIB)}) for n in range(40))
        push_set(mine, nas)
    command = [sys.executable, "-c", ENDING, str(tmp_path / "b"), nas.url]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ends\n"
        running.wait(timeout=60)
    assert running.returncode == 0
    kept = [path for path in (tmp_path / "b").rglob("far/*/*") if path.is_file()]
    assert len(kept) < 24, "those that were on their way, and not all 40"
