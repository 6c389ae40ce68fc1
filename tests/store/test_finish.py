"""What a dead process has left is finished by looking: nobody's bytes go, whoever came since.

Kills at every point, and what comes between a kill and the recovery, are in
`tests.processes.test_operations`.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.store.store import Store
from smartcache.system import kernel
from tests.processes.children import NOBODY, Child, folder_of
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    adopt,
    blob_path,
    come_to_write,
    dedup,
    edit,
    hidden,
    inode_of,
    kill,
    killed,
    link_count,
    mode_of,
    read,
    row,
    snapshot,
    undo,
    write,
)

if sys.platform != "linux":
    pytest.skip("leases", allow_module_level=True)

EDITED = b"EDITED" + WEIGHTS[6:]
Meanwhile = Callable[[Path, AtPoint], None]


@pytest.fixture
def path(folder: Path) -> Path:
    return write(folder / "a.safetensors")


def dying(work: Callable[[Store, Path], object], path: Path, root: Path, point: str) -> None:
    def run() -> None:
        with Store(root) as store:
            work(store, path)

    killed(run, point)


def a_write(path: Path, _: AtPoint) -> None:
    edit(path)


def a_writer_while_it_is_hashed(path: Path, at_point: AtPoint) -> None:
    at_point("hashed beside", lambda: come_to_write(path))


@pytest.mark.parametrize("come", [a_write, a_writer_while_it_is_hashed])
@pytest.mark.usefixtures("with_leases")
def test_a_file_that_was_to_be_a_blob_is_given_back_if_somebody_comes(
    come: Meanwhile, store: Store, path: Path, at_point: AtPoint
) -> None:
    dying(adopt, path, store.root, "linked")
    come(path, at_point)
    assert store.recover() == []
    assert path.read_bytes() == (EDITED if come is a_write else WEIGHTS)
    assert mode_of(path) == 0o644
    assert not blob_path(store).exists()
    assert store.history() == []


@pytest.mark.parametrize("come", [a_write, a_writer_while_it_is_hashed])
@pytest.mark.usefixtures("with_leases", "digest")
def test_the_old_file_is_kept_if_somebody_comes(
    come: Meanwhile, store: Store, path: Path, at_point: AtPoint
) -> None:
    inode = inode_of(path)
    dying(dedup, path, store.root, "exchanged")
    (beside,) = hidden(path.parent)
    come(path.with_name(beside), at_point)
    store.recover()
    (old,) = (each for each in path.parent.iterdir() if inode_of(each) == inode)
    assert old.read_bytes() == (EDITED if come is a_write else WEIGHTS)
    assert read(store) == WEIGHTS
    assert store.recover() == []
    assert os.listdir(path.parent) == [path.name]
    assert path.read_bytes() == (EDITED if come is a_write else WEIGHTS)


@pytest.mark.usefixtures("digest")
def test_who_changes_something_else_finishes_it_first(store: Store, path: Path) -> None:
    dying(dedup, path, store.root, "exchanged")
    adopt(store, write(path.with_name("b.safetensors"), OTHER))
    assert hidden(path.parent) == []
    assert store.unfinished() == []
    assert inode_of(path) == inode_of(blob_path(store))


@pytest.mark.usefixtures("digest")
def test_the_old_file_has_its_name_again_if_the_blob_is_gone(store: Store, path: Path) -> None:
    before = snapshot(path.parent)
    dying(dedup, path, store.root, "exchanged")
    path.unlink()
    blob_path(store).unlink()
    assert store.recover() == []
    assert snapshot(path.parent) == before


@pytest.mark.parametrize("point", ["read-only", "linked", "temporary", "exchanged"])
def test_while_another_folder_is_in_its_place_nothing_is_closed(
    store: Store, path: Path, point: str
) -> None:
    if point in ("temporary", "exchanged"):
        store.put_stream([WEIGHTS])
    folder, away = path.parent, path.parent.with_name("away")
    before = snapshot(folder)
    dying(dedup, path, store.root, point)
    folder.rename(away)
    write(folder / path.name, OTHER)
    theirs = snapshot(folder)
    (waiting,) = store.recover()
    assert str(path) in waiting
    assert snapshot(folder) == theirs
    (folder / path.name).unlink()
    folder.rmdir()
    away.rename(folder)
    assert store.recover() == []
    assert (undo(store) if store.history() else []) == []
    assert snapshot(folder) == before


@pytest.mark.parametrize("has_unnamed", [True, False])
@pytest.mark.parametrize(("leases", "come"), [("with_leases", come_to_write), ("no_leases", edit)])
def test_a_file_that_is_written_while_it_gets_its_own_bytes_stays(
    leases: str, come: Callable[[Path], None], has_unnamed: bool, store: Store, path: Path,
    at_point: AtPoint, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It shares them with another name that the store knows nothing of."""
    request.getfixturevalue(leases)
    if not has_unnamed:
        monkeypatch.setattr(kernel, "open_unnamed", lambda *_: None)
    second = path.with_name("second")
    os.link(path, second)
    at_point("copied", lambda: come(path))
    (done,) = store.plan_undo(paths=[path]).execute()
    assert not done.is_undone
    assert inode_of(path) == inode_of(second)
    assert sorted(os.listdir(path.parent)) == [path.name, second.name]
    (done,) = store.plan_undo(paths=[path]).execute()
    assert done.is_undone
    assert inode_of(path) != inode_of(second)
    assert path.read_bytes() == second.read_bytes()
    assert sorted(os.listdir(path.parent)) == [path.name, second.name]


def half_linked(root: Path, folder: Path, number: int = 1) -> list[Path]:
    """Leave files behind whose process died right after the last names were exchanged."""
    paths = [write(folder / f"{n}.safetensors", bytes([n + 1]) * 70_000) for n in range(number)]
    with Store(root) as store:
        for path in paths:
            store.put_stream([path.read_bytes()])

    def work() -> None:
        with Store(root) as store:
            dedup(store, *paths)

    killed(work, "exchanged", number)
    assert len(hidden(folder)) == number
    return paths


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("point", ["hashed beside", "finish: beside settled"])
def test_after_ctrl_c_or_an_error_the_next_recovery_goes_on_and_no_other_file_waits(
    point: str, error: BaseException, tmp_path: Path, folder: Path, at_point: AtPoint
) -> None:
    """The user's old file lies under a hidden name until then."""

    def fail() -> None:
        raise error

    paths = half_linked(tmp_path / "store", folder, 3)
    with Store(tmp_path / "store") as store:
        at_point(point, fail)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                store.recover()
        else:
            (stuck,) = store.recover()
            assert store.unfinished() == [stuck]
            assert len(hidden(folder)) == (point == "hashed beside")
            adopt(store, write(folder / "other.safetensors", OTHER))
            assert store.recover() == hidden(folder) == []
    with Store(tmp_path / "store") as store:
        assert store.recover() == hidden(folder) == []
        assert undo(store) == []
    assert [path.read_bytes() for path in paths] == [bytes([n]) * 70_000 for n in (1, 2, 3)]
    assert {(mode_of(path), link_count(path)) for path in paths} == {(0o644, 1)}


def test_an_undo_that_was_killed_inside_its_copy_goes_on_though_inode_numbers_are_used_again(
    disk_path: Path, rounds: Callable[[int], int]
) -> None:
    """ext4 gives the new file the number of the old one at once; the journal has that number."""
    for seed in range(rounds(25)):
        chance, folder, root = random.Random(seed), disk_path / f"u{seed}", disk_path / f"s{seed}"
        paths = [write(folder / f"{n}.safetensors") for n in range(chance.randrange(2, 5))]
        before = snapshot(folder)
        with Store(root) as store:
            dedup(store, *paths)

            def work(root: Path = root) -> None:
                with Store(root) as store:
                    store.plan_undo().execute()

            kill(work, nth=chance.randrange(1, 6 * len(paths)))
        with row("seed", seed), Store(root) as store:
            assert store.recover() == hidden(folder) == []
            assert all(path.read_bytes() == WEIGHTS for path in paths)
            if store.history():
                assert undo(store) == []
            assert snapshot(folder) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_store_stays_until_every_file_is_back() -> None:
    """One folder is closed to its owner at first."""
    with folder_of(NOBODY) as home:

        def work() -> tuple[object, ...]:
            good, closed = home / "good", home / "closed"
            for number, folder in enumerate((good, closed)):
                for name in "ab":
                    write(folder / f"{name}.safetensors", bytes([number]) * 70_000)
            before = snapshot(good), snapshot(closed)
            with Store(home / "store") as store:
                dedup(store, *(f / f"{n}.safetensors" for f in (good, closed) for n in "ab"))
                closed.chmod(0o555)
                first = {each.outcome for each in store.plan_eject().execute()}
                is_there = store.has_journal
            closed.chmod(0o755)
            with Store(home / "store") as store:
                results = store.plan_eject().execute()
            after = snapshot(good), snapshot(closed)
            is_done = all(each.is_undone for each in results)
            return first, is_there, is_done, (home / "store").exists(), after == before

        with Child(work, user=NOBODY) as child:
            assert child.result() == ({"undone", "failed"}, True, True, False, True)
