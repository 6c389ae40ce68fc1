"""Where everything of a store is on the disk, and whose it must be.

    <home>/                    default ~/.local/share/smartcache, or SMARTCACHE_HOME
      format                   "1": the version of this tree; a newer one is refused
      lock                     flock: whoever changes a user's file or removes a blob holds it
      journal.sqlite3          precious: every change to a user's file that can be undone
      journal.copy             the journal as it was after the last batch
      index.sqlite3            a memory: it may be deleted at any time
      blobs/CACHEDIR.TAG       tells backup programs that blobs are a cache; the rest is not
      blobs/<aa>/<digest>      read-only, complete, verified
      pins/<name>/<digest>     a pin is one more hard link of a blob
      sets/<name>/<id>/        artifact sets
      tmp/<folder>/            in progress; each folder is locked by the process that works in it
      bad/<digest>.<n>         damaged; moved here, never deleted by itself
      leases/                  locks of keys: one worker per key

Another filesystem gets a *pool*, `<folder>/.smartcache-<uid>/`, with blobs, pins, tmp and bad only.
A store has one writing user: what somebody else could write is refused. Folders are 0700 and files
0600, whatever the umask is. What a kill or a power cut left half made is made again.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from smartcache.errors import (
    NoSpaceError,
    SmartcacheError,
    StoreFormatError,
    StoreUnwritableError,
)
from smartcache.system.filesystems import filesystem_id, nearest_existing
from smartcache.system.kernel import effective_user, sync_directory
from smartcache.system.locks import Claim, claim_folder
from smartcache.system.ownfiles import atomically, check_own, read_own

FORMAT = 1
DATASET = "dataset"
"""What the folder of a dataset is called, which is no id of a set."""
CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache directory of smartcache.\n"
    "# For information about cache directory tags see https://bford.info/cachedir/\n"
)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_POOL = ("blobs", "pins", "tmp", "bad")
_HOME = (*_POOL, "sets", "leases")
_FILES = ("format", "lock", "index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm",
          "index.sqlite3-journal", "journal.sqlite3", "journal.sqlite3-journal",
          "journal.copy")  # fmt: skip


@contextmanager
def explained(where: str | Path, *, is_made: bool = False) -> Iterator[None]:
    """Turn the OS errors that a user can do something about into errors with a hint.

    `is_made`: the store itself is, at this place; then every error is one of it.
    """
    try:
        yield
    except SmartcacheError:
        raise
    except OSError as error:
        if error.errno in FULL:
            message = f"No space left on the filesystem of {where}; nothing was changed"
            raise NoSpaceError(message, path=where) from error
        if is_made:
            message = f"Cannot use the store {where}: {error.strerror or error}"
            raise StoreUnwritableError(message, path=where) from error
        if error.errno in _DENIED:
            name = where if error.filename is None else error.filename
            message = f"Cannot write {name}: {error.strerror}"
            raise StoreUnwritableError(message, path=where) from error
        raise


def pool_root(folder: Path) -> Path:
    """Return the root of this user's pool in a folder, where others may have theirs."""
    return folder / f".smartcache-{effective_user()}"


def absolute(path: str | Path) -> Path:
    """Return an absolute, plain path; most are already, and making one anew costs 10 us."""
    if isinstance(path, Path) and path.is_absolute() and ".." not in path.parts:
        return path
    return Path(os.path.abspath(path))


class Pool:
    """The blobs on one filesystem. Making an object touches nothing; `create` does."""

    folders: tuple[str, ...] = _POOL

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs"
        self.pins = root / "pins"
        self.tmp = root / "tmp"
        self.bad = root / "bad"
        self._blobs = f"{root}{os.sep}blobs{os.sep}"

    def __repr__(self) -> str:
        """Return the class and the root."""
        return f"{type(self).__name__}({str(self.root)!r})"

    @cached_property
    def device(self) -> int:
        """The device number of its files: hard links stay within it."""
        return os.stat(nearest_existing(self.root)).st_dev

    @cached_property
    def filesystem(self) -> str:
        """The lasting id of its filesystem."""
        return filesystem_id(nearest_existing(self.root))

    def blob(self, digest: str) -> str:
        """Return the path of a blob, as text: a Path costs more than the lstat it is for."""
        return f"{self._blobs}{digest[:2]}{os.sep}{digest}"

    def stat(self, digest: str) -> os.stat_result | None:
        """Return what has the name of a blob; None: nothing."""
        try:
            return os.lstat(self.blob(digest))
        except FileNotFoundError:
            return None

    def digests(self, beginning: str = "") -> Iterator[str]:
        """Go through the names of all blobs, in order, or of those that begin so."""
        folders = [beginning[:2]] if len(beginning) > 1 else sorted(listed(self.blobs))
        for folder in folders:
            for name in sorted(listed(self.blobs / folder)):
                if name.startswith(beginning) and is_blob_name(folder, name):
                    yield name

    def stats(self) -> Iterator[tuple[str, os.stat_result]]:
        """Go through all blobs, each looked at now."""
        for digest in self.digests():
            if (st := self.stat(digest)) is not None:  # else removed meanwhile
                yield digest, st

    def pin_inodes(self) -> Counter[int]:
        """Return how many pins each inode has: one may still be of a damaged file of before."""
        found = Counter[int]()
        for name in listed(self.pins):
            for digest in listed(self.pins / name):
                with suppress(FileNotFoundError):
                    found[os.lstat(self.pins / name / digest).st_ino] += 1
        return found

    def pinned(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the pins of all blobs that have any."""
        found: dict[str, tuple[str, ...]] = {}
        for name in sorted(listed(self.pins)):
            for digest in listed(self.pins / name):
                found[digest] = (*found.get(digest, ()), name)
        return found

    def new_bad(self, name: str) -> Path:
        """Return an unused name in `bad/` for a damaged file."""
        return self.bad / f"{name}.{secrets.token_hex(4)}"

    def make_folder_of(self, digest: str, *, sync: bool = True) -> None:
        """Make `blobs/<aa>` for a digest."""
        self._make(self.blobs / digest[:2])
        if sync:
            sync_directory(self.blobs)

    def make_root(self) -> None:
        """Make the folder alone."""
        with explained(self.root, is_made=True):
            _make_above(self.root.parent)
            self._make(self.root)
            check_own(self.root)

    def create(self) -> None:
        """Make what is missing of the tree."""
        self.make_root()
        with explained(self.root, is_made=True):
            for name in self.folders:
                self._make(self.root / name)
            tag = self.blobs / "CACHEDIR.TAG"
            while not _is_filled(tag):
                # Another process may clear `tmp/` up.
                with suppress(FileNotFoundError), atomically(tag, room=self.tmp) as file:
                    file.write(CACHEDIR_TAG.encode())
            sync_directory(self.root)

    def is_whole(self) -> bool:
        """Say whether nothing of the tree is missing."""
        return all(os.path.isdir(self.root / name) for name in self.folders)

    def secure(self) -> None:
        """Raise unless this user alone can write it; close it to readers, too."""
        for path in (self.root, *(self.root / name for name in (*self.folders, *_FILES))):
            st = check_own(path)
            if st is not None and st.st_mode & 0o077:
                with suppress(FileNotFoundError):  # SQLite has removed its log
                    os.chmod(path, 0o700 if stat.S_ISDIR(st.st_mode) else 0o600)
        for name in listed(self.blobs):
            check_own(self.blobs / name)

    def _make(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            st = os.lstat(path)
            is_own = stat.S_ISDIR(st.st_mode) and st.st_uid == effective_user()
            if not is_own or path != self.root or self.is_whole():
                return
            # An empty folder that was made for the store beforehand.
        path.chmod(0o700)


class Layout(Pool):
    """The home: a pool, with the databases, locks and artifact sets of the whole store."""

    folders = _HOME

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.format = root / "format"
        self.lock = root / "lock"
        self.index = root / "index.sqlite3"
        self.journal = root / "journal.sqlite3"
        self.journal_copy = root / "journal.copy"
        self.leases = root / "leases"
        self.sets = root / "sets"

    def exists(self) -> bool:
        """Say whether a store is here, or the index that a scan has made."""
        return self.format.exists() or self.index.exists()

    def make_root(self) -> None:
        """Make the folder alone, for the index. One with other contents is refused."""
        super().make_root()
        with explained(self.root, is_made=True):
            # Looked at last: another process may have made it now.
            if not self._is_half_made() and not _is_filled(self.format):
                message = f"{self.root} is not empty and is not a smartcache store"
                hint = "Set SMARTCACHE_HOME to a new or empty directory."
                raise StoreFormatError(message, hint=hint, root=self.root)

    def create(self) -> None:
        """Make what is missing of the tree."""
        self.make_root()
        with explained(self.root, is_made=True):
            if not _is_filled(self.format):
                with atomically(self.format) as file:
                    file.write(f"{FORMAT}\n".encode())
        super().create()

    def is_whole(self) -> bool:
        """Say whether nothing of the tree is missing."""
        return _is_filled(self.format) and super().is_whole()

    def check(self) -> None:
        """Raise unless this is a store of a format this program can read."""
        if not self.format.exists() and self.index.exists():
            return
        try:
            text = read_own(self.format, 100).decode("ascii", errors="replace").strip()
        except SmartcacheError:
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
        for outer in _folders_in(self.sets):
            yield from _folders_in(outer)

    def _is_half_made(self) -> bool:
        """Say whether a folder without a format is empty, or a store that was not finished.

        A kill or a power cut may leave that. Only what we make is in it: with an empty "format" or
        our mark in `blobs/`, or else no file at all.
        """
        ours = {*_FILES, *self.folders}
        with os.scandir(self.root) as entries:
            names = {each.name for each in entries if not each.name.startswith(".format.")}
        if not names <= ours:
            return False
        tag = self.blobs / "CACHEDIR.TAG"
        if names & {self.format.name, self.index.name}:
            return True
        with suppress(FileNotFoundError, NotADirectoryError):
            if read_own(tag, len(CACHEDIR_TAG)) == CACHEDIR_TAG.encode():
                return True
        left = (".format.", f".{tag.name}.", tag.name)
        files = (name for _, _, found in os.walk(self.root) for name in found)
        return all(name.startswith(left) for name in files)


class Work:
    """A locked folder of ours below `tmp/` of a pool: files grow in it, links in it hold blobs.

    Its lock says that its owner lives. What a dead process left is swept.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        claimed: Claim | None = None
        while claimed is None:  # a sweeper may have been faster between the two steps
            path = pool.tmp / secrets.token_hex(8)
            path.mkdir(0o700)
            with suppress(FileNotFoundError):  # an umask may take even that away
                path.chmod(0o700)
            claimed = claim_folder(path)
        self._claim = claimed
        self._path = os.fspath(claimed.path)

    def __truediv__(self, name: str) -> str:
        """Return the path of a name in it."""
        return f"{self._path}{os.sep}{name}"

    def names(self) -> list[str]:
        """Return what is in it."""
        return os.listdir(self._path)

    def clear(self) -> None:
        """Let go of everything in it."""
        for name in self.names():
            with suppress(FileNotFoundError):
                os.unlink(self / name)

    def close(self) -> None:
        """Remove it with all that is left in it."""
        self._claim.release(remove=True)


def sweep(pool: Pool, needed: set[str]) -> None:
    """Remove the folders of dead processes, but those that have a name somebody is told by."""
    with suppress(FileNotFoundError):
        for name in os.listdir(pool.tmp):
            path = pool.tmp / name
            if not os.path.isdir(path) or os.path.islink(path):
                with suppress(OSError):
                    os.unlink(path)  # half of our mark, after a kill
            elif (claimed := claim_folder(path)) is not None:
                claimed.release(remove=needed.isdisjoint(os.listdir(path)))


def is_blob_name(folder: str, name: str) -> bool:
    """Say whether something in `blobs/<folder>` has the name of a blob."""
    return len(name) == 64 and name[:2] == folder and not name.strip("0123456789abcdef")  # noqa: PLR2004


def listed(folder: Path) -> list[str]:
    """Return what is in a folder of ours, which may not be there yet."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def move_aside(database: Path, bad: Path | None) -> Path:
    """Move a damaged database with its logs to `bad` (without it, they go); return where."""
    target = (bad or database) / f"{database.stem}.{secrets.token_hex(4)}"
    for end in ("-wal", "-shm", "-journal", ""):  # SQLite would apply them to another database
        with suppress(FileNotFoundError):
            if bad is not None and bad.is_dir():
                os.rename(f"{database}{end}", f"{target}{end}")
            else:
                os.unlink(f"{database}{end}")
    return target


def _make_above(path: Path) -> None:
    """Make the folders above a store: this user can enter them, and nobody else write them."""
    if path.is_dir():
        return
    _make_above(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o755)
        path.chmod(path.stat().st_mode & 0o777 | 0o700)


def _is_filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def _folders_in(path: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield Path(entry.path)
