"""Which bytes a file has: remembered while the file stays as it is, or hashed now.

A memo is keyed by filesystem and inode and valid while size, mtime and ctime are those it was made
with. A file that was younger than two seconds when its hashing began is stored as racy and hashed
again next time, because a second change within one clock tick would leave the same key. A file
whose inode is a blob has the blob's hashes, if its row proves them.

`learn` reads many files for a scan. A sample is the XXH3 of a file's head and tail: files with
different samples differ, files with equal ones are hashed in full before anybody calls them equal.
What is learned is valid for the stat key the file was seen with; a file that shows another key
after reading, that somebody writes, or that cannot be read, is left out and named. Access times
stay as they are where the system allows it: a scan must not make every file look recently used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from xxhash import xxh3_128

from smartcache.errors import FileChangedError
from smartcache.progress import Progress, silent
from smartcache.store.catalog import Candidate, MemoRow
from smartcache.store.records import Blob
from smartcache.store.volume import Volume
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import (
    BUFFER_SIZE,
    Advance,
    Algorithm,
    Crew,
    Hashes,
    digest_at_once,
    hash_file,
    hash_many,
    threads_for,
)
from smartcache.system.kernel import StatKey, drop_lease, open_quietly, take_lease
from smartcache.system.sqlite import signed

Known = tuple[Hashes, StatKey]
"""Hashes and the stat key they belong to."""
_Found = tuple[Path, os.stat_result]
Read = set[tuple[str, int, StatKey]]
"""Files (filesystem, inode) that one run has read in full, as they were then.

What was learned earlier says what to try, never what to delete: a disk may have lost bytes since.
"""


def recall(
    volume: Volume, files: Sequence[_Found], *, relinked: bool = False
) -> dict[Path, dict[Algorithm, str]]:
    """Return what is known of files' hashes: from blobs in the same inodes, else from memos.

    `relinked`: a blob that others have linked or unlinked counts, as it does for whoever opens it.
    """
    here = [st.st_ino for _, st in files if volume.is_here(st)]
    blobs = volume.index.blobs_in(here) if here else {}
    filesystems: dict[int, str] = {}
    by_filesystem: dict[str, list[int]] = {}
    for path, st in files:
        if st.st_dev not in filesystems:
            filesystems[st.st_dev] = filesystem_id(path, st)
        by_filesystem.setdefault(filesystems[st.st_dev], []).append(st.st_ino)
    memos = {fs: volume.catalog.memos(fs, inodes) for fs, inodes in by_filesystem.items()}
    digests: dict[Path, str] = {}
    for path, st in files:
        blob = blobs.get(signed(st.st_ino)) if volume.is_here(st) else None
        memo = memos[filesystems[st.st_dev]].get(signed(st.st_ino))
        is_proof = Blob.vouches if relinked else Blob.proves
        if blob is not None and is_proof(blob, st, volume.boot):
            digests[path] = blob.digest
        elif memo is not None and not memo.is_racy and memo.key == StatKey.of(st):
            digests[path] = memo.digest
    known: dict[str, dict[Algorithm, str]] = {}
    for index in {volume.index, volume.catalog.index}:
        for digest, values in index.hashes_of(digests.values()).items():
            known.setdefault(digest, {}).update(values)
    return {path: dict(known[digests[path]]) if path in digests else {} for path, _ in files}


def known_hashes(volume: Volume, paths: Iterable[Path]) -> dict[Path, dict[Algorithm, str]]:
    """Return what is known of files without reading them, symlinks followed.

    Files that are not there are left out. Nothing known: an empty dictionary.
    """
    files: list[_Found] = []
    for path in paths:
        with suppress(OSError):
            files.append((path, os.stat(path)))
    return recall(volume, files, relinked=True)


def hashes_of(
    volume: Volume,
    path: Path,
    algorithms: Iterable[Algorithm] = (),
    *,
    advance: Callable[[int], None] | None = None,
    read: Read | None = None,
) -> Known:
    """Return the hashes of a file, remembered or computed now, and the stat key they belong to.

    Its digest is always among them. If they were computed, it is added to `read`.
    """
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *algorithms)))
    st = os.stat(path)
    values = recall(volume, [(path, st)])[path]
    missing = [name for name in wanted if name not in values]
    if not missing:
        return Hashes(size=st.st_size, values=values), StatKey.of(st)
    started = time.time_ns()
    is_quiet = not is_being_written(path)
    hashes, key = hash_file(path, wanted, advance=advance, threads=volume.settings.threads)
    if is_quiet:
        remember(volume, [(path, hashes, key)], started)
    if read is not None:
        read.add((filesystem_id(path, st), signed(st.st_ino), key))
    return hashes, key


def hash_all(
    volume: Volume,
    paths: Iterable[Path],
    algorithms: Iterable[Algorithm] = (),
    *,
    progress: Progress = silent,
) -> dict[Path, Known]:
    """Return the hashes of many files, remembered or computed now, in threads.

    Files that cannot be read, that somebody writes, or that are so young that their memo would be
    racy, are left out: whoever uses them finds out why.
    """
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *algorithms)))
    files: list[_Found] = []
    now = time.time_ns()
    for path in paths:
        with suppress(OSError):
            st = os.stat(path)
            if not StatKey.of(st).is_racy(now):
                files.append((path, st))
    found: dict[Path, Known] = {}
    unknown: list[Path] = []
    remembered = recall(volume, files)
    for path, st in files:
        values = remembered[path]
        if all(name in values for name in wanted):
            found[path] = Hashes(size=st.st_size, values=values), StatKey.of(st)
        elif not is_being_written(path):
            unknown.append(path)
    if unknown:
        started = time.time_ns()
        # Hash everything first: never inside a transaction.
        hashed = [
            (each.path, each.hashes, each.key)
            for each in hash_many(
                unknown, wanted, threads=volume.settings.threads, progress=progress
            )
            if each.hashes is not None and each.key is not None
        ]
        remember(volume, hashed, started)
        found.update({path: (hashes, key) for path, hashes, key in hashed})
    return found


def is_being_written(path: Path) -> bool:
    """Say whether somebody has a file open for writing or mapped writable.

    A page that is mapped writable and dirty already can be written without any trace in stat, so
    hashes of such a file are not remembered. Where there are no leases, nobody can tell.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        lease = take_lease(descriptor)
        if lease == "held":
            drop_lease(descriptor)
        return lease == "busy"
    finally:
        os.close(descriptor)


def remember(
    volume: Volume, files: Iterable[tuple[Path, Hashes, StatKey]], started_ns: int
) -> None:
    """Keep the hashes of files for the next time, of those that have not changed since."""
    rows: list[MemoRow] = []
    with volume.catalog.write():
        for path, hashes, key in files:
            try:
                st = os.stat(path)
            except FileNotFoundError:
                continue
            if StatKey.of(st) == key:
                racy, digest = int(key.is_racy(started_ns)), bytes.fromhex(hashes.digest)
                place = (filesystem_id(path, st), signed(st.st_ino))
                rows.append((*place, *key, racy, digest, None))
                volume.catalog.index.add_aliases(hashes.digest, hashes.values)
        volume.catalog.learn(rows)


What = Literal["blake3", "sample"]

HEAD_SIZE: Final = 16 * 1024
TAIL_SIZE: Final = 64 * 1024
"""Models of one kind have equal heads (the list of their tensors); their last weights differ."""

_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_SAMPLED: Final = HEAD_SIZE + TAIL_SIZE
SMALL_SIZE: Final = 64 * 1024
"""Up to here a second thread costs more than it brings."""
_HEAP_SIZE: Final = 8 << 20
"""Bytes that a thread is given at once, in one file or in many: it need not be woken for each."""
_MOST_OPEN: Final = 200
"""Files that are open at once, of 256 that macOS allows."""
_FLUSH_SECONDS: Final = 2.0
"""So often what was learned is written, so that Ctrl-C and SIGKILL lose little."""


@dataclass(slots=True, kw_only=True)
class Learned:
    """What became of some files: values by (filesystem, inode); the rest named with the reason."""

    values: dict[tuple[str, int], bytes] = field(default_factory=dict)
    busy: list[bytes] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)
    size: int = 0
    """Bytes read."""
    read: Read = field(default_factory=set)
    """Files whose digests were learned."""


def learn(
    volume: Volume,
    files: Sequence[Candidate],
    what: What,
    *,
    advance: Advance,
    describe: Callable[[str], None] | None = None,
) -> Learned:
    """Read files and remember what was learned as it comes; `advance` is told the bytes hashed.

    `describe` is told the names of large files when they are begun.

    Ctrl-C ends the threads; what was learned until then is kept.
    """
    run = _Run(volume, what, advance, describe)
    try:
        run.read(files)
    finally:
        run.remember()
    return run.learned


@dataclass(slots=True)
class _Held:
    """A file that is open and that nobody was writing when reading began."""

    file: Candidate
    fd: int
    began: int
    value: bytes | None = None
    error: OSError | None = None


class _Run:
    """One call of `learn`: the thread that called opens and closes, the others read and hash.

    Measured with 13,000 files of 240 KB on two cores: two threads that do everything take 1.5 s,
    because they wait for each other after each of eight system calls; this way it is 1.0 s.
    """

    def __init__(
        self, volume: Volume, what: What, advance: Advance, describe: Callable[[str], None] | None
    ) -> None:
        self.learned = Learned()
        self._volume = volume
        self._what = what
        self._advance = advance
        self._describe = describe
        self._threads = min(max(1, volume.settings.threads), _MOST_OPEN // 2)
        self._total = 0
        self._open: dict[int, _Held] = {}
        self._rows: list[MemoRow] = []
        self._written = time.monotonic()

    def read(self, files: Sequence[Candidate]) -> None:
        """Read all: small ones, which need no threads, and then the largest first."""
        ordered = sorted(files, key=lambda file: file.size, reverse=True)
        large = [file for file in ordered if file.size > SMALL_SIZE]
        self._total = sum(map(self._size_to_read, large))
        crew = Crew(self._read_heap, self._threads)
        try:
            for file in ordered[len(large) :]:
                if held := self._hold(file):
                    self._read_heap([held], lambda: None)
                    self._let_go(held)
                self._remember_now_and_then()
            with closing(crew.results(self._heaps(large), self._remember_now_and_then)) as heaps:
                for heap in heaps:
                    for held in heap:
                        self._let_go(held)
                    self._remember_now_and_then()
        finally:
            for held in list(self._open.values()):
                self._let_go(held)

    def remember(self) -> None:
        """Keep what was learned for the next time."""
        rows, self._rows = self._rows, []
        if rows:
            with self._volume.catalog.write():
                self._volume.catalog.learn(rows)
        self._written = time.monotonic()

    def _remember_now_and_then(self) -> None:
        if time.monotonic() - self._written > _FLUSH_SECONDS:
            self.remember()

    def _size_to_read(self, file: Candidate) -> int:
        return file.size if self._what == "blake3" else min(file.size, _SAMPLED)

    def _heaps(self, files: list[Candidate]) -> Iterator[list[_Held]]:
        """Open files, as many at a time as one thread should be given."""
        # Several for each thread, so that all end at about the same time.
        enough = min(_HEAP_SIZE, self._total // (4 * self._threads))
        most = _MOST_OPEN // (2 * self._threads)
        heap: list[_Held] = []
        size = 0
        for file in files:
            if held := self._hold(file):
                heap.append(held)
                size += self._size_to_read(file)
                if size >= enough or len(heap) == most:
                    yield heap
                    heap, size = [], 0
        if heap:
            yield heap

    def _hold(self, file: Candidate) -> _Held | None:
        """Open a file that nobody writes; else note why it is left out.

        The lease is asked for before the first byte is read: whoever maps the file later cannot
        write without another change time. It is not kept, for a writer would wait for us; with a
        small file, which is read at once, it goes when the file is closed.
        """
        began = time.time_ns()
        try:
            fd = open_quietly(file.path, _FLAGS)
        except OSError as error:
            self._leave_out(file, error)
            return None
        held = self._open[fd] = _Held(file, fd, began)
        lease = take_lease(fd)
        if lease == "held" and file.size > SMALL_SIZE:
            drop_lease(fd)
        if lease == "busy":
            self._let_go(held)
            self.learned.busy.append(file.path)
            return None
        return held

    def _read_heap(self, heap: list[_Held], check: Callable[[], None]) -> list[_Held]:
        for held in heap:
            check()
            try:
                if self._what == "sample":
                    held.value = _sample(held.fd, held.file)
                else:
                    held.value = self._digest(held.fd, held.file, check)
            except OSError as error:
                held.error = error
        return heap

    def _digest(self, fd: int, file: Candidate, check: Callable[[], None]) -> bytes:
        if file.size <= BUFFER_SIZE:
            digest = digest_at_once(fd, file.size)
            if digest is None:
                raise FileChangedError("changed while it was read")
            self._advance(file.size)
            return digest
        if self._describe is not None:
            self._describe(os.path.basename(os.fsdecode(file.path)))

        def advance(count: int) -> None:
            check()
            self._advance(count)

        threads = threads_for(file.size, self._total, self._threads)
        return bytes.fromhex(hash_file(fd, advance=advance, threads=threads)[0].digest)

    def _let_go(self, held: _Held) -> None:
        """Close a file; its value counts if it is now as it was seen before it was opened."""
        file, fd = held.file, held.fd
        key = StatKey(file.size, file.mtime_ns, file.ctime_ns)
        del self._open[fd]
        try:
            st = os.fstat(fd)
        finally:
            os.close(fd)
        if held.error is not None:
            self._leave_out(file, held.error)
        elif held.value is not None and (StatKey.of(st) != key or signed(st.st_ino) != file.inode):
            self._leave_out(file, FileChangedError("changed since it was seen"))
        elif held.value is not None:
            racy = int(key.is_racy(held.began))
            values = (held.value, None) if self._what == "blake3" else (None, held.value)
            self._rows.append((file.filesystem, file.inode, *key, racy, *values))
            self.learned.values[file.filesystem, file.inode] = held.value
            self.learned.size += self._size_to_read(file)
            if self._what == "blake3":
                self.learned.read.add((file.filesystem, file.inode, key))

    def _leave_out(self, file: Candidate, error: OSError) -> None:
        self.learned.problems.append((file.path, error.strerror or str(error)))


def _sample(fd: int, file: Candidate) -> bytes:
    """Return the XXH3 of the head and the tail; of a small file, of all of it."""
    state = xxh3_128()
    for offset, size in ((0, HEAD_SIZE), (max(HEAD_SIZE, file.size - TAIL_SIZE), TAIL_SIZE)):
        count = min(size, file.size - offset)
        if count > 0:
            data = os.pread(fd, count, offset)
            if len(data) != count:
                raise FileChangedError("changed while it was read")
            state.update(data)
    return state.digest()
