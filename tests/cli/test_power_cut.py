"""A power cut soon after a store was made: nothing is lost, and no command refuses the store.

Files that were not synced come back empty; what this shows for `format` holds for each small file
of ours: its bytes are on the disk before it has its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.artifacts import ArtifactSets
from smartcache.hub import layout as hub_layout
from smartcache.remote import Remotes
from smartcache.store.store import Store
from tests.cli.running import Here
from tests.store.files import WEIGHTS, blob_path, digest_of, snapshot, write

DIGEST = digest_of(WEIGHTS)


def nothing(_: Here, __: Path) -> None:
    """Nothing was done with it yet."""


def add(sc: Here, models: Path) -> None:
    sc("add", models / "a.safetensors")


def adopt_and_dedup(sc: Here, models: Path) -> None:
    write(models / "copy.safetensors", (models / "a.safetensors").read_bytes())
    sc("dedup", models, "-y", "--min-size", "1KiB", "--read-only")


@pytest.mark.parametrize("use", [nothing, add, adopt_and_dedup])
@pytest.mark.parametrize("lost", ["format", "format and tag", "all but the mark"])
def test_a_store_whose_format_was_lost_is_made_again_with_all_it_has(
    use: Callable[[Here, Path], None], lost: str, sc: Here, home: Path, models: Path
) -> None:
    before = snapshot(models)
    make_store(home.parent)
    use(sc, models)
    blobs = sc.digests()
    if lost == "all but the mark":
        for path in (home / "format", *home.glob("index.sqlite3*")):
            path.unlink()
        assert "'smartcache scan' makes one" in sc("ls").stderr + sc("df").stderr
        sc("scan", models)
    else:
        os.truncate(home / "format", 0)
    if lost == "format and tag":
        os.truncate(home / "blobs" / "CACHEDIR.TAG", 0)
    sc("doctor", "--json")
    assert sc.digests() == blobs
    for words in (["df"], ["verify", "--full"], ["scan", models], ["undo", "--list"]):
        sc(*words)
    sc("add", models / "b.safetensors")
    assert (home / "format").read_text() == "1\n"
    assert (home / "blobs" / "CACHEDIR.TAG").stat().st_size > 0
    if use is adopt_and_dedup:
        sc("undo", "--all", "-y")
        (models / "copy.safetensors").unlink()
        assert snapshot(models) == before
    sc("eject", "-y", "--drop-pinned")


def test_a_blob_that_was_put_survives_it(home: Path) -> None:
    with Store(home) as store:
        digest = store.put_stream([WEIGHTS]).digest
        store.pin(digest)
    os.truncate(home / "format", 0)
    with Store(home) as store, store.open(digest) as file:
        assert file.read() == WEIGHTS
        assert blob_path(store, digest).stat().st_nlink == 2


@pytest.mark.parametrize("name", ["photo.jpg", "tmp/photo.jpg", "sets/mine"])
@pytest.mark.parametrize("has_format", [False, True])
def test_a_folder_with_files_of_others_is_no_half_made_store(
    name: str, has_format: bool, sc: Here, home: Path, models: Path
) -> None:
    write(home / name, b"mine")
    if has_format:
        if name != "photo.jpg":
            pytest.skip("an empty format and nothing but names of ours: that is our store")
        (home / "format").touch(mode=0o600)
    before = snapshot(home)
    assert sc("add", models / "a.safetensors", code=1).error
    assert snapshot(home) == before


def make_store(place: Path) -> Path:
    with Store(place / "store") as store:
        store.ready()
    return place / "store" / "format"


def make_set(place: Path) -> Path:
    opened = ArtifactSets(place / "sets").open("latents", {"size": 1})
    opened.close()
    return opened.path / "set.json"


def make_remote(place: Path) -> Path:
    (place / "nas").mkdir()
    remotes = Remotes(place / "remotes.json")
    remotes.add("nas", str(place / "nas"))
    return place / "remotes.json"


def make_ref(place: Path) -> Path:
    hub_layout.write_ref(place, "main", "a" * 40)
    return place / "refs" / "main"


@pytest.mark.parametrize("make", [make_store, make_set, make_remote, make_ref])
def test_a_small_file_is_on_the_disk_before_it_has_its_name_and_then_the_name(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replaced(source: str | Path, target: str | Path, **more: int) -> None:
        steps.append((os.fspath(source), os.fspath(target)))
        replace(source, target, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    path = make(tmp_path)
    (number,) = (n for n, (_, target) in enumerate(steps) if Path(target).name == path.name)
    source, target = steps[number]
    assert ("fsync", source) in steps[:number]
    assert ("fsync", str(Path(target).parent)) in steps[number:]
