"""Sets carried elsewhere and back: as safetensors, as a folder, as a tar; and files of others.

Artifacts travel as they were encoded: nobody decodes them, so neither torch nor a codec is needed,
and what arrives is equal to the bit. A plan says how much there is to do; `execute` does it. What
is there and equal is not written again, so whatever was interrupted is gone on with by the next
call.

    safetensors   <name>-00001.safetensors, ..., index.json    see `shards`
    folder        <name>/<id>/                                 as a store has it in `sets/`
    tar           index.json, <name>/<id>/...                  the same, without locks and index
    files         .pt, .pth, .npz, .safetensors of others      see `files`; for import only

Nothing that arrives is trusted: names, lengths and layouts are looked at before anything is put,
and a file is never followed, unpickled or unpacked outside of its own folder.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple

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
    SmartcacheError,
)
from smartcache.progress import Progress, silent
from smartcache.system import claim, create_own, make_own, need_room, reached, sync_directory

SHARD_SIZE: Final = 256_000_000
"""Bytes of tensors after which a shard is full."""
INDEX: Final = "index.json"
Form = Literal["safetensors", "folder", "tar"]
KeyRule = str | Callable[[Path], str]
_FORMAT: Final = "smartcache folder 1"
_PIECE: Final = 1 << 20
_MEMBER: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}/[0-9a-f]{32}/(set\.json|[0-9a-f]{16}\.pack)"
)


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
    """There already. Those of a folder or a store are compared when the plan is executed."""
    warnings: tuple[str, ...] = ()
    beside: Path | None = None
    """Where a tar is collected, to be gone on with after an interruption."""
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
    """Plan to write a set to shards of safetensors in a folder, to a folder of sets, or to a tar.

    What is past its time is left out. DestinationExistsError if something else is there.
    """
    path = Path(os.path.abspath(path))
    if form == "safetensors":
        from smartcache.artifacts.shards import plan_shards

        return plan_shards(opened, path, shard_size)
    options = opened.describe().options
    origin = Origin(opened.name, opened.fingerprint, options, partial(_arrivals, opened))
    if form == "folder":
        with suppress(FileNotFoundError):
            if os.path.samefile(path / origin.full_name, opened.path):
                message = f"{path} is where the set lies"
                raise DestinationExistsError(message, hint="Choose another folder.", path=path)
        return plan_copy(ArtifactSets(path), [origin], path)
    if os.path.lexists(path):
        hint = "Choose another name, or remove it."
        raise DestinationExistsError(f"{path} is there already", hint=hint, path=path)
    sets = ArtifactSets(path.with_name(f"{path.name}.partial"))
    if others := [each for each in sets.folders() if each.name != opened.id]:
        message = f"{sets.root} is of an export of another set, {others[0].parent.name}"
        raise DestinationExistsError(message, hint="Remove it, or choose another name.", path=path)
    plan = plan_copy(sets, [origin], path)

    def execute(progress: Progress) -> Carried:
        need_room(path, 2 * plan.size, "The export")  # the folder, and the tar of it
        with alone(path.with_name(f".{path.name[:100]}.lock")):
            done = plan.execute(progress)
            with sets.open(opened.name, opened.fingerprint) as copied:
                copied.delete_many(set(copied).difference(opened))  # gone since an interruption
                copied.compact(force=True)
                count = len(copied)
            _write_tar(path, copied.path, count, progress)
            shutil.rmtree(copied.path)
            with suppress(OSError):  # somebody has put something beside it
                copied.path.parent.rmdir()
                sets.root.rmdir()
        return done

    return CarryPlan(
        sets=plan.sets, path=path, artifacts=plan.artifacts, size=plan.size, kept=plan.kept,
        beside=sets.root, _execute=execute,
    )  # fmt: skip


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
    from smartcache.artifacts import files, shards

    path = Path(os.path.abspath(path))
    plan: CarryPlan | None = None
    mode = os.stat(path).st_mode
    if not stat.S_ISDIR(mode):
        if not stat.S_ISREG(mode):
            raise SetFormatError(f"{path} is neither a file nor a folder", hint="", path=path)
        if path.suffix.lower() not in files.SUFFIXES:
            plan = _plan_tar(sets, path)
        elif (shard := shards.read_shard(path)) is not None:
            plan = plan_copy(sets, [shards.shards_origin({path: set()}, shard.about)], path)
    elif (index := shards.read_index(path)) is not None:
        plan = plan_copy(sets, [shards.indexed_origin(path, index)], path)
    elif folders := _set_folders(path):
        plan = plan_copy(sets, list(map(_folder_origin, folders)), path)
    elif abouts := {shard.path: shard.about for shard in shards.shards_in(path)}:
        first, *_ = abouts.values()
        origin = shards.shards_origin({each: set() for each in abouts}, first)
        warning = f"{path} has no {INDEX}: the export was interrupted, and may lack artifacts"
        plan = plan_copy(sets, [origin], path, (warning,))
    if plan is None:
        return files.plan_files(sets, path, name, fingerprint, key)
    if name is not None or fingerprint is not None:
        hint = "Leave out the name and the fingerprint (--set, --fingerprint)."
        raise ConfigError(f"{path} says itself which set it is: {', '.join(plan.sets)}", hint=hint)
    return plan


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
    check_encoded(encoded, [len(tensor) for tensor in encoded.tensors])
    return encoded


def check_encoded(encoded: Encoded, sizes: list[int]) -> None:
    """Refuse what no put can have made; LayoutError says what is wrong."""
    layout = known_layout(encoded.layout)
    if [spec.nbytes for spec in layout.tensors] != sizes:
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


def plan_copy(
    sets: ArtifactSets, origins: list[Origin], path: Path, warnings: tuple[str, ...] = ()
) -> CarryPlan:
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
        size=size, kept=kept, warnings=warnings, _execute=execute,
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


# folders and tars


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


def _write_tar(path: Path, folder: Path, count: int, progress: Progress) -> None:
    """Write the folder of a set to a tar; its first member says how much there is."""
    prefix = f"{folder.parent.name}/{folder.name}"
    names = [each.name for each in below(folder) if _MEMBER.fullmatch(f"{prefix}/{each.name}")]
    size = sum((folder / name).stat().st_size for name in names)
    need_room(path, size, "The tar")
    text = json.dumps({"format": _FORMAT, "artifacts": {prefix: count}}).encode()
    with (
        named_at_last(path) as file,
        tarfile.open(fileobj=file, mode="w:", format=tarfile.GNU_FORMAT) as tar,
        progress("Writing the tar", size, "bytes") as job,
    ):
        index = tarfile.TarInfo(INDEX)
        index.size = len(text)
        tar.addfile(index, io.BytesIO(text))
        for name in names:
            member = tar.gettarinfo(folder / name, f"{prefix}/{name}")
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            with open(folder / name, "rb") as source:
                tar.addfile(member, source)
            job.advance(member.size)


@contextmanager
def _opened_tar(path: Path) -> Iterator[tuple[tarfile.TarFile, list[tarfile.TarInfo]]]:
    """Open a tar of ours, all of its members looked at."""
    hint = "What 'smartcache artifacts export' writes can be imported, and .pt, .npz ... files."
    try:
        with tarfile.open(path, "r:") as tar:
            members = tar.getmembers()
            names = set()
            for each in members:
                is_ours = each.name == INDEX or _MEMBER.fullmatch(each.name)
                is_plain = each.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not each.issparse()
                if not is_ours or not is_plain or each.name in names or each.size < 0:
                    message = f"{path} is no export: it has {each.name!r:.120} in it"
                    raise SetFormatError(message, hint=hint, path=path)
                names.add(each.name)
            if not any(name.endswith("/set.json") for name in names):
                raise SetFormatError(f"{path} is no export: there is no set in it", hint=hint)
            yield tar, members
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        if isinstance(error, SmartcacheError):
            raise
        message = f"{path} cannot be imported: it is neither tensors nor a whole tar ({error})"
        raise SetFormatError(message, hint=hint, path=path) from error


def _plan_tar(sets: ArtifactSets, path: Path) -> CarryPlan:
    """Plan to unpack a tar beside the sets, and to copy from there."""
    with _opened_tar(path) as (tar, members):
        size = sum(each.size for each in members if each.name != INDEX)
        names = {each.name.rpartition("/")[0] for each in members} - {""}
        artifacts = 0
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            about = json.loads(tar.extractfile(INDEX).read(_PIECE))  # type: ignore[union-attr]
            artifacts = sum(int(about["artifacts"][name]) for name in names)

    def execute(progress: Progress) -> Carried:
        need_room(sets.root, 2 * size, "The import")
        sets.root.parent.mkdir(parents=True, exist_ok=True)
        make_own(sets.root)
        place = sets.root / ".importing-tar"
        with alone(sets.root / ".importing"):
            shutil.rmtree(place, ignore_errors=True)  # what a killed import has left
            try:
                with _opened_tar(path) as (tar, members):
                    _unpack(tar, members, place / "sets", size, progress)
                origins = list(map(_folder_origin, _set_folders(place / "sets")))
                return plan_copy(sets, origins, path).execute(progress)
            finally:
                shutil.rmtree(place, ignore_errors=True)

    return CarryPlan(
        sets=tuple(sorted(names)), path=path, artifacts=artifacts, size=size, _execute=execute
    )


def _unpack(
    tar: tarfile.TarFile,
    members: list[tarfile.TarInfo],
    root: Path,
    size: int,
    progress: Progress,
) -> None:
    with progress("Unpacking", size, "bytes") as job:
        for member in members:
            if member.name == INDEX:
                continue
            target = root / member.name
            for each in (root.parent, root, target.parent.parent, target.parent):
                make_own(each)
            source = tar.extractfile(member)
            with open(create_own(target), "wb") as file:
                while source is not None and (piece := source.read(_PIECE)):
                    file.write(piece)
                    job.advance(len(piece))
            reached("carry: unpacked")
