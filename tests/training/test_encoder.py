"""Encoders: keys of outputs, buckets, items, what is kept of what they return, dependencies."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from PIL import Image

from smartcache.errors import ConfigError, DatasetError, EncoderError
from smartcache.training import Buckets, Encoder, Item, Sources
from smartcache.training.dataset import file_digest
from smartcache.training.encoder import (
    SIDE,
    SINGLE,
    ChangedError,
    ItemError,
    Keys,
    as_kept,
    nan_in,
    pad,
    split,
)
from smartcache.training.look import Listing, stat_key, value_digest
from smartcache.training.table import SourceTable
from tests.training.conftest import Counting, Looker, Photos

ROOT = Path(__file__).resolve().parent.parent.parent
DIGESTS = st.sampled_from([bytes(32), b"\1" * 32, b"\1" * 31 + b"\2", b"\2" * 32])
SIDES = st.integers(1, 5000)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SourceTable]:
    opened = SourceTable(tmp_path_factory.mktemp("table") / "index.sqlite3", wal=True)
    yield opened
    opened.close()


def listing_of(
    table: SourceTable, reads: dict[str, list[bytes]], sizes: Sequence[tuple[int, int]] = ()
) -> Listing:
    """Sources by the digests of what is read of them."""
    count = len(next(iter(reads.values())))
    columns = {
        name: np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32)
        for name, found in reads.items()
    }
    given_sizes = np.array(sizes or [(0, 0)] * count, np.int64).reshape(-1, 2)
    return Listing(table, (), names=[b""] * count, reads=columns, size=given_sizes)


def keys_of(
    listing: Listing, *reads: str, buckets: str | None = None, variations: int = 1
) -> list[bytes]:
    keys = Keys.of(listing, {"reads": reads, "buckets": buckets, "variations": variations})
    return [keys.data[at : at + 32] for at in range(0, len(keys.data) - 32, 32)]


class TestKeys:
    @given(
        sources=st.lists(
            st.tuples(DIGESTS, DIGESTS, st.tuples(SIDES, SIDES)), min_size=1, max_size=6
        ),
        variations=st.integers(1, 4),
        buckets=st.sampled_from([None, "area:512 step:64", "64x64", "64x128 128x64"]),
    )
    def test_keys_are_equal_where_reads_bucket_and_variation_are(
        self,
        table: SourceTable,
        sources: list[tuple[bytes, bytes, tuple[int, int]]],
        variations: int,
        buckets: str | None,
    ) -> None:
        one, two, sizes = (list(column) for column in zip(*sources, strict=True))
        listing = listing_of(table, {"a": one, "b": two}, sizes)
        keys = keys_of(listing, "a", "b", buckets=buckets, variations=variations)
        of = Buckets(buckets).of(listing.size).tolist() if buckets else [None] * len(sources)
        meant = [
            (source[:2], str(bucket), variation)
            for source, bucket in zip(sources, of, strict=True)
            for variation in range(variations)
        ]
        assert len(keys) == len(meant)
        assert len(set(keys)) == len(set(meant))
        assert len(set(zip(keys, meant, strict=True))) == len(set(meant))

    @given(st.lists(st.one_of(st.none(), st.text(max_size=3), st.integers(0, 2)), max_size=5))
    @example([None, "", " ", "0", 0, "\0000", "\xff0"])
    def test_values_of_rows_have_equal_keys_where_they_are_equal(
        self, table: SourceTable, values: list[object]
    ) -> None:
        digests = [bytes(32) if each is None else value_digest(each, "a") for each in values]
        keys = keys_of(listing_of(table, {"a": [bytes(32), *digests]}), "a")
        assert len(set(keys)) == len({json.dumps(each) for each in (None, *values)})

    def test_swapped_reads_differ(self, table: SourceTable) -> None:
        one, two = b"\1" * 32, b"\2" * 32
        listing = listing_of(table, {"a": [one, two], "b": [two, one]})
        assert len(set(keys_of(listing, "a", "b"))) == 2
        assert keys_of(listing, "a", "b") == keys_of(listing, "b", "a")[::-1]

    def test_what_another_output_reads_does_not_matter(self, table: SourceTable) -> None:
        listing = listing_of(table, {"a": [b"\1" * 32] * 2, "b": [b"\1" * 32, b"\2" * 32]})
        assert len(set(keys_of(listing, "a"))) == 1

    def test_nothing_differs_from_an_empty_text(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png", "")
        photos.add("b.png", like="a.png")
        listing = looked(Sources(photos.path, sidecars={"caption": ".txt"}), "caption")
        assert len(set(keys_of(listing, "file"))) == 1
        empty, absent = keys_of(listing, "caption")
        assert empty != absent
        spec = {"reads": ("caption",), "buckets": None, "variations": 1}
        assert Keys.of_empty(spec) == empty

    def test_more_variations_keep_the_keys_of_the_first(self, table: SourceTable) -> None:
        listing = listing_of(table, {"a": [b"\1" * 32, b"\2" * 32]})
        few, many = keys_of(listing, "a", variations=2), keys_of(listing, "a", variations=5)
        assert many[0:2] + many[5:7] == few

    def test_many_keys_are_those_of_the_few(self, table: SourceTable) -> None:
        """They are computed in slices."""
        count = (1 << 16) + 3
        digests = [number.to_bytes(32, "little") for number in range(count)]
        keys = keys_of(listing_of(table, {"a": digests}), "a", variations=2)
        assert len(set(keys)) == 2 * count
        last = listing_of(table, {"a": digests[-5:]})
        assert keys[-10:] == keys_of(last, "a", variations=2)

    def test_there_may_be_no_items(self, looked: Looker) -> None:
        assert keys_of(looked(Sources([])), "file", buckets="64x64", variations=3) == []


class TestBuckets:
    @given(
        area=st.integers(1, 3000),
        step=st.integers(1, 256),
        aspect=st.sampled_from([1.0, 1.5, 2.0, 4.0, 10.0]),
    )
    def test_sides_are_multiples_and_the_area_is_not_exceeded(
        self, area: int, step: int, aspect: float
    ) -> None:
        assume(step <= area)
        try:
            sizes = Buckets(f"area:{area} step:{step} aspect:{aspect}").sizes
        except ConfigError:
            assume(False)
        assert (sizes % step == 0).all()
        assert (sizes > 0).all()
        assert (sizes.prod(axis=1) <= area * area).all()
        assert (sizes.max(axis=1) <= aspect * sizes.min(axis=1)).all()
        aspects = sizes[:, 0] / sizes[:, 1]
        assert (np.diff(aspects) > 0).all()

    @given(
        sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=8),
        images=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=8),
    )
    def test_an_image_gets_the_nearest_proportions(
        self, sizes: list[tuple[int, int]], images: list[tuple[int, int]]
    ) -> None:
        found = Buckets(sizes).of(np.array(images, np.int64))
        for (width, height), bucket in zip(images, found.tolist(), strict=True):
            aspect = math.log(width / height)
            best = min(abs(math.log(w / h) - aspect) for w, h in sizes)
            assert tuple(bucket) in sizes
            assert abs(math.log(bucket[0] / bucket[1]) - aspect) <= best + 1e-9

    def test_the_usual_ones(self) -> None:
        buckets = Buckets("area:1024 step:64")
        images = np.array([(1000, 1000), (4000, 3000), (3000, 4000), (10000, 100), (0, 0)])
        expected = [[1024, 1024], [1152, 896], [896, 1152], [2048, 512], [0, 0]]
        assert buckets.of(images).tolist() == expected

    def test_a_list_and_its_text_are_the_same(self) -> None:
        made = Buckets([(64, 128), (128, 64)])
        assert made.text == "64x128 128x64"
        assert Buckets(made.text).sizes.tolist() == made.sizes.tolist()

    def test_of_equal_proportions_the_largest_is_taken(self) -> None:
        assert Buckets("512x512 1024x1024 256x256").sizes.tolist() == [[1024, 1024]]

    @pytest.mark.parametrize(
        "given_buckets",
        ["", "area", "area:", "area:x", "step:64", "area:0", "area:-5", "area:64 step:128",
         "area:64 step:0", "area:64 aspect:0.5", "area:64 aspect:nan", "area:64 aspect:inf",
         "area:64 aspect:1e300", "area:64 more:1", "area:99999999", "64x", "64x64x3", "0x64",
         "64x-64", "64 x 64", "64x64 area:64", "axb", f"{1 << 70}x1", [], [(1,)], [("a", 2)],
         [(1.5, 2)], 5, [5]],
    )  # fmt: skip
    def test_what_are_no_buckets_is_refused(self, given_buckets: Any) -> None:  # noqa: ANN401
        with pytest.raises(ConfigError, match="are no buckets") as caught:
            Buckets(given_buckets)
        assert "area:1024" in str(caught.value.hint)


def items_of(
    looked: Looker, sources: Sources, *reads: str, variations: int = 1, declared: bool = True
) -> list[Item]:
    listing = looked(sources, *(read for read in reads if read != "file"))
    keys = keys_of(listing, *reads, variations=variations)
    return [
        Item(
            listing, at // variations, bucket=None, variation=at % variations, key=key, used=set(),
            reads=reads if declared else None,
        )
        for at, key in enumerate(keys)
    ]  # fmt: skip


class TestItems:
    SIDECARS = {"caption": ".txt", "mask": "-mask.png"}  # noqa: RUF012

    def items(self, looked: Looker, photos: Photos, *reads: str) -> list[Item]:
        wanted = reads or ("file", "caption", "mask")
        return items_of(looked, Sources(photos.path, sidecars=self.SIDECARS), *wanted)

    def test_an_item_is_its_source(self, looked: Looker, photos: Photos) -> None:
        path = photos.add("sub/a.png", "words", size=(30, 20))
        mask = photos.add("sub/a-mask.png")
        (item,) = self.items(looked, photos)
        assert (item.name, item.path, item.size) == ("sub/a.png", path, (30, 20))
        assert item["file"] == path
        assert item["caption"] == "words"
        assert item["mask"] == mask
        assert item.bytes() == path.read_bytes()
        assert item.bytes("mask") == mask.read_bytes()
        assert item.bytes("caption") == b"words"
        assert item.image().size == (30, 20)
        assert item.image("mask").size == (8, 8)
        assert repr(item) == "<Item sub/a.png>"

    def test_what_a_source_does_not_have_is_absent(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        (item,) = self.items(looked, photos)
        assert "mask" not in item
        assert "file" in item
        assert item.get("mask") is None
        assert item.get("caption", "nothing") == "nothing"
        for ask in (item.__getitem__, item.bytes, item.image):
            with pytest.raises(KeyError, match="it has no") as caught:
                ask("mask")
            assert isinstance(caught.value, ItemError)
            assert caught.value.items == ("a.png",)

    def test_an_empty_text_is_there(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png", "")
        (item,) = self.items(looked, photos)
        assert "caption" in item
        assert item["caption"] == ""
        assert item.get("caption", "default") == ""

    def test_what_is_not_in_the_key_cannot_be_read(self, looked: Looker, photos: Photos) -> None:
        """Else an edited image would leave an old output of it."""
        photos.add("a.png", "words")
        listing = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption", "mask")
        item = Item(
            listing, 0, bucket=None, variation=0, key=bytes(32), used=set(), reads=("caption",)
        )
        assert item["caption"] == "words"
        assert item.path == photos.path / "a.png"
        for ask in (item.__getitem__, item.get, item.bytes, item.image, item.__contains__):
            for name in ("file", "mask", "nonsense"):
                with pytest.raises(ConfigError, match="does not read") as caught:
                    ask(name)
                assert "caption" in str(caught.value.hint)

    def test_a_row_has_values_and_no_file(self, looked: Looker) -> None:
        sources = Sources.table([{"caption": "words", "n": [1, 2], "name": "mine"}])
        (item,) = items_of(looked, sources, "caption", "n", "file")
        assert (item["caption"], item["n"], item.name, item.size) == ("words", [1, 2], "mine", None)
        assert item.metadata == {"caption": "words", "n": [1, 2], "name": "mine"}
        for ask in (lambda: item.path, item.bytes, item.image, lambda: item.bytes("caption")):
            with pytest.raises(KeyError, match="it has no"):
                ask()

    @pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
    def test_an_image_stands_upright_and_its_size_agrees(
        self, looked: Looker, photos: Photos, suffix: str
    ) -> None:
        exif = Image.Exif()
        exif[0x112] = 6
        image = Image.new("RGB", (48, 24), "red")
        image.paste("blue", (0, 0, 24, 24))
        image.save(photos.path / f"a{suffix}", exif=exif)
        (item,) = self.items(looked, photos)
        shown = item.image().convert("RGB")
        assert shown.size == item.size == (24, 48)
        assert shown.getpixel((12, 6))[2] > 200  # type: ignore[index]
        assert shown.getpixel((12, 42))[0] > 200  # type: ignore[index]

    def test_what_is_no_image_is_an_error_of_the_item(self, looked: Looker, photos: Photos) -> None:
        (photos.path / "a.png").write_bytes(b"no image")
        (item,) = self.items(looked, photos)
        with pytest.raises(ItemError, match=r"^unreadable: not an image$") as caught:
            item.image()
        assert not isinstance(caught.value, ChangedError)
        assert item.is_guilty(caught.value)

    def test_a_truncated_image_is_an_error_of_the_item(
        self, looked: Looker, photos: Photos
    ) -> None:
        path = photos.add("a.png", size=(64, 64))
        path.write_bytes(path.read_bytes()[:-40])
        (item,) = self.items(looked, photos)
        with pytest.raises(ItemError, match=r"^unreadable: ") as caught:
            item.image()
        assert not isinstance(caught.value, ChangedError)

    @pytest.mark.parametrize("is_gone", [True, False])
    def test_a_file_that_is_another_by_now_is_not_read(
        self, looked: Looker, photos: Photos, is_gone: bool
    ) -> None:
        """It is no fault of its content, which may come back."""
        path = photos.add("a.png")
        (item,) = self.items(looked, photos)
        assert not item.has_changed()
        if is_gone:
            path.unlink()
        else:
            photos.add("a.png", like="b.png")
        for ask in (item.bytes, item.image):
            with pytest.raises(ChangedError):
                ask()
        assert item.has_changed()

    def test_an_edit_that_no_stat_key_tells_is_noticed(
        self, looked: Looker, photos: Photos
    ) -> None:
        """One within the same tick of the clock as the last."""
        path = photos.add("a.png", size=(16, 16))
        (item,) = self.items(looked, photos)
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        table = looked.table
        (folder,) = table.folders().values()
        known = table.file(folder, b"a.png")
        with table.write():  # as if no time had passed
            table.add_files([(folder, b"a.png", stat_key(path) + known[32:])])
        assert not item.has_changed()
        for ask in (item.bytes, item.image):
            with pytest.raises(ChangedError):
                ask()

    def test_a_file_that_the_encoder_does_not_read_may_change(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png", "words")
        photos.add("a-mask.png")
        (item,) = self.items(looked, photos, "file", "caption")
        (photos.path / "a-mask.png").unlink()
        (photos.path / "a.txt").write_text("other words")
        assert not item.has_changed()
        assert item["caption"] == "words"

    def test_no_memory_is_no_fault_of_the_item(
        self, looked: Looker, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        photos.add("a.png")
        (item,) = self.items(looked, photos)

        def load(self: Image.Image) -> None:
            raise MemoryError

        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
        with pytest.raises(MemoryError):
            item.image()

    def test_what_the_encoder_asks_for_is_read_ahead(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png", "words")
        listing = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption", "mask")
        used: set[tuple[str, str]] = set()

        def make() -> Item:
            return Item(listing, 0, bucket=None, variation=0, key=bytes(32), used=used)

        first = make()
        before = first.image().tobytes()
        assert first["caption"] == "words"
        ahead = make()
        ahead.read_ahead()
        (photos.path / "a.png").unlink()
        assert ahead.fault is None
        assert ahead.image().tobytes() == before
        late = make()
        late.read_ahead()
        assert isinstance(late.fault, ChangedError)

    def test_random_numbers_depend_on_content_and_variation_alone(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        photos.add("deep/b.png", like="a.png")
        photos.add("c.png")
        items = items_of(looked, Sources(photos.path), "file", variations=3)
        drawn = [(item.seed, item.rng.random(), item.rng.random()) for item in items]
        assert drawn[0:3] == drawn[6:9]
        assert len(set(drawn)) == 6
        assert len({number for _, *some in drawn for number in some}) == 12
        assert all(0 <= seed < 1 << 63 for seed, *_ in drawn)

    def test_an_item_that_is_encoded_again_gets_the_same_numbers(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        (item,) = self.items(looked, photos)
        first = [item.rng.random() for _ in range(3)]
        item.crop = (0, 0, 1, 1)
        item.rewind()
        assert [item.rng.random() for _ in range(3)] == first
        assert item.crop is None

    def test_seeds_are_the_same_in_every_process(self, photos: Photos, tmp_path: Path) -> None:
        (photos.path / "a.txt").write_text("words")
        code = """
import sys
from pathlib import Path
from smartcache.training import Sources, Item
from smartcache.training.encoder import Keys
from smartcache.training.look import look
from smartcache.training.table import SourceTable
table = SourceTable(Path(sys.argv[2]), wal=True)
listing = look(table, Sources(sys.argv[1], suffixes=".txt"), ["file"])
key = Keys.of(listing, {"reads": ["file"], "buckets": None, "variations": 1}).data
item = Item(listing, 0, bucket=None, variation=0, key=key, used=set())
print(item.seed, item.rng.random())
"""
        told = {
            subprocess.run(
                [sys.executable, "-c", code, photos.path, tmp_path / f"{seed}.sqlite3"],
                env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, check=True,
                capture_output=True, text=True,
            ).stdout
            for seed in ("1", "2")
        }  # fmt: skip
        assert told == {"4873177664164655309 0.8505132114121693\n"}

    def test_errors_of_items_survive_pickling(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        (item,) = self.items(looked, photos)
        with pytest.raises(ItemError) as caught:
            item.bytes("mask")
        copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
        assert (type(copy), str(copy), copy.items) == (
            type(caught.value), str(caught.value), ("a.png",)
        )  # fmt: skip
        assert item.is_guilty(copy)


class TestSplit:
    def test_rows_of_a_tensor_belong_to_items(self) -> None:
        import torch

        made = split(torch.arange(6).reshape(3, 2).requires_grad_(False), 3, "latent")
        assert [row.tolist() for row in made] == [[0, 1], [2, 3], [4, 5]]  # type: ignore[attr-defined]

    def test_gradients_are_let_go(self) -> None:
        import torch

        (row,) = split(torch.ones(1, 2, requires_grad=True), 1, "latent")
        assert not row.requires_grad  # type: ignore[attr-defined]

    def test_a_row_of_numbers_is_no_plain_number(self) -> None:
        """Else they would come back in lists."""
        (row, _) = split(np.array([1.0, 2.0]), 2, "score")
        assert isinstance(row, np.ndarray)
        assert row.shape == ()

    def test_dicts_are_cut_by_items(self) -> None:
        made = split({"a": np.arange(4).reshape(2, 2), "b": ["x", "y"]}, 2, "text")
        assert [{"a": row["a"].tolist(), "b": row["b"]} for row in made] == [  # type: ignore[index]
            {"a": [0, 1], "b": "x"}, {"a": [2, 3], "b": "y"},
        ]  # fmt: skip

    def test_a_list_has_a_value_per_item_and_may_have_failures(self) -> None:
        error = ValueError("no")
        assert split([1, error], 2, "text") == [1, error]
        assert split(({"a": 1}, {"a": 2}), 2, "text") == [{"a": 1}, {"a": 2}]

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (None, "returned NoneType for 2 items"),
            ("ab", "returned str for 2 items"),
            (5, "returned int for 2 items"),
            ([1], "returned 1 values for 2 items"),
            ([], "returned 0 values for 2 items"),
            (np.zeros(3), "returned 3 values for 2 items"),
            (np.float32(1), "returned float32 for 2 items"),
            ({}, "returned an empty dict"),
            ({"a": np.zeros(1)}, "returned 1 rows of 'a' for 2 items"),
            ({"a": 5}, "returned no rows of 'a' for 2 items"),
            ({"a": [1, 2], "b": [1]}, "returned 1 rows of 'b' for 2 items"),
            ((each for each in (1, 2)), "returned generator for 2 items"),
        ],
    )
    def test_anything_else_is_an_error_of_the_encoder(self, returned: object, message: str) -> None:
        with pytest.raises(EncoderError, match=message) as caught:
            split(returned, 2, "latent")
        assert caught.value.hint

    def test_a_tensor_without_rows_is_an_error(self) -> None:
        import torch

        with pytest.raises(EncoderError, match="returned Tensor for 1 items"):
            split(torch.tensor(1.0), 1, "latent")


Make = Callable[[list[Any]], Any]


def numpy_array(values: list[Any]) -> Any:  # noqa: ANN401
    return np.array(values)


def torch_tensor(values: list[Any]) -> Any:  # noqa: ANN401
    import torch

    return torch.tensor(values)


@pytest.mark.parametrize("make", [numpy_array, torch_tensor])
class TestTrim:
    def trimmed(self, make: Make, mask: list[int]) -> dict[Any, Any]:
        length = len(mask)
        value = {
            "mask": make(mask),
            "ids": make(list(range(length))),
            "hidden": make([[float(at), 1.0] for at in range(length)]),
            "pooled": make([float(at) for at in range(length)]),
            "other": make([1, 2, 3, 4, 5, 6, 7]),
            "words": "plain",
        }
        return as_kept(value, "mask", "text")

    @pytest.mark.parametrize(
        ("mask", "kept", "side"),
        [
            ([1, 1, 0, 0], [0, 1], "right"),
            ([0, 0, 1, 1], [2, 3], "left"),
            ([1, 1, 1, 1], [0, 1, 2, 3], "right"),
            ([1, 0, 1, 0], [0, 1, 2], "right"),
            ([0, 1, 0, 1], [1, 2, 3], "left"),
            ([0, 1, 1, 0], [0, 1, 2], "right"),
            ([0, 0, 0, 0], [0], "right"),
            ([1], [0], "right"),
            ([0], [0], "right"),
        ],
    )
    def test_padding_is_cut(self, make: Make, mask: list[int], kept: list[int], side: str) -> None:
        found = self.trimmed(make, mask)
        assert found["ids"].tolist() == kept
        assert found["mask"].tolist() == [mask[at] for at in kept]
        assert found["hidden"].tolist() == [[float(at), 1.0] for at in kept]
        assert found[SIDE] == side

    def test_other_fields_are_left_alone(self, make: Make) -> None:
        """Also a pooled embedding that is as long as the mask by chance."""
        found = self.trimmed(make, [1, 0, 0, 0])
        assert found["pooled"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert found["other"].tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert found["words"] == "plain"

    def test_reading_pads_to_the_longest_of_the_batch(self, make: Make) -> None:
        rows = [self.trimmed(make, mask) for mask in ([1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0])]
        batch = {name: [row[name] for row in rows] for name in ("mask", "ids", "hidden", SIDE)}
        found = pad(batch)
        assert found["mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
        assert found["ids"].tolist() == [[0, 1, 0], [1, 2, 3], [0, 0, 0]]
        assert found["hidden"].shape == (3, 3, 2)
        assert found["ids"].dtype == rows[0]["ids"].dtype
        assert set(found) == {"mask", "ids", "hidden"}

    def test_the_left_is_padded_where_it_was(self, make: Make) -> None:
        rows = [self.trimmed(make, mask) for mask in ([0, 0, 1, 1], [1, 1, 1, 1])]
        batch = {name: [row[name] for row in rows] for name in ("mask", "ids", SIDE)}
        found = pad(batch)
        assert found["mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
        assert found["ids"].tolist() == [[0, 0, 2, 3], [0, 1, 2, 3]]

    @given(masks=st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=1))
    def test_nothing_that_the_mask_shows_is_lost(self, make: Make, masks: list[list[int]]) -> None:
        rows = [self.trimmed(make, mask) for mask in masks]
        found = pad({name: [row[name] for row in rows] for name in ("mask", "hidden", SIDE)})
        for mask, shown, hidden in zip(masks, found["mask"], found["hidden"], strict=True):
            expected = [[float(at), 1.0] for at in range(6) if mask[at]]
            assert [
                row.tolist() for row, is_on in zip(hidden, shown, strict=True) if is_on
            ] == expected

    def test_what_is_stacked_or_plain_stays(self, make: Make) -> None:
        stacked = make([[1, 2], [3, 4]])
        batch = {"words": ["a", "b"], "n": [None, None], "s": stacked, SIDE: ["right", "right"]}
        found = pad(batch)
        assert found.pop("s") is stacked
        assert found == {"words": ["a", "b"], "n": [None, None]}


class TestKept:
    def test_one_tensor_is_kept_without_a_name(self) -> None:
        import torch

        value = torch.ones(2)
        made = as_kept(value, None, "latent")
        assert list(made) == [SINGLE]
        assert made[SINGLE] is not None

    @pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "bool", "int64"])
    def test_masks_and_tensors_of_any_kind_are_trimmed_and_padded(self, name: str) -> None:
        import torch

        dtype = getattr(torch, name)
        rows = [
            as_kept(
                {"mask": torch.tensor(mask).to(dtype), "hidden": torch.ones(3, 2).to(dtype)},
                "mask", "text",
            )
            for mask in ([1, 1, 0], [1, 0, 0])
        ]  # fmt: skip
        found = pad({key: [row[key] for row in rows] for key in ("mask", "hidden", SIDE)})
        assert found["hidden"].dtype == found["mask"].dtype == dtype
        assert found["mask"].float().tolist() == [[1, 1], [1, 0]]
        assert found["hidden"].float().tolist() == [[[1, 1], [1, 1]], [[1, 1], [0, 0]]]

    @pytest.mark.parametrize(
        "value",
        [
            {"hidden": np.zeros((3, 2))},
            {"mask": [1, 1, 0]},
            {"mask": np.zeros((1, 3))},
            np.zeros(3),
        ],
    )
    def test_an_output_without_the_mask_is_an_error(self, value: object) -> None:
        with pytest.raises(EncoderError, match="text has no mask 'mask'") as caught:
            as_kept(value, "mask", "text")
        assert caught.value.hint

    def test_an_empty_mask_is_kept(self) -> None:
        found = as_kept({"mask": np.zeros(0), "ids": np.zeros(0, np.int64)}, "mask", "text")
        assert found["ids"].shape == (0,)  # type: ignore[attr-defined]


class TestNan:
    @pytest.mark.parametrize(
        "name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
                 "complex64"]
    )  # fmt: skip
    def test_a_tensor_of_any_kind_is_looked_through(self, name: str) -> None:
        import torch

        dtype = getattr(torch, name)
        good = torch.ones(3).to(dtype)
        bad = torch.tensor([1.0, math.nan, 1.0]).to(dtype)
        assert nan_in({"a": good, "b": torch.arange(3), "c": torch.tensor([True])}) is None
        assert nan_in({"a": good, "b": bad}) == "b"
        assert nan_in({SINGLE: bad}) == ""

    def test_arrays_and_what_is_inside_of_others(self) -> None:
        bad = np.array([math.nan], np.float16)
        for each in (bad, [bad], {"x": (1, bad)}, math.nan, [[math.nan]], complex(math.nan, 0)):
            assert nan_in({"a": 1, "b": each}) == "b"
        good = np.array([math.inf, 0.0])
        assert nan_in({"a": good, "b": [good, 1, "nan"], "c": None, "d": np.array(["nan"])}) is None


class Loaded:
    """Looks like what `load_encoders` returns."""

    def __init__(self, **digests: str) -> None:
        self.digests = digests
        self.fingerprint = {"components": digests}


class TestDependsOn:
    def fingerprint(self, depends_on: object, **options: Any) -> object:  # noqa: ANN401
        made = Encoder(Counting(), reads="file", depends_on=depends_on, **options)
        return made.fingerprint(file_digest)

    def test_it_is_obligatory(self) -> None:
        with pytest.raises(TypeError, match="depends_on"):
            Encoder(Counting(), reads="file")  # type: ignore[call-arg]

    def test_a_module_counts_by_its_weights(self) -> None:
        import torch

        one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        assert self.fingerprint(one) != self.fingerprint(two)
        two.load_state_dict(one.state_dict())
        same = self.fingerprint(one)
        assert self.fingerprint(two) == same
        assert self.fingerprint(two.half()) != same
        with torch.no_grad():
            one.weight[0, 0] += 1
        assert self.fingerprint(one) != same

    def test_a_file_counts_by_its_content(self, tmp_path: Path) -> None:
        path = tmp_path / "vae.safetensors"
        path.write_bytes(b"weights")
        before = self.fingerprint(path)
        assert self.fingerprint(path.rename(tmp_path / "moved")) == before
        path.write_bytes(b"other")
        assert self.fingerprint(path) != before
        assert self.fingerprint(str(path)) not in (before, self.fingerprint(path))

    def test_a_folder_counts_by_all_in_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        (folder / "vae").mkdir(parents=True)
        (folder / "vae" / "weights").write_bytes(b"one")
        (folder / "config.json").write_bytes(b"{}")
        before = self.fingerprint(folder)
        folder = folder.rename(tmp_path / "moved")
        assert self.fingerprint(folder) == before
        (folder / "vae" / "weights").write_bytes(b"two")
        after = self.fingerprint(folder)
        assert after != before
        (folder / "vae" / "weights").rename(folder / "vae" / "renamed")
        assert self.fingerprint(folder) not in (before, after)

    def test_a_path_in_a_collection_counts_by_its_content(self, tmp_path: Path) -> None:
        path = tmp_path / "weights"
        wraps: list[Callable[[], object]] = [
            lambda: (path, 1), lambda: [path, 1], lambda: {"a": path}, lambda: {path, "b"},
            lambda: frozenset([path]), lambda: ((path,), {"x": [path]}),
        ]  # fmt: skip
        for wrap in wraps:
            path.write_bytes(b"one")
            before = self.fingerprint(wrap())
            path.write_bytes(b"two")
            assert self.fingerprint(wrap()) != before
            path.write_bytes(b"one")
            assert self.fingerprint(wrap()) == before

    def test_a_tuple_counts_by_all_of_it_in_order(self) -> None:
        found = [self.fingerprint(each) for each in (("a", "b"), ("b", "a"), ("a",), "a", ("a", 1))]
        assert len({str(each) for each in found}) == 5

    def test_loaded_encoders_count_by_their_fingerprint(self) -> None:
        one, same, two = Loaded(vae="1"), Loaded(vae="1"), Loaded(vae="2")
        assert self.fingerprint(one) == self.fingerprint(same) != self.fingerprint(two)
        assert self.fingerprint((one, "sd")) != self.fingerprint((two, "sd"))

    def test_a_path_that_is_not_there_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match="on which an encoder depends, cannot be read"):
            self.fingerprint(tmp_path / "nowhere")

    def test_settings_count_too(self) -> None:
        options: list[dict[str, Any]] = [
            {}, {"version": 1}, {"version": "1"}, {"version": [1, (2, 3)]}, {"trim": "mask"},
            {"statistic": "mean"}, {"scale": 0.18215}, {"shift": 0.1}, {"scale": (1.0, 2.0)},
            {"reads": ("file", "mask")},
        ]  # fmt: skip
        found = []
        for each in options:
            made = Encoder(Counting(), depends_on=1, **{"reads": "file", **each})
            found.append(json.dumps(made.fingerprint(file_digest), sort_keys=True))
        assert len(set(found)) == len(options)
        for settings in ({"batch": 7}, {"variations": 3}, {"buckets": "64x64"}, {"shared": "x"}):
            assert self.fingerprint(1, **settings) == self.fingerprint(1)

    def test_a_fingerprint_is_the_same_after_it_was_written(self) -> None:
        """Else it would count as changed when the dataset is opened again."""
        made = self.fingerprint(("a", {"b": (1, 2)}), version=(1, ("x",)), scale=(1.0, 2.0))
        assert json.loads(json.dumps(made)) == made


class TestArguments:
    @pytest.mark.parametrize(
        "options",
        [
            {"function": 5}, {"reads": ()}, {"reads": ""}, {"reads": ("file", "file")},
            {"reads": ("file", 5)}, {"reads": ("",)}, {"batch": 0}, {"batch": True},
            {"batch": 1.0}, {"variations": 0}, {"statistic": "median"}, {"buckets": "area"},
        ],
    )  # fmt: skip
    def test_what_makes_no_sense_is_refused(self, options: dict[str, Any]) -> None:
        usual: dict[str, Any] = {"function": Counting(), "reads": "file", "depends_on": 1}
        with pytest.raises(ConfigError):
            Encoder(**usual | options)

    @pytest.mark.parametrize("name", ["version", "scale", "shift"])
    def test_a_setting_that_cannot_be_kept_is_refused(self, name: str) -> None:
        made = Encoder(Counting(), reads="file", depends_on=1, **{name: object()})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{name} of an encoder cannot be kept") as caught:
            made.fingerprint(file_digest)
        assert caught.value.hint
