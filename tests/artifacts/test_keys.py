"""Keys: equal configs have equal keys, unequal ones do not, and stored keys are read back."""

from __future__ import annotations

import enum
import random
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache import errors
from smartcache.artifacts import compute_key, register_key_rule
from smartcache.artifacts.keys import check_key, key_text
from tests.artifacts.exact import exactly
from tests.artifacts.strategies import configs, texts, values


@given(configs, configs)
def test_keys_are_equal_exactly_if_configs_are(one: object, other: object) -> None:
    is_same = exactly(one, ordered=False) == exactly(other, ordered=False)
    assert (compute_key(one) == compute_key(other)) is is_same


@given(values, st.randoms(use_true_random=False))
def test_the_order_of_dicts_does_not_count(value: object, shuffling: random.Random) -> None:
    assert compute_key(_shuffled(value, shuffling)) == compute_key(value)


def _shuffled(value: object, shuffling: random.Random) -> object:
    if type(value) is dict:
        items = [(key, _shuffled(item, shuffling)) for key, item in value.items()]
        shuffling.shuffle(items)
        return dict(items)
    if type(value) in (list, tuple):
        return type(value)(_shuffled(item, shuffling) for item in value)  # type: ignore[attr-defined, call-arg]
    return value


@given(st.lists(values, min_size=2, max_size=2))
def test_arrays_and_scalars_of_all_kinds_have_keys_of_their_own(pair: list[object]) -> None:
    one, other = pair
    is_same = exactly(one, ordered=False) == exactly(other, ordered=False)
    assert (compute_key(one) == compute_key(other)) is is_same


def test_types_count() -> None:
    import torch

    floats = np.ones(2, np.float32)
    different: list[object] = [
        1, 1.0, True, "1", b"1", bytearray(b"1"), (1,), [1], {1}, frozenset({1}), {1: 1}, {"1": 1},
        None, "", b"", [], (), {}, set(), 1 + 0j, 0.0, -0.0, 0, False, [[1], 2], [1, [2]], [1, 2],
        ["ab", "c"], ["a", "bc"], {"a": {"b": 1}}, {"a": ["b", 1]}, Path("1"), np.float32(1),
        np.float64(1), np.int64(1), np.str_("1"), np.bytes_(b"1"), floats, floats.reshape(1, 2),
        floats.astype(">f4"), floats.view(np.int32), torch.ones(2), torch.ones(2, dtype=torch.int),
        torch.float16, torch.device("cpu"), torch.Size([1]), float("nan"), float("inf"),
    ]  # fmt: skip
    assert len({compute_key(each) for each in different}) == len(different)


def test_a_nan_equals_itself_by_its_bits() -> None:
    other = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    assert compute_key(float("nan")) == compute_key(float("nan"))
    assert compute_key(float("nan")) != compute_key(other)


def test_how_an_array_lies_in_memory_does_not_count() -> None:
    import torch

    array = np.arange(12).reshape(3, 4)
    assert compute_key(np.asfortranarray(array)) == compute_key(array)
    tensor = torch.randn(4, 4, dtype=torch.complex64)
    assert compute_key(tensor.conj()) == compute_key(tensor.conj().resolve_conj())
    assert compute_key(tensor.requires_grad_()) == compute_key(tensor.detach())


def test_paths_count_by_their_text_on_every_system() -> None:
    assert compute_key(Path("a/b")) == compute_key(PurePosixPath("a/b"))
    assert compute_key(PureWindowsPath("a\\b")) == compute_key(PurePosixPath("a/b"))
    assert compute_key(Path("a/b")) != compute_key("a/b")


def test_keys_stay_the_same_from_release_to_release() -> None:
    """Changing these numbers makes every artifact of every user be computed again."""
    config = {
        "size": 1024,
        "flip": False,
        "crop": (0, 0, 1.5, None),
        "tags": ["a", b"b", {1, 2}],
        "path": Path("x/y"),
        "array": np.arange(3, dtype="<i4"),
        "scale": np.float32(0.5),
    }
    expected = "b17ad73b2b404d5c25d6a2160c9b16ca96ee8956ea9c2f2a63bf49de61e453a4"
    assert compute_key(config, content=b"bytes") == expected


def test_keys_do_not_depend_on_the_process() -> None:
    """Sets of texts are in another order in each process."""
    code = (
        "from smartcache.artifacts.keys import compute_key;"
        "print(compute_key({'a': {'x', 'y', 'z', 1, None}, 'b': frozenset('hello')}))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in "123"
    ]
    assert len(set(runs)) == 1


def test_a_key_is_64_hexadecimal_characters_behind_its_prefix() -> None:
    key = compute_key({"a": 1})
    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")
    assert compute_key({"a": 1}, prefix="sdxl") == f"sdxl-{key}"
    with pytest.raises(errors.BadKeyError):
        compute_key({"a": 1}, prefix="x" * 960)
    assert check_key(compute_key({}, prefix="x" * 959))


def test_content_counts_by_its_bytes(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "image.png"
    path.write_bytes(b"pixels" * 100_000)
    data = path.read_bytes()
    key = compute_key({}, content=path)
    assert key == compute_key({}, content=data)
    assert key == compute_key({}, content=memoryview(bytearray(data)))
    moved = path.rename(tmp_path / "moved.png")
    assert key == compute_key({}, content=moved)
    different = [
        None, b"", data[1:], [data], [data, data], [data, b""], (), np.frombuffer(data, "u1"),
        torch.frombuffer(bytearray(data), dtype=torch.uint8), [np.zeros(3)], np.zeros(3),
    ]  # fmt: skip
    keys = {compute_key({}, content=each) for each in different}
    assert len(keys | {key}) == len(different) + 1
    assert compute_key({"a": 1}, content=data) != key


def test_bytes_that_do_not_lie_in_a_row_are_content_too() -> None:
    assert compute_key({}, content=memoryview(b"axbxcx")[::2]) == compute_key({}, content=b"abc")


def test_a_file_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        compute_key({}, content=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "path"), [("text", "content"), (5, "content"), ([b"", "x"], "content[1]")]
)
def test_a_text_is_no_content(content: object, path: str) -> None:
    """It could be meant as a path, or as the text itself."""
    with pytest.raises(errors.BadKeyError, match="cannot be content") as caught:
        compute_key({}, content=content)
    assert vars(caught.value)["path"] == path


class _Colour(enum.Enum):
    RED = 1


@dataclass
class _Settings:
    size: int


@dataclass
class _Others:
    size: int


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"a": [0, _Settings(1)]}, "a[1]"),
        ({"a": {"b c": _Colour.RED}}, 'a["b c"]'),
        ({"a": {_Colour.RED: 1}}, "a"),
        ({"a": {(1, _Colour.RED): 1}}, "a"),
        ({"a": {_Colour.RED}}, "a[<_Colour.RED: 1>]"),
        (print, ""),
        (np.array([object()]), ""),
    ],
)
def test_what_no_key_can_be_made_of_is_named_by_its_path(config: object, path: str) -> None:
    with pytest.raises(errors.BadKeyError) as caught:
        compute_key(config)
    assert vars(caught.value)["path"] == path


def test_tensors_that_no_key_can_be_made_of_are_named_by_their_path() -> None:
    import torch

    for tensor in (torch.zeros(2, 2).to_sparse(), torch.nn.Parameter(torch.zeros(1))):
        with pytest.raises(errors.BadKeyError) as caught:
            compute_key([tensor])
        assert vars(caught.value)["path"] == "[0]"


def test_a_config_that_contains_itself_is_refused() -> None:
    config: list[object] = []
    config.append({"again": config})
    with pytest.raises(errors.BadKeyError, match=r"\[0\].again: contains itself"):
        compute_key(config)


def test_objects_have_keys_by_the_rule_of_their_type() -> None:
    register_key_rule(_Settings, lambda each: {"size": each.size})
    register_key_rule(_Others, lambda each: {"size": each.size})
    assert compute_key(_Settings(1)) == compute_key(_Settings(1))
    others: list[object] = [_Settings(2), _Others(1), {"size": 1}]
    assert compute_key(_Settings(1)) not in {compute_key(each) for each in others}
    register_key_rule(_Settings, lambda each: [each.size], name="settings")
    register_key_rule(_Others, lambda each: [each.size], name="settings")
    assert compute_key(_Settings(1)) == compute_key(_Others(1))


def test_builtin_types_take_no_rule() -> None:
    with pytest.raises(errors.BadKeyError, match="needs no rule"):
        register_key_rule(dict, list)


def test_a_rule_that_gives_its_own_type_again_is_refused() -> None:
    register_key_rule(_Others, lambda each: each)
    with pytest.raises(errors.BadKeyError):
        compute_key(_Others(1))


@given(st.text(st.characters(exclude_categories=()), min_size=1, max_size=200) | texts)
def test_a_stored_key_is_read_back(key: str) -> None:
    if key:
        assert key_text(check_key(key)) == key


@given(st.binary(min_size=32, max_size=32))
def test_computed_keys_take_33_bytes(raw: bytes) -> None:
    assert check_key(raw.hex()) == b"\x01" + raw
    assert key_text(b"\x01" + raw) == raw.hex()


def test_keys_that_only_look_computed_are_texts() -> None:
    for key in ("AB" * 32, "g" * 64, "ab " * 21 + "a", "ab" * 31 + "a ", "\u0661" * 64):
        assert check_key(key)[:1] == b"\x02"
        assert key_text(check_key(key)) == key


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513, b"key", 7, None, ("a",)])
def test_what_is_no_key_is_refused(key: object) -> None:
    with pytest.raises(errors.BadKeyError):
        check_key(key)


@given(st.binary(max_size=40))
def test_no_bytes_but_stored_keys_are_read_as_keys(stored: bytes) -> None:
    try:
        text = key_text(stored)
    except errors.BadKeyError:
        return
    # A text that was stored as one although it looks computed: no put ever does that.
    assert check_key(text) == stored or len(text) == 64
