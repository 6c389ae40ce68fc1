"""An HF cache with huggingface_hub's shared blob store, and the real client that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.api import hash_file
from tests.hub_server import Hub

MARKER = ".huggingface-shared-blobs"
PATIENCE = 120.0
has_shared_store = pytest.mark.skipif(
    tuple(map(int, version("huggingface_hub").split(".")[:2])) < (2, 4),
    reason="huggingface_hub has a shared blob store from 2.4 on",
)


def make_shared_store(cache: Path, marker: bytes = b"1\n") -> Path:
    """Make what the client makes at its first Xet download; return the directory."""
    directory = cache / "blobs"
    directory.mkdir(parents=True)
    (directory / MARKER).write_bytes(marker)
    return directory


def xet_of(path: Path, data: bytes) -> str:
    """Return the xet hash of bytes, as hf_xet computes it; `path` is used for it and removed."""
    path.write_bytes(data)
    try:
        return hash_file(path, ["xet"])[0].values["xet"]
    finally:
        path.unlink()


def add_entry(cache: Path, xet: str, data: bytes) -> Path:
    """Put an entry into a shared store, as the client does."""
    path = cache / "blobs" / xet[:2] / xet
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o444)
    return path


def client(
    hub: Hub, cache: Path, *words: str, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program in Python's own words, or `hf`, with Xet enabled; its output is text."""
    env = {**os.environ, **hub.environment, "HF_HUB_CACHE": str(cache)}
    del env["HF_HUB_DISABLE_XET"]
    if words[0] == "hf":
        words = ("-m", "huggingface_hub.cli.hf", *words[1:])
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    if code is not None:
        assert done.returncode == code, done.stderr
    return done


def snapshot_download(hub: Hub, cache: Path, repo: str) -> subprocess.CompletedProcess[str]:
    """Run huggingface_hub's own `snapshot_download`, whatever comes of it."""
    text = f"import huggingface_hub as h; print(h.snapshot_download({repo!r}))"
    return client(hub, cache, "-c", text, code=None)
