"""Whether the files that a model was loaded from were written to, whatever they are called now."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.api import MappedFiles
from tests.pretrained.open_files import needs_proc, open_files

NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "old.bin")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in (*NAMES, "config.json"):
        (path / name).write_bytes(name.encode())
    (path / "folder.bin").mkdir()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_write_is_seen(folder: Path, name: str) -> None:
    files = MappedFiles(folder)
    assert files.are_unchanged()
    (folder / name).write_bytes(b"other")
    assert not files.are_unchanged()
    files.close()


def test_other_names_are_no_change(folder: Path, tmp_path: Path) -> None:
    files = MappedFiles(folder)
    os.link(folder / NAMES[0], tmp_path / "link")
    (folder / NAMES[0]).unlink()
    (folder / NAMES[1]).rename(tmp_path / "moved")
    (tmp_path / "equal").write_bytes(NAMES[2].encode())
    (tmp_path / "equal").replace(folder / NAMES[2])
    (folder / "config.json").write_bytes(b"{}")
    assert files.are_unchanged()
    (tmp_path / "link").write_bytes(b"other")
    assert not files.are_unchanged()
    files.close()


@needs_proc
def test_they_are_open_until_they_are_closed(folder: Path) -> None:
    before = open_files()
    files = MappedFiles(folder)
    assert open_files() - before == {str(folder / name) for name in NAMES}
    files.close()
    files.close()
    assert open_files() == before


@needs_proc
def test_none_stays_open_when_there_are_not_enough_descriptors(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    before = open_files()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    highest = max(taken)  # descriptors are given from the lowest
    os.close(taken.pop())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is looked at
            MappedFiles(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken.pop())
    assert caught.value.errno == errno.EMFILE
    assert open_files() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_closes_its_own(folder: Path) -> None:
    files = MappedFiles(folder)
    child = os.fork()
    if not child:
        was = files.are_unchanged()
        files.close()
        os._exit(7 if was else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert files.are_unchanged()
    files.close()
