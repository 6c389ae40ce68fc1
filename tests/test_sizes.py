from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.errors import ConfigError
from smartcache.sizes import format_age, format_size, parse_age, parse_size

SIZES = st.integers(min_value=0, max_value=2**63 - 1)
AGES = st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=365 * 1000))


def refused(parse: Callable[[Any], object], *values: str | int) -> list[str]:
    """Let each value be refused by name; return the hints."""
    hints = []
    for value in values:
        with pytest.raises(ConfigError, match=re.escape(repr(value))) as caught:
            parse(value)
        hints.append(caught.value.hint)
    return hints


def test_a_size_is_read_as_written() -> None:
    meant: dict[str | int, int] = {
        "0": 0, 0: 0, 65536: 65536, "65536": 65536, "17 B": 17,
        "64K": 64_000, "64KB": 64_000, "64kb": 64_000,
        "64KiB": 65_536, "64kib": 65_536, "64Ki": 65_536,
        "200GB": 200_000_000_000, "200GiB": 200 * 2**30,
        "1.5 TB": 1_500_000_000_000, " 1.5TB ": 1_500_000_000_000,
        ".5M": 500_000, "1.0005K": 1000, "0.1KiB": 102, "2PB": 2 * 10**15, "9EB": 9 * 10**18,
        2**63 - 1: 2**63 - 1, "9223372036854775807": 2**63 - 1,
    }  # fmt: skip
    assert {text: parse_size(text) for text in meant} == meant


def test_nonsense_is_no_size_and_the_hint_shows_how_to_write_one() -> None:
    nonsense: list[str | int] = [
        "", " ", "GB", "-1", "-5GB", -1, "1.5", "1.5 B", "1..5GB", "5 G B", "5XB", "5GBps",
        "1,000", "1e9", "nan", "inf", "٣GB", "10EB", 2**63, "9" * 5000, True,
    ]  # fmt: skip
    assert [hint for hint in refused(parse_size, *nonsense) if "500MB" not in hint] == []


def test_a_size_is_shown_with_three_digits() -> None:
    shown = {
        0: "0 B", 1: "1 B", 999: "999 B", 1000: "1 KB", 1234: "1.23 KB", 1235: "1.24 KB",
        10_050: "10.1 KB", 999_499: "999 KB", 999_500: "1 MB", 1_500_000_000: "1.5 GB",
        1_050_000_000: "1.05 GB", 2**63 - 1: "9.22 EB", 10**21: "1000 EB", -1_500: "-1.5 KB",
    }  # fmt: skip
    assert {size: format_size(size) for size in shown} == shown


@given(SIZES)
def test_a_shown_size_reads_back_within_half_a_percent_and_is_shown_the_same(size: int) -> None:
    shown = format_size(size)
    assert 200 * abs(parse_size(shown) - size) <= size
    assert format_size(parse_size(shown)) == shown


@given(st.integers(min_value=0, max_value=999), st.integers(min_value=0, max_value=15))
def test_a_size_of_three_digits_survives_a_round_trip(digits: int, zeros: int) -> None:
    size = digits * 10**zeros
    assert parse_size(format_size(size)) == size


@given(SIZES, SIZES)
def test_a_larger_size_never_looks_smaller(one: int, other: int) -> None:
    smaller, larger = sorted((one, other))
    assert parse_size(format_size(smaller)) <= parse_size(format_size(larger))


@given(SIZES)
def test_plain_numbers_are_exact_as_int_and_as_text(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size}B") == size


@given(st.integers(min_value=0, max_value=2**20), st.sampled_from("KMGTP"))
def test_binary_units_are_powers_of_1024(count: int, prefix: str) -> None:
    exponent = "KMGTP".index(prefix) + 1
    if count * 1024**exponent < 2**63:
        assert parse_size(f"{count} {prefix}iB") == count * 1024**exponent


def test_an_age_is_read_as_written() -> None:
    day = 86_400
    meant = {
        "45s": 45, "30m": 1800, "30min": 1800, "12h": day / 2, "7d": 7 * day, "7D": 7 * day,
        "2w": 14 * day, "6mo": 180 * day, "6MO": 180 * day, "1y": 365 * day, " 3 days ": 3 * day,
        "1 month": 30 * day, "1.5h": 5400, ".5d": day / 2, "0s": 0,
    }  # fmt: skip
    assert {text: parse_age(text).total_seconds() for text in meant} == meant


def test_nonsense_is_no_age_and_the_hint_shows_how_to_write_one() -> None:
    nonsense = [
        "", "7", "d", "-7d", "7 fortnights", "7dd", "ms", "5ms", "5ss", "1d12h", "nand",
        "9" * 30 + "y",
    ]  # fmt: skip
    assert [hint for hint in refused(parse_age, *nonsense) if "7d" not in hint] == []


def test_a_capital_m_is_refused_because_it_may_mean_minutes_or_months() -> None:
    assert "'mo' is months" in refused(parse_age, "6M")[0]


def test_an_age_is_shown_in_its_largest_whole_unit() -> None:
    minute, hour, day = 60, 3600, 86_400
    shown = {
        0: "0 seconds", 1: "1 second", 59.9: "59 seconds", minute: "1 minute",
        23 * hour + 59 * minute: "23 hours", day: "1 day", 3 * day + 20 * hour: "3 days",
        13 * day: "13 days", 14 * day: "2 weeks", 29 * day: "4 weeks", 30 * day: "1 month",
        364 * day: "12 months", 365 * day: "1 year", 800 * day: "2 years", -5: "0 seconds",
    }  # fmt: skip
    assert {seconds: format_age(timedelta(seconds=seconds)) for seconds in shown} == shown


@given(AGES)
def test_a_shown_age_is_at_most_the_age_and_more_than_half_and_is_shown_the_same(
    age: timedelta,
) -> None:
    shown = parse_age(format_age(age))
    assert shown <= age < 2 * shown + timedelta(seconds=1)
    assert format_age(shown) == format_age(age)


@given(st.text(alphabet="0189. -+kKmMiIbBsdwyo\n٣", max_size=8))
def test_any_text_is_a_size_or_an_age_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse_size(text) >= 0
    with suppress(ConfigError):
        assert parse_age(text) >= timedelta(0)
