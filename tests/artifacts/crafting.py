"""Packs that nobody wrote: every checksum in them is right, whatever they say."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.api import (
    ARTIFACT,
    CHUNK,
    DELETE,
    LAYOUT,
    PIN,
    ArtifactPayload,
    ArtifactSet,
    ArtifactSets,
    Header,
    PackHeader,
    SmartcacheError,
    header,
    key_hash,
    layout_digest,
    padding,
    parse_header,
    position,
    room,
)
from tests.api import codec_encode as encode
from tests.api import records_checksum as checksum
from tests.artifacts.opening import open_set
from tests.processes.children import Child

T = TypeVar("T")
NONCE = 0x1234_5678_9ABC_DEF0
SPARE = 192 << 20
"""Bytes that reading may take: what it needs, and nothing that a file merely says."""
KINDS = (CHUNK, ARTIFACT, DELETE, LAYOUT, PIN)


class Record(NamedTuple):
    """A record as it will be written; None: what it has to be."""

    kind: int
    payload: bytes
    uid: int = 0
    seq: int = 0
    key: bytes = b""
    length: int | None = None
    where: int | None = None
    value: int | None = None


class Crafted:
    """A pack in the making."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.records: list[Record] = []
        self.size = 64

    @property
    def next(self) -> int:
        """The position of the next record."""
        return position(self.number, self.size)

    def add(self, record: Record) -> int:
        """Add a record; return its position."""
        where = self.next
        self.records.append(record)
        self.size += room(len(record.payload))
        return where

    def artifact(
        self,
        key: bytes,
        value: object,
        *,
        seq: int = 1,
        uids: tuple[int, ...] | None = None,
        layout: bytes | None = None,
        metadata: bytes = b"",
        expires_at: int = 0,
        created_at: int = 1,
    ) -> int:
        """Add an artifact with its layout and chunks, as it would be written or otherwise."""
        encoded = encode(value)
        body = encoded.layout if layout is None else layout
        self.add(Record(LAYOUT, body))
        found = tuple(
            self.add(Record(CHUNK, bytes(tensor), uid=self.next)) for tensor in encoded.tensors
        )
        payload = artifact_payload(
            ArtifactPayload(
                key, layout_digest(body), created_at, expires_at,
                found if uids is None else uids, encoded.inline, metadata,
            )
        )  # fmt: skip
        return self.add(Record(ARTIFACT, payload, seq=seq, key=key))

    def to_bytes(self, set_id: bytes) -> bytes:
        """Return the file."""
        pieces = [PackHeader(self.number, NONCE, set_id).to_bytes()]
        offset = 64
        for each in self.records:
            fields = Header(
                each.kind, len(each.payload) if each.length is None else each.length,
                position(self.number, offset) if each.where is None else each.where,
                each.uid, each.seq, key_hash(each.key),
                checksum(each.payload) if each.value is None else each.value,
            )  # fmt: skip
            pieces += (header(NONCE, fields), each.payload, padding(len(each.payload)))
            offset += room(len(each.payload))
        return b"".join(pieces)


def artifact_payload(payload: ArtifactPayload) -> bytes:
    """Return an artifact as it stands in a record; no length in it is checked."""
    import struct

    head = struct.pack(
        "<16sqqIIII", payload.layout, payload.created_at, payload.expires_at, len(payload.key),
        len(payload.uids), len(payload.inline), len(payload.metadata),
    )  # fmt: skip
    uids = struct.pack(f"<{len(payload.uids)}Q", *payload.uids)
    return head + payload.key + uids + bytes(payload.inline) + bytes(payload.metadata)


def records_of(path: Path) -> list[Record]:
    """Return the records of a pack that was written in the ordinary way."""
    data = path.read_bytes()
    head = PackHeader.parse(data[:64])
    found = []
    offset = 64
    while offset < len(data):
        read = parse_header(data[offset : offset + 64], head.nonce, position(head.number, offset))
        assert read is not None
        payload = data[offset + 64 : offset + 64 + read.length]
        found.append(Record(read.kind, payload, read.uid, read.seq))
        offset += room(read.length)
    return found


def set_with(root: Path, *packs: Crafted) -> ArtifactSets:
    """Return a set that has these packs, and no index."""
    sets = ArtifactSets(root)
    with open_set(sets) as opened:
        path, set_id = opened.path, bytes.fromhex(opened.id)
    for file in (*path.glob("*.pack"), *path.glob("index.sqlite3*")):
        file.unlink()
    for pack in packs:
        (path / f"{pack.number:08d}.pack").write_bytes(pack.to_bytes(set_id))
    return sets


def read_all(opened: ArtifactSet) -> dict[str, object]:
    """Read a set in every way there is; only errors of ours may happen."""
    found: dict[str, object] = {}
    keys: list[str] = []
    with suppress(SmartcacheError):
        keys = list(opened)
    for key in keys:
        with suppress(SmartcacheError):
            found[key] = opened.get(key)
        with suppress(SmartcacheError):
            opened.metadata(key)
        with suppress(SmartcacheError):
            opened.get_batch([key])
        with suppress(SmartcacheError):
            sample = opened[key]
            for name in sample:
                assert sample.handle(name).shape is not None
    for way in (opened.stats, opened.describe, opened.verify, lambda: opened.compact(force=True)):
        with suppress(SmartcacheError):
            way()
    with suppress(SmartcacheError):
        opened.put("a new one", {"n": 1})
        assert opened.get("a new one") == {"n": 1}
    return found


def contained(work: Callable[[], T]) -> T:
    """Run something in a process that has little memory, and may not load or start anything."""

    def limited() -> T:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, used + SPARE))
        with nothing_is_executed():
            return work()

    with Child(limited) as child:
        return child.result()


_FORBIDDEN = ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "os.exec")
_watching = [False]


def _watch(event: str, args: tuple[object, ...]) -> None:
    if not _watching[0]:
        return
    if event.startswith(_FORBIDDEN) or (event == "import" and args[1] is not None):
        _watching[0] = False
        raise AssertionError(f"{event} {args[:2]}")


@contextmanager
def nothing_is_executed() -> Iterator[None]:
    """Fail when a module is loaded or code is made or run by name."""
    sys.addaudithook(_watch)
    _watching[0] = True
    try:
        yield
    finally:
        _watching[0] = False
