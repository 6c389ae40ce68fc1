"""Where ComfyUI keeps things: the functions of its module that the nodes call."""

from __future__ import annotations

import os

base_path = os.getcwd()


def get_output_directory() -> str:
    return os.path.join(base_path, "output")


def get_temp_directory() -> str:
    return os.path.join(base_path, "temp")


def get_folder_paths(folder_name: str) -> list[str]:
    return [os.path.join(base_path, "models", folder_name)]
