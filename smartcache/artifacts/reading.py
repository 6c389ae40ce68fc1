"""Read artifacts: one, or a batch at the speed of memory.

An artifact is read with `preadv` and verified the first time: header, position, key, layout and the
checksum of every byte. From then on its tensors are copied out of a mapping of the pack, once, into
the memory they are wanted in. What is not in the page cache is noticed without waiting for it
(RWF_NOWAIT), and read like the first time; all of that in a batch is announced to the kernel first.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from smartcache.artifacts import writing
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.located import Located, Quick, plain_values
from smartcache.artifacts.packs import OpenPack
from smartcache.artifacts.records import (
    ARTIFACT,
    CHUNK,
    HEADER_BYTES,
    ArtifactPayload,
    checksum,
    parse_header,
    place,
)
from smartcache.errors import (
    ArtifactNotFoundError,
    DamagedArtifactError,
    LayoutError,
    SetFormatError,
    SmartcacheError,
)

if TYPE_CHECKING:
    import numpy as np

    Target = np.ndarray[Any, Any]
    Buffer = bytearray | memoryview | Target

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_TRIES = 5
"""How often an artifact is looked up anew that compaction has moved away."""
_MOST_REMEMBERED = 1024
"""Bytes of a record whose small values are kept in memory."""
_LENGTH = struct.Struct("<I")
_INLINE_LENGTH_AT = 40
_INLINE_START = 48
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class ColdError(Exception):
    """It is not in the page cache: announce it first."""


class Packs(Protocol):
    """Where packs are had from."""

    def __getitem__(self, number: int, /) -> OpenPack:
        """Return an open pack; FileNotFoundError if it was compacted away."""
        ...


def fetch(packs: Packs, found: Located, targets: Sequence[Target]) -> memoryview:
    """Read an artifact: its tensors into the targets; return its inline bytes.

    FileNotFoundError: its pack was compacted away. DamagedArtifactError: it is not what was put.
    """
    if not found.is_verified:
        return read_verified(packs, found, targets)
    quick = found.quick
    if quick is None or any(pack.is_shorter for pack in quick.packs):
        try:
            quick = quick_way(packs, found)
        except ColdError:
            return read_verified(packs, found, targets)
    inline = inline_of(quick, found, wait=True)
    for number, spec, target, view in zip(
        found.places, found.layout.tensors, targets, quick.views, strict=True
    ):
        if view is not None:
            target[:] = view
        else:
            start = ((number & 0xFF_FFFF_FFFF) << 6) + HEADER_BYTES
            _read(packs[number >> 40], (target,), start, spec.nbytes)
    return inline


def inline_of(quick: Quick, found: Located, *, wait: bool = False) -> memoryview:
    """Read the small values of a verified artifact; its record lies right behind its tensors.

    So this also tells whether they are likely to be in the page cache: without `wait`, ColdError if
    the record is not.
    """
    return _inline(quick.pack, quick.offset, quick.inline, found, 0 if wait else _NO_WAIT)


def _inline(pack: OpenPack, offset: int, start: int, found: Located, flags: int) -> memoryview:
    payload = bytearray(found.length)
    _read(pack, (payload,), offset, found.length, flags)
    (length,) = _LENGTH.unpack_from(payload, _INLINE_LENGTH_AT)
    return memoryview(payload)[start : start + length]


def _inline_start(found: Located) -> int:
    """Return where in the payload of a record the inline bytes begin."""
    return _INLINE_START + len(found.key) + 8 * len(found.uids)


def quick_way(packs: Packs, found: Located) -> Quick:
    """Return what makes it quick to read a verified artifact again.

    ColdError if it is not in the page cache: a page that is missing in a mapping is read with
    megabytes around it.
    """
    offset = place(found.place)[1] + HEADER_BYTES
    inline = _inline(packs[found.place >> 40], offset, _inline_start(found), found, _NO_WAIT)
    quick = _mapped(packs, found)
    if any(view is None for view in quick.views):
        return quick
    is_short = found.length <= _MOST_REMEMBERED
    value = found.layout.decode(inline, _nothing) if is_short else None
    quick = quick._replace(values=_small(found, value))
    found.quick = quick
    return quick


def remember(packs: Packs, found: Located, value: object) -> None:
    """Make it quick to read an artifact again that was just verified; `value` has no tensors."""
    quick = _mapped(packs, found)
    if all(view is not None for view in quick.views):
        found.quick = quick._replace(values=_small(found, value))


def _mapped(packs: Packs, found: Located) -> Quick:
    """Return where an artifact is mapped, with its pages in the page tables."""
    number, offset = place(found.place)
    pack = packs[number]
    inline = _inline_start(found)
    specs = found.layout.tensors
    if specs and found.span() is not None:
        # Most are: one look at the file, one call for all pages.
        mapped = pack.mapped(offset)
        if mapped is None:
            return Quick(pack, offset + HEADER_BYTES, inline, [None] * len(specs), (pack,), None)
        starts = [((where & 0xFF_FFFF_FFFF) << 6) + HEADER_BYTES for where in found.places]
        pack.populate(starts[0], offset - starts[0])
        pieces: list[Target | None] = [
            mapped[start : start + spec.nbytes] for start, spec in zip(starts, specs, strict=True)
        ]
        return Quick(pack, offset + HEADER_BYTES, inline, pieces, (pack,), None)
    views: list[Target | None] = []
    used = {number: pack}
    for where, spec in zip(found.places, specs, strict=True):
        start = ((where & 0xFF_FFFF_FFFF) << 6) + HEADER_BYTES
        other = used[where >> 40] = packs[where >> 40]
        mapped = other.mapped(start + spec.nbytes)
        views.append(None if mapped is None else mapped[start : start + spec.nbytes])
        other.populate(start, spec.nbytes)
    return Quick(pack, offset + HEADER_BYTES, inline, views, tuple(used.values()), None)


def _small(found: Located, value: object) -> dict[Hashable, object] | None:
    """Return the small values of an artifact, if they are worth remembering."""
    fields = found.layout.fields
    if fields is None or value is None or found.length > _MOST_REMEMBERED:
        return None
    names = [name for name, node in fields.items() if node.slot is not None]
    if len(names) != len(found.layout.tensors):
        return None
    return plain_values(value, names)


def _nothing(_slot: int) -> None:
    return None


def _read(
    pack: OpenPack, buffers: Sequence[Buffer], offset: int, size: int, flags: int = 0
) -> None:
    """Fill buffers from a pack; ColdError, or DamagedArtifactError if the file is too short."""
    global _NO_WAIT  # noqa: PLW0603 - a filesystem without it: waiting is all there is
    try:
        count = os.preadv(pack.fd, buffers, offset, flags)  # type: ignore[arg-type]  # arrays too
    except BlockingIOError:
        raise ColdError from None
    except OSError as error:
        if flags and error.errno in _UNSUPPORTED:
            _NO_WAIT = 0
            raise ColdError from None
        raise DamagedArtifactError(f"Pack {pack.number} cannot be read: {error}") from error
    if count != size:
        if flags:
            raise ColdError
        if count <= 0 or pack.size < offset + size:
            raise DamagedArtifactError(f"Pack {pack.number} ends before the artifact does")
        _read_rest(pack, buffers, offset, count)


def _read_rest(pack: OpenPack, buffers: Sequence[Buffer], offset: int, done: int) -> None:
    """Read what one call did not give: more than 2 GiB, or an interrupted one."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # arrays too
        skipped = min(done, len(view))
        view, done, offset = view[skipped:], done - skipped, offset + skipped
        while len(view):
            count = os.preadv(pack.fd, [view], offset)
            if count <= 0:
                raise DamagedArtifactError(f"Pack {pack.number} ends before the artifact does")
            view, offset = view[count:], offset + count


def read_verified(packs: Packs, found: Located, targets: Sequence[Target]) -> memoryview:
    """Read and verify everything of an artifact; that it was verified is remembered."""
    specs = found.layout.tensors
    heads = [bytearray(HEADER_BYTES) for _ in specs]
    record = memoryview(bytearray(HEADER_BYTES + found.length))
    number, offset = place(found.place)
    pack = packs[number]
    span = found.span()
    if span is not None and len(specs) < 300:  # noqa: PLR2004 - one preadv takes 1024 pieces
        buffers: list[Buffer] = []
        for head, spec, target in zip(heads, specs, targets, strict=True):
            buffers += (head, target)
            if spec.nbytes % HEADER_BYTES:
                buffers.append(bytearray(-spec.nbytes % HEADER_BYTES))
        _read(pack, [*buffers, record], span[1], span[2])
    else:
        _read(pack, [record], offset, len(record))
        for head, spec, target, where in zip(heads, specs, targets, found.places, strict=True):
            other, start = place(where)
            _read(packs[other], [head, target], start, HEADER_BYTES + spec.nbytes)
    payload = _verified_record(found, pack, record)
    for index, (head, target) in enumerate(zip(heads, targets, strict=True)):
        _verify_chunk(packs, found, index, head, target)
    found.is_verified = True
    return memoryview(payload.inline)


def _verified_record(found: Located, pack: OpenPack, record: memoryview) -> ArtifactPayload:
    """Return what the record of an artifact says, if it is the one that was put."""
    head = parse_header(record[:HEADER_BYTES], pack.nonce, found.place)
    body = record[HEADER_BYTES:]
    if head is None or (head.kind, head.length, head.seq) != (ARTIFACT, found.length, found.seq):
        raise DamagedArtifactError("Its record is not where it was written")
    if checksum(body) != head.payload_hash:
        raise DamagedArtifactError("The checksum of its record is wrong", is_proven=True)
    payload = ArtifactPayload.parse(body)
    if (payload.key, payload.layout, payload.uids) != (found.key, found.digest, found.uids):
        raise DamagedArtifactError("Its record and the index disagree")
    return payload


def _verify_chunk(
    packs: Packs, found: Located, index: int, head: bytearray, target: Target
) -> None:
    where = found.places[index]
    read = parse_header(bytes(head), packs[where >> 40].nonce, where)
    wanted = (CHUNK, found.layout.tensors[index].nbytes, found.uids[index])
    if read is None or (read.kind, read.length, read.uid) != wanted:
        raise DamagedArtifactError("A tensor of it is not where it was written")
    if checksum(target) != read.payload_hash:
        raise DamagedArtifactError("The checksum of a tensor of it is wrong", is_proven=True)


def check_room(packs: Packs, found: Located) -> None:
    """Refuse, before any memory is taken, what is larger than the packs it should lie in."""
    if not found.is_verified:
        for number, offset, length in found.ranges():
            if packs[number].size < offset + length:
                raise DamagedArtifactError(f"Pack {number} ends before the artifact does")


def announce(packs: Packs, some: Iterable[Located]) -> None:
    """Tell the kernel what will be read."""
    for found in some:
        for number, offset, length in found.ranges():
            with suppress(OSError, SetFormatError):
                packs[number].announce(offset, length)


def read_whole(packs: Packs, found: Located) -> object:
    """Return the whole value of an artifact, in memory of its own."""
    check_room(packs, found)
    made, targets = new_tensors(found)
    inline = fetch(packs, found, targets)
    return found.layout.decode(inline, made.__getitem__)


def new_tensors(found: Located) -> tuple[list[object], list[Target]]:
    """Return memory for the tensors of an artifact, and the bytes of it."""
    import numpy as np

    made = [spec.new() for spec in found.layout.tensors]
    return [each for each, _ in made], [np.frombuffer(data, np.uint8) for _, data in made]


def read_record(packs: Packs, found: Located) -> ArtifactPayload:
    """Return the record of an artifact without its tensors, verified."""
    pack = packs[found.place >> 40]
    offset = place(found.place)[1]
    if pack.size < offset + HEADER_BYTES + found.length:
        raise DamagedArtifactError(f"Pack {pack.number} ends before the artifact does")
    record = memoryview(bytearray(HEADER_BYTES + found.length))
    _read(pack, [record], offset, len(record))
    return _verified_record(found, pack, record)


def read_tensor(packs: Packs, found: Located, slot: int) -> object:
    """Return one tensor of an artifact; the first time all of it is read, and verified."""
    import numpy as np

    check_room(packs, found)
    if not found.is_verified:
        made, targets = new_tensors(found)
        fetch(packs, found, targets)
        return made[slot]
    tensor, memory = found.layout.tensors[slot].new()
    number, offset = place(found.places[slot])
    target = np.frombuffer(memory, np.uint8)
    _read(packs[number], [target], offset + HEADER_BYTES, len(target))
    return tensor


def read_through(packs: Packs, found: Located) -> None:
    """Read and verify all of an artifact; no library is needed for that, whatever it holds."""
    import numpy as np

    check_room(packs, found)
    fetch(packs, found, [np.empty(spec.nbytes, np.uint8) for spec in found.layout.tensors])


def persistently(engine: SetEngine, found: Located, read: Callable[[Located], _T]) -> _T:
    """Read an artifact, also if compaction moves it meanwhile; damage is told, and is a miss."""
    for _ in range(_TRIES):
        try:
            return read(found)
        except (FileNotFoundError, SetFormatError) as error:
            again = engine.look_again(found)
            if again is None:
                message = f"{engine.folder.name} has no artifact {key_text(found.key)} any more"
                raise ArtifactNotFoundError(message, keys=(key_text(found.key),)) from None
            if again.ranges() == found.ranges():
                raise damaged(engine, found, error) from error
            found = again
        except (DamagedArtifactError, LayoutError) as error:
            raise damaged(engine, found, error) from error
    raise damaged(engine, found, None)


def _is_still_damaged(packs: Packs, found: Located) -> bool:
    """Read an artifact once more, into memory that nobody else writes to at the same time."""
    again = copy(found)
    again.is_verified, again.quick = False, None
    try:
        read_through(packs, again)
    except DamagedArtifactError as error:
        return bool(getattr(error, "is_proven", False))
    except (OSError, SetFormatError, LayoutError):
        pass
    return False


def damaged(engine: SetEngine, found: Located, error: Exception | None) -> DamagedArtifactError:
    """Delete an artifact that is proven to be damaged; return the error that says so."""
    key = key_text(found.key)
    reason = "it cannot be found in its packs" if error is None else str(error)
    message = f"Artifact {key} of {engine.folder.name} is damaged: {reason}"
    if found.seq not in engine.damage:
        engine.damage.add(found.seq)
        _log.warning("%s", message)
    engine.memory.forget(found.key)
    # Only where its own header speaks against its bytes. A pack that is not there, a disk that
    # does not answer, an index that is wrong: that may be over the next time.
    if getattr(error, "is_proven", False) and _is_still_damaged(engine.packs, found):
        with suppress(SmartcacheError, OSError):
            engine.flush()
            writing.delete_exactly(engine, found.key, found.seq)
            engine.flush()
    return DamagedArtifactError(message, key=key)
