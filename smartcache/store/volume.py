"""One store directory on one filesystem: its paths, and the index, journal and locks in it.

Opening creates the tree where it is missing, follows a store that was moved, and refuses one that
somebody else could write: a store has one writing user. Directories are 0700 and files 0600,
whatever the umask is; blobs are read-only. What a dead process left half done is the matter of
`Store`.

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
  trash/<digest>            removed by `rm`, still undoable; emptied by `prune`
  bad/<digest>.<n>          damaged; moved here, never deleted by itself
  reserve                   1 MiB of nothing, given up when the disk is so full that `prune` fails
  listing                   only in a published store: what others may take, by sha256
  moved-to                  only in a root whose store was moved: the path of the new root
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
    StoreMovedError,
    StoreUnwritableError,
)
from smartcache.store.catalog import Catalog
from smartcache.store.changes.journal import Batch, Journal
from smartcache.store.index import Index
from smartcache.system import (
    Claim,
    KeyLocks,
    OnWait,
    boot_id,
    check_own,
    claim,
    clone,
    create_own,
    effective_user,
    filesystem_id,
    free_bytes,
    is_digest,
    is_network,
    is_supported,
    lock,
    read_own,
    sync_directory,
)

FORMAT = 1
CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache directory of smartcache.\n"
    "# For information about cache directory tags see https://bford.info/cachedir/\n"
)
FOLD_SIZE = 1 << 20
"""A journal shorter than this is read in milliseconds."""
_FOLDED = "journal_folded"
"""Note in the index: how long the journal was when it was last looked at for folding."""
_RESERVE_SIZE = 1 << 20
_HASTE = 0.3
"""Seconds that pass for no wait: others hold the lock for milliseconds."""
_MOST_MOVES = 8
_LONGEST_PATH = 4096 + 1
_FILES = ("format", "index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "journal.jsonl",
          "lock", "lock.turn", "reserve", "moved-to", "listing")  # fmt: skip
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
        self.trash = root / "trash"
        self.bad = root / "bad"
        self.reserve = root / "reserve"
        self.moved_to = root / "moved-to"
        self.listing = root / "listing"
        self.directories = self.blobs, self.sets, self.tmp, self.trash, self.bad, self.leases
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
        """Say whether a store (or what remains of one) is here."""
        return self.format.exists() or self.moved_to.exists()

    def forwarding(self) -> Path | None:
        """Return the root this store was moved to, if it was."""
        try:
            if check_own(self.moved_to) is None:
                return None
            check_own(self.root)
            raw = read_own(self.moved_to, _LONGEST_PATH).rstrip(b"\n")
        except FileNotFoundError:
            return None
        except StoreError:
            raise
        except OSError as error:
            with suppress(PermissionError, NotADirectoryError):
                check_own(self.root)  # says it more clearly, if it is somebody else's
            raise _unwritable(self.root, error) from error
        if b"\0" in raw or not os.path.isabs(raw) or len(raw) == _LONGEST_PATH:
            hint = "Write the path of the store's new place into it, or remove it if there is none."
            raise StoreFormatError(
                f"{self.moved_to} is damaged: it holds no path", hint=hint, root=self.root
            )
        return Path(os.fsdecode(raw))

    def create(self) -> None:
        """Make the tree where it is missing. A directory with other contents is refused."""
        try:
            make_folders(self.root.parent)
            self._make_directory(self.root)
            check_own(self.root)
            if not self.format.exists():
                # A process killed while it made the store leaves at most a half-written "format".
                names = {name for name in os.listdir(self.root) if not name.startswith(".format-")}
                others = names - {"moved-to", *(path.name for path in self.directories)}
                if others and not self.format.exists():  # another process may have made it now
                    message = f"{self.root} is not empty and is not a smartcache store"
                    hint = "Set SMARTCACHE_HOME to a new or empty directory."
                    raise StoreFormatError(message, hint=hint, root=self.root)
                self._write(self.format, f"{FORMAT}\n", self.root)
            for path in self.directories:
                self._make_directory(path)
            while not self.tag.exists():
                with suppress(FileNotFoundError):  # another process has cleared `tmp/` up
                    self._write(self.tag, CACHEDIR_TAG, self.tmp)
            sync_directory(self.root)
        except StoreError:
            raise
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def secure(self) -> None:
        """Raise unless this user alone can write the store; close it to readers, too.

        What its owner has published stays open to them: the root and the blobs.
        """
        check_own(self.root)
        is_published = self.listing.exists()
        open_to_all = {self.root, self.blobs, self.listing} if is_published else set()
        for path in (self.root, *self.directories, *(self.root / name for name in _FILES)):
            st = check_own(path)
            if st is not None and st.st_mode & 0o077 and path not in open_to_all:
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
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) > FORMAT:
            message = f"{self.root} has format {text[:20]!r}; this smartcache reads up to {FORMAT}"
            raise StoreFormatError(message, root=self.root)

    def has_blobs(self) -> bool:
        """Say whether there is anything in `blobs/`; quick, however much there is."""
        for directory in os.listdir(self.blobs):
            with suppress(OSError), os.scandir(self.blobs / directory) as entries:
                if any(is_digest(entry.name) for entry in entries):
                    return True
        return False

    def make_blob_directory(self, digest: str, *, sync: bool = True) -> None:
        """Make `blobs/<aa>` for a digest, with the mode its parent has: it may be published."""
        self._make_directory(self.blobs / digest[:2], self.blobs.stat().st_mode & 0o777)
        if sync:
            sync_directory(self.blobs)

    def _make_directory(self, path: Path, mode: int = 0o700) -> None:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            st = os.lstat(path)
            is_own = stat.S_ISDIR(st.st_mode) and st.st_uid == effective_user()
            if not is_own or path != self.root or self.format.exists():
                return
            # An empty directory that was made for the store beforehand.
        path.chmod(mode)

    def _write(self, path: Path, text: str, beside: Path) -> None:
        temporary = beside / f".{path.name}-{secrets.token_hex(4)}"
        with open(create_own(temporary), "w", encoding="ascii") as file:
            file.write(text)
        temporary.replace(path)


def _unwritable(root: Path, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return NoSpaceError(f"No space left to make the store {root}", root=root)
    return StoreUnwritableError(f"Cannot use the store {root}: {reason}", root=root)


class Volume:
    """One root with everything in it; safe to use from several threads and after a fork."""

    def __init__(
        self,
        root: Path,
        settings: Settings,
        *,
        create: bool = True,
        catalog: Catalog | None = None,
    ) -> None:
        """Open a root; `catalog` is the main store's, if this is a volume on another filesystem."""
        if not is_supported():
            hint = "Use it under WSL, with the store on the Linux side."
            raise StoreError("The store does not work on this system yet", hint=hint)
        self.settings = settings
        self.layout = layout = Layout(follow(Path(os.path.abspath(root))))
        if layout.format.exists():
            layout.secure()
            layout.check()
        elif not create:
            message = f"There is no smartcache store at {layout.root}"
            raise StoreFormatError(message, root=layout.root)
        if not layout.format.exists() or not all(map(Path.is_dir, layout.directories)):
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
        self.index = self._open_index(wal=not on_network)
        self.catalog = catalog or Catalog(self.index)
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
            raise LockTimeoutError(f"The store {self.root} is in use", key=str(self.layout.lock))
        on_wait = None if self._is_in_haste else self.on_wait
        try:
            with lock(
                self.layout.lock, exclusive=exclusive, timeout=timeout, what=what, on_wait=on_wait
            ):
                self.refuse_if_moved()
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
        if self.layout.reserve.exists() or free_bytes(self.root) < 64 * _RESERVE_SIZE:
            return
        with suppress(OSError), open(create_own(self.layout.reserve), "wb") as file:
            file.write(bytes(_RESERVE_SIZE))

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

    def _open_index(self, *, wal: bool) -> Index:
        try:
            return Index(self.layout.index, wal=wal)
        except NoSpaceError:
            # Opening needs a few pages for SQLite's shared memory, even to prune.
            if not self.layout.reserve.exists():
                raise
            self.give_up_reserve()
            return Index(self.layout.index, wal=wal)


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
