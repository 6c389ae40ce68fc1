"""Training datasets of ComfyUI: latents and conditioning, sample by sample, in a set of artifacts.

    <output>/smartcache/<name>/<id>/     a set, as smartcache/artifacts has it
      "<64 hex>"   the tensors of one sample, by their place in it: {"latent.samples": ...}. The key
                   is made of their content, so an equal sample is there once.
      "index"      the keys of the samples in order, and what their tensors were taken out of

It lies in ComfyUI's output folder, where its own nodes save: it is work, not a cache, so no limit
of the store may evict it, and it moves and is backed up with the folder.

The index is written last, in one step, when every sample is on the disk. What it does not name is
not there for anybody and is deleted: that of an earlier save after it, that of a killed one by the
next. So a name has the dataset that was last saved whole, and nothing of any other.

What is no tensor is in the index, as JSON: dicts, lists, tuples, nested tensors, numbers, texts. No
pickle is written, and the one that is read (old shards) is read by torch's `weights_only` alone.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from smartcache.artifacts import ArtifactSet, ArtifactSets, compute_key, path_text
from smartcache.errors import (
    BadSetNameError,
    DatasetChangedError,
    DatasetError,
    UnsupportedValueError,
)
from smartcache.integrations.comfyui.lazy import LazyTensor, Reader, Stored
from smartcache.sizes import format_size

_log = logging.getLogger(__name__)
Sample = tuple[dict[str, Any], list[Any]]
"""A latent and its conditioning, as ComfyUI's nodes hand them on."""

FOLDER = "smartcache"
_FINGERPRINT = {"kind": "ComfyUI training dataset", "format": 1}
_INDEX = "index"
_SAVING = "saving"
"""What one save of a dataset locks; never the key of an artifact."""
_DEEPEST = 50
_MOST_METADATA = 1 << 20
_MOST_SAMPLES = 1 << 63
_SHARD = re.compile(r"shard_(\d{4,})\.pkl")
_AGAIN = "Save it again, or restore the folder from a backup."


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """What a dataset is."""

    name: str
    path: Path
    samples: int
    images: int
    """Rows of all latents: a sample may be a batch."""
    shapes: dict[str, int]
    """Shape and dtype of a latent: how many samples have it."""
    on_disk: int
    saved: int
    """Bytes that equal tensors do not take, because they are kept once."""

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {counted(self.samples)}, {counted(self.images, 'image')}",
            *(f"  {count:,} x {shape}" for shape, count in self.shapes.items()),
            f"{format_size(self.on_disk)} on disk; equal tensors save {format_size(self.saved)}",
            str(self.path),
        ]
        return "\n".join(lines)


def counted(number: int, noun: str = "sample") -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# saving


def save(output: str | Path, name: str, samples: Iterable[Sample]) -> int:
    """Make samples the dataset of a name, in place of the one that it had; return how many.

    UnsupportedValueError names what cannot be kept. If anything goes wrong, or the process dies,
    the name has what it had before. Who saves the same name at once waits.
    """
    with _sets(output).open(name, _FINGERPRINT, evictable=False) as opened, _alone(opened):
        try:
            keys: list[str] = []
            which: list[int] = []
            skeletons: dict[str, int] = {}
            for number, (latent, conditioning) in enumerate(samples):
                if type(latent) is not dict or not hasattr(latent.get("samples"), "shape"):
                    raise _refusal(["latents", number], "it is no latent: a dict with samples")
                if type(conditioning) is not list:
                    raise _refusal(["conditioning", number], "it is no list of conditions")
                fields: dict[str, torch.Tensor] = {}
                skeleton = [
                    _taken_apart(latent, ["latent"], ["latents", number], fields),
                    _taken_apart(conditioning, ["conditioning"], ["conditioning", number], fields),
                ]
                key = compute_key(fields)
                # Read, not only looked up: one that is damaged is written again.
                if opened.get(key) is None:
                    opened.put(key, fields)
                keys.append(key)
                which.append(skeletons.setdefault(json.dumps(skeleton), len(skeletons)))
            if not keys:
                message = f"There is nothing to save as {name}: no latents were given"
                raise DatasetError(message, hint="Connect latents and conditioning.")
            opened.sync()
            index = json.dumps({"keys": keys, "which": which, "skeletons": list(skeletons)})
            opened.put(_INDEX, {"index": index}, durable=True)
        finally:
            _sweep(opened)
    return len(keys)


@contextmanager
def _alone(opened: ArtifactSet) -> Iterator[None]:
    """Be the only one who saves a dataset, of all threads and processes."""
    while (claim := opened.claim([_SAVING])).busy:
        claim.close()
        opened.wait_for(_SAVING, 60)
    with claim:
        yield


def _sweep(opened: ArtifactSet) -> None:
    """Delete what the index does not name."""
    is_there = _INDEX in opened
    found = opened.get(_INDEX)
    if found is None and is_there:
        return  # damaged: nobody knows what it names
    named = {_INDEX, *(json.loads(found["index"])["keys"] if found is not None else ())}
    opened.delete_many([key for key in opened if key not in named])


def _taken_apart(  # noqa: C901, PLR0911, PLR0912 - a table of kinds
    value: Any,  # noqa: ANN401
    path: list[object],
    shown: list[object],
    fields: dict[str, torch.Tensor],
) -> object:
    """Return a value as JSON has it, its tensors put into `fields` and named by their place.

    `path` is the place in the sample, `shown` that in what the user has given.
    """

    def inner(each: object, step: object) -> object:
        return _taken_apart(each, [*path, step], [*shown, step], fields)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is torch.dtype or kind is torch.device:
        return {kind.__name__: str(value).removeprefix("torch.")}
    if len(path) > _DEEPEST:
        raise _refusal(shown, "it is nested too deeply, or contains itself")
    if kind is list:
        return [inner(each, step) for step, each in enumerate(value)]
    if kind in (tuple, torch.Size):
        each = [inner(each, step) for step, each in enumerate(value)]
        return {kind.__name__: each}
    if kind is dict:
        for key in value:
            if key is not None and type(key) not in (bool, int, float, str):
                raise _refusal(shown, f"its key {key!r:.60} cannot be kept")
        return {"dict": [[inner(k, k), inner(v, k)] for k, v in value.items()]}
    if kind.__name__ == "NestedTensor" and kind.__module__ == "comfy.nested_tensor":
        return {"nested": inner(value.tensors, "tensors")}
    if kind is torch.Tensor or kind is LazyTensor:
        tensor: torch.Tensor = value
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise _refusal(shown, "a sparse, quantised or meta tensor cannot be kept")
        field = path_text(path)
        if field in fields:  # long names are shortened
            field = f"{len(fields)} {field}"
        # Of a lazy tensor that is all its values; of another one nothing is copied.
        fields[field] = tensor.detach().view(tensor.shape)
        return {"tensor": [field, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    raise _refusal(shown, f"{name} cannot be kept")


def _refusal(shown: list[object], reason: str) -> UnsupportedValueError:
    hint = (
        "Take it out before saving: hooks, control nets and other live objects work only in the"
        " program that made them."
    )
    path = path_text(shown)
    return UnsupportedValueError(f"{path}: {reason}", hint=hint, path=path)


# loading


def load(output: str | Path, name: str, *, buckets: bool = False) -> tuple[list[Any], list[Any]]:
    """Return all latents and all conditioning of a dataset; no tensor is read yet.

    With `buckets`, samples of one shape and dtype are one latent with as many rows, and their
    conditioning is one list: what ComfyUI's train node expects in bucket mode.
    """
    opened, text = _read_index(output, name)
    index = json.loads(text)
    skeletons = [json.loads(each) for each in index["skeletons"]]
    reader = Reader(opened)
    latents, conditioning = [], []
    for key, number in zip(index["keys"], index["which"], strict=True):

        def stored(field: str, dtype: str, shape: list[int], key: str = key) -> LazyTensor:
            found = getattr(torch, dtype, None)
            if not isinstance(found, torch.dtype):
                hint = "Use a PyTorch at least as new as that which saved it."
                raise DatasetError(f"This PyTorch has no dtype {dtype}", hint=hint)
            return LazyTensor((Stored(reader, key, field, tuple(shape), found),))

        latent, conditions = skeletons[number]
        latents.append(_put_together(latent, stored))
        conditioning.append(_put_together(conditions, stored))
    return _in_buckets(latents, conditioning) if buckets else (latents, conditioning)


def token(output: str | Path, name: str) -> str:
    """Return a text that is another one when the dataset is; empty: there is none."""
    try:
        opened, text = _read_index(output, name)
    except (DatasetError, BadSetNameError):
        return ""
    with opened:
        return compute_key(text)


def describe(output: str | Path, name: str) -> Info:
    """Return what a dataset is; no tensor is read for it."""
    opened, text = _read_index(output, name)
    index = json.loads(text)
    shapes: dict[str, int] = {}
    images = 0
    kinds = []
    for each in index["skeletons"]:
        latent = _put_together(json.loads(each)[0], lambda *spec: spec)
        samples = latent["samples"]
        kinds.append(samples.tensors if hasattr(samples, "tensors") else [samples])
    for number in index["which"]:
        specs = kinds[number]
        text = " + ".join(f"{dtype} {shape}" for _, dtype, shape in specs)
        shapes[text] = shapes.get(text, 0) + 1
        images += specs[0][2][0] if specs and specs[0][2] else 1
    with opened:
        stats = opened.stats()
        return Info(
            name=name, path=opened.path, samples=len(index["keys"]), images=images, shapes=shapes,
            on_disk=stats.on_disk, saved=stats.saved,
        )  # fmt: skip


def _read_index(output: str | Path, name: str) -> tuple[ArtifactSet, str]:
    sets = _sets(output)
    known = sorted({each.parent.name for each in sets.folders()})
    hint = f"There are: {', '.join(known)}." if known else "Save one first."
    if name not in known:
        _check_folder_name(name)
        raise DatasetError(f"There is no dataset {name!r} in {sets.root}", hint=hint)
    opened = sets.open(name, _FINGERPRINT, read_only=True)
    found = opened.get(_INDEX)
    if found is None:
        is_there = _INDEX in opened
        opened.close()
        if is_there:
            raise DatasetError(f"The index of the dataset {name} is damaged", hint=_AGAIN)
        raise DatasetError(f"The dataset {name} was never saved to its end", hint=hint)
    return opened, found["index"]


def _put_together(node: Any, tensor: Callable[..., object]) -> Any:  # noqa: ANN401, C901, PLR0911 - a table of kinds
    """Return the value that `_taken_apart` has made a node of; `tensor` makes those."""
    if type(node) is list:
        return [_put_together(each, tensor) for each in node]
    if type(node) is not dict:
        return node
    ((kind, value),) = node.items()
    match kind:
        case "tensor":
            return tensor(*value)
        case "dict":
            return {_put_together(k, tensor): _put_together(v, tensor) for k, v in value}
        case "tuple":
            return tuple(_put_together(value, tensor))
        case "Size":
            return torch.Size(value)
        case "nested":
            return _nested_tensor()(_put_together(value, tensor))
        case "float":
            return float.fromhex(value)
        case "complex":
            return complex(*map(float.fromhex, value))
        case "bytes":
            return bytes.fromhex(value)
        case "dtype":
            return getattr(torch, value)
        case "device":
            return torch.device(value)
    hint = "Update smartcache: a newer one has saved the dataset."
    raise DatasetError(f"The dataset has a value of an unknown kind, {kind}", hint=hint)


def _nested_tensor() -> Any:  # noqa: ANN401 - a class of ComfyUI
    try:
        return import_module("comfy.nested_tensor").NestedTensor
    except ImportError as error:
        hint = "Update ComfyUI."
        raise DatasetError(
            "The dataset has nested tensors, which need ComfyUI", hint=hint
        ) from error


def _in_buckets(latents: list[Any], conditioning: list[Any]) -> tuple[list[Any], list[Any]]:
    """Group samples by shape and dtype, in the order in which these come up."""
    groups: dict[object, tuple[list[Stored], list[Any]]] = {}
    left_out: set[str] = set()
    for number, (latent, conditions) in enumerate(zip(latents, conditioning, strict=True)):
        samples = latent["samples"]
        hint = "Load the dataset without buckets."
        if not isinstance(samples, LazyTensor) or not samples.dim():
            kind = type(samples).__name__
            raise DatasetError(f"latents[{number}] is a {kind}: it fits no bucket", hint=hint)
        left_out |= latent.keys() - {"samples"}
        rows = len(samples)
        if len(conditions) == 1:
            conditions = conditions * rows  # noqa: PLW2901 - one for all rows of a batch
        if len(conditions) != rows:
            both = f"{counted(rows, 'image')} and {counted(len(conditions), 'condition')}"
            message = f"Sample {number} has {both}"
            raise DatasetError(message, hint=hint)
        parts, conds = groups.setdefault((samples.shape[1:], samples.dtype), ([], []))
        parts += samples._parts  # noqa: SLF001
        conds += conditions
    if left_out:
        _log.warning("Left out of the buckets: %s of latents", ", ".join(sorted(left_out)))
    return (
        [{"samples": LazyTensor(tuple(parts))} for parts, _ in groups.values()],
        [conds for _, conds in groups.values()],
    )


# old shards


def import_shards(output: str | Path, folder: str, name: str) -> int:
    """Save the shards of ComfyUI's own node as a dataset; return how many samples they have.

    `<output>/<folder>/shard_0000.pkl` and so on, as metadata.json counts them: those of a longer,
    earlier save are left out. Nothing that a shard names is run, and the shards stay as they are.
    """
    path = Path(output) / _check_folder_name(folder)
    try:
        names = {
            int(found[1]): each for each in os.listdir(path) if (found := _SHARD.fullmatch(each))
        }
    except (FileNotFoundError, NotADirectoryError):
        names = {}
    if not names:
        hint = "Name the folder in ComfyUI's output folder that has shard_0000.pkl in it."
        raise DatasetError(f"There are no shards in {path}", hint=hint)
    promised = _metadata_of(path / "metadata.json")
    count = promised.get("num_shards", max(names) + 1)
    missing = next((number for number in range(count) if number not in names), None)
    if missing is not None:
        message = f"{path} has no shard_{missing:04d}.pkl, though it has {count:,} shards"
        raise DatasetError(message, hint="Copy all shards, or save them again.")
    if len(names) > count:
        others = ", ".join(names[number] for number in sorted(names) if number >= count)
        _log.warning("Left out, because they are of an earlier save: %s in %s", others, path)

    def samples() -> Generator[Sample]:
        total = 0
        for number in range(count):
            latents, conditioning = _read_shard(path / names[number])
            total += len(latents)
            yield from zip(latents, conditioning, strict=True)
        if total != promised.get("num_samples", total):
            message = f"{path} has {counted(total)}, not {promised['num_samples']:,}"
            raise DatasetChangedError(message, hint="The shards are of different saves.")

    with closing(samples()) as each:
        return save(output, name, each)


def _metadata_of(path: Path) -> dict[str, int]:
    """Return the counts that ComfyUI's node has written beside the shards; empty: it has not."""
    hint = "Correct it, or remove it: then all shards in the folder are imported."
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a FIFO waits
            found = json.loads(file.read(_MOST_METADATA) if path.is_file() else b"")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read as JSON", hint=hint) from error
    if not isinstance(found, dict):
        raise DatasetError(f"{path} is not a JSON object", hint=hint)
    counts = {name: found[name] for name in ("num_shards", "num_samples") if name in found}
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count < _MOST_SAMPLES:
            raise DatasetError(f"{path}: {name} is not a count", hint=hint)
    return counts


def _read_shard(path: Path) -> tuple[list[Any], list[Any]]:
    """Return latents and conditioning of a shard; its pickle may make plain values and tensors."""
    try:
        allowed = [import_module("comfy.nested_tensor").NestedTensor]
    except ImportError:
        allowed = []
    hint = "If you trust it, load it in ComfyUI and save it again with the node of smartcache."
    try:
        with torch.serialization.safe_globals(allowed):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise DatasetError(f"{path} cannot be read safely: {reason}", hint=hint) from error
    latents, conditioning = (
        (found.get("latents"), found.get("conditioning")) if isinstance(found, dict) else (0, 0)
    )
    if type(latents) is not list or type(conditioning) is not list:
        raise DatasetError(f"{path} is no shard of a training dataset", hint="Check the folder.")
    if len(latents) != len(conditioning):
        message = f"{path} has {len(latents)} latents and {len(conditioning)} conditionings"
        raise DatasetError(message, hint="It was not saved by ComfyUI's node: check it.")
    return latents, conditioning


def _check_folder_name(name: str) -> str:
    """Refuse a name that leads out of the output folder."""
    is_one = name == os.path.basename(name) and "\\" not in name
    if not is_one or name in ("", ".", "..") or "\0" in name:
        hint = "Give the name of one folder, without '/', '\\' or '..'."
        raise BadSetNameError(f"{name!r} cannot be the name of a dataset", hint=hint, name=name)
    return name


def _sets(output: str | Path) -> ArtifactSets:
    return ArtifactSets(Path(output) / FOLDER)
