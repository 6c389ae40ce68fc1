"""One store directory on one filesystem: its paths, and the index, journal and locks in it.

Opening creates the tree where it is missing and refuses a store that somebody else could write: a
store has one writing user. Directories are 0700 and files 0600, whatever the umask is; blobs are
read-only. What a kill or a power cut left half made is made again; what a dead process left half
done is the matter of `Store`.

<root>/                     default ~/.local/share/smartcache; `<mount>/.smartcache-<uid>` elsewhere
  format                    "1": the version of this tree; a newer one is refused
  index.sqlite3             a memory of what lies below; `verify --rebuild` makes it again
  journal.jsonl             every change made to a user's file that may be undone
  lock, lock.turn           flock: shared around link + row, exclusive to remove; who waits
  leases/<key>              flock: one worker per key
  blobs/CACHEDIR.TAG        tells backup programs that blobs are a cache; the rest is not
  blobs/<aa>/<digest>       read-only, complete, verified
  sets/<name>/<id>/         artifact sets
  tmp/                      in progress; each file is locked by the process that writes it
  bad/<digest>.<n>          damaged; moved here, never deleted by itself
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile

from smartcache.config import Settings
from smartcache.errors import (
    LockTimeoutError,
    NoSpaceError,
    StoreError,
    StoreFormatError,
    StoreUnwritableError,
)
from smartcache.store.catalog import Catalog
from smartcache.store.changes.journal import Batch, Journal
from smartcache.store.index import Index
from smartcache.system.filesystems import filesystem_id, is_network
from smartcache.system.hashing import is_digest
from smartcache.system.kernel import boot_id, clone, effective_user, is_supported, sync_directory
from smartcache.system.locks import Claim, KeyLocks, OnWait, claim, lock
from smartcache.system.ownfiles import atomically, check_own, read_own

FORMAT = 1
DATASET = "dataset"
"""What the folder of a dataset is called, which is no id of a set."""
CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache directory of smartcache.\n"
    "# For information about cache directory tags see https://bford.info/cachedir/\n"
)
FOLD_SIZE = 1 << 20
"""A journal shorter than this is read in milliseconds."""
_FOLDED = "journal_folded"
"""Note in the index: how long the journal was when it was last looked at for folding."""
_HASTE = 0.3
"""Seconds that pass for no wait: others hold the lock for milliseconds."""
_FILES = ("format", "index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm",
          "index.sqlite3-journal", "journal.jsonl", "lock", "lock.turn")  # fmt: skip
_log = logging.getLogger(__name__)


def volume_root(folder: Path) -> Path:
    """Return the root of this user's volume in a folder, where others may have theirs."""
    return folder / f".smartcache-{effective_user()}"


def make_folders(path: Path) -> None:
    """Make the folders above a store: this user can enter them, and nobody else write them."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o755)
        path.chmod(path.stat().st_mode & 0o777 | 0o700)


class Layout:
    """The paths of one store. Making an object touches nothing; `create` and `check` do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.format = root / "format"
        self.index = root / "index.sqlite3"
        self.journal = root / "journal.jsonl"
        self.lock = root / "lock"
        self.leases = root / "leases"
        self.blobs = root / "blobs"
        self.tag = self.blobs / "CACHEDIR.TAG"
        self.sets = root / "sets"
        self.tmp = root / "tmp"
        self.bad = root / "bad"
        self.directories = self.blobs, self.sets, self.tmp, self.bad, self.leases
        self._blobs = f"{root}{os.sep}blobs{os.sep}"

    def blob(self, digest: str) -> str:
        """Return the path of a blob, as text: this is on every hot path."""
        return f"{self._blobs}{digest[:2]}{os.sep}{digest}"

    def new_tmp(self) -> Path:
        """Return an unused name in `tmp/`."""
        return self.tmp / secrets.token_hex(8)

    def new_bad(self, digest: str) -> Path:
        """Return an unused name in `bad/` for a damaged blob."""
        return self.bad / f"{digest}.{secrets.token_hex(4)}"

    def exists(self) -> bool:
        """Say whether a store is here."""
        return self.format.exists()

    def create(self) -> None:
        """Make the tree where it is missing. A directory with other contents is refused."""
        try:
            make_folders(self.root.parent)
            self._make_directory(self.root)
            check_own(self.root)
            if not _is_filled(self.format):
                # Looked at last: another process may have made it now.
                if not self._is_half_made() and not _is_filled(self.format):
                    message = f"{self.root} is not empty and is not a smartcache store"
                    hint = "Set SMARTCACHE_HOME to a new or empty directory."
                    raise StoreFormatError(message, hint=hint, root=self.root)
                with atomically(self.format) as file:
                    file.write(f"{FORMAT}\n".encode())
            for path in self.directories:
                self._make_directory(path)
            while not _is_filled(self.tag):
                # Another process may clear `tmp/` up.
                with suppress(FileNotFoundError), atomically(self.tag, room=self.tmp) as file:
                    file.write(CACHEDIR_TAG.encode())
            sync_directory(self.root)
        except StoreError:
            raise
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def is_whole(self) -> bool:
        """Say whether nothing of the tree is missing."""
        return _is_filled(self.format) and all(map(Path.is_dir, self.directories))

    def _is_half_made(self) -> bool:
        """Say whether a directory without a format is empty, or a store that was not finished.

        A kill or a power cut may leave that. Only what we make is in it: with an empty "format" or
        our mark in `blobs/`, or else no file at all.
        """
        ours = {*_FILES, *(path.name for path in self.directories)}
        with os.scandir(self.root) as entries:
            names = {each.name for each in entries if not each.name.startswith(".format.")}
        if not names <= ours:
            return False
        if self.format.name in names:
            return True
        with suppress(FileNotFoundError, NotADirectoryError):
            if read_own(self.tag, len(CACHEDIR_TAG)) == CACHEDIR_TAG.encode():
                return True
        left = (".format.", f".{self.tag.name}.", self.tag.name)
        files = (name for _, _, found in os.walk(self.root) for name in found)
        return all(name.startswith(left) for name in files)

    def secure(self) -> None:
        """Raise unless this user alone can write the store; close it to readers, too."""
        for path in (self.root, *self.directories, *(self.root / name for name in _FILES)):
            st = check_own(path)
            if st is not None and st.st_mode & 0o077:
                with suppress(FileNotFoundError):  # SQLite has removed its log
                    os.chmod(path, 0o700 if stat.S_ISDIR(st.st_mode) else 0o600)
        with suppress(FileNotFoundError):
            for name in os.listdir(self.blobs):
                check_own(self.blobs / name)

    def check(self) -> None:
        """Raise unless this is a store of a format this program can read."""
        try:
            text = read_own(self.format, 100).decode("ascii", errors="replace").strip()
        except StoreError:
            raise
        except OSError as error:
            message = f"{self.root} is not a smartcache store"
            raise StoreFormatError(message, root=self.root) from error
        if not text and self._is_half_made():
            return
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) > FORMAT:
            message = f"{self.root} has format {text[:20]!r}; this smartcache reads up to {FORMAT}"
            raise StoreFormatError(message, root=self.root)

    def set_folders(self) -> Iterator[Path]:
        """Go through the folders of all artifact sets, and of datasets."""
        for outer in _directories(self.sets):
            yield from _directories(outer)

    def has_blobs(self) -> bool:
        """Say whether there is anything in `blobs/`; quick, however much there is."""
        for directory in os.listdir(self.blobs):
            with suppress(OSError), os.scandir(self.blobs / directory) as entries:
                if any(is_digest(entry.name) for entry in entries):
                    return True
        return False

    def make_blob_directory(self, digest: str, *, sync: bool = True) -> None:
        """Make `blobs/<aa>` for a digest."""
        self._make_directory(self.blobs / digest[:2])
        if sync:
            sync_directory(self.blobs)

    def _make_directory(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            st = os.lstat(path)
            is_own = stat.S_ISDIR(st.st_mode) and st.st_uid == effective_user()
            if not is_own or path != self.root or self.format.exists():
                return
            # An empty directory that was made for the store beforehand.
        path.chmod(0o700)


def _is_filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def _directories(path: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield Path(entry.path)


def _unwritable(root: Path, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return NoSpaceError(f"No space left to make the store {root}", root=root)
    return StoreUnwritableError(f"Cannot use the store {root}: {reason}", root=root)


class Volume:
    """One root with everything in it; safe to use from several threads and after a fork."""

    def __init__(
        self, root: Path, settings: Settings, *, create: bool = True, catalog: Catalog | None = None
    ) -> None:
        """Open a root; `catalog` is the main store's, if this is a volume on another filesystem."""
        if not is_supported():
            hint = "Use it under WSL, with the store on the Linux side."
            raise StoreError("The store does not work on this system yet", hint=hint)
        self.settings = settings
        self.layout = layout = Layout(Path(os.path.abspath(root)))
        try:
            is_there = layout.exists()
        except OSError as error:
            with suppress(PermissionError, NotADirectoryError):
                check_own(layout.root)  # says it more clearly, if it is somebody else's
            raise _unwritable(layout.root, error) from error
        if is_there:
            layout.secure()
            layout.check()
        elif not create:
            message = f"There is no smartcache store at {layout.root}"
            raise StoreFormatError(message, root=layout.root)
        if not layout.is_whole():
            layout.create()
            layout.secure()
        self.root = layout.root
        self.filesystem = filesystem_id(self.root)
        self.device = os.stat(self.root).st_dev
        self.boot = boot_id()
        self.journal = Journal(layout.journal)
        self.key_locks = KeyLocks(layout.leases, timeout=settings.lock_timeout)
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
        self.had_content = layout.journal.exists() or layout.has_blobs()
        self.index = Index(layout.index, wal=not on_network)
        self.catalog = catalog or Catalog(self.index)
        self.index.patience = self._patience
        self.index.on_wait = self._say
        self.journal.timeout, self.journal.on_wait = settings.lock_timeout, self._say

    def close(self) -> None:
        """Close the index; locks and leases are held by blocks, so none remain."""
        self.index.close()

    @contextmanager
    def guard(self, what: str, *, exclusive: bool = False) -> Iterator[None]:
        """Hold the store's lock for milliseconds: shared around link + row, exclusive to remove."""
        timeout = self._patience()
        if self._is_in_haste and not timeout:
            raise LockTimeoutError(f"The store {self.root} is in use", key=str(self.layout.lock))
        on_wait = None if self._is_in_haste else self.on_wait
        try:
            with lock(
                self.layout.lock, exclusive=exclusive, timeout=timeout, what=what, on_wait=on_wait
            ):
                yield
        except LockTimeoutError:
            if self._is_in_haste:
                self._thread.haste = 0.0  # one wait, not one for each blob
            raise

    @contextmanager
    def in_haste(self) -> Iterator[None]:
        """Let this thread wait for nobody inside the block: LockTimeoutError comes instead."""
        self._thread.haste = _HASTE
        try:
            yield
        finally:
            self._thread.haste = None

    @property
    def _is_in_haste(self) -> bool:
        return getattr(self._thread, "haste", None) is not None

    def _patience(self) -> float | None:
        return self._thread.haste if self._is_in_haste else self.settings.lock_timeout

    def batch(self, label: str) -> Batch:
        """Return a new batch of journaled changes."""
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
        while (held := claim(self.layout.new_tmp())) is None:
            continue
        return held

    def _say(self, sentence: str) -> None:
        (self.on_wait if self.on_wait and not self._is_in_haste else _log.info)(sentence)

    def is_here(self, st: os.stat_result) -> bool:
        """Say whether a file lies on this volume's filesystem, so that it can be hard-linked."""
        return st.st_dev == self.device

    @cached_property
    def can_reflink(self) -> bool:
        """Whether files of this filesystem can share blocks: tried once, with nothing left."""
        try:
            with (
                TemporaryFile(dir=self.layout.tmp) as one,
                TemporaryFile(dir=self.layout.tmp) as two,
            ):
                one.write(bytes(4096))
                one.flush()
                return clone(one.fileno(), two.fileno())
        except OSError:
            return False

    def blob_inode(self, digest: str) -> int | None:
        """Return the inode at the name of a blob; None: nothing is there."""
        try:
            return os.lstat(self.layout.blob(digest)).st_ino
        except OSError:
            return None
