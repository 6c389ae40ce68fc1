"""Downloads of libraries that are answered out of the store.

The library is huggingface_hub itself: it takes what it is told to.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import file_download

import smartcache
from smartcache.errors import DigestMismatchError, UnsafeNameError
from smartcache.hub import patches, serving
from tests.hub.clients import (
    Client,
    assert_sound,
    contents,
    plain_file,
    plain_snapshot,
    sha256,
    weights,
)
from tests.hub.shared_stores import make_shared_store
from tests.hub_server import Hub
from tests.store.files import edit, inode_of, link_count, mode_of, write

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


def attending(client: Client, name: str, **more: object) -> AbstractContextManager[str]:
    return client.smart.attending(client.call(name, **more))


def load(client: Client, name: str, *patterns: str, **more: object) -> Path:
    """Load a repo as a library would that wants these files (all, if there are none)."""
    with attending(client, name, **more):
        return plain_snapshot(
            client.hub, client.cache, name, allow_patterns=list(patterns) or None, **more
        )


def blobs(client: Client, name: str) -> set[str]:
    folder = client.cache / f"models--{name.replace('/', '--')}" / "blobs"
    return set(os.listdir(folder)) if folder.is_dir() else set()


@pytest.mark.usefixtures("repos")
class TestAnswers:
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

    def test_what_nobody_wants_does_not_come(self, client: Client) -> None:
        load(client, "org/first")
        load(client, "org/second", "unet/*")
        assert sha256(ENCODER) not in blobs(client, "org/second")
        assert_sound(client)

    def test_the_result_is_the_cache_that_huggingface_hub_makes(
        self, client: Client, tmp_path: Path
    ) -> None:
        load(client, "org/first")
        load(client, "org/second")
        plain_snapshot(client.hub, tmp_path / "plain", "org/first")
        plain_snapshot(client.hub, tmp_path / "plain", "org/second")
        assert contents(client.cache) == contents(tmp_path / "plain")

    def test_prune_leaves_what_is_used(self, client: Client) -> None:
        load(client, "org/first")
        load(client, "org/second")
        client.smart.store.plan_prune().execute()
        assert client.store.find("sha256", sha256(ENCODER)) is not None

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
        history = client.store.history()
        client.hub.clear()
        with attending(client, "org/first"):
            asked = len(client.hub.requests)
        assert asked == 1
        assert client.store.history() == history

    def test_others_may_load_at_the_same_time(self, client: Client) -> None:
        load(client, "org/first")
        with attending(client, "org/first"):
            other = threading.Thread(target=load, args=(client, "org/first"))
            other.start()
            other.join(30)
            assert not other.is_alive()

    def test_what_was_not_wanted_before_is_answered_later(self, client: Client) -> None:
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
        assert_sound(client)

    def test_also_what_came_from_another_repo(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.faults.wrong_bytes("unet")
        with pytest.raises(DigestMismatchError, match="unet"), attending(client, "org/first"):
            plain_snapshot(client.hub, client.cache, "org/second")
        assert sha256(OTHER) not in blobs(client, "org/second")

    def test_also_what_another_program_brings_meanwhile(self, client: Client) -> None:
        client.hub.faults.wrong_bytes("unet")
        block = attending(client, "org/first")
        block.__enter__()
        with patches.pausing():
            plain_snapshot(client.hub, client.cache, "org/first")
        with pytest.raises(DigestMismatchError, match="unet"):
            block.__exit__(None, None, None)

    def test_also_when_it_is_written_to_meanwhile(self, client: Client) -> None:
        path = load(client, "org/first")
        block = attending(client, "org/first")
        block.__enter__()
        edit(Path(os.path.realpath(path / UNET_PATH)), OTHER)
        with pytest.raises(DigestMismatchError, match="unet"):
            block.__exit__(None, None, None)

    def test_a_file_of_somebodys_own_is_left_where_it_is(
        self, client: Client, tmp_path: Path
    ) -> None:
        path = load(client, "org/first")
        mine = write(tmp_path / "merged.safetensors", OTHER)
        block = attending(client, "org/first")
        block.__enter__()
        os.unlink(path / UNET_PATH)
        os.symlink(mine, path / UNET_PATH)
        with pytest.raises(DigestMismatchError, match="unet"):
            block.__exit__(None, None, None)
        assert mine.read_bytes() == OTHER

    def test_an_unsafe_name_is_refused_in_a_thread_of_the_library_too(
        self, client: Client, tmp_path: Path
    ) -> None:
        client.hub.faults.other_etag("unet", "../../../../evil")
        with (
            pytest.raises(UnsafeNameError),
            attending(client, "org/first"),
            ThreadPoolExecutor(1) as pool,
        ):
            pool.submit(plain_file, client.hub, client.cache, "org/first", UNET_PATH).result()
        assert client.hub.gets("unet") == []
        assert not list(tmp_path.rglob("*evil*"))

    def test_small_files_are_proven_too(self, client: Client) -> None:
        client.hub.faults.wrong_bytes("model_index")
        with pytest.raises(DigestMismatchError, match="model_index"):
            load(client, "org/first")
        path = load(client, "org/first")
        assert (path / "model_index.json").read_bytes() == b"{}"

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

    @pytest.mark.parametrize("is_right", [True, False])
    def test_a_full_or_broken_store_does_not_keep_anybody_from_loading(
        self, client: Client, is_right: bool
    ) -> None:
        """But what comes is proven all the same."""
        client.store.catalog.known_folders()
        index = client.store.layout.index
        if not is_right:
            client.hub.faults.wrong_bytes("unet")
        raised = nullcontext() if is_right else pytest.raises(DigestMismatchError)
        with raised, attending(client, "org/first"):
            with sqlite3.connect(index) as other:
                other.execute("CREATE TRIGGER full BEFORE INSERT ON files BEGIN "
                              "SELECT RAISE(ABORT, 'database or disk is full'); END")  # fmt: skip
            path = plain_file(client.hub, client.cache, "org/first", UNET_PATH)
            assert path.read_bytes() == UNET

    def test_a_hub_that_fails_is_left_to_the_library(self, client: Client) -> None:
        client.hub.faults.status("/revision/", 500, times=1)
        with attending(client, "org/first") as commit:
            assert commit == ""
            plain_file(client.hub, client.cache, "org/first", UNET_PATH)
        assert client.store.find("sha256", sha256(UNET)) is not None

    def test_force_download_fetches_and_proves(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.clear()
        load(client, "org/first", force_download=True)
        assert client.hub.fetched_bytes(UNET_PATH) == len(UNET)
        assert_sound(client)


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
        assert_sound(client)

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


# the wrapper


@pytest.mark.usefixtures("repos")
class TestTheWrapper:
    """Of the function of huggingface_hub in which all its downloads meet."""

    @pytest.fixture(autouse=True)
    def original(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """Return the very function of huggingface_hub; whatever a test does, it is back after."""
        patches.uninstall()
        function = file_download._download_to_tmp_and_move  # noqa: SLF001
        monkeypatch.setattr(file_download, "_download_to_tmp_and_move", function)
        return function

    def now(self) -> Callable[..., None]:
        return file_download._download_to_tmp_and_move  # noqa: SLF001

    def test_is_put_there_once_and_taken_away_wholly(
        self, client: Client, original: Callable[..., None]
    ) -> None:
        load(client, "org/first")
        ours = self.now()
        assert ours is not original
        load(client, "org/second")
        assert self.now() is ours
        patches.uninstall()
        assert self.now() is original

    def test_stays_while_somebody_needs_it(self, client: Client) -> None:
        with attending(client, "org/first"):
            ours = self.now()
            patches.uninstall()
            assert self.now() is ours

    def test_is_left_where_somebody_has_wrapped_it(
        self, client: Client, original: Callable[..., None]
    ) -> None:
        load(client, "org/first")
        ours = self.now()

        def theirs(*args: object, **kwargs: object) -> None:
            ours(*args, **kwargs)

        file_download._download_to_tmp_and_move = theirs  # noqa: SLF001
        patches.uninstall()
        assert self.now() is theirs
        client.hub.clear()
        plain_snapshot(client.hub, client.cache, "org/second")
        assert len(client.hub.gets(ENCODER_PATH)) == 1, "nobody answers"
        assert original is not theirs
        load(client, "org/first")

    def test_answers_through_the_wrapper_of_somebody_else(self, client: Client) -> None:
        """Whether that was put over ours, or ours over that."""
        load(client, "org/first")
        inner = self.now()
        called: list[str] = []

        def theirs(**kwargs: object) -> None:
            called.append(str(kwargs["filename"]))
            inner(**kwargs)

        file_download._download_to_tmp_and_move = theirs  # type: ignore[assignment]  # noqa: SLF001
        client.hub.clear()
        path = load(client, "org/second")
        assert {name: (path / name).read_bytes() for name in SECOND} == SECOND
        assert client.hub.gets(ENCODER_PATH) == []
        assert set(called) <= set(SECOND)

    def test_leaves_a_version_alone_that_it_does_not_know(self, client: Client) -> None:
        def other(target: object, **kwargs: object) -> None:
            raise AssertionError

        file_download._download_to_tmp_and_move = other  # type: ignore[assignment]  # noqa: SLF001
        with attending(client, "org/first"):
            assert self.now() is other

    def test_passes_through_while_it_is_paused(self, client: Client) -> None:
        load(client, "org/first")
        client.hub.clear()
        with attending(client, "org/second"), patches.pausing():
            plain_snapshot(client.hub, client.cache, "org/second")
        assert len(client.hub.gets(ENCODER_PATH)) == 1


@pytest.mark.usefixtures("repos")
class TestXet:
    """huggingface_hub moves what it fetched from Xet to a store of its own, and changes its mode.

    The server announces Xet hashes, but there is no Xet server: what is answered needs none.
    """

    def test_what_is_answered_stays_a_link_in_the_repo(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
        if not hasattr(file_download, "publish_blob_to_shared_store"):
            pytest.skip("a version without such a store")
        load(client, "org/first")
        make_shared_store(client.cache)
        before = link_count(client.blob_of(ENCODER))
        client.hub.add("org/second", SECOND, xet={ENCODER_PATH: "ab" * 32})
        client.hub.xet_headers = True
        path = load(client, "org/second", ENCODER_PATH)
        blob = Path(os.path.realpath(path / ENCODER_PATH))
        assert blob.parent.name == "blobs"
        assert blob.parent.parent.name == "models--org--second"
        assert inode_of(blob) == inode_of(client.blob_of(ENCODER))
        assert mode_of(blob) == 0o444
        assert link_count(blob) == before + 1
        assert_sound(client)


@pytest.mark.usefixtures("repos")
class TestPlaces:
    def test_a_local_dir_gets_what_is_known(self, client: Client, tmp_path: Path) -> None:
        load(client, "org/first")
        client.hub.clear()
        with attending(client, "org/second"):
            plain_snapshot(
                client.hub, tmp_path / "no-cache", "org/second", local_dir=tmp_path / "local"
            )
        assert client.hub.gets(ENCODER_PATH) == []
        assert (tmp_path / "local" / ENCODER_PATH).read_bytes() == ENCODER
        assert_sound(client)

    def test_a_mapping_names_further_files_and_gets_what_was_loaded(
        self, client: Client, tmp_path: Path
    ) -> None:
        mine = write(tmp_path / "mine.bin", ENCODER)
        lie = write(tmp_path / "lie.bin", OTHER)
        mapping = {sha256(ENCODER): str(mine), sha256(UNET): str(lie)}
        with client.smart.attending(client.call("org/first"), mapping=mapping):
            path = plain_snapshot(client.hub, client.cache, "org/first")
        assert client.hub.gets(ENCODER_PATH) == []
        assert len(client.hub.gets(UNET_PATH)) == 1, "what is wrong is not believed"
        assert mapping == {
            sha256(ENCODER): os.path.realpath(path / ENCODER_PATH),
            sha256(UNET): os.path.realpath(path / UNET_PATH),
        }
        assert lie.read_bytes() == OTHER


def test_hugging_face_functions_bound_before_are_answered(client: Client, hub: Hub) -> None:
    bound, api = huggingface_hub.hf_hub_download, huggingface_hub.HfApi(endpoint=hub.url)
    hub.add("org/first", FIRST)
    hub.add("org/second", SECOND)
    load(client, "org/first")
    hub.clear()
    with attending(client, "org/second"):
        bound("org/second", ENCODER_PATH, cache_dir=client.cache, endpoint=hub.url)
        api.snapshot_download("org/second", cache_dir=client.cache)
    assert hub.gets(ENCODER_PATH) == []


class TestSeveralAtOnce:
    def test_a_load_hears_of_its_own_wrong_bytes_alone(self, client: Client, hub: Hub) -> None:
        """Even if its library goes on with something else, and another load has begun since."""
        hub.add("org/bad", {"model.safetensors": weights(50)})
        hub.add("org/good", {"model.safetensors": weights(51)})
        hub.faults.wrong_bytes("org/bad/model")
        other_began, wrong_came = threading.Event(), threading.Event()

        def load_bad() -> None:
            with attending(client, "org/bad"), ThreadPoolExecutor(1) as pool:
                assert other_began.wait(60)
                got = pool.submit(plain_file, hub, client.cache, "org/bad", "model.safetensors")
                assert isinstance(got.exception(60), DigestMismatchError)
                wrong_came.set()

        def load_good() -> Path:
            with attending(client, "org/good"):
                other_began.set()
                assert wrong_came.wait(60)
                return plain_file(hub, client.cache, "org/good", "model.safetensors")

        with ThreadPoolExecutor(2) as pool:
            bad, good = pool.submit(load_bad), pool.submit(load_good)
            assert good.result(60).read_bytes() == weights(51)
            assert isinstance(bad.exception(60), DigestMismatchError)

    def test_files_of_one_repo_that_threads_want_come_once_each(
        self, client: Client, hub: Hub
    ) -> None:
        files = {f"{number}.safetensors": weights(60 + number) for number in range(6)}
        for name in ("org/one", "org/two"):
            hub.add(name, files)
        hub.bandwidth = 2_000_000
        wanted = [(name, file) for file in files for name in ("org/one", "org/two")]
        with ThreadPoolExecutor(len(wanted)) as pool:
            paths = list(pool.map(lambda each: client.file(*each), wanted))
        assert [len(hub.gets(file)) for file in files] == [1] * len(files)
        for path, (_, file) in zip(paths, wanted, strict=True):
            assert path.read_bytes() == files[file]
        assert_sound(client)


@pytest.mark.usefixtures("repos")
@pytest.mark.parametrize("is_right", [True, False])
def test_without_any_store_what_comes_is_proven(client: Client, is_right: bool) -> None:
    if not is_right:
        client.hub.faults.wrong_bytes("unet")
    raised = nullcontext() if is_right else pytest.raises(DigestMismatchError, match="unet")
    with serving(lambda: None), raised:
        path = plain_snapshot(client.hub, client.cache, "org/first")
        assert {name: (path / name).read_bytes() for name in FIRST} == FIRST
    assert is_right or sha256(UNET) not in blobs(client, "org/first")


@pytest.mark.parametrize("words", [("org/name", "config.json"), ("org/name",)])
def test_a_resolved_revision_is_the_commit_that_it_was(
    client: Client, hub: Hub, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """And no branch moves back to it."""
    resolve = getattr(huggingface_hub.HfApi, "resolve_revision", None)
    if resolve is None:
        pytest.skip("a version without it")
    hub.add("org/name", {"config.json": b"1"})
    pinned = resolve(huggingface_hub.HfApi(endpoint=hub.url), "org/name", cache_dir=client.cache)
    newest = hub.add("org/name", {"config.json": b"2"}).sha
    options = {"cache_dir": client.cache, "endpoint": hub.url}
    download = getattr(smartcache, "snapshot_download" if len(words) == 1 else "hf_hub_download")
    ref = client.cache / "models--org--name" / "refs" / "main"
    for revision, text in ((None, b"2"), (pinned, b"1"), (None, b"2"), (pinned, b"1")):
        path = Path(download(*words, revision=revision, **options))
        assert (path if path.is_file() else path / "config.json").read_bytes() == text
        assert ref.read_text() == newest
