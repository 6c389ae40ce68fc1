"""The registry: who holds what, shown truly, and nothing kept alive by it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from smartcache.errors import SharedComponentError
from smartcache.pretrained import components
from smartcache.pretrained import share as module
from smartcache.pretrained.call import one_at_a_time
from smartcache.pretrained.share import Guard, Holder, Registry, Request, guard, lift

if TYPE_CHECKING:
    import torch


FLOAT = "dtype float32"


class Pipeline:
    """Holds components as attributes, as pipelines do."""

    def __init__(self, **parts: torch.nn.Module) -> None:
        vars(self).update(parts)

    def enable_group_offload(self, *args: object) -> tuple[object, ...]:
        return (self, *args)


def movable() -> torch.nn.Module:
    """A model that can be offloaded, as those of diffusers can."""
    import torch

    class Movable(torch.nn.Linear):
        def enable_group_offload(self) -> None: ...

    return Movable(4, 4)


def model(value: float = 1.0) -> torch.nn.Module:
    import torch

    made = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(made.weight, value)
    torch.nn.init.zeros_(made.bias)
    return made


def request(content: str = "aa", *, dtype: str = FLOAT, number: int = 0) -> Request:
    return Request(content, "torch.nn.Linear", "{}", dtype, "cpu", number)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    monkeypatch.setattr(module, "registry", made)
    return made


def hold(registry: Registry, part: torch.nn.Module, source: str) -> Pipeline:
    pipeline = Pipeline(vae=part)
    entry = registry.entry_of(part)
    assert entry is not None
    entry.hold(pipeline, Holder(source, "Pipeline", "vae"))
    return pipeline


class TestFind:
    def test_gives_what_was_added_for_the_same_request(self, registry: Registry) -> None:
        made = registry.add(request(), model())
        assert registry.find(request()) is made
        for other in (request("bb"), request(dtype="dtype float16"), request(number=1)):
            assert registry.find(other) is None

    def test_does_not_give_what_was_changed_even_if_it_is_changed_back(
        self, registry: Registry
    ) -> None:
        made = registry.add(request(), model())
        made.train(mode=False)
        assert registry.find(request()) is None
        made.train(mode=True)
        assert registry.find(request()) is None

    def test_another_of_the_same_content_takes_the_place_of_a_changed_one(
        self, registry: Registry
    ) -> None:
        first = registry.add(request(), model())
        first.train(mode=False)
        second = registry.add(request(), model())
        assert second is not first
        assert registry.find(request()) is second


class TestAdd:
    def test_the_object_that_is_here_for_the_request_is_taken(self, registry: Registry) -> None:
        """As when two threads have loaded the same at once."""
        first = registry.add(request(), model())
        assert registry.add(request(), model()) is first

    def test_other_requests_have_other_objects(self, registry: Registry) -> None:
        """Also if what they gave is equal: a dtype that was named, and one that was not."""
        first = registry.add(request(), model())
        second = registry.add(request(dtype="none"), model())
        assert second is not first
        assert registry.find(request()) is first
        assert registry.find(request(dtype="none")) is second

    def test_equal_content_with_other_arguments_is_another(self, registry: Registry) -> None:
        first = registry.add(request(), model())
        assert registry.add(request(number=1), model()) is not first

    def test_a_placeholder_is_not_shared(self, registry: Registry) -> None:
        import torch

        made = registry.add(request(), torch.nn.Linear(4, 4, device="meta"))
        assert registry.find(request()) is None
        assert registry.entry_of(made) is None

    def test_tensors_that_cannot_be_looked_at_are_not_shared(self, registry: Registry) -> None:
        import torch

        class Strange(torch.Tensor):
            @classmethod
            def __torch_function__(cls, *_args: object, **_more: object) -> object:
                raise NotImplementedError

        made = model()
        made.strange = torch.zeros(1).as_subclass(Strange)
        assert registry.add(request(), made) is made
        assert registry.find(request()) is None


class TestComponents:
    def test_shows_each_with_its_holders_and_what_it_saves(self, registry: Registry) -> None:
        part = registry.add(request(), model())
        pipelines = [hold(registry, part, f"org/{name}") for name in ("a", "b", "c")]
        (shown,) = components()
        assert (shown.cls, shown.digest, shown.dtype, shown.device) == (
            "Linear", "aa", "float32", "cpu",
        )  # fmt: skip
        assert (shown.size, shown.saved_size, shown.is_changed) == (80, 160, False)
        assert [each.source for each in shown.holders] == ["org/a", "org/b", "org/c"]
        assert str(shown) == (
            "Linear aa float32 on cpu, 80 B, saves 160 B:"
            " org/a (Pipeline.vae), org/b (Pipeline.vae), org/c (Pipeline.vae)"
        )
        del pipelines[0]
        gc.collect()
        assert components()[0].saved_size == 80

    def test_shows_the_present_after_a_change(self, registry: Registry) -> None:
        part = registry.add(request(), model())
        part.half()
        (shown,) = components()
        assert (shown.dtype, shown.size, shown.is_changed) == ("float16", 40, True)
        assert str(shown) == "Linear aa float16 on cpu, changed, 40 B: nobody"

    def test_the_largest_comes_first(self, registry: Registry) -> None:
        import torch

        parts = [
            registry.add(request(str(size)), torch.nn.Linear(size, size)) for size in (2, 8, 4)
        ]
        assert [each.digest for each in components()] == ["8", "4", "2"]
        assert parts

    def test_nothing_is_kept_alive(self, registry: Registry) -> None:
        part = registry.add(request(), model())
        pipeline = hold(registry, part, "org/a")
        alive = weakref.ref(part), weakref.ref(pipeline)
        del part, pipeline
        assert [each() for each in alive] == [None, None]  # without a round of the collector
        assert components() == []

    def test_the_same_pipeline_is_one_holder(self, registry: Registry) -> None:
        part = registry.add(request(), model())
        pipeline = hold(registry, part, "org/a")
        entry = registry.entry_of(part)
        assert entry is not None
        entry.hold(pipeline, Holder("org/a", "Pipeline", "vae"))
        assert len(components()[0].holders) == 1


class TestGuard:
    @pytest.fixture
    def pipeline(self, registry: Registry) -> Pipeline:
        """One whose VAE is shared."""
        made = hold(registry, registry.add(request(), model()), "org/a")
        guard(made)
        return made

    def test_raises_while_something_is_shared_and_is_gone_afterwards(
        self, registry: Registry, pipeline: Pipeline
    ) -> None:
        assert set(vars(pipeline)) == {"vae", "enable_group_offload"}
        with pytest.raises(SharedComponentError, match="would move vae"):
            pipeline.enable_group_offload(1)
        registry.forget(vars(pipeline)["vae"])
        assert pipeline.enable_group_offload(1) == (pipeline, 1)
        assert set(vars(pipeline)) == {"vae"}

    def test_a_model_is_guarded_as_long_as_it_is_known(self, registry: Registry) -> None:
        part = registry.add(request(), movable())
        pipeline = hold(registry, part, "org/a")
        with pytest.raises(SharedComponentError, match="would move vae"):
            part.enable_group_offload()  # type: ignore[operator]
        registry.forget(part)
        assert "enable_group_offload" not in vars(part)
        assert vars(pipeline)["vae"] is part

    def test_a_copy_has_the_method_itself(self, pipeline: Pipeline) -> None:
        for other in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):  # noqa: S301
            assert other.enable_group_offload(1) == (other, 1)
            lift(other)
            assert set(vars(other)) == {"vae"}
        assert isinstance(vars(pipeline)["enable_group_offload"], Guard)

    def test_keeps_nothing_alive(self) -> None:
        pipeline = Pipeline()
        guard(pipeline)
        alive, left = weakref.ref(pipeline), pipeline.enable_group_offload
        del pipeline
        assert alive() is None
        with pytest.raises(SharedComponentError):
            left()

    def test_a_changed_part_that_nobody_else_has_may_be_moved(self, registry: Registry) -> None:
        part = registry.add(request(), model())
        first, second = hold(registry, part, "org/a"), hold(registry, part, "org/b")
        part.half()
        assert registry.find(request()) is None
        assert registry.shared_names(first) == registry.shared_names(second) == ["vae"]
        del second
        gc.collect()
        assert registry.shared_names(first) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    inside, leave = threading.Event(), threading.Event()

    def load() -> None:
        with one_at_a_time():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=load)
    thread.start()
    inside.wait(30)
    child = os.fork()
    if not child:
        with one_at_a_time():
            os._exit(7)
    status = os.waitpid(child, 0)[1]
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7
