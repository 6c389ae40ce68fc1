"""The HF cache on disk: where its repos, blobs, snapshots, refs and tree listings are.

    <cache>/models--org--name/
      blobs/<etag>                a file; or a symlink into <cache>/blobs (Xet, from 2.4 on)
      snapshots/<commit>/<path>   symlinks into blobs/ (files where there are no symlinks)
      refs/<branch or tag>        a text file with a commit
      trees/<commit>.json         what the Hub listed: path -> size, blob_id, lfs_sha256, xet_hash

Nothing here writes. Names are not believed: what leads outside its folder does not exist.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from smartcache.hub.records import RemoteFile, Repo, xet_of

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HALF_MADE = re.compile(r".+\.[0-9a-f]{8}\.(incomplete|tmp)|tmp[a-z0-9_]{8}\.tmp")
_MOST_PATH, _MOST_NAME = 1000, 255
_TREE_FORMAT = 1
_MOST_TREE = 1 << 29
"""Bytes of a tree listing that are read: a million files are some 200 MB."""


def default_cache_dir() -> Path:
    """Return the HF cache that huggingface_hub uses in this process."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def is_commit(text: str) -> bool:
    """Say whether a revision is a commit, which never changes."""
    return _COMMIT.fullmatch(text) is not None


def is_half_made(name: str) -> bool:
    """Say whether a file bears a name that huggingface_hub gives only while it writes the file."""
    return _HALF_MADE.fullmatch(name) is not None


def safe_parts(path: str) -> tuple[str, ...] | None:
    """Return the parts of a path in a repo; None if it is no plain relative path anywhere.

    Nor if it is longer or deeper than a disk can have it.
    """
    parts = tuple(path.split("/"))
    is_plain = (
        _is_text(path)
        and len(path) <= _MOST_PATH
        and all(
            part not in ("", ".", "..") and len(os.fsencode(part)) <= _MOST_NAME for part in parts
        )
    )
    if not is_plain or "\\" in path or "\0" in path or re.match(r"[A-Za-z]:", path):
        return None
    return parts


def _is_text(path: str) -> bool:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def repos_in(cache_dir: Path) -> Iterator[tuple[Repo, Path]]:
    """Go through the repo folders of an HF cache, by name."""
    try:
        with os.scandir(cache_dir) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        repo = Repo.of_folder(name)
        if repo is not None:
            yield repo, cache_dir / name


def refs_of(folder: Path) -> dict[str, str]:
    """Return the branches and tags of a repo folder and their commits."""
    root = folder / "refs"
    found: dict[str, str] = {}
    for directory, _, names in os.walk(root):
        for name in sorted(names):
            path = Path(directory, name)
            commit = read_ref(path)
            if commit is not None and not is_half_made(name):
                found[path.relative_to(root).as_posix()] = commit
    return found


def read_ref(path: Path) -> str | None:
    """Return the commit in a ref file, None if there is none."""
    try:
        with _open_file(path) as file:
            text = file.read(64).decode("ascii", "replace").strip()
    except OSError:
        return None
    return text if is_commit(text) else None


def _open_file(path: Path) -> BinaryIO:
    """Open a file for reading; OSError if it is not a regular one: a FIFO would be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    return os.fdopen(descriptor, "rb")


def commits_of(folder: Path) -> list[str]:
    """Return the commits that have a snapshot in a repo folder."""
    try:
        return sorted(name for name in os.listdir(folder / "snapshots") if is_commit(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_listing(folder: Path, commit: str) -> list[RemoteFile] | None:
    """Return what the Hub listed for a commit, remembered in `trees/`; None if it was not.

    A listing that cannot be read, is of another format or has an unsafe name counts as none.
    """
    try:
        with _open_file(folder / "trees" / f"{commit}.json") as file:
            # No more than there is: `read` makes room for all it is asked for.
            size = min(os.fstat(file.fileno()).st_size, _MOST_TREE)
            document = json.loads(file.read(size))
        if document["format_version"] != _TREE_FORMAT:
            return None
        return [_listed(path, entry) for path, entry in document["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _listed(path: str, entry: dict[str, object]) -> RemoteFile:
    sha256, size = entry.get("lfs_sha256"), entry["size"]
    if safe_parts(path) is None or not isinstance(size, int) or not 0 <= size < 1 << 62:
        raise ValueError(path)
    return RemoteFile(
        path=path, size=size, etag=str(sha256 or entry["blob_id"]),
        xet=xet_of(entry.get("xet_hash")),
    )  # fmt: skip


def pointer(folder: Path, commit: str, path: str) -> Path:
    """Return where the snapshot of a commit has a file; ValueError for an unsafe path."""
    parts = safe_parts(path)
    if parts is None or not is_commit(commit):
        raise ValueError(path)
    return folder.joinpath("snapshots", commit, *parts)


def pointers(folder: Path, commit: str) -> Iterator[tuple[str, Path]]:
    """Go through the files of a snapshot: path in the repo, and where it is."""
    root = folder / "snapshots" / commit
    for directory, below, names in os.walk(root):
        below.sort()
        for name in sorted(names):
            path = Path(directory, name)
            yield path.relative_to(root).as_posix(), path


def blob_behind(path: Path) -> Path | None:
    """Return the entry of `blobs/` a snapshot's symlink points at; None if it is no symlink."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return Path(os.path.normpath(os.path.join(path.parent, target)))
