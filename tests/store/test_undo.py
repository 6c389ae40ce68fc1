from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api import NoSpaceError, NothingToUndoError, Store, Undone, store_room
from tests.api import links_Kind as Kind
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    digest_of,
    edit,
    inode_of,
    link_count,
    mode_of,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)


def blob_path(store: Store, digest: str = DIGEST) -> Path:
    return Path(store.volume.layout.blob(digest))


def is_complete(results: list[Undone]) -> bool:
    assert [done.note for done in results if not done.is_undone] == []
    return bool(results)


def adopt(store: Store, folder: Path) -> None:
    store.adopt(folder / "a.safetensors")


def adopt_two_names(store: Store, folder: Path) -> None:
    store.adopt(folder / "two names, one")


def adopt_one_name_and_replace_the_other(store: Store, folder: Path) -> None:
    """The other name is a link already: nothing is done to it, and undo must not split the two."""
    adopt_two_names(store, folder)
    store.replace(folder / "two names, two", digest_of(OTHER))


def replace(store: Store, folder: Path) -> None:
    store.put_stream([WEIGHTS])
    store.replace(folder / "b.safetensors", DIGEST)


def replace_two_names(store: Store, folder: Path) -> None:
    store.put_stream([OTHER])
    for name in ("two names, one", "two names, two"):
        store.replace(folder / name, digest_of(OTHER))


def adopt_and_replace(store: Store, folder: Path) -> None:
    adopt(store, folder)
    store.replace(folder / "b.safetensors", DIGEST)


def place_all_kinds(store: Store, folder: Path) -> None:
    adopt(store, folder)
    kinds: tuple[Kind, ...] = ("auto", "hardlink", "symlink", "copy")
    for kind in kinds:
        store.place(DIGEST, folder / f"new-{kind}.bin", kind=kind)


def move(store: Store, folder: Path) -> None:
    store.put_file(folder / "a.safetensors", how="move")


def move_and_place(store: Store, folder: Path) -> None:
    move(store, folder)
    store.place(DIGEST, folder / "sub" / "new.safetensors")


def adopt_and_move(store: Store, folder: Path) -> None:
    adopt(store, folder)
    move(store, folder)


def adopt_and_forget(store: Store, folder: Path) -> None:
    adopt_and_replace(store, folder)
    store.forget(DIGEST)


def everything(store: Store, folder: Path) -> None:
    place_all_kinds(store, folder)
    store.replace(folder / "b.safetensors", DIGEST)
    replace_two_names(store, folder)
    store.place(digest_of(OTHER), folder / "sub" / "other.bin", kind="hardlink")
    store.put_file(folder / "sub" / "c.json", how="move")


SCENARIOS = [
    adopt,
    adopt_two_names,
    adopt_one_name_and_replace_the_other,
    replace,
    replace_two_names,
    adopt_and_replace,
    place_all_kinds,
    move,
    move_and_place,
    adopt_and_move,
    adopt_and_forget,
    everything,
]
scenarios = pytest.mark.parametrize("change", SCENARIOS, ids=lambda change: change.__name__)
Scenario = Callable[[Store, Path], None]


@pytest.fixture
def files(folder: Path) -> Path:
    """A folder in which every file differs in what undo must remember."""
    write(folder / "a.safetensors", mode=0o664, age=1000)
    write(folder / "b.safetensors", mode=0o644, age=2000)
    write(folder / "two names, one", OTHER, mode=0o646, age=3000)
    os.link(folder / "two names, one", folder / "two names, two")
    write(folder / "sub" / "c.json", b'{"a": 1}', mode=0o600, age=0)
    os.utime(folder / "b.safetensors", ns=(1, 1_234_567_890_123_456_789))
    return folder


class TestExact:
    """Names, bytes, modes, owners, times to the nanosecond and link structure are as before."""

    @scenarios
    def test_undoing_everything(self, store: Store, files: Path, change: Scenario) -> None:
        before = snapshot(files)
        change(store, files)
        assert snapshot(files) != before
        assert is_complete(store.plan_undo().execute())
        assert snapshot(files) == before
        assert store.history() == []
        assert not store.verify(full=True).has_damage

    @scenarios
    def test_undoing_one_batch(self, store: Store, files: Path, change: Scenario) -> None:
        before = snapshot(files)
        with store.batch("all at once"):
            change(store, files)
        (batch,) = store.history()
        assert batch.label == "all at once"
        assert is_complete(store.plan_undo([batch.id]).execute())
        assert snapshot(files) == before

    @scenarios
    def test_undoing_after_reopening(self, store: Store, files: Path, change: Scenario) -> None:
        before = snapshot(files)
        change(store, files)
        store.close()
        with Store(store.root) as again:
            assert is_complete(again.plan_undo().execute())
        assert snapshot(files) == before

    @scenarios
    def test_undoing_after_the_index_was_lost(
        self, store: Store, files: Path, change: Scenario
    ) -> None:
        before = snapshot(files)
        change(store, files)
        store.close()
        for path in store.root.glob("index.sqlite3*"):
            path.unlink()
        with Store(store.root) as again:
            results = again.plan_undo().execute()
        after = snapshot(files)
        for done in results:
            # Nothing on the disk says that a copy is one of ours: it stays.
            if done.change.kind in ("copy", "reflink"):
                after.pop(done.change.path.name, None)
            else:
                assert done.note == ""
        assert after == before

    @scenarios
    def test_undoing_the_last_again_and_again(
        self, store: Store, files: Path, change: Scenario
    ) -> None:
        change(store, files)
        while store.history():
            assert is_complete(store.plan_undo(last=True).execute())
        names = {"a.safetensors", "b.safetensors", "two names, one", "two names, two"}
        assert {path.name for path in files.iterdir()} == {*names, "sub"}
        for name, mode in (("a.safetensors", 0o664), ("b.safetensors", 0o644)):
            assert mode_of(files / name) == mode
            assert (files / name).read_bytes() == WEIGHTS
        for name in ("two names, one", "two names, two"):
            assert mode_of(files / name) == 0o646
            assert (files / name).read_bytes() == OTHER
        assert (files / "sub" / "c.json").read_bytes() == b'{"a": 1}'

    @pytest.mark.usefixtures("no_exchange")
    @scenarios
    def test_undoing_without_exchange(self, store: Store, files: Path, change: Scenario) -> None:
        before = snapshot(files)
        change(store, files)
        assert is_complete(store.plan_undo().execute())
        assert snapshot(files) == before

    def test_an_adopted_file_that_shares_with_nobody_keeps_its_inode(
        self, store: Store, files: Path
    ) -> None:
        inode = inode_of(files / "a.safetensors")
        adopt(store, files)
        store.plan_undo().execute()
        assert inode_of(files / "a.safetensors") == inode
        assert not blob_path(store).exists()
        assert list(store.blobs()) == []

    def test_an_adopted_file_that_is_pinned_gets_its_own_bytes(
        self, store: Store, files: Path
    ) -> None:
        before = snapshot(files)
        adopt(store, files)
        store.pin(DIGEST)
        assert is_complete(store.plan_undo().execute())
        assert snapshot(files) == before
        assert inode_of(files / "a.safetensors") != inode_of(blob_path(store))
        with store.open(DIGEST) as file:
            assert file.read() == WEIGHTS

    def test_an_adopted_file_that_others_share_gets_its_own_bytes(
        self, store: Store, files: Path
    ) -> None:
        adopt(store, files)
        (batch,) = store.history()
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        assert is_complete(store.plan_undo([batch.id]).execute())
        edit(files / "a.safetensors")
        assert (files / "new.bin").read_bytes() == WEIGHTS
        assert inode_of(files / "new.bin") == inode_of(blob_path(store))

    def test_a_link_that_took_the_place_of_an_old_name_is_not_left_writable(
        self, store: Store, files: Path
    ) -> None:
        """Two names before and two names now, but not the same two."""
        store.adopt(files / "two names, one")
        (batch,) = store.history()
        (files / "two names, two").unlink()
        store.place(digest_of(OTHER), files / "new.bin", kind="hardlink")
        assert is_complete(store.plan_undo([batch.id]).execute())
        assert mode_of(files / "two names, one") == 0o646
        edit(files / "two names, one")
        assert (files / "new.bin").read_bytes() == OTHER

    def test_symlinks_keep_the_blob_of_an_adopted_file(self, store: Store, files: Path) -> None:
        adopt(store, files)
        (batch,) = store.history()
        store.place(DIGEST, files / "new.bin", kind="symlink")
        store.plan_undo([batch.id]).execute()
        edit(files / "a.safetensors")
        assert (files / "new.bin").read_bytes() == WEIGHTS

    def test_the_row_counts_the_links_that_remain(self, store: Store, files: Path) -> None:
        store.put_stream([WEIGHTS])
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        store.replace(files / "b.safetensors", DIGEST)
        store.plan_undo().execute()
        assert store.get(DIGEST).links == link_count(blob_path(store)) == 1
        assert store.links_of(store.get(DIGEST)) == []

    @pytest.mark.parametrize("to_trash", [True, False])
    def test_files_that_shared_a_forgotten_blob_are_given_back_too(
        self, store: Store, files: Path, to_trash: bool
    ) -> None:
        before = snapshot(files)
        adopt_and_replace(store, files)
        store.forget(DIGEST, to_trash=to_trash)
        store.plan_prune().execute()
        store.plan_undo().execute()
        assert snapshot(files) == before

    def test_files_that_shared_a_blob_somebody_deleted_are_given_back_too(
        self, store: Store, files: Path
    ) -> None:
        before = snapshot(files)
        adopt_and_replace(store, files)
        blob_path(store).unlink()
        assert is_complete(store.plan_undo().execute())
        assert snapshot(files) == before

    def test_a_forgotten_blob_comes_back_with_its_aliases(self, store: Store) -> None:
        blob = store.put_stream([WEIGHTS], algorithms=["sha256"])
        aliases = store.aliases_of(blob)
        store.forget(DIGEST)
        assert store.find("sha256", aliases["sha256"]) is None
        assert is_complete(store.plan_undo().execute())
        assert store.aliases_of(store.get(DIGEST)) == aliases
        assert list(store.volume.layout.trash.iterdir()) == []
        assert store.get(DIGEST).is_held_only_by_smartcache

    def test_a_forgotten_blob_that_was_put_again_is_one_blob(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.forget(DIGEST)
        store.put_stream([WEIGHTS])
        assert is_complete(store.plan_undo().execute())
        assert list(store.volume.layout.trash.iterdir()) == []
        assert not store.verify(full=True).has_damage


class TestLeftAlone:
    """What somebody else did since counts: it stays, and the reason is said."""

    def test_an_edited_file_keeps_its_bytes_and_gets_its_mode_back(
        self, store: Store, files: Path
    ) -> None:
        adopt(store, files)
        edit(files / "a.safetensors")
        store.plan_undo().execute()
        assert (files / "a.safetensors").read_bytes() == b"EDITED" + WEIGHTS[6:]
        assert mode_of(files / "a.safetensors") == 0o664

    @pytest.mark.parametrize("kind", ["hardlink", "copy"])
    @pytest.mark.parametrize("hidden", [False, True], ids=["", "time set back"])
    def test_an_edited_file_that_was_placed_is_not_removed(
        self, store: Store, files: Path, kind: Kind, hidden: bool
    ) -> None:
        store.put_stream([WEIGHTS])
        path = files / "new.bin"
        store.place(DIGEST, path, kind=kind)
        st = path.stat()
        edit(path)
        if hidden:
            os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        (done,) = store.plan_undo().execute()
        assert not done.is_undone
        assert done.note
        assert path.read_bytes() == b"EDITED" + WEIGHTS[6:]

    def test_an_edited_link_is_not_removed_when_the_blob_was_healed_since(
        self, store: Store, files: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        edit(files / "new.bin")
        store.verify()
        store.put_stream([WEIGHTS])
        (done,) = store.plan_undo().execute()
        assert not done.is_undone
        assert (files / "new.bin").read_bytes() == b"EDITED" + WEIGHTS[6:]

    def test_an_edited_file_that_was_replaced_stays(self, store: Store, files: Path) -> None:
        replace(store, files)
        edit(files / "b.safetensors")
        (done,) = store.plan_undo().execute()
        assert not done.is_undone
        assert (files / "b.safetensors").read_bytes() == b"EDITED" + WEIGHTS[6:]

    @scenarios
    def test_files_renamed_over_ours_stay(
        self, store: Store, files: Path, change: Scenario
    ) -> None:
        change(store, files)
        paths = [p for p in files.rglob("*") if not p.is_dir() or p.is_symlink()]
        for path in paths:
            os.replace(write(path.with_name("theirs"), b"theirs"), path)
        store.plan_undo().execute()
        for path in paths:
            assert path.read_bytes() == b"theirs"
            assert mode_of(path) == 0o644

    @scenarios
    def test_files_that_were_deleted_stay_deleted_except_those_we_moved(
        self, store: Store, files: Path, change: Scenario
    ) -> None:
        change(store, files)
        moved = {"a.safetensors"} if change in (move, move_and_place, adopt_and_move) else set()
        moved |= {"c.json"} if change is everything else set()
        for path in [p for p in files.rglob("*") if not p.is_dir() or p.is_symlink()]:
            path.unlink()
        store.plan_undo().execute()
        assert {p.name for p in files.rglob("*") if not p.is_dir()} == moved

    def test_a_moved_file_does_not_overwrite_what_took_its_place(
        self, store: Store, files: Path
    ) -> None:
        move(store, files)
        write(files / "a.safetensors", OTHER)
        (done,) = store.plan_undo().execute()
        assert not done.is_undone
        assert (files / "a.safetensors").read_bytes() == OTHER
        with store.open(DIGEST) as file:
            assert file.read() == WEIGHTS
        (files / "a.safetensors").unlink()
        assert is_complete(store.plan_undo().execute())
        assert (files / "a.safetensors").read_bytes() == WEIGHTS

    def test_the_last_copy_of_placed_bytes_is_not_removed(self, store: Store, files: Path) -> None:
        store.put_stream([WEIGHTS])
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        store.forget(DIGEST, to_trash=False)
        store.plan_undo().execute()
        assert (files / "new.bin").read_bytes() == WEIGHTS

    def test_a_folder_that_is_gone_is_no_reason_to_stop(self, store: Store, files: Path) -> None:
        store.put_file(files / "sub" / "c.json", how="move")
        (files / "sub").rmdir()
        adopt(store, files)
        done = {d.change.path.name: d for d in store.plan_undo().execute()}
        assert done["a.safetensors"].is_undone
        assert not done["c.json"].is_undone
        (files / "sub").mkdir()
        assert is_complete(store.plan_undo().execute())
        assert (files / "sub" / "c.json").read_bytes() == b'{"a": 1}'

    def test_a_damaged_file_in_the_trash_is_not_brought_back(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.forget(DIGEST)
        edit(store.volume.layout.trash / DIGEST)
        (done,) = store.plan_undo().execute()
        assert not done.is_undone
        assert (store.volume.layout.trash / DIGEST).exists()

    def test_what_is_not_undone_stays_in_the_history(self, store: Store, files: Path) -> None:
        move(store, files)
        write(files / "a.safetensors", OTHER)
        before = store.history()
        store.plan_undo().execute()
        assert store.history() == before


class TestPlan:
    def test_nothing_to_undo_is_an_error(self, store: Store, files: Path) -> None:
        for last in (False, True):
            with pytest.raises(NothingToUndoError):
                store.plan_undo(last=last)
        adopt(store, files)
        store.plan_undo().execute()
        with pytest.raises(NothingToUndoError):
            store.plan_undo(last=True)

    def test_an_unknown_or_undone_batch_is_an_error(self, store: Store, files: Path) -> None:
        adopt(store, files)
        (batch,) = store.history()
        with pytest.raises(NothingToUndoError) as caught:
            store.plan_undo([batch.id, "ffffffff"])
        assert vars(caught.value)["batch"] == "ffffffff"
        store.plan_undo([batch.id]).execute()
        with pytest.raises(NothingToUndoError):
            store.plan_undo([batch.id])

    def test_planning_changes_nothing(self, store: Store, files: Path) -> None:
        everything(store, files)
        before = snapshot(files)
        history = store.history()
        store.plan_undo()
        assert snapshot(files) == before
        assert store.history() == history

    def test_changes_are_undone_last_first(self, store: Store, files: Path) -> None:
        adopt_and_replace(store, files)
        plan = store.plan_undo()
        assert [change.op for change in plan.changes] == ["replace", "adopt"]

    def test_the_space_needed_is_what_gets_its_own_bytes(self, store: Store, files: Path) -> None:
        adopt(store, files)
        assert store.plan_undo().needed_size == 0
        store.replace(files / "b.safetensors", DIGEST)
        assert store.plan_undo().needed_size == len(WEIGHTS)
        adoption = store.history()[0]
        assert store.plan_undo([adoption.id]).needed_size == len(WEIGHTS)
        assert store.plan_undo().freed_size == 0

    def test_without_space_nothing_is_begun(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adopt_and_replace(store, files)
        before = snapshot(files)
        monkeypatch.setattr(store_room, "free_bytes", lambda _: len(WEIGHTS) - 1)
        plan = store.plan_undo()
        with pytest.raises(NoSpaceError) as caught:
            plan.execute()
        assert vars(caught.value)["needed"] == len(WEIGHTS)
        assert snapshot(files) == before
        assert len(store.history()) == 2

    @pytest.mark.parametrize(
        ("change", "size"),
        [
            (adopt, 0),
            (adopt_and_replace, len(WEIGHTS)),
            (replace_two_names, len(OTHER)),
            (move, len(WEIGHTS)),
            (adopt_and_forget, 2 * len(WEIGHTS)),
        ],
    )
    def test_progress_is_told_every_byte_that_is_copied_or_hashed(
        self, change: Callable[[Store, Path], None], size: int, store: Store, files: Path
    ) -> None:
        change(store, files)
        watch = Watch()
        store.plan_undo().execute(watch)
        assert watch.done == watch.total == size

    def test_progress_is_told_while_a_file_is_copied(self, store: Store, tmp_path: Path) -> None:
        large = bytes(20 << 20)
        for name in ("a.gguf", "b.gguf"):
            write(tmp_path / "large" / name, large)
        store.adopt(tmp_path / "large" / "a.gguf")
        store.replace(tmp_path / "large" / "b.gguf", digest_of(large))
        before = inode_of(tmp_path / "large" / "b.gguf")
        seen: list[int] = []
        watch = Watch(lambda: seen.append(inode_of(tmp_path / "large" / "b.gguf")))
        store.plan_undo().execute(watch)
        assert seen == [before], "the first bytes are told before the file is in place"
        assert watch.names[:2] == ["b.gguf", "writing b.gguf to disk"]

    def test_history_says_what_was_done(self, store: Store, files: Path) -> None:
        adopt_and_replace(store, files)
        first, second = store.history()
        assert (first.label, first.ops, first.changes) == ("add --adopt", ("adopt",), 1)
        assert (second.label, second.ops, second.size) == ("replace", ("replace",), len(WEIGHTS))
        assert first.at <= second.at

    def test_pins_are_no_changes_to_undo(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.pin(DIGEST)
        store.unpin(DIGEST)
        assert store.history() == []

    def test_an_undone_move_is_not_pinned_again_by_a_rebuild(
        self, store: Store, files: Path
    ) -> None:
        move(store, files)
        store.plan_undo().execute()
        store.rebuild()
        assert store.holders_of(store.get(DIGEST)) == []
