"""The folders in extra_model_paths.yaml, as ComfyUI understands them, and damaged files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.folders import discover as discovering
from smartcache.folders.discover import read_extra_paths
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


UNDERSTOOD = [
    ("to the base path", "x:\n base_path: HERE\n a: loras/\n b: models/vae", "loras models/vae"),
    ("a base path relative to the file", "x:\n base_path: models\n vae: ./vae", "models/vae"),
    ("relative to the file", "x:\n loras: loras", "loras"),
    ("an empty base path", "x:\n base_path:\n loras: loras", "loras"),
    ("absolute", "x:\n base_path: /nowhere\n loras: HERE/loras", "loras"),
    ("several lines", "x:\n loras: |\n  loras\n\n  checkpoints  \n", "loras checkpoints"),
    ("several sections", "a:\n x: loras\nb:\n base_path: models\n v: vae\nc:", "loras models/vae"),
    ("the home", "x:\n base_path: ~/models\n vae: vae", "models/vae"),
    ("a variable", "x:\n base_path: $PLACE/models\n vae: vae", "models/vae"),
    ("a variable in braces", "x:\n base_path: ${PLACE}/models\n vae: vae", "models/vae"),
    ("no models", "x:\n is_default: true\n custom_nodes: custom_nodes\n loras: loras", "loras"),
    ("twice", "x:\n a: loras\n b: ./loras/\ny:\n c: models/../loras", "loras"),
    ("not there", 'x:\n a: nowhere\n b: a file\n c: "a\\0b"\n d: X:/models', ""),
    ("merge keys", "a: &a\n l: loras\nb:\n <<: *a\n vae: models/vae", "loras models/vae"),
    ("a byte order mark", "\ufeffx:\n loras: loras", "loras"),
    *((f"empty: {text!r}", text, "") for text in ("", "\n", "# a comment\n", "---\n", "\ufeff")),
]  # fmt: skip


@pytest.mark.parametrize("way", ["absolute", "relative"])
def test_paths_are_understood_as_comfyui_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """However the file itself is given."""
    for name in ("PLACE", "HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.chdir(folder)
    (folder / "a file").write_bytes(b"")
    for what, text, expected in UNDERSTOOD:
        where = Path() if way == "relative" else folder
        assert folders(where, text.replace("HERE", str(folder))) == expected.split(), what
    assert read_extra_paths(folder / "missing.yaml") == ([], [])
    assert read_extra_paths(folder / "missing" / "missing.yaml") == ([], [])


UNUSABLE: list[tuple[str | bytes, str]] = [
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
    ("x:\n  loras: loras\n".ljust(discovering.MOST_READ + 1), "larger than"),
    # 40 lines would be 2^40 keys
    (
        "\n".join(
            [
                "a0: &a0 {k: loras}",
                *(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)),
            ]
        ),
        "too many keys",
    ),
]


@pytest.mark.timeout(20)
def test_what_cannot_be_used_is_one_line_that_names_the_file(folder: Path) -> None:
    for text, words in UNUSABLE:
        found, warnings = read(folder, text)
        assert (found, len(warnings)) == ([], 1), text[:80]
        assert words in warnings[0], text[:80]
        assert str(folder / "extra_model_paths.yaml") in warnings[0]
        assert "\n" not in warnings[0]
    assert folders(folder, "x:\n  loras: loras\n".ljust(discovering.MOST_READ)) == ["loras"]


def test_a_wrong_section_does_not_hide_the_others(folder: Path) -> None:
    found, warnings = read(folder, "bad: 7\ngood:\n  worse: 8\n  loras: loras\n")
    assert found == [folder / "loras"]
    assert len(warnings) == 2


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
