"""Whatever was done to the user's files can be taken back, and leaves alone what others did."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import NoSpaceError, NothingToUndoError
from smartcache.store import Kind
from smartcache.store.store import Store
from smartcache.system import filesystems as store_room
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    blob_path,
    digest_of,
    edit,
    edit_with_time_set_back,
    inode_of,
    link_count,
    mode_of,
    read,
    row,
    snapshot,
    undo,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)
EDITED = b"EDITED" + WEIGHTS[6:]
Scenario = Callable[[Store, Path], None]


def adopt(store: Store, folder: Path) -> None:
    store.adopt(folder / "a.safetensors")


def adopt_one_name_and_replace_the_other(store: Store, folder: Path) -> None:
    """The other name is a link already: nothing is done to it, and undo must not split the two."""
    store.adopt(folder / "two names, one")
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
    kinds: tuple[Kind, ...] = ("auto", "hardlink", "copy")
    for kind in kinds:
        store.place(DIGEST, folder / f"new-{kind}.bin", kind=kind)


def adopt_and_remove(store: Store, folder: Path) -> None:
    adopt_and_replace(store, folder)
    store.remove(DIGEST)


def everything(store: Store, folder: Path) -> None:
    place_all_kinds(store, folder)
    store.replace(folder / "b.safetensors", DIGEST)
    replace_two_names(store, folder)
    store.place(digest_of(OTHER), folder / "sub" / "other.bin", kind="hardlink")
    store.adopt(folder / "sub" / "c.json")


SCENARIOS: list[Scenario] = [
    adopt, adopt_one_name_and_replace_the_other, replace, replace_two_names, adopt_and_replace,
    place_all_kinds, adopt_and_remove, everything,
]  # fmt: skip
scenarios = pytest.mark.parametrize("change", SCENARIOS)


def make_files(folder: Path) -> Path:
    """A folder in which every file differs in what undo must remember."""
    write(folder / "a.safetensors", mode=0o664, age=1000)
    write(folder / "b.safetensors", mode=0o644, age=2000)
    write(folder / "two names, one", OTHER, mode=0o646, age=3000)
    os.link(folder / "two names, one", folder / "two names, two")
    write(folder / "sub" / "c.json", b'{"a": 1}', mode=0o600, age=0)
    os.utime(folder / "b.safetensors", ns=(1, 1_234_567_890_123_456_789))
    return folder


@pytest.fixture
def files(folder: Path) -> Path:
    return make_files(folder)


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def in_one_batch(store: Store, folder: Path, change: Scenario) -> None:
    with store.batch("all at once"):
        change(store, folder)
    (batch,) = store.history()
    assert batch.label == "all at once"
    assert {done.note for done in store.plan_undo([batch.id]).execute()} == {""}


def last_again_and_again(store: Store, folder: Path, change: Scenario) -> None:
    change(store, folder)
    while store.history():
        assert {done.note for done in store.plan_undo(last=True).execute()} == {""}


def after_reopening(store: Store, folder: Path, change: Scenario) -> None:
    change(store, folder)
    store.close()
    with Store(store.root) as again:
        assert undo(again) == []


def after_the_index_was_lost(store: Store, folder: Path, change: Scenario) -> None:
    change(store, folder)
    store.close()
    for path in store.root.glob("index.sqlite3*"):
        path.unlink()
    with Store(store.root) as again:
        for done in again.plan_undo().execute():
            # Nothing on the disk says that a copy is one of ours: it stays.
            if done.change.kind in ("copy", "reflink"):
                done.change.path.unlink(missing_ok=True)
            else:
                assert done.note == ""


class TestExact:
    """Names, bytes, modes, owners, times to the nanosecond and link structure are as before."""

    @scenarios
    def test_undoing_everything(self, store: Store, files: Path, change: Scenario) -> None:
        before = snapshot(files)
        change(store, files)
        assert snapshot(files) != before
        assert undo(store) == []
        assert snapshot(files) == before
        assert store.history() == []
        assert not store.verify(full=True).has_damage

    @pytest.mark.usefixtures("no_exchange")
    @scenarios
    def test_undoing_without_exchange(self, store: Store, files: Path, change: Scenario) -> None:
        before = snapshot(files)
        change(store, files)
        assert undo(store) == []
        assert snapshot(files) == before

    @scenarios
    def test_undoing_in_every_other_way(self, tmp_path: Path, change: Scenario) -> None:
        ways = (in_one_batch, last_again_and_again, after_reopening, after_the_index_was_lost)
        for way in ways:
            files = make_files(tmp_path / way.__name__ / "files")
            before = snapshot(files)
            with row(way.__name__), Store(files.with_name("store")) as store:
                way(store, files, change)
                assert snapshot(files) == before

    def test_an_adopted_file_keeps_its_inode_unless_others_share_it(
        self, store: Store, files: Path
    ) -> None:
        path, other = files / "a.safetensors", files / "new.bin"
        sharing: dict[str, Callable[[], object]] = {
            "nobody": lambda: None,
            "a pin": lambda: store.pin(DIGEST),
            "a link": lambda: store.place(DIGEST, other, kind="hardlink"),
        }
        for name, share in sharing.items():
            with row(name):
                inode = inode_of(path)
                adopt(store, files)
                batch = store.history()[-1].id
                share()
                assert [done.note for done in store.plan_undo([batch]).execute()] == [""]
                assert mode_of(path) == 0o664
                if name == "nobody":
                    assert inode_of(path) == inode
                    assert list(store.blobs()) == []
                else:
                    assert inode_of(path) != inode_of(blob_path(store))
                    edit(path)
                    assert read(store) == WEIGHTS
                    assert not other.exists() or other.read_bytes() == WEIGHTS
                    other.unlink(missing_ok=True)
                    store.unpin(DIGEST)
                    store.plan_prune().execute()
                    write(path, mode=0o664)

    def test_a_link_that_took_the_place_of_an_old_name_is_not_left_writable(
        self, store: Store, files: Path
    ) -> None:
        """Two names before and two names now, but not the same two."""
        store.adopt(files / "two names, one")
        (batch,) = store.history()
        (files / "two names, two").unlink()
        store.place(digest_of(OTHER), files / "new.bin", kind="hardlink")
        store.plan_undo([batch.id]).execute()
        assert mode_of(files / "two names, one") == 0o646
        edit(files / "two names, one")
        assert (files / "new.bin").read_bytes() == OTHER

    def test_the_row_counts_the_links_that_remain(self, store: Store, files: Path) -> None:
        replace(store, files)
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        undo(store)
        assert store.get(DIGEST).links == link_count(blob_path(store)) == 1
        assert store.links_of(store.get(DIGEST)) == []

    def test_files_whose_blob_was_removed_are_given_back_too(self, tmp_path: Path) -> None:
        """The two names of one file, too, of which the last is alone when its turn comes."""
        ways: dict[str, Callable[[Store, str], object]] = {
            "removed": lambda store, digest: store.remove(digest),
            "deleted by somebody": lambda store, digest: blob_path(store, digest).unlink(),
        }
        scenarios = (adopt_and_replace, replace_two_names)
        for (name, remove), change in itertools.product(ways.items(), scenarios):
            files = make_files(tmp_path / name / change.__name__ / "files")
            before = snapshot(files)
            with row(name, change), Store(files.with_name("store")) as store:
                change(store, files)
                for blob in list(store.blobs()):
                    remove(store, blob.digest)
                undo(store)
                assert snapshot(files) == before


class TestLeftAlone:
    """What somebody else did since counts: it stays, and the reason is said."""

    def test_an_edited_file_keeps_its_bytes_and_gets_its_mode_back(
        self, store: Store, files: Path
    ) -> None:
        adopt(store, files)
        edit(files / "a.safetensors")
        undo(store)
        assert (files / "a.safetensors").read_bytes() == EDITED
        assert mode_of(files / "a.safetensors") == 0o664

    def test_a_mode_that_somebody_chose_since_stays(self, store: Store, files: Path) -> None:
        adopt(store, files)
        os.chmod(files / "a.safetensors", 0o600)
        undo(store)
        assert mode_of(files / "a.safetensors") == 0o600

    def test_an_edited_file_that_was_placed_or_replaced_stays(
        self, store: Store, files: Path
    ) -> None:
        path = files / "b.safetensors"
        kinds: tuple[Kind, ...] = ("hardlink", "copy")
        for harm in (edit, edit_with_time_set_back):
            for kind in kinds:
                with row(harm, kind):
                    store.put_stream([WEIGHTS])
                    store.place(DIGEST, path, kind=kind, overwrite=True)
                    harm(path)
                    (done, *_) = store.plan_undo(last=True).execute()
                    assert not done.is_undone
                    assert done.note
                    assert path.read_bytes() == EDITED
        store.put_stream([WEIGHTS])
        store.replace(write(path), DIGEST)
        edit(path)
        store.verify()
        store.put_stream([WEIGHTS])  # the blob is whole again, and the link is not its own
        (done,) = store.plan_undo(last=True).execute()
        assert not done.is_undone
        assert path.read_bytes() == EDITED

    @scenarios
    def test_files_renamed_over_ours_stay_and_deleted_ones_stay_deleted(
        self, tmp_path: Path, change: Scenario
    ) -> None:
        for is_deleted in (False, True):
            files = make_files(tmp_path / str(is_deleted) / "files")
            with row("deleted", is_deleted), Store(files.with_name("store")) as store:
                change(store, files)
                paths = all_files(files)
                for path in paths:
                    os.replace(write(path.with_name("theirs"), b"theirs"), path)
                    if is_deleted:
                        path.unlink()
                store.plan_undo().execute()
                assert sorted(all_files(files)) == ([] if is_deleted else sorted(paths))
                for path in all_files(files):
                    assert (path.read_bytes(), mode_of(path)) == (b"theirs", 0o644)

    def test_the_last_copy_of_placed_bytes_is_not_removed(self, store: Store, files: Path) -> None:
        store.put_stream([WEIGHTS])
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        store.remove(DIGEST)
        undo(store)
        assert (files / "new.bin").read_bytes() == WEIGHTS

    def test_what_cannot_be_undone_stays_in_the_history_and_stops_nothing(
        self, store: Store, files: Path
    ) -> None:
        placed = files / "new.bin"
        store.place(store.put_stream([OTHER]).digest, placed, kind="hardlink")
        os.replace(write(files / "x", b"theirs"), placed)
        adopt(store, files)
        first, _ = store.history()
        done = {each.change.op: each for each in store.plan_undo().execute()}
        assert {op: each.is_undone for op, each in done.items()} == {"adopt": True, "place": False}
        assert done["place"].note
        assert placed.read_bytes() == b"theirs"
        assert store.history() == [first]
        placed.unlink()
        assert undo(store) == []


class TestPlan:
    def test_nothing_to_undo_is_an_error(self, store: Store, files: Path) -> None:
        for last in (False, True):
            with pytest.raises(NothingToUndoError):
                store.plan_undo(last=last)
        adopt(store, files)
        (batch,) = store.history()
        with pytest.raises(NothingToUndoError) as caught:
            store.plan_undo([batch.id, "ffffffff"])
        assert vars(caught.value)["batch"] == "ffffffff"
        store.plan_undo([batch.id]).execute()
        for again in ([batch.id], []):
            with row(again), pytest.raises(NothingToUndoError):
                store.plan_undo(again, last=not again)

    def test_planning_changes_nothing_and_says_what_comes_last_first(
        self, store: Store, files: Path
    ) -> None:
        adopt_and_replace(store, files)
        before, history = snapshot(files), store.history()
        plan = store.plan_undo()
        assert [change.op for change in plan.changes] == ["replace", "adopt"]
        assert (snapshot(files), store.history()) == (before, history)
        first, second = history
        assert (first.label, first.ops, first.changes) == ("add --adopt", ("adopt",), 1)
        assert (second.label, second.ops, second.size) == ("replace", ("replace",), len(WEIGHTS))
        assert first.at <= second.at

    def test_the_space_needed_is_what_gets_its_own_bytes_and_is_checked_first(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adopt(store, files)
        assert store.plan_undo().needed_size == 0
        store.replace(files / "b.safetensors", DIGEST)
        for plan in (store.plan_undo(), store.plan_undo([store.history()[0].id])):
            assert (plan.needed_size, plan.freed_size) == (len(WEIGHTS), 0)
        before = snapshot(files)
        monkeypatch.setattr(store_room, "free_bytes", lambda _: len(WEIGHTS) - 1)
        with pytest.raises(NoSpaceError) as caught:
            store.plan_undo().execute()
        assert vars(caught.value)["needed"] == len(WEIGHTS)
        assert snapshot(files) == before
        assert len(store.history()) == 2

    def test_progress_is_told_every_byte_that_is_copied_or_hashed(self, tmp_path: Path) -> None:
        sizes = {adopt: 0, adopt_and_replace: len(WEIGHTS), replace_two_names: len(OTHER),
                 adopt_and_remove: len(WEIGHTS)}  # fmt: skip
        for change, size in sizes.items():
            files = make_files(tmp_path / change.__name__ / "files")
            with row(change.__name__), Store(files.with_name("store")) as store:
                change(store, files)
                watch = Watch()
                store.plan_undo().execute(watch)
                assert watch.done == watch.total == size

    def test_progress_is_told_while_a_file_is_copied(self, store: Store, folder: Path) -> None:
        large = bytes(20 << 20)
        paths = [write(folder / name, large) for name in ("a.gguf", "b.gguf")]
        store.adopt(paths[0])
        store.replace(paths[1], digest_of(large))
        before = inode_of(paths[1])
        seen: list[int] = []
        watch = Watch(lambda: seen.append(inode_of(paths[1])))
        store.plan_undo().execute(watch)
        assert seen == [before], "the first bytes are told before the file is in place"
        assert watch.names[:2] == ["b.gguf", "writing b.gguf to disk"]

    def test_pins_are_no_changes_to_undo(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.pin(DIGEST)
        store.unpin(DIGEST)
        assert store.history() == []
