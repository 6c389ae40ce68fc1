"""Who has which bytes of HF caches: what would come back if names went, and what is shared.

A file on the disk may have several names: in one repo, in several, in huggingface_hub's shared blob
store (`<cache>/blobs/<xx>/<xet hash>`, to which repos have symlinks), in the store, in folders of
other programs. Its blocks come back when the last of them goes. The name in the store does not make
bytes "shared", but they are told apart, because that name must go too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smartcache.hub import layout
from smartcache.hub.layout import Body, CachedRepo, Key, Revision
from smartcache.store.records import Blob
from smartcache.store.store import Store
from smartcache.system.hashing import is_digest

Gone = Iterable[tuple[CachedRepo, Collection[str]]]
"""Names that go, by the repo they are in."""


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

    def __init__(self, repos: Iterable[CachedRepo], store: Store | None = None) -> None:
        self.repos = list(repos)
        self.store = store
        self._users: dict[Key, set[str]] = {}
        names: dict[Key, str] = {}
        for repo in self.repos:
            for name, body in _everything(repo):
                if body.links > 1:
                    names[body.key] = name
                self._users.setdefault(body.key, set()).add(str(repo.repo))
        self.blobs = {} if store is None else blobs_among(names, store)
        """The blobs of the store that are the same file."""
        self._payload_of: dict[str, str] = {}
        """Blob names that lead to a file of huggingface_hub's shared store, and to which."""
        self._leading: dict[str, set[str]] = {}
        """All of them, by that file."""
        self._payloads: dict[str, Body] = {}
        for cache_dir in {repo.cache_dir for repo in self.repos}:
            if layout.has_shared_store(cache_dir):
                self._find_payloads(cache_dir)

    def _find_payloads(self, cache_dir: Path) -> None:
        inside = os.path.join(cache_dir, "blobs", "")
        for repo in self.repos:
            if repo.cache_dir != cache_dir or repo.is_symlink:
                continue
            for name in repo.blob_names:
                target = repo.targets.get(name, "")
                xet = os.path.basename(target)
                if not is_digest(xet) or target != os.path.join(inside, xet[:2], xet):
                    continue
                try:
                    body = Body.of(os.lstat(target))
                except OSError:
                    continue
                if body.is_file:
                    self._payload_of[name] = target
                    self._leading.setdefault(target, set()).add(name)
                    self._payloads[target] = body

    def going(self, gone: Gone) -> Counter[Key]:
        """Count the names that each inode loses with these.

        A file of a shared store loses its own name too when nobody leads to it any more.
        """
        going: Counter[Key] = Counter()
        lost: set[str] = set()
        for repo, names in gone:
            if not repo.is_symlink:  # what is behind one is not this repo's
                going.update(repo.names[name].key for name in names)
                lost.update(name for name in names if name in self._payload_of)
        for target in {self._payload_of[name] for name in lost}:
            if self._leading[target] <= lost:
                going[self._payloads[target].key] += 1
        return going

    def _share(self, bodies: Iterable[Body], gone: Gone) -> Share:
        """Say what of some files would come back if these names went, and what would stay."""
        going = self.going(gone)
        own = shared = in_store = 0
        for key, body in {body.key: body for body in bodies}.items():
            if self.others(body, going) > 0:
                shared += body.allocated
                continue
            own += body.allocated
            if key in self.blobs:
                in_store += body.allocated
        return Share(own=own, shared=shared, in_store=in_store)

    def others(self, body: Body, going: Counter[Key]) -> int:
        """Return how many names of a file are left outside the store without those that go."""
        blob = self.blobs.get(body.key)
        inside = 0 if blob is None else 1 + len(blob.pins)
        return body.links - going[body.key] - inside

    def share_of_all(self, repos: Iterable[CachedRepo]) -> Share:
        """Say what some repos have together."""
        chosen = list(repos)
        bodies = (body for repo in chosen for body in used(repo).values())
        return self._share(bodies, [(repo, repo.names) for repo in chosen])

    def share_of_repo(self, repo: CachedRepo) -> Share:
        """Say what a repo has for itself."""
        return self.share_of_all([repo])

    def share_of_revision(self, repo: CachedRepo, revision: Revision) -> Share:
        """Say what would come back if this revision alone went."""
        names = names_of_revisions(repo, {revision.commit})
        return self._share(revision.bodies.values(), [(repo, names)])

    def users_of(self, key: Key) -> set[str]:
        """Return the repos that have a file, as text."""
        return self._users.get(key, set())


def used(repo: CachedRepo) -> dict[Key, Body]:
    """Return everything a repo stands for: its names, and the files its symlinks lead to."""
    return {body.key: body for _, body in _everything(repo)}


def _everything(repo: CachedRepo) -> Iterator[tuple[str, Body]]:
    yield from repo.names.items()
    for name, to in repo.targets.items():
        body = None if to in repo.names else repo.body_behind(name)
        if body is not None and body.is_file:
            yield name, body


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
    names = [
        os.path.join(repo.folder, "refs", *ref.split("/"))
        for ref, commit in repo.refs.items()
        if commit in commits
    ]
    blobs = os.path.join(repo.folder, "blobs", "")
    for blob, pointers in groups.items():
        if blob not in kept and blob.startswith(blobs):
            names.append(blob)
        names += pointers
    below = tuple(
        os.path.join(repo.folder, kind, commit, "")
        for kind in ("snapshots", ".no_exist")
        for commit in commits
    )
    names += [each for each in repo.names if each.startswith(below)]
    names += [os.path.join(repo.folder, "trees", f"{commit}.json") for commit in commits]
    return [name for name in dict.fromkeys(names) if name in repo.names]


def blobs_among(names: Mapping[Key, str], store: Store) -> dict[Key, Blob]:
    """Return which of these files, each by one of its names, are blobs of a store."""
    found = ((key, store.blob_at(name)) for key, name in names.items())
    return {key: blob for key, blob in found if blob is not None}
