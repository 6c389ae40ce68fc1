"""Bytes that are not what they were: found, named, never handed out, never laundered by us."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import pytest

from smartcache import errors
from smartcache.store import KINDS
from smartcache.store.blobs import look_for_damage
from smartcache.store.store import Store
from smartcache.system.filesystems import probe
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    adopt,
    blob_path,
    dedup,
    digest_of,
    edit,
    edit_with_time_set_back,
    inode_of,
    mode_of,
    read,
    rot,
    row,
    write,
)

if sys.platform == "win32":
    pytest.skip("modes and inodes", allow_module_level=True)

pytestmark = pytest.mark.timeout(60)  # what waits for a FIFO waits for ever
DIGEST = digest_of(WEIGHTS)
Damage = Callable[[Path], object]
LOST = (errors.DamagedBlobError, errors.BlobNotFoundError)


@pytest.fixture
def blob(store: Store) -> Path:
    """One of two blobs, to be damaged."""
    store.put_stream([OTHER])
    store.put_stream([WEIGHTS])
    return blob_path(store)


def exchange_for_another_file(path: Path) -> None:
    """A file that looks the same: size, time and mode."""
    st = path.stat()
    other = write(path.with_name("other"), WEIGHTS[::-1], mode=0o444)
    os.utime(other, ns=(st.st_atime_ns, st.st_mtime_ns))
    other.replace(path)


def truncate(path: Path, size: int = 50_000) -> None:
    path.chmod(0o644)
    os.truncate(path, size)
    path.chmod(0o444)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
        os.rename("s", path.name)
    finally:
        os.chdir(here)


ODD: dict[str, Damage] = {
    "fifo": os.mkfifo,
    "symlink": lambda path: path.symlink_to(write(path.with_name("elsewhere.bin"))),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "folder": Path.mkdir,
    "socket": make_socket,
}
DAMAGES: dict[str, Damage] = {
    "flipped": edit,
    "flipped, time set back": edit_with_time_set_back,
    "truncated": truncate,
    "emptied": lambda path: truncate(path, 0),
    "grown": lambda path: edit(path, b"more", offset=len(WEIGHTS)),
    "exchanged": exchange_for_another_file,
}


def put_in_place(path: Path, make: Damage) -> None:
    path.unlink(missing_ok=True)
    make(path)


for odd, maker in ODD.items():
    DAMAGES[odd] = lambda path, make=maker: put_in_place(path, make)  # type: ignore[misc]
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
odd_files = pytest.mark.parametrize("make", ODD.values(), ids=ODD)


@damages
class TestDamage:
    @pytest.mark.parametrize("full", [False, True], ids=["quick", "full"])
    def test_verify_finds_it_and_moves_it_away(
        self, damage: Damage, full: bool, store: Store, blob: Path
    ) -> None:
        damage(blob)
        inode = inode_of(blob)
        report = store.verify(full=full)
        assert (report.damaged, report.has_damage) == ([DIGEST], True)
        assert report.hashed_size == (len(OTHER) if full else 0), "it hashed the other"
        (moved,) = store.layout.bad.iterdir()
        assert (moved.name[:64], inode_of(moved)) == (DIGEST, inode)
        assert not os.path.lexists(blob)
        with pytest.raises(errors.BlobNotFoundError):
            store.open(DIGEST)
        assert read(store, digest_of(OTHER)) == OTHER

    def test_it_is_never_handed_out_and_who_brings_the_bytes_heals_it(
        self, damage: Damage, store: Store, blob: Path, folder: Path
    ) -> None:
        uses: dict[str, Callable[[Path], object]] = {
            "open": lambda _: store.open(DIGEST),
            "path": lambda _: store.path_of(DIGEST),
        }
        for kind in KINDS:
            if kind != "reflink" or probe(folder).reflink:
                uses[kind] = lambda path, kind=kind: store.place(DIGEST, path, kind=kind)  # type: ignore[misc]
        mine = write(folder.with_name("mine") / "a.safetensors")
        heals: list[Callable[[], object]] = [
            lambda: store.put_stream([WEIGHTS]), lambda: store.put_file(mine),
            lambda: dedup(store, mine), lambda: adopt(store, write(mine)),
        ]  # fmt: skip
        for number, (name, use) in enumerate(uses.items()):
            with row(name):
                damage(blob)
                with pytest.raises(errors.DamagedBlobError):
                    use(folder / f"{name}.safetensors")
                assert len(os.listdir(store.layout.bad)) == number + 1
                mine.unlink()
                write(mine)
                heals[number % len(heals)]()
                assert read(store) == WEIGHTS == mine.read_bytes()
                assert mode_of(blob) & 0o222 == 0
        assert os.listdir(folder) == []
        assert not store.verify(full=True).has_damage


def test_what_cannot_be_moved_away_is_given_to_nobody(store: Store, blob: Path) -> None:
    edit(blob)
    uses: list[Callable[[], object]] = [
        lambda: store.open(DIGEST),
        lambda: store.put_stream([WEIGHTS]),
    ]
    with store.locked("test"), ThreadPoolExecutor(1) as thread:
        for use in uses:
            with pytest.raises(errors.DamagedBlobError, match="could not be moved away"):
                thread.submit(use).result()
    uses[1]()
    assert read(store) == WEIGHTS


def test_whatever_is_done_to_a_link_wrong_bytes_are_never_read(store: Store, folder: Path) -> None:
    """Made writable, written, its time set back, one link more by others and one by us."""
    for number, order in enumerate(permutations(("chmod", "write", "time", "link", "ours"))):
        store.put_stream([WEIGHTS], durable=False)
        path = store.place(DIGEST, folder / f"{number}.bin", kind="hardlink", keep=True).path
        st = path.stat()
        for act in order:
            if act == "chmod":
                path.chmod(0o666)
            elif act == "write":
                edit(path)
            elif act == "time":
                os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
            elif act == "link":
                os.link(path, folder / f"{number} link")
            else:
                with suppress(*LOST):
                    store.place(DIGEST, folder / f"{number} ours", kind="hardlink", keep=True)
        with row(*order), pytest.raises(LOST):
            store.open(DIGEST)
        assert path.read_bytes()[:6] == b"EDITED", "that is the user's"


def test_copying_and_full_verify_find_hidden_rot(store: Store, blob: Path, folder: Path) -> None:
    rot(blob, store)
    assert not store.verify().has_damage
    with pytest.raises(errors.DamagedBlobError):
        store.place(DIGEST, folder / "a.safetensors", kind="copy")
    assert os.listdir(folder) == []
    store.put_stream([WEIGHTS])
    rot(blob, store)
    assert store.verify(full=True).damaged == [DIGEST]


def test_weights_that_were_written_to_through_a_link_are_named_and_lent_to_nobody_else(
    store: Store, folder: Path
) -> None:
    """In a folder and those in it. All names of a damaged inode are named, now and later."""
    names = ("a.bin", "unet/b.safetensors", "c.bin", "unet/far/d.bin", "e.json")
    written = [folder / name for name in names[:2]]
    store.put_stream([WEIGHTS])
    digest = store.put_stream([OTHER]).digest
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        store.place(DIGEST if name == "c.bin" else digest, folder / name, kind="hardlink")
    (folder / "symlink.bin").symlink_to("a.bin")
    (folder / "dangling.bin").symlink_to("none")
    write(folder / "own.bin")
    edit(written[0])
    for _ in range(2):
        assert set(look_for_damage(store, folder)) == {*written, folder / "symlink.bin"}
    assert look_for_damage(store, written[1]) == [written[1]]
    assert look_for_damage(store, folder / "c.bin") == look_for_damage(store, folder / "x") == []
    assert not store.has(digest)
    assert read(store) == WEIGHTS


@pytest.mark.usefixtures("no_leases")
def test_an_edit_between_any_two_looks_of_ours_is_found_by_the_next_use(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, pass_time: Callable[[float], None]
) -> None:
    """Its time set back, while the blob is hashed because nobody remembers it."""
    real, number, left = os.fstat, 0, 0

    def look_then_edit(descriptor: int) -> os.stat_result:
        nonlocal left
        st = real(descriptor)
        left -= 1
        if left == 0:
            edit_with_time_set_back(blob_path(store))
        return st

    pass_time(60)
    while left <= 0:
        store.put_stream([WEIGHTS])
        store.rebuild()
        while write(folder / "clock").stat().st_ctime_ns <= blob_path(store).stat().st_ctime_ns:
            pass  # the next tick of the clock of files
        number += 1
        left = number
        with monkeypatch.context() as patch, suppress(*LOST):
            patch.setattr(os, "fstat", look_then_edit)
            store.open(DIGEST).close()
        if left <= 0:
            with row(number), pytest.raises(LOST):
                store.open(DIGEST)
    assert number > 5


class TestBelief:
    def test_a_link_that_somebody_else_made_is_a_reason_to_hash(
        self, store: Store, blob: Path, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        """A new link explains a changed ctime, and an edit could hide behind it."""
        os.link(blob, folder / "outside")
        pass_time(10)
        assert [store.verify().hashed_size for _ in range(2)] == [len(WEIGHTS), 0]
        edit_with_time_set_back(blob)
        os.link(blob, folder / "again")
        assert store.verify().damaged == [DIGEST]

    @pytest.mark.usefixtures("with_leases")
    def test_what_is_young_or_open_for_writing_is_hashed_each_time(
        self, store: Store, blob: Path, pass_time: Callable[[float], None]
    ) -> None:
        def hashed() -> list[int]:
            return [store.verify().hashed_size for _ in range(2)]

        os.replace(write(blob.with_name("new"), age=0), blob)
        assert hashed() == [len(WEIGHTS)] * 2
        pass_time(10)
        with blob.open("r+b"):
            assert hashed() == [len(WEIGHTS)] * 2
        assert hashed() == [len(WEIGHTS), 0]

    def test_links_that_we_make_and_remove_are_none(self, store: Store, folder: Path) -> None:
        paths = [write(folder / f"{name}.bin") for name in "abc"]
        holding = store.holding()
        acts: dict[str, Callable[[], object]] = {
            "adopt": lambda: adopt(store, paths[0]),
            "dedup": lambda: dedup(store, *paths),
            "place": lambda: store.place(DIGEST, folder / "d.bin", kind="hardlink"),
            "copy": lambda: store.place(DIGEST, folder / "e.bin", kind="copy"),
            "pin": lambda: store.pin(DIGEST),
            "hold": lambda: holding.__enter__().hold(DIGEST, store.layout),
            "prune": lambda: store.plan_prune(max_size=0).execute(),
            "unpin": lambda: store.unpin(DIGEST),
            "let go": lambda: holding.__exit__(None, None, None),
            "undo of one": lambda: store.plan_undo(paths=paths[:1]).execute(),
            "undo": lambda: store.plan_undo(last=True).execute(),
        }
        for name, act in acts.items():
            act()
            watch = Watch()
            with row(name):
                assert (store.verify().blobs, store.verify().hashed_size) == (1, 0)
                for path in folder.iterdir():
                    if inode_of(path) == inode_of(blob_path(store)):
                        store.digest_of(path, advance=watch.advance)
                assert watch.done == 0

    def test_after_the_next_start_only_what_was_synced_or_is_old_is_believed(
        self, tmp_path: Path, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        """After a power cut a young file may have the same stat and other bytes."""
        a, b = folder / "a.bin", folder / "b.bin"

        def grow_old(store: Store) -> None:
            write(a)
            pass_time(7200)
            adopt(store, a)

        def put_quickly(store: Store) -> object:
            return store.put_stream([WEIGHTS], durable=False)

        def linked_by_others(store: Store) -> object:
            os.link(blob_path(store), b)
            pass_time(10)
            return store.verify()

        acts: dict[str, tuple[Callable[[Store], object], bool]] = {
            "put": (lambda store: store.put_stream([WEIGHTS]), True),
            "put, not durable": (put_quickly, False),
            "put, linked": (
                lambda store: (store.put_stream([WEIGHTS]), linked_by_others(store)),
                True,
            ),
            "not durable, linked": (
                lambda store: (put_quickly(store), linked_by_others(store)),
                False,
            ),
            "put again": (lambda store: (put_quickly(store), store.put_stream([WEIGHTS])), True),
            "put of a file": (lambda store: (put_quickly(store), store.put_file(write(a))), True),
            "adopted": (lambda store: adopt(store, write(a)), False),
            "adopted and put": (lambda store: store.put_file(adopt(store, write(a))[0].path), True),
            "survivor": (lambda store: dedup(store, write(a), write(b)), True),
            "adopted when it was old": (grow_old, True),
        }
        for name, (act, is_believed) in acts.items():
            for path in folder.iterdir():
                path.unlink()
            with row(name), Store(tmp_path / name) as store:
                act(store)
                assert store.verify().hashed_size == 0
                store.boot = "the next one"
                assert (store.verify().hashed_size == 0) is is_believed
                assert read(store) == WEIGHTS
                rot(blob_path(store), store)
                store.boot = "the one after"
                assert bool(store.verify().damaged) is not is_believed


@pytest.mark.parametrize("harm", [edit, edit_with_time_set_back])
class TestNoLaundering:
    """Our own links do not make an edit trusted."""

    def assert_found(self, store: Store, harm: Damage) -> None:
        """See that the next use is told, or, if the time was set back, full verify.

        Such an edit at the very moment of our own link looks like that link in stat.
        """
        if harm is edit:
            with pytest.raises(LOST):
                store.open(DIGEST)
        else:
            assert store.verify(full=True).damaged == [DIGEST]

    def test_of_a_blob_that_is_linked_at_this_moment(
        self, harm: Damage, store: Store, blob: Path, folder: Path, at_point: AtPoint
    ) -> None:
        uses: dict[str, Callable[[Path], object]] = {
            "hardlink": lambda path: store.place(DIGEST, path, kind="hardlink"),
            "copy": lambda path: store.place(DIGEST, path, kind="copy"),
            "dedup": lambda path: dedup(store, write(path)),
            "pin": lambda _: store.pin(DIGEST),
        }
        moments = [
            ("hardlink", "journal: begun"), ("hardlink", "place: linked"),
            ("copy", "copying"), ("pin", "pin: linked"), ("dedup", "journal: begun"),
            ("dedup", "temporary"), ("dedup", "exchanged"), ("dedup", "old removed"),
        ]  # fmt: skip
        for number, (name, point) in enumerate(moments):
            store.put_stream([WEIGHTS])
            at_point(point, lambda: harm(blob))
            with row(name, point):
                with suppress(errors.SmartcacheError):
                    uses[name](folder / f"{number}.bin")
                self.assert_found(store, harm)

    @pytest.mark.usefixtures("no_leases")
    def test_of_a_file_that_just_became_a_blob_without_a_lease(
        self, harm: Damage, store: Store, folder: Path, at_point: AtPoint,
        pass_time: Callable[[float], None],
    ) -> None:  # fmt: skip
        paths = [write(folder / "a.safetensors"), write(folder / "b.safetensors", OTHER)]
        pass_time(3)
        at_point("survivors on the disk", lambda: harm(paths[0]))
        assert {each.outcome for each in adopt(store, *paths)} == {"became"}
        self.assert_found(store, harm)
        assert paths[0].read_bytes() != WEIGHTS, "the edit is the user's"
        assert read(store, digest_of(OTHER)) == OTHER
        harm(paths[1])
        with pytest.raises(errors.DamagedBlobError):
            store.place(digest_of(OTHER), folder / "c.safetensors", kind="hardlink")


def use_all(root: Path) -> int:
    with Store(root) as store:
        store.pin(DIGEST)
        store.verify()
        return len(store.history())


@odd_files
class TestOddFiles:
    """What is not a regular file, in the place of one of the store: named, never waited for."""

    @pytest.mark.parametrize("name", ["format", "lock", "journal.sqlite3", "index.sqlite3"])
    def test_in_place_of_a_file_of_ours_it_is_named_and_nothing_lost(
        self, make: Damage, name: str, store: Store, blob: Path, folder: Path
    ) -> None:
        adopt(store, write(folder / "b.bin", b"b"))
        store.close()
        put_in_place(store.root / name, make)
        try:
            assert use_all(store.root) == 1
        except (errors.StoreError, OSError) as error:
            assert name in str(error)  # noqa: PT017 - or the copy of the journal takes its place
        else:
            assert name == "journal.sqlite3"
        assert blob.read_bytes() == WEIGHTS

    def test_in_bad_it_can_be_cleared(self, make: Damage, store: Store, blob: Path) -> None:
        make(store.layout.bad / f"{DIGEST}.0")
        store.plan_prune(with_bad=True).execute()
        left = [f"{DIGEST}.0"] if make is Path.mkdir else []
        assert os.listdir(store.layout.bad) == left
        assert not blob.exists()
