"""What is not a regular file, in the place of a file of the store: named, never waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smartcache.errors import BlobNotFoundError, DamagedBlobError, UnsafeFileError
from smartcache.store.store import Store
from smartcache.system.ownfiles import open_own, read_own
from tests.store.files import OTHER, WEIGHTS, blob_path, digest_of, row, write

DIGEST = digest_of(WEIGHTS)
pytestmark = pytest.mark.timeout(30)  # what waits for a FIFO waits for ever


def make_symlink(path: Path) -> None:
    path.symlink_to(write(path.parent.parent / "elsewhere.bin"))


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
        os.rename("s", path.name)
    finally:
        os.chdir(here)


Make = Callable[[Path], None]
ODD: tuple[Make, ...] = (os.mkfifo, make_symlink, make_dangling, Path.mkdir, make_socket)
odd_files = pytest.mark.parametrize(
    "make", ODD, ids=["fifo", "symlink", "dangling", "folder", "socket"]
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as made:
        made.put_stream([WEIGHTS])
        made.put_stream([OTHER])
        yield made


def put_in_place(path: str | Path, make: Make) -> Path:
    place = Path(path)
    place.unlink(missing_ok=True)
    make(place)
    return place


@odd_files
def test_it_is_refused_for_reading_and_writing(make: Make, tmp_path: Path) -> None:
    place = tmp_path / "folder" / "file"
    place.parent.mkdir()
    make(place)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_APPEND):
        with row(flags), pytest.raises(UnsafeFileError, match="is not a regular file"):
            open_own(place, flags)
    with pytest.raises(UnsafeFileError):
        read_own(place, 10)
    directory = os.open(place.parent, os.O_RDONLY)
    try:
        with pytest.raises(UnsafeFileError):
            open_own("file", dir_fd=directory)
    finally:
        os.close(directory)


@odd_files
def test_in_place_of_a_blob_it_is_damage_that_can_be_healed(
    make: Make, store: Store, tmp_path: Path
) -> None:
    place = blob_path(store)
    uses: dict[str, Callable[[], object]] = {
        "verify": lambda: report_damage(store),
        "open": lambda: store.open(DIGEST),
        "path": lambda: store.path_of(DIGEST),
        "place": lambda: store.place(DIGEST, tmp_path / "model.safetensors"),
    }
    for name, use in uses.items():
        with row(name):
            put_in_place(place, make)
            with pytest.raises((DamagedBlobError, BlobNotFoundError)):
                use()
            store.put_stream([WEIGHTS])
            assert not place.is_symlink()
            assert place.read_bytes() == WEIGHTS
    assert not os.path.lexists(tmp_path / "model.safetensors")
    put_in_place(place, make)
    store.plan_prune().execute()
    assert os.path.lexists(place), "prune takes the others and leaves it"
    assert not blob_path(store, digest_of(OTHER)).exists()


def report_damage(store: Store) -> None:
    report = store.verify()
    assert (report.damaged, report.blobs) == ([DIGEST], 2)
    assert not os.path.lexists(blob_path(store))
    (bad,) = store.volume.layout.bad.iterdir()
    assert bad.name.startswith(DIGEST)
    store.get(DIGEST)


@odd_files
def test_verify_names_one_that_has_no_row(make: Make, store: Store) -> None:
    with store.volume.index.write():
        store.volume.index.drop_blob(store.get(DIGEST).id)
    put_in_place(blob_path(store), make)
    assert store.verify(repair=True).damaged == [DIGEST]


@odd_files
class TestInPlaceOfOtherFiles:
    def test_the_journal(self, make: Make, store: Store, tmp_path: Path) -> None:
        put_in_place(store.volume.layout.journal, make)
        new = write(tmp_path / "a.bin", b"new" * 1000)
        for act in (store.history, store.plan_undo, lambda: store.adopt(new)):
            with row(act), pytest.raises(UnsafeFileError, match=r"jsonl is not a regular file"):
                act()
        assert store.verify().blobs == 2

    def test_a_damaged_blob_that_is_to_be_cleared(self, make: Make, store: Store) -> None:
        place = put_in_place(store.volume.layout.bad / f"{DIGEST}.0", make)
        store.plan_prune(with_bad=True).execute()
        assert not os.path.lexists(place) or place.is_dir()


@odd_files
def test_a_blob_that_has_to_be_hashed_is_not_hashed_for_ever(store: Store, make: Make) -> None:
    os.utime(store.volume.layout.blob(DIGEST))
    lock = store.root / "lock"
    lock.unlink(missing_ok=True)
    make(lock)
    with pytest.raises(UnsafeFileError):
        store.verify()
