"""Which bytes a file has: remembered while the file stays as it is, or hashed now.

What was learned of an inode is kept with its stat key, and with the boot in which it is believed
(`boot_for`, `believed`; `Catalog.members` is the same question in SQL). A file that was younger
than two seconds when its hashing began is hashed again next time, because a second change within
one clock tick would leave the same key. One that was younger than an hour, and was not synced, is
believed in this boot only: after a power cut it may have the same key and other bytes.

What was learned earlier says what to try, never what to delete: bytes that are let go were hashed
in the same run (`Read`).

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
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from xxhash import xxh3_128

from smartcache.errors import FileChangedError
from smartcache.progress import Progress, silent
from smartcache.store import catalog
from smartcache.store.catalog import ATTRIBUTES, RACY, FileRow, Known
from smartcache.system import kernel
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

if TYPE_CHECKING:
    from smartcache.store.home import Home

HOUR_NS: Final = 3600 * 10**9
MINUTE_NS: Final = 60 * 10**9
HEAD_SIZE: Final = 16 * 1024
TAIL_SIZE: Final = 64 * 1024
"""Models of one kind have equal heads (the list of their tensors); their last weights differ."""
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_SMALL_SIZE: Final = 64 * 1024
"""Up to here a second thread costs more than it brings."""
_HEAP_SIZE: Final = 8 << 20
"""Bytes that a thread is given at once, in one file or in many: it need not be woken for each."""
_MOST_OPEN: Final = 200
"""Files that are open at once, of 256 that some systems allow."""
_FLUSH_SECONDS: Final = 2.0
"""So often what was learned is written, so that Ctrl-C and SIGKILL lose little."""
_Found = tuple[Path, os.stat_result]


class Read:
    """The files that one run has read in full, as they were then."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, int], tuple[kernel.StatKey, str]] = {}

    def add(self, filesystem: str, inode: int, key: kernel.StatKey, digest: str) -> None:
        """Note that a file was read."""
        self._digests[filesystem, inode] = (key, digest)

    def digest_of(self, filesystem: str, inode: int, key: kernel.StatKey) -> str:
        """Return the digest of a file that was read and has not changed since; "" if it was not."""
        found = self._digests.get((filesystem, inode))
        return found[1] if found is not None and found[0] == key else ""


def believed(known: Known | None, key: kernel.StatKey | os.stat_result, boot: str) -> str:
    """Return the digest that a file surely has, by what is remembered of its inode; else ""."""
    if known is None or known.key != _key(key) or known.boot not in ("", boot):
        return ""
    return known.digest


def boot_for(
    key: kernel.StatKey | os.stat_result,
    now: int,
    *,
    is_durable: bool = False,
    lease: kernel.Lease = "held",
) -> str:
    """Return when a hash is to be believed that was begun at a time (ns): "" is for ever.

    `is_durable`: the bytes were synced before. Without leases nobody knows who has the file open
    for writing: then it must not have been written for a minute.
    """
    key = _key(key)
    written = abs(now - key.mtime_ns)  # a time in the future is as good as one long ago
    if key.is_racy(now) or (lease != "held" and written < MINUTE_NS):
        return RACY
    is_old = written >= HOUR_NS and now - key.ctime_ns >= HOUR_NS
    return "" if is_durable or is_old else kernel.boot_id()


def _key(key: kernel.StatKey | os.stat_result) -> kernel.StatKey:
    return key if isinstance(key, kernel.StatKey) else kernel.StatKey.of(key)


def with_digest(algorithms: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    """Return algorithms, each once, the one of digests first."""
    return tuple(dict.fromkeys(("blake3", *algorithms)))


def digests_of(home: Home, files: Sequence[_Found]) -> list[str]:
    """Return the digests that files surely have, by what is remembered of them; "": none known."""
    filesystems: dict[int, str] = {}
    inodes: dict[int, list[int]] = {}
    for path, st in files:
        if st.st_dev not in filesystems:
            filesystems[st.st_dev] = home.filesystem(path, st)
        inodes.setdefault(st.st_dev, []).append(st.st_ino)
    known = {dev: home.catalog.known(filesystems[dev], these) for dev, these in inodes.items()}
    return [believed(known[st.st_dev].get(st.st_ino), st, home.boot) for _, st in files]


def recall(
    home: Home, files: Sequence[_Found], wanted: Iterable[Algorithm] = ()
) -> dict[Path, dict[Algorithm, str]]:
    """Return what is known of the hashes of files as they are now; {}: not all that is wanted."""
    digests, wanted = digests_of(home, files), set(wanted)
    values = home.catalog.hashes_of(filter(None, digests))
    return {
        path: dict(values[digest]) if digest and wanted <= values[digest].keys() else {}
        for (path, _), digest in zip(files, digests, strict=True)
    }


def hashes_of(
    home: Home, path: str | Path, algorithms: Iterable[Algorithm] = (), *,
    advance: Advance | None = None, read: Read | None = None,
) -> Hashes:  # fmt: skip
    """Return the hashes of any file, its digest among them, remembered or computed now.

    `advance` is told of bytes that are read; a file that was is added to `read`.
    """
    path, wanted = Path(path), with_digest(algorithms)
    st = os.stat(path)
    if values := recall(home, [(path, st)], wanted)[path]:
        return Hashes(size=st.st_size, values=values)
    began, lease = time.time_ns(), _lease(path)
    hashes, key = hash_file(path, wanted, advance=advance, threads=home.settings.threads)
    if lease != "busy":
        remember(home, [(path, key, hashes, boot_for(key, began, lease=lease))])
    if read is not None:
        read.add(home.filesystem(path, st), st.st_ino, key, hashes.digest)
    return hashes


def hash_all(
    home: Home, paths: Iterable[Path], algorithms: Iterable[Algorithm] = (), *,
    progress: Progress = silent,
) -> dict[Path, Hashes]:  # fmt: skip
    """Return the hashes of many files, remembered or computed now, in threads.

    Files that cannot be read, that somebody writes, or that are so young that nothing could be
    remembered, are left out: whoever uses them finds out why.
    """
    wanted, began = with_digest(algorithms), time.time_ns()
    files: list[_Found] = []
    for path in paths:
        with suppress(OSError):
            st = os.stat(path)
            if not kernel.StatKey.of(st).is_racy(began):
                files.append((path, st))
    values = recall(home, files, wanted)
    found = {path: Hashes(size=st.st_size, values=values[path])
             for path, st in files if values[path]}  # fmt: skip
    leases = {path: _lease(path) for path, _ in files if path not in found}
    unknown = [path for path, lease in leases.items() if lease != "busy"]
    if not unknown:
        return found
    # Hash everything first: never inside a transaction.
    hashed = [
        (each.path, each.key, each.hashes, boot_for(each.key, began, lease=leases[each.path]))
        for each in hash_many(unknown, wanted, threads=home.settings.threads, progress=progress)
        if each.hashes is not None and each.key is not None
    ]
    remember(home, hashed)
    return found | {path: hashes for path, _, hashes, _ in hashed}


def _lease(path: Path) -> kernel.Lease:
    """Say whether a file can be leased; "busy": somebody has it open for writing.

    A page that is mapped writable and dirty already can be written without any trace in stat, so
    hashes of such a file are not remembered. Where there are no leases, nobody can tell.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "unsupported"
    try:
        return kernel.take_lease(descriptor)
    finally:
        os.close(descriptor)  # and with it the lease


def remember(
    home: Home, files: Iterable[tuple[Path, kernel.StatKey | os.stat_result, Hashes, str]]
) -> None:
    """Keep the hashes of files that are still as they were, each with its `boot_for`."""
    rows: list[FileRow] = []
    values: list[Hashes] = []
    for path, key, hashes, boot in files:
        with suppress(FileNotFoundError):
            st = os.stat(path)
            if kernel.StatKey.of(st) == _key(key):
                rows.append(FileRow.of(home.filesystem(path, st), st, hashes.digest, boot))
                values.append(hashes)
    if rows:
        home.catalog.remember(rows, values)


# many files, for a scan


class Candidate(NamedTuple):
    """A file that may be equal to others; `filesystem` by its number, `inode` signed."""

    path: bytes
    filesystem: int
    inode: int
    key: kernel.StatKey


What = Literal["digest", "sample"]


@dataclass(slots=True)
class Learned:
    """What became of some files: values by (filesystem, inode); the rest named with the reason."""

    values: dict[tuple[int, int], bytes] = field(default_factory=dict)
    with_attributes: set[tuple[int, int]] = field(default_factory=set)
    busy: list[bytes] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)
    size: int = 0
    """Bytes read."""


def learn(
    home: Home, files: Sequence[Candidate], what: What, *, advance: Advance,
    describe: Callable[[str], None] = lambda _: None, read: Read | None = None,
) -> Learned:  # fmt: skip
    """Read files and remember what was learned as it comes; `advance` is told the bytes hashed.

    `describe` is told the names of large files when they are begun. What was hashed in full is
    added to `read`. Ctrl-C ends the threads; what was learned until then is kept.
    """
    run = _Run(home, what == "sample", advance, describe, read)
    try:
        run.learn(files)
    finally:
        run.flush(is_over=True)
    return run.learned


@dataclass(slots=True)
class _Held:
    """A file that is open and that nobody was writing when reading began."""

    file: Candidate
    fd: int
    began: int
    lease: kernel.Lease
    value: bytes | None = None
    error: OSError | None = None


@dataclass(slots=True)
class _Run:
    """One call of `learn`: the thread that called opens and closes, the others read and hash.

    Measured with 13,000 files of 240 KB on two cores: two threads that do everything take 1.5 s,
    because they wait for each other after each of eight system calls; this way it is 1.0 s.
    """

    home: Home
    is_sample: bool
    advance: Advance
    describe: Callable[[str], None]
    read: Read | None
    learned: Learned = field(default_factory=Learned)
    _total: int = 0
    _open: dict[int, _Held] = field(default_factory=dict)
    _rows: list[catalog.Learned] = field(default_factory=list)
    _written: float = field(default_factory=time.monotonic)

    @property
    def _threads(self) -> int:
        return min(max(1, self.home.settings.threads), _MOST_OPEN // 2)

    def learn(self, files: Sequence[Candidate]) -> None:
        """Read all: small ones, which need no threads, and then the largest first."""
        ordered = sorted(files, key=lambda file: file.key.size, reverse=True)
        large = [file for file in ordered if file.key.size > _SMALL_SIZE]
        self._total = sum(map(self._size_to_read, large))
        crew = Crew(self._read_heap, self._threads)
        try:
            for file in ordered[len(large) :]:
                if held := self._hold(file):
                    self._read_heap([held], lambda: None)
                    self._let_go(held)
                self.flush()
            with closing(crew.results(self._heaps(large), self.flush)) as heaps:
                for heap in heaps:
                    for held in heap:
                        self._let_go(held)
                    self.flush()
        finally:
            for held in list(self._open.values()):
                self._let_go(held)

    def flush(self, *, is_over: bool = False) -> None:
        """Keep what was learned for the next time, now and then."""
        if is_over or time.monotonic() - self._written > _FLUSH_SECONDS:
            rows, self._rows = self._rows, []
            if rows:
                self.home.catalog.learn(rows)
            self._written = time.monotonic()

    def _size_to_read(self, file: Candidate) -> int:
        size = file.key.size
        return min(size, HEAD_SIZE + TAIL_SIZE) if self.is_sample else size

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
            fd = kernel.open_quietly(file.path, _FLAGS)
        except OSError as error:
            self._leave_out(file, error)
            return None
        lease = kernel.take_lease(fd)
        if lease == "busy":
            os.close(fd)
            self.learned.busy.append(file.path)
            return None
        if lease == "held" and file.key.size > _SMALL_SIZE:
            kernel.drop_lease(fd)
        held = self._open[fd] = _Held(file, fd, began, lease)
        return held

    def _read_heap(self, heap: list[_Held], check: Callable[[], None]) -> list[_Held]:
        for held in heap:
            check()
            try:
                held.value = self._sample(held) if self.is_sample else self._digest(held, check)
            except OSError as error:
                held.error = error
        return heap

    def _sample(self, held: _Held) -> bytes:
        """Return the XXH3 of the head and the tail; of a small file, of all of it."""
        state, size = xxh3_128(), held.file.key.size
        for offset, most in ((0, HEAD_SIZE), (max(HEAD_SIZE, size - TAIL_SIZE), TAIL_SIZE)):
            count = min(most, size - offset)
            if count > 0:
                data = os.pread(held.fd, count, offset)
                if len(data) != count:
                    raise FileChangedError("changed while it was read")
                state.update(data)
        return state.digest()

    def _digest(self, held: _Held, check: Callable[[], None]) -> bytes:
        file, fd, size = held.file, held.fd, held.file.key.size
        if size <= BUFFER_SIZE:
            digest = digest_at_once(fd, size)
            if digest is None:
                raise FileChangedError("changed while it was read")
            self.advance(size)
            return digest
        self.describe(os.path.basename(os.fsdecode(file.path)))

        def advance(count: int) -> None:
            check()
            self.advance(count)

        threads = threads_for(size, self._total, self._threads)
        return bytes.fromhex(hash_file(fd, advance=advance, threads=threads)[0].digest)

    def _let_go(self, held: _Held) -> None:
        """Close a file; its value counts if it is now as it was seen before it was opened."""
        file, fd, value = held.file, held.fd, held.value
        del self._open[fd]
        try:
            st = os.fstat(fd)
            traits = ATTRIBUTES if kernel.attributes_of(fd) else 0
        finally:
            os.close(fd)
        if held.error is not None:
            self._leave_out(file, held.error)
        elif value is not None and (
            kernel.StatKey.of(st) != file.key or st.st_ino != file.inode & catalog.UNSIGNED
        ):
            self._leave_out(file, FileChangedError("changed since it was seen"))
        elif value is not None:
            where = file.filesystem, file.inode
            digest, sample = (None, value) if self.is_sample else (value, None)
            boot = boot_for(file.key, held.began, lease=held.lease)
            row = catalog.Learned(*where, file.key, traits, digest, sample, boot)
            self._rows.append(row)
            self.learned.values[where] = value
            self.learned.size += self._size_to_read(file)
            if traits:
                self.learned.with_attributes.add(where)
            if self.read is not None and not self.is_sample:
                name = self.home.catalog.filesystem_name(file.filesystem)
                self.read.add(name, st.st_ino, file.key, value.hex())

    def _leave_out(self, file: Candidate, error: OSError) -> None:
        self.learned.problems.append((file.path, error.strerror or str(error)))
