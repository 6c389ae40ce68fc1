"""Packs, indexes and set files made by somebody hostile, with right checksums.

Whatever they say, there is an error of ours, a miss or a value; no memory is taken for what is not
there, nothing is loaded or run, and nothing outside of the set is touched.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("resource limits", allow_module_level=True)

from tests.api import (
    ARTIFACT,
    CHUNK,
    DELETE,
    LAYOUT,
    PIN,
    ArtifactSets,
    Fingerprint,
    PackHeader,
    SetFolder,
    SmartcacheError,
    layout_digest,
)
from tests.api import codec_encode as encode
from tests.artifacts.crafting import (
    KINDS,
    Crafted,
    Record,
    contained,
    read_all,
    records_of,
    set_with,
)
from tests.artifacts.opening import array, open_set

KEY = b"\x02key"
VALUE = {"t": array(1, 3000), "n": 5}
OTHER = {"t": array(2, 3000), "n": 6}


@pytest.fixture(autouse=True)
def _everything_is_loaded(tmp_path: Path) -> None:
    """What is loaded on first use is loaded before anything is forbidden."""
    with open_set(ArtifactSets(tmp_path / "warm")) as opened:
        opened.put("k", VALUE)
        opened.put("l", VALUE)
        opened.delete("l")
        read_all(opened)


def read_set(sets: ArtifactSets) -> dict[str, object]:
    """Open a crafted set (which reads its packs) and read all of it, contained."""

    def work() -> dict[str, object]:
        try:
            opened = open_set(sets)
        except SmartcacheError:
            return {}
        with opened:
            found = read_all(opened)
        return {key: value for key, value in found.items() if value is not None}

    return contained(work)


def is_value(found: object, value: dict[str, Any]) -> bool:
    return isinstance(found, dict) and np.array_equal(found["t"], value["t"])


# what is crafted is read, where it is right


def test_a_crafted_pack_that_is_right_is_read(tmp_path: Path) -> None:
    """Else the tests below would pass for the wrong reason."""
    pack = Crafted()
    pack.artifact(KEY, VALUE)
    assert is_value(read_set(set_with(tmp_path / "sets", pack))["key"], VALUE)


# headers

HEADERS: dict[str, Callable[[Crafted], Record]] = {
    "huge length": lambda _: Record(ARTIFACT, b"x", seq=2, length=1 << 45),
    "huge chunk": lambda p: Record(CHUNK, b"x", uid=p.next, length=1 << 46),
    "huge layout": lambda _: Record(LAYOUT, b"x", length=(1 << 32) - 1),
    "huge deletion": lambda _: Record(DELETE, b"x", seq=2, length=1 << 40),
    "length beyond all": lambda _: Record(ARTIFACT, b"x", seq=2, length=(1 << 64) - 1),
    "unknown kind": lambda _: Record(77, b"x" * 100, seq=2),
    "another position": lambda p: Record(DELETE, KEY, seq=2, key=KEY, where=p.next + 5),
    "sequence beyond the index": lambda _: Record(DELETE, KEY, seq=(1 << 64) - 1, key=KEY),
    "sequence that leaves no room": lambda _: Record(DELETE, b"\x02x", seq=(1 << 63) - 1),
    "uid beyond the index": lambda _: Record(CHUNK, b"x" * 3000, uid=(1 << 64) - 1),
    "empty artifact": lambda _: Record(ARTIFACT, b"", seq=2),
    "empty deletion": lambda _: Record(DELETE, b"", seq=2),
    "empty pin": lambda _: Record(PIN, b"", seq=2),
    "long deletion": lambda _: Record(DELETE, b"\x02" + b"k" * 5000, seq=2),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_hostile_header_takes_nothing_along(tmp_path: Path, kind: str) -> None:
    pack = Crafted()
    pack.artifact(KEY, VALUE)
    pack.add(HEADERS[kind](pack))
    found = read_set(set_with(tmp_path / "sets", pack))
    assert is_value(found["key"], VALUE)


def test_huge_records_of_a_sparse_pack_take_no_memory(tmp_path: Path) -> None:
    """A file may well have the length that a record says, without a byte on the disk."""
    from xxhash import xxh3_64

    length = 300 << 20
    state = xxh3_64()
    for _ in range(length >> 20):
        state.update(bytes(1 << 20))
    for kind in (LAYOUT, DELETE, ARTIFACT):
        crafted = Crafted()
        crafted.artifact(KEY, VALUE)
        crafted.add(Record(kind, b"", seq=2, length=length, value=state.intdigest()))
        sets = set_with(tmp_path / f"sets {kind}", crafted)
        (file,) = sets.folders()[0].glob("*.pack")
        os.truncate(file, file.stat().st_size + length)
        assert is_value(read_set(sets)["key"], VALUE)


# artifacts


def deep(depth: int) -> bytes:
    return encode(1).layout[:1] + b"[\x01\0\0\0" * depth + b"i"


def tensor_layout(dtype: str, *shape: int) -> bytes:
    spec = b"tn" + bytes([len(dtype)]) + dtype.encode() + bytes([len(shape)])
    return encode(1).layout[:1] + spec + struct.pack(f"<{len(shape)}Q", *shape)


ARTIFACTS: dict[str, Callable[[Crafted], object]] = {
    "own record as chunk": lambda p: p.artifact(KEY, VALUE, uids=(p.next + 48 + 4,)),
    "layout as chunk": lambda p: p.artifact(KEY, VALUE, uids=(p.next,)),
    "into the middle of a chunk": lambda p: p.artifact(KEY, VALUE, uids=(p.next + 20,)),
    "another pack as chunk": lambda p: p.artifact(KEY, VALUE, uids=(99 << 40,)),
    "largest uid": lambda p: p.artifact(KEY, VALUE, uids=((1 << 63) - 1,)),
    "uid beyond the index": lambda p: p.artifact(KEY, VALUE, uids=((1 << 64) - 1,)),
    "the header as chunk": lambda p: p.artifact(KEY, VALUE, uids=(1 << 40,)),
    "no chunk": lambda p: p.artifact(KEY, VALUE, uids=()),
    "many chunks": lambda p: p.artifact(KEY, VALUE, uids=tuple([1 << 40] * 5000)),
    "unknown tag": lambda p: p.artifact(KEY, VALUE, layout=encode(1).layout[:1] + b"\xee"),
    "empty layout": lambda p: p.artifact(KEY, VALUE, layout=b""),
    "another version": lambda p: p.artifact(KEY, VALUE, layout=b"\x09i"),
    "deep layout": lambda p: p.artifact(KEY, 1, layout=deep(100_000)),
    "larger tensor": lambda p: p.artifact(KEY, VALUE, layout=tensor_layout("|u1", 4000)),
    "huge tensor": lambda p: p.artifact(KEY, VALUE, layout=tensor_layout("|u1", 1 << 44)),
    "endless tensor": lambda p: p.artifact(KEY, VALUE, layout=tensor_layout("<f8", *[1 << 62] * 9)),
    "unknown dtype": lambda p: p.artifact(KEY, VALUE, layout=tensor_layout("object", 10)),
    "unknown codec": lambda p: p.artifact(KEY, 1, layout=b"\x01C\x09\0\0\0os.system-"),
    "hostile metadata": lambda p: p.artifact(KEY, VALUE, metadata=b"\xff" * 100),
    "deep metadata": lambda p: p.artifact(
        KEY, VALUE, metadata=struct.pack("<I", len(deep(5000))) + deep(5000)
    ),
    "metadata with a tensor": lambda p: p.artifact(
        KEY, VALUE, metadata=struct.pack("<I", 15) + tensor_layout("|u1", 4000)
    ),
    "expired before all time": lambda p: p.artifact(KEY, VALUE, expires_at=-(1 << 62)),
    "expires after all time": lambda p: p.artifact(KEY, VALUE, expires_at=(1 << 63) - 1),
    "made after all time": lambda p: p.artifact(KEY, VALUE, created_at=(1 << 63) - 1),
    "made before all time": lambda p: p.artifact(KEY, VALUE, created_at=-(1 << 63)),
}


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_a_hostile_artifact_takes_nothing_along(tmp_path: Path, kind: str) -> None:
    pack = Crafted()
    pack.artifact(b"\x02other", OTHER)
    ARTIFACTS[kind](pack)
    found = read_set(set_with(tmp_path / "sets", pack))
    assert is_value(found["other"], OTHER)
    if "key" in found:
        assert is_value(found["key"], VALUE) or found["key"] is None


KEYS = (
    b"", b"\x01", b"\x01short", b"\x02", b"\x03abc", b"\x02\xff\xfe", b"\x02" + b"k" * 5000,
    b"\x01" + b"x" * 33, b"x" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("stored", KEYS, ids=lambda stored: repr(stored[:8]))
def test_keys_that_are_no_keys_are_left_out(tmp_path: Path, stored: bytes) -> None:
    pack = Crafted()
    pack.artifact(KEY, VALUE)
    pack.add(Record(DELETE, stored, seq=2, key=stored))
    pack.artifact(stored, OTHER, seq=3)  # newer than its deletion: it would be there
    pack.add(Record(PIN, b"\1" + stored, seq=4, key=stored))
    sets = set_with(tmp_path / "sets", pack)
    assert set(read_set(sets)) == {"key"}
    with open_set(sets) as opened:
        assert set(opened) == {"key", "a new one"}
        assert len(opened) == 2, "nor are they counted"


@pytest.mark.parametrize("name", ["../../../escaped", "/etc/escaped", "a\0b", "..", "%2e", "a/b"])
def test_keys_like_paths_lead_nowhere(tmp_path: Path, name: str) -> None:
    pack = Crafted()
    pack.artifact(b"\x02" + name.encode(), VALUE)
    sets = set_with(tmp_path / "sets", pack)
    before = {path for path in tmp_path.rglob("*") if "sets" not in path.parts}
    assert is_value(read_set(sets)[name], VALUE)
    with open_set(sets) as opened:
        assert opened.get_or_compute(f"{name}x", lambda: 1) == 1
    assert before == {path for path in tmp_path.rglob("*") if "sets" not in path.parts}


@pytest.mark.parametrize("same_pack", [True, False])
def test_one_of_two_artifacts_with_one_key_and_number_is_taken(
    tmp_path: Path, same_pack: bool
) -> None:
    first = Crafted()
    second = first if same_pack else Crafted(2)
    first.artifact(KEY, VALUE, seq=7)
    second.artifact(KEY, OTHER, seq=7)
    packs = [first] if same_pack else [first, second]
    found = read_set(set_with(tmp_path / "sets", *packs))["key"]
    assert is_value(found, VALUE) or is_value(found, OTHER)


def test_a_tensor_that_holds_a_pack_is_never_taken_for_its_records(tmp_path: Path) -> None:
    """Neither when the record that holds it is damaged, so that nobody knows where it ends."""
    sets = ArtifactSets(tmp_path / "sets")
    with open_set(sets) as opened:
        opened.put("deleted", VALUE)
        opened.put("replaced", VALUE)
        opened.flush()
        (pack,) = opened.path.glob("*.pack")
        inside = np.frombuffer(pack.read_bytes(), np.uint8).copy()
        opened.delete("deleted")
        opened.put("replaced", OTHER)
        for shift in range(0, 128, 64):
            opened.put(
                f"holder {shift}", {"t": np.concatenate([np.zeros(shift, np.uint8), inside])}
            )
        info = opened.describe()
    data = pack.read_bytes()
    start = data.index(inside.tobytes(), len(inside)) - 64
    for at in (start, start + 8, start + 60):
        damaged = bytearray(data)
        damaged[at : at + 4] = b"\xff\0\xff\0"
        pack.write_bytes(damaged)
        sets.rebuild(info)
        with open_set(sets) as opened:
            assert "deleted" not in opened
            assert is_value(opened.get("replaced"), OTHER)


# files that are no packs


def strange_files(path: Path, set_id: bytes) -> None:
    elsewhere = path.parent / "elsewhere"
    pack = Crafted(2)
    pack.artifact(b"\x02linked", VALUE)
    elsewhere.write_bytes(pack.to_bytes(set_id))
    (path / "00000002.pack").symlink_to(elsewhere)
    os.mkfifo(path / "00000003.pack")
    (path / "00000004.pack").mkdir()
    (path / "00000005.pack").write_bytes(PackHeader(6, 1, set_id).to_bytes())
    (path / "00000007.pack").write_bytes(PackHeader(7, 1, bytes(16)).to_bytes())
    (path / "00000008.pack").write_bytes(b"")
    (path / "00000009.pack").write_bytes(b"x" * 1000)
    (path / "00000010.pack").symlink_to("/nowhere")
    (path / "00000011.pack").symlink_to("/dev/zero")
    (path / "99999999.pack").write_bytes(b"x" * 1000)
    (path / "1.pack").write_bytes(b"x" * 1000)
    (path / "-0000001.pack").write_bytes(b"x" * 1000)
    (path / "²0000001.pack").write_bytes(b"x" * 1000)


@pytest.mark.timeout(60)
def test_what_is_no_pack_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    pack = Crafted()
    pack.artifact(KEY, VALUE)
    sets = set_with(tmp_path / "sets", pack)
    (path,) = sets.folders()
    strange_files(path, bytes.fromhex(path.name))
    found = read_set(sets)
    assert is_value(found["key"], VALUE)
    assert "linked" not in found
    with open_set(sets) as opened:
        assert not opened.verify().damaged
    for info in sets.infos():
        sets.rebuild(info)
    assert is_value(read_set(sets)["key"], VALUE)


# set.json

DOCUMENTS: dict[str, object] = {
    "nothing": None,
    "a list": [],
    "a text": "set",
    "empty": {},
    "newer": {"format": 2},
    "huge format": {"format": 1e400},
    "path as name": {"name": "../../escaped"},
    "no name": {"name": None},
    "another name": {"name": "other"},
    "another id": {"id": "0" * 32},
    "path as id": {"id": "../../escaped"},
    "hostile fingerprint": {"fingerprint": {"dict": [[{"dict": []}, 1]]}},
    "deep fingerprint": {"fingerprint": "[" * 100_000},
    "code as fingerprint": {"fingerprint": {"__import__": "os"}},
    "text as size": {"options": {"max_size": "9" * 1000}},
    "negative size": {"options": {"max_size": -1}},
    "no number": {"options": {"max_size": float("nan"), "ttl": float("inf")}},
    "endless ttl": {"options": {"ttl": 1e300}},
    "list of options": {"options": []},
    "unknown options": {"options": {"__class__": "x", "evictable": "yes"}},
    "no date": {"created_at": 5},
    "another date": {"created_at": "9999999-01-01"},
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_hostile_set_file_is_named_or_does_no_harm(tmp_path: Path, kind: str) -> None:
    sets = ArtifactSets(tmp_path / "sets")
    with open_set(sets) as opened:
        opened.put("k", 1)
        path = opened.path
    good = json.loads((path / "set.json").read_text())
    hostile = DOCUMENTS[kind]
    document = {**good, **hostile} if isinstance(hostile, dict) and hostile else hostile
    (path / "set.json").write_text(json.dumps(document))

    def work() -> None:
        for info in ArtifactSets(tmp_path / "sets").infos():
            assert info.path == path
        with suppress(SmartcacheError), open_set(ArtifactSets(tmp_path / "sets")) as opened:
            opened.put("l", 2)
            assert opened.get("l") == 2
        with suppress(SmartcacheError):
            SetFolder.read(path)

    before = sorted(file.name for file in tmp_path.iterdir())
    contained(work)
    assert before == sorted(file.name for file in tmp_path.iterdir())


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"format": 1}' * 2])
def test_a_set_file_that_is_no_document_is_named(tmp_path: Path, text: bytes) -> None:
    with open_set(ArtifactSets(tmp_path / "sets")) as opened:
        path = opened.path
    (path / "set.json").write_bytes(text)
    with pytest.raises(SmartcacheError):
        open_set(ArtifactSets(tmp_path / "sets"))
    (info,) = ArtifactSets(tmp_path / "sets").infos()
    assert info.problem
    assert Fingerprint.of({}).id("latents") != info.id


# anything


def mutated(record: Record, chance: random.Random, others: list[Record]) -> Record:
    numbers = (0, 1, 63, 64, 1 << 31, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1)
    changes: list[dict[str, Any]] = [
        {"kind": chance.choice((*KINDS, 0, 6, 255))},
        {"length": chance.choice(numbers)},
        {"uid": chance.choice((*numbers, chance.choice(others).uid))},
        {"seq": chance.choice((*numbers, chance.choice(others).seq))},
        {"payload": chance.choice(others).payload},
        {"payload": record.payload[: chance.randrange(len(record.payload) + 1)]},
    ]
    if chance.random() < 0.7:
        return record._replace(**chance.choice(changes))
    payload = bytearray(record.payload)
    for _ in range(chance.randrange(1, 4)):
        if payload:
            at = chance.randrange(min(len(payload), 200))
            if chance.random() < 0.5:
                payload[at] = chance.randrange(256)
            else:
                size = chance.choice((4, 8))
                number = chance.choice(numbers) & (1 << 8 * size) - 1
                payload[at : at + size] = number.to_bytes(size, "little")
    return record._replace(payload=bytes(payload))


def test_mutated_records_with_right_checksums(tmp_path: Path, soak: bool) -> None:
    with open_set(ArtifactSets(tmp_path / "template")) as opened:
        for number in range(6):
            value = {"t": array(number % 3, 2000), "list": [number, "x"], "d": {1: (2.5, None)}}
            opened.put(f"k{number % 4}", value, metadata={"n": number})
        opened.pin("k1")
        opened.delete("k2")
        opened.flush()
        (pack,) = opened.path.glob("*.pack")
        records = records_of(pack)
    assert {record.kind for record in records} == set(KINDS)

    def work() -> None:
        for number in range(3000 if soak else 60):
            chance = random.Random(number)
            crafted = Crafted()
            for record in records:
                is_hit = chance.random() < 0.25
                crafted.add(mutated(record, chance, records) if is_hit else record)
            sets = set_with(tmp_path / "sets", crafted)
            try:
                with suppress(SmartcacheError), open_set(sets) as opened:
                    read_all(opened)
            except Exception as error:
                error.add_note(f"case {number}")
                raise

    contained(work)


def test_mutated_rows(tmp_path: Path, soak: bool) -> None:
    """Whatever is in the index, in whatever column, of whatever type."""
    template = tmp_path / "sets"
    with open_set(ArtifactSets(template)) as opened:
        for number in range(6):
            opened.put(f"k{number % 4}", {"t": array(number % 3, 2000), "n": number})
        opened.delete("k2")
        opened.flush()
        path = opened.path
    index = path / "index.sqlite3"
    whole = {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
    hostile = (
        None, 0, -1, 1, 1 << 40, 1 << 62, -(1 << 63), (1 << 63) - 1, 1.5, float("inf"), "text",
        b"", b"\x00", b"\x02key", b"\xff" * 24, bytes(8), "../../x", layout_digest(b"x"),
    )  # fmt: skip

    def mutate(chance: random.Random) -> str:
        connection = sqlite3.connect(index, isolation_level=None)
        table = chance.choice(("artifacts", "chunks", "packs", "layouts", "deleted", "meta"))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        column, value = chance.choice(columns), chance.choice(hostile)
        with suppress(sqlite3.Error):
            connection.execute(f"UPDATE OR REPLACE {table} SET {column} = ?", (value,))  # noqa: S608
        connection.close()
        return f"{table}.{column} = {value!r}"

    def work() -> None:
        for number in range(4000 if soak else 60):
            for file in path.iterdir():
                if file.is_file() and file not in whole:
                    file.unlink()
            for file, data in whole.items():
                file.write_bytes(data)
            what = mutate(random.Random(number))
            try:
                with suppress(SmartcacheError), open_set(ArtifactSets(template)) as opened:
                    read_all(opened)
                for info in ArtifactSets(template).infos():
                    ArtifactSets(template).rebuild(info)
                with open_set(ArtifactSets(template)) as opened:
                    read_all(opened)
            except Exception as error:
                error.add_note(f"case {number}: {what}")
                raise

    contained(work)
