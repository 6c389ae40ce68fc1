"""Listing the repos in HF caches: `hub ls`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import command
from smartcache.cli._filters import Field, Fields
from smartcache.cli._hub import cache_dirs_option, hf_caches
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._session import Session
from smartcache.cli._words import ago, counted, short
from smartcache.cli.prune import prunable, say_prunable
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import CachedRepo, Census, Revision, Share


@dataclass(frozen=True, slots=True)
class Row:
    """A repo, or one of its revisions, with its figures."""

    repo: CachedRepo
    revision: Revision | None
    share: Share
    size: int
    accessed_at: datetime
    modified_at: datetime
    refs: tuple[str, ...]


_NAME = "name"
_FIELDS: Fields[Row] = Fields(
    {
        _NAME: Field("word", lambda row: str(row.repo.repo)),
        "size": Field("size", lambda row: row.size),
        "own": Field("size", lambda row: row.share.own),
        "shared": Field("size", lambda row: row.share.shared),
        "accessed": Field("time", lambda row: row.accessed_at),
        "modified": Field("time", lambda row: row.modified_at),
        "type": Field("words", lambda row: (row.repo.repo.type, f"{row.repo.repo.type}s")),
        "refs": Field("words", lambda row: row.refs),
    },
    hint="Write size>1GB, own>1GB, accessed>30d, modified<1w, type=dataset or refs=main.",
)


@command(
    "ls",
    examples=(
        ("smartcache hub ls", "all repos by name, and what each shares"),
        ("smartcache hub ls --sort own --limit 10", "those that take the most space of their own"),
        ('smartcache hub ls --filter "accessed>90d" --filter type=model', "models unused for long"),
        ('smartcache hub rm $(smartcache hub ls -q --filter "own>50GB")', "ids for rm"),
    ),
)
@click.option("--revisions", is_flag=True, help="Show every revision of every repo.")
@click.option(
    "--filter", "tests", type=_FIELDS.condition, multiple=True, metavar="EXPR",
    help="Only those that match: size, own, shared, accessed, modified, type, refs.",
)  # fmt: skip
@click.option(
    "--sort", type=_FIELDS.order, default=_NAME, metavar="KEY[:DIR]", show_default=True,
    help="By name, size, own, shared, accessed or modified; :asc or :desc.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most N.")
@cache_dirs_option
@click.pass_obj
def ls_command(
    session: Session,
    *,
    revisions: bool,
    tests: tuple[Callable[[Row], bool], ...],
    sort: tuple[str, bool],
    limit: int | None,
    cache_dirs: tuple[Path, ...],
) -> None:
    """List the repos in HF caches with their own and shared bytes.

    SIZE counts every file by its name, as 'hf cache ls' does. OWN is the disk space that only
    this repo (and smartcache) has: 'hub rm' frees it. SHARED has other names too: another repo,
    a folder, another program.
    """
    from smartcache.hub import Census, scan_caches

    with session.store_as_it_is(says_none=False) as store:
        repos = scan_caches(hf_caches(cache_dirs, store))
        census = Census(repos, store)
        held = prunable(store)
    rows = [row for repo in repos for row in _rows(census, repo, revisions=revisions)]
    rows = _FIELDS.sorted((row for row in rows if all(test(row) for test in tests)), sort)[:limit]
    out.show(
        human=lambda: _show(census, rows, held, revisions=revisions),
        document=lambda: {**_document(census, rows, revisions=revisions), "prunable": held},
        ids=lambda: _ids(repos, rows),
    )


def _rows(census: Census, repo: CachedRepo, *, revisions: bool) -> list[Row]:
    if not revisions:
        share = census.share_of_repo(repo)
        refs = tuple(sorted(repo.refs))
        return [Row(repo, None, share, repo.size, repo.accessed_at, repo.modified_at, refs)]
    return [
        Row(
            repo, each, census.share_of_revision(repo, each), each.size,
            each.accessed_at, each.modified_at, each.refs,
        )
        for each in repo.revisions
    ]  # fmt: skip


def _ids(repos: list[CachedRepo], rows: list[Row]) -> list[str]:
    """Return what `hub rm` takes: repos, or commits (with their repo if several have it)."""
    pairs = {(str(repo.repo), each.commit) for repo in repos for each in repo.revisions}
    times = Counter(commit for _, commit in pairs)
    ids: dict[str, None] = {}
    for row in rows:
        name = str(row.repo.repo)
        if row.revision is not None:
            commit = row.revision.commit
            is_clear = times[commit] == 1 and len(commit) == 40  # noqa: PLR2004 - a commit
            name = commit if is_clear else f"{name}@{commit}"
        ids[name] = None
    return list(ids)


def _show(census: Census, rows: list[Row], held: int, *, revisions: bool) -> None:
    if not rows:
        out.line("No repo is cached." if not census.repos else "No repo matches.")
        say_prunable(held)
        return
    several = len({row.repo.cache_dir for row in rows}) > 1
    columns = ["REPO~", *["REVISION"] * revisions, "SIZE>", "OWN>", "SHARED>", "ACCESSED>", "REFS"]
    columns += ["CACHE"] * several
    out.table(columns, (_cells(row, several=several) for row in rows))
    _say_totals(census, rows)
    say_prunable(held)


def _cells(row: Row, *, several: bool) -> list[str]:
    cells = [str(row.repo.repo)]
    if row.revision is not None:
        cells.append(short(row.revision.commit))
    cells += [format_size(n) for n in (row.size, row.share.own, row.share.shared)]
    cells += [ago(row.accessed_at), " ".join(row.refs) or "-"]
    return [*cells, str(row.repo.cache_dir)] if several else cells


def _say_totals(census: Census, rows: list[Row]) -> None:
    chosen = list({id(row.repo): row.repo for row in rows}.values())
    total = census.share_of_all(chosen)
    size = format_size(sum(repo.size for repo in chosen))
    taken = format_size(total.own + total.shared)
    out.talk(f"{counted(len(chosen), 'repo')}, {size} by name, {taken} on disk.")
    if total.in_store:
        blobs = format_size(total.in_store)
        out.talk(
            f"{blobs} of that is in the store too, and 'hub rm' removes it from both; if you "
            "delete repos another way, run 'smartcache prune' afterwards."
        )
    unfinished = [repo.names[name].size for repo in chosen for name in repo.incomplete]
    if unfinished:
        size = format_size(sum(unfinished))
        out.talk(f"{counted(len(unfinished), 'download')} ({size}) not finished.")
    for repo in chosen:
        if repo.is_symlink:
            out.talk(f"{repo.repo} is a symlink to {repo.folder.resolve()}.")
        for path, error in repo.unread:
            out.warn(f"{path} could not be read: {error.strerror or error}")


def _document(census: Census, rows: list[Row], *, revisions: bool) -> dict[str, object]:
    chosen = list({id(row.repo): row.repo for row in rows}.values())
    total = census.share_of_all(chosen)
    return {
        "revisions" if revisions else "repos": [_entry(row) for row in rows],
        "size": sum(repo.size for repo in chosen),
        "allocated": total.own + total.shared,
        "own_size": total.own,
        "shared_size": total.shared,
        "in_store_size": total.in_store,
    }


def _entry(row: Row) -> dict[str, object]:
    repo = row.repo
    entry: dict[str, object] = {
        "id": str(repo.repo),
        "repo_id": repo.repo.id,
        "repo_type": repo.repo.type,
        "size": row.size,
        "own_size": row.share.own,
        "shared_size": row.share.shared,
        "in_store_size": row.share.in_store,
        **picked(row, "accessed_at modified_at refs"),
        "cache_dir": repo.cache_dir,
    }
    if row.revision is not None:
        files = len(row.revision.pointers)
        path = row.revision.folder
        return {**entry, "revision": row.revision.commit, "files": files, "path": path}
    incomplete = [repo.names[name].size for name in repo.incomplete]
    return {
        **entry,
        "revisions": [each.commit for each in repo.revisions],
        "files": len(repo.bodies),
        "incomplete": len(incomplete),
        "incomplete_size": sum(incomplete),
        "dangling": sum(p.is_dangling for each in repo.revisions for p in each.pointers),
        "is_symlink": repo.is_symlink,
        "unread": [path for path, _ in repo.unread],
        "path": repo.folder,
    }
