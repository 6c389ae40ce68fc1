"""Several tensors as one: what the nodes know of ComfyUI's class of this name."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class NestedTensor:
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.is_nested = True

    @property
    def shape(self) -> torch.Size:
        return self.tensors[0].shape
