"""What is said about the commands is true, and saying it costs nothing."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click

import smartcache
from smartcache.cli import main
from smartcache.cli._command import Command, Group
from tests.cli.running import ROOT, Here

CONTEXT = click.Context(main)
NAMES = main.list_commands(CONTEXT)


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command meant by the first words, and the words that follow."""
    command: click.Command = main
    while isinstance(command, click.Group):
        found = command.get_command(CONTEXT, words[0])
        assert found is not None, words
        command, words = found, words[1:]
        if not words:
            break
    return command, words


def leaves() -> list[str]:
    """Every command that does something: "ls", "folders add"."""
    found = []
    for name in NAMES:
        command, _ = find([name])
        below = [""]
        if isinstance(command, click.Group):
            below = command.list_commands(click.Context(command))
        found += [f"{name} {each}".strip() for each in below]
    return found


LEAVES = leaves()


def load(name: str) -> Command | Group:
    command, rest = find(name.split())
    assert isinstance(command, Command | Group)
    assert not rest
    return command


def test_without_a_command_a_status_is_shown_and_no_store_made(sc: Here, home: Path) -> None:
    done = sc()
    assert f"none yet; it will be at {home}" in done.stdout
    assert "Next: 'smartcache scan'" in done.stdout
    assert not home.exists()
    assert sc("-h").stdout == sc("--help").stdout


def test_the_status_says_what_is_stored_saved_and_waiting(sc: Here, models: Path) -> None:
    sc("add", "--adopt", models / "a.safetensors")
    sc("add", "--no-pin", models / "sub" / "c.gguf")
    rows = dict(line.split(None, 1) for line in sc().stdout.splitlines()[:4] if line)
    assert rows["Stored"].endswith("in 2 files")
    assert "Can be undone  1 entry" in sc().stdout
    assert "Next: 'smartcache prune'" in sc().stdout


def test_the_help_text_has_the_commands_in_groups(sc: Here) -> None:
    lines = sc("-h").stdout.splitlines()
    titles = [line for line in lines if re.fullmatch(r"[A-Z][A-Za-z ]+:", line)]
    groups = ["Find and free:", "Hugging Face:", "Other machines:", "Computed tensors:", "Store:"]
    assert titles == ["Options:", *groups, "Settings and help:"]


def test_the_version_is_the_one_of_the_package(sc: Here) -> None:
    assert sc("--version").stdout == f"smartcache {smartcache.__version__}\n"


def test_the_list_says_what_the_commands_say(sc: Here) -> None:
    """The list is written down twice, so that the help text need not load the commands."""
    lines = [line.split(maxsplit=1) for line in sc("--help").stdout.splitlines() if line.strip()]
    listed = {words[0]: words[-1] for words in lines if words[0] in NAMES}
    assert listed == {name: (load(name).help or "").splitlines()[0] for name in NAMES}


def test_every_command_has_help_with_examples_and_the_common_options(sc: Here) -> None:
    for name in LEAVES:
        text = sc(*name.split(), "-h").stdout
        assert text == sc(*name.split(), "--help").stdout
        assert text.startswith(f"Usage: smartcache {name} ")
        for part in ("Examples:", "--json", "-q, --quiet"):
            assert part in text, name


def test_a_command_with_commands_below_lists_them_with_examples(sc: Here) -> None:
    text = sc("folders", "-h").stdout
    assert text == sc("folders").stdout == sc("folders", "--help").stdout
    assert text.startswith("Usage: smartcache folders ")
    listed = text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == ["add", "ls", "rm", "ignore"]
    assert "Examples:" in text


def test_every_example_can_be_typed() -> None:
    lines = [line for name in (*LEAVES, "folders") for line, _ in load(name).examples]
    assert len(lines) > len(LEAVES)
    for line in lines:
        inner = line.partition("$(")[2].partition(")")[0]
        outer = line.replace(f"$({inner})", "ID") if inner else line
        for text in filter(None, (inner, outer)):
            words = shlex.split(text)
            if words[0] == "smartcache":
                command, rest = find(words[1:])
                command.make_context(command.name, rest, resilient_parsing=False, obj=None)


def test_bad_usage_is_one_line_and_a_hint(sc: Here) -> None:
    for line, message, hint in (
        ("prun", "No such command 'prun'. Did you mean 'prune'?", "'smartcache -h' shows"),
        ("--nonsense", "No such option", "'smartcache -h' shows"),
        ("ls --nonsense", "No such option", "'smartcache ls -h' shows"),
        ("folders ad", "No such command 'ad'. Did you mean 'add'?", "'smartcache folders -h'"),
        ("folders add", "Missing argument 'PATH...'", "'smartcache folders add -h'"),
        ("scan --program x", "no program is called 'x'", "The programs are Hugging Face"),
        ("scan --min-size x", "not a size: 'x'", "500MB"),
        ("dedup --allow all", "Invalid value for '--allow'", "'smartcache dedup -h'"),
        ("scan -n", "No such option", "'smartcache scan -h' shows"),
        ("scan --groups", "requires an argument", "'smartcache scan -h' shows"),
        ("ls word", "Got unexpected extra argument", "'smartcache ls -h' shows"),
        ("add", "Missing argument 'FILE...'", "'smartcache add -h' shows"),
        ("ls --json -q", "--json excludes --quiet and --null", "'smartcache ls -h'"),
        ("ls -0 --json", "--json excludes --quiet and --null", "'smartcache ls -h'"),
        ("ls --limit many", "Invalid value for '--limit'", "'smartcache ls -h'"),
    ):
        done = sc(*line.split(), code=2)
        assert done.stdout == ""
        assert message in done.error
        assert hint in done.hint


def run_python(code: str) -> list[str]:
    """Run code; return the words of the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1].split()


def test_the_help_text_loads_no_command_no_store_and_little_besides_click() -> None:
    """Counted in modules, because time cannot be asserted: a few more than click alone."""
    code = "from smartcache.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    loaded = run_python(f"{code}\nprint(*sys.modules)")
    ours = {name for name in loaded if "smartcache" in name}
    assert ours == {"smartcache", "smartcache.cli", "smartcache.cli._session"}
    assert len(loaded) <= len(run_python("import click; print(*sys.modules)")) + 15


def test_the_help_of_no_command_loads_what_only_its_work_needs() -> None:
    """What costs time at the start: `scripts/bench/startup.py` measures it."""
    code = (
        "from smartcache.cli import main\n"
        f"for name in {LEAVES!r}:\n"
        "    try: main([*name.split(), '-h'])\n"
        "    except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    loaded = run_python(code)
    layers = ("store", "folders", "hub", "artifacts", "report", "training", "pretrained")
    below = (*(f"{layer}." for layer in layers), "cache", "config")
    ours = tuple(f"smartcache.{name}" for name in below)
    others = ("huggingface_hub", "tqdm", "numpy", "sqlite3", "logging", "json", "pathlib")
    assert [name for name in loaded if name.startswith((*ours, *others))] == []
