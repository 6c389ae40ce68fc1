"""A store that several users share, and files that belong to somebody else."""

from __future__ import annotations

import os
import random
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from blake3 import blake3

if sys.platform == "win32" or os.geteuid() != 0:
    pytest.skip("only root can become other users", allow_module_level=True)

from smartcache.config import Settings
from smartcache.errors import (
    CannotLinkError,
    DamagedBlobError,
    FileSkippedError,
    SmartcacheError,
    StoreUnwritableError,
)
from smartcache.store.store import Store
from tests.processes.children import Child, folder_of

T = TypeVar("T")

ANN, BOB, TEAM = 64001, 64002, 64000
DATA = random.Random(1).randbytes(100_000)
DIGEST = blake3(DATA).hexdigest()


def as_user(user: int, work: Callable[[], T]) -> T:
    with Child(work, user=user, group=TEAM) as child:
        return child.result()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a home for each, and one where both may write."""
    with folder_of(None) as made:
        for user, name in ((ANN, "ann"), (BOB, "bob")):
            (made / name).mkdir(mode=0o755)
            os.chown(made / name, user, TEAM)
        (made / "team").mkdir()
        os.chown(made / "team", ANN, TEAM)
        os.chmod(made / "team", 0o2775)
        yield made


@pytest.fixture
def shared(folder: Path) -> Path:
    """The root of a store for all, made by Ann, with a blob of hers."""

    def make() -> None:
        with opened(folder / "team" / "store") as store:
            store.pin(store.put_stream([DATA]).digest)

    as_user(ANN, make)
    return folder / "team" / "store"


def opened(root: Path) -> Store:
    return Store(root, settings=Settings(home=root, shared=True))


def hard_links_are_protected() -> bool:
    path = Path("/proc/sys/fs/protected_hardlinks")
    return path.exists() and path.read_text(encoding="ascii").strip() == "1"


@pytest.mark.skipif(not hard_links_are_protected(), reason="fs.protected_hardlinks is off")
def test_another_user_gets_a_symlink_where_hard_links_are_protected(
    folder: Path, shared: Path
) -> None:
    """The kernel lets only its owner make hard links of a file that others cannot write."""
    path = folder / "bob" / "a.safetensors"

    def place() -> tuple[str, str]:
        with opened(shared) as store:
            kind = store.place(DIGEST, path).kind
            with pytest.raises(CannotLinkError):
                store.place(DIGEST, folder / "bob" / "b.safetensors", kind="hardlink")
            own = store.place(DIGEST, folder / "bob" / "c.safetensors", kind="copy")
            return kind, own.kind

    assert as_user(BOB, place) in (("symlink", "copy"), ("reflink", "copy"))
    assert path.read_bytes() == DATA
    assert sorted(os.listdir(folder / "bob")) == ["a.safetensors", "c.safetensors"]


def test_a_symlink_of_another_user_keeps_a_blob(folder: Path, shared: Path) -> None:
    """Also where we cannot look."""
    path = folder / "bob" / "private" / "a.safetensors"

    def place() -> None:
        path.parent.mkdir(mode=0o700)
        with opened(shared) as store:
            store.place(DIGEST, path, kind="symlink")

    def prune() -> int:
        with opened(shared) as store:
            store.unpin(DIGEST)
            return store.plan_prune().execute().removed

    as_user(BOB, place)
    assert as_user(ANN, prune) == 0
    assert as_user(BOB, path.read_bytes) == DATA


def test_users_put_and_read_in_turn(folder: Path, shared: Path) -> None:
    """Nothing that one of them makes, not even SQLite's log, shuts the other out."""

    def use(turn: int) -> str:
        with opened(shared) as store:
            digest = store.put_stream([b"%d" % turn * 1000]).digest
            for blob in store.blobs():
                with store.open(blob.digest) as file:
                    assert blake3(file.read()).hexdigest() == blob.digest
            store.pin(digest, f"turn {turn}")
            store.place(digest, folder / ("ann", "bob")[turn % 2] / f"{turn}.safetensors")
            assert not store.verify(full=True).has_damage
            return digest

    for turn in range(4):
        assert as_user((ANN, BOB)[turn % 2], lambda t=turn: use(t))  # type: ignore[misc]


def test_users_use_a_shared_store_at_once(shared: Path) -> None:
    def use(seed: int) -> int:
        chance = random.Random(seed)
        with opened(shared) as store:
            for _ in range(30):
                data = chance.randbytes(3000)
                with store.open(store.put_stream([data]).digest) as blob:
                    assert blob.read() == data
        return 30

    with (
        Child(lambda: use(1), user=ANN, group=TEAM) as ann,
        Child(lambda: use(2), user=BOB, group=TEAM) as bob,
    ):
        assert ann.result() + bob.result() == 60
    with opened(shared) as store:
        report = store.verify(full=True)
        assert (report.blobs, report.has_damage, report.unindexed) == (61, False, [])


def test_what_one_user_put_another_does_not_store_again(folder: Path, shared: Path) -> None:
    def put() -> str:
        path = folder / "bob" / "mine.safetensors"
        path.write_bytes(DATA)
        with opened(shared) as store:
            assert store.put_file(path).digest == DIGEST
            assert store.put_stream([DATA]).digest == DIGEST
            adoption, *_ = store.adopt_many([path])
            return adoption.outcome

    assert as_user(BOB, put) == "duplicate"
    assert os.stat(shared / "blobs" / DIGEST[:2] / DIGEST).st_uid == ANN


def test_a_file_that_has_a_blob_of_another_user_is_not_replaced_by_it(
    folder: Path, shared: Path
) -> None:
    path = folder / "bob" / "mine.safetensors"

    def replace() -> str:
        path.write_bytes(DATA)
        with opened(shared) as store, pytest.raises(FileSkippedError) as raised:
            store.replace(path, DIGEST)
        return raised.value.reason

    assert as_user(BOB, replace) == "different owner or group"
    assert path.stat().st_uid == BOB
    assert path.stat().st_nlink == 1


def test_pruning_blobs_of_another_user_loses_no_row(folder: Path, shared: Path) -> None:
    """In a sticky directory only its owner removes a file: it must stay known."""

    def prune() -> str:
        with opened(shared) as store:
            store.unpin(DIGEST)
            mine = store.put_stream([b"of Bob"]).digest
            try:
                result = store.plan_prune().execute()
                assert result.removed == 1
            except SmartcacheError as error:
                return type(error).__name__
            finally:
                store.get(DIGEST)
                assert store.verify().unindexed == []
            return mine

    assert as_user(BOB, prune)

    def prune_own() -> int:
        with opened(shared) as store:
            return store.plan_prune().execute().removed

    assert as_user(ANN, prune_own) == 1


def test_a_damaged_blob_of_another_user_is_not_handed_out(folder: Path, shared: Path) -> None:
    """Even if we may not move it away."""
    blob = shared / "blobs" / DIGEST[:2] / DIGEST
    with open(blob, "r+b") as file:
        file.write(b"damage")

    def use() -> list[str]:
        names = []
        with opened(shared) as store:
            for attempt in (
                lambda: store.open(DIGEST),
                lambda: store.place(DIGEST, folder / "bob" / "a.safetensors", kind="copy"),
                lambda: store.place(DIGEST, folder / "bob" / "a.safetensors", kind="symlink"),
            ):
                try:
                    attempt()
                except SmartcacheError as error:
                    names.append(type(error).__name__)
            report = store.verify(full=True)
            assert report.has_damage
        return names

    names = as_user(BOB, use)
    assert names[0] == DamagedBlobError.__name__
    assert len(names) == 3, "nothing was handed out"
    assert os.listdir(folder / "bob") == []


def test_a_store_of_another_user_that_is_not_shared_says_so(folder: Path) -> None:
    root = folder / "ann" / "store"

    def make() -> None:
        with Store(root) as store:
            store.put_stream([DATA])

    def use() -> tuple[str, str]:
        with pytest.raises(StoreUnwritableError) as raised, Store(root) as store:
            store.put_stream([b"other"])
        with pytest.raises(StoreUnwritableError):
            Store(folder / "ann" / "new")
        return raised.value.message, raised.value.hint

    as_user(ANN, make)
    message, hint = as_user(BOB, use)
    assert str(root) in message
    assert "SMARTCACHE_HOME" in hint


def test_a_place_where_we_may_not_write_gets_nothing(folder: Path, shared: Path) -> None:
    def place() -> list[str]:
        names = []
        with opened(shared) as store:
            for kind in ("auto", "hardlink", "symlink", "copy"):
                with pytest.raises((CannotLinkError, StoreUnwritableError)) as raised:
                    store.place(DIGEST, folder / "ann" / "a.safetensors", kind=kind)
                names.append(raised.value.message)
        return names

    reasons = ("Permission denied", "Operation not permitted")
    assert all(message.endswith(reasons) for message in as_user(BOB, place))
    assert os.listdir(folder / "ann") == []


@pytest.mark.parametrize("user", [BOB, 0], ids=["another user", "root"])
def test_files_of_another_user_are_neither_adopted_nor_replaced(folder: Path, user: int) -> None:
    paths = [folder / "ann" / "a.safetensors", folder / "ann" / "b.safetensors"]
    for path in paths:
        path.write_bytes(DATA)
        os.chown(path, ANN, TEAM)
    root = folder / ("bob" if user else "of-root") / "store"
    before = [(path.stat().st_ino, stat.S_IMODE(path.stat().st_mode)) for path in paths]

    def use() -> list[str]:
        reasons = []
        with Store(root) as store:
            digest = store.put_stream([DATA]).digest
            for attempt in (
                lambda: store.adopt(paths[0]),
                lambda: store.replace(paths[1], digest),
                lambda: store.put_file(paths[0], how="move"),
            ):
                with pytest.raises(FileSkippedError) as raised:
                    attempt()
                reasons.append(raised.value.reason)
        return reasons

    reasons = as_user(user, use) if user else use()
    assert reasons == ["belongs to another user"] * 3
    assert [(p.stat().st_ino, stat.S_IMODE(p.stat().st_mode)) for p in paths] == before
    assert [p.read_bytes() == DATA for p in paths] == [True, True]
