"""A data backend of SimpleTuner that keeps its caches as artifacts.

    from functools import partial
    from simpletuner.helpers.data_backend import factory
    from smartcache.integrations.simpletuner import DataBackend

    factory.LocalDataBackend = partial(DataBackend, root="cache")

It has the methods of SimpleTuner's `BaseDataBackend`, and to its callers it is a local one. What
they write below `root` under a name that ends in .pt becomes an artifact, found by its path
relative to `root`; every other file is a plain file where its path says:

    <root>/.smartcache/simpletuner/<id>/    the set; see smartcache.artifacts

So a latent is there whole or not at all, equal tensors take room once, and nothing is unpickled.
A .pt file that a local backend has written before is read where it lies.
"""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

from smartcache.artifacts import ArtifactSets
from smartcache.errors import ConfigError, UnsupportedValueError
from smartcache.system.ownfiles import atomically

__all__ = ["DataBackend", "load_tensors"]

_OWN = ".smartcache"
_SKIPPED = frozenset((
    _OWN, ".Spotlight-V100", ".Trashes", ".fseventsd", ".TemporaryItems", ".zfs",
    ".ipynb_checkpoints",
))  # fmt: skip
"""Folders that are not looked into; all but the first are those that SimpleTuner skips."""
_BASE = "simpletuner.helpers.data_backend.base"
_LOCAL = "simpletuner.helpers.data_backend.local"
Listed = list[tuple[str, list[str], list[str]]]


class DataBackend:
    """A local backend whose .pt files below `root` are artifacts. For threads and processes.

    `fingerprint` says what the tensors depend on that their paths do not tell, {"vae": digest}:
    another one is another set beside this one. `compress_cache` keeps tensors with zlib.
    """

    type = "local"

    def __init__(
        self,
        accelerator: object = None,
        id: str = "",  # noqa: A002 - SimpleTuner calls it so
        compress_cache: bool = False,  # noqa: FBT001, FBT002
        *,
        root: str | os.PathLike[str],
        fingerprint: Mapping[str, object] | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.id = id
        self.compress_cache = compress_cache
        self.root = os.path.abspath(root)
        self.fingerprint = dict(fingerprint or {})
        os.makedirs(self.root, exist_ok=True)
        self._set = ArtifactSets(os.path.join(self.root, _OWN)).open(
            "simpletuner", self.fingerprint, evictable=False,
            compression="gzip" if compress_cache else "none",
        )  # fmt: skip
        # Not imported for its own sake: it loads torch and much else.
        base = getattr(sys.modules.get(_BASE), "BaseDataBackend", None)
        if base is not None:
            base.register(type(self))

    def get_instance_representation(self) -> dict[str, object]:
        """Return what another process makes an equal backend of."""
        return {
            "backend_type": "smartcache", "id": self.id, "compress_cache": self.compress_cache,
            "root": self.root, "fingerprint": self.fingerprint,
        }  # fmt: skip

    @classmethod
    def from_instance_representation(cls, representation: Mapping[str, Any]) -> Self:
        """Return the backend that was represented; it has no accelerator."""
        if representation.get("backend_type") != "smartcache":
            kind = representation.get("backend_type")
            raise ConfigError(f"This represents a backend of type {kind!r}, not 'smartcache'")
        return cls(
            None, representation["id"], representation.get("compress_cache", False),
            root=representation["root"], fingerprint=representation.get("fingerprint"),
        )  # fmt: skip

    # tensors

    def torch_save(
        self, data: object, original_location: str | os.PathLike[str] | IO[bytes]
    ) -> None:
        """Keep tensors and plain values under a path, or write them to an open file.

        UnsupportedValueError names the part of a value that cannot be kept.
        """
        if not isinstance(original_location, (str, os.PathLike)):
            _torch().save(data, original_location)
            original_location.flush()
            return
        path = os.path.abspath(original_location)
        key = self._key(path)
        if key is None:
            self._write_file(path, _saved(data))
            return
        self._set.put(key, data)
        # Only now: what a local backend has written there before is replaced, and not lost.
        _remove(path)

    def torch_load(self, filename: str | os.PathLike[str]) -> Any:  # noqa: ANN401 - what was saved
        """Return what was saved, in memory of the caller's own; FileNotFoundError if nothing was.

        What is damaged counts as missing: it is encoded again.
        """
        key = self._key(filename)
        if key is not None:
            found = self._set.get_with_metadata(key)
            if found is not None:
                return found[0]
        with open(filename, "rb") as file:
            return load_tensors(file.read(), os.fspath(filename))

    # files

    def read(self, filepath: str | os.PathLike[str], as_byteIO: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002, N803 - SimpleTuner's
        """Return the bytes of a file; those of tensors are as torch.save would write them."""
        key = self._key(filepath)
        found = None if key is None else self._set.get_with_metadata(key)
        if found is not None:
            data = _saved(found[0])
        else:
            with open(filepath, "rb") as file:
                data = file.read()
        return io.BytesIO(data) if as_byteIO else data

    def write(self, filepath: str | os.PathLike[str], data: Any) -> None:  # noqa: ANN401 - bytes, a text, an image, tensors
        """Write a file, whole or not at all; of a .pt below the root, keep the tensors in it."""
        path = os.path.abspath(filepath)
        if isinstance(data, str):
            data = data.encode()
        elif hasattr(data, "tobytes") and not hasattr(data, "detach"):  # of an image, its pixels
            data = data.tobytes()
        if not isinstance(data, (bytes, bytearray, memoryview)):
            self.torch_save(data, path)
        elif self._key(path) is not None:
            self.torch_save(load_tensors(bytes(data), path), path)
        else:
            self._write_file(path, bytes(data))

    def write_batch(
        self, filepaths: Sequence[str | os.PathLike[str]], data_list: Sequence[object]
    ) -> None:  # fmt: skip
        """Write several."""
        if len(filepaths) != len(data_list):
            raise ConfigError(f"There are {len(filepaths)} paths for {len(data_list)} values")
        for path, data in zip(filepaths, data_list, strict=True):
            self.write(path, data)

    def exists(self, filepath: str | os.PathLike[str] | None) -> bool:
        """Say whether there is such a file, a folder or a tensor."""
        if filepath is None:
            return False
        key = self._key(filepath)
        return (key is not None and key in self._set) or os.path.exists(filepath)

    def delete(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a file; FileNotFoundError if there is none."""
        key = self._key(filepath)
        was_kept = key is not None and self._set.delete(key)
        if not _remove(os.fspath(filepath)) and not was_kept:
            raise FileNotFoundError(f"{filepath} not found.")

    def open_file(self, filepath: str | os.PathLike[str], mode: str) -> IO[Any]:
        """Open a file. Tensors are read, and kept when it is closed, as a file of torch.save."""
        if self._key(filepath) is None:
            return open(filepath, mode, encoding=None if "b" in mode else "utf-8")
        if mode in ("rb", "br"):
            data: io.BytesIO = self.read(filepath, as_byteIO=True)
            return data
        if mode in ("wb", "bw"):
            return _Writing(self, os.fspath(filepath))
        hint = 'Open it with "rb" or "wb".'
        raise ConfigError(f"{filepath} holds tensors: it has no mode {mode!r}", hint=hint)

    def list_files(
        self, file_extensions: Sequence[str] | None = None, instance_data_dir: str | None = None
    ) -> Listed:  # fmt: skip
        """Return (folder, [], files) of each folder that has files of some extensions.

        Without extensions, those of images (or of the sounds of an audio dataset).
        """
        if not instance_data_dir:
            raise ConfigError("instance_data_dir must be specified.")
        wanted = list(file_extensions or ()) or _local(self)._default_file_extensions()  # noqa: SLF001
        ends = tuple(f".{each.lower().lstrip('.')}" for each in wanted)
        where = os.path.abspath(instance_data_dir)
        found: dict[str, dict[str, None]] = {}
        if ".pt" in ends:
            inside = "" if where == self.root else os.path.join(where, "")
            for key in sorted(self._set.keys()):
                path = os.path.join(self.root, key)
                if path.startswith(inside):
                    found.setdefault(os.path.dirname(path), {})[path] = None
        if not found or os.path.isdir(where):
            for folder, name in _walked(where):
                if name.endswith(ends):
                    path = os.path.join(folder, name)
                    found.setdefault(folder, {})[path] = None
        return [(folder, [], list(files)) for folder, files in found.items()]

    def get_abs_path(self, sample_path: str | os.PathLike[str] | None = None) -> str:
        """Return the absolute path; of None, the working directory."""
        return os.path.abspath(sample_path or os.getcwd())

    def create_directory(self, directory_path: str | os.PathLike[str]) -> None:
        """Make a folder if it is not there."""
        os.makedirs(directory_path, exist_ok=True)

    def read_image(self, filepath: str, delete_problematic_images: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002
        """Return an image, a video or a sound, as SimpleTuner's local backend reads it."""
        return _local(self).read_image(filepath, delete_problematic_images)

    def read_image_batch(
        self,
        filepaths: list[str],
        delete_problematic_images: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[list[str], list[Any]]:
        """Return which of some files can be read, and what they hold."""
        read: tuple[list[str], list[Any]] = _local(self).read_image_batch(
            filepaths, delete_problematic_images
        )
        return read

    def _key(self, path: str | os.PathLike[str]) -> str | None:
        """Return the key of a tensor file below the root; None: it is a plain file."""
        below = os.path.relpath(os.path.abspath(path), self.root)
        is_below = below.split(os.sep, 1)[0] not in ("..", _OWN)
        return below if is_below and below.endswith(".pt") else None

    def _write_file(self, path: str, data: bytes) -> None:
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        with atomically(Path(path), is_private=False) as file:
            file.write(data)


class _Writing(io.BytesIO):
    """A file that is being written; what is in it counts when it is closed."""

    def __init__(self, backend: DataBackend, path: str) -> None:
        super().__init__()
        self._backend = backend
        self._path = path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._backend.write(self._path, data)

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:  # half a file is none
            super().close()

    def __del__(self) -> None:
        super().close()


def _torch() -> Any:  # noqa: ANN401 - a module
    return import_module("torch")


def _local(backend: DataBackend) -> Any:  # noqa: ANN401 - SimpleTuner has no types
    """Return SimpleTuner's own local backend, which has the loaders of images."""
    made = import_module(_LOCAL).LocalDataBackend(backend.accelerator, backend.id)
    if hasattr(backend, "dataset_type"):
        made.dataset_type = backend.dataset_type
    return made


def _saved(value: object) -> bytes:
    data = io.BytesIO()
    _torch().save(value, data)
    return data.getvalue()


def load_tensors(data: bytes, path: str) -> Any:  # noqa: ANN401 - tensors and plain values
    """Read what torch.save has written, also with gzip around it; no code in it is run."""
    try:
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompress(data, zlib.MAX_WBITS | 16)
        return _torch().load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        hint = "Delete it, and it is encoded again."
        message = f"{path} holds no tensors and plain values that can be read: {error}"
        raise UnsupportedValueError(message.splitlines()[0], hint=hint, path=path) from error


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _walked(folder: str) -> Iterator[tuple[str, str]]:
    """Go through all files below a folder, and below folders that are linked there, each once."""
    folders, seen = [folder], set()
    while folders:
        here = folders.pop()
        real = os.path.realpath(here)
        if real in seen or os.path.basename(here) in _SKIPPED:
            continue
        seen.add(real)
        with os.scandir(here) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.is_dir():
                    is_link = entry.is_symlink()
                    folders.append(os.path.realpath(entry.path) if is_link else entry.path)
                elif entry.is_file():
                    yield here, entry.name
