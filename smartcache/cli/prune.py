"""Freeing room: `prune`."""

from __future__ import annotations

from collections.abc import Sequence
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
    from smartcache.store.store import Store
    from smartcache.store.upkeep.prune import PrunePlan, PruneResult, Victim

_MOST_SHOWN = 20
_COLUMNS = ("DIGEST", "SIZE>", "FREES>", "USED>", "WHY")


@command(
    "prune",
    examples=(
        ("smartcache prune --dry-run", "what nobody holds any more, and what that would free"),
        ("smartcache prune --max-size 200GB", "the least recently used, until 200 GB remain"),
        ("smartcache prune --unused-for 30d -y", "from a timer, without asking"),
    ),
)
@click.option(
    "--max-size", type=size, metavar="SIZE",
    help="Remove no more than needed for what only smartcache holds to fit, per volume.",
)  # fmt: skip
@click.option("--unused-for", type=age, metavar="AGE", help="Remove only what was not used since.")
@click.option("--drop-away", is_flag=True, help="Count owners on unmounted drives as gone.")
@click.option("--after-rebuild", is_flag=True, help="Go ahead though the index was rebuilt.")
@click.option("--bad", is_flag=True, help="Remove damaged files from bad/ too.")
@click.option("-v", "--verbose", is_flag=True, help="Show every blob of a long plan.")
@asks
@click.pass_obj
def prune_command(
    session: Session,
    *,
    max_size: int | None,
    unused_for: timedelta | None,
    drop_away: bool,
    after_rebuild: bool,
    bad: bool,
    verbose: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Free what only smartcache holds and nobody wants.

    Blobs without a pin, owner or hard link go. Of artifact sets, what is past its time and dead
    room go, never an artifact that is wanted: 'smartcache artifacts prune' evicts those;
    'smartcache hub prune' frees more in HF caches.
    """
    from smartcache.cache import sets_in

    with session.stores() as stores:
        plans = [
            (
                store,
                store.plan_prune(
                    max_size=max_size, unused_for=unused_for, drop_away=drop_away,
                    after_rebuild=after_rebuild, with_bad=bad,
                ),
            )
            for store in stores
        ]  # fmt: skip
        sets = sets_in(stores[0]) if stores else None
        pruning = _Pruning(plans, None if sets is None else sets.plan_prune())
        for warning in pruning.warnings():
            out.warn(warning)
        if not dry_run and not pruning.is_empty():
            _ask(pruning, verbose=verbose, yes=yes)
            pruning.execute()
        out.show(
            human=lambda: _say(pruning, verbose=verbose, dry_run=dry_run),
            document=lambda: _document(pruning, dry_run=dry_run),
            ids=lambda: [victim.digest for victim in pruning.victims()],
        )
        if out.mode == "human":
            _say_what_hub_prune_frees(stores)


class _Pruning:
    """The plans for blobs, the one for artifact sets, and what came of them."""

    def __init__(self, blobs: list[tuple[Store, PrunePlan]], sets: SetPlan | None) -> None:
        self.blobs = blobs
        self.sets = sets
        self.results: list[PruneResult] = []
        self.set_result: SetResult | None = None

    def victims(self) -> list[Victim]:
        """Return the blobs that would go."""
        return [victim for _, plan in self.blobs for victim in plan.victims]

    def artifacts(self) -> int:
        """Return how many artifacts would go."""
        return 0 if self.sets is None else self.sets.artifacts

    def is_empty(self) -> bool:
        """Say whether nothing would be freed."""
        return not self.victims() and not (self.sets and self.sets.victims)

    def warnings(self) -> list[str]:
        """Return what the user should know, each once."""
        texts = [text for _, plan in self.blobs for text in plan.warnings]
        return list(dict.fromkeys([*texts, *(self.sets.warnings if self.sets else ())]))

    def planned_size(self) -> int:
        """Return what is expected to come back."""
        blobs = sum(plan.freed_size for _, plan in self.blobs)
        return blobs + (self.sets.freed_size if self.sets else 0)

    def freed_size(self) -> int:
        """Return what the filesystem has given back."""
        blobs = sum(result.freed_size for result in self.results)
        return blobs + (self.set_result.freed_size if self.set_result else 0)

    def execute(self) -> None:
        """Do it: the blobs first, because artifacts are copied to be compacted."""
        self.results = [plan.execute(progress=bars) for _, plan in self.blobs if plan.victims]
        if self.sets and self.sets.victims:
            self.set_result = self.sets.execute(bars)


def _ask(pruning: _Pruning, *, verbose: bool, yes: bool) -> None:
    if not yes and out.mode == "human":
        _show(pruning, verbose=verbose, as_talk=True)
    what = _what(len(pruning.victims()), pruning.artifacts())
    freed = format_size(pruning.planned_size())
    question = f"Remove {what} for good and free {freed}?" if what else f"Free {freed}?"
    out.confirm(question, yes=yes)


def _what(blobs: int, artifacts: int) -> str:
    """Return "2 blobs and 30 artifacts"; empty where only dead room goes."""
    words = [counted(blobs, "blob")] if blobs else []
    return " and ".join([*words, counted(artifacts, "artifact")] if artifacts else words)


def _show(pruning: _Pruning, *, verbose: bool, as_talk: bool) -> None:
    victims = sorted(pruning.victims(), key=lambda victim: -victim.allocated)
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
    held = sum(plan.held_size for _, plan in pruning.blobs)
    stays = f"; {format_size(held)} are held and stay" if held else ""
    if pruning.is_empty():
        out.line(f"Nothing to prune{stays}.")
    elif dry_run:
        _show(pruning, verbose=verbose, as_talk=False)
        what, freed = _what(len(pruning.victims()), pruning.artifacts()), pruning.planned_size()
        words = f"remove {what} and free" if what else "free"
        out.line(f"Would {words} {format_size(freed)}{stays}.")
    else:
        _say_done(pruning, stays)


def _say_done(pruning: _Pruning, stays: str) -> None:
    removed = sum(result.removed for result in pruning.results)
    done = pruning.set_result
    artifacts = 0 if done is None else done.artifacts
    what = _what(removed, artifacts) or ("0 blobs" if pruning.victims() else "")
    freed = format_size(pruning.freed_size())
    out.line(f"Removed {what}, freed {freed}{stays}." if what else f"Freed {freed}{stays}.")
    kept = sum(result.kept for result in pruning.results)
    if kept:
        out.talk(f"{counted(kept, 'blob')} came into use again meanwhile and stayed.")
    if done is None or pruning.sets is None:
        return
    if artifacts and done.freed_size < pruning.sets.freed_size // 2:
        out.talk("Artifacts give more back with 'smartcache artifacts compact --force'.")
    for text in done.problems:
        out.warn(text)


def _say_what_hub_prune_frees(stores: list[Store]) -> None:
    from smartcache.hub import Census, known_caches, plan_cache_prune, scan_caches

    try:
        census = Census(scan_caches(known_caches(stores[0] if stores else None)), stores)
        size = plan_cache_prune(census, stores).freed_size
    except FileNotFoundError:
        return  # a repo was removed in this moment: a hint is not worth an error
    if size:
        out.paragraph(
            f"'smartcache hub prune' would free {format_size(size)} more: revisions that no ref "
            "points to, and partial downloads."
        )


def _document(pruning: _Pruning, *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "victims": [
            {**picked(victim, "digest size allocated reason used_at"), "root": store.root}
            for store, plan in pruning.blobs
            for victim in plan.victims
        ],
        "planned_size": pruning.planned_size(),
        "held_size": sum(plan.held_size for _, plan in pruning.blobs),
        "removed": sum(result.removed for result in pruning.results),
        "freed_size": pruning.freed_size(),
        "kept": sum(result.kept for result in pruning.results),
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


def prunable(stores: Sequence[Store]) -> int:
    """Return what `prune` would free now, on all volumes."""
    from smartcache.cache import prunable_size

    return prunable_size(stores[0]) if stores else 0


def say_prunable(size: int) -> None:
    """Say what only smartcache holds and nobody wants, and how it is freed; nothing for nothing."""
    if size:
        out.paragraph(
            f"{format_size(size)} are held only by smartcache; 'smartcache prune' frees them."
        )
