"""The settings in force, and the file to edit: `config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._command import command
from smartcache.cli._output import out

if TYPE_CHECKING:
    from smartcache.cli._session import Session
    from smartcache.config import Resolved

_COLUMNS = ("SETTING", "VALUE~", "FROM")


@command(
    "config",
    examples=(
        ("smartcache config", "every setting, its value, and where it comes from"),
        ('$EDITOR "$(smartcache config -q)"', "edit the file"),
    ),
)
@click.pass_obj
def config_command(session: Session) -> None:
    """Show the settings, and the file to edit.

    An argument wins over a variable, a variable over the file, the file over the default. To change
    a setting, write a line such as 'threads = 4' to the file. With -q, prints the path of the file.
    """
    from smartcache.config import config_file, resolve

    found = resolve(home=session.home)
    path = config_file()

    def human() -> None:
        rows = ([name, _shown(each.value), _from(each)] for name, each in found.items())
        out.table(_COLUMNS, rows)
        verb = "edit" if path.exists() else "create"
        out.talk(f"To change a setting, {verb} {path}: threads = 4")

    out.show(
        human=human,
        document=lambda: {
            "file": path,
            "exists": path.exists(),
            "settings": [_document(name, each) for name, each in found.items()],
        },
        ids=lambda: [path],
    )


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
