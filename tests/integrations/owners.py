"""Every class of diffusers and transformers with a function of its own that loads something.

    python -m tests.integrations.owners      # what becomes of them if enabled before the import

The modules are found by their text, so that none is missed and few are imported: importing all the
public names of both libraries takes three times as long.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path

LIBRARIES = ("diffusers", "transformers")
NAMES = ("from_pretrained", "from_single_file")
_OWNER = re.compile(rb"\bdef from_(pretrained|single_file)\(")
_NOT_IMPORTED = re.compile(r"dummy_.*_objects|modular_(?!pipeline).*")
"""Stand-ins, which are loaded when one is needed; and what transformers' code is generated from."""

Owners = dict[tuple[type, str], object]


@functools.cache
def owning_modules() -> list[str]:
    """Return the names of the modules whose text defines such a function."""
    names = []
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        assert spec is not None
        (root,) = map(Path, spec.submodule_search_locations or ())
        for path in sorted(root.rglob("*.py")):
            if not _NOT_IMPORTED.fullmatch(path.stem) and _OWNER.search(path.read_bytes()):
                parts = path.relative_to(root.parent).with_suffix("").parts
                names.append(".".join(parts).removesuffix(".__init__"))
    return names


def import_all(names: list[str]) -> list[str]:
    """Import them; return those that cannot be: they lack something that is not installed."""
    absent = []
    with warnings.catch_warnings(action="ignore"):
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                absent.append(name)
    return absent


def owners() -> Owners:
    """Return {(class, name of the function): the object in the class} of all loaded modules."""
    found: Owners = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in LIBRARIES:
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__.partition(".")[0] in LIBRARIES:
                    found.update(
                        {(value, name): vars(value)[name] for name in NAMES if name in vars(value)}
                    )
    return found


def is_dummy(cls: type) -> bool:
    """Say whether a class only stands in for one whose backend is not installed."""
    return type(cls).__name__ == "DummyObject"


def is_copied(cls: type) -> bool:
    """Say whether a class is a private base whose functions are copied to others."""
    return cls.__name__.startswith("_Base")


def knows_the_flag(function: object) -> bool:
    """Say whether a function in a class is smartcache's."""
    inner = getattr(function, "__func__", None)
    return "smartcache" in Path(getattr(inner, "__code__").co_filename).parts  # noqa: B009


def _main() -> None:
    import smartcache

    smartcache.enable()
    early = [name for name in LIBRARIES if name in sys.modules]
    import_all(owning_modules())
    while_enabled = owners()
    smartcache.disable()
    report = {
        "imported by enable": early,
        "with flag": _names(
            {each for each in while_enabled if knows_the_flag(while_enabled[each])}
        ),
        "without": _names(
            {each for each in while_enabled if not knows_the_flag(while_enabled[each])}
        ),
        "after disable": _names(
            {each for each, found in owners().items() if knows_the_flag(found)}
        ),
        "finders": [type(each).__module__ for each in sys.meta_path],
    }
    sys.stdout.write(json.dumps(report))


def _names(found: set[tuple[type, str]]) -> list[str]:
    return sorted(f"{cls.__module__}.{cls.__qualname__}.{name}" for cls, name in found)


if __name__ == "__main__":
    _main()
