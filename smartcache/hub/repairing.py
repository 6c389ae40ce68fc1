"""Take damaged files of HF caches out of the way, so that the next download fetches them again.

The pointers to a damaged file go first, then the file moves to `bad/` of the store. No bytes are
deleted. A file on a filesystem without a volume stays where it is, and so do its pointers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from smartcache.errors import FileSkippedError
from smartcache.hub.repos import CachedRepo
from smartcache.hub.verifying import Finding
from smartcache.store import Layout, Store
from smartcache.system import StatKey, reached


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedFile:
    """A file to be moved away, and the names that lead to it."""

    file: Path
    """The file itself, no symlink."""
    key: StatKey
    bad: Path
    """Where it goes."""
    pointers: tuple[Path, ...]
    """Symlinks to be removed: of snapshots, and of blobs that lead to a shared store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """What was done."""

    moved: tuple[tuple[Path, Path], ...]
    unlinked: int
    failures: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What `hub verify --repair` would do. Nothing is freed: damaged files are kept."""

    files: tuple[DamagedFile, ...]
    pointers: tuple[Path, ...]
    """Symlinks to be removed that lead nowhere, or to the bytes of another file."""
    warnings: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.files or self.pointers)

    def execute(self) -> RepairResult:
        """Move the files and remove the pointers, each looked at again right before."""
        return _execute(self)


def plan_repair(
    store: Store, repos: Iterable[CachedRepo], findings: Iterable[Finding]
) -> RepairPlan:
    """Plan to take away what is damaged: mismatches, wrong blobs and pointers to nothing."""
    repos = list(repos)
    leading = _symlinks_to_files(repos)
    caches = {os.path.realpath(repo.cache_dir) for repo in repos}
    files: dict[Path, DamagedFile] = {}
    pointers: dict[Path, None] = {}
    warnings: dict[str, None] = {}
    for finding in findings:
        if finding.kind == "wrong blob" or (finding.kind == "dangling" and _is_here(finding.file)):
            pointers[finding.file] = None
        if finding.kind != "mismatch":
            continue
        file = Path(os.path.realpath(finding.file))
        if file in files:
            continue
        is_in_cache = any(file.is_relative_to(cache) for cache in caches)
        if not is_in_cache and file.name != finding.expected:
            # Whoever can write a cache can let a name in it lead anywhere: the name goes alone.
            pointers.update(dict.fromkeys(leading.get(file, ())))
            continue
        try:
            layout = store.volume_of(file).volume.layout
            key = StatKey.of(os.stat(file))
        except FileSkippedError:
            warnings[f"{file} is on a filesystem without a volume: move it away yourself"] = None
            continue
        except FileNotFoundError:
            continue
        names = tuple(leading.get(file, ()))
        bad = _unused(layout, finding)
        files[file] = DamagedFile(file=file, key=key, bad=bad, pointers=names)
    return RepairPlan(
        files=tuple(files.values()), pointers=tuple(pointers), warnings=tuple(warnings)
    )


def _is_here(pointer: Path) -> bool:
    """Say whether the folder a pointer leads to exists: else a drive may be away, not a blob."""
    try:
        target = os.path.join(pointer.parent, os.readlink(pointer))
    except OSError:
        return False
    return os.path.isdir(os.path.dirname(target))


def _unused(layout: Layout, finding: Finding) -> Path:
    return layout.new_bad(finding.expected or finding.file.name)


def _symlinks_to_files(repos: Iterable[CachedRepo]) -> dict[Path, list[Path]]:
    """Return the symlinks of repos by the file they lead to in the end, pointers first."""
    leading: dict[Path, list[Path]] = {}
    for repo in repos:
        blobs = os.path.join(repo.folder, "blobs", "")
        for name in sorted(repo.targets, key=lambda each: each.startswith(blobs)):
            leading.setdefault(Path(os.path.realpath(name)), []).append(Path(name))
    return leading


def _execute(plan: RepairPlan) -> RepairResult:
    moved: list[tuple[Path, Path]] = []
    failures: list[tuple[Path, str]] = []
    unlinked = sum(_unlink(each, failures) for each in plan.pointers)
    for damaged in plan.files:
        try:
            if StatKey.of(os.lstat(damaged.file)) != damaged.key:
                failures.append((damaged.file, "it changed in the meantime"))
                continue
        except FileNotFoundError:
            continue
        for name in damaged.pointers:
            unlinked += _unlink(name, failures)
            reached("hub repair: pointer removed")
        try:
            os.rename(damaged.file, damaged.bad)
        except OSError as error:
            failures.append((damaged.file, error.strerror or str(error)))
            continue
        reached("hub repair: file moved")
        moved.append((damaged.file, damaged.bad))
    return RepairResult(moved=tuple(moved), unlinked=unlinked, failures=tuple(failures))


def _unlink(name: Path, failures: list[tuple[Path, str]]) -> int:
    """Remove a symlink; what has become something else meanwhile stays."""
    try:
        if not name.is_symlink():
            return 0
        name.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        failures.append((name, error.strerror or str(error)))
        return 0
    return 1
