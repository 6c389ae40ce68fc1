"""Answer the downloads that libraries and programs make through huggingface_hub.

Nobody but the library knows which files it will load; but each file that it lets huggingface_hub
download is asked for by hash. What this machine has is then linked instead of fetched, what is
fetched is proven before the library sees it, and becomes a blob.

Weights that were in the HF cache before are proven before a load, once; and looked at again after
it, because another program may have written to them, or brought them, meanwhile.

The store is a help, never a condition: if it fails, the library loads as it would alone. But what
it downloads is proven in any case.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from smartcache.errors import DigestMismatchError, SmartcacheError
from smartcache.hub import layout, patches, remote
from smartcache.hub.bring import Bringing, fetch_proven
from smartcache.hub.download import remember_cache
from smartcache.hub.outcome import Watch, log_changes
from smartcache.hub.patches import Arrival
from smartcache.hub.places import CachePlace
from smartcache.hub.plan import Look, Planning, Request, Sources, commit_behind, has_snapshot
from smartcache.hub.records import PlannedFile, RemoteFile, Source
from smartcache.hub.transfer import Workers, one_bar
from smartcache.store.store import Store

OpenStore = Callable[[], tuple[Store, Look | None] | None]
"""Gives the store and how to look for files; None, where no store can be used."""
_log = logging.getLogger(__name__)


class Serving:
    """Answers downloads to any place. `known` are further files, by sha256.

    Without a `watch` each file that is brought is an entry of the history of its own.
    """

    def __init__(
        self,
        open_store: OpenStore,
        *,
        watch: Watch | None = None,
        known: Mapping[str, str | Path] | None = None,
    ) -> None:
        self._open_store = open_store
        self._watch = watch
        self._known = known
        self.wrong: DigestMismatchError | None = None
        """What came wrong, if anything did: a library may go on with something else instead."""

    def answer(self, arrival: Arrival) -> Callable[[], None] | None:
        """Bring a file; return what is to be done when huggingface_hub has published it."""
        place, file = arrival.place, arrival.file
        watch = self._watch or Watch(is_new=lambda _: True)
        cache_dir = place.cache_dir if isinstance(place, CachePlace) else layout.default_cache_dir()
        source: Source | None = None
        try:
            found = self._plan(arrival, cache_dir, watch)
            if found is None:  # the store cannot be used
                fetch_proven(place, file, arrival.fetch)
                return None
            planned, bringing = found
            store = bringing.store
            with self._history(store, watch, planned):
                source = bringing.bring(
                    planned, fetch=arrival.fetch, is_forced=arrival.is_forced,
                    look_again=lambda: Sources(store, cache_dir, place.root).candidates(file)[0],
                    is_shared_later=arrival.will_be_moved,
                )  # fmt: skip
        except DigestMismatchError as error:
            self.wrong = error
            raise
        except (SmartcacheError, OSError) as error:
            if source is None:
                raise
            _log.warning("smartcache and %s: %s", file.path, error)  # the file is there
        if self._watch is None:
            with _forgiven(file.path):
                if planned.is_large and isinstance(place, CachePlace):
                    remember_cache(store, place.cache_dir)
                log_changes(file.path, watch.changes(), store)
        if source != "fetch":
            return patches.ANSWERED
        is_later = arrival.will_be_moved and planned.is_weight
        return partial(self._accept, bringing, planned) if is_later else None

    def _plan(
        self, arrival: Arrival, cache_dir: Path, watch: Watch
    ) -> tuple[PlannedFile, Bringing] | None:
        """Plan where a file comes from; None, and a warning, if no store can be used."""
        opened, place = self._open_store(), arrival.place
        with _forgiven(arrival.file.path):
            if opened is not None:
                store, look = opened
                planning = Planning(
                    store, place, cache_dir=cache_dir, look=look, known=self._known,
                    repo=place.repo if isinstance(place, CachePlace) else None,
                )  # fmt: skip
                planned = planning.arriving(arrival.file)
                return planned, Bringing(store, place, watch=watch, is_helping=True)
        return None

    def _accept(self, bringing: Bringing, planned: PlannedFile) -> None:
        """Let a file that huggingface_hub has moved become a blob where it is now."""
        with _forgiven(planned.file.path), self._history(bringing.store, bringing.watch, planned):
            bringing.accept(planned)

    def _history(
        self, store: Store, watch: Watch, planned: PlannedFile
    ) -> AbstractContextManager[object]:
        """Return a block in which what is changed is one entry of the history."""
        is_own = self._watch is None and planned.is_large
        return watch.batch_of(store, "download") if is_own else nullcontext()


def serving(open_store: OpenStore) -> AbstractContextManager[object]:
    """Let every download of huggingface_hub in this process be answered in a `with` block.

    In all threads, and in forked children.
    """
    return patches.answering(Serving(open_store).answer, is_lasting=True)


@contextmanager
def attending(
    store: Store,
    request: Request,
    *,
    inside: str = "",
    has_weights: bool = True,
    mapping: MutableMapping[str, str] | None = None,
    look: Look | None = None,
) -> Iterator[str]:
    """Let a library load from a repo in this block; gives the commit, "" if nobody knows it.

    Only weights below the folder `inside` count as loaded, or none. `mapping`, {sha256: path},
    names further files that may have the bytes, and gets those that are loaded. Wrong bytes are set
    aside and raised, also if the library has loaded them already: what it made of them must not be
    used.
    """
    commit = _commit(store, request, may_ask=has_weights or bool(store.sources))
    place = CachePlace(cache_dir=request.cache_dir, repo=request.repo, commit=commit)
    place.clear()
    before = set(_names(place.folder / "blobs"))

    def is_new(path: Path) -> bool:
        inside_cache = os.path.join(os.path.realpath(request.cache_dir), "")
        is_known = path.parent.parent.name == place.folder.name and path.name in before
        # Of other repos, only what has just come is touched.
        return os.path.realpath(path).startswith(inside_cache) and not is_known

    watch = Watch(is_new)
    serving = Serving(lambda: (store, look), watch=watch, known=mapping)
    with watch.batch_of(store, "from_pretrained"):
        if has_weights:
            prove_there(store, place, inside, watch, is_final=_is_local(request))
        failure: Exception | None = None
        with patches.answering(serving.answer, home=place.folder):
            try:
                yield commit
            except Exception as error:  # noqa: BLE001 - raised below
                failure = error
        if serving.wrong is not None:
            raise serving.wrong from failure
        commit = commit or commit_behind(request, None) or ""
        place = CachePlace(cache_dir=request.cache_dir, repo=request.repo, commit=commit)
        try:
            if has_weights:
                prove_there(store, place, inside, watch, is_final=True)
        except DigestMismatchError as error:
            raise error from failure
    if failure is not None:
        raise failure
    if mapping is not None:
        mapping.update(_sha256s(place, inside))
    if os.path.isdir(place.folder):
        with _forgiven(str(request.repo)):
            remember_cache(store, place.cache_dir)
    log_changes(request.repo, watch.changes(), store)


def _commit(store: Store, request: Request, *, may_ask: bool) -> str:
    """Return the commit that is going to be loaded; "" if neither the Hub nor the cache knows.

    If the Hub does not answer, a tier may have the repo: then it is in the HF cache afterwards.
    """
    known = commit_behind(request, None)
    if not may_ask or _is_local(request):
        return known or ""
    try:
        return remote.commit_of(request.access, request.repo, request.revision)
    except SmartcacheError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the library will meet it too
        _log.debug("the commit of %s is not known: %s", request.repo, error)
    if store.sources and not has_snapshot(request):
        from smartcache.hub.care.tiered import pull_without_hub

        with _forgiven(str(request.repo)):
            pull_without_hub(store, request)
            known = commit_behind(request, None)
    return known or ""


def _is_local(request: Request) -> bool:
    from huggingface_hub import constants

    return request.is_local or bool(constants.HF_HUB_OFFLINE)


def prove_there(
    store: Store,
    place: CachePlace,
    inside: str,
    watch: Watch,
    *,
    is_final: bool,
    only: str | None = None,
) -> None:
    """Prove the weights of a snapshot that nobody has proven since they were written.

    Wrong ones are set aside; if that `is_final`, because nobody fetches them again now, it is
    raised. Not even a store that fails keeps anybody from loading.
    """
    if not place.commit or not os.path.isdir(place.root):
        return
    weights = place.weights(inside)
    if only is not None:
        weights = {name: blob for name, blob in weights.items() if name == only}
    bringing = Bringing(store, place, watch=watch)
    paths = {name: Path(os.path.realpath(place.root / name)) for name in weights}
    with _forgiven(str(place.repo)):
        known = store.known_hashes(paths.values())
        unproven = {
            name: blob
            for name, blob in weights.items()
            if not blob or blob not in known.get(paths[name], {}).values()
        }
        if not all(unproven.values()):
            # Files where there are no symlinks: the listing tells what they must be.
            listed = layout.read_listing(place.folder, place.commit) or ()
            etags = {file.path: file.etag for file in listed}
            unproven = {
                name: blob or etags.get(name, "")
                for name, blob in unproven.items()
                if blob or etags.get(name, "") not in known.get(paths[name], {}).values()
            }
        _prove_all(bringing, unproven, is_final=is_final)


def _prove_all(bringing: Bringing, etags: Mapping[str, str], *, is_final: bool) -> None:
    store, place, jobs = bringing.store, bringing.place, []
    least = store.settings.link_min_size
    for name, etag in etags.items():
        path = Path(os.path.realpath(place.root / name))
        file = RemoteFile(path=name, size=_size(path), etag=etag)
        if not file.size or not file.announced:
            if not etag:
                _log.warning("nothing tells what %s must be", path)
            continue
        jobs.append(
            PlannedFile(
                file=file, source="present", found=path, is_large=file.is_large(least),
                is_weight=file.is_weight(least),
            )
        )  # fmt: skip

    def prove(planned: PlannedFile) -> None:
        is_right = bringing.prove_present(planned)
        if not is_right and is_final:
            message = f"{planned.file.path} had wrong bytes when it was loaded"
            hint = "Load it again: the wrong file was set aside."
            raise DigestMismatchError(message, hint=hint, path=planned.file.path)
        advance(planned.size)

    if jobs:
        names, size = [each.file.path for each in jobs], sum(each.size for each in jobs)
        threads = store.settings.threads
        with one_bar((), names, size) as advance, Workers({"local": threads}) as workers:
            for each in sorted(jobs, key=lambda each: -each.size):
                workers.add("local", partial(prove, each))
            workers.wait()


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _sha256s(place: CachePlace, inside: str) -> dict[str, str]:
    """Return the weights of a snapshot by the sha256 that they were proven to have."""
    weights = place.weights(inside) if place.commit else {}
    return {
        blob: os.path.realpath(place.root / name)
        for name, blob in weights.items()
        if RemoteFile(path=name, size=None, etag=blob).is_lfs
    }


@contextmanager
def _forgiven(what: str) -> Iterator[None]:
    """Let a library go on where the store fails. Wrong bytes are never forgiven."""
    try:
        yield
    except DigestMismatchError:
        raise
    except (SmartcacheError, OSError) as error:
        _log.warning("smartcache and %s: %s", what, error)
