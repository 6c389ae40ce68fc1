"""`smartcache comfyui`: one small file goes into ComfyUI, and nothing but that comes out again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import ROOT, Here


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    path = tmp_path / "ComfyUI"
    for name in ("custom_nodes", "comfy"):
        (path / name).mkdir(parents=True)
    (path / "custom_nodes" / "example_node.py.example").touch()
    return path


@pytest.fixture
def nodes(comfyui: Path) -> Path:
    return comfyui / "custom_nodes" / "smartcache"


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_install_writes_one_file_and_uninstall_removes_it(
    sc: Here, comfyui: Path, nodes: Path
) -> None:
    before = tree(comfyui)
    done = sc("comfyui", "install", comfyui)
    assert done.stdout == f"Wrote {nodes / '__init__.py'}.\n"
    assert tree(comfyui).keys() - before.keys() == {
        "custom_nodes/smartcache", "custom_nodes/smartcache/__init__.py",
    }  # fmt: skip
    (nodes / "__pycache__").mkdir()
    (nodes / "__pycache__" / "__init__.cpython-311.pyc").touch()
    done = sc("comfyui", "uninstall", comfyui)
    assert done.stdout == f"Removed {nodes}.\n"
    assert tree(comfyui) == before


def test_installing_again_brings_the_file_up_to_date(sc: Here, comfyui: Path, nodes: Path) -> None:
    sc("comfyui", "install", comfyui)
    wanted = (nodes / "__init__.py").read_text()
    (nodes / "__init__.py").write_text(wanted.splitlines()[0] + "\nof an older version\n")
    document = sc("comfyui", "install", comfyui, "--json").json
    assert document["is_new"] is False
    assert (nodes / "__init__.py").read_text() == wanted


def test_what_is_no_folder_of_comfyui_or_has_no_nodes_is_refused(
    sc: Here, comfyui: Path, tmp_path: Path
) -> None:
    assert "has no nodes of smartcache" in sc("comfyui", "uninstall", comfyui, code=2).error
    (comfyui / "comfy").rmdir()
    for action in ("install", "uninstall"):
        for path in (comfyui, tmp_path, tmp_path / "missing"):
            assert "is no folder of ComfyUI" in sc("comfyui", action, path, code=2).error


@pytest.mark.parametrize("kind", ["package", "file", "symlink", "other files"])
def test_what_somebody_else_has_put_there_stays(
    sc: Here, comfyui: Path, nodes: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "package":
        nodes.mkdir()
        (nodes / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}\n")
    elif kind == "file":
        nodes.write_text("x")
    elif kind == "symlink":
        sc("comfyui", "install", comfyui)
        nodes.rename(tmp_path / "elsewhere")
        nodes.symlink_to(tmp_path / "elsewhere")
    else:
        nodes.mkdir()
        (nodes / "notes.txt").touch()
    before = tree(tmp_path)
    for action in ("install", "uninstall"):
        assert "was not made by smartcache" in sc("comfyui", action, comfyui, code=1).error
    assert tree(tmp_path) == before


def test_files_beside_ours_stay(sc: Here, comfyui: Path, nodes: Path) -> None:
    sc("comfyui", "install", comfyui)
    (nodes / "notes.txt").write_text("mine")
    assert sc("comfyui", "uninstall", comfyui, "--json").json["stays"] is True
    assert tree(nodes) == {"notes.txt": b"mine"}


@pytest.mark.torch
@pytest.mark.parametrize("is_there", [True, False])
def test_comfyui_gets_the_nodes_or_is_told_why_not(
    sc: Here, comfyui: Path, nodes: Path, is_there: bool
) -> None:
    """In a Python of its own, as ComfyUI imports its custom nodes: by their path."""
    sc("comfyui", "install", comfyui)
    program = (
        "import importlib.util, json, sys\n"
        "if sys.argv[2] == 'False':\n"
        "    sys.modules['smartcache'] = None\n"
        "spec = importlib.util.spec_from_file_location('custom_nodes_x', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps([sorted(module.NODE_CLASS_MAPPINGS),\n"
        "                  sorted(module.NODE_DISPLAY_NAME_MAPPINGS)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, nodes / "__init__.py", str(is_there)],
        check=True, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    classes, names = json.loads(done.stdout)
    assert classes == names
    assert bool(classes) is is_there
    assert ("-m pip install smartcache" in done.stderr) is not is_there
