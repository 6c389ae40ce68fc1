"""The folder of a set, and the file in it that says which set it is.

    sets/<name>/<id>/
      set.json         name, fingerprint, options; the only file that packs cannot bring back
      index.sqlite3    failures and uses; no artifact is lost with it
      <16 hex>.pack    records (engine/records.py); more of them as it grows
      <16 hex>.far     a pack that lies in a tier (engine/far.py); far/ has what was read of them
      lock, leases/    flock files

A set moves as a folder: nothing in it says where it lies. It belongs to one user, who alone can
write it: folders are 0700 and files 0600, whatever the umask is, and what another user could have
written is not even looked into.

A set belongs to a name and a fingerprint: what all its artifacts depend on besides their own input.
Any other value or type anywhere in it is another set; the order of dicts does not count. It has the
types of JSON and no others, so that set.json shows it as it is.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, Self

from blake3 import blake3

from smartcache.artifacts.values.compression import check_rule
from smartcache.artifacts.values.refusals import (
    RefusedError,
    explain,
    path_text,
    shown,
    with_article,
)
from smartcache.errors import (
    ArtifactError,
    BadSetNameError,
    ConfigError,
    SetFormatError,
    UnsupportedValueError,
)
from smartcache.system.faults import reached
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import claim
from smartcache.system.ownfiles import atomically, unwritable

FORMAT = 2
FILE = "set.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ID = re.compile(r"[0-9a-f]{32}")
_INSTANCE = re.compile(r"[0-9a-f]{16}")
_LARGEST = 1 << 24
_OURS = re.compile(
    r"set\.json|index\.sqlite3(-wal|-shm|-journal)?|lock|leases|far|[0-9a-f]{16}\.(pack|far)"
)
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DOMAIN: Final = b"smartcache artifact set 2\0"
_MAX_DEPTH: Final = 100
_MOST_BITS: Final = 2048
"""Of an integer: Python can be told to turn no more than 640 digits into a text or back."""
_HINTS: Final[dict[type, str]] = {
    tuple: "Put a list: list(value).",
    bytes: "Put a text: value.hex().",
    set: "Put a list: sorted(value).",
}
_UNITS: Final = {
    "max_size": "It is in bytes: 10**9 is a gigabyte.",
    "ttl": "It is in seconds, or a timedelta.",
    "unused_for": "It is in seconds, or a timedelta.",
}
_PAUSE = 0.005
"""Seconds between two looks at whether another process has made the set."""
_MOST: Final = sys.float_info.max
_TO_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def check_name(name: object) -> str:
    """Return the name of a set; BadSetNameError if it cannot be that of a folder everywhere."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name.endswith("."):
        raise BadSetNameError(f"{name!r:.120} cannot be the name of a set", name=name)
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
            is_right = stat.S_ISDIR if name in ("leases", "far") else stat.S_ISREG
            if is_right(found.st_mode):
                refuse_foreign(found, path / name)
            elif not name.endswith(".pack"):
                kind = "a folder" if name in ("leases", "far") else "a regular file"
                hint = "Remove it: smartcache did not make it."
                raise SetFormatError(f"{path / name} is not {kind}", hint=hint, path=path)


def check_option(name: str, value: object) -> None:
    """Refuse a size, a count or a time to live that is not a number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and value > 0) or _MOST < value < inf:  # type: ignore[operator]
        message = f"{name} must be a number above 0, not {value!r:.80}"
        raise ConfigError(message, hint=_UNITS.get(name))


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


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final = _Absent()
"""Stands in a `Difference` for what one of the two does not have."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place at which two fingerprints differ; `ABSENT` where one of them has nothing."""

    path: str
    mine: object
    theirs: object

    def __str__(self) -> str:
        return f"{self.path}: {shown(self.mine)} / {shown(self.theirs)}"


class Fingerprint:
    """A mapping of plain values that does not change, and is equal to another exactly."""

    __slots__ = ("_text", "_values")

    def __init__(self, values: dict[str, object]) -> None:
        """Take values that are plain already: use `of`."""
        self._values = values
        self._text = _canonical(values)

    @classmethod
    def of(cls, mapping: Mapping[str, object]) -> Self:
        """Return the fingerprint of a mapping; it is copied.

        None, bool, int, finite float, str, and lists and dicts of them; a torch dtype counts as its
        name, "torch.float16". UnsupportedValueError, with the path, for others.
        """
        if not isinstance(mapping, Mapping):
            reason = f"{with_article(type(mapping).__qualname__)} cannot be a fingerprint"
            hint = 'Put a dict of what all artifacts depend on: {"vae": digest, "size": 512}.'
            raise UnsupportedValueError(reason, hint=hint, path="")
        values = dict(mapping)
        try:
            return cls(_plain_dict(values, _MAX_DEPTH))
        except RefusedError as refused:
            raise explain(refused, values) from None

    @property
    def values(self) -> dict[str, object]:
        """A copy of the mapping."""
        return deepcopy(self._values)

    def id(self, name: str) -> str:
        """Return the id of the set of this name and fingerprint: 32 hexadecimal characters."""
        return blake3(_DOMAIN + _canonical(name) + b"\n" + self._text).hexdigest()[:32]

    def to_json(self) -> dict[str, object]:
        """Return the fingerprint as what `json` can write."""
        return self.values

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the fingerprint that `to_json` gave; SetFormatError if it is anything else."""
        if not isinstance(data, dict):
            raise SetFormatError("the fingerprint is not a dict")
        try:
            return cls.of(data)
        except UnsupportedValueError as error:
            raise SetFormatError(f"the fingerprint is malformed: {error.message}") from None

    def differences(self, other: Fingerprint) -> list[Difference]:
        """Return where the two differ, as deep inside as can be told; none if they are equal."""
        found: list[Difference] = []
        _compare([], self._values, other._values, found)
        return found

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Fingerprint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return f"Fingerprint({self._values!r})"

    def __str__(self) -> str:
        """Return it in one line: `dtype="float16", size=1024`."""
        return ", ".join(f"{path_text([key])}={shown(v)}" for key, v in self._values.items())


def _canonical(value: object) -> bytes:
    """Return JSON that is the same for equal values, and for no others: 1 is not 1.0 nor true."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return text.encode("utf-8", "surrogatepass")


def _plain(value: object, depth: int) -> object:
    """Return a copy of a value of JSON types; RefusedError for anything that JSON cannot keep."""
    if type(value) is dict:
        return _plain_dict(value, depth)
    if type(value) is list:
        return _plain_list(value, depth)
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is getattr(torch, "dtype", None):
        return str(value)
    _check_scalar(value)
    return value


def _check_scalar(value: object) -> None:
    cls = type(value)
    if cls not in (type(None), bool, int, float, str):
        hint = _HINTS.get(cls, "Put plain values: those that the artifacts depend on.")
        kind = with_article(cls.__qualname__)
        raise RefusedError(f"{kind} cannot be part of a fingerprint", hint=hint)
    if isinstance(value, float) and not isfinite(value):
        raise RefusedError(f"JSON has no number {value}", hint=f'Put None, or the text "{value}".')
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise RefusedError("an integer of that many digits", hint="Put a text: hex(value).")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            reason, hint = ("a text that is not valid Unicode", "Put ascii(text).")
            raise RefusedError(reason, hint=hint) from None


def _plain_list(value: list[object], depth: int) -> list[object]:
    if not depth:
        raise RefusedError(f"nested more than {_MAX_DEPTH} deep", too_deep=True)
    found: list[object] = []
    for index, item in enumerate(value):
        try:
            found.append(_plain(item, depth - 1))
        except RefusedError as refused:
            refused.within(index)
            raise
    return found


def _plain_dict(value: dict[Any, object], depth: int) -> dict[str, object]:
    if not depth:
        raise RefusedError(f"nested more than {_MAX_DEPTH} deep", too_deep=True)
    found: dict[str, object] = {}
    for key, item in value.items():
        if type(key) is not str:
            reason = f"the key {shown(key)} is not a text"
            raise RefusedError(reason, hint="Use a text as the key: str(key).")
        try:
            _check_scalar(key)
            found[key] = _plain(item, depth - 1)
        except RefusedError as refused:
            refused.within(key)
            raise
    return found


def _compare(path: list[object], mine: object, theirs: object, found: list[Difference]) -> None:
    """Add the differences of two plain values: of dicts by key, of lists of one length."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys((*mine, *theirs)):
            _compare([*path, key], mine.get(key, ABSENT), theirs.get(key, ABSENT), found)
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            _compare([*path, index], one, other, found)
    elif mine is ABSENT or theirs is ABSENT or _canonical(mine) != _canonical(theirs):
        found.append(Difference(path_text(path), mine, theirs))


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
    unused_for: float | None = None
    """Seconds from the last use after which an artifact is gone; None: never."""
    compression: str | Mapping[str, str] = "none"
    """How what is put is compressed: one word, or one for each field."""

    def __post_init__(self) -> None:
        for name in _UNITS:
            if getattr(self, name) is not None:
                check_option(name, getattr(self, name))
        if {type(self.evictable), type(self.durable)} != {bool}:
            raise ConfigError("evictable and durable are True or False")
        check_rule(self.compression)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return what set.json says; options of another release are left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFolder:
    """One set, as its set.json tells."""

    path: Path
    name: str
    id: str
    instance: str
    """Random, from when the folder was made: tells packs of its own from those of a copy."""
    fingerprint: Fingerprint
    created_at: datetime
    options: Options

    @classmethod
    def make(cls, sets: Path, name: str, fingerprint: Fingerprint, options: Options) -> Self:
        """Return the set of a name and a fingerprint; one that is not there is made with `options`.

        It is made beside, and gets its name when it is whole.
        """
        path = sets / check_name(name) / fingerprint.id(name)
        try:
            if not (path / FILE).exists():
                sets.parent.mkdir(parents=True, exist_ok=True)
                for each in (sets, path.parent):
                    _make_folder(each)
                # Whoever comes first decides: with two instances, one would disown its packs.
                while (holder := claim(path.with_name(f".{path.name}.lock"))) is None:
                    time.sleep(_PAUSE)
                try:
                    if not (path / FILE).exists():
                        cls._make(path, name, fingerprint, options)
                finally:
                    holder.release()
            found = cls.read(path)
            if found.fingerprint != fingerprint or found.name != name:
                raise SetFormatError(f"{path} is not the set that its name says", path=path)
            return found
        except OSError as error:
            raise unwritable(f"Cannot use the set {path}", path, error) from error

    @classmethod
    def _make(cls, path: Path, name: str, fingerprint: Fingerprint, options: Options) -> None:
        new = path.with_name(f".{path.name}.new")
        shutil.rmtree(new, ignore_errors=True)  # of a killed process
        place = path if path.exists() else new  # only set.json may be gone
        _make_folder(place)
        check_folder(place)
        make_private(place / "lock")
        _make_folder(place / "leases")
        reached("set: begun")
        cls(
            path=place, name=name, id=path.name, instance=secrets.token_hex(8),
            fingerprint=fingerprint, options=options,
            created_at=datetime.now(UTC).replace(microsecond=0),
        ).write()  # fmt: skip
        reached("set: written")
        if place == new:
            new.rename(path)
            sync_directory(path.parent)
        reached("set: named")

    def with_options(self, options: Options) -> SetFolder:
        """Return the set with other options, written down."""
        if options == self.options:
            return self
        changed = replace(self, options=options)
        try:
            changed.write()
        except OSError as error:
            raise unwritable(f"Cannot use the set {self.path}", self.path, error) from error
        return changed

    @classmethod
    def read(cls, path: Path, *, read_only: bool = False) -> Self:
        """Read what a folder says it is; SetFormatError if that makes no sense.

        To be read only, it may belong to another user: nothing in it is trusted.
        """
        try:
            if not read_only:
                check_folder(path)
            with open(os.open(path / FILE, _TO_READ), "rb") as file:
                document: Any = json.loads(file.read(_LARGEST))
            version = document["format"]
            if version == 1:
                hint = "Remove it with 'smartcache artifacts rm {}/{}', then compute it again."
                raise SetFormatError(
                    f"{path} was made by an older smartcache (format 1)",
                    hint=hint.format(path.parent.name, path.name), path=path,
                )  # fmt: skip
            if version != FORMAT:
                message = (
                    f"{path} has format {version!r:.80}; this smartcache reads format {FORMAT}"
                )
                raise SetFormatError(message, path=path)
            fingerprint = Fingerprint.from_json(document["fingerprint"])
            name = check_name(document["name"])
            if document["id"] != path.name or fingerprint.id(name) != path.name:
                raise SetFormatError(f"{path} is not the set that its name says", path=path)
            if _INSTANCE.fullmatch(document["instance"]) is None:
                raise SetFormatError(f"{path / FILE} names no instance", path=path)
            return cls(
                path=path, name=name, id=path.name, instance=document["instance"],
                fingerprint=fingerprint,
                created_at=datetime.fromisoformat(document["created_at"]),
                options=Options.from_json(document["options"]),
            )  # fmt: skip
        except FileNotFoundError:
            hint = "Open it with its name and fingerprint, which makes the file again."
            raise SetFormatError(
                f"{path} is not a set: it has no {FILE}", hint=hint, path=path
            ) from None
        except ArtifactError:
            raise
        except (
            ConfigError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise SetFormatError(f"{path / FILE} is damaged: {error!r:.200}", path=path) from error

    def write(self) -> None:
        """Write set.json, in one step."""
        document = {
            "format": FORMAT,
            "name": self.name,
            "id": self.id,
            "instance": self.instance,
            "created_at": self.created_at.isoformat(),
            "fingerprint": self.fingerprint.to_json(),
            "options": asdict(self.options),
        }
        with atomically(self.path / FILE) as file:
            file.write(json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")
