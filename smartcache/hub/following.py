"""Hash files while huggingface_hub still writes them: little is left to do when they are whole.

This is a head start, never a proof: what was read may have been written again since. Whoever uses
the hashes compares the digest with that of the finished file, which is fast (BLAKE3), and thereby
knows that the slow one (SHA-256) belongs to the same bytes.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from smartcache.errors import StoreError
from smartcache.system import Algorithm, Hasher, Hashes

_PAUSE = 0.02
_STEP = 4 << 20
_SUFFIX = ".incomplete"


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

    def stop(self) -> None:
        """Stop looking at the file."""
        with self._gate:
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


class Follower:
    """One thread that follows all files being downloaded; it ends with the `with` block."""

    def __init__(self) -> None:
        self._files: list[Followed] = []
        self._gate = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()

    def follow(
        self, directory: Path, name: str, algorithms: tuple[Algorithm, ...], size: int | None
    ) -> Followed:
        """Begin to look for an unfinished file in a directory."""
        followed = Followed(directory, name, algorithms, size)
        with self._gate:
            self._files.append(followed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="follow")
                self._thread.start()
        return followed

    def forget(self, followed: Followed) -> None:
        """Stop following a file."""
        with self._gate:
            self._files.remove(followed)
        followed.stop()

    def _run(self) -> None:
        buffer = bytearray(_STEP)
        while not self._is_over.is_set():
            with self._gate:
                files = list(self._files)
            steps = [each.step(buffer) for each in files]
            if not any(steps):
                self._is_over.wait(_PAUSE)
