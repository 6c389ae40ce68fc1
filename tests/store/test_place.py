from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.api import (
    KINDS,
    BadDigestError,
    BlobNotFoundError,
    CannotLinkError,
    DamagedBlobError,
    DestinationExistsError,
    NoSpaceError,
    Owner,
    Store,
    StoreError,
    Trust,
    load_settings,
    probe,
)
from tests.api import links_Kind as Kind
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    digest_of,
    edit,
    inode_of,
    link_count,
    mode_of,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
AtPoint = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def digest(store: Store) -> str:
    return store.put_stream([WEIGHTS]).digest


def blob_path(store: Store, digest: str) -> Path:
    return Path(store.volume.layout.blob(digest))


def working_kinds(folder: Path) -> list[Kind]:
    able = probe(folder)
    return [kind for kind in KINDS if kind != "reflink" or able.reflink]


def _links(store: Store, digest: str) -> list[tuple[object, ...]]:
    """The links of a blob; a row that was put back may have been made a second later."""
    return [(each.path, each.kind, each.inode) for each in store.links_of(store.get(digest))]


class TestLadder:
    @pytest.mark.parametrize("name", ["a.safetensors", "a.GGUF", "a.bin", "a.pt", "a.onnx"])
    def test_large_weights_share_their_bytes(
        self, store: Store, folder: Path, digest: str, name: str
    ) -> None:
        link = store.place(digest, folder / name)
        assert link.kind in ("hardlink", "reflink")
        assert (folder / name).read_bytes() == WEIGHTS

    @pytest.mark.parametrize("name", ["a.json", "a.txt", "a.yaml", "a.py", "a.md", "a", "a.jinja"])
    def test_what_programs_edit_in_place_gets_bytes_of_its_own(
        self, store: Store, folder: Path, digest: str, name: str
    ) -> None:
        link = store.place(digest, folder / name)
        assert link.kind in ("copy", "reflink")
        edit(folder / name)
        assert blob_path(store, digest).read_bytes() == WEIGHTS

    def test_small_weights_are_copied(self, store: Store, folder: Path) -> None:
        small = store.put_stream([bytes(65_535)]).digest
        assert store.place(small, folder / "a.safetensors").kind in ("copy", "reflink")
        enough = store.put_stream([bytes(65_536)]).digest
        assert store.place(enough, folder / "b.safetensors").kind in ("hardlink", "reflink")

    def test_whole_says_that_a_file_is_weights_whatever_its_name_and_size(
        self, store: Store, folder: Path
    ) -> None:
        small = store.put_stream([b"{}"]).digest
        link = store.place(small, folder / "abc.json", whole=True)
        assert link.kind in ("hardlink", "reflink")
        if link.kind == "hardlink":
            assert inode_of(folder / "abc.json") == inode_of(blob_path(store, small))

    def test_users_who_want_writable_files_never_get_hard_links(
        self, tmp_path: Path, folder: Path
    ) -> None:
        settings = load_settings(home=tmp_path / "writable", keep_writable=True)
        with Store(settings=settings) as store:
            blob = store.put_stream([WEIGHTS])
            link = store.place(blob.digest, folder / "a.safetensors")
            assert link.kind in ("copy", "reflink")
            assert mode_of(folder / "a.safetensors") & 0o200
            edit(folder / "a.safetensors")
            assert blob_path(store, blob.digest).read_bytes() == WEIGHTS

    def test_the_size_from_which_is_linked_can_be_set(self, tmp_path: Path, folder: Path) -> None:
        settings = load_settings(home=tmp_path / "other", link_min_size=10)
        with Store(settings=settings) as store:
            blob = store.put_stream([b"0123456789"])
            assert store.place(blob.digest, folder / "a.bin").kind in ("hardlink", "reflink")

    def test_another_filesystem_gets_a_copy(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        link = store.place(digest, elsewhere / "a.safetensors")
        assert link.kind == "copy"
        assert (elsewhere / "a.safetensors").read_bytes() == WEIGHTS

    def test_a_kind_that_does_not_work_there_is_an_error_that_leaves_nothing(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        for kind in ("hardlink", "reflink"):
            with pytest.raises(CannotLinkError):
                store.place(digest, elsewhere / "a.safetensors", kind=kind)
        assert list(elsewhere.iterdir()) == []
        assert store.links_of(store.get(digest)) == []
        assert store.history() == []

    @pytest.mark.parametrize(
        "code", [errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS]
    )
    def test_a_filesystem_that_refuses_hard_links_gets_the_next_kind(
        self,
        store: Store,
        folder: Path,
        digest: str,
        monkeypatch: pytest.MonkeyPatch,
        code: int,
    ) -> None:
        """EPERM is what protected_hardlinks says of another user's file."""
        real = os.link

        def refuse(source: str | Path, target: str | Path, **more: bool) -> None:
            if str(source) == str(blob_path(store, digest)):
                raise OSError(code, os.strerror(code))
            real(source, target, **more)

        monkeypatch.setattr(os, "link", refuse)
        link = store.place(digest, folder / "a.safetensors")
        assert link.kind in ("copy", "reflink")
        assert (folder / "a.safetensors").read_bytes() == WEIGHTS
        with pytest.raises(CannotLinkError):
            store.place(digest, folder / "b.safetensors", kind="hardlink")
        assert os.listdir(folder) == ["a.safetensors"]

    def test_a_copy_is_verified_while_it_is_made_and_tells_its_progress(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        watch = Watch()
        store.place(digest, folder / "a.json", kind="copy", progress=watch)
        assert watch.done == watch.total == len(WEIGHTS)


class TestKinds:
    def test_a_hard_link_is_the_blob_itself(self, store: Store, folder: Path, digest: str) -> None:
        link = store.place(digest, folder / "a.json", kind="hardlink")
        assert link.kind == "hardlink"
        assert inode_of(folder / "a.json") == inode_of(blob_path(store, digest)) == link.inode
        blob = store.get(digest)
        assert (blob.links, blob.trust) == (2, Trust.VERIFIED)
        assert not blob.is_held_only_by_smartcache

    def test_a_copy_is_the_users_own(self, store: Store, folder: Path, digest: str) -> None:
        mask = os.umask(0o027)
        try:
            link = store.place(digest, folder / "a.safetensors", kind="copy")
        finally:
            os.umask(mask)
        assert link.kind == "copy"
        assert mode_of(folder / "a.safetensors") == 0o640
        assert link_count(folder / "a.safetensors") == 1
        assert os.stat(folder / "a.safetensors").st_mtime_ns == store.get(digest).key.mtime_ns
        assert store.get(digest).is_held_only_by_smartcache

    def test_a_symlink_points_at_the_blob(self, store: Store, folder: Path, digest: str) -> None:
        link = store.place(digest, folder / "a.safetensors", kind="symlink")
        assert link.kind == "symlink"
        assert os.readlink(folder / "a.safetensors") == str(blob_path(store, digest))
        assert link.inode == inode_of(folder / "a.safetensors")

    def test_a_reflink_has_bytes_of_its_own_or_is_refused(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = folder / "a.safetensors"
        if probe(folder).reflink:
            assert store.place(digest, path, kind="reflink").kind == "reflink"
            edit(path)
            assert blob_path(store, digest).read_bytes() == WEIGHTS
        else:
            with pytest.raises(CannotLinkError):
                store.place(digest, path, kind="reflink")
            assert list(folder.iterdir()) == []

    def test_every_link_is_recorded_with_its_kind(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        kinds = [kind for kind in working_kinds(folder) if kind != "auto"]
        for kind in kinds:
            store.place(digest, folder / f"{kind}.bin", kind=kind)
        found = {link.path.stem: link.kind for link in store.links_of(store.get(digest))}
        assert found == {kind: kind for kind in kinds}

    def test_an_owner_holds_what_is_placed_for_it(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        store.place(digest, folder / "a.safetensors", owner=owner)
        assert [o.name for o, _ in store.holders_of(store.get(digest))] == ["models"]

    def test_a_relative_path_is_meant_from_here(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        assert store.place(digest, "a.safetensors").path == folder / "a.safetensors"

    @pytest.mark.parametrize("name", [b"\xff\xfe.safetensors", "模".encode() * 80 + b".bin"])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_names_may_be_long_and_need_not_be_utf_8(
        self, store: Store, folder: Path, digest: str, name: bytes, overwrite: bool
    ) -> None:
        path = folder / os.fsdecode(name)
        for kind in working_kinds(folder):
            if overwrite:
                write(path, OTHER)
            link = store.place(digest, path, kind=kind, overwrite=overwrite)
            assert link.path == path
            assert path.read_bytes() == WEIGHTS
            assert os.listdir(folder) == [path.name]
            path.unlink()

    @pytest.mark.parametrize("upper", [False, True])
    def test_digests_are_taken_in_either_case(
        self, store: Store, folder: Path, digest: str, upper: bool
    ) -> None:
        store.place(digest.upper() if upper else digest, folder / "a.safetensors")
        assert (folder / "a.safetensors").read_bytes() == WEIGHTS

    def test_what_is_no_digest_or_no_blob_is_refused(self, store: Store, folder: Path) -> None:
        with pytest.raises(BadDigestError):
            store.place("zz", folder / "a")
        with pytest.raises(BlobNotFoundError):
            store.place("0" * 64, folder / "a")
        assert list(folder.iterdir()) == []


class TestDestination:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_missing_directory_is_not_made(
        self, store: Store, folder: Path, digest: str, kind: Kind
    ) -> None:
        with pytest.raises(FileNotFoundError):
            store.place(digest, folder / "missing" / "a.safetensors", kind=kind)
        assert list(folder.iterdir()) == []
        assert store.links_of(store.get(digest)) == []
        assert store.history() == []

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("there", ["file", "directory", "symlink", "dangling"])
    def test_what_is_there_is_not_overwritten_unasked(
        self, store: Store, folder: Path, digest: str, kind: Kind, there: str
    ) -> None:
        path = folder / "a.safetensors"
        self.put_there(path, there)
        before = snapshot(folder)
        with pytest.raises(DestinationExistsError):
            store.place(digest, path, kind=kind)
        assert snapshot(folder) == before
        assert store.links_of(store.get(digest)) == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_file_that_appears_meanwhile_is_not_overwritten(
        self, store: Store, folder: Path, digest: str, kind: Kind, at_point: AtPoint
    ) -> None:
        path = folder / "a.safetensors"
        at_point("place: journaled", lambda: write(path, OTHER))
        with pytest.raises((DestinationExistsError, CannotLinkError)):
            store.place(digest, path, kind=kind)
        assert path.read_bytes() == OTHER
        assert os.listdir(folder) == ["a.safetensors"]
        assert store.links_of(store.get(digest)) == []

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("there", ["file", "symlink", "dangling"])
    def test_overwriting_replaces_the_name_and_nothing_else(
        self, store: Store, folder: Path, digest: str, kind: Kind, there: str
    ) -> None:
        """A second name of the old file and the file behind a symlink keep their bytes."""
        if kind not in working_kinds(folder):
            pytest.skip("no reflinks on this filesystem")
        path = folder / "a.safetensors"
        self.put_there(path, there)
        if there == "file":
            os.link(path, folder / "second")
        before = snapshot(folder)
        before.pop(path.name)
        store.place(digest, path, kind=kind, overwrite=True)
        assert path.read_bytes() == WEIGHTS
        after = snapshot(folder)
        after.pop(path.name)
        if there == "file":
            before["second"] = ("file", "second", *before["second"][2:])
        assert after == before

    @pytest.mark.parametrize("kind", KINDS)
    def test_overwriting_a_link_of_another_blob_leaves_that_blob_whole(
        self, store: Store, folder: Path, digest: str, kind: Kind
    ) -> None:
        if kind not in working_kinds(folder):
            pytest.skip("no reflinks on this filesystem")
        other = store.put_stream([OTHER]).digest
        for there in ("hardlink", "symlink"):
            path = folder / f"{there}.safetensors"
            store.place(other, path, kind=there)
            store.place(digest, path, kind=kind, overwrite=True)
            assert path.read_bytes() == WEIGHTS
            assert blob_path(store, other).read_bytes() == OTHER
            assert [link.path for link in store.links_of(store.get(digest))].count(path) == 1
        assert store.links_of(store.get(other)) == []
        assert not store.verify(full=True).has_damage

    @pytest.mark.parametrize("kind", ["copy", "symlink"])
    def test_overwriting_a_hard_link_of_the_same_blob_never_writes_through_it(
        self, store: Store, folder: Path, digest: str, kind: Kind
    ) -> None:
        path = folder / "a.safetensors"
        store.place(digest, path, kind="hardlink")
        store.place(digest, path, kind=kind, overwrite=True)
        assert path.read_bytes() == WEIGHTS
        assert inode_of(path) != inode_of(blob_path(store, digest))
        assert os.listdir(folder) == ["a.safetensors"]
        assert not store.verify(full=True).has_damage

    def test_a_directory_is_never_overwritten(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = folder / "a.safetensors"
        path.mkdir()
        for kind in KINDS:
            with pytest.raises(DestinationExistsError):
                store.place(digest, path, kind=kind, overwrite=True)
        assert list(path.iterdir()) == []

    @pytest.mark.parametrize("kind", ["hardlink", "symlink"])
    def test_a_link_of_the_blob_that_is_there_already_is_enough(
        self, store: Store, folder: Path, digest: str, kind: Kind
    ) -> None:
        path = folder / "a.safetensors"
        first = store.place(digest, path, kind=kind)
        inode = inode_of(path)
        for again in (kind, "auto"):
            assert store.place(digest, path, kind=again).kind == first.kind
            assert store.place(digest, path, kind=again, overwrite=True).kind == first.kind
        assert inode_of(path) == inode
        assert len(store.history()) == 1

    def test_an_adopted_file_is_a_link_already(self, store: Store, folder: Path) -> None:
        path = write(folder / "a.safetensors")
        blob = store.adopt(path)
        assert store.place(blob.digest, path).kind == "hardlink"
        assert len(store.history()) == 1

    @pytest.mark.parametrize("kind", ["hardlink", "symlink", "copy"])
    @pytest.mark.parametrize("there", ["file", "hardlink", "symlink", "copy"])
    def test_a_rename_that_fails_leaves_everything_as_it_was(
        self,
        store: Store,
        folder: Path,
        digest: str,
        request: pytest.FixtureRequest,
        kind: Kind,
        there: str,
    ) -> None:
        path = folder / "a.safetensors"
        other = store.put_stream([OTHER]).digest
        if there == "file":
            write(path, OTHER)
        else:
            store.place(other, path, kind=there)  # type: ignore[arg-type]
        before = (snapshot(folder), _links(store, other))
        failing: pytest.MonkeyPatch = request.getfixturevalue("failing_renames")
        with pytest.raises(OSError, match="Input/output error"):
            store.place(digest, path, kind=kind, overwrite=True)
        failing.undo()
        assert (snapshot(folder), _links(store, other)) == before
        assert store.links_of(store.get(digest)) == []

    def test_a_full_disk_leaves_nothing(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        real = os.write
        with monkeypatch.context() as patch:
            large = len(WEIGHTS) // 2
            patch.setattr(os, "write", lambda fd, d: fail() if len(d) > large else real(fd, d))
            with pytest.raises(NoSpaceError):
                store.place(digest, folder / "a.json", kind="copy")
        assert list(folder.iterdir()) == []
        assert store.history() == []

    def put_there(self, path: Path, what: str) -> None:
        if what == "file":
            write(path, OTHER)
        elif what == "directory":
            path.mkdir()
        elif what == "symlink":
            path.symlink_to(write(path.with_name("target"), OTHER))
        else:
            path.symlink_to("nowhere")


class TestNeverWrongBytes:
    """`place` hands out no blob whose stat cannot vouch for it without hashing it again."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("how", ["edited", "truncated", "time set back"])
    def test_a_damaged_blob_is_not_placed(
        self, store: Store, folder: Path, digest: str, kind: Kind, how: str
    ) -> None:
        path = blob_path(store, digest)
        st = path.stat()
        if how == "truncated":
            path.chmod(0o644)
            os.truncate(path, 10)
        else:
            edit(path)
        if how == "time set back":
            os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        with pytest.raises(DamagedBlobError):
            store.place(digest, folder / "a.safetensors", kind=kind)
        assert list(folder.iterdir()) == []
        assert not path.exists()

    def test_an_edit_through_a_link_is_not_laundered_by_our_next_link(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """Our own link changes the change time: the row must not take the edit's for it."""
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        st = (folder / "a.safetensors").stat()
        edit(folder / "a.safetensors")
        os.utime(folder / "a.safetensors", ns=(st.st_atime_ns, st.st_mtime_ns))
        with pytest.raises(DamagedBlobError):
            store.place(digest, folder / "b.safetensors", kind="hardlink")
        assert os.listdir(folder) == ["a.safetensors"]

    @pytest.mark.parametrize("kind", ["hardlink", "copy"])
    def test_an_edit_at_the_last_moment_is_not_placed(
        self, store: Store, folder: Path, digest: str, kind: Kind, at_point: AtPoint
    ) -> None:
        at_point("place: journaled", lambda: edit(blob_path(store, digest)))
        with pytest.raises(DamagedBlobError):
            store.place(digest, folder / "a.safetensors", kind=kind)
        assert list(folder.iterdir()) == []

    def test_an_edit_right_after_our_link_is_found_at_the_next_use(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint
    ) -> None:
        at_point("place: linked", lambda: edit(blob_path(store, digest)))
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        with pytest.raises(DamagedBlobError):
            store.place(digest, folder / "b.safetensors", kind="hardlink")

    def test_a_blob_that_vanished_is_not_found(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        blob_path(store, digest).unlink()
        for kind in KINDS:
            with pytest.raises(BlobNotFoundError):
                store.place(digest, folder / "a.safetensors", kind=kind)
        assert list(folder.iterdir()) == []

    @pytest.mark.parametrize("kind", ["hardlink", "symlink", "copy"])
    @pytest.mark.parametrize("point", ["place: journaled", "place: filled"])
    def test_a_blob_that_is_pruned_meanwhile_is_not_found_and_leaves_nothing(
        self,
        store: Store,
        folder: Path,
        digest: str,
        kind: Kind,
        point: str,
        at_point: AtPoint,
    ) -> None:
        if point == "place: filled" and kind != "copy":
            pytest.skip("only copies are filled")
        at_point(point, lambda: store.plan_prune().execute())
        with pytest.raises(BlobNotFoundError):
            store.place(digest, folder / "a.safetensors", kind=kind)
        assert list(folder.iterdir()) == []
        assert store.history() == []

    def test_a_symlink_keeps_its_blob_from_being_pruned(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="symlink")
        assert store.plan_prune().victims == ()
        (folder / "a.safetensors").unlink()
        assert [victim.digest for victim in store.plan_prune().victims] == [digest]


class TestTooManyLinks:
    def test_a_full_inode_is_left_to_its_links_and_the_blob_gets_a_new_one(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        full = inode_of(blob_path(store, digest))
        real = os.link

        def limited(source: str | Path, target: str | Path) -> None:
            if inode_of(source) == full:
                raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
            real(source, target)

        monkeypatch.setattr(os, "link", limited)
        store.place(digest, folder / "b.safetensors", kind="hardlink")
        assert inode_of(folder / "a.safetensors") == full
        assert inode_of(folder / "b.safetensors") == inode_of(blob_path(store, digest)) != full
        for name in ("a.safetensors", "b.safetensors"):
            assert (folder / name).read_bytes() == WEIGHTS
            assert mode_of(folder / name) == 0o444
        report = store.verify(full=True)
        assert not report.has_damage
        assert report.dead_links == []
        assert {done.note for done in store.plan_undo().execute()} == {""}
        assert list(folder.iterdir()) == []

    @pytest.mark.soak
    def test_the_filesystem_itself_says_when_it_is_enough(self, store: Store, folder: Path) -> None:
        digest = store.put_stream([b"tiny"]).digest
        paths = [folder / f"{number}.bin" for number in range(65_002)]
        with store.batch("many links"):
            for path in paths:
                store.place(digest, path, kind="hardlink")
        assert all(path.read_bytes() == b"tiny" for path in paths)
        if len({inode_of(path) for path in paths}) == 1:
            pytest.skip("this filesystem allows more links")
        assert not store.verify(full=True).has_damage


class TestVolumes:
    def test_a_blob_of_another_volume_is_found_opened_and_copied(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        other = store.add_volume(elsewhere / ".smartcache")
        digest = other.put_stream([WEIGHTS], algorithms=["sha256"]).digest
        with store.open(digest) as file:
            assert file.read() == WEIGHTS
        found = store.resolve(digest)
        assert store.find("blake3", digest) == found
        assert store.place(digest, folder / "a.safetensors").kind == "copy"
        assert store.path_of(digest).is_relative_to(elsewhere)

    def test_the_volume_of_the_destination_is_preferred(
        self, store: Store, folder: Path, elsewhere: Path, digest: str
    ) -> None:
        other = store.add_volume(elsewhere / ".smartcache")
        other.put_stream([WEIGHTS])
        for where, volume in ((folder, store), (elsewhere, other)):
            link = store.place(digest, where / "a.safetensors", kind="hardlink")
            assert inode_of(link.path) == inode_of(blob_path(volume, digest))

    def test_a_file_is_adopted_by_the_volume_of_its_filesystem(
        self, store: Store, elsewhere: Path
    ) -> None:
        other = store.add_volume(elsewhere / ".smartcache")
        blob = store.adopt(write(elsewhere / "a.safetensors"))
        assert inode_of(blob_path(other, blob.digest)) == inode_of(elsewhere / "a.safetensors")
        assert list(store.blobs()) == []
        (result,) = store.volume_of(elsewhere).replace_many(
            [(write(elsewhere / "b.safetensors"), blob.digest)]
        )
        assert result.outcome == "replaced"

    def test_a_reopened_store_knows_its_neighbours(self, store: Store, elsewhere: Path) -> None:
        store.add_volume(elsewhere / ".smartcache").put_stream([WEIGHTS])
        with Store(store.root) as again:
            assert again.find("blake3", digest_of(WEIGHTS)) is not None
            assert [s.root for s in again.stores()] == [store.root, elsewhere / ".smartcache"]

    def test_a_volume_that_is_not_mounted_is_left_out(self, store: Store, elsewhere: Path) -> None:
        with store.add_volume(elsewhere / ".smartcache") as other:
            other.put_stream([WEIGHTS])
        os.rename(elsewhere / ".smartcache", elsewhere / "unplugged")
        with Store(store.root) as again:
            assert again.find("blake3", digest_of(WEIGHTS)) is None
            assert [s.root for s in again.stores()] == [store.root]
        assert not (elsewhere / ".smartcache").exists()

    def test_a_second_volume_on_the_same_filesystem_is_refused(
        self, store: Store, folder: Path
    ) -> None:
        with pytest.raises(StoreError):
            store.add_volume(folder / ".smartcache")
        assert list(folder.iterdir()) == []

    def test_settings_reach_the_neighbours(self, tmp_path: Path, elsewhere: Path) -> None:
        settings = replace(load_settings(home=tmp_path / "s"), keep_writable=True)
        with Store(settings=settings) as store:
            assert store.add_volume(elsewhere / "v").settings.keep_writable
