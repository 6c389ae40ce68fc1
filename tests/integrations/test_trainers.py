"""What other trainers have encoded: taken over where nothing speaks against it, and given back.

The files are made here as the trainers make them: their names, the names inside, their headers.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from PIL import Image

from smartcache.cache import SmartCache
from smartcache.errors import ConfigError, DatasetError
from smartcache.integrations.trainers import (
    Imported,
    ImportPlan,
    Target,
    Trainer,
    export_files,
    plan_import,
)
from smartcache.training import Dataset, Encoder, Item, Sources
from tests.processes.killing import in_child, was_killed

if TYPE_CHECKING:
    import torch  # noqa: TC004 - loaded by the fixture below
    from safetensors import torch as safetensors_torch  # noqa: TC004

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Load torch when the first test runs, and not when they are collected."""
    global safetensors_torch, torch  # noqa: PLW0603
    import torch
    from safetensors import torch as safetensors_torch


SIZES = ((64, 48), (48, 64), (64, 64))
COUNT = 3


class Photos:
    """Three images with captions, and a dataset of them whose encoders note what they encode."""

    def __init__(self, cache: SmartCache, folder: Path) -> None:
        self.cache = cache
        self.folder = folder
        self.encoded: list[str] = []
        folder.mkdir()
        for number, size in enumerate(SIZES):
            path = folder / f"{number}.png"
            Image.new("RGB", size, (number * 40, 0, 0)).save(path)
            path.with_suffix(".txt").write_text(f"photo {number}")
            for each in (path, path.with_suffix(".txt")):
                os.utime(each, (1_000_000, 1_000_000))

    def open(self, *, text: bool = False, buckets: str | None = None) -> Dataset:
        def encode(items: list[Item]) -> list[Any]:
            self.encoded += [item.name for item in items]
            return [torch.zeros(4, 8, 8) for _ in items]

        outputs = {"latent": Encoder(
            encode, reads="file", depends_on="sdxl-vae", statistic="sample", buckets=buckets
        )}  # fmt: skip
        if text:
            outputs["text"] = Encoder(encode, reads="caption", depends_on="clip-l")
        sources = Sources(self.folder, sidecars={"caption": ".txt"})
        return self.cache.dataset("photos", sources, **outputs)  # type: ignore[arg-type]

    def take(self, trainer: Trainer, folder: Path | None = None, **options: Any) -> Imported:  # noqa: ANN401
        has_text = options.get("text") is not None
        buckets = options.pop("buckets", None)
        with self.open(text=has_text, buckets=buckets) as dataset:
            plan = plan_import(dataset, trainer, folder or self.folder, **options)
            return plan.execute()

    def values(self, name: str = "latent", **options: Any) -> dict[str, Any]:  # noqa: ANN401
        """Build, and return the output of every item by its name."""
        with self.open(**options) as dataset:
            dataset.build()
            return {each["name"]: each[name] for each in (dataset[n] for n in range(len(dataset)))}


@pytest.fixture
def photos(tmp_path: Path) -> Iterator[Photos]:
    with SmartCache(tmp_path / "store") as cache:
        yield Photos(cache, tmp_path / "photos")


def latent(number: int) -> Any:  # noqa: ANN401 - a tensor
    width, height = SIZES[number]
    return torch.full((4, height // 8, width // 8), number + 0.5)


def reasons(done: Imported | ImportPlan) -> dict[str, str]:
    return {Path(each.file).name: each.reason for each in done.skipped}


# what each trainer writes


def write_sd(photos: Photos, number: int, *, arch: str = "sdxl", reso: bool = True) -> Path:
    width, height = SIZES[number]
    end = f"_{height // 8}x{width // 8}" if reso else ""
    path = photos.folder / f"{number}_{width:04d}x{height:04d}_{arch}.npz"
    np.savez(path, **{
        f"latents{end}": latent(number).numpy(), f"original_size{end}": np.array([width, height]),
        f"crop_ltrb{end}": np.array([0, 0, width, height]),
    })  # fmt: skip
    return path


def write_musubi(folder: Path, number: int, *, caption: str | None = None) -> list[Path]:
    folder.mkdir(exist_ok=True)
    width, height = SIZES[number]
    value = latent(number).to(torch.bfloat16)[:, None]
    paths = [
        folder / f"{number}_{width:04d}x{height:04d}_wan.safetensors",
        folder / f"{number}_wan_te.safetensors",
    ]
    header = {"architecture": "wan", "width": str(width), "height": str(height)}
    safetensors_torch.save_file(
        {f"latents_1x{height // 8}x{width // 8}_bfloat16": value}, paths[0],
        metadata=header | {"format_version": "1.0.1", "frame_count": "1"},
    )  # fmt: skip
    safetensors_torch.save_file(
        {"varlen_t5_bfloat16": torch.full((3 + number, 2), number).to(torch.bfloat16),
         "t5_mask": torch.ones(3 + number, dtype=torch.bool)}, paths[1],
        metadata={"architecture": "wan", "caption1": caption or f"photo {number}"},
    )  # fmt: skip
    return paths


def write_ai_toolkit(photos: Photos, number: int, *, flip: bool = False) -> Path:
    settings: dict[str, object] = {
        "filename": f"{number}.png", "crop_x": 0, "crop_width": SIZES[number][0],
    }  # fmt: skip
    settings |= {"flip_x": True} if flip else {}
    digest = hashlib.md5(json.dumps(settings).encode(), usedforsecurity=False).digest()
    name = base64.urlsafe_b64encode(digest).decode().replace("=", "")
    path = photos.folder / "_latent_cache" / f"{number}_{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    header = {key: json.dumps(each) for key, each in settings.items()}
    safetensors_torch.save_file({"latent": latent(number)}, path, metadata=header)
    text = photos.folder / "_t_e_cache" / path.name
    text.parent.mkdir(exist_ok=True)
    safetensors_torch.save_file(
        {"text_embed": torch.full((1, 2), number), "pooled_embed": torch.ones(1)}, text,
        metadata={"caption": json.dumps(f"photo {number}")},
    )  # fmt: skip
    return path


def write_simpletuner(folder: Path, number: int) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(str(number).encode()).hexdigest()}.pt"
    torch.save(latent(number), path)
    name = hashlib.md5(f"photo {number}".encode(), usedforsecurity=False).hexdigest()
    text = folder / f"{name}-sdxl.pt"
    torch.save({"prompt_embeds": torch.full((2,), number), "pooled": torch.ones(1)}, text)
    return path, text


def write_diffusion_pipe(photos: Photos) -> Path:
    """Write a cache of diffusion-pipe; its items are in another order than the images."""
    datasets = pytest.importorskip("datasets")
    bucket = photos.folder / "cache" / "flux" / "cache_1.000x64x64x1"
    (bucket / "latents").mkdir(parents=True)
    order = [2, 0, 1]
    rows = {
        "image_spec": [[None, str(photos.folder / f"{number}.png")] for number in order],
        "latents_idx": list(range(COUNT)),
        "caption": ["x"] * COUNT, "caption_number": [0] * COUNT,
    }  # fmt: skip
    datasets.Dataset.from_dict(rows).save_to_disk(str(bucket / "iteration_order"))
    database = sqlite3.connect(bucket / "latents" / "metadata.db")
    database.execute("CREATE TABLE items(shard, shard_index)")
    database.execute("CREATE TABLE shard_0(offset, size)")
    with open(bucket / "latents" / "shard_0.bin", "wb") as file:
        for at, number in enumerate(order):
            data = io.BytesIO()
            torch.save({"latents": latent(number), "mask": None}, data)
            database.execute("INSERT INTO items VALUES(0, ?)", (at,))
            place = file.tell(), len(data.getvalue())
            database.execute("INSERT INTO shard_0 VALUES(?, ?)", place)
            file.write(data.getvalue())
    database.commit()
    database.close()
    return bucket.parent


def write_all(photos: Photos, trainer: Trainer) -> Path:
    folder = photos.folder.parent / "their cache"
    if trainer == "diffusion-pipe":
        return write_diffusion_pipe(photos)
    for number in range(COUNT):
        if trainer == "sd-scripts":
            write_sd(photos, number)
        elif trainer == "musubi":
            write_musubi(folder, number)
        elif trainer == "ai-toolkit":
            write_ai_toolkit(photos, number)
        else:
            write_simpletuner(folder, number)
    return folder if folder.exists() else photos.folder


# taking over


@pytest.mark.parametrize(
    "trainer", ["sd-scripts", "musubi", "ai-toolkit", "simpletuner", "diffusion-pipe"]
)
def test_a_dataset_finds_what_a_trainer_has_encoded(photos: Photos, trainer: Trainer) -> None:
    folder = write_all(photos, trainer)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = photos.take(trainer, folder)
    assert done.taken == {"latent": COUNT}, done
    values = photos.values()
    assert photos.encoded == []
    for number in range(COUNT):
        wanted = latent(number)
        wanted = wanted.to(torch.bfloat16)[:, None] if trainer == "musubi" else wanted
        assert values[f"{number}.png"].dtype == wanted.dtype
        assert torch.equal(values[f"{number}.png"], wanted)
    with photos.open() as dataset:
        dataset.refresh()
        output = dataset.outputs["latent"]
        about = output.set.metadata(output.key(0))
        assert about["claimed"]["trainer"] == trainer
        assert about["name"] == "0.png"
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("trainer", "names"), [
    ("musubi", {"t5", "t5_mask"}), ("ai-toolkit", {"text_embed", "pooled_embed"}),
    ("simpletuner", {"prompt_embeds", "pooled"}),
])  # fmt: skip
def test_texts_belong_to_their_captions(photos: Photos, trainer: Trainer, names: set[str]) -> None:
    folder = write_all(photos, trainer)
    (photos.folder / "1.txt").write_text("an edited caption")
    done = photos.take(trainer, folder, latent=None, text="text")
    assert done.taken == {"text": COUNT - 1}
    assert len(done.skipped) == 1
    with photos.open(text=True) as dataset:
        plan = dataset.plan()
        assert plan.encode["text"] == {"edited": 1} or sum(plan.encode["text"].values()) == 1
        value = dataset.outputs["text"].set.get(dataset.outputs["text"].key(2))
        assert value.keys() == names


def test_texts_of_sd_scripts_are_as_old_as_their_captions_at_most(photos: Photos) -> None:
    for number in range(COUNT):
        np.savez(
            photos.folder / f"{number}_te_outputs.npz", hidden_state1=np.ones((2, 3), np.float32),
            hidden_state2=np.full((2, 4), number, np.float32), pool2=np.ones(5, np.float32),
        )  # fmt: skip
    os.utime(photos.folder / "2.txt", (4e9, 4e9))
    done = photos.take("sd-scripts", latent=None, text="text")
    assert done.taken == {"text": 2}
    assert reasons(done) == {"2_te_outputs.npz": "it is older than the caption"}
    with photos.open(text=True) as dataset:
        dataset.refresh()
        value = dataset.outputs["text"].set.get(dataset.outputs["text"].key(1))
    assert value.keys() == {"hidden_state1", "hidden_state2", "pool2"}
    assert torch.equal(value["hidden_state2"], torch.ones(2, 4))


def test_what_speaks_against_a_file_is_said(photos: Photos) -> None:
    write_sd(photos, 0)
    os.utime(photos.folder / "0.png", (4e9, 4e9))
    write_sd(photos, 1).rename(photos.folder / "1_0100x0100_sdxl.npz")
    write_sd(photos, 2).write_bytes(b"PK\x03\x04 half a file")
    np.savez(photos.folder / "gone_0064x0064_sdxl.npz", latents=np.zeros((4, 8, 8)))
    done = photos.take("sd-scripts")
    found = reasons(done)
    assert done.taken == {"latent": 0}
    assert found["0_0064x0048_sdxl.npz"] == "it is older than the image"
    assert found["1_0100x0100_sdxl.npz"] == "the size in its name is not that of the image"
    assert found["2_0064x0064_sdxl.npz"].startswith("it cannot be read")
    assert found["gone_0064x0064_sdxl.npz"] == "no image of the dataset belongs to it"
    assert len(photos.values()) == COUNT
    assert sorted(photos.encoded) == ["0.png", "1.png", "2.png"]


def test_times_can_be_left_out_of_it(photos: Photos) -> None:
    write_sd(photos, 0)
    os.utime(photos.folder / "0.png", (4e9, 4e9))
    assert photos.take("sd-scripts", older=True).taken == {"latent": 1}


def test_a_nan_is_not_taken(photos: Photos) -> None:
    path = write_sd(photos, 0)
    np.savez(path, latents_6x8=np.full((4, 6, 8), np.nan, np.float32))
    done = photos.take("sd-scripts")
    assert reasons(done) == {path.name: "it has a NaN"}
    assert photos.encoded == []
    assert len(photos.values()) == COUNT
    assert "0.png" in photos.encoded


def test_of_several_architectures_one_is_chosen(photos: Photos) -> None:
    for arch in ("sd", "sdxl"):
        write_sd(photos, 0, arch=arch, reso=False)
    assert "arch" in next(iter(photos.take("sd-scripts").skipped)).reason
    assert photos.take("sd-scripts", arch="sd").taken == {"latent": 1}


def test_a_latent_of_another_bucket_is_not_taken(photos: Photos) -> None:
    for number in range(COUNT):
        write_sd(photos, number)
    with np.load(photos.folder / "2_0064x0064_sdxl.npz") as npz:
        more = np.zeros((4, 4, 4), np.float32)
        np.savez(photos.folder / "2_0064x0064_sdxl.npz", **npz, latents_4x4=more)
    buckets = "64x48 48x64 32x32"
    done = photos.take("sd-scripts", buckets=buckets)
    assert done.taken == {"latent": 3}
    values = photos.values(buckets=buckets)
    assert values["2.png"].shape == (4, 4, 4)
    assert photos.encoded == []
    assert photos.take("sd-scripts", buckets="128x96 96x128").taken == {"latent": 0}


def test_a_file_that_could_be_of_two_images_is_of_none(photos: Photos) -> None:
    """Also if one of them came later, when the other had its latent already."""
    write_sd(photos, 0)
    Image.new("RGB", (64, 48), "white").save(photos.folder / "0.jpg")
    os.utime(photos.folder / "0.jpg", (1_000_000, 1_000_000))
    done = photos.take("sd-scripts")
    assert done.taken == {}
    assert {each.reason for each in done.skipped} == {
        "several sources of the dataset are called like it"
    }
    (photos.folder / "0.jpg").rename(photos.folder.parent / "0.jpg")
    assert photos.take("sd-scripts").taken == {"latent": 1}
    (photos.folder.parent / "0.jpg").rename(photos.folder / "0.jpg")
    assert photos.take("sd-scripts").taken == {}


def test_flips_of_ai_toolkit_are_left_out(photos: Photos) -> None:
    write_ai_toolkit(photos, 0)
    flipped = write_ai_toolkit(photos, 0, flip=True)
    done = photos.take("ai-toolkit")
    assert done.taken == {"latent": 1}
    assert reasons(done) == {flipped.name: "it is of the image turned over"}


def test_folders_of_simpletuner_tell_images_of_one_name_apart(photos: Photos) -> None:
    folder = photos.folder.parent / "vae"
    for number, where in enumerate(("a", "b")):
        (photos.folder / where).mkdir()
        Image.new("RGB", (64, 64), (1, 2, number)).save(photos.folder / where / "x.png")
        (folder / where).mkdir(parents=True)
        name = hashlib.sha256(b"x").hexdigest()
        torch.save(torch.full((4, 8, 8), number), folder / where / f"{name}.pt")
    assert photos.take("simpletuner", folder).taken == {"latent": 2}
    values = photos.values()
    assert [int(values[f"{where}/x.png"][0, 0, 0]) for where in "ab"] == [0, 1]


@pytest.mark.parametrize("version", [2, 3])
def test_caches_of_mgds_are_known_by_the_content_of_images(photos: Photos, version: int) -> None:
    """Moved images are found, edited ones are not; a mask comes along."""
    folder = photos.folder.parent / "cache"
    folder.mkdir()
    entries: dict[str, Any] = {}
    for number in range(COUNT):
        digest = xxhash.xxh64((photos.folder / f"{number}.png").read_bytes()).hexdigest()
        name = f"{digest[:12]}_64x64"
        file = {"cache_file": name} | ({"resolution": "64x64"} if version == 2 else {})
        more = file if version == 2 else {"variants": {"64x64": file}}
        entries[f"/elsewhere/{number}.png"] = {"hash": digest, "modeltype": "sdxl", **more}
        values = {
            "latent_image": torch.full((4, 8, 8), number), "latent_mask": torch.ones(1, 8, 8),
            "crop_resolution": (64, 64), "__cache_version": version, "__modeltype": "sdxl",
        }  # fmt: skip
        torch.save(values, folder / f"{name}_1.pt")
    (folder / "cache.json").write_text(json.dumps({"version": version, "entries": entries}))
    Image.new("RGB", (64, 64), (9, 9, 9)).save(photos.folder / "1.png")
    done = photos.take("mgds", folder)
    assert done.taken == {"latent": 2}
    assert [(each.item, each.reason) for each in done.skipped] == [
        ("", "no image of the dataset belongs to it")
    ]
    with photos.open() as dataset:
        opened = dataset.outputs["latent"].set
        found = [opened.get(key) for key in opened]
    assert sorted(int(value["latent_image"][0, 0, 0]) for value in found) == [0, 2]
    assert all(value["latent_mask"].shape == (1, 8, 8) for value in found)


def test_no_code_in_a_file_is_run(photos: Photos, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "vae"
    path, _ = write_simpletuner(folder, 0)
    torch.save(Evil(), path)
    np.savez(photos.folder / "1.npz", latents=np.array([Evil()], object))
    assert photos.take("simpletuner", folder).taken == {"latent": 0}
    assert photos.take("sd-scripts").taken == {"latent": 0}
    assert not (tmp_path / "ran").exists()


def test_a_killed_import_goes_on_where_it_was(photos: Photos) -> None:
    for number in range(COUNT):
        write_sd(photos, number)

    def take_and_die() -> None:
        with SmartCache(photos.cache.store.root) as cache:
            photos.cache = cache
            with photos.open() as dataset:
                taken = dataset.take

                def take(*arguments: Any) -> str:  # noqa: ANN401
                    if len(dataset.outputs["latent"].set) == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return taken(*arguments)

                dataset.take = take  # type: ignore[assignment,method-assign]
                plan_import(dataset, "sd-scripts", photos.folder).execute()

    assert was_killed(in_child(take_and_die))
    done = photos.take("sd-scripts")
    assert (done.taken, done.present) == ({"latent": COUNT - 1}, 1)
    assert photos.take("sd-scripts").present == COUNT


def test_a_plan_takes_nothing(photos: Photos) -> None:
    write_sd(photos, 0)
    with photos.open() as dataset:
        plan = plan_import(dataset, "sd-scripts", photos.folder)
        assert len(plan.outputs["latent"]) == 1
        assert str(plan) == "1 latent to take"
        assert len(dataset.outputs["latent"].set) == 0


def test_an_image_that_is_edited_after_the_plan_keeps_its_file_out(photos: Photos) -> None:
    write_sd(photos, 0)
    with photos.open() as dataset:
        plan = plan_import(dataset, "sd-scripts", photos.folder)
        Image.new("RGB", (64, 48), "white").save(photos.folder / "0.png")
        done = plan.execute()
    assert done.taken == {"latent": 0}
    assert "changed" in done.skipped[0].reason


@pytest.mark.parametrize(("options", "match"), [
    ({"trainer": "kohya"}, "not a trainer"), ({"latent": "latents"}, "no output"),
    ({"latent": None, "text": "latent"}, "reads file"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    photos: Photos, options: dict[str, Any], match: str
) -> None:
    with photos.open() as dataset, pytest.raises(ConfigError, match=match):
        plan_import(dataset, options.pop("trainer", "sd-scripts"), photos.folder, **options)
    with photos.open() as dataset, pytest.raises(DatasetError, match="no folder"):
        plan_import(dataset, "sd-scripts", photos.folder / "nowhere")


# giving back

Same = Callable[[Path, Path], None]


def same_npz(one: Path, two: Path) -> None:
    with np.load(one) as old, np.load(two) as new:
        assert sorted(old.files) == sorted(new.files)
        for name in old.files:
            assert old[name].dtype == new[name].dtype
            assert np.array_equal(old[name], new[name])


def same_safetensors(one: Path, two: Path) -> None:
    from safetensors import safe_open

    with safe_open(one, "pt") as old, safe_open(two, "pt") as new:
        assert old.metadata() == new.metadata()
        assert set(old.keys()) == set(new.keys())
        for name in old.keys():  # noqa: SIM118 - not a dict
            assert old.get_tensor(name).dtype == new.get_tensor(name).dtype
            assert torch.equal(old.get_tensor(name), new.get_tensor(name))


@pytest.mark.parametrize(
    ("trainer", "same"), [("sd-scripts", same_npz), ("musubi", same_safetensors)]
)
def test_what_was_imported_is_exported_as_it_was(
    photos: Photos, tmp_path: Path, trainer: Target, same: Same
) -> None:
    folder = write_all(photos, trainer)
    if trainer == "sd-scripts":
        path = photos.folder / "1_0048x0064_sdxl.npz"
        with np.load(path) as npz:
            flipped = {"latents_flipped_8x6": npz["latents_8x6"] + 1}
            np.savez(path, **npz, **flipped)
    text = "text" if trainer == "musubi" else None
    photos.take(trainer, folder, text=text)
    with photos.open(text=text is not None) as dataset:
        assert len(export_files(dataset, trainer, tmp_path / "none", dry_run=True).files) > 0
        assert not (tmp_path / "none").exists()
        done = export_files(dataset, trainer, tmp_path / "out")
        again = export_files(dataset, trainer, tmp_path / "out")
    suffix = ".npz" if trainer == "sd-scripts" else ".safetensors"
    old = sorted(path for path in folder.iterdir() if path.suffix == suffix)
    assert sorted(path.name for path in done.files) == [path.name for path in old]
    for path in old:
        same(path, tmp_path / "out" / path.name)
    assert not again.files
    assert {each.reason for each in again.skipped} == {"there is such a file already"}


def test_what_was_encoded_here_is_not_exported_as_a_trainers(
    photos: Photos, tmp_path: Path
) -> None:
    write_sd(photos, 0)
    photos.take("sd-scripts")
    photos.values()
    with photos.open() as dataset:
        done = export_files(dataset, "sd-scripts", tmp_path / "out")
        assert len(done.files) == 1
        assert {each.reason for each in done.skipped} == {"it was not imported from sd-scripts"}
        with pytest.raises(ConfigError):
            export_files(dataset, "ai-toolkit", tmp_path / "out")  # type: ignore[arg-type]
