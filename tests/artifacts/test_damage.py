"""Bit flips and truncations anywhere: a read gives the right value, a miss or a named error.

Never an older value, never another exception, never a crash: reading happens in child processes,
so that a signal is seen. The set has keys that were replaced and deleted, small packs and tensors
that several artifacts share.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("fork and signals", allow_module_level=True)

from tests.api import (
    HEADER_BYTES,
    ArtifactNotFoundError,
    ArtifactSet,
    ArtifactSets,
    DamagedArtifactError,
    Sample,
    SmartcacheError,
    flusher,
)
from tests.artifacts.opening import array, engine_of, open_set
from tests.processes.artifact_writers import change, in_fork, number_in, value_of
from tests.processes.children import Child
from tests.processes.killing import Moment, die_at

CASES = 400
SOAK_CASES = 10_000
PACK = 24 << 10

State = dict[str, int]
"""By key: the number of its value; 0: it was deleted."""


def key(number: int) -> str:
    return f"key {number}"


def fill(opened: ArtifactSet) -> State:
    """Put, replace and delete; what is dead stays in the packs."""
    state: State = {}
    for number in range(1, 60):
        name = key(number % 17)
        state[name] = 0 if number % 7 == 0 else number
        change(opened, name, state[name])
        if number % 20 == 0:
            opened.flush()
    return state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A set that was closed."""
    root = tmp_path_factory.mktemp("whole") / "sets"
    with open_set(ArtifactSets(root), pack_bytes=PACK) as opened:
        return root, fill(opened)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A set whose writer was killed: rows are in the log of the index, or only in packs."""
    root = tmp_path_factory.mktemp("killed") / "sets"
    with open_set(ArtifactSets(root.with_name("other"))) as opened:
        state = fill(opened)

    def die() -> None:
        again = open_set(ArtifactSets(root), pack_bytes=PACK)
        fill(again)
        again.compact(force=True)
        change(again, key(1), 100)
        change(again, key(2), 0)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_fork(die), 0)
    return root, {**state, key(1): 100, key(2): 0}


# reading everything


class Reader:
    """Reads a damaged set in every way there is."""

    def __init__(self, root: Path, state: State, chance: random.Random) -> None:
        self.sets = ArtifactSets(root)
        self.state = state
        self.chance = chance
        self.errors = 0

    def read(self) -> None:
        """Read in some order; then again after the set was opened anew."""
        for _ in range(2):
            try:
                opened = open_set(self.sets, pack_bytes=PACK)
            except SmartcacheError:
                self.errors += 1
                continue
            ways: list[Callable[[ArtifactSet], None]] = [
                self.get, self.get, self.batch, self.samples, self.metadata, self.iterate,
                self.verify, self.compact, self.look,
            ]  # fmt: skip
            for way in self.chance.sample(ways, 5):
                try:
                    way(opened)
                except SmartcacheError:
                    self.errors += 1
            with suppress(SmartcacheError):
                opened.close()

    def check(self, name: str, value: Any) -> None:  # noqa: ANN401 - whatever was read
        if value is None:
            return
        assert name in self.state, f"{name!r} was never put, and has a value"
        found = number_in(name, value)
        assert found == self.state[name], f"{name} is {found}, not {self.state[name]}"

    def get(self, opened: ArtifactSet) -> None:
        for name in self.state:
            try:
                self.check(name, opened.get(name))
            except SmartcacheError:
                self.errors += 1

    def batch(self, opened: ArtifactSet) -> None:
        names = [name for name in self.state if name in opened]
        for some in (names, self.chance.sample(names, min(3, len(names)))):
            try:
                found = opened.get_batch(some)
            except SmartcacheError:
                self.errors += 1
                continue
            for index, name in enumerate(some):
                self.check(name, {field: found[field][index] for field in found})

    def samples(self, opened: ArtifactSet) -> None:
        for name in self.state:
            try:
                sample = opened[name]
                assert isinstance(sample, Sample)
                self.check(name, {field: sample[field] for field in sample})
                assert np.array_equal(sample.handle("own").numpy(), np.asarray(sample["own"]))
            except SmartcacheError:
                self.errors += 1

    def metadata(self, opened: ArtifactSet) -> None:
        for name, number in self.state.items():
            try:
                assert opened.metadata(name) == {"number": number}
            except SmartcacheError:
                self.errors += 1

    def iterate(self, opened: ArtifactSet) -> None:
        for name in list(opened):
            self.check(name, opened.get(name))
        assert len(opened) >= 0

    def verify(self, opened: ArtifactSet) -> None:
        opened.verify()
        for name in self.state:
            self.check(name, opened.get(name))

    def compact(self, opened: ArtifactSet) -> None:
        opened.compact(force=True)
        for name in self.state:
            self.check(name, opened.get(name))

    def look(self, opened: ArtifactSet) -> None:
        opened.stats()
        opened.describe()
        opened.announce(list(self.state))

    def rebuild(self) -> ArtifactSet:
        """Make the index again; it must be possible, and the set must be usable then."""
        (path,) = self.sets.folders()
        info = next(info for info in self.sets.infos() if info.path == path)
        self.sets.rebuild(info)
        opened = open_set(self.sets, pack_bytes=PACK)
        for name in self.state:
            self.check(name, opened.get(name))
        return opened

    def heal(self, opened: ArtifactSet) -> None:
        """Compute what is missing."""
        for name, number in self.state.items():
            wanted = number or 12_345
            found = opened.get_or_compute(
                name,
                lambda name=name, wanted=wanted: value_of(name, wanted),  # type: ignore[misc]
                metadata={"number": wanted},
            )
            assert number_in(name, found) == wanted
            self.state[name] = wanted
        for name in self.state:
            assert number_in(name, opened.get(name)) == self.state[name]
        assert not opened.verify().damaged


# damaging it


def flip(path: Path, chance: random.Random) -> str:
    size = path.stat().st_size
    at, bit = chance.randrange(size), chance.randrange(8)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} of {path.name} flipped"


def truncate(path: Path, chance: random.Random) -> str:
    size = path.stat().st_size
    at = chance.choice([0, chance.randrange(size), chance.randrange(size) // 64 * 64])
    os.truncate(path, at)
    return f"{path.name} truncated from {size} to {at}"


Damage = Callable[[Path, random.Random], str]


def copied(template: Path, to: Path) -> Path:
    if to.exists():
        shutil.rmtree(to)
    shutil.copytree(template, to)
    return to


def files(root: Path, pattern: str) -> list[Path]:
    return sorted(path for path in root.glob(f"*/*/{pattern}") if path.stat().st_size)


def run_cases(count: int, folder: Path, case: Callable[[int, Path], None]) -> None:
    """Run cases in children, each of which does many; say which one has failed."""
    note = folder / "case"

    def work(first: int) -> None:
        for number in range(first, count, 2):
            note.with_name(f"case{first}").write_text(str(number))
            case(number, folder / f"sets{first}")

    with Child(lambda: work(0)) as one, Child(lambda: work(1)) as other:
        for first, child in enumerate((one, other)):
            try:
                child.result()
            except pytest.fail.Exception as failure:
                at = note.with_name(f"case{first}").read_text()
                pytest.fail(f"case {at}: {failure}", pytrace=False)


def cases(soak: bool, part: float) -> int:
    return int((SOAK_CASES if soak else CASES) * part)


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_pack_gives_right_values_or_none(
    whole: tuple[Path, State], tmp_path: Path, damage: Damage, soak: bool
) -> None:
    template, state = whole

    def case(number: int, root: Path) -> None:
        chance = random.Random(f"pack {number}")
        copied(template, root)
        what = damage(chance.choice(files(root, "*.pack")), chance)
        reader = Reader(root, dict(state), chance)
        try:
            if chance.random() < 0.7:
                reader.read()
            with reader.rebuild() as opened:
                if number % 4 == 0:
                    reader.heal(opened)
        except Exception as error:
            error.add_note(what)
            raise

    run_cases(cases(soak, 0.18), tmp_path, case)


def test_a_flipped_bit_brings_nothing_back_that_was_deleted_or_replaced(
    whole: tuple[Path, State], tmp_path: Path, soak: bool
) -> None:
    """The index is lost too: all that is known is in the packs, one of which is damaged."""
    template, state = whole

    def case(number: int, root: Path) -> None:
        chance = random.Random(f"alone {number}")
        copied(template, root)
        for path in files(root, "index.sqlite3*"):
            path.unlink()
        pack = chance.choice(files(root, "*.pack"))
        if number % 2:
            what = flip(pack, chance)
        else:  # a bit of a header, of which there are few
            data = pack.read_bytes()
            headers = [at for at in range(64, len(data), 64) if data[at : at + 4] == b"SCr1"]
            at = chance.choice(headers) + chance.randrange(HEADER_BYTES)
            changed = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            pack.write_bytes(changed)
            what = f"byte {at} of {pack.name}"
        reader = Reader(root, dict(state), chance)
        try:
            reader.read()
            if number % 8 == 0:
                with open_set(reader.sets) as opened:
                    reader.heal(opened)
        except Exception as error:
            error.add_note(what)
            raise

    run_cases(cases(soak, 0.18), tmp_path, case)


@pytest.mark.parametrize("damage", [flip, truncate])
@pytest.mark.parametrize("kind", ["whole", "killed"])
def test_a_damaged_index_is_made_again_and_nothing_is_lost(
    kind: str, damage: Damage, tmp_path: Path, soak: bool, request: pytest.FixtureRequest
) -> None:
    template, state = request.getfixturevalue(kind)

    def case(number: int, root: Path) -> None:
        chance = random.Random(f"index {kind} {number}")
        copied(template, root)
        index = chance.choice(files(root, "index.sqlite3*"))
        what = damage(index, chance)
        reader = Reader(root, dict(state), chance)
        try:
            # Reading deletes what it finds damaged: so either this, or nothing may be lost.
            if chance.random() < 0.5:
                reader.read()
                reader.rebuild().close()
            else:
                with reader.rebuild() as opened:
                    found = {name: opened.get(name) for name in state}
                    assert {name for name in found if found[name]} == {
                        name for name in state if state[name]
                    }
                    assert not opened.verify().has_damage
        except Exception as error:
            error.add_note(what)
            raise

    run_cases(cases(soak, 0.1), tmp_path, case)


# while it is in use


@pytest.mark.parametrize("keep", [0, 64, 5000])
def test_a_pack_truncated_while_it_is_mapped_crashes_nobody(tmp_path: Path, keep: int) -> None:
    """Every read looks at the size of the packs it has mapped before it touches them.

    The moment between that look and the copy cannot be closed: only a signal handler could. It is
    microseconds long, and nobody but a stranger to smartcache ever truncates a pack.
    """

    def work() -> None:
        with open_set(ArtifactSets(tmp_path / "sets")) as opened:
            for number in range(20):
                opened.put(f"k{number}", {"t": array(number, 50_000), "n": number})
            opened.flush()
            names = [f"k{number}" for number in range(20)]
            out = opened.get_batch(names)
            for _ in range(3):
                opened.get_batch(names, out=out)
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

    with Child(work) as child:
        child.result()


def test_a_pack_truncated_before_its_rows_are_written_crashes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "soon", lambda _: None)

    def work() -> None:
        with open_set(ArtifactSets(tmp_path / "sets")) as opened:
            names = [f"k{number}" for number in range(8)]
            for number, name in enumerate(names):
                opened.put(name, {"t": array(number, 30_000)})
            for _ in range(3):
                opened.get_batch(names)
            assert len(engine_of(opened).pending) == 8
            (pack,) = opened.path.glob("*.pack")
            os.truncate(pack, 64)
            with pytest.raises((ArtifactNotFoundError, DamagedArtifactError)):
                opened.get_batch(names)

    with Child(work) as child:
        child.result()


def test_a_truncated_pack_with_a_tensor_of_a_record_in_another_crashes_nobody(
    tmp_path: Path,
) -> None:
    """The record of the artifact can be read; what is gone is the tensor that it shares."""

    def work() -> None:
        with open_set(ArtifactSets(tmp_path / "sets"), pack_bytes=60_000) as opened:
            opened.put("first", {"t": array(1, 50_000)})
            opened.put("between", {"t": array(2, 50_000)})
            opened.put("second", {"t": array(1, 50_000), "n": 2})
            opened.flush()
            for _ in range(3):
                assert np.array_equal(opened.get("second")["t"], array(1, 50_000))
            os.truncate(opened.path / "00000001.pack", 64)
            assert opened.get("second") is None
            assert np.array_equal(opened.get("between")["t"], array(2, 50_000))

    with Child(work) as child:
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


def test_rows_that_make_no_sense_are_named(tmp_path: Path) -> None:
    """SQLite keeps whatever it is given: numbers may come back as text, or not at all."""
    import sqlite3

    columns = ("seq", "place", "length", "layout", "chunks", "used_at", "expires_at", "pinned")
    values = (None, "text", b"bytes", -1, 1.5, 1 << 62, b"")
    with open_set(ArtifactSets(tmp_path / "sets")) as opened:
        for column in columns:
            for value in values:
                change(opened, "k", 1)
                opened.flush()
                index = sqlite3.connect(opened.path / "index.sqlite3", isolation_level=None)
                with suppress(sqlite3.IntegrityError):
                    index.execute(f"UPDATE artifacts SET {column} = ?", (value,))  # noqa: S608
                index.close()
                with suppress(SmartcacheError):
                    found = opened.get("k")
                    assert found is None or number_in("k", found) == 1
                for way in (opened.metadata, opened.pin, lambda _: list(opened)):
                    with suppress(SmartcacheError):
                        way("k")
                with suppress(SmartcacheError):
                    opened.delete("k")
                ArtifactSets(tmp_path / "sets").rebuild(opened.describe())


def test_what_a_damaged_record_had_replaced_stays_away_when_a_tail_is_read(tmp_path: Path) -> None:
    """The last rows were not written; one of the records is damaged, and those behind it count."""
    root = tmp_path / "sets"
    with open_set(ArtifactSets(root)) as opened:
        for number in (1, 2, 3):
            change(opened, key(number), number)
        (pack,) = opened.path.glob("*.pack")

    def die() -> None:
        again = open_set(ArtifactSets(root))
        die_at(Moment("pack: written", 3))
        change(again, key(1), 10)
        change(again, key(2), 0)
        change(again, key(3), 30)

    os.waitpid(in_fork(die), 0)
    data = bytearray(pack.read_bytes())
    data[data.index(value_of(key(1), 10)["own"].tobytes()) + 100] ^= 1
    pack.write_bytes(data)
    with open_set(ArtifactSets(root)) as opened:
        assert opened.get(key(1)) is None
        assert opened.get(key(2)) is None
        assert number_in(key(3), opened.get(key(3))) == 30


def test_a_layout_that_is_damaged_in_the_index_heals_with_the_next_put(tmp_path: Path) -> None:
    import sqlite3

    root = tmp_path / "sets"
    with open_set(ArtifactSets(root)) as opened:
        change(opened, "k", 1)
        path = opened.path / "index.sqlite3"
    index = sqlite3.connect(path, isolation_level=None)
    index.execute("UPDATE layouts SET body = CAST('x' || substr(body, 2) AS BLOB)")
    index.close()
    with open_set(ArtifactSets(root)) as opened:
        assert opened.get("k") is None
        assert number_in("k", opened.get_or_compute("k", lambda: value_of("k", 2))) == 2
        assert opened.stats().damaged == 1


@pytest.mark.parametrize(
    "old", [b"place      INTEGER", b"CREATE INDEX chunks_hash", b"user_version"]
)
def test_a_schema_that_is_damaged_is_made_again(tmp_path: Path, old: bytes) -> None:
    """SQLite reads the tables by a text in the file; a bit of that may be wrong, too."""
    sets = ArtifactSets(tmp_path / "sets")
    with open_set(sets) as opened:
        change(opened, "k", 1)
        path = opened.path / "index.sqlite3"
    data = bytearray(path.read_bytes())
    at = 63 if old == b"user_version" else data.index(old) + len(old) - 1
    data[at] ^= 1
    path.write_bytes(data)
    (info,) = sets.infos()
    sets.rebuild(info)
    with open_set(sets) as opened:
        assert number_in("k", opened.get("k")) == 1
        assert not opened.verify().has_damage


def test_a_wrong_count_takes_no_memory(tmp_path: Path) -> None:
    """`list` asks for the length first, and takes memory for so many."""
    import sqlite3

    with open_set(ArtifactSets(tmp_path / "sets")) as opened:
        change(opened, "k", 1)
        opened.flush()
        index = sqlite3.connect(opened.path / "index.sqlite3", isolation_level=None)
        index.execute("UPDATE packs SET artifacts = 1 << 40")
        index.close()
        with pytest.raises(SmartcacheError):
            list(opened)
