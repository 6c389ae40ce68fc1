"""Where programs keep models on this machine, by the table and by their own config files.

All places of the table are looked at. A variable does not hide the others, because what was
downloaded before it was set still takes room. Config files of the programs lead to more. Nothing is
read but small config files, and nothing is walked.

A folder that lies in another one of the same program is left to that one. Config files are somebody
else's: opening one never waits, no more than `MOST_READ` bytes are read, YAML goes through the safe
loader alone, and what cannot be used becomes a warning, never an exception.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from smartcache.config import variable
from smartcache.folders.programs import (
    KEYS_ON_MTIME,
    PROGRAMS,
    TABLE,
    ModelFolder,
    Program,
    identify,
    program_called,
)
from smartcache.system.kernel import open_quietly

ROOT = Path("/")
"""What places of the whole machine begin with."""
MOST_READ: Final = 1 << 20
_DEFAULT: Final = "default place"
_EXTRA_PATHS: Final = "extra_model_paths.yaml"
_CONFIG_HOMES: Final = ("$XDG_CONFIG_HOME", "~/.config", "~/Library/Application Support")
_SYSTEM_VARIABLES: Final = frozenset({"XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"})
"""Not meant for models: a relative value is ignored, as the XDG specification asks."""
_MOST_KEYS: Final = 10_000
_LOADER_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, TypeError)
"""What the safe loader raises for tags that do not fit their values, such as `!!int ""`."""
_NO_MODELS: Final = frozenset({"base_path", "is_default", "custom_nodes"})
_ENVIRONMENT: Final = re.compile(r"(?m)^\s*Environment\s*=(.*)$")
_OLLAMA: Final = "OLLAMA_MODELS"
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


Warn = Callable[[str], object]


class Discovery(NamedTuple):
    """The model folders of this machine, and what could not be used to find them."""

    folders: tuple[ModelFolder, ...]
    warnings: tuple[str, ...]


def discover_folders() -> Discovery:
    """Return the existing model folders, each once, by program; never the home or one above it."""
    search = _Search()
    for program in TABLE:
        for place in program.roots:
            if (found := search.expand(place)) is not None:
                search.add_root(program, *found)
    for read in (_ollama_services, _lm_studio_homes, _comfyui_desktop, _stability_matrix):
        read(search)
    search.add_listed()
    return Discovery(folders=search.result(), warnings=tuple(search.warnings))


def places() -> list[tuple[str, Path]]:
    """Return the main places that are looked at, existing or not: programs and paths."""
    search = _Search()
    found: dict[tuple[str, Path], None] = {}
    for program in TABLE:
        below = "" if "*" in program.models[0] else program.models[0]
        homes = [place for place in program.roots if place.startswith("~")][:1]
        named = [place for place in program.roots if place.startswith("$")]
        for place in (*named, *homes):
            if (root := search.expand(place)) is not None:
                found.setdefault((program.name, root[0] / below))
    return list(found)


def home_directory() -> Path | None:
    """Return the home of the user; None if there is none, or no absolute one."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without one
        return None
    return home if home.is_absolute() else None


@dataclass(slots=True)
class _Search:
    """What was found so far. Paths that are not there are passed over in silence."""

    warnings: dict[str, None] = field(default_factory=dict)
    _home: Path | None = field(default_factory=home_directory)
    _found: dict[tuple[int, int], ModelFolder] = field(default_factory=dict)
    _listed: list[tuple[Path, list[Path]]] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.setdefault(text)

    def expand(self, place: str) -> tuple[Path, str] | None:
        """Return the path that a place of the table stands for here, and how that is known."""
        first, _, below = place.partition("/")
        if not first:
            return (ROOT / below, _DEFAULT)
        if first == "~":
            return None if self._home is None else (self._home / below, _DEFAULT)
        value = variable(first[1:])
        if value is None:
            return None
        if first[1:] in _SYSTEM_VARIABLES:
            return (Path(value) / below, first[1:]) if os.path.isabs(value) else None
        path = self.absolute(value, first[1:])
        return None if path is None else (path / below, first[1:])

    def absolute(self, text: object, source: str) -> Path | None:
        """Return the path that a variable or a config file gives, None if it is a relative one."""
        if isinstance(text, str) and text and "\0" not in text:
            path = os.path.expandvars(os.path.expanduser(text))
            if os.path.isabs(path):
                return Path(path)
        self.warn(f"{source} is ignored, because it is not an absolute path: {text!r:.200}")
        return None

    def add_root(self, program: Program, root: Path, found_by: str) -> None:
        """Add the model folders below a place where a program may be."""
        if self.stat_directory(root) is None:
            return
        name = program.name
        if name in KEYS_ON_MTIME and (layout := identify(root)) in KEYS_ON_MTIME:
            name = layout
        for pattern in program.models:
            for below in sorted(glob.glob(pattern, root_dir=root)) if pattern else ("",):
                path = root / below
                # Pinokio installs other programs there, whose habits matter more.
                owner = identify(path) if pattern.startswith("api/") else ""
                self.add(path, owner or name, found_by)
        if (read := _CONFIGS.get(name)) is not None:
            read(self, root)

    def add(self, path: Path, program: str, found_by: str) -> None:
        """Add a folder that was not found before."""
        st = self.stat_directory(path)
        if st is None:
            return
        real = Path(os.path.realpath(path))
        if self.is_too_much(real):
            self.warn(f"{real} is ignored, because it is more than a model folder ({found_by})")
            return
        folder = ModelFolder(path=real, program=program, found_by=found_by)
        self._found.setdefault((st.st_dev, st.st_ino), folder)

    def stat_directory(self, path: Path) -> os.stat_result | None:
        try:
            st = os.stat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            self.warn(f"{path}: cannot be looked at: {error.strerror}")
            return None
        return st if stat.S_ISDIR(st.st_mode) else None

    def list_later(self, file: Path) -> None:
        """Read the folders that a file of ComfyUI names, to be added when all others are known."""
        folders, warnings = read_extra_paths(file)
        self.warnings |= dict.fromkeys(warnings)
        self._listed.append((file, folders))

    def add_listed(self) -> None:
        """Add what ComfyUI's files name: folders of other programs are theirs, siblings are one."""
        for file, folders in self._listed:
            parents = [path.parent for path in folders]
            for path in folders:
                is_part = parents.count(path.parent) > 1 and identify(path.parent)
                whole = Path(os.path.realpath(path.parent if is_part else path))
                if self.is_too_much(whole):
                    whole = Path(os.path.realpath(path))
                if not any(whole.is_relative_to(found.path) for found in self._found.values()):
                    name = identify(whole) or identify(whole.parent) or "ComfyUI"
                    self.add(whole, name, f"{file.name} of {file.parent}")

    def is_too_much(self, real: Path) -> bool:
        """Tell whether a folder is the home, or holds it, or is a whole drive."""
        homes = set() if self._home is None else {self._home, Path(os.path.realpath(self._home))}
        return real == Path(real.anchor) or any(home.is_relative_to(real) for home in homes)

    def result(self) -> tuple[ModelFolder, ...]:
        """Return the folders in the order of the table."""
        found = {(each.program, each.path): each for each in self._found.values()}
        outer = [
            each
            for each in found.values()
            if not any((each.program, above) in found for above in each.path.parents)
        ]
        return tuple(sorted(outer, key=lambda each: PROGRAMS.index(each.program)))

    def setting(self, file: Path, key: str) -> Path | None:
        """Return the path that a key of a JSON file gives; None, perhaps with a warning."""
        text, value = read_text(file, self.warn), None
        try:
            value = json.loads(text)[key] if text.strip() else None
        except KeyError:
            pass
        except (ValueError, TypeError, IndexError, RecursionError):
            self.warn(f"{file}: not a JSON object")
        return None if value is None else self.absolute(value, f"{file}: {key}")

    def config_files(self, below: str) -> Iterator[Path]:
        """Go through the places where the config file of a program may be."""
        for home in _CONFIG_HOMES:
            if (found := self.expand(f"{home}/{below}")) is not None:
                yield found[0]


def _ollama_services(search: _Search) -> None:
    """Add what systemd tells the service of Ollama: Environment="OLLAMA_MODELS=/srv/models"."""
    units = (
        "etc/systemd/system/ollama.service",
        "etc/systemd/system/ollama.service.d/*.conf",
        "usr/lib/systemd/system/ollama.service",
    )
    files = [ROOT / name for unit in units for name in sorted(glob.glob(unit, root_dir=ROOT))]
    for file in files:
        for line in _ENVIRONMENT.findall(read_text(file, search.warn)):
            settings: list[str] = []
            with suppress(ValueError):  # a quotation mark that is not closed
                settings = shlex.split(line)
            for name, _, path in (setting.partition("=") for setting in settings):
                if name == _OLLAMA and (found := search.absolute(path, f"{file}: {name}")):
                    search.add(found, "Ollama", f"{file.name} of {file.parent}")


def _lm_studio_homes(search: _Search) -> None:
    """Add the home that LM Studio's pointer file names, and the folder of its older settings."""
    if (found := search.expand("~/.lmstudio-home-pointer")) is not None:
        lines = read_text(found[0], search.warn).split("\n")
        if lines[0].strip() and (home := search.absolute(lines[0].strip(), str(found[0]))):
            search.add_root(program_called("LM Studio"), home, found[0].name)
    for file in search.config_files("LM Studio/settings.json"):
        _downloads_folder(search, file.parent)


def _downloads_folder(search: _Search, root: Path) -> None:
    file = root / "settings.json"
    if (path := search.setting(file, "downloadsFolder")) is not None:
        search.add(path, "LM Studio", f"{file.name} of {root}")


def _comfyui_desktop(search: _Search) -> None:
    """Add the base folder of ComfyUI's desktop app, and the folders that it lists."""
    for file in search.config_files("ComfyUI/config.json"):
        if (path := search.setting(file, "basePath")) is not None:
            search.add_root(program_called("ComfyUI"), path, f"{file.name} of {file.parent}")
        search.list_later(file.with_name("extra_models_config.yaml"))


def _invokeai_models(search: _Search, root: Path) -> None:
    """Add the `models_dir` of invokeai.yaml; until version 3 it was a part of a section."""
    value = read_yaml(root / "invokeai.yaml", search.warn)
    for section in ("InvokeAI", "Paths"):
        if isinstance(value, dict) and isinstance(value.get(section), dict):
            value = value[section]
    models = value.get("models_dir") if isinstance(value, dict) else None
    if isinstance(models, str) and models and "\0" not in models:
        search.add(root / os.path.expanduser(models), "InvokeAI", f"invokeai.yaml of {root}")


def _stability_matrix(search: _Search) -> None:
    """Add the library that Stability Matrix was told to use."""
    for file in search.config_files("StabilityMatrix/library.json"):
        if (path := search.setting(file, "LibraryPath")) is not None:
            program = program_called("Stability Matrix")
            search.add_root(program, path, f"{file.name} of {file.parent}")


def _packages(search: _Search, library: Path) -> None:
    """Add the models of the programs that Stability Matrix installed."""
    for below in sorted(glob.glob("Packages/*", root_dir=library)):
        if (name := identify(library / below)) in PROGRAMS:
            search.add_root(program_called(name), library / below, f"Stability Matrix in {library}")


_CONFIGS: Final[dict[str, Callable[[_Search, Path], None]]] = {
    "ComfyUI": lambda search, root: search.list_later(root / _EXTRA_PATHS),
    "InvokeAI": _invokeai_models,
    "LM Studio": _downloads_folder,
    "Stability Matrix": _packages,
}
"""What the config files in the folder of a program lead to."""


# files that others wrote


def read_extra_paths(file: Path) -> tuple[list[Path], list[str]]:
    """Return the folders that ComfyUI's file names and that exist, and what is wrong with it.

    a_section:
        base_path: ~/other/models      # ~ and $VARIABLES are expanded; relative to this file
        is_default: true
        checkpoints: checkpoints       # relative to base_path, else to this file
        loras: |
            loras
            /mnt/more/loras
    """
    warnings: list[str] = []
    value = read_yaml(file, warnings.append)
    if value is None:
        return [], warnings
    if not isinstance(value, dict):
        return [], [f"{file}: not a list of sections"]
    found: dict[Path, None] = {}
    for section, entries in value.items():
        if isinstance(entries, dict):
            for path in _folders(entries, file, f"{file}: {section!r:.80}", warnings.append):
                with suppress(OSError, ValueError):  # a name too long, or with a NUL in it
                    if path.is_dir():
                        found.setdefault(path)
        elif entries is not None:
            warnings.append(f"{file}: {section!r:.80}: not a section with folders")
    return list(found), warnings


def read_text(file: Path, warn: Warn, errors: str = "surrogateescape") -> str:
    """Return the text of a config file, empty if there is none or it cannot be read."""
    try:
        return read_small(file, MOST_READ).decode("utf-8-sig", errors=errors)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        warn(f"{file}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        warn(f"{file}: not UTF-8 text: {error.reason}")
    return ""


def read_yaml(file: Path, warn: Warn) -> object:
    """Return the value of a YAML file; None if it is empty, missing or of no use."""
    try:
        return _load(read_text(file, warn, errors="strict"))
    except RecursionError:
        warn(f"{file}: nested too deeply")
    except ValueError as error:
        warn(f"{file}: not YAML: {' '.join(str(error).split()):.200}")
    return None


def _load(text: str) -> object:
    """Load YAML like `yaml.safe_load`, but refuse merges (`<<`) that make gigabytes of 2 KB."""
    if not text:
        return None
    import yaml  # some 20 ms that only users of ComfyUI and InvokeAI have to pay

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MOST_KEYS:
                raise ValueError("too many keys")

    try:
        value: object = Loader(text).get_single_data()
    except (*_LOADER_ERRORS, yaml.YAMLError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return value


def _folders(entries: dict[object, object], file: Path, where: str, warn: Warn) -> Iterator[Path]:
    """Go through the folders of a section as ComfyUI understands them."""
    own = os.path.dirname(os.path.abspath(file))
    base = entries.get("base_path")
    if base is not None:
        if not isinstance(base, str) or "\0" in base:
            warn(f"{where}: base_path is not a path")
            return
        own = os.path.join(own, os.path.expandvars(os.path.expanduser(base.strip())))
    for kind, value in entries.items():
        if kind in _NO_MODELS or value is None:
            continue
        if not isinstance(value, str):
            warn(f"{where}: {kind!r:.80}: not a path")
            continue
        for line in filter(None, map(str.strip, value.split("\n"))):
            yield Path(os.path.normpath(os.path.join(own, line)))


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for unbuffered reading, without touching its access time if allowed."""
    try:
        descriptor = open_quietly(path, _FLAGS)
    except ValueError as error:  # a NUL byte in a path that somebody's config file gave
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fspath(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(descriptor, "rb", buffering=0)


def read_small(path: Path, most: int) -> bytes:
    """Return the bytes of a file; EFBIG if there are more than `most`."""
    with open_regular(path) as file:
        data = read_up_to(file, most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", os.fspath(path))
    return data


def read_up_to(file: BinaryIO, size: int) -> bytes:
    """Return the next `size` bytes, fewer only at the end of the file."""
    parts = []
    while size > 0 and (part := file.read(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
