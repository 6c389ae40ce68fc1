"""Repos leave one HF cache in a bundle and arrive in another, byte for byte."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import string
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api import (
    COMPLETE,
    MANIFEST,
    DestinationExistsError,
    FileChangedError,
    HubError,
    Manifest,
    NoSpaceError,
    RepoNotCachedError,
    Store,
    TarSink,
    UnsafeNameError,
    Wanted,
    decode,
    opened,
    plan_export,
    plan_import,
    store_room,
)
from tests.api import bundle_checksum as checksum
from tests.api import bundle_Content as Content
from tests.api import bundle_encode as encode
from tests.api import hub_bundle_writing as bundle_writing
from tests.hub.bundles import (
    ENCODER,
    FIRST,
    SECOND,
    UNET,
    VAE,
    Files,
    add_repo,
    bring,
    commit_for,
    everything,
    export,
    planned,
    two_repos,
)
from tests.hub_server import Hub, etag_of
from tests.hub_server.pipelines import SHARED_WEIGHTS, Models

FORMS = ("bundle", "bundle.tar")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An HF cache with three repos that share contents."""
    path = tmp_path / "from"
    two_repos(path)
    return path


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The HF cache of the machine without network."""
    return tmp_path / "to"


@pytest.mark.parametrize("form", FORMS)
def test_what_arrives_is_what_was_exported(
    form: str, cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bring(store, export(cache, tmp_path / form), there)
    assert everything(there) == everything(cache)


@pytest.mark.parametrize("form", FORMS)
def test_weights_become_blobs_once_and_small_files_stay_writable(
    form: str, cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bring(store, export(cache, tmp_path / form), there)
    assert sorted(blob.size for blob in store.blobs()) == sorted(map(len, (ENCODER, VAE, UNET)))
    paths = [
        there / f"models--org--{name}" / "blobs" / etag_of("x.bin", ENCODER)
        for name in ("first", "second")
    ]
    assert os.path.samefile(*paths)
    assert paths[0].stat().st_mode & 0o777 == 0o444
    small = there / "models--org--first" / "blobs" / etag_of("x.json", FIRST["model_index.json"])
    assert small.stat().st_mode & 0o200
    assert small.stat().st_nlink == 1


def test_a_folder_has_each_content_once_and_says_when_it_is_whole(
    cache: Path, tmp_path: Path
) -> None:
    bundle = export(cache, tmp_path / "bundle")
    manifest = (bundle / MANIFEST).read_bytes()
    contents = [path.read_bytes() for path in (bundle / "blobs").iterdir()]
    assert sorted(os.listdir(bundle)) == ["blobs", COMPLETE, MANIFEST]
    assert len(set(contents)) == len(contents)
    assert contents.count(ENCODER) == 1
    assert (bundle / COMPLETE).read_bytes() == checksum(manifest)
    assert decode(manifest).size == sum(map(len, contents))


def test_a_tar_has_what_the_folder_has_in_the_documented_order(cache: Path, tmp_path: Path) -> None:
    plan = planned(cache, "org/first", "org/second")
    plan.write_folder(tmp_path / "bundle")
    plan.write_tar(tmp_path / "bundle.tar")
    with tarfile.open(tmp_path / "bundle.tar", "r:") as tar:
        names = tar.getnames()
        tar.extractall(tmp_path / "unpacked", filter="data")
    blobs = sorted(f"blobs/{path.name}" for path in (tmp_path / "bundle" / "blobs").iterdir())
    assert names == [MANIFEST, *blobs, COMPLETE]
    assert everything(tmp_path / "unpacked") == everything(tmp_path / "bundle")


def test_a_bundle_shares_no_inode_with_the_cache(cache: Path, tmp_path: Path) -> None:
    """Somebody may edit it."""
    bundle = export(cache, tmp_path / "bundle")
    assert {path.stat().st_nlink for path in (bundle / "blobs").iterdir()} == {1}


def test_one_revision_is_exported_with_the_names_it_has(tmp_path: Path) -> None:
    old = add_repo(tmp_path, "org/name", {"a.json": b"1"}, refs=("v1",))
    new = add_repo(tmp_path, "org/name", {"a.json": b"2"}, refs=("main",))
    for revision, commit, refs in [
        ("v1", old, ["v1"]), ("main", new, ["main"]), (old, old, ["v1"]), (new[:7], new, ["main"])
    ]:  # fmt: skip
        (repo,) = planned(tmp_path, f"org/name@{revision}").manifest.repos
        assert list(repo.revisions) == [commit]
        assert list(repo.refs) == refs
    (both,) = planned(tmp_path, "org/name").manifest.repos
    assert set(both.revisions) == {old, new}
    (again,) = planned(tmp_path, "org/name@v1", "org/name@main").manifest.repos
    assert again == both


@pytest.mark.parametrize("word", ["org/nothing", "org/first@nothing", "datasets/org/first"])
def test_what_is_not_cached_is_not_exported(word: str, cache: Path) -> None:
    with pytest.raises(RepoNotCachedError):
        planned(cache, word)


def test_the_beginning_of_two_commits_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots"
    for end in "ab":
        (folder / ("1234" + end * 36)).mkdir(parents=True)
    with pytest.raises(RepoNotCachedError, match="several"):
        planned(tmp_path, "org/name@1234")
    assert len(planned(tmp_path, "org/name@1234a").manifest.repos[0].revisions) == 1


def test_a_repo_in_two_caches_is_exported_with_the_revisions_of_both(tmp_path: Path) -> None:
    one = add_repo(tmp_path / "a", "org/name", {"a.json": b"1"})
    two = add_repo(tmp_path / "b", "org/name", {"a.json": b"2"}, refs=("v2",))
    plan = plan_export([tmp_path / "a", tmp_path / "b"], [Wanted.parse("org/name")])
    (repo,) = plan.manifest.repos
    assert set(repo.revisions) == {one, two}
    assert repo.refs == {"main": one, "v2": two}


def test_a_partial_snapshot_is_exported_as_it_is_and_said_so(
    tmp_path: Path, there: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    commit = add_repo(cache, "org/first", FIRST)
    folder = cache / "models--org--first"
    (folder / "snapshots" / commit / "unet" / "model.safetensors").unlink()
    (folder / "blobs" / etag_of("x.bin", VAE)).unlink()
    plan = planned(cache, "org/first")
    assert plan.partial == {f"model/org/first@{commit}": 2}
    plan.write_folder(tmp_path / "bundle")
    bring(store, tmp_path / "bundle", there)
    names = {name.split(commit)[1] for name in everything(there) if f"{commit}/" in name}
    kept = FIRST.keys() - {"unet/model.safetensors", "vae/model.safetensors"}
    assert names == {f"/{name}" for name in kept}


def test_blobs_in_the_shared_store_of_the_client_are_exported(
    tmp_path: Path, there: Path, store: Store
) -> None:
    """There `blobs/<etag>` is a symlink itself."""
    cache = tmp_path / "from"
    add_repo(cache, "org/first", FIRST)
    before = everything(cache)
    blob = cache / "models--org--first" / "blobs" / etag_of("x.bin", ENCODER)
    shared = cache / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    bring(store, export(cache, tmp_path / "bundle", "org/first"), there)
    assert everything(there) == before


@pytest.mark.parametrize("listing", [True, False])
def test_a_cache_without_symlinks_is_exported(
    listing: bool, tmp_path: Path, there: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    commit = add_repo(cache, "org/first", FIRST, listing=listing)
    before = everything(cache)
    folder = cache / "models--org--first"
    for name in FIRST:
        os.replace((folder / "snapshots" / commit / name).resolve(), tmp_path / "file")
        os.replace(tmp_path / "file", folder / "snapshots" / commit / name)
    assert os.listdir(folder / "blobs") == []
    bring(store, export(cache, tmp_path / "bundle"), there)
    assert everything(there) == before


@pytest.mark.parametrize("form", FORMS)
def test_where_there_are_no_symlinks_snapshots_have_copies(
    form: str,
    cache: Path,
    there: Path,
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = export(cache, tmp_path / form)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    bring(store, bundle, there)
    bring(store, bundle, there)
    snapshot = there / "models--org--first" / "snapshots" / commit_of(cache, "org/first")
    assert {name: (snapshot / name).read_bytes() for name in FIRST} == FIRST
    assert not any(path.is_symlink() for path in there.rglob("*"))


def commit_of(cache: Path, name: str) -> str:
    return (cache / f"models--{name.replace('/', '--')}" / "refs" / "main").read_text()


# what is there already


def spoil(bundle: Path) -> None:
    """Let a folder have blobs of the right size, but with other bytes: they must not be read."""
    for path in (bundle / "blobs").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)


def test_what_the_cache_has_is_not_read_again(
    cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bundle = export(cache, tmp_path / "bundle")
    first = bring(store, bundle, there)
    assert first.present_size == 0
    before = everything(there)
    inodes = {path: path.lstat().st_ino for path in there.rglob("*")}
    spoil(bundle)
    again = bring(store, bundle, there)
    assert (again.new_size, again.known_size) == (0, 0)
    assert everything(there) == before
    assert {path: path.lstat().st_ino for path in there.rglob("*")} == inodes


def test_what_the_store_has_is_not_read_from_the_bundle(
    tmp_path: Path, there: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    add_repo(cache, "org/name", {"model.safetensors": ENCODER}, listing=False)
    bundle = export(cache, tmp_path / "bundle")
    digest = store.put_stream([ENCODER], algorithms=("sha256",)).digest
    spoil(bundle)
    plan = bring(store, bundle, there)
    assert (plan.new_size, plan.known_size) == (0, len(ENCODER))
    blob = there / "models--org--name" / "blobs" / etag_of("x.bin", ENCODER)
    assert os.path.samefile(blob, store.path_of(digest))


@pytest.mark.parametrize("form", FORMS)
def test_a_blob_that_the_store_has_lost_comes_from_the_bundle(
    form: str, cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    digest = store.put_stream([ENCODER], algorithms=("sha256",)).digest
    path = store.path_of(digest)
    os.chmod(path, 0o644)
    path.write_bytes(b"\0" * len(ENCODER))
    bring(store, export(cache, tmp_path / form), there)
    assert everything(there) == everything(cache)


def test_a_new_revision_is_added_to_a_repo_that_is_there(
    tmp_path: Path, there: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    add_repo(cache, "org/name", FIRST, refs=("v1",))
    bring(store, export(cache, tmp_path / "one"), there)
    add_repo(cache, "org/name", SECOND, refs=("main",))
    plan = bring(store, export(cache, tmp_path / "two.tar"), there)
    assert plan.present_size >= len(ENCODER) + len(VAE)
    assert everything(there) == everything(cache)


def test_a_partial_snapshot_that_is_there_is_completed(
    cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bundle = export(cache, tmp_path / "bundle")
    bring(store, bundle, there)
    snapshot = there / "models--org--first" / "snapshots" / commit_of(cache, "org/first")
    shutil.rmtree(snapshot / "unet")
    (snapshot / "model_index.json").unlink()
    bring(store, bundle, there)
    assert everything(there) == everything(cache)


def test_a_ref_that_is_there_is_kept_unless_it_is_to_be_moved(
    tmp_path: Path, there: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    new = add_repo(cache, "org/name", {"a.json": b"2"}, refs=("main", "v2"))
    bundle = export(cache, tmp_path / "bundle")
    old = add_repo(there, "org/name", {"a.json": b"1"})
    refs = there / "models--org--name" / "refs"
    plan = bring(store, bundle, there)
    assert [(each.ref, each.former, each.commit) for each in plan.kept_refs] == [("main", old, new)]
    assert ((refs / "main").read_text(), (refs / "v2").read_text()) == (old, new)
    assert bring(store, bundle, there, update_refs=True).kept_refs == []
    assert (refs / "main").read_text() == new


@pytest.mark.parametrize("form", FORMS)
def test_an_edited_file_is_not_replaced_unasked(
    form: str, cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    """Programs write their config through the symlinks of a snapshot."""
    bundle = export(cache, tmp_path / form)
    bring(store, bundle, there)
    snapshot = there / "models--org--first" / "snapshots" / commit_of(cache, "org/first")
    (snapshot / "model_index.json").write_bytes(b"mine")
    with pytest.raises(DestinationExistsError, match="other bytes"):
        bring(store, bundle, there)
    assert (snapshot / "model_index.json").read_bytes() == b"mine"
    plan = bring(store, bundle, there, force=True)
    assert plan.replaced == [(snapshot / "model_index.json").resolve()]
    assert everything(there) == everything(cache)


def test_a_pointer_to_another_blob_is_not_replaced_unasked(
    cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bundle = export(cache, tmp_path / "bundle")
    bring(store, bundle, there)
    snapshot = there / "models--org--first" / "snapshots" / commit_of(cache, "org/first")
    pointer = snapshot / "empty.txt"
    pointer.unlink()
    pointer.symlink_to(os.readlink(snapshot / "model_index.json"))
    with pytest.raises(DestinationExistsError):
        bring(store, bundle, there)
    bring(store, bundle, there, force=True)
    assert everything(there) == everything(cache)


# the store


def test_a_store_on_another_filesystem_gets_no_blobs(
    cache: Path, tmp_path: Path, elsewhere: Path
) -> None:
    bundle = export(cache, tmp_path / "bundle.tar")
    there = elsewhere / "hub"
    with Store(tmp_path / "store") as store:
        bring(store, bundle, there)
        assert list(store.blobs()) == []
    assert everything(there) == everything(cache)
    modes = {path.stat().st_mode & 0o777 for path in there.glob("*/blobs/*")}
    assert modes == {0o644 & ~current_umask()}


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_blob_of_a_store_elsewhere_is_copied(
    tmp_path: Path, elsewhere: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    add_repo(cache, "org/name", {"model.safetensors": ENCODER}, listing=False)
    bundle = export(cache, tmp_path / "bundle")
    store.put_stream([ENCODER], algorithms=("sha256",))
    spoil(bundle)
    assert bring(store, bundle, elsewhere / "hub").known_size == len(ENCODER)
    assert everything(elsewhere / "hub") == everything(cache)


def test_the_blobs_live_as_long_as_the_repo(
    cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bring(store, export(cache, tmp_path / "bundle"), there)
    owners = {owner.name for owner, state in store.owners() if state == "live"}
    commit = commit_of(cache, "org/first")
    assert any(name.startswith(f"model/org/first@{commit} in ") for name in owners)
    blob = store.find("sha256", etag_of("x.bin", ENCODER))
    assert blob is not None
    assert len(store.holders_of(blob)) == 2
    shutil.rmtree(there / "models--org--first")
    assert len(store.holders_of(blob)) == 1


# where to


def test_an_existing_destination_is_refused(cache: Path, tmp_path: Path) -> None:
    plan = planned(cache, "org/first")
    for name in FORMS:
        write = plan.write_tar if name.endswith("tar") else plan.write_folder
        write(tmp_path / name)
        before = everything(tmp_path)
        with pytest.raises(DestinationExistsError):
            write(tmp_path / name)
        assert everything(tmp_path) == before


@pytest.mark.parametrize("can_exchange", [True, False])
def test_force_replaces_a_bundle(
    can_exchange: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(bundle_writing, "exchange", lambda *_: False)
    where = tmp_path / "there"
    where.mkdir()
    planned(cache, "org/second").write_folder(where / "bundle")
    planned(cache, "org/second").write_tar(where / "bundle.tar")
    plan = planned(cache, "org/first")
    plan.write_folder(where / "bundle", force=True)
    plan.write_tar(where / "bundle.tar", force=True)
    assert sorted(os.listdir(where)) == ["bundle", "bundle.tar"]
    for name in FORMS:
        with opened(where / name) as source:
            assert source.manifest == plan.manifest


def test_force_replaces_a_bundle_that_has_lost_its_blobs(cache: Path, tmp_path: Path) -> None:
    plan = planned(cache, "org/first")
    plan.write_folder(tmp_path / "bundle")
    shutil.rmtree(tmp_path / "bundle" / "blobs")
    plan.write_folder(tmp_path / "bundle", force=True)
    with opened(tmp_path / "bundle") as source:
        assert source.manifest == plan.manifest
    shutil.rmtree(tmp_path / "bundle" / "blobs")
    (tmp_path / "bundle" / "blobs").write_text("mine")
    with pytest.raises(DestinationExistsError, match="not replaced"):
        plan.write_folder(tmp_path / "bundle", force=True)
    assert (tmp_path / "bundle" / "blobs").read_text() == "mine"


def test_force_replaces_nothing_but_a_bundle(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("all my work")
    plan = planned(cache, "org/first")
    for write in (plan.write_folder, plan.write_tar):
        with pytest.raises(DestinationExistsError, match="not replaced"):
            write(folder, force=True)
    (tmp_path / "mine.tar").write_text("all my other work")
    with pytest.raises(DestinationExistsError, match="not replaced"):
        plan.write_tar(tmp_path / "mine.tar", force=True)
    assert (tmp_path / "mine.tar").read_text() == "all my other work"
    plan.write_folder(tmp_path / "bundle")
    (tmp_path / "bundle" / "notes.txt").write_text("mine")
    with pytest.raises(DestinationExistsError, match="not replaced"):
        plan.write_folder(tmp_path / "bundle", force=True)
    assert (folder / "chapter.txt").exists()
    assert (tmp_path / "bundle" / "notes.txt").exists()


def test_an_empty_folder_is_filled(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    export(cache, tmp_path / "bundle")
    assert (tmp_path / "bundle" / COMPLETE).exists()


def test_a_missing_folder_is_said(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="There is no folder"):
        export(cache, tmp_path / "a" / "b" / "bundle")


@pytest.mark.parametrize("form", FORMS)
def test_a_disk_that_is_too_small_is_known_before_anything_is_written(
    form: str,
    cache: Path,
    there: Path,
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = export(cache, tmp_path / form)
    needed = len(ENCODER) + len(VAE) + len(UNET)
    monkeypatch.setattr(store_room, "free_bytes", lambda _: needed)
    before = set(os.listdir(tmp_path))
    with pytest.raises(NoSpaceError), plan_import(store, bundle, there):
        pass
    monkeypatch.setattr(bundle_writing, "clone", lambda *_: False)
    with pytest.raises(NoSpaceError):
        export(cache, tmp_path / f"second {form}")
    assert set(os.listdir(tmp_path)) == before


# large files


def test_sizes_above_8_gb_are_written_as_tar_programs_read_them(tmp_path: Path) -> None:
    huge, content = 9 << 30, commit_for("x").ljust(64, "0")
    out = io.BytesIO()
    with (tmp_path / "short").open("wb+") as short, pytest.raises(FileChangedError):
        TarSink(out).blob(content, short.fileno(), huge, ("sha256",), lambda _: None)
    member = tarfile.TarInfo.frombuf(out.getvalue()[:512], "ascii", "strict")
    assert (member.name, member.size) == (f"blobs/{content}", huge)


def test_a_content_above_8_gb_is_passed_over_in_a_tar(tmp_path: Path) -> None:
    """A sparse tar: nothing of the hole is read, and yet what comes after it is found."""
    huge, sha256 = 9 << 30, "ab" * 32
    manifest = encode(large_manifest(sha256, huge))
    path = tmp_path / "huge.tar"
    with path.open("wb") as out:
        sink = TarSink(out)
        sink.text(MANIFEST, manifest)
        member = tarfile.TarInfo(f"blobs/{sha256}")
        member.size = huge
        out.write(member.tobuf(tarfile.GNU_FORMAT))
        out.seek(huge, os.SEEK_CUR)
        sink.text(COMPLETE, checksum(manifest))
        sink.finish()
    assert path.stat().st_blocks * 512 < 1 << 20
    with opened(path) as source:
        assert [sha256 for sha256, _ in source.contents()] == [sha256]
        assert source.manifest.size == huge
    listed = subprocess.run(["tar", "tf", path], check=True, capture_output=True, text=True)
    assert listed.stdout.split() == [MANIFEST, f"blobs/{sha256}", COMPLETE]


def large_manifest(sha256: str, size: int) -> Manifest:
    document = {
        "format": "smartcache-bundle",
        "format_version": 1,
        "created_at": "2026-11-16T16:00:00Z",
        "repos": [
            {
                "type": "model",
                "id": "org/huge",
                "refs": {},
                "revisions": {
                    "1" * 40: {"files": {"a.bin": {"etag": sha256, "size": size}}, "tree": None}
                },
            }
        ],
        "blobs": {sha256: {"size": size, "sha256": sha256}},
    }
    manifest = decode(json.dumps(document).encode())
    assert manifest.blobs == {sha256: Content(size=size, sha256=sha256)}
    return manifest


@pytest.mark.parametrize("form", FORMS)
def test_memory_does_not_grow_with_the_files(
    form: str, there: Path, tmp_path: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    add_repo(cache, "org/name", {"model.safetensors": os.urandom(1 << 20) * 48})
    tracemalloc.start()
    try:
        bring(store, export(cache, tmp_path / form), there)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


# any repo

_CHARACTERS = string.ascii_letters + string.digits + " _-.~'\"$&*:;<>?|#%äß語🙂\n\t"
_NAMES = st.text(_CHARACTERS, min_size=1, max_size=12)
_PARTS = _NAMES.filter(lambda name: name not in (".", "..") and name[1:2] != ":")
_PATHS = st.lists(_PARTS, min_size=1, max_size=3).map("/".join)
_DATA = st.sampled_from([b"", b"{}", b"text\n", ENCODER, VAE, ENCODER[:70_000], VAE[:64_000]])


@st.composite
def file_sets(draw: st.DrawFn) -> Files:
    """Files of one snapshot: no name is a folder of another."""
    suffixes = st.sampled_from(["", ".json", ".safetensors", ".bin", ".txt"])
    chosen: dict[str, bytes] = {}
    for path in draw(st.lists(st.builds("{}{}".format, _PATHS, suffixes), max_size=6)):
        is_free = all(
            not f"{path}/".startswith(f"{other}/") and not f"{other}/".startswith(f"{path}/")
            for other in chosen
        )
        if is_free:
            chosen[path] = draw(_DATA)
    return chosen


_REPOS = st.dictionaries(
    st.tuples(
        st.sampled_from(["model", "dataset", "space"]),
        st.sampled_from(["org/name", "org/other", "gpt2", "A_b/c.d-e"]),
    ),
    st.lists(st.tuples(file_sets(), st.booleans()), min_size=1, max_size=3),
    min_size=1,
    max_size=3,
)


@given(repos=_REPOS)
@settings(max_examples=15)
def test_any_repos_survive_the_way(
    repos: dict[tuple[str, str], list[tuple[Files, bool]]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for (repo_type, repo), revisions in repos.items():
            for number, (files, listing) in enumerate(revisions):
                add_repo(
                    root / "from", repo, files, repo_type=repo_type,  # type: ignore[arg-type]
                    refs=(f"v/{number}",), listing=listing,
                )  # fmt: skip
        for form in FORMS:
            export(root / "from", root / form)
            with Store(root / f"store of {form}") as store:
                bring(store, root / form, root / f"to {form}")
            assert everything(root / f"to {form}") == everything(root / "from")
        with opened(root / FORMS[0]) as folder, opened(root / FORMS[1]) as tar:
            assert folder.manifest.repos == tar.manifest.repos
            assert folder.manifest.blobs == tar.manifest.blobs


def test_a_name_that_could_not_be_imported_is_not_exported(tmp_path: Path) -> None:
    add_repo(tmp_path, "org/name", {"a\\b.json": b"{}"})
    with pytest.raises(UnsafeNameError, match="leads out"):
        planned(tmp_path, "org/name")


# with the real client


def run_python(code: str, environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
for repo in sys.argv[1:]:
    print(snapshot_download(repo))
"""
LOAD = """
from diffusers import StableDiffusionPipeline
from transformers import AutoModel
for repo in ("org/first", "org/second"):
    pipe = StableDiffusionPipeline.from_pretrained(repo)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a cat", num_inference_steps=1, height=32, width=32, output_type="np").images
    print(image.shape[0])
print(AutoModel.from_pretrained("org/language").config.model_type)
"""


@pytest.mark.parametrize("form", FORMS)
def test_the_real_client_works_offline_with_what_arrived(
    form: str, tmp_path: Path, there: Path, store: Store
) -> None:
    cache, repos = tmp_path / "from", ("org/first", "org/second")
    with Hub() as hub:
        hub.add("org/first", FIRST)
        hub.add("org/second", SECOND)
        before = run_python(DOWNLOAD, {**hub.environment, "HF_HUB_CACHE": str(cache)}, *repos)
        bring(store, export(cache, tmp_path / form), there)
        hub.clear()
        online = {**hub.environment, "HF_HUB_CACHE": str(there)}
        offline = {**online, "HF_HUB_OFFLINE": "1"}
        assert run_python(DOWNLOAD, offline, *repos) == before.replace(str(cache), str(there))
        assert not hub.requests
        assert run_python(DOWNLOAD, online, *repos) == before.replace(str(cache), str(there))
        assert hub.gets("/resolve/") == []
        hf = Path(sys.executable).with_name("hf")
        for repo in repos:
            words = [str(hf), "cache", "verify", repo, "--fail-on-missing-files"]
            env = {**os.environ, **online}
            subprocess.run(words, env=env, check=True, capture_output=True)


@pytest.mark.timeout(300)
@pytest.mark.torch
@pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed")
@pytest.mark.soak
def test_pipelines_and_models_load_offline(
    models: Models, tmp_path: Path, there: Path, store: Store
) -> None:
    cache, repos = tmp_path / "from", ("org/first", "org/second", "org/language")
    with Hub() as hub:
        for repo, folder in zip(repos, (models.first, models.second, models.language), strict=True):
            hub.add_folder(repo, folder)
        run_python(DOWNLOAD, {**hub.environment, "HF_HUB_CACHE": str(cache)}, *repos)
        bring(store, export(cache, tmp_path / "bundle"), there)
        hub.clear()
        offline = {**hub.environment, "HF_HUB_CACHE": str(there), "HF_HUB_OFFLINE": "1"}
        assert run_python(LOAD, offline).split() == ["1", "1", "bert"]
        assert not hub.requests
    for name in SHARED_WEIGHTS:
        first, second = (
            next(there.glob(f"{folder}/snapshots/*/{name}"))
            for folder in ("models--org--first", "models--org--second")
        )
        assert os.path.samefile(first, second)


def test_the_client_sees_no_damage_in_a_cache_that_is_half_imported(
    cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    from huggingface_hub import scan_cache_dir

    bundle = export(cache, tmp_path / "bundle.tar")
    os.truncate(bundle, bundle.stat().st_size - 200_000)
    with pytest.raises(HubError, match="ends early"):
        bring(store, bundle, there)
    found = scan_cache_dir(there)
    assert found.warnings == []
    assert {len(repo.revisions) for repo in found.repos} <= {0}
