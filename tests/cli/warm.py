"""The program without the time that its imports take: forked from a process that has done them.

A forked program has streams, a directory, an environment and signals of its own, and it ends as
every interpreter does: with its threads, `atexit`, and streams that perhaps cannot be flushed. Its
parent runs this module, one per worker of the tests. That has imported all of smartcache and what
huggingface_hub imports, but not huggingface_hub: it reads the environment when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG")
"""Variables that it reads before any code of ours."""


class Parent:
    """The process that forks programs: of this process, and for these settings."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        self._settings = _settings(env)
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.cli.warm", str(theirs.fileno())],
                cwd="/",
                env={**env, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is not for it
            )

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether a fork does as well as a start; it does not for a process in a namespace."""
        return os.getpid() == self._owner and _settings(env) == self._settings

    def end(self) -> None:
        if os.getpid() == self._owner:
            self._channel.close()
            self._process.wait()

    def fork(self, request: dict[str, Any], stdio: Sequence[int]) -> int:
        """Fork a program; return where its process id can be read and, in the end, its code."""
        reading, writing = os.pipe()
        with tempfile.TemporaryFile("w+") as file:
            json.dump(request, file)
            file.flush()
            socket.send_fds(self._channel, [b"!"], [file.fileno(), writing, *stdio])
        os.close(writing)
        return reading


@functools.cache
def parent() -> Parent:
    """The one of this worker; it ends with it."""
    made = Parent(os.environ)
    atexit.register(made.end)
    return made


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_OF_THE_INTERPRETER) and name != "PYTHONPATH"
    }


class Forked:
    """A forked program: the part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        start_new_session: bool = False,
    ) -> None:
        self.stdout, output = _opened(stdout)
        self.stderr, errors = _opened(stderr)
        source = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else os.dup(stdin)
        umask = os.umask(0)
        os.umask(umask)
        request = {
            "words": [*words],
            "cwd": str(cwd),
            "env": dict(env),
            "umask": umask,
            "session": start_new_session,
        }
        stdio = (source, output, errors)
        self.returncode: int | None = None
        self._report = os.fdopen(parent().fork(request, stdio))
        for number in stdio:
            os.close(number)
        self.pid = int(self._report.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("smartcache", timeout or 0)
            with self._report:
                self.returncode = int(self._report.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what both streams still give, and wait for the end."""
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(_read, stream) for stream in (self.stdout, self.stderr)]
            try:
                stdout, stderr = (each.result(timeout) for each in both)
            except TimeoutError:
                self.kill()
                raise
        self.wait(timeout)
        return stdout, stderr

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _opened(wanted: int) -> tuple[IO[str] | None, int]:
    """Return our end and a descriptor of its own for the program."""
    if wanted == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    if wanted != subprocess.PIPE:
        return None, os.dup(wanted)
    reading, writing = os.pipe()
    return open(reading, encoding="utf-8", errors="surrogateescape"), writing


def _read(stream: IO[str] | None) -> str:
    if stream is None or stream.closed:
        return ""
    with stream:
        return stream.read()


def _load() -> None:
    """Import all that a program imports whatever its environment is."""
    import smartcache.cli

    # Not what changes other libraries when it is imported.
    without = ("smartcache.__main__", "smartcache.auto", "smartcache.integrations")
    for found in pkgutil.walk_packages(smartcache.__path__, "smartcache."):
        if not found.name.startswith(without):
            importlib.import_module(found.name)
    reading, writing = os.pipe()
    if os.fork() == 0:
        importlib.import_module("huggingface_hub.hf_api")
        importlib.import_module("huggingface_hub.utils.tqdm")
        with open(writing, "w") as pipe:
            pipe.write(" ".join(sys.modules))
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        names = pipe.read().split()
    os.wait()
    for name in names:
        if not name.startswith(("huggingface_hub", "hf_xet", "__")):
            with contextlib.suppress(ImportError):  # not each name is one that can be imported
                importlib.import_module(name)


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork for each request; return in the program that was forked, with what was asked of it."""
    keepers: set[int] = set()
    while True:
        message, numbers, _, _ = socket.recv_fds(channel, 1, 5)
        if not message:
            for keeper in keepers:
                os.waitpid(keeper, 0)
            sys.exit()
        keepers = {pid for pid in keepers if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        keeper = os.fork()
        if keeper == 0:
            break
        keepers.add(keeper)
        for number in numbers:
            os.close(number)
    channel.close()
    file, report, *stdio = numbers
    with open(file) as stream:
        stream.seek(0)
        request: dict[str, Any] = json.load(stream)
    program = os.fork()
    if program:
        for number in (0, 1, 2, *stdio):
            os.close(number)
        os.write(report, f"{program}\n".encode())
        _, status = os.waitpid(program, 0)
        os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(report)
    for number, given in enumerate(stdio):
        os.dup2(given, number)
        os.close(given)
    return request


def _become(request: dict[str, Any]) -> None:
    """Be what a program is when it begins."""
    if request["session"]:
        os.setsid()
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["smartcache", *request["words"]]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)  # of the interpreter's making, by the same settings
        mode, size = ("wb", 0 if old.write_through else -1) if number else ("rb", -1)
        text = io.TextIOWrapper(
            open(number, mode, size, closefd=False),  # noqa: SIM115
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=name == "stderr" or os.isatty(number),
            write_through=old.write_through,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


if __name__ == "__main__":
    _load()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
    from smartcache.cli import main

    main()
