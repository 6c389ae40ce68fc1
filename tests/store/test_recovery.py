"""What is begun is finished, whatever interrupts recovery; and leaving waits for the last file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import NothingToUndoError
from smartcache.store.changes import replace as recovery
from smartcache.store.store import Store
from smartcache.system.hashing import hash_file
from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.killing import Moment, die_at, in_child, was_killed
from tests.store.files import OTHER, WEIGHTS, digest_of, inode_of, mode_of, snapshot, write

DIGEST = digest_of(WEIGHTS)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def killed(work: Callable[[], object], point: str) -> None:
    """Do some work in a child that is killed at a point of it."""

    def run() -> None:
        die_at(Moment(point, 1))
        work()

    assert was_killed(in_child(run)), f"{point} was not reached"


def half_replaced(root: Path, folder: Path) -> Path:
    """Leave a replacement behind whose process died right after the names were exchanged."""
    path = write(folder / "b.safetensors")

    def work() -> None:
        with Store(root) as store:
            store.put_stream([WEIGHTS])
            store.replace(path, DIGEST)

    killed(work, "replace: exchanged")
    assert hidden(folder)
    return path


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".smartcache")]


class TestInterrupted:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error")])
    def test_the_next_open_goes_on_after_ctrl_c_or_an_error(
        self,
        tmp_path: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: type[BaseException] | BaseException,
    ) -> None:
        """The user's old file lies under a hidden name until then."""
        root = tmp_path / "store"
        path = half_replaced(root, folder)

        def fail(*_: object, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(recovery, "hash_file", fail)
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    Store(root)
            else:
                Store(root).close()
        assert hidden(folder)
        assert [name for name in os.listdir(root / "tmp") if name.startswith("batch-")]
        with Store(root) as store:
            assert hidden(folder) == []
            assert os.listdir(root / "tmp") == []
            assert path.read_bytes() == WEIGHTS
            assert [done.outcome for done in store.plan_undo().execute()] == ["undone"]
        assert mode_of(path) == 0o644

    def test_one_file_that_cannot_be_finished_does_not_keep_the_others_waiting(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "store"
        paths = [write(folder / f"{name}.safetensors", bytes([name]) * 70_000) for name in range(3)]
        digests = [digest_of(path.read_bytes()) for path in paths]

        def work() -> None:
            with Store(root) as store:
                for path in paths:
                    store.put_stream([path.read_bytes()])
                list(store.replace_many(zip(paths, digests, strict=True)))

        killed(work, "replace: old removed")
        assert len(hidden(folder)) == 2
        calls: list[int] = []

        def fail_once(descriptor: int) -> object:
            calls.append(descriptor)
            if len(calls) == 1:
                raise OSError(5, os.strerror(5))
            return hash_file(descriptor)

        monkeypatch.setattr(recovery, "hash_file", fail_once)
        Store(root).close()
        assert len(hidden(folder)) == 1
        Store(root).close()
        assert hidden(folder) == []
        assert [digest_of(path.read_bytes()) for path in paths] == digests


@needs_root
def test_a_finished_file_of_a_killed_process_is_cleared_by_an_ordinary_user() -> None:
    """It is read-only, which stops everybody but root from opening it for writing."""
    with folder_of(NOBODY) as home:

        def put() -> None:
            with Store(home / "store") as store:
                store.put_stream([WEIGHTS])

        def work() -> list[str]:
            killed(put, "put: synced")
            assert os.listdir(home / "store" / "tmp")
            Store(home / "store").close()
            return os.listdir(home / "store" / "tmp")

        with Child(work, user=NOBODY) as child:
            assert child.result() == []


class TestEject:
    @needs_root
    def test_the_store_stays_until_every_file_is_back(self) -> None:
        with folder_of(NOBODY) as home:
            root = home / "store"

            def work() -> tuple[object, ...]:
                good, closed = home / "good", home / "closed"
                for number, folder in enumerate((good, closed)):
                    write(folder / "a.safetensors", bytes([number]) * 70_000)
                    write(folder / "b.safetensors", bytes([number]) * 70_000)
                before = snapshot(good), snapshot(closed)
                with Store(root) as store:
                    for folder in (good, closed):
                        blob = store.adopt(folder / "a.safetensors")
                        store.replace(folder / "b.safetensors", blob.digest)
                    closed.chmod(0o555)
                    results = store.plan_eject().execute()
                first = sorted((r.change.path.name, r.outcome) for r in results if r.note)
                note = next(r.note for r in results if r.outcome == "failed")
                is_kept = (root / "journal.jsonl").exists()
                closed.chmod(0o755)
                with Store(root) as store:
                    results = store.plan_eject().execute()
                is_done = all(each.is_undone for each in results)
                after = snapshot(good), snapshot(closed)
                return first, note, is_kept, is_done, root.exists(), after == before

            with Child(work, user=NOBODY) as child:
                first, note, is_kept, is_done, is_there, is_same = child.result()
            # The adopted file waits for the one that shares its bytes.
            assert ("b.safetensors", "failed") in first  # type: ignore[operator]
            assert "closed" in str(note)
            assert (is_kept, is_done, is_there, is_same) == (True, True, False, True)

    def test_twins_are_one_file_again_after_the_store_went_to_another_filesystem(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        write(folder / "a.safetensors", mode=0o640)
        os.link(folder / "a.safetensors", folder / "twin of a.bin")
        write(folder / "b.safetensors", mode=0o640)
        os.link(folder / "b.safetensors", folder / "twin of b.bin")
        write(folder / "c.safetensors", OTHER)
        before = snapshot(folder)
        blob = store.adopt(folder / "a.safetensors")
        for name in ("b.safetensors", "twin of b.bin"):
            store.replace(folder / name, blob.digest)
        store.adopt(folder / "c.safetensors")
        inode = inode_of(folder / "a.safetensors")
        store.close()
        shutil.move(store.root, elsewhere / "store")
        with Store(elsewhere / "store") as moved:
            results = moved.plan_eject().execute()
            assert {each.note for each in results} == {""}
        assert snapshot(folder) == before
        assert inode_of(folder / "a.safetensors") == inode
        assert not (elsewhere / "store").exists()


class TestGone:
    @pytest.mark.parametrize("op", ["adopt", "replace", "place"])
    def test_an_entry_whose_file_was_deleted_closes_by_itself(
        self, store: Store, folder: Path, op: str
    ) -> None:
        path = folder / "b.safetensors"
        if op == "place":
            store.place(store.put_stream([WEIGHTS]).digest, path, kind="hardlink")
        elif op == "replace":
            store.replace(write(path), store.put_stream([WEIGHTS]).digest)
        else:
            store.adopt(write(path))
        path.unlink()
        (result,) = store.plan_undo().execute()
        assert (result.outcome, result.is_undone) == ("gone", True)
        assert store.history() == []
        with pytest.raises(NothingToUndoError):
            store.plan_undo()

    def test_prune_closes_entries_of_folders_that_were_deleted(
        self, store: Store, folder: Path
    ) -> None:
        store.adopt(write(folder / "sub" / "a.safetensors"))
        store.adopt(write(folder / "b.safetensors", OTHER))
        (folder / "sub" / "a.safetensors").unlink()
        (folder / "sub").rmdir()
        store.plan_prune().execute()
        assert [each.changes for each in store.history()] == [1]

    def test_a_file_on_a_drive_that_is_not_mounted_is_not_gone(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        """The folder is there, as a mount point is, but on another filesystem."""
        digest = store.put_stream([WEIGHTS]).digest
        path = elsewhere / "drive" / "a.safetensors"
        path.parent.mkdir()
        store.place(digest, path, kind="copy")
        os.rename(elsewhere / "drive", elsewhere / "unmounted")
        (elsewhere / "drive").symlink_to(folder)
        (result,) = store.plan_undo().execute()
        assert not result.is_undone
        (elsewhere / "drive").unlink()
        os.rename(elsewhere / "unmounted", elsewhere / "drive")
        (result,) = store.plan_undo().execute()
        assert (result.outcome, path.exists()) == ("undone", False)
