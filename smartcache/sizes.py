"""Sizes and ages as people write them ("200GB", "7d"), and back.

Inside the package a size is an `int` of bytes and an age a `timedelta`; text exists at the edges
only. Units are decimal, as on disk labels and on the Hub (1 KB = 1000 bytes); "KiB", "MiB", ... are
the powers of 1024.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta

from smartcache.errors import ConfigError

_PREFIXES = "KMGTPE"
_LARGEST_SIZE = 2**63 - 1  # what an integer column of the index can hold
# Bounded, because `int` refuses texts of more than 4300 digits with an error of its own.
_NUMBER = r"([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})"
_SIZE = re.compile(_NUMBER + r"\s*(?:([KMGTPE])(I?))?B?", re.IGNORECASE)
_SIZE_HINT = 'Write a size like 500MB, "1.5 TB", 64KiB or a plain number of bytes.'

_AGE = re.compile(_NUMBER + r"\s*([A-Za-z]+)")
_AGE_HINT = "Write an age like 45s, 30m, 12h, 7d, 2w, 6mo or 1y ('m' is minutes, 'mo' is months)."
_DAY = 86_400
# The name of each unit, its seconds, from how many on an age is said in it, and what is short for
# it. Below two weeks people count days.
_AGE_UNITS = (
    ("year", 365 * _DAY, 365 * _DAY, ("y",)),
    ("month", 30 * _DAY, 30 * _DAY, ("mo",)),
    ("week", 7 * _DAY, 14 * _DAY, ("w",)),
    ("day", _DAY, _DAY, ("d",)),
    ("hour", 3600, 3600, ("h",)),
    ("minute", 60, 60, ("m", "min")),
    ("second", 1, 0, ("s", "sec")),
)


def parse_size(text: str | int) -> int:
    """Return the bytes meant by "200GB", "1.5 TB", "64K" (64,000), "64KiB" (65,536) or a number.

    Fractions of a byte are cut off. Raises `ConfigError` for anything else, for negative sizes, and
    for more than 2**63 - 1 bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or ("." in found[1] and not found[2]):
            raise ConfigError(f"not a size: {text!r}", hint=_SIZE_HINT)
        number, prefix, binary = found.groups()
        exponent = _PREFIXES.index(prefix.upper()) + 1 if prefix else 0
        size = _whole(number, (1024 if binary else 1000) ** exponent)
    if not 0 <= size <= _LARGEST_SIZE:
        kind = "negative" if size < 0 else "too large"
        raise ConfigError(f"{kind} size: {text!r}", hint=_SIZE_HINT)
    return size


def format_size(n: int) -> str:
    """Return `n` bytes as people read them: at most three significant digits, "1.5 GB", "0 B"."""
    sign, n = ("-", -n) if n < 0 else ("", n)
    exponent = 0
    # 999,500 is 1 MB and not 1000 KB: the digits are rounded before the unit is chosen.
    while exponent < len(_PREFIXES) and _rounded(n) >= 1000 ** (exponent + 1):
        exponent += 1
    whole, rest = divmod(_rounded(n), 1000**exponent)
    digits = f"{rest:0{3 * exponent}d}".rstrip("0") if rest else ""
    unit = f"{_PREFIXES[exponent - 1]}B" if exponent else "B"
    return f"{sign}{whole}{'.' if digits else ''}{digits} {unit}"


def parse_age(text: str) -> timedelta:
    """Return the time meant by "45s", "30m", "12h", "7d", "2w", "6mo", "1y" or in words, "3 days".

    A month has 30 days, a year 365. Raises `ConfigError` for anything else; a bare "M" is refused,
    because it may mean minutes or months.
    """
    found = _AGE.fullmatch(text.strip())
    unit = "" if found is None or found[2] == "M" else found[2].casefold()
    for name, seconds, _, short in _AGE_UNITS:
        if found is not None and unit in (name, f"{name}s", *short):
            with suppress(OverflowError):
                return timedelta(microseconds=_whole(found[1], seconds * 1_000_000))
            raise ConfigError(f"too long an age: {text!r}", hint=_AGE_HINT)
    raise ConfigError(f"not an age: {text!r}", hint=_AGE_HINT)


def format_age(delta: timedelta) -> str:
    """Return the largest whole unit of `delta`, cut off and not rounded: "3 days", "1 hour".

    A negative age (a file of the future, a clock set back) reads "0 seconds".
    """
    age = max(0, delta // timedelta(seconds=1))
    unit, seconds = next((name, size) for name, size, start, _ in _AGE_UNITS if age >= start)
    count = age // seconds
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _whole(number: str, factor: int) -> int:
    """Return `number * factor` cut to an integer; exact, where a float loses bytes above 9 PB."""
    digits, _, fraction = number.partition(".")
    scale: int = 10 ** len(fraction)
    return int(digits + fraction) * factor // scale


def _rounded(n: int) -> int:
    """Return `n` to three significant digits."""
    step: int = 10 ** max(0, len(str(n)) - 3)
    return (n + step // 2) // step * step
