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
from tests.store.files import OTHER, WEIGHTS, Watch, allocated, link_count, snapshot, write
from tests.store.small_disks import bind, in_own_namespace

if sys.platform == "win32":
    pytest.skip("link counts and blocks as POSIX has them", allow_module_level=True)


def owner_of(path: Path, root: Path | None = None) -> Owner:
    path.mkdir(parents=True, exist_ok=True)
    return Owner(kind="folder", name=str(path), path=path, root=root or path.parent)


def of(path: Path) -> FolderUsage:
    (found,) = folder_usage([path])
    return found


# the store


def test_an_empty_store_has_no_blobs_and_nothing_to_free(store: Store) -> None:
    usage = store.usage()
    assert (usage.blobs, usage.logical, usage.physical, usage.shared) == (0, 0, 0, 0)
    assert (usage.only_smartcache, usage.reclaimable, usage.saved) == (0, 0, 0)
    assert usage.owners == ()
    assert usage.root == store.root


def test_a_blob_with_no_name_outside_counts_once_and_can_be_freed(store: Store) -> None:
    digest = store.put_stream([WEIGHTS]).digest
    blocks = allocated(store.volume.layout.blob(digest))
    usage = store.usage()
    assert (usage.blobs, usage.logical, usage.saved) == (1, len(WEIGHTS), 0)
    assert usage.physical == usage.only_smartcache == usage.reclaimable == blocks
    assert usage.shared == 0


def test_each_name_outside_counts_as_a_copy_that_was_saved(store: Store, folder: Path) -> None:
    digest = store.put_stream([WEIGHTS]).digest
    for name in ("a", "b", "c"):
        store.place(digest, folder / f"{name}.safetensors", kind="hardlink")
    usage = store.usage()
    blocks = allocated(store.volume.layout.blob(digest))
    assert usage.logical == 3 * len(WEIGHTS)
    assert usage.physical == usage.shared == blocks
    assert (usage.only_smartcache, usage.reclaimable) == (0, 0)
    assert usage.saved == 2 * blocks


def test_names_that_go_are_seen_at_once(store: Store, folder: Path) -> None:
    path = write(folder / "a.safetensors")
    store.adopt(path)
    assert store.usage().shared > 0
    path.unlink()
    usage = store.usage()
    assert usage.shared == 0
    assert usage.reclaimable == usage.only_smartcache == usage.physical > 0


def test_looking_changes_nothing(store: Store, folder: Path) -> None:
    path = write(folder / "a.safetensors")
    store.adopt(path)
    path.unlink()
    before = snapshot(store.root)
    store.usage()
    assert snapshot(store.root) == before


def test_looking_says_how_far_it_is(store: Store) -> None:
    for n in range(5):
        store.put_stream([bytes([n]) * 100])
    watch = Watch()
    store.usage(progress=watch)
    assert (watch.labels, watch.total, watch.done) == (["Looking at blobs"], 5, 5)


def test_a_pin_keeps_a_blob_from_being_reclaimable(store: Store) -> None:
    digest = store.put_stream([WEIGHTS]).digest
    free = store.put_stream([OTHER]).digest
    store.pin(digest)
    usage = store.usage()
    assert usage.only_smartcache == usage.physical
    assert usage.reclaimable == allocated(store.volume.layout.blob(free))


def test_owners_say_what_they_hold_and_what_nobody_else_does(store: Store, folder: Path) -> None:
    first, second = store.put_stream([WEIGHTS]).digest, store.put_stream([OTHER]).digest
    store.own(owner_of(folder / "one"), [first, second])
    store.own(owner_of(folder / "two"), [second])
    store.own(owner_of(folder / "none"), [])
    usage = {Path(owner.name).name: owner for owner in store.usage().owners}
    sizes = [allocated(store.volume.layout.blob(digest)) for digest in (first, second)]
    one, two, none = usage["one"], usage["two"], usage["none"]
    assert (one.blobs, one.size, one.allocated) == (2, len(WEIGHTS) + len(OTHER), sum(sizes))
    assert (one.alone, two.alone, none.alone) == (sizes[0], 0, 0)
    assert (two.blobs, two.size, two.allocated) == (1, len(OTHER), sizes[1])
    assert (none.blobs, none.liveness) == (0, "live")


@pytest.mark.parametrize("shared", [0, 1, 9, 10], ids=lambda n: f"{n} of 10 blobs shared")
def test_what_an_owner_holds_alone_is_right_however_much_is_shared(
    store: Store, folder: Path, shared: int
) -> None:
    digests = [store.put_stream([bytes([n]) * 5000]).digest for n in range(10)]
    store.own(owner_of(folder / "all"), digests)
    store.own(owner_of(folder / "some"), digests[:shared])
    blocks = allocated(store.volume.layout.blob(digests[0]))
    usage = {Path(owner.name).name: owner for owner in store.usage().owners}
    assert usage["all"].alone == (10 - shared) * blocks
    assert (usage["some"].alone, usage["some"].allocated) == (0, shared * blocks)


def test_what_a_deleted_owner_held_is_reclaimable_unless_another_holds_it(
    store: Store, folder: Path
) -> None:
    lone, both = store.put_stream([WEIGHTS]).digest, store.put_stream([OTHER]).digest
    store.own(owner_of(folder / "dead"), [lone, both])
    store.own(owner_of(folder / "live"), [both])
    (folder / "dead").rmdir()
    usage = store.usage()
    assert [owner.liveness for owner in usage.owners] == ["dead", "live"]
    assert usage.reclaimable == allocated(store.volume.layout.blob(lone))


def test_what_an_owner_on_an_absent_drive_holds_is_not_reclaimable(
    store: Store, folder: Path
) -> None:
    digest = store.put_stream([WEIGHTS]).digest
    drive = folder / "drive"
    store.own(owner_of(drive / "models"), [digest])
    shutil.rmtree(drive)
    usage = store.usage()
    assert [owner.liveness for owner in usage.owners] == ["away"]
    assert usage.reclaimable == 0


def test_a_living_symlink_keeps_a_blob_and_a_removed_one_does_not(
    store: Store, folder: Path
) -> None:
    digest = store.put_stream([WEIGHTS]).digest
    link = folder / "a.safetensors"
    store.place(digest, link, kind="symlink")
    assert store.usage().reclaimable == 0
    link.unlink()
    usage = store.usage()
    assert usage.reclaimable == usage.physical > 0


def test_an_owner_whose_last_link_was_deleted_holds_the_blob_no_more(
    store: Store, folder: Path
) -> None:
    path = write(folder / "a.safetensors")
    store.adopt(path, owner=owner_of(folder))
    assert store.usage().reclaimable == 0
    path.unlink()
    usage = store.usage()
    assert usage.owners[0].liveness == "live"
    assert usage.reclaimable == usage.physical > 0


@pytest.mark.parametrize("seed", range(8))
def test_reclaimable_is_what_prune_frees(
    store: Store, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, owners, pins and symlinks made and removed at random."""
    monkeypatch.setattr(store_index, "_LONG_PAGE", seed + 1)
    rnd = random.Random(seed)
    digests = [
        store.put_stream([rnd.randbytes(rnd.randrange(1, 30_000))]).digest for _ in range(40)
    ]
    owners = [owner_of(folder / f"owner-{n}" / "in", folder / f"owner-{n}") for n in range(5)]
    kinds = ("hardlink", "symlink", "copy")
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
        try:
            store.forget(blob.digest)
        except StoreError:
            continue
    usage = store.usage()
    trashed = [each for each in store.volume.layout.trash.iterdir() if link_count(each) == 1]
    plan = store.plan_prune()
    assert usage.reclaimable == plan.freed_size > 0
    from_trash = sum(map(allocated, trashed))
    assert plan.execute().freed_size == usage.reclaimable
    after = store.usage()
    assert (after.reclaimable, after.trash) == (0, 0)
    assert after.physical == usage.physical - (usage.reclaimable - from_trash)


def test_the_trash_is_reclaimable_but_no_blob_any_more(store: Store) -> None:
    digest = store.put_stream([WEIGHTS]).digest
    store.forget(digest)
    usage = store.usage()
    blocks = allocated(store.volume.layout.trash / digest)
    assert (usage.blobs, usage.physical, usage.trash, usage.reclaimable) == (0, 0, blocks, blocks)


def test_what_lies_beside_the_blobs_is_counted_by_place(store: Store) -> None:
    layout = store.volume.layout
    for directory in (layout.bad, layout.tmp, layout.sets / "latents" / "1"):
        write(directory / "file", WEIGHTS)
    usage = store.usage()
    assert usage.bad == allocated(layout.bad / "file")
    assert usage.tmp == allocated(layout.tmp / "file")
    assert usage.sets == allocated(layout.sets / "latents" / "1" / "file")
    assert usage.index >= allocated(layout.index) > 0
    assert usage.total == usage.bad + usage.tmp + usage.sets + usage.index


def test_after_a_rebuild_the_figures_say_so(store: Store) -> None:
    assert not store.usage().is_rebuilt
    store.volume.index.set_note(REBUILT, "now")
    assert store.usage().is_rebuilt


def test_a_blob_that_is_gone_counts_no_more_and_counts_again_when_it_is_back(
    store: Store, folder: Path
) -> None:
    digest = store.put_stream([WEIGHTS]).digest
    os.rename(store.volume.layout.blob(digest), folder / "taken away")
    gone = store.usage()
    assert (gone.blobs, gone.physical) == (0, 0)
    assert store.verify().missing == [digest]
    os.rename(folder / "taken away", store.volume.layout.blob(digest))
    back = store.usage()
    assert (back.blobs, back.physical) == (1, allocated(store.volume.layout.blob(digest)))


# folders


def test_a_folder_counts_each_name_but_each_inode_once(folder: Path) -> None:
    first = write(folder / "a.bin")
    os.link(first, folder / "again.bin")
    write(folder / "below" / "b.bin", OTHER)
    usage = of(folder)
    assert usage.path == folder
    assert (usage.files, usage.directories, usage.linked_inside) == (3, 2, 1)
    assert usage.logical == 2 * len(WEIGHTS) + len(OTHER)
    assert usage.physical == allocated(first) + allocated(folder / "below" / "b.bin")
    assert usage.freed_if_deleted == usage.physical
    assert (usage.shared_outside, usage.shared_with_store, usage.is_partial) == (0, 0, False)


def test_what_names_outside_share_would_not_be_freed(folder: Path) -> None:
    inside = folder / "inside"
    shared = write(inside / "a.bin")
    own = write(inside / "b.bin", OTHER)
    os.link(shared, folder / "outside.bin")
    os.link(shared, inside / "again.bin")
    usage = of(inside)
    assert usage.shared_outside == allocated(shared)
    assert usage.freed_if_deleted == allocated(own)
    assert usage.physical == usage.shared_outside + usage.freed_if_deleted
    whole = of(folder)
    assert (whole.shared_outside, whole.linked_inside) == (0, 2)
    assert whole.freed_if_deleted == whole.physical


def test_what_a_folder_shares_with_the_store_is_known(store: Store, folder: Path) -> None:
    adopted = write(folder / "a.safetensors")
    store.adopt(adopted)
    foreign = write(folder / "b.bin", OTHER)
    os.link(foreign, folder / "c.bin")
    write(folder / "d.bin", WEIGHTS[:5000])
    (usage,) = store.folder_usage([folder])
    assert usage.shared_with_store == usage.shared_outside == allocated(adopted)
    assert of(folder).shared_with_store == 0


def test_inodes_of_another_filesystem_are_not_taken_for_blobs(
    store: Store, elsewhere: Path
) -> None:
    """Inode numbers are those of a filesystem: the same number elsewhere is another file."""
    store.put_stream([WEIGHTS])
    file = write(elsewhere / "a.bin")
    os.link(file, elsewhere / "b.bin")
    blob = next(store.volume.index.blobs())
    with store.volume.index.write():
        store.volume.index.refresh(blob.id, file.stat(), Trust.VERIFIED)
    (usage,) = store.folder_usage([elsewhere])
    assert usage.shared_with_store == 0


def test_blobs_are_looked_up_in_batches(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_LOOKUP", 3)
    for n in range(10):
        path = write(folder / f"{n}.safetensors", bytes([n]) * 5000)
        store.adopt(path)
    (usage,) = store.folder_usage([folder])
    assert usage.shared_with_store == usage.physical == sum(map(allocated, folder.iterdir()))


def test_holes_take_no_blocks_and_are_named(folder: Path) -> None:
    path = folder / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(50_000_000)
        file.write(WEIGHTS)
    full = write(folder / "full.bin", OTHER)
    usage = of(folder)
    assert usage.logical == 50_000_000 + len(OTHER)
    assert usage.physical == allocated(path) + allocated(full) < 1_000_000
    assert usage.sparse == 50_000_000 - allocated(path)


def test_symlinks_are_counted_and_never_followed(folder: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "a.bin")
    (folder / "to file").symlink_to(outside)
    (folder / "to folder").symlink_to(outside.parent)
    (folder / "nowhere").symlink_to(folder / "missing")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "up").symlink_to(folder)
    usage = of(folder)
    assert (usage.symlinks, usage.files, usage.physical, usage.unreadable_count) == (5, 0, 0, 0)


def test_a_symlink_that_is_given_stands_for_its_target(folder: Path, tmp_path: Path) -> None:
    write(folder / "a.bin")
    (tmp_path / "one").symlink_to(folder)
    (tmp_path / "two").symlink_to("one")
    usage = of(tmp_path / "two")
    assert (usage.path, usage.files, usage.symlinks) == (tmp_path / "two", 1, 0)
    (tmp_path / "file").symlink_to(folder / "a.bin")
    assert of(tmp_path / "file").logical == len(WEIGHTS)


def test_a_single_file_can_be_measured(folder: Path) -> None:
    path = write(folder / "a.bin")
    os.link(path, folder / "b.bin")
    usage = of(path)
    assert (usage.files, usage.directories, usage.logical) == (1, 0, len(WEIGHTS))
    assert (usage.shared_outside, usage.freed_if_deleted) == (allocated(path), 0)


def test_pipes_and_sockets_are_counted_but_not_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(folder / "pipe")
    monkeypatch.chdir(folder)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        usage = of(folder)
    assert (usage.other, usage.files) == (2, 0)


@pytest.mark.parametrize(
    "name", [b"caf\xe9.bin", b"two\nlines.bin", b" ", b"-rf", "模型.bin".encode()]
)
def test_any_name_is_measured_and_can_be_reported(folder: Path, name: bytes) -> None:
    raw = os.path.join(os.fsencode(folder), name)
    os.mkdir(raw)
    inner = Path(os.fsdecode(os.path.join(raw, name)))
    write(inner)
    usage = of(Path(os.fsdecode(raw)))
    assert (usage.files, usage.physical) == (1, allocated(inner))
    assert usage.path is not None
    assert os.fsencode(usage.path) == raw
    assert of(folder).files == 1


def test_a_deep_tree_is_measured_without_recursion(folder: Path) -> None:
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


def test_directories_too_deep_to_be_named_are_reported_not_lost(folder: Path) -> None:
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
        for parent, child in zip(reversed(descriptors[:-1]), reversed(descriptors), strict=False):
            os.close(child)
            os.rmdir(name, dir_fd=parent)
        os.close(top)


def test_the_figures_add_up_to_those_of_du(folder: Path) -> None:
    if shutil.which("du") is None:
        pytest.skip("no du")
    first = write(folder / "a.bin")
    for n in range(5):
        (folder / str(n) / "deep").mkdir(parents=True)
        os.link(first, folder / str(n) / "linked.bin")
        write(folder / str(n) / "deep" / "own.bin", OTHER)
        (folder / str(n) / "symlink").symlink_to("x" * 100)
    done = subprocess.run(
        ["du", "-s", "-B1", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"another du: {done.stderr}")
    usage = of(folder)
    assert usage.physical + usage.overhead == int(done.stdout.split()[0])


# several folders


def test_the_total_of_several_folders_counts_shared_inodes_once(folder: Path) -> None:
    first = write(folder / "one" / "a.bin")
    (folder / "two").mkdir()
    os.link(first, folder / "two" / "a.bin")
    one, two, total = folder_usage([folder / "one", folder / "two"])
    assert one.physical == two.physical == total.physical == allocated(first)
    assert one.shared_outside == two.shared_outside == allocated(first)
    assert (one.freed_if_deleted, two.freed_if_deleted) == (0, 0)
    assert (total.path, total.files, total.linked_inside) == (None, 2, 1)
    assert (total.shared_outside, total.freed_if_deleted) == (0, allocated(first))


@pytest.mark.parametrize(
    "names",
    [
        (".", "below"),
        ("below", "."),
        (".", "."),
        (".", "below/b.bin"),
        ("below/b.bin", "."),
        ("below/b.bin", ".", "below", "a.bin", "below/b.bin"),
        (".", "below/../below", "link"),
    ],
)
def test_overlapping_arguments_count_once_in_the_total(
    folder: Path, names: tuple[str, ...]
) -> None:
    first = write(folder / "a.bin")
    write(folder / "below" / "b.bin", OTHER)
    os.link(first, folder / "below" / "again.bin")
    (folder / "link").symlink_to("below")
    (alone,) = folder_usage([folder])
    *each, total = folder_usage([folder / name for name in names])
    assert len(each) == len(names)
    assert total.files == alone.files
    assert total.logical == alone.logical
    assert total.physical == alone.physical
    assert total.freed_if_deleted == alone.freed_if_deleted
    assert (total.directories, total.symlinks) == (alone.directories, alone.symlinks)
    for path, found in zip(names, each, strict=True):
        assert found == of(folder / path)


def test_one_path_has_no_total_and_none_is_an_empty_list(folder: Path) -> None:
    assert len(folder_usage([folder])) == 1
    assert folder_usage([]) == []


@pytest.mark.parametrize("path", ["missing", "missing/below", "a.bin/below", "dangling", "loop"])
def test_a_path_that_is_not_there_is_an_error_that_names_it(folder: Path, path: str) -> None:
    write(folder / "a.bin")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match=path) as caught:
        folder_usage([folder, folder / path])
    assert caught.value.hint
    assert caught.value.path == folder / path  # type: ignore[attr-defined]


# what cannot be read, and what changes


@pytest.fixture
def closed() -> Iterator[Path]:
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


def test_what_cannot_be_read_is_counted_and_named(closed: Path) -> None:
    def look() -> list[FolderUsage]:
        return folder_usage([closed, closed / "no reading"])

    is_root = os.geteuid() == 0
    with Child(look, user=NOBODY if is_root else None) as child:
        usage, _, total = child.result()
    reason = os.strerror(errno.EACCES)
    assert sorted(usage.unreadable) == [
        (closed / "names only" / "c.bin", reason),
        (closed / "no entry", reason),
    ]
    assert usage.unreadable_count == 2
    # A file that cannot be opened can be measured all the same.
    assert (usage.files, usage.directories, usage.is_partial) == (2, 4, False)
    assert (total.unreadable, total.files) == (usage.unreadable, 2)


def test_many_unreadable_places_are_counted_but_not_all_named(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MOST_NAMED", 1)
    is_root = os.geteuid() == 0
    with Child(lambda: folder_usage([closed]), user=NOBODY if is_root else None) as child:
        (usage,) = child.result()
    assert (len(usage.unreadable), usage.unreadable_count) == (1, 2)


def test_a_folder_that_vanishes_during_the_walk_makes_the_figures_partial(folder: Path) -> None:
    write(folder / "a.bin")
    write(folder / "below" / "b.bin")
    watch = Watch(lambda: shutil.rmtree(folder / "below"))
    (usage,) = folder_usage([folder], progress=watch)
    assert usage.is_partial
    assert (usage.files, usage.unreadable_count) == (1, 0)
    assert not of(folder).is_partial


def test_a_folder_replaced_by_a_file_during_the_walk_makes_the_figures_partial(
    folder: Path,
) -> None:
    below = folder / "below"
    below.mkdir()

    def act() -> None:
        below.rmdir()
        below.write_bytes(b"")

    (usage,) = folder_usage([folder], progress=Watch(act))
    assert (usage.is_partial, usage.unreadable_count) == (True, 0)


def test_files_may_come_and_go_during_the_walk(folder: Path) -> None:
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
        for _ in range(200):
            usage = of(folder)
            assert 20 <= usage.files <= 70
            assert usage.physical >= sum(map(allocated, steady))
            assert usage.unreadable_count == 0
    finally:
        done.set()
        thread.join()


def test_the_walk_says_how_many_names_it_met(folder: Path) -> None:
    for n in range(7):
        write(folder / str(n % 2) / f"{n}.bin", OTHER)
    watch = Watch()
    folder_usage([folder], progress=watch)
    assert (watch.labels, watch.done) == (["Measuring"], 9)


def test_a_folder_shown_at_two_places_is_counted_once(folder: Path) -> None:
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
