from __future__ import annotations

from dataclasses import replace

from smartcache.report.roles import roles
from tests.report.values import copy, group


def test_the_first_stays_and_the_others_are_duplicates() -> None:
    found = group(copy(1, "/a"), copy(2, "/b"), copy(3, "/c"))
    assert [role for _, role in roles(found)] == ["stays", "duplicate", "duplicate"]


def test_each_filesystem_keeps_one() -> None:
    found = group(
        copy(1, "/a"), copy(7, "/m/a", filesystem="uuid:2"), copy(8, "/m/b", filesystem="uuid:2")
    )
    assert [role for _, role in roles(found)] == ["stays", "other disk", "duplicate"]


def test_what_would_free_nothing_is_no_duplicate() -> None:
    found = group(copy(1, "/a"), copy(2, "/b", links=2), copy(3, "/c", shares_with=1))
    assert [role for _, role in roles(found)] == ["stays", "other names", "same blocks"]


def test_the_name_in_the_store_is_not_one_that_the_scan_missed() -> None:
    found = group(copy(1, "/a"), copy(2, "/b", is_blob=True))
    assert [role for _, role in roles(found)] == ["stays", "duplicate"]


def test_what_programs_edit_in_place_is_not_to_be_replaced() -> None:
    database = replace(copy(2, "/b.db"), is_linkable=False)
    assert [role for _, role in roles(group(copy(1, "/a.db"), database))] == ["stays", "editable"]
