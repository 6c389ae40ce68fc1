"""The folders in extra_model_paths.yaml, as ComfyUI understands them, and damaged files."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api import folders_comfyui as comfyui
from tests.api import read_extra_paths
from tests.folders.trees import write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the file, with folders of models below it."""
    for name in ("checkpoints", "loras", "more loras", "models/vae", "custom_nodes"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def read(folder: Path, text: str | bytes) -> tuple[list[Path], list[str]]:
    return read_extra_paths(write(folder / "extra_model_paths.yaml", text))


def folders(folder: Path, text: str) -> list[str]:
    """The folders found, relative to that of the file, when nothing was wrong."""
    found, warnings = read(folder, text)
    assert warnings == []
    assert all(path.is_absolute() for path in found)
    return [os.path.relpath(path, folder) for path in found]


def test_paths_are_relative_to_the_base_path(folder: Path) -> None:
    text = f"x:\n  base_path: {folder}\n  checkpoints: checkpoints/\n  vae: models/vae\n"
    assert folders(folder, text) == ["checkpoints", "models/vae"]


def test_the_base_path_is_relative_to_the_file(folder: Path) -> None:
    assert folders(folder, "x:\n  base_path: models\n  vae: ./vae\n") == ["models/vae"]


def test_without_a_base_path_the_paths_are_relative_to_the_file(folder: Path) -> None:
    assert folders(folder, "x:\n  loras: loras\n") == ["loras"]
    assert folders(folder, "x:\n  base_path:\n  loras: loras\n") == ["loras"]


def test_a_file_given_by_a_relative_path_is_where_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert folders(Path(), "x:\n  loras: loras\n") == ["loras"]


def test_an_absolute_path_needs_no_base(folder: Path) -> None:
    text = f"x:\n  base_path: /nowhere\n  loras: {folder / 'loras'}\n"
    assert folders(folder, text) == ["loras"]


def test_a_value_may_have_several_lines(folder: Path) -> None:
    text = "x:\n  loras: |\n    loras\n\n    more loras  \n"
    assert folders(folder, text) == ["loras", "more loras"]


def test_there_may_be_several_sections(folder: Path) -> None:
    text = "a:\n  loras: loras\nb:\n  base_path: models\n  vae: vae\nempty:\n"
    assert folders(folder, text) == ["loras", "models/vae"]


@pytest.mark.parametrize("base", ["~/models", "$PLACE/models", "${PLACE}/models"])
def test_the_home_and_variables_are_expanded_in_the_base_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("PLACE", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert folders(folder, f"x:\n  base_path: {base}\n  vae: vae\n") == ["models/vae"]


def test_custom_nodes_and_flags_are_no_model_folders(folder: Path) -> None:
    text = "x:\n  is_default: true\n  custom_nodes: custom_nodes\n  loras: loras\n"
    assert folders(folder, text) == ["loras"]


def test_a_folder_named_twice_is_found_once(folder: Path) -> None:
    assert folders(folder, "x:\n  a: loras\n  b: ./loras/\ny:\n  c: models/../loras\n") == ["loras"]


def test_what_does_not_exist_is_passed_over(folder: Path) -> None:
    (folder / "a file").write_bytes(b"")
    assert folders(folder, 'x:\n  a: nowhere\n  b: a file\n  c: "a\\0b"\n  d: X:/models\n') == []


def test_merge_keys_work(folder: Path) -> None:
    text = "a: &a\n  loras: loras\nb:\n  <<: *a\n  vae: models/vae\n"
    assert folders(folder, text) == ["loras", "models/vae"]


def test_a_byte_order_mark_is_no_part_of_the_first_section(folder: Path) -> None:
    assert folders(folder, "\ufeffx:\n  loras: loras\n") == ["loras"]


def test_a_missing_file_has_no_folders(folder: Path) -> None:
    assert read_extra_paths(folder / "missing.yaml") == ([], [])
    assert read_extra_paths(folder / "missing" / "missing.yaml") == ([], [])


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n", "\ufeff"])
def test_an_empty_file_has_no_folders(folder: Path, text: str) -> None:
    assert read(folder, text) == ([], [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x: [", "not YAML"),
        ("x:\n\t- y", "not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("x: !!python/object/apply:os.getcwd []", "not YAML"),
        ('x: !!int ""', "not YAML"),
        ("x: !!bool maybe", "not YAML"),
        ("x: !!timestamp now", "not YAML"),
        ("x: 2020-99-99", "not YAML"),
        ("- " * 5000, "nested too deeply"),
        ("- a\n- b\n", "not a list of sections"),
        ("just words", "not a list of sections"),
        ("x: words", "'x': not a section"),
        ("x: [a, b]", "'x': not a section"),
        ("x:\n  loras: 7", "'loras': not a path"),
        ("x:\n  loras: [loras]", "'loras': not a path"),
        ("x:\n  base_path: [a]\n  loras: loras", "base_path is not a path"),
        ('x:\n  base_path: "~\\0"\n  loras: loras', "base_path is not a path"),
        (b"x:\n  loras: \xff\n", "not UTF-8"),
        ("x: y".encode("utf-16"), "not UTF-8"),
    ],
)
def test_what_cannot_be_used_is_one_line_that_names_the_file(
    folder: Path, text: str | bytes, words: str
) -> None:
    found, warnings = read(folder, text)
    assert found == []
    assert len(warnings) == 1
    assert words in warnings[0]
    assert str(folder / "extra_model_paths.yaml") in warnings[0]
    assert "\n" not in warnings[0]


def test_a_wrong_section_does_not_hide_the_others(folder: Path) -> None:
    found, warnings = read(folder, "bad: 7\ngood:\n  worse: 8\n  loras: loras\n")
    assert found == [folder / "loras"]
    assert len(warnings) == 2


def test_a_file_that_is_too_large_is_not_read(folder: Path) -> None:
    text = "x:\n  loras: loras\n"
    assert folders(folder, text.ljust(comfyui.MOST_READ)) == ["loras"]
    found, warnings = read(folder, text.ljust(comfyui.MOST_READ + 1))
    assert found == []
    assert len(warnings) == 1
    assert "larger than" in warnings[0]


def test_a_directory_in_place_of_the_file_is_a_warning(folder: Path) -> None:
    found, warnings = read_extra_paths(folder / "loras")
    assert found == []
    assert len(warnings) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="has no FIFOs")
@pytest.mark.timeout(20)
def test_a_fifo_in_place_of_the_file_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    found, warnings = read_extra_paths(folder / "fifo")
    assert (found, len(warnings)) == ([], 1)


@pytest.mark.skipif(sys.platform == "win32", reason="modes as POSIX has them")
def test_a_file_that_may_not_be_read_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(folder / "extra_model_paths.yaml", "x:\n  loras: loras\n", mtime=1)

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", refuse)
    assert read_extra_paths(file) == ([], [f"{file}: cannot be read: Permission denied"])


@pytest.mark.timeout(20)
def test_merges_that_multiply_are_refused(folder: Path) -> None:
    """Forty lines would be 2^40 keys."""
    lines = ["a0: &a0 {k: loras}"]
    lines += [f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    found, warnings = read(folder, "\n".join(lines))
    assert found == []
    assert len(warnings) == 1
    assert "too many keys" in warnings[0]


@pytest.mark.timeout(20)
def test_aliases_that_multiply_cost_nothing(folder: Path) -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    found, warnings = read(folder, "\n".join(lines))
    assert found == []
    assert len(warnings) == 40
    assert max(map(len, warnings)) < 500


_tokens = st.sampled_from(
    ["x", "base_path", "loras", ": ", "\n", "  ", "- ", "[", "]", "{", "}", "&a ", "*a", "<<: ",
     "!!int ", "!!bool ", "!!float ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!null ",
     '"', "'", "|\n", "~", "0x", "1:99", "2020-13-01", "\\0", "\\ud800", "? ", "#", "%", "\t", ","]
)  # fmt: skip


@given(st.one_of(st.binary(), st.lists(_tokens).map("".join)))
def test_no_file_raises(tmp_path_factory: pytest.TempPathFactory, data: bytes | str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    found, warnings = read_extra_paths(write(file, data))
    assert all(path.is_dir() for path in found)
    assert all("\n" not in warning for warning in warnings)
