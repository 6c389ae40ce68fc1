from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import DamagedBlobError
from smartcache.hub.care.verify import Finding, RepoVerifyReport, plan_repair, verify_repos
from smartcache.hub.layout import scan_caches
from smartcache.store.store import Store
from tests.hub.caches import commit_of, download, hf, make_repo, write_listing
from tests.hub.clients import believe
from tests.hub.shared_stores import add_entry, make_shared_store
from tests.hub_server import Hub, etag_of, git_sha1
from tests.store.files import OTHER, WEIGHTS, Watch, edit, inode_of, snapshot, write

A, B = commit_of(1), commit_of(2)
FILES = {"config.json": b"{}", "unet/m.safetensors": WEIGHTS}
WAIT = 60.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "hub"
    path.mkdir()
    return path


def verify(store: Store, cache: Path, *, full: bool = False) -> RepoVerifyReport:
    return verify_repos(store, scan_caches([cache]), full=full)


def found(report: RepoVerifyReport) -> list[tuple[str, str | None, str | None]]:
    return sorted((each.kind, each.revision, each.path) for each in report.findings)


def blob_of(folder: Path, path: str, commit: str = A) -> Path:
    return (folder / "snapshots" / commit / path).resolve()


class TestWhole:
    def test_what_huggingface_hub_downloaded_is_right(
        self, hub: Hub, cache: Path, store: Store
    ) -> None:
        hub.add("org/name", FILES)
        download(hub, "org/name", cache)
        before = snapshot(cache)
        report = verify(store, cache)
        assert report.findings == ()
        assert (report.repos, report.files, report.size) == (1, 2, 2 + len(WEIGHTS))
        assert snapshot(cache) == before

    def test_it_agrees_with_hf_cache_verify(self, hub: Hub, cache: Path, store: Store) -> None:
        hub.add("org/name", FILES)
        folder = download(hub, "org/name", cache)
        hf(hub, cache, "cache", "verify", "org/name")
        edit(blob_of(folder, "unet/m.safetensors", os.listdir(folder / "snapshots")[0]))
        hf(hub, cache, "cache", "verify", "org/name", code=1)
        (finding,) = verify(store, cache).damage
        assert (finding.kind, finding.path) == ("mismatch", "unet/m.safetensors")

    def test_nothing_there(self, cache: Path, store: Store) -> None:
        assert verify(store, cache).findings == ()


class TestDamage:
    def test_bytes_that_changed_are_named_with_both_hashes(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES)
        blob = blob_of(folder, "unet/m.safetensors")
        expected = blob.name
        edit(blob)
        (finding,) = verify(store, cache).damage
        assert finding == Finding(
            kind="mismatch", repo="model/org/name", cache_dir=cache, revision=A,
            path="unet/m.safetensors", blob=expected, algorithm="sha256", expected=expected,
            actual=etag_of("x.bin", blob.read_bytes()),
            file=folder / "snapshots" / A / "unet" / "m.safetensors",
        )  # fmt: skip

    def test_every_file_that_leads_to_it_is_named(self, cache: Path, store: Store) -> None:
        make_repo(cache, {"a.bin": WEIGHTS, "b.bin": WEIGHTS}, commit=A)
        folder = make_repo(cache, {"a.bin": WEIGHTS}, commit=B)
        edit(blob_of(folder, "a.bin"))
        assert found(verify(store, cache)) == sorted(
            ("mismatch", commit, path)
            for commit, path in ((A, "a.bin"), (A, "b.bin"), (B, "a.bin"))
        )

    def test_small_files_by_git_sha1(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES)
        edit(blob_of(folder, "config.json"), b"[]")
        (finding,) = verify(store, cache).damage
        assert (finding.algorithm, finding.expected, finding.actual) == (
            "git-sha1", git_sha1(b"{}"), git_sha1(b"[]"),
        )  # fmt: skip

    def test_a_blob_that_no_file_leads_to(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES)
        write(folder / "blobs" / ("0" * 64), OTHER)
        (finding,) = verify(store, cache).damage
        assert (finding.revision, finding.path, finding.blob) == (None, None, "0" * 64)

    def test_a_pointer_to_another_file_than_listed(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, {"a.bin": WEIGHTS, "b.bin": OTHER}, listing=True)
        pointer = folder / "snapshots" / A / "a.bin"
        pointer.unlink()
        pointer.symlink_to(f"../../blobs/{etag_of('b.bin', OTHER)}")
        (finding,) = verify(store, cache).damage
        assert (finding.kind, finding.path) == ("wrong blob", "a.bin")
        assert finding.expected == etag_of("a.bin", WEIGHTS)
        assert finding.actual == etag_of("b.bin", OTHER)

    def test_files_in_place_of_symlinks_by_the_listing(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES, symlinks=False, listing=True)
        assert verify(store, cache).findings == ()
        edit(folder / "snapshots" / A / "unet" / "m.safetensors")
        (finding,) = verify(store, cache).damage
        assert (finding.kind, finding.path, finding.blob) == (
            "mismatch", "unet/m.safetensors", None,
        )  # fmt: skip

    def test_files_that_only_the_index_knows(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, {"m.safetensors": WEIGHTS}, symlinks=False)
        assert found(verify(store, cache)) == [("unknown", A, "m.safetensors")]
        store.adopt(folder / "snapshots" / A / "m.safetensors")
        assert verify(store, cache).findings == ()
        edit(folder / "snapshots" / A / "m.safetensors")
        (finding,) = verify(store, cache).damage
        assert (finding.kind, finding.algorithm, finding.path) == (
            "mismatch", "blake3", "m.safetensors",
        )  # fmt: skip

    def test_a_shared_payload_that_changed(self, cache: Path, store: Store) -> None:
        make_shared_store(cache)
        entry = add_entry(cache, "ab" * 32, OTHER)
        folder = make_repo(cache, FILES)
        blob = blob_of(folder, "unet/m.safetensors")
        blob.unlink()
        blob.symlink_to(os.path.relpath(entry, blob.parent))
        (finding,) = verify(store, cache).damage
        assert (finding.kind, finding.path) == ("mismatch", "unet/m.safetensors")

    def test_dangling_and_broken_refs(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, FILES)
        blob_of(folder, "config.json").unlink()
        (folder / "refs" / "empty").write_text("")
        (folder / "refs" / "text").write_text("hello")
        (folder / "refs" / "lost").write_text(B)
        report = verify(store, cache)
        assert found(report) == [
            ("bad ref", "empty", None), ("bad ref", "text", None), ("dangling", A, "config.json"),
            ("lost ref", "lost", None),
        ]  # fmt: skip
        assert {each.kind for each in report.damage} == {"bad ref", "dangling"}


class TestInformation:
    def test_what_is_listed_but_not_downloaded_is_no_damage(
        self, cache: Path, store: Store
    ) -> None:
        folder = make_repo(cache, FILES)
        write_listing(folder, A, {**FILES, "more.bin": OTHER})
        report = verify(store, cache)
        assert found(report) == [("missing", A, "more.bin")]
        assert report.damage == []

    def test_extra_files_and_strays(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, {**FILES, "mine.txt": b"x"})
        write_listing(folder, A, FILES)
        write(folder / "blobs" / "notes")
        write(folder / "blobs" / "x.incomplete")
        os.mkfifo(folder / "blobs" / "pipe")
        report = verify(store, cache)
        assert found(report) == [
            ("extra", A, "mine.txt"), ("stray", None, None), ("stray", None, None),
        ]  # fmt: skip
        assert report.damage == []


class TestMemory:
    def test_the_second_time_nothing_is_read(
        self, cache: Path, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        make_repo(cache, FILES)
        pass_time(WAIT)
        verify(store, cache)
        watch = Watch()
        verify_repos(store, scan_caches([cache]), progress=watch)
        assert watch.total == 0
        verify_repos(store, scan_caches([cache]), full=True, progress=watch)
        assert watch.total == 2 + len(WEIGHTS)

    def test_each_inode_is_read_once(self, cache: Path, store: Store) -> None:
        first = make_repo(cache, {"m.safetensors": WEIGHTS})
        second = make_repo(cache, {"m.safetensors": WEIGHTS}, name="models--org--b")
        blob = blob_of(second, "m.safetensors")
        blob.unlink()
        os.link(blob_of(first, "m.safetensors"), blob)
        watch = Watch()
        verify_repos(store, scan_caches([cache]), progress=watch)
        assert watch.done == len(WEIGHTS)

    def test_damage_without_a_trace_is_seen_by_full_and_not_forgotten(
        self, cache: Path, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        """As a disk does it: the stat key is the same, the bytes are not."""
        blob = blob_of(make_repo(cache, {"m.safetensors": WEIGHTS}), "m.safetensors")
        adopted = store.adopt(blob)
        pass_time(WAIT)
        verify(store, cache)
        edit(blob)
        believe(store, blob, adopted.digest)
        store.catalog.add_hashes([(adopted.digest, {"sha256": blob.name})])
        assert verify(store, cache).damage == []
        assert len(verify(store, cache, full=True).damage) == 1
        assert len(verify(store, cache).damage) == 1
        with pytest.raises(DamagedBlobError):
            store.open(adopted.digest)


class TestRepair:
    def repair(self, store: Store, cache: Path) -> int:
        repos, before = scan_caches([cache]), snapshot(cache)
        plan = plan_repair(store, repos, verify_repos(store, repos).damage)
        assert snapshot(cache) == before
        result = plan.execute()
        assert result.failures == ()
        return len(result.moved)

    def test_the_next_download_fetches_it_again(self, hub: Hub, cache: Path, store: Store) -> None:
        hub.add("org/name", FILES)
        folder = download(hub, "org/name", cache)
        (commit,) = os.listdir(folder / "snapshots")
        blob = blob_of(folder, "unet/m.safetensors", commit)
        edit(blob)
        damaged, inode = blob.read_bytes(), inode_of(blob)
        assert self.repair(store, cache) == 1
        (bad,) = (store.root / "bad").iterdir()
        assert (bad.read_bytes(), inode_of(bad)) == (damaged, inode)
        assert not os.path.lexists(folder / "snapshots" / commit / "unet" / "m.safetensors")
        hub.clear()
        download(hub, "org/name", cache)
        assert hub.fetched_bytes("unet/m.safetensors") == len(WEIGHTS)
        assert verify(store, cache).findings == ()

    def test_pointers_to_nothing_and_to_others_go(self, cache: Path, store: Store) -> None:
        folder = make_repo(cache, {"a.bin": WEIGHTS, "b.bin": OTHER, "c.json": b"{}"}, listing=True)
        blob_of(folder, "c.json").unlink()
        pointer = folder / "snapshots" / A / "a.bin"
        pointer.unlink()
        pointer.symlink_to(f"../../blobs/{etag_of('b.bin', OTHER)}")
        assert self.repair(store, cache) == 0
        assert os.listdir(folder / "snapshots" / A) == ["b.bin"]
        assert len(os.listdir(folder / "blobs")) == 2

    def test_pointers_to_a_drive_that_is_away_stay(
        self, cache: Path, store: Store, tmp_path: Path
    ) -> None:
        folder = make_repo(cache, FILES)
        (folder / "blobs").rename(tmp_path / "drive")
        (folder / "blobs").symlink_to(tmp_path / "drive")
        assert verify(store, cache).findings == ()
        (tmp_path / "drive").rename(tmp_path / "away")
        before = snapshot(cache)
        assert len(verify(store, cache).damage) == 2
        assert self.repair(store, cache) == 0
        assert snapshot(cache) == before

    def test_a_file_that_a_name_of_the_cache_was_led_to_stays_where_it_is(
        self, cache: Path, store: Store, tmp_path: Path
    ) -> None:
        private = write(tmp_path / "private" / "key.bin", OTHER).parent
        folder = make_repo(cache, FILES)
        blob = blob_of(folder, "unet/m.safetensors")
        blob.unlink()
        blob.symlink_to(private / "key.bin")
        before = snapshot(private)
        assert self.repair(store, cache) == 0
        assert snapshot(private) == before
        assert not os.path.lexists(blob)

    def test_a_file_that_changed_since_stays(self, cache: Path, store: Store) -> None:
        blob = blob_of(make_repo(cache, FILES), "unet/m.safetensors")
        edit(blob)
        repos = scan_caches([cache])
        plan = plan_repair(store, repos, verify_repos(store, repos).damage)
        edit(blob, WEIGHTS)
        assert [reason for _, reason in plan.execute().failures] == ["it changed in the meantime"]
        assert verify(store, cache).findings == ()

    def test_on_a_filesystem_without_a_volume_it_stays(self, store: Store, elsewhere: Path) -> None:
        edit(blob_of(make_repo(elsewhere, FILES), "unet/m.safetensors"))
        repos = scan_caches([elsewhere])
        plan = plan_repair(store, repos, verify_repos(store, repos).damage)
        assert plan.is_empty
        assert "without a pool" in plan.warnings[0]
