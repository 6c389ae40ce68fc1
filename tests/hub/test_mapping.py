"""{sha256: path} names what has these bytes now, and nothing else; a file of it is not believed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache import SmartCache
from tests.api import HubError, ModelFolder, Store, cache_mapping, import_mapping, look, store_memos
from tests.api import hub_mapping as mapping_module
from tests.store.files import OTHER, WEIGHTS, Watch, edit, inode_of, snapshot, write

HOSTILE = "../../etc/passwd"
Named = Callable[[object], Path]
PassTime = Callable[[float], None]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: Store, data: bytes) -> Path:
    return store.path_of(store.put_stream([data], algorithms=["sha256"]).digest)


def see(store: Store, folder: Path) -> None:
    """Let a folder be known, by a stat walk as downloads make it."""
    look(store, [ModelFolder(path=folder)], min_size=1)


@pytest.fixture
def known(store: Store, folder: Path, pass_time: PassTime) -> Path:
    """A file of a known folder that was hashed when it was old enough."""
    path = write(folder / "a.safetensors")
    pass_time(60)
    see(store, folder)
    store.digest_of(path, ["sha256"])
    return path


class TestBlobs:
    def test_are_there_by_their_sha256_in_either_case(self, store: Store) -> None:
        path = put(store, WEIGHTS)
        store.put_stream([OTHER])  # whose sha256 is not known
        mapping = cache_mapping(store)
        assert mapping[sha256(WEIGHTS)] == mapping[sha256(WEIGHTS).upper()] == path
        assert sha256(WEIGHTS).upper() in mapping
        assert dict(mapping) == {sha256(WEIGHTS): path}
        assert len(mapping) == 1
        for key in ("", "abc", "0" * 64, HOSTILE, "g" * 64, "0" * 65):
            with pytest.raises(KeyError) as caught:
                mapping[key]
            assert caught.value.args == (key,)
            assert mapping.get(key) is None

    def test_are_seen_as_they_come_and_go(self, store: Store) -> None:
        mapping = cache_mapping(store)
        assert list(mapping) == []
        digest = store.put_stream([WEIGHTS], algorithms=["sha256"]).digest
        assert list(mapping) == [sha256(WEIGHTS)]
        store.remove(digest)
        assert list(mapping) == []
        assert sha256(WEIGHTS) not in mapping

    def test_a_damaged_or_lost_one_is_not_there(self, store: Store) -> None:
        edit(put(store, WEIGHTS))
        assert len(cache_mapping(store)) == 0  # before it is asked for
        path = put(store, OTHER)
        mapping = cache_mapping(store)
        assert sha256(WEIGHTS) not in mapping
        assert list(mapping) == [sha256(OTHER)]
        path.unlink()
        assert dict(cache_mapping(store)) == {}

    def test_of_other_volumes_too(self, store: Store, elsewhere: Path) -> None:
        here = put(store, WEIGHTS)
        there = put(store.add_volume(elsewhere / "volume"), OTHER)
        assert dict(cache_mapping(store)) == {sha256(WEIGHTS): here, sha256(OTHER): there}

    def test_a_sound_one_elsewhere_stands_in_for_a_damaged_one(
        self, store: Store, elsewhere: Path
    ) -> None:
        there = put(store.add_volume(elsewhere / "volume"), WEIGHTS)
        edit(put(store, WEIGHTS))
        assert dict(cache_mapping(store)) == {sha256(WEIGHTS): there}


class TestFiles:
    def test_are_there_once_hashed_and_a_blob_comes_first(self, store: Store, known: Path) -> None:
        mapping = cache_mapping(store)
        assert mapping[sha256(WEIGHTS)] == known
        assert dict(mapping) == {sha256(WEIGHTS): known}
        blob = put(store, WEIGHTS)
        assert dict(mapping) == {sha256(WEIGHTS): blob}
        edit(blob)  # for a damaged one the file stands in
        assert dict(mapping) == {sha256(WEIGHTS): known}
        assert mapping[sha256(WEIGHTS)] == known

    def test_not_while_their_hash_or_their_folder_is_not_known(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        """Nor if they were hashed while young."""
        path = write(folder / "a.safetensors")
        see(store, folder)
        store.digest_of(path, ["sha256"])
        assert dict(cache_mapping(store)) == {}
        pass_time(60)
        path = write(folder / "b.safetensors", OTHER)
        pass_time(60)
        see(store, folder)
        store.digest_of(path)  # another hash
        unknown = write(folder.with_name("unknown") / "c", b"c")
        pass_time(60)
        store.digest_of(unknown, ["sha256"])
        assert dict(cache_mapping(store)) == {}

    @pytest.mark.parametrize("how", ["edited", "touched", "removed", "replaced", "symlinked"])
    def test_not_when_they_have_changed_since(
        self, how: str, store: Store, known: Path, tmp_path: Path
    ) -> None:
        assert sha256(WEIGHTS) in cache_mapping(store)
        if how == "edited":
            edit(known, b"more", offset=len(WEIGHTS))
        elif how == "touched":
            os.utime(known)
        elif how == "removed":
            known.unlink()
        elif how == "replaced":
            os.replace(write(tmp_path / "new"), known)
        else:
            known.rename(tmp_path / "moved")
            known.symlink_to(tmp_path / "moved")
        mapping = cache_mapping(store)
        assert sha256(WEIGHTS) not in mapping
        assert list(mapping) == []
        assert len(mapping) == 0


def test_asking_for_one_key_reads_no_other_row(store: Store, known: Path) -> None:
    """What makes it fit for a million rows: both questions are answered by an index."""
    assert known.exists()
    index = store.volume.index
    seen: list[str] = []
    index._connected().set_trace_callback(seen.append)  # noqa: SLF001
    assert "0" * 64 not in cache_mapping(store)
    index._connected().set_trace_callback(None)  # noqa: SLF001
    questions = [text for text in seen if text.startswith("SELECT")]
    assert questions
    for text in questions:
        plan = " ".join(row[3] for row in index.select(f"EXPLAIN QUERY PLAN {text}"))
        assert "SCAN" not in plan, plan


def test_going_through_it_sorts_nothing_but_ties(store: Store) -> None:
    """Rows come in the order of an index: a million need no more memory than a thousand."""
    seen: list[str] = []
    index = store.volume.index

    def record(sql: str, *values: object) -> Iterator[tuple[object, ...]]:
        seen.append(sql)
        return iter(index.select(sql, *values))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "stream", record)
        assert len(cache_mapping(store)) == 0
    (sql,) = seen
    plan = [row[3] for row in index.select(f"EXPLAIN QUERY PLAN {sql}")]
    assert "INDEX contents_sha256" in plan[0]
    assert "USE TEMP B-TREE FOR ORDER BY" not in plan


def test_the_facade_gives_it(tmp_path: Path) -> None:
    with SmartCache(tmp_path / "store") as cache:
        path = put(cache.store, WEIGHTS)
        assert dict(cache.cache_mapping()) == {sha256(WEIGHTS): path}
        assert isinstance(cache.cache_mapping(), Mapping)
        assert repr(cache.store) in repr(cache.cache_mapping())


class TestExport:
    def test_has_paths_and_sizes(self, store: Store, known: Path, tmp_path: Path) -> None:
        blob = put(store, OTHER)
        assert cache_mapping(store).export_json(tmp_path / "known.json") == 2
        assert json.loads((tmp_path / "known.json").read_bytes()) == {
            "format": 1,
            "files": {
                sha256(OTHER): {"path": str(blob), "size": len(OTHER)},
                sha256(WEIGHTS): {"path": str(known), "size": len(WEIGHTS)},
            },
        }

    def test_to_an_open_file(self, store: Store) -> None:
        text = io.StringIO()
        cache_mapping(store).export_json(text)
        assert json.loads(text.getvalue()) == {"format": 1, "files": {}}

    def test_replaces_a_file_by_a_new_one(self, store: Store, tmp_path: Path) -> None:
        path = tmp_path / "known.json"
        path.write_bytes(b"old")
        os.link(path, tmp_path / "another name")
        cache_mapping(store).export_json(str(path))
        assert (tmp_path / "another name").read_bytes() == b"old"
        assert json.loads(path.read_bytes())["format"] == 1

    def test_one_that_fails_leaves_the_old_file_and_nothing_else(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, WEIGHTS)
        (tmp_path / "out").mkdir()
        path = tmp_path / "out" / "known.json"
        path.write_bytes(b"old")

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            cache_mapping(store).export_json(path)
        monkeypatch.undo()
        with pytest.raises(FileNotFoundError):
            cache_mapping(store).export_json(tmp_path / "nowhere" / "known.json")
        assert [each.name for each in path.parent.iterdir()] == ["known.json"]
        assert path.read_bytes() == b"old"


class TestImport:
    @pytest.fixture
    def named(self, tmp_path: Path, folder: Path) -> Named:
        """Writes a document to a file beside the folder of models."""
        del folder

        def write_document(document: object) -> Path:
            path = tmp_path / "known.json"
            path.write_text(json.dumps(document))
            return path

        return write_document

    @pytest.mark.parametrize("form", ["plain", "exported", "without size"])
    def test_what_it_names_is_known_from_now_on(
        self, form: str, store: Store, folder: Path, named: Named, pass_time: PassTime
    ) -> None:
        path = write(folder / "a.safetensors")
        pass_time(60)
        entry: dict[str, object] = {"path": str(path), "size": len(WEIGHTS)}
        if form == "without size":
            del entry["size"]
        document: object = {"format": 1, "files": {sha256(WEIGHTS): entry}}
        if form == "plain":
            document = {sha256(WEIGHTS).upper(): str(path)}
        watch = Watch()
        found = import_mapping(store, named(document), progress=watch)
        expected = [(sha256(WEIGHTS), path, len(WEIGHTS))]
        assert [(each.sha256, each.path, each.size) for each in found.files] == expected
        assert found.refused == ()
        assert dict(cache_mapping(store)) == {sha256(WEIGHTS): path}
        assert [each.path for each in store.sightings(len(WEIGHTS))] == [path]
        assert (watch.done, watch.total) == (len(WEIGHTS), len(WEIGHTS))

    def test_its_folder_is_merely_discovered(
        self, store: Store, folder: Path, named: Named, tmp_path: Path
    ) -> None:
        """A symlink stands for its file."""
        path = write(folder / "deep" / "a.safetensors")
        (tmp_path / "link").symlink_to(path)
        before, inode = snapshot(folder), inode_of(path)
        imported = import_mapping(store, named({sha256(WEIGHTS): str(tmp_path / "link")}))
        assert [each.path for each in imported.files] == [path]
        (found,) = store.folders()
        assert (found.path, found.is_given, found.walked_at) == (path.parent, False, None)
        assert (found.files, found.size) == (1, len(WEIGHTS))
        assert snapshot(folder) == before
        assert inode_of(path) == inode
        assert store.history() == []

    def test_in_a_folder_that_is_known_already(
        self, store: Store, folder: Path, named: Named
    ) -> None:
        write(folder / "old.safetensors", OTHER)
        store.add_folder(folder)
        see(store, folder)
        paths = [write(folder / name) for name in ("new.gguf", "deep/er/new.gguf")]
        for path in paths:
            import_mapping(store, named({sha256(WEIGHTS): str(path)}))
        (found,) = store.folders()
        assert (found.path, found.is_given, found.files) == (folder, True, 3)
        assert {each.path for each in store.sightings(len(WEIGHTS))} == set(paths)

    def test_each_file_is_hashed_once(
        self,
        store: Store,
        folder: Path,
        named: Named,
        pass_time: PassTime,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        document = named({sha256(WEIGHTS): str(write(folder / "a.safetensors"))})
        pass_time(60)
        import_mapping(store, document)

        def read(*_: object, **__: object) -> None:
            pytest.fail("it was hashed again")

        monkeypatch.setattr(store_memos, "hash_file", read)
        assert len(import_mapping(store, document).files) == 1

    def test_what_is_wrong_is_refused_with_its_reason(
        self, store: Store, folder: Path, named: Named
    ) -> None:
        right = write(folder / "right")
        wrong = write(folder / "wrong", OTHER)
        os.mkfifo(folder / "fifo")
        wanted = {
            "0" * 64: (str(wrong), f"its sha256 is {sha256(OTHER)}"),
            "1" * 64: (str(folder / "missing"), "no such file or directory"),
            "2" * 64: (str(folder), "it is not a regular file"),
            "3" * 64: (str(folder / "fifo"), "it is not a regular file"),
            "4" * 64: ({"path": str(right), "size": 5}, "it has 100000 bytes, not 5"),
            "5" * 64: ("relative/path", "its path is not absolute"),
            "6" * 64: (HOSTILE, "its path is not absolute"),
            "7" * 64: (["list"], "its path is not absolute"),
            "8" * 64: (f"{right}\0", "its path is not absolute"),
            "9" * 64: ({"path": str(right), "size": True}, "its size is not a number of bytes"),
            "a" * 64: ({"path": str(right), "size": -1}, "its size is not a number of bytes"),
            "b" * 64: ("/\ud800", "its path cannot exist here"),
            "c" * 63: (str(right), "its key is not a sha256"),
            sha256(WEIGHTS): (str(right), ""),
        }
        before = snapshot(folder)
        found = import_mapping(store, named({key: value for key, (value, _) in wanted.items()}))
        assert [each.path for each in found.files] == [right]
        assert {each.sha256: each.reason for each in found.refused} == {
            key: reason for key, (_, reason) in wanted.items() if reason
        }
        assert snapshot(folder) == before

    def test_an_unreadable_file_is_refused(self, store: Store, folder: Path, named: Named) -> None:
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        path = write(folder / "a", mode=0)
        (refused,) = import_mapping(store, named({sha256(WEIGHTS): str(path)})).refused
        assert refused.reason == "permission denied"

    def test_what_is_no_mapping_is_one_clear_error_and_a_huge_one_is_not_read(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "known.json"
        for text in (
            b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe\xfd", b'{"format": 2, "files": {}}',
            b'{"format": 1}', b'{"format": 1, "files": []}', b"[" * 100_000, b"1" * 5000,
        ):  # fmt: skip
            path.write_bytes(text)
            with pytest.raises(HubError, match=r"known\.json") as caught:
                import_mapping(store, path)
            assert caught.value.hint
        monkeypatch.setattr(mapping_module, "_MOST", 100)
        path.write_bytes(b"{}" + b" " * 98)
        import_mapping(store, path)
        path.write_bytes(b"{}" + b" " * 99)
        with pytest.raises(HubError, match="too large"):
            import_mapping(store, path)

    def test_a_blob_of_the_store_gets_the_alias(self, store: Store, named: Named) -> None:
        path = store.path_of(store.put_stream([WEIGHTS]).digest)
        document = named({sha256(WEIGHTS): str(path)})
        assert len(import_mapping(store, document).files) == 1
        assert dict(cache_mapping(store)) == {sha256(WEIGHTS): path}
        assert store.folders() == []

    def test_another_file_of_the_store_is_refused(self, store: Store, named: Named) -> None:
        path = store.root / "format"
        document = named({sha256(path.read_bytes()): str(path)})
        (refused,) = import_mapping(store, document).refused
        assert "not a blob" in refused.reason
        assert store.folders() == []


@contextmanager
def world() -> Iterator[Path]:
    """A directory in which every file is a minute old: what is hashed there is remembered."""
    real = time.time_ns
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: real() + 60_000_000_000)
        yield Path(os.path.realpath(name))


CONTENTS = [random.Random(n).randbytes(100 + n) for n in range(4)]
Step = tuple[Literal["put", "put without", "write", "hash", "append", "remove", "forget"], int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put without", "write", "hash", "append", "remove", "forget"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=12,
)


class Model:
    """A store, a folder, and what a mapping of them has to be, in plain dictionaries."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.blobs: set[bytes] = set()
        self.known: set[bytes] = set()
        """Contents whose sha256 was computed: that is true for ever."""
        self.files: dict[Path, tuple[bytes, bool]] = {}
        folder.mkdir()

    def take(self, verb: str, n: int, m: int) -> None:
        data, path = CONTENTS[n], self.folder / f"{m}.gguf"
        digest = self.store.put_stream([data]).digest if verb.startswith("put") else ""
        if verb == "put":
            self.store.put_stream([data], algorithms=["sha256"])
            self.known.add(data)
        if digest:
            self.blobs.add(data)
        if verb == "forget" and data in self.blobs:
            found = self.store.put_stream([data]).digest
            self.store.remove(found)
            self.blobs.remove(data)
        if verb == "write" and path not in self.files:
            path.write_bytes(data)
            self.files[path] = data, False
            see(self.store, self.folder)
        if path not in self.files:
            return
        if verb == "hash":
            self.store.digest_of(path, ["sha256"])
            self.files[path] = self.files[path][0], True
            self.known.add(self.files[path][0])
            self.known.add(self.files[path][0])
            self.known.add(self.files[path][0])
            self.known.add(self.files[path][0])
            self.known.add(self.files[path][0])
        elif verb == "append":
            path.write_bytes(self.files[path][0] + b"!")
            self.files[path] = self.files[path][0] + b"!", False
            see(self.store, self.folder)
        elif verb == "remove":
            path.unlink()
            del self.files[path]

    def expected(self) -> dict[str, Path]:
        found = {
            sha256(data): path
            for path, (data, is_hashed) in sorted(self.files.items())[::-1]
            if is_hashed
        }
        for data in self.blobs & self.known:
            blob = self.store.find("sha256", sha256(data))
            assert blob is not None
            found[sha256(data)] = self.store.path_of(blob.digest)
        return found


@given(steps=STEPS)
def test_it_equals_a_plain_dictionary(steps: list[Step]) -> None:
    with world() as root, Store(root / "store") as store:
        model = Model(store, root / "models")
        mapping = cache_mapping(store)
        for step in steps:
            model.take(*step)
        expected = model.expected()
        assert dict(mapping) == expected
        assert list(mapping) == sorted(expected)
        assert len(mapping) == len(expected)
        for data in CONTENTS:
            key = sha256(data)
            assert mapping.get(key.upper()) == expected.get(key)
        for key, path in mapping.items():
            assert sha256(path.read_bytes()) == key


@given(steps=STEPS)
def test_what_is_exported_and_imported_is_the_same(steps: list[Step]) -> None:
    with world() as root, Store(root / "store") as store, Store(root / "second") as second:
        model = Model(store, root / "models")
        for step in steps:
            model.take(*step)
        before = snapshot(root / "models")
        cache_mapping(store).export_json(root / "known.json")
        found = import_mapping(second, root / "known.json")
        assert found.refused == ()
        assert dict(cache_mapping(second)) == dict(cache_mapping(store)) == model.expected()
        assert {each.sha256: each.path for each in found.files} == model.expected()
        assert snapshot(root / "models") == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([sha256(WEIGHTS), "0" * 64, "format", "files", "", "A" * 64])
PATHS = st.sampled_from(["/", "", ".", "/dev/null", "/dev/zero", "/proc/self/mem", "/\0", HOSTILE])


@given(
    document=JSON
    | st.dictionaries(KEYS, JSON | PATHS)
    | st.builds(
        lambda files: {"format": 1, "files": files},
        st.dictionaries(
            KEYS | st.text(),
            JSON | PATHS | st.fixed_dictionaries({"path": PATHS | JSON, "size": JSON}),
        ),
    )
)
def test_no_document_does_any_harm(document: object) -> None:
    with world() as root, Store(root / "store") as store:
        (root / "known.json").write_text(json.dumps(document))
        try:
            found = import_mapping(store, root / "known.json")
        except HubError:
            return
        assert found.files == ()
        assert store.folders() == []
