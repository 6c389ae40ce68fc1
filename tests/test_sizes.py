from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api import ConfigError, format_age, format_size, parse_age, parse_size

SIZES = st.integers(min_value=0, max_value=2**63 - 1)
AGES = st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=365 * 1000))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (0, 0),
        (65536, 65536),
        ("65536", 65536),
        ("17 B", 17),
        ("64K", 64_000),
        ("64KB", 64_000),
        ("64kb", 64_000),
        ("64KiB", 65_536),
        ("64kib", 65_536),
        ("64Ki", 65_536),
        ("200GB", 200_000_000_000),
        ("200GiB", 200 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        (" 1.5TB ", 1_500_000_000_000),
        (".5M", 500_000),
        ("1.0005K", 1000),
        ("0.1KiB", 102),
        ("2PB", 2 * 10**15),
        ("9EB", 9 * 10**18),
        (2**63 - 1, 2**63 - 1),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_size_is_read_as_written(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GB",
        "-1",
        "-5GB",
        -1,
        "1.5",
        "1.5 B",
        "1..5GB",
        "5 G B",
        "5XB",
        "5GBps",
        "1,000",
        "1e9",
        "nan",
        "inf",
        "٣GB",
        "10EB",
        2**63,
        "9" * 5000,
        True,
    ],
)
def test_nonsense_is_no_size_and_the_hint_shows_how_to_write_one(text: str | int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert repr(text) in caught.value.message
    assert "500MB" in caught.value.hint


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1234, "1.23 KB"),
        (1235, "1.24 KB"),
        (10_050, "10.1 KB"),
        (999_499, "999 KB"),
        (999_500, "1 MB"),
        (1_500_000_000, "1.5 GB"),
        (1_050_000_000, "1.05 GB"),
        (2**63 - 1, "9.22 EB"),
        (10**21, "1000 EB"),
        (-1_500, "-1.5 KB"),
    ],
)
def test_a_size_is_shown_with_three_digits(size: int, text: str) -> None:
    assert format_size(size) == text


@given(SIZES)
def test_a_shown_size_reads_back_within_half_a_percent(size: int) -> None:
    assert 200 * abs(parse_size(format_size(size)) - size) <= size


@given(SIZES)
def test_showing_a_shown_size_changes_nothing(size: int) -> None:
    shown = format_size(size)
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


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("45s", timedelta(seconds=45)),
        ("30m", timedelta(minutes=30)),
        ("30min", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        ("7d", timedelta(days=7)),
        ("7D", timedelta(days=7)),
        ("2w", timedelta(weeks=2)),
        ("6mo", timedelta(days=180)),
        ("6MO", timedelta(days=180)),
        ("1y", timedelta(days=365)),
        (" 3 days ", timedelta(days=3)),
        ("1 month", timedelta(days=30)),
        ("1.5h", timedelta(minutes=90)),
        (".5d", timedelta(hours=12)),
        ("0s", timedelta(0)),
    ],
)
def test_an_age_is_read_as_written(text: str, age: timedelta) -> None:
    assert parse_age(text) == age


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "d",
        "-7d",
        "7 fortnights",
        "7dd",
        "ms",
        "5ms",
        "5ss",
        "1d12h",
        "nand",
        "9" * 30 + "y",
    ],
)
def test_nonsense_is_no_age_and_the_hint_shows_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_age(text)
    assert repr(text) in caught.value.message
    assert "7d" in caught.value.hint


def test_a_capital_m_is_refused_because_it_may_mean_minutes_or_months() -> None:
    with pytest.raises(ConfigError, match="6M") as caught:
        parse_age("6M")
    assert "'mo' is months" in caught.value.hint


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (timedelta(0), "0 seconds"),
        (timedelta(seconds=1), "1 second"),
        (timedelta(seconds=59.9), "59 seconds"),
        (timedelta(minutes=1), "1 minute"),
        (timedelta(hours=23, minutes=59), "23 hours"),
        (timedelta(days=1), "1 day"),
        (timedelta(days=3, hours=20), "3 days"),
        (timedelta(days=13), "13 days"),
        (timedelta(days=14), "2 weeks"),
        (timedelta(days=29), "4 weeks"),
        (timedelta(days=30), "1 month"),
        (timedelta(days=364), "12 months"),
        (timedelta(days=365), "1 year"),
        (timedelta(days=800), "2 years"),
        (timedelta(seconds=-5), "0 seconds"),
    ],
)
def test_an_age_is_shown_in_its_largest_whole_unit(age: timedelta, text: str) -> None:
    assert format_age(age) == text


@given(AGES)
def test_a_shown_age_is_never_longer_than_it_is_nor_shorter_than_half(age: timedelta) -> None:
    shown = parse_age(format_age(age))
    assert shown <= age
    assert age < 2 * shown + timedelta(seconds=1)


@given(AGES)
def test_showing_a_shown_age_changes_nothing(age: timedelta) -> None:
    shown = format_age(age)
    assert format_age(parse_age(shown)) == shown


@given(st.text(alphabet="0189. -+kKmMiIbBsdwyo\n٣", max_size=8))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse_size(text) >= 0


@given(st.text(alphabet="0189. -+kKmMiIbBsdwyo\n٣", max_size=8))
def test_any_text_is_an_age_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse_age(text) >= timedelta(0)
