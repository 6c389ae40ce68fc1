"""A file of the user's becomes a link of a blob with the same bytes, or stays exactly as it is."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import (
    BadDigestError,
    BlobNotFoundError,
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    StoreError,
)
from smartcache.store.records import Owner, Trust
from smartcache.store.store import Store
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    allocated,
    blob_path,
    come_to_write,
    edit,
    inode_of,
    link_count,
    mode_of,
    raising,
    read,
    row,
    snapshot,
    undo,
    write,
    written_by_another_process,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")


@pytest.fixture
def path(folder: Path) -> Path:
    """A file with the bytes of the blob."""
    return write(folder / "a.safetensors")


class TestReplaced:
    def test_the_file_becomes_a_link_of_the_blob(
        self, store: Store, path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner = Owner(kind="folder", name="models", path=path.parent)
        freed = allocated(path)
        monkeypatch.chdir(path.parent)
        result = store.replace(path.name, digest.upper(), owner=owner)
        assert (result.outcome, result.freed) == ("replaced", freed)
        assert inode_of(path) == inode_of(blob_path(store))
        assert (path.read_bytes(), mode_of(path)) == (WEIGHTS, 0o444)
        assert os.listdir(path.parent) == [path.name]
        blob = store.get(digest)
        assert (blob.links, blob.trust) == (2, Trust.VERIFIED)
        assert [(link.path, link.kind) for link in store.links_of(blob)] == [(path, "hardlink")]
        assert [o.name for o, _ in store.holders_of(blob)] == ["models"]

    def test_another_name_of_the_file_keeps_it_so_nothing_is_freed(
        self, store: Store, path: Path, digest: str
    ) -> None:
        second = path.with_name("b.safetensors")
        os.link(path, second)
        assert store.replace(path, digest).freed == 0
        assert (link_count(second), mode_of(second)) == (1, 0o644)
        freed = allocated(second)
        assert store.replace(second, digest).freed == freed

    @pytest.mark.usefixtures("with_leases")
    def test_a_file_written_just_now_is_replaced_under_a_lease(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        assert store.replace(write(folder / "a.bin", age=0), digest).outcome == "replaced"

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_old_files_are_replaced_and_those_written_just_now_are_not(
        self, store: Store, path: Path, digest: str, pass_time: Callable[[float], None]
    ) -> None:
        (result,) = store.replace_many([(path, digest)])
        assert isinstance(result.error, FileChangedError)
        assert inode_of(path) != inode_of(blob_path(store))
        pass_time(10)
        assert store.replace(path, digest).outcome == "replaced"

    def test_many_are_replaced_in_one_batch(self, store: Store, folder: Path, digest: str) -> None:
        """Names may be long and need not be UTF-8."""
        names = [*map(str, range(8)), os.fsdecode(b"\xff\xfe.safetensors"), "模" * 80 + ".bin"]
        paths = [write(folder / name) for name in names]
        bad = write(folder / "bad.bin", OTHER)
        before = snapshot(folder)
        found = {r.path: r for r in store.replace_many([(p, digest) for p in [*paths, bad]])}
        assert {found[path].outcome for path in paths} == {"replaced"}
        assert found[bad].outcome == "skipped"
        assert {inode_of(path) for path in paths} == {inode_of(blob_path(store))}
        assert [batch.changes for batch in store.history()] == [10]
        assert undo(store) == []
        assert snapshot(folder) == before

    @pytest.mark.usefixtures("no_exchange")
    def test_a_filesystem_without_exchange_gets_the_same_result(
        self, store: Store, path: Path, digest: str
    ) -> None:
        freed, before = allocated(path), snapshot(path.parent)
        assert store.replace(path, digest).freed == freed
        assert inode_of(path) == inode_of(blob_path(store))
        assert os.listdir(path.parent) == [path.name]
        undo(store)
        assert snapshot(path.parent) == before

    def test_what_is_the_blob_already_is_present(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        result = store.replace(folder / "a.safetensors", digest)
        assert (result.outcome, result.freed) == ("present", 0)
        assert len(store.history()) == 1


class TestRefused:
    """What must not be replaced stays exactly as it is, with a reason."""

    def refused(self, store: Store, path: Path, digest: str) -> FileSkippedError:
        before = (snapshot(path.parent), inode_of(path))
        with pytest.raises(FileSkippedError) as caught:
            store.replace(path, digest)
        assert (snapshot(path.parent), inode_of(path)) == before
        assert (store.links_of(store.get(digest)), store.history()) == ([], [])
        assert store.get(digest).links == link_count(blob_path(store))
        return caught.value

    def test_other_bytes_permissions_owners_and_unfinished_files(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """A link would show the file with the mode and under the owner of the blob."""
        reasons = {
            write(folder / "bytes", WEIGHTS[:-1] + b"?"): "different",
            write(folder / "size", OTHER): "different",
            write(folder / "a.incomplete"): "incomplete download",
            write(folder / "a.part"): "incomplete download",
            write(folder / "a.tmp"): "incomplete download",
            **{write(folder / oct(m), mode=m): "different permissions" for m in (0o600, 0o755)},
            folder / "link": "not a regular file",
        }
        (folder / "link").symlink_to(write(folder / "real"))
        if os.geteuid() == 0:
            for uid, gid in ((12345, -1), (-1, 12345), (12345, 12345)):
                path = write(folder / f"{uid} {gid}")
                os.chown(path, uid, gid)
                reasons[path] = "different group" if uid == -1 else "belongs to another user"
        for path, reason in reasons.items():
            with row(path.name):
                assert self.refused(store, path, digest).reason == reason
        path = write(folder / "all may write", mode=0o666)
        assert store.replace(path, digest).outcome == "replaced"

    def test_extended_attributes(self, store: Store, path: Path, digest: str) -> None:
        try:
            os.setxattr(path, "user.note", b"mine")
        except (AttributeError, OSError):
            pytest.skip("no extended attributes on this filesystem")
        assert self.refused(store, path, digest).reason == "has extended attributes"
        assert os.getxattr(path, "user.note") == b"mine"

    def test_another_filesystem(self, store: Store, elsewhere: Path, digest: str) -> None:
        path = write(elsewhere / "a.safetensors")
        assert self.refused(store, path, digest).reason == "other filesystem"
        (result,) = store.replace_many([(path, digest)])
        assert isinstance(result.error, FileSkippedError)

    @pytest.mark.usefixtures("with_leases")
    def test_a_file_that_another_process_writes(
        self, store: Store, path: Path, digest: str
    ) -> None:
        with written_by_another_process(path):
            assert isinstance(self.refused(store, path, digest), FileBusyError)
        assert store.replace(path, digest).outcome == "replaced"

    def test_what_is_not_there_no_digest_or_no_blob(
        self, store: Store, path: Path, digest: str
    ) -> None:
        before = snapshot(path.parent)
        with pytest.raises(FileNotFoundError):
            store.replace(path.with_name("missing"), digest)
        with pytest.raises(BadDigestError):
            store.replace(path, "zz")
        with pytest.raises(BlobNotFoundError):
            store.replace(path, "0" * 64)
        assert snapshot(path.parent) == before


class TestRaced:
    """Somebody comes while the file is replaced: theirs counts, and nothing of it is lost."""

    def left_alone(self, store: Store, path: Path, digest: str) -> None:
        assert os.listdir(path.parent) == [path.name]
        assert inode_of(path) != inode_of(blob_path(store))
        assert read(store) == WEIGHTS
        assert store.links_of(store.get(digest)) == []
        assert not store.verify(full=True).has_damage
        with Store(store.root) as again:
            assert again.history() == []
        assert os.listdir(path.parent) == [path.name]

    @pytest.mark.usefixtures("with_leases")
    @pytest.mark.parametrize("point", ["replace: temporary linked", "replace: exchanged"])
    def test_a_writer_who_waits_for_our_lease_gets_the_file_back(
        self, store: Store, path: Path, digest: str, at_point: AtPoint, point: str
    ) -> None:
        """Its open() has resolved the old file already: that one must keep the name."""
        inode, descriptor = inode_of(path), os.open(path, os.O_RDONLY)
        try:
            old = Path(f"/proc/self/fd/{descriptor}")
            at_point(point, lambda: come_to_write(old))
            with pytest.raises(FileSkippedError):
                store.replace(path, digest)
        finally:
            os.close(descriptor)
        assert (inode_of(path), mode_of(path)) == (inode, 0o644)
        self.left_alone(store, path, digest)

    @pytest.mark.parametrize("exchange", ["", "no_exchange"])
    def test_a_file_renamed_over_it_or_deleted_meanwhile_stays_so(
        self,
        store: Store,
        folder: Path,
        digest: str,
        at_point: AtPoint,
        exchange: str,
        request: pytest.FixtureRequest,
    ) -> None:
        if exchange:
            request.getfixturevalue(exchange)
        new, path = folder.with_name("new"), folder / "a.safetensors"
        for point in ("replace: journaled", "replace: temporary linked"):
            with row(point):
                write(path)
                at_point(point, lambda: os.replace(write(new, OTHER), path))
                with pytest.raises(FileSkippedError):
                    store.replace(path, digest)
                assert path.read_bytes() == OTHER
                self.left_alone(store, path, digest)
                at_point(point, path.unlink)
                (result,) = store.replace_many([(write(path), digest)])
                assert result.outcome == "skipped"
                assert list(folder.iterdir()) == []

    def test_a_file_renamed_over_it_after_the_exchange_stays(
        self, store: Store, path: Path, digest: str, at_point: AtPoint
    ) -> None:
        new = write(path.with_name("new"), OTHER)
        at_point("replace: exchanged", lambda: os.replace(new, path))
        (result,) = store.replace_many([(path, digest)])
        assert result.outcome in ("replaced", "skipped")
        assert path.read_bytes() == OTHER
        assert os.listdir(path.parent) == [path.name]
        assert not store.verify(full=True).has_damage

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_an_edit_before_the_exchange_is_seen_by_stat(
        self,
        store: Store,
        path: Path,
        digest: str,
        at_point: AtPoint,
        pass_time: Callable[[float], None],
    ) -> None:
        pass_time(10)
        at_point("replace: temporary linked", lambda: edit(path))
        with pytest.raises(FileChangedError):
            store.replace(path, digest)
        assert path.read_bytes() == b"EDITED" + WEIGHTS[6:]
        self.left_alone(store, path, digest)

    def test_a_blob_that_is_pruned_meanwhile_is_not_linked(
        self, store: Store, path: Path, digest: str, at_point: AtPoint
    ) -> None:
        before = snapshot(path.parent)
        at_point("replace: journaled", lambda: store.plan_prune().execute())
        with pytest.raises(StoreError):
            store.replace(path, digest)
        assert snapshot(path.parent) == before

    def test_a_link_that_fails_leaves_the_file_alone(
        self, store: Store, path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = snapshot(path.parent)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", raising(errno.EMLINK))
            with pytest.raises(FileSkippedError, match="too many links"):
                store.replace(path, digest)
        assert snapshot(path.parent) == before
        self.left_alone(store, path, digest)


class TestFolderThatIsSwapped:
    def test_no_file_of_another_folder_is_touched(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint
    ) -> None:
        """Whoever can write above a folder can put a symlink to another one in its place."""

        def lead_elsewhere(shared: Path, private: Path) -> None:
            shared.rename(shared.with_name("away"))
            shared.symlink_to(private)

        points = ("journaled", "temporary linked", "exchanged", "old removed")
        for point in points:
            with row(point):
                shared, private = folder / point / "shared", folder / point / "private"
                path = write(shared / "a.safetensors")
                write(private / path.name, OTHER)
                before = snapshot(private)
                at_point(f"replace: {point}", lambda s=shared, p=private: lead_elsewhere(s, p))  # type: ignore[misc]
                list(store.replace_many([(path, digest)]))
                assert snapshot(private) == before
                assert os.listdir(shared.with_name("away")) == [path.name]
                assert (shared.with_name("away") / path.name).read_bytes() == WEIGHTS

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
