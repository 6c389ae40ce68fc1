"""Words and exit codes for what can go wrong."""

from __future__ import annotations

import errno
import os
import sqlite3

import click
import pytest

from smartcache.cli import _failures
from smartcache.cli._failures import conclude, explain
from smartcache.cli._session import Session
from smartcache.errors import ConfigError, DamagedBlobError, NoSpaceError


def system(number: int, name: str | bytes | None = "x.pt") -> OSError:
    return OSError(number, os.strerror(number), name)


def test_every_error_has_a_message_a_hint_and_a_code() -> None:
    for error, message, code in (
        (NoSpaceError("The disk is full"), "The disk is full", 1),
        (DamagedBlobError("Blob x is damaged"), "Blob x is damaged", 1),
        (ConfigError("not a size: 'x'", hint="Write a size."), "not a size: 'x'", 2),
        (click.UsageError("No such option"), "No such option", 2),
        (system(errno.ENOENT), "No such file: x.pt", 1),
        (system(errno.EACCES), "Permission denied: x.pt", 1),
        (system(errno.EPERM), "Operation not permitted: x.pt", 1),
        (system(errno.EISDIR), "Is a directory: x.pt", 1),
        (system(errno.ENOTDIR), "Not a directory: x.pt", 1),
        (system(errno.ENOSPC), "No space left: x.pt", 1),
        (system(errno.EROFS), "Read-only filesystem: x.pt", 1),
        (system(errno.EIO), "Input/output error: x.pt", 1),
        (system(errno.ENOENT, b"\xff.pt"), "No such file: \udcff.pt", 1),
        (sqlite3.OperationalError("database is locked"), "The index cannot be used: ", 1),
        (MemoryError(), "Out of memory", 1),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", 1),
    ):
        told, hint, found = explain(error)
        assert (told[: len(message)], bool(hint), found) == (message, True, code)


def test_an_error_without_a_file_is_told_as_it_is() -> None:
    assert explain(OSError("odd"))[0] == "odd"


def test_an_abort_needs_no_hint() -> None:
    assert explain(click.Abort()) == ("Aborted; nothing was changed", "", 1)


def test_a_second_interrupt_while_things_are_set_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    session = Session()
    monkeypatch.setattr(session, "set_right", interrupt)
    with pytest.raises(click.exceptions.Exit) as end:
        conclude(KeyboardInterrupt(), session)
    assert end.value.exit_code == _failures.INTERRUPTED
    assert capsys.readouterr().err == (
        "Interrupted; the next run cleans up what was left half done.\n"
    )


def test_an_ordinary_end_is_left_alone() -> None:
    conclude(SystemExit(0), Session())
