"""Layouts and inline bytes that nobody wrote: an error of ours or a value, and nothing huge."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache import errors
from smartcache.artifacts import register_codec
from smartcache.artifacts.values.encode import encode
from smartcache.artifacts.values.layout import Layout
from tests.artifacts.exact import forget_codecs
from tests.artifacts.strategies import values
from tests.store.files import row


def samples() -> list[object]:
    import torch

    return [
        {
            "latent": torch.zeros(4, 16, 16).half(),
            "ids": torch.arange(7),
            "crop": [0, 0, 1024, 1024],
            "caption": "a cat",
            "weights": (1.0, -0.0),
            "tags": {"a", "bc"},
            "none": None,
            "size": torch.Size([1, 2]),
            "dtype": torch.float16,
            "device": torch.device("cuda:1"),
        },
        [1, "a", b"b", bytearray(b"c"), 2**80, 1j, True, [True, False], ({}, [], frozenset("x1"))],
        {1: 2, (1, "a"): {None: [np.float32(1), np.str_("x")]}, np.int64(4): np.bytes_(b"y")},
        [np.arange(9.0), np.array(["a", "b"]), np.datetime64(5, "ns"), np.zeros((0, 3), ">c16")],
        {"f": Fraction(1, 3)},
    ]


@pytest.fixture(autouse=True)
def _one_codec() -> Iterator[None]:
    register_codec("fraction", Fraction, str, Fraction)
    yield
    forget_codecs()


def _read(layout: bytes, inline: bytes) -> object:
    """Decode if that is possible; any other error than ours fails the test."""
    try:
        parsed = Layout.parse(layout)
        return parsed.decode(inline, lambda slot: slot)
    except (errors.LayoutError, errors.UnknownCodecError):
        return None
    except errors.ArtifactError as error:
        if "ml_dtypes" in str(error):
            return None  # the right name of a dtype that is not known on this machine
        raise


def _mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one thing changed, as files are damaged or crafted."""
    changed = bytearray(data)
    at = chance.randrange(len(data) + 1)
    match chance.randrange(7):
        case 0 if data:
            changed[at % len(data)] ^= 1 << chance.randrange(8)
        case 1 if data:
            changed[at % len(data)] = chance.choice(b"-?idcIsyYUSDVtur{[(<>CkZ\x00\xff")
        case 2:
            del changed[at:]
        case 3:
            changed[at:at] = chance.randbytes(chance.randrange(1, 9))
        case 4:
            size = chance.choice([1, 4, 8])
            changed[at : at + size] = chance.choice([b"\xff", b"\x7f", b"\x00"]) * size
        case 5:
            other = chance.randrange(len(data) + 1)
            changed[at:at] = data[other : other + chance.randrange(40)]
        case _:
            del changed[at : at + chance.randrange(1, 9)]
    return bytes(changed)


def test_damaged_layouts_and_inline_bytes_give_an_error_or_a_value(
    rounds: Callable[[int], int],
) -> None:
    encoded = [encode(sample) for sample in samples()]
    for number in range(rounds(1500)):
        chance = random.Random(number)
        layout, inline, _ = chance.choice(encoded)
        for _ in range(chance.randrange(1, 4)):
            if chance.random() < 0.7:
                layout = _mutated(layout, chance)
            else:
                inline = _mutated(inline, chance)
        _read(layout, inline)


@given(st.binary(max_size=60).map(lambda data: b"\x01" + data), st.binary(max_size=60))
def test_random_bytes_give_an_error_or_a_value(layout: bytes, inline: bytes) -> None:
    _read(layout, inline)


@given(values, values)
def test_the_inline_bytes_of_another_value_give_an_error_or_a_value(
    one: object, other: object
) -> None:
    _read(encode(one)[0], encode(other)[1])


@given(values, st.data())
def test_no_part_of_a_layout_or_of_inline_bytes_is_a_whole_one(
    value: object, data: st.DataObject
) -> None:
    body, whole, _ = encode(value)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(errors.LayoutError):
        Layout.parse(body[:cut])
    with pytest.raises(errors.LayoutError):
        Layout.parse(body + b"-")
    layout = Layout.parse(body)
    for inline in (whole + b"\0", whole[:-1] if whole else b"\0"):
        with pytest.raises(errors.LayoutError):
            layout.decode(inline, lambda slot: slot)


_MANY = b"\xff\xff\xff\xff"
_TENSOR = b"tt\x05uint8\x01"


LAYOUTS = [
    b"",
    b"\x01",
    b"\x02-",
    b"\x01\xee",
    b"\x01--",
    b"\x01[" + _MANY,
    b"\x01{" + _MANY,
    b"\x01<" + _MANY + b"-",
    b"\x01{\x01\x00\x00\x00s" + _MANY + b"a-",
    b"\x01{\x01\x00\x00\x00s\x01\x00\x00\x00\xff-",
    b"\x01{\x01\x00\x00\x00x",
    b"\x01{\x02\x00\x00\x00" + b"s\x01\x00\x00\x00a-" * 2,
    b"\x01{\x01\x00\x00\x00k[\x00\x00\x00\x00\x00\x00\x00\x00-",
    b"\x01{\x01\x00\x00\x00kY\x08\x00\x00\x00" + bytes(8) + b"-",
    b"\x01{\x01\x00\x00\x00k" + _TENSOR + struct.pack("<Q", 5000) + bytes(4) + b"-",
    b"\x01{\x01\x00\x00\x00ki\x07\x00\x00\x00" + bytes(7) + b"-",
    b"\x01<\x01\x00\x00\x00[\x00\x00\x00\x00",
    b"\x01C\x00\x00\x00\x00-",
    b"\x01C" + struct.pack("<I", 300) + b"x" * 300 + b"-",
    b"\x01r[x",
    b"\x01rZs",
    b"\x01r{i",
    b"\x01u\x02<O",
    b"\x01u\x03<U5",
    b"\x01tz\x05uint8\x00",
    b"\x01tt\x05uint9\x00",
    b"\x01tt\x08os.names\x00",
    b"\x01" + _TENSOR + struct.pack("<Q", 2**63),
    b"\x01tn\x03<f4\x02" + struct.pack("<QQ", 2**40, 2**40),
    b"\x01tn\x03<f4\xff" + struct.pack("<255Q", *[1] * 255),
    b"\x01" + b"(\x01\x00\x00\x00" * 101 + b"-",
    b"\x01" + b"{\x01\x00\x00\x00s\x00\x00\x00\x00" * 101 + b"-",
    b"\x01" + b"C\x01\x00\x00\x00f" * 101 + b"-",
    b"\x01" + b"[\x01\x00\x00\x00" * 100_000,
    b"\x01{\x01\x00\x00\x00" + b"k(\x01\x00\x00\x00" * 50_000,
]


def test_a_crafted_layout_is_refused_without_much_memory() -> None:
    for layout in LAYOUTS:
        tracemalloc.start()
        try:
            with row(layout[:40]), pytest.raises(errors.LayoutError):
                Layout.parse(layout)
            assert tracemalloc.get_traced_memory()[1] < 200_000 + 4 * len(layout), layout[:40]
        finally:
            tracemalloc.stop()


def test_a_layout_takes_memory_in_proportion_to_its_bytes() -> None:
    layout = b"\x01[" + struct.pack("<I", 4_000) + (_TENSOR + struct.pack("<Q", 1000)) * 4_000
    tracemalloc.start()
    try:
        parsed = Layout.parse(layout)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(layout)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(errors.LayoutError):
            parsed.decode(bytes(1000), lambda slot: slot)
        assert tracemalloc.get_traced_memory()[1] - before < 10_000
    finally:
        tracemalloc.stop()


def test_a_slot_for_a_huge_tensor_allocates_nothing_by_itself() -> None:
    layout = Layout.parse(b"\x01" + _TENSOR + struct.pack("<Q", 2**47))
    assert layout.tensors[0].nbytes == 2**47
    assert layout.decode(b"", lambda slot: slot) == 0


INLINE = [
    (b"s", struct.pack("<Q", 2**63)),
    (b"s", struct.pack("<Q", 1) + b"\xff"),
    (b"s", struct.pack("<Q", 2) + b"a"),
    (b"s", struct.pack("<Q", 0) + b"a"),
    (b"(\x02\x00\x00\x00ss", struct.pack("<QQ", 2**64 - 1, 1)),
    (b"r[i", struct.pack("<Q", 7) + bytes(7)),
    (b"r<i", struct.pack("<Q", 16) + bytes(16)),
    (b"r[s", struct.pack("<QQ", 4, 1) + struct.pack("<I", 2) + b"a"),
    (b"r[s", struct.pack("<QQ", 4, 1) + struct.pack("<I", 0) + b"a"),
    (b"r[s", struct.pack("<QQ", 3, 1) + bytes(3) + b"a"),
    (b"<\x02\x00\x00\x00ii", bytes(16)),
    (b"<\x01\x00\x00\x00u\x03<m8", bytes(8)),
    (b"D", struct.pack("<Q", 6) + b"Tensor"),
    (b"V", struct.pack("<Q", 4) + b"none"),
    (b"V", struct.pack("<Q", 7) + b"cpu\0abc"),
    (b"C\x08\x00\x00\x00fractions", struct.pack("<Q", 1) + b"x"),
]


def test_crafted_inline_bytes_are_refused() -> None:
    for layout, inline in INLINE:
        with row(layout, inline), pytest.raises(errors.LayoutError):
            Layout.parse(b"\x01" + layout).decode(inline, lambda slot: slot)


def test_a_codec_named_like_a_module_is_unknown_and_nothing_is_imported() -> None:
    name = b"os.system"
    layout = Layout.parse(b"\x01C" + struct.pack("<I", len(name)) + name + b"s")
    with pytest.raises(errors.UnknownCodecError, match=r"os\.system"):
        layout.decode(struct.pack("<Q", 4) + b"true", lambda slot: slot)


def test_what_this_release_writes_is_what_the_first_one_wrote() -> None:
    """Layouts and inline bytes are on disk: both must be read for ever."""
    import torch

    value = {
        "latent": np.zeros((4, 128), "<f4"),
        "small": torch.ones(2, dtype=torch.bfloat16),
        "crop": [0, 1],
        "caption": "a cat",
        3: (None, True, 1.5),
        "tags": ["x", "yz"],
    }
    layout, inline, _ = encode(value)
    assert (layout.hex(), inline.hex()) == (
        (
            "017b0600000073060000006c6174656e74746e033c66340204000000000000008000000000000000"
            "7305000000736d616c6c74740862666c6f61743136010200000000000000730400000063726f7072"
            "5b69730700000063617074696f6e736b6908000000030000000000000028030000002d3f64730400"
            "000074616773725b73"
        ),
        (
            "803f803f01000000000000f83f100000000000000005000000000000000800000000000000030000"
            "0000000000000000000000000001000000000000006120636174010000000200000078797a"
        ),
    )
