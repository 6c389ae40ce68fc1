"""Turn the flag on and off for the whole process.

On means: every class of diffusers and transformers that loads something knows the flag, those that
are loaded already and those that come later. Off means that each of them has the very function it
had before. Neither library is imported for it, and both may be absent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from types import ModuleType, TracebackType
from typing import Self

from smartcache.integrations.finder import Finder
from smartcache.integrations.flag import Reach
from smartcache.integrations.wrapping import Wrapping, loaded_modules


class Enabled:
    """One `enable`. As a context manager it ends with the block, and with it only itself."""

    def __init__(self, switch: _Switch, *, always: bool) -> None:
        self.always = always
        self._switch = switch
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        self._switch.turn_on(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._switch.turn_off(self)

    def __repr__(self) -> str:
        return f"smartcache.enable(always={self.always})"


class _Switch:
    """Who has enabled the flag, and what has it. Threads may turn it while others import."""

    def __init__(self) -> None:
        self.forget_threads()
        self._enabled: list[Enabled] = []
        self._unfinished: set[str] = set()
        self._wrapping = Wrapping(self.reach)
        self._finder = Finder(self._wrap)

    def forget_threads(self) -> None:
        """Take a new lock: that of a forked process may be held by a thread it does not have."""
        # Nothing is imported while it is held: another thread may import, and wait for it.
        self._lock = threading.RLock()

    def reach(self) -> Reach:
        """Return which calls are answered out of the store at this moment."""
        enabled = tuple(self._enabled)
        if any(each.always for each in enabled):
            return Reach.EVERYWHERE
        return Reach.ASKED if enabled else Reach.NOWHERE

    def turn_on(self, enabled: Enabled) -> None:
        with self._lock:
            if enabled in self._enabled:
                return
            self._enabled.append(enabled)
            if self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)
                self._unfinished = {name for name, each in loaded_modules() if _is_running(each)}
                for name, module in loaded_modules():
                    # Not yet: the rest of its code may give its classes other functions.
                    if name not in self._unfinished:
                        self._wrapping.wrap(module)
            waiting = sorted(self._unfinished)
        for name in waiting:
            # Begun before the finder was there. This waits for the thread that imports it; if that
            # is this very thread, or waits for it, the module is looked at again with the next one.
            # What an import fails of, its own thread is told.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if waiting:
            self._wrap_unfinished()

    def turn_off(self, *ended: Enabled) -> None:
        """Forget these, all without any; whoever is last puts the libraries' functions back."""
        with self._lock:
            self._enabled = [each for each in self._enabled if ended and each not in ended]
            if self._enabled:
                return
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            self._unfinished = set()
            self._wrapping.restore()

    def _wrap(self, module: ModuleType) -> None:
        with self._lock:
            if self._enabled:
                self._wrapping.wrap(module)
        if self._unfinished:
            self._wrap_unfinished()

    def _wrap_unfinished(self) -> None:
        with self._lock:
            for name in sorted(self._unfinished):
                module = sys.modules.get(name)
                if module is not None and _is_running(module):
                    continue
                self._unfinished.discard(name)
                if module is not None:
                    self._wrapping.wrap(module)


def _is_running(module: ModuleType) -> bool:
    """Say whether the module's code has not run to its end yet."""
    return bool(getattr(vars(module).get("__spec__"), "_initializing", False))


_switch = _Switch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch.forget_threads)


def enable(*, always: bool = False) -> Enabled:
    """Let the classes of diffusers and transformers accept `smart_cache=True` from now on.

    With `always` all their calls are answered out of the store, but those with `smart_cache=False`.
    The result can be used in a `with` statement, which takes this one call back; blocks may nest.
    """
    enabled = Enabled(_switch, always=always)
    _switch.turn_on(enabled)
    return enabled


def disable() -> None:
    """Give diffusers and transformers their own functions back, whoever enabled the flag."""
    _switch.turn_off()
