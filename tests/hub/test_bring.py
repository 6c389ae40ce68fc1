"""Bytes that this machine has somewhere: taken from there, never fetched, never trusted unread."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.cache import SmartCache
from tests.hub.clients import (
    SIZE,
    Client,
    as_ordinary_user,
    assert_sound,
    believe,
    contents,
    plain_snapshot,
    sha256,
    state_of,
    weights,
)
from tests.hub.shared_stores import add_entry, make_shared_store
from tests.hub_server import Hub
from tests.processes.children import NOBODY, folder_of
from tests.store.files import digest_of, edit, inode_of, link_count, mode_of, write

WANTED = weights(1)
NAME = "model.safetensors"
Place = Callable[[Client, Path], Path]


def home() -> Path:
    return Path(os.environ["HOME"])


def in_comfyui(client: Client, tmp_path: Path) -> Path:
    return write(home() / "ComfyUI" / "models" / "checkpoints" / "my favourite.ckpt", WANTED)


def in_ollama(client: Client, tmp_path: Path) -> Path:
    return write(home() / ".ollama" / "models" / "blobs" / f"sha256-{sha256(WANTED)}", WANTED)


def in_lm_studio(client: Client, tmp_path: Path) -> Path:
    return write(home() / ".lmstudio" / "models" / "org" / "repo" / "m.gguf", WANTED)


def in_seen_folder(client: Client, tmp_path: Path) -> Path:
    path = write(tmp_path / "seen" / "x.safetensors", WANTED)
    client.smart.scan(tmp_path / "seen")
    return path


def in_old_cache(client: Client, tmp_path: Path) -> Path:
    """What transformers 3 and 4 made: `<hash of the address>.<hash of the etag>`, and a note."""
    folder = home() / ".cache" / "huggingface" / "transformers"
    path = write(folder / f"{'a' * 64}.{'b' * 64}", WANTED)
    note = {"url": "https://huggingface.co/x/resolve/main/m", "etag": f'"{sha256(WANTED)}"'}
    write(path.with_name(f"{path.name}.json"), json.dumps(note).encode())
    write(path.with_name(f"{path.name}.lock"), b"")
    return path


def in_default_cache(client: Client, tmp_path: Path) -> Path:
    cache = home() / ".cache" / "huggingface" / "hub"
    return in_hub_cache(client, cache)


def in_other_cache(client: Client, tmp_path: Path) -> Path:
    cache = tmp_path / "other" / "hub"
    client.store.add_folder(cache, program="Hugging Face")
    return in_hub_cache(client, cache)


def in_cache_downloaded_to_before(client: Client, tmp_path: Path) -> Path:
    """One that nobody named, but that a call of smartcache once used."""
    cache = tmp_path / "another" / "hub"
    client.hub.add("org/tiny", {"config.json": b"{}"})
    client.snapshot("org/tiny", cache_dir=cache)
    return in_hub_cache(client, cache)


def in_hub_cache(client: Client, cache: Path) -> Path:
    client.hub.add("org/before", {"old/name.bin": WANTED})
    return Path(os.path.realpath(plain_snapshot(client.hub, cache, "org/before") / "old/name.bin"))


def in_given_folder(client: Client, tmp_path: Path) -> Path:
    path = write(tmp_path / "given" / "sub" / "x.safetensors", WANTED)
    client.store.add_folder(tmp_path / "given")
    return path


def in_local_dir(client: Client, tmp_path: Path) -> Path:
    client.hub.add("org/before", {"name.safetensors": WANTED})
    folder = home() / "ComfyUI" / "models" / "diffusers" / "local"
    plain_snapshot(client.hub, client.cache, "org/before", local_dir=folder)
    return folder / "name.safetensors"


STRANGERS = [in_comfyui, in_ollama, in_lm_studio, in_seen_folder, in_local_dir]
OURS = [
    in_default_cache, in_other_cache, in_cache_downloaded_to_before, in_old_cache, in_given_folder
]  # fmt: skip


@pytest.mark.parametrize("place", STRANGERS)
def test_a_file_of_a_folder_that_was_only_found_is_copied_and_stays_as_it_is(
    client: Client, hub: Hub, tmp_path: Path, place: Place
) -> None:
    found = place(client, tmp_path)
    before, beside = state_of(found), contents(found.parent)
    hub.add("org/name", {NAME: WANTED, "config.json": b"{}"})
    hub.clear()
    path = client.snapshot()
    assert hub.gets(NAME) == []
    assert (path / NAME).read_bytes() == WANTED
    assert os.path.samefile(path / NAME, client.blob_of(WANTED))
    assert not os.path.samefile(path / NAME, found)
    assert (state_of(found), contents(found.parent)) == (before, beside)
    assert_sound(client)


@pytest.mark.parametrize("place", OURS)
def test_a_file_of_an_hf_cache_or_of_a_given_folder_becomes_a_link_until_it_is_undone(
    client: Client, hub: Hub, tmp_path: Path, place: Place
) -> None:
    found = place(client, tmp_path)
    inode, mode = inode_of(found), mode_of(found)
    hub.add("org/name", {NAME: WANTED, "config.json": b"{}"})
    hub.clear()
    path = client.snapshot()
    assert hub.gets(NAME) == []
    assert inode_of(os.path.realpath(path / NAME)) == inode_of(found) == inode
    assert os.path.samefile(found, client.blob_of(WANTED))
    assert (link_count(found), mode_of(found)) == (3, 0o444)
    assert_sound(client)
    client.store.plan_undo(last=True).execute()
    assert (found.read_bytes(), mode_of(found)) == (WANTED, mode)
    edit(found)  # it is the user's own again: nothing else may change with it
    pointer = path / NAME
    assert not pointer.exists() or pointer.read_bytes() == WANTED
    assert client.snapshot() == path
    assert pointer.read_bytes() == WANTED
    assert_sound(client)


def test_the_native_shared_store_is_found_by_xet_hash(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    cache = tmp_path / "other" / "hub"
    make_shared_store(cache)
    xet = "c" * 64
    entry = add_entry(cache, xet, WANTED)
    client.store.add_folder(cache, program="Hugging Face")
    hub.add("org/name", {NAME: WANTED}, xet={NAME: xet})
    plan = client.plan()
    assert [each.source for each in plan.files] == ["reuse"]
    assert plan.files[0].origin == entry
    path = Path(plan.execute())
    assert hub.gets(NAME) == []
    assert inode_of(os.path.realpath(path / NAME)) == inode_of(entry)
    assert_sound(client)


def test_an_entry_of_the_shared_store_with_other_bytes_is_not_believed(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    """Clients believe an entry by its size."""
    cache = tmp_path / "other" / "hub"
    make_shared_store(cache)
    entry = add_entry(cache, "c" * 64, weights(2))
    good = write(tmp_path / "given" / "m.bin", WANTED)
    for folder, program in ((cache, "Hugging Face"), (tmp_path / "given", "")):
        client.store.add_folder(folder, program=program)
    before = state_of(entry)
    hub.add("org/name", {NAME: WANTED}, xet={NAME: "c" * 64})
    path = client.snapshot()
    assert (path / NAME).read_bytes() == WANTED
    assert os.path.samefile(path / NAME, good)
    assert state_of(entry) == before


# strangers of the same size


def test_a_file_of_the_same_size_costs_one_hash(
    client: Client, hub: Hub, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    stranger = write(tmp_path / "given" / NAME, weights(2))
    client.store.add_folder(tmp_path / "given")
    pass_time(10)
    hub.add("org/name", {NAME: WANTED})
    plan = client.plan()
    assert [each.source for each in plan.files] == ["reuse"]
    assert (plan.saved_size, plan.unproven_size, plan.fetch_size) == (SIZE, SIZE, 0)
    path = Path(plan.execute())
    assert len(hub.gets(NAME)) == 1
    assert (path / NAME).read_bytes() == WANTED
    assert client.store.known_hashes([stranger])[stranger]["sha256"] == sha256(weights(2))
    assert (mode_of(stranger), link_count(stranger)) == (0o644, 1)
    hub.add("org/third", {NAME: weights(3)})
    (third,) = client.plan("org/third").files
    assert (third.source, third.candidates) == ("fetch", ())


def test_more_strangers_than_are_worth_hashing_are_left_out_with_a_warning(
    client: Client, hub: Hub, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    for number in range(20):
        write(tmp_path / "given" / f"{number:02}.bin", weights(100 + number))
    client.store.add_folder(tmp_path / "given")
    pass_time(10)
    hub.add("org/name", {NAME: WANTED})
    plan = client.plan()
    assert len(plan.files[0].candidates) == 16
    assert plan.warnings == (f"{NAME}: 4 more files have its size and were not looked at",)
    path = Path(plan.execute())
    assert (path / NAME).read_bytes() == WANTED
    assert len(hub.gets(NAME)) == 1
    known = client.store.known_hashes(sorted((tmp_path / "given").iterdir()))
    assert sum("sha256" in values for values in known.values()) == 16
    hub.add("org/third", {NAME: weights(119)})
    (third,) = client.plan("org/third").files
    assert len(third.candidates) == 4
    hub.clear()
    path = client.snapshot("org/third")
    assert hub.gets(NAME) == []
    assert (path / NAME).read_bytes() == weights(119)


def test_the_right_file_is_found_among_strangers(client: Client, hub: Hub, tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / "given" / f"{number}.bin", weights(100 + number))
    client.store.add_folder(tmp_path / "given")
    hub.add("org/name", {NAME: weights(103), "b.bin": weights(101)})
    path = client.snapshot()
    assert hub.gets() == []
    assert os.path.samefile(path / NAME, tmp_path / "given" / "3.bin")
    assert os.path.samefile(path / "b.bin", tmp_path / "given" / "1.bin")
    assert [link_count(tmp_path / "given" / f"{n}.bin") for n in range(5)] == [1, 3, 1, 3, 1]


def test_a_file_of_the_same_name_is_looked_at_first(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    for number in range(30):
        write(tmp_path / "given" / f"{number:02}.bin", weights(100 + number))
    write(tmp_path / "given" / "zz" / NAME, WANTED)
    client.store.add_folder(tmp_path / "given")
    hub.add("org/name", {f"sub/{NAME}": WANTED})
    assert client.plan().files[0].origin == tmp_path / "given" / "zz" / NAME
    client.snapshot()
    assert hub.gets() == []


def test_an_unfinished_file_is_no_candidate(client: Client, hub: Hub, tmp_path: Path) -> None:
    write(tmp_path / "given" / f"{NAME}.incomplete", WANTED)
    write(tmp_path / "given" / f"{NAME}.part", WANTED)
    client.store.add_folder(tmp_path / "given")
    hub.add("org/name", {NAME: WANTED})
    assert client.sources() == {NAME: "fetch"}


def test_a_blob_of_another_cache_is_not_believed_by_its_name(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    found = in_other_cache(client, tmp_path)
    edit(found, b"DAMAGE", offset=5)
    before = state_of(found)
    hub.add("org/name", {NAME: WANTED})
    hub.clear()
    assert (client.snapshot() / NAME).read_bytes() == WANTED
    assert len(hub.gets()) == 1
    assert state_of(found) == before


# texts


@pytest.mark.parametrize(
    ("place", "is_lfs"), [(in_other_cache, False), (in_given_folder, True), (in_comfyui, False)]
)
def test_large_texts_are_copied_and_never_linked(
    client: Client, hub: Hub, tmp_path: Path, place: Place, is_lfs: bool
) -> None:
    found = place(client, tmp_path)
    text = found.with_name("tokenizer.json")
    write(text, WANTED[::-1])
    before = state_of(text)
    pattern = ["tokenizer.json"] if is_lfs else []
    hub.add("org/name", {"tokenizer.json": WANTED[::-1]}, lfs=pattern)
    hub.clear()
    path = client.snapshot()
    assert hub.gets() == []
    target = Path(os.path.realpath(path / "tokenizer.json"))
    assert target.read_bytes() == WANTED[::-1]
    assert link_count(target) == 1
    assert mode_of(target) & stat.S_IWUSR
    if place is in_comfyui:
        assert state_of(text) == before
    edit(target)
    assert text.read_bytes() == WANTED[::-1]
    assert_store_sound(client)


def assert_store_sound(client: Client) -> None:
    report = client.store.verify(full=True)
    assert not any((report.damaged, report.stray, report.writable))


def test_a_text_of_a_known_blob_is_copied_from_the_store(client: Client, hub: Hub) -> None:
    """The same bytes under a name that says weights, and under one that programs edit."""
    hub.add("org/one", {NAME: WANTED})
    hub.add("org/two", {"vocab.json": WANTED}, lfs=["vocab.json"])
    client.snapshot("org/one")
    hub.clear()
    path = client.snapshot("org/two")
    target = Path(os.path.realpath(path / "vocab.json"))
    assert hub.gets() == []
    assert (link_count(target), bool(mode_of(target) & stat.S_IWUSR)) == (1, True)
    edit(target)
    assert client.blob_of(WANTED).read_bytes() == WANTED


# between plan and execution


def become_other_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(write(path.with_name("elsewhere.bin"), weights(9)))


def become(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


HAPPENS: dict[str, tuple[Place, Callable[[Path], object]]] = {
    "vanishes": (in_comfyui, Path.unlink),
    "changes": (in_given_folder, lambda path: edit(path, b"OTHER", offset=500)),
    "changes in a cache": (in_other_cache, lambda path: edit(path, b"OTHER", offset=500)),
    "shrinks": (in_comfyui, lambda path: os.truncate(path, 70_000)),
    "becomes a folder": (in_given_folder, lambda path: become(path, Path.mkdir)),
    "becomes a pipe": (in_other_cache, lambda path: become(path, os.mkfifo)),
    "becomes another link": (in_given_folder, become_other_link),
}


@pytest.mark.parametrize("what", HAPPENS)
def test_what_changes_after_the_plan_is_fetched_instead(
    client: Client, hub: Hub, tmp_path: Path, what: str
) -> None:
    place, happens = HAPPENS[what]
    found = place(client, tmp_path)
    hub.add("org/name", {NAME: WANTED})
    plan = client.plan()
    assert [each.source for each in plan.files] == ["reuse"]
    happens(found)
    hub.clear()
    path = Path(plan.execute())
    assert len(hub.gets(NAME)) == 1
    assert (path / NAME).read_bytes() == WANTED
    assert_store_sound(client)


@pytest.mark.parametrize(
    ("place", "is_known"),
    [(in_comfyui, True), (in_given_folder, False), (in_given_folder, True), (in_other_cache, True)],
)
def test_a_file_that_somebody_has_open_for_writing_is_never_shared(
    client: Client, hub: Hub, tmp_path: Path, place: Place, is_known: bool
) -> None:
    found = place(client, tmp_path)
    if is_known:
        client.store.digest_of(found, ("blake3", "sha256"))
    hub.add("org/name", {NAME: WANTED})
    plan = client.plan()
    with open(found, "r+b") as writer:
        path = Path(plan.execute())
        assert not os.path.samefile(path / NAME, found)
        writer.write(b"LATER")
    assert (path / NAME).read_bytes() == WANTED
    assert_sound(client) if place is not in_other_cache else assert_store_sound(client)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("given", [False, True])
def test_a_file_that_cannot_be_read_or_belongs_to_somebody_else_is_fetched_or_copied(
    hub: Hub, given: bool
) -> None:
    hub.add("org/closed", {NAME: WANTED})
    hub.add("org/open", {NAME: weights(2)})
    with folder_of(NOBODY) as folder:
        closed = write(folder / "theirs" / "closed.bin", WANTED, mode=0o600)
        readable = write(folder / "theirs" / "open.bin", weights(2), mode=0o644)
        before = state_of(closed), state_of(readable)

        def work() -> tuple[bytes, bytes]:
            with SmartCache(folder / "store") as smart:
                client = Client(smart, hub, folder / "hf")
                if given:
                    client.store.add_folder(folder / "theirs")
                else:
                    smart.scan(folder / "theirs")
                first = (client.snapshot("org/closed", token=False) / NAME).read_bytes()
                second = (client.snapshot("org/open", token=False) / NAME).read_bytes()
                assert_sound(client)
                return first, second

        assert as_ordinary_user(work) == (WANTED, weights(2))
        assert len(hub.gets("closed")) == 1
        assert hub.gets("open") == []
        assert (state_of(closed), state_of(readable)) == before


# other filesystems


def test_a_file_on_another_filesystem_is_copied(client: Client, hub: Hub, elsewhere: Path) -> None:
    found = write(elsewhere / "m.bin", WANTED)
    client.store.add_folder(elsewhere)
    before = state_of(found)
    hub.add("org/name", {NAME: WANTED})
    assert client.sources() == {NAME: "copy"}
    path = client.snapshot()
    assert hub.gets() == []
    assert os.path.samefile(path / NAME, client.blob_of(WANTED))
    assert state_of(found) == before
    assert_sound(client)


def test_a_file_of_a_cache_that_cannot_become_a_blob_is_hashed_all_the_same(
    client: Client, hub: Hub, elsewhere: Path
) -> None:
    """There is no pool there, and its name says that it has the bytes."""
    hub.add("org/name", {NAME: WANTED})
    blob = Path(os.path.realpath(plain_snapshot(hub, elsewhere / "hub", "org/name") / NAME))
    edit(blob)
    hub.clear()
    path = client.snapshot(cache_dir=elsewhere / "hub")
    assert (path / NAME).read_bytes() == WANTED
    assert len(hub.gets(NAME)) == 1


@pytest.mark.parametrize("is_known", [False, True])
def test_a_near_file_is_preferred_to_a_far_one(
    client: Client,
    hub: Hub,
    tmp_path: Path,
    elsewhere: Path,
    pass_time: Callable[[float], None],
    is_known: bool,
) -> None:
    far = write(elsewhere / NAME, WANTED)
    near = write(tmp_path / "given" / "near.bin", WANTED)
    for folder in (elsewhere, tmp_path / "given"):
        client.store.add_folder(folder)
    pass_time(10)
    if is_known:
        client.store.digest_of(far, ("blake3", "sha256"))
        client.store.digest_of(near, ("blake3", "sha256"))
    hub.add("org/name", {NAME: WANTED})
    assert client.sources() == {NAME: "reuse"}
    assert os.path.samefile(client.snapshot() / NAME, near)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_file_that_may_become_a_link_is_preferred_to_one_that_is_copied(
    client: Client, hub: Hub, tmp_path: Path, pass_time: Callable[[float], None], is_known: bool
) -> None:
    foreign = in_comfyui(client, tmp_path)
    given = in_given_folder(client, tmp_path)
    pass_time(10)
    if is_known:
        client.store.digest_of(foreign, ("blake3", "sha256"))
        client.store.digest_of(given, ("blake3", "sha256"))
    hub.add("org/name", {foreign.name: WANTED})
    path = client.snapshot()
    if is_known:
        assert os.path.samefile(path / foreign.name, given)
    else:  # the same name is the better guess
        assert os.path.samefile(path / foreign.name, client.blob_of(WANTED))
    assert (path / foreign.name).read_bytes() == WANTED


def test_a_blob_on_another_filesystem_is_copied_unless_there_is_a_near_file(
    client: Client, hub: Hub, tmp_path: Path, elsewhere: Path
) -> None:
    """A copy is a second one on this filesystem."""
    pool = client.store.add_pool(elsewhere / "pool")
    for number, data in enumerate((weights(7), WANTED)):
        blob = client.store.put_stream([data], algorithms=("sha256",), pool=pool)
        hub.add(f"org/{number}", {NAME: data})
    assert client.sources("org/0") == {NAME: "copy"}
    assert (client.snapshot("org/0") / NAME).read_bytes() == weights(7)
    near = in_other_cache(client, tmp_path)
    hub.clear()
    assert client.sources("org/1") == {NAME: "reuse"}
    assert os.path.samefile(client.snapshot("org/1") / NAME, near)
    assert hub.gets() == []
    assert link_count(blob.path) == 1
    assert_sound(client)


def test_a_known_file_needs_no_second_reading_to_be_sure(
    client: Client, hub: Hub, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    found = write(tmp_path / "given" / "x.bin", WANTED)
    stranger = write(tmp_path / "given" / NAME, weights(2))
    client.store.add_folder(tmp_path / "given")
    pass_time(10)
    client.store.digest_of(found, ("blake3", "sha256"))
    hub.add("org/name", {NAME: WANTED})
    plan = client.plan()
    assert plan.files[0].candidates[0].is_known
    assert plan.files[0].origin == found
    plan.execute()
    assert client.store.known_hashes([stranger]) == {stranger: {}}


@pytest.mark.parametrize("folder", ["given", "found"])
def test_a_known_file_that_has_rotted_since_is_not_handed_out(
    client: Client, hub: Hub, tmp_path: Path, pass_time: Callable[[float], None], folder: str
) -> None:
    """Its hash was remembered; its size and times are as they were."""
    found = write(tmp_path / folder / "x.bin", WANTED)
    if folder == "given":
        client.store.add_folder(found.parent)
    else:
        client.smart.scan(found.parent)
    pass_time(10)
    client.store.digest_of(found, ("blake3", "sha256"))
    st = found.stat()
    rotten = WANTED[:-100] + bytes(100)
    found.write_bytes(rotten)
    os.utime(found, ns=(st.st_atime_ns, st.st_mtime_ns))
    believe(client.store, found, digest_of(WANTED))
    hub.add("org/name", {NAME: WANTED})
    path = client.snapshot()
    assert (path / NAME).read_bytes() == WANTED
    assert len(hub.gets(NAME)) == 1
    assert (found.read_bytes(), mode_of(found), link_count(found)) == (rotten, 0o644, 1)


def test_a_claim_leaves_nothing_behind_in_tmp(client: Client, hub: Hub, tmp_path: Path) -> None:
    write(tmp_path / "given" / "x.bin", weights(2))
    in_comfyui(client, tmp_path)
    client.store.add_folder(tmp_path / "given")
    hub.add("org/name", {NAME: WANTED})
    client.snapshot()
    assert list((client.store.root / "tmp").iterdir()) == []
    assert list(client.cache.rglob("*.smartcache")) == []
