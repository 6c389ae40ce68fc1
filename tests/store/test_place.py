"""A blob gets a name in the user's folder: which kind of link, where, and never wrong bytes."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smartcache.config import load_settings
from smartcache.errors import (
    BadDigestError,
    BlobNotFoundError,
    CannotLinkError,
    DestinationExistsError,
    NoSpaceError,
    StoreError,
)
from smartcache.store import KINDS, Kind
from smartcache.store.records import Owner, Trust
from smartcache.store.store import Store
from smartcache.system.filesystems import probe
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    blob_path,
    digest_of,
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
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
SHARED, OWN = ("hardlink", "reflink"), ("copy", "reflink")


def working_kinds(folder: Path) -> list[Kind]:
    able = probe(folder)
    return [kind for kind in KINDS if kind != "reflink" or able.reflink]


def linked(store: Store, digest: str) -> list[tuple[object, ...]]:
    """The links of a blob; a row that was put back may have been made a second later."""
    return [(each.path, each.kind, each.inode) for each in store.links_of(store.get(digest))]


class TestLadder:
    def test_large_weights_share_their_bytes_and_what_programs_edit_does_not(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        for suffix in (".safetensors", ".GGUF", ".bin", ".pt", ".onnx"):
            link = store.place(digest, folder / f"a{suffix}")
            assert link.kind in SHARED, suffix
            assert link.path.read_bytes() == WEIGHTS
        for suffix in (".json", ".txt", ".yaml", ".py", ".md", "", ".jinja"):
            link = store.place(digest, folder / f"a{suffix}")
            assert link.kind in OWN, suffix
            edit(link.path)
        assert read(store) == WEIGHTS

    def test_small_weights_are_copied_unless_they_are_said_to_be_whole(
        self, store: Store, folder: Path
    ) -> None:
        for size, kinds in ((65_535, OWN), (65_536, SHARED)):
            small = store.put_stream([bytes(size)]).digest
            assert store.place(small, folder / f"{size}.safetensors").kind in kinds
        tiny = store.put_stream([b"{}"]).digest
        assert store.place(tiny, folder / "abc.json", whole=True).kind in SHARED

    def test_settings_choose_the_size_and_files_that_stay_writable(
        self, tmp_path: Path, folder: Path
    ) -> None:
        settings = load_settings(home=tmp_path / "other", link_min_size=10)
        with Store(settings=settings) as store:
            small = store.put_stream([b"0123456789"]).digest
            assert store.place(small, folder / "a.bin").kind in SHARED
        with Store(settings=replace(settings, keep_writable=True)) as store:
            store.put_stream([WEIGHTS])
            link = store.place(digest_of(WEIGHTS), folder / "a.safetensors")
            assert link.kind in OWN
            assert mode_of(link.path) & 0o200
            edit(link.path)
            assert read(store) == WEIGHTS

    def test_another_filesystem_gets_a_copy_and_no_other_kind(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        for kind in ("hardlink", "reflink"):
            with row(kind), pytest.raises(CannotLinkError):
                store.place(digest, elsewhere / "a.safetensors", kind=kind)
        assert list(elsewhere.iterdir()) == []
        assert (linked(store, digest), store.history()) == ([], [])
        assert store.place(digest, elsewhere / "a.safetensors").kind == "copy"
        assert (elsewhere / "a.safetensors").read_bytes() == WEIGHTS

    def test_a_filesystem_that_refuses_hard_links_gets_the_next_kind(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """EPERM is what protected_hardlinks says of another user's file."""
        real = os.link
        refusal = 0

        def refuse(source: str | Path, target: str | Path, **more: bool) -> None:
            if str(source) == str(blob_path(store)):
                raise OSError(refusal, os.strerror(refusal))
            real(source, target, **more)

        monkeypatch.setattr(os, "link", refuse)
        for refusal in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS):
            path = folder / f"{errno.errorcode[refusal]}.safetensors"
            with row(path.name):
                with pytest.raises(CannotLinkError):
                    store.place(digest, path, kind="hardlink")
                assert not path.exists()
                assert store.place(digest, path).kind in OWN
                assert path.read_bytes() == WEIGHTS
        assert len(os.listdir(folder)) == 5

    def test_a_blob_with_as_many_links_as_there_can_be_is_placed_all_the_same(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        full, real = inode_of(blob_path(store)), os.link

        def limited(source: str | Path, target: str | Path, **more: bool) -> None:
            if inode_of(source) == full:
                raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
            real(source, target, **more)

        monkeypatch.setattr(os, "link", limited)
        store.place(digest, folder / "b.safetensors")
        assert inode_of(folder / "a.safetensors") == full != inode_of(folder / "b.safetensors")
        for name in ("a.safetensors", "b.safetensors"):
            assert (folder / name).read_bytes() == WEIGHTS
        report = store.verify(full=True)
        assert (report.has_damage, report.dead_links) == (False, [])
        assert undo(store) == []
        assert list(folder.iterdir()) == []


class TestKinds:
    def test_a_hard_link_is_the_blob_itself(self, store: Store, folder: Path, digest: str) -> None:
        link = store.place(digest, folder / "a.json", kind="hardlink")
        assert inode_of(link.path) == inode_of(blob_path(store)) == link.inode
        blob = store.get(digest)
        assert (blob.links, blob.trust) == (2, Trust.VERIFIED)
        assert not blob.is_held_only_by_smartcache

    def test_a_copy_is_the_users_own_and_tells_its_progress(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        watch = Watch()
        mask = os.umask(0o027)
        try:
            link = store.place(digest, folder / "a.bin", kind="copy", progress=watch)
        finally:
            os.umask(mask)
        assert watch.done == watch.total == len(WEIGHTS)
        assert (mode_of(link.path), link_count(link.path)) == (0o640, 1)
        assert os.stat(link.path).st_mtime_ns == store.get(digest).key.mtime_ns
        assert store.get(digest).is_held_only_by_smartcache

    def test_a_reflink_has_bytes_of_its_own_or_is_refused(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = folder / "a.safetensors"
        if probe(folder).reflink:
            assert store.place(digest, path, kind="reflink").kind == "reflink"
            edit(path)
            assert read(store) == WEIGHTS
        else:
            with pytest.raises(CannotLinkError):
                store.place(digest, path, kind="reflink")
            assert list(folder.iterdir()) == []

    def test_every_link_is_recorded_with_its_kind_for_its_owner(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        kinds = [kind for kind in working_kinds(folder) if kind != "auto"]
        monkeypatch.chdir(folder)
        for kind in kinds:
            store.place(digest.upper(), f"{kind}.bin", kind=kind, owner=owner)
        links = store.links_of(store.get(digest))
        assert {link.path: link.kind for link in links} == {folder / f"{k}.bin": k for k in kinds}
        assert [o.name for o, _ in store.holders_of(store.get(digest))] == ["models"]

    def test_names_may_be_long_and_need_not_be_utf_8(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        for name in (b"\xff\xfe.safetensors", "模".encode() * 80 + b".bin"):
            path = folder / os.fsdecode(name)
            for kind in working_kinds(folder):
                for overwrite in (False, True):
                    with row(kind, overwrite):
                        if overwrite:
                            write(path, OTHER)
                        link = store.place(digest, path, kind=kind, overwrite=overwrite)
                        assert link.path == path
                        assert path.read_bytes() == WEIGHTS
                        assert os.listdir(folder) == [path.name]
                        path.unlink()

    def test_what_is_no_digest_no_blob_or_a_blob_that_vanished_is_refused(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        blob_path(store).unlink()
        for kind in KINDS:
            for text, error in (("zz", BadDigestError), ("0" * 64, BlobNotFoundError),
                                (digest, BlobNotFoundError)):  # fmt: skip
                with row(kind, text), pytest.raises(error):
                    store.place(text, folder / "a", kind=kind)
        assert list(folder.iterdir()) == []


def put_there(path: Path, what: str) -> None:
    if what == "file":
        write(path, OTHER)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to(write(path.with_name("target"), OTHER) if what == "symlink" else "nowhere")


class TestDestination:
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_there_is_not_overwritten_unasked_nor_a_directory_made(
        self, store: Store, folder: Path, digest: str, kind: Kind
    ) -> None:
        with pytest.raises(FileNotFoundError):
            store.place(digest, folder / "missing" / "a.safetensors", kind=kind)
        for there in ("file", "directory", "symlink", "dangling"):
            put_there(folder / there, there)
        before = snapshot(folder)
        for there in ("file", "directory", "symlink", "dangling"):
            with row(there), pytest.raises(DestinationExistsError):
                store.place(digest, folder / there, kind=kind)
        with pytest.raises(DestinationExistsError):
            store.place(digest, folder / "directory", kind=kind, overwrite=True)
        assert snapshot(folder) == before
        assert (linked(store, digest), store.history()) == ([], [])

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
        assert linked(store, digest) == []

    def test_overwriting_replaces_the_name_and_nothing_else(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """A second name of the old file and the file behind a symlink keep their bytes."""
        for kind in working_kinds(folder):
            for there in ("file", "symlink", "dangling"):
                with row(kind, there):
                    place = folder / f"{kind} {there}"
                    path = place / "a.safetensors"
                    place.mkdir()
                    put_there(path, there)
                    if there == "file":
                        os.link(path, place / "second")
                    store.place(digest, path, kind=kind, overwrite=True)
                    assert path.read_bytes() == WEIGHTS
                    others = {each for each in place.iterdir() if each != path}
                    assert len(others) == (0 if there == "dangling" else 1)
                    for other in others:
                        assert (other.read_bytes(), mode_of(other)) == (OTHER, 0o644)

    def test_overwriting_a_link_never_writes_through_it(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        other = store.put_stream([OTHER]).digest
        for kind in working_kinds(folder):
            for held, there in ((other, "hardlink"), (other, "copy"), (digest, "hardlink")):
                with row(kind, there):
                    path = folder / f"{kind} {there} {held[:4]}.safetensors"
                    store.place(held, path, kind=there)  # type: ignore[arg-type]
                    store.place(digest, path, kind=kind, overwrite=True)
                    assert path.read_bytes() == WEIGHTS
                    if kind == "copy":
                        assert inode_of(path) != inode_of(blob_path(store))
                    assert [each[0] for each in linked(store, digest)].count(path) == 1
        assert read(store, other) == OTHER
        assert linked(store, other) == []
        assert not store.verify(full=True).has_damage

    def test_a_link_of_the_blob_that_is_there_already_is_enough(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        adopted = write(folder / "adopted.safetensors")
        store.replace(adopted, digest)
        assert store.place(digest, adopted).kind == "hardlink"
        for kind in ("hardlink", "copy"):
            path = folder / f"{kind}.safetensors"
            first = store.place(digest, path, kind=kind)
            for again in (kind, "auto"):
                for overwrite in (False, True):
                    found = store.place(digest, path, kind=again, overwrite=overwrite)
                    assert (found.kind, found.inode) == (first.kind, first.inode), kind
        assert len(store.history()) == 3

    def test_a_rename_that_fails_leaves_everything_as_it_was(
        self, store: Store, folder: Path, digest: str, request: pytest.FixtureRequest
    ) -> None:
        kinds: tuple[Kind, ...] = ("hardlink", "copy")
        other = store.put_stream([OTHER]).digest
        write(folder / "file", OTHER)
        for there in kinds:
            store.place(other, folder / there, kind=there)
        before = (snapshot(folder), linked(store, other))
        failing: pytest.MonkeyPatch = request.getfixturevalue("failing_renames")
        for kind in kinds:
            for path in folder.iterdir():
                with row(kind, path.name), pytest.raises(OSError, match="Input/output error"):
                    store.place(digest, path, kind=kind, overwrite=True)
        failing.undo()
        assert (snapshot(folder), linked(store, other)) == before
        assert linked(store, digest) == []

    def test_a_full_disk_leaves_nothing(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fail, real = raising(errno.ENOSPC), os.write
        with monkeypatch.context() as patch:
            large = len(WEIGHTS) // 2
            patch.setattr(os, "write", lambda fd, d: fail() if len(d) > large else real(fd, d))
            with pytest.raises(NoSpaceError):
                store.place(digest, folder / "a.json", kind="copy")
        assert list(folder.iterdir()) == []
        assert store.history() == []

    def test_a_blob_that_is_pruned_meanwhile_is_not_found_and_leaves_nothing(
        self, store: Store, folder: Path, at_point: AtPoint
    ) -> None:
        moments: tuple[tuple[Kind, str], ...] = (
            ("hardlink", "place: journaled"), ("copy", "place: journaled"),
            ("copy", "place: filled"),
        )  # fmt: skip
        for kind, point in moments:
            digest = store.put_stream([WEIGHTS]).digest
            at_point(point, lambda: store.plan_prune().execute())
            with row(kind, point), pytest.raises(BlobNotFoundError):
                store.place(digest, folder / "a.safetensors", kind=kind)
            assert list(folder.iterdir()) == []
            assert store.history() == []


class TestVolumes:
    @pytest.fixture
    def other(self, store: Store, elsewhere: Path) -> Store:
        """The part of the store on another filesystem."""
        return store.add_volume(elsewhere / ".smartcache")

    def test_a_blob_of_another_volume_is_found_opened_and_copied(
        self, store: Store, folder: Path, other: Store
    ) -> None:
        digest = other.put_stream([WEIGHTS]).digest
        assert read(store) == WEIGHTS
        assert store.find("blake3", digest) == store.resolve(digest)
        assert store.place(digest, folder / "a.safetensors").kind == "copy"
        assert store.path_of(digest) == blob_path(other)

    def test_the_volume_of_the_destination_is_preferred(
        self, store: Store, folder: Path, elsewhere: Path, other: Store
    ) -> None:
        for volume, place in ((store, folder), (other, elsewhere)):
            digest = volume.put_stream([WEIGHTS]).digest
            link = store.place(digest, place / "a.safetensors", kind="hardlink")
            assert inode_of(link.path) == inode_of(blob_path(volume))

    def test_a_file_is_adopted_by_the_volume_of_its_filesystem(
        self, store: Store, elsewhere: Path, other: Store
    ) -> None:
        blob = store.adopt(write(elsewhere / "a.safetensors"))
        assert inode_of(blob_path(other)) == inode_of(elsewhere / "a.safetensors")
        assert list(store.blobs()) == []
        pairs = [(write(elsewhere / "b.safetensors"), blob.digest)]
        (result,) = store.volume_of(elsewhere).replace_many(pairs)
        assert result.outcome == "replaced"

    def test_a_reopened_store_knows_its_neighbours_that_are_mounted(
        self, store: Store, elsewhere: Path, other: Store
    ) -> None:
        other.put_stream([WEIGHTS])
        with Store(store.root) as again:
            assert again.find("blake3", digest_of(WEIGHTS)) is not None
            assert [s.root for s in again.stores()] == [store.root, other.root]
        other.close()
        other.root.rename(elsewhere / "unplugged")
        with Store(store.root) as again:
            assert again.find("blake3", digest_of(WEIGHTS)) is None
            assert [s.root for s in again.stores()] == [store.root]
        assert not other.root.exists()

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
