"""Sets of artifacts: computed tensors and plain values, kept once and found by their key.

    with cache.artifacts("sdxl-latents", fingerprint={"vae": digest, "size": 1024}) as latents:
        latents.put(key, {"latent": tensor, "crop": [0, 0, 1024, 1024]})
        batch = latents.get_batch(keys)

Whatever is returned is memory of the caller's own, but for `handle.numpy()`. One thread of one
process computes an artifact that several ask for; the others wait and read what it has put. The
kernel frees the lock of a process that dies, and the next one computes.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar

import numpy as np

from smartcache.artifacts.engine import compact, far, read, recover, write
from smartcache.artifacts.engine.compact import CompactResult, Eviction
from smartcache.artifacts.engine.engine import Engine, open_engine
from smartcache.artifacts.engine.far import Far, Skeleton
from smartcache.artifacts.engine.packs import pack_names
from smartcache.artifacts.engine.records import ARTIFACT
from smartcache.artifacts.engine.recover import Sealed, SetVerifyReport
from smartcache.artifacts.keys import Digests, check_key, check_keys, key_text
from smartcache.artifacts.memory import Kept, Memory, locked
from smartcache.artifacts.sample import Sample
from smartcache.artifacts.setfolder import Fingerprint, Options, SetFolder, check_option
from smartcache.artifacts.values.encode import decode_metadata
from smartcache.artifacts.values.refusals import with_article
from smartcache.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    DamagedArtifactError,
    NoSpaceError,
    RememberedFailureError,
    SmartcacheError,
    StoreError,
    StoreUnwritableError,
)
from smartcache.progress import Progress, silent

_log = logging.getLogger(__name__)
T = TypeVar("T")
_FOR_EVER = (1 << 32) - 1
"""Unix seconds, in 2106: what would end later does not end at all."""
_TRIES = 20
"""How often keys are looked up again that compaction moves away."""
_LONGEST_REASON = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A computation that failed."""

    key: str
    reason: str
    count: int = 1
    failed_at: int = 0
    """Unix seconds."""


@dataclass(slots=True, kw_only=True)
class Computed:
    """What `compute_many` has done, by key."""

    found: list[str] = field(default_factory=list)
    """Were there already."""
    computed: list[str] = field(default_factory=list)
    """Were computed by this call."""
    waited: list[str] = field(default_factory=list)
    """Were computed by another thread or process meanwhile."""
    failed: dict[str, str] = field(default_factory=dict)
    """Could not be computed, and why."""
    unstored: dict[str, Any] = field(default_factory=dict)
    """Were computed, but could not be kept: their values."""
    busy: list[str] = field(default_factory=list)
    """Are being computed by others; only without `wait`."""


@dataclass(slots=True, kw_only=True)
class Claim:
    """Keys that this process computes until it is closed, by whichever thread: see `claim`."""

    keys: list[str]
    present: list[str]
    """Were computed by others meanwhile."""
    busy: list[str]
    """Are being computed by others."""
    _stack: ExitStack = field(repr=False)

    def close(self) -> None:
        """Let others have the keys."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStats:
    """Figures of a set, in bytes where nothing else is said."""

    artifacts: int
    logical: int
    """What the records would take if equal tensors were not kept once."""
    live: int
    """Records that are wanted."""
    on_disk: int
    """All packs, dead records included."""
    dead: int
    packs: int
    saved: int
    """What keeping equal tensors once saves."""
    pinned: int
    hits: int
    """Of this process, as are the next two."""
    misses: int
    damaged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetInfo:
    """What a set is."""

    name: str
    id: str
    fingerprint: Fingerprint | None
    path: Path
    created_at: datetime | None
    used_at: datetime | None
    options: Options
    artifacts: int = 0
    live: int = 0
    on_disk: int = 0
    problem: str = ""
    """Why nothing more is known of it."""
    cure: str = ""
    """What to do about the problem."""

    @property
    def full_name(self) -> str:
        """The name by which every command finds it."""
        return f"{self.name}/{self.id}"


class ArtifactSet:
    """The artifacts of one name and fingerprint. For any number of threads and processes."""

    def __init__(  # noqa: PLR0913 - made by ArtifactSets
        self,
        folder: SetFolder,
        *,
        threads: int = 2,
        longest: float | None = None,
        make_room: Callable[[], None] | None = None,
        room_step: int = 0,
        read_only: bool = False,
        memory: Memory | None = None,
        clock: Callable[[], float] | None = None,
        elsewhere: Far | None = None,
    ) -> None:
        self._engine = open_engine(folder, read_only=read_only, clock=clock, far=elsewhere)
        self._release = weakref.finalize(self, Engine.release_later, self._engine)
        self._threads = threads
        self._longest = longest
        """Seconds that no artifact outlives, whatever its own time to live is."""
        self._make_room = make_room
        self._room_step = room_step
        """Bytes that are written before all sets together are measured again."""
        self._measured = self._engine.written_size
        self._memory = memory
        self._warned: set[tuple[type[Exception], object]] = set()
        """Why results were not kept."""
        self._where = str(folder.path)
        """By which a memory tells it from other sets."""

    @property
    def name(self) -> str:
        """The name of the set."""
        return self._engine.folder.name

    @property
    def id(self) -> str:
        """What tells it from other sets of its name: made of its fingerprint."""
        return self._engine.folder.id

    @property
    def instance(self) -> str:
        """What tells its folder from others that have the same set."""
        return self._engine.folder.instance

    @property
    def path(self) -> Path:
        """The folder that holds all of it."""
        return self._engine.path

    @property
    def fingerprint(self) -> Fingerprint:
        """What its artifacts depend on."""
        return self._engine.folder.fingerprint

    @property
    def options(self) -> Options:
        """What is kept of it, and for how long: no longer than anything may be kept here."""
        options, longest = self._engine.folder.options, self._longest
        if longest is None or (options.ttl is not None and options.ttl <= longest):
            return options
        return replace(options, ttl=longest)

    @property
    def memory(self) -> Memory | None:
        """What keeps values that were read; None: nothing does."""
        return self._memory

    def __repr__(self) -> str:
        what = f"{len(self):,} artifacts" if self._release.alive else "closed"
        return f"<ArtifactSet {self.name} {self.id[:8]}: {what}>"

    def __reduce__(self) -> tuple[object, ...]:
        """Go to another process as its folder: it is opened there."""
        options = self._threads, self._longest, self._make_room, self._room_step
        return _reopened, (
            self.path, *options, self._engine.read_only, self._memory, self._engine.far
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is to be written, and let go of it. Twice: no effect."""
        if self._release.detach() is not None:
            self._engine.release()

    # writing

    def put(
        self,
        key: str,
        value: object,
        *,
        metadata: object = None,
        ttl: float | timedelta | None = None,
        durable: bool | None = None,
    ) -> None:
        """Keep a value (and plain values about it) under a key, in place of what it had.

        When it returns, the value survives the death of this process, and every process finds it;
        with `durable` it also survives power loss. UnsupportedValueError names the part of a value
        that cannot be kept.
        """
        engine = self._engine
        options = engine.folder.options
        if ttl is None:
            ttl = options.ttl
        write.put(
            engine, check_key(key), value, metadata=metadata,
            expires=0 if ttl is None and self._longest is None else self._expiry(ttl),
            durable=options.durable if durable is None else durable,
        )  # fmt: skip
        if self._memory is not None:
            self._memory.drop((self._where, key))
        if engine.churn >= engine.look_at or self._make_room is not None:
            self._keep_bounds()

    def put_many(
        self, items: Mapping[str, object] | Iterable[tuple[str, object]], *, durable: bool = False
    ) -> int:
        """Keep many values; return how many. With `durable` there is one sync for all of them."""
        pairs = items.items() if isinstance(items, Mapping) else items
        count = 0
        for key, value in pairs:
            self.put(key, value, durable=False)
            count += 1
        if durable or self._engine.folder.options.durable:
            self._engine.sync_all()
        return count

    def delete(self, key: str) -> bool:
        """Delete an artifact; False: there was none."""
        return bool(self.delete_many([key]))

    def delete_many(self, keys: Iterable[str]) -> int:
        """Delete artifacts; return how many there were. If the set is durable, so is that."""
        durable = self._engine.folder.options.durable
        stored = check_keys(keys)
        count = write.delete(self._engine, stored, durable=durable)
        if self._memory is not None:
            for key in stored:
                self._memory.drop((self._where, key_text(key)))
        self._keep_bounds()
        return count

    def discard(self, sample: Sample) -> bool:
        """Delete an artifact, unless its key has another one by now; False: it has, or has none."""
        return write.delete_exactly(self._engine, sample.key_bytes, sample.seq)

    def __delitem__(self, key: str) -> None:
        """Delete an artifact; ArtifactNotFoundError if there is none."""
        if not self.delete(key):
            raise ArtifactNotFoundError(f"{self.name} has no artifact {key}", keys=(key,))

    def touch(self, key: str) -> None:
        """Count an artifact as used now."""
        self._engine.touch(check_key(key))

    def pin(self, key: str) -> None:
        """Keep an artifact from being evicted and from expiring."""
        write.pin(self._engine, check_key(key), is_pinned=True)

    def unpin(self, key: str) -> None:
        """Let an artifact be evicted again."""
        write.pin(self._engine, check_key(key), is_pinned=False)

    def is_pinned(self, key: str) -> bool:
        """Say whether an artifact is pinned."""
        self._engine.catalog.refresh()
        return self._engine.catalog.is_pinned(check_key(key))

    # reading

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        self._engine.refuse_closed()
        return self._engine.catalog.find(check_key(key)) is not None

    def __len__(self) -> int:
        self._engine.refuse_closed()
        catalog = self._engine.catalog
        return int(catalog.is_live(catalog.snapshot()).sum())

    def __iter__(self) -> Iterator[str]:
        """Go through the keys in no particular order, also while artifacts come and go."""
        self._engine.refuse_closed()
        catalog = self._engine.catalog
        table = catalog.snapshot()
        rows = np.flatnonzero(catalog.is_live(table)).tolist()
        for _ in range(_TRIES):
            left = set(rows)
            for row, key in catalog.keys_of(table, rows):
                left.discard(row)
                yield key_text(key)
            if not left:
                return
            again = catalog.snapshot()  # compaction has moved some
            moved = np.isin(again.hash, table.hash[list(left)])
            table, rows = again, np.flatnonzero(moved & catalog.is_live(again)).tolist()

    def keys(self) -> Iterator[str]:
        """Go through the keys."""
        return iter(self)

    def __getitem__(self, key: str) -> Sample:
        """Return an artifact of which nothing is read yet; ArtifactNotFoundError if there is none.

        It stays readable as long as the sample is held, whatever happens to the set.
        """
        return Sample(self._engine, read.hold(self._engine, [check_key(key)])[0])

    def get(self, key: str, default: object = None, *, views: bool = False) -> Any:  # noqa: ANN401 - whatever was put
        """Return the whole value of an artifact; `default` if there is none, or a damaged one.

        With `views`, numpy arrays in it are read-only, and those in memory are not copied.
        """
        kept = None if self._memory is None else self._kept(key)
        if kept is not None:
            return kept.views() if views else kept.get()
        found = self._look(key, None)
        if found is None:
            return default
        return locked(found[0]) if views else found[0]

    def get_with_metadata(self, key: str) -> tuple[Any, Any] | None:
        """Return the whole value of an artifact and what was put beside it; None: there is none."""
        kept = None if self._memory is None else self._kept(key)
        if kept is not None:
            return kept.get(), kept.get_metadata()
        found = self._look(key, None)
        return None if found is None else (found[0], decode_metadata(found[1]))

    def _kept(self, key: str) -> Kept | None:
        """Return what memory has of an artifact, if that is what the set has now."""
        memory, engine = self._memory, self._engine
        kept = memory.find((self._where, key))  # type: ignore[union-attr]
        if kept is None:
            return None
        catalog = engine.catalog
        if catalog.clock() < kept.until and catalog.is_unchanged(kept.changes):
            engine.hits += 1
            return kept
        changes = catalog.changes
        found = engine.hold_one(check_key(key))
        if found is None or (found[0].pack.nonce, found[0].offset) != kept.place:
            memory.drop((self._where, key), stale=True)  # type: ignore[union-attr]
            return None
        kept.changes, kept.until = changes, self._until(found[0].expires)
        return kept

    def _until(self, expires: int) -> float:
        """Return when what is in memory must be looked at again; then a use is noted, too."""
        now, step = self._engine.catalog.clock(), self._engine.step
        until = (now // step + 1) * step
        return min(until, expires) if expires > now else until

    def _look(
        self, key: str, validate: Callable[[Sample], object] | None, *, expired: bool = False
    ) -> tuple[object, bytes] | None:
        """Return value and metadata (encoded) of an artifact that is valid; None: there is none.

        With `expired` it may be past its time.
        """
        engine = self._engine
        stored = check_key(key)
        changes = engine.catalog.changes
        found = engine.look(stored) if expired else engine.hold_one(stored)
        if found is None:
            return None
        try:
            held = read.held(engine, stored, *found)
            if validate is not None and not validate(Sample(engine, held)):
                return None
            try:
                value, about = read.read_value(held)
            except DamagedArtifactError as error:
                if read.is_damaged(held):
                    read.settle(engine, stored, held.place, error)
                    return None
                value, about = read.read_value(held)
        except (ArtifactNotFoundError, DamagedArtifactError):
            return None
        if self._memory is not None and not expired:
            place = held.place
            # An object of a codec may raise anything where it cannot be copied.
            with suppress(Exception):
                self._memory.keep((self._where, key), Kept(
                    value, decode_metadata(about), place=(place.pack.nonce, place.offset),
                    changes=changes, until=self._until(place.expires),
                    least=place.meta + sum(spec.nbytes for spec in held.layout.tensors),
                ))  # fmt: skip
        return value, about

    def metadata(self, key: str) -> Any:  # noqa: ANN401
        """Return what was put beside a value; no tensor is read for it."""
        return self[key].metadata

    def get_batch(
        self,
        keys: Sequence[str],
        *,
        out: Mapping[Any, object] | None = None,
        pinned: bool = False,
        threads: int | None = None,
        ragged: Literal["raise", "list"] = "raise",
    ) -> dict[Any, Any]:
        """Return {field: one stacked tensor, or a list of values} of artifacts that are dicts.

        `out` gives tensors to be reused, by field: those of an earlier batch, for instance. They
        may be longer; what is returned is then the first part of them. `pinned` is for new ones.
        BatchShapeError if tensors of a field differ in shape or dtype; with ragged="list" they
        become a list.
        """
        engine = self._engine
        return read.read_some(
            engine, check_keys(keys), lambda some: read.hold(engine, some), out,
            pinned=pinned, threads=self._threads if threads is None else threads, ragged=ragged,
        )  # fmt: skip

    def select(self, keys: Sequence[str]) -> Selection:
        """Return artifacts by their position in a list of keys, for many random batches.

        chosen = latents.select(keys)
        batch = chosen.read([5, 3, 8])     # of keys[5], keys[3], keys[8]
        """
        return Selection(self, keys)

    def announce(self, keys: Iterable[str]) -> None:
        """Tell the kernel that artifacts will be read soon; those that are missing are left out."""
        engine = self._engine
        stored = check_keys(keys)
        step = engine.catalog.files.most
        for start in range(0, len(stored), step):
            some = stored[start : start + step]
            found = zip(some, engine.hold(some), strict=True)
            read.announce(
                read.held(engine, key, *each) for key, each in found if each is not None
            )  # fmt: skip

    # computing

    def get_or_compute(
        self,
        key: str,
        compute: Callable[[], object],
        *,
        metadata: object = None,
        validate: Callable[[Sample], object] | None = None,
        ttl: float | timedelta | None = None,
        remember_failures: bool | float = False,
    ) -> Any:  # noqa: ANN401
        """Return the value of an artifact; if there is none, compute it, once for all who ask.

        `validate` is given the artifact (unread) every time; if it says no, it is computed again.
        A failure reaches the caller; with `remember_failures` (True: for good, a number: for so
        many seconds) it is not tried again before, and RememberedFailureError says why. Damage
        is a miss. What is returned is what was kept; what cannot be kept (of a type without a
        codec, on a full disk) is returned as it was computed, with a warning in the log.
        """
        if self._memory is not None and validate is None:
            kept = self._kept(key)
            if kept is not None:
                return kept.get()
        found = self._look(key, validate)
        if found is not None:
            return found[0]
        pause = _pause(remember_failures)
        self._expiry(ttl)  # refused before anything is computed
        self._engine.refuse_read_only()
        key_locks = self._engine.key_locks
        with ExitStack() as stack:
            try:
                # A claim costs a tenth of `hold`; who finds the key taken waits for it with that.
                if not key_locks.try_hold([key], stack):
                    stack.enter_context(key_locks.hold(key, what="computing"))
            except (NoSpaceError, StoreUnwritableError) as error:
                self._warn_unkept(key, error)
            found = self._look(key, validate)
            if found is not None:
                return found[0]
            with self._remembering(key, pause):
                made = compute()
            return self._keep_made(key, made, metadata, validate, ttl)

    @contextmanager
    def _remembering(self, key: str, pause: float | None) -> Iterator[None]:
        """Refuse what failed before, and remember if it does now; None: nothing is remembered."""
        stored = check_key(key)
        if pause is not None:
            refusal = self._refusal(stored, pause)
            if refusal is not None:
                raise refusal
        try:
            yield
        except Exception as error:
            if pause is not None:
                self._remember(stored, error)
            raise

    def _keep_made(
        self,
        key: str,
        made: object,
        metadata: object,
        validate: Callable[[Sample], object] | None,
        ttl: float | timedelta | None,
    ) -> object:
        """Keep what was computed, and return what was kept; under the lock it is not evicted.

        What cannot be kept is returned as it was computed.
        """
        stored = check_key(key)
        if self._try_put(key, made, metadata, ttl) is not None:
            return made
        with suppress(StoreError):
            self._engine.index.drop_failures([stored])
        # What has a short time to live may be past it by now, and was computed all the same.
        found = self._look(key, validate) or self._look(key, validate, expired=True)
        if found is not None:
            return found[0]
        if validate is None or self._engine.look(stored) is None:
            return made  # somebody has deleted it at once, or it cannot be read
        self.delete(key)
        message = f"What was computed for {key} of {self.name} was refused by `validate`"
        raise ArtifactError(message, hint="Check `validate` and the computation.")

    def _try_put(
        self, key: str, value: object, metadata: object, ttl: float | timedelta | None
    ) -> Exception | None:
        """Keep what was computed; return why it could not be, which is a warning once per cause."""
        try:
            self.put(key, value, metadata=metadata, ttl=ttl)
        except Exception as error:  # noqa: BLE001 - also those of a codec, or of a full device
            self._warn_unkept(key, error)
            return error
        return None

    def _warn_unkept(self, key: str, error: Exception) -> None:
        cause = type(error), getattr(error, "path", None)
        if cause not in self._warned:
            self._warned.add(cause)
            text = error.message if isinstance(error, SmartcacheError) else repr(error)
            hint = f" Hint: {error.hint}" if isinstance(error, SmartcacheError) else ""
            _log.warning(
                "What was computed for %s of %s is not kept: %s%s", key, self.name, text, hint
            )

    def compute_many(
        self,
        keys: Sequence[str],
        fn: Callable[[list[str]], Iterable[object]],
        *,
        batch: int = 32,
        wait: bool = True,
        ttl: float | timedelta | None = None,
        remember_failures: bool | float = False,
    ) -> Computed:
        """See to it that there is an artifact for every key, each computed once for all who ask.

        `fn` gets lists of at most `batch` keys and returns as many values. A value that is an
        exception is a failure of its key; what `fn` raises ends the call, and what was put before
        stays. Values that cannot be kept are in `unstored`, with a warning in the log; if the disk
        is at fault, nothing more is computed. Keys that another thread or process computes are left
        to it; at the end this call waits for them, and computes what is then still missing. It
        never waits while others could wait for it.
        """
        if batch < 1:
            raise ConfigError(f"batch must be at least 1, not {batch}")
        check_keys(keys)
        engine = self._engine
        pause = _pause(remember_failures)
        self._expiry(ttl)
        result = Computed()
        left = list(dict.fromkeys(keys))
        is_first = True
        while left:
            present = self._present(left)
            there = [key for key in left if key in present]
            (result.found if is_first else result.waited).extend(there)
            left = [key for key in left if key not in present]
            if left and is_first:
                engine.refuse_read_only()
            if pause is not None:
                left = [key for key in left if not self._is_refused(key, pause, result)]
            busy: list[str] = []
            for start in range(0, len(left), batch):
                some, rest = left[start : start + batch], left[start + batch :]
                more, error = self._compute_some(some, fn, ttl, pause, result, is_first=is_first)
                busy += more
                if error is not None:  # nor would the rest be kept
                    result.failed |= dict.fromkeys([*busy, *rest], f"not computed: {error}")
                    return result
            left, is_first = busy, False
            if not wait:
                result.busy = left
                break
            if left:
                # Holding nothing: whoever has it may wait for a key that this call had.
                with engine.key_locks.hold(left[0], what="computing"):
                    pass
        return result

    def _present(self, keys: Sequence[str]) -> set[str]:
        stored = check_keys(keys)
        found = self._engine.catalog.find_many(stored)
        return {key for key, place in zip(keys, found, strict=True) if place is not None}

    def claim(self, keys: Sequence[str]) -> Claim:
        """Be the one who computes those of some keys that are missing and that nobody computes.

        It never waits. Put what was computed, or remember a failure, before the claim is closed:
        then others who want it look, and go on from there.
        """
        self._engine.refuse_read_only()
        stack = ExitStack()
        try:
            held = set(self._engine.key_locks.try_hold(keys, stack))
            # Between the look and the lock another one may have computed it.
            present = self._present([key for key in keys if key in held]) if held else set()
        except BaseException:
            stack.close()
            raise
        return Claim(
            keys=[key for key in keys if key in held and key not in present],
            present=[key for key in keys if key in present],
            busy=[key for key in keys if key not in held],
            _stack=stack,
        )  # fmt: skip

    def wait_for(self, key: str, timeout: float) -> bool:
        """Wait until nobody computes a key any more, or so many seconds; say whether it is so."""
        return self._engine.key_locks.wait(key, timeout)

    def _compute_some(
        self,
        keys: list[str],
        fn: Callable[[list[str]], Iterable[object]],
        ttl: float | timedelta | None,
        pause: float | None,
        result: Computed,
        *,
        is_first: bool,
    ) -> tuple[list[str], StoreError | None]:
        """Compute those of some keys that are free; return the others, and what ails the disk."""
        stuck: StoreError | None = None
        with self.claim(keys) as claim:
            (result.found if is_first else result.waited).extend(claim.present)
            mine = claim.keys
            if mine:
                done = len(result.computed)
                values = _values_of(fn(list(mine)), mine)
                for key, value in zip(mine, values, strict=True):
                    if isinstance(value, BaseException):
                        result.failed[key] = f"{type(value).__name__}: {value}"
                        if pause is not None:
                            self._remember(check_key(key), value)
                    elif (error := self._try_put(key, value, None, ttl)) is None:
                        result.computed.append(key)
                    else:
                        result.unstored[key] = value
                        stuck = error if isinstance(error, StoreError) else stuck
                with suppress(StoreError):
                    self._engine.index.drop_failures(check_keys(result.computed[done:]))
        return claim.busy, stuck

    def _is_refused(self, key: str, pause: float, result: Computed) -> bool:
        reason = self._refusal(check_key(key), pause)
        if reason is not None:
            result.failed[key] = reason.reason
        return reason is not None

    def _refusal(self, key: bytes, pause: float) -> RememberedFailureError | None:
        """Return why a computation that failed before is not tried again; None: it may be."""
        known = None
        with suppress(StoreError):  # a full disk may have no room for the index
            known = self._engine.index.failure(key)
        if known is None:
            return None
        reason, count, failed_at = known
        if self._engine.catalog.clock() >= failed_at + pause:
            return None
        times = "once" if count == 1 else f"{count} times"
        message = f"Artifact {key_text(key)} of {self.name} failed {times}: {reason}"
        return RememberedFailureError(message, key=key_text(key), reason=reason, count=count)

    def _remember(self, key: bytes, error: BaseException) -> None:
        with suppress(StoreError):  # the failure itself is what the caller must see
            self.remember_failure(key_text(key), f"{type(error).__name__}: {error}")

    def remember_failure(self, key: str, reason: str) -> None:
        """Remember that an artifact cannot be computed, and why."""
        now = int(self._engine.catalog.clock())
        self._engine.index.add_failure(check_key(key), reason[:_LONGEST_REASON], now)

    def failures(self) -> list[Failure]:
        """Return the computations that failed and are remembered."""
        if not self._engine.has_index:
            return []
        return [
            Failure(key=key_text(key), reason=reason, count=count, failed_at=failed_at)
            for key, reason, count, failed_at in self._engine.index.failures()
        ]

    def failed(self, keys: Sequence[str]) -> set[str]:
        """Return those of some keys whose failures are remembered."""
        if not self._engine.has_index:
            return set()
        return set(map(key_text, self._engine.index.failed(check_keys(keys))))

    def forget_failure(self, *keys: str) -> bool:
        """Let computations be tried again; False: none had failed."""
        return bool(self._engine.index.drop_failures(check_keys(keys)))

    # looking after it

    def flush(self) -> None:
        """Write down when artifacts were last used; what was put is visible to all anyway."""
        self._engine.flush()

    def sync(self) -> None:
        """Return when all that was put survives power loss."""
        self._engine.sync_all()

    def seal(self) -> None:
        """End the pack that this process writes: it is on the disk, and nobody adds to it."""
        with self._engine.mutex:
            self._engine.leave_pack(sealed=True)

    def take_in(self, pack: str | Path) -> int:
        """Take in a pack that this set has in another folder; return how many records it has.

        The pack is copied, unless it is in the folder of this set already. Its artifacts replace
        those of the same keys that there are now.
        """
        records = recover.take_in(self._engine, Path(pack))
        self._keep_bounds()
        return records

    def sealed(
        self, sizes: Mapping[str, int] = MappingProxyType({})
    ) -> AbstractContextManager[Sealed]:
        """Have all packs that nobody writes sealed, and none go, for the length of a block.

        Those that are not as long as others of their names, by `sizes`, get new names.
        """
        return recover.sealed(self._engine, sizes)

    def packs_here(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the names of all packs on this disk.

        Where one is not as long as another of its name, by `sizes`, it gets a new name before.
        """
        names = pack_names(self.path)
        if any(recover.is_another(self._engine, name, sizes) for name in names):
            with self.sealed(sizes):
                names = pack_names(self.path)
        return set(names)

    def bring(self, name: str, chunks: Iterable[bytes], *, size: int, digest: str) -> None:
        """Write a sealed pack of this set from elsewhere to this disk, by its digest.

        DigestMismatchError, and nothing is kept, if other bytes arrive. Its artifacts count as
        older than those that were put here, and among each other by their times.
        """
        recover.bring(self._engine, name, chunks, size=size, digest=digest)

    def attach(self, skeleton: Skeleton, *, take_in: bool = False) -> None:
        """Have a pack that lies in a tier; its artifacts count as `bring` says, or as put now."""
        recover.attach(self._engine, skeleton, take_in=take_in)

    def detach(self, name: str) -> None:
        """Have a pack of a tier no more."""
        self._engine.refuse_read_only()
        far.detach(self.path, name)

    @property
    def is_far(self) -> bool:
        """Whether some of it lies in a tier: then it pays to announce early what is read."""
        self._engine.catalog.refresh()
        return any(pack.is_far for pack in self._engine.catalog.known_packs())

    def has_all_of(self, skeleton: Skeleton) -> bool:
        """Say whether there is an artifact here for every key that a pack of a tier has."""
        keys = recover.keys_in(self._engine, skeleton)
        with self.select(keys) as chosen:
            return not len(chosen.missing)

    def far_packs(self) -> dict[str, Skeleton]:
        """Return the packs that lie in tiers, by name."""
        return far.skeletons(self.path)

    def stats(self) -> SetStats:
        """Return figures; looks at all footers."""
        engine = self._engine
        uses = compact.uses_of(engine)
        live = sum(use.live for use in uses)
        saved = sum(use.saved for use in uses)
        return SetStats(
            artifacts=sum(use.artifacts for use in uses),
            logical=live + saved,
            live=live,
            on_disk=sum(use.size for use in uses),
            dead=sum(use.dead for use in uses),
            packs=len(uses),
            saved=saved,
            pinned=sum(
                engine.catalog.find(key, expired=True) is not None
                for key in engine.catalog.pinned()
            ),
            hits=engine.hits,
            misses=engine.misses,
            damaged=len(engine.damage),
        )  # fmt: skip

    def describe(self) -> SetInfo:
        """Return what the set is."""
        return describe(self._engine)

    def compact(self, *, force: bool = False, progress: Progress = silent) -> CompactResult:
        """Give back the room of what was deleted: of packs that are half dead, or of all."""
        return compact.compact(self._engine, force=force, progress=progress)

    def verify(self, *, progress: Progress = silent) -> SetVerifyReport:
        """Read everything again; what is damaged is deleted and named."""
        return recover.verify(self._engine, progress=progress)

    def evict(self) -> Eviction:
        """Bring the set within its bounds now; puts do so by themselves."""
        self._engine.refuse_read_only()
        return compact.enforce(self._engine)

    def sweep(self) -> Eviction:
        """Delete what is past its time; until then it takes room, but nobody gets it."""
        self._engine.refuse_read_only()
        done = compact.evict(self._engine, compact.victims(self._engine))
        self._keep_bounds()
        return done

    def _expiry(self, ttl: float | timedelta | None) -> int:
        """Return when something that is put now is past its time; 0: never."""
        longest = self._longest
        if ttl is None:
            seconds = math.inf if longest is None else longest
        else:
            seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
            check_option("ttl", seconds)
            seconds = seconds if longest is None else min(seconds, longest)
        if seconds > _FOR_EVER:
            return 0
        # Times are kept in whole seconds: nothing ends before its time.
        expires = math.ceil(self._engine.catalog.clock() + seconds)
        return 0 if expires > _FOR_EVER else expires

    def _keep_bounds(self) -> None:
        """Let go what should go; nobody has asked for it, so what goes wrong is no error."""
        engine = self._engine
        written = engine.written_size
        try:
            compact.keep(engine)
            if self._make_room is not None and written - self._measured >= self._room_step:
                self._measured = written
                self._make_room()
        except (SmartcacheError, OSError) as error:
            _log.warning("%s was not brought within its bounds: %s", self.name, error)


class Selection(read.Selection):
    """Artifacts by their position in a list of keys: see `ArtifactSet.select`."""

    def __init__(self, opened: ArtifactSet, keys: Sequence[str]) -> None:
        self._set = opened
        stored = keys.stored if isinstance(keys, Digests) else check_keys(keys)
        super().__init__(opened._engine, keys, stored, opened._threads)  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<Selection of {self._set.name}: {len(self):,} keys, {len(self.missing):,} missing>"

    def __reduce__(self) -> tuple[object, ...]:
        """Go to another process as the set and the keys: it is made again there."""
        return Selection, (self._set, self._keys)


def _pause(remember_failures: bool | float) -> float | None:  # noqa: FBT001
    """Return for how many seconds a failure stands; None: it is not remembered."""
    if remember_failures is False:
        return None
    return math.inf if remember_failures is True else float(remember_failures)


def _values_of(returned: object, keys: list[str]) -> list[object]:
    """Return what a computation has made of some keys; of a dict, say, that would be its keys."""
    hint = "Return a list: one value, or exception, per key, in the order of the keys."
    if not isinstance(returned, Iterable) or isinstance(returned, (Mapping, set, str, bytes)):
        kind = with_article(type(returned).__qualname__)
        raise ArtifactError(f"fn returned {kind}, not a list", hint=hint)
    values = list(returned)
    if len(values) != len(keys):
        message = f"fn returned {len(values)} values for {len(keys)} keys"
        raise ArtifactError(message, hint=hint)
    return values


def describe(engine: Engine) -> SetInfo:
    """Return what an open set is."""
    folder = engine.folder
    engine.flush()
    table = engine.catalog.snapshot()
    is_artifact = table.kind == ARTIFACT
    times = engine.used_at(table)[is_artifact]
    used = datetime.fromtimestamp(int(times.max()), UTC) if len(times) else None
    return SetInfo(
        name=folder.name, id=folder.id, fingerprint=folder.fingerprint, path=folder.path,
        created_at=folder.created_at, used_at=used, options=folder.options,
        artifacts=len(times), live=compact.live_size(engine),
        on_disk=compact.on_disk(engine),
    )  # fmt: skip


def _reopened(
    path: Path,
    threads: int,
    longest: float | None,
    make_room: Callable[[], None] | None,
    room_step: int,
    read_only: bool,  # noqa: FBT001
    memory: Memory | None,
    elsewhere: Far | None,
) -> ArtifactSet:
    return ArtifactSet(
        SetFolder.read(path, read_only=read_only), threads=threads, longest=longest,
        make_room=make_room, room_step=room_step, read_only=read_only, memory=memory,
        elsewhere=elsewhere,
    )  # fmt: skip
