"""Look at sources: what there is, and what is in it, known again in a blink.

Each of the things that encoders read is known by the digest of its content, so a moved or renamed
file is the same file, and equal captions are one caption. Looking again is a scandir of every
folder and a stat of every file; only what has another stat key than the table says is read, and
only rows that differ are written. A file that was changed in the seconds before it was read is read
again the next time: its stat key might not tell.

Texts count by their words: without the white space around them, as UTF-8. They are kept in the
table, each once, so that a dataset can be used without its sources.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from blake3 import blake3

from smartcache.errors import ConfigError, DatasetError, SourcesVanishedError, StoreError
from smartcache.progress import Job, Progress, silent
from smartcache.system.hashing import hash_file, hash_many
from smartcache.system.kernel import RACY_NS
from smartcache.system.locks import store_lock
from smartcache.training.sources import FIELD, FILE, IMAGES, Part, Row, Sources, plain_text
from smartcache.training.table import (
    ABSENT,
    BLOCK,
    EDITED,
    MEMO,
    NEW,
    NOTHING,
    PROBLEM,
    RACY,
    STAT,
    UNKNOWN,
    SourceTable,
    digest_of,
    flags_of,
    is_unsized,
    memo,
    packed,
)

_log = logging.getLogger(__name__)
Column = np.ndarray[Any, np.dtype[Any]]
_TEXTS: Final = frozenset((b".txt", b".caption", b".captions", b".tags", b".md"))
"""Suffixes of files that are read as text; fields of JSON files are, too."""
_DOT: Final = ord(".")
_ORIENTATION: Final = 0x112
"""The number of the EXIF field that says how an image is to be shown."""
_TURNED: Final = range(5, 9)
"""Its values for images on their side."""
_BY_PILLOW: Final = (".avif", ".heic", ".heif", ".jxl")
"""Images that imagesize does not always understand."""
_SIGNS: Final = (b"eXIf", b"EXIF", b"Raw profile type ", b"XML:com.adobe.xmp", b"XMP ")
"""What a PNG or a WebP has in it that may be shown on its side, which imagesize does not tell."""
_UNKNOWN_FILE: Final = memo(NOTHING, NOTHING, (UNKNOWN, 0), PROBLEM)
"""The memo of a file that nobody has looked at."""
_ZERO: Final = bytes(4)
_STEP: Final = 1.0
"""Seconds of reading after which what is known is written down: a killed process loses no more."""


@dataclass(slots=True)
class Remembered:
    """What a table knows of a few sources, on its way to another process."""

    files: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    texts: dict[bytes, str] = field(default_factory=dict)

    def file(self, folder: int, name: bytes) -> bytes:
        """Return what is remembered of a file."""
        return self.files.get((folder, name), ABSENT)

    def text(self, digest: bytes) -> str | None:
        """Return a text by its digest."""
        return self.texts.get(digest)


@dataclass(slots=True)
class Listing:
    """All sources as columns, in the order of their items."""

    table: SourceTable | Remembered
    parts: tuple[Part, ...]
    folders: list[_Folder] = field(default_factory=list)
    folder: array[int] = field(default_factory=lambda: array("i"))
    """Of each source, in `folders`; -1: it is a row without a file."""
    part: array[int] = field(default_factory=lambda: array("i"))
    row: array[int] = field(default_factory=lambda: array("i"))
    """Its number in a list."""
    rows: dict[int, Sequence[bytes]] = field(default_factory=dict)
    """By part: the rows of lists, as JSON. They are kept here: another process may
    look at another version of a list meanwhile, and then numbers mean other rows."""
    names: Sequence[bytes] = field(default_factory=list)
    """The names of files; of rows without one, their own names."""
    reads: dict[str, Column] = field(default_factory=dict)
    """By what encoders read: the digests. Nothing but zeros: the source has no such thing."""
    found: dict[str, Sequence[bytes]] = field(default_factory=dict)
    """The names of the files of sidecars; empty: there is none."""
    size: Column = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Width and height; 0: unknown."""
    states: dict[str, Column] = field(default_factory=dict)
    """By what encoders read: the flags of the table."""
    problems: dict[int, str] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    """Since the last look: added, edited, moved, renamed, removed."""
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    def add(self, folder: _Folder | None, part: int, names: list[bytes], row: int = 0) -> None:
        """Add sources of one folder, or one row."""
        where = -1
        if folder is not None:
            if folder.place < 0:
                folder.place = len(self.folders)
                self.folders.append(folder)
            where = folder.place
        cast("list[bytes]", self.names).extend(names)
        self.folder.extend([where] * len(names))
        self.part.extend([part] * len(names))
        self.row.extend([row] * len(names))

    def path(self, number: int, read: str = FILE) -> Path | None:
        """Return the path of a file; None: it is not in a file."""
        name = self.names[number] if read == FILE else self.found[read][number]
        if not name or self.folder[number] < 0:
            return None
        folder = self.folders[self.folder[number]].path
        return Path(os.fsdecode(os.path.join(folder, _base_of(name))))

    def name(self, number: int) -> str:
        """Return what users know a source by: its path below the folder of the sources."""
        name = self.names[number]
        if self.folder[number] < 0:
            return name.decode("utf-8", "replace")
        path = os.path.join(self.folders[self.folder[number]].path, name)
        return _name_below(self.parts[self.part[number]].root, path)

    def values(self, number: int) -> dict[str, Any]:
        """Return the metadata of a source, and the fields of a row."""
        part = self.parts[self.part[number]]
        row = json.loads(self.rows[self.part[number]][self.row[number]]) if part.is_list else {}
        return {**part.metadata, **row}

    def values_of(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the same of many sources; of rows, all at once."""
        if len(self.parts) > 1 or not self.parts[0].is_list:
            return [self.values(number) for number in numbers]
        rows = self.rows[0]
        lines = b",".join([rows[self.row[number]] for number in numbers])
        return [{**self.parts[0].metadata, **row} for row in json.loads(b"[" + lines + b"]")]

    def has(self, number: int, read: str) -> bool:
        """Say whether a source has something to read."""
        return bool(self.reads[read][number].any())

    def is_file(self, number: int, read: str) -> bool:
        """Say whether what is read is a file, and neither a text nor a value of a row."""
        name = self.names[number] if read == FILE else self.found[read][number]
        return bool(name) and self.folder[number] >= 0 and not _is_text(name)

    def stat(self, number: int, read: str) -> bytes:
        """Return the stat key of what was read; nothing, if the table knows of another content."""
        name = self.names[number] if read == FILE else self.found[read][number]
        known = self.table.file(self.folders[self.folder[number]].number, name)
        return known[:32] if digest_of(known) == self.reads[read][number].tobytes() else NOTHING

    def is_current(self, number: int, read: str) -> bool:
        """Say whether a file has the content that was read of it; OSError if it cannot be read.

        Its stat key says so, or else its content: on another machine, the same file or a copy of
        it has a stat key of its own.
        """
        path = self.path(number, read)
        if path is None:
            return False
        if stat_key(path) == self.stat(number, read):
            return True
        digest: bytes = self.reads[read][number].tobytes()
        if self.is_file(number, read):
            return bytes.fromhex(hash_file(path)[0].digest) == digest
        name = self.names[number] if read == FILE else self.found[read][number]
        text = _read_text(self.folders[self.folder[number]].path, name)[1]
        return text is not None and text_digest(text) == digest

    def value(self, number: int, read: str) -> object:
        """Return a text, or the value of a row, as it was when it was looked at."""
        text = self.table.text(self.reads[read][number].tobytes())
        return self.values(number)[read] if text is None else text

    def excerpt(self, numbers: Sequence[int], reads: Iterable[str]) -> Listing:
        """Return some of the sources, and what encoders may ask of them, for another process.

        It has what the table knows of them, and no table.
        """
        known = Remembered()
        parts = tuple(replace(part, rows=None) for part in self.parts)
        made = Listing(known, parts, size=self.size[list(numbers)])
        made.reads = {read: self.reads[read][list(numbers)] for read in reads}
        made.found = {read: [self.found[read][each] for each in numbers] for read in made.reads
                      if read != FILE}  # fmt: skip
        folders: dict[int, _Folder] = {}
        for at, number in enumerate(numbers):
            part, name, folder = self.part[number], self.names[number], None
            if self.folder[number] >= 0:
                there = self.folders[self.folder[number]]
                folder = folders.setdefault(there.number, _Folder(there.path, there.number, {}))
            if parts[part].is_list:
                rows = cast("list[bytes]", made.rows.setdefault(part, []))
                rows.append(self.rows[part][self.row[number]])
            made.add(folder, part, [name], len(made.rows.get(part, ())) - 1)
            for read in made.reads:
                digest = self.reads[read][number].tobytes()
                beside = name if read == FILE else self.found[read][number]
                if beside and folder is not None:
                    known.files[folder.number, beside] = self.table.file(folder.number, beside)
                if digest != NOTHING and not made.is_file(at, read):
                    text = self.table.text(digest)
                    if text is not None:
                        known.texts[digest] = text
        return made

    @property
    def repeats(self) -> Column:
        """How often each source comes in an epoch."""
        each: Column = np.array([part.repeats for part in self.parts]).take(
            np.frombuffer(self.part, "i4")
        )
        return each


class _Names(Sequence[bytes]):
    """Names in one piece: as a list of objects they would take five times the memory."""

    __slots__ = ("_data", "_ends")

    def __init__(self, names: Sequence[bytes]) -> None:
        self._data = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: Any) -> Any:  # noqa: ANN401 - no slices are asked for
        if number < 0:
            raise IndexError(number)
        return self._data[self._ends.item(number) : self._ends.item(number + 1)]


def stat_key(path: str | Path) -> bytes:
    """Return the stat key of a file as the table has it."""
    return packed(os.stat(path))


def text_digest(text: str) -> bytes:
    """Return the digest of a text."""
    return blake3(text.encode("utf-8", "surrogatepass")).digest()


def value_digest(value: object, name: str) -> bytes:
    """Return the digest of a value of a row; a text counts as the same text in a file."""
    if isinstance(value, str):
        return text_digest(value)
    return blake3(b"\xff" + plain_text(value, name).encode()).digest()  # no text begins so


class _Folder:
    """What is in one folder now, and what was remembered of it."""

    __slots__ = ("found", "known", "number", "path", "place", "unread")

    def __init__(self, path: bytes, number: int, known: dict[bytes, bytes]) -> None:
        self.path = path
        self.number = number
        """In the table; 0: it is new."""
        self.place = -1
        """In the listing; -1: it has no items."""
        self.known = known
        self.found: dict[bytes, bytes] = {}
        """By name: what is remembered of a file, if it is as it was; else its stat key alone."""
        self.unread: list[bytes] = []


def look(
    table: SourceTable,
    sources: Sources,
    reads: Iterable[str],
    *,
    sizes: bool = False,
    trust: bool = False,
    force: bool = False,
    threads: int = 2,
    progress: Progress = silent,
) -> Listing:
    """Say what there is now; what is new or has changed is read, and remembered.

    `sizes`: the sizes of images are needed. With `trust` nothing is looked at: what is remembered
    is what there is. SourcesVanishedError if there is nothing at all where there was something
    before: a drive may not be mounted. Nothing is forgotten then. `force` takes it that it was
    removed on purpose.
    """
    found = _Look(table, sources.parts, tuple(reads), threads, progress)
    found.sizes, found.trust, found.force = sizes, trust, force
    return found.run()


class _Lost:
    """Files that are not where they were: some of them may be elsewhere now."""

    def __init__(self) -> None:
        self.memos: dict[tuple[bytes, bytes], bytes] = {}
        """By folder and name."""
        self._places: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def add(self, path: bytes, name: bytes, known: bytes) -> None:
        """Note what is remembered of a file that is gone."""
        self.memos[path, name] = known
        if not flags_of(known) & (RACY | PROBLEM):
            self._places.setdefault(known[:32] + _kind_of(name), []).append((path, name))
        if digest_of(known) != NOTHING:
            self._places.setdefault(digest_of(known), []).append((path, name))

    def take(self, clue: bytes) -> tuple[bytes, bytes] | None:
        """Return the folder and the memo of one of them, each once, by its digest.

        Or by its stat key and its kind: then neither its bytes nor its inode have changed.
        """
        places = self._places.get(clue, [])
        while places:
            place = places.pop()
            if (known := self.memos.pop(place, None)) is not None:
                return place[0], known
        return None


class _Look:
    """One look at all sources."""

    def __init__(
        self,
        table: SourceTable,
        parts: tuple[Part, ...],
        reads: tuple[str, ...],
        threads: int,
        progress: Progress,
    ) -> None:
        self.table = table
        self.parts = parts
        self.reads = reads
        self.sizes = self.trust = self.force = False
        self.threads = threads
        self.progress = progress
        self.version = table.version()
        self.numbers = table.folders()
        self.folders: dict[bytes, _Folder] = {}
        self.rows: dict[int, list[Row]] = {}
        self.blocks: dict[int, list[str]] = {}
        """The same, as the table has them."""
        self.stamps: dict[int, str | None] = {}
        """Of lists that are new or may have changed: what is to be kept of their files."""
        self.lost = _Lost()
        self.changes: Counter[str] = Counter()
        self.counted: set[tuple[bytes, bytes]] = set()
        self.moved: Counter[bytes] = Counter()
        """By folder: how many files that it had are elsewhere now."""
        self.problems: dict[tuple[int, bytes], str] = {}

    def run(self) -> Listing:
        """Look, read what has changed, and put it all together."""
        with self.progress("Looking") as job:
            for number, part in enumerate(self.parts):
                if part.is_list:
                    self._list_rows(number, part, job)
                elif self.trust:
                    for path in _below(self.numbers, part):
                        folder = self._folder(path)
                        folder.found = folder.known
                else:
                    self._walk(part, job)
        if not self.trust:
            for number, stamp in self.stamps.items():
                self.table.set_rows(number, self.blocks[number], stamp)
            self.table.drop_rows(self.rows)
            self._take_note()
        self.problems = self.table.problems()
        return self._listing()

    # listing

    def _folder(self, path: bytes) -> _Folder:
        found = self.folders.get(path)
        if found is None:
            number = self.numbers.get(path, 0)
            known = self.table.files(number) if number else {}
            found = self.folders[path] = _Folder(path, number, known)
        return found

    def _is_known(self, known: bytes, key: bytes) -> bool:
        """Say whether what is remembered of a file holds for what has this stat key."""
        return (
            known.startswith(key)
            and not flags_of(known) & RACY
            and not (self.sizes and is_unsized(known))
        )

    def _walk(self, part: Part, job: Job) -> None:
        """List a folder and all below it; links to folders are followed, once."""
        relevant = part.relevant
        root = os.fsencode(part.root)
        ahead = [root]
        been: set[tuple[int, int]] = set()
        count = 0
        while ahead:
            path = ahead.pop()
            try:
                here = os.stat(path)
                if (here.st_dev, here.st_ino) in been:
                    continue
                been.add((here.st_dev, here.st_ino))
                folder = self._folder(path)
                if part.pattern:
                    ahead += self._scan_fitting(folder, part)
                else:
                    ahead += self._scan(folder, relevant)
            except OSError as error:
                if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                    if path != root or self.force:  # it was removed meanwhile
                        continue
                    raise self._vanished(part) from error
                where = os.fsdecode(path)
                reason = error.strerror or error
                raise DatasetError(f"{where} cannot be listed: {reason}", path=where) from error
            count += len(folder.found)
            job.advance(len(folder.found))
        if not count and not self.force and self._count_below(part):
            raise self._vanished(part)

    def _count_below(self, part: Part) -> int:
        """Return how many files are remembered, those of folders that have vanished included."""
        there = (len(self.table.files(self.numbers[path])) for path in _below(self.numbers, part))
        gone = self.table.gone()
        return sum(there) + sum(gone[path] for path in _below(gone, part))

    def _scan(  # noqa: C901, PLR0912 - one loop, once for every file: calls would cost more than they do
        self, folder: _Folder, relevant: dict[bytes, tuple[bytes, ...]]
    ) -> list[bytes]:
        """List one folder: one scandir, and one stat for each file that may matter."""
        below: list[bytes] = []
        found, known, unread = folder.found, folder.known, folder.unread
        pack, is_known, any_size = STAT.pack, self._is_known, not self.sizes
        # Of most files nothing has changed: where no file has several fields, that is seen first.
        quick = known if set(relevant.values()) == {(b"",)} else {}
        with os.scandir(folder.path) as entries:
            for entry in entries:
                name = entry.name
                memo_ = quick.get(name)
                if (
                    memo_ is not None
                    and not memo_[-4] & RACY
                    and (any_size or memo_[64:68] != _ZERO)
                ):
                    try:
                        st = entry.stat()
                        key = pack(st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino)
                        if memo_.startswith(key):
                            found[name] = memo_
                            continue
                    except (OSError, struct.error):
                        pass  # below
                wanted = relevant.get(name[name.rfind(b".") :].lower())
                if wanted is None or name[0] == _DOT:  # hidden
                    if name[0] != _DOT and _is_folder(entry):
                        below.append(entry.path)
                    continue
                try:
                    st = entry.stat()
                    key = pack(st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino)
                except struct.error:  # a time after the year 2262
                    key = packed(st)
                except OSError:  # a link that leads nowhere: opening it says why
                    key = NOTHING
                else:
                    if not stat.S_ISREG(st.st_mode):
                        if stat.S_ISDIR(st.st_mode):
                            below.append(entry.path)
                        continue
                for part in wanted:
                    each = name + part if part else name
                    memo_ = known.get(each)
                    if memo_ is not None and is_known(memo_, key):
                        found[each] = memo_
                    else:
                        found[each] = key
                        unread.append(each)
        if len(found) == len(known) and not unread:
            folder.found = dict(known)  # the same, and in order
        return sorted(below, reverse=True)

    def _scan_fitting(self, folder: _Folder, part: Part) -> list[bytes]:
        """List one folder: only what fits the pattern, and sidecars of that."""
        every = _Folder(folder.path, folder.number, folder.known)
        below = self._scan(every, part.relevant)
        names, _ = part.items(folder.path, every.found)
        ends = [end for ends in part.reads.values() for end in ends]
        kept = {*names, *(_stem_of(name) + end for name in names for end in ends)}
        folder.found |= {name: each for name, each in every.found.items() if name in kept}
        folder.unread += [name for name in every.unread if name in kept]
        return [path for path in below if part.leads_into(path)]

    def _vanished(self, part: Part) -> DatasetError:
        count = self._count_below(part)
        if not count:
            message = f"There is no folder {part.root}"
            return DatasetError(message, hint="Check the path of the sources.", path=part.root)
        return SourcesVanishedError(
            f"{part.label} is gone or empty; it had {count:,} files", path=part.root
        )

    def _list_rows(self, number: int, part: Part, job: Job) -> None:
        """Read a list, and stat the files that it names."""
        stamp = None if self.trust else _stamp(part.jsonl)
        is_given = part.rows is not None or bool(part.jsonl)
        if self.trust or not is_given or (stamp and stamp == self.table.stamp(number)):
            blocks = self.table.rows(number)
            rows: list[Row] = json.loads(f"[{','.join(blocks).replace(chr(10), ',')}]")
        else:
            rows = self._given_rows(number, part)
            lines = [plain_text(row, "row") for row in rows]
            blocks = ["\n".join(lines[at : at + BLOCK]) for at in range(0, len(lines), BLOCK)]
            self.stamps[number] = stamp
        self.rows[number], self.blocks[number] = rows, blocks
        ends = [end for ends in part.reads.values() for end in ends]
        is_there = was_there = False
        paths = self._paths(number)
        for path in paths:
            folder, name = self._folder(os.path.dirname(path)), os.path.basename(path)
            if self.trust:
                folder.found = folder.known
                folder.found.setdefault(name, _UNKNOWN_FILE)
                continue
            self._stat(folder, name)
            is_there = is_there or not folder.found[name].startswith(NOTHING)
            was_there = was_there or not folder.known.get(name, NOTHING).startswith(NOTHING)
            for end in ends:
                self._stat(folder, _stem_of(name) + end, is_sidecar=True)
        if was_there and not is_there and not self.force:
            message = f"None of the {len(paths):,} files of {part.label} is there"
            raise SourcesVanishedError(message, path=part.root or None)
        job.advance(len(rows))

    def _given_rows(self, number: int, part: Part) -> list[Row]:
        try:
            rows = part.read_rows()
        except SourcesVanishedError:
            if not self.force:
                raise
            return []
        if not rows and not self.force and (before := self.table.rows(number)):
            count = sum(block.count("\n") + 1 for block in before)
            message = f"{part.label} is empty; it had {count:,} rows"
            raise SourcesVanishedError(message, path=part.jsonl or None)
        return rows

    def _paths(self, number: int) -> list[bytes]:
        """Return the paths of the files that a list names."""
        found = map(self.parts[number].file_of, self.rows[number])
        return [path for path in found if path is not None]

    def _stat(self, folder: _Folder, name: bytes, *, is_sidecar: bool = False) -> None:
        if name in folder.found:
            return
        try:
            key = packed(os.stat(os.path.join(folder.path, _base_of(name))))
        except OSError:
            if is_sidecar:
                return
            key = NOTHING
        known = folder.known.get(name)
        if known is not None and self._is_known(known, key):
            folder.found[name] = known
        else:
            folder.found[name] = key
            folder.unread.append(name)

    # reading what has changed

    def _take_note(self) -> None:
        """Read what is new or has changed, and forget what is gone."""
        for folder in self.folders.values():
            folder.unread = list(dict.fromkeys(folder.unread))  # two parts may name one folder
        changed = [
            folder for folder in self.folders.values()
            if folder.unread or len(folder.found) < len(folder.known)
        ]  # fmt: skip
        vanished = [path for path in self.numbers if path not in self.folders]
        if not (changed or vanished):
            return
        # One process reads; the others then find it done.
        waiting = self.table.path.with_name("lock")
        with store_lock(
            waiting, "reading sources", name="the dataset",
            on_wait=lambda text: _log.warning("Waiting: %s", text),
        ):  # fmt: skip
            if self.table.version() != self.version:
                self._compare_again(changed)
            self._read()

    def _compare_again(self, folders: list[_Folder]) -> None:
        """Take over what another process has written down since this one began to look."""
        self.numbers = self.table.folders()
        for folder in folders:
            folder.number = self.numbers.get(folder.path, 0)
            folder.known = self.table.files(folder.number) if folder.number else {}
            folder.unread = []
            for name, was in folder.found.items():
                known = folder.known.get(name)
                if known is not None and self._is_known(known, was[:32]):
                    folder.found[name] = known
                else:
                    folder.found[name] = was[:32]
                    folder.unread.append(name)

    def _find_lost(self) -> tuple[list[tuple[int, bytes]], dict[bytes, int]]:
        """Return files that are gone, and folders that are, with how many files they had."""
        drops: list[tuple[int, bytes]] = []
        vanished: dict[bytes, int] = {}
        for path, number in self.numbers.items():
            folder = self.folders.get(path)
            known = self.table.files(number) if folder is None else folder.known
            missing = known if folder is None else known.keys() - folder.found.keys()
            for name in missing:
                self.lost.add(path, name, known[name])
            if folder is None and any(
                os.path.lexists(os.path.join(path, _base_of(name))) for name in known
            ):
                vanished[path] = 0  # it is there, and no source any more
            elif folder is None or (not folder.found and not os.listdir(path)):
                vanished[path] = len(known)  # or it is where a drive was mounted
            elif not folder.found:
                vanished[path] = 0
            else:
                drops += [(number, name) for name in missing]
        return drops, vanished

    def _read(self) -> None:
        drops, vanished = self._find_lost()
        todo: list[tuple[_Folder, bytes]] = []
        rows: list[tuple[int, bytes, bytes]] = []
        with self.table.write():
            for folder in self.folders.values():
                if folder.found and not folder.number:
                    folder.number = self.table.add_folder(folder.path)
                for name in folder.unread:
                    moved = self.lost.take(folder.found[name] + _kind_of(name))
                    if moved is None:
                        todo.append((folder, name))
                        continue
                    folder.found[name] = moved[1]
                    rows.append((folder.number, name, moved[1]))
                    self._count_move(folder, name, moved[0])
            self.table.add_files(rows)
        # In the order of the table: rows that lie together are written together.
        todo.sort(key=lambda each: (each[0].number, each[1]))
        self._hash(todo)
        for path, name in self.lost.memos:
            self._count("removed", path, name)
        with self.table.write():
            self.table.drop_files(drops)
            for path, count in vanished.items():
                self.table.drop_folder(self.numbers[path], max(0, count - self.moved[path]))

    def _count(self, change: str, path: bytes, name: bytes) -> None:
        """Count a change of a file; several fields of one are one file."""
        if FIELD in name:
            place = path, _base_of(name)
            if place in self.counted:
                return
            self.counted.add(place)
        self.changes[change] += 1

    def _count_move(self, folder: _Folder, name: bytes, old: bytes) -> None:
        self._count("renamed" if folder.path == old else "moved", folder.path, name)
        self.moved[old] += 1

    def _hash(self, todo: list[tuple[_Folder, bytes]]) -> None:
        """Read files, the texts here and the others by threads, and remember their digests."""
        rows: list[tuple[int, bytes, bytes]] = []
        problems: dict[tuple[int, bytes], str] = {}
        kept: dict[bytes, str] = {}
        written = time.monotonic()
        young = time.time_ns() - RACY_NS

        def write() -> None:
            with self.table.write():
                self.table.add_texts(kept)
                self.table.add_files(rows)
                self.table.set_problems(problems)
            for each in (kept, rows, problems):
                each.clear()

        for folder, name, key, digest, reason, text in self._contents(todo):
            if text is not None:
                kept[digest] = text
            flags = self._state(folder, name, digest) | (PROBLEM if reason else 0)
            _, mtime, ctime, _ = STAT.unpack(key)
            if ctime > young or young < mtime < young + 2 * RACY_NS:
                flags |= RACY
            size = _image_size(folder.path, name, is_readable=not reason)
            folder.found[name] = memo(key, digest, size, flags)
            rows.append((folder.number, name, folder.found[name]))
            problems[folder.number, name] = reason
            if time.monotonic() - written > _STEP:
                write()
                written = time.monotonic()
        write()

    def _contents(
        self, todo: list[tuple[_Folder, bytes]]
    ) -> Iterator[tuple[_Folder, bytes, bytes, bytes, str, str | None]]:
        """Read files: give folder, name, stat key, digest, what is wrong, and the text of each."""
        texts = [each for each in todo if _is_text(each[1])]
        if texts:
            with self.progress("Reading texts", len(texts)) as job:
                for folder, name in texts:
                    key, text, reason = _read_text(folder.path, name)
                    digest = NOTHING if text is None else text_digest(text)
                    yield folder, name, key or folder.found[name], digest, reason, text
                    job.advance()
        others = {
            os.path.join(folder.path, name): (folder, name)
            for folder, name in todo
            if not _is_text(name)
        }
        for done in hash_many(list(others), threads=self.threads, progress=self.progress):
            folder, name = others[done.path]
            key = folder.found[name]
            if done.hashes is None or done.key is None:
                yield folder, name, key, NOTHING, _reason(done.error), None
            elif not done.hashes.size:
                yield folder, name, key, NOTHING, "it is empty", None
            else:
                # It may have changed since it was listed: then it is young, and read again soon.
                key = STAT.pack(*done.key, STAT.unpack(key)[3])
                yield folder, name, key, bytes.fromhex(done.hashes.digest), "", None

    def _state(self, folder: _Folder, name: bytes, digest: bytes) -> int:
        """Count a change, and say why there may be no output of it."""
        known = folder.known.get(name)
        if known is not None and digest_of(known) == digest:
            return flags_of(known) & (NEW | EDITED)
        moved = self.lost.take(digest) if known is None else None
        if moved is not None:
            self._count_move(folder, name, moved[0])
            return flags_of(moved[1]) & (NEW | EDITED)
        self._count("added" if known is None else "edited", folder.path, name)
        return NEW if known is None else EDITED

    # putting it together

    def _listing(self) -> Listing:
        made = Listing(self.table, self.parts, changes=self.changes)
        made.rows = {
            part: _Names("\n".join(blocks).encode("utf-8", "surrogatepass").split(b"\n"))
            for part, blocks in self.blocks.items()
        }
        made.found = {read: [] for read in self.reads if read != FILE}
        memos: dict[str, list[bytes]] = {read: [] for read in (FILE, *made.found)}
        orphans: list[str] = []
        for number, part in enumerate(self.parts):
            before = len(made)
            if part.is_list:
                self._add_rows(made, number, memos)
            else:
                orphans += self._add_files(made, number, memos)
            if len(made) == before:
                made.warnings.append(f"{part.label} has no items")
        if orphans:
            count = f"{len(orphans):,} file{'' if len(orphans) == 1 else 's'}"
            made.warnings.append(f"{count} named like a sidecar of no item, such as {orphans[0]}")
        for read, found in memos.items():
            column = np.frombuffer(b"".join(found), MEMO)
            made.reads[read] = np.ascontiguousarray(column["digest"])
            made.states[read] = column["flags"].astype(np.uint8)
            if read == FILE:
                made.size = np.stack([column["width"], column["height"]], 1).astype(np.int64)
                made.size[made.size[:, 0] == UNKNOWN] = 0
            for item in np.flatnonzero(column["flags"] & PROBLEM).tolist():
                name = made.names[item] if read == FILE else made.found[read][item]
                where = made.folders[made.folder[item]]
                reason = self.problems.get((where.number, name), "it cannot be read")
                of = "" if read == FILE else f"{os.fsdecode(_base_of(name))}: "
                made.problems.setdefault(item, of + reason)
        for folder in made.folders:
            folder.known, folder.found = {}, {}  # in columns by now
        made.names = _Names(made.names)
        made.found = {read: _Names(names) for read, names in made.found.items()}
        self.table.shrink()
        return made

    def _add_files(
        self, made: Listing, number: int, memos: dict[str, list[bytes]]
    ) -> Iterator[str]:
        """Add the items of a folder and those below it; return sidecars that belong to none."""
        part = self.parts[number]
        reads = part.reads
        for read in memos:
            if read not in reads:
                hint = f"It has: {', '.join(reads)}. Name a sidecar: sidecars={{{read!r}: '.txt'}}."
                raise ConfigError(f"{part.label} has no {read!r} to read", hint=hint)
        for where in _below(self.folders, part):
            folder = self.folders[where]
            names, orphans = part.items(folder.path, folder.found)
            yield from (os.fsdecode(os.path.join(folder.path, each)) for each in orphans)
            if not names:
                continue
            made.add(folder, number, names)
            found = folder.found
            memos[FILE] += [found[name] for name in names]
            for read, column in memos.items():
                if read != FILE:
                    ends, beside = reads[read], cast("list[bytes]", made.found[read])
                    for name in names:
                        each = _sidecar(found, _stem_of(name), ends)
                        beside.append(each)
                        column.append(found[each] if each else ABSENT)

    def _add_rows(self, made: Listing, number: int, memos: dict[str, list[bytes]]) -> None:
        part, rows = self.parts[number], self.rows[number]
        reads = part.reads
        fields = dict.fromkeys(name for row in rows for name in row)
        for read in memos.keys() - fields.keys() - reads.keys() if rows else ():
            hint = f"Its rows have: {', '.join(fields)}."
            raise ConfigError(f"{part.label} has no {read!r} to read", hint=hint)
        label = os.path.basename(part.jsonl) or "row"
        for index, row in enumerate(rows):
            path = part.file_of(row)
            name = str(row.get("name", f"{label}:{index + 1}")).encode("utf-8", "replace")
            folder = None
            if path is not None:
                name, folder = os.path.basename(path), self.folders[os.path.dirname(path)]
            made.add(folder, number, [name], index)
            memos[FILE].append(ABSENT if folder is None else folder.found[name])
            for read, column in memos.items():
                if read == FILE:
                    continue
                beside = b""
                if (value := row.get(read)) is not None:
                    column.append(memo(NOTHING, value_digest(value, read)))
                else:
                    if folder is not None:
                        beside = _sidecar(folder.found, _stem_of(name), reads.get(read, ()))
                    column.append(folder.found[beside] if folder and beside else ABSENT)
                cast("list[bytes]", made.found[read]).append(beside)


def _below(paths: Iterable[bytes], part: Part) -> list[bytes]:
    """Return those of some folders that are the root of a part or below it, and not hidden."""
    root = os.fsencode(part.root).rstrip(b"/")
    return [
        path
        for path in sorted(paths)
        if path.startswith(root)
        and path[len(root) : len(root) + 1] in (b"", b"/")
        and b"/." not in path[len(root) :]
    ]


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _stamp(path: str) -> str | None:
    """Return what says that a list is as it was; None: nothing would."""
    try:
        key = packed(os.stat(path))
    except OSError:
        return None
    young = time.time_ns() - RACY_NS
    return None if max(STAT.unpack(key)[1:3]) > young else f"{path}\n{key.hex()}"


def _sidecar(found: Mapping[bytes, bytes], stem: bytes, ends: Sequence[bytes]) -> bytes:
    """Return the first sidecar that exists; a JSON file without the field is none."""
    for end in ends:
        known = found.get(stem + end)
        if known is not None and (digest_of(known) != NOTHING or flags_of(known) & PROBLEM):
            return stem + end
    return b""


def _name_below(root: str, path: bytes) -> str:
    """Return what users know a file by: its path below a folder; of others all of it."""
    start = os.fsencode(root).rstrip(b"/") + b"/"
    is_below = len(start) > 1 and path.startswith(start)
    return os.fsdecode(path[len(start) :] if is_below else path)


def _stem_of(name: bytes) -> bytes:
    """Return the name of a file without its suffix."""
    return name[: name.rfind(b".")] if b"." in name else name


def _base_of(name: bytes) -> bytes:
    """Return the name of the file that has a field."""
    return name.partition(FIELD)[0]


def _is_text(name: bytes) -> bool:
    """Say whether a file, or a field of one, is read as text."""
    return FIELD in name or name[name.rfind(b".") :].lower() in _TEXTS


def _kind_of(name: bytes) -> bytes:
    """Return what a memo was made of: of a field, of a text, or of a file with this suffix."""
    return name.partition(FIELD)[2] or (
        b".txt" if _is_text(name) else name[name.rfind(b".") :].lower()
    )


def _read_text(folder: bytes, name: bytes) -> tuple[bytes, str | None, str]:
    """Return the stat key of a file, its text, and why there is none; of JSON, one field.

    No key: it cannot be read. No text and no reason: there is no such field.
    """
    base, _, field_ = name.partition(FIELD)
    key = b""
    try:
        data, key = _read_whole(os.path.join(folder, base))
        text = data.decode("utf-8-sig")
        if field_:
            value: Any = json.loads(text)
            for step in field_.decode().split("."):
                value = value.get(step) if isinstance(value, dict) else None
            if not isinstance(value, str):
                reason = "" if value is None else f"its field {field_.decode()} is not a text"
                return key, None, reason
            text = value
            text.encode()
        return key, text.strip(), ""
    except UnicodeError:
        return key, None, "it is not a text in UTF-8"
    except (ValueError, RecursionError) as error:
        return key, None, f"it is not JSON: {error}"
    except OSError as error:
        return key, None, _reason(error)


def _read_whole(path: bytes) -> tuple[bytes, bytes]:
    """Return the content of a file, and the stat key that it has."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
        raise OSError("it is not a file")
    with open(path, "rb") as file:
        key = packed(os.fstat(file.fileno()))
        data = file.read()
        if packed(os.fstat(file.fileno())) != key:
            raise OSError("it changed while it was read")
    return data, key


def _reason(error: BaseException | None) -> str:
    if isinstance(error, StoreError):
        return error.message
    return str(getattr(error, "strerror", None) or error)


# sizes of images


def _image_size(folder: bytes, name: bytes, *, is_readable: bool) -> tuple[int, int]:
    """Return width and height as they are shown, from the header of an image."""
    suffix = os.fsdecode(name[name.rfind(b".") :]).lower()
    if not is_readable or suffix not in IMAGES:
        return UNKNOWN, 0
    try:
        import imagesize
    except ImportError:
        return 0, 0
    path = os.path.join(folder, name)
    width, height = imagesize.get(path)
    try:
        is_unknown = width <= 0 or height <= 0
        if (is_unknown and suffix in _BY_PILLOW) or (not is_unknown and _may_be_turned(path)):
            width, height = _size_by_pillow(path)
    except Exception as error:  # noqa: BLE001 - whatever a damaged header does to who reads it
        _log.debug("no size of %s: %s", os.fsdecode(path), error)
        return UNKNOWN, 0
    return (int(width), int(height)) if width > 0 and height > 0 else (UNKNOWN, 0)


def _size_by_pillow(path: bytes) -> tuple[int, int]:
    """Return the size of an image of which imagesize does not know it, such as a turned AVIF."""
    from PIL import Image

    with Image.open(path) as image:
        turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
        return image.size[::-1] if turned else image.size


def _may_be_turned(path: bytes) -> bool:
    """Say whether Pillow has to look: it would decode a PNG that says nothing, to its end."""
    with open(path, "rb") as file:
        begins = file.read(12)
        if not begins.startswith(b"\x89PNG") and begins[8:] != b"WEBP":
            return False
        data = file.read()
    return any(sign in data for sign in _SIGNS)
