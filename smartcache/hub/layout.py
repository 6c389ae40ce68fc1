"""The HF cache on disk: where repos, blobs, snapshots, refs and listings are, and what is there.

    <cache>/models--org--name/
      blobs/<etag>                a file; or a symlink into <cache>/blobs (Xet, from 2.4 on)
      snapshots/<commit>/<path>   symlinks into blobs/ (files where there are no symlinks)
      refs/<branch or tag>        a text file with a commit
      trees/<commit>.json         what the Hub listed: path -> size, blob_id, lfs_sha256, xet_hash
    <cache>/blobs/                huggingface_hub's shared blob store (from 2.4 on)
      .huggingface-shared-blobs   the marker: "1" and a newline, nothing else
      <xx>/<xet hash>             an entry: a regular file
      <xx>/<xet hash>.refs        the repo blobs that are symlinks to it

Names are not believed: what leads outside its folder does not exist, and a shared store without
that marker is somebody else's. A repo is seen by one walk and one stat per name; nothing is
hashed. What is odd (a pointer to nothing, junk, a folder that cannot be read) is kept as it is and
counted, never an error: a damaged repo takes room too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from smartcache.errors import RepoNotCachedError
from smartcache.hub.records import RemoteFile, Repo, xet_of
from smartcache.system.hashing import is_digest
from smartcache.system.kernel import allocated_bytes
from smartcache.system.ownfiles import atomically

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


def repos_in(cache_dir: Path, *, follow: bool = False) -> Iterator[tuple[Repo, Path]]:
    """Go through the repo folders of an HF cache, by name; with `follow`, symlinks to some too."""
    try:
        with os.scandir(cache_dir) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=follow))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        repo = Repo.of_folder(name)
        if repo is not None:
            yield repo, cache_dir / name


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


def write_ref(folder: Path, revision: str, commit: str) -> None:
    """Let a branch or tag stand for a commit, as huggingface_hub writes it: at once, or not."""
    path = folder.joinpath("refs", *(safe_parts(revision) or (commit,)))
    if revision == commit or read_ref(path) == commit:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomically(path, is_private=False, room=folder) as file:
        file.write(commit.encode("ascii"))


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


# what is in it


Key = tuple[int, int]
"""Device and inode."""

_MOST_REF = 200
"""Bytes of a ref that are read: a commit has 40."""
_SHORTEST_COMMIT = 4


@dataclass(frozen=True, slots=True)
class Body:
    """What a name on the disk stands for: an inode, its bytes and how many names it has."""

    key: Key
    size: int
    allocated: int
    links: int
    accessed: float
    modified: float
    mode: int

    @classmethod
    def of(cls, st: os.stat_result) -> Body:
        """Return the body a stat result is about."""
        return cls(
            (st.st_dev, st.st_ino), st.st_size, allocated_bytes(st), st.st_nlink,
            st.st_atime, st.st_mtime, st.st_mode,
        )  # fmt: skip

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file of a snapshot: a symlink to a blob, or (where there are no symlinks) a file."""

    path: str
    """In the repo, parts joined by "/"."""
    name: str
    """Where it is on the disk."""
    blob: str
    """The name it leads to, in one step; its own name if it is a file."""
    body: Body | None
    """What it stands for in the end; None: it leads nowhere, or where nobody may look."""

    @property
    def is_dangling(self) -> bool:
        """Whether there is surely nothing behind it, as of now."""
        return self.body is None and leads_nowhere(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A snapshot of a repo. `refs` are the branches and tags that name it."""

    commit: str
    folder: Path
    pointers: tuple[Pointer, ...]
    refs: tuple[str, ...]
    made: float

    @property
    def bodies(self) -> dict[str, Body]:
        """What its files stand for, by blob."""
        return {each.blob: each.body for each in self.pointers if each.body is not None}

    @property
    def size(self) -> int:
        """Its bytes as `hf cache ls` counts them: each blob once."""
        return sum(body.size for body in self.bodies.values())

    @property
    def modified_at(self) -> datetime:
        """When the newest of its files was written."""
        return _when(max((body.modified for body in self.bodies.values()), default=self.made))

    @property
    def accessed_at(self) -> datetime:
        """When one of its files was last read, as far as the filesystem keeps that."""
        return _when(max((body.accessed for body in self.bodies.values()), default=self.made))


@dataclass(slots=True, kw_only=True)
class CachedRepo:
    """A repo folder of an HF cache, as one walk saw it."""

    repo: Repo
    cache_dir: Path
    folder: Path
    is_symlink: bool
    """The folder is a symlink: what is behind it belongs to somebody else."""
    stat: Body
    names: dict[str, Body] = field(default_factory=dict)
    """Every name in it that is no directory; of a symlink its own body, not what is behind."""
    targets: dict[str, str] = field(default_factory=dict)
    """Where each symlink leads, in one step."""
    folders: dict[str, Body] = field(default_factory=dict)
    """Every directory in it."""
    refs: dict[str, str] = field(default_factory=dict)
    """Branches and tags: the text in each, a commit if all is well."""
    revisions: list[Revision] = field(default_factory=list)
    unread: list[tuple[str, OSError]] = field(default_factory=list)
    """Directories and refs that could not be read."""

    @property
    def bodies(self) -> dict[str, Body]:
        """What the files of all revisions stand for, by blob."""
        return {blob: body for revision in self.revisions for blob, body in revision.bodies.items()}

    @property
    def size(self) -> int:
        """Its bytes as `hf cache ls` counts them: each blob of each revision once."""
        return sum(body.size for body in self.bodies.values())

    @property
    def modified_at(self) -> datetime:
        """When the newest of its files was written."""
        found = (body.modified for body in self.bodies.values())
        return _when(max(found, default=self.stat.modified))

    @property
    def accessed_at(self) -> datetime:
        """When one of its files was last read, as far as the filesystem keeps that."""
        found = (body.accessed for body in self.bodies.values())
        return _when(max(found, default=self.stat.accessed))

    @property
    def incomplete(self) -> list[str]:
        """Downloads that were not finished."""
        return [name for name in self.blob_names if name.endswith(".incomplete")]

    @property
    def blob_names(self) -> list[str]:
        """What lies in `blobs/`."""
        inside = os.path.join(self.folder, "blobs", "")
        return [name for name in self.names if name.startswith(inside)]

    def commit_of(self, revision: str) -> str:
        """Return the commit meant by a branch, a tag, a commit or the beginning of one.

        RepoNotCachedError if there is none, or several begin like that.
        """
        known = {each.commit for each in self.revisions}
        known.update(filter(is_commit, self.refs.values()))
        return commit_meant(self.repo, revision, known, self.refs)

    def body_behind(self, name: str) -> Body | None:
        """Return what a name stands for in the end, None if there is nothing."""
        body = self.names.get(name)
        if body is not None and not stat.S_ISLNK(body.mode):
            return body
        behind = self.names.get(self.targets.get(name, ""))
        if behind is not None and not stat.S_ISLNK(behind.mode):
            return behind
        try:
            return Body.of(os.stat(name))
        except (OSError, ValueError):
            return None


def scan_caches(cache_dirs: Iterable[Path]) -> list[CachedRepo]:
    """Return the repos of HF caches, those of each cache by name; each cache once."""
    found: list[CachedRepo] = []
    seen: set[str] = set()
    for each in cache_dirs:
        cache_dir = os.path.realpath(each)
        if cache_dir not in seen:
            seen.add(cache_dir)
            folders = repos_in(Path(cache_dir), follow=True)
            found += [scan_repo(repo, folder) for repo, folder in folders]
    return found


def scan_repo(repo: Repo, folder: Path) -> CachedRepo:
    """Look at one repo folder."""
    found = CachedRepo(
        repo=repo, cache_dir=folder.parent, folder=folder, is_symlink=folder.is_symlink(),
        stat=Body.of(os.stat(folder)),
    )  # fmt: skip
    waiting = [str(folder)]
    while waiting:
        waiting += _look_into(waiting.pop(), found)
    _read_refs(found)
    _sort_pointers(found)
    return found


def _look_into(directory: str, found: CachedRepo) -> list[str]:
    """Note what is in a directory; return the directories in it."""
    below: list[str] = []
    try:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                body = Body.of(entry.stat(follow_symlinks=False))
                if stat.S_ISDIR(body.mode):
                    found.folders[entry.path] = body
                    below.append(entry.path)
                    continue
                found.names[entry.path] = body
                if stat.S_ISLNK(body.mode):
                    target = os.path.join(directory, os.readlink(entry.path))
                    found.targets[entry.path] = os.path.normpath(target)
    except FileNotFoundError:
        return below  # removed meanwhile
    except OSError as error:
        found.unread.append((directory, error))
    return below


def _read_refs(found: CachedRepo) -> None:
    inside = os.path.join(found.folder, "refs", "")
    for name in [each for each in found.names if each.startswith(inside)]:
        if is_half_made(os.path.basename(name)):
            continue
        try:
            body = found.body_behind(name)
            if body is None or not body.is_file:  # a FIFO would block
                continue
            with open(name, "rb") as file:
                text = os.fsdecode(file.read(_MOST_REF)).strip()
        except OSError as error:
            found.unread.append((name, error))
            continue
        found.refs[name.removeprefix(inside).replace(os.sep, "/")] = text


def _sort_pointers(found: CachedRepo) -> None:
    """Make revisions of what lies in `snapshots/`."""
    root = os.path.join(found.folder, "snapshots")
    inside = os.path.join(root, "")
    pointers: dict[str, list[Pointer]] = {
        path.removeprefix(inside): [] for path in found.folders if os.path.dirname(path) == root
    }
    for name in found.names:
        commit, slash, path = name.removeprefix(inside).partition(os.sep)
        if not name.startswith(inside) or not slash:
            continue
        body = found.body_behind(name)
        if body is None or body.is_file:
            blob = found.targets.get(name, name)
            pointers[commit].append(Pointer(path.replace(os.sep, "/"), name, blob, body))
    for commit, files in sorted(pointers.items()):
        folder = Path(root, commit)
        refs = tuple(sorted(ref for ref, text in found.refs.items() if text == commit))
        made = found.folders[str(folder)].modified
        found.revisions.append(
            Revision(
                commit=commit, folder=folder, pointers=tuple(files), refs=refs, made=made
            )
        )  # fmt: skip


def leads_nowhere(name: str | Path) -> bool:
    """Say whether there is surely nothing behind a symlink; what nobody may look at is not."""
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def find_repo(repos: Iterable[CachedRepo], repo: Repo) -> list[CachedRepo]:
    """Return a repo in each cache that has it; RepoNotCachedError, with near names, if none."""
    known = list(repos)
    found = [each for each in known if each.repo == repo]
    if not found:
        near = [str(each.repo) for each in known if each.repo.id == repo.id]
        near = near or get_close_matches(str(repo), {str(each.repo) for each in known}, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else None
        raise RepoNotCachedError(f"No HF cache here has {repo}", hint=hint, repo=str(repo))
    return found


def commit_meant(
    repo: Repo, revision: str, commits: Collection[str], refs: Mapping[str, str]
) -> str:
    """Return which of some commits is meant by a branch, a tag, a commit or the beginning of one.

    RepoNotCachedError if there is none, or several begin like that.
    """
    if revision in commits:
        return revision
    if refs.get(revision) in commits:
        return refs[revision]
    found = [each for each in commits if each.startswith(revision.lower())]
    if len(revision) < _SHORTEST_COMMIT or len(found) != 1:
        several = len(found) > 1 and len(revision) >= _SHORTEST_COMMIT
        what = "is the start of several revisions" if several else "is not a revision"
        names = ", ".join(sorted([*refs, *(commit[:12] for commit in commits)]))
        raise RepoNotCachedError(
            f"{revision!r} {what} of {repo}",
            hint=f"It has {names}." if names else "It has no revision.",
            repo=str(repo), revision=revision,
        )  # fmt: skip
    return found[0]


def _when(seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):  # a time that no clock shows
        return datetime.fromtimestamp(0, UTC)


# huggingface_hub's shared blob store


_DIRECTORY = "blobs"
_MARKER = ".huggingface-shared-blobs"
_VERSION = b"1\n"


def has_shared_store(cache_dir: Path) -> bool:
    """Say whether an HF cache has a shared store of the one version that is known."""
    root = cache_dir / _DIRECTORY
    marker = root / _MARKER
    try:
        is_plain = stat.S_ISDIR(os.lstat(root).st_mode)
        return is_plain and _file_size(marker) == len(_VERSION) and marker.read_bytes() == _VERSION
    except OSError:
        return False


def find_shared_entry(cache_dirs: Iterable[Path], xet: str, size: int) -> Path | None:
    """Return the first entry of a xet hash that is a readable file of that size.

    Its bytes are as likely right as any cached file's: hash it before anything relies on it.
    """
    if not is_digest(xet):
        return None
    for cache_dir in cache_dirs:
        path = cache_dir / _DIRECTORY / xet[:2] / xet
        if _file_size(path) == size and has_shared_store(cache_dir) and os.access(path, os.R_OK):
            return path
    return None


def _file_size(path: Path) -> int | None:
    """Return the size of a regular file; None of anything else, symlinks included."""
    try:
        st = os.lstat(path)
    except OSError:
        return None
    return st.st_size if stat.S_ISREG(st.st_mode) else None
