"""The folders that are scanned, and what is left alone: `folders add`, `ls`, `rm`, `ignore`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, command, group
from smartcache.cli._folders import existing, warn_of
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import ago, counted
from smartcache.errors import StoreError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.folders.programs import Ignored, ModelFolder
    from smartcache.store.records import KnownFolder

_FOR_DOWNLOADS = "for downloads"
_GIVEN = "given"
_IGNORED = "ignored"
_COLUMNS = ("PROGRAM", "HOW", "FILES>", "SIZE>", "WALKED>", "FOLDER~")


@group(
    "folders",
    examples=(
        ("smartcache folders ls", "what 'smartcache scan' looks at"),
        ("smartcache folders add /mnt/models", "one more"),
        ("smartcache folders ignore ~/train", "never look there"),
    ),
)
def folders_command() -> None:
    """Remember more folders to scan, list or forget them.

    The folders of programs are found by themselves; what lies elsewhere is added here, and what is
    to be left alone is ignored.
    """


@command(
    "add",
    examples=(
        ("smartcache folders add /mnt/models", "scanned from now on"),
        ("smartcache folders add ~/work/*/checkpoints", "several"),
    ),
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=FILE)
@click.option("--force", is_flag=True, help="Take even a whole disk or home.")
@click.pass_obj
def add_command(session: Session, *, paths: tuple[Path, ...], force: bool) -> None:
    """Remember folders to scan.

    They count as given to smartcache: downloads may link the files in them instead of copying. No
    file is read or changed by this.
    """
    from pathlib import Path

    from smartcache.folders.programs import identify

    folders = [Path(os.path.realpath(path)) for path in existing(paths)]
    if not force:
        for folder in folders:
            _refuse_too_much(folder)
    with session.store(create=True) as store:
        added = {folder: identify(folder) for folder in folders}
        for folder, program in added.items():
            store.add_folder(folder, program=program)
    out.show(
        human=lambda: _say_added(added),
        document=lambda: {
            "folders": [{"path": path, "program": program} for path, program in added.items()]
        },
        ids=lambda: added,
    )


def _refuse_too_much(folder: Path) -> None:
    from pathlib import Path

    home = Path(os.path.realpath(Path.home()))
    if home.is_relative_to(folder):
        what = "your home" if folder == home else "all of a system"
        raise StoreError(
            f"{folder} is {what}, with much that is no model",
            hint="Name the folder with the models in it, or insist with --force.",
        )


def _say_added(added: dict[Path, str]) -> None:
    from smartcache.report.naming import from_home

    for folder, program in added.items():
        out.line(f"Added {from_home(folder)}{f' ({program})' if program else ''}.")
    out.talk("'smartcache scan' looks at it from now on.")


@command(
    "ls",
    examples=(
        ("smartcache folders ls", "what 'smartcache scan' looks at"),
        ("smartcache folders ls --json", "with full paths and integer bytes"),
    ),
)
@click.pass_obj
def ls_command(session: Session) -> None:
    """List the folders that are looked at, and what is ignored.

    Given ones were added by you, or named to 'smartcache dedup'; discovered ones belong to a
    program that was found: 'smartcache scan' and 'dedup' look at both. Those for downloads are only
    searched for files that a download can reuse. FILES and SIZE are those of the last walk.
    """
    from smartcache.folders.discover import discover_folders
    from smartcache.folders.programs import ignored
    from smartcache.folders.scan import downloads_folder
    from smartcache.store.records import KnownFolder

    found = discover_folders()
    left_alone = ignored()
    known: dict[Path, KnownFolder] = {}
    if session.has_store():
        with session.store() as store:
            known = {folder.path: folder for folder in store.folders()}
    scanned = {folder.path for folder in found.folders}
    for folder in (*found.folders, *downloads_folder()):
        if folder.path not in known:
            known[folder.path] = KnownFolder(
                path=folder.path, program=folder.program, is_given=False, walked_at=None, files=0,
                size=0,
            )  # fmt: skip
    rows = [(_how(each, scanned, left_alone), each) for each in known.values()]
    warn_of(found.warnings, ())
    out.show(
        human=lambda: _show(rows, left_alone.patterns),
        document=lambda: {
            "folders": [_document(each, how) for how, each in rows],
            "ignored": left_alone.patterns,
        },
        ids=lambda: known,
    )


def _how(folder: KnownFolder, scanned: set[Path], left_alone: Ignored) -> str:
    if left_alone.covers(folder.path):
        return _IGNORED
    if folder.path in scanned:  # 'dedup' notes those, too, as folders to link from
        return "discovered"
    return _GIVEN if folder.is_given else _FOR_DOWNLOADS


def _document(each: KnownFolder, how: str) -> dict[str, object]:
    document = picked(each, "path program is_given walked_at files size")
    return {"how": how, **document, "is_given": how == _GIVEN}


def _show(known: list[tuple[str, KnownFolder]], patterns: tuple[str, ...]) -> None:
    from smartcache.report.naming import from_home

    if not known:
        out.line("No folder is known, and no program's was found.")
        out.talk("'smartcache folders add PATH' adds one.")
    else:
        rows = (
            [
                each.program or "-",
                how,
                "-" if each.walked_at is None else f"{each.files:,}",
                "-" if each.walked_at is None else format_size(each.size),
                "never" if each.walked_at is None else ago(each.walked_at),
                from_home(each.path),
            ]
            for how, each in known
        )
        out.table(_COLUMNS, rows)
    for pattern in patterns:
        out.line(f"Ignored: {pattern}")
    if any(how == _FOR_DOWNLOADS for how, _ in known):
        out.talk(
            "Folders for downloads are looked at for downloads only: 'scan' and 'dedup' leave them "
            "alone unless you name them."
        )


@command(
    "rm", examples=(("smartcache folders rm /mnt/models", "forget it; its files stay as they are"),)
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=FILE)
@click.pass_obj
def rm_command(session: Session, *, paths: tuple[Path, ...]) -> None:
    """Forget folders.

    No file is touched, and what was linked stays linked. The folder of a program that is still
    there will be discovered again.
    """
    with session.store() as store:
        known = {folder.path for folder in store.folders()}
        folders = [_meant(path, known) for path in paths]
        for folder in folders:
            store.drop_folder(folder)
    out.show(
        human=lambda: out.line(f"Forgot {counted(len(folders), 'folder')}; no file was touched."),
        document=lambda: {"folders": [{"path": path} for path in folders]},
        ids=lambda: folders,
    )


def _meant(path: Path, known: set[Path]) -> Path:
    """Return the known folder a user means; it may be gone from the disk."""
    from pathlib import Path

    for each in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        if each in known:
            return each
    raise StoreError(f"{path} is not remembered", hint="'smartcache folders ls' shows what is.")


@command(
    "ignore",
    examples=(
        ("smartcache folders ignore ~/train", "no scan, dedup or download looks there any more"),
        ("smartcache folders ignore '*.ckpt' 'old-*'", "files and folders by name"),
        ("smartcache folders ignore --remove ~/train", "look there again"),
    ),
)
@click.argument("words", metavar="FOLDER|PATTERN...", nargs=-1, required=True, type=FILE)
@click.option("--remove", is_flag=True, help="Ignore it no longer.")
@click.pass_obj
def ignore_command(session: Session, *, words: tuple[Path, ...], remove: bool) -> None:
    """Leave folders alone for good.

    A pattern matches a name or a path of a file or folder; quote it, so that the shell leaves it as
    it is. No file is touched, and what was linked stays linked.
    """
    from smartcache.folders.programs import ignore, ignored
    from smartcache.folders.scan import look

    patterns = ignore([str(word) for word in words], remove=remove)
    if session.has_store():
        with session.store() as store:
            # What was seen there is forgotten at once: a download might use it.
            look(store, [_as_seen(each) for each in store.folders()], progress=bars)
    verb = "No longer ignored" if remove else "Ignored"
    out.show(
        human=lambda: _say_ignored(verb, patterns),
        document=lambda: {"patterns": patterns, "ignored": ignored().patterns},
        ids=lambda: patterns,
    )


def _say_ignored(verb: str, patterns: list[str]) -> None:
    for pattern in patterns:
        out.line(f"{verb}: {pattern}")


def _as_seen(each: KnownFolder) -> ModelFolder:
    from smartcache.folders.programs import ModelFolder

    return ModelFolder(path=each.path, program=each.program, is_given=each.is_given)


for _command in (add_command, ls_command, rm_command, ignore_command):
    folders_command.add_command(_command)
