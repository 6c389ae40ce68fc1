from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from smartcache.cli.dedup import numbers_in
from smartcache.store.store import Store
from smartcache.system import faults
from smartcache.system.filesystems import mount_of
from tests.cli.running import Here, Smartcache, Terminal, ended_by
from tests.folders.trees import SIZE, Machine, content, write
from tests.store.files import inode_of, link_count, mode_of, rot, snapshot

SMALL = ("--min-size", "4KiB")
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two equal files, the older one the survivor."""
    folder = tmp_path / "models"
    write(folder / "a.safetensors", content(1), mtime=1_600_000_000)
    write(folder / "b.safetensors", content(1))
    return folder


def are_linked(folder: Path) -> bool:
    return inode_of(folder / "a.safetensors") == inode_of(folder / "b.safetensors")


@pytest.fixture
def hard_links(tmp_path: Path) -> None:
    """Only where duplicates become hard links."""
    if mount_of(tmp_path).fstype in ("btrfs", "xfs"):
        pytest.skip("reflinks are made here")


class TestChoosing:
    """On a terminal, by plain numbers."""

    def test_only_the_groups_chosen_are_replaced(self, program: Smartcache, tmp_path: Path) -> None:
        folder = tmp_path / "models"
        for number in (1, 2, 3):
            for name in "ab":
                write(folder / f"{name}{number}.safetensors", content(number, number * 10_000))
        with Terminal(program, "dedup", folder, *SMALL, "--interactive") as terminal:
            terminal.read_until("Which groups?")
            terminal.type("4\n")
            terminal.read_until("is not a choice; numbers are from 1 to 3.")
            terminal.type("1,3\n")
            terminal.read_until("[y/N]")
            terminal.type("y\n")
            text = terminal.read_to_end()
        assert "Replace 2 duplicate files" in text
        linked = [
            inode_of(folder / f"a{number}.safetensors")
            == inode_of(folder / f"b{number}.safetensors")
            for number in (1, 2, 3)
        ]
        assert linked == [True, False, True]

    def test_none_changes_nothing(self, program: Smartcache, pair: Path) -> None:
        with Terminal(program, "dedup", pair, *SMALL, "-i") as terminal:
            terminal.read_until("Which groups?")
            terminal.type("none\n")
            terminal.read_to_end()
        assert not are_linked(pair)

    def test_needs_somebody_to_ask(self, sc: Here, pair: Path) -> None:
        sc("dedup", pair, *SMALL, "-i", "-y", code=2)
        assert "not a terminal" in sc("dedup", pair, *SMALL, "-i", code=1).error
        assert not are_linked(pair)

    def test_answers(self) -> None:
        numbers = {
            "1-3,7": {1, 2, 3, 7}, "all": set(range(1, 9)), "none": set(), "": set(),
            "2 4": {2, 4}, "0": None, "9": None, "3-1": None, "x": None, "-2": None,
        }  # fmt: skip
        assert {answer: numbers_in(answer, 8) for answer in numbers} == numbers


@pytest.mark.usefixtures("hard_links")
class TestDoingIt:
    def test_every_program_shares_one_file_per_content_until_it_is_taken_back(
        self, sc: Here, machine: Machine
    ) -> None:
        before = snapshot(machine.home)
        survivor = machine.a1111 / "Stable-diffusion" / "sdxl.safetensors"
        modified = survivor.stat().st_mtime_ns
        done = sc("dedup", *SMALL, "-y")
        assert done.stdout == "Replaced 16 duplicate files, freed 1.05 MB.\n"
        for shared in machine.shared.values():
            assert len({inode_of(path) for path in shared.paths}) == 1
            assert all(path.read_bytes() == shared.data for path in shared.paths)
        assert survivor.stat().st_mtime_ns == modified
        assert sc("scan", *SMALL, "--json").json["freeable"] == 0
        found = re.search(
            r"^To take it back \(\d+ files changed\): (smartcache undo \w+)$",
            done.stderr,
            re.MULTILINE,
        )
        assert found
        sc(*found[1].split()[1:], "-y")
        assert snapshot(machine.home) == before

    def test_says_when_deleting_a_model_frees_its_bytes(self, sc: Here, pair: Path) -> None:
        text = sc("dedup", pair, *SMALL, "-y").stderr
        assert "only when its last name is gone and 'smartcache prune' has run" in text
        for path in pair.iterdir():
            path.unlink()
        assert sc("prune", "-y", "--json").json["freed_size"] == SIZE

    def test_the_document_has_what_was_planned_and_done(self, sc: Here, machine: Machine) -> None:
        document = sc("dedup", *SMALL, "-y", "--json").json
        assert document["dry_run"] is False
        assert document["is_complete"] is True
        assert document["replaced"] == document["files"] == 16
        assert document["freed_size"] == document["planned_size"] == machine.duplicate_bytes
        assert document["read_only"] == 21
        assert len(document["batches"]) == 1
        assert document["skipped"] == document["problems"] == document["new_pools"] == []
        (why,) = document["kinds"].values()
        assert why.startswith("hard links")
        group = document["groups"][0]
        assert group["kind"] == "hardlink"
        assert {group["survivor"], *group["replaced"]} == {
            str(path) for path in machine.shared["sdxl"].paths
        }

    def test_quiet_prints_the_id_for_undo_and_again_there_is_nothing_to_do(
        self, sc: Here, pair: Path
    ) -> None:
        (entry,) = sc("dedup", pair, *SMALL, "-y", "-q").ids
        assert are_linked(pair)
        (folder,) = sc("folders", "ls", "--json").json["folders"]
        assert folder["is_given"] is True
        done = sc("dedup", pair, *SMALL)
        assert done.stdout == "There is nothing to replace in 2 files. Nothing was changed.\n"
        assert sc("dedup", pair, *SMALL, "-q").stdout == ""
        assert sc("undo", "--list", "-q").ids == [entry]
        sc("undo", entry, "-y")
        assert not are_linked(pair)


class TestLookingFirst:
    @pytest.mark.usefixtures("hard_links", "machine")
    def test_the_plan_says_what_would_become_of_files_and_why(self, sc: Here) -> None:
        text = sc("dedup", *SMALL, "-n").stdout
        assert text.splitlines()[-1] == (
            "Would replace 16 duplicate files and free 1.05 MB. Nothing was changed."
        )
        assert sc("undo", "--list", "-q").ids == []
        document = sc("dedup", *SMALL, "-n", "--json").json
        assert (document["files"], document["replaced"]) == (16, 0)
        assert "65.5 KB × 7, 393 KB to free: Stable Diffusion XL" in text  # noqa: RUF001
        assert re.search(r"^  stays +A1111 +~/stable-diffusion-webui/models/", text, re.MULTILINE)
        assert len(re.findall(r"^  link +", text, re.MULTILINE)) == 16
        flat = " ".join(text.split())
        assert re.search(r"Hard links: .* \(on /.*\)\.", flat)
        assert "21 files become read-only" in flat
        assert "'smartcache undo' gives each file its own bytes, date and mode back" in flat

    def test_of_many_groups_the_largest_are_shown(self, sc: Here, tmp_path: Path) -> None:
        for number in range(8):
            for name in ("x", "y"):
                write(tmp_path / "many" / name / f"{number}.pt", content(number, 5000 + number))
        done = sc("dedup", tmp_path / "many", *SMALL, "-n").stdout
        assert done.count(" to free: ") == 5
        assert "... and 3 smaller groups; -v shows all" in done
        assert sc("dedup", tmp_path / "many", *SMALL, "-n", "-v").stdout.count(" to free: ") == 8

    def test_asks_at_a_terminal(self, program: Smartcache, pair: Path) -> None:
        done = program.at_terminal("dedup", pair, *SMALL, answer="y\n", columns=80)
        assert "Replace 1 duplicate file, freeing 65.5 KB? [y/N]" in done.stdout
        assert "Replaced 1 duplicate file, freed" in done.stdout
        assert done.code == 0

    def test_nothing_found_is_no_failure(self, sc: Here) -> None:
        assert "nothing to replace in 0 files" in sc("dedup").stdout


@pytest.mark.usefixtures("hard_links")
class TestRottenFiles:
    """What was hashed on an earlier day says what to try: tests/folders shows what survives."""

    @pytest.fixture(autouse=True)
    def _earlier(self, sc: Here, pair: Path, pass_time: Callable[[float], None]) -> None:
        write(pair / "c.safetensors", content(1))
        pass_time(10)
        assert sc("scan", pair, *SMALL, "--json").json["hashed"] == 3 * SIZE

    @pytest.mark.parametrize("rotten", ["a.safetensors", "b.safetensors"])
    def test_the_last_good_copy_stays_whichever_has_rotted(
        self, sc: Here, pair: Path, home: Path, rotten: str
    ) -> None:
        (pair / "c.safetensors").unlink()
        with Store(home) as store:
            found = rot(pair / rotten, store)
        (good,) = (path for path in pair.iterdir() if path.name != rotten)
        before = snapshot(pair)
        done = sc("dedup", pair, *SMALL, "-y", code=1)
        assert done.stdout == "Replaced 0 duplicate files, freed 0 B.\n"
        assert f"{pair / rotten} does not have the bytes that were read there before" in done.stderr
        assert (good.read_bytes(), (pair / rotten).read_bytes()) == (content(1), found)
        assert snapshot(pair) == before
        assert "No file is here twice" in sc("scan", pair, *SMALL).stdout

    def test_the_rotten_one_is_named_and_the_exit_code_says_so(
        self, sc: Here, pair: Path, home: Path
    ) -> None:
        with Store(home) as store:
            rot(pair / "b.safetensors", store)
        (pair / "c.safetensors").rename(pair.with_name("c"))
        done = sc("dedup", pair, *SMALL, "-y", code=1)
        assert done.stdout == "Replaced 0 duplicate files, freed 0 B.\n"
        reason = "does not have the bytes that were read there before"
        assert f"{pair / 'b.safetensors'} {reason}" in done.stderr
        pair.with_name("c").rename(pair / "c.safetensors")
        document = sc("dedup", pair, *SMALL, "-y", "--json").json
        assert (document["replaced"], document["skipped"]) == (1, [])

    def test_undo_gives_no_rotten_bytes_out(self, sc: Here, pair: Path, home: Path) -> None:
        """The files stay links, so that one good copy of the bytes mends them all."""
        sc("dedup", pair, *SMALL, "-y")
        with Store(home) as store:
            rot(pair / "a.safetensors", store)
        sc("undo", "--all", "-y", code=1)
        assert are_linked(pair)

    def test_each_file_is_read_once_by_the_command_that_replaces_it(
        self, sc: Here, pair: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By its own scan, or, if an earlier one has read them, when they are replaced."""
        preadv, counts = os.preadv, [0]

        def counted(fd: int, buffers: Sequence[bytearray], offset: int) -> int:
            count = preadv(fd, buffers, offset)
            counts[0] += count
            return count

        monkeypatch.setattr(os, "preadv", counted)
        sc("dedup", pair, *SMALL, "-y")
        assert counts == [3 * SIZE]
        for name in "xyz":
            write(pair / f"{name}.safetensors", content(2))
        sc("dedup", pair, *SMALL, "-y")
        assert counts == [2 * 3 * SIZE]


@pytest.mark.usefixtures("hard_links")
class TestLeavingAlone:
    def test_a_file_that_somebody_writes(self, sc: Here, pair: Path) -> None:
        with (pair / "b.safetensors").open("r+b"):
            done = sc("dedup", pair, *SMALL, "-y", "--json")
        assert done.json["busy"] == [str(pair / "b.safetensors")]
        assert not are_linked(pair)

    def test_another_mode_unless_allowed(self, sc: Here, pair: Path) -> None:
        (pair / "b.safetensors").chmod(0o600)
        done = sc("dedup", pair, *SMALL, "-y")
        assert done.stdout.startswith(
            "Left alone: 1 file\n  different permissions: 1 file; --allow mode includes it\n"
        )
        assert "nothing to replace" in done.stdout
        (skip,) = sc("dedup", pair, *SMALL, "-y", "--json").json["skipped"]
        assert skip["path"] == str(pair / "b.safetensors")
        assert str(pair / "b.safetensors") in sc("dedup", pair, *SMALL, "-y", "-v").stdout
        sc("dedup", pair, *SMALL, "-y", "--allow", "mode")
        assert are_linked(pair)

    def test_everything_that_must_stay_writable_by_option_or_setting(
        self, sc: Here, pair: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "writable" in sc("dedup", pair, *SMALL, "-y", "--keep-writable").stdout
        monkeypatch.setenv("SMARTCACHE_KEEP_WRITABLE", "1")
        assert "writable" in sc("dedup", pair, *SMALL, "-y").stdout
        assert not are_linked(pair)
        assert mode_of(pair / "a.safetensors") == 0o644
        sc("dedup", pair, *SMALL, "-y", "--read-only")  # the option wins
        assert are_linked(pair)

    def test_other_programs_and_excluded_names(self, sc: Here, machine: Machine) -> None:
        words = ("--program", "Ollama", "--program", "gpt4all", "--program", "lm studio")
        document = sc("dedup", *SMALL, *words, "--exclude", "*Meta*", "-y", "--json").json
        assert document["files"] == 1
        assert inode_of(machine.shared["llama"].paths[0]) == inode_of(
            machine.shared["llama"].paths[1]
        )

    def test_a_pool_that_will_be_made_is_announced(
        self, sc: Here, pair: Path, elsewhere: Path
    ) -> None:
        for name in ("c", "d"):
            write(elsewhere / f"{name}.safetensors", content(1))
        document = sc("dedup", pair, elsewhere, *SMALL, "-n", "--json").json
        (pool,) = document["new_pools"]
        assert pool.endswith(f"/.smartcache-{os.geteuid()}")
        text = " ".join(sc("dedup", pair, elsewhere, *SMALL, "-n").stdout.split())
        assert f"A pool will be made at {pool}." in text


class TestCtrlC:
    def test_in_the_middle_leaves_every_file_whole_and_says_how_far_it_came(
        self, sc: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At a fault point between two files."""
        folder = tmp_path / "many"
        names = [folder / f"{number}.safetensors" for number in range(40)]
        for number, path in enumerate(names):
            write(path, content(number % 4))
        reached = iter(range(100))

        def interrupt(point: str) -> None:
            if point in ("temporary", "exchanged") and next(reached) == 20:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(faults, "hook", interrupt)
            text = sc("dedup", folder, *SMALL, "-y", code=130).stderr
        assert "nothing is left half done" in text
        found = re.search(r"([\d,]+) files changed so far; 'smartcache undo (\w+)'", text)
        assert found
        changed = int(found[1])
        assert 0 < changed < len(names)
        assert sorted(folder.iterdir()) == sorted(names)
        assert {path.read_bytes() for path in names} == {content(seed) for seed in range(4)}
        (entry,) = sc("undo", "--list", "--json").json["history"]
        assert (entry["id"], entry["changes"]) == (found[2], changed)
        assert sc("dedup", folder, *SMALL, "-y", "--json").json["is_complete"] is True
        assert len({inode_of(path) for path in names}) == 4

    def test_before_anything_was_done_there_is_nothing_to_undo(
        self, program: Smartcache, pair: Path
    ) -> None:
        with Terminal(program, "dedup", pair, *SMALL) as terminal:
            terminal.read_until("[y/N]")
            code = ended_by(signal.SIGINT, terminal.process)
            text = terminal.read_to_end()
            assert code == 130, text
        assert "undo" not in text.partition("[y/N]")[2]
        assert json.loads(program("undo", "--list", "--json").stdout)["history"] == []


def test_names_with_any_bytes_are_replaced_and_shown_escaped(sc: Here, pair: Path) -> None:
    os.rename(os.fsencode(pair / "b.safetensors"), os.fsencode(pair) + b"/b\n\xff.safetensors")
    assert r"b\n\xff.safetensors" in sc("dedup", pair, *SMALL, "-n").stdout
    document = sc("dedup", pair, *SMALL, "-y", "--json").json
    assert document["replaced"] == 1


@pytest.mark.usefixtures("hard_links")
def test_only_ollamas_own_names_with_partial_are_unfinished_downloads(
    sc: Here, tmp_path: Path
) -> None:
    name, unfinished = "sd-partial-finetune.safetensors", f"sha256-{64 * 'a'}-partial"
    for folder in ("one", "other"):
        write(tmp_path / folder / name, content(1))
        write(tmp_path / folder / unfinished, content(1))
        write(tmp_path / folder / f"{unfinished}-12", content(1))
        write(tmp_path / folder / "model.gguf.part", content(1))
    folders = tmp_path / "one", tmp_path / "other"
    done = sc("scan", *folders, *SMALL)
    assert "6 unfinished downloads left out." in done.stdout
    document = sc("scan", *folders, *SMALL, "--json").json
    assert (document["total"]["files"], document["unfinished"]) == (2, 6)
    assert document["freeable"] == SIZE
    sc("dedup", *folders, *SMALL, "-y")
    assert inode_of(folders[0] / name) == inode_of(folders[1] / name)
    assert link_count(folders[0] / unfinished) == 1
    third = write(tmp_path / "third" / f"x-{name}", content(3))
    sc("add", "--adopt", third)
    assert link_count(third) == 2
