"""Several users: nobody gets in through somebody else's store, and root gets no exception."""

from __future__ import annotations

import json
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

from smartcache.errors import SmartcacheError, UnsafeFileError, UnsafeStoreError
from smartcache.store.store import Store
from smartcache.store.volume import volume_root
from tests.processes.children import Child, folder_of

T = TypeVar("T")

ANN, BOB, TEAM = 64001, 64002, 64000
DATA = random.Random(1).randbytes(100_000)
DIGEST = blake3(DATA).hexdigest()


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


def make(root: Path) -> str:
    with Store(root) as store:
        return store.put_stream([DATA]).digest


def refused(root: Path) -> tuple[str, str]:
    with pytest.raises(UnsafeStoreError) as raised, Store(root):
        pass
    return raised.value.message, raised.value.hint


@pytest.mark.parametrize("user", [BOB, 0], ids=["another user", "root"])
def test_a_store_of_somebody_else_is_refused(folder: Path, user: int) -> None:
    root = folder / "ann" / "store"
    as_user(ANN, lambda: make(root))
    message, hint = as_user(user, lambda: refused(root))
    assert message.startswith(f"{root} belongs to user {ANN}")
    assert "remote" in hint


def test_nobody_else_can_look_into_a_store(folder: Path) -> None:
    """Whatever the umask was, and with a common group."""
    root = folder / "ann" / "store"

    def make_openly() -> str:
        os.umask(0o002)
        return make(root)

    def look() -> list[str]:
        found = []
        for path in (root / "journal.jsonl", root / "blobs" / DIGEST[:2] / DIGEST):
            try:
                path.stat()
            except PermissionError:
                found.append(path.name)
        return found

    as_user(ANN, make_openly)
    assert as_user(BOB, look) == ["journal.jsonl", DIGEST]


PARTS = ["", "blobs", "tmp", "journal.jsonl", "index.sqlite3", "lock", "format", "sets", "leases",
         "bad", f"blobs/{DIGEST[:2]}"]  # fmt: skip


@pytest.mark.parametrize("how", ["belongs to another user", "others may write", "is a symlink"])
def test_a_store_with_a_part_that_is_not_ours_alone_is_refused(folder: Path, how: str) -> None:
    root, aside = folder / "of-root", folder / "aside"
    with Store(root) as store:
        store.pin(store.put_stream([DATA]).digest)
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
        message, hint = refused(root)
        assert str(path) in message, part
        assert hint, part
        if aside.exists():
            path.unlink()
            aside.rename(path)
        os.chown(path, 0, -1)
        path.chmod(mode)
    Store(root).close()


def test_a_planted_folder_on_a_common_mount_is_not_taken_for_our_volume(folder: Path) -> None:
    """Bob makes what would be root's volume on a mount where everybody may write."""
    planted = volume_root(folder / "mount")
    assert planted.name == ".smartcache-0"
    victim = folder / "victim"
    victim.write_bytes(DATA)

    def plant() -> None:
        make(planted)
        line = {"batch": "b", "n": 0, "op": "own", "path": str(victim), "digest": DIGEST,
                "size": 1, "temporary": str(victim)}  # fmt: skip
        with open(planted / "journal.jsonl", "a", encoding="ascii") as file:
            file.write(json.dumps({"batch": "b", "label": "x", "at": "x"}) + "\n")
            file.write(json.dumps(line) + "\n")
        (planted / "tmp" / "batch-b").touch()

    as_user(BOB, plant)
    with pytest.raises(UnsafeStoreError):
        Store(planted)
    assert victim.read_bytes() == DATA


def test_a_blob_that_belongs_to_another_user_is_never_handed_out(folder: Path) -> None:
    """Whoever owns an inode can change its bytes, and set every time back but one."""
    root = folder / "of-root"
    with Store(root) as store:
        store.put_stream([DATA])
        blob = Path(store.path_of(DIGEST))
        os.chown(blob, BOB, -1)
        for attempt in (
            lambda: store.open(DIGEST),
            lambda: store.place(DIGEST, folder / "a.safetensors", kind="copy"),
            lambda: store.place(DIGEST, folder / "a.safetensors", kind="hardlink"),
        ):
            with pytest.raises((UnsafeFileError, SmartcacheError)):
                attempt()
        assert not (folder / "a.safetensors").exists()
        assert store.verify().missing == [DIGEST]
        assert [path.name[:64] for path in store.volume.layout.bad.iterdir()] == [DIGEST]


def planted_journal(root: Path, *lines: dict[str, object]) -> None:
    """Write lines as they would be after an attack that nothing has stopped: the last defence."""
    Store(root).close()
    with open(root / "journal.jsonl", "a", encoding="ascii") as file:
        file.write(json.dumps({"batch": "abad1dea", "label": "x", "at": "2026-01-01"}) + "\n")
        file.writelines(
            json.dumps({"batch": "abad1dea", "n": number, "size": 1, **line}) + "\n"
            for number, line in enumerate(lines)
        )
    (root / "journal.jsonl").chmod(0o600)


class TestPlantedLines:
    """What recovery and undo do with lines that we did not write."""

    @pytest.fixture
    def root(self, folder: Path) -> Path:
        return folder / "of-root" / "store"

    @pytest.fixture
    def secret(self, folder: Path) -> Path:
        (folder / "closed").mkdir(mode=0o700)
        path = folder / "closed" / "secret"
        path.write_bytes(DATA)
        path.chmod(0o600)
        return path

    def test_a_temporary_name_that_is_not_ours_is_not_removed(
        self, root: Path, secret: Path
    ) -> None:
        own = {"op": "own", "path": str(secret.with_name("x")), "digest": DIGEST}
        planted_journal(root, {**own, "temporary": str(secret)})
        (root / "tmp" / "batch-abad1dea").touch(0o600)
        Store(root).close()
        assert secret.read_bytes() == DATA

    def test_recovery_does_not_go_through_a_symlink(
        self, root: Path, secret: Path, folder: Path
    ) -> None:
        (folder / "bob" / "link").symlink_to(secret.parent)
        st = secret.stat()
        path = str(folder / "bob" / "link" / "secret")
        line = {"op": "adopt", "path": path, "digest": DIGEST, "mode": 0o666, "inode": st.st_ino,
                "links": 1}  # fmt: skip
        planted_journal(root, line)
        (root / "tmp" / "batch-abad1dea").touch(0o600)
        Store(root).close()
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        with Store(root) as store:
            store.plan_undo().execute()
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600

    def test_undo_gives_no_special_mode_and_no_other_owner(self, root: Path, folder: Path) -> None:
        path = folder / "bob" / "shell"
        with Store(root) as store:
            store.put_stream([DATA])
            os.link(store.path_of(DIGEST), path)
        inode = path.stat().st_ino
        line = {"op": "replace", "path": str(path), "digest": DIGEST, "mode": 0o4755, "uid": BOB,
                "gid": 0, "inode": inode + 1, "links": 1, "mtime_ns": 10**18}  # fmt: skip
        planted_journal(root, line)
        with Store(root) as store:
            store.plan_undo().execute()
        assert path.stat().st_ino != inode, "it has its own bytes again"
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        assert path.stat().st_uid == 0

    def test_a_file_with_more_names_than_it_had_keeps_its_mode(
        self, root: Path, secret: Path, folder: Path
    ) -> None:
        """Where hard links are not protected, one of them may be planted."""
        path = folder / "bob" / "a.safetensors"
        os.link(secret, path)
        line = {"op": "adopt", "path": str(path), "digest": DIGEST, "mode": 0o666,
                "inode": secret.stat().st_ino, "links": 1}  # fmt: skip
        planted_journal(root, line)
        with Store(root) as store:
            (result,) = store.plan_undo().execute()
        assert result.outcome == "left"
        (root / "tmp" / "batch-abad1dea").touch(0o600)
        Store(root).close()
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_symlink_put_above_a_file_is_not_followed_by_undo(folder: Path) -> None:
    """Bob owns the folder above: he moves it away and lets its name lead elsewhere."""
    models = folder / "bob" / "models"
    models.mkdir()
    path = models / "a.safetensors"
    path.write_bytes(DATA)
    other = folder / "elsewhere"
    other.mkdir()
    with Store(folder / "of-root") as store:
        store.adopt(path)
        os.rename(models, folder / "bob" / "moved")
        os.link(folder / "bob" / "moved" / "a.safetensors", other / "a.safetensors")
        models.symlink_to(other)
        (result,) = store.plan_undo().execute()
        assert not result.is_undone
        assert "symlink" in result.note
        assert stat.S_IMODE((other / "a.safetensors").stat().st_mode) == 0o444
        models.unlink()
        (other / "a.safetensors").unlink()
        os.rename(folder / "bob" / "moved", models)
        (result,) = store.plan_undo().execute()
        assert result.outcome == "undone"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_path_that_led_through_a_symlink_is_undone_where_the_file_is(folder: Path) -> None:
    real, link = folder / "data", folder / "link"
    real.mkdir()
    link.symlink_to(real)
    for name in ("a.safetensors", "b.safetensors"):
        (real / name).write_bytes(DATA)
    with Store(folder / "of-root") as store:
        store.adopt(link / "a.safetensors")
        store.replace(link / "b.safetensors", DIGEST)
        store.place(DIGEST, link / "c.safetensors", kind="hardlink")
        link.unlink()
        link.symlink_to(folder / "ann")
        assert [done.outcome for done in store.plan_undo().execute()] == ["undone"] * 3
    assert sorted(os.listdir(real)) == ["a.safetensors", "b.safetensors"]
    assert os.listdir(folder / "ann") == []
    assert {stat.S_IMODE(path.stat().st_mode) for path in real.iterdir()} == {0o644}
    assert len({path.stat().st_ino for path in real.iterdir()}) == 2
