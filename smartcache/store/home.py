"""An open store: its pools, its two databases, its lock.

Opening makes nothing, waits for nobody and recovers nothing. The index is made by the first scan,
the rest of the tree by the first change. Whoever changes a user's file, or removes a blob, does so
inside `changing`: the lock, with everything finished that dead processes have left.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smartcache.config import Settings
from smartcache.errors import FileSkippedError, StoreError, StoreFormatError
from smartcache.store.catalog import Catalog, open_catalog
from smartcache.store.journal import Batch, Journal, open_journal
from smartcache.store.layout import Layout, Pool, explained, move_aside, pool_root, sweep
from smartcache.system.filesystems import (
    Mounts,
    filesystem_id,
    is_network,
    mount_of,
    nearest_existing,
)
from smartcache.system.kernel import boot_id, is_supported
from smartcache.system.locks import KeyLocks, OnWait, store_lock
from smartcache.system.ownfiles import check_own

_log = logging.getLogger(__name__)


class Home:
    """What all modules of a store need; safe to use from several threads and after a fork."""

    def __init__(self, settings: Settings, *, only_look: bool = False) -> None:
        """Look at what is there. `only_look`: nothing is made, an index is kept in memory."""
        if not is_supported():
            hint = "Use it under WSL, with the store on the Linux side."
            raise StoreError("The store does not work on this system yet", hint=hint)
        self.settings = settings
        self.only_look = only_look
        self.layout = layout = Layout(Path(os.path.abspath(settings.home)))
        self.boot = boot_id()
        self.key_locks = KeyLocks(layout.leases, timeout=settings.lock_timeout)
        self.on_wait: OnWait | None = None
        self.stuck: dict[int, str] = {}
        """Rows of the journal that cannot be finished now, and why."""
        self.kept: list[Path] = []
        """Files that recovery has given a plain name: their bytes are not ours to delete."""
        self.unable: set[tuple[int, str]] = set()
        """(device, kind of link) that failed in a way that holds for the whole filesystem."""
        self._gate = threading.RLock()
        _homes.add(self)
        self._passing = _Passing()
        self._catalog: Catalog | None = None
        self._journal: Journal | None = None
        self._others: list[Pool] = []
        self._pools_version = -1
        self._is_ready = False
        self._is_closed = False
        with explained(layout.root, is_made=True):
            try:
                is_there = layout.exists()
            except OSError:
                with suppress(PermissionError, NotADirectoryError):
                    check_own(layout.root)  # says it more clearly, if it is somebody else's
                raise
        if is_there:
            layout.secure()
            layout.check()
            if is_network(layout.root):
                text = "%s is on a network filesystem: slower, and safe for one host at a time"
                _log.warning(text, layout.root)

    @property
    def root(self) -> Path:
        """The directory of the store."""
        return self.layout.root

    def finish_open(self) -> None:
        """Finish what dead processes have left, as far as it can be looked at."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the databases; every further use is an error."""
        with self._gate:
            self._is_closed = True
            for database in (self._catalog, self._journal):
                if database is not None:
                    database.close()

    def ready(self) -> None:
        """Make what is missing of the tree, before the first change."""
        if self._is_ready and os.path.isdir(self.layout.tmp):
            return
        if self.only_look and not self.layout.exists():
            message = f"There is no store at {self.layout.root} yet"
            raise StoreFormatError(message, root=self.layout.root)
        if not self.layout.is_whole():
            self.layout.create()
            self.layout.secure()
        self._is_ready = True

    @property
    def catalog(self) -> Catalog:
        """What is remembered of files; made where it is not there."""
        if self._catalog is None:
            with self._gate:
                if self._catalog is None:
                    self._catalog = self._open_catalog()
        return self._catalog

    def _open_catalog(self) -> Catalog:
        self._refuse_closed()
        layout = self.layout
        is_there = layout.index.exists()
        if not (is_there or self.only_look):
            layout.make_root()
        path = layout.index if is_there or not self.only_look else None
        catalog = open_catalog(path, layout.bad, wal=not is_network(layout.root))
        catalog.patience = lambda: 0 if self._passing.is_on else self.settings.lock_timeout
        catalog.on_wait = self.say
        return catalog

    @contextmanager
    def in_passing(self) -> Iterator[None]:
        """Remember something here, unless another process writes: who reads waits for nobody."""
        self._passing.is_on = True
        try:
            with suppress(StoreError):
                yield
        finally:
            self._passing.is_on = False

    def forget_catalog(self) -> None:
        """Remove the index: the next use makes it anew."""
        with self._gate:
            if self._catalog is not None:
                self._catalog.close()
                self._catalog = None
            move_aside(self.layout.index, None)

    @property
    def has_journal(self) -> bool:
        """Whether anything was ever changed."""
        return self._journal is not None or self.layout.journal.exists()

    @property
    def journal(self) -> Journal:
        """What every changed file was before; made where it is not there."""
        if self._journal is None:
            with self._gate:
                if self._journal is None:
                    self._refuse_closed()
                    layout = self.layout
                    if not layout.journal.exists():
                        self.ready()
                    journal = open_journal(
                        layout.journal, layout.journal_copy, layout.bad,
                        repairing=lambda: self.locked("repair of the journal"),
                    )  # fmt: skip
                    journal.patience = lambda: self.settings.lock_timeout
                    journal.on_wait = self.say
                    self._journal = journal
        return self._journal

    def _refuse_closed(self) -> None:
        if self._is_closed:
            message = f"The store {self.layout.root} was closed"
            raise StoreError(message, hint="Open the store again.")

    def say(self, sentence: str) -> None:
        """Tell the user what is waited for."""
        (self.on_wait or _log.info)(sentence)

    # pools

    def pools(self) -> list[Pool]:
        """Return the pools of all filesystems that are mounted now, that of the home first."""
        if not self.has_journal:
            return [self.layout]
        version = self.journal.number("PRAGMA data_version")  # another process may have made one
        is_same = all(_device(pool.root) == pool.device for pool in self._others)
        if version != self._pools_version or not is_same:
            others = []
            for pool in map(Pool, self.journal.pools(Mounts())):
                try:
                    if pool.root.is_dir():
                        pool.secure()
                        others.append(pool)
                except (StoreError, OSError) as error:
                    # One that cannot be used is left out: everything else goes on working.
                    _log.warning("the pool %s is left out: %s", pool.root, error)
            self._others, self._pools_version = others, version
        return [self.layout, *self._others]

    def pool_on(self, device: int) -> Pool | None:
        """Return the pool of a filesystem, by the device number of its files."""
        if device == self.layout.device:
            return self.layout
        return next((each for each in self.pools() if each.device == device), None)

    def pool_of(self, path: str | Path) -> Pool:
        """Return the pool of the filesystem that a path is on, or lies nearest to."""
        pool = self.pool_on(os.stat(nearest_existing(Path(path))).st_dev)
        if pool is None:
            message = f"There is no pool on the filesystem of {path}"
            hint = "Copy the file, or make a pool there: smartcache add --adopt --make-pool."
            raise FileSkippedError(message, hint=hint, reason="other filesystem", path=Path(path))
        return pool

    def add_pool(self, root: str | Path) -> Pool:
        """Make (or find) the pool of another filesystem, and remember it."""
        root = Path(os.path.abspath(root))
        device = os.stat(nearest_existing(root)).st_dev
        known = self.pool_on(device)
        if known is not None and known.root != root:
            message = f"{root} is on the filesystem of {known.root} already"
            raise StoreError(message, hint="A pool is for another filesystem.")
        pool = Pool(root)
        pool.create()
        pool.secure()
        self.ready()
        self.journal.add_pool(pool.root, Mounts())
        self._pools_version = -1
        return pool

    def make_pool_for(self, path: str | Path) -> Pool:
        """Make a pool at the root of the filesystem a path is on."""
        return self.add_pool(pool_root(mount_of(Path(path)).point))

    filesystem = staticmethod(filesystem_id)

    # the lock

    @contextmanager
    def locked(self, label: str, *, patience: float | None = None) -> Iterator[None]:
        """Be the only one who changes names, for milliseconds. Not re-entrant."""
        self.ready()
        timeout = self.settings.lock_timeout if patience is None else patience
        with store_lock(self.layout.lock, label, timeout=timeout, on_wait=self.say):
            yield

    @contextmanager
    def changing(self, label: str) -> Iterator[None]:
        """The lock; what dead processes left is finished first, as far as it can be looked at."""
        if self.only_look and not self.layout.exists():  # undo of files that outlived their store
            yield
            return
        while True:
            with self.locked(label):
                if not self.has_journal or not self.journal.has_open(but=self.stuck):
                    yield
                    return
            self.finish_open()

    @contextmanager
    def batch(self, label: str, given: Batch | None = None) -> Iterator[Batch]:
        """Give the batch that changes belong to: the one given, or one that ends with the block."""
        if given is not None:
            yield given
            return
        batch = Batch(label)
        try:
            yield batch
        finally:
            if batch.is_written or batch.pending:
                self.end_batch(batch)

    def end_batch(self, batch: Batch | None = None) -> None:
        """Write what a batch still has to write, and bring the copy of the journal up to date."""
        if batch is not None:
            self.journal.flush(batch, Mounts())
        with self.locked("journal"):
            for pool in self.pools():
                sweep(pool, self.journal.needed_names())
            self.journal.forget_over()
            try:
                self.journal.renew_copy(self.layout.journal_copy)
            except (StoreError, OSError) as error:  # a full disk: what was done is done
                _log.warning("the copy of the journal is an older one: %s", error)


class _Passing(threading.local):
    """Whether this thread remembers something in passing."""

    is_on = False


_homes: weakref.WeakSet[Home] = weakref.WeakSet()


def _renew_gates() -> None:
    """In a forked child: the thread that was opening a database does not exist here."""
    for home in list(_homes):
        home._gate = threading.RLock()  # noqa: SLF001 - ours


os.register_at_fork(after_in_child=_renew_gates)


def _device(root: Path) -> int:
    try:
        return os.stat(root).st_dev
    except OSError:
        return -1
