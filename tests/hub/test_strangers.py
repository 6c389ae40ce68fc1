"""Downloads leave alone what is not theirs: strangers' files, edited texts, other names."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import huggingface_hub
import pytest

from smartcache.cache import SmartCache
from smartcache.errors import DigestMismatchError
from smartcache.hub.transfer import StoppedError, bar_class
from smartcache.system import faults
from tests.hub.clients import Client, as_ordinary_user, plain_snapshot, sha256, state_of, weights
from tests.hub_server import Hub

WANTED = weights(1)
FILES = {"config.json": b'{"a": 1}', "model.safetensors": WANTED}


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A file of somebody else that has the wanted bytes, last changed a while ago."""
    path = tmp_path / "strange" / "mine.safetensors"
    path.parent.mkdir()
    path.write_bytes(WANTED)
    os.utime(path, (1e9, 1e9))
    return path


def interrupted(client: Client, monkeypatch: pytest.MonkeyPatch, /, **more: object) -> None:
    """Begin a download and press Ctrl-C when the large files are there."""

    def hook(place: str) -> None:
        if place == "download: large files there":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(faults, "hook", hook)
        with pytest.raises(KeyboardInterrupt):
            client.snapshot(**more)


class TestFiles:
    def test_what_lies_below_a_cache_but_is_no_part_of_it_is_copied(
        self, client: Client, hub: Hub
    ) -> None:
        """`cache_dir` may be a folder with everything in it."""
        path = client.cache / "ComfyUI" / "models" / "checkpoints" / "mine.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(WANTED)
        os.utime(path, (1e9, 1e9))
        client.smart.scan(client.cache / "ComfyUI")
        before = state_of(path)
        hub.add("org/name", FILES)
        assert client.sources()["model.safetensors"] == "reuse"
        client.snapshot()
        assert hub.gets("model.safetensors") == []
        assert state_of(path) == before

    def test_a_file_behind_a_symlink_of_a_local_dir_is_only_read(
        self, client: Client, hub: Hub, stranger: Path, tmp_path: Path
    ) -> None:
        hub.add("org/name", FILES)
        local = tmp_path / "local"
        local.mkdir()
        (local / "model.safetensors").symlink_to(stranger)
        tmp_path.chmod(0o777)
        before = state_of(stranger)
        client.snapshot(local_dir=local)
        assert state_of(stranger) == before
        assert os.readlink(local / "model.safetensors") == str(stranger)
        assert hub.gets("model.safetensors") == []

    @pytest.mark.parametrize("is_right", [True, False])
    def test_a_file_behind_a_symlink_in_blobs_is_neither_adopted_nor_moved(
        self, client: Client, hub: Hub, stranger: Path, is_right: bool
    ) -> None:
        """Some people keep large blobs on another drive."""
        hub.add("org/name", FILES)
        spot = client.cache / "models--org--name" / "blobs" / sha256(WANTED)
        spot.parent.mkdir(parents=True)
        spot.symlink_to(stranger)
        if not is_right:
            stranger.write_bytes(weights(2))
        before, data = state_of(stranger), stranger.read_bytes()
        path = client.snapshot()
        assert (path / "model.safetensors").read_bytes() == WANTED
        assert state_of(stranger) == before
        assert stranger.read_bytes() == data
        assert bool(hub.gets("model.safetensors")) != is_right

    def test_a_dangling_symlink_in_blobs_is_replaced_by_what_the_store_has(
        self, client: Client, hub: Hub
    ) -> None:
        hub.add("org/name", FILES)
        hub.add("org/other", FILES)
        client.snapshot("org/other")
        spot = client.cache / "models--org--name" / "blobs" / sha256(WANTED)
        spot.parent.mkdir(parents=True)
        spot.symlink_to("/nowhere/at/all")
        hub.clear()
        path = client.snapshot()
        assert (path / "model.safetensors").read_bytes() == WANTED
        assert hub.gets("model.safetensors") == []


class TestTexts:
    def test_a_large_text_of_another_repo_is_copied_and_stays_writable(
        self, client: Client, hub: Hub
    ) -> None:
        text = b'{"vocab": 1}' * 10_000
        hub.add("org/one", {"tokenizer.json": text})
        hub.add("org/two", {"tokenizer.json": text, "config.json": b"{}"})
        one = Path(os.path.realpath(client.snapshot("org/one") / "tokenizer.json"))
        before = state_of(one)
        hub.clear()
        two = client.snapshot("org/two") / "tokenizer.json"
        assert hub.gets("tokenizer.json") == []
        assert two.read_bytes() == text
        assert state_of(one) == before
        assert os.stat(two).st_nlink == 1
        assert os.stat(two).st_mode & 0o200

    @pytest.mark.parametrize("is_symlink", [True, False])
    def test_a_stale_text_of_the_same_size_is_not_written_through(
        self, client: Client, hub: Hub, tmp_path: Path, is_symlink: bool
    ) -> None:
        """The new version is in the HF cache: huggingface_hub copies over the old one in place."""
        hub.add("org/name", {"config.json": b'{"a": 2}'})
        client.snapshot()
        backup, local = tmp_path / "backup.json", tmp_path / "local"
        backup.write_bytes(b'{"a": 1}')
        local.mkdir()
        if is_symlink:
            (local / "config.json").symlink_to(backup)
        else:
            (local / "config.json").hardlink_to(backup)
        client.snapshot(local_dir=local)
        assert backup.read_bytes() == b'{"a": 1}'
        assert (local / "config.json").read_bytes() == b'{"a": 2}'

    def test_an_edited_text_of_the_cache_survives_an_interrupted_download(
        self, client: Client, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/name", {**FILES, "more.json": b"{}"})
        config = client.snapshot(allow_patterns="config.json") / "config.json"
        config.write_bytes(b'{"mine": true}')
        interrupted(client, monkeypatch)
        for _ in range(2):
            client.snapshot()
            assert config.read_bytes() == b'{"mine": true}'

    @pytest.mark.parametrize("more", [{}, {"local_files_only": True}], ids=["online", "local"])
    def test_own_files_of_a_local_dir_survive_an_interrupted_download(
        self,
        client: Client,
        hub: Hub,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        more: dict[str, object],
    ) -> None:
        hub.add("org/name", {**FILES, "README.md": b"of the repo"})
        own = tmp_path / "local" / "README.md"
        own.parent.mkdir()
        own.write_bytes(b"notes of my own")
        interrupted(client, monkeypatch, local_dir=own.parent)
        client.snapshot(local_dir=own.parent, allow_patterns="*.safetensors", **more)
        assert own.read_bytes() == b"notes of my own"

    def test_an_edited_text_of_a_local_dir_stays_as_huggingface_hub_leaves_it(
        self, client: Client, hub: Hub, tmp_path: Path
    ) -> None:
        hub.add("org/name", FILES)
        config = client.snapshot(local_dir=tmp_path / "local") / "config.json"
        config.write_bytes(b'{"mine": "and longer than it was"}')
        os.utime(config, (1e9, 1e9))
        for _ in range(2):
            client.snapshot(local_dir=tmp_path / "local")
            assert config.read_bytes() == b'{"mine": "and longer than it was"}'

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("model.safetensors", weights(5)),
            ("model.safetensors", weights(5, 70_000)),
            ("config.json", b"notes of my own"),
        ],
        ids=["same size", "other size", "text"],
    )
    @pytest.mark.parametrize("is_known", [True, False], ids=["in store", "to fetch"])
    def test_what_was_in_a_local_dir_and_not_from_the_hub_is_kept(
        self, client: Client, hub: Hub, tmp_path: Path, name: str, data: bytes, is_known: bool
    ) -> None:
        hub.add("org/name", FILES)
        if is_known:
            client.snapshot()
        own = tmp_path / "local" / name
        own.parent.mkdir()
        own.write_bytes(data)
        client.snapshot(local_dir=own.parent)
        assert own.read_bytes() == FILES[name]
        assert [path.read_bytes() for path in (client.store.root / "bad").iterdir()] == [data]
        assert not list(own.parent.glob(".*.smartcache"))

    def test_an_older_version_from_the_hub_is_not_kept(
        self, client: Client, hub: Hub, tmp_path: Path
    ) -> None:
        local = tmp_path / "local"
        for seed in (1, 2):
            hub.add("org/name", {"model.safetensors": weights(seed), "config.json": b"%d" % seed})
            client.snapshot(local_dir=local)
            assert (local / "model.safetensors").read_bytes() == weights(seed)
        assert list((client.store.root / "bad").glob("*")) == []

    def test_a_text_that_was_just_edited_stays_when_the_hub_fails(
        self, client: Client, hub: Hub
    ) -> None:
        hub.add("org/name", FILES)
        path = client.snapshot()
        (path / "config.json").write_bytes(b'{"mine": 2}')
        hub.faults.status("/api/", 500, times=1000, method="")
        assert client.snapshot() == path
        assert (path / "config.json").read_bytes() == b'{"mine": 2}'


class TestPlaces:
    def test_a_cache_that_is_mounted_read_only_can_be_used(
        self, client: Client, hub: Hub, tmp_path: Path
    ) -> None:
        """As containers have it, from the disk that the store is on."""
        hub.add("org/name", FILES)
        team, mounted = tmp_path / "team", tmp_path / "mounted"
        plain_snapshot(hub, team)
        mounted.mkdir()
        for words in (["--bind", str(team), str(mounted)], ["-o", "remount,ro,bind", str(mounted)]):
            if subprocess.run(["mount", *words], check=False, capture_output=True).returncode:
                pytest.skip("nothing can be mounted here")
        try:
            for more in ({}, {}, {"local_files_only": True}):
                path = client.snapshot(cache_dir=mounted, **more)
                assert (path / "model.safetensors").read_bytes() == WANTED
            hub.clear()
            client.snapshot()  # to another cache: claimed from the mounted one
            assert hub.gets("model.safetensors") == []
        finally:
            subprocess.run(["umount", str(mounted)], check=True)

    @pytest.mark.parametrize("name", ["e" * 64, "0123456789abcdef"])
    def test_a_pointer_to_a_blob_of_another_hash_is_made_anew(
        self, client: Client, hub: Hub, name: str
    ) -> None:
        """One to a name that is no hash is left: behind some mirrors the ETag is none."""
        hub.add("org/name", FILES)
        path = client.snapshot()
        pointer = path / "model.safetensors"
        blob = Path(os.path.realpath(pointer))
        other = blob.with_name(name)
        os.link(blob, other)
        pointer.unlink()
        pointer.symlink_to(f"../../blobs/{other.name}")
        hub.clear()
        client.snapshot()
        assert os.readlink(pointer).endswith(blob.name if len(name) == 64 else name)
        assert hub.gets("model.safetensors") == []

    @pytest.mark.parametrize("is_near", [True, False])
    def test_a_failed_download_gives_a_name_of_a_local_dir_back(
        self, client: Client, hub: Hub, tmp_path: Path, elsewhere: Path, is_near: bool
    ) -> None:
        """Also where the store is on another disk: the file stays on its own."""
        hub.add("org/name", FILES)
        disk = tmp_path if is_near else elsewhere
        local, backup = disk / "local", disk / "backup.safetensors"
        local.mkdir()
        backup.write_bytes(weights(9))
        os.link(backup, local / "model.safetensors")
        hub.faults.status("model.safetensors", 403, times=1000, method="")
        with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
            client.snapshot(local_dir=local)
        assert os.path.samefile(backup, local / "model.safetensors")
        assert sorted(path.name for path in local.iterdir()) == [".cache", "model.safetensors"]

    def test_old_versions_of_a_local_dir_can_be_pruned(self, hub: Hub, tmp_path: Path) -> None:
        def work() -> tuple[int, int]:
            with SmartCache(root / "store") as smart:
                client = Client(smart, hub, root / "hf")
                for branch in ("one", "two"):
                    client.snapshot(local_dir=root / "local", revision=branch, token=False)
                plan = client.store.plan_prune()
                local = (root / "local" / "model.safetensors").stat().st_nlink
                return len(plan.victims), local

        root = tmp_path / "of-an-ordinary-user"
        root.mkdir()
        root.chmod(0o777)
        for each in (tmp_path, *list(tmp_path.parents)[:3]):
            each.chmod(each.stat().st_mode | 0o005)
        for seed, branch in enumerate(("one", "two")):
            hub.add("org/name", {"model.safetensors": weights(seed)}, revision=branch)
        victims, links = as_ordinary_user(work)
        assert (victims, links) == (1, 2)

    def test_wrong_bytes_in_a_cache_that_cannot_be_written_are_named(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        hub.add("org/name", FILES)
        root = tmp_path / "of-an-ordinary-user"
        root.mkdir()
        root.chmod(0o777)
        for each in (tmp_path, *list(tmp_path.parents)[:3]):
            each.chmod(each.stat().st_mode | 0o005)
        path = plain_snapshot(hub, root / "hf") / "model.safetensors"
        Path(os.path.realpath(path)).write_bytes(weights(3))

        def work() -> str:
            with SmartCache(root / "store") as smart:
                try:
                    Client(smart, hub, root / "hf").snapshot(token=False)
                except DigestMismatchError as error:
                    return str(error)
            return ""

        message = as_ordinary_user(work)
        assert "model.safetensors has wrong bytes and cannot be removed" in message


class TestBars:
    def test_bytes_of_xet_files_are_counted_once(self) -> None:
        """huggingface_hub tells of bytes that came and of bytes written."""
        counted: list[int] = []
        arrived: list[int] = []
        stopping = threading.Event()
        make = bar_class(counted.append, arrived.append, stopping)
        bar = make(total=100, initial=5, desc="x", unit="B")
        with bar:
            bar.update(40)
            bar.update_transfer(30)
            bar.set_transfer_postfix_str("1 MB/s", refresh=False)
        assert (counted, arrived) == ([5, 40], [40]), "what was there has not come now"
        stopping.set()
        for tell in (bar.update, bar.update_transfer):
            with pytest.raises(StoppedError):
                tell(1)
