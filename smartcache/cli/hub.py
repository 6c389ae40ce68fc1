"""The group `smartcache hub`; each of its commands has a module of its own, loaded when called."""

from __future__ import annotations

from importlib import import_module

import click

from smartcache.cli._command import Group, no_such_command

_COMMANDS = {
    "ls": ("hub_ls", "List the repos in HF caches with their own and shared bytes."),
    "rm": ("hub_rm", "Remove repos or revisions, and say what that truly frees."),
    "verify": ("hub_verify", "Compare the files of repos with the hashes the Hub announced."),
    "seed": ("hub_seed", "Fill huggingface_hub's shared blob store with links to blobs."),
    "export": ("hub_export", "Write repos to a folder or tar file, each blob once."),
    "import": ("hub_import", "Bring exported repos into the HF cache, verified."),
    "mapping": ("hub_mapping", "Print or read {sha256: path} of everything known."),
}
"""Command: its module and its short help, which must be the first sentence of its docstring."""


class HubGroup(Group):
    """Loads commands on demand: some of them import huggingface_hub."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help text."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"smartcache.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # noqa: S101 - for the type checker
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command meant by the first word, or suggest the nearest one."""
        found = self.get_command(ctx, args[0])
        if found is None:
            raise no_such_command(ctx, args[0], list(_COMMANDS))
        return args[0], found, args[1:]


hub_command = HubGroup(
    "hub",
    help="Look after the Hugging Face repos on this machine.",
    context_settings={"max_content_width": 100},
)
hub_command.examples = (
    ("smartcache hub ls", "repos, and what each shares"),
    ("smartcache hub verify", "every file against its announced hash, offline"),
    ("smartcache hub rm org/name", "remove a repo"),
)
