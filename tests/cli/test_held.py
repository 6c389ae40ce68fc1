"""What only smartcache still holds is said by every command that speaks of room, as one figure."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from smartcache.sizes import format_size
from tests.cli.running import Here
from tests.hub.caches import commit_of, hf, make_repo
from tests.hub_server import Hub
from tests.store.files import OTHER, WEIGHTS, write

pytestmark = pytest.mark.usefixtures("own_places")
SMALL = ("--min-size", "4KiB")
TOLD = (("scan",), ("report",), ("hub", "ls"))


@pytest.fixture
def cache(sc: Here) -> Path:
    """An HF cache of two repos and a folder, whose weights are one file each since a dedup."""
    path = Path.home() / ".cache/huggingface/hub"
    make_repo(path, {"m.safetensors": WEIGHTS}, name="models--org--a")
    make_repo(
        path,
        {"m.safetensors": WEIGHTS, "n.gguf": OTHER},
        name="models--org--b",
        commit=commit_of(2),
    )
    write(Path.home() / "models/n.gguf", OTHER)
    sc("dedup", path, Path.home() / "models", *SMALL, "-y")
    return path


def figures(sc: Here) -> dict[str, int]:
    """Return what each command says to programs."""
    store = sc("df", "--json").json
    return {
        "prune": sc("prune", "--dry-run", "--json").json["planned_size"],
        "df": store["reclaimable"],
        "scan": sc("scan", "--json").json["prunable"],
        "report": sc("report", "--json").json["prunable"],
        "hub ls": sc("hub", "ls", "--json").json["prunable"],
    }


def told(sc: Here, *words: str) -> str | None:
    """Return the size that a command tells people can be freed with `prune`."""
    text = " ".join(sc(*words).stdout.split())
    said = r"can be freed\. Run 'smartcache prune'"
    found = re.search(rf"([\d.]+ \w+) {said}", text)
    return None if found is None else found[1]


@pytest.mark.usefixtures("cache")
def test_nothing_is_said_while_every_blob_has_another_name(sc: Here) -> None:
    assert set(figures(sc).values()) == {0}
    assert not any(told(sc, *words) for words in TOLD)


def test_what_stays_after_repos_were_removed_by_others_is_the_same_everywhere(
    sc: Here, cache: Path, hub: Hub
) -> None:
    shutil.rmtree(cache / "models--org--a")
    hf(hub, cache, "cache", "rm", "model/org/b", "-y")
    found = figures(sc)
    assert len(set(found.values())) == 1, found
    assert found["prune"] >= len(WEIGHTS)
    size = format_size(found["prune"])
    assert [told(sc, *words) for words in TOLD] == [size] * 3
    assert re.search(rf"can be freed +{size} ", sc("df").stdout)
    assert sc("prune", "-y", "--json").json["freed_size"] == found["prune"]
    assert set(figures(sc).values()) == {0}
