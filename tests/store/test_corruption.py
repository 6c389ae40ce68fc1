"""Bytes that are not what they were: found, named, never handed out, never laundered by us."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import BlobNotFoundError, DamagedBlobError, SmartcacheError
from smartcache.store import KINDS
from smartcache.store.changes import userfile as hold
from smartcache.store.records import Trust
from smartcache.store.store import Store
from smartcache.system import faults
from smartcache.system.filesystems import probe
from tests.store.files import (
    OTHER,
    WEIGHTS,
    blob_path,
    digest_of,
    edit,
    edit_with_time_set_back,
    mode_of,
    read,
    row,
    write,
)

if sys.platform == "win32":
    pytest.skip("modes and inodes", allow_module_level=True)

DIGEST = digest_of(WEIGHTS)
Damage = Callable[[Path], None]


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


DAMAGES: dict[str, Damage] = {
    "flipped": edit,
    "flipped, time set back": edit_with_time_set_back,
    "truncated": truncate,
    "emptied": lambda path: truncate(path, 0),
    "grown": lambda path: edit(path, b"more", offset=len(WEIGHTS)),
    "exchanged": exchange_for_another_file,
}
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


def bad_files(store: Store) -> list[Path]:
    return list(store.volume.layout.bad.iterdir())


@damages
def test_quick_and_full_verify_find_damage_and_move_it_away(
    damage: Damage, store: Store, blob: Path
) -> None:
    for full in (False, True):
        with row("full" if full else "quick"):
            damage(blob)
            damaged = blob.read_bytes()
            report = store.verify(full=full)
            assert report.damaged == [DIGEST]
            assert report.has_damage
            if not full:
                assert report.hashed_size <= len(damaged), "it hashed what stat vouches for"
            assert not blob.exists()
            (moved,) = bad_files(store)
            assert moved.name.startswith(DIGEST)
            assert moved.read_bytes() == damaged
            with pytest.raises(BlobNotFoundError):
                store.open(DIGEST)
            assert read(store, digest_of(OTHER)) == OTHER
            moved.unlink()
            store.put_stream([WEIGHTS])


def test_only_full_verify_finds_what_stat_cannot_show(store: Store, blob: Path) -> None:
    """A disk that rots leaves no trace in the stat; a copy is hashed while it is made."""
    edit(blob)
    store.volume.index.refresh(store.get(DIGEST).id, blob.stat(), Trust.VERIFIED)
    assert not store.verify().has_damage
    with pytest.raises(DamagedBlobError):
        store.place(DIGEST, store.root.with_name("a.safetensors"), kind="copy")
    assert not store.root.with_name("a.safetensors").exists()
    store.put_stream([WEIGHTS])
    edit(blob)
    store.volume.index.refresh(store.get(DIGEST).id, blob.stat(), Trust.VERIFIED)
    assert store.verify(full=True).damaged == [DIGEST]


def test_quick_verify_hashes_a_blob_that_somebody_else_linked(
    store: Store, blob: Path, tmp_path: Path
) -> None:
    """A new link explains a changed ctime, and an edit could hide behind it."""
    os.link(blob, tmp_path / "outside")
    assert store.verify().hashed_size == len(WEIGHTS)
    found = store.get(DIGEST)
    assert (found.trust, found.links) == (Trust.VERIFIED, 2)
    assert store.verify().hashed_size == 0
    edit_with_time_set_back(blob)
    os.link(blob, tmp_path / "again")
    assert store.verify().damaged == [DIGEST]


def replace_by(store: Store, path: Path) -> None:
    assert store.replace(write(path), DIGEST).outcome == "replaced"


@damages
def test_a_damaged_blob_is_never_handed_out(
    damage: Damage, store: Store, blob: Path, folder: Path
) -> None:
    """By no use and as no kind of link; whoever brings the bytes again heals it."""
    uses: dict[str, Callable[[Path], object]] = {
        "open": lambda _: store.open(DIGEST),
        "path": lambda _: store.path_of(DIGEST),
        "replace": lambda path: replace_by(store, path),
    }
    for kind in KINDS:
        if kind != "reflink" or probe(folder).reflink:
            uses[kind] = lambda path, kind=kind: store.place(DIGEST, path, kind=kind)  # type: ignore[misc]
    store.pin(DIGEST)
    for number, (name, use) in enumerate(uses.items(), 1):
        with row(name):
            damage(blob)
            with pytest.raises(DamagedBlobError):
                use(folder / f"{name}.safetensors")
            assert len(bad_files(store)) == number
            assert store.put_stream([WEIGHTS]).digest == DIGEST
            assert read(store) == WEIGHTS
            assert mode_of(blob) & 0o222 == 0
    (path,) = folder.iterdir()
    assert (path.name, path.read_bytes(), path.stat().st_nlink) == (
        "replace.safetensors", WEIGHTS, 1,
    )  # fmt: skip
    damage(blob)
    store.adopt(path)
    assert path.samefile(blob)
    assert read(store) == WEIGHTS
    assert [str(owner) for owner, _ in store.holders_of(store.get(DIGEST))] == ["pin kept"]
    assert not store.verify(full=True).has_damage


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
                outcome.append(read(other))
            except DamagedBlobError as error:
                outcome.append(error)

    waiting = threading.Event()
    with store.volume.guard("test", exclusive=True):
        user = threading.Thread(target=use)
        user.start()
        assert waiting.wait(20)
        edit_with_time_set_back(blob)
    user.join(20)
    assert isinstance(outcome[0], DamagedBlobError)


def test_a_blob_that_was_adopted_before_a_crash_is_hashed_before_use(
    store: Store, folder: Path
) -> None:
    """Nobody has synced its bytes: after a power failure they may be zeros, with the right stat."""
    path = write(folder / "a.safetensors")
    blob = store.adopt(path)
    assert (blob.unsynced, blob.links) == (store.volume.boot, 2)
    store.volume.boot = "another boot"
    assert read(store) == WEIGHTS
    assert store.get(DIGEST).unsynced is None
    edit(path, bytes(1000))
    index = store.volume.index
    index.add_blob(DIGEST, path.stat(), trust=Trust.VERIFIED, unsynced="an earlier boot")
    with pytest.raises(DamagedBlobError):
        store.open(DIGEST)


# No laundering: our own link operations do not make an edit trusted.


def at_turn(
    monkeypatch: pytest.MonkeyPatch, point: str, turn: int, act: Callable[[], None]
) -> None:
    """Do something when the store reaches a point for the n-th time."""
    left = [turn]

    def hook(reached: str) -> None:
        left[0] -= reached == point
        if reached == point and left[0] == 0:
            act()

    monkeypatch.setattr(faults, "hook", hook)


def assert_found(store: Store, harm: Damage, digest: str = DIGEST) -> None:
    """See that the next use is told of an edit, or, if its time was set back, full verify.

    Such an edit at the very moment of our own link looks like that link in stat.
    """
    if harm is edit:
        with pytest.raises((DamagedBlobError, BlobNotFoundError)):
            store.open(digest)
    else:
        assert store.verify(full=True).damaged == [digest]


@pytest.mark.parametrize("harm", [edit, edit_with_time_set_back])
def test_an_edit_while_we_link_is_found_before_the_link_is_made_or_afterwards(
    harm: Damage, store: Store, blob: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses: dict[str, Callable[[Path], object]] = {
        "hardlink": lambda path: store.place(DIGEST, path, kind="hardlink"),
        "copy": lambda path: store.place(DIGEST, path, kind="copy"),
        "replace": lambda path: replace_by(store, path),
    }
    moments = [
        ("hardlink", "place: journaled"), ("copy", "place: journaled"),
        ("hardlink", "place: linked"), ("replace", "replace: journaled"),
        ("replace", "replace: temporary linked"), ("replace", "replace: exchanged"),
    ]  # fmt: skip
    for name, point in moments:
        with row(name, point):
            path = folder / f"{point.replace(' ', '-')} {name}.safetensors"
            at_turn(monkeypatch, point, 1, lambda: harm(blob))
            if point.endswith("journaled"):
                with pytest.raises(SmartcacheError):
                    uses[name](path)
                assert not path.exists() if name != "replace" else path.read_bytes() == WEIGHTS
                with pytest.raises((DamagedBlobError, BlobNotFoundError)):
                    store.open(DIGEST)
            else:
                try:
                    uses[name](path)
                except SmartcacheError as error:
                    assert name == "replace", error  # noqa: PT017
                assert_found(store, harm)
            store.put_stream([WEIGHTS])


@pytest.mark.parametrize("harm", [edit, edit_with_time_set_back])
def test_an_edit_through_a_link_or_without_a_lease_is_not_laundered(
    harm: Damage,
    store: Store,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    pass_time: Callable[[float], None],
) -> None:
    """Some filesystems have no leases: nothing keeps a writer out of a file that we have seen."""
    monkeypatch.setattr(hold, "take_lease", lambda _: "unsupported")
    paths = [write(folder / "a.safetensors"), write(folder / "b.safetensors", OTHER)]
    pass_time(3)
    at_turn(monkeypatch, "adopt: linked", 2, lambda: harm(paths[0]))
    assert {adoption.outcome for adoption in store.adopt_many(paths)} == {"adopted"}
    assert_found(store, harm)
    assert paths[0].read_bytes() != WEIGHTS, "the edit is the user's"
    assert read(store, digest_of(OTHER)) == OTHER
    harm(paths[1])
    with pytest.raises(DamagedBlobError):
        store.place(digest_of(OTHER), folder / "c.safetensors", kind="hardlink")
    assert sorted(os.listdir(folder)) == ["a.safetensors", "b.safetensors"]
