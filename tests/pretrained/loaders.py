"""Loaders that people use, of many libraries, each with a tiny repo that it can load.

    row = ROWS["load_lora_weights"]
    row.make(models, folder)                  # what is in the repo
    hub.add_folder("org/lora", folder)
    pipeline = row.load("org/lora", here)

None of them is told of smartcache. A library that is not installed skips the test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

from tests.hub_server.pipelines import Models
from tests.hub_server.repos import RepoType
from tests.pretrained.scenarios import plainly

FILE = "model.safetensors"


class Here(NamedTuple):
    """Where a test is."""

    models: Models
    path: Path

    def local_dir(self, name: str) -> Path:
        return self.path / "local" / name


def make_bert(models: Models, folder: Path) -> None:
    shutil.copytree(models.language, folder, dirs_exist_ok=True)


class Row(NamedTuple):
    """A loader, and the repo it loads every weight of."""

    load: Callable[[str, Here], object]
    """Gives a model or a pipeline, the path of what was downloaded, or columns."""
    make: Callable[[Models, Path], object] = make_bert
    """Fills a folder with the files of the repo."""
    repo_type: RepoType = "model"


def make_reader(models: Models, folder: Path) -> None:
    from transformers import BertTokenizerFast

    make_bert(models, folder)
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat")
    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)


def make_pipeline(models: Models, folder: Path) -> None:
    shutil.copytree(models.first, folder, dirs_exist_ok=True)


def make_lora(models: Models, folder: Path) -> None:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    peft = pytest.importorskip("peft")
    unet = UNet2DConditionModel.from_pretrained(models.first / "unet")
    targets = ["to_k", "to_q", "to_v"]
    unet.add_adapter(peft.LoraConfig(r=64, target_modules=targets, init_lora_weights=False))
    layers = peft.get_peft_model_state_dict(unet)
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)


def load_lora(name: str, here: Here) -> object:
    pipeline = plainly(here.models.first)
    pipeline.load_lora_weights(name)
    return pipeline


def make_embedding(models: Models, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"<cat>": torch.randn(520, 32)}, folder / "learned_embeds.safetensors")


def load_embedding(name: str, here: Here) -> object:
    pipeline = plainly(here.models.first)
    pipeline.load_textual_inversion(name)
    return pipeline


def make_ip_adapter(models: Models, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=256, projection_dim=256, num_hidden_layers=1,
        num_attention_heads=4, image_size=32, patch_size=16,
    )  # fmt: skip
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "models" / "image_encoder")
    shapes = {
        "image_proj.proj.weight": (128, 256), "image_proj.proj.bias": (128,),
        "image_proj.norm.weight": (32,), "image_proj.norm.bias": (32,),
        "ip_adapter.1.to_k_ip.weight": (48, 32), "ip_adapter.1.to_v_ip.weight": (48, 32),
    }  # fmt: skip
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "models" / "ip-adapter.safetensors")


def load_ip_adapter(name: str, here: Here) -> object:
    pipeline = plainly(here.models.first)
    pipeline.load_ip_adapter(name, subfolder="models", weight_name="ip-adapter.safetensors")
    return pipeline


def make_adapter(models: Models, folder: Path) -> None:
    peft = pytest.importorskip("peft")
    make_bert(models, folder)
    config = peft.LoraConfig(r=256, target_modules=["query"], init_lora_weights=False)
    peft.get_peft_model(load_bert(str(folder)), config).save_pretrained(folder / "adapter")


def load_adapter(name: str, here: Here) -> object:
    peft = pytest.importorskip("peft")
    return peft.PeftModel.from_pretrained(load_bert(name), name, subfolder="adapter")


def load_bert(name: str, here: Here | None = None) -> Any:  # noqa: ANN401 - a BERT
    from transformers import AutoModel

    return AutoModel.from_pretrained(name)


def load_reader(name: str, here: Here) -> object:
    from transformers import pipeline

    return pipeline("feature-extraction", model=name).model


def make_sentences(models: Models, folder: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    make_reader(models, folder / "bert")
    model = sentence_transformers.SentenceTransformer(str(folder / "bert"))
    model.save(str(folder), create_model_card=False)
    shutil.rmtree(folder / "bert")


def load_sentences(name: str, here: Here) -> object:
    return pytest.importorskip("sentence_transformers").SentenceTransformer(name)


def make_timm(models: Models, folder: Path) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", num_classes=4)
    timm.models.save_for_hf(model, folder, safe_serialization=True)


def load_timm(name: str, here: Here) -> object:
    return pytest.importorskip("timm").create_model(f"hf-hub:{name}", pretrained=True)


def make_open_clip(models: Models, folder: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    from safetensors.torch import save_file

    image = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    text = {"context_length": 16, "vocab_size": 128, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 32, "vision_cfg": image, "text_cfg": text}
    save_file(open_clip.CLIP(**config).state_dict(), folder / "open_clip_model.safetensors")
    about = {"model_cfg": config, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(about), "utf-8")


def load_open_clip(name: str, here: Here) -> object:
    return pytest.importorskip("open_clip").create_model(f"hf-hub:{name}")


def make_table(models: Models, folder: Path) -> None:
    rows = {"number": list(range(50_000))}
    pytest.importorskip("datasets").Dataset.from_dict(rows).to_parquet(folder / "train.parquet")


def load_table(name: str, here: Here) -> object:
    datasets = pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_ENDPOINT", constants.ENDPOINT)
        return datasets.load_dataset(name, split="train", cache_dir=here.path / "tables").to_dict()


ROWS = {
    "load_lora_weights": Row(load_lora, make_lora),
    "load_textual_inversion": Row(load_embedding, make_embedding),
    "load_ip_adapter": Row(load_ip_adapter, make_ip_adapter),
    "DiffusionPipeline.from_pretrained": Row(lambda name, here: plainly(name), make_pipeline),
    "PeftModel.from_pretrained": Row(load_adapter, make_adapter),
    "AutoModel.from_pretrained": Row(load_bert),
    "transformers.pipeline": Row(load_reader, make_reader),
    "datasets.load_dataset": Row(load_table, make_table, "dataset"),
    "SentenceTransformer": Row(load_sentences, make_sentences),
    "timm.create_model": Row(load_timm, make_timm),
    "open_clip.create_model": Row(load_open_clip, make_open_clip),
    "huggingface_hub.hf_hub_download": Row(
        lambda name, here: huggingface_hub.hf_hub_download(name, FILE)
    ),
    "huggingface_hub.snapshot_download": Row(
        lambda name, here: huggingface_hub.snapshot_download(name)
    ),
    "hf_hub_download, bound before": Row(lambda name, here: hf_hub_download(name, FILE)),
    "snapshot_download, bound before": Row(lambda name, here: snapshot_download(name)),
    "HfApi.hf_hub_download": Row(lambda name, here: HfApi().hf_hub_download(name, FILE)),
    "HfApi.snapshot_download": Row(lambda name, here: HfApi().snapshot_download(name)),
    "hf_hub_download to another cache": Row(
        lambda name, here: hf_hub_download(name, FILE, cache_dir=here.path / "cache")
    ),
    "snapshot_download to another cache": Row(
        lambda name, here: snapshot_download(name, cache_dir=here.path / "cache")
    ),
    "hf_hub_download to a folder": Row(
        lambda name, here: hf_hub_download(name, FILE, local_dir=here.local_dir(name))
    ),
    "snapshot_download to a folder": Row(
        lambda name, here: snapshot_download(name, local_dir=here.local_dir(name))
    ),
}
