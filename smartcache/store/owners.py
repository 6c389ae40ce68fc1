"""What keeps blobs alive, and whether it still does.

An owner is live while its path exists. Where the path is gone there are two cases. If its root
directory is still there, on the filesystem it was on, the owner was deleted. If the root itself is
gone or another filesystem shows in its place, the owner is *away*: a drive that is not mounted is
no garbage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from smartcache.errors import BlobNotFoundError
from smartcache.store.filesystems import filesystem_id, nearest_existing
from smartcache.store.journal import Batch, Change
from smartcache.store.records import Blob, Link, Owner
from smartcache.store.schema import signed
from smartcache.store.volume import Volume

Liveness = Literal["live", "dead", "away"]


def pin(name: str) -> Owner:
    """Return the owner that is a named pin."""
    return Owner(kind="pin", name=name)


def complete(owner: Owner) -> Owner:
    """Return an owner with the filesystem of its root, which tells later if it is mounted."""
    if owner.path is None:
        return owner
    root = owner.root or owner.path
    return replace(owner, root=root, filesystem=filesystem_id(nearest_existing(root)))


def liveness(owner: Owner) -> Liveness:
    """Say whether an owner exists, was deleted, or is on a drive that is not here."""
    if owner.path is None or os.path.lexists(owner.path):
        return "live"
    root = owner.root or owner.path
    if not root.is_dir() or filesystem_id(root) != owner.filesystem:
        return "away"
    return "dead"


def link_liveness(volume: Volume, link: Link) -> Liveness:
    """Say whether a recorded link still shares its blob."""
    try:
        st = os.lstat(link.path)
    except FileNotFoundError:
        parent = nearest_existing(link.path.parent)
        return "dead" if filesystem_id(parent) == link.filesystem else "away"
    except OSError:
        return "away"
    if link.kind == "symlink":
        if not os.path.islink(link.path):
            return "dead"
        return "live" if _points_at(link.path, volume.layout.blob(link.digest)) else "dead"
    if link.kind == "hardlink":
        return "live" if signed(st.st_ino) == link.inode else "dead"
    return "live"


def _points_at(path: Path, target: str) -> bool:
    """Say whether a symlink leads to a blob, maybe through the old root of a moved store."""
    if os.readlink(path) == target:
        return True
    try:
        return os.path.samefile(path, target)
    except OSError:
        return False


def live_holders(volume: Volume, blob: Blob) -> list[tuple[Owner, Liveness]]:
    """Return the owners that still hold a blob, live or away, checked against the disk now.

    An owner that held the blob through links holds it only while one of those links is there.
    """
    links: dict[int, list[Link]] = {}
    for link in volume.index.links_of(blob.id):
        if link.owner is not None:
            links.setdefault(link.owner, []).append(link)
    holders: list[tuple[Owner, Liveness]] = []
    for owner in volume.index.holders_of(blob.id):
        state = liveness(owner)
        if state == "live" and owner.id in links:
            states = {link_liveness(volume, link) for link in links[owner.id]}
            state = "live" if "live" in states else "away" if "away" in states else "dead"
        if state != "dead":
            holders.append((owner, state))
    return holders


def living_symlinks(volume: Volume, blob: Blob) -> list[Link]:
    """Return the recorded symlinks that still point at a blob, or may (their drive is away)."""
    return [
        link
        for link in volume.index.links_of(blob.id)
        if link.kind == "symlink" and link_liveness(volume, link) != "dead"
    ]


def own(volume: Volume, owner: Owner, digests: list[str]) -> int:
    """Let an owner hold blobs; return its id. Holding a blob that is not there is an error."""
    with volume.guard("own"), volume.index.write():
        owner_id = volume.index.add_owner(complete(owner))
        for digest in digests:
            blob = volume.index.blob(digest)
            if blob is None or not blob.is_here:
                raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest)
            volume.index.hold(owner_id, blob.id)
    return owner_id


def find_owner(volume: Volume, kind: str, name: str) -> Owner | None:
    """Return a recorded owner by kind and name."""
    matching = (o for o in volume.index.owners() if (o.kind, o.name) == (kind, name))
    return next(matching, None)


@contextmanager
def journaled_pin(batch: Batch, digest: str, name: str, *, pinned: bool) -> Iterator[None]:
    """Note in the journal what the block does to a pin: it survives the loss of the index."""
    change = Change(op="pin" if pinned else "unpin", path=Path(name), digest=digest, size=0)
    batch.begin([change])
    try:
        yield
    except BaseException:
        batch.end(change, "back")
        raise
    batch.end(change, "done")
