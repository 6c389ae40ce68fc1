"""No write is lost, and no name is ever absent, while `dedup` links the files of several folders.

Writers of every kind, as root (whom no mode stops) and as an ordinary user; other processes that
scan, add, delete and rename; and several `dedup` at once.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("leases and RENAME_EXCHANGE", allow_module_level=True)

from tests.api import Store, plan_dedup
from tests.cli.running import PATIENCE, Smartcache
from tests.folders.deduping import (
    inodes_of,
    leftovers,
    open_store,
    planned,
    scanned,
    undo_everything,
)
from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.races import HOWS, LONG_AGO_NS, File, How, content, make, race
from tests.store.files import snapshot

_log = logging.getLogger(__name__)

Seconds = Callable[[float], float]

FILES = 3
POINTS = (
    "adopt: journaled", "adopt: read-only", "adopt: linked", "replace: journaled",
    "replace: temporary linked", "replace: exchanged", "replace: old removed",
)  # fmt: skip
ALWAYS_SEEN: dict[How, tuple[str, ...]] = {
    "edit": ("replaced",),
    "edit fast": ("leases broken", "replaced"),
    "map": ("leases broken",),
    "rename": ("replaced",),
    "recreate": ("left alone",),
    "truncate": ("leases broken",),
}
"""What a race with each kind of writer must have shown, or it was none."""


@pytest.fixture(params=["unprivileged", "root"] if os.geteuid() == 0 else ["unprivileged"])
def user(request: pytest.FixtureRequest) -> int | None:
    """Who runs the race: everybody obeys modes, but root."""
    return NOBODY if request.param == "unprivileged" and os.geteuid() == 0 else None


@pytest.fixture
def folder(user: int | None) -> Iterator[Path]:
    with folder_of(user) as made:
        yield made


# writers


def files_of(folder: Path) -> Callable[[int], list[File]]:
    """Name the files of each round: the same names, with bytes that no round had before."""

    def named(number: int) -> list[File]:
        first = number * FILES
        return [File(folder / "written" / f"{n}.safetensors", first + n) for n in range(FILES)]

    return named


def twin_of(file: File) -> Path:
    """The other copy, which nobody writes; every second one is older and survives."""
    return file.path.parent.with_name("still") / file.path.name


def make_twins(files: Sequence[File]) -> None:
    for file in files:
        twin = twin_of(file)
        make(twin, content(file.seed, 0))
        age = -1 if file.seed % 2 else 1
        os.utime(twin, ns=(LONG_AGO_NS + age, LONG_AGO_NS + age))


def deduplicate(store: Store, files: Sequence[File]) -> Counter[str]:
    make_twins(files)
    counts: Counter[str] = Counter()
    found = scanned(store, *{path.parent for path in (files[0].path, twin_of(files[0]))})
    plan = plan_dedup(store, found)
    result = plan.execute()
    skipped = [skip.reason for skip in (*plan.skipped, *result.skipped)]
    counts["left alone"] += len(found.busy) + len(found.problems) + len(skipped)
    counts["replaced"] += result.replaced
    return counts + Counter(skipped)


def check(store: Store, files: Sequence[File]) -> None:
    assert leftovers(files[0].path.parent, twin_of(files[0]).parent) == []
    for file in files:
        twin = twin_of(file)
        is_linked = twin.exists() and file.path.exists() and twin.samefile(file.path)
        # Only root can have written through a link.
        if os.geteuid() != 0 or not is_linked:
            assert twin.read_bytes() == content(file.seed, 0), "nobody has written to it"


def dedup_race(folder: Path, how: How, seconds: float) -> Counter[str]:
    for name in ("written", "still"):
        (folder / name).mkdir()
    with open_store(folder / "store") as store:
        return race(
            store, how, files_of(folder), act=deduplicate, check=check, points=POINTS,
            wanted=ALWAYS_SEEN.get(how, ()), seconds=seconds,
        )  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
def test_dedup_loses_no_write(how: How, folder: Path, user: int | None, seconds: Seconds) -> None:
    with Child(lambda: dedup_race(folder, how, seconds(0.5)), user=user) as racer:
        counts = racer.result()
    _log.info("%s", dict(sorted(counts.items())))
    assert counts["writes"] > 0
    assert all(counts[name] for name in ALWAYS_SEEN.get(how, ())), counts


# several at once

CONTENTS = 12
COPIES = 9


def fill(folder: Path) -> dict[Path, bytes]:
    """Make three folders with copies of some contents, some files with two names."""
    made: dict[Path, bytes] = {}
    for number in range(CONTENTS * COPIES):
        seed = number % CONTENTS
        path = folder / "abc"[number // CONTENTS % 3] / f"{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(seed, 0))
        os.utime(path, ns=(LONG_AGO_NS + number, LONG_AGO_NS + number))
        made[path] = content(seed, 0)
        if number % 7 == 0:
            twin = path.with_name(f"{number} again.safetensors")
            os.link(path, twin)
            made[twin] = content(seed, 0)
    return made


@pytest.mark.parametrize("count", [2, 4])
def test_several_at_once_on_overlapping_folders(
    count: int, tmp_path: Path, rounds: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(rounds(1)):
        folder = tmp_path / str(number)
        made = fill(folder)
        before = snapshot(folder)
        monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / f"store {number}"))
        program = Smartcache(cwd=tmp_path)
        choices = ("ab", "bc", "abc", "ca")[:count]
        started = [
            program.start("dedup", *(folder / name for name in names), "--min-size", "1", "-y")
            for names in choices
        ]
        try:
            for process in started:
                _, errors = process.communicate(timeout=PATIENCE)
                assert process.returncode == 0, errors
        finally:
            program.end()
        assert all(path.read_bytes() == data for path, data in made.items())
        assert leftovers(folder) == []
        with open_store(tmp_path / f"store {number}") as store:
            seen = {path for path in made if path.parent.name in "".join(choices)}
            assert planned(store, folder).execute().is_complete
            for seed in range(CONTENTS):
                assert len(inodes_of(p for p in seen if made[p] == content(seed, 0))) == 1
            report = store.verify(full=True)
            assert not report.has_damage
            assert report.dead_links == []
            assert undo_everything(store) == []
        assert snapshot(folder) == before


def test_several_at_once_leave_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has planned before the first one began; together they do all of it."""
    made = fill(tmp_path / "files")
    home = tmp_path / "store"

    def run(go: int) -> int:
        with open_store(home) as store:
            plan = planned(store, tmp_path / "files")
            os.read(go, 1)
            result = plan.execute()
            assert result.is_complete, result.skipped
            return result.freed

    go, going = os.pipe()
    with (
        Child(lambda: run(go)) as one,
        Child(lambda: run(go)) as two,
        Child(lambda: run(go)) as six,
    ):
        time.sleep(1)
        os.write(going, b"ggg")
        freed = [one.result(), two.result(), six.result()]
    os.close(go)
    os.close(going)
    copies = CONTENTS * COPIES
    assert sum(freed) == (copies - CONTENTS) * 8192, "bytes are freed once"
    assert len(inodes_of(made)) == CONTENTS
    with open_store(home) as store:
        assert planned(store, tmp_path / "files").groups == ()


# others who use the folders


def seed_of(path: Path) -> int:
    """Names begin with the number of their content."""
    return int(path.name.partition("-")[0])


def add_and_remove(folder: Path, is_over: Path) -> int:
    """Download, delete and copy files; rename folders to and fro."""
    chance = random.Random(os.getpid())
    steps = 0
    while not is_over.exists():
        steps += 1
        place = chance.choice([path for path in folder.iterdir() if path.is_dir()])
        seed = chance.randrange(6)
        kind = chance.randrange(4)
        time.sleep(0.003)
        with suppress(FileNotFoundError):
            if kind == 0:
                part = place / f"{seed}-{steps}.incomplete"
                part.write_bytes(content(seed, 0))
                part.rename(place / f"{seed}-{steps}.pt")
            elif kind == 1:
                path = place / f"{seed}-{steps}.safetensors"
                with path.open("xb") as file:  # as it comes: not whole for a while
                    for at in range(0, 8192, 1024):
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


def scan_all_the_time(folder: Path, home: Path, is_over: Path) -> int:
    scans = 0
    with open_store(home) as store:
        while not is_over.exists():
            scanned(store, folder)
            scans += 1
    return scans


def test_others_may_scan_add_delete_and_rename_meanwhile(tmp_path: Path, seconds: Seconds) -> None:
    folder, home, is_over = tmp_path / "models", tmp_path / "store", tmp_path / "over"
    for place in "abc":
        for seed in range(6):
            path = folder / place / f"{seed}-{place}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(seed, 0))
    counts: Counter[str] = Counter()
    with (
        open_store(home) as store,
        Child(lambda: add_and_remove(folder, is_over)) as other,
        Child(lambda: scan_all_the_time(folder, home, is_over)) as scanner,
    ):
        deadline = time.monotonic() + seconds(2)
        while time.monotonic() < deadline:
            plan = planned(store, folder)
            result = plan.execute()
            counts["rounds"] += 1
            counts["replaced"] += result.replaced
            counts += Counter(skip.reason for skip in result.skipped)
        is_over.touch()
        counts["steps"], counts["scans"] = other.result(), scanner.result()
    _log.info("%s", dict(sorted(counts.items())))
    assert counts["replaced"] > 0
    assert counts["scans"] > 0
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"]
    names = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in names if path.read_bytes() != content(seed_of(path), 0)] == []
    assert leftovers(folder) == []
    with open_store(home) as store:
        assert not store.verify(full=True).has_damage
        planned(store, folder).execute()
        assert len(inodes_of(names)) == 6
        assert [path for path in names if path.read_bytes() != content(seed_of(path), 0)] == []


def test_a_folder_that_is_deleted_meanwhile_is_no_failure(tmp_path: Path) -> None:
    made = fill(tmp_path / "files")
    with open_store(tmp_path / "store") as store:
        plan = planned(store, tmp_path / "files")
        shutil.rmtree(tmp_path / "files" / "b")
        result = plan.execute()
        assert not result.is_complete
        assert {skip.path.parent.name for skip in result.skipped} == {"b"}
        left = [path for path in made if path.exists()]
        assert len(inodes_of(left)) == CONTENTS
        assert not store.verify(full=True).has_damage
