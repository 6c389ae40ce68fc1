"""Sizes and ages as people write them ("200GB", "7d"), and back.

Inside the package a size is an `int` of bytes and an age a `timedelta`; text exists at the edges
only. Units are decimal, as on disk labels and on the Hub (1 KB = 1000 bytes); "KiB", "MiB", ... are
the powers of 1024.
"""

from __future__ import annotations

import re
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
_SECONDS = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 7 * 86_400,
    "month": 30 * 86_400,
    "year": 365 * 86_400,
}
_AGE_UNITS = {
    "s": "second",
    "sec": "second",
    "m": "minute",
    "min": "minute",
    "h": "hour",
    "d": "day",
    "w": "week",
    "mo": "month",
    "y": "year",
}
# Below two weeks people count days, so "week" starts at 14 days; everything else starts at one.
_AGE_STEPS = (
    ("year", _SECONDS["year"]),
    ("month", _SECONDS["month"]),
    ("week", 2 * _SECONDS["week"]),
    ("day", _SECONDS["day"]),
    ("hour", _SECONDS["hour"]),
    ("minute", _SECONDS["minute"]),
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
    while exponent < len(_PREFIXES) and _round_to_digits(n, 3) >= 1000 ** (exponent + 1):
        exponent += 1
    whole, rest = divmod(_round_to_digits(n, 3), 1000**exponent)
    digits = f"{rest:0{3 * exponent}d}".rstrip("0") if rest else ""
    unit = f"{_PREFIXES[exponent - 1]}B" if exponent else "B"
    return f"{sign}{whole}{'.' if digits else ''}{digits} {unit}"


def parse_age(text: str) -> timedelta:
    """Return the time meant by "45s", "30m", "12h", "7d", "2w", "6mo", "1y" or in words, "3 days".

    A month has 30 days, a year 365. Raises `ConfigError` for anything else; a bare "M" is refused,
    because it may mean minutes or months.
    """
    found = _AGE.fullmatch(text.strip())
    unit = _age_unit(found[2]) if found else None
    if found is None or unit is None:
        raise ConfigError(f"not an age: {text!r}", hint=_AGE_HINT)
    try:
        return timedelta(microseconds=_whole(found[1], _SECONDS[unit] * 1_000_000))
    except OverflowError:
        raise ConfigError(f"too long an age: {text!r}", hint=_AGE_HINT) from None


def format_age(delta: timedelta) -> str:
    """Return the largest whole unit of `delta`, cut off and not rounded: "3 days", "1 hour".

    A negative age (a file of the future, a clock set back) reads "0 seconds".
    """
    seconds = max(0, delta // timedelta(seconds=1))
    unit = next((name for name, start in _AGE_STEPS if seconds >= start), "second")
    count = seconds // _SECONDS[unit]
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _whole(number: str, factor: int) -> int:
    """Return `number * factor` cut to an integer; exact, where a float loses bytes above 9 PB."""
    digits, _, fraction = number.partition(".")
    scale: int = 10 ** len(fraction)
    return int(digits + fraction) * factor // scale


def _round_to_digits(n: int, digits: int) -> int:
    step: int = 10 ** max(0, len(str(n)) - digits)
    return (n + step // 2) // step * step


def _age_unit(text: str) -> str | None:
    if text == "M":
        return None
    name = text.casefold()
    if name in _AGE_UNITS:
        return _AGE_UNITS[name]
    singular = name.removesuffix("s")
    return singular if singular in _SECONDS else None
