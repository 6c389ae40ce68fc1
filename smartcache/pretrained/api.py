"""`from_pretrained` and `from_single_file`: models and pipelines as their libraries load them.

What is not named here belongs to the library and is handed on as it is; what is None is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from smartcache.pretrained.arguments import Asked
from smartcache.pretrained.borrowing import inside, pin
from smartcache.pretrained.devices import Placement, placement
from smartcache.pretrained.dtypes import dtype_arguments
from smartcache.pretrained.failures import explained
from smartcache.pretrained.gate import one_at_a_time
from smartcache.pretrained.kinds import class_of
from smartcache.pretrained.loading import load
from smartcache.pretrained.singlefile import load_single, local_file, single_class

if TYPE_CHECKING:
    from smartcache.pretrained.devices import Device
    from smartcache.pretrained.dtypes import Dtype


def from_pretrained(  # noqa: PLR0913 - the libraries' own arguments, by name
    repo_or_path: str | os.PathLike[str],
    *,
    cls: type | str | None = None,
    smart_cache: bool = True,
    device: Device | None = None,
    encoders_device: Device | None = "auto",
    dtype: Dtype | None = None,
    variant: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    share: bool | Iterable[str] = False,
    **kwargs: object,
) -> object:
    """Load a pipeline, model, tokenizer or processor; its files come out of the store.

    Without `cls` (a class, or its name) the files say what it is. Everything goes to `device`;
    without one, text encoders, image encoders and VAE go to `encoders_device`: "auto" is CUDA or
    MPS where there is one, None leaves them on the CPU. With `share`, components equal to ones in
    memory are those: all, or the named ones. All other arguments are the library's own.
    """
    source = os.fspath(repo_or_path)
    named = {"variant": variant, "revision": revision, "subfolder": subfolder}
    arguments = {**_given(named), **kwargs}
    if smart_cache:
        arguments = pin(source, arguments)
    found = class_of(source, cls, subfolder=subfolder or "", arguments=arguments)
    arguments.update(dtype_arguments(found, dtype, arguments.pop("torch_dtype", None)))
    where = _placement(source, device, encoders_device, subfolder or "", arguments)
    asked = Asked(
        cls=found,
        original=found.from_pretrained,  # type: ignore[attr-defined]
        args=(repo_or_path,),
        kwargs=arguments,
        share=_shared_names(share),
        placement=where,
    )
    if smart_cache:
        return load(asked)
    if asked.share:
        raise ValueError("share=... needs smart_cache=True: equal components are found by digest")
    return load_plainly(asked)


def from_single_file(
    path_or_repo_file: str | os.PathLike[str],
    *,
    cls: type | str | None = None,
    smart_cache: bool = True,
    device: Device | None = None,
    encoders_device: Device | None = "auto",
    dtype: Dtype | None = None,
    config: str | os.PathLike[str] | None = None,
    **kwargs: object,
) -> object:
    """Load a checkpoint of one file: a path, "org/name/file.safetensors", or an address on the Hub.

    Without `cls` it is what `config`, a repo or folder in the layout of diffusers, describes;
    without both, the pipeline that diffusers knows by the weights' names. All other arguments are
    as in `from_pretrained`.
    """
    named = None if config is None else os.fspath(config)
    arguments = {**kwargs, **_given({"config": named})}
    source = local_file(os.fspath(path_or_repo_file), arguments, smart_cache=smart_cache)
    found = single_class(source, cls, named, arguments)
    arguments.update(dtype_arguments(found, dtype, arguments.pop("torch_dtype", None)))
    asked = Asked(
        cls=found,
        original=found.from_single_file,  # type: ignore[attr-defined]
        args=(source,),
        kwargs=arguments,
        placement=_placement(os.fspath(path_or_repo_file), device, encoders_device, "", arguments),
    )
    return load_single(asked) if smart_cache else load_plainly(asked)


def load_plainly(asked: Asked) -> object:
    """Let the library load by itself, without the store; then put things where they go."""
    where = asked.placement
    more = {} if where is None else where.library_arguments(asked)
    with explained(asked):
        with inside(), one_at_a_time():
            loaded = asked.run(**more)
        if where is not None:
            where.apply(loaded)
    return loaded


def _placement(
    source: str,
    device: Device | None,
    encoders_device: Device | None,
    subfolder: str,
    arguments: dict[str, object],
) -> Placement | None:
    if arguments.get("device_map") is not None:
        if device is not None:
            raise TypeError("Pass either device or device_map, not both")
        return None  # The library places everything by the caller's map.
    return placement(device, encoders_device, source=source, component=subfolder.rpartition("/")[2])


def _shared_names(share: bool | Iterable[str]) -> bool | tuple[str, ...]:  # noqa: FBT001
    if isinstance(share, bool):
        return share
    return (share,) if isinstance(share, str) else tuple(share)


def _given(arguments: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if value is not None}
