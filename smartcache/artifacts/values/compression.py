"""Tensors and small values in fewer bytes.

A record says of each of its parts how it is compressed, by a number that never changes its meaning:
so every reader reads every record, whatever it compresses itself. What does not shrink by a tenth
is kept as it is. Each method needs a package, and none is replaced by another without a word.

    none     0
    gzip     1    zlib, level 6
    lz4      2    one block
    zstd     3    one frame, level 1
    blosc2   4    one chunk: bytes shuffled by the size of an element, then zstd, level 1

`auto` chooses by what a tensor is. Float latents are noise, and stay as they are; bfloat16,
integers, and floats that are padded (embeddings of a fixed length) are compressed: with blosc2 from
16 KiB on, below it, and the small values, with zstd.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from smartcache.artifacts.values.layout import known_layout
from smartcache.errors import (
    ConfigError,
    DamagedArtifactError,
    MissingCompressionError,
    install_hint,
)

if TYPE_CHECKING:
    from smartcache.artifacts.values.tensors import Bytes, TensorSpec

    Buffer = bytes | bytearray | memoryview

Stored = bytes | memoryview
Rule = str | Mapping[str, str]
"""How a set compresses: one word, or a word for each field of its dicts and "*" for the rest."""

PLAIN, GZIP, LZ4, ZSTD, BLOSC2 = range(5)
METHODS: Final = {"none": PLAIN, "gzip": GZIP, "lz4": LZ4, "zstd": ZSTD, "blosc2": BLOSC2}
LARGEST: Final = 1 << 30
"""Bytes of the largest part that is compressed; blosc2 takes no more than twice that."""
_SMALLEST: Final = 256
"""Bytes of the smallest part that is compressed."""
_FOR_BLOSC: Final = 16 << 10
_PACKAGES: Final = {LZ4: "lz4.block", ZSTD: "zstandard", BLOSC2: "blosc2"}
_PROBED: Final = 1024
"""Elements of a tensor that are looked at for zeros."""
_SIZE: Final = Struct("<I")
_REST: Final = "*"
_WORDS: Final = (*METHODS, "auto")


def check_rule(rule: object) -> None:
    """Refuse what is not a way to compress a set."""
    words = rule.values() if isinstance(rule, Mapping) else [rule]
    for word in words:
        if word not in _WORDS:
            known = ", ".join(_WORDS)
            hint = f'Choose one of {known}, or one for each field: {{"text": "auto"}}.'
            raise ConfigError(f"compression cannot be {word!r:.80}", hint=hint)
    if isinstance(rule, Mapping) and not all(isinstance(name, str) for name in rule):
        raise ConfigError("compression by field takes the names of fields, which are texts")


def need_packages(rule: Rule) -> None:
    """Refuse a rule whose packages are not installed."""
    for word in set(rule.values() if isinstance(rule, Mapping) else [rule]):
        for method in (ZSTD, BLOSC2) if word == "auto" else (METHODS[word],):
            _package(method)


def compress(
    rule: Rule, layout: bytes, inline: bytes, tensors: Sequence[memoryview]
) -> tuple[bytes, int, list[Stored], list[int]]:
    """Return the inline bytes and the tensors of a value, compressed by a rule, and how each is."""
    description = known_layout(layout)
    specs = description.tensors
    stored: list[Stored] = []
    methods: list[int] = []
    for tensor, spec, owner in zip(tensors, specs, description.owners, strict=True):
        word = _word(rule, owner)
        method = METHODS[word] if word != "auto" else _choose(tensor, spec)
        data, method = _compressed(method, tensor, spec.item_size)
        stored.append(data)
        methods.append(method)
    word = _word(rule, None)
    method = METHODS[word] if word != "auto" else ZSTD
    small, method = _compressed(method, memoryview(inline), 8)
    if method:
        inline = _SIZE.pack(len(inline)) + bytes(small)
    return inline, method, stored, methods


def expand_inline(method: int, stored: Buffer) -> bytes:
    """Return inline bytes that were compressed."""
    view = memoryview(stored)
    if len(view) < _SIZE.size or _SIZE.unpack_from(view)[0] > LARGEST:
        raise DamagedArtifactError("its small values do not fit their form")
    target = bytearray(_SIZE.unpack_from(view)[0])
    expand(method, view[_SIZE.size :], memoryview(target))
    return bytes(target)


def expand(method: int, stored: Buffer, target: memoryview | Bytes) -> None:
    """Fill memory with what was compressed; it must be exactly as long.

    DamagedArtifactError if it is anything else. MissingCompressionError where the package is not
    installed, or a newer smartcache has written it: that is no damage.
    """
    package = _package(method)
    memory = memoryview(target)  # type: ignore[arg-type] # numpy does not say so before 3.12
    size = memory.nbytes
    try:
        if method == BLOSC2:
            # It writes as much as the header says, however much room there is.
            is_right = package.get_cbuffer_sizes(stored)[:2] == (size, len(stored))
            if is_right:
                package.decompress2(stored, dst=memory, nthreads=1)
        elif method == ZSTD:
            with package.ZstdDecompressor().stream_reader(stored) as reader:
                is_right = reader.readinto(memory) == size and not reader.read(1)
        else:
            if method == LZ4:
                data, is_whole = package.decompress(stored, uncompressed_size=size), True
            else:
                reader = zlib.decompressobj()
                data = reader.decompress(stored, size + 1)
                is_whole = reader.eof and not reader.unused_data
            is_right = is_whole and len(data) == size
            if is_right:
                memory[:] = data
    except MemoryError:
        raise
    except Exception as error:  # whatever these libraries raise for bytes that are not theirs
        raise DamagedArtifactError(f"a part of it cannot be decompressed: {error}") from error
    if not is_right:
        raise DamagedArtifactError("a part of it is compressed to another length")


def _word(rule: Rule, owner: Hashable) -> str:
    """Return how the tensors of a field are compressed, or (None) what belongs to no field."""
    if isinstance(rule, str):
        return rule
    found = rule.get(owner) if isinstance(owner, str) else None
    return found if found is not None else rule.get(_REST, "none")


def _choose(tensor: memoryview, spec: TensorSpec) -> int:
    """Return the method that pays for a tensor."""
    name = spec.dtype.lstrip("<>|")
    is_float = name != "bfloat16" and name[:1] in ("f", "c", "b") and name not in ("b1", "bool")
    if is_float and not _is_padded(tensor, spec):
        return PLAIN
    return BLOSC2 if spec.nbytes >= _FOR_BLOSC else ZSTD


def _is_padded(tensor: memoryview, spec: TensorSpec) -> bool:
    """Say whether a tensor has many zeros, or ends with equal rows; some of them are looked at."""
    import numpy as np

    size = spec.item_size
    elements = np.frombuffer(tensor, f"u{size}" if size in (1, 2, 4, 8) else "u1")
    some = elements[:: max(1, len(elements) // _PROBED)]
    if 8 * np.count_nonzero(some) <= 7 * len(some):
        return True
    row = size * spec.shape[-1] if len(spec.shape) > 1 else spec.nbytes
    # As bytes: memoryviews compare themselves element by element.
    return 2 * row <= spec.nbytes and bytes(tensor[-row:]) == bytes(tensor[-2 * row : -row])


def _compressed(method: int, data: memoryview, item_size: int) -> tuple[Stored, int]:
    """Return bytes as a method makes them, or, if that does not pay, as they are."""
    size = data.nbytes
    if method == PLAIN or not _SMALLEST <= size <= LARGEST:
        return data, PLAIN
    package = _package(method)
    made: bytes
    if method == BLOSC2:
        made = package.compress2(
            data, codec=package.Codec.ZSTD, clevel=1, typesize=item_size, nthreads=1,
            filters=[package.Filter.SHUFFLE], filters_meta=[0],
        )  # fmt: skip
    elif method == ZSTD:
        made = package.ZstdCompressor(level=1).compress(data)
    elif method == LZ4:
        made = package.compress(data, store_size=False)
    else:
        made = zlib.compress(data, 6)
    return (made, method) if 10 * len(made) <= 9 * size else (data, PLAIN)


@lru_cache(maxsize=len(_PACKAGES) + 1)
def _package(method: int) -> Any:  # noqa: ANN401 - not all of them have types
    """Return the module of a method; MissingCompressionError if it is not installed."""
    if method in (PLAIN, GZIP):
        return zlib
    if method not in _PACKAGES:
        message = f"an artifact is compressed in a way that this smartcache does not know: {method}"
        raise MissingCompressionError(message, hint="Install a newer release of smartcache.")
    name = _PACKAGES[method]
    try:
        module = import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        message = f"{package} is needed for this compression, and is not installed"
        hint = install_hint("compression")
        raise MissingCompressionError(message, hint=hint, name=package) from None
    if method == BLOSC2:
        module.set_releasegil(True)  # else threads would decompress one after the other
    return module
