"""Compressed parts: any reader reads any record; nothing is silently wrong, or silently plain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import records as engine_records
from smartcache.artifacts.values import compression as values_compression
from smartcache.errors import ConfigError, DamagedArtifactError, MissingCompressionError
from tests.artifacts.exact import exactly
from tests.artifacts.opening import array, check_whole, engine_of, open_set, packs_of
from tests.artifacts.strategies import values

if TYPE_CHECKING:
    import torch

METHODS = ("gzip", "lz4", "zstd", "blosc2", "auto")
NUMBER = values_compression.METHODS


def padded() -> torch.Tensor:
    """Return an embedding of which most is padding."""
    import torch

    made = torch.zeros(256, 64, dtype=torch.float16)
    made[:30] = torch.randn(30, 64)
    return made


def sample() -> dict[str, Any]:
    import torch

    return {
        "latent": torch.randn(4, 32, 32).half(),
        "bf16": torch.randn(64, 200).bfloat16(),
        "padded": padded(),
        "ids": torch.arange(9000, dtype=torch.int32) // 50,
        "short": np.arange(600),
        "tokens": list(range(500)),
        "text": "a cat on a mat " * 30,
    }


def parts_of(opened: ArtifactSet, key: str) -> dict[str, tuple[str, float]]:
    """Return how each tensor of an artifact is compressed, and to which share of its bytes."""
    names = {number: name for name, number in NUMBER.items()}
    found = opened[key]
    held = found._need()  # noqa: SLF001
    meta = engine_records.parse_meta(
        held.source.bytes_at(held.place.offset, held.place.meta),
        held.place.pack.nonce, held.place.offset,
    )  # fmt: skip
    parts = {
        str(owner): (names[meta.part(slot).method], meta.part(slot).stored / meta.part(slot).nbytes)
        for slot, owner in enumerate(held.layout.owners)
    }
    parts["*"] = (names[meta.head.flags], len(meta.inline) / max(1, len(meta.values)))
    return parts


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    def test_values_come_back_in_every_way_of_reading(
        self, sets: ArtifactSets, method: str
    ) -> None:
        import torch

        value = sample()
        wanted = exactly(value)
        with open_set(sets, compression=method) as opened:
            opened.put("key", value, metadata={"n": 1})
            opened.put("again", value)
            for _ in range(2):  # verified the first time
                assert exactly(opened.get("key")) == wanted
                sample_ = opened["key"]
                assert exactly({name: sample_[name] for name in sample_}) == wanted
                assert exactly(sample_.value()) == wanted
                assert sample_.metadata == {"n": 1}
                view = sample_.handle("ids").numpy()
                assert view.tolist() == value["ids"].tolist()
                assert not view.flags.writeable
                batch = opened.get_batch(["key", "again", "key"])
                for name in ("latent", "bf16", "padded", "ids"):
                    assert torch.equal(batch[name], torch.stack([value[name]] * 3))
                assert batch["tokens"] == [value["tokens"]] * 3
                out = opened.select(["again", "key"]).read([1, 0], out={"ids": batch["ids"]})
                assert out["ids"].data_ptr() == batch["ids"].data_ptr()
                assert opened.select(["key"]).column("text") == [value["text"]]
            check_whole(opened)
        with open_set(sets, read_only=True) as reading:
            assert exactly(reading.get("key")) == wanted

    def test_any_setting_reads_it_and_adds_to_it(self, sets: ArtifactSets, method: str) -> None:
        with open_set(sets, compression=method) as opened:
            opened.put("key", sample())
            wanted = exactly(opened.get("key"))
        for other in ("none", "zstd", "lz4", "auto"):
            with open_set(sets, compression=other) as opened:
                assert exactly(opened.get("key")) == wanted
                opened.put(other, sample())
                assert opened.get_batch(["key", other])["ids"].shape == (2, 9000)
        with open_set(sets) as opened:
            assert len(opened) == 5
            check_whole(opened)

    def test_compaction_copies_it_as_it_is(self, sets: ArtifactSets, method: str) -> None:
        with open_set(sets, compression=method) as opened:
            for n in range(4):
                opened.put(f"k{n}", sample() | {"n": [n] * 200})
            before = parts_of(opened, "k2")
            wanted = exactly(opened.get("k2"))
            opened.delete_many(["k0", "k1"])
            assert opened.compact(force=True).packs == 1
            assert parts_of(opened, "k2") == before
            assert exactly(opened.get("k2")) == wanted
            check_whole(opened)

    def test_equal_tensors_are_kept_once(self, sets: ArtifactSets, method: str) -> None:
        import torch

        with open_set(sets, compression=method) as opened:
            embedding = padded()
            opened.put("a", {"text": embedding, "n": 1})
            size = opened.stats().live
            opened.put("b", {"text": embedding, "n": 2})
            assert torch.equal(opened.get("b")["text"], embedding)
            assert opened.stats().live - size < 600
            assert opened.stats().saved > 0

    def test_a_flipped_bit_is_a_miss(self, sets: ArtifactSets, method: str) -> None:
        with open_set(sets, compression=method) as opened:
            opened.put("key", {"ids": np.arange(9000), "tokens": list(range(900))})
        (path,) = packs_of(opened)
        data = path.read_bytes()
        at = data.index(b"SCr2", 200)  # the artifact: behind its layout
        for where in range(at, min(len(data), at + 20_000), 97):
            path.write_bytes(data[:where] + bytes([data[where] ^ 4]) + data[where + 1 :])
            with open_set(sets, read_only=True) as reading:
                found = reading.get("key")
                assert found is None or found["ids"].tolist() == list(range(9000))

    def test_what_is_crafted_is_damage_and_no_crash(self, method: str) -> None:
        """With right checksums, but other lengths, or bytes of nothing."""
        number = NUMBER["zstd" if method == "auto" else method]
        raw = bytes(range(256)) * 40
        data, _ = values_compression._compressed(number, memoryview(raw), 1)  # noqa: SLF001
        target = bytearray(len(raw))
        values_compression.expand(number, data, memoryview(target))
        assert target == raw
        for size in (0, 1, len(raw) - 1, len(raw) + 1, 10 * len(raw)):
            with pytest.raises(DamagedArtifactError):
                values_compression.expand(number, data, memoryview(bytearray(size)))
        for bad in (b"", b"abc", bytes(data)[:-1], bytes(data)[5:], bytes(300), b"\xff" * 300):
            with pytest.raises(DamagedArtifactError):
                values_compression.expand(number, bad, memoryview(bytearray(len(raw))))
        for bad in (b"", b"ab", b"\xff\xff\xff\xff" + bytes(data), b"\0\0\0\1" + bytes(data)):
            with pytest.raises(DamagedArtifactError):
                values_compression.expand_inline(number, bad)

    def test_noise_stays_as_it_is(self, sets: ArtifactSets, method: str) -> None:
        """What does not shrink by a tenth would only cost time."""
        noise = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
        with open_set(sets, compression=method) as opened:
            opened.put("key", {"noise": noise, "bytes": noise[:2000].tobytes()})
            assert set(parts_of(opened, "key").values()) == {("none", 1.0)}
            assert opened.get("key")["noise"].tolist() == noise.tolist()


@settings(max_examples=60)
@given(values, st.sampled_from(METHODS))
def test_every_value_comes_back_exactly(tmp_path_factory: Any, value: object, method: str) -> None:  # noqa: ANN401
    root = tmp_path_factory.getbasetemp() / f"compressed-{method}"
    with ArtifactSets(root).open("set", {}, compression=method) as opened:
        opened.put("key", value)
        assert exactly(opened.get("key")) == exactly(value)
        opened.put("padded", [value, np.zeros((30, 100)), [1] * 999, value])
        assert exactly(opened.get("padded")[3]) == exactly(value)


class TestAuto:
    def test_it_chooses_by_what_a_tensor_is(self, sets: ArtifactSets) -> None:
        import torch

        with open_set(sets, compression="auto") as opened:
            value = sample() | {
                "bf16_short": torch.randn(20, 100).bfloat16(),
                "fp32": torch.randn(100, 100),
                "fp32_padded": torch.cat((torch.randn(20, 64), torch.zeros(100, 64))),
                "repeated": torch.cat((torch.randn(20, 64), torch.ones(1, 64).expand(100, 64))),
                "fp8": torch.randn(100, 100).to(torch.float8_e4m3fn),
                "bool": torch.zeros(20_000, dtype=torch.bool),
            }
            opened.put("key", value)
            found = {name: method for name, (method, _) in parts_of(opened, "key").items()}
            assert exactly(opened.get("key")) == exactly(value)
        assert found == {
            "latent": "none", "fp32": "none", "fp8": "none",
            "bf16": "blosc2", "padded": "blosc2", "ids": "blosc2", "fp32_padded": "blosc2",
            "repeated": "blosc2", "bool": "blosc2",
            "bf16_short": "zstd", "short": "zstd", "*": "zstd",
        }  # fmt: skip

    def test_numpy_dtypes_count_the_same(self, sets: ArtifactSets) -> None:
        rng = np.random.default_rng(0)
        value = {
            "f2": rng.standard_normal(20_000).astype("<f2"),
            "c8": rng.standard_normal(20_000).astype("<c8"),
            "f8_padded": np.concatenate((rng.standard_normal(4000), np.zeros(4000))),
            "u2": np.arange(20_000, dtype=">u2"),
            "b1": np.zeros(20_000, bool),
            "text": np.array(["cat", "dog"] * 2000),
            "date": np.arange("2020-01-01", "2029-01-01", dtype="M8[D]"),
        }
        with open_set(sets, compression="auto") as opened:
            opened.put("key", value)
            found = {name: method for name, (method, _) in parts_of(opened, "key").items()}
            assert exactly(opened.get("key")) == exactly(value)
        assert found["f2"] == found["c8"] == "none"
        for name in ("f8_padded", "u2", "b1", "text", "date"):
            assert found[name] == "blosc2"

    def test_it_saves_what_it_is_for(self, sets: ArtifactSets) -> None:
        with open_set(sets, compression="auto") as opened:
            opened.put("key", sample())
            shares = {name: share for name, (_, share) in parts_of(opened, "key").items()}
        assert shares["padded"] < 0.2
        assert shares["bf16"] < 0.75
        assert shares["ids"] < 0.3
        assert shares["*"] < 0.5


class TestByField:
    def test_each_field_has_its_own(self, sets: ArtifactSets) -> None:
        rule = {"ids": "lz4", "padded": "gzip", "*": "zstd", "short": "none"}
        value = sample() | {"deep": [{"ids": np.arange(5000)}, np.zeros(5000)]}
        with open_set(sets, compression=rule) as opened:
            opened.put("key", value)
            found = {name: method for name, (method, _) in parts_of(opened, "key").items()}
            assert exactly(opened.get("key")) == exactly(value)
        assert found["ids"] == "lz4"
        assert found["padded"] == "gzip"
        assert found["short"] == "none"
        assert found["bf16"] == found["deep"] == found["*"] == "zstd"

    def test_without_a_rule_for_the_rest_it_stays_as_it_is(self, sets: ArtifactSets) -> None:
        with open_set(sets, compression={"ids": "zstd"}) as opened:
            opened.put("key", sample())
            opened.put("single", np.zeros(9000))
            found = {name: method for name, (method, _) in parts_of(opened, "key").items()}
            assert found.pop("ids") == "zstd"
            assert set(found.values()) == {"none"}
            assert parts_of(opened, "single")["None"] == ("none", 1.0)

    def test_it_is_kept_with_the_set(self, sets: ArtifactSets) -> None:
        rule = {"ids": "zstd", "*": "none"}
        open_set(sets, compression=rule).close()
        with open_set(sets) as opened:
            assert opened.describe().options.compression == rule
            opened.put("key", sample())
            assert parts_of(opened, "key")["ids"][0] == "zstd"
        with open_set(sets, compression="none") as opened:
            assert opened.describe().options.compression == "none"

    @pytest.mark.parametrize("bad", ["zip", "", 3, {"ids": "zip"}, {3: "zstd"}, ["zstd"]])
    def test_bad_rules_are_refused(self, sets: ArtifactSets, bad: Any) -> None:  # noqa: ANN401
        with pytest.raises(ConfigError, match="compression"):
            open_set(sets, compression=bad)
        assert sets.folders() == []


WITHOUT = """
import sys
for name in sys.argv[2].split():
    sys.modules[name] = None
from smartcache.artifacts import ArtifactSets
from smartcache import SmartcacheError
sets = ArtifactSets(sys.argv[1])
for code in sys.argv[3:]:
    try:
        exec(code)
    except SmartcacheError as error:
        print(type(error).__name__, "|", error, "|", error.hint)
"""


def without(packages: str, root: Path, *codes: str) -> list[str]:
    """Run some code where packages are missing; return what each prints, or the error."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(root), packages, *codes],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


class TestMissingPackages:
    @pytest.mark.parametrize(
        ("method", "package"), [("lz4", "lz4"), ("zstd", "zstandard"), ("blosc2", "blosc2")]
    )
    def test_reading_and_opening_name_the_package(
        self, sets: ArtifactSets, method: str, package: str
    ) -> None:
        """And delete nothing: whoever has it reads on."""
        with sets.open("set", {}, compression=method) as opened:
            opened.put("key", {"ids": np.arange(9000)})
        said = f"{package} is needed for this compression, and is not installed"
        hint = "Install it: pip install 'smartcache-hub[compression]'."
        blocked = f"{package} {package}.block"
        codes = [
            'print(sets.open("set", {}).get("key"))',
            'print(sets.open("set", {}).get_batch(["key"]))',
            'print(sets.open("set", {})["key"]["ids"])',
            'print(sets.open("set", {}).get_or_compute("key", lambda: 5))',
            'sets.open("set", {}).put("new", list(range(999)))',
            f'sets.open("other", {{}}, compression="{method}")',
            f'sets.open("other", {{}}, compression={{"a": "{method}"}})',
        ]
        if method != "lz4":
            codes.append('sets.open("x", {}, compression="auto")')
        printed = without(blocked, sets.root, *codes)
        assert printed == [f"MissingCompressionError | {said} | {hint}"] * len(codes)
        with sets.open("set", {}) as opened:
            assert opened.get("key")["ids"].tolist() == list(range(9000))
            assert list(opened) == ["key"]
            check_whole(opened)

    def test_verify_says_so_and_deletes_nothing(self, sets: ArtifactSets) -> None:
        with sets.open("set", {}, compression="zstd") as opened:
            opened.put("key", {"ids": np.arange(9000)})
        code = "print([(each.damaged, each.problem, each.cure) for each in sets.verify()])"
        (said,) = without("zstandard", sets.root, code)
        assert "zstandard is needed" in said
        with sets.open("set", {}) as opened:
            assert "key" in opened

    def test_gzip_and_none_need_nothing(self, sets: ArtifactSets) -> None:
        code = (
            'opened = sets.open("set", {}, compression="gzip");'
            'opened.put("key", list(range(999))); print(sum(opened.get("key")))'
        )
        assert without("lz4 lz4.block zstandard blosc2", sets.root, code) == ["498501"]

    def test_neither_is_loaded_where_nothing_is_compressed(self, sets: ArtifactSets) -> None:
        code = (
            'sets.open("set", {}).put("key", list(range(999)));'
            'print([n for n in ("blosc2", "lz4", "zstandard") if n in sys.modules])'
        )
        assert without("", sets.root, code) == ["[]"]

    def test_a_method_of_a_newer_release_is_no_damage(self) -> None:
        with pytest.raises(MissingCompressionError, match="does not know: 77") as caught:
            values_compression.expand(77, b"abc", memoryview(bytearray(9)))
        assert "newer release" in caught.value.hint


def test_batches_are_decompressed_by_several_threads(sets: ArtifactSets) -> None:
    """Into the very memory that is returned, and right whoever reads which part."""
    rng = np.random.default_rng(0)
    tensors = {f"k{n}": np.repeat(rng.integers(0, 99, 800), 100) for n in range(24)}
    with open_set(sets, compression="blosc2") as opened:
        opened.put_many({key: {"x": each} for key, each in tensors.items()})
        keys = [*tensors, *tensors]
        for threads in (1, 2, 4):
            batch = opened.get_batch(keys, threads=threads)
            assert np.array_equal(batch["x"], np.stack([tensors[key] for key in keys]))
            assert engine_of(opened).damage == set()


def test_what_is_larger_than_its_pack_is_no_damage(sets: ArtifactSets) -> None:
    """Zeros: a megabyte of them takes some bytes."""
    with open_set(sets, compression="zstd") as opened:
        opened.put("key", {"x": np.zeros(200_000), "y": array(1)})
        opened.put("alone", np.zeros(200_000))
        assert sum(path.stat().st_size for path in packs_of(opened)) < 100_000
    with open_set(sets) as opened:
        assert not opened.get("key")["x"].any()
        assert opened["key"].handle("x").numpy().nbytes == 1_600_000
        assert not opened["alone"].value().any()  # type: ignore[attr-defined]
        assert not opened.get_batch(["key"])["x"].any()
        check_whole(opened)
