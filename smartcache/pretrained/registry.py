"""Which components are in memory to be shared, and who holds them.

The registry keeps nothing alive: when the last pipeline that uses a component is gone, so is the
component, and its entry with it. An entry is handed out only while its object is as it was loaded.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smartcache.pretrained.guards import OF_MODELS, guard, lift
from smartcache.pretrained.mapped import MappedFiles
from smartcache.pretrained.state import State, describe, have_equal_values, size_of
from smartcache.sizes import format_size

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """What must be equal for two components to be one object, but dtype and device."""

    content: str
    """The digest of class, config and weights."""
    cls: str
    arguments: str
    """How it was loaded, in canonical form."""
    number: int = 0
    """Which of several equal components of one pipeline: they stay as many objects."""


@dataclass(frozen=True, slots=True)
class Request:
    """A key with what was said about dtype and device; equal requests give equal objects."""

    key: Key
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Holder:
    """Who uses a component: a pipeline, or whoever asked for the model itself."""

    source: str
    """The repo or folder."""
    cls: str
    component: str
    """Its name in the pipeline; the subfolder of a model that was loaded alone."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.source} ({self.cls}{'.' if self.component else ''}{self.component})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedComponent:
    """A component in memory that may be, or is, shared."""

    cls: str
    digest: str
    """Of its class, config and weights."""
    dtype: str
    device: str
    size: int
    """Bytes in memory."""
    is_changed: bool = False
    """Whether it is not as it was loaded: its holders keep it, nobody else gets it."""
    holders: tuple[Holder, ...]

    @property
    def saved_size(self) -> int:
        """The bytes that would be in memory besides, if nothing were shared."""
        return self.size * max(0, len(self.holders) - 1)

    def __str__(self) -> str:
        """Return one line for a person."""
        saved = f", saves {format_size(self.saved_size)}" if self.saved_size else ""
        used = ", ".join(map(str, self.holders)) or "nobody"
        changed = ", changed" if self.is_changed else ""
        about = f"{self.cls} {self.digest[:12]} {self.dtype} on {self.device}{changed}"
        return f"{about}, {format_size(self.size)}{saved}: {used}"


@dataclass(slots=True, eq=False)
class Entry:
    """One object that is shared."""

    key: Key
    state: State
    files: MappedFiles | None
    """What it was loaded from; None: none of its weights can lie in a mapping of a file."""
    _module: weakref.ref[torch.nn.Module]
    requests: set[Request] = field(default_factory=set)
    is_offered: bool = True
    """Whether it is as it was loaded, as far as anybody knows: others may get it too."""
    _holders: list[tuple[weakref.ref[object], Holder]] = field(default_factory=list)

    @property
    def module(self) -> torch.nn.Module | None:
        """The object; None when nobody holds it any more."""
        return self._module()

    def hold(self, by: object, holder: Holder) -> None:
        """Note that a pipeline, or the model itself for whoever asked for it, uses the object."""
        if (id(by), holder) not in {(id(ref()), each) for ref, each in self._holders}:
            self._holders.append((weakref.ref(by), holder))

    def release(self, by: object, component: str) -> None:
        """Note that a pipeline uses the object under this name no more."""
        self._holders = [
            each for each in self._holders if each[0]() is not by or each[1].component != component
        ]

    def users(self) -> list[tuple[object, Holder]]:
        """Return who uses the object now: pipelines that live and still have it."""
        module = self.module
        found = [(ref(), holder) for ref, holder in self._holders]
        return [
            (user, holder)
            for user, holder in found
            if user is not None
            and (user is module or getattr(user, holder.component, None) is module)
        ]


class Registry:
    """The entries of this process."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._reopen()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reopen)

    def _reopen(self) -> None:
        """Begin with an open lock; in a forked child too, where no thread is that could open it."""
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Entry]:
        """Go through the entries whose objects live."""
        with self._lock:
            self._entries = [each for each in self._entries if each.module is not None]
            return iter(list(self._entries))

    def find(self, request: Request) -> torch.nn.Module | None:
        """Return the object for a request, if there is one and it is as it was loaded."""
        for entry in self:
            if request in entry.requests and self._is_as_loaded(entry):
                return entry.module
        return None

    def add(
        self, request: Request, module: torch.nn.Module, folder: Path | None = None
    ) -> torch.nn.Module:
        """Return the object to use for a request: the equal one that is here, or else this one.

        `folder` is where it was loaded from. A module of which the weights are elsewhere, or that
        cannot be looked at, is not shared.
        """
        guard(module, OF_MODELS, self.shared_names)
        state = _state(module)
        if state is None or not state.is_whole:
            _log.debug("%s cannot be shared: not all of it is in memory", type(module).__name__)
            lift(module)
            return module
        with self._lock:
            for entry in self:
                is_like = entry.key == request.key and entry.state.is_like(state)
                other = entry.module if is_like and self._is_as_loaded(entry) else None
                if other is not None and have_equal_values(module, other):
                    entry.requests.add(request)
                    return other
            try:
                files = _mapped(module, folder)
            except OSError as error:  # EMFILE, or a file that is gone
                _log.debug("%s cannot be shared: %s", type(module).__name__, error)
                lift(module)
                return module
            found = Entry(request.key, state, files, weakref.ref(module), {request})
            self._entries.append(found)
        return module

    def entry_of(self, module: object) -> Entry | None:
        """Return the entry of an object."""
        found = (each for each in self if each.module is module)
        return None if module is None else next(found, None)

    def forget(self, module: object) -> None:
        """Forget an object, if it is known; whoever holds it keeps it, for himself."""
        entry = self.entry_of(module)
        if entry is not None:
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Forget an entry."""
        with self._lock:
            self._entries = [each for each in self._entries if each is not entry]
        module = entry.module
        if module is not None:
            lift(module)

    def shared_names(self, owner: object) -> list[str]:
        """Return what a pipeline, or a model, shares with others now or when they ask for it.

        What was changed and has no other user is its own again.
        """
        names: set[str] = set()
        for entry in self:
            users = entry.users()
            if entry.is_offered or len(users) > 1:
                mine = (each for user, each in users if owner is user or owner is entry.module)
                names.update(each.component or each.cls for each in mine)
        return sorted(names)

    def clear(self) -> None:
        """Forget everything."""
        for entry in self:
            self.drop(entry)

    def _is_as_loaded(self, entry: Entry) -> bool:
        """Say whether an object may be handed out; one that was changed never again."""
        module = entry.module
        if not entry.is_offered or module is None:
            return False
        changed = _difference(entry, module)
        if changed:
            _log.debug("%s is not offered any more: %s", type(module).__name__, changed)
            entry.is_offered = False
        return entry.is_offered


def _difference(entry: Entry, module: torch.nn.Module) -> str:
    if entry.files is not None and not entry.files.are_unchanged():
        return "the files that it was loaded from"
    state = _state(module)
    return "it cannot be looked at" if state is None else entry.state.difference(state)


def _mapped(module: torch.nn.Module, folder: Path | None) -> MappedFiles | None:
    """Return the files that weights may be mapped from, open until the module is gone."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    if folder is None or all(each.device.type != "cpu" for each in tensors):
        return None
    files = MappedFiles(folder)
    weakref.finalize(module, files.close)
    return files


def _state(module: torch.nn.Module) -> State | None:
    """Return the state of a module; None if its tensors cannot be looked at.

    Those of quantising libraries may raise anything when a part of them is asked for.
    """
    try:
        return describe(module)
    except Exception:  # noqa: BLE001
        _log.debug("%s cannot be looked at", type(module).__name__, exc_info=True)
        return None


registry = Registry()


def components() -> list[SharedComponent]:
    """Return the components in memory that `share=True` loaded, and who uses each of them.

    The largest come first. `sum(each.saved_size for each in components())` is what sharing saves.
    """
    entries = ((entry.module, entry) for entry in registry)
    found = [_shown(module, entry) for module, entry in entries if module is not None]
    return sorted(found, key=lambda each: (-each.size, each.cls, each.digest))


def _shown(module: torch.nn.Module, entry: Entry) -> SharedComponent:
    tensors = [*module.parameters(), *module.buffers()]
    dtypes = {str(each.dtype) for each in tensors if each.is_floating_point()}
    return SharedComponent(
        cls=type(module).__name__,
        digest=entry.key.content,
        dtype="+".join(sorted(each.removeprefix("torch.") for each in dtypes)),
        device="+".join(sorted({str(each.device) for each in tensors})),
        size=size_of(module),
        is_changed=not entry.is_offered or bool(_difference(entry, module)),
        holders=tuple(holder for _, holder in entry.users()),
    )
