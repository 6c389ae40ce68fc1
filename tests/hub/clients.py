"""Two clients of one Hub: smartcache, and huggingface_hub alone for comparison."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import huggingface_hub

from smartcache.cache import SmartCache
from smartcache.hub.api import Call
from smartcache.hub.plan import DownloadPlan
from smartcache.store.catalog import FileRow
from smartcache.store.store import Store
from smartcache.system.filesystems import filesystem_id
from tests.hub_server import Hub
from tests.processes.children import NOBODY, Child

T = TypeVar("T")

SIZE = 100_000


def weights(seed: int, size: int = SIZE) -> bytes:
    """Return bytes that are like no others."""
    return random.Random(seed).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Client:
    """smartcache with a store of its own, and an HF cache that it downloads to."""

    def __init__(self, smart: SmartCache, hub: Hub, cache: Path) -> None:
        self.smart = smart
        self.hub = hub
        self.cache = cache

    @property
    def store(self) -> Store:
        return self.smart.store

    def call(self, name: str, filename: str | None = None, /, **more: object) -> Call:
        arguments = {"cache_dir": self.cache, "endpoint": self.hub.url, **more}
        return Call(repo_id=name, filename=filename, arguments=arguments)

    def snapshot(self, name: str = "org/name", /, **more: object) -> Path:
        return Path(self.smart.download(self.call(name, **more)))

    def file(self, name: str, filename: str, /, **more: object) -> Path:
        return Path(self.smart.download(self.call(name, filename, **more)))

    def plan(self, name: str = "org/name", /, **more: object) -> DownloadPlan:
        return self.smart.plan_download(self.call(name, **more))

    def sources(self, name: str = "org/name", /, **more: object) -> dict[str, str]:
        """Return where each file would come from."""
        return {each.file.path: each.source for each in self.plan(name, **more).files}

    def blob_of(self, data: bytes) -> Path:
        """Return the blob in the store that has these bytes."""
        found = self.store.find("sha256", sha256(data))
        assert found is not None
        return self.store.path_of(found.digest)


def plain_snapshot(hub: Hub, cache: Path, name: str = "org/name", /, **more: object) -> Path:
    """Download with huggingface_hub alone."""
    download = cast("Callable[..., str]", huggingface_hub.snapshot_download)
    return Path(download(name, **{"cache_dir": cache, "endpoint": hub.url, **more}))


def plain_file(hub: Hub, cache: Path, name: str, filename: str, /, **more: object) -> Path:
    """Download one file with huggingface_hub alone."""
    download = cast("Callable[..., str]", huggingface_hub.hf_hub_download)
    return Path(download(name, filename, **{"cache_dir": cache, "endpoint": hub.url, **more}))


def contents(root: Path) -> dict[str, str | bytes]:
    """Return everything below a folder but locks: symlinks by target, files by bytes."""
    found: dict[str, str | bytes] = {}
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name != ".locks"]
        if not below and not names:
            found[f"{os.path.relpath(directory, root)}/"] = ""
        for name in names + [name for name in below if os.path.islink(f"{directory}/{name}")]:
            path = Path(directory, name)
            is_link = path.is_symlink()
            found[str(path.relative_to(root))] = os.readlink(path) if is_link else path.read_bytes()
    return found


def wrong_blobs(store: Store, *caches: Path) -> list[Path]:
    """Return the blobs of a store and of HF caches whose bytes are not what their name says."""
    wrong = []
    for blob in store.blobs():
        path = store.path_of(blob.digest)
        known = store.hashes_of(blob.digest).get("sha256")
        if known not in (None, sha256(path.read_bytes())):
            wrong.append(path)
    named = [path for cache in caches for path in cache.glob("*/blobs/*") if path.is_file()]
    lfs = [path for path in named if len(path.name) == 64]
    wrong += [path for path in lfs if sha256(path.read_bytes()) != path.name]
    return wrong


def believe(store: Store, path: Path, digest: str) -> None:
    """Let a store remember bytes of a file that the disk has changed since, without a trace."""
    st = os.stat(path)
    store.catalog.remember([FileRow.of(filesystem_id(path, st), st, digest)])


def state_of(path: Path) -> tuple[int, ...]:
    """Return all that must stay as it is of a file that belongs to somebody else."""
    st = os.lstat(path)
    return (st.st_mode, st.st_ino, st.st_nlink, st.st_size, st.st_mtime_ns, st.st_ctime_ns)


def assert_sound(client: Client) -> None:
    """Nothing in the store is damaged, strange or writable, nor any blob of the cache."""
    report = client.store.verify(full=True)
    assert not any((report.damaged, report.stray, report.writable))
    assert wrong_blobs(client.store, client.cache) == []


def as_ordinary_user(work: Callable[[], T]) -> T:
    """Run a function in a child process that is not root's; it passes `token=False` to the Hub."""
    _load_everything()
    with Child(work, user=NOBODY) as child:
        return child.result()


@functools.cache
def _load_everything() -> None:
    """Import what downloads import on first use: others may be unable to read the modules."""
    with (
        tempfile.TemporaryDirectory() as name,
        Hub() as hub,
        SmartCache(Path(name) / "store") as smart,
    ):
        root = Path(name)
        client = Client(smart, hub, root / "hf")
        hub.add("org/name", {"a.bin": weights(1), "b.json": b"{}"})
        smart.scan(root)
        client.snapshot(token=False)
        client.file("org/name", "a.bin", token=False)
        client.snapshot(token=False, local_dir=root / "local")
        plain_snapshot(hub, root / "plain", token=False)
        plain_snapshot(hub, root / "plain", token=False, local_dir=root / "other")
        assert_sound(client)
