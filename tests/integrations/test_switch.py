"""Turning the flag on and off: nesting, threads, imports under way, functions that others hold."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import smartcache
from tests.integrations.owners import knows_the_flag

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pipeline_class() -> type:
    diffusers = pytest.importorskip("diffusers")
    cls = diffusers.DiffusionPipeline
    assert isinstance(cls, type)
    assert not is_on(cls)
    return cls


def is_on(cls: type) -> bool:
    return knows_the_flag(vars(cls)["from_pretrained"])


class TestNesting:
    def test_a_block_ends_what_it_began(self, pipeline_class: type) -> None:
        with smartcache.enable():
            assert is_on(pipeline_class)
        assert not is_on(pipeline_class)

    def test_an_error_ends_it_too(self, pipeline_class: type) -> None:
        with pytest.raises(KeyError), smartcache.enable():
            raise KeyError
        assert not is_on(pipeline_class)

    def test_an_inner_block_leaves_the_outer_one_on(self, pipeline_class: type) -> None:
        with smartcache.enable():
            with smartcache.enable():
                pass
            assert is_on(pipeline_class)
        assert not is_on(pipeline_class)

    def test_a_block_leaves_on_what_was_on(self, pipeline_class: type) -> None:
        smartcache.enable()
        with smartcache.enable():
            pass
        assert is_on(pipeline_class)

    def test_blocks_may_end_in_any_order(self, pipeline_class: type) -> None:
        first, second = smartcache.enable(), smartcache.enable()
        with first:
            pass
        assert is_on(pipeline_class)
        with second:
            pass
        assert not is_on(pipeline_class)

    def test_one_object_may_be_entered_again_and_within_itself(self, pipeline_class: type) -> None:
        enabled = smartcache.enable()
        for _ in range(2):
            with enabled:
                with enabled:
                    pass
                assert is_on(pipeline_class)
            assert not is_on(pipeline_class)

    def test_disable_ends_all_of_them(self, pipeline_class: type) -> None:
        """A cell of a notebook that was run three times is undone by one call."""
        for _ in range(3):
            smartcache.enable()
        smartcache.disable()
        assert not is_on(pipeline_class)

    def test_disable_in_a_block_is_final(self, pipeline_class: type) -> None:
        with smartcache.enable():
            smartcache.disable()
            assert not is_on(pipeline_class)
        assert not is_on(pipeline_class)

    def test_disable_without_enable_does_nothing(self, pipeline_class: type) -> None:
        function = vars(pipeline_class)["from_pretrained"]
        smartcache.disable()
        assert vars(pipeline_class)["from_pretrained"] is function

    def test_enabling_twice_wraps_once(self, pipeline_class: type) -> None:
        smartcache.enable()
        function = vars(pipeline_class)["from_pretrained"]
        smartcache.enable(always=True)
        assert vars(pipeline_class)["from_pretrained"] is function

    def test_the_finder_is_there_once_and_then_no_more(self) -> None:
        known = list(sys.meta_path)
        with smartcache.enable(), smartcache.enable():
            assert len(sys.meta_path) == len(known) + 1
        assert sys.meta_path == known


class TestOthers:
    """Programs that hold, copy or wrap the functions of the libraries themselves."""

    def test_what_others_put_over_it_stays(
        self, pipeline_class: type, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # What is put back in the end is what the class has now.
        monkeypatch.setattr(
            pipeline_class, "from_pretrained", vars(pipeline_class)["from_pretrained"]
        )
        smartcache.enable()
        inner = vars(pipeline_class)["from_pretrained"]

        def outer(cls: type[object], /, *args: object, **kwargs: object) -> object:
            return inner.__get__(None, cls)(*args, **kwargs)

        theirs = classmethod(outer)
        monkeypatch.setattr(pipeline_class, "from_pretrained", theirs)
        smartcache.disable()
        assert vars(pipeline_class)["from_pretrained"] is theirs
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            pipeline_class.from_pretrained()  # type: ignore[attr-defined]

    @pytest.mark.parametrize("flag", [{"smart_cache": True}, {"smart_cache_share": True}])
    def test_a_held_function_says_that_the_flag_is_off(
        self, pipeline_class: type, flag: dict[str, bool]
    ) -> None:
        with smartcache.enable():
            held = pipeline_class.from_pretrained  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=r"not enabled; call smartcache\.enable"):
            held("org/name", **flag)

    def test_a_copy_is_the_librarys_function_afterwards(self, tmp_path: Path) -> None:
        """Copied as transformers copies the function of its automatic classes to each of them."""
        scheduler = pytest.importorskip("diffusers").DDIMScheduler
        scheduler(num_train_timesteps=7).save_pretrained(tmp_path)
        with smartcache.enable():
            copy = copied(scheduler.from_pretrained.__func__)
        own = type("Own", (scheduler,), {"from_pretrained": classmethod(copy)})
        assert own.from_pretrained(tmp_path).config.num_train_timesteps == 7  # type: ignore[attr-defined]
        assert own.from_pretrained(tmp_path, smart_cache=False).config["num_train_timesteps"] == 7  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="not enabled"):
            own.from_pretrained(tmp_path, smart_cache=True)  # type: ignore[attr-defined]

    def test_classes_and_their_functions_can_be_pickled(self, pipeline_class: type) -> None:
        with smartcache.enable():
            words = pickle.dumps((pipeline_class, pipeline_class.from_pretrained))  # type: ignore[attr-defined]
        assert pickle.loads(words) == (pipeline_class, pipeline_class.from_pretrained)  # type: ignore[attr-defined]  # noqa: S301


def copied(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy


LIBRARY = """
class Model:
    @classmethod
    def from_pretrained(cls, source, **kwargs):
        return source, kwargs
"""
MANY = 40


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a small package `transformers`: loading the real one takes seconds."""
    package = tmp_path / "site" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for number in range(MANY):
        (package / f"model_{number}.py").write_text(LIBRARY)
    return package.parent


@pytest.fixture
def run(site: Path) -> Callable[..., str]:
    """Run code in a process that imports from `site`."""

    def run(code: str, *places: Path) -> str:
        paths = [*map(str, places or [site]), str(ROOT)]
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", START + code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


START = """
import importlib, inspect, os, sys, threading, time
import smartcache
def is_on(cls):
    return "smartcache" in cls.__dict__["from_pretrained"].__func__.__code__.co_filename
"""


class TestImports:
    def test_nothing_of_the_finder_is_left_in_a_module(self, run: Callable[..., str]) -> None:
        code = """
smartcache.enable()
from transformers import model_1
assert is_on(model_1.Model)
assert model_1.__spec__.loader is model_1.__loader__
print(type(model_1.__loader__).__name__, inspect.getsource(model_1).strip()[:12])
"""
        assert run(code) == "SourceFileLoader class Model:"

    def test_a_module_may_be_loaded_again(self, run: Callable[..., str]) -> None:
        code = """
smartcache.enable()
from transformers import model_1
first = model_1.Model
importlib.reload(model_1)
print(is_on(first), is_on(model_1.Model), first is model_1.Model)
smartcache.disable()
print(is_on(first), is_on(model_1.Model))
"""
        assert run(code) == "True True False\nFalse False"

    def test_a_package_in_an_archive(self, run: Callable[..., str], site: Path) -> None:
        """All modules of an archive have one loader."""
        with zipfile.ZipFile(site / "packed.zip", "w") as archive:
            for path in (site / "transformers").iterdir():
                archive.write(path, path.relative_to(site))
        code = """
smartcache.enable()
from transformers import model_1, model_2
print(is_on(model_1.Model), is_on(model_2.Model), type(model_1.__loader__).__name__)
"""
        assert run(code, site / "packed.zip") == "True True zipimporter"

    def test_a_spec_that_was_found_before_can_be_loaded_after(
        self, run: Callable[..., str]
    ) -> None:
        code = """
from importlib.util import find_spec, module_from_spec
smartcache.enable()
spec = find_spec("transformers.model_1")
print(spec.loader.get_source("transformers.model_1").strip()[:12])
smartcache.disable()
module = module_from_spec(spec)
spec.loader.exec_module(module)
print(is_on(module.Model))
"""
        assert run(code) == "class Model:\nFalse"

    def test_other_finders_of_this_kind_get_along_with_it(self, run: Callable[..., str]) -> None:
        code = """
class Other:
    busy = False
    def find_spec(self, name, path=None, target=None):
        if self.busy:
            return None
        self.busy = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False
import importlib.util
sys.meta_path.insert(0, Other())
smartcache.enable()
sys.meta_path.insert(0, Other())
from transformers import model_1
print(is_on(model_1.Model))
"""
        assert run(code) == "True"

    def test_both_libraries_may_be_absent(self, run: Callable[..., str], tmp_path: Path) -> None:
        code = """
sys.path = [path for path in sys.path if "site-packages" not in path]
smartcache.enable(always=True)
try:
    import transformers
except ModuleNotFoundError as error:
    print(error)
smartcache.disable()
"""
        assert run(code, tmp_path) == "No module named 'transformers'"

    def test_an_import_that_fails_fails_as_ever(self, run: Callable[..., str], site: Path) -> None:
        (site / "transformers" / "broken.py").write_text(LIBRARY + "1 / 0\n")
        code = """
smartcache.enable()
try:
    import transformers.broken
except ZeroDivisionError as error:
    print(error, "transformers.broken" in sys.modules)
"""
        assert run(code) == "division by zero False"


SLOW = """
import builtins
builtins.begun.set()
builtins.go_on.wait(30)
"""
SLOWLY = """
import builtins
builtins.begun, builtins.go_on = threading.Event(), threading.Event()
def load():
    try:
        import transformers.slow
    except ZeroDivisionError:
        print("failed", flush=True)
thread = threading.Thread(target=load)
thread.start()
begun.wait(30)
"""


class TestImportsUnderWay:
    def test_enable_waits_for_them(self, run: Callable[..., str], site: Path) -> None:
        (site / "transformers" / "slow.py").write_text(SLOW + LIBRARY)
        code = f"""
{SLOWLY}
threading.Timer(0.3, go_on.set).start()
smartcache.enable()
import transformers.slow
print(is_on(transformers.slow.Model))
"""
        assert run(code) == "True"

    def test_classes_that_are_not_finished_are_left_alone(
        self, run: Callable[..., str], site: Path
    ) -> None:
        """The automatic classes of transformers get their functions after they are made."""
        late = "Model.from_pretrained = classmethod(lambda cls, source, **kwargs: (source, kwargs))"
        (site / "transformers" / "slow.py").write_text(f"{LIBRARY}{SLOW}{late}\n")
        code = f"""
{SLOWLY}
threading.Timer(0.3, go_on.set).start()
smartcache.enable()
import transformers.slow
print(is_on(transformers.slow.Model))
smartcache.disable()
print(is_on(transformers.slow.Model))
"""
        assert run(code) == "True\nFalse"

    def test_one_that_fails_is_no_error_of_enable(
        self, run: Callable[..., str], site: Path
    ) -> None:
        (site / "transformers" / "slow.py").write_text(SLOW + LIBRARY + "1 / 0\n")
        code = f"""
{SLOWLY}
threading.Timer(0.3, go_on.set).start()
smartcache.enable()
thread.join()
"""
        assert run(code) == "failed"

    def test_one_of_this_very_thread_is_not_waited_for(
        self, run: Callable[..., str], site: Path
    ) -> None:
        turn_on = "import smartcache\nsmartcache.enable()\n"
        (site / "transformers" / "own.py").write_text(turn_on + LIBRARY)
        code = """
import transformers.own
from transformers import model_1
print(is_on(model_1.Model), is_on(transformers.own.Model))
smartcache.disable()
print(is_on(transformers.own.Model))
"""
        assert run(code) == "True True\nFalse"

    def test_threads_may_turn_it_while_others_import(self, run: Callable[..., str]) -> None:
        code = f"""
sys.setswitchinterval(1e-5)
def load(numbers):
    for number in numbers:
        importlib.import_module(f"transformers.model_{{number}}")
def turn():
    while any(each.is_alive() for each in loading):
        with smartcache.enable():
            pass
loading = [threading.Thread(target=load, args=(range(n, {MANY}, 2),)) for n in (0, 1, 0, 1)]
turning = [threading.Thread(target=turn) for _ in range(3)]
for each in (*loading, *turning):
    each.start()
for each in (*loading, *turning):
    each.join()
def states():
    modules = [sys.modules[f"transformers.model_{{number}}"] for number in range({MANY})]
    return {{is_on(module.Model) for module in modules}}
print(states(), sum("smartcache" in type(each).__module__ for each in sys.meta_path))
smartcache.enable()
print(states())
"""
        assert run(code) == "{False} 0\n{True}"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_a_forked_process_does_not_wait_for_threads_it_does_not_have(
        self, run: Callable[..., str]
    ) -> None:
        code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
def turn():
    while True:
        with smartcache.enable():
            pass
smartcache.disable()
from transformers import model_1
threading.Thread(target=turn, daemon=True).start()
for _ in range(20):
    child = os.fork()
    if not child:
        smartcache.enable()
        importlib.import_module("transformers.model_2")
        smartcache.disable()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("done", flush=True)
os._exit(0)
"""
        assert run(code) == "done"


class TestAuto:
    @pytest.mark.parametrize(
        ("value", "answer"), [("1", "True"), ("yes", "True"), ("0", "False"), ("", "False")]
    )
    def test_the_variable_turns_it_on(
        self, value: str, answer: str, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SMARTCACHE", value)
        code = """
import smartcache.auto
assert not {"diffusers", "transformers", "torch", "huggingface_hub"} & set(sys.modules)
from transformers import model_1
print(is_on(model_1.Model))
"""
        assert run(code) == answer

    def test_a_bad_value_is_named(
        self, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SMARTCACHE", "perhaps")
        code = """
try:
    import smartcache.auto
except smartcache.ConfigError as error:
    print(error.message)
"""
        assert run(code) == "SMARTCACHE: neither yes nor no: 'perhaps'"
