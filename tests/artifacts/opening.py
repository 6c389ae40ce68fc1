"""Open sets in a test: with small packs, and arrays to put into them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.setfolder import SetFolder

FINGERPRINT = {"vae": "0123", "dtype": "float16"}


def open_set(
    sets: ArtifactSets,
    name: str = "latents",
    *,
    pack_bytes: int | None = None,
    **options: Any,  # noqa: ANN401 - those of `ArtifactSets.open`
) -> ArtifactSet:
    """Open the set that the tests write to; `pack_bytes` bounds its packs."""
    opened = sets.open(name, FINGERPRINT, **options)
    if pack_bytes is not None:
        engine_of(opened).pack_bytes = pack_bytes
    return opened


def engine_of(opened: ArtifactSet) -> Engine:
    """Return what all objects of this set share."""
    return opened._engine  # noqa: SLF001 - no user needs it


def packs_of(opened: ArtifactSet) -> list[Path]:
    """Return the packs that a set has now."""
    return sorted(opened.path.glob("*.pack"))


def size_of(opened: ArtifactSet) -> int:
    """Return the bytes of its packs."""
    return sum(path.stat().st_size for path in packs_of(opened))


def blocks_of(opened: ArtifactSet) -> int:
    """Return what its packs take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in packs_of(opened))


def seal(opened: ArtifactSet) -> None:
    """Let the next put begin another pack."""
    with engine_of(opened).mutex:
        engine_of(opened).leave_pack(sealed=True)


def check_whole(opened: ArtifactSet) -> None:
    """Compare what the set says of itself with its files and with what a newcomer finds there."""
    report = opened.verify()
    assert not report.damage
    stats = opened.stats()
    assert stats.artifacts == len(set(opened)) == report.artifacts
    assert stats.on_disk == size_of(opened)
    assert stats.packs == len(packs_of(opened))
    assert stats.live + stats.dead <= stats.on_disk
    folder = SetFolder.read(opened.path, read_only=True)
    with ArtifactSet(folder, read_only=True) as newcomer:
        assert set(newcomer) == set(opened)


def array(seed: int, size: int = 4096) -> np.ndarray[Any, Any]:
    """Return bytes that differ from those of every other seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def bytes_read() -> int:
    """Return what this process has read so far, from files or the page cache."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().removeprefix("rchar:"))


def holders_of(path: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [each for each in found if each.startswith(str(path))]


def unlinked_of(opened: ArtifactSet) -> list[str]:
    """Return packs that have no name any more, and that this process still keeps on the disk."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = {*holders_of(opened.path), *(line.split(maxsplit=5)[-1] for line in maps)}
    return [name for name in found if name.startswith(str(opened.path)) and "(deleted)" in name]
