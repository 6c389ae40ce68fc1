"""Datasets: sources, and what encoders have made of them.

`ls` and `show` say what is known, `plan` looks at the sources, `clean` removes what no source wants
any more, `export` and `import` carry a dataset elsewhere. Nothing is encoded here: encoders are
functions of the programs that use a dataset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from smartcache.cli._artifacts import MORE, all_sets, fields_of, sets_to_fill
from smartcache.cli._command import FILE, asks, command, dry_run, group
from smartcache.cli._failures import FAILED
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import ago, clock, counted, near, short
from smartcache.errors import (
    DatasetError,
    DestinationExistsError,
    NoSpaceError,
    OutputMissingError,
    SmartcacheError,
    SourcesVanishedError,
)
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.artifacts import ArtifactSets, SetResult
    from smartcache.training import BuildPlan, CleanPlan, Dataset, Output

_MOST_LEFT_OUT = 10
_MOST_NAMED = 3
_SINGLE, _SIDE = '[""]', '[".side"]'
"""Fields of an output: that of one which is a single tensor; and where it was trimmed."""
_ROWS = ("NAME", "ITEMS>", "READY>", "OUTPUTS~", "ON DISK>", "SOURCES~")
_SOURCES = ("  SOURCES~", "ITEMS>", "REPEATS>", "SIDECARS~")
_PLAN = ("OUTPUT", "READY>", "TO ENCODE>", "WHY~")
_VICTIMS = ("SET~", "ARTIFACTS>", "FREES>", "WHY~")
_VALUES = ("", "~")


@group(
    "datasets",
    examples=(
        ("smartcache datasets ls", "all datasets, and how much of each is encoded"),
        ("smartcache datasets plan photos", "what the next build would encode, and why"),
        ("smartcache datasets export photos /media/usb/photos", "to train without the sources"),
    ),
)
def datasets_command() -> None:
    """Look after datasets: sources, and what was encoded of them.

    A program makes and builds them, with cache.dataset(...) of the Python package.
    """


_named = click.argument("name", metavar="NAME")


@contextmanager
def _opened(
    session: Session, name: str, *, trust: bool = True, if_vanished: str = ""
) -> Iterator[tuple[Dataset, ArtifactSets]]:
    """Open a dataset of the store, with all sets; `if_vanished` is the hint when sources have."""
    from smartcache.training import dataset_folders, stored_dataset

    with all_sets(session) as sets:
        folders = {folder.parent.name: folder for folder in dataset_folders(sets.root)}
        if name not in folders:
            from difflib import get_close_matches

            alike = get_close_matches(name, folders, n=1)
            hint = f"Did you mean {alike[0]!r}? " if alike else ""
            hint += "'smartcache datasets ls' shows what is there."
            raise DatasetError(f"There is no dataset {name!r}", hint=hint)
        threads = session.settings.threads
        try:
            with stored_dataset(folders[name], sets, trust=trust, threads=threads) as dataset:
                yield dataset, sets
        except SourcesVanishedError as error:
            error.hint = if_vanished or error.hint
            raise


# ls


class _Row(NamedTuple):
    name: str
    path: Path
    problem: str = ""
    cure: str = ""
    items: int = 0
    ready: int = 0
    outputs: Sequence[str] = ()
    sources: Sequence[str] = ()
    sets: Sequence[str] = ()


@command(
    "ls",
    examples=(
        ("smartcache datasets ls", "all datasets, and how much of each is encoded"),
        ("smartcache datasets ls --json", "with full paths and integer bytes"),
        ("smartcache datasets ls -q", "their names"),
    ),
)
@click.pass_obj
def ls_command(session: Session) -> None:
    """List the datasets, and how much of each is encoded.

    ITEMS are all that were there when the sources were last looked at; nothing is looked at now.
    READY are those that have all outputs. ON DISK are the sets of all outputs, also old ones.
    """
    from smartcache.training import dataset_folders

    with all_sets(session) as sets:
        rows = [_row(folder, sets) for folder in dataset_folders(sets.root)]
        sizes = {info.full_name: info.on_disk for info in sets.infos()} if rows else {}
    for row in rows:
        if row.problem:
            out.warn(f"{row.name}: {row.problem}")
            out.talk(row.cure)
    # A set that several datasets share counts once.
    total = sum(sizes.get(name, 0) for name in {name for row in rows for name in row.sets})
    out.show(
        human=lambda: _say_rows(rows, sizes, total),
        document=lambda: {
            "datasets": [{**row._asdict(), "on_disk": _size(row, sizes)} for row in rows],
            "on_disk": total,
        },
        ids=lambda: [row.name for row in rows],
    )


def _row(folder: Path, sets: ArtifactSets) -> _Row:
    from smartcache.training import stored_dataset

    name = folder.parent.name
    try:
        with stored_dataset(folder, sets) as dataset:
            plan = dataset.plan()
            return _Row(
                name=name, path=folder, items=plan.items, ready=plan.ready,
                outputs=list(dataset.outputs), sets=dataset.document.get("sets", ()),
                sources=[each["source"] for each in _sources(dataset)],
            )  # fmt: skip
    except (SmartcacheError, OSError) as error:
        cure = error.hint if isinstance(error, SmartcacheError) else ""
        return _Row(name=name, path=folder, problem=str(error), cure=cure)


def _size(row: _Row, sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in row.sets)


def _say_rows(rows: Sequence[_Row], sizes: Mapping[str, int], total: int) -> None:
    if not rows:
        out.line("There are no datasets.")
        out.talk("A program makes them: cache.dataset(...) of the Python package.")
        return
    cells = []
    for row in rows:
        outputs, sources = ", ".join(row.outputs), ", ".join(map(_from_home, row.sources))
        size = format_size(_size(row, sizes))
        known = [f"{row.items:,}", f"{row.ready:,}", outputs, size, sources]
        cells.append([row.name, *(["?"] * len(known) if row.problem else known)])
    out.table(_ROWS, cells)
    items = counted(sum(row.items for row in rows), "item")
    out.talk(f"{counted(len(rows), 'dataset')}, {items}, {format_size(total)} on disk.")


# show


@command(
    "show",
    examples=(
        ("smartcache datasets show photos", "sources, outputs, and what is left out"),
        ("smartcache datasets show photos --json", "all that is left out, with the reasons"),
        ("smartcache datasets show photos -q", "the names of its items"),
    ),
)
@_named
@click.pass_obj
def show_command(session: Session, *, name: str) -> None:
    """Show a dataset: its sources, its outputs, and what is left out.

    As it was when the sources were last looked at; 'smartcache datasets plan' looks again.
    """
    with _opened(session, name) as (dataset, sets):
        plan = dataset.plan()
        outputs = [_about(output, dataset, sets) for output in dataset.outputs.values()]
        once = set(dataset.document.get("sets", ())) - {each["set"] for each in outputs}
        document = {
            "name": name,
            "path": dataset.path,
            "created_at": dataset.document.get("created_at"),
            "items": plan.items,
            "usable": len(dataset),
            "ready": plan.ready,
            "sources": _sources(dataset),
            "outputs": outputs,
            "left_out": [each._asdict() for each in plan.failed],
            "old_sets": [
                {"set": info.full_name, "on_disk": info.on_disk}
                for info in sets.infos()
                if info.full_name in once
            ],
        }
        out.show(
            human=lambda: _say_dataset(document, plan),
            document=lambda: document,
            ids=lambda: [dataset.listing.name(number) for number in range(len(dataset.listing))],
        )


def _sources(dataset: Dataset) -> list[dict[str, Any]]:
    """Return the sources of a dataset: where, and how many items."""
    from collections import Counter

    counts = Counter(dataset.listing.part)
    return [
        {
            "source": "a list" if part.is_list and not part.jsonl else part.label,
            "items": counts[number],
            "repeats": part.repeats,
            "sidecars": {
                name: [":".join(filter(None, each)) for each in ends]
                for name, ends in part.sidecars
            },
            "metadata": part.metadata,
        }
        for number, part in enumerate(dataset.sources.parts)
    ]


def _counts(output: Output, dataset: Dataset) -> dict[str, int]:
    """Return how much of an output is there; items that are left out do not count."""
    good = dataset.is_good
    missing = int(good[output.missing // output.variations].sum())
    ready = int(good.sum()) * output.variations - missing
    return {"ready": ready, "missing": missing, "failed": len(output.failures)}


def _about(output: Output, dataset: Dataset, sets: ArtifactSets) -> dict[str, Any]:
    """Return what an output is, what it depends on, and how much of it is there."""
    from collections import Counter

    info, spec = output.set.describe(), output.spec
    sizes: Counter[str] = Counter()
    if spec["buckets"]:
        some = output.keys.bucket[dataset.is_good].tolist()
        sizes.update(f"{width}x{height}" for width, height in some)
    return {
        "output": output.name,
        "set": info.full_name,
        "fingerprint": spec["fingerprint"],
        "reads": spec["reads"],
        "trim": spec["trim"],
        "variations": output.variations,
        "buckets": spec["buckets"],
        "items_by_bucket": dict(sizes.most_common()),
        "fields": [
            each._asdict() for each in fields_of(sets.structures(info)) if each.name != _SIDE
        ],
        **_counts(output, dataset),
        "live": info.live,
        "on_disk": info.on_disk,
    }


def _say_dataset(document: Mapping[str, Any], plan: BuildPlan) -> None:
    from datetime import datetime

    out.heading(document["name"])
    about = [["  folder", str(document["path"])]]
    if document["created_at"]:
        then = datetime.fromisoformat(document["created_at"])
        about.append(["  made", f"{clock(then)} ({ago(then)})"])
    about.append(["  items", f"{plan.items:,}, {plan.ready:,} of them ready"])
    out.table(_VALUES, about)
    out.line()
    rows = []
    for each in document["sources"]:
        beside = (f"{name}: {', '.join(ends)}" for name, ends in each["sidecars"].items())
        where, count = _from_home(each["source"]), f"{each['items']:,}"
        rows.append([f"  {where}", count, f"{each['repeats']:g}", "; ".join(beside)])
    out.table(_SOURCES, rows)
    for each in document["outputs"]:
        out.line()
        out.heading(each["output"])
        out.table(_VALUES, _lines(each))
    _say_left_out(plan, plan.items - document["usable"])
    for each in document["old_sets"]:
        what = f"{_short(each['set'])} ({format_size(each['on_disk'])}) is of an old encoder"
        out.talk(f"{what}: 'smartcache datasets clean {document['name']} -n' says what can go.")
    if not plan.items:
        out.talk(f"'smartcache datasets plan {document['name']}' looks at its sources.")


def _lines(about: Mapping[str, Any]) -> Iterator[list[str]]:
    """Go through what people are told of an output."""
    made = about["fingerprint"]
    yield ["  set", _short(about["set"])]
    yield ["  reads", ", ".join(about["reads"])]
    version = f", version {made['version']}" if made.get("version") else ""
    yield ["  depends on", f"{short(made['depends_on'])}{version}"]
    if about["buckets"]:
        sizes = _some([f"{size} ({n:,})" for size, n in about["items_by_bucket"].items()])
        yield ["  buckets", f"{about['buckets']}; {sizes}"]
    if about["variations"] > 1:
        yield ["  variations", str(about["variations"])]
    if about["trim"]:
        yield ["  trimmed by", about["trim"]]
    said = [f"{name} {made[name]}" for name in ("statistic", "scale", "shift") if name in made]
    if said:
        yield ["  values", ", ".join(said).removeprefix("statistic ")]
    for each in about["fields"]:
        of = "" if each["name"] == _SINGLE else f"{each['name']}: "
        yield ["  holds", f"{of}{each['kind']} {_some(each['shapes'])}".rstrip()]
    failed = f", {about['failed']:,} failed" if about["failed"] else ""
    yield ["  ready", f"{about['ready']:,} of {about['ready'] + about['missing']:,}{failed}"]
    yield ["  size", f"{format_size(about['live'])}, {format_size(about['on_disk'])} on disk"]


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST_NAMED} more" if words[_MOST_NAMED:] else ""
    return ", ".join(words[:_MOST_NAMED]) + more


def _why(reasons: Mapping[str, int]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons))
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())


def _short(full_name: str) -> str:
    name, _, id_ = full_name.partition("/")
    return f"{name}/{short(id_)}"


def _from_home(source: str) -> str:
    from pathlib import Path

    from smartcache.report.naming import from_home

    return from_home(Path(source)) if os.path.isabs(source) else source


def _say_left_out(plan: BuildPlan, count: int) -> None:
    if not plan.failed:
        return
    out.line()
    out.heading(f"Left out: {counted(count, 'item')}")
    for each in plan.failed[:_MOST_LEFT_OUT]:
        of = f" ({each.output})" if each.output else ""
        out.paragraph(f"  {each.item}{of}: {each.reason}", indent="    ")
    if plan.failed[_MOST_LEFT_OUT:]:
        out.line(f"  ... and {len(plan.failed) - _MOST_LEFT_OUT:,} more; --json has all")


# plan


@command(
    "plan",
    examples=(
        ("smartcache datasets plan photos", "what the next build would encode, and why"),
        ("smartcache datasets plan photos --trust", "by what is known, without a look"),
        ("smartcache datasets plan photos -q", "the outputs that lack something"),
    ),
)
@_named
@click.option("--trust", is_flag=True, help="Look at no source: they are as they were.")
@click.pass_obj
def plan_command(session: Session, *, name: str, trust: bool) -> None:
    """Say what the next build of a dataset would encode, and why.

    The sources are looked at as a build does: files that are new or have changed are read, and
    remembered. The encoders are those that the dataset was opened with last. Nothing is encoded.
    """
    hint = "Is a drive not mounted? --trust plans by what is known, without a look."
    trust = trust or session.settings.skip_validation
    with _opened(session, name, trust=trust, if_vanished=hint) as (dataset, _):
        plan = dataset.plan(bars)
        usable = len(dataset)
        ready = {each.name: _counts(each, dataset)["ready"] for each in dataset.outputs.values()}
    for warning in plan.warnings:
        out.warn(warning)
    changes = {what: count for what, count in sorted(plan.changes.items()) if count > 0}
    out.show(
        human=lambda: _say_plan(plan, usable, ready, changes),
        document=lambda: {
            "name": name,
            "items": plan.items,
            "usable": usable,
            "ready": plan.ready,
            "ready_by_output": ready,
            "encode": plan.encode,
            "changes": changes,
            "left_out": [each._asdict() for each in plan.failed],
            "warnings": plan.warnings,
        },
        ids=lambda: [output for output, reasons in plan.encode.items() if reasons],
    )


def _say_plan(
    plan: BuildPlan, usable: int, ready: Mapping[str, int], changes: Mapping[str, int]
) -> None:
    out.paragraph(str(plan))
    out.line()
    rows = [
        [output, f"{ready[output]:,}", f"{sum(reasons.values()):,}", _why(reasons)]
        for output, reasons in plan.encode.items()
    ]
    out.table(_PLAN, rows)
    if changes:
        told = ", ".join(f"{count:,} {what}" for what, count in changes.items())
        out.line()
        out.line(f"Since the last look: {told}.")
    _say_left_out(plan, plan.items - usable)
    if not plan.is_empty:
        out.talk("Nothing was encoded: encoders are functions of your program; build() calls them.")


# clean


@command(
    "clean",
    examples=(
        ("smartcache datasets clean photos --dry-run", "what can go, why, and what that frees"),
        ("smartcache datasets clean photos", "shows it, and asks"),
        ("smartcache datasets clean photos --force", "although a folder of sources is gone"),
    ),
)
@_named
@click.option("--force", is_flag=True, help="Sources that are gone were removed on purpose.")
@asks
@click.pass_context
def clean_command(ctx: click.Context, *, name: str, force: bool, dry_run: bool, yes: bool) -> None:
    """Remove outputs that no source wants any more.

    Their sources are gone or edited, or they are of an old encoder, another bucket, or a variation
    too many. What another dataset uses stays. Nothing is removed while a whole folder of sources is
    gone: its drive may not be mounted.
    """
    hint = "" if force else "Is a drive not mounted? If they are gone on purpose, add --force."
    session = ctx.ensure_object(Session)
    result: SetResult | None = None
    with _opened(session, name, trust=False, if_vanished=hint) as (dataset, _):
        plan = dataset.clean(force=force, progress=bars)
        for warning in plan.warnings:
            out.warn(warning)
        what = f"{counted(plan.artifacts, 'artifact')} and free {format_size(plan.freed_size)}"
        if not dry_run and not plan.is_empty:
            if not yes and out.mode == "human":
                _show_victims(plan, as_talk=True)
            out.confirm(f"Remove {what}?", yes=yes)
            result = plan.execute(bars)
    for text in () if result is None else result.problems:
        out.warn(text)

    def say() -> None:
        if plan.is_empty:
            out.line("Nothing to clean: every output is wanted.")
        elif result is None:
            _show_victims(plan, as_talk=False)
            out.line(f"Would remove {what}.")
        else:
            freed = format_size(result.freed_size)
            out.line(f"Removed {counted(result.artifacts, 'artifact')}, freed {freed}.")
            if result.freed_size < plan.freed_size // 2:
                out.talk(MORE)

    out.show(
        human=say,
        document=lambda: {
            "dry_run": dry_run,
            "victims": plan.victims,
            "planned_size": plan.freed_size,
            "artifacts": 0 if result is None else result.artifacts,
            "freed_size": 0 if result is None else result.freed_size,
            "problems": () if result is None else result.problems,
            "warnings": plan.warnings,
        },
        ids=lambda: dict.fromkeys(victim.set for victim in plan.victims),
    )
    if result is not None and result.problems:
        ctx.exit(FAILED)


def _show_victims(plan: CleanPlan, *, as_talk: bool) -> None:
    rows = (
        [_short(each.set), f"{each.artifacts:,}", format_size(each.size), each.reason]
        for each in plan.victims
    )
    out.table(_VICTIMS, rows, as_talk=as_talk)


# export and import


@command(
    "export",
    examples=(
        ("smartcache datasets export photos /media/usb/photos", "to a new folder"),
        ("smartcache datasets export photos --dry-run out", "how much that is"),
    ),
)
@_named
@click.argument("folder", metavar="FOLDER", type=FILE)
@dry_run
@click.pass_obj
def export_command(session: Session, *, name: str, folder: Path, dry_run: bool) -> None:
    """Write a dataset to a folder that can be used without the sources.

    All outputs, and the name, texts, sizes and metadata of every item. Programs open it where it
    lies with cache.open_dataset("FOLDER"), and 'smartcache datasets import' brings it into another
    store. If it is interrupted, run the same command again to continue.
    """
    from pathlib import Path

    from smartcache.artifacts import ArtifactSets
    from smartcache.training import dataset_folders

    path = Path(os.path.abspath(folder))
    with _opened(session, name) as (dataset, _):
        if dataset_folders(path):
            message = f"{path} holds a dataset already"
            raise DestinationExistsError(message, hint="Choose another folder.", path=path)
        hint = f"Build it first; 'smartcache datasets plan {name}' says what is missing, and why."
        with _copying(session, dataset, ArtifactSets(path), hint, dry_run=dry_run) as copied:
            if not dry_run:
                copied["artifacts"] = dataset.export(path, bars)
    where = near(path)
    _show_copied(f"export {name} to {where}", copied, path, dry_run=dry_run)
    if not dry_run:
        out.talk(f"In Python: cache.open_dataset({where!r})")


@command(
    "import",
    examples=(
        ("smartcache datasets import /media/usb/photos", "what 'datasets export' has written"),
        ("smartcache datasets import --dry-run out", "what is new in it"),
    ),
)
@click.argument("folder", metavar="FOLDER", type=FILE)
@dry_run
@click.pass_obj
def import_command(session: Session, *, folder: Path, dry_run: bool) -> None:
    """Bring an exported dataset into the store.

    Programs then open it with cache.open_dataset("NAME"), without its sources. What the store has
    already is not copied again. If it is interrupted, run the same command again to continue.
    """
    from smartcache.training import copy_dataset, dataset_folder, exported_dataset

    with exported_dataset(folder) as dataset, sets_to_fill(session, create=not dry_run) as sets:
        name, path = dataset.name, dataset_folder(sets.root, dataset.name)
        if (path / "dataset.json").exists():
            message = f"There is a dataset {name!r} in the store already"
            hint = f"To take this one instead, remove {path}; what was encoded stays."
            raise DestinationExistsError(message, hint=hint, path=path)
        hint = "Export it again: some of it is missing or damaged."
        with _copying(session, dataset, sets, hint, dry_run=dry_run) as copied:
            if not dry_run:
                copied["artifacts"] = copy_dataset(dataset, sets.root, bars)
    _show_copied(f"import {name}", copied, path, dry_run=dry_run)
    if not dry_run:
        out.talk(f"In Python: cache.open_dataset({name!r})")


@contextmanager
def _copying(
    session: Session, dataset: Dataset, target: ArtifactSets, hint: str, *, dry_run: bool
) -> Iterator[dict[str, Any]]:
    """Say how much is to be copied, and look after a copy that is interrupted.

    Refused before anything is written: a dataset that is not all there, and a lack of room.
    """
    from smartcache.system.filesystems import free_bytes, nearest_existing

    plan = dataset.plan()
    if not plan.is_empty:
        raise OutputMissingError(f"{dataset.name} is not all encoded: {plan}", hint=hint)
    artifacts, size = _to_copy(dataset, target)
    free = free_bytes(nearest_existing(target.root))
    if size > free and not dry_run:
        message = f"The dataset takes {format_size(size)}, but only {format_size(free)} is free"
        hint = "Choose another place, or make room there."
        raise NoSpaceError(f"{message} at {target.root}", hint=hint, needed=size, free=free)
    session.how_far = lambda: "What was copied is kept; run the same command again to continue."
    yield {"name": dataset.name, "items": len(dataset), "artifacts": artifacts, "size": size}
    session.how_far = None


def _to_copy(dataset: Dataset, target: ArtifactSets) -> tuple[int, int]:
    """Return how many artifacts other sets lack, and about how many bytes these are."""
    known = {info.full_name: info for info in target.infos()}
    artifacts = size = 0
    for output in dataset.outputs.values():
        count, items = output.variations, dataset.numbers.tolist()
        wanted = {output.key(item * count + each) for item in items for each in range(count)}
        if (empty := output.key(output.empty)) in output.set:
            wanted.add(empty)
        info = output.set.describe()
        if info.full_name in known:
            with target.open_id(known[info.full_name]) as there:
                wanted.difference_update(there)
        artifacts += len(wanted)
        size += info.live * len(wanted) // max(1, info.artifacts)
    return artifacts, size


def _show_copied(what: str, copied: Mapping[str, Any], path: Path, *, dry_run: bool) -> None:
    verb, _, rest = what.partition(" ")
    done = f"Would {verb}" if dry_run else f"{verb.title()}ed"
    items, artifacts = counted(copied["items"], "item"), counted(copied["artifacts"], "artifact")
    how = f"{artifacts} {'to copy' if dry_run else 'copied'} ({format_size(copied['size'])})"
    out.show(
        human=lambda: out.line(f"{done} {rest}: {items}, {how}."),
        document=lambda: {"dry_run": dry_run, **copied, "path": path},
        ids=lambda: [path if verb == "export" else copied["name"]],
    )


for _command in (
    ls_command, show_command, plan_command, clean_command, export_command, import_command,
):  # fmt: skip
    datasets_command.add_command(_command)
