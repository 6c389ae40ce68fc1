"""A set belongs to one user: what others could have written is refused, and nothing is waited for.

Each file of a set is taken for what it is by its kind, owner and mode before it is opened.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.artifacts import ArtifactSets
from smartcache.errors import SetFormatError
from tests.artifacts.opening import array, open_set
from tests.processes.children import Child, folder_of

SOMEBODY = 64001
PLACES = ("..", ".", "set.json", "index.sqlite3", "lock", "leases", "*.pack")

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def path(sets: ArtifactSets) -> Path:
    """The folder of a set with an artifact, which nobody has open."""
    with open_set(sets) as opened:
        opened.put("key", {"x": array(1)})
        opened.touch("key")  # so that there is an index
        return opened.path


def place_in(path: Path, place: str) -> Path:
    return next(path.glob(place)) if "*" in place else path / place


def everything(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """What lies below a folder: owner, mode and bytes."""
    found = {}
    for path in sorted(root.rglob("*")):
        state = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(state.st_mode) else b""
        found[str(path)] = (state.st_uid, state.st_mode, data)
    return found


def refused(sets: ArtifactSets) -> SetFormatError:
    """Try to use a set; nothing in it is touched, and it stands in nobody's way."""
    before = everything(sets.root)
    with pytest.raises(SetFormatError) as caught:
        open_set(sets)
    with open_set(sets, "another"):
        pass
    (problem,) = [info for info in sets.infos() if info.problem]
    assert (problem.problem, problem.cure) == (caught.value.message, caught.value.hint)
    (report,) = sets.verify([problem])
    assert report.damage
    with pytest.raises(SetFormatError):
        sets.rebuild(problem)
    result = sets.plan_remove([problem]).execute()
    assert (result.sets, len(result.problems)) == (0, 1)
    assert before.items() <= everything(sets.root).items()
    return caught.value


class TestOthers:
    @pytest.mark.parametrize("mode", [0o020, 0o002])
    @pytest.mark.parametrize("place", PLACES)
    def test_what_others_can_write_is_refused(
        self, sets: ArtifactSets, path: Path, place: str, mode: int
    ) -> None:
        target = place_in(path, place)
        target.chmod(stat.S_IMODE(target.stat().st_mode) | mode)
        error = refused(sets)
        assert "can be written by other users" in error.message
        assert "chmod -R go-w" in error.hint
        target.chmod(stat.S_IMODE(target.stat().st_mode) & ~0o022)
        with open_set(sets) as opened:
            assert "key" in opened

    @only_root
    @pytest.mark.parametrize("place", PLACES)
    def test_what_belongs_to_somebody_else_is_refused_to_root_too(
        self, sets: ArtifactSets, path: Path, place: str
    ) -> None:
        os.chown(place_in(path, place), SOMEBODY, SOMEBODY)
        error = refused(sets)
        assert "belongs to another user" in error.message
        assert error.hint

    @pytest.mark.parametrize("place", ["..", "."])
    def test_a_folder_that_is_a_symlink_is_not_followed(
        self, sets: ArtifactSets, path: Path, tmp_path: Path, place: str
    ) -> None:
        target = path.parent if place == ".." else path
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
        assert f"{target} is a symlink" in refused(sets).message

    @only_root
    def test_a_set_of_roots_is_refused_to_another_user(self) -> None:
        with folder_of(None) as folder:
            sets = ArtifactSets(folder / "sets")
            with open_set(sets) as opened:
                opened.put("key", 1)
            for each in [sets.root, *sets.root.rglob("*")]:
                each.chmod(0o755 if each.is_dir() else 0o644)

            def problem() -> str:
                (info,) = sets.infos()
                return info.problem

            with Child(problem, user=SOMEBODY) as child:
                assert "belongs to another user" in child.result()


class TestModes:
    @pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o277])
    def test_a_new_set_is_its_owners_alone_whatever_the_umask(
        self, sets: ArtifactSets, mask: int
    ) -> None:
        def modes() -> dict[str, int]:
            os.umask(mask)
            with open_set(sets) as opened:
                opened.put("key", {"x": array(1)})
                opened.touch("key")
                found = opened.path
                names = ["..", ".", *os.listdir(found)]
                return {name: stat.S_IMODE((found / name).stat().st_mode) for name in names}

        with Child(modes) as child:
            found = child.result()
        assert {"..", ".", "set.json", "index.sqlite3", "index.sqlite3-wal"} < found.keys()
        assert {"lock", "leases"} < found.keys()
        assert any(name.endswith(".pack") for name in found)
        assert {name for name, mode in found.items() if mode != 0o600} == {"..", ".", "leases"}
        assert {found[name] for name in ("..", ".", "leases")} == {0o700}

    def test_options_and_a_rebuild_keep_it_so(self, sets: ArtifactSets, path: Path) -> None:
        def change() -> None:
            os.umask(0)
            with open_set(sets, max_size=10**9):
                pass
            (path / "index.sqlite3").write_bytes(b"nonsense" * 1000)
            (info,) = sets.infos()
            assert sets.rebuild(info).artifacts == 1

        with Child(change) as child:
            child.result()
        files = [each for each in path.iterdir() if each.is_file()]
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_symlink(path: Path) -> None:
    """To a file of the right content, so that following it would do."""
    shutil.copy(path.with_name(f"{path.name}.kept"), path.parent.parent / "target")
    path.symlink_to(path.parent.parent / "target")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("put_there", [a_fifo, a_folder, a_symlink])
class TestNoFile:
    @pytest.fixture
    def replaced(self, path: Path, put_there: Callable[[Path], None]) -> Callable[[str], None]:
        def replace(name: str) -> None:
            target = place_in(path, name)
            (target if target.exists() else path / "set.json").rename(path / f"{target.name}.kept")
            put_there(target)

        return replace

    @pytest.mark.parametrize("name", ["set.json", "index.sqlite3", "index.sqlite3-wal", "lock"])
    def test_in_the_place_of_a_file_is_refused(
        self, sets: ArtifactSets, path: Path, replaced: Callable[[str], None], name: str
    ) -> None:
        replaced(name)
        error = refused(sets)
        assert error.message == f"{path / name} is not a regular file"
        assert error.hint == "Remove it: smartcache did not make it."

    def test_in_the_place_of_a_pack_is_a_missing_pack(
        self, sets: ArtifactSets, replaced: Callable[[str], None]
    ) -> None:
        replaced("*.pack")
        with open_set(sets) as opened:
            assert opened.get("key") is None
            opened.put("another", 1)
            assert opened.get("another") == 1
        (info,) = sets.infos()
        (report,) = sets.verify([info])
        assert len(report.bad_packs) == 1
