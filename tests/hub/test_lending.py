"""What is lent to a library that loads from a repo.

The library is huggingface_hub itself: it takes what it is told to.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.api import DigestMismatchError, Purpose, UnsafeNameError
from tests.hub.clients import (
    Client,
    assert_sound,
    assert_undamaged,
    contents,
    plain_file,
    plain_snapshot,
    sha256,
    weights,
)
from tests.hub_server import Hub
from tests.store.files import edit, inode_of, write

ENCODER, UNET, OTHER = weights(1), weights(2), weights(3)
FIRST = {
    "model_index.json": b"{}",
    "text_encoder/model.safetensors": ENCODER,
    "unet/model.safetensors": UNET,
}
SECOND = {**FIRST, "unet/model.safetensors": OTHER}
ENCODER_PATH, UNET_PATH = "text_encoder/model.safetensors", "unet/model.safetensors"


@pytest.fixture
def repos(hub: Hub) -> None:
    hub.add("org/first", FIRST)
    hub.add("org/second", SECOND)


def lending(
    client: Client, name: str, purpose: str = "all", inside: str = "", **more: object
) -> AbstractContextManager[str]:
    return client.smart.lending(client.call(name, **more), Purpose(text=purpose, inside=inside))


def load(client: Client, name: str, *patterns: str, **more: object) -> Path:
    """Load a repo as a library would that wants these files (all, if there are none)."""
    inside = str(more.pop("inside", ""))
    with lending(client, name, ",".join(patterns), inside, **more):
        return plain_snapshot(
            client.hub, client.cache, name, allow_patterns=list(patterns) or None, **more
        )


def blobs(client: Client, name: str) -> set[str]:
    folder = client.cache / f"models--{name.replace('/', '--')}" / "blobs"
    return set(os.listdir(folder)) if folder.is_dir() else set()


@pytest.mark.usefixtures("repos")
class TestLending:
    def test_what_the_library_fetched_is_in_the_store(self, client: Client) -> None:
        path = load(client, "org/first")
        for data, name in ((ENCODER, ENCODER_PATH), (UNET, UNET_PATH)):
            assert inode_of(client.blob_of(data)) == os.stat(path / name).st_ino
        assert_sound(client)

    def test_known_bytes_are_not_fetched_again(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.clear()
        path = load(client, "org/second")
        assert client.hub.gets(ENCODER_PATH) == []
        assert client.hub.fetched_bytes(UNET_PATH) == len(OTHER)
        assert os.stat(path / ENCODER_PATH).st_ino == inode_of(client.blob_of(ENCODER))
        assert_sound(client)

    def test_a_link_that_nobody_wanted_is_taken_away(self, client: Client) -> None:
        load(client, "org/first")
        load(client, "org/second", "unet/*")
        assert sha256(ENCODER) not in blobs(client, "org/second")
        assert client.store.find("sha256", sha256(ENCODER)) is not None
        assert_sound(client)

    def test_so_it_is_when_the_library_fails(self, client: Client) -> None:
        load(client, "org/first")
        loan = lending(client, "org/second")
        loan.__enter__()
        assert sha256(ENCODER) in blobs(client, "org/second")
        error = ValueError("no such variant")
        assert not loan.__exit__(ValueError, error, None)
        assert blobs(client, "org/second") == set()
        assert_sound(client)

    def test_so_it_is_after_an_interruption(self, client: Client) -> None:
        load(client, "org/first")
        with pytest.raises(KeyboardInterrupt), lending(client, "org/second"):
            raise KeyboardInterrupt
        assert blobs(client, "org/second") == set()

    def test_the_result_is_the_cache_that_huggingface_hub_makes(
        self, client: Client, tmp_path: Path
    ) -> None:
        load(client, "org/first")
        load(client, "org/second")
        plain_snapshot(client.hub, tmp_path / "plain", "org/first")
        plain_snapshot(client.hub, tmp_path / "plain", "org/second")
        assert contents(client.cache) == contents(tmp_path / "plain")

    def test_the_revision_owns_what_it_uses(self, client: Client) -> None:
        load(client, "org/first")
        load(client, "org/second")
        client.smart.store.plan_prune().execute()
        names = {owner.name.partition("@")[0] for owner, _ in client.store.owners()}
        assert {"model/org/first", "model/org/second"} <= names
        assert client.store.find("sha256", sha256(ENCODER)) is not None

    def test_only_the_folder_that_is_loaded_is_lent(self, client: Client) -> None:
        load(client, "org/first")
        with lending(client, "org/second", inside="unet"):
            assert blobs(client, "org/second") == set()

    def test_a_file_of_a_given_folder_is_taken(self, client: Client, tmp_path: Path) -> None:
        write(tmp_path / "comfy" / "clip.safetensors", ENCODER)
        client.store.add_folder(tmp_path / "comfy")
        path = load(client, "org/first")
        assert client.hub.gets(ENCODER_PATH) == []
        assert os.stat(path / ENCODER_PATH).st_ino == inode_of(
            tmp_path / "comfy" / "clip.safetensors"
        )

    def test_what_a_pipeline_does_not_load_is_not_read(
        self, client: Client, tmp_path: Path
    ) -> None:
        client.hub.add("org/pipeline", {**FIRST, "whole.safetensors": OTHER})
        path = write(tmp_path / "comfy" / "whole.safetensors", OTHER)
        client.store.add_folder(tmp_path / "comfy")
        load(client, "org/pipeline", "unet/*", "text_encoder/*")
        assert client.store.known_hashes([path]) == {path: {}}

    def test_undo_leaves_the_repo_whole(self, client: Client) -> None:
        load(client, "org/first")
        path = load(client, "org/second")
        client.store.plan_undo(None).execute()
        assert {name: (path / name).read_bytes() for name in SECOND} == SECOND


@pytest.mark.usefixtures("repos")
class TestServed:
    def test_a_second_loading_asks_once_and_changes_nothing(self, client: Client) -> None:
        load(client, "org/first")
        history = client.store.volume.journal.history()
        client.hub.clear()
        with lending(client, "org/first"):
            asked = len(client.hub.requests)
        assert asked == 1
        assert client.store.volume.journal.history() == history

    def test_others_may_load_at_the_same_time(self, client: Client) -> None:
        load(client, "org/first")
        with lending(client, "org/first"):
            other = threading.Thread(target=load, args=(client, "org/first"))
            other.start()
            other.join(30)
            assert not other.is_alive()

    def test_a_first_loading_is_waited_for(self, client: Client) -> None:
        order = []

        def second() -> None:
            with lending(client, "org/first"):
                order.append("second")

        with lending(client, "org/first"):
            other = threading.Thread(target=second)
            other.start()
            other.join(0.5)
            order.append("first")
            plain_snapshot(client.hub, client.cache, "org/first")
        other.join(30)
        assert order == ["first", "second"]

    def test_another_purpose_is_lent_to_again(self, client: Client) -> None:
        load(client, "org/first")
        load(client, "org/second", "unet/*")
        client.hub.clear()
        load(client, "org/second", "text_encoder/*")
        assert client.hub.gets(ENCODER_PATH) == []

    def test_a_file_that_went_away_comes_back_out_of_the_store(self, client: Client) -> None:
        path = load(client, "org/first")
        os.unlink(os.path.realpath(path / UNET_PATH))
        os.unlink(path / UNET_PATH)
        client.hub.clear()
        load(client, "org/first")
        assert client.hub.gets(UNET_PATH) == []
        assert (path / UNET_PATH).read_bytes() == UNET


@pytest.mark.usefixtures("repos")
class TestWrongBytes:
    def test_what_came_wrong_is_raised_and_not_visible(self, client: Client) -> None:
        client.hub.faults.wrong_bytes("unet")
        with pytest.raises(DigestMismatchError, match="unet"):
            load(client, "org/first")
        assert sha256(UNET) not in blobs(client, "org/first")
        assert client.store.find("sha256", sha256(UNET)) is None
        assert_undamaged(client)

    def test_also_when_the_library_stumbles_over_it(self, client: Client) -> None:
        client.hub.faults.wrong_bytes("unet")
        loan = lending(client, "org/first")
        loan.__enter__()
        plain_snapshot(client.hub, client.cache, "org/first")
        with pytest.raises(DigestMismatchError):
            loan.__exit__(ValueError, ValueError("header too large"), None)

    def test_also_what_came_from_another_repo(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.faults.wrong_bytes("unet")
        loan = lending(client, "org/first")
        loan.__enter__()
        plain_snapshot(client.hub, client.cache, "org/second")
        with pytest.raises(DigestMismatchError, match="unet"):
            loan.__exit__(None, None, None)
        assert sha256(OTHER) not in blobs(client, "org/second")

    def test_also_when_somebody_else_finds_it_first(self, client: Client) -> None:
        client.hub.faults.wrong_bytes("unet")
        loan = lending(client, "org/first")
        loan.__enter__()
        plain_snapshot(client.hub, client.cache, "org/first")
        client.snapshot("org/first")
        with pytest.raises(DigestMismatchError, match="when it was loaded"):
            loan.__exit__(None, None, None)

    def test_also_when_it_is_written_to_meanwhile(self, client: Client) -> None:
        path = load(client, "org/first")
        loan = lending(client, "org/first")
        loan.__enter__()
        edit(Path(os.path.realpath(path / UNET_PATH)), OTHER)
        with pytest.raises(DigestMismatchError, match="unet"):
            loan.__exit__(None, None, None)

    def test_a_file_of_somebodys_own_is_left_where_it_is(
        self, client: Client, tmp_path: Path
    ) -> None:
        path = load(client, "org/first")
        mine = write(tmp_path / "merged.safetensors", OTHER)
        loan = lending(client, "org/first")
        loan.__enter__()
        os.unlink(path / UNET_PATH)
        os.symlink(mine, path / UNET_PATH)
        with pytest.raises(DigestMismatchError, match="unet"):
            loan.__exit__(None, None, None)
        assert mine.read_bytes() == OTHER

    @pytest.mark.parametrize("etag", ["an-etag", "../../../../evil"])
    def test_a_weight_comes_under_the_hash_that_was_listed_or_not_at_all(
        self, client: Client, tmp_path: Path, etag: str
    ) -> None:
        """Also in a thread of the library's own: that is where it downloads."""
        client.hub.faults.other_etag("unet", etag)
        with (
            pytest.raises((DigestMismatchError, UnsafeNameError)),
            lending(client, "org/first"),
            ThreadPoolExecutor(1) as pool,
        ):
            pool.submit(plain_file, client.hub, client.cache, "org/first", UNET_PATH).result()
        assert client.hub.gets("unet") == []
        assert not list(tmp_path.rglob("*evil*")) + list(tmp_path.rglob("an-etag*"))
        client.hub.faults.clear()
        assert (load(client, "org/first") / UNET_PATH).read_bytes() == UNET

    @pytest.mark.parametrize("fault", ["none", "mirror"])
    def test_also_where_no_weights_are_loaded(self, client: Client, fault: str) -> None:
        client.hub.add("org/words", {"vocab.json": b'{"a": 1}', "spiece.model": ENCODER})
        if fault == "mirror":
            client.hub.faults.other_etag("vocab", "an-etag")
        client.hub.faults.wrong_bytes("vocab")
        purpose = Purpose(text="tokenizer", has_weights=False)
        loan = client.smart.lending(client.call("org/words"), purpose)
        loan.__enter__()
        plain_file(client.hub, client.cache, "org/words", "vocab.json")
        with pytest.raises(DigestMismatchError):
            loan.__exit__(None, None, None)

    def test_the_next_loading_is_right(self, client: Client) -> None:
        client.hub.faults.wrong_bytes("unet", times=1)
        with pytest.raises(DigestMismatchError):
            load(client, "org/first")
        assert (load(client, "org/first") / UNET_PATH).read_bytes() == UNET

    @pytest.mark.parametrize("offline", [False, True])
    def test_a_weight_that_was_written_to_is_never_loaded(
        self, client: Client, offline: bool
    ) -> None:
        path = load(client, "org/first")
        edit(Path(os.path.realpath(path / UNET_PATH)), OTHER)
        if offline:
            with pytest.raises(DigestMismatchError):
                load(client, "org/first", local_files_only=True)
            assert not (path / UNET_PATH).exists()
        else:
            load(client, "org/first")
            assert (path / UNET_PATH).read_bytes() == UNET

    def test_what_was_in_the_cache_before_is_proven(self, client: Client) -> None:
        path = plain_snapshot(client.hub, client.cache, "org/first")
        edit(Path(os.path.realpath(path / UNET_PATH)), OTHER)
        load(client, "org/first")
        assert (path / UNET_PATH).read_bytes() == UNET


@pytest.mark.usefixtures("repos")
class TestWithoutTheHub:
    def test_local_files_only_asks_nothing(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.clear()
        path = load(client, "org/first", local_files_only=True)
        assert client.hub.requests == []
        assert (path / UNET_PATH).read_bytes() == UNET

    def test_a_full_or_broken_store_does_not_keep_anybody_from_loading(
        self, client: Client
    ) -> None:
        index = Path(client.store.volume.layout.index)
        client.hub.faults.wrong_bytes("text_encoder")
        loan = lending(client, "org/first")
        loan.__enter__()
        path = plain_file(client.hub, client.cache, "org/first", UNET_PATH)
        with sqlite3.connect(index) as other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON meta BEGIN "
                          "SELECT RAISE(ABORT, 'database or disk is full'); END")  # fmt: skip
        loan.__exit__(None, None, None)
        assert path.read_bytes() == UNET

    def test_a_hub_that_fails_is_left_to_the_library(self, client: Client) -> None:
        client.hub.faults.status("/revision/", 500, times=1)
        with lending(client, "org/first") as commit:
            assert commit == ""
            plain_file(client.hub, client.cache, "org/first", UNET_PATH)
        assert client.store.find("sha256", sha256(UNET)) is not None

    def test_force_download_fetches_and_proves(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.clear()
        load(client, "org/first", force_download=True)
        assert client.hub.fetched_bytes(UNET_PATH) == len(UNET)
        assert_undamaged(client)


@pytest.mark.usefixtures("repos")
class TestWithoutSymlinks:
    """As on systems that have none: snapshots are full of files."""

    @pytest.fixture(autouse=True)
    def _no_symlinks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)

    def test_known_bytes_are_not_fetched_again(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.clear()
        path = load(client, "org/second")
        assert not (path / ENCODER_PATH).is_symlink()
        assert client.hub.gets(ENCODER_PATH) == []
        assert {name: (path / name).read_bytes() for name in SECOND} == SECOND
        assert_undamaged(client)

    @pytest.mark.parametrize("part", ["unet", "model_index"])
    def test_what_came_wrong_is_raised_and_not_visible(self, client: Client, part: str) -> None:
        client.hub.faults.wrong_bytes(part)
        with pytest.raises(DigestMismatchError, match=part):
            load(client, "org/first")
        path = load(client, "org/first")
        assert {name: (path / name).read_bytes() for name in FIRST} == FIRST

    def test_what_was_written_to_is_never_loaded(self, client: Client) -> None:
        path = load(client, "org/first")
        edit(path / UNET_PATH, OTHER)
        load(client, "org/first")
        assert (path / UNET_PATH).read_bytes() == UNET


@pytest.mark.usefixtures("repos")
def test_on_another_filesystem_known_weights_are_copied(client: Client, elsewhere: Path) -> None:
    load(client, "org/first")
    client.cache = elsewhere / "hf"
    client.hub.clear()
    path = load(client, "org/second")
    assert client.hub.gets(ENCODER_PATH) == []
    assert (path / ENCODER_PATH).read_bytes() == ENCODER
    load(client, "org/first", "unet/*")
    assert blobs(client, "org/first") == {sha256(UNET)}
