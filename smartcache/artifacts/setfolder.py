"""The folder of a set, and the file in it that says which set it is.

    sets/<name>/<id>/
      set.json         name, fingerprint, options; the only file that packs cannot bring back
      index.sqlite3    rows; made again from the packs when it is lost
      00000001.pack    records (records.py); more of them as it grows
      lock, leases/    flock files

A set moves as a folder: nothing in it says where it lies. It belongs to one user, who alone can
write it: folders are 0700 and files 0600, whatever the umask is, and what another user could have
written is not even looked into.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from smartcache.artifacts.fingerprint import Fingerprint
from smartcache.artifacts.packs import SUFFIX, pack_numbers
from smartcache.artifacts.setindex import SetIndex
from smartcache.errors import (
    ArtifactError,
    BadSetNameError,
    ConfigError,
    NoSpaceError,
    SetFormatError,
    StoreUnwritableError,
)
from smartcache.store.filesystems import is_network
from smartcache.store.kernel import sync_directory

FORMAT = 1
_FILE = "set.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ID = re.compile(r"[0-9a-f]{32}")
_LARGEST = 1 << 24
_OURS = re.compile(
    r"set\.json|index\.sqlite3(-wal|-shm|-journal)?|lock(\.turn)?|leases|[0-9]{8}\.pack"
)
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_TO_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def check_name(name: object) -> str:
    """Return the name of a set; BadSetNameError if it cannot be that of a folder everywhere."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name.endswith("."):
        raise BadSetNameError(f"{name!r} cannot be the name of a set", name=name)
    return name


def is_id(text: str) -> bool:
    """Say whether a text has the form of the id of a set."""
    return _ID.fullmatch(text) is not None


def refuse_foreign(found: os.stat_result, path: str | Path) -> None:
    """Refuse what another user has made or could have changed; root gets no exception."""
    if stat.S_ISLNK(found.st_mode):
        hint = "Move what it points to into its place: a set is never followed elsewhere."
        raise SetFormatError(f"{path} is a symlink", hint=hint, path=path)
    if found.st_uid != os.geteuid():
        hint = "Use it as the user who made it, or make a set of your own under another home."
        raise SetFormatError(f"{path} belongs to another user", hint=hint, path=path)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        hint = f"If you trust what is in it, run 'chmod -R go-w {path}'."
        raise SetFormatError(f"{path} can be written by other users", hint=hint, path=path)


def check_folder(path: Path) -> None:
    """Refuse a set that another user could have written to, and what is no file in it.

    That is looked at once: where only its owner can write, nothing else takes a place later. A pack
    that is no file harms nobody: whoever opens it leaves it alone.
    """
    for folder in (path.parent, path):
        found = os.lstat(folder)
        refuse_foreign(found, folder)
        if not stat.S_ISDIR(found.st_mode):
            raise SetFormatError(f"{folder} is not a folder", path=folder)
    for name in filter(_OURS.fullmatch, os.listdir(path)):
        with suppress(FileNotFoundError):  # a log of SQLite, or a pack that was compacted away
            found = os.lstat(path / name)
            is_right = stat.S_ISDIR if name == "leases" else stat.S_ISREG
            if is_right(found.st_mode):
                refuse_foreign(found, path / name)
            elif not name.endswith(SUFFIX):
                kind = "a folder" if name == "leases" else "a regular file"
                hint = "Remove it: smartcache did not make it."
                raise SetFormatError(f"{path / name} is not {kind}", hint=hint, path=path)


def make_private(path: Path) -> None:
    """Make an empty file that nobody else can open, if there is none."""
    with suppress(FileExistsError):
        descriptor = os.open(path, _TO_MAKE, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)


def _make_folder(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o700)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is kept of a set, and for how long."""

    max_size: int | None = None
    """Bytes of records; beyond it the least recently used artifacts go."""
    ttl: float | None = None
    """Seconds from a put after which an artifact is gone; None: never."""
    evictable: bool = True
    """False: nothing goes but what is deleted or past its time."""
    durable: bool = False
    """Every put survives power loss."""

    def __post_init__(self) -> None:
        for name in ("max_size", "ttl"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(f"{name} must be more than 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFolder:
    """One set, as its set.json tells."""

    path: Path
    name: str
    id: str
    fingerprint: Fingerprint
    created_at: datetime
    options: Options

    def pack_numbers(self) -> list[int]:
        """Return the numbers of its packs."""
        return pack_numbers(self.path)

    def open_index(self) -> SetIndex:
        """Open the index, made if it is not there; SetIndexDamagedError if it is none any more."""
        path = self.path / "index.sqlite3"
        try:
            make_private(path)  # before SQLite, which would ask the umask
        except OSError as error:
            raise _unwritable(path, error) from error
        return SetIndex(path, wal=not is_network(self.path))

    @classmethod
    def make(cls, sets: Path, name: str, fingerprint: Fingerprint, options: Options) -> Self:
        """Return the set of a name and a fingerprint, made if it is not there.

        `options` are written if they differ from those of the set.
        """
        path = sets / check_name(name) / fingerprint.id(name)
        try:
            sets.parent.mkdir(parents=True, exist_ok=True)
            for each in (sets, path.parent, path):
                _make_folder(each)
            check_folder(path)
            if not (path / _FILE).exists():
                make_private(path / "lock")
                make_private(path / "lock.turn")
                _make_folder(path / "leases")
                made = cls(
                    path=path, name=name, id=path.name, fingerprint=fingerprint,
                    created_at=datetime.now(UTC).replace(microsecond=0), options=options,
                )  # fmt: skip
                made.write()
            found = cls.read(path)
            if found.fingerprint != fingerprint or found.name != name:
                raise SetFormatError(f"{path} is not the set that its name says", path=path)
            return found
        except OSError as error:
            raise _unwritable(path, error) from error

    def with_options(self, options: Options) -> SetFolder:
        """Return the set with other options, written down."""
        if options == self.options:
            return self
        changed = SetFolder(
            path=self.path, name=self.name, id=self.id, fingerprint=self.fingerprint,
            created_at=self.created_at, options=options,
        )  # fmt: skip
        try:
            changed.write()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return changed

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what a folder says it is; SetFormatError if that makes no sense."""
        try:
            check_folder(path)
            with open(os.open(path / _FILE, _TO_READ), "rb") as file:
                document: Any = json.loads(file.read(_LARGEST))
            version = document["format"]
            if not isinstance(version, int) or version > FORMAT:
                message = f"{path} has format {version!r}; this smartcache reads up to {FORMAT}"
                raise SetFormatError(message, path=path)
            known = {each.name for each in fields(Options)}
            options = {key: value for key, value in document["options"].items() if key in known}
            fingerprint = Fingerprint.from_json(document["fingerprint"])
            name = check_name(document["name"])
            if document["id"] != path.name or fingerprint.id(name) != path.name:
                raise SetFormatError(f"{path} is not the set that its name says", path=path)
            return cls(
                path=path, name=name, id=path.name, fingerprint=fingerprint,
                created_at=datetime.fromisoformat(document["created_at"]),
                options=Options(**options),
            )  # fmt: skip
        except FileNotFoundError:
            raise SetFormatError(f"{path} is not a set: it has no {_FILE}", path=path) from None
        except (ArtifactError, ConfigError):
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SetFormatError(f"{path / _FILE} is damaged: {error!r}", path=path) from error

    def write(self) -> None:
        """Write set.json, in one step."""
        document = {
            "format": FORMAT,
            "name": self.name,
            "id": self.id,
            "created_at": self.created_at.isoformat(),
            "fingerprint": self.fingerprint.to_json(),
            "options": asdict(self.options),
        }
        temporary = self.path / f".{_FILE}-{secrets.token_hex(4)}"
        make_private(temporary)
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / _FILE)
        sync_directory(self.path)


def _unwritable(path: Path, error: OSError) -> Exception:
    import errno

    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return NoSpaceError(f"No space left to make the set {path}", path=path)
    return StoreUnwritableError(f"Cannot use the set {path}: {error.strerror or error}", path=path)
