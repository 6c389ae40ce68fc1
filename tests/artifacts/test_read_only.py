"""A set that is opened to be read only: nothing is written, whatever others do meanwhile."""

from __future__ import annotations

import os
import pickle
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.errors import SetFormatError, StoreUnwritableError
from smartcache.system import faults as store_faults
from tests.artifacts.opening import array, open_set, packs_of, seal
from tests.processes.children import NOBODY, Child, folder_of
from tests.store.files import row

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def everything(root: Path) -> dict[str, tuple[int, ...]]:
    """What lies below a folder, and when it was changed."""
    found: dict[str, tuple[int, ...]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        state = path.lstat()
        found[str(path)] = (state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns)
    return found


def use(opened: ArtifactSet) -> None:
    """Read in every way that there is."""
    assert set(opened) == {f"k{n}" for n in range(1, 9)}
    assert len(opened) == 8
    assert "k0" not in opened
    assert opened.get("k0") is None
    assert np.array_equal(opened.get("k1")["x"], array(1))
    assert opened["k2"]["n"] == 2
    assert opened["k2"].handle("x").shape == (4096,)
    assert opened.metadata("k3") is None
    assert opened.is_pinned("k4")
    assert opened.get_batch(["k5", "k6"])["n"] == [5, 6]
    opened.announce(["k5", "k0"])
    with opened.select(["k7", "k0"]) as chosen:
        assert chosen.missing.tolist() == [1]
        assert chosen.column("n", [0]) == [7]
        assert np.array_equal(chosen.read([0])["x"], [array(7)])
    assert opened.get_or_compute("k8", lambda: 1)["n"] == 8
    assert opened.compute_many(["k8"], lambda _: []).found == ["k8"]
    assert opened.stats().artifacts == 8
    assert opened.describe().artifacts == 8
    assert not opened.verify().damage


@pytest.fixture
def path(sets: ArtifactSets) -> Path:
    """A set with a sealed pack, and one that its writer has left; no index."""
    with open_set(sets) as opened:
        opened.put_many((f"k{n}", {"x": array(n), "n": n}) for n in range(7))
        seal(opened)
        opened.put_many((f"k{n}", {"x": array(n), "n": n}) for n in range(7, 9))
        opened.delete("k0")
        opened.pin("k4")
        path = opened.path
    for each in path.glob("index.sqlite3*"):
        each.unlink()
    return path


@pytest.fixture
def reader(sets: ArtifactSets, path: Path) -> Iterator[ArtifactSet]:
    with open_set(sets, read_only=True) as opened:
        assert opened.path == path
        yield opened


def test_nothing_is_written(sets: ArtifactSets, path: Path) -> None:
    before = everything(path)
    with open_set(sets, read_only=True) as opened:
        use(opened)
        pickled = pickle.dumps((opened, opened["k1"], opened["k2"].handle("x")))
    again, sample, handle = pickle.loads(pickled)  # noqa: S301 - our own bytes
    assert sample["n"] == 1
    assert np.array_equal(handle.numpy(), array(2))
    with again:
        use(again)
        with pytest.raises(StoreUnwritableError):
            again.put("key", 1)
    del sample, handle
    assert everything(path) == before


def test_what_would_write_is_refused(reader: ArtifactSet, path: Path) -> None:
    before = everything(path)
    acts: list[Callable[[], object]] = [
        lambda: reader.put("key", 1),
        lambda: reader.put_many({"key": 1}),
        lambda: reader.delete("k1"),
        lambda: reader.pin("k1"),
        lambda: reader.unpin("k4"),
        lambda: reader.touch("k1"),
        lambda: reader.get_or_compute("key", lambda: pytest.fail("computed")),
        lambda: reader.compute_many(["key"], lambda _: pytest.fail("computed")),
        lambda: reader.take_in(packs_of(reader)[0]),
        lambda: reader.compact(force=True),
        lambda: reader.forget_failure("k1"),
        reader.evict,
        reader.sweep,
    ]
    for act in acts:
        with pytest.raises(StoreUnwritableError, match="opened for reading only") as caught:
            act()
        assert caught.value.hint == "Open it without read_only."
    assert everything(path) == before


@only_root
def test_a_set_of_another_user_in_folders_and_files_that_nobody_can_write(
    tmp_path: Path,
) -> None:
    with folder_of(None) as folder:
        sets = ArtifactSets(folder / "sets")
        with open_set(sets) as opened:
            opened.put_many((f"k{n}", {"x": array(n), "n": n}) for n in range(9))
            opened.delete("k0")
            opened.pin("k4")
        for each in [sets.root, *sets.root.rglob("*")]:
            each.chmod(0o555 if each.is_dir() else 0o444)
        before = everything(sets.root)

        def read() -> None:
            with open_set(sets, read_only=True) as opened:
                use(opened)

        read()
        with Child(read, user=NOBODY) as child:
            child.result()
        assert everything(sets.root) == before


def test_damage_is_told_and_left_as_it_is(reader: ArtifactSet, path: Path) -> None:
    for pack in packs_of(reader):
        data = bytearray(pack.read_bytes())
        at = data.find(array(1).tobytes())
        if at >= 0:
            data[at + 50] ^= 1
            pack.write_bytes(data)
    before = everything(path)
    for _ in range(2):
        assert reader.get("k1") is None
    with pytest.raises(OSError, match="k1 of latents is damaged"):
        reader.get_batch(["k1"])
    assert reader.verify().damaged == ["k1"]
    assert everything(path) == before


def test_a_set_that_is_not_there_is_not_made(sets: ArtifactSets) -> None:
    with pytest.raises(SetFormatError, match="There is no set 'latents' with this fingerprint"):
        open_set(sets, read_only=True)
    assert not sets.root.exists()


def test_it_follows_what_another_process_writes_and_compacts(
    reader: ArtifactSet, sets: ArtifactSets
) -> None:
    keys = [f"k{n}" for n in range(1, 9)]
    chosen = reader.select(keys)

    def write() -> None:
        with open_set(sets, pack_bytes=30_000) as opened:
            for turn in range(15):
                opened.put("turn", turn)
                opened.put_many((f"dead{n}", {"x": array(100 + n)}) for n in range(8))
                opened.delete_many(f"dead{n}" for n in range(8))
                assert opened.compact(force=True).packs

    seen = [0]
    with Child(write) as child:
        while seen[-1] < 14:
            assert reader.get_batch(keys)["n"] == list(range(1, 9))
            assert np.array_equal(chosen.read([7, 0])["x"], [array(8), array(1)])
            assert set(keys) <= set(reader)
            seen.append(reader.get("turn", seen[-1]))
            assert seen[-1] >= seen[-2]
        child.result()
    assert len(set(seen)) > 2
    assert stat.S_ISDIR(reader.path.stat().st_mode)
    assert set(reader) == {*keys, "turn"}
    assert reader.stats().damaged == 0


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "stop_at",
    ["pack: claimed", "pack: made", "pack: written", "pack: before footer",
     "pack: footer written", "compact: copied", "compact: before unlink", "compact: unlinked"],
)  # fmt: skip
def test_a_writer_that_is_stopped_blocks_no_reader(
    sets: ArtifactSets, path: Path, stop_at: str
) -> None:
    """Whatever it holds at that moment: its pack, the lock of the set, the key of compaction."""

    def stop(point: str) -> None:
        if point == stop_at:
            store_faults.hook = None
            os.kill(os.getpid(), signal.SIGSTOP)

    def write() -> None:
        store_faults.hook = stop
        with open_set(sets) as opened:
            opened.put("dead", {"x": array(50, 50_000)})
            opened.delete("dead")
            opened.compact(force=True)

    with Child(write) as child:
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        keys = [f"k{n}" for n in range(1, 9)]
        for read_only in (True, False):
            with row(read_only), open_set(sets, read_only=read_only) as opened:
                assert opened.get_batch(keys)["n"] == list(range(1, 9))
                assert opened.select([*keys, "k0"]).missing.tolist() == [8]
                assert set(opened) - {"dead"} == set(keys)
                assert opened.stats().artifacts >= 8
                assert not opened.verify().damage
        assert not sets.infos()[0].problem
        os.kill(child.pid, signal.SIGCONT)
        child.result()
    with open_set(sets, read_only=True) as opened:
        use(opened)
