"""Layouts: the structure of a value, without its values, and how a value is read back.

A layout is a version byte and one node. A node is a tag, what the tag needs (a count, a name, a
dtype and shape) and the nodes inside it. Values of one kind share one layout, which is kept once
and compiled once, into closures; what differs from value to value is in the inline bytes:

    fixed part      one struct: every number, small tensor and numpy scalar in the order of the
                    layout, then the size of every section
    sections        one after the other: texts, bytes, large integers, runs of numbers and texts

A list, tuple or set of nothing but small integers, floats, bools or texts is a run: its length is
in the inline bytes, so lists of any length have one layout. Tensors above INLINE_BYTES are not here
at all: they have slots, numbered in the order of the layout. For every tag there is one function
here, which parses a node and returns its closure; the encoder of the same tag is in `encode`.

A layout from a file is trusted in nothing: parsing takes memory and time in proportion to its
bytes, whatever they say, and decoding reads nothing outside of the inline bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

from smartcache.artifacts.values.tensors import (
    Kind,
    TensorSpec,
    is_numpy_number,
    need_torch,
    numpy_dtype,
    numpy_item_size,
    torch_dtype,
)
from smartcache.errors import ArtifactError, LayoutError, UnknownCodecError

VERSION: Final = b"\x01"
INLINE_BYTES: Final = 1024
"""Tensors up to this size are kept among the inline bytes."""
MAX_DEPTH: Final = 100
"""Containers inside each other; codecs count too."""
LONGEST_NAME: Final = 200
"""Characters of the name of a codec."""

COUNT: Final = struct.Struct("<I")
_KINDS: Final[dict[Kind, bytes]] = {"torch": b"t", "numpy": b"n", "array": b"a"}
_KIND_OF: Final[dict[int, Kind]] = {tag[0]: kind for kind, tag in _KINDS.items()}
_DEVICE: Final = re.compile(r"[a-z]{2,20}(:[0-9]{1,3})?", re.ASCII)

Data = bytes | memoryview
Fixed = tuple[Any, ...]
Starts = list[int]
Opened = tuple[Fixed, Starts, Data]
Fill = Callable[[int], object]
Read = Callable[[Fixed, Starts, Data, Fill], object]
"""Makes a value from the fixed part, the bounds of the sections, the inline bytes and the slots."""

decoders: Final[dict[str, Callable[[Any], object]]] = {}
"""What `register_codec` was given, by name. A file names a codec; what is called is what is here.

Nothing is imported or looked up elsewhere by a name from a file.
"""


class Node(NamedTuple):
    """One value of a layout: reads it, and says what is known before it is read."""

    read: Read
    is_hashable: bool = False
    slot: int | None = None
    """The number of its tensor slot; None for anything else."""
    tensor: TensorSpec | None = None
    """Which tensor it is, also of a small one that has no slot."""
    fields: dict[Hashable, Node] | None = None
    """The items of a dict."""
    place: int | None = None
    """Of a small tensor: where its bytes are in the fixed part."""
    inside: tuple[tuple[Hashable, Node], ...] = ()
    """What can have tensors in it of a list, tuple or codec; by index, or None for a codec."""

    def tensors(self, *steps: Hashable) -> Iterator[tuple[tuple[Hashable, ...], Node]]:
        """Go through all tensors, small ones too, each with the keys and indices that lead there.

        Codecs are passed through: nothing is decoded.
        """
        if self.tensor is not None:
            yield steps, self
        for name, node in (self.fields or {}).items():
            yield from node.tensors(*steps, name)
        for step, node in self.inside:
            yield from node.tensors(*steps, *(() if step is None else (step,)))


class Layout:
    """A parsed layout: decodes the inline bytes of every value that has it."""

    __slots__ = ("_numbers", "_read", "fields", "owners", "root", "struct", "tensor", "tensors")

    def __init__(self, root: Node, cursor: Cursor) -> None:
        """Take what was parsed: use `parse` or `known_layout`."""
        self.root = root
        self._read = root.read
        self._numbers = len(cursor.formats)
        self.fields = root.fields
        """The items of a dict by their keys, in order; None if the value is no dict."""
        self.tensor = root.tensor
        """Which tensor the value is; None for anything else."""
        self.struct = struct.Struct("<" + "".join(cursor.formats) + "Q" * cursor.sections)
        """The fixed part of the inline bytes."""
        self.tensors = tuple(cursor.tensors)
        """What is in each tensor slot."""
        self.owners = tuple(
            steps[0] if root.fields is not None else None
            for steps, node in root.tensors()
            if node.slot is not None
        )
        """Which field of the dict each slot belongs to; None: the value is no dict."""

    @classmethod
    def parse(cls, data: bytes) -> Layout:
        """Return the layout of these bytes; LayoutError if they are malformed in any way."""
        cursor = Cursor(bytes(data))
        if cursor.take(1) != VERSION:
            raise LayoutError("a layout of another version")
        root = _parse(cursor, MAX_DEPTH)
        if cursor.at != len(cursor.data):
            raise LayoutError("bytes behind the end of a layout")
        return cls(root, cursor)

    def decode(self, inline: Data, fill: Fill) -> object:
        """Return the value; `fill(slot)` is asked for the object to put for each tensor slot.

        LayoutError if the inline bytes do not belong to this layout. UnknownCodecError for what
        needs a codec that is not registered. What `fill` raises is passed on.
        """
        fixed, starts, data = self.opened(inline)
        return self._read(fixed, starts, data, fill)

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
        try:
            fixed = layout.unpack_from(inline)
        except struct.error:
            message = f"{len(inline)} inline bytes, but the layout needs {layout.size}"
            raise LayoutError(message) from None
        at = layout.size
        starts = [at]
        for size in fixed[self._numbers :]:
            at += size
            starts.append(at)
        if at != len(inline):
            raise LayoutError(f"{len(inline)} inline bytes, but their sections end at {at}")
        return fixed, starts, inline


@lru_cache(maxsize=4096)
def known_layout(body: bytes) -> Layout:
    """Return the layout of these bytes: one object for all who have the same."""
    return Layout.parse(body)


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

    def dtype(self) -> str:
        """Return the name of a dtype, not looked up yet."""
        return self.take(self.take(1)[0]).decode("latin-1")

    def number(self, fmt: str) -> int:
        """Take a place in the fixed part; return which."""
        self.formats.append(fmt)
        return len(self.formats) - 1

    def section(self) -> int:
        """Take a section; return which: it is between two of the bounds."""
        self.sections += 1
        return self.sections - 1


def text_bytes(text: str) -> bytes:
    """Return a text as `Cursor.text` reads it."""
    data = text.encode("utf-8", "surrogatepass")
    return COUNT.pack(len(data)) + data


def dtype_bytes(name: str) -> bytes:
    """Return the name of a dtype as `Cursor.dtype` reads it."""
    return bytes((len(name),)) + name.encode("ascii")


def tensor_bytes(spec: TensorSpec) -> bytes:
    """Return the node of a tensor."""
    shape = spec.shape
    lengths = struct.pack(f"<B{len(shape)}Q", len(shape), *shape)
    return b"t" + _KINDS[spec.kind] + dtype_bytes(spec.dtype) + lengths


def _parse(cursor: Cursor, depth: int) -> Node:
    """Return the next node, with `depth` containers allowed from here on."""
    tag = cursor.take(1)[0]
    scalar = _SCALARS.get(tag)
    if scalar is not None:
        return scalar(cursor)
    container = _CONTAINERS.get(tag)
    if container is None:
        raise LayoutError(f"a layout with an unknown tag: {tag:#04x}")
    if not depth:
        raise LayoutError(f"a layout nested more than {MAX_DEPTH} deep")
    return container(cursor, depth - 1)


def _nothing(_cursor: Cursor) -> Node:
    return Node(lambda _fixed, _starts, _data, _fill: None, is_hashable=True)


def _number(letter: str) -> Callable[[Cursor], Node]:
    def parse(cursor: Cursor) -> Node:
        place = cursor.number(letter)
        return Node(lambda fixed, _starts, _data, _fill: fixed[place], is_hashable=True)

    return parse


def _complex(cursor: Cursor) -> Node:
    real, imag = cursor.number("d"), cursor.number("d")
    return Node(
        lambda fixed, _starts, _data, _fill: complex(fixed[real], fixed[imag]), is_hashable=True
    )


def _section(
    make: Callable[[Data], object], *, is_hashable: bool = True
) -> Callable[[Cursor], Node]:
    def parse(cursor: Cursor) -> Node:
        section = cursor.section()

        def read(_fixed: Fixed, starts: Starts, data: Data, _fill: Fill) -> object:
            return make(data[starts[section] : starts[section + 1]])

        return Node(read, is_hashable=is_hashable)

    return parse


def _text_of(data: Data) -> str:
    try:
        return str(data, "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise LayoutError("inline bytes that are no text") from None


def _numpy_text(data: Data) -> object:
    import numpy as np

    return np.str_(_text_of(data))


def _numpy_bytes(data: Data) -> object:
    import numpy as np

    return np.bytes_(bytes(data))


def _device_of(data: Data) -> object:
    text = _text_of(data)
    if _DEVICE.fullmatch(text):
        try:
            return need_torch().device(text)
        except RuntimeError:
            pass  # a kind of device that this torch does not know
    raise LayoutError(f"no device of torch: {text[:80]!r}")


def _tensor(cursor: Cursor) -> Node:
    kind = _KIND_OF.get(cursor.take(1)[0])
    if kind is None:
        raise LayoutError("a tensor of unknown kind")
    dtype = cursor.dtype()
    dimensions = cursor.take(1)[0]
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    spec = TensorSpec.of(kind, dtype, shape)
    if spec.nbytes > INLINE_BYTES:
        slot = len(cursor.tensors)
        cursor.tensors.append(spec)
        return Node(lambda _fixed, _starts, _data, fill: fill(slot), slot=slot, tensor=spec)
    place = cursor.number(f"{spec.nbytes}s")
    make = spec.from_bytes
    return Node(lambda fixed, _starts, _data, _fill: make(fixed[place]), tensor=spec, place=place)


def _numpy_scalar(cursor: Cursor) -> Node:
    name = cursor.dtype()
    size = numpy_item_size(name)
    if size is None or not is_numpy_number(name):
        raise LayoutError(f"no dtype of a numpy scalar: {name[:80]!r}")
    place = cursor.number(f"{size}s")

    def read(fixed: Fixed, _starts: Starts, _data: Data, _fill: Fill) -> object:
        import numpy as np

        return np.frombuffer(fixed[place], numpy_dtype(name))[0]

    return Node(read, is_hashable=True)


@lru_cache(maxsize=1024)
def run_struct(letter: str, size: int) -> struct.Struct:
    """Return the struct of a run of numbers that takes `size` bytes."""
    count, rest = divmod(size, struct.calcsize(f"<{letter}"))
    if rest:
        raise LayoutError("a run that ends within a number")
    return struct.Struct(f"<{count}{letter}")


def _run(cursor: Cursor) -> Node:
    container, element = cursor.take(2)
    collect = _COLLECTORS.get(container)
    if collect is None or (element not in b"i" and container == _SIZE):
        raise LayoutError(f"a run in an unknown container: {container:#04x}")
    is_hashable = container in b"(>Z"
    section = cursor.section()
    letter = _RUN_LETTERS.get(element)
    if letter is not None:

        def read_numbers(_fixed: Fixed, starts: Starts, data: Data, _fill: Fill) -> object:
            start = starts[section]
            numbers = run_struct(letter, starts[section + 1] - start)
            return collect(numbers.unpack_from(data, start))

        return Node(read_numbers, is_hashable=is_hashable)
    if element not in b"s":
        raise LayoutError(f"a run of unknown elements: {element:#04x}")
    cursor.section()  # the lengths, then all texts in one piece

    def read_texts(_fixed: Fixed, starts: Starts, data: Data, _fill: Fill) -> object:
        start, end, last = starts[section : section + 3]
        joined = _text_of(data[end:last])
        at, found = 0, []
        for length in run_struct("I", end - start).unpack_from(data, start):
            found.append(joined[at : at + length])
            at += length
        if at != len(joined):
            raise LayoutError("a run of texts whose lengths are not those of the texts")
        return collect(tuple(found))

    return Node(read_texts, is_hashable=is_hashable)


def _distinct(
    make: Callable[[tuple[Any, ...]], set[Any] | frozenset[Any]],
) -> Callable[[tuple[Any, ...]], object]:
    def collect(items: tuple[Any, ...]) -> object:
        try:
            made = make(items)
        except (TypeError, ValueError):  # numpy does not hash a timedelta64 without a unit
            raise LayoutError("a set of something that no set can hold") from None
        if len(made) != len(items):
            raise LayoutError("a set that has an item twice")
        return made

    return collect


def _sequence(container: int) -> Callable[[Cursor, int], Node]:
    collect = _COLLECTORS[container]

    def parse(cursor: Cursor, depth: int) -> Node:
        nodes = [_parse(cursor, depth) for _ in range(cursor.count())]
        all_hashable = all(node.is_hashable for node in nodes)
        if container in b"<>" and not all_hashable:
            raise LayoutError("a set of something that no set can hold")
        reads = tuple(node.read for node in nodes)

        def read_list(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
            return [read(fixed, starts, data, fill) for read in reads]

        def read_others(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
            return collect(tuple([read(fixed, starts, data, fill) for read in reads]))

        chosen = read_list if container == _LIST else read_others
        return Node(
            chosen, is_hashable=container in b"(>" and all_hashable,
            inside=tuple(
                (index, node)
                for index, node in enumerate(nodes)
                if node.tensor is not None or node.fields or node.inside
            ),
        )  # fmt: skip

    return parse


def _dict(cursor: Cursor, depth: int) -> Node:
    count = cursor.count()
    fields: dict[Hashable, Node] = {}
    for _ in range(count):
        name = _key(cursor, depth)
        node = _parse(cursor, depth)
        try:
            fields[name] = node
        except (TypeError, ValueError):  # numpy does not hash a timedelta64 without a unit
            raise LayoutError("a layout with a key that no dict can hold") from None
    if len(fields) != count:
        raise LayoutError("a dict that has a key twice")
    items = tuple((name, node.read) for name, node in fields.items())

    def read(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
        found: dict[Hashable, object] = {}
        for name, read_item in items:  # quicker than a comprehension, which is a call of its own
            found[name] = read_item(fixed, starts, data, fill)
        return found

    return Node(read, fields=fields)


def _key(cursor: Cursor, depth: int) -> Hashable:
    """Return the key of an item: a text, or any other scalar with its own inline bytes."""
    tag = cursor.take(1)
    if tag == b"s":
        return cursor.text()
    if tag != b"k":
        raise LayoutError(f"a layout with a key of unknown kind: {tag!r}")
    inner = Cursor(cursor.data, cursor.at)
    node = _parse(inner, depth)
    if not node.is_hashable:
        raise LayoutError("a layout with a key that no dict can hold")
    cursor.at = inner.at
    inline = cursor.take(cursor.count())
    key: Hashable = Layout(node, inner).decode(inline, no_tensor)
    return key


def no_tensor(_slot: int) -> NoReturn:
    """Fill no slot: for what has none."""
    raise LayoutError("a tensor where none can be")


def _codec(cursor: Cursor, depth: int) -> Node:
    name = cursor.text()
    if not 0 < len(name) <= LONGEST_NAME:
        raise LayoutError("a layout with a codec without a name")
    node = _parse(cursor, depth)
    inside = node.read

    def read(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
        decode = decoders.get(name)
        if decode is None:
            message = f"the artifact needs the codec {name!r}, which is not registered here"
            raise UnknownCodecError(message, name=name)
        plain = inside(fixed, starts, data, fill)
        try:
            return decode(plain)
        except Exception as error:
            raise LayoutError(f"the codec {name!r} cannot read what is stored: {error}") from error

    return Node(read, inside=((None, node),))


_LIST: Final = ord("[")
_SIZE: Final = ord("Z")
_RUN_LETTERS: Final = {ord("i"): "q", ord("d"): "d", ord("?"): "?"}
_COLLECTORS: Final[dict[int, Callable[[tuple[Any, ...]], object]]] = {
    _LIST: list,
    ord("("): lambda items: items,
    ord("<"): _distinct(set),
    ord(">"): _distinct(frozenset),
    _SIZE: lambda items: need_torch().Size(items),
}
_SCALARS: Final[dict[int, Callable[[Cursor], Node]]] = {
    ord("-"): _nothing,
    ord("?"): _number("?"),
    ord("i"): _number("q"),
    ord("d"): _number("d"),
    ord("c"): _complex,
    ord("I"): _section(lambda data: int.from_bytes(data, "little", signed=True)),
    ord("s"): _section(_text_of),
    ord("y"): _section(bytes),
    ord("Y"): _section(bytearray, is_hashable=False),
    ord("U"): _section(_numpy_text),
    ord("S"): _section(_numpy_bytes),
    ord("D"): _section(lambda data: torch_dtype(_text_of(data))),
    ord("V"): _section(_device_of),
    ord("t"): _tensor,
    ord("u"): _numpy_scalar,
    ord("r"): _run,
}
_CONTAINERS: Final[dict[int, Callable[[Cursor, int], Node]]] = {
    ord("{"): _dict,
    **{tag: _sequence(tag) for tag in b"[(<>"},
    ord("C"): _codec,
}
