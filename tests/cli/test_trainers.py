"""Files of other trainers from the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from smartcache.training import Encoder, Item, Sources
from tests.api import SmartCache
from tests.cli.running import Here

if TYPE_CHECKING:
    import torch  # noqa: TC004 - loaded by the fixture below

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Load torch when the first test runs, and not when they are collected."""
    global torch  # noqa: PLW0603
    import torch


SAID = ("--encoder", "a-vae", "--statistic", "sample")


def encode_none(items: list[Item]) -> list[object]:
    raise AssertionError(f"{items} were imported")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images with the latents that sd-scripts has made of them, and one of none."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(2):
        Image.new("RGB", (64, 48), (number, 0, 0)).save(folder / f"{number}.png")
        os.utime(folder / f"{number}.png", (1_000_000, 1_000_000))
    for stem in ("0", "1", "gone"):
        value = np.full((4, 6, 8), len(stem), np.float32)
        np.savez(folder / f"{stem}_0064x0048_sdxl.npz", latents_6x8=value)
    return folder


def importing(photos: Path, *words: str | Path) -> tuple[str | Path, ...]:
    return ("datasets", "import", "--from", "sd-scripts", photos, *words)


def test_what_is_imported_is_found_by_a_program(sc: Here, home: Path, photos: Path) -> None:
    vae = photos.parent / "vae.safetensors"
    vae.write_bytes(b"weights")
    words = ("--encoder", vae, "--statistic", "mode", "--scale", "0.5", "--shift", "0.25")
    done = sc(*importing(photos, *words))
    reason = "no image of the dataset belongs to it"
    said = f"Imported photos from sd-scripts: 2 latent taken; 1 skipped ({reason}).\n"
    assert done.stdout == said
    assert f"Skipped gone_0064x0048_sdxl.npz: {reason}" in done.stderr
    assert f"depends_on=Path('{vae}'), statistic='mode', scale=0.5, shift=0.25" in done.stderr
    encoder = Encoder(
        encode_none, reads="file", depends_on=vae, statistic="mode", scale=0.5, shift=0.25
    )
    with SmartCache(home) as cache, cache.dataset(
        "photos", Sources(photos), latent=encoder
    ) as dataset:  # fmt: skip
        assert dataset.build().reused == {"latent": 2}
        assert torch.equal(dataset[1]["latent"], torch.ones(4, 6, 8))
    assert sc("datasets", "ls", "-q").ids == ["photos"]


def test_a_dry_run_writes_nothing_and_knows_what_is_there(
    sc: Here, home: Path, photos: Path
) -> None:
    done = sc(*importing(photos, "-n", *SAID))
    assert done.stdout.startswith("Would import photos from sd-scripts: 2 latent to take; 1 skip")
    assert not home.exists()
    sc(*importing(photos, *SAID))
    document = sc(*importing(photos, "--dry-run", "--json", *SAID)).json
    assert (document["dry_run"], document["taken"], document["present"]) == (True, {}, 2)
    again = sc(*importing(photos, "--json", *SAID)).json
    assert (again["dry_run"], again["taken"], again["present"]) == (False, {}, 2)
    (skipped,) = again["skipped"]
    assert skipped["file"] == "gone_0064x0048_sdxl.npz"
    assert sc(*importing(photos, "-q", *SAID)).ids == ["photos"]


def test_what_the_files_do_not_say_has_to_be_said(sc: Here, home: Path, photos: Path) -> None:
    assert "--encoder is needed" in sc(*importing(photos), code=2).stderr
    assert "--statistic is needed" in sc(*importing(photos, "--encoder", "x"), code=2).stderr
    alone = sc("datasets", "import", photos, "--scale", "0.5", code=2)
    assert "--scale needs --from" in alone.stderr
    assert not home.exists()


def test_another_dataset_of_the_name_is_left_alone(sc: Here, photos: Path) -> None:
    sc(*importing(photos, *SAID))
    other = ("--encoder", "another-vae", "--statistic", "sample")
    done = sc(*importing(photos, *other), code=1)
    assert "with other outputs" in done.error
    assert "--name" in done.hint
    assert sc(*importing(photos, "--name", "more", *other, "-q")).ids == ["more"]


def test_texts_are_imported_with_their_encoder(sc: Here, home: Path, photos: Path) -> None:
    (photos / "0.caption").write_text("a photo")
    np.savez(photos / "0_te_outputs.npz", hidden_state1=np.zeros((2, 2), np.float32))
    words = ("--text-encoder", "clip", "--caption", ".caption", "--json")
    assert sc(*importing(photos, *words)).json["taken"] == {"text": 1}


def test_what_was_imported_is_given_back(sc: Here, photos: Path, tmp_path: Path) -> None:
    sc(*importing(photos, *SAID))
    target = tmp_path / "out"
    exporting = ("datasets", "export", "photos", target, "--to", "sd-scripts")
    done = sc(*exporting, "-n")
    assert "for sd-scripts: 2 files, 0 skipped." in done.stdout
    assert not target.exists()
    assert len(sc(*exporting, "-q").ids) == 2
    for number in range(2):
        name = f"{number}_0064x0048_sdxl.npz"
        with np.load(photos / name) as old, np.load(target / name) as new:
            assert np.array_equal(old["latents_6x8"], new["latents_6x8"])
    document = sc(*exporting, "--json").json
    assert document["files"] == []
    assert len(document["skipped"]) == 2
