"""`smartcache download`: what it shows, what it makes, and what it says when things go wrong."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import huggingface_hub
import pytest
from blake3 import blake3

from smartcache.cli._downloads import MOST_SHOWN
from smartcache.hub.plan import MOST_UNKNOWN
from tests.cli.running import PATIENCE, Here, Process, Result, Smartcache
from tests.hub_server import Commit, Hub
from tests.hub_server.faults import ALWAYS
from tests.store.files import inode_of, snapshot, write
from tests.store.small_disks import Disk, in_own_namespace

ESCAPES = re.compile(r"[^\n]*\r\x1b\[K|\x1b\[[0-9;]*[A-Za-z]|\r")
"""And what they wiped away."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
ENCODER = random.Random(1).randbytes(300_000)
UNET = random.Random(2).randbytes(500_000)
OTHER_UNET = random.Random(3).randbytes(400_000)
ONE = {
    "config.json": b'{"one": 1}',
    "text_encoder/model.safetensors": ENCODER,
    "unet/model.safetensors": UNET,
}
TWO = {
    "config.json": b'{"two": 2}',
    "text_encoder/model.safetensors": ENCODER,
    "unet/model.safetensors": OTHER_UNET,
}


class Download:
    """`download("org/one", "-q")`: the command as a process, with a Hub and an HF cache."""

    def __init__(self, program: Smartcache, hub: Hub, cache: Path) -> None:
        self.program = self._program = program
        self.hub = hub
        self.cache = cache

    def env(self) -> dict[str, str]:
        return {**self.hub.environment, "HF_HUB_CACHE": str(self.cache)}

    def __call__(
        self, *words: str | Path, code: int = 0, env: dict[str, str] | None = None
    ) -> Result:
        return self._program("download", *words, code=code, env={**self.env(), **(env or {})})

    def start(self, *words: str | Path) -> Process:
        return self._program.start("download", *words, env=self.env())

    def folder(self, name: str) -> Path:
        return self.cache / f"models--{name.replace('/', '--')}"

    def snapshot(self, commit: Commit) -> Path:
        return self.folder(commit.repo) / "snapshots" / commit.sha

    def unfinished(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*.incomplete"))


@pytest.fixture
def download(program: Smartcache, hub: Hub, tmp_path: Path) -> Download:
    return Download(program, hub, tmp_path / "hf")


@pytest.fixture
def one(hub: Hub) -> Commit:
    return hub.add("org/one", ONE, tags=["v1"])


@pytest.fixture
def two(hub: Hub) -> Commit:
    return hub.add("org/two", TWO)


def undo_id(done: Result) -> str:
    """Return the id that a command has named."""
    (found,) = re.findall(r"'smartcache undo ([0-9a-f]{8})'", done.stderr)
    return str(found)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder that programs see, read through all links."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".cache" not in path.parts
    }


@pytest.mark.usefixtures("one")
class TestPlan:
    def test_the_path_is_all_that_is_printed_as_data(self, download: Download, one: Commit) -> None:
        done = download("org/one")
        assert done.ids == [str(download.snapshot(one))]
        assert contents(download.snapshot(one)) == ONE
        assert done.stderr.splitlines() == [
            f"model/org/one at main ({one.sha[:12]}): 3 files, 800 KB",
            "SOURCE    SIZE  FILE                            FROM",
            "fetch   500 KB  unet/model.safetensors          the Hub",
            "fetch   300 KB  text_encoder/model.safetensors  the Hub",
            "fetch     10 B  config.json                     the Hub",
            "",
            "fetch  3 files  800 KB  not in any known folder: comes from the Hub",
            "800 KB to fetch.",
            "Fetched 800 KB.",
            "2 new files are read-only, so that programs can share the bytes.",
            f"Take it back with 'smartcache undo {undo_id(done)}'.",
        ]
        before = snapshot(download.cache)
        again = download("org/one")
        assert again.ids == done.ids
        assert again.stderr == "model/org/one: everything is there already.\n"
        assert snapshot(download.cache) == before

    def test_what_another_repo_brought_is_linked(self, download: Download, two: Commit) -> None:
        first = download("org/one", "-q").ids[0]
        download.hub.clear()
        done = download("org/two")
        lines = done.stderr.splitlines()
        assert "link    300 KB  text_encoder/model.safetensors  the store" in lines
        assert "400 KB to fetch; 300 KB to come from this machine." in lines
        assert "Fetched 400 KB; 300 KB came from this machine." in lines
        assert "1 file was linked; 2 new files are read-only" in done.stderr
        assert download.hub.gets("text_encoder") == []
        shared = "text_encoder/model.safetensors"
        assert inode_of((Path(first) / shared).resolve()) == inode_of(
            (download.snapshot(two) / shared).resolve()
        )

    def test_a_file_of_a_known_folder_is_reused(
        self, download: Download, program: Smartcache, tmp_path: Path
    ) -> None:
        """It becomes read-only, which is said with the way back."""
        found = write(tmp_path / "mine" / "clip.safetensors", ENCODER)
        program("folders", "add", found.parent)
        program("scan", found.parent)
        done = download("org/one")
        assert f"1 file is now read-only: {found}" in " ".join(done.stderr.split())
        assert download.hub.gets("text_encoder") == []
        assert download.hub.fetched_bytes() == len(UNET) + len(ONE["config.json"])
        program("undo", undo_id(done), "-y")
        assert os.stat(found).st_mode & 0o777 == 0o644

    def test_a_file_of_a_server_whose_etag_is_no_hash_comes_all_the_same(
        self, download: Download
    ) -> None:
        download.hub.faults.other_etag("org/one/", "5f3e-1a2b3c4d")
        done = download("org/one", "unet/model.safetensors")
        assert Path(done.stdout.strip()).read_bytes() == UNET
        assert download("org/one", "unet/model.safetensors").stdout == done.stdout
        assert len(download.hub.gets("unet")) == 1

    def test_files_that_were_not_looked_at_are_named(
        self, download: Download, program: Smartcache, tmp_path: Path
    ) -> None:
        for number in range(MOST_UNKNOWN + 3):
            data = number.to_bytes(4, "little") + ENCODER[4:]
            write(tmp_path / "mine" / f"{number}.safetensors", data)
        program("folders", "add", tmp_path / "mine")
        program("scan", tmp_path / "mine")
        (warning,) = download("org/one", "--dry-run", "--json").json["warnings"]
        assert warning.startswith("text_encoder/model.safetensors: 3 more files have its size")

    def test_a_folder_can_be_named_for_one_download(
        self, download: Download, program: Smartcache, tmp_path: Path
    ) -> None:
        found = write(tmp_path / "old disk" / "deep" / "clip.safetensors", ENCODER)
        before = snapshot(found.parent)
        looked = download("org/one", "-n", "--also", tmp_path / "old disk", "--json").json
        assert [each["source"] for each in looked["files"]].count("reuse") == 1, "without a store"
        done = download("org/one", "--also", tmp_path / "old disk", "--json").json
        assert done["reused_size"] == len(ENCODER)
        (reused,) = [each for each in done["files"] if each["source"] == "reuse"]
        assert (reused["origin"], reused["proven"]) == (str(found), True)
        assert reused["path"] == "text_encoder/model.safetensors"
        assert download.hub.gets("text_encoder") == []
        assert snapshot(found.parent) == before
        known = program("folders", "ls", "--json").stdout
        assert "old disk" not in known

    def test_json_has_everything(self, download: Download, one: Commit) -> None:
        done = download("org/one", "--json")
        assert done.stderr == ""
        document = done.json
        files = {each.pop("path"): each for each in document.pop("files")}
        weights = (path for path in download.snapshot(one).rglob("*.safetensors"))
        blobs = sorted(str(path.resolve()) for path in weights)
        document["new_read_only"].sort()
        history = download.program("undo", "--list", "--json").json["history"]
        assert len(history) == 1
        sizes = dict.fromkeys((
            "present_size", "saved_size", "unproven_size", "tier_size", "taken_size",
            "reused_size", "freed_size",
        ), 0)  # fmt: skip
        lists: dict[str, object] = {
            name: [] for name in ("linked", "copied", "read_only", "narrow", "warnings")
        }
        assert document == sizes | lists | {
            "repo": "org/one", "type": "model", "revision": "main", "commit": one.sha,
            "path": str(download.snapshot(one)), "fetch_size": 800_010, "needed_size": 800_010,
            "fetched_size": 800_010, "new_read_only": blobs, "dry_run": False,
            "undo_ids": [each["id"] for each in history],
        }  # fmt: skip
        assert files.keys() == ONE.keys()
        unet = files["unet/model.safetensors"]
        assert unet.pop("digest") == blake3(UNET).hexdigest()
        assert unet == {
            "size": len(UNET), "etag": one.etag("unet/model.safetensors"), "source": "fetch",
            "origin": None, "proven": True,
        }  # fmt: skip

    def test_a_dry_run_changes_nothing(
        self, download: Download, program: Smartcache, one: Commit
    ) -> None:
        program("scan", "-q")
        done = download("org/one", "--dry-run")
        assert "fetch   500 KB  unet/model.safetensors          the Hub" in done.ids
        assert done.ids[-1] == "Would fetch 800 KB."
        assert done.stderr == ""
        assert download("org/one", "-n", "-q").ids == [str(download.snapshot(one))]
        path = str(download.snapshot(one) / "config.json")
        assert download("org/one", "config.json", "-n", "-q").ids == [path]
        document = download("org/one", "-n", "--json").json
        assert document["dry_run"]
        assert (document["path"], document["fetched_size"]) == (None, 0)
        assert [each["proven"] for each in document["files"]] == [False] * 3
        assert not download.cache.exists()
        assert download.hub.gets() == []

    def test_a_dry_run_without_a_store_makes_none_and_knows_what_is_at_the_target(
        self, download: Download, home: Path, tmp_path: Path
    ) -> None:
        before = snapshot(tmp_path)
        done = download("org/one", "--dry-run")
        assert "fetch   500 KB  unet/model.safetensors          the Hub" in done.ids
        assert done.ids[-1] == "Would fetch 800 KB."
        assert snapshot(tmp_path) == before
        assert download.hub.gets() == []
        huggingface_hub.hf_hub_download(
            "org/one", "unet/model.safetensors", cache_dir=download.cache,
            endpoint=download.hub.url,
        )  # fmt: skip
        files = download("org/one", "--dry-run", "--json").json["files"]
        assert {each["path"]: each["source"] for each in files} == {
            "config.json": "fetch",
            "text_encoder/model.safetensors": "fetch",
            "unet/model.safetensors": "present",
        }
        assert not home.exists()

    def test_of_many_files_the_largest_are_shown(self, download: Download) -> None:
        files = {f"part-{number:03}.json": b"x" * (number + 1) for number in range(40)}
        download.hub.add("org/many", files)
        done = download("org/many", "--dry-run")
        shown = [line for line in done.ids if "part-" in line]
        assert len(shown) == MOST_SHOWN
        assert shown[0].split() == ["fetch", "40", "B", "part-039.json", "the", "Hub"]
        assert f"... and {40 - MOST_SHOWN} more, 406 B; -v shows all" in done.ids
        everything = download("org/many", "--dry-run", "-v")
        assert sum("part-" in line for line in everything.ids) == len(files)

    @pytest.mark.parametrize("columns", [80, 120])
    def test_it_fits_into_the_terminal(
        self, download: Download, program: Smartcache, columns: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = {f"{'long/' * 12}{number}/model.safetensors": UNET[number:] for number in range(3)}
        download.hub.add("org/long", {**long, "text_encoder/model.safetensors": ENCODER})
        for name, value in download.env().items():
            monkeypatch.setenv(name, value)
        download("org/one", "-q")
        done = program.at_terminal("download", "org/long", columns=columns)
        assert done.code == 0
        *lines, path = ESCAPES.sub("", done.stdout).splitlines()
        assert max(map(len, lines)) <= columns
        assert Path(path).name == download.hub.repositories["model", "org/long"].branches["main"]
        assert any(line.startswith("link ") and line.endswith("the store") for line in lines)


@pytest.mark.usefixtures("one")
class TestSelection:
    def test_files_and_folders(self, download: Download, one: Commit) -> None:
        """One file is printed itself."""
        folder = download.snapshot(one)
        assert download("org/one", "config.json").ids == [str(folder / "config.json")]
        assert contents(folder).keys() == {"config.json"}
        assert download("org/one", "unet/").ids == [str(folder)]
        assert contents(folder).keys() == {"config.json", "unet/model.safetensors"}

    def test_files_are_names_and_no_patterns(self, download: Download) -> None:
        commit = download.hub.add("org/odd", {"a[1].json": b"1", "a1.json": b"2", "b.json": b"3"})
        download("org/odd", "a[1].json", "b.json")
        assert contents(download.snapshot(commit)) == {"a[1].json": b"1", "b.json": b"3"}

    def test_patterns(self, download: Download, one: Commit) -> None:
        words = ("--include", "*.safetensors", "--include", "*.json", "--exclude", "unet/*")
        download("org/one", *words)
        assert contents(download.snapshot(one)).keys() == {
            "config.json", "text_encoder/model.safetensors"
        }  # fmt: skip

    def test_a_revision(self, download: Download, one: Commit) -> None:
        download.hub.add("org/one", {"config.json": b"newer"})
        assert download("org/one", "--revision", "v1", "-q").ids == [str(download.snapshot(one))]
        assert download("org/one", "--revision", one.sha).ids == [str(download.snapshot(one))]

    def test_a_dataset(self, download: Download) -> None:
        download.hub.add("org/data", {"a.csv": b"1,2"}, repo_type="dataset")
        for words in (("datasets/org/data",), ("org/data", "--repo-type", "dataset")):
            done = download(*words, "--json").json
            assert (done["repo"], done["type"]) == ("org/data", "dataset")
            assert (Path(done["path"]) / "a.csv").read_bytes() == b"1,2"

    def test_everything_again(self, download: Download, one: Commit) -> None:
        download("org/one")
        download.hub.clear()
        done = download("org/one", "--force-download", "--json").json
        assert done["fetched_size"] == download.hub.fetched_bytes() == 800_010
        assert contents(download.snapshot(one)) == ONE

    def test_a_token_is_given_or_taken_from_where_huggingface_hub_has_it(
        self, download: Download
    ) -> None:
        """And never shown."""
        download.hub.add("org/gated", ONE, gated=True)
        download.hub.tokens = {"hf_good": {"org/gated"}}
        for token, code in (("hf_secret", 1), ("hf_good", 0)):
            words = ("--debug", "download", "org/gated", "--token", token)
            done = download.program(*words, code=code, env=download.env())
            assert token not in done.stdout + done.stderr
        assert contents(Path(done.ids[0])) == ONE
        more = {"HF_TOKEN": "hf_good", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}
        assert "Warning" not in download("org/gated", env=more).stderr


@pytest.mark.usefixtures("one")
class TestLocalDir:
    def test_plain_files(self, download: Download, tmp_path: Path) -> None:
        done = download("org/one", "--local-dir", "mine")
        assert done.ids == [str(tmp_path / "mine")]
        assert contents(tmp_path / "mine") == ONE
        assert contents(download.cache).keys() == {"models--org--one/refs/main"}

    @pytest.mark.skipif(os.geteuid() != 0, reason="root only")
    def test_root_hears_that_weights_are_copies(self, download: Download) -> None:
        assert "Warning: You are root: weights in --local-dir are copies" in (
            download("org/one", "--local-dir", "mine").stderr
        )
        assert "root" not in download("org/one", "--local-dir", "mine").stderr

    def test_another_filesystem_than_the_store(self, download: Download, elsewhere: Path) -> None:
        done = download("org/one", "--local-dir", elsewhere / "mine", "--json")
        (warning,) = done.json["warnings"]
        assert warning.startswith(f"{elsewhere / 'mine'} is on another filesystem than the store")
        assert contents(elsewhere / "mine") == ONE


def one_line(result: Result, *, words: str) -> None:
    """Check that a failure is one line with these words, one hint, no data and no traceback."""
    assert words in result.error
    assert result.hint
    assert result.stdout == ""


@pytest.mark.usefixtures("one")
class TestRefused:
    def test_in_one_line_what_cannot_be_meant(
        self, sc: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without asking the Hub."""
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
        file = write(tmp_path / "a file", b"mine")
        for words, code, error in (
            (("a/b/c",), 1, "Repo id must be in the form"),
            (("https://huggingface.co/org/one",), 1, "Repo id must be in the form"),
            (("org/na me",), 1, "Repo id must use alphanumeric chars"),
            (("datasets/org/one", "--repo-type", "model"), 2, "--repo-type says model"),
            (("org/one", "a.json", "--include", "*"), 2, "FILES exclude --include"),
            (("org/one", "../a.json"), 2, "'../a.json' is not a path in a repo"),
            (("org/one", "/etc/passwd"), 2, "'/etc/passwd' is not a path in a repo"),
            (("org/one", ""), 2, "'' is not a path in a repo"),
            (("org/one", "--max-workers", "0"), 2, "--max-workers"),
            (("org/one", "--also", ""), 2, "is empty"),
            (("org/one", "--also", "nowhere"), 2, "nowhere"),
            (("org/one", "--also", file), 2, "a file"),
            (("org/one", "--cache-dir", file), 2, f"{file} is a file"),
            (("org/one", "--local-dir", file), 2, f"{file} is a file"),
        ):
            one_line(sc("download", *words, code=code), words=error)
        assert file.read_bytes() == b"mine"
        assert not (tmp_path / "hf").exists()

    def test_in_one_line_what_the_hub_does_not_have(
        self, download: Download, tmp_path: Path
    ) -> None:
        write(tmp_path / "mine" / "notes.txt", b"a local_dir is no answer")
        for words, error, hint in (
            (("org/none",), "The Hub has no model/org/none, or does not show it to you", ""),
            (("org/none", "--local-dir", "mine"), "has no model/org/none", ""),
            (("org/one", "--revision", "v9"), "model/org/one has no such revision", ""),
            (("org/one", "--repo-type", "dataset"), "The Hub has no dataset/org/one", ""),
            (("org/one", "--include", "*.bin"), "is selected by --include '*.bin'", ""),
            (("org/one", "--exclude", "*"), "is selected by --exclude '*'", ""),
            (("org/one", "confg.json"), "no file 'confg.json' at main", "config.json"),
            (
                ("org/one", "model.safetensors", "config.json"),
                "no file 'model.safe",
                "unet/model.safetensors",
            ),
            (
                ("org/one", "vea/", "unett/"),
                "no folder 'vea/' and no folder 'unett/'",
                "unet/",
            ),
            (("org/one", "*.json"), "no file '*.json'", "For patterns write --include '*.json'"),
            (("org/one", "zzzzzz"), "no file 'zzzzzz'", "--dry-run -v"),
        ):
            done = download(*words, code=1)
            one_line(done, words=error)
            assert hint in done.hint, words
        assert not download.cache.exists()

    def test_gated_without_a_token(self, download: Download) -> None:
        download.hub.add("org/gated", ONE, gated=True)
        done = download("org/gated", code=1)
        one_line(done, words="model/org/gated is gated")
        assert "hf auth login" in done.hint
        assert contents(download.cache / "models--org--gated" / "snapshots") == {}

    def test_private(self, download: Download) -> None:
        download.hub.add("org/mine", ONE, private=True)
        download.hub.tokens = {"hf_good": {"org/mine"}}
        one_line(download("org/mine", code=1), words="does not show it")
        one_line(download("org/mine", "--token", "hf_bad", code=1), words="answers 401")

    def test_a_repo_that_lists_unsafe_names(self, download: Download) -> None:
        """Which ones, tests/hub/test_bad_input.py shows."""
        download.hub.add_raw_listing("org/evil", {"../evil.bin": UNET, "config.json": b"{}"})
        one_line(download("org/evil", code=1), words="unsafe name")
        assert not download.cache.exists()
        assert download.hub.gets() == []


class TestNoHub:
    def test_what_is_cached_is_the_answer(self, download: Download, one: Commit) -> None:
        """Offline, without a network, and if the repo has become private since."""
        download("org/one")
        for env in (OFFLINE, NOWHERE):
            done = download("org/one", env=env)
            assert done.ids == [str(download.snapshot(one))]
            assert done.stderr.startswith("Warning: ")
            assert done.stderr.endswith("This is what is here, perhaps not the newest.\n")
            document = download("org/one", "--json", env=env).json
            assert (document["commit"], document["path"]) == (one.sha, done.ids[0])
            assert len(document["warnings"]) == 1
        download.hub.add("org/one", ONE, private=True)
        private = download("org/one")
        assert private.ids == done.ids
        assert "does not show it to you. This is what is here" in private.stderr

    def test_what_is_not_cached_is_an_error(self, download: Download) -> None:
        refused = "Cannot reach the Hub ([Errno 111] Connection refused)"
        for words, env, error in (
            ((), OFFLINE, "Offline (HF_HUB_OFFLINE is set)"),
            (("-n",), OFFLINE, "Offline"),
            ((), NOWHERE, refused),
            (("config.json",), NOWHERE, refused),
        ):
            one_line(download("org/one", *words, code=1, env=env), words=error)

    def test_nothing_is_fetched_behind_our_back(self, download: Download, one: Commit) -> None:
        """A Hub that fails once is asked again by the user, not by a call that proves nothing."""
        download.hub.faults.status("/revision/", 500)
        one_line(download("org/one", code=1), words="it answers 500")
        assert download.hub.gets() == []
        assert download("org/one", "-q").ids == [str(download.snapshot(one))]

    @pytest.mark.usefixtures("one")
    def test_a_server_in_trouble(self, download: Download) -> None:
        for place, words in (("/revision/", "it answers 503"), ("unet", "The Hub answers 503")):
            download.hub.faults.clear()
            download.hub.faults.status(place, 503, times=ALWAYS)
            one_line(download("org/one", code=1), words=words)

    @pytest.mark.skipif(huggingface_hub.__version__ < "2", reason="1.x asks for a listing once")
    def test_a_listing_that_comes_late(self, download: Download, one: Commit) -> None:
        download.hub.faults.status("/tree/", 503)
        done = download("org/one")
        assert "Warning: Retrying in 1s [Retry 1/5]." in done.stderr
        assert contents(download.snapshot(one)) == ONE


class TestWrong:
    def test_bytes(self, download: Download, one: Commit, home: Path) -> None:
        download.hub.faults.wrong_bytes("unet")
        done = download("org/one", code=1)
        one_line(done, words="unet/model.safetensors has sha256")
        (kept,) = (home / "bad").iterdir()
        assert str(kept) in done.error
        assert "unet/model.safetensors" not in contents(download.snapshot(one))
        download("org/one")
        assert contents(download.snapshot(one)) == ONE

    def test_size(self, download: Download, one: Commit) -> None:
        for by in (1000, -1000):
            download.hub.faults.wrong_size("unet", by=by)
            done = download("org/one", code=1)
            one_line(done, words=f"should be of size {len(UNET) + by} but has")
            download.hub.faults.clear()
        download("org/one")
        assert contents(download.snapshot(one)) == ONE

    def test_a_missing_size_is_shown_as_such(self, download: Download, one: Commit) -> None:
        download.hub.faults.no_size("unet")
        lines = download("org/one").stderr.splitlines()
        assert "fetch        ?  unet/model.safetensors          the Hub" in lines
        assert "300 KB and 1 file of unknown size to fetch." in lines
        assert contents(download.snapshot(one)) == ONE


@pytest.mark.usefixtures("one")
class TestDisk:
    def test_a_full_disk(self, download: Download, tmp_path: Path) -> None:
        def work() -> tuple[Result, Result, Result]:
            disk = Disk(tmp_path / "disk", 1 << 20)
            disk.fill(but=100)
            download.cache = disk.point / "hf"
            looked = download("org/one", "--dry-run")
            first = download("org/one", code=1)
            assert contents(disk.point / "hf") == {}
            assert download.hub.gets() == []
            disk.clear()
            return looked, first, download("org/one", "-q")

        looked, full, after = in_own_namespace(work)
        words = f"needs 800 KB at {tmp_path / 'disk' / 'hf'}, but only 410 KB is free there"
        assert f"Warning: The download of model/org/one {words}" in looked.stderr
        one_line(full, words=words)
        assert after.ids

    def test_a_disk_that_is_full_before_all_has_come(
        self, download: Download, one: Commit, tmp_path: Path
    ) -> None:
        """The Hub does not say how large a file is."""
        download.hub.faults.no_size("unet")

        def work() -> tuple[Result, dict[str, bytes]]:
            disk = Disk(tmp_path / "disk", 1 << 20)
            disk.fill(but=100)
            download.cache = disk.point / "hf"
            return download("org/one", code=1), contents(download.snapshot(one))

        full, seen = in_own_namespace(work)
        one_line(full, words=f"No space left at {tmp_path / 'disk' / 'hf'}")
        assert "unet/model.safetensors" not in seen
        assert ONE.items() >= seen.items()

    def test_a_disk_that_cannot_be_written(self, download: Download, tmp_path: Path) -> None:
        def work() -> Result:
            disk = Disk(tmp_path / "disk", 1 << 20)
            disk.make_read_only()
            download.cache = disk.point / "hf"
            return download("org/one", code=1)

        one_line(in_own_namespace(work), words="Read-only filesystem")

    def test_a_store_on_a_full_disk(self, download: Download, tmp_path: Path) -> None:
        def work() -> tuple[Result, Result]:
            disk = Disk(tmp_path / "disk", 4 << 20)
            env = {"SMARTCACHE_HOME": str(disk.point / "store")}
            download("org/one", "config.json", env=env)
            disk.fill()
            first = download("org/one", code=1, env=env)
            disk.clear()
            return first, download("org/one", "-q", env=env)

        full, after = in_own_namespace(work)
        one_line(full, words="No space left")
        assert after.ids


class TestInterrupted:
    def test_ctrl_c_ends_it_and_the_next_run_goes_on(self, download: Download, one: Commit) -> None:
        hold = download.hub.faults.hold("unet", after=1)
        process = download.start("org/one")
        assert hold.reached.wait(PATIENCE)
        finished = download.snapshot(one) / "text_encoder" / "model.safetensors"
        until = time.monotonic() + PATIENCE
        while not finished.exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE)
        hold.release()
        assert (process.returncode, stdout) == (130, ""), stderr
        lines = stderr.splitlines()
        assert "Stopping; this may take a few seconds. Ctrl-C again stops at once." in lines
        assert lines[-2:] == [
            "Interrupted; what was finished stays, and nothing is left half done.",
            "Run the same command again to go on: finished files are not fetched again.",
        ]
        assert ONE.items() >= contents(download.snapshot(one)).items()
        download.hub.faults.clear()
        download.hub.clear()
        assert download("org/one", "-q").ids == [str(download.snapshot(one))]
        assert contents(download.snapshot(one)) == ONE
        assert download.hub.gets("text_encoder") == []

    def test_a_second_ctrl_c_ends_it_at_once(self, download: Download, one: Commit) -> None:
        hold = download.hub.faults.hold("unet", after=1)
        process = download.start("org/one")
        assert process.stderr is not None
        assert hold.reached.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        for line in process.stderr:
            if line.startswith("Stopping"):
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE)
        hold.release()
        assert (process.returncode, stdout) == (130, ""), stderr
        assert stderr == "Interrupted; the next run cleans up what was left half done.\n"
        download.hub.faults.clear()
        download("org/one")
        assert contents(download.snapshot(one)) == ONE

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_what_was_killed_goes_on(
        self, download: Download, one: Commit, number: signal.Signals
    ) -> None:
        hold = download.hub.faults.hold("unet", after=1)
        process = download.start("org/one")
        assert hold.reached.wait(PATIENCE)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        hold.release()
        assert process.returncode == -number
        assert "unet/model.safetensors" not in contents(download.snapshot(one))
        download.hub.faults.clear()
        download("org/one")
        assert contents(download.snapshot(one)) == ONE

    def test_two_at_a_time_fetch_each_byte_once(self, download: Download, one: Commit) -> None:
        hold = download.hub.faults.hold("unet", after=1)
        first = download.start("org/one")
        assert hold.reached.wait(PATIENCE)
        second = download.start("org/one", "-q")
        while len(download.hub.heads("unet")) < 2:
            time.sleep(0.01)
        time.sleep(0.3)  # until it waits for the first
        hold.release()
        paths = [process.communicate(timeout=PATIENCE)[0].strip() for process in (first, second)]
        assert paths == [str(download.snapshot(one))] * 2
        assert len(download.hub.gets("unet")) == 1
        assert contents(download.snapshot(one)) == ONE
