"""What other trainers have encoded, taken over into datasets, and given back as their files.

    photos = cache.dataset("photos", Sources("photos"), latent=Encoder(encode, reads="file", ...))
    plan = plan_import(photos, "sd-scripts", "photos")
    plan.execute()
    photos.build()                        # encodes only what was not taken

The files of the trainers say neither which image they were made of nor by which encoder. So the
name of a file is matched with an image as it is now, and the tensor becomes the output of that
content: under the very key that the dataset's own encoder would have used. What the encoder is, the
user has said by giving it. Each entry keeps what was claimed of it: the trainer, the file, the
names inside and its header. A file is not taken if anything speaks against it; the plan says what.

Files are read where they lie, and never changed. No pickle is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError, safe_open

from smartcache.errors import ConfigError, DatasetError, SmartcacheError, install_hint
from smartcache.integrations.mgds.takeover import OldCache, xxh64_of
from smartcache.integrations.simpletuner import load_tensors
from smartcache.progress import Progress, silent
from smartcache.system.ownfiles import atomically

if TYPE_CHECKING:
    from smartcache.training import Dataset, Output

__all__ = [
    "Exported", "ImportPlan", "Imported", "Skipped", "Target", "Trainer", "export_files",
    "plan_import",
]  # fmt: skip

Trainer = Literal["sd-scripts", "musubi", "ai-toolkit", "simpletuner", "diffusion-pipe", "mgds"]
Target = Literal["sd-scripts", "musubi"]
Kind = Literal["latent", "text"]
_SD_LATENT: Final = re.compile(
    r"(?P<owner>.+)_(?P<w>\d{4,})x(?P<h>\d{4,})_(?P<arch>sd|sdxl|sd3|flux|lumina|hi|anima)\.npz"
)
_SD_TEXT: Final = re.compile(
    r"(?P<owner>.+)_(?P<arch>te_outputs|(?:sd3|flux|lumina|hi|anima)_te)\.npz"
)
_SD_OLD: Final = re.compile(r"(?P<owner>.+)\.npz")
_SD_FIELD: Final = re.compile(
    r"(latents_flipped|latents|original_size|crop_ltrb|alpha_mask)(_\d+x\d+)?"
)
_MUSUBI_LATENT: Final = re.compile(
    r"(?P<owner>.+)_(?P<w>\d{4,})x(?P<h>\d{4,})_(?P<arch>[^_]+)\.safetensors"
)
_MUSUBI_TEXT: Final = re.compile(r"(?P<owner>.+)_(?P<arch>[^_]+)_te\.safetensors")
_MUSUBI_FIELD: Final = re.compile(
    r"(?:varlen_)?(.+?)(?:_(?:\d+x)?\d+x\d+)?(?:_(?:b?float\d\w*|u?int\d+|bool))?"
)
# The digest is in base 64: 22 letters, of which _ is one.
_AI_FILE: Final = re.compile(r"(?P<owner>.+)_(?P<arch>[0-9a-f]{32}|[\w-]{22})\.safetensors")
_ST_TEXT: Final = re.compile(r"(?P<owner>[0-9a-f]{32})-(?P<arch>.+)\.pt")
_ST_LATENT: Final = re.compile(r"(?P<owner>.+)\.pt")
_MGDS_LATENT: Final = "latent_image"
_FACTOR: Final = 8
_MATRIX: Final = 2
_UNREADABLE: Final = (
    OSError, ValueError, LookupError, TypeError, BadZipFile, SafetensorError, SmartcacheError,
)  # fmt: skip
"""What the readers of files raise that are damaged, or no such files."""


class Skipped(NamedTuple):
    """A file that is not taken, or an entry that is not written, and why."""

    file: str
    item: str
    """The name of the item; "": the file belongs to none."""
    reason: str


class _File(NamedTuple):
    """A file of a trainer, or an item in one, as far as its name tells."""

    kind: Kind
    owner: str
    """What the image is called in it, or the caption."""
    path: str
    arch: str = ""
    size: tuple[int, int] | None = None
    """Width and height that the image had."""
    place: tuple[int, int] | None = None
    """Where in the file it lies, and its length."""


class _Content(NamedTuple):
    """Tensors of one output, by field."""

    tensors: dict[str, Any]
    names: dict[str, str]
    """What the fields are called in the file."""
    others: dict[str, Any]
    """Small values beside them: crop, original size."""
    header: dict[str, str]


class _Match(NamedTuple):
    """An output that is missing, and the files that may hold it."""

    output: str
    number: int
    item: str
    files: list[_File]


@dataclass(slots=True, kw_only=True)
class Imported:
    """What was taken over."""

    taken: dict[str, int] = field(default_factory=dict)
    """By output."""
    present: int = 0
    """Outputs that were there already."""
    skipped: list[Skipped] = field(default_factory=list)

    def __str__(self) -> str:
        words = [f"{count:,} {name}" for name, count in self.taken.items()]
        return _summary("taken", words, self.present, self.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """What would be taken over; `execute` reads the files and does it."""

    trainer: Trainer
    present: int
    skipped: tuple[Skipped, ...]
    _dataset: Dataset = field(repr=False)
    _matches: tuple[_Match, ...] = field(repr=False)
    _root: str = field(repr=False)
    _factor: int = field(repr=False)

    @property
    def outputs(self) -> dict[str, list[str]]:
        """The keys of what would be taken, by output."""
        made: dict[str, list[str]] = {name: [] for name in self._dataset.outputs}
        for match in self._matches:
            made[match.output].append(self._dataset.outputs[match.output].key(match.number))
        return {name: keys for name, keys in made.items() if keys}

    def __str__(self) -> str:
        words = [f"{len(keys):,} {name}" for name, keys in self.outputs.items()]
        return _summary("to take", words, self.present, self.skipped)

    def execute(self, progress: Progress = silent) -> Imported:
        """Take it over; what is interrupted goes on with the next plan."""
        dataset = self._dataset
        done = Imported(present=self.present, skipped=list(self.skipped))
        done.taken = dict.fromkeys(self.outputs, 0)
        with progress("Importing", len(self._matches)) as job:
            for match in self._matches:
                why = self._take(match)
                if why:
                    file = os.path.relpath(match.files[0].path, self._root)
                    done.skipped.append(Skipped(file, match.item, why))
                else:
                    done.taken[match.output] += 1
                job.advance()
        for name in done.taken:
            dataset.outputs[name].set.sync()
        dataset.look()
        return done

    def _take(self, match: _Match) -> str:
        """Take one output over; return why not."""
        output = self._dataset.outputs[match.output]
        found: list[tuple[_File, _Content]] = []
        try:
            for file in match.files:
                found += [(file, each) for each in _READERS[self.trainer](file)]
        except _UNREADABLE as error:
            return _unreadable(error)
        bucket = output.keys.bucket[match.number // output.variations].tolist()
        if match.files[0].kind == "latent" and bucket[0]:
            sizes = {_pixels(each, self._factor) for _, each in found}
            found = [each for each in found if _pixels(each[1], self._factor) == tuple(bucket)]
            if not found:
                known = ", ".join(f"{width} x {height}" for width, height in sorted(sizes))
                return f"it was encoded at {known}, and the bucket is {bucket[0]} x {bucket[1]}"
        if len(found) != 1:
            return "it has no tensors" if not found else "it holds several sizes: give buckets"
        file, content = found[0]
        tensors = content.tensors
        value = next(iter(tensors.values())) if len(tensors) == 1 else tensors
        claim = {
            "trainer": self.trainer, "file": os.path.relpath(file.path, self._root),
            "arch": file.arch, "names": content.names, "others": content.others,
            "header": content.header,
        }  # fmt: skip
        return self._dataset.take(match.output, match.number, value, claim)


def _summary(verb: str, words: list[str], present: int, skipped: Sequence[Skipped]) -> str:
    parts = [f"{', '.join(words) or 'nothing'} {verb}"]
    parts += [f"{present:,} there already"] if present else []
    reasons = Counter(each.reason for each in skipped)
    parts += [f"{count:,} skipped ({reason})" for reason, count in reasons.most_common(5)]
    others = len(skipped) - sum(count for _, count in reasons.most_common(5))
    parts += [f"{others:,} skipped for other reasons"] if others else []
    return "; ".join(parts)


def plan_import(  # noqa: PLR0913 - what the files do not say
    dataset: Dataset,
    trainer: Trainer,
    folder: str | os.PathLike[str],
    *,
    latent: str | None = "latent",
    text: str | None = None,
    arch: str | None = None,
    factor: int = _FACTOR,
    older: bool = False,
    progress: Progress = silent,
) -> ImportPlan:
    """Look which files of a trainer hold outputs that a dataset lacks; nothing is taken yet.

    `latent` and `text` name the outputs: one that reads "file", and one that reads a caption.
    `arch` chooses files of one architecture ("sdxl", "wan") where there are several. `factor` is
    how many pixels a place of a latent stands for, to compare its size with the bucket. A file that
    is older than its image is not taken, unless `older` says that these times mean nothing.
    """
    if trainer not in _FINDERS:
        known = ", ".join(get_args(Trainer))
        raise ConfigError(f"{trainer!r} is not a trainer that is known", hint=f"Choose: {known}.")
    root = os.path.abspath(folder)
    if not os.path.isdir(root):
        raise DatasetError(f"There is no folder {root}", path=root)
    _torch()
    dataset.refresh(progress)
    named: list[tuple[Kind, str | None]] = [("latent", latent), ("text", text)]
    wanted = [(kind, _output(dataset, kind, name)) for kind, name in named if name is not None]
    index: dict[tuple[Kind, str], list[_File]] = {}
    kinds = {kind for kind, _ in wanted}
    for file in _FINDERS[trainer](root):
        if file.kind in kinds and arch in (None, file.arch):
            index.setdefault((file.kind, file.owner), []).append(file)
    search = _Search(dataset, trainer, root, index, older=older)
    for kind, output in wanted:
        search.look(kind, output)
    for (kind, owner), files in index.items():
        if (kind, owner) not in search.owned:
            what = "image" if kind == "latent" else "caption"
            reason = f"no {what} of the dataset belongs to it"
            search.skipped += [
                Skipped(os.path.relpath(file.path, root), "", reason) for file in files
            ]
    return ImportPlan(
        trainer=trainer, present=search.present, skipped=tuple(search.skipped), _dataset=dataset,
        _matches=tuple(search.matches), _root=root, _factor=factor,
    )  # fmt: skip


def _output(dataset: Dataset, kind: Kind, name: str) -> Output:
    if name not in dataset.outputs:
        hint = f"It has: {', '.join(dataset.outputs)}. Say latent=..., text=..., or None."
        raise ConfigError(f"{dataset.name} has no output {name!r}", hint=hint)
    output = dataset.outputs[name]
    if ("file" in output.spec["reads"]) != (kind == "latent"):
        hint = 'A latent is made of "file"; a text of a sidecar such as "caption".'
        raise ConfigError(f"{name} reads {', '.join(output.spec['reads'])}", hint=hint)
    return output


class _Search:
    """Which files belong to which items, and what speaks against them."""

    def __init__(
        self,
        dataset: Dataset,
        trainer: Trainer,
        root: str,
        index: Mapping[tuple[Kind, str], list[_File]],
        *,
        older: bool,
    ) -> None:
        self.dataset = dataset
        self.trainer = trainer
        self.root = root
        self.index = index
        self.older = older
        self.owned: set[tuple[Kind, str]] = set()
        self.matches: list[_Match] = []
        self.skipped: list[Skipped] = []
        self.present = 0

    def look(self, kind: Kind, output: Output) -> None:
        """Look for the files of one output."""
        listing, read = self.dataset.listing, "file" if kind == "latent" else _caption_read(output)
        missing = set(output.missing.tolist())
        found: dict[int, list[_File]] = {}
        users: dict[_File, set[str]] = {}
        for item in np.flatnonzero(self.dataset.is_good).tolist():
            number = item * output.variations
            files = self._files_of(kind, output, item) if listing.has(item, read) else []
            for file in files:
                why = self._fault(kind, output, item, file)
                if not why:
                    users.setdefault(file, set()).add(output.key(number))
                    found.setdefault(item, []).append(file)
                elif number in missing:
                    self._skip(file, item, why)
        seen: set[str] = set()
        can_choose = kind == "latent" and output.spec["buckets"] is not None
        for item, files in found.items():
            number = item * output.variations
            key = output.key(number)
            if number not in missing:
                self.present += 1
            elif key not in seen:
                # cat.png and cat.jpg: nobody knows which of them a file was made of.
                good = [file for file in files if len(users[file]) == 1]
                if not good:
                    self._skip(files[0], item, "several sources of the dataset are called like it")
                elif len(good) > 1 and not can_choose:
                    self._skip(good[0], item, "several files are of this item: choose by arch")
                else:
                    seen.add(key)
                    self.matches.append(_Match(output.name, number, listing.name(item), good))

    def _skip(self, file: _File, item: int, why: str) -> None:
        where = os.path.relpath(file.path, self.root)
        self.skipped.append(Skipped(where, self.dataset.listing.name(item), why))

    def _files_of(self, kind: Kind, output: Output, item: int) -> list[_File]:
        """Return the files that are called like an item."""
        files: list[_File] = []
        for owner in self._owners(kind, output, item):
            if (kind, owner) in self.index:
                self.owned.add((kind, owner))
                files += self.index[kind, owner]
        if self.trainer != "simpletuner" or kind == "text":
            return files
        # SimpleTuner repeats the folders of images below that of its cache.
        below = os.path.dirname(self.dataset.listing.name(item))
        here = {file: os.path.dirname(os.path.relpath(file.path, self.root)) for file in files}
        exact = [file for file in files if here[file] == below]
        return exact or [file for file in files if f"/{here[file]}".endswith(f"/{below}")]

    def _owners(self, kind: Kind, output: Output, item: int) -> list[str]:
        """Return what a trainer calls an item."""
        listing = self.dataset.listing
        path = listing.path(item)
        if self.trainer == "simpletuner" and kind == "text":
            caption = _caption(output, listing, item)
            texts = [] if caption is None else dict.fromkeys((caption, caption.strip()))
            coded = [text.encode("utf-8", "surrogatepass") for text in texts]
            return [hashlib.md5(data, usedforsecurity=False).hexdigest() for data in coded]
        if path is None:
            return []
        whole = os.path.splitext(path)[0]
        stem = os.path.basename(whole)
        if self.trainer == "simpletuner":
            return [hashlib.sha256(os.fsencode(stem)).hexdigest(), stem]
        if self.trainer == "diffusion-pipe":
            return [os.path.abspath(path)]
        if self.trainer == "mgds":
            return [xxh64_of(os.fspath(path))]
        return [stem] if self.trainer == "musubi" else [whole]

    def _fault(self, kind: Kind, output: Output, item: int, file: _File) -> str:
        """Return what speaks against it that a file is of an item as it is now."""
        try:
            if kind == "text":
                return self._text_fault(output, item, file)
            return self._latent_fault(item, file)
        except _UNREADABLE as error:
            return _unreadable(error)

    def _text_fault(self, output: Output, item: int, file: _File) -> str:
        if self.trainer == "simpletuner":  # its name is the digest of the caption
            return ""
        header = self._header(file)
        made_of = header.get("caption1", header.get("caption"))
        if made_of is not None:
            caption = (_caption(output, self.dataset.listing, item) or "").strip()
            is_same = caption in (made_of.strip(), _plain(made_of).strip())
            return "" if is_same else "its caption was another one"
        source = self.dataset.listing.path(item, _caption_read(output))
        return "it is older than the caption" if self._is_older(file, source) else ""

    def _latent_fault(self, item: int, file: _File) -> str:
        if self.trainer == "mgds":  # it was found by the content of the image
            return "" if os.path.exists(file.path) else "there is no such file"
        source = self.dataset.listing.path(item)
        if self._is_older(file, source):
            return "it is older than the image"
        if file.size is not None and source is not None and file.size not in _sizes(source):
            return "the size in its name is not that of the image"
        header = self._header(file)
        if any(_plain(header.get(name, "")) in ("true", "True") for name in ("flip_x", "flip_y")):
            return "it is of the image turned over"
        if "filename" in header and source is not None:
            return "" if _plain(header["filename"]) == source.name else "it is of another file"
        return ""

    def _header(self, file: _File) -> dict[str, str]:
        if not file.path.endswith(".safetensors"):
            return {}
        with safe_open(file.path, "np") as opened:
            return dict(opened.metadata() or {})

    def _is_older(self, file: _File, source: Path | None) -> bool:
        if source is None or self.older:
            return False
        return os.stat(file.path).st_mtime_ns < os.stat(source).st_mtime_ns


def _unreadable(error: BaseException) -> str:
    return f"it cannot be read: {(str(error) or repr(error)).splitlines()[0]}"


def _caption_read(output: Output) -> str:
    reads: list[str] = output.spec["reads"]
    return next(read for read in reads if read != "file")


def _caption(output: Output, listing: Any, item: int) -> str | None:  # noqa: ANN401 - a Listing
    read = _caption_read(output)
    if not listing.has(item, read) or listing.is_file(item, read):
        return None
    value = listing.value(item, read)
    return value if isinstance(value, str) else None


def _plain(text: str) -> str:
    """Return a value of a header, which ai-toolkit writes as JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _sizes(path: Path) -> set[tuple[int, int]]:
    """Return width and height as the header of an image has them, and as it is shown."""
    try:
        import imagesize
    except ImportError as error:
        hint = install_hint("training")
        raise ConfigError("The sizes of images need imagesize", hint=hint) from error
    return {imagesize.get(path, exif_rotation=is_shown) for is_shown in (False, True)}


def _pixels(content: _Content, factor: int) -> tuple[int, int]:
    """Return the width and height that a latent was encoded at."""
    first = next(iter(content.tensors.values()))
    if getattr(first, "ndim", 0) < _MATRIX:
        return 0, 0
    return int(first.shape[-1]) * factor, int(first.shape[-2]) * factor


def _torch() -> Any:  # noqa: ANN401 - a module
    try:
        return import_module("torch")
    except ImportError as error:
        hint = install_hint("torch")
        raise ConfigError("Files of trainers become tensors of torch", hint=hint) from error


# finding


def _files(root: str) -> Iterator[tuple[str, str]]:
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            yield folder, name


def _named(
    kind: Kind, found: re.Match[str] | None, folder: str, *, beside: str | None = None
) -> Iterator[_File]:
    """Yield the file that a name tells of; `beside`: its image lies in this folder."""
    if found is not None:
        parts = found.groupdict()
        size = (int(parts["w"]), int(parts["h"])) if parts.get("w") else None
        owner = parts["owner"] if beside is None else os.path.join(beside, parts["owner"])
        path = os.path.join(folder, found.string)
        yield _File(kind, owner, path, parts.get("arch") or "", size)


def _find_sd(root: str) -> Iterator[_File]:
    for folder, name in _files(root):
        latent, text = _SD_LATENT.fullmatch(name), _SD_TEXT.fullmatch(name)
        if latent is None and text is None:
            yield from _named("latent", _SD_OLD.fullmatch(name), folder, beside=folder)
        yield from _named("latent", latent, folder, beside=folder)
        yield from _named("text", text, folder, beside=folder)


def _find_musubi(root: str) -> Iterator[_File]:
    for folder, name in _files(root):
        text = _MUSUBI_TEXT.fullmatch(name)
        yield from _named("text", text, folder)
        if text is None:
            yield from _named("latent", _MUSUBI_LATENT.fullmatch(name), folder)


def _find_ai_toolkit(root: str) -> Iterator[_File]:
    kinds: dict[str, Kind] = {"_latent_cache": "latent", "_t_e_cache": "text"}
    for folder, name in _files(root):
        kind = kinds.get(os.path.basename(folder))
        if kind is not None:
            beside = os.path.dirname(folder)
            yield from _named(kind, _AI_FILE.fullmatch(name), folder, beside=beside)


def _find_simpletuner(root: str) -> Iterator[_File]:
    for folder, name in _files(root):
        text = _ST_TEXT.fullmatch(name)
        yield from _named("text", text, folder)
        if text is None:
            yield from _named("latent", _ST_LATENT.fullmatch(name), folder)


def _find_diffusion_pipe(root: str) -> Iterator[_File]:
    """Find items by the order of iteration that lies beside them: their own files name none."""
    for folder, folders, _ in os.walk(root):
        folders.sort()
        if not {"latents", "iteration_order"} <= set(folders):
            continue
        folders.clear()
        database = os.path.join(folder, "latents", "metadata.db")
        if not os.path.isfile(database):
            continue
        try:
            datasets = import_module("datasets")
        except ImportError as error:
            hint = install_hint("datasets")
            raise ConfigError("The files of diffusion-pipe need datasets", hint=hint) from error
        order = datasets.load_from_disk(os.path.join(folder, "iteration_order"))
        columns = zip(order["image_spec"], order["latents_idx"], strict=True)
        positions = {int(at): spec for spec, at in columns}
        uri = f"{Path(database).absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as rows:
            shards: dict[int, list[tuple[int, int]]] = {}
            items = rows.execute("SELECT shard, shard_index FROM items").fetchall()
            for shard in {int(each) for each, _ in items}:
                table = f"SELECT offset, size FROM shard_{shard}"  # noqa: S608 - a number
                shards[shard] = rows.execute(table).fetchall()
        for at, (shard, number) in enumerate(items):
            archive, image = positions.get(at) or (None, None)
            if image is not None and archive is None:
                path = os.path.join(folder, "latents", f"shard_{shard}.bin")
                place = shards[shard][number]
                yield _File("latent", os.path.abspath(image), path, place=place)


def _find_mgds(root: str) -> Iterator[_File]:
    """Find what SmartDiskCache has of images: by the hashes of these, wherever they lie."""
    for folder, name in _files(root):
        if name == "cache.json":
            for digest, path in OldCache(Path(folder), "").files():
                yield _File("latent", digest, os.fspath(path))


_FINDERS: Final[dict[Trainer, Callable[[str], Iterable[_File]]]] = {
    "sd-scripts": _find_sd,
    "musubi": _find_musubi,
    "ai-toolkit": _find_ai_toolkit,
    "simpletuner": _find_simpletuner,
    "diffusion-pipe": _find_diffusion_pipe,
    "mgds": _find_mgds,
}


# reading


def _read_npz(file: _File) -> Iterator[_Content]:
    """Read what sd-scripts has saved: a latent for each size, or the outputs of text encoders."""
    torch = _torch()
    # numpy leaves a file open that it has opened and cannot read.
    with open(file.path, "rb") as opened, np.load(opened, allow_pickle=False) as npz:
        arrays = {name: npz[name] for name in npz.files}
    groups: dict[str, _Content] = {}
    for name, array in arrays.items():
        found = _SD_FIELD.fullmatch(name) if file.kind == "latent" else None
        field_, group = (name, "") if found is None else (found[1], found[2] or "")
        made = groups.setdefault(group, _Content({}, {}, {}, {}))
        if field_ in ("original_size", "crop_ltrb") and file.kind == "latent":
            made.others[field_] = {"dtype": str(array.dtype), "values": array.tolist()}
        else:
            made.tensors[field_] = torch.from_numpy(
                np.ascontiguousarray(array).reshape(array.shape)
            )
        made.names[field_] = name
    for made in groups.values():
        if file.kind == "text" or "latents" in made.tensors:
            first = {"latents": made.tensors["latents"]} if file.kind == "latent" else {}
            yield made._replace(tensors=first | made.tensors)


def _read_musubi(file: _File) -> Iterator[_Content]:
    """Read tensors under names without their sizes and dtypes: all items have the same names."""
    made = next(_read_ai_toolkit(file))
    found = {name: _MUSUBI_FIELD.fullmatch(name) for name in made.tensors}
    short = {name if each is None else each[1]: name for name, each in found.items()}
    if len(short) < len(found):
        yield made
        return
    order = sorted(short, key=lambda each: (each != "latents", each))
    yield made._replace(tensors={each: made.tensors[short[each]] for each in order}, names=short)


def _read_ai_toolkit(file: _File) -> Iterator[_Content]:
    with safe_open(file.path, "pt") as opened:
        header = dict(opened.metadata() or {})
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    order = sorted(tensors, key=lambda each: (each != "latent", each))
    names = {name: name for name in order}
    yield _Content({name: tensors[name] for name in order}, names, {}, header)


def _read_pt(file: _File) -> Iterator[_Content]:
    """Read what torch.save has written: one tensor, or a dict of them."""
    with open(file.path, "rb") as opened:
        if file.place is None:
            data = opened.read()
        else:
            opened.seek(file.place[0])
            data = opened.read(file.place[1])
    value = load_tensors(data, file.path)
    found = value if isinstance(value, dict) else {"latents": value}
    is_tensor = _torch().is_tensor
    tensors = {str(name): each for name, each in found.items() if is_tensor(each)}
    others = {str(name): each for name, each in found.items() if not is_tensor(each)}
    if tensors:
        first = {"latents": tensors["latents"]} if "latents" in tensors else {}
        yield _Content(first | tensors, {name: name for name in tensors}, others, {})


def _read_mgds(file: _File) -> Iterator[_Content]:
    """Read the names that are cached of an image; a cache of texts has none."""
    for made in _read_pt(file):
        tensors = {name: made.tensors[name] for name in made.tensors if name != _MGDS_LATENT}
        if _MGDS_LATENT in made.tensors:
            others = {name: each for name, each in made.others.items() if name[:2] != "__"}
            first = {_MGDS_LATENT: made.tensors[_MGDS_LATENT]}
            yield made._replace(tensors=first | tensors, others=others)


_READERS: Final[dict[Trainer, Callable[[_File], Iterator[_Content]]]] = {
    "sd-scripts": _read_npz,
    "musubi": _read_musubi,
    "ai-toolkit": _read_ai_toolkit,
    "simpletuner": _read_pt,
    "diffusion-pipe": _read_pt,
    "mgds": _read_mgds,
}


# giving back


@dataclass(slots=True, kw_only=True)
class Exported:
    """What was written as files of a trainer."""

    files: list[Path] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def __str__(self) -> str:
        return _summary("written", [f"{len(self.files):,} files"], 0, self.skipped)


def export_files(
    dataset: Dataset,
    trainer: Target,
    folder: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Exported:
    """Write what was imported from a trainer as its files again, below a folder.

    They have the names and the tensors that they had. Outputs that were encoded here, or that come
    from another trainer, are named as skipped: their values may be other ones (scaled, shifted).
    A file that is there already is left alone.
    """
    if trainer not in get_args(Target):
        hint = f"Choose: {', '.join(get_args(Target))}."
        raise ConfigError(f"Nothing is exported to {trainer!r}", hint=hint)
    root, listing, done = os.path.abspath(folder), dataset.listing, Exported()
    todo = [
        (output, item)
        for output in dataset.outputs.values()
        for item in dataset.numbers.tolist()
        if output.key(item * output.variations) in output.set
    ]
    with progress("Exporting", len(todo)) as job:
        for output, item in todo:
            job.advance()
            name = listing.name(item)
            found = output.set.get_with_metadata(output.key(item * output.variations))
            claim = (found[1] or {}).get("claimed", {}) if found is not None else {}
            if found is None or claim.get("trainer") != trainer:
                skipped = Skipped(output.name, name, f"it was not imported from {trainer}")
                done.skipped.append(skipped)
                continue
            path = os.path.normpath(os.path.join(root, claim["file"]))
            if os.path.commonpath((root, path)) != root or os.path.lexists(path):
                why = "there is such a file already" if os.path.lexists(path) else "it lies outside"
                done.skipped.append(Skipped(claim["file"], name, why))
                continue
            if not dry_run:
                _write(path, trainer, found[0], claim)
            done.files.append(Path(path))
    return done


def _write(path: str, trainer: Target, kept: Mapping[Any, Any], claim: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all."""
    fields = [name for name in claim["names"] if name not in claim["others"]]
    values = {"": kept[""]} if "" in kept else kept
    tensors = {
        claim["names"][name]: values[""] if "" in values else values[name] for name in fields
    }
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with atomically(Path(path), is_private=False) as file:
        if trainer == "sd-scripts":
            arrays = {name: each.numpy() for name, each in tensors.items()}
            for name, each in claim["others"].items():
                arrays[claim["names"][name]] = np.array(each["values"], each["dtype"])
            np.savez(file, **arrays)
        else:
            save = import_module("safetensors.torch").save
            file.write(save(tensors, metadata=claim["header"] or None))
