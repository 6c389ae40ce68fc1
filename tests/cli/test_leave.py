from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.api import Store
from tests.cli.running import Here, Smartcache
from tests.store.files import WEIGHTS, digest_of, snapshot, write


class TestEject:
    def test_gives_every_file_back_and_removes_the_store(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        before = snapshot(models)
        sc("add", "--adopt", "-r", models)
        done = sc("eject", "-y")
        assert done.stdout == f"Gave back 2 files and removed {home}.\n"
        assert snapshot(models) == before
        assert not home.exists()

    def test_links_that_were_made_become_files(self, sc: Here, models: Path) -> None:
        sc("add", "--no-pin", models / "a.safetensors")
        sc("link", digest_of(WEIGHTS), models / "l.pt", "--kind", "symlink")
        sc("eject", "-y")
        assert not (models / "l.pt").is_symlink()
        assert (models / "l.pt").read_bytes() == WEIGHTS

    def test_a_dry_run_counts_and_changes_nothing(self, sc: Here, models: Path, home: Path) -> None:
        sc("add", "--adopt", "-r", models)
        before = snapshot(models)
        done = sc("eject", "--dry-run")
        assert "2 files to be given back" in done.stdout
        document = sc("eject", "-n", "--json").json
        assert document["stores"][0]["root"] == str(home)
        assert document["stores"][0]["needed_size"] == 0
        assert snapshot(models) == before
        assert home.exists()

    def test_does_not_lose_what_is_pinned(self, sc: Here, models: Path, home: Path) -> None:
        sc("add", models / "a.safetensors")
        shutil.rmtree(models)
        done = sc("eject", "-y", code=1)
        assert digest_of(WEIGHTS)[:12] in done.error
        assert "--drop-pinned" in done.hint
        assert sc.digests() == [digest_of(WEIGHTS)]
        sc("eject", "-y", "--drop-pinned")
        assert not home.exists()

    def test_what_was_copied_in_and_is_still_outside_is_not_lost(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        before = snapshot(models)
        sc("add", models / "a.safetensors")
        sc("eject", "-y")
        assert not home.exists()
        assert snapshot(models) == before

    def test_a_file_changed_since_is_left_alone_and_named(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        sc("add", "--adopt", "-r", models)
        (models / "sub/c.gguf").unlink()
        write(models / "sub/c.gguf", b"mine now")
        done = sc("eject", "-y", code=1)
        assert f"Warning: {models}/sub/c.gguf: " in done.stderr
        assert (models / "sub/c.gguf").read_bytes() == b"mine now"
        assert not home.exists()

    def test_keep_shared_is_warned_about(self, sc: Here, models: Path, home: Path) -> None:
        sc("add", "--adopt", models / "a.safetensors")
        assert "keep sharing" in sc("eject", "-y", "--keep-shared").stderr
        assert not home.exists()

    def test_refuses_where_it_cannot_ask(self, sc: Here, models: Path, home: Path) -> None:
        sc("add", "--adopt", "-r", models)
        assert "not a terminal" in sc("eject", code=1).error
        assert home.exists()

    def test_asks_at_a_terminal(
        self, sc: Here, models: Path, program: Smartcache, home: Path
    ) -> None:
        sc("add", "--adopt", "-r", models)
        done = program.at_terminal("eject", answer="n\n")
        assert "needs 0 B" in done.stdout
        assert done.code == 1
        assert home.exists()

    def test_without_a_store_is_an_error(self, sc: Here, home: Path) -> None:
        assert f"There is no store at {home} yet" in sc("eject", "-y", code=1).error

    def test_what_a_killed_eject_left_goes_when_it_is_run_again(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        """The store has lost its name, which was the last step, but not all of its bytes."""
        sc("add", "--adopt", "-r", models)
        leftover = home.rename(home.with_name(f"{home.name}.ejected-0123abcd"))
        assert "interrupted eject" in sc("eject", "-y").stdout
        assert not leftover.exists()
        sc("eject", "-y", code=1)

    def test_every_volume_goes(self, sc: Here, models: Path, home: Path, elsewhere: Path) -> None:
        sc("add", "--adopt", "-r", models)
        with Store(home) as store:
            store.add_volume(elsewhere / ".smartcache")
        file = write(elsewhere / "m.pt", b"m" * 5000)
        sc("add", "--adopt", file)
        sc("eject", "-y")
        assert not home.exists()
        assert not (elsewhere / ".smartcache").exists()
        assert file.stat().st_mode & 0o200


class TestMove:
    @pytest.fixture
    def filled(self, sc: Here, models: Path) -> Here:
        sc("add", models / "a.safetensors")
        sc("link", digest_of(WEIGHTS), models / "l.pt", "--kind", "symlink")
        return sc

    def test_the_old_place_leads_to_the_new_one(
        self, filled: Here, tmp_path: Path, models: Path
    ) -> None:
        done = filled("mv", "new", "-y")
        assert done.stdout == f"The store is at {tmp_path}/new now.\n"
        assert filled.digests() == filled.digests("--home", tmp_path / "new")
        assert (models / "l.pt").read_bytes() == WEIGHTS

    def test_to_another_filesystem_it_is_copied(
        self, filled: Here, elsewhere: Path, models: Path
    ) -> None:
        document = filled("mv", elsewhere / "new", "-y", "--json").json
        assert not document["is_rename"]
        assert document["copied_size"] >= len(WEIGHTS)
        assert filled.digests("--home", elsewhere / "new") == [digest_of(WEIGHTS)]
        assert (models / "l.pt").read_bytes() == WEIGHTS

    def test_a_dry_run_moves_nothing(self, filled: Here, tmp_path: Path, home: Path) -> None:
        done = filled("mv", "new", "--dry-run")
        assert done.stdout == f"Would move {home} to {tmp_path}/new in one step.\n"
        assert not (tmp_path / "new").exists()

    def test_quiet_prints_the_new_root(self, filled: Here, tmp_path: Path) -> None:
        assert filled("mv", "new", "-y", "-q").ids == [str(tmp_path / "new")]

    def test_refuses_where_it_cannot_ask(self, filled: Here, tmp_path: Path) -> None:
        assert "not a terminal" in filled("mv", "new", code=1).error
        assert not (tmp_path / "new").exists()

    def test_a_place_that_is_taken_is_refused(self, filled: Here, models: Path) -> None:
        before = snapshot(models)
        assert "not empty" in filled("mv", models, "-y", code=1).error
        assert snapshot(models) == before

    def test_a_place_inside_itself_is_refused(self, filled: Here, home: Path) -> None:
        assert "inside each other" in filled("mv", home / "inside", "-y", code=1).error

    def test_needs_a_place(self, sc: Here) -> None:
        assert "NEWROOT" in sc("mv", code=2).error

    def test_without_a_store_is_an_error(self, sc: Here, home: Path) -> None:
        assert f"There is no store at {home} yet" in sc("mv", "new", "-y", code=1).error
