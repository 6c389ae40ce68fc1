"""What `smartcache` alone prints: what is stored, saved, waiting to be freed, and what to do next.

Nothing is scanned or made; each blob costs a stat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smartcache.cli._output import out
from smartcache.cli._session import say_unfinished
from smartcache.cli._words import counted
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.cli._session import Session
    from smartcache.store.store import Store

_COLUMNS = ("", "~")


def show_status(session: Session) -> None:
    """Print a few lines about the store, and the next command to type."""
    out.begin(session.colour)
    if session.has_store():
        with session.store(only_look=True) as store:
            rows, next_step = _figures(store)
            say_unfinished(store)
    else:
        rows = [["Store", f"none yet; it will be at {session.settings.home}"]]
        next_step = "'smartcache scan' finds duplicate model files. It changes none of them."
    out.table(_COLUMNS, rows)
    out.line()
    out.paragraph(f"Next: {next_step}")
    out.paragraph("'smartcache -h' lists all commands.")


def _figures(store: Store) -> tuple[list[list[str]], str]:
    from smartcache.cache import usage_of_sets

    usage = store.usage()
    freeable = usage.reclaimable + sum(freed for _, freed in usage_of_sets(store))
    entries = len(store.history())
    rows = [
        ["Store", ", ".join(str(pool.root) for pool in store.pools())],
        ["Stored", f"{format_size(usage.physical)} in {counted(usage.blobs, 'file')}"],
        ["Computed", format_size(usage.sets)],
        ["Saved", f"{format_size(usage.saved)} by sharing"],
        ["Can be freed", format_size(freeable)],
        ["Can be undone", f"{entries:,} {'entry' if entries == 1 else 'entries'}"],
    ]
    if freeable:
        return rows, "'smartcache prune' frees what only smartcache has and nobody wants."
    if entries:
        return rows, "'smartcache report' shows what could still be freed."
    return rows, "'smartcache scan' finds duplicate model files. It changes none of them."
