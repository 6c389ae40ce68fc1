"""The figures of the store and of folders, against what the filesystem says."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.api import (
    REBUILT,
    FolderUsage,
    Owner,
    Store,
    StoreError,
    Trust,
    folder_usage,
    store_index,
)
from tests.api import store_measure as measure
from tests.processes.children import NOBODY, Child, folder_of
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    allocated,
    blob_path,
    row,
    snapshot,
    write,
)
from tests.store.small_disks import bind, in_own_namespace

if sys.platform == "win32":
    pytest.skip("link counts and blocks as POSIX has them", allow_module_level=True)


def owner_of(path: Path, root: Path | None = None) -> Owner:
    path.mkdir(parents=True, exist_ok=True)
    return Owner(kind="folder", name=path.name, path=path, root=root or path.parent)


def of(path: Path) -> FolderUsage:
    (found,) = folder_usage([path])
    return found


class TestStore:
    def test_an_empty_store_has_no_blobs_and_nothing_to_free(self, store: Store) -> None:
        usage = store.usage()
        assert (usage.blobs, usage.logical, usage.physical, usage.shared) == (0, 0, 0, 0)
        assert (usage.only_smartcache, usage.reclaimable, usage.saved) == (0, 0, 0)
        assert (usage.owners, usage.root) == ((), store.root)

    def test_a_blob_counts_once_and_each_name_outside_as_a_copy_that_was_saved(
        self, store: Store, folder: Path
    ) -> None:
        """Names that come and go are seen at once."""
        digest = store.put_stream([WEIGHTS]).digest
        blocks = allocated(blob_path(store))
        paths = [folder / f"{name}.safetensors" for name in "abc"]
        for names in range(4):
            with row(names):
                usage = store.usage()
                assert (usage.blobs, usage.physical) == (1, blocks)
                assert usage.logical == max(1, names) * len(WEIGHTS)
                assert usage.saved == max(0, names - 1) * blocks
                alone = 0 if names else blocks
                assert (usage.shared, usage.only_smartcache) == (blocks - alone, alone)
                assert usage.reclaimable == alone
                if names < 3:
                    store.place(digest, paths[names], kind="hardlink")
        for path in paths:
            path.unlink()
        usage = store.usage()
        assert (usage.shared, usage.reclaimable, usage.only_smartcache) == (0, blocks, blocks)

    def test_looking_changes_nothing_and_says_how_far_it_is(
        self, store: Store, folder: Path
    ) -> None:
        for n in range(5):
            store.put_stream([bytes([n]) * 100])
        store.adopt(write(folder / "a.safetensors"))
        (folder / "a.safetensors").unlink()
        before, watch = snapshot(store.root), Watch()
        store.usage(progress=watch)
        assert snapshot(store.root) == before
        assert (watch.labels, watch.total, watch.done) == (["Looking at blobs"], 6, 6)

    def test_owners_say_what_they_hold_and_what_nobody_else_does(
        self, store: Store, folder: Path
    ) -> None:
        digests = [store.put_stream([bytes([n]) * 5000]).digest for n in range(10)]
        blocks = allocated(blob_path(store, digests[0]))
        every, some = owner_of(folder / "all"), owner_of(folder / "some")
        store.own(every, digests)
        store.own(owner_of(folder / "none"), [])
        for shared in (0, 1, 9, 10):
            with row(shared, "of 10 shared"):
                store.own(some, digests[:shared])
                usage = {owner.name: owner for owner in store.usage().owners}
                found = usage["all"]
                assert (found.blobs, found.size, found.allocated) == (10, 50_000, 10 * blocks)
                assert found.alone == (10 - shared) * blocks
                assert (usage["some"].alone, usage["some"].allocated) == (0, shared * blocks)
                assert (usage["none"].blobs, usage["none"].liveness) == (0, "live")

    def test_what_nobody_holds_any_more_is_reclaimable(self, store: Store, folder: Path) -> None:
        """Not what is pinned, held on an absent drive or by an owner, or linked."""
        digests = {
            name: store.put_stream([name.encode() * 2000]).digest
            for name in ("free", "pinned", "dead", "both", "away")
        }
        store.pin(digests["pinned"])
        store.own(owner_of(folder / "dead"), [digests["dead"], digests["both"]])
        store.own(owner_of(folder / "live"), [digests["both"]])
        store.own(owner_of(folder / "drive" / "away"), [digests["away"]])
        store.adopt(write(folder / "live" / "adopted", OTHER), owner=owner_of(folder / "live"))
        (folder / "live" / "adopted").unlink()
        (folder / "dead").rmdir()
        shutil.rmtree(folder / "drive")
        usage = store.usage()
        states = {owner.name: owner.liveness for owner in usage.owners}
        assert states == {"dead": "dead", "live": "live", "away": "away", "kept": "live"}
        free = {blob.digest for blob in store.blobs()} - set(digests.values())
        free |= {digests[name] for name in ("free", "dead")}
        assert usage.reclaimable == sum(allocated(blob_path(store, digest)) for digest in free)

    @pytest.mark.parametrize("seed", range(4))
    def test_reclaimable_is_what_prune_frees(
        self, store: Store, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Names, owners and pins made and removed at random."""
        monkeypatch.setattr(store_index, "_LONG_PAGE", 2 * seed + 1)
        rnd = random.Random(seed)
        digests = [
            store.put_stream([rnd.randbytes(rnd.randrange(1, 30_000))]).digest for _ in range(40)
        ]
        owners = [owner_of(folder / f"owner-{n}" / "in", folder / f"owner-{n}") for n in range(5)]
        kinds = ("hardlink", "copy")
        for n, digest in enumerate(digests):
            if rnd.random() < 0.5:
                store.own(rnd.choice(owners), [digest])
            if rnd.random() < 0.2:
                store.pin(digest)
            for _ in range(rnd.randrange(3)):
                owner = rnd.choice([None, *owners])
                place = folder if owner is None or owner.path is None else owner.path
                name = place / f"{n}-{rnd.random()}.safetensors"
                store.place(digest, name, kind=rnd.choice(kinds), owner=owner)  # type: ignore[arg-type]
        for path in sorted(folder.rglob("*.safetensors")):
            if rnd.random() < 0.5:
                path.unlink()
        shutil.rmtree(owners[0].path or "")
        shutil.rmtree(owners[1].root or "")
        for blob in list(store.volume.index.blobs(order="digest"))[:10]:
            with suppress(StoreError):
                store.remove(blob.digest)
        usage = store.usage()
        plan = store.plan_prune()
        assert usage.reclaimable == plan.freed_size > 0
        assert plan.execute().freed_size == usage.reclaimable
        after = store.usage()
        assert after.reclaimable == 0
        assert after.physical == usage.physical - usage.reclaimable

    def test_what_lies_beside_the_blobs_is_counted_by_place(self, store: Store) -> None:
        layout = store.volume.layout
        for directory in (layout.bad, layout.tmp, layout.sets / "latents" / "1"):
            write(directory / "file", WEIGHTS)
        usage = store.usage()
        assert (usage.blobs, usage.physical, usage.reclaimable) == (0, 0, 0)
        assert usage.bad == allocated(layout.bad / "file")
        assert usage.tmp == allocated(layout.tmp / "file")
        assert usage.sets == allocated(layout.sets / "latents" / "1" / "file")
        assert usage.index >= allocated(layout.index) > 0
        assert usage.total == usage.bad + usage.tmp + usage.sets + usage.index

    def test_after_a_rebuild_the_figures_say_so(self, store: Store) -> None:
        assert not store.usage().is_rebuilt
        store.volume.index.set_note(REBUILT, "now")
        assert store.usage().is_rebuilt

    def test_a_blob_that_is_gone_counts_no_more_and_counts_again_when_it_is_back(
        self, store: Store, folder: Path
    ) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        os.rename(blob_path(store), folder / "taken away")
        gone = store.usage()
        assert (gone.blobs, gone.physical) == (0, 0)
        assert store.verify().missing == [digest]
        os.rename(folder / "taken away", blob_path(store))
        back = store.usage()
        assert (back.blobs, back.physical) == (1, allocated(blob_path(store)))


class TestFolder:
    def test_each_name_counts_but_each_inode_once_and_what_names_outside_share_is_not_freed(
        self, folder: Path
    ) -> None:
        inside = folder / "inside"
        shared, own = write(inside / "a.bin"), write(inside / "below" / "b.bin", OTHER)
        os.link(shared, folder / "outside.bin")
        os.link(shared, inside / "again.bin")
        usage = of(inside)
        assert usage.path == inside
        assert (usage.files, usage.directories, usage.linked_inside) == (3, 2, 1)
        assert usage.logical == 2 * len(WEIGHTS) + len(OTHER)
        assert (usage.shared_outside, usage.freed_if_deleted) == (allocated(shared), allocated(own))
        assert usage.physical == usage.shared_outside + usage.freed_if_deleted
        assert (usage.shared_with_store, usage.is_partial) == (0, False)
        whole = of(folder)
        assert (whole.shared_outside, whole.linked_inside) == (0, 2)
        assert whole.freed_if_deleted == whole.physical == usage.physical
        single = of(inside / "a.bin")
        assert (single.files, single.directories, single.logical) == (1, 0, len(WEIGHTS))
        assert (single.shared_outside, single.freed_if_deleted) == (allocated(shared), 0)

    def test_what_a_folder_shares_with_the_store_is_known(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measure, "_LOOKUP", 3)  # blobs are looked up in batches
        adopted = [write(folder / f"{n}.safetensors", bytes([n]) * 5000) for n in range(10)]
        for path in adopted:
            store.adopt(path)
        os.link(write(folder / "b.bin", OTHER), folder / "c.bin")
        write(folder / "d.bin", WEIGHTS[:5000])
        (usage,) = store.folder_usage([folder])
        assert usage.shared_with_store == usage.shared_outside == sum(map(allocated, adopted))
        assert of(folder).shared_with_store == 0

    def test_inodes_of_another_filesystem_are_not_taken_for_blobs(
        self, store: Store, elsewhere: Path
    ) -> None:
        """Inode numbers are those of a filesystem: the same number elsewhere is another file."""
        blob = store.put_stream([WEIGHTS])
        file = write(elsewhere / "a.bin")
        os.link(file, elsewhere / "b.bin")
        with store.volume.index.write():
            store.volume.index.refresh(blob.id, file.stat(), Trust.VERIFIED)
        (usage,) = store.folder_usage([elsewhere])
        assert usage.shared_with_store == 0

    def test_holes_take_no_blocks_and_are_named(self, folder: Path) -> None:
        path, full = write(folder / "sparse.bin"), write(folder / "full.bin", OTHER)
        os.truncate(path, 50_000_000)
        usage = of(folder)
        assert usage.logical == 50_000_000 + len(OTHER)
        assert usage.physical == allocated(path) + allocated(full) < 1_000_000
        assert usage.sparse == 50_000_000 - allocated(path)

    def test_symlinks_pipes_and_sockets_are_counted_but_never_followed_or_opened(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        outside = write(tmp_path / "outside" / "a.bin")
        for name, target in (("to file", outside), ("to folder", outside.parent),
                             ("nowhere", folder / "missing"), ("loop", folder / "loop"),
                             ("up", folder)):  # fmt: skip
            (folder / name).symlink_to(target)
        os.mkfifo(folder / "pipe")
        monkeypatch.chdir(folder)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            usage = of(folder)
        assert (usage.symlinks, usage.other, usage.files) == (5, 2, 0)
        assert (usage.physical, usage.unreadable_count) == (0, 0)

    def test_a_symlink_that_is_given_stands_for_its_target(
        self, folder: Path, tmp_path: Path
    ) -> None:
        write(folder / "a.bin")
        (tmp_path / "one").symlink_to(folder)
        (tmp_path / "two").symlink_to("one")
        usage = of(tmp_path / "two")
        assert (usage.path, usage.files, usage.symlinks) == (tmp_path / "two", 1, 0)
        (tmp_path / "file").symlink_to(folder / "a.bin")
        assert of(tmp_path / "file").logical == len(WEIGHTS)

    def test_any_name_is_measured_and_can_be_reported(self, folder: Path) -> None:
        names = [b"caf\xe9.bin", b"two\nlines.bin", b" ", b"-rf", "模型.bin".encode()]
        for name in names:
            place = folder / os.fsdecode(name)
            inner = write(place / os.fsdecode(name))
            usage = of(place)
            assert (usage.path, usage.files, usage.physical) == (place, 1, allocated(inner))
        assert of(folder).files == len(names)

    def test_a_deep_tree_is_measured_without_recursion(self, folder: Path) -> None:
        levels = [folder]
        for _ in range(sys.getrecursionlimit() + 100):
            levels.append(levels[-1] / "d")
            levels[-1].mkdir()
        write(levels[-1] / "a.bin")
        usage = of(folder)
        assert (usage.files, usage.directories) == (1, len(levels))
        (levels[-1] / "a.bin").unlink()
        for path in reversed(levels[1:]):  # shutil.rmtree recurses
            path.rmdir()

    def test_directories_too_deep_to_be_named_are_reported_not_lost(self, folder: Path) -> None:
        """The kernel takes no path above 4096 bytes, though deeper directories can exist."""
        name = "d" * 200
        top = os.open(folder, os.O_RDONLY)
        descriptors = [top]
        for _ in range(25):
            os.mkdir(name, dir_fd=descriptors[-1])
            descriptors.append(os.open(name, os.O_RDONLY, dir_fd=descriptors[-1]))
        try:
            usage = of(folder)
            assert usage.unreadable_count == 1
            assert usage.unreadable[0][1] == os.strerror(errno.ENAMETOOLONG)
        finally:
            pairs = zip(reversed(descriptors[:-1]), reversed(descriptors), strict=False)
            for parent, child in pairs:
                os.close(child)
                os.rmdir(name, dir_fd=parent)
            os.close(top)

    def test_the_figures_add_up_to_those_of_du(self, folder: Path) -> None:
        if shutil.which("du") is None:
            pytest.skip("no du")
        first = write(folder / "a.bin")
        for n in range(5):
            write(folder / str(n) / "deep" / "own.bin", OTHER)
            os.link(first, folder / str(n) / "linked.bin")
            (folder / str(n) / "symlink").symlink_to("x" * 100)
        command = ["du", "-s", "-B1", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"another du: {done.stderr}")
        usage = of(folder)
        assert usage.physical + usage.overhead == int(done.stdout.split()[0])


class TestSeveralFolders:
    def test_the_total_counts_shared_inodes_once(self, folder: Path) -> None:
        first = write(folder / "one" / "a.bin")
        (folder / "two").mkdir()
        os.link(first, folder / "two" / "a.bin")
        one, two, total = folder_usage([folder / "one", folder / "two"])
        assert one.physical == two.physical == total.physical == allocated(first)
        assert one.shared_outside == two.shared_outside == allocated(first)
        assert (one.freed_if_deleted, two.freed_if_deleted) == (0, 0)
        assert (total.path, total.files, total.linked_inside) == (None, 2, 1)
        assert (total.shared_outside, total.freed_if_deleted) == (0, allocated(first))

    def test_overlapping_arguments_count_once_in_the_total(self, folder: Path) -> None:
        first = write(folder / "a.bin")
        write(folder / "below" / "b.bin", OTHER)
        os.link(first, folder / "below" / "again.bin")
        (folder / "link").symlink_to("below")
        names = ("files", "logical", "physical", "freed_if_deleted", "directories", "symlinks")
        alone = {name: getattr(of(folder), name) for name in names}
        arguments = (". below", "below .", ". .", ". below/b.bin", "below/b.bin .",
                     "below/b.bin . below a.bin below/b.bin", ". below/../below link")  # fmt: skip
        for argument in arguments:
            with row(argument):
                paths = [folder / name for name in argument.split()]
                *each, total = folder_usage(paths)
                assert {name: getattr(total, name) for name in names} == alone
                assert each == [of(path) for path in paths]
        assert folder_usage([]) == []

    def test_a_path_that_is_not_there_is_an_error_that_names_it(self, folder: Path) -> None:
        write(folder / "a.bin")
        (folder / "dangling").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        for path in ("missing", "missing/below", "a.bin/below", "dangling", "loop"):
            with row(path), pytest.raises(StoreError, match=path) as caught:
                folder_usage([folder, folder / path])
            assert caught.value.hint
            assert vars(caught.value)["path"] == folder / path

    def test_a_folder_shown_at_two_places_is_counted_once(self, folder: Path) -> None:
        """A bind mount: the same directory, with the same files, under another name."""
        write(folder / "models" / "a.bin")
        write(folder / "models" / "below" / "b.bin", OTHER)

        def look() -> list[FolderUsage]:
            bind(folder / "models", folder / "again")
            return folder_usage([folder, folder / "again"])

        whole, again, total = in_own_namespace(look)
        assert (whole.files, whole.directories) == (2, 3)
        assert again.files == total.files == 2
        assert total.physical == whole.physical == again.physical


class TestUnreadableAndChanging:
    @pytest.fixture
    def closed(self) -> Iterator[Path]:
        """A folder that everybody can enter, with parts that only its owner can."""
        with folder_of(None) as folder:
            write(folder / "a.bin")
            write(folder / "no entry" / "b.bin", mode=0o600)
            write(folder / "names only" / "c.bin")
            write(folder / "no reading" / "d.bin", mode=0o000)
            (folder / "no entry").chmod(0o000)
            (folder / "names only").chmod(0o444)
            yield folder
            for path in folder.iterdir():
                path.chmod(0o755)

    def test_what_cannot_be_read_is_counted_and_named_up_to_a_number(
        self, closed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def look() -> tuple[list[FolderUsage], FolderUsage]:
            every = folder_usage([closed, closed / "no reading"])
            monkeypatch.setattr(measure, "MOST_NAMED", 1)
            return every, of(closed)

        with Child(look, user=NOBODY if os.geteuid() == 0 else None) as child:
            (usage, _, total), short = child.result()
        reason = os.strerror(errno.EACCES)
        assert sorted(usage.unreadable) == [
            (closed / "names only" / "c.bin", reason),
            (closed / "no entry", reason),
        ]
        assert usage.unreadable_count == 2
        # A file that cannot be opened can be measured all the same.
        assert (usage.files, usage.directories, usage.is_partial) == (2, 4, False)
        assert (total.unreadable, total.files) == (usage.unreadable, 2)
        assert (len(short.unreadable), short.unreadable_count) == (1, 2)

    def test_a_folder_that_vanishes_or_becomes_a_file_makes_the_figures_partial(
        self, folder: Path
    ) -> None:
        write(folder / "a.bin")
        below = folder / "below"
        for becomes_file in (False, True):
            below.mkdir()

            def act(becomes_file: bool = becomes_file) -> None:
                below.rmdir()
                if becomes_file:
                    below.write_bytes(b"")

            with row(becomes_file):
                (usage,) = folder_usage([folder], progress=Watch(act))
                assert (usage.is_partial, usage.files, usage.unreadable_count) == (True, 1, 0)
                assert not of(folder).is_partial

    def test_files_may_come_and_go_during_the_walk(self, folder: Path) -> None:
        steady = [write(folder / f"steady-{n}.bin") for n in range(20)]
        done = threading.Event()

        def churn() -> None:
            number = 0
            while not done.is_set():
                number += 1
                path = folder / f"passing-{number % 50}"
                path.write_bytes(b"x")
                if number % 2:
                    path.unlink()

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(100):
                usage = of(folder)
                assert 20 <= usage.files <= 70
                assert usage.physical >= sum(map(allocated, steady))
                assert usage.unreadable_count == 0
        finally:
            done.set()
            thread.join()

    def test_the_walk_says_how_many_names_it_met(self, folder: Path) -> None:
        for n in range(7):
            write(folder / str(n % 2) / f"{n}.bin", OTHER)
        watch = Watch()
        folder_usage([folder], progress=watch)
        assert (watch.labels, watch.done) == (["Measuring"], 9)
