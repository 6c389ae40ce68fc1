"""A scan of real folders: what is equal, what it takes, what is remembered for the next time."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smartcache.errors import StoreError
from smartcache.folders import scan as folders_scan
from smartcache.folders.dedup import plan_dedup
from smartcache.folders.groups import KEPT, Group, Grouping, Tally
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import Scan, folders_to_scan, survey
from smartcache.folders.scan import scan_folders as scan
from smartcache.store import hashes as store_contents
from smartcache.store.catalog import Scope
from smartcache.store.store import Store
from smartcache.store.upkeep.prune import REBUILT
from tests.folders.counting import (
    Counted,
    Unhindered,
    bytes_read,
    files_opened,
    groups_of,
    numbers,
    paths_of,
    plain,
)
from tests.folders.trees import SIZE, Machine, comfyui, content, webui, write
from tests.processes.children import Child, folder_of
from tests.processes.killing import in_child, was_killed
from tests.store import small_disks
from tests.store.files import Watch, allocated, snapshot
from tests.store.reflink_disks import DISKS, Disk, reflink_disk

ANN, TEAM = 64001, 64000
MiB = 1 << 20
BIND = 4096
"""MS_BIND of mount(2)."""
needs_root = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() != 0, reason="only root can become other users"
)


@pytest.fixture
def pair(folder: Path) -> tuple[Path, Path]:
    """Two files with the same bytes."""
    return (
        write(folder / "a.safetensors", content(1), mtime=1_600_000_000),
        write(folder / "b.safetensors", content(1)),
    )


def found_in(store: Store, *folders: Path, min_size: int = 1, program: str = "") -> Scan:
    return scan(store, plain(*folders, program=program), min_size=min_size)


class TestMachine:
    """The folders of every program, with what several of them keep."""

    def test_duplicates_of_all_programs_are_found_with_the_figures_of_each(
        self, store: Store, machine: Machine
    ) -> None:
        folders, warnings = folders_to_scan(store)
        found = scan(store, folders, min_size=4096)
        assert (found.freeable, warnings) == (machine.duplicate_bytes, [])
        assert (found.problems, found.busy, found.elsewhere) == ((), (), 0)
        expected = [[[path] for path in sorted(each.paths)] for each in machine.shared.values()]
        assert groups_of(found) == sorted(expected), "what only one has is in no group"
        assert found.groups == len(machine.shared)
        programs = {each.folder.path: each.folder.program for each in found.folders if each.folder}
        assert {path: programs[path] for path in machine.folder.values()} == {
            path: name for name, path in machine.folder.items()
        }
        counted = Counted(folders, min_size=4096)
        assert numbers(found.total) == counted.figures(None)
        for each in found.folders:
            assert numbers(each) == counted.figures(each.folder), each.folder
        for group in found.largest():
            webuis = [copy.path for copy in group.copies if "webui" in str(copy.path)]
            assert not webuis or group.copies[0].path in webuis, "A1111 knows it by its time"

    def test_named_in_every_way_at_once_it_is_the_same(
        self, store: Store, machine: Machine, tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(machine.home)
        (machine.home / "x").mkdir()
        named = [machine.home, tmp_path / "link", *machine.folder.values(), machine.home / "x/.."]
        for folders in (plain(machine.home), folders_to_scan(store, named)[0]):
            for _ in range(2):
                found = scan(store, folders, min_size=4096)
                assert found.freeable == machine.duplicate_bytes
                assert numbers(found.total)[:4] == Counted(plain(machine.home)).figures(None)[:4]
                programs = {each.folder.program for each in found.folders if each.folder}
                assert programs >= {"Hugging Face", "ComfyUI", "A1111", "Forge", "Ollama"}

    def test_nothing_is_changed_and_a_second_scan_opens_nothing(
        self, store: Store, machine: Machine, pass_time: Callable[[float], None]
    ) -> None:
        before = snapshot(machine.home)
        times = {path: path.stat().st_atime_ns for path in machine.home.rglob("*.safetensors")}
        pass_time(60)
        folders, _ = folders_to_scan(store)
        with files_opened(machine.home) as opened:
            first = scan(store, folders, min_size=4096)
        assert len(set(opened)) > len(machine.shared)
        assert first.hashed > 0
        with files_opened(*(folder.path for folder in folders)) as opened:
            second = scan(store, folders, min_size=4096)
        assert (opened, second.hashed) == ([], 0)
        assert list(second.largest()) == list(first.largest())
        assert numbers(second.total) == numbers(first.total)
        quick = scan(store, folders, min_size=4096, is_quick=True)
        assert (quick.freeable, groups_of(quick)) == (first.freeable, groups_of(first))
        assert scan(store, folders, min_size=4096).hashed == 0, "nothing was forgotten"
        assert {path: path.stat().st_atime_ns for path in times} == times
        assert snapshot(machine.home) == before

    def test_three_processes_at_once_find_the_same(
        self, machine: Machine, tmp_path: Path, pass_time: Callable[[float], None]
    ) -> None:
        pass_time(60)

        def work() -> tuple[int, int, int]:
            with Store(tmp_path / "store") as store:
                found = scan(store, folders_to_scan(store)[0], min_size=4096)
                return found.freeable, found.total.files, len(list(found.largest()))

        with Child(work) as one, Child(work) as two, Child(work) as three:
            results = {one.result(), two.result(), three.result()}
        assert [result[0] for result in results] == [machine.duplicate_bytes]
        with Store(tmp_path / "store") as store:
            assert store.volume.index.is_sound()
            assert scan(store, folders_to_scan(store)[0], min_size=4096).hashed == 0


class TestEqual:
    def test_one_byte_makes_the_difference(self, store: Store, folder: Path) -> None:
        """At the beginning, in the middle or at the end, however large the file is."""
        expected = []
        for size in (5000, 100_000, 300_000, MiB, MiB + 1, 3 * MiB):
            data, *others = variants(size)
            same = [write(folder / name / f"{size}.gguf", data) for name in "ab"]
            for number, other in enumerate(others):
                write(folder / f"{number}" / f"{size}.gguf", other)
            expected.append([[path] for path in same])
        assert groups_of(found_in(store, folder)) == sorted(expected)

    def test_sparse_files_are_equal_to_what_they_read_as(self, store: Store, folder: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            with open(folder / name, "wb") as file:
                file.truncate(4 * MiB)
        write(folder / "c.gguf", bytes(4 * MiB))
        found = found_in(store, folder)
        (group,) = found.largest()
        assert (len(group.copies), found.total.logical) == (3, 12 * MiB)
        physical = sum(allocated(path) for path in folder.iterdir())
        assert (found.freeable, found.total.physical) == (
            Counted(plain(folder)).freeable,
            physical,
        )

    def test_links_and_empty_files_are_no_duplicates(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.gguf", content(1))
        os.link(path, folder / "b.gguf")
        (folder / "c.gguf").symlink_to(path)
        (folder / "sub").mkdir()
        os.link(path, folder / "sub" / "d.gguf")
        for name in ("empty.gguf", "empty2.gguf"):
            write(folder / name, b"")
        found = found_in(store, folder, min_size=0)
        assert (groups_of(found), found.freeable, found.hashed) == ([], 0, 0)
        assert numbers(found.total) == (5, 3 * SIZE, allocated(path), 0, 0)

    def test_names_may_be_any_bytes(self, store: Store, folder: Path) -> None:
        names = map(os.fsdecode, (b"line\nbreak.gguf", b"\xff\xfe.gguf", b"'; DROP TABLE x;"))
        expected = [
            [[write(folder / where / name, content(number))] for where in ("", "sub\udcff\n")]
            for number, name in enumerate(names)
        ]
        found = scan(store, plain(folder), min_size=1, any_file=True)
        assert groups_of(found) == sorted(sorted(each) for each in expected)
        assert found.problems == ()

    @pytest.mark.parametrize("copies", [0, 1])
    def test_a_file_that_is_bound_to_a_second_name_is_one(
        self, tmp_path: Path, copies: int
    ) -> None:
        """As containers do with single files: one inode, one link, two paths."""

        def work() -> tuple[int, list[int]]:
            folder = tmp_path / "models"
            path = write(folder / "a.gguf", content(1))
            write(folder / "b.gguf", content(2))
            for number in range(copies):
                write(folder / f"copy-{number}.gguf", content(1))
            small_disks.mount(str(path), folder / "b.gguf", "", BIND, "")
            with Store(tmp_path / "store") as store:
                found = found_in(store, folder)
                return found.freeable, [len(group.copies) for group in found.largest()]

        expected = (copies * SIZE, [2] if copies else [])
        assert small_disks.in_own_namespace(work) == expected


class TestScope:
    def test_files_below_the_least_size_are_counted_but_not_compared(
        self, store: Store, folder: Path
    ) -> None:
        for name in ("a", "b"):
            write(folder / f"{name}.gguf", content(1, MiB))
            write(folder / f"{name}-small.gguf", content(1, MiB - 1))
        found = scan(store, plain(folder))
        assert (found.min_size, found.total.files, found.hashed) == (MiB, 4, 2 * MiB)
        assert groups_of(found) == [[[folder / "a.gguf"], [folder / "b.gguf"]]]
        assert len(groups_of(found_in(store, folder))) == 2

    def test_patterns_leave_files_out(self, store: Store, folder: Path) -> None:
        write(folder / "a.gguf", content(1))
        write(folder / "sub" / "deep" / "b.gguf", content(1))
        write(folder / "t.txt", content(1))
        cases = {
            "at": "sub s?b b.gguf [b].gguf {}/sub {}/sub/* sub/ {}/sub/ deep sub/deep */deep/*",
            "bt": "{}/a.gguf [!b].gguf [^b].gguf",
            "abt": "eep B.GGUF b",
            "t": "*.gguf",
            "": "{}",
        }
        patterns = [(each, left) for left, text in cases.items() for each in text.split()]
        for pattern, left in [*patterns, ("", "abt")]:
            exclude = [pattern.format(folder)]
            found = scan(store, plain(folder), min_size=1, any_file=True, exclude=exclude)
            names = sorted(copy.path.name[0] for group in found.largest() for copy in group.copies)
            assert found.total.files == len(left), pattern
            assert "".join(names) == (left if len(left) > 1 else ""), pattern

    def test_several_patterns_of_any_bytes_and_what_they_match_is_not_read(
        self, store: Store, folder: Path
    ) -> None:
        for name in (b"a.gguf", b"\xff.gguf", b"\xff.bin", b"x\n.bin", b"it's.bin", b"no/a.bin"):
            write(folder / os.fsdecode(name), content(1))
        exclude = ["*.gguf", "it's*", "no"]
        for more, left in (((), {b"\xff.bin", b"x\n.bin"}), (("\udcff*",), {b"x\n.bin", b"y.bin"})):
            with files_opened(folder) as opened:
                found = scan(store, plain(folder), min_size=1, exclude=[*exclude, *more])
            (group,) = found.largest()
            assert {os.fsencode(copy.path.name) for copy in group.copies} == left
            assert {os.path.basename(path) for path in opened} == left
            write(folder / "y.bin", content(1))

    def test_what_programs_edit_counts_apart(self, store: Store, folder: Path) -> None:
        for name in ("a.db", "b.db", "c.gguf", "d.gguf"):
            write(folder / name, content(1 if name < "c" else 2))
        found = found_in(store, folder)
        assert (found.freeable, found.editable, found.groups) == (SIZE, SIZE, 1)
        found = scan(store, plain(folder), min_size=1, any_file=True)
        assert (found.freeable, found.editable, found.groups) == (2 * SIZE, 0, 2)

    def test_no_folder_is_no_failure(self, store: Store) -> None:
        found = scan(store, [])
        assert (numbers(found.total), found.folders, groups_of(found)) == ((0,) * 5, (), [])


class TestSurvivors:
    """What the scan promises is what `dedup` would do."""

    def group(self, store: Store, *folders: ModelFolder) -> Group:
        found = scan(store, folders, min_size=1)
        (group,) = found.largest()
        plan = plan_dedup(store, found)
        assert plan.freed_size == found.freeable == group.freeable
        assert [each.survivor for each in plan.groups] == [group.copies[0].path]
        return group

    def test_which_copy_of_a_pair_survives(
        self, store: Store, folder: Path, pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """Each step gives a reason that outweighs the ones before."""
        older, younger = pair
        models = webui(tmp_path / "webui")
        folders = [*plain(folder), ModelFolder(path=models, program="A1111")]
        assert self.group(store, *folders).copies[0].path == older, "the oldest"
        os.link(younger, tmp_path / "outside.gguf")
        group = self.group(store, *folders)
        assert (group.copies[0].path, group.freeable) == (younger, SIZE), "has names outside"
        keyed = write(models / "Stable-diffusion" / "x.safetensors", content(1))
        assert self.group(store, *folders).copies[0].path == keyed, "known by its time"
        store.adopt(older)
        first = self.group(store, *folders).copies[0]
        assert (first.path, first.is_blob) == (older, True), "is a blob"

    def test_a_blob_that_no_folder_has(self, store: Store, folder: Path) -> None:
        digest = store.put_stream([content(1)]).digest
        path = write(folder / "a.gguf", content(1))
        write(folder / "b.gguf", content(2))
        group = self.group(store, *plain(folder))
        assert paths_of(group) == [[store.path_of(digest)], [path]]
        assert (group.freeable, group.digest) == (allocated(path), digest)

    def test_one_that_programs_edit_is_no_survivor(self, store: Store, folder: Path) -> None:
        for time_, name in enumerate(("a.db", "b.gguf", "c.gguf")):
            write(folder / name, content(1), mtime=time_)
        group = self.group(store, *plain(folder))
        assert group.freeable == SIZE
        assert [skip.size for skip in group.skipped if skip.option == "any-file"] == [SIZE]

    def test_what_is_linked_already_counts_once(
        self, store: Store, folder: Path, pair: tuple[Path, Path]
    ) -> None:
        os.link(pair[0], folder / "c.safetensors")
        os.link(pair[1], folder / "d.safetensors")
        group = self.group(store, *plain(folder))
        assert [len(copy.names) for copy in group.copies] == [2, 2]
        assert group.freeable == SIZE


class TestFilesystems:
    def test_copies_on_another_one_are_told_apart(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        here = write(folder / "a.gguf", content(1))
        far = [write(elsewhere / name, content(1)) for name in ("x.gguf", "y.gguf")]
        write(folder / "alone.gguf", content(2))
        write(elsewhere / "alone.gguf", content(2))
        found = found_in(store, folder, elsewhere)
        assert (found.freeable, found.elsewhere, found.groups) == (SIZE, 2 * SIZE, 1)
        group, other = found.largest(5)
        assert {copy.path for copy in group.copies} == {here, *far}
        assert len({copy.filesystem for copy in group.copies}) == 2
        assert (other.freeable, other.elsewhere) == (0, SIZE), "one copy on each frees nothing"
        counted = Counted(plain(folder, elsewhere))
        assert (counted.freeable, counted.elsewhere) == (found.freeable, found.elsewhere)

    def test_what_a_volume_there_knows_is_not_read(
        self, store: Store, folder: Path, elsewhere: Path, pass_time: Callable[[float], None]
    ) -> None:
        far = [write(elsewhere / "m" / f"{name}.gguf", content(1)) for name in "xy"]
        pass_time(60)
        neighbour = store.add_volume(elsewhere / ".smartcache")
        neighbour.adopt(far[1])
        write(folder / "a.gguf", content(1))
        with files_opened(elsewhere) as opened:
            found = found_in(store, folder, elsewhere)
        assert os.fsencode(far[1]) not in opened
        assert (found.freeable, found.elsewhere) == (SIZE, SIZE)
        (group,) = found.largest()
        there = [copy for copy in group.copies if copy.path in far]
        assert [(copy.path, copy.is_blob) for copy in there] == [(far[1], True), (far[0], False)]
        assert found.total.files == 3, "the files of the volume itself are not counted"


class TestAgain:
    @pytest.fixture
    def files(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> tuple[Path, Path]:
        """Two equal large files that were scanned, and some that differ."""
        for number in range(6):
            write(folder / f"{number}.gguf", content(10 + number, 2 * MiB))
        paths = (
            write(folder / "a.gguf", content(1, MiB)),
            write(folder / "b.gguf", content(1, MiB)),
        )
        pass_time(60)
        found = found_in(store, folder)
        assert (found.freeable, found.hashed) == (MiB, 2 * MiB)
        return paths

    @pytest.mark.usefixtures("files")
    def test_nothing_is_read_but_what_changed(self, store: Store, folder: Path) -> None:
        before = bytes_read()
        with files_opened(folder) as opened:
            found = found_in(store, folder)
        assert (found.hashed, found.freeable, opened) == (0, MiB, [])
        assert bytes_read() - before < 512 * 1024
        path = write(folder / "c.gguf", content(1, MiB))
        with files_opened(folder) as opened:
            found = found_in(store, folder)
        assert set(opened) == {os.fsencode(path)}, "a new copy is found by reading it alone"
        assert (found.freeable, found.hashed) == (2 * MiB, MiB)

    def test_a_changed_file_is_no_duplicate(
        self, store: Store, folder: Path, files: tuple[Path, Path]
    ) -> None:
        for how in ("bytes", "time set back", "size"):
            st = files[0].stat()
            files[0].write_bytes(content(2, MiB + (how == "size")))
            if how == "time set back":
                os.utime(files[0], ns=(st.st_atime_ns, st.st_mtime_ns))
            assert groups_of(found_in(store, folder)) == [], how
            files[0].write_bytes(content(1, MiB))
            assert groups_of(found_in(store, folder)) == [[[files[0]], [files[1]]]], how
        files[0].unlink()
        found = found_in(store, folder)
        assert (groups_of(found), found.total.files) == ([], 7), "removed"

    def test_a_changed_change_time_alone_is_reason_to_read_again(
        self, store: Store, folder: Path, files: tuple[Path, Path]
    ) -> None:
        files[0].chmod(0o664)
        found = found_in(store, folder)
        assert (found.hashed, found.freeable) == (MiB, MiB)

    @pytest.mark.usefixtures("files")
    def test_a_copy_or_blob_of_a_file_that_was_only_sampled_is_found(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "copy.gguf", content(12, 2 * MiB))
        assert [[folder / "2.gguf"], [path]] in groups_of(found_in(store, folder))
        store.put_stream([content(13, 2 * MiB)])
        found = found_in(store, folder)
        assert [folder / "3.gguf"] in [copy for group in groups_of(found) for copy in group]

    def test_young_files_are_read_again(self, store: Store, folder: Path) -> None:
        """A second change within one tick of the clock would leave no trace."""
        for name in ("a.gguf", "b.gguf"):
            write(folder / name, content(1))
        for _ in range(2):
            found = found_in(store, folder)
            assert (found.hashed, found.freeable) == (2 * SIZE, SIZE)

    def test_other_folders_are_not_touched_and_a_blob_since_is_the_same_file(
        self, store: Store, folder: Path, files: tuple[Path, Path], tmp_path: Path
    ) -> None:
        write(tmp_path / "other" / "a.gguf", content(1, MiB))
        found = found_in(store, tmp_path / "other")
        assert (found.freeable, found.total.files) == (0, 1)
        assert found_in(store, folder, tmp_path / "other").freeable == 2 * MiB
        store.adopt(files[1])
        found = found_in(store, folder)
        (group,) = found.largest()
        assert paths_of(group) == [[files[1]], [files[0]]]
        assert (found.freeable, found.total.shared) == (MiB, allocated(files[1]))


def test_quick_groups_are_likely_and_nothing_is_hashed(store: Store, folder: Path) -> None:
    """Models of one kind have equal heads; here the tails are equal too."""
    for number in (1, 2):
        write(folder / f"{number}.gguf", content(8, MiB) + content(number, MiB) + content(9, MiB))
    write(folder / "other.gguf", content(3, 3 * MiB))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(folder / f"{name}.gguf", content(seed, 5000))
    found = scan(store, plain(folder), min_size=1, is_quick=True)
    likely, small = found.largest()
    assert (likely.digest, len(likely.copies), len(small.copies)) == ("", 2, 2)
    gain = likely.copies[1].allocated + small.copies[1].allocated
    assert (found.is_quick, found.hashed, found.freeable) == (True, 0, gain)
    whole = scan(store, plain(folder), min_size=1)
    assert groups_of(whole) == [[[folder / "a.gguf"], [folder / "b.gguf"]]], "the bytes tell"
    assert whole.hashed == 2 * 3 * MiB + 3 * 5000


@pytest.mark.usefixtures("pair")
def test_a_survey_opens_no_file_and_tells_what_is_known(store: Store, folder: Path) -> None:
    for freeable, files in ((0, 2), (SIZE, 3)):
        with files_opened(folder) as opened:
            found = survey(store, plain(folder), min_size=1)
        assert (opened, found.freeable, found.total.files) == ([], freeable, files)
        found_in(store, folder)
        write(folder / "c.safetensors", content(1))


class TestTroubles:
    @needs_root
    def test_unreadable_files_are_named_and_the_rest_is_compared(self) -> None:
        with folder_of(ANN) as folder:
            for name in ("a", "b", "closed"):
                path = write(folder / "m" / f"{name}.gguf", content(1))
                os.chown(path, 0 if name == "closed" else ANN, -1)
            os.chown(folder / "m", ANN, -1)
            (folder / "m" / "closed.gguf").chmod(0o600)

            def work() -> tuple[list[tuple[str, str]], int, int, int]:
                with Store(folder / "store") as store:
                    found = found_in(store, folder / "m")
                    problems = [(each.path.name, each.reason) for each in found.problems]
                    return problems, found.freeable, found.total.files, len(list(found.largest()))

            with Child(work, user=ANN, group=TEAM) as child:
                result = child.result()
            assert result == ([("closed.gguf", "Permission denied")], SIZE, 3, 1)

    @needs_root
    def test_a_remembered_folder_that_cannot_be_reached_is_a_warning(self) -> None:
        with folder_of(ANN) as folder:
            write(folder / "closed" / "m" / "a.gguf", content(1))

            def add() -> None:
                with Store(folder / "store") as store:
                    store.add_folder(folder / "closed" / "m")

            def look() -> tuple[list[Path], list[str]]:
                with Store(folder / "store") as store:
                    found, warnings = folders_to_scan(store)
                    return [each.path for each in found], warnings

            with Child(add, user=ANN, group=TEAM) as adding:
                adding.result()
            (folder / "closed").chmod(0o700)
            with Child(look, user=ANN, group=TEAM) as looking:
                found, warnings = looking.result()
            assert folder / "closed" / "m" not in found
            assert any(str(folder / "closed" / "m") in warning for warning in warnings)

    def test_a_file_that_is_written_is_busy(
        self, store: Store, folder: Path, pair: tuple[Path, Path]
    ) -> None:
        with open(pair[0], "r+b"):
            found = found_in(store, folder)
            assert (found.busy, found.freeable) == ((pair[0],), 0)
        assert found_in(store, folder).freeable == SIZE

    def test_a_file_that_changes_between_walk_and_hash_is_named(
        self, store: Store, folder: Path, pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        path = pair[1]
        elsewhere = write(tmp_path / "elsewhere.gguf", content(1))
        ways: dict[str, Callable[[], object]] = {
            "removed": lambda: None,
            "replaced": lambda: write(path, content(1)),
            "symlink": lambda: path.symlink_to(elsewhere),
            "pipe": lambda: os.mkfifo(path),
        }

        def act() -> None:
            path.unlink()
            ways[how]()

        for how in ways:
            # The first progress is that of the walk, when it has listed the directory.
            found = scan(store, plain(folder), min_size=1, progress=Watch(act))
            assert [each.path for each in found.problems] == [path], how
            assert (groups_of(found), found.freeable) == ([], 0), how
            path.unlink(missing_ok=True)
            write(path, content(1))
        changed = Watch(lambda: path.write_bytes(content(1)))
        found = scan(store, plain(folder), min_size=1, progress=changed)
        assert ([each.path for each in found.problems], groups_of(found)) == ([path], [])

    def test_a_folder_that_vanishes_during_the_scan(
        self, store: Store, folder: Path, pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        other = write(tmp_path / "other" / "c.gguf", content(1))
        gone = Watch(lambda: shutil.rmtree(folder))
        found = scan(store, plain(other.parent, folder), min_size=1, progress=gone)
        assert {each.path for each in found.problems} <= {folder, *pair}
        assert found.problems
        assert (groups_of(found), found.freeable) == ([], 0)
        assert found_in(store, other.parent).problems == ()

    @pytest.mark.usefixtures("pair")
    def test_one_that_is_away_keeps_what_is_known_of_it(
        self,
        store: Store,
        folder: Path,
        tmp_path: Path,
        pass_time: Callable[[float], None],
    ) -> None:
        pass_time(60)
        found_in(store, folder)
        folder.rename(tmp_path / "unplugged")
        away = found_in(store, folder)
        assert [(each.path, each.reason) for each in away.problems] == [
            (folder, "No such file or directory")
        ]
        assert away.folders == ()
        assert len(store.sightings(SIZE)) == 2
        (tmp_path / "unplugged").rename(folder)
        found = found_in(store, folder)
        assert (found.hashed, found.freeable) == (0, SIZE)

    def test_killed_while_hashing_it_keeps_what_was_learned(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch,
        pass_time: Callable[[float], None],
    ) -> None:  # fmt: skip
        monkeypatch.setattr(store_contents, "_FLUSH_SECONDS", 0.05)
        size, count = 300_000, 12
        for number in range(count):
            write(folder / f"{number}.gguf", content(number % 2, size))
        pass_time(60)

        class Dying(Watch):
            def advance(self, amount: int = 1) -> None:
                super().advance(amount)
                if self.done > 8 * size:
                    while known() < 6:  # the main thread writes what was learned
                        time.sleep(0.02)
                    os.kill(os.getpid(), signal.SIGKILL)

        def known() -> int:
            with closing(sqlite3.connect(tmp_path / "store" / "index.sqlite3")) as index:
                return int(index.execute("SELECT COUNT(digest) FROM memos").fetchone()[0])

        def work() -> None:
            with Store(tmp_path / "store") as store:
                scan(store, plain(folder), min_size=1, progress=Dying())

        assert was_killed(in_child(work))
        with Store(tmp_path / "store") as store:
            assert store.volume.index.is_sound()
            found = found_in(store, folder)
            assert found.freeable == Counted(plain(folder)).freeable
            assert 0 < found.hashed <= 6 * size
            assert found_in(store, folder).hashed == 0


class TestAfterALostIndex:
    """`prune` may run only when all folders were seen."""

    def test_only_a_scan_that_saw_everything_lets_prune_run(
        self, store: Store, folder: Path
    ) -> None:
        index = store.volume.index
        index.set_note(REBUILT, "1")
        scan(store, plain(folder))
        assert index.note(REBUILT) is not None, "there may be more folders"
        scan(store, plain(folder, folder / "not there"), is_whole=True)
        assert index.note(REBUILT) is not None, "one could not be seen"
        scan(store, plain(folder), is_whole=True)
        assert index.note(REBUILT) is None


class TestFolders:
    def test_named_ones_are_identified_and_each_is_one_however_it_is_named(
        self, store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = comfyui(folder / "ComfyUI")
        found, _ = folders_to_scan(store, [models, str(folder)])
        assert [(each.path, each.program) for each in found] == [(models, "ComfyUI"), (folder, "")]
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link").symlink_to(folder)
        others = (folder, tmp_path / "link", folder / ".." / folder.name, Path(folder.name))
        for other in others:
            found, _ = folders_to_scan(store, [folder, other])
            assert [each.path for each in found] == [folder], other

    def test_what_is_no_folder_is_an_error(self, store: Store, folder: Path) -> None:
        file = write(folder / "file", b"")
        (folder / "broken").symlink_to("nowhere")
        for path in (folder / "nothing", file, folder / "broken"):
            with pytest.raises(StoreError) as raised:
                folders_to_scan(store, [folder, path])
            assert str(path) in raised.value.message
            assert raised.value.hint

    def test_remembered_ones_come_with_those_of_programs(
        self, store: Store, folder: Path, machine: Machine, tmp_path: Path
    ) -> None:
        store.add_folder(folder)
        store.add_folder(tmp_path / "away")
        store.add_folder(machine.comfyui, program="ComfyUI")
        found, warnings = folders_to_scan(store)
        paths = [each.path for each in found]
        assert len(paths) == len(set(paths))
        assert {folder, *machine.folder.values()} <= set(paths)
        assert [each.is_given for each in found if each.path in (folder, machine.comfyui)] == [
            True,
            True,
        ]
        assert warnings == [f"{tmp_path / 'away'} is not there now"]
        assert store.drop_folder(folder)
        assert not store.drop_folder(folder)
        assert folder not in [each.path for each in folders_to_scan(store)[0]]

    def test_forgetting_one_forgets_what_was_seen_in_it(
        self, store: Store, folder: Path, pair: tuple[Path, Path]
    ) -> None:
        store.add_folder(folder)
        found_in(store, folder)
        assert len(store.sightings(SIZE)) == 2
        assert store.drop_folder(folder)
        assert (store.sightings(SIZE), store.folders()) == ([], [])
        assert all(path.exists() for path in pair)

    @pytest.mark.usefixtures("machine")
    def test_only_some_programs(self, store: Store) -> None:
        found, _ = folders_to_scan(store, only=["ollama", "LM Studio"])
        assert {each.program for each in found} == {"Ollama", "LM Studio"}


# random trees

PROGRAMS = ("", "ComfyUI", "A1111")


def grow(top: Path, seed: int, *, files: int) -> tuple[list[ModelFolder], list[bytes]]:
    """Make folders a, a-b and c with files, copies, hard links and symlinks; some blobs too."""
    chance = random.Random(seed)
    folders = [
        ModelFolder(path=top / name, program=chance.choice(PROGRAMS)) for name in ("a", "a-b", "c")
    ]
    directories = [each.path / below for each in folders for below in ("", "x", "x-y", "x/z")]
    directories.append(top / "outside")
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    contents = [content(number, size) for size in (3000, 5000, 9000) for number in (1, 2)]
    paths: list[Path] = []
    for number in range(files):
        name = f"{number}.{chance.choice(['gguf', 'gguf', 'safetensors', 'db'])}"
        path = chance.choice(directories) / name
        kind = chance.random()
        if paths and kind < 0.3:
            os.link(chance.choice(paths), path)
        elif paths and kind < 0.35:
            path.symlink_to(chance.choice(paths))
            continue
        else:
            write(path, chance.choice(contents), mtime=chance.choice([10, 10, 20]))
        paths.append(path)
    return folders, chance.sample(contents, 2) if chance.random() < 0.4 else []


@given(seed=st.integers(0, 1 << 32), files=st.integers(0, 14))
@hypothesis_settings(max_examples=hypothesis_settings().max_examples * 2 // 5)
def test_figures_are_those_of_a_plain_count(seed: int, files: int) -> None:
    """Files, sizes, blocks of each inode once, what is shared, and what links would give back."""
    with tempfile.TemporaryDirectory(prefix="smartcache-test-") as name:
        top = Path(os.path.realpath(name))
        folders, stored = grow(top, seed, files=files)
        with Store(top / "store") as store:
            blobs = [store.path_of(store.put_stream([data]).digest) for data in stored]
            counted = Counted(folders, min_size=4000, blobs=blobs)
            for _ in range(2):
                found = scan(store, folders, min_size=4000)
                assert numbers(found.total) == counted.figures(None)
                for each in found.folders:
                    assert numbers(each) == counted.figures(each.folder)
                assert (found.editable, found.elsewhere) == (counted.editable, 0)
                expected = sorted(
                    sorted(sorted(os.fsdecode(p) for p, _ in each.names) for each in copies)
                    for copies in counted.contents
                )
                assert len(groups_of(found)) == len(expected)
                in_folders = [
                    sorted(
                        [] if copy.names[0].folder.program == "smartcache"
                        else sorted(str(each.path) for each in copy.names)
                        for copy in group.copies
                    )
                    for group in found.largest()
                ]  # fmt: skip
                assert sorted(in_folders) == expected
            assert sum(group.freeable for group in found.largest()) == found.freeable


def variants(size: int) -> list[bytes]:
    """Contents that differ at their beginning, in the middle, or at the end only."""
    data = content(1, size)
    places = (0, size // 2, size // 2 + 1, size - 1)
    return [data, *(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places)]


def disturb(chance: random.Random, paths: list[Path], contents: list[bytes]) -> None:
    """Change, copy, link, rename or remove some files."""
    for _ in range(chance.randrange(4)):
        path = chance.choice(paths)
        other = path.with_name(f"{chance.randrange(1000)}.gguf")
        kind = chance.choice(["write", "copy", "link", "remove", "mode", "rename", "back"])
        if not path.exists() or kind == "write":
            write(path, chance.choice(contents))
        elif kind in ("copy", "link") and not other.exists():
            (shutil.copy2 if kind == "copy" else os.link)(path, other)
            paths.append(other)
        elif kind == "remove":
            path.unlink()
        elif kind == "mode":
            path.chmod(0o664)
        elif kind == "rename":
            path.rename(path.with_name(f"r{path.name}"))
        elif kind == "back":
            st = path.stat()
            path.write_bytes(chance.choice([c for c in contents if len(c) == st.st_size]))
            os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


@given(seed=st.integers(0, 1 << 32), files=st.integers(2, 12), ahead=st.sampled_from([0, 60]))
@hypothesis_settings(max_examples=hypothesis_settings().max_examples * 2 // 5)
def test_a_scan_that_remembers_finds_what_a_new_one_finds(
    seed: int, files: int, ahead: int
) -> None:
    """After any changes; with young files too, and with quick scans and hashes in between."""
    chance = random.Random(seed)
    contents = variants(100_000) + variants(60_000) + variants(5000)
    now = time.time_ns
    with (
        tempfile.TemporaryDirectory(prefix="smartcache-test-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(folders_scan, "SAMPLE_MIN_SIZE", 50_000)
        patch.setattr(time, "time_ns", lambda: now() + ahead * 10**9)
        top = Path(os.path.realpath(name))
        folder = top / "models"
        paths = [write(folder / f"{n}.gguf", chance.choice(contents)) for n in range(files)]
        with Store(top / "store") as store:
            for _ in range(4):
                if chance.random() < 0.3:
                    scan(store, plain(folder), min_size=1, is_quick=True)
                if chance.random() < 0.3 and any(folder.iterdir()):
                    store.digest_of(chance.choice(sorted(folder.iterdir())))
                if chance.random() < 0.2:
                    store.put_stream([chance.choice(contents)])
                found = scan(store, plain(folder), min_size=1)
                blobs = [store.path_of(blob.digest) for blob in store.blobs()]
                counted = Counted(plain(folder), blobs=blobs)
                assert numbers(found.total) == counted.figures(None)
                expected = [
                    sorted(os.fsdecode(p) for copy in copies for p, _ in copy.names)
                    for copies in counted.contents
                ]
                names = [
                    sorted(
                        str(each.path)
                        for copy in group.copies
                        for each in copy.names
                        if each.folder.program != "smartcache"
                    )
                    for group in found.largest()
                ]
                assert sorted(names) == sorted(expected)
                if ahead and not found.problems:
                    assert scan(store, plain(folder), min_size=1).hashed == 0
                disturb(chance, paths, contents)


@pytest.mark.parametrize("kind", DISKS)
def test_copies_that_share_their_blocks_give_nothing_back(kind: Disk, tmp_path: Path) -> None:
    with reflink_disk(kind, tmp_path) as disk:
        first = write(disk / "m" / "a.gguf", content(1, MiB), mtime=1)
        os.sync()
        subprocess.run(["cp", "--reflink=always", first, disk / "m" / "b.gguf"], check=True)
        write(disk / "m" / "c.gguf", content(1, MiB))
        os.sync()
        with Store(disk / "store") as store:
            found = scan(store, plain(disk / "m"), min_size=1)
            (group,) = found.largest()
            shared = {copy.path.name: copy.shares_with for copy in group.copies}
            assert shared == {"a.gguf": None, "b.gguf": first.stat().st_ino, "c.gguf": None}
            assert found.freeable == group.freeable == MiB


def test_the_largest_groups_come_first_however_many(store: Store, folder: Path) -> None:
    gains = {}
    for number in range(KEPT + 20):
        data = content(number, 4096 * (1 + number % 9) - number)
        for name in ("a", "b"):
            write(folder / name / f"{number}.gguf", data)
        gains[number] = allocated(folder / "a" / f"{number}.gguf")
    found = found_in(store, folder)
    best = sorted(gains.values(), reverse=True)
    for count in (0, 1, 7, KEPT, KEPT + 5, KEPT + 20, 10_000):
        assert [group.freeable for group in found.largest(count)] == best[:count]
    sizes = [group.size for group in found.largest()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == found.groups == KEPT + 20


def test_a_scan_can_be_read_after_others_and_while_the_index_is_written(
    store: Store, folder: Path, pair: tuple[Path, Path]
) -> None:
    found = found_in(store, folder)
    for group in found.largest():
        store.add_folder(folder / group.digest[:4])
        found_in(store, folder)
    assert len(list(found.largest())) == 1


def high_water() -> int:
    """The most memory this process had since the mark was last set."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_many_files_need_no_more_memory_than_few(tmp_path: Path) -> None:
    """100,000 sightings in 20,000 groups, added up and gone through."""
    count = 100_000

    def work() -> tuple[int, int, int]:
        folders = {1: ModelFolder(path=Path("/m"))}
        with Store(tmp_path / "store") as store:
            index = store.catalog
            with index.write():
                number = index.set_folder(Path("/m"), program="")
                assert number == 1
                filesystem = index.filesystem_number("f")
                for top in range(100):
                    directory = index.set_directory(b"/m/some/long/directory/%d" % top, number)
                    inodes = range(top, count, 100)
                    index.put_seen(
                        (directory, b"some long name of a model %d.gguf" % n, 5000 + n % 500,
                         filesystem, n, 1, 1, 1, 8192)
                        for n in inodes
                    )  # fmt: skip
                    index.learn(
                        ("f", n, 5000 + n % 500, 1, 1, 0, b"%032d" % (n % 20_000), None)
                        for n in inodes
                    )
            scope = Scope(home="h", boot="b", folders=(1,))
            grouping = Grouping(
                folders=folders, store=folders[1], blob_path=Path, is_blob=lambda *_: False,
                checks=Unhindered(),
            )  # fmt: skip
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before = high_water()
            tally = Tally(grouping, index.members(scope))
            index.folder_sums(scope)
            rows = index.members(scope)
            seen = sum(1 for _ in itertools.islice(grouping.groups(rows), 4000))
            return tally.groups, seen, high_water() - before

    with Child(work) as child:
        added, seen, memory = child.result()
    assert (added, seen) == (20_000, 4000)
    assert memory < 50 * MiB
