"""What the result of an encoder depends on: digests of components, the same on every machine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from smartcache.pretrained.canonical import NotComparableError, canonical
from smartcache.pretrained.identity import ORIGIN_FIELDS, content_of
from smartcache.store import Store
from smartcache.system import hash_file

if TYPE_CHECKING:
    import torch

_TEXTS = (".jinja", ".json", ".model", ".tiktoken", ".txt", ".vocab")
"""What tokenizers and processors are made of; a README beside them changes nothing."""
_ORIGIN = ORIGIN_FIELDS | {"name_or_path", "special_tokens_map_file", "tokenizer_file"}
"""What tells where a tokenizer came from, and nothing of what it does."""


def digest_of_module(
    folder: Path,
    module: torch.nn.Module,
    *,
    variant: str | None,
    use_safetensors: bool | None,
    store: Store | None,
) -> str:
    """Return the digest of a model's class, config and weights, which were loaded from `folder`."""
    name = type(module).__name__
    content = content_of(
        folder, name, variant=variant, use_safetensors=use_safetensors, store=store
    )
    if content is not None:
        return content.digest
    # Which files were loaded is not plain: then all of them count.
    return _combined([name, *_files(folder, store, every=True)])


def digest_of_files(folder: Path, *, store: Store | None) -> str:
    """Return the digest of what a tokenizer or processor is made of."""
    return _combined(_files(folder, store, every=False))


def _files(folder: Path, store: Store | None, *, every: bool) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (every or path.suffix in _TEXTS) and not path.name.startswith("."):
            found += [path.relative_to(folder).as_posix(), _digest(path, store)]
    return found


def _digest(path: Path, store: Store | None) -> str:
    if path.suffix == ".json":
        value = json.loads(path.read_text("utf-8"))
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if name not in _ORIGIN}
        return _combined(value)
    real = path.resolve()
    return (hash_file(real)[0] if store is None else store.digest_of(real)).digest


def _combined(value: object) -> str:
    return blake3(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


def dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype that a module computes in: that of its first weights of real numbers."""
    weights = itertools.chain(module.parameters(), module.buffers())
    return next((each.dtype for each in weights if each.is_floating_point()), None)


def quantisation_of(module: torch.nn.Module) -> str:
    """Return how a model's weights are quantised, as text; "" if they are not."""
    settings = getattr(getattr(module, "config", None), "quantization_config", None)
    if settings is None:
        return ""
    try:
        return canonical(settings)
    except NotComparableError:
        return str(settings)
