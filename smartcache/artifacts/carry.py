"""Sets carried elsewhere: as a folder, and back, as safetensors; and tensor files of others.

Artifacts travel as they were encoded: nobody decodes them, so neither torch nor a codec is needed,
and what arrives is equal to the bit. A plan says how much there is to do; `execute` does it. What
is in a folder and equal is not written again, so what was interrupted is gone on with by the next
call.

    folder        <name>/<id>/                                 as a store has it in `sets/`
    safetensors   <name>-00001.safetensors, ..., index.json    for other programs: see `shards`
    files         .pt, .pth, .npz, .safetensors of others      see `files`; for import only

Nothing that arrives is trusted: names, lengths and layouts are looked at before anything is put,
and a file is never followed or unpickled.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

from smartcache.artifacts.artifactset import ArtifactSet
from smartcache.artifacts.engine import read, write
from smartcache.artifacts.engine.catalog import Place
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.read import Encoded
from smartcache.artifacts.keys import check_keys, key_text
from smartcache.artifacts.setfolder import Fingerprint, Options, SetFolder, is_id
from smartcache.artifacts.sets import ArtifactSets
from smartcache.artifacts.values.layout import COUNT, Layout, known_layout
from smartcache.errors import (
    ArtifactError,
    ConfigError,
    DamagedArtifactError,
    DestinationExistsError,
    LayoutError,
    SetFormatError,
)
from smartcache.progress import Progress, silent
from smartcache.system.faults import reached
from smartcache.system.filesystems import need_room
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import claim

SHARD_SIZE: Final = 256_000_000
"""Bytes of tensors after which a shard is full."""
INDEX: Final = "index.json"
Form = Literal["safetensors", "folder"]
KeyRule = str | Callable[[Path], str]
SHARDS_FORMAT: Final = "smartcache safetensors 2"
_TO_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What was carried."""

    artifacts: int = 0
    """Were written."""
    size: int = 0
    """Their bytes."""
    kept: int = 0
    """Were there already."""
    problems: tuple[str, ...] = ()
    """What could not be read, and why; everything else was carried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryPlan:
    """What would be carried; `execute` reports what was."""

    sets: tuple[str, ...]
    """Their full names."""
    path: Path
    """Where they go, or come from."""
    artifacts: int
    """To be written."""
    size: int
    """Their bytes."""
    kept: int = 0
    """There already; they are compared when the plan is executed."""
    _execute: Callable[[Progress], Carried] = field(repr=False, compare=False)

    def execute(self, progress: Progress = silent) -> Carried:
        """Carry it; NoSpaceError, before anything is written, if it will not fit."""
        return self._execute(progress)


class Arrival(NamedTuple):
    """An artifact that may be copied."""

    key: bytes
    size: int
    is_pinned: bool
    read: Callable[[], Encoded | None]
    """None: it is gone. DamagedArtifactError or LayoutError if it is not what was put."""


class Origin(NamedTuple):
    """A set to copy from."""

    name: str
    fingerprint: Fingerprint
    options: Options
    """Those of a set that is made by the copy; one that is there keeps its own."""
    arrivals: Callable[[], Iterator[Arrival]]

    @property
    def full_name(self) -> str:
        """The name by which every command finds it."""
        return f"{self.name}/{self.fingerprint.id(self.name)}"


def plan_export(
    opened: ArtifactSet,
    path: str | Path,
    *,
    form: Form = "safetensors",
    shard_size: int = SHARD_SIZE,
) -> CarryPlan:
    """Plan to write a set to a folder of sets, or to shards of safetensors in a folder.

    What is past its time is left out. DestinationExistsError if something else is there.
    """
    path = Path(os.path.abspath(path))
    if form == "safetensors":
        from smartcache.artifacts.shards import plan_shards

        return plan_shards(opened, path, shard_size)
    options = opened.describe().options
    origin = Origin(opened.name, opened.fingerprint, options, partial(_arrivals, opened))
    with suppress(FileNotFoundError):
        if os.path.samefile(path / origin.full_name, opened.path):
            message = f"{path} is where the set lies"
            raise DestinationExistsError(message, hint="Choose another folder.", path=path)
    return _plan_copy(ArtifactSets(path), [origin], path)


def plan_import(
    sets: ArtifactSets,
    path: str | Path,
    *,
    name: str | None = None,
    fingerprint: Mapping[str, object] | None = None,
    key: KeyRule = "stem",
) -> CarryPlan:
    """Plan to bring in what `plan_export` has written, or a file or folder of files of others.

    Files (.pt, .pth, .npz, .safetensors; a folder is searched through) become one artifact each of
    the set of this name and fingerprint. `key` makes the key of a file: "stem", "name", "path",
    "content", a text with {stem}, {name}, {path} and {parent}, or a function of the path within the
    folder. SetFormatError if an export is not what it says; nothing is imported then.
    """
    from smartcache.artifacts import files

    path = Path(os.path.abspath(path))
    mode = os.stat(path).st_mode
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise SetFormatError(f"{path} is neither a file nor a folder", hint="", path=path)
    if index_of(path) is not None:
        hint = "Export it again with --folder, which can be imported."
        raise SetFormatError(f"{path} was exported for other programs", hint=hint, path=path)
    folders = _set_folders(path) if stat.S_ISDIR(mode) else []
    if not folders:
        return files.plan_files(sets, path, name, fingerprint, key)
    plan = _plan_copy(sets, list(map(_folder_origin, folders)), path)
    if name is not None or fingerprint is not None:
        hint = "Leave out the name and the fingerprint (--set, --fingerprint)."
        raise ConfigError(f"{path} says itself which set it is: {', '.join(plan.sets)}", hint=hint)
    return plan


def index_of(path: Path) -> dict[str, Any] | None:
    """Read the index.json of an export as safetensors; None if there is none, or another one."""
    try:
        with open(os.open(path / INDEX, _TO_READ), "rb") as file:
            index = json.load(file)
        return index if index["format"] == SHARDS_FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


# from set to set


def _arrivals(opened: ArtifactSet) -> Iterator[Arrival]:
    """Go through the artifacts of a set in the order in which they lie on the disk."""
    engine = opened._engine  # noqa: SLF001
    found = listed(opened)
    pinned = engine.catalog.pinned()
    for key, _, size in found:
        yield Arrival(key, size, key in pinned, partial(read_artifact, engine, key))


def listed(opened: ArtifactSet) -> list[tuple[bytes, Place, int]]:
    """Return what a set has: key, place, and bytes, also those that equal tensors share."""
    catalog = opened._engine.catalog  # noqa: SLF001
    keys = check_keys(opened)
    found = []
    for key, place in zip(keys, catalog.find_many(keys), strict=True):
        if place is not None:
            size = place.size
            with suppress(DamagedArtifactError):  # said when it is read
                tensors = catalog.layout(place.pack, place.layout).tensors
                size = place.meta + sum(spec.nbytes for spec in tensors)
            found.append((key, place, size))
    return sorted(found, key=lambda each: (each[1].pack.number, each[1].offset))


def read_artifact(engine: Engine, key: bytes) -> Encoded | None:
    """Read an artifact, which does not count as a use."""
    found = engine.look(key)
    if found is None:
        return None
    encoded = read.read_encoded(engine, read.held(engine, key, *found))
    _check_encoded(encoded)
    return encoded


def _check_encoded(encoded: Encoded) -> None:
    """Refuse what no put can have made; LayoutError says what is wrong."""
    layout = known_layout(encoded.layout)
    if [spec.nbytes for spec in layout.tensors] != [len(each) for each in encoded.tensors]:
        raise LayoutError("its tensors are not those of its layout")
    layout.opened(encoded.inline)
    about = encoded.metadata
    if about:
        if len(about) < COUNT.size:
            raise LayoutError("its metadata is too short")
        end = COUNT.size + COUNT.unpack_from(about)[0]
        described = Layout.parse(about[COUNT.size : end])
        if described.tensors:
            raise LayoutError("its metadata refers to tensors")
        described.opened(about[end:])


def _plan_copy(sets: ArtifactSets, origins: list[Origin], path: Path) -> CarryPlan:
    """Plan to copy artifacts to other sets; what is malformed is refused before."""
    artifacts = size = kept = total = 0
    for origin in origins:
        there: set[bytes] = set()
        if (sets.root / origin.full_name / "set.json").exists():
            with sets.open(origin.name, origin.fingerprint, read_only=True) as opened:
                there.update(check_keys(opened))
        for each in origin.arrivals():
            total += each.size
            if each.key in there:
                kept += 1
            else:
                artifacts += 1
                size += each.size

    def execute(progress: Progress) -> Carried:
        need_room(sets.root, size, "The copy")
        return _copy(sets, origins, total, progress)

    return CarryPlan(
        sets=tuple(origin.full_name for origin in origins), path=path, artifacts=artifacts,
        size=size, kept=kept, _execute=execute,
    )  # fmt: skip


def _copy(sets: ArtifactSets, origins: list[Origin], total: int, progress: Progress) -> Carried:
    artifacts = size = kept = 0
    problems: list[str] = []
    with progress("Copying", total, "bytes") as job:
        for origin in origins:
            is_new = not (sets.root / origin.full_name / "set.json").exists()
            options = asdict(origin.options) if is_new else {}
            with sets.open(origin.name, origin.fingerprint, **options) as opened:
                for each in origin.arrivals():
                    try:
                        new = each.read()
                    except (DamagedArtifactError, LayoutError) as error:
                        problems.append(f"{key_text(each.key)}: {error}")
                        continue
                    if new is not None and _put(opened, each, new):
                        artifacts, size = artifacts + 1, size + each.size
                        reached("carry: put")
                    else:
                        kept += new is not None
                    job.advance(each.size)
                opened.sync()
    return Carried(artifacts=artifacts, size=size, kept=kept, problems=tuple(problems))


def _put(opened: ArtifactSet, each: Arrival, new: Encoded) -> bool:
    """Keep an artifact unless it is there, and equal; say whether it was not."""
    engine, longest = opened._engine, opened._longest  # noqa: SLF001
    now = engine.catalog.clock()
    try:
        old = read_artifact(engine, each.key)
    except (DamagedArtifactError, LayoutError):
        old = None
    if longest is not None:  # nothing outlives it here: then another end is no difference
        latest = math.ceil(now + longest)
        new = new._replace(expires=min(new.expires or latest, latest))
        if old is not None and (not old.expires or old.expires > now):
            old = old._replace(expires=new.expires)
    if 0 < new.expires <= now:  # its pin alone keeps it, and comes after it
        new = new._replace(expires=0)
    is_new = old is None or not _is_equal(old, new)
    if is_new:
        layout, inline, tensors, about, expires = new
        write.put_encoded(engine, each.key, layout, inline, tensors, about, expires=expires)
    if each.is_pinned and not engine.catalog.is_pinned(each.key):
        write.pin(engine, each.key, is_pinned=True)
    return is_new


def _is_equal(one: Encoded, other: Encoded) -> bool:
    """Compare two artifacts by numpy: memoryviews compare themselves 25 times as slowly."""
    import numpy as np

    return one._replace(tensors=[]) == other._replace(tensors=[]) and all(
        np.array_equal(np.asarray(mine), np.asarray(theirs))
        for mine, theirs in zip(one.tensors, other.tensors, strict=True)
    )


@contextmanager
def named_at_last(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to; it gets its name when all of it is on the disk."""
    temporary = path.with_name(f".{path.name[:100]}.part")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        reached("carry: written")
        temporary.replace(path)
        sync_directory(path.parent)
        reached("carry: named")
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let no other process do the same for the length of a block."""
    holder = claim(path)
    if holder is None:
        raise ArtifactError(f"Another process is at it: {path} is locked", path=path)
    try:
        yield
    finally:
        holder.release()


# folders


def _set_folders(path: Path) -> list[Path]:
    """Return the sets in a folder; symlinks are not followed."""
    found = []
    for outer in below(path):
        if outer.is_dir(follow_symlinks=False) and not outer.name.startswith("."):
            found += [
                Path(inner.path)
                for inner in below(Path(outer.path))
                if is_id(inner.name) and inner.is_dir(follow_symlinks=False)
                and os.path.lexists(os.path.join(inner.path, "set.json"))
            ]  # fmt: skip
    return found


def below(path: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder, in the order of the names."""
    with os.scandir(path) as entries:
        return sorted(entries, key=lambda each: each.name)


def _folder_origin(path: Path) -> Origin:
    """Return a set that lies somewhere; it may belong to another user, and nothing is written."""
    folder = SetFolder.read(path, read_only=True)

    def arrivals() -> Iterator[Arrival]:
        with ArtifactSet(folder, read_only=True) as opened:
            yield from _arrivals(opened)

    return Origin(folder.name, folder.fingerprint, folder.options, arrivals)
