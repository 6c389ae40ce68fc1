"""A blob gets a name in the user's folder: which kind of link, where, and never wrong bytes."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from smartcache import errors
from smartcache.config import load_settings
from smartcache.store import KINDS, Kind
from smartcache.store.layout import Pool, pool_root
from smartcache.store.store import Store
from smartcache.store.undo import ONLY
from smartcache.system.filesystems import probe
from tests.processes.children import NOBODY
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    adopt,
    blob_path,
    dedup,
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
from tests.store.small_disks import PAGE, Disk, in_own_namespace, mount

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
SHARED, OWN = ("hardlink", "reflink"), ("copy", "reflink")
DIGEST = digest_of(WEIGHTS)


def working_kinds(folder: Path) -> list[Kind]:
    able = probe(folder)
    return [kind for kind in KINDS if kind != "reflink" or able.reflink]


class TestKinds:
    def test_large_weights_are_shared_and_texts_are_not(self, tmp_path: Path, folder: Path) -> None:
        usual = load_settings(home=tmp_path / "store")
        small, writable = replace(usual, link_min_size=10), replace(usual, keep_writable=True)
        weights = (".safetensors", ".GGUF", ".bin", ".pt", ".onnx")
        texts = (".json", ".txt", ".yaml", ".py", ".md", "", ".jinja")
        rows = [
            *((usual, 65_536, suffix, False, SHARED) for suffix in weights),
            *((usual, 65_536, suffix, False, OWN) for suffix in texts),
            (usual, 65_535, ".safetensors", False, OWN), (usual, 2, ".json", True, SHARED),
            (small, 10, ".bin", False, SHARED), (writable, 65_536, ".bin", False, OWN),
        ]  # fmt: skip
        for number, (settings, size, suffix, whole, kinds) in enumerate(rows):
            with row(number, suffix), Store(settings=settings) as store:
                digest = store.put_stream([bytes(size)]).digest
                link = store.place(digest, folder / f"{number}{suffix}", whole=whole)
                assert link.kind in kinds
                assert link.path.read_bytes() == bytes(size)
                if kinds is OWN:
                    assert mode_of(link.path) & 0o200
                    edit(link.path)
                assert read(store, digest) == bytes(size)

    def test_where_hard_links_are_refused_the_next_kind_is_taken(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """EPERM is what protected_hardlinks says of another user's file."""
        real, refusal, tried = os.link, 0, list[int]()

        def refuse(source: str, target: str, **more: int) -> None:
            if source == str(blob_path(store)):
                tried.append(refusal)
                raising(refusal)()
            real(source, target, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "link", refuse)
        codes = (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS)
        for refusal in codes:
            path = folder / f"{errno.errorcode[refusal]}.safetensors"
            with row(path.name):
                with pytest.raises(errors.CannotLinkError):
                    store.place(digest, path, kind="hardlink")
                assert not path.exists()
                assert store.place(digest, path).kind in OWN
                assert path.read_bytes() == WEIGHTS
        assert len(os.listdir(folder)) == len(codes)
        assert tried == [*(c for c in codes[:4] for _ in (0, 1)), *codes[4:]], "of these all fail"
        assert undo(store) == []
        assert os.listdir(folder) == []

    def test_a_copy_is_the_users_own_and_tells_its_progress(
        self, store: Store, folder: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watch, mask = Watch(), os.umask(0o027)
        monkeypatch.chdir(folder)
        try:
            link = store.place(digest, "a.bin", kind="copy", progress=watch)
        finally:
            os.umask(mask)
        st = os.stat(folder / "a.bin")
        assert watch.done == watch.total == len(WEIGHTS)
        assert (link.path, link.inode) == (folder / "a.bin", st.st_ino)
        assert (mode_of(link.path), st.st_nlink) == (0o640, 1)
        assert st.st_mtime_ns == store.get(digest).mtime_ns

    def test_what_others_know_of_outlives_undo(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        kinds: tuple[Kind, ...] = ("hardlink", "copy")
        for name, keep in (("mine", False), ("theirs", True)):
            for kind in kinds:
                store.place(digest, folder / f"{name}.{kind}", kind=kind, keep=keep)
        for kind in kinds:
            path = write(folder / f"over.{kind}", OTHER)
            store.place(digest, path, kind=kind, keep=True, overwrite=True)
        assert undo(store) == []
        left = [f"{name}.{kind}" for name in ("over", "theirs") for kind in sorted(kinds)]
        assert sorted(os.listdir(folder)) == left
        assert {link_count(path) for path in folder.iterdir()} == {1}
        assert {path.read_bytes() for path in folder.iterdir()} == {WEIGHTS}


def put_there(store: Store, path: Path, what: str) -> None:
    if what == "file":
        os.link(write(path, OTHER), path.with_name("second"))
    elif what == "folder":
        path.mkdir()
    elif "symlink" in what:
        path.symlink_to("nowhere" if "dangling" in what else write(path.with_name("target"), OTHER))
    else:
        held = DIGEST if what == "its own link" else store.put_stream([OTHER]).digest
        store.place(held, path, kind="copy" if what == "copy" else "hardlink")


class TestDestination:
    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_there_is_not_overwritten_unasked_nor_a_folder_made(
        self, store: Store, folder: Path, digest: str, kind: Kind, at_point: AtPoint
    ) -> None:
        with pytest.raises(FileNotFoundError):
            store.place(digest, folder / "missing" / "a.safetensors", kind=kind)
        there = ("file", "folder", "symlink", "dangling symlink")
        for name in there:
            put_there(store, folder / name, name)
        before = snapshot(folder)
        for name in there:
            with row(name), pytest.raises(errors.DestinationExistsError):
                store.place(digest, folder / name, kind=kind)
        with pytest.raises(errors.DestinationExistsError):
            store.place(digest, folder / "folder", kind=kind, overwrite=True)
        new = folder.with_name("new.safetensors")
        at_point("journal: begun", lambda: write(new, OTHER))
        with pytest.raises((errors.DestinationExistsError, errors.CannotLinkError)):
            store.place(digest, new, kind=kind)
        if kind != "reflink" or probe(folder).reflink:
            assert new.read_bytes() == OTHER
        assert snapshot(folder) == before
        assert (store.names_of(digest), store.history()) == ([], [])

    def test_overwriting_replaces_only_the_name(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """A second name, the file behind a symlink and blobs keep their bytes."""
        there = ("nothing", "file", "symlink", "dangling symlink", "link", "copy", "its own link")
        names = (b"a.safetensors", b"\xff\xfe.safetensors", "模".encode() * 80 + b".bin")
        for kind in working_kinds(folder):
            for number, what in enumerate(there):
                with row(kind, what):
                    place = folder / f"{kind} {what}"
                    place.mkdir()
                    path = place / os.fsdecode(names[number % len(names)])
                    if what != "nothing":
                        put_there(store, path, what)
                    link = store.place(digest, path, kind=kind, overwrite=True)
                    assert (link.path, path.read_bytes()) == (path, WEIGHTS)
                    assert (path in store.names_of(digest)) is (link.kind == "hardlink")
                    assert link.kind == (link.kind if kind == "auto" else kind)
                    for other in set(place.iterdir()) - {path}:
                        assert (other.read_bytes(), mode_of(other)) == (OTHER, 0o644)
        assert store.names_of(digest_of(OTHER)) == []
        assert not store.verify(full=True).has_damage

    def test_a_link_there_already_is_enough(self, store: Store, folder: Path, digest: str) -> None:
        adopted = write(folder / "adopted.safetensors")
        dedup(store, adopted)
        assert store.place(digest, adopted).kind == "hardlink"
        for kind in ("hardlink", "copy"):
            path = folder / f"{kind}.safetensors"
            first = store.place(digest, path, kind=kind)
            for again in (kind, "auto"):
                for overwrite in (False, True):
                    found = store.place(digest, path, kind=again, overwrite=overwrite)
                    assert (found.kind, found.inode) == (first.kind, first.inode), kind
        assert len(store.history()) == 3

    @pytest.mark.parametrize("is_named", [False, True])
    def test_what_others_do_while_a_copy_is_made_does_not_disturb_it(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint, is_named: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """The blob is open: prune may remove it. The copy has an entry when they have ended."""
        real = os.open

        def without_unnamed(path: str, flags: int, *more: int, **most: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raising(errno.EOPNOTSUPP)()
            return real(path, flags, *more, **most)

        if is_named:
            monkeypatch.setattr(os, "open", without_unnamed)

        def work() -> None:
            with Store(store.root) as other:
                assert other.plan_prune().execute().removed == 1
                adopt(other, write(folder / "b.bin", OTHER))

        at_point("copying", work)
        store.place(digest, folder / "a.json", kind="copy")
        assert ((folder / "a.json").read_bytes(), store.has(digest)) == (WEIGHTS, False)
        ours = {each.label: each.id for each in store.history()}
        assert set(ours) == {"add --adopt", "link"}
        plan = store.plan_undo([ours["link"]])
        assert plan.warnings == (f"{folder / 'a.json'}: {ONLY}",)
        (undone,) = plan.execute()
        assert (undone.outcome, undone.note) == ("left", ONLY), "these bytes are nowhere else"
        assert sorted(os.listdir(folder)) == ["a.json", "b.bin"]
        assert [each.label for each in store.history()] == ["add --adopt"]


class TestPools:
    @pytest.fixture
    def pool(self, store: Store, elsewhere: Path) -> Pool:
        """The pool of another filesystem."""
        return store.add_pool(elsewhere / "pool")

    def test_without_a_pool_files_elsewhere_are_copied_and_not_linked(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        before = snapshot(write(elsewhere / "far.safetensors").parent)
        kinds: list[tuple[Kind, str]] = [("hardlink", "a"), ("reflink", "a"), ("hardlink", "far")]
        for kind, name in kinds:
            path = elsewhere / f"{name}.safetensors"
            with row(kind, name), pytest.raises(errors.CannotLinkError):
                store.place(digest, path, kind=kind, overwrite=True)
            assert store.unfinished() == store.recover() == []
        with pytest.raises(errors.FileSkippedError) as caught:
            store.adopt(elsewhere / "far.safetensors")
        assert "--make-pool" in caught.value.hint
        assert (snapshot(elsewhere), store.history()) == (before, [])
        assert store.place(digest, elsewhere / "a.safetensors").kind == "copy"
        assert (elsewhere / "a.safetensors").read_bytes() == WEIGHTS

    def test_a_pool_has_no_database_and_there_is_one_of_a_filesystem(
        self, store: Store, folder: Path, elsewhere: Path, pool: Pool
    ) -> None:
        for place in (folder, elsewhere):
            with pytest.raises(errors.StoreError, match="already"):
                store.add_pool(place / ".smartcache")
        assert store.add_pool(pool.root).root == pool.root
        assert [each.root for each in store.pools()] == [store.root, pool.root]
        assert (os.listdir(elsewhere), os.listdir(folder)) == (["pool"], [])
        assert sorted(os.listdir(pool.root)) == ["bad", "blobs", "pins", "tmp"]
        modes = {each: mode_of(each) for each in pool.root.rglob("*")}
        assert modes.pop(pool.blobs / "CACHEDIR.TAG") == 0o600
        assert set(modes.values()) == {0o700}

    def test_a_blob_is_taken_from_the_nearest_pool_that_has_it(
        self, store: Store, folder: Path, elsewhere: Path, pool: Pool
    ) -> None:
        digest = store.put_stream([WEIGHTS], pool=pool).digest
        assert read(store) == WEIGHTS
        assert store.find("blake3", digest) == store.resolve(digest[:8]) == store.get(digest)
        assert store.path_of(digest) == Path(pool.blob(digest))
        assert store.place(digest, folder / "a.safetensors").kind == "copy"
        store.put_stream([WEIGHTS])
        for place, root in ((folder, store.root), (elsewhere, pool.root)):
            link = store.place(digest, place / "b.safetensors", kind="hardlink")
            assert link.inode == inode_of(store.path_of(digest, near=place))
            assert store.path_of(digest, near=place).is_relative_to(root)

    def test_a_pool_that_is_away_is_left_out_and_back_with_its_drive(
        self, store: Store, folder: Path, elsewhere: Path, pool: Pool
    ) -> None:
        adopt(store, write(elsewhere / "far.bin"), write(folder / "near.bin", OTHER))
        before = snapshot(elsewhere)
        pool.root.rename(elsewhere / "unplugged")
        for number, each in enumerate((store, Store(store.root))):
            with row(number), each:
                assert [found.root for found in each.pools()] == [store.root]
                assert (each.has(DIGEST), read(each, digest_of(OTHER))) == (False, OTHER)
                assert (each.usage().blobs, each.plan_prune().victims) == (1, ())
                assert not each.verify(full=True).has_damage
                each.put_stream([b"more"])
                assert each.plan_prune().execute().removed == 1
        assert not pool.root.exists()
        (elsewhere / "unplugged").rename(pool.root)
        with Store(store.root) as again:
            assert (read(again), snapshot(elsewhere)) == (WEIGHTS, before)
            assert undo(again) == []

    def test_a_pool_is_at_the_root_of_its_drive(self, store: Store, tmp_path: Path) -> None:
        def plug() -> None:
            disk = Disk(tmp_path / "drive", 1000 * PAGE)
            path = write(disk.point / "models" / "a.safetensors")
            pool = store.make_pool_for(path)
            assert pool.root == pool_root(disk.point) == disk.point / f".smartcache-{os.geteuid()}"
            assert store.make_pool_for(disk.point).root == pool.root
            assert adopt(store, path)[0].outcome == "became"
            mount("none", disk.point, "tmpfs", 0, "size=16k")  # an empty one in its place
            assert (store.pools(), store.has(DIGEST)) == ([store.layout], False)
            assert os.listdir(disk.point) == []

        in_own_namespace(plug)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_a_pool_of_somebody_else_is_refused_and_left_out(
        self, store: Store, elsewhere: Path, pool: Pool, caplog: pytest.LogCaptureFixture
    ) -> None:
        digest = store.put_stream([WEIGHTS], pool=pool).digest
        before = snapshot(elsewhere)
        ways: dict[str, Callable[[], object]] = {
            "theirs": lambda: os.chown(pool.root, NOBODY, -1),
            "their blobs": lambda: os.chown(pool.blobs / digest[:2], NOBODY, -1),
            "open to all": lambda: pool.root.chmod(0o777),
        }
        for name, take in ways.items():
            take()
            with row(name), Store(store.root) as again, caplog.at_level(logging.WARNING):
                caplog.clear()
                assert (again.pools(), again.has(digest)) == ([again.layout], False)
                assert "left out" in caplog.text
                with pytest.raises(errors.UnsafeStoreError):
                    again.add_pool(pool.root)
            for path in (pool.root, pool.blobs / digest[:2]):
                os.chown(path, 0, -1)
                path.chmod(0o700)
        assert snapshot(elsewhere) == before
        assert read(store) == WEIGHTS
