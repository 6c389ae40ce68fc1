"""A download in words: where each file comes from, what that saves, what one should know."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smartcache.cli._json import picked
from smartcache.cli._output import out, terminal_width
from smartcache.cli._tables import shortened
from smartcache.cli._words import counted, short
from smartcache.errors import NoSpaceError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.hub import DownloadPlan, DownloadResult, FileChanges, PlannedFile, Source
    from smartcache.store.store import Store

MOST_SHOWN = 12
"""Files of a plan that are shown without -v: the largest. So few, and they fit on a screen."""
_MOST_FOR_ORIGIN = 24
_TABLE = ("SOURCE", "SIZE>", "FILE", "FROM~")
_SUMS = ("", ">", ">", "~")
_MEANING: dict[Source, str] = {
    "present": "there already",
    "link": "in the store: linked, no time and no space",
    "reuse": "same size in a known folder: reused if the hash is right",
    "copy": "copied: from another disk or user, or where a link is not safe",
    "tier": "not on this machine: comes from a tier, once its hash is right",
    "fetch": "not in any known folder: comes from the Hub",
}


def show_plan(plan: DownloadPlan, *, verbose: bool, dry_run: bool) -> None:
    """Show for each file where it comes from, then the sums."""
    as_talk = not dry_run
    name = f"{plan.repo} at {plan.revision}"
    commit = "" if plan.revision == plan.commit else f" ({short(plan.commit)})"
    out.heading(f"{name}{commit}: {_amount(plan.files)}", as_talk=as_talk)
    files = sorted(plan.files, key=lambda each: -each.size)
    shown = files if verbose or len(files) <= MOST_SHOWN + 1 else files[:MOST_SHOWN]
    room = _room_for_names(shown, as_talk=as_talk)
    out.table(_TABLE, (_row(each, room) for each in shown), as_talk=as_talk)
    if len(files) > len(shown):
        rest = files[len(shown) :]
        size = format_size(sum(each.size for each in rest))
        out.line(f"... and {len(rest):,} more, {size}; -v shows all", as_talk=as_talk)
    out.line(as_talk=as_talk)
    out.table(_SUMS, _sums(plan), as_talk=as_talk)
    out.paragraph(_totals(plan, dry_run=dry_run), as_talk=as_talk)


def _totals(plan: DownloadPlan, *, dry_run: bool) -> str:
    """Return what is to be fetched and what is here, in one sentence."""
    fetched = format_size(plan.fetch_size)
    unknown = sum(each.file.size is None for each in plan.files)
    if unknown:
        fetched += f" and {counted(unknown, 'file')} of unknown size"
    parts = [f"Would fetch {fetched}" if dry_run else f"{fetched} to fetch"]
    if plan.saved_size:
        verb = "would come" if dry_run else "to come"
        parts.append(f"{format_size(plan.saved_size)} {verb} from this machine")
    if plan.tier_size:
        verb = "would come" if dry_run else "to come"
        parts.append(f"{format_size(plan.tier_size)} {verb} from tiers")
    if plan.present_size:
        parts.append(f"{format_size(plan.present_size)} is there already")
    if plan.unproven_size:
        verb = "would be" if dry_run else "to be"
        parts.append(f"{format_size(plan.unproven_size)} {verb} read and hashed")
    return "; ".join(parts) + "."


def say_changes(changes: FileChanges, store: Store) -> None:
    """Tell a person what was done to files, and how to take it back."""
    if changes.undo_ids and out.mode == "human":
        out.paragraph(changes.sentence(store.folders()), as_talk=True)
        out.talk(changes.way_back)


def _amount(files: tuple[PlannedFile, ...]) -> str:
    return f"{counted(len(files), 'file')}, {format_size(sum(each.size for each in files))}"


def _room_for_names(files: Sequence[PlannedFile], *, as_talk: bool) -> int | None:
    """Return how wide the column of file names may be; None: as wide as they are."""
    stream = sys.stderr if as_talk else sys.stdout
    if not stream.isatty():
        return None
    origins = min(_MOST_FOR_ORIGIN, max(len(_origin(each)) for each in files))
    return max(16, terminal_width(stream) - len("present  100.0 MB    ") - origins)


def _row(each: PlannedFile, room: int | None) -> list[str]:
    name = each.file.path if room is None else shortened(each.file.path, room)
    size = "?" if each.file.size is None else format_size(each.file.size)
    return [each.source, size, name, _origin(each)]


def _origin(each: PlannedFile) -> str:
    from smartcache.report.naming import from_home

    if each.source == "fetch":
        return "the Hub"
    if each.offer is not None:
        return f"the tier {each.offer.tier.name}"
    if each.source == "present":
        is_waiting = each.is_large and not each.is_proven
        return "to be hashed" if is_waiting else ""
    if each.digest:
        return "the store"
    more = len(each.candidates) - 1
    others = f" or {counted(more, 'other')}" if more and not each.candidates[0].is_known else ""
    return f"{from_home(each.candidates[0].path)}{others}"


def _sums(plan: DownloadPlan) -> list[list[str]]:
    rows = []
    for source, meaning in _MEANING.items():
        files = tuple(each for each in plan.files if each.source == source)
        if files:
            size = format_size(sum(each.size for each in files))
            words = "fetched again, as you asked" if plan.request.force else meaning
            rows.append([source, counted(len(files), "file"), size, words])
    return rows


# what the user should know


def cautions(plan: DownloadPlan, *, dry_run: bool) -> list[str]:
    """Return what the user may not expect of this plan, one sentence or two on each matter."""
    from smartcache.hub import LocalPlace, near_pool
    from smartcache.report.naming import from_home
    from smartcache.system.kernel import effective_user

    weights = [each for each in plan.files if each.is_weight and each.source != "present"]
    found = [f"{warning}." for warning in plan.warnings]
    if weights and near_pool(plan.store, plan.place.root) is None:
        found.append(
            f"{from_home(plan.folder)} is on another filesystem than the store "
            f"({from_home(plan.store.root)}): nothing can be linked, every file takes its own "
            "space."
        )
    elif weights and isinstance(plan.place, LocalPlace) and effective_user() == 0:
        found.append(
            "You are root: weights in --local-dir are copies, not links, because root could write "
            "into bytes that others share."
        )
    if dry_run:
        try:
            plan.require_room()
        except NoSpaceError as error:
            found.append(f"{error}.")
    return found


# for programs


def plan_document(plan: DownloadPlan, result: DownloadResult | None) -> dict[str, object]:
    """Return a plan, and what came of it unless it was only looked at, as one document."""
    from smartcache.hub import DownloadResult

    known = {} if result is None else _digests(plan)
    done = picked(DownloadResult(path="") if result is None else result)
    return {
        "repo": plan.repo.id,
        "type": plan.repo.type,
        "revision": plan.revision,
        "commit": plan.commit,
        "files": [_file_document(each, known) for each in plan.files],
        **picked(plan, "present_size saved_size tier_size fetch_size needed_size unproven_size"),
        "dry_run": result is None,
        **done,
        "path": done["path"] or None,
    }


def _file_document(each: PlannedFile, known: dict[str, str]) -> dict[str, object]:
    digest = known.get(each.file.path, each.digest)
    return {
        "path": each.file.path,
        "size": each.file.size,
        "etag": each.file.etag,
        "source": each.source,
        "origin": None if each.source == "present" else each.origin,
        "digest": digest or None,
        "proven": each.is_proven or each.file.path in known,
    }


def _digests(plan: DownloadPlan) -> dict[str, str]:
    """Return the digests of the files that are proven to be what the Hub announced."""
    places = {each.file.path: plan.place.found(each.file) for each in plan.files}
    known = plan.store.known_hashes(path for path in places.values() if path is not None)
    digests: dict[str, str] = {}
    for each in plan.files:
        path = places[each.file.path]
        hashes = {} if path is None else known.get(path, {})
        announced = each.file.announced
        if announced and hashes.items() >= announced.items():
            digests[each.file.path] = hashes.get("blake3", "")
    return digests


def commit_in(path: str) -> str | None:
    """Return the commit of a snapshot that a path lies in; None if it lies in none."""
    parts = path.split(os.sep)
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None
