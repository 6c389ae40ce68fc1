"""Carry repos of HF caches to another machine: export to a bundle, import from one.

Export looks at snapshots alone: what they point at is exported, whatever else lies in a repo folder
is not. Files that git names by sha1 are hashed when planned, because the manifest, which comes
first, has the sha256 of everything; large files have it in their name. What is written is hashed
once more and compared, so a bundle holds nothing that is not what its name says.

Import verifies each byte before it has a name. Contents come first: each becomes a blob of the
store that is placed at `<repo>/blobs/<etag>`, or a file of its own there, once its hashes are those
of all its names. Snapshots follow when all they point at is there, and refs last. A file, a
snapshot or a ref is made in a folder of ours beside the repo's own, brought to the disk, and gets
its name by one rename (blobs of the store by one link), so there is no moment at which a pointer
leads to bytes that are missing or were not verified. Whatever is interrupted leaves only whole
files; the next import finds them and goes on. Nothing is written outside the repos' folders and the
store.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from smartcache.errors import (
    BlobNotFoundError,
    BundleError,
    DamagedBlobError,
    DestinationExistsError,
    DigestMismatchError,
    FileChangedError,
    FileSkippedError,
    RepoNotCachedError,
    SizeMismatchError,
    UnsafeNameError,
)
from smartcache.hub import layout
from smartcache.hub.bring import move_to_bad, near_pool
from smartcache.hub.care import bundle
from smartcache.hub.layout import CachedRepo, Pointer, commit_meant, scan_repo
from smartcache.hub.outcome import FileChanges, Watch
from smartcache.hub.records import RemoteFile, Repo, announced_by
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import CHUNK, check_expected
from smartcache.store.layout import Pool, explained
from smartcache.store.records import LINKED_SUFFIXES, Blob
from smartcache.store.store import Store
from smartcache.system.faults import reached
from smartcache.system.filesystems import need_room
from smartcache.system.hashing import Algorithm, Hasher, Hashes, hash_file
from smartcache.system.kernel import preallocate, sync_directory

_LFS_FROM = 10 << 20
"""The Hub takes no plain git file above this size."""
_DAMAGED = "'smartcache hub verify' shows what else is; remove the file and download it again."
_LOOKS = 20
_STAGE = ".smartcache-import"
"""In a repo's folder: what has no name yet. A leftover one is removed by the next import."""
_log = logging.getLogger(__name__)


# export


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
class ExportPlan:
    """What would be written. `partial` has the files that snapshots lack: "repo@commit" -> number.

    `size` counts each content once, `files_size` every file of every snapshot.
    """

    manifest: bundle.Manifest
    partial: dict[str, int]
    files: int
    files_size: int
    _origins: dict[str, tuple[Path, str]]
    """By sha256: a file that has the content, and what to call it."""

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
        return self._origins[sha256][0]

    def write_folder(self, path: Path, *, force: bool = False, progress: Progress = silent) -> None:
        """Write the bundle to a new folder; it has its name only when it is whole."""
        bundle.check_destination(path, is_tar=False, force=force)
        with bundle.named_at_last(path, force=force) as part:
            self._write(bundle.FolderSink(part, self.size), progress)

    def write_tar(self, path: Path, *, force: bool = False, progress: Progress = silent) -> None:
        """Write the bundle to a new tar file; it has its name only when it is whole."""
        bundle.check_destination(path, is_tar=True, force=force)
        need_room(path.parent, self.size, "The bundle")
        with bundle.named_at_last(path, force=force) as part, open(part, "xb") as stream:
            self.write_stream(stream, progress=progress)
            os.fsync(stream.fileno())

    def write_stream(self, stream: BinaryIO, *, progress: Progress = silent) -> None:
        """Write the bundle as a tar to a stream; if this raises, what was written is not whole."""
        self._write(bundle.TarSink(stream), progress)

    def _write(self, sink: bundle.FolderSink | bundle.TarSink, progress: Progress) -> None:
        text = bundle.encode(self.manifest)
        sink.text(bundle.MANIFEST, text)
        expected = self.manifest.expected()
        with progress("Exporting", self.size, "bytes") as job:
            for sha256, size in self.manifest.contents().items():
                path, what = self._origins[sha256]
                wanted = tuple(expected[sha256])
                try:
                    with bundle.open_plainly(path) as source:
                        hashes = sink.blob(sha256, source.fileno(), size, wanted, job.advance)
                except FileChangedError as error:
                    message = f"{what} changed while it was exported ({path}); nothing is kept"
                    raise FileChangedError(message, path=path) from error
                _compare(path, what, expected[sha256], hashes)
        sink.text(bundle.COMPLETE, bundle.checksum(text))
        sink.finish()


def _compare(path: Path, what: str, expected: Mapping[Algorithm, str], found: Hashes) -> None:
    for name, value in expected.items():
        if found.values[name] != value:
            message = f"{what} is damaged: {path} has {name} {found.values[name]}, not {value}"
            raise DigestMismatchError(
                message, hint=_DAMAGED, path=path, expected=value, found=found.values[name]
            )


def plan_export(
    caches: Sequence[Path], wanted: Iterable[Wanted], *, progress: Progress = silent
) -> ExportPlan:
    """Plan to export repos; RepoNotCachedError if none of the HF caches has one.

    A repo that is in several caches is exported with the revisions and files of all of them.
    """
    cached: dict[Repo, list[CachedRepo]] = {}
    meant: dict[Repo, set[str]] = {}
    for each in wanted:
        repo = each.repo
        folders = [cache / repo.folder_name for cache in caches]
        cached[repo] = [scan_repo(repo, folder) for folder in folders if folder.is_dir()]
        names = {revision.commit for found in cached[repo] for revision in found.revisions}
        commits = set(filter(layout.is_commit, names))
        if not commits:
            raise RepoNotCachedError(f"{repo} is not in any HF cache here")
        if not bundle.is_safe_id(repo):
            raise UnsafeNameError(f"{repo.id!r} is not a repo id")
        if each.revision is not None:
            commits = {commit_meant(repo, each.revision, commits, _refs(cached[repo], commits))}
        meant.setdefault(repo, set()).update(commits)
    gathering = _Gathering()
    with progress("Reading the cache") as job:
        repos = tuple(
            bundle.BundledRepo(
                repo=repo, refs=_refs(cached[repo], meant[repo]),
                revisions={
                    commit: gathering.revision(cached[repo], commit, job)
                    for commit in sorted(meant[repo])
                },
            )
            for repo in sorted(meant)
        )  # fmt: skip
    manifest = bundle.Manifest(
        created_at=datetime.now(UTC).replace(microsecond=0), repos=repos, blobs=gathering.blobs
    )
    sizes = [
        gathering.blobs[etag].size
        for repo in repos
        for revision in repo.revisions.values()
        for etag in revision.files.values()
    ]
    return ExportPlan(
        manifest=manifest, partial=gathering.partial, files=len(sizes), files_size=sum(sizes),
        _origins=gathering.origins,
    )  # fmt: skip


def _refs(cached: list[CachedRepo], commits: set[str]) -> dict[str, str]:
    """Return the refs that name some commits; the first cache that has a ref says which."""
    refs: dict[str, str] = {}
    for each in reversed(cached):
        refs |= {ref: commit for ref, commit in each.refs.items() if commit in commits}
    return refs


class _Gathering:
    """The contents that were found so far, and how many files snapshots lack."""

    def __init__(self) -> None:
        self.blobs: dict[str, bundle.Content] = {}
        self.origins: dict[str, tuple[Path, str]] = {}
        self.partial: dict[str, int] = {}

    def revision(self, cached: list[CachedRepo], commit: str, job: Job) -> bundle.Revision:
        """Return the files that the snapshots of a commit have together."""
        files: dict[str, str] = {}
        named: set[str] = set()
        listing_sha256: str | None = None
        for each in cached:
            found = next((found for found in each.revisions if found.commit == commit), None)
            if found is None:
                continue
            remembered = layout.read_listing(each.folder, commit)
            listing = {file.path: file for file in remembered or ()}
            named.update(listing)
            for pointer in found.pointers:
                named.add(pointer.path)
                if pointer.path not in files:
                    etag = self._add_file(each.repo, pointer, listing.get(pointer.path))
                    if etag is not None:
                        files[pointer.path] = etag
                    job.advance()
            # One that contradicts the snapshot would be refused by the import.
            is_right = all(
                files.get(name, file.etag) == file.etag for name, file in listing.items()
            )
            if remembered is not None and is_right and listing_sha256 is None:
                path = each.folder / "trees" / f"{commit}.json"
                hashes, _ = hash_file(path, ("sha256",))
                listing_sha256 = hashes.values["sha256"]
                content = bundle.Content(size=hashes.size, sha256=listing_sha256)
                self._describe(listing_sha256, content, path, f"trees/{path.name} of {each.repo}")
        if lacking := named - files.keys():
            self.partial[f"{cached[0].repo}@{commit}"] = len(lacking)
        return bundle.Revision(files=files, tree=listing_sha256)

    def _add_file(self, repo: Repo, pointer: Pointer, listed: RemoteFile | None) -> str | None:
        """Describe a file of a snapshot; return its etag, None if it has no bytes."""
        if layout.safe_parts(pointer.path) is None:
            text = f"{pointer.path!r} leads outside its folder"
            message = f"A file of {repo} cannot be exported: {text}"
            raise UnsafeNameError(message, hint="Remove the file.")
        path, what = Path(pointer.name), f"{pointer.path} of {repo}"
        try:
            st = os.stat(path)
        except OSError:
            return None
        if not stat.S_ISREG(st.st_mode):
            return None
        announced = announced_by(os.path.basename(pointer.blob))
        if pointer.blob == pointer.name:  # no symlink: the name says nothing
            announced = {}
        if not announced and listed is not None:
            announced = listed.announced
        if "sha256" in announced:
            etag = sha256 = announced["sha256"]
        elif announced.get("git-sha1", "") in self.blobs:
            return announced["git-sha1"]
        else:
            found, _ = hash_file(path, ("sha256", "git-sha1"))
            _compare(path, what, announced, found)
            sha256 = found.values["sha256"]
            is_large = st.st_size > _LFS_FROM or path.suffix.lower() in LINKED_SUFFIXES
            etag = sha256 if is_large and not announced else found.values["git-sha1"]
        self._describe(etag, bundle.Content(size=st.st_size, sha256=sha256), path, what)
        return etag

    def _describe(self, etag: str, content: bundle.Content, path: Path, what: str) -> None:
        _, first = self.origins.setdefault(content.sha256, (path, what))
        known = (self.blobs.setdefault(etag, content), self.blobs.get(content.sha256, content))
        if any(each.size != content.size for each in known):
            message = f"{first} and {what} have the same hash by name, but not the same size"
            raise DigestMismatchError(message, hint=_DAMAGED, path=path)


# import: the contents

State = Literal["absent", "right", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledFile:
    """A file that a content of the bundle is to become."""

    folder: Path
    """Of the repo."""
    path: Path
    size: int
    expected: dict[Algorithm, str]
    """Every hash the content must have, by all its names: sha256, and maybe git's sha1."""
    is_weight: bool = False
    """It may be a link to a blob: large, and no kind that programs edit in place."""
    is_staged: bool = False
    """It waits in a folder of ours, which the import begins by emptying: never there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """Brings contents to the files they become: from the store, else from the bundle.

    `force` replaces files that are not what their name says.
    """

    store: Store
    near: Pool | None
    """The pool on the filesystem of the HF cache; without one, files are no blobs."""
    force: bool
    watch: Watch

    def state(self, path: Path, size: int, expected: dict[Algorithm, str]) -> State:
        """Say whether a file is there with the right bytes; its hash is remembered.

        DestinationExistsError if it has others, unless it may be replaced.
        """
        state = _look(self.store, path, size, expected)
        if state == "wrong" and not self.force:
            message = f"{path} has other bytes than it should: it was edited or is damaged"
            hint = "Move it away if you want to keep it, or replace it with --force."
            raise DestinationExistsError(message, hint=hint, path=path)
        return state

    def state_of(self, target: BundledFile) -> State:
        """Say whether a target is there already."""
        if target.is_staged:
            return "absent"
        return self.state(target.path, target.size, target.expected)

    def known(self, target: BundledFile) -> Blob | None:
        """Return the blob of the store that has all hashes of a target, if one is known.

        It is read only if the store knows its sha256, but not git's sha1, which must be right too.
        """
        blob = self.store.find("sha256", target.expected["sha256"])
        if blob is None or blob.size != target.size:
            return None
        for algorithm, value in target.expected.items():
            also = self.store.find(algorithm, value)
            if also is not None and also.digest == blob.digest:
                continue
            try:
                found = self.store.digest_of(self.store.path_of(blob.digest), (algorithm,))
            except (BlobNotFoundError, DamagedBlobError, FileSkippedError):
                return None
            if found.get(algorithm) != value:
                return None
        return blob

    def copies(self, missing: list[BundledFile], known: Blob | None) -> int:
        """Return how often the bytes of a content are going to be written."""
        near = self.near
        links = sum(near is not None and each.is_weight for each in missing)
        stored = 1 if links and known is None else 0
        if near is None or self.store.settings.keep_writable:
            return len(missing) + stored
        if known is not None and near.stat(known.digest) is None:
            return len(missing)  # a blob of another filesystem: every name of it is a copy
        return len(missing) - links + stored

    def bring(self, targets: Iterable[BundledFile], chunks: bundle.Chunks, job: Job) -> None:
        """Let a content of the bundle be at all its targets; it is read only if need be."""
        missing = [each for each in targets if self.state_of(each) != "right"]
        blob = self.known(missing[0]) if missing else None
        if blob is not None:
            try:
                self._hand_out(blob, missing)
                job.advance(blob.size)
                return
            except (DamagedBlobError, BlobNotFoundError) as error:
                _log.debug("read from the bundle because %s", error)
                missing = [each for each in missing if self.state_of(each) != "right"]
        if not missing:
            return
        try:
            self._take_in(missing, _counted(chunks(), job))
        except (DigestMismatchError, SizeMismatchError) as error:
            name = f"{bundle.BLOBS}/{missing[0].expected['sha256']}"
            raise BundleError(f"{name} of the bundle is damaged: {error}") from error

    def _take_in(self, missing: list[BundledFile], chunks: Iterator[bytes]) -> None:
        first = missing[0]
        if self.near is not None and any(each.is_weight for each in missing):
            blob = self.store.put_stream(
                chunks, size=first.size, expected=first.expected, pool=self.near
            )
            reached("import: blob stored")
            self._hand_out(blob, missing)
            return
        self._write(first, chunks)
        for each in missing[1:]:
            with open(first.path, "rb") as file:
                self._write(each, iter(lambda: file.read(CHUNK), b""))

    def _hand_out(self, blob: Blob, missing: list[BundledFile]) -> None:
        for target in missing:
            if target.is_weight and self.near is not None:
                self._place(blob, target)
            else:
                with self.store.open(blob.digest) as file:
                    self._write(target, iter(lambda: file.read(CHUNK), b""))

    def _place(self, blob: Blob, target: BundledFile) -> None:
        self._keep_other(target)
        try:
            link = self.store.place(
                blob.digest, target.path, whole=True, keep=True, batch=self.watch.batch,
                overwrite=self.force or target.path.is_symlink(),
            )  # fmt: skip
        except DestinationExistsError:
            if self.state_of(target) != "right":  # else somebody downloaded it meanwhile
                raise
        else:
            if link.kind != "hardlink":
                self.watch.copied(target.path)
        reached("import: blob placed")

    def _write(self, target: BundledFile, chunks: Iterator[bytes]) -> None:
        """Write a file of its own; it has its name when its bytes are verified and on the disk."""
        part = target.folder / _STAGE / "file"
        with bundle.new_file(part, "wb") as file:
            preallocate(file.fileno(), target.size)
            hasher = Hasher(target.expected, size=target.size)
            written = 0
            for chunk in chunks:
                written += len(chunk)
                if written > target.size:
                    message = f"{target.size} bytes were announced, but more arrived"
                    raise SizeMismatchError(message, expected=target.size, found=written)
                hasher.update(chunk)
                file.write(chunk)
            check_expected(hasher.finish(), target.expected, what="it")
            file.flush()
            os.fsync(file.fileno())
        reached("import: file written")
        os.makedirs(target.path.parent, exist_ok=True)
        self._keep_other(target)
        os.replace(part, target.path)
        reached("import: file named")

    def _keep_other(self, target: BundledFile) -> None:
        """Move a file that `--force` replaces to `bad/`: it may have been edited."""
        path = target.path
        if not self.force or path.is_symlink() or not path.exists():
            return
        if _look(self.store, path, target.size, target.expected) != "right":
            kept = move_to_bad(self.near or self.store.pools()[0], path, path.name)
            _log.warning("%s has other bytes than its name says; it is kept as %s", path, kept)


def _look(store: Store, path: Path, size: int, expected: dict[Algorithm, str]) -> State:
    for _ in range(_LOOKS):
        try:
            if os.stat(path).st_size != size:
                return "wrong"
            found = store.digest_of(path, tuple(expected))
        except FileNotFoundError:
            return "absent"  # or a symlink that leads nowhere: nothing is lost with it
        except FileChangedError:
            continue  # another process has linked or unlinked it while it was read
        except FileSkippedError:
            return "wrong"
        return "right" if dict(found.values).items() >= expected.items() else "wrong"
    return "wrong"


def _counted(chunks: Iterator[bytes], job: Job) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        job.advance(len(chunk))


# import: the plan, and the snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class RefChange:
    """A branch or tag of the bundle that says something else, or nothing, here."""

    repo: str
    ref: str
    commit: str
    former: str | None
    """The commit it names here, "" if that is none; None if it is not there."""
    is_kept: bool
    """It stays as it is: it exists, and moving it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """What an import would do. `execute` does it, once, while the bundle is open."""

    manifest: bundle.Manifest
    cache_dir: Path
    refs: list[RefChange]
    files: int
    """Files of all snapshots."""
    present_size: int
    """Bytes that the HF cache has already."""
    known_size: int
    """Bytes that the store has: they are not read from the bundle."""
    new_size: int
    """Bytes that only the bundle has."""
    replaced: list[Path]
    """Files with other bytes than their name says, to be replaced because that was asked for."""
    importer: Importer
    _missing: dict[str, list[BundledFile]]
    """By content: the files that are missing."""
    _source: bundle.Source

    @property
    def kept_refs(self) -> list[RefChange]:
        """The refs that stay at another commit than the bundle's."""
        return [each for each in self.refs if each.is_kept]

    def blobs_to_come(self) -> dict[str, dict[Algorithm, str]]:
        """Return what becomes a blob and the store does not have: sha256 -> all its hashes."""
        return {
            sha256: targets[0].expected
            for sha256, targets in self._missing.items()
            if self.importer.near is not None
            and any(each.is_weight for each in targets)
            and self.importer.known(targets[0]) is None
        }

    def missing(self) -> set[str]:
        """Return the contents, by sha256, that are not everywhere where they are wanted."""
        return set(self._missing)

    def execute(self, *, progress: Progress = silent) -> FileChanges:
        """Bring everything in. Interrupted at any point, the next import goes on."""
        store, watch = self.importer.store, self.importer.watch
        folders = [self.cache_dir / each.repo.folder_name for each in self.manifest.repos]
        keys = [f"hub import {os.path.realpath(folder)}" for folder in folders]
        with (
            store.key_locks.hold(keys, what="import a bundle", on_wait=store.on_wait),
            watch.batch_of(store, "hub import"),
            explained(self.cache_dir if folders else store.root),
            _staging(folders),
        ):
            with progress("Importing", self.known_size + self.new_size, "bytes") as job:
                for sha256, chunks in self._source.contents():
                    self.importer.bring(self._missing.get(sha256, ()), chunks, job)
            for each, folder in zip(self.manifest.repos, folders, strict=True):
                for commit, revision in each.revisions.items():
                    self._make_snapshot(folder, commit, revision)
                for change in self.refs:
                    if change.repo == str(each.repo) and not change.is_kept:
                        _write_ref(folder, change.ref, change.commit)
        return watch.changes()

    def _make_snapshot(self, folder: Path, commit: str, revision: bundle.Revision) -> None:
        """Let a snapshot have all files of a revision; a new one appears as a whole."""
        sync_directory(folder / "blobs")
        _publish_listing(folder, commit, revision)
        final = folder / "snapshots" / commit
        stage = folder / _STAGE / commit
        os.makedirs(stage)
        staged: list[str] = []
        for name, etag in revision.files.items():
            blob = folder / "blobs" / etag
            if not _has_file(self.importer, final / name, blob, self.manifest.blobs[etag]):
                _point(stage / name, final / name, blob)
                staged.append(name)
        for directory, _, _ in os.walk(stage, topdown=False):
            sync_directory(Path(directory))
        reached("import: snapshot staged")
        if not _rename_new(stage, final):
            for name in staged:
                os.makedirs((final / name).parent, exist_ok=True)
                os.replace(stage / name, final / name)
                reached("import: pointer made")
        sync_directory(final)
        sync_directory(final.parent)
        reached("import: snapshot made")


@contextmanager
def plan_import(
    store: Store,
    place: Path | BinaryIO,
    cache_dir: Path,
    *,
    update_refs: bool = False,
    force: bool = False,
    progress: Progress = silent,
) -> Iterator[ImportPlan]:
    """Open a bundle and plan to import it; nothing is written before `execute`.

    What the HF cache has already is hashed: DestinationExistsError if a file there is not what its
    name says, unless `force` allows to replace it. NoSpaceError if the rest will not fit.
    """
    with bundle.opened(place) as source:
        yield plan_source(
            store, source, cache_dir, update_refs=update_refs, force=force, progress=progress
        )


def plan_source(
    store: Store,
    source: bundle.Source,
    cache_dir: Path,
    *,
    update_refs: bool = False,
    force: bool = False,
    progress: Progress = silent,
) -> ImportPlan:
    """Plan to import from an open bundle, or whatever can be read as one."""
    manifest, cache = source.manifest, Path(os.path.abspath(cache_dir))
    watch = Watch(is_new=lambda _: True)
    importer = Importer(store=store, near=near_pool(store, cache), force=force, watch=watch)
    missing: dict[str, list[BundledFile]] = {}
    replaced: list[Path] = []
    present_size = known_size = new_size = needed = 0
    wanted = _targets(manifest, cache, store.settings.link_min_size)
    with progress("Looking for what is there", len(wanted)) as job:
        for sha256, targets in wanted.items():
            states = {each.path: importer.state_of(each) for each in targets}
            replaced += [path for path, state in states.items() if state == "wrong"]
            lacking = [each for each in targets if states[each.path] != "right"]
            size = targets[0].size
            if lacking:
                missing[sha256] = lacking
                known = importer.known(lacking[0])
                known_size += 0 if known is None else size
                new_size += size if known is None else 0
                needed += size * importer.copies(lacking, known)
            else:
                present_size += size
            job.advance()
    refs: list[RefChange] = []
    files = 0
    for each in manifest.repos:
        folder = cache / each.repo.folder_name
        refs += _ref_changes(each, folder, update=update_refs)
        for commit, revision in each.revisions.items():
            files += len(revision.files)
            for name, etag in revision.files.items():
                pointer = layout.pointer(folder, commit, name)
                # Raises now, not half-way, if the snapshot has another file there.
                _has_file(importer, pointer, folder / "blobs" / etag, manifest.blobs[etag])
    hint = "Free some space, or import into another HF cache with --cache-dir."
    need_room(cache, needed, "The import", hint=hint)
    return ImportPlan(
        manifest=manifest, cache_dir=cache, refs=refs, files=files, present_size=present_size,
        known_size=known_size, new_size=new_size, replaced=replaced, importer=importer,
        _missing=missing, _source=source,
    )  # fmt: skip


def _targets(
    manifest: bundle.Manifest, cache_dir: Path, min_size: int
) -> dict[str, list[BundledFile]]:
    """Return the files that each content becomes: a blob per repo, and tree listings."""
    found: dict[str, dict[Path, BundledFile]] = {}
    expected = manifest.expected()
    for each in manifest.repos:
        folder = cache_dir / each.repo.folder_name
        for commit, revision in each.revisions.items():
            for name, etag in revision.files.items():
                content = manifest.blobs[etag]
                path = folder / "blobs" / etag
                is_weight = RemoteFile(path=name, size=content.size, etag=etag).is_weight(min_size)
                targets = found.setdefault(content.sha256, {})
                if path not in targets or not is_weight:  # linked only if no name of it is edited
                    targets[path] = BundledFile(
                        folder=folder, path=path, size=content.size, is_weight=is_weight,
                        expected=expected[content.sha256],
                    )  # fmt: skip
            if revision.tree is not None and not (folder / "trees" / f"{commit}.json").exists():
                content = manifest.blobs[revision.tree]
                path = folder / _STAGE / "trees" / f"{commit}.json"
                found.setdefault(content.sha256, {})[path] = BundledFile(
                    folder=folder, path=path, size=content.size,
                    expected=expected[content.sha256], is_staged=True,
                )  # fmt: skip
    return {sha256: list(targets.values()) for sha256, targets in found.items()}


def _ref_changes(each: bundle.BundledRepo, folder: Path, *, update: bool) -> Iterator[RefChange]:
    for ref, commit in each.refs.items():
        path = folder.joinpath("refs", *ref.split("/"))
        former = layout.read_ref(path)
        if former is None and os.path.lexists(path):
            former = ""
        if former != commit:
            yield RefChange(
                repo=str(each.repo), ref=ref, commit=commit, former=former,
                is_kept=former is not None and not update,
            )  # fmt: skip


def _has_file(importer: Importer, pointer: Path, blob: Path, content: bundle.Content) -> bool:
    """Say whether a snapshot has a file already; an error if it has another in its place."""
    if layout.blob_behind(pointer) == blob:
        return True
    return importer.state(pointer, content.size, {"sha256": content.sha256}) == "right"


@contextmanager
def _staging(folders: Sequence[Path]) -> Iterator[None]:
    """Prepare repo folders, and clear up what this import or a killed one has staged."""
    for folder in folders:
        bundle.remove(folder / _STAGE)
        # huggingface_hub calls a repo without a folder of snapshots damaged.
        for name in ("snapshots", "blobs", _STAGE):
            os.makedirs(folder / name, exist_ok=True)
    reached("import: begun")
    try:
        yield
    finally:
        for folder in folders:
            bundle.remove(folder / _STAGE)
            with suppress(OSError):  # up to the first that is not empty
                for empty in (folder / "blobs", folder / "snapshots", folder):
                    os.rmdir(empty)


def _publish_listing(folder: Path, commit: str, revision: bundle.Revision) -> None:
    """Let the listing of a commit have its name, if it says what the manifest says."""
    path = folder / "trees" / f"{commit}.json"
    if revision.tree is None or path.exists():
        return
    listing = layout.read_listing(folder / _STAGE, commit)
    if listing is None:
        raise BundleError(f"The tree listing of {commit} cannot be used")
    for file in listing:
        if revision.files.get(file.path, file.etag) != file.etag:
            message = f"The tree listing of {commit} has another {file.path!r} than the bundle"
            raise BundleError(message)
    os.makedirs(path.parent, exist_ok=True)
    os.replace(folder / _STAGE / "trees" / path.name, path)
    sync_directory(path.parent)
    reached("import: listing named")


def _point(path: Path, final: Path, blob: Path) -> None:
    """Make a pointer at `path` that is right when it is at `final`: as huggingface_hub does."""
    os.makedirs(path.parent, exist_ok=True)
    try:
        os.symlink(os.path.relpath(blob, final.parent), path)
    except (OSError, NotImplementedError) as error:
        _log.debug("copied because there are no symlinks: %s", error)
        shutil.copyfile(blob, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _rename_new(stage: Path, final: Path) -> bool:
    """Rename a folder to a name that is free; False if something is there."""
    if os.path.lexists(final):
        return False
    try:
        os.rename(stage, final)
    except OSError:
        if os.path.isdir(final):  # huggingface_hub was faster
            return False
        raise
    return True


def _write_ref(folder: Path, ref: str, commit: str) -> None:
    """Let a branch or tag name a snapshot, which is whole by now."""
    path = folder.joinpath("refs", *ref.split("/"))
    part = folder / _STAGE / "ref"
    bundle.write_file(part, commit.encode("ascii"))
    os.makedirs(path.parent, exist_ok=True)
    reached("import: ref staged")
    os.replace(part, path)
    sync_directory(path.parent)
    reached("import: ref written")
