"""Who has which bytes of HF caches: what would come back if names went, and what is shared.

A file on the disk may have several names: in one repo, in several, in huggingface_hub's shared blob
store (`<cache>/blobs/<xx>/<xet hash>`, to which repos have symlinks), in the store, in folders of
other programs. Its blocks come back when the last of them goes. The name in the store does not make
bytes "shared", but they are told apart, because that name must go too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from smartcache.hub import sharedstore
from smartcache.hub.repos import Body, CachedRepo, Key, Revision
from smartcache.store import Blob, Store
from smartcache.system import signed

Gone = Iterable[tuple[CachedRepo, Collection[str]]]
"""Names that go, by the repo they are in."""

_PAYLOAD = re.compile(r"([0-9a-f]{2})[/\\](?=\1)[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Disk blocks, in bytes, each inode once."""

    own: int
    """Nobody else has a name for them, apart from the store."""
    shared: int
    """Something else has them too: another repo or revision, a folder, whatever made a link."""
    in_store: int
    """Those of `own` that are blobs of the store as well: they come back when the blob goes."""


class Census:
    """Repos seen together, so that it is known what they share."""

    def __init__(self, repos: Iterable[CachedRepo], stores: Iterable[Store] = ()) -> None:
        self.repos = list(repos)
        self.payloads: dict[str, Body] = {}
        """Files of huggingface_hub's shared blob stores that repos have symlinks to."""
        self.referrers: dict[str, set[str]] = {}
        """The blob names that lead to each of them."""
        self.payload_of: dict[str, str] = {}
        """Which of them a blob name leads to."""
        self._users: dict[Key, set[str]] = {}
        for cache_dir in {repo.cache_dir for repo in self.repos}:
            if sharedstore.is_usable(cache_dir):
                self._find_payloads(cache_dir)
        everything = {key: body for repo in self.repos for key, body in used(repo).items()}
        self.blobs = blobs_among(everything, stores)
        """The blobs of the store that are the same file."""

    def _find_payloads(self, cache_dir: Path) -> None:
        inside = os.path.join(cache_dir, "blobs", "")
        for repo in self.repos:
            if repo.cache_dir != cache_dir or repo.is_symlink:
                continue
            for name in repo.blob_names:
                target = repo.targets.get(name, "")
                if not target.startswith(inside):
                    continue
                if _PAYLOAD.fullmatch(target.removeprefix(inside)) is None:
                    continue
                try:
                    body = Body.of(os.lstat(target))
                except OSError:
                    continue
                if body.is_file:
                    self.payloads[target] = body
                    self.referrers.setdefault(target, set()).add(name)
                    self.payload_of[name] = target

    def share(self, bodies: Iterable[Body], gone: Gone) -> Share:
        """Say what of some files would come back if these names went, and what would stay."""
        going = self.going(gone)
        own = shared = in_store = 0
        for key, body in {body.key: body for body in bodies}.items():
            if body.links > going[key] + (key in self.blobs):
                shared += body.allocated
                continue
            own += body.allocated
            if key in self.blobs:
                in_store += body.allocated
        return Share(own=own, shared=shared, in_store=in_store)

    def going(self, gone: Gone) -> Counter[Key]:
        """Count the names that each inode loses with these, those of the shared stores with it."""
        going: Counter[Key] = Counter()
        lost: set[str] = set()
        for repo, names in gone:
            if not repo.is_symlink:  # what is behind one is not this repo's
                going.update(repo.names[name].key for name in names)
                lost.update(name for name in names if name in self.payload_of)
        going.update(self.payloads[each].key for each in self.lost_payloads(lost))
        return going

    def lost_payloads(self, gone: set[str]) -> set[str]:
        """Return the files of shared blob stores that nobody leads to when these names are gone."""
        touched = {self.payload_of[name] for name in gone if name in self.payload_of}
        return {each for each in touched if self.referrers[each] <= gone}

    def share_of_repo(self, repo: CachedRepo) -> Share:
        """Say what a repo has for itself."""
        return self.share(used(repo).values(), [(repo, repo.names)])

    def share_of_revision(self, repo: CachedRepo, revision: Revision) -> Share:
        """Say what would come back if this revision alone went."""
        names = names_of_revisions(repo, {revision.commit})
        return self.share(revision.bodies.values(), [(repo, names)])

    def share_of_all(self, repos: Iterable[CachedRepo]) -> Share:
        """Say what some repos have together."""
        chosen = list(repos)
        bodies = (body for repo in chosen for body in used(repo).values())
        return self.share(bodies, [(repo, repo.names) for repo in chosen])

    def users_of(self, key: Key) -> set[str]:
        """Return the repos that have a file, as text."""
        if not self._users:
            for repo in self.repos:
                for each in used(repo):
                    self._users.setdefault(each, set()).add(str(repo.repo))
        return self._users.get(key, set())


def used(repo: CachedRepo) -> dict[Key, Body]:
    """Return everything a repo stands for: its names, and the files its symlinks lead to."""
    bodies = {body.key: body for body in repo.names.values()}
    outside = {*repo.targets.values()} - repo.names.keys()
    behind = (repo.body_behind(name) for name, to in repo.targets.items() if to in outside)
    return bodies | {body.key: body for body in behind if body is not None and body.is_file}


def names_of_revisions(repo: CachedRepo, commits: set[str]) -> list[str]:
    """Return the names that only these revisions need: their files, blobs, refs and listings.

    In the order they are removed: a ref before what it names, a blob right before its pointers. If
    that ends early, the rest is found by its pointers; a blob without any would never be found.
    """
    kept = {p.blob for each in repo.revisions if each.commit not in commits for p in each.pointers}
    groups: dict[str, list[str]] = {}
    for revision in repo.revisions:
        if revision.commit in commits:
            for pointer in revision.pointers:
                groups.setdefault(pointer.blob, []).append(pointer.name)
    refs = [
        os.path.join(repo.folder, "refs", *ref.split("/"))
        for ref, commit in repo.refs.items()
        if commit in commits
    ]
    names: dict[str, None] = dict.fromkeys(refs)
    blobs = os.path.join(repo.folder, "blobs", "")
    for blob, pointers in groups.items():
        if blob not in kept and blob.startswith(blobs):
            names[blob] = None
        names.update(dict.fromkeys(pointers))
    below = [
        os.path.join(repo.folder, kind, commit, "")
        for kind in ("snapshots", ".no_exist")
        for commit in commits
    ]
    names.update(dict.fromkeys(each for each in repo.names if each.startswith(tuple(below))))
    listings = (os.path.join(repo.folder, "trees", f"{commit}.json") for commit in commits)
    names.update(dict.fromkeys(listings))
    return [name for name in names if name in repo.names]


def blobs_among(bodies: dict[Key, Body], stores: Iterable[Store]) -> dict[Key, tuple[Store, Blob]]:
    """Return which of these files are blobs of a store: one inode, checked on the disk now."""
    found: dict[Key, tuple[Store, Blob]] = {}
    for store in stores:
        device = store.volume.device
        inodes = {signed(inode): inode for dev, inode in bodies if dev == device}
        for number, blob in store.volume.index.blobs_in(inodes.values()).items():
            try:
                st = os.stat(store.volume.layout.blob(blob.digest))
            except OSError:
                continue
            if (st.st_dev, st.st_ino) == (device, inodes[number]):
                found[device, inodes[number]] = store, blob
    return found
