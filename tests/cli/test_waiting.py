"""Another process has the store or its index, and is stopped: nobody waits without a word."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from smartcache.store.store import Store
from tests.cli.running import Here
from tests.processes.children import Child
from tests.store.files import OTHER, WEIGHTS, digest_of, edit, write

Hold = Callable[[Store], AbstractContextManager[None]]
HOLDS: dict[str, Hold] = {
    "store": lambda store: store.locked("prune"),
    "index": lambda store: store.catalog.write(),
}


@contextmanager
def stopped_holder(home: Path, what: str) -> Iterator[int]:
    """A process that holds a lock and does not go on; give its number."""
    reading, writing = os.pipe()

    def hold() -> None:
        with Store(home) as store, HOLDS[what](store):
            os.write(writing, b".")
            time.sleep(60)

    with Child(hold) as child:
        assert os.read(reading, 1) == b"."
        os.kill(child.pid, signal.SIGSTOP)
        try:
            yield child.pid
        finally:
            os.close(reading)
            os.close(writing)


@pytest.fixture
def filled(sc: Here, home: Path, models: Path) -> Here:
    """A store with a blob that was adopted, one that was linked from outside, and a damaged one."""
    sc("add", "--adopt", models / "a.safetensors")
    sc("add", models / "sub" / "c.gguf")
    with Store(home) as store:
        store.put_stream([b"rot" * 1000])
        os.link(store.pools()[0].blob(digest_of(OTHER)), models / "link.gguf")
        edit(store.pools()[0].blob(digest_of(b"rot" * 1000)))
    return sc


@pytest.mark.parametrize("what", ["store", "index"])
@pytest.mark.usefixtures("own_places")
def test_who_only_reads_waits_for_nobody(
    what: str, filled: Here, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", "5")
    with stopped_holder(home, what):
        for words in (["ls"], ["df"], ["undo", "--list"], ["hub", "ls"], ["artifacts", "ls"]):
            assert "Waiting" not in filled(*words).stderr
        found = filled("verify", "--json", code=3)
        assert "Waiting" not in found.stderr
        assert found.json["damaged"] == [digest_of(b"rot" * 1000)]
        with Store(home) as store, store.open(digest_of(OTHER)) as file:
            assert file.read() == OTHER
    filled("verify", code=3 if what == "store" else 0)  # it could not be moved away
    assert len(os.listdir(home / "bad")) == 1


@pytest.mark.parametrize("does", ["add", "undo"])
def test_who_changes_something_says_for_whom_it_waits_and_gives_up(
    does: str, filled: Here, home: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", "3")
    write(models / "new.safetensors", WEIGHTS[::-1])
    words = ["undo", "--all", "-y"] if does == "undo" else ["add", models / "new.safetensors"]
    with stopped_holder(home, "store") as pid:
        first, _, rest = filled(*words, code=1).stderr.partition("\n")
        assert first.startswith(f"Waiting: process {pid}")
        assert "Gave up" in rest
        assert f"process {pid}" in rest


def test_a_memory_is_waited_for_but_nothing_fails_without_it(
    filled: Here, home: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", "1")
    write(models / "new.safetensors", WEIGHTS[::-1])
    with stopped_holder(home, "index"):
        said = filled("add", models / "new.safetensors").stderr
    assert said.startswith("Waiting: another process is writing to")
    assert digest_of(WEIGHTS[::-1]) in filled.digests()


def test_what_a_killed_process_left_is_cleared_when_the_store_is_free_again(
    filled: Here, home: Path, models: Path
) -> None:
    """Opening does not wait to clear up, and what it leaves is not forgotten."""
    path = write(models / "d.safetensors", WEIGHTS[::-1])

    def die() -> None:
        with Store(home) as store:
            from smartcache.system import faults

            faults.hook = lambda point: (
                os.kill(os.getpid(), signal.SIGKILL) if point == "linked" else None
            )
            store.adopt(path)

    with Child(die) as child:
        os.waitpid(child.pid, 0)
        child._is_over = True  # noqa: SLF001
    assert path.stat().st_mode & 0o777 == 0o444
    with stopped_holder(home, "index"):
        filled("ls")
    filled("ls")
    assert path.stat().st_nlink == 2
    filled("undo", "--all", "-y")
    assert path.stat().st_mode & 0o777 == 0o644
