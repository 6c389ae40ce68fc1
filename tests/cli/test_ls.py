from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.api import Store
from tests.cli.running import Here, Smartcache, age
from tests.store.files import OTHER, WEIGHTS, digest_of, write

LARGE, SMALL = digest_of(WEIGHTS), digest_of(OTHER)


@pytest.fixture
def filled(sc: Here, models: Path) -> Here:
    """A pinned large blob, and a smaller one that is a file outside too."""
    sc("add", models / "a.safetensors")
    sc("add", "--adopt", models / "sub/c.gguf")
    return sc


class TestTable:
    def test_shows_short_digests_sizes_to_the_right_and_what_holds_each(
        self, filled: Here, models: Path
    ) -> None:
        lines = filled("ls").stdout.splitlines()
        assert lines == [
            "DIGEST          SIZE  LINKS  USED  HELD BY    FILE",
            f"{LARGE[:12]}  100 KB      0   now  pin kept   {models}/a.safetensors",
            f"{SMALL[:12]}   70 KB      1   now  its links  {models}/sub/c.gguf",
        ]

    def test_what_only_the_store_has_is_held_by_nobody(self, sc: Here, home: Path) -> None:
        with Store(home) as store:
            store.put_stream([b"x"])
        assert sc("ls").stdout.splitlines()[1].split()[-2:] == ["nobody", "-"]

    def test_the_sum_is_talk(self, filled: Here) -> None:
        assert filled("ls").stderr == "2 blobs, 170 KB\n"

    def test_verbose_shows_all_that_is_known(self, filled: Here, models: Path, home: Path) -> None:
        text = filled("ls", "-v").stdout
        assert f"{SMALL}\n  70 KB (70000 bytes)" in text
        assert f"  hardlink {models}/sub/c.gguf" in text
        assert "  held by pin kept" in text
        assert f"  in {home}" in text

    @pytest.mark.usefixtures("filled")
    def test_fits_the_terminal(self, program: Smartcache) -> None:
        lines = program.at_terminal("ls", columns=60).stdout.splitlines()
        plain = [re.sub(r"\x1b\[[0-9;]*[mK]", "", line) for line in lines]
        assert max(map(len, plain)) <= 60
        assert any(line.endswith("c.gguf") and "…" in line for line in plain)

    def test_a_damaged_blob_is_not_in_the_store(self, filled: Here, home: Path) -> None:
        (home / "blobs" / LARGE[:2] / LARGE).unlink()
        filled("verify", code=3)
        assert filled.digests() == [SMALL]


class TestPrograms:
    def test_json_is_a_list_of_blobs_with_integer_bytes_and_utc_times(
        self, filled: Here, home: Path
    ) -> None:
        first, second = filled("ls", "--json").json
        assert (first["digest"], first["size"], first["links"]) == (LARGE, len(WEIGHTS), 0)
        assert (second["digest"], second["links"], second["root"]) == (SMALL, 1, str(home))
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["used_at"])
        assert "paths" not in first

    def test_verbose_json_has_links_owners_and_aliases(self, filled: Here, models: Path) -> None:
        first, second = filled("ls", "--json", "-v").json
        assert first["owners"] == [{"kind": "pin", "name": "kept", "state": "live"}]
        assert second["paths"] == [{"path": str(models / "sub/c.gguf"), "kind": "hardlink"}]
        assert first["aliases"] == {}

    def test_quiet_prints_whole_digests(self, filled: Here) -> None:
        done = filled("ls", "-q")
        assert done.ids == [LARGE, SMALL]
        assert done.stderr == ""


class TestNothing:
    def test_a_store_that_is_not_there_is_empty_and_is_not_made(self, sc: Here, home: Path) -> None:
        done = sc("ls")
        assert done.stdout == ""
        assert f"There is no store at {home} yet" in done.stderr
        assert sc("ls", "--json").json == []
        assert sc("ls", "-q").stdout == ""
        assert not home.exists()

    def test_an_empty_store_prints_no_table(self, sc: Here, home: Path) -> None:
        Store(home).close()
        assert sc("ls").stdout == ""
        assert sc("ls", "--json").json == []


class TestFilter:
    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("size>80KB", [LARGE]),
            ("size <= 70000", [SMALL]),
            ("size!=70000", [LARGE]),
            ("links=0", [LARGE]),
            ("links>0", [SMALL]),
            ("pinned=yes", [LARGE]),
            ("pinned!=yes", [SMALL]),
            ("pin=kept", [LARGE]),
            ("pin!=kept", [SMALL]),
            ("accessed>30d", [SMALL]),
            ("used>30d", [SMALL]),
            ("used<30d", [LARGE]),
            ("added>=5w", [SMALL]),
            ("size>1TB", []),
        ],
    )
    def test_keeps_what_it_holds_for(
        self, expression: str, expected: list[str], filled: Here, home: Path
    ) -> None:
        age(home, SMALL, days=40)
        assert filled.digests("--filter", expression) == expected

    def test_several_must_all_hold(self, filled: Here) -> None:
        assert filled.digests("--filter", "size>1KB", "--filter", "links=1") == [SMALL]

    @pytest.mark.parametrize(
        "expression",
        ["", "size", "size>", "size>big", "colour=red", "used>soon", "pinned=maybe", "links=x",
         "pinned>yes", "size>-1"],
    )  # fmt: skip
    def test_nonsense_is_explained(self, expression: str, sc: Here) -> None:
        done = sc("ls", "--filter", expression, code=2)
        assert "'--filter'" in done.error
        assert "size>1GB" in done.hint


class TestSort:
    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            ("size", [LARGE, SMALL]),
            ("size:desc", [LARGE, SMALL]),
            ("size:asc", [SMALL, LARGE]),
            ("used", [SMALL, LARGE]),
            ("used:asc", [LARGE, SMALL]),
            ("accessed", [SMALL, LARGE]),
            ("added", [SMALL, LARGE]),
            ("added:asc", [LARGE, SMALL]),
            ("digest", sorted([SMALL, LARGE])),
            ("digest:desc", sorted([SMALL, LARGE], reverse=True)),
        ],
    )
    def test_by_every_key(self, key: str, expected: list[str], filled: Here, home: Path) -> None:
        age(home, LARGE, days=40)
        assert filled.digests("--sort", key) == expected

    def test_the_limit_counts_after_the_order(self, filled: Here) -> None:
        assert filled.digests("--sort", "size:asc", "--limit", "1") == [SMALL]
        assert filled.digests("--limit", "0") == []

    @pytest.mark.parametrize("key", ["", "colour", "size:up", ":asc"])
    def test_nonsense_is_explained(self, key: str, sc: Here) -> None:
        assert "size, added, used, digest" in sc("ls", "--sort", key, code=2).hint


@pytest.mark.parametrize("key", ["size", "size:asc", "used"])
def test_several_volumes_are_listed_as_one(
    key: str, filled: Here, home: Path, elsewhere: Path
) -> None:
    with Store(home) as store:
        store.add_volume(elsewhere / ".smartcache")
    filled("add", "--adopt", write(elsewhere / "m.pt", b"#" * 80_000))
    sizes = [each["size"] for each in filled("ls", "--json", "--sort", key).json]
    assert sorted(sizes) == [70_000, 80_000, 100_000]
    if key == "size":
        assert sizes == [100_000, 80_000, 70_000]
    assert f"{elsewhere}/.smartcache" in filled("ls").stdout


class TestDir:
    def test_prints_the_root_without_making_it(self, sc: Here, home: Path) -> None:
        assert sc("dir").stdout == f"{home}\n" == sc("dir", "-q").stdout
        assert not home.exists()

    def test_an_option_wins_over_the_environment(self, sc: Here, tmp_path: Path) -> None:
        other = tmp_path / "other"
        assert sc("--home", other, "dir").stdout == f"{other}\n"
        assert sc("dir", "--home", other).stdout == f"{other}\n"

    def test_verbose_names_each_path(self, sc: Here, home: Path) -> None:
        assert f"journal: {home}/journal.jsonl" in sc("dir", "-v").stdout

    def test_json_says_whether_it_exists(self, sc: Here, home: Path) -> None:
        assert sc("dir", "--json").json["exists"] is False
        Store(home).close()
        document = sc("dir", "--json").json
        assert document["exists"] is True
        assert document["index"] == f"{home}/index.sqlite3"

    def test_of_a_store_that_was_moved_it_is_the_new_place(
        self, filled: Here, tmp_path: Path
    ) -> None:
        filled("mv", tmp_path / "new", "-y")
        assert filled("dir").stdout == f"{tmp_path}/new\n"

    def test_any_byte_comes_out_as_it_is(self, program: Smartcache, tmp_path: Path) -> None:
        name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n")
        assert program("--home", name, "dir").stdout == f"{name}\n"
