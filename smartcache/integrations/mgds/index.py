"""What a cache of mgds remembers besides its artifacts: one SQLite file in its folder.

    files     what was read of which file, under which stat key: unchanged files cost a stat
    contexts  what the concepts said, each once
    items     which content a source has, and its context: what is still wanted, and all there is to
              train from when the sources are away
    sizes     the resolution an image had, to find its bucket again without decoding it
    kept      what an artifact holds: its names, and its small values as JSON

Rows are written when they change. A row of `kept` without an artifact is a missing artifact; an
artifact without a row is found by its key. So all of it can be found out again, and a file that is
damaged is renamed to `sources.sqlite.damaged`: until somebody removes that, nothing is an orphan.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from blake3 import blake3
from filelock import FileLock

from smartcache.errors import IndexDamagedError
from smartcache.progress import Progress, silent
from smartcache.system.filesystems import is_network
from smartcache.system.hashing import hash_many
from smartcache.system.kernel import LATEST_NS
from smartcache.system.sqlite import Database

_log = logging.getLogger(__name__)
NAME: Final = "sources.sqlite"
DAMAGED: Final = ".damaged"
"""Ends the name of one that was set aside."""
SET: Final = "mgds"
"""The name of the sets of artifacts."""
NOWHERE: Final = b"\0"
"""How the source of an item begins that is known by its position, or does not exist as a file."""
_STAT: Final = struct.Struct("<qqq")
_MANY: Final = 500
"""From so many rows on, reading all of them is quicker than asking for each."""

_VERSION_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- `memo`: size, modification and change time (24 bytes), digest (32), and 1 if it was young then.
CREATE TABLE files (path BLOB PRIMARY KEY, memo BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE contexts (id INTEGER PRIMARY KEY, data TEXT NOT NULL UNIQUE);
CREATE TABLE items (role TEXT NOT NULL, variation INTEGER NOT NULL, context INTEGER NOT NULL,
    source BLOB NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (role, variation, context, source)) WITHOUT ROWID;
CREATE TABLE sizes (content BLOB PRIMARY KEY, height INTEGER NOT NULL, width INTEGER NOT NULL)
    WITHOUT ROWID;
-- `method`: the buckets of which this resolution was last wanted.
CREATE TABLE kept (artifacts TEXT NOT NULL, variation INTEGER NOT NULL, content BLOB NOT NULL,
    resolution TEXT NOT NULL, method TEXT, names TEXT NOT NULL, aggregates TEXT,
    PRIMARY KEY (artifacts, variation, content, resolution)) WITHOUT ROWID;
"""


class Kept(NamedTuple):
    """What an artifact holds."""

    content: bytes
    resolution: str
    method: str | None
    names: str
    """A JSON list, sorted."""
    aggregates: str | None
    """Small values by name, as `dumps` writes them; None: they are in the artifact alone."""


class Index(Database):
    """The SQLite file of one cache folder; for any number of threads and processes."""

    schema: ClassVar[str] = _VERSION_1

    @classmethod
    def in_folder(cls, folder: Path) -> Index:
        """Open that of a folder, made if it is not there, and made anew if it is damaged."""
        path = folder / NAME
        with FileLock(folder / ".sources.lock", mode=0o600):
            try:
                # Whoever makes one holds the lock until it has tables.
                if path.exists() and not path.stat().st_size:
                    raise IndexDamagedError(f"{path} is empty", path=path)
                return cls._checked(path, wal=not is_network(folder))
            except IndexDamagedError as error:
                _log.warning(
                    "%s; it is set aside as %s, and the sources are looked at again", error,
                    f"{NAME}{DAMAGED}",
                )  # fmt: skip
            os.replace(path, f"{path}{DAMAGED}")
            for each in ("-wal", "-shm", "-journal"):
                Path(f"{path}{each}").unlink(missing_ok=True)
            return cls._checked(path, wal=not is_network(folder))

    @classmethod
    def _checked(cls, path: Path, *, wal: bool) -> Index:
        index = cls(path, wal=wal)
        try:
            (problem,) = index.select_one("PRAGMA quick_check(1)") or ("",)
            if problem != "ok":
                reason = str(problem).splitlines()[-1]
                raise IndexDamagedError(f"{path} is damaged: {reason}", path=path)
        except BaseException:
            index.close()
            raise
        return index

    # sources

    def contexts(self) -> dict[str, int]:
        """Return the numbers of all contexts."""
        return dict(self.select("SELECT data, id FROM contexts"))

    def add_context(self, data: str) -> int:
        """Return the number of a context."""
        self.execute("INSERT OR IGNORE INTO contexts (data) VALUES (?)", data)
        return self.number("SELECT id FROM contexts WHERE data = ?", data)

    def items(self, role: str, variation: int) -> dict[tuple[int, bytes], bytes]:
        """Return the contents of items by context and source, in this order."""
        sql = (
            "SELECT context, source, content FROM items WHERE role = ? AND variation = ?"
            " ORDER BY context, source"
        )
        rows = self.select(sql, role, variation)
        return {(context, source): content for context, source, content in rows}

    def add_items(self, role: str, variation: int, rows: Mapping[tuple[int, bytes], bytes]) -> None:
        """Note which contents items have now."""
        values = [(role, variation, *key, content) for key, content in rows.items()]
        with self.write():
            self.execute_many("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?)", values)

    def shrink(self) -> None:
        """Give the memory of pages back: all of them were looked at."""
        self.execute("PRAGMA shrink_memory")

    def sources(self) -> Iterator[tuple[bytes, bytes]]:
        """Go through the source and content of every item."""
        return self.stream("SELECT source, content FROM items")

    def forget(self, sources: Iterable[bytes]) -> None:
        """Forget sources that were removed for good."""
        rows = [(source,) for source in sources]
        with self.write():
            self.execute("DELETE FROM meta WHERE substr(key, 1, 6) = 'items '")
            self.execute_many("DELETE FROM items WHERE source = ?", rows)
            self.execute_many("DELETE FROM files WHERE path = ?", rows)

    # files

    def known(self, paths: Sequence[bytes] | None = None) -> dict[bytes, bytes]:
        """Return the memos of files, and perhaps of others; None: of all."""
        if paths is None or len(paths) >= _MANY:
            return dict(self.stream("SELECT path, memo FROM files"))
        found = {}
        for path in paths:
            row = self.select_one("SELECT memo FROM files WHERE path = ?", path)
            if row is not None:
                found[path] = bytes(row[0])
        return found

    def digests(  # noqa: C901
        self, paths: Sequence[bytes], *, trust: bool = False, progress: Progress = silent
    ) -> dict[bytes, bytes]:
        """Return the digests of the contents of files; those that are not there are left out.

        Files are read whose stat key is not the remembered one, or was young when it was. With
        `trust`, what is remembered is believed, of files that are away, too.
        """
        memos = self.known(paths)
        found: dict[bytes, bytes] = {}
        changed = []
        with progress("validating cache", len(paths)) as job:
            for path in paths:
                memo = memos.get(path, b"")
                if not memo or not trust:
                    if path[:1] == NOWHERE:
                        continue
                    try:
                        st = os.stat(path)
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    times = min(st.st_mtime_ns, LATEST_NS), min(st.st_ctime_ns, LATEST_NS)
                    if memo[:24] != _STAT.pack(st.st_size, *times) or memo[56]:
                        changed.append(path)
                        continue
                found[path] = memo[24:56]
            job.advance(len(found))
            began = time.time_ns()
            rows = []
            for done in hash_many(changed, threads=2):
                job.advance()
                if isinstance(done.error, FileNotFoundError):
                    continue
                if done.hashes is None or done.key is None:
                    raise done.error or OSError(f"cannot read {done.path!r}")
                found[done.path] = digest = bytes.fromhex(done.hashes.digest)
                young = b"\1" if done.key.is_racy(began) else b"\0"
                memo = _STAT.pack(*done.key) + digest + young
                if memos.get(done.path) != memo:
                    rows.append((done.path, memo))
        if rows:
            with self.write():
                self.execute_many("INSERT OR REPLACE INTO files VALUES (?, ?)", rows)
        return found

    # artifacts

    def kept(
        self, artifacts: str, variation: int, contents: Iterable[bytes] | None = None
    ) -> Iterator[Kept]:
        """Go through what artifacts hold: of all contents, or of some."""
        sql = (
            "SELECT content, resolution, method, names, aggregates FROM kept"
            " WHERE artifacts = ? AND variation = ?"
        )
        if contents is None:
            once: dict[str | None, str | None] = {}
            for content, *texts in self.stream(sql, artifacts, variation):
                # Most rows have their texts in common, and SQLite gives each its own.
                yield Kept(content, *[once.setdefault(text, text) for text in texts])  # type: ignore[arg-type]
            return
        for content in contents:
            yield from map(
                Kept._make, self.select(f"{sql} AND content = ?", artifacts, variation, content)
            )

    def keep(
        self,
        artifacts: str,
        variation: int,
        rows: Sequence[Kept],
        sizes: Mapping[bytes, tuple[int, int]] | None = None,
    ) -> None:
        """Note what artifacts hold; by content also the height and width of the original.

        Of a content, one resolution is that of a method.
        """
        with self.write():
            self.execute_many(
                "INSERT OR REPLACE INTO sizes VALUES (?, ?, ?)",
                [(content, *size) for content, size in (sizes or {}).items()],
            )
            self.execute_many(
                "UPDATE kept SET method = NULL"
                " WHERE artifacts = ? AND variation = ? AND content = ? AND method = ?",
                [(artifacts, variation, row.content, row.method) for row in rows if row.method],
            )
            self.execute_many(
                "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(artifacts, variation, *row) for row in rows],
            )

    def forget_kept(self, contents: Iterable[bytes]) -> None:
        """Forget contents whose artifacts were deleted."""
        rows = [(content,) for content in contents]
        with self.write():
            self.execute_many("DELETE FROM kept WHERE content = ?", rows)
            self.execute_many("DELETE FROM sizes WHERE content = ?", rows)

    def sizes(self) -> dict[bytes, float]:
        """Return the aspects (height by width) of all images, by content."""
        rows = self.select("SELECT content, height, width FROM sizes")
        return {content: height / width for content, height, width in rows}


def content_of(digests: Sequence[bytes | None], *texts: str) -> bytes:
    """Return what stands for some files (None: one that is not there) and texts."""
    if len(digests) == 1 and digests[0] is not None and not texts:
        return digests[0]
    parts = [b"mgds content 1\0", *(b"-" if each is None else b"+" + each for each in digests)]
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        parts += [b"t", len(data).to_bytes(8, "little"), data]
    return blake3(b"".join(parts)).digest()


def dumps(values: Mapping[str, object]) -> str | None:
    """Return plain values as JSON that tells tuples from lists; None: they are not all plain."""
    try:
        return json.dumps({name: _plain(value) for name, value in values.items()}, sort_keys=True)
    except TypeError:
        return None


def _plain(value: object) -> object:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) in (list, tuple):
        parts = [_plain(each) for each in value]  # type: ignore[attr-defined]
        return parts if type(value) is list else {"tuple": parts}
    raise TypeError(type(value))


def loads(text: str) -> dict[str, Any]:
    """Return what `dumps` was given, in memory of the caller's own."""
    return {name: _tupled(value) for name, value in json.loads(text).items()}


def _tupled(value: Any) -> Any:  # noqa: ANN401 - whatever JSON has
    if type(value) is list:
        return [_tupled(each) for each in value]
    return tuple(map(_tupled, value["tuple"])) if type(value) is dict else value


class Once:
    """A function that is called at most once until `again`, whichever thread is first."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - a function, or None
        self._call = call
        self._lock = threading.Lock()
        self._is_due = True

    def again(self) -> None:
        """Let it be called once more."""
        self._is_due = True

    def __call__(self) -> None:
        """Call it, or wait until the thread that does so has done it."""
        with self._lock:
            if self._is_due and self._call is not None:
                self._call()
            self._is_due = False
