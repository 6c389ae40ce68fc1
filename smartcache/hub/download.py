"""Carry out a plan: large files first, then huggingface_hub does the rest.

Large files come in two groups of threads: some read this disk (prove what is there, place blobs,
claim files), others fetch. Then huggingface_hub's own function runs, for the very commit that was
planned: it fetches small files and makes pointers, and finds every large file in place. Whatever
it downloads is answered by `bring`, so that each file is proven before any program can see it. The
branch or tag is written last.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from smartcache.errors import DigestMismatchError, HubError
from smartcache.hub import layout, patches, remote
from smartcache.hub.bring import Bringing
from smartcache.hub.outcome import HUGGING_FACE, DownloadResult, FileChanges, Watch
from smartcache.hub.patches import Answering, Arrival
from smartcache.hub.places import CachePlace, LocalPlace, Place
from smartcache.hub.plan import DownloadPlan, Sources
from smartcache.hub.records import PlannedFile, RemoteFile, Source
from smartcache.hub.transfer import StoppedError, Workers, bar_class, hidden_class, one_bar
from smartcache.progress import Progress
from smartcache.store.catalog import FileRow
from smartcache.store.store import Store
from smartcache.system.faults import reached
from smartcache.system.filesystems import filesystem_id

_MOST_NAMED = 3
_log = logging.getLogger(__name__)


def execute(plan: DownloadPlan, progress: Progress | None = None) -> DownloadResult:
    """Carry out a plan; all that it changes is one entry of the history."""
    new: set[Path] = set()
    watch = Watch(is_new=lambda path: _real(path) in new)
    with watch.batch_of(plan.store, "download"):
        download = _Download(plan, progress, watch, new)
        path = download.run()
    fetched, changes = watch.fetched_size + download.size_without_bar(), watch.changes()
    wanted = plan.fetch_size + plan.tier_size + plan.saved_size
    return DownloadResult(
        path=str(path), fetched_size=fetched, taken_size=watch.taken_size,
        reused_size=max(0, wanted - fetched - watch.taken_size),
        **{name: getattr(changes, name) for name in FileChanges.__slots__},
    )  # fmt: skip


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path.parent), path.name)


def remember_cache(store: Store, cache_dir: Path) -> None:
    """Let later downloads know of an HF cache."""
    if store.catalog.folder_number(cache_dir) is None:
        store.catalog.set_folder(cache_dir, program=HUGGING_FACE, walked=False)


class _Download:
    """One download. `new` is told where files are wanted that were not there."""

    def __init__(
        self, plan: DownloadPlan, progress: Progress | None, watch: Watch, new: set[Path]
    ) -> None:
        self._plan = plan
        self._place = plan.place
        self._request = plan.request
        self._store = plan.store
        self._progress = progress
        self._watch = watch
        self._new = new
        self._bringing = Bringing(plan.store, plan.place, watch=watch)
        self._files = {each.file.path: each for each in plan.files}
        self._came: dict[str, Source] = {}
        """Where the bytes of files came from, by ETag."""
        self._with_bar: set[str] = set()
        """The files that were fetched with a bar, which counts their bytes."""
        self._advance: Callable[[int], None] = lambda _: None
        self._is_stopping = threading.Event()
        self._answering: Answering

    def run(self) -> Path:
        """Do it; return what the user gets."""
        plan, place = self._plan, self._place
        revision = self._request.revision
        folder = self._request.cache_dir / plan.repo.folder_name
        ref = layout.read_ref(folder / "refs" / revision)
        if plan.is_done and self._is_noted() and self._is_there():
            return self._result()
        place.clear()
        plan.require_room()
        absent = (each.file for each in plan.files if each.found is None)
        self._new.update(_real(place.spot(file)) for file in absent)
        self._prepare()
        if plan.new_listing:
            remote.write_listing(place.memory, plan.commit, plan.new_listing)
        try:
            with (
                patches.answering(
                    self._answer, covers=self._covers, home=getattr(place, "folder", None)
                ) as answering,
                answering.here(),
                patches.announcing(plan.commit, (each.file for each in plan.files)),
            ):
                self._answering = answering
                if not self._request.force:
                    self._bring_large_files()
                reached("download: large files there")
                self._hand_over()
                reached("download: handed over")
                self._prove_rest()
        except DigestMismatchError as error:
            if hasattr(error, "listed"):
                # The listing may be wrong, and one that is on disk is never asked for again.
                with suppress(OSError):
                    os.unlink(place.memory / "trees" / f"{plan.commit}.json")
            raise
        self._refuse_missing()
        is_noted = self._request.filename is None or self._request.local_dir is None
        # Unless somebody has written another commit meanwhile.
        if is_noted and layout.read_ref(folder / "refs" / revision) == ref:
            try:
                layout.write_ref(folder, revision, plan.commit)
            except OSError as error:  # as huggingface_hub: the files are there
                _log.warning("%s of %s is not noted: %s", revision, plan.repo, error)
        self._remember_place()
        return self._result()

    def size_without_bar(self) -> int:
        """Return the bytes that came from the Hub and no bar has counted: small files."""
        sizes = {each.file.etag: each.size for each in self._plan.files}
        return sum(
            sizes.get(etag, 0)
            for etag, source in self._came.items()
            if source == "fetch" and etag not in self._with_bar
        )

    def _prepare(self) -> None:
        """Make sure that huggingface_hub does not believe wrong files."""
        for each in self._plan.files:
            is_right = each.source == "present" and each.is_visible
            if isinstance(self._place, LocalPlace):
                if each.source == "present" and each.is_proven and not is_right:
                    self._place.settled(each.file)
            elif each.is_weight and each.found is not None and each.source != "present":
                self._bringing.prove_present(each)  # known to be wrong: it is set aside
            elif not is_right and each.file.announced:
                self._place.drop_other_pointer(each.file)

    # answering huggingface_hub

    def _covers(self, place: Place, file: RemoteFile) -> bool:
        planned = self._files.get(file.path)
        if planned is None or planned.file.etag != file.etag:
            return False  # another call for files of the same repo
        if isinstance(place, CachePlace) and isinstance(self._place, CachePlace):
            return place.folder == self._place.folder
        return place.root == self._place.root

    def _answer(self, arrival: Arrival) -> Callable[[], None] | None:
        file = arrival.file
        planned = self._files[file.path]
        sources = partial(Sources, self._store, self._request.cache_dir, self._place.root)
        source = self._bringing.bring(
            replace(planned, candidates=()), is_second=True,
            fetch=arrival.fetch, look_again=lambda: sources().candidates(file)[0],
            advance=self._arrived, is_forced=arrival.is_forced,
            is_shared_later=arrival.will_be_moved,
        )  # fmt: skip
        self._came[file.etag] = source or "fetch"
        if source != "fetch":
            return patches.ANSWERED
        return partial(self._accept, planned) if arrival.will_be_moved else None

    def _accept(self, planned: PlannedFile) -> None:
        if planned.is_weight:
            self._bringing.accept(planned)

    def _arrived(self, size: int) -> None:
        if self._is_stopping.is_set():
            raise StoppedError
        self._advance(size)

    # large files

    def _bring_large_files(self) -> None:
        # Files with the same bytes have one spot in the HF cache: one job. Small ones are left to
        # huggingface_hub, but for those that a tier has.
        large = {self._place.spot(each.file): each for each in self._plan.files
                 if each.is_large or each.source == "tier"}  # fmt: skip
        waiting = [
            each for each in large.values() if not (each.source == "present" and each.is_proven)
        ]
        if not waiting:
            return
        away = ("fetch", "tier")
        fetched = [each.file.path for each in waiting if each.source in away]
        read = [each.file.path for each in waiting if each.source not in (*away, "link")]
        size = sum(each.size for each in waiting if each.source != "link")
        threads, fetching = self._store.settings.threads, max(1, self._request.max_workers)
        with (
            one_bar(fetched, read, size, self._progress, self._request.tqdm_class) as advance,
            Workers({"local": threads, "fetch": fetching}) as workers,
        ):
            self._advance, self._is_stopping = advance, workers.is_stopping
            for each in sorted(waiting, key=lambda each: -each.size):
                if each.source in away:
                    workers.add("fetch", partial(self._fetch, each))
                else:
                    workers.add("local", partial(self._locally, each, workers))
            workers.wait()

    def _locally(self, planned: PlannedFile, workers: Workers) -> None:
        """Bring a file to its place without the Hub; what fails is fetched after all."""
        if planned.source == "present" and self._bringing.prove_present(planned):
            self._advance(planned.size)
            return
        with self._bringing.making_room(planned.file):
            source = self._bringing.bring(planned, advance=self._arrived)
        if source is None:
            workers.add("fetch", partial(self._fetch, planned))
        elif source != "tier" and planned.source != "link":
            self._advance(planned.size)

    def _fetch(self, planned: PlannedFile) -> None:
        """Let huggingface_hub download a large file; what it downloads is answered."""
        file, plan = planned.file, self._plan
        with self._answering.here(), self._bringing.making_room(file):
            if planned.offer is not None and self._bringing.bring(planned, advance=self._arrived):
                return
            if not planned.is_large:
                return  # a tier failed: huggingface_hub fetches it with the other small files
            self._with_bar.add(file.etag)
            bar = bar_class(self._advance, self._watch.count, self._is_stopping)
            options = dict(self._request.options(), revision=plan.commit, tqdm_class=bar)
            remote.download_file(plan.repo, file.path, options)

    # huggingface_hub's part

    def _hand_over(self) -> None:
        """Let huggingface_hub finish: small files and pointers."""
        request = self._request
        options = dict(
            request.options(),
            revision=self._plan.commit,
            force_download=request.force,
            tqdm_class=request.tqdm_class if self._progress is None else hidden_class(),
        )
        with ExitStack() as stack:
            for each in self._plan.files:
                if each.source != "present" and (request.force or not each.is_large):
                    stack.enter_context(self._bringing.making_room(each.file))
            if request.filename is not None:
                remote.download_file(request.repo, request.filename, options)
                return
            options.update(
                allow_patterns=request.allow, ignore_patterns=request.ignore,
                max_workers=request.max_workers,
            )  # fmt: skip
            remote.download_snapshot(request.repo, options)

    def _is_there(self) -> bool:
        """Say whether every file is visible now: the plan may be of yesterday."""
        root = os.path.join(self._place.root, "")
        return all(os.path.isfile(f"{root}{each.file.path}") for each in self._plan.files)

    def _is_noted(self) -> bool:
        """Say whether the HF cache knows the listing, and that the revision is this commit."""
        if self._plan.new_listing or isinstance(self._place, LocalPlace):
            return False  # what is in a local_dir, huggingface_hub compares itself
        revision = self._request.revision
        if layout.is_commit(revision):
            return True
        return layout.read_ref(self._place.folder / "refs" / revision) == self._plan.commit

    def _result(self) -> Path:
        if self._request.filename is not None:
            return self._place.visible(self._plan.files[0].file)
        return self._place.root

    # the end

    def _prove_rest(self) -> None:
        """Prove the weights that nobody has proven yet, as those of huggingface_hub's own store."""
        weights = [each for each in self._plan.files if each.is_weight]
        paths = {each.file.path: self._place.found(each.file) for each in weights}
        known = self._store.known_hashes(path for path in paths.values() if path is not None)
        for each in weights:
            path = paths[each.file.path]
            values = {} if path is None else known.get(path, {})
            if path is not None and not values.items() >= each.file.announced.items():
                self._bringing.accept(each)

    def _refuse_missing(self) -> None:
        """Raise if a file is not there: huggingface_hub returns what it has when the Hub fails."""
        visible = {each.file.path: self._place.visible(each.file) for each in self._plan.files}
        missing = [name for name, path in visible.items() if not os.path.isfile(path)]
        if missing:
            more = ", ..." if len(missing) > _MOST_NAMED else ""
            some = ", ".join(missing[:_MOST_NAMED]) + more
            message = f"Missing after the download of {self._plan.repo}: {some}"
            hint = "The Hub failed on the way. Run the download again; what arrived is kept."
            raise HubError(message, hint=hint, repo=str(self._plan.repo), missing=missing)

    def _remember_place(self) -> None:
        """Let later downloads know of this HF cache, or of the weights in this `local_dir`."""
        if isinstance(self._place, CachePlace):
            remember_cache(self._store, self._place.cache_dir)
            return
        large = [self._place.found(each.file) for each in self._plan.files if each.is_large]
        catalog = self._store.catalog
        with catalog.write():
            for path in filter(None, large):
                around = map(catalog.folder_number, path.parents)
                folder = next(filter(None, around), None)
                if folder is None:
                    folder = catalog.set_folder(path.parent, program="", walked=False)
                catalog.set_directory(os.fsencode(path.parent), folder)
                st = os.stat(path)
                catalog.remember([FileRow.of(filesystem_id(path, st), st, names=[path])])
