"""The cache of diffusion-pipe, on artifacts: the same class, one other import.

    from smartcache.integrations.diffusion_pipe import Cache

    cache = Cache("cache/flux/cache_1.000x1024x1024x1/latents", fingerprint, shard_size_gb=10)
    cache.add({"latents": tensor})
    cache[0]

A cache is a list that is only added to. Each fingerprint has a set of artifacts of its own below
the folder, and an item is the artifact of its position:

    <path>/items/<id>/      the set; see smartcache.artifacts

So what was added is there when `add` returns, and a killed run goes on behind it. Another
fingerprint is another list beside this one, and nothing is deleted for it. Nothing is unpickled.
Whatever diffusion-pipe itself has in the folder (metadata.db, shard_0.bin) is left alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from smartcache.artifacts import ArtifactSets, Claim
from smartcache.errors import ConfigError, DamagedArtifactError, DatasetChangedError

__all__ = ["Cache"]

_ADDING = "adding"
"""Whoever adds has claimed this key; there is never an artifact of it."""


class Cache:
    """Items by their position, for any number of readers and one process that adds.

    `shard_size_gb` is accepted and means nothing: no item waits for a shard to be full.
    """

    def __init__(
        self, path: str | os.PathLike[str], fingerprint: str, shard_size_gb: float = 1
    ) -> None:
        """Open the list of a fingerprint, made if it is not there."""
        if not isinstance(fingerprint, str):
            raise ConfigError(f"A fingerprint is a text, not {type(fingerprint).__name__}")
        self.path = Path(path)
        self.fingerprint = fingerprint
        self.shard_size_gb = shard_size_gb
        self._claim: Claim | None = None
        self._set = ArtifactSets(os.path.abspath(path)).open(
            "items", {"fingerprint": fingerprint}, evictable=False
        )
        self._count = self._counted()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - whatever was added
        """Return an item, in memory of the caller's own; tensors are on the CPU."""
        number = range(self._count)[index]
        found = self._set.get_with_metadata(_key(number))
        if found is None:
            hint = "Open the cache again and run the caching again: it encodes from there on."
            message = f"Item {number} of {self.path} is damaged or was removed"
            raise DamagedArtifactError(message, hint=hint, path=self._set.path)
        return found[0]

    def __getstate__(self) -> dict[str, object]:
        """Go to another process to be read there; who adds is still this one."""
        return {**vars(self), "_claim": None}

    def add(self, item: object) -> None:
        """Keep an item behind the others: it survives the death of this process.

        UnsupportedValueError names the part of it that cannot be kept. DatasetChangedError if
        another process adds to the same list.
        """
        if self._claim is None:
            self._claim = self._claimed()
        self._set.put(_key(self._count), item)
        self._count += 1

    def finalize_current_shard(self) -> None:
        """Return when all that was added survives power loss; let other processes add."""
        self._set.sync()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def clear(self) -> None:
        """Delete all items of this fingerprint; those of others stay."""
        if self._claim is None:
            self._claim = self._claimed()
        # From the last to the first: who is killed meanwhile leaves a list, and not one with gaps
        # that new items would close, with old ones behind them.
        self._set.delete_many(sorted(self._set.keys(), reverse=True))
        self._count = 0
        self._set.compact(force=True)
        self.finalize_current_shard()

    def close(self) -> None:
        """Let go of the files; also done when it is no longer used."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        self._set.close()

    def _counted(self) -> int:
        """Count the items up to the first that is missing: all but damage leaves no gaps."""
        present = set(self._set.keys())
        count = len(present)
        return next((number for number in range(count) if _key(number) not in present), count)

    def _claimed(self) -> Claim:
        """Be the only one who adds, and know all that others have added."""
        claim = self._set.claim([_ADDING])
        if claim.keys and self._counted() == self._count:
            return claim
        claim.close()
        what = "Another process adds to it" if claim.busy else "Another process has added to it"
        hint = "Let one process do the caching, and open the cache again when it has ended."
        raise DatasetChangedError(f"{what}: {self.path}", hint=hint, path=self.path)


def _key(number: int) -> str:
    return f"{number:012d}"
