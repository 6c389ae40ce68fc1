"""The flag `smart_cache=True` in the libraries' own functions: opt-in, and taken back wholly.

    with smartcache.enable():
        pipeline = DiffusionPipeline.from_pretrained("org/name", smart_cache=True)

On means: every class of diffusers and transformers that loads something knows the flag, those that
are loaded already and those that come later. Off means that each of them has the very function it
had before. Neither library is imported for it, and both may be absent. And every download that this
process makes through huggingface_hub is answered out of the store, whoever makes it.

What is ours is taken out of the arguments, the rest is handed on: a call without the flag does what
the library's function does and nothing else. A copy of such a function that outlives `disable`
(some code keeps the function, or copies it to a class of its own) is from then on the library's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Self, cast

LIBRARIES = ("diffusers", "transformers")
DOWNLOADS = "huggingface_hub.file_download"
"""The module in which all downloads meet."""
FLAG = "smart_cache"
SHARE = "smart_cache_share"
MAPPING = "cache_mapping"
SINGLE_FILE = "from_single_file"
NAMES = ("from_pretrained", SINGLE_FILE)
"""The functions of the libraries that get the flag."""
_COPIED = "_Base"
"""The bases of transformers' automatic classes, whose functions are copied to other classes, where
nothing could take the flag back: they are left alone, and what inherits from them gets it."""
_DUMMY = "DummyObject"
"""The metaclass of what stands in for a class that lacks its backend: it says so by itself."""


def enable(*, always: bool = False) -> Enabled:
    """Serve every download of huggingface_hub in this process out of the store from now on.

    And let the classes of diffusers and transformers accept `smart_cache=True`; with `always` all
    their calls count as such, but those with `smart_cache=False`. The result can be used in a
    `with` statement, which takes this one call back; blocks may nest.
    """
    enabled = Enabled(always=always)
    _switch.turn_on(enabled)
    return enabled


def disable() -> None:
    """Give huggingface_hub and the libraries their own functions back, whoever called `enable`."""
    _switch.turn_off()


class Enabled:
    """One `enable`. As a context manager it ends with the block, and with it only itself."""

    def __init__(self, *, always: bool) -> None:
        self.always = always
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        _switch.turn_on(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            _switch.turn_off(self)

    def __repr__(self) -> str:
        return f"smartcache.enable(always={self.always})"


class _Switch:
    """Who has enabled the flag, and what has it. Threads may turn it while others import."""

    def __init__(self) -> None:
        self.forget_threads()
        self.enabled: tuple[Enabled, ...] = ()
        self._unfinished: set[str] = set()
        self._finder = _Finder(self._loaded)
        self._changes: dict[tuple[int, str], tuple[type, object, object]] = {}
        """By class and name: what the class had, None if it only inherited, and what it has."""
        self._answering: contextlib.ExitStack | None = None
        """While all downloads are answered."""

    def forget_threads(self) -> None:
        """Take a new lock: that of a forked process may be held by a thread it does not have."""
        # Nothing is imported while it is held: another thread may import, and wait for it.
        self._lock = threading.RLock()

    def turn_on(self, enabled: Enabled) -> None:
        with self._lock:
            if enabled in self.enabled:
                return
            self.enabled = (*self.enabled, enabled)
            if self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)
                loaded = {
                    name: module
                    for name, module in list(sys.modules.items())
                    if _is_library(name) and isinstance(module, ModuleType)
                }
                # Not yet: the rest of its code may give its classes other functions.
                self._unfinished = {name for name in loaded if _is_running(loaded[name])}
                for name, module in loaded.items():
                    if name not in self._unfinished:
                        self._wrap(module)
            waiting = sorted(self._unfinished)
        for name in waiting:
            # Begun before the finder was there. This waits for the thread that imports it; if that
            # is this very thread, or waits for it, the module is looked at again with the next one.
            # What an import fails of, its own thread is told.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        self._wrap_unfinished()
        downloads = sys.modules.get(DOWNLOADS)
        if downloads is not None and not _is_running(downloads):
            self._answer()

    def _answer(self) -> None:
        """Let every download be answered, now that huggingface_hub's module of them is loaded."""
        from smartcache.functions import answering

        with self._lock:
            if self.enabled and self._answering is None:
                self._answering = contextlib.ExitStack()
                self._answering.enter_context(answering())

    def turn_off(self, *ended: Enabled) -> None:
        """Forget these, all without any; whoever is last puts the libraries' functions back."""
        with self._lock:
            self.enabled = tuple(each for each in self.enabled if ended and each not in ended)
            if self.enabled:
                return
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            self._unfinished = set()
            while self._changes:
                (_, name), (cls, before, after) = self._changes.popitem()
                if vars(cls).get(name) is not after:
                    continue  # what others put over ours stays
                if before is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, before)
            if self._answering is not None:
                self._answering.close()
                self._answering = None
            if DOWNLOADS in sys.modules:
                from smartcache.hub import uninstall

                uninstall()

    def _loaded(self, module: ModuleType) -> None:
        """Give the flag to a module's classes now that its code has run."""
        if module.__name__ == DOWNLOADS:
            self._answer()
            return
        with self._lock:
            if self.enabled:
                self._wrap(module)
        self._wrap_unfinished()

    def _wrap_unfinished(self) -> None:
        if not self._unfinished:
            return
        with self._lock:
            for name in sorted(self._unfinished):
                module = sys.modules.get(name)
                if module is not None and _is_running(module):
                    continue
                self._unfinished.discard(name)
                if module is not None:
                    self._wrap(module)

    def _wrap(self, module: ModuleType) -> None:
        """Give the flag to all classes that a module names and that have such a function."""
        for cls in _classes(module):
            for name in NAMES:
                owner = next((each for each in cls.__mro__ if name in vars(each)), None)
                is_own = owner is cls or (owner is not None and owner.__name__.startswith(_COPIED))
                original = vars(owner)[name] if is_own else None
                if (id(cls), name) in self._changes or not isinstance(original, classmethod):
                    continue
                before, after = vars(cls).get(name), _with_flag(name, original)
                setattr(cls, name, after)
                self._changes[id(cls), name] = cls, before, after


def _is_library(module_name: str) -> bool:
    return module_name.partition(".")[0] in LIBRARIES


def _is_running(module: ModuleType) -> bool:
    """Say whether the module's code has not run to its end yet."""
    return bool(getattr(vars(module).get("__spec__"), "_initializing", False))


def _classes(module: ModuleType) -> Iterator[type]:
    # A copy: other threads may be importing.
    for value in list(vars(module).values()):
        kind = type(value)
        # Not isinstance at once: what pretends to be a class may load its module to do so.
        if not issubclass(kind, type) or kind.__name__ == _DUMMY or not isinstance(value, type):
            continue
        if _is_library(str(value.__module__)) and not value.__name__.startswith(_COPIED):
            yield value


def _with_flag(
    name: str, original: classmethod[object, ..., object]
) -> classmethod[object, ..., object]:
    """Return a class method that knows the flag, with the signature and text of the original."""

    @functools.wraps(original.__func__)
    def flagged(cls: type, /, *args: object, **kwargs: object) -> object:
        bound = original.__get__(None, cls)
        flag, share, mapping = (kwargs.pop(each, None) for each in (FLAG, SHARE, MAPPING))
        if flag is not None and not isinstance(flag, bool):
            raise TypeError(f"{FLAG} is True or False, not {flag!r}")
        if flag is False and share is None and mapping is None:
            from smartcache.hub import pausing

            with pausing():
                return bound(*args, **kwargs)
        is_implicit = flag is None and any(each.always for each in _switch.enabled)
        if not (flag or is_implicit) and share is None and mapping is None:
            return bound(*args, **kwargs)
        return _answer(name, cls, bound, args, kwargs, flag=flag, share=share, mapping=mapping)

    return classmethod(flagged)


def _answer(
    name: str,
    cls: type,
    bound: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    flag: bool | None,
    share: object,
    mapping: object,
) -> object:
    """Answer a call that is to be answered out of the store."""
    from smartcache.pretrained.api import load, load_single
    from smartcache.pretrained.call import Asked, checked_mapping, is_inside, share_names

    names, known = share_names(share, argument=SHARE), checked_mapping(mapping)
    asked_for = [FLAG] * bool(flag) + [SHARE] * bool(names) + [MAPPING] * (known is not None)
    if flag is False and names:
        raise ValueError(f"{SHARE} needs {FLAG}=True: equal components are found by digest")
    if flag is False and known is not None:
        raise ValueError(f"{MAPPING} needs {FLAG}=True: it is the store that uses it")
    if asked_for and not _switch.enabled:
        raise TypeError(f"{asked_for[0]}: smartcache is not enabled; call smartcache.enable()")
    is_always = flag is None and any(each.always for each in _switch.enabled)
    if is_inside() or not (asked_for or is_always):
        return bound(*args, **kwargs)
    asked = Asked(
        cls=cls,
        original=bound,
        args=args,
        kwargs=kwargs,
        share=names,
        is_implicit=not asked_for,
        mapping=known,
    )
    if names and (name == SINGLE_FILE or not (asked.is_pipeline or asked.is_model)):
        raise TypeError(
            f"{cls.__name__}.{name} has no components to share: {SHARE} is for from_pretrained of"
            " pipelines and models"
        )
    if name == SINGLE_FILE and known is not None:
        raise TypeError(f"{cls.__name__}.{name} takes no {MAPPING}: it is for from_pretrained")
    return load_single(asked) if name == SINGLE_FILE else load(asked)


class _Finder(MetaPathFinder):
    """Calls `loaded` with every module of the libraries whose code has run, in its thread.

    The libraries load their modules when a name is first used. The finder stands first in
    `sys.meta_path`, lets the others find, and leaves nothing of itself in what they found: when the
    module's code runs, its spec has the real loader again.
    """

    def __init__(self, loaded: Callable[[ModuleType], None]) -> None:
        self._loaded = loaded
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, None for everything that is not of the libraries."""
        # Another finder of this kind asks all the others as well, this one among them.
        before = getattr(self._searching, "name", None)
        if not (_is_library(fullname) or fullname == DOWNLOADS) or before == fullname:
            return None
        self._searching.name = fullname
        try:
            others = (each for each in list(sys.meta_path) if each is not self)
            found = (
                each.find_spec(fullname, path, target)
                for each in others
                if hasattr(each, "find_spec")
            )
            spec = next((each for each in found if each is not None), None)
        finally:
            self._searching.name = before
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = cast("Loader", _Telling(cast("Loader", spec.loader), self._loaded))
        return spec


class _Telling:
    """A loader that tells when a module's code has run; in all else the real one."""

    def __init__(self, real: Loader, loaded: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._loaded = loaded

    def __getattr__(self, name: str) -> object:
        if name == "_real":  # a copy that `copy` is still making
            raise AttributeError(name)
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module as the real loader makes it."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code as the real loader does, then tell."""
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._loaded(module)


_switch = _Switch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch.forget_threads)
