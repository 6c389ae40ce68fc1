"""Models in keys: by class, config and weights; what is remembered holds until they change."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from smartcache import errors
from smartcache.artifacts import compute_key, register_key_rule, remember_module
from tests.processes.children import Child
from tests.store.files import row

if TYPE_CHECKING:
    import torch

Change = Callable[[Any], object]
LARGE = 9 << 20
"""Bytes of a tensor that several threads hash."""


def make(seed: int = 0) -> Any:  # noqa: ANN401 - parts of a Sequential have no class of their own
    """A model whose tensors are larger than the sample, with buffers."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Conv2d(16, 32, 3), torch.nn.BatchNorm2d(1000), torch.nn.Linear(100, 100)
        ).eval()


def configured(config: object) -> torch.nn.Module:
    module = make()
    module.config = config
    return cast("torch.nn.Module", module)


def holding(*tensors: torch.Tensor) -> torch.nn.Module:
    import torch

    module = torch.nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_buffer(f"part{number}", tensor)
    return module


def key_of_value(value: object) -> str:
    """The key of any module for which this value stands."""
    import torch

    module = torch.nn.ReLU()
    remember_module(module, value)
    return compute_key(module)


@contextmanager
def converting_by(name: str) -> Iterator[None]:
    """How modules are moved: in place, by swapping parameters or by new ones."""
    import torch

    set_it = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
    set_it(True)
    try:
        yield
    finally:
        set_it(False)


class TestWhatCounts:
    def test_equal_models_have_equal_keys(self) -> None:
        assert compute_key({"vae": make(), "size": 1}) == compute_key({"size": 1, "vae": make()})
        assert compute_key(make()) == compute_key(copy.deepcopy(make()))

    def test_class_names_shapes_dtypes_and_values_count(self) -> None:
        import torch

        class Own(torch.nn.Linear):
            pass

        def linear(kind: type[torch.nn.Linear], *, bias: bool = False) -> torch.nn.Module:
            made = kind(4, 4, bias=bias)
            torch.nn.init.ones_(made.weight)
            return made

        named = torch.nn.Linear(4, 4, bias=False)
        named.other, named.weight = named.weight, None  # type: ignore[assignment]
        torch.nn.init.ones_(named.other)
        flat = torch.nn.Linear(4, 4, bias=False)
        flat.weight = torch.nn.Parameter(torch.ones(2, 8))
        different: list[object] = [
            linear(torch.nn.Linear), linear(Own), linear(torch.nn.Linear, bias=True), named, flat,
            linear(torch.nn.Linear).half(), linear(torch.nn.Linear).bfloat16(), make(), make(1),
            torch.nn.ReLU(), torch.nn.GELU(), dict(linear(torch.nn.Linear).state_dict()),
        ]  # fmt: skip
        assert len({compute_key(each) for each in different}) == len(different)

    def test_the_key_stays_the_same_from_release_to_release(self) -> None:
        import torch

        module = torch.nn.Linear(40, 30)
        module.weight.data = torch.arange(1200.0).view(30, 40)
        module.bias.data = torch.arange(30.0)
        expected = "8fb4e72fa99f33340bb547d200f337bb741109da3f96f07f54540db29af8f9f5"
        assert compute_key({"encoder": module}) == expected

    def test_training_gradients_and_buffers_that_are_not_saved_do_not_count(self) -> None:
        import torch

        module = make().train().requires_grad_(False)
        module.register_buffer("cached", torch.ones(3), persistent=False)
        assert compute_key(module) == compute_key(make())

    def test_how_weights_lie_in_memory_does_not_count(self) -> None:
        import torch

        module = make().to(memory_format=torch.channels_last)
        assert not module[0].weight.is_contiguous()
        assert compute_key(module) == compute_key(make())
        whole = torch.arange(40_000.0).view(200, 200)
        assert compute_key(holding(whole.T)) == compute_key(holding(whole.T.contiguous()))
        assert compute_key(holding(whole[::3])) == compute_key(holding(whole[::3].clone()))

    @pytest.mark.cuda
    def test_the_device_does_not_count(self) -> None:
        here, there = make().bfloat16(), make().bfloat16().cuda()
        assert compute_key(here) == compute_key(there)
        remember_module(here, "value")
        for device in ("cuda", "cpu"):
            assert compute_key(here.to(device)) == key_of_value("value")

    def test_weights_of_every_dtype_count_by_their_bits(self) -> None:
        import torch

        bits = torch.arange(1000).remainder(2)
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8"):
            with row(name):
                dtype = getattr(torch, name)
                numbers = bits.to(dtype)
                key = compute_key(holding(numbers))
                assert key == compute_key(holding(numbers.clone()))
                assert key != compute_key(holding((1 - bits).to(dtype)))
                is_same = key == compute_key(holding(numbers.view(torch.uint8)))
                assert is_same is (name == "uint8")

    def test_entries_that_quantised_layers_add_count(self) -> None:
        """As bitsandbytes does it: scales and a description, made anew for each state_dict."""
        import torch

        class Quantised(torch.nn.Module):
            def __init__(self, scale: float) -> None:
                super().__init__()
                self.register_buffer("weight", torch.zeros(500, dtype=torch.uint8))
                self.scale = scale

            def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ANN401
                super()._save_to_state_dict(destination, prefix, keep_vars)
                destination[f"{prefix}weight.absmax"] = torch.zeros(8).fill_(self.scale)

        module = Quantised(1)
        key = compute_key(module)
        assert compute_key(module) == compute_key(Quantised(1)) == key
        assert compute_key(Quantised(2)) != key
        remember_module(module, "value")
        assert compute_key(module) == key_of_value("value")

    @pytest.mark.timeout(60)
    def test_large_weights_can_be_hashed_after_a_fork(self) -> None:
        """The threads of blake3.AUTO would be missing there, and waited for."""
        import torch

        module, again = (holding(torch.ones(LARGE, dtype=torch.uint8)) for _ in range(2))
        key = compute_key(module)
        with Child(lambda: compute_key(again)) as child:
            assert child.result() == key

    def test_the_rule_of_a_class_comes_first(self) -> None:
        import torch

        class Ruled(torch.nn.Linear):
            pass

        register_key_rule(Ruled, lambda each: each.in_features)
        assert compute_key(Ruled(3, 4)) == compute_key(Ruled(3, 5))


class TestConfig:
    def test_it_counts(self) -> None:
        class Settings:
            def __init__(self, **values: object) -> None:
                self.values = values

            def to_dict(self) -> dict[str, object]:
                return self.values

        configs: list[object] = [
            None, {"size": 1}, {"size": 2}, {"size": 1.0}, {"sizes": [1]}, {"more": {"size": 1}},
        ]  # fmt: skip
        keys = [compute_key(configured(config)) for config in configs]
        assert len(set(keys)) == len(configs)
        assert compute_key(configured(Settings(size=1))) == keys[1]
        assert compute_key(configured("no settings")) == keys[0] == compute_key(make())

    def test_where_a_model_came_from_does_not_count(self) -> None:
        config = {"size": 1, "text": {"model_type": "clip"}}
        origin = {"_name_or_path": "/x", "_commit_hash": "0", "_diffusers_version": "1"}
        nested = {"model_type": "clip", "dtype": "bfloat16", "transformers_version": "5"}
        there = {**config, **origin, "text": nested}
        assert compute_key(configured(there)) == compute_key(configured(config))

    def test_it_counts_as_it_is_after_saving_and_loading(self) -> None:
        made, loaded = {"labels": {0: "a"}, "sizes": (1,)}, {"labels": {"0": "a"}, "sizes": [1]}
        assert compute_key(configured(made)) == compute_key(configured(loaded))

    def test_a_dtype_of_your_own_config_counts(self) -> None:
        assert compute_key(configured({"dtype": "a"})) != compute_key(configured({"dtype": "b"}))

    def test_what_has_no_key_counts_by_its_repr_if_that_is_stable(self) -> None:
        def of(value: object) -> str:
            return compute_key(configured({"value": value}))

        assert of(re.compile("a")) != of(re.compile("b"))
        assert of(re.compile("a")) == of(re.compile("a"))
        assert of(object()) == of(object()) == of([object()][0])
        assert of([object(), 1]) != of([object(), 2])

    def test_one_that_contains_itself_or_its_model_has_a_key(self) -> None:
        config: dict[str, object] = {"size": 1}
        module = configured(config)
        config.update(itself=config, module=module)
        assert compute_key(module) == compute_key(module)


class TestRefused:
    def test_weights_that_are_not_in_memory(self) -> None:
        import torch

        module = make()
        remember_module(module, "value")
        for each in (module.to("meta"), torch.nn.LazyLinear(3)):
            with pytest.raises(errors.BadKeyError, match="weights are not in memory") as caught:
                compute_key({"encoders": [each]})
            assert vars(caught.value)["path"] == "encoders[0]"
            assert "load_encoders" in str(caught.value.hint)
        remember_module(module, "value")

    def test_tensors_that_are_no_plain_memory(self) -> None:
        import torch

        class Wrapper(torch.Tensor):
            """Has no memory of its own, as the quantised tensors of torchao."""

            @classmethod
            def __torch_dispatch__(cls, func: Any, *_: object) -> object:  # noqa: ANN401
                if func is torch.ops.aten.detach.default:
                    return wrapper()
                raise NotImplementedError(func)

        def wrapper() -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(Wrapper, (500,))  # noqa: SLF001

        for tensor in (torch.eye(30).to_sparse(), wrapper()):
            module = holding(torch.ones(1), tensor)
            remember_module(module, "value")
            with pytest.raises(errors.BadKeyError) as caught:
                compute_key({"vae": module})
            assert vars(caught.value)["path"] == "vae.part1"

    def test_a_state_that_no_key_can_be_made_of(self) -> None:
        module = stateful({"hooks": [print]})
        remember_module(module, "value")
        with pytest.raises(errors.BadKeyError) as caught:
            compute_key({"vae": module})
        assert vars(caught.value)["path"] == 'vae["inner._extra_state"].hooks[0]'

    def test_a_model_is_no_content(self) -> None:
        with pytest.raises(errors.BadKeyError, match="cannot be content"):
            compute_key({}, content=make())


def stateful(state: object) -> Any:  # noqa: ANN401
    """A model with a part that keeps more than tensors."""
    import torch

    class Stateful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = state

        def get_extra_state(self) -> object:
            return self.state

    module = torch.nn.Module()
    module.inner = Stateful()
    return module


def element(model: torch.nn.Module, name: str) -> torch.Tensor:
    """One element of a tensor that is not in the sample."""
    tensor: torch.Tensor = model.state_dict(keep_vars=True)[name]
    return tensor.view(-1)[40]


def replace_weight(model: Any) -> None:  # noqa: ANN401
    import torch

    model[2].weight = torch.nn.Parameter(model[2].weight.clone())


def assign(model: Any) -> None:  # noqa: ANN401
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def move_by(name: str) -> Change:
    def move(model: Any) -> None:  # noqa: ANN401
        with converting_by(name):
            model._apply(lambda each: each.clone())  # noqa: SLF001

    return move


def set_data(model: Any) -> None:  # noqa: ANN401
    model[2].weight.data = model[2].weight.data.clone()


def use(model: Any) -> None:  # noqa: ANN401
    import torch

    model[2](torch.ones(1, 100)).sum().backward()
    model[1](torch.ones(1, 1000, 1, 1))


STAYING: dict[str, Change] = {
    "nothing": lambda _: None,
    "to where it is": lambda model: model.to("cpu"),
    "moved": lambda model: model._apply(lambda each: each.clone()),  # noqa: SLF001 - what `to` does
    "moved by swapping": move_by("swap"),
    "moved into new parameters": move_by("overwrite"),
    "a part moved": lambda model: model[1]._apply(lambda each: each.clone()),  # noqa: SLF001
    "moved to shared memory": lambda model: model.share_memory(),
    "another memory format": lambda model: model[0].to(memory_format=channels_last()),
    "equal data": set_data,
    "an equal parameter": replace_weight,
    "equal weights assigned": assign,
    "training mode": lambda model: model.train(),
    "frozen": lambda model: model.requires_grad_(False),
    "used": use,
}


def channels_last() -> torch.memory_format:
    import torch

    return torch.channels_last


def write_one(name: str) -> Change:
    def write(model: Any) -> None:  # noqa: ANN401
        import torch

        with torch.no_grad():
            element(model, name).add_(1)

    return write


def merge_lora(model: Any) -> None:  # noqa: ANN401
    """As peft does it."""
    import torch

    weight = model[2].weight
    weight.data += torch.full((100, 2), 0.01) @ torch.full((2, 100), 0.01)


def merge_into_a_part(model: Any) -> None:  # noqa: ANN401
    """As into one of q, k and v in a joint projection."""
    model[2].weight.data[34:66] += 0.01


def step(make_optimizer: Callable[[Any, Any], torch.optim.Optimizer]) -> Change:
    def run(model: Any) -> None:  # noqa: ANN401
        import torch

        model[2](torch.ones(1, 100)).sum().backward()
        make_optimizer(torch.optim, model[2].parameters()).step()

    return run


def train_norm(model: Any) -> None:  # noqa: ANN401
    import torch

    model.train()[1](torch.ones(2, 1000, 1, 1))


def new_data(model: Any) -> None:  # noqa: ANN401
    model[2].weight.data = model[2].weight.data + 1


def write_with_numpy(model: Any) -> None:  # noqa: ANN401
    model[2].weight.detach().numpy()[:] = 0


def move_and_write(model: Any) -> None:  # noqa: ANN401
    model._apply(lambda each: each.clone())  # noqa: SLF001
    write_one("2.weight")(model)


def set_config(model: Any) -> None:  # noqa: ANN401
    model.config = {"size": 1}


def add_part(model: Any) -> None:  # noqa: ANN401
    import torch

    model.add_module("adapter", torch.nn.BatchNorm1d(1))


CHANGES: dict[str, Change] = {
    "one element": write_one("2.weight"),
    "one element of a buffer": write_one("1.running_mean"),
    "loaded again": lambda model: model.load_state_dict(make(1).state_dict()),
    "others assigned": lambda model: model.load_state_dict(make(1).state_dict(), assign=True),
    "data added to": lambda model: model[2].weight.data.add_(1),
    "new data": new_data,
    "a LoRA merged": merge_lora,
    "merged into a part": merge_into_a_part,
    "SGD": step(lambda optim, weights: optim.SGD(weights, 0.1)),
    "AdamW": step(lambda optim, weights: optim.AdamW(weights, 0.1)),
    "fused AdamW": step(lambda optim, weights: optim.AdamW(weights, 0.1, fused=True)),
    "running statistics": train_norm,
    "numpy": write_with_numpy,
    "moved, then one element": move_and_write,
    "cast": lambda model: model.half(),
    "cast and back": lambda model: model.half().float(),
    "config": set_config,
    "a part more": add_part,
    "a part less": lambda model: model.pop(0),
}


class TestRemembered:
    def test_what_changes_no_value_keeps_it(self) -> None:
        for name, change in STAYING.items():
            with row(name):
                module = make()
                remember_module(module, {"digest": "of its files"})
                for _ in range(2):
                    change(module)
                    assert compute_key(module) == key_of_value({"digest": "of its files"})

    @pytest.mark.parametrize("first", ["remembered", "computed", "remembered and moved"])
    def test_after_a_change_the_weights_count(self, first: str) -> None:
        unchanged = compute_key(make())
        for name, change in CHANGES.items():
            with row(name):
                module, same = make(), make()
                if first == "computed":
                    compute_key(module)
                else:
                    remember_module(module, "value")
                if first == "remembered and moved":
                    module._apply(lambda each: each.clone())  # noqa: SLF001
                    assert compute_key(module) == key_of_value("value")
                change(module)
                change(same)
                assert compute_key(module) == compute_key(same) != unchanged

    def test_another_state_that_is_no_tensor_is_noticed(self) -> None:
        module = stateful({"scale": 1})
        key = compute_key(module)
        assert compute_key(module) == key
        module.inner.state = {"scale": 2}
        assert compute_key(module) not in (key, key_of_value("value"))

    def test_weights_are_not_read_again(self) -> None:
        """Which is why single elements that raise no version are not seen, as documented."""
        module = make()
        key = compute_key(module)
        element(module, "2.weight").data.add_(1)
        assert compute_key(module) == key
        assert compute_key(copy.deepcopy(module)) != key

    def test_models_that_are_made_in_inference_mode_are_looked_at_too(self) -> None:
        import torch

        with torch.inference_mode():
            module = make()
            key = compute_key(module)
            assert compute_key(module) == key
            module[2].weight.add_(1)
            assert compute_key(module) != key
        assert compute_key(module) != key

    def test_no_model_is_kept_alive(self) -> None:
        module = make()
        compute_key(module)
        remember_module(module, "value")
        alive = weakref.ref(module)
        del module
        gc.collect()
        assert alive() is None
