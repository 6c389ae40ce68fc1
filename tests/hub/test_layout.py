"""The HF cache on disk as `layout` reads it: made by the real client, or broken on purpose."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.hub import layout
from smartcache.hub.records import RemoteFile, Repo, announced_by
from tests.hub.caches import commit_of, make_repo, refs_of
from tests.hub.clients import plain_snapshot, sha256, weights
from tests.hub_server import Hub, git_sha1

FILES = {"config.json": b"{}", "unet/model.safetensors": weights(1), "a b/ü.bin": weights(2)}


def test_a_cache_of_the_real_client_is_understood(hub: Hub, tmp_path: Path) -> None:
    first = hub.add("org/name", FILES, tags=["v1"]).sha
    second = hub.add("org/name", {**FILES, "config.json": b"[]"}, revision="refs/pr/1").sha
    hub.add("org/data", {"x.parquet": weights(3)}, repo_type="dataset")
    hub.add("gpt2", {"x.bin": b""})
    cache = tmp_path / "hf"
    for more in ({"revision": "v1"}, {"revision": "main"}, {"revision": "refs/pr/1"}):
        plain_snapshot(hub, cache, **more)
    plain_snapshot(hub, cache, "org/data", repo_type="dataset")
    plain_snapshot(hub, cache, "gpt2")
    assert [str(repo) for repo, _ in layout.repos_in(cache)] == [
        "dataset/org/data", "model/gpt2", "model/org/name",
    ]  # fmt: skip
    folder = cache / "models--org--name"
    assert refs_of(folder) == {"main": first, "v1": first, "refs/pr/1": second}
    assert layout.commits_of(folder) == sorted([first, second])
    listed = layout.read_listing(folder, first)
    assert listed is not None
    assert {each.path: (each.size, each.etag, each.is_lfs) for each in listed} == {
        "config.json": (2, git_sha1(b"{}"), False),
        "unet/model.safetensors": (100_000, sha256(weights(1)), True),
        "a b/ü.bin": (100_000, sha256(weights(2)), True),
    }
    found = dict(layout.pointers(folder, first))
    assert set(found) == set(FILES)
    for each in listed:
        assert found[each.path] == layout.pointer(folder, first, each.path)
        assert layout.blob_behind(found[each.path]) == folder / "blobs" / each.etag


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list(layout.repos_in(tmp_path / "none")) == []
    assert refs_of(tmp_path) == {}
    assert layout.commits_of(tmp_path) == []
    assert layout.read_listing(tmp_path, "a" * 40) is None
    assert list(layout.pointers(tmp_path, "a" * 40)) == []
    assert layout.blob_behind(tmp_path) is None
    (tmp_path / "file").write_bytes(b"")
    assert list(layout.repos_in(tmp_path / "file")) == []
    assert layout.commits_of(tmp_path / "file") == []


def test_other_folders_are_no_repos(tmp_path: Path) -> None:
    for name in (
        ".locks", "blobs", "models--", "models", "model--org--x", "models----x", "CACHEDIR.TAG",
        "x", "models--a--b",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
    (tmp_path / "models--c--d").write_bytes(b"a file")
    (tmp_path / "models--e--f").symlink_to(tmp_path / "models--a--b")
    assert [repo.id for repo, _ in layout.repos_in(tmp_path)] == ["a/b"]


def test_a_path_that_may_lead_anywhere_else_is_unsafe(tmp_path: Path) -> None:
    for path in (
        "", "/a", "a/", "a//b", ".", "..", "./a", "a/./b", "../a", "a/../b", "a/..", "\\a", "a\\b",
        "..\\a", "C:", "C:/a", "c:a", "a\0b",
    ):  # fmt: skip
        assert layout.safe_parts(path) is None, path
        with pytest.raises(ValueError, match=r".*"):
            layout.pointer(tmp_path, "a" * 40, path)
    for path in ("a", ".a", "..a", "a..", "a/...", "a b/c", "ü/%2e%2e/x", "ab:c"):
        assert layout.safe_parts(path) == tuple(path.split("/")), path


@given(st.text(max_size=30))
def test_a_safe_path_never_leaves_its_folder(path: str) -> None:
    parts = layout.safe_parts(path)
    if parts is not None:
        joined = os.path.normpath(os.path.join("/root/folder", *parts))
        assert joined.startswith("/root/folder/")
        assert "/".join(parts) == path


def test_what_is_no_commit_has_no_snapshot(tmp_path: Path) -> None:
    for commit in ("", "main", "a" * 39, "A" * 40, "../" + "a" * 37, "a" * 64):
        assert not layout.is_commit(commit)
        with pytest.raises(ValueError, match=r".*"):
            layout.pointer(tmp_path, commit, "a")


GOOD: dict[str, object] = {"size": 1, "blob_id": "b" * 40, "lfs_sha256": None, "xet_hash": None}


def test_a_listing_that_cannot_be_understood_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "trees").mkdir()
    for document in (
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000,
        {"format_version": 2, "files": {"a": GOOD}}, {"files": {"a": GOOD}},
        {"format_version": 1}, {"format_version": 1, "files": []},
        {"format_version": 1, "files": {"../a": GOOD}},
        {"format_version": 1, "files": {"a": None}},
        {"format_version": 1, "files": {"a": {**GOOD, "size": "1"}}},
        {"format_version": 1, "files": {"a": {"size": 1}}},
    ):  # fmt: skip
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        (tmp_path / "trees" / f"{'a' * 40}.json").write_bytes(data)
        assert layout.read_listing(tmp_path, "a" * 40) is None, data[:99]


def test_a_good_listing_is_read(tmp_path: Path) -> None:
    (tmp_path / "trees").mkdir()
    lfs = {**GOOD, "lfs_sha256": "d" * 64, "xet_hash": "e" * 64}
    odd = {**GOOD, "xet_hash": "../../x"}
    document = {"format_version": 1, "files": {"a": GOOD, "b/c": lfs, "d": odd}}
    (tmp_path / "trees" / f"{'a' * 40}.json").write_text(json.dumps(document))
    assert layout.read_listing(tmp_path, "a" * 40) == [
        RemoteFile(path="a", size=1, etag="b" * 40),
        RemoteFile(path="b/c", size=1, etag="d" * 64, xet="e" * 64),
        RemoteFile(path="d", size=1, etag="b" * 40),
    ]


def test_a_ref_has_a_commit_and_perhaps_a_newline(tmp_path: Path) -> None:
    (tmp_path / "refs" / "a").mkdir(parents=True)
    (tmp_path / "refs" / "a" / "b").write_text("a" * 40 + "\n")
    for data in (b"", b"main", b"a" * 39, b"\xff" * 40, b"a" * 41):
        (tmp_path / "refs" / "main").write_bytes(data)
        assert refs_of(tmp_path) == {"a/b": "a" * 40}, data


def test_files_in_a_snapshot_have_no_blob_behind_them(tmp_path: Path) -> None:
    folder = make_repo(tmp_path, FILES, symlinks=False)
    found = dict(layout.pointers(folder, commit_of(1)))
    assert set(found) == set(FILES)
    assert [layout.blob_behind(path) for path in found.values()] == [None] * 3


def test_what_users_call_a_repo() -> None:
    for text, repo_type, expected in (
        ("org/name", None, "model/org/name"),
        ("gpt2", None, "model/gpt2"),
        ("dataset/org/name", None, "dataset/org/name"),
        ("datasets/org/name", None, "dataset/org/name"),
        ("models/org/name", None, "model/org/name"),
        ("org/name", "space", "space/org/name"),
        ("datasets/name", "model", "model/datasets/name"),
        ("spaces/org/name", "space", "space/org/name"),
    ):
        repo = Repo.parse(text, repo_type)
        assert str(repo) == expected
        assert Repo.of_folder(repo.folder_name) == repo


def test_names_of_blobs_that_are_hashes() -> None:
    assert announced_by("a" * 64) == {"sha256": "a" * 64}
    assert announced_by("a" * 40) == {"git-sha1": "a" * 40}
    for name in ("", "A" * 64, "a" * 63, "g" * 40, "a" * 64 + ".incomplete"):
        assert announced_by(name) == {}


@pytest.mark.timeout(30)
def test_a_fifo_in_the_place_of_a_ref_or_listing_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("refs/main", f"trees/{'a' * 40}.json"):
        (tmp_path / name).parent.mkdir()
        os.mkfifo(tmp_path / name)
    assert refs_of(tmp_path) == {}
    assert layout.read_listing(tmp_path, "a" * 40) is None
