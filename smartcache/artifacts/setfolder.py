"""The folder of a set, and the file in it that says which set it is.

    sets/<name>/<id>/
      set.json         name, fingerprint, options; the only file that packs cannot bring back
      index.sqlite3    rows; made again from the packs when it is lost
      00000001.pack    records (records.py); more of them as it grows
      lock, leases/    flock files

A set moves as a folder: nothing in it says where it lies.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from smartcache.artifacts.fingerprint import Fingerprint
from smartcache.artifacts.packs import pack_numbers
from smartcache.errors import (
    ArtifactError,
    BadSetNameError,
    ConfigError,
    NoSpaceError,
    SetFormatError,
    StoreUnwritableError,
)
from smartcache.store.kernel import sync_directory

FORMAT = 1
_FILE = "set.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ID = re.compile(r"[0-9a-f]{32}")
_LARGEST = 1 << 24


def check_name(name: object) -> str:
    """Return the name of a set; BadSetNameError if it cannot be that of a folder everywhere."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name.endswith("."):
        raise BadSetNameError(f"{name!r} cannot be the name of a set", name=name)
    return name


def is_id(text: str) -> bool:
    """Say whether a text has the form of the id of a set."""
    return _ID.fullmatch(text) is not None


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

    @classmethod
    def make(cls, sets: Path, name: str, fingerprint: Fingerprint, options: Options) -> Self:
        """Return the set of a name and a fingerprint, made if it is not there.

        `options` are written if they differ from those of the set.
        """
        path = sets / check_name(name) / fingerprint.id(name)
        try:
            if not (path / _FILE).exists():
                path.mkdir(parents=True, exist_ok=True)
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
            with open(path / _FILE, "rb") as file:
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
            raise SetFormatError(f"{path} is no set: it has no {_FILE}", path=path) from None
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
