"""What is done to a whole dataset: carry it elsewhere, and remove what no source wants any more.

An export is a folder of sets with a dataset among them, as a store has it: outputs, and the table
of sources with names, texts, sizes and metadata. It needs no sources, and is read where it lies.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smartcache.artifacts import ArtifactSets, SetInfo, SetPlan, SetResult
from smartcache.errors import DatasetError, DestinationExistsError, SmartcacheError
from smartcache.progress import Progress, silent
from smartcache.store.safety import make_own
from smartcache.training.build import missing

if TYPE_CHECKING:
    from smartcache.training.dataset import Dataset, Output


def copy_dataset(dataset: Dataset, root: Path, progress: Progress = silent) -> int:
    """Write a dataset to another folder of sets; return how many artifacts were new there.

    What is there already is not written again, and dataset.json comes last: what was interrupted
    is no dataset yet, and is gone on with by the next call.
    """
    from smartcache.training.dataset import dataset_folder, write_document

    target = dataset_folder(root, dataset.name)
    if target.exists() and (target / "dataset.json").exists():
        hint = "Choose another folder, or remove that one first."
        raise DestinationExistsError(f"{target} is there already", hint=hint, path=target)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise DatasetError(f"{root} is not a folder", path=root) from error
    sets = ArtifactSets(root)
    count = 0
    outputs = {}
    total = sum(len(output.keys.data) // 32 for output in dataset.outputs.values())
    with progress("Copying", total) as job:
        for output in dataset.outputs.values():
            outputs[output.name] = {**output.spec, "failed": _failures(dataset, output)}
            with sets.open(output.spec["set"], output.spec["fingerprint"], evictable=False) as new:
                for key in _keys(dataset, output):
                    if key not in new:
                        sample = output.set[key]
                        new.put(key, sample.value(), metadata=sample.metadata)
                        count += 1
                    job.advance()
                new.sync()
    make_own(target.parent)
    make_own(target)
    table = target / "index.sqlite3"
    table.unlink(missing_ok=True)
    dataset.table.backup(table)
    with closing(sqlite3.connect(table)) as database:
        database.execute("PRAGMA journal_mode = DELETE")  # one file, which nobody writes
    table.chmod(0o600)
    write_document(target, {**dataset.document, "outputs": outputs})
    return count


def _keys(dataset: Dataset, output: Output) -> list[str]:
    """Return the keys of all items that are not left out, each once."""
    data, count = output.keys.data, output.variations
    numbers = (
        item * count + each for item in dataset.numbers.tolist() for each in range(count)
    )  # fmt: skip
    return list(dict.fromkeys(data[32 * each : 32 * each + 32].hex() for each in numbers))


def _failures(dataset: Dataset, output: Output) -> dict[str, str]:
    """Return the keys that have no output, and why: an export has no other memory of them."""
    data, count = output.keys.data, output.variations
    found = {}
    for number in output.selection.missing.tolist():
        item = number // count
        if not dataset.is_good[item]:
            key = data[32 * number : 32 * number + 32].hex()
            found[key] = output.failures.get(item, "left out of the export")
    return found


def refuse_missing(dataset: Dataset) -> None:
    """Refuse to go on while something is not encoded."""
    from smartcache.training.dataset import missing_error

    listing = dataset.listing
    lost = {
        listing.name(number // output.variations)
        for output in dataset.outputs.values()
        for number in missing(output, dataset.is_good).tolist()
    }
    if lost:
        raise missing_error(f"{len(lost):,} items of {dataset.name} are not encoded", sorted(lost))


# cleaning


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanVictim:
    """Outputs that would go."""

    output: str
    """The name of their set."""
    reason: str
    artifacts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPlan:
    """What would be removed of a dataset; `execute` reports what was."""

    victims: tuple[CleanVictim, ...]
    plans: tuple[SetPlan, ...] = field(repr=False)
    _dataset: Dataset = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """The bytes that are expected to come back."""
        return sum(plan.freed_size for plan in self.plans)

    @property
    def artifacts(self) -> int:
        """How many artifacts would go."""
        return sum(victim.artifacts for victim in self.victims)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not self.victims

    def execute(self, progress: Progress = silent) -> SetResult:
        """Remove it."""
        done = [plan.execute(progress) for plan in self.plans]
        self._dataset.forget_old()
        return SetResult(
            sets=sum(each.sets for each in done),
            artifacts=sum(each.artifacts for each in done),
            freed_size=sum(each.freed_size for each in done),
            problems=tuple(text for each in done for text in each.problems),
        )

    def __str__(self) -> str:
        if self.is_empty:
            return "nothing to remove"
        return "; ".join(
            f"{each.artifacts:,} of {each.output} ({each.reason})" for each in self.victims
        )


def plan_clean(dataset: Dataset, sets: ArtifactSets) -> CleanPlan:
    """Plan to remove what no source of this dataset, and no other dataset, wants."""
    wanted = _wanted_by_all(dataset, sets)
    victims: list[CleanVictim] = []
    plans: list[SetPlan] = []
    by_name = {f"{each.name}/{each.id}": each for each in sets.infos()}
    for name in dataset.document.get("sets", ()):
        info = by_name.get(name)
        if info is None:
            continue
        keep = wanted.get(name)
        if keep is None:
            victims.append(
                CleanVictim(output=info.name, reason="old encoder", artifacts=info.artifacts)
            )
            plans.append(sets.plan_remove([info]))
            continue
        reasons = _unwanted(dataset, sets, info, keep)
        counts = Counter(reasons.values())
        victims += [
            CleanVictim(output=info.name, reason=reason, artifacts=count)
            for reason, count in counts.items()
        ]
        if reasons:
            plans.append(sets.plan_delete(info, reasons))
    return CleanPlan(victims=tuple(victims), plans=tuple(plans), _dataset=dataset)


def _wanted_by_all(dataset: Dataset, sets: ArtifactSets) -> dict[str, set[bytes]]:
    """Return, by set, the keys that any dataset wants."""
    from smartcache.training.dataset import dataset_folders, stored_dataset

    found: dict[str, set[bytes]] = {}

    def add(more: Dataset) -> None:
        for name, data in more.wanted().items():
            keys = (data[at : at + 32] for at in range(0, len(data), 32))
            found.setdefault(name, set()).update(keys)

    add(dataset)
    for folder in dataset_folders(sets.root):
        if os.path.samefile(folder, dataset.path):
            continue
        try:
            with stored_dataset(folder, sets) as other:
                add(other)
        except SmartcacheError as error:
            message = f"What the dataset {folder.parent.name} uses is not known: {error}"
            raise DatasetError(message, hint="Mend or remove that one first.") from error
    return found


def _unwanted(
    dataset: Dataset, sets: ArtifactSets, info: SetInfo, keep: set[bytes]
) -> dict[str, str]:
    """Return the keys of a set that nobody wants, and why."""
    output = next(
        each
        for each in dataset.outputs.values()
        if f"{each.spec['set']}/{each.spec['id']}" == info.full_name
    )
    reads = [dataset.listing.reads[read] for read in output.spec["reads"]]
    there = {
        tuple(column[at].tobytes().hex() for column in reads)
        for at in range(len(dataset.listing))
    }  # fmt: skip
    found = {}
    with sets.open_id(info) as opened:
        for key in opened.keys():  # noqa: SIM118 - no mapping
            if bytes.fromhex(key) in keep:
                continue
            about = opened.metadata(key) or {}
            if tuple(about.get("content", ())) not in there:
                found[key] = "source gone or edited"
            elif about.get("variation", 0) >= output.variations:
                found[key] = "variation"
            else:
                found[key] = "other bucket"
    return found
