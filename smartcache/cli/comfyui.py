"""The nodes in ComfyUI: `comfyui install`, `comfyui uninstall`.

    <ComfyUI>/custom_nodes/smartcache/__init__.py

is all that is put there: a few lines that import the nodes. Its first line says who has made it.
Only a folder with that line is ever written to or removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import click

from smartcache.cli._command import FILE, command, group, never_asks
from smartcache.cli._failures import BadValueError
from smartcache.cli._output import out
from smartcache.errors import DestinationExistsError

if TYPE_CHECKING:
    from pathlib import Path

_MARK = "# Made by 'smartcache comfyui install'; 'smartcache comfyui uninstall' removes it.\n"
_TEXT = f'''{_MARK}"""The nodes of smartcache."""

import logging
import sys

try:
    from smartcache.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except Exception as error:  # ComfyUI starts all the same
    logging.error(
        "The nodes of smartcache are missing: %s. Install it for the Python of ComfyUI: "
        "%s -m pip install smartcache",
        error,
        sys.executable,
    )
    NODE_CLASS_MAPPINGS = {{}}
    NODE_DISPLAY_NAME_MAPPINGS = {{}}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
'''
_PATH = click.argument("path", metavar="PATH", type=FILE)


@group(
    "comfyui",
    examples=(
        ("smartcache comfyui install ~/ComfyUI", "the nodes are there when ComfyUI starts again"),
        ("smartcache comfyui uninstall ~/ComfyUI", "and gone"),
    ),
)
def comfyui_command() -> None:
    """Add the nodes of smartcache to ComfyUI, or remove them.

    They save and load training datasets, and load checkpoints by their hash. Datasets stay when the
    nodes are removed.
    """


@command(
    "install",
    examples=(
        ("smartcache comfyui install ~/ComfyUI", "the folder that has custom_nodes in it"),
        ("smartcache comfyui install ~/ComfyUI --dry-run", "which file would be written"),
    ),
)
@_PATH
@never_asks
def install_command(*, path: Path, dry_run: bool) -> None:
    """Put the nodes into the folder of a ComfyUI.

    One small file is written: custom_nodes/smartcache/__init__.py. The Python that runs ComfyUI
    needs smartcache, too; if it does not have it, ComfyUI says so when it starts.
    """
    folder = _folder_of(path)
    file = folder / "__init__.py"
    state = _state_of(folder)
    if state == "foreign":
        message = f"{folder} was not made by smartcache; nothing was changed"
        raise DestinationExistsError(message, hint="Move or rename it first.", path=folder)
    is_new = state == "absent"
    if not dry_run:
        folder.mkdir(exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.write_text(_TEXT, encoding="ascii")
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    def human() -> None:
        if dry_run:
            out.line(f"Would {'write' if is_new else 'write again'} {file}.")
            return
        out.line(f"{'Wrote' if is_new else 'Wrote again'} {file}.")
        out.talk("Start ComfyUI again: the nodes are under 'smartcache'.")

    out.show(
        human=human,
        document=lambda: {"dry_run": dry_run, "path": folder, "files": [file], "is_new": is_new},
        ids=lambda: [folder],
    )


@command(
    "uninstall",
    examples=(
        ("smartcache comfyui uninstall ~/ComfyUI", "datasets in the output folder stay"),
        ("smartcache comfyui uninstall ~/ComfyUI --dry-run", "which folder would be removed"),
    ),
)
@_PATH
@never_asks
def uninstall_command(*, path: Path, dry_run: bool) -> None:
    """Remove the nodes from the folder of a ComfyUI.

    Only what 'install' has made goes; files that somebody else has put beside it stay.
    """
    folder = _folder_of(path)
    state = _state_of(folder)
    if state == "absent":
        raise BadValueError(
            f"{path} has no nodes of smartcache", hint="There is nothing to remove."
        )
    if state == "foreign":
        message = f"{folder} was not made by smartcache; nothing was changed"
        raise DestinationExistsError(message, hint="Remove it yourself.", path=folder)
    cache = folder / "__pycache__"
    compiled = sorted(cache.glob("__init__.*.pyc")) if not cache.is_symlink() else []
    files = [folder / "__init__.py", *compiled]
    if not dry_run:
        for file in reversed(files):  # the mark last: what is interrupted can be done again
            file.unlink(missing_ok=True)
        for each in (cache, folder):
            with suppress(OSError):  # not there, or something else is in it
                each.rmdir()
    stays = not dry_run and folder.exists()

    def human() -> None:
        out.line(f"{'Would remove' if dry_run else 'Removed'} {files[0] if stays else folder}.")
        if stays:
            out.talk(f"{folder} stays: it has files that smartcache did not make.")

    out.show(
        human=human,
        document=lambda: {"dry_run": dry_run, "path": folder, "files": files, "stays": stays},
        ids=lambda: [folder],
    )


comfyui_command.add_command(install_command)
comfyui_command.add_command(uninstall_command)


def _folder_of(path: Path) -> Path:
    """Return the folder for the nodes in a ComfyUI; BadValueError if it is none."""
    from pathlib import Path

    root = Path(os.path.abspath(path.expanduser()))
    nodes = root / "custom_nodes"
    if not nodes.is_dir() or not ((root / "comfy").is_dir() or (root / "models").is_dir()):
        hint = "Give the folder that has 'custom_nodes' and 'models' in it."
        raise BadValueError(f"{root} is no folder of ComfyUI", hint=hint)
    return nodes / "smartcache"


def _state_of(folder: Path) -> Literal["absent", "ours", "foreign"]:
    """Say whose folder it is; an empty one is nobody's: that of an 'install' that was killed."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return "foreign"
    if not folder.exists() or not any(folder.iterdir()):
        return "absent"
    try:
        with open(folder / "__init__.py", encoding="utf-8", errors="replace") as file:
            return "ours" if file.readline(len(_MARK) + 1) == _MARK else "foreign"
    except OSError:
        return "foreign"
