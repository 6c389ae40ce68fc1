"""What a shell offers after Tab: repos, ids of undo, programs, sets, datasets, settings.

Each answer is read straight from the disk: no store is opened or made, nothing is waited for, and
whatever goes wrong is no answer, for there is nobody to tell.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import click
    from click.shell_completion import CompletionItem

    Offered = Iterator[tuple[str, str]]
    """What may be written, and what is said beside it."""
    Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_REPO_KINDS = {"models": "", "datasets": "datasets/", "spaces": "spaces/"}


def _offering(function: Callable[[click.Context], Offered]) -> Completer:
    @wraps(function)
    def complete(
        ctx: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        import logging

        from click.shell_completion import CompletionItem

        from smartcache.errors import SmartcacheError

        del parameter
        logging.disable()
        try:
            offered = dict(function(ctx))
        except (SmartcacheError, OSError, ValueError):
            return []
        finally:
            logging.disable(logging.NOTSET)
        return [
            CompletionItem(text, help=said or None)
            for text, said in offered.items()
            if text.startswith(incomplete)
        ]

    return complete


def words(offered: Mapping[str, str]) -> Completer:
    """Return what offers these words, each with what is said beside it."""
    return _offering(lambda _: iter(offered.items()))


@_offering
def settings(_: click.Context) -> Offered:
    """Offer the names of settings."""
    from smartcache.config import SETTINGS

    for name, setting in SETTINGS.items():
        yield name, setting.text


@_offering
def undo_ids(ctx: click.Context) -> Offered:
    """Offer the ids of what can be undone, the newest first."""
    from smartcache.store import Journal, Layout

    journal = Journal(Layout(_root(ctx)).journal)
    for entry in reversed(journal.history() if journal.path.exists() else []):
        yield entry.id, entry.label


@_offering
def sets(ctx: click.Context) -> Offered:
    """Offer the names of artifact sets."""
    from smartcache.store import DATASET

    for name, inner in _sets_and_datasets(ctx):
        if any(each != DATASET for each in inner):
            yield name, ""


@_offering
def datasets(ctx: click.Context) -> Offered:
    """Offer the names of datasets."""
    from smartcache.store import DATASET

    for name, inner in _sets_and_datasets(ctx):
        if DATASET in inner:
            yield name, ""


def _sets_and_datasets(ctx: click.Context) -> Iterator[tuple[str, list[str]]]:
    """Go through the folders of sets and datasets of one name, and what is in them."""
    from smartcache.store import Layout

    for entry in sorted(os.scandir(Layout(_root(ctx)).sets), key=lambda each: each.name):
        if entry.is_dir() and not entry.name.startswith("."):
            yield entry.name, os.listdir(entry)


@_offering
def remotes(_: click.Context) -> Offered:
    """Offer the names of remotes."""
    import json

    from smartcache.config import remotes_file

    for name, entry in json.loads(remotes_file().read_bytes())["remotes"].items():
        yield name, entry["url"]


@_offering
def programs(_: click.Context) -> Offered:
    """Offer the programs whose folders are known, written as one word."""
    from smartcache.folders import PROGRAMS

    for name in PROGRAMS:
        yield name.replace(" ", "-"), ""


@_offering
def repos(ctx: click.Context) -> Offered:
    """Offer the repos in HF caches: those that were named, else the one everybody uses."""
    for cache in ctx.params.get("cache_dirs") or [_hf_cache()]:
        for name in sorted(os.listdir(cache)):
            kind, *parts = name.split("--")
            if kind in _REPO_KINDS and parts:
                yield _REPO_KINDS[kind] + "/".join(parts), ""


def _root(ctx: click.Context) -> Path:
    """Return where the store is."""
    from smartcache.config import load_settings

    return load_settings(home=ctx.find_root().params.get("home")).home


def _hf_cache() -> str:
    """Return the HF cache, as huggingface_hub finds it, which takes long to import."""
    from smartcache.config import variable

    named = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE")
    caches = variable("XDG_CACHE_HOME") or "~/.cache"
    home = variable("HF_HOME") or os.path.join(caches, "huggingface")
    return os.path.expanduser(os.path.expandvars(named or os.path.join(home, "hub")))
