"""Codecs for types of other people: how to turn an object into plain values, and back.

A file names the codec; what is called is what this program registered under that name. Nothing is
imported or looked up by a name from a file, and a name nobody registered is an UnknownCodecError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from smartcache.errors import ArtifactError, UnknownCodecError

T = TypeVar("T")
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class RegisteredCodec:
    """A name, the exact type it stands for, and the two functions."""

    name: str
    cls: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_by_name: dict[str, RegisteredCodec] = {}
_by_type: dict[type, RegisteredCodec] = {}


def register_codec(
    name: str, cls: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]
) -> None:
    """Keep objects of exactly this type: `encode` gives a supported value, `decode` the object.

    The name goes into files, so a reading program registers the same one. A name or type that is
    registered again has the new functions from then on. Types that come back as they are cannot be
    registered; what would come back as a numpy array can.
    """
    from smartcache.artifacts.codec import is_supported

    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ArtifactError(f"no name for a codec: {name!r:.80}")
    if is_supported(cls):
        raise ArtifactError(f"{cls.__name__} is supported already: it needs no codec")
    codec = RegisteredCodec(name, cls, encode, decode)
    for old in (_by_name.get(name), _by_type.get(cls)):
        if old is not None:
            _by_type.pop(old.cls, None)
            _by_name.pop(old.name, None)
    _by_name[name] = codec
    _by_type[cls] = codec


def codec_of_type(cls: type) -> RegisteredCodec | None:
    """Return the codec for objects of exactly this type."""
    return _by_type.get(cls)


def codec_of_name(name: str) -> RegisteredCodec:
    """Return the codec of a name; UnknownCodecError if this program registered none."""
    codec = _by_name.get(name)
    if codec is None:
        message = f"the artifact needs the codec {name!r}, which is not registered here"
        raise UnknownCodecError(message, name=name)
    return codec
