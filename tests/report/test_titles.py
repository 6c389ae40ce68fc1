"""Titles in headers: those of real writers, made-up ones, and bytes that are no header at all."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.report.titles import LONGEST, MOST_READ, kind_of, one_line, read_title, title_of
from tests.folders.trees import (
    checkpoint,
    content,
    gguf,
    gguf_array,
    gguf_string,
    safetensors,
    write,
)


class Counted(io.BytesIO):
    """A file that knows how much of it was read."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def title(data: bytes) -> str:
    """The title in these bytes."""
    return read_title(Counted(data))


def with_header(header: object, rest: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


# safetensors


def test_the_title_of_a_real_safetensors_file(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    metadata = {"modelspec.title": "Stable Diffusion XL", "format": "pt", "x": "y"}
    path = tmp_path / "a.safetensors"
    save_file({"w": np.zeros((3, 4), np.float32)}, path, metadata=metadata)
    assert title_of(path) == "Stable Diffusion XL"


def test_the_most_telling_key_gives_the_title() -> None:
    cases = [
        ({"modelspec.title": "A", "ss_output_name": "B", "title": "C"}, "A"),
        ({"ss_output_name": "B", "title": "C", "name": "D"}, "B"),
        ({"modelspec.title": "  ", "title": "C"}, "C"),
        ({"name": "D"}, "D"),
        ({"format": "pt"}, ""),
        ({"ss_output_name": "ärger 模型"}, "ärger 模型"),
    ]
    for metadata, expected in cases:
        assert title(safetensors(1, 4096, metadata)) == expected, metadata


def test_headers_without_a_usable_title() -> None:
    headers: list[object] = [
        {"w": {}},
        {"__metadata__": {}},
        {"__metadata__": {"other": "x"}},
        {"__metadata__": {"title": 7, "format": None}},
        {"__metadata__": ["title"]},
        {"__metadata__": "title"},
        {"deeper": {"__metadata__": {"title": "no"}}},
        b"{",
        b"{}",
        b'{"__metadata__": {"title": "cut',
        b'{"__metadata__": {"title": "x"',
        b'{"__metadata__":' + b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000,
    ]
    for header in headers:
        assert title(with_header(header)) == "", str(header)[:80]
    assert title(with_header(b"{", b'"__metadata__": {"title": "no"}}')) == "", "in the data"


def test_metadata_behind_the_tensors_is_found_too() -> None:
    assert title(with_header({"w": {"shape": []}, "__metadata__": {"title": "late"}})) == "late"


def test_a_long_list_of_tensors_is_not_read_when_the_metadata_is_in_front() -> None:
    tensors = {f"blocks.{n}.weight": {"shape": [n]} for n in range(50_000)}
    file = Counted(with_header({"__metadata__": {"title": "x"}, **tensors}))
    assert read_title(file) == "x"
    assert file.taken <= 1 << 17


def test_metadata_of_megabytes_is_read_up_to_a_bound() -> None:
    """Trainers write the tags of whole datasets into it."""
    for size, expected in ((3 << 20, "y"), (MOST_READ + 1000, "")):
        file = Counted(with_header({"__metadata__": {"tags": "x" * size, "title": "y"}}))
        assert read_title(file) == expected
        assert file.taken <= MOST_READ


def test_a_header_longer_than_the_format_allows_is_none() -> None:
    text = json.dumps({"__metadata__": {"title": "x"}}).encode()
    assert title(struct.pack("<Q", 100_000_000) + text) == "x"
    assert title(struct.pack("<Q", 100_000_001) + text) == ""


_word = st.text(st.characters(codec="utf-8"), max_size=30)


@given(st.dictionaries(_word, _word, max_size=5), st.dictionaries(_word, st.integers(), max_size=3))
def test_generated_headers_give_back_their_title(
    metadata: dict[str, str], tensors: dict[str, int]
) -> None:
    tensors.pop("__metadata__", None)
    metadata["modelspec.title"] = "the title"
    header = {"__metadata__": metadata, **tensors}
    assert title(with_header(header)) == "the title"
    assert title(with_header(json.dumps(header, ensure_ascii=False).encode())) == "the title"
    assert title(with_header({**tensors, "__metadata__": metadata})) == "the title"


# GGUF


def test_the_name_of_a_gguf_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", gguf(1, name="Llama 3 8B Instruct"))
    assert title_of(path) == "Llama 3 8B Instruct"


def test_values_of_all_types_before_the_name_are_passed_over() -> None:
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    before = {f"n{kind}": struct.pack("<I", kind) + bytes(width) for kind, width in widths.items()}
    for kind, width in widths.items():
        before[f"a{kind}"] = gguf_array(kind, [b"\xff" * width] * 1000)
    words = [struct.pack("<Q", n) + b"x" * n for n in range(300)]
    before["words"] = gguf_array(8, words)
    before["nested"] = gguf_array(9, [struct.pack("<IQ", 0, 3) + b"abc"] * 2)
    before["general.name.other"] = gguf_string("no")
    assert title(gguf(1, 1 << 20, "the name", before=before)) == "the name"


def test_versions_that_are_understood_and_a_name_that_is_not_there() -> None:
    for version in (2, 3):
        assert title(gguf(1, version=version)) == "A Model"
    for version in (0, 1, 4, 0x03000000):
        assert title(gguf(1, version=version)) == "", version
    assert title(gguf(1, name=None)) == ""


def head(*values: bytes, pairs: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, pairs) + b"".join(values)


def key(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_damaged_heads_have_no_title() -> None:
    for data in (
        b"GGUF",
        head(),
        head(struct.pack("<Q", 2**63)),
        head(key(b"x" * 70_000) + struct.pack("<IB", 0, 1)),
        head(key(b"general.name")),
        head(key(b"general.name") + struct.pack("<IQ", 8, 2**40)),
        head(key(b"a") + struct.pack("<I", 99)),
        head(key(b"a") + struct.pack("<IIQ", 9, 8, 2**60)),
        head(key(b"a") + struct.pack("<IIQ", 9, 0, 2**63)),
        head(key(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000),
        head(pairs=2**64 - 1),
        head(key(b"general.name") + struct.pack("<II", 4, 7)),
    ):
        assert title(data) == "", data[:80]


def test_a_name_behind_megabytes_is_found_up_to_the_bound() -> None:
    for size in (7 << 20, 9 << 20):
        big = struct.pack("<IIQ", 9, 0, size) + bytes(size)
        file = Counted(gguf(1, 16 << 20, "far away", before={"big": big}))
        assert read_title(file) == ("far away" if size < 8 << 20 else "")
        assert file.taken <= 8 << 20


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
            st.one_of(
                st.text(st.characters(codec="utf-8"), max_size=300).map(gguf_string),
                st.lists(st.binary(min_size=4, max_size=4), max_size=50).map(
                    lambda items: gguf_array(5, items)
                ),
            ),
        ),
        max_size=6,
    )
)
def test_generated_heads_give_back_their_name(pairs: list[tuple[str, bytes]]) -> None:
    before = {name: value for name, value in pairs if name != "general.name"}
    assert title(gguf(1, name="the name", before=before)) == "the name"


# any bytes


@given(
    st.one_of(
        st.binary(),
        st.binary().map(lambda data: b"GGUF" + struct.pack("<I", 3) + data),
        st.binary().map(lambda data: with_header(b"{" + data)),
        st.binary().map(lambda data: b"PK\x03\x04" + data),
    )
)
def test_no_bytes_raise(data: bytes) -> None:
    file = Counted(data)
    assert len(read_title(file)) <= LONGEST
    assert file.taken <= len(data)


@given(
    st.sampled_from([gguf(1, 4096), safetensors(1, 4096, {"title": "A Model"})]),
    st.integers(0, 4096),
    st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 255)), max_size=5),
)
def test_truncated_and_overwritten_files_do_not_raise(
    data: bytes, size: int, edits: list[tuple[int, int]]
) -> None:
    changed = bytearray(data)
    for offset, value in edits:
        changed[offset] = value
    assert title(bytes(changed[:size])).isprintable()


# lines


def test_one_line() -> None:
    for text, line in (
        ("  a \n\t b\r\n", "a b"),
        ("a\x1b[31mb", "a [31mb"),
        ("a\u202eb\u200bc", "a b c"),
        ("a\udcffb", "a b"),
        ("\0" * 50, ""),
        ("x" * LONGEST, "x" * LONGEST),
        ("x" * (LONGEST + 1), "x" * (LONGEST - 1) + "…"),
    ):
        assert one_line(text) == line, text


@given(st.text())
def test_every_text_becomes_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= LONGEST
    assert line == line.strip()


# kinds


def test_the_suffix_says_the_kind_even_of_a_file_that_is_gone() -> None:
    kinds = {
        "safetensors": "a.safetensors a.SFT",
        "gguf": "a.gguf",
        "ckpt/bin": "a.ckpt a.bin a.pt a.pth",
        "onnx": "a.onnx",
        "latents": "a.latent a.npz",
        "other": "a.txt a",
    }
    for kind, names in kinds.items():
        for name in names.split():
            assert kind_of(Path("nowhere") / name) == kind, name


def _zip(name: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, b"x")
    return made.getvalue()


def test_the_first_bytes_say_the_kind_of_a_blob(tmp_path: Path) -> None:
    for data, kind in (
        (safetensors(1, 4096), "safetensors"),
        (gguf(1, 4096), "gguf"),
        (checkpoint(1, 4096), "ckpt/bin"),
        (_zip("word/document.xml"), "other"),
        (bytes.fromhex("80028a0a6cfc9c46f9206aa850192e"), "ckpt/bin"),
        (b"\x80\x04].", "other"),
        (content(1, 4096), "other"),
        (b"", "other"),
        (b"{}", "other"),
    ):
        for name in ("sha256-abc", "3f2a", "v1.0"):
            assert kind_of(write(tmp_path / name, data)) == kind, (name, data[:20])


@pytest.mark.torch
def test_what_torch_saves_is_recognised(tmp_path: Path) -> None:
    import torch

    for name, is_zip in (("new", True), ("old", False)):
        path = tmp_path / name
        torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=is_zip)
        assert kind_of(path) == "ckpt/bin"


# files


@pytest.mark.timeout(20)
def test_what_is_no_file_has_no_title_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "missing", Path("nul\0byte"), tmp_path / "fifo"):
        assert (title_of(path), kind_of(path)) == ("", "other"), path


@pytest.mark.skipif(not hasattr(os, "O_NOATIME"), reason="access times cannot be spared")
def test_reading_a_title_does_not_make_a_file_look_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", gguf(1))
    os.utime(path, (1, 1))
    assert title_of(path)
    assert kind_of(write(tmp_path / "blob", gguf(1))) == "gguf"
    assert path.stat().st_atime == 1
