"""What works at the places smartcache uses, and what will be slow or unsafe there and why.

Abilities are tried, not looked up; trying leaves nothing behind and makes no store. What is found
is said in plain words, with a hint where something can be done about it.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from smartcache import __version__
from smartcache.errors import ONLY_THIS_PACKAGE, NoSpaceError, StoreError, StoreUnwritableError
from smartcache.sizes import format_size
from smartcache.store.catalog import DAMAGED, Scope
from smartcache.store.layout import Layout, pool_root
from smartcache.system.filesystems import (
    Abilities,
    Family,
    Mount,
    filesystem_id,
    free_bytes,
    mount_of,
    nearest_existing,
    probe,
)
from smartcache.system.kernel import effective_user

if TYPE_CHECKING:
    from smartcache.store.store import Store

Level = Literal["ok", "note", "warning", "problem"]
Role = Literal["store", "folder"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")
LITTLE_SPACE = 1_000_000_000
_PACKAGES = ("blake3", "xxhash", "huggingface_hub", "hf_xet", "safetensors", "filelock", "torch")
_ELSEWHERE = "Set SMARTCACHE_HOME to a directory on a local disk."
_FEW = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know, and what can be done about it."""

    level: Level
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is known of the store's root, or of a folder."""

    path: Path
    role: Role
    is_present: bool
    mount: Mount
    filesystem: str | None
    """The lasting id of the filesystem, if it has one."""
    abilities: Abilities | None
    """None: nothing could be tried, because nothing can be written here."""
    free: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The store first, then the folders asked about; None is the version of what is missing."""

    places: tuple[Place, ...]
    versions: dict[str, str | None]


def examine(root: Path, others: Iterable[Path] = ()) -> Diagnosis:
    """Look at the root of a store (or pool) and at folders it may share files with.

    Neither need exist.
    """
    layout = Layout(Path(os.path.abspath(root)))
    store = _place(layout.root, "store", _about_store(layout))
    folders = (Path(os.path.abspath(other)) for other in others)
    places = (_place(path, "folder", _about_distance(store, path)) for path in folders)
    return Diagnosis(places=(store, *places), versions=_versions())


def about_damage(store: Store) -> Iterator[Finding]:
    """Name the model files of known folders that were damaged when a scan last looked."""
    numbers = [store.catalog.folder_number(folder.path) for folder in store.folders()]
    scope = Scope(tuple(number for number in numbers if number is not None))
    damaged = store.catalog.marked(scope, DAMAGED)
    found = (Path(os.fsdecode(path)) for _, _, path, _ in damaged)
    paths = [path for path in found if path.exists()]
    if paths:
        more = f" and {len(paths) - _FEW:,} more" if len(paths) > _FEW else ""
        text = f"Damaged model files: {', '.join(map(str, paths[:_FEW]))}{more}."
        yield Finding("warning", text, "Download again to repair.")


def other_package() -> Iterator[Finding]:
    """Say if the package that has the name `smartcache` on PyPI, and is not this one, is here."""
    with suppress(metadata.PackageNotFoundError):
        found = metadata.distribution("smartcache")
        text = (
            f"Another package, smartcache {found.version}, is installed here too. It has the"
            " same import name: Python loads the one that was installed last."
        )
        yield Finding("warning", text, ONLY_THIS_PACKAGE)


def _place(path: Path, role: Role, known: Iterable[Finding]) -> Place:
    existing = nearest_existing(path)
    mount, filesystem, free = mount_of(existing), filesystem_id(existing), free_bytes(existing)
    is_store = role == "store"
    abilities, findings = None, list(known)
    try:
        abilities = probe(existing if existing.is_dir() else existing.parent)
        if not abilities.lease:
            findings.append(_NO_LEASE)
        if is_store and effective_user() == 0 and not abilities.reflink:
            findings.append(_IS_ROOT)
    except NoSpaceError:
        findings.append(Finding("problem", f"{path} cannot be used: the filesystem is full."))
    except StoreUnwritableError as error:
        why = f"{mount.point} is mounted read-only" if mount.is_read_only else error.message
        hint = f"Choose another, or change its permissions. {_ELSEWHERE}" if is_store else ""
        level: Level = "problem" if is_store else "warning"
        findings.append(Finding(level, f"{path} cannot be used: {why}.", hint))
    if mount.family in _FAMILIES and (is_store or mount.family != "memory"):
        level, text = _FAMILIES[mount.family]
        hint = _ELSEWHERE if is_store and level == "warning" else ""
        findings.append(Finding(level, text.format(mount.fstype), hint))
    if not mount.has_hard_links:
        text = f"No hard links on {mount.fstype}: every file is a copy, and nothing is shared."
        findings.append(Finding("warning", text, "Use ext4, xfs, btrfs or zfs."))
    if filesystem.startswith("dev:"):
        findings.append(_NO_ID)
    if free < LITTLE_SPACE:
        hint = "Run 'smartcache prune'." if is_store else ""
        findings.append(Finding("warning", f"Only {format_size(free)} is free here.", hint))
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    return Place(
        path=path, role=role, is_present=existing == path, mount=mount, abilities=abilities,
        filesystem=None if _NO_ID in findings else filesystem, free=free, findings=tuple(findings),
    )  # fmt: skip


def _about_store(layout: Layout) -> Iterator[Finding]:
    # pathlib raises where a folder may not be entered
    if not (os.path.lexists(layout.blobs) or os.path.lexists(layout.format)):
        yield Finding("ok", "There is no store here yet; it is made when first used.")
        return
    try:
        layout.secure()
        if layout.exists():  # a pool has no format
            layout.check()
    except StoreError as error:
        yield Finding("problem", f"{error.message}.", error.hint)
    except OSError as error:
        yield Finding("problem", f"{layout.root}: {error.strerror or error}.")
    for folder in layout.root.parents:
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"Anyone can write to {folder} and could put another store in place of yours."
            yield Finding("warning", text, f"chmod +t {folder}")


def _about_distance(store: Place, path: Path) -> Iterator[Finding]:
    """Say whether files of a folder can be linked with those of the store."""
    here = os.stat(nearest_existing(path)).st_dev
    there = os.stat(nearest_existing(store.path)).st_dev
    point = mount_of(path).point
    if here != there:
        text = f"{path} is on another filesystem than the store: files are copied, not linked."
        yield Finding("warning", text, f"A pool there ({pool_root(point)}) can link them.")
    elif point != store.mount.point:
        text = (
            f"{path} is on the store's filesystem but in another mount ({point}): the kernel does"
            " not link across mounts, so files are copied."
        )
        yield Finding("warning", text, "Reach both through one mount.")


def _versions() -> dict[str, str | None]:
    """Return the versions of what matters; packages are looked up, never imported."""
    versions: dict[str, str | None] = {
        "smartcache": __version__,
        "python": platform.python_version(),
        "sqlite3": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()}",
    }
    for name in _PACKAGES:
        versions[name] = None
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


_NO_ID = Finding(
    "note", "This filesystem has no permanent id: remembered hashes are lost at the next boot."
)
_NO_LEASE = Finding(
    "warning",
    "No leases here: a program that writes a file while it is deduplicated is noticed only"
    " afterwards, by the times of the file.",
    "Close the programs that write here before 'smartcache dedup'.",
)
_IS_ROOT = Finding(
    "warning",
    "You are root, who can write read-only files, and this filesystem has no reflinks: a program"
    " that changes a linked file in place changes the blob.",
    "Work as an ordinary user, or run 'smartcache verify' regularly.",
)
_FAMILIES: dict[Family, tuple[Level, str]] = {
    "network": ("warning", "A network filesystem ({}): slow, and safe for one host at a time."),
    "overlay": ("warning", "An overlay ({}), as in containers: a changed file is copied first."),
    "fuse": ("warning", "A filesystem in user space ({}): as good as the program that serves it."),
    "wsl": ("warning", "A Windows drive ({}): slow, and read-only may not protect."),
    "memory": ("warning", "In memory ({}): empty after a reboot."),
    "unknown": ("note", "An unknown filesystem ({}): nobody has tried what a crash does there."),
}
