"""Functions whose results are kept: computed once for the same arguments, by whoever asks first.

    @cache.memoize(fingerprint={"model": digest}, ignore=["device"])
    def embed(text, device="cpu"): ...

    embed("a cat")  # computed, and kept as an artifact
    embed("a cat")  # read
    embed.forget("a cat")

The key is made of the arguments, by what they are: tensors, arrays and models by their content. The
set belongs to the function and its fingerprint, which says what else the result depends on. Without
a fingerprint, the source of the function counts instead, but for comments and decorators: an edited
function computes anew. What it calls, and the variables around it, count in neither case.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from smartcache.artifacts.keys import compute_key
from smartcache.artifacts.setfolder import Fingerprint, check_name
from smartcache.errors import ConfigError, NoSpaceError, StoreUnwritableError

if TYPE_CHECKING:
    from smartcache.artifacts.artifactset import ArtifactSet

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
_log = logging.getLogger(__name__)
_LONGEST = 100
"""Characters of the name of a set."""


class Memoized(Protocol[P, R_co]):
    """A function whose results are kept."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return what the function returns, computed now or before."""
        ...

    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[..., R_co]:
        """Return the method of an object, as of any function in a class."""
        ...

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the key of a call."""
        ...

    def forget(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Forget the result of a call; False: none was kept."""
        ...

    def forget_all(self) -> int:
        """Forget all results; return how many there were."""
        ...

    def artifacts(self) -> ArtifactSet:
        """Return the set that has the results; it is opened with the first call."""
        ...


def memoized(
    function: Callable[P, R_co],
    open_set: Callable[[str, Mapping[str, object]], ArtifactSet],
    *,
    name: str | None = None,
    fingerprint: Mapping[str, object] | None = None,
    ignore: Iterable[str] = (),
    ttl: float | timedelta | None = None,
) -> Memoized[P, R_co]:
    """Return a function that asks a set first; `open_set(name, fingerprint)` opens that.

    ConfigError, at once, for what cannot be kept apart from others: a generator, a function without
    a file or a name, one without a source and a fingerprint, parameters that it does not have.
    """
    title = getattr(function, "__qualname__", repr(function))
    _refuse_without_result(function, title)
    signature = inspect.signature(function)
    ignored = {ignore} if isinstance(ignore, str) else set(ignore)
    unknown = ignored - signature.parameters.keys()
    if unknown:
        known = ", ".join(signature.parameters)
        message = f"{title} has no parameter {min(unknown)!r} that could be ignored"
        raise ConfigError(message, hint=f"It has: {known}." if known else "It has none.")
    where = _where(function, title) if name is None else name
    identity: dict[str, object] = {"function": where}
    if fingerprint is None:
        identity["source"] = _source(function, title)
    else:
        identity["fingerprint"] = dict(fingerprint)
    Fingerprint.of(identity)  # now, not with the first call
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", title)[-_LONGEST:].strip("._-")
    set_name = check_name(name or short or "function")

    @functools.cache
    def artifacts() -> ArtifactSet:
        return open_set(set_name, identity)

    @functools.cache
    def warn(text: str) -> None:
        _log.warning("Results of %s are not kept: %s", title, text)

    def key(*args: P.args, **kwargs: P.kwargs) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute_key({k: v for k, v in bound.arguments.items() if k not in ignored})

    def forget(*args: P.args, **kwargs: P.kwargs) -> bool:
        return artifacts().delete(key(*args, **kwargs))

    def forget_all() -> int:
        return artifacts().delete_many(list(artifacts()))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> object:
        compute = functools.partial(function, *args, **kwargs)
        try:
            opened = artifacts()
        except (NoSpaceError, StoreUnwritableError) as error:
            warn(f"{error.message}. Hint: {error.hint}")
            return compute()
        return opened.get_or_compute(key(*args, **kwargs), compute, ttl=ttl)

    made: Any = call
    made.key, made.forget, made.forget_all, made.artifacts = key, forget, forget_all, artifacts
    return cast("Memoized[P, R_co]", made)


def _refuse_without_result(function: Callable[..., object], title: str) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        hint = "Return a list, which can be kept."
        raise ConfigError(f"{title} is a generator: it has no result to keep", hint=hint)
    if inspect.iscoroutinefunction(function):
        hint = "Memoize a plain function, and call it with 'await asyncio.to_thread(...)'."
        raise ConfigError(f"{title} is a coroutine function: it has no result to keep", hint=hint)


def _where(function: Callable[..., object], title: str) -> str:
    """Return what tells a function from those of other programs that are called the same."""
    module = getattr(function, "__module__", None)
    code = getattr(function, "__code__", None)
    hint = 'Give it one: memoize(name="...").'
    if code is None or module is None or not os.path.exists(code.co_filename):
        raise ConfigError(f"{title} has no file, so its results have no name", hint=hint)
    if function.__name__ == "<lambda>":  # so is every other one
        raise ConfigError(f"{title} has no name, so its results have none", hint=hint)
    if inspect.ismethod(function):
        raise ConfigError(f"{title} belongs to an object that is no part of its key", hint=hint)
    if module == "__main__":  # every program has one
        module = os.path.realpath(code.co_filename)
    return f"{module}:{title}"


def _source(function: Callable[..., object], title: str) -> str:
    """Return the source of a function, without comments and decorators."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        tree = None
    if not isinstance(tree, ast.FunctionDef):
        hint = 'Say what its results depend on: memoize(fingerprint={"code": 1}).'
        raise ConfigError(f"The source of {title} cannot be read", hint=hint)
    tree.decorator_list = []
    return ast.unparse(tree)
