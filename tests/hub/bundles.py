"""HF caches made on the spot, in the layout of huggingface_hub, and everything about them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

from smartcache.hub import RepoType
from smartcache.hub.care.carry import ExportPlan, ImportPlan, Wanted, plan_export, plan_import
from smartcache.hub.records import Repo
from smartcache.store.store import Store
from tests.hub_server import etag_of, git_sha1

Files = Mapping[str, bytes]

ENCODER = random.Random(11).randbytes(150_000)
VAE = random.Random(12).randbytes(90_000)
UNET = random.Random(13).randbytes(120_000)
FIRST = {
    "model_index.json": b'{"one": 1}',
    "text_encoder/model.safetensors": ENCODER,
    "unet/model.safetensors": UNET,
    "vae/model.safetensors": VAE,
    "empty.txt": b"",
}
SECOND = {
    "model_index.json": b'{"two": 2}',
    "text_encoder/model.safetensors": ENCODER,
    "other.bin": VAE,
    "empty.txt": b"",
}


def commit_for(*parts: object) -> str:
    return hashlib.sha1(repr(parts).encode()).hexdigest()  # noqa: S324 - as git does


def add_repo(
    cache: Path,
    name: str,
    files: Files,
    *,
    repo_type: RepoType = "model",
    refs: tuple[str, ...] = ("main",),
    listing: bool = True,
) -> str:
    """Put a revision into an HF cache as a download leaves it; return its commit."""
    folder = cache / Repo(repo_type, name).folder_name
    commit = commit_for(name, repo_type, sorted(files.items()))
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for path, data in files.items():
        blob = folder / "blobs" / etag_of(path, data)
        blob.write_bytes(data)
        pointer = snapshot / path
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    for ref in refs:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    if listing:
        (folder / "trees").mkdir(exist_ok=True)
        (folder / "trees" / f"{commit}.json").write_text(json.dumps(listing_of(files)))
    return commit


def listing_of(files: Files) -> dict[str, object]:
    entries: dict[str, dict[str, object]] = {}
    for path, data in files.items():
        etag = etag_of(path, data)
        entries[path] = {"size": len(data), "blob_id": git_sha1(data)}
        if len(etag) == 64:
            entries[path] |= {"lfs_sha256": etag, "lfs_size": len(data)}
    return {"format_version": 1, "files": entries}


def two_repos(cache: Path) -> list[Wanted]:
    """Two pipelines that share an encoder (and more), and a dataset that shares a README."""
    add_repo(cache, "org/first", FIRST)
    add_repo(cache, "org/second", SECOND, refs=("main", "refs/pr/1"))
    add_repo(cache, "org/data", {"a/b/c.parquet": UNET, "empty.txt": b""}, repo_type="dataset")
    return [Wanted.parse(word) for word in ("org/first", "org/second", "datasets/org/data")]


def everything(cache: Path) -> dict[str, tuple[str, bytes]]:
    """Return all that an HF cache has: every name, and its bytes or where it leads."""
    found: dict[str, tuple[str, bytes]] = {}
    for directory, _, names in os.walk(cache):
        for name in names:
            path = Path(directory, name)
            key = os.path.relpath(path, cache)
            if path.is_symlink():
                found[key] = ("link", os.fsencode(os.readlink(path)))
            elif path.is_file():
                found[key] = ("file", path.read_bytes())
    return found


def faults_of(cache: Path) -> list[str]:
    """Return what an unfinished import must never show: pointers without right bytes, and refs."""
    faults: list[str] = []
    for folder in cache.glob("*--*"):
        for path in (folder / "snapshots").glob("*/**/*"):
            if path.is_symlink() and not path.exists():
                faults.append(f"{path} leads nowhere")
            elif path.is_symlink() and not is_right(path.resolve()):
                faults.append(f"{path} leads to wrong bytes")
        blobs = (folder / "blobs").glob("[!.]*")  # the store's temporary names are hidden
        faults += [f"{path} has wrong bytes" for path in blobs if not is_right(path)]
        refs = [path for path in (folder / "refs").rglob("*") if path.is_file()]
        commits = os.listdir(folder / "snapshots")
        faults += [f"{ref} names no snapshot" for ref in refs if ref.read_text() not in commits]
    return faults


def is_right(blob: Path) -> bool:
    data = blob.read_bytes()
    return blob.name in (hashlib.sha256(data).hexdigest(), git_sha1(data))


def planned(cache: Path, *words: str) -> ExportPlan:
    return plan_export([cache], [Wanted.parse(word) for word in words])


def export(cache: Path, destination: Path, *words: str) -> Path:
    """Export repos, all of them if none is named; return the bundle."""
    names = words or tuple(
        str(repo) for repo in map(Repo.of_folder, sorted(os.listdir(cache))) if repo is not None
    )
    plan = planned(cache, *names)
    if destination.suffix == ".tar":
        plan.write_tar(destination)
    else:
        plan.write_folder(destination)
    return destination


def bring(
    store: Store, bundle: Path, cache: Path, *, update_refs: bool = False, force: bool = False
) -> ImportPlan:
    """Import a bundle; return the plan that was carried out."""
    with plan_import(store, bundle, cache, update_refs=update_refs, force=force) as plan:
        plan.execute()
    return plan


class Way:
    """From an HF cache with three repos that share contents to that of another machine."""

    def __init__(self, root: Path, store: Store) -> None:
        self.root = root
        self.store = store
        self.cache = root / "from"
        self.there = root / "to"

    def export(self, form: str = "bundle", *words: str) -> Path:
        return export(self.cache, self.root / form, *words)

    def bring(self, bundle: Path, *, update_refs: bool = False, force: bool = False) -> ImportPlan:
        return bring(self.store, bundle, self.there, update_refs=update_refs, force=force)

    def snapshot(self, name: str = "org/first") -> Path:
        """Where the files of a repo arrive."""
        folder = f"models--{name.replace('/', '--')}"
        commit = (self.cache / folder / "refs" / "main").read_text()
        return self.there / folder / "snapshots" / commit

    def assert_arrived(self) -> None:
        assert everything(self.there) == everything(self.cache)

    def assert_nothing_arrived(self) -> None:
        """Perhaps some blobs, but they are right, and nothing points at them."""
        assert faults_of(self.there) == []
        assert list(self.there.glob("*/refs/*")) == []
        assert list(self.there.glob("*/snapshots/*")) == []
