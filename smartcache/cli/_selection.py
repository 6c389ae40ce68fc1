"""Which blobs `ls` shows, and in what order: `--filter "size>1GB"`, `--sort size:desc`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from smartcache.cli._filters import Field, Fields

if TYPE_CHECKING:
    from smartcache.store.records import Blob
    from smartcache.store.store import Store

    Test = Callable[[Blob], bool]

_ORDERS: Fields[Blob] = Fields(
    {
        "size": Field("size", lambda blob: blob.size),
        "added": Field("time", lambda blob: blob.added_at),
        "used": Field("time", lambda blob: blob.used_at),
        "digest": Field("word", lambda blob: blob.digest),
    },
    hint="",
)
_TESTS: Fields[Blob] = Fields(
    {
        "size": Field("size", lambda blob: blob.size),
        "added": Field("time", lambda blob: blob.added_at),
        "used": Field("time", lambda blob: blob.used_at),
        "links": Field("number", lambda blob: blob.names),
        "pinned": Field("word", lambda blob: "yes" if blob.pins else "no", ("yes", "no")),
        "pin": Field("words", lambda blob: list(blob.pins)),
    },
    hint="Write size>1GB, used>30d, added<1w, links=0, pinned=no or pin=NAME; several must all "
    "hold.",
)
_KNOWN = {
    ("size", True): "size",
    ("added", True): "added",
    ("used", True): "used",
    ("used", False): "oldest",
    ("digest", False): "digest",
}
"""Orders that the store gives; others are sorted here."""
condition = _TESTS.condition
order = _ORDERS.order


def select(store: Store, tests: Iterable[Test], sort: tuple[str, bool]) -> Iterator[Blob]:
    """Yield the blobs that pass all tests, in order; one by one where the store knows the order."""
    conditions = list(tests)
    known = _KNOWN.get(sort)
    found = store.blobs(order=known or "digest")
    passed = (blob for blob in found if all(test(blob) for test in conditions))
    return iter(_ORDERS.sorted(passed, sort)) if known is None else passed
