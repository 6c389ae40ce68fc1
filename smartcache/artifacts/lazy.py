"""Artifacts that were asked for and not yet read.

A sample knows the structure of its artifact, and reads a tensor when it is asked for it. It keeps
the packs open that it may need: what it stands for can be read as long as it lives, also after
eviction and compaction. Samples and handles are pickled as (set, key, sequence number).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smartcache.artifacts.keys import key_text
from smartcache.artifacts.layouts import Opened
from smartcache.artifacts.located import Located
from smartcache.artifacts.packs import OpenPack
from smartcache.artifacts.reading import (
    Packs,
    persistently,
    read_record,
    read_tensor,
    read_through,
    read_whole,
)
from smartcache.artifacts.records import HEADER_BYTES, ArtifactPayload, place
from smartcache.artifacts.tensors import TensorSpec
from smartcache.artifacts.writing import decode_metadata
from smartcache.errors import (
    ArtifactError,
    ArtifactGoneError,
    ArtifactNotFoundError,
    SetFormatError,
)

if TYPE_CHECKING:
    import numpy as np

    from smartcache.artifacts.engine import SetEngine


_T = TypeVar("_T")
_TRIES = 5
"""How often an artifact is looked up anew that compaction has moved away."""


class Sample(Mapping[Any, object]):
    """One artifact, read piece by piece. A mapping if its value is a dict."""

    def __init__(self, engine: SetEngine, found: Located) -> None:
        self._engine: SetEngine | None = engine
        self._path = engine.path
        self._payload: ArtifactPayload | None = None
        self._small: Opened | None = None
        self.key_bytes = found.key
        self.seq = found.seq
        self._found: Located | None
        self._found, self._packs = _held(engine, found)
        engine.readers[id(self)] = found.key

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
            return Handle(self, node.slot).tensor()

        found = self._need()
        quick = found.quick  # once: other threads let go of it
        if quick is not None and quick.values is not None:
            value = quick.values[name]
            return value.copy() if type(value) is list else value
        if self._small is None:
            self._small = found.layout.opened(self._record().inline)
        return node.read(*self._small, self._tensor)

    def _tensor(self, slot: int) -> object:
        return Handle(self, slot).tensor()

    def handle(self, name: Hashable) -> Handle:
        """Return a handle of a tensor: its shape and dtype are known, nothing is read."""
        node = self._fields()[name]
        if node.tensor is None:
            message = f"{name!r} of artifact {self.key} is not a tensor"
            raise ArtifactError(message, hint="Read it: sample[name].")
        return Handle(self, node.slot, name)

    def value(self) -> object:
        """Return the whole value, in memory of its own."""
        return self._reading(read_whole)

    @property
    def metadata(self) -> object:
        """What was put beside the value; no tensor is read for it."""
        return decode_metadata(self._record().metadata)

    # how

    def _fields(self) -> Mapping[Hashable, Any]:
        fields = self._need().layout.fields
        if fields is None:
            message = f"Artifact {self.key} is not a dict"
            raise ArtifactError(message, hint="Read it: sample.value().")
        return fields

    def _record(self) -> ArtifactPayload:
        if self._payload is None:
            self._payload = self._reading(read_record)
        return self._payload

    def _opened(self) -> SetEngine:
        if self._engine is None:
            from smartcache.artifacts.engine import open_engine
            from smartcache.artifacts.setfolder import SetFolder

            self._engine = open_engine(SetFolder.read(self._path))
            weakref.finalize(self, type(self._engine).release_later, self._engine)
            self._engine.readers[id(self)] = self.key_bytes
        return self._engine

    def _need(self) -> Located:
        if self._found is None:
            found = self._opened().find(self.key_bytes)
            if found is None or found.seq != self.seq:
                raise self._gone()
            try:
                self._found, self._packs = _held(self._opened(), found)
            except ArtifactNotFoundError:
                raise self._gone() from None
        return self._found

    def _gone(self) -> ArtifactGoneError:
        what = "is gone" if self._opened().find(self.key_bytes) is None else "was replaced"
        message = f"Artifact {self.key} of {self._path.parent.name} {what}"
        return ArtifactGoneError(message, keys=(self.key,))

    def _reading(self, read: Callable[[Packs, Located], _T]) -> _T:
        """Read from the packs that were open when this sample was made, wherever they are now."""

        def same(found: Located) -> _T:
            if found.seq != self.seq:
                raise self._gone()
            return read(self._packs, found)

        found = self._need()
        try:
            return persistently(self._opened(), found, same)
        except ArtifactGoneError:
            raise
        except ArtifactNotFoundError:
            raise self._gone() from None

    def __reduce__(self) -> tuple[object, ...]:
        return _sample, (self._path, self.key_bytes, self.seq)


class Handle:
    """One tensor of an artifact: what it is, and the way to read it."""

    __slots__ = ("_name", "_sample", "_slot")

    def __init__(self, sample: Sample, slot: int | None, name: Hashable = None) -> None:
        self._sample = sample
        self._slot = slot
        self._name = name

    @property
    def spec(self) -> TensorSpec:
        """What the tensor is: kind, dtype, shape, bytes."""
        layout = self._sample._need().layout  # noqa: SLF001 - two halves of one thing
        if self._slot is not None:
            return layout.tensors[self._slot]
        spec: TensorSpec = (layout.fields or {})[self._name].tensor  # type: ignore[assignment]
        return spec

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
        if self._slot is None:
            return self._sample[self._name]
        return self._sample._reading(self._read)  # noqa: SLF001

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a read-only view of the tensor where it lies, in a mapping of its pack.

        The artifact is verified first, if it was not before. The view stays good as long as it is
        held; it must not outlive a pack that somebody truncates, which smartcache never does.
        """
        return self._sample._reading(self._view)  # noqa: SLF001

    def _read(self, packs: Packs, found: Located) -> object:
        return read_tensor(packs, found, self._slot or 0)

    def _view(self, packs: Packs, found: Located) -> np.ndarray[Any, Any]:
        if self._slot is None:
            import numpy as np

            value: Any = self.tensor()
            return self.spec.view(np.array(self.spec.rows(value.reshape((1, *self.shape)))[0]))
        if not found.is_verified:
            read_through(packs, found)
        number, offset = place(found.places[self._slot])
        spec = found.layout.tensors[self._slot]
        return spec.view(packs[number].view(offset + HEADER_BYTES, spec.nbytes))

    def __repr__(self) -> str:
        return f"<Handle {self.dtype} {list(self.shape)} of {self._sample!r}>"

    def __reduce__(self) -> tuple[object, ...]:
        return Handle, (self._sample, self._slot, self._name)


class _HeldPacks:
    """The packs of one artifact, open from now on: its bytes stay as long as this object."""

    def __init__(self, engine: SetEngine, found: Located) -> None:
        self._engine = engine
        self._held: dict[int, OpenPack] = {}
        quick = found.quick
        if quick is not None:
            self._held = {pack.number: pack for pack in quick.packs}
            self.is_whole = True
            return
        numbers = {number for number, _, _ in found.ranges()}
        for number in numbers:
            with suppress(OSError, SetFormatError):
                self._held[number] = engine.packs[number]
        self.is_whole = len(self._held) == len(numbers)

    def __getitem__(self, number: int, /) -> OpenPack:
        return self._held.get(number) or self._engine.packs[number]


def _held(engine: SetEngine, found: Located) -> tuple[Located, _HeldPacks]:
    """Open the packs of an artifact, wherever compaction has moved it meanwhile.

    ArtifactNotFoundError if it is gone. A pack that is lost is no matter of this: reading tells.
    """
    packs = _HeldPacks(engine, found)
    for _ in range(_TRIES):
        if packs.is_whole:
            break
        again = engine.look_again(found)
        if again is None or again.seq != found.seq:
            message = f"{engine.folder.name} has no artifact {key_text(found.key)} any more"
            raise ArtifactNotFoundError(message, keys=(key_text(found.key),))
        if again.ranges() == found.ranges():
            break
        found, packs = again, _HeldPacks(engine, again)
    return found, packs


def _sample(path: Path, key: bytes, seq: int) -> Sample:
    """Return the sample that was pickled; the set is opened when it is first read."""
    sample = Sample.__new__(Sample)
    sample._engine = sample._found = sample._payload = sample._small = None  # noqa: SLF001
    sample._path, sample.key_bytes, sample.seq = path, key, seq  # noqa: SLF001
    return sample
