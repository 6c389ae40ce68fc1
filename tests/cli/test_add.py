from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api import mount_of, volume_root
from tests.cli.running import Here
from tests.store.files import OTHER, WEIGHTS, digest_of, inode_of, mode_of, snapshot, write


class TestCopy:
    def test_is_the_default_and_leaves_the_files_alone(self, sc: Here, models: Path) -> None:
        before = snapshot(models)
        done = sc("add", models / "a.safetensors", models / "sub/c.gguf")
        assert snapshot(models) == before
        assert "copied" in done.stdout
        assert "2 files, 170 KB: 2 copied." in done.stderr
        assert set(sc.digests()) == {digest_of(WEIGHTS), digest_of(OTHER)}

    def test_is_pinned_so_that_prune_leaves_it(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        assert "Nothing to prune" in sc("prune", "-y").stdout
        assert sc.digests("--filter", "pin=kept") == [digest_of(WEIGHTS)]

    def test_can_be_pinned_under_a_name_or_not_at_all(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors", "--pin", "favourites")
        sc("add", models / "sub/c.gguf", "--no-pin")
        assert sc.digests("--filter", "pin=favourites") == [digest_of(WEIGHTS)]
        assert sc.digests("--filter", "pinned=no") == [digest_of(OTHER)]

    def test_the_same_bytes_again_are_present(self, sc: Here, models: Path) -> None:
        files = sc("add", "--json", models / "a.safetensors", models / "b.safetensors").json
        assert [each["outcome"] for each in files["files"]] == ["copied", "present"]
        assert (files["added"], files["added_size"]) == (1, len(WEIGHTS))

    def test_quiet_prints_the_digest_of_each_file(self, sc: Here, models: Path) -> None:
        done = sc("add", "-q", models / "sub/c.gguf", models / "a.safetensors")
        assert done.ids == [digest_of(OTHER), digest_of(WEIGHTS)]
        assert done.stderr == ""

    def test_makes_no_entry_of_the_history(self, sc: Here, models: Path) -> None:
        """Nothing of the user's was changed: there is nothing to undo."""
        sc("add", models / "a.safetensors")
        assert sc("undo", "--list", "--json").json == {"history": []}


class TestAdopt:
    def test_the_file_stays_and_becomes_the_blob(self, sc: Here, models: Path, home: Path) -> None:
        file = models / "a.safetensors"
        inode = inode_of(file)
        done = sc("add", "--adopt", file)
        digest = digest_of(WEIGHTS)
        assert inode_of(file) == inode == inode_of(home / "blobs" / digest[:2] / digest)
        assert mode_of(file) == 0o444
        assert "read-only" in done.stderr

    def test_needs_no_pin(self, sc: Here, models: Path) -> None:
        sc("add", "--adopt", models / "a.safetensors")
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
        done = sc("add", "--adopt", models / "b.safetensors")
        assert "duplicate" in done.stdout
        assert mode_of(models / "b.safetensors") == 0o644

    def test_a_file_on_another_filesystem_is_refused(self, sc: Here, elsewhere: Path) -> None:
        file = write(elsewhere / "m.pt")
        done = sc("add", "--adopt", file, code=1)
        assert "There is no volume on the filesystem" in done.stderr
        assert mode_of(file) == 0o644

    def test_makes_a_volume_on_another_filesystem_on_request(
        self, sc: Here, elsewhere: Path
    ) -> None:
        file = write(elsewhere / "m.pt")
        volume = volume_root(mount_of(elsewhere).point)
        if volume.exists():
            pytest.skip(f"{volume} is somebody's")
        try:
            done = sc("add", "--adopt", "--make-volume", file)
            assert f"Made a volume at {volume}" in done.stderr
            assert file.stat().st_nlink == 2
            assert sc("ls", "--json").json[0]["root"] == str(volume)
        finally:
            shutil.rmtree(volume, ignore_errors=True)

    def test_a_volume_is_made_for_adopted_files_only(self, sc: Here, models: Path) -> None:
        done = sc("add", "--make-volume", write(models / "m.pt"), code=2)
        assert "--make-volume is for --adopt" in done.stderr


class TestMove:
    def test_the_file_goes_and_undo_brings_it_back(self, sc: Here, models: Path) -> None:
        before = snapshot(models)
        sc("add", "--move", models / "a.safetensors")
        assert not (models / "a.safetensors").exists()
        assert sc.digests("--filter", "pinned=yes") == [digest_of(WEIGHTS)]
        sc("undo", "--last", "-y")
        assert snapshot(models) == before

    def test_cannot_be_left_unpinned(self, sc: Here, models: Path) -> None:
        """Prune would remove the only copy of a file the user has."""
        done = sc("add", "--move", "--no-pin", models / "a.safetensors", code=2)
        assert "--no-pin" in done.error
        assert (models / "a.safetensors").exists()


class TestFolders:
    def test_need_a_flag(self, sc: Here, models: Path) -> None:
        done = sc("add", models, code=1)
        assert "is a directory" in done.error
        assert "-r" in done.hint

    def test_are_taken_with_all_below_them(self, sc: Here, models: Path) -> None:
        paths = [each["path"] for each in sc("add", "-r", models, "--json").json["files"]]
        names = ["a.safetensors", "b.safetensors", "sub/c.gguf"]
        assert paths == [str(models / name) for name in names]

    def test_a_file_named_twice_is_taken_once(self, sc: Here, models: Path) -> None:
        done = sc("add", "-r", models, models / "a.safetensors", models / "sub", "--json")
        assert len(done.json["files"]) == 3

    def test_what_is_unfit_inside_is_told_but_no_failure(self, sc: Here, models: Path) -> None:
        write(models / "empty.txt", b"")
        done = sc("add", "-r", models)
        assert f"Warning: {models / 'empty.txt'}: empty; left as it is" in done.stderr

    def test_symlinks_and_stores_inside_are_left_out(self, sc: Here, models: Path) -> None:
        (models / "again").symlink_to(models / "a.safetensors")
        (models / "loop").symlink_to(models)
        sc("--home", models / "store", "add", models / "sub/c.gguf")
        files = sc("add", "-r", models, "--json").json["files"]
        names = [os.path.basename(each["path"]) for each in files]
        assert names == ["a.safetensors", "b.safetensors", "c.gguf"]

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


class TestDryRun:
    @pytest.mark.parametrize("how", ["--copy", "--adopt", "--move"])
    def test_changes_nothing_and_makes_no_store(
        self, how: str, sc: Here, models: Path, home: Path
    ) -> None:
        before = snapshot(models)
        done = sc("add", how, "-r", models, "--dry-run")
        assert "Would add 3 files" in done.stdout
        assert snapshot(models) == before
        assert not home.exists()

    def test_names_what_would_be_refused(self, sc: Here, models: Path) -> None:
        write(models / "x.incomplete")
        done = sc("add", "--adopt", "-r", models, "-n", "--json")
        refused = [each for each in done.json["files"] if each["outcome"] == "skipped"]
        assert [each["reason"] for each in refused] == ["incomplete download"]


class TestBadInput:
    def test_a_missing_file_stops_it_before_anything_is_done(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        done = sc("add", "--move", models / "a.safetensors", "nowhere.pt", code=1)
        assert done.error == "No such file: nowhere.pt"
        assert (models / "a.safetensors").exists()
        assert not home.exists()

    @pytest.mark.parametrize("how", ["--copy", "--adopt", "--move"])
    def test_an_empty_file_is_refused_and_the_others_are_taken(
        self, how: str, sc: Here, models: Path
    ) -> None:
        empty = write(models / "empty.pt", b"")
        done = sc("add", how, empty, models / "sub/c.gguf", "--json", code=1)
        assert done.json["files"][0]["outcome"] == "skipped"
        assert sc.digests() == [digest_of(OTHER)]
        assert empty.exists()

    def test_a_pipe_is_refused_instead_of_waited_for(self, sc: Here, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        assert "not a regular file" in sc("add", "pipe", code=1).stderr

    def test_two_pins_exclude_each_other(self, sc: Here, models: Path) -> None:
        sc("add", "--pin", "x", "--no-pin", models / "a.safetensors", code=2)

    def test_names_may_hold_any_byte(self, sc: Here, tmp_path: Path) -> None:
        name = os.fsdecode(b"bad\xff\n\x1b[31m.pt")
        write(tmp_path / name)
        done = sc("add", name)
        assert r"bad\xff\n\x1b[31m.pt" in done.stdout
        assert sc("add", name, "--json").json["files"][0]["path"] == str(tmp_path / name)
