"""Find out which files of equal size have equal bytes, reading as little as possible.

Files are taken size by size, largest first. Of large ones a sample is read (head and tail), and
only files whose samples agree are hashed in full; small ones are hashed at once. All of it is
remembered, so that the next time nothing is read. XXH3 never decides that files are equal.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from smartcache.folders.records import Problem
from smartcache.progress import Job, Progress
from smartcache.store.contents import Learned, What, learn
from smartcache.store.duplicates import Candidate, Scope
from smartcache.store.memos import vouches
from smartcache.store.statkey import StatKey
from smartcache.store.store import Store

SAMPLE_MIN_SIZE = 1 << 20
"""Opening a file and reading its ends costs as much as hashing 60 KiB."""
_CHUNK_FILES = 32_768
"""Taken together, so that no thread waits for others; some MB of memory."""
_CHUNK_SIZE = 32 << 30
_PAIR = 2


@dataclass(slots=True, kw_only=True)
class Compared:
    """What comparing took, and what had to be left out."""

    hashed: int = 0
    """Bytes hashed in full."""
    busy: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, learned: Learned, what: What) -> None:
        """Note what became of some files."""
        if what == "blake3":
            self.hashed += learned.size
        self.busy += [Path(os.fsdecode(path)) for path in learned.busy]
        self.problems += [
            Problem(path=Path(os.fsdecode(path)), reason=reason)
            for path, reason in learned.problems
        ]


def compare(
    store: Store,
    scope: Scope,
    *,
    sizes: Container[int] | None = None,
    is_quick: bool,
    progress: Progress,
) -> Compared:
    """Learn what is not remembered of files that may be equal; quick: samples only.

    `sizes` are those of which something is unknown; None: perhaps all.
    """
    compared = Compared()
    index = store.volume.index

    def shared() -> Iterator[tuple[int, int]]:
        found = index.shared_sizes(scope)
        return found if sizes is None else (each for each in found if each[0] in sizes)

    total = sum(size * count for size, count in shared())
    with progress("Comparing", total, "bytes") as job:
        for chunk in _chunks(shared()):
            counting = _Counting(job)
            _compare_chunk(store, scope, chunk, compared, counting, is_quick=is_quick)
            # What was remembered, or differs in its sample, needed no reading.
            whole = sum(size * count for size, count in chunk)
            job.advance(max(0, whole - counting.count))
    return compared


class _Counting:
    """A job that also knows how far it has come."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.describe = job.describe
        self.count = 0

    def advance(self, count: int) -> None:
        self.count += count
        self._job.advance(count)


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
    store: Store,
    scope: Scope,
    chunk: list[tuple[int, int]],
    compared: Compared,
    job: _Counting,
    *,
    is_quick: bool,
) -> None:
    index = store.volume.index
    sizes = [size for size, _ in chunk]
    files = _recalled(store, _one_per_inode(index.candidates(scope, sizes)))
    in_store: dict[int, set[int]] = defaultdict(set)
    for size, inode in index.sizes_of_blobs(sizes):
        in_store[size].add(inode)
    to_sample: list[Candidate] = []
    to_hash: list[Candidate] = []
    for size, same in _by_size(files).items():
        has_blob = bool(in_store[size].difference(file.inode for file in same))
        if len(same) + has_blob < _PAIR:
            continue
        if is_quick or (size >= SAMPLE_MIN_SIZE and not has_blob):
            to_sample += same if any(file.digest is None for file in same) or is_quick else []
        else:
            to_hash += [file for file in same if file.digest is None]
    samples = {(file.filesystem, file.inode): file.sample for file in to_sample if file.sample}
    unknown = [file for file in to_sample if file.sample is None]
    learned = learn(store.volume, unknown, "sample", advance=job.advance)
    compared.add(learned, "sample")
    if not is_quick:
        to_hash += _still_equal(to_sample, samples | learned.values)
        learned = learn(store.volume, to_hash, "blake3", advance=job.advance, describe=job.describe)
        compared.add(learned, "blake3")


def _still_equal(
    files: list[Candidate], samples: dict[tuple[str, int], bytes]
) -> Iterator[Candidate]:
    """Yield the files without a digest whose size and sample another one has too."""
    alike: dict[tuple[int, bytes], list[Candidate]] = defaultdict(list)
    for file in files:
        sample = samples.get((file.filesystem, file.inode))
        if sample is not None:
            alike[file.size, sample].append(file)
    for same in alike.values():
        if len(same) >= _PAIR:
            yield from (file for file in same if file.digest is None)


def _one_per_inode(files: Iterable[Candidate]) -> list[Candidate]:
    return list({(file.filesystem, file.inode): file for file in files}.values())


def _by_size(files: Iterable[Candidate]) -> dict[int, list[Candidate]]:
    found: dict[int, list[Candidate]] = defaultdict(list)
    for file in files:
        found[file.size].append(file)
    return found


def _recalled(store: Store, files: list[Candidate]) -> list[Candidate]:
    """Return the files with the digests that volumes on other filesystems know of them."""
    for other in store.stores()[1:]:
        name = other.volume.filesystem
        unknown = [file for file in files if file.digest is None and file.filesystem == name]
        blobs = other.volume.index.blobs_in([file.inode for file in unknown]) if unknown else {}
        known: dict[int, bytes] = {}
        for file in unknown:
            blob = blobs.get(file.inode)
            key = StatKey(file.size, file.mtime_ns, file.ctime_ns)
            if blob is not None and vouches(other.volume, blob, key):
                known[file.inode] = bytes.fromhex(blob.digest)
        if known:
            rows = [
                (name, file.inode, file.size, file.mtime_ns, file.ctime_ns, 0, known[file.inode])
                for file in unknown
                if file.inode in known
            ]
            with store.volume.index.write():
                store.volume.index.learn("blake3", rows)
            files = [
                file._replace(digest=file.digest or known.get(file.inode))
                if file.filesystem == name
                else file
                for file in files
            ]
    return files
