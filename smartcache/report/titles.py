"""What a model file says of itself: its kind, and the title in its header.

Headers come from strangers. At most `MOST_READ` bytes of a file are read, lengths found in it are
never trusted, nothing is mapped or unpickled, and a damaged file simply has no title. What is
returned is one printable line of at most `LONGEST` characters.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import BinaryIO, Final, Literal

from smartcache.folders.discover import open_regular, read_up_to

Kind = Literal["safetensors", "gguf", "ckpt/bin", "onnx", "latents", "other"]

LONGEST: Final = 120
MOST_READ: Final = 16 << 20

_KINDS: Final[dict[str, Kind]] = {
    ".safetensors": "safetensors",
    ".sft": "safetensors",
    ".gguf": "gguf",
    ".ckpt": "ckpt/bin",
    ".bin": "ckpt/bin",
    ".pt": "ckpt/bin",
    ".pth": "ckpt/bin",
    ".onnx": "onnx",
    ".onnx_data": "onnx",
    ".latent": "latents",
    ".npz": "latents",
}
_TITLES: Final = ("modelspec.title", "ss_output_name", "title", "name")
"""Keys of `__metadata__`, the most telling first."""

_HEAD: Final = 128
_MOST_HEADER: Final = 100_000_000
_MOST_GGUF: Final = 8 << 20
_CHUNK: Final = 64 << 10
_METADATA: Final = re.compile(rb'\s*\{\s*"__metadata__"\s*:\s*(?=\{)')
_TORCH_PICKLE: Final = bytes.fromhex("80028a0a6cfc9c46f920")
"""How `torch.save` began before it made zips."""


def kind_of(path: Path) -> Kind:
    """Return the kind of a file: by its suffix, or its first bytes if the suffix says nothing."""
    if (kind := _KINDS.get(path.suffix.lower())) is not None:
        return kind
    try:
        with open_regular(path) as file:
            return _kind_of_head(read_up_to(file, _HEAD))
    except OSError:
        return "other"


def title_of(path: Path) -> str:
    """Return the title of a model file; "" if it has none, is damaged or cannot be read."""
    try:
        with open_regular(path) as file:
            return read_title(file)
    except OSError:
        return ""


def read_title(file: BinaryIO) -> str:
    """Return the title in the header of an open file that is at its beginning; "" if none."""
    head = read_up_to(file, _HEAD)
    kind = _kind_of_head(head)
    if kind == "safetensors":
        return _safetensors(file, head)
    return _gguf(file, head) if kind == "gguf" else ""


def one_line(text: str) -> str:
    """Return text for a table: printable, on one line, at most `LONGEST` characters."""
    printable = "".join(c if c.isprintable() else " " for c in text[: 10 * LONGEST])
    line = " ".join(printable.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1].rstrip() + "…"


def _kind_of_head(head: bytes) -> Kind:
    if head[:4] == b"GGUF":
        return "gguf"
    if head.startswith(_TORCH_PICKLE) or _is_torch_zip(head):
        return "ckpt/bin"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MOST_HEADER:
        return "safetensors"
    return "other"


def _is_torch_zip(head: bytes) -> bool:
    """Tell whether the first file of a zip is the pickle that torch puts there."""
    length = int.from_bytes(head[26:28], "little")
    return head[:4] == b"PK\x03\x04" and head[30 : 30 + length].endswith(b"/data.pkl")


def _safetensors(file: BinaryIO, head: bytes) -> str:
    length = int.from_bytes(head[:8], "little")
    most = min(length, MOST_READ - 8)
    start = head[8 : 8 + most]
    for wanted in (min(most, _CHUNK), most):
        start += read_up_to(file, wanted - len(start))
        if (metadata := _metadata(start)) is not None:
            break
    else:  # not in front, where the format's own writers put it
        metadata = _loads(start).get("__metadata__")
    if not isinstance(metadata, dict):
        return ""
    titles = (metadata.get(key) for key in _TITLES)
    return next(filter(None, (one_line(each) for each in titles if isinstance(each, str))), "")


def _metadata(header: bytes) -> object | None:
    """Return `__metadata__` if the header begins with it and `header` holds it to its end.

    The list of tensors behind it, often megabytes, is not looked at.
    """
    found = _METADATA.match(header)
    if found is None:
        return None
    try:
        value: object = json.JSONDecoder().raw_decode(
            header[found.end() :].decode(errors="replace")
        )[0]
    except (ValueError, RecursionError):
        return None
    return value


def _loads(text: bytes) -> dict[str, object]:
    try:
        value = json.loads(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class _DamagedError(Exception):
    """A GGUF head that ends too early, or says what cannot be."""


class _Reader:
    """The little-endian values of a GGUF head, from its first `_MOST_GGUF` bytes."""

    def __init__(self, file: BinaryIO, head: bytes) -> None:
        self._file = file
        self._data = head
        self._at = 0
        self._left = _MOST_GGUF - len(head)

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        if len(self._data) - self._at < size:
            self._fill(size)
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, code: str) -> int:
        """Return the next number: "I" of 4 bytes, "Q" of 8."""
        found: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return found

    def skip(self, size: int) -> None:
        """Pass over bytes without keeping them."""
        while size > 0:
            part = min(size, _CHUNK)
            self.take(part)
            size -= part

    def _fill(self, size: int) -> None:
        missing = size - (len(self._data) - self._at)
        more = read_up_to(self._file, min(max(missing, _CHUNK), self._left))
        self._left -= len(more)
        self._data = self._data[self._at :] + more
        self._at = 0
        if len(more) < missing:
            raise _DamagedError


_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the types of numbers and truth values in GGUF."""
_STRING: Final = 8
_ARRAY: Final = 9
_DEEPEST: Final = 4
_LONGEST_KEY: Final = 65_535
_VERSIONS: Final = (2, 3)


def _gguf(file: BinaryIO, head: bytes) -> str:
    reader = _Reader(file, head)
    try:
        reader.skip(4)
        # 1 had other lengths; big-endian files show as huge ones.
        if reader.number("I") not in _VERSIONS:
            return ""
        reader.skip(8)
        return _gguf_name(reader, pairs=reader.number("Q"))
    except _DamagedError:
        return ""


def _gguf_name(reader: _Reader, pairs: int) -> str:
    for _ in range(pairs):
        length = reader.number("Q")
        if length > _LONGEST_KEY:
            raise _DamagedError
        key = reader.take(length)
        kind = reader.number("I")
        if key == b"general.name" and kind == _STRING:
            length = reader.number("Q")
            return one_line(reader.take(min(length, 10 * LONGEST)).decode(errors="replace"))
        _skip_value(reader, kind, _DEEPEST)
    return ""


def _skip_value(reader: _Reader, kind: int, depth: int) -> None:
    if kind in _WIDTHS:
        reader.skip(_WIDTHS[kind])
    elif kind == _STRING:
        reader.skip(reader.number("Q"))
    elif kind == _ARRAY and depth:
        kind = reader.number("I")
        count = reader.number("Q")
        if kind in _WIDTHS:
            reader.skip(count * _WIDTHS[kind])
            return
        for _ in range(count):  # each takes 8 bytes at least, so the bound holds here too
            _skip_value(reader, kind, depth - 1)
    else:
        raise _DamagedError
