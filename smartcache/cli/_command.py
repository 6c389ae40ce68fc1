"""What all commands have in common: their options, their examples, and the shape of a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

import click
from click.core import augment_usage_errors

from smartcache.cli._failures import BadValueError
from smartcache.cli._output import Mode, out
from smartcache.cli._session import Session
from smartcache.errors import ConfigError
from smartcache.sizes import parse_age, parse_size

if TYPE_CHECKING:
    import logging
    from datetime import timedelta
    from pathlib import Path

_F = TypeVar("_F", bound=Callable[..., object])

_ARGUMENTS = "smartcache.arguments"
_SETTINGS = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}
_TYPED = click.core.ParameterSource.COMMANDLINE


class _File(click.Path):
    """A path as it was typed: what is wrong with it is said by whoever uses it, not by click.

    An empty one (of an unset variable) is not the current folder, but an error.
    """

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return a `Path`, whose module the help text does not need."""
        from pathlib import Path

        del param, ctx
        word = os.fsdecode(value)  # type: ignore[arg-type]  # a word, or a default
        if not word:
            raise BadValueError(
                "A path is empty", hint="Check the variable it came from; '.' is this folder."
            )
        return Path(word)


FILE = _File(readable=False)


class Command(click.Command):
    """A command whose help ends with examples, and whose messages go through `out`."""

    examples: tuple[tuple[str, str], ...] = ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        del ctx
        _write_examples(self.examples, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Forget how an earlier run in this process talked, then read the options."""
        out.begin(ctx.ensure_object(Session).colour)
        ctx.meta[_ARGUMENTS] = tuple(args)
        with augment_usage_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command with the warnings of the library shown."""
        session = ctx.ensure_object(Session)
        import logging

        logger = logging.getLogger("smartcache")
        handler = logging.Handler(logging.DEBUG if session.debug else logging.WARNING)
        told: set[str] = set()
        handler.emit = lambda record: _tell(record, told)  # type: ignore[method-assign]
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(handler.level)
        try:
            with augment_usage_errors(ctx):
                return super().invoke(ctx)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


class Group(click.Group):
    """A command with commands below it; without one it shows its help."""

    examples: tuple[tuple[str, str], ...] = ()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order they were added."""
        del ctx
        return list(self.commands)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        del ctx
        _write_examples(self.examples, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the command; without one, show the help text."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command meant by the first word, or suggest the nearest one."""
        found = self.get_command(ctx, args[0])
        if found is None:
            raise no_such_command(ctx, args[0], self.list_commands(ctx))
        return args[0], found, args[1:]


class LazyGroup(Group):
    """A group whose commands are modules, loaded when they are called: some import much."""

    modules: Mapping[str, tuple[str, str]]
    """Command: its module and its short help, which must be the first sentence of its docstring."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help text."""
        del ctx
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        del ctx
        if cmd_name not in self.modules:
            return None
        module = import_module(f"smartcache.cli.{self.modules[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # noqa: S101 - for the type checker
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.modules.items()])


def no_such_command(ctx: click.Context, word: str, known: list[str]) -> click.UsageError:
    """Return the error for a command that does not exist, with the nearest that does."""
    from difflib import get_close_matches  # for the hint alone

    near = get_close_matches(word, known, n=1)
    question = f" Did you mean {near[0]!r}?" if near else ""
    return click.UsageError(f"No such command {word!r}.{question}", ctx=ctx)


def _write_examples(examples: tuple[tuple[str, str], ...], formatter: click.HelpFormatter) -> None:
    """Write examples unwrapped, so that they can be copied."""
    widest = max(len(line) for line, _ in examples)
    with formatter.section("Examples"):
        for line, text in examples:
            formatter.write(f"  {line:{widest}}  # {text}\n")


def _tell(record: logging.LogRecord, told: set[str]) -> None:
    """Send a line of the library's log to whoever watches; a warning once."""
    import logging

    if record.levelno >= logging.WARNING:
        if record.getMessage() not in told:
            out.warn(record.getMessage())
        told.add(record.getMessage())
    else:
        out.trace(f"{record.levelname.title()}: {record.getMessage()}")


def command(name: str, *, examples: tuple[tuple[str, str], ...]) -> Callable[[_F], Command]:
    """Make a function a command with the options every command has."""

    def decorate(function: _F) -> Command:
        made = click.command(name, cls=Command, context_settings=_SETTINGS)(function)
        made.examples = examples
        made.params += _common()
        return made

    return decorate


def group(name: str, *, examples: tuple[tuple[str, str], ...]) -> Callable[[_F], Group]:
    """Make a function a command that has commands below it."""

    def decorate(function: _F) -> Group:
        made = click.group(name, cls=Group, context_settings=_SETTINGS)(function)
        made.examples = examples
        return made

    return decorate


def lazy_group(
    name: str,
    *,
    text: str,
    modules: Mapping[str, tuple[str, str]],
    examples: tuple[tuple[str, str], ...],
) -> LazyGroup:
    """Return a command whose commands are loaded when they are called."""
    made = LazyGroup(name, help=text, context_settings=_SETTINGS)
    made.modules = modules
    made.examples = examples
    return made


def _common() -> list[click.Parameter]:
    options = (
        (["--json", "json_"], "Print one JSON document."),
        (["-q", "--quiet"], "Print ids only, one per line."),
        (["-0", "--null"], "Like -q, each id ended by a NUL byte, for 'xargs -0'."),
    )
    return [
        click.Option(names, is_flag=True, expose_value=False, callback=_set_mode, help=text)
        for names, text in options
    ]


def _set_mode(_: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value:
        return
    wanted: Mode = "json" if parameter.name == "json_" else "quiet"
    if out.mode not in ("human", wanted):
        raise click.UsageError("--json excludes --quiet and --null.")
    out.mode = wanted
    out.ends_with_nul |= parameter.name == "null"


def same_options(name: str, like: click.Context, *names: str, more: Sequence[str] = ()) -> str:
    """Return the command line of another command with some options and arguments of this one.

    As they were typed, so that the user can paste it; and `more` options.
    """
    import shlex

    typed, _, _ = like.command.make_parser(like).parse_args(list(like.meta[_ARGUMENTS]))
    home = like.ensure_object(Session).home
    start = ["smartcache", *(["--home", str(home)] if home is not None else []), name]
    words = [*more]
    arguments: list[str] = []
    for each in like.command.params:
        if each.name not in names or like.get_parameter_source(each.name) is not _TYPED:
            continue
        value = typed[each.name]
        if isinstance(each, click.Argument):
            arguments += value
        elif isinstance(value, bool):
            words.append((each.opts if value else each.secondary_opts)[0])
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [each.opts[0], one]
    if any(word.startswith("-") for word in arguments):
        return shlex.join([*start, *words, "--", *arguments])
    return shlex.join([*start, *arguments, *words])


def dry_run(function: _F) -> _F:
    """Add --dry-run: show what would be done."""
    return click.option(
        "-n", "--dry-run", "dry_run", is_flag=True, help="Show what would be done; change nothing."
    )(function)


def asks(function: _F) -> _F:
    """Add --dry-run, and --yes to a command that shows its plan and asks."""
    return dry_run(
        click.option("-y", "--yes", is_flag=True, help="Do it without asking.")(function)
    )


def size(text: str) -> int:
    """Read the value of an option that is a size."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise BadValueError(error.message, hint=error.hint) from None


def age(text: str) -> timedelta:
    """Read the value of an option that is an age."""
    try:
        return parse_age(text)
    except ConfigError as error:
        raise BadValueError(error.message, hint=error.hint) from None
