"""What a library loads on a second machine comes from the tier: weights, and small files too.

The library is huggingface_hub itself: it takes what it is told to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hub.clients import Client, contents, plain_snapshot, sha256, weights
from tests.hub_server import Hub, git_sha1
from tests.remote.test_repos import push

ENCODER, UNET = weights(1), weights(2)
FILES = {
    "model_index.json": b"{}",
    "README.md": b"# A model",
    "text_encoder/config.json": b'{"a": 1}',
    "text_encoder/model.safetensors": ENCODER,
    "unet/model.safetensors": UNET,
}


@pytest.fixture(autouse=True)
def pushed(here: Client, hub: Hub) -> str:
    """A repo that machine A has downloaded and pushed; returns its commit."""
    commit = hub.add("org/name", FILES).sha
    here.snapshot()
    push(here, "org/name")
    hub.requests.clear()
    return commit


def load(client: Client, *patterns: str, **more: object) -> Path:
    """Load a repo as a library would that wants these files."""
    with client.smart.attending(client.call("org/name", **more)):
        return plain_snapshot(
            client.hub, client.cache, allow_patterns=list(patterns) or None, **more
        )


@pytest.mark.parametrize("is_pinned", [False, True], ids=["branch", "commit"])
def test_a_load_takes_no_byte_of_a_file_from_the_hub(
    there: Client, hub: Hub, pushed: str, is_pinned: bool
) -> None:
    more = {"revision": pushed} if is_pinned else {}
    snapshot = load(there, **more)
    assert (snapshot / "unet/model.safetensors").read_bytes() == UNET
    assert hub.requests.gets() == []
    assert there.store.find("sha256", sha256(UNET)) is not None


def test_the_cache_is_the_one_that_huggingface_hub_makes(
    there: Client, hub: Hub, tmp_path: Path
) -> None:
    load(there)
    plain_snapshot(hub, tmp_path / "plain")
    assert contents(there.cache) == contents(tmp_path / "plain")


def test_what_the_library_does_not_want_does_not_come(there: Client, hub: Hub) -> None:
    load(there, "text_encoder/*")
    assert hub.requests.gets() == []
    blobs = set(os.listdir(there.cache / "models--org--name" / "blobs"))
    assert blobs == {sha256(ENCODER), git_sha1(FILES["text_encoder/config.json"])}


def test_small_files_alone_come_without_weights(there: Client, hub: Hub) -> None:
    snapshot = load(there, "*.json")
    assert (snapshot / "text_encoder/config.json").read_bytes() == b'{"a": 1}'
    assert hub.requests.gets() == []
    assert there.store.find("sha256", sha256(UNET)) is None


def test_a_second_load_asks_the_tier_for_nothing(there: Client, share: Path) -> None:
    load(there, "*.json")
    share.rename(share.with_name("unmounted"))
    load(there, "*.json")


def test_without_the_hub_the_repo_comes_from_the_tier(
    there: Client, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.close()
    call = there.call("org/name")
    with there.smart.attending(call) as commit:
        snapshot = there.cache / "models--org--name" / "snapshots" / commit
        assert (snapshot / "unet/model.safetensors").read_bytes() == UNET
