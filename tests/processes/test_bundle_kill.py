"""Export and import killed with SIGKILL at any moment: nothing half-made is seen, the next goes on.

At each fault point that a run reaches (the first and the last time), and at random times of a real
process.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.api import Store, opened
from tests.cli.running import PATIENCE, Smartcache
from tests.hub.bundles import (
    add_repo,
    bring,
    everything,
    export,
    faults_of,
    planned,
    two_repos,
)
from tests.processes.killing import Moment, die_at, in_child, in_turn, points_of, was_killed

FORMS = ("bundle", "bundle.tar")
WORDS = ("org/first", "org/second", "datasets/org/data")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "from"
    two_repos(path)
    return path


def fail_with(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# import


def bring_in(root: Path, bundle: Path) -> None:
    with Store(root / "store") as store:
        bring(store, bundle, root / "hub", update_refs=True, force=True)


def leftovers(root: Path) -> list[str]:
    """Return what an import that has ended must not leave."""
    tmp = [str(path) for path in (root / "store" / "tmp").iterdir()]
    return tmp + [str(path) for path in (root / "hub").glob("*/.smartcache-import")]


def killed_import(
    root: Path, bundle: Path, moment: Moment, expected: dict[str, tuple[str, bytes]]
) -> Iterator[str]:
    """Kill an import; yield the faults then, and after the next one."""

    def run() -> None:
        die_at(moment)
        bring_in(root, bundle)

    if not was_killed(in_child(run)):
        yield "it was not killed"
        return
    yield from faults_of(root / "hub")
    with Store(root / "store") as store:
        yield from ("the store is damaged" for _ in range(store.verify(full=True).has_damage))
        arrived = {blob.digest for blob in store.blobs()}
    bring_in(root, bundle)
    if everything(root / "hub") != expected:
        yield "the next import did not finish it"
    yield from (f"left: {name}" for name in leftovers(root))
    with Store(root / "store") as store:
        yield from ("the store is damaged at last" for _ in range(store.verify().has_damage))
        yield from (f"{digest} is gone" for digest in arrived - {b.digest for b in store.blobs()})


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "older revisions there"])
@pytest.mark.parametrize("form", FORMS)
def test_an_import_killed_at_any_fault_point_shows_nothing_half_made_and_goes_on(
    form: str, is_there: bool, cache: Path, tmp_path: Path, soak: bool
) -> None:
    bundle = export(cache, tmp_path / form)

    def prepare(root: Path) -> Path:
        root.mkdir()
        Store(root / "store").close()
        if is_there:
            old = root / "old"
            add_repo(old, "org/first", {"model_index.json": b"old"})
            shutil.copytree(old, root / "hub", symlinks=True)
            shutil.rmtree(old)
        return root

    whole = prepare(tmp_path / "whole")
    moments = points_of(lambda: bring_in(whole, bundle))
    expected = everything(whole / "hub")
    assert len({moment.place for moment in moments if moment.place.startswith("import")}) > 8
    problems: list[str] = []
    for number, moment in enumerate(in_turn(moments, FORMS.index(form), len(FORMS), soak=soak)):
        root = prepare(tmp_path / str(number))
        found = killed_import(root, bundle, moment, expected)
        problems += [f"killed at {moment}: {problem}" for problem in found]
        shutil.rmtree(root)
    fail_with(problems)


def test_a_snapshot_that_is_completed_is_right_at_every_fault_point(
    cache: Path, tmp_path: Path, soak: bool
) -> None:
    """It exists already, so its pointers come one by one."""
    bundle = export(cache, tmp_path / "bundle")
    problems: list[str] = []

    def prepare(root: Path) -> Path:
        root.mkdir()
        bring_in(root, bundle)
        for folder in (root / "hub").glob("*/snapshots/*"):
            for path in sorted(folder.rglob("*.safetensors")):
                path.resolve().unlink()
                path.unlink()
        return root

    whole = prepare(tmp_path / "whole")
    moments = points_of(lambda: bring_in(whole, bundle))
    assert "import: pointer made" in {moment.place for moment in moments}
    assert everything(whole / "hub") == everything(cache)
    for number, moment in enumerate(in_turn(moments, 0, 1, soak=soak)):
        root = prepare(tmp_path / str(number))
        found = killed_import(root, bundle, moment, everything(cache))
        problems += [f"killed at {moment}: {problem}" for problem in found]
        shutil.rmtree(root)
    fail_with(problems)


# export


def export_to(cache: Path, destination: Path, *, force: bool) -> None:
    plan = planned(cache, *WORDS)
    write = plan.write_tar if destination.suffix == ".tar" else plan.write_folder
    write(destination, force=force)


def is_whole(bundle: Path, cache: Path, room: Path) -> bool:
    """Say whether a bundle brings the whole cache."""
    with Store(room / "store") as store:
        bring(store, bundle, room / "hub")
    return everything(room / "hub") == everything(cache)


@pytest.mark.parametrize("force", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("form", FORMS)
def test_an_export_killed_at_any_fault_point_leaves_a_whole_bundle_or_none(
    form: str, force: bool, cache: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    add_repo(other, "org/other", {"a.json": b"{}"})

    def prepare(root: Path) -> Path:
        root.mkdir()
        if force:
            export(other, root / form)
        return root / form

    whole = prepare(tmp_path / "whole")
    moments = points_of(lambda: export_to(cache, whole, force=force))
    assert len(moments) > 2
    problems: list[str] = []
    for number, moment in enumerate(moments):
        bundle = prepare(tmp_path / str(number))
        found = killed_export(cache, bundle, moment, force=force)
        problems += [f"killed at {moment}: {problem}" for problem in found]
    fail_with(problems)


def killed_export(cache: Path, bundle: Path, moment: Moment, *, force: bool) -> Iterator[str]:
    """Kill an export; yield the faults then, and after the next one."""

    def run() -> None:
        die_at(moment)
        export_to(cache, bundle, force=force)

    if not was_killed(in_child(run)):
        yield "it was not killed"
    if bundle.exists():
        with opened(bundle) as source:
            is_former = force and len(source.manifest.repos) == 1
        if not is_former and not is_whole(bundle, cache, bundle.parent.with_suffix(".room")):
            yield "the bundle is not whole"
    elif force:
        yield "the former bundle is gone"
    export_to(cache, bundle, force=True)
    if os.listdir(bundle.parent) != [bundle.name]:
        yield f"left: {os.listdir(bundle.parent)}"
    if not is_whole(bundle, cache, bundle.parent.with_suffix(".again")):
        yield "the next bundle is not whole"


# at any time


def large_cache(cache: Path) -> None:
    chance = random.Random(5)
    shared = [chance.randbytes(300_000) for _ in range(8)]
    for number in range(6):
        files = {f"part {n}/model.safetensors": shared[(n + number) % 8] for n in range(5)}
        files |= {f"{n}.json": b"%d" % (n * number) for n in range(20)}
        add_repo(cache, f"org/{number}", files)


def kill_after(program: Smartcache, words: list[str | Path], sign: Path, delay: float) -> None:
    """Start the program and kill it a moment after it has begun, as a new name shows."""
    process = program.start(*words)
    deadline = time.monotonic() + PATIENCE
    while not list(sign.parent.glob(sign.name)) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(delay)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("form", FORMS)
def test_a_real_import_killed_at_any_time_goes_on(
    form: str, tmp_path: Path, rounds: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "from"
    large_cache(cache)
    bundle = export(cache, tmp_path / form)
    chance = random.Random()
    program = Smartcache(cwd=tmp_path)
    try:
        for number in range(rounds(2)):
            there = tmp_path / f"to {number}"
            home = tmp_path / f"store {number}"
            monkeypatch.setenv("SMARTCACHE_HOME", str(home))
            words: list[str | Path] = ["hub", "import", bundle, "--cache-dir", there]
            for _ in range(2):
                delay = chance.random() * 0.15
                kill_after(program, words, there / "*" / "blobs" / "*", delay)
                assert faults_of(there) == [], delay
            program(*words)
            assert everything(there) == everything(cache)
            with Store(home) as store:
                assert not store.verify(full=True).has_damage
            shutil.rmtree(there)
            shutil.rmtree(home)
    finally:
        program.end()


@pytest.mark.parametrize("form", FORMS)
def test_a_real_export_killed_at_any_time_can_be_repeated(
    form: str, tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    cache = tmp_path / "from"
    large_cache(cache)
    chance = random.Random()
    program = Smartcache(cwd=tmp_path)
    repos = [f"org/{number}" for number in range(6)]
    try:
        for number in range(rounds(2)):
            where = tmp_path / str(number)
            where.mkdir()
            bundle = where / form
            words: list[str | Path] = ["hub", "export", *repos, bundle, "--cache-dir", cache]
            delay = chance.random() * 0.04
            kill_after(program, words, where / ".*part", delay)
            if bundle.exists():
                assert is_whole(bundle, cache, tmp_path / f"{number} room"), delay
            program(*words, "--force")
            assert os.listdir(where) == [form], delay
            assert is_whole(bundle, cache, tmp_path / f"{number} again")
    finally:
        program.end()


def test_two_imports_at_once_bring_everything(tmp_path: Path) -> None:
    cache, there = tmp_path / "from", tmp_path / "to"
    large_cache(cache)
    bundles = [export(cache, tmp_path / form) for form in FORMS]
    program = Smartcache(cwd=tmp_path)
    try:
        running = [program.start("hub", "import", each, "--cache-dir", there) for each in bundles]
        for process in running:
            _, stderr = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, stderr
    finally:
        program.end()
    assert everything(there) == everything(cache)
