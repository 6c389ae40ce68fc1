"""Datasets of ComfyUI: what is saved is what is loaded, whole, once, and without any pickle."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smartcache.artifacts import ArtifactSets
from smartcache.errors import (
    BadDigestError,
    BadSetNameError,
    BlobNotFoundError,
    DatasetError,
    SmartcacheError,
    UnsupportedValueError,
)
from smartcache.integrations import comfyui
from smartcache.store.store import Store
from tests.artifacts.exact import exactly
from tests.integrations.later import Later
from tests.processes.killing import in_child, was_killed

if TYPE_CHECKING:
    import torch
else:
    torch = Later("torch")

STANDINS = Path(__file__).with_name("standins") / "comfyui"
MODULES = ("folder_paths", "comfy", "comfy.nested_tensor", "comfy.sd")
ODD_NAMES = ("", ".", "..", "../other", "a/b", "/etc", "a\\b", "a\0b")
NO_JSON = " cannot be read as JSON"
BAD_METADATA = [
    (b"", NO_JSON),
    (b"{", NO_JSON),
    (b"\0", NO_JSON),
    (b'{"num_shards": "\xff"}', NO_JSON),
    (b"[" * 100_000, NO_JSON),
    (b'{"num_shards": ' + b"[" * 100_000, NO_JSON),
    (b'{"num_shards": ' + b"1" * 5000 + b"}", NO_JSON),
    (b'{"num_shards": 2, "more": "' + b" " * (2 << 20) + b'"}', NO_JSON),
    (b"[[[]]]", " is not a JSON object"),
    (b"null", " is not a JSON object"),
    *(
        (b'{"num_shards": 2, "num_samples": 3, "%s": %s}' % (name, value),
         f": {name.decode()} is not a count")
        for name in (b"num_shards", b"num_samples")
        for value in (b"[[]]", b"{}", b'"2"', b'"\\u0000"', b"2.0", b"1e999", b"NaN", b"true",
                      b"null", b"-1", b"1" * 30)
    ),
]  # fmt: skip
Sample = tuple[dict[str, Any], list[Any]]


@pytest.fixture(scope="module", autouse=True)
def _comfyui() -> Iterator[None]:
    """Let the nodes find the stand-in, and nobody else."""
    sys.path.insert(0, str(STANDINS))
    yield
    sys.path.remove(str(STANDINS))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(importlib.import_module("folder_paths"), "base_path", str(tmp_path))
    path = tmp_path / "output"
    path.mkdir()
    return path


def nested(*tensors: torch.Tensor) -> Any:  # noqa: ANN401 - a class of the stand-in
    return importlib.import_module("comfy.nested_tensor").NestedTensor(tensors)


def sample(seed: int, *, rows: int = 1, size: int = 4) -> Sample:
    random = torch.Generator().manual_seed(seed)
    latent = {"samples": torch.randn(rows, 4, size, 8, generator=random)}
    condition = torch.randn(1, 7, 64, generator=random)
    return latent, [[condition, {"pooled_output": torch.randn(1, 32, generator=random)}]] * rows


def samples(*seeds: int) -> list[Sample]:
    return [sample(seed) for seed in seeds]


def read(value: Any) -> Any:  # noqa: ANN401
    """Return a loaded value with ordinary tensors; there are no others in it."""
    if isinstance(value, torch.Tensor):
        assert type(value) is comfyui.LazyTensor
        return value[...]
    if type(value) in (list, tuple):
        return type(value)(map(read, value))
    if type(value) is dict:
        return {key: read(each) for key, each in value.items()}
    return nested(*map(read, value.tensors)) if hasattr(value, "tensors") else value


def described(value: Any) -> object:  # noqa: ANN401
    """Describe a value to the last bit, nested tensors too."""
    if hasattr(value, "tensors"):
        return "nested", described(value.tensors)
    if type(value) in (list, tuple):
        return type(value).__name__, [described(each) for each in value]
    if type(value) is dict:
        return "dict", [(exactly(key), described(each)) for key, each in value.items()]
    return exactly(value)


def contents(output: Path, name: str = "data") -> list[object]:
    return [described(each) for each in zip(*map(read, comfyui.load(output, name)), strict=True)]


def expected(some: list[Sample]) -> list[object]:
    return [described(each) for each in some]


def stored_keys(output: Path, name: str = "data") -> set[str]:
    sets = ArtifactSets(output / "smartcache")
    (info,) = sets.infos(name)
    with sets.open_id(info) as opened:
        return set(opened)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    dtypes = [
        torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool,
        torch.uint8, torch.complex64,
    ]  # fmt: skip
    shapes = st.sampled_from([(), (0,), (1,), (3, 2), (1, 2, 3), (1, 77, 8)])

    def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int, whole: bool) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        found = (torch.randn((2, *shape), generator=random) * 3).to(dtype)
        return found[1] if whole else found.movedim(0, -1)[..., 0]

    return st.builds(made, shapes, st.sampled_from(dtypes), st.integers(0, 3), st.booleans())


def values() -> st.SearchStrategy[object]:
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
        st.binary(max_size=4), st.complex_numbers(allow_nan=False),
        st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1, 2]), float("nan")]),
    )  # fmt: skip
    keys = st.text(max_size=3) | st.integers() | st.sampled_from(["a.b", "x" * 90, "x" * 90 + "y"])
    return st.recursive(
        plain | tensors(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
        ),
        max_leaves=6,
    )


def latents() -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(tensors(), min_size=1, max_size=3).map(lambda each: nested(*each))
    return st.fixed_dictionaries(
        {"samples": tensors() | several},
        optional={
            "noise_mask": tensors(), "batch_index": st.lists(st.integers(0, 9), max_size=3),
            "type": st.sampled_from(["audio", "hunyuan3dv2"]), "more": values(),
        },
    )  # fmt: skip


def conditions() -> st.SearchStrategy[list[Any]]:
    pair = st.tuples(tensors(), st.dictionaries(st.text(max_size=4), values(), max_size=3))
    return st.lists(pair.map(list), max_size=2)


def datasets() -> st.SearchStrategy[list[Sample]]:
    return st.lists(st.tuples(latents(), conditions()), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def one_output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@settings(max_examples=40)
@given(some=st.deferred(datasets))
def test_what_is_saved_is_what_is_loaded(one_output: Path, some: list[Sample]) -> None:
    assert comfyui.save(one_output, "data", some) == len(some)
    assert contents(one_output) == expected(some)
    assert comfyui.describe(one_output, "data").samples == len(some)


class TestSaving:
    def test_nothing_of_an_earlier_save_is_left(self, output: Path) -> None:
        comfyui.save(output, "data", samples(1, 2, 3, 4))
        comfyui.save(output, "data", samples(2, 9))
        assert contents(output) == expected(samples(2, 9))
        assert len(stored_keys(output)) == 3

    def test_an_equal_dataset_is_not_written_again(self, output: Path) -> None:
        comfyui.save(output, "data", samples(1, 2, 3))
        before = comfyui.describe(output, "data").on_disk
        comfyui.save(output, "data", samples(3, 2, 1, 1))
        assert contents(output) == expected(samples(3, 2, 1, 1))
        assert comfyui.describe(output, "data").on_disk < before * 1.5

    def test_a_dataset_can_be_saved_over_itself(self, output: Path) -> None:
        comfyui.save(output, "data", samples(1, 2, 3))
        loaded = list(zip(*comfyui.load(output, "data"), strict=True))
        comfyui.save(output, "data", loaded[:0:-1])
        assert contents(output) == expected(samples(3, 2))

    def test_a_save_that_fails_leaves_the_old_and_nothing_else(self, output: Path) -> None:
        comfyui.save(output, "data", samples(1, 2))
        before = stored_keys(output)

        def failing() -> Iterator[Sample]:
            yield from samples(7, 8)
            raise OSError("the VAE has caught fire")

        with pytest.raises(OSError, match="caught fire"):
            comfyui.save(output, "data", failing())
        with pytest.raises(DatasetError, match="nothing to save"):
            comfyui.save(output, "data", [])
        assert contents(output) == expected(samples(1, 2))
        assert stored_keys(output) == before

    def test_a_save_that_is_killed_anywhere_leaves_the_old_or_the_new(self, output: Path) -> None:
        """After ever more lines of the module, until a save lives to its end."""
        old, new = expected(samples(1, 2)), expected(samples(2, 3, 4))
        seen = []
        for line in itertools.count(1, 13):
            comfyui.save(output, "data", samples(1, 2))
            assert stored_keys(output) & {"index"}

            def act(line: int = line) -> None:
                die_at_line(comfyui.save.__code__.co_filename, line)
                comfyui.save(output, "data", samples(2, 3, 4))
                sys.settrace(None)

            status = in_child(act)
            found = contents(output)
            assert found in (old, new)
            seen.append(found == new)
            if not was_killed(status):
                assert status == 0
                break
        assert len(seen) > 5
        assert seen == sorted(seen)
        assert seen[-2] is True, "none was killed after the index was written"
        comfyui.save(output, "data", samples(1))
        assert len(stored_keys(output)) == 2

    def test_a_damaged_index_is_said_and_keeps_the_samples_until_the_next_save(
        self, output: Path
    ) -> None:
        comfyui.save(output, "data", samples(1, 2))
        before = stored_keys(output)
        (pack,) = output.rglob("*.pack")
        whole = bytearray(pack.read_bytes())
        whole[whole.rindex(b'"skeletons') + 3] ^= 1
        pack.write_bytes(whole)
        with pytest.raises(DatasetError, match="index of the dataset data is damaged"):
            comfyui.load(output, "data")
        with pytest.raises(DatasetError, match="nothing to save"):
            comfyui.save(output, "data", [])
        assert before - {"index"} <= stored_keys(output)
        comfyui.save(output, "data", samples(2, 3))
        assert contents(output) == expected(samples(2, 3))

    def test_two_saves_at_once_leave_one_of_them_whole(self, output: Path) -> None:
        choices = [samples(*range(first, first + 12)) for first in (0, 6, 20)]
        with ThreadPoolExecutor(3) as pool:
            assert (
                list(pool.map(lambda some: comfyui.save(output, "data", some), choices)) == [12] * 3
            )
        assert contents(output) in [expected(some) for some in choices]
        assert len(stored_keys(output)) == 13

    def test_one_caption_of_many_samples_is_kept_once(self, output: Path) -> None:
        caption = torch.randn(1, 256, 512)
        some = [
            ({"samples": torch.randn(1, 4, 8, 8)}, [[caption, {"pooled_output": caption[:, 0]}]])
            for _ in range(32)
        ]
        comfyui.save(output, "data", some)
        info = comfyui.describe(output, "data")
        assert info.on_disk < 2 * caption.nbytes
        assert info.saved > 30 * caption.nbytes
        assert contents(output) == expected(some)

    def test_a_slice_takes_the_room_of_the_slice(self, output: Path) -> None:
        batch = torch.randn(64, 4, 64, 64)
        comfyui.save(output, "data", [({"samples": batch[n : n + 1]}, []) for n in range(4)])
        assert comfyui.describe(output, "data").on_disk < 6 * batch[:1].nbytes

    @pytest.mark.parametrize("name", [*ODD_NAMES, "two words", "x" * 101, "-x"])
    def test_a_name_leads_nowhere_else(self, output: Path, name: str) -> None:
        with pytest.raises(BadSetNameError):
            comfyui.save(output, name, samples(1))
        with pytest.raises((BadSetNameError, DatasetError)):
            comfyui.load(output, name)
        assert [path for path in output.parent.rglob("*") if path.name.endswith(".pack")] == []

    @pytest.mark.parametrize(
        ("spoil", "path"),
        [
            (lambda latent, cond: cond[1][1].update(hooks=object()), "conditioning[3][1][1].hooks"),
            (lambda latent, cond: cond[0][1].update(control=[torch.nn.Linear(1, 1)]),
             "conditioning[3][0][1].control[0]"),
            (lambda latent, cond: latent.update(noise_mask=torch.eye(2).to_sparse()),
             "latents[3].noise_mask"),
            (lambda latent, cond: latent.update(x=torch.nn.Parameter(torch.ones(1))),
             "latents[3].x"),
            (lambda latent, cond: cond[0][1].update({"a b": {(1, 2): 3}}),
             'conditioning[3][0][1]["a b"]'),
            (lambda latent, cond: latent.update(itself=latent), "latents[3].itself"),
            (lambda latent, cond: latent.clear(), "latents[3]"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_kept_is_named(
        self, output: Path, spoil: Callable[[Any, Any], None], path: str
    ) -> None:
        some = [sample(n, rows=2) for n in range(4)]
        latent, conditioning = some[3]
        some[3] = dict(latent), [[tensor, dict(more)] for tensor, more in conditioning]
        spoil(*some[3])
        with pytest.raises(UnsupportedValueError) as caught:
            comfyui.save(output, "data", some)
        assert caught.value.path.startswith(path)
        assert str(caught.value).startswith(path)
        assert stored_keys(output) == set()
        with pytest.raises(DatasetError, match="never saved to its end"):
            comfyui.load(output, "data")


def die_at_line(file: str, number: int) -> None:
    """Let this process kill itself before the nth line of a module that it executes."""
    count = 0

    def local(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return local

    def start(frame: FrameType, _event: str, _: object) -> object:
        return local if frame.f_code.co_filename == file else None

    sys.settrace(start)  # type: ignore[arg-type]


class TestBuckets:
    def test_samples_of_one_shape_are_one_tensor(self, output: Path) -> None:
        some = [sample(1), sample(2, size=6), sample(3), sample(4, rows=3), sample(5, size=6)]
        comfyui.save(output, "data", some)
        latents, conditioning = comfyui.load(output, "data", buckets=True)
        assert [tuple(each["samples"].shape) for each in latents] == [(5, 4, 4, 8), (2, 4, 6, 8)]
        for latent, conds, members in zip(latents, conditioning, ((0, 2, 3), (1, 4)), strict=True):
            whole = torch.cat([some[n][0]["samples"] for n in members])
            assert torch.equal(latent["samples"], whole)
            assert torch.equal(latent["samples"][[1, 0]], whole[[1, 0]])
            wanted = [cond for n in members for cond in some[n][1]]
            assert described(read(conds)) == described(wanted)

    def test_one_condition_counts_for_all_images_of_a_batch(self, output: Path) -> None:
        latent, conditioning = sample(1, rows=3)
        comfyui.save(output, "data", [(latent, conditioning[:1])])
        (_,), (conds,) = comfyui.load(output, "data", buckets=True)
        assert described(read(conds)) == described(conditioning)

    def test_what_fits_no_bucket_is_refused(self, output: Path) -> None:
        latent, conditioning = sample(1, rows=3)
        comfyui.save(output, "data", [(latent, conditioning[:2])])
        with pytest.raises(DatasetError, match="3 images and 2 conditions"):
            comfyui.load(output, "data", buckets=True)
        comfyui.save(output, "data", [({"samples": nested(torch.ones(1, 2))}, conditioning[:1])])
        with pytest.raises(DatasetError, match="NestedTensor"):
            comfyui.load(output, "data", buckets=True)

    def test_what_is_left_out_is_said(self, output: Path, caplog: pytest.LogCaptureFixture) -> None:
        latent, conditioning = sample(1)
        comfyui.save(output, "data", [({**latent, "noise_mask": torch.ones(1)}, conditioning)])
        comfyui.load(output, "data", buckets=True)
        assert "noise_mask" in caplog.text


class Code:
    """What runs a program when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


class TestOldShards:
    def shards(self, folder: Path, some: list[Sample], *, size: int = 2) -> int:
        """Save as ComfyUI's node does; return how many shards there are."""
        folder.mkdir(exist_ok=True)
        starts = range(0, len(some), size)
        for number, start in enumerate(starts):
            part = some[start : start + size]
            shard = {"latents": [a for a, _ in part], "conditioning": [b for _, b in part]}
            torch.save(shard, folder / f"shard_{number:04d}.pkl")
        counts = {"num_samples": len(some), "num_shards": len(starts), "shard_size": size}
        (folder / "metadata.json").write_text(json.dumps(counts))
        return len(starts)

    def test_they_become_a_dataset(self, output: Path) -> None:
        some = [*samples(1, 2, 3, 4), ({"samples": nested(torch.ones(2), torch.ones(3))}, [])]
        self.shards(output / "old set", some)
        assert comfyui.import_shards(output, "old set", "data") == 5
        assert contents(output) == expected(some)
        assert len(list((output / "old set").iterdir())) == 4

    def test_those_of_a_longer_earlier_save_are_left_out(
        self, output: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.shards(output / "old", samples(1, 2, 3, 4, 5, 6))
        self.shards(output / "old", samples(7, 8, 9))
        with caplog.at_level(logging.WARNING):
            assert comfyui.import_shards(output, "old", "data") == 3
        assert contents(output) == expected(samples(7, 8, 9))
        assert "earlier save: shard_0002.pkl in" in caplog.text

    def test_code_in_a_shard_is_not_run(self, output: Path, tmp_path: Path) -> None:
        comfyui.save(output, "data", samples(1))
        self.shards(output / "old", samples(2, 3, 4))
        torch.save(
            {"latents": [Code(tmp_path / "ran")], "conditioning": [[]]},
            output / "old" / "shard_0001.pkl",
        )
        with pytest.raises(DatasetError, match="cannot be read safely"):
            comfyui.import_shards(output, "old", "data")
        assert not (tmp_path / "ran").exists()
        assert contents(output) == expected(samples(1))
        assert len(stored_keys(output)) == 2

    def test_what_is_incomplete_is_refused(self, output: Path) -> None:
        self.shards(output / "old", samples(1, 2, 3))
        (output / "old" / "shard_0000.pkl").rename(output / "old" / "x")
        with pytest.raises(DatasetError, match=r"no shard_0000\.pkl"):
            comfyui.import_shards(output, "old", "data")
        torch.save({"latents": [], "conditioning": []}, output / "old" / "shard_0000.pkl")
        with pytest.raises(DatasetError, match="1 sample, not 3"):
            comfyui.import_shards(output, "old", "data")
        (output / "old" / "shard_0001.pkl").write_bytes(b"PK\3\4 not a shard")
        with pytest.raises(DatasetError, match="cannot be read"):
            comfyui.import_shards(output, "old", "data")
        torch.save([1, 2], output / "old" / "shard_0001.pkl")
        with pytest.raises(DatasetError, match="is no shard"):
            comfyui.import_shards(output, "old", "data")
        torch.save({"latents": [1], "conditioning": []}, output / "old" / "shard_0001.pkl")
        with pytest.raises(DatasetError, match="1 latents and 0"):
            comfyui.import_shards(output, "old", "data")
        with pytest.raises(DatasetError, match="no shards"):
            comfyui.import_shards(output, "other", "data")

    @pytest.mark.parametrize(("data", "reason"), BAD_METADATA)
    def test_metadata_that_makes_no_sense_is_one_line_that_names_file_and_field(
        self, output: Path, data: bytes, reason: str
    ) -> None:
        self.shards(output / "old", samples(1, 2, 3))
        path = output / "old" / "metadata.json"
        path.write_bytes(data)
        with pytest.raises(DatasetError) as caught:
            node("ImportShards").bring("old", "data")
        message, _ = str(caught.value).split("\nHint: ")
        assert message == f"{path}{reason}"
        assert not (output / "smartcache").exists()

    def test_a_shard_that_metadata_counts_and_is_not_there_is_named(self, output: Path) -> None:
        self.shards(output / "old", samples(1, 2, 3))
        (output / "old" / "metadata.json").write_text('{"num_shards": 4000000000000}')
        with pytest.raises(DatasetError, match=r"no shard_0002\.pkl, though it has 4,000"):
            node("ImportShards").bring("old", "data")

    def test_metadata_that_is_no_file_holds_nobody_up(self, output: Path) -> None:
        self.shards(output / "old", samples(1))
        path = output / "old" / "metadata.json"
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DatasetError, match=r"metadata\.json cannot be read"):
            node("ImportShards").bring("old", "data")
        path.unlink()
        assert node("ImportShards").bring("old", "data")["result"] == (1,)

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_folder_name_leads_nowhere_else(self, output: Path, name: str) -> None:
        self.shards(output.parent / "other", samples(1))
        with pytest.raises(BadSetNameError):
            comfyui.import_shards(output, name, "data")


def node(name: str) -> Any:  # noqa: ANN401 - a node has no common type
    return comfyui.NODE_CLASS_MAPPINGS[f"Smartcache{name}"]()


class TestNodes:
    def test_they_are_declared_as_comfyui_expects(self) -> None:
        assert comfyui.NODE_CLASS_MAPPINGS.keys() == comfyui.NODE_DISPLAY_NAME_MAPPINGS.keys()
        for each in comfyui.NODE_CLASS_MAPPINGS.values():
            made: Any = each
            inputs = made.INPUT_TYPES()["required"]
            assert list(inputs) == list(signature(getattr(made(), made.FUNCTION)).parameters)
            assert len(made.RETURN_TYPES) == len(getattr(made, "RETURN_NAMES", made.RETURN_TYPES))

    @pytest.mark.usefixtures("output")
    def test_saving_loading_and_looking(self) -> None:
        some = samples(1, 2, 3)
        latents, conditioning = map(list, zip(*some, strict=True))
        said = node("SaveTrainingDataset").save(latents, conditioning, ["data"])
        assert said == {"ui": {"text": ["3 samples saved as data"]}}
        found = node("LoadTrainingDataset").load("data", False)
        assert described(read(found[0])) == described(latents)
        assert described(read(found[1])) == described(conditioning)
        assert len(node("LoadTrainingDataset").load("data", True)[0]) == 1
        text, count = node("DatasetInfo").describe("data")["result"]
        assert count == 3
        assert text.startswith("data: 3 samples, 3 images\n  3 x float32 [1, 4, 4, 8]\n")
        with pytest.raises(DatasetError, match="3 latents and 2"):
            node("SaveTrainingDataset").save(latents, conditioning[:2], ["data"])
        with pytest.raises(DatasetError, match="no dataset 'other'") as caught:
            node("LoadTrainingDataset").load("other", True)
        assert str(caught.value).endswith("\nHint: There are: data.")

    @pytest.mark.usefixtures("output")
    @pytest.mark.parametrize(
        ("name", "inputs"),
        [
            ("SaveTrainingDataset", {"latents": [{}], "conditioning": [], "dataset_name": ["x"]}),
            ("LoadTrainingDataset", {"dataset_name": "x", "buckets": True}),
            ("DatasetInfo", {"dataset_name": "x"}),
            ("ImportShards", {"folder_name": "x", "dataset_name": "y"}),
            ("LoadCheckpoint", {"hash_or_name": "0" * 64}),
        ],
    )
    def test_what_comfyui_shows_of_an_error_has_the_hint_once(
        self, name: str, inputs: dict[str, Any]
    ) -> None:
        made = node(name)
        with pytest.raises(SmartcacheError) as caught:
            getattr(made, made.FUNCTION)(**inputs)
        message, hint = str(caught.value).split("\nHint: ")
        assert message
        assert hint
        assert "".join(traceback.format_exception_only(caught.value)).count(hint) == 1

    def test_comfyui_hears_of_a_dataset_that_was_saved_again(self, output: Path) -> None:
        loader = node("LoadTrainingDataset")
        assert loader.IS_CHANGED("data", buckets=True) == ""
        tokens = []
        for seeds in ((1, 2), (1, 2), (2, 1), (1, 3)):
            comfyui.save(output, "data", samples(*seeds))
            tokens.append(loader.IS_CHANGED("data", buckets=True))
        assert tokens[0] == tokens[1]
        assert tokens[3] == node("DatasetInfo").IS_CHANGED("data")
        assert len(set(tokens)) == 3

    def test_old_shards(self, output: Path) -> None:
        TestOldShards().shards(output / "old", samples(1, 2, 3))
        assert node("ImportShards").bring("old", "data")["result"] == (3,)
        assert contents(output) == expected(samples(1, 2, 3))


WEIGHTS = (8).to_bytes(8, "little") + b"{}      weights"


class TestCheckpoints:
    @pytest.fixture
    def known(self, tmp_path: Path) -> Path:
        """A checkpoint in a program's folder that the store knows."""
        path = tmp_path / "models" / "dreams.safetensors"
        path.parent.mkdir()
        path.write_bytes(WEIGHTS)
        with Store() as store:
            store.adopt(path, algorithms=("sha256",))
        return path

    @pytest.mark.usefixtures("known")
    @pytest.mark.parametrize("start", ["", "sha256:"])
    @pytest.mark.parametrize("length", [64, 8])
    def test_are_found_by_their_sha256(self, start: str, length: int) -> None:
        text = f" {start}{sha256(WEIGHTS).hexdigest()[:length].upper()} "
        assert comfyui.find_checkpoint(text, "temp").read_bytes() == WEIGHTS

    def test_a_sha256_that_nobody_has_computed_is_computed_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "dreams.safetensors"
        path.write_bytes(WEIGHTS)
        with Store() as store:
            store.adopt(path)
        for _ in range(2):
            assert comfyui.find_checkpoint(sha256(WEIGHTS).hexdigest()[:10], tmp_path) == path
        assert caplog.text.count("Computing the SHA-256") == 1

    def test_are_found_by_their_digest_and_their_name(self, known: Path, output: Path) -> None:
        with Store() as store:
            digest = store.digest_of(known).digest
        for text in (digest, digest[:10], f"blake3:{digest}", "dreams.safetensors"):
            weights, both, (path, embeddings), *rest = node("LoadCheckpoint").load(text)
            assert (weights, both, rest) == (WEIGHTS, True, [])
            assert Path(path).suffix == ".safetensors"
            assert embeddings == [str(output.parent / "models" / "embeddings")]

    def test_one_without_a_name_gets_one_in_the_temporary_folder(self, tmp_path: Path) -> None:
        source = tmp_path / "x"
        source.write_bytes(WEIGHTS)
        with Store() as store:
            digest = store.put_file(source).digest
        for _ in range(2):
            path = comfyui.find_checkpoint(digest, tmp_path / "temp")
            assert path == tmp_path / "temp" / f"{digest}.safetensors"
            assert path.read_bytes() == WEIGHTS

    def test_that_are_unknown_or_not_the_only_ones_are_refused(
        self, known: Path, tmp_path: Path
    ) -> None:
        for text in ("", "other.safetensors", "0" * 64, f"blake3:{sha256(WEIGHTS).hexdigest()}"):
            with pytest.raises(BlobNotFoundError, match="knows no file"):
                comfyui.find_checkpoint(text, tmp_path)
        other = tmp_path / "more" / known.name
        other.parent.mkdir()
        other.write_bytes(WEIGHTS + b"of another kind")
        with Store() as store:
            store.adopt(other)
        with pytest.raises(BadDigestError, match="2 different files"):
            comfyui.find_checkpoint(known.name, tmp_path)

    def test_that_were_changed_are_not_given(self, known: Path, tmp_path: Path) -> None:
        known.chmod(0o644)
        known.write_bytes(WEIGHTS[::-1])
        with pytest.raises(BlobNotFoundError):
            comfyui.find_checkpoint(sha256(WEIGHTS).hexdigest(), tmp_path)


@pytest.mark.torch
def test_the_line_in_the_docs_gives_comfyui_the_nodes(tmp_path: Path) -> None:
    """In a Python of its own, as ComfyUI imports its custom nodes: by their path."""
    page = (Path(__file__).parents[2] / "docs/comfyui.md").read_text("utf-8")
    (command,) = re.findall(r"^\$ (echo .*)$", page, re.MULTILINE)
    nodes = tmp_path / "ComfyUI" / "custom_nodes"
    nodes.mkdir(parents=True)
    subprocess.run(["sh", "-c", command], env={"HOME": str(tmp_path)}, check=True)
    (file,) = nodes.iterdir()
    program = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('custom_nodes_x', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps([sorted(module.NODE_CLASS_MAPPINGS),\n"
        "                  sorted(module.NODE_DISPLAY_NAME_MAPPINGS)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, file],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    classes, names = json.loads(done.stdout)
    assert classes == names != []
