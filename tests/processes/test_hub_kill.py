"""Import, export and repair of repos killed with SIGKILL: nothing half-made is seen, all go on.

At each fault point that a run reaches, and at calls that change files.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from smartcache.hub.care.bundle import opened
from smartcache.hub.care.verify import plan_repair, verify_repos
from smartcache.hub.layout import scan_caches
from smartcache.store.store import Store
from tests.hub.bundles import add_repo, bring, everything, export, faults_of, planned, two_repos
from tests.processes.children import at_once
from tests.processes.killing import fail_with, moments_of, problems_of_kills
from tests.processes.points import all_of
from tests.store.files import edit

FORMS = ("bundle", "bundle.tar")
WORDS = ("org/first", "org/second", "datasets/org/data")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "from"
    two_repos(path)
    return path


# import


@dataclass
class Machine:
    """A store and an HF cache into which a bundle is brought."""

    root: Path
    bundle: Path

    def bring(self) -> None:
        with Store(self.root / "store") as store:
            bring(store, self.bundle, self.root / "hub", update_refs=True, force=True)

    def add_older(self) -> None:
        """Let there be an older revision."""
        add_repo(self.root / "old", "org/first", {"model_index.json": b"old"})
        shutil.copytree(self.root / "old", self.root / "hub", symlinks=True)

    def lose_weights(self) -> None:
        """Let there be a snapshot without its weights: its pointers come one by one."""
        self.bring()
        for folder in (self.root / "hub").glob("*/snapshots/*"):
            for path in sorted(folder.rglob("*.safetensors")):
                path.resolve().unlink()
                path.unlink()


def faults_of_import(machine: Machine, expected: object) -> Iterator[str]:
    """Yield what is wrong after a killed import, and after the next one."""
    root = machine.root
    yield from faults_of(root / "hub")
    with Store(root / "store") as store:
        yield from ("the store is damaged" for _ in range(store.verify(full=True).has_damage))
        arrived = {blob.digest for blob in store.blobs()}
    machine.bring()
    if everything(root / "hub") != expected:
        yield "the next import did not finish it"
    left = [*(root / "store" / "tmp").iterdir(), *(root / "hub").glob("*/.smartcache-import")]
    yield from (f"left: {path}" for path in left)
    with Store(root / "store") as store:
        yield from ("the store is damaged at last" for _ in range(store.verify().has_damage))
        yield from (f"{digest} is gone" for digest in arrived - {b.digest for b in store.blobs()})
    shutil.rmtree(root)


@pytest.mark.parametrize(("form", "before"), [
    pytest.param("bundle", None, id="folder, new"),
    pytest.param("bundle.tar", Machine.add_older, id="tar, older revision there"),
    pytest.param("bundle", Machine.lose_weights, id="folder, snapshot incomplete"),
])  # fmt: skip
def test_an_import_killed_at_any_fault_point_shows_nothing_half_made_and_goes_on(
    form: str, before: Callable[[Machine], None] | None, cache: Path, tmp_path: Path
) -> None:
    bundle = export(cache, tmp_path / form)

    def make(name: str) -> Machine:
        (tmp_path / name).mkdir()
        machine = Machine(tmp_path / name, bundle)
        Store(machine.root / "store").close()
        if before is not None:
            before(machine)
        return machine

    moments = moments_of(make, Machine.bring)
    expected = everything(tmp_path / "points" / "hub")
    all_of("complete" if before is Machine.lose_weights else "import", moments)
    judge = lambda machine: faults_of_import(machine, expected)  # noqa: E731
    fail_with(problems_of_kills(moments, make, Machine.bring, judge))


# export


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

    def make(name: str) -> Path:
        (tmp_path / name).mkdir()
        return export(other, tmp_path / name / form) if force else tmp_path / name / form

    def run(bundle: Path, *, force: bool = force) -> None:
        plan = planned(cache, *WORDS)
        write = plan.write_tar if bundle.suffix == ".tar" else plan.write_folder
        write(bundle, force=force)

    def judge(bundle: Path) -> Iterator[str]:
        if bundle.exists():
            with opened(bundle) as source:
                is_former = force and len(source.manifest.repos) == 1
            if not is_former and not is_whole(bundle, cache, bundle.parent.with_suffix(".room")):
                yield "the bundle is not whole"
        elif force:
            yield "the former bundle is gone"
        run(bundle, force=True)
        if os.listdir(bundle.parent) != [bundle.name]:
            yield f"left: {os.listdir(bundle.parent)}"
        if not is_whole(bundle, cache, bundle.parent.with_suffix(".again")):
            yield "the next bundle is not whole"

    moments = moments_of(make, run)
    all_of("export", moments)
    fail_with(problems_of_kills(moments, make, run, judge))


# repair


def test_a_repair_killed_at_any_fault_point_keeps_the_damaged_bytes_and_goes_on(
    tmp_path: Path,
) -> None:
    """Two snapshots have the damaged file; another file of theirs is whole."""

    def make(name: str) -> Path:
        root = tmp_path / name
        for text in (b"1", b"2"):
            add_repo(root / "hub", "org/name", {"a.bin": b"a" * 5000, "b.json": text})
        edit(next((root / "hub").glob("*/snapshots/*/a.bin")).resolve())
        Store(root / "store").close()
        return root

    def repair(root: Path) -> None:
        with Store(root / "store") as store:
            repos = scan_caches([root / "hub"])
            result = plan_repair(store, repos, verify_repos(store, repos).damage).execute()
            assert result.failures == ()

    def judge(root: Path) -> Iterator[str]:
        repair(root)
        yield from faults_of(root / "hub")
        if len(list((root / "hub").glob("*/snapshots/*/b.json"))) != 2:
            yield "what was whole is gone"
        bad = [path.read_bytes() for path in (root / "store" / "bad").iterdir()]
        if len(bad) != 1 or not bad[0].startswith(b"EDITED"):
            yield f"in bad/: {bad}"

    moments = moments_of(make, repair)
    all_of("repair", moments)
    assert list(judge(tmp_path / "points")) == []
    fail_with(problems_of_kills(moments, make, repair, judge))


# two at once


def test_two_imports_at_once_bring_everything(tmp_path: Path) -> None:
    cache, there = tmp_path / "from", tmp_path / "to"
    shared = [bytes([number]) * 300_000 for number in range(8)]
    for number in range(6):
        files = {f"part {n}/model.safetensors": shared[(n + number) % 8] for n in range(5)}
        add_repo(cache, f"org/{number}", files | {"config.json": b"%d" % number})
    bundles = [export(cache, tmp_path / form) for form in FORMS]

    def run(bundle: Path) -> None:
        with Store(tmp_path / "store") as store:
            bring(store, bundle, there)

    at_once(*(partial(run, bundle) for bundle in bundles))
    assert everything(there) == everything(cache)
