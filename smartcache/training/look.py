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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from smartcache.errors import ConfigError, DatasetError, SourcesVanishedError, StoreError
from smartcache.progress import Job, Progress, silent
from smartcache.store.digest import hash_many
from smartcache.store.locks import lock
from smartcache.store.statkey import RACY_NS
from smartcache.training.sources import FILE, IMAGES, Part, Row, Source, Sources, plain_text
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
_STEP: Final = 1.0
"""Seconds of reading after which what is known is written down: a killed process loses no more."""


@dataclass(slots=True)
class Listing:
    """All sources as columns, in the order of their items."""

    table: SourceTable
    parts: tuple[Part, ...]
    folders: list[_Folder] = field(default_factory=list)
    folder: array[int] = field(default_factory=lambda: array("i"))
    """Of each source, in `folders`; -1: it is a row without a file."""
    part: array[int] = field(default_factory=lambda: array("i"))
    row: array[int] = field(default_factory=lambda: array("i"))
    """Its number in a list."""
    names: list[bytes] = field(default_factory=list)
    """The names of files; of rows without one, their own names."""
    reads: dict[str, Column] = field(default_factory=dict)
    """By what encoders read: the digests. Nothing but zeros: the source has no such thing."""
    stats: dict[str, Column] = field(default_factory=dict)
    """The same, the stat keys of the files; nothing but zeros: it is no file."""
    found: dict[str, list[bytes | None]] = field(default_factory=dict)
    """The names of the files of sidecars."""
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
        self.names += names
        self.folder.extend([where] * len(names))
        self.part.extend([part] * len(names))
        self.row.extend([row] * len(names))

    def path(self, number: int, read: str = FILE) -> Path | None:
        """Return the path of a file; None: it is not in a file."""
        name = self.names[number] if read == FILE else self.found[read][number]
        if name is None or self.folder[number] < 0:
            return None
        folder = self.folders[self.folder[number]].path
        return Path(os.fsdecode(os.path.join(folder, _base_of(name))))

    def name(self, number: int) -> str:
        """Return what users know a source by: its path below the folder of the sources."""
        name = self.names[number]
        if self.folder[number] < 0:
            return name.decode("utf-8", "replace")
        path = os.path.join(self.folders[self.folder[number]].path, name)
        root = os.fsencode(self.parts[self.part[number]].root)
        return os.fsdecode(path[len(root) :].lstrip(b"/") if path.startswith(root + b"/") else path)

    def values(self, number: int) -> dict[str, Any]:
        """Return the metadata of a source, and the fields of a row."""
        part = self.parts[self.part[number]]
        if part.is_list:
            row = self.row[number]
            block = self.table.block(self.part[number], row // BLOCK)
            constant = part.metadata if isinstance(part.metadata, Mapping) else {}
            return {**constant, **block[row % BLOCK]}
        if isinstance(part.metadata, Mapping):
            return dict(part.metadata)
        folder = self.folders[self.folder[number]]
        return self.table.metadata_of(folder.number, self.names[number])

    def has(self, number: int, read: str) -> bool:
        """Say whether a source has something to read."""
        return bool(self.reads[read][number].any())

    def is_file(self, number: int, read: str) -> bool:
        """Say whether what is read is a file, and neither a text nor a value of a row."""
        name = self.names[number] if read == FILE else self.found[read][number]
        return name is not None and self.folder[number] >= 0 and not _is_text(name)

    def value(self, number: int, read: str) -> object:
        """Return a text, or the value of a row, as it was when it was looked at."""
        text = self.table.text(self.reads[read][number].tobytes())
        return self.values(number)[read] if text is None else text

    @property
    def repeats(self) -> Column:
        """How often each source comes in an epoch."""
        each: Column = np.array([part.repeats for part in self.parts]).take(
            np.frombuffer(self.part, "i4")
        )
        return each


def stat_key(path: Path) -> bytes:
    """Return the stat key of a file as the table has it."""
    return packed(os.stat(path))


def text_digest(text: str) -> bytes:
    """Return the digest of a text."""
    return blake3(text.encode("utf-8", "surrogatepass")).digest()


def value_digest(value: object, name: str) -> bytes:
    """Return the digest of a value of a row; a text counts as the same text in a file."""
    return text_digest(value if isinstance(value, str) else "\0" + plain_text(value, name))


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
    threads: int = 2,
    progress: Progress = silent,
) -> Listing:
    """Say what there is now; what is new or has changed is read, and remembered.

    `sizes`: the sizes of images are needed. With `trust` nothing is looked at: what is remembered
    is what there is. SourcesVanishedError if there is nothing at all where there was something
    before: a drive may not be mounted. Nothing is forgotten then.
    """
    found = _Look(table, sources.parts, tuple(reads), threads, progress)
    found.sizes, found.trust = sizes, trust
    return found.run()


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
        self.sizes = self.trust = False
        self.threads = threads
        self.progress = progress
        self.numbers = table.folders()
        self.folders: dict[bytes, _Folder] = {}
        self.rows: dict[int, list[Row]] = {}
        self.changes: Counter[str] = Counter()
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
                    for path in self._stored_below(part):
                        self._stored(path)
                else:
                    self._walk(part, job)
        if not self.trust:
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

    def _stored(self, path: bytes) -> None:
        folder = self._folder(path)
        folder.found = folder.known

    def _stored_below(self, part: Part) -> list[bytes]:
        root = os.fsencode(part.root)
        below = root.rstrip(b"/") + b"/"
        return [path for path in self.numbers if path == root or path.startswith(below)]

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
                ahead += self._scan(folder, relevant)
            except OSError as error:
                if path == root and isinstance(error, (FileNotFoundError, NotADirectoryError)):
                    raise self._vanished(part) from error
                where = os.fsdecode(path)
                reason = error.strerror or error
                raise DatasetError(f"{where} cannot be listed: {reason}", path=where) from error
            count += len(folder.found)
            job.advance(len(folder.found))
        if not count and any(self.table.files(self.numbers[p]) for p in self._stored_below(part)):
            raise self._vanished(part)

    def _scan(  # noqa: C901 - one loop, once for every file: calls would cost more than they do
        self, folder: _Folder, relevant: dict[bytes, tuple[bytes, ...]]
    ) -> list[bytes]:
        """List one folder: one scandir, and one stat for each file that may matter."""
        below: list[bytes] = []
        found, known, unread = folder.found, folder.known, folder.unread
        pack, sizes = STAT.pack, self.sizes
        with os.scandir(folder.path) as entries:
            for entry in entries:
                name = entry.name
                wanted = relevant.get(name[name.rfind(b".") :].lower())
                if wanted is None or name[0] == _DOT:  # hidden
                    if name[0] != _DOT and entry.is_dir():
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
                    if part and not name.endswith(b".json"):
                        continue
                    memo_ = known.get(each)
                    if (
                        memo_ is not None
                        and memo_.startswith(key)
                        and not flags_of(memo_) & RACY
                        and not (sizes and is_unsized(memo_) and _is_image(name))
                    ):
                        found[each] = memo_
                    else:
                        found[each] = key
                        unread.append(each)
        return sorted(below, reverse=True)

    def _vanished(self, part: Part) -> DatasetError:
        count = sum(len(self.table.files(self.numbers[path])) for path in self._stored_below(part))
        if not count:
            message = f"There is no folder {part.root}"
            return DatasetError(message, hint="Check the path of the sources.", path=part.root)
        return SourcesVanishedError(
            f"{part.label} is gone or empty; it had {count:,} files", path=part.root
        )

    def _list_rows(self, number: int, part: Part, job: Job) -> None:
        """Read a list, and stat the files that it names."""
        if not self.trust and (part.rows is not None or part.jsonl):
            given = part.read_rows()
            blocks = [
                plain_text(given[start : start + BLOCK], "rows")
                for start in range(0, len(given), BLOCK)
            ]
            self.table.set_rows(number, blocks)
        rows = [row for data in self.table.rows(number) for row in json.loads(data)]
        self.rows[number] = rows
        paths = [path for row in rows if (path := part.file_of(row)) is not None]
        ends = [end for ends in part.reads.values() for end in ends]
        count = 0
        for path in paths:
            folder, name = self._folder(os.path.dirname(path)), os.path.basename(path)
            if self.trust:
                folder.found = {name: ABSENT} | folder.known
                continue
            self._stat(folder, name)
            count += folder.found[name] != NOTHING and not folder.found[name].startswith(NOTHING)
            stem = name[: name.rfind(b".")] if b"." in name else name
            for end in ends:
                self._stat(folder, stem + end, is_sidecar=True)
        if paths and not count and not self.trust:
            known = [self.folders[os.path.dirname(path)].known for path in paths]
            if any(known):
                message = f"None of the {len(paths):,} files of {part.label} is there"
                raise SourcesVanishedError(message, path=part.root)
        job.advance(len(rows))

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
        is_known = known is not None and known.startswith(key) and not flags_of(known) & RACY
        folder.found[name] = known if known is not None and is_known else key
        if not is_known:
            folder.unread.append(name)

    # reading what has changed

    def _take_note(self) -> None:
        """Read what is new or has changed, and forget what is gone."""
        for folder in self.folders.values():
            folder.unread = list(dict.fromkeys(folder.unread))  # a list may name files of a folder
        unread = [folder for folder in self.folders.values() if folder.unread]
        lost = [
            folder for folder in self.folders.values()
            if len(folder.found) - len(folder.unread) < len(folder.known)
        ]  # fmt: skip
        vanished = [path for path in self.numbers if path not in self.folders]
        if not (unread or lost or vanished):
            self._call_metadata()
            return
        # One process reads; the others then find it done.
        waiting = self.table.path.with_name("lock")
        with lock(
            waiting, exclusive=True, what="reading sources", name="the dataset",
            on_wait=lambda text: _log.info("Waiting: %s", text),
        ):  # fmt: skip
            self._compare_again({folder.path: folder for folder in (*unread, *lost)})
            self._read()
        self._call_metadata()

    def _compare_again(self, folders: dict[bytes, _Folder]) -> None:
        """Take over what another process has written down since this one began to look."""
        self.numbers = self.table.folders()
        for folder in folders.values():
            folder.number = self.numbers.get(folder.path, 0)
            folder.known = self.table.files(folder.number) if folder.number else {}
            folder.unread = []
            for name, was in folder.found.items():
                known = folder.known.get(name)
                if known is not None and known.startswith(was[:32]) and not flags_of(known) & RACY:
                    folder.found[name] = known
                else:
                    folder.found[name] = was[:32]
                    folder.unread.append(name)

    def _read(self) -> None:
        gone: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
        """By stat key and kind: what is remembered of files that are gone, and their folders."""
        before: dict[bytes, bytes] = {}
        """By digest: their folders."""
        drops: list[tuple[int, bytes]] = []
        vanished: dict[bytes, int] = {}
        for path, number in self.numbers.items():
            folder = self.folders.get(path)
            known = self.table.files(number) if folder is None else folder.known
            missing = known if folder is None else known.keys() - folder.found.keys()
            for name in missing:
                gone[known[name][:32], _kind_of(name)] = known[name], path
                before[known[name][32:64]] = path
            if folder is None or not folder.found:
                # A folder that is there and no source any more has not vanished.
                is_left = folder is None and os.path.isdir(path)
                vanished[path] = 0 if is_left else len(known)
            else:
                drops += [(number, name) for name in missing]
        self.changes["removed"] = len(gone)
        todo: list[tuple[_Folder, bytes]] = []
        rows: list[tuple[int, bytes, bytes]] = []
        with self.table.write():
            for folder in self.folders.values():
                if folder.found and not folder.number:
                    folder.number = self.table.add_folder(folder.path)
                for name in folder.unread:
                    moved = gone.get((folder.found[name], _kind_of(name)))
                    if moved is None or flags_of(moved[0]) & (RACY | PROBLEM):
                        todo.append((folder, name))
                        continue
                    # Neither its bytes nor its inode have changed: it has another name now.
                    folder.found[name] = moved[0]
                    rows.append((folder.number, name, moved[0]))
                    self._count_move(folder.path, moved[1])
            self.table.add_files(rows)
        self._hash(todo, before)
        with self.table.write():
            self.table.drop_files(drops)
            for path, count in vanished.items():
                self.table.drop_folder(self.numbers[path], max(0, count - self.moved[path]))

    def _count_move(self, path: bytes, old: bytes) -> None:
        self.changes["renamed" if path == old else "moved"] += 1
        self.changes["removed"] -= 1
        self.moved[old] += 1

    def _hash(self, todo: list[tuple[_Folder, bytes]], before: dict[bytes, bytes]) -> None:
        """Read files, the texts here and the others by threads, and remember their digests."""
        rows: list[tuple[int, bytes, bytes]] = []
        problems: dict[tuple[int, bytes], str] = {}
        kept: dict[bytes, str] = {}
        written = time.monotonic()

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
            flags = self._state(folder, name, digest, before) | (PROBLEM if reason else 0)
            _, mtime, ctime, _ = STAT.unpack(key)
            now = time.time_ns()
            if ctime > now - RACY_NS or abs(now - mtime) < RACY_NS:
                flags |= RACY
            size = (0, 0) if reason else _image_size(folder.path, name)
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
                    key = folder.found[name]
                    text, reason = _read_text(folder.path, name, key)
                    digest = NOTHING if text is None else text_digest(text)
                    yield folder, name, key, digest, reason, text
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

    def _state(
        self, folder: _Folder, name: bytes, digest: bytes, before: dict[bytes, bytes]
    ) -> int:
        """Count a change, and say why there may be no output of it."""
        known = folder.known.get(name)
        if known is not None and digest_of(known) == digest:
            return flags_of(known) & (NEW | EDITED)
        if known is None and digest != NOTHING and digest in before:
            self._count_move(folder.path, before.pop(digest))
            return 0
        self.changes["added" if known is None else "edited"] += 1
        return NEW if known is None else EDITED

    def _call_metadata(self) -> None:
        """Ask the functions that say something of files; what they say now is kept."""
        for part in self.parts:
            if not callable(part.metadata):
                continue
            for folder in self._folders_of(part):
                known = self.table.metadata(folder.number)
                rows = []
                for name in part.items(folder.path, folder.found)[0]:
                    path = os.fsdecode(os.path.join(folder.path, name))
                    remembered = np.frombuffer(folder.found[name], MEMO)[0]
                    width, height = int(remembered["width"]), int(remembered["height"])
                    size = (width, height) if 0 < width < UNKNOWN else None
                    said = part.metadata(Source(Path(path), os.path.relpath(path, part.root), size))
                    text = plain_text(dict(said), f"metadata of {path}")
                    if known.get(name) != text:
                        rows.append((folder.number, name, text))
                if rows:
                    self.table.add_metadata(rows)

    # putting it together

    def _folders_of(self, part: Part) -> list[_Folder]:
        root = os.fsencode(part.root)
        below = root.rstrip(b"/") + b"/"
        return [
            self.folders[path]
            for path in sorted(self.folders)
            if path == root or path.startswith(below)
        ]

    def _listing(self) -> Listing:
        made = Listing(self.table, self.parts, changes=self.changes)
        made.found = {read: [] for read in self.reads if read != FILE}
        memos: dict[str, list[bytes]] = {read: [] for read in (FILE, *made.found)}
        orphans: list[str] = []
        for number, part in enumerate(self.parts):
            if part.is_list:
                self._add_rows(made, number, memos)
            else:
                orphans += self._add_files(made, number, memos)
        if orphans:
            count = f"{len(orphans):,} file{'' if len(orphans) == 1 else 's'}"
            made.warnings.append(f"{count} named like a sidecar of no item, such as {orphans[0]}")
        for read, found in memos.items():
            column = np.frombuffer(b"".join(found), MEMO)
            made.reads[read] = np.ascontiguousarray(column["digest"])
            made.stats[read] = np.ascontiguousarray(column["stat"])
            made.states[read] = column["flags"].astype(np.uint8)
            if read == FILE:
                made.size = np.stack([column["width"], column["height"]], 1).astype(np.int64)
                made.size[made.size[:, 0] == UNKNOWN] = 0
            for item in np.flatnonzero(column["flags"] & PROBLEM).tolist():
                name = made.names[item] if read == FILE else made.found[read][item]
                where = made.folders[made.folder[item]]
                reason = self.problems.get((where.number, name or b""), "it cannot be read")
                of = "" if read == FILE else f"{os.fsdecode(name or b'')}: "
                made.problems.setdefault(item, of + reason)
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
        for folder in self._folders_of(part):
            names, orphans = part.items(folder.path, folder.found)
            yield from (os.fsdecode(os.path.join(folder.path, each)) for each in orphans)
            if not names:
                continue
            made.add(folder, number, names)
            found = folder.found
            memos[FILE] += [found[name] for name in names]
            for read, column in memos.items():
                if read != FILE:
                    ends, beside = reads[read], made.found[read]
                    for name in names:
                        each = _sidecar(found, name[: name.rfind(b".")], ends)
                        beside.append(each)
                        column.append(ABSENT if each is None else found[each])

    def _add_rows(  # noqa: C901 - one row after the other
        self, made: Listing, number: int, memos: dict[str, list[bytes]]
    ) -> None:
        part, rows = self.parts[number], self.rows[number]
        reads = part.reads
        fields = dict.fromkeys(name for row in rows for name in row)
        for read in memos.keys() - fields.keys() - reads.keys() if rows else ():
            hint = f"Its rows have: {', '.join(fields)}."
            raise ConfigError(f"{part.label} has no {read!r} to read", hint=hint)
        label = os.path.basename(part.jsonl) or "row"
        texts: dict[bytes, str] = {}
        for index, row in enumerate(rows):
            path = part.file_of(row)
            name = str(row.get("name", f"{label}:{index + 1}")).encode("utf-8", "replace")
            folder = None
            if path is not None:
                name, folder = os.path.basename(path), self.folders[os.path.dirname(path)]
            made.add(folder, number, [name], index)
            memos[FILE].append(ABSENT if folder is None else folder.found[name])
            stem = name[: name.rfind(b".")] if b"." in name else name
            for read, column in memos.items():
                if read == FILE:
                    continue
                beside = None
                if (value := row.get(read)) is not None:
                    digest = value_digest(value, read)
                    column.append(memo(NOTHING, digest))
                    if isinstance(value, str):
                        texts[digest] = value
                else:
                    if folder is not None:
                        beside = _sidecar(folder.found, stem, reads.get(read, ()))
                    column.append(ABSENT if beside is None else folder.found[beside])  # type: ignore[union-attr]
                made.found[read].append(beside)
        if not self.trust:
            new = {key: text for key, text in texts.items() if self.table.text(key) is None}
            if new:
                with self.table.write():
                    self.table.add_texts(new)


def _sidecar(found: Mapping[bytes, bytes], stem: bytes, ends: Sequence[bytes]) -> bytes | None:
    """Return the first sidecar that exists; a JSON file without the field is none."""
    for end in ends:
        known = found.get(stem + end)
        if known is not None and (digest_of(known) != NOTHING or flags_of(known) & PROBLEM):
            return stem + end
    return None


def _field_of(name: bytes) -> bytes:
    """Return the field of a JSON file that is meant; nothing: the file itself."""
    return name.partition(b".json:")[2]


def _base_of(name: bytes) -> bytes:
    """Return the name of the file that has a field."""
    base, dot, _ = name.partition(b".json:")
    return base + b".json" if dot else name


def _is_text(name: bytes) -> bool:
    """Say whether a file, or a field of one, is read as text."""
    return bool(_field_of(name)) or name[name.rfind(b".") :].lower() in _TEXTS


def _kind_of(name: bytes) -> bytes:
    """Return what a digest was made of: of a field, of a text, or of all bytes."""
    return _field_of(name) or (b".txt" if _is_text(name) else b"")


def _is_image(name: bytes) -> bool:
    return os.fsdecode(name[name.rfind(b".") :]).lower() in IMAGES


def _read_text(  # noqa: PLR0911 - one for each thing that may be wrong with it
    folder: bytes, name: bytes, key: bytes
) -> tuple[str | None, str]:
    """Return a text and why there is none; of a JSON file, one of its fields."""
    field_ = _field_of(name).decode()
    path = os.path.join(folder, _base_of(name))
    try:
        with open(path, "rb") as file:
            data = file.read()
            if packed(os.fstat(file.fileno())) != key:
                return None, "it changed while it was read"
        text = data.decode("utf-8-sig")
        if field_:
            value: Any = json.loads(text)
            for step in field_.split("."):
                value = value.get(step) if isinstance(value, dict) else None
            if value is None:
                return None, ""
            if not isinstance(value, str):
                return None, f"its field {field_} is not a text"
            text = value
        return text.strip(), ""
    except UnicodeDecodeError:
        return None, "it is not a text in UTF-8"
    except json.JSONDecodeError as error:
        return None, f"it is not JSON: {error}"
    except OSError as error:
        return None, _reason(error)


def _reason(error: BaseException | None) -> str:
    if isinstance(error, StoreError):
        return error.message
    return str(getattr(error, "strerror", None) or error)


def _image_size(folder: bytes, name: bytes) -> tuple[int, int]:
    """Return width and height as they are shown, from the header of an image."""
    if not _is_image(name):
        return 0, 0
    try:
        import imagesize
    except ImportError:
        return 0, 0
    width, height = imagesize.get(os.path.join(folder, name))
    if width <= 0 or height <= 0:
        return UNKNOWN, 0
    return int(width), int(height)
