"""What a link would change about a file is refused unless it is allowed; undo gives it all back."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smartcache.errors import FileSkippedError
from smartcache.store.changes.replace import Replacement
from smartcache.store.changes.userfile import Allowance
from smartcache.store.store import Store
from tests.processes.children import NOBODY
from tests.store.files import (
    WEIGHTS,
    AtPoint,
    come_to_write,
    digest_of,
    inode_of,
    mode_of,
    row,
    snapshot,
    undo,
    write,
)

if sys.platform != "linux":
    pytest.skip("extended attributes", allow_module_level=True)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
DIGEST = digest_of(WEIGHTS)
ALL: frozenset[Allowance] = frozenset(("group", "mode", "xattr"))
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


def access_list(user: int, mask: int = 6) -> bytes:
    """A list that lets one more user read and write."""
    entries = [(1, 6, -1), (2, 6, user), (4, 4, -1), (0x10, mask, -1), (0x20, 4, -1)]
    packed = [struct.pack("<HHi", *entry) for entry in entries]
    return struct.pack("<I", 2) + b"".join(packed)


@pytest.fixture
def blob(store: Store, folder: Path) -> Path:
    """The blob, which is a user's file of mode 0644 too."""
    store.adopt(write(folder / "a.safetensors"))
    return Path(store.path_of(DIGEST))


def replaced(store: Store, path: Path, allow: Iterable[Allowance] = ()) -> Replacement:
    (result,) = store.replace_many([(path, DIGEST)], allow=frozenset(allow))
    return result


def reason_of(error: Exception | None) -> str:
    assert isinstance(error, FileSkippedError)
    return error.reason


def everything(folder: Path) -> dict[str, object]:
    """A snapshot, and the extended attributes."""
    found: dict[str, object] = {}
    for name, facts in snapshot(folder).items():
        path = folder / name
        names = os.listxattr(path, follow_symlinks=False)
        attributes = {each: os.getxattr(path, each, follow_symlinks=False) for each in names}
        found[name] = (facts, attributes)
    return found


def give_group(path: Path) -> None:
    os.chown(path, -1, 54321)


def give_attribute(path: Path) -> None:
    try:
        os.setxattr(path, "user.note", b"\0mine\xff")
        os.setxattr(path, "user.empty", b"")
    except OSError:
        pytest.skip("no extended attributes on this filesystem")


def give_access(path: Path) -> None:
    try:
        os.setxattr(path, ACCESS, access_list(12345))
    except OSError:
        pytest.skip("no access control lists on this filesystem")
    path.chmod(0o644)  # what the blob has; that is the mask now


SPECIALS = [
    pytest.param(give_group, frozenset({"group"}), "different group", marks=as_root),
    (lambda path: path.chmod(0o600), frozenset({"mode"}), "different permissions"),
    (lambda path: path.chmod(0o755), frozenset({"mode"}), "different permissions"),
    (give_attribute, frozenset({"xattr"}), "has extended attributes"),
    (give_access, frozenset({"xattr"}), "has extended attributes"),
]
NAMES = ["group", "0600", "0755", "attribute", "access list"]
special = pytest.mark.parametrize(("change", "needed", "reason"), SPECIALS, ids=NAMES)


class TestReplace:
    @special
    def test_only_what_is_allowed_is_replaced_and_undo_gives_it_back(
        self, store: Store, folder: Path, blob: Path, change: Callable[[Path], None],
        needed: frozenset[Allowance], reason: str,
    ) -> None:  # fmt: skip
        path = write(folder / "b.safetensors")
        change(path)
        before = everything(folder)
        for allow in (*combinations(ALL - needed, 0), *combinations(ALL - needed, 2)):
            assert reason_of(replaced(store, path, allow).error) == reason
            assert everything(folder) == before
        assert replaced(store, path, needed).outcome == "replaced"
        assert inode_of(path) == inode_of(blob)
        assert mode_of(path) == 0o444
        assert os.listxattr(path) == []
        assert [done.note for done in store.plan_undo(last=True).execute()] == [""]
        assert everything(folder) == before
        assert inode_of(path) != inode_of(blob)

    @as_root
    @pytest.mark.usefixtures("blob")
    def test_files_of_others_and_special_modes_are_refused_whatever_is_allowed(
        self, store: Store, folder: Path
    ) -> None:
        """Root too: an inode's owner can change the bytes that all its links show."""
        changes: dict[Callable[[Path], None], str] = {
            lambda path: os.chown(path, 12345, 54321): "belongs to another user",
            lambda path: path.chmod(0o4755): "has a special mode",
            lambda path: path.chmod(0o2755): "has a special mode",
        }
        for number, (change, reason) in enumerate(changes.items()):
            path = write(folder / f"{number}.safetensors")
            change(path)
            before = everything(folder)
            with row(number, reason):
                assert reason_of(replaced(store, path, ALL).error) == reason
                (adoption,) = store.adopt_many([path])
                assert reason_of(adoption.error) == reason
                assert everything(folder) == before

    @as_root
    def test_two_names_of_a_file_are_one_again(
        self, store: Store, folder: Path, blob: Path
    ) -> None:
        path, twin = write(folder / "b.safetensors", mode=0o600), folder / "twin.bin"
        give_group(path)
        give_attribute(path)
        os.link(path, twin)
        before = everything(folder)
        for each in (path, twin):
            assert replaced(store, each, ALL).outcome == "replaced"
        assert inode_of(twin) == inode_of(blob)
        while store.history()[1:]:
            store.plan_undo(last=True).execute()
        assert everything(folder) == before

    @as_root
    @pytest.mark.usefixtures("with_leases")
    def test_a_late_writer_gets_a_file_with_all_its_attributes(
        self, store: Store, folder: Path, blob: Path, at_point: AtPoint
    ) -> None:
        """Its old inode has no name any more: what is in it is copied."""
        path = write(folder / "b.safetensors")
        give_group(path)
        give_attribute(path)
        before = everything(folder)
        with path.open("rb") as file:
            old = Path(f"/proc/self/fd/{file.fileno()}")
            at_point("replace: old removed", lambda: come_to_write(old))
            assert reason_of(replaced(store, path, ALL).error) == "busy"
        assert inode_of(path) != inode_of(blob)
        assert everything(folder) == before

    @pytest.mark.usefixtures("blob")
    def test_what_a_folder_gives_to_new_files_is_not_given_by_undo(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "b.safetensors")
        try:
            os.setxattr(folder, DEFAULT, access_list(12345))
        except OSError:
            pytest.skip("no access control lists on this filesystem")
        before = everything(folder)
        replaced(store, path)
        store.plan_undo(last=True).execute()
        assert everything(folder) == before

    @as_root
    def test_a_group_is_given_back_even_if_only_that_is_different(
        self, store: Store, folder: Path, blob: Path
    ) -> None:
        """Same mode and time as the blob, and the blob has another inode since."""
        path = write(folder / "b.safetensors", mode=0o444)
        shutil.copystat(blob, path)
        give_group(path)
        before = everything(folder)
        replaced(store, path, {"group"})
        copy = write(folder / "copy")
        shutil.copystat(blob, copy)
        os.replace(copy, blob)
        assert [done.note for done in store.plan_undo(last=True).execute()] == [""]
        assert everything(folder) == before


class TestAdopt:
    def test_a_special_file_keeps_what_it_is_and_undo_gives_its_mode_back(
        self, store: Store, folder: Path
    ) -> None:
        only_root = (give_group,) if os.geteuid() == 0 else ()
        for change in (give_attribute, give_access, *only_root):
            path = write(folder / f"{change.__name__}.safetensors")
            change(path)
            before, mode = everything(folder), mode_of(path)
            with row(change.__name__):
                (result,) = store.adopt_many([path])
                assert result.outcome == "adopted"
                assert mode_of(path) == mode & 0o555
                assert not store.verify(full=True).has_damage
                assert undo(store) == []
                assert everything(folder) == before

    @as_root
    def test_a_file_that_others_share_gets_a_copy_with_all_it_had(
        self, store: Store, folder: Path
    ) -> None:
        """Only the adoption is undone: its inode stays with the file that was replaced."""
        path, other = write(folder / "a.safetensors"), write(folder / "b.safetensors")
        give_group(path)
        give_attribute(path)
        before = everything(folder)
        list(store.adopt_many([path]))
        replaced(store, other, ALL)
        store.plan_undo([store.history()[0].id]).execute()
        assert everything(folder)["a.safetensors"] == before["a.safetensors"]
        store.plan_undo().execute()
        assert everything(folder) == before


@pytest.mark.usefixtures("blob")
def test_the_journal_keeps_attributes_as_they_are(store: Store, folder: Path) -> None:
    path, plain = write(folder / "b.safetensors"), write(folder / "c.safetensors")
    give_attribute(path)
    for each in (path, plain):
        replaced(store, each, {"xattr"})
    found = [c.xattrs for c in store.volume.journal.changes() if c.op == "replace"]
    assert found == [{"user.note": b"\0mine\xff".hex(), "user.empty": ""}, None]


groups = st.sampled_from([0, 12345, NOBODY])
modes = st.sampled_from([0o644, 0o600, 0o444, 0o664, 0o755])
attributes = st.dictionaries(
    st.sampled_from(["user.a", "user.b", "trusted.c"]), st.binary(max_size=50), max_size=2
)
files = st.tuples(
    groups, modes, st.integers(10**18, 1_700_000_000 * 10**9), attributes,
    st.booleans(),
)  # fmt: skip


@as_root
@settings(max_examples=settings().max_examples // 8)
@given(kinds=st.lists(files, min_size=2, max_size=5))
def test_undo_restores_whatever_files_there_were(
    kinds: list[tuple[int, int, int, dict[str, bytes], bool]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "models"
        for number, (gid, mode, mtime_ns, values, has_twin) in enumerate(kinds):
            path = write(folder / f"{number}.bin")
            os.chown(path, -1, gid)
            path.chmod(mode)
            for key, value in values.items():
                os.setxattr(path, key, value)
            os.utime(path, ns=(mtime_ns, mtime_ns))
            if has_twin:
                os.link(path, folder / f"{number}-twin.bin")
        before = everything(folder)
        paths = sorted(folder.iterdir())
        with Store(Path(name) / "store") as store:
            with store.batch("dedup"):
                (adoption,) = store.adopt_many(paths[:1])
                pairs = [(path, adoption.digest) for path in paths]
                results = list(store.replace_many(pairs, allow=ALL))
            assert {result.outcome for result in results} <= {"replaced", "present"}
            assert {inode_of(path) for path in paths} == {inode_of(paths[0])}
            assert {done.note for done in store.plan_undo().execute()} == {""}
        assert everything(folder) == before
