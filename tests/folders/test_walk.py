"""What a walk sees, where it goes and where it does not, and what it remembers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from smartcache.folders import walk as walk_module
from smartcache.folders.programs import ModelFolder, ignore
from smartcache.folders.walk import Walked, walk
from smartcache.progress import silent
from smartcache.store.catalog import Catalog
from smartcache.store.store import Store
from smartcache.store.userfile import is_incomplete
from smartcache.system.filesystems import filesystem_id
from tests.folders.counting import Interrupting, files_opened, plain
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
    return sorted(path for known in store.folders() for path in seen(store, known.path))


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
            assert each.filesystem == filesystem_id(path, st)
        (known,) = store.catalog.seen_in([os.fsencode(path.parent)]).values()
        assert known[2][os.fsencode(path.name)][3:5] == (st.st_mtime_ns, st.st_ctime_ns)

    def test_names_may_be_any_bytes_and_times_far_away(self, store: Store, folder: Path) -> None:
        """Nanoseconds since 1970 need more than 63 bits from 2262 on."""
        names = [
            b"line\nbreak.gguf", b"\xff\xfe.gguf", b"tab\tquote'.gguf", b" ", b"-", b"a;b", b"%s?*",
            b"\\", "模型.gguf".encode(), b"\xed\xa0\x80.gguf", b"x" * 255,
        ]  # fmt: skip
        paths = sorted(os.path.join(os.fsencode(folder), name, name) for name in names)
        for path, year in zip(paths, (1900, 2300, 2440, *[2020] * 8), strict=True):
            mtime = (year - 1970) * 31_557_600
            write(Path(os.fsdecode(path)), content(1, 5000), mtime=mtime)
        for _ in range(2):
            assert walked(store, *plain(folder)).problems == []
            assert sorted(map(os.fsencode, all_seen(store))) == paths
            assert len(store.sightings(5000)) == len(names)
        for path in paths:
            os.unlink(path)
        walked(store, *plain(folder))
        assert all_seen(store) == []

    def test_incomplete_files_are_left_out_and_counted(self, store: Store, folder: Path) -> None:
        incomplete = (
            f"a.incomplete sha256-{64 * 'a'}-partial sha256-{64 * 'a'}-partial-12 a.tmp a.part"
            " a.crdownload a.aria2 A.PART a.safetensors.Incomplete"
        ).split()
        whole = (
            "partial.gguf a.parts tmp a.tmp.gguf part sd-partial-finetune.safetensors a-partial"
            " llama-3-partial.gguf sha256-abc-partial model-partial"
            f" sha256-{64 * 'a'}-partial-x my-sha256-{64 * 'a'}-partial"
        ).split()
        for name in (*incomplete, *whole):
            write(folder / name, content(1))
            assert is_incomplete(os.fsencode(name)) == (name in incomplete), name
        write(folder / "empty.lock", b"")
        for _ in range(2):
            assert walked(store, *plain(folder)).unfinished == len(incomplete)
            assert all_seen(store) == sorted(folder / name for name in whole)

    def test_what_is_ignored_is_passed_over_and_forgotten(self, store: Store, folder: Path) -> None:
        """Folders, patterns, and folders that lie in one that is ignored."""
        for name in ("a.gguf", "a.ckpt", "own/b.gguf", "own/deep/c.gguf", "x[1]/d.gguf", "x1/e"):
            write(folder / name, content(1))
        walked(store, *plain(folder, folder / "own" / "deep"))
        assert len(all_seen(store)) == 6
        words = [str(folder / "own"), "*.ckpt", str(folder / "x[1]")]
        ignore(words)
        for _ in range(2):
            walked(store, *plain(folder, folder / "own" / "deep"))
            assert all_seen(store) == [folder / "a.gguf", folder / "x1" / "e"]
        ignore(words, remove=True)
        walked(store, *plain(folder))
        assert len(all_seen(store)) == 6


class TestChanges:
    @pytest.fixture
    def path(self, store: Store, folder: Path) -> Path:
        path = write(folder / "sub" / "a.gguf", content(1, 5000))
        write(folder / "b.gguf", content(2, 5000))
        walked(store, *plain(folder))
        return path

    @pytest.mark.parametrize("fate", ["directory", "linked", "moved", "became a folder"])
    def test_what_is_seen_nowhere_any_more_is_forgotten_with_its_hashes(
        self, store: Store, folder: Path, path: Path, fate: str,
        pass_time: Callable[[float], None],
    ) -> None:  # fmt: skip
        pass_time(60)
        there = [folder / "b.gguf"]
        if fate == "linked":
            os.link(path, folder / "link.gguf")
            there.append(folder / "link.gguf")
        walked(store, *plain(folder))
        st, filesystem = path.stat(), filesystem_id(path)
        store.digest_of(path)
        assert st.st_ino in store.catalog.known(filesystem, [st.st_ino])
        if fate == "directory":
            shutil.rmtree(path.parent)
        elif fate == "moved":
            path.parent.rename(folder / "other")
            there.append(folder / "other" / "a.gguf")
        else:
            path.unlink()
        if fate == "became a folder":
            there.append(write(path / "inner.gguf", b"1"))
        walked(store, *plain(folder))
        assert all_seen(store) == there
        is_known = st.st_ino in store.catalog.known(filesystem, [st.st_ino])
        assert is_known == (fate == "moved"), "with another link count the times are others"


class TestFolders:
    def test_a_program_in_a_plain_folder_becomes_a_folder_of_its_own(
        self, store: Store, folder: Path
    ) -> None:
        """And goes with it: it was not given by itself."""
        own = write(folder / "mine.gguf", content(1))
        models = comfyui(folder / "programs" / "ComfyUI")
        theirs = write(models / "vae" / "ae.safetensors", content(2))
        blob = ollama_model(folder / "ollama", "host/space/model", content(3))
        named = webui(folder / "webui")
        path = write(named / "Stable-diffusion" / "a.ckpt", content(1))
        store.add_folder(folder)
        for _ in range(2):
            inner = ModelFolder(path=named, program="A1111")
            found = walked(store, *plain(folder, is_given=True), inner)
            programs = {each.path: each.program for each in found.folders.values()}
            assert programs == {
                folder: "", folder / "programs" / "ComfyUI": "ComfyUI", folder / "ollama": "Ollama",
                named: "A1111", folder / "webui": "A1111",
            }  # fmt: skip
            assert seen(store, folder) == [own]
            assert theirs in seen(store, folder / "programs" / "ComfyUI")
            assert blob in seen(store, folder / "ollama")
            assert path in seen(store, named)
        known = {each.path: each.is_given for each in store.folders() if each.walked_at}
        assert known == {path: path == folder for path in programs}
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


def test_a_walk_that_is_interrupted_can_be_made_again(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk_module, "_LISTINGS", 2)
    paths = sorted(write(folder / f"{number}" / "a.gguf", b"1") for number in range(20))
    walked(store, *plain(folder))
    for path in paths[::3]:
        path.write_bytes(b"22")
        path.with_name("b.gguf").write_bytes(b"3")
    for number in range(1, 15):
        with pytest.raises(KeyboardInterrupt):
            walk(store, plain(folder), job=Interrupting(number))
        assert set(all_seen(store)) >= set(paths), "nothing is forgotten half-way"
    walked(store, *plain(folder))
    assert all_seen(store) == sorted(folder.rglob("*.gguf"))


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
        (tmp_path / "again").symlink_to(folder)
        walked(store, *plain(folder, tmp_path / "again"))
        assert len(all_seen(store)) == 1, "the folder itself is one, whatever leads to it"

    def test_a_program_s_symlinks_to_directories_are_followed_once(
        self, store: Store, folder: Path, tmp_path: Path
    ) -> None:
        """What another folder has is left to that one."""
        path = write(tmp_path / "outside" / "deep" / "a.gguf", content(1))
        far = write(tmp_path / "far" / "b.gguf", content(1))
        theirs = write(tmp_path / "matrix" / "Lora" / "a.safetensors", content(1))
        (tmp_path / "outside" / "on").symlink_to(far.parent)
        (tmp_path / "outside" / "back").symlink_to(folder)
        targets = {"one": path.parent.parent, "two": path.parent.parent, "three": path.parent}
        for name, target in (targets | {"loras": theirs.parent}).items():
            (folder / name).symlink_to(target)
        folders = [
            ModelFolder(path=folder, program="ComfyUI"),
            ModelFolder(path=theirs.parent.parent, program="Stability Matrix"),
        ]
        for each in (folders, folders[::-1]):
            walked(store, *each)
            assert (seen(store, folders[1].path), seen(store, folder)) == ([theirs], [far, path])

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

    def test_stores_and_pools_are_passed_over_wherever_they_are(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        """Of this one what is in a pool is seen as a blob; what is tagged as a cache is walked."""
        with Store(folder / "cache") as inner:
            inner.put_stream([content(1)])
        pool = store.add_pool(elsewhere / ".smartcache-1")
        blobs = [store.put_stream([content(1)]), store.put_stream([content(2)], pool=pool)]
        (folder / "link").symlink_to(store.root)
        (folder / "blobs").symlink_to(store.root / "blobs")
        paths = [write(folder / "a.gguf", content(1)), write(elsewhere / "b.gguf", content(1))]
        write(folder / "CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n")
        for program in ("", "ComfyUI"):
            walked(store, *plain(folder, elsewhere, store.root / "blobs", program=program))
            found = {*seen(store, folder), *seen(store, elsewhere)}
            assert found == {*paths, folder / "CACHEDIR.TAG"}
            assert {*all_seen(store)} <= found | {blob.path for blob in blobs}


class TestTroubles:
    def test_a_directory_or_folder_that_vanishes_is_named(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the moment before it is listed."""
        path, gone, real = write(folder / "a.gguf", content(1)), folder / "sub", os.scandir

        def scandir(where: bytes) -> Iterator[os.DirEntry[bytes]]:
            if where == os.fsencode(gone):
                monkeypatch.setattr(os, "scandir", real)
                shutil.rmtree(gone)
            return real(where)

        for others in ([], [gone]):
            write(gone / "b.gguf", content(1))
            monkeypatch.setattr(os, "scandir", scandir)
            found = walked(store, *plain(folder, *others))
            reasons = [(each.path, each.reason) for each in found.problems]
            assert reasons == [(gone, "No such file or directory")]
            assert all_seen(store) == [path]

    @needs_root
    def test_directories_that_cannot_be_listed_or_entered_are_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of some the names can be read (r), but not what the names stand for (x).

        Of very many the first are named.
        """
        with folder_of(ANN) as folder:
            for name, mode in (("open", 0o755), ("closed", 0o700), ("names", 0o744)):
                write(folder / "m" / name / "deep" / "a.gguf", content(1))
                (folder / "m" / name).chmod(mode)

            def work() -> tuple[list[tuple[str, str]], list[str]]:
                with Store(folder / "store") as store:
                    found = walked(store, *plain(folder / "m"))
                    problems = sorted((each.path.name, each.reason) for each in found.problems)
                    return problems, [str(p) for p in all_seen(store)]

            for most in (1000, 1):
                monkeypatch.setattr(walk_module, "MOST_NAMED", most)
                with Child(work, user=ANN, group=TEAM) as child:
                    problems, paths = child.result()
                named = [("closed", "Permission denied"), ("deep", "Permission denied")]
                assert problems == named if most > 1 else problems[0] in named
                assert len(problems) == min(most, 2)
                assert paths == [str(folder / "m" / "open" / "deep" / "a.gguf")]


def test_a_file_at_the_top_of_everything_has_one_slash(tmp_path: Path) -> None:
    """The path of a directory and a name are joined by SQLite."""
    with closing(Catalog(tmp_path / "index.sqlite3")) as catalog, catalog.write():
        number = catalog.set_folder(Path("/"), program="")
        directory = catalog.set_directory(b"/", number)
        row = (catalog.filesystem_number("f"), 1, 7, 0, 0, 1, 0, 0o644, 0)
        catalog.put_seen([(directory, b"swap.img", row, 0)])
        assert [each.path for each in catalog.files(size=7)] == [Path("/swap.img")]
