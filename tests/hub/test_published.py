"""Downloads of what another user of this machine has published."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api import Settings, SmartCache, Store
from tests.hub.clients import (
    Client,
    as_ordinary_user,
    assert_sound,
    plain_snapshot,
    sha256,
    weights,
)
from tests.hub_server import Hub
from tests.processes.children import NOBODY, folder_of
from tests.store.files import digest_of, edit

ENCODER, UNET = weights(1), weights(2, 300_000)
MODEL = {
    "model_index.json": b"{}",
    "text_encoder/model.safetensors": ENCODER,
    "unet/model.safetensors": UNET,
}


def publish(root: Path, *contents: bytes) -> Path:
    with Store(root) as store:
        for data in contents:
            store.put_stream([data], algorithms=["sha256"])
        store.plan_publish().execute()
    return root


def blob_of(root: Path, data: bytes) -> Path:
    return root / "blobs" / digest_of(data)[:2] / digest_of(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return publish(tmp_path / "srv", ENCODER, UNET)


@pytest.fixture
def client(tmp_path: Path, hub: Hub, cache: Path, root: Path) -> Iterator[Client]:
    """A smartcache with an empty store that may take from the published one."""
    hub.add("org/name", MODEL)
    settings = Settings(home=tmp_path / "store", shared_stores=(root,))
    with SmartCache(settings=settings) as smart:
        yield Client(smart, hub, cache)


def read(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in MODEL}


class TestDownload:
    def test_no_weight_is_fetched(self, client: Client, root: Path) -> None:
        plan = client.plan()
        files = {each.file.path: each for each in plan.files if each.is_weight}
        assert {each.source for each in files.values()} == {"copy"}
        assert {each.origin for each in files.values()} == {root}
        assert plan.saved_size == len(ENCODER) + len(UNET)
        path = client.snapshot()
        assert client.hub.fetched_bytes("safetensors") == 0
        assert read(path) == MODEL
        own = client.blob_of(UNET)
        assert os.path.samefile(own, path / "unet/model.safetensors")
        assert not os.path.samefile(own, blob_of(root, UNET))
        assert_sound(client)

    def test_one_file(self, client: Client) -> None:
        path = client.file("org/name", "unet/model.safetensors")
        assert client.hub.fetched_bytes() == 0
        assert path.read_bytes() == UNET

    def test_a_local_dir(self, client: Client, tmp_path: Path) -> None:
        assert read(client.snapshot(local_dir=tmp_path / "local")) == MODEL
        assert client.hub.fetched_bytes("safetensors") == 0

    def test_where_the_store_has_no_volume(
        self, client: Client, elsewhere: Path, root: Path
    ) -> None:
        """The copy goes straight to where it is wanted, and is hashed on the way."""
        edit(blob_of(root, ENCODER))
        assert read(client.snapshot(cache_dir=elsewhere)) == MODEL
        assert client.hub.fetched_bytes("unet/model.safetensors") == 0
        assert client.hub.fetched_bytes("text_encoder/model.safetensors") == len(ENCODER)
        assert list(client.store.blobs()) == []

    def test_what_the_own_store_has_is_not_copied_again(self, client: Client) -> None:
        client.store.put_stream([UNET], algorithms=["sha256"])
        sources = client.sources()
        assert sources["unet/model.safetensors"] == "link"
        assert sources["text_encoder/model.safetensors"] == "copy"

    def test_a_blob_that_was_changed_is_fetched(
        self, client: Client, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing of it is believed: not its size, not its name, not the listing."""
        edit(blob_of(root, UNET))
        assert read(client.snapshot()) == MODEL
        assert client.hub.fetched_bytes("text_encoder/model.safetensors") == 0
        assert client.hub.fetched_bytes("unet/model.safetensors") == len(UNET)
        (message,) = caplog.messages
        assert f"does not have sha256 {sha256(UNET)}" in message
        assert_sound(client)

    def test_a_store_that_cannot_be_trusted_is_left_out(
        self, client: Client, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root.chmod(0o775)
        assert set(client.sources().values()) == {"fetch"}
        assert read(client.snapshot()) == MODEL
        assert client.hub.fetched_bytes("safetensors") == len(ENCODER) + len(UNET)
        (message,) = caplog.messages
        assert "can be written by others" in message

    def test_a_library_that_loads_fetches_no_weight(self, client: Client) -> None:
        with client.smart.attending(client.call("org/name")):
            path = plain_snapshot(client.hub, client.cache)
        assert client.hub.fetched_bytes("safetensors") == 0
        assert read(path) == MODEL
        assert_sound(client)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_a_user_downloads_what_root_has_published(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    with folder_of(NOBODY) as place, folder_of(None) as srv:
        root = publish(srv / "models", ENCODER, UNET)

        def download() -> dict[str, bytes]:
            settings = Settings(home=place / "store", shared_stores=(root,))
            with SmartCache(settings=settings) as smart:
                client = Client(smart, hub, place / "hf")
                found = read(client.snapshot(token=False))
                assert_sound(client)
                return found

        assert as_ordinary_user(download) == MODEL
        assert hub.fetched_bytes("safetensors") == 0
        assert os.stat(blob_of(place / "store", UNET)).st_uid == NOBODY
