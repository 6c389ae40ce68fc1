"""Fingerprints: any change is another set, JSON keeps them exactly, differences are shown."""

from __future__ import annotations

import json
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache import errors
from smartcache.artifacts import Difference, Fingerprint
from smartcache.artifacts.setfolder import ABSENT
from tests.artifacts.exact import exactly
from tests.artifacts.strategies import texts

_texts = st.text(max_size=8)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts
    | st.sampled_from([0, 1, 0.0, -0.0, 1.0, True, False, "1", "1.0", "true", "null", "", None]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_texts | st.sampled_from(["a", "b"]), inner, max_size=3)
    ),
    max_leaves=6,
)
mappings = st.dictionaries(st.sampled_from(["vae", "dtype", "a b", ""]), _json, max_size=4)


def base() -> dict[str, object]:
    import torch

    return {"vae": "abc", "dtype": torch.float16, "size": 1024, "crop": {"w": [1, 2], "h": None}}


@given(mappings, mappings)
def test_any_other_value_or_type_is_another_set(
    one: dict[str, object], other: dict[str, object]
) -> None:
    mine, theirs = Fingerprint.of(one), Fingerprint.of(other)
    is_same = exactly(one, ordered=False) == exactly(other, ordered=False)
    assert (mine == theirs) is is_same
    assert (mine.id("set") == theirs.id("set")) is is_same
    assert (not mine.differences(theirs)) is is_same
    if is_same:
        assert hash(mine) == hash(theirs)


@given(mappings)
def test_json_keeps_a_fingerprint_exactly(mapping: dict[str, object]) -> None:
    mine = Fingerprint.of(mapping)
    back = Fingerprint.from_json(json.loads(json.dumps(mine.to_json(), allow_nan=False)))
    assert back == mine
    assert back.id("x") == mine.id("x")
    assert exactly(back.values) == exactly(mine.values) == exactly(mapping)


@given(mappings, texts, texts)
def test_the_name_is_part_of_the_id(mapping: dict[str, object], one: str, other: str) -> None:
    mine = Fingerprint.of(mapping)
    assert (mine.id(one) == mine.id(other)) is (one == other)


def test_an_id_stays_the_same_from_release_to_release() -> None:
    """Another id makes every artifact of every user be computed again."""
    assert Fingerprint.of(base()).id("sdxl-latents") == "b0cda22b196bc12eeedbb58ecbf53b06"


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
    mine.to_json()["crop"] = None
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
    [(1, True), (1, 1.0), (0.0, -0.0), ([1], [1, 2]), ("1", 1), ({}, []), (2**70, float(2**70))],
)
def test_types_are_differences(mine: object, theirs: object) -> None:
    one, other = Fingerprint.of({"x": mine}), Fingerprint.of({"x": theirs})
    assert one != other
    assert [each.path for each in one.differences(other)] == ["x"]


def test_it_reads_well() -> None:
    assert str(Fingerprint.of({"size": 1024, "a b": 1.5, "vae": "abc"})) == (
        'size=1024, ["a b"]=1.5, vae="abc"'
    )
    assert repr(Fingerprint.of({"a": 1})) == "Fingerprint({'a': 1})"
    assert len(str(Fingerprint.of({"x": "y" * 500, "z": 1 << 2000}))) < 150


def test_it_equals_nothing_but_a_fingerprint() -> None:
    assert Fingerprint.of({"a": 1}) != {"a": 1}


@pytest.mark.parametrize(
    ("mapping", "path", "hint"),
    [
        ({"a": [object()]}, "a[0]", "plain values"),
        ({"a": {"b": np.float32(1)}}, "a.b", "plain values"),
        ({"a": np.zeros(1)}, "a", "plain values"),
        ({"a": 1j}, "a", "plain values"),
        ({"a": {1, 2}}, "a", "sorted(value)"),
        ({"crop": [(1, 2)]}, "crop[0]", "list(value)"),
        ({"digest": b"x"}, "digest", "value.hex()"),
        ({"a": float("nan")}, "a", '"nan"'),
        ({"a": -float("inf")}, "a", '"-inf"'),
        ({"a": 1 << 100_000}, "a", "hex(value)"),
        ({"a": "\ud800\udc00"}, "a", "ascii"),
        ({"a": {"\ud800": 1}}, 'a["\\ud800"]', "ascii"),
        ({"a": {1: 2}}, "a", "str(key)"),
        ({"a": {np.str_("x"): 2}}, "a", "str(key)"),
        ({None: 2}, "", "str(key)"),
    ],
)
def test_what_json_cannot_keep_is_refused_by_its_path_with_what_to_put_instead(
    mapping: dict[str, object], path: str, hint: str
) -> None:
    with pytest.raises(errors.UnsupportedValueError) as caught:
        Fingerprint.of(mapping)
    assert caught.value.path == path
    assert path in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("other", [None, "vae", 3, [("vae", 1)]])
def test_what_is_no_mapping_is_refused(other: object) -> None:
    with pytest.raises(errors.UnsupportedValueError, match="cannot be a fingerprint"):
        Fingerprint.of(other)  # type: ignore[arg-type]


def test_a_fingerprint_that_contains_itself_is_refused() -> None:
    mapping: dict[str, object] = {}
    mapping["again"] = [mapping]
    with pytest.raises(errors.UnsupportedValueError, match="contains itself"):
        Fingerprint.of(mapping)


def test_fingerprints_nested_a_hundred_deep_are_kept() -> None:
    value: object = [1]
    for number in range(98):
        value = {"x": value} if number % 2 else [value]
    mine = Fingerprint.of({"x": value})
    assert Fingerprint.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    with pytest.raises(errors.UnsupportedValueError, match="deep"):
        Fingerprint.of({"x": [value]})


@pytest.mark.parametrize(
    "data", [None, 1, "", "{", [], "{}", {"a": float("nan")}, {"a": object()}, {1: 2}]
)
def test_json_that_is_no_fingerprint_is_refused(data: object) -> None:
    with pytest.raises(errors.SetFormatError):
        Fingerprint.from_json(data)
