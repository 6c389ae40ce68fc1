"""What `stat` says about a file, as a key that changes whenever its bytes may have changed.

Size and modification time alone are not enough: overwriting and setting the time back is caught by
the change time only. Making or removing a hard link changes the change time too, so for blobs a
changed link count explains a changed change time (`judge`); nothing else does.
"""

from __future__ import annotations

import os
import time
from typing import Literal, NamedTuple

RACY_NS = 2_000_000_000
"""A file younger than this when hashed may change again within one tick (FAT ticks in 2 s)."""

LATEST_NS = (1 << 63) - 1
"""The latest time that fits into an integer of the index."""

Verdict = Literal["same", "relinked", "suspect"]


class StatKey(NamedTuple):
    """Size, modification time and change time, in integers."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, st: os.stat_result) -> StatKey:
        """Return the key of a stat result. Times after 2262, which no index can hold, are cut."""
        return cls(st.st_size, min(st.st_mtime_ns, LATEST_NS), min(st.st_ctime_ns, LATEST_NS))

    def is_racy(self, now_ns: int | None = None) -> bool:
        """Say whether a change right after `now` could leave this key as it is.

        A modification time in the future, as archives have it, could not: a write sets it to now.
        """
        now = time.time_ns() if now_ns is None else now_ns
        return self.ctime_ns > now - RACY_NS or abs(now - self.mtime_ns) < RACY_NS


def judge(*, recorded: StatKey, recorded_links: int, current: os.stat_result) -> Verdict:
    """Compare a blob's recorded stat key with what is on disk now.

    "same": nothing happened. "relinked": somebody made or removed a link, and the bytes are as
    recorded unless somebody also wrote them and set the time back: usable, and to be hashed again
    by the next `verify`. "suspect": hash before use.
    """
    if StatKey.of(current) == recorded:
        return "same"
    now = StatKey.of(current)
    same_content = (now.size, now.mtime_ns) == (recorded.size, recorded.mtime_ns)
    if same_content and current.st_nlink != recorded_links:
        return "relinked"
    return "suspect"


def allocated_bytes(st: os.stat_result) -> int:
    """Return the bytes of disk blocks an inode uses; its size where the system does not tell."""
    blocks: int | None = getattr(st, "st_blocks", None)
    return st.st_size if blocks is None else blocks * 512
