"""Which checksums a set surely does not have: so that most puts need not ask the index.

A table of bytes, one for every 23 bits of a checksum. A byte that is not set means that no chunk
was known to have such a checksum; one that is set means no more than that it is worth asking. What
other processes write is added after each group of rows, so an equal tensor that two of them put at
the same time is kept twice, and nothing worse.
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
        self._ends: dict[int, int] = {}
        """How far the chunks of each pack are in the table."""
        self._count = 0
        self._version = -1

    @property
    def _is_useless(self) -> bool:
        return self._count > _MOST

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

    def look_again(self, own: int) -> None:
        """Add what other processes have written to the set; `own` is the pack of this one."""
        version = self._index.data_version()
        if self._table is None or version == self._version:
            return
        self._version = version
        ends = {pack.number: pack.watermark for pack in self._index.packs().values()}
        if self._ends.keys() - ends.keys():
            self._table = None  # compacted: what was copied has its old numbers
            return
        for number, end in ends.items():
            if number != own and end > self._ends.get(number, 0):
                self._fill(
                    self._table, self._index.chunk_hashes_from(number, self._ends.get(number, 0))
                )
        self._ends = ends
        if self._is_useless:
            self._table = None

    def _load(self) -> bytearray | None:
        self._version = self._index.data_version()
        self._ends = {pack.number: pack.watermark for pack in self._index.packs().values()}
        sums = self._index.chunk_hashes(_MOST + 1)
        self._count = 0
        self._table = self._fill(bytearray(_SLOTS), sums)
        if self._is_useless:
            self._table = None
        return self._table

    def _fill(self, table: bytearray, sums: list[int]) -> bytearray:
        for each in sums:
            table[each & _MASK] = 1
        self._count += len(sums)
        return table
