"""Sets go elsewhere and come back: exactly, and trusting nothing that arrives."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from smartcache.artifacts import (
    ArtifactSet,
    ArtifactSets,
    Carried,
    CarryPlan,
    compute_key,
    plan_export,
    plan_import,
    register_codec,
)
from smartcache.artifacts import shards as artifacts_shards
from smartcache.errors import (
    BadKeyError,
    ConfigError,
    DestinationExistsError,
    NoSpaceError,
    SetFormatError,
)
from smartcache.system import filesystems as store_room
from tests.artifacts.exact import exactly, forget_codecs
from tests.artifacts.opening import array, open_set, packs_of
from tests.artifacts.strategies import texts, values

keys = texts.filter(bool) | st.sampled_from(["a", "a/b", "a%2Fb", "__metadata__", "0" * 64])


@pytest.fixture
def other(tmp_path: Path) -> ArtifactSets:
    """Where everything is imported to."""
    return ArtifactSets(tmp_path / "other" / "sets")


def fill(latents: ArtifactSet, count: int = 6) -> None:
    for number in range(count):
        value = {"latent": array(number), "crop": [0, number], "mean": np.array([number, 1], "f4")}
        latents.put(f"key-{number}", value, metadata={"file": f"{number}.png"})


def contents(sets: ArtifactSets) -> dict[str, object]:
    with open_set(sets, read_only=True) as opened:
        return {key: exactly([opened.get(key), opened.metadata(key)]) for key in opened}


def ends(sets: ArtifactSets, data: Iterable[str]) -> list[object]:
    """Return when artifacts are past their time."""
    (info,) = sets.infos()
    return [sets.inspect(info, key).expires_at for key in data]


def carried(plan: CarryPlan) -> tuple[int, int]:
    """Execute a plan; return how many were written, and how many kept."""
    done = plan.execute()
    assert not done.problems
    return done.artifacts, done.kept


class TestExact:
    @settings(max_examples=10)
    @given(data=st.dictionaries(keys, st.tuples(values, texts), min_size=1, max_size=5))
    def test_whatever_was_put_comes_back(
        self,
        data: dict[str, tuple[object, str]],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        base = tmp_path_factory.mktemp("carry")
        with open_set(ArtifactSets(base / "sets")) as latents:
            for key, (value, note) in data.items():
                latents.put(key, value, metadata=note, ttl=3600 if note else None)
            plan_export(latents, base / "out", form="folder").execute()
            wanted = contents(ArtifactSets(base / "sets"))
        other = ArtifactSets(base / "other")
        assert carried(plan_import(other, base / "out")) == (len(data), 0)
        assert contents(other) == wanted
        with open_set(other) as there:
            assert exactly([there.get(key) for key in data]) == exactly(
                [value for value, _ in data.values()]
            )
        assert ends(other, data) == ends(ArtifactSets(base / "sets"), data)
        assert carried(plan_import(other, base / "out")) == (0, len(data))
        shutil.rmtree(base)

    def test_options_travel_and_so_does_what_is_compressed(
        self, sets: ArtifactSets, other: ArtifactSets, tmp_path: Path
    ) -> None:
        """A set that is made has those of the export; one that is there keeps its own."""
        value = {"ids": np.arange(9000), "text": ["a cat"] * 500, "zeros": np.zeros(50_000)}
        options: dict[str, Any] = {
            "compression": {"ids": "zstd", "*": "gzip"},
            "ttl": 900.0,
            "max_size": 10**7,
        }
        with open_set(sets, **options) as opened:
            opened.put("key", value)
            plan_export(opened, tmp_path / "out", form="folder").execute()
            size = opened.stats().live
        plan_import(other, tmp_path / "out").execute()
        with open_set(other) as there:
            assert exactly(there.get("key")) == exactly(value)
            assert there.stats().live == size
            found = there.describe().options
            assert {name: getattr(found, name) for name in options} == options
        open_set(other, compression="none").close()
        assert carried(plan_import(other, tmp_path / "out")) == (0, 1)
        with open_set(other) as there:
            assert there.describe().options.compression == "none"

    def test_a_codec_that_nobody_has_registered_is_no_obstacle(
        self, latents: ArtifactSet, other: ArtifactSets, tmp_path: Path
    ) -> None:
        class Crop:
            def __init__(self, box: object) -> None:
                self.box = box

        register_codec("crop", Crop, lambda crop: crop.box, Crop)
        latents.put("a", [Crop(array(1)), Crop({"x": np.zeros(3)})])
        forget_codecs()
        plan_export(latents, tmp_path / "out", form="folder").execute()
        plan_import(other, tmp_path / "out").execute()
        register_codec("crop", Crop, lambda crop: crop.box, Crop)
        with open_set(other) as there:
            assert exactly(there.get("a")[0].box) == exactly(array(1))
        forget_codecs()

    def test_pins_travel_and_what_is_past_its_time_does_not(
        self, latents: ArtifactSet, other: ArtifactSets, tmp_path: Path,
        pass_time: Callable[[float], None],
    ) -> None:  # fmt: skip
        for key in ("gone", "pinned", "soon"):
            latents.put(key, key, ttl=50 if key != "soon" else 100)
        latents.pin("pinned")
        pass_time(60)
        plan_export(latents, tmp_path / "out", form="folder").execute()
        pass_time(60)
        assert carried(plan_import(other, tmp_path / "out")) == (1, 0)
        assert carried(plan_import(other, tmp_path / "out")) == (0, 1)
        with open_set(other) as there:
            assert set(there) == {"pinned"}
            assert there.is_pinned("pinned")

    def test_nothing_outlives_the_time_to_live_of_the_store(
        self, latents: ArtifactSet, tmp_path: Path, pass_time: Callable[[float], None]
    ) -> None:
        fill(latents, 2)
        plan_export(latents, tmp_path / "out", form="folder").execute()
        short = ArtifactSets(tmp_path / "short", ttl=100)
        assert carried(plan_import(short, tmp_path / "out")) == (2, 0)
        pass_time(50)
        assert carried(plan_import(short, tmp_path / "out")) == (0, 2)
        pass_time(60)
        assert contents(short) == {}
        assert carried(plan_import(short, tmp_path / "out"))[0] == 2


class TestShards:
    def test_any_safetensors_reads_them(self, latents: ArtifactSet, tmp_path: Path) -> None:
        import torch

        value = {
            "latent": torch.randn(4, 30, 30).bfloat16(), "ids": np.arange(5), "text": "a cat é",
            "deep": [{"x": np.ones((2, 300))}], "odd": np.ones(300, "c16"),
            "big": np.ones(2, ">f4"), "one": torch.ones(3, dtype=torch.uint8),
        }  # fmt: skip
        latents.put("img/1.png", value, metadata={"file": "1.png"})
        plan_export(latents, tmp_path / "out").execute()
        path = tmp_path / "out/latents-00001.safetensors"
        with safe_open(path, framework="pt") as file:
            read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            document = json.loads(file.metadata()["artifact:0"])
        for begin, width in offsets(path):
            assert begin % width == 0  # some programs cannot read what is not aligned
        start = "img%2F1.png/"
        assert torch.equal(read[f"{start}latent"], value["latent"])  # type: ignore[arg-type]
        assert read[f"{start}ids"].tolist() == [0, 1, 2, 3, 4]
        assert read[f"{start}deep/0/x"].shape == (2, 300)
        odd = read[f"{start}odd"]
        assert (odd.dtype, odd.numpy().tobytes()) == (torch.uint8, np.ones(300, "c16").tobytes())
        assert document["bytes"][f"{start}odd"] == {"dtype": "<c16", "shape": [300]}
        assert set(document["bytes"]) == {f"{start}odd", f"{start}big"}
        assert document["values"]["text"] == "a cat é"
        assert document["about"] == {"file": "1.png"}
        index = json.loads((tmp_path / "out/index.json").read_text())
        assert index["artifacts"] == {"img/1.png": path.name}
        assert (index["name"], index["id"]) == ("latents", latents.id)
        assert index["fingerprint"] == latents.fingerprint.to_json()

    def test_no_two_tensors_share_a_name(self, latents: ArtifactSet, tmp_path: Path) -> None:
        tensor = np.zeros(2)
        no_text = np.frombuffer(bytes(range(8)), "<M8")[0]  # has no repr
        put: dict[str, object] = {
            "b": {no_text: tensor},
            "a": {"b/c": tensor, "b": {"c": tensor}, 1: tensor, "1": tensor, "": tensor},
            "a/b": tensor, "a%2Fb": tensor, "a/b/c": tensor, "__metadata__": tensor,
            "\ud800": tensor, "a\n": tensor,
        }  # fmt: skip
        latents.put_many(put)
        plan_export(latents, tmp_path / "out").execute()
        with safe_open(tmp_path / "out/latents-00001.safetensors", framework="np") as file:
            names = set(file.keys())
        assert len(names) == 1 + 5 + 6
        assert {"a/b%2Fc", "a/b/c", "a/", "a%2Fb", "a%252Fb", "%5F_metadata__"} <= names

    def test_a_shard_has_a_bound_of_bytes(self, latents: ArtifactSet, tmp_path: Path) -> None:
        fill(latents, 7)
        latents.put("large", array(9, 20_000))
        plan_export(latents, tmp_path / "out", shard_size=9000).execute()
        index = json.loads((tmp_path / "out/index.json").read_text())
        assert sorted(Counter(index["artifacts"].values()).values()) == [1, 1, 2, 2, 2]
        with pytest.raises(ConfigError):
            plan_export(latents, tmp_path / "out", shard_size=0)

    def test_a_header_has_a_bound_too(
        self, latents: ArtifactSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is larger than any header may be is named; a folder has no such bound."""
        monkeypatch.setattr(artifacts_shards, "_FULL_HEADER", 20_000)
        monkeypatch.setattr(artifacts_shards, "_MOST_HEADER", 40_000)
        for number in range(20):
            latents.put(f"{number}", "x" * 2000)
        latents.put("huge", {f"{number}": "x" * 2000 for number in range(20)})
        done = plan_export(latents, tmp_path / "out").execute()
        (problem,) = done.problems
        assert problem.startswith("huge: ")
        for path in (tmp_path / "out").glob("*.safetensors"):
            assert int.from_bytes(path.read_bytes()[:8], "little") < 21_000
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
        assert done.artifacts == 20

    def test_an_export_that_is_run_again_has_what_the_set_has_now(
        self, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        fill(latents)
        plan_export(latents, out, shard_size=9000).execute()
        os.truncate(out / "latents-00003.safetensors", 20)
        latents.delete("key-0")
        latents.put("new", array(7))
        assert carried(plan_export(latents, out)) == (6, 0)
        (path,) = (each for each in out.glob("*.safetensors") if each.stat().st_size > 20)
        with safe_open(path, framework="np") as file:
            found = {name.partition("/")[0] for name in file.keys()}  # noqa: SIM118
        assert found == set(latents)

    def test_files_of_others_stay(self, latents: ArtifactSet, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        theirs = {"notes.txt": b"mine", "latents-00001.safetensors": b"no shard", "a.pt": b"x"}
        for name, data in theirs.items():
            (out / name).write_bytes(data)
        (out / "latents-00007.safetensors").symlink_to("/etc/passwd")
        fill(latents)
        for _ in range(2):
            assert carried(plan_export(latents, out)) == (6, 0)
            assert {name: (out / name).read_bytes() for name in theirs} == theirs
            assert (out / "latents-00007.safetensors").is_symlink()
            assert len(os.listdir(out)) == 6

    def test_are_for_other_programs_and_not_imported(
        self, latents: ArtifactSet, tmp_path: Path, other: ArtifactSets
    ) -> None:
        fill(latents)
        plan_export(latents, tmp_path / "out").execute()
        with pytest.raises(SetFormatError, match="exported for other programs"):
            plan_import(other, tmp_path / "out", name="x", fingerprint={})

    @pytest.mark.parametrize("left", ["shard", "index"])
    def test_an_export_of_another_set_is_refused(
        self, left: str, sets: ArtifactSets, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        fill(latents, 1)
        plan_export(latents, tmp_path / "out").execute()
        for path in list((tmp_path / "out").iterdir()):
            if (path.suffix == ".json") != (left == "index"):
                path.unlink()
        with (
            open_set(sets, "captions") as another,
            pytest.raises(DestinationExistsError, match="another set: latents/"),
        ):
            plan_export(another, tmp_path / "out")

    def test_an_index_of_something_else_is_not_replaced(
        self, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        (tmp_path / "index.json").write_text('{"weight_map": {}}')
        with pytest.raises(DestinationExistsError, match="no index of an export"):
            plan_export(latents, tmp_path)
        assert (tmp_path / "index.json").read_text() == '{"weight_map": {}}'

    def test_an_index_is_there_only_when_everything_is(
        self, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        """Otherwise the old one would hide the shards that are new."""

        def interrupted(*_: object, **__: object) -> NoReturn:
            raise KeyboardInterrupt

        fill(latents)
        plan_export(latents, tmp_path / "out").execute()
        latents.put("new", array(9))
        with pytest.raises(KeyboardInterrupt):
            plan_export(latents, tmp_path / "out").execute(interrupted)
        assert not (tmp_path / "out/index.json").exists()
        assert carried(plan_export(latents, tmp_path / "out")) == (7, 0)
        assert (tmp_path / "out/index.json").exists()


def offsets(path: Path) -> list[tuple[int, int]]:
    """Return where the tensors of a shard begin, and the bytes of their elements."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    widths = {"BF16": 2, "I64": 8, "F64": 8, "U8": 1}
    return [
        (each["data_offsets"][0], widths[each["dtype"]])
        for name, each in header.items()
        if name != "__metadata__"
    ]


class TestFolder:
    def test_is_a_folder_of_sets(self, latents: ArtifactSet, tmp_path: Path) -> None:
        fill(latents)
        plan_export(latents, tmp_path / "out", form="folder").execute()
        assert contents(ArtifactSets(tmp_path / "out")) == contents(ArtifactSets(tmp_path / "sets"))

    def test_what_is_there_and_equal_is_not_written_again(
        self, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        fill(latents)
        out = ArtifactSets(tmp_path / "out")
        plan_export(latents, out.root, form="folder").execute()
        with open_set(out, read_only=True) as there:
            before = {path: path.read_bytes() for path in packs_of(there)}
        assert carried(plan_export(latents, out.root, form="folder")) == (0, 6)
        assert {path: path.read_bytes() for path in before} == before
        latents.put("key-2", array(77), metadata="other")
        latents.put("key-3", latents.get("key-3"), metadata={"file": "3.png"}, ttl=100)
        latents.put("new", 1)
        plan = plan_export(latents, out.root, form="folder")
        assert (plan.artifacts, plan.kept) == (1, 6)  # that two differ is known when it is read
        assert carried(plan) == (3, 4)
        assert contents(out) == contents(ArtifactSets(tmp_path / "sets"))

    def test_the_place_of_the_set_itself_is_refused(
        self, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "sets")
        for name in ("sets", "link"):
            with pytest.raises(DestinationExistsError):
                plan_export(latents, tmp_path / name, form="folder")

    def test_a_damaged_artifact_is_named_and_the_others_go(
        self, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        fill(latents, 3)
        latents.close()
        (pack,) = packs_of(latents)
        data = bytearray(pack.read_bytes())
        data[data.index(array(1).tobytes())] ^= 1
        pack.write_bytes(data)
        forms: tuple[Literal["folder", "safetensors"], ...] = ("folder", "safetensors")
        for form in forms:
            with open_set(ArtifactSets(tmp_path / "sets"), read_only=True) as opened:
                done = plan_export(opened, tmp_path / form, form=form).execute()
            assert (done.artifacts, len(done.problems)) == (2, 1)
            assert "key-1: " in done.problems[0]

    def test_symlinks_are_not_followed(
        self, latents: ArtifactSet, tmp_path: Path, other: ArtifactSets
    ) -> None:
        fill(latents, 1)
        plan_export(latents, tmp_path / "real", form="folder").execute()
        (tmp_path / "names").mkdir()
        (tmp_path / "names/latents").symlink_to(tmp_path / "real/latents")
        (tmp_path / "ids/latents").mkdir(parents=True)
        (tmp_path / "ids/latents" / latents.id).symlink_to(tmp_path / "real/latents" / latents.id)
        for name in ("names", "ids"):
            with pytest.raises(SetFormatError, match="nothing that can be imported"):
                plan_import(other, tmp_path / name)

    def test_a_folder_that_says_it_is_another_set_is_refused(
        self, latents: ArtifactSet, tmp_path: Path, other: ArtifactSets
    ) -> None:
        fill(latents, 1)
        plan_export(latents, tmp_path / "out", form="folder").execute()
        (tmp_path / "out/latents").rename(tmp_path / "out/others")
        about = tmp_path / "out/others" / latents.id / "set.json"
        about.write_text(about.read_text().replace('"latents"', '"others"'))
        with pytest.raises(SetFormatError):
            plan_import(other, tmp_path / "out")


class TestFiles:
    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        import torch
        from safetensors.torch import save_file

        folder = tmp_path / "files"
        (folder / "sub").mkdir(parents=True)
        torch.save({"latent": torch.ones(4, 30, 30).half(), "n": 3}, folder / "a.pt")
        torch.save(torch.nn.Linear(3, 3).state_dict(), folder / "sub/b.PTH")
        np.savez(folder / "c.npz", x=np.arange(500), y=np.ones(2, ">f4"))
        save_file({"w": torch.ones(700).bfloat16()}, folder / "sub/d.safetensors")
        (folder / "notes.txt").write_text("not a tensor")
        (folder / "link.pt").symlink_to(folder / "a.pt")
        (folder / "loop").symlink_to(folder)
        (tmp_path / "theirs").mkdir()
        np.savez(tmp_path / "theirs/e.npz", x=np.arange(5))
        (folder / "elsewhere").symlink_to(tmp_path / "theirs")
        return folder

    def brought(
        self, other: ArtifactSets, path: Path, key: str | Callable[[Path], str] = "stem"
    ) -> Carried:
        made = {"name": "latents", "fingerprint": {"vae": "0123", "dtype": "float16"}}
        return plan_import(other, path, key=key, **made).execute()  # type: ignore[arg-type]

    def test_each_is_one_artifact(self, files: Path, other: ArtifactSets) -> None:
        import torch

        assert self.brought(other, files).artifacts == 4
        with open_set(other) as there:
            assert set(there) == {"a", "b", "c", "d"}
            assert exactly(there.get("a")["latent"]) == exactly(torch.ones(4, 30, 30).half())
            assert type(there.get("b")) is dict
            assert exactly(there.get("c")) == exactly({"x": np.arange(500), "y": np.ones(2, ">f4")})
            assert exactly(there.get("d")["w"]) == exactly(torch.ones(700).bfloat16())
            status = (files / "sub/b.PTH").stat()
            assert there.metadata("b") == {
                "file": "sub/b.PTH", "size": status.st_size, "mtime_ns": status.st_mtime_ns,
            }  # fmt: skip

    @pytest.mark.parametrize(
        ("rule", "wanted"),
        [
            ("name", {"a.pt", "b.PTH", "c.npz", "d.safetensors"}),
            ("path", {"a.pt", "sub/b.PTH", "c.npz", "sub/d.safetensors"}),
            ("{parent}-{stem}!", {"-a!", "sub-b!", "-c!", "sub-d!"}),
            (lambda path: path.stem.upper(), {"A", "B", "C", "D"}),
        ],
    )
    def test_a_rule_makes_the_keys(
        self, rule: str | Callable[[Path], str], wanted: set[str], files: Path, other: ArtifactSets
    ) -> None:
        self.brought(other, files, rule)
        with open_set(other) as there:
            assert set(there) == wanted

    def test_a_key_of_the_content(self, files: Path, other: ArtifactSets) -> None:
        self.brought(other, files / "a.pt", "content")
        with open_set(other) as there:
            assert set(there) == {compute_key(None, content=files / "a.pt")}

    @pytest.mark.parametrize("rule", ["stm", "", "{}", "{stem.x}", "{suffix}", "plain"])
    def test_what_is_no_rule_is_refused(self, rule: str, files: Path, other: ArtifactSets) -> None:
        with pytest.raises(ConfigError, match="no rule"):
            self.brought(other, files, rule)

    def test_two_files_with_one_key_are_named_before_anything_is_written(
        self, files: Path, other: ArtifactSets
    ) -> None:
        shutil.copy(files / "a.pt", files / "sub/a.pth")
        with pytest.raises(BadKeyError, match=r"files/a\.pt and .*sub/a\.pth would both"):
            self.brought(other, files)
        with pytest.raises(BadKeyError, match="no possible key"):
            self.brought(other, files, lambda _: "x" * 2000)
        assert not other.root.exists()

    def test_changed_files_are_put_again_and_others_not(
        self, files: Path, other: ArtifactSets
    ) -> None:
        self.brought(other, files)
        assert self.brought(other, files) == Carried(kept=4)
        np.savez(files / "c.npz", x=np.arange(3))
        os.utime(files / "a.pt", (1, 1))
        done = self.brought(other, files)
        assert (done.artifacts, done.kept) == (2, 2)
        with open_set(other) as there:
            assert there.get("c")["x"].shape == (3,)

    def test_what_cannot_be_read_is_a_named_problem(
        self, files: Path, other: ArtifactSets, tmp_path: Path
    ) -> None:
        import torch

        class Evil:
            def __reduce__(self) -> tuple[object, ...]:
                return os.mkdir, (str(tmp_path / "harmed"),)

        torch.save(Evil(), files / "evil.pt")
        np.savez(files / "objects.npz", x=np.array([Evil()]))
        data = (files / "a.pt").read_bytes()
        (files / "cut.pt").write_bytes(data[: len(data) // 2])
        (files / "none.npz").write_bytes(b"no zip")
        (files / "cut.safetensors").write_bytes((files / "sub/d.safetensors").read_bytes()[:-1])
        torch.save({"x": torch.ones(3).to_sparse()}, files / "sparse.pt")
        done = self.brought(other, files, "name")
        assert done.artifacts == 4
        names = [Path(each.partition(": ")[0]).name for each in done.problems]
        assert names == [
            "cut.pt", "cut.safetensors", "evil.pt", "none.npz", "objects.npz", "sparse.pt",
        ]  # fmt: skip
        assert "only pickle could load" in done.problems[2]
        assert not (tmp_path / "harmed").exists()
        assert self.brought(other, files, "name").kept == 4

    def test_name_and_fingerprint_are_obligatory_and_not_for_exports(
        self, files: Path, other: ArtifactSets, latents: ArtifactSet, tmp_path: Path
    ) -> None:
        for words in ({}, {"name": "x"}, {"fingerprint": {"vae": 1}}):
            with pytest.raises(ConfigError) as caught:
                plan_import(other, files, **words)
            assert "--set latents --fingerprint '{" in caught.value.hint
        plan_export(latents, tmp_path / "out", form="folder").execute()
        with pytest.raises(ConfigError, match="says itself which set it is: latents/"):
            plan_import(other, tmp_path / "out", name="x", fingerprint={})


def test_room_is_asked_for_before_anything_is_written(
    latents: ArtifactSet, other: ArtifactSets, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fill(latents)
    plan_export(latents, tmp_path / "there", form="folder").execute()
    monkeypatch.setattr(store_room, "free_bytes", lambda _: 20_000)
    with pytest.raises(NoSpaceError):
        plan_export(latents, tmp_path / "out", form="folder").execute()
    with pytest.raises(NoSpaceError):
        plan_import(other, tmp_path / "there").execute()
    assert sorted(os.listdir(tmp_path)) == ["sets", "there"]


def test_progress_is_in_bytes_and_ends_at_the_total(
    latents: ArtifactSet, other: ArtifactSets, tmp_path: Path
) -> None:
    jobs: list[Any] = []

    class Job:
        def __init__(self, label: str, total: int | None, unit: str) -> None:
            self.label, self.total, self.unit, self.done = label, total, unit, 0
            jobs.append(self)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def advance(self, amount: int = 1) -> None:
            self.done += amount

        def describe(self, text: str) -> None:
            pass

    fill(latents)
    plan_export(latents, tmp_path / "out", form="folder").execute(Job)  # type: ignore[arg-type]
    plan_import(other, tmp_path / "out").execute(Job)  # type: ignore[arg-type]
    for job in jobs:
        assert (job.unit, job.done) == ("bytes", job.total)
        assert job.total > 6 * 4096


@pytest.fixture(autouse=True)
def _no_codecs() -> Iterator[None]:
    yield
    forget_codecs()


def test_carrying_is_no_use(
    latents: ArtifactSet, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    """What is due to be evicted stays due."""
    fill(latents, 1)
    used = latents.describe().used_at
    pass_time(100_000)
    plan_export(latents, tmp_path / "out").execute()
    assert latents.describe().used_at == used
    assert time.time() > used.timestamp() + 90_000  # type: ignore[union-attr]
