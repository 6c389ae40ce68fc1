"""Names beside a file of a `local_dir` that must not outlive the process that made them.

A stale file that is not to be written through is out of the way, under a hidden name of ours, while
another comes to its place; and a copy has such a name until it is whole. Each is noted in the index
before it is there, under a lock that dies with its process. Whoever finds a note without a holder
ends what was begun: the user's own file comes back under its name, or, if another has come there,
is kept in `bad/`; nothing else stays.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from smartcache.errors import LockTimeoutError
from smartcache.store import Store, beside
from smartcache.system import reached

_BEGINNING = "aside:"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aside:
    """A hidden name, the name it belongs to, and where a file of the user's own is kept."""

    kind: Literal["own", "stale", "copy"]
    path: str
    aside: str
    kept: str = ""


@contextmanager
def out_of_the_way(store: Store, path: Path, *, kept: Path | None) -> Iterator[None]:
    """Let another file come to a path in this block; if none does, the old one is back afterwards.

    `kept` is where the old one goes when it is the user's own; None: it is from the Hub, and goes.
    """
    aside = _Aside(
        kind="stale" if kept is None else "own", path=str(path), aside=str(beside(path)),
        kept=str(kept or ""),
    )  # fmt: skip
    with _noted(store, aside):
        os.rename(aside.path, aside.aside)
        reached("aside: moved")
        yield


@contextmanager
def copy_beside(store: Store, path: Path) -> Iterator[Path]:
    """Give a name beside a path for a copy that is going to take its place in this block."""
    aside = _Aside(kind="copy", path=str(path), aside=str(beside(path)))
    with _noted(store, aside):
        yield Path(aside.aside)


def give_back(store: Store) -> None:
    """End what dead processes have begun, wherever that was."""
    for key in store.volume.index.notes(_BEGINNING):
        try:
            with store.key_locks.hold(key, what="give back", timeout=0):
                aside = _parse(store.volume.index.note(key))
                if aside is not None and not os.path.isdir(os.path.dirname(aside.path)):
                    continue  # a disk that is not mounted now
                if aside is not None:
                    _end(aside)
                store.volume.index.set_note(key, None)
        except LockTimeoutError:
            continue
        except OSError as error:
            _log.warning("what a killed download has set aside cannot be given back: %s", error)


@contextmanager
def _noted(store: Store, aside: _Aside) -> Iterator[None]:
    key = f"{_BEGINNING}{secrets.token_hex(8)}"
    index = store.volume.index
    # Nobody ever waits for this lock: it only tells that the note has a living holder.
    with store.key_locks.hold(key, what="download"):
        index.set_note(key, json.dumps(asdict(aside)))
        try:
            yield
        finally:
            _end(aside)
            reached("aside: ended")
            index.set_note(key, None)


def _end(aside: _Aside) -> None:
    try:
        hidden = os.lstat(aside.aside)
    except FileNotFoundError:
        return
    if aside.kind == "copy":
        os.unlink(aside.aside)
        return
    try:
        os.link(aside.aside, aside.path, follow_symlinks=False)  # never onto another file
    except FileExistsError:
        pass
    except OSError:  # a filesystem without hard links
        if not os.path.lexists(aside.path):
            os.rename(aside.aside, aside.path)
            return
    if aside.kind == "stale" or os.path.samestat(hidden, os.lstat(aside.path)):
        os.unlink(aside.aside)
    else:
        shutil.move(aside.aside, aside.kept)
        _log.warning("%s was not from the Hub; it is kept as %s", aside.path, aside.kept)


def _parse(note: str | None) -> _Aside | None:
    """Return what a note says; None: nothing that we have written."""
    try:
        aside = _Aside(**json.loads(note or "{}"))
        is_beside = os.path.dirname(aside.aside) == os.path.dirname(aside.path)
        return aside if is_beside and aside.aside.endswith(".smartcache") else None
    except (ValueError, TypeError, AttributeError):
        return None
