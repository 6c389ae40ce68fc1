"""Which blobs `ls` shows, and in what order: `--filter "size>1GB"`, `--sort size:desc`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from smartcache.cli._filters import Field, Fields

if TYPE_CHECKING:
    from smartcache.store.records import Blob
    from smartcache.store.store import Store

    Found = tuple[Store, Blob]
    Test = Callable[[Found], bool]


def _pins(found: Found) -> list[str]:
    store, blob = found
    return [owner.name for owner, _ in store.holders_of(blob) if owner.kind == "pin"]


_ORDERS: Fields[Found] = Fields(
    {
        "size": Field("size", lambda found: found[1].size),
        "added": Field("time", lambda found: found[1].added_at),
        "used": Field("time", lambda found: found[1].used_at),
        "digest": Field("word", lambda found: found[1].digest),
    },
    hint="",
)
_TESTS: Fields[Found] = Fields(
    {
        "size": Field("size", lambda found: found[1].size),
        "added": Field("time", lambda found: found[1].added_at),
        "used": Field("time", lambda found: found[1].used_at),
        "links": Field("number", lambda found: found[1].links - 1),
        "pinned": Field("word", lambda found: "yes" if _pins(found) else "no", ("yes", "no")),
        "pin": Field("words", _pins),
    },
    hint="Write size>1GB, used>30d, added<1w, links=0, pinned=no or pin=NAME; several must all "
    "hold.",
)
_IN_INDEX = {
    ("size", True): "size",
    ("added", True): "added",
    ("used", True): "used",
    ("used", False): "oldest",
    ("digest", False): "digest",
}
"""Orders that the index gives row by row; others are sorted in memory."""
condition = _TESTS.condition
order = _ORDERS.order


def select(
    stores: Iterable[Store], tests: Iterable[Test], sort: tuple[str, bool]
) -> Iterator[Found]:
    """Yield the blobs that pass all tests, in order; row by row where the index knows the order."""
    from smartcache.store.records import Trust

    conditions = list(tests)
    indexed = _IN_INDEX.get(sort)

    def rows(store: Store) -> Iterator[Found]:
        for blob in store.blobs(order=indexed or "digest"):
            if blob.trust < Trust.LOST and all(test((store, blob)) for test in conditions):
                yield store, blob

    each = [rows(store) for store in stores]
    if indexed is None:
        return iter(_ORDERS.sorted(chain.from_iterable(each), sort))
    return heapq.merge(*each, key=_ORDERS.key(sort[0]), reverse=sort[1])
