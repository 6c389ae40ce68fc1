"""A real store in a real directory, driven at random and compared with a plain model.

The model is a dict of the bytes at the user's paths, and what must be kept. Other programs act too:
they edit in place (as root does in spite of 0444), delete, rename, link and chmod files, damage
blobs and lose the index. After every step:

- a file under `blobs/` has the bytes its name says, or its row (or the lack of one) says that it
  must be hashed before use; it is read-only unless somebody else made it writable;
- every path of the user's has the bytes that the user, or the store at the user's request, put
  there last, and shares its inode only with paths it was linked with;
- what a pin or an owner holds is there;
- what `prune` reports as freed are the blocks of the inodes whose last link went.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

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
    BlobNotFoundError,
    DamagedBlobError,
    NothingToUndoError,
    PruneRefusedError,
    SmartcacheError,
)
from smartcache.store import DEFAULT_PIN, KINDS, Kind
from smartcache.store.changes.undo import UndoPlan
from smartcache.store.records import Owner
from smartcache.store.store import Store
from smartcache.store.upkeep.prune import REBUILT, PrunePlan
from tests.store.files import allocated, digest_of, edit, inode_of, mode_of, write

if sys.platform == "win32":
    pytest.skip("POSIX files", allow_module_level=True)

SIZES = (1, 4096, 65_536, 70_000, 204_800)
CONTENTS = {digest_of(data): data for n in SIZES for data in [random.Random(n).randbytes(n)]}
NAMES = ("a.safetensors", "b.safetensors", "c.gguf", "config.json", "sub/d.safetensors")
OWNER = "a drive"
SOAK_FACTOR = 20

contents = st.sampled_from(sorted(CONTENTS))
picks = st.integers(0, 9)
"""Which of the things that are there; any content or name where nothing is there."""
modes = st.sampled_from([0o644, 0o600, 0o755, 0o444])
pins = st.sampled_from([DEFAULT_PIN, "mine"])
Label = tuple[str, object]
T = TypeVar("T")


@dataclass
class UserFile:
    """What is at a path of the user's; paths may share an inode only if their labels are equal."""

    data: bytes
    label: Label


@dataclass
class Model:
    files: dict[Path, UserFile] = field(default_factory=dict)
    pins: set[tuple[str, str]] = field(default_factory=set)
    owned: set[str] = field(default_factory=set)
    tampered: set[str] = field(default_factory=set)
    """Blobs that somebody else has damaged or removed."""
    loosened: set[str] = field(default_factory=set)
    """Blobs that somebody else has made writable."""
    is_rebuilt: bool = False

    def held(self) -> set[str]:
        return {digest for digest, _ in self.pins} | self.owned


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=directory))
        self.folder = self.directory / "files"
        (self.folder / "sub").mkdir(parents=True)
        self.drive = self.directory / "drive"
        self.drive.mkdir()
        self.store = Store(self.directory / "store")
        self.model = Model()
        self.known = dict(CONTENTS)
        self.numbers = itertools.count()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.eject()
        finally:
            self.store.close()
            shutil.rmtree(self.directory)

    @initialize(first=contents, second=contents)
    def begin_with_some_equal_files(self, first: str, second: str) -> None:
        for number, digest in enumerate((first, first, second)):
            self.somebody_writes_a_new_file(number, digest, 0o644)
        self.put_stream(second, with_alias=True)

    # the store's verbs

    @rule(digest=contents, with_alias=st.booleans())
    def put_stream(self, digest: str, with_alias: bool) -> None:
        data = self.known[digest]
        blob = self.store.put_stream(
            [data[:7], data[7:]], size=len(data), algorithms=["sha256"] if with_alias else []
        )
        assert blob.digest == digest
        self.arrived(digest)

    @rule(pick=picks)
    def put_file(self, pick: int) -> None:
        path = self.a_file(pick)
        blob = self.attempt(lambda: self.store.put_file(path))
        if blob is not None:
            self.arrived(blob.digest)
            if path in self.model.files:
                assert self.model.files[path].data == self.known[blob.digest]

    @rule(chosen=st.lists(picks, min_size=1, max_size=3, unique=True))
    def adopt(self, chosen: list[int]) -> None:
        paths = list(dict.fromkeys(self.a_file(pick) for pick in chosen))
        for adoption in self.store.adopt_many(paths):
            if adoption.outcome == "skipped":
                assert isinstance(adoption.error, SmartcacheError | FileNotFoundError)
                continue
            self.arrived(adoption.digest)
            if adoption.path in self.model.files:
                assert self.model.files[adoption.path].data == self.known[adoption.digest]
            if adoption.outcome == "adopted":
                self.relabel(adoption.path, ("blob", adoption.digest))

    @rule(
        blob=picks,
        pick=picks,
        kind=st.sampled_from([*KINDS, "hardlink"]),
        overwrite=st.sampled_from([False, False, True]),
        whole=st.booleans(),
    )
    def place(self, blob: int, pick: int, kind: Kind, overwrite: bool, whole: bool) -> None:
        digest = self.a_blob(blob)
        path = self.a_file(pick) if overwrite else self.a_free_path(pick)
        before = inode_of(path) if os.path.lexists(path) else None
        link = self.attempt(
            lambda: self.store.place(digest, path, kind=kind, overwrite=overwrite, whole=whole)
        )
        if link is None:
            return
        assert path.read_bytes() == self.known[digest]
        if inode_of(path) == before:
            return  # it was there already
        self.forget_path(path)
        label = ("blob", digest) if link.kind == "hardlink" else self.own_label()
        self.model.files[path] = UserFile(self.known[digest], label)

    @rule(pick=picks, blob=picks, is_equal=st.booleans())
    def replace(self, pick: int, blob: int, is_equal: bool) -> None:
        path = self.a_file(pick)
        digest = self.a_blob(blob)
        if is_equal and path in self.model.files:
            digest = digest_of(self.model.files[path].data)
        result = self.attempt(lambda: self.store.replace(path, digest))
        if result is not None:
            assert self.model.files[path].data == self.known[digest]
            self.model.files[path].label = ("blob", digest)

    @rule(which=st.sampled_from(["last", "one", "all"]), choice=st.randoms(use_true_random=False))
    def undo(self, which: str, choice: random.Random) -> None:
        try:
            history = self.store.history()
            if which == "one" and history:
                plan = self.store.plan_undo([choice.choice(history).id])
            else:
                plan = self.store.plan_undo(last=which == "last")
        except NothingToUndoError:
            assert not history
            return
        self.execute(plan)

    def execute(self, plan: UndoPlan) -> None:
        changes = [done.change for done in plan.execute() if done.is_undone]
        for change in changes:
            if change.op == "place" and not os.path.lexists(change.path):
                if change.path in self.model.files:
                    # A name may go only if its bytes were not changed since, and are safe.
                    assert self.model.files[change.path].data == self.known[change.digest]
                self.forget_path(change.path)
        oldest = {change.path: change for change in changes}  # undone last first
        for path, change in oldest.items():
            file = self.model.files.get(path)
            if change.op in ("adopt", "replace") and file is not None:
                assert mode_of(path) == change.mode
                if file.data == self.known[change.digest]:
                    assert os.stat(path).st_mtime_ns == change.mtime_ns
                self.relabel(path, self.own_label())

    @rule(blob=picks)
    def remove(self, blob: int) -> None:
        digest = self.a_blob(blob)
        if self.is_done(lambda: self.store.remove(digest)):
            assert digest not in self.model.held()

    @rule(what=st.sampled_from(["pin", "unpin", "own", "disown", "drive"]), blob=picks, name=pins)
    def keep_or_not(self, what: str, blob: int, name: str) -> None:
        digest = self.a_blob(blob)
        owner = Owner(kind="folder", name=OWNER, path=self.drive)
        if what == "pin":
            if self.is_done(lambda: self.store.pin(digest, name)):
                self.model.pins.add((digest, name))
        elif what == "unpin":
            ended = self.attempt(lambda: self.store.unpin(digest, name))
            if ended is not None:
                assert bool(ended) == ((digest, name) in self.model.pins)
                self.model.pins.discard((digest, name))
        elif what == "own":
            if self.is_done(lambda: self.store.own(owner, [digest])):
                self.model.owned.add(digest)
        elif what == "disown":
            self.store.disown(Owner(kind="folder", name=OWNER))
            self.model.owned.clear()
        else:  # unplug or plug in
            away = self.directory / "drive, unplugged"
            source, target = (self.drive, away) if self.drive.exists() else (away, self.drive)
            source.rename(target)

    @rule(
        max_size=st.sampled_from([None, None, 0, 100_000]),
        unused_for=st.sampled_from([None, None, timedelta(0), timedelta(days=1)]),
        with_bad=st.booleans(),
        drop_away=st.booleans(),
    )
    def prune(
        self,
        max_size: int | None,
        unused_for: timedelta | None,
        with_bad: bool,
        drop_away: bool,
    ) -> None:
        if self.model.is_rebuilt:
            with pytest.raises(PruneRefusedError):
                self.store.plan_prune()
            self.store.confirm_links()
            self.model.is_rebuilt = False
        plan = self.store.plan_prune(
            max_size=max_size, unused_for=unused_for, with_bad=with_bad, drop_away=drop_away
        )
        if drop_away and not self.drive.exists():
            self.model.owned.clear()
        free = self.free_blobs()
        self.prune_measured(plan)
        if max_size is None and unused_for is None:
            assert not [path for path in free if path.exists() and not self.is_awaited(path.name)]

    def is_awaited(self, digest: str) -> bool:
        """Whether an owner on a drive that is away holds a blob: it is kept, to be safe."""
        blob = self.store.get(digest)
        return any(liveness == "away" for _, liveness in self.store.holders_of(blob))

    def prune_measured(self, plan: PrunePlan) -> None:
        opened: dict[int, int] = {}
        for path in self.store.root.glob("[btb]*/**/*"):
            if path.is_file() and inode_of(path) not in opened:
                opened[inode_of(path)] = os.open(path, os.O_RDONLY)
        result = plan.execute()
        stats = [os.fstat(descriptor) for descriptor in opened.values()]
        for descriptor in opened.values():
            os.close(descriptor)
        assert result.freed_size == sum(s.st_blocks * 512 for s in stats if s.st_nlink == 0)
        assert result.kept == 0
        assert result.freed_size >= plan.freed_size  # two names in bad/ may be one inode

    def free_blobs(self) -> list[Path]:
        held, index = self.model.held(), self.store.volume.index
        files = [(d, p) for d, p in self.blob_files() if p.stat().st_nlink == 1]
        return [path for d, path in files if d not in held and index.blob(d) is not None]

    @rule(full=st.booleans(), repair=st.booleans())
    def verify(self, full: bool, repair: bool) -> None:
        report = self.store.verify(full=full, repair=repair)
        assert {*report.damaged, *report.missing} <= self.model.tampered
        assert report.stray == []
        for digest, path in self.blob_files():
            assert path.read_bytes() == self.known[digest]
            assert mode_of(path) & 0o222 == 0
        for digest in report.healed:
            self.arrived(digest)

    @rule(what=st.sampled_from(["open", "hash", "usage", "reopen"]), pick=picks)
    def look(self, what: str, pick: int) -> None:
        if what == "open":
            self.open(self.a_blob(pick))
        elif what == "hash":
            path = self.a_file(pick)
            if path in self.model.files:
                data = self.model.files[path].data
                assert self.store.digest_of(path).digest == digest_of(data)
        elif what == "usage":
            self.usage()
        else:
            self.store.close()
            self.store = Store(self.store.root)

    def open(self, digest: str) -> None:
        try:
            with self.store.open(digest) as file:
                assert file.read() == self.known[digest]
        except DamagedBlobError:
            assert digest in self.model.tampered
        except BlobNotFoundError:
            assert digest in self.model.tampered or digest not in self.model.held()

    def usage(self) -> None:
        usage = self.store.usage()
        index = self.store.volume.index
        rows = [(index.blob(digest), path) for digest, path in self.blob_files()]
        there = [path for blob, path in rows if blob is not None]
        assert usage.blobs == len(there)
        assert usage.physical == sum(map(allocated, there))
        if not self.model.is_rebuilt:
            assert usage.reclaimable == self.store.plan_prune().freed_size

    # what other programs do

    @rule(number=picks, digest=contents, mode=modes)
    def somebody_writes_a_new_file(self, number: int, digest: str, mode: int) -> None:
        """Beside it and by a rename, as programs do that care."""
        path = self.folder / NAMES[number % len(NAMES)]
        os.replace(write(self.directory / "new", self.known[digest], mode=mode), path)
        self.forget_path(path)
        self.model.files[path] = UserFile(self.known[digest], self.own_label())

    @rule(
        what=st.sampled_from(
            ["edits", "edits", "deletes", "deletes", "renames", "links", "links a blob", "chmods"]
        ),
        old=picks,
        new=picks,
        mode=modes,
    )
    def somebody(self, what: str, old: int, new: int, mode: int) -> None:
        path = self.a_file(old)
        if what == "links a blob":
            self.somebody_links_a_blob(old, new)
        elif what == "deletes":
            path.unlink(missing_ok=True)
            self.forget_path(path)
        elif path not in self.model.files:
            return
        elif what == "edits":
            self.edit(path)
        elif what == "renames":
            self.somebody_renames(path, self.folder / NAMES[new % len(NAMES)])
        elif what == "links":
            self.somebody_links(path, self.a_free_path(new))
        else:
            self.somebody_changes_the_mode(path, mode)

    def edit(self, path: Path) -> None:
        inode = inode_of(path)
        edit(path, f"edit {next(self.numbers)}".encode())
        data = path.read_bytes()
        for other in [p for p in self.model.files if inode_of(p) == inode]:
            self.model.files[other].data = data
        self.model.tampered |= {d for d, p in self.blob_files() if inode_of(p) == inode}

    def somebody_renames(self, source: Path, target: Path) -> None:
        if target.exists() and os.path.samefile(source, target):
            return  # rename(2) does nothing then
        os.rename(source, target)
        self.forget_path(target)
        self.model.files[target] = self.model.files.pop(source)

    def somebody_links(self, source: Path, target: Path) -> None:
        if not os.path.lexists(target):
            os.link(source, target)
            file = self.model.files[source]
            self.model.files[target] = UserFile(file.data, file.label)

    def somebody_links_a_blob(self, blob: int, new: int) -> None:
        digest, target = self.a_blob(blob), self.a_free_path(new)
        source = Path(self.store.volume.layout.blob(digest))
        if source.exists() and not os.path.lexists(target):
            shared = [f for p, f in self.model.files.items() if inode_of(p) == inode_of(source)]
            label = shared[0].label if shared else ("blob", digest)
            os.link(source, target)
            self.model.files[target] = UserFile(source.read_bytes(), label)

    def somebody_changes_the_mode(self, path: Path, mode: int) -> None:
        path.chmod(mode)
        inode = inode_of(path)
        self.model.loosened |= {d for d, p in self.blob_files() if inode_of(p) == inode}

    @rule(what=st.sampled_from(["edits a blob", "deletes a blob", "removes the index"]), blob=picks)
    def somebody_harms_the_store(self, what: str, blob: int) -> None:
        digest = self.a_blob(blob)
        path = Path(self.store.volume.layout.blob(digest))
        if what == "removes the index":
            self.somebody_removes_the_index()
        elif path.exists() and what == "edits a blob":
            self.edit(path)
        elif path.exists():
            path.unlink()
            self.model.tampered.add(digest)

    def somebody_removes_the_index(self) -> None:
        self.store.close()
        for path in self.store.root.glob("index.sqlite3*"):
            path.unlink()
        self.store = Store(self.store.root)
        self.model.is_rebuilt = self.store.volume.index.note(REBUILT) is not None
        assert self.model.is_rebuilt or not self.blob_files()
        self.model.owned.clear()

    # what must be true

    @invariant()
    def blobs_are_whole_or_known_not_to_be(self) -> None:
        volume = self.store.volume
        for digest, path in self.blob_files():
            data = path.read_bytes()
            if data != self.known[digest]:
                assert digest in self.model.tampered
                blob = volume.index.blob(digest)
                assert blob is None or not blob.vouches(path.stat(), volume.boot)
            if mode_of(path) & 0o222:
                assert digest in self.model.loosened

    @invariant()
    def files_of_the_user_are_as_the_model_says(self) -> None:
        found = {path for path in self.folder.rglob("*") if path.is_symlink() or path.is_file()}
        assert found == set(self.model.files)
        labels: dict[int, Label] = {}
        for path, file in self.model.files.items():
            assert path.read_bytes() == file.data
            assert labels.setdefault(inode_of(path), file.label) == file.label

    @invariant()
    def what_is_held_is_there(self) -> None:
        for digest in self.model.held() - self.model.tampered:
            assert Path(self.store.volume.layout.blob(digest)).read_bytes() == self.known[digest]
            assert self.store.get(digest).digest == digest

    @invariant()
    def nothing_is_left_in_tmp(self) -> None:
        assert list(self.store.volume.layout.tmp.iterdir()) == []

    def eject(self) -> None:
        """In the end every file is the user's own again, and nothing is lost."""
        results = self.store.plan_eject(drop_pinned=True).execute()
        has_failed = any(done.outcome == "failed" for done in results)
        assert self.store.root.exists() == has_failed
        for path, file in self.model.files.items():
            assert path.read_bytes() == file.data

    # choosing

    def a_blob(self, pick: int) -> str:
        there = sorted(digest for digest, _ in self.blob_files()) or sorted(CONTENTS)
        return there[pick % len(there)]

    def a_file(self, pick: int) -> Path:
        there = sorted(self.model.files) or [self.folder / NAMES[0]]
        return there[pick % len(there)]

    def a_free_path(self, pick: int) -> Path:
        paths = [self.folder / name for name in NAMES]
        free = [path for path in paths if not os.path.lexists(path)] or paths
        return free[pick % len(free)]

    # keeping the model

    def attempt(self, act: Callable[[], T]) -> T | None:
        """What cannot be done is said by an error of ours (or a plain missing file)."""
        try:
            return act()
        except (SmartcacheError, FileNotFoundError):
            return None

    def is_done(self, act: Callable[[], object]) -> bool:
        return self.attempt(lambda: (act(), True)) is not None

    def arrived(self, digest: str) -> None:
        """A blob was proven or brought: it must be whole now."""
        data = Path(self.store.volume.layout.blob(digest)).read_bytes()
        assert digest_of(data) == digest
        self.known.setdefault(digest, data)
        self.model.tampered.discard(digest)

    def own_label(self) -> Label:
        return "own", next(self.numbers)

    def relabel(self, path: Path, label: Label) -> None:
        """Give all names of an inode a label."""
        inode = inode_of(path)
        for other, file in self.model.files.items():
            if inode_of(other) == inode:
                file.label = label

    def forget_path(self, path: Path) -> None:
        self.model.files.pop(path, None)

    def blob_files(self) -> list[tuple[str, Path]]:
        return [(path.name, path) for path in self.store.volume.layout.blobs.glob("*/*")]


@pytest.mark.timeout(3600)  # what fails is shrunk for five minutes
@pytest.mark.parametrize(("where", "examples"), [("disk_path", 25), ("memory_path", 70)])
def test_the_store_agrees_with_a_plain_model(
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    soak: bool,
    where: str,
    examples: int,
) -> None:
    """On the disk, and (faster) in memory, which gives inode numbers in another order."""
    caplog.set_level(logging.ERROR, "smartcache")
    directory: Path = request.getfixturevalue(where)
    run_state_machine_as_test(
        lambda: StoreMachine(directory),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples * SOAK_FACTOR if soak else examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            # The same examples every day; `--soak` looks for new ones.
            derandomize=not soak,
            suppress_health_check=list(HealthCheck),
        ),
    )
