"""The values of this layer: repos, their files on the Hub, and where the bytes of a file are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from smartcache.errors import ConfigError
from smartcache.hub import REPO_TYPES, RepoType
from smartcache.store.records import LINKED_SUFFIXES
from smartcache.store.sources import Offer
from smartcache.system.hashing import Algorithm

Source = Literal["present", "link", "reuse", "copy", "tier", "fetch"]
"""Where a file comes from: this repo's cache, the store, a file of a known folder that has to be
hashed first and is then adopted or copied, another filesystem, a tier, the Hub."""

_EDITED = frozenset(
    (".json", ".jsonl", ".txt", ".yaml", ".yml", ".toml", ".cfg", ".py", ".ipynb", ".md", ".jinja",
     ".csv", ".tsv", ".html", ".xml", ".sh", ".js", ".css")
)  # fmt: skip
"""Kinds of files that programs and people edit in place: never linked, even when they are LFS."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, order=True)
class Repo:
    """A repo of the Hub. Its text form is huggingface_hub's: "model/org/name"."""

    type: RepoType
    id: str

    def __str__(self) -> str:
        return f"{self.type}/{self.id}"

    @property
    def folder_name(self) -> str:
        """The name of its folder in an HF cache."""
        return "--".join((f"{self.type}s", *self.id.split("/")))

    @classmethod
    def of_folder(cls, name: str) -> Repo | None:
        """Return the repo whose folder has this name, None if it is no such folder."""
        kind, *rest = name.split("--")
        for each in REPO_TYPES:
            if kind == f"{each}s" and rest and all(rest):
                return cls(each, "/".join(rest))
        return None

    @classmethod
    def parse(cls, text: str, repo_type: str | None = None) -> Repo:
        """Return the repo a user means by "org/name", "dataset/org/name" or "datasets/org/name"."""
        first, slash, rest = text.partition("/")
        for each in REPO_TYPES:
            is_named = first in (each, f"{each}s") and slash
            if is_named and (rest.count("/") == 1 or (repo_type is None and rest)):
                return cls(each, rest)
        for each in REPO_TYPES:
            if (repo_type or "model") in (each, f"{each}s"):
                return cls(each, text)
        hint = "Choose model, dataset or space."
        raise ConfigError(f"{repo_type!r} is not a type of repo", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repo as the Hub announces it, before any byte of it is fetched."""

    path: str
    """In the repo, parts joined by "/"; checked: it leads nowhere else."""
    size: int | None
    etag: str
    """What huggingface_hub names its blob: the sha256 of an LFS file, git's sha1 of another."""
    xet: str | None = None
    blob_id: str = field(default="", compare=False)
    """What git calls it, if the Hub said."""

    @property
    def is_lfs(self) -> bool:
        """Whether it is announced by sha256: a large file."""
        return _SHA256.fullmatch(self.etag) is not None

    def is_large(self, min_size: int) -> bool:
        """Whether it is worth looking for elsewhere: its hash is known, and it is no small text."""
        return bool(self.announced) and self.size is not None and self.size >= max(1, min_size)

    def is_weight(self, min_size: int) -> bool:
        """Whether it may be shared by a link: large, and no kind that programs edit in place."""
        return self.is_large(min_size) and self.is_weight_name

    @property
    def is_weight_name(self) -> bool:
        """Whether it is of a kind that programs never edit in place, whatever its size."""
        suffix = os.path.splitext(self.path)[1].lower()
        return suffix in LINKED_SUFFIXES or (self.is_lfs and suffix not in _EDITED)

    @property
    def announced(self) -> dict[Algorithm, str]:
        """The hash that the bytes must have; empty if the Hub named none that we know."""
        return announced_by(self.etag)

    @property
    def algorithm(self) -> Algorithm:
        """Which hash `etag` is, of a file of which the Hub named one."""
        return "sha256" if self.is_lfs else "git-sha1"


def xet_of(text: object) -> str | None:
    """Return a xet hash that the Hub named, None if it is none."""
    return text if isinstance(text, str) and _SHA256.fullmatch(text) else None


def announced_by(name: str) -> dict[Algorithm, str]:
    """Return the hash that a blob of an HF cache has by its name; empty if the name is none."""
    if _SHA256.fullmatch(name):
        return {"sha256": name}
    if _SHA1.fullmatch(name):
        return {"git-sha1": name}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A file on this machine that may have the wanted bytes."""

    path: Path
    is_known: bool = False
    """Its hash is remembered and right: it need not be read to be sure."""
    may_link: bool = False
    """It lies in an HF cache or in a folder the user gave to smartcache, so that it may become a
    blob in place; else it is only read, and stays as it is."""
    is_far: bool = False
    """It lies on another filesystem than the place where the file is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """What is to be done for one file."""

    file: RemoteFile
    source: Source
    digest: str = ""
    """Of the blob in the store, if it has one."""
    candidates: tuple[Candidate, ...] = ()
    """Files that may have the bytes, the likeliest first."""
    offer: Offer | None = None
    """The object of a tier that has the bytes, if this machine has not; small files have it too."""
    found: Path | None = None
    """The file that is at the target already."""
    is_proven: bool = False
    """What is there is a weight known to be right, or a text, which people may edit; else it will
    be hashed."""
    is_visible: bool = False
    """Programs find it at the target."""
    is_large: bool = False
    is_weight: bool = False

    @property
    def origin(self) -> Path | str | None:
        """The file or tier that the bytes are most likely taken from."""
        if self.offer is not None:
            return self.offer.tier.name
        return self.candidates[0].path if self.candidates and not self.digest else self.found

    @property
    def size(self) -> int:
        """The announced size; 0 if the Hub did not say."""
        return self.file.size or 0
