"""What there is to say about a set, in figures."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.fingerprint import Fingerprint
from smartcache.artifacts.setfolder import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStats:
    """Figures of a set, in bytes where nothing else is said."""

    artifacts: int
    logical: int
    """What the records would take if equal tensors were not kept once."""
    live: int
    """Records that are wanted."""
    on_disk: int
    """All packs, dead records included."""
    dead: int
    packs: int
    chunks: int
    saved: int
    """What keeping equal tensors once saves."""
    pinned: int
    hits: int
    """Of this process, as are the next two."""
    misses: int
    damaged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetInfo:
    """What a set is."""

    name: str
    id: str
    fingerprint: Fingerprint | None
    path: Path
    created_at: datetime | None
    used_at: datetime | None
    options: Options
    artifacts: int = 0
    live: int = 0
    on_disk: int = 0
    problem: str = ""
    """Why nothing more is known of it."""
    cure: str = ""
    """What to do about the problem."""


def describe(engine: SetEngine) -> SetInfo:
    """Return what an open set is."""
    folder = engine.folder
    engine.flush()
    artifacts, live = engine.index.totals()
    used = engine.index.last_use()
    return SetInfo(
        name=folder.name,
        id=folder.id,
        fingerprint=folder.fingerprint,
        path=folder.path,
        created_at=folder.created_at,
        used_at=None if used is None else datetime.fromtimestamp(used, UTC),
        options=folder.options,
        artifacts=artifacts,
        live=live,
        on_disk=engine.on_disk(),
    )
