"""A scan of real folders: what is equal, what it takes, what is remembered for the next time."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smartcache.errors import StoreError
from smartcache.folders import scan as folders_scan
from smartcache.folders import walk as walk_module
from smartcache.folders.groups import KEPT, Group
from smartcache.folders.programs import ModelFolder, ignore
from smartcache.folders.scan import Scan, folders_to_scan, known_folders, survey
from smartcache.folders.scan import scan_folders as scan
from smartcache.folders.walk import Walked
from smartcache.store import hashes as store_contents
from smartcache.store.catalog import Learned, Scope
from smartcache.store.store import Store
from smartcache.system.kernel import StatKey
from tests.folders.counting import (
    Counted,
    files_opened,
    groups_of,
    numbers,
    plain,
)
from tests.folders.trees import SIZE, Machine, comfyui, content, write
from tests.processes.children import Child
from tests.processes.killing import in_child, was_killed
from tests.store import small_disks
from tests.store.files import Watch, adopt, allocated, snapshot

MiB = 1 << 20
BIND = 4096
"""MS_BIND of mount(2)."""


@pytest.fixture
def pair(folder: Path) -> tuple[Path, Path]:
    """Two files with the same bytes."""
    return (
        write(folder / "a.safetensors", content(1), mtime=1_600_000_000),
        write(folder / "b.safetensors", content(1)),
    )


def found_in(store: Store, *folders: Path, min_size: int = 1) -> Scan:
    return scan(store, plain(*folders), min_size=min_size)


class TestMachine:
    """The folders of every program, with what several of them keep."""

    def test_duplicates_of_all_programs_are_found_with_the_figures_of_each(
        self, store: Store, machine: Machine, tmp_path: Path
    ) -> None:
        """The same however the folders are named, all at once too."""
        folders, warnings = folders_to_scan(store)
        found = scan(store, folders, min_size=4096)
        assert (found.freeable, warnings) == (machine.duplicate_bytes, [])
        assert (found.problems, found.busy, found.elsewhere) == ((), (), 0)
        expected = [[[path] for path in sorted(each.paths)] for each in machine.shared.values()]
        assert groups_of(found) == sorted(expected), "what only one has is in no group"
        assert (found.groups, found.damaged) == (len(machine.shared), ())
        programs = {each.folder.path: each.folder.program for each in found.folders if each.folder}
        assert {path: programs[path] for path in machine.folder.values()} == {
            path: name for name, path in machine.folder.items()
        }
        counted = Counted(folders, min_size=4096)
        assert numbers(found.total) == counted.figures(None)
        for each in found.folders:
            assert numbers(each) == counted.figures(each.folder), each.folder
        (tmp_path / "link").symlink_to(machine.home)
        (machine.home / "x").mkdir()
        named = [machine.home, tmp_path / "link", *machine.folder.values(), machine.home / "x/.."]
        for folders in (plain(machine.home), folders_to_scan(store, named)[0]):
            found = scan(store, folders, min_size=4096)
            assert found.freeable == machine.duplicate_bytes
            assert numbers(found.total)[:4] == Counted(plain(machine.home)).figures(None)[:4]
            names = {each.folder.program for each in found.folders if each.folder}
            assert names >= {"Hugging Face", "ComfyUI", "A1111", "Forge", "Ollama"}

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
            assert scan(store, folders_to_scan(store)[0], min_size=4096).hashed == 0


class TestEqual:
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

    def test_what_several_patterns_of_any_bytes_match_is_not_read(
        self, store: Store, folder: Path
    ) -> None:
        for name in (b"a.gguf", b"\xff.gguf", b"\xff.bin", b"x\n.bin", b"it's.bin", b"no/a.bin"):
            write(folder / os.fsdecode(name), content(1))
        for more, left in (((), {b"\xff.bin", b"x\n.bin"}), (("\udcff*",), {b"x\n.bin", b"y.bin"})):
            with files_opened(folder) as opened:
                exclude = ["*.gguf", "it's*", "no", *more]
                found = scan(store, plain(folder), min_size=1, exclude=exclude)
            (group,) = found.largest()
            assert {os.fsencode(copy.path.name) for copy in group.copies} == left
            assert {os.path.basename(path) for path in opened} == left
            write(folder / "y.bin", content(1))


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

    def test_what_a_pool_there_knows_is_not_read(
        self, store: Store, folder: Path, elsewhere: Path, pass_time: Callable[[float], None]
    ) -> None:
        far = [write(elsewhere / "m" / f"{name}.gguf", content(1)) for name in "xy"]
        pass_time(60)
        store.add_pool(elsewhere / ".smartcache")
        adopt(store, far[1])
        write(folder / "a.gguf", content(1))
        with files_opened(elsewhere) as opened:
            found = found_in(store, folder, elsewhere)
        assert opened.count(os.fsencode(far[1])) == 1, "its header, and not its bytes"
        assert (found.freeable, found.elsewhere, found.hashed) == (SIZE, SIZE, 2 * SIZE)
        (group,) = found.largest()
        there = [copy for copy in group.copies if copy.path in far]
        assert [(copy.path, copy.is_blob) for copy in there] == [(far[1], True), (far[0], False)]
        assert found.total.files == 3, "the files of the pool itself are not counted"


@pytest.mark.usefixtures("pair")
def test_a_survey_opens_no_file_and_tells_what_is_known(store: Store, folder: Path) -> None:
    for freeable, files in ((0, 2), (SIZE, 3)):
        with files_opened(folder) as opened:
            found = survey(store, plain(folder), min_size=1)
        assert (opened, found.freeable, found.total.files) == ([], freeable, files)
        found_in(store, folder)
        write(folder / "c.safetensors", content(1))


class TestTroubles:
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
        monkeypatch.setattr(store_contents, "_FLUSH_SECONDS", 0)
        size, count = 60_000, 12
        for number in range(count):
            write(folder / f"{number}.gguf", content(number % 2, size))
        pass_time(60)

        class Dying(Watch):
            def advance(self, amount: int = 1) -> None:
                super().advance(amount)
                if self.done > 8 * size:
                    os.kill(os.getpid(), signal.SIGKILL)

        def work() -> None:
            with Store(tmp_path / "store") as store:
                scan(store, plain(folder), min_size=1, progress=Dying())

        assert was_killed(in_child(work))
        with Store(tmp_path / "store") as store:
            for hashed in (5 * size, 0):
                found = found_in(store, folder)
                assert (found.freeable, found.hashed) == (Counted(plain(folder)).freeable, hashed)


class TestFolders:
    def test_named_ones_are_identified_and_each_is_one_however_it_is_named(
        self, store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = comfyui(folder / "ComfyUI")
        found, _ = folders_to_scan(store, [models, str(folder)])
        assert [(each.path, each.program) for each in found] == [(models, "ComfyUI"), (folder, "")]
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link").symlink_to(folder)
        for other in (folder, tmp_path / "link", folder / ".." / folder.name, Path(folder.name)):
            found, _ = folders_to_scan(store, [folder, other])
            assert [each.path for each in found] == [folder], other

    def test_what_is_no_folder_is_an_error_and_what_is_ignored_a_warning(
        self, store: Store, folder: Path
    ) -> None:
        file = write(folder / "file", b"")
        (folder / "broken").symlink_to("nowhere")
        for path in (folder / "nothing", file, folder / "broken"):
            with pytest.raises(StoreError) as raised:
                folders_to_scan(store, [folder, path])
            assert str(path) in raised.value.message
            assert raised.value.hint
        ignore([str(folder)])
        store.add_folder(folder)
        found, (warning,) = folders_to_scan(store, [folder])
        assert (found, str(folder) in warning) == ([], True)
        assert folder not in [each.path for each in folders_to_scan(store)[0]]
        assert known_folders(store) == []

    def test_remembered_ones_come_with_those_of_programs_until_they_are_forgotten(
        self, store: Store, folder: Path, pair: tuple[Path, Path], machine: Machine, tmp_path: Path
    ) -> None:
        """With what was seen in them."""
        store.add_folder(folder)
        store.add_folder(tmp_path / "away")
        store.add_folder(machine.comfyui, program="ComfyUI")
        found, warnings = folders_to_scan(store)
        paths = [each.path for each in found]
        assert len(paths) == len(set(paths))
        assert {folder, *machine.folder.values()} <= set(paths)
        assert all(each.is_given for each in found if each.path in (folder, machine.comfyui))
        assert warnings == [f"{tmp_path / 'away'} is not there now"]
        found_in(store, folder)
        assert len(store.sightings(SIZE)) == 2
        assert store.drop_folder(folder)
        assert not store.drop_folder(folder)
        assert store.sightings(SIZE) == []
        assert folder not in [each.path for each in folders_to_scan(store)[0]]
        assert all(path.exists() for path in pair)


# random trees


def variants(size: int) -> list[bytes]:
    """Contents that differ at their beginning, in the middle, or at the end only."""
    data = content(1, size)
    places = (0, size // 2, size // 2 + 1, size - 1)
    return [data, *(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places)]


CONTENTS = [
    *variants(100_000),
    *variants(60_000),
    *variants(5000),
    content(1, 3000),
    b"",
    bytes(9000),
]
BELOW = ("", "x", "x-y", "x/z")


def disturb(chance: random.Random, paths: list[Path], directories: list[Path]) -> None:
    """Make, change, copy, link, rename or remove a file."""
    kinds = ["write", "write", "copy", "link", "symlink", "remove", "mode", "rename", "back"]
    kind, data = chance.choice(kinds), chance.choice(CONTENTS)
    name = f"{chance.randrange(100_000)}.{chance.choice(['gguf', 'gguf', 'safetensors', 'db'])}"
    new = chance.choice(directories) / name
    path = chance.choice([each for each in paths if each.is_file()] or [new])
    if path == new or kind == "write":
        new = chance.choice([new, path])
        write(new, data, mtime=chance.choice([10, 10, 20]))
    elif kind in ("copy", "link"):
        (shutil.copy2 if kind == "copy" else os.link)(path, new)
    elif kind == "symlink":
        new.symlink_to(path)
        return
    elif kind == "remove":
        path.unlink()
    elif kind == "mode":
        path.chmod(0o664)
    elif kind == "rename":
        path.rename(new)
    else:
        st = path.stat()
        path.write_bytes(chance.choice([each for each in CONTENTS if len(each) == st.st_size]))
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
    paths.append(new)


def rearrange(chance: random.Random, paths: list[Path], directories: list[Path]) -> None:
    """Move or remove a directory, or put one in the place of a file."""
    kind, inner = chance.choice(["move", "remove", "file"]), chance.choice(directories)
    files = [path for path in paths if path.is_file()]
    moved = inner.with_name("moved")
    if kind == "file" and files:
        path = chance.choice(files)
        for link in (each for directory in directories for each in directory.iterdir()):
            if link.is_symlink() and link.readlink() == path:
                link.unlink()  # else it would lead a program to a directory
        path.unlink()
        paths.append(write(path / "in its place.gguf", chance.choice(CONTENTS)))
    elif kind == "remove" and inner.name != "outside":
        shutil.rmtree(inner)
    elif kind == "move" and inner.parent in directories and not moved.exists():
        inner.rename(moved)
        paths += moved.rglob("*.gguf")
    for each in directories:
        each.mkdir(parents=True, exist_ok=True)


@given(seed=st.integers(0, 1 << 32), files=st.integers(0, 14), ahead=st.sampled_from([0, 60]))
@hypothesis_settings(max_examples=hypothesis_settings().max_examples * 3 // 4)
def test_figures_are_those_of_a_plain_count_whatever_is_remembered(
    seed: int, files: int, ahead: int
) -> None:
    """Files, sizes, blocks of each inode once, what is shared, and what links would give back.

    After any changes; with young files too, and with quick scans, blobs and hashes in between.
    """
    chance, now = random.Random(seed), time.time_ns
    with (
        tempfile.TemporaryDirectory(prefix="smartcache-test-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(folders_scan, "SAMPLE_MIN_SIZE", 50_000)
        patch.setattr(walk_module, "_LISTINGS", 2)
        patch.setattr(time, "time_ns", lambda: now() + ahead * 10**9)
        top = Path(os.path.realpath(name))
        folders = [
            ModelFolder(path=top / each, program=chance.choice(["", "ComfyUI", "A1111"]))
            for each in ("a", "a-b", "c", "a/x/z")
        ]
        directories = [top / each / below for each in ("a", "a-b", "c") for below in BELOW]
        directories.append(top / "outside")
        for each in directories:
            each.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        with Store(top / "store") as store:
            for _ in range(3):
                for _ in range(files if not paths else chance.randrange(4)):
                    disturb(chance, paths, directories)
                if chance.random() < 0.4:
                    rearrange(chance, paths, directories)
                chosen = chance.sample(folders, chance.randint(1, len(folders)))
                there = [path for path in paths if path.is_file()]
                if chance.random() < 0.3:
                    scan(store, chosen, min_size=4000, is_quick=True)
                if chance.random() < 0.3 and there:
                    store.digest_of(chance.choice(there))
                if chance.random() < 0.2:
                    store.put_stream([chance.choice(CONTENTS)])
                found = scan(store, chosen, min_size=4000)
                blobs = [Path(store.layout.blob(blob.digest)) for blob in store.blobs()]
                counted = Counted(chosen, min_size=4000, blobs=blobs)
                for figures in (found.total, *found.folders):
                    assert numbers(figures) == counted.figures(figures.folder)
                assert (found.editable, found.elsewhere) == (counted.editable, 0)
                assert sorted(map(names_of, found.largest())) == sorted(
                    sorted(sorted(os.fsdecode(p) for p, _ in copy.names) for copy in copies)
                    for copies in counted.contents
                )
                assert sum(group.freeable for group in found.largest()) == found.freeable
                if ahead and not found.problems:
                    assert scan(store, chosen, min_size=4000).hashed == 0


def names_of(group: Group) -> list[list[str]]:
    """The names of each copy; none for a blob that only the store has."""
    return sorted(
        [] if copy.is_only_in_store else sorted(str(name.path) for name in copy.names)
        for copy in group.copies
    )


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


def test_many_files_need_no_more_memory_than_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 files in 20,000 groups, added up and gone through."""
    count = 100_000

    def work() -> tuple[int, int, int]:
        with Store(tmp_path / "store") as store:
            index = store.catalog
            number = index.set_folder(tmp_path, program="")
            at = index.filesystem_number("f")
            for top in range(100):
                path = tmp_path / "some long directory" / f"{top}"
                path.mkdir(parents=True)
                inodes = range(top, count, 100)
                with index.write():
                    directory = index.set_directory(os.fsencode(path), number)
                    index.put_seen(
                        (directory, b"some long name of a model %d.gguf" % n,
                         (at, n, 5000 + n % 500, 1, 1, 1, 8192, 0o644, 0), 0)
                        for n in inodes
                    )  # fmt: skip
                index.learn(
                    Learned(at, n, StatKey(5000 + n % 500, 1, 1), 0, b"%032d" % (n % 20_000), None,
                            "")
                    for n in inodes
                )  # fmt: skip
            walked = Walked(folders={number: ModelFolder(path=tmp_path)}), Scope((number,))
            monkeypatch.setattr(folders_scan, "look", lambda *_, **__: walked)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before = high_water()
            found = scan(store, [])
            seen = sum(1 for _ in itertools.islice(found.largest(), 4000))
            return found.groups, seen, high_water() - before

    with Child(work) as child:
        added, seen, memory = child.result()
    assert (added, seen) == (20_000, 4000)
    assert memory < 50 * MiB
