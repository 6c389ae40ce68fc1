"""Caches that mgds's SmartDiskCache has left: `cache.json` and a `.pt` per item and variation.

They are read where they lie and never changed. An entry counts only if the source still has the
XXH64 it had, the watched files too, and the model type is the same. Files are loaded with
`weights_only=True`: a pickle that would run code is refused, and its item is encoded.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_BUFFER = 1 << 20
_VERSIONS = (2, 3)
_CACHE_FILE = re.compile(r"[0-9a-f]{12}(_[0-9x]+)?")


class OldCache:
    """What is in the `cache.json` of a folder; nothing if there is none, or none of ours."""

    def __init__(self, folder: Path, modeltype: str) -> None:
        self._folder = folder
        self._modeltype = modeltype
        self._entries: dict[str, Any] = {}
        self._paths: dict[str, list[str]] = {}
        try:
            document = json.loads((folder / "cache.json").read_bytes())
            if document["version"] in _VERSIONS:
                self._entries = dict(document["entries"])
                self._paths = dict(document.get("hash_index", {}))
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError, OSError) as error:
            _log.warning("%s is not taken over: %s", folder / "cache.json", error)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def find(  # noqa: PLR0911 - so much may not fit
        self,
        source: bytes,
        watched: Iterable[bytes],
        variation: int,
        wanted: str | None,
        names: Iterable[str],
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the resolution ("_": none) and the values of an item; None: it must be encoded.

        `wanted`: the resolution that is asked for; None: any. Some names may be missing.
        """
        path = os.path.normpath(os.fsdecode(source))
        try:
            digest = xxh64_of(path)
            entry = self._entries.get(path)
            if entry is None or entry["hash"] != digest:  # moved, or one of several copies
                known = (self._entries.get(each) for each in self._paths.get(digest, ()))
                entry = next((each for each in known if each and each["hash"] == digest), None)
            if entry is None or entry["modeltype"] != self._modeltype:
                return None
            sidecars = list((entry.get("sidecar_hashes") or {}).values())
            now = [xxh64_of(os.fsdecode(each)) for each in watched if os.path.isfile(each)]
            if sorted(sidecars) != sorted(now):
                return None
            variants = _variants(entry)
            resolution = next(iter(variants)) if wanted is None else wanted
            name = variants.get(resolution)
            if name is None or _CACHE_FILE.fullmatch(name) is None:
                return None
            values = self._load(f"{name}_{variation + 1}.pt")
        except (OSError, KeyError, TypeError, AttributeError, StopIteration) as error:
            _log.debug("%s is not taken over: %r", path, error)
            return None
        if values is None or values.get("__modeltype", self._modeltype) != self._modeltype:
            return None
        crop = values.get("crop_resolution")
        if resolution != "_" and crop is not None and "x".join(map(str, crop)) != resolution:
            return None
        return resolution, {name: values[name] for name in names if name in values}

    def files(self) -> Iterator[tuple[str, Path]]:
        """Go through the files of the first variation, each with the XXH64 of its source."""
        for entry in self._entries.values():
            with suppress(KeyError, TypeError, AttributeError):
                for name in _variants(entry).values():
                    if _CACHE_FILE.fullmatch(name):
                        yield str(entry["hash"]), self._folder / f"{name}_1.pt"

    def _load(self, name: str) -> Mapping[str, Any] | None:
        """Return what is in a `.pt`; None: it is damaged, or would have to run code."""
        import torch

        path = self._folder / name
        if not path.exists():
            return None
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - torch raises what a damaged zip or pickle makes it
            _log.warning("%s is not taken over: %s", path, str(error).partition("\n")[0])
            return None
        return values if isinstance(values, dict) else None


def _variants(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the beginnings of the file names by resolution, the one in use first."""
    if "variants" in entry:
        return {key: str(each["cache_file"]) for key, each in entry["variants"].items()}
    return {entry.get("resolution") or "_": str(entry["cache_file"])}


def xxh64_of(path: str) -> str:
    """Return the hash by which such a cache knows a source."""
    import xxhash

    state = xxhash.xxh64()
    with open(path, "rb") as file:
        while data := file.read(_BUFFER):
            state.update(data)
    return state.hexdigest()
