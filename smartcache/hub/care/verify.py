"""Compare every file of HF caches with what the Hub announced for it, without asking the Hub.

What a file must be is known from the name of its blob (sha256 of a large file, git's sha1 of a
small one), from the listing of its commit in `trees/`, and, where neither tells, from the index.
Each inode is hashed once, in threads, and remembered while its stat key stays as it is. No file is
changed. A blob of the store that turns out to be damaged is hashed before its next use.

Repair takes damaged files out of the way, so that the next download fetches them again. The
pointers to a damaged file go first, then the file moves to `bad/` of the store. No bytes are
deleted. A file on a filesystem without a pool stays where it is, and so do its pointers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from smartcache.config import load_settings
from smartcache.errors import FileChangedError, FileSkippedError
from smartcache.hub.care.census import blobs_among
from smartcache.hub.layout import Body, CachedRepo, Key, Pointer, is_commit, read_listing
from smartcache.hub.records import RemoteFile, announced_by
from smartcache.progress import Progress, silent
from smartcache.store.catalog import RACY, Learned
from smartcache.store.hashes import hash_all
from smartcache.store.layout import Pool
from smartcache.store.store import Store
from smartcache.system.faults import reached
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import Algorithm, Hashes, hash_many
from smartcache.system.kernel import StatKey
from smartcache.system.sqlite import signed

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


def verify_repos(
    store: Store | None,
    repos: Iterable[CachedRepo],
    *,
    full: bool = False,
    progress: Progress = silent,
) -> RepoVerifyReport:
    """Compare all files of these repos. `full`: hash again what is remembered.

    Without a store nothing is remembered.
    """
    looked_at = list(repos)
    survey = _Survey()
    for repo in looked_at:
        survey.look_at(repo)
    survey.ask_index(store)
    checks, findings = survey.checks, survey.findings
    hashes = _hash(store, checks, full=full, progress=progress)
    damaged: list[Path] = []
    for key, check in checks.items():
        found = list(_compare(check.claims, hashes.get(key)))
        findings += found
        if any(each.kind == "mismatch" for each in found):
            damaged.append(check.about.file)
    if store is not None and damaged:
        _doubt(store, damaged)
    compared = [checks[key].body.size for key in hashes]
    return RepoVerifyReport(
        repos=len(looked_at), bodies=len(compared), size=sum(compared), findings=tuple(findings),
        files=sum(len(each.pointers) for repo in looked_at for each in repo.revisions),
    )  # fmt: skip


@dataclass(slots=True)
class _Check:
    """An inode, and all that is claimed of it: what is found if it has not the expected hash."""

    body: Body
    about: Finding
    """Of one of its names."""
    claims: list[Finding]


class _Survey:
    """What is claimed of each file, and what is wrong without any hash."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.checks: dict[Key, _Check] = {}

    def look_at(self, repo: CachedRepo) -> None:
        """Note what a repo says of its files."""
        base = Finding(
            kind="mismatch", repo=str(repo.repo), cache_dir=repo.cache_dir, file=repo.folder
        )
        commits = {each.commit for each in repo.revisions}
        for ref, text in repo.refs.items():
            if text not in commits:
                kind: Kind = "lost ref" if is_commit(text) else "bad ref"
                file = repo.folder.joinpath("refs", *ref.split("/"))
                self.findings.append(replace(base, kind=kind, file=file, revision=ref, actual=text))
        for name, _ in repo.unread:
            self.findings.append(replace(base, kind="unreadable", file=Path(name)))
        pointed: dict[str, list[Finding]] = {}
        for revision in repo.revisions:
            of_revision = replace(base, revision=revision.commit)
            listing = {each.path: each for each in read_listing(repo.folder, revision.commit) or ()}
            for pointer in revision.pointers:
                about = replace(of_revision, file=Path(pointer.name), path=pointer.path)
                if pointer.blob != pointer.name:
                    about = replace(about, blob=os.path.basename(pointer.blob))
                pointed.setdefault(pointer.blob, []).append(about)
                self._look_at_pointer(about, pointer, listing)
            for path in listing.keys() - {pointer.path for pointer in revision.pointers}:
                file, etag = revision.folder.joinpath(*path.split("/")), listing[path].etag
                self.findings.append(
                    replace(of_revision, kind="missing", file=file, path=path, expected=etag)
                )
        inside = os.path.join(repo.folder, "blobs", "")
        for name in {*repo.blob_names, *(blob for blob in pointed if blob.startswith(inside))}:
            about = replace(base, file=Path(name), blob=os.path.basename(name))
            self._look_at_blob(repo, name, about, pointed.get(name, []))

    def _look_at_pointer(
        self, about: Finding, pointer: Pointer, listing: dict[str, RemoteFile]
    ) -> None:
        """Compare a file of a snapshot with the listing of its commit, where there is one."""
        if pointer.body is None:
            kind: Kind = "dangling" if pointer.is_dangling else "unreadable"
            self.findings.append(replace(about, kind=kind))
            return
        check = self._check(pointer.body, about)
        listed = listing.get(pointer.path)
        if listed is None:
            if listing:
                self.findings.append(replace(about, kind="extra"))
            return
        if about.blob == listed.etag:
            return  # claimed by its name
        for algorithm, expected in listed.announced.items():
            kind = "mismatch" if about.blob is None else "wrong blob"
            check.claims.append(replace(about, kind=kind, algorithm=algorithm, expected=expected))
        if not listed.announced and listed.size not in (None, pointer.body.size):
            about = replace(about, expected=str(listed.size), actual=str(pointer.body.size))
            self.findings.append(replace(about, kind="wrong size"))

    def _look_at_blob(
        self, repo: CachedRepo, name: str, about: Finding, pointed: list[Finding]
    ) -> None:
        """Note what the name of a blob claims of its bytes, for each file that leads to it."""
        blob = os.path.basename(name)
        if blob.endswith(".incomplete"):
            return
        body, announced = repo.body_behind(name), announced_by(blob)
        if body is None or not body.is_file:
            if not pointed:  # else said of each file that leads there
                is_link = name in repo.names and stat.S_ISLNK(repo.names[name].mode)
                kind: Kind = "dangling" if is_link and body is None else "stray"
                self.findings.append(replace(about, kind=kind))
        elif not announced and not pointed:
            self.findings.append(replace(about, kind="stray"))
        else:
            check = self._check(body, (pointed or [about])[0])
            for algorithm, expected in announced.items():
                check.claims += [
                    replace(each, algorithm=algorithm, expected=expected)
                    for each in pointed or [about]
                ]

    def _check(self, body: Body, about: Finding) -> _Check:
        return self.checks.setdefault(body.key, _Check(body, about, []))

    def ask_index(self, store: Store | None) -> None:
        """Let the index say what files must be of which neither name nor listing tells."""
        silent_ones = {key: check for key, check in self.checks.items() if not check.claims}
        names = {key: str(check.about.file) for key, check in silent_ones.items()}
        known = {} if store is None else blobs_among(names, store)
        for key, check in silent_ones.items():
            if key in known:
                digest = known[key].digest
                check.claims.append(replace(check.about, algorithm="blake3", expected=digest))
            else:
                self.findings.append(replace(check.about, kind="unknown"))


def _hash(
    store: Store | None, checks: dict[Key, _Check], *, full: bool, progress: Progress
) -> dict[Key, Hashes | OSError]:
    """Hash what something is claimed of: each inode once, what is remembered not at all."""
    by_algorithms: dict[tuple[Algorithm, ...], dict[Path, Key]] = {}
    for key, check in checks.items():
        wanted = {claim.algorithm for claim in check.claims if claim.algorithm is not None}
        if "sha256" in wanted:
            wanted.add("blake3")  # costs little, and dedup need not read the file again
        if wanted:
            by_algorithms.setdefault(tuple(sorted(wanted)), {})[check.about.file] = key
    threads = (load_settings() if store is None else store.settings).threads
    results: dict[Key, Hashes | OSError] = {}
    for wanted_ones, paths in by_algorithms.items():
        if store is not None and not full:
            known = hash_all(store, paths, wanted_ones, progress=progress)
            results |= {paths[path]: hashes for path, hashes in known.items()}
        rest = [path for path, key in paths.items() if key not in results]
        for each in hash_many(rest, wanted_ones, threads=threads, progress=progress):
            outcome = each.hashes if each.hashes is not None else each.error
            results[paths[each.path]] = outcome or OSError("not read")
    return results


def _compare(claims: list[Finding], outcome: Hashes | OSError | None) -> Iterator[Finding]:
    for claim in claims:
        if isinstance(outcome, OSError):
            kind: Kind = "busy" if isinstance(outcome, FileChangedError) else "unreadable"
            yield replace(claim, kind=kind, algorithm=None, expected=None)
        elif outcome is not None and claim.algorithm is not None:
            actual = outcome.get(claim.algorithm)
            if actual not in (None, claim.expected):
                yield replace(claim, actual=actual)


def _doubt(store: Store, files: Iterable[Path]) -> None:
    """Let nobody believe what is remembered of damaged files and blobs: it is of other bytes."""
    rows = []
    for file in files:
        with suppress(FileNotFoundError):
            st = os.stat(file)
            number = store.catalog.filesystem_number(filesystem_id(file, st))
            rows.append(Learned(number, signed(st.st_ino), StatKey.of(st), 0, None, None, RACY))
    store.catalog.learn(rows)


# repair


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedFile:
    """A file to be moved away, and the names that lead to it."""

    file: Path
    """The file itself, no symlink."""
    key: StatKey
    pool: Pool
    bad: Path
    """Where it goes, in the pool."""
    pointers: tuple[Path, ...]
    """Symlinks to be removed: of snapshots, and of blobs that lead to a shared store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """What was done."""

    moved: tuple[tuple[Path, Path], ...]
    unlinked: int
    failures: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What `hub verify --repair` would do. Nothing is freed: damaged files are kept."""

    files: tuple[DamagedFile, ...]
    pointers: tuple[Path, ...]
    """Symlinks to be removed that lead nowhere, or to the bytes of another file."""
    warnings: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.files or self.pointers)

    def execute(self) -> RepairResult:
        """Move the files and remove the pointers, each looked at again right before."""
        moved: list[tuple[Path, Path]] = []
        failures: list[tuple[Path, str]] = []
        unlinked = sum(_unlink(each, failures) for each in self.pointers)
        for damaged in self.files:
            try:
                if StatKey.of(os.lstat(damaged.file)) != damaged.key:
                    failures.append((damaged.file, "it changed in the meantime"))
                    continue
            except FileNotFoundError:
                continue
            for name in damaged.pointers:
                unlinked += _unlink(name, failures)
                reached("hub repair: pointer removed")
            try:
                damaged.pool.create()
                os.rename(damaged.file, damaged.bad)
            except OSError as error:
                failures.append((damaged.file, error.strerror or str(error)))
                continue
            reached("hub repair: file moved")
            moved.append((damaged.file, damaged.bad))
        return RepairResult(moved=tuple(moved), unlinked=unlinked, failures=tuple(failures))


def plan_repair(
    store: Store, repos: Iterable[CachedRepo], findings: Iterable[Finding]
) -> RepairPlan:
    """Plan to take away what is damaged: mismatches, wrong blobs and pointers to nothing."""
    leading: dict[Path, list[Path]] = {}  # symlinks by the file they lead to, pointers first
    caches: set[str] = set()
    for repo in repos:
        caches.add(os.path.realpath(repo.cache_dir))
        blobs = os.path.join(repo.folder, "blobs", "")
        for name in sorted(repo.targets, key=lambda each: each.startswith(blobs)):
            leading.setdefault(Path(os.path.realpath(name)), []).append(Path(name))
    files: dict[Path, DamagedFile] = {}
    pointers: dict[Path, None] = {}
    warnings: dict[str, None] = {}
    for finding in findings:
        if finding.kind == "wrong blob" or (finding.kind == "dangling" and _is_here(finding.file)):
            pointers[finding.file] = None
        file = Path(os.path.realpath(finding.file))
        if finding.kind != "mismatch" or file in files:
            continue
        names = tuple(leading.get(file, ()))
        is_in_cache = any(file.is_relative_to(cache) for cache in caches)
        if not is_in_cache and file.name != finding.expected:
            # Whoever can write a cache can let a name in it lead anywhere: the name goes alone.
            pointers.update(dict.fromkeys(names))
            continue
        try:
            pool = store.pool_of(file)
            key = StatKey.of(os.stat(file))
        except FileSkippedError:
            warnings[f"{file} is on a filesystem without a pool: move it away yourself"] = None
            continue
        except FileNotFoundError:
            continue
        bad = pool.new_bad(finding.expected or finding.file.name)
        files[file] = DamagedFile(file=file, key=key, pool=pool, bad=bad, pointers=names)
    return RepairPlan(
        files=tuple(files.values()), pointers=tuple(pointers), warnings=tuple(warnings)
    )


def _is_here(pointer: Path) -> bool:
    """Say whether the folder a pointer leads to exists: else a drive may be away, not a blob."""
    try:
        target = os.path.join(pointer.parent, os.readlink(pointer))
    except OSError:
        return False
    return os.path.isdir(os.path.dirname(target))


def _unlink(name: Path, failures: list[tuple[Path, str]]) -> int:
    """Remove a symlink; what has become something else meanwhile stays."""
    try:
        if not name.is_symlink():
            return 0
        name.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        failures.append((name, error.strerror or str(error)))
        return 0
    return 1
