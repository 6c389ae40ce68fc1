"""What the `hub` commands share: which HF caches they look at, and what REPO[@REV] means."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from smartcache.cli._command import FILE
from smartcache.cli._output import out
from smartcache.errors import RepoNotCachedError

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import CachedRepo
    from smartcache.store.store import Store

_F = TypeVar("_F", bound=Callable[..., object])


def cache_dirs_option(function: _F) -> _F:
    """Add --cache-dir: the HF caches to look at, in place of all that are known."""
    return click.option(
        "--cache-dir", "cache_dirs", type=FILE, multiple=True, metavar="DIR",
        help="Look at this HF cache instead of all known ones. Repeatable.",
    )(function)  # fmt: skip


def hf_caches(given: tuple[Path, ...], store: Store) -> list[Path]:
    """Return the HF caches to look at: those given, else the default one and all known ones.

    One that was given must be there.
    """
    from smartcache.hub import default_cache_dir, known_caches

    if given:
        for each in given:
            if not each.is_dir():
                hint = "--cache-dir is the folder that has models--org--name in it."
                raise RepoNotCachedError(f"There is no HF cache at {each}", hint=hint)
        return list(given)
    known = known_caches(store)
    if not known:
        out.talk(f"There is no HF cache at {default_cache_dir()}; --cache-dir names another.")
    return known


def chosen(repos: list[CachedRepo], words: tuple[str, ...]) -> list[tuple[CachedRepo, str | None]]:
    """Return the repos meant by REPO[@REV] or a commit, and the commit (None: the whole repo).

    A repo that is in several caches is meant in all of them, where it has the revision.
    """
    found: dict[tuple[Path, str | None], tuple[CachedRepo, str | None]] = {}
    for word in words:
        for repo, commit in _meant(repos, word):
            found[repo.folder, commit] = repo, commit
    whole = {repo.folder for repo, commit in found.values() if commit is None}
    return [
        (repo, commit)
        for repo, commit in found.values()
        if commit is None or repo.folder not in whole
    ]


def _meant(repos: list[CachedRepo], word: str) -> list[tuple[CachedRepo, str | None]]:
    from smartcache.hub import Repo, find_repo, is_commit

    text, at, revision = word.partition("@")
    if not at and is_commit(text):
        return _with_commit(repos, text)
    found = find_repo(repos, Repo.parse(text))
    if not at:
        return [(repo, None) for repo in found]
    commits: list[tuple[CachedRepo, str | None]] = []
    failure: RepoNotCachedError | None = None
    for repo in found:
        try:
            commits.append((repo, repo.commit_of(revision)))
        except RepoNotCachedError as error:
            failure = error
    if failure is not None and not commits:
        raise failure
    return commits


def _with_commit(repos: list[CachedRepo], commit: str) -> list[tuple[CachedRepo, str | None]]:
    """Return the repo that has a commit, as `hub ls --revisions -q` prints it."""
    found = [repo for repo in repos if any(each.commit == commit for each in repo.revisions)]
    names = sorted({str(repo.repo) for repo in found})
    if not names:
        raise RepoNotCachedError(f"No HF cache here has the revision {commit}", revision=commit)
    if len(names) > 1:
        hint = f"Write which: {' or '.join(f'{name}@{commit[:12]}' for name in names)}."
        message = f"{commit} is a revision of several repos"
        raise RepoNotCachedError(message, hint=hint, revision=commit)
    return [(repo, commit) for repo in found]
