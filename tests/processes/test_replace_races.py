"""No write is lost, and no name is ever absent, while the store replaces or adopts files.

Every way of writing runs against the store in processes of their own, as root (whom no mode stops)
and as an ordinary user.
"""

from __future__ import annotations

import functools
import itertools
import logging
import mmap
import os
import random
import select
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from blake3 import blake3

if sys.platform != "linux":
    pytest.skip("leases and RENAME_EXCHANGE", allow_module_level=True)

from tests.api import (
    Adoption,
    BlobNotFoundError,
    DamagedBlobError,
    FileBusyError,
    FileSkippedError,
    Replacement,
    Spot,
    Store,
    give_back,
)
from tests.api import store_faults as faults
from tests.api import store_kernel as kernel
from tests.api import store_swap as swap
from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.races import HOWS, Breaks, File, How, Rounds, content, make, race

_log = logging.getLogger(__name__)

Seconds = Callable[[float], float]

FILES = 3
ALWAYS_SEEN: dict[How, tuple[str, ...]] = {
    "edit": ("replaced",),
    "edit fast": ("leases broken", "replaced"),
    "map": ("leases broken",),
    "rename": ("changed", "replaced"),
    "recreate": ("changed",),
    "truncate": ("leases broken",),
}
"""What a race with each kind of writer must have shown, or it was none."""
OLD_ENOUGH = 2.1
"""Seconds after which the store trusts the times of a file."""


@pytest.fixture(params=["unprivileged", "root"] if os.geteuid() == 0 else ["unprivileged"])
def user(request: pytest.FixtureRequest) -> int | None:
    """Who runs the race: everybody obeys modes, but root."""
    return NOBODY if request.param == "unprivileged" and os.geteuid() == 0 else None


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


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if "smartcache" in name]


def tally(results: Iterable[Adoption | Replacement]) -> Counter[str]:
    """Count what became of files; whatever was left alone was so for a reason that has a name."""
    counts: Counter[str] = Counter()
    for result in results:
        error = result.error
        counts[result.outcome if error is None else getattr(error, "reason", "absent")] += 1
        assert error is None or isinstance(error, (FileSkippedError, FileNotFoundError)), error
    return counts


# replace


def replace_all(store: Store, files: Sequence[File], digests: dict[int, str]) -> Counter[str]:
    return tally(store.replace_many((file.path, digests[file.seed]) for file in files))


def check_replaced(store: Store, files: Sequence[File], digests: dict[int, str]) -> None:
    assert leftovers(files[0].path.parent) == []
    for seed, digest in digests.items():
        if not is_handed_out(store, digest):
            # Only root can have written through a link. For the next round:
            store.put_stream([content(seed, 0)])


def replace_race(folder: Path, how: How, seconds: float, *, aged: int = 0) -> Counter[str]:
    """Each file has a blob of its own: through one link root would write to all."""
    digests = {}
    with Store(folder / "store") as store:
        for seed in range(FILES):
            digests[seed] = store.put_stream([content(seed, 0)]).digest
        return race(
            store,
            how,
            files_of(folder, how) if aged else files_of(folder),
            act=functools.partial(replace_all, digests=digests),
            check=functools.partial(check_replaced, digests=digests),
            points=("replace: journaled", "replace: temporary linked", "replace: exchanged"),
            wanted=() if aged else ALWAYS_SEEN.get(how, ()),
            seconds=seconds,
            most_rounds=aged or None,
        )


def files_of(folder: Path, how: How | None = None) -> Rounds:
    """Name the files of each round: always the same ones, or (aged) others each time."""

    def named(number: int) -> list[File]:
        prefix = "" if how is None else f"{how}-{number}-"
        return [File(folder / f"{prefix}{seed}.safetensors", seed) for seed in range(FILES)]

    return named


@pytest.mark.parametrize("how", HOWS)
def test_replace_loses_no_write(how: How, folder: Path, user: int | None, seconds: Seconds) -> None:
    with Child(lambda: replace_race(folder, how, seconds(0.8)), user=user) as racer:
        counts = racer.result()
    told(counts)
    assert counts["writes"] > 0
    assert all(counts[name] for name in ALWAYS_SEEN.get(how, ())), counts


def test_replace_loses_no_write_to_files_that_were_left_alone_for_long(
    seconds: Seconds, rounds: Callable[[int], int]
) -> None:
    """These are hashed without a lease, which comes afterwards."""
    user = NOBODY if os.geteuid() == 0 else None

    def races(folder: Path, aged: int) -> Counter[str]:
        for how, number in itertools.product(HOWS, range(aged)):
            for file in files_of(folder, how)(number):
                make(file.path, content(file.seed, 0))
        time.sleep(OLD_ENOUGH)
        counts: Counter[str] = Counter()
        for how in HOWS:
            counts += replace_race(folder, how, seconds(1.2), aged=aged)
        return counts

    with folder_of(user) as folder, Child(lambda: races(folder, rounds(40)), user=user) as racer:
        counts = racer.result()
    told(counts)
    assert counts["writes"] > 0
    assert counts["replaced"] > 0


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


def test_a_write_through_a_mapping_that_was_open_all_the_time_is_not_lost(tmp_path: Path) -> None:
    """Only the first store through a page changes the times of the file, the later ones do not."""
    path = tmp_path / "a.safetensors"
    data = content(0, 0)
    with Store(tmp_path / "store") as store:
        digest = store.put_stream([data]).digest
        path.write_bytes(data)
        with open(path, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
            mapping[0] = data[0]
            time.sleep(OLD_ENOUGH)
            assert store.digest_of(path).digest == digest
            with pytest.raises(FileBusyError):
                store.replace(path, digest)
            mapping[1] = data[1] ^ 1
        with pytest.raises(FileSkippedError):
            store.replace(path, digest)
    assert path.read_bytes() == bytes([data[0], data[1] ^ 1]) + data[2:]


def test_two_processes_replace_the_same_files_at_once(
    folder: Path, user: int | None, seconds: Seconds
) -> None:
    paths = [folder / f"{number}.safetensors" for number in range(20)]
    data = content(0, 0)
    deadline = time.monotonic() + seconds(1.0)

    def replace(turn: int, digest: str) -> Counter[str]:
        mine = random.Random(turn).sample(paths, len(paths))
        with Store(folder / "store") as store:
            return tally(store.replace_many((path, digest) for path in mine))

    def rounds() -> Counter[str]:
        counts: Counter[str] = Counter()
        while time.monotonic() < deadline:
            with Store(folder / "store") as store:
                digest = store.put_stream([data]).digest
            for path in paths:
                make(path, data)
            with (
                Child(lambda: replace(counts["rounds"], digest)) as one,  # noqa: B023 - used at once
                Child(lambda: replace(-counts["rounds"], digest)) as two,  # noqa: B023
            ):
                counts += one.result() + two.result()
            counts["rounds"] += 1
            with Store(folder / "store") as store:
                blob = store.path_of(digest)
                assert [path for path in paths if not path.samefile(blob)] == []
                links = {link.path for link in store.links_of(store.get(digest))}
                assert links == set(paths), "the index knows every link"
            assert leftovers(folder) == []
        return counts

    with Child(rounds, user=user) as racer:
        counts = racer.result()
    told(counts)
    assert counts["replaced"] > 0


# adopt


def adopt_race(folder: Path, how: How, seconds: float) -> Counter[str]:
    adopted: dict[Path, str] = {}

    def rounds(number: int) -> list[File]:
        first = number * FILES
        return [File(folder / f"{n}.safetensors", first + n) for n in range(FILES)]

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
            rounds,
            act=adopt,
            check=check,
            wanted=("adopted",),
            points=("adopt: journaled", "adopt: read-only", "adopt: linked", "adopt: rows written"),
            seconds=seconds,
        )


@pytest.mark.parametrize("how", HOWS)
def test_adopt_loses_no_write_and_hands_out_no_wrong_bytes(
    how: How, folder: Path, user: int | None, seconds: Seconds
) -> None:
    with Child(lambda: adopt_race(folder, how, seconds(0.4)), user=user) as racer:
        counts = racer.result()
    told(counts)
    assert counts["writes"] > 0
    assert counts["adopted"] > 0
