"""A btrfs or XFS for some tests, or a tiny ext4, whatever the temporary directory lies on.

It is an image in a file, mounted in a mount namespace that this process gets for itself: nobody
else sees it, and it goes with the process. Where that cannot be done, the tests are skipped with
the reason.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from tests.store.small_disks import CannotMountError, enter_namespace

Disk = Literal["btrfs", "xfs", "ext4"]
DISKS: tuple[Disk, ...] = ("btrfs", "xfs")

_SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
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
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount an image")
    for tool in (mkfs[0], "mount", "umount"):
        if shutil.which(tool, path=_SEARCH) is None:
            pytest.skip(f"no {tool}")
    problem = _own_namespace()
    if problem:
        pytest.skip(f"no mount namespace: {problem}")
    image = directory / f"{kind}.image"
    point = Path(tempfile.mkdtemp(prefix="smartcache-test-"))  # where other users can reach it
    with open(image, "wb") as file:
        file.truncate(megabytes * 1_000_000)
    try:
        _run(*mkfs, str(image))
        words = ",".join(filter(None, ("loop", options)))
        done = _run("mount", "-o", words, str(image), str(point), check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
        try:
            point.chmod(0o1777)
            yield point
        finally:
            _run("umount", "--lazy", str(point))
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


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": _SEARCH}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=check)
