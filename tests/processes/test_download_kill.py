"""Downloads killed with SIGKILL, interrupted or out of space: nothing half-made is visible.

At each fault point that a download or an answered load reaches, and at random times while the
server sends. No file has its name before its bytes are proven. The next call completes, fetches
only what was not there, shares what the killed one could not, and clears what it left.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from smartcache.cli import main
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import look
from smartcache.hub import layout
from tests.hub.caches import refs_of
from tests.hub_server import Hub
from tests.processes.children import NOBODY, folder_of
from tests.processes.downloading import PATIENCE, ROOT, Ended, Job, Starter, Way, World, content
from tests.processes.killing import Moment, fail_with, judged
from tests.processes.points import POINTS, all_of
from tests.store.small_disks import PAGE, Disk, in_own_namespace

SIZE = 100_000
CONFIG, TOKENIZER = b'{"kind": "one"}', b'{"words": []}'
FETCHED = ("unet/model.safetensors", "other/model.safetensors")
KNOWN, CLAIMED, COPIED = (
    "text_encoder/model.safetensors",
    "vae/a.safetensors",
    "vae/b.safetensors",
)
PRESENT, TWICE = "present/a.safetensors", "present/b.safetensors"
LARGE_TEXT = "vocabulary.json"
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": TOKENIZER,
    LARGE_TEXT: content(9, SIZE),
    **{path: content(number, SIZE + number) for number, path in enumerate(
        (*FETCHED, KNOWN, CLAIMED, COPIED, PRESENT, TWICE), 10)},
}  # fmt: skip
RIGHT, WRONG = "unet/model.safetensors", "vae/model.safetensors"


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with Starter() as starter:
        yield starter


@pytest.fixture
def world(tmp_path: Path, hub: Hub, starter: Starter) -> World:
    return World(tmp_path / "world", hub, starter)


def prepare(world: World) -> None:
    """Let the files of the repo come from everywhere: there already, stores, folders, the Hub."""
    blobs = world.folder("org/one") / "blobs"
    blobs.mkdir(parents=True)
    for path in (PRESENT, TWICE):
        (blobs / world.commit("org/one").etag(path)).write_bytes(FILES[path])
    given, found = world.directory / "given", world.directory / "found"
    for folder, path in ((given, CLAIMED), (found, COPIED)):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(FILES[path])
    old = world.directory / "old.safetensors"
    old.write_bytes(FILES[TWICE])
    with world.store() as store:
        store.put_stream([FILES[KNOWN]], algorithms=("sha256",))
        store.adopt(old)
        look(store, [ModelFolder(path=given, is_given=True), ModelFolder(path=found)])


def problems_of_kills(
    points: list[str],
    make: Callable[[str], World],
    start: Callable[[World, Moment], Ended],
    judge: Callable[[World], Iterable[str]],
) -> Iterator[str]:
    """Kill a process at the first time of each point; yield what `judge` finds afterwards."""
    for number, place in enumerate(dict.fromkeys(points)):
        world = make(str(number))
        if not start(world, Moment(place, 1)).is_killed:
            yield f"not killed at {place}"
        yield from (f"killed at {place}: {problem}" for problem in judged(judge, world))


def finished(world: World, repo: str = "org/one", *, is_shared: bool = True) -> Iterator[str]:
    """Yield what is wrong after a killed download, and after the next one."""
    yield from world.problems(is_killed=True)
    yield from wrong_blobs(world, repo)
    for path in half_made(world.cache):
        if path.suffix == ".tmp":  # of a ref or a listing: a young one may be anybody's
            os.utime(path, (0, 0))
    complete = world.complete(repo)
    world.hub.clear()
    ended = world.download(repo)
    if ended.errors:
        yield f"the next run failed: {ended.errors}"
        return
    if not world.is_right(repo):
        yield "the next run made something else"
    for request in world.hub.gets():
        if request.file is not None and request.file.removeprefix(f"{repo}/") in complete:
            yield f"{request.file} was complete, and fetched again"
    yield from world.problems()
    yield from (f"{path} is left half-made" for path in half_made(world.cache))
    if is_shared:
        yield from unowned(world, repo)
    world.hub.clear()
    if world.download(repo).errors or world.hub.gets():
        yield "a third run fetched something"


def wrong_blobs(world: World, repo: str) -> Iterator[str]:
    """Yield the blobs of the HF cache with bytes that are not those of their name."""
    for path, file in world.commit(repo).files.items():
        blob = world.folder(repo) / "blobs" / file.etag
        if blob.exists() and blob.read_bytes() != file.read():
            yield f"the blob of {path} has wrong bytes"


def half_made(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if layout.is_half_made(path.name)]


def unowned(world: World, repo: str) -> Iterator[str]:
    """Yield the weights that are not shared through the store."""
    with world.store() as store:
        for path in (path for path in world.commit(repo).files if path.endswith(".safetensors")):
            if store.blob_at(Path(os.path.realpath(world.snapshot(repo) / path))) is None:
                yield f"{path} is no blob"


def killed(world: World, moment: Moment) -> Ended:
    return world.start("org/one", die_at=moment).wait()


def test_a_kill_at_any_fault_point_leaves_nothing_half_made(
    tmp_path: Path, hub: Hub, starter: Starter
) -> None:
    hub.add("org/one", FILES)

    def make(name: str) -> World:
        world = World(tmp_path / name, hub, starter)
        prepare(world)
        return world

    whole = make("whole")
    ended = whole.download("org/one")
    assert ended.path == whole.snapshot("org/one")
    assert {Path(str(each.file)).as_posix().removeprefix("org/one/") for each in hub.gets()} == {
        *FETCHED, "config.json", "tokenizer.json", LARGE_TEXT,
    }  # fmt: skip
    for beginning in ("put: ", "place: ", "read-only", "linked", "exchanged", "old removed"):
        assert any(point.startswith(beginning) for point in ended.points), beginning
    all_of("download", [Moment(place, 1) for place in ended.points])
    fail_with(problems_of_kills(ended.points, make, killed, finished))


def test_a_kill_leaves_nothing_half_made_in_a_cache_on_another_filesystem(
    tmp_path: Path, hub: Hub, starter: Starter, elsewhere: Path
) -> None:
    hub.add("org/one", FILES)

    def make(name: str) -> World:
        world = World(tmp_path / name, hub, starter)
        world.cache = elsewhere / name
        prepare(world)
        return world

    ended = make("whole").download("org/one")
    assert ended.errors == []
    all_of("download elsewhere", [Moment(place, 1) for place in ended.points])
    judge = partial(finished, is_shared=False)
    fail_with(problems_of_kills(ended.points, make, killed, judge))


def test_a_kill_while_bytes_come_from_a_tier_leaves_nothing_half_made(
    tmp_path: Path, hub: Hub, starter: Starter
) -> None:
    """Obstore does not survive a fork, and this process may have used it: others add the tier."""
    if importlib.util.find_spec("obstore") is None:
        pytest.skip("no obstore here")
    hub.add("org/one", {RIGHT: FILES[RIGHT], "config.json": CONFIG})
    seed = World(tmp_path / "seed", hub, starter)
    assert seed.download("org/one").errors == []

    def make(name: str) -> World:
        world = seed if name == "seed" else World(tmp_path / name, hub, starter)
        steps = [["remote", "add", "nas", str(tmp_path / "nas")]]
        if world is seed:
            steps.append(["remote", "push", "nas", "org/one", "--cache-dir", str(seed.cache)])
        for words in steps:
            subprocess.run(
                [sys.executable, "-m", "smartcache", *words],
                env={**os.environ, **world.environment}, cwd=ROOT, check=True, capture_output=True,
            )  # fmt: skip
        return world

    make("seed")
    hub.clear()
    ended = make("whole").download("org/one")
    assert ended.errors == []
    assert hub.gets(RIGHT) == []
    all_of("download from a tier", [Moment(place, 1) for place in ended.points])
    fail_with(problems_of_kills(ended.points, make, killed, finished))


@pytest.mark.parametrize("user", [None, NOBODY], ids=["me", "nobody"])
def test_a_kill_leaves_nothing_half_made_in_a_local_dir(
    user: int | None, hub: Hub, starter: Starter
) -> None:
    """Root gets files with own bytes there, everybody else links."""
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    hub.add("org/one", FILES)

    def judge(world: World) -> Iterator[str]:
        yield from world.problems(is_killed=True)  # the store ends what a dead process had begun
        there = local_files(world)
        yield from (f"{path} is wrong" for path, data in there.items() if data != FILES[path])
        local = world.directory / "local"
        for path in half_made(local):
            os.utime(path, (0, 0))  # a young one may be of somebody who is quick
        hub.clear()
        yield from into_local_dir(world, user).errors
        if local_files(world) != FILES:
            yield "the next run made something else"
        yield from (f"{path} is left half-made" for path in half_made(local))
        yield from (f"{each} was fetched again" for each in there if hub.gets(each))
        yield from world.problems()

    with folder_of(user) as folder:
        ended = into_local_dir(World(folder / "whole", hub, starter), user)
        assert ended.errors == []
        fail_with(
            problems_of_kills(
                ended.points,
                lambda name: World(folder / name, hub, starter),
                lambda world, moment: into_local_dir(world, user, moment),
                judge,
            )
        )


def into_local_dir(world: World, user: int | None, die_at: Moment | None = None) -> Ended:
    """Download to a folder beside two others that have some of the files."""
    local = world.directory / "local"
    places = {"given": CLAIMED, "found": COPIED}
    if not local.exists():
        local.mkdir()
        for name, path in places.items():
            (world.directory / name).mkdir()
            (world.directory / name / "weights.safetensors").write_bytes(FILES[path])
        for each in (world.directory, *world.directory.rglob("*")) if user is not None else ():
            os.chown(each, user or 0, user or 0)
    job = Job(
        environment=world.environment,
        calls=[world.call("org/one", local_dir=str(local))],
        user=user,
        look=[(str(world.directory / name), name == "given") for name in places],
        die_at=None if die_at is None else (die_at.place, die_at.nth),
    )
    return world.begin(job).wait()


def local_files(world: World) -> dict[str, bytes]:
    local = world.directory / "local"
    return {
        path.relative_to(local).as_posix(): path.read_bytes()
        for path in local.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


# answered loads

ANSWERED = ["config.json", "text_encoder/*", "unet/*"]
WANTED = ("config.json", KNOWN, RIGHT)


def answered(world: World, moment: Moment | None = None) -> Ended:
    """Let huggingface_hub load some files, with a store that has one of them and one besides."""
    return world.start("org/one", way="answered", die_at=moment, allow_patterns=ANSWERED).wait()


def test_a_kill_at_any_fault_point_of_an_answered_load_leaves_nothing_half_made(
    tmp_path: Path, hub: Hub, starter: Starter
) -> None:
    hub.add("org/one", FILES)

    def make(name: str) -> World:
        world = World(tmp_path / name, hub, starter)
        with world.store() as store:
            for path in (KNOWN, CLAIMED):
                store.put_stream([FILES[path]], algorithms=("sha256",))
        return world

    def loaded(world: World) -> Iterator[str]:
        complete = {KNOWN, *world.complete("org/one")}
        hub.clear()
        yield from answered(world).errors
        yield from (f"{path} was fetched" for path in complete if hub.gets(path))
        yield from world.problems(is_killed=True)
        names = set(os.listdir(world.folder("org/one") / "blobs"))
        names -= {name for name in names if name.startswith("tmp_")}  # huggingface_hub's, empty
        wanted = {world.commit("org/one").etag(path) for path in WANTED}
        if names != wanted:
            yield f"in blobs/: {names ^ wanted}"
        yield from (f"{path} is no blob" for path in (KNOWN, RIGHT) if not is_blob(world, path))

    def judge(world: World) -> Iterator[str]:
        yield from world.problems()
        yield from wrong_blobs(world, "org/one")
        yield from loaded(world)

    whole = make("whole")
    points = answered(whole).points
    all_of("answer", [Moment(place, 1) for place in points])
    assert any(point.startswith("place:") for point in points)
    assert list(loaded(whole)) == []
    fail_with(problems_of_kills(points, make, answered, judge))


def is_blob(world: World, path: str) -> bool:
    with world.store() as store:
        return store.blob_at(Path(os.path.realpath(world.snapshot("org/one") / path))) is not None


@pytest.mark.parametrize("path", [RIGHT, "config.json"])
def test_wrong_bytes_that_a_killed_load_fetched_are_seen_by_nobody(path: str, world: World) -> None:
    world.hub.add("org/one", FILES)
    assert world.download("org/one", allow_patterns=ANSWERED, ignore_patterns=[path]).errors == []
    world.hub.faults.wrong_bytes(path)
    assert answered(world, Moment("download: fetched", 1)).is_killed
    assert not os.path.lexists(blob_of(world, path))
    assert world.problems(is_killed=True) == []
    assert answered(world).errors == []
    assert (world.snapshot("org/one") / path).read_bytes() == FILES[path]
    assert world.problems() == []


# a file that is in the way


@pytest.mark.parametrize("source", ["the Hub", "a folder"])
@pytest.mark.parametrize("path", [RIGHT, "config.json"])
def test_a_file_of_the_users_own_is_at_its_name_or_kept_whenever_a_download_is_killed(
    path: str, source: str, tmp_path: Path, hub: Hub, starter: Starter
) -> None:
    """It is out of the way while another comes to its place, and never lost."""
    files = {RIGHT: content(1, SIZE), "config.json": CONFIG}
    hub.add("org/one", files)
    mine = b"mine" * SIZE

    def make(name: str) -> World:
        world = World(tmp_path / name, hub, starter)
        for folder, data in (("local", mine), ("found", content(1, SIZE))):
            file = world.directory / folder / path
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
        return world

    def run(world: World, moment: Moment | None = None) -> Ended:
        calls = [world.call("org/one", local_dir=str(world.directory / "local"))]
        look = [(str(world.directory / "found"), False)] if source == "a folder" else []
        die_at = None if moment is None else (moment.place, moment.nth)
        job = Job(environment=world.environment, calls=calls, look=look, die_at=die_at)
        return world.begin(job).wait()

    def judge(world: World) -> Iterator[str]:
        bad = in_bad(world)  # the store is opened: it ends what a dead process had begun
        there = local_files(world)
        if [each for each in (*there.values(), *bad) if each == mine] != [mine]:
            yield "mine is lost, or there twice"
        if [data for name, data in there.items() if data not in (mine, files[name])]:
            yield f"wrong files: {there}"
        yield from run(world).errors
        if local_files(world) != files:
            yield "the next run made something else"
        if in_bad(world) != [mine]:
            yield f"mine is not kept: {in_bad(world)}"

    ended = run(make("whole"))
    assert ended.errors == []
    fail_with(problems_of_kills(ended.points, make, run, judge))


def test_a_file_of_the_users_own_comes_back_if_nothing_came(world: World) -> None:
    world.hub.add("org/one", {RIGHT: content(1, SIZE)})
    world.hub.add("org/two", {"config.json": CONFIG})
    local = world.directory / "local"
    (local / "unet").mkdir(parents=True)
    (local / RIGHT).write_bytes(b"mine")
    world.hub.faults.wrong_bytes(f"org/one/{RIGHT}")
    hold = world.hub.faults.hold(f"org/one/{RIGHT}", after=1000)
    running = world.start("org/one", local_dir=str(local))
    assert hold.reached.wait(PATIENCE)
    # Nobody else brings it back before.
    assert world.download("org/two").errors == []
    assert not (local / RIGHT).exists()
    hold.release()
    assert running.wait().error.startswith("DigestMismatchError: ")
    assert (local / RIGHT).read_bytes() == b"mine"
    assert world.download("org/one", local_dir=str(local)).errors == []
    assert (local / RIGHT).read_bytes() == content(1, SIZE)
    assert b"mine" in in_bad(world)


# what was left half-made


def verify(world: World) -> int:
    """Run `hub verify --repair`; return its exit code."""
    words = ["hub", "verify", "--repair", "-y", "--cache-dir", str(world.cache)]
    return CliRunner().invoke(main, words, env=world.environment).exit_code


@pytest.mark.parametrize("way", ["ours", "plain"])
@pytest.mark.parametrize("then", ["verify", "download"])
def test_what_a_killed_download_has_left_half_made_goes(
    way: Literal["ours", "plain"], then: str, world: World
) -> None:
    world.hub.add("org/one", {RIGHT: content(1, SIZE), "config.json": CONFIG})
    hold = world.hub.faults.hold(f"org/one/{RIGHT}", after=50_000)
    running = world.start("org/one", way=way)
    assert hold.reached.wait(PATIENCE)
    half = list(blob_of(world, RIGHT).parent.glob(f"{blob_of(world, RIGHT).name}*.incomplete"))
    assert half != []
    # One whose process is alive is left alone.
    assert verify(world) == 0
    assert [path for path in half if path.exists()] == half
    running.kill()
    hold.release()
    ref = world.folder("org/one") / "refs" / "main.0a1b2c3d.tmp"
    ref.parent.mkdir(exist_ok=True)
    ref.touch()  # killed between making and writing it
    assert verify(world) == 0
    assert ref.exists()  # it may be anybody's who is quick
    os.utime(ref, (0, 0))
    if then == "verify":
        assert verify(world) == 0
    else:
        assert world.download("org/one").errors == []
    assert half_made(world.cache) == []


def test_what_a_killed_download_has_left_in_a_local_dir_goes(world: World) -> None:
    world.hub.add("org/one", {RIGHT: content(1, SIZE)})
    local = world.directory / "local"
    hold = world.hub.faults.hold(f"org/one/{RIGHT}", after=50_000)
    running = world.start("org/one", local_dir=str(local))
    assert hold.reached.wait(PATIENCE)
    running.kill()
    hold.release()
    half = half_made(local)
    if not half:
        pytest.skip("this huggingface_hub goes on where it was")
    for path in half:
        os.utime(path, (0, 0))
    assert world.download("org/one", local_dir=str(local)).errors == []
    assert half_made(local) == []
    assert (local / RIGHT).read_bytes() == content(1, SIZE)


@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "is killed"])
def test_a_file_of_a_local_dir_that_is_being_hashed_is_no_leftover(
    is_killed: bool, world: World
) -> None:
    """To hash a large file takes longer than what is half-made counts as young."""
    world.hub.add("org/one", {RIGHT: content(1, SIZE)})
    world.hub.add("org/two", {"config.json": CONFIG})
    local = world.directory / "local"
    running = world.start("org/one", stop_at=Moment("download: fetched", 1), local_dir=str(local))
    running.wait_until_stopped()
    half = half_made(local)
    assert [path.read_bytes() for path in half] == [content(1, SIZE)]
    os.utime(half[0], (0, 0))
    assert world.download("org/two", local_dir=str(local)).errors == []
    assert half_made(local) == half
    if is_killed:
        running.kill()
        assert local_files(world) == {"config.json": CONFIG}
        assert world.download("org/two", local_dir=str(local)).errors == []
        assert half_made(local) == []
        assert world.download("org/one", local_dir=str(local)).errors == []
    else:
        running.go_on()
        assert running.wait().errors == []
        assert len(world.hub.gets(RIGHT)) == 1
    assert local_files(world) == {"config.json": CONFIG, RIGHT: content(1, SIZE)}


def test_a_copy_that_is_about_to_get_its_name_is_no_leftover(world: World) -> None:
    world.hub.add("org/one", {LARGE_TEXT: FILES[LARGE_TEXT], "config.json": CONFIG})
    found = world.directory / "found"
    found.mkdir()
    (found / "words.json").write_bytes(FILES[LARGE_TEXT])
    job = Job(
        environment=world.environment, calls=[world.call("org/one")], look=[(str(found), False)],
        stop_at=("claim: copied", 1),
    )  # fmt: skip
    running = world.begin(job)
    running.wait_until_stopped()
    half = half_made(world.cache)
    assert world.download("org/one", allow_patterns=["config.json"]).errors == []
    assert half_made(world.cache) == half != []
    running.go_on()
    assert running.wait().errors == []
    assert world.is_right("org/one")
    assert world.hub.gets(LARGE_TEXT) == []


def test_a_kill_at_any_time_while_the_server_sends_leaves_nothing_half_made(
    tmp_path: Path, hub: Hub, starter: Starter, rounds: Callable[[int], int]
) -> None:
    files = {f"{number}.safetensors": content(number, 400_000) for number in range(4)}
    hub.add("org/one", {**files, **{f"{number}.json": b"%d" % number for number in range(4)}})
    hub.bandwidth = 4e6
    for number in range(rounds(4)):
        world = World(tmp_path / str(number), hub, starter)
        world.store().close()
        running = world.start("org/one", max_workers=random.choice((1, 2, 8)))
        delay = random.random() * 0.7
        time.sleep(delay)
        running.kill()
        assert list(finished(world)) == [], f"killed after {delay} s"


CHANGES = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.chmod", "os.symlink")


@pytest.mark.parametrize("way", ["ours", "answered"])
def test_a_kill_before_any_change_of_a_file_leaves_nothing_half_made(
    way: Way, tmp_path: Path, hub: Hub, starter: Starter, rounds: Callable[[int], int]
) -> None:
    """Also before those of huggingface_hub. A time that is not reached ends well."""
    hub.add("org/one", FILES)
    for number in range(rounds(5)):
        world = World(tmp_path / str(number), hub, starter)
        prepare(world)
        moment = Moment(random.choice(CHANGES), random.randrange(1, 40))
        assert world.start("org/one", way=way, die_at=moment).wait().errors == []
        assert list(finished(world)) == [], moment


# what the killed process had not proven


def blob_of(world: World, path: str) -> Path:
    return world.folder("org/one") / "blobs" / world.commit("org/one").etag(path)


def in_bad(world: World) -> list[bytes]:
    with world.store() as store:
        bad = store.layout.bad
        return [path.read_bytes() for path in bad.iterdir()] if bad.exists() else []


@pytest.mark.parametrize("between", [
    pytest.param(None, id="nothing"),
    pytest.param({"local_files_only": True}, id="local"),
    pytest.param({"endpoint": "http://127.0.0.1:9"}, id="no network"),
    pytest.param({"filename": "tokenizer.json"}, id="one file, online"),
    pytest.param({"allow_patterns": ["*token*"], "local_files_only": True}, id="some files, local"),
])  # fmt: skip
@pytest.mark.parametrize("path", [WRONG, "config.json"])
def test_wrong_bytes_that_a_killed_download_fetched_are_seen_by_nobody(
    path: str, between: dict[str, object] | None, world: World
) -> None:
    """With everything else there, huggingface_hub has an answer without the Hub."""
    files = {"config.json": CONFIG, "tokenizer.json": TOKENIZER, WRONG: content(1, SIZE)}
    world.hub.add("org/one", files)
    assert world.download("org/one", ignore_patterns=[path]).errors == []
    world.hub.faults.wrong_bytes(f"org/one/{path}")
    assert world.start("org/one", die_at=Moment("download: fetched", 1)).wait().is_killed
    world.hub.clear()
    if between is not None:
        world.download("org/one", **between)
    assert not os.path.lexists(blob_of(world, path))
    assert not os.path.lexists(world.snapshot("org/one") / path)
    assert world.download("org/one", filename=path, local_files_only=True).paths == [None]
    assert world.problems(is_killed=True) == []
    assert world.download("org/one").path == world.snapshot("org/one")
    assert world.is_right("org/one")
    assert len(world.hub.gets(path)) == 1
    assert half_made(world.cache) == []
    assert world.problems() == []


@pytest.mark.parametrize("path", [WRONG, "config.json"])
def test_wrong_bytes_that_a_killed_download_fetched_are_not_in_a_local_dir(
    path: str, world: World
) -> None:
    world.hub.add("org/one", {"config.json": CONFIG, WRONG: content(1, SIZE)})
    local = world.directory / "local"
    assert world.download("org/one", local_dir=str(local), ignore_patterns=[path]).errors == []
    world.hub.faults.wrong_bytes(f"org/one/{path}")
    moment = Moment("download: fetched", 1)
    assert world.start("org/one", die_at=moment, local_dir=str(local)).wait().is_killed
    assert not os.path.lexists(local / path)
    assert world.download("org/one", local_dir=str(local)).path == local
    assert local_files(world) == {"config.json": CONFIG, WRONG: content(1, SIZE)}


def test_a_branch_that_moves_meanwhile_is_followed_by_the_next_call(world: World) -> None:
    files = {"config.json": CONFIG, RIGHT: content(1, SIZE)}
    world.hub.add("org/one", files)
    before = world.snapshot("org/one")
    hold = world.hub.faults.hold(f"org/one/{RIGHT}", after=1000)
    running = world.start("org/one")
    assert hold.reached.wait(PATIENCE)
    world.hub.add("org/one", {**files, "config.json": TOKENIZER})
    hold.release()
    assert running.wait().path == before != world.snapshot("org/one")
    assert {path: (before / path).read_bytes() for path in files} == files
    world.hub.faults.wrong_bytes("org/one/config.json")
    assert world.download("org/one").error.startswith("DigestMismatchError: ")
    assert world.problems() == []
    assert world.download("org/one").path == world.snapshot("org/one")
    assert world.is_right("org/one")


@pytest.mark.parametrize("place", sorted(POINTS["download wrong bytes"]))
def test_a_kill_while_wrong_bytes_that_were_there_are_set_aside_leaves_nothing_visible(
    place: str, world: World
) -> None:
    world.hub.add("org/one", {"config.json": CONFIG, WRONG: content(1, SIZE)})
    spot = blob_of(world, WRONG)
    spot.parent.mkdir(parents=True)
    spot.write_bytes(content(99, SIZE))
    assert world.start("org/one", die_at=Moment(place, 1)).wait().is_killed
    assert world.problems(is_killed=True) == []
    assert world.download("org/one").path == world.snapshot("org/one")
    assert world.is_right("org/one")
    assert in_bad(world) == [content(99, SIZE)]


# Ctrl-C


SCRIPT = "import smartcache; print(smartcache.snapshot_download('org/one', max_workers=2))"


def library_call(world: World) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, **world.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", [pytest.param("slow", marks=pytest.mark.soak), "stuck"])
def test_an_interrupted_library_call_ends_soon_and_goes_on_later(how: str, world: World) -> None:
    files = {f"{number}.safetensors": content(number, 1_000_000) for number in range(4)}
    world.hub.add("org/one", {"config.json": CONFIG, **files})
    world.hub.bandwidth = 500_000
    hold = world.hub.faults.hold("org/one/", after=100_000, times=2 if how == "stuck" else 1)
    with library_call(world) as process:
        assert hold.reached.wait(PATIENCE)
        if how == "slow":
            hold.release()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT, stderr
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert "StoppedError" not in stderr
    assert world.hub.fetched_bytes() < 3_000_000  # it did not download all the rest first
    with world.store() as store:
        for file in world.commit("org/one").files.values():
            assert store.key_locks.busy(f"hub:{file.etag}") is None
    world.hub.faults.clear()
    world.hub.bandwidth = None
    assert list(finished(world)) == []
    assert refs_of(world.folder("org/one")) == {"main": world.commit("org/one").sha}


# no space


def test_a_full_disk_is_a_clear_error_and_nothing_is_half_made(tmp_path: Path) -> None:
    """The Hub is made in there too: no process is forked beside its threads."""

    def run() -> list[str]:
        disk = Disk(tmp_path / "disk", 12 << 20)
        with Hub() as hub, Starter() as starter:
            files = {f"{number}.safetensors": content(number, 1 << 20) for number in range(4)}
            hub.add("org/one", {"config.json": CONFIG, **files})
            world = World(disk.point / "world", hub, starter)
            with world.store():
                pass
            errors = []
            hub.bandwidth = 4 << 20
            for free in (128, 400, 700):
                filling = threading.Thread(target=fill_later, args=(disk, free))
                filling.start()
                ended = world.download("org/one")
                filling.join()
                errors += ended.errors or [f"with {free} free pages it ended well"]
                disk.clear()
                assert world.problems() == []
            assert list(finished(world)) == []
        return errors

    errors = in_own_namespace(run)
    assert len(errors) == 3
    for error in errors:
        assert "No space left on device" in error


def fill_later(disk: Disk, but: int) -> None:
    """Fill a disk while a download runs that had room enough when it began."""
    end = time.monotonic() + 20
    while not any(disk.point.rglob("*.incomplete")) and time.monotonic() < end:
        time.sleep(0.005)
    with open(disk.point / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, max(1, disk.free_pages - but) * PAGE)
