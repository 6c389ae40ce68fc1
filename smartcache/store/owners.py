"""What keeps blobs alive, and whether it still does.

An owner is live while its path exists. Where the path is gone there are two cases. If its root
directory is still there, on the filesystem it was on, the owner was deleted. If the root itself is
gone or another filesystem shows in its place, the owner is *away*: a drive that is not mounted is
no garbage.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from smartcache.errors import BlobNotFoundError
from smartcache.store.filesystems import filesystem_id, nearest_existing
from smartcache.store.journal import Batch, Change
from smartcache.store.records import Blob, Link, Owner
from smartcache.store.schema import signed
from smartcache.store.statkey import allocated_bytes
from smartcache.store.volume import Volume

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


def live_holders(volume: Volume, blob: Blob) -> list[Holding]:
    """Return the owners that still hold a blob, live or away, checked against the disk now.

    An owner that held the blob through links holds it only while one of those links is there.
    """
    owners = [(owner, liveness(owner)) for owner in volume.index.holders_of(blob.id)]
    return _still_holding(volume, owners, volume.index.links_of(blob.id))


def _still_holding(
    volume: Volume, owners: Iterable[Holding], links: Iterable[Link]
) -> list[Holding]:
    of_owner: dict[int, list[Link]] = {}
    for link in links:
        if link.owner is not None:
            of_owner.setdefault(link.owner, []).append(link)
    holders: list[Holding] = []
    for owner, exists in owners:
        state = exists
        if state == "live" and owner.id in of_owner:
            states = {link_liveness(volume, link) for link in of_owner[owner.id]}
            state = "live" if "live" in states else "away" if "away" in states else "dead"
        if state != "dead":
            holders.append((owner, state))
    return holders


def living_symlinks(volume: Volume, blob: Blob) -> list[Link]:
    """Return the recorded symlinks that still point at a blob, or may (their drive is away)."""
    return _living(volume, volume.index.links_of(blob.id))


def _living(volume: Volume, links: Iterable[Link]) -> list[Link]:
    symlinks = (link for link in links if link.kind == "symlink")
    return [link for link in symlinks if link_liveness(volume, link) != "dead"]


def wants(
    holders: Collection[Holding], symlinks: Collection[Link], *, drop_away: bool = False
) -> bool:
    """Say whether one of these keeps a blob alive; `drop_away`: absent drives are gone."""
    states = {state for _, state in holders}
    return "live" in states or ("away" in states and not drop_away) or bool(symlinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A blob that only smartcache has, and who wants it all the same."""

    blob: Blob
    """`allocated` is of now."""
    holders: Collection[Holding]
    symlinks: Collection[Link]

    def is_wanted(self, *, drop_away: bool = False) -> bool:
        """Say whether it must stay."""
        return wants(self.holders, self.symlinks, drop_away=drop_away)


class Look:
    """A look at all blobs as they are now: one stat for each blob, and each owner is asked once."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._known: dict[int, Holding] = {}

    def pages(self) -> Iterator[dict[int, os.stat_result]]:
        """Go through the blobs whose files are there: their numbers and stats."""
        blob_path = self._volume.layout.blob
        for page in self._volume.index.digests():
            stats = ((blob, _stat(blob_path(digest))) for blob, digest in page)
            yield {blob: st for blob, st in stats if st is not None}

    def alone(self, page: dict[int, os.stat_result]) -> Iterator[Alone]:
        """Go through those of a page that have no name outside the store."""
        index = self._volume.index
        numbers = [blob for blob, st in page.items() if st.st_nlink == 1]
        if not numbers:
            return
        holds, links = self.owners(numbers), index.links_among(numbers)
        for blob in index.blobs_among(numbers):
            own = links.get(blob.id, [])
            yield Alone(
                blob=replace(blob, allocated=allocated_bytes(page[blob.id])),
                holders=_still_holding(self._volume, holds.get(blob.id, ()), own),
                symlinks=_living(self._volume, own),
            )

    def owners(self, blobs: Collection[int]) -> dict[int, list[Holding]]:
        """Return the owners on record for some blobs, deleted ones too."""
        index, known = self._volume.index, self._known
        holds = index.holds_among(blobs)
        if any(owner not in known for owners in holds.values() for owner in owners):
            known |= {o.id: (o, liveness(o)) for o in index.owners() if o.id not in known}
        return {blob: [known[o] for o in owners if o in known] for blob, owners in holds.items()}


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
