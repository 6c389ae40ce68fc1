"""One store directory on one filesystem: its paths, index, journal, lock and leases.

Opening creates the tree where it is missing, follows a store that was moved, and refuses one that
somebody else could write; what a dead process left half done is the matter of `Store`. The modules
beside this one are the verbs that work on a volume.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smartcache.config import Settings
from smartcache.errors import (
    LeaseTimeoutError,
    NoSpaceError,
    StoreError,
    StoreFormatError,
    StoreMovedError,
)
from smartcache.store.filesystems import filesystem_id, free_bytes, is_network
from smartcache.store.index import Index
from smartcache.store.journal import Batch, Journal
from smartcache.store.kernel import boot_id
from smartcache.store.layout import Layout
from smartcache.store.leases import Leases
from smartcache.store.locks import Claim, OnWait, claim, lock
from smartcache.store.records import Blob
from smartcache.store.safety import create_own

_log = logging.getLogger(__name__)
_MOST_MOVES = 8
RESERVE_SIZE = 1 << 20
FOLD_SIZE = 1 << 20
"""A journal shorter than this is read in milliseconds."""
_FOLDED = "journal_folded"
"""Note in the index: how long the journal was when it was last looked at for folding."""
HASTE = 0.3
"""Seconds that pass for no wait: others hold the lock for milliseconds."""
_PAGE = 500


class Volume:
    """One root with everything in it; safe to use from several threads and after a fork."""

    def __init__(self, root: Path, settings: Settings, *, create: bool = True) -> None:
        _refuse_unsupported_system()
        self.settings = settings
        self.layout = Layout(follow(Path(os.path.abspath(root))))
        self._prepare(create=create)
        self.root = self.layout.root
        self.filesystem = filesystem_id(self.root)
        self.device = os.stat(self.root).st_dev
        self.boot = boot_id()
        self.journal = Journal(self.layout.journal)
        self.leases = Leases(self.layout.leases, timeout=settings.lock_timeout)
        self.on_wait: OnWait | None = None
        self._thread = threading.local()
        self.unable: set[tuple[int, str]] = set()
        """(device, kind of link) pairs that failed in a way that holds for the whole filesystem."""
        on_network = is_network(self.root)
        if on_network:
            _log.warning(
                "%s is on a network filesystem: slower, and safe for one host at a time", root
            )
        # Before the tables are made: what is put in afterwards is no sign of a lost index.
        self.had_content = self.layout.journal.exists() or self.layout.has_blobs()
        self.index = self._open_index(wal=not on_network)
        self.index.patience = self._patience
        self.index.on_wait = self._say
        self.journal.timeout, self.journal.on_wait = settings.lock_timeout, self._say
        self.make_reserve()

    def close(self) -> None:
        """Close the index; locks and leases are held by blocks, so none remain."""
        self.index.close()

    @contextmanager
    def guard(self, what: str, *, exclusive: bool = False) -> Iterator[None]:
        """Hold the store's lock for milliseconds: shared around link + row, exclusive to remove."""
        timeout = self._patience()
        if self._is_in_haste and not timeout:
            raise LeaseTimeoutError(f"The store {self.root} is in use", key=str(self.layout.lock))
        on_wait = None if self._is_in_haste else self.on_wait
        try:
            with lock(
                self.layout.lock, exclusive=exclusive, timeout=timeout, what=what, on_wait=on_wait
            ):
                self.refuse_if_moved()
                yield
        except LeaseTimeoutError:
            if self._is_in_haste:
                self._thread.haste = 0.0  # one wait, not one for each blob
            raise

    @contextmanager
    def in_haste(self) -> Iterator[None]:
        """Let this thread wait for nobody inside the block: LeaseTimeoutError comes instead."""
        self._thread.haste = HASTE
        try:
            yield
        finally:
            self._thread.haste = None

    @property
    def _is_in_haste(self) -> bool:
        return getattr(self._thread, "haste", None) is not None

    def _patience(self) -> float | None:
        return self._thread.haste if self._is_in_haste else self.settings.lock_timeout

    def refuse_if_moved(self) -> None:
        """Raise if the store is not here any more."""
        if os.path.lexists(self.layout.moved_to):
            message = f"The store {self.root} was moved to {self.layout.forwarding()}"
            raise StoreMovedError(message, root=self.root)

    def batch(self, label: str) -> Batch:
        """Return a new batch of journaled changes."""
        self.refuse_if_moved()
        return Batch(self.journal, self.layout.tmp, label)

    def fold_journal(self) -> None:
        """Let the journal hold what matters and no more, if it is long and was not just looked at.

        The note keeps every opening from reading a long journal of which nothing can go.
        """
        with suppress(FileNotFoundError):
            size = self.layout.journal.stat().st_size
            if size < FOLD_SIZE or size < 2 * int(self.index.note(_FOLDED) or 0):
                return
            with self.guard("fold the journal", exclusive=True):
                made = self.new_tmp()
                try:
                    size = self.journal.fold(
                        made, lambda batch: (self.layout.tmp / f"batch-{batch}").exists()
                    )
                finally:
                    made.release(remove=True)
                self.index.set_note(_FOLDED, str(size))

    def new_tmp(self) -> Claim:
        """Make and lock a new file in `tmp/`; if this process dies, the next open removes it."""
        self.refuse_if_moved()
        while (held := claim(self.layout.new_tmp())) is None:
            continue
        return held

    def give_up_reserve(self) -> None:
        """Free the space that is kept for the moment when the disk is full."""
        self.layout.reserve.unlink(missing_ok=True)

    def make_reserve(self) -> None:
        """Keep some space for the moment when the disk is full and only `prune` can help."""
        if self.layout.reserve.exists() or free_bytes(self.root) < 64 * RESERVE_SIZE:
            return
        with suppress(OSError), open(create_own(self.layout.reserve), "wb") as file:
            file.write(bytes(RESERVE_SIZE))

    def _say(self, sentence: str) -> None:
        (self.on_wait if self.on_wait and not self._is_in_haste else _log.info)(sentence)

    def is_here(self, st: os.stat_result) -> bool:
        """Say whether a file lies on this volume's filesystem, so that it can be hard-linked."""
        return st.st_dev == self.device

    def _open_index(self, *, wal: bool) -> Index:
        try:
            return Index(self.layout.index, wal=wal)
        except NoSpaceError:
            # Opening needs a few pages for SQLite's shared memory, even to prune.
            if not self.layout.reserve.exists():
                raise
            self.give_up_reserve()
            return Index(self.layout.index, wal=wal)

    def _prepare(self, *, create: bool) -> None:
        layout = self.layout
        if layout.format.exists():
            layout.secure()
            layout.check()
        elif not create:
            message = f"There is no smartcache store at {layout.root}"
            raise StoreFormatError(message, root=layout.root)
        if not layout.format.exists() or not layout.is_complete():
            layout.create()
            layout.secure()


def _refuse_unsupported_system() -> None:
    if not hasattr(os, "fchmod"):
        hint = "Use it under WSL, with the store on the Linux side."
        raise StoreError(f"The store does not work on {sys.platform} yet", hint=hint)


def follow(root: Path) -> Path:
    """Return where the store of a root is now, however often it was moved."""
    for _ in range(_MOST_MOVES):
        target = Layout(root).forwarding()
        if target is None:
            return root
        if target == root:
            hint = "A move was interrupted before it began: use the old root, or run mv again."
            raise StoreFormatError(f"{root} is not a store yet", hint=hint)
        if not Layout(target).exists():
            hint = f"Mount its drive, or remove {Layout(root).moved_to} to begin a new store here."
            raise StoreFormatError(
                f"The store was moved to {target}, which is not there", hint=hint
            )
        root = target
    raise StoreFormatError(
        f"{root} was moved in a circle", hint="Remove one of the 'moved-to' files."
    )


def all_blobs(volume: Volume) -> Iterator[Blob]:
    """Go through all blobs in pages, so that the index can be written in between."""
    after = b""
    while page := volume.index.blobs_after(after, _PAGE):
        after = bytes.fromhex(page[-1].digest)
        yield from page


def has_row(volume: Volume, digest: str) -> bool:
    """Say whether the index has a blob, neither lost nor in the trash."""
    blob = volume.index.blob(digest)
    return blob is not None and blob.is_here


def known_as(volume: Volume, blob: Blob) -> str:
    """Return what people know a blob by: the name of a file that has its bytes, or its id."""
    links = volume.index.links_of(blob.id)
    return links[0].path.name if links else blob.digest[:12]
