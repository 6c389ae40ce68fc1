"""A real dataset, driven at random, and a model beside it that computes everything anew.

Files are added, edited, moved, deleted and put back, settings change, processes build together and
are killed. After every build each item reads back as what its encoder would make of it now, and
the encoder was called exactly for what was never encoded before, or was cleaned away since.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from smartcache.cache import SmartCache
from smartcache.errors import SourcesVanishedError
from smartcache.training import Dataset
from smartcache.training import look as look_module
from tests.processes.children import Child
from tests.processes.killing import in_child, was_killed
from tests.training.builder import Clock, World, image, value_of

IN_FLIGHT = 6
"""Batches that a process has claimed and not written, at most."""
SIZES = ((64, 64), (64, 128))
PATHS = ("a", "b", "c", "d", "sub/a", "sub/b", "sub/more/a")
BUCKETS = {None: None, "one": "64x64", "two": "64x64 64x128"}

paths = st.sampled_from(PATHS)
contents = st.integers(0, 5)
captions = st.sampled_from(("", "a cat", "a dog", " a dog\n", "two cats"))


class Key(NamedTuple):
    """What tells one encoding from another."""

    output: str
    content: object
    bucket: tuple[int, int] | None
    variation: int
    version: int


def content_of(number: int) -> bytes:
    """Return an image; those of different numbers differ in length, so that any look tells."""
    return image(f"image {number}" * (number + 1), SIZES[number % 2])


class DatasetMachine(RuleBasedStateMachine):
    def __init__(self, directory: Path, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.clock.ahead = 0
        folder = tempfile.mkdtemp(dir=directory)
        self.world = World(folder=folder, texts=True)
        self.world.photos.mkdir()
        self.cache = SmartCache(self.world.store)
        self.images: dict[str, int] = {}
        self.captions: dict[str, str] = {}
        self.known: set[Key] = set()
        """What was encoded and not cleaned away."""
        self.counted = 0
        """Encodes that the log had when it was last looked at."""
        self.dataset: Dataset | None = None

    def teardown(self) -> None:
        if self.dataset is not None:
            self.dataset.close()
        self.cache.close()
        shutil.rmtree(self.world.folder)

    # the model

    def wanted(self) -> set[Key]:
        """Return what there is to be encoded, of what is in the files now."""
        found = set()
        for path in self.images:
            found |= set(self.keys_of(path))
        return found

    def keys_of(self, path: str) -> Iterator[Key]:
        number = self.images[path]
        for variation in range(self.world.variations):
            yield Key("latent", number, self.bucket(number), variation, self.world.version)
        caption = self.captions.get(path)
        yield Key("text", None if caption is None else caption.strip(), None, 0, self.world.version)

    def bucket(self, number: int) -> tuple[int, int] | None:
        if self.world.buckets is None:
            return None
        return SIZES[number % 2] if "64x128" in self.world.buckets else SIZES[0]

    def encodes(self) -> int:
        """Return how many encodes there were since this was last asked."""
        total = self.world.encodes().total()
        new, self.counted = total - self.counted, total
        return new

    def opened(self) -> Dataset:
        if self.dataset is None:
            self.dataset = self.world.open(self.cache)
        return self.dataset

    def close(self) -> None:
        if self.dataset is not None:
            self.dataset.close()
        self.dataset = None

    def agrees(self, dataset: Dataset) -> None:
        """Compare every item with what its encoder would make of it."""
        assert len(dataset) == len(self.images)
        assert dataset.failed == []
        everything = range(len(dataset))
        for variation in range(self.world.variations):
            batch = dataset.batch(everything, variations=variation)
            names = [name.removesuffix(".png") for name in batch["name"]]
            assert sorted(names) == sorted(self.images)
            for at, name in enumerate(names):
                number, caption = self.images[name], self.captions.get(name)
                latent = value_of(
                    content_of(number), bucket=self.bucket(number), variation=variation,
                    version=self.world.version,
                )  # fmt: skip
                assert np.array_equal(batch["latent"][at], latent), name
                wanted = None if caption is None else caption.strip()
                text = value_of(wanted, version=self.world.version)
                assert np.array_equal(batch["text"][at], text), name

    # what happens to files

    def path(self, name: str, suffix: str = ".png") -> Path:
        path = self.world.photos / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @initialize(first=contents, caption=captions)
    def begin(self, first: int, caption: str) -> None:
        self.add("a", first, caption)
        self.add("b", 1, None)

    @rule(name=paths, number=contents, caption=st.none() | captions)
    def add(self, name: str, number: int, caption: str | None) -> None:
        """Add an image, or edit it, and its caption."""
        self.path(name).write_bytes(content_of(number))
        self.images[name] = number
        if caption is not None:
            self.edit_caption(name, caption)

    @rule(name=paths, caption=captions)
    def edit_caption(self, name: str, caption: str) -> None:
        self.path(name, ".txt").write_text(caption, "utf-8")
        self.captions[name] = caption

    @precondition(lambda self: self.captions)
    @rule(data=st.data())
    def delete_caption(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.captions)))
        self.path(name, ".txt").unlink()
        del self.captions[name]

    @rule(data=st.data(), number=contents)
    def edit_image(self, data: st.DataObject, number: int) -> None:
        self.add(self.drawn(data), number, None)

    def drawn(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.images)))

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        os.utime(self.path(self.drawn(data)))

    @rule(data=st.data(), new=paths, with_caption=st.booleans())
    def move(self, data: st.DataObject, new: str, with_caption: bool) -> None:
        """Rename an image, or move it to another folder; what was there is replaced."""
        old = self.drawn(data)
        if old == new:
            return
        self.path(old).rename(self.path(new))
        self.images[new] = self.images.pop(old)
        if with_caption and old in self.captions:
            self.path(old, ".txt").rename(self.path(new, ".txt"))
            self.captions[new] = self.captions.pop(old)

    @rule(data=st.data(), new=paths)
    def duplicate(self, data: st.DataObject, new: str) -> None:
        old = self.drawn(data)
        if old != new:
            shutil.copy2(self.path(old), self.path(new))
            self.images[new] = self.images[old]

    @precondition(lambda self: len(self.images) > 1)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = self.drawn(data)
        self.path(name).unlink()
        del self.images[name]

    # what happens to the dataset

    @rule(
        version=st.integers(0, 1), buckets=st.sampled_from(list(BUCKETS)),
        variations=st.integers(1, 3), batch=st.integers(1, 3),
    )  # fmt: skip
    def change_settings(
        self, version: int, buckets: str | None, variations: int, batch: int
    ) -> None:
        self.close()
        self.world = self.world.but(
            version=version, buckets=BUCKETS[buckets], variations=variations, batch=batch
        )

    @rule()
    def reopen(self) -> None:
        self.close()
        self.cache.close()
        self.cache = SmartCache(self.world.store)

    @rule()
    def time_passes(self) -> None:
        self.clock.ahead = 60

    @rule()
    def look(self) -> None:
        plan = self.opened().plan()
        assert plan.items == len(self.images)
        todo = sum(sum(reasons.values()) for reasons in plan.encode.values())
        assert todo == len(self.wanted() - self.known)
        assert plan.is_empty == (todo == 0)

    @rule()
    def build(self) -> None:
        dataset, wanted = self.opened(), self.wanted()
        report = dataset.build()
        todo = len(wanted - self.known)
        assert self.encodes() == sum(report.encoded.values()) == todo
        assert sum(report.elsewhere.values()) == 0
        latents = len(self.images) * self.world.variations
        for output, total in (("latent", latents), ("text", len(self.images))):
            counts = report.encoded, report.reused, report.shared
            assert sum(each[output] for each in counts) == total
        self.known |= wanted
        self.agrees(dataset)

    @rule()
    def two_build(self) -> None:
        """Another process builds at the same time."""
        self.opened()
        wanted, todo = self.wanted(), len(self.wanted() - self.known)
        with Child(self.build_elsewhere) as child:
            mine = self.opened().build()
            theirs = child.result()
        assert self.encodes() == sum(mine.encoded.values()) + theirs == todo
        self.known |= wanted
        self.agrees(self.opened())

    def build_elsewhere(self, **how: Any) -> int:  # noqa: ANN401 - what the encoders do
        with SmartCache(self.world.store) as cache, self.world.open(cache, **how) as dataset:
            report = dataset.build()
            self.agrees(dataset)
            return sum(report.encoded.values())

    @rule(when=st.integers(1, 8))
    def crash(self, when: int) -> None:
        """Another process builds, and is killed in the middle of it."""
        self.close()
        wanted, before = self.wanted(), set(self.known)

        def die() -> None:
            self.build_elsewhere(die_at=when)

        is_killed = was_killed(in_child(die))
        dataset = self.opened()
        dataset.plan()
        there = wanted - self.missing(dataset)
        assert there >= wanted & before, "lost what was there"
        begun = self.encodes()
        written = len(there - before)
        assert begun - IN_FLIGHT * self.world.batch <= written <= begun
        assert is_killed or there == wanted
        self.known |= there

    def missing(self, dataset: Dataset) -> set[Key]:
        found = set()
        for output in dataset.outputs.values():
            for number in output.missing.tolist():
                item, variation = divmod(number, output.variations)
                name = dataset.listing.name(item).removesuffix(".png")
                found |= {
                    key
                    for key in self.keys_of(name)
                    if (key.output, key.variation) == (output.name, variation)
                }
        return found

    @rule()
    def clean(self) -> None:
        dataset = self.opened()
        try:
            plan = dataset.clean()
        except SourcesVanishedError:  # a folder has no files any more
            plan = dataset.clean(force=True)
        # The output of the empty text is always wanted.
        empty = Key("text", "", None, 0, self.world.version)
        old = self.known - self.wanted() - {empty}
        assert plan.artifacts == len(old)
        result = plan.execute()
        assert (result.artifacts, result.problems) == (len(old), ())
        self.known -= old
        assert dataset.clean().is_empty
        assert self.missing(dataset) == self.wanted() - self.known


@pytest.mark.timeout(300)
def test_a_dataset_behaves_like_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(look_module, "time", clock)
    many = settings(max_examples=400, stateful_step_count=60)
    few = settings(max_examples=12, stateful_step_count=30)
    run_state_machine_as_test(
        lambda: DatasetMachine(tmp_path, clock),  # type: ignore[arg-type]
        settings=many if soak else few,
    )
