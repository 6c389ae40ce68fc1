"""Datasets encoded by the actors of a Ray cluster: `dataset.build(engine=RayEngine(...))`.

An actor keeps the encoder and does one task after the other. There is no daemon of ours: actors
live as long as one build, and Ray ends them with the process that builds. An actor that dies, alone
or with its node, is replaced by a new one wherever there is room. Ray's own restarts are not used:
a task would wait for an actor to come back that nothing has room for, while others are idle.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from smartcache.errors import ConfigError, EncoderError, install_hint
from smartcache.training import Doing, Fault, Lost, packed, unpacked

if TYPE_CHECKING:
    from smartcache.artifacts import ArtifactSet
    from smartcache.remote.sets import Delivery
    from smartcache.remote.tier import Tier

_log = logging.getLogger(__name__)
T = TypeVar("T")
_AHEAD = 2
"""Tasks that an actor has: while it does one, the next is there."""
_TICK = 0.2
"""Seconds after which it is said that nothing has come."""
_GRACE = 15.0
"""Seconds that actors have to end their batch and deliver what they have done."""
_BIRTHS = 3
"""Actors that may die, one after the other, before one of them has done anything."""
_PATIENCE = 30.0
"""Seconds without a single actor after which that is said."""


class _Actor:
    """What runs in the cluster."""

    def __init__(self) -> None:
        self._worker: Doing | None = None
        self._is_enough = False

    def load(self, data: bytes) -> Fault | None:
        """Take the worker of an output; say what is wrong with it."""
        try:
            self.close()
            self._worker = unpacked(data)
            if self._is_enough:
                self._worker.enough()
        except Exception as error:  # noqa: BLE001 - it is raised in the other process
            return Fault.of(error)
        return None

    def do(self, task: object) -> object:
        """Do a task."""
        assert self._worker is not None  # noqa: S101 - it was loaded before
        return self._worker(task)

    def enough(self) -> None:
        """Have the task in hand end early; it is called while that is done."""
        self._is_enough = True
        if self._worker is not None:
            self._worker.enough()

    def close(self) -> None:
        """Let go of everything."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class _Hired:
    """An actor, as this process knows it."""

    def __init__(self, actor: Any) -> None:  # noqa: ANN401 - a handle of Ray
        self.actor = actor
        self.worker: object = None
        self.loading: Any = None
        """What comes when it has the worker; None: it has."""
        self.tasks: deque[tuple[Any, Any]] = deque()
        """What comes, and the task."""

    @property
    def next(self) -> Any:  # noqa: ANN401 - a reference of Ray
        """What comes next of it; None: nothing will."""
        if self.loading is not None:
            return self.loading
        return self.tasks[0][0] if self.tasks else None


class RayEngine:
    """The actors of a Ray cluster.

    `address` is that of the cluster, as `ray.init` takes it; where this process is connected
    already, that cluster is used. Each actor gets `num_cpus` and `num_gpus` (0.5: two share one);
    `workers` is how many there are, as many as the cluster has room for unless said. `runtime_env`
    says what actors need: packages, files, variables.

    Sources are read by the actors, under the same paths as here. Packs are written to the folder of
    the set, on a disk that all nodes have, or sent straight to a `tier`, the name of a remote.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        tier: str | Tier | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if workers is not None and (type(workers) is not int or workers < 1):
            raise ConfigError(f"workers is a number from 1 on, not {workers!r}")
        for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
            if type(value) not in (int, float) or not value >= 0:
                raise ConfigError(f"{name} is a number from 0 on, not {value!r}")
        self.address = address
        self.num_cpus = num_cpus
        self.num_gpus = num_gpus
        self.tier = tier
        self.runtime_env = None if runtime_env is None else dict(runtime_env)
        self._wanted = workers
        self._hired: list[_Hired] = []
        self._is_ours = False
        """This engine has connected to the cluster."""
        self._deaths = 0
        """Actors that have died since the last result."""

    def __repr__(self) -> str:
        return f"RayEngine(address={self.address!r}, workers={self._wanted})"

    @property
    def workers(self) -> int:
        """How many actors there are to be."""
        if self._wanted is not None:
            return self._wanted
        ray = self._connected()
        has = ray.cluster_resources()
        asked = (("CPU", self.num_cpus), ("GPU", self.num_gpus))
        room = [int(has.get(name, 0) / each) for name, each in asked if each]
        return min(room) if room else len(ray.nodes())

    def delivery(self, opened: ArtifactSet) -> Delivery | None:
        """Say how packs get to a set: to the tier, or by a disk that all nodes have."""
        if self.tier is None:
            return None
        from smartcache.remote.remotes import Remotes
        from smartcache.remote.sets import Delivery

        tier = Remotes().tier(self.tier) if isinstance(self.tier, str) else self.tier
        return Delivery(tier, opened.id)

    @property
    def _wish(self) -> str:
        return f"an actor of {self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs"

    def _connected(self) -> Any:  # noqa: ANN401 - the package
        """Return Ray, connected to a cluster."""
        try:
            ray = import_module("ray")
        except ImportError as error:
            hint = install_hint("ray")
            raise EncoderError("RayEngine needs Ray", hint=hint) from error
        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR)
            self._is_ours = True
        return ray

    def map(
        self, worker: Doing, take: Callable[[], T | None]
    ) -> Iterator[tuple[T, Any] | None]:  # fmt: skip
        """Do tasks in the actors; see `Engine`."""
        task = take()
        if task is None:
            return
        ray = self._connected()
        self._deaths = 0
        sent = ray.put(packed(worker, ray.cloudpickle))
        again = deque([task])
        idle_since = time.monotonic()

        def next_task() -> T | None:
            return again.popleft() if again else take()

        while True:
            self._hire(ray, worker, sent)
            self._fill(next_task)
            if not again and not any(each.tasks for each in self._hired):
                task = take()
                if task is None:
                    return
                again.append(task)  # for the first that is able
            if any(each.loading is None for each in self._hired):
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _PATIENCE:
                idle_since = time.monotonic()
                _log.warning("Waiting until the Ray cluster has room for %s", self._wish)
            by_next = {each.next: each for each in self._hired if each.next is not None}
            ready, _ = ray.wait(list(by_next), timeout=_TICK)
            if not ready:
                yield None
            for ref in ready:
                yield from self._heard(ray, by_next[ref], ref)

    def _hire(self, ray: Any, worker: Doing, sent: Any) -> None:  # noqa: ANN401
        """Have as many actors as there are to be, all with this worker."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "max_restarts": 0,
            "max_task_retries": 0, "scheduling_strategy": "SPREAD",
            "concurrency_groups": {"aside": 1},
        }  # fmt: skip
        if self.runtime_env is not None:
            options["runtime_env"] = self.runtime_env
        workers = self.workers
        if workers < 1 and not self._hired:
            hint = "See 'ray status' for what the cluster has."
            raise EncoderError(f"The Ray cluster has no room for {self._wish}", hint=hint)
        while len(self._hired) < workers:
            self._hired.append(_Hired(ray.remote(**options)(_Actor).remote()))
        for each in self._hired:
            if each.worker is not worker and not each.tasks:
                each.worker, each.loading = worker, each.actor.load.remote(sent)

    def _fill(self, next_task: Callable[[], T | None]) -> None:
        """Give tasks to those that have the fewest; to none that has no worker yet."""
        able = [each for each in self._hired if each.loading is None]
        for depth in range(_AHEAD):
            for each in able:
                if len(each.tasks) <= depth:
                    task = next_task()
                    if task is None:
                        return
                    each.tasks.append((each.actor.do.remote(task), task))

    def _heard(self, ray: Any, hired: _Hired, ref: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
        """Give what has come of an actor: a result, or the tasks that it has lost."""
        try:
            value = ray.get(ref)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            self._hired.remove(hired)
            with suppress(Exception):  # it may live, and only be out of reach
                ray.kill(hired.actor)
            how = str(error).strip().partition("\n")[0]
            self._deaths += 1
            if self._deaths > _BIRTHS + self.workers:
                message = "Actors that encode die before they have done anything"
                raise EncoderError(f"{message}: {how}") from error
            for number, (_, task) in enumerate(hired.tasks):
                yield task, Lost(how, had_begun=number == 0)
            return
        if hired.loading is not None:
            hired.loading = None
            if value is not None:
                raise value.error()
            return
        self._deaths = 0
        yield hired.tasks.popleft()[1], value

    def enough(self) -> None:
        """Have all tasks end after the batch in hand."""
        for each in self._hired:
            with suppress(Exception):  # of one that has died
                each.actor.enough.options(concurrency_group="aside").remote()

    def close(self) -> None:
        """End all actors; what they have done of their tasks is delivered before."""
        if self._hired:
            ray = import_module("ray")
            self.enough()
            able = [each for each in self._hired if each.loading is None]
            with suppress(ray.exceptions.RayError):
                ends = [each.actor.close.remote() for each in able]
                ray.wait(ends, num_returns=len(ends), timeout=_GRACE) if ends else None
            for each in self._hired:
                with suppress(Exception):
                    ray.kill(each.actor)
            self._hired = []
        if self._is_ours:
            self._is_ours = False
            import_module("ray").shutdown()
