"""Downloads beside each other and beside everything else: each byte once, and never a wrong one.

Several processes and threads that want the same bytes, one of which dies; huggingface_hub alone on
the same cache; smartcache's own commands; programs that change a file while it is claimed.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

if sys.platform != "linux":
    pytest.skip("fork", allow_module_level=True)

from tests.hub_server import Hub
from tests.processes.children import NOBODY, folder_of
from tests.processes.downloading import (
    PATIENCE,
    ROOT,
    WRITES,
    Ended,
    Job,
    Running,
    Starter,
    Way,
    World,
    content,
    write,
)
from tests.processes.killing import Moment

SIZE = 400_000
ENCODER, UNET = "text_encoder/model.safetensors", "unet/model.safetensors"
SHARED = {ENCODER: content(1, SIZE), "vae/model.safetensors": content(2, SIZE)}
REPOS = {
    "org/one": {"config.json": b"1", **SHARED, UNET: content(3, SIZE)},
    "org/two": {"config.json": b"2", **SHARED, UNET: content(4, SIZE)},
}


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with Starter() as starter:
        yield starter


@pytest.fixture
def world(tmp_path: Path, hub: Hub, starter: Starter) -> World:
    for name, files in REPOS.items():
        hub.add(name, files)
    world = World(tmp_path / "world", hub, starter)
    world.store().close()
    return world


def begin_anew(world: World) -> None:
    """Remove the store and the HF cache, and make an empty store."""
    shutil.rmtree(world.home)
    shutil.rmtree(world.cache)
    world.store().close()


def fetched(hub: Hub) -> dict[str, int]:
    """Return how many bytes of each content were sent, weights only."""
    sent: Counter[str] = Counter()
    for request in hub.gets(".safetensors"):
        repo, path = str(request.file).split("/", 2)[1:]
        commit = hub.repositories["model", f"org/{repo}"].find("main")
        assert commit is not None
        sent[commit.etag(path)] += request.sent
    return dict(sent)


def contents(world: World, *repos: str) -> dict[str, int]:
    """Return the size of each content of some repos, weights only."""
    return {
        file.etag: file.size
        for repo in repos
        for path, file in world.commit(repo).files.items()
        if path.endswith(".safetensors")
    }


RACES = [
    pytest.param([["org/one"], ["org/one"]], id="two processes, one repo"),
    pytest.param([["org/one", "org/one"]], id="two threads, one repo"),
    pytest.param([["org/one", "org/two"]] * 2, id="two processes with two threads each"),
]


@pytest.mark.parametrize("way", ["ours", "answered"])
@pytest.mark.parametrize("processes", RACES)
def test_each_byte_of_a_weight_is_fetched_once_by_all_together(
    processes: list[list[str]], way: Way, world: World, rounds: Callable[[int], int]
) -> None:
    world.hub.bandwidth = 4e6
    wanted = sorted(set(itertools.chain.from_iterable(processes)))
    for _ in range(rounds(1)):
        running = [world.start(*repos, way=way) for repos in processes]
        for process, repos in zip(running, processes, strict=True):
            ended = process.wait()
            assert ended.errors == []
            assert ended.paths == [str(world.snapshot(repo)) for repo in repos]
        assert all(map(world.is_right, wanted))
        assert fetched(world.hub) == contents(world, *wanted)
        assert world.problems() == []
        begin_anew(world)
        world.hub.clear()


def test_processes_with_caches_of_their_own_fetch_each_byte_once(world: World) -> None:
    world.hub.bandwidth = 4e6
    caches = [world.directory / f"hf{number}" for number in range(3)]
    running = [world.start("org/one", cache_dir=str(cache)) for cache in caches]
    for process in running:
        assert process.wait().errors == []
    assert fetched(world.hub) == contents(world, "org/one")
    inodes = set()
    for cache in caches:
        world.cache = cache
        assert world.is_right("org/one")
        assert world.problems() == []
        inodes.add(os.stat(world.snapshot("org/one") / UNET).st_ino)
    assert len(inodes) == 1


def test_who_waits_for_the_content_of_another_repo_finds_it_and_fetches_nothing(
    world: World,
) -> None:
    hold = world.hub.faults.hold(f"org/one/{ENCODER}", after=100_000)
    ways: tuple[Way, ...] = ("ours", "answered")
    first = world.start("org/one", allow_patterns=[ENCODER])
    assert hold.reached.wait(PATIENCE)
    caches = {way: world.directory / way for way in ways}
    others = [
        world.start("org/two", way=way, cache_dir=str(cache), allow_patterns=[ENCODER])
        for way, cache in caches.items()
    ]
    until(lambda: all(any(cache.rglob("*.lock")) for cache in caches.values()))
    time.sleep(0.3)  # until they wait for the content
    hold.release()
    assert first.wait().errors == []
    for other in others:
        path = other.wait().path / ENCODER
        assert path.read_bytes() == SHARED[ENCODER]
        assert path.stat().st_ino == (world.snapshot("org/one") / ENCODER).stat().st_ino
    assert fetched(world.hub) == {world.commit("org/one").etag(ENCODER): SIZE}
    assert world.problems() == []


@pytest.mark.parametrize("way", ["answered", "ours"])
def test_a_forced_download_fetches_and_shares_again(way: Way, world: World) -> None:
    assert world.download("org/one").errors == []
    world.hub.clear()
    ended = world.download("org/one", way=way, force_download=True)
    assert ended.path == world.snapshot("org/one")
    assert fetched(world.hub) == contents(world, "org/one")
    assert world.is_right("org/one")
    assert world.problems() == []
    with world.store() as store:
        for path in REPOS["org/one"]:
            is_blob = store.blob_at(Path(os.path.realpath(ended.path / path))) is not None
            assert is_blob == path.endswith(".safetensors"), path


@pytest.mark.parametrize("way", ["forked", "forked, all answered"])
def test_a_child_that_is_forked_in_a_load_does_not_use_the_store_of_its_parent(
    way: Way, world: World
) -> None:
    """It downloads as it would alone; what answers everything opens a store of its own."""
    assert world.download("org/one", allow_patterns=[ENCODER]).errors == []
    world.hub.clear()
    ended = world.download("org/two", way=way, allow_patterns=[ENCODER])
    assert (ended.path / ENCODER).read_bytes() == SHARED[ENCODER]
    sent = {} if way != "forked" else {world.commit("org/two").etag(ENCODER): SIZE}
    assert fetched(world.hub) == sent
    assert os.path.samefile(ended.path / ENCODER, world.snapshot("org/one") / ENCODER)
    assert world.problems() == []


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("is_local", [False, True])
def test_two_programs_never_wait_for_each_other(is_local: bool, world: World) -> None:
    """One has huggingface_hub's lock on a file and wants its bytes elsewhere, the other waits."""
    local = world.directory / "local"
    if is_local:
        lock = local / f".cache/huggingface/download/{UNET}.lock"
    else:
        name = f"{world.commit('org/one').etag(UNET)}.lock"
        lock = world.cache / ".locks" / world.folder("org/one").name / name
    lock.parent.mkdir(parents=True)
    with WeakFileLock(lock):
        waiting = world.start("org/one", local_dir=str(local) if is_local else None)
        until(lambda: bool(world.hub.gets(f"org/one/{ENCODER}")))
        time.sleep(0.3)  # until it waits for the lock
        elsewhere = world.start("org/one", cache_dir=str(world.directory / "elsewhere"))
        assert elsewhere.wait().errors == []
    ended = waiting.wait()
    assert ended.errors == []
    assert (ended.path / UNET).read_bytes() == content(3, SIZE)
    assert fetched(world.hub)[world.commit("org/one").etag(UNET)] == SIZE
    assert world.problems() == []


def test_nobody_waits_for_a_process_that_was_killed(world: World) -> None:
    hold = world.hub.faults.hold(f"org/one/{ENCODER}", after=100_000)
    victim = world.start("org/one")
    assert hold.reached.wait(PATIENCE)
    running = [world.start("org/two") for _ in range(3)]
    until(lambda: any(each.sent == SIZE for each in world.hub.gets(f"org/two/{UNET}")))
    assert world.hub.gets(f"org/two/{ENCODER}") == []  # the other is at it
    assert victim.kill().is_killed
    for process in running:
        assert process.wait().path == world.snapshot("org/two")
    hold.release()
    assert world.is_right("org/two")
    assert sum(each.sent for each in world.hub.gets(f"org/two/{ENCODER}")) == SIZE
    assert world.problems(is_killed=True) == []
    assert world.download("org/one").path == world.snapshot("org/one")
    assert world.is_right("org/one")


def test_wrong_bytes_are_an_error_for_one_and_nobody_else_gets_them(world: World) -> None:
    world.hub.bandwidth = 4e6
    world.hub.faults.wrong_bytes(f"/{ENCODER}")
    running = [world.start(repo) for repo in (*REPOS, *REPOS)]
    errors = [error for process in running for error in process.wait().errors]
    assert 1 <= len(errors) <= len(running)
    assert all(error.startswith("DigestMismatchError: ") for error in errors), errors
    assert world.problems() == []
    for repo in REPOS:
        assert world.download(repo).path == world.snapshot(repo)
        assert world.is_right(repo)


@pytest.mark.parametrize("place", ["download: wrong", "download: hidden", "download: fetched"])
def test_wrong_bytes_that_were_there_are_set_aside_once_whoever_comes_first(
    place: str, world: World
) -> None:
    """One process stops in the middle, with no lease on anything else; another does all of it."""
    spot = world.folder("org/one") / "blobs" / world.commit("org/one").etag(ENCODER)
    spot.parent.mkdir(parents=True)
    spot.write_bytes(content(99, SIZE))
    first = world.start("org/one", stop_at=Moment(place, 1), allow_patterns=[ENCODER])
    first.wait_until_stopped()
    second = world.start("org/one", cache_dir=str(world.cache))
    if place == "download: wrong":
        assert second.wait().path == world.snapshot("org/one")
    first.go_on()
    assert first.wait().path == world.snapshot("org/one")
    assert second.wait().path == world.snapshot("org/one")
    assert world.is_right("org/one")
    assert world.problems() == []
    with world.store() as store:
        bad = [path.read_bytes() for path in store.layout.bad.iterdir()]
    assert bad == [content(99, SIZE)]


def test_huggingface_hub_alone_on_the_same_cache_does_no_harm(
    world: World, rounds: Callable[[int], int]
) -> None:
    world.hub.bandwidth = 4e6
    for _ in range(rounds(2)):
        running = [
            world.start("org/one", way="plain"), world.start("org/one"),
            world.start("org/two"), world.start("org/two", way="plain"),
        ]  # fmt: skip
        for process in running:
            assert process.wait().errors == []
        assert all(map(world.is_right, REPOS))
        assert world.problems() == []
        begin_anew(world)


def test_processes_killed_at_random_leave_nothing_wrong_for_the_others(
    world: World, rounds: Callable[[int], int]
) -> None:
    world.hub.bandwidth = 8e6
    chance = random.Random()
    for number in range(rounds(2)):
        seed = chance.randrange(1 << 30)
        chance.seed(seed)
        victims = [world.start(chance.choice(list(REPOS))) for _ in range(2)]
        others = [world.start(repo) for repo in REPOS]
        for victim in victims:
            time.sleep(chance.random() * 0.4)
            victim.kill()
        for other in others:
            assert other.wait().errors == [], seed
        assert all(map(world.is_right, REPOS)), seed
        assert world.problems(is_killed=True) == [], seed
        if number % 2:
            begin_anew(world)
        else:
            shutil.rmtree(world.cache)


# beside other commands


def downloads(world: World, others: list[Running], count: int) -> Iterator[Ended]:
    """Download both repos again and again, cache removed in between, while others work."""
    for number in range(count):
        yield world.download(*REPOS)
        if number + 1 == count:
            break
        shutil.rmtree(world.folder("org/one") if number % 2 else world.folder("org/two"))
    world.end_repeating()
    for other in others:
        assert set(other.wait().codes) == {0}


COMMANDS = [
    pytest.param([["prune", "-y"]], id="prune"),
    pytest.param([["dedup", "{cache}", "{models}", "--min-size", "1", "-y"]], id="dedup"),
    pytest.param(
        [["scan", "{models}", "--min-size", "1"], ["verify", "--full"]], id="scan, verify"
    ),
    pytest.param([["verify", "--full", "--repair", "-y"], ["prune", "-y"]], id="repair, prune"),
]


@pytest.mark.parametrize("commands", COMMANDS)
def test_a_download_beside_other_commands_is_right(
    commands: list[list[str]], world: World, rounds: Callable[[int], int]
) -> None:
    models = world.directory / "models"
    models.mkdir()
    (models / "a.safetensors").write_bytes(SHARED[ENCODER])
    (models / "b.safetensors").write_bytes(SHARED[ENCODER])
    world.cache.mkdir()
    others = [
        world.repeat(*(w.format(cache=world.cache, models=models) for w in words))
        for words in commands
    ]
    for ended in downloads(world, others, rounds(5)):
        assert ended.errors == []
        assert all(map(world.is_right, REPOS))
    assert world.problems() == []
    assert (models / "a.safetensors").read_bytes() == SHARED[ENCODER]
    assert (models / "b.safetensors").read_bytes() == SHARED[ENCODER]


def test_a_download_beside_undo_never_gives_a_wrong_file(
    world: World, rounds: Callable[[int], int]
) -> None:
    """Undo takes links away that a download has just made: files may be missing, not wrong."""
    other = world.repeat("undo", "--all", "-y")
    for ended in downloads(world, [], rounds(6)):
        others = [each for each in ended.errors if "Missing after the download" not in each]
        assert others == []
        found = world.problems_of_cache()
        assert [each for each in found if "leads nowhere" not in each] == []
    assert set(other.wait().codes) == {0, 1}  # 1: nothing to undo, or not all of it
    assert world.download(*REPOS).errors == []
    assert all(map(world.is_right, REPOS))
    assert world.problems() == []


def test_a_download_beside_hf_cache_rm_and_prune_keeps_what_it_shares(
    world: World, rounds: Callable[[int], int]
) -> None:
    hf = Path(sys.executable).with_name("hf")
    if not hf.exists():
        pytest.skip("no hf beside this Python")
    environment = {**os.environ, **world.environment}
    for _ in range(rounds(2)):
        assert world.download("org/two").path == world.snapshot("org/two")
        other = world.repeat("prune", "-y")
        with subprocess.Popen(
            [hf, "cache", "rm", "model/org/two", "-y"], cwd=ROOT, env=environment,
            stdout=subprocess.DEVNULL,
        ) as removing:  # fmt: skip
            while removing.poll() is None:
                assert world.download("org/one").path == world.snapshot("org/one")
                assert world.is_right("org/one")
                shutil.rmtree(world.folder("org/one"))
        assert removing.returncode == 0
        assert not world.folder("org/two").exists()
        assert world.download("org/one").path == world.snapshot("org/one")
        world.end_repeating()
        assert set(other.wait().codes) == {0}
        assert world.is_right("org/one")
        assert world.problems() == []


# beside a writer


def claimed(world: World, *, given: bool, written: tuple[str, str, int] | None) -> Ended:
    """Download a file that lies in a folder, while another process changes it there."""
    models = world.directory / "models"
    models.mkdir()
    file = models / "mine.safetensors"
    file.write_bytes(SHARED[ENCODER])
    user = NOBODY if os.geteuid() == 0 else None
    if user is not None:
        for path in (world.directory, models, file):
            os.chown(path, user, user)
    job = Job(
        environment=world.environment,
        calls=[world.call("org/one", allow_patterns=[ENCODER])],
        user=user,
        look=[(str(models), given)],
        write=None if written is None else (str(file), *written),
    )
    return world.begin(job).wait()


def written_bytes(how: str, scratch: Path) -> bytes | None:
    """Return what a file has after such a write."""
    scratch.write_bytes(SHARED[ENCODER])
    descriptor = os.open(scratch, os.O_RDWR)
    try:
        write(scratch, how, descriptor)
    finally:
        os.close(descriptor)
    return scratch.read_bytes() if scratch.exists() else None


@pytest.mark.parametrize("given", [True, False], ids=["given", "discovered"])
def test_a_file_that_changes_while_it_is_claimed_never_gives_wrong_bytes(
    given: bool, hub: Hub, starter: Starter, tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    hub.add("org/one", REPOS["org/one"])
    with folder_of(NOBODY if os.geteuid() == 0 else None) as folder:
        ended = claimed(World(folder / "whole", hub, starter), given=given, written=None)
        assert ended.errors == []
        assert fetched(hub) == {}
        moments = [(place, 1) for place in dict.fromkeys(ended.points)]
        cases = list(itertools.product(WRITES, moments))
        random.shuffle(cases)
        for number, (how, moment) in enumerate(cases[: rounds(8)]):
            world = World(folder / str(number), hub, starter)
            ended = claimed(world, given=given, written=(how, *moment))
            case = f"{how} at {moment}"
            assert ended.errors == [], case
            path = world.snapshot("org/one") / ENCODER
            assert path.read_bytes() == SHARED[ENCODER], case
            assert world.problems() == [], case
            mine = world.directory / "models" / "mine.safetensors"
            found = mine.read_bytes() if mine.exists() else None
            wanted = written_bytes(how, tmp_path / "x") if ended.is_written else SHARED[ENCODER]
            assert found == wanted, case
