"""The facade that wires the layers together.

`SmartCache` reads the settings and opens the store once; the layers above the store are given this
one object. A layer is imported when it is first used.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from smartcache.config import Settings, remotes_file, with_home
from smartcache.progress import Progress, silent
from smartcache.store.layout import Layout
from smartcache.store.store import Store

if TYPE_CHECKING:
    from smartcache.artifacts import ArtifactSet, ArtifactSets, Memoized, Memory, Rule, SetInfo
    from smartcache.folders.checks import Allow
    from smartcache.folders.dedup import DedupPlan
    from smartcache.folders.scan import Scan
    from smartcache.hub import CacheMapping, Call, DownloadPlan
    from smartcache.remote import Remotes, Sent, Tier
    from smartcache.store.sources import BlobSource
    from smartcache.training import Dataset, Encoder, Miss, Sources, Validate

P = ParamSpec("P")
R = TypeVar("R")
_NEVER = datetime.min.replace(tzinfo=UTC)


class SmartCache:
    """One copy of every model file and every computed tensor on this machine."""

    def __init__(
        self, home: str | Path | None = None, *, settings: Settings | None = None,
        only_look: bool = False,
    ) -> None:  # fmt: skip
        """Open the store, which makes nothing; `only_look`: nor does anything that is asked."""
        self.settings = with_home(settings, home)
        self.store = Store(settings=self.settings, only_look=only_look)
        self.store.open_sources = self._open_sources
        self._remotes: Remotes | None = None
        self._looking = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def download(self, call: Call, *, progress: Progress | None = None) -> str:
        """Answer a call of huggingface_hub's download functions; return the path they return.

        Without `progress` huggingface_hub's own bars are shown.
        """
        return call.download(self.store, look=self.look_again, progress=progress)

    def plan_download(
        self, call: Call, *, also: Iterable[str | Path] = (), progress: Progress = silent
    ) -> DownloadPlan:
        """Plan such a call: for each file where its bytes come from; the Hub's errors pass.

        `also` are folders to look in, for this download only.
        """
        from smartcache.hub import plan_download, with_folders

        request = with_folders(call.request(), also)
        return plan_download(self.store, request, look=self.look_again, progress=progress)

    def pull_instead(self, call: Call) -> bool:
        """Bring what a call asks for from a tier, if the HF cache does not have the revision.

        For the time when the Hub cannot be asked. False: it is there, or no tier has it.
        """
        from smartcache.hub import has_snapshot, pull_without_hub

        request = call.request()
        return not has_snapshot(request) and pull_without_hub(self.store, request)

    def attending(
        self, call: Call, *, inside: str = "", has_weights: bool = True,
        mapping: MutableMapping[str, str] | None = None,
    ) -> AbstractContextManager[str]:  # fmt: skip
        """Let a library load from a repo in a `with` block that gives the commit.

        Whatever it downloads is answered with what this machine has; what it fetches is proven and
        shared. Weights below `inside`, if any are loaded, are proven before. `mapping`,
        {sha256: path}, names further files that may be used, and gets those that are loaded.
        """
        from smartcache.hub import attending

        return attending(
            self.store, call.request(), inside=inside, has_weights=has_weights, mapping=mapping,
            look=self.look_again,
        )  # fmt: skip

    def look_for_damage(self, folder: str | Path) -> list[Path]:
        """Return the weight files of a folder that are links to blobs and were written to.

        The blobs are set aside, so that nobody else gets these bytes; the files stay.
        """
        from smartcache.store.blobs import look_for_damage

        return look_for_damage(self.store, Path(folder))

    def look_again(self, *, after: timedelta = timedelta(hours=1)) -> None:
        """See the files of model folders again that were not walked for a while; stats only."""
        from smartcache.folders.scan import downloads_folder, folders_to_scan, known_folders, look

        with self._looking:  # who waited finds that it is done
            known = {folder.path: folder.walked_at for folder in self.store.folders()}
            folders, _ = folders_to_scan(self.store)
            folders += [each for each in downloads_folder() if each.path not in known]
            folders += known_folders(self.store, beside=folders)
            since = datetime.now(UTC) - after
            stale = [each for each in folders if (known.get(each.path) or _NEVER) <= since]
            if stale:
                look(self.store, stale)

    def scan(
        self, *folders: str | Path, only: Sequence[str] = (), min_size: int | None = None,
        exclude: Sequence[str] = (), any_file: bool = False, progress: Progress = silent,
    ) -> Scan:  # fmt: skip
        """Scan these folders, or else those of programs and those remembered; changes nothing.

        `only` keeps some programs, `exclude` leaves out paths by pattern, `any_file` counts kinds
        of files that programs edit in place too.
        """
        from smartcache.folders.scan import MIN_SIZE, folders_to_scan, scan_folders

        found, _ = folders_to_scan(self.store, folders, only)
        return scan_folders(
            self.store, found, min_size=MIN_SIZE if min_size is None else min_size,
            exclude=exclude, any_file=any_file, progress=progress,
        )  # fmt: skip

    def plan_dedup(
        self, found: Scan, *, keep_writable: bool | None = None, allow: Allow = frozenset()
    ) -> DedupPlan:
        """Plan to replace the duplicates of a scan by links, in place and undoably."""
        from smartcache.folders.dedup import plan_dedup

        return plan_dedup(self.store, found, keep_writable=keep_writable, allow=allow)

    @property
    def remotes(self) -> Remotes:
        """The remotes that this user has named: to add, list and forget."""
        if self._remotes is None:
            from smartcache.remote import Remotes

            self._remotes = Remotes()
        return self._remotes

    def tier(self, tier: str | Tier) -> Tier:
        """Return the tier of a remote, by name; ConfigError if there is none of that name."""
        return self.remotes.tier(tier) if isinstance(tier, str) else tier

    def push(
        self, tier: str, *names: str, exact: bool = False, progress: Progress = silent
    ) -> Sent:  # fmt: skip
        """Push repos, blobs (by digest), sets and datasets to a tier.

        With `exact`, artifacts that this machine has pushed and has no more go from the tier, too.
        """
        from smartcache.remote import push

        return push(self.store, self.sets, self.tier(tier), names, progress, exact=exact)

    def pull(
        self, tier: str, *names: str, cache_dir: str | Path | None = None,
        progress: Progress = silent,
    ) -> Sent:  # fmt: skip
        """Pull repos (into the HF cache), blobs, sets and datasets from a tier."""
        from smartcache.remote import pull

        cache = None if cache_dir is None else Path(cache_dir)
        return pull(self.store, self.sets, self.tier(tier), names, progress, cache_dir=cache)

    def _open_sources(self) -> list[BlobSource]:
        if self._remotes is None and not os.path.exists(remotes_file()):
            return []  # and nothing is loaded
        return list(self.remotes.tiers())

    @property
    def sets(self) -> ArtifactSets:
        """All sets of artifacts of this store, which is made if it is not there."""
        if not self.store.only_look:
            self.store.ready()
        return sets_of(self.store)

    def artifacts(  # noqa: PLR0913 - a set has so many options
        self, name: str, *, fingerprint: Mapping[str, object], max_size: float | None = None,
        ttl: float | timedelta | None = None, evictable: bool | None = None,
        durable: bool | None = None, unused_for: float | timedelta | None = None,
        compression: Rule | None = None, memory: float | str | Memory | None = None,
        read_only: bool = False, tier: str | Tier | None = None,
    ) -> ArtifactSet:  # fmt: skip
        """Open the set of a name and a fingerprint, made if it is not there.

        `max_size` (bytes), `ttl` (from a put) and `unused_for` (from the last use) bound it,
        `evictable=False` forbids to evict anything of it, `durable` makes every put survive power
        loss, `compression` ("auto", "zstd", ..., or one for each field) makes what is put smaller.
        What is given is kept with the set, what is not given stays as it was; `math.inf` takes a
        bound back.

        `memory` ("2GB", bytes, or a `Memory` that several sets share) keeps values that this
        process has read.

        `tier` names a remote whose artifacts of this set are read through: what is not here is
        fetched, and some of it kept. That is remembered with the set; named again, what is new in
        the tier is seen, too.

        `read_only` writes nothing at all, not even when an artifact was used. The set must be
        there: SetFormatError if it is not. `smartcache.artifacts.ArtifactSets` opens sets of other
        users and on read-only filesystems, where no store can be opened.
        """
        opened = self.sets.open(
            name, fingerprint, max_size=max_size, ttl=ttl, evictable=evictable, durable=durable,
            unused_for=unused_for, compression=compression, memory=memory, read_only=read_only,
        )  # fmt: skip
        if tier is not None:
            from smartcache.remote import attach_set

            attach_set(opened, self.tier(tier))
        return opened

    def memoize(
        self, *, fingerprint: Mapping[str, object] | None = None, ignore: Iterable[str] = (),
        ttl: float | timedelta | None = None, name: str | None = None,
        max_size: float | None = None, compression: Rule | None = None,
        memory: float | str | Memory | None = None,
    ) -> Callable[[Callable[P, R]], Memoized[P, R]]:  # fmt: skip
        """Decorate a function whose results are to be kept: tensors, and plain values.

        `fingerprint` says what a result depends on besides the arguments; without it the source of
        the function counts. `ignore` names parameters that do not matter. The other options are
        those of `artifacts`. The function gets `forget(...)`, for the result of one call,
        `forget_all()`, `key(...)` and `artifacts()`, the set that has the results.
        """
        from smartcache.artifacts import memoized

        def open_set(name: str, identity: Mapping[str, object]) -> ArtifactSet:
            return self.artifacts(
                name, fingerprint=identity, max_size=max_size, compression=compression,
                memory=memory,
            )  # fmt: skip

        return lambda function: memoized(
            function, open_set, name=name, fingerprint=fingerprint, ignore=ignore, ttl=ttl
        )

    def dataset(
        self, name: str, sources: Sources | str | Path, *, validate: Validate | None = None,
        miss: Miss = "raise", tier: str | Tier | None = None, **outputs: Encoder,
    ) -> Dataset:  # fmt: skip
        """Open the dataset of a name: sources, and what encoders make of them, by output.

        Nothing is read or encoded yet: `plan` and `build` look at the sources. `validate="trust"`
        takes it that they are as they were (also by `SMARTCACHE_SKIP_VALIDATION`); `miss` is what
        reading does with what is missing: "raise" an error, or "encode" it. What a `tier` has of
        the outputs is not encoded again, but read through.
        """
        from smartcache.training import open_dataset

        trusts: Validate = "trust" if self.settings.skip_validation else "full"
        dataset = open_dataset(
            self.sets, name, sources, outputs, validate=validate or trusts, miss=miss,
            threads=self.settings.threads,
            digest_of=lambda path: self.store.digest_of(path.resolve()).digest,
        )  # fmt: skip
        if tier is not None:
            from smartcache.remote import attach_outputs

            attach_outputs(dataset, self.tier(tier))
        return dataset

    def open_dataset(self, path_or_name: str | Path, *, tier: str | Tier | None = None) -> Dataset:
        """Open a dataset without its sources and encoders: an export, or one of this store.

        With a `tier`, one that was pushed there: its outputs are read through.
        """
        from smartcache.training import dataset_folder, exported_dataset, stored_dataset

        threads = self.settings.threads
        if tier is not None:
            from smartcache.remote import attached_dataset

            return attached_dataset(self.sets, self.tier(tier), str(path_or_name), threads=threads)
        folder = dataset_folder(self.sets.root, str(path_or_name))
        if os.sep not in str(path_or_name) and folder.is_dir():
            return stored_dataset(folder, self.sets, threads=threads)
        return exported_dataset(Path(path_or_name), threads=threads)

    def artifact_sets(self, name: str | None = None) -> list[SetInfo]:
        """List all sets of artifacts, or those of one name."""
        return self.sets.infos(name)

    def cache_mapping(self) -> CacheMapping:
        """Return {sha256: path} of everything known, as a read-only mapping."""
        from smartcache.hub import CacheMapping

        return CacheMapping(self.store)


def sets_of(store: Store) -> ArtifactSets:
    """Return all sets of artifacts of a store."""
    from smartcache.artifacts import ArtifactSets, Far

    settings = store.settings
    return ArtifactSets(
        Layout(store.root).sets, threads=settings.threads, max_size=settings.artifacts_max_size,
        ttl=settings.artifacts_ttl, far=Far(_connected, settings.remote_max_size),
    )  # fmt: skip


def _connected(description: Mapping[str, object]) -> Tier:
    """Return a tier by what a set remembers of it; in every process that opens the set."""
    from smartcache.remote import connected

    return connected(description)


def sets_in(store: Store) -> ArtifactSets | None:
    """Return the sets of artifacts of a store; None, and nothing loaded, if there is no set."""
    return sets_of(store) if any(Layout(store.root).set_folders()) else None


def usage_of_sets(store: Store) -> list[tuple[SetInfo, int]]:
    """Return the sets of artifacts of a store, and how many bytes `prune` would free of each."""
    sets = sets_in(store)
    return [] if sets is None else sets.usage()


def prunable_size(store: Store) -> int:
    """Return what `smartcache prune` would free now, blobs and artifacts."""
    return sum(prunable_sizes(store).values())


def prunable_sizes(store: Store) -> dict[str, int]:
    """Return what `smartcache prune` would free now on each filesystem."""
    by_root = Counter[Path]()
    for victim in store.plan_prune().victims:
        by_root[victim.pool] += victim.allocated
    if (sets := sets_in(store)) is not None:
        by_root[store.root] += sets.plan_prune().freed_size
    pools = {pool.root: pool for pool in store.pools()}
    return {pools[root].filesystem: size for root, size in by_root.items()}
