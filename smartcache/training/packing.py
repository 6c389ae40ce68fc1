"""Sequences of tokens, packed: whole sequences side by side in rows of one length.

Each goes into the first row that has room for it. Beside the tokens every row has the position of
each token in its sequence, and the number of that sequence (from 1; 0 is padding), so that
attention can be kept within a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from smartcache.errors import ConfigError, DatasetError
from smartcache.training.dataset import Dataset
from smartcache.training.encoder import SINGLE

Column = np.ndarray[Any, np.dtype[Any]]
_OPEN: Final = 64
"""Rows that are filled at a time; when there are more, the fullest is closed."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Which sequences are in which row."""

    bounds: Column
    """Where the sequences of each row begin, and the last ones end."""
    ranges: Column
    """Of each sequence: its row, its first token, and how many tokens of it."""


def packed_lengths(dataset: Dataset, items: Column, variations: Column) -> Column:
    """Return the lengths of sequences; no token is read for it."""
    found: Column | None = None
    numbers = dataset.numbers[items]
    for output in dataset.outputs.values():
        chosen = numbers * output.variations + variations % output.variations
        for name, lengths in output.selection.lengths(chosen).items():
            what = output.name if name == SINGLE else f"{output.name}[{name!r}]"
            if lengths is None:
                hint = "Packing is for outputs with one number for each token."
                raise ConfigError(f"{what} of {dataset.name} cannot be packed", hint=hint)
            if found is not None and (found != lengths).any():
                raise ConfigError(f"{what} of {dataset.name} has another length than the others")
            found = lengths
    return np.zeros(len(items), np.int64) if found is None else found


def pack_rows(
    entries: Column,
    owner: Column,
    lengths: Column,
    size: int,
    too_long: Literal["raise", "split"],
) -> tuple[Packed, Column, Column]:
    """Return rows of at most `size` tokens, the entries in the order of the rows, and owners.

    A row has sequences of one owner; rows are sorted by owner.
    """
    longest = int(lengths.max(initial=0))
    if longest > size and too_long == "raise":
        count = int((lengths > size).sum())
        hint = f"Use pack={longest}, or too_long='split' to cut them."
        message = f"{count:,} sequences are longer than {size:,} tokens, the longest {longest:,}"
        raise DatasetError(message, hint=hint)
    placed: list[tuple[int, int, int, int]] = []
    owners: list[int] = []
    for each in np.unique(owner).tolist():
        room: dict[int, int] = {}
        """By row: what is free in it, of those that are being filled."""
        for at in np.flatnonzero(owner == each).tolist():
            start, left = 0, int(lengths[at])
            while left:
                need = min(left, size)
                row = next((row for row, free in room.items() if free >= need), None)
                if row is None:
                    row = len(owners)
                    owners.append(each)
                    room[row] = size
                    if len(room) > _OPEN:
                        del room[min(room, key=room.__getitem__)]
                placed.append((row, at, start, need))
                if row in room:
                    room[row] -= need
                    if not room[row]:
                        del room[row]
                start, left = start + need, left - need
    table = np.array(placed, np.int64).reshape(-1, 4)
    table = table[np.argsort(table[:, 0], kind="stable")]
    bounds = np.searchsorted(table[:, 0], np.arange(len(owners) + 1))
    packed = Packed(bounds, np.ascontiguousarray(table[:, [0, 2, 3]]))
    return packed, entries[table[:, 1]], np.array(owners, np.int64)


def read_rows(
    dataset: Dataset, items: Column, variations: Column, ranges: Column, size: int
) -> dict[str, Any]:
    """Read sequences into rows: outputs by name, `positions`, `segments`, and the names of each."""
    batch = dataset.batch(items, variations=variations, ragged="list")
    rows = ranges[:, 0] - ranges[0, 0]  # they are in order, and there is one at least
    count = int(rows[-1]) + 1
    made: dict[str, Any] = {}
    for name in dataset.outputs:
        column = batch[name]
        if isinstance(column, dict):
            made[name] = {each: _filled(column[each], rows, ranges, count, size) for each in column}
        else:
            made[name] = _filled(column, rows, ranges, count, size)
    positions = np.zeros((count, size), np.int64)
    segments = np.zeros((count, size), np.int64)
    names: list[list[str]] = [[] for _ in range(count)]
    ends = [0] * count
    for at, row in enumerate(rows.tolist()):
        start, length = int(ranges[at, 1]), int(ranges[at, 2])
        some = slice(ends[row], ends[row] + length)
        positions[row, some] = np.arange(start, start + length)
        names[row].append(batch["name"][at])
        segments[row, some] = len(names[row])
        ends[row] += length
    first = next(iter(made.values()))
    sample = next(iter(first.values())) if isinstance(first, dict) else first
    if not isinstance(sample, np.ndarray):
        import torch

        return made | {
            "positions": torch.from_numpy(positions), "segments": torch.from_numpy(segments),
            "name": names,
        }  # fmt: skip
    return made | {"positions": positions, "segments": segments, "name": names}


def _filled(column: Any, rows: Column, ranges: Column, count: int, size: int) -> Any:  # noqa: ANN401
    """Return rows with sequences side by side: a tensor of torch, or an array."""
    first = column[0]
    is_numpy = isinstance(first, np.ndarray)
    made = np.zeros((count, size), first.dtype) if is_numpy else first.new_zeros((count, size))
    ends = [0] * count
    for at, row in enumerate(rows.tolist()):
        start, length = int(ranges[at, 1]), int(ranges[at, 2])
        made[row, ends[row] : ends[row] + length] = column[at][start : start + length]
        ends[row] += length
    return made
