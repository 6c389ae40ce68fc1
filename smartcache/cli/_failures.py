"""Words and exit codes for everything that can go wrong.

    0 done   1 failure or abort   2 bad usage   3 damage found   130 interrupted

A person gets one line that says what failed and one that says what to do; a traceback only with
`--debug`.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

import click

from smartcache.cli._output import out, silence
from smartcache.errors import ConfigError, SmartcacheError

if TYPE_CHECKING:
    from smartcache.cli._session import Session

FAILED = 1
BAD_USAGE = 2
DAMAGED = 3
INTERRUPTED = 130


class BadUsageError(click.UsageError):
    """Words on the command line that cannot be meant, with a hint of its own."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class BadValueError(click.BadParameter):
    """A value of an option or argument that cannot be read, with a hint of its own."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def conclude(error: BaseException, session: Session) -> None:
    """Say what happened and end with the right code; what is no failure is left to click."""
    if isinstance(error, SystemExit | GeneratorExit):
        return
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)
    if isinstance(error, BrokenPipeError):
        raise click.exceptions.Exit(FAILED) from None
    if isinstance(error, KeyboardInterrupt):
        _interrupted(session)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if session.debug:
        from traceback import TracebackException

        found = TracebackException.from_exception(error)
        if isinstance(error, SmartcacheError):
            found.__notes__ = [note for note in error.__notes__ if not note.startswith("Hint: ")]
        out.trace("".join(found.format()))
    message, hint, code = explain(error)
    out.fail(message, hint)
    raise click.exceptions.Exit(code) from None


def explain(error: BaseException) -> tuple[str, str, int]:
    """Return the message, the hint and the exit code of an error."""
    if isinstance(error, click.ClickException):
        # click lists choices on lines of their own; an error is one line.
        message = error.format_message().replace("\n\t", " ")
        return message, _usage_hint(error), error.exit_code
    if isinstance(error, SmartcacheError):
        return error.message, error.hint, BAD_USAGE if isinstance(error, ConfigError) else FAILED
    of_hub = _of_hub(error)
    if of_hub is not None:
        return *of_hub, FAILED
    if isinstance(error, OSError):
        return *_of_system(error), FAILED
    return *_of_others(error), FAILED


def _of_hub(error: BaseException) -> tuple[str, str] | None:
    """Word an error of huggingface_hub, many of which are errors of the system too."""
    from smartcache.cli._hub_failures import words_for

    return words_for(error)


def _of_others(error: BaseException) -> tuple[str, str]:
    if isinstance(error, click.Abort):
        return "Aborted; nothing was changed", ""
    if isinstance(error, MemoryError):
        return "Out of memory", "Close other programs, or set SMARTCACHE_THREADS=1."
    if type(error).__module__ == "sqlite3":
        return f"The index cannot be used: {error}", "Run 'smartcache verify'."
    hint = "This is a bug in smartcache: run it again with 'smartcache --debug ...' and report it."
    return f"{type(error).__name__}: {error}", hint


def _usage_hint(error: click.ClickException) -> str:
    if isinstance(error, BadUsageError | BadValueError):
        return error.hint
    context = getattr(error, "ctx", None)
    if not isinstance(context, click.Context):
        return "'smartcache -h' shows the options and examples."
    if isinstance(error, click.NoSuchOption):
        known = {opt for each in context.find_root().command.params for opt in each.opts}
        if error.option_name in known:
            return f"Write it before the command: 'smartcache {error.option_name} ...'."
    return f"'{context.command_path} -h' shows the options and examples."


def _of_system(error: OSError) -> tuple[str, str]:
    """Word an error of the operating system about a path of the user's."""
    reason = error.strerror or str(error)
    words, hint = _SYSTEM.get(error.errno or 0, (reason, _SEE_WHERE))
    return (words if error.filename is None else f"{words}: {os.fsdecode(error.filename)}"), hint


_SEE_WHERE = "Run it again with 'smartcache --debug ...' to see where it happened."
_PERMISSIONS = "Check the owner and mode of the file and its directory."
_FULL = ("No space left", "Delete a file you do not need; then 'smartcache prune' can free more.")
_SYSTEM: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("No such file", "Check the path; relative paths start in the current folder."),
    errno.EACCES: ("Permission denied", _PERMISSIONS),
    errno.EPERM: ("Operation not permitted", _PERMISSIONS),
    errno.ENOTDIR: ("Not a directory", "A part of this path is a file: choose another place."),
    errno.EISDIR: ("Is a directory", "Name the files in it, or add -r where there is one."),
    errno.ENOSPC: _FULL,
    getattr(errno, "EDQUOT", errno.ENOSPC): _FULL,
    errno.EROFS: ("Read-only filesystem", "Choose another place, or mount it for writing."),
}
"""What is said, and what can be done, about the errors that a user can do something about."""


def _interrupted(session: Session) -> None:
    try:
        done = session.set_right()
        out.interrupted("Interrupted; what was finished stays, and nothing is left half done.")
        if done:
            out.talk(done)
    except (KeyboardInterrupt, SmartcacheError, OSError):
        out.interrupted("Interrupted; the next run cleans up what was left half done.")
