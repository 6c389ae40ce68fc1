"""A worker process with the libraries in it: it takes pipelines, and forks a process per job.

    with Worker(hub, home, models.first) as worker:
        worker.draw(pipeline)                                # the pipeline travels as a pickle
        first, second = worker.run(job, job)                 # at the same time
        (ended,) = worker.run(replace(job, die_at=("download: named", 1)))
        assert ended.signal == signal.SIGKILL

It is spawned, as a data loader's workers are, and finds Hub and cache by their variables alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.hub_server import Hub
from tests.processes.killing import Moment, die_at

PATIENCE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Pipelines to load by one process."""

    names: Sequence[str]
    cache_dir: Path
    store: Path
    more: dict[str, Any] = field(default_factory=dict)
    """Arguments of the library."""
    die_at: tuple[str, int] | None = None
    """The n-th time of a fault point at which it kills itself."""
    die_when: Path | None = None
    """It kills itself as soon as this file is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended."""

    signal: int
    """The signal that ended it; 0: none."""
    pictures: list[object] = field(default_factory=list)
    """What each pipeline draws, as lists."""
    error: str = ""


class Worker:
    """One spawned process, for a `with` block; `folder` is any pipeline like those of the jobs."""

    def __init__(self, hub: Hub, home: Path, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, folder), daemon=True)
        more = {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**hub.environment, **more}.items():
                patch.setenv(name, value)
            self._process.start()
        there.close()

    def run(self, *jobs: Job) -> list[Ended]:
        """Let processes do jobs at the same time; return how they ended."""
        return [Ended(**each) for each in self._ask(jobs)]  # type: ignore[attr-defined]

    def draw(self, pipeline: object) -> object:
        """Let the worker itself draw a picture with a pipeline of this process."""
        return self._ask(pipeline)

    def _ask(self, what: object) -> object:
        self._connection.send(what)
        assert self._connection.poll(PATIENCE)
        return self._connection.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.join(PATIENCE)


def _serve(connection: Connection, folder: Path) -> None:
    import diffusers.utils.logging
    import transformers.utils.logging

    import smartcache.pretrained.api  # noqa: F401
    from tests.pretrained.scenarios import picture, plainly

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    picture(plainly(folder))  # so that no job waits for imports
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        if isinstance(asked, tuple):
            connection.send([asdict(each) for each in _run_all(asked)])
        else:
            connection.send(picture(asked).tolist())


def _run_all(jobs: Sequence[Job]) -> list[Ended]:
    started = [_start(job) for job in jobs]
    ended = []
    for pid, pipe in started:
        with open(pipe, "rb") as file:
            told = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended.append(Ended(signal=max(-code, 0), **json.loads(told or "{}")))
    return ended


def _start(job: Job) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = _do(job)
        except BaseException:  # noqa: BLE001 - the parent is told
            told = {"error": traceback.format_exc()}
        with open(writing, "wb") as file:
            file.write(json.dumps(told).encode())
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    return pid, reading


def _do(job: Job) -> dict[str, object]:
    from tests.pretrained.scenarios import load, picture

    os.environ["SMARTCACHE_HOME"] = str(job.store)
    if job.die_at is not None:
        die_at(Moment(*job.die_at))
    if job.die_when is not None:
        threading.Thread(target=_die_when, args=(job.die_when,), daemon=True).start()
    pipelines = [load(name, cache_dir=job.cache_dir, **job.more) for name in job.names]
    return {"pictures": [picture(each).tolist() for each in pipelines]}


def _die_when(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
