"""Prove everything a killed download may have brought, from what is on the disk alone.

In the HF cache a blob is named by its announced hash. In a `local_dir` huggingface_hub writes that
hash beside each file it has finished. What neither says, a remembered listing may.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from smartcache.hub import tree
from smartcache.hub.arrivals import Arrivals
from smartcache.hub.plan import near_store
from smartcache.hub.records import PlannedFile, RemoteFile
from smartcache.hub.targets import CacheTarget, LocalTarget, Target
from smartcache.store.store import Store

_MOST_NOTE = 4096


def prove_all(
    store: Store, target: Target, *, besides: Collection[str] = (), since: float = 0
) -> None:
    """Prove the files at a target, besides those named; wrong bytes are set aside, and raised.

    With `since`, only files that came or were changed after that time.
    """
    min_size = store.settings.link_min_size
    arrivals = Arrivals(store, near_store(store, target.root), target)
    for file, path in _files_at(target):
        is_wanted = file.path not in besides and os.stat(path).st_ctime >= since
        if file.announced and is_wanted:
            planned = PlannedFile(
                file=file, source="present", is_large=file.is_large(min_size),
                is_weight=file.is_weight(min_size),
            )  # fmt: skip
            arrivals.accept(planned, path)


def _files_at(target: Target) -> Iterator[tuple[RemoteFile, Path]]:
    names: Iterator[tuple[str, str]]
    if isinstance(target, CacheTarget):
        listed = _listed(target.folder, target.commit)
        found = tree.pointers(target.folder, target.commit)
        names = ((name, _blob_name(path)) for name, path in found)
    else:
        listed = {}
        for listing in (target.memory / "trees").glob("*.json"):
            listed |= _listed(target.memory, listing.stem)
        names = _noted(target)
    for name, etag in names:
        file = RemoteFile(path=name, size=None, etag=etag or listed.get(name, ""))
        path = target.found(file) if tree.safe_parts(name) else None
        if path is not None:
            yield RemoteFile(path=name, size=os.stat(path).st_size, etag=file.etag), path


def _blob_name(pointer: Path) -> str:
    blob = tree.blob_behind(pointer)
    return "" if blob is None else blob.name


def _listed(folder: Path, commit: str) -> dict[str, str]:
    return {file.path: file.etag for file in tree.read_listing(folder, commit) or ()}


def _noted(target: LocalTarget) -> Iterator[tuple[str, str]]:
    """Go through the files of a `local_dir`, with the hash that huggingface_hub noted for each."""
    for directory, below, names in os.walk(target.root):
        if Path(directory) == target.root and ".cache" in below:
            below.remove(".cache")
        for name in names:
            path = Path(directory, name).relative_to(target.root)
            note = target.unfinished() / path.parent / f"{path.name}.metadata"
            try:
                with open(note, "rb") as file:
                    lines = file.read(_MOST_NOTE).decode("ascii", "replace").splitlines()
            except OSError:
                lines = []
            yield path.as_posix(), lines[1].strip() if len(lines) > 1 else ""
