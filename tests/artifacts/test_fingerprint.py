"""Fingerprints: any change is another set, JSON keeps them exactly, differences are shown."""

from __future__ import annotations

import json
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api import ABSENT, Difference, Fingerprint, errors
from tests.artifacts.exact import exactly
from tests.artifacts.strategies import configs, texts

mappings = st.dictionaries(
    st.sampled_from(["vae", "dtype", "size", "a b", 1, None, (1, b"x")]), configs, max_size=4
).filter(lambda mapping: "complex" not in repr(exactly(mapping)))


def base() -> dict[str, object]:
    import torch

    return {"vae": "abc", "dtype": torch.float16, "size": 1024, "crop": {"w": [1, 2], "h": None}}


@given(mappings, mappings)
def test_any_other_value_or_type_is_another_set(
    one: dict[object, object], other: dict[object, object]
) -> None:
    mine, theirs = Fingerprint.of(one), Fingerprint.of(other)
    is_same = exactly(one, ordered=False) == exactly(other, ordered=False)
    assert (mine == theirs) is is_same
    assert (mine.id("set") == theirs.id("set")) is is_same
    assert (not mine.differences(theirs)) is is_same
    if is_same:
        assert hash(mine) == hash(theirs)


@given(mappings)
def test_json_keeps_a_fingerprint_exactly(mapping: dict[object, object]) -> None:
    mine = Fingerprint.of(mapping)
    text = json.dumps(mine.to_json(), allow_nan=False)
    back = Fingerprint.from_json(json.loads(text))
    assert back == mine == Fingerprint.from_json(text)
    assert back.id("x") == mine.id("x")
    assert exactly(back.values) == exactly(mine.values) == exactly(mapping)


@given(mappings, texts, texts)
def test_the_name_is_part_of_the_id(mapping: dict[object, object], one: str, other: str) -> None:
    mine = Fingerprint.of(mapping)
    assert (mine.id(one) == mine.id(other)) is (one == other)


def test_an_id_stays_the_same_from_release_to_release() -> None:
    """Another id makes every artifact of every user be computed again."""
    assert Fingerprint.of(base()).id("sdxl-latents") == "0147b713bf985321e4acb7b94edb657b"


def test_an_id_is_32_hexadecimal_characters() -> None:
    found = Fingerprint.of({}).id("x")
    assert len(found) == 32
    assert set(found) <= set("0123456789abcdef")


def test_the_order_of_dicts_does_not_count() -> None:
    assert Fingerprint.of({"a": 1, "b": {"c": 2, "d": 3}}) == Fingerprint.of(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )


def test_a_torch_dtype_counts_as_its_name() -> None:
    import torch

    assert Fingerprint.of({"d": torch.bfloat16}) == Fingerprint.of({"d": "torch.bfloat16"})


def test_a_fingerprint_does_not_change_with_what_it_was_made_of() -> None:
    crop = [1, 2]
    mine = Fingerprint.of(MappingProxyType({"crop": crop}))
    before = mine.id("x")
    crop.append(3)
    mine.values["crop"] = None
    assert (mine.id("x"), mine.values) == (before, {"crop": [1, 2]})


def test_differences_name_the_path_and_both_sides() -> None:
    other = {"vae": "abd", "dtype": "float16", "crop": {"w": [1, 3], "h": None, "x": 1}, "new": 0}
    found = Fingerprint.of(base()).differences(Fingerprint.of(other))
    assert sorted(found, key=lambda each: each.path) == [
        Difference("crop.w[1]", 2, 3),
        Difference("crop.x", ABSENT, 1),
        Difference("dtype", "torch.float16", "float16"),
        Difference("new", ABSENT, 0),
        Difference("size", 1024, ABSENT),
        Difference("vae", "abc", "abd"),
    ]
    assert str(found[0]) == 'vae: "abc" / "abd"'


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ([1], [1, 2]), ("a", b"a"), ({}, [])],
)
def test_types_are_differences(mine: object, theirs: object) -> None:
    one, other = Fingerprint.of({"x": mine}), Fingerprint.of({"x": theirs})
    assert one != other
    assert [each.path for each in one.differences(other)] == ["x"]


def test_keys_of_another_type_are_differences() -> None:
    found = Fingerprint.of({1: 0}).differences(Fingerprint.of({True: 0}))
    assert [(each.path, each.mine, each.theirs) for each in found] == [
        ("[1]", 0, ABSENT),
        ("[True]", ABSENT, 0),
    ]


def test_it_reads_well() -> None:
    assert str(Fingerprint.of({"size": 1024, "a b": 1.5, "vae": "abc"})) == (
        'size=1024, ["a b"]=1.5, vae="abc"'
    )
    assert repr(Fingerprint.of({"a": 1})) == "Fingerprint({'a': 1})"
    assert len(str(Fingerprint.of({"x": "y" * 500, "z": 1 << 100_000}))) < 150


def test_it_equals_nothing_but_a_fingerprint() -> None:
    assert Fingerprint.of({"a": 1}) != {"a": 1}


@pytest.mark.parametrize(
    ("mapping", "path"),
    [
        ({"a": [object()]}, "a[0]"),
        ({"a": {"b": np.float32(1)}}, "a.b"),
        ({"a": {1, 2}}, "a"),
        ({"a": {frozenset(): 1}}, "a"),
        ({"a": 1j}, "a"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_path(mapping: dict[str, object], path: str) -> None:
    with pytest.raises(errors.UnsupportedValueError) as caught:
        Fingerprint.of(mapping)
    assert caught.value.path == path


def test_a_tensor_is_refused_by_its_path() -> None:
    import torch

    with pytest.raises(errors.UnsupportedValueError) as caught:
        Fingerprint.of({"a": torch.zeros(1)})
    assert caught.value.path == "a"


def test_a_fingerprint_that_contains_itself_is_refused() -> None:
    mapping: dict[str, object] = {}
    mapping["again"] = [mapping]
    with pytest.raises(errors.UnsupportedValueError, match="contains itself"):
        Fingerprint.of(mapping)


def test_fingerprints_nested_a_hundred_deep_are_kept() -> None:
    value: object = (1,)
    for number in range(98):
        value = {"x": value} if number % 2 else (value,)
    mine = Fingerprint.of({"x": value})
    assert Fingerprint.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    with pytest.raises(errors.UnsupportedValueError, match="deep"):
        Fingerprint.of({"x": [value]})


@pytest.mark.parametrize(
    "data",
    [
        None, 1, "", "{", "[]", "nonsense", [], {}, {"dict": 1}, {"dict": [], "tuple": []},
        {"dict": [1]}, {"dict": [["a"]]}, {"dict": [["a", 1], ["a", 2]]}, {"dict": [[[], 1]]},
        {"dict": [["a", {"float": "00"}]]}, {"dict": [["a", {"float": "zz"}]]},
        {"dict": [["a", {"bytes": "0"}]]}, {"dict": [["a", {"int": "__import__"}]]},
        {"dict": [["a", {"object": []}]]}, {"dict": [["a", {}]]}, {"tuple": []},
        "[" * 100_000, '{"tuple":[' * 50_000, {"dict": [["a", object()]]},
    ],
)  # fmt: skip
def test_json_that_is_no_fingerprint_is_refused(data: object) -> None:
    with pytest.raises(errors.SetFormatError):
        Fingerprint.from_json(data)
