"""Prove files that a download has brought which did not come to its end.

What was to be brought, and with which hash, its note says. Of what huggingface_hub has brought by
itself the names of blobs tell, and in a `local_dir` what it has written about each file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from smartcache.hub import tree
from smartcache.hub.arrivals import Arrivals
from smartcache.hub.plan import near_store
from smartcache.hub.records import PlannedFile, RemoteFile
from smartcache.hub.targets import CacheTarget, LocalTarget, Target
from smartcache.store.store import Store


def prove_noted(
    store: Store,
    target: Target,
    notes: Mapping[str, Mapping[str, str]],
    *,
    besides: Collection[str] = (),
) -> None:
    """Prove what killed downloads were to bring; wrong bytes are set aside, and raised."""
    for files in notes.values():
        for name, etag in files.items():
            if name not in besides and tree.safe_parts(name) is not None:
                _prove(store, target, name, etag)


def prove_since(store: Store, target: Target, since: float, *, only: str | None = None) -> None:
    """Prove the files that came or were changed after a time; or one of them."""
    for name, etag in _files_at(target):
        if only not in (None, name):
            continue
        found = target.found(RemoteFile(path=name, size=None, etag=etag))
        if found is not None and os.stat(found).st_ctime >= since:
            _prove(store, target, name, etag)


def _prove(store: Store, target: Target, name: str, etag: str) -> None:
    file = RemoteFile(path=name, size=None, etag=etag)
    if isinstance(target, LocalTarget):
        # Another download may have brought another version since.
        file = RemoteFile(path=name, size=None, etag=target.noted_etag(file) or etag)
    path = target.found(file)
    if path is None or not file.announced:
        return
    file = RemoteFile(path=name, size=os.stat(path).st_size, etag=file.etag)
    min_size = store.settings.link_min_size
    planned = PlannedFile(
        file=file, source="present", is_large=file.is_large(min_size),
        is_weight=file.is_weight(min_size),
    )  # fmt: skip
    Arrivals(store, near_store(store, target.root), target).accept(planned, path)


def _files_at(target: Target) -> Iterator[tuple[str, str]]:
    """Go through the files at a target and the hashes they must have, as far as that is known."""
    if isinstance(target, CacheTarget):
        for name, pointer in tree.pointers(target.folder, target.commit):
            blob = tree.blob_behind(pointer)
            if blob is not None:
                yield name, blob.name
        return
    for directory, _, names in os.walk(target.unfinished()):
        for note in names:
            if note.endswith(".metadata"):
                path = Path(directory, note.removesuffix(".metadata"))
                name = path.relative_to(target.unfinished()).as_posix()
                etag = target.noted_etag(RemoteFile(path=name, size=None, etag=""))
                if etag:
                    yield name, etag
