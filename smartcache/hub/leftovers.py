"""What a download has left that did not come to its end: files are proven, half-made ones go.

What was to be brought, and with which hash, its note says. Of what huggingface_hub has brought by
itself the names of blobs tell, and in a `local_dir` what it has written about each file. Its
half-made files have names that it never uses again; they go when surely no process writes them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from smartcache.hub import tree
from smartcache.hub.arrivals import Arrivals
from smartcache.hub.plan import near_store
from smartcache.hub.records import PlannedFile, RemoteFile
from smartcache.hub.targets import CacheTarget, LocalTarget, Target
from smartcache.hub.unfinished import Note
from smartcache.store import Store
from smartcache.system import take_lease

_YOUNG = 60.0
"""Seconds for which what is written in one go, without a lock, may still be somebody's."""
PARTIAL = ".incomplete"
_log = logging.getLogger(__name__)


def prove_noted(
    store: Store, target: Target, notes: Iterable[Note], *, besides: Collection[str] = ()
) -> None:
    """Prove what unfinished downloads have brought; wrong bytes are set aside, and raised."""
    for note in notes:
        for name, etag in note.brought(target).items():
            if name not in besides:
                prove_file(store, target, name, etag)


class Look(NamedTuple):
    """Which file there is. An inode number alone says little: that of a removed file comes back."""

    inode: int
    mtime_ns: int
    size: int


def looks_at(target: Target) -> dict[str, Look]:
    """Return which files there are: all blobs of the repo, or the known files of a `local_dir`."""
    if isinstance(target, CacheTarget):
        folder = os.path.join(target.folder, "blobs")
        names = [name for name in _names(folder) if not name.endswith(".incomplete")]
    else:
        folder, names = os.fspath(target.root), list(_noted_names(target))
    found: dict[str, Look] = {}
    for name in names:
        with suppress(OSError):
            st = os.stat(os.path.join(folder, name))
            found[name] = Look(st.st_ino, st.st_mtime_ns, st.st_size)
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def prove_new(
    store: Store, target: Target, before: dict[str, Look], *, only: str | None = None
) -> None:
    """Prove the files that are not as they were before: a download always makes new ones."""
    now = looks_at(target)
    for name, etag in _files_at(target, only):
        key = etag if isinstance(target, CacheTarget) else name
        if key in now and now[key] != before.get(key):
            prove_file(store, target, name, etag)


def prove_file(store: Store, target: Target, name: str, etag: str) -> None:
    """Prove a file by the hash it must have; wrong bytes are set aside, and raised."""
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


def _files_at(target: Target, only: str | None) -> Iterator[tuple[str, str]]:
    """Go through the files at a target and the hashes they must have, as far as that is known."""
    if isinstance(target, CacheTarget):
        pointers = tree.pointers(target.folder, target.commit)
        if only is not None:
            pointers = iter([(only, tree.pointer(target.folder, target.commit, only))])
        for name, pointer in pointers:
            blob = tree.blob_behind(pointer)
            if blob is not None:
                yield name, blob.name
        return
    for name in _noted_names(target) if only is None else (only,):
        etag = target.noted_etag(RemoteFile(path=name, size=None, etag=""))
        if etag:
            yield name, etag


def _noted_names(target: LocalTarget) -> Iterator[str]:
    for directory, _, names in os.walk(target.notes):
        for note in names:
            if note.endswith(".metadata"):
                path = Path(directory, note.removesuffix(".metadata"))
                yield path.relative_to(target.notes).as_posix()


def clear_repo(folder: Path) -> None:
    """Remove what killed clients have left half-made in a repo folder of an HF cache."""
    for name in _names(os.path.join(folder, "blobs")):
        if tree.is_half_made(name) and name.endswith(PARTIAL):
            with suppress(OSError):
                remove_partial(folder / "blobs" / name)
    _clear_old(folder / "refs")
    _clear_old(folder / "trees")


def is_dead(partial: Path) -> bool:
    """Say whether surely nobody is at work on an unfinished download in `blobs/` of a repo."""
    with _held(partial) as is_held:
        return is_held


def remove_partial(partial: Path) -> bool:
    """Remove an unfinished download; False: it stays, because somebody may be at work on it."""
    with _held(partial) as is_held:
        if is_held:
            os.unlink(partial)
            _log.info("%s of a killed download is removed", partial)
        return is_held


@contextmanager
def _held(partial: Path) -> Iterator[bool]:
    """Keep everybody from an unfinished download inside the block; False: somebody is at it."""
    blobs = partial.parent
    name = partial.name.removesuffix(PARTIAL)
    etag = name.rpartition(".")[0] if tree.is_half_made(partial.name) else name
    lock = blobs.parent.parent / ".locks" / blobs.parent.name / f"{etag}.lock"
    with ExitStack() as stack:
        is_free = False
        with suppress(Timeout, NotImplementedError, OSError):
            if lock.exists():  # whoever writes holds it
                stack.enter_context(FileLock(lock, timeout=0, mode=0o664))
            descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            stack.callback(os.close, descriptor)
            is_free = _is_unwritten(descriptor)
        yield is_free


def clear_local_dir(target: LocalTarget) -> None:
    """Remove what killed clients have left half-made in a `local_dir`."""
    _clear_old(target.notes)
    _clear_old(target.memory / "trees")


def _clear_old(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in filter(tree.is_half_made, names):
            path = Path(directory, name)
            with suppress(OSError):
                if time.time() - os.lstat(path).st_mtime > _YOUNG:
                    _remove_dead(path)


def _remove_dead(path: Path) -> None:
    """Remove a file unless some process has it open for writing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _is_unwritten(descriptor):
            os.unlink(path)
            _log.info("%s of a killed download is removed", path)
    finally:
        os.close(descriptor)


def _is_unwritten(descriptor: int) -> bool:
    """Say whether nobody has a file open for writing; where that cannot be asked, its age tells."""
    lease = take_lease(descriptor)
    return lease == "held" or (
        lease == "unsupported" and time.time() - os.fstat(descriptor).st_mtime > _YOUNG
    )
