"""Functions whose results are kept."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSets, memoized
from smartcache.cache import SmartCache
from smartcache.errors import BadKeyError, ConfigError, UnsupportedValueError
from tests.artifacts.opening import array
from tests.artifacts.peer import Clock
from tests.processes.children import Child


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SmartCache]:
    with SmartCache(tmp_path / "store") as opened:
        yield opened


class TestMemoize:
    def test_the_same_arguments_are_computed_once(self, cache: SmartCache) -> None:
        calls = []

        @cache.memoize()
        def embed(text: str, scale: float = 1.0, *, flip: bool = False) -> dict[str, Any]:
            """Say what it does."""
            calls.append(text)
            return {"x": np.full(3000, scale), "flip": flip, "n": [1]}

        first = embed("a")
        assert first["x"].sum() == 3000
        for again in (embed("a", 1.0), embed(text="a", flip=False), embed("a")):
            assert again["flip"] is False
            again["n"].append(2)
        assert calls == ["a"]
        embed("a", 2.0)
        embed("b")
        embed("a", flip=True)
        embed("a", 1)  # an int is another value
        assert len(calls) == 5
        assert embed("a")["n"] == [1]
        assert embed.__name__ == "embed"
        assert embed.__doc__ == "Say what it does."
        assert len(embed.artifacts()) == 5

    def test_tensors_and_arrays_count_by_their_content(self, cache: SmartCache) -> None:
        calls = []

        @cache.memoize(memory="1MB")
        def total(values: Any) -> Any:  # noqa: ANN401
            calls.append(1)
            return values.sum()

        assert total(np.arange(5)) == total(np.arange(5)) == 10
        assert total(np.arange(6)) == 15
        assert len(calls) == 2

    def test_forgetting(self, cache: SmartCache) -> None:
        calls = []

        @cache.memoize()
        def double(number: int, *more: int) -> int:
            calls.append(number)
            return 2 * number

        assert [double(1), double(2), double(2, 3)] == [2, 4, 4]
        assert double.forget(2) is True
        assert double.forget(2) is False
        assert double.forget(9) is False
        double(1), double(2, 3)
        assert len(calls) == 3
        double(2)
        assert len(calls) == 4
        assert double.forget_all() == 3
        double(1)
        assert len(calls) == 5

    def test_what_is_ignored_makes_no_difference(self, cache: SmartCache) -> None:
        calls = []

        @cache.memoize(ignore=["device", "log"])
        def embed(text: str, device: str = "cpu", **log: object) -> str:
            calls.append(device)
            return text

        embed("a", device="cuda", verbose=object())
        embed("a")
        assert calls == ["cuda"]
        assert embed.forget("a", "mps")

    def test_none_and_plain_values_are_results(self, cache: SmartCache) -> None:
        calls = []

        @cache.memoize()
        def nothing(what: object) -> object:
            calls.append(what)
            return what

        some: list[object] = [None, 0, "", [], {"a": (1, 2)}, b"x"]
        for value in some:
            assert nothing(value) == nothing(value) == value
        assert len(calls) == 6

    def test_what_is_raised_is_not_kept(self, cache: SmartCache) -> None:
        calls = []

        @cache.memoize()
        def broken() -> int:
            calls.append(1)
            if len(calls) < 3:
                raise ValueError("not yet")
            return 5

        for _ in range(2):
            with pytest.raises(ValueError, match="not yet"):
                broken()
        assert [broken(), broken()] == [5, 5]
        assert len(calls) == 3

    def test_results_end_with_their_time(self, tmp_path: Path) -> None:
        clock = Clock()
        sets = ArtifactSets(tmp_path / "sets", clock=clock)
        calls = []

        def now() -> int:
            calls.append(1)
            return len(calls)

        kept = memoized(now, sets.open, ttl=60)
        assert [kept(), kept()] == [1, 1]
        clock.now += 61
        assert [kept(), kept()] == [2, 2]

    def test_another_fingerprint_is_another_set(self, cache: SmartCache) -> None:
        def embed() -> int:
            return len(calls)

        calls: list[int] = []
        one = cache.memoize(fingerprint={"model": "a"})(embed)
        two = cache.memoize(fingerprint={"model": "b"})(embed)
        assert one() == 0
        calls.append(1)
        assert two() == 1
        assert one() == 0
        assert cache.memoize(fingerprint={"model": "a"})(embed)() == 0

    def test_arguments_that_no_key_can_be_made_of_are_refused(self, cache: SmartCache) -> None:
        @cache.memoize()
        def look(thing: object) -> int:
            return 1

        with pytest.raises(BadKeyError, match="thing"):
            look(object())

    def test_methods_work_if_the_object_is_ignored(self, cache: SmartCache) -> None:
        class Model:
            calls = 0

            @cache.memoize(ignore=["self"])
            def embed(self, text: str) -> str:
                self.calls += 1
                return text

        model = Model()
        assert [model.embed("a"), model.embed("a")] == ["a", "a"]
        assert model.calls == 1

    def test_options_are_those_of_the_set(self, cache: SmartCache) -> None:
        @cache.memoize(name="thumbnails", compression="gzip", max_size=10**6, memory="1MB")
        def make(n: int) -> Any:  # noqa: ANN401
            return np.zeros(n)

        make(9000)
        opened = make.artifacts()
        assert opened.name == "thumbnails"
        assert opened.describe().options.compression == "gzip"
        assert opened.describe().options.max_size == 10**6
        assert opened.stats().live < 2000
        assert opened.memory is not None

    def test_bad_uses_are_refused_at_once(self, cache: SmartCache) -> None:
        def many() -> Iterator[int]:
            yield 1

        async def later(name: str) -> str:
            return name

        with pytest.raises(ConfigError, match="is a coroutine function"):
            cache.memoize(name="later")(later)
        with pytest.raises(ConfigError, match="is a generator"):
            cache.memoize()(many)
        with pytest.raises(ConfigError, match="no parameter 'nope'") as caught:
            cache.memoize(ignore=["nope"])(array)
        assert "seed" in caught.value.hint
        with pytest.raises(UnsupportedValueError, match="model"):
            cache.memoize(fingerprint={"model": object()})(array)
        with pytest.raises(ConfigError, match="cannot be read"):
            cache.memoize(name="named")(lambda: 1)
        made: dict[str, Any] = {}
        exec("def made(): return 1", made)  # noqa: S102
        with pytest.raises(ConfigError, match="has no file"):
            cache.memoize()(made["made"])
        named = cache.memoize(name="made", fingerprint={"code": 1})(made["made"])
        assert named() == 1

    def test_what_would_share_results_with_others_is_refused(self, cache: SmartCache) -> None:
        """All lambdas of a module have one name, and so have the methods of all objects."""
        with pytest.raises(ConfigError, match="has no name"):
            cache.memoize(fingerprint={"version": 1})(lambda n: n + 1)

        class Scale:
            def __init__(self, by: int) -> None:
                self.by = by

            def scaled(self, n: int) -> int:
                return n * self.by

        with pytest.raises(ConfigError, match="belongs to an object"):
            cache.memoize()(Scale(2).scaled)
        assert cache.memoize(name="scaled", fingerprint={"by": 3})(Scale(3).scaled)(2) == 6

    def test_threads_and_processes_compute_once(self, cache: SmartCache, tmp_path: Path) -> None:
        log = tmp_path / "log"

        @cache.memoize()
        def slow(n: int) -> int:
            with log.open("a") as file:
                file.write("x")
            time.sleep(0.2)
            return n

        def ask() -> list[int]:
            with ThreadPoolExecutor(4) as pool:
                return list(pool.map(slow, [7] * 4))

        children = [Child(ask) for _ in range(4)]
        assert [child.result() for child in children] == [[7] * 4] * 4
        assert log.read_text() == "x"


PROGRAM = """
import sys
from smartcache import SmartCache
cache = SmartCache(sys.argv[1])
{decorator}
def work(n):
    {body}
print(work(3))
"""


class TestIdentity:
    """What tells the results of one function from those of another."""

    def run(self, path: Path, body: str, decorator: str = "@cache.memoize()") -> str:
        path.write_text(PROGRAM.format(body=body, decorator=decorator))
        done = subprocess.run(
            [sys.executable, str(path), str(path.parent / "store")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def test_an_edited_function_computes_anew_but_not_for_a_comment(self, tmp_path: Path) -> None:
        path, log = tmp_path / "program.py", tmp_path / "log"
        note = f"open({str(log)!r}, 'a').write('x'); "
        assert self.run(path, note + "return n + 1") == "4"
        assert self.run(path, note + "return n + 1  # as before") == "4"
        assert self.run(path, note + "return n + 1", "@cache.memoize(ttl=900)") == "4"
        assert log.read_text() == "x"
        assert self.run(path, note + "return n + 2") == "5"
        assert log.read_text() == "xx"

    def test_with_a_fingerprint_only_that_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "program.py"
        decorator = "@cache.memoize(fingerprint={'code': 1})"
        assert self.run(path, "return n + 1", decorator) == "4"
        assert self.run(path, "return n + 2", decorator) == "4"
        assert self.run(path, "return n + 2", "@cache.memoize(fingerprint={'code': 2})") == "5"

    def test_two_programs_do_not_share_unless_they_say_so(self, tmp_path: Path) -> None:
        decorator = "@cache.memoize(fingerprint={'code': 1})"
        assert self.run(tmp_path / "one.py", "return 1", decorator) == "1"
        assert self.run(tmp_path / "two.py", "return 2", decorator) == "2"
        decorator = "@cache.memoize(name='shared', fingerprint={'code': 1})"
        assert self.run(tmp_path / "one.py", "return 1", decorator) == "1"
        assert self.run(tmp_path / "two.py", "return 2", decorator) == "1"
