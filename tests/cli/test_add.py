from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from smartcache.store.layout import pool_root
from smartcache.system.filesystems import mount_of
from tests.cli.running import Here
from tests.store.files import OTHER, WEIGHTS, digest_of, inode_of, mode_of, snapshot, write

DIGEST = digest_of(WEIGHTS)


class TestCopy:
    def test_is_the_default_leaves_the_files_alone_and_needs_no_undo(
        self, sc: Here, models: Path
    ) -> None:
        before = snapshot(models)
        done = sc("add", models / "a.safetensors", models / "sub/c.gguf")
        assert snapshot(models) == before
        assert "copied" in done.stdout
        assert "2 files, 170 KB: 2 copied." in done.stderr
        assert set(sc.digests()) == {DIGEST, digest_of(OTHER)}
        assert sc("undo", "--list", "--json").json == {"history": []}

    def test_is_pinned_under_a_name_or_not_at_all(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        sc("add", models / "sub/c.gguf", "--pin", "favourites")
        sc("add", write(models / "d.pt", b"d"), "--no-pin")
        assert sc.digests("--filter", "pin=kept") == [DIGEST]
        assert sc.digests("--filter", "pin=favourites") == [digest_of(OTHER)]
        assert sc("prune", "-y", "-q").ids == [digest_of(b"d")]
        sc("add", "--pin", "x", "--no-pin", models / "a.safetensors", code=2)

    def test_the_same_bytes_again_are_present(self, sc: Here, models: Path) -> None:
        files = sc("add", "--json", models / "a.safetensors", models / "b.safetensors").json
        assert [each["outcome"] for each in files["files"]] == ["copied", "present"]
        assert (files["added"], files["added_size"]) == (1, len(WEIGHTS))
        quiet = sc("add", "-q", models / "sub/c.gguf", models / "a.safetensors")
        assert (quiet.ids, quiet.stderr) == ([digest_of(OTHER), DIGEST], "")


class TestAdopt:
    def test_the_file_stays_and_becomes_the_blob_which_needs_no_pin(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        file = models / "a.safetensors"
        inode = inode_of(file)
        done = sc("add", "--adopt", file)
        assert inode_of(file) == inode == inode_of(home / "blobs" / DIGEST[:2] / DIGEST)
        assert mode_of(file) == 0o444
        assert "read-only" in done.stderr
        assert sc.digests("--filter", "pinned=yes") == []
        assert "Nothing to prune" in sc("prune", "-y").stdout

    def test_one_command_is_one_entry_of_the_history(self, sc: Here, models: Path) -> None:
        before = snapshot(models)
        sc("add", "--adopt", models / "a.safetensors", models / "sub/c.gguf")
        (entry,) = sc("undo", "--list", "--json").json["history"]
        assert entry["changes"] == 2
        assert entry["label"] == f"add --adopt {models / 'a.safetensors'} and 1 more file"
        sc("undo", "--last", "-y")
        assert snapshot(models) == before

    def test_a_duplicate_is_told_and_not_touched(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        assert "duplicate" in sc("add", "--adopt", models / "b.safetensors").stdout
        assert mode_of(models / "b.safetensors") == 0o644

    def test_on_another_filesystem_a_pool_is_made_on_request_only(
        self, sc: Here, models: Path, elsewhere: Path
    ) -> None:
        file = write(elsewhere / "m.pt")
        done = sc("add", "--adopt", file, code=1)
        assert "is on another filesystem than the store" in done.stderr
        assert mode_of(file) == 0o644
        done = sc("add", "--make-pool", models / "a.safetensors", code=2)
        assert "--make-pool is for --adopt" in done.stderr
        pool = pool_root(mount_of(elsewhere).point)
        if pool.exists():
            pytest.skip(f"{pool} is somebody's")
        try:
            done = sc("add", "--adopt", "--make-pool", file)
            assert f"Made a pool at {pool}" in done.stderr
            assert file.stat().st_nlink == 2
            assert sc("ls", "--json").json[0]["pool"] == str(pool)
        finally:
            shutil.rmtree(pool, ignore_errors=True)


class TestFolders:
    def test_need_a_flag_and_are_taken_with_all_below_them_once(
        self, sc: Here, models: Path
    ) -> None:
        done = sc("add", models, code=1)
        assert "is a directory" in done.error
        assert "-r" in done.hint
        words = ("add", "-r", models, models / "a.safetensors", models / "sub", "--json")
        paths = [each["path"] for each in sc(*words).json["files"]]
        names = ["a.safetensors", "b.safetensors", "sub/c.gguf"]
        assert paths == [str(models / name) for name in names]

    def test_what_is_unfit_inside_is_told_but_no_failure(self, sc: Here, models: Path) -> None:
        """Symlinks and other stores are left out without a word."""
        write(models / "empty.txt", b"")
        (models / "again").symlink_to(models / "a.safetensors")
        (models / "loop").symlink_to(models)
        sc("--home", models / "store", "add", models / "sub/c.gguf")
        done = sc("add", "-r", models, "--json")
        names = [os.path.basename(each["path"]) for each in done.json["files"]]
        assert names == ["a.safetensors", "b.safetensors", "empty.txt", "c.gguf"]
        assert done.stderr == f"Warning: {models / 'empty.txt'}: empty; left as it is\n"

    def test_an_empty_one_adds_nothing(self, sc: Here, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert sc("add", "-r", "empty").stderr == "0 files, 0 B: nothing added.\n"

    def test_what_lies_too_deep_is_named_and_the_rest_is_taken(
        self, sc: Here, elsewhere: Path
    ) -> None:
        """A path has 4096 bytes; a thousand folders within each other are none too many."""
        write(elsewhere / "z.pt", b"last")
        here = os.open(write(elsewhere / "deep/top.pt", b"top").parent, os.O_RDONLY)
        try:
            for depth in range(2100):
                if depth in (1500, 2099):
                    file = os.open(f"{depth}.pt", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=here)
                    os.write(file, b"%d" % depth)
                    os.close(file)
                os.mkdir("d", dir_fd=here)
                below = os.open("d", os.O_RDONLY, dir_fd=here)
                os.close(here)
                here = below
            done = sc("add", "-r", elsewhere, "--json", code=1)
        finally:
            os.close(here)
            subprocess.run(["rm", "-rf", elsewhere / "deep"], check=True)  # pytest would recurse
        names = [Path(each["path"]).name for each in done.json["files"]]
        assert names == ["1500.pt", "top.pt", "z.pt"]
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"Warning: {elsewhere}/deep/d/d")
        assert line.endswith("/d/d/d lies too deep to be reached; left out")
        assert len(line) < 300


class TestBadInput:
    def test_a_missing_file_stops_it_before_anything_is_done(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        done = sc("add", "--adopt", models / "a.safetensors", "nowhere.pt", code=1)
        assert done.error == "No such file: nowhere.pt"
        assert mode_of(models / "a.safetensors") == 0o644
        assert not home.exists()

    def test_what_is_refused_is_told_and_the_others_are_taken(
        self, sc: Here, models: Path, tmp_path: Path
    ) -> None:
        for how in ("--copy", "--adopt"):
            empty = write(models / "empty.pt", b"")
            done = sc("add", how, empty, models / "sub/c.gguf", "--json", code=1)
            assert done.json["files"][0]["outcome"] == "skipped"
            assert sc.digests() == [digest_of(OTHER)]
        write(models / "x.incomplete")
        done = sc("add", "--adopt", models / "x.incomplete", "-n", "--json", code=1)
        (refused,) = done.json["files"]
        assert (refused["outcome"], refused["reason"]) == ("skipped", "incomplete download")
        os.mkfifo(tmp_path / "pipe")
        assert "not a regular file" in sc("add", "pipe", code=1).stderr

    def test_names_may_hold_any_byte(self, sc: Here, tmp_path: Path) -> None:
        name = os.fsdecode(b"bad\xff\n\x1b[31m.pt")
        write(tmp_path / name)
        done = sc("add", name)
        assert r"bad\xff\n\x1b[31m.pt" in done.stdout
        assert sc("add", name, "--json").json["files"][0]["path"] == str(tmp_path / name)
