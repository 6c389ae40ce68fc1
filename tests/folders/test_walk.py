"""What a walk sees, where it goes and where it does not, and what it remembers."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

from smartcache.folders import walk as walk_module
from smartcache.folders.programs import ModelFolder
from smartcache.folders.walk import MOST_NAMED, Walked, walk
from smartcache.progress import silent
from smartcache.store.changes.userfile import is_incomplete
from smartcache.store.store import Store
from tests.folders.counting import files_opened, plain
from tests.folders.trees import comfyui, content, ollama_model, webui, write
from tests.processes.children import Child, folder_of
from tests.store import small_disks
from tests.store.files import Watch

ANN, TEAM = 64001, 64000
needs_root = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() != 0, reason="only root can become other users"
)


def walked(store: Store, *folders: ModelFolder) -> Walked:
    return walk(store, folders, job=silent("x"))


def seen(store: Store, folder: Path) -> list[Path]:
    """What is remembered of a folder, by path."""
    return sorted(each.path for each in store.sighted([folder]))


def all_seen(store: Store) -> list[Path]:
    return sorted(
        each.path for known in store.folders() for each in store.sighted([known.path], min_size=0)
    )


class TestFiles:
    def test_every_file_becomes_a_sighting_with_its_stat_and_none_is_opened(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "deep" / "er" / "a.gguf", content(1, 5000))
        os.link(path, folder / "b.gguf")
        write(folder / "empty", b"")
        write(folder / "small", b"x")
        os.mkfifo(folder / "pipe.gguf")
        (folder / "broken.gguf").symlink_to("nowhere")
        with files_opened(folder) as opened:
            assert walked(store, *plain(folder)).problems == []
        assert opened == []
        assert all_seen(store) == [folder / "b.gguf", path, folder / "empty", folder / "small"]
        st = path.stat()
        for each in store.sightings(5000):
            assert (each.inode, each.links, each.allocated) == (st.st_ino, 2, st.st_blocks * 512)
            assert (each.key.mtime_ns, each.key.ctime_ns) == (st.st_mtime_ns, st.st_ctime_ns)
            assert each.filesystem == store.volume.filesystem

    def test_names_may_be_any_bytes(self, store: Store, folder: Path) -> None:
        names = [
            b"line\nbreak.gguf", b"\xff\xfe.gguf", b"tab\tquote'.gguf", b" ", b"-", b"a;b", b"%s?*",
            b"\\", "模型.gguf".encode(), b"\xed\xa0\x80.gguf", b"x" * 255,
        ]  # fmt: skip
        top = os.fsencode(folder)
        paths = sorted(os.path.join(top, name, name) for name in names)
        for path in paths:
            write(Path(os.fsdecode(path)), content(1, 5000))
        for _ in range(2):
            assert walked(store, *plain(folder)).problems == []
            assert sorted(map(os.fsencode, all_seen(store))) == paths
            assert len(store.sightings(5000)) == len(names)
        for path in paths:
            os.unlink(path)
        walked(store, *plain(folder))
        assert all_seen(store) == []

    def test_a_folder_at_the_top_of_everything_has_one_slash(self, store: Store) -> None:
        """The path of a directory and a name are joined by SQLite."""
        index = store.catalog
        with index.write():
            number = index.set_folder(Path("/"), program="")
            directory = index.set_directory(b"/", number)
            filesystem = index.filesystem_number("f")
            index.put_seen([(directory, b"swap.img", 7, filesystem, 1, 0, 0, 1, 0)])
        assert [each.path for each in store.sightings(7)] == [Path("/swap.img")]

    def test_incomplete_files_are_left_out(self, store: Store, folder: Path) -> None:
        incomplete = (
            f"a.incomplete sha256-{64 * 'a'}-partial sha256-{64 * 'A'}-partial-12 a.tmp a.part"
            " a.crdownload a.aria2 A.PART a.safetensors.Incomplete"
        )
        whole = (
            "partial.gguf a.parts tmp a.tmp.gguf part sd-partial-finetune.safetensors a-partial"
            f" sha256-abc-partial sha256-{64 * 'a'}-partial-x my-sha256-{64 * 'a'}-partial"
        )
        for name in (*incomplete.split(), *whole.split()):
            write(folder / name, content(1))
            assert is_incomplete(os.fsencode(name)) == (name in incomplete.split()), name
        walked(store, *plain(folder))
        assert all_seen(store) == sorted(folder / name for name in whole.split())

    def test_times_far_away_stop_nobody(self, store: Store, folder: Path) -> None:
        """Nanoseconds since 1970 need more than 63 bits from 2262 on."""
        paths = [
            write(folder / f"{year}.gguf", content(1), mtime=(year - 1970) * 31_557_600)
            for year in (1900, 2020, 2300, 2440)
        ]
        for _ in range(2):
            walked(store, *plain(folder))
            assert all_seen(store) == paths


class TestChanges:
    @pytest.fixture
    def path(self, store: Store, folder: Path) -> Path:
        path = write(folder / "sub" / "a.gguf", content(1, 5000))
        write(folder / "b.gguf", content(2, 5000))
        assert walked(store, *plain(folder)).changes == 2
        assert walked(store, *plain(folder)).changes == 0
        return path

    def test_a_changed_file_is_noticed(self, store: Store, folder: Path, path: Path) -> None:
        new = path.with_name("new.tmp")  # an incomplete download: it is not seen

        def set_back() -> None:
            st = path.stat()
            path.write_bytes(content(4, st.st_size))
            os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))

        ways: dict[str, Callable[[], object]] = {
            "size": lambda: path.write_bytes(content(3, 6000)),
            "bytes": lambda: path.write_bytes(content(5, 6000)),
            "time set back": set_back,
            "mtime": lambda: os.utime(path),
            "mode": lambda: path.chmod(0o600),
            "link": lambda: os.link(path, new),
            "replaced": lambda: write(path.with_name("other.tmp"), b"new").replace(path),
        }
        for what, act in ways.items():
            act()
            assert walked(store, *plain(folder)).changes == 1, what
            st = path.stat()
            (found,) = [each for each in store.sightings(st.st_size) if each.path == path]
            assert found.key == (st.st_size, st.st_mtime_ns, st.st_ctime_ns), what
            assert (found.inode, found.links) == (st.st_ino, st.st_nlink), what
            assert walked(store, *plain(folder)).changes == 0, what

    def test_what_is_removed_is_forgotten_and_what_moved_is_seen_where_it_is(
        self, store: Store, folder: Path, path: Path
    ) -> None:
        other = folder / "b.gguf"
        path.parent.rename(folder / "other")
        walked(store, *plain(folder))
        assert all_seen(store) == [other, folder / "other" / "a.gguf"]
        (folder / "other" / "a.gguf").unlink()
        assert walked(store, *plain(folder)).changes == 1
        assert all_seen(store) == [other]
        inner = write(folder / "other" / "a.gguf" / "inner.gguf", content(1))
        walked(store, *plain(folder))
        assert all_seen(store) == [other, inner], "a file that became a directory"
        shutil.rmtree(folder / "other")
        walked(store, *plain(folder))
        assert all_seen(store) == [other]

    @pytest.mark.parametrize("gone", ["file", "directory", "moved", "linked"])
    def test_the_hashes_of_a_file_are_forgotten_when_it_is_seen_nowhere_any_more(
        self, store: Store, folder: Path, path: Path, gone: str
    ) -> None:
        os.utime(path, ns=(10**18, 10**18))
        if gone == "linked":
            os.link(path, folder / "link.gguf")
        walked(store, *plain(folder))
        inode = path.stat().st_ino
        store.digest_of(path)
        assert store.catalog.memos(store.volume.filesystem, [inode]).get(inode) is not None
        if gone == "directory":
            shutil.rmtree(path.parent)
        elif gone == "moved":
            path.parent.rename(folder / "other")
        else:
            path.unlink()
        walked(store, *plain(folder))
        memo = store.catalog.memos(store.volume.filesystem, [inode]).get(inode)
        assert (memo is not None) == (gone in ("moved", "linked"))

    def test_many_directories_and_files(self, store: Store, folder: Path) -> None:
        """More than are looked up at once, and more than are written at once."""
        expected = []
        for number in range(250):
            directory = folder / f"{number % 7}" / f"{number}"
            directory.mkdir(parents=True)
            for name in range(24):
                (directory / f"{name}").touch()
                expected.append(directory / f"{name}")
        assert walked(store, *plain(folder)).changes == len(expected) == 6000
        assert all_seen(store) == sorted(expected)
        assert walked(store, *plain(folder)).changes == 0
        for path in expected[::2]:
            path.unlink()
        assert walked(store, *plain(folder)).changes == 3000
        assert all_seen(store) == sorted(expected[1::2])


class TestFolders:
    def test_a_folder_in_another_keeps_its_own_files(self, store: Store, folder: Path) -> None:
        outer = write(folder / "a.gguf", content(1))
        inner = write(folder / "inner" / "deep" / "b.gguf", content(2))
        for folders in ([folder, folder / "inner"], [folder / "inner", folder]):
            for _ in range(2):
                walked(store, *plain(*folders))
                assert seen(store, folder) == [outer]
                assert seen(store, folder / "inner") == [inner]

    def test_a_folder_walked_alone_takes_what_is_in_it_and_gives_it_back(
        self, store: Store, folder: Path
    ) -> None:
        write(folder / "a.gguf", content(1))
        inner = write(folder / "inner" / "b.gguf", content(2))
        for _ in range(2):
            walked(store, *plain(folder))
            assert len(seen(store, folder)) == 2
            walked(store, *plain(folder, folder / "inner"))
            assert seen(store, folder / "inner") == [inner]
            assert len(all_seen(store)) == 2

    def test_the_same_folder_twice_is_one(self, store: Store, folder: Path, tmp_path: Path) -> None:
        """Whatever leads to it; with few directories and with more than are looked up at once."""
        for directories in (3, 150):
            paths = sorted(write(folder / f"{n}" / "a.gguf", b"1") for n in range(directories))
            for _ in range(2):
                walked(store, *plain(folder, folder))
                assert all_seen(store) == paths
        (tmp_path / "link").symlink_to(folder)
        for _ in range(2):
            walked(store, *plain(folder, tmp_path / "link"))
            assert len(all_seen(store)) == len(paths)

    def test_a_program_in_a_plain_folder_becomes_a_folder_of_its_own(
        self, store: Store, folder: Path
    ) -> None:
        own = write(folder / "mine.gguf", content(1))
        models = comfyui(folder / "programs" / "ComfyUI")
        theirs = write(models / "vae" / "ae.safetensors", content(2))
        blob = ollama_model(folder / "ollama", "host/space/model", content(3))
        for _ in range(2):
            found = walked(store, *plain(folder))
            programs = {each.path: each.program for each in found.folders.values()}
            assert programs == {
                folder: "",
                folder / "programs" / "ComfyUI": "ComfyUI",
                folder / "ollama": "Ollama",
            }
            assert seen(store, folder) == [own]
            assert theirs in seen(store, folder / "programs" / "ComfyUI")
            assert blob in seen(store, folder / "ollama")

    def test_a_program_named_beside_the_folder_it_is_in_stays_one(
        self, store: Store, folder: Path
    ) -> None:
        models = webui(folder / "webui")
        path = write(models / "Stable-diffusion" / "a.ckpt", content(1))
        inner = ModelFolder(path=models, program="A1111")
        for _ in range(2):
            found = walked(store, *plain(folder), inner)
            assert path in seen(store, models)
            paths = [each.path for each in found.folders.values()]
            assert len(paths) == len(set(paths))

    def test_what_was_found_in_a_folder_goes_with_it(self, store: Store, folder: Path) -> None:
        """A program's folder in one that the user gave was not given by itself."""
        comfyui(folder / "ComfyUI")
        store.add_folder(folder)
        walked(store, *plain(folder, is_given=True))
        store.drop_folder(folder)
        assert [each.path for each in store.folders() if each.is_given] == []

    def test_another_process_may_walk_another_folder_meanwhile(
        self, store: Store, folder: Path, tmp_path: Path
    ) -> None:
        """Not even a folder of which nothing is written yet is lost by it."""
        path = write(folder / "a.gguf", content(1))
        other = write(tmp_path / "other" / "b.gguf", content(1))

        def meanwhile() -> None:
            with Store(store.root) as second:
                walked(second, *plain(other.parent))

        walk(store, plain(folder), job=Watch(meanwhile)("x"))
        assert all_seen(store) == [path, other]

    def test_walked_at_and_given_are_remembered(self, store: Store, folder: Path) -> None:
        store.add_folder(folder)
        (known,) = store.folders()
        assert (known.is_given, known.walked_at) == (True, None)
        walked(store, *plain(folder, program="ComfyUI"))
        (known,) = store.folders()
        assert (known.is_given, known.program) == (True, "ComfyUI")
        assert known.walked_at is not None


class TestAnyTree:
    """What is remembered is what is there, after any changes and any walks."""

    def change(self, chance: random.Random, top: Path) -> None:
        directories = [path for path in sorted(top.rglob("*")) if path.is_dir()] or [top]
        files = [path for path in sorted(top.rglob("*")) if path.is_file()]
        where, name = chance.choice([top, *directories]), f"{chance.randrange(6)}"
        kind = chance.choice(["write", "write", "make", "make", "move", "remove", "link", "tree"])
        if kind == "make":
            (where / f"d{name}").mkdir(exist_ok=True)
        elif kind == "write" and not (where / name).is_dir():
            (where / name).write_bytes(bytes(chance.randrange(4)))
        elif kind == "remove" and files:
            chance.choice(files).unlink()
        elif kind == "link" and files and not (where / name).exists():
            os.link(chance.choice(files), where / name)
        elif kind == "move" and not (where / f"m{name}").exists():
            source = chance.choice([*files, *directories])
            if source != top and not where.is_relative_to(source):
                source.rename(where / f"m{name}")
        elif kind == "tree" and chance.random() < 0.3 and directories[0] != top:
            shutil.rmtree(chance.choice(directories))

    @given(seed=strategies.integers(0, 1 << 32), rounds=strategies.integers(1, 6))
    @hypothesis_settings(max_examples=hypothesis_settings().max_examples * 2 // 5)
    def test_is_seen_as_it_is(self, seed: int, rounds: int) -> None:
        chance = random.Random(seed)
        with tempfile.TemporaryDirectory(prefix="smartcache-test-") as name:
            top = Path(os.path.realpath(name)) / "models"
            top.mkdir()
            with Store(top.parent / "store") as store:
                for _ in range(rounds):
                    for _ in range(chance.randrange(12)):
                        self.change(chance, top)
                    below = [path for path in sorted(top.rglob("*")) if path.is_dir()]
                    chosen = chance.sample([top, *below], chance.randint(1, min(3, 1 + len(below))))
                    walked(store, *plain(*chosen))
                    expected: dict[Path, list[Path]] = {folder: [] for folder in chosen}
                    for path in sorted(top.rglob("*")):
                        owners = [each for each in chosen if path.is_relative_to(each)]
                        if path.is_file() and owners:
                            expected[max(owners, key=lambda each: len(each.parts))].append(path)
                    assert {folder: seen(store, folder) for folder in chosen} == expected

    def test_a_walk_that_is_interrupted_can_be_made_again(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(walk_module, "_LISTINGS", 2)
        monkeypatch.setattr(walk_module, "_FLUSH_ROWS", 3)
        paths = sorted(write(folder / f"{number}" / "a.gguf", b"1") for number in range(20))
        walked(store, *plain(folder))
        for path in paths[::3]:
            path.write_bytes(b"22")
            path.with_name("b.gguf").write_bytes(b"3")

        def interrupt() -> None:
            raise KeyboardInterrupt

        for number in range(1, 15):
            with pytest.raises(KeyboardInterrupt):
                walk(store, plain(folder), job=Nth(number, interrupt))
            assert set(all_seen(store)) >= set(paths), "nothing is forgotten half-way"
        walked(store, *plain(folder))
        assert all_seen(store) == sorted(folder.rglob("*.gguf"))


class Nth(Watch):
    """A job in which somebody acts at the n-th time that it advances."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        super().__init__()
        self._left = number
        self._then = act

    def advance(self, amount: int = 1) -> None:
        super().advance(amount)
        self._left -= 1
        if self._left == 0:
            self._then()


class TestLinks:
    def test_symlinks_to_files_are_left_alone_and_a_plain_folder_ends_at_symlinks(
        self, store: Store, folder: Path, tmp_path: Path
    ) -> None:
        path = write(folder / "a.gguf", content(1))
        (folder / "b.gguf").symlink_to(path)
        (folder / "c.gguf").symlink_to("a.gguf")
        walked(store, *plain(folder, program="ComfyUI"))
        assert all_seen(store) == [path]
        write(tmp_path / "outside" / "a.gguf", content(1))
        (folder / "link").symlink_to(tmp_path / "outside")
        walked(store, *plain(folder))
        assert all_seen(store) == [path]

    def test_a_program_s_symlinks_to_directories_are_followed_once(
        self, store: Store, folder: Path, tmp_path: Path
    ) -> None:
        path = write(tmp_path / "outside" / "deep" / "a.gguf", content(1))
        far = write(tmp_path / "far" / "b.gguf", content(1))
        (tmp_path / "outside" / "on").symlink_to(tmp_path / "far")
        (tmp_path / "outside" / "back").symlink_to(folder)
        (folder / "one").symlink_to(tmp_path / "outside")
        (folder / "two").symlink_to(tmp_path / "outside")
        (folder / "three").symlink_to(tmp_path / "outside" / "deep")
        for _ in range(2):
            walked(store, *plain(folder, program="ComfyUI"))
            assert all_seen(store) == [far, path]

    def test_what_another_folder_has_is_left_to_it(self, store: Store, tmp_path: Path) -> None:
        theirs, ours = tmp_path / "matrix", tmp_path / "comfyui"
        path = write(theirs / "Lora" / "a.safetensors", content(1))
        ours.mkdir()
        (ours / "loras").symlink_to(theirs / "Lora")
        folders = [
            ModelFolder(path=ours, program="ComfyUI"),
            ModelFolder(path=theirs, program="Stability Matrix"),
        ]
        for each in (folders, folders[::-1]):
            walked(store, *each)
            assert seen(store, theirs) == [path]
            assert seen(store, ours) == []

    def test_loops_and_ways_up_end(self, store: Store, folder: Path, tmp_path: Path) -> None:
        top = folder / "inner"
        path = write(top / "sub" / "a.gguf", content(1))
        write(folder / "not ours.gguf", content(1))
        write(tmp_path / "nor this.gguf", content(1))
        (top / "sub" / "up").symlink_to(top)
        for name, target in (("self", "self"), ("ping", "pong"), ("pong", "ping")):
            (top / name).symlink_to(target)
        for target in (".", "..", "../..", "/", "sub", "sub/up"):
            (top / "link").symlink_to(target)
            assert walked(store, *plain(top, program="ComfyUI")).problems == [], target
            assert all_seen(store) == [path], target
            (top / "link").unlink()

    def test_a_directory_that_is_bound_twice_is_walked_once(self, tmp_path: Path) -> None:
        """As junctions are, and as containers mount volumes; even into itself."""

        def work() -> tuple[list[str], list[str]]:
            folder = tmp_path / "models"
            write(folder / "real" / "a.gguf", content(1))
            small_disks.bind(folder / "real", folder / "again")
            small_disks.bind(folder, folder / "real" / "loop")
            with Store(tmp_path / "store") as store:
                found = walked(store, *plain(folder))
                return [str(each) for each in found.problems], [p.name for p in all_seen(store)]

        assert small_disks.in_own_namespace(work) == ([], ["a.gguf"])

    def test_a_store_in_a_folder_is_left_out(self, store: Store, folder: Path) -> None:
        with Store(folder / "cache") as inner:
            inner.put_stream([content(1)])
        store.put_stream([content(1)])
        (folder / "link").symlink_to(store.root)
        (folder / "blobs").symlink_to(store.root / "blobs")
        path = write(folder / "a.gguf", content(1))
        for program in ("", "ComfyUI"):
            walked(store, *plain(folder, program=program))
            assert all_seen(store) == [path]

    def test_a_folder_that_is_tagged_as_a_cache_is_walked(self, store: Store, folder: Path) -> None:
        """As Hugging Face's is."""
        write(folder / "CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n")
        path = write(folder / "a.gguf", content(1))
        walked(store, *plain(folder))
        assert path in all_seen(store)


class TestTroubles:
    def at_directory(
        self, monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[], object]
    ) -> None:
        """Let somebody act in the moment before a directory is listed."""
        real = os.scandir

        def scandir(where: bytes) -> object:
            if where == os.fsencode(path):
                monkeypatch.setattr(os, "scandir", real)
                act()
            return real(where)

        monkeypatch.setattr(os, "scandir", scandir)

    def test_a_directory_or_folder_that_vanishes_is_named(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(folder / "a.gguf", content(1))
        gone = folder / "sub"
        for others in ([], [gone]):
            write(gone / "b.gguf", content(1))
            self.at_directory(monkeypatch, gone, lambda: shutil.rmtree(gone))
            found = walked(store, *plain(folder, *others))
            assert [(each.path, each.reason) for each in found.problems] == [
                (gone, "No such file or directory")
            ]
            assert all_seen(store) == [path]

    @needs_root
    def test_directories_that_cannot_be_listed_or_entered_are_named(self) -> None:
        """Of some the names can be read (r), but not what the names stand for (x)."""
        with folder_of(ANN) as folder:
            for name, mode in (("open", 0o755), ("closed", 0o700), ("names", 0o744)):
                write(folder / name / "deep" / "a.gguf", content(1))
                (folder / name).chmod(mode)

            def work() -> tuple[list[tuple[str, str]], int, list[str]]:
                with Store(folder / "store") as store:
                    found = walked(store, *plain(folder))
                    problems = sorted((each.path.name, each.reason) for each in found.problems)
                    return problems, found.problem_count, [str(p) for p in all_seen(store)]

            with Child(work, user=ANN, group=TEAM) as child:
                problems, count, paths = child.result()
            denied = "Permission denied"
            assert (problems, count) == ([("closed", denied), ("deep", denied)], 2)
            assert paths == [str(folder / "open" / "deep" / "a.gguf")]

    @needs_root
    def test_of_very_many_the_first_are_named_and_all_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(walk_module, "MOST_NAMED", 3)
        assert MOST_NAMED >= 3
        with folder_of(ANN) as folder:
            for number in range(7):
                (folder / f"{number}").mkdir(mode=0o700)

            def work() -> tuple[int, int]:
                with Store(folder / "store") as store:
                    found = walked(store, *plain(folder))
                    return len(found.problems), found.problem_count

            with Child(work, user=ANN, group=TEAM) as child:
                assert child.result() == (3, 7)
