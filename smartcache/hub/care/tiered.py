"""A repo on a tier: what its document says, and how the repo comes into an HF cache.

The content of the document is the manifest of a bundle with one repo, and which object of the tier
has which content: {"manifest": {...}, "digests": {<sha256>: <digest>}}. Revisions that several
machines have pushed stand beside each other. As of a bundle, nothing is believed: a manifest that
is not in order is refused, and each byte is hashed before a file has its name.

Large files come first, several at once, and become blobs; then it is an import like any other,
which finds them in the store. What is interrupted has lost nothing that had arrived.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from smartcache.errors import BundleError, DamagedObjectError, DigestMismatchError
from smartcache.hub import layout
from smartcache.hub.care.bundle import (
    BundledRepo,
    Chunks,
    Content,
    Manifest,
    Revision,
    decode,
    encode,
    is_safe_id,
)
from smartcache.hub.care.carry import ImportPlan, plan_source
from smartcache.hub.outcome import FileChanges
from smartcache.hub.records import RemoteFile, Repo
from smartcache.hub.remote import select
from smartcache.hub.transfer import Workers
from smartcache.progress import Progress, silent
from smartcache.store.sources import BlobSource, Document, Offer
from smartcache.store.store import Store
from smartcache.system.faults import reached
from smartcache.system.hashing import Algorithm, is_digest

if TYPE_CHECKING:
    from smartcache.hub.plan import Request
    from smartcache.store.blobs import Holding

REPO_DOCUMENTS = "repos"
"""The documents that are of repos; each is named as the repo's folder in an HF cache."""
_AT_ONCE = 8
_BLOBS_AT_ONCE = 4
"""Of each, some pieces of 8 MB are in memory."""
_SMALL = 1 << 20
"""Contents up to this size are fetched ahead, so many at once."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredRepo:
    """What a tier has of a repo: a manifest of this repo alone, and the object of each content."""

    manifest: Manifest
    digests: Mapping[str, str]

    @property
    def bundled(self) -> BundledRepo:
        """Its refs and revisions."""
        return self.manifest.repos[0]

    @property
    def objects(self) -> dict[str, int]:
        """Every object that it needs, and its size."""
        contents = self.manifest.contents()
        return {self.digests[sha256]: size for sha256, size in contents.items()}

    def content(self) -> Document:
        """Return the content of its document."""
        manifest = json.loads(encode(self.manifest))
        digests = {sha256: self.digests[sha256] for sha256 in self.manifest.contents()}
        return {"manifest": manifest, "digests": digests}


def read_pushed(repo: Repo, content: Document, tier: str) -> TieredRepo:
    """Return what the content of a document says, checked; DamagedObjectError if it is no good."""
    try:
        manifest = decode(json.dumps(content["manifest"]).encode())
        digests: dict[str, str] = content["digests"]
        if [each.repo for each in manifest.repos] != [repo]:
            raise ValueError("it is about another repo")
        if not all(is_digest(digests[sha256]) for sha256 in manifest.contents()):
            raise ValueError("it names an object that cannot be one")
    except (BundleError, ValueError, TypeError, LookupError, AttributeError) as error:
        message = f"What the tier {tier} says of {repo} cannot be used: {error}"
        place = f"documents/{REPO_DOCUMENTS}/{repo.folder_name}"
        hint = f"Update smartcache; or remove {place} there, and push it again."
        raise DamagedObjectError(message, hint=hint, tier=tier) from error
    return TieredRepo(manifest=manifest, digests=digests)


def merge_pushed(before: TieredRepo, new: TieredRepo) -> TieredRepo:
    """Return what a tier has of a repo after a push: all revisions, and the refs as pushed.

    A snapshot may be incomplete here: of a commit that the tier has, no file is lost.
    """
    old, now = before.bundled, new.bundled
    revisions = dict(old.revisions)
    for commit, revision in now.revisions.items():
        known = revisions.get(commit, Revision(files={}))
        revisions[commit] = Revision(
            files={**known.files, **revision.files}, tree=known.tree or revision.tree
        )
    bundled = replace(now, refs={**old.refs, **now.refs}, revisions=revisions)
    known_blobs = {**before.manifest.blobs, **new.manifest.blobs}
    manifest = _manifest_of(before.manifest, bundled, known_blobs)
    if manifest != before.manifest:
        manifest = replace(manifest, created_at=new.manifest.created_at)
    return TieredRepo(manifest=manifest, digests={**before.digests, **new.digests})


def only_revisions(
    tiered: TieredRepo, commits: Iterable[str], choose: Callable[[str], bool]
) -> TieredRepo:
    """Return some revisions of a repo, with the files that are chosen by path."""
    bundled, wanted = tiered.bundled, set(commits)
    revisions = {
        commit: replace(
            revision, files={name: etag for name, etag in revision.files.items() if choose(name)}
        )
        for commit, revision in bundled.revisions.items()
        if commit in wanted
    }
    refs = {ref: commit for ref, commit in bundled.refs.items() if commit in wanted}
    some = replace(bundled, refs=refs, revisions=revisions)
    manifest = _manifest_of(tiered.manifest, some, tiered.manifest.blobs)
    return replace(tiered, manifest=manifest)


def _manifest_of(like: Manifest, repo: BundledRepo, blobs: Mapping[str, Content]) -> Manifest:
    """Return a manifest of one repo that describes what the repo names, and nothing else."""
    described = {name: blobs[name] for name in sorted(repo.blobs())}
    return replace(like, repos=(repo,), blobs=described)


# from a tier into an HF cache


class TierSource:
    """A repo on a tier, read as a bundle. Small contents that are `wanted` are fetched ahead."""

    def __init__(self, tier: BlobSource, repo: TieredRepo) -> None:
        self.manifest = repo.manifest
        self.wanted: set[str] = set()
        self._offers = {
            sha256: Offer(tier=tier, digest=repo.digests[sha256], size=size)
            for sha256, size in repo.manifest.contents().items()
        }

    def offer(self, sha256: str) -> Offer:
        """Return the object that has a content."""
        return self._offers[sha256]

    def contents(self) -> Iterator[tuple[str, Chunks]]:
        """Go through the contents; what is neither wanted nor asked for is not fetched."""
        offers = self._offers
        small = {each for each in offers if each in self.wanted and offers[each].size <= _SMALL}
        coming = iter([each for each in offers if each in small])
        ahead: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(_AT_ONCE, "smartcache-tier") as pool:
            try:
                for sha256, offer in offers.items():
                    if sha256 not in small:
                        yield sha256, offer.chunks
                        continue
                    while len(ahead) < 2 * _AT_ONCE and (next_one := next(coming, None)):
                        ahead.append(pool.submit(_whole, offers[next_one]))
                    yield sha256, partial(_when_there, ahead.popleft())
            finally:
                for each in ahead:
                    each.cancel()


def _whole(offer: Offer) -> bytes:
    data = b"".join(offer.chunks())
    with offer.judged():
        found = blake3(data).hexdigest()
        if found != offer.digest:
            raise DigestMismatchError(f"it has the digest {found}")
    return data


def _when_there(coming: Future[bytes]) -> Iterator[bytes]:
    yield coming.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """What would come from a tier into an HF cache; `execute` brings it."""

    repo: Repo
    tier: str
    importing: ImportPlan
    _source: TierSource

    @property
    def size(self) -> int:
        """The bytes that come from the tier."""
        return self.importing.new_size

    @property
    def present_size(self) -> int:
        """The bytes that this machine has: in the HF cache, or in the store."""
        return self.importing.present_size + self.importing.known_size

    def execute(self, *, progress: Progress = silent) -> FileChanges:
        """Bring it in. What is interrupted goes on where it was, object by object."""
        blobs = self.importing.blobs_to_come()
        with self.importing.importer.store.holding() as holding:  # until they have names
            if blobs:
                self._take(blobs, holding, progress)
            reached("pull: blobs there")
            self._source.wanted = self.importing.missing() - blobs.keys()
            return self.importing.execute(progress=progress)

    def _take(
        self, blobs: Mapping[str, Mapping[Algorithm, str]], holding: Holding, progress: Progress
    ) -> None:
        """Take objects into the store, the largest first."""
        offers = {sha256: self._source.offer(sha256) for sha256 in blobs}
        total = sum(each.size for each in offers.values())
        importer = self.importing.importer
        with (
            progress(f"Pulling {self.repo}", total, "bytes") as job,
            Workers({"fetch": _BLOBS_AT_ONCE}) as workers,
        ):

            def bring(sha256: str) -> None:
                if not workers.is_stopping.is_set():
                    offer, pool = offers[sha256], importer.near or importer.store.pools()[0]
                    digest = offer.take(importer.store, pool, blobs[sha256], job.advance)
                    holding.hold(digest, pool)
                    reached("pull: blob taken")

            for sha256 in sorted(blobs, key=lambda each: -offers[each].size):
                workers.add("fetch", partial(bring, sha256))
            workers.wait()


def plan_repo_pull(
    store: Store,
    tier: BlobSource,
    repo: TieredRepo,
    cache_dir: Path,
    *,
    update_refs: bool = False,
    progress: Progress = silent,
) -> PullPlan:
    """Plan to bring a repo from a tier; DestinationExistsError, NoSpaceError as of an import."""
    source = TierSource(tier, repo)
    plan = plan_source(store, source, cache_dir, update_refs=update_refs, progress=progress)
    return PullPlan(repo=repo.bundled.repo, tier=tier.name, importing=plan, _source=source)


def pushed_objects(store: Store, repo: Repo) -> dict[str, Offer]:
    """Return the objects that tiers have of a repo, by their account: by the etag of a file."""
    offers: dict[str, Offer] = {}
    for tier, tiered in _tiered(store, repo):
        for etag, content in tiered.manifest.blobs.items():
            digest = tiered.digests[content.sha256]
            offers.setdefault(etag, Offer(tier=tier, digest=digest, size=content.size))
    return offers


def _tiered(store: Store, repo: Repo) -> Iterator[tuple[BlobSource, TieredRepo]]:
    """Go through what tiers say of a repo; what makes no sense is a warning."""
    if not is_safe_id(repo):
        return
    documents = store.asking.documents(store.sources, REPO_DOCUMENTS, repo.folder_name)
    for tier, document in documents:
        try:
            yield tier, read_pushed(repo, document["content"], tier.name)
        except DamagedObjectError as error:
            _log.warning("%s", error)


def pull_without_hub(store: Store, request: Request, *, progress: Progress = silent) -> bool:
    """Bring what a request asks for from a tier that has the repo; False: none has the revision.

    That is for the time when the Hub cannot be asked. Branches are where the tier has them, unless
    the HF cache knows them already.
    """
    if request.local_dir is not None or request.force:
        return False
    revision = request.revision
    for tier, tiered in _tiered(store, request.repo):
        bundled = tiered.bundled
        commit = revision if layout.is_commit(revision) else bundled.refs.get(revision, "")
        if commit not in bundled.revisions:
            continue
        files = bundled.revisions[commit].files
        listed = [RemoteFile(path=path, size=None, etag=etag) for path, etag in files.items()]
        if request.filename is not None:
            chosen = {request.filename} & files.keys()
        else:
            chosen = {each.path for each in select(listed, request.allow, request.ignore)}
        if not chosen:
            continue
        _log.warning(
            "%s at %s comes from the tier %s: the Hub cannot be asked",
            request.repo, revision, tier.name,
        )  # fmt: skip
        part = only_revisions(tiered, [commit], chosen.__contains__)
        plan_repo_pull(store, tier, part, request.cache_dir).execute(progress=progress)
        return True
    return False
