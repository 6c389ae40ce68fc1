"""Look after a tier: what its documents need and is not there, and what nobody needs.

Both go by the documents alone, which list every object they need. A push sends objects before the
document that needs them, so what nobody needs is left alone while it is young.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from blake3 import blake3

from smartcache.errors import DamagedObjectError, MissingObjectError, TierError
from smartcache.progress import Progress, silent
from smartcache.remote.folder import Listed
from smartcache.remote.tier import MOST_NAME, Advance, Tier, in_parallel, kind_of, unless
from smartcache.remote.transfer import described
from smartcache.store.sources import Offer

YOUNG = timedelta(hours=24)
"""What is younger may belong to a push that has not come to its document."""
_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An object that a document needs and that is not as it should be, or a damaged document."""

    kind: Literal["missing", "damaged", "document"]
    digest: str
    size: int
    reason: str
    needed_by: tuple[str, ...]

    document: tuple[str, str] | None = None
    """Kind and name of the document, if it is one that is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """What was looked at, and what is wrong."""

    documents: int
    objects: int
    size: int
    read_size: int
    """Bytes that were read and hashed."""
    findings: tuple[Finding, ...]


def verify_tier(tier: Tier, *, fast: bool = False, progress: Progress = silent) -> TierReport:
    """Compare a tier with its documents; unless `fast`, read and hash every byte."""
    tier.check()
    needs = _needs(tier)
    findings = list(needs.damaged)
    whole: list[str] = []

    def check(digest: str) -> tuple[str, Finding | None]:
        size = needs.objects[digest]
        try:
            found = tier.size_of(digest)
        except DamagedObjectError as error:
            return digest, needs.finding("damaged", digest, str(error))
        if found is None:
            return digest, needs.finding("missing", digest, "it is not there")
        reason = f"it has {found:,} bytes, not {size:,}"
        return digest, None if found == size else needs.finding("damaged", digest, reason)

    with progress("Looking at the tier", len(needs.objects)) as job:
        for digest, finding in in_parallel(check, needs.objects):
            if finding is None:
                whole.append(digest)
            else:
                findings.append(finding)
            job.advance()
    read_size = 0 if fast else sum(needs.objects[each] for each in whole)
    if not fast:
        stopping = threading.Event()
        with progress(f"Reading {tier.name}", read_size, "bytes") as job:
            advance = unless(stopping, job.advance)

            def read(digest: str) -> Finding | None:
                return _read(tier, needs, digest, advance)

            findings += filter(None, in_parallel(read, whole, stopping=stopping))
    return TierReport(
        documents=needs.documents, objects=len(needs.objects), size=sum(needs.objects.values()),
        read_size=read_size, findings=tuple(findings),
    )  # fmt: skip


def _read(tier: Tier, needs: _Needs, digest: str, advance: Advance) -> Finding | None:
    made = blake3()
    try:
        for chunk in Offer(tier=tier, digest=digest, size=needs.objects[digest]).chunks():
            made.update(chunk)
            advance(len(chunk))
    except (MissingObjectError, DamagedObjectError) as error:
        kind: Literal["missing", "damaged"] = (
            "missing" if isinstance(error, MissingObjectError) else "damaged"
        )
        return needs.finding(kind, digest, str(error))
    if made.hexdigest() == digest:
        return None
    return needs.finding("damaged", digest, "its bytes are not those that its name says")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """What the documents of a tier need."""

    documents: int
    objects: dict[str, int]
    by: dict[str, list[str]]
    damaged: tuple[Finding, ...]

    def finding(self, kind: Literal["missing", "damaged"], digest: str, reason: str) -> Finding:
        """Return what is wrong with an object, and who needs it."""
        return Finding(
            kind=kind, digest=digest, size=self.objects[digest], reason=reason,
            needed_by=tuple(sorted(self.by[digest])),
        )  # fmt: skip


def _needs(tier: Tier) -> _Needs:
    """Read all documents; those that are damaged are findings."""
    names = sorted(tier.documents())
    objects: dict[str, int] = {}
    by: dict[str, list[str]] = {}
    damaged: list[Finding] = []

    def read(each: tuple[str, str]) -> tuple[tuple[str, str], Mapping[str, int] | TierError]:
        try:
            document = tier.document(*each)
        except DamagedObjectError as error:
            return each, error
        return each, {} if document is None else document["objects"]

    for each, found in in_parallel(read, names):
        name = f"{each[0]}/{described(each)}"
        if isinstance(found, TierError):
            damaged.append(
                Finding(
                    kind="document", digest="", size=0, reason=str(found), needed_by=(name,),
                    document=each,
                )
            )  # fmt: skip
            continue
        for digest, size in found.items():
            objects[digest] = size
            by.setdefault(digest, []).append(name)
    return _Needs(
        documents=len(names), objects=dict(sorted(objects.items())), by=by, damaged=tuple(damaged)
    )


def remove_damaged(tier: Tier, findings: Iterable[Finding]) -> int:
    """Remove objects and documents that were found to be damaged; return how many.

    A push passes over an object that is there with its size; now it sends it again.
    """
    removed = 0
    for each in findings:
        if each.document is not None:
            try:
                tier.remove_document(*each.document)
            except DamagedObjectError:  # it is not even in a folder: not ours to remove
                continue
        elif each.kind == "damaged":
            tier.remove([f"objects/{each.digest[:2]}/{each.digest}"])
        else:
            continue
        removed += 1
    return removed


# gc


@dataclass(frozen=True, slots=True, kw_only=True)
class GcResult:
    """What was removed; what came into use meanwhile was kept."""

    removed: int
    freed_size: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What no document needs; `execute` removes it."""

    tier: str
    objects: tuple[Listed, ...]
    names: tuple[Listed, ...]
    """Which object has a sha256 or git's sha1: of objects that go, or are gone."""
    leftovers: tuple[Listed, ...]
    """Files of a folder that a killed push has not come to name."""
    foreign: tuple[str, ...]
    """What is there and is not the tier's; it stays."""
    young: int
    """Objects that no document needs yet, and that are left alone."""
    young_size: int
    kept_size: int
    """Bytes of the objects that are needed."""
    _execute: Callable[[GcPlan, Progress], GcResult] = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """Bytes that are given back."""
        return sum(each.size for each in (*self.objects, *self.names, *self.leftovers))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.objects or self.names or self.leftovers)

    def execute(self, progress: Progress = silent) -> GcResult:
        """Remove it, unless a document has come that needs it."""
        return self._execute(self, progress)


def plan_gc(tier: Tier, *, older_than: timedelta = YOUNG, progress: Progress = silent) -> GcPlan:
    """Plan to remove what no document needs and is older than some time.

    DamagedObjectError if a document cannot be read: nobody knows then what it needs.
    """
    tier.check()
    needed = _needed(tier)
    before = datetime.now(UTC) - older_than
    old: dict[str, list[Listed]] = {"object": [], "name": [], "leftover": []}
    foreign: list[str] = []
    young = young_size = kept_size = 0
    with progress("Listing objects") as job:
        for each in tier.listed():
            kind = kind_of(each)
            if kind is None:
                foreign.append(each.path)
            elif kind == "object" and _digest(each) in needed:
                kept_size += each.size
            elif kind == "object" and each.changed_at > before:
                young, young_size = young + 1, young_size + each.size
            elif kind != "document" and each.changed_at <= before:
                old[kind].append(each)
            job.advance()
    named = in_parallel(lambda each: (each, _named(tier, each)), old["name"])
    return GcPlan(
        tier=tier.name, objects=tuple(sorted(old["object"])),
        names=tuple(sorted(each for each, digest in named if digest not in needed)),
        leftovers=tuple(sorted(old["leftover"])), foreign=tuple(sorted(foreign)), young=young,
        young_size=young_size, kept_size=kept_size,
        _execute=lambda plan, progress: _collect(tier, plan, progress),
    )  # fmt: skip


def _digest(listed: Listed) -> str:
    return listed.path.rpartition("/")[2]


def _needed(tier: Tier) -> set[str]:
    needs = _needs(tier)
    if needs.damaged:
        message = f"{needs.damaged[0].reason}; nothing is removed from the tier"
        hint = "Nobody knows what it needs: 'smartcache remote verify --repair' removes it."
        raise DamagedObjectError(message, hint=hint, tier=tier.name)
    return set(needs.objects)


def _named(tier: Tier, name: Listed) -> str:
    """Return the digest that a name stands for; "" if it makes no sense."""
    _, algorithm, _, value = name.path.split("/")
    if name.size > MOST_NAME:
        return ""
    found = tier.find(algorithm, value)
    return "" if found is None else found.digest


def _collect(tier: Tier, plan: GcPlan, progress: Progress) -> GcResult:
    """Remove names before objects: a name without an object leads nowhere, and does no harm."""
    removed = freed = kept = 0
    with progress("Removing", len(plan.names) + len(plan.objects) + len(plan.leftovers)) as job:
        for some in (plan.names, plan.objects):
            for start in range(0, len(some), _AT_ONCE):
                batch = some[start : start + _AT_ONCE]
                needed = _needed(tier)  # a push may have come to its document meanwhile
                going = [each for each in batch if not _is_needed(tier, each, needed)]
                tier.remove(each.path for each in going)
                removed += len(going)
                freed += sum(each.size for each in going)
                kept += len(batch) - len(going)
                job.advance(len(batch))
        tier.remove(each.path for each in plan.leftovers)
        removed += len(plan.leftovers)
        freed += sum(each.size for each in plan.leftovers)
        job.advance(len(plan.leftovers))
    return GcResult(removed=removed, freed_size=freed, kept=kept)


def _is_needed(tier: Tier, each: Listed, needed: set[str]) -> bool:
    return (_digest(each) if kind_of(each) == "object" else _named(tier, each)) in needed
