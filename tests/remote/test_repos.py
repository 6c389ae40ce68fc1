"""A repo that one machine has pushed comes to another from the tier, and not from the Hub."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from blake3 import blake3

from smartcache.cache import SmartCache
from smartcache.errors import DamagedObjectError, MissingObjectError, RepoNotCachedError
from smartcache.remote import Tier, plan_pull, plan_push, verify_tier
from smartcache.store import sources
from tests.hub.bundles import everything, faults_of
from tests.hub.clients import Client, sha256, weights
from tests.hub_server import Hub

WEIGHTS = weights(1)
OTHER = weights(2, 300_000)
FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": weights(3, 90_000),
    "model.safetensors": WEIGHTS,
    "unet/model.safetensors": OTHER,
    "again/model.safetensors": WEIGHTS,
    "empty.txt": b"",
}
SIZE = sum(map(len, FILES.values())) - len(WEIGHTS)


@pytest.fixture
def pushed(here: Client, hub: Hub) -> str:
    """A repo that machine A has downloaded and pushed; returns its commit."""
    commit = hub.add("org/name", FILES)
    here.snapshot()
    push(here, "org/name")
    hub.requests.clear()
    return commit.sha


def push(client: Client, *words: str) -> tuple[int, int]:
    """Push; return how many objects were sent and how many were there."""
    smart = client.smart
    steps = plan_push(smart.store, smart.sets, smart.tier("nas"), words, caches=[client.cache])
    done = [step.execute() for step in steps]
    return sum(each.objects for each in done), sum(each.skipped for each in done)


def pull(client: Client, *words: str) -> int:
    """Pull; return how many bytes came."""
    smart = client.smart
    steps = plan_pull(smart.store, smart.sets, smart.tier("nas"), words, cache_dir=client.cache)
    return sum(step.execute().size for step in steps)


def contents(snapshot: Path) -> dict[str, bytes]:
    return {
        path.relative_to(snapshot).as_posix(): path.read_bytes()
        for path in snapshot.rglob("*")
        if path.is_file()
    }


def repo_in(client: Client) -> dict[str, tuple[str, bytes]]:
    """Return all that is in the folder of the repo."""
    return everything(client.cache / "models--org--name")


def object_of(share: Path, shared: Tier, data: bytes) -> Path:
    """Return the file that is the object with these bytes."""
    digest = blake3(data).hexdigest()
    assert shared.size_of(digest) == len(data)
    return share / "objects" / digest[:2] / digest


@pytest.mark.usefixtures("pushed")
class TestDownload:
    def test_no_byte_of_a_file_comes_from_the_hub(self, there: Client, hub: Hub) -> None:
        assert set(there.sources().values()) == {"tier"}
        hub.requests.clear()
        snapshot = there.snapshot()
        assert contents(snapshot) == FILES
        assert hub.requests.gets() == []
        assert there.store.find("sha256", sha256(OTHER)) is not None

    def test_one_file_comes_from_the_tier(self, there: Client, hub: Hub) -> None:
        path = there.file("org/name", "config.json")
        assert path.read_bytes() == FILES["config.json"]
        assert hub.requests.gets() == []

    def test_what_the_machine_has_is_not_asked_of_the_tier(
        self,
        there: Client,
    ) -> None:
        there.snapshot()
        again = there.plan()
        assert again.is_done
        assert again.tier_size == 0

    def test_the_result_says_what_came_from_tiers(self, there: Client) -> None:
        result = there.plan().execute()
        assert (result.fetched_size, result.taken_size, result.reused_size) == (
            0,
            SIZE,
            len(WEIGHTS),
        )

    def test_a_local_dir_is_filled_from_the_tier(
        self, there: Client, hub: Hub, tmp_path: Path
    ) -> None:
        target = tmp_path / "local"
        there.snapshot(local_dir=target)
        found = {name: data for name, data in contents(target).items() if ".cache" not in name}
        assert found == FILES
        assert hub.requests.gets() == []

    def test_a_file_of_the_users_own_is_not_replaced_by_the_tier(
        self, there: Client, tmp_path: Path
    ) -> None:
        target = tmp_path / "local"
        target.mkdir()
        (target / "config.json").write_bytes(b"mine")
        plan = there.plan(local_dir=target)
        assert {each.file.path: each.source for each in plan.files}["config.json"] == "fetch"

    def test_only_what_is_new_comes_from_the_hub(self, there: Client, hub: Hub) -> None:
        new = weights(9)
        hub.add("org/name", {**FILES, "new.safetensors": new})
        sources = there.sources()
        assert [name for name, source in sources.items() if source == "fetch"] == [
            "new.safetensors"
        ]
        there.snapshot()
        assert hub.requests.fetched_bytes() == len(new)

    def test_weights_of_another_repo_are_found_by_their_hash(self, there: Client, hub: Hub) -> None:
        hub.add("org/other", {"config.json": b"{}", "unet.safetensors": OTHER})
        assert there.sources("org/other") == {"config.json": "fetch", "unet.safetensors": "tier"}

    def test_force_download_asks_the_hub(self, there: Client) -> None:
        assert set(there.sources(force_download=True).values()) == {"fetch"}


@pytest.mark.usefixtures("pushed")
class TestFaults:
    def test_a_wrong_byte_is_named_and_the_hub_asked(
        self,
        there: Client,
        hub: Hub,
        share: Path,
        shared: Tier,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path = object_of(share, shared, OTHER)
        path.write_bytes(OTHER[:-1] + b"?")
        snapshot = there.snapshot()
        assert contents(snapshot) == FILES
        assert [each.file for each in hub.requests.gets()] == ["org/name/unet/model.safetensors"]
        assert path.name in caplog.text
        assert "is damaged" in caplog.text
        assert faults_of(there.cache) == []
        assert not there.store.verify(full=True).has_damage

    def test_a_small_file_with_a_wrong_byte_comes_from_the_hub(
        self, there: Client, hub: Hub, share: Path, shared: Tier
    ) -> None:
        data = FILES["config.json"]
        object_of(share, shared, data).write_bytes(b"x" * len(data))
        assert contents(there.snapshot()) == FILES
        assert hub.requests.fetched_bytes() == len(data)

    def test_a_missing_object_comes_from_the_hub(
        self,
        there: Client,
        hub: Hub,
        share: Path,
        shared: Tier,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        object_of(share, shared, OTHER).unlink()
        assert contents(there.snapshot()) == FILES
        assert hub.requests.fetched_bytes() == len(OTHER)
        assert "has no object" in caplog.text

    def test_a_name_that_leads_to_another_object_is_not_believed(
        self, there: Client, hub: Hub, shared: Tier
    ) -> None:
        """Of the right size, whole, and with the digest that the name says."""
        lie = shared.put_bytes(weights(77, len(OTHER)))
        shared.add_names(sources.Found(lie, len(OTHER)), {"sha256": sha256(OTHER)})
        hub.add("org/other", {"model.safetensors": OTHER})
        assert there.sources("org/other") == {"model.safetensors": "tier"}
        snapshot = there.snapshot("org/other")
        assert contents(snapshot) == {"model.safetensors": OTHER}
        assert hub.requests.fetched_bytes() == len(OTHER)

    def test_nor_is_a_document_that_names_another_object(
        self, there: Client, hub: Hub, share: Path, shared: Tier
    ) -> None:
        lie = shared.put_bytes(weights(77, len(OTHER)))
        (path,) = (share / "documents" / "repos" / "models--org--name").iterdir()
        document = json.loads(path.read_text())
        document["content"]["digests"][sha256(OTHER)] = lie
        path.write_text(json.dumps(document))
        assert contents(there.snapshot()) == FILES
        assert hub.requests.fetched_bytes() == len(OTHER)

    def test_a_tier_that_is_not_there_is_a_warning(
        self, there: Client, hub: Hub, share: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        share.rename(share.with_name("unmounted"))
        assert contents(there.snapshot()) == FILES
        assert hub.requests.fetched_bytes() > 0
        assert "the tier nas is left out" in caplog.text

    def test_a_tier_that_does_not_answer_is_left_out_soon(
        self,
        there: Client,
        hub: Hub,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        class Hanging:
            name = "hanging"

            def find(self, *_: str) -> None:
                threading.Event().wait()

            document = find

        monkeypatch.setattr(sources, "_PATIENCE", 0.2)
        there.store.open_sources = lambda: [Hanging()]  # type: ignore[list-item]
        hub.add("org/name", FILES)
        assert contents(there.snapshot()) == FILES
        assert "the tier hanging is left out: it has not answered" in caplog.text

    def test_an_object_that_stops_in_the_middle_is_given_up(
        self, there: Client, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (real,) = there.store.sources

        class Stopping:
            name = "stopping"
            find = real.find
            document = real.document

            def chunks(self, digest: str, *, size: int | None = None) -> Iterator[bytes]:
                yield next(real.chunks(digest, size=size))[:1000]
                threading.Event().wait()

        monkeypatch.setattr(sources, "_SILENCE", 0.2)
        there.store.open_sources = lambda: [Stopping()]
        assert contents(there.snapshot()) == FILES
        assert hub.requests.fetched_bytes() == SIZE
        assert list((there.store.root / "tmp").iterdir()) == []


@pytest.mark.usefixtures("pushed")
class TestPush:
    def test_pushing_twice_sends_nothing(self, here: Client, share: Path) -> None:
        before = sorted(share.rglob("*.json"))
        sent, there = push(here, "org/name")
        assert sent == 0
        assert there == len(set(FILES.values())) + 1  # and the listing of the Hub
        assert sorted(share.rglob("*.json")) == before

    def test_revisions_of_several_machines_stand_beside_each_other(
        self, pushed: str, there: Client, hub: Hub, tmp_path: Path
    ) -> None:
        second = hub.add("org/name", {"config.json": b"two"}).sha
        there.snapshot()
        push(there, "org/name")
        with SmartCache(tmp_path / "c" / "store") as smart:
            c = Client(smart, hub, tmp_path / "c" / "hf")
            pull(c, "org/name")
        snapshots = c.cache / "models--org--name" / "snapshots"
        assert set(os.listdir(snapshots)) == {pushed, second}
        assert (c.cache / "models--org--name" / "refs" / "main").read_text() == second
        assert faults_of(c.cache) == []

    def test_a_partial_snapshot_takes_no_file_from_the_tier(
        self, pushed: str, there: Client, shared: Tier
    ) -> None:
        there.file("org/name", "config.json")
        push(there, "org/name")
        document = shared.document("repos", "models--org--name")
        assert document is not None
        files = document["content"]["manifest"]["repos"][0]["revisions"][pushed]["files"]
        assert files.keys() == FILES.keys()

    def test_a_damaged_file_is_not_pushed(self, here: Client, hub: Hub) -> None:
        hub.add("org/name", FILES)
        snapshot = here.snapshot()
        path = Path(os.path.realpath(snapshot / "config.json"))
        path.write_bytes(b"{}")
        with pytest.raises(OSError, match="is damaged"):
            push(here, "org/name")

    def test_a_repo_that_is_not_here_is_an_error(self, here: Client) -> None:
        with pytest.raises(RepoNotCachedError):
            push(here, "org/none")

    def test_a_blob_is_pushed_and_pulled_by_its_digest(
        self, here: Client, there: Client, folder: Path
    ) -> None:
        data = weights(5)
        path = folder / "model.safetensors"
        path.write_bytes(data)
        digest = here.store.put_file(path).digest
        assert push(here, digest[:12]) == (1, 0)
        assert pull(there, digest[:12]) == len(data)
        assert pull(there, digest) == 0
        with there.store.open(digest) as file:
            assert file.read() == data
        assert not there.store.plan_prune().victims


@pytest.mark.usefixtures("pushed")
class TestPull:
    def test_a_repo_comes_whole_without_the_hub(
        self, here: Client, there: Client, hub: Hub
    ) -> None:
        assert pull(there, "org/name") > SIZE
        assert repo_in(there) == repo_in(here)
        assert faults_of(there.cache) == []
        assert hub.requests == []
        assert pull(there, "org/name") == 0

    def test_one_revision_is_enough(
        self, pushed: str, here: Client, there: Client, hub: Hub
    ) -> None:
        hub.add("org/name", {"config.json": b"two"})
        here.snapshot()
        push(here, "org/name")
        pull(there, f"org/name@{pushed[:8]}")
        assert os.listdir(there.cache / "models--org--name" / "snapshots") == [pushed]

    def test_a_wrong_byte_leaves_nothing_and_is_named(
        self, here: Client, there: Client, share: Path, shared: Tier
    ) -> None:
        path = object_of(share, shared, OTHER)
        path.write_bytes(OTHER[::-1])
        with pytest.raises(DamagedObjectError, match=f"{path.name} of the tier nas is damaged"):
            pull(there, "org/name")
        assert not (there.cache / "models--org--name" / "snapshots").exists()
        assert list((there.store.root / "tmp").iterdir()) == []
        path.write_bytes(OTHER)
        pull(there, "org/name")
        assert repo_in(there) == repo_in(here)

    def test_a_small_object_with_a_wrong_byte_is_named(
        self, there: Client, share: Path, shared: Tier
    ) -> None:
        path = object_of(share, shared, FILES["config.json"])
        path.write_bytes(b"x" * len(FILES["config.json"]))
        with pytest.raises(DamagedObjectError, match=path.name):
            pull(there, "org/name")
        assert faults_of(there.cache) == []

    def test_a_missing_object_is_named(self, there: Client, share: Path, shared: Tier) -> None:
        path = object_of(share, shared, OTHER)
        path.unlink()
        with pytest.raises(MissingObjectError, match=path.name):
            pull(there, "org/name")

    def test_what_is_not_there_is_said_with_what_is(self, there: Client) -> None:
        with pytest.raises(MissingObjectError) as caught:
            pull(there, "org/nme")
        assert "model/org/name" in caught.value.hint

    def test_a_document_that_means_harm_is_refused(
        self, there: Client, share: Path, tmp_path: Path
    ) -> None:
        (path,) = (share / "documents" / "repos" / "models--org--name").iterdir()
        document = json.loads(path.read_text())
        (revision,) = document["content"]["manifest"]["repos"][0]["revisions"].values()
        revision["files"]["../../../outside"] = revision["files"].pop("config.json")
        path.write_text(json.dumps(document))
        with pytest.raises(DamagedObjectError, match="leads outside its folder"):
            pull(there, "org/name")
        assert not (tmp_path / "there" / "outside").exists()


class TestWithoutTheHub:
    @pytest.fixture(autouse=True)
    def _unplugged(self, pushed: str, hub: Hub) -> None:  # noqa: ARG002 - first it is pushed
        hub.close()

    @pytest.fixture
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with HF_HUB_OFFLINE=1; else huggingface_hub tries for half a minute to get a file."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def test_a_snapshot_comes_from_the_tier(self, there: Client) -> None:
        assert contents(there.snapshot()) == FILES
        assert faults_of(there.cache) == []

    @pytest.mark.usefixtures("offline")
    def test_patterns_hold(self, there: Client) -> None:
        assert set(contents(there.snapshot(allow_patterns=["*.json"]))) == {
            "config.json",
            "tokenizer.json",
        }

    @pytest.mark.usefixtures("offline")
    def test_one_file_comes_alone(self, there: Client) -> None:
        path = there.file("org/name", "config.json")
        assert path.read_bytes() == FILES["config.json"]
        assert set(contents(path.parent)) == {"config.json"}

    def test_what_no_tier_has_is_the_error_of_huggingface_hub(self, there: Client) -> None:
        with pytest.raises(OSError, match=r"cache|connection|Hub"):
            there.snapshot("org/none")


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_a_repo_goes_through_a_bucket(
    server: str,
    here: Client,
    there: Client,
    hub: Hub,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Large enough for several parts; one server sends ranges, the other none."""
    options = {"endpoint": request.getfixturevalue(server), "region": "us-east-1"}
    here.smart.remotes.remove("nas")
    here.smart.remotes.add("nas", f"s3://bucket/{tmp_path.name}", options)
    files = {**FILES, "large.safetensors": weights(7, 20 << 20)}
    hub.add("org/name", files)
    here.snapshot()
    assert push(here, "org/name")[0] == len(set(files.values())) + 1
    assert push(here, "org/name")[0] == 0
    hub.requests.clear()
    assert contents(there.snapshot()) == files
    assert hub.requests.gets() == []
    assert verify_tier(here.smart.tier("nas")).findings == ()


def test_a_server_that_is_gone_is_a_warning(
    there: Client, hub: Hub, moto: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    gone = Tier("gone", url, {"endpoint": "http://127.0.0.1:9", "region": "us-east-1"})
    there.store.open_sources = lambda: [gone]
    hub.add("org/name", FILES)
    assert contents(there.snapshot()) == FILES
    assert "the tier gone is left out" in caplog.text
