"""Engines: who does the tasks of a build. Several processes of this machine, or another package's.

An engine knows nothing of datasets. It brings a *worker*, an object that can be called with a task,
to where the work is done, once; it takes tasks as its processes become free, and gives back what
the worker has returned, in whatever order it comes. What a process had that has died is given back
as lost. Processes live as long as one build, and end by themselves when the one that started them
is gone.
"""

from __future__ import annotations

import os
import pickle
import queue
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from smartcache.errors import ConfigError, EncoderError

if TYPE_CHECKING:
    from smartcache.artifacts import ArtifactSet

T = TypeVar("T")
_AHEAD = 2
"""Tasks that a process has: while it does one, the next is there."""
_TICK = 0.2
"""Seconds after which an engine says that nothing has come."""
_GRACE = 15.0
"""Seconds that a process has to end its batch and deliver what it has done."""
_BIRTHS = 3
"""Processes that may die, one after the other, before one of them has done anything."""
_GUARD = "Start what is to run once below that line, or put the encoder into a module."
_CODE = (
    "import os, sys; sys.path[:] = {path!r};"
    " os.environ.setdefault('OMP_NUM_THREADS', '{threads}'); os.environ.update({more!r});"
    " from smartcache.training.engines import serve; serve({fd})"
)
"""What a process runs. Variables are set before anything is imported that reads them."""
_is_worker = False


class Doing(Protocol):
    """What engines bring to their processes, by pickle, and call there."""

    def __call__(self, task: Any) -> Any:  # noqa: ANN401 - the engine passes both on
        """Do a task."""
        ...

    def enough(self) -> None:
        """Hear, in another thread, that the task in hand is to end early."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Lost(NamedTuple):
    """Comes in place of a result: the process that had the task has died."""

    how: str
    had_begun: bool
    """It was the task in hand, and not one that was waiting."""


class Fault(NamedTuple):
    """An error on its way to another process."""

    data: bytes
    """Pickled; empty: it cannot be."""
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Take an error as it is, or at least its words."""
        text = "".join(traceback.format_exception(error))
        try:
            data = pickle.dumps(error)
            pickle.loads(data)  # noqa: S301 - our own
        except Exception:  # noqa: BLE001 - whatever its class makes of it
            data = b""
        return cls(data, text)

    def error(self) -> BaseException:
        """Return the error."""
        with suppress(Exception):  # of a class that is not known here
            found: BaseException = pickle.loads(self.data)  # noqa: S301 - of our own worker
            found.add_note(f"In a worker: {self.text}")
            return found
        return EncoderError(f"An encoder failed in a worker: {self.text}")


class Delivery(Protocol):
    """How sealed packs get from a worker to the set. It travels to the workers, by pickle."""

    def deliver(self, pack: Path) -> Any:  # noqa: ANN401
        """Bring a sealed pack on its way; in the worker. What is returned travels."""
        ...

    def accept(self, opened: ArtifactSet, delivered: Any) -> None:  # noqa: ANN401
        """Let the set have a pack that was delivered; in the process that builds."""
        ...


class Engine(Protocol):
    """What `dataset.build(engine=...)` takes: `ProcessEngine`, `smartcache.remote.RayEngine`."""

    @property
    def workers(self) -> int:
        """How many tasks are done at the same time."""
        ...

    def map(
        self, worker: Doing, take: Callable[[], T | None]
    ) -> Iterator[tuple[T, Any] | None]:  # fmt: skip
        """Do tasks; give each with its result, or with `Lost`, as it comes.

        `take` is asked for a task whenever a process has room for one; None: there is none now. It
        ends when there is none and nothing is under way. None is given when nothing has come for a
        while, so that whoever waits can look around.
        """
        ...

    def delivery(self, opened: ArtifactSet) -> Delivery | None:
        """Say how packs get to a set; None: they are written to its folder, which all can reach."""
        ...

    def enough(self) -> None:
        """Have all tasks end early; their results still come."""
        ...

    def close(self) -> None:
        """End all processes. The engine can be used again."""
        ...


class _Process:
    """One process, and the tasks that it has."""

    def __init__(self, number: int, threads: int, more: dict[str, str]) -> None:
        self.number = number
        mine, theirs = socket.socketpair()
        with theirs:
            code = _CODE.format(path=sys.path, threads=threads, more=more, fd=theirs.fileno())
            # A session of its own: Ctrl-C is for the process that builds, which ends this one.
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.pipe = Connection(mine.detach())
        self.tasks: deque[Any] = deque()
        self.worker: object = None
        """The one that it has."""

    def send(self, *message: object) -> None:
        """Say something; that it is dead shows when it is listened to."""
        with suppress(OSError):
            self.pipe.send(message)

    def how(self) -> str:
        """Return how it has died."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_GRACE)
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        self.process.kill()
        return "it does not answer"


class ProcessEngine:
    """Several processes of this machine: `dataset.build(engine=ProcessEngine(workers=2))`.

    They are new processes, not forks: CUDA and threads do not survive a fork. The function of an
    encoder is pickled, with all that it refers to. A function that was written in a notebook or in
    the main script needs cloudpickle, or a main script that can be imported. `gpus` are the numbers
    of GPUs that are dealt out: each process sees one of them, as its first.
    """

    def __init__(self, workers: int = 2, *, gpus: Iterable[int | str] = ()) -> None:
        if type(workers) is not int or workers < 1:
            raise ConfigError(f"workers is a number from 1 on, not {workers!r}")
        self.workers = workers
        self.gpus = tuple(map(str, gpus))
        self._processes: list[_Process] = []
        self._deaths = 0
        """Processes that have died since the last result."""

    def __repr__(self) -> str:
        return f"ProcessEngine(workers={self.workers})"

    def map(
        self, worker: Doing, take: Callable[[], T | None]
    ) -> Iterator[tuple[T, Any] | None]:  # fmt: skip
        """Do tasks in the processes; see `Engine`."""
        if _is_worker:
            message = "A process that was started to encode has run the whole main script"
            raise EncoderError(f'{message}: it has no  if __name__ == "__main__":', hint=_GUARD)
        first = take()
        if first is None:
            return
        todo = deque([first])  # taken before the worker is packed: it may be made ready by that
        sent = packed(worker)
        self._deaths = 0
        while True:
            self._fill(worker, sent, lambda: todo.popleft() if todo else take())
            if not any(each.tasks for each in self._processes):
                return
            ready = wait([each.pipe for each in self._processes], _TICK)
            if not ready:
                yield None
            for each in [each for each in self._processes if each.pipe in ready]:
                yield from self._heard(each)

    def _heard(self, process: _Process) -> Iterator[tuple[Any, Any]]:
        """Give what has come of a process: a result, or the tasks that it has lost."""
        try:
            kind, value = process.pipe.recv()
        except (EOFError, OSError):
            self._processes.remove(process)
            process.pipe.close()
            how = process.how()
            self._deaths += 1
            if self._deaths > _BIRTHS + self.workers:
                message = f"Processes that encode die before they have done anything: {how}"
                raise EncoderError(message) from None
            for number, task in enumerate(process.tasks):
                yield task, Lost(how, had_begun=number == 0)
            return
        if kind == "failed":
            raise value.error()
        self._deaths = 0
        yield process.tasks.popleft(), value

    def _fill(self, worker: Doing, sent: bytes, take: Callable[[], T | None]) -> None:
        """Give tasks to those that have the fewest; start processes as long as there are some."""
        for depth in range(_AHEAD):
            at = 0
            while at < self.workers:
                if at < len(self._processes) and len(self._processes[at].tasks) > depth:
                    at += 1
                    continue
                task = take()
                if task is None:
                    return
                if at == len(self._processes):
                    self._processes.append(self._started())
                process = self._processes[at]
                if process.worker is not worker:
                    process.worker = worker
                    process.send("worker", sent)
                process.tasks.append(task)
                process.send("task", task)
                at += 1

    def _started(self) -> _Process:
        """Start a process, in place of one that has died if there is one."""
        taken = {each.number for each in self._processes}
        number = next(each for each in range(self.workers) if each not in taken)
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        more = {}
        if self.gpus:
            more["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
        return _Process(number, max(1, cores // self.workers), more)

    def delivery(self, opened: ArtifactSet) -> None:
        """They are written to its folder."""

    def enough(self) -> None:
        """Have all tasks end after the batch in hand."""
        for each in self._processes:
            each.send("enough", None)

    def close(self) -> None:
        """End all processes; what they have done of their tasks is delivered before."""
        until = time.monotonic() + _GRACE
        self.enough()
        for each in self._processes:
            each.pipe.close()
        for each in self._processes:
            try:
                each.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        self._processes = []


# what travels


def packed(worker: Doing, by_value: Any = None) -> bytes:  # noqa: ANN401 - a module
    """Return a worker as bytes for another process; EncoderError if that cannot be done.

    `by_value` is the pickle that sends functions which cannot be imported elsewhere; cloudpickle
    where it is installed.
    """
    if by_value is None:
        with suppress(ImportError):
            by_value = import_module("cloudpickle")
    refusal: Exception = EncoderError("its function was not written in a file")
    data = b""
    try:
        data = pickle.dumps(worker)
    except Exception as error:  # noqa: BLE001 - whatever the parts of it say
        refusal = error
    if data and b"__main__" not in data:
        return b"\0" + data
    hint = "Write the function at the top of a module of its own, or install cloudpickle."
    if by_value is not None:
        hint = "Let its function load what cannot be sent when it is first called."
        try:
            return b"\0" + bytes(by_value.dumps(worker))
        except Exception as error:  # noqa: BLE001
            refusal = error
    else:
        path = getattr(sys.modules["__main__"], "__file__", None)
        if data and path is not None and os.path.isfile(path):
            return os.fsencode(os.path.abspath(path)) + b"\0" + data
    message = f"The encoder cannot be sent to another process: {refusal}"
    raise EncoderError(message, hint=hint) from refusal


def unpacked(data: bytes) -> Doing:
    """Return the worker; the main script is imported first, if its function is from there."""
    path, _, rest = data.partition(b"\0")
    if path and sys.modules["__main__"].__dict__.get("__file__") != os.fsdecode(path):
        main = types.ModuleType("__mp_main__")  # the name that such scripts have elsewhere, too
        main.__dict__.update(runpy.run_path(os.fsdecode(path), run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    found: Doing = pickle.loads(rest)  # noqa: S301 - of the process that has started this one
    return found


# the process


def serve(fd: int) -> None:
    """Do tasks until nobody gives any; all that a process of `ProcessEngine` does."""
    global _is_worker  # noqa: PLW0603 - there is one process
    _is_worker = True
    _Service(Connection(fd)).run()


class _Service:
    """Does what comes through a pipe; one thread listens while another one works."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._worker: Doing | None = None
        self._is_enough = False

    def run(self) -> None:
        """Do tasks until the other end is closed, be it that its process has died."""
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            while (message := self._messages.get())[0] != "end":
                self._obey(*message)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised in the other process
            with suppress(OSError):
                self._pipe.send(("failed", Fault.of(error)))
            raise SystemExit(1) from None
        finally:
            if self._worker is not None:
                self._worker.close()

    def _listen(self) -> None:
        """Hear what is said while a task is done: above all, that it is enough."""
        kind = ""
        while kind != "end":
            try:
                kind, value = self._pipe.recv()
            except (EOFError, OSError):
                kind, value = "end", None
            except Exception as error:  # noqa: BLE001 - of what cannot be unpickled here
                kind, value = "bad", error
            if kind in ("enough", "end"):
                self._is_enough = True
                if self._worker is not None:
                    self._worker.enough()
            self._messages.put((kind, value))

    def _obey(self, kind: str, value: Any) -> None:  # noqa: ANN401 - bytes, or a task
        if kind == "worker":
            if self._worker is not None:
                self._worker.close()
            self._worker = unpacked(value)
            if self._is_enough:
                self._worker.enough()
        elif kind == "bad":
            raise value
        elif kind == "task" and self._worker is not None:
            self._pipe.send(("done", self._worker(value)))
