"""Which blobs `ls` shows, and in what order: `--filter "size>1GB"`, `--sort size:desc`."""

from __future__ import annotations

import heapq
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING

from smartcache.cli._failures import BadValueError
from smartcache.errors import ConfigError
from smartcache.sizes import parse_age, parse_size

if TYPE_CHECKING:
    from smartcache.store import Blob, Store

    Found = tuple[Store, Blob]
    Test = Callable[[Store, Blob], bool]
    _Key = Callable[[Found], int | datetime | str]

_FILTER = re.compile(r"\s*([a-z]+)\s*(<=|>=|!=|==|=|<|>)\s*(.+?)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_FILTER_HINT = (
    "Write size>1GB, used>30d, added<1w, links=0, pinned=no or pin=NAME; several must all hold."
)
_KEYS: dict[str, tuple[bool, _Key]] = {
    "size": (True, lambda found: found[1].size),
    "added": (True, lambda found: found[1].added_at),
    "used": (True, lambda found: found[1].used_at),
    "digest": (False, lambda found: found[1].digest),
}
"""Sort key: whether the largest comes first unless asked otherwise, and what is compared."""
_IN_INDEX = {
    ("size", True): "size",
    ("added", True): "added",
    ("used", True): "used",
    ("used", False): "oldest",
    ("digest", False): "digest",
}
"""Orders that the index gives row by row; others are sorted in memory."""


def condition(text: str) -> Test:
    """Read a condition on blobs."""
    found = _FILTER.fullmatch(text)
    try:
        test = None if found is None else _test(_key(found[1]), found[2], found[3])
    except (ConfigError, ValueError) as error:
        raise BadValueError(f"{error} in {text!r}", hint=_FILTER_HINT) from None
    if test is None:
        raise BadValueError(f"not a filter: {text!r}", hint=_FILTER_HINT)
    return test


def order(text: str) -> tuple[str, bool]:
    """Read a sort key with an optional direction; return whether the largest comes first."""
    key, _, direction = text.partition(":")
    key = _key(key)
    if key not in _KEYS or direction not in ("", "asc", "desc"):
        hint = f"Write {', '.join(_KEYS)}, with :asc or :desc behind it if you like."
        raise BadValueError(f"not a sort key: {text!r}", hint=hint)
    return key, direction == "desc" if direction else _KEYS[key][0]


def _key(word: str) -> str:
    """Return our word for a key that `hf cache ls` calls otherwise."""
    return "used" if word == "accessed" else word


def _test(key: str, sign: str, value: str) -> Test | None:
    compare = _COMPARE[sign]
    is_equality = sign in ("=", "==", "!=")
    if key == "size":
        size = parse_size(value)
        return lambda _, blob: compare(blob.size, size)
    if key in ("used", "added"):
        now, age = datetime.now(UTC), parse_age(value)
        return lambda _, blob: compare(
            (now - (blob.used_at if key == "used" else blob.added_at)).total_seconds(),
            age.total_seconds(),
        )
    if key == "links":
        links = int(value)
        return lambda _, blob: compare(blob.links - 1, links)
    if key == "pinned" and is_equality and value in ("yes", "no"):
        wanted = (value == "yes") == (sign != "!=")
        return lambda store, blob: bool(pins(store, blob)) == wanted
    if key == "pin" and is_equality:
        return lambda store, blob: (value in pins(store, blob)) == (sign != "!=")
    return None


def pins(store: Store, blob: Blob) -> list[str]:
    """Return the names of the pins of a blob."""
    return [owner.name for owner, _ in store.holders_of(blob) if owner.kind == "pin"]


def select(
    stores: Iterable[Store], tests: Iterable[Test], sort: tuple[str, bool]
) -> Iterator[Found]:
    """Yield the blobs that pass all tests, in order; row by row where the index knows the order."""
    from smartcache.store import Trust

    is_descending, key = sort[1], _KEYS[sort[0]][1]
    conditions = list(tests)
    indexed = _IN_INDEX.get(sort)

    def rows(store: Store) -> Iterator[Found]:
        for blob in store.blobs(order=indexed or "digest"):
            if blob.trust < Trust.LOST and all(test(store, blob) for test in conditions):
                yield store, blob

    each = [rows(store) for store in stores]
    if indexed is None:
        found = chain.from_iterable(each)
        return iter(sorted(found, key=key, reverse=is_descending))
    if len(each) == 1:
        return each[0]
    return heapq.merge(*each, key=key, reverse=is_descending)
