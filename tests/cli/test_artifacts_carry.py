"""Sets carried elsewhere and back: `artifacts export`, `artifacts import`."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from smartcache.cache import SmartCache
from smartcache.system import filesystems as room
from tests.cli.computed import fill, keys, latent
from tests.cli.running import PATIENCE, Here, Smartcache

FORMS = ("--safetensors", "--folder")
FINGERPRINT = ("--set", "files", "--fingerprint", '{"vae": "sdxl"}')


class TestForms:
    def test_there_and_back(self, sc: Here, home: Path, tmp_path: Path) -> None:
        id_ = fill(home, size=512)
        option, out, other = "--folder", "out", ("--home", tmp_path / "other")
        planned = sc("artifacts", "export", "latents", option, out, "-n", "--json").json
        assert (planned["artifacts"], planned["kept"]) == (10, 0)
        assert 60_000 < planned["size"] < 80_000
        assert planned["path"] == str(tmp_path / out)
        done = sc("artifacts", "export", "latents", option, out)
        assert done.stdout.startswith(f"Exported latents/{id_[:12]} to {out}: 10 artifacts (")
        done = sc(*other, "artifacts", "import", out)
        assert done.stdout.startswith(f"Imported latents/{id_[:12]} from {out}: 10 artifacts (")
        assert keys(tmp_path / "other", id_) == {f"key-{number}" for number in range(10)}
        with (
            SmartCache(tmp_path / "other") as cache,
            cache.artifacts("latents", fingerprint={"size": 512}) as there,
        ):
            assert np.array_equal(there.get("key-3")["latent"], latent(3))
            assert there.metadata("key-3") == {"file": "3.png"}
        again = sc(*other, "artifacts", "import", out, "--json").json
        assert (again["artifacts"], again["kept"], again["problems"]) == (0, 10, [])

    @pytest.mark.parametrize("option", FORMS)
    def test_what_ctrl_c_has_interrupted_is_gone_on_with(
        self, option: str, program: Smartcache, sc: Here, home: Path, tmp_path: Path
    ) -> None:
        with SmartCache(home) as cache, cache.artifacts("x", fingerprint={}) as some:
            for number in range(300):  # so much that it is not done before the signal comes
                some.put(f"{number}", np.full(400_000, number % 256, np.uint8))
        words = ["artifacts", "export", "x", option, "out"]
        more = ["--shard-size", "1MB"] if option == "--safetensors" else []
        for _ in range(20):
            process = program.start(*words, *more)
            while not list(tmp_path.glob("out/**/*")):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=PATIENCE)
            if process.returncode:  # else it was done before the signal came
                break
            shutil.rmtree(tmp_path / "out")
        assert process.returncode == 130
        assert "run the same command again to continue" in stderr
        assert "Traceback" not in stderr
        done = sc(*words, "--json").json
        assert done["artifacts"] + done["kept"] == 300

    @pytest.mark.parametrize("option", FORMS)
    def test_without_room_nothing_is_written(
        self, option: str, sc: Here, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(home)
        monkeypatch.setattr(room, "free_bytes", lambda _: 1000)
        error = sc("artifacts", "export", "latents", option, "out", code=1).error
        assert "but only 1 KB is free" in error
        assert [path.name for path in tmp_path.iterdir()] == ["store"]


class TestExport:
    def test_one_form_of_one_set_is_to_be_said(self, sc: Here, home: Path) -> None:
        fill(home, size=1)
        for words in ((), ("--folder", "a", "--safetensors", "b")):
            done = sc("artifacts", "export", "latents", *words, code=2)
            assert "--safetensors DIR and --folder DIR" in done.error
            assert "smartcache artifacts export latents --safetensors out" in done.hint
        assert "Missing argument 'SET'" in sc("artifacts", "export", code=2).error
        done = sc("artifacts", "export", "latents", "--folder", "x", "--shard-size", "1MB", code=2)
        assert "--shard-size is for --safetensors" in done.error
        sc("artifacts", "export", "latents", "--safetensors", "x", "--shard-size", "big", code=2)
        fill(home, size=2)
        done = sc("artifacts", "export", "latents", "--folder", "x", code=1)
        assert "stands for 2 sets" in done.error

    def test_shards_have_the_size_that_is_asked_for(
        self, sc: Here, home: Path, tmp_path: Path
    ) -> None:
        fill(home)
        sc("artifacts", "export", "latents", "--safetensors", "o", "--shard-size", "20KB")
        assert len(list((tmp_path / "o").glob("latents-*.safetensors"))) == 4  # 3 of 6 KB each

    def test_a_damaged_artifact_is_named_and_the_exit_code_says_so(
        self, sc: Here, home: Path
    ) -> None:
        id_ = fill(home, count=3)
        (pack,) = (home / "sets/latents" / id_).glob("*.pack")
        data = bytearray(pack.read_bytes())
        data[data.index(latent(1).tobytes())] ^= 1
        pack.write_bytes(data)
        done = sc("artifacts", "export", "latents", "--safetensors", "out", code=1)
        assert "Warning: key-1: " in done.stderr
        assert "2 artifacts" in done.stdout
        assert "1 could not be read" in done.stdout


class TestImport:
    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        (tmp_path / "files/sub").mkdir(parents=True)
        np.savez(tmp_path / "files/a.npz", x=np.arange(500))
        np.savez(tmp_path / "files/sub/b.npz", x=np.arange(600))
        return tmp_path / "files"

    @pytest.mark.usefixtures("files")
    def test_files_of_others(self, sc: Here, home: Path) -> None:
        done = sc("artifacts", "import", "files", *FINGERPRINT, "--key", "path")
        assert ": 2 artifacts (" in done.stdout
        with (
            SmartCache(home) as cache,
            cache.artifacts("files", fingerprint={"vae": "sdxl"}) as there,
        ):
            assert set(there) == {"a.npz", "sub/b.npz"}
        again = sc("artifacts", "import", "files", *FINGERPRINT, "--key", "path", "--json").json
        assert (again["artifacts"], again["kept"]) == (0, 2)

    def test_what_cannot_be_read_is_named_and_the_exit_code_says_so(
        self, sc: Here, files: Path
    ) -> None:
        (files / "c.npz").write_bytes(b"no zip")
        for number in range(30):
            (files / f"cut-{number}.npz").write_bytes(b"PK")
        done = sc("artifacts", "import", "files", *FINGERPRINT, code=1)
        assert f"Warning: {files / 'c.npz'}: " in done.stderr
        assert "Warning: ... and 11 more; --json has all" in done.stderr
        assert "2 artifacts" in done.stdout
        assert "31 could not be read" in done.stdout
        document = sc("artifacts", "import", "files", *FINGERPRINT, "--json", code=1).json
        assert len(document["problems"]) == 31

    @pytest.mark.usefixtures("files")
    def test_what_is_not_told_is_asked_for(self, sc: Here, home: Path) -> None:
        for words, said, hint in (
            ((), "does not say which set", "--set latents --fingerprint '{"),
            (("--set", "x"), "does not say which set", "--fingerprint"),
            (("--set", "x", "--fingerprint", "{x"), "no JSON object", "--fingerprint '{"),
            (("--set", "x", "--fingerprint", "3"), "no JSON object", "--fingerprint '{"),
            ((*FINGERPRINT, "--key", "stm"), "no rule", "{parent}"),
        ):
            done = sc("artifacts", "import", "files", *words, code=2)
            assert said in done.error
            assert hint in done.hint
        assert not home.exists()

    def test_what_is_nothing_of_the_kind(self, sc: Here, home: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").write_text("x")
        for name, said in (
            ("nowhere", "No such file"), ("empty", "nothing that can be imported"),
            ("notes.txt", "nothing that can be imported"),
        ):  # fmt: skip
            assert said in sc("artifacts", "import", name, code=1).error
        assert "Missing argument 'PATH'" in sc("artifacts", "import", code=2).error
        assert not home.exists()
