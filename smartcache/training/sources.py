"""Where the items of a dataset come from: folders, patterns, lists of files, rows.

    Sources("photos", sidecars={"caption": (".txt", ".json:prompt"), "mask": "-mask.png"})

A *source* is a file or a row. What encoders can read of it has names: "file" is the file itself,
the names of `sidecars` are files beside it, and of a row every field.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from smartcache.errors import ConfigError, DatasetError, SourcesVanishedError

Sidecars = Mapping[str, str | Sequence[str]]
FILE: Final = "file"
"""What a source itself is called among what encoders read."""
FIELD: Final = b"/"
"""Between the name of a JSON file and a field of it: no name of a file has it."""
IMAGES: Final = (
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jp2", ".jpeg", ".jpg", ".jxl", ".png", ".tif",
    ".tiff", ".webp",
)  # fmt: skip
_DOT: Final = ord(".")
_MAGIC: Final = frozenset("*?[")
_MOST_REPEATS: Final = 1e6
_PLAIN: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ASCII: Final = json.JSONEncoder(separators=(",", ":"))


Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One folder, pattern or list of sources."""

    root: str = ""
    """The folder, absolute; of rows, what their paths are relative to."""
    pattern: str = ""
    """Which paths below the root are meant; "": all."""
    rows: Sequence[Row] | None = None
    jsonl: str = ""
    """The file that the rows are read from."""
    is_list: bool = False
    """Its sources are rows."""
    suffixes: tuple[str, ...] = ()
    sidecars: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    """Name, and endings with the field of a JSON file, or ""."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    repeats: float = 1.0

    def to_json(self) -> dict[str, object]:
        """Return what is kept of it in dataset.json; its rows are in the table."""
        return {
            "root": self.root, "pattern": self.pattern, "jsonl": self.jsonl,
            "is_list": self.is_list, "suffixes": list(self.suffixes),
            "sidecars": [[name, [list(each) for each in found]] for name, found in self.sidecars],
            "metadata": self.metadata, "repeats": self.repeats,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return what `to_json` was given; ConfigError, or another ValueError, if it was not."""
        if not isinstance(data, Mapping) or type(data.get("is_list")) is not bool:
            raise ConfigError("a source is not described")
        for name in ("root", "pattern", "jsonl"):
            text = data.get(name)
            if not isinstance(text, str) or "\0" in text:
                raise ConfigError(f"{name} of a source is not a path: {text!r:.80}")
            os.fsencode(text)
        _matcher(data["pattern"])
        suffixes, sidecars = data.get("suffixes"), data.get("sidecars")
        if not isinstance(suffixes, list) or not isinstance(sidecars, list):
            raise ConfigError("suffixes and sidecars of a source are lists")
        try:
            named = {
                str(name): [f"{ending}:{field_}" if field_ else ending for ending, field_ in found]
                for name, found in sidecars
            }
        except (TypeError, ValueError) as error:
            raise ConfigError("sidecars of a source are not described") from error
        made = cls(
            root=data["root"], pattern=data["pattern"], jsonl=data["jsonl"],
            is_list=data["is_list"],
            suffixes=_checked_suffixes(suffixes) if suffixes else (),
            sidecars=_checked_sidecars(named), metadata=_checked_metadata(data.get("metadata")),
            repeats=_checked_repeats(data.get("repeats")),
        )  # fmt: skip
        _ = made.relevant  # all names can be those of files
        return made

    @property
    def label(self) -> str:
        """What users know it by."""
        if self.is_list:
            return self.jsonl or "the list"
        return os.path.join(self.root, self.pattern) if self.pattern else self.root

    @property
    def reads(self) -> dict[str, list[bytes]]:
        """What encoders can read of its sources, and the endings of sidecars; of rows, more."""
        return {FILE: []} | {
            name: [
                os.fsencode(ending) + (FIELD + name_.encode() if name_ else b"")
                for ending, name_ in endings
            ]
            for name, endings in self.sidecars
        }

    @property
    def relevant(self) -> dict[bytes, tuple[bytes, ...]]:
        """The suffixes of files that matter, and which fields of such a file are asked for."""
        found: dict[bytes, tuple[bytes, ...]] = {
            os.fsencode(each): (b"",) for each in self.suffixes
        }
        for endings in self.reads.values():
            for ending in endings:
                name, slash, field_ = (b"x" + ending).partition(FIELD)
                suffix = os.path.splitext(name)[1].lower()
                part = slash + field_
                known = found.get(suffix, ())
                found[suffix] = known if part in known else (*known, part)
        return found

    def items(self, folder: bytes, names: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return which files of a folder are items, in order, and sidecars that belong to none.

        Items have the right suffix, fit the pattern, and do not end like a sidecar.
        """
        suffixes = tuple(os.fsencode(each) for each in self.suffixes)
        chosen = [
            name
            for name in names
            if (name.endswith(suffixes) or name.lower().endswith(suffixes))
            and name[0] != _DOT
            and FIELD not in name
        ]
        ends = tuple(
            end
            for ends in self.reads.values()
            for end in ends
            if os.path.splitext(b"x" + end)[1].lower() in suffixes
        )
        orphans: list[bytes] = []
        if ends:
            stems = {name[: name.rfind(b".")] for name in chosen}
            sidecars = [name for name in chosen if name.endswith(ends)]
            chosen = [name for name in chosen if not name.endswith(ends)]
            orphans = [
                name
                for name in sidecars
                if not any(name.endswith(end) and name[: -len(end)] in stems for end in ends)
            ]
        if self.pattern:
            fits = _matcher(self.pattern)
            below = os.path.relpath(os.fsdecode(folder), self.root)
            chosen = [
                name
                for name in chosen
                if fits(os.path.normpath(os.path.join(below, os.fsdecode(name))))
            ]
        chosen.sort()
        return chosen, orphans

    def leads_into(self, folder: bytes) -> bool:
        """Say whether there may be items in a folder, or below it."""
        below = os.path.relpath(os.fsdecode(folder), self.root)
        if not self.pattern or below == ".":
            return True
        steps = self.pattern.split(os.sep)
        for number, name in enumerate(below.split(os.sep)):
            if "**" in steps[number]:
                return True
            if number == len(steps) - 1 or not _matcher(steps[number])(name):
                return False
        return True

    def file_of(self, row: Row) -> bytes | None:
        """Return the path of the file that a row names."""
        path = row.get(FILE, row.get("file_name"))
        if path is None:
            return None
        try:
            if isinstance(path, str) and path and "\0" not in path:
                return os.fsencode(os.path.normpath(os.path.join(self.root, path)))
        except UnicodeEncodeError:  # half a character
            pass
        raise ConfigError(f'"file" of a row of {self.label} is not a path: {path!r}')

    def read_rows(self) -> list[Row]:
        """Return the rows that were given, or read them from their file."""
        if self.rows is not None:
            return list(self.rows)
        rows: list[Row] = []
        try:
            with open(self.jsonl, encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        message = f"{self.jsonl}:{number} is not JSON: {error}"
                        raise DatasetError(message, path=self.jsonl) from error
                    if not isinstance(row, dict):
                        message = f"{self.jsonl}:{number} is not a JSON object"
                        raise DatasetError(message, path=self.jsonl)
                    rows.append(row)
        except FileNotFoundError as error:
            raise SourcesVanishedError(f"There is no file {self.jsonl}", path=self.jsonl) from error
        except (OSError, UnicodeDecodeError) as error:
            raise DatasetError(f"{self.jsonl} cannot be read: {error}", path=self.jsonl) from error
        return rows


class Sources:
    """The sources of a dataset. Several are added with `+`.

    `where` is a folder (with all below it), a pattern (`photos/*.png`, `photos/**/*.jpg`), or a
    list of files. `suffixes` are those of the files that are items; images by default. `sidecars`
    names files beside them by how they end: `.txt` is cat.txt beside cat.png, `-mask.png` is
    cat-mask.png, `.json:prompt` the field "prompt" of cat.json; of several, the first that exists.
    What ends like a sidecar is never an item. `metadata` is what all items are given on their way
    into batches; what each has of its own is said by `Sources.table`. `repeats` is how often each
    item comes in an epoch; 2.5 is twice, and every second time a third time.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        suffixes: str | Iterable[str] = IMAGES,
        sidecars: Sidecars | None = None,
        metadata: Mapping[str, object] | None = None,
        repeats: float = 1.0,
    ) -> None:
        common = {"suffixes": _checked_suffixes(suffixes), **_common(sidecars, metadata, repeats)}
        if isinstance(where, Iterable) and not isinstance(where, (str, bytes, os.PathLike)):
            files = [{FILE: _checked_path(each)} for each in where]
            self.parts: tuple[Part, ...] = (Part(is_list=True, rows=files, **common),)
            return
        path = _checked_path(where)
        root, pattern = path, ""
        if _MAGIC & set(path) and not os.path.exists(path):
            steps = path.split(os.sep)
            first = next(number for number, step in enumerate(steps) if _MAGIC & set(step))
            root, pattern = os.sep.join(steps[:first]) or os.sep, os.sep.join(steps[first:])
            _matcher(pattern)
        self.parts = (Part(root=root, pattern=pattern, **common),)

    @classmethod
    def jsonl(
        cls,
        path: str | os.PathLike[str],
        *,
        sidecars: Sidecars | None = None,
        metadata: Mapping[str, object] | None = None,
        repeats: float = 1.0,
    ) -> Self:
        """Take the rows of a file with one JSON object in every line.

        Encoders can read every field. "file" (or "file_name") is the path of a file, relative to
        the folder that the list is in.
        """
        name = _checked_path(path)
        return cls._of(
            Part(
                root=os.path.dirname(name), jsonl=name, is_list=True,
                **_common(sidecars, metadata, repeats),
            )
        )  # fmt: skip

    @classmethod
    def table(
        cls,
        rows: Iterable[Row],
        *,
        root: str | os.PathLike[str] = "",
        sidecars: Sidecars | None = None,
        metadata: Mapping[str, object] | None = None,
        repeats: float = 1.0,
    ) -> Self:
        """Take rows of plain values: encoders can read every field.

        "file" (or "file_name") is the path of a file, relative to `root`.
        """
        given = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                hint = 'Give a dict for each: {"file": "cat.png", "caption": "a cat"}.'
                raise ConfigError(f"Row {number} is {type(row).__name__}, not a dict", hint=hint)
            if not all(isinstance(name, str) for name in row):
                raise ConfigError(f"Row {number} has a name that is not a text: {row!r}")
            given.append({
                name: os.fspath(each) if isinstance(each, os.PathLike) else each
                for name, each in row.items()
            })  # fmt: skip
        return cls._of(
            Part(
                root=os.path.abspath(os.fspath(root)), rows=given, is_list=True,
                **_common(sidecars, metadata, repeats),
            )
        )  # fmt: skip

    @classmethod
    def _of(cls, *parts: Part) -> Self:
        made = cls.__new__(cls)
        made.parts = parts
        return made

    def __add__(self, other: object) -> Sources:
        """Return both; the items of the first come first."""
        if not isinstance(other, Sources):
            return NotImplemented
        return Sources._of(*self.parts, *other.parts)

    def __repr__(self) -> str:
        return f"<Sources {' + '.join(part.label for part in self.parts)}>"

    def to_json(self) -> list[dict[str, object]]:
        """Return what is kept of them in dataset.json."""
        return [part.to_json() for part in self.parts]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> Self:
        """Return the sources that `to_json` was given; rows are those in the table."""
        return cls._of(*map(Part.from_json, data))


def _common(
    sidecars: Sidecars | None, metadata: Mapping[str, object] | None, repeats: float
) -> dict[str, Any]:
    """Return what every way of naming sources can be given."""
    return {
        "sidecars": _checked_sidecars(sidecars or {}),
        "metadata": _checked_metadata(metadata),
        "repeats": _checked_repeats(repeats),
    }


def _checked_path(path: object) -> str:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        hint = "Name a folder, a pattern such as photos/*.png, or a list of files."
        raise ConfigError(f"{path!r} is not a path", hint=hint)
    return os.path.abspath(text)


def _checked_suffixes(suffixes: str | Iterable[object]) -> tuple[str, ...]:
    found = []
    for each in (suffixes,) if isinstance(suffixes, str) else tuple(suffixes) or ("",):
        if not isinstance(each, str) or not re.fullmatch(r"\.[^./]+", each):
            raise ConfigError(f"{each!r} is not a suffix", hint='Write it as ".png".')
        found.append(each.lower())
    return tuple(found)


def _checked_sidecars(sidecars: object) -> tuple[Any, ...]:
    hint = 'Write how its name ends: {"caption": ".txt", "mask": "-mask.png"}, or ".json:prompt".'
    if not isinstance(sidecars, Mapping):
        raise ConfigError(f"sidecars is a dict, not {sidecars!r}", hint=hint)
    found = []
    for name, given in sidecars.items():
        if name == FILE:
            raise ConfigError('A sidecar cannot be called "file": that is the source itself')
        endings = []
        several = isinstance(given, Iterable) and not isinstance(given, str)
        for text in given if several else (given,):
            ending, _, field_ = text.partition(":") if isinstance(text, str) else ("", "", "")
            suffix = os.path.splitext(f"x{ending}")[1]
            if not suffix or {os.sep, "\0"} & set(ending) or (field_ and suffix.lower() != ".json"):
                raise ConfigError(f"{text!r} cannot be a sidecar", hint=hint)
            endings.append((ending, field_))
        found.append((name, tuple(endings)))
    return tuple(found)


def _checked_metadata(metadata: object) -> dict[str, object]:
    """Return metadata that all items have; a row has its own in its fields."""
    values = {} if metadata is None else metadata
    if not isinstance(values, Mapping):
        hint = 'Write {"weight": 0.5}; for a row, put it into the row.'
        raise ConfigError(f"metadata is a dict, not {metadata!r}", hint=hint)
    plain: dict[str, object] = json.loads(plain_text(dict(values), "metadata"))
    return plain


def _checked_repeats(repeats: object) -> float:
    if (
        not isinstance(repeats, (int, float))
        or isinstance(repeats, bool)
        or not 0 <= repeats < _MOST_REPEATS
    ):
        raise ConfigError(f"repeats is a number from 0 on, not {repeats!r}")
    return float(repeats)


def _matcher(pattern: str) -> Callable[[str], object]:
    """Return what says whether a path fits a pattern: ** stands for folders, * stops at one."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = "".join(
        words.get(piece) or (piece.replace("[!", "[^") if piece[:1] == "[" else re.escape(piece))
        for piece in pieces
    )
    try:
        return re.compile(text, re.DOTALL).fullmatch
    except re.error as error:
        hint = "Write [a-z] for a range of letters."
        raise ConfigError(f"{pattern!r} is not a pattern: {error}", hint=hint) from error


def plain_text(value: object, what: str) -> str:
    """Return plain values as JSON; ConfigError if they are not plain."""
    try:
        text = _PLAIN.encode(value)
        return text if text.isascii() or _is_unicode(text) else _ASCII.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Only texts, numbers, True, False, None, and lists and dicts of these are kept."
        raise ConfigError(f"The {what} cannot be kept: {error}", hint=hint) from error


def _is_unicode(text: str) -> bool:
    """Say whether a text has no half characters, as names of files have that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
