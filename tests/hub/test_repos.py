from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.errors import RepoNotCachedError
from smartcache.hub.care.census import Census
from smartcache.hub.layout import CachedRepo, find_repo, scan_caches
from smartcache.hub.records import Repo
from smartcache.store.store import Store
from tests.hub.caches import blocks_below, commit_of, download, inodes_below, make_repo
from tests.hub.shared_stores import add_entry, make_shared_store
from tests.hub_server import Hub
from tests.store.files import OTHER, WEIGHTS, allocated

FILES = {"config.json": b"{}", "unet/model.safetensors": WEIGHTS, "copy.safetensors": WEIGHTS}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "hub"
    path.mkdir()
    return path


def only(cache: Path) -> CachedRepo:
    (repo,) = scan_caches([cache])
    return repo


class TestAgainstHuggingfaceHub:
    def test_sizes_files_refs_and_times_are_those_that_it_counts(
        self, hub: Hub, cache: Path
    ) -> None:
        from huggingface_hub import scan_cache_dir

        hub.add("org/a", FILES)
        download(hub, "org/a", cache)
        hub.add("org/a", {**FILES, "config.json": b"[]"}, tags=["v2"])
        download(hub, "org/a", cache)
        download(hub, "org/a", cache, revision="v2")
        hub.add("org/data", {"x.parquet": OTHER}, repo_type="dataset")
        download(hub, "org/data", cache, repo_type="dataset")
        theirs = {repo.cache_id: repo for repo in scan_cache_dir(cache).repos}
        ours = {str(repo.repo): repo for repo in scan_caches([cache])}
        assert ours.keys() == theirs.keys() == {"model/org/a", "dataset/org/data"}
        for name, repo in ours.items():
            their = theirs[name]
            assert (repo.size, len(repo.bodies)) == (their.size_on_disk, their.nb_files)
            assert repo.modified_at.timestamp() == pytest.approx(their.last_modified, abs=1e-3)
            assert repo.accessed_at.timestamp() == pytest.approx(their.last_accessed, abs=1e-3)
            assert {each.commit: (each.size, set(each.refs)) for each in repo.revisions} == {
                each.commit_hash: (each.size_on_disk, set(each.refs)) for each in their.revisions
            }


class TestOddCaches:
    def test_files_in_place_of_symlinks(self, cache: Path) -> None:
        make_repo(cache, FILES, symlinks=False)
        repo = only(cache)
        assert repo.size == 2 + 2 * len(WEIGHTS)
        assert [each.path for each in repo.revisions[0].pointers] == [
            "config.json", "copy.safetensors", "unet/model.safetensors",
        ]  # fmt: skip

    def test_neither_refs_nor_snapshots(self, cache: Path) -> None:
        (cache / "models--org--name" / "blobs").mkdir(parents=True)
        (cache / "models--org--name" / "blobs" / "x.incomplete").write_bytes(WEIGHTS)
        repo = only(cache)
        assert (repo.size, repo.revisions, repo.refs) == (0, [], {})
        assert [os.path.basename(name) for name in repo.incomplete] == ["x.incomplete"]
        assert Census([repo]).share_of_repo(repo).own >= len(WEIGHTS)

    def test_a_pointer_to_nothing_counts_nothing(self, cache: Path) -> None:
        folder = make_repo(cache, FILES)
        for blob in (folder / "blobs").iterdir():
            blob.unlink()
        (revision,) = only(cache).revisions
        assert (revision.size, [each.is_dangling for each in revision.pointers]) == (0, [True] * 3)

    def test_names_of_any_bytes(self, cache: Path) -> None:
        odd = [os.fsdecode(name) for name in (b"-rf", b"new\nline", b"\xff\xfe", b"a b")]
        make_repo(cache, {f"sub/{name}": WEIGHTS for name in odd}, ref=odd[2])
        repo = only(cache)
        assert {each.path for each in repo.revisions[0].pointers} == {f"sub/{n}" for n in odd}
        assert repo.revisions[0].refs == (odd[2],)

    def test_junk_everywhere(self, cache: Path) -> None:
        folder = make_repo(cache, FILES)
        (cache / "notes.txt").write_text("x")
        (cache / "version.txt").mkdir()
        (cache / "models--").mkdir()
        (folder / "snapshots" / ".DS_Store").write_text("x")
        (folder / "refs" / "empty").write_text("")
        (folder / "blobs" / "sub").mkdir()
        os.mkfifo(folder / "refs" / "pipe")
        os.mkfifo(folder / "snapshots" / commit_of(1) / "pipe")
        (folder / "snapshots" / commit_of(1) / "up").symlink_to(cache)
        (folder / "snapshots" / commit_of(1) / "loop").symlink_to("loop")
        repo = only(cache)
        assert repo.size == 2 + len(WEIGHTS)
        assert repo.refs == {"main": commit_of(1), "empty": ""}
        (loop,) = [each for each in repo.revisions[0].pointers if each.is_dangling]
        assert loop.path == "loop"

    def test_a_repo_folder_that_is_a_symlink_has_nothing_of_its_own(
        self, cache: Path, tmp_path: Path
    ) -> None:
        real = make_repo(tmp_path / "elsewhere", FILES)
        (cache / "models--org--name").symlink_to(real)
        repo = only(cache)
        assert (repo.is_symlink, repo.size) == (True, 2 + len(WEIGHTS))
        share = Census([repo]).share_of_repo(repo)
        assert (share.own, share.shared) == (0, blocks_below(real))

    def test_each_cache_is_looked_at_once(self, cache: Path, tmp_path: Path) -> None:
        make_repo(cache, FILES)
        (tmp_path / "way").symlink_to(cache)
        assert len(scan_caches([cache, tmp_path / "way", cache / ".." / "hub"])) == 1

    def test_no_cache(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert scan_caches([tmp_path / "nowhere", tmp_path / "file"]) == []


class TestRevisionNames:
    def test_branch_commit_or_its_unique_beginning(self, cache: Path) -> None:
        make_repo(cache, FILES)
        repo = only(cache)
        for text in ("main", commit_of(1), commit_of(1)[:6], commit_of(1)[:6].upper()):
            assert repo.commit_of(text) == commit_of(1)
        for text in ("", "no", commit_of(1)[:3], commit_of(2)):
            with pytest.raises(RepoNotCachedError, match="is not a revision"):
                repo.commit_of(text)
        for tail in "ab":
            make_repo(cache, FILES, commit="1" * 39 + tail)
        with pytest.raises(RepoNotCachedError, match="start of several"):
            only(cache).commit_of("1111")

    def test_an_unknown_repo_brings_near_names(self, cache: Path) -> None:
        make_repo(cache, FILES, name="datasets--org--name")
        with pytest.raises(RepoNotCachedError) as caught:
            find_repo(scan_caches([cache]), Repo("model", "org/name"))
        assert "dataset/org/name" in caught.value.hint
        with pytest.raises(RepoNotCachedError) as caught:
            find_repo(scan_caches([cache]), Repo("dataset", "org/nane"))
        assert "dataset/org/name" in caught.value.hint


class TestSharing:
    def test_a_file_with_a_name_in_another_folder_is_shared(
        self, cache: Path, tmp_path: Path
    ) -> None:
        folder = make_repo(cache, FILES)
        blob = (folder / "snapshots" / commit_of(1) / "copy.safetensors").resolve()
        os.link(blob, tmp_path / "comfy.safetensors")
        repo = only(cache)
        share = Census([repo]).share_of_repo(repo)
        assert share.shared == allocated(blob)
        assert share.own == blocks_below(folder) - allocated(blob)

    def test_the_name_in_the_store_is_told_apart(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES)
        blob = (folder / "snapshots" / commit_of(1) / "copy.safetensors").resolve()
        store.adopt(blob)
        repo = only(cache)
        share = Census([repo], store).share_of_repo(repo)
        assert (share.shared, share.in_store) == (0, allocated(blob))
        assert share.own == blocks_below(folder)
        assert Census([repo]).share_of_repo(repo).shared == allocated(blob)

    def test_a_revision_owns_what_no_other_revision_has(self, cache: Path) -> None:
        make_repo(cache, {"a.bin": WEIGHTS, "b.bin": OTHER}, commit=commit_of(1))
        folder = make_repo(cache, {"a.bin": WEIGHTS}, commit=commit_of(2))
        repo = only(cache)
        census = Census([repo])
        shares = {each.commit: census.share_of_revision(repo, each) for each in repo.revisions}
        weights = allocated((folder / "snapshots" / commit_of(2) / "a.bin").resolve())
        other = allocated((folder / "snapshots" / commit_of(1) / "b.bin").resolve())
        assert (shares[commit_of(1)].own, shares[commit_of(1)].shared) == (other, weights)
        assert (shares[commit_of(2)].own, shares[commit_of(2)].shared) == (0, weights)


class TestSharedBlobStore:
    def repo_with(self, cache: Path, name: str, entry: Path) -> Path:
        folder = make_repo(cache, {"config.json": b"{}"}, name=name)
        blob = folder / "blobs" / ("e" * 64)
        blob.symlink_to(os.path.relpath(entry, blob.parent))
        pointer = folder / "snapshots" / commit_of(1) / "m.safetensors"
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        return folder

    def test_an_entry_of_one_repo_is_its_own_and_one_of_several_shared_and_counted_once(
        self, cache: Path
    ) -> None:
        make_shared_store(cache)
        entry = add_entry(cache, "ab" * 32, WEIGHTS)
        size = allocated(entry)
        folders = [self.repo_with(cache, "models--org--a", entry)]
        repo = only(cache)
        share = Census([repo]).share_of_repo(repo)
        assert repo.size == 2 + len(WEIGHTS)
        assert (share.own, share.shared) == (blocks_below(*folders) + size, 0)
        folders.append(self.repo_with(cache, "models--org--b", entry))
        repos = scan_caches([cache])
        census = Census(repos)
        assert {census.share_of_repo(each).shared for each in repos} == {size}
        total = census.share_of_all(repos)
        assert (total.own, total.shared) == (blocks_below(*folders) + size, 0)

    def test_without_the_marker_it_is_somebody_elses(self, cache: Path) -> None:
        make_shared_store(cache, marker=b"2\n")
        entry = add_entry(cache, "ab" * 32, WEIGHTS)
        self.repo_with(cache, "models--org--a", entry)
        repo = only(cache)
        assert Census([repo]).share_of_repo(repo).shared == allocated(entry)


NAMES = st.lists(
    st.tuples(st.sampled_from(["r0", "r1", "r2", "folder", "store"]), st.integers(0, 3)),
    min_size=1, max_size=14,
)  # fmt: skip


@given(places=NAMES, pointed=st.sets(st.integers(0, 3)))
def test_own_bytes_are_those_that_disappear_from_the_disk(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[str, int]], pointed: set[int]
) -> None:
    """Files 0-3 get hard links at random; what is said to be a repo's own is what `rm -r` frees."""
    root = tmp_path_factory.mktemp("links")
    (root / "pool").mkdir()
    with Store(root / "store") as store:
        for number in range(4):
            (root / "pool" / str(number)).write_bytes(bytes([number]) * (5_000 * (number + 1)))
        for count, (place, number) in enumerate(places):
            source = root / "pool" / str(number)
            if place == "store":
                store.adopt(source)
                continue
            folder = root / "hub" / f"models--org--{place}" / "blobs"
            target = root / "folder" if place == "folder" else folder
            target.mkdir(parents=True, exist_ok=True)
            os.link(source, target / f"{number}-{count}")
            if number in pointed and place != "folder":
                pointer = folder.parent / "snapshots" / commit_of(1) / f"{number}-{count}"
                pointer.parent.mkdir(parents=True, exist_ok=True)
                pointer.symlink_to(f"../../blobs/{number}-{count}")
        shutil.rmtree(root / "pool")
        repos = scan_caches([root / "hub"])
        census = Census(repos, store)
        blobs = inodes_below(root / "store" / "blobs")
        for repo in repos:
            share = census.share_of_repo(repo)
            mine = inodes_below(repo.folder)
            others = inodes_below(root / "folder", *(r.folder for r in repos if r is not repo))
            own = {key: size for key, size in mine.items() if key not in others}
            assert share.own == sum(own.values())
            assert share.shared == sum(mine.values()) - share.own
            assert share.in_store == sum(size for key, size in own.items() if key in blobs)
        total = census.share_of_all(repos)
        assert total.own + total.shared == blocks_below(root / "hub")
