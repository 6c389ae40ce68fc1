"""Modules in a row: each asks those before it, the nearest first."""

from __future__ import annotations

import threading
from abc import ABCMeta, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from mgds.pipelineModuleTypes.RandomAccessPipelineModule import RandomAccessPipelineModule


class PipelineState:
    def __init__(self, max_threads: int = 4) -> None:
        self.executor = ThreadPoolExecutor(max_threads)


class PipelineModule(metaclass=ABCMeta):
    pipeline: Pipeline
    _state: PipelineState

    def __init__(self) -> None:
        super().__init__()
        self.clear_item_cache()

    def init(
        self, pipeline: Pipeline, base_seed: int, module_index: int, state: PipelineState
    ) -> None:
        self.pipeline, self._state = pipeline, state
        self.__seed, self.__place = base_seed, module_index

    def clear_item_cache(self) -> None:
        self.__last = threading.local()

    @abstractmethod
    def get_inputs(self) -> list[str]: ...

    @abstractmethod
    def get_outputs(self) -> list[str]: ...

    def __giver(self, name: str) -> Any:
        for module in reversed(self.pipeline.modules[: self.__place]):
            if name in module.get_outputs():
                return module
        return None

    def _get_previous_item(self, variation: int, name: str, index: int) -> Any:
        head, *parts = name.split(".")
        module = self.__giver(head)
        if module is None:
            return None
        last = module.__last
        if getattr(last, "place", None) != (variation, index):
            last.place, last.item = (variation, index), {}
        if head not in last.item:
            if isinstance(module, RandomAccessPipelineModule):
                last.item.update(module.get_item(variation, index, head))
            elif variation != module.current_variation:
                raise RuntimeError(f"variation {variation} of {head} was not started")
            else:
                last.item.update(module.get_item(index, head))
        value = last.item[head]
        for part in parts:
            value = value.get(part)
        return value

    def _get_previous_length(self, name: str) -> int | None:
        module = self.__giver(name.partition(".")[0])
        return None if module is None else module.length()

    def _get_rand(self, variation: int, index: int = -1) -> Random:
        return Random(hash((self.__seed, self.__place, variation, index)))

    def _torch_gc(self) -> None:
        pass


class Pipeline:
    """What runs the modules: mgds's LoadingPipeline, as far as a cache sees it."""

    def __init__(self, modules: list[Any], seed: int = 42, threads: int = 4) -> None:
        self.device = "cpu"
        self.modules = modules
        self.state = PipelineState(threads)
        self.epoch = -1
        for index, module in enumerate(modules):
            module.init(self, seed, index, self.state)

    def start_next_epoch(self) -> None:
        self.epoch += 1
        for module in self.modules:
            module.clear_item_cache()
            if not isinstance(module, RandomAccessPipelineModule):
                module.current_variation = self.epoch
                module.start(self.epoch)
