"""Showing a set, or one artifact: `artifacts show`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import (
    all_sets,
    dtype_of,
    entry,
    fields_of,
    label,
    one,
    readable,
    shape_of,
)
from smartcache.cli._command import command
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._session import Session
from smartcache.cli._words import ago, clock, counted
from smartcache.sizes import format_age, format_size

if TYPE_CHECKING:
    from smartcache.artifacts import ArtifactInfo, ArtifactSets, Failure, SetInfo, SetStats, Shown

_MOST_SHAPES = 4
_MOST_FAILURES = 10
_FIGURES = ("", ">", "~")
_VALUES = ("", "~")


@command(
    "show",
    examples=(
        ("smartcache artifacts show sdxl-latents", "fingerprint, figures, fields, failures"),
        ("smartcache artifacts show sdxl-latents/9d21aabb", "one of several of that name"),
        ("smartcache artifacts show sdxl-latents -q", "its keys, one per line"),
        ("smartcache artifacts show sdxl-latents 3f2a91c0", "what one artifact holds"),
    ),
)
@click.argument("word", metavar="SET")
@click.argument("key", metavar="[KEY]", required=False)
@click.pass_obj
def show_command(session: Session, *, word: str, key: str | None) -> None:
    """Show a set, or one artifact of it, without reading tensors.

    A SET is named by its name, its id or at least 4 characters of it, or NAME/ID. A KEY may be
    given by its beginning too. Showing an artifact does not count as using it.
    """
    with all_sets(session) as sets:
        info = one(sets, word)
        if key is not None:
            _show_artifact(info, sets.inspect(info, key))
        else:
            _show_set(sets, info)


def _show_set(sets: ArtifactSets, info: SetInfo) -> None:
    with sets.open_id(info) as opened:
        stats, failures = opened.stats(), opened.failures()
        kinds = sets.structures(info)
        out.show(
            human=lambda: _say_set(info, stats, kinds, failures),
            document=lambda: {
                **entry(info),
                **picked(stats, "dead packs saved pinned"),
                "structures": [[_part(part) for part in parts] for parts in kinds],
                "failures": [
                    picked(each, "key reason count")
                    | {"failed_at": datetime.fromtimestamp(each.failed_at, UTC)}
                    for each in failures
                ],
            },
            ids=lambda: sorted(opened),
        )


def _say_set(
    info: SetInfo, stats: SetStats, kinds: list[tuple[Shown, ...]], failures: list[Failure]
) -> None:
    from smartcache.artifacts import path_text

    out.heading(label(info))
    out.table(_VALUES, _about(info))
    out.line()
    out.table(_FIGURES, _figures(stats))
    out.line()
    out.heading("Fingerprint")
    values = {} if info.fingerprint is None else info.fingerprint.values
    rows = [[f"  {path_text([key])}", _whole(value)] for key, value in values.items()]
    out.table(_VALUES, rows or [["  nothing", ""]])
    fields = list(_fields(kinds))
    if fields:
        out.line()
        out.heading("Fields")
        out.table((*_VALUES[:1], *_VALUES), fields)
    if failures:
        out.line()
        out.heading(f"Failed: {counted(len(failures), 'computation')}")
        for each in failures[-_MOST_FAILURES:]:
            when = ago(datetime.fromtimestamp(each.failed_at, UTC))
            times = f", {each.count} times" if each.count > 1 else ""
            out.paragraph(f"  {each.key}, {when}{times}: {each.reason}", indent="    ")
        if failures[_MOST_FAILURES:]:
            out.talk(f"... and {len(failures) - _MOST_FAILURES:,} older ones; --json has all")


def _whole(value: object) -> str:
    """Return a value of a fingerprint in full: it is what people compare."""
    import json

    return json.dumps(value) if isinstance(value, str) else repr(value)


def _about(info: SetInfo) -> Iterator[list[str]]:
    options = info.options
    yield ["  folder", str(info.path)]
    if info.created_at is not None:
        yield ["  made", f"{clock(info.created_at)} ({ago(info.created_at)})"]
    yield ["  used", "never" if info.used_at is None else ago(info.used_at)]
    bound = "none" if options.max_size is None else format_size(options.max_size)
    yield ["  bound", bound if options.evictable else f"{bound}; nothing is evicted"]
    ttl = None if options.ttl is None else format_age(timedelta(seconds=options.ttl))
    yield ["  time to live", ttl or "for ever"]
    if options.unused_for is not None:
        yield ["  gone if not used for", format_age(timedelta(seconds=options.unused_for))]
    rule = options.compression
    words = rule if isinstance(rule, str) else ", ".join(f"{k}: {v}" for k, v in rule.items())
    yield ["  compression", words]
    yield ["  a put survives", "power loss" if options.durable else "a crash of its process"]


def _figures(stats: SetStats) -> Iterator[list[str]]:
    yield ["  artifacts", f"{stats.artifacts:,}", f"{stats.pinned:,} of them pinned"]
    yield ["  live", format_size(stats.live), "what can still be read"]
    yield ["  on disk", format_size(stats.on_disk), f"in {counted(stats.packs, 'pack')}"]
    yield ["  dead", format_size(stats.dead), "what is gone"]
    yield ["  saved", format_size(stats.saved), "by keeping equal tensors once"]


def _fields(kinds: Iterable[tuple[Shown, ...]]) -> Iterator[list[str]]:
    for name, what, shapes in fields_of(kinds):
        more = f" and {len(shapes) - _MOST_SHAPES} more" if shapes[_MOST_SHAPES:] else ""
        yield [f"  {name or '(the value)'}", what, ", ".join(shapes[:_MOST_SHAPES]) + more]


def _show_artifact(info: SetInfo, found: ArtifactInfo) -> None:
    out.show(
        human=lambda: _say_artifact(info, found),
        document=lambda: {
            "set": info.full_name,
            **picked(found, "key created_at used_at expires_at is_pinned size"),
            "parts": [_part(part) for part in found.parts],
            "metadata": readable(found.metadata.value),
        },
        ids=lambda: [found.key],
    )


def _say_artifact(info: SetInfo, found: ArtifactInfo) -> None:
    out.heading(f"{label(info)} {found.key}")
    expires = "never" if found.expires_at is None else clock(found.expires_at)
    rows = [
        ["  made", f"{clock(found.created_at)} ({ago(found.created_at)})"],
        ["  used", ago(found.used_at)],
        ["  expires", f"{expires}{', pinned' if found.is_pinned else ''}"],
        ["  size", format_size(found.size)],
    ]
    out.table(_VALUES, rows)
    out.line()
    out.heading("Value")
    out.table(_VALUES, [[f"  {part.name or '(all)'}", _text(part)] for part in found.parts])
    if found.metadata.value is not None or found.metadata.problem:
        out.line()
        out.heading("Metadata")
        out.table(_VALUES, _metadata(found.metadata))


def _metadata(part: Shown) -> Iterator[list[str]]:
    from smartcache.artifacts import path_text, shown

    if isinstance(part.value, dict):
        for key, value in part.value.items():
            yield [f"  {path_text([key])}", shown(value)]
    else:
        yield ["", _text(part)]


def _text(part: Shown) -> str:
    from smartcache.artifacts import shown

    spec = part.tensor
    if spec is not None:
        return f"{spec.kind} {dtype_of(spec)} {shape_of(spec)}, {format_size(spec.nbytes)}"
    return f"? {part.problem}" if part.problem else shown(part.value)


def _part(part: Shown) -> dict[str, object]:
    if part.tensor is None:
        return {"name": part.name, "value": readable(part.value), "problem": part.problem}
    return {"name": part.name, **picked(part.tensor, "kind dtype shape nbytes")}
