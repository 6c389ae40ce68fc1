"""No write is lost, and no name is ever absent, while the store works on files of others.

Writers of every kind, as root (whom no mode stops) and as an ordinary user, against replacing,
adopting, `dedup` and sharing of blocks; other processes that scan, add, delete and rename; and
several at once.
"""

from __future__ import annotations

import functools
import itertools
import logging
import mmap
import os
import random
import select
import shutil
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3

if sys.platform != "linux":
    pytest.skip("leases and RENAME_EXCHANGE", allow_module_level=True)

from smartcache.errors import BlobNotFoundError, DamagedBlobError, FileBusyError, FileSkippedError
from smartcache.folders.dedup import plan_dedup
from smartcache.store.changes import spot as swap
from smartcache.store.changes.adopt import Adoption
from smartcache.store.changes.replace import Replacement, give_back
from smartcache.store.changes.spot import Spot
from smartcache.store.store import Store
from smartcache.system import faults, kernel
from tests.cli.running import PATIENCE, Smartcache
from tests.folders.deduping import (
    inodes_of,
    leftovers,
    open_store,
    planned,
    scanned,
    undo_everything,
)
from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.races import (
    HOWS,
    LONG_AGO_NS,
    Breaks,
    File,
    How,
    Rounds,
    content,
    make,
    race,
)  # fmt: skip
from tests.store.files import snapshot
from tests.store.reflink_disks import DISKS, reflink_disk

_log = logging.getLogger(__name__)

Repeat = Callable[[int], int]

FILES = 3
OLD_ENOUGH = 2.1
"""Seconds after which the store trusts the times of a file."""
ORDINARY = NOBODY if os.geteuid() == 0 else None


@pytest.fixture(params=["unprivileged", "root"] if os.geteuid() == 0 else ["unprivileged"])
def user(request: pytest.FixtureRequest) -> int | None:
    """Who runs the race: everybody obeys modes, but root."""
    return ORDINARY if request.param == "unprivileged" else None


@pytest.fixture
def folder(user: int | None) -> Iterator[Path]:
    with folder_of(user) as made:
        yield made


def told(counts: Counter[str]) -> None:
    """Leave the figures of a race in the log: `pytest -o log_cli=1 -o log_cli_level=info`."""
    _log.info("%s", dict(sorted(counts.items())))


def is_handed_out(store: Store, digest: str) -> bool:
    """Say whether a blob is handed out, which it may be only with the right bytes."""
    try:
        with store.open(digest) as blob:
            assert blake3(blob.read()).hexdigest() == digest
    except (BlobNotFoundError, DamagedBlobError):
        return False
    return True


def tally(results: Iterable[Adoption | Replacement]) -> Counter[str]:
    """Count what became of files; whatever was left alone was so for a reason that has a name."""
    counts: Counter[str] = Counter()
    for result in results:
        error = result.error
        counts[result.outcome if error is None else getattr(error, "reason", "absent")] += 1
        assert error is None or isinstance(error, (FileSkippedError, FileNotFoundError)), error
    return counts


# races with writers


def files_in(folder: Path, *, anew: bool = False, how: How | None = None) -> Rounds:
    """Name the files of each round: the same names, `anew` with other bytes, or (aged) others."""

    def named(number: int) -> list[File]:
        prefix = "" if how is None else f"{how}-{number}-"
        first = number * FILES if anew else 0
        return [File(folder / f"{prefix}{n}.safetensors", first + n) for n in range(FILES)]

    return named


def replace_all(store: Store, files: Sequence[File], digests: dict[int, str]) -> Counter[str]:
    return tally(store.replace_many((file.path, digests[file.seed]) for file in files))


def check_replaced(store: Store, files: Sequence[File], digests: dict[int, str]) -> None:
    assert leftovers(files[0].path.parent) == []
    for seed, digest in digests.items():
        if not is_handed_out(store, digest):
            # Only root can have written through a link. For the next round:
            store.put_stream([content(seed, 0)])


def replace_race(folder: Path, how: How, least: int, *, aged: int = 0) -> Counter[str]:
    """Each file has a blob of its own: through one link root would write to all."""
    digests = {}
    with Store(folder / "store") as store:
        for seed in range(FILES):
            digests[seed] = store.put_stream([content(seed, 0)]).digest
        return race(
            store,
            how,
            files_in(folder, how=how if aged else None),
            act=functools.partial(replace_all, digests=digests),
            check=functools.partial(check_replaced, digests=digests),
            points=("replace: journaled", "replace: temporary linked", "replace: exchanged"),
            wanted=() if aged else SEEN["replace"][how],
            least=least,
            most_rounds=aged or None,
        )


def adopt_race(folder: Path, how: How, least: int) -> Counter[str]:
    adopted: dict[Path, str] = {}

    def adopt(store: Store, files: Sequence[File]) -> Counter[str]:
        results = list(store.adopt_many(file.path for file in files))
        adopted.clear()
        adopted.update({r.path: r.digest for r in results if r.outcome == "adopted"})
        return tally(results)

    def check(store: Store, files: Sequence[File]) -> None:
        for file in files:
            is_handed_out(store, blake3(content(file.seed, 0)).hexdigest())
            mode = stat.S_IMODE(os.stat(file.path).st_mode)
            if file.path in adopted:
                is_handed_out(store, adopted[file.path])
            else:
                assert mode == 0o644, "the mode was not given back"

    with Store(folder / "store") as store:
        return race(
            store,
            how,
            files_in(folder, anew=True),
            act=adopt,
            check=check,
            wanted=("adopted",),
            points=("adopt: journaled", "adopt: read-only", "adopt: linked", "adopt: rows written"),
            least=least,
        )


def twin_of(file: File) -> Path:
    """The other copy, which nobody writes; every second one is older and survives."""
    return file.path.parent.with_name("still") / file.path.name


def make_twins(files: Sequence[File]) -> None:
    for file in files:
        twin = twin_of(file)
        make(twin, content(file.seed, 0))
        age = -1 if file.seed % 2 else 1
        os.utime(twin, ns=(LONG_AGO_NS + age, LONG_AGO_NS + age))


def deduplicate(store: Store, files: Sequence[File]) -> Counter[str]:
    make_twins(files)
    counts: Counter[str] = Counter()
    found = scanned(store, *{path.parent for path in (files[0].path, twin_of(files[0]))})
    plan = plan_dedup(store, found)
    result = plan.execute()
    skipped = [skip.reason for skip in (*plan.skipped, *result.skipped)]
    counts["left alone"] += len(found.busy) + len(found.problems) + len(skipped)
    counts["replaced"] += result.replaced
    return counts + Counter(skipped)


def check_twins(store: Store, files: Sequence[File]) -> None:
    assert leftovers(files[0].path.parent, twin_of(files[0]).parent) == []
    for file in files:
        twin = twin_of(file)
        is_linked = twin.exists() and file.path.exists() and twin.samefile(file.path)
        # Only root can have written through a link.
        if os.geteuid() != 0 or not is_linked:
            assert twin.read_bytes() == content(file.seed, 0), "nobody has written to it"


def dedup_race(folder: Path, how: How, least: int) -> Counter[str]:
    for name in ("written", "still"):
        (folder / name).mkdir()
    with open_store(folder / "store") as store:
        return race(
            store, how, files_in(folder / "written", anew=True), act=deduplicate,
            check=check_twins, points=DEDUP_POINTS, wanted=SEEN["dedup"][how], least=least,
        )  # fmt: skip


DEDUP_POINTS = (
    "adopt: journaled", "adopt: read-only", "adopt: linked", "replace: journaled",
    "replace: temporary linked", "replace: exchanged", "replace: old removed",
)  # fmt: skip
RACES: dict[str, Callable[[Path, How, int], Counter[str]]] = {
    "replace": replace_race,
    "adopt": adopt_race,
    "dedup": dedup_race,
}
BROKEN = ("leases broken",)
SEEN: dict[str, dict[How, tuple[str, ...]]] = {
    "replace": {
        "edit": ("replaced",), "edit fast": (*BROKEN, "replaced"), "map": BROKEN,
        "rename": ("changed", "replaced"), "recreate": ("changed",), "truncate": BROKEN,
    },
    "adopt": dict.fromkeys(HOWS, ("adopted",)),
    "dedup": {
        "edit": ("replaced",), "edit fast": (*BROKEN, "replaced"), "map": BROKEN,
        "rename": ("replaced",), "recreate": ("left alone",), "truncate": BROKEN,
    },
}  # fmt: skip
"""What a race with each kind of writer must have shown, or it was none."""


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("what", RACES)
def test_no_write_is_lost_and_no_wrong_bytes_are_handed_out(
    what: str, how: How, folder: Path, user: int | None, rounds: Repeat
) -> None:
    with Child(lambda: RACES[what](folder, how, rounds(8)), user=user) as racer:
        counts = racer.result()
    told(counts)
    assert counts["writes"] > 0
    assert all(counts[name] for name in SEEN[what][how]), counts


def test_replace_loses_no_write_to_files_that_were_left_alone_for_long(
    rounds: Repeat, pass_time: Callable[[float], None]
) -> None:
    """These are hashed without a lease, which comes afterwards."""

    def races(folder: Path, aged: int) -> Counter[str]:
        for how, number in itertools.product(HOWS, range(aged)):
            for file in files_in(folder, how=how)(number):
                make(file.path, content(file.seed, 0))
        pass_time(OLD_ENOUGH)
        counts: Counter[str] = Counter()
        for how in HOWS:
            counts += replace_race(folder, how, aged // 3, aged=aged)
        return counts

    with (
        folder_of(ORDINARY) as folder,
        Child(lambda: races(folder, rounds(40)), user=ORDINARY) as racer,
    ):
        counts = racer.result()
    told(counts)
    assert counts["writes"] > 0
    assert counts["replaced"] > 0


# writers at chosen moments


@pytest.mark.parametrize(
    "point", ["replace: journaled", "replace: temporary linked", "replace: exchanged"]
)
def test_a_writer_blocked_by_our_lease_gets_the_file_back(
    point: str, folder: Path, user: int | None
) -> None:
    """It has looked the old file up already: what it writes must be under the name afterwards."""
    path, other_name = folder / "a.safetensors", folder / "the same file"
    go, going = os.pipe()

    def edit() -> None:
        os.read(go, 1)
        with open(other_name, "r+b") as opened:
            opened.write(b"edited")

    def replace() -> tuple[str, int]:
        breaks = Breaks()

        def come(reached: str) -> None:
            if reached == point:
                os.write(going, b"g")
                while not breaks.seen:
                    time.sleep(0.001)

        with Store(folder / "store") as store:
            digest = store.put_stream([content(0, 0)]).digest
            faults.hook = come
            (result,) = store.replace_many([(path, digest)])
            return result.outcome, breaks.seen

    make(path, content(0, 0))
    os.link(path, other_name)
    if user is not None:
        os.chown(path, user, user)
    with Child(edit, user=user) as writer, Child(replace, user=user) as replacer:
        assert replacer.result() == ("skipped", 1)
        writer.result()
    os.close(go)
    os.close(going)
    assert path.read_bytes() == b"edited" + content(0, 0)[6:]
    assert os.path.samefile(path, other_name)
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    "moment", ["while we wait", "before the old name goes", "after the old name went"]
)
def test_a_writer_that_looked_the_old_file_up_and_opens_it_late_gets_it_back(
    moment: str, folder: Path, user: int | None
) -> None:
    """The scheduler can keep a writer waiting in open() for as long as it likes."""
    path = folder / "a.safetensors"
    ready, going, done = os.pipe(), os.pipe(), os.pipe()

    def edit() -> None:
        found = os.open(path, os.O_PATH)
        os.write(ready[1], b"r")
        os.read(going[0], 1)
        descriptor = os.open(f"/proc/self/fd/{found}", os.O_WRONLY)
        os.write(descriptor, b"edited")
        os.close(descriptor)
        os.write(done[1], b"d")

    def replace() -> str:
        breaks = Breaks()
        waiting = [moment]

        def come(reached: str) -> None:
            if reached in waiting:
                waiting.clear()
                os.write(going[1], b"g")
                while not breaks.seen and not select.select([done[0]], [], [], 0.001)[0]:
                    pass

        def sleep(seconds: float, real: Callable[[float], None] = time.sleep) -> None:
            come("while we wait")
            real(seconds)

        def unlink(
            name: Path, *, dir_fd: int | None = None, real: Callable[..., None] = os.unlink
        ) -> None:
            is_ours = str(name).endswith(".smartcache")
            come("before the old name goes" if is_ours else "")
            real(name, dir_fd=dir_fd)
            come("after the old name went" if is_ours else "")

        with Store(folder / "store") as store:
            digest = store.put_stream([content(0, 0)]).digest
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "sleep", sleep)
                patch.setattr(os, "unlink", unlink)
                (result,) = store.replace_many([(path, digest)])
        assert waiting == []
        return result.outcome

    make(path, content(0, 0))
    if user is not None:
        os.chown(path, user, user)
    with Child(edit, user=user) as writer:
        os.read(ready[0], 1)
        with Child(replace, user=user) as replacer:
            assert replacer.result() == "skipped"
        writer.result()
    for pipe in (*ready, *going, *done):
        os.close(pipe)
    assert path.read_bytes() == b"edited" + content(0, 0)[6:]
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        (["second"], {"path": b"second"}),
        (["second", "third"], {"path": b"third"}),
        (["second", "third", "fourth"], {"path": b"fourth"}),
        (["second", ""], {}),
        (["second", "third", ""], {}),
        ([""], {}),
    ],
    ids=lambda value: " then ".join(text or "gone" for text in value) or "nothing",
)
def test_giving_back_leaves_what_others_did_to_the_name_last(
    theirs: list[str], left: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They rename over the name, or remove it, around every exchange of ours."""
    path, temporary = tmp_path / "path", tmp_path / "temporary"
    path.write_bytes(b"blob")
    temporary.write_bytes(b"first")
    coming = list(theirs)

    def come() -> None:
        if not coming:
            return
        text = coming.pop(0)
        if text:
            path.with_name(text).write_text(text, encoding="ascii")
            path.with_name(text).replace(path)
        else:
            path.unlink()

    def exchange(a: str, b: str, *, dir_fd: int) -> bool:
        come()
        is_done = kernel.exchange(a, b, dir_fd=dir_fd)
        come()
        return is_done

    monkeypatch.setattr(swap, "exchange", exchange)
    with Spot(path) as spot:
        give_back(spot, temporary.name, path.stat().st_ino)
    while coming:
        come()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == left


def test_a_write_through_a_mapping_that_was_open_all_the_time_is_not_lost(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    """Only the first store through a page changes the times of the file, the later ones do not."""
    path = tmp_path / "a.safetensors"
    data = content(0, 0)
    with Store(tmp_path / "store") as store:
        digest = store.put_stream([data]).digest
        path.write_bytes(data)
        with open(path, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
            mapping[0] = data[0]
            pass_time(OLD_ENOUGH)
            assert store.digest_of(path).digest == digest
            with pytest.raises(FileBusyError):
                store.replace(path, digest)
            mapping[1] = data[1] ^ 1
        with pytest.raises(FileSkippedError):
            store.replace(path, digest)
    assert path.read_bytes() == bytes([data[0], data[1] ^ 1]) + data[2:]


# several at once

CONTENTS = 12
COPIES = 9


def fill(folder: Path) -> dict[Path, bytes]:
    """Make three folders with copies of some contents, some files with two names."""
    made: dict[Path, bytes] = {}
    for number in range(CONTENTS * COPIES):
        seed = number % CONTENTS
        path = folder / "abc"[number // CONTENTS % 3] / f"{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(seed, 0))
        os.utime(path, ns=(LONG_AGO_NS + number, LONG_AGO_NS + number))
        made[path] = content(seed, 0)
        if number % 7 == 0:
            twin = path.with_name(f"{number} again.safetensors")
            os.link(path, twin)
            made[twin] = content(seed, 0)
    return made


def test_several_at_once_on_overlapping_folders(
    tmp_path: Path, rounds: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(rounds(1)):
        folder = tmp_path / str(number)
        made = fill(folder)
        before = snapshot(folder)
        monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / f"store {number}"))
        program = Smartcache(cwd=tmp_path)
        choices = ("ab", "bc", "abc", "ca")
        started = [
            program.start("dedup", *(folder / name for name in names), "--min-size", "1", "-y")
            for names in choices
        ]
        try:
            for process in started:
                _, errors = process.communicate(timeout=PATIENCE)
                assert process.returncode == 0, errors
        finally:
            program.end()
        assert all(path.read_bytes() == data for path, data in made.items())
        assert leftovers(folder) == []
        with open_store(tmp_path / f"store {number}") as store:
            seen = {path for path in made if path.parent.name in "".join(choices)}
            assert planned(store, folder).execute().is_complete
            for seed in range(CONTENTS):
                assert len(inodes_of(p for p in seen if made[p] == content(seed, 0))) == 1
            report = store.verify(full=True)
            assert not report.has_damage
            assert report.dead_links == []
            assert undo_everything(store) == []
        assert snapshot(folder) == before


def test_several_at_once_leave_nothing_to_do(tmp_path: Path) -> None:
    """Each has planned before the first one began; together they do all of it."""
    made = fill(tmp_path / "files")
    home = tmp_path / "store"

    def run() -> int:
        with open_store(home) as store:
            plan = planned(store, tmp_path / "files")
            os.write(ready[1], b"r")
            os.read(go[0], 1)
            result = plan.execute()
            assert result.is_complete, result.skipped
            return result.freed

    ready, go = os.pipe(), os.pipe()
    with Child(run) as one, Child(run) as two, Child(run) as three:
        for _ in range(3):
            os.read(ready[0], 1)
        os.write(go[1], b"ggg")
        freed = [one.result(), two.result(), three.result()]
    for pipe in (*ready, *go):
        os.close(pipe)
    copies = CONTENTS * COPIES
    assert sum(freed) == (copies - CONTENTS) * 8192, "bytes are freed once"
    assert len(inodes_of(made)) == CONTENTS
    with open_store(home) as store:
        assert planned(store, tmp_path / "files").groups == ()


# others who use the folders


def seed_of(path: Path) -> int:
    """Names begin with the number of their content."""
    return int(path.name.partition("-")[0])


def add_and_remove(folder: Path, is_over: Path) -> int:
    """Download, delete and copy files; rename folders to and fro."""
    chance = random.Random(os.getpid())
    steps = 0
    while not is_over.exists():
        steps += 1
        place = chance.choice([path for path in folder.iterdir() if path.is_dir()])
        seed = chance.randrange(6)
        kind = chance.randrange(4)
        time.sleep(0.003)
        with suppress(FileNotFoundError):
            if kind == 0:
                part = place / f"{seed}-{steps}.incomplete"
                part.write_bytes(content(seed, 0))
                part.rename(place / f"{seed}-{steps}.pt")
            elif kind == 1:
                path = place / f"{seed}-{steps}.safetensors"
                with path.open("xb") as file:  # as it comes: not whole for a while
                    for at in range(0, 8192, 1024):
                        file.write(content(seed, 0)[at : at + 1024])
                        file.flush()
            elif kind == 2:
                files = [path for path in place.iterdir() if path.suffix == ".pt"]
                if len(files) > 10:
                    chance.choice(files).unlink()
            else:
                place.rename(folder / f"moved {place.name}")
                (folder / f"moved {place.name}").rename(place)
    return steps


def scan_all_the_time(folder: Path, home: Path, is_over: Path) -> int:
    scans = 0
    with open_store(home) as store:
        while not scans or not is_over.exists():
            scanned(store, folder)
            scans += 1
    return scans


def test_others_may_scan_add_delete_and_rename_meanwhile(tmp_path: Path, rounds: Repeat) -> None:
    folder, home, is_over = tmp_path / "models", tmp_path / "store", tmp_path / "over"
    for place in "abc":
        for seed in range(6):
            path = folder / place / f"{seed}-{place}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(seed, 0))
    counts: Counter[str] = Counter()
    with (
        open_store(home) as store,
        Child(lambda: add_and_remove(folder, is_over)) as other,
        Child(lambda: scan_all_the_time(folder, home, is_over)) as scanner,
    ):
        while counts["rounds"] < rounds(10) or not counts["replaced"]:
            plan = planned(store, folder)
            result = plan.execute()
            counts["rounds"] += 1
            counts["replaced"] += result.replaced
            counts += Counter(skip.reason for skip in result.skipped)
        is_over.touch()
        counts["steps"], counts["scans"] = other.result(), scanner.result()
    told(counts)
    assert counts["replaced"] > 0
    assert counts["scans"] > 0
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c"]
    names = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in names if path.read_bytes() != content(seed_of(path), 0)] == []
    assert leftovers(folder) == []
    with open_store(home) as store:
        assert not store.verify(full=True).has_damage
        planned(store, folder).execute()
        assert len(inodes_of(names)) == 6
        assert [path for path in names if path.read_bytes() != content(seed_of(path), 0)] == []


def test_a_folder_that_is_deleted_meanwhile_is_no_failure(tmp_path: Path) -> None:
    made = fill(tmp_path / "files")
    with open_store(tmp_path / "store") as store:
        plan = planned(store, tmp_path / "files")
        shutil.rmtree(tmp_path / "files" / "b")
        result = plan.execute()
        assert not result.is_complete
        assert {skip.path.parent.name for skip in result.skipped} == {"b"}
        left = [path for path in made if path.exists()]
        assert len(inodes_of(left)) == CONTENTS
        assert not store.verify(full=True).has_damage


# sharing blocks: the kernel compares and shares under its own locks

SHARE_POINTS = ("share: begun", "share: part shared", "share: shared")


@pytest.fixture(scope="module", params=DISKS)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with reflink_disk(request.param, tmp_path_factory.mktemp("disk")) as point:
        yield point


def source_of(file: File) -> Path:
    return file.path.with_name(f"source-{file.seed}.bin")


def share_race(folder: Path, how: How, least: int) -> Counter[str]:
    files = [File(folder / f"{seed}.safetensors", seed) for seed in range(FILES)]
    for file in files:
        make(source_of(file), content(file.seed, 0))

    def act(store: Store, files: Sequence[File]) -> Counter[str]:
        counts: Counter[str] = Counter()
        digests = [blake3(content(file.seed, 0)).hexdigest() for file in files]
        pairs = zip(files, digests, strict=True)
        for result in store.share_many((source_of(f), f.path, digest) for f, digest in pairs):
            error = result.error
            assert error is None or isinstance(error, FileSkippedError), error
            counts[result.outcome if error is None else error.reason] += 1
            assert error is None or error.reason != "not supported here"
        return counts

    def check(_: Store, files: Sequence[File]) -> None:
        names = {name for name in os.listdir(folder) if ".smartcache" in name}
        assert names == set()
        for file in files:
            assert source_of(file).read_bytes() == content(file.seed, 0)

    with Store(folder / "store") as store:
        return race(
            store, how, lambda _: files, act=act, check=check,
            points=SHARE_POINTS, wanted=("replaced", "different"), least=least,
        )  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
def test_sharing_loses_no_write(how: How, disk: Path, tmp_path: Path, rounds: Repeat) -> None:
    folder = disk / tmp_path.name
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    with Child(lambda: share_race(folder, how, rounds(4)), user=NOBODY) as racer:
        counts = racer.result()
    told(counts)
    assert counts["writes"] > 0
    assert counts["replaced"] > 0
