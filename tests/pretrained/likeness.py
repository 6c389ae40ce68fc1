"""Whether two models are the same, bit by bit, in all that a load decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What tells where a model came from, not what it is.
_ORIGINS = {
    "_name_or_path", "_commit_hash", "_diffusers_version", "transformers_version", "name_or_path",
}  # fmt: skip


def are_alike(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Of the same classes, configs, flags, hooks, dtypes and devices, with the same values."""
    return _form(one) == _form(other) and have_equal_values(one, other)


def have_equal_values(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    import torch

    mine, others = _tensors(one), _tensors(other)
    return list(mine) == list(others) and all(
        torch.equal(_bits(mine[name]), _bits(others[name])) for name in mine
    )


def _form(model: torch.nn.Module) -> list[object]:
    modules = [
        (name, type(each), each.training, sorted(_plain(vars(each)).items()), _hooks(each))
        for name, each in model.named_modules()
    ]
    tensors = [
        (name, type(each), each.shape, each.stride(), each.dtype, each.device, each.requires_grad)
        for name, each in _tensors(model).items()
    ]
    config = getattr(model, "config", None)
    said = {} if config is None else config if isinstance(config, dict) else config.to_dict()
    return [modules, tensors, {key: said[key] for key in said if key not in _ORIGINS}]


def _plain(attributes: dict[str, object]) -> dict[str, str]:
    return {
        key: repr(value)
        for key, value in attributes.items()
        if isinstance(value, bool | int | float | str | None) and key not in _ORIGINS
    }


def _hooks(module: torch.nn.Module) -> list[int]:
    return [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks")]


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    whole = tensor.detach().contiguous().reshape(-1)
    return whole if not whole.numel() else whole.view(torch.uint8)
