from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import pytest
from filelock import FileLock
from huggingface_hub import DeleteCacheStrategy

from smartcache.cache import SmartCache
from smartcache.errors import HubError
from smartcache.hub.api import Call
from smartcache.hub.care.census import Census
from smartcache.hub.care.remove import RemovalPlan, RemovalResult, plan_cache_prune, plan_removal
from smartcache.hub.layout import CachedRepo, scan_caches
from smartcache.store.store import Store
from smartcache.system import faults
from tests.hub.caches import blocks_below, commit_of, download, hf, inodes_below, make_repo
from tests.hub.shared_stores import make_shared_store
from tests.hub_server import Hub
from tests.processes.killing import Moment, die_at, in_child, was_killed
from tests.store.files import OTHER, WEIGHTS, allocated, inode_of, snapshot

A, B = commit_of(1), commit_of(2)
FILES = {"config.json": b"{}", "m.safetensors": WEIGHTS}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "hub"
    path.mkdir()
    return path


def own(store: Store, folder: Path, commit: str) -> list[str]:
    """Adopt the weights of a revision as a download does; return the digests."""
    weights = (folder / "snapshots" / commit).rglob("*.safetensors")
    return [store.adopt(path.resolve()).digest for path in weights if path.exists()]


def plan(
    cache: Path, store: Store | None = None, *, name: str = "org/name", revision: str | None = None,
    keep_blobs: bool = False,
) -> RemovalPlan:  # fmt: skip
    census = Census(scan_caches([cache]), store)
    chosen: list[tuple[CachedRepo, str | None]] = [
        (repo, None if revision is None else repo.commit_of(revision))
        for repo in census.repos
        if repo.repo.id == name
    ]
    return plan_removal(census, chosen, keep_blobs=keep_blobs)


def remove_measured(made: RemovalPlan, *roots: Path) -> RemovalResult:
    """Execute a plan; what it says it freed must be what is gone from the disk."""
    before = blocks_below(*roots)
    result = made.execute()
    assert result.failures == ()
    assert result.freed_size == before - blocks_below(*roots)
    return result


class TestRepos:
    def test_the_folder_goes_and_nothing_else(self, cache: Path) -> None:
        folder = make_repo(cache, FILES)
        make_repo(cache, FILES, name="models--org--other")
        others = snapshot(cache / "models--org--other")
        made, again = plan(cache), plan(cache)
        assert made.freed_size == blocks_below(folder)
        result = remove_measured(made, cache)
        assert result.freed_size == made.freed_size
        assert os.listdir(cache) == ["models--org--other"]
        assert snapshot(cache / "models--org--other") == others
        assert again.execute().removed == 0

    def test_a_name_elsewhere_keeps_the_bytes_and_is_named(
        self, cache: Path, tmp_path: Path
    ) -> None:
        folder = make_repo(cache, FILES)
        blob = (folder / "snapshots" / A / "m.safetensors").resolve()
        os.link(blob, tmp_path / "comfy.safetensors")
        size = allocated(blob)
        made = plan(cache)
        assert [(each.size, each.by) for each in made.kept] == [(size, "another name")]
        remove_measured(made, cache, tmp_path)
        assert (tmp_path / "comfy.safetensors").read_bytes() == WEIGHTS

    def test_a_pointer_out_of_the_repo_is_not_followed(self, cache: Path, tmp_path: Path) -> None:
        """huggingface_hub would remove the file itself."""
        folder = make_repo(cache, FILES, commit=A)
        make_repo(cache, {"x.bin": OTHER}, commit=B, ref="")
        mine = tmp_path / "mine"
        mine.write_bytes(OTHER)
        (folder / "snapshots" / A / "out").symlink_to(mine)
        (folder / "snapshots" / A / "dir").symlink_to(tmp_path)
        remove_measured(plan(cache, revision=A), cache)
        assert mine.read_bytes() == OTHER
        remove_measured(plan(cache), cache)
        assert mine.read_bytes() == OTHER

    def test_of_a_symlinked_folder_only_the_symlink_goes_and_no_revision(
        self, cache: Path, tmp_path: Path
    ) -> None:
        make_repo(tmp_path / "elsewhere", FILES, commit=B)
        real = make_repo(tmp_path / "elsewhere", FILES)
        before = snapshot(real)
        (cache / "models--org--name").symlink_to(real)
        with pytest.raises(HubError, match="is a symlink"):
            plan(cache, revision=A)
        made = plan(cache)
        assert made.freed_size == allocated(cache / "models--org--name")
        assert [each.by for each in made.kept] == [str(real)]
        assert "is a symlink" in made.warnings[0]
        remove_measured(made, cache)
        assert os.listdir(cache) == []
        assert snapshot(real) == before

    def test_broken_and_odd_repos_go_too(self, cache: Path) -> None:
        folder = make_repo(cache, {"-rf": OTHER, os.fsdecode(b"\xff\n"): WEIGHTS, **FILES})
        (folder / "blobs" / "x.incomplete").write_bytes(OTHER)
        (folder / "refs" / "lost").write_text(B)
        (folder / "snapshots" / A / "nowhere").symlink_to("gone")
        (folder / "junk").mkdir()
        (folder / "blobs" / "sub").mkdir()
        os.mkfifo(folder / "junk" / "pipe")
        remove_measured(plan(cache), cache)
        assert os.listdir(cache) == []

    def test_what_arrives_meanwhile_stays_whole(self, cache: Path) -> None:
        """A revision downloaded between plan and removal keeps the blobs it shares."""
        folder = make_repo(cache, FILES)
        made = plan(cache)
        make_repo(cache, {**FILES, "new.bin": OTHER}, commit=B)
        result = made.execute()
        assert result.failures == ()
        (revision,) = scan_caches([cache])[0].revisions
        assert (revision.commit, revision.refs) == (B, ("main",))
        assert (folder / "snapshots" / B / "m.safetensors").read_bytes() == WEIGHTS

    def test_a_folder_of_blobs_that_is_a_symlink_is_not_emptied(
        self, cache: Path, tmp_path: Path
    ) -> None:
        make_repo(cache, FILES, commit=A)
        folder = make_repo(cache, {"x.bin": OTHER}, commit=B)
        (folder / "blobs").rename(tmp_path / "disk")
        (folder / "blobs").symlink_to(tmp_path / "disk")
        before = snapshot(tmp_path / "disk")
        remove_measured(plan(cache, revision=A), cache)
        remove_measured(plan(cache), cache)
        assert os.listdir(cache) == []
        assert snapshot(tmp_path / "disk") == before

    def test_a_symlink_that_takes_the_place_of_a_folder_is_not_followed(
        self, cache: Path, tmp_path: Path
    ) -> None:
        """Between two names, as somebody could do who may write into the cache."""
        folder = make_repo(cache, {"a/1.bin": WEIGHTS, "b/2.bin": OTHER}, symlinks=False)
        mine = make_repo(tmp_path / "mine", {"2.bin": OTHER}, symlinks=False)
        target = mine / "snapshots" / A
        made = plan(cache)

        def swap(_: str) -> None:
            place = folder / "snapshots" / A / "b"
            if not place.is_symlink():
                place.rename(tmp_path / "moved")
                place.symlink_to(target)

        faults.hook = swap
        try:
            result = made.execute()
        finally:
            faults.hook = None
        assert (target / "2.bin").read_bytes() == OTHER
        assert str(folder / "snapshots" / A / "b" / "2.bin") in dict(result.failures)


MOMENTS = [
    *(Moment("hub rm: name removed", nth) for nth in range(1, 6)),
    Moment("prune: blob removed", 1),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_killed_at_any_point_it_can_be_finished_later(
    moment: Moment, cache: Path, tmp_path: Path
) -> None:
    files = {"a.safetensors": WEIGHTS, "b.safetensors": OTHER, "c.json": b"{}"}
    make_repo(cache, files, commit=A, ref="old")
    folder = make_repo(cache, {"a.safetensors": WEIGHTS}, commit=B)
    with Store(tmp_path / "store") as store:
        for commit in (A, B):
            own(store, folder, commit)

    def remove() -> None:
        with Store(tmp_path / "store") as store:
            made = plan(cache, store, revision=A)
            die_at(moment)
            made.execute()

    assert was_killed(in_child(remove))
    with Store(tmp_path / "store") as store:
        assert not store.verify(full=True).has_damage
        if (folder / "snapshots" / A).exists():
            assert plan(cache, store, revision=A).execute().failures == ()
        store.plan_prune().execute()
        assert [blob.size for blob in store.blobs()] == [len(WEIGHTS)]
    (repo,) = scan_caches([cache])
    assert [each.commit for each in repo.revisions] == [B]
    assert (folder / "snapshots" / B / "a.safetensors").read_bytes() == WEIGHTS


class TestRevisions:
    def test_only_what_no_other_revision_has_goes(self, cache: Path) -> None:
        make_repo(cache, {"a.bin": WEIGHTS, "b.bin": OTHER}, commit=A, ref="old", listing=True)
        folder = make_repo(cache, {"a.bin": WEIGHTS}, commit=B, listing=True)
        made = plan(cache, revision="old")
        assert any(each.by == "other revisions of model/org/name" for each in made.kept)
        result = remove_measured(made, cache)
        assert result.freed_size == made.freed_size
        assert os.listdir(folder / "snapshots") == [B]
        assert os.listdir(folder / "trees") == [f"{B}.json"]
        assert os.listdir(folder / "refs") == ["main"]
        assert (folder / "snapshots" / B / "a.bin").read_bytes() == WEIGHTS
        assert len(os.listdir(folder / "blobs")) == 1

    def test_with_the_last_revision_the_repo_goes(self, cache: Path) -> None:
        make_repo(cache, FILES)
        made = plan(cache, revision="main")
        assert made.removals[0].is_whole
        made.execute()
        assert os.listdir(cache) == []

    def test_files_in_place_of_symlinks(self, cache: Path) -> None:
        make_repo(cache, FILES, symlinks=False, commit=A)
        make_repo(cache, FILES, symlinks=False, commit=B)
        made = plan(cache, revision=A)
        assert made.freed_size >= len(WEIGHTS)
        assert remove_measured(made, cache).freed_size == made.freed_size

    def test_a_ref_without_its_snapshot(self, cache: Path) -> None:
        folder = make_repo(cache, FILES)
        (folder / "refs" / "lost").write_text(B)
        plan(cache, revision="lost").execute()
        assert os.listdir(folder / "refs") == ["main"]
        assert (folder / "snapshots" / A / "m.safetensors").exists()


class TestBlobs:
    def test_of_the_store_go_when_nobody_else_has_them(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES)
        (digest,) = own(store, folder, A)
        weights = allocated(store.path_of(digest))
        before = snapshot(cache)
        made = plan(cache, store)
        assert snapshot(cache) == before
        assert (made.blobs_size, made.kept) == (weights, ())
        assert made.files_size == blocks_below(folder) - weights
        result = remove_measured(made, cache, store.root / "blobs")
        assert (result.freed_size, result.blobs_removed) == (made.freed_size, 1)
        assert list(store.blobs()) == []

    def test_stay_if_asked_to(self, cache: Path, store: Store) -> None:
        (digest,) = own(store, make_repo(cache, FILES), A)
        made = plan(cache, store, keep_blobs=True)
        assert [each.by for each in made.kept] == ["the store (--keep-blobs)"]
        remove_measured(made, cache, store.root / "blobs")
        assert store.path_of(digest).read_bytes() == WEIGHTS
        assert [victim.digest for victim in store.plan_prune().victims] == [digest]

    def test_stay_with_another_repo(self, cache: Path, store: Store) -> None:
        (digest,) = own(store, make_repo(cache, FILES), A)
        other = make_repo(cache, FILES, name="models--org--other")
        pointer = other / "snapshots" / A / "m.safetensors"
        blob = pointer.resolve()
        blob.unlink()
        store.place(digest, blob, whole=True)
        own(store, other, A)
        made = plan(cache, store)
        assert [each.by for each in made.kept] == ["model/org/other"]
        remove_measured(made, cache, store.root / "blobs")
        assert pointer.read_bytes() == WEIGHTS
        assert inode_of(pointer.resolve()) == inode_of(store.path_of(digest))

    @pytest.mark.parametrize("held", ["by a pin", "by a pin made after the plan"])
    def test_stay_with_whoever_holds_them(self, held: str, cache: Path, store: Store) -> None:
        (digest,) = own(store, make_repo(cache, FILES), A)
        early = plan(cache, store)
        store.pin(digest, "mine")
        if held.endswith("plan"):
            assert early.execute().blobs_removed == 0
        else:
            made = plan(cache, store)
            (kept,) = made.kept
            assert kept.by == "pin mine"
            remove_measured(made, cache, store.root / "blobs")
        assert store.path_of(digest).read_bytes() == WEIGHTS

    def test_stay_with_another_revision(self, cache: Path, store: Store) -> None:
        make_repo(cache, FILES, commit=A, ref="old")
        folder = make_repo(cache, {**FILES, "config.json": b"[]"}, commit=B)
        (digest,) = {*own(store, folder, A), *own(store, folder, B)}
        result = remove_measured(plan(cache, store, revision=A), cache, store.root / "blobs")
        assert result.blobs_removed == 0
        assert (folder / "snapshots" / B / "m.safetensors").read_bytes() == WEIGHTS
        remove_measured(plan(cache, store, revision=B), cache, store.root / "blobs")
        assert store.find("blake3", digest) is None

    def test_survive_an_end_between_files_and_blobs(
        self, cache: Path, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then prune takes what has no other name."""
        (digest,) = own(store, make_repo(cache, FILES), A)

        def end(*_: object) -> None:
            raise KeyboardInterrupt

        made = plan(cache, store)
        with monkeypatch.context() as patch:
            patch.setattr(store, "plan_release", end)
            with pytest.raises(KeyboardInterrupt):
                made.execute()
        assert [victim.digest for victim in store.plan_prune().victims] == [digest]


class TestWithHuggingfaceHub:
    def test_it_reads_what_remains_and_downloads_again(self, hub: Hub, cache: Path) -> None:
        hub.add("org/name", FILES, tags=["v1"])
        download(hub, "org/name", cache, revision="v1")
        hub.add("org/name", {**FILES, "new.bin": OTHER})
        folder = download(hub, "org/name", cache)
        remove_measured(plan(cache, revision="v1"), cache)
        assert "model/org/name" in hf(hub, cache, "cache", "ls")
        hf(hub, cache, "cache", "verify", "org/name")
        plan(cache).execute()
        assert not folder.exists()
        hub.clear()
        assert download(hub, "org/name", cache) == folder
        assert hub.fetched_bytes("m.safetensors") == len(WEIGHTS)

    @pytest.mark.skipif(
        "cache_dir" not in {each.name for each in fields(DeleteCacheStrategy)},
        reason="this huggingface_hub has no shared blob store",
    )
    def test_its_shared_blobs_go_with_their_last_repo(self, cache: Path) -> None:
        from huggingface_hub import scan_cache_dir

        make_shared_store(cache)
        entry = cache / "blobs" / "ab" / ("ab" * 32)
        entry.parent.mkdir()
        entry.write_bytes(WEIGHTS)
        lines = []
        for name in ("name", "other"):
            folder = make_repo(cache, {"config.json": b"{}"}, name=f"models--org--{name}")
            blob = folder / "blobs" / ("e" * 64)
            blob.symlink_to(os.path.relpath(entry, blob.parent))
            (folder / "snapshots" / A / "m.safetensors").symlink_to(f"../../blobs/{'e' * 64}")
            lines.append(f"models--org--{name}/blobs/{'e' * 64}\n")
        entry.with_name(f"{entry.name}.refs").write_text("".join(lines))
        first = plan(cache)
        assert [each.by for each in first.kept] == ["model/org/other"]
        assert first.execute().freed_size == first.freed_size
        assert entry.read_bytes() == WEIGHTS
        size = allocated(entry)
        second = plan(cache, name="org/other")
        assert second.freed_size >= size
        assert second.execute().freed_size == second.freed_size
        assert not entry.exists()
        assert scan_cache_dir(cache).repos == frozenset()
        assert len(inodes_below(cache / "blobs")) <= 2


class TestWithDownloads:
    """What `smartcache.snapshot_download` made: its links and blobs."""

    def download(self, hub: Hub, cache: Path, name: str, store: Store) -> None:
        with SmartCache(settings=store.settings) as smartcache:
            arguments = {"cache_dir": cache, "endpoint": hub.url}
            smartcache.download(Call(repo_id=name, arguments=arguments))

    def test_shared_weights_go_with_the_last_repo(
        self, hub: Hub, cache: Path, store: Store
    ) -> None:
        hub.add("org/a", {"config.json": b"{}", "encoder.safetensors": WEIGHTS})
        hub.add("org/b", {"encoder.safetensors": WEIGHTS, "unet.safetensors": OTHER})
        for name in ("org/a", "org/b"):
            self.download(hub, cache, name, store)
        assert hub.fetched_bytes("encoder.safetensors") == len(WEIGHTS)
        roots = (cache / "models--org--a", cache / "models--org--b", store.root / "blobs")
        first = plan(cache, store, name="org/a")
        assert first.freed_size < len(WEIGHTS)
        result = remove_measured(first, *roots)
        assert (result.freed_size, result.blobs_removed) == (first.freed_size, 0)
        assert len(list(store.blobs())) == 2
        second = plan(cache, store, name="org/b")
        result = remove_measured(second, *roots)
        assert (result.freed_size, result.blobs_removed) == (second.freed_size, 2)
        tag = store.root / "blobs" / "CACHEDIR.TAG"
        assert blocks_below(*roots) == os.stat(tag).st_blocks * 512
        assert store.plan_prune().victims == ()


def prune(cache: Path, store: Store | None = None) -> RemovalPlan:
    return plan_cache_prune(Census(scan_caches([cache]), store))


def age(folder: Path, commit: str) -> None:
    """Let a snapshot have been made long ago."""
    for path in (folder / "snapshots" / commit).rglob("*"):
        os.utime(path, (1_600_000_000,) * 2, follow_symlinks=False)


class TestWhatNothingAsksFor:
    def test_blobs_of_a_revision_without_a_ref_go_with_it(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES, commit=A, ref="")
        make_repo(cache, {"m.safetensors": OTHER}, commit=B)
        (gone,) = own(store, folder, A)
        (stays,) = own(store, folder, B)
        age(folder, A)
        made = prune(cache, store)
        assert made.blobs_size == allocated(store.path_of(gone))
        result = made.execute()
        assert (result.freed_size, result.failures) == (made.freed_size, ())
        assert [blob.digest for blob in store.blobs()] == [stays]

    def test_a_young_revision_may_be_on_its_way_and_stays(self, cache: Path) -> None:
        make_repo(cache, FILES, commit=A, ref="")
        make_repo(cache, {"m.safetensors": OTHER}, commit=B)
        made = prune(cache)
        assert made.removals == ()
        assert "less than an hour old" in made.warnings[0]

    def test_a_revision_that_gets_a_ref_after_the_plan_stays(self, cache: Path) -> None:
        folder = make_repo(cache, FILES, commit=A, ref="")
        make_repo(cache, {"m.safetensors": OTHER}, commit=B)
        age(folder, A)
        made = prune(cache)
        (folder / "refs" / "v1").write_text(A)
        before = snapshot(cache)
        assert made.execute().removed == 0
        assert snapshot(cache) == before

    def test_a_repo_without_any_ref_goes_as_a_whole_and_is_named(self, cache: Path) -> None:
        age(make_repo(cache, FILES, commit=A, ref=""), A)
        made = prune(cache)
        assert "it goes as a whole" in made.warnings[0]
        remove_measured(made, cache)
        assert os.listdir(cache) == []

    @pytest.mark.parametrize("way", ["open for writing", "locked"])
    def test_a_repo_into_which_a_download_is_running_is_left_alone(
        self, cache: Path, way: str
    ) -> None:
        folder = make_repo(cache, FILES, commit=A, ref="")
        age(folder, A)
        partial = folder / "blobs" / f"{'a' * 64}.12345678.incomplete"
        locks = cache / ".locks" / folder.name
        locks.mkdir(parents=True)
        with ExitStack() as stack:
            stack.enter_context(open(partial, "wb"))
            if way == "locked":
                stack.pop_all().close()
                stack.enter_context(FileLock(locks / f"{'a' * 64}.lock"))
            made = prune(cache)
            assert made.removals == ()
            assert "a download is running" in made.warnings[0]
        made = prune(cache)
        with open(partial, "ab"):  # it goes on after the plan
            before = snapshot(cache)
            assert made.execute().failures[0][1] == "a download is running"
            assert snapshot(cache) == before
        assert len(prune(cache).execute().failures) == 0
        assert not folder.exists()

    def test_an_old_kind_of_partial_download_goes_too(self, cache: Path) -> None:
        folder = make_repo(cache, FILES)
        partial = folder / "blobs" / f"{'a' * 64}.incomplete"
        partial.write_bytes(OTHER)
        size = allocated(partial)
        made = prune(cache)
        assert made.freed_size == size
        assert remove_measured(made, cache).freed_size == size
        assert not partial.exists()
