"""One run of the program: its settings, the stores it opens, and how it ends.

Nothing is imported here before it is needed: the help text pays for this file.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from smartcache.cache import SmartCache
    from smartcache.cli._output import Colour
    from smartcache.config import Settings
    from smartcache.store.records import Blob
    from smartcache.store.store import Store


class Session:
    """The global options and what they lead to."""

    def __init__(self) -> None:
        self.home: str | None = None
        self.debug = False
        self.colour: Colour = "auto"
        self.opened_root: Path | None = None
        """The store this run has opened, to be set right after an interruption."""
        self.how_far: Callable[[list[Store]], str] | None = None
        """Says, after an interruption, what was done; given the stores, set right."""

    def open_closed_streams(self) -> None:
        """Let output go nowhere where the caller has closed it (`>&-`)."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Turn exceptions into a line, a hint and an exit code (`_failures.py`)."""
        try:
            yield
            sys.stdout.flush()  # while it can be told that it fails
        except click.exceptions.Exit:
            raise
        except BaseException as error:
            from smartcache.cli._failures import conclude

            conclude(error, self)
            raise

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        from smartcache.config import load_settings

        return load_settings(home=self.home)

    def has_store(self) -> bool:
        """Say whether there is a store at the home."""
        from smartcache.store.volume import Layout

        return Layout(self.settings.home).exists()

    @contextmanager
    def _to_open(self, *, only_look: bool) -> Iterator[Settings]:
        """Give the settings; to look where there is no store, those of one that is gone afterwards.

        It is beside the place of the store: what can be linked depends on the filesystem.
        """
        settings = self.settings
        if not only_look or self.has_store():
            self.opened_root = settings.home
            yield settings
            return
        from dataclasses import replace
        from pathlib import Path
        from tempfile import TemporaryDirectory

        from smartcache.system.filesystems import nearest_existing

        beside = nearest_existing(settings.home)
        place = beside if os.access(beside, os.W_OK) else None
        with TemporaryDirectory(prefix=".smartcache-", dir=place) as folder:
            yield replace(settings, home=Path(folder))

    @contextmanager
    def store(self, *, create: bool = False, only_look: bool = False) -> Iterator[Store]:
        """Open the store; one that does not exist is an error unless it may be made.

        `only_look`: none is made for good.
        """
        from smartcache.errors import StoreFormatError
        from smartcache.store.store import Store

        settings = self.settings
        if not (create or only_look or self.has_store()):
            message = f"There is no store at {settings.home} yet"
            hint = "'smartcache scan' makes one; --home or SMARTCACHE_HOME says where it is."
            raise StoreFormatError(message, hint=hint, root=settings.home)
        with self._to_open(only_look=only_look) as settings, Store(settings=settings) as store:
            _say_what_is_waited_for(store)
            yield store

    @contextmanager
    def cache(self, *, only_look: bool = False) -> Iterator[SmartCache]:
        """Open the store, which is made if there is none, with the layers above it."""
        from smartcache.cache import SmartCache

        with self._to_open(only_look=only_look) as settings, SmartCache(settings=settings) as cache:
            _say_what_is_waited_for(cache.store)
            yield cache

    @contextmanager
    def stores(self, *, says_none: bool = True) -> Iterator[list[Store]]:
        """Open the store and its neighbours; where there is no store yet, say so and give none."""
        if not self.has_store():
            from smartcache.cli._output import out

            if says_none:
                home = self.settings.home
                out.talk(f"There is no store at {home} yet: 'smartcache scan' makes one.")
            yield []
            return
        with self.store() as store:
            yield list(store.stores())

    def set_right(self) -> str:
        """Finish or take back what an interrupted change left; return what is known of it."""
        if self.opened_root is None or not self.has_store():
            return ""
        from smartcache.store.store import Store

        with Store(settings=self.settings) as store:
            stores = list(store.stores())
            return "" if self.how_far is None else self.how_far(stores)


def _say_what_is_waited_for(store: Store) -> None:
    from smartcache.cli._output import out

    for each in store.stores():
        each.volume.on_wait = out.wait


@contextmanager
def one_entry(store: Store, label: str) -> Iterator[None]:
    """Let all changes of this block be one entry of the history, on whichever volume they are."""
    with ExitStack() as batches:
        for each in store.stores():
            batches.enter_context(each.batch(label))
        yield


def holders(store: Store, text: str) -> list[tuple[Store, Blob]]:
    """Return the blob a user means on every volume that has it; at least one, or an error."""
    from smartcache.errors import BadDigestError, BlobNotFoundError

    try:
        digest = store.resolve(text).digest
    except BadDigestError as error:
        matches: list[str] = getattr(error, "matches", [])
        if matches:
            shown = ", ".join(match[:16] for match in matches[:3])
            error.hint = f"Write more of it: {shown}{' ...' if matches[3:] else ''}"
        raise
    found = []
    for each in store.stores():
        try:
            found.append((each, each.get(digest)))
        except BlobNotFoundError:
            continue
    return found
