"""Sending the bytes of a file: limited, counted, and cut, held or falsified where a test wants it.

    send_body(Body(file, first=0, end=file.size), connection, request, limit)

A file on disk goes to the socket without passing through Python.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.hub_server.faults import Fault
from tests.hub_server.limit import Limit
from tests.hub_server.log import Request
from tests.hub_server.repos import HubFile

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_CAN_SENDFILE = hasattr(os, "sendfile")


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of a file from `first` up to, not including, `end`."""

    file: HubFile
    first: int
    end: int
    stops: tuple[Fault, ...] = ()
    """Faults in the middle: slow, hold, cut."""
    is_false: bool = False
    is_chunked: bool = False

    @property
    def size(self) -> int:
        return self.end - self.first


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """Return (first, end) of what a Range header wants; None if there is no such part."""
    found = _RANGE.fullmatch(header or "")
    if found is None or found[0] == "bytes=-":
        return 0, size
    if not found[1]:
        return max(size - int(found[2]), 0), size
    first, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
    return (first, end) if first < end else None


def send_body(body: Body, connection: socket.socket, request: Request, limit: Limit) -> bool:
    """Send it all; False if it was cut, and the connection has to go."""
    with _opened(body) as source:
        position = body.first
        for stop in sorted(body.stops, key=lambda fault: fault.after):
            end = min(body.first + stop.after, body.end)
            position = source.send(connection, position, end, request, limit)
            if stop.kind == "cut":
                return False
            take_time(stop)
        source.send(connection, position, body.end, request, limit)
    if body.is_chunked:
        connection.sendall(b"0\r\n\r\n")
    return True


def take_time(fault: Fault) -> None:
    """Do what a fault of kind slow or hold does."""
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    else:
        fault.hold.wait()


class _Memory:
    """Bytes, or a file that cannot go to the socket by itself."""

    def __init__(self, data: bytes, *, is_chunked: bool) -> None:
        self._data = memoryview(data)
        self._is_chunked = is_chunked

    def send(
        self, connection: socket.socket, first: int, end: int, request: Request, limit: Limit
    ) -> int:
        while first < end:
            piece = self._data[first : min(first + limit.slice_size, end)]
            limit.wait_for(len(piece))
            request.sent += len(piece)
            try:
                if self._is_chunked:
                    connection.sendall(b"%x\r\n" % len(piece))
                connection.sendall(piece)
                if self._is_chunked:
                    connection.sendall(b"\r\n")
            except OSError:
                request.sent -= len(piece)
                raise
            first += len(piece)
        return first


class _Disk:
    """A file whose bytes never enter this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(
        self, connection: socket.socket, first: int, end: int, request: Request, limit: Limit
    ) -> int:
        while first < end:
            wanted = min(limit.slice_size, end - first)
            limit.wait_for(wanted)
            request.sent += wanted
            sent = 0
            try:
                sent = os.sendfile(connection.fileno(), self._descriptor, first, wanted)
            finally:
                request.sent -= wanted - sent
            if not sent:
                raise OSError("the file that is served became shorter")
            first += sent
        return first


@contextmanager
def _opened(body: Body) -> Iterator[_Memory | _Disk]:
    data = body.file.data
    if isinstance(data, bytes) or body.is_false or body.is_chunked or not _CAN_SENDFILE:
        held = body.file.read()
        if body.is_false and body.size:
            middle = (body.first + body.end) // 2
            held = held[:middle] + bytes([held[middle] ^ 0xFF]) + held[middle + 1 :]
        yield _Memory(held, is_chunked=body.is_chunked)
        return
    descriptor = os.open(data, os.O_RDONLY)
    try:
        yield _Disk(descriptor)
    finally:
        os.close(descriptor)
