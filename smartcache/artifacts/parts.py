"""What the encoders write to, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from smartcache.artifacts.layouts import Layout

CACHED: Final = 4096
"""How many entries each memory of the encoders has before it starts anew."""

_packers: dict[bytes, Callable[..., bytes]] = {}


class Parts:
    """The parts of a layout, and what its fixed part, its sections and its slots will hold."""

    __slots__ = ("fixed", "layout", "sections", "tensors")

    def __init__(self) -> None:
        self.layout: list[bytes] = []
        self.fixed: list[Any] = []
        self.sections: list[bytes] = []
        self.tensors: list[memoryview] = []

    def inline(self, layout: bytes) -> bytes:
        """Return the inline bytes; `layout` is what `self.layout` has become."""
        pack = _packers.get(layout)
        if pack is None:
            if len(_packers) >= CACHED:
                _packers.clear()
            pack = _packers[layout] = Layout.parse(layout).struct.pack
        sections = self.sections
        return b"".join((pack(*self.fixed, *map(len, sections)), *sections))


Encode = Callable[[Any, Parts, int], None]
"""Writes a value to the parts; the number says how many containers it may have inside it."""
