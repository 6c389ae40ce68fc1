"""No write is lost, and no name is ever absent, while the store works on files of others.

Writers of every kind, as root (whom no mode stops) and as an ordinary user, against adopting and
linking; others who scan, add, delete and rename meanwhile; and sharing of blocks.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("leases and RENAME_EXCHANGE", allow_module_level=True)

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    DigestMismatchError,
    FileBusyError,
    FileSkippedError,
)
from smartcache.store.link import Linked
from smartcache.store.store import Store
from smartcache.store.userfile import swap_in
from smartcache.system import kernel
from tests.folders.deduping import inodes_of, leftovers, open_store, planned, undo_everything
from tests.processes.children import FORKS, NOBODY, Child, at_once, folder_of
from tests.processes.races import HOWS, LONG_AGO_NS, How, content, make, race
from tests.store.files import digest_of, snapshot
from tests.store.reflink_disks import DISKS, Disk, reflink_disk

Repeat = Callable[[int], int]
ROUNDS = 25
OLD_ENOUGH = 2.1
"""Seconds after which the store trusts the times of a file."""


@pytest.fixture(params=["ordinary user", "root"] if os.geteuid() == 0 else ["ordinary user"])
def user(request: pytest.FixtureRequest) -> int | None:
    """Who runs the race: everybody obeys modes, but root."""
    return NOBODY if request.param == "ordinary user" and os.geteuid() == 0 else None


@pytest.fixture
def folder(user: int | None) -> Iterator[Path]:
    with folder_of(user) as made:
        yield made


def adopted(store: Store, paths: Sequence[Path], _: list[bytes]) -> list[Linked]:
    return list(store.link_many(paths, label="adopt"))


def linked(store: Store, paths: Sequence[Path], contents: list[bytes]) -> list[Linked]:
    """Each is exchanged with a link of a blob of its own: through one link root writes to all."""
    for data in contents:
        store.put_stream([data])
    return list(store.link_many(paths, label="dedup", replace=True))


def twin_of(path: Path) -> Path:
    return path.with_name(f"twin of {path.name}")


def deduplicated(store: Store, paths: Sequence[Path], contents: list[bytes]) -> list[Linked]:
    """Each has a twin that nobody writes, which becomes the blob."""
    for path, data in zip(paths, contents, strict=True):
        make(twin_of(path), data)
    pairs = [each for path in paths for each in (twin_of(path), path)]
    return list(store.link_many(pairs, label="dedup", replace=True))


def check(store: Store, paths: Sequence[Path], contents: list[bytes]) -> None:
    """What is handed out has the right bytes; only root can have written through a link."""
    for blob in list(store.blobs()):
        with suppress(BlobNotFoundError, DamagedBlobError), store.open(blob.digest) as file:
            assert digest_of(file.read()) == blob.digest
    store.plan_prune().execute()
    for path, data in zip(paths, contents, strict=True):
        if twin_of(path).exists() and os.geteuid() != 0:
            assert twin_of(path).read_bytes() == data


ACTS = {"adopt": adopted, "link": linked, "dedup": deduplicated}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("what", ACTS)
def test_no_write_is_lost_and_no_wrong_bytes_are_handed_out(
    what: str, how: How, folder: Path, user: int | None, rounds: Repeat
) -> None:
    def run() -> Counter[str]:
        (folder / "files").mkdir()
        return race(folder / "store", folder / "files", how, rounds(ROUNDS), ACTS[what], check)

    with Child(run, user=user) as racer:
        counts = racer.result()
    assert counts["rounds"] >= ROUNDS
    assert counts["writes"] > 0
    assert counts["became"] + counts["linked"] > 0, counts


# writers at chosen moments


@pytest.mark.parametrize(
    "moment", ["while we wait", "before the old name goes", "after the old name went"]
)
def test_a_writer_that_looked_the_old_file_up_and_opens_it_late_gets_it_back(
    moment: str, folder: Path, user: int | None
) -> None:
    """The scheduler can keep a writer waiting in open() for as long as it likes."""
    path = folder / "a.safetensors"
    has_found, may_open, is_done = FORKS.Event(), FORKS.Event(), FORKS.Event()

    def edit() -> None:
        found = os.open(path, os.O_PATH)
        has_found.set()
        may_open.wait()
        descriptor = os.open(f"/proc/self/fd/{found}", os.O_WRONLY)
        os.write(descriptor, b"edited")
        os.close(descriptor)
        is_done.set()

    def link() -> str:
        breaks, waiting = [], [moment]
        signal.signal(signal.SIGURG, lambda *_: breaks.append(1))  # a lease is broken

        def come(reached: str) -> None:
            if reached in waiting:
                waiting.clear()
                may_open.set()
                while not breaks and not is_done.wait(0.001):
                    pass

        def sleep(seconds: float, real: Callable[[float], None] = time.sleep) -> None:
            come("while we wait")
            real(seconds)

        def unlink(name: str, *, real: Callable[..., None] = os.unlink, **more: int) -> None:
            is_ours = str(name).endswith(".smartcache")
            come("before the old name goes" if is_ours else "")
            real(name, **more)
            come("after the old name went" if is_ours else "")

        with Store(folder / "store") as store:
            store.put_stream([content(0, 0)])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "sleep", sleep)
                patch.setattr(os, "unlink", unlink)
                (result,) = store.link_many([path], label="dedup", replace=True)
        assert waiting == []
        return result.outcome

    make(path, content(0, 0))
    if user is not None:
        os.chown(path, user, user)
    with Child(edit, user=user) as writer:
        has_found.wait()
        with Child(link, user=user) as linker:
            assert linker.result() == "skipped"
        writer.result()
    assert path.read_bytes() == b"edited" + content(0, 0)[6:]
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        (["second"], {"path": b"second"}),
        (["second", "third"], {"path": b"third"}),
        (["second", "third", "fourth"], {"path": b"fourth"}),
        (["second", ""], {}),
        (["second", "third", ""], {}),
        ([""], {}),
    ],
    ids=lambda value: " then ".join(text or "gone" for text in value) or "nothing",
)
def test_what_others_did_to_a_name_last_stays(
    theirs: list[str], left: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They rename over the name, or remove it, around every exchange of ours."""
    path, temporary = tmp_path / "path", tmp_path / "temporary"
    path.write_bytes(b"blob")
    temporary.write_bytes(b"first")
    coming = list(theirs)

    def come() -> None:
        text = coming.pop(0) if coming else None
        if text:
            path.with_name(text).write_text(text, encoding="ascii")
            path.with_name(text).replace(path)
        elif text == "":
            path.unlink()

    def exchange(a: str, b: str, *, dir_fd: int | None = None) -> bool:
        come()
        is_done = real(a, b, dir_fd=dir_fd)
        come()
        return is_done

    real = kernel.exchange
    monkeypatch.setattr(kernel, "exchange", exchange)
    if not swap_in(temporary, path, path.stat().st_ino):
        temporary.unlink(missing_ok=True)  # ours, as the caller does
    while coming:
        come()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == left


def test_a_write_through_a_mapping_that_was_open_all_the_time_is_not_lost(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    """Only the first store through a page changes the times of the file, the later ones do not."""
    path, data = tmp_path / "a.safetensors", content(0, 0)
    with Store(tmp_path / "store") as store:
        digest = store.put_stream([data]).digest
        path.write_bytes(data)
        with open(path, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
            mapping[0] = data[0]
            pass_time(OLD_ENOUGH)
            assert store.digest_of(path).digest == digest
            with pytest.raises(FileBusyError):
                store.link(path, digest)
            mapping[1] = data[1] ^ 1
        with pytest.raises((FileSkippedError, DigestMismatchError)):
            store.link(path, digest)
    assert path.read_bytes() == bytes([data[0], data[1] ^ 1]) + data[2:]


# several at once, and others who use the folders

CONTENTS, COPIES = 12, 9


def fill(folder: Path) -> dict[Path, bytes]:
    """Make three folders with copies of some contents, some files with two names."""
    made: dict[Path, bytes] = {}
    for number in range(CONTENTS * COPIES):
        data = content(number % CONTENTS, 0)
        path = folder / "abc"[number // CONTENTS % 3] / f"{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(LONG_AGO_NS + number, LONG_AGO_NS + number))
        made[path] = data
        if number % 7 == 0:
            os.link(path, twin_of(path))
            made[twin_of(path)] = data
    return made


def dedup_at_once(folder: Path, home: Path) -> None:
    made = fill(folder)
    before = snapshot(folder)
    all_have_planned = FORKS.Barrier(3)

    def run(names: str) -> int:
        with open_store(home) as store:
            plan = planned(store, *(folder / name for name in names))
            all_have_planned.wait()
            return plan.execute().freed

    freed = sum(at_once(*(partial(run, names) for names in ("abc", "abc", "ca"))))
    assert freed == (CONTENTS * COPIES - CONTENTS) * 8192, "bytes are freed once"
    assert all(path.read_bytes() == data for path, data in made.items())
    assert len(inodes_of(made)) == CONTENTS
    assert leftovers(folder) == []
    with open_store(home) as store:
        assert planned(store, folder).groups == ()
        assert not store.verify(full=True).has_damage
        assert undo_everything(store) == []
    assert snapshot(folder) == before


def test_several_that_dedup_overlapping_folders_at_once_leave_nothing_to_do(
    tmp_path: Path, rounds: Repeat
) -> None:
    """Each has planned before the first one began; together they do all of it."""
    for number in range(rounds(1)):
        dedup_at_once(tmp_path / f"files {number}", tmp_path / f"store {number}")


def seed_of(path: Path) -> int:
    """Names begin with the number of their content."""
    return int(path.name.partition("-")[0])


def add_and_remove(folder: Path, is_over: Path) -> int:
    """Download, delete and copy files; rename folders to and fro."""
    chance, steps = random.Random(os.getpid()), 0
    while not is_over.exists():
        steps += 1
        place = chance.choice([path for path in folder.iterdir() if path.is_dir()])
        seed, kind = chance.randrange(6), chance.randrange(4)
        time.sleep(0.003)
        with suppress(FileNotFoundError):
            if kind == 0:
                part = place / f"{seed}-{steps}.incomplete"
                part.write_bytes(content(seed, 0))
                part.rename(place / f"{seed}-{steps}.pt")
            elif kind == 1:
                with (place / f"{seed}-{steps}.safetensors").open("xb") as file:
                    for at in range(0, 8192, 1024):  # not whole for a while
                        file.write(content(seed, 0)[at : at + 1024])
                        file.flush()
            elif kind == 2:
                files = [path for path in place.iterdir() if path.suffix == ".pt"]
                if len(files) > 10:
                    chance.choice(files).unlink()
            else:
                place.rename(folder / f"moved {place.name}")
                (folder / f"moved {place.name}").rename(place)
    return steps


def test_others_may_add_delete_and_rename_meanwhile(tmp_path: Path, rounds: Repeat) -> None:
    folder, home, is_over = tmp_path / "models", tmp_path / "store", tmp_path / "over"
    for place in "abc":
        for seed in range(6):
            path = folder / place / f"{seed}-{place}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(seed, 0))
    number = replaced = 0
    with open_store(home) as store, Child(lambda: add_and_remove(folder, is_over)) as other:
        while number < rounds(10) or not replaced:
            number += 1
            replaced += planned(store, folder).execute().replaced
        is_over.touch()
        assert other.result() > 0
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"]
    names = [path for path in folder.rglob("*") if path.is_file()]
    with open_store(home) as store:
        assert not store.verify(full=True).has_damage
        planned(store, folder).execute()
        assert len(inodes_of(names)) == 6
    assert [path for path in names if path.read_bytes() != content(seed_of(path), 0)] == []
    assert leftovers(folder) == []


# sharing blocks: the kernel compares and shares under its own locks


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", DISKS)
def test_sharing_loses_no_write(kind: Disk, how: How, tmp_path: Path, rounds: Repeat) -> None:
    def shared(store: Store, paths: Sequence[Path], contents: list[bytes]) -> list[Linked]:
        for path, data in zip(paths, contents, strict=True):
            make(twin_of(path), data)
        triples = zip(map(twin_of, paths), paths, map(digest_of, contents), strict=True)
        return list(store.share_many(triples))  # type: ignore[arg-type]  # it has an outcome, too

    with reflink_disk(kind, tmp_path) as disk:

        def run() -> Counter[str]:
            (disk / "files").mkdir()
            return race(disk / "store", disk / "files", how, rounds(4), shared, check)

        with Child(run, user=NOBODY) as racer:
            counts = racer.result()
    assert counts["writes"] > 0
    assert counts["shared"] > 0
