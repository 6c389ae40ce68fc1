"""What is remembered of files: every question the index answers, and an index that is no good."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from smartcache.store import catalog as catalogs
from smartcache.store.catalog import (
    ATTRIBUTES,
    DAMAGED,
    RACY,
    STORE,
    UNREAD,
    Catalog,
    FileRow,
    FolderSums,
    Known,
    Learned,
    Member,
    Scope,
    open_catalog,
)
from smartcache.store.store import Store
from smartcache.system.kernel import StatKey
from smartcache.system.sqlite import signed
from tests.store.files import WEIGHTS, dedup, digest_of, read, row, sha256_of, undo, write

A, B, C = bytes([1]) * 32, bytes([2]) * 32, bytes([0xAB]) * 32
KEY = StatKey(10, 3, 4)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with closing(Catalog(tmp_path / "index.sqlite3")) as catalog:
        yield catalog


def scope(
    *folders: int, min_size: int = 1, exclude: tuple[str, ...] = (), pools: tuple[int, ...] = ()
) -> Scope:
    return Scope(folders=folders, min_size=min_size, exclude=exclude, pools=pools)


class Seeing:
    """Puts sightings into a catalog: `see(b"/m/a", inode=1, size=10)`."""

    def __init__(self, catalog: Catalog, folder: str = "/m", program: str = "") -> None:
        self._catalog = catalog
        self.number = catalog.set_folder(Path(folder), program=program)

    def __call__(
        self, path: bytes, *, inode: int, size: int = 10, links: int = 1, filesystem: str = "f",
        digest: bytes | None = None, sample: bytes | None = None, boot: str = "",
        key: StatKey | None = None, traits: int = 0,
    ) -> None:  # fmt: skip
        catalog, (directory, name) = self._catalog, os.path.split(path)
        number = catalog.filesystem_number(filesystem)
        seen = (number, signed(inode), size, 3, 4, links, 512, 0o644, 0)
        catalog.put_seen([(catalog.set_directory(directory, self.number), name, seen, traits)])
        if digest or sample:
            key = key or StatKey(size, 3, 4)
            catalog.learn([Learned(number, signed(inode), key, 0, digest, sample, boot)])


@pytest.fixture
def see(catalog: Catalog) -> Seeing:
    return Seeing(catalog)


def members(catalog: Catalog, where: Scope, *, with_racy: bool = False) -> dict[bytes, Member]:
    found = [Member(*each) for each in catalog.members(where, with_racy=with_racy)]
    return {os.path.join(each.directory, each.name): each for each in found}


class TestNoGood:
    """It is a memory: it is set aside and made anew, and nothing of the user's is lost."""

    @pytest.mark.parametrize("harm", ["nonsense", "pages", "version", "newer", "tables", "empty"])
    def test_a_damaged_index_or_one_of_another_version_is_set_aside_and_made_anew(
        self, store: Store, folder: Path, harm: str
    ) -> None:
        paths = [write(folder / name) for name in ("a.bin", "b.bin")]
        dedup(store, *paths)
        store.close()
        index = store.layout.index
        data = index.read_bytes()
        if harm == "nonsense":
            index.write_bytes(b"nonsense" * 999)
        elif harm == "pages":
            index.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
        elif harm == "empty":
            index.write_bytes(b"")
        else:
            version = {"version": 1, "newer": 999}.get(harm, Catalog.schema_version)
            with closing(sqlite3.connect(index)) as connection:
                connection.executescript(
                    f"PRAGMA user_version = {version}; {'DROP TABLE names' * (harm == 'tables')}"
                )
        with Store(store.root) as again:
            assert list(again.folders()) == []
            assert read(again) == WEIGHTS
            assert again.rebuild() == 1
            assert (len(again.history()), undo(again)) == (1, [])
        aside = [name for name in os.listdir(store.layout.bad) if name.startswith("index.")]
        assert bool(aside) == (harm != "empty")
        assert [path.stat().st_nlink for path in paths] == [1, 1]

    def test_without_a_place_for_it_it_goes_but_not_a_new_one(self, tmp_path: Path) -> None:
        """Another process may have made one anew when this one gets to it."""
        path, log = tmp_path / "index", logging.getLogger(catalogs.__name__)
        path.write_bytes(b"nonsense" * 999)

        def another_process(_: logging.LogRecord) -> bool:
            """Acts when the damage is seen, and before anything is done about it."""
            log.removeFilter(another_process)
            with closing(open_catalog(path, tmp_path / "bad")) as other:
                other.set_folder(Path("/theirs"), program="")
            return True

        log.addFilter(another_process)
        with closing(open_catalog(path, tmp_path / "bad")) as catalog:
            assert catalog.folder_number(Path("/theirs")) is not None
        assert not (tmp_path / "bad").exists()

    def test_one_in_memory_leaves_nothing(self, tmp_path: Path) -> None:
        with closing(open_catalog(None, tmp_path / "bad")) as catalog:
            Seeing(catalog)(b"/m/a", inode=1)
            assert len(list(catalog.files(size=10))) == 1
        assert os.listdir(tmp_path) == []


class TestFolders:
    def test_what_was_given_stays_given_and_a_program_stays_known(self, catalog: Catalog) -> None:
        first = catalog.set_folder(Path("/m"), program="ComfyUI", given=True, walked=False)
        assert catalog.set_folder(Path("/m"), program="", given=False) == first
        (known,) = catalog.known_folders()
        assert (known.is_given, known.program, known.files) == (True, "ComfyUI", 0)
        assert (catalog.folder_number(Path("/m")), catalog.folder_number(Path("/n"))) == (
            first,
            None,
        )
        assert catalog.given_folders() == [(Path("/m"), "ComfyUI")]

    def test_files_are_summed_but_not_those_of_pools(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1, size=10)
        see(b"/m/b/c", inode=2, size=5)
        Seeing(catalog, "/n")
        pool = Seeing(catalog, "/store/blobs", STORE)
        pool(b"/store/blobs/ab/x", inode=3)
        found = {each.path: (each.files, each.size) for each in catalog.known_folders()}
        assert found == {Path("/m"): (2, 15), Path("/n"): (0, 0)}
        assert catalog.pools() == {pool.number: Path("/store/blobs")}
        assert len(list(catalog.files(size=10))) == 1

    def test_a_dropped_folder_takes_those_in_it_along(self, catalog: Catalog, see: Seeing) -> None:
        """But no pool and no neighbour."""
        see(b"/m/a", inode=1)
        Seeing(catalog, "/m/in")(b"/m/in/a", inode=2)
        Seeing(catalog, "/m/.smartcache/blobs", STORE)
        Seeing(catalog, "/m0")(b"/m0/a", inode=3)
        assert catalog.drop_folder(Path("/m"))
        assert not catalog.drop_folder(Path("/m"))
        assert [each.path for each in catalog.files(size=10)] == [Path("/m0/a")]
        assert len(catalog.pools()) == 1

    def test_discovered_folders_whose_files_are_seen_in_others_are_forgotten(
        self, catalog: Catalog, see: Seeing, pass_time: Callable[[float], None]
    ) -> None:
        see(b"/m/a", inode=1)
        Seeing(catalog, "/empty")
        catalog.set_folder(Path("/given"), program="", given=True)
        catalog.drop_empty_folders()
        assert len(catalog.known_folders()) == 3, "walked a moment ago"
        pass_time(4000)
        catalog.drop_empty_folders()
        assert [each.path for each in catalog.known_folders()] == [Path("/given"), Path("/m")]


class TestDirectories:
    def test_what_was_seen_in_some(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1)
        see(b"/m/\xff\n/b", inode=2**64 - 1)
        catalog.set_directory(b"/m/empty", see.number)
        found = catalog.seen_in([b"/m", b"/m/\xff\n", b"/m/empty", b"/m/unknown"])
        rest = (10, 3, 4, 1, 512, 0o644, 0)
        assert {path: (folder, names) for path, (_, folder, names) in found.items()} == {
            b"/m": (see.number, {b"a": (1, 1, *rest)}),
            b"/m/\xff\n": (see.number, {b"b": (1, -1, *rest)}),
            b"/m/empty": (see.number, {}),
        }
        assert catalog.seen_in([]) == {}
        other = catalog.set_folder(Path("/"), program="")
        number = catalog.set_directory(b"/m", other)
        assert catalog.seen_in([b"/m"])[b"/m"][:2] == (number, other)

    def test_files_are_forgotten_with_their_last_name(self, catalog: Catalog, see: Seeing) -> None:
        for number, path in enumerate((b"/m/a", b"/m/b", b"/m/x/c", b"/m/y/d", b"/m/y/e")):
            see(path, inode=min(number, 3), digest=A)
        number = catalog.set_directory(b"/m", see.number)
        catalog.drop_seen([(number, b"a"), (number, b"unknown")])
        catalog.drop_nameless([(1, 0), (1, 1)])
        inner = catalog.seen_in([b"/m/y"])[b"/m/y"][0]
        assert catalog.drop_directories(see.number, {number, inner}, 9) == [(1, 2)]
        catalog.forget_names([b"/m/y/d", b"/m/unknown/x"])
        assert set(catalog.known("f", range(9))) == {1, 2, 3}
        catalog.forget_names([b"/m/y/e"])
        assert set(catalog.known("f", range(9))) == {1, 2}
        assert set(catalog.seen_in([b"/m", b"/m/x", b"/m/y"])) == {b"/m", b"/m/y"}
        assert [each.path for each in catalog.files(size=10)] == [Path("/m/b")]

    def test_a_name_belongs_to_the_innermost_folder(self, catalog: Catalog, see: Seeing) -> None:
        inner = Seeing(catalog, "/m/in")
        names = (Path("/m/in/x/a"), "/m/b", b"/else/c")
        catalog.remember([FileRow("g", 2**63, KEY, 1, 0, A.hex(), names=names)])
        found = catalog.seen_in([b"/m/in/x", b"/m", b"/else"])
        assert [found[each][1] for each in (b"/m/in/x", b"/m", b"/else")] == [
            inner.number, see.number, 0
        ]  # fmt: skip
        paths = [Path("/else/c"), Path("/m/b"), Path("/m/in/x/a")]
        assert [each.path for each in catalog.files(inode=("g", 2**63))] == paths
        assert [each.path for each in catalog.files(digest=A.hex())] == paths
        assert [*catalog.files(inode=("f", 2**63)), *catalog.files(digest=B.hex())] == []


class TestFiles:
    @pytest.mark.parametrize("inode", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
    def test_any_inode_number_and_any_name(self, catalog: Catalog, see: Seeing, inode: int) -> None:
        """64 bits, and any bytes."""
        name = b"/m/\xff\xfe"
        see(name, inode=inode, digest=A, traits=DAMAGED)
        assert catalog.known("f", [inode, 5]) == {inode: Known(KEY, A.hex(), "")}
        assert catalog.known("g", [inode]) == {}
        (seen,) = catalog.files(size=10)
        assert (os.fsencode(seen.path), seen.inode) == (name, inode)
        assert [each.inode for each in catalog.files(digest=A.hex())] == [inode]
        assert [each.inode for each in catalog.files(scope=scope(see.number))] == [inode]
        (marked,) = catalog.marked(scope(see.number), DAMAGED)
        assert marked == (1, signed(inode), name, 10)

    def test_filesystems_are_numbered_once(self, catalog: Catalog) -> None:
        numbers = [catalog.filesystem_number(name) for name in ("f", "g", "f")]
        assert numbers[0] == numbers[2] != numbers[1]
        assert [catalog.filesystem_name(number) for number in numbers] == ["f", "g", "f"]
        assert catalog.filesystem_name(99) == ""
        with suppress(ZeroDivisionError), catalog.write():
            assert catalog.filesystem_number("rolled back") / 0
        with closing(Catalog(catalog.path)) as other:
            number = other.filesystem_number("h")
        assert catalog.filesystem_number("rolled back") != number

    def test_what_was_learned_is_of_the_file_as_read(self, catalog: Catalog, see: Seeing) -> None:
        """Seen again unchanged it stays; changed, it goes; a link of ours leaves the sample."""
        for key in (KEY, StatKey(11, 3, 4), StatKey(10, 2, 4), StatKey(10, 3, 5)):
            with row(key):
                see(b"/m/a", inode=1, digest=A, key=key)
                assert (catalog.known("f", [1]) != {}) == (key == KEY)
                see(b"/m/a", inode=1)
                assert (catalog.known("f", [1]) != {}) == (key == KEY)
                see(b"/m/a", inode=1, size=12)
                assert catalog.known("f", [1]) == {}
        see(b"/m/a", inode=1, sample=b"s")
        see(b"/m/b", inode=2)
        moved = FileRow("f", 1, StatKey(10, 3, 99), 2, 512, A.hex(), "")
        catalog.remember([moved])
        assert members(catalog, scope(1))[b"/m/a"].sample is None
        see(b"/m/b", inode=2, digest=A, sample=b"s")
        catalog.remember([moved._replace(inode=2)])
        assert members(catalog, scope(1))[b"/m/b"].sample == b"s"

    def test_no_doubtful_sample_is_kept_with_a_digest(self, catalog: Catalog, see: Seeing) -> None:
        """One of another boot, or of a file that was young."""
        for boot, kept in (("", b"s"), (catalog.boot, b"s"), ("before", None), (RACY, None)):
            with row(boot):
                see(b"/m/a", inode=1, size=20)
                see(b"/m/a", inode=1, sample=b"s", boot=boot)
                see(b"/m/b", inode=2)
                see(b"/m/a", inode=1, digest=A)
                found = members(catalog, scope(1))[b"/m/a"]
                assert (found.digest, found.sample) == (A, kept)

    def test_traits_are_those_of_the_bytes(self, catalog: Catalog, see: Seeing) -> None:
        for number, traits in enumerate((0, UNREAD, DAMAGED, ATTRIBUTES)):
            see(b"/m/%d" % number, inode=number, traits=traits)
        asked = [list(catalog.marked(scope(1), trait)) for trait in (UNREAD, DAMAGED)]
        assert asked == [[(1, 1, b"/m/1", 10)], [(1, 2, b"/m/2", 10)]]
        catalog.set_read([(1, 1, True), (1, 2, False)])
        assert [each[1] for each in catalog.marked(scope(1), DAMAGED)] == [1]
        assert list(catalog.marked(scope(1), UNREAD)) == []
        catalog.remember([FileRow("f", 1, KEY, 1, 512, A.hex())])
        assert [each[1] for each in catalog.marked(scope(1), DAMAGED)] == [1]
        see(b"/m/1", inode=1, size=11)
        assert list(catalog.marked(scope(1), DAMAGED)) == []


class TestHashes:
    def test_other_hashes_are_found_both_ways(self, catalog: Catalog, see: Seeing) -> None:
        sha = sha256_of(WEIGHTS)
        catalog.add_hashes([(A.hex(), {"sha256": sha}), (B.hex(), {})])
        catalog.add_hashes([(A.hex(), {"git-sha1": "ee" * 20})])
        assert catalog.hashes_of([A.hex(), B.hex()]) == {
            A.hex(): {"blake3": A.hex(), "sha256": sha, "git-sha1": "ee" * 20},
            B.hex(): {"blake3": B.hex()},
        }
        known = {("sha256", sha): A, ("git-sha1", "ee" * 20): A, ("blake3", C.hex()): C}
        for (algorithm, value), digest in known.items():
            assert catalog.digest_with(algorithm, value) == digest.hex()  # type: ignore[arg-type]
        assert catalog.digest_with("sha256", "00" * 32) == ""
        many = [digest_of(bytes([n % 256, n // 256])) for n in range(2500)]
        assert set(catalog.hashes_of([*many, A.hex()])) == {*many, A.hex()}
        see(b"/m/a", inode=1, digest=A)
        see(b"/m/young", inode=2, digest=A, boot=RACY)
        Seeing(catalog, "/store", STORE)(b"/store/a", inode=3, digest=A)
        assert [each.path for each in catalog.files(sha256=sha)] == [Path("/m/a")]
        assert [each.sha256 for each in catalog.files(sha256="")] == [sha]
        assert list(catalog.digests_by_sha256()) == [(sha, A.hex())]

    def test_uses_are_remembered_and_hashes_of_bytes_that_nobody_has_are_not(
        self, catalog: Catalog, see: Seeing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for now, digests in ((100.0, (A, B)), (200.0, (A,))):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            catalog.touch(each.hex() for each in digests)
        catalog.add_hashes([(C.hex(), {"sha256": "cc" * 32})])
        assert catalog.uses() == {A.hex(): (100, 200), B.hex(): (100, 100)}
        assert catalog.uses([B.hex(), C.hex()]) == {B.hex(): (100, 100)}
        see(b"/m/c", inode=1, digest=C)
        catalog.drop_unused_hashes(lambda digest: digest == B.hex())
        assert list(catalog.uses()) == [B.hex()]
        assert catalog.digest_with("sha256", "cc" * 32) == C.hex()


class TestSums:
    def test_an_inode_counts_once_in_each_and_in_all(self, catalog: Catalog, see: Seeing) -> None:
        other = Seeing(catalog, "/n")
        see(b"/m/a", inode=1, links=1)
        see(b"/m/b", inode=2, links=3)
        see(b"/m/c", inode=2, links=3)
        other(b"/n/d", inode=2, links=3)
        other(b"/n/e", inode=2, links=1, filesystem="g")
        other(b"/n/f", inode=3, links=2)
        assert catalog.folder_sums(scope(1, 2)) == {
            1: FolderSums(files=3, logical=30, physical=1024, shared=512),
            2: FolderSums(files=3, logical=30, physical=1536, shared=1024),
            0: FolderSums(files=6, logical=60, physical=2048, shared=512),
        }

    def test_only_what_is_asked_for(self, catalog: Catalog, see: Seeing) -> None:
        Seeing(catalog, "/n")(b"/n/x", inode=9)
        see(b"/m/a", inode=1)
        for path in (b"/m/no/b", b"/m/deep/no/c", b"/m/x.no", b"/m/[1]"):
            see(path, inode=2, links=2)
        for exclude, files in {
            ("no",): 3, ("*.no",): 4, ("no", "*.no"): 2, ("/m",): 0, ("/m/no/",): 4,
            ("[!m]",): 2, ("[[]1]",): 4, ("\udcff",): 5,
        }.items():  # fmt: skip
            found = catalog.folder_sums(scope(1, exclude=exclude))
            assert {number: each.files for number, each in found.items()} == (
                {1: files, 0: files} if files else {}
            ), exclude
        assert catalog.folder_sums(scope()) == {}


class TestMembers:
    def test_sizes_of_several_inodes_largest_first(self, catalog: Catalog, see: Seeing) -> None:
        """Equal numbers on another filesystem are other inodes."""
        for name, inode, size in ((b"a", 1, 10), (b"b", 2, 10), (b"c", 3, 11), (b"d", 3, 11)):
            see(b"/m/" + name, inode=inode, size=size)
        for name, filesystem in ((b"e", "f"), (b"f", "g")):
            see(b"/m/" + name, inode=4, size=12, filesystem=filesystem)
        see(b"/m/f", inode=4, size=12, filesystem="g", digest=A)
        found = members(catalog, scope(1))
        assert [path[3:] for path in found][:2] in ([b"e", b"f"], [b"f", b"e"])
        assert {path: each.digest for path, each in found.items()} == {
            b"/m/a": None, b"/m/b": None, b"/m/e": None, b"/m/f": A,
        }  # fmt: skip
        assert set(members(catalog, scope(1, min_size=11))) == {b"/m/e", b"/m/f"}
        asked = [Member(*each).name for each in catalog.members(scope(1), [11])]
        assert sorted(asked) == [b"c", b"d"]

    def test_young_memories_count_only_if_asked_for(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/a", inode=1, digest=A, boot=RACY)
        see(b"/m/b", inode=2, sample=b"s", boot=RACY)
        see(b"/m/c", inode=3, digest=A, boot="another boot")
        for with_racy, known in ((True, (A, b"s", None)), (False, (None, None, None))):
            found = members(catalog, scope(1), with_racy=with_racy)
            asked = found[b"/m/a"].digest, found[b"/m/b"].sample, found[b"/m/c"].digest
            assert asked == known

    def test_the_blobs_of_pools_are_among_them(self, catalog: Catalog, see: Seeing) -> None:
        pool = Seeing(catalog, "/store/blobs", STORE)
        pool(b"/store/blobs/ab/x", inode=7, digest=A)
        see(b"/m/a", inode=1)
        assert set(members(catalog, scope(see.number))) == {b"/m/a"}
        with_pools = scope(see.number, pools=tuple(catalog.pools()))
        found = members(catalog, with_pools)
        assert {path: each.folder for path, each in found.items()} == {
            b"/m/a": see.number, b"/store/blobs/ab/x": pool.number,
        }  # fmt: skip

    def test_files_come_by_inode_with_what_is_known(self, catalog: Catalog, see: Seeing) -> None:
        see(b"/m/b", inode=2, sample=b"s")
        see(b"/m/a", inode=1, links=2, digest=A)
        see(b"/m/c", inode=1, links=2)
        see(b"/m/d", inode=3, links=2)
        Seeing(catalog, "/store/blobs", STORE)(b"/store/blobs/ab/x", inode=3, links=2, digest=B)
        found = list(catalog.files(scope=scope(see.number)))
        assert [each.path.name for each in found] == ["a", "c", "b", "d"]
        assert [each.digest for each in found] == [A.hex(), A.hex(), "", B.hex()]
        assert [each.is_compared for each in found] == [True, True, True, True]
        assert [each.is_blob for each in found] == [False, False, False, True]
