"""Bit flips and truncations anywhere: a read gives the right value, a miss or a named error.

Never a wrong value, never another exception, never a crash. What was deleted or replaced does not
return, unless the very header of the record that did so is the damaged one, and no footer is left
that lists it: then nobody can know of it.
"""

from __future__ import annotations

import mmap
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BatchShapeError,
    DamagedArtifactError,
)
from tests.artifacts.exact import exactly
from tests.artifacts.opening import array, engine_of, open_set, packs_of, seal
from tests.artifacts.packreader import ARTIFACT, DELETE, LAYOUT, PackFile, newest_of
from tests.processes.artifact_writers import change, in_fork, number_in, value_of
from tests.processes.children import Child
from tests.processes.killing import Moment, die_at
from tests.store.files import raising, row

SIZE = 1100
"""Of tensors: a little more than what is kept among the small values."""
KEYS = ("first", "replaced", "deleted", "equal")


class Damaged(NamedTuple):
    """A set of one pack, which is damaged again and again."""

    root: Path
    pack: Path
    data: bytes
    footer: int
    """Where its footer begins."""
    puts: dict[str, list[object]]
    """By key: everything that was ever put, exactly."""

    def read(self, *, every_way: bool = True) -> dict[str, object]:
        """Read everything without writing; only damage may be told of."""
        found: dict[str, object] = {}
        with open_set(ArtifactSets(self.root), read_only=True) as opened:
            for key in KEYS:
                value = opened.get(key)
                if value is not None:
                    found[key] = exactly(value)
            if not every_way:
                return found
            for key in KEYS:
                with suppress(DamagedArtifactError, ArtifactNotFoundError):
                    assert exactly(opened[key].value()) in self.puts[key]
            for ordinals in ([0, 1], [2], [3]):
                with suppress(DamagedArtifactError, ArtifactNotFoundError, BatchShapeError):
                    batch = opened.select(KEYS).read(ordinals)
                    for row, number in enumerate(ordinals):
                        value = {"t": batch["t"][row], "n": batch["n"][row]}
                        assert exactly(value) in self.puts[KEYS[number]]
            assert found.keys() <= set(opened)
        return found

    def newest(self) -> dict[str, object]:
        """Return what is there if nothing is damaged."""
        return {key: values[-1] for key, values in self.puts.items() if key != "deleted"}

    def without_footer(self) -> bytes:
        return self.data[: self.footer]

    def file(self) -> PackFile:
        return PackFile(self.pack, bytes.fromhex(self.pack.parent.name))


@pytest.fixture(params=["whole", "killed"])
def damaged(elsewhere: Path, request: pytest.FixtureRequest) -> Iterator[Damaged]:
    """A set that was closed, or one whose writer was killed: it has no footer."""
    puts: dict[str, list[object]] = {key: [] for key in KEYS}
    with open_set(ArtifactSets(elsewhere / "sets")) as opened:
        for key, seed in (
            ("first", 1), ("replaced", 2), ("deleted", 3), ("equal", 1), ("replaced", 4),
        ):  # fmt: skip
            value = {"t": array(seed, SIZE), "n": len(puts[key])}
            opened.put(key, value)
            puts[key].append(exactly(value))
        opened.delete("deleted")
        opened.pin("first")
        (pack,) = opened.path.glob("*.pack")
    file = PackFile(pack, bytes.fromhex(pack.parent.name))
    file.check()
    found = Damaged(elsewhere / "sets", pack, file.data, file.footers()[0][0].offset, puts)
    if request.param == "killed":
        pack.write_bytes(found.without_footer())
        found = found._replace(data=found.without_footer())
    assert found.read() == found.newest()
    yield found
    pack.write_bytes(found.data)


def test_a_flipped_bit_anywhere_gives_right_values_or_none(damaged: Damaged, soak: bool) -> None:
    """Every byte of what is no tensor; of tensors every byte under `--soak`, else some."""
    file = damaged.file()
    tensors = [
        (each.offset + part.offset, each.offset + part.offset + part.stored)
        for each in file.records
        for part in each.parts
    ]
    undoes = {
        key: [
            range(each.offset, each.offset + 64)
            for each in file.records
            if each.key[1:] == key.encode() and each.kind in (ARTIFACT, DELETE)
        ][1:]
        for key in KEYS
    }
    (layout,) = (
        range(each.offset, each.offset + each.size) for each in file.records if each.kind == LAYOUT
    )
    has_footer = damaged.footer < len(damaged.data)
    chance = random.Random(1)
    wanted = damaged.newest()
    for at in range(len(damaged.data)):
        if not soak and any(start <= at < end for start, end in tensors) and at % 29:
            continue
        bit = chance.randrange(8)
        changed = bytearray(damaged.data)
        changed[at] ^= 1 << bit
        damaged.pack.write_bytes(changed)
        found = damaged.read(every_way=soak or at % 8 == 0)
        for key in KEYS:
            old = not has_footer and any(at in each for each in undoes[key])
            allowed = damaged.puts[key] if old else [wanted.get(key)]
            assert found.get(key) is None or found[key] in allowed, f"{key}: bit {bit} of byte {at}"
        if has_footer or at not in layout:
            assert len(found) >= len(wanted) - 2, f"bit {bit} of byte {at} takes others along"
        if at >= damaged.footer:
            assert found == wanted, f"bit {bit} of byte {at} of the footer"


def test_a_pack_cut_off_anywhere_has_what_is_before(damaged: Damaged, soak: bool) -> None:
    """At every byte of the footer nothing is missing; at others, what its records say."""
    instance = damaged.file().instance
    for at in range(64, len(damaged.data)):
        if at < damaged.footer and at % 64 and not (soak or at % 64 in (1, 63)):
            continue
        damaged.pack.write_bytes(damaged.data[:at])
        left = newest_of([damaged.file()], instance)
        found = damaged.read(every_way=at % 8 == 0)
        assert found.keys() == {key[1:].decode() for key in left}, f"cut off at {at}"
        for key, value in found.items():
            assert value in damaged.puts[key]
        if at >= damaged.footer:
            assert found == damaged.newest(), f"the footer cut off at {at}"


def test_writing_goes_on_behind_a_footer_that_was_cut_off(damaged: Damaged, soak: bool) -> None:
    """The next writer takes the pack over, and covers what is torn."""
    for at in range(damaged.footer, len(damaged.data) + 1, 1 if soak else 13):
        damaged.pack.write_bytes(damaged.data[:at])
        with open_set(ArtifactSets(damaged.root)) as opened:
            opened.put("new", {"n": at})
        assert [damaged.pack] == list(damaged.pack.parent.glob("*.pack"))
        damaged.file().check()
        with open_set(ArtifactSets(damaged.root)) as opened:
            assert opened.get("new") == {"n": at}
            assert {key: exactly(opened.get(key)) for key in damaged.newest()} == damaged.newest()
            assert "deleted" not in opened
            assert opened.is_pinned("first")
            assert not opened.verify().damage


def test_what_is_damaged_is_computed_again_and_compacted_away(damaged: Damaged) -> None:
    """And nothing that it had replaced comes back, neither then nor after a rebuild."""
    chance = random.Random(2)
    sets = ArtifactSets(damaged.root)
    for each in damaged.file().records:
        if each.kind not in (ARTIFACT, DELETE):
            continue
        changed = bytearray(damaged.data)
        changed[each.offset + 72 + chance.randrange(each.meta - 72)] ^= 255
        for other in damaged.pack.parent.glob("*.pack"):
            other.unlink()
        damaged.pack.write_bytes(changed)
        with open_set(sets) as opened:
            if chance.random() < 0.5:
                opened.verify()
            opened.put("other", {"n": 1})
            opened.compact(force=True)
            sets.rebuild(opened.describe())
        with open_set(sets) as opened:
            for key in KEYS:
                value = opened.get(key)
                assert value is None or exactly(value) == damaged.newest().get(key)
                new = {"t": array(9, SIZE), "n": 9}
                if value is None:
                    assert exactly(opened.get_or_compute(key, lambda v=new: v)) == exactly(new)  # type: ignore[misc]
            assert not opened.verify().damage


# the index


def _make_other(path: Path) -> None:
    path.unlink()
    index = sqlite3.connect(path)
    index.execute("CREATE TABLE failures (other)")
    index.commit()
    index.close()


GARBAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(os.urandom(9000)),
    "cut off": lambda path: os.truncate(path, 5000),
    "a folder's name": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(4080)),
    "another schema": _make_other,
    "gone": lambda path: path.unlink(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("is_open", [False, True])
def test_no_artifact_is_lost_with_the_index(tmp_path: Path, kind: str, is_open: bool) -> None:
    sets = ArtifactSets(tmp_path / "sets")
    opened = open_set(sets)
    for number in range(5):
        change(opened, f"k{number}", number + 1)
        opened.get(f"k{number}")
    opened.pin("k0")
    opened.flush()
    path = opened.path / "index.sqlite3"
    if not is_open:
        opened.close()
    for log in path.parent.glob("index.sqlite3-*"):
        log.unlink()
    GARBAGE[kind](path)
    opened = open_set(sets)
    for number in range(5):
        assert number_in(f"k{number}", opened.get(f"k{number}")) == number + 1
    change(opened, "new", 7)
    assert opened.is_pinned("k0")
    opened.stats()
    opened.compact(force=True)
    assert not opened.verify().damage
    opened.close()
    with open_set(sets) as again:
        assert number_in("new", again.get("new")) == 7
        assert len(again) == 6
        again.describe()
        assert again.failures() == []


# while it is in use


def test_a_pack_truncated_while_it_is_mapped_crashes_nobody(tmp_path: Path) -> None:
    """Every read looks at the size of the packs it has mapped before it touches them.

    The moment between that look and the copy cannot be closed: only a signal handler could. It is
    microseconds long, and nobody but a stranger to smartcache ever truncates a pack.
    """

    def work(keep: int) -> None:
        with open_set(ArtifactSets(tmp_path / str(keep))) as opened:
            for number in range(20):
                opened.put(f"k{number}", {"t": array(number, 50_000), "n": number})
            names = [f"k{number}" for number in range(20)]
            out = opened.get_batch(names)
            chosen = opened.select(names)
            for _ in range(3):
                opened.get_batch(names, out=out)
                chosen.read(range(20), out)
            for name in names:
                opened.get(name)
            samples = [opened[name] for name in names]
            (pack,) = opened.path.glob("*.pack")
            os.truncate(pack, keep)
            for _ in range(3):
                for number, name in enumerate(names):
                    with suppress(ArtifactNotFoundError, DamagedArtifactError):
                        assert np.array_equal(samples[number]["t"], array(number, 50_000))  # type: ignore[arg-type]
                    found = opened.get(name)
                    assert found is None or np.array_equal(found["t"], array(number, 50_000))
                with suppress(ArtifactNotFoundError, DamagedArtifactError):
                    opened.get_batch(names, out=out)
                with suppress(ArtifactNotFoundError, DamagedArtifactError):
                    chosen.read([0, 1])

    for keep in (0, 64, 5000):
        with row(keep), Child(partial(work, keep)) as child:
            child.result()


def test_a_pack_truncated_while_batches_are_read_crashes_no_batch_that_begins_later(
    tmp_path: Path,
) -> None:
    def work() -> None:
        with open_set(ArtifactSets(tmp_path / "sets")) as opened:
            for number in range(32):
                opened.put(f"k{number}", {"t": array(number, 100_000)})
            names = [f"k{number}" for number in range(32)]
            for _ in range(3):
                opened.get_batch(names)
            (pack,) = opened.path.glob("*.pack")
            os.truncate(pack, 64 + mmap.PAGESIZE)
            with pytest.raises((ArtifactNotFoundError, DamagedArtifactError)):
                opened.get_batch(names)
            for name in names:
                opened.get_or_compute(name, lambda: {"t": array(0, 100_000)})
            assert set(opened.get_batch(names)["t"][:, 0]) == {array(0, 1)[0]}

    with Child(work) as child:
        child.result()


def test_what_a_damaged_record_had_replaced_stays_away_when_a_tail_is_read(tmp_path: Path) -> None:
    root = tmp_path / "sets"
    names = [f"key {number}" for number in range(4)]
    with open_set(ArtifactSets(root)) as opened:
        for number in (1, 2, 3):
            change(opened, names[number], number)
        (pack,) = opened.path.glob("*.pack")

    def die() -> None:
        again = open_set(ArtifactSets(root))
        die_at(Moment("pack: written", 3))
        change(again, names[1], 10)
        change(again, names[2], 0)
        change(again, names[3], 30)

    os.waitpid(in_fork(die), 0)
    data = bytearray(pack.read_bytes())
    data[data.index(value_of(names[1], 10)["own"].tobytes()) + 100] ^= 1
    pack.write_bytes(data)
    with open_set(ArtifactSets(root)) as opened:
        assert opened.get(names[1]) is None
        assert opened.get(names[2]) is None
        assert number_in(names[3], opened.get(names[3])) == 30


def test_what_the_disk_refuses_for_a_moment_is_not_deleted(
    latents: ArtifactSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network filesystem may forget a file, memory may run out: that is no damage."""
    import errno

    latents.put("k", {"t": array(1, 5000)})
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", raising(errno.ESTALE))
        with pytest.raises(ArtifactError, match="cannot be read") as caught:
            latents.get("k")
    assert not isinstance(caught.value, DamagedArtifactError)
    assert np.array_equal(latents.get("k")["t"], array(1, 5000))
    assert engine_of(latents).damage == set()


def test_a_block_that_the_disk_has_lost_costs_what_was_in_it(
    sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the records are scanned: the rest of the set can be read, and written."""
    import errno

    names = [f"key {number}" for number in range(40)]
    with open_set(sets) as opened:
        for number, name in enumerate(names):
            opened.put(name, {"t": array(number, 5000)})
        opened.sync()
        pack = packs_of(opened)[0]
        bad = range(1 << 16, (1 << 16) + 4096)
        reals = {"pread": os.pread, "preadv": os.preadv}

        def refuse(start: int, length: int) -> None:
            if start < bad.stop and start + length > bad.start:
                raise OSError(errno.EIO, "Input/output error")

        def pread(fd: int, length: int, offset: int) -> bytes:
            refuse(offset, length)
            return reals["pread"](fd, length, offset)  # type: ignore[no-any-return, operator]

        def preadv(fd: int, buffers: list[bytearray], offset: int, *flags: int) -> int:
            refuse(offset, sum(map(len, buffers)))
            return reals["preadv"](fd, buffers, offset, *flags)  # type: ignore[no-any-return, operator]

        data = pack.read_bytes()
    pack.write_bytes(data)  # without the footer that was left when the set was closed
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)
    with open_set(sets) as opened:
        found = {name: opened.get(name) for name in names}
        gone = [name for name, value in found.items() if value is None]
        assert 1 <= len(gone) <= 2
        for number, name in enumerate(names):
            if name not in gone:
                assert np.array_equal(found[name]["t"], array(number, 5000))
        opened.put(gone[0], {"t": array(1, 5000)})
        assert np.array_equal(opened.get(gone[0])["t"], array(1, 5000))


def test_an_artifact_that_is_damaged_after_it_was_read_is_named_by_batches(
    sets: ArtifactSets,
) -> None:
    with open_set(sets) as opened:
        for name in ("one", "two"):
            opened.put(name, {"t": array(len(name) + ord(name[0]), 5000), "n": name})
        seal(opened)
        chosen = opened.select(["one", "two"])
        for _ in range(2):
            chosen.read([0, 1])
        pack = packs_of(opened)[0]
        data = pack.read_bytes()
        with pack.open("r+b") as file:
            file.seek(data.index(b"\x02two"))
            file.write(b"\x02too")
        with pytest.raises(DamagedArtifactError, match="Artifact two of latents is damaged"):
            chosen.read([0, 1])
        assert "two" not in opened
        assert "one" in opened
