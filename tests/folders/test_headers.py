"""Which model files are called damaged, by what their headers say; headers come from strangers."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.folders.headers import is_cut
from smartcache.folders.scan import scan_folders as scan
from smartcache.store.store import Store
from tests.folders.counting import files_opened, plain
from tests.folders.trees import content, gguf, gguf_array, gguf_string, safetensors, write
from tests.store.files import adopt

U64 = (1 << 64) - 1
Header = bytes


def tensors(header: object, *, length: int | None = None, data: bytes = b"x" * 64) -> bytes:
    """A safetensors file with a header of one's own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def pairs(value: bytes, *, count: int = 1, of_tensors: int = 1) -> bytes:
    """A GGUF file with values of one's own."""
    key = struct.pack("<Q", 1) + b"k"
    return b"GGUF" + struct.pack("<IQQ", 3, of_tensors, count) + key + value + b"x" * 100


def damaged(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    return is_cut(os.fsencode(path), len(data))


WHOLE = {
    "safetensors": safetensors(1),
    "with its metadata": safetensors(1, metadata={"data_offsets": "[0, 99999999]"}),
    "without tensors": tensors({"__metadata__": {}}, data=b""),
    "GGUF 2": gguf(1, version=2),
    "GGUF 3": gguf(1),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_is_cut_if_its_header_says_that_it_is_longer(name: str, tmp_path: Path) -> None:
    whole = WHOLE[name]
    assert not damaged(tmp_path / "x", whole)
    assert not damaged(tmp_path / "x", whole + b"more")
    for length in {len(whole) - 1, len(whole) // 2, 0}:
        assert damaged(tmp_path / "x", whole[:length]) or name == "without tensors", length


HOSTILE: dict[str, bytes] = {
    "a header of all memory": tensors({}, length=U64),
    "of 100 MB": tensors({}, length=100_000_001),
    "no header": b"x",
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "nested": tensors(b'{"a":' + b"[" * 100_000),
    "offsets that are no numbers": tensors({"a": {"data_offsets": [-1, "7"]}}),
    "with too many digits": tensors(b'{"a":{"data_offsets":[0,' + b"9" * 5000 + b"]}}"),
    "another version": b"GGUF" + struct.pack("<IQQ", 99, U64, U64),
    "a short head": b"GGUF\3\0\0\0",
    "very many values": pairs(gguf_string("v"), count=U64),
    "very many tensors": pairs(gguf_string("v"), of_tensors=U64),
    "a long text": pairs(struct.pack("<IQ", 8, U64)),
    "a long array": pairs(struct.pack("<IIQ", 9, 10, U64)),
    "a long array of texts": pairs(struct.pack("<IIQ", 9, 8, U64)),
    "arrays in arrays": pairs((struct.pack("<I", 9) + struct.pack("<IQ", 9, 1)) * 100_000),
    "an unknown type": pairs(struct.pack("<I", 77)),
    "many dimensions": pairs(gguf_array(8, []) + struct.pack("<QI", 0, U64 >> 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_understood_is_not_called_damaged(name: str, tmp_path: Path) -> None:
    """And takes no memory."""
    tracemalloc.start()
    try:
        assert not damaged(tmp_path / "x", HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_or_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(write(tmp_path / "cut", safetensors(1)[:-1]))
    for name in ("fifo", "link", "missing", "."):
        assert not is_cut(os.fsencode(tmp_path / name), 100), name


def flipped(data: bytes, seed: int) -> bytes:
    """The same with some bytes of its header changed."""
    chance, result = random.Random(seed), bytearray(data)
    for _ in range(chance.randint(1, 8)):
        result[chance.randrange(min(400, len(result)))] = chance.randrange(256)
    return bytes(result)


heads = st.sampled_from(
    [b"GGUF\3\0\0\0", b"GGUF\2\0\0\0" + struct.pack("<QQ", 1, 1), b"\2\0\0\0\0\0\0\0{}"]
)
anything = st.builds(flipped, st.sampled_from(list(WHOLE.values())), st.integers(0, U64))


@given(
    data=st.one_of(anything, st.binary(max_size=300), st.builds(bytes.__add__, heads, st.binary()))
)
def test_no_header_raises(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    damaged(tmp_path_factory.getbasetemp() / "any.gguf", data)


def test_a_scan_names_damaged_models_and_reads_each_header_once(
    store: Store, folder: Path, pass_time: Callable[[float], None]
) -> None:
    """Whatever their size, until they are whole, those that are blobs too; nothing but models."""
    cut = [
        write(folder / "a.safetensors", safetensors(1)[:-1]),
        write(folder / "b.SFT", safetensors(2, 4096)[:2000]),
        write(folder / "c.gguf", gguf(3)[:-1]),
    ]
    empty = write(folder / "empty.safetensors", b"")
    for name, data in (
        ("whole.gguf", gguf(4)), ("hostile.gguf", HOSTILE["a long array"]), ("empty.txt", b""),
        ("cut.bin", safetensors(1)[:-1]), ("a.gguf.part", b""), ("d.gguf", content(1)),
    ):  # fmt: skip
        write(folder / name, data)
    pass_time(60)
    adopt(store, cut[2])
    reasons = dict.fromkeys(cut, "is shorter than its header says") | {empty: "is empty"}
    for headers in (6, 0):
        with files_opened(folder) as opened:
            found = scan(store, plain(folder))
        assert {each.path: each.reason for each in found.damaged} == reasons
        assert (len(opened), found.problems) == (headers, ())
    write(cut[0], safetensors(1))
    cut[1].unlink()
    os.link(cut[2], folder / "again.gguf")
    found = scan(store, plain(folder))
    assert [each.path.name for each in found.damaged] == ["again.gguf", "c.gguf", empty.name]
    assert scan(store, plain(folder, folder / "none")).damaged == found.damaged
