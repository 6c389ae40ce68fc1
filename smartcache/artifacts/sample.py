"""Artifacts that were asked for and not yet read.

A sample knows the structure of its artifact, and reads a tensor when it is asked for it. It keeps
its pack open: what it stands for can be read as long as it lives, also after eviction and
compaction. Samples and handles are pickled as (set, key, sequence number).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smartcache.artifacts.engine import read
from smartcache.artifacts.engine.engine import Engine, open_engine
from smartcache.artifacts.engine.read import Held
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.values.encode import decode_metadata
from smartcache.errors import (
    ArtifactError,
    ArtifactGoneError,
    ArtifactNotFoundError,
    DamagedArtifactError,
)

if TYPE_CHECKING:
    import numpy as np

    from smartcache.artifacts.engine.records import Meta
    from smartcache.artifacts.values.layout import Node
    from smartcache.artifacts.values.tensors import TensorSpec

_T = TypeVar("_T")


class Sample(Mapping[Any, object]):
    """One artifact, read piece by piece. A mapping if its value is a dict."""

    def __init__(self, engine: Engine, held: Held) -> None:
        self._engine: Engine | None = engine
        self._path = engine.path
        self._read_only = engine.read_only
        self._meta: Meta | None = None
        self._held: Held | None = held
        self.key_bytes = held.key
        self.seq = held.place.seq
        engine.readers[id(self)] = held.key

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.readers.pop(id(self), None)

    @property
    def key(self) -> str:
        """The key of the artifact."""
        return key_text(self.key_bytes)

    def __repr__(self) -> str:
        return f"<Sample {self.key} of {self._path.parent.name}>"

    def __hash__(self) -> int:
        return hash((self._path, self.key_bytes, self.seq))

    def __eq__(self, other: object) -> bool:
        """Say whether it is the same artifact; nothing is read for it."""
        if not isinstance(other, Sample):
            return NotImplemented
        mine = (self._path, self.key_bytes, self.seq)
        return mine == (other._path, other.key_bytes, other.seq)

    def __len__(self) -> int:
        return len(self._fields())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fields())

    def __contains__(self, name: object) -> bool:
        return name in self._fields()

    def __getitem__(self, name: Hashable) -> object:
        """Return one item of the dict, in memory of its own."""
        node = self._fields()[name]  # KeyError as a dict has it
        if node.slot is not None:
            return self._tensor(node.slot)
        if self._meta is None:
            self._meta = self._reading(read.read_meta)
        return node.read(*self._need().layout.opened(self._meta.values), self._tensor)

    def _tensor(self, slot: int) -> object:
        return self._reading(lambda held: read.read_tensor(held, slot))

    def handle(self, name: Hashable) -> Handle:
        """Return a handle of a tensor: its shape and dtype are known, nothing is read."""
        node = self._fields()[name]
        if node.tensor is None:
            message = f"{name!r} of artifact {self.key} is not a tensor"
            raise ArtifactError(message, hint="Read it: sample[name].")
        return Handle(self, name)

    def value(self) -> object:
        """Return the whole value, in memory of its own."""
        return self._reading(read.read_value)[0]

    @property
    def metadata(self) -> object:
        """What was put beside the value; no tensor is read for it."""
        if self._meta is None:
            self._meta = self._reading(read.read_meta)
        return decode_metadata(self._meta.metadata)

    # how

    def _fields(self) -> Mapping[Hashable, Node]:
        fields = self._need().layout.fields
        if fields is None:
            message = f"Artifact {self.key} is not a dict"
            raise ArtifactError(message, hint="Read it: sample.value().")
        return fields

    def _opened(self) -> Engine:
        if self._engine is None:
            folder = SetFolder.read(self._path, read_only=self._read_only)
            self._engine = open_engine(folder, read_only=self._read_only)
            weakref.finalize(self, Engine.release_later, self._engine)
            self._engine.readers[id(self)] = self.key_bytes
        return self._engine

    def _need(self) -> Held:
        if self._held is None:
            engine = self._opened()
            try:
                found = read.hold(engine, [self.key_bytes])[0]
            except ArtifactNotFoundError:
                found = None
            if found is None or found.place.seq != self.seq:
                what = "is gone" if found is None else "was replaced"
                message = f"Artifact {self.key} of {self._path.parent.name} {what}"
                raise ArtifactGoneError(message, keys=(self.key,))
            self._held = found
        return self._held

    def _reading(self, act: Callable[[Held], _T]) -> _T:
        """Read something; damage is read a second time before the artifact counts as missing."""
        held = self._need()
        try:
            return act(held)
        except DamagedArtifactError as error:
            if not read.is_damaged(held):
                return act(held)
            raise read.settle(self._opened(), held.key, held.place, error) from error

    def __reduce__(self) -> tuple[object, ...]:
        return _sample, (self._path, self.key_bytes, self.seq, self._read_only)


class Handle:
    """One tensor of an artifact: what it is, and the way to read it."""

    __slots__ = ("_name", "_sample")

    def __init__(self, sample: Sample, name: Hashable) -> None:
        self._sample = sample
        self._name = name

    @property
    def spec(self) -> TensorSpec:
        """What the tensor is: kind, dtype, shape, bytes."""
        spec: TensorSpec = self._node.tensor  # type: ignore[assignment]
        return spec

    @property
    def _node(self) -> Node:
        return self._sample._fields()[self._name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor; nothing is read for it."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """The name of the dtype of the tensor; nothing is read for it."""
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor; nothing is read for it."""
        return self.spec.nbytes

    def tensor(self) -> object:
        """Return the tensor, in memory of its own."""
        return self._sample[self._name]

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a read-only view of the tensor where it lies, in a mapping of its pack.

        The artifact is verified first, if it was not before. The view stays good as long as it is
        held; it must not outlive a pack that somebody truncates, which smartcache never does.
        """
        slot = self._node.slot
        spec = self.spec
        if slot is None:
            import numpy as np

            value: Any = self.tensor()
            return spec.view(np.array(spec.rows(value.reshape((1, *spec.shape)))[0]))
        return spec.view(self._sample._reading(lambda held: read.view_tensor(held, slot)))  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<Handle {self.dtype} {list(self.shape)} of {self._sample!r}>"

    def __reduce__(self) -> tuple[object, ...]:
        return Handle, (self._sample, self._name)


def _sample(path: Path, key: bytes, seq: int, read_only: bool) -> Sample:  # noqa: FBT001
    """Return the sample that was pickled; the set is opened when it is first read."""
    sample = Sample.__new__(Sample)
    sample._engine = sample._held = sample._meta = None  # noqa: SLF001
    sample._path, sample.key_bytes, sample.seq = path, key, seq  # noqa: SLF001
    sample._read_only = read_only  # noqa: SLF001
    return sample
