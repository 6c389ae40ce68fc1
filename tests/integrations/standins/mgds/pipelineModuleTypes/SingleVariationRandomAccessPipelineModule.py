"""A module that can give any item of the epoch that was started."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import Any


class SingleVariationRandomAccessPipelineModule(metaclass=ABCMeta):
    def __init__(self) -> None:
        super().__init__()
        self.current_variation = -1

    @abstractmethod
    def length(self) -> int: ...

    @abstractmethod
    def start(self, variation: int) -> None: ...

    @abstractmethod
    def get_item(self, index: int, requested_name: str | None = None) -> dict[str, Any]: ...
