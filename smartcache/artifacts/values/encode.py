"""Values as bytes: the structure apart from what is in it, and large tensors apart from both.

`encode` walks a value once, by the exact type of everything in it: a subclass of a supported type
is not supported, because it would come back as something else. Its bytes are described in `layout`
and read back by `Layout`. An object that occurs twice in a value comes back as two equal ones.

Neither torch nor numpy is imported here: a value of theirs proves that it is loaded. Types of other
people have codecs (`register_codec`), which turn an object into plain values and back.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from smartcache.artifacts.values.layout import (
    COUNT,
    INLINE_BYTES,
    LONGEST_NAME,
    MAX_DEPTH,
    VERSION,
    Layout,
    decoders,
    dtype_bytes,
    known_layout,
    no_tensor,
    run_struct,
    tensor_bytes,
    text_bytes,
)
from smartcache.artifacts.values.refusals import CodecStep, RefusedError, explain, why_not
from smartcache.artifacts.values.tensors import (
    Kind,
    TensorSpec,
    array_bytes,
    is_numpy_number,
    numpy_name,
    plain_tensor,
    torch_carrier,
    torch_name,
)
from smartcache.errors import ArtifactError, LayoutError, UnsupportedValueError

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

MOST_NODES: Final = 1_000_000
"""What has more pieces than this has one list in it over and over, or should be an array."""
_CACHED: Final = 4096
"""How many entries each memory of the encoders has before it starts anew."""
_REMEMBERED: Final = 256
"""Nodes of a layout, or items of a run, that are remembered as such."""
_SMALLEST: Final = -(1 << 63)
_LARGEST: Final = (1 << 63) - 1

_codecs: Final[dict[type, tuple[str, Callable[[Any], object]]]] = {}


class _Memory(dict[K, V]):
    """What was made of something when it was first met; it starts anew when it has grown large."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make

    def __missing__(self, key: K) -> V:
        made = self._make(key)
        if len(self) >= _CACHED:
            self.clear()
        self[key] = made
        return made


class Parts:
    """What the encoders write to: the nodes of a layout, and what belongs to them."""

    __slots__ = ("fixed", "nodes", "sections", "tensors")

    def __init__(self) -> None:
        self.nodes: list[bytes] = []
        self.fixed: list[Any] = []
        self.sections: list[bytes] = []
        self.tensors: list[memoryview] = []

    def packed(self) -> tuple[bytes, bytes]:
        """Return the layout and the inline bytes."""
        nodes, sections = tuple(self.nodes), self.sections
        layout, pack = _packers[nodes] if len(nodes) <= _REMEMBERED else _packer(nodes)
        if len(sections) == 1:
            return layout, pack(*self.fixed, len(sections[0])) + sections[0]
        return layout, pack(*self.fixed, *map(len, sections)) + b"".join(sections)


Encode = Callable[[Any, Parts, int], None]
"""Writes a value to the parts; the number says how many containers it may have inside it."""


def encode(value: object) -> tuple[bytes, bytes, list[memoryview]]:
    """Return the layout, the inline bytes and the tensors of a value.

    Equal structures have equal layouts, byte for byte. The bytes of the tensors are those in the
    memory of the value itself where they are in order there: write them before the value changes.
    UnsupportedValueError, with the path to it, if anything in it is of a type that cannot be kept.
    """
    parts = Parts()
    try:
        _encoders[type(value)](value, parts, MAX_DEPTH)
    except RefusedError as refused:
        raise explain(refused, value) from None
    layout, inline = parts.packed()
    return layout, inline, parts.tensors


def encode_metadata(metadata: object) -> bytes:
    """Return metadata as bytes; plain values only, since it is read without the tensors."""
    if metadata is None:
        return b""
    layout, inline, tensors = encode(metadata)
    if tensors:
        message = "Metadata holds a large tensor"
        raise UnsupportedValueError(message, hint="Put tensors into the value.", path="metadata")
    return COUNT.pack(len(layout)) + layout + inline


def decode_metadata(data: bytes | memoryview) -> object:
    """Return what `encode_metadata` was given."""
    if not len(data):
        return None
    if len(data) < COUNT.size:
        raise LayoutError("Metadata is too short")
    end = COUNT.size + COUNT.unpack_from(data)[0]
    layout = Layout.parse(bytes(data[COUNT.size : end]))
    if layout.tensors:
        raise LayoutError("Metadata refers to tensors")
    return layout.decode(data[end:], no_tensor)


def register_codec(
    name: str, cls: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]
) -> None:
    """Keep objects of exactly this type: `encode` gives a supported value, `decode` the object.

    The name goes into files, so a reading program registers the same one. A name or type that is
    registered again has the new functions from then on. Types that come back as they are cannot be
    registered; what would come back as a numpy array can.
    """
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ArtifactError(f"no name for a codec: {name!r:.80}")
    if is_supported(cls):
        raise ArtifactError(f"{cls.__name__} is supported already: it needs no codec")
    for old, (old_name, _) in list(_codecs.items()):
        if old is cls and old_name != name:
            decoders.pop(old_name, None)
        elif old is not cls and old_name == name:
            del _codecs[old]
    decoders[name] = decode
    _codecs[cls] = name, encode


def is_supported(cls: type) -> bool:
    """Say whether values of exactly this type come back as such without a codec."""
    return cls in _encoders or (_library_encoder(cls) is not None and not is_array_like(cls))


def is_array_like(cls: type) -> bool:
    """Say whether a type is none of torch or numpy, but becomes a numpy array by itself.

    A memmap does too: it cannot come back as one. Other subclasses of arrays and tensors mean more
    than their elements (masks, records, gradients), and are not array-likes.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(cls, _torch_classes(torch)):
        return False
    if numpy is not None and issubclass(cls, (numpy.ndarray, numpy.generic)):
        return cls is numpy.memmap
    return hasattr(cls, "__array__") or hasattr(cls, "__dlpack__")


def as_array(value: object) -> Array:
    """Return an array-like as a numpy array; RefusedError if it does not become one."""
    import numpy as np

    try:
        convert: Callable[[Any], Array] = np.asarray
        if not hasattr(type(value), "__array__"):
            convert = np.from_dlpack
        array = convert(value)
    except Exception as error:  # whatever a foreign library raises
        reason = f"a {type(value).__qualname__} that does not become an array: {error}"
        raise RefusedError(reason, hint="Convert it to a numpy array first.") from error
    return array.view(np.ndarray)


def _packer(nodes: tuple[bytes, ...]) -> tuple[bytes, Callable[..., bytes]]:
    """Return the layout of these nodes, and what packs the fixed part of its inline bytes."""
    layout = VERSION + b"".join(nodes)
    return layout, known_layout(layout).struct.pack


class _Encoders(dict[type, Encode]):
    def __missing__(self, cls: type) -> Encode:
        """Return the encoder of a type that was not met before, or that has a codec."""
        if cls in _codecs:
            return _by_codec
        found = _library_encoder(cls)
        if found is None:
            raise why_not(cls)
        if not is_array_like(cls):  # a codec may be registered for it yet
            self[cls] = found
        return found


def _library_encoder(cls: type) -> Encode | None:
    """Return the encoder of a type of torch or numpy, or of one that can become an array."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and cls in _torch_classes(torch):
        return _TORCH[cls.__name__]
    if numpy is not None and issubclass(cls, numpy.generic):
        if cls is numpy.str_:
            return _numpy_text
        return _numpy_bytes if cls is numpy.bytes_ else _numpy_scalar
    if numpy is not None and cls is numpy.ndarray:
        return _numpy
    return _array_like if is_array_like(cls) else None


def _torch_classes(torch: ModuleType) -> tuple[type, ...]:
    """Return the types of torch that are values; none while another thread still imports it."""
    found = (getattr(torch, name, None) for name in _TORCH)
    return tuple(cls for cls in found if cls is not None)


def _none(_value: None, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"-")


def _bool(value: object, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"?")
    parts.fixed.append(value)


def _int(value: int, parts: Parts, _depth: int) -> None:
    if _SMALLEST <= value <= _LARGEST:
        parts.nodes.append(b"i")
        parts.fixed.append(value)
    else:
        parts.nodes.append(b"I")
        parts.sections.append(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _float(value: float, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"d")
    parts.fixed.append(value)


def _complex(value: complex, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"c")
    parts.fixed += (value.real, value.imag)


def _str(value: str, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"s")
    parts.sections.append(value.encode("utf-8", "surrogatepass"))


def _bytes(value: bytes, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"y")
    parts.sections.append(value)


def _bytearray(value: bytearray, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"Y")
    parts.sections.append(bytes(value))


def _dict(value: dict[object, object], parts: Parts, depth: int) -> None:
    nodes = parts.nodes
    if not depth or len(nodes) > MOST_NODES:
        _too_much(depth)
    nodes.append(_heads[len(value)])
    depth -= 1
    key: object = None
    try:
        for key, item in value.items():
            nodes.append(_names[key] if type(key) is str else _key(key, depth))
            _encoders[type(item)](item, parts, depth)
    except RefusedError as refused:
        refused.within(key)
        raise


def _key(key: object, depth: int) -> bytes:
    """Return a key that is no text as it stands in a layout: a node with inline bytes."""
    inner = Parts()
    try:
        _encoders[type(key)](key, inner, depth)
        _check_hashable(inner)
    except RefusedError as refused:
        refused.is_key = True
        raise
    layout, inline = inner.packed()
    return b"k" + layout[len(VERSION) :] + COUNT.pack(len(inline)) + inline


def _check_hashable(parts: Parts) -> None:
    """Refuse what is hashable in its own library, but not by its value."""
    for node in parts.nodes:
        if node[:1] in {b"t", b"C"}:
            what = "a tensor" if node[:1] == b"t" else "an object with a codec"
            raise RefusedError(f"{what} cannot be kept in a set or in a key")


def _sequence(tag: bytes) -> Encode:
    """Return the encoder of lists or tuples: as one run if that can be, else item by item."""

    def encode_sequence(value: list[object], parts: Parts, depth: int) -> None:
        if not depth or len(parts.nodes) > MOST_NODES:
            _too_much(depth)
        if _write_run(tag, value, parts):
            return
        parts.nodes.append(tag + COUNT.pack(len(value)))
        depth -= 1
        index = 0
        try:
            for item in value:
                _encoders[type(item)](item, parts, depth)
                index += 1
        except RefusedError as refused:
            refused.within(index)
            raise

    return encode_sequence


def _set(tag: bytes) -> Encode:
    """Return the encoder of sets: their items sorted by layout, so that equal sets have one."""

    def encode_set(value: set[object], parts: Parts, depth: int) -> None:
        if not depth or len(parts.nodes) > MOST_NODES:
            _too_much(depth)
        if _write_run(tag, value, parts):
            return
        items: list[tuple[bytes, Parts]] = []
        for item in value:
            inner = Parts()
            try:
                _encoders[type(item)](item, inner, depth - 1)
                _check_hashable(inner)
            except RefusedError as refused:
                refused.within(item)
                raise
            items.append((b"".join(inner.nodes), inner))
        items.sort(key=lambda pair: pair[0])
        parts.nodes.append(tag + COUNT.pack(len(items)))
        for nodes, inner in items:
            parts.nodes.append(nodes)
            parts.fixed += inner.fixed
            parts.sections += inner.sections

    return encode_set


def _write_run(tag: bytes, value: Collection[Any], parts: Parts) -> bool:
    """Write the items as one run if all are of one type that has runs; say whether it was so."""
    types = tuple(map(type, value))
    found = _runs[tag, types] if len(types) <= _REMEMBERED else _run((tag, types))
    if found is None:
        return False
    node, pack = found
    try:
        if pack is not None:
            parts.sections.append(pack(*value))
        else:
            lengths = run_struct("I", 4 * len(types)).pack(*map(len, value))
            parts.sections += (lengths, "".join(value).encode("utf-8", "surrogatepass"))
    except struct.error:  # an integer of more than 64 bits
        return False
    parts.nodes.append(node)
    return True


def _run(run: tuple[bytes, tuple[type, ...]]) -> tuple[bytes, Callable[..., bytes] | None] | None:
    """Return the node of a run, and what packs it unless it is one of texts; None: it is none."""
    tag, types = run
    letters = _RUNS.get(types[0]) if len(set(types)) == 1 else None
    if letters is None:
        return None
    element, letter = letters
    pack = run_struct(letter, struct.calcsize(letter) * len(types)).pack if letter else None
    return b"r" + tag + element, pack


def _too_much(depth: int) -> NoReturn:
    if depth:
        raise RefusedError(f"more than {MOST_NODES:,} values in one artifact")
    raise RefusedError(f"nested more than {MAX_DEPTH} deep", too_deep=True)


def _by_codec(value: object, parts: Parts, depth: int) -> None:
    if not depth:
        _too_much(depth)
    name, to_plain = _codecs[type(value)]
    parts.nodes.append(b"C" + text_bytes(name))
    plain = to_plain(value)
    try:
        _encoders[type(plain)](plain, parts, depth - 1)
    except RefusedError as refused:
        refused.within(CodecStep(name, plain))
        raise


def _tensor(value: torch.Tensor, parts: Parts, _depth: int) -> None:
    try:
        node, is_small, carrier = _torch_nodes[value.dtype, value.shape]
        array = value.numpy() if carrier is None else value.view(carrier).numpy()
        data: object = array.tobytes() if is_small else array.data.cast("B")
    except (RuntimeError, TypeError, ValueError, BufferError):
        # A gradient, a lazy conjugate, another device, another order; or not even memory.
        try:
            value = plain_tensor(value)
        except (RuntimeError, TypeError) as error:
            reason = f"{error} cannot be kept" if isinstance(error, TypeError) else str(error)
            raise RefusedError(reason, hint="Put a dense tensor.") from None
        node, is_small, carrier = _torch_nodes[value.dtype, value.shape]
        array = value.numpy() if carrier is None else value.view(carrier).numpy()
        data = array.tobytes() if is_small else array_bytes(array)
    parts.nodes.append(node)
    into: list[Any] = parts.fixed if is_small else parts.tensors
    into.append(data)


def _torch_node(
    which: tuple[torch.dtype, tuple[int, ...]],
) -> tuple[bytes, bool, torch.dtype | None]:
    """Return the node of a tensor, whether it is small, and its carrier."""
    dtype, shape = which
    name = torch_name(dtype)
    if name is None:
        reason = f"a tensor of {dtype} cannot be kept: its scale is not part of its values"
        raise RefusedError(reason, hint="Put tensor.dequantize(), or its int_repr() and scale.")
    return *_node("torch", name, tuple(shape)), torch_carrier(name)


def _numpy(value: Array, parts: Parts, _depth: int) -> None:
    _write_array(value, "numpy", parts)


def _array_like(value: object, parts: Parts, _depth: int) -> None:
    _write_array(as_array(value), "array", parts)


def _write_array(array: Array, kind: Kind, parts: Parts) -> None:
    node, is_small = _numpy_nodes[array.dtype, array.shape, kind]
    parts.nodes.append(node)
    if is_small:
        parts.fixed.append(array.tobytes())
    else:
        parts.tensors.append(array_bytes(array))


def _numpy_node(which: tuple[np.dtype[Any], tuple[int, ...], Kind]) -> tuple[bytes, bool]:
    """Return the node of an array, and whether it is small."""
    dtype, shape, kind = which
    name = numpy_name(dtype)
    if name is None:
        what = "objects" if dtype.hasobject else f"dtype {dtype}"
        raise RefusedError(
            f"an array of {what} cannot be kept", hint="Put a list, or one array for each field."
        )
    return _node(kind, name, shape)


def _node(kind: Kind, name: str, shape: tuple[int, ...]) -> tuple[bytes, bool]:
    try:
        spec = TensorSpec.of(kind, name, shape)
    except LayoutError as error:
        raise RefusedError(str(error)) from None
    return tensor_bytes(spec), spec.nbytes <= INLINE_BYTES


def _numpy_scalar(value: np.generic, parts: Parts, _depth: int) -> None:
    name = numpy_name(value.dtype)
    if name is None or not is_numpy_number(name):
        raise RefusedError(f"a numpy scalar of dtype {value.dtype} cannot be kept")
    parts.nodes.append(b"u" + dtype_bytes(name))
    parts.fixed.append(value.tobytes())


def _numpy_text(value: np.str_, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"U")
    parts.sections.append(str.encode(value, "utf-8", "surrogatepass"))


def _numpy_bytes(value: np.bytes_, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"S")
    parts.sections.append(bytes(value))


def _torch_dtype(value: torch.dtype, parts: Parts, _depth: int) -> None:
    name = torch_name(value)
    if name is None:
        raise RefusedError(f"the dtype {value} cannot be kept")
    parts.nodes.append(b"D")
    parts.sections.append(name.encode())


def _torch_device(value: torch.device, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"V")
    parts.sections.append(str(value).encode())


def _torch_size(value: torch.Size, parts: Parts, _depth: int) -> None:
    parts.nodes.append(b"rZi")
    parts.sections.append(run_struct("q", 8 * len(value)).pack(*value))


# Nodes come from here and are not made anew: bytes that are the same object are hashed only once.
_names: Final = _Memory[str, bytes](lambda name: b"s" + text_bytes(name))
_heads: Final = _Memory[int, bytes](lambda count: b"{" + COUNT.pack(count))
_packers: Final = _Memory(_packer)
_runs: Final = _Memory(_run)
_torch_nodes: Final = _Memory(_torch_node)
_numpy_nodes: Final = _Memory(_numpy_node)
_RUNS: Final = {int: (b"i", "q"), float: (b"d", "d"), bool: (b"?", "?"), str: (b"s", "")}
_TORCH: Final[dict[str, Encode]] = {
    "Tensor": _tensor,
    "dtype": _torch_dtype,
    "device": _torch_device,
    "Size": _torch_size,
}
_encoders: Final = _Encoders(
    {
        type(None): _none,
        bool: _bool,
        int: _int,
        float: _float,
        complex: _complex,
        str: _str,
        bytes: _bytes,
        bytearray: _bytearray,
        dict: _dict,
        list: _sequence(b"["),
        tuple: _sequence(b"("),
        set: _set(b"<"),
        frozenset: _set(b">"),
    }
)
