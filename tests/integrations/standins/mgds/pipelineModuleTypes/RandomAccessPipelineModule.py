"""A module that can give any variation of any item."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import Any


class RandomAccessPipelineModule(metaclass=ABCMeta):
    def __init__(self) -> None:
        super().__init__()
        self.started = False

    @abstractmethod
    def length(self) -> int: ...

    @abstractmethod
    def get_item(
        self, variation: int, index: int, requested_name: str | None = None
    ) -> dict[str, Any]: ...
