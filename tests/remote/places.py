"""Object stores for tests, on this machine: a folder, moto, rclone; and a wire that can be cut."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import pytest

from smartcache.remote import Tier

KEYS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secretsecret"}
BUCKET = "bucket"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int) -> Iterator[str]:
    """Have a server run for the length of a block."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if server.poll() is not None:
                pytest.skip(f"{command[0]} does not run here")
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()


@contextmanager
def moto() -> Iterator[str]:
    """The S3 server of moto: ranges and conditional puts are right, all in memory."""
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("moto is not installed")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port) as url:
        asking = HTTPConnection("127.0.0.1", port)
        asking.request("PUT", f"/{BUCKET}")
        assert asking.getresponse().status == 200
        asking.close()
        yield url


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """`rclone serve s3`: quick, and knows neither conditional puts nor ranges."""
    program = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
    if program is None:
        pytest.skip("rclone is not installed")
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    port = free_port()
    keys = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
    command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys,
               str(folder)]  # fmt: skip
    with _running(command, port) as url:
        yield url


def s3_tier(url: str, prefix: str, name: str = "s3") -> Tier:
    """The tier of a server, marked as ours."""
    return Tier(name, f"s3://{BUCKET}/{prefix}", {"endpoint": url, "region": "us-east-1"}).begin()


class Wire:
    """A way to a server that can be cut, at once or after some bytes of answers."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.left: int | None = None
        """Bytes that come through before every connection is cut; None: all."""
        self.cuts = 0
        self.pause = 0.0
        """Seconds that each 64 KiB take, in both directions."""
        self._gate = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                mine, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(mine,), daemon=True).start()

    def _carry(self, mine: socket.socket) -> None:
        with mine, suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as other:
            sending = threading.Thread(target=self._copy, args=(mine, other, False), daemon=True)
            sending.start()
            self._copy(other, mine, True)

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.pause)
                if is_answer:
                    with self._gate:
                        if self.left is not None:
                            data = data[: max(0, self.left)]
                            self.left -= len(data)
                            is_cut = self.left <= 0
                        else:
                            is_cut = False
                    target.sendall(data)
                    if is_cut:
                        self.cuts += 1
                        break
                else:
                    target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
