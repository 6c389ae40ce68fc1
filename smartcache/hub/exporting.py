"""Export: repos of HF caches become a bundle, every byte hashed on the way.

The plan looks at snapshots alone: what they point at is exported, whatever else lies in a repo
folder is not. Files that git names by sha1 are hashed when planned, because the manifest, which
comes first, has the sha256 of everything; large files have it in their name. What is written is
hashed once more and compared, so a bundle holds nothing that is not what its name says.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from smartcache.errors import (
    DigestMismatchError,
    FileChangedError,
    RepoNotCachedError,
    UnsafeNameError,
)
from smartcache.hub import tree
from smartcache.hub.bundle import (
    COMPLETE,
    MANIFEST,
    BundledRepo,
    Content,
    Manifest,
    Revision,
    check_name,
    checksum,
    encode,
    is_safe_id,
)
from smartcache.hub.bundle_writing import (
    FolderSink,
    Sink,
    TarSink,
    check_destination,
    named_at_last,
)
from smartcache.hub.records import RemoteFile, Repo, announced_by
from smartcache.progress import Job, Progress, silent
from smartcache.store import LINKED_SUFFIXES
from smartcache.system import Algorithm, hash_file, need_room

_SHORTEST_PREFIX = 4
_LFS_FROM = 10 << 20
"""The Hub takes no plain git file above this size."""
_DAMAGED = "'smartcache hub verify' shows what else is; remove the file and download it again."
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOCTTY")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A repo to export, and the revision: a commit, its beginning, a branch or tag; None: all."""

    repo: Repo
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, repo_type: str | None = None) -> Wanted:
        """Return what a user means by REPO or REPO@REV."""
        name, _, revision = text.partition("@")
        return cls(repo=Repo.parse(name, repo_type), revision=revision or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The file that has a content, and what it is in the repo, for messages."""

    path: Path
    repo: Repo
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.repo}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """What would be written. `partial` has the files that snapshots lack: "repo@commit" -> number.

    `size` counts each content once, `files_size` every file of every snapshot.
    """

    manifest: Manifest
    partial: dict[str, int]
    files: int
    files_size: int
    _origins: dict[str, Origin]

    @property
    def size(self) -> int:
        """The bytes of the blobs to write."""
        return self.manifest.size

    @property
    def warnings(self) -> list[str]:
        """What the user should know: snapshots that are not whole."""
        return [
            f"{name} is incomplete here: {count} file{'' if count == 1 else 's'} of it "
            "will be missing from the bundle"
            for name, count in self.partial.items()
        ]

    def origin(self, sha256: str) -> Path:
        """Return the file that has a content."""
        return self._origins[sha256].path

    def write_folder(self, path: Path, *, force: bool = False, progress: Progress = silent) -> None:
        """Write the bundle to a new folder; it has its name only when it is whole."""
        check_destination(path, is_tar=False, force=force)
        with named_at_last(path, force=force) as part:
            sink = FolderSink(part, self.size)
            self._write(sink, progress)
            sink.finish()

    def write_tar(self, path: Path, *, force: bool = False, progress: Progress = silent) -> None:
        """Write the bundle to a new tar file; it has its name only when it is whole."""
        check_destination(path, is_tar=True, force=force)
        need_room(path.parent, self.size, "The bundle")
        with named_at_last(path, force=force) as part, open(part, "xb") as stream:
            self.write_stream(stream, progress=progress)
            os.fsync(stream.fileno())

    def write_stream(self, stream: BinaryIO, *, progress: Progress = silent) -> None:
        """Write the bundle as a tar to a stream; if this raises, what was written is not whole."""
        sink = TarSink(stream)
        self._write(sink, progress)
        sink.finish()

    def _write(self, sink: Sink, progress: Progress) -> None:
        text = encode(self.manifest)
        sink.text(MANIFEST, text)
        expected = self.manifest.expected()
        with progress("Exporting", self.size, "bytes") as job:
            for sha256, size in self.manifest.contents().items():
                self._write_blob(sink, Content(size=size, sha256=sha256), expected[sha256], job)
        sink.text(COMPLETE, checksum(text))

    def _write_blob(
        self, sink: Sink, content: Content, expected: dict[Algorithm, str], job: Job
    ) -> None:
        origin = self._origins[content.sha256]
        source = os.open(origin.path, _FLAGS)
        try:
            hashes = sink.blob(content.sha256, source, content.size, tuple(expected), job.advance)
        except FileChangedError as error:
            message = f"{origin} changed while it was exported ({origin.path}); nothing is kept"
            raise FileChangedError(message, path=origin.path) from error
        finally:
            os.close(source)
        _compare(origin, expected, dict(hashes.values))


def _compare(origin: Origin, expected: dict[Algorithm, str], found: dict[Algorithm, str]) -> None:
    for name, value in expected.items():
        if found[name] != value:
            message = f"{origin} is damaged: {origin.path} has {name} {found[name]}, not {value}"
            raise DigestMismatchError(
                message, hint=_DAMAGED, path=origin.path, expected=value, found=found[name]
            )


# planning


def plan_export(
    caches: Sequence[Path], wanted: Iterable[Wanted], *, progress: Progress = silent
) -> ExportPlan:
    """Plan to export repos; RepoNotCachedError if none of the HF caches has one.

    A repo that is in several caches is exported with the revisions and files of all of them.
    """
    gathering = _Gathering()
    with progress("Reading the cache") as job:
        for each in wanted:
            gathering.add(caches, each, job)
    repos = tuple(
        BundledRepo(
            repo=repo,
            refs=dict(gathering.refs[repo]),
            revisions={
                commit: Revision(files=files, tree=gathering.listings.get((repo, commit)))
                for commit, files in revisions.items()
            },
        )
        for repo, revisions in sorted(gathering.repos.items())
    )
    manifest = Manifest(
        created_at=datetime.now(UTC).replace(microsecond=0), repos=repos, blobs=gathering.blobs
    )
    named = [
        etag for repo in gathering.repos.values() for files in repo.values()
        for etag in files.values()
    ]  # fmt: skip
    return ExportPlan(
        manifest=manifest, partial=gathering.partial(), files=len(named),
        files_size=sum(gathering.blobs[etag].size for etag in named), _origins=gathering.origins,
    )  # fmt: skip


@dataclass(slots=True)
class _Gathering:
    """What was found so far."""

    repos: dict[Repo, dict[str, dict[str, str]]] = field(default_factory=dict)
    refs: dict[Repo, dict[str, str]] = field(default_factory=dict)
    listings: dict[tuple[Repo, str], str] = field(default_factory=dict)
    blobs: dict[str, Content] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    listed: dict[tuple[Repo, str], set[str]] = field(default_factory=dict)
    broken: dict[tuple[Repo, str], set[str]] = field(default_factory=dict)

    def add(self, caches: Sequence[Path], wanted: Wanted, job: Job) -> None:
        """Add the snapshots that are meant, from every cache that has them."""
        repo = wanted.repo
        folders = [cache / repo.folder_name for cache in caches]
        folders = [folder for folder in folders if tree.commits_of(folder)]
        if not folders:
            raise RepoNotCachedError(f"{repo} is not in any HF cache here")
        if not is_safe_id(repo):
            raise UnsafeNameError(f"{repo.id!r} is not a repo id")
        commits = _meant(folders, wanted)
        for folder in folders:
            for commit in tree.commits_of(folder):
                if commit in commits:
                    self._add_snapshot(repo, folder, commit, job)
            refs = self.refs.setdefault(repo, {})
            for ref, commit in tree.refs_of(folder).items():
                if commit in commits:
                    refs.setdefault(ref, commit)

    def _add_snapshot(self, repo: Repo, folder: Path, commit: str, job: Job) -> None:
        remembered = tree.read_listing(folder, commit)
        listing = {each.path: each for each in remembered or ()}
        files = self.repos.setdefault(repo, {}).setdefault(commit, {})
        for name, path in tree.pointers(folder, commit):
            try:
                check_name(name)
            except ValueError as error:
                message = f"A file of {repo} cannot be exported: {error}"
                raise UnsafeNameError(message, hint="Remove the file.") from error
            if name in files:
                continue
            etag = self._add_file(Origin(path=path, repo=repo, name=name), listing.get(name))
            if etag is None:
                self.broken.setdefault((repo, commit), set()).add(name)
            else:
                files[name] = etag
            job.advance()
        if remembered is not None:
            self.listed.setdefault((repo, commit), set()).update(listing)
            # One that contradicts the snapshot would be refused by the import.
            if all(files.get(each.path, each.etag) == each.etag for each in listing.values()):
                self._add_listing(repo, folder, commit)

    def _add_file(self, origin: Origin, listed: RemoteFile | None) -> str | None:
        """Describe a file of a snapshot; return its etag, None if it has no bytes."""
        try:
            st = os.stat(origin.path)
        except OSError:
            return None
        if not stat.S_ISREG(st.st_mode):
            return None
        behind = tree.blob_behind(origin.path)
        announced = announced_by(behind.name) if behind is not None else {}
        if not announced and listed is not None:
            announced = listed.announced
        if "sha256" in announced:
            etag = sha256 = announced["sha256"]
        else:
            known = self.blobs.get(announced.get("git-sha1", ""))
            if known is not None:
                return announced["git-sha1"]
            found = hash_file(origin.path, ("sha256", "git-sha1"))[0]
            _compare(origin, announced, dict(found.values))
            sha256 = found.values["sha256"]
            is_large = st.st_size > _LFS_FROM or origin.path.suffix.lower() in LINKED_SUFFIXES
            etag = sha256 if is_large and not announced else found.values["git-sha1"]
        self._describe(etag, Content(size=st.st_size, sha256=sha256), origin)
        return etag

    def _describe(self, etag: str, content: Content, origin: Origin) -> None:
        first = self.origins.setdefault(content.sha256, origin)
        known = [self.blobs.setdefault(etag, content)]
        known += [self.blobs[content.sha256]] if content.sha256 in self.blobs else []
        if any(each.size != content.size for each in known):
            message = f"{first} and {origin} have the same hash by name, but not the same size"
            raise DigestMismatchError(message, hint=_DAMAGED, path=origin.path)

    def _add_listing(self, repo: Repo, folder: Path, commit: str) -> None:
        if (repo, commit) in self.listings:
            return
        name = f"trees/{commit}.json"
        path = folder / name
        hashes, _ = hash_file(path, ("sha256",))
        sha256 = hashes.values["sha256"]
        origin = Origin(path=path, repo=repo, name=name)
        self._describe(sha256, Content(size=hashes.size, sha256=sha256), origin)
        self.listings[repo, commit] = sha256

    def partial(self) -> dict[str, int]:
        """Return how many files each snapshot lacks, of those that are known to lack some."""
        lacking: dict[str, int] = {}
        for repo, revisions in sorted(self.repos.items()):
            for commit, files in sorted(revisions.items()):
                known = self.listed.get((repo, commit), set())
                missing = (known | self.broken.get((repo, commit), set())) - files.keys()
                if missing:
                    lacking[f"{repo}@{commit}"] = len(missing)
        return lacking


def _meant(folders: list[Path], wanted: Wanted) -> set[str]:
    """Return the commits that a user means, of those that have a snapshot in one of the folders."""
    commits = {commit for folder in folders for commit in tree.commits_of(folder)}
    text = wanted.revision
    if text is None:
        return commits
    if text in commits:
        return {text}
    for folder in folders:
        commit = tree.refs_of(folder).get(text)
        if commit in commits:
            return {commit}
    starting = {commit for commit in commits if commit.startswith(text.lower())}
    if len(text) >= _SHORTEST_PREFIX and len(starting) == 1:
        return starting
    if len(text) >= _SHORTEST_PREFIX and starting:
        hint = f"Write more of it: {', '.join(sorted(commit[:12] for commit in starting))}"
        message = f"{text} is the start of several revisions of {wanted.repo}"
        raise RepoNotCachedError(message, hint=hint)
    raise RepoNotCachedError(f"No HF cache here has revision {text} of {wanted.repo}")
