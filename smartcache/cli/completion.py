"""The script that completes commands in a shell: `completion`."""

from __future__ import annotations

import click

from smartcache.cli._command import command
from smartcache.cli._output import out

_RC_LINES = {
    "bash": 'eval "$(smartcache completion bash)"',
    "zsh": 'eval "$(smartcache completion zsh)"',
    "fish": "smartcache completion fish | source",
}
"""What goes into ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish."""


@command(
    "completion",
    examples=(
        ('eval "$(smartcache completion bash)"', "the line for ~/.bashrc"),
        ('eval "$(smartcache completion zsh)"', "for ~/.zshrc, after compinit"),
        ("smartcache completion fish", "with '| source' after it: ~/.config/fish/config.fish"),
    ),
)
@click.argument("shell", type=click.Choice(list(_RC_LINES)))
@click.pass_context
def completion_command(ctx: click.Context, *, shell: str) -> None:
    """Print the script that completes commands in a shell."""
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # noqa: S101 - for the type checker: click knows all three
    script = made(ctx.find_root().command, {}, "smartcache", "_SMARTCACHE_COMPLETE").source()
    out.show(
        human=lambda: out.source(script),
        document=lambda: {"shell": shell, "script": script, "line": _RC_LINES[shell]},
        ids=lambda: [_RC_LINES[shell]],
    )
