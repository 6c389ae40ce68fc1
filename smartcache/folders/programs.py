"""The table of programs: where each may be, and which folders below hold its models.

What a variable names comes first, then what lies in the home, then what belongs to the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KEYS_ON_MTIME: Final = frozenset({"A1111", "Forge"})
"""Programs that hash a model again when its mtime is another than in their own cache."""

_SHELVES: Final = ("~", "/workspace", "/opt")
"""Where people put programs that have no installer; /workspace is that of rented machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
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
    Program(
        name="Stability Matrix",
        roots=("~/StabilityMatrix", "$APPDATA/StabilityMatrix"),
        models=("Models",),
    ),
    Program(name="ModelScope", roots=("$MODELSCOPE_CACHE", "~/.cache/modelscope")),
    Program(
        name="GPT4All",
        roots=(
            "$XDG_DATA_HOME/nomic.ai/GPT4All", "~/.local/share/nomic.ai/GPT4All",
            "~/Library/Application Support/nomic.ai/GPT4All",
            "~/AppData/Local/nomic.ai/GPT4All", "~/.cache/gpt4all",
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
