"""Several users: nobody gets in through somebody else's store, and root gets no exception."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import pytest

if sys.platform == "win32" or os.geteuid() != 0:
    pytest.skip("only root can become other users", allow_module_level=True)

from smartcache import errors
from smartcache.store.layout import pool_root
from smartcache.store.store import Store
from smartcache.system.filesystems import Mounts
from tests.processes.children import Child, folder_of
from tests.store.files import WEIGHTS, adopt, blob_path, dedup, digest_of, mode_of, row, undo, write

T = TypeVar("T")

ANN, BOB, TEAM = 64001, 64002, 64000
DATA, DIGEST = WEIGHTS, digest_of(WEIGHTS)


def as_user(user: int, work: Callable[[], T]) -> T:
    if user == os.geteuid():
        return work()
    with Child(work, user=user, group=TEAM) as child:
        return child.result()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a home for each, and one where everybody may make directories."""
    with folder_of(None) as made:
        for user, name in ((ANN, "ann"), (BOB, "bob")):
            (made / name).mkdir(mode=0o755)
            os.chown(made / name, user, TEAM)
        (made / "mount").mkdir()
        (made / "mount").chmod(0o1777)
        yield made


def make(root: Path) -> None:
    with Store(root) as store:
        store.put_stream([DATA])
        store.pin(DIGEST)


def refused(root: Path) -> tuple[str, str]:
    with pytest.raises(errors.UnsafeStoreError) as raised, Store(root):
        pass
    return raised.value.message, raised.value.hint


@pytest.mark.parametrize("user", [BOB, 0], ids=["another user", "root"])
def test_a_store_of_somebody_else_is_refused(folder: Path, user: int) -> None:
    root = folder / "ann" / "store"
    as_user(ANN, lambda: make(root))
    message, hint = as_user(user, lambda: refused(root))
    assert message.startswith(f"{root} belongs to user {ANN}")
    assert "remote" in hint


def test_no_umask_closes_a_store_to_its_user(folder: Path) -> None:
    paths = [folder / "ann" / name for name in "ab"]

    def work() -> None:
        for path in paths:
            path.write_bytes(DATA)
        os.umask(0o777)
        with Store(folder / "ann" / "store") as store:
            assert {each.outcome for each in dedup(store, *paths)} == {"became", "linked"}
            store.pin(DIGEST)
            assert undo(store) == []

    as_user(ANN, work)


PARTS = ["", "blobs", "tmp", "pins", "journal.sqlite3", "journal.copy", "index.sqlite3", "lock",
         "format", "sets", "leases", "bad", f"blobs/{DIGEST[:2]}"]  # fmt: skip


@pytest.mark.parametrize("how", ["belongs to another user", "others may write", "is a symlink"])
def test_a_store_with_a_part_that_is_not_ours_alone_is_refused(folder: Path, how: str) -> None:
    root, aside = folder / "of-root", folder / "aside"
    make(root)
    for part in PARTS:
        path = root / part
        path.touch()
        mode = path.stat().st_mode
        if how == "belongs to another user":
            os.chown(path, BOB, -1)
        elif how == "others may write":
            path.chmod(mode | 0o020)
        else:
            path.rename(aside)
            path.symlink_to(aside)
        with row(part):
            message, hint = refused(root)
            assert str(path) in message
            assert hint
        if aside.exists():
            path.unlink()
            aside.rename(path)
        os.chown(path, 0, -1)
        path.chmod(mode)
    with Store(root) as store:
        assert store.has(DIGEST)


def test_a_folder_planted_on_a_mount_is_not_our_pool(folder: Path, memory_path: Path) -> None:
    """Bob makes what would be root's pool on a mount where everybody may write."""
    planted = pool_root(folder / "mount")
    assert planted.name == ".smartcache-0"
    as_user(BOB, lambda: make(planted))
    with Store(memory_path / "of-root") as store:
        with pytest.raises(errors.UnsafeStoreError):
            store.add_pool(planted)
        assert store.pools() == [store.layout]
    with pytest.raises(errors.UnsafeStoreError):
        Store(planted)


def test_a_blob_that_belongs_to_another_user_is_never_handed_out(folder: Path) -> None:
    """Whoever owns an inode can change its bytes, and set every time back but one."""
    with Store(folder / "of-root") as store:
        uses: dict[str, Callable[[], object]] = {
            "open": lambda: store.open(DIGEST),
            "copy": lambda: store.place(DIGEST, folder / "a.safetensors", kind="copy"),
            "link": lambda: store.place(DIGEST, folder / "a.safetensors", kind="hardlink"),
            "verify": lambda: store.verify().damaged == [DIGEST] and store.get(DIGEST),
        }
        for number, (name, use) in enumerate(uses.items()):
            store.put_stream([DATA])
            os.chown(blob_path(store, DIGEST), BOB, -1)
            with row(name), pytest.raises(errors.StoreError):
                use()
            assert not store.has(DIGEST)
            bad = [path.name[:64] for path in store.layout.bad.iterdir()]
            assert bad == [DIGEST] * (number + 1)
        assert not (folder / "a.safetensors").exists()


class TestPlantedRows:
    """What recovery and undo do with rows that we did not write: the last defence."""

    @pytest.fixture
    def root(self, folder: Path) -> Path:
        make(folder / "of-root" / "store")
        return folder / "of-root" / "store"

    @pytest.fixture
    def secret(self, folder: Path) -> Path:
        (folder / "closed").mkdir(mode=0o700)
        path = folder / "closed" / "secret"
        path.write_bytes(DATA)
        path.chmod(0o600)
        return path

    def carry_out(self, root: Path, path: Path, **values: object) -> list[str]:
        """Let the entry of a file be about another one; recover and undo it."""
        filesystem, below = Mounts().place(path.parent.parent)
        st = path.stat()
        below = os.path.join(below, os.fsencode(path.parent.name), os.fsencode(path.name))
        values = {"filesystem": filesystem, "path": below, "folder": path.parent.stat().st_ino,
                  "mtime_ns": st.st_mtime_ns, "links": 1, "inode": st.st_ino, "digest": DIGEST,
                  "size": len(DATA), **values}  # fmt: skip
        with Store(root) as store:
            adopt(store, write(root.with_name("template"), os.urandom(9)))
        with closing(sqlite3.connect(root / "journal.sqlite3")) as journal, journal:
            names = ", ".join(f"{name} = ?" for name in values)
            words = f"UPDATE changes SET {names} WHERE id = (SELECT MAX(id) FROM changes)"  # noqa: S608 - our own names
            journal.execute(words, tuple(values.values()))
        outcomes = []
        with Store(root) as store:
            store.recover()
            with suppress(errors.NothingToUndoError):
                outcomes = [done.outcome for done in store.plan_undo().execute()]
            store.forget_unfinished()
            store.end_batch()
        return outcomes  # type: ignore[return-value]

    @pytest.mark.parametrize("state", ["begun", "undoing", "done"])
    @pytest.mark.parametrize("how", ["become", "exchange", "create", "give"])
    def test_a_file_that_the_store_has_no_link_of_is_not_touched(
        self, root: Path, secret: Path, folder: Path, how: str, state: str
    ) -> None:
        """Neither its bytes nor, through a symlink of another user's, its mode."""
        link = folder / "bob" / "link"
        link.symlink_to(secret.parent)
        inode = secret.stat().st_ino
        rows = [
            (secret, b"no name of ours", 1), (link / "secret", b"secret", 1),
            (link / "secret", b"no name of ours", inode),
        ]  # fmt: skip
        for path, temporary, number in rows:
            with row(path, temporary):
                outcomes = self.carry_out(
                    root, path, how=how, state=state, temporary=temporary, mode=0o666, inode=number
                )
                assert "undone" not in outcomes
                assert (secret.read_bytes(), secret.stat().st_ino) == (DATA, inode)
                assert mode_of(secret) == 0o600

    def test_undo_gives_no_special_mode_and_no_other_owner(self, root: Path, folder: Path) -> None:
        path = folder / "bob" / "shell"
        os.link(root / "blobs" / DIGEST[:2] / DIGEST, path)
        inode = path.stat().st_ino
        done = self.carry_out(root, path, how="exchange", mode=0o4755, gid=0, inode=inode + 1)
        assert done == ["undone"]
        assert path.stat().st_ino != inode, "it has its own bytes again"
        assert (mode_of(path), path.stat().st_uid) == (0o755, 0)

    def test_a_file_with_more_names_keeps_its_mode(
        self, root: Path, secret: Path, folder: Path
    ) -> None:
        """Where hard links are not protected, one of them may be planted."""
        path = folder / "bob" / "a.safetensors"
        os.link(secret, path)
        assert self.carry_out(root, path, how="become", state="done", mode=0o666) == ["left"]
        assert mode_of(secret) == 0o600


def test_a_path_that_led_through_a_symlink_is_undone_where_the_file_is(folder: Path) -> None:
    real, link = folder / "data", folder / "link"
    real.mkdir()
    link.symlink_to(real)
    for name in ("a.safetensors", "b.safetensors"):
        (real / name).write_bytes(DATA)
    with Store(folder / "of-root") as store:
        dedup(store, link / "a.safetensors", link / "b.safetensors")
        store.place(DIGEST, link / "c.safetensors", kind="hardlink")
        link.unlink()
        link.symlink_to(folder / "ann")
        assert [done.outcome for done in store.plan_undo().execute()] == ["undone"] * 3
    assert sorted(os.listdir(real)) == ["a.safetensors", "b.safetensors"]
    assert os.listdir(folder / "ann") == []
    assert {mode_of(path) for path in real.iterdir()} == {0o644}
    assert len({path.stat().st_ino for path in real.iterdir()}) == 2
