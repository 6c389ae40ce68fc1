"""A real store in real directories, driven at random and compared with a plain model.

The model is a dict of what is at the user's paths, and what each was before the store changed it.
Other programs act too: they edit in place (as root does in spite of 0444), delete, move, link and
chmod files, rename folders, damage blobs and lose the index; and any operation may be killed at any
of its points, with something else happening before the recovery. After every step:

- every path of the user's has the bytes, mode and time that the user, or the store at the user's
  request, gave it last, and shares its inode only with paths it was linked with;
- a file under `blobs/` has the bytes its name says, or they are not believed; it is read-only
  unless somebody else made it writable;
- the figures of the store are those that the links of the user's paths give;
- what is pinned is there, and nothing of ours lies beside files or in `tmp/`;
- what was undone is exactly as before, unless the user has changed it since.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from smartcache.errors import (
    BlobInUseError,
    BlobNotFoundError,
    DamagedBlobError,
    NothingToUndoError,
    SmartcacheError,
)
from smartcache.store import DEFAULT_PIN, KINDS, Kind
from smartcache.store import link as linking
from smartcache.store.hashes import believed
from smartcache.store.journal import Change
from smartcache.store.layout import Pool
from smartcache.store.store import Store
from tests.store.files import (
    adopt,
    allocated,
    dedup,
    digest_of,
    edit,
    edit_with_time_set_back,
    hidden,
    inode_of,
    kill,
    link_count,
    write,
)

if sys.platform == "win32":
    pytest.skip("POSIX files", allow_module_level=True)

SIZES = (1, 4096, 66_000, 70_000)
CONTENTS = {digest_of(data): data for n in SIZES for data in [random.Random(n).randbytes(n)]}
NAMES = ("a.safetensors", "b.safetensors", "c.gguf", "config.json", "sub/d.safetensors", "sub/e.pt")
FAR = ("x.safetensors", "y.safetensors")
"""Names on the second filesystem."""
SOAK_FACTOR = 20
STEPS = 40

contents = st.sampled_from(sorted(CONTENTS))
picks = st.integers(0, 11)
"""Which of the things that are there; any content or name where nothing is there."""
several = st.lists(picks, min_size=1, max_size=4)
modes = st.sampled_from([0o644, 0o600, 0o755, 0o444])
pins = st.sampled_from([DEFAULT_PIN, "mine"])
Label = tuple[object, ...]
Key = tuple[int, int]


@dataclass
class UserFile:
    """What is at a path of the user's; paths may share an inode only if their labels are equal."""

    data: bytes
    mode: int
    mtime_ns: int
    label: Label
    serial: int
    """Another one as soon as anybody but the store changes it."""
    was: Label = ()
    """Its label before its inode became a blob, or it became a link of one."""


@dataclass
class Model:
    files: dict[Path, UserFile] = field(default_factory=dict)
    rows: dict[int, Change] = field(default_factory=dict)
    """What can be undone."""
    before: dict[int, UserFile] = field(default_factory=dict)
    """What was at the path of a row; of what the store has put at a free path: that."""
    made: dict[Path, UserFile] = field(default_factory=dict)
    """What the store has put at a path last."""
    pins: set[tuple[str, str]] = field(default_factory=set)
    tampered: set[tuple[Path, str]] = field(default_factory=set)
    """Blobs, by pool and digest, that somebody else has damaged or removed."""
    loosened: set[Key] = field(default_factory=set)
    """Inodes that somebody else has made writable."""
    orphaned: set[str] = field(default_factory=set)
    """Blobs whose name was taken from their links."""


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, near: Path, far: Path, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=near))
        self.far = Path(tempfile.mkdtemp(dir=far))
        self.folder = self.directory / "files"
        (self.folder / "sub").mkdir(parents=True)
        (self.far / "files").mkdir()
        self.pass_time = pass_time
        self.store = Store(self.directory / "store")
        self.store.put_stream([b"?"])
        self.model = Model()
        self.known = {**CONTENTS, digest_of(b"?"): b"?"}
        self.numbers = itertools.count()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.eject()
        finally:
            self.store.close()
            shutil.rmtree(self.directory)
            shutil.rmtree(self.far)

    @initialize(first=contents, second=contents, has_pool=st.booleans(), chosen=several)
    def begin_with_some_equal_files(
        self, first: str, second: str, has_pool: bool, chosen: list[int]
    ) -> None:
        if has_pool:
            self.store.add_pool(self.far / "pool")
        for number, digest in enumerate((first, first, second, first, second, first)):
            self.somebody_writes_a_new_file(number, digest, 0o644)
        self.time_passes(4000)
        self.dedup(chosen, exchange=True)

    # the store's verbs

    @rule(chosen=several, exchange=st.booleans())
    def dedup(self, chosen: list[int], exchange: bool) -> None:
        for each in (dedup if exchange else adopt)(self.store, *self.some_files(chosen)):
            if each.outcome == "skipped":
                assert isinstance(each.error, SmartcacheError | FileNotFoundError), each.error
                continue
            file = self.model.files[each.path]
            assert file.data == self.known[each.digest]
            blob = self.pool_at(each.path).stat(each.digest)
            assert blob is not None
            assert (blob.st_ino == inode_of(each.path)) == (each.outcome != "duplicate")
            self.arrived(each.digest)
        self.settle()

    @rule(
        blob=picks, pick=picks, kind=st.sampled_from([*KINDS, "hardlink"]),
        overwrite=st.sampled_from([False, False, True]), whole=st.booleans(),
    )  # fmt: skip
    def place(self, blob: int, pick: int, kind: Kind, overwrite: bool, whole: bool) -> None:
        digest = self.a_blob(blob)
        path = self.a_file(pick) if overwrite else self.a_free_path(pick)
        with suppress(SmartcacheError, FileNotFoundError):
            self.store.place(digest, path, kind=kind, overwrite=overwrite, whole=whole)
            assert path.read_bytes() == self.known[digest]
        self.settle()

    @rule(digest=contents, pick=st.one_of(st.none(), picks))
    def put(self, digest: str, pick: int | None) -> None:
        if pick is None:
            data = self.known[digest]
            found = self.store.put_stream([data[:7], data[7:]], size=len(data)).digest
            assert found == digest
            self.arrived(digest)
        elif (path := self.a_file(pick)) in self.model.files:
            digest = self.store.put_file(path).digest
            assert self.model.files[path].data == self.known[digest]
            self.arrived(digest)

    @rule(which=st.sampled_from(["all", "all", "last", "one", "paths"]), chosen=several)
    def undo(self, which: str, chosen: list[int]) -> None:
        paths = self.some_files(chosen) if which == "paths" else []
        with suppress(NothingToUndoError, FileNotFoundError):
            self.run_undo(self.store, which, chosen)
        self.settle(apart=paths)
        blobs = {key_of(path) for _, _, path in self.blobs()}
        assert not [path for path in paths if os.path.lexists(path) and key_of(path) in blobs]
        for row in self.model.rows.values() if which == "all" else ():
            assert not self.is_untouched(row), row

    def run_undo(self, store: Store, which: str, chosen: list[int]) -> None:
        if which == "paths":
            plan = store.plan_undo(paths=self.some_files(chosen))
        elif which == "one" and (history := store.history()):
            plan = store.plan_undo([history[chosen[0] % len(history)].id])
        else:
            plan = store.plan_undo(last=which == "last")
        plan.execute()

    @rule(
        max_size=st.sampled_from([None, None, 0, 100_000]),
        unused_for=st.sampled_from([None, None, timedelta(0), timedelta(days=1)]),
        with_bad=st.booleans(),
    )
    def prune(self, max_size: int | None, unused_for: timedelta | None, with_bad: bool) -> None:
        """What is said to be freed are the blocks of the inodes whose last name went."""
        opened: dict[tuple[Pool, int], int] = {}
        for pool in self.store.pools():
            for path in pool.root.glob("[bt]*/**/*"):
                if path.is_file() and (pool, inode_of(path)) not in opened:
                    opened[pool, inode_of(path)] = os.open(path, os.O_RDONLY)
        plan = self.store.plan_prune(max_size=max_size, unused_for=unused_for, with_bad=with_bad)
        result = plan.execute()
        stats = [os.fstat(descriptor) for descriptor in opened.values()]
        for descriptor in opened.values():
            os.close(descriptor)
        assert result.freed_size == sum(s.st_blocks * 512 for s in stats if s.st_nlink == 0)
        assert result.kept == 0
        if max_size is None and unused_for is None:
            assert 1 not in [link_count(path) for _, _, path in self.blobs()]
        self.settle()

    @rule(what=st.sampled_from(["pin", "pin", "unpin", "remove"]), blob=picks, name=pins)
    def keep_or_not(self, what: str, blob: int, name: str) -> None:
        digest, held = self.a_blob(blob), self.model.pins
        with suppress(BlobNotFoundError, BlobInUseError, DamagedBlobError):
            if what == "pin":
                self.store.pin(digest, name)
                held.add((digest, name))
            elif what == "unpin":
                assert bool(self.store.unpin(digest, name)) == ((digest, name) in held)
                held.discard((digest, name))
            else:
                self.store.remove(digest)
                assert digest not in {pinned for pinned, _ in held}
                self.model.orphaned.add(digest)

    @rule(what=st.sampled_from(["open", "hash", "verify", "verify full", "repair", "reopen"]),
          pick=picks)  # fmt: skip
    def look(self, what: str, pick: int) -> None:
        if what == "open":
            digest = self.a_blob(pick)
            try:
                with self.store.open(digest) as file:
                    assert file.read() == self.known[digest]
            except (DamagedBlobError, BlobNotFoundError):
                is_there = any(digest == each for _, each, _ in self.blobs())
                assert self.is_tampered(digest) or not is_there
        elif what == "hash":
            path = self.a_file(pick)
            if path in self.model.files:
                data = self.model.files[path].data
                assert self.store.digest_of(path).digest == digest_of(data)
        elif what == "reopen":
            self.store.close()
            self.store = Store(self.store.root)
        else:
            report = self.store.verify(full=what == "verify full", repair=what == "repair")
            # What is in `bad/` may have been healed and pruned since.
            bad = {path.name[:64] for pool in self.store.pools() for path in pool.bad.iterdir()}
            assert all(self.is_tampered(each) or each in bad for each in report.damaged)
            assert report.stray == []
            for digest in report.healed:
                self.arrived(digest)
            for _, digest, path in self.blobs():
                assert path.read_bytes() == self.known[digest]

    # killed in it

    @rule(
        what=st.sampled_from(["dedup", "adopt", "place", "over", "put", "undo", "undo paths",
                              "prune", "remove", "pin", "unpin"]),
        chosen=several, blob=picks, nth=st.integers(1, 16),
        between=st.sampled_from(["", "", "edits", "deletes", "moves", "renames a folder"]),
    )  # fmt: skip
    def killed(self, what: str, chosen: list[int], blob: int, nth: int, between: str) -> None:
        """Every name shows the right bytes at once; recovery loses nothing done since."""
        digest, paths, free = self.a_blob(blob), self.some_files(chosen), self.a_free_path(blob)
        acts: dict[str, Callable[[Store], object]] = {
            "dedup": lambda store: dedup(store, *paths),
            "adopt": lambda store: adopt(store, *paths),
            "place": lambda store: store.place(digest, free, whole=True),
            "over": lambda store: store.place(digest, paths[0], overwrite=True, whole=True),
            "put": lambda store: store.put_stream([self.known[digest]]),
            "undo": lambda store: self.run_undo(store, "all", chosen),
            "undo paths": lambda store: self.run_undo(store, "paths", chosen),
            "prune": lambda store: store.plan_prune(with_bad=True).execute(),
            "remove": lambda store: store.remove(digest),
            "pin": lambda store: store.pin(digest, "mine"),
            "unpin": lambda store: store.unpin(digest, "mine"),
        }
        placed = {"place": free, "over": paths[0]}.get(what)
        old = key_of(placed) if placed and os.path.lexists(placed) else None

        def act() -> None:
            with suppress(SmartcacheError, FileNotFoundError):
                acts[what](self.store)

        kill(act, nth=nth)
        before = self.copies()
        self.model.orphaned |= {digest} if what == "remove" else set()
        if placed and os.path.lexists(placed) and key_of(placed) != old:
            self.take(placed, digest)
        for row in reversed(self.model.rows.values()) if what == "undo" else ():
            self.forget_if_taken(row)
        for path, file in self.model.files.items():
            assert path.read_bytes() == file.data
        self.recover(between, chosen[0], blob)
        for path, file in self.model.files.items() if what.startswith("undo") else ():
            rows = [row for row in self.model.rows.values() if row.path == path]
            if file.label[0] == "blob" and not any(map(self.is_untouched, rows)):
                self.refresh(path)  # undone, and still to be written down
        for name in self.hidden() if what == "undo paths" else ():
            name.unlink()  # of a file without an entry a copy may be left, whole
        pinned = any((pool.pins / "mine" / digest).exists() for pool in self.store.pools())
        (self.model.pins.add if pinned else self.model.pins.discard)((digest, "mine"))
        apart = [path for path in paths if what == "undo paths" and not self.is_link(path)]
        self.settle(before, placed=placed, apart=apart)

    def recover(self, between: str, old: int, new: int) -> None:
        """Let something happen, and then the recovery."""
        if not between:
            self.look("open", old)
        else:
            self.somebody(between, old, new, 0o644)
        left = self.store.recover()
        if between == "renames a folder":  # nothing in it was finished or lost
            self.somebody(between, old, new, 0o644)
            left = self.store.recover()
        assert left == []
        self.store.end_batch()
        for path, file in self.model.files.items() if between in ("edits", "moves") else ():
            self.refresh(path)  # whose mode it was nobody could see, nor whether it was linked
            if self.pool_of(path, digest := digest_of(file.data)) == key_of(path):
                file.label = ("blob", digest)

    # what other programs do

    @rule(number=picks, digest=contents, mode=modes)
    def somebody_writes_a_new_file(self, number: int, digest: str, mode: int) -> None:
        """Beside it and by a rename, as programs do that care."""
        path = self.names()[number % len(self.names())]
        new = path.parent / "new"
        os.replace(write(new, self.known[digest], mode=mode), path)
        self.model.files[path] = self.as_it_is(path, self.known[digest], self.own_label())

    @rule(
        what=st.sampled_from(["edits", "edits", "edits secretly", "deletes", "deletes", "moves",
                              "links", "chmods", "renames a folder"]),
        old=picks, new=picks, mode=modes,
    )  # fmt: skip
    def somebody(self, what: str, old: int, new: int, mode: int) -> None:
        path, files = self.a_file(old), self.model.files
        if what == "renames a folder":
            self.rename_folder()
        elif path not in files:
            return
        elif what.startswith("edits"):
            self.edit(path, is_secret=what == "edits secretly")
        elif what == "deletes":
            path.unlink()
            del files[path]
        elif what == "moves":
            self.move(path, self.names()[new % len(self.names())])
        elif what == "links":
            self.link(path, self.a_free_path(new))
        else:
            path.chmod(mode)
            self.model.loosened.add(key_of(path))
            for each in self.sharing(path):
                files[each].mode, files[each].serial = mode, next(self.numbers)

    def edit(self, path: Path, *, is_secret: bool = False) -> None:
        """Write in place, to be seen by the change time at least."""
        key, then, text = key_of(path), path.stat().st_ctime_ns, f"edit {next(self.numbers)}"
        (edit_with_time_set_back if is_secret else edit)(path, text.encode())
        st_ = path.stat()
        while st_.st_ctime_ns == then:
            os.utime(path, ns=(st_.st_atime_ns, st_.st_mtime_ns))
            st_ = path.stat()
        data = path.read_bytes()
        self.known[digest_of(data)] = data
        for each in self.sharing(path):
            file = self.model.files[each]
            file.data, file.mtime_ns, file.serial = data, st_.st_mtime_ns, next(self.numbers)
        blobs = [(pool.root, digest) for pool, digest, blob in self.blobs() if key_of(blob) == key]
        self.model.tampered.update(blobs)

    def rename_folder(self) -> None:
        files, one, other = self.model.files, self.folder / "sub", self.folder / "renamed"
        source, target = (one, other) if one.exists() else (other, one)
        source.rename(target)
        for each in [each for each in files if each.parent == source]:
            files[target / each.name] = files.pop(each)

    def link(self, source: Path, target: Path) -> None:
        is_free = target not in self.model.files
        if is_free and target.parent.stat().st_dev == source.stat().st_dev:
            os.link(source, target)
            file = replace(self.model.files[source], serial=next(self.numbers))
            self.model.files[target] = file

    def move(self, source: Path, target: Path) -> None:
        files = self.model.files
        if source.parent.stat().st_dev != target.parent.stat().st_dev:
            target.unlink(missing_ok=True)
            shutil.copy2(source, target)
            source.unlink()
            files[target] = self.as_it_is(target, files.pop(source).data, self.own_label())
        elif not (target.exists() and target.samefile(source)):  # then rename(2) does nothing
            os.rename(source, target)
            files[target] = files.pop(source)

    @rule(what=st.sampled_from(["edits a blob", "deletes a blob", "removes the index"]), blob=picks)
    def somebody_harms_the_store(self, what: str, blob: int) -> None:
        there = self.blobs()
        if what == "removes the index":
            self.store.close()
            for path in self.store.root.glob("index.sqlite3*"):
                path.unlink()
            self.store = Store(self.store.root)
        elif there:
            pool, digest, path = there[blob % len(there)]
            if what == "edits a blob":
                self.edit(path)
            else:
                path.unlink()
                self.model.tampered.add((pool.root, digest))
                self.model.orphaned.add(digest)

    @rule(seconds=st.sampled_from([3, 90, 4000]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    # what must be true

    @invariant()
    def files_of_the_user_are_as_the_model_says(self) -> None:
        assert self.hidden() == []
        found = {path for folder in (self.folder, self.far / "files")
                 for path in folder.rglob("*") if not path.is_dir()}  # fmt: skip
        assert found == set(self.model.files)
        labels: dict[Key, Label] = {}
        for path, file in self.model.files.items():
            st_ = os.lstat(path)
            assert path.read_bytes() == file.data
            if key_of(path) in self.model.loosened and st_.st_mode & 0o777 == file.mode & 0o555:
                self.refresh(path)  # the store has made its blob read-only again
            assert (st_.st_mode & 0o7777, st_.st_mtime_ns) == (file.mode, file.mtime_ns), path
            assert labels.setdefault(key_of(path), file.label) == file.label, path

    @invariant()
    def blobs_are_whole_or_not_believed(self) -> None:
        for pool, digest, path in self.blobs():
            st_ = path.stat()
            assert not st_.st_mode & 0o222 or key_of(path) in self.model.loosened
            if path.read_bytes() != self.known[digest]:
                assert (pool.root, digest) in self.model.tampered
                known = self.store.catalog.known(pool.filesystem, [st_.st_ino])
                assert believed(known.get(st_.st_ino), st_, self.store.boot) != digest

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        pinned = {(digest, name) for name, digests in self.store.pins().items()
                  for digest in digests}  # fmt: skip
        assert pinned == self.model.pins
        there = {digest for _, digest, _ in self.blobs()}
        for digest, _ in pinned:
            assert digest in there or self.is_tampered(digest)

    @invariant()
    def figures_are_those_of_the_links(self) -> None:
        if self.model.tampered:
            return  # one inode may have the names of two blobs
        pools, there = self.store.pools(), [path for _, _, path in self.blobs()]
        bad = [path for pool in pools for path in pool.bad.iterdir()]
        pinned = {key_of(path) for pool in pools for path in pool.pins.glob("*/*")}
        names = Counter(map(key_of, (*self.model.files, *bad)))
        blobs = [(key_of(path), names[key_of(path)], path.stat().st_size, allocated(path))
                 for path in there]  # fmt: skip
        only = [(key, blocks) for key, count, _, blocks in blobs if not count]
        kept = sum(blocks for key, blocks in only if key in pinned)
        usage = self.store.usage()
        assert usage.blobs == len(blobs)
        assert usage.physical == sum(blocks for *_, blocks in blobs)
        assert usage.logical == sum(size * max(1, count) for _, count, size, _ in blobs)
        assert usage.saved == sum(blocks * max(0, count - 1) for _, count, _, blocks in blobs)
        assert usage.only_smartcache == sum(blocks for _, blocks in only)
        assert (usage.pinned, usage.tmp) == (kept, 0)
        assert usage.reclaimable == usage.only_smartcache - kept
        assert usage.reclaimable == self.store.plan_prune().freed_size

    def eject(self) -> None:
        """In the end every file is the user's own again, and nothing is lost."""
        rows = [row for row in self.model.rows.values() if self.is_untouched(row)]
        results = self.store.plan_eject(drop_pinned=True).execute()
        assert "failed" not in {done.outcome for done in results}
        is_there = any(done.outcome == "renamed" for done in results)
        assert (self.store.root.exists(), self.far.joinpath("pool").exists()) in (
            (is_there, is_there),
            (is_there, False),
        )
        for path, file in self.model.files.items():
            assert path.read_bytes() == file.data
        for row in rows:
            if row.how in ("become", "exchange"):
                self.compare(row)

    # choosing

    def names(self) -> list[Path]:
        far = [self.far / "files" / name for name in FAR]
        near = [self.folder / name for name in NAMES]
        return [path for path in (*near, *far) if path.parent.exists()]

    def blobs(self) -> list[tuple[Pool, str, Path]]:
        return [(pool, digest, Path(pool.blob(digest))) for pool in self.store.pools()
                for digest in sorted(pool.digests())]  # fmt: skip

    def a_blob(self, pick: int) -> str:
        there = sorted({digest for _, digest, _ in self.blobs()}) or sorted(CONTENTS)
        return there[pick % len(there)]

    def a_file(self, pick: int) -> Path:
        there = sorted(self.model.files) or self.names()
        return there[pick % len(there)]

    def some_files(self, chosen: list[int]) -> list[Path]:
        return list(dict.fromkeys(map(self.a_file, chosen)))

    def a_free_path(self, pick: int) -> Path:
        free = [path for path in self.names() if path not in self.model.files] or self.names()
        return free[pick % len(free)]

    def hidden(self) -> list[Path]:
        folders = {path.parent for path in self.names()} | {self.folder / "renamed"}
        return [folder / name for folder in folders if folder.exists() for name in hidden(folder)]

    def pool_at(self, path: Path) -> Pool:
        device = os.lstat(path).st_dev
        return next(pool for pool in self.store.pools() if pool.device == device)

    def sharing(self, path: Path) -> list[Path]:
        """All names of an inode."""
        key = key_of(path)
        return [each for each in self.model.files if key_of(each) == key]

    # keeping the model

    def settle(
        self, before: dict[Path, UserFile] | None = None, *, placed: Path | None = None,
        apart: Iterable[Path] = (),
    ) -> None:  # fmt: skip
        """Take in what rows the journal has got and lost, if that is how it must be.

        `before`: what was at the paths before the operation. `placed`: taken in already. `apart`:
        paths that were to be independent files.
        """
        model, before = self.model, before or self.copies()
        rows = {row.id: row for row in self.store.journal.done(None)}
        for row in (rows[number] for number in rows if number not in model.rows):
            if row.how in ("become", "exchange"):
                model.before[row.id] = before[row.path]
                self.take_in_link(row)
            elif os.path.lexists(row.path):
                if row.path != placed:
                    self.take(row.path, row.digest)
                model.before[row.id] = model.made[row.path]
            else:  # deleted between the kill and the recovery
                model.before[row.id] = before.get(row.path) or model.made[row.path]
        gone = [row for number, row in model.rows.items() if number not in rows]
        for row in reversed(gone):
            self.forget_if_taken(row)
        for row in gone:
            self.take_in_undone(row, may_stay=row.path in apart)
        for path in apart:
            if path in model.files:
                self.refresh(path)
                if self.sharing(path) == [path]:
                    model.files[path].label, model.files[path].was = self.own_label(), ()
        model.rows = rows

    def take(self, path: Path, digest: str) -> None:
        """A blob was put at a path."""
        blob = self.pool_of(path, digest)
        label = ("blob", digest) if blob == key_of(path) else self.own_label()
        assert path.read_bytes() == self.known[digest]
        self.model.files[path] = self.as_it_is(path, self.known[digest], label)
        self.model.made[path] = replace(self.model.files[path])

    def is_link(self, path: Path) -> bool:
        """Say whether a file is a blob's inode still: the kill came first."""
        file = self.model.files.get(path)
        return file is not None and self.pool_of(path, digest_of(file.data)) == key_of(path)

    def pool_of(self, path: Path, digest: str) -> Key | None:
        with suppress(StopIteration):
            st_ = self.pool_at(path).stat(digest)
            return None if st_ is None else (st_.st_dev, st_.st_ino)
        return None

    def take_in_link(self, row: Change) -> None:
        """A file is a link of its blob now; if its own inode became it, its other names are too."""
        files, label = self.model.files, ("blob", row.digest)
        if row.path not in files or self.pool_of(row.path, row.digest) != key_of(row.path):
            return
        old = files[row.path].label
        for path in self.sharing(row.path):
            file = files[path]
            if path == row.path or (row.how == "become" and file.label == old):
                file.was, file.label = file.was if old == label else old, label
            self.refresh(path)
            assert not file.mode & 0o222

    def take_in_undone(self, row: Change, *, may_stay: bool) -> None:
        files, before = self.model.files, self.model.before[row.id]
        file = files.get(row.path)
        if file is None:
            lost = [path for path, each in files.items() if each.serial == before.serial]
            at = {each.path for each in self.model.rows.values()}
            for path in lost:
                assert path in at or self.pool_of(path, row.digest) != key_of(path)
            return
        if self.is_untouched(row):
            became_blob = row.how == "copy" and file.label[0] == "blob"  # it may stay as a file
            assert may_stay or became_blob or row.how in ("become", "exchange")
            if row.how in ("become", "exchange"):
                self.compare(row)
                for path in self.sharing(row.path):
                    each = files[path]
                    assert path == row.path or (each.was or each.label) == before.label
                    each.label, each.was = before.label, ()
        for path in self.sharing(row.path):
            self.refresh(path)

    def compare(self, row: Change) -> None:
        """It is exactly as before."""
        st_, before = os.lstat(row.path), self.model.before[row.id]
        found = (row.path.read_bytes(), st_.st_mode & 0o7777, st_.st_mtime_ns)
        assert found == (before.data, before.mode, before.mtime_ns), row

    def is_untouched(self, row: Change) -> bool:
        """Whether the user has done nothing to a file since, nor anybody to its blob's name.

        One that was written to through a link has two blobs, and only its bytes are sure; one that
        was read-only before may be taken for a link by an older row of its path.
        """
        file, before = self.model.files.get(row.path), self.model.before[row.id]
        is_it = file is not None and file.serial == before.serial
        had_blob = row.how in ("become", "exchange") and before.label[0] == "blob"
        is_odd = had_blob or not before.mode & 0o222
        return is_it and not is_odd and row.digest not in self.model.orphaned

    def forget_if_taken(self, row: Change) -> None:
        """Undo takes away what was put at a free path, if its bytes are in the store."""
        if row.how not in ("become", "exchange") and not os.path.lexists(row.path):
            file = self.model.files.pop(row.path, None)
            assert file is None or file.data == self.known[row.digest]

    def refresh(self, path: Path) -> None:
        st_, file = os.lstat(path), self.model.files[path]
        file.mode, file.mtime_ns = st_.st_mode & 0o7777, st_.st_mtime_ns

    def as_it_is(self, path: Path, data: bytes, label: Label) -> UserFile:
        st_ = os.lstat(path)
        return UserFile(data, st_.st_mode & 0o7777, st_.st_mtime_ns, label, next(self.numbers))

    def copies(self) -> dict[Path, UserFile]:
        return {path: replace(file) for path, file in self.model.files.items()}

    def own_label(self) -> Label:
        return "own", next(self.numbers)

    def is_tampered(self, digest: str) -> bool:
        return any(digest == each for _, each in self.model.tampered)

    def arrived(self, digest: str) -> None:
        """A blob was proven or brought: it is whole now."""
        whole = [pool.root for pool, each, path in self.blobs()
                 if each == digest and path.read_bytes() == self.known[digest]]  # fmt: skip
        assert whole
        self.model.tampered -= {(root, digest) for root in whole}


def key_of(path: Path) -> Key:
    st_ = os.lstat(path)
    return st_.st_dev, st_.st_ino


@pytest.mark.timeout(3600)  # what fails is shrunk for five minutes
@pytest.mark.parametrize(
    ("near", "far", "examples"),
    [("disk_path", "memory_path", 20), ("memory_path", "disk_path", 60)],
)
def test_the_store_agrees_with_a_plain_model(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, soak: bool,
    monkeypatch: pytest.MonkeyPatch, pass_time: Callable[[float], None], near: str, far: str,
    examples: int,
) -> None:  # fmt: skip
    """At home on the disk, and (faster) in memory, which gives inode numbers in another order."""
    caplog.set_level(logging.CRITICAL, "smartcache")
    monkeypatch.setattr(linking, "PAUSE", 0)  # for writers at the same time: there are none
    places: list[Path] = [request.getfixturevalue(name) for name in (near, far)]
    run_state_machine_as_test(
        lambda: StoreMachine(places[0], places[1], pass_time),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples * SOAK_FACTOR if soak else examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            # The same examples every day; `--soak` looks for new ones.
            derandomize=not soak,
            suppress_health_check=list(HealthCheck),
        ),
    )
