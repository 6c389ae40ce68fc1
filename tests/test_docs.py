"""The documentation is true: its Python runs, its commands exist, every command is in it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from smartcache.artifacts.engine.index import SetIndex
from smartcache.store.catalog import Catalog
from smartcache.store.journal import How, Journal, State
from smartcache.store.layout import Layout
from smartcache.training.table import SourceTable
from tests.hub_server import Hub
from tests.hub_server.pipelines import Models

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(page for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")] if page.exists())

LIBRARY_WARNING = "ignore:The `local_dir_use_symlinks` argument is deprecated:UserWarning"
"""diffusers 0.42 passes an argument that huggingface_hub 2 no longer has."""

needs_cli = pytest.mark.skipif(
    importlib.util.find_spec("smartcache.cli") is None, reason="smartcache.cli does not exist"
)


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Line number and text of every fenced block of a language."""
    inside: str | None = None
    start, lines = 0, list[str]()
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence = re.match(r"^(`{3,})\s*(\S*)", line)
        if fence and inside is None:
            inside, start, lines = fence[2], number + 1, []
        elif fence and not fence[2]:
            if inside == language:
                yield start, "\n".join(lines)
            inside = None
        else:
            lines.append(line)
    assert inside is None, f"{page.name}: the block at line {start - 1} does not end"


def python_of(page: Path) -> str:
    """All Python of a page, each line at its own line number."""
    source = list[str]()
    for start, text in blocks(page, "python"):
        source += [""] * (start - 1 - len(source)) + text.splitlines()
    return "\n".join(source)


def make_files(directory: Path) -> None:
    """What the examples may use: equal model files and another, last changed a day ago."""
    data = random.Random(0).randbytes(200_000)
    day_ago = 86_400
    for name, content in {
        "model.safetensors": data,
        "copy.safetensors": data,
        "other.safetensors": data[::-1],
        "ComfyUI/models/a.safetensors": data * 6,
        "webui/models/b.safetensors": data * 6,
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        then = path.stat().st_mtime - day_ago
        os.utime(path, (then, then))


def make_photos(directory: Path) -> None:
    """What the examples may train on: images of two proportions, and captions."""
    from PIL import Image

    directory.mkdir()
    for number, name in enumerate(("cat", "dog", "fox", "hen", "owl", "pig")):
        size = (48, 32) if number % 2 else (32, 32)
        Image.new("RGB", size, (40 * number, 90, 10)).save(directory / f"{name}.png")
        (directory / f"{name}.txt").write_text(f"a {name}")


def make_repos(hub: Hub) -> None:
    """What the examples may download."""
    encoder, *unets = (random.Random(seed).randbytes(150_000) for seed in range(3))
    for name, unet in zip(("org/pipeline", "org/other-pipeline"), unets, strict=True):
        hub.add(name, {
            "model_index.json": name.encode(),
            "text_encoder/model.safetensors": encoder,
            "unet/diffusion_pytorch_model.safetensors": unet,
        })  # fmt: skip


def make_models_repos(hub: Hub, models: Models) -> None:
    """What the examples may load: the same two names, with real models behind them."""
    hub.add_folder("org/pipeline", models.first)
    hub.add_folder("org/other-pipeline", models.second)
    hub.add_folder("org/language-model", models.language)


def loads_models(page: Path) -> bool:
    """Whether diffusers or transformers have something to do on a page."""
    return "from_pretrained" in python_of(page) or "load_encoders" in python_of(page)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.torch] if loads_models(page) else [])
        for page in PAGES
        if python_of(page)
    ],
)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, hub: Hub, request: pytest.FixtureRequest
) -> None:
    """From top to bottom in one namespace, with the files of `make_files` and a Hub of two repos.

    "org/pipeline" and "org/other-pipeline" have the same text encoder.
    """
    make_files(tmp_path)
    if page.name in ("training.md", "trainers.md", "ray.md"):
        make_photos(tmp_path / "photos")
    for _, module in blocks(page, "py"):
        (tmp_path / "encoders.py").write_text(module)
    if loads_models(page):
        make_models_repos(hub, request.getfixturevalue("models"))
    else:
        make_repos(hub)
    runner = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", LIBRARY_WARNING, "-c", runner, page.name],
        input=python_of(page),
        cwd=tmp_path,
        env={**os.environ, **hub.environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def demo_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What scripts/demo --full prints, run where nothing else is."""
    room = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/_demo.py"), "--full"],
        env={**os.environ, "TMPDIR": str(room)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert list(room.iterdir()) == []
    return done.stdout


@needs_cli
def test_the_demo_proves_that_every_file_is_what_it_was(demo_output: str) -> None:
    assert "every byte, mode, owner and time is\nthe same" in demo_output


@needs_cli
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="no diffusers here")
def test_the_demo_loads_two_pipelines_that_share_what_is_equal(demo_output: str) -> None:
    lines = demo_output.splitlines()
    sent = [line.rpartition(":")[2] for line in lines if "the Hub sent" in line]
    assert sent == [" text_encoder, unet, vae", " unet"]
    assert "(True, True, False)" in lines


@needs_cli
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="no diffusers here")
def test_the_demo_encodes_one_text_and_no_latent_after_the_edit_of_a_caption(
    demo_output: str,
) -> None:
    _, first, second = demo_output.split(">>> print(photos.build())\n")
    assert first.startswith("encoded 8 latent, 7 text; shared 1 text\n")
    assert "8 items: 7 ready; 1 text to encode (edited)\n" in first
    assert second.startswith("encoded 1 text; reused 8 latent, 7 text\n")
    assert re.search(r"^photos +8 +8 +latent, text ", second, re.MULTILINE)


@needs_cli
def test_the_output_in_the_readme_is_that_of_the_demo(demo_output: str) -> None:
    """Line by line and in this order; `...` stands for lines that are left out."""
    if "freed at most" in demo_output:
        pytest.skip("root shares blocks on this filesystem instead of files")
    rest = iter(demo_output.splitlines())
    texts = [text.splitlines() for _, text in blocks(ROOT / "README.md", "console")]
    with_output = [text for text in texts if not all(line.startswith("$") for line in text)]
    shown = [line for text in with_output for line in text if line != "..."]
    assert shown
    assert not [line for line in shown if line not in rest]


def terminal_commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Every `$ smartcache ...` line, split into words."""
    for start, text in blocks(page, "console"):
        for number, line in enumerate(text.splitlines(), start):
            if line.startswith("$ smartcache"):
                yield number, shlex.split(line.removeprefix("$ "), comments=True)


@needs_cli
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(terminal_commands(page))], ids=lambda page: page.name
)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    from smartcache.cli import main

    wrong = {
        f"{page.name}:{number}": problem
        for number, words in terminal_commands(page)
        if (problem := unknown_word(main, words[1:]))
    }
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_of_this_project_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:scripts|tests|smartcache)/[\w./-]+)`", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def unknown_word(command: click.Command, words: list[str]) -> str | None:
    """The first command or option that does not exist."""
    import click

    known = {name for parameter in command.params for name in parameter.opts}
    known |= {name for parameter in command.params for name in parameter.secondary_opts}
    for position, word in enumerate(words):
        if word in {"|", ">", "&&", ";"}:
            break
        if word.startswith("-") and word.partition("=")[0] not in {*known, "-h", "--help"}:
            return word
        if isinstance(command, click.Group) and not word.startswith("-"):
            child = command.get_command(click.Context(command), word)
            return word if child is None else unknown_word(child, words[position + 1 :])
    return None


@needs_cli
def test_every_command_is_in_the_reference_as_its_help_prints_it() -> None:
    command = [sys.executable, str(ROOT / "scripts/docs_cli.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_cli
def test_the_reference_has_a_heading_for_every_command() -> None:
    import click

    from smartcache.cli import main

    page = (ROOT / "docs/cli.md").read_text("utf-8")
    headings = set(re.findall(r"^## (.+)$", page, re.MULTILINE))

    def below(group: click.Group, path: str) -> Iterator[str]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if command is not None and not command.hidden:
                yield f"{path} {name}"
                if isinstance(command, click.Group):
                    yield from below(command, f"{path} {name}")

    names = set(below(main, "smartcache"))
    assert "smartcache folders add" in names
    assert {"smartcache"} | names == headings


class TestOnDiskFormat:
    PAGE = ROOT / "docs/on-disk-format.md"

    def section(self, heading: str) -> str:
        """The text under a heading, up to the next one."""
        _, _, rest = self.PAGE.read_text("utf-8").partition(f"\n{heading}\n")
        return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]

    def described(self, schema: str, heading: str) -> dict[str, str]:
        """By column of each table of a schema: what the row of its table says under a heading."""
        rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", self.section(heading), re.MULTILINE))
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.executescript(schema)
            columns = database.execute(
                "SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c "
                "WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"
            ).fetchall()
        assert columns
        return {f"{table}.{column}": rows.get(table, "") for table, column in columns}

    @pytest.mark.parametrize(
        ("schema", "heading"),
        [
            (Catalog.schema, "## index.sqlite3"),
            (SetIndex.schema, "## sets/"),
            (SourceTable.schema, "### A dataset"),
        ],
    )
    def test_every_table_and_column_is_described(self, schema: str, heading: str) -> None:
        found = self.described(schema, heading)
        assert not [
            name for name, text in found.items() if f"`{name.partition('.')[2]}`" not in text
        ]

    def test_every_entry_of_the_root_is_described(self, tmp_path: Path) -> None:
        Layout(tmp_path / "store").create()
        entries = [
            f"{entry.name}/" if entry.is_dir() else entry.name
            for entry in (tmp_path / "store").iterdir()
        ]
        assert entries
        assert not [name for name in entries if not self.section(f"## {name}").strip()]

    def test_every_column_and_word_of_the_journal_is_described(self) -> None:
        text = self.section("## journal.sqlite3, journal.copy")
        columns = {name.partition(".")[2] for name in self.described(Journal.schema, "## lock")}
        words = {*columns, *get_args(How), *get_args(State)}
        assert not [word for word in words if f"`{word}`" not in text]
