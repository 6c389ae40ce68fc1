"""What is given back and moved is shown by tests/store/test_eject.py and test_move.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.api import Store
from tests.cli.running import Here
from tests.store.files import WEIGHTS, digest_of, snapshot, write


class TestEject:
    def test_gives_every_file_back_and_removes_the_store(
        self, sc: Here, models: Path, home: Path
    ) -> None:
        before = snapshot(models)
        sc("add", "--adopt", "-r", models)
        sc("add", models / "b.safetensors")  # whose bytes are outside too: nothing is lost
        assert "2 files to be given back" in sc("eject", "--dry-run").stdout
        (store,) = sc("eject", "-n", "--json").json["stores"]
        assert (store["root"], store["needed_size"]) == (str(home), 0)
        assert sc("eject", "-y").stdout == f"Gave back 2 files and removed {home}.\n"
        assert snapshot(models) == before
        assert not home.exists()

    def test_does_not_lose_what_is_pinned(self, sc: Here, models: Path, home: Path) -> None:
        sc("add", models / "a.safetensors")
        shutil.rmtree(models)
        done = sc("eject", "-y", code=1)
        assert digest_of(WEIGHTS)[:12] in done.error
        assert "--drop-pinned" in done.hint
        assert sc.digests() == [digest_of(WEIGHTS)]
        sc("eject", "-y", "--drop-pinned")
        assert not home.exists()

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
        self, filled: Here, tmp_path: Path, models: Path, home: Path
    ) -> None:
        done = filled("mv", "new", "--dry-run")
        assert done.stdout == f"Would move {home} to {tmp_path}/new in one step.\n"
        done = filled("mv", "new", "-y")
        assert done.stdout == f"The store is at {tmp_path}/new now.\n"
        assert filled.digests() == filled.digests("--home", tmp_path / "new")
        assert (models / "l.pt").read_bytes() == WEIGHTS
        assert filled("mv", "newer", "-y", "-q").ids == [str(tmp_path / "newer")]

    def test_to_another_filesystem_it_is_copied(
        self, filled: Here, elsewhere: Path, models: Path
    ) -> None:
        document = filled("mv", elsewhere / "new", "-y", "--json").json
        assert not document["is_rename"]
        assert document["copied_size"] >= len(WEIGHTS)
        assert filled.digests("--home", elsewhere / "new") == [digest_of(WEIGHTS)]
        assert (models / "l.pt").read_bytes() == WEIGHTS

    def test_a_place_that_cannot_be_is_refused(
        self, filled: Here, models: Path, home: Path
    ) -> None:
        before = snapshot(models)
        assert "not empty" in filled("mv", models, "-y", code=1).error
        assert snapshot(models) == before
        assert "inside each other" in filled("mv", home / "inside", "-y", code=1).error
        assert "NEWROOT" in filled("mv", code=2).error
