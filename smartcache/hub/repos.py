"""What is in HF caches: the names in each repo folder, its revisions and its refs.

One walk and one stat per name; nothing is hashed, and no symlink is followed except to ask what is
behind it. What is odd (a pointer to nothing, junk, a folder that cannot be read) is kept as it is
and counted, never an error: a damaged repo takes room too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

from smartcache.errors import RepoNotCachedError
from smartcache.hub.records import Repo
from smartcache.hub.tree import is_commit, is_half_made
from smartcache.system import allocated_bytes

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
        known = {each.commit for each in self.revisions} | set(
            filter(is_commit, self.refs.values())
        )
        if revision in known:
            return revision
        if self.refs.get(revision) in known:
            return self.refs[revision]
        found = [each for each in known if each.startswith(revision)]
        if len(revision) < _SHORTEST_COMMIT or len(found) != 1:
            several = len(found) > 1 and len(revision) >= _SHORTEST_COMMIT
            what = "is the start of several revisions" if several else "is not a revision"
            names = ", ".join(sorted([*self.refs, *(commit[:12] for commit in known)]))
            raise RepoNotCachedError(
                f"{revision!r} {what} of {self.repo}",
                hint=f"It has {names}." if names else "It has no revision.",
                repo=str(self.repo), revision=revision,
            )  # fmt: skip
        return found[0]

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
            found += [scan_repo(repo, folder) for repo, folder in _repo_folders(Path(cache_dir))]
    return found


def _repo_folders(cache_dir: Path) -> Iterator[tuple[Repo, Path]]:
    try:
        with os.scandir(cache_dir) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        repo = Repo.of_folder(name)
        if repo is not None:
            yield repo, cache_dir / name


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


def _when(seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):  # a time that no clock shows
        return datetime.fromtimestamp(0, UTC)
