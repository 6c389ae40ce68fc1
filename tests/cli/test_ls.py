from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from smartcache.store.store import Store
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
    def test_shows_short_digests_sizes_to_the_right_names_and_pins(
        self, filled: Here, models: Path, home: Path
    ) -> None:
        assert filled("ls").stdout.splitlines() == [
            "DIGEST          SIZE  LINKS  USED  PINS  FILE",
            f"{LARGE[:12]}  100 KB      0   now  kept  -",
            f"{SMALL[:12]}   70 KB      1   now  -     {models}/sub/c.gguf",
        ]
        assert filled("ls").stderr == "2 blobs, 170 KB\n"
        with Store(home) as store:
            store.put_stream([b"x"])
        assert filled("ls").stdout.splitlines()[3].split()[-2:] == ["-", "-"]

    def test_verbose_shows_all_that_is_known(self, filled: Here, models: Path, home: Path) -> None:
        text = filled("ls", "-v").stdout
        assert f"{SMALL}\n  70 KB (70000 bytes)" in text
        assert f"\n  {models}/sub/c.gguf\n" in text
        assert "  pinned as 'kept'" in text
        assert f"  in {home}" in text

    @pytest.mark.usefixtures("filled")
    def test_fits_the_terminal(self, program: Smartcache, home: Path) -> None:
        for digest in (LARGE, SMALL):
            age(home, digest, days=3)
        lines = program.at_terminal("ls", columns=60).stdout.splitlines()
        plain = [re.sub(r"\x1b\[[0-9;]*[mK]", "", line) for line in lines]
        assert max(map(len, plain)) <= 60
        assert any(line.endswith("c.gguf") and "…" in line for line in plain)

    def test_what_is_not_there_is_not_listed(self, filled: Here, home: Path) -> None:
        for digest in (LARGE, SMALL):
            (home / "blobs" / digest[:2] / digest).unlink()
            assert filled.digests() == [SMALL] * (digest == LARGE)
        assert filled("ls").stdout == ""
        assert filled("ls", "--json").json == []


def test_programs_get_integer_bytes_utc_times_and_whole_digests(
    filled: Here, models: Path, home: Path
) -> None:
    first, second = filled("ls", "--json").json
    assert (first["digest"], first["size"], first["links"]) == (LARGE, len(WEIGHTS), 0)
    assert (second["digest"], second["links"], second["pool"]) == (SMALL, 1, str(home))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["used_at"])
    assert "paths" not in first
    first, second = filled("ls", "--json", "-v").json
    assert (first["pins"], second["pins"]) == (["kept"], [])
    assert (first["paths"], second["paths"]) == ([], [str(models / "sub/c.gguf")])
    assert first["hashes"] == {}
    assert filled("ls", "-q").ids == [LARGE, SMALL]


class TestFilter:
    def test_keeps_what_it_holds_for(self, filled: Here, home: Path) -> None:
        age(home, SMALL, days=40)
        kept = {
            "size>80KB": [LARGE], "size <= 70000": [SMALL], "size!=70000": [LARGE],
            "links=0": [LARGE], "links>0": [SMALL],
            "pinned=yes": [LARGE], "pinned!=yes": [SMALL],
            "pin=kept": [LARGE], "pin!=kept": [SMALL],
            "accessed>30d": [SMALL], "used>30d": [SMALL], "used<30d": [LARGE],
            "added>=5w": [SMALL], "size>1TB": [],
        }  # fmt: skip
        assert {test: filled.digests("--filter", test) for test in kept} == kept
        assert filled.digests("--filter", "size>1KB", "--filter", "links=1") == [SMALL]

    def test_nonsense_is_explained(self, sc: Here) -> None:
        for test in (
            "", "size", "size>", "size>big", "colour=red", "used>soon", "pinned=maybe", "links=x",
            "pinned>yes", "size>-1",
        ):  # fmt: skip
            done = sc("ls", "--filter", test, code=2)
            assert "'--filter'" in done.error, test
            assert "size>1GB" in done.hint, test


class TestSort:
    def test_by_every_key(self, filled: Here, home: Path) -> None:
        age(home, LARGE, days=40)
        up, down = [SMALL, LARGE], [LARGE, SMALL]
        orders = {
            "size": down, "size:desc": down, "size:asc": up, "used": up, "used:asc": down,
            "accessed": up, "added": up, "added:asc": down, "digest": sorted(up),
            "digest:desc": sorted(up, reverse=True),
        }  # fmt: skip
        assert {key: filled.digests("--sort", key) for key in orders} == orders
        assert filled.digests("--sort", "size:asc", "--limit", "1") == [SMALL]
        assert filled.digests("--limit", "0") == []

    def test_nonsense_is_explained(self, sc: Here) -> None:
        for key in ("", "colour", "size:up", ":asc"):
            assert "size, added, used, digest" in sc("ls", "--sort", key, code=2).hint, key


def test_several_pools_are_listed_as_one(filled: Here, home: Path, elsewhere: Path) -> None:
    with Store(home) as store:
        store.add_pool(elsewhere / ".smartcache")
    filled("add", "--adopt", write(elsewhere / "m.pt", b"#" * 80_000))
    sizes = [70_000, 80_000, 100_000]
    for key, expected in (("size", sizes[::-1]), ("size:asc", sizes)):
        found = [each["size"] for each in filled("ls", "--json", "--sort", key).json]
        assert found == expected
    assert len(filled("ls", "-q", "--sort", "used").ids) == 3
    assert f"{elsewhere}/.smartcache" in filled("ls").stdout


class TestDir:
    def test_prints_the_root_and_each_path(self, sc: Here, home: Path) -> None:
        assert sc("dir").stdout == f"{home}\n" == sc("dir", "-q").stdout
        assert f"journal: {home}/journal.sqlite3" in sc("dir", "-v").stdout
        assert sc("dir", "--json").json["exists"] is False
        sc("scan", home.parent)
        document = sc("dir", "--json").json
        assert (document["exists"], document["index"]) == (True, f"{home}/index.sqlite3")

    def test_an_option_wins_over_the_environment(self, sc: Here, tmp_path: Path) -> None:
        other = tmp_path / "other"
        assert sc("--home", other, "dir").stdout == f"{other}\n"

    def test_any_byte_comes_out_as_it_is(self, program: Smartcache, tmp_path: Path) -> None:
        name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n")
        assert program("--home", name, "dir").stdout == f"{name}\n"
