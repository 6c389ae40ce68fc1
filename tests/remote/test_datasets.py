"""A dataset is built on one machine, pushed, and trained from on another that has no images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache import SmartCache
from smartcache.errors import DamagedObjectError, MissingObjectError, OutputMissingError, TierError
from smartcache.remote import Tier, pull_dataset, push_dataset
from smartcache.training import Batches, Dataset, Encoder, Item, Prefetcher, Sources

HERE = Path(__file__).resolve().parents[2]
COUNT = 40

TRAINING = """
import json, sys
from smartcache import SmartCache
from smartcache.remote import Tier
from smartcache.training import Batches, Prefetcher
home, url, seed = sys.argv[1:]
with SmartCache(home) as cache, cache.open_dataset("photos", tier=Tier("nas", url)) as photos:
    seen = []
    with Prefetcher(Batches(photos, size=4, seed=int(seed)), depth=2) as loader:
        for batch in loader:
            for at, name in enumerate(batch["name"]):
                seen.append([name, float(batch["latent"][at].sum()), int(batch["text"][at].sum())])
print(json.dumps(seen))
"""


def encode_image(items: list[Item]) -> list[np.ndarray[Any, Any]]:
    return [np.frombuffer(item.bytes("file"), np.uint8).astype("f4") for item in items]


def encode_text(items: list[Item]) -> list[np.ndarray[Any, Any]]:
    return [
        np.frombuffer(str(item.get("caption")).encode().ljust(32), np.uint8).copy()
        for item in items
    ]


def fill(folder: Path, count: int = COUNT) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        data = np.random.default_rng(number).bytes(60_000)
        (folder / f"{number:03}.png").write_bytes(data)
        (folder / f"{number:03}.txt").write_text(f"caption {number}")


def opened(cache: SmartCache, folder: Path, **options: Any) -> Dataset:  # noqa: ANN401
    return cache.dataset(
        "photos", Sources(folder, sidecars={"caption": ".txt"}),
        latent=Encoder(encode_image, reads="file", depends_on="vae 1", batch=4),
        text=Encoder(encode_text, reads="caption", depends_on="clip 1", batch=8),
        **options,
    )  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    fill(folder)
    return folder


@pytest.fixture
def expected(a: SmartCache, nas: Tier, photos: Path) -> list[list[Any]]:
    """What an epoch has on the machine that built it; the dataset is in the tier."""
    with opened(a, photos) as dataset:
        dataset.build()
        seen = [
            [name, float(batch["latent"][at].sum()), int(batch["text"][at].sum())]
            for batch in Batches(dataset, size=4, seed=7)
            for at, name in enumerate(batch["name"])
        ]
    push_dataset(a.sets, nas, "photos")
    return seen


def train(home: Path, tier: Tier, *, alone: bool = False) -> list[list[Any]]:
    """Go through an epoch in another process; `alone`: one that has no network at all."""
    command = [sys.executable, "-c", TRAINING, str(home), tier.url, "7"]
    if alone:
        command = ["unshare", "--net", *command]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, env=environment, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def test_another_machine_trains_without_the_images(
    nas: Tier, photos: Path, expected: list[list[Any]], tmp_path: Path
) -> None:
    shutil.rmtree(photos)
    can_unshare = (
        shutil.which("unshare")
        and not subprocess.run(
            ["unshare", "--net", "true"], check=False, capture_output=True
        ).returncode
    )
    assert train(tmp_path / "b", nas, alone=bool(can_unshare)) == expected
    assert nas.folder is not None
    nas.folder.rename(tmp_path / "away")
    assert train(tmp_path / "b", nas) == expected, "all of it was fetched before"


def test_a_machine_with_the_images_encodes_nothing(
    nas: Tier, b: SmartCache, photos: Path, expected: list[list[Any]], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "same pictures"
    photos.rename(elsewhere)
    (elsewhere / "000.txt").write_text("another caption")
    with opened(b, elsewhere, tier=nas) as dataset:
        report = dataset.build()
        assert report.encoded == {"latent": 0, "text": 1}
        assert len(dataset) == COUNT
        assert len(expected) == COUNT


def test_a_pulled_dataset_needs_neither_images_nor_tier(
    nas: Tier, b: SmartCache, photos: Path, expected: list[list[Any]]
) -> None:
    done = pull_dataset(b.sets, nas, "photos")
    assert done.objects == 2
    shutil.rmtree(photos)
    assert nas.folder is not None
    shutil.rmtree(nas.folder)
    with b.open_dataset("photos") as dataset:
        seen = [name for batch in Batches(dataset, size=4, seed=7) for name in batch["name"]]
    assert seen == [name for name, _, _ in expected]


def test_new_items_arrive_when_the_dataset_is_opened_again(
    nas: Tier, a: SmartCache, b: SmartCache, photos: Path, expected: list[list[Any]]
) -> None:
    assert len(expected) == COUNT
    with b.open_dataset("photos", tier=nas) as dataset:
        assert len(dataset) == COUNT
    fill(photos, COUNT + 5)
    with opened(a, photos) as dataset:
        dataset.build()
    sent = push_dataset(a.sets, nas, "photos")
    assert (sent.objects, sent.skipped) == (2, 2)
    with b.open_dataset("photos", tier=nas) as dataset:
        assert len(dataset) == COUNT + 5
        assert len(dataset.batch(range(COUNT + 5))["name"]) == COUNT + 5


def test_a_dataset_that_was_made_here_is_not_replaced(
    nas: Tier, b: SmartCache, photos: Path, expected: list[list[Any]], tmp_path: Path
) -> None:
    assert expected
    fill(tmp_path / "mine", 3)
    with opened(b, tmp_path / "mine") as dataset:
        dataset.build()
    with b.open_dataset("photos", tier=nas) as dataset:
        assert len(dataset) == 3


def test_what_is_not_built_is_not_pushed(nas: Tier, a: SmartCache, photos: Path) -> None:
    with opened(a, photos) as dataset:
        dataset.refresh()
    with pytest.raises(OutputMissingError, match="not encoded"):
        push_dataset(a.sets, nas, "photos")
    assert list(nas.documents()) == []


def test_what_the_tier_has_damaged_is_refused(
    nas: Tier, b: SmartCache, expected: list[list[Any]]
) -> None:
    assert expected
    with pytest.raises(MissingObjectError, match="has no dataset other"):
        b.open_dataset("other", tier=nas)
    document = nas.document("datasets", "photos")
    assert document is not None
    assert nas.folder is not None
    table = document["content"]["table"]
    path = nas.folder / "objects" / table[:2] / table
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedObjectError, match="has other bytes than object"):
        b.open_dataset("photos", tier=nas)
    path.unlink()
    with pytest.raises(TierError):
        b.open_dataset("photos", tier=nas)
    path.write_bytes(data)
    with b.open_dataset("photos", tier=nas) as dataset:
        assert len(dataset) == COUNT


def test_outputs_are_on_their_way_before_they_are_read(
    nas: Tier, b: SmartCache, expected: list[list[Any]]
) -> None:
    assert expected
    with b.open_dataset("photos", tier=nas) as dataset:
        steps = Batches(dataset, size=4, seed=0).steps()
        latents = dataset.outputs["latent"].set
        assert not list(latents.path.glob("far/*/*"))
        next(steps)
        for _ in range(500):
            if list(latents.path.glob("far/*/*[0-9]")):
                break
            time.sleep(0.01)
        assert list(latents.path.glob("far/*/*"))


def test_a_prefetcher_reads_through(
    nas: Tier, b: SmartCache, expected: list[list[Any]]
) -> None:  # fmt: skip
    with (
        b.open_dataset("photos", tier=nas) as dataset,
        Prefetcher(Batches(dataset, size=4, seed=7), depth=4, threads=2) as loader,
    ):
        names = [name for batch in loader for name in batch["name"]]
    assert names == [name for name, _, _ in expected]
