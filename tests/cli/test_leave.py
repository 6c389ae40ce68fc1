"""What is given back is shown by tests/store/test_eject.py."""

from __future__ import annotations

import shutil
from pathlib import Path

from smartcache.store.store import Store
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
        plan = sc("eject", "-n", "--json").json
        assert (plan["roots"], plan["needed_size"]) == ([str(home)], 0)
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

    def test_every_pool_goes(self, sc: Here, models: Path, home: Path, elsewhere: Path) -> None:
        sc("add", "--adopt", "-r", models)
        with Store(home) as store:
            store.add_pool(elsewhere / ".smartcache")
        file = write(elsewhere / "m.pt", b"m" * 5000)
        sc("add", "--adopt", file)
        sc("eject", "-y")
        assert not home.exists()
        assert not (elsewhere / ".smartcache").exists()
        assert file.stat().st_mode & 0o200


def test_a_store_whose_folder_was_moved_works_at_its_new_place(
    sc: Here, models: Path, home: Path, tmp_path: Path
) -> None:
    """`mv` it and set SMARTCACHE_HOME: files share with it as before."""
    copy = models / "a-copy.safetensors"
    write(copy, (models / "a.safetensors").read_bytes())
    before = snapshot(models)
    sc("dedup", models, "-y", "--min-size", "1KiB", "--read-only")
    sc("add", models / "b.safetensors")
    blobs, figures = sc.digests(), sc("df", "--json").json
    new = home.rename(tmp_path / "elsewhere")
    at = ("--home", new)
    moved = sc(*at, "df", "--json").json
    assert {name for name in moved if moved[name] != figures[name]} <= {
        "root", "pools", "index", "total",
    }  # fmt: skip
    assert sc(*at, "ls", "-q").ids == blobs
    assert sc(*at, "scan", models, "--json").json["hashed"] == 0
    assert sc(*at, "verify", "--full").stdout.startswith("Checked ")
    sc(*at, "undo", "--all", "-y")
    assert snapshot(models) == before
    sc(*at, "eject", "--drop-pinned", "-y")
    assert not new.exists()
