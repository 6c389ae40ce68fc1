"""Why a value cannot be kept, and where in the artifact it is.

The path is put together while the error passes through the containers, so that a value without
fault pays nothing for it.
"""

from __future__ import annotations

import json
import sys
from typing import Final

from smartcache.errors import UnsupportedValueError

_LONGEST: Final = 60
_LONGEST_PATH: Final = 200
_PLAIN: Final = (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset,
)  # fmt: skip


class RefusedError(Exception):
    """Passes from the value that cannot be kept up to `encode`, collecting its path."""

    def __init__(self, reason: str, *, hint: str | None = None, too_deep: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.too_deep = too_deep
        self.is_key = False
        self.steps: list[object] = []

    def within(self, step: object) -> None:
        """Note the key or index at which it happened; of a key that is refused, only the dict."""
        if self.is_key:
            self.reason = f"the key {shown(step)}: {self.reason}"
            self.is_key = False
            self.steps.clear()
        else:
            self.steps.append(step)


class CodecStep:
    """A step of a path: into what a registered codec made of an object."""

    def __init__(self, name: str, plain: object) -> None:
        self.name = name
        self.plain = plain


def explain(refused: RefusedError, root: object) -> UnsupportedValueError:
    """Return the error for the user. A value that contains itself is told from a deep one."""
    steps = refused.steps[::-1]
    reason = refused.reason
    if refused.too_deep:
        around = _cycle(root, steps)
        if around is not None:
            steps, reason = steps[:around], "contains itself"
    path = path_text(steps)
    message = f"{_short(path, _LONGEST_PATH)}: {reason}" if path else reason
    return UnsupportedValueError(message, hint=refused.hint, path=path)


def path_text(steps: list[object]) -> str:
    """Return a path as people write it: `conditioning[3][1].hooks`, `["two words"]`."""
    text = ""
    for step in steps:
        if isinstance(step, CodecStep):
            text += f"<{step.name}>"
        elif type(step) is str and step.isidentifier():
            text += f".{step}" if text else step
        else:
            text += f"[{shown(step)}]"
    return text


def shown(value: object) -> str:
    """Return a value for a person to recognise, in at most 60 characters."""
    try:
        return _short(json.dumps(value) if type(value) is str else repr(value))
    except Exception:  # noqa: BLE001 - a __repr__ of anybody; an int of more than 4300 digits
        return f"<{type(value).__qualname__}>"


def why_not(cls: type) -> RefusedError:
    """Return the refusal of a value of this type."""
    name = with_article(cls.__qualname__ if cls.__module__ == "builtins" else _full_name(cls))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(cls, torch.nn.Parameter):
        return RefusedError(
            f"{name} cannot be kept: it would come back as a plain tensor",
            hint="Put its values: parameter.detach().",
        )
    if torch is not None and issubclass(cls, torch.Tensor):
        hint = "Put a plain tensor: tensor.as_subclass(torch.Tensor), or register a codec."
        return RefusedError(f"{name}, a subclass of Tensor, cannot be kept as it is", hint=hint)
    if numpy is not None and issubclass(cls, numpy.ndarray):
        hint = "Put a plain array: numpy.asarray(array), or register a codec."
        return RefusedError(f"{name}, a subclass of ndarray, cannot be kept as it is", hint=hint)
    for base in _PLAIN:
        if issubclass(cls, base):
            hint = f"Put a plain {base.__name__}: {base.__name__}(value), or register a codec."
            reason = f"{name}, a subclass of {base.__name__}, cannot be kept as it is"
            return RefusedError(reason, hint=hint)
    return RefusedError(f"{name} cannot be kept")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _short(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def with_article(name: str) -> str:
    """Return a name with "a" or "an" before it."""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _cycle(root: object, steps: list[object]) -> int | None:
    """Return after how many steps the path first comes to a container it is in already."""
    seen = {id(root)}
    value = root
    for number, step in enumerate(steps, 1):
        if isinstance(step, CodecStep):
            value = step.plain
        elif isinstance(value, (dict, list, tuple)):
            value = value[step]  # type: ignore[call-overload] # the step came from here
        else:
            return None
        if id(value) in seen:
            return number
        seen.add(id(value))
    return None
