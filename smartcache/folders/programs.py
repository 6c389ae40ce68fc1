"""What is known of programs: where each keeps models, how its folders look, what is left alone.

`TABLE` says where a program may be and which folders there hold its models: what a variable names
comes first, then what lies in the home, then what belongs to the machine. `identify` says whose
folder a directory is, by the names in it. Every program is known by its own folder (`<webui>`) and
by the folder of models in that (`<webui>/models`). The rules name directories, for files may be
left out of a listing; the first rule that fits decides.

What the user wants left alone for good is one folder or pattern per line of a small file. It lies
beside the config file, not in the index, which can be lost: a folder that was to be left alone must
not be touched because of that. `walk` passes over what matches, so nobody above it sees such a
file: no scan, no `dedup`, no report and no download. A pattern matches a path, or the last part of
one, or a directory above it; `*` matches any bytes.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from smartcache.config import ignore_file
from smartcache.errors import ConfigError, StoreError
from smartcache.system.ownfiles import atomically

KEYS_ON_MTIME: Final = frozenset({"A1111", "Forge"})
"""Programs that hash a model again when its mtime is another than in their own cache."""

_SHELVES: Final = ("~", "/workspace", "/opt")
"""Where people put programs that have no installer; /workspace is that of rented machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder with model files, the program it belongs to ("" if none), and how it was found."""

    path: Path
    program: str = ""
    found_by: str = ""
    is_given: bool = False
    """The user gave it to smartcache; else it was merely discovered."""


class Program(NamedTuple):
    """A program, the places where it may be, and the folders of models there."""

    name: str
    roots: tuple[str, ...]
    """`$VARIABLE/below`, `~/in the home` or `/of the machine`."""
    models: tuple[str, ...] = ("",)
    """Folders below a root, as patterns."""


def _on_shelves(*names: str) -> tuple[str, ...]:
    return tuple(f"{shelf}/{name}" for shelf in _SHELVES for name in names)


TABLE: Final = (
    Program(
        name="Hugging Face",
        roots=(
            "$HF_HUB_CACHE", "$HUGGINGFACE_HUB_CACHE", "$HF_HOME/hub",
            "$XDG_CACHE_HOME/huggingface/hub", "~/.cache/huggingface/hub",
            # Before huggingface_hub's cache there were these.
            "$TRANSFORMERS_CACHE", "~/.cache/huggingface/transformers",
            "~/.cache/huggingface/diffusers",
        ),
    ),
    Program(
        name="ComfyUI",
        roots=(
            "$COMFYUI_PATH", *_on_shelves("ComfyUI", "comfyui"), "~/comfy/ComfyUI",
            "~/Documents/ComfyUI", "/comfyui",
        ),
        models=("models",),
    ),
    Program(name="ComfyUI", roots=("$COMFYUI_MODEL_PATH",)),
    Program(
        name="A1111",
        roots=_on_shelves("stable-diffusion-webui", "sd-webui", "automatic1111"),
        models=("models", "embeddings"),
    ),
    Program(
        name="Forge",
        roots=_on_shelves(
            "stable-diffusion-webui-forge", "sd-webui-forge", "stable-diffusion-webui-reForge",
        ),
        models=("models", "embeddings"),
    ),
    Program(
        name="Ollama",
        roots=(
            "$OLLAMA_MODELS", "~/.ollama/models", "/usr/share/ollama/.ollama/models",
            "/var/lib/ollama", "/var/snap/ollama/common/models",
        ),
    ),
    Program(name="LM Studio", roots=("~/.lmstudio", "~/.cache/lm-studio"), models=("models",)),
    Program(name="InvokeAI", roots=("$INVOKEAI_ROOT", "~/invokeai"), models=("models",)),
    Program(name="Stability Matrix", roots=("~/StabilityMatrix",), models=("Models",)),
    Program(name="ModelScope", roots=("$MODELSCOPE_CACHE", "~/.cache/modelscope")),
    Program(
        name="GPT4All",
        roots=(
            "$XDG_DATA_HOME/nomic.ai/GPT4All", "~/.local/share/nomic.ai/GPT4All",
            "~/Library/Application Support/nomic.ai/GPT4All", "~/.cache/gpt4all",
        ),
    ),
    Program(
        name="Pinokio",
        roots=("~/pinokio",),
        models=("drive/drives/peers/*", "api/*/models", "api/*/app/models", "cache"),
    ),
)  # fmt: skip

PROGRAMS: Final = tuple(dict.fromkeys(program.name for program in TABLE))


def program_called(name: str) -> Program:
    """Return the first row of a program."""
    return next(program for program in TABLE if program.name == name)


# whose folder a directory is


class _Layout(NamedTuple):
    program: str
    all: frozenset[str]
    """Entries that must be there."""
    any: frozenset[str] = frozenset()
    """Entries of which one must be there."""
    basename: str = ""
    """What the directory itself must be called."""

    def fits(self, names: frozenset[str], basename: str) -> bool:
        return (
            self.all <= names
            and (not self.any or not self.any.isdisjoint(names))
            and self.basename in ("", basename)
        )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OWN_FOLDERS: Final = (
    _Layout("Forge", _names("modules_forge")),
    _Layout("A1111", _names("models modules extensions")),
    _Layout("ComfyUI", _names("comfy custom_nodes")),
    _Layout("ComfyUI", _names("models custom_nodes")),  # the base folder of the desktop app
    _Layout("InvokeAI", _names("models databases")),
    _Layout("InvokeAI", _names("invokeai.yaml")),
    _Layout("Stability Matrix", _names("Models Packages")),
    _Layout("LM Studio", _names("models"), basename=".lmstudio"),
    _Layout("LM Studio", _names("models"), basename="lm-studio"),
    _Layout("Ollama", _names("models"), basename=".ollama"),
    _Layout("Hugging Face", _names("hub"), basename="huggingface"),
    _Layout("ModelScope", frozenset(), _names("hub models datasets"), basename="modelscope"),
    _Layout("Pinokio", _names("api"), _names("drive cache"), basename="pinokio"),
)
_MODEL_FOLDERS: Final = (
    _Layout("Ollama", _names("blobs manifests")),
    # Forge alone has a folder for text encoders.
    _Layout("Forge", _names("Stable-diffusion text_encoder")),
    _Layout("A1111", _names("Stable-diffusion")),
    _Layout(
        "Stability Matrix",
        _names("StableDiffusion"),
        _names("Lora VAE ControlNet Embeddings ESRGAN TextEncoders DiffusionModels"),
    ),
    _Layout(
        "ComfyUI",
        _names("checkpoints"),
        _names("loras vae clip text_encoders diffusion_models unet controlnet clip_vision"),
    ),
    _Layout("ComfyUI", _names("diffusion_models"), _names("text_encoders vae loras")),
    _Layout("ModelScope", _names(".msc")),
    _Layout("GPT4All", frozenset(), basename="GPT4All"),
)
_LAYOUTS: Final = _OWN_FOLDERS + _MODEL_FOLDERS
_HUB: Final = ("models--", "datasets--", "spaces--")
_MODELS: Final = frozenset({"models", "embeddings"})
_PINOKIO_DRIVES: Final = os.path.join("drive", "drives", "peers")
"""Pinokio's drives have the folders of the programs that share them."""


def identify(folder: Path) -> str:
    """Return the program whose folder this is; "" if none, or if it cannot be listed.

    A folder called models is known by what lies beside it first, for it may be empty.
    """
    real = os.path.realpath(folder)
    names = _listing(real)
    if names is None:
        return ""
    parent, basename = os.path.split(real)
    if parent.endswith(_PINOKIO_DRIVES):
        return "Pinokio"
    if basename.lower() in _MODELS and (beside := _listing(parent)) is not None:
        for layout in _OWN_FOLDERS:
            if layout.fits(beside, os.path.basename(parent)):
                return layout.program
    return identify_names(names, basename)


def identify_names(names: frozenset[str], basename: str) -> str:
    """Return the program whose folder has this name and these entries; "" if none."""
    for layout in _LAYOUTS:
        if layout.fits(names, basename):
            return layout.program
    if basename.startswith(_HUB) and "snapshots" in names:
        return "Hugging Face"
    return "Hugging Face" if any(name.startswith(_HUB) for name in names) else ""


def _listing(directory: str) -> frozenset[str] | None:
    try:
        return frozenset(os.listdir(directory))
    except (OSError, ValueError):
        return None


# what is left alone

_SPECIAL = re.compile(r"([*?\[])")


class Ignored:
    """The patterns in force, and whether a path matches one."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        forms = [form for each in self.patterns for form in (each, f"*/{each}")]
        joined = "|".join(fnmatch.translate(form.rstrip("/") or form) for form in forms)
        self._expression = re.compile(os.fsencode(joined)) if joined else None

    def matches(self, path: bytes) -> bool:
        """Say whether a path itself is to be passed over."""
        return self._expression is not None and self._expression.match(path) is not None

    def covers(self, path: Path) -> bool:
        """Say whether a path is to be passed over, or lies in a folder that is."""
        return any(self.matches(os.fsencode(each)) for each in (path, *path.parents))


def ignored() -> Ignored:
    """Return what is to be left alone now."""
    try:
        text = os.fsdecode(ignore_file().read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return Ignored(())
    except OSError as error:
        # Never as if it were empty: what is to be left alone would not be.
        raise ConfigError(f"{ignore_file()}: cannot be read: {error.strerror}") from error
    return Ignored(line for line in text.split("\n") if line and not line.startswith("#"))


def ignore(words: Iterable[str], *, remove: bool = False) -> list[str]:
    """Leave folders and patterns alone from now on, or not any more; return the patterns."""
    patterns = [_pattern(word, is_known=remove) for word in words]
    before = ignored().patterns
    if remove and (unknown := [each for each in patterns if each not in before]):
        raise StoreError(
            f"{unknown[0]} is not ignored", hint="'smartcache folders ls' shows what is."
        )
    kept = [each for each in before if not (remove and each in patterns)]
    after = dict.fromkeys([*kept, *(() if remove else patterns)])
    file = ignore_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomically(file, is_private=False) as writing:
        writing.write(os.fsencode("".join(f"{each}\n" for each in after)))
    return patterns


def _pattern(word: str, *, is_known: bool) -> str:
    """Return the pattern for a word: of a path that exists the whole one, literally."""
    if "\n" in word:
        raise StoreError("A path with a line break cannot be ignored", hint="Ignore its folder.")
    if os.path.lexists(word):
        return _SPECIAL.sub(r"[\1]", os.path.realpath(word))
    if "/" in word and not _SPECIAL.search(word) and not is_known:
        raise StoreError(
            f"{word} does not exist", hint="Name a folder, or a pattern such as '*.ckpt'."
        )
    return word
