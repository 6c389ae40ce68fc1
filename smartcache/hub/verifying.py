"""Compare every file of HF caches with what the Hub announced for it, without asking the Hub.

What a file must be is known from the name of its blob (sha256 of a large file, git's sha1 of a
small one), from the listing of its commit in `trees/`, and, where neither tells, from the index.
Each inode is hashed once, in threads, and remembered while its stat key stays as it is. No file is
changed. A blob of the store that turns out to be damaged is no longer believed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from smartcache.errors import FileChangedError
from smartcache.hub.records import RemoteFile, announced_by
from smartcache.hub.repos import Body, CachedRepo, Key, Pointer, Revision
from smartcache.hub.sharing import blobs_among
from smartcache.hub.tree import is_commit, read_listing
from smartcache.progress import Progress, silent
from smartcache.store import Store, Trust, hash_all
from smartcache.system import Algorithm, Hashes, StatKey, filesystem_id, hash_many, signed

Kind = Literal[
    "mismatch", "wrong blob", "wrong size", "dangling", "unreadable", "bad ref",
    "lost ref", "missing", "extra", "unknown", "busy", "stray",
]  # fmt: skip
DAMAGE: frozenset[Kind] = frozenset(
    ("mismatch", "wrong blob", "wrong size", "dangling", "unreadable", "bad ref")
)
MEANINGS: dict[Kind, str] = {
    "mismatch": "the bytes are not those that were announced",
    "wrong blob": "points to the bytes of another file",
    "wrong size": "has another size than was announced",
    "dangling": "leads nowhere",
    "unreadable": "cannot be read",
    "bad ref": "has no commit in it",
    "lost ref": "points to a revision that is not here",
    "missing": "listed by the Hub, not downloaded",
    "extra": "not listed by the Hub",
    "unknown": "has no known hash: not checked",
    "busy": "is being written: not checked",
    "stray": "is not part of an HF cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be; `is_damage` tells damage from information."""

    kind: Kind
    repo: str
    cache_dir: Path
    file: Path
    """Where it is on the disk."""
    revision: str | None = None
    path: str | None = None
    """In the repo."""
    blob: str | None = None
    """The name of the blob."""
    algorithm: Algorithm | None = None
    expected: str | None = None
    actual: str | None = None

    @property
    def is_damage(self) -> bool:
        """Whether something is broken."""
        return self.kind in DAMAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoVerifyReport:
    """What was looked at, and what was found."""

    repos: int
    files: int
    """Files of snapshots."""
    bodies: int
    """Files on the disk that were compared, each once however many names it has."""
    size: int
    """Their bytes."""
    findings: tuple[Finding, ...]

    @property
    def damage(self) -> list[Finding]:
        """What is broken."""
        return [each for each in self.findings if each.is_damage]


@dataclass(slots=True)
class _Claim:
    """What a file must be, and what to say if it is not."""

    algorithm: Algorithm
    expected: str
    finding: Finding


@dataclass(slots=True)
class _Checked:
    """An inode, one of its names, and all that is claimed of it."""

    path: Path
    body: Body
    about: Finding
    claims: list[_Claim]


def verify_repos(
    store: Store,
    repos: Iterable[CachedRepo],
    *,
    full: bool = False,
    progress: Progress = silent,
) -> RepoVerifyReport:
    """Compare all files of these repos. `full`: hash again what is remembered."""
    looked_at = list(repos)
    findings: list[Finding] = []
    checks: dict[Key, _Checked] = {}
    for repo in looked_at:
        findings += _look_at_refs(repo)
        findings += _collect(repo, checks)
    findings += _ask_index(store, checks)
    hashes = _hash(store, checks, full=full, progress=progress)
    damaged: list[Key] = []
    for key, check in checks.items():
        found = list(_compare(check, hashes.get(key)))
        findings += found
        if any(each.kind == "mismatch" for each in found):
            damaged.append(key)
    _doubt(store, {key: checks[key].body for key in damaged}, checks, hashes)
    compared = [checks[key].body.size for key in hashes if checks[key].claims]
    return RepoVerifyReport(
        repos=len(looked_at), bodies=len(compared), size=sum(compared), findings=tuple(findings),
        files=sum(len(each.pointers) for repo in looked_at for each in repo.revisions),
    )  # fmt: skip


def _look_at_refs(repo: CachedRepo) -> Iterator[Finding]:
    commits = {each.commit for each in repo.revisions}
    for ref, text in repo.refs.items():
        if text in commits:
            continue
        kind: Kind = "lost ref" if is_commit(text) else "bad ref"
        file = repo.folder.joinpath("refs", *ref.split("/"))
        yield replace(_about(repo, file, kind), revision=ref, actual=text)
    for path, _ in repo.unread:
        yield _about(repo, Path(path), "unreadable")


def _about(repo: CachedRepo, file: Path, kind: Kind) -> Finding:
    return Finding(kind=kind, repo=str(repo.repo), cache_dir=repo.cache_dir, file=file)


def _collect(repo: CachedRepo, checks: dict[Key, _Checked]) -> Iterator[Finding]:
    """Note what is claimed of each file of a repo; yield what is wrong without any hash."""
    pointed: dict[str, list[Finding]] = {}
    for revision in repo.revisions:
        listing = {each.path: each for each in read_listing(repo.folder, revision.commit) or ()}
        for pointer in revision.pointers:
            about = _of_pointer(repo, revision, pointer)
            pointed.setdefault(pointer.blob, []).append(about)
            yield from _claim_listed(about, pointer, listing, checks)
        here = {pointer.path for pointer in revision.pointers}
        for path in listing.keys() - here:
            file = revision.folder.joinpath(*path.split("/"))
            missing = replace(_about(repo, file, "missing"), expected=listing[path].etag)
            yield replace(missing, revision=revision.commit, path=path)
    inside = os.path.join(repo.folder, "blobs", "")
    for name in {*repo.blob_names, *(blob for blob in pointed if blob.startswith(inside))}:
        yield from _claim_named(repo, name, pointed.get(name, []), checks)


def _claim_listed(
    about: Finding,
    pointer: Pointer,
    listing: dict[str, RemoteFile],
    checks: dict[Key, _Checked],
) -> Iterator[Finding]:
    """Compare a file of a snapshot with the listing of its commit, where there is one."""
    if pointer.body is None:
        yield replace(about, kind="dangling" if pointer.is_dangling else "unreadable")
        return
    check = _check(checks, pointer.body, about)
    listed = listing.get(pointer.path)
    if listed is None:
        if listing:
            yield replace(about, kind="extra")
        return
    is_symlink = pointer.blob != pointer.name
    if is_symlink and os.path.basename(pointer.blob) == listed.etag:
        return  # claimed by its name
    for algorithm, expected in listed.announced.items():
        kind: Kind = "wrong blob" if is_symlink else "mismatch"
        check.claims.append(_Claim(algorithm, expected, replace(about, kind=kind)))
    if not listed.announced and listed.size not in (None, pointer.body.size):
        about = replace(about, kind="wrong size", expected=str(listed.size))
        yield replace(about, actual=str(pointer.body.size))


def _of_pointer(repo: CachedRepo, revision: Revision, pointer: Pointer) -> Finding:
    """Return what is said of a file of a snapshot if its bytes are wrong."""
    is_symlink = pointer.blob != pointer.name
    return Finding(
        kind="mismatch", repo=str(repo.repo), cache_dir=repo.cache_dir, file=Path(pointer.name),
        revision=revision.commit, path=pointer.path,
        blob=os.path.basename(pointer.blob) if is_symlink else None,
    )  # fmt: skip


def _claim_named(
    repo: CachedRepo,
    name: str,
    pointed: list[Finding],
    checks: dict[Key, _Checked],
) -> Iterator[Finding]:
    """Note what the name of a blob claims of its bytes, for each file that leads to it."""
    blob = os.path.basename(name)
    abouts = pointed or [replace(_about(repo, Path(name), "mismatch"), blob=blob)]
    body = repo.body_behind(name)
    if blob.endswith(".incomplete"):
        return
    if body is None or not body.is_file:
        if not pointed:  # else said of each file that leads there
            is_link = name in repo.names and stat.S_ISLNK(repo.names[name].mode)
            yield replace(abouts[0], kind="dangling" if is_link and body is None else "stray")
        return
    announced = announced_by(blob)
    if not announced and not pointed:
        yield replace(abouts[0], kind="stray")
        return
    check = _check(checks, body, abouts[0])
    for algorithm, expected in announced.items():
        check.claims += [_Claim(algorithm, expected, about) for about in abouts]


def _check(checks: dict[Key, _Checked], body: Body, about: Finding) -> _Checked:
    found = checks.get(body.key)
    if found is None:
        found = checks[body.key] = _Checked(about.file, body, about, [])
    return found


def _ask_index(store: Store, checks: dict[Key, _Checked]) -> Iterator[Finding]:
    """Let the index say what files must be of which neither name nor listing tells."""
    silent_ones = {key: check.body for key, check in checks.items() if not check.claims}
    known = blobs_among(silent_ones, store.stores())
    for key in silent_ones:
        check = checks[key]
        if key in known:
            check.claims.append(_Claim("blake3", known[key][1].digest, check.about))
        else:
            yield replace(check.about, kind="unknown")


def _hash(
    store: Store, checks: dict[Key, _Checked], *, full: bool, progress: Progress
) -> dict[Key, Hashes | OSError]:
    """Hash what something is claimed of: each inode once, what is remembered not at all."""
    by_algorithms: dict[tuple[Algorithm, ...], dict[Path, Key]] = {}
    for key, check in checks.items():
        wanted = {claim.algorithm for claim in check.claims}
        if "sha256" in wanted:
            wanted.add("blake3")  # costs little, and dedup need not read the file again
        if wanted:
            by_algorithms.setdefault(tuple(sorted(wanted)), {})[check.path] = key
    results: dict[Key, Hashes | OSError] = {}
    for wanted_ones, paths in by_algorithms.items():
        if not full:
            known = hash_all(store.volume, paths, wanted_ones, progress=progress)
            results |= {paths[path]: hashes for path, (hashes, _) in known.items()}
        rest = [path for path, key in paths.items() if key not in results]
        threads = store.settings.threads
        for each in hash_many(rest, wanted_ones, threads=threads, progress=progress):
            outcome = each.hashes if each.hashes is not None else each.error
            results[paths[each.path]] = outcome or OSError("not read")
    return results


def _compare(check: _Checked, outcome: Hashes | OSError | None) -> Iterator[Finding]:
    for claim in check.claims:
        if isinstance(outcome, OSError):
            is_busy = isinstance(outcome, FileChangedError)
            yield replace(claim.finding, kind="busy" if is_busy else "unreadable")
            continue
        actual = None if outcome is None else outcome.get(claim.algorithm)
        if actual is not None and actual != claim.expected:
            yield replace(
                claim.finding, algorithm=claim.algorithm, expected=claim.expected, actual=actual
            )


def _doubt(
    store: Store,
    damaged: dict[Key, Body],
    checks: dict[Key, _Checked],
    hashes: dict[Key, Hashes | OSError],
) -> None:
    """Let nobody believe what the index remembers of damaged files: it is of other bytes."""
    for each, blob in blobs_among(damaged, store.stores()).values():
        with each.volume.guard("doubt a blob"), each.volume.index.write():
            path = each.volume.layout.blob(blob.digest)
            each.volume.index.refresh(blob.id, os.stat(path), Trust.UNPROVEN)
    for key in damaged:
        outcome, file = hashes[key], checks[key].path
        with suppress(FileNotFoundError):
            st = os.stat(file)
            if isinstance(outcome, Hashes):  # "racy" is never believed
                place = (filesystem_id(file, st), signed(st.st_ino))
                store.catalog.learn([(*place, *StatKey.of(st), 1, None, None)])
