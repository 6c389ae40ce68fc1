"""One run of the program: its settings, the store it opens, and how it ends.

Nothing is imported here before it is needed: the help text pays for this file.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from smartcache.cache import SmartCache
    from smartcache.cli._output import Colour
    from smartcache.config import Settings
    from smartcache.store.journal import Batch
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
        self.how_far: Callable[[], str] | None = None
        """Says, after an interruption, what was done."""

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
        from smartcache.store.layout import Layout

        return Layout(self.settings.home).exists()

    @contextmanager
    def store(self, *, create: bool = False, only_look: bool = False) -> Iterator[Store]:
        """Open the store; one that does not exist is an error unless it may be made.

        It is made by the first change, never by opening; `only_look`: nor by anything else.
        """
        from smartcache.errors import StoreFormatError
        from smartcache.store.store import Store

        settings = self.settings
        if not (create or only_look or self.has_store()):
            message = f"There is no store at {settings.home} yet"
            hint = "'smartcache scan' makes one; --home or SMARTCACHE_HOME says where it is."
            raise StoreFormatError(message, hint=hint, root=settings.home)
        with Store(settings=settings, only_look=only_look) as store:
            self._opened(store, only_look=only_look)
            yield store

    @contextmanager
    def store_as_it_is(self, *, says_none: bool = True) -> Iterator[Store]:
        """Open the store; where there is none yet, say so, and give one that makes nothing."""
        has_store = self.has_store()
        if says_none and not has_store:
            from smartcache.cli._output import out

            home = self.settings.home
            out.talk(f"There is no store at {home} yet: 'smartcache scan' makes one.")
        with self.store(only_look=not has_store) as store:
            yield store

    @contextmanager
    def cache(self, *, only_look: bool = False) -> Iterator[SmartCache]:
        """Open the store, made by the first change if there is none, with the layers above it."""
        from smartcache.cache import SmartCache

        with SmartCache(settings=self.settings, only_look=only_look) as cache:
            self._opened(cache.store, only_look=only_look)
            yield cache

    def _opened(self, store: Store, *, only_look: bool) -> None:
        from smartcache.cli._output import out

        store.on_wait = out.wait
        self.opened_root = None if only_look else store.root

    @contextmanager
    def batch(self, store: Store, label: str, *, goes_on: str = "") -> Iterator[Batch]:
        """Let the changes of a block be one entry of the history; if interrupted, say how many."""
        with store.batch(label) as batch:
            self.how_far = lambda: _done(batch, goes_on)
            yield batch
        self.how_far = None

    def set_right(self) -> str:
        """Finish or take back what an interrupted change left; return what is known of it."""
        if self.opened_root is not None and self.has_store():
            from smartcache.store.store import Store

            with Store(settings=self.settings) as store:
                store.recover()
        return "" if self.how_far is None else self.how_far()


def _done(batch: Batch, goes_on: str) -> str:
    number = len(batch.changes)
    done = f"{number:,} {'file' if number == 1 else 'files'} changed so far"
    undo = f"'smartcache undo {batch.id}' takes that back" if number else ""
    return f"{'; '.join(filter(None, (done, undo, goes_on)))}."


def say_unfinished(store: Store) -> None:
    """Warn of changes that a dead process left half done and that cannot be finished now."""
    from smartcache.cli._output import out

    for text in store.unfinished():
        out.warn(f"Unfinished: {text}. {FORGET}")


FORGET = "'smartcache undo --forget' closes entries that cannot be finished any more."


def meant(store: Store, text: str) -> Blob:
    """Return the blob a user means by a digest, its beginning or another hash."""
    from smartcache.errors import BadDigestError

    try:
        return store.resolve(text)
    except BadDigestError as error:
        matches: list[str] = getattr(error, "matches", [])
        if matches:
            shown = ", ".join(match[:16] for match in matches[:3])
            error.hint = f"Write more of it: {shown}{' ...' if matches[3:] else ''}"
        raise
