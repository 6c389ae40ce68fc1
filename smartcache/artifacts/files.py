"""Files of others as artifacts: each file one, found again by its name, size and time.

Nothing in a file is ever executed: torch unpickles weights and plain containers only, numpy
unpickles nothing. A file that cannot be read is named, and stands in nobody's way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

from smartcache.artifacts.carry import Carried, CarryPlan, KeyRule, below
from smartcache.artifacts.keys import check_key, compute_key
from smartcache.artifacts.setfolder import Fingerprint, check_name
from smartcache.artifacts.sets import ArtifactSets
from smartcache.artifacts.values.tensors import need_torch
from smartcache.errors import ArtifactError, BadKeyError, ConfigError, SetFormatError
from smartcache.progress import Progress
from smartcache.system.faults import reached
from smartcache.system.filesystems import need_room

SUFFIXES: Final = (".pt", ".pth", ".npz", ".safetensors")
_FIELD: Final = re.compile(r"\{([^{}]*)\}")


def plan_files(
    sets: ArtifactSets,
    path: Path,
    name: str | None,
    fingerprint: Mapping[str, object] | None,
    rule: KeyRule,
) -> CarryPlan:
    """Plan to make one artifact of each file; those that are unchanged since are left out."""
    root, found = (path, list(_files(path))) if path.is_dir() else (path.parent, [path])
    found = [each for each in found if each.name.lower().endswith(SUFFIXES)]
    if not found:
        hint = "Exports, and .pt, .pth, .npz and .safetensors files can be imported."
        raise SetFormatError(f"{path} holds nothing that can be imported", hint=hint, path=path)
    if name is None or fingerprint is None:
        message = f"{path} does not say which set it becomes, and what its artifacts depend on"
        example = """--set latents --fingerprint '{"vae": "sdxl", "size": 1024}'"""
        raise ConfigError(message, hint=f"Say both, such as {example}.")
    made = Fingerprint.of(fingerprint)
    files = _keyed(found, root, rule)
    known: set[str] = set()
    full_name = f"{check_name(name)}/{made.id(name)}"
    if (sets.root / full_name / "set.json").exists():
        with sets.open(name, made, read_only=True) as opened:
            for key, (_, _, note) in files.items():
                with suppress(ArtifactError):  # not there, or damaged
                    if opened.metadata(key) == note:
                        known.add(key)
    wanted = {key: each for key, each in files.items() if key not in known}
    total = sum(size for _, size, _ in wanted.values())

    def execute(progress: Progress) -> Carried:
        need_room(sets.root, total, "The import")
        artifacts = written = 0
        problems = []
        with sets.open(name, made) as opened, progress("Importing", total, "bytes") as job:
            for key, (file, size, note) in wanted.items():
                try:
                    opened.put(key, _load(file), metadata=note)
                except ArtifactError as error:
                    problems.append(f"{file}: {error}")
                else:
                    artifacts, written = artifacts + 1, written + size
                    reached("carry: put")
                job.advance(size)
            opened.sync()
        return Carried(artifacts=artifacts, size=written, kept=len(known), problems=tuple(problems))

    return CarryPlan(
        sets=(full_name,), path=path, artifacts=len(wanted), size=total, kept=len(known),
        _execute=execute,
    )  # fmt: skip


def _keyed(
    found: list[Path], root: Path, rule: KeyRule
) -> dict[str, tuple[Path, int, dict[str, object]]]:
    """Return files by their keys: path, size, and what is noted of them; each key once."""
    files: dict[str, tuple[Path, int, dict[str, object]]] = {}
    for each in found:
        relative = each.relative_to(root)
        key = _key_of(rule, each, relative)
        if key in files:
            message = f"{files[key][0]} and {each} would both have the key {key!r:.120}"
            hint = "Choose another rule, such as 'path' (--key path), or take one of them away."
            raise BadKeyError(message, hint=hint)
        status = each.stat()
        size = status.st_size
        note = {"file": relative.as_posix(), "size": size, "mtime_ns": status.st_mtime_ns}
        files[key] = each, size, note
    return files


def _files(path: Path) -> Iterator[Path]:
    """Go through the files below a folder; symlinks are not followed."""
    for entry in below(path):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _key_of(rule: KeyRule, file: Path, relative: Path) -> str:
    """Return the key that a file gets."""
    if callable(rule):
        key = rule(relative)
    elif rule == "content":
        key = compute_key(None, content=file)
    else:
        parent = relative.parent.as_posix() if relative.parent.name else ""
        words = {"stem": relative.stem, "name": relative.name, "path": relative.as_posix()}
        text = f"{{{rule}}}" if rule in words else rule
        words["parent"] = parent
        if not {*_FIELD.findall(text)} <= words.keys() or text == _FIELD.sub("", text):
            rules = "stem, name, path, content, or a text with {stem}, {name}, {path}, {parent}"
            raise ConfigError(f"{rule!r} is no rule for keys", hint=f"Write {rules}.")
        key = _FIELD.sub(lambda found: words[found[1]], text)
    try:
        check_key(key)
    except BadKeyError as error:
        raise BadKeyError(f"{file} would have no possible key: {error}") from None
    return key


def _load(path: Path) -> object:
    """Return what a file of others holds; ArtifactError if it cannot be read, or not safely.

    No pickle runs: torch unpickles weights and plain containers only, numpy nothing at all.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        if suffix == ".safetensors":
            if find_spec("torch") is None:
                from safetensors.numpy import load_file as load_arrays

                return load_arrays(path)
            from safetensors.torch import load_file

            return load_file(path)
        return _plain(need_torch().load(path, map_location="cpu", weights_only=True))
    except ArtifactError:
        raise
    except UnpicklingError as error:  # torch would go on to say how to run it nevertheless
        raise ArtifactError("it holds objects that only pickle could load") from error
    except Exception as error:  # whatever a foreign library raises
        first = re.split(r"[.;]\s|\n", str(error).strip())[0]
        raise ArtifactError(f"{type(error).__name__}: {first:.300}") from error


def _plain(value: Any) -> object:  # noqa: ANN401
    """Return what torch has loaded with plain dicts and tensors: a state dict has neither."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.detach() if isinstance(value, need_torch().nn.Parameter) else value
