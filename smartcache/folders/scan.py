"""Scan model folders: what they take, what they share, and which files are there more than once.

Stats first (`walk`), then sizes that several files have, then as few bytes as possible (`compare`),
then groups from what is known (`groups`). Nothing is changed but the index, and only files that
were hashed in full count as duplicates.

Files are compared size by size, largest first. Of large ones a sample is read (head and tail), and
only files whose samples agree are hashed in full; small ones are hashed at once. All of it is
remembered, so that the next time nothing is read. XXH3 never decides that files are equal.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from smartcache.errors import StoreError
from smartcache.folders.checks import PAIR, Checks
from smartcache.folders.discover import discover_folders
from smartcache.folders.groups import KEPT, Group, Grouping, Left, Tally
from smartcache.folders.programs import ModelFolder, identify, ignored
from smartcache.folders.walk import Problem, Walked, walk
from smartcache.progress import Job, Progress, silent
from smartcache.store.catalog import By, Candidate, FolderSums, MemoRow, Scope
from smartcache.store.hashes import Learned, Read, learn
from smartcache.store.store import Store
from smartcache.system.kernel import StatKey

MIN_SIZE: Final = 1 << 20
"""Smaller files are seen, but not compared: programs edit them in place, and they gain little."""
SAMPLE_MIN_SIZE = 1 << 20
"""Opening a file and reading its ends costs as much as hashing 60 KiB."""
_CHUNK_FILES = 32_768
"""Taken together, so that no thread waits for others; some MB of memory."""
_CHUNK_SIZE = 32 << 30


def folders_to_scan(
    store: Store, given: Sequence[str | Path] = (), only: Sequence[str] = ()
) -> tuple[list[ModelFolder], list[str]]:
    """Return the folders named, or else those of programs and those remembered; and warnings.

    `only` keeps the folders of some programs. A named folder that does not exist is an error;
    one that the user has ignored is left out.
    """
    warnings: list[str] = []
    found: list[ModelFolder] = []
    if given:
        found += [_named(Path(path)) for path in given]
    else:
        discovery = discover_folders()
        warnings += discovery.warnings
        for path, program in store.catalog.given_folders():
            if os.path.isdir(path):
                found.append(
                    ModelFolder(path=path, program=program, found_by="remembered", is_given=True)
                )
            else:
                warnings.append(f"{path} is not there now")
        found += discovery.folders
    left_alone = ignored()
    for folder in found:
        if given and left_alone.covers(folder.path):
            warnings.append(
                f"{folder.path} is ignored; 'smartcache folders ignore --remove' takes that back"
            )
    found = [folder for folder in found if not left_alone.covers(folder.path)]
    unique = list({folder.path: folder for folder in reversed(found)}.values())[::-1]
    wanted = {name.casefold() for name in only}
    return [each for each in unique if not only or each.program.casefold() in wanted], warnings


def known_folders(store: Store, *, beside: Sequence[ModelFolder] = ()) -> list[ModelFolder]:
    """Return the folders in which files were seen and that are there now, besides those given."""
    others = {folder.path for folder in beside}
    left_alone = ignored()
    return [
        ModelFolder(path=each.path, program=each.program, found_by="seen", is_given=each.is_given)
        for each in store.folders()
        if each.path not in others and os.path.isdir(each.path)
        if not left_alone.covers(each.path)
    ]


def downloads_folder() -> list[ModelFolder]:
    """Return where browsers save files: looked at for what downloads can reuse, never changed."""
    try:
        path = Path.home() / "Downloads"
    except RuntimeError:  # nobody's home
        return []
    if not os.path.isdir(path) or ignored().covers(path):
        return []
    return [ModelFolder(path=Path(os.path.realpath(path)), found_by="downloads")]


def _named(path: Path) -> ModelFolder:
    real = Path(os.path.realpath(path))
    if not os.path.isdir(real):
        reason = "is not a folder" if os.path.lexists(path) else "does not exist"
        hint = (
            "Give folders; 'smartcache add' takes single files."
            if os.path.exists(real)
            else "Check the spelling, and that its drive is mounted."
        )
        raise StoreError(f"{path} {reason}", hint=hint, path=path)
    return ModelFolder(path=real, program=identify(real), found_by="named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Sums over the files of a folder, or over everything (`folder` None: nothing twice)."""

    folder: ModelFolder | None
    files: int = 0
    """Names of files."""
    logical: int = 0
    """The size of each name: what the files seem to take."""
    physical: int = 0
    """Disk blocks, each inode once: what they take."""
    shared: int = 0
    """Of `physical`: inodes that have names outside this folder too."""
    freeable: int = 0
    """Of `physical`: duplicates that links would give back; a group counts for the folders of the
    copies that would be replaced."""
    seen_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a scan found. Groups are read from the index when asked for, largest gain first."""

    folders: tuple[Figures, ...]
    total: Figures
    groups: int
    """How many groups have something to free."""
    freeable: int
    """Bytes that `dedup` would free: its own checks say so."""
    elsewhere: int
    """Bytes of duplicates on other filesystems, which links cannot free."""
    left: tuple[Left, ...]
    """Duplicates that are left alone, the most bytes first."""
    min_size: int
    is_quick: bool
    hashed: int
    """Bytes read and hashed by this scan; 0 when all was remembered."""
    read: Read = field(repr=False)
    """The files of which they are: `dedup` needs not read these again."""
    busy: tuple[Path, ...]
    """Files left out because somebody writes them."""
    unfinished: int
    """Downloads in progress, which are left out."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...] = ()
    _largest: Callable[[int | None, Checks | None], Iterator[Group]] = field(
        repr=False, compare=False
    )

    def largest(self, count: int | None = None, *, checks: Checks | None = None) -> Iterator[Group]:
        """Return the `count` groups with the most to free; or go through all, by size of file.

        `checks` decide in place of the scan's own ones what would become of them.
        """
        return self._largest(count, checks)

    @property
    def editable(self) -> int:
        """Bytes of duplicates that are left alone because programs edit such files in place."""
        return sum(each.size for each in self.left if "any-file" in each.options)


def scan_folders(
    store: Store,
    folders: Sequence[ModelFolder],
    *,
    min_size: int = MIN_SIZE,
    exclude: Sequence[str] = (),
    any_file: bool = False,
    is_quick: bool = False,
    is_whole: bool = False,
    progress: Progress = silent,
) -> Scan:
    """Scan folders; `exclude` are patterns of paths, names or directories to leave out.

    `any_file` counts duplicates as freeable whatever kind of file they are. Quick: nothing is
    hashed in full, and groups are likely, not proven. Whole: these are all folders there are.
    """
    walked, scope = look(store, folders, min_size=min_size, exclude=exclude, progress=progress)
    if store.has_lost_links and is_whole and not walked.problem_count:
        store.confirm_links()
    return find_duplicates(
        store, walked, scope, any_file=any_file, is_quick=is_quick, progress=progress
    )


def survey(
    store: Store,
    folders: Sequence[ModelFolder],
    *,
    min_size: int = MIN_SIZE,
    progress: Progress = silent,
) -> Scan:
    """Walk folders and say what is known of them already: no byte of a file is read."""
    walked, scope = look(store, folders, min_size=min_size, progress=progress)
    return find_duplicates(store, walked, scope)


def look(
    store: Store,
    folders: Sequence[ModelFolder],
    *,
    min_size: int = MIN_SIZE,
    exclude: Sequence[str] = (),
    progress: Progress = silent,
) -> tuple[Walked, Scope]:
    """Walk folders; return what was met, and the scope of questions about it."""
    store.stores()  # opening a volume sets right what was interrupted there: before it is seen
    with progress("Looking at files") as job:
        walked = walk(store, folders, job=job)
    volume = store.volume
    scope = Scope(
        home=volume.filesystem, boot=volume.boot, folders=tuple(walked.folders),
        min_size=max(1, min_size), exclude=tuple(filter(None, exclude)),
    )  # fmt: skip
    return walked, scope


def find_duplicates(
    store: Store,
    walked: Walked,
    scope: Scope,
    *,
    any_file: bool = False,
    is_quick: bool = False,
    progress: Progress | None = None,
) -> Scan:
    """Return what files of a scope are; without `progress`, by what is known already.

    Where little has changed, adding up comes first and says what is to be read: mostly nothing.
    """
    by: By = "sample" if is_quick else "digest"
    rows = partial(store.catalog.members, scope, by)
    grouping = _grouping(store, walked, any_file=any_file, is_proven=not is_quick)
    tally: Tally | None = None
    learned = Learned()
    if progress is not None:
        sizes: set[int] | None = None
        if walked.changes * 2 < walked.files and not is_quick:
            tally = Tally(grouping, rows(with_racy=False))
            sizes = tally.unresolved
        if sizes is None or sizes:
            tally = None
            learned = compare(store, scope, sizes=sizes, is_quick=is_quick, progress=progress)
    added = tally or Tally(grouping, rows())
    sums = {each.folder: each for each in store.catalog.folder_sums(scope)}
    now = datetime.now(UTC)

    def figures(number: int, folder: ModelFolder | None, freeable: int) -> Figures:
        each = sums.get(number, FolderSums(number, 0, 0, 0, 0))
        return Figures(
            folder=folder, files=each.files, logical=each.logical, physical=each.physical,
            shared=each.shared, freeable=freeable, seen_at=now,
        )  # fmt: skip

    def largest(most: int | None, checks: Checks | None) -> Iterator[Group]:
        if most is not None and checks is None and (most <= KEPT or added.has_all):
            return added.best(most)
        other = grouping if checks is None else replace(grouping, checks=checks)
        found = other.groups(rows())
        if most is None:
            return found
        best = heapq.nlargest(most, found, key=lambda group: (group.freeable, group.elsewhere))
        return iter(best)

    each_folder = [
        figures(number, folder, added.by_folder.get(number, 0))
        for number, folder in walked.folders.items()
    ]
    unread = [
        Problem(path=Path(os.fsdecode(path)), reason=reason) for path, reason in learned.problems
    ]
    return Scan(
        folders=tuple(sorted(each_folder, key=lambda each: -each.physical)),
        total=figures(0, None, added.freeable),
        groups=added.groups,
        freeable=added.freeable,
        elsewhere=added.elsewhere,
        left=added.left(),
        min_size=scope.min_size,
        is_quick=is_quick,
        hashed=learned.size,
        read=learned.read,
        busy=tuple(Path(os.fsdecode(path)) for path in learned.busy),
        unfinished=walked.unfinished,
        problems=(*walked.problems, *unread),
        _largest=largest,
    )


def _grouping(store: Store, walked: Walked, *, any_file: bool, is_proven: bool) -> Grouping:
    indexes = {other.volume.filesystem: other.volume.index for other in store.stores()[1:]}

    def is_blob(filesystem: str, inode: int) -> bool:
        index = indexes.get(filesystem)
        return index is not None and bool(index.blobs_in([inode]))

    return Grouping(
        folders=walked.folders,
        store=ModelFolder(path=store.root, program="smartcache"),
        blob_path=lambda digest: Path(store.volume.layout.blob(digest)),
        is_blob=is_blob,
        checks=Checks(store),
        modes=walked.modes,
        any_file=any_file,
        is_proven=is_proven,
    )


# which files of equal size have equal bytes


def compare(
    store: Store,
    scope: Scope,
    *,
    sizes: Container[int] | None = None,
    is_quick: bool,
    progress: Progress,
) -> Learned:
    """Learn what is not remembered of files that may be equal; quick: samples only.

    `sizes` are those of which something is unknown; None: perhaps all. What is returned has the
    bytes hashed in full, and the files that had to be left out.
    """
    total = Learned()
    catalog = store.catalog

    def shared() -> Iterator[tuple[int, int]]:
        found = catalog.shared_sizes(scope)
        return found if sizes is None else (each for each in found if each[0] in sizes)

    with progress("Comparing", sum(size * count for size, count in shared()), "bytes") as job:
        for chunk in _chunks(shared()):
            sizes_now = [size for size, _ in chunk]
            samples, digests = _compare_chunk(store, scope, sizes_now, job, is_quick=is_quick)
            total.busy += samples.busy + digests.busy
            total.problems += samples.problems + digests.problems
            total.size += digests.size
            total.read |= digests.read
            # What was remembered, or differs in its sample, needed no reading.
            whole = sum(size * count for size, count in chunk)
            job.advance(max(0, whole - digests.size))
    return total


def _chunks(sizes: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield sizes in portions that are compared together."""
    chunk: list[tuple[int, int]] = []
    files = bytes_ = 0
    for size, count in sizes:
        chunk.append((size, count))
        files += count
        bytes_ += size * count
        if files >= _CHUNK_FILES or bytes_ >= _CHUNK_SIZE:
            yield chunk
            chunk, files, bytes_ = [], 0, 0
    if chunk:
        yield chunk


def _compare_chunk(
    store: Store, scope: Scope, sizes: list[int], job: Job, *, is_quick: bool
) -> tuple[Learned, Learned]:
    """Learn samples and, unless it is to be quick, the digests of files whose samples agree."""
    in_store: dict[int, set[int]] = defaultdict(set)
    for size, inode in store.catalog.sizes_of_blobs(sizes):
        in_store[size].add(inode)
    to_sample: list[Candidate] = []
    to_hash: list[Candidate] = []
    for size, same in _candidates(store, scope, sizes).items():
        has_blob = bool(in_store[size].difference(file.inode for file in same))
        if len(same) + has_blob < PAIR:
            continue
        if is_quick or (size >= SAMPLE_MIN_SIZE and not has_blob):
            to_sample += same if any(file.digest is None for file in same) or is_quick else []
        else:
            to_hash += [file for file in same if file.digest is None]
    unknown = [file for file in to_sample if file.sample is None]
    samples = learn(store.volume, unknown, "sample", advance=job.advance)
    if is_quick:
        return samples, Learned()
    alike: dict[tuple[int, bytes], list[Candidate]] = defaultdict(list)
    for file in to_sample:
        sample = file.sample or samples.values.get((file.filesystem, file.inode))
        if sample is not None:
            alike[file.size, sample].append(file)
    for same in alike.values():
        to_hash += [file for file in same if file.digest is None and len(same) >= PAIR]
    digests = learn(store.volume, to_hash, "blake3", advance=job.advance, describe=job.describe)
    return samples, digests


def _candidates(store: Store, scope: Scope, sizes: list[int]) -> dict[int, list[Candidate]]:
    """Return the files of some sizes, one name of each, with what all volumes know of them."""
    found = store.catalog.candidates(scope, sizes)
    one_each = list({(file.filesystem, file.inode): file for file in found}.values())
    by_size: dict[int, list[Candidate]] = defaultdict(list)
    for file in _recalled(store, one_each):
        by_size[file.size].append(file)
    return by_size


def _recalled(store: Store, files: list[Candidate]) -> list[Candidate]:
    """Return the files with the digests that volumes on other filesystems know of them."""
    for other in store.stores()[1:]:
        name = other.volume.filesystem
        unknown = [file for file in files if file.digest is None and file.filesystem == name]
        blobs = other.volume.index.blobs_in([file.inode for file in unknown]) if unknown else {}
        rows: list[MemoRow] = []
        known: dict[int, bytes] = {}
        for file in unknown:
            blob = blobs.get(file.inode)
            key = StatKey(file.size, file.mtime_ns, file.ctime_ns)
            if blob is not None and blob.key == key and blob.is_believed(other.volume.boot):
                known[file.inode] = bytes.fromhex(blob.digest)
                rows.append((name, file.inode, *key, 0, known[file.inode], None))
        if known:
            with store.catalog.write():
                store.catalog.learn(rows)
            files = [
                file._replace(digest=file.digest or known.get(file.inode))
                if file.filesystem == name
                else file
                for file in files
            ]
    return files
