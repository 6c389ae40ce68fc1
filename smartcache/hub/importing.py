"""Import: the repos of a bundle come into an HF cache, each byte verified before it has a name.

Contents first: each becomes a blob of the store that is placed at `<repo>/blobs/<etag>`, or a file
of its own there, once its hashes are those of all its names. Snapshots follow when all they point
at is there, and refs last. Whatever is interrupted leaves only whole files; the next import finds
them and goes on. Nothing is written outside the repos' folders and the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from smartcache.hub import tree
from smartcache.hub.bundle import BundledRepo, Manifest
from smartcache.hub.bundle_reading import Source, opened
from smartcache.hub.import_steps import (
    Importer,
    Target,
    in_the_way,
    known_blob,
    listing_path,
    look,
    near_store,
)
from smartcache.hub.outcome import FileChanges, Watch
from smartcache.hub.records import RemoteFile
from smartcache.hub.targets import CacheTarget
from smartcache.progress import Progress, silent
from smartcache.store import Blob, Owner, Store
from smartcache.system import Algorithm, need_room


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


@dataclass(slots=True, kw_only=True)
class ImportPlan:
    """What an import would do. `execute` does it, once, while the bundle is open."""

    manifest: Manifest
    cache_dir: Path
    refs: list[RefChange]
    files: int = 0
    """Files of all snapshots."""
    present_size: int = 0
    """Bytes that the HF cache has already."""
    known_size: int = 0
    """Bytes that the store has: they are not read from the bundle."""
    new_size: int = 0
    """Bytes that only the bundle has."""
    replaced: list[Path] = field(default_factory=list)
    """Files with other bytes than their name says, to be replaced because that was asked for."""
    _targets: dict[str, list[Target]] = field(default_factory=dict)
    """By content: the files that are missing."""
    _store: Store
    _source: Source
    _force: bool = False

    @property
    def kept_refs(self) -> list[RefChange]:
        """The refs that stay at another commit than the bundle's."""
        return [each for each in self.refs if each.is_kept]

    def blobs_to_come(self) -> dict[str, dict[Algorithm, str]]:
        """Return what becomes a blob and the store does not have: sha256 -> all its hashes."""
        if near_store(self._store, self.cache_dir) is None:
            return {}
        return {
            sha256: targets[0].expected
            for sha256, targets in self._targets.items()
            if any(each.is_weight for each in targets)
            and known_blob(self._store, targets[0].expected, targets[0].size) is None
        }

    def missing(self) -> set[str]:
        """Return the contents, by sha256, that are not everywhere where they are wanted."""
        return set(self._targets)

    def execute(self, *, progress: Progress = silent) -> FileChanges:
        """Bring everything in. Interrupted at any point, the next import goes on."""
        watch = Watch(is_new=lambda _: True)
        near = near_store(self._store, self.cache_dir)
        importer = Importer(manifest=self.manifest, store=self._store, near=near, force=self._force)
        folders = [self.cache_dir / each.repo.folder_name for each in self.manifest.repos]
        keys = [f"hub import {os.path.realpath(folder)}" for folder in folders]
        on_wait = self._store.volume.on_wait
        with (
            self._store.key_locks.hold(keys, what="import a bundle", on_wait=on_wait),
            watch.batches(self._store, "hub import"),
            importer.working_in(folders),
        ):
            with progress("Importing", self.known_size + self.new_size, "bytes") as job:
                for sha256, chunks in self._source.contents():
                    importer.bring(self._targets.get(sha256, ()), chunks, job)
            for each in self.manifest.repos:
                self._finish(importer, each)
        return watch.changes()

    def _finish(self, importer: Importer, each: BundledRepo) -> None:
        folder = self.cache_dir / each.repo.folder_name
        for commit, revision in each.revisions.items():
            importer.make_snapshot(folder, commit, revision)
            etags = sorted(revision.etags)
            linked = [(folder / "blobs" / etag, self.manifest.blobs[etag].sha256) for etag in etags]
            importer.own(_owner(each, self.cache_dir, commit), linked)
        for change in self.refs:
            if change.repo == str(each.repo) and not change.is_kept:
                importer.write_ref(folder, change.ref, change.commit)


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
    with opened(place) as source:
        yield plan_source(
            store, source, cache_dir, update_refs=update_refs, force=force, progress=progress
        )


def plan_source(
    store: Store,
    source: Source,
    cache_dir: Path,
    *,
    update_refs: bool = False,
    force: bool = False,
    progress: Progress = silent,
) -> ImportPlan:
    """Plan to import from an open bundle, or whatever can be read as one."""
    cache = Path(os.path.abspath(cache_dir))
    plan = ImportPlan(
        manifest=source.manifest, cache_dir=cache, refs=[], _store=store, _source=source,
        _force=force,
    )  # fmt: skip
    for each in source.manifest.repos:
        plan.refs += _ref_changes(each, cache / each.repo.folder_name, update=update_refs)
        plan.files += sum(len(revision.files) for revision in each.revisions.values())
    _find_missing(plan, store, progress)
    return plan


def _owner(each: BundledRepo, cache_dir: Path, commit: str) -> Owner:
    return CacheTarget(cache_dir=cache_dir, repo=each.repo, commit=commit).owner


def _find_missing(plan: ImportPlan, store: Store, progress: Progress) -> None:
    """Sort out what is there, what the store has and what is new, and make sure that it fits."""
    near = near_store(store, plan.cache_dir)
    wanted = _targets(plan.manifest, plan.cache_dir, store.settings.link_min_size)
    needed = 0
    with progress("Looking for what is there", len(wanted)) as job:
        for sha256, targets in wanted.items():
            missing = [each for each in targets if _is_missing(store, each, plan)]
            size = targets[0].size
            if not missing:
                plan.present_size += size
            else:
                plan._targets[sha256] = missing  # noqa: SLF001 - its own module
                known = known_blob(store, missing[0].expected, size)
                plan.known_size += 0 if known is None else size
                plan.new_size += size if known is None else 0
                needed += size * _copies(missing, near, known)
            job.advance()
    _look_at_pointers(plan, store)
    hint = "Free some space, or import into another HF cache with --cache-dir."
    need_room(plan.cache_dir, needed, "The import", hint=hint)


def _copies(missing: list[Target], near: Store | None, known: Blob | None) -> int:
    """Return how often the bytes of a content are going to be written."""
    blobs = sum(near is not None and each.is_weight for each in missing)
    if near is None or near.settings.keep_writable:
        return len(missing) + (1 if blobs and known is None else 0)
    if known is not None and near.find_here("blake3", known.digest) is None:
        return len(missing)  # a blob of another volume: every name of it is a copy
    return len(missing) - blobs + (1 if blobs and known is None else 0)


def _is_missing(store: Store, target: Target, plan: ImportPlan) -> bool:
    state = "absent" if target.is_staged else look(store, target)
    if state == "wrong":
        if not plan._force:  # noqa: SLF001 - its own module
            raise in_the_way(target.path)
        plan.replaced.append(target.path)
    return state != "right"


def _look_at_pointers(plan: ImportPlan, store: Store) -> None:
    """Raise now, not half-way, if a snapshot has another file in the place of one of ours."""
    importer = Importer(
        manifest=plan.manifest,
        store=store,
        near=None,
        force=plan._force,  # noqa: SLF001 - ours
    )
    for each in plan.manifest.repos:
        folder = plan.cache_dir / each.repo.folder_name
        for commit, revision in each.revisions.items():
            for name, etag in revision.files.items():
                importer.has_pointer(folder, commit, name, etag)


def _targets(manifest: Manifest, cache_dir: Path, min_size: int) -> dict[str, list[Target]]:
    """Return the files that each content becomes: a blob per repo, and tree listings."""
    found: dict[str, dict[Path, Target]] = {}
    expected = manifest.expected()
    for each in manifest.repos:
        folder = cache_dir / each.repo.folder_name
        for commit, revision in each.revisions.items():
            owner = _owner(each, cache_dir, commit)
            for name, etag in revision.files.items():
                content = manifest.blobs[etag]
                path = folder / "blobs" / etag
                file = RemoteFile(path=name, size=content.size, etag=etag)
                is_weight = file.is_weight(min_size)
                targets = found.setdefault(content.sha256, {})
                if path not in targets or not is_weight:  # linked only if no name of it is edited
                    targets[path] = Target(
                        path=path, size=content.size, expected=expected[content.sha256],
                        is_weight=is_weight, owner=owner,
                    )  # fmt: skip
            if revision.tree is not None and not (folder / "trees" / f"{commit}.json").exists():
                content = manifest.blobs[revision.tree]
                path = listing_path(folder, commit)
                found.setdefault(content.sha256, {})[path] = Target(
                    path=path, size=content.size, expected=expected[content.sha256], is_staged=True
                )
    return {sha256: list(targets.values()) for sha256, targets in found.items()}


def _ref_changes(each: BundledRepo, folder: Path, *, update: bool) -> Iterator[RefChange]:
    for ref, commit in each.refs.items():
        path = folder.joinpath("refs", *ref.split("/"))
        former = tree.read_ref(path)
        if former is None and os.path.lexists(path):
            former = ""
        if former != commit:
            yield RefChange(
                repo=str(each.repo), ref=ref, commit=commit, former=former,
                is_kept=former is not None and not update,
            )  # fmt: skip
