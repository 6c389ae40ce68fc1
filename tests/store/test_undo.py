"""Whatever was done to the user's files can be taken back, and leaves alone what others did."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from smartcache.errors import FileSkippedError, NoSpaceError, NothingToUndoError
from smartcache.store import Kind
from smartcache.store.store import Store
from smartcache.store.undo import DAMAGED, RENAMED, REPLACED
from smartcache.system import filesystems
from tests.processes.children import Child
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    adopt,
    blob_path,
    come_to_write,
    dedup,
    digest_of,
    edit,
    edit_with_time_set_back,
    hidden,
    in_turn,
    inode_of,
    link_count,
    mode_of,
    read,
    row,
    snapshot,
    undo,
    write,
)
from tests.store.reflink_disks import reflink_disk
from tests.store.small_disks import PAGE, Disk, in_own_namespace, mount

if sys.platform != "linux":
    pytest.skip("links, leases and mounts", allow_module_level=True)

DIGEST = digest_of(WEIGHTS)
MOVE = 8192  # MS_MOVE
EDITED = b"EDITED" + WEIGHTS[6:]
ONE, TWO = "two names, one", "two names, two"
Scenario = Callable[[Store, Path], object]


def adopt_one(store: Store, folder: Path) -> None:
    adopt(store, folder / "a.safetensors")


def adopt_one_name_and_link_the_other(store: Store, folder: Path) -> None:
    """The other name is a link already: nothing is done to it, and undo must not split the two."""
    adopt(store, folder / ONE)
    dedup(store, folder / TWO)


def exchange_one(store: Store, folder: Path) -> None:
    store.put_stream([WEIGHTS])
    dedup(store, folder / "b.safetensors")


def exchange_two_names(store: Store, folder: Path) -> None:
    store.put_stream([OTHER])
    dedup(store, folder / ONE, folder / TWO)


def dedup_all(store: Store, folder: Path) -> None:
    dedup(store, *(folder / name for name in ("a.safetensors", "b.safetensors", ONE, TWO)))


def place_all_kinds(store: Store, folder: Path) -> None:
    adopt_one(store, folder)
    kinds: tuple[Kind, ...] = ("auto", "hardlink", "copy")
    for kind in kinds:
        store.place(DIGEST, folder / f"new-{kind}.bin", kind=kind)


def everything(store: Store, folder: Path) -> None:
    place_all_kinds(store, folder)
    dedup(store, folder / "b.safetensors")
    exchange_two_names(store, folder)
    store.place(digest_of(OTHER), folder / "sub" / "other.bin", kind="hardlink")
    adopt(store, folder / "sub" / "c.json")


SCENARIOS: list[Scenario] = [
    adopt_one, adopt_one_name_and_link_the_other, exchange_one, exchange_two_names, dedup_all,
    place_all_kinds, everything,
]  # fmt: skip
scenarios = pytest.mark.parametrize("change", SCENARIOS)


def make_files(folder: Path) -> Path:
    """A folder in which every file differs in what undo must remember."""
    write(folder / "a.safetensors", mode=0o664, age=1000)
    write(folder / "b.safetensors", mode=0o644, age=2000)
    write(folder / ONE, OTHER, mode=0o646, age=3000)
    os.link(folder / ONE, folder / TWO)
    write(folder / "sub" / "c.json", b'{"a": 1}', mode=0o600, age=0)
    os.utime(folder / "b.safetensors", ns=(1, 1_234_567_890_123_456_789))
    return folder


@pytest.fixture
def files(folder: Path) -> Path:
    return make_files(folder)


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def notes(store: Store, **more: object) -> set[str]:
    return {done.note for done in store.plan_undo(**more).execute()}  # type: ignore[arg-type]


def at_once(store: Store) -> None:
    assert undo(store) == []


def by_batch(store: Store) -> None:
    assert notes(store, batches=[batch.id for batch in store.history()]) == {""}


def last_again_and_again(store: Store) -> None:
    while store.history():
        assert notes(store, last=True) == {""}


def first_again_and_again(store: Store) -> None:
    while history := store.history():
        assert notes(store, batches=[history[0].id]) == {""}


def after_reopening(store: Store) -> None:
    store.close()
    with Store(store.root) as again:
        assert undo(again) == []


def after_the_index_was_lost(store: Store) -> None:
    store.close()
    for path in store.root.glob("index.sqlite3*"):
        path.unlink()
    after_reopening(store)


def by_another_process(store: Store) -> None:
    with Child(lambda: undo(store)) as child:
        assert child.result() == []


def after_blobs_were_removed(store: Store) -> None:
    """Also of the two names of one file, of which the last is alone when its turn comes."""
    for blob in list(store.blobs()):
        store.remove(blob.digest)
    undo(store)


def after_somebody_deleted_blobs(store: Store) -> None:
    for blob in list(store.blobs()):
        blob.path.unlink()
    undo(store)


WAYS: list[Callable[[Store], None]] = [
    at_once, by_batch, last_again_and_again, first_again_and_again, after_reopening,
    after_the_index_was_lost, by_another_process,
]  # fmt: skip


class TestExact:
    """Names, bytes, modes, owners, times to the nanosecond and link structure are as before."""

    @scenarios
    @pytest.mark.parametrize("exchange", ["exchange", "no_exchange"])
    def test_undoing_in_every_way(
        self, tmp_path: Path, change: Scenario, exchange: str, request: pytest.FixtureRequest
    ) -> None:
        if exchange == "no_exchange":
            request.getfixturevalue(exchange)
        for way in WAYS if exchange == "exchange" else WAYS[:1]:
            files = make_files(tmp_path / way.__name__ / "files")
            before = snapshot(files)
            with row(way.__name__), Store(files.with_name("store")) as store:
                change(store, files)
                assert snapshot(files) != before
                way(store)
                assert snapshot(files) == before
                if way is not after_reopening and way is not after_the_index_was_lost:
                    assert store.history() == []
                    assert not store.verify(full=True).has_damage

    @pytest.mark.parametrize("way", [after_blobs_were_removed, after_somebody_deleted_blobs])
    @pytest.mark.parametrize("change", [exchange_one, exchange_two_names, dedup_all])
    def test_files_whose_blob_is_gone_are_given_back_too(
        self, store: Store, files: Path, way: Callable[[Store], None], change: Scenario
    ) -> None:
        before = snapshot(files)
        change(store, files)
        way(store)
        assert store.history() == []
        if change is exchange_two_names:  # each has a copy of its own now
            assert inode_of(files / ONE) != inode_of(files / TWO)
            os.unlink(files / TWO)
            os.link(files / ONE, files / TWO)
        assert snapshot(files) == before

    @pytest.mark.parametrize("apart", ["linked", "undone"])
    def test_names_of_one_file_are_one_again_also_if_one_came_after_the_other(
        self, store: Store, files: Path, apart: str
    ) -> None:
        before = snapshot(files)
        store.put_stream([OTHER])
        if apart == "linked":
            for name in (ONE, TWO):
                dedup(store, files / name)
            assert len(store.history()) == 2
        else:
            dedup(store, files / ONE, files / TWO)
            assert notes(store, paths=[files / TWO]) == {""}
            assert inode_of(files / ONE) != inode_of(files / TWO)
        assert undo(store) == []
        assert snapshot(files) == before

    def test_what_another_process_undoes_meanwhile_is_undone(
        self, store: Store, files: Path, at_point: AtPoint
    ) -> None:
        before = snapshot(files)
        dedup_all(store, files)
        at_point("copied", lambda: by_another_process(store))
        assert {done.outcome for done in store.plan_undo().execute()} == {"undone"}
        assert snapshot(files) == before

    def test_an_adopted_file_keeps_its_inode_unless_others_share_it(
        self, store: Store, files: Path
    ) -> None:
        path, other = files / "a.safetensors", files / "new.bin"
        sharing: dict[str, Callable[[], object]] = {
            "nobody": lambda: None,
            "a pin": lambda: store.pin(DIGEST),
            "a link": lambda: store.place(DIGEST, other, kind="hardlink"),
            "a stranger": lambda: os.link(path, other),
        }
        for name, share in sharing.items():
            with row(name):
                inode = inode_of(path)
                adopt_one(store, files)
                batch = store.history()[-1].id
                share()
                assert notes(store, batches=[batch]) == {""}
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
        adopt(store, files / ONE)
        (batch,) = store.history()
        (files / TWO).unlink()
        store.place(digest_of(OTHER), files / "new.bin", kind="hardlink")
        assert notes(store, batches=[batch.id]) == {""}
        assert mode_of(files / ONE) == 0o646
        edit(files / ONE)
        assert (files / "new.bin").read_bytes() == OTHER


def link_as(kind: str, store: Store, files: Path) -> None:
    """Make a link or a copy of the file `b.safetensors`."""
    paths = [files / "a.safetensors", files / "b.safetensors"]
    store.put_stream([WEIGHTS])
    if kind in ("hardlink", "copy"):
        store.place(DIGEST, paths[1], kind=kind, overwrite=True)  # type: ignore[arg-type]
    else:
        dedup(store, *paths[0 if kind == "one of two" else 1 :])


KINDS = ("exchange", "one of two", "hardlink", "copy")
linked_as = pytest.mark.parametrize("kind", KINDS)


class TestLeftAlone:
    """What somebody else did since counts: it stays, and the reason is said."""

    def test_a_file_of_the_user_where_a_copy_of_ours_was_is_not_taken_away(
        self, store: Store, folder: Path
    ) -> None:
        """It has the same bytes, and when it is itself again nothing else has them."""
        path = folder / "a.safetensors"
        store.place(store.put_stream([WEIGHTS]).digest, path, kind="copy")
        path.unlink()
        store.plan_prune().execute()
        adopt(store, write(path))
        undo(store)
        assert (path.read_bytes(), link_count(path), store.history()) == (WEIGHTS, 1, [])

    def test_a_file_that_was_moved_before_another_came_in_its_place_keeps_its_entry(
        self, store: Store, folder: Path
    ) -> None:
        a, b, moved = (write(folder / f"{name}.safetensors") for name in ("a", "b", "moved"))
        moved.unlink()
        dedup(store, a, b)
        b.rename(moved)
        dedup(store, write(b, mode=0o600))
        assert undo(store) == [RENAMED]
        assert (mode_of(a), mode_of(b), mode_of(moved)) == (0o644, 0o600, 0o444)
        b.unlink()
        moved.rename(b)
        assert undo(store) == []
        assert (mode_of(b), inode_of(a) == inode_of(b), store.history()) == (0o644, False, [])

    def test_an_edited_file_keeps_its_bytes_and_gets_its_mode_back_unless_somebody_chose_one(
        self, store: Store, files: Path
    ) -> None:
        path = files / "a.safetensors"
        adopt_one(store, files)
        edit_with_time_set_back(path)
        undo(store)
        assert (path.read_bytes(), mode_of(path)) == (EDITED, 0o664)
        assert store.digest_of(path).digest == digest_of(EDITED)
        adopt_one(store, files)
        path.chmod(0o600)
        undo(store)
        assert mode_of(path) == 0o600

    @linked_as
    @pytest.mark.parametrize("harm", [edit, edit_with_time_set_back])
    def test_an_edited_link_or_copy_stays(
        self, store: Store, files: Path, kind: str, harm: Callable[[Path], None]
    ) -> None:
        path = files / "b.safetensors"
        link_as(kind, store, files)
        harm(path)
        for _ in range(2):
            found = {(done.outcome, done.note) for done in store.plan_undo().execute()}
            assert found == {("left", REPLACED if kind == "copy" else DAMAGED)}
            if kind == "copy":
                break
            store.put_stream([WEIGHTS])  # the blob is whole again, and the link is not its own
        assert path.read_bytes() == EDITED

    @pytest.mark.parametrize(
        ("point", "kind"),
        [("own copy", "one of two"), *(("journal: undoing", kind) for kind in KINDS)],
    )
    def test_a_file_that_takes_the_place_in_the_last_moment_stays(
        self, store: Store, files: Path, kind: str, at_point: AtPoint, point: str
    ) -> None:
        path, theirs = files / "b.safetensors", write(files.with_name("theirs"), b"theirs")
        link_as(kind, store, files)
        at_point(point, lambda: os.replace(theirs, path))
        done = {each.path.name: (each.outcome, each.note) for each in store.plan_undo().execute()}
        assert done[path.name] == ("left", REPLACED)
        assert (path.read_bytes(), mode_of(path)) == (b"theirs", 0o644)
        assert store.history() == []
        assert hidden(files) == []

    def test_a_file_that_comes_right_after_is_not_taken_for_ours(
        self, store: Store, files: Path, at_point: AtPoint
    ) -> None:
        path, theirs = files / "new.bin", write(files.with_name("theirs"), OTHER, age=9999)
        store.put_stream([WEIGHTS])
        store.place(DIGEST, path, kind="hardlink")
        at_point("in place", lambda: os.replace(theirs, path))
        assert undo(store) == []
        assert store.digest_of(path).digest == digest_of(OTHER)

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
                found = {(done.outcome, done.note) for done in store.plan_undo().execute()}
                assert found == {("gone", "") if is_deleted else ("left", REPLACED)}
                assert sorted(all_files(files)) == ([] if is_deleted else sorted(paths))
                for path in all_files(files):
                    assert (path.read_bytes(), mode_of(path)) == (b"theirs", 0o644)
                assert store.history() == []
                assert [blob.names for blob in store.blobs()] == [0] * len(list(store.blobs()))

    def test_the_last_copy_of_placed_bytes_is_not_removed(self, store: Store, files: Path) -> None:
        store.put_stream([WEIGHTS])
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        store.remove(DIGEST)
        undo(store)
        assert (files / "new.bin").read_bytes() == WEIGHTS
        assert mode_of(files / "new.bin") == 0o644

    def test_what_fails_is_named_stays_in_the_history_and_stops_nothing(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, real = snapshot(files), os.link
        dedup_all(store, files)

        def fail_for_one(source: str, target: str, **more: int) -> None:
            if "b.safetensors" in str(target):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(source, target, **more)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", fail_for_one)
            done = {each.path.name: each for each in store.plan_undo().execute()}
        assert {name: each.outcome for name, each in done.items()} == {
            "a.safetensors": "undone", "b.safetensors": "failed", ONE: "undone",
        }  # fmt: skip
        assert "Input/output error" in done["b.safetensors"].note
        (batch,) = store.history()
        assert batch.changes == 1
        assert undo(store) == []
        assert snapshot(files) == before

    @pytest.mark.usefixtures("with_leases")
    def test_what_a_late_writer_wrote_is_kept_under_a_name_that_says_so(
        self, store: Store, folder: Path, at_point: AtPoint, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The writer opened the old file, and yet another file has taken its name since."""
        store.put_stream([WEIGHTS])
        path, kept = folder / "a.safetensors", []
        for number in range(2):
            with write(path).open("rb") as file:
                old = Path(f"/proc/self/fd/{file.fileno()}")
                theirs = write(folder.with_name("theirs"), b"theirs")
                act = in_turn(lambda o=old: come_to_write(o), lambda t=theirs: os.replace(t, path))  # type: ignore[misc]
                at_point("exchanged", act)
                (result,) = dedup(store, path)
            assert result.outcome == "skipped"
            which = " 2" if number else ""
            kept.append(folder / f"a (kept by smartcache{which}).safetensors")
            assert sorted(folder.iterdir()) == sorted((*kept, path))
            assert path.read_bytes() == b"theirs"
            assert (kept[-1].read_bytes(), mode_of(kept[-1])) == (WEIGHTS, 0o644)
        assert store.kept == kept
        assert [text for text in caplog.messages if text.startswith("kept")] == [
            f"kept: {each}" for each in kept
        ]
        assert store.history() == []


class TestElsewhere:
    """A file that is somewhere else now is not gone: its entry stays until it is undone there."""

    @pytest.fixture
    def folders(self, store: Store, folder: Path) -> tuple[Path, Path]:
        """Two folders of files that were linked."""
        for name in ("x", "y"):
            write(folder / name / "a.bin", mode=0o640 if name == "x" else 0o644, age=500)
        store.put_stream([OTHER])
        write(folder / "y" / "b.bin", OTHER, age=700)
        return folder / "x", folder / "y"

    @pytest.mark.parametrize("is_pruned", [False, True])
    @pytest.mark.parametrize("way", ["both back", "one back", "where they are"])
    def test_of_a_renamed_folder_nothing_is_lost_and_it_is_undone_back_or_where_it_is(
        self, store: Store, folder: Path, folders: tuple[Path, Path], is_pruned: bool, way: str
    ) -> None:
        before = snapshot(folder)
        dedup(store, *sorted(folder.rglob("*.bin")), allow=frozenset({"mode"}))
        moved = folders[1:] if way == "one back" else folders
        there = [each.rename(each.with_name(f"{each.name} elsewhere")) for each in moved]
        if is_pruned:
            store.plan_prune().execute()
        now, count = snapshot(folder), 2 if way == "one back" else 3
        done = [each for each in store.plan_undo().execute() if each.outcome != "undone"]
        assert [(each.outcome, each.note) for each in done] == [("renamed", RENAMED)] * count
        assert [batch.changes for batch in store.history()] == [count]
        assert way == "one back" or snapshot(folder) == now
        if is_pruned:
            store.plan_prune().execute()
        if way == "where they are":
            plan = store.plan_undo(paths=there, recursive=True)
            assert {each.outcome for each in plan.execute()} == {"undone"}
        for old, new in zip(moved, there, strict=True):
            new.rename(old)
        assert way == "where they are" or undo(store) == []
        assert snapshot(folder) == before
        assert store.history() == []

    @pytest.mark.parametrize("theirs", [b"theirs", WEIGHTS], ids=["other bytes", "same bytes"])
    def test_a_file_of_somebody_else_at_a_known_path_closes_no_entry(
        self, store: Store, folder: Path, folders: tuple[Path, Path], theirs: bytes
    ) -> None:
        """Neither the row of the file that was there, nor that of any other."""
        before = snapshot(folder)
        dedup(store, *sorted(folder.rglob("a.bin")), allow=frozenset({"mode"}))
        path, away = folders[1] / "a.bin", folder / "away.bin"
        path.rename(away)
        write(path, theirs)
        done = {each.path: each.outcome for each in store.plan_undo().execute()}
        assert done == {folders[0] / "a.bin": "undone", path: "renamed"}
        assert (path.read_bytes(), mode_of(path), mode_of(away)) == (theirs, 0o644, 0o440)
        assert [batch.changes for batch in store.history()] == [1]
        away.rename(path)
        assert undo(store) == []
        assert snapshot(folder) == before

    @pytest.mark.parametrize("kind", ["symlink", "folder", "links"])
    def test_a_folder_that_is_another_one_now_is_not_touched(
        self, store: Store, folder: Path, folders: tuple[Path, Path], kind: str
    ) -> None:
        before = snapshot(folder)
        dedup(store, *sorted(folder.rglob("a.bin")), allow=frozenset({"mode"}))
        other = write(folder.with_name("private") / "a.bin", WEIGHTS, mode=0o400).parent
        theirs = snapshot(other)
        folders[1].rename(folder / "away")
        if kind == "symlink":
            folders[1].symlink_to(other)
        elif kind == "folder":
            other.rename(folders[1])
            other = folders[1]
        else:
            folders[1].mkdir()
            os.symlink(other / "a.bin", folders[1] / "a.bin")
        done = {each.path: each for each in store.plan_undo().execute()}
        assert done[folders[0] / "a.bin"].outcome == "undone"
        assert done[folders[1] / "a.bin"].outcome == ("failed" if kind == "symlink" else "renamed")
        assert snapshot(other) == theirs
        assert [batch.changes for batch in store.history()] == [1]
        (plan,) = store.plan_undo(paths=[folder / "away" / "a.bin"]).execute()
        assert plan.outcome == "undone"
        assert store.history() == []
        assert snapshot(folder / "away")["a.bin"][2:] == before["y/a.bin"][2:]
        assert snapshot(other) == theirs

    def test_a_drive_is_known_wherever_it_is_mounted(self, tmp_path: Path) -> None:
        there, root = tmp_path / "there", tmp_path / "store"
        there.mkdir()
        with reflink_disk("ext4", tmp_path) as drive:
            folder = drive / "models"
            before = snapshot(write(folder / "a.bin", mode=0o640, age=500).parent)
            before |= snapshot(write(folder / "b.bin", mode=0o640, age=600).parent)
            with Store(root) as store:
                store.add_pool(drive / "pool")
                dedup(store, *folder.iterdir())

            def unplugged() -> set[tuple[str, str]]:
                subprocess.run(["umount", "--lazy", drive], check=True)
                with Store(root) as store:
                    done = store.plan_undo().execute()
                    assert [batch.changes for batch in store.history()] == [2]
                    return {(str(each.outcome), each.note) for each in done}

            def mounted_elsewhere() -> dict[str, tuple[object, ...]]:
                mount(str(drive), there, "", MOVE, "")
                with Store(root) as store:
                    assert undo(store) == []
                    assert store.history() == []
                    assert [pool.root for pool in store.pools()] == [root, there / "pool"]
                return snapshot(there / "models")

            away = "its drive is not mounted; left as it is"
            assert in_own_namespace(unplugged) == {("failed", away)}
            assert in_own_namespace(mounted_elsewhere) == before


class TestPaths:
    """`undo PATH`: a file that shares its bytes becomes an independent, writable one."""

    @pytest.fixture
    def linked(self, folder: Path) -> tuple[Path, Path]:
        """Two names of one file, of which no store knows."""
        a = write(folder / "a.bin", mode=0o444)
        os.link(a, folder / "b.bin")
        return a, folder / "b.bin"

    @pytest.fixture
    def shared(self, store: Store, folder: Path) -> tuple[Path, Path]:
        """Two files that were made one, with what they were before in the journal."""
        a = write(folder / "a.safetensors", mode=0o640, age=500)
        b = write(folder / "b.safetensors", mode=0o640, age=100)
        dedup(store, a, b)
        assert (inode_of(a), mode_of(a)) == (inode_of(b), 0o440)
        return a, b

    def separate(self, store: Store, *paths: Path) -> None:
        done = store.plan_undo(paths=paths).execute()
        assert {(each.outcome, each.note) for each in done} <= {("undone", "")}

    def test_one_of_two_is_itself_again_and_the_store_knows_it(
        self, store: Store, shared: tuple[Path, Path]
    ) -> None:
        a, b = shared
        self.separate(store, b)
        assert store.names_of(DIGEST) == [a]
        assert store.get(DIGEST).links == link_count(a) == 2
        assert [batch.changes for batch in store.history()] == [1]
        assert not store.verify(full=True).has_damage
        self.separate(store, a)
        assert (store.history(), mode_of(a), mode_of(b)) == ([], 0o640, 0o640)
        assert inode_of(a) != inode_of(b)
        store.plan_prune().execute()
        assert list(store.blobs()) == []

    def test_one_that_was_adopted_again_after_rm_leaves_its_former_twin(
        self, store: Store, shared: tuple[Path, Path]
    ) -> None:
        a, b = shared
        store.remove(DIGEST)
        adopt(store, a)
        self.separate(store, a)
        assert inode_of(a) != inode_of(b) == inode_of(blob_path(store))

    def test_one_that_was_written_to_and_adopted_anew_is_no_damaged_blob_any_more(
        self, store: Store, folder: Path
    ) -> None:
        adopt(store, a := write(folder / "a.safetensors"))
        edit(a)
        assert adopt(store, a)[0].outcome == "became"
        edited = a.read_bytes()
        self.separate(store, a)
        assert (a.read_bytes(), link_count(a), mode_of(a) & 0o200) == (edited, 1, 0o200)

    @pytest.mark.parametrize("lost", ["journal", "whole store"])
    def test_without_an_entry_it_gets_its_bytes_and_what_the_link_shows(
        self, store: Store, shared: tuple[Path, Path], lost: str
    ) -> None:
        a, b = shared
        os.setxattr(a, "user.note", b"mine")
        before = os.lstat(a)
        store.close()
        if lost == "journal":
            for path in store.root.glob("journal.*"):
                path.unlink()
        else:
            shutil.rmtree(store.root)
        with Store(store.root) as again:
            self.separate(again, *shared)
        for path in shared:
            after = os.lstat(path)
            assert (path.read_bytes(), mode_of(path), link_count(path)) == (WEIGHTS, 0o640, 1)
            assert (after.st_mtime_ns, after.st_gid) == (before.st_mtime_ns, before.st_gid)
            assert os.getxattr(path, "user.note") == b"mine"
        write(a, OTHER)
        assert b.read_bytes() == WEIGHTS
        assert sorted(path.name for path in a.parent.iterdir()) == [a.name, b.name]

    def test_a_link_that_was_put_there_becomes_a_file_and_is_not_removed(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        paths = [folder / name for name in ("a.bin", "b.bin")]
        for path in paths:
            store.place(digest, path, kind="hardlink")
        self.separate(store, paths[0])
        assert undo(store) == []
        assert (paths[0].read_bytes(), mode_of(paths[0])) == (WEIGHTS, 0o644)
        assert not paths[1].exists()

    def test_of_names_of_one_file_the_other_stays_and_the_last_needs_no_copy(
        self, store: Store, linked: tuple[Path, Path]
    ) -> None:
        a, b = linked
        inode, watch = inode_of(a), Watch()
        assert store.plan_undo(paths=linked).needed_size == 2 * len(WEIGHTS)
        store.plan_undo(paths=[a]).execute(watch)
        assert watch.total == watch.done == len(WEIGHTS)
        assert (mode_of(a), mode_of(b), inode_of(b)) == (0o644, 0o444, inode)
        assert store.plan_undo(paths=linked).needed_size == 0
        self.separate(store, *linked)
        assert (mode_of(b), inode_of(b)) == (0o644, inode)

    def test_what_shares_nothing_or_is_not_meant_is_left_out_with_the_reason(
        self, store: Store, folder: Path
    ) -> None:
        write(folder / "own.bin")
        path = write(folder / "sub" / "a.safetensors")
        adopt(store, path)
        (folder / "sub" / "link").symlink_to(path)
        write(folder / ".git" / "object", mode=0o444)
        theirs = write(folder / "theirs.bin")
        with pytest.raises(FileSkippedError, match="is a folder"):
            store.plan_undo(paths=[folder])
        plan = store.plan_undo(paths=[folder, store.root.parent], recursive=True)
        assert ([change.path for change in plan.changes], plan.files) == ([path], ())
        os.mkfifo(folder / "fifo")
        reasons = {
            blob_path(store): "belongs to a store", folder / "sub" / "link": "is a symlink",
            folder / "fifo": "not a regular file",
        }  # fmt: skip
        if os.geteuid() == 0:
            os.chown(theirs, 12345, -1)
            reasons[theirs] = "belongs to another user"
        for each, reason in reasons.items():
            with row(each.name):
                ((_, why),) = store.plan_undo(paths=[each]).skipped
                assert reason in why

    @pytest.mark.usefixtures("with_leases")
    def test_one_that_is_written_or_was_replaced_since_the_plan_stays(
        self, store: Store, linked: tuple[Path, Path], at_point: AtPoint
    ) -> None:
        a, b = linked
        plan = store.plan_undo(paths=[a])
        b.chmod(0o644)
        with open(b, "ab"):
            (done,) = store.plan_undo(paths=[a]).execute()
        assert (done.outcome, "open for writing" in done.note) == ("failed", True)
        assert inode_of(a) == inode_of(b)
        write(a.with_name("new"), OTHER).replace(a)
        (done,) = plan.execute()
        assert "another file is there now" in done.note
        assert a.read_bytes() == OTHER
        os.link(a, c := a.with_name("c.bin"))
        theirs = write(a.with_name("new"), b"theirs")
        at_point("own copy", lambda: os.replace(theirs, c))
        (done,) = store.plan_undo(paths=[c]).execute()
        assert (done.outcome, done.note) == ("left", REPLACED)
        assert (c.read_bytes(), hidden(a.parent)) == (b"theirs", [])


def count(act: Callable[[], object]) -> Counter[str]:
    """How often functions are called, of Python and of the system, while somebody acts."""
    found: Counter[str] = Counter()

    def see(frame: FrameType, event: str, called: object) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_name if event == "call" else getattr(called, "__name__", "")
            found[name] += 1

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


class TestPlan:
    def test_nothing_to_undo_is_an_error(self, store: Store, files: Path) -> None:
        for last in (False, True):
            with pytest.raises(NothingToUndoError):
                store.plan_undo(last=last)
        adopt_one(store, files)
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
        store.pin(store.put_stream([b"pins are no changes"]).digest)
        adopt_one(store, files)
        dedup(store, files / "b.safetensors")
        before, history = snapshot(files), store.history()
        plan = store.plan_undo()
        assert [change.how for change in plan.changes] == ["exchange", "become"]
        assert (snapshot(files), store.history()) == (before, history)
        first, second = history
        assert (first.label, first.hows, first.changes) == ("add --adopt", ("become",), 1)
        assert (second.label, second.hows, second.size) == ("dedup", ("exchange",), len(WEIGHTS))
        assert first.at <= second.at

    def test_progress_is_told_every_byte_that_is_copied(self, tmp_path: Path) -> None:
        """And with the first bytes, not when a file is in its place."""
        sizes = {adopt_one: 0, exchange_two_names: len(OTHER), dedup_all: len(WEIGHTS)}
        for change, size in sizes.items():
            files = make_files(tmp_path / change.__name__ / "files")
            with row(change.__name__), Store(files.with_name("store")) as store:
                change(store, files)
                path, names = files / "b.safetensors", list[int]()
                inode, watch = inode_of(path), Watch(lambda p=path, n=names: n.append(inode_of(p)))  # type: ignore[misc]
                plan = store.plan_undo()
                plan.execute(watch)
                assert watch.done == watch.total == plan.needed_size == size
                assert names == ([inode] if size else [])
                assert (path.name in watch.names) is (change is dedup_all)

    @pytest.mark.parametrize("is_renamed", [False, True])
    def test_history_and_plan_of_many_changes_read_the_table_once(
        self, tmp_path: Path, is_renamed: bool
    ) -> None:
        """And look at each file no more than a few times."""
        calls: list[list[int]] = []
        for number in (10, 110):
            folder = tmp_path / str(number) / "models"
            paths = [write(folder / f"{n}.bin", (n // 2).to_bytes(2)) for n in range(number)]
            with Store(folder.with_name("store")) as store:
                dedup(store, *paths)
            if is_renamed:
                folder.rename(folder.with_name("renamed"))
            with Store(folder.with_name("store")) as store:
                of_history, of_plan = count(store.history), count(store.plan_undo)
            looks = [of["lstat"] + of["stat"] for of in (of_history, of_plan)]
            calls.append([of_history["execute"], of_plan["execute"], *looks])
        few, many = calls
        assert min(few) > 0
        assert many[:3] == few[:3], "history looks at no file"
        assert many[3] - few[3] <= 100 * 2.5


class TestRoom:
    """Room is asked for where it is needed, before the first byte."""

    @pytest.mark.parametrize("by_paths", [False, True])
    def test_what_gets_its_own_bytes_needs_room(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch, by_paths: bool
    ) -> None:
        a, b = files / "a.safetensors", files / "b.safetensors"
        adopt(store, a)
        assert store.plan_undo().needed_size == 0
        dedup(store, b)
        plans = [store.plan_undo(), store.plan_undo([store.history()[0].id])]
        if by_paths:
            plans = [store.plan_undo(paths=[b]), store.plan_undo(paths=[a, b])]
        before = snapshot(files)
        for plan in plans:
            assert (plan.needed_size, plan.freed_size) == (len(WEIGHTS), 0)
            with monkeypatch.context() as patch:
                patch.setattr(filesystems, "free_bytes", lambda _: len(WEIGHTS) - 1)
                with pytest.raises(NoSpaceError) as caught:
                    plan.execute()
            assert vars(caught.value)["needed"] == len(WEIGHTS)
        assert snapshot(files) == before
        assert len(store.history()) == 2

    def test_it_is_needed_where_the_file_is_and_nowhere_else(self, tmp_path: Path) -> None:
        def work() -> tuple[int, int]:
            disk = Disk(tmp_path / "disk", 500 * PAGE)
            with Store(tmp_path / "store") as store:
                dedup(store, *(write(tmp_path / name) for name in ("a.bin", "b.bin")))
                disk.fill()
                with pytest.raises(NoSpaceError, match="The copy needs") as caught:
                    store.place(DIGEST, disk.point / "a.pt", kind="copy")
                assert vars(caught.value)["needed"] == len(WEIGHTS)
                assert os.listdir(disk.point) == ["filler"], "refused before it begins"
                assert undo(store) == []
            disk.clear()
            with Store(disk.point / "store") as store:
                dedup(store, *(write(disk.point / name) for name in ("a.bin", "b.bin")))
                disk.fill(but=5)
                with pytest.raises(NoSpaceError, match=f"at {disk.point}") as caught:
                    store.plan_undo().execute()
                assert [batch.changes for batch in store.history()] == [2]
                disk.clear()
                assert undo(store) == []
                return vars(caught.value)["needed"], vars(caught.value)["free"]

        needed, free = in_own_namespace(work)
        assert needed == len(WEIGHTS) > free
