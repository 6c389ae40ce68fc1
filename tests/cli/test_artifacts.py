"""Looking at sets of artifacts and removing them: `artifacts ls`, `show`, `rm`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from smartcache.cache import SmartCache
from tests.cli.computed import SHAPE, days_ago, fill, keys
from tests.cli.running import ROOT, Here, Smartcache


@pytest.fixture
def two(sc: Here, home: Path) -> tuple[str, str]:
    """Two sets of one name, and one of another; the ids of the two, the last used first."""
    with days_ago(40):
        old = fill(home, count=3, size=512, vae={"digest": "ab", "scale": 0.5})
    fill(home, "captions", count=1)
    new = fill(home, count=10, size=1024, vae={"digest": "ab", "scale": 0.25})
    return new, old


class TestLs:
    def test_lists_sets_by_name_and_says_what_tells_those_of_one_name_apart(
        self, sc: Here, two: tuple[str, str]
    ) -> None:
        """From the point of view of the older one; equal values are not mentioned."""
        new, old = two
        done = sc("artifacts", "ls")
        lines = done.stdout.splitlines()
        assert re.fullmatch(r"SET +ID +ARTIFACTS +LIVE +ON DISK +USED", lines[0])
        assert [line.split()[0] for line in lines[1:4]] == ["captions", "latents", "latents"]
        (line,) = [line for line in lines[1:4] if old[:12] in line]
        assert re.search(r" 3 .* 1 month ago$", line)
        assert "3 sets, 14 artifacts" in done.stderr
        text = sc("artifacts", "ls", "latents").stdout
        assert f"latents {old[:12]} differs from {new[:12]}:\n" in text
        assert "  size: 512 / 1024\n" in text
        assert "  vae.scale: 0.5 / 0.25\n" in text
        assert "digest" not in text
        assert "captions" not in text
        assert "differs" not in sc("artifacts", "ls", "captions").stdout

    def test_the_document_has_everything(self, sc: Here, two: tuple[str, str]) -> None:
        new, old = two
        document = sc("artifacts", "ls", "--json").json
        entries = {each["id"]: each for each in document["sets"]}
        assert len(entries) == 3
        assert entries[new]["differs_from"] is None
        assert entries[old]["differs_from"] == new
        assert {each["path"] for each in entries[old]["differences"]} == {"size", "vae.scale"}
        assert entries[new]["fingerprint"] == {"size": 1024, "vae": {"digest": "ab", "scale": 0.25}}
        assert entries[new]["artifacts"] == 10
        assert entries[new]["live"] <= entries[new]["on_disk"]
        assert document["artifacts"] == 14

    def test_filters_and_orders(self, sc: Here, two: tuple[str, str]) -> None:
        counts = {
            "--filter artifacts>=3 --sort live:asc": [3, 10],
            "--filter name=captions": [1],
            "--filter name!=captions --sort artifacts": [10, 3],
            "--filter used<1d --sort live:asc": [1, 10],
            "--sort size --limit 1": [10],
            "--sort used:asc --limit 1": [3],
            "--filter size>1TB": [],
        }
        for line, expected in counts.items():
            sets = sc("artifacts", "ls", "--json", *line.split()).json["sets"]
            assert [each["artifacts"] for each in sets] == expected, line
        for line in ("--filter refs=main", "--filter size>big", "--sort colour"):
            assert sc("artifacts", "ls", *line.split(), code=2).hint.startswith("Write "), line
        for test in ("used>30d", "accessed>30d"):
            assert sc("artifacts", "ls", "-q", "--filter", test).ids == [f"latents/{two[1]}"]

    def test_a_set_that_cannot_be_read_is_listed_with_its_problem_and_can_be_removed(
        self, sc: Here, two: tuple[str, str], home: Path
    ) -> None:
        (home / "sets/latents" / two[0] / "set.json").write_text("{}")
        done = sc("artifacts", "ls")
        assert re.search(rf"^latents +{two[0][:12]} +\? +\? ", done.stdout, re.MULTILINE)
        assert f"Warning: latents/{two[0][:12]}: " in done.stderr
        assert "remove the set: 'smartcache artifacts rm'" in done.stderr
        assert len(sc("artifacts", "ls", "-q").ids) == 3
        sc("artifacts", "rm", two[0], "-y")
        assert len(sc("artifacts", "ls", "-q").ids) == 2
        done = sc("artifacts", "ls", "nothing", code=1)
        assert "There is no set 'nothing'" in done.error
        assert "artifacts ls" in done.hint

    def test_needs_no_torch(self, home: Path) -> None:
        """Listing is asked for often; loading torch takes longer than all of it."""
        fill(home)
        code = "import sys; sys.modules['torch'] = None; from smartcache.cli import main; main()"
        command = [sys.executable, "-c", code, "artifacts", "ls", "-q"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("latents/")

    def test_a_set_of_the_format_before_is_refused_in_one_line(
        self, sc: Here, two: tuple[str, str], home: Path
    ) -> None:
        about = home / "sets/latents" / two[0] / "set.json"
        about.write_text(about.read_text().replace('"format": 2', '"format": 1'))
        done = sc("artifacts", "show", two[0], code=1)
        assert done.error.endswith(f"{two[0]} was made by an older smartcache (format 1)")
        words = done.hint.split("'")[1].split()[1:]
        sc(*words, "-y")
        assert f"latents/{two[0]}" not in sc("artifacts", "ls", "-q").ids

    def test_clears_what_a_killed_rm_has_left(self, sc: Here, home: Path) -> None:
        id_ = fill(home)
        left = home / "sets/latents" / f".removed-{id_}-0123abcd"
        (home / "sets/latents" / id_).rename(left)
        assert sc("artifacts", "ls", "-q").ids == []
        assert os.listdir(home / "sets") == []


class TestShow:
    def test_a_set_has_many_names_and_several_of_one_name_are_named(
        self, sc: Here, two: tuple[str, str]
    ) -> None:
        id_ = two[0]
        for name in (id_, id_[:6], f"latents/{id_[:6]}"):
            assert sc("artifacts", "show", name, "--json").json["id"] == id_
        assert sc("artifacts", "show", "captions", "--json").json["name"] == "captions"
        done = sc("artifacts", "show", "latents", code=1)
        assert done.error == "'latents' stands for 2 sets"
        assert all(f"latents/{id_[:12]}" in done.hint for id_ in two)
        for command in ("show", "rm"):
            assert "Missing argument 'SET" in sc("artifacts", command, code=2).error

    def test_says_what_a_set_is(self, sc: Here, home: Path) -> None:
        fill(home, size=1024, vae="a" * 70)
        text = sc("artifacts", "show", "latents").stdout
        assert f'  vae   "{"a" * 70}"' in text  # in full: people compare it
        assert "  size  1024" in text
        assert re.search(r"^  artifacts +10  0 of them pinned$", text, re.MULTILINE)
        assert re.search(r"^  saved +18.4 KB  by keeping equal", text, re.MULTILINE)
        assert re.search(r"^  latent +numpy float32 +\[4, 16, 16\]$", text, re.MULTILINE)
        assert re.search(r"^  caption +values$", text, re.MULTILINE)
        assert "Failed" not in text
        assert sc("artifacts", "show", "latents", "-q").ids == [f"key-{n}" for n in range(10)]

    def test_shows_options_pins_and_failures(self, sc: Here, home: Path) -> None:
        def fail() -> object:
            raise ValueError("no such image")

        with (
            SmartCache(home) as cache,
            cache.artifacts("latents", fingerprint={}, max_size=10**9, ttl=86_400) as latents,
        ):
            latents.put("a", 1)
            latents.pin("a")
            with pytest.raises(ValueError, match="no such image"):
                latents.get_or_compute("b", fail, remember_failures=True)
        text = sc("artifacts", "show", "latents").stdout
        assert re.search(r"^  bound +1 GB$", text, re.MULTILINE)
        assert re.search(r"^  time to live +1 day$", text, re.MULTILINE)
        assert "1 of them pinned" in text
        assert "Failed: 1 computation" in text
        assert "ValueError: no such image" in text
        document = sc("artifacts", "show", "latents", "--json").json
        assert document["options"]["max_size"] == 10**9
        assert document["pinned"] == 1
        (failure,) = document["failures"]
        assert (failure["key"], failure["count"]) == ("b", 1)

    def test_an_artifact_is_shown_without_its_tensors(self, sc: Here, home: Path) -> None:
        """Its chunk is damaged: whoever read it would notice. It is no use either."""
        with days_ago(40):
            id_ = fill(home, count=1)
        (pack,) = (home / "sets/latents" / id_).glob("*.pack")
        data = bytearray(pack.read_bytes())
        data[data.index(np.ones(64, np.float16).tobytes())] ^= 1
        pack.write_bytes(data)
        text = sc("artifacts", "show", "latents", "key-0").stdout
        assert re.search(r"^  latent +numpy float32 \[4, 16, 16\], 4.1 KB$", text, re.MULTILINE)
        assert '"a cat, take 0"' in text
        assert "[0, 0, 16, 16]" in text
        assert '  file  "0.png"' in text
        document = sc("artifacts", "show", "latents", "key-0", "--json").json
        assert document["parts"][0]["shape"] == list(SHAPE)
        assert document["metadata"] == {"file": "0.png"}
        assert document["expires_at"] is None
        used = datetime.fromisoformat(document["used_at"])
        assert (datetime.now(UTC) - used).days >= 39
        assert keys(home, id_) == {"key-0"}

    def test_a_key_may_be_given_by_its_beginning(self, sc: Here, home: Path) -> None:
        """Whatever the keys around it are, and in which form they are stored."""
        digests = ["ab12" + "0" * 60, "ab12" + "f" * 60, "ab12f", "0" * 64, "0" * 31 + "1"]
        names = [*digests, "picture-0001.png", *(f"img_{n}" for n in (*range(10, 14), 25))]
        with SmartCache(home) as cache, cache.artifacts("x", fingerprint={}) as some:
            for name in names:
                some.put(name, name)
        meant = {
            "ab120": digests[0], "ab12ff": digests[1], "ab12f": "ab12f", "pict": names[5],
            "img_2": "img_25", "img_10": "img_10", "0" * 32: "0" * 64,
        }  # fmt: skip
        for given, name in meant.items():
            assert sc("artifacts", "show", "x", given, "-q").ids == [name]
        for given, error, hint in (
            ("ab12", "Several artifacts of x have keys that begin with ab12", "Write more of it"),
            ("img_1", "Several artifacts of x", "Write more of it"),
            ("pic", "no artifact pic", "at least 4 characters"),
            ("nothing", "x has no artifact nothing", "-q"),
        ):
            done = sc("artifacts", "show", "x", given, code=1)
            assert (error in done.error, hint in done.hint) == (True, True), given
        assert sc("artifacts", "rm", "x", "img_2", "-y", "-q").ids == ["img_25"]

    def test_values_of_all_kinds_can_be_shown(self, sc: Here, home: Path) -> None:
        value = {
            1: b"\xff", "nan": float("nan"), (1, "a"): {"deep": [np.zeros(1000)]},
            "set": {1}, "none": None, "big": 1 << 200, "scalar": np.float32(3),
        }  # fmt: skip
        with SmartCache(home) as cache, cache.artifacts("x", fingerprint={}) as some:
            some.put("dict", value)
            some.put("array", np.zeros((3, 1000), ">f4"))
            some.put("text", "line\nbreak \x1b[31m")
        text = sc("artifacts", "show", "x", "dict").stdout
        assert "deep" in text
        assert "numpy >f4 [3, 1000], 12 KB" in sc("artifacts", "show", "x", "array").stdout
        assert "\x1b" not in sc("artifacts", "show", "x", "text").stdout
        parts = sc("artifacts", "show", "x", "dict", "--json").json["parts"]
        deep = next(part["value"] for part in parts if part["name"] == "[(1, 'a')]")
        assert deep == {"deep": [{"kind": "numpy", "dtype": "<f8", "shape": [1000]}]}
        assert sc("artifacts", "show", "x", "--json").json["structures"]

    def test_small_tensors_are_shown_as_tensors_and_counted(self, sc: Here, home: Path) -> None:
        with SmartCache(home) as cache, cache.artifacts("x", fingerprint={}) as some:
            some.put("bare", np.zeros(3, np.float32))
            some.put("one", 1)
            some.put("two", "two")
        document = sc("artifacts", "show", "x", "bare", "--json").json
        assert (document["parts"][0]["shape"], document["size"] > 0) == ([3], True)
        assert len(sc("artifacts", "show", "x", "--json").json["structures"]) == 2
        assert "numpy float32  [3]" in sc("artifacts", "show", "x").stdout

    def test_another_set_does_not_stand_in_the_way(self, sc: Here, home: Path) -> None:
        with SmartCache(home) as cache:
            paths = []
            for name in ("x", "y"):
                with cache.artifacts(name, fingerprint={}) as some:
                    some.put("k", np.zeros(1000))
                    paths.append(some.path)
        (pack,) = paths[0].glob("*.pack")
        (paths[1] / pack.name).write_bytes(pack.read_bytes())
        (paths[1] / pack.name).chmod(0o600)
        assert "another set" not in sc("artifacts", "show", "x").stderr
        assert sc("artifacts", "show", "y").stderr.count("is a pack of another set") == 1

    def test_what_needs_a_codec_is_said_and_no_obstacle(self, sc: Here, home: Path) -> None:
        code = f"""
import collections
from smartcache import SmartCache, register_codec
Point = collections.namedtuple("Point", "x y")
register_codec("point", Point, tuple, lambda value: Point(*value))
with SmartCache({str(home)!r}) as cache, cache.artifacts("x", fingerprint={{}}) as some:
    some.put("a", {{"at": Point(1, 2), "name": "here"}})
"""
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        text = sc("artifacts", "show", "x", "a").stdout
        assert "the codec 'point'" in text
        assert '"here"' in text

    def test_a_damaged_record_is_an_error_with_a_hint(self, sc: Here, home: Path) -> None:
        id_ = fill(home, count=1)
        (pack,) = (home / "sets/latents" / id_).glob("*.pack")
        data = bytearray(pack.read_bytes())
        data[data.index(b"a cat, take")] ^= 1
        pack.write_bytes(data)
        done = sc("artifacts", "show", "latents", "key-0", code=1)
        assert "damaged" in done.error
        assert "artifacts verify" in done.hint


class TestKeys:
    def test_of_any_text_are_printed_for_programs_and_for_people(
        self, program: Smartcache, home: Path
    ) -> None:
        """Also such that no file could be called so."""
        given = ["a\nb", "c\x1b[31m", "d\ud800"]
        with SmartCache(home) as cache, cache.artifacts("any", fingerprint={}) as opened:
            for key in given:
                opened.put(key, 1)
        raw = [key.encode("utf-8", "surrogatepass") for key in given]
        printed = os.fsencode(program("artifacts", "show", "any", "-0").stdout)
        assert sorted(printed.removesuffix(b"\0").split(b"\0")) == raw
        printed = os.fsencode(program("artifacts", "show", "any", "-q").stdout)
        assert printed.count(b"\n") == 4
        shown = program.at_terminal("artifacts", "show", "any", "-q").stdout
        assert sorted(shown.splitlines()) == [r"a\nb", r"c\x1b[31m", r"d\ud800"]


class TestRm:
    def test_removes_a_set_and_says_what_came_back(self, sc: Here, home: Path) -> None:
        fill(home)
        planned = sc("artifacts", "rm", "latents", "-n", "--json").json
        done = sc("artifacts", "rm", "latents", "-y", "--json").json
        assert done["victims"] == planned["victims"]
        assert done["freed_size"] == done["planned_size"] > 10 * 4096
        assert (done["sets"], done["artifacts"]) == (1, 10)
        assert os.listdir(home / "sets") == []

    def test_a_name_stands_for_all_sets_of_it_and_an_id_for_one(
        self, sc: Here, two: tuple[str, str], program: Smartcache
    ) -> None:
        done = sc("artifacts", "rm", "latents", "-n")
        assert all(id_[:12] in done.stdout for id_ in two)
        assert "Would remove 2 sets with 13 artifacts" in done.stdout
        shown = program.at_terminal("artifacts", "rm", "latents", answer="n\n").stdout
        assert "latents are 2 sets; latents/" in shown
        assert "Remove 2 sets with 13 artifacts for good" in shown
        sc("artifacts", "rm", "-y", f"latents/{two[1][:4]}")
        assert sc("artifacts", "ls", "-q", "latents").ids == [f"latents/{two[0]}"]
        names = sc("artifacts", "ls", "-q").ids
        assert sc("artifacts", "rm", "-y", "-q", *names).ids == names
        assert sc("artifacts", "ls", "-q").ids == []

    def test_a_key_that_looks_like_a_set_is_a_key(
        self, sc: Here, home: Path, two: tuple[str, str]
    ) -> None:
        """Whether there is such an artifact or not: no other set is removed."""
        new, old = two
        before = sc("artifacts", "ls", "-q").ids
        with SmartCache(home) as cache, cache.sets.open_id(cache.sets.find(new)[0]) as opened:
            opened.put(old[:8], 1)
            opened.put("captions", 1)
        assert sc("artifacts", "rm", new, old[:8], "captions", "-y", "-q").ids == [
            old[:8],
            "captions",
        ]
        for word in (old[:8], old, "captions"):
            assert f"no artifact {word}" in sc("artifacts", "rm", new, word, "-y", code=1).error
        assert sc("artifacts", "ls", "-q").ids == before

    def test_removes_artifacts_by_key_and_compacts_what_is_half_dead(
        self, sc: Here, home: Path
    ) -> None:
        id_ = fill(home)
        assert "no artifact nope" in sc("artifacts", "rm", "latents", "key-1", "nope", code=1).error
        assert len(keys(home, id_)) == 10
        done = sc("artifacts", "rm", "latents", "key-1", "key-2", "-y")
        assert done.stdout.startswith("Removed 2 artifacts, freed 0 B.")
        assert "compact --force" in done.stderr
        assert keys(home, id_) == {f"key-{n}" for n in (0, *range(3, 10))}
        names = [f"key-{number}" for number in (0, *range(3, 8))]
        document = sc("artifacts", "rm", id_[:8], *names, "-y", "--json").json
        assert (document["artifacts"], document["victims"][0]["keys"]) == (6, names)
        assert document["freed_size"] > 6 * 4096
        assert keys(home, id_) == {"key-8", "key-9"}

    def test_keys_need_one_set_and_are_not_mixed_with_sets(
        self, sc: Here, two: tuple[str, str]
    ) -> None:
        assert "stands for 2 sets" in sc("artifacts", "rm", "latents", "key-1", "-y", code=1).error
        done = sc("artifacts", "rm", two[0], f"latents/{two[1]}", "key-1", "-y", code=2)
        assert f"'latents/{two[1]}' is a set" in done.error
        assert len(sc("artifacts", "ls", "-q").ids) == 3

    def test_a_set_that_somebody_has_open_goes_too(self, sc: Here, home: Path) -> None:
        """Nothing is being written: it goes, and does not come back."""
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            latents.put("a", 1)
            latents.flush()
            sc("artifacts", "rm", "latents", "-y")
            assert sc("artifacts", "ls", "-q").ids == []


class TestWhatCannotBeUsed:
    WORDS = (["ls"], ["show", "latents"], ["verify"], ["rm", "latents", "-y"], ["compact"])

    @pytest.mark.timeout(30)
    @pytest.mark.parametrize("name", ["set.json", "index.sqlite3", "lock"])
    def test_a_fifo_is_named_and_not_waited_for(self, name: str, sc: Here, home: Path) -> None:
        file = home / "sets/latents" / fill(home) / name
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        for words in (*self.WORDS, ["rm", "latents", "key-1", "-y"]):
            code = {"ls": 0, "verify": 3}.get(words[0], 1)
            done = sc("artifacts", *words, code=code)
            assert f"{file} is not a regular file" in done.stdout + done.stderr
        assert "Remove it: smartcache did not make it." in sc("artifacts", "ls").stderr
        assert "Remove it: smartcache did not make it." in sc("artifacts", "verify", code=3).stderr

    def test_no_artifact_is_lost_with_the_index(self, sc: Here, home: Path) -> None:
        """It has what is remembered of failures and uses, and begins anew."""
        id_ = fill(home)
        index = home / "sets/latents" / id_ / "index.sqlite3"
        for number, content in enumerate((b"no database" * 1000, None)):
            for line in ("ls", "show latents", "verify", f"rm latents key-{number} -y"):
                index.unlink(missing_ok=True)
                if content is not None:
                    index.write_bytes(content)
                done = sc("artifacts", *line.split())
                assert ("no artifact is lost" in done.stderr) == (content is not None), line
        assert len(keys(home, id_)) == 8
