"""Tiers beyond this machine: `remote add`, `ls`, `rm`, `push`, `pull`, `verify`, `gc`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, age, asks, command, dry_run, group
from smartcache.cli._failures import DAMAGED, BadUsageError, BadValueError
from smartcache.cli._hub import cache_dirs_option, hf_caches
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, short
from smartcache.sizes import format_age, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from pathlib import Path

    from smartcache.remote import GcPlan, GcResult, Remote, Sent, Step, Tier, TierReport

_MOST_SHOWN = 20
_REMOTES = ("NAME", "CHANGES", "PARTS", "URL~")
_CONTENTS = ("KIND", "OBJECTS>", "SIZE>", "NAME~")
_STEPS = ("KIND", "TO MOVE>", "THERE>", "NAME~")


@group(
    "remote",
    examples=(
        ("smartcache remote add nas /mnt/nas/smartcache", "a folder that several machines see"),
        ("smartcache remote push nas org/name", "others need not download it"),
        ("smartcache remote pull nas org/name", "on another machine, without the Hub"),
    ),
)
def remote_command() -> None:
    """Share models and tensors with other machines: NAS, S3, ...

    A remote is a place that several machines reach: a folder of a NAS, or a bucket of S3, Google or
    Azure. What one machine has pushed there, 'smartcache download' and from_pretrained of all
    others take from there before they ask the Hub. It needs the package obstore: pip install
    'smartcache-hub[remote]'.
    """


@command(
    "add",
    examples=(
        ("smartcache remote add nas /mnt/nas/smartcache", "a folder, made if it is not there"),
        ("smartcache remote add team s3://bucket/models", "credentials from the environment"),
        ("smartcache remote add lab s3://b --option endpoint=http://minio:9000", "another server"),
    ),
)
@click.argument("name", metavar="NAME")
@click.argument("url", metavar="URL")
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE",
    help="What the server needs besides: endpoint, region. No secrets. Repeatable.",
)  # fmt: skip
def add_command(*, name: str, url: str, options: tuple[str, ...]) -> None:
    """Give a name to a NAS folder or bucket, and try it.

    URL is a folder (new, empty, or a remote already), or s3://bucket/prefix, gs://... or az://...
    Something is written, read and removed there, to see what the server does. Credentials are never
    kept: they are found as the tools of each server find them, for instance in AWS_ACCESS_KEY_ID.
    'remote add' again tries it again.
    """
    from smartcache.remote import Remotes

    made = Remotes().add(name, url, dict(map(_key_value, options)))
    out.show(human=lambda: _say_added(made), document=lambda: made, ids=lambda: [made.name])


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        hint = "Write --option endpoint=http://127.0.0.1:9000."
        raise BadValueError(f"{text!r} is not KEY=VALUE", hint=hint)
    return key, value


def _say_added(made: Remote) -> None:
    out.line(f"Added {made.name}: {made.url}")
    if not made.writes:
        out.warn("You may not write there: it is there to download and pull from.")
    elif made.creates:
        out.talk("It refuses to overwrite: two machines that push at once lose nothing.")
    else:
        out.warn(
            "It does not refuse to overwrite. If two machines push the same repo, set or dataset "
            "at the same moment, the last writer wins: push again what is missing then."
        )
    if not made.ranges:
        out.talk("It does not send parts of files: packs of tensors are fetched whole.")
    if made.writes:
        out.talk(f"'smartcache remote push {made.name} REPO' shares a repo.")


@command(
    "ls",
    examples=(
        ("smartcache remote ls", "the remotes"),
        ("smartcache remote ls nas", "what is there"),
        ("smartcache remote ls nas -q", "names for 'remote pull'"),
    ),
)
@click.argument("name", metavar="[NAME]", required=False)
def ls_command(*, name: str | None) -> None:
    """List the remotes, or what one of them has.

    CHANGES says what happens if two machines change the same thing at once: "safe", or "last wins";
    "read only" means that you may not write there. PARTS says whether the server sends parts of a
    file. OBJECTS and SIZE are what each thing needs; an object that several need is there once.
    """
    from smartcache.remote import Remotes, pullable

    remotes = Remotes()
    if name is None:
        found = remotes.all()
        out.show(
            human=lambda: _show_remotes(found),
            document=lambda: found,
            ids=lambda: [each.name for each in found],
        )
        return
    tier = remotes.tier(name)
    tier.check()
    contents = list(pullable(tier))
    rows = [
        [kind, f"{len(said['objects']):,}", format_size(sum(said["objects"].values())), text]
        for kind, text, said in contents
    ]
    out.show(
        human=lambda: (
            out.table(_CONTENTS, rows) if rows else out.line(f"Nothing was pushed to {name} yet.")
        ),
        document=lambda: [
            {
                "kind": kind,
                "name": text,
                "objects": len(said["objects"]),
                "size": sum(said["objects"].values()),
                "updated_at": said["updated_at"],
            }
            for kind, text, said in contents
        ],
        ids=lambda: [text for _, text, _ in contents],
    )


def _changes(each: Remote) -> str:
    if not each.writes:
        return "read only"
    return "safe" if each.creates else "last wins"


def _show_remotes(found: list[Remote]) -> None:
    if not found:
        out.line("There are no remotes; 'smartcache remote add NAME URL' makes one.")
        return
    rows = ([each.name, _changes(each), "yes" if each.ranges else "no", each.url] for each in found)
    out.table(_REMOTES, rows)


@command("rm", examples=(("smartcache remote rm nas", "forget the name; what is there stays"),))
@click.argument("name", metavar="NAME")
def rm_command(*, name: str) -> None:
    """Forget a remote; nothing is removed there."""
    from smartcache.remote import Remotes

    gone = Remotes().remove(name)
    out.show(
        human=lambda: out.line(f"Forgot {gone.name}; what is at {gone.url} stays there."),
        document=lambda: gone,
        ids=lambda: [gone.name],
    )


@command(
    "push",
    examples=(
        ("smartcache remote push nas org/name", "all revisions in the HF cache"),
        ("smartcache remote push nas org/name@main datasets/org/data", "one revision; a dataset"),
        ("smartcache remote push nas 3f2a91c0", "a blob, by its digest"),
        ("smartcache remote push nas photos", "a dataset of training, or a set of artifacts"),
    ),
)
@click.argument("name", metavar="NAME")
@click.argument("words", metavar="REPO[@REV]|DIGEST|SET|DATASET...", nargs=-1)
@cache_dirs_option
@click.option(
    "--exact", is_flag=True,
    help="Of sets and datasets, take from the remote what this machine has pushed and deleted.",
)  # fmt: skip
@dry_run
@click.pass_obj
def push_command(
    session: Session,
    *,
    name: str,
    words: tuple[str, ...],
    cache_dirs: tuple[Path, ...],
    exact: bool,
    dry_run: bool,
) -> None:
    """Send repos, blobs, sets or datasets to a remote.

    What is there already is not sent. Every byte is hashed on the way; revisions that other
    machines have pushed stay. If it is interrupted, run the same command again: it goes on with
    what is missing.
    """
    from smartcache.remote import plan_push, pushable

    with session.cache(only_look=dry_run) as cache:
        tier = cache.tier(name)
        if not words:
            raise _name_some("push", pushable(cache.store, cache.sets))
        caches = hf_caches(cache_dirs, cache.store) if cache_dirs else None
        steps = plan_push(
            cache.store, cache.sets, tier, words, caches=caches, exact=exact, progress=bars
        )
        _move(session, tier, steps, "push", dry_run=dry_run)


@command(
    "pull",
    examples=(
        ("smartcache remote pull nas org/name", "into the HF cache; the Hub is not asked"),
        ("smartcache remote pull nas org/name@main", "one revision"),
        ("smartcache remote pull nas org/name --dry-run", "how much would come"),
        ("smartcache remote pull nas photos", "a dataset of training, or a set of artifacts"),
    ),
)
@click.argument("name", metavar="NAME")
@click.argument("words", metavar="REPO[@REV]|DIGEST|SET|DATASET...", nargs=-1)
@click.option("--cache-dir", type=FILE, metavar="DIR", help="The HF cache.  [default: the Hub's]")
@click.option(
    "--update-refs", is_flag=True,
    help="Move branches and tags that are at another commit here, instead of keeping them.",
)  # fmt: skip
@dry_run
@click.pass_obj
def pull_command(
    session: Session,
    *,
    name: str,
    words: tuple[str, ...],
    cache_dir: Path | None,
    update_refs: bool,
    dry_run: bool,
) -> None:
    """Bring repos, blobs, sets or datasets from a remote.

    Repos come into the HF cache, where every program finds them; the Hub is not asked. Blobs come
    into the store and are pinned. What is here already is not fetched, and every byte is hashed
    before it is used. If it is interrupted, run the same command again.
    """
    from smartcache.remote import plan_pull, pullable

    with session.cache(only_look=dry_run) as cache:
        tier = cache.tier(name)
        if not words:
            tier.check()
            raise _name_some("pull", [text for _, text, _ in pullable(tier)])
        steps = plan_pull(
            cache.store, cache.sets, tier, words, cache_dir=cache_dir, update_refs=update_refs,
            progress=bars,
        )  # fmt: skip
        _move(session, tier, steps, "pull", dry_run=dry_run)


def _name_some(verb: str, known: Sequence[str]) -> BadUsageError:
    shown = ", ".join(known[:_MOST_SHOWN])
    more = f" and {len(known) - _MOST_SHOWN:,} more" if known[_MOST_SHOWN:] else ""
    hint = f"There is {shown}{more}." if known else "There is nothing that could be named."
    return BadUsageError(f"Say what to {verb}.", hint=hint)


def _move(session: Session, tier: Tier, steps: list[Step], verb: str, *, dry_run: bool) -> None:
    from smartcache.remote import Sent

    for step in steps:
        for text in step.warnings:
            out.warn(text)
    session.how_far = lambda: "What has arrived is kept; run the same command again to go on."
    done = [(step, Sent() if dry_run else step.execute(bars)) for step in steps]
    session.how_far = None
    out.show(
        human=lambda: _say_moved(tier, done, verb, dry_run=dry_run),
        document=lambda: {
            "dry_run": dry_run,
            "remote": tier.name,
            "url": tier.url,
            "items": [
                {
                    **picked(step, "kind name size there_size"),
                    "objects": sent.objects,
                    "moved_size": sent.size,
                    "skipped": sent.skipped,
                    "skipped_size": sent.skipped_size,
                    "warnings": step.warnings,
                }
                for step, sent in done
            ],
        },
        ids=lambda: [step.name for step, _ in done],
    )


def _say_moved(tier: Tier, done: list[tuple[Step, Sent]], verb: str, *, dry_run: bool) -> None:
    if dry_run:
        out.table(_STEPS, ([s.kind, _size(s.size), _size(s.there_size), s.name] for s, _ in done))
        total = format_size(sum(step.size or 0 for step, _ in done))
        where = f"to {tier.name}" if verb == "push" else f"from {tier.name}"
        out.line(f"Would {verb} {total} {where}.")
        return
    for step, sent in done:
        moved = f"{counted(sent.objects, 'object')}, {format_size(sent.size)}"
        place = "there" if verb == "push" else "here"
        there = f"; {format_size(sent.skipped_size)} {place} already" if sent.skipped else ""
        word = "Pushed" if verb == "push" else "Pulled"
        out.line(f"{word} {step.kind} {step.name}: {moved}{there}.")


def _size(size: int | None) -> str:
    return "?" if size is None else format_size(size)


@command(
    "verify",
    examples=(
        ("smartcache remote verify nas", "read and hash every byte that is there"),
        ("smartcache remote verify nas --fast", "only that everything is there, by size"),
        ("smartcache remote verify nas --repair", "remove what is damaged, to push it again"),
    ),
)
@click.argument("name", metavar="NAME")
@click.option("--fast", is_flag=True, help="Compare sizes only; no object is read.")
@click.option("--repair", is_flag=True, help="Remove what is damaged: it is of no use to anybody.")
@click.option("-y", "--yes", is_flag=True, help="Do it without asking.")
@click.pass_context
def verify_command(ctx: click.Context, *, name: str, fast: bool, repair: bool, yes: bool) -> None:
    """Check that a remote has what was pushed to it.

    Every repo, set and dataset there says which objects it needs. Those that are missing or damaged
    are named, with who needs them. --repair removes what is damaged, so that a push from a machine
    that has it sends it again; nothing else is changed. Exits with 3 if damage was found.
    """
    from smartcache.remote import Remotes, remove_damaged, verify_tier

    tier = Remotes().tier(name)
    report = verify_tier(tier, fast=fast, progress=bars)
    removed = 0
    damaged = [each for each in report.findings if each.kind != "missing"]
    if repair and damaged:
        if not yes and out.mode == "human":
            _show_findings(report, as_talk=True)
        out.confirm(f"Remove {counted(len(damaged), 'damaged object')} of {name}?", yes=yes)
        removed = remove_damaged(tier, damaged)
    out.show(
        human=lambda: _say_verified(report, removed, fast=fast),
        document=lambda: {
            "has_damage": bool(report.findings),
            "fast": fast,
            **picked(report),
            "removed": removed,
        },
        ids=lambda: [each.digest or each.needed_by[0] for each in report.findings],
    )
    if report.findings:
        ctx.exit(DAMAGED)


def _say_verified(report: TierReport, removed: int, *, fast: bool) -> None:
    what = f"{counted(report.objects, 'object')} of {counted(report.documents, 'document')}"
    how = "by size" if fast else "byte by byte"
    out.line(f"Checked {what}, {format_size(report.size)}, {how}.")
    if not report.findings:
        out.line("No damage was found.")
        return
    out.line(f"Damage was found: {counted(len(report.findings), 'object')}.")
    _show_findings(report)
    if removed:
        out.line(f"Removed {counted(removed, 'damaged object')}.")
    first = (
        ""
        if removed or all(each.kind == "missing" for each in report.findings)
        else ("Run it with --repair, which removes what is damaged. Then push")
    )
    out.talk(f"{first or 'Push'} again what is named here, from a machine that has it.")


def _show_findings(report: TierReport, *, as_talk: bool = False) -> None:
    for each in report.findings[:_MOST_SHOWN]:
        name = f"{short(each.digest)} " if each.digest else ""
        text = f"  {each.kind} {name}({', '.join(each.needed_by)}): {each.reason}"
        out.line(text, as_talk=as_talk)
    if report.findings[_MOST_SHOWN:]:
        more = len(report.findings) - _MOST_SHOWN
        out.line(f"  ... and {more:,} more; --json has all", as_talk=as_talk)


@command(
    "gc",
    examples=(
        ("smartcache remote gc nas --dry-run", "what nothing there needs any more"),
        ("smartcache remote gc nas --older-than 7d -y", "from a timer, without asking"),
    ),
)
@click.argument("name", metavar="NAME")
@click.option(
    "--older-than", type=age, default="24h", show_default=True, metavar="AGE",
    help="Leave what is younger: it may belong to a push that is under way.",
)  # fmt: skip
@asks
def gc_command(*, name: str, older_than: timedelta, dry_run: bool, yes: bool) -> None:
    """Remove objects of a remote that nothing there needs.

    A push sends objects before the document that needs them, so young ones are left alone. Before
    something is removed the documents are read again. Files that smartcache did not make are named
    and never removed. This cannot be undone; what machines have pulled stays with them.
    """
    from smartcache.remote import Remotes, plan_gc

    plan = plan_gc(Remotes().tier(name), older_than=older_than, progress=bars)
    result: GcResult | None = None
    if not plan.is_empty and not dry_run:
        freed = format_size(plan.freed_size)
        what = _going(plan)
        out.confirm(f"Remove {what} of {name} for good and free {freed}?", yes=yes)
        result = plan.execute(bars)
    out.show(
        human=lambda: _say_collected(plan, result, older_than, dry_run=dry_run),
        document=lambda: {
            "dry_run": dry_run,
            "remote": plan.tier,
            "objects": [each.path for each in plan.objects],
            "names": len(plan.names),
            "leftovers": [each.path for each in plan.leftovers],
            "foreign": plan.foreign,
            "planned_size": plan.freed_size,
            **picked(plan, "kept_size young young_size"),
            "removed": 0 if result is None else result.removed,
            "freed_size": 0 if result is None else result.freed_size,
            "kept": 0 if result is None else result.kept,
        },
        ids=lambda: [each.path for each in plan.objects],
    )


def _going(plan: GcPlan) -> str:
    parts = [counted(len(plan.objects), "object")]
    if plan.leftovers:
        parts.append(counted(len(plan.leftovers), "half-made file"))
    return " and ".join(parts)


def _say_collected(
    plan: GcPlan, result: GcResult | None, older_than: timedelta, *, dry_run: bool
) -> None:
    if result is not None:
        out.line(f"Removed {_going(plan)}, freed {format_size(result.freed_size)}.")
        if result.kept:
            out.talk(f"{counted(result.kept, 'object')} came into use meanwhile and stayed.")
    elif plan.is_empty:
        out.line("Nothing to remove: everything is needed, or too young.")
    elif dry_run:
        out.line(f"Would remove {_going(plan)} and free {format_size(plan.freed_size)}.")
    if plan.young:
        text = (
            f"{counted(plan.young, 'object')}, {format_size(plan.young_size)}, that nothing needs"
        )
        out.talk(f"{text} is younger than {format_age(older_than)} and stays.")
    if plan.foreign:
        shown = ", ".join(plan.foreign[:_MOST_SHOWN])
        more = len(plan.foreign) - _MOST_SHOWN
        rest = f" and {more:,} more; --json has all" if more > 0 else ""
        out.talk(f"Not made by smartcache, so not touched: {shown}{rest}.")


for _command in (
    add_command,
    ls_command,
    rm_command,
    push_command,
    pull_command,
    verify_command,
    gc_command,
):
    remote_command.add_command(_command)
