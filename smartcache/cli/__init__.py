"""The `smartcache` command. Each subcommand is loaded when it is called, the help text loads none.

cli/__init__.py   the group, its global options, where each command lives
cli/_*.py         what commands share: options, session, words for errors, output, progress
cli/*.py          one file per group of commands
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

try:
    from smartcache import __version__
except ImportError:
    import sys

    from smartcache.errors import ONLY_THIS_PACKAGE

    sys.exit(f"Error: Another package called smartcache is in the way.\nHint: {ONLY_THIS_PACKAGE}")
from smartcache.cli._session import Session

if TYPE_CHECKING:
    from smartcache.cli._output import Colour

_SECTIONS = {
    "Find and free": {
        "scan": ("scan", "Find model folders and the duplicates in them."),
        "dedup": ("dedup", "Replace duplicate files by links, in place, undoably."),
        "undo": ("undo", "Give files back what they had before smartcache changed them."),
        "report": ("report", "Report what sharing saves, and what could still be freed."),
        "folders": ("folders", "Remember more folders to scan, list or forget them."),
    },
    "Hugging Face": {
        "download": ("download", "Download a repo without fetching what this machine already has."),
        "hub": ("hub", "Look after the Hugging Face repos on this machine."),
    },
    "Other machines": {
        "remote": ("remote", "Share models and tensors with other machines: NAS, S3, ...")
    },
    "Computed tensors": {
        "artifacts": ("artifacts", "Look after computed tensors, set by set."),
        "datasets": ("datasets", "Look after datasets: sources, and what was encoded of them."),
    },
    "Store": {
        "df": ("df", "Show what is on the disk, links counted once."),
        "ls": ("ls", "List the blobs in the store."),
        "add": ("add", "Bring files into the store."),
        "link": ("blobs", "Put a blob at a path."),
        "pin": ("blobs", "Keep blobs until they are unpinned."),
        "unpin": ("blobs", "Unpin blobs."),
        "rm": ("blobs", "Remove blobs that are not pinned."),
        "prune": ("prune", "Free what only smartcache has and nobody wants."),
        "verify": ("verify", "Compare blobs and artifacts with their checksums."),
        "eject": ("leave", "Give every file its own bytes back and remove the store."),
        "dir": ("ls", "Print where the store is."),
    },
    "Settings and help": {
        "config": ("config", "Show the settings, and the file to edit."),
        "completion": ("completion", "Print the script that completes commands in a shell."),
        "doctor": ("doctor", "Say what works here, what will be slow or unsafe, and why."),
    },
}
"""Command: its module and its short help, which must be the first sentence of its docstring."""

_COMMANDS = {name: each for section in _SECTIONS.values() for name, each in section.items()}


class Program(click.Group):
    """Loads commands on demand and turns every error into a line, a hint and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help text."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command by its name."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"smartcache.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # noqa: S101 - for the type checker
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command meant by the first word, or suggest the nearest one."""
        command = self.get_command(ctx, args[0])
        if command is not None:
            return args[0], command, args[1:]
        from smartcache.cli._command import no_such_command

        raise no_such_command(ctx, args[0], list(_COMMANDS))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        del ctx
        widest = max(map(len, _COMMANDS))
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:{widest}}", text) for name, (_, text) in commands.items()]
                )

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - as click has it
    ) -> click.Context:
        """Begin a run, under the name people type, also for `python -m smartcache`."""
        del info_name
        return super().make_context(self.name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the global options."""
        ctx.obj = session = Session()
        session.open_closed_streams()
        with session.reporting():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; whatever goes wrong is said in one line and becomes an exit code."""
        with ctx.ensure_object(Session).reporting():
            return super().invoke(ctx)


@click.command(
    "smartcache",
    cls=Program,
    invoke_without_command=True,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    help="Keep one copy of every model file and every computed tensor, no matter how many programs "
    "use it.",
    epilog="Without a command, a short status is printed. Every command has -h with examples, "
    "--json for programs, and -q or -0 for scripts.",
)
@click.option("--home", metavar="DIR", help="The store to use; default: $SMARTCACHE_HOME.")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colours: as NO_COLOR, FORCE_COLOR and the terminal say (auto), always or never.",
)
@click.option("--debug", is_flag=True, help="Show what is decided, and tracebacks of errors.")
@click.option("--json", "json_", is_flag=True, help="Without a command: what 'df --json' prints.")
@click.option("-q", "--quiet", is_flag=True, help="Without a command: what 'df -q' prints.")
@click.version_option(__version__, "--version", message="%(prog)s %(version)s")
@click.pass_context
def main(
    ctx: click.Context, home: str | None, color: Colour, debug: bool, json_: bool, quiet: bool
) -> None:
    """Read the global options; without a command, show the status."""
    session = ctx.ensure_object(Session)
    session.home = home
    session.debug = debug
    session.colour = color
    words = ["--json"] * json_ + ["-q"] * quiet
    if words and ctx.invoked_subcommand is not None:
        message = f"Write {' '.join(words)} after the command."
        raise click.UsageError(message, ctx=ctx)
    if words:
        df = main.get_command(ctx, "df")
        assert df is not None  # noqa: S101 - for the type checker
        with df.make_context("df", words, ctx) as inner:
            df.invoke(inner)
    elif ctx.invoked_subcommand is None:
        from smartcache.cli.status import show_status

        show_status(session)


__all__ = ["main"]
