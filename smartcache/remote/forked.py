"""Read from a tier in the child of a fork, where obstore would wait for ever.

Its threads are not there after a fork, and nothing can start them again. DataLoader forks its
workers all the same. So such a child starts some processes of its own, which read for it: a line of
JSON asks for a part of an object, and its bytes come back behind their number.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any, Final

from smartcache.errors import TierError

_MOST: Final = 4
"""Processes that read for one."""
_FAILED: Final = 1 << 62
_WORD: Final = 8


class Readers:
    """The processes that read for this one."""

    def __init__(self) -> None:
        self._free: list[subprocess.Popen[bytes]] = []
        self._turns = threading.BoundedSemaphore(_MOST)
        self._pid = os.getpid()

    def read(self, tier: Mapping[str, Any], digest: str, start: int, length: int) -> bytes:
        """Return a part of an object, as `Tier.read` does."""
        with self._turns:
            try:
                reader = self._free.pop()
            except IndexError:
                reader = _started()
            try:
                data = _asked(reader, {"tier": tier, "args": [digest, start, length]})
            except BaseException:
                reader.kill()
                reader.wait()
                raise
            self._free.append(reader)
        if isinstance(data, BaseException):
            raise data
        return data

    def is_of_this_process(self) -> bool:
        """Whether they were started by this process, and not by the parent of a fork."""
        return self._pid == os.getpid()


def _started() -> subprocess.Popen[bytes]:
    # Modules come from where they come from here, and never from the folder one happens to be in.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    return subprocess.Popen(  # noqa: S603 - this interpreter, and nothing else
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def _asked(reader: subprocess.Popen[bytes], question: Mapping[str, Any]) -> bytes | BaseException:
    to, back = reader.stdin, reader.stdout
    if to is None or back is None:
        raise TierError("A process that reads from a tier has no pipes")
    try:
        to.write(json.dumps(question).encode() + b"\n")
        to.flush()
        size = int.from_bytes(_exactly(back, _WORD), "little")
        data = _exactly(back, size & (_FAILED - 1))
    except (BrokenPipeError, EOFError) as error:
        raise TierError("A process that reads from a tier has ended") from error
    if size & _FAILED:
        found = pickle.loads(base64.b64decode(data))  # noqa: S301 - of our own process
        return found if isinstance(found, BaseException) else TierError(str(found))
    return data


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError
    return data


def serve() -> None:
    """Answer until nobody asks any more."""
    from smartcache.remote.tier import connected

    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            data, flag = connected(asked["tier"]).read(*asked["args"]), 0
        except Exception as error:  # noqa: BLE001 - it is raised by whoever has asked
            data, flag = base64.b64encode(pickle.dumps(error)), _FAILED
        sys.stdout.buffer.write((len(data) | flag).to_bytes(_WORD, "little") + data)
        sys.stdout.buffer.flush()
