"""What nobody has read for long, as far as filesystems remember it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from smartcache.system import mount_of


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OldFile:
    """A file and when it was last read (or written, if that was later)."""

    allocated: int
    size: int
    path: Path
    read_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Files that nobody has read since. Times of reading are good to a day (`relatime`)."""

    older_than: timedelta
    files: tuple[OldFile, ...]
    """The largest first."""
    allocated: int
    unknown: dict[Path, str]
    """Mount points where reading leaves no trace, and why."""
    unknown_files: int


class Watch:
    """Looks at the access times of files, one by one."""

    def __init__(self, now: datetime, older_than: timedelta) -> None:
        self._older_than = older_than
        self._before = (now - older_than).timestamp()
        self._files: list[OldFile] = []
        self._unknown_files = 0
        self._reasons: dict[int, str] = {}
        self._unknown: dict[Path, str] = {}

    def look(self, path: Path, allocated: int) -> None:
        """Count a file if it was not read for long; one that is gone meanwhile is left out."""
        try:
            st = os.lstat(path)
        except OSError:
            return
        if self._reason(st.st_dev, path):
            self._unknown_files += 1
            return
        read_at = max(st.st_atime, st.st_mtime)
        if read_at >= self._before:
            return
        at = datetime.fromtimestamp(read_at, UTC)
        self._files.append(OldFile(allocated=allocated, size=st.st_size, path=path, read_at=at))

    def _reason(self, device: int, path: Path) -> str:
        """Return why times of reading mean nothing on this filesystem; empty if they do."""
        if device not in self._reasons:
            mount = mount_of(path)
            reason = next((word for word in ("noatime", "ro") if word in mount.options), "")
            self._reasons[device] = reason
            if reason:
                self._unknown[mount.point] = f"mounted {reason}"
        return self._reasons[device]

    def found(self) -> Unread:
        """Return what was counted, the largest files first."""
        return Unread(
            older_than=self._older_than,
            files=tuple(sorted(self._files, reverse=True)),
            allocated=sum(each.allocated for each in self._files),
            unknown=self._unknown,
            unknown_files=self._unknown_files,
        )
