"""Fetch large files through huggingface_hub: one worker per content among all processes.

The lock of a content is taken inside the lock that huggingface_hub has on the file: nobody holds
a lock of ours who waits for huggingface_hub. Whoever waited for ours looks again before fetching:
the process before has most likely brought the bytes. The kernel ends the lock of a process that
dies, so nobody waits for one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from smartcache.hub import patches
from smartcache.hub.arrivals import Arrivals, key_of
from smartcache.hub.bars import StoppedError
from smartcache.hub.claiming import Claims
from smartcache.hub.following import Follower
from smartcache.hub.plan import DownloadPlan
from smartcache.hub.records import PlannedFile
from smartcache.hub.remote import download_file
from smartcache.hub.sources import Sources
from smartcache.system import reached


class _HereError(Exception):
    """Somebody else has brought the file: nothing need be fetched."""


class Fetching:
    """Fetches the large files of one plan; `bar` is the class that is told about every chunk."""

    def __init__(
        self,
        plan: DownloadPlan,
        claims: Claims,
        arrivals: Arrivals,
        follower: Follower,
        bar: type,
        is_stopping: threading.Event,
    ) -> None:
        self._plan = plan
        self._claims = claims
        self._arrivals = arrivals
        self._follower = follower
        self._bar = bar
        self._is_stopping = is_stopping

    def fetch(self, planned: PlannedFile) -> None:
        """Fetch a file, prove it and share it, unless somebody else has brought it meanwhile."""
        file, plan = planned.file, self._plan
        options = dict(plan.request.options(), revision=plan.commit, tqdm_class=self._bar)
        followed = self._follower.follow(
            plan.target.unfinished(file), file.etag, ("blake3", *file.announced), file.size
        )
        is_proven = False

        @contextmanager
        def locked() -> Iterator[None]:
            # When the lock ends the bytes are proven, and a blob: whoever waits for it finds them.
            nonlocal is_proven
            with self._lock_of(planned):
                if self._is_here_now(planned):
                    raise _HereError
                yield
                reached("download: fetched")
                path = plan.target.found(file)
                if path is not None:
                    self._arrivals.accept(planned, path, followed.finish(path), is_locked=True)
                is_proven = True

        on_wait = partial(self._say_who, planned)
        try:
            with self._claims.making_room(planned), patches.inside_lock(locked(), on_wait):
                download_file(plan.repo, file.path, options)
            path = plan.target.found(file)
            if path is not None and not is_proven:
                self._arrivals.accept(planned, path, followed.finish(path))
        except _HereError:
            return
        finally:
            self._follower.forget(followed)
        if path is not None:
            plan.target.settled(file)

    def _say_who(self, planned: PlannedFile) -> None:
        """Say who has huggingface_hub's lock; of a process of ours our own tells."""
        store = self._plan.store
        if store.volume.on_wait is not None:
            holder = store.key_locks.busy(key_of(planned.file)) or "another program"
            store.volume.on_wait(f"{planned.file.path} is being downloaded by {holder}")

    @contextmanager
    def _lock_of(self, planned: PlannedFile) -> Iterator[None]:
        store = self._plan.store
        what = f"download of {self._plan.repo} {planned.file.path}"
        with store.key_locks.hold(key_of(planned.file), what=what, on_wait=store.volume.on_wait):
            reached("download: leased")
            if self._is_stopping.is_set():
                raise StoppedError
            yield

    def _is_here_now(self, planned: PlannedFile) -> bool:
        if self._claims.place_known(planned):
            return True
        if self._claims.has_volume and planned.is_weight:
            return False
        # What another process has fetched is in its HF cache only: a text, or there is no volume.
        target = self._plan.target
        sources = Sources(self._plan.store, target.cache_dir, target.root)
        candidates, _ = sources.candidates(planned.file, by_size=False)
        return any(self._claims.claim(planned, each) for each in candidates)
