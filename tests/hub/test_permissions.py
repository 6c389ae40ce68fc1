"""HF caches that may not be read or changed as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from smartcache.config import Settings
from smartcache.errors import HubError
from smartcache.hub.care.census import Census
from smartcache.hub.care.remove import plan_removal
from smartcache.hub.care.verify import plan_repair, verify_repos
from smartcache.hub.layout import scan_caches
from smartcache.store.store import Store
from tests.hub.caches import commit_of, make_repo
from tests.processes.children import Child, folder_of
from tests.store.files import WEIGHTS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

A, ANN = commit_of(1), 64001
FILES = {"config.json": b"{}", "m.safetensors": WEIGHTS}
T = TypeVar("T")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of Ann's."""
    with folder_of(None) as made:
        (made / "ann").mkdir(mode=0o755)
        os.chown(made / "ann", ANN, ANN)
        yield made / "ann"


def as_ann(work: Callable[[], T]) -> T:
    with Child(work, user=ANN, group=ANN) as child:
        return child.result()


def test_what_cannot_be_read_is_called_so_and_never_repaired(place: Path) -> None:
    """A pointer into a closed folder does not lead nowhere: its blob may be all right."""

    def work() -> tuple[list[str], list[str], bool]:
        folder = make_repo(place / "hub", FILES)
        with Store(settings=Settings(home=place / "store")) as store:
            blob = (folder / "snapshots" / A / "config.json").resolve()
            blob.chmod(0)
            first = verify_repos(store, scan_caches([place / "hub"]))
            blob.chmod(0o644)
            (folder / "blobs").chmod(0)
            repos = scan_caches([place / "hub"])
            second = verify_repos(store, repos)
            plan = plan_repair(store, repos, second.damage)
        kinds = [[str(each.kind) for each in report.findings] for report in (first, second)]
        return kinds[0], kinds[1], plan.is_empty

    assert as_ann(work) == (["unreadable"], ["unreadable"] * 3, True)


def test_a_repo_that_cannot_be_read_as_a_whole_is_not_removed(place: Path) -> None:
    def work() -> str:
        folder = make_repo(place / "hub", FILES)
        (folder / "blobs").chmod(0)
        census = Census(scan_caches([place / "hub"]))
        with pytest.raises(HubError) as caught:
            plan_removal(census, [(census.repos[0], None)])
        return str(caught.value)

    assert "cannot be read: Permission denied" in as_ann(work)


def test_a_blob_that_cannot_be_removed_keeps_its_pointers(place: Path) -> None:
    """So that the next call finds it."""

    def work() -> tuple[set[str], list[bool], bool]:
        folder = make_repo(place / "hub", FILES)
        (folder / "blobs").chmod(0o555)
        census = Census(scan_caches([place / "hub"]))
        result = plan_removal(census, [(census.repos[0], None)]).execute()
        (repo,) = scan_caches([place / "hub"])
        whole = [not each.is_dangling for each in repo.revisions[0].pointers]
        (folder / "blobs").chmod(0o755)
        plan_removal(Census([repo]), [(repo, None)]).execute()
        return {reason for _, reason in result.failures}, whole, folder.exists()

    assert as_ann(work) == ({"Permission denied"}, [True, True], False)
