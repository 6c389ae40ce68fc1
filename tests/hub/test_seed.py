"""Blobs become entries of huggingface_hub's shared store, and its clients need no download."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from tests.api import HubError, ModelFolder, Namer, Store, identify, plan_seed, scan
from tests.api import hub_layout as layout
from tests.api import store_faults as faults
from tests.hub.shared_stores import (
    MARKER,
    add_entry,
    client,
    has_shared_store,
    make_shared_store,
    snapshot_download,
    xet_of,
)
from tests.hub_server import Hub
from tests.processes.children import Child
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    allocated,
    edit,
    inode_of,
    link_count,
    mode_of,
    snapshot,
    write,
)

SMALL = random.Random(4).randbytes(1000)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An HF cache with an empty shared store."""
    make_shared_store(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture
def xet(tmp_path: Path) -> str:
    """The xet hash of WEIGHTS."""
    return xet_of(tmp_path / "bytes", WEIGHTS)


def put(store: Store, data: bytes) -> str:
    return store.put_stream([data], algorithms=["sha256"]).digest


@has_shared_store
class TestClients:
    """The real huggingface_hub, with Xet enabled, at a Hub that has no Xet server."""

    @pytest.fixture
    def repo(self, hub: Hub, xet: str) -> str:
        for name in ("org/one", "org/two"):
            hub.add(
                name,
                {"config.json": b"{}", "model.safetensors": WEIGHTS},
                xet={"model.safetensors": xet},
            )
        return "org/one"

    def test_without_an_entry_the_download_fails(self, hub: Hub, cache: Path, repo: str) -> None:
        """Or the tests below would show nothing."""
        done = snapshot_download(hub, cache, repo)
        assert done.returncode != 0
        assert "xet-read-token" in done.stderr

    def test_an_entry_is_used_and_no_byte_fetched(
        self, hub: Hub, cache: Path, repo: str, store: Store, xet: str
    ) -> None:
        digest = put(store, WEIGHTS)
        plan_seed(store, [cache]).execute()
        for name in (repo, "org/two"):
            done = snapshot_download(hub, cache, name)
            assert done.returncode == 0, done.stderr
            folder = cache / f"models--{name.replace('/', '--')}"
            blob = folder / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
            assert blob.is_symlink()
            assert blob.resolve() == layout.shared_entry(cache, xet)
            assert Path(done.stdout.strip(), "model.safetensors").read_bytes() == WEIGHTS
        assert hub.fetched_bytes("model.safetensors") == 0
        assert hub.gets("model.safetensors") == []
        assert hub.gets("config.json")
        assert inode_of(layout.shared_entry(cache, xet)) == inode_of(store.path_of(digest))

    def test_hf_cache_works_on_it_and_the_store_keeps_its_bytes(
        self, hub: Hub, cache: Path, repo: str, store: Store, xet: str
    ) -> None:
        """Its prune leaves an entry that no repo uses yet; what it collects is linked again."""
        digest = put(store, WEIGHTS)
        plan_seed(store, [cache]).execute()
        client(hub, cache, "hf", "cache", "prune", "-y")
        assert layout.find_shared_entry([cache], xet, len(WEIGHTS))
        assert snapshot_download(hub, cache, repo).returncode == 0
        assert repo in client(hub, cache, "hf", "cache", "ls").stdout
        assert "checksums match" in client(hub, cache, "hf", "cache", "verify", repo).stdout
        client(hub, cache, "hf", "cache", "rm", f"model/{repo}", "-y")
        assert layout.find_shared_entry([cache], xet, len(WEIGHTS)) is None
        assert store.path_of(digest).read_bytes() == WEIGHTS
        assert link_count(store.path_of(digest)) == 1
        assert not store.verify(full=True).has_damage
        assert len(plan_seed(store, [cache]).execute().seeded) == 1
        assert snapshot_download(hub, cache, repo).returncode == 0
        assert hub.gets("model.safetensors") == []


def test_an_entry_the_symlinks_to_it_and_the_blob_are_counted_once(
    cache: Path, store: Store, xet: str
) -> None:
    """Two repos use it, as the client leaves them. It is named by a repo, and prune leaves it."""
    put(store, WEIGHTS)
    plan_seed(store, [cache]).execute()
    for name in ("one", "two"):
        folder = cache / f"models--org--{name}"
        blob = folder / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
        blob.parent.mkdir(parents=True)
        blob.symlink_to(Path("../../blobs", xet[:2], xet))
        pointer = folder / "snapshots" / ("0" * 40) / "unet" / "model.safetensors"
        pointer.parent.mkdir(parents=True)
        pointer.symlink_to(Path("../../../blobs", blob.name))
        assert pointer.read_bytes() == WEIGHTS
    entry = layout.shared_entry(cache, xet)
    size, marker = allocated(entry), allocated(cache / "blobs" / MARKER)
    found = scan(store, [ModelFolder(path=cache, program="Hugging Face")], min_size=1)
    (figures,) = found.folders
    assert figures.physical - marker == found.total.shared == size
    assert figures.logical - len(WEIGHTS) < 10
    assert found.freeable == 0
    usage = store.usage()
    assert (usage.physical, usage.shared) == (size, size)
    (folder_usage,) = store.folder_usage([cache])[:1]
    assert folder_usage.physical - marker == size
    assert (folder_usage.shared_with_store, folder_usage.shared_outside) == (size, size)
    named = ModelFolder(path=cache, program=identify(cache))
    assert named.program == "Hugging Face"
    assert Namer().name(entry, named) == "org/one · unet/model.safetensors"
    plan = store.plan_prune()
    assert plan.victims == ()
    plan.execute()
    assert entry.read_bytes() == WEIGHTS


class TestPlan:
    def test_changes_nothing(self, store: Store, cache: Path) -> None:
        put(store, WEIGHTS)
        before = snapshot(cache)
        plan = plan_seed(store, [cache])
        assert snapshot(cache) == before
        assert (plan.size, plan.hash_size) == (len(WEIGHTS), len(WEIGHTS))
        assert store.history() == []

    def test_largest_first_and_nothing_small(
        self, store: Store, cache: Path, tmp_path: Path
    ) -> None:
        """A cache that is named twice counts once, and what is done is not planned again."""
        digests = [put(store, data) for data in (OTHER, WEIGHTS, SMALL)]
        (tmp_path / "way").symlink_to(cache)
        plan = plan_seed(store, [cache, tmp_path / "way"])
        assert plan.caches == (cache,)
        assert [blob.digest for blob in plan.blobs] == [digests[1], digests[0]]
        assert len(plan_seed(store, [cache], min_size=1).blobs) == 3
        assert len(plan.execute().seeded) == 2
        plan = plan_seed(store, [cache])
        assert (plan.blobs, plan.done, plan.present) == ((), 2, 0)

    def test_a_known_hash_need_not_be_computed(
        self, store: Store, cache: Path, xet: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without hf_xet, no other can be."""
        store.put_stream([WEIGHTS], algorithms=["xet"])
        plan = plan_seed(store, [cache])
        assert [blob.xet for blob in plan.blobs] == [xet]
        assert plan.hash_size == 0
        put(store, OTHER)
        monkeypatch.setitem(sys.modules, "hf_xet", None)
        plan = plan_seed(store, [cache])
        assert [blob.xet for blob in plan.blobs] == [xet]
        assert plan.unhashed == 1
        (warning,) = plan.warnings
        assert "hf_xet" in warning
        assert len(plan.execute().seeded) == 1

    def test_no_shared_store_anywhere_is_an_error_that_says_why(
        self, store: Store, tmp_path: Path
    ) -> None:
        (tmp_path / "old").mkdir()
        make_shared_store(tmp_path / "new", b"2\n")
        with pytest.raises(HubError) as caught:
            plan_seed(store, [tmp_path / "old", tmp_path / "new"])
        assert f"{tmp_path / 'old'}: it has no shared blob store yet" in str(caught.value)
        assert f"{tmp_path / 'new'}: its shared blob store is of another" in str(caught.value)
        for word in (">= 2.4", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_SHARED_BLOBS"):
            assert word in caught.value.hint
        with pytest.raises(HubError, match="none is known"):
            plan_seed(store, [])

    def test_a_cache_without_one_is_left_out_beside_others(
        self, store: Store, cache: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "old").mkdir()
        plan = plan_seed(store, [tmp_path / "old", cache])
        assert plan.caches == (cache,)
        (warning,) = plan.warnings
        assert warning.startswith(f"{tmp_path / 'old'} is skipped")

    def test_a_switch_that_makes_it_useless_is_mentioned(
        self, store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_SHARED_BLOBS"):
            monkeypatch.setenv(name, "0")
            assert plan_seed(store, [cache]).warnings == ()
            monkeypatch.setenv(name, "1")
            (warning,) = plan_seed(store, [cache]).warnings
            assert name in warning
            monkeypatch.delenv(name)

    def test_another_filesystem_gets_nothing_and_no_copy(
        self, store: Store, elsewhere: Path
    ) -> None:
        put(store, WEIGHTS)
        make_shared_store(elsewhere / "hub")
        before = snapshot(elsewhere)
        plan = plan_seed(store, [elsewhere / "hub"])
        assert plan.blobs == ()
        (warning,) = plan.warnings
        assert "another filesystem" in warning
        assert "copies" in warning
        plan.execute()
        assert snapshot(elsewhere) == before

    def test_a_volume_there_gives_its_own_blobs(self, store: Store, elsewhere: Path) -> None:
        put(store, OTHER)
        volume = store.add_volume(elsewhere / "volume")
        digest = put(volume, WEIGHTS)
        make_shared_store(elsewhere / "hub")
        plan = plan_seed(store, [elsewhere / "hub"])
        assert (len(plan.blobs), plan.warnings) == (1, ())
        (made,) = plan.execute().seeded
        assert inode_of(made.path) == inode_of(volume.path_of(digest))


class TestExecute:
    def test_links_a_blob_under_its_xet_hash(self, store: Store, cache: Path, xet: str) -> None:
        digest = put(store, WEIGHTS)
        watch = Watch()
        result = plan_seed(store, [cache]).execute(progress=watch)
        (made,) = result.seeded
        assert (made.digest, made.xet, made.path) == (
            digest, xet, cache / "blobs" / xet[:2] / xet,
        )  # fmt: skip
        assert inode_of(made.path) == inode_of(store.path_of(digest))
        assert mode_of(made.path) == 0o444
        assert (result.size, result.hashed_size, result.skipped) == (
            len(WEIGHTS), len(WEIGHTS), [],
        )  # fmt: skip
        assert (watch.done, watch.total, watch.unit) == (len(WEIGHTS), len(WEIGHTS), "bytes")

    def test_in_every_cache(self, store: Store, cache: Path, tmp_path: Path, xet: str) -> None:
        """The hash is remembered."""
        digest = put(store, WEIGHTS)
        make_shared_store(tmp_path / "second")
        result = plan_seed(store, [cache, tmp_path / "second"]).execute()
        entries = {layout.shared_entry(each, xet) for each in (cache, tmp_path / "second")}
        assert {each.path for each in result.seeded} == entries
        assert result.size == len(WEIGHTS)
        found = store.find("xet", xet)
        assert found is not None
        assert found.digest == digest

    def test_an_entry_of_the_client_is_left_alone_and_counted(
        self, store: Store, cache: Path, xet: str
    ) -> None:
        put(store, WEIGHTS)
        path = add_entry(cache, xet, WEIGHTS)
        inode = inode_of(path)
        plan = plan_seed(store, [cache])
        assert len(plan.blobs) == 1  # its hash is not known yet
        result = plan.execute()
        assert (result.seeded, result.present, result.skipped) == ([], 1, [])
        assert inode_of(path) == inode
        again = plan_seed(store, [cache])
        assert (again.blobs, again.present, again.warnings) == ((), 1, ())

    @pytest.mark.parametrize("kind", ["other size", "symlink", "directory"])
    def test_what_is_no_such_file_is_left_alone_with_a_warning(
        self, kind: str, store: Store, cache: Path, xet: str, tmp_path: Path
    ) -> None:
        put(store, WEIGHTS)
        path = layout.shared_entry(cache, xet)
        path.parent.mkdir()
        if kind == "other size":
            path.write_bytes(b"short")
        elif kind == "symlink":
            path.symlink_to(write(tmp_path / "target"))
        else:
            path.mkdir()
        before = snapshot(cache)
        (skipped,) = plan_seed(store, [cache]).execute().skipped
        assert f"{path} is left alone" in skipped.reason
        path.with_name(f"{xet}.lock").unlink()
        assert snapshot(cache) == before
        (warning,) = plan_seed(store, [cache]).warnings
        assert f"{path} is left alone" in warning

    def test_waits_while_the_client_publishes(self, store: Store, cache: Path, xet: str) -> None:
        """The client holds the lock, as it does when it renames its download into place."""
        put(store, WEIGHTS)
        path = layout.shared_entry(cache, xet)
        layout.make_shared_prefix(cache, xet)
        held = FileLock(path.with_name(f"{xet}.lock"), mode=0o666, thread_local=False)
        held.acquire()

        def publish() -> None:
            add_entry(cache, xet, WEIGHTS)
            held.release()

        timer = threading.Timer(0.3, publish)
        timer.start()
        result = plan_seed(store, [cache]).execute()
        timer.join()
        assert (result.seeded, result.present) == ([], 1)
        assert link_count(path) == 1

    def test_a_damaged_blob_is_never_linked(self, store: Store, cache: Path) -> None:
        """Even if stat vouches for it: clients would believe whatever has the right size."""
        digest = put(store, WEIGHTS)
        put(store, OTHER)
        path = store.path_of(digest)
        edit(path)
        st, blob = os.stat(path), store.get(digest)
        store.volume.index.refresh(blob.id, st, blob.trust)
        result = plan_seed(store, [cache]).execute()
        (skipped,) = result.skipped
        assert skipped.digest == digest
        assert "damaged" in skipped.reason
        assert [each.size for each in result.seeded] == [len(OTHER)]
        assert store.find("blake3", digest) is None

    def test_a_marker_that_went_away_ends_it(self, store: Store, cache: Path) -> None:
        put(store, WEIGHTS)
        plan = plan_seed(store, [cache])
        (cache / "blobs" / MARKER).unlink()
        result = plan.execute()
        assert result.seeded == []
        assert "no marker" in result.skipped[0].reason
        assert list((cache / "blobs").iterdir()) == []

    def test_a_prefix_that_leads_out_is_refused(
        self, store: Store, cache: Path, xet: str, tmp_path: Path
    ) -> None:
        put(store, WEIGHTS)
        (tmp_path / "outside").mkdir()
        (cache / "blobs" / xet[:2]).symlink_to(tmp_path / "outside")
        result = plan_seed(store, [cache]).execute()
        assert result.seeded == []
        assert "not a plain directory" in result.skipped[0].reason
        assert list((tmp_path / "outside").iterdir()) == []

    def test_undo_takes_it_all_away_at_once(self, store: Store, cache: Path) -> None:
        digests = [put(store, data) for data in (WEIGHTS, OTHER)]
        result = plan_seed(store, [cache]).execute()
        (entry,) = store.history()
        assert (entry.label, entry.changes) == ("hub seed", 2)
        assert all(each.is_undone for each in store.plan_undo(last=True).execute())
        assert not any(each.path.exists() for each in result.seeded)
        assert [store.path_of(digest).read_bytes() for digest in digests] == [WEIGHTS, OTHER]

    def test_nothing_to_do_leaves_no_entry_in_the_history(self, store: Store, cache: Path) -> None:
        assert plan_seed(store, [cache]).execute().seeded == []
        assert store.history() == []


@pytest.mark.parametrize("point", ["place: journaled", "place: linked"])
def test_killed_at_any_point_it_can_be_run_again(
    point: str, store: Store, cache: Path, xet: str
) -> None:
    digest = put(store, WEIGHTS)

    def seed() -> None:
        faults.hook = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None
        with Store(store.root) as own:
            plan_seed(own, [cache]).execute()

    with Child(seed) as child:
        _, status = os.waitpid(child.pid, 0)
        child._is_over = True  # noqa: SLF001
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    with Store(store.root) as again:
        plan_seed(again, [cache]).execute()
        path = layout.shared_entry(cache, xet)
        assert inode_of(path) == inode_of(again.path_of(digest))
        assert not again.verify(full=True).has_damage
        assert {name.name for name in path.parent.iterdir()} == {xet, f"{xet}.lock"}


def test_two_processes_at_once_make_each_entry_once(store: Store, cache: Path) -> None:
    digests = [put(store, random.Random(n).randbytes(70_000 + n)) for n in range(20)]
    together = multiprocessing.get_context("fork").Barrier(2)

    def seed() -> tuple[int, int]:
        with Store(store.root) as own:
            plan = plan_seed(own, [cache])
            together.wait(60)
            result = plan.execute()
            assert not result.skipped, result.skipped
            return len(result.seeded), result.done

    with Child(seed) as one, Child(seed) as other:
        counts = [one.result(), other.result()]
    assert [sum(each) for each in zip(*counts, strict=True)] == [20, 20]
    assert [link_count(store.path_of(digest)) for digest in digests] == [2] * 20
    assert not store.verify(full=True).has_damage
    assert len([path for path in cache.glob("blobs/??/*") if not path.suffix]) == 20
