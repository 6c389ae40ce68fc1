"""What programs call the files in their folders.

The cache of Hugging Face and that of Ollama keep files under their hashes; snapshots and manifests
know the names. They are read when the first file of a repository is asked for, once per run, and
never leave the folder: links that point elsewhere are ignored, damaged manifests name nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from smartcache.folders.discover import read_small
from smartcache.folders.programs import ModelFolder
from smartcache.report.titles import one_line

_REPO: Final = re.compile(r"(models|datasets|spaces)--(.+)", re.DOTALL)
_BLOB: Final = re.compile(r"sha256[-:]([0-9a-f]{64})")
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA: Final = "registry.ollama.ai"
_LIBRARY: Final = "library"
_MOST_MANIFEST: Final = 1 << 20
_MOST_ENTRIES: Final = 200_000
"""Entries looked at in one repository, or in one folder of manifests."""
_PARTS_BELOW_LM_STUDIO: Final = 3
_SNAPSHOT_DEPTH: Final = 2
_MANIFEST_DEPTH: Final = 4


class Namer:
    """Gives files the names that people know, and remembers what it read for that."""

    def __init__(self) -> None:
        self._repos: dict[str, dict[str, str]] = {}
        self._shared: dict[str, dict[str, tuple[str, str]]] = {}
        self._manifests: dict[str, dict[str, list[str]]] = {}

    def name(self, path: Path, folder: ModelFolder) -> str:
        """Return what the file is called; "" if nothing better than its path is known.

        "org/model · unet/x.safetensors", "llama3:8b", "publisher/model file.gguf".
        """
        if found := self._in_hub(path, folder):
            repo, file = found
            return one_line(f"{_repo_id(repo)} · {file}" if file else _repo_id(repo))
        if tags := self._tags(path, folder):
            return one_line(f"{tags[0]} +{len(tags) - 1}" if len(tags) > 1 else tags[0])
        if folder.program == "LM Studio":
            parts = _below(path, folder)
            if len(parts) >= _PARTS_BELOW_LM_STUDIO:
                return one_line(f"{parts[0]}/{parts[1]} {'/'.join(parts[2:])}")
        return ""

    def repo_of(self, path: Path, folder: ModelFolder) -> str:
        """Return the repository ("org/name", "datasets/org/name") or the Ollama model of a file.

        "" if it belongs to none.
        """
        if found := self._in_hub(path, folder):
            return one_line(_repo_id(found[0]))
        tags = self._tags(path, folder)
        return one_line(tags[0]) if tags else ""

    def _in_hub(self, path: Path, folder: ModelFolder) -> tuple[str, str] | None:
        """Return the directory name of the repository and the file's name in it ("" if unknown)."""
        root, parts = _from(path, folder)
        for at, part in enumerate(parts[:-1]):
            if _REPO.fullmatch(part):
                repo = os.path.join(root, *parts[: at + 1])
                return part, self._in_repo(repo, parts[at + 1 :])
        if parts[1:][-3:-2] == ["blobs"]:
            # Payloads that repositories of one cache share: blobs/<xx>/<hash>.
            cache = os.path.join(root, *parts[:-3])
            if cache not in self._shared:
                self._shared[cache] = _shared_blobs(cache)
            if (found := self._shared[cache].get("/".join(parts[-2:]))) is not None:
                repo, blob = found
                return repo, self._in_repo(os.path.join(cache, repo), ["blobs", blob])
        return None

    def _in_repo(self, repo: str, parts: list[str]) -> str:
        if parts[0] == "snapshots":
            return "/".join(parts[2:])
        if parts[0] != "blobs":
            return "/".join(parts)
        if repo not in self._repos:
            self._repos[repo] = _snapshot_names(repo)
        return self._repos[repo].get("/".join(parts[1:]), "")

    def _tags(self, path: Path, folder: ModelFolder) -> list[str]:
        """Return the Ollama models that a blob is a part of, the best known first."""
        root, parts = _from(path, folder)
        blob = _BLOB.fullmatch(path.name)
        if blob is None or parts[1:][-2:-1] != ["blobs"]:
            return []
        models = os.path.join(root, *parts[:-2])
        if models not in self._manifests:
            self._manifests[models] = _manifest_names(models)
        return self._manifests[models].get(blob[1], [])


def _below(path: Path, folder: ModelFolder) -> list[str]:
    return list(path.relative_to(folder.path).parts) if path.is_relative_to(folder.path) else []


def _from(path: Path, folder: ModelFolder) -> tuple[str, list[str]]:
    """Return a directory and the path from it; the folder's own name counts, for it may say all."""
    parts = _below(path, folder)
    return str(folder.path.parent), [folder.path.name, *parts] if parts else []


def _repo_id(directory: str) -> str:
    found = _REPO.fullmatch(directory)
    if found is None:
        return directory
    kind, name = found[1], found[2].replace("--", "/")
    return name if kind == "models" else f"{kind}/{name}"


def _snapshot_names(repo: str) -> dict[str, str]:
    """Return the name of each blob of a repository, from the symlinks in its snapshots."""
    names: dict[str, str] = {}
    blobs = os.path.join(repo, "blobs")
    for parts, entry in _walk(os.path.join(repo, "snapshots")):
        if len(parts) < _SNAPSHOT_DEPTH or not entry.is_symlink():
            continue
        if target := _target(entry.path, blobs):
            names.setdefault(target, "/".join(parts[1:]))
    return names


def _shared_blobs(cache: str) -> dict[str, tuple[str, str]]:
    """Return the repository and the blob that stand for each payload in `<cache>/blobs`."""
    found: dict[str, tuple[str, str]] = {}
    shared = os.path.join(cache, "blobs")
    for repo in _entries(cache):
        if not _REPO.fullmatch(repo.name) or not repo.is_dir(follow_symlinks=False):
            continue
        for blob in _entries(os.path.join(repo.path, "blobs")):
            if blob.is_symlink() and (target := _target(blob.path, shared)):
                found.setdefault(target, (repo.name, blob.name))
    return found


def _manifest_names(models: str) -> dict[str, list[str]]:
    """Return the models that each digest is a layer of: host/namespace/model/tag are the names."""
    names: dict[str, list[str]] = {}
    for parts, entry in _walk(os.path.join(models, "manifests")):
        if len(parts) == _MANIFEST_DEPTH and entry.is_file(follow_symlinks=False):
            for digest in _layers(Path(entry.path)):
                names.setdefault(digest, []).append(_shown(parts))
    return {digest: sorted(found, key=_distance) for digest, found in names.items()}


def _shown(parts: list[str]) -> str:
    """Return a model as Ollama shows it: what is the default is left out."""
    host, namespace, model, tag = parts
    if host != _OLLAMA:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _LIBRARY else f"{namespace}/{model}:{tag}"


def _distance(shown: str) -> tuple[int, str]:
    """Order models: Ollama's own library, its users, other hosts."""
    return shown.count("/"), shown


def _layers(manifest: Path) -> set[str]:
    try:
        value = json.loads(read_small(manifest, _MOST_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return set()
    if not isinstance(value, dict):
        return set()
    layers = value.get("layers")
    parts = [*layers, value.get("config")] if isinstance(layers, list) else [value.get("config")]
    digests = [part.get("digest") for part in parts if isinstance(part, dict)]
    found = (_DIGEST.fullmatch(digest) for digest in digests if isinstance(digest, str))
    return {each[1] for each in found if each is not None}


def _target(link: str, directory: str) -> str:
    """Return where a symlink leads inside a directory, seen from it; "" if it leads elsewhere."""
    try:
        target = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    except OSError:
        return ""
    inside = os.path.join(directory, "")
    return target[len(inside) :].replace(os.sep, "/") if target.startswith(inside) else ""


def _walk(top: str) -> Iterator[tuple[list[str], os.DirEntry[str]]]:
    """Go through what is no directory below `top`, in the order of the names, into no symlink."""
    waiting: list[tuple[str, list[str]]] = [(top, [])]
    left = _MOST_ENTRIES
    while waiting and left > 0:
        directory, parts = waiting.pop()
        below = []
        for entry in _entries(directory):
            left -= 1
            if entry.is_dir(follow_symlinks=False):
                below.append((entry.path, [*parts, entry.name]))
            else:
                yield [*parts, entry.name], entry
        waiting += reversed(below)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
