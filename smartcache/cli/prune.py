"""Freeing room: `prune`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import show_plan
from smartcache.cli._command import age, asks, command, size
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import ago, counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import SetPlan, SetResult
    from smartcache.store.prune import PrunePlan, PruneResult
    from smartcache.store.store import Store

_MOST_SHOWN = 20
_COLUMNS = ("DIGEST", "SIZE>", "FREES>", "USED>", "WHY")


@command(
    "prune",
    examples=(
        ("smartcache prune --dry-run", "what nobody wants any more, and what that would free"),
        ("smartcache prune --max-size 200GB", "the least recently used, until 200 GB remain"),
        ("smartcache prune --unused-for 30d -y", "from a timer, without asking"),
    ),
)
@click.option(
    "--max-size", type=size, metavar="SIZE",
    help="Remove no more than needed for what only smartcache has to fit.",
)  # fmt: skip
@click.option("--unused-for", type=age, metavar="AGE", help="Remove only what was not used since.")
@click.option("--bad", is_flag=True, help="Remove damaged files from bad/ too.")
@click.option("-v", "--verbose", is_flag=True, help="Show every blob of a long plan.")
@asks
@click.pass_obj
def prune_command(
    session: Session,
    *,
    max_size: int | None,
    unused_for: timedelta | None,
    bad: bool,
    verbose: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Free what only smartcache has and nobody wants.

    Blobs without a pin or a hard link outside the store go. Of artifact sets, what is past its time
    and dead room go, never an artifact that is wanted: 'smartcache artifacts prune' evicts those;
    'smartcache hub prune' frees more in HF caches.
    """
    from smartcache.cache import sets_in

    with session.store_as_it_is() as store:
        plan = store.plan_prune(max_size=max_size, unused_for=unused_for, with_bad=bad)
        sets = sets_in(store)
        pruning = _Pruning(plan, None if sets is None else sets.plan_prune())
        for warning in pruning.warnings():
            out.warn(warning)
        if not dry_run and not pruning.is_empty():
            _ask(pruning, verbose=verbose, yes=yes)
            pruning.execute()
        out.show(
            human=lambda: _say(pruning, verbose=verbose, dry_run=dry_run),
            document=lambda: _document(pruning, dry_run=dry_run),
            ids=lambda: [victim.digest for victim in plan.victims],
        )
        if out.mode == "human":
            _say_what_hub_prune_frees(store)


class _Pruning:
    """The plan for blobs, the one for artifact sets, and what came of them."""

    def __init__(self, blobs: PrunePlan, sets: SetPlan | None) -> None:
        self.blobs = blobs
        self.sets = sets
        self.result: PruneResult | None = None
        self.set_result: SetResult | None = None

    def artifacts(self) -> int:
        """Return how many artifacts would go."""
        return 0 if self.sets is None else self.sets.artifacts

    def is_empty(self) -> bool:
        """Say whether nothing would be freed."""
        return not self.blobs.victims and not (self.sets and self.sets.victims)

    def warnings(self) -> list[str]:
        """Return what the user should know, each once."""
        return list(
            dict.fromkeys([*self.blobs.warnings, *(self.sets.warnings if self.sets else ())])
        )

    def planned_size(self) -> int:
        """Return what is expected to come back."""
        return self.blobs.freed_size + (self.sets.freed_size if self.sets else 0)

    def planned(self) -> str:
        """Return that in words: blobs may share their blocks with other files."""
        return f"{'at most ' if self.blobs.at_most else ''}{format_size(self.planned_size())}"

    def freed_size(self) -> int:
        """Return what the filesystem has given back."""
        results = (self.result, self.set_result)
        return sum(result.freed_size for result in results if result is not None)

    def execute(self) -> None:
        """Do it: the blobs first, because artifacts are copied to be compacted."""
        if self.blobs.victims:
            self.result = self.blobs.execute(progress=bars)
        if self.sets and self.sets.victims:
            self.set_result = self.sets.execute(bars)


def _ask(pruning: _Pruning, *, verbose: bool, yes: bool) -> None:
    if not yes and out.mode == "human":
        _show(pruning, verbose=verbose, as_talk=True)
    what, freed = _what(len(pruning.blobs.victims), pruning.artifacts()), pruning.planned()
    question = f"Remove {what} for good and free {freed}?" if what else f"Free {freed}?"
    out.confirm(question, yes=yes)


def _what(blobs: int, artifacts: int) -> str:
    """Return "2 blobs and 30 artifacts"; empty where only dead room goes."""
    words = [counted(blobs, "blob")] if blobs else []
    return " and ".join([*words, counted(artifacts, "artifact")] if artifacts else words)


def _show(pruning: _Pruning, *, verbose: bool, as_talk: bool) -> None:
    victims = sorted(pruning.blobs.victims, key=lambda victim: -victim.allocated)
    shown = victims if verbose else victims[:_MOST_SHOWN]
    rows = (
        [
            short(victim.digest),
            format_size(victim.size),
            format_size(victim.allocated),
            "-" if victim.used_at is None else ago(victim.used_at),
            victim.reason,
        ]
        for victim in shown
    )
    out.table(_COLUMNS, rows, as_talk=as_talk)
    if len(victims) > len(shown):
        out.line(f"... and {len(victims) - len(shown):,} more; -v shows all", as_talk=as_talk)
    if pruning.sets and pruning.sets.victims:
        if victims:
            out.line(as_talk=as_talk)
        show_plan(pruning.sets, as_talk=as_talk)


def _say(pruning: _Pruning, *, verbose: bool, dry_run: bool) -> None:
    if pruning.is_empty():
        out.line("Nothing to prune.")
    elif dry_run:
        _show(pruning, verbose=verbose, as_talk=False)
        what = _what(len(pruning.blobs.victims), pruning.artifacts())
        out.line(f"Would {f'remove {what} and free' if what else 'free'} {pruning.planned()}.")
    else:
        _say_done(pruning)


def _say_done(pruning: _Pruning) -> None:
    blobs, sets = pruning.result, pruning.set_result
    artifacts = 0 if sets is None else sets.artifacts
    what = _what(0 if blobs is None else blobs.removed, artifacts)
    what = what or ("0 blobs" if pruning.blobs.victims else "")
    freed = f"{'at most ' if pruning.blobs.at_most else ''}{format_size(pruning.freed_size())}"
    out.line(f"Removed {what}, freed {freed}." if what else f"Freed {freed}.")
    if blobs is not None and blobs.kept:
        out.talk(f"{counted(blobs.kept, 'blob')} came into use again meanwhile and stayed.")
    if sets is None or pruning.sets is None:
        return
    if artifacts and sets.freed_size < pruning.sets.freed_size // 2:
        out.talk("Artifacts give more back with 'smartcache artifacts compact --force'.")
    for text in sets.problems:
        out.warn(text)


def _say_what_hub_prune_frees(store: Store) -> None:
    from smartcache.hub import Census, known_caches, plan_cache_prune, scan_caches

    try:
        size = plan_cache_prune(Census(scan_caches(known_caches(store)), store)).freed_size
    except FileNotFoundError:
        return  # a repo was removed in this moment: a hint is not worth an error
    if size:
        out.paragraph(
            f"'smartcache hub prune' would free {format_size(size)} more: revisions that no ref "
            "points to, and partial downloads."
        )


def _document(pruning: _Pruning, *, dry_run: bool) -> dict[str, object]:
    result = pruning.result
    return {
        "dry_run": dry_run,
        "victims": [
            picked(victim, "digest size allocated reason used_at pool")
            for victim in pruning.blobs.victims
        ],
        "planned_size": pruning.planned_size(),
        "is_at_most": pruning.blobs.at_most,
        "removed": 0 if result is None else result.removed,
        "freed_size": pruning.freed_size(),
        "kept": 0 if result is None else result.kept,
        "artifact_sets": _sets_document(pruning.sets, pruning.set_result),
        "warnings": pruning.warnings(),
    }


def _sets_document(plan: SetPlan | None, result: SetResult | None) -> dict[str, object]:
    return {
        "victims": [
            {"name": victim.info.full_name, **picked(victim, "reason artifacts size")}
            for victim in (plan.victims if plan else ())
        ],
        "planned_size": plan.freed_size if plan else 0,
        "removed": result.artifacts if result else 0,
        "freed_size": result.freed_size if result else 0,
        "problems": result.problems if result else (),
    }


def prunable(store: Store) -> int:
    """Return what `prune` would free now."""
    from smartcache.cache import prunable_size

    return prunable_size(store)


def say_prunable(size: int) -> None:
    """Say what only smartcache has and nobody wants, and how it is freed; nothing for nothing."""
    if size:
        out.paragraph(f"{format_size(size)} can be freed. Run 'smartcache prune'.")
