"""Lend what this machine has to a repo's cache while a library takes from it what it wants.

Nobody but the library knows which files it will load. So links to all blobs that the repo could
need are placed in its folder of the HF cache, where huggingface_hub finds them; the library runs;
what it fetched is proven and becomes blobs; links that no snapshot uses are taken away again.
One thread or process per repo does this at a time, by a lock. Where a snapshot has served the same
purpose before and is whole, there is nothing to lend, and everybody loads at once.

The store is a help, never a condition: if it fails, the library loads as it would alone. But what
it has loaded is proven in any case.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from smartcache.errors import DigestMismatchError, SmartcacheError
from smartcache.hub import patches, tree
from smartcache.hub.dropin import Call, commit_behind, has_snapshot, listing_of
from smartcache.hub.leftovers import looks_at, prove_file, prove_noted
from smartcache.hub.lender import Lender
from smartcache.hub.lent import Loan, Loans
from smartcache.hub.neighbours import Neighbours, key_of_repo
from smartcache.hub.outcome import Watch, log_changes
from smartcache.hub.plan import Listing, Look, plan_listed
from smartcache.hub.proving import Proof
from smartcache.hub.records import RemoteFile, Repo
from smartcache.hub.served import Listed, Served
from smartcache.hub.snapshot import Snapshot, used_names
from smartcache.hub.sources import HUGGING_FACE
from smartcache.hub.targets import CacheTarget
from smartcache.hub.tiered import pull_without_hub
from smartcache.hub.unfinished import Note, Unfinished
from smartcache.store import Store
from smartcache.system import reached

_LATE = 0.05
"""Seconds in which a client that has seen a blob has made its pointer to it."""
_PATIENCE = 10.0
"""Seconds to wait for another thread of this process, which may be waiting for this one."""
_MOST_PATIENCE = 600.0
"""Seconds to wait for another process: its library may wait for a lock that this one holds."""
_at_work: set[str] = set()
"""The keys that threads of this process hold."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What a library loads from a repo."""

    text: str
    """What decides about its choice of files, in any words: equal texts, equal choice."""
    inside: str = ""
    """The folder of the repo that it looks into; "" for all of it."""
    variant: str = ""
    has_weights: bool = True
    """Whether weights are loaded; else nothing is lent, and only what comes is proven."""


@contextmanager
def lending(
    store: Store, call: Call, purpose: Purpose, *, look: Look | None = None
) -> Iterator[str]:
    """Let a library load from a repo in this block; gives the commit, "" if nobody knows it.

    Wrong bytes are set aside and raised, also if the library has loaded them already: what it made
    of them must not be used.
    """
    request = call.request()
    is_pinned = tree.is_commit(str(getattr(request.revision, "resolved", request.revision)))
    # A tier may have the small files too, which are all that is loaded if there are no weights.
    is_lending = purpose.has_weights or (call.is_plain and bool(store.tiers))
    listing = None if is_pinned or not is_lending else listing_of(call)
    if listing is None and is_lending and not is_pinned and _may_pull(call):
        with forgiving(request.repo, "nothing comes from a tier"):
            pull_without_hub(store, request)
    commit = (commit_behind(request, None) if listing is None else listing.commit) or ""
    target = CacheTarget(cache_dir=request.cache_dir, repo=request.repo, commit=commit)
    run = _Run(store, call, target, purpose)
    with ExitStack() as stack:
        with run.forgiving("nothing is lent"):
            if is_lending and not run.is_served():
                stack.enter_context(run.lock())
                if not run.is_served():  # by whoever was waited for
                    if is_pinned and (listing := listing_of(call)) is None and _may_pull(call):
                        pull_without_hub(store, request)
                    run.prepare(listing, look if purpose.has_weights else None)
                if run.is_idle:
                    stack.close()
        with run.attended():
            yield commit
        with run.forgiving("it is not remembered"):
            run.remember()
            log_changes(request.repo, run.watch.changes(), store)


def _may_pull(call: Call) -> bool:
    """Say whether a tier is asked where the Hub cannot be: not for what the HF cache has."""
    return call.is_plain and not has_snapshot(call.request())


@contextmanager
def forgiving(repo: Repo, consequence: str) -> Iterator[None]:
    """Let a library go on where the store fails: a full or broken disk, missing permission.

    Wrong bytes are never forgiven.
    """
    try:
        yield
    except DigestMismatchError:
        raise
    except (SmartcacheError, OSError) as error:
        _log.warning("smartcache and %s: %s; %s", repo, error, consequence)


class _Run:
    """One loading by a library."""

    def __init__(self, store: Store, call: Call, target: CacheTarget, purpose: Purpose) -> None:
        self._store = store
        self._call = call
        self._request = call.request()
        self._target = target
        self._purpose = purpose
        self._snapshot = Snapshot(store, target)
        self._served = Served(store, target, self._snapshot, purpose.text)
        self._loans = Loans(store, target.folder)
        self._loan: Loan | None = None
        self._is_listed = False
        self._etags: dict[str, str] = {}
        self._missing: list[RemoteFile] = []
        before = looks_at(target)
        inside = os.path.join(os.path.realpath(target.cache_dir), "")
        blobs = os.path.realpath(target.folder / "blobs")

        def is_new(path: Path) -> bool:
            real = os.path.realpath(path)
            is_known = os.path.dirname(real) == blobs and path.name in before
            # Of other repos, only what has just come is touched.
            return real.startswith(inside) and not is_known

        self.watch = Watch(is_new)

    def forgiving(self, consequence: str) -> AbstractContextManager[None]:
        """Let the library go on where the store fails."""
        return forgiving(self._request.repo, consequence)

    def is_served(self) -> bool:
        """Say whether the snapshot has all that is wanted, proven: nothing need be lent."""
        is_known = bool(self._target.commit) and not self._request.force
        return is_known and not self._has_dead_notes() and self._served.is_whole()

    def _has_dead_notes(self) -> bool:
        return any(not note.is_live for note in self._unfinished.notes())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lent and nothing can come: nobody need wait for this one."""
        return self._loan is None and not self._missing

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one who lends to this repo.

        Whom the holder may be waiting for must not wait for ever: after a while it goes on without
        lending.
        """
        key = key_of_repo(self._target.folder)
        is_ours = key in _at_work
        with self._store.key_locks.hold(
            key,
            what=f"loading of {self._request.repo}",
            timeout=_PATIENCE if is_ours else _MOST_PATIENCE,
            on_wait=self._store.volume.on_wait,
        ):
            _at_work.add(key)
            try:
                yield
            finally:
                _at_work.discard(key)

    @property
    def _unfinished(self) -> Unfinished:
        return Unfinished(self._store, self._target.root)

    # before the library

    def prepare(self, listing: Listing | None, look: Look | None) -> None:
        """Settle what the dead have left, prove what is there, and lend what is known.

        Without a listing, where the Hub cannot be asked, nothing is lent.
        """
        for loan in self._loans.unsettled():
            self._settle_loan(loan)
        if not self._target.commit:
            return
        if listing is None:
            self._etags = self._remembered_etags()
            with self.watch.batches(self._store, "from_pretrained"):
                self._prove_there()
            return
        self._is_listed = True
        files = listing.files
        self._etags = {file.path: file.etag for file in files}
        for file in files:
            self._loans.paths.setdefault(file.etag, []).append(file.path)
        visible = Snapshot(self._store, self._target).names()
        self._missing = [file for file in files if self._request.force or file.path not in visible]
        beginning = f"{self._purpose.inside}/" if self._purpose.inside else ""
        least = self._store.settings.link_min_size
        chosen = [
            file
            for file in files
            if file.path.startswith(beginning)
            and (self._purpose.has_weights or not file.is_weight(least))
        ]
        plan = plan_listed(self._store, self._request, replace(listing, files=chosen), look=look)
        lender = Lender(self._store, self._target, self._loans, self.watch)
        lender.prove_there(plan)
        has_weights = self._purpose.has_weights
        self._loan = lender.lend(plan, self._purpose.variant, has_weights=has_weights)
        reached("lend: lent")

    def _remembered_etags(self) -> dict[str, str]:
        listed = tree.read_listing(self._target.folder, self._target.commit)
        if listed is None:
            return Listed(self._store, self._target).etags()
        return {file.path: file.etag for file in listed}

    def _prove_there(self) -> None:
        """Prove the weights that are there; wrong ones are set aside, and raised."""
        files = self._snapshot.weights()
        for name, etag in self._snapshot.unproven(files).items():
            announced = self._etags.get(name, etag)
            if not announced:
                _log.warning("%s: nothing tells what %s must be", self._request.repo, name)
            prove_file(self._store, self._target, name, announced)

    # around the library

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Let the library run in this block; then prove what came and take back what is unused.

        After Ctrl-C nothing is hashed: a note lets the next call prove what has come.
        """
        notes: list[Note] = []
        finish = self._begin_note()
        with self.forgiving("what others left is not proven now"):
            notes = self._unfinished.notes() if self._target.commit else []
        names = [file.path for file in self._missing]
        ask = None if self._purpose.has_weights else self._ask
        proof = Proof(self._store, self._target, self._etags, names, ask=ask)
        neighbours = Neighbours(self._store, self._request.cache_dir, self._request.repo)
        failure: Exception | None = None
        try:
            try:
                with patches.announcing(self._target.commit, self._missing):
                    yield
            except Exception as error:  # noqa: BLE001 - raised below
                failure = error
            self._settle(proof, neighbours, notes, failure)
        except BaseException as error:
            self._take_back()
            finish(error)
            raise
        finish(None)
        if failure is not None:
            raise failure

    def _ask(self) -> dict[str, str]:
        listing = listing_of(self._call)
        return {} if listing is None else {file.path: file.etag for file in listing.files}

    def _begin_note(self) -> Callable[[BaseException | None], None]:
        """Note what is going to be brought; return what ends that: the note goes if all is well."""
        stack = ExitStack()
        with self.forgiving("no note is written"):
            if self._missing:
                stack.enter_context(self._unfinished.working(self._target, self._missing))

        def finish(error: BaseException | None) -> None:
            with self.forgiving("its note stays"):
                stack.__exit__(None if error is None else type(error), error, None)

        return finish

    def _settle(
        self,
        proof: Proof,
        neighbours: Neighbours,
        notes: list[Note],
        failure: Exception | None,
    ) -> None:
        reached("lend: loaded")
        try:
            with self.watch.batches(self._store, "from_pretrained"):
                proof.prove(commit_behind(self._request, None))
                with self.forgiving("files of other repos are not proven"):
                    neighbours.prove()
                with self.forgiving("what others left is not proven now"):
                    prove_noted(self._store, self._target, notes)
                    self._unfinished.forget(notes)
        except DigestMismatchError as error:
            raise error from failure
        finally:
            self._take_back()

    def _take_back(self) -> None:
        loan, self._loan = self._loan, None
        if loan is not None:
            self._settle_loan(loan)

    def _settle_loan(self, loan: Loan) -> None:
        lender = Lender(self._store, self._target, self._loans, self.watch)
        with self.forgiving("the next call takes back what is lent"):
            settled = self._loans.settle(loan)
            if settled.taken:
                time.sleep(_LATE)
            # A client may have seen a blob right before it was taken away, and points at it now.
            late = used_names(self._target.folder) & settled.taken
            lender.give_again(late)
            lender.own(settled.used | late)
            lender.prove_names(settled.left)

    # after the library

    def remember(self) -> None:
        """Remember this HF cache, and that its snapshot has served, if it was this one."""
        if not self._is_listed or self._request.force:
            return
        catalog = self._store.catalog
        is_there = os.path.isdir(self._target.folder)
        if is_there and catalog.folder_number(self._target.cache_dir) is None:
            catalog.set_folder(self._target.cache_dir, program=HUGGING_FACE, walked=False)
        revision = str(self._request.revision)
        ref = tree.read_ref(self._target.folder / "refs" / revision)
        if self._target.commit in (revision, ref):
            self._served.remember()
        Listed(self._store, self._target).remember(self._etags)
