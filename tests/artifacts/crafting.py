"""Packs that nobody wrote: every checksum in them is right, whatever they say."""

from __future__ import annotations

import os
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest as checksum
from xxhash import xxh3_128_intdigest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.values.encode import encode
from smartcache.errors import SmartcacheError
from tests.artifacts.opening import engine_of, open_set
from tests.artifacts.packreader import ARTIFACT, END, FOOTER, LAYOUT
from tests.processes.children import Child

T = TypeVar("T")
NONCE = 0x1234_5678_9ABC_DEF0
SPARE = 192 << 20
"""Bytes that reading may take: what it needs, and nothing that a file merely says."""
_MOST = (1 << 64) - 1


class Row(NamedTuple):
    """What a footer says of a record."""

    hash: int
    twin: int
    seq: int
    offset: int
    size: int
    meta: int
    layout: int
    expires: int
    kind: int
    key: bytes
    pointers: tuple[tuple[int, int], ...] = ()


class Crafted:
    """A pack in the making; what is given is written, whatever it is."""

    def __init__(self, set_id: bytes, nonce: int = NONCE, instance: bytes = bytes(8)) -> None:
        self.nonce = nonce
        self.seed = int.from_bytes(set_id[:8], "little")
        text = struct.pack("<8sQq16s8s8s", b"SMCPACK2", nonce, 0, set_id, instance, b"the boot")
        self.data = bytearray(text + struct.pack("<Q", checksum(text)))
        self.rows: list[Row] = []
        self.layouts: dict[int, bytes] = {}

    @property
    def end(self) -> int:
        return len(self.data)

    def hashes(self, key: bytes) -> tuple[int, int]:
        both = xxh3_128_intdigest(key, self.seed)
        return both & _MOST, both >> 64

    def add(
        self,
        kind: int,
        *,
        key: bytes = b"",
        parts: bytes = b"",
        inline: bytes = b"",
        about: bytes = b"",
        behind: bytes = b"",
        **said: int,
    ) -> int:
        """Add a record; return where it is. `said` replaces fields of its header."""
        start = self.end
        body = parts + key + inline + about
        meta = 72 + len(body) + 63 & ~63
        if kind == END:
            meta = 64
        fields = {
            "kind": kind, "flags": 0, "key": len(key), "parts": len(parts) // 40,
            "inline": len(inline), "metadata": len(about), "layout": 0, "expires": 0, "created": 1,
            "size": meta + len(behind), "seq": 1, "hash": self.hashes(key)[0], **said,
        }  # fmt: skip
        text = struct.pack("<4sBBHIIIIIIQQQ", b"SCr2", *fields.values())
        self.data += text + struct.pack("<Q", checksum(text, self.nonce + start & _MOST))
        if kind != END:
            self.data += struct.pack("<Q", checksum(body)) + body
        self.data += bytes(-len(self.data) % 64) + behind + bytes(-len(behind) % 64)
        if kind in (1, 2, 3, 4):
            self.rows.append(Row(
                *self.hashes(key), fields["seq"], start, fields["size"] >> 6, meta >> 6,
                fields["layout"], fields["expires"], kind, key,
            ))  # fmt: skip
        return start

    def layout(self, body: bytes) -> int:
        start = self.add(LAYOUT, inline=body)
        self.layouts[start] = body
        return start

    def artifact(
        self,
        key: bytes,
        value: object,
        *,
        layout: bytes | None = None,
        parts: Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]] = lambda parts: parts,
        about: bytes = b"",
        **said: int,
    ) -> int:
        """Add an artifact with its layout, as it would be written or otherwise."""
        body, inline, tensors = encode(value)
        at = self.layout(body if layout is None else layout)
        behind = b""
        found: list[tuple[int, ...]] = []
        meta = 72 + 40 * len(tensors) + len(key) + len(inline) + len(about) + 63 & ~63
        for tensor in tensors:
            size = len(tensor)
            found.append((meta + len(behind), size, 0, size, checksum(tensor)))
            behind += bytes(tensor) + bytes(-size % 64)
        table = b"".join(
            struct.pack("<QQQQQ", *(number & _MOST for number in part)) for part in parts(found)
        )
        return self.add(
            ARTIFACT, key=key, parts=table, inline=inline, about=about, behind=behind,
            **{"layout": at >> 6, **said},
        )  # fmt: skip

    def footer(self, rows: list[Row] | None = None, **said: Any) -> int:  # noqa: ANN401
        """Add a footer; `said` replaces its numbers, or a whole column."""
        chosen = sorted(self.rows) if rows is None else rows
        pointers = [(n, t, s) for n, row in enumerate(chosen) for t, s in row.pointers]
        numbers = {
            "start": 64, "before": 0, "most": max((row.seq for row in chosen), default=0),
            "count": len(chosen), "pointers": len(pointers), "layouts": len(self.layouts),
        }  # fmt: skip
        numbers |= {name: value for name, value in said.items() if name in numbers}
        ends = [0]
        for row in chosen:
            ends.append(ends[-1] + len(row.key))
        data = struct.pack("<6Q", *numbers.values())
        bodies = list(self.layouts.items())
        data += struct.pack(f"<{len(bodies)}Q", *(at for at, _ in bodies))
        data += struct.pack(f"<{len(bodies)}Q", *(len(body) for _, body in bodies))
        for number, letter in enumerate("QQQQIIIIB"):
            column = [row[number] for row in chosen]
            data += struct.pack(f"<{len(chosen)}{letter}", *column)
        data += struct.pack(f"<{len(chosen)}I", *said.get("ends", ends[1:]))
        for number, letter in enumerate("IQQ"):
            data += struct.pack(f"<{len(pointers)}{letter}", *(each[number] for each in pointers))
        data += b"".join(body for _, body in bodies) + b"".join(row.key for row in chosen)
        return self.add(FOOTER, inline=data[: said.get("length", len(data))])

    def seal(self, footer: int) -> Crafted:
        """End the pack; `footer` is where its `end` says that the footer is."""
        self.add(END, hash=footer, flags=1, seq=0)
        return self


def new_set(root: Path) -> tuple[ArtifactSets, bytes, bytes]:
    """Return sets with an empty one, and the numbers of that: of the set, and of its folder."""
    sets = ArtifactSets(root)
    with open_set(sets) as opened:
        folder = engine_of(opened).folder
        return sets, bytes.fromhex(folder.id), bytes.fromhex(folder.instance)


def with_packs(sets: ArtifactSets, *packs: Crafted) -> ArtifactSets:
    """Let the set have these packs, and nothing else."""
    (path,) = sets.folders()
    for file in (*path.glob("*.pack"), *path.glob("index.sqlite3*")):
        file.unlink()
    for pack in packs:
        (path / f"{pack.nonce:016x}.pack").write_bytes(pack.data)
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
