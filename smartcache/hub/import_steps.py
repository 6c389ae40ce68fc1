"""The steps of an import, each of which leaves the HF cache right for whoever looks at it.

A file, a snapshot or a ref is made in a folder of ours beside the repo's own, brought to the disk,
and gets its name by one rename (blobs of the store by one link). So there is no moment at which a
pointer leads to bytes that are missing or were not verified.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smartcache.errors import (
    BlobNotFoundError,
    BundleError,
    DamagedBlobError,
    DestinationExistsError,
    DigestMismatchError,
    FileChangedError,
    FileSkippedError,
    SizeMismatchError,
)
from smartcache.hub import tree
from smartcache.hub.bundle import BLOBS, Manifest, Revision
from smartcache.hub.bundle_reading import Chunks
from smartcache.hub.bundle_writing import WRITING, remove, write_all
from smartcache.progress import Job
from smartcache.store import CHUNK, Blob, Owner, Store, explained
from smartcache.system import Algorithm, Hasher, preallocate, reached, sync_directory

_log = logging.getLogger(__name__)
_LOOKS = 20
_STAGE = ".smartcache-import"
"""In a repo's folder: what has no name yet. A leftover one is removed by the next import."""

State = Literal["absent", "right", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A file that a content of the bundle is to become."""

    path: Path
    size: int
    expected: dict[Algorithm, str]
    """Every hash the content must have, by all its names: sha256, and maybe git's sha1."""
    is_weight: bool = False
    """It may be a link to a blob: large, and no kind that programs edit in place."""
    owner: Owner | None = None
    """Who keeps the blob alive."""
    is_staged: bool = False
    """It waits in a folder of ours, which the import begins by emptying: never there before."""


def stage_of(folder: Path) -> Path:
    """Return where an import makes the files of a repo's folder."""
    return folder / _STAGE


def near_store(store: Store, cache_dir: Path) -> Store | None:
    """Return the volume on the filesystem of an HF cache, None if there is none."""
    try:
        return store.volume_of(cache_dir)
    except FileSkippedError:
        return None


def look(store: Store, target: Target) -> State:
    """Say whether a file is there already with the right bytes; its hash is remembered."""
    for _ in range(_LOOKS):
        try:
            if os.stat(target.path).st_size != target.size:
                return "wrong"
            found = store.digest_of(target.path, tuple(target.expected))
        except FileNotFoundError:
            return "absent"  # or a symlink that leads nowhere: nothing is lost with it
        except FileChangedError:
            continue  # another process has linked or unlinked it while it was read
        except FileSkippedError:
            return "wrong"
        return "right" if dict(found.values).items() >= target.expected.items() else "wrong"
    return "wrong"


def known_blob(store: Store, expected: dict[Algorithm, str], size: int) -> Blob | None:
    """Return the blob of the store that has all these hashes, if one is known.

    It is read only if the store knows its sha256, but not git's sha1, which must be right too.
    """
    blob = store.find("sha256", expected["sha256"])
    if blob is None or blob.size != size:
        return None
    for algorithm, value in expected.items():
        also = store.find(algorithm, value)
        if also is not None and also.digest == blob.digest:
            continue
        try:
            found = store.digest_of(store.path_of(blob.digest), (algorithm,))
        except (BlobNotFoundError, DamagedBlobError, FileSkippedError):
            return None
        if found.get(algorithm) != value:
            return None
    return blob


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """Writes into repo folders. `force` replaces files that are not what their name says."""

    manifest: Manifest
    store: Store
    near: Store | None
    """The volume on the filesystem of the HF cache; without one, files are no blobs."""
    force: bool = False

    @contextmanager
    def working_in(self, folders: Sequence[Path]) -> Iterator[None]:
        """Prepare repo folders, and clear up what this import or a killed one has staged."""
        with explained(folders[0].parent if folders else self.store.root):
            for folder in folders:
                remove(stage_of(folder))
                # huggingface_hub calls a repo without a folder of snapshots damaged.
                for name in ("snapshots", "blobs", _STAGE):
                    os.makedirs(folder / name, exist_ok=True)
            reached("import: begun")
            try:
                yield
            finally:
                for folder in folders:
                    remove(stage_of(folder))
                    with suppress(OSError):  # up to the first that is not empty
                        for empty in (folder / "blobs", folder / "snapshots", folder):
                            os.rmdir(empty)

    # contents

    def bring(self, targets: Iterable[Target], chunks: Chunks, job: Job) -> None:
        """Let a content of the bundle be at all its targets; it is read only if need be."""
        missing = [each for each in targets if self._is_missing(each)]
        if not missing:
            return
        first = missing[0]
        known = known_blob(self.store, first.expected, first.size)
        if known is not None:
            try:
                self._hand_out(known, missing, job)
                return
            except (DamagedBlobError, BlobNotFoundError) as error:
                _log.debug("read from the bundle because %s", error)
                missing = [each for each in missing if self._is_missing(each)]
        name = f"{BLOBS}/{first.expected['sha256']}"
        try:
            self._take_in(missing, _counted(chunks(), job))
        except (DigestMismatchError, SizeMismatchError) as error:
            raise BundleError(f"{name} of the bundle is damaged: {error}") from error

    def _is_missing(self, target: Target) -> bool:
        state = look(self.store, target)
        if state == "wrong" and not self.force:
            raise in_the_way(target.path)
        return state != "right"

    def _take_in(self, missing: list[Target], chunks: Iterator[bytes]) -> None:
        first = missing[0]
        if self.near is not None and any(each.is_weight for each in missing):
            blob = self.near.put_stream(chunks, size=first.size, expected=first.expected)
            reached("import: blob stored")
            self._hand_out(blob, missing, None)
            return
        self._write(first, chunks)
        for each in missing[1:]:
            with open(first.path, "rb") as file:
                self._write(each, iter(lambda: file.read(CHUNK), b""))

    def _hand_out(self, blob: Blob, missing: list[Target], job: Job | None) -> None:
        for target in missing:
            if target.is_weight and self.near is not None:
                self._place(blob, target)
            else:
                with self.store.open(blob.digest) as file:
                    self._write(target, iter(lambda: file.read(CHUNK), b""))
        if job is not None:
            job.advance(blob.size)

    def _place(self, blob: Blob, target: Target) -> None:
        self._keep_other(target)
        try:
            self.store.place(
                blob.digest, target.path, whole=True, keep=True, owner=target.owner,
                overwrite=self.force or target.path.is_symlink(),
            )  # fmt: skip
        except DestinationExistsError:
            if look(self.store, target) != "right":  # else somebody downloaded it meanwhile
                raise
        reached("import: blob placed")

    def _write(self, target: Target, chunks: Iterator[bytes]) -> None:
        """Write a file of its own; it has its name when its bytes are verified and on the disk."""
        part = stage_of(_repo_folder(target.path)) / "file"
        descriptor = os.open(part, WRITING | os.O_TRUNC, 0o644)
        try:
            preallocate(descriptor, target.size)
            hasher = Hasher(target.expected, size=target.size)
            written = 0
            for chunk in chunks:
                written += len(chunk)
                if written > target.size:
                    message = f"{target.size} bytes were announced, but more arrived"
                    raise SizeMismatchError(message, expected=target.size, found=written)
                hasher.update(chunk)
                write_all(descriptor, chunk)
            _check(hasher.finish().values, target.expected)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reached("import: file written")
        os.makedirs(target.path.parent, exist_ok=True)
        self._keep_other(target)
        os.replace(part, target.path)
        reached("import: file named")

    def _keep_other(self, target: Target) -> None:
        """Move a file that `--force` replaces to `bad/`: it may have been edited."""
        path = target.path
        if not self.force or path.is_symlink() or not path.exists():
            return
        if look(self.store, target) != "right":
            kept = (self.near or self.store).volume.layout.new_bad(path.name)
            shutil.move(path, kept)
            _log.warning("%s has other bytes than its name says; it is kept as %s", path, kept)

    # snapshots

    def make_snapshot(self, folder: Path, commit: str, revision: Revision) -> None:
        """Let a snapshot have all files of a revision; a new one appears as a whole."""
        sync_directory(folder / "blobs")
        self._publish_listing(folder, commit, revision)
        final = folder / "snapshots" / commit
        stage = stage_of(folder) / commit
        os.makedirs(stage)
        staged = [
            name
            for name, etag in revision.files.items()
            if not self.has_pointer(folder, commit, name, etag)
        ]
        for name in staged:
            self._point(stage / name, final / name, folder / "blobs" / revision.files[name])
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

    def has_pointer(self, folder: Path, commit: str, name: str, etag: str) -> bool:
        """Say whether a snapshot has a file already; an error if it has another in its place."""
        path = tree.pointer(folder, commit, name)
        if tree.blob_behind(path) == folder / "blobs" / etag:
            return True
        content = self.manifest.blobs[etag]
        expected: dict[Algorithm, str] = {"sha256": content.sha256}
        state = look(self.store, Target(path=path, size=content.size, expected=expected))
        if state == "wrong" and not self.force:
            raise in_the_way(path)
        return state == "right"

    def _point(self, path: Path, final: Path, blob: Path) -> None:
        """Make a pointer at `path` that is right when it is at `final`: as huggingface_hub does."""
        os.makedirs(path.parent, exist_ok=True)
        try:
            os.symlink(os.path.relpath(blob, final.parent), path)
        except (OSError, NotImplementedError) as error:
            _log.debug("copied because there are no symlinks: %s", error)
            _copy(blob, path)

    def _publish_listing(self, folder: Path, commit: str, revision: Revision) -> None:
        path = folder / "trees" / f"{commit}.json"
        if revision.tree is None or path.exists():
            return
        staged = listing_path(folder, commit)
        check_listing(stage_of(folder), commit, revision)
        os.makedirs(path.parent, exist_ok=True)
        os.replace(staged, path)
        sync_directory(path.parent)
        reached("import: listing named")

    def own(self, owner: Owner, files: Iterable[tuple[Path, str]]) -> None:
        """Let a snapshot keep the blobs that its files, given with their sha256, are links of."""
        if self.near is None:
            return
        digests = []
        for path, sha256 in files:
            blob = self.near.find("sha256", sha256)
            if blob is not None and any(link.path == path for link in self.near.links_of(blob)):
                digests.append(blob.digest)
        if digests:
            self.near.own(owner, digests)

    def write_ref(self, folder: Path, ref: str, commit: str) -> None:
        """Let a branch or tag name a snapshot, which is whole by now."""
        path = folder.joinpath("refs", *ref.split("/"))
        part = stage_of(folder) / "ref"
        with open(part, "w", encoding="ascii") as file:
            file.write(commit)
            file.flush()
            os.fsync(file.fileno())
        os.makedirs(path.parent, exist_ok=True)
        reached("import: ref staged")
        os.replace(part, path)
        sync_directory(path.parent)
        reached("import: ref written")


def listing_path(folder: Path, commit: str) -> Path:
    """Return where a tree listing waits until its snapshot is made."""
    return stage_of(folder) / "trees" / f"{commit}.json"


def check_listing(folder: Path, commit: str, revision: Revision) -> None:
    """Raise BundleError unless a tree listing can be read and says what the manifest says."""
    listing = tree.read_listing(folder, commit)
    if listing is None:
        raise BundleError(f"The tree listing of {commit} cannot be used")
    for file in listing:
        if revision.files.get(file.path, file.etag) != file.etag:
            message = f"The tree listing of {commit} has another {file.path!r} than the bundle"
            raise BundleError(message)


def in_the_way(path: Path) -> DestinationExistsError:
    """Return the error for a file that is not what its name says."""
    return DestinationExistsError(
        f"{path} has other bytes than it should: it was edited or is damaged",
        hint="Move it away if you want to keep it, or replace it with --force.",
        path=path,
    )


def _check(found: Mapping[Algorithm, str], expected: dict[Algorithm, str]) -> None:
    for name, value in expected.items():
        if found[name] != value:
            message = f"it has {name} {found[name]}, but {value} was announced"
            raise DigestMismatchError(message, algorithm=name, expected=value, found=found[name])


def _counted(chunks: Iterator[bytes], job: Job) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        job.advance(len(chunk))


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


def _copy(source: Path, target: Path) -> None:
    from shutil import copyfile

    copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def _repo_folder(path: Path) -> Path:
    """Return the folder of the repo that a blob or a staged listing is in."""
    return next(each.parent for each in path.parents if each.name in ("blobs", _STAGE))
