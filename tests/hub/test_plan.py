"""A plan: where each file would come from, at the cost of two requests and some stats."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub.clients import SIZE, Client, contents, plain_snapshot, sha256, weights
from tests.hub.shared_stores import add_entry, make_shared_store
from tests.hub_server import Hub
from tests.store.files import edit, snapshot, write

NAME = "model.safetensors"
WANTED = weights(1)


def has_present(client: Client, tmp_path: Path) -> None:
    plain_snapshot(client.hub, client.cache, allow_patterns=[NAME])


def has_blob(client: Client, tmp_path: Path) -> None:
    client.store.put_stream([WANTED], algorithms=("sha256",))


def has_other_cache(client: Client, tmp_path: Path) -> None:
    cache = tmp_path / "other"
    plain_snapshot(client.hub, cache, allow_patterns=[NAME])
    client.store.add_folder(cache, program="Hugging Face")


def has_shared_store(client: Client, tmp_path: Path) -> None:
    cache = tmp_path / "native"
    make_shared_store(cache)
    add_entry(cache, "e" * 64, WANTED)
    client.store.add_folder(cache, program="Hugging Face")


def has_file(client: Client, tmp_path: Path) -> None:
    write(tmp_path / "given" / "any name.ckpt", WANTED)
    client.store.add_folder(tmp_path / "given")


def has_far_file(client: Client, elsewhere: Path) -> None:
    write(elsewhere / "any name.ckpt", WANTED)
    client.store.add_folder(elsewhere)


def test_sources_come_in_the_order_of_their_cost(
    client: Client, hub: Hub, tmp_path: Path, elsewhere: Path
) -> None:
    """Each that is added comes before all that were there."""
    hub.add("org/name", {NAME: WANTED}, xet={NAME: "e" * 64})
    hub.add("org/small", {"config.json": b"{}"})
    steps: list[tuple[Callable[[Client, Path], None] | None, Path, str, Path | None]] = [
        (None, tmp_path, "fetch", None),
        (has_far_file, elsewhere, "copy", elsewhere / "any name.ckpt"),
        (has_file, tmp_path, "reuse", tmp_path / "given" / "any name.ckpt"),
        (has_shared_store, tmp_path, "reuse", tmp_path / "native" / "blobs" / "ee" / ("e" * 64)),
    ]
    for add, where, source, origin in steps:
        if add is not None:
            add(client, where)
        client.smart.look_again()
        (planned,) = client.plan().files
        assert (planned.source, planned.origin) == (source, origin)


@pytest.mark.parametrize(
    ("add", "source"),
    [(has_blob, "link"), (has_other_cache, "reuse"), (has_present, "present"), (has_file, "reuse")],
)
def test_a_plan_says_where_a_file_comes_from(
    client: Client, hub: Hub, tmp_path: Path, add: Callable[[Client, Path], None], source: str
) -> None:
    hub.add("org/name", {NAME: WANTED, "config.json": b"{}"})
    add(client, tmp_path)
    plan = client.plan()
    assert {each.file.path: each.source for each in plan.files} == {
        NAME: source, "config.json": "fetch",
    }  # fmt: skip
    is_present = source == "present"
    assert plan.fetch_size == 2
    assert plan.present_size == (SIZE if is_present else 0)
    assert plan.saved_size == (0 if is_present else SIZE)
    assert plan.unproven_size == (0 if source == "link" else SIZE)
    assert not plan.is_done


def test_the_store_comes_before_files_that_must_be_hashed(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", {NAME: WANTED})
    has_file(client, tmp_path)
    has_other_cache(client, tmp_path)
    assert client.sources() == {NAME: "reuse"}
    has_blob(client, tmp_path)
    (planned,) = client.plan().files
    assert (planned.source, planned.candidates) == ("link", ())
    has_present(client, tmp_path)
    assert client.sources() == {NAME: "present"}


def test_a_named_blob_of_another_cache_comes_before_files_of_the_same_size(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", {NAME: WANTED})
    write(tmp_path / "given" / NAME, weights(2))
    client.store.add_folder(tmp_path / "given")
    has_other_cache(client, tmp_path)
    (planned,) = client.plan().files
    assert [each.path.name for each in planned.candidates] == [sha256(WANTED), NAME]


def test_a_plan_changes_nothing_but_what_is_remembered(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", {NAME: WANTED, "config.json": b"{}", "b.bin": weights(2)})
    home = Path(os.environ["HOME"])
    write(home / "ComfyUI" / "models" / "vae" / "x.bin", weights(2))
    has_file(client, tmp_path)
    has_other_cache(client, tmp_path)
    client.plan()

    def files() -> dict[str, tuple[object, ...]]:
        found = {**snapshot(tmp_path), **snapshot(home)}
        return {name: each for name, each in found.items() if "index.sqlite3" not in name}

    before = files()
    plan = client.plan()
    client.plan(local_dir=tmp_path / "local")
    assert plan.saved_size == 2 * SIZE
    assert files() == before
    assert not client.cache.exists()
    assert not (tmp_path / "local").exists()
    assert list(client.store.blobs()) == []
    assert client.store.history() == []


def test_a_plan_reads_no_file(client: Client, hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", {NAME: WANTED})
    write(tmp_path / "given" / NAME, weights(2), age=1000)
    client.store.add_folder(tmp_path / "given")
    path = tmp_path / "given" / NAME
    os.utime(path, ns=(1, os.stat(path).st_mtime_ns))
    plan = client.plan()
    assert plan.saved_size == SIZE
    assert os.stat(path).st_atime_ns == 1
    assert client.store.known_hashes([path]) == {path: {}}


def test_a_plan_asks_for_the_commit_and_the_listing_and_for_no_file(
    client: Client, hub: Hub
) -> None:
    commit = hub.add("org/name", {f"d/{n}.bin": weights(n, 70_000) for n in range(20)}).sha
    for hub.page_size in (1000, 7):
        hub.clear()
        pages = -(-21 // hub.page_size)
        assert len(client.plan().files) == 20
        assert [each.path for each in hub.requests] == [
            "/api/models/org/name/revision/main",
            *[f"/api/models/org/name/tree/{commit}"] * pages,
        ]
        hub.clear()
        client.plan(revision=commit)
        assert len(hub.requests) == pages


def test_executing_a_plan_asks_no_more_than_huggingface_hub_and_one_head_per_fetched_file(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    files = {"config.json": b"{}", NAME: WANTED, "b.bin": weights(2)}
    hub.add("org/name", files)
    plain_snapshot(hub, tmp_path / "plain")
    plain = [str(each) for each in hub.requests]
    hub.clear()
    client.snapshot()
    ours = [str(each) for each in hub.requests]
    assert len(hub.gets()) == 3
    assert len(hub.heads()) == 3
    assert len(ours) <= len(plain) + 2  # commit and listing, asked for once more


def test_with_every_weight_known_no_request_is_made_for_one(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    files = {f"{n}.bin": weights(n) for n in range(5)}
    hub.add("org/one", files)
    hub.add("org/two", files)
    client.snapshot("org/one")
    hub.clear()
    client.snapshot("org/two")
    assert hub.gets() == []
    assert len(hub.heads()) <= 5  # huggingface_hub's own, to make pointers
    assert len(hub.api()) <= 4


def test_a_listing_on_disk_is_not_asked_for_again(client: Client, hub: Hub) -> None:
    hub.add("org/name", {NAME: WANTED, "config.json": b"{}"})
    client.snapshot(allow_patterns=["*.json"])
    hub.clear()
    assert client.sources() == {NAME: "fetch", "config.json": "present"}
    assert [str(each) for each in hub.requests] == ["GET /api/models/org/name/revision/main"]


def test_what_is_known_to_be_wrong_is_not_present(
    client: Client, hub: Hub, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    hub.add("org/name", {NAME: WANTED})
    path = Path(os.path.realpath(plain_snapshot(hub, client.cache) / NAME))
    edit(path, b"WRONG", offset=77)
    pass_time(10)
    client.store.digest_of(path, ("blake3", "sha256"))
    assert client.sources() == {NAME: "fetch"}
    assert (client.snapshot() / NAME).read_bytes() == WANTED


def test_a_finished_download_has_nothing_left_to_do_unless_forced(client: Client, hub: Hub) -> None:
    hub.add("org/name", {NAME: WANTED, "config.json": b"{}"})
    plan = client.plan()
    first = plan.execute().path
    before = contents(client.cache)
    assert plan.execute().path == first  # executed twice
    assert contents(client.cache) == before
    plan = client.plan()
    assert plan.is_done
    assert (plan.fetch_size, plan.saved_size, plan.unproven_size) == (0, 0, 0)
    assert plan.present_size == SIZE + 2
    plan = client.plan(force_download=True)
    assert {each.source for each in plan.files} == {"fetch"}
    assert plan.fetch_size == SIZE + 2


def test_a_blob_that_is_pruned_after_the_plan_is_fetched(client: Client, hub: Hub) -> None:
    hub.add("org/name", {NAME: WANTED})
    blob = client.store.put_stream([WANTED], algorithms=("sha256",))
    plan = client.plan()
    assert plan.saved_size == SIZE
    client.store.remove(blob.digest)
    path = Path(plan.execute())
    assert (path / NAME).read_bytes() == WANTED
    assert len(hub.gets()) == 1


def test_a_blob_that_was_damaged_is_fetched(client: Client, hub: Hub) -> None:
    hub.add("org/name", {NAME: WANTED})
    blob = client.store.put_stream([WANTED], algorithms=("sha256",))
    edit(client.store.path_of(blob.digest), b"WRONG", offset=500)
    plan = client.plan()
    path = Path(plan.execute())
    assert (path / NAME).read_bytes() == WANTED
    assert len(hub.gets()) == 1
    assert len(list((client.store.root / "bad").iterdir())) == 1
