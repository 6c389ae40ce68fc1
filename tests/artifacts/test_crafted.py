"""Packs and set files made by somebody hostile, with right checksums.

Whatever they say, there is an error of ours, a miss or a value; no memory is taken for what is not
there, nothing is loaded or run, and nothing outside of the set is touched.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest as checksum

from smartcache.artifacts import ArtifactSets, Fingerprint
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.values.encode import encode
from smartcache.errors import SmartcacheError
from tests.artifacts.crafting import NONCE, Crafted, contained, new_set, read_all, with_packs
from tests.artifacts.opening import array, open_set
from tests.artifacts.packreader import ARTIFACT, DELETE, END, FOOTER, INTAKE, LAYOUT, PIN, SKIP
from tests.store.files import row

KEY = b"\x02key"
VALUE = {"t": array(1, 3000), "n": 5}
OTHER = {"t": array(2, 3000), "n": 6}
MOST = (1 << 64) - 1
Part = tuple[int, ...]


@pytest.fixture(autouse=True)
def _everything_is_loaded(tmp_path: Path) -> None:
    """What is loaded on first use is loaded before anything is forbidden."""
    with open_set(ArtifactSets(tmp_path / "warm")) as opened:
        opened.put("k", VALUE)
        opened.put("l", VALUE)
        opened.delete("l")
        read_all(opened)


class World:
    """A set without packs, and what it takes to craft some."""

    def __init__(self, root: Path) -> None:
        self.sets, self.set_id, self.instance = new_set(root)

    def pack(self, nonce: int = NONCE) -> Crafted:
        return Crafted(self.set_id, nonce, self.instance)

    def read(self, *packs: Crafted) -> dict[str, object]:
        """Open a set of crafted packs and read all of it, contained; every value is one of two."""
        with_packs(self.sets, *packs)
        found = self.read_again()
        for key, value in found.items():
            assert is_value(value, VALUE) or is_value(value, OTHER), key
        return found

    def read_again(self) -> dict[str, object]:
        def work() -> dict[str, object]:
            try:
                opened = open_set(self.sets)
            except SmartcacheError:
                return {}
            with opened:
                found = read_all(opened)
            return {key: value for key, value in found.items() if value is not None}

        return contained(work)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "sets")


def is_value(found: object, value: dict[str, Any]) -> bool:
    return isinstance(found, dict) and np.array_equal(found["t"], value["t"])


def test_a_crafted_pack_that_is_right_is_read(world: World) -> None:
    """Else the tests below would pass for the wrong reason."""
    for is_sealed in (True, False):
        pack = world.pack()
        pack.artifact(KEY, VALUE)
        if is_sealed:
            pack.seal(pack.footer())
        assert is_value(world.read(pack)["key"], VALUE), is_sealed


# records

HEADERS: dict[str, Callable[[Crafted], object]] = {
    "huge size": lambda p: p.add(ARTIFACT, key=KEY, seq=2, size=1 << 45),
    "size beyond all": lambda p: p.add(ARTIFACT, key=KEY, seq=2, size=MOST - 63),
    "size of nothing": lambda p: p.add(ARTIFACT, key=KEY, seq=2, size=0),
    "odd size": lambda p: p.add(DELETE, key=KEY, seq=2, size=129),
    "size less than its body": lambda p: p.add(DELETE, key=b"\x02" + bytes(300), seq=2, size=64),
    "huge inline": lambda p: p.add(LAYOUT, inline=b"x"),
    "many parts": lambda p: p.add(ARTIFACT, key=b"\x02x", seq=2, parts=bytes(40) * 2000),
    "unknown kind": lambda p: p.add(77, key=KEY, seq=2),
    "sequence beyond all": lambda p: p.add(DELETE, key=KEY, seq=MOST),
    "long deletion": lambda p: p.add(DELETE, key=b"\x02" + b"k" * 5000, seq=2),
    "empty deletion": lambda p: p.add(DELETE, seq=2),
    "empty pin": lambda p: p.add(PIN, seq=2),
    "intake of itself": lambda p: p.add(INTAKE, hash=NONCE, seq=5),
    "intake of nothing": lambda p: p.add(INTAKE, hash=7, seq=MOST >> 1),
    "endless skip": lambda p: p.add(SKIP, size=1 << 46),
    "end in the middle": lambda p: p.add(END, hash=MOST, seq=0),
    "end that points to itself": lambda p: p.add(END, hash=p.end, seq=0),
    "end that points to the header": lambda p: p.add(END, hash=1, seq=0),
    "end that points nowhere": lambda p: p.add(END, hash=1 << 63, seq=0),
    "footer of nothing": lambda p: p.seal(p.add(FOOTER)),
    "footer of noise": lambda p: p.seal(p.add(FOOTER, inline=bytes(range(256)) * 4)),
}


def test_a_hostile_record_takes_nothing_along(world: World) -> None:
    for kind, add in HEADERS.items():
        with row(kind):
            pack = world.pack()
            pack.artifact(KEY, VALUE)
            add(pack)
            assert is_value(world.read(pack)["key"], VALUE)


def test_huge_records_of_a_sparse_pack_take_no_memory(world: World) -> None:
    """A file may well have the length that a record says, without a byte on the disk."""
    for kind in (LAYOUT, DELETE, ARTIFACT, FOOTER, PIN):
        pack = world.pack()
        pack.artifact(KEY, VALUE)
        length = 300 << 20
        at = pack.add(kind, key=b"\x02y", seq=2, inline=b"", size=length + 128)
        struct.pack_into("<I", pack.data, at + 12, length)
        text = bytes(pack.data[at : at + 56])
        struct.pack_into("<Q", pack.data, at + 56, checksum(text, NONCE + at & MOST))
        with_packs(world.sets, pack)
        (file,) = world.sets.folders()[0].glob("*.pack")
        os.truncate(file, at + length + 128)
        assert is_value(world.read_again()["key"], VALUE)


def deep(depth: int) -> bytes:
    return encode(1)[0][:1] + b"[\x01\0\0\0" * depth + b"i"


def tensor_layout(dtype: str, *shape: int) -> bytes:
    spec = b"tn" + bytes([len(dtype)]) + dtype.encode() + bytes([len(shape)])
    return encode(1)[0][:1] + spec + struct.pack(f"<{len(shape)}Q", *shape)


def part(**said: int) -> Callable[[list[Part]], list[Part]]:
    """Change fields of the first part."""
    names = ("offset", "stored", "codec", "nbytes", "checksum")

    def change(parts: list[Part]) -> list[Part]:
        fields = dict(zip(names, parts[0], strict=True)) | said
        return [tuple(fields.values()), *parts[1:]]

    return change


ARTIFACTS: dict[str, dict[str, Any]] = {
    "part before the pack": {"parts": part(offset=-(1 << 20))},
    "part in the header of the pack": {"parts": part(offset=-5000)},
    "part before all": {"parts": part(offset=-(1 << 63))},
    "part in its own record": {"parts": part(offset=0)},
    "part behind the pack": {"parts": part(offset=1 << 20)},
    "part behind all": {"parts": part(offset=(1 << 63) - 1)},
    "part of another record": {"parts": part(offset=-3200)},
    "huge part": {"parts": part(stored=1 << 44, nbytes=1 << 44)},
    "part beyond all": {"parts": part(stored=MOST, nbytes=MOST)},
    "lengths that differ": {"parts": part(nbytes=1 << 40)},
    "unknown codec": {"parts": part(codec=7)},
    "unknown codec and huge": {"parts": part(codec=7, nbytes=1 << 60)},
    "wrong checksum": {"parts": part(checksum=1)},
    "no part": {"parts": lambda _: []},
    "many parts": {"parts": lambda parts: parts * 5000},
    "layout nowhere": {"layout_at": (1 << 32) - 1},
    "layout in the header": {"layout_at": 0},
    "layout is an artifact": {"layout_at": 3},
    "unknown tag": {"layout": encode(1)[0][:1] + b"\xee"},
    "empty layout": {"layout": b""},
    "another version": {"layout": b"\x09i"},
    "deep layout": {"layout": deep(100_000)},
    "larger tensor": {"layout": tensor_layout("|u1", 4000)},
    "huge tensor": {"layout": tensor_layout("|u1", 1 << 44)},
    "endless tensor": {"layout": tensor_layout("<f8", *[1 << 62] * 9)},
    "unknown dtype": {"layout": tensor_layout("object", 10)},
    "unknown class": {"layout": b"\x01C\x09\0\0\0os.system-"},
    "hostile metadata": {"about": b"\xff" * 100},
    "deep metadata": {"about": struct.pack("<I", len(deep(5000))) + deep(5000)},
    "metadata with a tensor": {"about": struct.pack("<I", 15) + tensor_layout("|u1", 4000)},
    "expires in the past": {"expires": 1},
    "another hash": {"hash": 1},
}


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_hostile_artifact_takes_nothing_along(world: World, is_sealed: bool) -> None:
    for kind, hostile in ARTIFACTS.items():
        pack = world.pack()
        pack.artifact(b"\x02other", OTHER)
        if "layout_at" in hostile:
            pack.add(ARTIFACT, key=KEY, seq=2, layout=hostile["layout_at"])
        else:
            pack.artifact(KEY, VALUE, seq=2, **hostile)
        if is_sealed:
            pack.seal(pack.footer())
        with row(kind):
            found = world.read(pack)
            assert is_value(found["other"], OTHER)
            assert "key" not in found or is_value(found["key"], VALUE)


KEYS = (
    b"", b"\x01", b"\x01short", b"\x02", b"\x03abc", b"\x02\xff\xfe", b"\x02" + b"k" * 5000,
    b"\x01" + b"x" * 33, b"x" * 60_000,
)  # fmt: skip


def test_keys_that_are_no_keys_are_left_out(world: World) -> None:
    for stored, is_sealed in itertools.product(KEYS, (True, False)):
        with row(stored[:8], is_sealed):
            pack = world.pack()
            pack.artifact(KEY, VALUE)
            pack.add(DELETE, key=stored, seq=2)
            pack.artifact(stored, OTHER, seq=3)  # newer than its deletion: it would be there
            pack.add(PIN, key=stored, seq=4)
            if is_sealed:
                pack.seal(pack.footer())
            assert set(world.read(pack)) == {"key"}
            with open_set(world.sets) as opened:
                assert set(opened) == {"key", "a new one"}
                assert is_sealed or len(opened) == 2, "nor are they counted"


def test_keys_like_paths_lead_nowhere(world: World, tmp_path: Path) -> None:
    before = {path for path in tmp_path.rglob("*") if "sets" not in path.parts}
    for name in ("../../../escaped", "/etc/escaped", "a\0b", "..", "%2e", "a/b"):
        pack = world.pack()
        pack.artifact(b"\x02" + name.encode(), VALUE)
        with row(name):
            assert is_value(world.read(pack)[name], VALUE)
            with open_set(world.sets) as opened:
                assert opened.get_or_compute(f"{name}x", lambda: 1) == 1
    assert before == {path for path in tmp_path.rglob("*") if "sets" not in path.parts}


def test_one_of_two_artifacts_with_one_key_and_number_is_taken(world: World) -> None:
    for same_pack, is_sealed in itertools.product((True, False), repeat=2):
        first = world.pack()
        second = first if same_pack else world.pack(2)
        first.artifact(KEY, VALUE, seq=7)
        second.artifact(KEY, OTHER, seq=7)
        packs = [first] if same_pack else [first, second]
        for pack in packs if is_sealed else ():
            pack.seal(pack.footer())
        with row(same_pack, is_sealed):
            assert "key" in world.read(*packs)


def test_a_tensor_that_holds_a_pack_is_never_taken_for_its_records(tmp_path: Path) -> None:
    """Neither when the record that holds it is damaged, so that nobody knows where it ends."""
    sets = ArtifactSets(tmp_path / "sets")
    with open_set(sets) as opened:
        opened.put("deleted", VALUE)
        opened.put("replaced", VALUE)
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
    start = data.rindex(b"SCr2", 0, data.index(inside.tobytes(), len(inside)))
    for at in (start, start + 8, start + 60):
        damaged = bytearray(data)
        damaged[at : at + 4] = b"\xff\0\xff\0"
        pack.write_bytes(damaged)
        sets.rebuild(info)
        with open_set(sets) as opened:
            assert "deleted" not in opened
            assert is_value(opened.get("replaced"), OTHER)


# footers that lie


def lies(pack: Crafted) -> dict[str, Callable[[], int]]:
    """What a footer can say that is not so; `first` is KEY, `second` another key."""
    first, second = sorted(pack.rows, key=lambda row: row.key != KEY)
    rows = sorted([first, second])

    def said(**fields: Any) -> Callable[[], int]:  # noqa: ANN401
        return lambda: pack.footer(sorted([first._replace(**fields), second]))

    return {
        "the record of another": said(offset=second.offset),
        "its layout": said(offset=64),
        "the middle of a record": said(offset=first.offset + 64),
        "not aligned": said(offset=first.offset + 3),
        "behind the pack": said(offset=1 << 40),
        "behind all": said(offset=MOST),
        "behind all, aligned": said(offset=MOST - 63),
        "into the next pack": said(offset=1 << 46),
        "huge": said(size=(1 << 32) - 1),
        "of no size": said(size=0),
        "huge meta": said(meta=(1 << 31) - 1),
        "no meta": said(meta=0),
        "short meta": said(meta=1),
        "plain, though it is not": said(meta=first.meta | 1 << 31, size=first.size - 1),
        "layout nowhere": said(layout=(1 << 32) - 1),
        "layout of nothing": said(layout=0),
        "another number": said(seq=77),
        "number beyond all": said(seq=MOST),
        "another key": said(key=b"\x02another"),
        "no key": said(key=b""),
        "long key": said(key=b"\x02" + b"k" * 5000),
        "another hash": said(hash=5),
        "the hash of another": said(hash=second.hash, twin=second.twin),
        "another twin": said(twin=5),
        "unknown kind": said(kind=99),
        "deleted": said(kind=DELETE),
        "lost": said(kind=0, seq=1 << 62),
        "an intake": said(kind=INTAKE, seq=1 << 62),
        "deletes of everything": lambda: pack.footer(
            sorted(row._replace(kind=DELETE, seq=50) for row in rows)
        ),
        "pointers nowhere": said(pointers=((MOST, MOST), (0, 1 << 40))),
        "pointers of a row that is not": lambda: pack.footer(pointers=4),
        "unsorted": lambda: pack.footer(rows[::-1]),
        "twice": lambda: pack.footer(sorted([*rows, *rows])),
        "nothing": lambda: pack.footer([]),
        "one of two": lambda: pack.footer([second]),
        "more than there is": lambda: pack.footer(count=1 << 40),
        "more than all": lambda: pack.footer(count=MOST),
        "many pointers": lambda: pack.footer(pointers=1 << 60),
        "many layouts": lambda: pack.footer(layouts=1 << 60),
        "another one before": lambda: pack.footer(start=1000, before=MOST),
        "itself before": lambda: pack.footer(start=pack.end, before=pack.end),
        "nothing before": lambda: pack.footer(start=1 << 40),
        "highest number beyond all": lambda: pack.footer(most=MOST),
        "keys that go back": lambda: pack.footer(ends=[9, 4]),
        "keys beyond the end": lambda: pack.footer(ends=[4, 1 << 31]),
        "cut off": lambda: pack.footer(length=100),
        "cut off at once": lambda: pack.footer(length=20),
    }


def lying(world: World) -> Crafted:
    pack = world.pack()
    pack.artifact(KEY, VALUE, seq=5)
    pack.artifact(b"\x02other", OTHER, seq=6)
    return pack


def test_a_footer_that_lies_gives_no_wrong_value(world: World) -> None:
    """The value of a key is its own, or there is none; and the set can be used."""
    for kind in lies(lying(world)):
        pack = lying(world)
        pack.seal(lies(pack)[kind]())
        with row(kind):
            found = world.read(pack)
        assert "key" not in found or is_value(found["key"], VALUE), kind
        assert "other" not in found or is_value(found["other"], OTHER), kind
        assert found.keys() <= {"key", "other"}, kind
        with open_set(world.sets) as opened:
            assert opened.get("a new one") == {"n": 1}, kind


def test_an_older_value_is_not_given_for_a_footer_that_names_it(world: World) -> None:
    pack = world.pack()
    old = pack.artifact(KEY, VALUE, seq=5)
    pack.artifact(KEY, OTHER, seq=6)
    first = next(row for row in pack.rows if row.offset == old)
    pack.seal(pack.footer([first._replace(seq=9)]))
    assert "key" not in world.read(pack)


def test_chains_of_footers_end(world: World) -> None:
    """Footers that name each other, and a thousand of them one before the other."""
    pack = lying(world)
    before = 0
    for _ in range(1000):
        before = pack.footer([], start=pack.end, before=before)
    found = world.read(pack.seal(before))
    assert is_value(found["key"], VALUE)


# files that are no packs


def strange_files(path: Path, world: World) -> None:
    elsewhere = path.parent / "elsewhere"
    pack = world.pack(0x22)
    pack.artifact(b"\x02linked", VALUE)
    elsewhere.write_bytes(pack.data)
    foreign = Crafted(bytes(16), 0x77)
    foreign.artifact(b"\x02linked", VALUE)

    def name(number: int) -> Path:
        return path / f"{number:016x}.pack"

    name(0x22).symlink_to(elsewhere)
    os.mkfifo(name(3))
    name(4).mkdir()
    name(7).write_bytes(foreign.data)
    name(8).write_bytes(b"")
    name(9).write_bytes(b"x" * 1000)
    name(10).symlink_to("/nowhere")
    name(11).symlink_to("/dev/zero")
    name(MOST).write_bytes(bytes(64))
    (path / "1.pack").write_bytes(b"x" * 1000)
    (path / "-000000000000001.pack").write_bytes(b"x" * 1000)
    (path / "00000000000000AB.pack").write_bytes(b"x" * 1000)


@pytest.mark.timeout(60)
def test_what_is_no_pack_is_neither_followed_nor_waited_for(world: World) -> None:
    pack = world.pack()
    pack.artifact(KEY, VALUE)
    with_packs(world.sets, pack)
    (path,) = world.sets.folders()
    strange_files(path, world)
    found = world.read_again()
    assert is_value(found["key"], VALUE)
    assert "linked" not in found
    with open_set(world.sets) as opened:
        assert not opened.verify().damaged
    for info in world.sets.infos():
        world.sets.rebuild(info)
    assert is_value(world.read_again()["key"], VALUE)


# set.json

DOCUMENTS: dict[str, object] = {
    "nothing": None,
    "a list": [],
    "a text": "set",
    "empty": {},
    "newer": {"format": 3},
    "older": {"format": 1},
    "no instance": {"instance": None},
    "path as instance": {"instance": "../../escaped"},
    "huge format": {"format": 1e400},
    "path as name": {"name": "../../escaped"},
    "no name": {"name": None},
    "another name": {"name": "other"},
    "another id": {"id": "0" * 32},
    "path as id": {"id": "../../escaped"},
    "hostile fingerprint": {"fingerprint": {"a": float("inf")}},
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


def test_a_hostile_set_file_is_named_or_does_no_harm(tmp_path: Path) -> None:
    sets = ArtifactSets(tmp_path / "sets")
    with open_set(sets) as opened:
        opened.put("k", 1)
        path = opened.path
    good = json.loads((path / "set.json").read_text())

    def work() -> None:
        for info in ArtifactSets(tmp_path / "sets").infos():
            assert info.path == path
        with suppress(SmartcacheError), open_set(ArtifactSets(tmp_path / "sets")) as opened:
            opened.put("l", 2)
            assert opened.get("l") == 2
        with suppress(SmartcacheError):
            SetFolder.read(path)

    before = sorted(file.name for file in tmp_path.iterdir())
    for kind, hostile in DOCUMENTS.items():
        document = {**good, **hostile} if isinstance(hostile, dict) and hostile else hostile
        (path / "set.json").write_text(json.dumps(document))
        with row(kind):
            contained(work)
            assert before == sorted(file.name for file in tmp_path.iterdir())


def test_a_set_file_that_is_no_document_is_named(tmp_path: Path) -> None:
    with open_set(ArtifactSets(tmp_path / "sets")) as opened:
        path = opened.path
    for text in (b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"format": 1}' * 2):
        (path / "set.json").write_bytes(text)
        with row(text[:20]), pytest.raises(SmartcacheError):
            open_set(ArtifactSets(tmp_path / "sets"))
        (info,) = ArtifactSets(tmp_path / "sets").infos()
        assert info.problem
        assert Fingerprint.of({}).id("latents") != info.id


# anything


def mutated(pack: Crafted, chance: random.Random) -> None:
    """Change some numbers of records, or of the footer, and make their checksums right again."""
    numbers = (0, 1, 63, 64, 1 << 31, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, MOST)
    data = pack.data
    starts = [at for at in range(64, len(data), 64) if data[at : at + 4] == b"SCr2"]
    for at in chance.sample(starts, chance.randrange(1, 4)):
        fields = list(struct.unpack_from("<BBHIIIIIIQQQ", data, at + 4))
        which = chance.randrange(len(fields))
        width = (8, 8, 16, 32, 32, 32, 32, 32, 32, 64, 64, 64)[which]
        is_header = chance.random() < 0.4
        length = 8 + 40 * fields[3] + fields[2] + fields[4] + fields[5]
        if is_header:
            fields[which] = chance.choice((*numbers, at, chance.choice(starts))) & (1 << width) - 1
            struct.pack_into("<BBHIIIIIIQQQ", data, at + 4, *fields)
        elif length > 16 and fields[0] not in (END, SKIP):
            where = at + 72 + chance.randrange(length - 16)
            data[where : where + 8] = chance.choice(
                [number.to_bytes(8, "little") for number in numbers] + [os.urandom(8)]
            )
            body = bytes(data[at + 72 : at + 64 + length])
            struct.pack_into("<Q", data, at + 64, checksum(body))
        text = bytes(data[at : at + 56])
        struct.pack_into("<Q", data, at + 56, checksum(text, pack.nonce + at & MOST))


def test_mutated_packs_with_right_checksums(tmp_path: Path, soak: bool) -> None:
    world = World(tmp_path / "sets")

    def work() -> None:
        for number in range(6000 if soak else 60):
            chance = random.Random(number)
            packs = [world.pack(), world.pack(5)]
            for pack in packs:
                for seq in range(1, 6):
                    key = b"\x02k%d" % chance.randrange(3)
                    pack.artifact(key, {"t": array(seq % 3, 2000), "l": [seq]}, seq=seq)
                pack.add(PIN, key=b"\x02k1", seq=9)
                pack.add(DELETE, key=b"\x02k2", seq=10)
                if chance.random() < 0.7:
                    pack.seal(pack.footer())
                mutated(pack, chance)
            with_packs(world.sets, *packs)
            with row(number), suppress(SmartcacheError), open_set(world.sets) as opened:
                read_all(opened)

    contained(work)
