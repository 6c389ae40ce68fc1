"""What `dedup` plans, what it does, which file survives, and what it leaves alone, and why."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("leases, mounts and owners", allow_module_level=True)

from smartcache.errors import SmartcacheError
from smartcache.folders.dedup import OTHER_BYTES, plan_dedup
from smartcache.store.layout import pool_root
from smartcache.store.store import Store
from smartcache.store.userfile import Allowance, look
from smartcache.system.filesystems import mount_of
from smartcache.system.hashing import hash_file
from tests.folders.deduping import (
    ALL,
    allocated_in,
    deduplicated,
    in_namespace,
    inodes_of,
    leftovers,
    open_store,
    planned,
    reasons,
    scanned,
    undo_everything,
)
from tests.folders.trees import Machine, content, make_machine, write
from tests.processes.children import NOBODY, Child, folder_of
from tests.store.files import Watch, edit, inode_of, link_count, mode_of, rot, snapshot
from tests.store.reflink_disks import DISKS, reflink_disk
from tests.store.small_disks import Disk, bind

DATA = content(1)
SIZE = len(DATA)
OLD, NEW = 1_600_000_000, 1_700_000_000
EDITED = b"EDITED" + DATA[6:]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where duplicates become hard links."""
    if mount_of(tmp_path).fstype in ("btrfs", "xfs") and os.geteuid() == 0:
        pytest.skip("reflinks are made here")
    path = tmp_path / "models"
    path.mkdir()
    yield path
    assert leftovers(path) == []


@pytest.fixture
def pair(folder: Path) -> tuple[Path, Path]:
    """Two equal files; the first is the older one, which survives."""
    return write(folder / "a.pt", DATA, mtime=OLD), write(folder / "b.pt", DATA, mtime=NEW)


@pytest.fixture
def machine(folder: Path) -> Machine:
    return make_machine(folder / "home")


class TestPlanning:
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
        assert plan.groups[0].survivor.name == "b.pt"
        assert dict(plan.permissions) == {"readable by you only": 2}
        plan.execute()
        assert {mode_of(folder / name) for name in modes} == {0o400}
        assert undo_everything(store) == []
        assert {name: mode_of(folder / name) for name in modes} == modes

    def test_a_quick_scan_gives_no_plan(self, store: Store, pair: tuple[Path, Path]) -> None:
        plan = plan_dedup(store, scanned(store, pair[0].parent, is_quick=True))
        assert (plan.groups, plan.files, len(plan.warnings)) == ((), 0, 1)
        assert plan.execute().batches == ()
        assert len(inodes_of(pair)) == 2


class TestDoing:
    def test_each_content_is_there_once_then_as_planned_and_nothing_else_changes(
        self, store: Store, machine: Machine, pass_time: Callable[[float], None]
    ) -> None:
        """The plan changes nothing. A scan afterwards finds nothing, and reads nothing."""
        pass_time(60)
        times = {path: os.lstat(path).st_ctime_ns for path in machine.home.rglob("*")}
        before = snapshot(machine.home)
        plan = planned(store, machine.home)
        by_digest = {group.group.digest: group for group in plan.groups}
        assert len(by_digest) == len(plan.groups) == len(machine.shared)
        for shared in machine.shared.values():
            group = by_digest[hash_file(shared.paths[0])[0].digest]
            assert {group.survivor, *group.replaced} == set(shared.paths)
            assert group.freed_size == machine.size * len(group.replaced)
            assert group.kind == "hardlink"
        gains = [group.freed_size for group in plan.groups]
        assert gains == sorted(gains, reverse=True)
        ((point, words),) = plan.kinds.items()
        assert (point, plan.new_pools) == (mount_of(machine.home).point, ())
        assert words.startswith("hard links: ")
        assert {path: os.lstat(path).st_ctime_ns for path in machine.home.rglob("*")} == times
        assert (store.history(), list(store.blobs())) == ([], [])
        assert not any(each.is_given for each in store.folders())

        inodes = {path: inode_of(path) for path in machine.home.rglob("*")}
        taken, watch = allocated_in(machine.home), Watch()
        result = plan.execute(watch)
        after = snapshot(machine.home)
        assert after.keys() == before.keys()
        changed = {name for name in before if before[name] != after[name]}
        touched = {path for group in plan.groups for path in (group.survivor, *group.replaced)}
        assert changed <= {str(path.relative_to(machine.home)) for path in touched}
        for name in changed:
            assert (before[name][0], after[name][-1]) == ("file", before[name][-1]), name
        replaced = {path for group in plan.groups for path in group.replaced}
        assert {path for path, inode in inodes.items() if inode_of(path) != inode} == replaced
        assert {len(inodes_of(shared.paths)) for shared in machine.shared.values()} == {1}
        assert (result.replaced, result.skipped, result.is_complete) == (16, (), True)
        freed = taken - allocated_in(machine.home)
        assert freed == result.freed == plan.freed_size == machine.duplicate_bytes
        assert not result.freed_at_most
        assert [(each.id, each.label) for each in store.history()] == [(result.batches[0], "dedup")]
        assert any(each.is_given for each in store.folders())
        assert (watch.labels, watch.done, watch.total) == (["Linking"], freed, freed)

        found = scanned(store, machine.home)
        assert (found.freeable, found.groups, found.hashed) == (0, 0, 0)
        plan = plan_dedup(store, found)
        assert plan.groups == ()
        assert {skip.reason for skip in plan.skipped} == {EDITED_KIND}
        assert plan.execute().batches == ()
        assert snapshot(machine.home) == after

    def test_bytes_that_somebody_else_keeps_are_not_said_to_be_freed(
        self, store: Store, pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """A link made after the plan: the file is replaced, its inode lives on."""
        plan = planned(store, pair[0].parent)
        os.link(pair[1], tmp_path / "kept.pt")
        result = plan.execute()
        assert (result.replaced, result.freed) == (1, 0)

    def test_each_run_is_undone_by_itself_or_with_the_others(
        self, store: Store, pair: tuple[Path, Path]
    ) -> None:
        """The disk gives the inode of a file that is gone to the next one."""
        folder, before = pair[0].parent, snapshot(pair[0].parent)
        for alone in (True, False):
            first = deduplicated(store, folder)
            late = write(folder / "late.pt", DATA, mtime=NEW + 1)
            late.chmod(0o640)
            deduplicated(store, folder, allow=["mode"])
            assert len(inodes_of([*pair, late])) == 1
            if alone:
                assert all(each.is_undone for each in store.plan_undo(first.batches).execute())
                assert {k: v for k, v in snapshot(folder).items() if k != "late.pt"} == before
            assert undo_everything(store) == []
            assert (late.read_bytes(), mode_of(late), link_count(late)) == (DATA, 0o640, 1)
            late.unlink()
            assert snapshot(folder) == before


class TestRot:
    """What was hashed on an earlier day says what to try, not what to let go."""

    @pytest.mark.parametrize("rotten", ["a.pt", "b.pt", "c.pt"])
    @pytest.mark.parametrize("count", [2, 3])
    def test_the_rotten_one_is_named_and_the_good_ones_survive(
        self, store: Store, folder: Path, rotten: str, count: int,
        pass_time: Callable[[float], None],
    ) -> None:  # fmt: skip
        """Whichever would survive or be replaced; nothing in stat shows it."""
        paths = [write(folder / name, DATA, mtime=OLD) for name in ("a.pt", "b.pt", "c.pt")]
        if count == 2:
            paths.remove(path := next(each for each in reversed(paths) if each.name != rotten))
            path.unlink()
        pass_time(10)
        assert scanned(store, folder).hashed == count * SIZE
        bad, (good, *others) = folder / rotten, (each for each in paths if each.name != rotten)
        found = rot(bad, store)
        before = snapshot(folder)
        plan = planned(store, folder)
        assert plan.files == count - 1, "nothing shows it"
        result = plan.execute()
        assert reasons(result.skipped) == {rotten: OTHER_BYTES}
        assert (result.replaced, result.is_complete) == (count - 2, False)
        assert inodes_of(others) <= inodes_of([good])
        assert {path.read_bytes() for path in (good, *others)} == {DATA}
        assert (bad.read_bytes(), mode_of(bad), link_count(bad)) == (found, 0o644, 1)
        undo_everything(store)
        assert snapshot(folder) == before
        assert scanned(store, folder).groups == count - 2

    def test_a_rotten_blob_takes_no_good_copy_with_it(
        self, store: Store, pair: tuple[Path, Path], pass_time: Callable[[float], None]
    ) -> None:
        pass_time(10)
        deduplicated(store, pair[0].parent)
        last = write(pair[0].with_name("c.pt"), DATA)
        rot(pair[0], store)
        result = deduplicated(store, pair[0].parent)
        (skip,) = result.skipped
        assert "is damaged; it was moved to" in skip.reason
        assert (result.replaced, last.read_bytes()) == (0, DATA)


class TestSurvivor:
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

    def test_if_another_process_has_stored_the_bytes_first_every_copy_is_linked_all_the_same(
        self, store: Store, folder: Path, tmp_path: Path
    ) -> None:
        paths = [write(folder / f"{n}.pt", DATA, mtime=OLD + n) for n in range(3)]
        plan = planned(store, folder)
        with open_store(tmp_path / "store") as other:
            blob = other.put_stream([DATA])
        result = plan.execute()
        assert result.is_complete == (inodes_of(paths) == {blob.inode})
        deduplicated(store, folder)
        assert inodes_of(paths) == {blob.inode}


@contextmanager
def befallen(path: Path, fate: str) -> Iterator[None]:
    """Let that become of a file."""
    st = path.stat()
    with ExitStack() as stack:
        if fate == "written":
            stack.enter_context(path.open("r+b"))
        elif fate == "mapped":
            with path.open("r+b") as file:
                mapping = stack.enter_context(mmap.mmap(file.fileno(), SIZE))
            stack.callback(lambda: mapping.__setitem__(slice(6), b"EDITED"))
        elif fate.startswith("edited"):
            edit(path)
            if fate == "edited unseen":  # only the change time tells
                os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        elif fate == "replaced":
            write(path.with_name("new"), content(9)).replace(path)
        elif fate == "given away":
            os.chown(path, NOBODY, NOBODY)
        elif fate == "immutable":
            if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
                pytest.skip("no chattr here")
            stack.callback(lambda: subprocess.run(["chattr", "-i", path], check=True))
        else:
            put_in_its_place(path, fate)
        yield


def put_in_its_place(path: Path, what: str) -> None:
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "symlink":
        path.symlink_to(write(path.parent / "elsewhere" / "target", DATA))


def facts(path: Path) -> tuple[int, ...]:
    """What nobody may change of a file that is left alone."""
    st = look(path)
    return () if st is None else (st.st_ino, st.st_mode, st.st_uid, st.st_nlink)


CHANGED = "changed since it was scanned"
FATES = {
    "written": "busy", "mapped": "busy", "edited": CHANGED, "edited unseen": "",
    "replaced": CHANGED, "gone": "", "symlink": CHANGED, "folder": CHANGED,
    "given away": "belongs to another user", "immutable": "",
}  # fmt: skip
"""What becomes of a file, and why it is left alone ("": whatever is said)."""


@pytest.mark.parametrize("number", [0, 1], ids=["survivor", "duplicate"])
@pytest.mark.parametrize("before_plan", [False, True], ids=["after the plan", "before it"])
@pytest.mark.parametrize("fate", FATES)
def test_a_file_that_changed_since_the_scan_is_left_alone_and_named_and_the_others_are_linked(
    store: Store, folder: Path, fate: str, before_plan: bool, number: int
) -> None:
    if fate in ("given away", "immutable") and os.geteuid() != 0:
        pytest.skip("only root can do this")
    paths = [write(folder / f"{n}.pt", DATA, mtime=OLD + n) for n in range(3)]
    path = paths.pop(number)
    found = scanned(store, folder)
    plan = plan_dedup(store, found)
    assert (plan.groups[0].survivor, plan.files) == (min(path, paths[0]), 2)
    with befallen(path, fate):
        there = facts(path)
        if before_plan:
            plan = plan_dedup(store, found)
        result = plan.execute()
        assert facts(path) == there
    said = reasons([*plan.skipped, *result.skipped])
    assert list(said) == [path.name]
    if FATES[fate] and (before_plan or FATES[fate] != CHANGED):
        assert said[path.name] == FATES[fate]
    assert (store.recover(), facts(path)) == ([], there)
    assert (result.replaced, len(inodes_of(paths))) == (1, 1)
    assert {each.read_bytes() for each in paths} == {DATA}
    if fate in ("edited", "edited unseen", "mapped"):
        assert path.read_bytes() == EDITED


def link_outside(paths: tuple[Path, Path]) -> None:
    for path in paths:
        os.link(path, path.parent.parent / path.name)


PairChange = Callable[[tuple[Path, Path]], object]
EDITED_KIND = "programs edit such files in place"
LEFT: dict[str, tuple[PairChange, str, frozenset[Allowance] | None]] = {
    "group": (lambda pair: os.chown(pair[1], -1, NOBODY), "different group", frozenset({"group"})),
    "mode": (lambda pair: pair[1].chmod(0o600), "different permissions", frozenset({"mode"})),
    "attribute": (lambda pair: os.setxattr(pair[1], "user.origin", b"the net"),
                  "has extended attributes", frozenset({"xattr"})),
    "special mode": (lambda pair: pair[1].chmod(0o4644), "has a special mode", None),
    "owner": (lambda pair: os.chown(pair[1], NOBODY, -1), "belongs to another user", None),
    "names outside": (link_outside, "has other names elsewhere, so nothing would be freed", None),
    "an edited kind": (lambda pair: os.link(pair[1], pair[1].with_name("c.db")), EDITED_KIND, None),
}  # fmt: skip
"""What the second of two equal files is, why it is left alone, and what would include it."""


@needs_root
@pytest.mark.parametrize("what", LEFT)
def test_what_a_link_would_change_is_left_alone_unless_that_is_allowed(
    store: Store, pair: tuple[Path, Path], what: str
) -> None:
    """The scan counts the same. Of two files with names elsewhere one could go, freeing nothing."""
    change, reason, allowed = LEFT[what]
    change(pair)
    folder, before = pair[0].parent, snapshot(pair[0].parent)
    found = scanned(store, folder)
    left = [(each.options, each.files, each.size) for each in found.left]
    options = ("any-file",) if reason == EDITED_KIND else tuple(allowed or ())
    assert (found.freeable, left) == (0, [] if what == "names outside" else [(options, 1, SIZE)])
    rest = ALL - (allowed or frozenset())
    for allow in (frozenset[Allowance](), rest):
        plan = plan_dedup(store, found, allow=allow)
        assert (plan.groups, reasons(plan.skipped)) == ((), {"b.pt": reason})
        plan.execute()
        assert snapshot(folder) == before
    if allowed is not None:
        result = deduplicated(store, folder, allow=allowed)
        assert (result.replaced, result.freed, result.skipped) == (1, SIZE, ())
        assert len(inodes_of(pair)) == 1
        assert undo_everything(store) == []
        assert snapshot(folder) == before


def test_kinds_of_files_that_programs_edit_in_place_are_left_alone(
    store: Store, folder: Path
) -> None:
    suffixes = (".db", ".json", ".txt", ".sqlite3", ".log", "")
    for number, suffix in enumerate(suffixes):
        for name in "ab":
            write(folder / f"{name}{suffix}", content(number))
    found = scanned(store, folder)
    assert (found.freeable, found.editable) == (0, len(suffixes) * SIZE)
    plan = plan_dedup(store, found)
    assert (plan.groups, len(plan.skipped)) == ((), 2 * len(suffixes))
    assert set(reasons(plan.skipped).values()) == {EDITED_KIND}
    result = planned(store, folder, any_file=True).execute()
    assert (result.replaced, result.freed) == (len(suffixes), found.editable)


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


class TestOtherFilesystems:
    @in_namespace
    def test_each_gets_its_own_survivor_and_a_pool_is_made_there(self, tmp_path: Path) -> None:
        disk = Disk(tmp_path / "disk", 40 << 20)
        here = [write(tmp_path / "here" / f"{n}.pt", DATA, mtime=OLD + n) for n in range(3)]
        there = [write(disk.point / "sub" / f"{n}.pt", DATA, mtime=OLD + n) for n in range(3)]
        for place in (tmp_path / "here", disk.point / "sub"):
            write(place / "single.pt", content(2))
        before = snapshot(tmp_path / "here"), snapshot(disk.point)
        with open_store(tmp_path / "store") as store:
            plan = planned(store, tmp_path / "here", disk.point / "sub")
            assert plan.new_pools == (pool_root(disk.point),)
            assert not plan.new_pools[0].exists()
            assert len(plan.kinds) == len(plan.groups) == 2
            assert plan.warnings
            assert plan.freed_size == 4 * SIZE
            result = plan.execute()
            assert (result.replaced, result.freed, result.skipped) == (4, 4 * SIZE, ())
            assert (len(result.batches), len(store.history())) == (1, 1)
            assert (len(inodes_of(here)), len(inodes_of(there))) == (1, 1)
            assert [pool.root for pool in store.pools()[1:]] == list(plan.new_pools)
        with open_store(tmp_path / "store") as store:
            found = scanned(store, tmp_path / "here", disk.point)
            assert (found.freeable, found.elsewhere) == (0, 2 * SIZE)
            assert planned(store, tmp_path / "here", disk.point).groups == ()
            assert undo_everything(store) == []
        assert snapshot(tmp_path / "here") == before[0]
        after = snapshot(disk.point)
        assert {k: v for k, v in after.items() if not k.startswith(".smartcache")} == before[1]

    @in_namespace
    def test_a_read_only_one_is_left_alone_and_the_other_is_not(self, tmp_path: Path) -> None:
        disk = Disk(tmp_path / "disk", 10 << 20)
        for n in range(2):
            write(disk.point / f"{n}.pt", DATA, mtime=OLD)
            write(tmp_path / "here" / f"{n}.pt", DATA, mtime=NEW)
        disk.make_read_only()
        with open_store(tmp_path / "store") as store:
            plan = planned(store, tmp_path / "here", disk.point)
            skipped = [(skip.path, skip.reason) for skip in plan.skipped]
            assert skipped == [(disk.point / "1.pt", "read-only filesystem")]
            assert plan.new_pools == ()
            result = plan.execute()
            assert (result.replaced, result.skipped) == (1, ())

    @pytest.mark.parametrize("first", ["here", "bound"])
    @pytest.mark.parametrize("read_only", [True, False])
    @in_namespace
    def test_another_mount_of_the_same_disk_is_left_alone_and_the_rest_is_not(
        self, first: str, read_only: bool, tmp_path: Path
    ) -> None:
        """As containers mount models: one disk, and yet two places."""
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
            expected = "read-only filesystem" if read_only else "on another mount of its disk"
            assert set(reasons(plan.skipped).values()) == {expected}
        assert snapshot(tmp_path / "source") == before

    @pytest.mark.parametrize("pages", range(4))
    @in_namespace
    def test_a_full_disk_leaves_every_file_whole_and_running_again_goes_on(
        self, pages: int, tmp_path: Path
    ) -> None:
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


@pytest.mark.parametrize("kind", DISKS)
class TestReflinks:
    @pytest.fixture
    def disk(self, kind: str, tmp_path: Path) -> Iterator[Path]:
        with reflink_disk(kind, tmp_path) as point:  # type: ignore[arg-type]
            yield point

    @pytest.mark.parametrize("where", ["asked for", "as root", "store elsewhere"])
    def test_files_share_blocks_and_are_otherwise_as_before(
        self, where: str, disk: Path, tmp_path: Path
    ) -> None:
        size, keep_writable = 1 << 20, where != "as root"
        paths = [write(disk / "models" / f"{n}.pt", content(1, size)) for n in range(3)]
        write(disk / "models" / "text.txt", content(1, size))
        paths[2].chmod(0o600)
        os.sync()
        before, inodes = snapshot(disk / "models"), inodes_of(paths)
        with open_store((tmp_path if where == "store elsewhere" else disk) / "store") as store:
            plan = planned(store, disk / "models", keep_writable=keep_writable)
            assert plan.freed_size == scanned(store, disk / "models").freeable == plan.files * size
            (group,) = plan.groups
            assert (group.kind, plan.read_only, plan.new_pools) == ("reflink", 0, ())
            (words,) = plan.kinds.values()
            assert words.startswith("reflinks: ")
            result = plan.execute()
            assert (result.replaced, result.freed_at_most) == (plan.files, True)
            assert (result.freed, result.skipped) == (plan.files * size, ())
            assert (result.changed, result.batches, store.history()) == (0, (), [])
            assert snapshot(disk / "models") == before
            assert inodes_of(paths) == inodes
            found = scanned(store, disk / "models")
            assert (found.freeable, found.groups) == (0, 0), "shared blocks are no duplicates"
            assert planned(store, disk / "models", keep_writable=keep_writable).groups == ()

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


@pytest.mark.parametrize("is_far", [False, True], ids=["store on it", "store elsewhere"])
def test_subvolumes_of_one_btrfs_share_each_by_itself(is_far: bool, tmp_path: Path) -> None:
    """They number their inodes apart, and no link leads from one to another."""
    with reflink_disk("btrfs", tmp_path) as disk:
        words = ["btrfs", "-q", "subvolume", "create", str(disk / "sub")]
        if shutil.which("btrfs") is None or subprocess.run(words, check=False).returncode:
            pytest.skip("cannot make a subvolume")
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
