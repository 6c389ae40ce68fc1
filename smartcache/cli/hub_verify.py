"""Comparing repos with what the Hub announced, offline: `hub verify`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import asks, command
from smartcache.cli._failures import DAMAGED, BadUsageError
from smartcache.cli._hub import cache_dirs_option, chosen, hf_caches
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import CachedRepo, Finding, RepairPlan, RepairResult, RepoVerifyReport

_MOST_SHOWN = 20


@command(
    "verify",
    examples=(
        ("smartcache hub verify", "every file of every repo, offline; the second time is quick"),
        ("smartcache hub verify org/name dataset/org/data", "these only"),
        ("smartcache hub verify --full", "hashes again what is remembered"),
        ("smartcache hub verify --repair", "moves damaged files away, for a new download"),
    ),
)
@click.argument("repos", nargs=-1, metavar="[REPO...]")
@click.option("--full", is_flag=True, help="Hash every file again.")
@click.option("--repair", is_flag=True, help="Move damaged files to bad/ of the store.")
@cache_dirs_option
@asks
@click.pass_context
def verify_command(
    ctx: click.Context,
    *,
    repos: tuple[str, ...],
    full: bool,
    repair: bool,
    cache_dirs: tuple[Path, ...],
    dry_run: bool,
    yes: bool,
) -> None:
    """Compare the files of repos with the hashes the Hub announced.

    The hashes are known from the names of blobs, from the listings huggingface_hub keeps, and from
    the index; the network is not used. If there is a store, it remembers what was hashed. No file
    is changed without --repair, which moves damaged files to bad/ of the store, and removes the
    pointers to them and what killed downloads have left half-made. Exits with 3 if damage was
    found.
    """
    from smartcache.hub import CachePlace, plan_repair, scan_caches, verify_repos

    session = ctx.ensure_object(Session)
    if dry_run and not repair:
        raise BadUsageError("--dry-run is for --repair", hint="Verify alone changes no file.")
    only_look = dry_run or not (repair or session.has_store())
    with session.store(create=True, only_look=only_look) as store:
        everything = scan_caches(hf_caches(cache_dirs, store))
        wanted = _wanted(everything, repos)
        report = verify_repos(store, wanted, full=full, progress=bars)
        plan: RepairPlan | None = None
        if repair:
            plan = plan_repair(store, everything, report.damage)
            _ask(report, plan, dry_run=dry_run, yes=yes)
        result = None
        if plan is not None and not dry_run:
            for repo in wanted:
                CachePlace(cache_dir=repo.cache_dir, repo=repo.repo).clear()
            result = None if plan.is_empty else plan.execute()
        root = session.settings.home if session.has_store() else None
        out.show(
            human=lambda: _say(report, plan, result),
            document=lambda: _document(root, report, plan, result, dry_run=dry_run),
            ids=lambda: list(dict.fromkeys(each.repo for each in report.damage)),
        )
    if report.damage:
        ctx.exit(DAMAGED)


def _wanted(everything: list[CachedRepo], words: tuple[str, ...]) -> list[CachedRepo]:
    if not words:
        return everything
    found = chosen(everything, words)
    if any(commit is not None for _, commit in found):
        hint = "Name the repo without it: the revisions of a repo share their blobs."
        raise BadUsageError("A single revision cannot be verified", hint=hint)
    return [repo for repo, _ in found]


def _ask(report: RepoVerifyReport, plan: RepairPlan, *, dry_run: bool, yes: bool) -> None:
    """Say what a repair would do, and go on only if that is wanted."""
    for warning in plan.warnings:
        out.warn(warning)
    if dry_run or plan.is_empty:
        return
    if not yes and out.mode == "human":
        _show(report.damage, as_talk=True)
    files, pointers = counted(len(plan.files), "damaged file"), _pointers(plan)
    out.confirm(f"Move {files} to bad/ and remove {counted(pointers, 'pointer')}?", yes=yes)


def _pointers(plan: RepairPlan) -> int:
    return len({*plan.pointers, *(name for each in plan.files for name in each.pointers)})


def _show(findings: list[Finding], *, as_talk: bool = False) -> None:
    from smartcache.hub import MEANINGS

    for each in findings[:_MOST_SHOWN]:
        where = f"{each.repo}{f'@{short(each.revision)}' if each.revision else ''}"
        what = each.path or str(each.file)
        out.line(f"  {where} {what}: {MEANINGS[each.kind]}", as_talk=as_talk)
        if each.expected and each.actual is not None and each.algorithm:
            text = f"{each.algorithm} {short(each.expected)}, not {short(each.actual)}"
            out.line(f"    announced was {text}", as_talk=as_talk)
    if findings[_MOST_SHOWN:]:
        out.line(f"  ... and {len(findings) - _MOST_SHOWN:,} more; --json has all", as_talk=as_talk)


def _say(report: RepoVerifyReport, plan: RepairPlan | None, result: RepairResult | None) -> None:
    from smartcache.hub import MEANINGS

    files, size = counted(report.files, "file"), format_size(report.size)
    out.line(f"Checked {files} of {counted(report.repos, 'repo')}: {size}.")
    information = Counter(each.kind for each in report.findings if not each.is_damage)
    for kind, number in sorted(information.items()):
        out.talk(f"{counted(number, 'file' if kind != 'lost ref' else 'ref')}: {MEANINGS[kind]}.")
    if not report.damage:
        out.line("No damage was found.")
        return
    out.line(f"Damage was found: {counted(len(report.damage), 'file')}.")
    _show(report.damage)
    if result is not None:
        _say_repaired(result)
    elif plan is not None and not plan.is_empty:
        files = counted(len(plan.files), "damaged file")
        out.line(f"Would move {files} to bad/ and remove {counted(_pointers(plan), 'pointer')}.")
    else:
        out.talk("'smartcache hub verify --repair' takes them away; then download them again.")


def _say_repaired(result: RepairResult) -> None:
    moved = counted(len(result.moved), "damaged file")
    out.line(f"Moved {moved} to bad/, removed {counted(result.unlinked, 'pointer')}.")
    for path, reason in result.failures:
        out.warn(f"{path} was left as it is: {reason}")
    out.talk("Now run 'smartcache download REPO' again: it fetches what is missing.")


def _document(
    root: Path | None,
    report: RepoVerifyReport,
    plan: RepairPlan | None,
    result: RepairResult | None,
    *,
    dry_run: bool,
) -> dict[str, object]:
    document: dict[str, object] = {
        "has_damage": bool(report.damage),
        "repos": report.repos,
        "files": report.files,
        "checked": report.bodies,
        "checked_size": report.size,
        "mismatches": report.damage,
        "information": [each for each in report.findings if not each.is_damage],
        "root": root,
    }
    if plan is not None:
        document["repair"] = {
            "dry_run": dry_run,
            "files": [each.file for each in plan.files],
            "pointers": _pointers(plan),
            "moved": []
            if result is None
            else [{"path": path, "bad": bad} for path, bad in result.moved],
            "unlinked": 0 if result is None else result.unlinked,
            "failures": []
            if result is None
            else [{"path": path, "reason": reason} for path, reason in result.failures],
            "warnings": plan.warnings,
        }
    return document
