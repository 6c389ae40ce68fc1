from __future__ import annotations

from pathlib import Path

from smartcache.folders.groups import Left
from smartcache.report.figures import Across, Report, SharedFile, Sums
from smartcache.report.text import Section, sections
from tests.report.values import GB, report, set_info


def parts(made: Report, **words: str) -> list[Section]:
    return list(sections(made, dedup="'smartcache dedup'", **words))


def section(made: Report, title: str) -> Section:
    (found,) = [each for each in parts(made) if each.title.startswith(title)]
    return found


def titles(made: Report) -> list[str]:
    return [each.title for each in parts(made)]


def test_parts_with_nothing_to_say_are_left_out() -> None:
    assert titles(report()) == ["All folders", "By program", "By kind of file"]


def test_sums_are_a_row_each() -> None:
    row = Sums(label="ComfyUI", files=1234, logical=3 * GB, physical=2 * GB, saved=GB, freeable=5)
    found = section(report(programs=(row,)), "By program")
    assert found.columns == ("FILES", "SIZE", "ON DISK", "SAVED", "DUPLICATE", "PROGRAM")
    assert found.rows == (("1,234", "3 GB", "2 GB", "1 GB", "5 B", "ComfyUI"),)


def test_a_folder_of_no_program_is_shown_from_the_home() -> None:
    row = Sums(label=str(Path.home() / "models"))
    assert section(report(programs=(row,)), "By program").rows[0][-1] == "~/models"


def test_the_summary_names_the_next_step() -> None:
    notes = section(report(total=Sums(label="", saved=GB, freeable=2 * GB)), "All").notes
    assert notes[0].startswith("Sharing saves 1 GB")
    assert "'smartcache dedup' would free 2 GB more" in notes[1]
    (_, nothing) = section(report(), "All").notes
    assert "nothing to free" in nothing


def test_the_summary_says_what_is_left_alone_and_what_would_include_it() -> None:
    left = (
        Left(reason="belongs to another user", options=(), files=1, size=3 * GB),
        Left(reason="", options=("group", "mode"), files=2, size=2 * GB),
    )
    (first, *_) = parts(report(left=left), allowing="'dedup --allow group --allow mode'")
    _, nothing, more, command, stays = first.notes
    assert nothing == "Links could free nothing here."
    assert more == (
        "2 GB more with --allow group --allow mode (2 files differ in group or differ in "
        "permissions)."
    )
    assert command == "Run 'dedup --allow group --allow mode' to include that."
    assert stays == "3 GB stays as it is (1 file: belongs to another user)."


def test_what_was_never_compared_is_said_and_forbids_to_say_that_all_is_well() -> None:
    notes = section(report(uncompared=7), "All").notes
    assert "7 files never compared with others" in notes[-1]
    assert "'smartcache scan'" in notes[-1]
    assert not any("nothing to free" in note for note in notes)


def test_of_many_repos_the_first_are_shown_and_the_others_counted() -> None:
    repos = tuple(Sums(label=f"org/{number}") for number in range(25))
    found = section(report(repos=repos), "By repo")
    assert len(found.rows) == 20
    assert found.notes == ("... and 5 more; --json has them all",)


def test_the_most_shared_files() -> None:
    file = SharedFile(label="SDXL", size=GB, saved=2 * GB, paths=(Path("/a"), Path("/b")))
    assert section(report(most_shared=(file,)), "Shared").rows == (("2", "1 GB", "2 GB", "SDXL"),)


def test_duplicates_across_filesystems_are_no_promise() -> None:
    across = Across(label="SDXL", size=GB, elsewhere=GB, paths=(Path("/a"), Path("/m/a")))
    found = section(report(across=(across,), elsewhere=GB), "Duplicated across")
    assert found.rows == (("1 GB", "1 GB", "SDXL"), ("", "", "at /a"), ("", "", "at /m/a"))
    assert "1 GB that links cannot free" in found.notes[0]


def test_of_many_paths_the_first_are_shown() -> None:
    paths = tuple(Path(f"/{number}") for number in range(6))
    across = Across(label="SDXL", size=GB, elsewhere=GB, paths=paths)
    rows = section(report(across=(across,), elsewhere=GB), "Duplicated across").rows
    assert [row[-1] for row in rows] == [
        "SDXL",
        "at /0",
        "at /1",
        "at /2",
        "at /3",
        "and at 2 more",
    ]


def test_sets_of_artifacts_are_the_last_part() -> None:
    parts = [
        (set_info(f"latents/{number:032x}", artifacts=1000, live=GB, on_disk=2 * GB), GB)
        for number in range(25)
    ]
    broken = set_info("x/" + "a" * 32, artifacts=0, live=0, on_disk=5, problem="lost")
    made = report(artifact_sets=((broken, 0), *parts))
    assert titles(made)[-1] == "Computed tensors"
    found = section(made, "Computed")
    assert found.columns == ("ARTIFACTS", "LIVE", "ON DISK", "CAN BE FREED", "SET")
    assert found.rows[0] == ("0", "0 B", "5 B", "0 B", "x/aaaaaaaaaaaa: lost")
    assert found.rows[1] == ("1,000", "1 GB", "2 GB", "1 GB", "latents/000000000000")
    assert len(found.rows) == 20
    assert found.notes == (
        "... and 6 more; --json has them all",
        "25,000 artifacts in 26 sets, 50 GB on disk.",
        "'smartcache prune' would free 25 GB of that.",
    )
