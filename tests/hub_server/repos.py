"""What is served: repos, their commits, branches and tags, and the files of a commit.

    repo = Repository("model", "org/name")
    commit = repo.publish({"config.json": HubFile(b"{}", is_lfs=False)}, revision="main")
    assert repo.find("main") is commit is repo.find(commit.sha)

Files are named as the Hub names them: large ones by sha256 (LFS), small texts by git's sha1.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

RepoType: TypeAlias = Literal["model", "dataset", "space"]
REPO_TYPES: tuple[RepoType, ...] = ("model", "dataset", "space")
JsonObject: TypeAlias = dict[str, object]

TEXT_SUFFIXES = frozenset(
    {"", ".cfg", ".csv", ".gitattributes", ".gitignore", ".ini", ".jinja", ".json", ".jsonl", ".md"}
    | {".py", ".toml", ".tsv", ".txt", ".yaml", ".yml"}
)
"""Kept by git itself while they are small; everything else is LFS."""

MOST_TEXT = 10 * 1024 * 1024
_hashing = threading.Lock()


def is_large(path: str, size: int = 0) -> bool:
    """Say whether the Hub would keep a file of this name in LFS."""
    return Path(path).suffix.lower() not in TEXT_SUFFIXES or size > MOST_TEXT


def git_sha1(data: bytes) -> str:
    """Return git's name of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's name


def etag_of(path: str, data: bytes) -> str:
    """Return what a client names its blob by, if nothing was said about LFS."""
    return HubFile(data, is_lfs=is_large(path, len(data))).etag


class HubFile:
    """Bytes in memory or a file on disk, which is hashed once and must not change."""

    def __init__(self, data: bytes | Path, *, is_lfs: bool, xet: str | None = None) -> None:
        self.data = data
        self.is_lfs = is_lfs
        self.xet = xet

    @cached_property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.stat().st_size

    @cached_property
    def sha256(self) -> str:
        if isinstance(self.data, bytes):
            return hashlib.sha256(self.data).hexdigest()
        with _hashing, self.data.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git itself holds of an LFS file."""
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}")
        return "\n".join((*lines, f"size {self.size}", "")).encode()

    @cached_property
    def oid(self) -> str:
        """The name of what git holds."""
        return git_sha1(self.pointer if self.is_lfs else self.read())

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.oid

    def read(self) -> bytes:
        return self.data if isinstance(self.data, bytes) else self.data.read_bytes()


@dataclass(frozen=True, slots=True)
class Commit:
    """The files of a repo at one commit."""

    repo: str
    sha: str
    files: Mapping[str, HubFile]
    extra: Sequence[JsonObject] = ()
    """Entries of the listing that stand for nothing, word for word."""

    def etag(self, path: str) -> str:
        return self.files[path].etag


@dataclass(slots=True)
class Repository:
    """All commits of a repo; none is ever taken away."""

    type: RepoType
    id: str
    is_gated: bool = False
    is_private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What stands before the id in the address of a file."""
        return "" if self.type == "model" else f"{self.type}s/"

    def publish(
        self,
        files: Mapping[str, HubFile],
        *,
        revision: str = "main",
        tags: Sequence[str] = (),
        extra: Sequence[JsonObject] = (),
    ) -> Commit:
        """Make a commit of exactly these files and move the branch to it."""
        parent = self.branches.get(revision, "")
        names = {path: file.etag for path, file in sorted(files.items())}
        text = json.dumps([self.type, self.id, revision, parent, names, len(self.commits)])
        sha = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - as git does
        commit = Commit(self.id, sha, dict(files), tuple(extra))
        self.commits[sha] = commit
        self.branches[revision] = sha
        self.branches.setdefault("main", sha)
        self.tags.update(dict.fromkeys(tags, sha))
        return commit

    def find(self, revision: str) -> Commit | None:
        """Return the commit that a branch, a tag or its own (short) name stands for."""
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        if sha in self.commits:
            return self.commits[sha]
        short = [each for each in self.commits if len(sha) >= 7 and each.startswith(sha)]
        return self.commits[short[0]] if len(short) == 1 else None
