"""What `dedup` plans, what it does, which file survives, and what it leaves alone, and why."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("leases, mounts and owners", allow_module_level=True)

from smartcache.errors import SmartcacheError
from smartcache.folders.dedup import plan_dedup
from smartcache.store.changes.userfile import Allowance
from smartcache.store.records import Trust
from smartcache.store.store import Store
from smartcache.store.volume import volume_root
from smartcache.system.filesystems import mount_of
from smartcache.system.hashing import hash_file
from tests.folders.deduping import (
    ALL,
    allocated_in,
    deduplicated,
    inodes_of,
    leftovers,
    open_store,
    planned,
    reasons,
    scanned,
    touched,
    undo_everything,
)
from tests.folders.trees import Machine, content, make_machine, webui, write
from tests.processes.children import NOBODY, Child, folder_of
from tests.store.files import Watch, edit, inode_of, link_count, mode_of, snapshot
from tests.store.reflink_disks import DISKS, reflink_disk
from tests.store.small_disks import Disk, bind, in_own_namespace

DATA = content(1)
SIZE = len(DATA)
OLD, NEW = 1_600_000_000, 1_700_000_000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder where duplicates become hard links."""
    if mount_of(tmp_path).fstype in ("btrfs", "xfs") and os.geteuid() == 0:
        pytest.skip("reflinks are made here")
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def pair(folder: Path) -> tuple[Path, Path]:
    """Two equal files; the first is the older one, which survives."""
    return write(folder / "a.pt", DATA, mtime=OLD), write(folder / "b.pt", DATA, mtime=NEW)


@pytest.fixture
def machine(folder: Path) -> Machine:
    return make_machine(folder / "home")


class TestPlanning:
    def test_every_copy_but_the_survivor_is_to_be_replaced_and_nothing_is_changed(
        self, store: Store, machine: Machine
    ) -> None:
        before = snapshot(machine.home)
        times = {path: os.lstat(path).st_ctime_ns for path in machine.home.rglob("*")}
        plan = planned(store, machine.home)
        by_digest = {group.group.digest: group for group in plan.groups}
        assert len(by_digest) == len(plan.groups) == len(machine.shared)
        for shared in machine.shared.values():
            group = by_digest[hash_file(shared.paths[0])[0].digest]
            assert {group.survivor, *group.replaced} == set(shared.paths)
            assert group.freed_size == sum(
                os.lstat(path).st_blocks * 512 for path in group.replaced
            )
            assert group.kind == "hardlink"
        assert plan.files == sum(len(group.replaced) for group in plan.groups) == 16
        assert plan.freed_size == machine.duplicate_bytes
        ((point, words),) = plan.kinds.items()
        assert (point, plan.new_volumes) == (mount_of(machine.home).point, ())
        assert words.startswith("hard links: ")
        assert snapshot(machine.home) == before
        assert {path: os.lstat(path).st_ctime_ns for path in machine.home.rglob("*")} == times
        assert (store.history(), list(store.blobs())) == ([], [])
        assert [each.path for each in store.folders() if each.is_given] == []

    def test_the_groups_with_the_most_to_free_come_first(self, store: Store, folder: Path) -> None:
        for number, (size, copies) in enumerate(((70_000, 2), (30_000, 9), (20_000, 3))):
            for copy in range(copies):
                write(folder / str(number) / f"{copy}.pt", content(number, size))
        gains = [group.freed_size for group in planned(store, folder).groups]
        assert gains == sorted(gains, reverse=True)
        assert len(gains) == 3

    def test_counts_the_files_that_become_read_only(self, store: Store, folder: Path) -> None:
        write(folder / "a.pt", DATA, mtime=OLD)
        os.link(write(folder / "b.pt", DATA), folder / "b2.pt")
        for seed, mode in ((2, 0o444), (3, 0o644)):
            for name in "xy":
                write(folder / f"{seed}{name}.pt", content(seed)).chmod(mode)
        plan = planned(store, folder)
        assert plan.read_only == 3 + 2
        before = {path for path in folder.iterdir() if mode_of(path) & 0o222}
        plan.execute()
        after = {path for path in folder.iterdir() if mode_of(path) & 0o222}
        assert len(before - after) == plan.read_only

    def test_of_modes_that_may_differ_the_narrowest_is_kept_and_undone(
        self, store: Store, folder: Path
    ) -> None:
        modes = {"a.pt": 0o644, "b.pt": 0o600, "c.pt": 0o640}
        for n, (name, mode) in enumerate(modes.items()):
            write(folder / name, DATA, mtime=OLD + n).chmod(mode)
        found = scanned(store, folder)
        assert (found.freeable, planned(store, folder).files) == (0, 0)
        ((left,), plan) = found.left, plan_dedup(store, found, allow=frozenset({"mode"}))
        assert (left.options, left.files, left.size) == (("mode",), 2, plan.freed_size)
        assert (plan.groups[0].survivor.name, dict(plan.permissions)) == (
            "b.pt",
            {"readable by you only": 2},
        )
        plan.execute()
        assert {mode_of(folder / name) for name in modes} == {0o400}
        assert undo_everything(store) == []
        assert {name: mode_of(folder / name) for name in modes} == modes

    def test_a_quick_scan_gives_no_plan(self, store: Store, pair: tuple[Path, Path]) -> None:
        found = scanned(store, pair[0].parent, is_quick=True)
        plan = plan_dedup(store, found)
        assert (plan.groups, plan.files) == ((), 0)
        assert len(plan.warnings) == 1
        assert plan.execute().batches == ()
        assert inodes_of(pair) == {inode_of(pair[0]), inode_of(pair[1])}

    def test_files_without_bytes_on_disk_are_not_worth_a_link(
        self, store: Store, folder: Path
    ) -> None:
        """Holes take no space: a link would free nothing and make two files read-only."""
        for name in ("a.pt", "b.pt"):
            with open(folder / name, "wb") as file:
                file.truncate(1 << 20)
        if allocated_in(folder):
            pytest.skip("no sparse files here")
        before = snapshot(folder)
        plan = planned(store, folder)
        assert plan.groups == ()
        plan.execute()
        assert snapshot(folder) == before


class TestDoing:
    def test_bytes_stay_each_content_is_there_once_and_nothing_else_changes(
        self, store: Store, machine: Machine
    ) -> None:
        plan = planned(store, machine.home)
        before = snapshot(machine.home)
        inodes = {path: inode_of(path) for path in machine.home.rglob("*")}
        blobs = store.volume.layout.blobs
        taken = allocated_in(machine.home, blobs)
        watch = Watch()
        result = plan.execute(watch)
        after = snapshot(machine.home)
        assert after.keys() == before.keys()
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= {str(path.relative_to(machine.home)) for path in touched(plan)}
        for name in changed:
            assert (before[name][0], after[name][-1]) == ("file", before[name][-1]), name
        replaced = {path for group in plan.groups for path in group.replaced}
        assert {path for path, inode in inodes.items() if inode_of(path) != inode} == replaced
        for shared in machine.shared.values():
            assert len(inodes_of(shared.paths)) == 1
        assert (result.replaced, result.skipped, result.is_complete) == (16, (), True)
        assert leftovers(machine.home) == []
        assert taken - allocated_in(machine.home, blobs) == result.freed == plan.freed_size
        assert not result.freed_at_most
        assert {blob.trust for blob in store.blobs()} == {Trust.VERIFIED}, "nothing to hash again"
        assert [(each.id, each.label) for each in store.history()] == [(result.batches[0], "dedup")]
        assert [each.path for each in store.folders() if each.is_given]
        assert (watch.labels, watch.done, watch.total) == (
            ["Linking"],
            16 * machine.size,
            16 * machine.size,
        )

    def test_a_second_time_there_is_nothing_to_do(self, store: Store, machine: Machine) -> None:
        deduplicated(store, machine.home)
        before = snapshot(machine.home)
        found = scanned(store, machine.home)
        assert (found.freeable, found.groups) == (0, 0)
        plan = plan_dedup(store, found)
        assert plan.groups == ()
        assert {skip.reason for skip in plan.skipped} == {"programs edit such files in place"}
        assert plan.execute().batches == ()
        assert snapshot(machine.home) == before

    def test_the_survivor_keeps_inode_owner_and_time_and_others_show_them(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        before = os.lstat(pair[0])
        deduplicated(store, pair[0].parent)
        for path in pair:
            st = os.lstat(path)
            assert os.path.samestat(st, before)
            assert (st.st_uid, st.st_gid) == (before.st_uid, before.st_gid)
            assert st.st_mtime_ns == before.st_mtime_ns == OLD * 10**9
            assert stat.S_IMODE(st.st_mode) == stat.S_IMODE(before.st_mode) & 0o555

    def test_bytes_that_somebody_else_keeps_are_not_said_to_be_freed(
        self, store: Store, pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """A link made after the plan: the file is replaced, its inode lives on."""
        plan = planned(store, pair[0].parent)
        os.link(pair[1], tmp_path / "kept.pt")
        result = plan.execute()
        assert (result.replaced, result.freed) == (1, 0)

    def test_all_names_of_a_copy_are_replaced_and_counted_once(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        folder = pair[0].parent
        others = [folder / f"b{number}.pt" for number in range(5)]
        for other in others:
            os.link(pair[1], other)
        plan = planned(store, folder)
        assert (plan.files, plan.freed_size) == (6, os.lstat(pair[1]).st_blocks * 512)
        result = plan.execute()
        assert (result.replaced, result.freed) == (6, plan.freed_size)
        assert len(inodes_of([*pair, *others])) == 1
        assert store.plan_undo().needed_size == result.freed == SIZE, "undo needs its bytes once"

    @pytest.mark.usefixtures("folder")
    def test_names_of_any_bytes(self, store: Store, tmp_path: Path) -> None:
        folder = os.fsencode(tmp_path / "models")
        names = [b"plain.pt", b"new\nline.pt", b"\xff\xfe.pt", b"'\"`$(x).pt", b"*?[a].pt"]
        names.append(b"\xc3\xa4" * 126 + b".pt")  # as long as a name can be
        for name in names:
            write(Path(os.fsdecode(os.path.join(folder, name))), DATA)
        result = deduplicated(store, tmp_path / "models")
        assert (result.replaced, result.skipped) == (5, ())
        assert len({os.lstat(os.path.join(folder, name)).st_ino for name in names}) == 1
        assert undo_everything(store) == []
        assert len({os.lstat(os.path.join(folder, name)).st_ino for name in names}) == 6

    def test_more_groups_than_are_linked_at_once(self, store: Store, folder: Path) -> None:
        for number in range(600):
            (folder / f"{number}a.pt").write_bytes(content(number, 100))
            (folder / f"{number}b.pt").write_bytes(content(number, 100))
        result = deduplicated(store, folder)
        assert (result.replaced, result.is_complete) == (600, True)
        assert len(inodes_of(folder.iterdir())) == 600
        for number in range(600):
            assert (folder / f"{number}b.pt").read_bytes() == content(number, 100)

    def test_each_time_can_be_undone_by_itself(self, store: Store, pair: tuple[Path, Path]) -> None:
        folder = pair[0].parent
        before = snapshot(folder)
        first = deduplicated(store, folder)
        late = write(folder / "late.pt", DATA, mtime=NEW + 1)
        second = deduplicated(store, folder)
        assert all(each.is_undone for each in store.plan_undo(first.batches).execute())
        assert late.read_bytes() == DATA
        assert {k: v for k, v in snapshot(folder).items() if k != "late.pt"} == before
        assert all(each.is_undone for each in store.plan_undo(second.batches).execute())
        assert (mode_of(late), link_count(late)) == (0o644, 1)
        assert os.lstat(late).st_mtime == NEW + 1

    def test_undo_needs_no_index(self, machine: Machine, tmp_path: Path) -> None:
        before = snapshot(machine.home)
        with open_store(tmp_path / "store") as store:
            deduplicated(store, machine.home)
        for path in (tmp_path / "store").glob("index.sqlite3*"):
            path.unlink()
        with open_store(tmp_path / "store") as store:
            assert planned(store, machine.home).groups == ()
            assert undo_everything(store) == []
        assert snapshot(machine.home) == before

    def test_a_copy_made_after_the_first_time_is_taken_back_on_its_own(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        """The disk gives the inode of a file that is gone to the next one."""
        folder = pair[0].parent
        deduplicated(store, folder)
        late = write(folder / "late.pt", DATA, mtime=NEW)
        late.chmod(0o640)
        deduplicated(store, folder, allow=["mode"])
        assert len(inodes_of([*pair, late])) == 1
        assert undo_everything(store) == []
        assert [link_count(path) for path in (*pair, late)] == [1, 1, 1]
        assert [mode_of(path) for path in (*pair, late)] == [0o644, 0o644, 0o640]


class TestSurvivor:
    def test_a_checkpoint_of_a_program_that_keys_on_times(self, store: Store, folder: Path) -> None:
        """A1111 hashes a checkpoint again, and forgets what it knew, when its time has changed."""
        older = write(folder / "other" / "a.safetensors", DATA, mtime=OLD)
        models = webui(folder / "webui")
        kept = write(models / "Stable-diffusion" / "z.safetensors", DATA, mtime=NEW)
        deduplicated(store, folder)
        assert inode_of(kept) == inode_of(older)
        assert os.lstat(kept).st_mtime_ns == NEW * 10**9

    def test_of_two_files_with_names_elsewhere_one_is_left_alone(
        self, store: Store, pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        for path in pair:
            os.link(path, tmp_path / path.name)
        plan = planned(store, pair[0].parent)
        assert plan.groups == ()
        ((name, reason),) = reasons(plan.skipped).items()
        assert name == "b.pt"
        assert "nothing would be freed" in reason

    def test_the_blob_of_the_store(self, store: Store, pair: tuple[Path, Path]) -> None:
        blob = store.put_stream([DATA])
        result = deduplicated(store, pair[0].parent)
        assert result.replaced == 2
        assert {*inodes_of(pair), inode_of(store.path_of(blob.digest))} == inodes_of(pair[:1])

    def test_the_copies_that_free_most_decide_about_owner_and_mode(
        self, store: Store, folder: Path
    ) -> None:
        odd = write(folder / "odd.pt", DATA, mtime=OLD)
        odd.chmod(0o600)
        paths = [write(folder / f"{n}.pt", DATA, mtime=NEW + n) for n in range(3)]
        plan = planned(store, folder)
        (group,) = plan.groups
        assert (group.survivor, set(group.replaced)) == (paths[0], set(paths[1:]))
        assert reasons(plan.skipped) == {"odd.pt": "different permissions"}

    @pytest.mark.parametrize("fate", ["busy", "edited", "gone", "symlink", "folder"])
    def test_if_it_cannot_the_next_one_does(self, fate: str, store: Store, folder: Path) -> None:
        paths = [write(folder / f"{n}.pt", DATA, mtime=OLD + n) for n in range(4)]
        plan = planned(store, folder)
        assert plan.groups[0].survivor == paths[0]
        with ExitStack() as stack:
            if fate == "busy":
                stack.enter_context(paths[0].open("r+b"))
            elif fate == "edited":
                edit(paths[0])
            else:
                paths[0].unlink()
            if fate == "symlink":
                paths[0].symlink_to(write(folder / "elsewhere" / "target.pt", DATA))
            elif fate == "folder":
                paths[0].mkdir()
            result = plan.execute()
        assert "0.pt" in reasons(result.skipped)
        assert (result.is_complete, result.replaced) == (False, 2)
        assert len(inodes_of(paths[1:])) == 1
        assert all(path.read_bytes() == DATA for path in paths[1:])

    def test_if_another_process_has_stored_the_bytes_first_every_copy_is_linked_all_the_same(
        self, store: Store, folder: Path, tmp_path: Path
    ) -> None:
        paths = [write(folder / f"{n}.pt", DATA, mtime=OLD + n) for n in range(3)]
        plan = planned(store, folder)
        with open_store(tmp_path / "store") as other:
            digest = other.put_stream([DATA]).digest
        result = plan.execute()
        blob = inode_of(store.path_of(digest))
        assert result.is_complete == (inodes_of(paths) == {blob})
        deduplicated(store, folder)
        assert inodes_of(paths) == {blob}


class TestLeavingAlone:
    @pytest.fixture(autouse=True)
    def _unchanged(self, folder: Path) -> Iterator[None]:
        """Whatever is left alone is whole."""
        yield
        assert leftovers(folder) == []

    @pytest.mark.parametrize("way", ["descriptor", "mapping"])
    def test_a_file_somebody_writes_when_its_turn_comes(
        self, way: str, store: Store, pair: tuple[Path, Path]
    ) -> None:
        plan = planned(store, pair[0].parent)
        with pair[1].open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), SIZE) if way == "mapping" else None
            if mapped is not None:
                file.close()
            result = plan.execute()
            assert inode_of(pair[0]) != inode_of(pair[1])
            if mapped is not None:
                mapped[:5] = b"write"
                mapped.close()
            else:
                file.write(b"write")
        assert reasons(result.skipped) == {"b.pt": "busy"}
        assert pair[1].read_bytes() == b"write" + DATA[5:]
        assert pair[0].read_bytes() == DATA

    def test_a_file_that_changes_while_it_is_hashed(
        self, tmp_path: Path, pair: tuple[Path, Path]
    ) -> None:
        def rewrite() -> None:
            for path in pair:
                edit(path)

        with open_store(tmp_path / "store", threads=1) as store:
            found = scanned(store, pair[0].parent, progress=_WhileComparing(rewrite))
            assert any("changed" in problem.reason for problem in found.problems)
            assert plan_dedup(store, found).groups == ()
        assert all(path.read_bytes() == b"EDITED" + DATA[6:] for path in pair)

    @pytest.mark.parametrize("change", ["edited", "edited unseen", "replaced", "gone"])
    def test_a_file_that_changes_between_plan_and_execution(
        self, change: str, store: Store, pair: tuple[Path, Path]
    ) -> None:
        plan = planned(store, pair[0].parent)
        before = os.lstat(pair[1])
        wanted: bytes | None = b"EDITED" + DATA[6:]
        if change in ("edited", "edited unseen"):
            edit(pair[1])
        if change == "edited unseen":  # only the change time tells
            os.utime(pair[1], ns=(before.st_atime_ns, before.st_mtime_ns))
        elif change == "replaced":
            wanted = content(9)
            write(pair[1].with_name("new"), wanted, mtime=NEW).replace(pair[1])
        elif change == "gone":
            wanted = None
            pair[1].unlink()
        result = plan.execute()
        assert result.replaced == 0
        assert list(reasons(result.skipped)) == ["b.pt"]
        assert (pair[1].read_bytes() if pair[1].exists() else None) == wanted
        assert pair[0].read_bytes() == DATA

    def test_a_file_that_changed_between_scan_and_plan(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        found = scanned(store, pair[0].parent)
        edit(pair[1])
        plan = plan_dedup(store, found)
        assert plan.groups == ()
        assert reasons(plan.skipped) == {"b.pt": "changed since it was scanned"}

    @needs_root
    def test_what_a_link_would_change_unless_that_is_allowed(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        folder, path = pair[0].parent, pair[1]
        cases: list[tuple[Allowance, str, Callable[[], object], Callable[[], object]]] = [
            ("group", "different group",
             lambda: os.chown(path, -1, NOBODY), lambda: os.chown(path, -1, 0)),
            ("mode", "different permissions",
             lambda: path.chmod(0o600), lambda: path.chmod(0o644)),
            ("xattr", "has extended attributes",
             lambda: os.setxattr(path, "user.origin", b"the net"), lambda: None),
        ]  # fmt: skip
        for allowance, reason, change, back in cases:
            change()
            before = snapshot(folder)
            plan = planned(store, folder)
            assert (plan.groups, reasons(plan.skipped)) == ((), {"b.pt": reason})
            plan.execute()
            assert snapshot(folder) == before, reason
            assert planned(store, folder, allow=ALL - {allowance}).groups == (), reason
            result = deduplicated(store, folder, allow=[allowance])
            assert (result.replaced, result.skipped) == (1, ()), reason
            assert len(inodes_of(pair)) == 1
            assert undo_everything(store) == []
            assert snapshot(folder) == before, reason
            back()
        os.setxattr(pair[0], "user.origin", b"the net")
        assert reasons(planned(store, folder).skipped) == dict.fromkeys(("a.pt", "b.pt"), reason)
        os.removexattr(pair[0], "user.origin")
        assert set(os.listxattr(path)) - {"security.selinux"} == {"user.origin"}
        assert set(os.listxattr(pair[0])) - {"security.selinux"} == set()

    @needs_root
    def test_what_is_never_linked_whatever_is_allowed(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        pair[1].chmod(0o4644)
        plan = planned(store, pair[0].parent, allow=ALL)
        assert (plan.groups, reasons(plan.skipped)) == ((), {"b.pt": "has a special mode"})
        os.chown(pair[1], NOBODY, -1)
        plan = planned(store, pair[0].parent, allow=ALL)
        assert (plan.groups, reasons(plan.skipped)) == ((), {"b.pt": "belongs to another user"})

    @needs_root
    def test_a_file_whose_owner_changes_between_plan_and_execution(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        plan = planned(store, pair[0].parent)
        os.chown(pair[1], NOBODY, NOBODY)
        result = plan.execute()
        assert reasons(result.skipped) == {"b.pt": "belongs to another user"}
        assert os.lstat(pair[1]).st_uid == NOBODY

    @needs_root
    @pytest.mark.parametrize("number", [0, 1], ids=["survivor", "duplicate"])
    def test_a_file_that_was_made_immutable(
        self, number: int, store: Store, pair: tuple[Path, Path]
    ) -> None:
        third = write(pair[0].with_name("c.pt"), DATA, mtime=NEW + 1)
        done = subprocess.run(["chattr", "+i", pair[number]], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("no chattr here")
        before = os.lstat(pair[number])
        try:
            result = deduplicated(store, pair[0].parent)
        finally:
            subprocess.run(["chattr", "-i", pair[number]], check=True)
        assert list(reasons(result.skipped)) == [pair[number].name]
        after = os.lstat(pair[number])
        assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
        assert result.replaced == 1
        assert inode_of(third) == inode_of(pair[1 - number])

    def test_a_kind_of_file_that_programs_edit_in_place(self, store: Store, folder: Path) -> None:
        suffixes = (".db", ".json", ".txt", ".sqlite3", ".log", "")
        for number, suffix in enumerate(suffixes):
            for name in "ab":
                write(folder / f"{name}{suffix}", content(number))
        found = scanned(store, folder)
        assert (found.freeable, found.editable) == (0, len(suffixes) * SIZE)
        plan = plan_dedup(store, found)
        assert (plan.groups, len(plan.skipped)) == ((), 2 * len(suffixes))
        assert set(reasons(plan.skipped).values()) == {"programs edit such files in place"}
        assert planned(store, folder, any_file=True).execute().replaced == len(suffixes)

    def test_an_edited_kind_of_name_protects_every_name_of_its_file(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        os.link(pair[1], pair[1].with_name("b.db"))
        plan = planned(store, pair[0].parent)
        assert plan.groups == ()
        assert list(reasons(plan.skipped).values()) == ["programs edit such files in place"]

    def test_incomplete_downloads(self, store: Store, pair: tuple[Path, Path]) -> None:
        names = ["x.incomplete", "x.tmp", "x.part", "x.crdownload", "x.aria2"]
        names.append(f"sha256-{64 * 'a'}-partial")
        paths = [write(pair[0].with_name(name), DATA) for name in names]
        deduplicated(store, pair[0].parent)
        assert [path.name for path in paths if link_count(path) != 1] == []

    def test_everything_that_must_stay_writable_where_there_are_no_reflinks(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        if mount_of(pair[0]).fstype in ("btrfs", "xfs"):
            pytest.skip("there are reflinks here")
        before = snapshot(pair[0].parent)
        plan = planned(store, pair[0].parent, keep_writable=True)
        assert plan.groups == ()
        (reason,) = reasons(plan.skipped).values()
        assert "no reflinks" in reason
        assert plan.read_only == 0
        plan.execute()
        assert snapshot(pair[0].parent) == before


def test_a_folder_that_may_not_be_written_is_left_alone() -> None:
    def run(folder: Path) -> tuple[dict[str, str], int]:
        with open_store(folder / "store") as store:
            plan = planned(store, folder / "open", folder / "closed")
            return reasons(plan.skipped), plan.execute().replaced

    user = NOBODY if os.geteuid() == 0 else None
    with folder_of(user) as folder:
        for name in ("open/a.pt", "closed/b.pt", "closed/c.pt"):
            write(folder / name, DATA, mtime=OLD + ord(name[-4]))
        if user is not None:
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, user, user)
        (folder / "closed").chmod(0o555)
        before = snapshot(folder / "closed")
        with Child(lambda: run(folder), user=user) as child:
            skipped, replaced = child.result()
        assert snapshot(folder / "closed") == before
        (folder / "closed").chmod(0o755)
    assert skipped == dict.fromkeys(("b.pt", "c.pt"), "its folder cannot be written")
    assert replaced == 0


class _WhileComparing(Watch):
    """Acts when the first bytes were hashed."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._late = act

    def advance(self, amount: int = 1) -> None:
        if self.labels[-1] == "Comparing":
            act, self._late = self._late, lambda: None
            act()
        super().advance(amount)


class TestOtherFilesystems:
    def test_each_gets_its_own_survivor_and_a_volume_is_made_there(self, tmp_path: Path) -> None:
        def run() -> None:
            disk = Disk(tmp_path / "disk", 40 << 20)
            here = [write(tmp_path / "here" / f"{n}.pt", DATA, mtime=OLD + n) for n in range(3)]
            there = [write(disk.point / "sub" / f"{n}.pt", DATA, mtime=OLD + n) for n in range(3)]
            for place in (tmp_path / "here", disk.point / "sub"):
                write(place / "single.pt", content(2))
            before = snapshot(tmp_path / "here"), snapshot(disk.point)
            with open_store(tmp_path / "store") as store:
                plan = planned(store, tmp_path / "here", disk.point / "sub")
                assert plan.new_volumes == (volume_root(disk.point),)
                assert not plan.new_volumes[0].exists()
                assert len(plan.kinds) == len(plan.groups) == 2
                assert plan.warnings
                assert plan.freed_size == 4 * SIZE
                result = plan.execute()
                assert (result.replaced, result.freed, result.skipped) == (4, 4 * SIZE, ())
                assert len(result.batches) == 2
                assert (len(inodes_of(here)), len(inodes_of(there))) == (1, 1)
                assert len(store.stores()) == 2
            with open_store(tmp_path / "store") as store:
                found = scanned(store, tmp_path / "here", disk.point)
                assert (found.freeable, found.elsewhere) == (0, 2 * SIZE)
                assert planned(store, tmp_path / "here", disk.point).groups == ()
                assert undo_everything(store) == []
            assert snapshot(tmp_path / "here") == before[0]
            after = snapshot(disk.point)
            assert {k: v for k, v in after.items() if not k.startswith(".smartcache")} == before[1]

        in_own_namespace(run)

    def test_a_read_only_one_is_left_alone_and_the_other_is_not(self, tmp_path: Path) -> None:
        def run() -> None:
            disk = Disk(tmp_path / "disk", 10 << 20)
            for n in range(2):
                write(disk.point / f"{n}.pt", DATA, mtime=OLD)
                write(tmp_path / "here" / f"{n}.pt", DATA, mtime=NEW)
            disk.make_read_only()
            with open_store(tmp_path / "store") as store:
                plan = planned(store, tmp_path / "here", disk.point)
                assert [(skip.path, skip.reason) for skip in plan.skipped] == [
                    (disk.point / "1.pt", "read-only filesystem")
                ]
                assert plan.new_volumes == ()
                result = plan.execute()
                assert (result.replaced, result.skipped) == (1, ())

        in_own_namespace(run)

    @pytest.mark.parametrize("first", ["here", "bound"])
    @pytest.mark.parametrize("read_only", [True, False])
    def test_another_mount_of_the_same_disk_is_left_alone_and_the_rest_is_not(
        self, first: str, read_only: bool, tmp_path: Path
    ) -> None:
        """As containers mount models: one disk, and yet two places."""

        def run() -> None:
            ages = {"here": NEW, "bound": NEW} | {first: OLD}
            for n in range(2):
                write(tmp_path / "source" / f"{n}.pt", DATA, mtime=ages["bound"] + n)
                write(tmp_path / "here" / f"{n}.pt", DATA, mtime=ages["here"] + n)
            bind(tmp_path / "source", tmp_path / "bound", read_only=read_only)
            before = snapshot(tmp_path / "source")
            with open_store(tmp_path / "store") as store:
                plan = planned(store, tmp_path / "here", tmp_path / "bound")
                result = plan.execute()
                assert len(inodes_of((tmp_path / "here").iterdir())) == 1, (plan, result)
                assert (result.replaced, result.skipped) == (1, ())
                assert {skip.path for skip in plan.skipped} == set((tmp_path / "bound").iterdir())
                (reason,) = set(reasons(plan.skipped).values())
                expected = "read-only filesystem" if read_only else "on another mount of its disk"
                assert reason == expected
            assert snapshot(tmp_path / "source") == before

        in_own_namespace(run)

    @pytest.mark.parametrize("pages", range(4))
    def test_a_full_disk_leaves_every_file_whole_and_running_again_goes_on(
        self, pages: int, tmp_path: Path
    ) -> None:
        def run() -> None:
            disk = Disk(tmp_path / "disk", 8 << 20)
            for n in range(40):
                write(disk.point / "models" / f"{n}.pt", content(n % 20, 5000), mtime=OLD + n)
            before = snapshot(disk.point / "models")
            with open_store(disk.point / "store") as store:
                plan = planned(store, disk.point / "models")
                disk.fill(but=pages)
                with suppress(SmartcacheError):
                    plan.execute()
                now = snapshot(disk.point / "models")
                assert now.keys() == before.keys()
                assert [name for name in now if now[name][-1] != before[name][-1]] == []
                disk.clear()
            with open_store(disk.point / "store") as store:
                assert deduplicated(store, disk.point / "models").is_complete
                assert len(inodes_of((disk.point / "models").iterdir())) == 20
                assert undo_everything(store) == []
            assert snapshot(disk.point / "models") == before

        in_own_namespace(run)

    def test_a_drive_that_is_gone_when_its_turn_comes_is_said(self, tmp_path: Path) -> None:
        def run() -> None:
            disk = Disk(tmp_path / "disk", 10 << 20)
            for n in range(2):
                write(disk.point / "sub" / f"{n}.pt", DATA)
                write(tmp_path / "here" / f"{n}.pt", DATA)
            with open_store(tmp_path / "store") as store:
                store.add_volume(volume_root(disk.point))
            with open_store(tmp_path / "store") as store:
                plan = planned(store, tmp_path / "here", disk.point)
                os.rename(disk.point / "sub", disk.point / "away")
                result = plan.execute()
                assert result.replaced == 1
                assert len(inodes_of((tmp_path / "here").iterdir())) == 1
                assert {skip.path.parent for skip in result.skipped} == {disk.point / "sub"}

        in_own_namespace(run)


@pytest.mark.parametrize("kind", DISKS)
class TestReflinks:
    @pytest.fixture
    def disk(self, kind: str, tmp_path: Path) -> Iterator[Path]:
        with reflink_disk(kind, tmp_path) as point:  # type: ignore[arg-type]
            yield point

    @pytest.mark.parametrize("keep_writable", [True, False], ids=["asked for", "as root"])
    def test_files_share_blocks_and_are_otherwise_as_before(
        self, keep_writable: bool, disk: Path
    ) -> None:
        size = 1 << 20
        paths = [write(disk / "models" / f"{n}.pt", content(1, size)) for n in range(3)]
        write(disk / "models" / "text.txt", content(1, size))
        paths[2].chmod(0o600)
        os.sync()
        before = snapshot(disk / "models")
        inodes = inodes_of(paths)
        with open_store(disk / "store") as store:
            plan = planned(store, disk / "models", keep_writable=keep_writable)
            assert plan.freed_size == scanned(store, disk / "models").freeable == plan.files * size
            (group,) = plan.groups
            assert (group.kind, plan.read_only) == ("reflink", 0)
            (words,) = plan.kinds.values()
            assert words.startswith("reflinks: ")
            result = plan.execute()
            assert (result.replaced, result.freed_at_most) == (plan.files, True)
            assert result.freed == plan.files * size
            assert (result.changed, result.batches, store.history()) == (0, (), [])
            assert snapshot(disk / "models") == before
            assert inodes_of(paths) == inodes
            found = scanned(store, disk / "models")
            assert (found.freeable, found.groups) == (0, 0), "shared blocks are no duplicates"
            again = planned(store, disk / "models", keep_writable=keep_writable)
            assert again.groups == ()

    def test_an_ordinary_user_gets_hard_links_unless_files_must_stay_writable(
        self, disk: Path
    ) -> None:
        def run() -> tuple[str, str]:
            with open_store(disk / "own" / "store") as store:
                (linked,) = planned(store, disk / "own" / "models").groups
                (kept,) = planned(store, disk / "own" / "models", keep_writable=True).groups
                return linked.kind, kept.kind

        for n in range(2):
            write(disk / "own" / "models" / f"{n}.pt", content(1))
        for path in [disk / "own", *(disk / "own").rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        with Child(run, user=NOBODY) as child:
            assert child.result() == ("hardlink", "reflink")

    def test_where_the_store_is_elsewhere_a_volume_is_made(
        self, disk: Path, tmp_path: Path
    ) -> None:
        paths = [write(disk / "models" / f"{n}.pt", content(1)) for n in range(3)]
        os.sync()
        before = snapshot(disk / "models")
        with open_store(tmp_path / "store") as store:
            plan = planned(store, disk / "models", keep_writable=True)
            assert plan.new_volumes == (volume_root(disk),)
            result = plan.execute()
            assert (result.replaced, result.skipped) == (2, ())
            assert len(inodes_of(paths)) == 3
        assert snapshot(disk / "models") == before


class TestSubvolumes:
    """Places of one btrfs that number their inodes apart, and between which no link leads."""

    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        with reflink_disk("btrfs", tmp_path) as point:
            words = ["btrfs", "-q", "subvolume", "create", str(point / "sub")]
            if shutil.which("btrfs") is None or subprocess.run(words, check=False).returncode:
                pytest.skip("cannot make a subvolume")
            yield point

    @pytest.mark.parametrize("is_far", [False, True], ids=["store on it", "store elsewhere"])
    def test_each_shares_by_itself(self, is_far: bool, disk: Path, tmp_path: Path) -> None:
        for place in ("sub", "top"):
            for n in range(3):
                write(disk / place / "models" / f"{n}.pt", content(1, 1 << 20))
        os.sync()
        before = snapshot(disk / "sub" / "models"), snapshot(disk / "top")
        with open_store((tmp_path if is_far else disk) / "store") as store:
            result = deduplicated(store, disk / "sub", disk / "top")
            assert (result.replaced, result.skipped) == (4, ())
            assert scanned(store, disk / "sub", disk / "top").freeable == 0
        assert (snapshot(disk / "sub" / "models"), snapshot(disk / "top")) == before
