"""What a dataset says of itself: dataset.json, read in one place, trusting nothing.

It may come from a tier, from a folder that somebody has sent, or from an editor. What is read here
has the types that the rest of the package expects; everything else is a DatasetError of one line.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from smartcache.artifacts import Fingerprint, check_name
from smartcache.errors import DatasetError, SmartcacheError
from smartcache.system.faults import reached
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import store_lock
from smartcache.system.ownfiles import create_own
from smartcache.training.encoder import Buckets
from smartcache.training.sources import Sources

FORMAT: Final = 1
FILE: Final = "dataset.json"
_DEEPEST: Final = 100
_MOST_VARIATIONS: Final = 1 << 16
_LONGEST: Final = 200
"""Characters of a reason: it may quote what was read."""
_KEY: Final = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


def read_document(folder: Path, *, must_exist: bool = True) -> dict[str, Any]:
    """Read dataset.json; DatasetError if it makes no sense."""
    path = folder / FILE
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if not must_exist:
            return {}
        raise DatasetError(f"There is no dataset in {folder}", path=folder) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    return check_document(document, path)


def check_document(document: object, path: Path) -> dict[str, Any]:
    """Return what a dataset.json says; DatasetError if it makes no sense."""
    try:
        _check_depth(document)
        known = _typed(document, dict, "the document")
        if known.get("format") != FORMAT:
            message = f"{path} has format {known.get('format')!r:.80}"
            hint = "Update smartcache."
            raise DatasetError(f"{message}; this smartcache reads {FORMAT}", hint=hint, path=path)
        check_name(known.get("name"))
        Sources.from_json(_typed(known.get("sources"), list, "sources"))
        for name, spec in _typed(known.get("outputs"), dict, "outputs").items():
            _check_output(name, _typed(spec, dict, f"the output {name!r}"))
        for each in _typed(known.get("sets", []), list, "sets"):
            _typed(each, str, "a set")
        if known.get("created_at") is not None:
            datetime.fromisoformat(_typed(known["created_at"], str, "created_at"))
        _typed(known.get("from", ""), str, "from")
        for name, built in _typed(known.get("built", {}), dict, "built").items():
            if not {"id", "buckets", "variations"} <= _typed(built, dict, "built").keys():
                raise ValueError(f"it does not say how {name!r} was built")
    except DatasetError:
        raise
    except (ValueError, TypeError, SmartcacheError) as error:
        raise _damaged(path, error) from error
    return known


def _check_depth(document: object) -> None:
    """Refuse what those who walk through it could not."""
    level = [document]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _typed(value: object, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {type(value).__name__}, not {kind.__name__}")
    return value


def _check_output(name: str, spec: Mapping[str, Any]) -> None:
    if not name.isprintable():
        raise ValueError(f"an output is called {name!r}")
    number = Fingerprint.from_json(spec.get("fingerprint")).id(check_name(spec.get("set")))
    if spec.get("id") != number:
        raise ValueError(f"the set of {name} is another one")
    reads = [_typed(each, str, "reads") for each in _typed(spec.get("reads"), list, "reads")]
    if not reads or len(set(reads)) < len(reads):
        raise ValueError(f"{name} reads {reads!r}")
    variations = spec.get("variations")
    if type(variations) is not int or not 1 <= variations <= _MOST_VARIATIONS:
        raise ValueError(f"{name} has {variations!r} variations")
    if spec.get("buckets") is not None:
        Buckets(_typed(spec["buckets"], str, "buckets"))
    if spec.get("trim") is not None:
        _typed(spec["trim"], str, "trim")
    for key, reason in _typed(spec.get("failed", {}), dict, "failed").items():
        if _KEY.fullmatch(key) is None:
            raise ValueError(f"{key!r} is no key")
        _typed(reason, str, "a reason")


def _damaged(path: Path, error: BaseException) -> DatasetError:
    hint = "Remove the file and open the dataset again: nothing that was encoded is lost."
    text = (str(error) or type(error).__name__).splitlines()[0][:_LONGEST]
    return DatasetError(f"{path} is damaged: {text}", hint=hint, path=path)


def changing(folder: Path) -> AbstractContextManager[None]:
    """Let nobody else change dataset.json for the length of a `with` block."""
    path = folder / f"{FILE}.lock"
    return store_lock(path, "opening a dataset", name=f"the dataset {folder}")


def set_of(spec: Mapping[str, Any]) -> str:
    """Return the full name of the set of an output."""
    return f"{spec['set']}/{spec['id']}"


def write_document(folder: Path, document: Mapping[str, Any]) -> None:
    """Write dataset.json, in one step."""
    temporary = folder / f".{FILE}-{secrets.token_hex(4)}"
    with open(create_own(temporary), "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    reached("dataset: described")
    temporary.replace(folder / FILE)
    sync_directory(folder)
