"""What every test gets: a home of its own, more rounds under `--soak`, and the common fixtures."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from smartcache.store.store import Store
from smartcache.system.filesystems import mount_of
from tests.hub_server import Hub
from tests.hub_server.pipelines import Models, make_models

if TYPE_CHECKING:
    from xdist.remote import Producer  # type: ignore[import-untyped]
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

OF_ONE_WORKER = (
    "tests/integrations/test_all_classes.py",
    "tests/pretrained/test_scenarios_processes.py",
    "tests/remote/test_ray.py",
    "tests/test_docs.py",
)
"""Files whose tests share what takes long to make. Groups by mark need pytest older than 9.2."""
WITH_TORCH = ("tests/artifacts/", "tests/integrations/", "tests/pretrained/", "tests/training/")
"""Folders all of whose tests are marked `torch`. Elsewhere those that need it bear the mark."""
HEAVY = ("accelerate", "diffusers", "peft", "torch", "transformers")
LOADED = pytest.StashKey[list[str]]()
SOAK_FACTOR = 30
SOAK_TIMEOUT = 3600.0

# Real filesystems take their time: Hypothesis must not call that a failure. In CI the examples are
# the same every time, as Hypothesis itself has it: what fails there is what was changed.
hypothesis_settings.register_profile(
    "quick", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)  # fmt: skip
hypothesis_settings.register_profile(
    "soak",
    hypothesis_settings.get_profile("quick"),
    max_examples=2000,
    stateful_step_count=100,
    derandomize=False,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long rounds too")
    parser.addoption("--browser", action="store_true", help="run the tests in a browser too")
    parser.addoption("--tally", type=Path, help="a file for the numbers passed, failed, skipped")


def pytest_configure(config: pytest.Config) -> None:
    # Where Ctrl-C is ignored (a background job, some CI), all processes of tests would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis_settings.load_profile("soak" if config.getoption("--soak") else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soaking = config.getoption("--soak")
    for item in items:
        if item.nodeid.startswith(WITH_TORCH):
            item.add_marker(pytest.mark.torch)
        if not soaking and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="long rounds: scripts/test --soak"))
        if not config.getoption("--browser") and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason="a real browser: scripts/test --browser"))
        if soaking and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT))
    # Once torch is loaded, every fork of the process takes three times as long.
    items.sort(key=lambda item: item.get_closest_marker("torch") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[LOADED] = _loaded()


@pytest.fixture(scope="session")
def loaded_by_collecting(pytestconfig: pytest.Config) -> list[str]:
    """Which of the heavy packages were in memory before the first test."""
    return pytestconfig.stash[LOADED]


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[LOADED] = _loaded()
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if LOADED in item.stash and item.get_closest_marker("torch") is None:
        assert _loaded() == item.stash[LOADED], "a test that loads these must be marked `torch`"


def _loaded() -> list[str]:
    return [name for name in HEAVY if name in sys.modules]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if path := config.getoption("--tally"):
        groups = (["passed"], ["failed", "error"], ["skipped"])
        stats = terminalreporter.stats
        counts = [sum(len(stats.get(name, [])) for name in group) for group in groups]
        path.write_text(" ".join(map(str, counts)) + "\n", "utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Give each test to the worker that is free, but those of some files to one and the same."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if path in OF_ONE_WORKER else nodeid

        def mark_test_complete(self, node: object, item_index: int, duration: float = 0) -> None:
            """Forget what is done: it would be counted again for each of thousands of tests."""
            super().mark_test_complete(node, item_index, duration)
            work = self.assigned_work[node]
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(work[scope].values()):
                del work[scope]

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> bool:
    """Whether the long rounds were asked for."""
    return bool(pytestconfig.getoption("--soak"))


@pytest.fixture(scope="session")
def rounds(soak: bool) -> Callable[[int], int]:
    """`rounds(20)`: 20 repetitions, many more under `--soak`."""
    return lambda number: number * SOAK_FACTOR if soak else number


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, itertools.count[int]]:
    return tmp_path_factory.mktemp("homes"), itertools.count()


@pytest.fixture(autouse=True)
def _own_home(_homes: tuple[Path, itertools.count[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test, and no child process of one, sees the user's settings, caches or tokens."""
    for name in os.environ:
        if name.startswith(("SMARTCACHE", "HF_", "HUGGING_FACE_", "XDG_")):
            monkeypatch.delenv(name)
    directory, numbers = _homes
    home = directory / str(next(numbers))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setenv("SMARTCACHE_HOME", str(home / "store"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user keeps models: beside the store, on its filesystem."""
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A Hub on the loopback; see `tests.hub_server`."""
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny pipelines and models, made once for all workers of the run. Not to be changed."""
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("no diffusers here")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "models"
    with filelock.FileLock(f"{folder}.lock"):
        return make_models(folder)


def _places() -> list[Path]:
    """The folders for temporary files: on a disk, or in memory."""
    memory = Path("/dev/shm")  # noqa: S108 - the one tmpfs that every Linux has
    places = (Path(tempfile.gettempdir()), Path("/var/tmp"), memory)  # noqa: S108 - others exist
    return [path for path in places if os.access(path, os.W_OK)]


def _is_memory(path: Path) -> bool:
    return mount_of(path).fstype in ("ramfs", "tmpfs")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem than `tmp_path`: in memory, unless that one is."""
    others = [path for path in _places() if path.stat().st_dev != tmp_path.stat().st_dev]
    if not others:
        pytest.skip("no second filesystem here")
    with tempfile.TemporaryDirectory(prefix="smartcache-test-", dir=others[-1]) as name:
        yield Path(name)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory."""
    places = [path for path in (tmp_path, *_places()) if _is_memory(path)]
    if not places:
        pytest.skip("no filesystem in memory here")
    with tempfile.TemporaryDirectory(prefix="smartcache-test-", dir=places[0]) as name:
        yield Path(name)


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A directory on a real disk, for tests of what memory cannot do: `tmp_path` may lie there."""
    if not _is_memory(tmp_path):
        yield tmp_path
        return
    disks = [path for path in _places() if not _is_memory(path)]
    if not disks:
        pytest.skip("no disk here")
    with tempfile.TemporaryDirectory(prefix="smartcache-test-", dir=disks[0]) as name:
        yield Path(name)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`pass_time(60)`: for this process it is a minute later, and every file a minute older."""
    seconds, nanoseconds, clock = time.time, time.time_ns, time.clock_gettime_ns
    ahead = 0.0

    def advance(more: float) -> None:
        nonlocal ahead
        ahead += more

    monkeypatch.setattr(time, "time", lambda: seconds() + ahead)
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(ahead * 1e9))
    monkeypatch.setattr(time, "clock_gettime_ns", lambda which: clock(which) + int(ahead * 1e9))
    return advance
