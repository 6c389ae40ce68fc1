"""The caches of mgds, the data pipeline of OneTrainer: the same names, one other import.

    from smartcache.integrations.mgds import SmartDiskCache

`SmartDiskCache` and `DiskCache` derive from mgds's own base classes, so they are made when they
are first asked for, and need mgds. The rest does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from threading import Lock
from types import new_class
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from smartcache.errors import ConfigError
from smartcache.integrations.mgds.cache import CacheModule, CachingStoppedException
from smartcache.integrations.mgds.cache import PositionalModule as _PositionalModule
from smartcache.training import Prefetcher

if TYPE_CHECKING:
    SmartDiskCache = CacheModule
    DiskCache = _PositionalModule

__all__ = ["CachingStoppedException", "DiskCache", "PrefetchIterator", "SmartDiskCache"]

T = TypeVar("T")
_making = Lock()


class PrefetchIterator(Generic[T]):
    """What an iterable gives, read ahead by a thread while the consumer works.

    An exception of the iterable is raised in the consumer, in its place. Each `for` iterates it
    anew, and nothing is read of the next epoch before: mgds must be told first that it begins.
    """

    def __init__(
        self, iterable: Iterable[T], queue_size: int = 1, stop_poll_interval: float = 0.1
    ) -> None:
        """Take the iterable; nobody polls here, so `stop_poll_interval` is of no effect."""
        self.iterable = iterable
        self.queue_size = queue_size
        self.stop_poll_interval = stop_poll_interval
        self._reading: list[Prefetcher[T]] = []

    def __iter__(self) -> Iterator[T]:
        reader = Prefetcher(iter(self.iterable), depth=self.queue_size)
        self._reading.append(reader)
        try:
            yield from reader
        finally:
            self._reading.remove(reader)
            reader.close()

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]

    def close(self, timeout: float = 5.0) -> None:
        """End the threads; after `timeout` seconds leave behind one that the iterable holds."""
        for reader in list(self._reading):
            reader.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        own = {"SmartDiskCache": CacheModule, "DiskCache": _PositionalModule}.get(name)
        if own is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        kind = "SingleVariationRandomAccessPipelineModule"
        try:
            first = import_module("mgds.PipelineModule").PipelineModule
            second = getattr(import_module(f"mgds.pipelineModuleTypes.{kind}"), kind)
        except ImportError as error:
            hint = (
                "Install mgds as OneTrainer does: pip install git+https://github.com/Nerogar/mgds"
            )
            raise ConfigError(f"{name} needs the package mgds", hint=hint) from error
        with _making:
            if name not in globals():
                made = new_class(name, (own, first, second))
                made.__module__, made.__doc__ = __name__, own.__doc__
                globals()[name] = made
        return globals()[name]
