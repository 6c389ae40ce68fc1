"""The journal: written before anything is touched, read whatever was torn or damaged in it."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from smartcache.errors import NoSpaceError, StoreUnwritableError
from smartcache.store import volume
from smartcache.store.changes.journal import Batch, Change, Journal
from smartcache.store.changes.spot import beside
from smartcache.store.store import Store
from smartcache.system.locks import claim
from tests.processes.children import Child
from tests.store.files import (
    WEIGHTS,
    digest_of,
    mode_of,
    raising,
    row,
    snapshot,
    undo,
    write,
)

DIGEST = "ab" * 32


def line_with(**fields: object) -> bytes:
    """A change that is sound but for these fields."""
    sound = {"batch": "BATCH", "n": 7, "op": "adopt", "path": "/x", "digest": DIGEST, "size": 1}
    return json.dumps({**sound, **fields}).encode()


def state_with(**fields: object) -> bytes:
    """An outcome that is sound but for these fields."""
    return json.dumps({"batch": "BATCH", "n": 0, "state": "undone", **fields}).encode()


GARBAGE: list[bytes] = [
    b"", b"\x00\xff\xfe not text", b"{", b"[]", b"3", b'"batch"', b"null", b"{}",
    b'{"n": 0, "op": "adopt", "path": "/x"}',
    b'{"batch": "BATCH"}',
    b'{"batch": "BATCH", "n": 7, "op": "adopt"}',
    b'{"batch": "BATCH", "n": 0, "op": "place"',
    b'{"batch": "BATCH", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"batch": "BATCH", "n": ' + b"9" * 5000 + b', "state": "undone"}',
    b'{"batch": "BATCH", "x": "' + b"x" * (17 << 20) + b'"}',
    *(state_with(n=n) for n in ("zero", [["x"], None], 99)),
    *(state_with(batch=batch) for batch in ("other", ["BATCH"], {"BATCH": 1})),
    *(state_with(state=state) for state in ({"undone": 1}, ["undone"], "never heard of")),
    *(line_with(op=op) for op in ("of the future", ["adopt"], {"adopt": 1})),
    *(line_with(path=path) for path in (5, "/x\0y", "/\ud800", "x/y", ["/x"])),
    *(line_with(digest=digest) for digest in (3, "ab", "../" * 21 + "x")),
    *(line_with(size=size) for size in ("1", -1, 1 << 64)),
    *(line_with(n=n) for n in (1.5, [0])),
    *(line_with(mode=mode) for mode in (1 << 40, "0644")),
    *(line_with(xattrs=xattrs) for xattrs in ({"a\0": "00"}, {"a": 3}, {"a": "zz"}, ["a"], "a")),
    line_with(uid=-5), line_with(mtime_ns=1 << 80), line_with(inode=1 << 70),
    line_with(links="two"), line_with(kind={"kind": "copy"}), line_with(filesystem=3),
    line_with(temporary="/x\0"), line_with(keep="yes"),
]  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def change(name: str = "a", **more: object) -> Change:
    return Change(op="adopt", path=Path("/models") / name, digest=DIGEST, size=3, **more)  # type: ignore[arg-type]


def batch(journal: Journal, label: str = "test") -> Batch:
    return Batch(journal, journal.path.parent, label)


def note(journal: Journal, *names: str, label: str = "test") -> Batch:
    """Write a batch that has begun something."""
    with batch(journal, label) as writing:
        writing.begin([change(name) for name in names])
    return writing


def names_in(journal: Journal, batch_id: str | None = None) -> list[str]:
    return [change.path.name for change in journal.changes(batch_id)]


class TestRoundTrip:
    def test_no_file_is_no_history(self, journal: Journal) -> None:
        assert journal.changes() == []
        assert journal.open_changes() == []
        assert journal.history() == []

    def test_a_change_comes_back_as_it_was_written(self, journal: Journal) -> None:
        full = change(
            temporary=Path("/models/.a.0123456789ab.smartcache"),
            real=Path("/data/models/a"),
            kind="hardlink",
            mode=0o644,
            uid=1000,
            gid=100,
            mtime_ns=1_234_567_890_123_456_789,
            inode=2**64 - 1,
            links=2,
            filesystem="uuid:x",
        )
        with batch(journal) as writing:
            (begun,) = writing.begin([replace(full, op="own")])
        (read,) = journal.changes()
        assert read == begun
        assert (read.batch, read.n, read.state) == (writing.id, 0, "begun")

    def test_any_name_a_file_can_have_comes_back(self, journal: Journal) -> None:
        names = [b"\xff\xfe", b'quote " and \\', b"new\nline", "模型".encode(), b"\x01\x7f", b" "]
        paths = [Path(os.fsdecode(b"/models/" + name)) for name in names]
        wanted = [change(path.name, temporary=beside(path)) for path in paths]
        with batch(journal) as writing:
            writing.begin(wanted)
        found = [(os.fsencode(read.path), read.temporary) for read in journal.changes()]
        assert found == [(b"/models/" + n, c.temporary) for n, c in zip(names, wanted, strict=True)]
        assert len(journal.path.read_bytes().splitlines()) == 1 + len(names)

    def test_the_last_outcome_counts(self, journal: Journal) -> None:
        with batch(journal) as writing:
            begun = writing.begin([change(name) for name in "abcd"])
            for each, state in zip(begun, ("done", "back", "done"), strict=False):
                writing.end(each, state)  # type: ignore[arg-type]
        with batch(journal) as undoing:
            undoing.end(begun[2], "undone")
        assert [c.state for c in journal.changes()] == ["done", "back", "undone", "begun"]
        assert [c.path.name for c in journal.open_changes()] == ["a", "d"]

    def test_changes_of_one_batch_can_be_asked_for_and_are_numbered(self, journal: Journal) -> None:
        first = note(journal, "a")
        with batch(journal) as second:
            second.begin([change("b"), change("c")])
            (last,) = second.begin([change("d")])
        assert last.n == 2
        assert names_in(journal, first.id) == ["a"]
        assert [c.n for c in journal.changes(second.id)] == [0, 1, 2]
        assert journal.changes("none") == []
        assert journal.path.read_bytes().count(b'"label"') == 2

    def test_a_batch_without_changes_leaves_no_line(self, journal: Journal) -> None:
        with batch(journal):
            pass
        assert not journal.path.exists()

    def test_what_was_written_never_changes(self, store: Store, folder: Path) -> None:
        before = b""
        digest = store.put_stream([WEIGHTS]).digest
        steps: list[Callable[[], object]] = [
            lambda: store.place(digest, folder / "a", kind="hardlink"),
            lambda: store.replace(write(folder / "b"), digest),
            lambda: store.pin(digest),
            lambda: store.unpin(digest),
            lambda: store.plan_undo().execute(),
            lambda: store.plan_prune().execute(),
        ]
        for step in steps:
            step()
            after = store.volume.journal.path.read_bytes()
            assert after.startswith(before)
            assert after.endswith(b"\n")
            before = after


class TestHistory:
    def test_batches_come_in_order_and_count_what_was_done_to_files(self, journal: Journal) -> None:
        """What was taken back or undone does not count, nor what is no change to a file."""
        for label in ("one", "two"):
            with batch(journal, label) as writing:
                begun = writing.begin([change(name) for name in "abcd"])
                for each, state in zip(begun, ("done", "done", "back", "undone"), strict=True):
                    writing.end(each, state)  # type: ignore[arg-type]
        for op in ("pin", "unpin", "own"):
            with batch(journal) as writing:
                writing.begin([Change(op=op, path=Path("/x"), digest=DIGEST, size=1)])
        found = journal.history()
        assert [(b.label, b.changes, b.size, b.ops) for b in found] == [
            ("one", 2, 6, ("adopt",)),
            ("two", 2, 6, ("adopt",)),
        ]
        assert all(b.at.tzinfo is not None for b in found)
        assert len(journal.changes()) == 11

    def test_a_batch_whose_head_was_torn_is_still_there(self, journal: Journal) -> None:
        writing = note(journal, "a")
        head, _, rest = journal.path.read_bytes().partition(b"\n")
        journal.path.write_bytes(head[:10] + b"\n" + rest)
        (found,) = journal.history()
        assert (found.id, found.label, found.changes) == (writing.id, "", 1)


class TestDamage:
    def test_a_torn_last_line_is_skipped_and_the_next_is_whole(self, journal: Journal) -> None:
        for cut in range(1, 60, 7):
            journal.path.unlink(missing_ok=True)
            note(journal, "a")
            note(journal, "b")
            journal.path.write_bytes(journal.path.read_bytes()[:-cut])
            note(journal, "c")
            assert names_in(journal) == (["a", "b", "c"] if cut == 1 else ["a", "c"]), cut

    def test_a_line_that_makes_no_sense_is_skipped(self, journal: Journal) -> None:
        for garbage in GARBAGE:
            with row(garbage[:80]):
                journal.path.unlink(missing_ok=True)
                with batch(journal) as first:
                    (begun,) = first.begin([change("a")])
                    first.end(begun, "done")
                with journal.path.open("ab") as file:
                    file.write(garbage.replace(b"BATCH", first.id.encode()) + b"\n")
                note(journal, "b")
                assert [(c.path.name, c.state) for c in journal.changes()] == [
                    ("a", "done"),
                    ("b", "begun"),
                ]
                assert [b.changes for b in journal.history()] == [1, 1]
                assert len(journal.changes(first.id)) == 1

    def test_a_store_whose_journal_has_such_lines_works(self, store: Store, folder: Path) -> None:
        """All of them, between changes that can be undone."""
        for name in ("a.safetensors", "b.safetensors"):
            write(folder / name, WEIGHTS + name.encode(), mode=0o664)
        before = snapshot(folder)
        store.adopt(folder / "a.safetensors")
        (entry,) = store.history()
        with store.volume.journal.path.open("ab") as file:
            for garbage in GARBAGE:
                file.write(garbage.replace(b"BATCH", entry.id.encode()) + b"\n")
        store.adopt(folder / "b.safetensors")
        store.close()
        with Store(store.root) as again:
            again.rebuild()
            assert [batch.changes for batch in again.history()] == [1, 1]
            assert undo(again) == []
        assert snapshot(folder) == before

    def test_damaged_lines_are_told_of_once_and_torn_ones_are_not(
        self, journal: Journal, caplog: pytest.LogCaptureFixture
    ) -> None:
        journal.path.write_bytes(line_with(digest="x")[:-9] + b"\n")
        assert journal.changes() == []
        assert caplog.messages == []
        with journal.path.open("ab") as file:
            file.write(line_with(digest="x") + b"\n" + line_with(mode="rw") + b"\n")
        for _ in range(2):
            assert (journal.changes(), journal.history()) == ([], [])
        assert [text.partition(": ")[2] for text in caplog.messages] == [
            "2 damaged lines were skipped; what they say cannot be undone"
        ]

    def test_fields_of_the_future_are_ignored(self, journal: Journal) -> None:
        line = {"batch": "x", "n": 0, "op": "adopt", "path": "/a", "digest": DIGEST, "size": 1}
        journal.append([{**line, "colour": "blue", "depth": {"x": 1}}], sync=False)
        (read,) = journal.changes()
        assert read.path == Path("/a")

    def test_a_short_write_is_a_full_disk_and_leaves_nothing_readable(
        self, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        note(journal, "a")
        real = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
            with pytest.raises(NoSpaceError):
                note(journal, "b")
        note(journal, "c")
        assert names_in(journal) == ["a", "c"]

    def test_a_journal_that_cannot_be_written_says_why(
        self, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        errors = {errno.ENOSPC: NoSpaceError, errno.EDQUOT: NoSpaceError,
                  errno.EROFS: StoreUnwritableError, errno.EIO: StoreUnwritableError}  # fmt: skip
        for code, error in errors.items():
            monkeypatch.setattr(os, "write", raising(code))
            with row(code), pytest.raises(error, match="nothing was changed"):
                journal.append([{"batch": "x"}], sync=True)


class TestDurable:
    def test_changes_are_synced_before_they_are_made_and_outcomes_are_not(
        self, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
        with batch(journal) as writing:
            (begun,) = writing.begin([change()])
            assert journal.path.stat().st_size in synced
            count = len(synced)
            writing.end(begun, "done")
            writing.flush()
            assert len(synced) == count

    def test_a_batch_is_claimed_while_its_process_works(self, store: Store) -> None:
        tmp = store.volume.layout.tmp
        with store.batch("work") as working:
            assert list(tmp.iterdir()) == []
            working.begin([change()])
            assert [path.name for path in tmp.iterdir()] == [f"batch-{working.id}"]
            with Store(store.root):
                assert len(list(tmp.iterdir())) == 1, "a living batch must not be recovered"
            working.end(store.volume.journal.changes()[0], "back")
        assert list(tmp.iterdir()) == []

    def test_a_batch_inside_a_batch_is_part_of_it(self, store: Store, folder: Path) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        with store.batch("outer"), store.batch("inner"):
            store.place(digest, folder / "a")
            store.place(digest, folder / "b")
        (found,) = store.history()
        assert (found.label, found.changes) == ("outer", 2)


class TestFold:
    """What is over leaves the journal; what undo, recovery or a rebuild may ask for stays."""

    def fold(self, journal: Journal, *, claimed: str = "") -> int:
        made = claim(journal.path.with_name("folded"))
        assert made is not None
        try:
            return journal.fold(made, lambda batch: batch == claimed)
        finally:
            made.release(remove=True)

    def test_open_changes_stay_with_their_heads_and_closed_ones_go(self, journal: Journal) -> None:
        for number in range(50):
            with batch(journal, f"run {number}") as each:
                one, two = each.begin(
                    [change(f"{number}-{n}", inode=2 * number + n) for n in (0, 1)]
                )
                each.end(one, "done" if number % 10 == 0 else "undone")
                each.end(two, "back")
        before = journal.open_changes(), journal.history()
        size = journal.path.stat().st_size
        assert self.fold(journal) == journal.path.stat().st_size < size / 5
        assert (journal.open_changes(), journal.history()) == before
        assert [b.label for b in journal.history()] == [f"run {n}" for n in range(0, 50, 10)]
        with batch(journal, "more") as each:
            each.begin([change("more")])
        assert len(journal.open_changes()) == 6

    def test_a_journal_of_which_most_matters_stays_as_it_is(self, journal: Journal) -> None:
        with batch(journal) as each:
            for n, begun in enumerate(each.begin([change(str(n), inode=n) for n in range(10)])):
                each.end(begun, "done" if n % 2 else "back")
        before = journal.path.read_bytes()
        self.fold(journal)
        assert journal.path.read_bytes() == before

    def test_what_is_in_work_or_to_be_recovered_stays(self, journal: Journal) -> None:
        with batch(journal, "old") as old:
            for begun in old.begin([change(str(n), inode=n) for n in range(100)]):
                old.end(begun, "undone")
        live = batch(journal, "live")
        begun, ended = live.begin([change("begun", inode=200), change("ended", inode=201)])
        live.end(ended, "back")
        live.flush()
        self.fold(journal, claimed=live.id)
        assert {c.path.name: c.state for c in journal.changes()} == {
            "begun": "begun",
            "ended": "back",
        }
        live.end(begun, "done")
        live.close()
        assert [c.path.name for c in journal.open_changes()] == ["begun"]

    def test_pins_that_were_not_ended_stay(self, journal: Journal) -> None:
        words = "pin a, unpin a, " * 20 + "pin a, pin b, pin c, unpin c"
        for op, name in (each.split() for each in words.split(", ")):
            with batch(journal, op) as each:
                (begun,) = each.begin([Change(op=op, path=Path(name), digest=DIGEST, size=0)])  # type: ignore[arg-type]
                each.end(begun, "done")
        self.fold(journal)
        assert [(c.op, str(c.path)) for c in journal.open_changes()] == [("pin", "a"), ("pin", "b")]

    def test_undo_gives_the_same_back_after_a_fold(self, store: Store, folder: Path) -> None:
        """Two names of one file, of which one was undone before: they are one file again."""
        one = write(folder / "one.safetensors")
        os.link(one, folder / "two.safetensors")
        before = snapshot(folder)
        digest = store.put_stream([WEIGHTS]).digest
        list(store.replace_many([(one, digest)]))
        list(store.replace_many([(folder / "two.safetensors", digest)]))
        first, _ = store.history()
        store.plan_undo([first.id]).execute()
        for n in range(40):
            store.adopt(write(folder / "x.bin", bytes([n]) * 1000))
            store.plan_undo([store.history()[-1].id]).execute()
        size = store.volume.journal.path.stat().st_size
        assert self.fold(store.volume.journal) < size / 2
        store.plan_undo().execute()
        (folder / "x.bin").unlink()
        assert snapshot(folder) == before

    def test_a_store_folds_a_long_journal_when_it_is_opened(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(volume, "FOLD_SIZE", 5000)
        store.adopt(write(folder / "kept.bin"))
        for n in range(20):
            store.adopt(write(folder / "x.bin", bytes([n]) * 1000))
            store.plan_undo([store.history()[-1].id]).execute()
        size = store.volume.journal.path.stat().st_size
        history = store.history()
        with Store(store.root) as again:
            assert again.volume.journal.path.stat().st_size < size / 5
            assert again.history() == history
        assert store.history() == history
        assert [done.note for done in store.plan_undo().execute()] == [""]

    def test_no_line_is_lost_while_others_append_and_are_killed(self, journal: Journal) -> None:
        """Nine of ten changes are over at once, so every fold finds something to leave out."""
        count = 150

        def append(who: int) -> None:
            for number in range(count):
                names = [f"{who}-{number}-{n}" for n in range(10)]
                inode = 10 * (who * count + number)
                with batch(journal, "append") as each:
                    wanted = [change(name, inode=inode + n) for n, name in enumerate(names)]
                    first, *others = each.begin(wanted, sync=False)
                    each.end(first, "done")
                    for other in others:
                        each.end(other, "back")

        def is_claimed(batch_id: str) -> bool:
            return (journal.path.parent / f"batch-{batch_id}").exists()

        def fold() -> None:
            while (made := claim(journal.path.with_name(f"folded-{os.getpid()}"))) is not None:
                journal.fold(made, is_claimed)
                made.release(remove=True)

        with ExitStack() as stack:
            writers = [stack.enter_context(Child(partial(append, who))) for who in range(2)]
            chance = random.Random(3)
            for _ in range(12):
                with Child(fold):  # killed when the block ends
                    time.sleep(chance.uniform(0.01, 0.08))
            for each in writers:
                each.result()
        self.fold(journal)
        expected = {f"{who}-{number}-0" for who in range(2) for number in range(count)}
        assert {c.path.name for c in journal.open_changes()} == expected
        assert {c.state for c in journal.open_changes()} == {"done"}
        assert len(journal.changes()) < 2 * len(expected)


def test_lines_of_processes_that_append_at_once_stay_whole(journal: Journal) -> None:
    def append(who: int) -> None:
        for number in range(60):
            with batch(journal, f"{who} {number}") as each:
                wanted = [change(f"{who}-{number}-{n}") for n in range(20)]
                for begun in each.begin(wanted, sync=False):
                    each.end(begun, "done")

    with ExitStack() as stack:
        children = [stack.enter_context(Child(partial(append, who))) for who in range(4)]
        for child in children:
            child.result()
    # A process that looks while another appends may see a torn line and begin with a newline.
    lines = [json.loads(line) for line in journal.path.read_bytes().splitlines() if line]
    assert len(lines) == 4 * 60 * (1 + 20 + 1)
    assert len(set(names_in(journal))) == 4 * 60 * 20
    assert {c.state for c in journal.changes()} == {"done"}
    history = journal.history()
    assert len(history) == 4 * 60
    assert all(found.changes == 20 and found.label for found in history)


def test_a_file_made_read_only_by_a_process_that_died_gets_its_mode_back(
    store: Store, folder: Path
) -> None:
    path = write(folder / "a.safetensors", mode=0o664)

    def die() -> None:
        with store.batch("dies") as dying:
            dying.begin([Change.before("adopt", path, digest_of(WEIGHTS), path.stat())])
            path.chmod(0o444)
            os._exit(0)

    child = os.fork()
    if child == 0:
        die()
    os.waitpid(child, 0)
    with Store(store.root) as again:
        assert mode_of(path) == 0o664
        assert again.history() == []
        assert list(again.volume.layout.tmp.iterdir()) == []
