"""The folders that ComfyUI's extra_model_paths.yaml names.

    a_section:
        base_path: ~/other/models      # ~ and $VARIABLES are expanded; relative to this file
        is_default: true
        checkpoints: checkpoints       # relative to base_path, else to this file
        loras: |
            loras
            /mnt/more/loras

The file is somebody else's: it is read up to `MOST_READ` bytes and by the safe loader alone, and
what cannot be used becomes a warning, never an exception.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from smartcache.folders.smallfiles import read_small

MOST_READ: Final = 1 << 20
_MOST_KEYS: Final = 10_000
_LOADER_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, TypeError)
"""What the safe loader raises for tags that do not fit their values, such as `!!int ""`."""
_NO_MODELS: Final = frozenset({"base_path", "is_default", "custom_nodes"})


def read_extra_paths(file: Path) -> tuple[list[Path], list[str]]:
    """Return the existing folders that the file names, each once, and what is wrong with it."""
    value, warnings = read_yaml(file)
    if value is None:
        return [], warnings
    if not isinstance(value, dict):
        return [], [f"{file}: not a list of sections"]
    found: dict[Path, None] = {}
    for section, entries in value.items():
        if entries is None:
            continue
        if not isinstance(entries, dict):
            warnings.append(f"{file}: {section!r:.80}: not a section with folders")
            continue
        for path in _folders(entries, file, f"{file}: {section!r:.80}", warnings):
            if _is_directory(path):
                found.setdefault(path)
    return list(found), warnings


def read_yaml(file: Path) -> tuple[object, list[str]]:
    """Return the value of a YAML file, or None and, unless it is empty or missing, a warning."""
    try:
        text = read_small(file, MOST_READ).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None, []
    except OSError as error:
        return None, [f"{file}: cannot be read: {error.strerror}"]
    except UnicodeDecodeError as error:
        return None, [f"{file}: not UTF-8 text: {error.reason}"]
    try:
        return _load(text), []
    except RecursionError:
        return None, [f"{file}: nested too deeply"]
    except ValueError as error:
        return None, [f"{file}: not YAML: {' '.join(str(error).split()):.200}"]


def _load(text: str) -> object:
    """Load YAML like `yaml.safe_load`, but refuse merges (`<<`) that make gigabytes of 2 KB."""
    import yaml  # some 20 ms that only users of ComfyUI and InvokeAI have to pay

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MOST_KEYS:
                raise ValueError("too many keys")

    try:
        value: object = Loader(text).get_single_data()
    except _LOADER_ERRORS as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return value


def _folders(
    entries: dict[object, object], file: Path, where: str, warnings: list[str]
) -> Iterator[Path]:
    """Go through the folders of a section as ComfyUI understands them."""
    own = os.path.dirname(os.path.abspath(file))
    base = entries.get("base_path")
    if base is not None:
        try:
            own = os.path.join(own, _expanded(base))
        except ValueError:
            warnings.append(f"{where}: base_path is not a path")
            return
    for kind, value in entries.items():
        if kind in _NO_MODELS or value is None:
            continue
        if not isinstance(value, str):
            warnings.append(f"{where}: {kind!r:.80}: not a path")
            continue
        for line in filter(None, map(str.strip, value.split("\n"))):
            yield Path(os.path.normpath(os.path.join(own, line)))


def _expanded(base: object) -> str:
    if not isinstance(base, str) or "\0" in base:
        raise ValueError(base)
    return os.path.expandvars(os.path.expanduser(base.strip()))


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it
        return False
