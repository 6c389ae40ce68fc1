"""What no source refers to any more: counted, and deleted when somebody says so.

An artifact is wanted as long as an item has its content, at whatever resolution or variation. An
item whose source is away is forgotten only if other sources of the same folder are there: a folder
that is gone or empty as a whole may be a drive that is not mounted.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final

from smartcache.artifacts import ArtifactSets, SetPlan
from smartcache.integrations.mgds.index import DAMAGED, NAME, SET, Index

_log = logging.getLogger(__name__)
_KEY: Final = re.compile(r"([0-9a-f]{64})-[0-9x_]+-\d+")


def preview(folder: Path, *, vanished: bool) -> dict[str, int]:
    """Return how many artifacts of a cache nobody wants, and their bytes."""
    plans, _, _ = _orphans(folder, vanished=vanished)
    return {
        "orphan_count": sum(plan.artifacts for plan in plans),
        "orphan_bytes": sum(plan.freed_size for plan in plans),
    }


def clean(folder: Path, *, vanished: bool) -> dict[str, int]:
    """Delete them; return how many there were, and the bytes that came back."""
    plans, sources, contents = _orphans(folder, vanished=vanished)
    results = []
    if plans or sources:
        table = Index.in_folder(folder)
        try:
            table.forget(sources)
            results = [plan.execute() for plan in plans]
            table.forget_kept(contents)
        finally:
            table.close()
    return {
        "orphan_count": sum(result.artifacts for result in results),
        "orphan_bytes": sum(result.freed_size for result in results),
    }


def _orphans(folder: Path, *, vanished: bool) -> tuple[list[SetPlan], list[bytes], set[bytes]]:
    """Return plans to delete artifacts; and the sources and the contents that go with them."""
    if not (folder / NAME).exists():
        return [], [], set()
    table = Index.in_folder(folder)
    try:
        rows = list(table.sources())
        files = table.known()
    finally:
        table.close()
    if (folder / f"{NAME}{DAMAGED}").exists():
        _log.warning(
            "%s: the list of sources was damaged, so nothing is deleted. Start each training that"
            " uses this cache once, then remove %s", folder, f"{NAME}{DAMAGED}",
        )  # fmt: skip
        return [], [], set()
    # What was never a file, such as a position, is always there.
    there = {
        source: source not in files or os.path.exists(source)
        for source in {source for source, _ in rows}
    }
    alive = {os.path.dirname(source) for source, is_there in there.items() if is_there}
    gone = {
        source
        for source, is_there in there.items()
        if not is_there and (vanished or os.path.dirname(source) in alive)
    }
    wanted = {content.hex() for source, content in rows if source not in gone}
    sets = ArtifactSets(folder)
    plans = []
    contents: set[bytes] = set()
    for info in sets.infos(SET):
        with sets.open_id(info) as artifacts:
            found = filter(None, map(_KEY.fullmatch, artifacts))
            keys = [each[0] for each in found if each[1] not in wanted]
        contents.update(bytes.fromhex(key[:64]) for key in keys)
        if keys:
            plans.append(sets.plan_delete(info, keys))
    return plans, sorted(gone), contents
