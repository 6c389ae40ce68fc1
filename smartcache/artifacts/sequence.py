"""Sequence numbers that grow over all processes of a set, without asking anybody.

They are the monotonic clock of the machine on a base that the index keeps: one for all processes
of a boot. So a later record has a higher number, whoever wrote it, also if the time of day is set
back; and after a boot all numbers are higher than those before it.
"""

from __future__ import annotations

import re
import time

from smartcache.artifacts.records import MOST_SEQ
from smartcache.artifacts.setindex import SetIndex
from smartcache.store.kernel import boot_id

_NOTE = "clock"
_BASE = re.compile("-?[0-9]{1,19}")


def sequence_base(index: SetIndex) -> int:
    """Return what is to be added to the monotonic clock, in nanoseconds."""
    boot = boot_id()
    with index.write():
        noted, _, text = (index.note(_NOTE) or "").partition(" ")
        seqs = (pack.max_seq for pack in index.packs().values())
        highest = max((seq for seq in seqs if seq < MOST_SEQ), default=0)
        now = time.monotonic_ns()
        base = int(text) if _BASE.fullmatch(text) else 0
        if noted != boot or not text or not highest < base + now < MOST_SEQ:
            base = highest + 1 - now
            index.set_note(_NOTE, f"{boot} {base}")
    return base
