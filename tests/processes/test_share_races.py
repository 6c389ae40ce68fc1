"""Programs that write files while they are made to share blocks, or to have their own again.

The kernel compares and shares under its own locks: each write is either before, and the files
differ, or after, and goes to new blocks. Neither the file that is written nor its source may show
anything else.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from blake3 import blake3

if sys.platform != "linux":
    pytest.skip("Linux system calls", allow_module_level=True)

from tests.api import FileSkippedError, NothingToUndoError, Store
from tests.processes.children import NOBODY, Child
from tests.processes.races import HOWS, File, How, content, make, race
from tests.store.reflink_disks import DISKS, reflink_disk

_log = logging.getLogger(__name__)

FILES = 3
POINTS = ("share: journaled", "share: part shared", "share: shared")


@pytest.fixture(scope="module", params=DISKS)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with reflink_disk(request.param, tmp_path_factory.mktemp("disk")) as point:
        yield point


def source_of(file: File) -> Path:
    return file.path.with_name(f"source-{file.seed}.bin")


def share_race(folder: Path, how: How, seconds: float, *, undo: bool) -> Counter[str]:
    files = [File(folder / f"{seed}.safetensors", seed) for seed in range(FILES)]
    for file in files:
        make(source_of(file), content(file.seed, 0))

    def act(store: Store, files: Sequence[File]) -> Counter[str]:
        counts: Counter[str] = Counter()
        digests = [blake3(content(file.seed, 0)).hexdigest() for file in files]
        pairs = zip(files, digests, strict=True)
        for result in store.share_many((source_of(f), f.path, digest) for f, digest in pairs):
            error = result.error
            assert error is None or isinstance(error, FileSkippedError), error
            counts[result.outcome if error is None else error.reason] += 1
            assert error is None or error.reason != "not supported here"
        if undo:
            try:
                undone = store.plan_undo().execute()
            except NothingToUndoError:
                return counts
            counts["undone"] = sum(each.is_undone for each in undone)
            counts["not undone"] = len(undone) - counts["undone"]
        return counts

    def check(_: Store, files: Sequence[File]) -> None:
        names = {name for name in os.listdir(folder) if ".smartcache" in name}
        assert names == set()
        for file in files:
            assert source_of(file).read_bytes() == content(file.seed, 0)

    with Store(folder / "store") as store:
        return race(
            store, how, lambda _: files, act=act, check=check,
            points=(*POINTS, "own blocks: copied") if undo else POINTS,
            wanted=("replaced", "different", "undone") if undo else ("replaced", "different"),
            seconds=seconds,
        )  # fmt: skip


@pytest.mark.parametrize("undo", [False, True], ids=["shared", "and undone"])
@pytest.mark.parametrize("how", HOWS)
def test_sharing_loses_no_write(
    how: How, undo: bool, disk: Path, tmp_path: Path, seconds: Callable[[float], float]
) -> None:
    folder = disk / tmp_path.name
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    with Child(lambda: share_race(folder, how, seconds(0.25), undo=undo), user=NOBODY) as racer:
        counts = racer.result()
    _log.info("%s", dict(sorted(counts.items())))
    assert counts["writes"] > 0
    assert counts["replaced"] > 0
