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

from smartcache.errors import (
    DestinationExistsError,
    FileChangedError,
    HubError,
    NoSpaceError,
    RepoNotCachedError,
    UnsafeNameError,
)
from smartcache.hub.care import bundle as bundle_module
from smartcache.hub.care.bundle import (
    COMPLETE,
    MANIFEST,
    Content,
    Manifest,
    TarSink,
    checksum,
    decode,
    encode,
    opened,
)
from smartcache.hub.care.carry import Wanted, plan_export, plan_import
from smartcache.store.store import Store
from smartcache.system import filesystems as store_room
from tests.hub.bundles import (
    ENCODER,
    FIRST,
    SECOND,
    UNET,
    VAE,
    Files,
    Way,
    add_repo,
    bring,
    commit_for,
    everything,
    export,
    planned,
)
from tests.hub_server import Hub, etag_of
from tests.hub_server.pipelines import SHARED_WEIGHTS, Models

FORMS = ("bundle", "bundle.tar")


@pytest.mark.parametrize("form", FORMS)
def test_what_arrives_is_what_was_exported(form: str, way: Way) -> None:
    """Weights become blobs once, and small files stay writable."""
    way.bring(way.export(form))
    way.assert_arrived()
    sizes = sorted(blob.size for blob in way.store.blobs())
    assert sizes == sorted(map(len, (ENCODER, VAE, UNET)))
    paths = [
        way.there / f"models--org--{name}" / "blobs" / etag_of("x.bin", ENCODER)
        for name in ("first", "second")
    ]
    assert os.path.samefile(*paths)
    assert paths[0].stat().st_mode & 0o777 == 0o444
    small = (way.snapshot() / "model_index.json").resolve()
    assert small.stat().st_mode & 0o200
    assert small.stat().st_nlink == 1


def test_a_bundle_has_each_content_once_and_says_when_it_is_whole(way: Way) -> None:
    """A tar has what the folder has, in the documented order; no inode is shared: some edit it."""
    plan = planned(way.cache, "org/first", "org/second")
    bundle = way.root / "bundle"
    plan.write_folder(bundle)
    manifest = (bundle / MANIFEST).read_bytes()
    blobs = sorted((bundle / "blobs").iterdir())
    contents = [path.read_bytes() for path in blobs]
    assert {path.stat().st_nlink for path in blobs} == {1}
    assert sorted(os.listdir(bundle)) == ["blobs", COMPLETE, MANIFEST]
    assert len(set(contents)) == len(contents)
    assert contents.count(ENCODER) == 1
    assert (bundle / COMPLETE).read_bytes() == checksum(manifest)
    assert decode(manifest).size == sum(map(len, contents))
    plan.write_tar(way.root / "bundle.tar")
    with tarfile.open(way.root / "bundle.tar", "r:") as tar:
        names = tar.getnames()
        tar.extractall(way.root / "unpacked", filter="data")
    assert names == [MANIFEST, *(f"blobs/{path.name}" for path in blobs), COMPLETE]
    assert everything(way.root / "unpacked") == everything(bundle)


def test_one_revision_is_exported_with_the_names_it_has(tmp_path: Path) -> None:
    old = add_repo(tmp_path, "org/name", {"a.json": b"1"}, refs=("v1",))
    new = add_repo(tmp_path, "org/name", {"a.json": b"2"}, refs=("main",))
    for revision, commit, refs in [
        ("v1", old, ["v1"]), ("main", new, ["main"]), (old, old, ["v1"]), (new[:7], new, ["main"]),
        (new[:7].upper(), new, ["main"]),
    ]:  # fmt: skip
        (repo,) = planned(tmp_path, f"org/name@{revision}").manifest.repos
        assert list(repo.revisions) == [commit]
        assert list(repo.refs) == refs
    (both,) = planned(tmp_path, "org/name").manifest.repos
    assert set(both.revisions) == {old, new}
    (again,) = planned(tmp_path, "org/name@v1", "org/name@main").manifest.repos
    assert again == both


def test_what_is_not_cached_is_not_exported(way: Way) -> None:
    for word in ("org/nothing", "org/first@nothing", "datasets/org/first"):
        with pytest.raises(RepoNotCachedError):
            planned(way.cache, word)
    folder = way.cache / "models--org--name" / "snapshots"
    for end in "ab":
        (folder / ("1234" + end * 36)).mkdir(parents=True)
    with pytest.raises(RepoNotCachedError, match="several"):
        planned(way.cache, "org/name@1234")
    assert len(planned(way.cache, "org/name@1234a").manifest.repos[0].revisions) == 1


def test_a_repo_in_two_caches_is_exported_with_the_revisions_of_both(tmp_path: Path) -> None:
    one = add_repo(tmp_path / "a", "org/name", {"a.json": b"1"})
    two = add_repo(tmp_path / "b", "org/name", {"a.json": b"2"}, refs=("v2",))
    plan = plan_export([tmp_path / "a", tmp_path / "b"], [Wanted.parse("org/name")])
    (repo,) = plan.manifest.repos
    assert set(repo.revisions) == {one, two}
    assert repo.refs == {"main": one, "v2": two}


def test_a_partial_snapshot_is_exported_as_it_is_and_said_so(way: Way) -> None:
    commit = way.snapshot().name
    folder = way.cache / "models--org--first"
    (folder / "snapshots" / commit / "unet" / "model.safetensors").unlink()
    (folder / "blobs" / etag_of("x.bin", VAE)).unlink()
    plan = planned(way.cache, "org/first")
    assert plan.partial == {f"model/org/first@{commit}": 2}
    plan.write_folder(way.root / "bundle")
    way.bring(way.root / "bundle")
    names = {name.split(commit)[1] for name in everything(way.there) if f"{commit}/" in name}
    kept = FIRST.keys() - {"unet/model.safetensors", "vae/model.safetensors"}
    assert names == {f"/{name}" for name in kept}


def test_blobs_in_the_shared_store_of_the_client_are_exported(way: Way) -> None:
    """There `blobs/<etag>` is a symlink itself."""
    before = everything(way.cache)
    blob = way.cache / "models--org--first" / "blobs" / etag_of("x.bin", ENCODER)
    shared = way.cache / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    way.bring(way.export())
    assert everything(way.there) == before


@pytest.mark.parametrize("listing", [True, False])
def test_a_cache_without_symlinks_is_exported(listing: bool, tmp_path: Path, store: Store) -> None:
    way = Way(tmp_path, store)
    commit = add_repo(way.cache, "org/first", FIRST, listing=listing)
    before = everything(way.cache)
    folder = way.cache / "models--org--first"
    for name in FIRST:
        os.replace((folder / "snapshots" / commit / name).resolve(), tmp_path / "file")
        os.replace(tmp_path / "file", folder / "snapshots" / commit / name)
    assert os.listdir(folder / "blobs") == []
    way.bring(way.export())
    assert everything(way.there) == before


@pytest.mark.parametrize("form", FORMS)
def test_where_there_are_no_symlinks_snapshots_have_copies(
    form: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = way.export(form)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    way.bring(bundle)
    way.bring(bundle)
    assert {name: (way.snapshot() / name).read_bytes() for name in FIRST} == FIRST
    assert not any(path.is_symlink() for path in way.there.rglob("*"))


# what is there already


def spoil(bundle: Path) -> None:
    """Let a folder have blobs of the right size, but with other bytes: they must not be read."""
    for path in (bundle / "blobs").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)


def test_what_the_cache_has_is_not_read_again(way: Way) -> None:
    bundle = way.export()
    assert way.bring(bundle).present_size == 0
    before = everything(way.there)
    inodes = {path: path.lstat().st_ino for path in way.there.rglob("*")}
    spoil(bundle)
    again = way.bring(bundle)
    assert (again.new_size, again.known_size) == (0, 0)
    assert everything(way.there) == before
    assert {path: path.lstat().st_ino for path in way.there.rglob("*")} == inodes


def test_what_the_store_has_is_not_read_from_the_bundle(
    tmp_path: Path, elsewhere: Path, store: Store
) -> None:
    """On its filesystem it is linked, elsewhere copied."""
    way = Way(tmp_path, store)
    add_repo(way.cache, "org/name", {"model.safetensors": ENCODER}, listing=False)
    bundle = way.export()
    digest = store.put_stream([ENCODER], algorithms=("sha256",)).digest
    spoil(bundle)
    plan = way.bring(bundle)
    assert (plan.new_size, plan.known_size) == (0, len(ENCODER))
    blob = way.there / "models--org--name" / "blobs" / etag_of("x.bin", ENCODER)
    assert os.path.samefile(blob, store.path_of(digest))
    assert bring(store, bundle, elsewhere / "hub").known_size == len(ENCODER)
    assert everything(elsewhere / "hub") == everything(way.cache)


@pytest.mark.parametrize("form", FORMS)
def test_a_blob_that_the_store_has_lost_comes_from_the_bundle(form: str, way: Way) -> None:
    digest = way.store.put_stream([ENCODER], algorithms=("sha256",)).digest
    path = way.store.path_of(digest)
    os.chmod(path, 0o644)
    path.write_bytes(b"\0" * len(ENCODER))
    way.bring(way.export(form))
    way.assert_arrived()


def test_a_repo_that_is_there_gets_what_it_lacks(tmp_path: Path, store: Store) -> None:
    """A new revision, and files that a partial snapshot has not."""
    way = Way(tmp_path, store)
    add_repo(way.cache, "org/name", FIRST, refs=("v1",))
    way.bring(way.export("one"))
    add_repo(way.cache, "org/name", SECOND, refs=("main",))
    assert way.bring(way.export("two.tar")).present_size >= len(ENCODER) + len(VAE)
    way.assert_arrived()
    shutil.rmtree(way.snapshot("org/name") / "text_encoder")
    (way.snapshot("org/name") / "model_index.json").unlink()
    way.bring(tmp_path / "two.tar")
    way.assert_arrived()


def test_a_ref_that_is_there_is_kept_unless_it_is_to_be_moved(tmp_path: Path, store: Store) -> None:
    way = Way(tmp_path, store)
    new = add_repo(way.cache, "org/name", {"a.json": b"2"}, refs=("main", "v2"))
    bundle = way.export()
    old = add_repo(way.there, "org/name", {"a.json": b"1"})
    refs = way.there / "models--org--name" / "refs"
    kept = way.bring(bundle).kept_refs
    assert [(each.ref, each.former, each.commit) for each in kept] == [("main", old, new)]
    assert ((refs / "main").read_text(), (refs / "v2").read_text()) == (old, new)
    assert way.bring(bundle, update_refs=True).kept_refs == []
    assert (refs / "main").read_text() == new


@pytest.mark.parametrize("form", FORMS)
def test_an_edited_file_or_another_pointer_is_not_replaced_unasked(form: str, way: Way) -> None:
    """Programs write their config through the symlinks of a snapshot."""
    bundle = way.export(form)
    way.bring(bundle)
    edited, pointer = way.snapshot() / "model_index.json", way.snapshot() / "empty.txt"
    edited.write_bytes(b"mine")
    with pytest.raises(DestinationExistsError, match="other bytes"):
        way.bring(bundle)
    assert edited.read_bytes() == b"mine"
    assert way.bring(bundle, force=True).replaced == [edited.resolve()]
    pointer.unlink()
    pointer.symlink_to(os.readlink(edited))
    with pytest.raises(DestinationExistsError):
        way.bring(bundle)
    way.bring(bundle, force=True)
    way.assert_arrived()


# the store


def test_a_store_on_another_filesystem_gets_no_blobs(way: Way, elsewhere: Path) -> None:
    there = elsewhere / "hub"
    bring(way.store, way.export("bundle.tar"), there)
    assert list(way.store.blobs()) == []
    assert everything(there) == everything(way.cache)
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in there.glob("*/blobs/*")} == {0o644 & ~umask}


def test_the_blobs_live_as_long_as_a_repo_has_them(way: Way) -> None:
    way.bring(way.export())
    blob = way.store.find("sha256", etag_of("x.bin", ENCODER))
    assert blob is not None
    assert blob.names == 2
    assert way.store.plan_prune().victims == ()
    shutil.rmtree(way.there / "models--org--first")
    assert way.store.get(blob.digest).names == 1


# where to


def test_an_existing_destination_is_refused(way: Way) -> None:
    plan = planned(way.cache, "org/first")
    (way.root / "bundle").mkdir()  # an empty folder is filled
    for name in FORMS:
        write = plan.write_tar if name.endswith("tar") else plan.write_folder
        write(way.root / name)
        before = everything(way.root)
        with pytest.raises(DestinationExistsError):
            write(way.root / name)
        assert everything(way.root) == before
    with pytest.raises(HubError, match="There is no folder"):
        way.export("a/b/bundle")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_force_replaces_a_bundle(
    can_exchange: bool, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has lost its blobs."""
    if not can_exchange:
        monkeypatch.setattr(bundle_module, "exchange", lambda *_: False)
    where = way.root / "there"
    where.mkdir()
    planned(way.cache, "org/second").write_folder(where / "bundle")
    planned(way.cache, "org/second").write_tar(where / "bundle.tar")
    plan = planned(way.cache, "org/first")
    plan.write_folder(where / "bundle", force=True)
    shutil.rmtree(where / "bundle" / "blobs")
    plan.write_folder(where / "bundle", force=True)
    plan.write_tar(where / "bundle.tar", force=True)
    assert sorted(os.listdir(where)) == ["bundle", "bundle.tar"]
    for name in FORMS:
        with opened(where / name) as source:
            assert source.manifest == plan.manifest


def test_force_replaces_nothing_but_a_bundle(way: Way) -> None:
    plan = planned(way.cache, "org/first")
    for name in ("bundle", "spoilt"):
        plan.write_folder(way.root / name)
    shutil.rmtree(way.root / "spoilt" / "blobs")
    mine = [
        way.root / name
        for name in ("thesis/chapter.txt", "mine.tar", "bundle/notes.txt", "spoilt/blobs")
    ]
    mine[0].parent.mkdir()
    for path in mine:
        path.write_text("all my work")
    for write, path in (
        (plan.write_folder, way.root / "thesis"),
        (plan.write_tar, way.root / "thesis"),
        (plan.write_tar, way.root / "mine.tar"),
        (plan.write_folder, way.root / "bundle"),
        (plan.write_folder, way.root / "spoilt"),
    ):
        with pytest.raises(DestinationExistsError, match="not replaced"):
            write(path, force=True)
    assert {path.read_text() for path in mine} == {"all my work"}


@pytest.mark.parametrize("form", FORMS)
def test_a_disk_that_is_too_small_is_known_before_anything_is_written(
    form: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = way.export(form)
    needed = len(ENCODER) + len(VAE) + len(UNET)
    monkeypatch.setattr(store_room, "free_bytes", lambda _: needed)
    before = set(os.listdir(way.root))
    with pytest.raises(NoSpaceError), plan_import(way.store, bundle, way.there):
        pass
    monkeypatch.setattr(bundle_module, "clone", lambda *_: False)
    with pytest.raises(NoSpaceError):
        way.export(f"second {form}")
    assert set(os.listdir(way.root)) - {"store"} == before


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
    revision = {"files": {"a.bin": {"etag": sha256, "size": size}}, "tree": None}
    document = {
        "format": "smartcache-bundle", "format_version": 1, "created_at": "2026-11-16T16:00:00Z",
        "repos": [
            {"type": "model", "id": "org/huge", "refs": {}, "revisions": {"1" * 40: revision}},
        ],
        "blobs": {sha256: {"size": size, "sha256": sha256}},
    }  # fmt: skip
    manifest = decode(json.dumps(document).encode())
    assert manifest.blobs == {sha256: Content(size=size, sha256=sha256)}
    return manifest


@pytest.mark.parametrize("form", FORMS)
def test_memory_does_not_grow_with_the_files(form: str, tmp_path: Path, store: Store) -> None:
    way = Way(tmp_path, store)
    add_repo(way.cache, "org/name", {"model.safetensors": os.urandom(1 << 20) * 48})
    tracemalloc.start()
    try:
        way.bring(way.export(form))
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
    form: str, tmp_path: Path, store: Store
) -> None:
    way, repos = Way(tmp_path, store), ("org/first", "org/second")
    with Hub() as hub:
        hub.add("org/first", FIRST)
        hub.add("org/second", SECOND)
        before = run_python(DOWNLOAD, {**hub.environment, "HF_HUB_CACHE": str(way.cache)}, *repos)
        expected = before.replace(str(way.cache), str(way.there))
        way.bring(way.export(form))
        hub.clear()
        online = {**hub.environment, "HF_HUB_CACHE": str(way.there)}
        assert run_python(DOWNLOAD, {**online, "HF_HUB_OFFLINE": "1"}, *repos) == expected
        assert not hub.requests
        assert run_python(DOWNLOAD, online, *repos) == expected
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
def test_pipelines_and_models_load_offline(models: Models, tmp_path: Path, store: Store) -> None:
    way, repos = Way(tmp_path, store), ("org/first", "org/second", "org/language")
    with Hub() as hub:
        for repo, folder in zip(repos, (models.first, models.second, models.language), strict=True):
            hub.add_folder(repo, folder)
        run_python(DOWNLOAD, {**hub.environment, "HF_HUB_CACHE": str(way.cache)}, *repos)
        way.bring(way.export())
        hub.clear()
        offline = {**hub.environment, "HF_HUB_CACHE": str(way.there), "HF_HUB_OFFLINE": "1"}
        assert run_python(LOAD, offline).split() == ["1", "1", "bert"]
        assert not hub.requests
    for name in SHARED_WEIGHTS:
        first, second = (
            next(way.there.glob(f"{folder}/snapshots/*/{name}"))
            for folder in ("models--org--first", "models--org--second")
        )
        assert os.path.samefile(first, second)


def test_the_client_sees_no_damage_in_a_cache_that_is_half_imported(way: Way) -> None:
    from huggingface_hub import scan_cache_dir

    bundle = way.export("bundle.tar")
    os.truncate(bundle, bundle.stat().st_size - 200_000)
    with pytest.raises(HubError, match="ends early"):
        way.bring(bundle)
    found = scan_cache_dir(way.there)
    assert found.warnings == []
    assert {len(repo.revisions) for repo in found.repos} <= {0}
