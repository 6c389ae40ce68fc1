"""How each kind of node is parsed and read: for every tag one function, which returns a closure.

The encoder of the same tag is in `codec`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Final

from smartcache.artifacts.dtypes import (
    is_numpy_number,
    need_torch,
    numpy_dtype,
    numpy_item_size,
    torch_dtype,
)
from smartcache.artifacts.layouts import INLINE_BYTES, MAX_DEPTH, Cursor, Data, Fill, Node, Read
from smartcache.artifacts.layouts import Layout as _Layout
from smartcache.artifacts.registered import codec_of_name
from smartcache.errors import LayoutError

_DEVICE: Final = re.compile(r"[a-z]{2,20}(:[0-9]{1,3})?", re.ASCII)
Fixed = tuple[Any, ...]
Starts = list[int]
Collect = Callable[[tuple[Any, ...]], object]
ParseScalar = Callable[[Cursor], Node]
Parse = Callable[[Cursor, int], Node]


def parse_root(cursor: Cursor) -> tuple[Node, dict[Hashable, Node] | None]:
    """Return the outermost node, and its items if it is a dict."""
    if cursor.data[cursor.at : cursor.at + 1] != b"{":
        return parse_node(cursor, MAX_DEPTH), None
    cursor.at += 1
    fields = _items(cursor, MAX_DEPTH)
    return _dict_node(fields), fields


def parse_node(cursor: Cursor, depth: int) -> Node:
    """Return the next node, with `depth` containers allowed from here on."""
    tag = cursor.take(1)[0]
    scalar = _SCALARS.get(tag)
    if scalar is not None:
        return scalar(cursor)
    parse = _CONTAINERS.get(tag)
    if parse is None:
        raise LayoutError(f"a layout with an unknown tag: {tag:#04x}")
    if not depth:
        raise LayoutError(f"a layout nested more than {MAX_DEPTH} deep")
    return parse(cursor, depth - 1)


@lru_cache(maxsize=1024)
def run_struct(letter: str, count: int) -> struct.Struct:
    """Return the struct of a run of `count` numbers."""
    return struct.Struct(f"<{count}{letter}")


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


def _section(make: Callable[[Data], object], *, is_hashable: bool = True) -> ParseScalar:
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


def _integer_of(data: Data) -> int:
    return int.from_bytes(data, "little", signed=True)


def _numpy_text(data: Data) -> object:
    import numpy as np

    return np.str_(_text_of(data))


def _numpy_bytes(data: Data) -> object:
    import numpy as np

    return np.bytes_(bytes(data))


def _dtype_of(data: Data) -> object:
    return torch_dtype(_text_of(data))


def _device_of(data: Data) -> object:
    text = _text_of(data)
    if _DEVICE.fullmatch(text):
        try:
            return need_torch().device(text)
        except RuntimeError:
            pass  # a kind of device that this torch does not know
    raise LayoutError(f"no device of torch: {text[:80]!r}")


def _tensor(cursor: Cursor) -> Node:
    spec = cursor.spec()
    if spec.nbytes > INLINE_BYTES:
        slot = len(cursor.tensors)
        cursor.tensors.append(spec)
        return Node(lambda _fixed, _starts, _data, fill: fill(slot), slot=slot, tensor=spec)
    place = cursor.number(f"{spec.nbytes}s")
    make = spec.from_bytes
    return Node(lambda fixed, _starts, _data, _fill: make(fixed[place]), tensor=spec)


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


def _run(cursor: Cursor) -> Node:
    container, element = cursor.take(2)
    collect = _COLLECTORS.get(container)
    if collect is None or (element not in b"i" and container == _SIZE):
        raise LayoutError(f"a run in an unknown container: {container:#04x}")
    is_hashable = container in b"(>Z"
    if element in b"s":
        return Node(_text_run(collect, cursor), is_hashable=is_hashable)
    letter = _RUN_LETTERS.get(element)
    if letter is None:
        raise LayoutError(f"a run of unknown elements: {element:#04x}")
    return Node(_number_run(collect, letter, cursor), is_hashable=is_hashable)


def _number_run(collect: Collect, letter: str, cursor: Cursor) -> Read:
    section, size = cursor.section(), struct.calcsize(f"<{letter}")

    def read(_fixed: Fixed, starts: Starts, data: Data, _fill: Fill) -> object:
        start = starts[section]
        count, rest = divmod(starts[section + 1] - start, size)
        if rest:
            raise LayoutError("a run that ends within a number")
        return collect(run_struct(letter, count).unpack_from(data, start))

    return read


def _text_run(collect: Collect, cursor: Cursor) -> Read:
    lengths, texts = cursor.section(), cursor.section()

    def read(_fixed: Fixed, starts: Starts, data: Data, _fill: Fill) -> object:
        start, end = starts[lengths], starts[texts]
        count, rest = divmod(end - start, 4)
        if rest:
            raise LayoutError("a run that ends within a number")
        joined = _text_of(data[end : starts[texts + 1]])
        at, found = 0, []
        for length in run_struct("I", count).unpack_from(data, start):
            found.append(joined[at : at + length])
            at += length
        if at != len(joined):
            raise LayoutError("a run of texts whose lengths are not those of the texts")
        return collect(tuple(found))

    return read


def _distinct(make: Callable[[tuple[Any, ...]], set[Any] | frozenset[Any]]) -> Collect:
    def collect(items: tuple[Any, ...]) -> object:
        try:
            made = make(items)
        except (TypeError, ValueError):  # numpy does not hash a timedelta64 without a unit
            raise LayoutError("a set of something that no set can hold") from None
        if len(made) != len(items):
            raise LayoutError("a set that has an item twice")
        return made

    return collect


def _torch_size(items: tuple[Any, ...]) -> object:
    return need_torch().Size(items)


def _sequence(container: int) -> Parse:
    collect = _COLLECTORS[container]
    is_set = container in b"<>"

    def parse(cursor: Cursor, depth: int) -> Node:
        nodes = [parse_node(cursor, depth) for _ in range(cursor.count())]
        all_hashable = all(node.is_hashable for node in nodes)
        if is_set and not all_hashable:
            raise LayoutError("a set of something that no set can hold")
        reads = tuple(node.read for node in nodes)

        def read_list(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
            return [read(fixed, starts, data, fill) for read in reads]

        def read_others(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
            return collect(tuple([read(fixed, starts, data, fill) for read in reads]))

        chosen = read_list if container == _LIST else read_others
        return Node(chosen, is_hashable=container in b"(>" and all_hashable)

    return parse


def _dict(cursor: Cursor, depth: int) -> Node:
    return _dict_node(_items(cursor, depth + 1))


def _dict_node(fields: dict[Hashable, Node]) -> Node:
    items = tuple((name, node.read) for name, node in fields.items())

    def read_dict(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
        return {name: read(fixed, starts, data, fill) for name, read in items}

    return Node(read_dict)


def _items(cursor: Cursor, depth: int) -> dict[Hashable, Node]:
    count = cursor.count()
    found: dict[Hashable, Node] = {}
    for _ in range(count):
        name = _key(cursor, depth - 1)
        node = parse_node(cursor, depth - 1)
        try:
            found[name] = node
        except (TypeError, ValueError):  # numpy does not hash a timedelta64 without a unit
            raise LayoutError("a layout with a key that no dict can hold") from None
    if len(found) != count:
        raise LayoutError("a dict that has a key twice")
    return found


def _key(cursor: Cursor, depth: int) -> Hashable:
    """Return the key of an item: a text, or any other scalar with its own inline bytes."""
    tag = cursor.take(1)
    if tag == b"s":
        return cursor.text()
    if tag != b"k":
        raise LayoutError(f"a layout with a key of unknown kind: {tag!r}")
    inner = Cursor(cursor.data, cursor.at)
    node = parse_node(inner, depth)
    if not node.is_hashable:
        raise LayoutError("a layout with a key that no dict can hold")
    cursor.at = inner.at
    inline = cursor.take(cursor.count())
    key: Hashable = _Layout(node, None, inner).decode(inline, _no_slot)
    return key


def _no_slot(_slot: int) -> object:
    raise LayoutError("a tensor where none can be")


def _codec(cursor: Cursor, depth: int) -> Node:
    name = cursor.name()
    inside = parse_node(cursor, depth).read

    def read_codec(fixed: Fixed, starts: Starts, data: Data, fill: Fill) -> object:
        decode = codec_of_name(name).decode
        plain = inside(fixed, starts, data, fill)
        try:
            return decode(plain)
        except Exception as error:
            raise LayoutError(f"the codec {name!r} cannot read what is stored: {error}") from error

    return Node(read_codec)


_LIST: Final = ord("[")
_SIZE: Final = ord("Z")
_RUN_LETTERS: Final = {ord("i"): "q", ord("d"): "d", ord("?"): "?"}
_COLLECTORS: Final[dict[int, Collect]] = {
    _LIST: list,
    ord("("): lambda items: items,
    ord("<"): _distinct(set),
    ord(">"): _distinct(frozenset),
    _SIZE: _torch_size,
}
_SCALARS: Final[dict[int, ParseScalar]] = {
    ord("-"): _nothing,
    ord("?"): _number("?"),
    ord("i"): _number("q"),
    ord("d"): _number("d"),
    ord("c"): _complex,
    ord("I"): _section(_integer_of),
    ord("s"): _section(_text_of),
    ord("y"): _section(bytes),
    ord("Y"): _section(bytearray, is_hashable=False),
    ord("U"): _section(_numpy_text),
    ord("S"): _section(_numpy_bytes),
    ord("D"): _section(_dtype_of),
    ord("V"): _section(_device_of),
    ord("t"): _tensor,
    ord("u"): _numpy_scalar,
    ord("r"): _run,
}
_CONTAINERS: Final[dict[int, Parse]] = {
    ord("{"): _dict,
    **{tag: _sequence(tag) for tag in b"[(<>"},
    ord("C"): _codec,
}
