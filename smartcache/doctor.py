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
from typing import Literal

from smartcache import __version__
from smartcache.errors import (
    ONLY_THIS_PACKAGE,
    NoSpaceError,
    StoreFormatError,
    StoreUnwritableError,
    UnsafeStoreError,
)
from smartcache.sizes import format_size
from smartcache.store.volume import Layout, volume_root
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

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")
LITTLE_SPACE = 1_000_000_000
_PACKAGES = ("blake3", "xxhash", "huggingface_hub", "hf_xet", "safetensors", "filelock", "torch")
_ELSEWHERE = "Set SMARTCACHE_HOME to a directory on a local disk."


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know, and what can be done about it."""

    level: Level
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is known of the store's root, or of a folder."""

    path: Path
    role: Literal["store", "folder"]
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

    @property
    def level(self) -> Level:
        """The worst that was found."""
        found = (finding.level for place in self.places for finding in place.findings)
        return max(found, key=LEVELS.index, default="ok")


def examine(root: Path, others: Iterable[Path] = ()) -> Diagnosis:
    """Look at the store's root and at folders it may share files with; neither need exist."""
    layout = Layout(Path(os.path.abspath(root)))
    store = _place(layout.root, "store", _about_store(layout))
    folders = (Path(os.path.abspath(other)) for other in others)
    places = (_place(path, "folder", _about_distance(store, path)) for path in folders)
    return Diagnosis(places=(store, *places), versions=_versions())


def _place(path: Path, role: Literal["store", "folder"], known: Iterable[Finding]) -> Place:
    existing = nearest_existing(path)
    mount = mount_of(existing)
    abilities, findings = _try(path, existing, mount, role)
    findings = [*known, *findings, *_about_filesystem(mount, role)]
    filesystem: str | None = filesystem_id(existing)
    if filesystem is not None and filesystem.startswith("dev:"):
        filesystem = None
        text = "This filesystem has no permanent id: remembered hashes are lost at the next boot."
        findings.append(Finding(level="note", text=text))
    free = free_bytes(existing)
    if free < LITTLE_SPACE:
        text = f"Only {format_size(free)} is free here."
        hint = "'smartcache prune' frees what only smartcache holds." if role == "store" else ""
        findings.append(Finding(level="warning", text=text, hint=hint))
    if abilities is not None:
        findings += _about_abilities(abilities, role)
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    return Place(
        path=path, role=role, is_present=existing == path, mount=mount, filesystem=filesystem,
        abilities=abilities, free=free, findings=tuple(findings),
    )  # fmt: skip


def _try(
    path: Path, existing: Path, mount: Mount, role: Literal["store", "folder"]
) -> tuple[Abilities | None, list[Finding]]:
    """Return what works, tried in the nearest directory of this filesystem that can be written."""
    level: Level = "problem" if role == "store" else "warning"
    use = "No store can be kept" if role == "store" else "No file can be linked or replaced"
    findings: list[Finding] = []
    device = os.stat(existing).st_dev
    start = existing if existing.is_dir() else existing.parent
    for directory in (start, *start.parents):
        try:
            if os.stat(directory).st_dev != device:
                break
            return probe(directory), findings
        except NoSpaceError:
            text = f"{use} at {path}: the filesystem is full."
            return None, [*findings, Finding(level="problem", text=text)]
        except StoreUnwritableError as error:
            if not findings:
                why = f"{mount.point} is mounted read-only" if mount.is_read_only else str(error)
                hint = f"Choose another, or change its permissions. {_ELSEWHERE}"
                text = f"{use} at {path}: {why}."
                findings.append(
                    Finding(level=level, text=text, hint=hint if role == "store" else "")
                )
        if mount.is_read_only:
            break
    return None, findings


def _about_store(layout: Layout) -> Iterator[Finding]:
    if not os.path.exists(layout.format):  # pathlib raises where a folder may not be entered
        yield Finding(level="ok", text="There is no store here yet; it is made when first used.")
        return
    try:
        layout.secure()
        layout.check()
    except (StoreFormatError, UnsafeStoreError) as error:
        yield Finding(level="problem", text=f"{error.message}.", hint=error.hint)
    except OSError as error:
        yield Finding(level="problem", text=f"{layout.root}: {error.strerror or error}.")
    for folder in layout.root.parents:
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"Anyone can write to {folder} and could put another store in place of yours."
            yield Finding(level="warning", text=text, hint=f"chmod +t {folder}")


def _about_distance(store: Place, path: Path) -> Iterator[Finding]:
    """Say whether files of a folder can be linked with those of the store."""
    here = os.stat(nearest_existing(path)).st_dev
    there = os.stat(nearest_existing(store.path)).st_dev
    mount = mount_of(path)
    if here != there:
        text = f"{path} is on another filesystem than the store: files are copied, not linked."
        hint = f"A store there ({volume_root(mount.point)}) can link them."
        yield Finding(level="warning", text=text, hint=hint)
    elif mount.point != store.mount.point:
        text = (
            f"{path} is on the store's filesystem but in another mount ({mount.point}):"
            " the kernel does not link across mounts, so files are copied."
        )
        yield Finding(level="warning", text=text, hint="Reach both through one mount.")


def _about_filesystem(mount: Mount, role: str) -> Iterator[Finding]:
    told = _FAMILIES.get(mount.family)
    if told is None:
        return
    text = told.in_folder if role == "folder" and told.in_folder is not None else told.text
    if text:
        text = " ".join(text.format(mount.fstype).split())
        yield Finding(level=told.level, text=text, hint=told.hint if role == "store" else "")


def _about_abilities(abilities: Abilities, role: str) -> Iterator[Finding]:
    if not (abilities.hard_link or abilities.reflink):
        text = "No hard links or reflinks here: every file is a copy, and nothing is shared."
        yield Finding(level="warning", text=text, hint="Use ext4, xfs, btrfs or zfs.")
    elif not abilities.reflink:
        text = (
            "No reflinks here: files share bytes by hard link. They are made read-only, because"
            " changing one in place would change them all."
        )
        yield Finding(level="note", text=text)
    elif not abilities.hard_link:
        text = "No hard links here: files share bytes by reflink, which no link count shows."
        yield Finding(level="note", text=text)
    if effective_user() == 0 and role == "store":
        yield _about_root(abilities)
    if not abilities.flock:
        text = "File locks do not work here: two processes could damage the store."
        level: Level = "problem" if role == "store" else "note"
        yield Finding(level=level, text=text, hint=_ELSEWHERE if role == "store" else "")
    if not abilities.lease:
        text = (
            "No leases here: a program that writes a file while it is deduplicated is noticed"
            " only afterwards, by the times of the file."
        )
        hint = "Close the programs that write here before 'smartcache dedup'."
        yield Finding(level="warning", text=text, hint=hint)
    if not abilities.exchange:
        text = (
            "Names cannot be swapped in one step here: a file is checked once more right before"
            " it is replaced."
        )
        yield Finding(level="note", text=text)
    if not abilities.symlink:
        yield Finding(level="note", text="No symlinks here.")
    if abilities.hard_link and abilities.lease and abilities.exchange and abilities.flock:
        text = "Hard links, leases, name swaps and locks work."
        yield Finding(level="ok", text=text)


def _about_root(abilities: Abilities) -> Finding:
    if abilities.reflink:
        text = "You are root, who can write read-only files: reflinks are preferred to hard links."
        return Finding(level="note", text=text)
    text = (
        "You are root, who can write read-only files, and this filesystem has no reflinks:"
        " a program that changes a linked file in place changes the blob."
    )
    hint = "Work as an ordinary user, or run 'smartcache verify' regularly."
    return Finding(level="warning", text=text, hint=hint)


def other_package() -> Iterator[Finding]:
    """Say if the package that has the name `smartcache` on PyPI, and is not this one, is here."""
    with suppress(metadata.PackageNotFoundError):
        found = metadata.distribution("smartcache")
        yield Finding(
            level="warning",
            text=(
                f"Another package, smartcache {found.version}, is installed here too. It has the"
                " same import name: Python loads the one that was installed last."
            ),
            hint=ONLY_THIS_PACKAGE,
        )


def _versions() -> dict[str, str | None]:
    """Return the versions of what matters; packages are looked up, never imported."""
    versions: dict[str, str | None] = {
        "smartcache": __version__,
        "python": platform.python_version(),
        "sqlite3": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()}",
    }
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What is said of a store on a kind of filesystem; of a folder the same, unless it differs."""

    level: Level
    text: str
    in_folder: str | None = None
    hint: str = ""


_FAMILIES: dict[Family, _Told] = {
    "network": _Told(
        level="warning",
        text="""A network filesystem ({}): the index works with a rollback journal and is slower,
        and the store is safe for one host at a time.""",
        in_folder="""A network filesystem ({}): slow to walk and to hash, and what other hosts
        write is noticed late.""",
        hint=_ELSEWHERE,
    ),
    "overlay": _Told(
        level="warning",
        text="""An overlay ({}), as in containers: a file of a lower layer is copied when it is
        first linked or changed, and its hard links break apart.""",
        hint="Keep the store on a mounted volume.",
    ),
    "fuse": _Told(
        level="warning",
        text="""A filesystem in user space ({}): slower, and links, locks and times are only as
        good as the program that serves it.""",
        hint=_ELSEWHERE,
    ),
    "wsl": _Told(
        level="warning",
        text="""A Windows drive seen from Linux ({}): slow, and permissions are emulated, so that
        read-only may not protect.""",
        hint="Keep the store in the Linux filesystem, below your home directory.",
    ),
    "memory": _Told(
        level="warning",
        text="In memory ({}): empty after a reboot, and what is stored takes memory.",
        in_folder="",
        hint=_ELSEWHERE,
    ),
    "unknown": _Told(
        level="note",
        text="An unknown filesystem ({}): its features were tested, but not what a crash does.",
    ),
}
