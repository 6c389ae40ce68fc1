"""Showing and changing the settings: `config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli import _completion
from smartcache.cli._command import command, group
from smartcache.cli._output import out
from smartcache.cli._tables import Column

if TYPE_CHECKING:
    from smartcache.cli._session import Session
    from smartcache.config import Resolved

_COLUMNS = (Column(title="SETTING"), Column(title="VALUE", gives_way=True), Column(title="FROM"))


@group(
    "config",
    examples=(
        ("smartcache config list", "every setting, its value, and where that comes from"),
        ("smartcache config set lock_timeout 5m", "written to the file"),
        ("smartcache config unset lock_timeout", "the default again"),
    ),
)
def config_command() -> None:
    """Show and change the settings.

    An argument wins over a variable, a variable over the file, the file over the default.
    """


@command(
    "list",
    examples=(
        ("smartcache config list", "every setting, its value, and where that comes from"),
        ("smartcache config list --json", "for programs"),
    ),
)
@click.pass_obj
def list_command(session: Session) -> None:
    """List every setting with its value, and where that comes from."""
    from smartcache.config import config_file, resolve

    found = resolve(home=session.home)
    path = config_file()

    def human() -> None:
        rows = ([name, _shown(each.value), _from(each)] for name, each in found.items())
        out.table(_COLUMNS, rows)
        out.talk(f"The file is {path}{'' if path.exists() else ', which does not exist yet'}.")

    out.show(
        human=human,
        document=lambda: {
            "file": path,
            "settings": [_document(name, each) for name, each in found.items()],
        },
        ids=lambda: found,
    )


@command("get", examples=(("smartcache config get home", "where the store is"),))
@click.argument("name", metavar="SETTING", shell_complete=_completion.settings)
@click.pass_obj
def get_command(session: Session, *, name: str) -> None:
    """Print the value of one setting."""
    from smartcache.config import refuse_unknown, resolve

    refuse_unknown([name], "config")
    found = resolve(home=session.home)[name]
    out.show(
        human=lambda: out.line(_shown(found.value)),
        document=lambda: _document(name, found),
        ids=lambda: [_shown(found.value)],
    )


@command(
    "set",
    examples=(
        ("smartcache config set threads 4", "a number"),
        ("smartcache config set artifacts_max_size 200GB", "a size"),
    ),
)
@click.argument("name", metavar="SETTING", shell_complete=_completion.settings)
@click.argument("values", metavar="VALUE...", nargs=-1, required=True)
@click.pass_obj
def set_command(session: Session, *, name: str, values: tuple[str, ...]) -> None:
    """Write a setting to the config file.

    Comments and the order of the file stay. A relative path starts in the current folder.
    """
    _write(session, name, values)


@command("unset", examples=(("smartcache config unset threads", "the default again"),))
@click.argument("name", metavar="SETTING", shell_complete=_completion.settings)
@click.pass_obj
def unset_command(session: Session, *, name: str) -> None:
    """Take a setting out of the config file."""
    _write(session, name, None)


def _write(session: Session, name: str, values: tuple[str, ...] | None) -> None:
    from smartcache.config import resolve, write_setting

    path = write_setting(name, values)
    found = resolve(home=session.home)[name]
    if found.source not in ("file", "default"):
        out.warn(f"{_from(found)} wins over the file: {name} is {_shown(found.value)}")
    out.show(
        human=lambda: out.line(f"{name} is {_shown(found.value)} ({_from(found)})."),
        document=lambda: {"file": path, **_document(name, found)},
        ids=lambda: [name],
    )


@command(
    "path",
    examples=(("smartcache config path", "the file that 'config set' writes"),),
)
def path_command() -> None:
    """Print the path of the config file, whether or not it exists."""
    from smartcache.config import config_file

    path = config_file()
    out.show(
        human=lambda: out.names([path]),
        document=lambda: {"file": path, "exists": path.exists()},
        ids=lambda: [path],
    )


for _each in (list_command, get_command, set_command, unset_command, path_command):
    config_command.add_command(_each)


def _document(name: str, found: Resolved) -> dict[str, object]:
    from smartcache.config import SETTINGS

    return {
        "name": name,
        "value": found.value,
        "source": found.source,
        "variable": SETTINGS[name].variable,
    }


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _from(found: Resolved) -> str:
    words = {"argument": "--home", "variable": found.place, "file": "file", "default": "default"}
    return words[found.source]
