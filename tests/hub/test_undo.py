"""Undo of a download: the repo stays whole, with bytes of its own."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.hub.clients import Client
from tests.hub_server import Hub

WEIGHTS = random.Random(7).randbytes(100_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS}


def second_of_two(client: Client, hub: Hub) -> Path:
    """Two repos with the same weights; the second is linked."""
    hub.add("org/one", FILES)
    hub.add("org/two", {**FILES, "config.json": b'{"two": 2}'})
    client.snapshot("org/one")
    return Path(client.snapshot("org/two")) / "model.safetensors"


def test_a_linked_file_of_a_repo_gets_bytes_of_its_own(client: Client, hub: Hub) -> None:
    path = second_of_two(client, hub)
    blob = client.blob_of(WEIGHTS)
    assert os.path.samefile(path, blob)
    plan = client.store.plan_undo(last=True)
    assert plan.needed_size == len(WEIGHTS)
    assert all(each.is_undone for each in plan.execute())
    assert path.read_bytes() == WEIGHTS
    assert not os.path.samefile(path, blob)
    assert os.stat(path).st_mode & 0o200
    assert os.stat(path).st_nlink == 1
    assert client.store.get(client.store.digest_of(path).digest).links == 2


def test_undoing_everything_leaves_all_repos_usable_offline(client: Client, hub: Hub) -> None:
    path = second_of_two(client, hub)
    client.store.plan_undo().execute()
    assert path.read_bytes() == WEIGHTS
    for repo in ("org/one", "org/two"):
        folder = Path(client.snapshot(repo, local_files_only=True))
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not client.store.verify(full=True).has_damage


def test_the_next_download_shares_again(client: Client, hub: Hub) -> None:
    path = second_of_two(client, hub)
    client.store.plan_undo(last=True).execute()
    hub.clear()
    client.snapshot("org/two")
    assert hub.gets() == []
    assert os.path.samefile(path, client.blob_of(WEIGHTS))
