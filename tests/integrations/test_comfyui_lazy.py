"""Lazy tensors against ordinary ones: the same values, or the same refusal."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.errors import ArtifactError, DatasetChangedError, DatasetError
from smartcache.integrations import comfyui
from tests.artifacts.exact import exactly
from tests.integrations.later import Later

if TYPE_CHECKING:
    import torch
else:
    torch = Later("torch")

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32")
Pair: TypeAlias = "tuple[comfyui.LazyTensor, torch.Tensor]"


def latents(*rows: int, dtype: str = "float32") -> list[torch.Tensor]:
    """Return a tensor for each number of rows; no two values are equal."""
    total = sum(rows)
    values = torch.arange(total * 2 * 3 * 4).reshape(total, 2, 3, 4) * 1.001
    return list(torch.split(values.to(getattr(torch, dtype)), list(rows)))


def lazy_of(output: Path, tensors: list[torch.Tensor]) -> comfyui.LazyTensor:
    """Save tensors and load them as one bucket."""
    condition = [torch.zeros(1, 2), {"pooled_output": None}]
    comfyui.save(output, "lazy", [({"samples": each}, [condition] * len(each)) for each in tensors])
    (latent,), _ = comfyui.load(output, "lazy", buckets=True)
    assert type(latent["samples"]) is comfyui.LazyTensor
    return latent["samples"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    """Lazy tensors of one stored tensor and of several, with what they are."""
    made = []
    for number, rows in enumerate([(1,), (5,), (1, 1, 1, 1), (2, 1, 3)]):
        for dtype in DTYPES:
            output = tmp_path_factory.mktemp(f"output{number}")
            eager = latents(*rows, dtype=dtype)
            made.append((lazy_of(output, eager), torch.cat(eager)))
    yield made
    assert all(lazy._own is None for lazy, _ in made)  # noqa: SLF001 - nothing was kept in memory


def outcome(act: Callable[[], object]) -> object:
    """Return what comes of something: a value, bit by bit, or the kind of error."""
    try:
        found = act()
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        return type(error)
    if isinstance(found, torch.Tensor):
        found = found[...]
        assert type(found) is torch.Tensor
    return exactly(found)


def rows_of(count: int) -> st.SearchStrategy[Any]:
    number = st.integers(-count - 1, count)
    inside = st.integers(-count, count - 1)
    ends = st.none() | number
    return st.one_of(
        number,
        st.slices(count),
        st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1, 0])),
        st.lists(inside, max_size=2 * count),
        st.lists(inside, max_size=6).map(lambda rows: torch.tensor(rows, dtype=torch.int64)),
        st.lists(inside, min_size=4, max_size=4).map(lambda rows: torch.tensor(rows).view(2, 2)),
        st.lists(st.booleans(), min_size=count, max_size=count).map(torch.tensor),
        st.lists(st.booleans(), min_size=count, max_size=count),
        st.sampled_from([None, ..., True, torch.tensor(0), (), torch.tensor([[True]]), "x", 1.0]),
    )


def indices(count: int) -> st.SearchStrategy[Any]:
    more = st.sampled_from([slice(None), 1, None, ..., [0, 1], slice(0, 2), torch.tensor([1, 0])])
    several = st.tuples(rows_of(count), more) | st.tuples(rows_of(count), more, more)
    return rows_of(count) | several


@given(data=st.data())
def test_indexing_is_that_of_an_ordinary_tensor(pairs: list[Pair], data: st.DataObject) -> None:
    lazy, eager = data.draw(st.sampled_from(pairs))
    index = data.draw(indices(len(eager)))
    assert outcome(lambda: lazy[index]) == outcome(lambda: eager[index])


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "to a dtype": lambda x: x.to(torch.float16),
    "to a dtype by name": lambda x: x.to(dtype=torch.bfloat16),
    "to its own dtype": lambda x: x.to(x.dtype),
    "to a device": lambda x: x.to("cpu"),
    "to device and dtype": lambda x: x.to("cpu", torch.float32),
    "to another tensor": lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    "copied": lambda x: x.to(torch.float32, copy=True),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "shape": lambda x: (x.shape, x.size(0), x.dim(), len(x), x.numel(), x.stride(), x.nbytes),
    "dtype": lambda x: (x.dtype, x.device, x.layout, x.is_floating_point(), x.requires_grad),
    "the first": lambda x: x[:1].repeat(3, 1, 1, 1),
    "repeat": lambda x: x.repeat(2, 1, 1, 1),
    "rows": lambda x: torch.stack([x[i] for i in range(len(x))]),
    "iteration": lambda x: [each[None][...] for each in x],
    "cat": lambda x: torch.cat([x, x[:1], x], dim=0),
    "new axis": lambda x: x[None],
    "sum": lambda x: x.sum(),
    "arithmetic": lambda x: (1 - x) * x + x,
    "comparison": lambda x: x == x[:1],
    "like": lambda x: torch.zeros_like(x),  # noqa: PLW0108 - torch is not there yet
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.to(torch.float32).numpy().tobytes(),
    "movedim": lambda x: x.movedim(1, -1),
    "expand": lambda x: x[:1].expand(4, -1, -1, -1),
    "of nothing": lambda x: x[[]].to(torch.float32).sum(),
    "bits": lambda x: x.view(torch.uint8),
    "no grad": lambda x: torch.no_grad()(lambda: x.to(torch.float32) * 2)(),
    "inference": lambda x: torch.inference_mode()(lambda: x[:1] * 2)(),
    "in place of a clone": lambda x: x.clone().mul_(2),
    "set in a clone": lambda x: _changed(x.clone()),
    "out": lambda x: torch.add(x, 1, out=x.clone()),
    "copied into": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x),
    "a new tensor": lambda x: torch.as_tensor(x) + 0,
}


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0] = 7
    tensor += 1
    return tensor


@given(
    data=st.data(),
    casts=st.lists(st.sampled_from(DTYPES), max_size=3),
    name=st.sampled_from(list(OPERATIONS)),
)
def test_operations_are_those_of_an_ordinary_tensor(
    pairs: list[Pair], data: st.DataObject, casts: list[str], name: str
) -> None:
    lazy, eager = data.draw(st.sampled_from(pairs))
    one: torch.Tensor = lazy
    for each in casts:
        dtype = getattr(torch, each)
        one, eager = one.to(dtype), eager.to(dtype)
    assert type(one) is comfyui.LazyTensor
    act = OPERATIONS[name]
    assert outcome(lambda: act(one)) == outcome(lambda: act(eager))
    assert outcome(lambda: one) == outcome(lambda: eager)


def test_what_it_is_and_another_dtype_need_no_file(tmp_path: Path) -> None:
    lazy = lazy_of(tmp_path, latents(2, 1, 3))
    shutil.rmtree(tmp_path / "smartcache")
    other = lazy.to(torch.bfloat16).clone().detach().contiguous()
    assert type(other) is comfyui.LazyTensor
    assert (len(other), other.shape[1:], other.dtype) == (6, (2, 3, 4), torch.bfloat16)
    assert repr(other) == "<LazyTensor bfloat16 [6, 2, 3, 4]>"
    assert hash(other) != hash(lazy)
    with pytest.raises(ArtifactError, match="was removed"):
        other.sum()


def damage(output: Path, tensor: torch.Tensor) -> None:
    """Change one byte of a stored tensor."""
    data = tensor.contiguous().numpy().tobytes()
    (pack,) = (path for path in output.rglob("*.pack") if data in path.read_bytes())
    whole = bytearray(pack.read_bytes())
    whole[whole.index(data) + 5] ^= 1
    pack.write_bytes(whole)


def test_rows_are_read_without_the_others(tmp_path: Path) -> None:
    eager = latents(*[1] * 6)
    lazy = lazy_of(tmp_path, eager)
    damage(tmp_path, eager[3])
    assert torch.equal(lazy[[5, 0]], torch.cat([eager[5], eager[0]]))
    assert torch.equal(lazy[:3], torch.cat(eager[:3]))
    with pytest.raises(DatasetError, match="damaged"):
        _ = lazy[[2, 3]]
    with pytest.raises(DatasetError, match="damaged"):
        lazy.sum()


def test_damage_is_mended_by_saving_again(tmp_path: Path) -> None:
    eager = latents(*[1] * 3)
    lazy_of(tmp_path, eager)
    damage(tmp_path, eager[1])
    assert torch.equal(lazy_of(tmp_path, eager), torch.cat(eager))


def test_a_sample_that_is_gone_is_said(tmp_path: Path) -> None:
    eager = latents(1, 1)
    lazy = lazy_of(tmp_path, eager)
    lazy_of(tmp_path, eager[:1])
    assert torch.equal(lazy[0], eager[0][0])
    with pytest.raises(DatasetChangedError, match="saved again") as caught:
        _ = lazy[1]
    assert caught.value.hint == "Load the dataset again."


def test_it_is_pickled_with_its_values(tmp_path: Path) -> None:
    eager = latents(2, 1)
    lazy = lazy_of(tmp_path, eager)
    file = io.BytesIO()
    torch.save([lazy], file)
    file.seek(0)
    pickled = pickle.dumps(lazy)
    copied = copy.deepcopy(lazy)
    shutil.rmtree(tmp_path / "smartcache")
    for found in (torch.load(file, weights_only=True)[0], pickle.loads(pickled), copied):  # noqa: S301
        assert type(found) is torch.Tensor
        assert torch.equal(found, torch.cat(eager))


def test_who_writes_to_it_gets_memory_of_its_own(tmp_path: Path) -> None:
    eager = torch.cat(latents(2, 1))
    lazy = lazy_of(tmp_path, [eager])
    same = lazy
    lazy *= 3  # type: ignore[misc]
    assert lazy is same
    lazy[0] = 1
    eager = eager * 3
    eager[0] = 1
    assert torch.equal(lazy, eager)
    assert torch.equal(lazy.to(torch.float16), eager.half())
    again = comfyui.load(tmp_path, "lazy", buckets=True)[0][0]["samples"]
    assert not torch.equal(again, eager)


def test_gradients_flow_to_it(tmp_path: Path) -> None:
    eager = torch.cat(latents(2, 1))
    lazy = lazy_of(tmp_path, [eager])
    weight = torch.ones(4, requires_grad=True)
    (lazy * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert torch.allclose(weight.grad, eager.sum((0, 1, 2)))
    lazy.requires_grad_(True)
    (lazy * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert lazy.requires_grad
    assert lazy.grad is not None
    assert torch.equal(lazy.grad, torch.full_like(eager, 2))


def test_rows_read_outside_of_inference_mode_can_be_trained_on(tmp_path: Path) -> None:
    eager = torch.cat(latents(2, 1))
    with torch.inference_mode():
        lazy = lazy_of(tmp_path, [eager]).to(torch.float64)
    rows = lazy[[1]]
    assert not rows.is_inference()
    rows.requires_grad_(True)
    (rows * rows).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
