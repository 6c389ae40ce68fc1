from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api import (
    BadDigestError,
    BlobNotFoundError,
    DamagedBlobError,
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    Owner,
    Store,
    StoreError,
    Trust,
    probe,
)
from tests.store.files import (
    OTHER,
    WEIGHTS,
    allocated,
    edit,
    inode_of,
    link_count,
    mode_of,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
AtPoint = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def digest(store: Store) -> str:
    return store.put_stream([WEIGHTS]).digest


def blob_path(store: Store, digest: str) -> Path:
    return Path(store.volume.layout.blob(digest))


def needs_leases(directory: Path) -> None:
    if not probe(directory).lease:
        pytest.skip("no leases on this filesystem")


def come_to_write(path: Path) -> None:
    """Open a file for writing as far as a lease lets one: the waiting is left out."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return


@contextmanager
def written_by_another_process(path: Path) -> Iterator[None]:
    program = "import sys; file = open(sys.argv[1], 'r+b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        try:
            yield
        finally:
            child.communicate()
    assert child.returncode == 0


class TestReplaced:
    def test_the_file_becomes_a_link_of_the_blob(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = write(folder / "a.safetensors")
        freed = allocated(path)
        result = store.replace(path, digest)
        assert (result.outcome, result.freed) == ("replaced", freed)
        assert inode_of(path) == inode_of(blob_path(store, digest))
        assert path.read_bytes() == WEIGHTS
        assert mode_of(path) == 0o444
        assert os.listdir(folder) == ["a.safetensors"]

    def test_the_row_and_the_link_are_recorded(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.replace(write(folder / "a.safetensors"), digest)
        blob = store.get(digest)
        assert (blob.links, blob.trust) == (2, Trust.VERIFIED)
        assert [(link.path.name, link.kind) for link in store.links_of(blob)] == [
            ("a.safetensors", "hardlink")
        ]

    def test_an_owner_holds_what_is_replaced_for_it(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        store.replace(write(folder / "a.safetensors"), digest, owner=owner)
        assert [o.name for o, _ in store.holders_of(store.get(digest))] == ["models"]

    def test_another_name_of_the_file_keeps_it_so_nothing_is_freed(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = write(folder / "a.safetensors")
        os.link(path, folder / "b.safetensors")
        assert store.replace(path, digest).freed == 0
        assert link_count(folder / "b.safetensors") == 1
        assert mode_of(folder / "b.safetensors") == 0o644
        freed = allocated(folder / "b.safetensors")
        assert store.replace(folder / "b.safetensors", digest).freed == freed

    def test_a_file_written_just_now_is_replaced_under_a_lease(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        needs_leases(folder)
        path = write(folder / "a.safetensors", age=0)
        assert store.replace(path, digest).outcome == "replaced"

    def test_many_are_replaced_in_one_batch(self, store: Store, folder: Path, digest: str) -> None:
        paths = [write(folder / f"{n}.bin") for n in range(10)]
        bad = write(folder / "bad.bin", OTHER)
        found = {r.path: r for r in store.replace_many([(p, digest) for p in [*paths, bad]])}
        assert {found[path].outcome for path in paths} == {"replaced"}
        assert found[bad].outcome == "skipped"
        assert {inode_of(path) for path in paths} == {inode_of(blob_path(store, digest))}
        (batch,) = store.history()
        assert batch.changes == 10

    def test_a_relative_path_is_meant_from_here(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(folder / "a.safetensors")
        monkeypatch.chdir(folder)
        store.replace("a.safetensors", digest.upper())
        assert inode_of(path) == inode_of(blob_path(store, digest))

    @pytest.mark.parametrize("name", [b"\xff\xfe.safetensors", "模".encode() * 80 + b".bin"])
    def test_names_may_be_long_and_need_not_be_utf_8(
        self, store: Store, folder: Path, digest: str, name: bytes
    ) -> None:
        path = write(folder / os.fsdecode(name))
        before = snapshot(folder)
        assert store.replace(path, digest).outcome == "replaced"
        assert [done.note for done in store.plan_undo().execute()] == [""]
        assert snapshot(folder) == before

    @pytest.mark.usefixtures("no_exchange")
    def test_a_filesystem_without_exchange_gets_the_same_result(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = write(folder / "a.safetensors")
        freed = allocated(path)
        before = snapshot(folder)
        assert store.replace(path, digest).freed == freed
        assert inode_of(path) == inode_of(blob_path(store, digest))
        assert os.listdir(folder) == ["a.safetensors"]
        store.plan_undo().execute()
        assert snapshot(folder) == before

    @pytest.mark.usefixtures("no_leases")
    def test_a_filesystem_without_leases_gets_the_same_result_for_old_files(
        self, store: Store, folder: Path, digest: str, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a.safetensors")
        pass_time(10)
        assert store.replace(path, digest).outcome == "replaced"


class TestRefused:
    """What must not be replaced stays exactly as it is, with a reason."""

    def refused(self, store: Store, path: Path, digest: str, folder: Path) -> FileSkippedError:
        before = (snapshot(folder), inode_of(path))
        with pytest.raises(FileSkippedError) as caught:
            store.replace(path, digest)
        assert (snapshot(folder), inode_of(path)) == before
        assert store.links_of(store.get(digest)) == []
        assert store.history() == []
        assert store.get(digest).links == link_count(blob_path(store, digest))
        return caught.value

    def test_other_bytes(self, store: Store, folder: Path, digest: str) -> None:
        path = write(folder / "a.safetensors", WEIGHTS[:-1] + b"?")
        assert self.refused(store, path, digest, folder).reason == "different"

    def test_another_size(self, store: Store, folder: Path, digest: str) -> None:
        path = write(folder / "a.safetensors", OTHER)
        assert self.refused(store, path, digest, folder).reason == "different"

    @as_root
    @pytest.mark.parametrize("ids", [(12345, -1), (-1, 12345), (12345, 12345)])
    def test_another_owner_or_group(
        self, store: Store, folder: Path, digest: str, ids: tuple[int, int]
    ) -> None:
        """A link would show the file under the blob's owner."""
        path = write(folder / "a.safetensors")
        os.chown(path, *ids)
        reason = self.refused(store, path, digest, folder).reason
        assert reason in ("belongs to another user", "different group")

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o666])
    def test_other_permissions_than_to_write(
        self, store: Store, folder: Path, digest: str, mode: int
    ) -> None:
        path = write(folder / "a.safetensors", mode=mode)
        if mode == 0o666:
            assert store.replace(path, digest).outcome == "replaced"
        else:
            assert self.refused(store, path, digest, folder).reason == "different permissions"

    def test_extended_attributes(self, store: Store, folder: Path, digest: str) -> None:
        path = write(folder / "a.safetensors")
        try:
            os.setxattr(path, "user.note", b"mine")
        except (AttributeError, OSError):
            pytest.skip("no extended attributes on this filesystem")
        assert self.refused(store, path, digest, folder).reason == "has extended attributes"
        assert os.getxattr(path, "user.note") == b"mine"

    @pytest.mark.parametrize("name", ["a.incomplete", "a-partial", "a.tmp"])
    def test_unfinished_downloads(self, store: Store, folder: Path, digest: str, name: str) -> None:
        path = write(folder / name)
        assert self.refused(store, path, digest, folder).reason == "incomplete download"

    def test_a_symlink(self, store: Store, folder: Path, digest: str) -> None:
        write(folder / "real")
        (folder / "a.safetensors").symlink_to("real")
        path = folder / "a.safetensors"
        assert self.refused(store, path, digest, folder).reason == "not a regular file"

    def test_another_filesystem(self, store: Store, elsewhere: Path, digest: str) -> None:
        path = write(elsewhere / "a.safetensors")
        assert self.refused(store, path, digest, elsewhere).reason == "other filesystem"
        (result,) = store.replace_many([(path, digest)])
        assert isinstance(result.error, FileSkippedError)
        assert result.error.reason == "other filesystem"

    def test_a_file_that_another_process_writes(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        needs_leases(folder)
        path = write(folder / "a.safetensors")
        with written_by_another_process(path):
            assert isinstance(self.refused(store, path, digest, folder), FileBusyError)
        assert store.replace(path, digest).outcome == "replaced"

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_a_file_written_just_now(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = write(folder / "a.safetensors", age=0)
        assert self.refused(store, path, digest, folder).reason == "changed"

    def test_what_is_the_blob_already_is_present(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        result = store.replace(folder / "a.safetensors", digest)
        assert (result.outcome, result.freed) == ("present", 0)
        assert len(store.history()) == 1

    def test_what_is_not_there(self, store: Store, folder: Path, digest: str) -> None:
        with pytest.raises(FileNotFoundError):
            store.replace(folder / "missing", digest)

    def test_what_is_no_digest_or_no_blob(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        before = snapshot(folder)
        with pytest.raises(BadDigestError):
            store.replace(path, "zz")
        with pytest.raises(BlobNotFoundError):
            store.replace(path, "0" * 64)
        assert snapshot(folder) == before

    def test_a_damaged_blob(self, store: Store, folder: Path, digest: str) -> None:
        path = write(folder / "a.safetensors")
        before = snapshot(folder)
        edit(blob_path(store, digest))
        with pytest.raises(DamagedBlobError):
            store.replace(path, digest)
        assert snapshot(folder) == before


class TestRaced:
    """Somebody comes while the file is replaced: theirs counts, and nothing of it is lost."""

    def left_alone(self, store: Store, path: Path, digest: str, folder: Path) -> None:
        assert os.listdir(folder) == [path.name]
        assert inode_of(path) != inode_of(blob_path(store, digest))
        assert blob_path(store, digest).read_bytes() == WEIGHTS
        assert store.links_of(store.get(digest)) == []
        report = store.verify(full=True)
        assert not report.has_damage
        with Store(store.root) as again:
            assert again.history() == []
        assert os.listdir(folder) == [path.name]

    @pytest.mark.parametrize("point", ["replace: temporary linked", "replace: exchanged"])
    def test_a_writer_who_waits_for_our_lease_gets_the_file_back(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint, point: str
    ) -> None:
        """Its open() has resolved the old file already: that one must keep the name."""
        needs_leases(folder)
        path = write(folder / "a.safetensors")
        inode, descriptor = inode_of(path), os.open(path, os.O_RDONLY)
        try:
            old = Path(f"/proc/self/fd/{descriptor}")
            at_point(point, lambda: come_to_write(old))
            with pytest.raises(FileSkippedError):
                store.replace(path, digest)
        finally:
            os.close(descriptor)
        assert inode_of(path) == inode
        assert mode_of(path) == 0o644
        self.left_alone(store, path, digest, folder)

    @pytest.mark.parametrize("point", ["replace: journaled", "replace: temporary linked"])
    def test_a_file_renamed_over_it_before_the_exchange_stays(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint, point: str
    ) -> None:
        path = write(folder / "a.safetensors")
        at_point(point, lambda: os.replace(write(folder / "new", OTHER), path))
        with pytest.raises(FileSkippedError):
            store.replace(path, digest)
        assert path.read_bytes() == OTHER
        self.left_alone(store, path, digest, folder)

    def test_a_file_renamed_over_it_after_the_exchange_stays(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint
    ) -> None:
        path = write(folder / "a.safetensors")
        at_point("replace: exchanged", lambda: os.replace(write(folder / "new", OTHER), path))
        for result in store.replace_many([(path, digest)]):
            assert result.outcome in ("replaced", "skipped")
        assert path.read_bytes() == OTHER
        assert os.listdir(folder) == ["a.safetensors"]
        assert not store.verify(full=True).has_damage

    @pytest.mark.parametrize("point", ["replace: journaled", "replace: temporary linked"])
    def test_a_file_deleted_meanwhile_stays_deleted(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint, point: str
    ) -> None:
        path = write(folder / "a.safetensors")
        at_point(point, path.unlink)
        (result,) = store.replace_many([(path, digest)])
        assert result.outcome == "skipped"
        assert list(folder.iterdir()) == []
        assert not store.verify(full=True).has_damage

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_an_edit_before_the_exchange_is_seen_by_stat(
        self,
        store: Store,
        folder: Path,
        digest: str,
        at_point: AtPoint,
        pass_time: Callable[[float], None],
    ) -> None:
        path = write(folder / "a.safetensors")
        pass_time(10)
        at_point("replace: temporary linked", lambda: edit(path))
        with pytest.raises(FileChangedError):
            store.replace(path, digest)
        assert path.read_bytes() == b"EDITED" + WEIGHTS[6:]
        self.left_alone(store, path, digest, folder)

    @pytest.mark.usefixtures("no_exchange")
    def test_without_exchange_a_file_renamed_over_it_stays(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint
    ) -> None:
        path = write(folder / "a.safetensors")
        new = write(folder / "new", OTHER)
        at_point("replace: temporary linked", lambda: os.replace(new, path))
        with pytest.raises(FileSkippedError):
            store.replace(path, digest)
        assert path.read_bytes() == OTHER
        self.left_alone(store, path, digest, folder)

    def test_a_blob_that_is_edited_meanwhile_is_not_linked(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint
    ) -> None:
        path = write(folder / "a.safetensors")
        before = snapshot(folder)
        at_point("replace: journaled", lambda: edit(blob_path(store, digest)))
        with pytest.raises(StoreError):
            store.replace(path, digest)
        assert snapshot(folder) == before

    def test_a_blob_that_is_pruned_meanwhile_is_not_linked(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint
    ) -> None:
        path = write(folder / "a.safetensors")
        before = snapshot(folder)
        at_point("replace: journaled", lambda: store.plan_prune().execute())
        with pytest.raises(StoreError):
            store.replace(path, digest)
        assert snapshot(folder) == before

    def test_a_link_that_fails_leaves_the_file_alone(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(folder / "a.safetensors")
        before = snapshot(folder)

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", fail)
            with pytest.raises(OSError, match="Too many links"):
                store.replace(path, digest)
        assert snapshot(folder) == before
        self.left_alone(store, path, digest, folder)


def lead_elsewhere(folder: Path, private: Path) -> None:
    """Do what whoever can write above a folder can: put a symlink to another one in its place."""
    folder.rename(folder.with_name("away"))
    folder.symlink_to(private)


class TestFolderThatIsSwapped:
    @pytest.mark.parametrize(
        "point",
        ["replace: journaled", "replace: temporary linked", "replace: exchanged",
         "replace: old removed"],
    )  # fmt: skip
    def test_no_file_of_another_folder_is_touched(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint, point: str
    ) -> None:
        shared = folder / "shared"
        path = write(shared / "a.safetensors")
        private = write(folder / "private" / path.name, OTHER).parent
        before = snapshot(private)
        at_point(point, lambda: lead_elsewhere(shared, private))
        list(store.replace_many([(path, digest)]))
        assert snapshot(private) == before
        assert os.listdir(folder / "away") == [path.name]
        assert (folder / "away" / path.name).read_bytes() == WEIGHTS

    def test_what_is_not_to_be_followed_is_left_alone(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        private = write(folder / "private" / "a.safetensors").parent
        (folder / "shared").symlink_to(private)
        before = snapshot(private)
        path = folder / "shared" / "a.safetensors"
        (replaced,) = store.replace_many([(path, digest)], follow=False)
        (adopted,) = store.adopt_many([path], follow=False)
        assert (replaced.outcome, adopted.outcome) == ("skipped", "skipped")
        assert snapshot(private) == before
