from __future__ import annotations

from tests.api import Section, markdown, printable


def lines(*sections: Section, title: str = "Models") -> list[str]:
    return list(markdown(title, sections, clean=printable))


def test_a_section_is_a_heading_a_table_and_notes() -> None:
    section = Section(
        title="By kind", columns=("FILES", "KIND"), rows=(("3", "gguf"),), notes=("That is all.",)
    )
    assert lines(section) == [
        "# Models",
        "",
        "## By kind",
        "",
        "| FILES | KIND |",
        "| --: | :-- |",
        "| 3 | gguf |",
        "",
        "That is all.",
    ]


def test_without_rows_there_is_no_table() -> None:
    section = Section(title="Not read", columns=("A", "B"), notes=("None.",))
    assert lines(section)[2:] == ["## Not read", "", "None."]


def test_names_cannot_break_the_table_or_become_markup() -> None:
    name = "a|b\n<script>*x*_y_ [l](u) \udcff`"
    section = Section(title="T", columns=("N", "FILE"), rows=(("1", name),))
    row = lines(section)[6]
    assert row == r"| 1 | a\|b\\n\<script\>\*x\*\_y\_ \[l\](u) \\xff\` |"
