"""Write artifacts: encode, append one record, and let this process know of it.

What is slow (encoding, checksums) is done before the set's mutex is taken. A tensor whose checksum
this writer has put into the same pack before is compared byte by byte with what the pack holds: a
checksum never decides alone. If it is equal, the record points to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.packs import PackWriter
from smartcache.artifacts.engine.records import (
    ALIGN,
    ARTIFACT,
    BODY_AT,
    DELETE,
    INTAKE,
    MOST_BODY,
    MOST_INLINE,
    MOST_PARTS,
    PART_BYTES,
    PIN,
    UNPIN,
    Entry,
    artifact_meta,
    checksum,
    key_hashes,
    padded,
    padding,
    plain_record,
    small_entry,
)
from smartcache.artifacts.values.compression import Stored, compress
from smartcache.artifacts.values.encode import encode, encode_metadata
from smartcache.errors import UnsupportedValueError

_MORE = 4096
"""More than headers, padding and the key of a record take."""


def put(
    engine: Engine,
    key: bytes,
    value: object,
    *,
    metadata: object = None,
    expires: int = 0,
    durable: bool = False,
) -> None:
    """Keep a value under a key, in place of the one that it had."""
    about = b"" if metadata is None else encode_metadata(metadata)
    put_encoded(engine, key, *encode(value), about, expires=expires, durable=durable)


def put_encoded(  # noqa: C901, PLR0915 - the hot path: one call after the other
    engine: Engine,
    key: bytes,
    layout: bytes,
    inline: bytes,
    tensors: Sequence[memoryview],
    about: bytes,
    *,
    expires: int = 0,
    durable: bool = False,
) -> None:
    """Keep what `encode` and `encode_metadata` have made of a value, or what was read as such."""
    if (
        len(inline) > MOST_INLINE or len(about) > MOST_INLINE or len(tensors) > MOST_PARTS
        or len(layout) > MOST_BODY - ALIGN
    ):  # fmt: skip
        hint = "Put large data as tensors or arrays."
        raise UnsupportedValueError("the value is too large to be kept", hint=hint)
    lengths = [len(tensor) for tensor in tensors]
    stored: Sequence[Stored] = tensors
    flags, methods = 0, [0] * len(tensors)
    rule = engine.folder.options.compression
    if rule != "none":
        inline, flags, stored, methods = compress(rule, layout, inline, tensors)
    sums = [checksum(each) for each in stored]
    sizes = [len(each) for each in stored]
    hash_, twin = key_hashes(key, engine.catalog.seed)
    now = int(engine.catalog.clock())
    meta = padded(BODY_AT + PART_BYTES * len(sums) + len(key) + len(inline) + len(about))
    bound = meta + sum(sizes) + 64 * len(sizes) + len(layout) + _MORE
    with engine.mutex:
        writer = engine.writer_for(bound)
        at_layout = writer.layouts.get(layout)
        if at_layout is None:
            at_layout = engine.write_layout(writer, layout)
        start = writer.end
        offset = meta
        parts: list[int] = []
        pieces: list[Stored] = [b""]
        pointers: list[tuple[int, int]] = []
        new: dict[int, tuple[int, int]] = {}
        known = writer.sums
        for tensor, size, method, length, value_sum in zip(
            stored, sizes, methods, lengths, sums, strict=True
        ):
            if value_sum in known:
                other, there = known[value_sum]
                if there == size and writer.holds(other, tensor):
                    parts += (other - start, size, method, length, value_sum)
                    pointers.append((other, size))
                    continue
            elif value_sum in new and new[value_sum][1] == size:
                other = new[value_sum][0]
                if _is_among(pieces, other - start, meta, tensor):
                    parts += (other - start, size, method, length, value_sum)
                    continue
            parts += (offset, size, method, length, value_sum)
            new[value_sum] = (start + offset, size)
            pieces.append(tensor)
            gap = -size & 63
            if gap:
                pieces.append(padding(size))
            offset += size + gap
        seq = engine.next_seq()
        pieces[0] = artifact_meta(
            writer.nonce, start, parts, key, inline, about, flags=flags, layout=at_layout,
            expires=expires, created=now, size=offset, seq=seq, hash_=hash_,
        )  # fmt: skip
        is_plain = len(new) == len(sums) and not any(methods)
        entry = Entry(
            ARTIFACT, hash_, twin, seq, start, offset, meta, at_layout, expires, is_plain, key,
            tuple(pointers),
        )  # fmt: skip
        writer.write(pieces, offset, (entry,))
        known.update(new)
        engine.written(offset)
        end = writer.end
    if engine.unused_for:
        engine.note_use(hash_)
    if durable:
        engine.sync(writer, end)


def _is_among(
    pieces: list[bytes | memoryview], offset: int, meta: int, tensor: bytes | memoryview
) -> bool:
    """Say whether what is to be written at an offset of this record has these very bytes."""
    at = meta
    for piece in pieces[1:]:
        if at == offset:
            return piece == tensor
        at += len(piece)
    return False


def delete(engine: Engine, keys: Iterable[bytes], *, durable: bool = False) -> int:
    """Delete artifacts; say how many of them there were. What is past its time counts, too."""
    count = 0
    writer = None
    for key in keys:
        with engine.mutex:
            found = engine.catalog.find(key, expired=True)
            if found is None:
                continue
            engine.churn += 8 * found.size
            writer = _note(engine, DELETE, key)
            count += 1
    if durable and writer is not None:
        engine.sync_all()
    return count


def delete_exactly(engine: Engine, key: bytes, seq: int, *, unless_pinned: bool = False) -> bool:
    """Delete an artifact unless its key has another one by now; say whether it was so.

    Also if another process puts one in this moment: the deletion is older than that.
    """
    with engine.mutex:
        engine.writer_for(_MORE)  # first: where this has to wait, others may put something
        found = engine.catalog.find(key, expired=True)
        if found is None or found.seq != seq:
            return False
        if unless_pinned and engine.catalog.is_pinned(key):
            return False
        engine.churn += 8 * found.size
        _note(engine, DELETE, key, seq=seq + 1)
        return True


def pin(engine: Engine, key: bytes, *, is_pinned: bool) -> None:
    """Keep an artifact from being evicted or expiring, or no longer."""
    with engine.mutex:
        engine.need([key])
        _note(engine, PIN if is_pinned else UNPIN, key)


def take_in(engine: Engine, nonce: int, records: int) -> None:
    """Let the records of a pack from another folder count as if they were put now."""
    with engine.mutex:
        writer = engine.writer_for(_MORE)
        engine.skip_seqs(records)
        seq = engine.next_seq()
        record = plain_record(
            writer.nonce, writer.end, INTAKE, seq=seq, hash_=nonce,
            inline=nonce.to_bytes(8, "little"),
        )  # fmt: skip
        entry = small_entry(INTAKE, nonce, 0, seq, writer.end, len(record))
        writer.write([record], len(record), (entry,))
        engine.written(len(record))
        engine.catalog.note_intake(nonce, seq)


def _note(engine: Engine, kind: int, key: bytes, *, seq: int = 0) -> PackWriter:
    """Write down that something happens to an artifact; with the mutex held."""
    hash_, twin = key_hashes(key, engine.catalog.seed)
    writer = engine.writer_for(_MORE)
    # A deletion ends a pin, once for all: so a pin needs nothing but its own records.
    kinds = [kind]
    if kind == DELETE and not seq and engine.catalog.is_pinned(key):
        kinds = [UNPIN, DELETE]
    offset = writer.end
    records: list[bytes] = []
    entries: list[Entry] = []
    for each in kinds:
        number = seq or engine.next_seq()
        record = plain_record(writer.nonce, offset, each, key=key, hash_=hash_, seq=number)
        records.append(record)
        entries.append(small_entry(each, hash_, twin, number, offset, len(record), key))
        offset += len(record)
    size = offset - writer.end
    writer.write(records, size, entries)
    engine.written(size)
    return writer
