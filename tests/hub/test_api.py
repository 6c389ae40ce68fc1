"""The functions with huggingface_hub's names: its arguments, results and errors."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import cast

import huggingface_hub
import pytest

import smartcache
from smartcache import functions as functions_module
from smartcache.store.store import Store
from tests.hub.clients import contents, sha256, weights
from tests.hub_server import Hub
from tests.processes.children import Child
from tests.store.files import edit
from tests.store.small_disks import Disk, in_own_namespace

PATIENCE = 120.0
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": weights(1),
    "unet/model.safetensors": weights(2, 200_000),
    "unet/sub/config.json": b"{}",
}
Function = Callable[..., object]
Answer = tuple[str, object]
HERE = Path(__file__).resolve().parents[2]


def functions(package: object) -> tuple[Function, Function]:
    names = ("snapshot_download", "hf_hub_download")
    return tuple(cast("Function", getattr(package, name)) for name in names)  # type: ignore[return-value]


def answer_of(work: Callable[[], object], root: Path) -> Answer:
    """Return what a call returned, relative to a folder; or the error it raised."""
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - errors are compared
        return type(error).__name__, type(error).__module__
    return type(value).__name__, plain_value(value, root)


def plain_value(value: object, root: Path) -> object:
    if isinstance(value, list):
        return sorted((plain_value(each, root) for each in value), key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = dataclasses.asdict(value).items()
        return type(value).__name__, {k: plain_value(v, root) for k, v in items}
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.relpath(value, root)
    return value


class Both:
    """The same call to both packages, each with folders of its own."""

    def __init__(self, hub: Hub, root: Path) -> None:
        self.hub = hub
        self.roots = {smartcache: root / "ours", huggingface_hub: root / "plain"}

    def ask(self, *words: str, **more: object) -> tuple[Answer, Answer]:
        """Return our answer and theirs; folders are named in arguments by what follows the root."""
        call = self.call(*words, **more)
        ours, plain = (
            answer_of(partial(call, package), root) for package, root in self.roots.items()
        )
        return ours, plain

    def call(self, *words: str, **more: object) -> Callable[[ModuleType], object]:
        """Return the call, to be made with one of the packages."""

        def made(package: ModuleType) -> object:
            root = self.roots[package]
            arguments = {"cache_dir": root / "hf", "endpoint": self.hub.url, **more}
            if "local_dir" in arguments:
                arguments["local_dir"] = root / str(arguments["local_dir"])
            return functions(package)[len(words) - 1](*words, **arguments)

        return made

    def check(self, *words: str, **more: object) -> Answer:
        """Make a call twice; ours must be theirs, and leave the same files."""
        for _ in range(2):
            ours, plain = self.ask(*words, **more)
            assert ours == plain
        assert self.files(smartcache) == self.files(huggingface_hub)
        return ours

    def files(self, package: ModuleType) -> dict[str, object]:
        found = contents(self.roots[package])
        return {
            name: data.rsplit(b"\n", 2)[0]
            if name.endswith(".metadata") and isinstance(data, bytes)
            else data
            for name, data in found.items()
            if not name.endswith(".lock") and ".no_exist" not in name
        }


@pytest.fixture
def both(hub: Hub, tmp_path: Path) -> Both:
    hub.add("org/name", FILES, tags=["v1"])
    hub.add("org/gated", FILES, gated=True)
    hub.add("org/private", FILES, private=True)
    hub.add("org/data", {"train.parquet": weights(5)}, repo_type="dataset")
    return Both(hub, tmp_path)


CALLS: list[tuple[tuple[str, ...], dict[str, object]]] = [
    (("org/name",), {}),
    (("org/name",), {"revision": "v1", "max_workers": 2}),
    (("org/name",), {"allow_patterns": ["unet/*"], "ignore_patterns": "*.json"}),
    (("org/name",), {"local_dir": "local"}),
    (("org/data",), {"repo_type": "dataset"}),
    (("org/name",), {"repo_type": "model", "library_name": "me", "library_version": "1"}),
    (("org/name",), {"user_agent": {"a": "b"}, "headers": {"x-y": "z"}, "etag_timeout": 5}),
    (("org/name",), {"force_download": True}),
    (("org/name", "config.json"), {}),
    (("org/name", "model.safetensors"), {"revision": "v1"}),
    (("org/name", "model.safetensors"), {"subfolder": "unet"}),
    (("org/name", "config.json"), {"subfolder": "unet/sub"}),
    (("org/name", "model.safetensors"), {"subfolder": ""}),
    (("org/name", "unet/model.safetensors"), {"local_dir": "local"}),
    (("org/name", "model.safetensors"), {"subfolder": "unet", "local_dir": "local"}),
    (("org/data", "train.parquet"), {"repo_type": "dataset"}),
    (("org/name", "model.safetensors"), {"force_download": True}),
]


@pytest.mark.parametrize(("words", "more"), CALLS)
def test_results_are_huggingface_hubs(
    both: Both, words: tuple[str, ...], more: dict[str, object]
) -> None:
    kind, _ = both.check(*words, **more)
    assert kind == "str"


def test_an_organisation_may_be_called_like_a_type_of_repos(both: Both, hub: Hub) -> None:
    for words in (("dataset/foo",), ("model/foo", "x.bin"), ("kernel/foo",)):
        hub.add(words[0], {"x.bin": weights(1)})
        assert both.check(*words)[0] == "str"


def test_a_symlinked_cache_dir_is_named_as_huggingface_hub_names_it(
    both: Both, hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for words in (("org/name",), ("org/name", "config.json")):
        values = [
            function(*words, cache_dir=tmp_path / "link", endpoint=hub.url)
            for function in (functions(each)[len(words) - 1] for each in both.roots)
        ]
        assert values[0] == values[1]


ERRORS: list[tuple[tuple[str, ...], dict[str, object]]] = [
    (("org/missing",), {}),
    (("org/missing", "config.json"), {}),
    (("org/name",), {"revision": "nowhere"}),
    (("org/name", "config.json"), {"revision": "nowhere"}),
    (("org/name", "missing.bin"), {}),
    (("org/name", "missing.bin"), {"local_dir": "local"}),
    (("org/gated",), {}),
    (("org/gated", "model.safetensors"), {}),
    (("org/private",), {}),
    (("org/private", "model.safetensors"), {}),
    (("org/name",), {"repo_type": "nonsense"}),
    (("org/name", "x"), {"repo_type": "nonsense"}),
    (("org/na me",), {}),
    (("a/b/c",), {}),
    (("datasets/org/data",), {}),
    (("models/org/name", "config.json"), {}),
    (("a/b/c", "x"), {}),
    (("org/name",), {"local_files_only": True}),
    (("org/name", "config.json"), {"local_files_only": True}),
    (("org/name",), {"local_files_only": True, "local_dir": "local"}),
    (("org/name", "config.json"), {"endpoint": "http://127.0.0.1:9"}),
    (("org/name",), {"endpoint": "http://127.0.0.1:9"}),
    (("org/name",), {"revision": "1" * 40}),
    (("org/name",), {"revision": ""}),
    (("org/name", "model.safetensors"), {"revision": ""}),
]


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(("words", "more"), ERRORS)
def test_errors_are_huggingface_hubs(
    both: Both, words: tuple[str, ...], more: dict[str, object]
) -> None:
    ours, plain = both.ask(*words, **more)
    assert ours == plain
    assert ours[0] not in ("str", "list")


@pytest.mark.parametrize("words", [(), ("model.safetensors",)])
def test_tokens_open_what_they_open(both: Both, hub: Hub, words: tuple[str, ...]) -> None:
    hub.tokens = {"hf_good": {"org/gated", "org/private"}, "hf_other": set()}
    for name in ("org/gated", "org/private"):
        for token in ("hf_other", "hf_bad", True, False, None, "hf_good"):
            ours, plain = both.ask(name, *words, token=token)
            assert ours == plain, (name, token)
            assert (ours[0] == "str") is (token == "hf_good"), (name, token)  # noqa: S105


@pytest.mark.parametrize("words", [("org/name",), ("org/name", "unet/model.safetensors")])
@pytest.mark.parametrize("local", [{}, {"local_dir": "local"}])
def test_a_dry_run_says_what_huggingface_hub_says(
    both: Both, words: tuple[str, ...], local: dict[str, object]
) -> None:
    ours, plain = both.ask(*words, dry_run=True, **local)
    assert ours == plain
    for bad in (("org/missing",), ("org/gated", "model.safetensors")):
        assert len(set(both.ask(*bad, dry_run=True))) == 1, bad
    assert both.files(smartcache) == {}
    both.ask("org/name", **local)
    ours, plain = both.ask(*words, dry_run=True, **local)
    assert ours == plain


def test_a_dry_run_counts_what_this_machine_has_as_not_to_be_downloaded(
    both: Both, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/other", {"x.bin": FILES["model.safetensors"], "y.bin": weights(9)})
    both.ask("org/name")
    found = smartcache.snapshot_download(
        "org/other", cache_dir=tmp_path / "ours" / "hf", endpoint=hub.url, dry_run=True
    )
    assert {each.filename: each.will_download for each in found} == {"x.bin": False, "y.bin": True}
    assert {each.is_cached for each in found} == {False}


class TestArguments:
    """What huggingface_hub takes, we take; what only it knows goes through to it."""

    @pytest.mark.parametrize("words", [("org/name",), ("org/name", "model.safetensors")])
    def test_those_of_old_are_taken_and_warned_of_once(
        self, both: Both, words: tuple[str, ...]
    ) -> None:
        both.check(*words)
        both.check(*words, local_dir="local")
        old: list[dict[str, object]] = [
            {"resume_download": True},
            {"resume_download": None},
            {"proxies": {"https": "http://127.0.0.1:9"}},
            {"local_dir_use_symlinks": "auto", "local_dir": "local"},
            {"force_filename": "x.json"},
        ]
        for more in old:
            said = [warnings_of(both, package, words, more) for package in both.roots]
            assert said[0] == said[1], more
            assert len(said[0]) == (None not in more.values()), more

    def test_those_of_old_do_not_keep_the_store_from_being_used(
        self, both: Both, hub: Hub, tmp_path: Path
    ) -> None:
        both.ask("org/name")
        hub.add("org/other", FILES)
        hub.clear()
        with pytest.warns(UserWarning, match="resume_download"):
            smartcache.snapshot_download(  # type: ignore[call-overload]
                "org/other", resume_download=True, endpoint=hub.url, cache_dir=tmp_path / "hf2"
            )
        assert hub.fetched_bytes("safetensors") == 0

    def test_one_of_another_version_goes_through_with_all_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []

        def newer(repo_id: str, *, novelty: int = 0, **more: object) -> object:
            asked.append((repo_id, novelty, more))
            return 5

        monkeypatch.setattr(huggingface_hub, "snapshot_download", newer)
        call = cast("Function", smartcache.snapshot_download)
        assert call("org/name", novelty=1, revision="v1") == 5
        assert call("org/name", novelty=2, dry_run=True) == 5
        assert asked == [
            ("org/name", 1, {"revision": "v1"}),
            ("org/name", 2, {"dry_run": True}),
        ]

    def test_nonsense_is_refused_in_huggingface_hubs_words(self, both: Both, hub: Hub) -> None:
        calls: list[tuple[tuple[str, ...], dict[str, object]]] = [
            (("org/name",), {"nonsense": 1}),
            (("org/name",), {"nonsense": 1, "dry_run": True}),
            (("org/name",), {"subfolder": "x"}),
            (("org/name", "x"), {"allow_patterns": "*"}),
            (("org/name", "x"), {"nonsense": 1, "resume_download": None}),
        ]
        for words, more in calls:
            errors = []
            for package in both.roots:
                with pytest.raises(TypeError) as raised:
                    functions(package)[len(words) - 1](*words, **more)
                errors.append(str(raised.value))
            assert errors[0] == errors[1]
        assert list(hub.requests) == []

    def test_a_plan_takes_only_what_it_knows(self) -> None:
        for name in ("nonsense", "dry_run"):
            with pytest.raises(TypeError, match=name):
                smartcache.plan_download("org/name", **{name: 1})  # type: ignore[arg-type]

    def test_no_argument_of_huggingface_hub_is_unknown(self) -> None:
        """Those it only warns about are left out."""
        import inspect

        from smartcache.hub.api import FileOptions, SnapshotOptions

        for function, ours in (
            (huggingface_hub.snapshot_download, SnapshotOptions),
            (huggingface_hub.hf_hub_download, FileOptions),
        ):
            theirs = set(inspect.signature(function).parameters)
            assert theirs - ours.__optional_keys__ <= {"repo_id", "filename", "dry_run"}


def warnings_of(
    both: Both, package: ModuleType, words: tuple[str, ...], more: dict[str, object]
) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both.call(*words, **more)(package)
    return [str(each.message) for each in caught]


class TestNames:
    """Names of files that the caller gives."""

    def test_one_that_leads_elsewhere_is_the_callers_mistake(self, both: Both, hub: Hub) -> None:
        for name, subfolder in (
            ("../x", ""), ("/etc/passwd", ""), ("a/../../x", ""), ("a\0b", ""), ("..\\x", ""),
            ("C:/x", ""), ("..", ""), ("passwd", "../.."), ("passwd", "/etc"),
        ):  # fmt: skip
            for more in ({}, {"local_dir": "local"}, {"dry_run": True}):
                call = both.call("org/name", name, subfolder=subfolder or None, **more)
                with pytest.raises(ValueError, match="is not the name of a file in a repo") as it:
                    call(smartcache)
                assert "org/name" not in str(it.value)
                assert "Hub shows it" in it.value.hint  # type: ignore[attr-defined]
        assert list(hub.requests) == []
        assert both.files(smartcache) == {}

    def test_an_odd_one_means_what_it_means_to_huggingface_hub(self, both: Both) -> None:
        for name in (
            "", ".", "a\\x", "./config.json", "unet//x", "unet/", "\udc80", "x" * 300,
        ):  # fmt: skip
            ours, plain = both.ask("org/name", name)
            assert ours == plain, name
        ours, plain = both.ask("org/name", "model.safetensors", subfolder="./unet")
        assert ours == plain

    def test_what_is_no_text_is_a_mistake_and_not_the_whole_repo(self, hub: Hub) -> None:
        for name in (None, 5, b"config.json", Path("config.json")):
            with pytest.raises(TypeError, match="filename"):
                smartcache.hf_hub_download("org/name", name)  # type: ignore[call-overload]
        assert list(hub.requests) == []


# without the Hub


def test_what_is_cached_is_found_without_the_hub(both: Both, hub: Hub) -> None:
    """Of an incomplete snapshot, what huggingface_hub finds."""
    both.ask("org/name", allow_patterns="*.json")
    for words, more in (
        (("org/name",), {}),
        (("org/name",), {"allow_patterns": "*.json"}),
        (("org/name", "model.safetensors"), {}),
    ):
        ours, plain = both.ask(*words, local_files_only=True, **more)
        assert ours == plain
    both.ask("org/name")
    hub.clear()
    for words in (("org/name",), ("org/name", "unet/model.safetensors")):
        ours, plain = both.ask(*words, local_files_only=True)
        assert ours == plain
        assert ours[0] == "str"
    assert list(hub.requests) == []


@pytest.mark.usefixtures("quick_retries")
def test_without_a_server_or_with_one_that_fails_the_cache_answers(both: Both, hub: Hub) -> None:
    both.ask("org/name")
    for words in (("org/name",), ("org/name", "config.json"), ("org/name", "missing.bin")):
        ours, plain = both.ask(*words, endpoint="http://127.0.0.1:9")
        assert ours == plain
    for words in (("org/name",), ("org/name", "config.json")):
        hub.faults.status("/api/models/org/name", 500, times=1 << 30, method="")
        hub.faults.status("org/name/config.json", 500, times=1 << 30, method="")
        ours, plain = both.ask(*words)
        assert ours == plain
        hub.faults.clear()


def run(hub: Hub, text: str, **environment: str) -> str:
    """Run a program in a child process that knows this Hub."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **hub.environment, **environment}, cwd=HERE,
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_variables_of_huggingface_hub_are_obeyed_in_a_process(hub: Hub, tmp_path: Path) -> None:
    """Endpoint, cache, and offline mode; with a relative cache and one below the home too."""
    hub.add("org/name", FILES)
    text = """
import os, smartcache, huggingface_hub
os.makedirs("work", exist_ok=True)
for more in ({}, {"cache_dir": "relative"}, {"cache_dir": "~/below"}):
    for words in (("org/name",), ("org/name", "config.json")):
        name = "hf_hub_download" if words[1:] else "snapshot_download"
        ours = getattr(smartcache, name)(*words, **more)
        plain = getattr(huggingface_hub, name)(*words, **more)
        assert ours == plain, (ours, plain)
print(ours)
"""
    environment = {"HF_HUB_CACHE": str(tmp_path / "hf"), "PYTHONPATH": str(HERE)}
    text = f"import os; os.chdir({str(tmp_path)!r})\n{text}"
    run(hub, text, **environment)
    assert (tmp_path / "hf" / "models--org--name").is_dir()
    assert (tmp_path / "relative" / "models--org--name").is_dir()
    assert hub.fetched_bytes("safetensors") == 300_000
    hub.clear()
    run(hub, text, **environment, HF_HUB_OFFLINE="1")
    assert list(hub.requests) == []


def test_offline_without_the_files_has_huggingface_hubs_error(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", FILES)
    text = """
import smartcache, huggingface_hub
for name, words in (("snapshot_download", ("org/name",)), ("hf_hub_download", ("org/name", "x"))):
    errors = []
    for package in (smartcache, huggingface_hub):
        try:
            getattr(package, name)(*words)
        except Exception as error:
            errors.append(type(error))
    assert len(errors) == 2 and errors[0] is errors[1], errors
"""
    run(hub, text, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hf"))
    assert list(hub.requests) == []


class TestMirrors:
    """Servers whose ETag is no hash, as Artifactory, Nexus and nginx."""

    NAME, MD5 = "model.safetensors", "5d41402abc4b2a76b9719d911017c592"
    CALLS = (("org/mirror", NAME), ("org/mirror", "config.json"), ("org/mirror",))

    @pytest.fixture(params=[MD5, f"{MD5}-12", "5f3e-1a2b3c4d", f'W/"{MD5}"'])
    def both(self, both: Both, request: pytest.FixtureRequest) -> Both:
        both.hub.add("org/mirror", {name: FILES[name] for name in ("config.json", self.NAME)})
        for number, name in enumerate(("config.json", self.NAME)):
            if request.param.startswith("W/"):
                weak = request.param.replace("d", str(number))
                both.hub.faults.header(f"/{name}", ("ETag", "X-Linked-Etag")[number], weak)
            else:
                both.hub.faults.other_etag(f"org/mirror/{name}", f"{request.param}{number}")
        return both

    @pytest.mark.parametrize("words", CALLS)
    @pytest.mark.parametrize("local", [{}, {"local_dir": "local"}])
    def test_our_calls_do_what_those_of_huggingface_hub_do(
        self, both: Both, words: tuple[str, ...], local: dict[str, object]
    ) -> None:
        for _ in range(2):
            ours, plain = both.ask(*words, **local)
            assert ours == plain
        if len(words) == 2 or not local:  # of a repo, the hashes of its listing are noted there
            assert both.files(smartcache) == both.files(huggingface_hub)
        ours, plain = both.ask(*words, dry_run=True, **local)
        assert ours == plain

    def test_a_local_dir_gets_the_files_of_a_repo_once(self, both: Both, tmp_path: Path) -> None:
        for _ in range(2):
            ours, plain = both.ask("org/mirror", local_dir="local")
            assert ours == plain
        local = tmp_path / "ours" / "local"
        for name in ("config.json", self.NAME):
            assert (local / name).read_bytes() == FILES[name]
            assert len(both.hub.gets(f"org/mirror/{name}")) == 2  # each package

    def test_weights_of_a_repo_are_proven_by_its_listing(self, both: Both) -> None:
        path = Path(str(both.call("org/mirror")(smartcache)), self.NAME)
        assert path.read_bytes() == FILES[self.NAME]
        assert smartcache.cache_mapping()[sha256(FILES[self.NAME])].samefile(path)
        both.hub.faults.wrong_bytes(self.NAME)
        with pytest.raises(smartcache.DigestMismatchError, match=self.NAME):
            both.call("org/mirror", force_download=True)(smartcache)
        assert not path.exists()

    @pytest.mark.parametrize("words", CALLS)
    def test_its_own_calls_do_what_they_do_without_us(
        self, both: Both, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        hub = both.hub
        call = functions(huggingface_hub)[len(words) - 1]
        plain = str(call(*words, cache_dir=tmp_path / "plain", endpoint=hub.url))
        hub.clear()
        with smartcache.enable():
            for _ in range(2):
                path = call(*words, cache_dir=tmp_path / "answered", endpoint=hub.url)
        assert contents(tmp_path / "answered") == contents(tmp_path / "plain")
        assert Path(str(path)).relative_to(tmp_path / "answered") == Path(plain).relative_to(
            tmp_path / "plain"
        )
        assert len(hub.gets(self.NAME)) <= 1


# several at once


def test_threads_may_call_at_once(hub: Hub, tmp_path: Path) -> None:
    for number in range(4):
        hub.add(f"org/r{number}", FILES)
    names = [f"org/r{number}" for number in range(4)] * 3

    def work(name: str) -> str:
        return smartcache.snapshot_download(name, cache_dir=tmp_path / "hf", endpoint=hub.url)

    with ThreadPoolExecutor(12) as pool:
        paths = [Path(path) for path in pool.map(work, names)]
    for path in paths:
        assert {name: (path / name).read_bytes() for name in FILES} == FILES
    assert hub.fetched_bytes("safetensors") == 300_000


def test_a_forked_process_goes_on_with_a_store_of_its_own(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", FILES)
    hub.add("org/two", {**FILES, "more.bin": weights(8)})

    def work() -> str:
        return smartcache.snapshot_download("org/two", cache_dir=tmp_path / "hf", endpoint=hub.url)

    smartcache.snapshot_download("org/name", cache_dir=tmp_path / "hf", endpoint=hub.url)
    hub.clear()
    with Child(work) as child:
        path = Path(child.result())
    assert (path / "more.bin").read_bytes() == weights(8)
    assert [each.file for each in hub.gets("")] == [
        each.file for each in hub.gets("") if "safetensors" not in str(each.file)
    ]
    assert smartcache.snapshot_download("org/two", cache_dir=tmp_path / "hf", endpoint=hub.url)


def test_a_process_forked_while_another_thread_opens_the_store_does_not_wait_for_it(
    hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/name", FILES)
    is_held, is_forked = threading.Event(), threading.Event()

    def hold() -> None:
        with functions_module._gate:  # noqa: SLF001 - as long as a store is opened
            is_held.set()
            is_forked.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(PATIENCE)

    def work() -> str:
        signal.alarm(20)  # a child that hangs is killed, which fails the test
        return smartcache.hf_hub_download(
            "org/name", "config.json", cache_dir=tmp_path / "hf", endpoint=hub.url
        )

    try:
        with Child(work) as child:
            assert Path(child.result()).read_bytes() == FILES["config.json"]
    finally:
        is_forked.set()
        thread.join()


# no store


@pytest.mark.parametrize("words", [("org/name",), ("org/name", "unet/model.safetensors")])
@pytest.mark.parametrize("dry_run", [False, True])
def test_with_a_store_that_cannot_be_used_huggingface_hub_answers_alone(
    both: Both, tmp_path: Path, words: tuple[str, ...], dry_run: bool
) -> None:
    def work() -> tuple[Answer, Answer]:
        disk = Disk(tmp_path / "disk", 1 << 20)
        home = disk.point / "store"
        Store(home).close()
        disk.make_read_only()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SMARTCACHE_HOME", str(home))
            return both.ask(*words, dry_run=dry_run)

    ours, plain = in_own_namespace(work)
    assert ours == plain
    assert ours[0] in ("str", "list", "DryRunFileInfo")


@pytest.mark.parametrize("local", [{}, {"local_dir": "local"}])
def test_a_dry_run_makes_nothing_where_there_is_no_store(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: dict[str, object]
) -> None:
    monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / "none"))
    for words in (("org/name",), ("org/name", "config.json")):
        ours, plain = both.ask(*words, dry_run=True, **local)
        assert ours == plain
    assert os.listdir(tmp_path) == ["plain"]


def test_a_damaged_file_is_set_right_by_a_call_for_that_file(both: Both, hub: Hub) -> None:
    path = Path(
        smartcache.hf_hub_download(
            "org/name", "model.safetensors",
            cache_dir=both.roots[smartcache] / "hf", endpoint=hub.url,
        )
    )  # fmt: skip
    edit(os.path.realpath(path), b"WRONG", offset=9)
    again = smartcache.hf_hub_download(
        "org/name", "model.safetensors", cache_dir=both.roots[smartcache] / "hf", endpoint=hub.url
    )
    assert Path(again) == path
    assert path.read_bytes() == FILES["model.safetensors"]
    assert Path(os.path.realpath(path)).name == sha256(FILES["model.safetensors"])
