"""Which files of this machine may have the bytes that are wanted.

HF caches are asked by name, which costs no reading and is always up to date: a blob there is named
by its announced hash, one of huggingface_hub's shared store by its xet hash. Everything else is
asked by size, among the files that scans and walks have seen in known folders, and in folders that
are named for this one download. A file whose remembered hash is
another is no candidate any more, so a wrong guess costs one hash, once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from smartcache.hub import sharedstore, tree
from smartcache.hub.records import Candidate, RemoteFile, Repo
from smartcache.store import INCOMPLETE_SUFFIXES, Store

HUGGING_FACE = "Hugging Face"
"""The program whose known folders are HF caches."""
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MOST_UNKNOWN = 16
"""So many files of one size are hashed for one wanted file. People have hundreds of fine-tuned
weights of one size; to hash them all would take longer than a download."""


def known_caches(store: Store | None) -> list[Path]:
    """Return the HF caches that are there: the default one, and those that scans have found."""
    folders = [] if store is None else store.folders()
    known = [each.path for each in folders if each.program == HUGGING_FACE]
    return [each for each in (tree.default_cache_dir(), *known) if each.is_dir()]


class Sources:
    """The places to look in, for one download into directories of one filesystem."""

    def __init__(
        self, store: Store | None, cache_dir: Path, destination: Path, *, also: Iterable[Path] = ()
    ) -> None:
        self._store = store
        self._also = tuple(also)
        self._device = _device(destination)
        folders = [] if store is None else store.folders()
        known = [each.path for each in folders if each.program == HUGGING_FACE]
        self._caches = list(dict.fromkeys(map(_real, (cache_dir, *known))))
        self._given = {_real(each.path) for each in folders if each.is_given}
        self._inside = "\0" if store is None else os.path.join(os.path.realpath(store.root), "")

    def candidates(
        self, file: RemoteFile, *, by_size: bool = True
    ) -> tuple[tuple[Candidate, ...], int]:
        """Return the files that may have the bytes, likeliest first; and how many were left out.

        Those left out are more files of that size than are worth hashing.
        """
        paths = list(dict.fromkeys(self._likely(file, by_size=by_size)))
        known = {} if self._store is None else self._store.known_hashes(paths)
        found: list[Candidate] = []
        unknown: list[Candidate] = []
        seen: set[tuple[int, int]] = set()
        ((algorithm, wanted),) = file.announced.items()
        for path in paths:
            st = self._usable(path, file)
            if st is None or (st.st_dev, st.st_ino) in seen:
                continue
            seen.add((st.st_dev, st.st_ino))
            value = known.get(path, {}).get(algorithm)
            if value not in (None, wanted) or (value is None and _is_named_otherwise(path, file)):
                continue
            each = Candidate(
                path=path, is_known=value == wanted, may_link=self._is_ours(path),
                is_far=st.st_dev != self._device,
            )  # fmt: skip
            (found if each.is_known else unknown).append(each)
        found.sort(key=lambda each: (each.is_far, not each.may_link))
        unknown.sort(key=lambda each: each.is_far)
        return (*found, *unknown[:MOST_UNKNOWN]), max(0, len(unknown) - MOST_UNKNOWN)

    def _likely(self, file: RemoteFile, *, by_size: bool) -> Iterator[Path]:
        """Go through the files to look at: by name, then by size, those of the same name first."""
        yield from (_real(Path(each, file.etag)) for each in self._named.get(file.etag, ()))
        if file.xet is not None and file.size is not None:
            shared = sharedstore.find(self._caches, file.xet, file.size)
            if shared is not None:
                yield _real(shared)
        if file.size and by_size:
            name = os.path.basename(file.path)
            sightings = [] if self._store is None else self._store.sightings(file.size)
            for seen in (self._named_folders.get(file.size, ()), (each.path for each in sightings)):
                yield from sorted(map(_real, seen), key=lambda path: path.name != name)

    def _usable(self, path: Path, file: RemoteFile) -> os.stat_result | None:
        try:
            st = os.stat(path)
        except OSError:
            return None
        is_whole = not path.name.endswith(INCOMPLETE_SUFFIXES) and os.path.isfile(path)
        is_outside = not str(path).startswith(self._inside)
        return st if is_whole and is_outside and st.st_size == file.size else None

    def _is_ours(self, path: Path) -> bool:
        """Say whether a file was given to smartcache, or is huggingface_hub's own in an HF cache.

        What else lies below the folder of an HF cache may be anybody's.
        """
        if any(parent in self._given for parent in path.parents):
            return True
        return any(_is_of_cache(path, cache) for cache in self._caches if cache in path.parents)

    @cached_property
    def _named_folders(self) -> dict[int, list[Path]]:
        """The files of the folders that were named for this download, by size."""
        found: dict[int, list[Path]] = {}
        for folder in self._also:
            for directory, _, names in os.walk(folder):
                for name in names:
                    path = os.path.join(directory, name)
                    with suppress(OSError):
                        found.setdefault(os.stat(path).st_size, []).append(Path(path))
        return found

    @cached_property
    def _named(self) -> dict[str, list[str]]:
        """The blobs of all HF caches: in which directories there is one of a name."""
        found: dict[str, list[str]] = {}
        for cache in self._caches:
            for _, folder in tree.repos_in(cache):
                directory = os.path.join(folder, "blobs")
                for name in _names(directory):
                    found.setdefault(name, []).append(directory)
        return found


def _is_of_cache(path: Path, cache: Path) -> bool:
    first, *rest = path.relative_to(cache).parts
    if not rest:  # as transformers kept them before there were repo folders
        return os.path.isfile(f"{path}.json")
    is_shared = first == "blobs" and sharedstore.is_usable(cache)
    return is_shared or Repo.of_folder(first) is not None


def _is_named_otherwise(path: Path, file: RemoteFile) -> bool:
    """Say whether a blob's name tells of other bytes: of an HF cache, or Ollama's.

    A name proves nothing, but where it speaks against a file, hashing that would be a waste.
    """
    name = path.name.removeprefix("sha256-")
    is_hash = _HASH.fullmatch(name) is not None and path.parent.name == "blobs"
    if _HASH.fullmatch(name) is not None and path.parent.parent.name == "blobs":
        return file.xet is not None and name != file.xet  # huggingface_hub's shared store
    return is_hash and name != file.etag


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _device(path: Path) -> int:
    while True:
        try:
            return os.stat(path).st_dev
        except FileNotFoundError:
            path = path.parent
