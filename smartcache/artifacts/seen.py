"""Which checksums a set surely does not have: so that most puts need not ask the index.

A table of bytes, one for every 23 bits of a checksum. A byte that is not set means that no chunk
has such a checksum; one that is set means no more than that it is worth asking. What other
processes write is looked at again after each group of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from smartcache.artifacts.setindex import SetIndex

_SLOTS = 1 << 23
_MASK = _SLOTS - 1
_MOST = 2_000_000
"""Chunks beyond which the table is of no use, and takes too long to make."""


class SeenSums:
    """The checksums of the chunks of a set; made when a tensor is first put."""

    def __init__(self, index: SetIndex) -> None:
        self._index = index
        self._table: bytearray | None = None
        self._version = -1
        self._is_useless = False

    def may_have(self, sums: Iterable[int]) -> list[int]:
        """Return those checksums that chunks of the set may have."""
        table = self._table
        if table is None:
            if self._is_useless:
                return list(sums)
            table = self._load()
            if table is None:
                return list(sums)
        return [each for each in sums if table[each & _MASK]]

    def add(self, value: int) -> None:
        """Take note of a chunk that this process has written."""
        if self._table is not None:
            self._table[value & _MASK] = 1

    def look_again(self) -> None:
        """Begin anew if another process has written to the set."""
        if self._table is not None and self._index.data_version() != self._version:
            self._table = None

    def _load(self) -> bytearray | None:
        self._version = self._index.data_version()
        sums = self._index.chunk_hashes(_MOST + 1)
        if len(sums) > _MOST:
            self._is_useless = True
            return None
        self._table = table = bytearray(_SLOTS)
        for each in sums:
            table[each & _MASK] = 1
        return table
