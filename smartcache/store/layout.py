"""Every path under the root of a store, and the version of that tree.

<root>/                     default ~/.cache/smartcache; `<mount>/.smartcache` elsewhere
  format                    "1": the version of this tree; a newer one is refused
  CACHEDIR.TAG              tells backup programs that this is a cache
  index.sqlite3             a memory of what lies below; `verify --rebuild` makes it again
  journal.jsonl             every change made to a user's file that may be undone
  lock, lock.turn           flock: shared around link + row, exclusive to remove; who waits
  leases/<key>              flock: one worker per key
  blobs/<aa>/<digest>       read-only, complete, verified
  sets/<name>/<id>/         artifact sets
  tmp/                      in progress; each file is locked by the process that writes it
  trash/<digest>            removed by `rm`, still undoable; emptied by `prune`
  bad/<digest>.<n>          damaged; moved here, never deleted by itself
  reserve                   1 MiB of nothing, given up when the disk is so full that `prune` fails
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
from smartcache.store.kernel import sync_directory
from smartcache.store.safety import read_own

FORMAT = 1
CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache directory of smartcache.\n"
    "# For information about cache directory tags see https://bford.info/cachedir/\n"
)
_SUBDIRECTORIES = ("blobs", "sets", "tmp", "trash", "bad", "leases")
_LONGEST_PATH = 4096 + 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PRIVATE_MODE = 0o755
_SHARED_MODE = 0o3775
"""Group-writable, sticky (nobody removes another user's files), files keep the group."""


def is_digest(text: str) -> bool:
    """Say whether `text` has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


class Layout:
    """The paths of one store. Making an object touches nothing; `create` and `check` do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.format = root / "format"
        self.tag = root / "CACHEDIR.TAG"
        self.index = root / "index.sqlite3"
        self.journal = root / "journal.jsonl"
        self.lock = root / "lock"
        self.leases = root / "leases"
        self.blobs = root / "blobs"
        self.sets = root / "sets"
        self.tmp = root / "tmp"
        self.trash = root / "trash"
        self.bad = root / "bad"
        self.reserve = root / "reserve"
        self.moved_to = root / "moved-to"
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
            raw = read_own(self.moved_to, _LONGEST_PATH).rstrip(b"\n")
        except FileNotFoundError:
            return None
        except StoreError:
            raise
        except OSError as error:
            raise _unwritable(self.root, error) from error
        if b"\0" in raw or not os.path.isabs(raw) or len(raw) == _LONGEST_PATH:
            hint = "Write the path of the store's new place into it, or remove it if there is none."
            raise StoreFormatError(
                f"{self.moved_to} is damaged: it holds no path", hint=hint, root=self.root
            )
        return Path(os.fsdecode(raw))

    def create(self, *, shared: bool = False) -> None:
        """Make the tree where it is missing. A directory with other contents is refused."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not self.format.exists():
                self._refuse_foreign_directory()
                self._write(self.format, f"{FORMAT}\n")
            for name in _SUBDIRECTORIES:
                self._make_directory(self.root / name, shared=shared)
            if not self.tag.exists():
                self._write(self.tag, CACHEDIR_TAG)
            if shared:
                # Not sticky: `fs.protected_regular` would keep other users from the index.
                self.root.chmod(_SHARED_MODE & ~stat.S_ISVTX)
            sync_directory(self.root)
        except StoreFormatError:
            raise
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def check(self) -> None:
        """Raise unless this is a store of a format this program can read."""
        try:
            text = read_own(self.format, 100).decode("ascii", errors="replace").strip()
        except StoreError:
            raise
        except OSError as error:
            message = f"{self.root} is no smartcache store"
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
        """Make `blobs/<aa>` for a digest, with the mode its parent has."""
        directory = self.blobs / digest[:2]
        directory.mkdir(exist_ok=True)
        directory.chmod(self.blobs.stat().st_mode & 0o7777)
        if sync:
            sync_directory(self.blobs)

    def _refuse_foreign_directory(self) -> None:
        # A process killed while it made the store leaves at most a half-written "format".
        foreign = [name for name in os.listdir(self.root) if not name.startswith(".format-")]
        is_foreign = bool(set(foreign) - {*_SUBDIRECTORIES, "CACHEDIR.TAG", "moved-to"})
        if is_foreign and not self.format.exists():  # another process may have made the store now
            message = f"{self.root} is not empty and is no smartcache store"
            hint = "Set SMARTCACHE_HOME to a new or empty directory."
            raise StoreFormatError(message, hint=hint, root=self.root)

    def _make_directory(self, path: Path, *, shared: bool) -> None:
        try:
            path.mkdir()
        except FileExistsError:
            return
        path.chmod(_SHARED_MODE if shared else _PRIVATE_MODE)

    def _write(self, path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        temporary.write_text(text, encoding="ascii")
        temporary.replace(path)


def _unwritable(root: Path, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return NoSpaceError(f"No space left to make the store {root}", root=root)
    return StoreUnwritableError(f"Cannot use the store {root}: {reason}", root=root)
