"""A dataset encoded by several processes is the dataset that one process would have made.

Workers are real processes, killed with SIGKILL. What they are called for is in a log that all of
them append to: see `workers`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.cache import SmartCache
from smartcache.errors import ConfigError, EncoderError
from smartcache.progress import silent
from smartcache.training import Dataset, Encoder, ProcessEngine, Sources
from tests.processes.children import Child
from tests.training.conftest import Photos
from tests.training.workers import (
    Encode,
    StubbornError,
    encode_surroundings,
    encodes,
    names_in,
    processes,
    scratch_of,
)

pytestmark = pytest.mark.timeout(60)
COUNT = 24


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    made = Photos(tmp_path / "photos")
    for number in range(COUNT):
        size = (8, 8) if number % 3 else (16, 8)
        made.add(f"{number:03}.png", f"caption {number % 10}", size=size)
    made.add("twin.png", "caption 1", size=(16, 8), like="000.png")
    return made


def latent(folder: Path, **how: Any) -> Encoder:  # noqa: ANN401 - what the encoder does
    return Encoder(Encode(folder, **how), reads="file", depends_on="vae", batch=2)


def opened(cache: SmartCache, photos: Photos, **outputs: Any) -> Dataset:  # noqa: ANN401
    sources = Sources(photos.path, sidecars={"caption": ".txt"}, metadata={"weight": 0.5})
    return cache.dataset("photos", sources, **outputs)


def everything(dataset: Dataset) -> dict[str, dict[str, Any]]:
    """All artifacts of all outputs, with what is kept beside them, as texts that can be compared.

    Arrays are told by their bytes.
    """
    return {
        name: {
            key: told(output.set.get_with_metadata(key)) for key in sorted(output.set.keys())
        }
        for name, output in dataset.outputs.items()
    }  # fmt: skip


def told(value: object) -> object:
    if isinstance(value, dict):
        return {name: told(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until(is_so: Callable[[], object]) -> None:
    while not is_so():
        time.sleep(0.01)


class Saboteur:
    """Asked by the build whether to stop: it says no, and kills a worker that hangs."""

    def __init__(self, folder: Path, dataset: Dataset) -> None:
        self.flag = folder / "hangs"
        self.dataset = dataset
        self.sealed: set[str] | None = None
        """What had arrived when the worker was killed."""

    def __call__(self) -> bool:
        if self.sealed is None and self.flag.exists() and (pid := self.flag.read_text()):
            self.sealed = names_in(self.dataset)
            if self.sealed:
                os.kill(int(pid), signal.SIGKILL)
            else:
                self.sealed = None
        return False


class TestSame:
    def test_every_byte_is_what_one_process_makes(self, tmp_path: Path, photos: Photos) -> None:
        """Buckets, variations, sidecars, trimmed texts, failures, NaN, equal sources."""
        found: list[Any] = []
        for engine in (None, ProcessEngine(2)):
            folder = tmp_path / f"{engine}"
            folder.mkdir()
            made = Encode(folder, "file", "caption", bad="005.png", nan="007.png")
            text = Encode(folder, "caption")
            with (
                SmartCache(folder / "store") as cache,
                opened(
                    cache, photos,
                    latent=Encoder(
                        made, reads=("file", "caption"), depends_on="vae", batch=3,
                        buckets=[(16, 16), (32, 16)], variations=2, version=3,
                    ),
                    text=Encoder(
                        text, reads="caption", depends_on="clip", batch=4, trim="mask",
                        shared="texts",
                    ),
                ) as dataset,
            ):  # fmt: skip
                report = dataset.build(engine=engine, progress=silent)
                found.append((
                    everything(dataset), sorted(report.failed), report.encoded, report.shared,
                    report.elsewhere, report.reused, dict(encodes(folder)),
                ))  # fmt: skip
                assert dataset.plan(silent).is_empty
                assert not scratch_of(dataset)
                assert len(processes(folder)) == (1 if engine is None else 2)
                assert (os.getpid() in processes(folder)) == (engine is None)
        one, several = found
        assert one == several
        assert {item: reason for item, _, reason in one[1]} == {
            "005.png": "failed: ValueError: no good",
            "007.png": "NaN in latent['value']",
        }
        assert one[2]["text"] == 10

    def test_rows_beside_files_with_metadata(self, tmp_path: Path, photos: Photos) -> None:
        found = []
        for engine in (None, ProcessEngine(1)):
            with SmartCache(tmp_path / f"store {engine}") as cache:
                rows = [{"file": f"{n:03}.png", "caption": f"row {n}", "n": n} for n in range(5)]
                sources = Sources.table(rows, root=photos.path) + Sources(
                    photos.path, sidecars={"caption": ".txt"}, metadata={"m": 0.5}
                )
                made = Encoder(
                    Encode(tmp_path, "file", "caption"), reads=("file", "caption"), depends_on="v"
                )
                with cache.dataset("rows", sources, latent=made) as dataset:
                    dataset.build(engine=engine, progress=silent)
                    found.append(everything(dataset))
        assert found[0] == found[1]

    def test_before_and_after_are_called_here_and_only_if_there_is_something(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        calls: list[str] = []
        with opened(cache, photos, latent=latent(tmp_path)) as dataset:
            for _ in range(2):
                dataset.build(
                    engine=ProcessEngine(1), progress=silent,
                    before=lambda: calls.append("before"), after=lambda: calls.append("after"),
                )  # fmt: skip
        assert calls == ["before", "after"]

    def test_a_copy_of_a_source_with_another_stat_key_will_do(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        """As on another machine: there it has another inode, and other times."""

        def copy() -> None:
            for path in photos.path.glob("*.png"):
                data = path.read_bytes()
                path.unlink()
                path.write_bytes(data)

        with opened(cache, photos, latent=latent(tmp_path)) as dataset:
            report = dataset.build(engine=ProcessEngine(1), before=copy, progress=silent)
            assert (report.encoded, report.failed) == ({"latent": COUNT}, [])

    def test_a_source_that_changes_meanwhile_is_not_encoded(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        def edit() -> None:
            photos.add("003.png", like="another one")

        with opened(cache, photos, latent=latent(tmp_path)) as dataset:
            report = dataset.build(engine=ProcessEngine(1), before=edit, progress=silent)
            assert [each.item for each in report.failed] == ["003.png"]
            assert dataset.build(progress=silent).encoded == {"latent": 1}


class TestDeath:
    def test_what_a_killed_worker_had_sealed_is_not_encoded_again(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        with opened(
            cache, photos, latent=latent(tmp_path, pause=0.01, hangs_at="018.png")
        ) as dataset:  # fmt: skip
            saboteur = Saboteur(tmp_path, dataset)
            report = dataset.build(engine=ProcessEngine(2), stop=saboteur, progress=silent)
            assert saboteur.sealed
            counts = encodes(tmp_path)
            assert {counts[f"{name} 0"] for name in saboteur.sealed} == {1}
            assert counts["018.png 0"] == 2
            assert (report.encoded, report.failed) == ({"latent": COUNT}, [])
            assert len(encodes(tmp_path)) == COUNT
            assert dataset.plan(silent).is_empty
            assert not scratch_of(dataset)

    def test_an_item_that_kills_every_worker_ends_the_build(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        with opened(cache, photos, latent=latent(tmp_path, dies_at="004.png")) as dataset:
            with pytest.raises(EncoderError, match=r"3 workers have died .* signal 9") as raised:
                dataset.build(engine=ProcessEngine(1), progress=silent)
            assert "004.png" in raised.value.items
            assert encodes(tmp_path)["004.png 0"] == 3

    def test_what_was_delivered_to_a_build_that_was_killed_is_not_encoded_again(
        self, tmp_path: Path, photos: Photos
    ) -> None:
        def build(pause: float) -> dict[str, int]:
            with (
                SmartCache(tmp_path / "store") as own,
                opened(own, photos, latent=latent(tmp_path, pause=pause)) as dataset,
            ):
                return dataset.build(engine=ProcessEngine(2), progress=silent).encoded

        with Child(lambda: build(0.05)) as killed, SmartCache(tmp_path / "store") as cache:
            wait_until(lambda: len(encodes(tmp_path)) > COUNT // 2)
            killed.end()
            wait_until(lambda: not any(map(is_alive, processes(tmp_path))))
            with opened(cache, photos, latent=latent(tmp_path)) as dataset:
                sealed = names_in(dataset)
                assert sealed
                before = encodes(tmp_path)
                assert len(sealed) == sum(before.values()), "workers deliver what they have"
                assert build(0) == {"latent": COUNT - len(sealed)}
                assert set(encodes(tmp_path).values()) == {1}
                assert dataset.plan(silent).is_empty
                assert not scratch_of(dataset)

    def test_ctrl_c_leaves_no_process_behind_and_keeps_what_was_done(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        def build() -> bool:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with (
                SmartCache(tmp_path / "store") as own,
                opened(own, photos, latent=latent(tmp_path, pause=0.05)) as dataset,
            ):
                try:
                    dataset.build(engine=ProcessEngine(2), progress=silent)
                except KeyboardInterrupt:
                    return True
                return False

        with Child(build) as child:
            wait_until(lambda: len(encodes(tmp_path)) > COUNT // 2)
            os.kill(child.pid, signal.SIGINT)
            assert child.result()
        assert not any(map(is_alive, processes(tmp_path)))
        with opened(cache, photos, latent=latent(tmp_path)) as dataset:
            assert len(names_in(dataset)) == len(encodes(tmp_path)) < COUNT
            assert not scratch_of(dataset)

    def test_what_a_killed_build_and_its_workers_have_left_is_removed_by_the_next(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        def build() -> None:
            with (
                SmartCache(tmp_path / "store") as own,
                opened(own, photos, latent=latent(tmp_path, hangs_at="000.png")) as dataset,
            ):
                dataset.build(engine=ProcessEngine(1), progress=silent)

        with Child(build) as child:
            wait_until(lambda: (tmp_path / "hangs").exists() and processes(tmp_path))
            child.end()
            (worker,) = processes(tmp_path)
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: not is_alive(worker))
        with opened(cache, photos, latent=latent(tmp_path)) as dataset:
            assert scratch_of(dataset)
            dataset.build(engine=ProcessEngine(1), progress=silent)
            assert not scratch_of(dataset)


class TestTogether:
    def test_two_builds_at_once_encode_each_item_once(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        def build() -> dict[str, dict[str, int]]:
            with (
                SmartCache(tmp_path / "store") as own,
                opened(own, photos, latent=latent(tmp_path, pause=0.02)) as dataset,
            ):
                report = dataset.build(engine=ProcessEngine(1), progress=silent)
                assert dataset.plan(silent).is_empty
                return {"here": report.encoded, "elsewhere": report.elsewhere}

        with opened(cache, photos, latent=latent(tmp_path)) as dataset:
            dataset.plan(silent)
            with Child(build) as first, Child(build) as second:
                reports = [first.result(), second.result()]
            assert set(encodes(tmp_path).values()) == {1}
            assert len(processes(tmp_path)) == 2
            here = [report["here"]["latent"] for report in reports]
            assert sum(here) == COUNT
            assert [report["elsewhere"]["latent"] for report in reports] == here[::-1]
            assert not scratch_of(dataset)

    def test_stop_ends_workers_early_and_keeps_what_they_have_done(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        with opened(cache, photos, latent=latent(tmp_path, pause=0.05)) as dataset:
            report = dataset.build(
                engine=ProcessEngine(2), progress=silent,
                stop=lambda: len(encodes(tmp_path)) > COUNT // 2,
            )  # fmt: skip
            assert report.is_stopped
            assert report.encoded == {"latent": sum(encodes(tmp_path).values())}
            assert COUNT // 2 < report.encoded["latent"] < COUNT
            report = dataset.build(engine=ProcessEngine(2), progress=silent)
            assert report.reused["latent"] > COUNT // 2
            assert set(encodes(tmp_path).values()) == {1}

    def test_each_process_sees_a_gpu_of_its_own(
        self, cache: SmartCache, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        encoder = Encoder(encode_surroundings, reads="file", depends_on="vae")
        with opened(cache, photos, latent=encoder) as dataset:
            dataset.build(engine=ProcessEngine(2, gpus=[5, 3]), progress=silent)
            found = dataset.outputs["latent"].set
            told = [found.get(key) for key in found]
        assert {each["CUDA_VISIBLE_DEVICES"] for each in told} == {"5", "3"}
        assert {each["OMP_NUM_THREADS"] for each in told} == {"7"}


class TestErrors:
    def test_an_error_of_the_encoder_itself_is_raised_as_it_was(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        encoder = latent(tmp_path, error=ZeroDivisionError)
        with opened(cache, photos, latent=encoder) as dataset:
            with pytest.raises(ZeroDivisionError, match="no good") as raised:
                dataset.build(engine=ProcessEngine(2), progress=silent)
            assert "workers.py" in "".join(raised.value.__notes__), "where it was raised"
            assert not dataset.failed

    def test_one_that_cannot_be_pickled_is_told_in_words(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        with (
            opened(cache, photos, latent=latent(tmp_path, error=StubbornError)) as dataset,
            pytest.raises(EncoderError, match=r"StubbornError.*second argument"),
        ):
            dataset.build(engine=ProcessEngine(1), progress=silent)

    def test_what_was_encoded_before_an_error_is_kept(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        with opened(cache, photos, latent=latent(tmp_path, bad="004.png")) as dataset:
            with pytest.raises(EncoderError, match=r"latent of 004\.png") as raised:
                dataset.build(engine=ProcessEngine(1), on_error="raise", progress=silent)
            assert raised.value.items == ("004.png",)
            assert {"000.png", "001.png", "002.png", "003.png"} <= names_in(dataset)

    def test_what_is_no_engine_is_refused(
        self, tmp_path: Path, cache: SmartCache, photos: Photos
    ) -> None:
        with (
            opened(cache, photos, latent=latent(tmp_path)) as dataset,
            pytest.raises(ConfigError, match="2 is not an engine"),
        ):
            dataset.build(engine=2, progress=silent)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="workers is a number"):
            ProcessEngine(0)

    def test_a_function_that_cannot_be_sent_is_refused_with_a_way_out(
        self, cache: SmartCache, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        encoder = Encoder(lambda items: [0 for _ in items], reads="file", depends_on="vae")
        with opened(cache, photos, latent=encoder) as dataset:
            with pytest.raises(EncoderError, match="cannot be sent") as raised:
                dataset.build(engine=ProcessEngine(1), progress=silent)
            assert "install cloudpickle" in str(raised.value.hint)
            assert not scratch_of(dataset)


SCRIPT = """
import numpy as np
from pathlib import Path
from smartcache import SmartCache
from smartcache.training import Encoder, ProcessEngine, Sources

def encode(items):
    return np.stack([np.frombuffer(item.bytes()[:8], np.uint8) for item in items])

def main():
    here = Path({folder!r})
    with SmartCache(here / "store") as cache:
        encoder = Encoder(encode, reads="file", depends_on="vae")
        with cache.dataset("photos", Sources(here / "photos"), latent=encoder) as dataset:
            print(dataset.build(engine=ProcessEngine(1)))

{call}
"""


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_function_of_a_script_is_found_if_the_script_can_be_imported(
    tmp_path: Path, photos: Photos, is_guarded: bool
) -> None:
    call = 'if __name__ == "__main__":\n    main()' if is_guarded else "main()"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path), call=call))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(root)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    if is_guarded:
        assert done.stdout == f"encoded {COUNT} latent; shared 1 latent\n", done.stderr
    else:
        assert done.returncode == 1
        assert 'if __name__ == "__main__"' in done.stderr
