"""Bytes that are not what they were: found, named, never handed out, healed from a copy."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from blake3 import blake3

from tests.api import (
    BlobNotFoundError,
    DamagedBlobError,
    FileSkippedError,
    IndexDamagedError,
    PruneRefusedError,
    SmartcacheError,
    Store,
    Trust,
    replace_damaged_index,
)
from tests.api import links_Kind as Kind
from tests.api import store_faults as faults
from tests.api import store_hold as hold

if sys.platform == "win32":
    pytest.skip("modes and inodes", allow_module_level=True)

DATA = random.Random(1).randbytes(100_000)
DIGEST = blake3(DATA).hexdigest()
OTHER_DATA = random.Random(2).randbytes(100_000)
OTHER_DIGEST = blake3(OTHER_DATA).hexdigest()
LONG_AGO = (10**18, 10**18)
OLD_ENOUGH = 2.1
"""Seconds after which the store trusts the times of a file."""

Damage = Callable[[Path], None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with two blobs, one of which will be damaged."""
    with Store(tmp_path / "store") as made:
        made.put_stream([DATA], algorithms=["sha256"])
        made.put_stream([OTHER_DATA])
        yield made


@pytest.fixture
def blob(store: Store) -> Path:
    return Path(store.volume.layout.blob(DIGEST))


# ways to damage a file


def flip(path: Path) -> None:
    """Change one bit as the owner can, whatever the mode."""
    mode = path.stat().st_mode
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(50_000)
        byte = file.read(1)[0]
        file.seek(50_000)
        file.write(bytes([byte ^ 1]))
    path.chmod(mode)


def flip_and_set_the_time_back(path: Path) -> None:
    st = path.stat()
    flip(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def truncate(path: Path) -> None:
    os.chmod(path, 0o644)
    os.truncate(path, 50_000)
    os.chmod(path, 0o444)


def empty(path: Path) -> None:
    os.chmod(path, 0o644)
    os.truncate(path, 0)


def append(path: Path) -> None:
    os.chmod(path, 0o644)
    with open(path, "ab") as file:
        file.write(b"more")


def exchange_for_another_file(path: Path) -> None:
    """A file that looks the same: size, time and mode."""
    st = path.stat()
    other = path.with_name("other")
    other.write_bytes(OTHER_DATA)
    os.utime(other, ns=(st.st_atime_ns, st.st_mtime_ns))
    other.chmod(0o444)
    other.replace(path)


DAMAGES: list[Damage] = [
    flip, flip_and_set_the_time_back, truncate, empty, append, exchange_for_another_file,
]  # fmt: skip
damages = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage.__name__))


def rot(store: Store, path: Path) -> None:
    """Damage a blob as a disk does: without any trace in its stat."""
    flip_and_set_the_time_back(path)
    index = store.volume.index
    index.refresh(store.get(path.name).id, path.stat(), Trust.VERIFIED)


def bad_files(store: Store) -> list[Path]:
    return sorted((store.root / "bad").iterdir())


def assert_whole(store: Store, digest: str = DIGEST, data: bytes = DATA) -> None:
    with store.open(digest) as file:
        assert file.read() == data
    st = os.stat(store.path_of(digest))
    assert not stat.S_IMODE(st.st_mode) & 0o222


# finding it


@damages
def test_full_verify_finds_damage_and_moves_it_away(
    damage: Damage, store: Store, blob: Path
) -> None:
    damage(blob)
    damaged_bytes = blob.read_bytes()
    report = store.verify(full=True)
    assert report.damaged == [DIGEST]
    assert report.has_damage
    assert not blob.exists()
    (moved,) = bad_files(store)
    assert moved.name.startswith(DIGEST)
    assert moved.read_bytes() == damaged_bytes
    with pytest.raises(BlobNotFoundError), store.open(DIGEST):
        pass
    assert_whole(store, OTHER_DIGEST, OTHER_DATA)


@damages
def test_quick_verify_finds_what_stat_can_show(damage: Damage, store: Store, blob: Path) -> None:
    damage(blob)
    report = store.verify()
    assert report.damaged == [DIGEST]
    assert report.hashed_size <= len(DATA) + 4, "it did not hash what stat vouches for"
    assert len(bad_files(store)) == 1


def test_only_full_verify_finds_what_stat_cannot_show(store: Store, blob: Path) -> None:
    rot(store, blob)
    assert not store.verify().has_damage
    assert store.verify(full=True).damaged == [DIGEST]


def test_quick_verify_hashes_a_blob_that_somebody_else_linked(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    """A new link explains a changed ctime, and an edit could hide behind it."""
    flip_and_set_the_time_back(blob)
    os.link(blob, tmp_path / "outside")
    assert store.verify().damaged == [DIGEST]


def test_quick_verify_hashes_a_blob_once_that_was_used_after_somebody_else_linked_it(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    os.link(blob, tmp_path / "outside")
    assert_whole(store)
    assert store.verify().hashed_size == len(DATA)
    assert store.verify().hashed_size == 0


def test_a_blob_made_writable_is_hashed_and_made_read_only_again(store: Store, blob: Path) -> None:
    blob.chmod(0o666)
    report = store.verify()
    assert report.writable == [DIGEST]
    assert not report.has_damage
    assert stat.S_IMODE(blob.stat().st_mode) == 0o444
    assert store.verify().writable == []


def test_missing_unindexed_and_stray_files_are_named(store: Store, blob: Path) -> None:
    blob.unlink()
    unknown = random.Random(3).randbytes(1000)
    digest = blake3(unknown).hexdigest()
    store.volume.layout.make_blob_directory(digest)
    orphan = Path(store.volume.layout.blob(digest))
    orphan.write_bytes(unknown)
    orphan.chmod(0o444)
    stray = orphan.with_name("notes.txt")
    stray.write_text("mine", encoding="ascii")
    report = store.verify()
    assert (report.missing, report.unindexed, report.stray) == ([DIGEST], [digest], [stray])
    assert report.has_damage
    report = store.verify(full=True)
    assert report.unindexed == [digest]
    assert stray.read_text(encoding="ascii") == "mine"
    assert_whole(store, digest, unknown)


def test_an_unindexed_file_with_the_wrong_bytes_is_damage(store: Store) -> None:
    digest = "ab" * 32
    store.volume.layout.make_blob_directory(digest)
    Path(store.volume.layout.blob(digest)).write_bytes(b"wrong")
    assert store.verify(full=True).damaged == [digest]
    assert len(bad_files(store)) == 1


# never handing it out


def use_by_open(store: Store, folder: Path) -> None:
    with store.open(DIGEST) as file:
        assert file.read() == DATA


def use_by_path(store: Store, folder: Path) -> None:
    assert store.path_of(DIGEST).read_bytes() == DATA


def use_by_replace(store: Store, folder: Path) -> None:
    path = folder / "same.safetensors"
    path.write_bytes(DATA)
    assert store.replace(path, DIGEST).outcome == "replaced"


def use_by_place(kind: Kind) -> Callable[[Store, Path], None]:
    def place(store: Store, folder: Path) -> None:
        store.place(DIGEST, folder / "placed.safetensors", kind=kind)

    place.__name__ = f"place_{kind}"
    return place


USES = [
    use_by_open, use_by_path, use_by_replace, use_by_place("auto"), use_by_place("hardlink"),
    use_by_place("symlink"), use_by_place("copy"),
]  # fmt: skip


@damages
@pytest.mark.parametrize("use", USES, ids=lambda use: str(use.__name__))
def test_a_damaged_blob_is_never_handed_out(
    use: Callable[[Store, Path], None], damage: Damage, store: Store, blob: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    damage(blob)
    with pytest.raises(DamagedBlobError):
        use(store, folder)
    for path in folder.iterdir():
        assert path.name == "same.safetensors"
        assert path.read_bytes() == DATA
        assert path.stat().st_nlink == 1
    assert len(bad_files(store)) == 1


@damages
def test_putting_the_same_bytes_heals_a_damaged_blob(
    damage: Damage, store: Store, blob: Path
) -> None:
    store.pin(DIGEST)
    damage(blob)
    assert store.put_stream([DATA]).digest == DIGEST
    assert_whole(store)
    assert len(bad_files(store)) == 1
    assert [str(owner) for owner, _ in store.holders_of(store.get(DIGEST))] == ["pin kept"]
    assert not store.verify(full=True).has_damage


@damages
def test_adopting_the_same_bytes_heals_a_damaged_blob(
    damage: Damage, store: Store, blob: Path, tmp_path: Path
) -> None:
    damage(blob)
    path = tmp_path / "a.safetensors"
    path.write_bytes(DATA)
    os.utime(path, ns=LONG_AGO)
    assert store.adopt(path).digest == DIGEST
    assert_whole(store)
    assert path.samefile(blob)


def test_a_copy_of_a_blob_that_rots_while_it_is_used_is_not_kept(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    """A copy is hashed while it is made."""
    rot(store, blob)
    with pytest.raises(DamagedBlobError):
        store.place(DIGEST, tmp_path / "a.safetensors", kind="copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_an_edit_right_after_the_hash_with_the_time_set_back_is_not_trusted(
    store: Store, blob: Path
) -> None:
    """The row is written under the lock; while somebody has that, the file can be changed."""
    blob.chmod(0o644)  # the change time moves: it is hashed before use
    outcome: list[object] = []

    def use() -> None:
        with Store(store.root) as other:
            other.volume.on_wait = lambda _: waiting.set()
            try:
                with other.open(DIGEST) as file:
                    outcome.append(file.read())
            except DamagedBlobError as error:
                outcome.append(error)

    waiting = threading.Event()
    with store.volume.guard("test", exclusive=True):
        user = threading.Thread(target=use)
        user.start()
        assert waiting.wait(20)
        flip_and_set_the_time_back(blob)
    user.join(20)
    assert isinstance(outcome[0], DamagedBlobError)


def test_a_blob_linked_by_others_stays_usable_and_is_hashed_by_the_next_quick_verify(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    """The one thing that stat cannot show: documented, and found by the next verify."""
    flip_and_set_the_time_back(blob)
    os.link(blob, tmp_path / "link")
    with store.open(DIGEST) as file:
        assert file.read() != DATA
    assert store.get(DIGEST).trust == Trust.RELINKED
    assert store.verify().damaged == [DIGEST]


def test_a_blob_that_was_adopted_before_a_crash_is_hashed_before_use(
    store: Store, tmp_path: Path
) -> None:
    """Nobody has synced its bytes: after a power failure they may be zeros, with the right stat."""
    data = random.Random(4).randbytes(1000)
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    os.utime(path, ns=LONG_AGO)
    digest = store.adopt(path).digest
    index = store.volume.index
    with path.open("rb") as file:
        os.chmod(path, 0o644)
        Path(f"/proc/self/fd/{file.fileno()}").write_bytes(bytes(1000))
        os.chmod(path, 0o444)
    index.add_blob(digest, path.stat(), trust=Trust.VERIFIED, unsynced="an earlier boot")
    with pytest.raises(DamagedBlobError), store.open(digest):
        pass


# no laundering: our own link operations do not make an edit trusted

edits = pytest.mark.parametrize(
    "edit", [flip, flip_and_set_the_time_back], ids=lambda edit: str(edit.__name__)
)


@contextmanager
def at_point(point: str, act: Callable[[], None], *, turn: int = 1) -> Iterator[None]:
    """Do something when the store reaches a point (for the n-th time)."""
    left = [turn]

    def hook(reached: str) -> None:
        if reached == point:
            left[0] -= 1
            if left[0] == 0:
                act()

    faults.hook = hook
    try:
        yield
    finally:
        faults.hook = None
    assert left[0] <= 0, f"{point} was not reached"


def assert_found(store: Store, edit: Damage, digest: str = DIGEST) -> None:
    """See that the next use is told of an edit, or, if its time was set back, full verify.

    Such an edit at the very moment of our own link looks like that link in stat.
    """
    if edit is flip_and_set_the_time_back:
        assert store.verify(full=True).damaged == [digest]
    else:
        with pytest.raises(DamagedBlobError), store.open(digest):
            pass


@edits
def test_an_edit_right_before_we_link_is_found_before_the_link_is_made(
    edit: Damage, store: Store, blob: Path, tmp_path: Path
) -> None:
    with at_point("place: journaled", lambda: edit(blob)), pytest.raises(DamagedBlobError):
        store.place(DIGEST, tmp_path / "a.safetensors", kind="hardlink")
    assert not (tmp_path / "a.safetensors").exists()


@edits
def test_an_edit_right_after_our_link_is_not_trusted(
    edit: Damage, store: Store, blob: Path, tmp_path: Path
) -> None:
    with at_point("place: linked", lambda: edit(blob)):
        store.place(DIGEST, tmp_path / "a.safetensors", kind="hardlink")
    assert_found(store, edit)


@edits
def test_an_edit_right_before_we_replace_is_found_before_anything_is_replaced(
    edit: Damage, store: Store, blob: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(DATA)
    os.utime(path, ns=LONG_AGO)
    with at_point("replace: journaled", lambda: edit(blob)), pytest.raises(SmartcacheError):
        store.replace(path, DIGEST)
    assert path.read_bytes() == DATA
    with pytest.raises((DamagedBlobError, BlobNotFoundError)), store.open(DIGEST):
        pass


@edits
@pytest.mark.parametrize("point", ["replace: temporary linked", "replace: exchanged"])
def test_an_edit_while_we_replace_is_not_trusted_afterwards(
    point: str, edit: Damage, store: Store, blob: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(DATA)
    os.utime(path, ns=LONG_AGO)
    with at_point(point, lambda: edit(blob)), suppress(FileSkippedError):
        store.replace(path, DIGEST)
    assert_found(store, edit)


@edits
def test_an_edit_while_we_adopt_without_a_lease_is_not_trusted(
    edit: Damage, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some filesystems have no leases: nothing keeps a writer out of a file that we have seen."""
    monkeypatch.setattr(hold, "take_lease", lambda _: "unsupported")
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    contents = [random.Random(10 + number).randbytes(100_000) for number in range(2)]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    time.sleep(OLD_ENOUGH)
    with at_point("adopt: linked", lambda: edit(paths[0]), turn=2):
        outcomes = {adoption.outcome for adoption in store.adopt_many(paths)}
    assert outcomes == {"adopted"}
    assert_found(store, edit, blake3(contents[0]).hexdigest())
    assert paths[0].read_bytes() != contents[0], "the edit is the user's"
    assert_whole(store, blake3(contents[1]).hexdigest(), contents[1])


# healing it


class Connected:
    """A pinned blob with an alias, a copy and a hard link outside."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.copy = store.place(DIGEST, folder / "copy.safetensors", kind="copy").path
        self.link = store.place(DIGEST, folder / "link.safetensors", kind="hardlink").path
        store.pin(DIGEST, "favourites")
        self.sha256 = store.aliases_of(store.get(DIGEST))["sha256"]

    def assert_kept(self, store: Store) -> None:
        blob = store.get(DIGEST)
        assert store.find("sha256", self.sha256) == blob
        assert [str(owner) for owner, _ in store.holders_of(blob)] == ["pin favourites"]
        assert {link.path for link in store.links_of(blob)} == {self.copy, self.link}
        assert_whole(store)
        assert not store.verify(full=True).has_damage


@damages
def test_a_damaged_blob_is_healed_from_a_copy_outside(
    damage: Damage, store: Store, blob: Path, tmp_path: Path
) -> None:
    connected = Connected(store, tmp_path)
    damage(blob)
    report = store.verify(repair=True)
    assert report.damaged == [DIGEST]
    assert report.healed == [DIGEST]
    assert not report.has_damage
    connected.assert_kept(store)
    assert len(bad_files(store)) == 1
    if damage is exchange_for_another_file:
        assert connected.link.read_bytes() == DATA


def test_a_blob_that_was_removed_is_healed_from_its_own_hard_link(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    connected = Connected(store, tmp_path)
    connected.copy.write_bytes(b"edited by its user")
    blob.unlink()
    report = store.verify(repair=True)
    assert (report.missing, report.healed) == ([DIGEST], [DIGEST])
    assert connected.link.samefile(blob), "shared again, not copied"
    connected.assert_kept(store)
    assert connected.copy.read_bytes() == b"edited by its user"


def test_a_damaged_blob_without_a_copy_stays_damage(store: Store, blob: Path) -> None:
    flip(blob)
    report = store.verify(repair=True)
    assert report.healed == []
    assert report.has_damage
    assert store.verify(repair=True).has_damage, "it is not forgotten"


def test_a_damaged_blob_is_healed_from_another_volume(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    shared_memory = Path("/dev/shm")  # noqa: S108 - a filesystem that every Linux has
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem")
    with tempfile.TemporaryDirectory(dir=shared_memory) as name:
        store.add_volume(Path(name) / "store").put_stream([DATA])
        connected = Connected(store, tmp_path)
        connected.copy.unlink()
        connected.link.unlink()
        flip(blob)
        report = store.verify(repair=True)
        assert (report.damaged, report.healed) == ([DIGEST], [DIGEST])
        assert_whole(store)
        assert [str(owner) for owner, _ in store.holders_of(store.get(DIGEST))] == [
            "pin favourites"
        ]
        # Taken from there, not moved, and not trusted blindly either.
        (other,) = (each for each in store.stores() if each is not store)
        flip(Path(other.volume.layout.blob(DIGEST)))
        flip(blob)
        assert store.verify(repair=True).healed == []
        other.close()


def test_a_lost_blob_comes_back_with_all_that_was_known_of_it(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    connected = Connected(store, tmp_path)
    flip(blob)
    with pytest.raises(DamagedBlobError), store.open(DIGEST):
        pass
    connected.link.unlink()
    store.place(store.put_stream([DATA]).digest, connected.link, kind="hardlink")
    connected.assert_kept(store)


def test_a_lost_blob_is_no_victim_of_prune_and_can_be_forgotten(store: Store, blob: Path) -> None:
    blob.unlink()
    store.verify()
    assert [victim.digest for victim in store.plan_prune().victims] == [OTHER_DIGEST]
    with pytest.raises(BlobNotFoundError):
        store.pin(DIGEST)


# the index


def remove_index(root: Path) -> None:
    for path in root.glob("index.sqlite3*"):
        path.unlink()


def empty_index(root: Path) -> None:
    remove_index(root)
    (root / "index.sqlite3").touch()


@pytest.mark.parametrize("lose", [remove_index, empty_index], ids=lambda lose: str(lose.__name__))
def test_a_store_without_its_index_finds_its_blobs_again(
    lose: Callable[[Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        for data in (DATA, OTHER_DATA):
            store.put_stream([data])
        store.pin(DIGEST, "favourites")
        store.place(DIGEST, tmp_path / "a.safetensors", kind="symlink")
    lose(root)
    with Store(root) as store:
        assert {blob.digest for blob in store.blobs()} == {DIGEST, OTHER_DIGEST}
        assert_whole(store)
        assert_whole(store, OTHER_DIGEST, OTHER_DATA)
        assert [str(owner) for owner, _ in store.holders_of(store.get(DIGEST))] == [
            "pin favourites"
        ]
        with pytest.raises(PruneRefusedError):
            store.plan_prune()
    with Store(root) as store:
        with pytest.raises(PruneRefusedError):
            store.plan_prune()
        store.confirm_links()
        assert [victim.digest for victim in store.plan_prune().victims] == [OTHER_DIGEST]
        assert store.plan_prune().execute().removed == 1
        assert_whole(store)
        assert not store.verify(full=True).has_damage


def test_damage_is_found_after_the_index_was_lost(tmp_path: Path) -> None:
    """Rows made from the disk are no proof: the first use hashes."""
    root = tmp_path / "store"
    with Store(root) as store:
        store.put_stream([DATA])
        flip(Path(store.volume.layout.blob(DIGEST)))
    remove_index(root)
    with Store(root) as store, pytest.raises(DamagedBlobError):
        store.place(DIGEST, tmp_path / "a.safetensors", kind="hardlink")


def overwrite_all(path: Path) -> None:
    path.write_bytes(random.Random(5).randbytes(path.stat().st_size))


def overwrite_header(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"no database at all")


def overwrite_all_but_the_first_page(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(random.Random(6).randbytes(path.stat().st_size - 4096))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


@pytest.mark.parametrize(
    "damage",
    [overwrite_all, overwrite_header, overwrite_all_but_the_first_page, cut_in_half],
    ids=lambda damage: str(damage.__name__),
)
def test_a_damaged_index_is_named_and_can_be_made_again(damage: Damage, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        settings = store.settings
        for data in (DATA, OTHER_DATA):
            store.put_stream([data])
        store.pin(DIGEST)
    damage(root / "index.sqlite3")
    with pytest.raises(IndexDamagedError) as raised:
        use_everything(root)
    assert "--rebuild" in raised.value.hint
    replace_damaged_index(root, settings).close()
    with Store(root) as store:
        store.rebuild()
        digests = {blob.digest for blob in store.blobs()}
        assert digests - {blake3(b"more").hexdigest()} == {DIGEST, OTHER_DIGEST}
        assert_whole(store)
        assert [str(owner) for owner, _ in store.holders_of(store.get(DIGEST))] == ["pin kept"]
        with pytest.raises(PruneRefusedError):
            store.plan_prune()
        assert not store.verify(full=True).has_damage
    assert [path.name for path in (root / "bad").iterdir() if "index" in path.name]
    connection = sqlite3.connect(root / "index.sqlite3")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    finally:
        connection.close()


def use_everything(root: Path) -> None:
    with Store(root) as store:
        store.put_stream([b"more"])
        store.verify()
        store.pin(DIGEST, "again")


@pytest.mark.parametrize("pages", ["schema", "all"])
def test_bytes_flipped_in_the_index_are_never_anything_but_damage_to_it(
    pages: str, tmp_path: Path
) -> None:
    """Tables that lack a column, texts that are none, numbers without sense, rows in a circle."""
    root = tmp_path / "store"
    with Store(root) as store:
        store.put_stream([DATA], algorithms=["sha256"])
        store.pin(DIGEST)
        store.place(DIGEST, tmp_path / "a.safetensors", kind="symlink")
    path = root / "index.sqlite3"
    sound, chance = path.read_bytes(), random.Random(7)
    end = 4096 if pages == "schema" else len(sound)
    places = [n for n in range(100, end) if sound[n]]
    for _ in range(40):
        data = bytearray(sound)
        for place in chance.sample(places, 3):
            data[place] = chance.randrange(256)
        remove_index(root)
        path.write_bytes(data)
        try:
            use_everything(root)
            with Store(root) as store:
                store.usage()
                store.owners()
        except SmartcacheError as error:
            assert isinstance(error, IndexDamagedError | BlobNotFoundError)  # noqa: PT017


def test_a_sound_index_is_not_replaced(store: Store) -> None:
    settings = store.settings
    store.close()
    replace_damaged_index(store.root, settings).close()
    with Store(store.root) as again:
        assert {blob.digest for blob in again.blobs()} == {DIGEST, OTHER_DIGEST}
    assert list((store.root / "bad").iterdir()) == []


def test_what_held_lost_bytes_holds_them_again_when_they_come_back(tmp_path: Path) -> None:
    """Neither the index nor the bytes were there for a while; the journal remembers."""
    root, path = tmp_path / "store", tmp_path / "a.safetensors"
    with Store(root) as store:
        store.put_stream([DATA])
        store.pin(DIGEST, "favourites")
        store.place(DIGEST, path, kind="symlink")
        removed = store.put_stream([OTHER_DATA]).digest
        store.pin(removed)
        store.unpin(removed)
        store.plan_prune().execute()
        Path(store.volume.layout.blob(DIGEST)).unlink()
    remove_index(root)
    with Store(root) as store:
        assert store.verify().missing == [DIGEST]
        store.put_stream([DATA])
        blob = store.get(DIGEST)
        assert [str(owner) for owner, _ in store.holders_of(blob)] == ["pin favourites"]
        assert [link.path for link in store.links_of(blob)] == [path]
        assert store.plan_prune(after_rebuild=True).victims == ()
        assert not store.verify().has_damage
