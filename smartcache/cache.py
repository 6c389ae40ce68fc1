"""The facade that wires the layers together; it has no logic of its own.

`SmartCache` reads the settings and opens the store once; the layers above the store are given this
one object. A layer is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from smartcache.config import Settings, with_home
from smartcache.progress import Progress, silent
from smartcache.store.store import Store

if TYPE_CHECKING:
    from smartcache.folders.dedup import Allow, DedupPlan
    from smartcache.folders.records import Scan


class SmartCache:
    """One copy of every model file and every computed tensor on this machine."""

    def __init__(self, home: str | Path | None = None, *, settings: Settings | None = None) -> None:
        self.settings = with_home(settings, home)
        self.store = Store(settings=self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def scan(
        self,
        *folders: str | Path,
        only: Sequence[str] = (),
        min_size: int | None = None,
        exclude: Sequence[str] = (),
        any_file: bool = False,
        progress: Progress = silent,
    ) -> Scan:
        """Scan these folders, or else those of programs and those remembered; changes nothing.

        `only` keeps some programs, `exclude` leaves out paths by pattern, `any_file` counts kinds
        of files that programs edit in place too.
        """
        from smartcache.folders import scan

        found, _ = scan.folders_to_scan(self.store, folders, only)
        least = scan.MIN_SIZE if min_size is None else min_size
        return scan.scan(
            self.store, found, min_size=least, exclude=exclude, any_file=any_file,
            progress=progress,
        )  # fmt: skip

    def plan_dedup(
        self, found: Scan, *, keep_writable: bool | None = None, allow: Allow = frozenset()
    ) -> DedupPlan:
        """Plan to replace the duplicates of a scan by links, in place and undoably."""
        from smartcache.folders.dedup import plan_dedup

        keep = self.settings.keep_writable if keep_writable is None else keep_writable
        return plan_dedup(self.store, found, keep_writable=keep, allow=allow)
