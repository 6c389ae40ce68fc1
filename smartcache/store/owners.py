"""What keeps blobs alive, and whether it still does.

An owner is live while its path exists. Where the path is gone there are two cases. If its root
directory is still there, on the filesystem it was on, the owner was deleted. If the root itself is
gone or another filesystem shows in its place, the owner is *away*: a drive that is not mounted is
no garbage.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from smartcache.errors import BlobNotFoundError
from smartcache.store.changes.journal import Batch, Change
from smartcache.store.records import Blob, Link, Owner
from smartcache.store.volume import Volume
from smartcache.system.filesystems import filesystem_id, nearest_existing
from smartcache.system.kernel import allocated_bytes
from smartcache.system.sqlite import signed

_PAGE = 1000

Liveness = Literal["live", "dead", "away"]
Holding = tuple[Owner, Liveness]
"""An owner that holds a blob, and whether it exists."""


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


def link_liveness(link: Link) -> Liveness:
    """Say whether a recorded link still shares its blob."""
    try:
        st = os.lstat(link.path)
    except FileNotFoundError:
        parent = nearest_existing(link.path.parent)
        return "dead" if filesystem_id(parent) == link.filesystem else "away"
    except OSError:
        return "away"
    is_dead = link.kind == "hardlink" and signed(st.st_ino) != link.inode
    return "dead" if is_dead else "live"


def link_pages(volume: Volume) -> Iterator[list[Link]]:
    """Go through the recorded links by path, some at a time: whoever does may write in between."""
    after = ""
    while page := volume.index.links_after(after, _PAGE):
        after = str(page[-1].path)
        yield page


def is_wanted(holders: Iterable[Holding], *, drop_away: bool = False) -> bool:
    """Say whether a blob must stay; `drop_away`: owners on absent drives are gone."""
    states = {state for _, state in holders}
    return "live" in states or ("away" in states and not drop_away)


def keepers_of(volume: Volume, blob: Blob) -> list[Holding]:
    """Return the owners that still hold a blob, live or away, checked against the disk now."""
    owners = [(owner, liveness(owner)) for owner in volume.index.holders_of(blob.id)]
    return _keepers(owners, volume.index.links_of(blob.id))


def _keepers(owners: Iterable[Holding], links: Iterable[Link]) -> list[Holding]:
    """Ask the owners and links on record, of which the disk knows whether they are still there.

    An owner that held the blob through links holds it only while one of those links is there.
    """
    through: dict[int, set[Liveness]] = {}
    for link in links:
        if link.owner is not None:
            through.setdefault(link.owner, set()).add(link_liveness(link))
    holders: list[Holding] = []
    for owner, exists in owners:
        states = through.get(owner.id, {exists}) if exists == "live" else {exists}
        if states != {"dead"}:
            holders.append((owner, "live" if "live" in states else "away"))
    return holders


class Page(NamedTuple):
    """Some blobs as they are now, by their numbers."""

    stats: dict[int, os.stat_result]
    owners: dict[int, list[Holding]]
    """The owners on record, deleted ones too."""
    alone: list[tuple[Blob, list[Holding]]]
    """Those that only smartcache has, and who wants them all the same; `allocated` is of now."""


def look(volume: Volume) -> Iterator[Page]:
    """Go through the blobs whose files are there: one stat for each, and each owner asked once."""
    index = volume.index
    known: dict[int, Holding] = {}
    for page in index.digests():
        found = ((blob, _stat(volume.layout.blob(digest))) for blob, digest in page)
        stats = {blob: st for blob, st in found if st is not None}
        holds = index.holds_among(stats)
        if any(owner not in known for some in holds.values() for owner in some):
            known |= {o.id: (o, liveness(o)) for o in index.owners() if o.id not in known}
        owners = {blob: [known[o] for o in some if o in known] for blob, some in holds.items()}
        lonely = [blob for blob, st in stats.items() if st.st_nlink == 1]
        links = index.links_among(lonely)
        alone = [
            (
                replace(blob, allocated=allocated_bytes(stats[blob.id])),
                _keepers(owners.get(blob.id, ()), links.get(blob.id, ())),
            )
            for blob in index.blobs_among(lonely)
        ]
        yield Page(stats, owners, alone)


def _stat(path: str) -> os.stat_result | None:
    """Return the stat of a blob's file as of now, None if there is none."""
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        return None
    return st if stat.S_ISREG(st.st_mode) else None


def held_alone(volume: Volume, blob: Blob) -> int | None:
    """Return the bytes of a blob whose last link is the store's, as of now; else None."""
    st = _stat(volume.layout.blob(blob.digest))
    return allocated_bytes(st) if st is not None and st.st_nlink == 1 else None


def own(volume: Volume, owner: Owner, digests: list[str]) -> int:
    """Let an owner hold blobs; return its id. Holding a blob that is not there is an error."""
    with volume.guard("own"), volume.index.write():
        owner_id = volume.index.add_owner(complete(owner))
        for digest in digests:
            blob = volume.index.blob(digest)
            if blob is None:
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
