r"""The only place that prints: data on stdout, talk on stderr.

What a command shows depends on how it was asked: tables for people, one JSON document (`--json`),
or one id per line (`-q`), or each ended by NUL (`-0`). Talk is everything that is no data:
progress, questions, summaries, warnings. A name may hold any byte; for people, which is whoever
reads a terminal, it is shown with escapes, for programs byte by byte (`-q`, `-0`) or as JSON's
`\udcxx` (`--json`).
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TextIO

Mode = Literal["human", "json", "quiet"]
Colour = Literal["auto", "always", "never"]
COLOURS: tuple[Colour, ...] = ("auto", "always", "never")
_PIECE = 1 << 16
_LINE = 100
"""Where text is wrapped that goes to no terminal."""
_SURROGATES = range(0xDC80, 0xDD00)
"""How Python carries the bytes of a name that are no UTF-8."""


class Output:
    """How this run talks. One object, `out`, is shared by everything that prints."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by whoever writes: a line of text and a bar, drawn by a thread, never mix."""
        self._clear_bar: Callable[[], None] | None = None
        self.begin()

    def begin(self, colour: Colour = "auto") -> None:
        """Forget how an earlier run in this process talked."""
        self.colour = colour
        self.mode: Mode = "human"
        self.ends_with_nul = False
        """What `names` ends a name with: NUL, which no name has, or a newline."""

    # data

    def show(
        self,
        *,
        human: Callable[[], None],
        document: Callable[[], object],
        ids: Callable[[], Iterable[str | os.PathLike[str]]],
    ) -> None:
        """Print a result in the form that was asked for."""
        if self.mode == "human":
            human()
        elif self.mode == "json":
            self._json(document())
        else:
            self.names(ids())

    def line(self, text: str = "", *, as_talk: bool = False) -> None:
        """Print a line of data for people, as it is; `as_talk`: shown before a question."""
        self._write(sys.stderr if as_talk else sys.stdout, f"{printable(text)}\n")

    def document(self, text: str) -> None:
        """Print a whole document as it is; a stream that knows no Unicode gets UTF-8 too."""
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()

    def source(self, text: str) -> None:
        """Print a script, which has lines of its own."""
        self._write(sys.stdout, f"{text.rstrip()}\n")

    def heading(self, text: str, *, as_talk: bool = False) -> None:
        """Print a line above others, cut to the terminal."""
        from smartcache.cli._tables import cut

        stream = sys.stderr if as_talk else sys.stdout
        clean = printable(text)
        if stream.isatty():
            clean = cut(clean, terminal_width(stream))
        self._write(stream, f"{self._styled(clean, stream, bold=True)}\n")

    def paragraph(
        self, text: str, *, indent: str = "", as_talk: bool = False, state: str = ""
    ) -> None:
        """Print text for people, wrapped to the terminal; `indent` is for the lines that follow.

        `state` is a word in it that is shown in its colour.
        """
        from smartcache.cli._tables import COLOURS

        stream = sys.stderr if as_talk else sys.stdout
        width = terminal_width(stream) if stream.isatty() else _LINE
        text = text if text.startswith(" ") else f"{indent}{text}"
        filled = _filled(printable(text), width, indent)
        if state:
            filled = filled.replace(state, self._styled(state, stream, colour=COLOURS[state]), 1)
        self._write(stream, f"{filled}\n")

    def names(self, ids: Iterable[str | os.PathLike[str]]) -> None:
        """Print ids or paths, one per line: on a terminal with escapes, else as they are."""
        if sys.stdout.isatty() and not self.ends_with_nul:
            for each in ids:
                self.line(os.fspath(each))
            return
        sys.stdout.flush()
        end = b"\0" if self.ends_with_nul else b"\n"
        for piece in _in_pieces(_raw(each) + end for each in ids):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    def table(
        self, titles: Sequence[str], rows: Iterable[Iterable[str]], *, as_talk: bool = False
    ) -> None:
        """Print a table for people, fitted to the terminal; `as_talk`: shown before a question.

        What a column holds is said behind its title: > numbers, ~ paths, which give way, ! states.
        """
        from smartcache.cli._tables import Column, render

        stream = sys.stderr if as_talk else sys.stdout
        width = terminal_width(stream) if stream.isatty() else None
        columns = [
            Column(each.rstrip(">~!"), *(each.endswith(mark) for mark in ">~!")) for each in titles
        ]
        clean = ([printable(cell) for cell in row] for row in rows)

        def paint(text: str, colour: str) -> str:
            return self._styled(text, stream, colour=colour)

        for number, text in enumerate(render(columns, clean, width, paint)):
            is_heading = number == 0 and any(column.title for column in columns)
            self._write(stream, f"{self._styled(text, stream, bold=is_heading)}\n", flush=False)
        stream.flush()

    # talk

    def talk(self, text: str) -> None:
        """Say something to a person; programs that asked for data do not hear it."""
        if self.mode == "human":
            self._write(sys.stderr, f"{_wrapped(printable(text), sys.stderr)}\n")

    def wait(self, text: str) -> None:
        """Say what this process waits for, in every mode: silence would look like a hang."""
        self._write(sys.stderr, f"{self._labelled('Waiting:', text)}\n")

    def warn(self, text: str) -> None:
        """Say what the user may lose or should know, in every mode."""
        self._write(sys.stderr, f"{self._labelled('Warning:', text, 'yellow')}\n")

    def fail(self, message: str, hint: str) -> None:
        """Say what failed and what to do about it: a line each."""
        self._write(sys.stderr, f"{self._labelled('Error:', message, 'red')}\n")
        if hint:
            self._write(sys.stderr, f"{self._labelled('Hint:', hint)}\n")

    def interrupted(self, text: str, *, at_once: bool = False) -> None:
        """Say that Ctrl-C was heard, on a line after the terminal's `^C`.

        `at_once`: also in the middle of another write, during which the stream takes no second one.
        """
        line = f"\n{text}\n" if sys.stderr.isatty() else f"{text}\n"
        if not at_once:
            self._write(sys.stderr, line)
            return
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), line.encode())

    def trace(self, text: str) -> None:
        """Print what only `--debug` shows, as it is."""
        self._write(sys.stderr, text if text.endswith("\n") else f"{text}\n")

    def show_bar(self, clear: Callable[[], None] | None) -> None:
        """Take note of how the bar is cleared that is drawn next; None: there is none any more."""
        with self.lock:
            if clear != self._clear_bar:
                self._without_bar()
                self._clear_bar = clear

    def _without_bar(self) -> None:
        if self._clear_bar is not None:
            try:
                self._clear_bar()
                sys.stderr.flush()
            except OSError:
                silence(sys.stderr)

    def can_show_bars(self) -> bool:
        """Say whether a person watches who asked for no data."""
        return self.mode == "human" and sys.stderr.isatty()

    def confirm(self, question: str, *, yes: bool) -> None:
        """Return if the user agrees; without a terminal to ask at, refuse instead of hanging."""
        if not yes and self.ask(f"{question} [y/N]").casefold() not in ("y", "yes"):
            raise click.Abort

    def ask(self, question: str) -> str:
        """Return what the user answers; without a terminal to ask at, refuse."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            from smartcache.errors import SmartcacheError

            message = "Cannot ask for confirmation: not a terminal; nothing was changed"
            raise SmartcacheError(message, hint="Add -y to go ahead without being asked.")
        self._write(sys.stderr, f"{printable(question)} ")
        answer = sys.stdin.readline()
        if not answer:  # the end of the input
            raise click.Abort
        return answer.strip()

    # how

    def _json(self, document: object) -> None:
        from smartcache.cli._json import encoded

        for piece in encoded(document):
            self._write(sys.stdout, piece, flush=False)
        sys.stdout.flush()

    def _write(self, stream: TextIO, text: str, *, flush: bool = True) -> None:
        with self.lock:
            self._without_bar()
            try:
                try:
                    stream.write(text)
                except UnicodeEncodeError:  # a terminal that knows no Unicode
                    encoding = stream.encoding or "ascii"
                    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
                if flush:
                    stream.flush()
            except OSError:
                if stream is not sys.stderr:
                    raise
                silence(stream)  # talk that nobody can hear is no reason to stop half way

    def _labelled(self, label: str, text: str, colour: str | None = None) -> str:
        """Return a sentence of talk with a word before it that says what kind it is."""
        whole = _wrapped(f"{label} {printable(text)}", sys.stderr)
        return self._styled(label, sys.stderr, colour=colour) + whole.removeprefix(label)

    def _styled(
        self, text: str, stream: TextIO, *, colour: str | None = None, bold: bool = False
    ) -> str:
        if not (colour or bold) or not self._has_colour(stream):
            return text
        return click.style(text, fg=colour, bold=bold or None)

    def _has_colour(self, stream: TextIO) -> bool:
        """Say whether colours are wanted: asked for, else as the variables of everybody say."""
        from smartcache.config import variable

        if self.colour != "auto":
            return self.colour == "always"
        if variable("NO_COLOR") is not None:
            return False
        is_forced = variable("FORCE_COLOR") not in (None, "0")
        return is_forced or (stream.isatty() and variable("TERM") != "dumb")


def _wrapped(text: str, stream: TextIO) -> str:
    """Return a sentence cut into lines at words where a terminal shows it; programs get one."""
    return _filled(text, terminal_width(stream), _indent(text)) if stream.isatty() else text


def _filled(text: str, width: int, indent: str) -> str:
    if len(text) <= width and text.isascii():
        return text
    from textwrap import fill

    return fill(
        text.lstrip(), width, initial_indent=_indent(text), subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def silence(stream: TextIO) -> None:
    """Let a stream that cannot be written go nowhere, with what is still in its buffer.

    The interpreter would try again at its end, and turn the exit code into 120.
    """
    with suppress(OSError, ValueError):  # a stream of a test, which is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _raw(name: str | os.PathLike[str]) -> bytes:
    try:
        return os.fsencode(name)
    except UnicodeEncodeError:  # the key of an artifact may be any text
        return os.fspath(name).encode("utf-8", "surrogatepass")


def _in_pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= _PIECE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def printable(text: str) -> str:
    """Return text in which a name can neither break a line nor command the terminal."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    code = ord(character)
    if character.isprintable():
        return character
    if code in _SURROGATES:
        return f"\\x{code - _SURROGATES.start + 0x80:02x}"
    return character.encode("unicode_escape").decode("ascii")


def terminal_width(stream: TextIO) -> int:
    """Return the columns of the terminal behind a stream."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return 80


out = Output()
