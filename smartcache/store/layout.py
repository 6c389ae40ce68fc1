"""Every path under the root of a store, the version of that tree, and who may write it: one user.

Directories are 0700 and files 0600, whatever the umask is; blobs are read-only.

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
  catalog                   only in a published store: what others may take, by sha256
  moved-to                  only in a root whose store was moved: the path of the new root
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from smartcache.errors import NoSpaceError, StoreError, StoreFormatError, StoreUnwritableError
from smartcache.store.kernel import effective_user, sync_directory
from smartcache.store.safety import check_own, create_own, read_own

FORMAT = 1
CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache directory of smartcache.\n"
    "# For information about cache directory tags see https://bford.info/cachedir/\n"
)
_SUBDIRECTORIES = ("blobs", "sets", "tmp", "trash", "bad", "leases")
_LONGEST_PATH = 4096 + 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILES = ("format", "index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "journal.jsonl",
          "lock", "lock.turn", "reserve", "moved-to", "catalog")  # fmt: skip


def is_digest(text: str) -> bool:
    """Say whether `text` has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


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
        self.catalog = root / "catalog"
        self._blobs = f"{root}{os.sep}blobs{os.sep}"

    def blob(self, digest: str) -> str:
        """Return the path of a blob, as text: this is on every hot path."""
        return f"{self._blobs}{digest[:2]}{os.sep}{digest}"

    def new_tmp(self, suffix: str = "") -> Path:
        """Return an unused name in `tmp/`."""
        return self.tmp / f"{secrets.token_hex(8)}{suffix}"

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
                self._refuse_foreign_directory()
                self._write(self.format, f"{FORMAT}\n", self.root)
            for name in _SUBDIRECTORIES:
                self._make_directory(self.root / name)
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
        is_published = self.catalog.exists()
        open_to_all = {self.root, self.blobs, self.catalog} if is_published else set()
        for path in (self.root, *(self.root / name for name in (*_SUBDIRECTORIES, *_FILES))):
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

    def is_complete(self) -> bool:
        """Say whether every directory of the tree is there."""
        return all((self.root / name).is_dir() for name in _SUBDIRECTORIES)

    def make_blob_directory(self, digest: str, *, sync: bool = True) -> None:
        """Make `blobs/<aa>` for a digest, with the mode its parent has: it may be published."""
        self._make_directory(self.blobs / digest[:2], self.blobs.stat().st_mode & 0o777)
        if sync:
            sync_directory(self.blobs)

    def _refuse_foreign_directory(self) -> None:
        # A process killed while it made the store leaves at most a half-written "format".
        foreign = [name for name in os.listdir(self.root) if not name.startswith(".format-")]
        is_foreign = bool(set(foreign) - {*_SUBDIRECTORIES, "moved-to"})
        if is_foreign and not self.format.exists():  # another process may have made the store now
            message = f"{self.root} is not empty and is not a smartcache store"
            hint = "Set SMARTCACHE_HOME to a new or empty directory."
            raise StoreFormatError(message, hint=hint, root=self.root)

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
