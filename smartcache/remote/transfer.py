"""Push to a tier, and pull from it: repos, blobs, sets of artifacts, datasets.

What is pushed is sent object by object, each hashed on the way; what is there is passed over after
one look at its size. Then come the names under which objects are found by other hashes, and last
the document that says what belongs together: before it is written, nobody misses anything, and a
push that was killed goes on where it was. What is pulled is hashed before it is a file or a blob.

A word means a repo if there is a slash in it (`org/name`, `datasets/org/name`, with `@REV` one
revision), a blob if it is a digest or the beginning of one, else a set or a dataset.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from smartcache.artifacts import ArtifactSets
from smartcache.errors import (
    BadDigestError,
    BlobNotFoundError,
    DamagedObjectError,
    DigestMismatchError,
    MissingObjectError,
    RepoNotCachedError,
)
from smartcache.hub import (
    REPO_DOCUMENTS,
    ExportPlan,
    Repo,
    TieredRepo,
    Wanted,
    default_cache_dir,
    known_caches,
    merge_pushed,
    only_revisions,
    plan_export,
    plan_repo_pull,
    read_pushed,
    repos_in,
)
from smartcache.progress import Progress, silent
from smartcache.remote.tier import Sent, Tier, in_parallel
from smartcache.store.sources import Document, Found, Offer
from smartcache.store.store import Store
from smartcache.system.faults import reached
from smartcache.system.hashing import Algorithm
from smartcache.training import dataset_folder

Kind = Literal["repo", "blob", "set", "dataset"]
_log = logging.getLogger(__name__)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_ALIASES: tuple[Algorithm, ...] = ("sha256", "git-sha1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to push or pull; `execute` does it. None: that is known only while it is done."""

    kind: Kind
    name: str
    size: int | None = None
    """Bytes to be sent, or fetched."""
    there_size: int | None = None
    """Bytes that are there already."""
    warnings: tuple[str, ...] = ()
    _execute: Callable[[Progress], Sent] = field(repr=False, compare=False)

    def execute(self, progress: Progress = silent) -> Sent:
        """Do it; what is interrupted goes on with the next call."""
        return self._execute(progress)


# push


def plan_push(
    store: Store,
    sets: ArtifactSets,
    tier: Tier,
    words: Iterable[str],
    *,
    caches: list[Path] | None = None,
    exact: bool = False,
    progress: Progress = silent,
) -> list[Step]:
    """Plan to push what some words mean; an error if one of them means nothing here.

    `caches` are the HF caches to look for repos in, by default all that are known. With `exact`,
    artifacts that this machine has pushed and has no more go from the tier.
    """
    tier.check()
    places = known_caches(store) if caches is None else caches
    return [_push_step(store, sets, tier, word, places, progress, exact=exact) for word in words]


def _push_step(
    store: Store,
    sets: ArtifactSets,
    tier: Tier,
    word: str,
    caches: list[Path],
    progress: Progress,
    *,
    exact: bool,
) -> Step:
    from smartcache.remote.sets import push_dataset, push_set

    if _is_name(word) and dataset_folder(sets.root, word).is_dir():
        return Step(
            kind="dataset", name=word,
            _execute=lambda progress: push_dataset(sets, tier, word, progress, exact=exact),
        )  # fmt: skip
    infos = sets.find(word) if _is_set(sets, word) else []
    if infos:

        def push_sets(progress: Progress) -> Sent:
            sent = Sent()
            for info in infos:
                with sets.open_id(info) as opened:
                    sent += push_set(opened, tier, progress, exact=exact)
            return sent

        return Step(kind="set", name=word, _execute=push_sets)
    if "/" in word:
        return _repo_step(store, tier, Wanted.parse(word), caches, progress)
    digest = _digest_here(store, word)
    if digest is not None:
        return _blob_step(store, tier, digest)
    raise _unknown(word, "here", _known_here(sets, caches))


def _is_name(word: str) -> bool:
    return "/" not in word and word not in ("", ".", "..")


def _is_set(sets: ArtifactSets, word: str) -> bool:
    name = word.partition("/")[0]
    return any(folder.parent.name == name for folder in sets.folders())


def _digest_here(store: Store, word: str) -> str | None:
    """Return the digest of the blob that a word means; None if it means none."""
    if not _PREFIX.fullmatch(word.partition(":")[2] or word):
        return None
    try:
        return store.resolve(word).digest
    except BlobNotFoundError:
        return None


def _known_here(sets: ArtifactSets, caches: list[Path]) -> list[str]:
    repos = {str(repo) for cache in caches for repo, _ in repos_in(cache)}
    names = {folder.parent.name for folder in sets.folders()}
    return sorted(repos) + sorted(names)


def _unknown(word: str, where: str, known: list[str]) -> RepoNotCachedError:
    """Return the error for a word that means nothing, with what could be meant."""
    near = get_close_matches(word, known, n=3, cutoff=0.5) or known[:3]
    hint = f"There is {', '.join(near)}." if near else "Nothing there has a name yet."
    return RepoNotCachedError(f"There is no repo, blob, set or dataset {word!r} {where}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What a push sends: files by digest, and their other hashes."""

    files: dict[str, tuple[Path, int]]
    names: dict[str, dict[Algorithm, str]]

    def missing(self, there: Mapping[str, int]) -> dict[str, tuple[Path, int]]:
        """Return the files that the tier does not have."""
        return {
            digest: (path, size)
            for digest, (path, size) in self.files.items()
            if there.get(digest) != size
        }

    def send(
        self,
        tier: Tier,
        known: Mapping[str, int],
        missing: Mapping[str, tuple[Path, int]],
        progress: Progress,
    ) -> Sent:
        """Send objects that are missing, and the names of all that no document has (`known`).

        Small files have none: a repo's document says which object each is.
        """
        sent = tier.send(missing, progress, are_missing=True)
        reached("push: objects sent")
        for digest, (_, size) in self.files.items():
            if digest not in missing:
                sent.skipped += 1
                sent.skipped_size += size
        unnamed = [each for each in self.names if each not in known]

        def name(digest: str) -> None:
            tier.add_names(Found(digest, self.files[digest][1]), self.names[digest])

        with progress("Naming objects", len(unnamed)) as job:
            for _ in in_parallel(name, unnamed):
                job.advance()
        reached("push: objects named")
        return sent

    def send_again(
        self, tier: Tier, besides: Collection[str], progress: Progress
    ) -> None:  # fmt: skip
        """Send what a `gc` has removed that had begun before the document was there.

        It takes nothing that is young: what was sent just now is `besides` the question.
        """
        passed = {digest: self.files[digest] for digest in self.files if digest not in besides}
        tier.send(passed, progress)


def _repo_step(
    store: Store, tier: Tier, wanted: Wanted, caches: list[Path], progress: Progress
) -> Step:
    export = plan_export(caches, [wanted], progress=progress)
    repo, load = _hashed(store, export, progress)
    there = tier.sizes(load.files, progress)
    missing = load.missing(there)
    name = wanted.repo.folder_name

    def execute(progress: Progress) -> Sent:
        document = tier.document(REPO_DOCUMENTS, name)
        known = {} if document is None else document["objects"]
        sent = load.send(tier, known, missing, progress)

        def change(content: Document | None) -> tuple[Mapping[str, int], Document]:
            now = repo
            if content is not None:
                now = merge_pushed(read_pushed(wanted.repo, content, tier.name), repo)
            return now.objects, now.content()

        tier.change(REPO_DOCUMENTS, name, change)
        reached("push: document written")
        load.send_again(tier, {*known, *missing}, progress)
        return sent

    total = sum(size for _, size in load.files.values())
    new = sum(size for _, size in missing.values())
    return Step(
        kind="repo", name=str(wanted.repo), size=new, there_size=total - new,
        warnings=tuple(each.replace("the bundle", "the tier") for each in export.warnings),
        _execute=execute,
    )  # fmt: skip


def _hashed(store: Store, export: ExportPlan, progress: Progress) -> tuple[TieredRepo, _Load]:
    """Find the digest of every content; what the store knows already is not read."""
    expected = export.manifest.expected()
    sizes = export.manifest.contents()
    digests: dict[str, str] = {}
    load = _Load(files={}, names={})

    def hash_one(sha256: str) -> tuple[str, str]:
        path = export.origin(sha256)
        read = 0

        def advance(size: int) -> None:
            nonlocal read
            read += size
            job.advance(size)

        wanted: tuple[Algorithm, ...] = ("blake3", *expected[sha256])
        found = store.digest_of(os.path.realpath(path), wanted, advance=advance)
        job.advance(sizes[sha256] - read)  # what is known already
        for algorithm, value in expected[sha256].items():
            if found.get(algorithm) != value:
                message = f"{path} is damaged: it has {algorithm} {found.get(algorithm)}"
                hint = "'smartcache hub verify' shows what else is; nothing was pushed."
                raise DigestMismatchError(f"{message}, not {value}", hint=hint, path=path)
        return sha256, found.digest

    with progress("Hashing", sum(sizes.values()), "bytes") as job:
        for sha256, digest in in_parallel(hash_one, sizes, store.settings.threads):
            digests[sha256] = digest
            load.files[digest] = export.origin(sha256), sizes[sha256]
            if sizes[sha256] >= store.settings.link_min_size:
                load.names[digest] = expected[sha256]
    return TieredRepo(manifest=export.manifest, digests=digests), load


def _blob_step(store: Store, tier: Tier, digest: str) -> Step:
    blob = store.get(digest)
    hashes = store.hashes_of(digest)
    names = {name: value for name, value in hashes.items() if name in _ALIASES}
    known_as = sorted({path.name for path in store.names_of(digest)})
    path = store.path_of(digest)
    load = _Load(files={digest: (path, blob.size)}, names={digest: names})
    missing = load.missing(tier.sizes([digest]))

    def execute(progress: Progress) -> Sent:
        sent = load.send(tier, {}, missing, progress)

        def change(content: Document | None) -> tuple[Mapping[str, int], Document]:
            before = content if content is not None else {}
            return {digest: blob.size}, {
                "names": sorted({*before.get("names", ()), *known_as}),
                "hashes": {**before.get("hashes", {}), **names},
            }

        tier.change("blobs", digest, change)
        load.send_again(tier, missing, progress)
        return sent

    new = blob.size if missing else 0
    return Step(kind="blob", name=digest, size=new, there_size=blob.size - new, _execute=execute)


# pull


def plan_pull(
    store: Store,
    sets: ArtifactSets,
    tier: Tier,
    words: Iterable[str],
    *,
    cache_dir: Path | None = None,
    update_refs: bool = False,
    progress: Progress = silent,
) -> list[Step]:
    """Plan to pull what some words mean; MissingObjectError if the tier does not have one of them.

    Repos go to an HF cache, by default the Hub's; blobs are pinned.
    """
    tier.check()
    cache = default_cache_dir() if cache_dir is None else cache_dir
    steps = []
    for word in words:
        kind, name = _find_document(tier, word)
        if kind == REPO_DOCUMENTS:
            steps.append(
                _pull_repo(store, tier, Wanted.parse(word), cache, progress, moves=update_refs)
            )
        elif kind == "blobs":
            steps.append(_pull_blob(store, tier, name))
        else:
            steps.append(_pull_set(sets, tier, kind, word))
    return steps


def _find_document(tier: Tier, word: str) -> tuple[str, str]:
    """Return kind and name of the document that a word means."""
    if "/" in word:
        name = Wanted.parse(word).repo.folder_name
        if tier.document(REPO_DOCUMENTS, name) is not None:
            return REPO_DOCUMENTS, name
    elif _DIGEST.fullmatch(word):
        return "blobs", word
    there = list(tier.documents())
    for kind, name in there:
        is_set = kind == "sets" and name.rpartition(".")[0] == word.partition("/")[0]
        if is_set or (kind == "datasets" and name == word):
            return kind, name
    blobs = [name for kind, name in there if kind == "blobs" and name.startswith(word)]
    if len(blobs) > 1:
        shown = ", ".join(each[:16] for each in blobs[:3])
        message = f"{word} is the start of several digests"
        raise BadDigestError(message, hint=f"Write more of it: {shown}", matches=blobs)
    if blobs:
        return "blobs", blobs[0]
    known = [each for each in map(described, there) if each]
    near = get_close_matches(word, known, n=3, cutoff=0.5) or known[:3]
    hint = f"It has {', '.join(near)}." if near else "Nothing was pushed there yet."
    message = f"The tier {tier.name} has no repo, blob, set or dataset {word!r}"
    raise MissingObjectError(message, hint=hint, tier=tier.name)


def described(document: tuple[str, str]) -> str:
    """Return how a user names what a document, by kind and name, is about."""
    kind, name = document
    if kind == REPO_DOCUMENTS:
        repo = Repo.of_folder(name)
        return name if repo is None else str(repo)
    return name.rpartition(".")[0] if kind == "sets" else name


def _pull_repo(
    store: Store, tier: Tier, wanted: Wanted, cache: Path, progress: Progress, *, moves: bool
) -> Step:
    document = tier.document(REPO_DOCUMENTS, wanted.repo.folder_name)
    if document is None:
        message = f"The tier {tier.name} has no {wanted.repo}"
        raise MissingObjectError(message, tier=tier.name)
    repo = read_pushed(wanted.repo, document["content"], tier.name)
    if wanted.revision is not None:
        repo = only_revisions(repo, [_commit(repo, wanted, tier)], lambda _: True)
    plan = plan_repo_pull(store, tier, repo, cache, update_refs=moves, progress=progress)
    warnings = tuple(
        f"{each.ref} of {each.repo} stays at {each.former[:12] or 'what it is'} "
        f"(the tier has {each.commit[:12]}; --update-refs moves it)"
        for each in plan.importing.kept_refs
        if each.former is not None
    )

    def execute(progress: Progress) -> Sent:
        sizes = plan.importing.manifest.contents()
        new = [each for each in plan.importing.missing() if store.find("sha256", each) is None]
        plan.execute(progress=progress)
        return Sent(
            objects=len(new), size=plan.size, skipped=len(sizes) - len(new),
            skipped_size=plan.present_size,
        )  # fmt: skip

    return Step(
        kind="repo", name=str(wanted.repo), size=plan.size, there_size=plan.present_size,
        warnings=warnings, _execute=execute,
    )  # fmt: skip


def _commit(repo: TieredRepo, wanted: Wanted, tier: Tier) -> str:
    bundled, text = repo.bundled, str(wanted.revision)
    commit = bundled.refs.get(text, text)
    starting = [each for each in bundled.revisions if each.startswith(commit)]
    if len(starting) != 1:
        message = f"The tier {tier.name} has no revision {text} of {wanted.repo}"
        hint = f"It has {', '.join([*bundled.refs, *(c[:12] for c in bundled.revisions)])}."
        raise MissingObjectError(message, hint=hint, tier=tier.name)
    return starting[0]


def _pull_blob(store: Store, tier: Tier, digest: str) -> Step:
    document = tier.document("blobs", digest)
    size = tier.size_of(digest) if document is None else document["objects"].get(digest)
    if not isinstance(size, int):
        message = f"The tier {tier.name} has no blob {digest}"
        raise MissingObjectError(message, tier=tier.name, digest=digest)
    hashes = {} if document is None else _hashes(document["content"], tier)
    is_here = store.has(digest)

    def execute(progress: Progress) -> Sent:
        if not store.has(digest):
            with progress(f"Pulling {digest[:12]}", size, "bytes") as job:
                offer = Offer(tier=tier, digest=digest, size=size)
                offer.take(store, store.layout, hashes, job.advance)
            sent = Sent(objects=1, size=size)
        else:
            sent = Sent(skipped=1, skipped_size=size)
        store.pin(digest)  # else the next prune takes it away
        return sent

    return Step(
        kind="blob", name=digest, size=0 if is_here else size, there_size=size if is_here else 0,
        _execute=execute,
    )  # fmt: skip


def _hashes(content: Document, tier: Tier) -> dict[Algorithm, str]:
    """Return the other hashes that a blob must have by its document."""
    said = content.get("hashes", {})
    if not isinstance(said, dict) or not all(isinstance(each, str) for each in said.values()):
        message = f"A document of the tier {tier.name} cannot be used"
        raise DamagedObjectError(message, tier=tier.name)
    return {name: said[name] for name in _ALIASES if name in said}


def _pull_set(sets: ArtifactSets, tier: Tier, kind: str, word: str) -> Step:
    from smartcache.remote.sets import pull_dataset, pull_set

    if kind == "datasets":
        return Step(
            kind="dataset", name=word,
            _execute=lambda progress: pull_dataset(sets, tier, word, progress),
        )  # fmt: skip
    return Step(
        kind="set", name=word, _execute=lambda progress: pull_set(sets, tier, word, progress)
    )


# both


def push(
    store: Store,
    sets: ArtifactSets,
    tier: Tier,
    words: Iterable[str],
    progress: Progress = silent,
    *,
    exact: bool = False,
) -> Sent:
    """Push repos, blobs, sets and datasets; what is there already is not sent."""
    return _done(plan_push(store, sets, tier, words, exact=exact, progress=progress), progress)


def pull(
    store: Store,
    sets: ArtifactSets,
    tier: Tier,
    words: Iterable[str],
    progress: Progress = silent,
    *,
    cache_dir: Path | None = None,
) -> Sent:
    """Pull repos, blobs, sets and datasets; what is here already is not fetched."""
    steps = plan_pull(store, sets, tier, words, cache_dir=cache_dir, progress=progress)
    return _done(steps, progress)


def _done(steps: Iterable[Step], progress: Progress) -> Sent:
    sent = Sent()
    for step in steps:
        sent += step.execute(progress)
    return sent


def pushable(store: Store, sets: ArtifactSets) -> list[str]:
    """Return what can be pushed by name: repos of HF caches, sets and datasets."""
    return _known_here(sets, known_caches(store))


def pullable(tier: Tier) -> Iterator[tuple[Kind, str, Document]]:
    """Go through what a tier has: kind, name as `plan_pull` takes it, and the document."""
    kinds: dict[str, Kind] = {
        "repos": "repo", "blobs": "blob", "sets": "set", "datasets": "dataset"
    }  # fmt: skip
    found = sorted(tier.documents())

    def read(each: tuple[str, str]) -> tuple[tuple[str, str], Document | None]:
        try:
            return each, tier.document(*each)
        except DamagedObjectError as error:
            _log.warning("%s", error)
            return each, None

    documents = dict(in_parallel(read, found))
    for each in found:
        document = documents[each]
        if document is not None:
            yield kinds[each[0]], described(each), document
