"""Where an artifact lies, as this process remembers it.

What is remembered is bounded in number. An artifact is verified when it is first read; as long as
it is remembered, that is not done again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from smartcache.artifacts.codec import Layout
from smartcache.artifacts.packs import OpenPack
from smartcache.artifacts.records import HEADER_BYTES, layout_digest, place, room

if TYPE_CHECKING:
    import numpy as np

_MOST = 65_536
_NO_SPAN = (0, 0, 0)


@lru_cache(maxsize=4096)
def known_layout(body: bytes) -> tuple[bytes, Layout]:
    """Return the digest of a layout, and the layout: one object for all who have the same."""
    return layout_digest(body), Layout.parse(body)


class Quick(NamedTuple):
    """What is needed to read a verified artifact again."""

    pack: OpenPack
    offset: int
    """Of the payload of its record."""
    inline: int
    """Where in the payload the inline bytes begin."""
    views: list[np.ndarray[Any, Any] | None]
    """Its tensors where they lie, in mappings of the packs; None: not mapped yet."""
    packs: tuple[OpenPack, ...]
    """All that it lies in."""
    values: dict[Hashable, object] | None
    """Its small values, if they are few and plain: see `plain_values`."""


_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None)})


def plain_values(value: object, tensors: Collection[Hashable]) -> dict[Hashable, object] | None:
    """Return the fields of a dict that are no tensors, if each is plain or a list of plain values.

    Such a list is copied for everybody who asks, and what is in it needs no copy.
    """
    if type(value) is not dict:
        return None
    found = {name: each for name, each in value.items() if name not in tensors}
    for each in found.values():
        kind = type(each)
        is_plain = kind in _PLAIN or (kind is list and all(type(part) in _PLAIN for part in each))
        if not is_plain:
            return None
    return found


class Located:
    """One artifact: its record, its layout, and where its chunks are."""

    __slots__ = (
        "_span",
        "digest",
        "expires_at",
        "is_verified",
        "key",
        "layout",
        "length",
        "place",
        "places",
        "quick",
        "seq",
        "uids",
        "used_at",
        "version",
    )

    def __init__(
        self,
        key: bytes,
        seq: int,
        where: int,
        length: int,
        digest: bytes,
        layout: Layout,
        uids: tuple[int, ...],
    ) -> None:
        self.key = key
        self.seq = seq
        self.place = where
        self.length = length
        self.digest = digest
        self.layout = layout
        self.uids = uids
        self.places: Sequence[int] = uids
        """Where the chunks are: where they were born, unless compaction has moved them."""
        self.used_at = 0
        self.expires_at = 0
        self.version = -1
        """Of the index, when this was found to be true."""
        self.is_verified = False
        self.quick: Quick | None = None
        self._span: tuple[int, int, int] | None = None

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return pack, offset and length of everything that is read for it."""
        span = self.span()
        if span is not None:
            return [span]
        pack, offset = place(self.place)
        found = [(pack, offset, HEADER_BYTES + self.length)]
        for spec, number in zip(self.layout.tensors, self.places, strict=True):
            pack, offset = place(number)
            found.append((pack, offset, HEADER_BYTES + spec.nbytes))
        return found

    def span(self) -> tuple[int, int, int] | None:
        """Return pack, offset and length of all of it; None if it does not lie in one piece.

        Most do: the chunks one after the other, and the record right behind them.
        """
        if self._span is None:
            expected = self.place
            for spec, number in zip(self.layout.tensors[::-1], self.places[::-1], strict=True):
                expected -= room(spec.nbytes) >> 6
                if number != expected:
                    self._span = _NO_SPAN
                    return None
            pack, offset = place(expected)
            end = place(self.place)[1] + HEADER_BYTES + self.length
            self._span = pack, offset, end - offset
        return None if self._span is _NO_SPAN else self._span

    def moved_to(self, places: tuple[int, ...]) -> Located:
        """Return it with its chunks at other places."""
        moved = copy(self)
        moved.places, moved.quick, moved._span = places, None, None  # noqa: SLF001 - its own
        return moved


class Memory:
    """The artifacts that were looked up last. For any number of threads.

    A plain dict, of which a list is made in one step; going through an OrderedDict is not safe.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, Located] = {}
        self.get = self._found.get

    def add(self, found: Located) -> None:
        """Remember an artifact; when there are too many, an eighth is forgotten, the oldest."""
        self._found[found.key] = found
        if len(self._found) > _MOST:
            for key in list(self._found)[: _MOST >> 3]:
                self._found.pop(key, None)

    def forget(self, key: bytes) -> None:
        """Forget an artifact."""
        self._found.pop(key, None)

    def let_go(self) -> None:
        """Let go of all packs: some of them were compacted away and still take their room."""
        for found in list(self._found.values()):
            found.quick = None

    def clear(self) -> None:
        """Forget all of them."""
        self._found.clear()
