"""Values that were read, in memory: the layer above the packs.

    latents = cache.artifacts("latents", fingerprint={...}, memory="2GB")

What is kept here was read from a pack, verified, and is served only as long as the set would give
the same: before every answer it is looked whether anything has changed on the disk since. So what
is deleted, replaced or past its time is a miss here in the same moment, whoever has done it.

Nobody gets what is kept itself. Everything in it that could be changed is copied, for which a value
is looked through once, when it comes: what is then called for each of its containers is known.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from smartcache.artifacts.setfolder import check_option
from smartcache.artifacts.values.tensors import TORCH, torch_carrier, torch_name
from smartcache.sizes import format_size, parse_size

Copy = Callable[[Any], Any]
"""Makes a value of one that is kept; None in its place: it cannot be changed, and is shared."""
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_COPIES: dict[type, Copy] = {list: list.copy, set: set.copy, bytearray: bytearray.copy}
_CONTAINERS = (list, tuple, set, frozenset, bytearray)
_ENTRY = 400
"""Bytes that an entry takes besides its value and its key, about."""
_all: weakref.WeakSet[Memory] = weakref.WeakSet()


class Kept:
    """A value that nobody else has, and where it was read."""

    __slots__ = (
        "changes", "copied", "metadata", "metadata_copied", "place", "size", "until", "value",
    )  # fmt: skip

    def __init__(
        self, value: object, metadata: object = None, *, place: object = None,
        changes: object = None, until: float = 0.0, least: int = 0,
    ) -> None:  # fmt: skip
        """Copy a value; `least` is the size of what it was read from, if Python does not know."""
        self.value, self.copied, size = frozen(value)
        self.metadata, self.metadata_copied, more = frozen(metadata)
        self.size = max(size + more, least) + _ENTRY
        self.place = place
        """Of which record it is."""
        self.changes = changes
        """What `changes` of the catalog was when that was last known to be so."""
        self.until = until
        """When it must be looked at again: it may be past its time, or a use is to be noted."""

    def get(self) -> Any:  # noqa: ANN401 - whatever was put
        """Return the value, in memory of the caller's own."""
        copied = self.copied
        return self.value if copied is None else copied(self.value)

    def get_metadata(self) -> Any:  # noqa: ANN401
        """Return the metadata, in memory of the caller's own."""
        copied = self.metadata_copied
        return self.metadata if copied is None else copied(self.metadata)

    def views(self) -> Any:  # noqa: ANN401
        """Return the value with read-only views of its arrays; PyTorch has no such tensors."""
        return locked(self.value)


class Memory:
    """Values of the artifacts that were read last, up to so many bytes.

    Any number of sets and threads may share one.
    """

    def __init__(self, max_size: float | str, *, max_count: int | None = None) -> None:
        self.max_size = parse_size(max_size) if isinstance(max_size, str) else max_size
        """Bytes, as Python counts them."""
        check_option("memory", self.max_size)
        self.max_count = max_count
        if max_count is not None:
            check_option("max_count", max_count)
        self.hits = self.misses = 0
        self.begin_again()
        _all.add(self)

    def begin_again(self) -> None:
        """Have nothing."""
        self.size = 0
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._gate = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __repr__(self) -> str:
        most = "" if self.max_size == math.inf else f" of {format_size(int(self.max_size))}"
        return f"<Memory: {len(self):,} values, {format_size(self.size)}{most}>"

    def __reduce__(self) -> tuple[object, ...]:
        """Go to another process without what it keeps."""
        return _empty, (self.max_size, self.max_count)

    def find(self, key: Hashable) -> Kept | None:
        """Return what is kept under a key; it counts as used."""
        with self._gate:
            found = self._kept.get(key)
            if found is None:
                self.misses += 1
            else:
                self.hits += 1
                self._kept.move_to_end(key)
            return found

    def peek(self, key: Hashable) -> Kept | None:
        """Return what is kept under a key; that counts neither as a use nor as a hit."""
        return self._kept.get(key)

    def keep(self, key: Hashable, kept: Kept) -> None:
        """Keep something, and let go what was used least recently; too large: keep nothing."""
        with self._gate:
            before = self._kept.pop(key, None)
            self.size -= 0 if before is None else before.size
            if kept.size > self.max_size:
                return
            self._kept[key] = kept
            self.size += kept.size
            most = len(self._kept) if self.max_count is None else self.max_count
            while self.size > self.max_size or len(self._kept) > most:
                _, oldest = self._kept.popitem(last=False)
                self.size -= oldest.size

    def drop(self, key: Hashable, *, stale: bool = False) -> None:
        """Let go of a key; `stale`: what was just found there was no hit."""
        with self._gate:
            before = self._kept.pop(key, None)
            self.size -= 0 if before is None else before.size
            self.hits -= stale
            self.misses += stale

    def drop_all(self, which: Callable[[Kept], bool] = lambda _: True) -> int:
        """Let go of all that a function says yes to; return how many."""
        with self._gate:
            gone = [key for key, kept in self._kept.items() if which(kept)]
            self.size -= sum(self._kept.pop(key).size for key in gone)
            return len(gone)


def _empty(max_size: float, max_count: int | None) -> Memory:
    return Memory(max_size, max_count=max_count)


def frozen(value: Any) -> tuple[Any, Copy | None, int]:  # noqa: ANN401, PLR0911
    """Return a copy of a value, what makes further copies of that, and about how large it is.

    What is no value of artifacts is copied by `copy.deepcopy`, and what that raises is passed on.
    """
    cls = type(value)
    if cls in _SCALARS:
        return value, None, sys.getsizeof(value)
    if cls is dict:
        return _frozen_dict(value)
    if cls in _CONTAINERS:
        return _frozen_items(value)
    if cls is np.ndarray and not value.dtype.hasobject:
        made = value.copy()
        made.flags.writeable = False
        return made, np.ndarray.copy, int(made.nbytes)
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and cls is torch.Tensor and value.layout is torch.strided
    name = torch_name(value.dtype) if is_tensor else None
    if torch is not None and name is not None:
        clone = torch.Tensor.clone if name in TORCH else _clone_bits
        return clone(value.detach()), clone, int(value.nbytes)
    if issubclass(cls, np.generic) and cls is not np.void:  # its fields can be set
        return value, None, sys.getsizeof(value)
    return copy.deepcopy(value), copy.deepcopy, sys.getsizeof(value)


def _clone_bits(tensor: Any) -> Any:  # noqa: ANN401
    """Return a copy of a tensor of a dtype with which torch itself can do little."""
    carrier = torch_carrier(str(tensor.dtype).removeprefix("torch."))
    return tensor.view(carrier).clone().view(tensor.dtype)


def _frozen_dict(value: dict[Any, Any]) -> tuple[Any, Copy, int]:
    made, size = {}, sys.getsizeof(value)
    if not _SCALARS.issuperset(map(type, value)) and any(frozen(key)[1] for key in value):
        return copy.deepcopy(value), copy.deepcopy, size  # keys of the caller's own making
    changeable: list[tuple[Hashable, Copy]] = []
    for key, item in value.items():
        made[key], copied, more = frozen(item)
        size += more + sys.getsizeof(key)
        if copied is not None:
            changeable.append((key, copied))
    if not changeable:
        return made, dict.copy, size

    def copy_dict(kept: dict[Any, Any]) -> dict[Any, Any]:
        new = kept.copy()
        for key, copied in changeable:
            new[key] = copied(kept[key])
        return new

    return made, copy_dict, size


def _frozen_items(value: Any) -> tuple[Any, Copy | None, int]:  # noqa: ANN401
    cls = type(value)
    size = sys.getsizeof(value)
    if cls is bytearray or _SCALARS.issuperset(map(type, value)):
        if cls is not bytearray:
            size += sum(map(sys.getsizeof, value))
        return cls(value), _COPIES.get(cls), size
    parts = [frozen(item) for item in value]
    copies = [copied for _, copied, _ in parts]
    size += sum(more for _, _, more in parts)
    made = cls([each for each, _, _ in parts])
    if not any(copies):
        return made, _COPIES.get(cls), size
    if cls in (set, frozenset):  # in which order they come is not known
        return made, copy.deepcopy, size

    def copy_items(kept: Any) -> Any:  # noqa: ANN401
        return cls([
            each if copied is None else copied(each)
            for each, copied in zip(kept, copies, strict=True)
        ])  # fmt: skip

    return made, copy_items, size


def locked(value: Any) -> Any:  # noqa: ANN401
    """Return a value with read-only views of its arrays, which are locked; the rest is a copy."""
    cls = type(value)
    if cls is np.ndarray and not value.dtype.hasobject:
        value.flags.writeable = False  # first: else whoever has the view could unlock it
        return value.view()
    if cls is dict:
        return {key: locked(item) for key, item in value.items()}
    if cls in (list, tuple):
        return cls([locked(item) for item in value])
    made, copied, _ = frozen(value)
    return made if copied is None else copied(made)


def _begin_in_child() -> None:
    for memory in list(_all):  # another thread may have been in the middle of something
        memory.begin_again()


os.register_at_fork(after_in_child=_begin_in_child)
