"""A btrfs or XFS for some tests, or a tiny ext4, whatever the temporary directory lies on.

It is an image in a file, mounted in a mount namespace that this process gets for itself: nobody
else sees it, and it goes with the process. Where that cannot be done, the tests are skipped with
the reason.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from tests.store.small_disks import CannotMountError, enter_namespace, make_image, run

Disk = Literal["btrfs", "xfs", "ext4"]
DISKS: tuple[Disk, ...] = ("btrfs", "xfs")

_MKFS: dict[Disk, tuple[tuple[str, ...], int]] = {
    "btrfs": (("mkfs.btrfs", "-q"), 600),
    "xfs": (("mkfs.xfs", "-q", "-m", "reflink=1"), 600),
    "ext4": (("mkfs.ext4", "-q", "-m", "0", "-b", "1024"), 12),
}


@contextmanager
def reflink_disk(kind: Disk, directory: Path, *, options: str = "") -> Iterator[Path]:
    """Give the root of a new filesystem on which files can share blocks, writable for all.

    "ext4" cannot share any: it is small, and so are its blocks.
    """
    mkfs, megabytes = _MKFS[kind]
    image = make_image(directory / f"{kind}.image", megabytes, *mkfs)
    if problem := _own_namespace():
        pytest.skip(f"no mount namespace: {problem}")
    point = Path(tempfile.mkdtemp(prefix="smartcache-test-"))  # where other users can reach it
    try:
        words = ",".join(filter(None, ("loop", options)))
        if problem := run("mount", "-o", words, image, point):
            pytest.skip(f"cannot mount {kind}: {problem}")
        try:
            point.chmod(0o1777)
            yield point
        finally:
            assert run("umount", "--lazy", point) == ""
    finally:
        image.unlink()
        point.rmdir()


@functools.cache
def _own_namespace() -> str:
    """Let what this process mounts be seen by it and its children only; else say why not."""
    try:
        enter_namespace()
    except (CannotMountError, OSError) as error:
        return str(error)
    return ""
