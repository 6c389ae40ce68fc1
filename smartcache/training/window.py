"""A window over a dataset that does not fit on the disk: encoded just before it is used.

    with photos.window(batches, steps=50) as window:
        for batch in window: ...

A thread encodes what the next steps need, and what no step of the window needs any more is removed.
The order is that of the batches; nothing else of a dataset is encoded.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Self

from smartcache.errors import ConfigError
from smartcache.training.build import Build

if TYPE_CHECKING:
    from smartcache.training.batches import Batches, Step
    from smartcache.training.dataset import Dataset

_SLICE: Final = 0.5
"""Seconds of waiting after which Ctrl-C is heard."""


class Window:
    """Batches whose items are encoded some steps ahead, and removed behind them."""

    def __init__(self, dataset: Dataset, batches: Batches, steps: int) -> None:
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"steps is a number from 1 on, not {steps!r}")
        if dataset not in batches.datasets:
            raise ConfigError(f"These are no batches of {dataset.name}")
        self._dataset = dataset
        self._batches = batches
        self._steps = steps
        self._number = batches.datasets.index(dataset)
        self._changed = threading.Condition()
        self._ready = 0
        """Steps that are encoded."""
        self._taken = 0
        """Steps that were handed out."""
        self._keys: list[list[tuple[str, str]]] = []
        """Of each step: outputs and keys that it needs."""
        self._wanted: Counter[tuple[str, str]] = Counter()
        """How many steps of the window need each."""
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the encoding; waits for the batch that is being encoded."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for output in self._dataset.outputs.values():
            output.is_windowed = False
            output.look()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go through what is left of the epoch."""
        steps = list(self._batches.steps())
        self._ready = self._taken = 0
        self._keys, self._wanted = [], Counter()
        for output in self._dataset.outputs.values():
            output.is_windowed = True
        self._thread = threading.Thread(
            target=self._encode, args=(steps,), name="smartcache-window", daemon=True
        )
        self._thread.start()
        for number, step in enumerate(steps):
            with self._changed:
                while self._ready <= number and self._error is None:
                    self._changed.wait(_SLICE)
                if self._ready <= number and self._error is not None:
                    raise self._error
            batch = self._batches.read(step)
            self._batches.advance(step)
            yield batch
            self._drop(number)

    def _drop(self, number: int) -> None:
        """Remove what only this step needed."""
        gone: dict[str, list[str]] = {}
        with self._changed:
            self._taken = number + 1
            self._changed.notify_all()
            for each in self._keys[number]:
                self._wanted[each] -= 1
                if not self._wanted[each]:
                    del self._wanted[each]
                    gone.setdefault(each[0], []).append(each[1])
            self._keys[number] = []
        for name, keys in gone.items():
            self._dataset.outputs[name].set.delete_many(keys)

    def _encode(self, steps: list[Step]) -> None:
        """Encode what the next steps need, one after the other; in a thread of its own."""
        try:
            for number, step in enumerate(steps):
                with self._changed:
                    while number >= self._taken + self._steps and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed:
                        return
                    numbers = self._needed(step)
                    keys = [
                        (name, self._dataset.outputs[name].key(each))
                        for name, some in numbers.items()
                        for each in some
                    ]
                    self._keys.append(list(dict.fromkeys(keys)))
                    self._wanted.update(self._keys[-1])
                Build(self._dataset, on_error="raise", before=self._dataset.before).run(numbers)
                with self._changed:
                    self._ready = number + 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised where the step is asked for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _needed(self, step: Step) -> dict[str, list[int]]:
        """Return what a step needs of each output of this dataset."""
        return self._batches.numbers_of(step).get(self._number, {})
