"""Equal content has equal digests, whatever the place; and it is that which the libraries load."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.pretrained.content import Content, NotComparableError, canonical, content_of
from smartcache.store.store import Store
from tests.hub_server.pipelines import SHARED_WEIGHTS, Models

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, 0.1])
    | st.sampled_from(["", "a", "none", "true", "1", "[1]", '"', "\ud800"])
    | st.sampled_from([b"", b"a"])
)
KEYS = st.sampled_from(["a", "b", "1", 1, True, None])


def nested(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.lists(inner, max_size=2)
    plain = st.frozensets(st.integers(0, 1) | st.booleans(), max_size=2)
    return lists | lists.map(tuple) | st.dictionaries(KEYS, inner, max_size=2) | plain.map(set)


VALUES = st.recursive(LEAVES, nested, max_leaves=5)


def are_equal(one: object, other: object) -> bool:
    """Equal with their types, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict | set) and isinstance(other, dict | set):
        mine = [(key, one[key] if isinstance(one, dict) else None) for key in one]
        others = [(key, other[key] if isinstance(other, dict) else None) for key in other]
        return len(mine) == len(others) and all(
            any(are_equal(pair, each) for each in others) for pair in mine
        )
    return one == other


class TestCanonical:
    @given(VALUES, VALUES)
    def test_texts_are_equal_if_and_only_if_values_are(self, one: object, other: object) -> None:
        assert (canonical(one) == canonical(other)) == are_equal(one, other)

    @given(st.dictionaries(st.text(max_size=3), VALUES, max_size=5), st.randoms())
    def test_the_order_does_not_count(self, value: dict[str, object], random: object) -> None:
        pairs = list(value.items())
        random.shuffle(pairs)  # type: ignore[attr-defined]
        assert canonical(dict(pairs)) == canonical(value)

    @pytest.mark.parametrize(
        ("one", "other"),
        [(True, 1), (1, 1.0), ((1, 2), [1, 2]), ("1", 1), (None, "none"), ([[]], [()]), ({}, [])],
    )
    def test_types_count(self, one: object, other: object) -> None:
        assert canonical(one) != canonical(other)

    def test_what_has_no_form_of_its_own_is_refused(self) -> None:
        import torch

        loop: list[object] = []
        loop.append(loop)
        things = (object(), print, lambda: None, loop, torch.nn.Linear(1, 1), torch.zeros(1))
        for each in things:
            with pytest.raises(NotComparableError):
                canonical({"x": [each]})

    def test_dtypes_devices_and_paths_have_one(self, tmp_path: Path) -> None:
        import torch

        values = [torch.float16, "torch.float16", torch.device("cpu"), "cpu", tmp_path]
        assert len({canonical(each) for each in (*values, str(tmp_path))}) == 6

    @pytest.mark.filterwarnings("ignore:`QuantoConfig` is deprecated:FutureWarning")
    def test_settings_of_quantisation_are_compared_by_what_they_say(self) -> None:
        pytest.importorskip("diffusers")
        from diffusers import PipelineQuantizationConfig, QuantoConfig
        from transformers import QuantoConfig as OfTransformers

        settings = [
            QuantoConfig(weights_dtype="int8"),
            QuantoConfig(weights_dtype="int4"),
            OfTransformers(weights="int8"),
            PipelineQuantizationConfig(quant_mapping={"vae": QuantoConfig(weights_dtype="int8")}),
            PipelineQuantizationConfig(quant_mapping={"vae": QuantoConfig(weights_dtype="int4")}),
        ]
        assert len({canonical(each) for each in settings}) == 5
        assert canonical(QuantoConfig(weights_dtype="int8")) == canonical(settings[0])


def content(folder: Path, store: Store | None, class_name: str = "AutoencoderKL") -> Content:
    found = content_of(folder, class_name, variant=None, use_safetensors=None, store=store)
    assert found is not None
    return found


@pytest.fixture
def vae(models: Models, tmp_path: Path) -> Path:
    return shutil.copytree(models.first / "vae", tmp_path / "vae")


def edit(path: Path, **fields: object) -> None:
    said = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**said, **fields}, indent=1), "utf-8")


class TestContent:
    def test_equal_components_of_two_pipelines_are_the_same(
        self, models: Models, store: Store
    ) -> None:
        for path in SHARED_WEIGHTS:
            name = path.split("/", maxsplit=1)[0]
            first, second = (
                content(models.first / name, store),
                content(models.second / name, store),
            )
            assert first == second
            assert first.digest == second.digest
        unets = [content(each / "unet", store).digest for each in (models.first, models.second)]
        assert unets[0] != unets[1]

    def test_without_a_store_it_is_the_same(self, vae: Path, store: Store) -> None:
        assert content(vae, None) == content(vae, store)

    def test_the_digest_is_one_for_all_machines(self) -> None:
        made = Content("A", "00", (("model.safetensors", "11"),))
        assert made.digest == "c20f0ddfa652a17256eb2291788de67434dfb4c327a0c0580a29533bb959bb82"

    def test_where_it_came_from_does_not_count(self, vae: Path, store: Store) -> None:
        before = content(vae, store)
        edit(vae / "config.json", _name_or_path="elsewhere", _diffusers_version="9", _commit_hash=1)
        edit(vae / "config.json", transformers_version="9")
        assert content(vae, store) == before

    def test_nor_in_a_config_inside_of_it(self, vae: Path, store: Store) -> None:
        edit(vae / "config.json", text_config={"_name_or_path": "a", "size": 1})
        before = content(vae, store)
        edit(vae / "config.json", text_config={"_name_or_path": "b", "size": 1})
        assert content(vae, store) == before
        edit(vae / "config.json", text_config={"_name_or_path": "b", "size": 2})
        assert content(vae, store) != before

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_configs_count(self, vae: Path, store: Store, name: str) -> None:
        before = content(vae, store)
        if not (vae / name).exists():
            (vae / name).write_text("{}", "utf-8")
        edit(vae / name, scaling_factor=0.5)
        assert content(vae, store).digest != before.digest

    def test_the_class_counts(self, vae: Path, store: Store) -> None:
        assert content(vae, store, "Other").digest != content(vae, store).digest

    def test_links_are_followed(self, vae: Path, store: Store, tmp_path: Path) -> None:
        before = content(vae, store)
        (vae / "diffusion_pytorch_model.safetensors").rename(tmp_path / "blob")
        (vae / "diffusion_pytorch_model.safetensors").symlink_to(tmp_path / "blob")
        assert content(vae, store) == before

    @pytest.mark.parametrize("name", ["vae.py", "adapter_config.json", "adapter_model.safetensors"])
    def test_what_brings_code_or_adapters_is_not_identified(
        self, vae: Path, store: Store, name: str
    ) -> None:
        (vae / name).write_text("{}", "utf-8")
        assert content_of(vae, "A", variant=None, use_safetensors=None, store=store) is None

    @pytest.mark.parametrize(
        "damage",
        [
            lambda folder: (folder / "config.json").write_text("[]", "utf-8"),
            lambda folder: (folder / "config.json").write_text("{", "utf-8"),
            lambda folder: (folder / "config.json").unlink(),
            lambda folder: (folder / "diffusion_pytorch_model.safetensors").unlink(),
            shutil.rmtree,
        ],
    )
    def test_what_cannot_be_loaded_is_not_identified(
        self, vae: Path, store: Store, damage: object
    ) -> None:
        damage(vae)  # type: ignore[operator]
        assert content_of(vae, "A", variant=None, use_safetensors=None, store=store) is None

    def test_a_config_that_names_its_weights_makes_all_of_them_count(
        self, vae: Path, store: Store
    ) -> None:
        shutil.copyfile(vae / "diffusion_pytorch_model.safetensors", vae / "x.safetensors")
        edit(vae / "config.json", transformers_weights="x.safetensors")
        found = content(vae, store)
        assert not found.is_plain
        assert len(found.weights) == 2


KINDS = ("whole", "whole.fp16", "shards", "shards.fp16", "bin", "bin.fp16")
"""The files of a model that can be there, each kind with another value in all its weights."""
CHOICES = [
    (kinds, variant, use_safetensors)
    for count in (1, 2, 6)
    for kinds in itertools.combinations(KINDS, count)
    for variant in (None, "fp16")
    for use_safetensors in (None, True, False)
]


class Library:
    """A tiny model of one library, and its weights with any value."""

    def __init__(self, name: str, folder: Path) -> None:
        import diffusers
        import transformers

        self.folder = folder
        if name == "diffusers":
            self.cls: type = diffusers.AutoencoderTiny
            channels = {"encoder_block_out_channels": (2,), "decoder_block_out_channels": (2,)}
            blocks = {"num_encoder_blocks": (1,), "num_decoder_blocks": (1,)}
            self.model = diffusers.AutoencoderTiny(**channels, **blocks)
            self.stems = ("diffusion_pytorch_model", "diffusion_pytorch_model")
        else:
            self.cls = transformers.BertModel
            tiny = transformers.BertConfig(
                vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
                intermediate_size=4, max_position_embeddings=4,
            )  # fmt: skip
            self.model = transformers.BertModel(tiny)
            self.stems = ("model", "pytorch_model")
        self.model.save_pretrained(folder / "made")

    def write(self, kinds: tuple[str, ...]) -> Path:
        """Make a folder with these kinds of files; the value in each is its number in KINDS."""
        folder = self.folder / "-".join(kinds)
        if not folder.exists():
            folder.mkdir()
            shutil.copyfile(self.folder / "made" / "config.json", folder / "config.json")
            for kind in kinds:
                self._write(folder, kind, float(KINDS.index(kind) + 1))
        return folder

    def _write(self, folder: Path, kind: str, value: float) -> None:
        import torch
        from safetensors.torch import save_file

        weights = {
            name: torch.full_like(each, value) if each.is_floating_point() else each
            for name, each in self.model.state_dict().items()
        }
        kind, _, variant = kind.partition(".")
        dot = f".{variant}" if variant else ""
        if kind == "bin":
            torch.save(weights, folder / f"{self.stems[1]}{dot}.bin")
        elif kind == "whole":
            save_file(weights, folder / f"{self.stems[0]}{dot}.safetensors", {"format": "pt"})
        else:
            names = sorted(weights)
            map_of = {}
            for number, part in enumerate((names[:2], names[2:]), start=1):
                file = f"{self.stems[0]}{dot}-0000{number}-of-00002.safetensors"
                save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
                map_of.update(dict.fromkeys(part, file))
            index = {"metadata": {"total_size": 1}, "weight_map": map_of}
            name = f"{self.stems[0]}.safetensors.index{dot}.json"
            (folder / name).write_text(json.dumps(index), "utf-8")

    def loaded(self, folder: Path, variant: str | None, use_safetensors: bool | None) -> str | None:
        """The kind of files that the library takes; None if it takes none."""
        try:
            model = self.cls.from_pretrained(  # type: ignore[attr-defined]
                folder, variant=variant, use_safetensors=use_safetensors
            )
        except OSError:
            return None
        values = {float(each.detach().flatten()[0]) for each in model.parameters()}
        assert len(values) == 1
        return KINDS[int(values.pop()) - 1]


@pytest.mark.parametrize("name", ["diffusers", "transformers"])
def test_the_weights_that_count_are_those_that_the_library_loads(
    name: str, tmp_path: Path, store: Store
) -> None:
    pytest.importorskip(name)
    library = Library(name, tmp_path)
    digests = {kind: set(files_of(library.write((kind,)), store)) for kind in KINDS}
    plain = 0
    for kinds, variant, use_safetensors in CHOICES:
        folder = library.write(kinds)
        found = content_of(
            folder, "A", variant=variant, use_safetensors=use_safetensors, store=store
        )
        if variant is not None and not any("." in kind for kind in kinds):
            variant = None  # noqa: PLW2901 - what a pipeline does for such a component
        loaded = library.loaded(folder, variant, use_safetensors)
        if loaded is None or found is None:
            assert loaded is None or "bin" not in loaded or use_safetensors is not True
            continue
        taken = {digest for _, digest in found.weights if digest in set().union(*digests.values())}
        assert digests[loaded] <= taken, (kinds, variant, use_safetensors)
        if found.is_plain:
            plain += 1
            assert digests[loaded] == taken, (kinds, variant, use_safetensors)
        else:
            assert taken == set().union(*(digests[kind] for kind in kinds))
    assert plain > 40


def files_of(folder: Path, store: Store) -> list[str]:
    names = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return [store.digest_of(path).digest for path in names]


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_a_variant_here_may_be_what_is_no_variant_there(
    tmp_path: Path, store: Store, kind: str
) -> None:
    pytest.importorskip("diffusers")
    library = Library("diffusers", tmp_path)
    folders = tmp_path / "plain", tmp_path / "variant"
    for folder, name in zip(folders, (kind, f"{kind}.fp16"), strict=True):
        folder.mkdir()
        shutil.copyfile(tmp_path / "made" / "config.json", folder / "config.json")
        library._write(folder, name, 1.0)  # noqa: SLF001 - of this module
    found = [
        content_of(folder, "A", variant=variant, use_safetensors=None, store=store)
        for folder, variant in zip(folders, (None, "fp16"), strict=True)
    ]
    assert found[0] == found[1]
    assert found[0] is not None
