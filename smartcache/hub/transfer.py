"""What goes on while bytes come: threads, one bar over all of them, and hashing on the way.

Threads do jobs of two kinds side by side: reading this disk, and fetching from the Hub. They are
daemon threads: a process that ends does not wait for a download that nobody wants any more.

huggingface_hub tells a progress bar class about every chunk it has received. The class made here
passes that on to one bar for all files, and raises when the download is no longer wanted, which is
the only moment at which a running transfer can be ended.

Files are hashed while huggingface_hub still writes them: little is left to do when they are whole.
This is a head start, never a proof: what was read may have been written again since. Whoever uses
the hashes compares the digest with that of the finished file, which is fast (BLAKE3), and thereby
knows that the slow one (SHA-256) belongs to the same bytes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from smartcache.errors import StoreError
from smartcache.progress import Progress
from smartcache.system.hashing import Algorithm, Hasher, Hashes

Kind = Literal["local", "fetch"]
_PATIENCE = 5.0
"""Seconds that running jobs get to notice that they are no longer wanted."""
_PAUSE = 0.02
_STEP = 4 << 20
_SUFFIX = ".incomplete"


class Workers:
    """A queue and some threads for each kind of job. Jobs may add jobs.

    After Ctrl-C `is_stopping` is set, which running jobs look at.
    """

    def __init__(self, most: Mapping[Kind, int]) -> None:
        self.is_stopping = threading.Event()
        self._most = most
        self._changed = threading.Condition()
        self._waiting: dict[Kind, deque[Callable[[], None]]] = {kind: deque() for kind in most}
        self._running: dict[Kind, int] = dict.fromkeys(most, 0)
        self._error: BaseException | None = None

    def add(self, kind: Kind, job: Callable[[], None]) -> None:
        """Let a job be done as soon as a thread is free."""
        with self._changed:
            self._waiting[kind].append(job)
            if self._running[kind] < self._most[kind]:
                threading.Thread(target=self._run, args=(kind,), daemon=True).start()
                self._running[kind] += 1  # it waits for this lock before it looks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an interruption tell the running jobs, and give them a moment to end."""
        if error is not None:
            self.is_stopping.set()
            with self._changed:
                self._drop_waiting()
                self._changed.wait_for(self._is_idle, timeout=_PATIENCE)

    def wait(self) -> None:
        """Return when all jobs are done; or raise the first error, after those then running."""
        with self._changed:
            self._changed.wait_for(self._is_idle)
        if self._error is not None:
            raise self._error

    def _run(self, kind: Kind) -> None:
        while True:
            with self._changed:
                if not self._waiting[kind]:
                    self._running[kind] -= 1
                    self._changed.notify_all()
                    return
                job = self._waiting[kind].popleft()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised again by `wait`
                with self._changed:
                    self._error = self._error or error
                    self._drop_waiting()

    def _is_idle(self) -> bool:
        return not any(self._running.values())

    def _drop_waiting(self) -> None:
        for queue in self._waiting.values():
            queue.clear()


# bars


class StoppedError(KeyboardInterrupt):
    """The download was interrupted; it never leaves this package.

    For huggingface_hub it is a Ctrl-C in the thread that downloads: it ends Xet transfers.
    """


class _Part:
    """What huggingface_hub takes as the progress bar of one file."""

    advance: Callable[[int], None]
    arrived: Callable[[int], None]
    is_stopping: threading.Event

    def __init__(self, *args: object, initial: int = 0, **options: object) -> None:
        del args, options
        self.n = 0
        self.total: int | None = None
        if initial:  # of an earlier attempt
            self.n = initial
            self.advance(initial)

    def update(self, n: float | None = 1) -> None:
        """Count bytes that were written."""
        self.update_transfer()
        self.n += int(n or 0)
        self.advance(int(n or 0))
        self.arrived(int(n or 0))

    def update_transfer(self, n: float | None = 1) -> None:
        """Hear of bytes that came (Xet), which are not counted a second time."""
        del n
        if self.is_stopping.is_set():
            raise StoppedError

    def close(self) -> None:
        """Do nothing: the bar of all files goes on."""

    refresh = reset = close

    def set_postfix_str(self, *args: object, **options: object) -> None:
        """Show nothing of a single file."""

    set_description = set_description_str = set_postfix = set_postfix_str
    set_transfer_postfix_str = set_postfix_str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def bar_class(
    advance: Callable[[int], None], arrived: Callable[[int], None], is_stopping: threading.Event
) -> type:
    """Return a class that huggingface_hub takes as a progress bar for one file.

    `advance` is told of all bytes of the file, `arrived` of those that come now.
    """
    members = {
        "advance": staticmethod(advance), "arrived": staticmethod(arrived),
        "is_stopping": is_stopping,
    }  # fmt: skip
    return type("Part", (_Part,), members)


def hidden_class() -> type:
    """Return a progress bar class of tqdm that shows nothing."""
    from tqdm.auto import tqdm

    class Hidden(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Hidden


@contextmanager
def one_bar(
    fetched: Sequence[str],
    read: Sequence[str],
    size: int,
    progress: Progress | None = None,
    tqdm_class: type | None = None,
) -> Iterator[Callable[[int], None]]:
    """Show one bar for files to fetch and files of this disk to read, given by name.

    The block gets a function that advances it by bytes. Without `progress` it is one of
    huggingface_hub's.
    """
    verb = "Fetching and hashing" if fetched and read else "Fetching" if fetched else "Hashing"
    names = [*fetched, *read]
    label = f"{verb} {names[0] if len(names) == 1 else f'{len(names):,} files'}"
    if not names:
        label = "Linking files"
    if progress is not None:
        with progress(label, size, "bytes") as job:
            yield job.advance
        return
    from huggingface_hub.utils import tqdm as hub_bar  # type: ignore[attr-defined]

    # None: off where no terminal watches, as huggingface_hub's own bars are.
    options = {} if tqdm_class is not None else {"disable": None}
    make, gate = tqdm_class or hub_bar, threading.Lock()
    with make(desc=label, total=size, unit="B", unit_scale=True, **options) as bar:

        def advance(count: int) -> None:
            with gate:
                bar.update(count)

        yield advance


# hashing on the way


class Followed:
    """One file that is being downloaded: an unfinished file with this name in it."""

    def __init__(
        self, directory: Path, name: str, algorithms: tuple[Algorithm, ...], size: int | None
    ) -> None:
        self._directory = directory
        self._name = name
        self._algorithms = algorithms
        self._size = size
        self._since = time.time() - 1
        self._gate = threading.Lock()
        self._fd = -1
        self._offset = 0
        self._hasher = Hasher(algorithms, size=size)
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        """Follow it in a thread until the end of the block."""
        threading.Thread(target=self._run, daemon=True, name="follow").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        with self._gate:
            self._close()

    def _run(self) -> None:
        buffer = bytearray(_STEP)
        while not self._is_over.is_set():
            if not self.step(buffer):
                self._is_over.wait(_PAUSE)

    def step(self, buffer: bytearray) -> bool:
        """Hash what has come since; say whether there was anything. Errors end the following."""
        with self._gate:
            try:
                return (self._fd >= 0 or self._find()) and self._read(buffer)
            except OSError:
                self._close()
                return False

    def finish(self, path: Path) -> Hashes | None:
        """Return the hashes of the finished file, the rest of it read now; None: not followed."""
        with self._gate:
            try:
                if self._fd < 0 or not os.path.samestat(os.fstat(self._fd), os.stat(path)):
                    return None
                buffer = bytearray(_STEP)
                while self._read(buffer):
                    pass
                is_whole = self._offset == os.fstat(self._fd).st_size
                return self._hasher.finish() if is_whole else None
            except (OSError, StoreError):
                return None
            finally:
                self._close()

    def _close(self) -> None:
        self._name = "\0"  # no file is found any more
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _find(self) -> bool:
        newest, found = self._since, ""
        with suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                if self._name in entry.name and entry.name.endswith(_SUFFIX):
                    changed = entry.stat(follow_symlinks=False).st_mtime
                    if changed >= newest:
                        newest, found = changed, entry.path
        if not found:
            return False
        self._fd = os.open(found, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        return True

    def _read(self, buffer: bytearray) -> bool:
        size = os.fstat(self._fd).st_size
        if size < self._offset:  # the client began again
            self._hasher, self._offset = Hasher(self._algorithms, size=self._size), 0
        count = os.preadv(self._fd, [buffer], self._offset) if size > self._offset else 0
        if count:
            self._hasher.update(memoryview(buffer)[:count])
            self._offset += count
        return count > 0
