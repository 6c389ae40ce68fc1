"""All classes of diffusers and transformers that load something, one by one."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import smartcache
from tests.integrations.owners import (
    LIBRARIES,
    NAMES,
    Owners,
    import_all,
    is_copied,
    is_dummy,
    knows_the_flag,
    owners,
    owning_modules,
)

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in LIBRARIES), reason="no libraries here"
)
ROOT = Path(__file__).resolve().parents[2]
MISSING = "no/such/folder/anywhere"


def real(found: Owners) -> Owners:
    """Those that can load: not the stand-ins, and not the private bases that are only copied."""
    return {
        (cls, name): function
        for (cls, name), function in found.items()
        if not is_dummy(cls) and not is_copied(cls)
    }


def words(found: Owners) -> set[str]:
    return {f"{cls.__module__}.{cls.__qualname__}.{name}" for cls, name in found}


def test_there_are_many(before: Owners) -> None:
    """Else the tests below would pass for nothing."""
    names = {each.rpartition(".")[0].rpartition(".")[2] for each in words(real(before))}
    assert len(names) > 70
    assert names >= {
        "AutoModel", "AutoModelForCausalLM", "AutoPipelineForText2Image", "AutoTokenizer",
        "DiffusionPipeline", "FromOriginalModelMixin", "FromSingleFileMixin", "GenerationConfig",
        "ModelMixin", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizerBase",
        "ProcessorMixin", "SchedulerMixin",
    }  # fmt: skip


def test_each_knows_the_flag_while_it_is_on(before: Owners) -> None:
    smartcache.enable()
    without = {each: now for each, now in owners().items() if not knows_the_flag(now)}
    assert not words(real(without))
    assert all(now is before[each] for each, now in without.items())


def test_each_has_the_very_function_it_had_when_it_is_off_again(before: Owners) -> None:
    smartcache.enable()
    smartcache.disable()
    after = owners()
    assert after.keys() == before.keys()
    assert all(after[each] is before[each] for each in before)


def test_whoever_inherits_has_it_too(before: Owners) -> None:
    """Every class that is there: what it inherits, or has, is a function that knows the flag."""
    smartcache.enable()
    for module in {cls.__module__ for cls, _ in before}:
        for cls in vars(sys.modules[module]).values():
            if isinstance(cls, type) and not is_dummy(cls) and not is_copied(cls):
                assert not without_flag(cls)


def without_flag(cls: type) -> list[str]:
    of_library = cls.__module__.partition(".")[0] in LIBRARIES
    found = {name: inspect.getattr_static(cls, name, None) for name in NAMES if of_library}
    return [name for name, function in found.items() if function and not knows_the_flag(function)]


def test_each_looks_as_before(before: Owners) -> None:
    known = {each: appearance(*each) for each in real(before)}
    smartcache.enable()
    assert {each: appearance(*each) for each in real(before)} == known


def appearance(cls: type, name: str) -> tuple[object, ...]:
    function = getattr(cls, name)
    source = inspect.getsourcefile(inspect.unwrap(function.__func__))
    signature = inspect.signature(function)
    return signature, function.__doc__, function.__name__, function.__qualname__, source


def test_the_flag_is_seen_by_none_of_them(before: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the libraries' functions only write down with what they are called."""
    seen: list[object] = []

    def note(cls: type[object], /, *args: object, **kwargs: object) -> object:
        seen.append((cls, args, kwargs))
        return cls

    for cls, name in real(before):
        monkeypatch.setattr(cls, name, classmethod(note))
    smartcache.enable()
    expected = []
    for cls, name in real(before):
        load = getattr(cls, name)
        for flag in ({"smart_cache": True}, {"smart_cache": True, "smart_cache_share": False}):
            assert load(MISSING, 7, word=[8], **flag) is cls
            expected.append((cls, (MISSING, 7), {"word": [8]}))
    assert seen == expected
    smartcache.disable()


def test_a_class_without_its_backend_says_so_itself(before: Owners) -> None:
    dummies = [(cls, name) for cls, name in before if is_dummy(cls)]
    usual = [complaint(cls, name) for cls, name in dummies]
    assert any("requires the" in each for each in usual)
    smartcache.enable()
    assert [complaint(cls, name, smart_cache=True) for cls, name in dummies] == usual


def complaint(cls: type, name: str, **flag: bool) -> str:
    """What the library says; KeyError where it does not know the backend by name itself."""
    with pytest.raises((ImportError, KeyError)) as caught:
        getattr(cls, name)(MISSING, **flag)
    return repr(caught.value)


def test_all_get_it_when_the_libraries_are_imported_later() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.owners"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["imported by enable"] == []
    assert len(report["with flag"]) > 70
    assert not [
        each for each in report["without"] if ".dummy_" not in each and "._Base" not in each
    ]
    assert report["after disable"] == []
    assert "smartcache.pretrained.flag" not in report["finders"]


@pytest.mark.soak
@pytest.mark.parametrize("turn_on", [smartcache.enable, lambda: None], ids=["before", "after"])
def test_every_public_name_of_both_libraries(turn_on: Callable[[], object]) -> None:
    """The modules are not found by their text here: all of them are loaded, thousands of names."""
    turn_on()
    import diffusers
    import transformers

    with warnings.catch_warnings(action="ignore"):
        values = [getattr(lib, name) for lib in (diffusers, transformers) for name in dir(lib)]
    import_all(owning_modules())
    classes = [each for each in values if isinstance(each, type) and not is_dummy(each)]
    assert len(classes) > 3000
    smartcache.enable()
    assert not [cls for cls in classes if without_flag(cls)]
    smartcache.disable()
    assert not [each for each, function in owners().items() if knows_the_flag(function)]
