"""A store that its owner publishes, and what others take from it.

The other users are real where the tests run as root. Where they do not, one user plays both parts:
nobody has to be named to read one's own store.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.api import NoSpaceError, Settings, SharedStore, Store, StoreError, shares_blocks
from tests.processes.children import Child, folder_of
from tests.processes.killing import Moment, die_at, in_child, points_of, was_killed
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    digest_of,
    edit,
    inode_of,
    mode_of,
    raising,
    read,
    row,
    write,
)
from tests.store.files import sha256_of as sha256
from tests.store.reflink_disks import reflink_disk

T = TypeVar("T")

ANN, BOB, EVE = 64011, 64012, 64013
DATA = random.Random(3).randbytes(100_000)
HEADER, RECORD = 64, 72
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


def put(store: Store, *contents: bytes) -> None:
    for data in contents:
        store.put_stream([data], algorithms=["sha256"])


def publish(root: Path, *contents: bytes) -> None:
    with Store(root) as store:
        put(store, *contents)
        store.plan_publish().execute()


def reader(home: Path, *roots: Path, owners: tuple[int, ...] = ()) -> Store:
    settings = Settings(home=home, shared_stores=roots, shared_store_owners=owners)
    return Store(settings=settings)


def listed(root: Path) -> int:
    return SharedStore(root).check()[1]


def blob_of(root: Path, data: bytes) -> Path:
    return root / "blobs" / digest_of(data)[:2] / digest_of(data)


def looks(root: Path) -> dict[str, tuple[int, ...]]:
    """All names below a directory, with what would tell of a change; reading is none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (root, *root.rglob("*")):
        st = os.lstat(path)
        found[str(path)] = (st.st_ino, st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the published store is."""
    return tmp_path / "shared"


class TestPublishing:
    def test_only_root_blobs_and_listing_are_opened(self, root: Path) -> None:
        with Store(root) as store:
            put(store, DATA)
            before = {path.name: mode_of(path) for path in root.iterdir()}
            store.plan_publish().execute()
            assert store.is_published
        after = {path.name: mode_of(path) for path in root.iterdir()}
        assert mode_of(root) == after.pop("blobs") == mode_of(blob_of(root, DATA).parent) == 0o755
        assert after.pop("listing") == 0o644
        assert {
            name: mode for name, mode in after.items() if name in before
        }.items() <= before.items()
        assert mode_of(blob_of(root, DATA)) == 0o444

    def test_the_plan_counts_what_others_get_and_what_they_do_not(
        self, root: Path, folder: Path
    ) -> None:
        with Store(root) as store:
            put(store, DATA)
            store.put_stream([OTHER])
            store.adopt(write(folder / "private.safetensors", WEIGHTS, mode=0o600))
            put(store, b"changed")
            edit(blob_of(root, b"changed"))
            plan = store.plan_publish()
            assert not store.is_published
            assert (plan.blobs, plan.size) == (2, len(DATA) + len(OTHER))
            assert (plan.unnamed, plan.closed, plan.changed) == (1, 1, 1)
            plan.execute()
        assert listed(root) == 1

    def test_a_copy_of_a_file_that_is_closed_to_others_is_closed_to_them(
        self, root: Path, folder: Path
    ) -> None:
        with Store(root) as store:
            store.put_file(write(folder / "a.safetensors", WEIGHTS, mode=0o600))
            assert mode_of(blob_of(root, WEIGHTS)) == 0o400
            assert store.plan_publish().closed == 1

    def test_a_directory_above_that_is_closed_to_others_is_a_warning(self, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        with Store(closed / "store") as store:
            warnings = store.plan_publish().warnings
        assert any(f"{closed} is closed to them (mode 0700)" in text for text in warnings)

    def test_what_comes_or_goes_later_is_published_when_the_store_is_closed(
        self, root: Path
    ) -> None:
        publish(root, DATA)
        with Store(root) as store:
            put(store, WEIGHTS, OTHER)
            assert listed(root) == 1
        assert listed(root) == 3
        assert {mode_of(path) for path in (root / "blobs").glob("??")} == {0o755}
        with Store(root) as store:
            store.forget(digest_of(WEIGHTS), to_trash=False)
            store.forget(digest_of(OTHER))
        assert listed(root) == 1
        with Store(root) as store:
            store.plan_undo(last=True).execute()
        assert listed(root) == 2

    def test_a_blob_in_place_of_another_is_noticed(self, root: Path) -> None:
        """SQLite gives the number of the last row that went to the next that comes."""
        publish(root, DATA)
        with Store(root) as store:
            store.forget(digest_of(DATA), to_trash=False)
            put(store, DATA[:-1])
        assert SharedStore(root).find("sha256", sha256(DATA[:-1])) is not None

    def test_a_listing_that_is_up_to_date_is_not_written_again(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And a store may be closed twice."""
        publish(root, DATA)
        before = looks(root)[str(root / "listing")]
        store = Store(root)
        assert read(store, digest_of(DATA)) == DATA
        store.close()
        store.close()
        assert looks(root)[str(root / "listing")] == before
        assert caplog.messages == []

    def test_a_store_that_is_not_published_gets_no_listing(self, root: Path) -> None:
        with Store(root) as store:
            put(store, DATA)
        assert not (root / "listing").exists()
        with pytest.raises(StoreError, match="not published"):
            listed(root)

    def test_it_can_be_taken_back(self, root: Path) -> None:
        publish(root, DATA)
        with Store(root) as store:
            store.unpublish()
            assert not store.is_published
            put(store, OTHER)
        assert not (root / "listing").exists()
        directories = [root, root / "blobs", *(root / "blobs").glob("??")]
        assert {mode_of(path) for path in directories} == {0o700}

    def test_who_closes_the_store_meanwhile_does_not_publish_it_again(
        self, root: Path, at_point: AtPoint
    ) -> None:
        publish(root, DATA)
        other = Store(root)
        put(other, OTHER)
        with Store(root) as store:
            at_point("publish: listing written", store.unpublish)
            other.close()
            assert not store.is_published

    @pytest.mark.timeout(20)
    def test_a_damaged_listing_is_written_anew_and_a_pipe_hangs_nobody(self, root: Path) -> None:
        publish(root, DATA)
        for damage in (b"", b"x" * 200):
            (root / "listing").write_bytes(damage)
            with pytest.raises(StoreError, match="listing is damaged"):
                listed(root)
            Store(root).close()
            assert listed(root) == 1
        (root / "listing").unlink()
        os.mkfifo(root / "listing")
        Store(root).close()
        assert listed(root) == 1

    @pytest.mark.parametrize("is_opening", [True, False], ids=["publish", "take back"])
    def test_a_kill_at_any_step_leaves_what_the_next_run_finishes(
        self, tmp_path: Path, is_opening: bool
    ) -> None:
        def act(root: Path) -> None:
            with Store(root) as store:
                if is_opening:
                    store.plan_publish().execute()
                else:
                    store.unpublish()

        def prepare(name: str) -> Path:
            root = tmp_path / name
            publish(root, DATA)
            if is_opening:
                with Store(root) as store:
                    store.unpublish()
            return root

        def die(moment: Moment, root: Path) -> None:
            die_at(moment)
            act(root)

        root = prepare("first")
        moments = points_of(lambda: act(root))
        assert any(moment.place.startswith("publish: ") for moment in moments)
        for number, moment in enumerate(moments):
            root = prepare(str(number))
            assert was_killed(in_child(partial(die, moment, root)))
            # Either nobody gets in, or it is all there.
            assert mode_of(root) & 0o077 == 0 or listed(root) == 1
            act(root)
            assert (mode_of(root) == 0o755) is is_opening
            assert (root / "listing").exists() is is_opening
            assert os.listdir(root / "tmp") == []

    def test_a_moved_store_stays_published(
        self, root: Path, tmp_path: Path, elsewhere: Path
    ) -> None:
        publish(root, DATA)
        place = root
        for new in (tmp_path / "new", elsewhere / "store"):
            with Store(place) as store:
                store.plan_move(new).execute()
            place = new
            assert SharedStore(new).find("sha256", sha256(DATA)) is not None

    def test_ejecting_leaves_nothing(self, root: Path) -> None:
        publish(root, DATA)
        with Store(root) as store:
            store.plan_eject().execute()
        assert not root.exists()


class TestReading:
    def test_blobs_are_found_by_sha256_and_by_digest(self, root: Path) -> None:
        contents = [b"%d" % number for number in range(40)]
        publish(root, *contents)
        shared = SharedStore(root)
        for data in contents:
            by_sha256 = shared.find("sha256", sha256(data))
            assert by_sha256 is not None
            assert by_sha256 == shared.find("blake3", digest_of(data))
            assert (by_sha256.digest, by_sha256.size) == (digest_of(data), len(data))
        for other in (b"", b"40", b"x"):
            assert shared.find("sha256", sha256(other)) is None
            assert shared.find("blake3", digest_of(other)) is None
        assert shared.find("git-sha1", "0" * 40) is None

    def test_the_bytes_become_a_blob_of_the_readers_own(self, root: Path, tmp_path: Path) -> None:
        publish(root, DATA, OTHER)
        with reader(tmp_path / "own", root) as store:
            assert store.find("sha256", sha256(DATA)) is None
            blob = store.bring("sha256", sha256(DATA))
            assert blob is not None
            assert store.find("sha256", sha256(DATA)) == blob
            assert store.bring("blake3", digest_of(OTHER)) is not None
            assert store.bring("sha256", sha256(WEIGHTS)) is None
            assert store.bring("sha256", sha256(DATA), size=5) is None
        own = blob_of(tmp_path / "own", DATA)
        assert own.read_bytes() == DATA
        assert inode_of(own) != inode_of(blob_of(root, DATA))
        assert os.stat(own).st_nlink == os.stat(blob_of(root, DATA)).st_nlink == 1
        assert os.listdir(tmp_path / "own" / "tmp") == []

    def test_a_store_does_not_take_from_itself(self, root: Path) -> None:
        """All users of a machine may have the same settings."""
        publish(root, DATA)
        with reader(root, root) as store:
            assert store.shared_stores() == []

    def test_a_store_that_is_not_there_is_said_once(
        self, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        publish(root, DATA)
        with reader(tmp_path / "own", tmp_path / "missing", root) as store:
            assert store.bring("sha256", sha256(OTHER)) is None
            assert store.bring("sha256", sha256(DATA)) is not None
        (message,) = caplog.messages
        assert str(tmp_path / "missing") in message
        assert "not there" in message
        assert "shared_stores" in message

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("name", ["", "blobs", "blobs/aa", "listing", "blob"])
    def test_nothing_that_others_can_write_no_symlink_and_no_pipe_is_used(
        self, root: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def said() -> str:
            caplog.clear()
            with reader(tmp_path / "own", root) as store:
                assert store.bring("sha256", sha256(DATA)) is None
            (message,) = caplog.messages
            return message

        publish(root, DATA)
        path = places(root)[name]
        mode = mode_of(path)
        for bits in (0o020, 0o002):
            path.chmod(mode | bits)
            message = said()
            assert f"{path} can be written by others" in message
            assert f"chmod go-w {path}" in message
        path.chmod(mode)
        path.rename(tmp_path / "real")
        path.symlink_to(tmp_path / "real")
        assert f"{path} is a symlink" in said()
        if name in ("listing", "blob"):
            path.unlink()
            os.mkfifo(path, 0o444)
            assert f"{path} is not a file" in said()

    def test_a_listing_that_lies_brings_nothing_wrong(
        self, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is asked for by sha256 is hashed by sha256, whatever its digest."""
        same_size = DATA[::-1]
        publish(root, DATA, same_size)
        edit_listing(root, {sha256(DATA): digest_of(same_size)})
        with reader(tmp_path / "own", root) as store:
            assert store.bring("sha256", sha256(DATA)) is None
            assert list(store.blobs()) == []
        (message,) = caplog.messages
        assert f"does not have sha256 {sha256(DATA)}" in message
        assert os.listdir(tmp_path / "own" / "tmp") == []

    def test_a_blob_that_was_changed_after_publishing_is_not_handed_out(
        self, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A second store helps where the first is wrong."""
        publish(root, DATA)
        edit(blob_of(root, DATA))
        for algorithm, value in (("sha256", sha256(DATA)), ("blake3", digest_of(DATA))):
            caplog.clear()
            with row(algorithm), reader(tmp_path / "own", root) as store:
                assert store.bring(algorithm, value) is None  # type: ignore[arg-type]
                assert list(store.blobs()) == []
            (message,) = caplog.messages
            assert "does not have" in message
        publish(tmp_path / "second", DATA)
        with reader(tmp_path / "own", root, tmp_path / "second") as store:
            assert store.bring("sha256", sha256(DATA)) is not None
            assert read(store, digest_of(DATA)) == DATA

    def test_a_listing_that_cannot_be_read_is_said(
        self, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        publish(root, DATA)
        path, rows = root / "listing", [(2, RECORD, 1), (1, 8, 1), (1, RECORD, 2**60)]
        headers = [struct.pack("<8sIIQ40x", b"SMCCTLG\n", *numbers) for numbers in rows]
        for header in (*headers, b"SQLite format 3\0" * 4):
            caplog.clear()
            path.write_bytes(header + path.read_bytes()[HEADER:])
            with row(header[:24]), reader(tmp_path / "own", root) as store:
                assert store.bring("sha256", sha256(OTHER)) is None
            (message,) = caplog.messages
            assert "its listing" in message

    def test_a_full_disk_of_the_reader_is_an_error(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is not the shared store that lacks something."""
        publish(root, DATA)
        with reader(tmp_path / "own", root) as store:
            monkeypatch.setattr(os, "write", raising(errno.ENOSPC))
            monkeypatch.setattr(store.volume, "unable", {(store.volume.device, "reflink")})
            with pytest.raises(NoSpaceError):
                store.bring("sha256", sha256(DATA))


def places(root: Path) -> dict[str, Path]:
    blob = blob_of(root, DATA)
    listing = root / "listing"
    return {"": root, "blobs": root / "blobs", "blobs/aa": blob.parent, "listing": listing,
            "blob": blob}  # fmt: skip


def edit_listing(root: Path, changes: dict[str, str]) -> None:
    """Let a listing name other digests."""
    path = root / "listing"
    data = bytearray(path.read_bytes())
    for start in range(HEADER, len(data), RECORD):
        digest = changes.get(data[start : start + 32].hex())
        if digest is not None:
            data[start + 32 : start + 64] = bytes.fromhex(digest)
    path.write_bytes(data)


@needs_root
class TestOtherUsers:
    @pytest.fixture
    def place(self) -> Iterator[Path]:
        """A directory with a home for each."""
        with folder_of(None) as made:
            for user, name in ((ANN, "ann"), (BOB, "bob"), (EVE, "eve")):
                (made / name).mkdir(mode=0o755)
                os.chown(made / name, user, user)
            yield made

    def test_a_user_reads_what_root_or_a_named_user_has_published(self, place: Path) -> None:
        for owner, root in ((0, place / "models"), (ANN, place / "ann" / "store")):
            home = place / "bob" / str(owner)
            as_user(owner, partial(publish, root, DATA))
            before = looks(root)
            found = as_user(BOB, partial(take, home, root, owners=(ANN,) if owner else ()))
            assert found == (len(DATA), BOB)
            assert looks(root) == before
            assert blob_of(home, DATA).read_bytes() == DATA

    def test_nobody_reads_what_an_unnamed_user_has_published(self, place: Path) -> None:
        root = place / "eve" / "store"
        as_user(EVE, lambda: publish(root, DATA))
        for user, home in ((BOB, place / "bob" / "store"), (0, place / "of-root")):
            (message,) = as_user(user, partial(refused, home, root))
            assert message == (
                f"the shared store {root} is left out: it belongs to user {EVE}, who is not in"
                " shared_store_owners. If you trust them, add them to it."
            )

    def test_a_part_of_another_user_is_not_used(self, place: Path) -> None:
        """As when somebody has got a directory or blob into a store."""
        root = place / "models"
        publish(root, DATA)
        for path in list(places(root).values())[1:]:
            os.chown(path, EVE, EVE)
            (message,) = as_user(BOB, lambda: refused(place / "bob" / "store", root))
            assert f"{path} belongs to user {EVE}, not to the owner of the store" in message
            os.chown(path, 0, 0)

    def test_a_store_that_is_not_published_any_more_is_closed(self, place: Path) -> None:
        root = place / "models"
        publish(root, DATA)
        with Store(root) as store:
            store.unpublish()
        (message,) = as_user(BOB, lambda: refused(place / "bob" / "store", root))
        assert f"{root} is closed to you" in message
        assert as_user(BOB, lambda: os.access(blob_of(root, DATA), os.R_OK)) is False

    def test_its_owner_cannot_rewrite_what_was_taken(self, place: Path) -> None:
        root, home = place / "ann" / "store", place / "bob" / "store"
        as_user(ANN, lambda: publish(root, DATA))
        as_user(BOB, lambda: take(home, root, owners=(ANN,)))

        as_user(ANN, lambda: edit(blob_of(root, DATA), b"x" * len(DATA)))
        assert blob_of(home, DATA).read_bytes() == DATA
        assert os.stat(blob_of(home, DATA)).st_uid == BOB

        def is_whole() -> bool:
            with reader(home, root) as store:
                assert read(store, digest_of(DATA)) == DATA
                return not store.verify(full=True).has_damage

        assert as_user(BOB, is_whole)

    def test_where_files_can_share_blocks_nothing_is_copied(self, tmp_path: Path) -> None:
        with reflink_disk("xfs", tmp_path) as disk:
            root, home = disk / "models", disk / "bob"
            publish(root, DATA)
            home.mkdir()
            os.chown(home, BOB, BOB)
            assert as_user(BOB, lambda: take(home / "store", root)) == (len(DATA), BOB)
            with (
                open(blob_of(root, DATA), "rb") as theirs,
                open(blob_of(home / "store", DATA), "rb") as own,
            ):
                assert not os.path.samestat(os.fstat(own.fileno()), os.fstat(theirs.fileno()))
                assert shares_blocks(own.fileno(), theirs.fileno())
            edit(blob_of(root, DATA))
            assert blob_of(home / "store", DATA).read_bytes() == DATA

    def test_a_file_that_was_closed_to_others_stays_closed(self, place: Path) -> None:
        root = place / "models"
        private = write(place / "private.safetensors", OTHER, mode=0o600)
        with Store(root) as store:
            store.adopt(private, algorithms=["sha256"])
            put(store, DATA)
            store.plan_publish().execute()
        assert stat.S_IMODE(blob_of(root, OTHER).stat().st_mode) & 0o077 == 0

        def brings_nothing() -> bool:
            with reader(place / "bob" / "store", root) as store:
                by_sha256 = store.bring("sha256", sha256(OTHER))
                return by_sha256 is store.bring("blake3", digest_of(OTHER)) is None

        assert as_user(BOB, brings_nothing)


def as_user(user: int, work: Callable[[], T]) -> T:
    with Child(work, user=user or None) as child:
        return child.result()


def take(home: Path, root: Path, owners: tuple[int, ...] = ()) -> tuple[int, int]:
    """Bring the bytes and read them; return how many they are, and whose."""
    with reader(home, root, owners=owners) as store:
        blob = store.bring("sha256", sha256(DATA))
        assert blob is not None
        assert read(store, blob.digest) == DATA
        return blob.size, store.path_of(blob.digest).stat().st_uid


def refused(home: Path, root: Path) -> list[str]:
    """Try to bring what is there; return what is said about it."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smartcache").addHandler(handler)
    with reader(home, root) as store:
        assert store.bring("sha256", sha256(DATA)) is None
        assert store.bring("blake3", digest_of(DATA)) is None
        assert list(store.blobs()) == []
    return messages
