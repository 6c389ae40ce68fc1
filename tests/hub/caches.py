"""HF caches for tests: made by the real huggingface_hub, or by hand where that makes none such."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from smartcache.hub import layout
from tests.hub_server import Hub, etag_of, git_sha1

PATIENCE = 120.0


def commit_of(number: int) -> str:
    """Return a commit for repos made by hand."""
    return hashlib.sha1(b"%d" % number).hexdigest()  # noqa: S324 - as git does


def download(
    hub: Hub, name: str, cache: Path, *, revision: str | None = None, repo_type: str = "model"
) -> Path:
    """Download a repo with huggingface_hub alone; return its folder in the cache."""
    from huggingface_hub import snapshot_download

    path = snapshot_download(
        name, cache_dir=cache, endpoint=hub.url, revision=revision, repo_type=repo_type
    )
    return Path(path).parents[1]


def hf(hub: Hub, cache: Path, *words: str, code: int = 0) -> str:
    """Run the `hf` program; return what it printed."""
    env = {**os.environ, **hub.environment, "HF_HUB_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "huggingface_hub.cli.hf", *words],
        env=env, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    return done.stdout


def make_repo(
    cache: Path,
    files: Mapping[str, bytes],
    *,
    name: str = "models--org--name",
    commit: str = commit_of(1),
    ref: str = "main",
    symlinks: bool = True,
    listing: bool = False,
) -> Path:
    """Make (or add to) a repo folder as huggingface_hub does; return the folder."""
    folder = cache / name
    snapshot = folder / "snapshots" / commit
    for path, data in files.items():
        pointer = snapshot / path
        pointer.parent.mkdir(parents=True, exist_ok=True)
        if not symlinks:
            pointer.write_bytes(data)
            continue
        blob = folder / "blobs" / etag_of(path, data)
        blob.parent.mkdir(exist_ok=True)
        if not blob.exists():
            blob.write_bytes(data)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    if ref:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    if listing:
        write_listing(folder, commit, files)
    return folder


def write_listing(folder: Path, commit: str, files: Mapping[str, bytes]) -> None:
    """Write what the Hub listed, as huggingface_hub remembers it."""
    entries = {
        path: {
            "size": len(data),
            "blob_id": git_sha1(data),
            "lfs_sha256": etag if len(etag := etag_of(path, data)) == 64 else None,
            "xet_hash": None,
        }
        for path, data in files.items()
    }
    (folder / "trees").mkdir(exist_ok=True)
    document = {"format_version": 1, "files": entries}
    (folder / "trees" / f"{commit}.json").write_text(json.dumps(document))


def inodes_below(*roots: Path) -> dict[tuple[int, int], int]:
    """Return the disk blocks of everything but directories below some folders, by inode."""
    seen: dict[tuple[int, int], int] = {}
    for root in roots:
        for directory, folders, names in os.walk(root):
            for name in (*names, *folders):
                st = os.lstat(os.path.join(directory, name))
                if not stat.S_ISDIR(st.st_mode):
                    seen[st.st_dev, st.st_ino] = st.st_blocks * 512
    return seen


def blocks_below(*roots: Path) -> int:
    """Return the disk blocks below some folders, each inode once."""
    return sum(inodes_below(*roots).values())


def refs_of(folder: Path) -> dict[str, str]:
    """Return the branches and tags of a repo folder and their commits."""
    root = folder / "refs"
    found: dict[str, str] = {}
    for directory, _, names in os.walk(root):
        for name in sorted(names):
            path = Path(directory, name)
            commit = layout.read_ref(path)
            if commit is not None and not layout.is_half_made(name):
                found[path.relative_to(root).as_posix()] = commit
    return found
