"""Scan model folders: what they take, what they share, and which files are there more than once.

Stats first (`walk`), then sizes that several files have, then as few bytes as possible
(`comparing`), then groups from what is known (`grouping`). Nothing is changed but the index, and
only files that were hashed in full count as duplicates.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from smartcache.errors import StoreError
from smartcache.folders.apps import discover, identify
from smartcache.folders.checks import Checks
from smartcache.folders.comparing import Compared, compare
from smartcache.folders.grouping import World, groups
from smartcache.folders.ignored import ignored
from smartcache.folders.kinds import Choice
from smartcache.folders.records import Figures, Group, Judge, ModelFolder, Scan
from smartcache.folders.tally import KEPT, Tally
from smartcache.folders.walk import Walked, walk
from smartcache.progress import Progress, silent
from smartcache.store.duplicates import By, FolderSums, MemberRow, Scope
from smartcache.store.store import Store

MIN_SIZE = 1 << 20
"""Smaller files are seen, but not compared: programs edit them in place, and they gain little."""


_MAY_BE_MORE = (
    "The index was lost, and links to the store may lie in what is ignored: 'prune' waits until a"
    " scan has seen everything ('smartcache folders ignore --remove')"
)


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
        discovery = discover()
        warnings += discovery.warnings
        for path, program in store.volume.index.given_folders():
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
            else ("Check the spelling, and that its drive is mounted.")
        )
        raise StoreError(f"{path} {reason}", hint=hint, path=path)
    return ModelFolder(path=real, program=identify(real), found_by="named")


def scan(
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
    hashed in full, and groups are likely, not proven. Whole: these are all folders there are, so
    that links which a lost index has forgotten are found again.
    """
    walked, scope = look(store, folders, min_size=min_size, exclude=exclude, progress=progress)
    finding = _Finding(store, scope, walked, any_file=any_file, is_quick=is_quick)
    compared = finding.compare(progress)
    if store.has_lost_links:
        store.record_symlinks(Path(os.fsdecode(path)) for path in walked.blob_links)
        if is_whole and not walked.problem_count and not walked.is_partial:
            store.confirm_links()
        elif is_whole and walked.is_partial:
            return replace(finding.result(compared), warnings=(_MAY_BE_MORE,))
    return finding.result(compared)


def survey(
    store: Store,
    folders: Sequence[ModelFolder],
    *,
    min_size: int = MIN_SIZE,
    exclude: Sequence[str] = (),
    any_file: bool = False,
    progress: Progress = silent,
) -> Scan:
    """Walk folders and say what is known of them already: no byte of a file is read."""
    walked, scope = look(store, folders, min_size=min_size, exclude=exclude, progress=progress)
    return _Finding(store, scope, walked, any_file=any_file).result(Compared())


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


class _Finding:
    """What is known of the files in a scope: groups, and sums over them."""

    def __init__(
        self,
        store: Store,
        scope: Scope,
        walked: Walked,
        *,
        any_file: bool = False,
        is_quick: bool = False,
    ) -> None:
        self._store = store
        self._scope = scope
        self._walked = walked
        self._by: By = "sample" if is_quick else "digest"
        self._world = World(
            folders=walked.folders,
            store=ModelFolder(path=store.root, program="smartcache"),
            blob_path=lambda digest: Path(store.volume.layout.blob(digest)),
            is_blob=_blobs_elsewhere(store),
            judge=Checks(Choice(store)),
            modes=walked.modes,
            any_file=any_file,
            is_proven=not is_quick,
        )
        self._tally: Tally | None = None

    def compare(self, progress: Progress) -> Compared:
        """Read what is not known of files that may be equal.

        Where little has changed, adding up comes first and says what is to be read: mostly nothing.
        """
        is_quick = self._by == "sample"
        sizes: set[int] | None = None
        if self._walked.changes * 2 < self._walked.files and not is_quick:
            tally = self._add_up(with_racy=False)
            if not tally.unresolved:
                self._tally = tally
                return Compared()
            sizes = tally.unresolved
        return compare(self._store, self._scope, sizes=sizes, is_quick=is_quick, progress=progress)

    def result(self, compared: Compared) -> Scan:
        """Return the figures, and where the groups are."""
        tally = self._tally or self._add_up()
        figures, total = _figures(self._store, self._scope, self._walked.folders, tally)
        return Scan(
            folders=figures, total=total, groups=tally.groups, freeable=tally.freeable,
            elsewhere=tally.elsewhere, left=tally.left(), min_size=self._scope.min_size,
            is_quick=self._by == "sample", hashed=compared.hashed, busy=tuple(compared.busy),
            problems=(*self._walked.problems, *compared.problems), warnings=(),
            _largest=partial(self._largest, tally),
        )  # fmt: skip

    def _add_up(self, *, with_racy: bool = True) -> Tally:
        tally = Tally(self._world)
        tally.add_all(self._rows(with_racy=with_racy))
        return tally

    def _rows(self, *, with_racy: bool = True) -> Iterator[MemberRow]:
        return self._store.volume.index.members(self._scope, self._by, with_racy=with_racy)

    def _largest(self, tally: Tally, most: int | None, judge: Judge | None) -> Iterator[Group]:
        world = self._world if judge is None else replace(self._world, judge=judge)
        found = groups(self._rows(), world)
        if most is None:
            return found
        if judge is None and (most <= KEPT or tally.has_all):
            return tally.best(most)
        best = heapq.nlargest(most, found, key=lambda group: (group.freeable, group.elsewhere))
        return iter(best)


def _blobs_elsewhere(store: Store) -> Callable[[str, int], bool]:
    """Return a function that says whether an inode is a blob of a volume elsewhere."""
    indexes = {other.volume.filesystem: other.volume.index for other in store.stores()[1:]}

    def is_blob(filesystem: str, inode: int) -> bool:
        index = indexes.get(filesystem)
        return index is not None and bool(index.blobs_in([inode]))

    return is_blob


def _figures(
    store: Store, scope: Scope, folders: Mapping[int, ModelFolder], tally: Tally
) -> tuple[tuple[Figures, ...], Figures]:
    """Return the sums of each folder, the largest first, and of all together."""
    now = datetime.now(UTC)
    sums = {each.folder: each for each in store.volume.index.folder_sums(scope)}

    def figures(number: int, folder: ModelFolder | None, freeable: int) -> Figures:
        each = sums.get(number, FolderSums(number, 0, 0, 0, 0))
        return Figures(
            folder=folder, files=each.files, logical=each.logical, physical=each.physical,
            shared=each.shared, freeable=freeable, seen_at=now,
        )  # fmt: skip

    found = [
        figures(number, folder, tally.by_folder.get(number, 0))
        for number, folder in folders.items()
    ]
    found.sort(key=lambda each: -each.physical)
    return tuple(found), figures(0, None, tally.freeable)
