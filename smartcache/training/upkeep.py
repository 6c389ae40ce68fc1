"""What is done to a whole dataset: carry it elsewhere, and remove what no source wants any more.

An export is a folder of sets with a dataset among them, as a store has it: outputs, and the table
of sources with names, texts, sizes and metadata. It needs no sources, and is read where it lies.

Cleaning removes what is in the sets of a dataset and wanted by none. What there is, is listed first
and what is wanted is read afterwards: an output that another process makes meanwhile is of a source
that this process then sees. Before something is removed, all of it is compared once more, while no
process takes note of sources.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from smartcache.artifacts import ArtifactSets, SetInfo, SetPlan, SetResult
from smartcache.errors import (
    ArtifactNotFoundError,
    DamagedArtifactError,
    DatasetError,
    DestinationExistsError,
    SmartcacheError,
    SourcesVanishedError,
)
from smartcache.progress import Progress, silent
from smartcache.system.faults import reached
from smartcache.system.locks import store_lock
from smartcache.system.ownfiles import make_own
from smartcache.training.build import missing
from smartcache.training.document import (
    FORMAT,
    changing,
    check_document,
    read_document,
    set_of,
    write_document,
)
from smartcache.training.encoder import Keys
from smartcache.training.look import Listing, look
from smartcache.training.sources import Sources
from smartcache.training.table import SourceTable

if TYPE_CHECKING:
    from smartcache.training.dataset import Dataset, Output


def copy_dataset(dataset: Dataset, root: Path, progress: Progress = silent) -> int:
    """Write a dataset to another folder of sets; return how many artifacts were new there.

    What is there already is not written again, and dataset.json comes last: what was interrupted
    is no dataset yet, and is gone on with by the next call. OutputMissingError if not everything
    was encoded.
    """
    from smartcache.training.dataset import dataset_folder

    target = dataset_folder(root, dataset.name)
    if (target / "dataset.json").exists():
        hint = "Choose another folder, or remove that one first."
        raise DestinationExistsError(f"{target} is there already", hint=hint, path=target)
    _refuse_missing(dataset)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DatasetError(f"{root} is not a folder", path=root) from error
    sets = ArtifactSets(root)
    count = 0
    total = sum(len(output.keys.data) // 32 for output in dataset.outputs.values())
    with progress("Copying", total) as job:
        for output in dataset.outputs.values():
            with sets.open(output.spec["set"], output.spec["fingerprint"], evictable=False) as new:
                for key, item in _keys(dataset, output).items():
                    if key not in new:
                        value, metadata = _read(dataset, output, key, item)
                        new.put(key, value, metadata=metadata)
                        reached("dataset: copied")
                        count += 1
                    job.advance()
                new.sync()
    make_own(target.parent)
    make_own(target)
    write_document(target, pack_up(dataset, target))
    return count


def pack_up(dataset: Dataset, target: Path) -> dict[str, Any]:
    """Write the table of sources to a folder; return what dataset.json says of such a copy.

    OutputMissingError if something is not encoded.
    """
    _refuse_missing(dataset)
    _copy_table(dataset, target)
    outputs = {
        output.name: {**output.spec, "failed": _failures(output)}
        for output in dataset.outputs.values()
    }
    return {
        **dataset.document, "format": FORMAT, "outputs": outputs,
        "sets": sorted(map(set_of, outputs.values())),
    }  # fmt: skip


def unpack(root: Path, document: dict[str, Any], table: bytes) -> None:
    """Write a dataset from elsewhere, in place of one that came from there before.

    `document["from"]` says where it comes from. One that was made here is never replaced.
    """
    from smartcache.training.dataset import dataset_folder

    check_document(document, Path("dataset.json"))
    target = dataset_folder(root, document["name"])
    for folder in (root, target.parent, target):
        make_own(folder)
    with changing(target):
        known = read_document(target, must_exist=False)
        if known and "from" not in known:
            hint = "Open it without a tier, or remove it first."
            message = f"The dataset {document['name']} was made here"
            raise DestinationExistsError(message, hint=hint, path=target)
        new = target / ".index.sqlite3.new"
        with open(new, "wb") as file:
            new.chmod(0o600)
            file.write(table)
            file.flush()
            os.fsync(file.fileno())
        with closing(SourceTable(new, wal=False, read_only=True)):
            pass  # refuses what is no such table
        for left in ("-journal", "-wal", "-shm"):
            (target / f"index.sqlite3{left}").unlink(missing_ok=True)
        new.replace(target / "index.sqlite3")
        write_document(target, document)


def _copy_table(dataset: Dataset, target: Path) -> None:
    """Copy the table of sources: one file, which nobody writes."""
    table = target / ".index.sqlite3.new"
    for left in ("", "-journal", "-wal", "-shm"):  # of a copy that was interrupted
        table.with_name(table.name + left).unlink(missing_ok=True)
    dataset.table.copy_to(table)
    with closing(SourceTable(table, wal=False)) as copied:
        copied.drop_texts()  # what was edited away is nobody's business elsewhere
    with closing(sqlite3.connect(table)) as database:
        database.execute("VACUUM")
    table.chmod(0o600)
    reached("dataset: table copied")
    table.replace(target / "index.sqlite3")


def _keys(dataset: Dataset, output: Output) -> dict[str, int]:
    """Return the keys of all items that are not left out, each with one of its items.

    That of the empty text comes last if there is such an output.
    """
    data, count = output.keys.data, output.variations
    found: dict[str, int] = {}
    for item in dataset.numbers.tolist():
        for number in range(item * count, item * count + count):
            found.setdefault(data[32 * number : 32 * number + 32].hex(), item)
    empty = output.key(output.empty)
    if empty in output.set:
        found.setdefault(empty, -1)
    return found


def _read(dataset: Dataset, output: Output, key: str, item: int) -> tuple[object, object]:
    from smartcache.training.dataset import missing_error

    try:
        sample = output.set[key]
        return sample.value(), sample.metadata
    except (ArtifactNotFoundError, DamagedArtifactError) as error:
        name = dataset.listing.name(item) if item >= 0 else "the empty text"
        message = f"An output of {dataset.name} is damaged or gone"
        raise missing_error(message, [name]) from error


def _failures(output: Output) -> dict[str, str]:
    """Return the keys that could not be encoded, and why: an export has no other memory of that."""
    return {
        output.key(number): output.failures[number // output.variations]
        for number in output.missing.tolist()
        if number // output.variations in output.failures
    }


def _refuse_missing(dataset: Dataset) -> None:
    """Refuse to go on while something is not encoded."""
    from smartcache.training.dataset import missing_error

    listing = dataset.listing
    dataset.look()
    lost = {
        listing.name(number // output.variations)
        for output in dataset.outputs.values()
        for number in missing(output, dataset.is_good).tolist()
    }
    if lost:
        what = "1 item is" if len(lost) == 1 else f"{len(lost):,} items are"
        raise missing_error(f"{what} not encoded of {dataset.name}", sorted(lost))


# cleaning


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanVictim:
    """Outputs that would go."""

    output: str
    """The name of their set."""
    set: str
    """Its full name."""
    reason: str
    artifacts: int
    size: int
    """Bytes on the disk that they are expected to give back."""


class _Old(NamedTuple):
    """What nobody wants of a set."""

    info: SetInfo
    keys: list[str] | None
    """None: all of it, and the set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPlan:
    """What would be removed of a dataset; `execute` reports what was."""

    victims: tuple[CleanVictim, ...]
    plans: tuple[SetPlan, ...] = field(repr=False)
    """What would be removed, set by set."""
    warnings: tuple[str, ...] = ()
    _old: tuple[_Old, ...] = field(repr=False, compare=False)
    _cleaning: _Cleaning = field(repr=False, compare=False)

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
        """Remove it; what is wanted again by now stays."""
        return self._cleaning.execute(self._old, progress)

    def __str__(self) -> str:
        if self.is_empty:
            return "nothing to remove"
        return "; ".join(
            f"{each.artifacts:,} of {each.output} ({each.reason})" for each in self.victims
        )


def _add_keys(found: dict[str, set[bytes]], spec: Mapping[str, Any], keys: Keys) -> None:
    data = keys.data
    some = (data[at : at + 32] for at in range(0, len(data), 32))
    found.setdefault(set_of(spec), set()).update(some)


def plan_clean(
    dataset: Dataset, sets: ArtifactSets, *, force: bool = False, progress: Progress = silent
) -> CleanPlan:
    """Plan to remove what no source of this dataset, and no other dataset, wants."""
    return _Cleaning(dataset, sets, force=force).plan(progress)


class _Cleaning:
    """The cleaning of one dataset."""

    def __init__(self, dataset: Dataset, sets: ArtifactSets, *, force: bool) -> None:
        self.dataset = dataset
        self.sets = sets
        self.force = force

    def plan(self, progress: Progress) -> CleanPlan:
        """Say what can go."""
        warnings: list[str] = []
        there: list[tuple[SetInfo, list[str]]] = []
        used = self._used()
        for info in self.sets.infos():
            if info.full_name in used:
                try:
                    with self.sets.open_id(info) as opened:
                        there.append((info, list(opened)))
                except (SmartcacheError, OSError) as error:
                    warnings.append(f"{info.full_name} cannot be cleaned: {error}")
        listing = self._listing(progress)
        with ExitStack() as stack:
            wanted = self._wanted(stack, listing)
        victims: list[CleanVictim] = []
        plans: list[SetPlan] = []
        old: list[_Old] = []
        for info, keys in there:
            keep = wanted.get(info.full_name)
            if keep is None:
                old.append(_Old(info, None))
                plans.append(self.sets.plan_remove([info]))
                victims.append(_victim(info, "old encoder", plans[-1]))
                continue
            unwanted = [key for key in keys if bytes.fromhex(key) not in keep]
            reasons = self._reasons(info, unwanted, listing)
            if not reasons:
                continue
            old.append(_Old(info, list(reasons)))
            plans.append(self.sets.plan_delete(info, reasons))
            for reason in dict.fromkeys(reasons.values()):
                some = [key for key, why in reasons.items() if why == reason]
                victims.append(_victim(info, reason, self.sets.plan_delete(info, some)))
        return CleanPlan(
            victims=tuple(victims), plans=tuple(plans), warnings=tuple(warnings),
            _old=tuple(old), _cleaning=self,
        )  # fmt: skip

    def execute(self, old: Iterable[_Old], progress: Progress) -> SetResult:
        """Remove what still nobody wants."""
        artifacts = freed = removed = 0
        problems: list[str] = []
        self._look(progress)
        with ExitStack() as stack:
            wanted = self._wanted(stack)
            for info, keys in old:
                keep = wanted.get(info.full_name)
                try:
                    if keys is not None:
                        gone = [key for key in keys if bytes.fromhex(key) not in (keep or ())]
                        with self.sets.open_id(info) as opened:
                            artifacts += opened.delete_many(gone)
                            opened.sync()
                        done = self.sets.plan_prune([info]).execute(progress)
                    elif keep is None:
                        done = self.sets.plan_remove([info]).execute(progress)
                        removed += done.sets
                        artifacts += done.artifacts
                    else:
                        continue
                    freed += done.freed_size
                    problems += done.problems
                except (SmartcacheError, OSError) as error:
                    problems.append(f"{info.path}: {error}")
        self.dataset.table.drop_texts()
        if self.force:
            self.dataset.table.forget_gone()
        self.dataset.change_document(
            lambda known: (
                known
                | {"sets": [each for each in known["sets"] if (self.sets.root / each).is_dir()]}
            )
        )
        self.dataset.look()
        return SetResult(
            sets=removed, artifacts=artifacts, freed_size=freed, problems=tuple(problems)
        )

    def _used(self) -> set[str]:
        """Return the sets that the dataset has ever used."""
        known = read_document(self.dataset.path).get("sets", ())
        return {*known, *self.dataset.document.get("sets", ())}

    def _listing(self, progress: Progress) -> Listing:
        """Look at the sources, for a plan."""
        if not self.force:
            self._look(progress)
            return self.dataset.listing
        # Nothing is forgotten before it is executed: a copy of the table takes note.
        with TemporaryDirectory(prefix="smartcache-") as folder:
            path = Path(folder) / "index.sqlite3"
            self.dataset.table.copy_to(path)
            with closing(SourceTable(path, wal=False)) as table:
                return self.dataset.look_at(table, progress, force=True)

    def _look(self, progress: Progress) -> None:
        """Look at the sources; refuse while some have vanished, unless that is what is meant."""
        self.dataset.refresh(progress, force=self.force)
        self._refuse_gone(self.dataset.table.gone(), "")

    def _refuse_gone(self, gone: Mapping[bytes, int], of: str) -> None:
        if gone and not self.force:
            path, count = next(iter(gone.items()))
            raise SourcesVanishedError(
                f"{os.fsdecode(path)}{of} is gone, with {count:,} files",
                hint="Is a drive not mounted? If it was removed on purpose, use force (--force).",
                path=os.fsdecode(path),
            )

    def _wanted(  # noqa: C901 - what this dataset wants, then the others
        self, stack: ExitStack, listing: Listing | None = None
    ) -> dict[str, set[bytes]]:
        """Return, by set, the keys that any dataset wants.

        Without a listing, tables are read, and nobody takes note of sources until the stack is
        left.
        """
        from smartcache.training.dataset import dataset_folders

        dataset, used = self.dataset, self._used()
        folders = dataset_folders(self.sets.root)
        wanting: dict[Path, dict[str, Any]] = {}
        for folder in folders:
            try:
                document = read_document(folder)
                if folder == dataset.path or used & set(map(set_of, document["outputs"].values())):
                    wanting[folder] = document
            except SmartcacheError as error:
                raise _unknown(folder, error) from error
        for folder in wanting if listing is None else ():
            name = f"the dataset {folder.parent.name}"
            path = folder / "lock"
            stack.enter_context(store_lock(path, "cleaning", name=name))
        found: dict[str, set[bytes]] = {}
        if listing is None:
            self._add_wanted(found, dataset.path, dataset.sources, dataset.document["outputs"])
        else:
            for output in dataset.outputs.values():
                _add_keys(found, output.spec, Keys.of(listing, output.spec))
        for folder, document in wanting.items():
            is_own = folder == dataset.path
            if is_own and document["outputs"] == dataset.document["outputs"]:
                continue  # else another process has opened it with other settings
            try:
                sources = Sources.from_json(document["sources"])
                self._add_wanted(found, folder, sources, document["outputs"])
            except SourcesVanishedError:
                raise
            except (SmartcacheError, LookupError, TypeError, ValueError) as error:
                raise _unknown(folder, error) from error
        return found

    def _add_wanted(
        self,
        found: dict[str, set[bytes]],
        folder: Path,
        sources: Sources,
        outputs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Add the keys that a dataset wants, by what its table knows."""
        from smartcache.training.dataset import open_table

        if not (folder / "index.sqlite3").exists():
            raise DatasetError(f"{folder} has no table of its sources", path=folder)
        reads = dict.fromkeys(read for spec in outputs.values() for read in spec["reads"])
        with closing(open_table(folder)) as table:
            self._refuse_gone(table.gone(), f", of the dataset {folder.parent.name},")
            listing = look(table, sources, reads, trust=True)
            for spec in outputs.values():
                _add_keys(found, spec, Keys.of(listing, spec))

    def _reasons(self, info: SetInfo, keys: list[str], listing: Listing) -> dict[str, str]:
        """Return which of some unwanted keys can go, and why."""
        output = next(
            (each for each in self.dataset.outputs.values() if set_of(each.spec) == info.full_name),
            None,
        )
        if not keys or output is None:  # this dataset used the set once, and others use it still
            return dict.fromkeys(keys, "not used any more")
        reads = [listing.reads[read] for read in output.spec["reads"]]
        there = {
            tuple(column[at].tobytes().hex() for column in reads) for at in range(len(listing))
        }  # fmt: skip
        # What cannot be read now may be what it was the next time.
        doubtful = set(map(listing.name, listing.problems))
        found = {}
        with self.sets.open_id(info) as opened:
            for key in keys:
                about: dict[str, Any] = {}
                with suppress(DamagedArtifactError):
                    try:
                        about = opened.metadata(key) or {}
                    except ArtifactNotFoundError:  # another process cleans
                        continue
                if about.get("name") in doubtful:
                    continue
                if tuple(about.get("content", ())) not in there:
                    found[key] = "source gone or edited"
                elif about.get("variation", 0) >= output.variations:
                    found[key] = "variation"
                else:
                    found[key] = "other bucket"
        return found


def _victim(info: SetInfo, reason: str, plan: SetPlan) -> CleanVictim:
    return CleanVictim(
        output=info.name, set=info.full_name, reason=reason, artifacts=plan.artifacts,
        size=plan.freed_size,
    )  # fmt: skip


def _unknown(folder: Path, error: Exception) -> DatasetError:
    message = f"What the dataset {folder.parent.name} uses is not known: {error}"
    return DatasetError(message, hint="Mend or remove that one first.", path=folder)
