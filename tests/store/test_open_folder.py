"""Opening the folder of a user's file: no component of its path may be a symlink."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from smartcache.errors import FileSkippedError
from smartcache.store.userfile import Spot
from smartcache.system import kernel


@pytest.fixture(params=["one call", "folder by folder"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on every system: with openat2, and where the kernel or a container has none of it."""
    if request.param == "folder by folder":
        monkeypatch.setattr(kernel, "_c_function", lambda *_: lambda *_: -errno.ENOSYS)


@pytest.mark.usefixtures("_way")
def test_the_folder_meant_is_opened_or_none(tmp_path: Path) -> None:
    real = tmp_path / "a" / "b"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "file").touch()
    with Spot(real / "x") as spot:
        assert os.path.samestat(os.fstat(spot.fd), real.stat())
    with Spot(Path("/x")) as spot:
        assert os.path.samestat(os.fstat(spot.fd), Path("/").stat())
    for path in ("link/x", "link/b/x", "file/x"):
        with pytest.raises(FileSkippedError, match="a folder above it is a symlink"):
            Spot(tmp_path / path)
    with pytest.raises(FileNotFoundError) as caught:
        Spot(tmp_path / "none" / "x")
    assert caught.value.filename == str(tmp_path / "none")


@pytest.mark.usefixtures("_way")
def test_a_path_may_be_longer_than_one_call_takes(tmp_path: Path) -> None:
    path, part = tmp_path, "d" * 250
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(17):
        os.mkdir(part, dir_fd=folder)
        below = os.open(part, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder, path = below, path / part
    with Spot(path / "x") as spot:
        assert os.path.samestat(os.fstat(spot.fd), os.fstat(folder))
    os.close(folder)
