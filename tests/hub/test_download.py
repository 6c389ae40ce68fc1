"""The result of a download: huggingface_hub's cache, byte for byte, and the store behind it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from smartcache.cache import SmartCache
from smartcache.errors import DigestMismatchError, HubError
from tests.hub.clients import (
    Client,
    as_ordinary_user,
    assert_sound,
    contents,
    plain_file,
    plain_snapshot,
    sha256,
    weights,
    wrong_blobs,
)
from tests.hub.shared_stores import add_entry, make_shared_store
from tests.hub_server import Hub
from tests.processes.children import NOBODY, folder_of
from tests.store.files import edit, inode_of, link_count, mode_of
from tests.store.files import snapshot as snapshot_of

MODEL = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b'{"b": 2}' * 10_000,
    "model.safetensors": weights(1),
    "unet/diffusion.safetensors": weights(2, 300_000),
    "unet/config.json": b"{}",
}
ODD = {
    "a b/with spaces.safetensors": weights(3),
    "größe/模型.safetensors": weights(4),
    "[x](y){z}.bin": weights(5),
    ".hidden/.gitattributes": b"* text",
    ".hidden.bin": weights(6),
    "100%25.safetensors": weights(7),
    "a#b.safetensors": weights(8),
    "a?b=c&d.safetensors": weights(9),
    "a+b.safetensors": weights(10),
    "same.bin": weights(11),
    "again/same.bin": weights(11),
    "no suffix": b"text",
    "empty.txt": b"",
    "empty.bin": b"",
    "tiny.bin": b"x",
    "quote'\".bin": weights(12),
    "big.json": weights(13),
}
Publish = Callable[[Hub], list[dict[str, object]]]


def plain_model(hub: Hub) -> list[dict[str, object]]:
    hub.add("org/name", MODEL)
    hub.add("gpt2", MODEL)  # of no organisation
    return [{}, {"name": "gpt2"}]


def odd_names(hub: Hub) -> list[dict[str, object]]:
    hub.add("org/name", ODD, lfs=["big.json"])
    return [{}]


def other_types(hub: Hub) -> list[dict[str, object]]:
    hub.add("org/name", {"data/train.parquet": weights(1), "README.md": b"#"}, repo_type="dataset")
    hub.add("org/name", {"app.py": b"print()", "m.gguf": weights(1)}, repo_type="space")
    return [{"repo_type": "dataset"}, {"repo_type": "space"}]


def revisions(hub: Hub) -> list[dict[str, object]]:
    first = hub.add("org/name", MODEL, tags=["v1"])
    hub.add("org/name", {**MODEL, "model.safetensors": weights(20)})
    hub.add("org/name", {**MODEL, "config.json": b"{}"}, revision="refs/pr/1")
    hub.add("org/name", {**MODEL, "new.bin": weights(21)}, revision="feature/x")
    names = ["v1", "main", "refs/pr/1", "feature/x", first.sha, None]
    return [{"revision": name} for name in names]


def patterns(hub: Hub) -> list[dict[str, object]]:
    hub.add("org/name", MODEL)
    hub.add("org/none", {})
    return [
        {"allow_patterns": "*.gguf"},
        {"allow_patterns": []},
        {"allow_patterns": "*.json"},
        {"allow_patterns": ["unet/"], "ignore_patterns": ["*.json"]},
        {"ignore_patterns": "*.safetensors"},
        {"ignore_patterns": []},
        {"name": "org/none"},
    ]


@pytest.mark.parametrize("publish", [plain_model, odd_names, other_types, revisions, patterns])
def test_the_cache_is_what_huggingface_hub_makes(
    client: Client, hub: Hub, tmp_path: Path, publish: Publish
) -> None:
    for arguments in publish(hub):
        name = str(arguments.pop("name", "org/name"))
        plain = plain_snapshot(hub, tmp_path / "plain", name, **arguments)
        ours = client.snapshot(name, **arguments)
        assert ours.relative_to(client.cache) == plain.relative_to(tmp_path / "plain")
        assert contents(client.cache) == contents(tmp_path / "plain")
    assert_sound(client)


@pytest.mark.parametrize(
    ("filename", "by"),
    [("model.safetensors", "main"), ("unet/config.json", "commit"), ("tokenizer.json", "tag")],
)
def test_one_file_is_cached_as_huggingface_hub_does(
    client: Client, hub: Hub, tmp_path: Path, filename: str, by: str
) -> None:
    commit = hub.add("org/name", MODEL, tags=["v1"])
    revision = {"main": "main", "commit": commit.sha, "tag": "v1"}[by]
    plain = plain_file(hub, tmp_path / "plain", "org/name", filename, revision=revision)
    ours = client.file("org/name", filename, revision=revision)
    assert ours.relative_to(client.cache) == plain.relative_to(tmp_path / "plain")
    assert contents(client.cache) == contents(tmp_path / "plain")
    assert_sound(client)


def test_weights_become_blobs_and_the_rest_stays_huggingface_hubs_own(
    client: Client, hub: Hub
) -> None:
    hub.add("org/name", {**MODEL, "lfs.json": weights(3), "s.bin": weights(4, 9)}, lfs=["lfs.json"])
    snapshot = client.snapshot()
    assert {blob.size for blob in client.store.blobs()} == {100_000, 300_000}
    for name in ("model.safetensors", "unet/diffusion.safetensors"):
        assert os.path.samefile(snapshot / name, client.blob_of(MODEL[name]))
        assert mode_of(os.path.realpath(snapshot / name)) == 0o444
    for name in ("config.json", "tokenizer.json", "lfs.json", "s.bin"):
        path = os.path.realpath(snapshot / name)
        assert link_count(path) == 1
        assert mode_of(path) & 0o200


def test_every_byte_is_fetched_once(client: Client, hub: Hub) -> None:
    """Also if a file is twice in a repo, and behind a redirect."""
    hub.add("org/name", {**MODEL, "copy.safetensors": MODEL["model.safetensors"]})
    snapshot = client.snapshot()
    assert hub.fetched_bytes() == sum(map(len, MODEL.values()))
    assert os.path.samefile(snapshot / "model.safetensors", snapshot / "copy.safetensors")
    hub.cdn = True
    hub.clear()
    hub.add("org/other", {"a.bin": weights(50), "b.json": b"[]"})
    assert (client.snapshot("org/other") / "a.bin").read_bytes() == weights(50)
    assert hub.fetched_bytes() == len(weights(50)) + 2


def changes_of(index: Path) -> Callable[[], int]:
    """Return a function whose answer differs after somebody wrote to a database."""
    connection = sqlite3.connect(f"file:{index}?mode=ro", uri=True)
    return lambda: int(connection.execute("PRAGMA data_version").fetchone()[0])


def files_of(root: Path) -> dict[str, tuple[object, ...]]:
    """Return everything below a folder but the memory that readers of the index share."""
    return {k: v for k, v in snapshot_of(root).items() if not k.endswith("-shm")}


def test_a_repeated_call_is_one_request_and_writes_nothing(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", MODEL)
    first = client.snapshot()
    hub.clear()
    before, version = files_of(tmp_path), changes_of(client.store.root / "index.sqlite3")
    number = version()
    assert client.snapshot() == first
    assert version() == number
    assert files_of(tmp_path) == before
    assert [str(each) for each in hub.requests] == ["GET /api/models/org/name/revision/main"]


def test_a_repeated_call_for_a_commit_or_one_of_its_files_asks_nobody(
    client: Client, hub: Hub
) -> None:
    commit = hub.add("org/name", MODEL).sha
    client.snapshot(revision=commit)
    hub.clear()
    client.snapshot(revision=commit)
    path = client.file("org/name", "unet/diffusion.safetensors", revision=commit)
    assert path.read_bytes() == MODEL["unet/diffusion.safetensors"]
    assert list(hub.requests) == []


def test_another_revision_fetches_only_what_changed(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    client.snapshot()
    hub.add("org/name", {**MODEL, "model.safetensors": weights(20)})
    hub.clear()
    snapshot = client.snapshot()
    assert [each.file for each in hub.gets()] == ["org/name/model.safetensors"]
    assert (snapshot / "model.safetensors").read_bytes() == weights(20)
    assert_sound(client)


def test_another_repo_with_known_weights_fetches_none_of_them(client: Client, hub: Hub) -> None:
    hub.add("org/one", MODEL)
    hub.add("other/two", {"renamed.bin": MODEL["model.safetensors"], "x.json": b"{}"})
    one = client.snapshot("org/one")
    hub.clear()
    two = client.snapshot("other/two")
    assert [each.file for each in hub.gets()] == ["other/two/x.json"]
    assert os.path.samefile(one / "model.safetensors", two / "renamed.bin")
    assert link_count(os.path.realpath(two / "renamed.bin")) == 3
    assert_sound(client)


# a cache that huggingface_hub made


def test_a_cache_made_without_smartcache_is_proven_and_shared_by_the_first_call(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", MODEL)
    plain = plain_snapshot(hub, client.cache)
    before = contents(client.cache)
    inodes = {name: inode_of(os.path.realpath(plain / name)) for name in MODEL}
    hub.clear()
    assert client.snapshot() == plain
    assert hub.gets() == []
    assert contents(client.cache) == before
    assert {name: inode_of(os.path.realpath(plain / name)) for name in MODEL} == inodes
    for name in ("model.safetensors", "unet/diffusion.safetensors"):
        assert os.path.samefile(plain / name, client.blob_of(MODEL[name]))
    hub.clear()
    files, version = files_of(tmp_path), changes_of(client.store.root / "index.sqlite3")
    number = version()
    assert client.snapshot() == plain
    assert (version(), files_of(tmp_path)) == (number, files)
    assert len(hub.requests) == 1
    assert_sound(client)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_damaged_blob_of_the_cache_is_set_aside_and_fetched_again(
    client: Client, hub: Hub, is_known: bool
) -> None:
    hub.add("org/name", MODEL)
    name = "unet/diffusion.safetensors"
    path = client.snapshot() if is_known else plain_snapshot(hub, client.cache)
    expected = contents(client.cache)
    blob = Path(os.path.realpath(path / name))
    edit(blob, b"DAMAGE", offset=1000)
    damaged = blob.read_bytes()
    hub.clear()
    assert client.snapshot() == path
    assert contents(client.cache) == expected
    assert [each.file for each in hub.gets()] == [f"org/name/{name}"]
    kept = [each for each in (client.store.root / "bad").iterdir() if each.is_file()]
    assert damaged in [each.read_bytes() for each in kept]
    assert_sound(client)


def test_an_edited_text_is_left_to_its_owner(client: Client, hub: Hub) -> None:
    """People edit texts in their caches; huggingface_hub keeps such edits too."""
    hub.add("org/name", MODEL)
    path = client.snapshot()
    names = ("config.json", "tokenizer.json")
    for name in names:
        edit(os.path.realpath(path / name), b"[")
    edited = [(path / name).read_bytes() for name in names]
    hub.clear()
    client.snapshot()
    assert [(path / name).read_bytes() for name in names] == edited
    assert hub.gets() == []


def test_a_pointer_to_another_blob_or_to_nothing_is_set_right(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    path = client.snapshot()
    expected = contents(client.cache)
    pointer = path / "model.safetensors"
    pointer.unlink()
    pointer.symlink_to(f"../../blobs/{sha256(MODEL['unet/diffusion.safetensors'])}")
    hub.clear()
    assert client.snapshot() == path
    assert contents(client.cache) == expected
    for name, fetched in (("model.safetensors", 0), ("config.json", 1)):
        Path(os.path.realpath(path / name)).unlink()
        assert client.snapshot() == path
        assert contents(client.cache) == expected
        assert len(hub.gets()) == fetched


def test_a_snapshot_without_symlinks_is_taken_as_it_is(client: Client, hub: Hub) -> None:
    """Some filesystems have none; huggingface_hub then puts the files into the snapshot."""
    hub.add("org/name", MODEL)
    path = plain_snapshot(hub, client.cache)
    for name in MODEL:
        data = (path / name).read_bytes()
        blob = Path(os.path.realpath(path / name))
        (path / name).unlink()
        blob.unlink()
        (path / name).write_bytes(data)
    hub.clear()
    assert client.snapshot() == path
    assert hub.gets() == []
    assert {name: (path / name).read_bytes() for name in MODEL} == MODEL


# the store afterwards


def test_blobs_stay_until_their_repo_is_removed(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    client.snapshot()
    assert client.store.plan_prune().freed_size == 0
    shutil.rmtree(client.cache / "models--org--name")
    assert client.store.plan_prune().freed_size >= 400_000


def test_a_claimed_or_linked_file_stays_with_the_repo_that_wanted_it(
    client: Client, hub: Hub
) -> None:
    hub.add("org/one", {"a.bin": weights(1)})
    hub.add("org/two", {"b.bin": weights(1)})
    client.snapshot("org/one")
    two = client.snapshot("org/two")
    shutil.rmtree(client.cache / "models--org--one")
    blob = client.store.find("sha256", sha256(weights(1)))
    assert blob is not None
    assert client.store.plan_prune().victims == ()
    names = client.store.names_of(blob.digest)
    assert [os.path.realpath(each) for each in names] == [os.path.realpath(two / "b.bin")]


def test_undo_gives_modes_back_and_a_later_download_shares_again(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    path = client.snapshot()
    expected = contents(client.cache)
    client.store.plan_undo(last=True).execute()
    assert contents(client.cache) == expected
    assert mode_of(os.path.realpath(path / "model.safetensors")) & 0o200
    hub.clear()
    assert client.snapshot() == path
    assert hub.gets() == []
    assert contents(client.cache) == expected
    assert os.path.samefile(path / "model.safetensors", client.blob_of(MODEL["model.safetensors"]))
    assert_sound(client)


def test_undo_of_a_linked_download_leaves_no_wrong_file_and_a_later_one_heals_it(
    client: Client, hub: Hub
) -> None:
    hub.add("org/one", MODEL)
    hub.add("org/two", MODEL)
    client.snapshot("org/one")
    path = client.snapshot("org/two")
    expected = contents(client.cache)
    client.store.plan_undo(last=True).execute()
    left = contents(client.cache)
    assert {name: left[name] for name in left} == {name: expected[name] for name in left}
    hub.clear()
    assert client.snapshot("org/two") == path
    assert contents(client.cache) == expected
    assert hub.gets("safetensors") == []
    assert_sound(client)


def test_huggingface_hubs_force_downloads_are_shared_again(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    path = client.snapshot()
    expected = contents(client.cache)
    hub.clear()
    assert client.snapshot(force_download=True) == path
    assert len(hub.gets()) == len(MODEL)
    assert contents(client.cache) == expected
    assert os.path.samefile(path / "model.safetensors", client.blob_of(MODEL["model.safetensors"]))
    assert_sound(client)


# a Hub that moves, or lies


def test_a_branch_that_moves_while_its_files_are_fetched_is_followed_by_the_next_download(
    client: Client, hub: Hub
) -> None:
    before = hub.add("org/name", MODEL)
    hold = hub.faults.hold("org/name/model.safetensors", after=1000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.snapshot)
        assert hold.reached.wait(60)
        moved = hub.add("org/name", {**MODEL, "config.json": b"{}", "new.bin": weights(30)})
        hold.release()
        path = waiting.result(60)
    assert path.name == before.sha
    assert {name: (path / name).read_bytes() for name in MODEL} == MODEL
    path = client.snapshot()
    assert path.name == moved.sha
    assert {name: (path / name).read_bytes() for name in moved.files} == {
        **MODEL, "config.json": b"{}", "new.bin": weights(30)
    }  # fmt: skip
    assert (client.cache / "models--org--name/refs/main").read_text() == moved.sha
    hub.clear()
    client.snapshot()
    assert len(hub.requests) == 1
    assert_sound(client)


def test_wrong_bytes_are_refused_and_nothing_points_at_them(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        hub.faults.wrong_bytes(f"org/name/{name}")
        with pytest.raises(DigestMismatchError, match=name) as caught:
            client.snapshot(max_workers=1)
        assert "bad" in str(caught.value)
        assert list(client.cache.glob(f"*/snapshots/*/{name}")) == []
        pointers = [path for path in client.cache.rglob("*") if path.is_symlink()]
        assert [path for path in pointers if not path.exists()] == []
        assert wrong_blobs(client.store, client.cache) == []
        path = client.snapshot(max_workers=1)
        assert {each: (path / each).read_bytes() for each in MODEL} == MODEL
        assert_sound(client)
        shutil.rmtree(client.cache / "models--org--name")
        client.store.plan_prune().execute()


def test_a_cut_connection_is_resumed(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    hub.faults.cut("unet/diffusion.safetensors", after=150_000)
    path = client.snapshot()
    assert {each: (path / each).read_bytes() for each in MODEL} == MODEL
    assert_sound(client)


def test_a_server_that_lies_about_a_size_leaves_nothing_wrong(client: Client, hub: Hub) -> None:
    hub.add("org/name", {"model.safetensors": weights(1)})
    for by in (1, -1, 100):
        hub.faults.wrong_size("model.safetensors", by=by)
        with pytest.raises(Exception, match=r"(?i)size|consist|bytes"):
            client.snapshot()
        assert wrong_blobs(client.store, client.cache) == []
        hub.faults.clear()
        for tree in client.cache.glob("*/trees/*"):
            tree.unlink()
    path = client.snapshot()
    assert (path / "model.safetensors").read_bytes() == weights(1)
    assert_sound(client)


def test_a_server_that_names_no_size_is_served_all_the_same(client: Client, hub: Hub) -> None:
    hub.add("org/name", {"model.safetensors": weights(1)})
    hub.faults.no_size("model.safetensors")
    try:
        path = client.snapshot()
    except Exception as error:  # noqa: BLE001 - huggingface_hub may refuse: then so do we
        with pytest.raises(type(error)):
            plain_snapshot(hub, client.cache.with_name("plain"))
    else:
        assert (path / "model.safetensors").read_bytes() == weights(1)


FAILING = ["/api/models/org/name/revision", "/api/models/org/name/tree", "org/name/config.json"]


@pytest.mark.parametrize("part", FAILING)
@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.usefixtures("quick_retries")
def test_a_hub_that_fails_on_the_way_never_leaves_half_a_repo_as_the_result(
    client: Client, hub: Hub, part: str, is_begun: bool, is_local: bool
) -> None:
    """huggingface_hub then returns what it has; with our weights there it has a snapshot."""
    hub.add("org/name", MODEL)
    more = {"local_dir": client.cache.with_name("local")} if is_local else {}
    if is_begun:
        client.snapshot(allow_patterns=["unet/config.json"], **more)
    plan = client.plan(**more)
    hub.faults.status(part, 500, times=1 << 30, method="")
    try:
        path = Path(plan.execute())
    except (HubError, HfHubHTTPError, LocalEntryNotFoundError):
        hub.faults.clear()
        path = client.snapshot(**more)
    assert {name: (path / name).read_bytes() for name in MODEL} == MODEL
    assert_sound(client)


def test_a_directory_in_the_place_of_a_blob_is_no_file(client: Client, hub: Hub) -> None:
    hub.add("org/name", MODEL)
    blobs = client.cache / "models--org--name" / "blobs"
    (blobs / sha256(MODEL["model.safetensors"])).mkdir(parents=True)
    with pytest.raises((HubError, OSError)):
        client.snapshot()


# places


def test_a_cache_on_another_filesystem_than_the_store_is_filled_and_shared_from(
    tmp_path: Path, hub: Hub, elsewhere: Path, pass_time: Callable[[float], None]
) -> None:
    """No pool is there: nothing is adopted, and no second copy is made."""
    hub.add("org/name", MODEL)
    hub.add("org/two", {"copy.bin": MODEL["model.safetensors"]})
    with SmartCache(tmp_path / "store") as smart:
        client = Client(smart, hub, elsewhere / "hf")
        path = client.snapshot()
        assert {each: (path / each).read_bytes() for each in MODEL} == MODEL
        assert list(client.store.blobs()) == []
        pass_time(10)
        assert client.snapshot() == path
        hub.clear()
        two = client.snapshot("org/two")
        assert hub.gets() == []
        assert (two / "copy.bin").read_bytes() == MODEL["model.safetensors"]
        assert list((tmp_path / "store" / "blobs").rglob("??/*.*")) == []
        assert_sound(client)


def test_a_cache_elsewhere_gets_copies_of_what_the_store_has(
    client: Client, hub: Hub, elsewhere: Path
) -> None:
    hub.add("org/name", MODEL)
    client.snapshot()
    hub.clear()
    path = client.snapshot(cache_dir=elsewhere / "hf")
    assert hub.gets("safetensors") == []
    assert {each: (path / each).read_bytes() for each in MODEL} == MODEL
    assert wrong_blobs(client.store, elsewhere / "hf") == []


def test_a_cache_with_a_pool_of_its_own_shares_there(
    client: Client, hub: Hub, elsewhere: Path
) -> None:
    hub.add("org/name", MODEL)
    hub.add("org/two", {"copy.bin": MODEL["model.safetensors"]})
    client.store.add_pool(elsewhere / "pool")
    one = client.snapshot(cache_dir=elsewhere / "hf")
    two = client.snapshot("org/two", cache_dir=elsewhere / "hf")
    assert hub.gets("org/two") == []
    assert os.path.samefile(one / "model.safetensors", two / "copy.bin")
    here = client.snapshot("org/two")
    assert hub.gets("org/two") == []
    assert (here / "copy.bin").read_bytes() == MODEL["model.safetensors"]
    assert_sound(client)


# several at once


def test_threads_that_want_the_same_bytes_fetch_them_once(client: Client, hub: Hub) -> None:
    shared = weights(1, 500_000)
    for number in range(6):
        hub.add(f"org/r{number}", {"m.bin": shared, "own.bin": weights(100 + number)})
    with ThreadPoolExecutor(12) as pool:
        names = [f"org/r{number}" for number in range(6)] * 2
        paths = list(pool.map(client.snapshot, names))
    assert all((path / "m.bin").read_bytes() == shared for path in paths)
    assert len({inode_of(os.path.realpath(path / "m.bin")) for path in paths}) == 1
    assert hub.fetched_bytes("m.bin") == len(shared)
    assert_sound(client)


# what others do to the cache and the store between two calls


def test_what_is_left_in_the_store_is_not_fetched_again_but_what_was_pruned_is(
    client: Client, hub: Hub
) -> None:
    hub.add("org/name", MODEL)
    client.snapshot()
    for is_pruned in (False, True):
        shutil.rmtree(client.cache / "models--org--name")
        if is_pruned:
            client.store.plan_prune().execute()
        hub.clear()
        path = client.snapshot()
        assert len(hub.gets("safetensors")) == (2 if is_pruned else 0)
        assert {each: (path / each).read_bytes() for each in MODEL} == MODEL
        assert_sound(client)


def test_a_lost_index_costs_no_download(tmp_path: Path, hub: Hub) -> None:
    hub.add("org/one", MODEL)
    hub.add("org/two", MODEL)
    with SmartCache(tmp_path / "store") as smart:
        Client(smart, hub, tmp_path / "hf").snapshot("org/one")
    for file in (tmp_path / "store").glob("index.sqlite3*"):
        file.unlink()
    hub.clear()
    with SmartCache(tmp_path / "store") as smart:
        client = Client(smart, hub, tmp_path / "hf")
        one, two = client.snapshot("org/one"), client.snapshot("org/two")
        assert hub.gets("safetensors") == []
        assert os.path.samefile(one / "model.safetensors", two / "model.safetensors")
        assert_sound(client)


@pytest.mark.parametrize("order", [("org/one", "org/two"), ("org/two", "org/one")])
def test_damage_that_links_spread_is_set_right_in_every_repo(
    client: Client, hub: Hub, order: tuple[str, str]
) -> None:
    hub.add("org/one", {"a.bin": weights(1)})
    hub.add("org/two", {"b.bin": weights(1)})
    one, two = client.snapshot("org/one") / "a.bin", client.snapshot("org/two") / "b.bin"
    edit(os.path.realpath(one), b"DAMAGE", offset=100)
    hub.clear()
    for name in order:
        client.snapshot(name)
    assert one.read_bytes() == two.read_bytes() == weights(1)
    assert os.path.samefile(one, two)
    assert len(hub.gets()) == 1
    assert_sound(client)


def test_a_blob_in_huggingface_hubs_shared_store_is_shared_and_set_right(
    client: Client, hub: Hub
) -> None:
    """There the blob of a repo is a symlink to an entry."""
    hub.add("org/name", {"a.bin": weights(1)})
    pointer = plain_snapshot(hub, client.cache) / "a.bin"
    blob = Path(os.path.realpath(pointer))
    make_shared_store(client.cache)
    entry = add_entry(client.cache, "c" * 64, weights(1))
    blob.unlink()
    blob.symlink_to(os.path.relpath(entry, blob.parent))
    hub.clear()
    client.snapshot()
    assert hub.gets() == []
    assert os.path.samefile(client.blob_of(weights(1)), entry)
    edit(entry, b"DAMAGE", offset=7)
    client.snapshot()
    assert pointer.read_bytes() == weights(1)
    assert_sound(client)


def test_a_damaged_file_of_a_snapshot_without_symlinks_is_set_right(
    client: Client, hub: Hub
) -> None:
    hub.add("org/name", {"a.bin": weights(1)})
    pointer = plain_snapshot(hub, client.cache) / "a.bin"
    Path(os.path.realpath(pointer)).unlink()
    pointer.unlink()
    pointer.write_bytes(weights(1)[:-1] + b"?")
    client.snapshot()
    assert pointer.read_bytes() == weights(1)
    assert_sound(client)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_cache_that_may_only_be_read_is_used_as_it_is(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    hub.add("org/two", {"b.bin": MODEL["model.safetensors"]})
    with folder_of(NOBODY) as folder:
        path = plain_snapshot(hub, folder / "theirs")
        before = files_of(folder / "theirs")
        hub.clear()

        def work() -> list[Path]:
            with SmartCache(folder / "store") as smart:
                client = Client(smart, hub, folder / "theirs")
                found = [client.snapshot(token=False) for _ in range(2)]
                two = client.snapshot("org/two", cache_dir=folder / "hf", token=False)
                assert (two / "b.bin").read_bytes() == MODEL["model.safetensors"]
                return found

        assert as_ordinary_user(work) == [path, path]
        assert hub.gets() == []
        assert files_of(folder / "theirs") == before


def test_undo_of_everything_leaves_no_wrong_file(client: Client, hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    paths = [client.snapshot(), client.snapshot(local_dir=tmp_path / "local")]
    client.store.plan_undo().execute()
    left = [(path / name, data) for path in paths for name, data in MODEL.items()]
    assert [path for path, data in left if path.exists() and path.read_bytes() != data] == []
    assert [client.snapshot(), client.snapshot(local_dir=tmp_path / "local")] == paths
    assert [path for path, data in left if path.read_bytes() != data] == []
    assert_sound(client)
