"""Carry out a plan: link what is known, claim what lies around, let huggingface_hub do the rest.

Large files come first, in two groups of threads: some read this disk (prove what is there, place
blobs, claim files), others fetch. Then huggingface_hub's own function runs: it fetches small files
and makes snapshots, refs and listings, and finds every large file in place. At the end each file
that was brought is proven, or it is not visible.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from smartcache.errors import DigestMismatchError, HubError
from smartcache.hub import asides, bars, patches, tree
from smartcache.hub.arrivals import Arrivals, key_of
from smartcache.hub.claiming import Claims
from smartcache.hub.fetching import Fetching
from smartcache.hub.following import Follower
from smartcache.hub.leftovers import clear_local_dir, clear_repo, prove_noted
from smartcache.hub.outcome import DownloadResult, FileChanges, Watch
from smartcache.hub.plan import DownloadPlan, near_store, plan_download
from smartcache.hub.records import PlannedFile, RemoteFile
from smartcache.hub.remote import download_file, download_snapshot
from smartcache.hub.sources import HUGGING_FACE
from smartcache.hub.targets import CacheTarget, LocalTarget
from smartcache.hub.unfinished import Unfinished
from smartcache.hub.workers import Workers
from smartcache.progress import Progress
from smartcache.store import Batch, Store, sighting_of
from smartcache.system import reached

_MOST_MOVES = 3
"""A branch that moves while its files are fetched is planned again this often."""
_log = logging.getLogger(__name__)
_Batches = list[tuple[Store, Batch]]


def execute(plan: DownloadPlan, progress: Progress | None = None) -> DownloadResult:
    """Carry out a plan; all that it changes is one entry of the history."""
    new: set[Path] = set()
    watch = Watch(is_new=lambda path: _real(path) in new)
    with watch.batches(plan.store, "download") as batches:
        working = _Working(progress, watch, batches, new, set())
        try:
            done, path = _execute(plan, working)
        except HubError as error:
            if not hasattr(error, "missing") or isinstance(plan.target, LocalTarget):
                raise
            # What somebody lent to this repo for a moment was believed to be there.
            _log.info("%s; trying again", error)
            done, path = _execute(plan_download(plan.store, plan.request), working)
    # Small files are huggingface_hub's work, which tells nobody how far it is.
    small = sum(
        each.size
        for each in done.files
        if (each.source == "fetch" and (done.request.force or not each.is_large))
        or each.file.path in working.missed
    )
    fetched = watch.fetched_size + small
    changes = watch.changes()
    wanted = done.fetch_size + done.tier_size + done.saved_size
    return DownloadResult(
        path=str(path), fetched_size=fetched, taken_size=watch.taken_size,
        reused_size=max(0, wanted - fetched - watch.taken_size),
        **{name: getattr(changes, name) for name in FileChanges.__slots__},
    )  # fmt: skip


def _execute(plan: DownloadPlan, working: _Working) -> tuple[DownloadPlan, Path]:
    began = math.inf
    for attempt in range(_MOST_MOVES + 1):
        started = time.time()
        path = _Run(plan, working).run(since=began, at_commit=attempt == _MOST_MOVES)
        if path is not None:
            break
        _log.info("%s changed while it was downloaded; trying again", plan.revision)
        plan = plan_download(plan.store, plan.request)
        began = min(began, started)
    return plan, path or plan.target.root


class _Working(NamedTuple):
    """What all attempts at a download have in common."""

    progress: Progress | None
    watch: Watch
    batches: _Batches
    new: set[Path]
    """Where files are wanted that were not there."""
    missed: set[str]
    """Small files that a tier was to give, and did not: huggingface_hub fetches them."""


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path.parent), path.name)


class _Look(NamedTuple):
    """Which file a text is, and since when."""

    path: Path
    inode: int
    mtime_ns: int
    ctime: float


class _Run:
    """One attempt at a plan."""

    def __init__(self, plan: DownloadPlan, working: _Working) -> None:
        self._working = working
        self._plan = plan
        self._target = plan.target
        self._request = plan.request
        self._store = plan.store
        self._near = near_store(plan.store, plan.target.root)
        self._arrivals = Arrivals(plan.store, self._near, plan.target)
        self._claims = Claims(plan.store, self._near, plan.target, watch=working.watch)
        self._unfinished = Unfinished(plan.store, plan.target.root)
        self._progress = working.progress
        self._right_elsewhere: set[str] = set()

    def run(self, *, since: float = math.inf, at_commit: bool = False) -> Path | None:
        """Do it; None if the revision stands for another commit by now.

        `since` is when an attempt at another commit began, which may have brought files.
        """
        asides.give_back(self._store)
        notes = self._unfinished.notes()
        noted = {name for note in notes for name in note.brought(self._target)}
        is_looked_at = since == math.inf and not noted
        if self._plan.is_done and is_looked_at and self._is_noted() and self._is_there():
            return self._result()
        if isinstance(self._target, CacheTarget):
            clear_repo(self._target.folder)
        else:
            clear_local_dir(self._target)
        before = {name: seen for name, seen in self._texts().items()
                  if name not in noted and seen.ctime < since}  # fmt: skip
        self._plan.require_room()
        absent = (each.file for each in self._plan.files if each.found is None)
        self._working.new.update(_real(self._target.spot(file)) for file in absent)
        self._prepare()
        try:
            with (
                self._unfinished.working(self._target, self._to_be_brought()),
                patches.announcing(self._plan.commit, (each.file for each in self._plan.files)),
            ):
                if not self._request.force:
                    self._bring_large_files()
                reached("download: large files there")
                root = self._hand_over(at_commit=at_commit)
                reached("download: handed over")
                if root is not None and root != self._target.root:
                    return None
                self._prove_rest(before)
                proven = {each.file.path for each in self._plan.files}
                prove_noted(self._store, self._target, notes, besides=proven)
        except DigestMismatchError as error:
            if hasattr(error, "listed"):
                # The listing may be wrong, and one that is on disk is never asked for again.
                with suppress(OSError):
                    os.unlink(self._target.listing)
            raise
        self._unfinished.forget(notes)
        self._remember_places()
        self._refuse_missing()
        return self._result()

    def _to_be_brought(self) -> list[RemoteFile]:
        """Return the files that are not there and proven."""
        return [
            each.file
            for each in self._plan.files
            if self._request.force or each.source != "present" or not each.is_proven
        ]

    def _prepare(self) -> None:
        """Make sure that huggingface_hub neither believes wrong files nor writes through links."""
        for each in self._plan.files:
            if isinstance(self._target, LocalTarget):
                is_current = each.source == "present" and each.is_visible
                if not each.is_weight and not is_current:
                    if self._target.is_shared(each.file):
                        spot = self._target.spot(each.file)
                        with asides.copy_beside(self._store, spot) as temporary:
                            self._target.detach(each.file, temporary)
                    self._keep_own_text(each, self._target)
                elif each.source == "present" and each.is_proven and not is_current:
                    self._target.settled(each.file)
            elif each.is_weight and each.found is not None and each.source != "present":
                self._arrivals.prove_present(each)  # known to be wrong: it is set aside
            elif (each.source != "present" or not each.is_visible) and self._arrivals.judge_pointer(
                each, self._target
            ):
                self._right_elsewhere.add(each.file.path)

    def _keep_own_text(self, planned: PlannedFile, target: LocalTarget) -> None:
        """Keep a copy of a small file of the user's own that huggingface_hub will replace."""
        path = None if planned.is_large else target.seen(planned.file)
        if path is None or not planned.file.announced or target.noted_etag(planned.file):
            return
        store = self._near or self._store
        hashes = store.digest_of(path, planned.file.announced)
        if any(hashes.get(name) != value for name, value in planned.file.announced.items()):
            kept = store.volume.layout.new_bad(planned.file.etag)
            shutil.copy2(path, kept)
            _log.warning("%s is replaced; what it was is kept as %s", path, kept)

    def _texts(self) -> dict[str, _Look]:
        """Return what the files look like that are no weights."""
        seen: dict[str, _Look] = {}
        for each in self._plan.files:
            path = None if each.is_weight else self._target.seen(each.file)
            if path is not None:
                st = os.stat(path)
                seen[each.file.path] = _Look(path, st.st_ino, st.st_mtime_ns, st.st_ctime)
        return seen

    def _remember_places(self) -> None:
        """Let later downloads know of this HF cache, or of the weights in this `local_dir`."""
        catalog = self._store.catalog
        if isinstance(self._target, CacheTarget):
            if catalog.folder_number(self._target.cache_dir) is None:
                catalog.set_folder(self._target.cache_dir, program=HUGGING_FACE, walked=False)
            return
        large = [self._target.found(each.file) for each in self._plan.files if each.is_large]
        with catalog.write():
            for path in filter(None, large):
                catalog.add_sighting(sighting_of(path))

    # large files

    def _bring_large_files(self) -> None:
        # Files with the same bytes have one spot in the HF cache: one job. Small ones are left to
        # huggingface_hub, but for those that a tier has.
        large = {self._target.spot(each.file): each for each in self._plan.files
                 if (each.is_large or each.source == "tier")
                 and each.file.path not in self._right_elsewhere}  # fmt: skip
        waiting = [
            each for each in large.values() if not (each.source == "present" and each.is_proven)
        ]
        if not waiting:
            return
        away = ("fetch", "tier")
        fetched = [each.file.path for each in waiting if each.source in away]
        read = [each.file.path for each in waiting if each.source not in (*away, "link")]
        threads = self._store.settings.threads
        size = sum(each.size for each in waiting if each.source != "link")
        tqdm_class = self._request.tqdm_class
        with (
            bars.bringing(fetched, read, size, self._progress, tqdm_class) as advance,
            Follower() as follower,
            Workers({"local": threads, "fetch": max(1, self._request.max_workers)}) as workers,
        ):
            bar = bars.bar_class(advance, self._working.watch.count, workers.is_stopping)
            fetching = Fetching(
                self._plan, self._claims, self._arrivals, follower, bar, workers.is_stopping
            )
            jobs = _Jobs(workers, self._working.batches, fetching)
            for each in sorted(waiting, key=lambda each: -each.size):
                if each.source == "fetch":
                    jobs.fetch(each)
                elif each.source == "tier":
                    jobs.take(partial(self._take, each, jobs, advance))
                else:
                    jobs.locally(partial(self._locally, each, jobs, advance))
            workers.wait()
        for _, batch in self._working.batches:
            batch.flush()

    def _locally(self, planned: PlannedFile, jobs: _Jobs, advance: Callable[[int], None]) -> None:
        """Bring a file to its target without the Hub; what fails is fetched after all."""
        is_here = (
            (planned.source == "present" and self._arrivals.prove_present(planned))
            or self._claims.place_known(planned, near=True)
            or any(
                jobs.is_stopping or self._claims.claim(planned, each) for each in planned.candidates
            )
            or self._claims.place_known(planned)
            or self._claims.bring(planned)
        )
        if not is_here:
            jobs.take(partial(self._take, planned, jobs, advance))
        elif planned.source != "link":
            advance(planned.size)

    def _take(self, planned: PlannedFile, jobs: _Jobs, advance: Callable[[int], None]) -> None:
        """Bring a file from a tier; what fails is fetched after all, small files by and by."""

        def arrived(size: int) -> None:
            if jobs.is_stopping:
                raise bars.StoppedError
            self._working.watch.count_taken(size)
            advance(size)

        what = f"{planned.file.path} from a tier"
        on_wait = self._store.volume.on_wait
        with self._store.key_locks.hold(key_of(planned.file), what=what, on_wait=on_wait):
            # Whoever had the lock before may have brought it.
            if self._claims.place_known(planned) or self._claims.take(planned, arrived):
                return
        if planned.is_large:
            jobs.fetch(planned)
        else:
            self._working.missed.add(planned.file.path)

    # huggingface_hub's part

    def _hand_over(self, *, at_commit: bool) -> Path | None:
        """Let huggingface_hub finish: small files, pointers, refs, listing.

        Returns the snapshot it made, which is another than planned if a branch has moved; None for
        a `local_dir`.
        """
        request = self._request
        options = dict(
            request.options(),
            revision=self._plan.commit if at_commit else request.revision,
            force_download=request.force,
            tqdm_class=request.tqdm_class if self._progress is None else bars.hidden_class(),
        )
        if request.filename is not None:
            made = download_file(request.repo, request.filename, options)
            made = made.parents[request.filename.count("/")]
        else:
            options.update(
                allow_patterns=request.allow, ignore_patterns=request.ignore,
                max_workers=request.max_workers,
            )  # fmt: skip
            made = download_snapshot(request.repo, options)
        return made if isinstance(self._target, CacheTarget) else None

    def _is_there(self) -> bool:
        """Say whether every file is visible now: the plan may be of yesterday."""
        root = os.path.join(self._target.root, "")
        return all(os.path.isfile(f"{root}{each.file.path}") for each in self._plan.files)

    def _is_noted(self) -> bool:
        """Say whether the HF cache knows the listing, and that the revision is this commit."""
        if not self._plan.is_listed or isinstance(self._target, LocalTarget):
            return False  # what is in a local_dir, huggingface_hub compares itself
        revision = str(self._request.revision)
        if tree.is_commit(revision):
            return True
        return tree.read_ref(self._target.folder / "refs" / revision) == self._plan.commit

    def _result(self) -> Path:
        if self._request.filename is not None:
            return self._target.visible(self._plan.files[0].file)
        return self._target.root

    # the end

    def _prove_rest(self, before: dict[str, _Look]) -> None:
        """Prove what huggingface_hub brought, and the weights that nobody has proven yet.

        Texts that are as they were `before` are not looked at: people edit them.
        """
        now = self._texts()
        weights = {each.file.path: self._target.found(each.file)
                   for each in self._plan.files if each.is_weight}  # fmt: skip
        known = (self._near or self._store).known_hashes(filter(None, weights.values()))
        for each in self._plan.files:
            name = each.file.path
            if name in now:
                path: Path | None = now[name].path
                is_proven = name in before and now[name][:3] == before[name][:3]
            else:
                path = weights.get(name)
                values = {} if path is None else known.get(path, {})
                is_proven = values.items() >= each.file.announced.items()
            if path is None:
                self._prove_contradiction(each)
            elif each.file.announced and not is_proven:
                self._arrivals.accept(each, path)

    def _refuse_missing(self) -> None:
        """Raise if a file is not there: huggingface_hub returns what it has when the Hub fails."""
        visible = {each.file.path: self._target.visible(each.file) for each in self._plan.files}
        missing = [name for name, path in visible.items() if not os.path.isfile(path)]
        if missing:
            some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")  # noqa: PLR2004
            message = f"Missing after the download of {self._plan.repo}: {some}"
            hint = "The Hub failed on the way. Run the download again; what arrived is kept."
            raise HubError(message, hint=hint, repo=str(self._plan.repo), missing=missing)

    def _prove_contradiction(self, planned: PlannedFile) -> None:
        """Prove a file that came under another name or size than the Hub's own listing said.

        The listing counts. The blob stays, without this pointer: another snapshot may want it.
        """
        visible = self._target.visible(planned.file)
        if not planned.file.announced or not os.path.isfile(visible):
            return
        path = Path(os.path.realpath(visible))
        if isinstance(self._target, LocalTarget):
            self._arrivals.accept(planned, path)
            return
        try:
            self._arrivals.prove(planned, path)
        except DigestMismatchError as error:
            self._target.drop_wrong_pointer(planned.file)
            message = (
                f"The Hub lists {planned.file.path} as {planned.file.etag}, but sends other bytes"
            )
            hint = "Run the download again; if this happens again, the server is broken."
            raise DigestMismatchError(
                message, hint=hint, path=planned.file.path, listed=planned.file.etag
            ) from error


class _Jobs:
    """The jobs of one download. What a job changes belongs to the batches of the download."""

    def __init__(self, workers: Workers, batches: _Batches, fetching: Fetching) -> None:
        self._workers = workers
        self._batches = batches
        self._fetching = fetching

    @property
    def is_stopping(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._workers.is_stopping.is_set()

    def fetch(self, planned: PlannedFile) -> None:
        """Let a file be fetched."""
        self._workers.add("fetch", partial(self._do, partial(self._fetching.fetch, planned)))

    def take(self, job: Callable[[], None]) -> None:
        """Let a job be done that waits for a tier."""
        self._workers.add("fetch", partial(self._do, job))

    def locally(self, job: Callable[[], None]) -> None:
        """Let a job be done that reads this disk."""
        self._workers.add("local", partial(self._do, job))

    def _do(self, job: Callable[[], None]) -> None:
        with ExitStack() as stack:
            for store, batch in self._batches:
                stack.enter_context(store.joining(batch))
            job()
