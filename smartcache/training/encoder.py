"""Encoders: functions that make latents, embeddings or tokens of sources, and what that depends on.

    Encoder(encode_images, reads=("file", "mask"), depends_on=vae, buckets="area:1024 step:64")

An output is found again by a key of its own: the content of what its encoder reads, the bucket and
the variation; and it is kept in a set of its own for each encoder: what that depends on, and its
version. So an edited caption makes a new text and leaves the latent alone, and another VAE never
serves the latents of the one before. The code of the function is no part of it: who changes what
it computes raises `version`.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from blake3 import blake3

from smartcache.artifacts import compute_key
from smartcache.errors import (
    ConfigError,
    DatasetError,
    EncoderError,
    FileChangedError,
    SmartcacheError,
    install_hint,
)
from smartcache.training.look import Column, Listing
from smartcache.training.sources import FILE, plain_text

if TYPE_CHECKING:
    from PIL.Image import Image

SINGLE: Final = ""
"""The name under which an output is kept that is one tensor, and no dict of several."""
SIDE: Final = ".side"
"""Where the padding was that `trim` has cut: "right" or "left"."""
Bytes = bytes  # a method of items has that name
DigestOf = Callable[[Path], str]
Statistic = Literal["sample", "mean", "mode", "mean and std"]
_STATISTICS: Final = ("sample", "mean", "mode", "mean and std")
_DOMAIN: Final = b"smartcache output 1\0"
_ASPECT: Final = 4.0
_LARGEST: Final = 1 << 16
_LONGEST: Final = 100
"""The longest side to the shortest, at most."""
_STEP: Final = 1 << 16
"""Items whose keys are computed at a time."""


class Encoder:
    """A function that makes an output of items, with what it reads and what it depends on.

    `function` gets a list of at most `batch` items of one bucket. It returns one tensor whose rows
    belong to the items, a dict of such tensors (or of lists), or a list with one value per item; an
    exception in that list is a failure of its item.

    `reads` names what it reads of a source: "file", a sidecar, a field of a row. `depends_on` is
    what else the output depends on: a model (by its weights, config and dtype), a `Path` (by the
    content of the file or folder), `load_encoders(...)`, plain values, or a tuple of these.
    `version` is any plain value, to be changed with the code of the function.

    `buckets` gives every image the size it is encoded at: "area:1024 step:64" are sizes of about
    1024 x 1024 pixels with sides that are multiples of 64, or a list of (width, height).
    `variations` is how many encodings of every item there are; `item.variation` and `item.rng` tell
    them apart. `trim` names the field that is the attention mask: padding is not kept, and reading
    pads with zeros to the longest of a batch. That goes for all fields as long as the mask, but for
    plain vectors of floats, such as a pooled embedding. `statistic`, `scale` and `shift` say what a
    latent is, for those who read it later. Datasets whose encoders name the same `shared` set share
    what they encode; without it, every dataset has its own.
    """

    def __init__(  # noqa: PLR0913 - all of it is about the output
        self,
        function: Callable[[list[Item]], object],
        *,
        reads: str | Sequence[str],
        depends_on: object,
        version: object = 0,
        buckets: str | Iterable[tuple[int, int]] | None = None,
        batch: int = 1,
        variations: int = 1,
        trim: str | None = None,
        statistic: Statistic | None = None,
        scale: float | Sequence[float] | None = None,
        shift: float | Sequence[float] | None = None,
        shared: str | None = None,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"An encoder is a function, not {type(function).__name__}")
        for name, value in (("batch", batch), ("variations", variations)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is a number from 1 on, not {value!r}")
        if statistic is not None and statistic not in _STATISTICS:
            known = ", ".join(f'"{each}"' for each in _STATISTICS)
            raise ConfigError(f"statistic is one of {known}, not {statistic!r}")
        self.function = function
        self.reads = (reads,) if isinstance(reads, str) else tuple(reads)
        is_named = all(each and type(each) is str for each in self.reads)
        if not self.reads or not is_named or len(set(self.reads)) < len(self.reads):
            hint = 'Write reads="file", or reads=("file", "mask").'
            raise ConfigError(f"reads names what is read, each once, not {reads!r}", hint=hint)
        self.depends_on = depends_on
        self.version = version
        self.buckets = None if buckets is None else Buckets(buckets)
        self.batch = batch
        self.variations = variations
        self.trim = trim
        self.statistic = statistic
        self.scale = scale
        self.shift = shift
        self.shared = shared

    def fingerprint(self, digest_of: DigestOf) -> dict[str, object]:
        """Return what all its outputs depend on besides their sources: that of its set.

        `digest_of` is asked for the content of files.
        """
        digest = compute_key(_resolved(self.depends_on, digest_of))
        made: dict[str, object] = {"depends_on": digest, "reads": list(self.reads)}
        for name in ("version", "trim", "statistic", "scale", "shift"):
            value = getattr(self, name)
            if value is not None:
                made[name] = json.loads(plain_text(value, f"{name} of an encoder"))
        return made

    def to_json(self) -> dict[str, object]:
        """Return what has to be known of it to read its outputs."""
        return {
            "reads": list(self.reads),
            "buckets": None if self.buckets is None else self.buckets.text,
            "variations": self.variations,
            "trim": self.trim,
        }


def _resolved(value: object, digest_of: DigestOf) -> object:
    """Return what a key can be made of: files by their content, encoders by their fingerprint."""
    if isinstance(value, Path):
        return _content(value, digest_of)
    if hasattr(value, "digests") and hasattr(value, "fingerprint"):  # of load_encoders
        return value.fingerprint
    if isinstance(value, (tuple, list)):
        return [_resolved(each, digest_of) for each in value]
    if isinstance(value, (set, frozenset)):
        return {compute_key(_resolved(each, digest_of)) for each in value}
    if isinstance(value, dict):
        return {key: _resolved(each, digest_of) for key, each in value.items()}
    return value


def _content(path: Path, digest_of: DigestOf) -> object:
    try:
        if path.is_dir():
            files = sorted(each for each in path.rglob("*") if each.is_file())
            return {each.relative_to(path).as_posix(): digest_of(each) for each in files}
        return digest_of(path)
    except OSError as error:
        message = f"{path}, on which an encoder depends, cannot be read"
        raise DatasetError(f"{message}: {error.strerror or error}", path=path) from error


class Buckets:
    """The sizes that images are encoded at; each image gets the one of the nearest proportions.

    Written "area:1024 step:64 aspect:2" (the last is the longest side to the shortest, 4 unless
    said), or as sizes: "1024x1024 832x1216".
    """

    def __init__(self, given: str | Iterable[tuple[int, int]]) -> None:
        try:
            text = given if isinstance(given, str) else " ".join(f"{w}x{h}" for w, h in given)
        except (TypeError, ValueError):
            text = repr(given)
        self.sizes = np.array(_sizes(text), np.int64)
        """Width and height, from the narrowest to the widest."""
        self.text = " ".join(text.split())
        # Proportions are compared by their logarithm: 1:2 is as far from 1:1 as 2:1 is.
        aspects = np.log(self.sizes[:, 0] / self.sizes[:, 1])
        self._middles = (aspects[1:] + aspects[:-1]) / 2

    def of(self, size: Column) -> Column:
        """Return the bucket of each width and height; 0 x 0 where the size is not known."""
        known = (size > 0).all(axis=1)
        found = np.zeros_like(size)
        aspects = np.log(size[known, 0] / size[known, 1])
        found[known] = self.sizes[np.searchsorted(self._middles, aspects)]
        return found


def _sizes(text: str) -> list[tuple[int, int]]:
    hint = 'Write "area:1024 step:64", or sizes: "1024x1024 832x1216".'
    try:
        words = text.split()
        if words and all("x" in word for word in words):
            pairs = {tuple(map(int, word.split("x"))) for word in words}
            sizes = [(width, height) for width, height in pairs]
        else:
            options = dict(word.split(":") for word in words)
            area = int(options.pop("area"))
            step = int(options.pop("step", 64))
            aspect = float(options.pop("aspect", _ASPECT))
            if options or not 0 < step <= area <= _LARGEST or not 1 <= aspect <= _LONGEST:
                raise ValueError(text)
            sizes = []
            for width in range(step, int(area * aspect**0.5) + step, step):
                height = area * area // width // step * step
                if height and max(width, height) <= aspect * min(width, height):
                    sizes.append((width, height))
        if not sizes or not all(0 < side <= _LARGEST * _LONGEST for size in sizes for side in size):
            raise ValueError(text)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{text!r} are no buckets", hint=hint) from error
    by_aspect = {width / height: (width, height) for width, height in sorted(sizes)}
    return [by_aspect[aspect] for aspect in sorted(by_aspect)]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one output: of every item, one for each variation."""

    data: bytes
    """32 bytes each, item by item."""
    bucket: Column
    """Of each item: width and height, 0 without buckets."""

    @classmethod
    def of(cls, listing: Listing, spec: Mapping[str, Any]) -> Keys:
        """Compute the keys of all items: all of it that is not a hash is done at once."""
        count, variations = len(listing), int(spec["variations"])
        bucket = np.zeros((count, 2), np.int64)
        if spec["buckets"] is not None:
            bucket = Buckets(spec["buckets"]).of(listing.size)
        made: list[bytes] = []
        for start in range(0, count, _STEP):
            some = slice(start, start + _STEP)
            columns = [listing.reads[name][some] for name in spec["reads"]]
            columns.append(bucket[some].astype("<u4").view(np.uint8))
            fixed = np.repeat(np.concatenate(columns, axis=1), variations, axis=0)
            numbers = np.tile(np.arange(variations, dtype="<u4"), len(fixed) // variations)
            whole = np.concatenate([fixed, numbers.view(np.uint8).reshape(-1, 4)], axis=1)
            data, width = whole.tobytes(), whole.shape[1]
            made += [
                blake3(_DOMAIN + data[at : at + width]).digest()
                for at in range(0, len(data), width)
            ]
        made.append(cls.of_empty(spec))
        return cls(b"".join(made), bucket.astype(np.int32))

    @classmethod
    def of_empty(cls, spec: Mapping[str, Any]) -> bytes:
        """Return the key of the empty text, for those who leave texts out at random."""
        empty = blake3(b"").digest() * len(spec["reads"])
        return blake3(_DOMAIN + empty + bytes(12)).digest()


class Item:
    """One source on its way into an encoder: what it is, and what can be read of it.

    `item["caption"]` is a text, or the value of a row; of a sidecar that is no text, its path.
    What a source does not have is a KeyError, and `item.get("mask")` is None.
    """

    __slots__ = (
        "_cache", "_listing", "_number", "_reads", "_rng", "_used", "bucket", "crop", "seed",
        "variation",
    )  # fmt: skip

    def __init__(
        self,
        listing: Listing,
        number: int,
        *,
        bucket: tuple[int, int] | None,
        variation: int,
        key: bytes,
        used: set[tuple[str, str]],
        reads: Iterable[str] | None = None,
    ) -> None:
        self._listing = listing
        self._number = number
        self._reads = frozenset(listing.reads if reads is None else reads)
        """What may be asked for: all of it is in the key."""
        self._rng: random.Random | None = None
        self._cache: dict[tuple[str, str], object] = {}
        self._used = used
        """What the encoder has asked its items for: that is read ahead of it from then on."""
        self.bucket = bucket
        """Width and height to be encoded at; None without buckets."""
        self.variation = variation
        self.crop: Sequence[int] | None = None
        """Set by the encoder: left, top, right, bottom. It is kept with the output."""
        self.seed = int.from_bytes(key[:8], "little") >> 1
        """A number made of content, bucket and variation: the same on every machine."""

    def __repr__(self) -> str:
        return f"<Item {self.name}>"

    @property
    def name(self) -> str:
        """The path below the folder of the sources."""
        return self._listing.name(self._number)

    @property
    def path(self) -> Path:
        """The path of the file; to read it, an encoder has "file" among its `reads`."""
        path = self._listing.path(self._number)
        if path is None:
            raise self._absent(FILE)
        return path

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height of an image, as its header says."""
        width, height = self._listing.size[self._number].tolist()
        return (width, height) if width and height else None

    @property
    def metadata(self) -> dict[str, Any]:
        """What is known of the source besides its content."""
        return self._listing.values(self._number)

    @property
    def rng(self) -> random.Random:
        """A generator of random numbers that begins with `seed`, of this item alone."""
        if self._rng is None:
            self._rng = random.Random(self.seed)  # noqa: S311 - to vary, not to hide
        return self._rng

    def rewind(self) -> None:
        """Be as new: an encoder that is called again for it gets the same random numbers."""
        self._rng = self.crop = None

    def __contains__(self, name: object) -> bool:
        if name not in self._reads:
            hint = f"It reads: {', '.join(sorted(self._reads))}. Name {name!r} in reads=, too."
            raise ConfigError(f"An encoder asks for {name!r}, which it does not read", hint=hint)
        return self._listing.has(self._number, str(name))

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a text, a path, or any plain value
        listing, number = self._listing, self._number
        if name not in self:
            raise self._absent(name)
        if listing.is_file(number, name):
            return self._path(name)
        return self._once("value", name, lambda: listing.value(number, name))

    def get(self, name: str, default: object = None) -> Any:  # noqa: ANN401
        """Return what `item[name]` is, or a default if the source has no such thing."""
        return self[name] if name in self else default  # noqa: SIM401 - this is `get`

    def bytes(self, name: str = FILE) -> Bytes:
        """Return the content of the file, or of a sidecar, as it was when it was looked at."""
        data: Bytes = self._once("bytes", name, lambda: self._read(name))
        return data

    def image(self, name: str = FILE) -> Image:
        """Return the image of the file, or of a sidecar, upright; needs Pillow."""
        image: Image = self._once("image", name, lambda: _decoded(self._read(name)))
        return image

    def _read(self, name: str) -> Bytes:
        path, listing, number = self._path(name), self._listing, self._number
        with open(path, "rb") as file:
            data = file.read()
        # A file may change within one tick of its clock; of a text the digest is that of its words.
        if listing.is_file(number, name):
            is_same = blake3(data).digest() == listing.reads[name][number].tobytes()
        else:
            is_same = listing.is_current(number, name)
        if not is_same:
            raise FileChangedError(f"{path} has changed since it was looked at", path=path)
        return data

    def _path(self, name: str) -> Path:
        path = self._listing.path(self._number, name) if name in self else None
        if path is None:
            raise self._absent(f"file {name!r}")
        return path

    def _absent(self, what: str) -> AbsentError:
        return AbsentError(f"it has no {what}", items=(self.name,), number=self._number)

    def _once(self, kind: str, name: str, make: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return what was read ahead, or read it now; a failure to do so is the item's own."""
        self._used.add((kind, name))
        known = self._cache.pop((kind, name), None)
        if known is None:
            try:
                return make()
            except (ConfigError, DatasetError, MemoryError):
                raise
            except Exception as error:
                what = str(error) or type(error).__name__
                # The content was read before: what the system says now is not for ever.
                is_now = isinstance(error, OSError) and error.errno is not None
                is_now = is_now or isinstance(error, FileChangedError)
                fault = ChangedError if is_now else UnreadableError
                raise fault(
                    f"unreadable: {what}", items=(self.name,), number=self._number
                ) from error
        if isinstance(known, BaseException):
            raise known
        return known

    def read_ahead(self) -> None:
        """Read, in another thread, what the encoder has asked other items for."""
        for kind, name in list(self._used):
            if name not in self:
                continue
            try:
                act = {"image": self.image, "bytes": self.bytes}.get(kind, self.__getitem__)
                self._cache[kind, name] = act(name)
            except Exception as error:  # noqa: BLE001 - raised where the encoder asks for it
                self._cache[kind, name] = error

    @property
    def fault(self) -> ItemError | None:
        """Why what the encoder will ask for cannot be read, as far as that is known by now."""
        return next((each for each in self._cache.values() if isinstance(each, ItemError)), None)

    def is_guilty(self, fault: ItemError | None) -> bool:
        """Say whether an error is about this item."""
        return fault is not None and fault.number == self._number

    def has_changed(self) -> bool:
        """Say whether a file of it is not the one any more that was looked at."""
        for name in self._reads:
            if name not in self or not self._listing.is_file(self._number, name):
                continue
            try:
                if not self._listing.is_current(self._number, name):
                    return True
            except (OSError, SmartcacheError):
                return True
        return False


class ItemError(DatasetError):
    """An item cannot be encoded, and that is not the fault of the encoder."""

    number: int = -1


class AbsentError(ItemError, KeyError):
    """A source has not what an encoder asks for."""


class UnreadableError(ItemError):
    """What an encoder asks for cannot be read."""


class ChangedError(ItemError):
    """A file is not the one that was looked at, or out of reach: the next build looks again."""


def _decoded(data: bytes) -> Image:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        hint = install_hint("training")
        raise DatasetError("item.image() needs Pillow", hint=hint) from error
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:  # its words are about the memory that the bytes lie in
        raise ValueError("not an image") from None
    image.load()
    return ImageOps.exif_transpose(image)


# what encoders return


def split(returned: object, count: int, output: str) -> list[object]:
    """Return one value for each item; tensors are brought to the CPU first, all rows at once."""
    hint = "Return a tensor with a row per item, a dict of them, or a list with a value per item."
    if isinstance(returned, Mapping):
        columns = {name: _rows(each) for name, each in returned.items()}
        if not columns:
            raise EncoderError(f"The encoder of {output} returned an empty dict", hint=hint)
        for name, column in columns.items():
            if column is None or len(column) != count:
                size = "no rows" if column is None else f"{len(column)} rows"
                message = f"The encoder of {output} returned {size} of {name!r} for {count} items"
                raise EncoderError(message, hint=hint)
        return [{name: _row(column, at) for name, column in columns.items()} for at in range(count)]
    rows = _rows(returned)
    if rows is None or len(rows) != count:
        what = type(returned).__name__ if rows is None else f"{len(rows)} values"
        message = f"The encoder of {output} returned {what} for {count} items"
        raise EncoderError(message, hint=hint)
    return [_row(rows, at) for at in range(count)]


def _row(rows: Any, at: int) -> Any:  # noqa: ANN401
    """Return one row; of an array with one dimension an array, and no scalar: it is stacked."""
    return rows[at, ...] if hasattr(rows, "ndim") else rows[at]


def _rows(value: object) -> Any:  # noqa: ANN401 - whatever has rows
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu() if value.ndim else None
    if isinstance(value, (list, tuple)):
        return value
    return value if getattr(value, "ndim", 0) else None


def as_kept(value: object, trim: str | None, output: str) -> dict[Any, object]:
    """Return the output of one item as it is kept: a dict, without padding."""
    made = {name: _plain(each) for name, each in value.items()} if isinstance(
        value, Mapping
    ) else {SINGLE: _plain(value)}  # fmt: skip
    if trim is None:
        return made
    mask: Any = made.get(trim)
    if getattr(mask, "ndim", 0) != 1:
        hint = "Its mask has one dimension for each item: return it with shape (items, length)."
        raise EncoderError(f"{output} has no mask {trim!r} to trim by", hint=hint)
    length = len(mask)
    is_filled = mask.bool() if hasattr(mask, "bool") else mask  # numpy knows no bfloat16
    filled = np.flatnonzero(np.asarray(is_filled))
    first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, min(1, length))
    is_left = first > 0 and last == length
    start, end = (first, length) if is_left else (0, last)
    for name, each in made.items():
        if _is_as_long(each, length) or name == trim:
            made[name] = each[start:end]  # type: ignore[index]
    made[SIDE] = "left" if is_left else "right"
    return made


def _is_as_long(value: Any, length: int) -> bool:  # noqa: ANN401 - whatever is returned
    """Say whether a value has something for each place of a mask."""
    if not getattr(value, "ndim", 0) or len(value) != length:
        return False
    kind = getattr(value.dtype, "kind", "") or ("f" if value.is_floating_point() else "i")
    return value.ndim > 1 or kind not in "fc"


def _plain(value: object) -> object:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return value


def nan_in(value: Mapping[Any, object]) -> str | None:
    """Return the name of a field with a NaN; None: there is none."""
    return next((str(name) for name, each in value.items() if _has_nan(each)), None)


def _has_nan(value: object) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            return False
        known = value.dtype in (torch.float16, torch.float32, torch.float64)
        if not (known and value.is_cpu and value.layout is torch.strided) or value.is_neg():
            wide = value if value.element_size() > 1 else value.float()  # float8 knows no isnan
            return bool(torch.isnan(wide).any())
        # On a busy machine the threads of torch made 2,000 latents take 48 s instead of 3.
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fc" and bool(np.isnan(value).any())
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_nan, value))
    return isinstance(value, (float, complex)) and value != value  # noqa: PLR0124 - only NaN is so


def pad(batch: dict[Any, Any]) -> dict[Any, Any]:
    """Pad trimmed tensors of a batch to the longest, and stack them."""
    sides = batch.pop(SIDE)
    for name, column in batch.items():
        if isinstance(column, list) and column and hasattr(column[0], "ndim"):
            batch[name] = _padded(column, sides)
    return batch


def _padded(rows: list[Any], sides: list[str]) -> Any:  # noqa: ANN401 - a tensor or an array
    longest = max(len(row) for row in rows)
    shape = (len(rows), longest, *rows[0].shape[1:])
    first = rows[0]
    is_numpy = isinstance(first, np.ndarray)
    made = np.zeros(shape, first.dtype) if is_numpy else first.new_zeros(shape)
    for at, (row, side) in enumerate(zip(rows, sides, strict=True)):
        if side == "left":
            made[at, longest - len(row) :] = row
        else:
            made[at, : len(row)] = row
    return made


__all__ = [
    "SIDE", "SINGLE", "Buckets", "ChangedError", "Encoder", "Item", "ItemError", "Keys", "as_kept",
    "nan_in", "pad", "split",
]  # fmt: skip
