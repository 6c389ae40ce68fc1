"""`local_dir`: a folder of the user's own, where huggingface_hub writes into stale files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.cache import SmartCache
from smartcache.errors import DigestMismatchError
from tests.hub.clients import (
    Client,
    as_ordinary_user,
    assert_sound,
    contents,
    plain_file,
    plain_snapshot,
    sha256,
    state_of,
    weights,
    wrong_blobs,
)
from tests.hub_server import Hub
from tests.processes.children import NOBODY, folder_of
from tests.store.files import inode_of, link_count, mode_of, write

MODEL = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b'{"b": 2}' * 10_000,
    "model.safetensors": weights(1),
    "unet/diffusion model.safetensors": weights(2, 300_000),
}
NEXT = {**MODEL, "model.safetensors": weights(3), "config.json": b'{"a": 2}'}
NAME = "model.safetensors"

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the user's files, without huggingface_hub's notes."""
    found = contents(folder)
    return {k: v for k, v in found.items() if not k.startswith(".cache") and isinstance(v, bytes)}


def notes_of(folder: Path) -> dict[str, bytes]:
    """Return huggingface_hub's notes without their times."""
    return {
        name: data.rsplit(b"\n", 2)[0] if name.endswith(".metadata") else data
        for name, data in contents(folder / ".cache").items()
        if isinstance(data, bytes) and not name.endswith(".lock")
    }


@pytest.mark.parametrize(
    ("more", "is_known"),
    [
        ({}, False),
        ({}, True),
        ({"revision": "v1"}, True),
        ({"allow_patterns": "*.json"}, False),
        ({"revision": "commit"}, False),
    ],
)
def test_the_folder_is_what_huggingface_hub_makes(
    client: Client, hub: Hub, tmp_path: Path, more: dict[str, object], is_known: bool
) -> None:
    commit = hub.add("org/name", MODEL, tags=["v1"]).sha
    if more.get("revision") == "commit":
        more = {"revision": commit}
    if is_known:
        client.snapshot()
    plain = plain_snapshot(hub, tmp_path / "x", local_dir=tmp_path / "plain", **more)
    hub.clear()
    ours = client.snapshot(local_dir=tmp_path / "ours", **more)
    assert (plain, ours) == (tmp_path / "plain", tmp_path / "ours")
    assert files_of(ours) == files_of(plain)
    assert notes_of(ours) == notes_of(plain)
    assert not is_known or hub.gets("safetensors") == []
    assert_sound(client)


def test_one_file_goes_where_huggingface_hub_puts_it(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", MODEL)
    name = "unet/diffusion model.safetensors"
    plain = plain_file(hub, tmp_path / "x", "org/name", name, local_dir=tmp_path / "plain")
    ours = client.file("org/name", name, local_dir=tmp_path / "ours")
    assert ours.relative_to(tmp_path / "ours") == plain.relative_to(tmp_path / "plain")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "plain")
    assert notes_of(tmp_path / "ours") == notes_of(tmp_path / "plain")


@pytest.mark.parametrize("is_known", [False, True])
def test_the_next_call_finds_everything_up_to_date_ours_and_huggingface_hubs(
    client: Client, hub: Hub, tmp_path: Path, is_known: bool
) -> None:
    """By its notes alone: it would write them anew if it had to hash a file."""
    hub.add("org/name", MODEL)
    if is_known:
        client.snapshot()
    path = client.snapshot(local_dir=tmp_path / "ours")
    before, inodes = contents(path), {name: inode_of(path / name) for name in MODEL}
    hub.clear()
    plain_snapshot(hub, tmp_path / "x", local_dir=path)
    assert (hub.gets(), hub.heads()) == ([], [])
    assert contents(path) == before
    assert client.snapshot(local_dir=tmp_path / "ours") == path
    assert (hub.gets(), hub.heads()) == ([], [])
    assert {name: inode_of(path / name) for name in MODEL} == inodes


def test_a_folder_filled_by_huggingface_hub_is_kept(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", MODEL)
    path = plain_snapshot(hub, tmp_path / "x", local_dir=tmp_path / "local")
    before = notes_of(path)
    hub.clear()
    client.snapshot(local_dir=path)
    assert hub.gets() == []
    assert files_of(path) == MODEL
    assert notes_of(path) == before
    assert_sound(client)


def test_a_local_dir_is_a_source_for_the_hf_cache(client: Client, hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    client.snapshot(local_dir=tmp_path / "local")
    hub.clear()
    path = client.snapshot()
    assert hub.gets("safetensors") == []
    assert {name: (path / name).read_bytes() for name in MODEL} == MODEL
    assert files_of(tmp_path / "local") == MODEL
    assert_sound(client)


# what is there already


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def somebody_elses(path: Path) -> Path:
    return write(path.parent.with_name("mine.safetensors"), MODEL[NAME])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    instead(path, lambda path: path.write_bytes(data))


def in_cache(client: Client) -> Path:
    return client.cache / "models--org--name" / "blobs" / sha256(MODEL[NAME])


STATES: dict[str, Callable[[Client, Path], object]] = {
    "a link of the blob": lambda client, path: instead(
        path, lambda path: os.link(client.blob_of(MODEL[NAME]), path)
    ),
    "a symlink into the cache": lambda client, path: instead(
        path, lambda path: path.symlink_to(in_cache(client))
    ),
    "a symlink to the blob": lambda client, path: instead(
        path, lambda path: path.symlink_to(client.blob_of(MODEL[NAME]))
    ),
    "a link of somebody else's file": lambda _, path: instead(
        path, lambda path: os.link(somebody_elses(path), path)
    ),
    "a symlink to nothing": lambda _, path: instead(
        path, lambda path: path.symlink_to(path.parent.with_name("nothing"))
    ),
    "a file of its own": lambda *_: None,
    "a damaged file": lambda _, path: damage(path),
    "a read-only file": lambda _, path: path.chmod(0o444),
    "a shorter file": lambda _, path: instead(path, lambda path: path.write_bytes(b"short")),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("is_cached", "wanted"), [(False, "new"), (True, "new"), (True, "old")])
def test_a_file_that_is_there_is_never_written_through(
    client: Client, tmp_path: Path, state: str, is_cached: bool, wanted: str
) -> None:
    check_state(client, tmp_path / "local", state, is_cached=is_cached, wanted=wanted)


def check_state(client: Client, local: Path, state: str, *, is_cached: bool, wanted: str) -> None:
    hub = client.hub
    old = hub.add("org/name", MODEL).sha
    client.snapshot(token=False)
    client.snapshot(local_dir=local, token=False)
    new = hub.add("org/name", NEXT).sha
    if is_cached:
        client.snapshot(token=False)
    STATES[state](client, local / NAME)
    shared = {path: path.read_bytes() for path in local.parent.glob("mine*")}
    commit, expected = (old, MODEL) if wanted == "old" else (new, NEXT)
    path = client.snapshot(local_dir=local, revision=commit, token=False)
    assert {name: (path / name).read_bytes() for name in expected} == expected
    assert wanted == "old" or not (path / NAME).is_symlink()
    assert {each: each.read_bytes() for each in shared} == shared
    assert not (local.parent / "nothing").exists()
    assert_sound(client)
    hub.clear()
    plain_snapshot(hub, local.parent / "x", local_dir=path, revision=commit, token=False)
    assert hub.gets() == []


def test_root_gets_bytes_of_its_own(client: Client, hub: Hub, tmp_path: Path) -> None:
    """huggingface_hub overwrites stale files there in place, and root ignores 0444."""
    if os.geteuid() != 0:
        pytest.skip("for root")
    hub.add("org/name", MODEL)
    client.snapshot()
    path = client.snapshot(local_dir=tmp_path / "local")
    for name in MODEL:
        assert link_count(path / name) == 1
        assert mode_of(path / name) & 0o200


def test_huggingface_hub_alone_never_damages_a_blob_afterwards(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    old = hub.add("org/name", MODEL).sha
    client.snapshot()
    path = client.snapshot(local_dir=tmp_path / "local")
    new = hub.add("org/name", NEXT).sha
    plain_snapshot(hub, client.cache)
    for commit, expected in ((new, NEXT), (old, MODEL), (new, NEXT)):
        plain_snapshot(hub, client.cache, local_dir=path, revision=commit)
        assert files_of(path) == expected
        assert wrong_blobs(client.store, client.cache) == []
    client.snapshot(local_dir=path)
    assert files_of(path) == NEXT
    assert_sound(client)


@only_root
def test_an_ordinary_user_gets_links_that_nobody_writes_through(hub: Hub) -> None:
    old = hub.add("org/name", MODEL).sha
    new = hub.add("org/name", NEXT).sha

    def work() -> None:
        with SmartCache(folder / "store") as smart:
            client = Client(smart, hub, folder / "hf")
            path = client.snapshot(local_dir=folder / "local", revision=old, token=False)
            for name in MODEL:
                is_weight = name.endswith(".safetensors")
                assert link_count(path / name) == (2 if is_weight else 1), name
                assert bool(mode_of(path / name) & 0o222) is not is_weight
            assert os.path.samefile(path / NAME, client.blob_of(MODEL[NAME]))
            first = inode_of(path / NAME)
            client.snapshot(local_dir=path, revision=new, token=False)
            assert files_of(path) == NEXT
            assert inode_of(path / NAME) != first
            assert client.blob_of(MODEL[NAME]).read_bytes() == MODEL[NAME]
            client.snapshot(local_dir=path, revision=old, token=False)
            assert files_of(path) == MODEL
            assert_sound(client)

    with folder_of(NOBODY) as folder:
        as_ordinary_user(work)
    assert hub.fetched_bytes(f"name/{NAME}") == 2 * len(MODEL[NAME])


@only_root
@pytest.mark.parametrize("is_cached", [False, True])
def test_huggingface_hub_of_an_ordinary_user_never_damages_a_blob(
    hub: Hub, is_cached: bool
) -> None:
    """It may refuse to write over the link; the bytes of the store stay what they are."""
    old = hub.add("org/name", MODEL).sha
    new = hub.add("org/name", NEXT).sha

    def work() -> str:
        said = ""
        with SmartCache(folder / "store") as smart:
            client = Client(smart, hub, folder / "hf")
            client.snapshot(revision=old, token=False)
            path = client.snapshot(local_dir=folder / "local", revision=old, token=False)
            if is_cached:
                client.snapshot(revision=new, token=False)
            try:
                plain_snapshot(hub, client.cache, local_dir=path, revision=new, token=False)
            except OSError as error:
                said = repr(error)
            assert_sound(client)
            client.snapshot(local_dir=path, revision=new, token=False)
            assert files_of(path) == NEXT
            assert_sound(client)
        return said

    with folder_of(NOBODY) as folder:
        said = as_ordinary_user(work)
    assert ("PermissionError" in said) is is_cached


@only_root
@pytest.mark.parametrize("wanted", ["old", "new"])
def test_an_ordinary_users_file_is_never_written_through(wanted: str) -> None:
    def work() -> None:
        for number, state in enumerate(STATES):
            place = folder / str(number)
            place.mkdir()
            with Hub() as hub, SmartCache(place / "store") as smart:
                client = Client(smart, hub, place / "hf")
                check_state(client, place / "local", state, is_cached=True, wanted=wanted)

    with folder_of(NOBODY) as folder:
        as_ordinary_user(work)


# places


def test_a_local_dir_on_another_filesystem_gets_copies(
    client: Client, hub: Hub, elsewhere: Path
) -> None:
    hub.add("org/name", MODEL)
    client.snapshot()
    hub.clear()
    path = client.snapshot(local_dir=elsewhere / "local")
    assert hub.gets("safetensors") == []
    assert files_of(path) == MODEL
    fetched = client.snapshot(local_dir=elsewhere / "again", cache_dir=elsewhere / "hf")
    assert files_of(fetched) == MODEL


def test_wrong_bytes_do_not_stay_in_a_local_dir(client: Client, hub: Hub, tmp_path: Path) -> None:
    for number, name in enumerate((NAME, "config.json", "tokenizer.json")):
        repo, local = f"org/{number}", tmp_path / str(number)
        files = {each: data + b"%d" % number for each, data in MODEL.items()}
        hub.add(repo, files)
        hub.faults.wrong_bytes(f"{repo}/{name}")
        with pytest.raises(DigestMismatchError, match=name):
            client.snapshot(repo, local_dir=local)
        assert not (local / name).exists()
        client.snapshot(repo, local_dir=local)
        assert files_of(local) == files
        assert_sound(client)


def test_other_files_of_the_user_stay_as_they_are(client: Client, hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    mine = write(tmp_path / "local" / "mine.safetensors", MODEL[NAME])
    before = state_of(mine)
    client.snapshot(local_dir=tmp_path / "local")
    client.snapshot(local_dir=tmp_path / "local")
    assert state_of(mine) == before


def test_an_edited_config_is_replaced_as_huggingface_hub_does(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", MODEL)
    for folder in (tmp_path / "plain", tmp_path / "ours"):
        client.snapshot(local_dir=folder)
        write(folder / "config.json", b"mine", age=-100)
    plain_snapshot(hub, tmp_path / "x", local_dir=tmp_path / "plain")
    client.snapshot(local_dir=tmp_path / "ours")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "plain")


def test_a_symlinked_local_dir_is_written_where_it_leads(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", MODEL)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    plain = plain_snapshot(hub, tmp_path / "x", local_dir=tmp_path / "link")
    assert client.snapshot(local_dir=tmp_path / "link") == plain
    assert files_of(tmp_path / "real") == MODEL


def test_a_symlinked_subfolder_is_not_left(client: Client, hub: Hub, tmp_path: Path) -> None:
    """The user's own arrangement: huggingface_hub follows it, so do we, and nothing is lost."""
    hub.add("org/name", MODEL)
    (tmp_path / "disk").mkdir()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "unet").symlink_to(tmp_path / "disk")
    client.snapshot()
    path = client.snapshot(local_dir=tmp_path / "local")
    assert {name: (path / name).read_bytes() for name in MODEL} == MODEL
    assert (tmp_path / "local" / "unet").is_symlink()
    assert_sound(client)
