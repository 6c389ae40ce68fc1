"""A bundle: repos of an HF cache in one folder or tar file, for a machine without network.

    smartcache-bundle.json   the manifest, first; what is in here and how it is hashed
    blobs/<sha256>           each content once, whichever repos, revisions and names have it
    complete                 last: the sha256 of the manifest. Without it, the bundle is not whole

A tar bundle is a plain, uncompressed tar of the same names, in this order (blobs by name). The
manifest is JSON:

    {"format": "smartcache-bundle", "format_version": 1, "created_at": "2026-11-16T16:00:00Z",
     "repos": [{"type": "model", "id": "org/name", "refs": {"main": <commit>}, "revisions":
         {<commit>: {"files": {<path>: {"etag": <etag>, "size": 1}}, "tree": <sha256> or null}}}],
     "blobs": {<etag>: {"size": 1, "sha256": <sha256>}}}

`tree` is the content of `trees/<commit>.json`. Nothing in a manifest is believed: `decode` returns
one only if every name is safe, every number fits, and all that is named is described.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from smartcache.errors import BundleError
from smartcache.hub import REPO_TYPES, tree
from smartcache.hub.records import Repo, announced_by
from smartcache.system import Algorithm

MANIFEST = "smartcache-bundle.json"
COMPLETE = "complete"
BLOBS = "blobs"
MOST_MANIFEST = 1 << 28
"""Bytes of a manifest that are read: a million files are some 150 MB."""

_MOST_LISTING = 1 << 29
_FORMAT = "smartcache-bundle"
_VERSION = 1
_LONGEST_NAME = 255
_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Bytes of the bundle, by size and sha256."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The files that a snapshot had, path -> etag, and the sha256 of its tree listing."""

    files: Mapping[str, str]
    tree: str | None = None

    @property
    def etags(self) -> set[str]:
        """The names of all blobs that it needs."""
        return set(self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledRepo:
    """A repo of the bundle: its branches and tags, and its revisions by commit."""

    repo: Repo
    refs: Mapping[str, str]
    revisions: Mapping[str, Revision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a bundle holds. `blobs` has every etag and every tree listing of the repos."""

    created_at: datetime
    repos: tuple[BundledRepo, ...]
    blobs: Mapping[str, Content]

    def contents(self) -> dict[str, int]:
        """Return sha256 -> size of each content, in the order in which a bundle has them."""
        return dict(sorted((each.sha256, each.size) for each in self.blobs.values()))

    def expected(self) -> dict[str, dict[Algorithm, str]]:
        """Return sha256 -> every hash that this content must have by the names it goes by."""
        found: dict[str, dict[Algorithm, str]] = {}
        for etag, content in self.blobs.items():
            hashes = found.setdefault(content.sha256, {"sha256": content.sha256})
            hashes.update(announced_by(etag))
        return found

    @property
    def size(self) -> int:
        """The bytes of all contents, each once."""
        return sum(self.contents().values())


def checksum(manifest: bytes) -> bytes:
    """Return what the file `complete` of a bundle with this manifest contains."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


# writing


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest; BundleError if no machine would import it."""
    document = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "created_at": manifest.created_at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "repos": [_repo_document(each, manifest.blobs) for each in manifest.repos],
        "blobs": {
            etag: {"size": content.size, "sha256": content.sha256}
            for etag, content in sorted(manifest.blobs.items())
        },
    }
    text = json.dumps(document, indent=1).encode("ascii") + b"\n"
    if len(text) > MOST_MANIFEST:
        raise BundleError("There are too many files for one bundle", hint="Export fewer repos.")
    decode(text)  # what cannot be imported must not be exported
    return text


def _repo_document(each: BundledRepo, blobs: Mapping[str, Content]) -> dict[str, object]:
    revisions = {
        commit: {
            "files": {
                path: {"etag": etag, "size": blobs[etag].size}
                for path, etag in sorted(revision.files.items())
            },
            "tree": revision.tree,
        }
        for commit, revision in sorted(each.revisions.items())
    }
    refs = dict(sorted(each.refs.items()))
    return {"type": each.repo.type, "id": each.repo.id, "refs": refs, "revisions": revisions}


# reading


def decode(text: bytes) -> Manifest:
    """Return the manifest of a bundle, checked; BundleError if it is damaged or means harm."""
    try:
        document = json.loads(text, object_pairs_hook=_unique)
        if _item(document, "format") != _FORMAT:
            raise ValueError("it was not written by smartcache")
        version = _item(document, "format_version")
        if version != _VERSION:
            message = f"The bundle has format {version!r}; this smartcache reads {_VERSION}"
            raise BundleError(message, hint="Update smartcache.")
        blobs = {
            _etag(name): _content(name, entry) for name, entry in _table(document, "blobs").items()
        }
        created_at = datetime.fromisoformat(_text(document, "created_at"))
        if created_at.tzinfo is None:
            raise ValueError("its time has no zone")
        repos = tuple(_repo(entry, blobs) for entry in _list(document, "repos"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        reason = str(error) if type(error) is ValueError else "it is not readable JSON"
        raise BundleError(f"The manifest of the bundle cannot be used: {reason}") from error
    manifest = Manifest(created_at=created_at, repos=repos, blobs=blobs)
    _check_whole(manifest)
    return manifest


def _check_whole(manifest: Manifest) -> None:
    """Raise unless what is named and what is described is the same, and nothing is said twice."""
    folders = [each.repo.folder_name.casefold() for each in manifest.repos]
    used = {
        name
        for each in manifest.repos
        for revision in each.revisions.values()
        for name in (*revision.files.values(), revision.tree)
        if name is not None
    }
    if len(set(folders)) != len(folders):
        raise _unusable("a repo appears twice")
    if used != manifest.blobs.keys():
        raise _unusable("its list of blobs does not match its files")
    said: dict[str, tuple[int, dict[Algorithm, str]]] = {}
    for etag, content in manifest.blobs.items():
        size, hashes = said.setdefault(content.sha256, (content.size, {"sha256": content.sha256}))
        for name, value in announced_by(etag).items():
            if hashes.setdefault(name, value) != value or size != content.size:
                raise _unusable(f"it contradicts itself about {content.sha256}")


def _unusable(reason: str) -> BundleError:
    return BundleError(f"The manifest of the bundle cannot be used: {reason}")


def _repo(entry: object, blobs: Mapping[str, Content]) -> BundledRepo:
    kind, name = _text(entry, "type"), _text(entry, "id")
    found = [each for each in REPO_TYPES if each == kind]
    if not found:
        raise ValueError(f"{kind!r} is not a type of repo")
    repo = Repo(found[0], name)
    if not is_safe_id(repo):
        raise ValueError(f"{name!r} is not a repo id")
    revisions = {
        _commit(commit): _revision(revision, blobs)
        for commit, revision in _table(entry, "revisions").items()
    }
    refs = _table(entry, "refs")
    _check_names(refs)
    for commit in refs.values():
        if not isinstance(commit, str) or commit not in revisions:
            raise ValueError(f"a ref of {name} names a revision that is not there")
    return BundledRepo(
        repo=repo, refs={ref: str(commit) for ref, commit in refs.items()}, revisions=revisions
    )


def is_safe_id(repo: Repo) -> bool:
    """Say whether a repo has an id that the Hub could have given, and a folder of its own."""
    is_plain = _ID.fullmatch(repo.id) is not None and ".." not in repo.id
    name = repo.folder_name
    return is_plain and Repo.of_folder(name) == repo and len(name) <= _LONGEST_NAME


def _revision(entry: object, blobs: Mapping[str, Content]) -> Revision:
    files: dict[str, str] = {}
    table = _table(entry, "files")
    _check_names(table)
    for path, file in table.items():
        etag = _text(file, "etag")
        content = blobs.get(etag)
        if content is None or _item(file, "size") != content.size:
            raise ValueError(f"{path!r} is not described as its blob is")
        files[path] = etag
    listing = _item(entry, "tree")
    if listing is not None and (not isinstance(listing, str) or listing not in blobs):
        raise ValueError("a tree listing is not described")
    if listing is not None and blobs[listing].sha256 != listing:
        raise ValueError("a tree listing is not named by its sha256")
    if listing is not None and blobs[listing].size > _MOST_LISTING:
        raise ValueError("a tree listing is too large to be one")
    return Revision(files=files, tree=listing)


def _check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless files of these names can be below one folder, and only there."""
    taken: set[str] = set()
    folders: set[str] = set()
    for name in names:
        check_name(name)
        taken.add(name)
        parts = name.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    both = taken & folders
    if both:
        raise ValueError(f"{min(both)!r} is both a file and a folder")


def check_name(name: str) -> None:
    """Raise ValueError unless a path stays below its folder."""
    parts = tree.safe_parts(name)
    if parts is None:
        raise ValueError(f"{name!r} leads outside its folder")
    try:
        longest = max(len(os.fsencode(part)) for part in parts)
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} is not a file name") from None
    if longest > _LONGEST_NAME:
        raise ValueError(f"{name[:60]!r}... is too long for the name of a file")


def _content(name: str, entry: object) -> Content:
    size, sha256 = _item(entry, "size"), _text(entry, "sha256")
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise ValueError(f"{name} has no size")
    if not _SHA256.fullmatch(sha256) or announced_by(name).get("sha256", sha256) != sha256:
        raise ValueError(f"{name} has another sha256 than its name")
    return Content(size=size, sha256=sha256)


def _etag(name: str) -> str:
    if not announced_by(name):
        raise ValueError(f"{name[:100]!r} is not a hash")
    return name


def _commit(name: str) -> str:
    if not tree.is_commit(name):
        raise ValueError(f"{name[:100]!r} is not a commit")
    return name


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _item(entry: object, name: str) -> object:
    if not isinstance(entry, dict) or name not in entry:
        raise ValueError(f"{name!r} is missing")
    return entry[name]


def _text(entry: object, name: str) -> str:
    value = _item(entry, name)
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not text")  # noqa: TRY004 - about the manifest, not the code
    return value


def _table(entry: object, name: str) -> dict[str, object]:
    value = _item(entry, name)
    if not isinstance(value, dict):
        raise ValueError(f"{name!r} is not an object")  # noqa: TRY004 - about the manifest, not the code
    return value


def _list(entry: object, name: str) -> Iterator[object]:
    value = _item(entry, name)
    if not isinstance(value, list):
        raise ValueError(f"{name!r} is not a list")  # noqa: TRY004 - about the manifest, not the code
    return iter(value)
