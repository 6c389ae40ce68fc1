"""Layouts: the structure of a value, without its values.

A layout is a version byte and one node. A node is a tag, what the tag needs (a count, a name, a
dtype and shape) and the nodes inside it. Values of one kind share one layout, which is kept once
and compiled once, into closures; what differs from value to value is in the inline bytes:

    fixed part      one struct: every number, small tensor and numpy scalar in the order of the
                    layout, then the size of every section
    sections        one after the other: texts, bytes, large integers, runs of numbers and texts

A list, tuple or set of nothing but small integers, floats, bools or texts is a run: its length is
in the inline bytes, so lists of any length have one layout. Tensors above INLINE_BYTES are not here
at all: they have slots, numbered in the order of the layout.

A layout from a file is trusted in nothing: parsing takes memory and time in proportion to its
bytes, whatever they say, and decoding reads nothing outside of the inline bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from smartcache.artifacts.registered import LONGEST_NAME
from smartcache.artifacts.tensors import Kind, TensorSpec
from smartcache.errors import ArtifactError, LayoutError

VERSION: Final = b"\x01"
INLINE_BYTES: Final = 1024
"""Tensors up to this size are kept among the inline bytes."""
MAX_DEPTH: Final = 100
"""Containers inside each other; codecs count too."""

COUNT: Final = struct.Struct("<I")
KINDS: Final[dict[Kind, bytes]] = {"torch": b"t", "numpy": b"n", "array": b"a"}
_KIND_OF: Final[dict[int, Kind]] = {tag[0]: kind for kind, tag in KINDS.items()}

Data = bytes | memoryview
Fill = Callable[[int], object]
Opened = tuple[tuple[Any, ...], list[int], Data]
Read = Callable[[tuple[Any, ...], list[int], Data, Fill], object]
"""Makes a value from the fixed part, the bounds of the sections, the inline bytes and the slots."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a layout. `slot` is the number of its tensor slot, None for anything else.

    `tensor` is there for every tensor, also for a small one that has no slot.
    """

    read: Read
    is_hashable: bool = False
    slot: int | None = None
    tensor: TensorSpec | None = None


class Layout:
    """A parsed layout: decodes the inline bytes of every value that has it."""

    __slots__ = ("_numbers", "_root", "fields", "struct", "tensors")

    def __init__(self, root: Node, fields: dict[Hashable, Node] | None, cursor: Cursor) -> None:
        self._root = root
        self._numbers = len(cursor.formats)
        self.fields = fields
        """The items of a dict by their keys, in order; None if the value is no dict."""
        self.struct = struct.Struct("<" + "".join(cursor.formats) + "Q" * cursor.sections)
        """The fixed part of the inline bytes."""
        self.tensors = tuple(cursor.tensors)
        """What is in each tensor slot."""

    @classmethod
    def parse(cls, data: bytes) -> Layout:
        """Return the layout of these bytes; LayoutError if they are malformed in any way."""
        from smartcache.artifacts.parsing import parse_root

        cursor = Cursor(bytes(data))
        if cursor.take(1) != VERSION:
            raise LayoutError("a layout of another version")
        root, fields = parse_root(cursor)
        if cursor.at != len(cursor.data):
            raise LayoutError("bytes behind the end of a layout")
        return cls(root, fields, cursor)

    def names(self) -> tuple[Hashable, ...]:
        """Return the keys of a dict in their order; none for any other value."""
        return tuple(self.fields or ())

    def decode(self, inline: Data, fill: Fill) -> object:
        """Return the value; `fill(slot)` is asked for the object to put for each tensor slot.

        LayoutError if the inline bytes do not belong to this layout. UnknownCodecError for what
        needs a codec that is not registered. What `fill` raises is passed on.
        """
        return self._root.read(*self.opened(inline), fill)

    def decode_field(self, inline: Data, name: Hashable, fill: Fill) -> object:
        """Return one item of a dict, and decode nothing else; KeyError if there is none."""
        if self.fields is None:
            raise ArtifactError(f"no dict, so it has no item {name!r:.80}")
        node = self.fields[name]
        return node.read(*self.opened(inline), fill)

    def opened(self, inline: Data) -> Opened:
        """Return what nodes read from: `node.read(*opened, fill)`.

        That is the fixed part, where each section begins (the last one ends at the end), and the
        bytes. LayoutError if they do not belong to this layout.
        """
        layout = self.struct
        size = layout.size
        if len(inline) < size:
            raise LayoutError(f"{len(inline)} inline bytes, but the layout needs {size}")
        fixed = layout.unpack_from(inline)
        starts = [*accumulate(fixed[self._numbers :], initial=size)]
        if starts[-1] != len(inline):
            raise LayoutError(f"{len(inline)} inline bytes, but their sections end at {starts[-1]}")
        return fixed, starts, inline


class Cursor:
    """Where a parser is, and what it has found so far."""

    __slots__ = ("at", "data", "formats", "sections", "tensors")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at
        self.formats: list[str] = []
        self.sections = 0
        self.tensors: list[TensorSpec] = []

    def take(self, size: int) -> bytes:
        """Return the next bytes; LayoutError if there are not so many."""
        end = self.at + size
        if end > len(self.data):
            raise LayoutError("a layout that breaks off")
        found = self.data[self.at : end]
        self.at = end
        return found

    def count(self) -> int:
        """Return the next number; LayoutError if it is more than the bytes that are left.

        All that is counted takes one byte at least, so nothing huge is made of a wrong count.
        """
        (number,) = COUNT.unpack(self.take(4))
        if number > len(self.data) - self.at:
            raise LayoutError("a layout with a count beyond its end")
        return int(number)

    def text(self) -> str:
        """Return a text with its length before it."""
        try:
            return str(self.take(self.count()), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise LayoutError("a layout with a name that is not text") from None

    def number(self, fmt: str) -> int:
        """Take a place in the fixed part; return which."""
        self.formats.append(fmt)
        return len(self.formats) - 1

    def section(self) -> int:
        """Take a section; return which: it is between two of the bounds."""
        self.sections += 1
        return self.sections - 1

    def name(self) -> str:
        """Return the name of a codec."""
        name = self.text()
        if not 0 < len(name) <= LONGEST_NAME:
            raise LayoutError("a layout with a codec without a name")
        return name

    def dtype(self) -> str:
        """Return the name of a dtype, not looked up yet."""
        return self.take(self.take(1)[0]).decode("latin-1")

    def spec(self) -> TensorSpec:
        """Return which tensor it is."""
        kind = _KIND_OF.get(self.take(1)[0])
        if kind is None:
            raise LayoutError("a tensor of unknown kind")
        dtype = self.dtype()
        dimensions = self.take(1)[0]
        shape = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        return TensorSpec.of(kind, dtype, shape)


def spec_bytes(spec: TensorSpec) -> bytes:
    """Return a spec as `Cursor.spec` reads it."""
    return b"".join(
        (
            KINDS[spec.kind],
            dtype_bytes(spec.dtype),
            bytes((len(spec.shape),)),
            struct.pack(f"<{len(spec.shape)}Q", *spec.shape),
        )
    )


def dtype_bytes(name: str) -> bytes:
    """Return the name of a dtype as `Cursor.dtype` reads it."""
    return bytes((len(name),)) + name.encode("ascii")


def text_bytes(text: str) -> bytes:
    """Return a text as `Cursor.text` reads it."""
    data = text.encode("utf-8", "surrogatepass")
    return COUNT.pack(len(data)) + data
