"""Fill huggingface_hub's shared blob store with hard links to blobs.

Every program that uses huggingface_hub >= 2.4 then finds these files by their xet hash and does not
download them, whether or not it knows smartcache. A link costs no space, and no copy is ever made:
where the store is on another filesystem, nothing is done. An entry that is there already stays as
it is. Before a blob gets its first xet hash it is hashed by its own name too, because clients
believe an entry by its size alone.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from smartcache.config import variable
from smartcache.errors import FileChangedError, HubError, SmartcacheError
from smartcache.hub import layout
from smartcache.progress import Progress, silent
from smartcache.sizes import format_size
from smartcache.store import Blob, Store, prove
from smartcache.system import hash_file

_TRIES = 3
_SWITCHES = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_SHARED_BLOBS")
_HOW_TO_GET_ONE = (
    "huggingface_hub >= 2.4 makes it at its first Xet download, unless HF_HUB_DISABLE_XET or "
    "HF_HUB_DISABLE_SHARED_BLOBS is set. Download any Xet repo into that cache once."
)
Found = Literal["absent", "ours", "present", "other"]
"""What is at an entry's path: nothing, this blob, another file of its size, something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedBlob:
    """A blob that can be made findable; `xet` is "" until it is computed."""

    digest: str
    size: int
    xet: str
    store: Store = field(repr=False, compare=False)
    missing_in: tuple[Path, ...]
    """The HF caches on its filesystem that lack it; all of them while `xet` is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    """An entry that was made."""

    digest: str
    size: int
    xet: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSeeded:
    """A blob that could not be made findable, and why."""

    digest: str
    reason: str


@dataclass(slots=True, kw_only=True)
class SeedResult:
    """What was done. `present` counts entries that somebody else had made."""

    seeded: list[Seeded] = field(default_factory=list)
    skipped: list[NotSeeded] = field(default_factory=list)
    present: int = 0
    done: int = 0
    hashed_size: int = 0

    @property
    def size(self) -> int:
        """Bytes that clients find from now on, each blob once."""
        return sum({each.digest: each.size for each in self.seeded}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedPlan:
    """What would be linked, largest first. Blobs whose xet hash is unknown are hashed first."""

    store: Store = field(repr=False)
    caches: tuple[Path, ...]
    blobs: tuple[SeedBlob, ...]
    done: int
    """Entries that are links to our blobs already."""
    present: int
    """Entries that are there with bytes of their own."""
    unhashed: int
    """Blobs left out because hf_xet is missing."""
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes that clients would find."""
        return sum(blob.size for blob in self.blobs)

    @property
    def hash_size(self) -> int:
        """Bytes that have to be hashed for that."""
        return sum(blob.size for blob in self.blobs if not blob.xet)

    def execute(self, *, progress: Progress = silent) -> SeedResult:
        """Hash and link; what cannot be linked is listed with its reason. Undone as one entry."""
        result = SeedResult()
        with ExitStack() as batches:
            for each in self.store.stores():
                batches.enter_context(each.batch("hub seed"))
            with progress("Hashing", self.hash_size, "bytes") as job:
                for blob in self.blobs:
                    _seed(blob, result)
                    if not blob.xet:
                        job.advance(blob.size)
        return result


def plan_seed(store: Store, cache_dirs: Iterable[Path], *, min_size: int | None = None) -> SeedPlan:
    """Plan to link blobs into the shared stores of HF caches; HubError if none has one.

    `min_size` is `link_min_size` of the settings if it is not given.
    """
    caches, warnings = _usable(cache_dirs)
    warnings += [
        f"{name} is set: huggingface_hub then does not use its shared store"
        for name in _SWITCHES
        if (variable(name) or "").upper() in ("1", "ON", "YES", "TRUE")
    ]
    can_hash = find_spec("hf_xet") is not None
    least = max(1, store.settings.link_min_size if min_size is None else min_size)
    blobs: list[SeedBlob] = []
    odd: list[str] = []
    found: Counter[Found] = Counter()
    unhashed = 0
    for here, blob, near in _candidates(store, caches, least, warnings):
        xet = here.aliases_of(blob).get("xet", "")
        missing = near
        if xet:
            entries = {cache: layout.shared_entry(cache, xet) for cache in near}
            looks = {cache: _look(here, blob.digest, blob.size, entries[cache]) for cache in near}
            found.update(looks.values())
            odd += [
                _left_alone(entries[each], blob.size) for each in near if looks[each] == "other"
            ]
            missing = [each for each in near if looks[each] == "absent"]
        elif not can_hash:
            unhashed += 1
            continue
        if missing:
            blobs.append(
                SeedBlob(
                    digest=blob.digest, size=blob.size, xet=xet, store=here,
                    missing_in=tuple(missing),
                )
            )  # fmt: skip
    if unhashed:
        warnings.append(
            f"{unhashed} blobs have no known xet hash and are skipped:"
            " computing it needs the package hf_xet (pip install hf_xet)"
        )
    return SeedPlan(
        store=store, caches=tuple(caches), done=found["ours"], present=found["present"],
        unhashed=unhashed, warnings=(*warnings, *odd),
        blobs=tuple(sorted(blobs, key=lambda blob: (-blob.size, blob.digest))),
    )  # fmt: skip


def _usable(cache_dirs: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Return the caches that have a shared store, each once, and why the others have none."""
    looked_at = list(dict.fromkeys(Path(os.path.realpath(each)) for each in cache_dirs))
    reasons = {each: layout.why_no_shared_store(each) for each in looked_at}
    caches = [each for each, reason in reasons.items() if not reason]
    if not caches:
        texts = [f"{each}: {reason}" for each, reason in reasons.items()]
        message = "No HF cache has a shared blob store that can be filled"
        raise HubError(f"{message} ({'; '.join(texts) or 'none is known'})", hint=_HOW_TO_GET_ONE)
    return caches, [f"{each} is skipped: {reason}" for each, reason in reasons.items() if reason]


def _candidates(
    store: Store, caches: list[Path], least: int, warnings: list[str]
) -> Iterator[tuple[Store, Blob, list[Path]]]:
    """Yield each large blob with the caches on its filesystem; the others get a warning."""
    devices = {each: os.stat(each / "blobs").st_dev for each in caches}
    volumes = {each.volume.device: each for each in reversed(store.stores())}
    for cache, device in devices.items():
        if device not in volumes:
            warnings.append(
                f"{cache} is on another filesystem than the store: hard links cannot reach it, and"
                " copies would take the space twice"
            )
    for device, here in volumes.items():
        near = [cache for cache, its in devices.items() if its == device]
        for blob in here.blobs(order="size") if near else ():
            if blob.size < least:
                break
            if blob.is_here:
                yield here, blob, near


def _look(store: Store, digest: str, size: int, path: Path) -> Found:
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        return "absent"
    try:
        if os.path.samestat(st, os.lstat(store.volume.layout.blob(digest))):
            return "ours"
    except FileNotFoundError:
        pass
    return "present" if stat.S_ISREG(st.st_mode) and st.st_size == size else "other"


def _left_alone(path: Path, size: int) -> str:
    return f"{path} is left alone: it is not a file of {format_size(size)}, as its name says"


def _seed(blob: SeedBlob, result: SeedResult) -> None:
    try:
        xet = blob.xet or _hash(blob)
    except (SmartcacheError, OSError) as error:
        result.skipped.append(NotSeeded(digest=blob.digest, reason=str(error)))
        return
    if not blob.xet:
        result.hashed_size += blob.size
    for cache in blob.missing_in:
        try:
            _link(blob, cache, xet, result)
        except (SmartcacheError, OSError) as error:
            result.skipped.append(NotSeeded(digest=blob.digest, reason=f"{cache}: {error}"))


def _hash(blob: SeedBlob) -> str:
    """Return the xet hash of a blob, remembered as its alias; it is proven by its digest too.

    In the calling thread: Ctrl-C does not end hf_xet in another one.
    """
    store = blob.store
    for attempt in range(_TRIES):
        path = store.path_of(blob.digest)
        try:
            hashes, _ = hash_file(path, ("blake3", "xet"), threads=store.settings.threads)
        except FileChangedError:
            # A link made or removed meanwhile changes the change time: no reason to give up.
            if attempt + 1 == _TRIES:
                raise
            continue
        if hashes.digest != blob.digest:
            prove(store.volume, blob.digest)
            continue
        xet = hashes.values["xet"]
        store.add_aliases(blob.digest, {"xet": xet})
        return xet
    raise FileChangedError(f"Blob {blob.digest} is being written to", path=path)


def _link(blob: SeedBlob, cache: Path, xet: str, result: SeedResult) -> None:
    """Make one entry, while neither a client's collection nor its publication can interfere."""
    if reason := layout.why_no_shared_store(cache):
        raise HubError(f"{cache} is skipped: {reason}")
    path = layout.shared_entry(cache, xet)
    layout.make_shared_prefix(cache, xet)
    with layout.shared_lock(path):
        found = _look(blob.store, blob.digest, blob.size, path)
        if found == "absent":
            blob.store.place(blob.digest, path, kind="hardlink")
            result.seeded.append(Seeded(digest=blob.digest, size=blob.size, xet=xet, path=path))
        elif found == "other":
            raise HubError(_left_alone(path, blob.size))
        else:
            result.done += found == "ours"
            result.present += found == "present"
