"""`hub export` and `hub import`: what is printed, asked for and refused, with which code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from smartcache.hub.care.bundle import MANIFEST
from tests.cli.running import PATIENCE, Here, Smartcache, command, environment
from tests.hub.bundles import (
    ENCODER,
    FIRST,
    UNET,
    VAE,
    add_repo,
    everything,
    faults_of,
    two_repos,
)
from tests.hub_server import etag_of

REPOS = ("org/first", "org/second", "datasets/org/data")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "from"
    two_repos(path)
    return path


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "to"


def test_repos_go_to_a_folder_and_come_out_of_it(sc: Here, cache: Path, there: Path) -> None:
    done = sc("hub", "export", *REPOS, "bundle", "--cache-dir", cache)
    assert "Exported 3 repos, 11 files, to bundle: " in done.stdout
    assert "each blob is there once" in done.stdout
    done = sc("hub", "import", "bundle", "--cache-dir", there)
    assert f"Imported 3 repos, 11 files, into {there}." in done.stdout
    assert everything(there) == everything(cache)
    done = sc("hub", "import", "bundle", "--cache-dir", there)
    assert "0 B from the bundle, 0 B from the store" in done.stdout


def test_figures_for_programs_are_integers_and_ids_compose(
    sc: Here, cache: Path, there: Path, tmp_path: Path
) -> None:
    out = sc("hub", "export", *REPOS, "b.tar", "--cache-dir", cache, "--json").json
    assert out["path"] == str(tmp_path / "b.tar")
    assert out["size"] < out["files_size"]
    assert out["files"] == 11
    assert [repo["id"] for repo in out["repos"]] == ["org/data", "org/first", "org/second"]
    (path,) = sc("hub", "export", "org/first", "c.tar", "--cache-dir", cache, "-q").ids
    assert path == str(tmp_path / "c.tar")
    found = sc("hub", "import", "b.tar", "--cache-dir", there, "--json").json
    assert found["new_size"] >= len(ENCODER) + len(UNET) + len(VAE)
    assert found["known_size"] == found["present_size"] == 0
    assert {ref["ref"] for ref in found["refs"]} == {"main", "refs/pr/1"}
    ids = sc("hub", "import", path, "--cache-dir", there, "-q").ids
    assert [each.split("@")[0] for each in ids] == ["model/org/first"]


def test_a_dry_run_changes_nothing(sc: Here, cache: Path, there: Path, tmp_path: Path) -> None:
    sc("hub", "export", "org/first", "bundle", "--cache-dir", cache)
    before = sorted(os.listdir(tmp_path))
    planned = sc("hub", "export", *REPOS, "more", "--cache-dir", cache, "--dry-run", "--json").json
    assert planned["dry_run"] is True
    done = sc("hub", "import", "bundle", "--cache-dir", there, "--dry-run")
    assert "Would import 1 repo, 5 files" in done.stdout
    assert set(os.listdir(tmp_path)) - set(before) <= {"store"}


def test_a_bundle_goes_through_a_pipe(cache: Path, there: Path, program: Smartcache) -> None:
    words = command("hub", "export", *REPOS, "-", "--cache-dir", cache)
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment(None)) as source:
        done = subprocess.run(
            command("hub", "import", "-", "--cache-dir", there), stdin=source.stdout,
            env=environment(None), capture_output=True, check=False,
        )  # fmt: skip
    assert (source.returncode, done.returncode) == (0, 0), done.stderr
    assert everything(there) == everything(cache)


def test_a_stream_is_for_the_bundle_alone(sc: Here, cache: Path, program: Smartcache) -> None:
    words = ("hub", "export", "org/first", "-", "--cache-dir", cache)
    assert "stdout" in sc(*words, "--json", code=2).error
    shown = program.at_terminal(*words)
    assert shown.code == 2
    assert "cannot be written to a terminal" in shown.stdout


def test_a_damaged_file_is_named_and_ends_with_3(sc: Here, cache: Path, tmp_path: Path) -> None:
    blob = cache / "models--org--first" / "blobs" / etag_of("x.bin", ENCODER)
    blob.write_bytes(b"\0" * len(ENCODER))
    for name in ("bundle", "bundle.tar"):
        done = sc("hub", "export", "org/first", name, "--cache-dir", cache, code=3)
        assert "text_encoder/model.safetensors of model/org/first is damaged" in done.error
        assert "hub verify" in done.hint
    assert sorted(os.listdir(tmp_path)) == ["from"]


def test_a_partial_snapshot_is_said(sc: Here, tmp_path: Path) -> None:
    commit = add_repo(tmp_path / "from", "org/first", FIRST)
    (tmp_path / "from/models--org--first/snapshots" / commit / "empty.txt").unlink()
    done = sc("hub", "export", "org/first", "bundle", "--cache-dir", tmp_path / "from")
    assert "is incomplete here: 1 file of it will be missing" in done.stderr


def test_what_exists_is_refused_and_replaced_with_force(sc: Here, cache: Path) -> None:
    words = ("hub", "export", "org/first", "bundle", "--cache-dir", cache)
    sc(*words)
    done = sc(*words, code=1)
    assert "exists already" in done.error
    assert "--force" in done.hint
    sc(*words, "--force")


def test_what_is_not_there_is_said(sc: Here, cache: Path, tmp_path: Path) -> None:
    words = ("--cache-dir", cache)
    assert "is not in any HF cache" in sc("hub", "export", "org/none", "b", *words, code=1).error
    done = sc("hub", "export", "org/first@v9", "b", *words, code=1)
    assert "'v9' is not a revision of model/org/first" in done.error
    assert "No such file" in sc("hub", "import", "nothing.tar", code=1).error
    (tmp_path / "folder").mkdir()
    done = sc("hub", "import", "folder", code=1)
    assert done.error == f"folder is not a bundle: {MANIFEST} is missing"


def test_a_ref_that_stays_is_said(sc: Here, tmp_path: Path, there: Path) -> None:
    new = add_repo(tmp_path / "from", "org/name", {"a.json": b"2"})
    old = add_repo(there, "org/name", {"a.json": b"1"})
    sc("hub", "export", "org/name", "bundle", "--cache-dir", tmp_path / "from")
    done = sc("hub", "import", "bundle", "--cache-dir", there)
    assert f"main of model/org/name stays at {old[:12]}" in done.stderr
    assert new[:12] in done.stderr
    sc("hub", "import", "bundle", "--cache-dir", there, "--update-refs")
    assert (there / "models--org--name" / "refs" / "main").read_text() == new


def test_the_default_is_the_cache_of_huggingface_hub(
    program: Smartcache, cache: Path, there: Path
) -> None:
    program("hub", "export", "org/first", "bundle", env={"HF_HUB_CACHE": str(cache)})
    program("hub", "import", "bundle", env={"HF_HUB_CACHE": str(there)})
    assert list(there.glob("models--org--first/refs/main"))


def test_ctrl_c_keeps_what_has_arrived(
    program: Smartcache, cache: Path, there: Path, tmp_path: Path
) -> None:
    """The pipe stays open and gives nothing more, so that the import waits in the middle."""
    program("hub", "export", *REPOS, "bundle.tar", "--cache-dir", cache)
    data = (tmp_path / "bundle.tar").read_bytes()
    words = command("hub", "import", "-", "--cache-dir", there)
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(None), text=False,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(data[: len(data) - 60_000])
        process.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while not list(there.glob("*/blobs/*")) or is_at_work(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read().decode()
        assert process.wait(PATIENCE) == 130, stderr
    assert "run the same command again" in stderr
    assert faults_of(there) == []
    assert not list(there.glob("*/.smartcache-import"))
    program("hub", "import", "bundle.tar", "--cache-dir", there)
    assert everything(there) == everything(cache)


def is_at_work(pid: int) -> bool:
    """Whether a process has computed anything in the last moment."""

    def times() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = times()
    time.sleep(0.2)
    return times() != before
