"""Write docs/cli.md, the command reference, from what `smartcache --help` prints.

With `--check`, write nothing, and exit with 1 if the page is not what would be written.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 88

INTRODUCTION = """\
<!-- Written by scripts/docs_cli.py: change the help texts, then run scripts/check --fix. -->

# Command line

The text of every command's `--help`.
"""


def commands(group: click.Command, parent: click.Context | None = None) -> Iterator[click.Context]:
    """A context for the command and, in the order of its help, for every visible one below it."""
    name = "smartcache" if parent is None else group.name
    settings = {**group.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(group, info_name=name, parent=parent, **settings)
    yield context
    if isinstance(group, click.Group):
        for child in group.list_commands(context):
            command = group.get_command(context, child)
            if command is not None and not command.hidden:
                yield from commands(command, context)


def render(main: click.Command) -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for context in commands(main):
        help_text = context.command.get_help(context).rstrip()
        parts.append(f"## {context.command_path}\n\n```text\n{help_text}\n```\n")
    return "\n".join(parts)


def run() -> int:
    """Write or compare the page; the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/cli.md from the help texts.")
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args()

    from smartcache.cli import main

    wanted = render(main)
    present = PAGE.read_text("utf-8") if PAGE.exists() else ""
    if present == wanted:
        print("docs/cli.md is up to date.")
        return 0
    if not arguments.check:
        PAGE.write_text(wanted, "utf-8")
        print("docs/cli.md written.")
        return 0
    old, new = present.splitlines(keepends=True), wanted.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(old, new, "docs/cli.md", "--help", n=1))
    print("Error: docs/cli.md is not what --help prints.", file=sys.stderr)
    print("Hint: run scripts/check --fix", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(run())
