"""Prove what a library has loaded, right after it did: nothing else may have happened to it.

Whatever is new, was written to, or is pointed at for the first time is compared with its announced
hash. A store that cannot be written to must not keep anybody from that: then the file is hashed
where it is. Wrong bytes that somebody else has found and removed meanwhile count as well, because
they may be the ones that were loaded.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from smartcache.errors import DigestMismatchError, SmartcacheError
from smartcache.hub import tree
from smartcache.hub.arrivals import Arrivals, count_wrong, mismatch, wrong_count
from smartcache.hub.leftovers import Look, looks_at
from smartcache.hub.plan import near_store
from smartcache.hub.records import PlannedFile, RemoteFile, announced_by
from smartcache.hub.snapshot import Snapshot, used_names
from smartcache.hub.targets import CacheTarget
from smartcache.store import Store
from smartcache.system import hash_file

_log = logging.getLogger(__name__)


class Proof:
    """Watches a repo's folder from the moment it is made.

    `etags` are what the Hub listed, `missing` the files that were not visible then. With `ask` no
    weights are loaded, so that those which were there before do not matter; it gives what the Hub
    lists, if the names of new files do not tell their hashes.
    """

    def __init__(
        self,
        store: Store,
        target: CacheTarget,
        etags: Mapping[str, str],
        missing: Collection[str],
        *,
        ask: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._store = store
        self._target = target
        self._etags = etags
        self._missing = frozenset(missing)
        self._ask = ask
        is_known = ask is not None and bool(target.commit)
        self._names = frozenset(Snapshot(store, target).names() if is_known else ())
        self._wrong = self._count()
        self._before: dict[str, Look] = looks_at(target)

    def prove(self, moved_to: str | None = None) -> None:
        """Prove all that can have been loaded; wrong bytes are set aside, and raised.

        `moved_to` is the commit that the revision stands for by now.
        """
        now = looks_at(self._target)
        changed = {name for name, look in now.items() if self._before.get(name) != look}
        for commit in tree.commits_of(self._target.folder):
            target = replace(self._target, commit=commit)
            if self._ask is not None and commit == (self._target.commit or moved_to):
                self._prove_light(target, self._ask, changed)
            elif commit == self._target.commit:
                self._prove_snapshot(target, changed, self._etags)
            elif changed or commit == moved_to:
                self._prove_snapshot(target, changed, {}, is_light=commit != moved_to)
        if self._count() != self._wrong:
            message = f"A file of {self._target.repo} had wrong bytes when it was loaded"
            hint = "Load it again: the wrong file was set aside."
            raise DigestMismatchError(message, hint=hint, repo=str(self._target.repo))

    def _prove_snapshot(
        self,
        target: CacheTarget,
        changed: set[str],
        etags: Mapping[str, str],
        *,
        is_light: bool = False,
    ) -> None:
        snapshot = Snapshot(self._store, target)
        weights = {} if is_light or self._ask is not None else snapshot.weights()
        wanted = {name: etags.get(name, blob) for name, blob in weights.items()}
        proven = wanted.keys() - snapshot.unproven(wanted).keys()
        missing = self._missing if target == self._target else frozenset()
        files = snapshot.names() if changed or missing else weights
        for name, blob in files.items():
            is_new = blob in changed or name in missing
            # Texts that were there before are not looked at: people edit them.
            if name not in proven and (name in weights or is_new):
                prove_pointer(self._store, target, name, etags.get(name, blob))

    def _prove_light(
        self, target: CacheTarget, ask: Callable[[], Mapping[str, str]], changed: set[str]
    ) -> None:
        names = Snapshot(self._store, target).names()
        new = {n: blob for n, blob in names.items() if blob in changed or n not in self._names}
        etags = {} if all(announced_by(blob) for blob in new.values()) else ask()
        for name, blob in new.items():
            prove_pointer(self._store, target, name, etags.get(name, blob))

    def _count(self) -> int:
        try:
            return wrong_count(self._store, self._target)
        except SmartcacheError:  # an index that cannot be read tells nothing
            return 0


def prove_pointer(store: Store, target: CacheTarget, name: str, etag: str) -> None:
    """Prove what a snapshot shows under a name; wrong bytes are set aside, and raised."""
    path = Path(os.path.realpath(target.root / name))
    try:
        file = RemoteFile(path=name, size=os.stat(path).st_size, etag=etag)
    except FileNotFoundError:
        return
    if not file.announced:
        return
    min_size = store.settings.link_min_size
    planned = PlannedFile(
        file=file, source="present", is_large=file.is_large(min_size),
        is_weight=file.is_weight(min_size),
    )  # fmt: skip
    try:
        _compare(store, target, planned, path)
    except DigestMismatchError:
        raise
    except FileNotFoundError:
        return  # if it was wrong, whoever took it away has counted that
    except PermissionError as error:
        if os.access(path, os.R_OK):
            _compare_in_place(store, target, planned, path)
        else:  # nobody can have loaded what cannot be read
            _log.debug("%s is not proven: %s", name, error)
    except (SmartcacheError, OSError) as error:
        _log.warning("%s is not shared: %s", name, error)
        _compare_in_place(store, target, planned, path)


def _compare(store: Store, target: CacheTarget, planned: PlannedFile, path: Path) -> None:
    arrivals = Arrivals(store, near_store(store, target.root), target)
    if target.elsewhere(planned.file) is None:
        arrivals.accept(planned, path)
        return
    try:
        arrivals.prove(planned, path)
    except DigestMismatchError:
        count_wrong(store, target)
        target.drop_wrong_pointer(planned.file)
        is_used = path.name in used_names(target.folder)
        is_ours = target.holds(planned.file, path) and path.parent == target.folder / "blobs"
        if is_ours and not is_used and not announced_by(path.name):
            # Nobody could ever prove it, and the library would find it again.
            shutil.move(path, store.volume.layout.new_bad(planned.file.etag))
        raise


def _compare_in_place(store: Store, target: CacheTarget, planned: PlannedFile, path: Path) -> None:
    hashes = hash_file(path, tuple(planned.file.announced))[0]
    for algorithm, wanted in planned.file.announced.items():
        if hashes.get(algorithm) != wanted:
            count_wrong(store, target)
            with suppress(OSError):
                target.hide(planned.file)
            raise mismatch(planned, hashes)
