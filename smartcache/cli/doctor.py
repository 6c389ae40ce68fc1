"""What works here: `doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, command
from smartcache.cli._failures import FAILED
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._session import FORGET, Session
from smartcache.errors import StoreError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.doctor import Diagnosis, Finding, Place

_NAMES = {"reflink": "reflinks", "lease": "leases"}


@command(
    "doctor",
    examples=(
        ("smartcache doctor", "the store's filesystem, and versions"),
        ("smartcache doctor ~/ComfyUI/models /mnt/nas", "what linking with these folders can do"),
        ("smartcache doctor --json", "for a bug report"),
    ),
)
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=FILE)
@click.pass_context
def doctor_command(ctx: click.Context, *, paths: tuple[Path, ...]) -> None:
    """Say what works here, what will be slow or unsafe, and why.

    What the filesystems can do is tried, with files that have no name. Exits with 1 if something
    makes the store unusable.
    """
    from smartcache.doctor import LEVELS, examine, other_package

    session = ctx.ensure_object(Session)
    roots, problems = _pools(session)
    problems += other_package()
    diagnosis = examine(roots[0], paths)
    pools = [examine(root).places[0] for root in roots[1:]]
    places = [diagnosis.places[0], *pools, *diagnosis.places[1:]]
    findings = [*problems, *(finding for place in places for finding in place.findings)]
    out.show(
        human=lambda: _show(diagnosis, places, problems),
        document=lambda: {
            "level": max((each.level for each in findings), key=LEVELS.index, default="ok"),
            "versions": diagnosis.versions,
            "problems": problems,
            "places": [_document(place) for place in places],
        },
        ids=lambda: [place.path for place in places if _is_bad(place.findings)],
    )
    if _is_bad(findings):
        ctx.exit(FAILED)


def _is_bad(findings: list[Finding] | tuple[Finding, ...]) -> bool:
    return any(finding.level == "problem" for finding in findings)


def _pools(session: Session) -> tuple[list[Path], list[Finding]]:
    """Return the roots of all pools, and what is wrong with the store."""
    from smartcache.doctor import Finding, about_damage

    home = session.settings.home
    try:
        with session.store(only_look=True) as store:
            unfinished = [
                Finding(level="warning", text=f"Unfinished: {text}.", hint=FORGET)
                for text in store.unfinished()
            ]
            return [pool.root for pool in store.pools()], [*unfinished, *about_damage(store)]
    except StoreError as error:
        text = f"The store cannot be opened: {error.message}."
        return [home], [Finding(level="problem", text=text, hint=error.hint)]


def _show(diagnosis: Diagnosis, places: list[Place], general: list[Finding]) -> None:
    have = [f"{name} {version}" for name, version in diagnosis.versions.items() if version]
    lack = [name for name, version in diagnosis.versions.items() if not version]
    out.paragraph(", ".join(have) + (f"; not installed: {', '.join(lack)}" if lack else ""))
    for finding in general:
        _show_finding(finding)
    for place in places:
        out.line()
        state = "" if place.is_present else ", does not exist"
        out.line(f"{place.path} ({place.role}{state})")
        mount = place.mount
        where = f"{mount.fstype} from {mount.source} at {mount.point}"
        out.paragraph(f"{where}, {format_size(place.free)} free", indent="  ")
        if place.abilities is not None:
            works = [name for key, name in _NAMES.items() if getattr(place.abilities, key)]
            fails = [name for key, name in _NAMES.items() if not getattr(place.abilities, key)]
            lacks = f"; no {', '.join(fails)}" if fails else ""
            out.paragraph(f"works: {', '.join(works) or 'nothing'}{lacks}", indent="  ")
        for finding in place.findings:
            _show_finding(finding)


def _show_finding(finding: Finding) -> None:
    out.paragraph(f"  {finding.level + ':':9}{finding.text}", indent=" " * 11, state=finding.level)
    if finding.hint:
        out.paragraph(f"{'':11}{finding.hint}", indent=" " * 11)


def _document(place: Place) -> dict[str, object]:
    return {
        **picked(place, "path role is_present filesystem free"),
        "mount": picked(place.mount, "point fstype source family is_read_only options"),
        **picked(place, "abilities findings"),
    }
