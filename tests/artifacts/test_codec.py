"""Values come back exactly, layouts are shared, and what cannot be kept is refused by its path."""

from __future__ import annotations

import enum
import functools
import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from smartcache import errors
from smartcache.artifacts import TensorSpec, register_codec
from smartcache.artifacts.values.encode import encode
from smartcache.artifacts.values.layout import INLINE_BYTES, Layout, decoders, known_layout
from tests.artifacts.exact import exactly, filler, forget_codecs, round_trip
from tests.artifacts.strategies import values
from tests.store.files import row


@functools.cache
def sample() -> dict[str, object]:
    import torch

    return {
        "latent": torch.randn(4, 16, 16).half(),
        "ids": torch.arange(7),
        "crop": [0, 0, 1024, 1024],
        "caption": "a cat",
        "loss_weight": 1.0,
        "embedding": torch.randn(77, 16).bfloat16(),
    }


@pytest.fixture(autouse=True)
def _no_codecs() -> Iterator[None]:
    """What a test registers ends with it."""
    yield
    forget_codecs()


@given(values)
def test_every_supported_value_comes_back_exactly(value: object) -> None:
    """Also from inline bytes that are a view of something larger."""
    body, inline, tensors = encode(value)
    layout = Layout.parse(body)
    around = memoryview(b"abc" + inline + b"def")[3:-3]
    for data in (inline, around):
        assert exactly(layout.decode(data, filler(layout, tensors))) == exactly(value)


CORNERS: list[object] = [
    # numbers
    float("nan"), struct.unpack("<d", bytes.fromhex("010000000000f47f"))[0], -0.0,
    complex(-0.0, float("nan")), 2**63 - 1, 2**63, -(2**63) - 1, [1 << 100_000], [2**63, 1],
    [True, False], [True, 1], [1, "a"] * 300, list(range(300)), [*range(300), 2**63], [1, 1.0],
    # texts and bytes
    ["", "\ud800", "\udc00", "é" * 300], "\ud800\udc00", "\x00", bytearray(b"abc"), b"x" * 5000,
    # keys
    {1: "int", "1": "str", b"1": "bytes", (1,): "tuple", None: 0, 2.5: 1, 1j: 2}, {True: 1},
    {1.0: 1}, {float("nan"): 1}, {np.int64(3): 1, np.str_("a"): 2},
    {frozenset({1, "a"}): (), (1, (2, "x")): []}, dict.fromkeys(map(str, range(300))),
    # containers
    set(), {1, 2.5, "a", None, (1, 2), frozenset({b"a"})}, frozenset({"a", "b"}), [], (), {},
    [[], [[]], ({},)], None,
    # numpy
    np.str_("a\0"), np.bytes_(b"a\0\0"), np.datetime64("NaT"), np.timedelta64(3),
    np.array(["a", "bcd"]), np.array([b"", b"bcd"]), np.ndarray((2, 3), "<U0"),
]  # fmt: skip


def test_corners_come_back_exactly() -> None:
    import torch

    of_torch = [
        torch.Size([]), torch.Size([1, 2]), torch.float8_e5m2, torch.device("cuda", 3),
        torch.tensor(5.0), torch.empty(0, 2**40), [torch.zeros(1000)] * 3,
    ]  # fmt: skip
    for number, value in enumerate((*CORNERS, *of_torch)):
        with row(number, type(value)):
            assert exactly(round_trip(value)) == exactly(value)


def test_the_same_kind_of_value_has_the_same_layout_whatever_its_values() -> None:
    import torch

    other = {
        "latent": torch.zeros(4, 16, 16).half(),
        "ids": torch.zeros(7, dtype=torch.int64),
        "crop": [1, 2, 3],
        "caption": "two dogs and a very long text",
        "loss_weight": -0.0,
        "embedding": torch.zeros(77, 16).bfloat16(),
    }
    assert encode(sample())[0] == encode(other)[0]
    assert encode({"tags": ["a"]})[0] == encode({"tags": ["bc", "", "d"]})[0]
    assert encode({1, "a", 2.5})[0] == encode({"b", 0.5, 3})[0]


def test_equal_layouts_are_parsed_once() -> None:
    one, other = (known_layout(encode({"tags": tags})[0]) for tags in (["a"], ["b", "c"]))
    assert one is other


def test_another_structure_has_another_layout() -> None:
    import torch

    for other in (
        {**sample(), "latent": torch.zeros(4, 16, 17).half()},
        {**sample(), "latent": torch.zeros(4, 16, 16)},
        {**sample(), "latent": torch.zeros(4, 16, 16).half().numpy()},
        {**sample(), "crop": (0, 0, 1, 1)},
        {**sample(), "caption": b"a cat"},
        {**sample(), "loss_weight": 1},
        {**sample(), "more": None},
        {"caption": sample()["caption"], **sample()},
    ):
        assert encode(sample())[0] != encode(other)[0]


def test_large_tensors_are_given_without_a_copy_and_small_ones_are_inline() -> None:
    import torch

    _, _, tensors = encode(sample())
    assert len(tensors) == 2
    sample()["latent"].view(torch.int16)[0, 0, 0] ^= 1  # type: ignore[attr-defined]
    assert exactly(round_trip(sample())) == exactly(sample())
    latent = sample()["latent"]
    assert isinstance(latent, torch.Tensor)
    assert tensors[0].tobytes() == latent.numpy().tobytes()
    for size in (INLINE_BYTES, INLINE_BYTES + 1):
        assert len(encode(torch.zeros(size, dtype=torch.uint8))[2]) == size - INLINE_BYTES


def test_tensors_are_plain_bytes_in_a_row() -> None:
    import torch

    for value in (torch.randn(40, 40).t(), np.arange(900, dtype=">i4").reshape(30, 30).T):
        (data,) = encode(value)[2]
        assert (data.format, data.ndim, data.c_contiguous) == ("B", 1, True)


def test_a_view_keeps_only_its_own_bytes() -> None:
    import torch

    batch = torch.randn(64, 32, 32)
    (data,) = encode(batch[7])[2]
    assert len(data) == 32 * 32 * 4


@pytest.mark.cuda
def test_a_tensor_of_a_device_comes_back_on_the_cpu() -> None:
    import torch

    for value in (torch.randn(30, 30).cuda(), torch.randn(3).bfloat16().cuda()):
        assert exactly(round_trip(value)) == exactly(value.cpu())


def test_tensors_come_back_on_the_cpu_whatever_the_default_device_is() -> None:
    import torch

    value = [torch.arange(3), torch.arange(900)]
    with torch.device("meta"):
        assert exactly(round_trip(value)) == exactly(value)
        assert TensorSpec.of("torch", "int8", (3,)).rows(
            TensorSpec.of("torch", "int8", (3,)).new_batch(2, pinned=False)
        ).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_gradients_and_lazy_conjugates_are_resolved() -> None:
    import torch

    leaf = torch.randn(30, 30, requires_grad=True)
    back = round_trip(leaf)
    assert isinstance(back, torch.Tensor)
    assert not back.requires_grad
    assert torch.equal(back, leaf)
    bent = torch.randn(30, 30, dtype=torch.complex64).conj()
    for value in (bent, bent.imag, bent.to(torch.complex32), leaf.bfloat16()):
        assert exactly(round_trip(value)) == exactly(value)


def test_what_was_decoded_is_private_and_writable() -> None:
    import torch

    body, inline, _ = encode({"a": torch.zeros(3), "b": np.zeros(3)})
    layout = Layout.parse(body)
    first, second = (layout.decode(inline, lambda slot: slot) for _ in range(2))
    assert isinstance(first, dict)
    first["a"][0] = 1
    first["b"][0] = 1
    assert exactly(second) == exactly({"a": torch.zeros(3), "b": np.zeros(3)})


class _FromElsewhere:
    """What JAX and others look like from here."""

    def __init__(self, array: object) -> None:
        self._array = array

    def __array__(self, dtype: object = None, copy: object = None) -> object:
        return self._array


class _OnlyDlpack:
    def __init__(self, array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
        self._array = array

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_arrays_of_other_libraries_come_back_as_numpy_with_their_kind_recorded() -> None:
    array = np.arange(600, dtype=np.float32)
    for value in ({"x": _FromElsewhere(array)}, {"x": _OnlyDlpack(array)}):
        assert exactly(round_trip(value)) == exactly({"x": array})
        assert [spec.kind for spec in Layout.parse(encode(value)[0]).tensors] == ["array"]


class _Colour(enum.IntEnum):
    RED = 1


_Point = namedtuple("_Point", "x y")  # noqa: PYI024
_DICT = {"conditioning": [0, 1, 2, [0, {"hooks": print}]]}


REFUSED: list[tuple[object, str]] = [
    (_DICT, "conditioning[3][1].hooks"),
    ([0, [print]], "[1][0]"),
    ({"a b": (print,)}, '["a b"][0]'),
    ({2.5: print}, "[2.5]"),
    ({"x": {"y": _Colour.RED}}, "x.y"),
    (object(), ""),
]
REFUSED_VALUES: list[object] = [
    _Point(1, 2), OrderedDict(), defaultdict(list), {_Colour.RED: 1}, {(1, _Colour.RED): 1},
    np.ma.masked_array([1]), np.array([object()]),
    np.zeros(2, [("a", "i4")]), np.void(b"ab"), np.longdouble(1), np.ones(300, np.clongdouble),
    np.dtype("f4"), _FromElsewhere(object()), range(3), memoryview(b""),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*quantized.*:UserWarning", "ignore:.*prototype.*:UserWarning")
def test_what_cannot_be_kept_is_refused_by_its_path() -> None:
    import torch

    of_torch = [
        {torch.zeros(1): 1}, torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, 2).to_sparse(), torch.empty(2, device="meta"), torch.qint8,
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]  # fmt: skip
    rows = [*REFUSED, *(({"x": value}, "x") for value in (*REFUSED_VALUES, *of_torch))]
    for value, path in rows:
        with row(path, type(value)), pytest.raises(errors.UnsupportedValueError) as caught:
            encode(value)
        assert caught.value.path == path
        assert path in str(caught.value)
    for items in ({torch.zeros(1), 2}, frozenset({_Colour.RED, "a"})):
        with row(items), pytest.raises(errors.UnsupportedValueError, match="x"):
            encode({"x": items})


def test_a_value_that_contains_itself_is_refused_where_it_does() -> None:
    inner: dict[str, object] = {}
    outer = {"a": [1, inner]}
    inner["again"] = outer["a"]
    with pytest.raises(errors.UnsupportedValueError, match="contains itself") as caught:
        encode(outer)
    assert caught.value.path == "a[1].again"


def test_values_may_be_nested_a_hundred_deep_and_no_deeper() -> None:
    value: list[object] = [None]
    for _ in range(99):
        value = [value]
    assert exactly(round_trip(value)) == exactly(value)
    with pytest.raises(errors.UnsupportedValueError, match="nested more than 100 deep"):
        encode([value])


def test_one_list_in_itself_over_and_over_is_refused_before_it_takes_all_memory() -> None:
    value: list[object] = [None]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(errors.UnsupportedValueError, match="more than 1,000,000 values"):
        encode(value)


def test_fields_of_a_dict_are_known_and_decoded_one_by_one() -> None:
    body, inline, _ = encode(sample())
    layout = Layout.parse(body)
    assert layout.fields is not None
    assert tuple(layout.fields) == tuple(sample())
    slots = {name: node.slot for name, node in layout.fields.items()}
    assert slots == {**dict.fromkeys(sample()), "latent": 0, "embedding": 1}
    ids = layout.fields["ids"].tensor
    assert ids is not None
    assert (ids.dtype, ids.shape) == ("int64", (7,))
    asked: list[int] = []

    def fill(slot: int) -> int:
        asked.append(slot)
        return slot

    for name, value in sample().items():
        found = layout.decode_field(inline, name, fill)
        expected = slots[name] if slots[name] is not None else value
        assert exactly(found) == exactly(expected)
    assert asked == [0, 1]
    with pytest.raises(KeyError):
        layout.decode_field(inline, "nothing", lambda slot: slot)


def test_a_value_that_is_no_dict_has_no_fields() -> None:
    body, inline, _ = encode([1])
    layout = Layout.parse(body)
    assert layout.fields is None
    with pytest.raises(errors.ArtifactError, match="no dict"):
        layout.decode_field(inline, 0, lambda slot: slot)


def test_an_error_while_filling_a_slot_reaches_the_caller() -> None:
    def fail(slot: int) -> object:
        raise errors.DamagedArtifactError("gone")

    body, inline, _ = encode(sample())
    with pytest.raises(errors.DamagedArtifactError):
        Layout.parse(body).decode(inline, fail)


def test_a_registered_codec_keeps_objects_of_its_type() -> None:
    import torch

    def numbers(value: Fraction) -> list[int]:
        return [value.numerator, value.denominator]

    register_codec("fraction", Fraction, numbers, lambda pair: Fraction(*pair))
    register_codec("ordered", OrderedDict, dict, OrderedDict)
    value = {"f": [Fraction(1, 3)], "o": OrderedDict(b=torch.zeros(900), a=Fraction(2))}
    assert exactly(round_trip(value)) == exactly(value)


def test_a_codec_that_is_not_registered_is_named_and_everything_else_is_readable() -> None:
    register_codec("my fraction", Fraction, str, Fraction)
    body, inline, _ = encode({"f": Fraction(1, 3), "n": 1})
    forget_codecs()
    layout = Layout.parse(body)
    assert layout.decode_field(inline, "n", lambda slot: slot) == 1
    with pytest.raises(errors.UnknownCodecError, match="my fraction") as caught:
        layout.decode(inline, lambda slot: slot)
    assert caught.value.name == "my fraction"
    register_codec("my fraction", Fraction, str, Fraction)
    assert layout.decode(inline, lambda slot: slot) == {"f": Fraction(1, 3), "n": 1}


def test_a_codec_registered_again_replaces_the_old_one() -> None:
    register_codec("f", Fraction, str, Fraction)
    register_codec("g", Fraction, lambda value: [str(value)], lambda value: Fraction(value[0]))
    assert b"g" in encode(Fraction(1, 3))[0]
    assert round_trip(Fraction(1, 3)) == Fraction(1, 3)
    assert list(decoders) == ["g"]
    register_codec("g", OrderedDict, dict, OrderedDict)
    with pytest.raises(errors.UnsupportedValueError):
        encode(Fraction(1, 3))


def test_a_codec_that_gives_something_unsupported_is_refused_by_its_path() -> None:
    register_codec("fraction", Fraction, lambda _: {"n": print}, Fraction)
    with pytest.raises(errors.UnsupportedValueError) as caught:
        encode({"x": [Fraction(1)]})
    assert caught.value.path == "x[0]<fraction>.n"


def test_a_codec_that_gives_its_own_type_again_is_refused() -> None:
    register_codec("loop", Fraction, lambda value: value, lambda value: value)
    with pytest.raises(errors.UnsupportedValueError):
        encode(Fraction(1))


def test_a_codec_that_fails_to_read_is_a_layout_error_with_its_cause() -> None:
    register_codec("fraction", Fraction, str, lambda text: Fraction(int(text), 0))
    body, inline, _ = encode(Fraction(3))
    with pytest.raises(errors.LayoutError, match="fraction") as caught:
        Layout.parse(body).decode(inline, lambda slot: slot)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_supported_type_takes_no_codec() -> None:
    import torch

    supported: list[type] = [dict, int, torch.Tensor, np.ndarray, np.float32, type(None)]
    for cls in supported:
        with pytest.raises(errors.ArtifactError, match="supported already"):
            register_codec("mine", cls, str, str)


def test_what_would_come_back_as_numpy_takes_a_codec_at_any_time() -> None:
    value = _FromElsewhere(np.arange(3))
    assert exactly(round_trip(value)) == exactly(np.arange(3))
    register_codec("elsewhere", _FromElsewhere, np.asarray, _FromElsewhere)
    back = round_trip(value)
    assert isinstance(back, _FromElsewhere)
    assert exactly(np.asarray(back)) == exactly(np.arange(3))


def test_a_codec_has_a_printable_name() -> None:
    for name in ("", "x" * 201, "a\nb"):
        with row(name), pytest.raises(errors.ArtifactError, match="no name"):
            register_codec(name, Fraction, str, Fraction)


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
from smartcache import errors
from smartcache.artifacts.values.encode import Layout, encode
from smartcache.artifacts.keys import compute_key

value = {"a": np.arange(900), "b": [1, "x"], "c": np.float32(1)}
body, inline, _ = encode(value)
layout = Layout.parse(body)
back = layout.decode(inline, lambda slot: slot)
assert back == {**value, "a": 0}, back
compute_key(value)
layout = Layout.parse(bytes.fromhex(sys.argv[1]))
assert layout.tensors[0].shape == (4, 16, 16)
assert layout.decode_field(bytes.fromhex(sys.argv[2]), "caption", None) == "a cat"
for read in (layout.tensors[0].new, lambda: layout.decode(bytes.fromhex(sys.argv[2]), id)):
    try:
        read()
    except errors.ArtifactError as error:
        assert "torch is needed to read this artifact" in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_everything_but_tensors_works_without_torch() -> None:
    layout, inline, _ = encode(sample())
    arguments = [layout.hex(), inline.hex()]
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH, *arguments], check=True)


_NOT_LOADED = """
import sys
import smartcache.artifacts.keys, smartcache.artifacts.setfolder
assert not {"torch", "numpy"} & set(sys.modules)
from smartcache.artifacts.values.encode import Layout, encode
body, inline, _ = encode({"a": [1, 2.0, "x", None, {3}]})
assert Layout.parse(body).decode(inline, id) == {"a": [1, 2.0, "x", None, {3}]}
import numpy
encode(numpy.arange(2000))
assert "torch" not in sys.modules
"""


def test_neither_torch_nor_numpy_is_loaded_before_a_value_needs_it() -> None:
    subprocess.run([sys.executable, "-c", _NOT_LOADED], check=True)
