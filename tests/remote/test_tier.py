"""What a tier promises, whatever server it is on."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from smartcache.errors import ConfigError, DamagedObjectError, MissingObjectError, TierError
from smartcache.remote import Found, Tier, check_options, check_url, in_parallel
from tests.remote import places

SIZES = (0, 1, 70_000, (8 << 20) + 5, 20 << 20)


def written(folder: Path, sizes: tuple[int, ...] = SIZES) -> dict[str, tuple[Path, int]]:
    """Make files of random bytes; return them by digest."""
    found = {}
    for number, size in enumerate(sizes):
        path = folder / f"file{number}"
        data = os.urandom(size)
        path.write_bytes(data)
        found[blake3(data).hexdigest()] = path, size
    return found


def test_what_is_sent_comes_back_and_is_sent_once(tier: Tier, tmp_path: Path) -> None:
    files = written(tmp_path)
    sent = tier.send(files)
    assert (sent.objects, sent.size, sent.skipped) == (len(SIZES), sum(SIZES), 0)
    again = tier.send(files)
    assert (again.objects, again.skipped, again.skipped_size) == (0, len(SIZES), sum(SIZES))
    for digest, (path, size) in files.items():
        assert tier.size_of(digest) == size
        assert b"".join(tier.chunks(digest, size=size)) == path.read_bytes()
        if tier.has_ranges and size > 100:
            assert tier.read(digest, 50, 40) == path.read_bytes()[50:90]
    listed = {each.path.rpartition("/")[2]: each.size for each in tier.listed()}
    assert listed == {digest: size for digest, (_, size) in files.items()}


@pytest.mark.parametrize("size", [100, 20 << 20])
def test_a_file_with_other_bytes_never_gets_the_name(tier: Tier, tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    with pytest.raises(DamagedObjectError, match="does not have the digest"):
        tier.put_file("ab" * 32, path)
    assert tier.size_of("ab" * 32) is None
    assert not list(tier.listed())


def test_what_is_not_there_is_named(tier: Tier) -> None:
    assert tier.size_of("cd" * 32) is None
    assert tier.sizes(["cd" * 32]) == {}
    assert tier.find("sha256", "cd" * 32) is None
    assert tier.find("blake3", "cd" * 32) is None
    assert tier.document("repos", "models--a--b") is None
    with pytest.raises(MissingObjectError, match="has no object cdcd"):
        list(tier.chunks("cd" * 32))


def test_an_object_of_another_size_is_refused(tier: Tier) -> None:
    digest = tier.put_bytes(b"some bytes")
    with pytest.raises(DamagedObjectError, match=r"10 bytes of object .*, not 11"):
        list(tier.chunks(digest, size=11))


def test_objects_are_found_by_their_other_hashes(tier: Tier) -> None:
    digest = tier.put_bytes(b"some bytes")
    tier.add_names(Found(digest, 10), {"sha256": "12" * 32, "git-sha1": "34" * 20})
    assert tier.find("sha256", "12" * 32) == tier.find("git-sha1", "34" * 20) == (digest, 10)
    assert tier.find("blake3", digest) == (digest, 10)


def test_documents_change_and_go(tier: Tier) -> None:
    digest = "ab" * 32

    def first(before: dict[str, Any] | None) -> tuple[dict[str, int], dict[str, Any]]:
        assert before is None
        return {digest: 3}, {"n": 1}

    tier.change("sets", "one.1", first)
    tier.change("sets", "one.1", lambda before: ({digest: 3}, {"n": (before or {})["n"] + 1}))
    found = tier.document("sets", "one.1")
    assert found is not None
    assert (found["objects"], found["content"]) == ({digest: 3}, {"n": 2})
    tier.change("datasets", "two", lambda _: ({}, {}))
    assert sorted(tier.documents()) == [("datasets", "two"), ("sets", "one.1")]
    assert list(tier.documents("sets")) == [("sets", "one.1")]
    tier.remove_document("sets", "one.1")
    assert tier.document("sets", "one.1") is None


@pytest.mark.parametrize("kind", ["folder", "moto"])
def test_no_change_of_a_document_is_lost(
    kind: str, nas: Tier, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tier = nas
    if kind == "moto":
        tier = places.s3_tier(request.getfixturevalue("moto"), tmp_path.name)
    assert tier.abilities.creates

    def add(number: int) -> None:
        def change(before: dict[str, Any] | None) -> tuple[dict[str, int], dict[str, Any]]:
            return {}, {**(before or {}), str(number): number}

        tier.change("repos", "models--a--b", change)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(18)))
    found = tier.document("repos", "models--a--b")
    assert found is not None
    assert len(found["content"]) == 18


def test_the_server_is_asked_what_it_can_do(moto: str, rclone: str, nas: Tier) -> None:
    assert places.s3_tier(moto, "able").abilities.creates
    assert places.s3_tier(moto, "able").abilities.ranges
    assert not places.s3_tier(rclone, "unable").abilities.creates
    assert not places.s3_tier(rclone, "unable").abilities.ranges
    assert nas.abilities.creates
    assert nas.abilities.ranges


def test_a_cut_connection_is_named_and_the_next_try_gets_all(moto: str, tmp_path: Path) -> None:
    (digest, (path, size)), *_ = written(tmp_path, (24 << 20,)).items()
    port = int(moto.rpartition(":")[2])
    with places.Wire(port) as wire:
        tier = places.s3_tier(f"http://127.0.0.1:{wire.port}", tmp_path.name)
        tier.put_file(digest, path)
        wire.left = 9 << 20
        with pytest.raises(TierError, match="did not give or take object"):
            for _ in tier.chunks(digest, size=size):
                pass
        assert wire.cuts
        wire.left = None
        assert b"".join(tier.chunks(digest, size=size)) == path.read_bytes()


def test_nobody_at_the_other_end(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{places.free_port()}"
    tier = Tier("gone", "s3://bucket/x", {"endpoint": endpoint})
    with pytest.raises(TierError, match="The tier gone did not give or take"):
        tier.size_of("ab" * 32)
    missing = Tier("nas", (tmp_path / "unmounted").as_uri())
    with pytest.raises(TierError, match="is not there"):
        missing.size_of("ab" * 32)
    assert not (tmp_path / "unmounted").exists()


def test_a_folder_that_is_no_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="is not the place of a tier"):
        Tier("nas", tmp_path.as_uri()).check()
    (tmp_path / "smartcache.json").write_text('{"format": 2}')
    with pytest.raises(TierError, match="has format 2"):
        Tier("nas", tmp_path.as_uri()).begin()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"objects": {"x": 1}}'])
def test_a_document_that_makes_no_sense_is_named(nas: Tier, text: str) -> None:
    nas.change("sets", "one", lambda _: ({}, {}))
    assert nas.folder is not None
    (path,) = nas.folder.glob("documents/sets/one/*.json")
    path.write_text(text)
    with pytest.raises(DamagedObjectError, match="is damaged"):
        nas.document("sets", "one")


@given(st.text(max_size=12))
def test_no_digest_leads_out_of_the_tier(text: str) -> None:
    with pytest.raises(DamagedObjectError):
        Tier("nas", "file:///").size_of(f"../{text}")


def test_where_a_tier_can_be(tmp_path: Path) -> None:
    assert check_url(str(tmp_path)) == tmp_path.as_uri()
    assert check_url("s3://bucket/prefix/") == "s3://bucket/prefix"
    for bad in ("", "nas/cache", "ftp://host/x", "s3://", "s3://key:secret@bucket/x", "s3://b?x=1"):
        with pytest.raises(ConfigError):
            check_url(bad)
    with pytest.raises(ConfigError, match="holds a secret"):
        check_options({"secret_access_key": "x"})
    assert check_options({"endpoint": "x"}) == {"endpoint": "x"}


def test_a_tier_goes_to_other_processes(nas: Tier) -> None:
    digest = nas.put_bytes(b"some bytes")
    again = pickle.loads(pickle.dumps(nas))  # noqa: S301
    assert again == nas
    assert again.size_of(digest) == 10


def test_the_first_error_ends_what_is_done_for_many() -> None:
    done: list[int] = []

    def act(number: int) -> int:
        if number == 5:
            raise ValueError(number)
        done.append(number)
        return number

    with pytest.raises(ValueError, match="5"):
        list(in_parallel(act, range(1000), threads=4))
    assert len(done) < 20
    assert sorted(in_parallel(lambda each: each * 2, range(50))) == [each * 2 for each in range(50)]
