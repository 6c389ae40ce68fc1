"""The functions with huggingface_hub's names: its arguments, results and errors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import huggingface_hub
import pytest

import smartcache
from tests.hub.clients import contents, sha256, weights
from tests.hub_server import Hub
from tests.processes.children import Child
from tests.store.files import edit

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
        answers = []
        for package, root in self.roots.items():
            arguments = {"cache_dir": root / "hf", "endpoint": self.hub.url, **more}
            if "local_dir" in arguments:
                arguments["local_dir"] = root / str(arguments["local_dir"])
            function = functions(package)[len(words) - 1]

            def work(
                function: Function = function, arguments: dict[str, object] = arguments
            ) -> object:
                return function(*words, **arguments)

            answers.append(answer_of(work, root))
        ours, plain = answers
        return ours, plain

    def check(self, *words: str, **more: object) -> Answer:
        """Make a call twice; ours must be theirs, and leave the same files."""
        for _ in range(2):
            ours, plain = self.ask(*words, **more)
            assert ours == plain
        assert self.files(smartcache) == self.files(huggingface_hub)
        return ours

    def files(self, package: object) -> dict[str, object]:
        found = contents(self.roots[package])  # type: ignore[index]
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


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits seconds between attempts; how long is not what is tested."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


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


@pytest.mark.parametrize("words", [("dataset/foo",), ("model/foo", "x.bin"), ("kernel/foo",)])
def test_an_organisation_may_be_called_like_a_type_of_repos(
    both: Both, hub: Hub, words: tuple[str, ...]
) -> None:
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


@pytest.mark.parametrize("name", ["org/gated", "org/private"])
@pytest.mark.parametrize("token", ["hf_good", "hf_other", "hf_bad", True, False, None])
@pytest.mark.parametrize("words", [(), ("model.safetensors",)])
def test_tokens_open_what_they_open(
    both: Both, hub: Hub, name: str, token: object, words: tuple[str, ...]
) -> None:
    hub.tokens = {"hf_good": {"org/gated", "org/private"}, "hf_other": set()}
    ours, plain = both.ask(name, *words, token=token)
    assert ours == plain
    assert (ours[0] == "str") is (token == "hf_good")  # noqa: S105


@pytest.mark.parametrize("words", [("org/name",), ("org/name", "unet/model.safetensors")])
@pytest.mark.parametrize("local", [{}, {"local_dir": "local"}])
def test_a_dry_run_says_what_huggingface_hub_says(
    both: Both, words: tuple[str, ...], local: dict[str, object]
) -> None:
    ours, plain = both.ask(*words, dry_run=True, **local)
    assert ours == plain
    assert both.files(smartcache) == {}
    both.ask("org/name", **local)
    ours, plain = both.ask(*words, dry_run=True, **local)
    assert ours == plain


@pytest.mark.parametrize("words", [("org/missing",), ("org/gated", "model.safetensors")])
def test_a_dry_run_has_huggingface_hubs_errors(both: Both, words: tuple[str, ...]) -> None:
    ours, plain = both.ask(*words, dry_run=True)
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


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        smartcache.snapshot_download("org/name", nonsense=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="allow_patterns"):
        smartcache.hf_hub_download("org/name", "x", allow_patterns="*")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="subfolder"):
        smartcache.snapshot_download("org/name", subfolder="x")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="nonsense"):
        smartcache.plan_download("org/name", nonsense=1)  # type: ignore[call-arg]


def test_no_argument_of_huggingface_hub_is_missing() -> None:
    """Those it only warns about are left out."""
    import inspect

    from smartcache.functions import FileOptions, Options, SnapshotOptions

    for function, ours in (
        (huggingface_hub.snapshot_download, SnapshotOptions),
        (huggingface_hub.hf_hub_download, FileOptions),
    ):
        theirs = set(inspect.signature(function).parameters)
        known = {*ours.__annotations__, *Options.__annotations__}
        assert theirs - known <= {"repo_id", "filename", "dry_run"}


# without the Hub


def test_what_is_cached_is_found_without_the_hub(both: Both, hub: Hub) -> None:
    both.ask("org/name")
    hub.clear()
    for words in (("org/name",), ("org/name", "unet/model.safetensors")):
        ours, plain = both.ask(*words, local_files_only=True)
        assert ours == plain
        assert ours[0] == "str"
    assert list(hub.requests) == []


@pytest.mark.usefixtures("quick_retries")
def test_without_a_server_the_cache_answers(both: Both, hub: Hub) -> None:
    both.ask("org/name")
    for words in (("org/name",), ("org/name", "config.json"), ("org/name", "missing.bin")):
        ours, plain = both.ask(*words, endpoint="http://127.0.0.1:9")
        assert ours == plain


@pytest.mark.usefixtures("quick_retries")
def test_a_server_that_fails_is_answered_as_huggingface_hub_does(both: Both, hub: Hub) -> None:
    both.ask("org/name")
    for words in (("org/name",), ("org/name", "config.json")):
        hub.faults.status("/api/models/org/name", 500, times=1 << 30, method="")
        hub.faults.status("org/name/config.json", 500, times=1 << 30, method="")
        ours, plain = both.ask(*words)
        assert ours == plain
        hub.faults.clear()


def test_an_incomplete_snapshot_is_what_it_is_for_huggingface_hub(both: Both, hub: Hub) -> None:
    both.ask("org/name", allow_patterns="*.json")
    for words, more in (
        (("org/name",), {}),
        (("org/name",), {"allow_patterns": "*.json"}),
        (("org/name", "model.safetensors"), {}),
    ):
        ours, plain = both.ask(*words, local_files_only=True, **more)
        assert ours == plain


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
