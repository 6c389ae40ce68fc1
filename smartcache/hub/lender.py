"""Place links to known blobs in a repo's cache, for whoever may want them.

Links cost nothing and are placed for every file that a blob is known for. What has to be read,
copied or taken from a tier first is done only for files that a library is likely to load, and for
small files that a tier has. A guess decides about effort alone: of a file that was left out, the
library fetches the bytes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

from smartcache.errors import SmartcacheError
from smartcache.hub import bars
from smartcache.hub.arrivals import Arrivals
from smartcache.hub.claiming import Claims
from smartcache.hub.lent import Loan, Loans
from smartcache.hub.outcome import Watch
from smartcache.hub.plan import DownloadPlan, near_store
from smartcache.hub.records import PlannedFile, RemoteFile, announced_by
from smartcache.hub.targets import CacheTarget
from smartcache.hub.workers import Kind, Workers
from smartcache.store import Batch, Store
from smartcache.system import free_bytes

_PIPELINE = "model_index.json"
_PREFERRED = ".safetensors"
_AT_ONCE = 8
"""Files that are taken from a tier at once."""
_log = logging.getLogger(__name__)


class Lender:
    """Lends to one revision of a repo."""

    def __init__(self, store: Store, target: CacheTarget, loans: Loans, watch: Watch) -> None:
        self._store = store
        self._target = target
        self._loans = loans
        self._near = near_store(store, target.root)
        self._arrivals = Arrivals(store, self._near, target)
        self._watch = watch
        self._claims = Claims(store, self._near, target, watch=watch, is_loan=True)

    def prove_there(self, plan: DownloadPlan) -> None:
        """Prove the weights that are there already; wrong ones are set aside."""
        weights = {self._target.spot(each.file): each for each in plan.files if each.is_weight}
        with self._watch.batches(self._store, "from_pretrained") as batches:
            for each in weights.values():
                if each.found is None or not each.is_visible:
                    self._arrivals.judge_pointer(each, self._target)
            there = [each for each in weights.values() if each.found is not None]
            unproven = [each for each in there if each.source != "present" or not each.is_proven]
            prove = self._arrivals.prove_present
            self._do([partial(prove, each) for each in unproven], unproven, batches)

    def lend(
        self, plan: DownloadPlan, variant: str = "", *, has_weights: bool = True
    ) -> Loan | None:
        """Place what is known of the files that are not there; None: nothing is lent.

        Those are weights, unless none are wanted, and whatever else a tier has.
        """
        if plan.request.force:
            return None
        absent = [each for each in plan.files if each.found is None]
        texts = [each for each in absent if each.source == "tier" and not each.is_weight]
        absent = [each for each in absent if has_weights and each.is_weight]
        wanted = {self._target.spot(each.file): each for each in absent if each.source == "link"}
        likely = _likely_paths([each.file.path for each in plan.files], variant)
        others = {self._target.spot(each.file): each for each in absent if each.file.path in likely}
        copies = {
            spot: each for spot, each in others.items() if each.source in ("reuse", "copy", "tier")
        }
        if copies and self._has_room(others.values()):
            wanted |= copies
        wanted |= {self._target.spot(each.file): each for each in texts}
        return self._place_all(list(wanted.values())) if wanted else None

    def _has_room(self, files: Iterable[PlannedFile]) -> bool:
        """Say whether copies leave enough space for what the library fetches besides."""
        needed = sum(each.size for each in files if each.source != "link")
        return free_bytes(self._target.folder) > needed + needed // 20

    def prove_names(self, names: Iterable[str]) -> None:
        """Prove blobs of the repo that nothing points at; wrong ones are set aside."""
        for name in names:
            path = self._loans.folder / "blobs" / name
            if not os.path.isfile(path) or not announced_by(name):
                continue
            file = RemoteFile(path=name, size=os.stat(path).st_size, etag=name)
            self._arrivals.prove_present(
                PlannedFile(file=file, source="present", found=path, is_large=True, is_weight=True)
            )

    def own(self, names: Iterable[str]) -> None:
        """Let the revision own the blobs that a snapshot uses now."""
        if self._near is None:
            return
        digests = list(self._digests(names, self._near).values())
        if digests:
            self._near.own(self._target.owner, digests)

    def give_again(self, names: Iterable[str]) -> None:
        """Place blobs again that were taken away in the very moment they came to be used."""
        store = self._near or self._store
        for name, digest in self._digests(names, store).items():
            spot = self._loans.folder / "blobs" / name
            if not os.path.lexists(spot):
                store.place(digest, spot, whole=True, keep=True, owner=self._target.owner)

    def _digests(self, names: Iterable[str], store: Store) -> dict[str, str]:
        """Return the blobs of a store, by the name they have in HF caches."""
        found: dict[str, str] = {}
        for name in names:
            for algorithm, value in announced_by(name).items():
                blob = store.find_here(algorithm, value)
                if blob is not None:
                    found[name] = blob.digest
        return found

    def _place_all(self, wanted: list[PlannedFile]) -> Loan:
        loan = self._loans.new()
        loan.names = [each.file.etag for each in wanted]
        with self._watch.batches(self._store, "lend") as batches:
            loan.batches = {str(store.root): batch.id for store, batch in batches}
            self._loans.note(loan)
            self._do([partial(self._place, each) for each in wanted], wanted, batches)
        self._note_copies(loan, [each for each in wanted if not self._is_shared(each)])
        return loan

    def _is_shared(self, planned: PlannedFile) -> bool:
        """Say whether a file is placed by the store, which has a row of it then."""
        return self._near is not None and planned.is_weight

    def _place(self, planned: PlannedFile) -> None:
        """Place a blob, or the bytes of a file of this machine; what fails, the library fetches."""
        try:
            if self._claims.place_known(planned, near=True):
                return
            if any(self._claims.claim(planned, each) for each in planned.candidates):
                return
            if not (self._claims.place_known(planned) or self._claims.bring(planned)):
                self._claims.take(planned)
        except (SmartcacheError, OSError) as error:
            _log.warning("%s is not taken from this machine: %s", planned.file.path, error)

    def _note_copies(self, loan: Loan, copies: list[PlannedFile]) -> None:
        """Write down which files are copies that no store has a row of."""
        for name in (each.file.etag for each in copies):
            spot = self._loans.folder / "blobs" / name
            if os.path.isfile(spot):
                loan.copies[name] = os.lstat(spot).st_ino
        if copies:
            self._loans.note(loan)

    def _do(
        self,
        jobs: list[Callable[[], object]],
        files: list[PlannedFile],
        batches: Iterable[tuple[Store, Batch]] = (),
    ) -> None:
        """Do jobs in threads, the largest file first, with a bar over the bytes to be read."""
        if not jobs:
            return
        shared = list(batches)
        read = [each for each in files if each.source != "link"]
        names, size = [each.file.path for each in read], sum(each.size for each in read)
        with (
            bars.bringing((), names, size, None, None) as advance,
            Workers({"local": self._store.settings.threads, "fetch": _AT_ONCE}) as workers,
        ):
            for each, job in sorted(zip(files, jobs, strict=True), key=lambda pair: -pair[0].size):
                size = 0 if each.source == "link" else each.size
                kind: Kind = "fetch" if each.source == "tier" else "local"
                workers.add(kind, partial(_join, shared, job, partial(advance, size)))
            workers.wait()


def _join(
    batches: list[tuple[Store, Batch]], job: Callable[[], object], then: Callable[[], None]
) -> None:
    with ExitStack() as stack:
        for store, batch in batches:
            stack.enter_context(store.joining(batch))
        job()
    then()


def _likely_paths(paths: list[str], variant: str) -> set[str]:
    """Return the files for which it is worth to read or copy gigabytes.

    In the repo of a pipeline those are in folders; where there are safetensors, those; and where
    there are files of the variant, those.
    """
    is_pipeline = _PIPELINE in paths
    preferred = {os.path.dirname(path) for path in paths if path.endswith(_PREFERRED)}
    varied = {path for path in paths if variant and f".{variant}." in os.path.basename(path)}
    folders = {os.path.dirname(path) for path in varied}
    return {
        path
        for path in paths
        if ("/" in path or not is_pipeline)
        and (path.endswith(_PREFERRED) or os.path.dirname(path) not in preferred)
        and (path in varied or os.path.dirname(path) not in folders)
    }
