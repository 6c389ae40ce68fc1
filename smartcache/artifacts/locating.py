"""Find artifacts: among those not yet counted, in memory, and in the index.

What was found is remembered with the version of the index, and looked up again when that is
another one: an artifact that is still the same stays verified.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from smartcache.artifacts.codec import Layout
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.located import Located, Memory, known_layout
from smartcache.artifacts.packs import PackFiles
from smartcache.artifacts.rows import Entry
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.setindex import SetIndex
from smartcache.errors import ArtifactNotFoundError, LayoutError

_log = logging.getLogger(__name__)
_MOST_LAYOUTS = 4096
_TOUCH_SECONDS = 3600
"""The time of the last use is kept to the hour."""
_MOST_TOUCHED = 4096
_PROBES = 64
"""Batches without waiting after which nobody asks any more whether artifacts are in memory."""


class Locating(ABC):
    """What an open set knows of where its artifacts lie, and how it asks the index."""

    folder: SetFolder

    def __init__(self, index: SetIndex, packs: PackFiles) -> None:
        self.index = index
        self.packs = packs
        self.memory = Memory()
        self.pending: dict[bytes, Located | None] = {}
        """What was put (or deleted: None) and has no row yet."""
        self.hits = self.misses = self.commits = 0
        self.damage: set[int] = set()
        """Sequence numbers of artifacts that were found to be damaged."""
        self._layouts: dict[int, tuple[bytes, Layout]] = {}
        self._touched: dict[bytes, None] = {}
        self._seen_version = -1
        self._probes = 0

    @abstractmethod
    def flush(self) -> None:
        """Write the rows of all records, and when artifacts were last used."""

    def locate(self, keys: Sequence[bytes]) -> list[Located | None]:
        """Say where artifacts lie; None: there is none of that key, or it is past its time."""
        pending = self.pending  # before the version: what is in neither is in the index
        version = self.version()
        now = int(time.time())
        get = self.memory.get
        if not pending:
            known = [get(key) for key in keys]
            fresh = now - _TOUCH_SECONDS
            for each in known:
                if (
                    each is None
                    or each.version != version
                    or each.used_at < fresh
                    or each.expires_at
                ):
                    break
            else:  # the usual case
                self.hits += len(known)
                return known
        return self._locate(keys, pending, version, now)

    def _locate(
        self,
        keys: Sequence[bytes],
        pending: Mapping[bytes, Located | None],
        version: int,
        now: int,
    ) -> list[Located | None]:
        get = self.memory.get
        found: list[Located | None] = []
        asked: dict[bytes, Located | None] = {}
        for key in keys:
            known = get(key)
            if pending and key in pending:
                known = pending[key]
            elif known is None or known.version != version:
                asked[key] = known
            found.append(known)
        if asked:
            rows = self._ask(asked, version)
            found = [rows.get(key, each) for key, each in zip(keys, found, strict=True)]
        for index, each in enumerate(found):
            if each is None or each.used_at + _TOUCH_SECONDS < now or each.expires_at:
                found[index] = self._in_use(each, now)
        missing = found.count(None)
        self.misses += missing
        self.hits += len(found) - missing
        return found

    def version(self) -> int:
        """Return a number that is another one when rows may have changed, by whomever.

        What was looked up is remembered with the number of before: SQLite tells a connection of
        the writes of others, and `commits` of its own.
        """
        return self.commits << 64 | self.index.data_version()

    def _ask(self, asked: dict[bytes, Located | None], version: int) -> dict[bytes, Located | None]:
        """Look rows up; what is known of an artifact that is still the same stays known."""
        if version != self._seen_version:
            self._seen_version = version
            if self.packs.forget_unlinked():
                self.memory.let_go()
        rows = self.index.entries(asked)
        fresh: dict[bytes, Located | None] = {}
        for key, known in asked.items():
            row = rows.get(key)
            if row is None:
                # Between the two looks it may have been put by another thread.
                fresh[key] = self.pending.get(key)
                self.memory.forget(key)
            elif known is not None and (known.seq, known.place) == (row.seq, row.place):
                known.version = version
                known.expires_at = 0 if row.is_pinned else row.expires_at
                fresh[key] = known
            else:
                fresh[key] = self._located(key, row, version)
        if self.packs.gone:
            for key, each in fresh.items():
                if each is not None and self._has_moved(each):
                    fresh[key] = self._find_moved(each)
        return fresh

    def _located(self, key: bytes, row: Entry, version: int) -> Located | None:
        try:
            digest, layout = self.layout(row.layout)
            if len(row.uids) != len(layout.tensors):
                raise LayoutError(f"An artifact of {self.folder.name} lacks tensors it needs")
        except LayoutError as error:  # damage is a miss
            if row.seq not in self.damage:
                self.damage.add(row.seq)
                _log.warning("%s", error)
            return None
        found = Located(key, row.seq, row.place, row.length, digest, layout, row.uids)
        found.used_at, found.version = row.used_at, version
        found.expires_at = 0 if row.is_pinned else row.expires_at
        self.memory.add(found)
        return found

    def _has_moved(self, found: Located) -> bool:
        gone = self.packs.gone
        return any(uid >> 40 in gone for uid in found.uids)

    def _find_moved(self, found: Located) -> Located:
        """Return an artifact with where its chunks are now; samples keep what they were given."""
        rows = self.index.chunks(set(found.uids))
        places = tuple(rows[uid].place if uid in rows else uid for uid in found.uids)
        if places == tuple(found.places):
            return found
        moved = found.moved_to(places)
        self.memory.add(moved)
        return moved

    def _in_use(self, found: Located | None, now: int) -> Located | None:
        """Count an artifact as used, to the hour; None if it is past its time."""
        if found is None or (0 < found.expires_at <= now and not self._is_pinned(found.key)):
            return None
        if found.used_at + _TOUCH_SECONDS < now:
            found.used_at = now
            self._touched[found.key] = None
            if len(self._touched) > _MOST_TOUCHED:
                self.flush()
        return found

    def _is_pinned(self, key: bytes) -> bool:
        row = self.index.entry(key)
        return row is not None and row.is_pinned

    def find(self, key: bytes) -> Located | None:
        """Say where one artifact lies; None: there is none, or it is past its time."""
        known = self.memory.get(key)
        if (
            known is None
            or key in self.pending
            or known.version != self.version()
            or known.expires_at
            or known.used_at + _TOUCH_SECONDS < time.time()
        ):
            return self.locate((key,))[0]
        self.hits += 1
        return known

    def has(self, key: bytes) -> bool:
        """Say whether there is an artifact, be it past its time."""
        pending = self.pending  # once: it is replaced as a whole
        if key in pending:
            return pending[key] is not None
        return self.index.entry(key) is not None

    def need_one(self, key: bytes) -> Located:
        """Say where an artifact lies; ArtifactNotFoundError if there is none."""
        return self.find(key) or self.need((key,))[0]

    def need(self, keys: Sequence[bytes]) -> list[Located]:
        """Say where artifacts lie; ArtifactNotFoundError names those that are not there."""
        found = self.locate(keys)
        if None in found:
            missing = [key_text(key) for key, each in zip(keys, found, strict=True) if each is None]
            some = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")  # noqa: PLR2004
            message = f"{self.folder.name} has no artifact {some}"
            raise ArtifactNotFoundError(message, keys=tuple(missing))
        return [each for each in found if each is not None]

    @property
    def is_cold(self) -> bool:
        """Whether a batch had to wait for the disk not long ago.

        Then it is asked of each artifact whether it is in memory before it is copied from there: to
        announce all that is not, and to read it, is many times faster than to stumble over it.
        """
        return self._probes > 0

    def note_waits(self, *, waited: bool, unread: int) -> None:
        """Take note of how a batch was read."""
        if waited:
            self._probes = _PROBES
        elif self._probes and not unread:
            self._probes -= 1

    def look_again(self, found: Located) -> Located | None:
        """Look up where an artifact is now that its pack is gone; None: it is gone too."""
        self.memory.forget(found.key)
        return self.find(found.key)

    def layout(self, number: int) -> tuple[bytes, Layout]:
        """Return a layout by the number that rows have for it, and its digest."""
        found = self._layouts.get(number)
        if found is None:
            row = self.index.layout(number)
            found = None if row is None else known_layout(row[1])
            if row is None or found is None or found[0] != row[0]:
                raise LayoutError(f"A layout of {self.folder.name} is missing or damaged")
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[number] = found
        return found
