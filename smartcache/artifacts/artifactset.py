"""Sets of artifacts: computed tensors and plain values, kept once and found by their key.

    with cache.artifacts("sdxl-latents", fingerprint={"vae": digest, "size": 1024}) as latents:
        latents.put(key, {"latent": tensor, "crop": [0, 0, 1024, 1024]})
        batch = latents.get_batch(keys)

This is the face of it; the work is done by the modules it names. Whatever is returned is memory of
the caller's own, but for `handle.numpy()`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from smartcache.artifacts import bounds, compaction, computing, reading, verifying, writing
from smartcache.artifacts.batches import read_batch
from smartcache.artifacts.computing import Failure, Retry
from smartcache.artifacts.engine import SetEngine, open_engine
from smartcache.artifacts.expiring import expiry
from smartcache.artifacts.figures import SetInfo, SetStats, describe
from smartcache.artifacts.fingerprint import Fingerprint
from smartcache.artifacts.keys import check_key, key_text
from smartcache.artifacts.lazy import Sample
from smartcache.artifacts.located import Located
from smartcache.artifacts.recovery import read_tails
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.writing import decode_metadata
from smartcache.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    DamagedArtifactError,
)
from smartcache.progress import Progress, silent

_PAGE = 1000


class ArtifactSet:
    """The artifacts of one name and fingerprint. For any number of threads and processes."""

    def __init__(
        self,
        folder: SetFolder,
        *,
        threads: int = 2,
        longest: float | None = None,
        make_room: Callable[[], None] | None = None,
        room_step: int = 0,
    ) -> None:
        self._engine = open_engine(folder)
        self._release = weakref.finalize(self, SetEngine.release_later, self._engine)
        self._threads = threads
        self._longest = longest
        """Seconds that no artifact outlives, whatever its own time to live is."""
        self._make_room = make_room
        self._room_step = room_step
        """Bytes that are written before all sets together are measured again."""
        self._measured = self._kept = 0

    @property
    def name(self) -> str:
        """The name of the set."""
        return self._engine.folder.name

    @property
    def id(self) -> str:
        """What tells it from other sets of its name: made of its fingerprint."""
        return self._engine.folder.id

    @property
    def path(self) -> Path:
        """The folder that holds all of it."""
        return self._engine.path

    @property
    def fingerprint(self) -> Fingerprint:
        """What its artifacts depend on."""
        return self._engine.folder.fingerprint

    def __repr__(self) -> str:
        return f"<ArtifactSet {self.name} {self.id[:8]}: {len(self):,} artifacts>"

    def __reduce__(self) -> tuple[object, ...]:
        """Go to another process as its folder: it is opened there."""
        options = self._threads, self._longest, self._make_room, self._room_step
        return _reopened, (self.path, *options)

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

        When it returns, the value survives the death of this process; with `durable` also power
        loss. UnsupportedValueError names the part of a value that cannot be kept.
        """
        options = self._engine.folder.options
        writing.put(
            self._engine, check_key(key), value, metadata=metadata,
            expires_at=expiry(options.ttl if ttl is None else ttl, self._longest),
            durable=options.durable if durable is None else durable,
        )  # fmt: skip
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
        count = writing.delete(self._engine, map(check_key, keys))
        if count and self._engine.folder.options.durable:
            self._engine.sync_all()
        self._keep_bounds()
        return count

    def __delitem__(self, key: str) -> None:
        """Delete an artifact; ArtifactNotFoundError if there is none."""
        if not self.delete(key):
            raise ArtifactNotFoundError(f"{self.name} has no artifact {key}", keys=(key,))

    def touch(self, key: str) -> None:
        """Count an artifact as used now."""
        stored = check_key(key)
        self._engine.need((stored,))
        self._engine.touch(stored)

    def pin(self, key: str) -> None:
        """Keep an artifact from being evicted and from expiring."""
        writing.pin(self._engine, check_key(key), is_pinned=True)

    def unpin(self, key: str) -> None:
        """Let an artifact be evicted again."""
        writing.pin(self._engine, check_key(key), is_pinned=False)

    # reading

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._engine.find(check_key(key)) is not None

    def __len__(self) -> int:
        self._engine.flush()
        index = self._engine.index
        return index.totals()[0] - index.expired_count(int(time.time()))

    def __iter__(self) -> Iterator[str]:
        """Go through the keys, also while artifacts come and go."""
        self._engine.flush()
        after = b""
        while page := self._engine.index.entries_after(after, _PAGE):
            now = time.time()
            for key, entry in page:
                if not entry.expires_at or entry.expires_at > now or entry.is_pinned:
                    yield key_text(key)
            after = page[-1][0]

    def keys(self) -> Iterator[str]:
        """Go through the keys."""
        return iter(self)

    def __getitem__(self, key: str) -> Sample:
        """Return an artifact of which nothing is read yet; ArtifactNotFoundError if there is none.

        It stays readable as long as the sample is held, whatever happens to the set.
        """
        return Sample(self._engine, self._engine.need_one(check_key(key)))

    def get(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - whatever was put
        """Return the whole value of an artifact; `default` if there is none, or a damaged one."""
        found = self._engine.find(check_key(key))
        if found is None:
            return default
        try:
            return self._value(found)
        except (ArtifactNotFoundError, DamagedArtifactError):
            return default

    def _value(self, found: Located) -> object:
        packs = self._engine.packs
        return reading.persistently(
            self._engine, found, lambda each: reading.read_whole(packs, each)
        )

    def metadata(self, key: str) -> Any:  # noqa: ANN401
        """Return what was put beside a value; no tensor is read for it."""
        found = self._engine.need_one(check_key(key))
        packs = self._engine.packs

        def read(each: Located) -> object:
            return decode_metadata(reading.read_record(packs, each).metadata)

        return reading.persistently(self._engine, found, read)

    def get_batch(
        self,
        keys: Sequence[str],
        *,
        out: Mapping[Any, object] | None = None,
        pinned: bool = False,
        threads: int | None = None,
    ) -> dict[Any, Any]:
        """Return {field: one stacked tensor, or a list of values} of artifacts that are dicts.

        `out` gives tensors to be reused, by field: those of an earlier batch, for instance. They
        may be longer; what is returned is then the first part of them. `pinned` is for new ones.
        BatchShapeError if tensors of a field differ in shape or dtype.
        """
        wanted = [check_key(key) for key in keys]
        count = self._threads if threads is None else threads
        return read_batch(self._engine, wanted, out=out, pinned=pinned, threads=count)

    def announce(self, keys: Iterable[str]) -> None:
        """Tell the kernel that artifacts will be read soon; those that are missing are left out."""
        found = self._engine.locate([check_key(key) for key in keys])
        reading.announce(self._engine.packs, (each for each in found if each is not None))

    # computing

    def get_or_compute(
        self,
        key: str,
        compute: Callable[[], object],
        *,
        metadata: object = None,
        validate: Callable[[Sample], object] | None = None,
        ttl: float | timedelta | None = None,
        remember_failures: bool | float | Retry | None = None,
    ) -> Any:  # noqa: ANN401
        """Return the value of an artifact; if there is none, compute it, once for all who ask.

        `validate` is given the artifact (unread) every time; if it says no, it is computed again.
        A failure reaches the caller; with `remember_failures` (True: for good, a number: for so
        many seconds, or a `Retry`) it is not tried again before, and RememberedFailureError says
        why. Damage is a miss. What is returned is always what was kept.
        """
        stored = check_key(key)
        is_there, value = self._look(stored, validate)
        if is_there:
            return value
        rule = computing.rule_of(remember_failures)
        engine = self._engine
        with engine.leases.hold(key, what="computing"):
            read_tails(engine.index, engine.packs, engine.path)
            is_there, value = self._look(stored, validate)
            if is_there:
                return value
            if rule is not None:
                computing.refuse_failed(engine, stored, rule)
            made = computing.attempt(engine, stored, compute, rule)
            self.put(key, made, metadata=metadata, ttl=ttl)
            engine.flush()  # before others, who wait for the lease, look
            engine.index.drop_failure(stored)
            is_there, value = self._look(stored, validate)  # under the lease it is not evicted
            if is_there:
                return value
            self.delete(key)
            message = f"What was computed for {key} of {self.name} was refused by `validate`"
            raise ArtifactError(message, hint="Check `validate` and the computation.")

    def _look(self, key: bytes, validate: Callable[[Sample], object] | None) -> tuple[bool, object]:
        """Return whether there is a valid artifact, and its value."""
        found = self._engine.find(key)
        if found is None:
            return False, None
        try:
            if validate is not None and not validate(Sample(self._engine, found)):
                return False, None
            return True, self._value(found)
        except (ArtifactNotFoundError, DamagedArtifactError):
            return False, None

    def failures(self) -> list[Failure]:
        """Return the computations that failed and are remembered."""
        return [
            Failure(key=key_text(key), reason=reason, count=count, failed_at=failed_at)
            for key, reason, count, failed_at in self._engine.index.failures()
        ]

    def forget_failure(self, key: str) -> bool:
        """Let a computation be tried again; False: none had failed."""
        return self._engine.index.drop_failure(check_key(key))

    # looking after it

    def flush(self) -> None:
        """Let other processes see all that was put; without it they do after a moment."""
        self._engine.flush()

    def sync(self) -> None:
        """Return when all that was put survives power loss."""
        self._engine.sync_all()

    def stats(self) -> SetStats:
        """Return figures; looks at all rows."""
        engine = self._engine
        engine.flush()
        packs = engine.index.packs().values()
        chunks, _, saved = engine.index.chunk_sums()
        live = sum(pack.live for pack in packs)
        return SetStats(
            artifacts=sum(pack.artifacts for pack in packs),
            logical=live + saved,
            live=live,
            on_disk=sum(pack.watermark for pack in packs),
            dead=sum(map(compaction.dead_size, packs)),
            packs=len(packs),
            chunks=chunks,
            saved=saved,
            pinned=engine.index.pinned_count(),
            hits=engine.hits,
            misses=engine.misses,
            damaged=len(engine.damage),
        )

    def describe(self) -> SetInfo:
        """Return what the set is."""
        return describe(self._engine)

    def compact(
        self, *, force: bool = False, progress: Progress = silent
    ) -> compaction.CompactResult:
        """Give back the room of what was deleted: of packs that are half dead, or of all."""
        return compaction.compact(self._engine, force=force, progress=progress)

    def verify(self, *, progress: Progress = silent) -> verifying.SetVerifyReport:
        """Read everything again; what is damaged is deleted and named."""
        return verifying.verify(self._engine, progress=progress)

    def evict(self) -> bounds.Eviction:
        """Bring the set within its bounds now; puts do so by themselves."""
        return bounds.enforce(self._engine)

    def _keep_bounds(self) -> None:
        """Look at the bounds whenever rows were written, by this call or since the last one."""
        engine = self._engine
        if engine.commits == self._kept:
            return
        self._kept = engine.commits
        bounds.keep(engine)
        if self._make_room is not None and engine.written_size - self._measured >= self._room_step:
            self._measured = engine.written_size
            self._make_room()


def _reopened(
    path: Path,
    threads: int,
    longest: float | None,
    make_room: Callable[[], None] | None,
    room_step: int,
) -> ArtifactSet:
    """Return the set that was pickled."""
    return ArtifactSet(
        SetFolder.read(path), threads=threads, longest=longest, make_room=make_room,
        room_step=room_step,
    )  # fmt: skip
