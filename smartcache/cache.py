"""The facade that wires the layers together; it has no logic of its own.

`SmartCache` reads the settings and opens the store once; the layers above the store are given this
one object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from smartcache.config import Settings, with_home
from smartcache.store.store import Store


class SmartCache:
    """One copy of every model file and every computed tensor on this machine."""

    def __init__(self, home: str | Path | None = None, *, settings: Settings | None = None) -> None:
        self.settings = with_home(settings, home)
        self.store = Store(settings=self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store."""
        self.store.close()
