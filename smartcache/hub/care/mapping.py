"""{sha256: path} of everything known: blobs of all volumes, and files whose hash is remembered.

A path is given only while its bytes are vouched for: a blob's by the store, another file's by its
stat key, looked at in the moment of asking. The mapping holds no rows: each question is one look
into the index, and going through it is a stream. It can be written to a file and read on another
machine or by a script; what a file says is never believed, each file it names is hashed.
"""

from __future__ import annotations

import heapq
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TextIO

from smartcache.errors import DamagedBlobError, FileSkippedError, HubError, StoreError
from smartcache.progress import Progress, silent
from smartcache.store import RememberedFile, Store, hashes_of, sighting_of
from smartcache.system import Hashes, StatKey, filesystem_id, is_digest, signed

FORMAT = 1
_MOST = 1 << 28
"""Bytes of a mapping file that are read: a million files are some 200 MB."""
_Entry = tuple[str, Path, int | None]
"""Of a mapping file: a sha256, the file that should have it, and its size if that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """A file that is known by its sha256."""

    sha256: str
    path: Path
    size: int


_Candidate = tuple[str, Callable[[], MappedFile | None]]
"""A sha256, and a look at what may have it: the file, if its bytes are vouched for."""


class CacheMapping(Mapping[str, Path]):
    """The file for a sha256. Read-only; what comes and goes in the store is seen at once.

    A blob that stat cannot vouch for is hashed when its key comes up, once; a damaged one, and a
    file that has changed since it was hashed, is not there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, sha256: str) -> Path:
        """Return the path of a file with this hash, in hex of either case."""
        key = str(sha256).lower()
        found = _first(self._candidates(key)) if is_digest(key) else None
        if found is None:
            raise KeyError(sha256)
        return found.path

    def __iter__(self) -> Iterator[str]:
        """Go through the hashes in their order."""
        return (file.sha256 for file in self.files())

    def __len__(self) -> int:
        """Count what is vouched for now: it looks at every file."""
        return sum(1 for _ in self.files())

    def __repr__(self) -> str:
        """Return the class and the store."""
        return f"{type(self).__name__}({self._store!r})"

    def files(self) -> Iterator[MappedFile]:
        """Go through the files with their sizes, in the order of the hashes, in flat memory."""
        for _, candidates in groupby(self._all_candidates(), key=lambda each: each[0]):
            found = _first(candidates)
            if found is not None:
                yield found

    def export_json(self, target: str | Path | TextIO) -> int:
        """Write {"format": 1, "files": {sha256: {"path", "size"}}}; return how many files.

        A file appears whole or not at all; one that was there is replaced.
        """
        if not isinstance(target, str | Path):
            return _write(self.files(), target)
        path = Path(target)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "x", encoding="ascii") as file:
                count = _write(self.files(), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return count

    def _candidates(self, sha256: str) -> Iterator[_Candidate]:
        """Yield what may be the file of one hash, blobs first."""
        for store in self._store.stores():
            blob = store.volume.index.blob_by_hash("sha256", sha256)
            if blob is not None:
                yield sha256, partial(_sound, sha256, store, blob.digest)
        for file in self._store.catalog.files_with_sha256(sha256):
            yield sha256, partial(_unchanged, file)

    def _all_candidates(self) -> Iterator[_Candidate]:
        """Yield the candidates of all hashes, in the order of the hashes, blobs first."""
        streams = [_blobs_of(each) for each in self._store.stores()]
        files = self._store.catalog.files_by_sha256()
        streams.append((file.sha256, partial(_unchanged, file)) for file in files)
        return heapq.merge(*streams, key=lambda each: each[0])


def cache_mapping(store: Store) -> CacheMapping:
    """Return the {sha256: path} mapping of everything a store knows."""
    return CacheMapping(store)


def _blobs_of(store: Store) -> Iterator[_Candidate]:
    for sha256, digest in store.volume.index.digests_by_sha256():
        yield sha256, partial(_sound, sha256, store, digest)


def _first(candidates: Iterable[_Candidate]) -> MappedFile | None:
    """Return the first candidate whose bytes are vouched for."""
    found = (look() for _, look in candidates)
    return next((file for file in found if file is not None), None)


def _sound(sha256: str, store: Store, digest: str) -> MappedFile | None:
    """Return a blob if its bytes may be used now."""
    with suppress(DamagedBlobError, FileSkippedError, FileNotFoundError):
        size = store.get(digest).size
        return MappedFile(sha256=sha256, path=store.path_of(digest), size=size)
    return None


def _unchanged(file: RememberedFile) -> MappedFile | None:
    """Return a file if it is the very one that was hashed, and as it was."""
    try:
        st = os.lstat(file.path)
        is_same = (
            stat.S_ISREG(st.st_mode)
            and StatKey.of(st) == file.key
            and signed(st.st_ino) == file.inode
            and filesystem_id(file.path, st) == file.filesystem
        )
    except OSError:
        return None
    return MappedFile(sha256=file.sha256, path=file.path, size=st.st_size) if is_same else None


def _write(files: Iterator[MappedFile], target: TextIO) -> int:
    target.write(f'{{"format": {FORMAT}, "files": {{')
    count = 0
    for file in files:
        entry = json.dumps({"path": str(file.path), "size": file.size})
        target.write(f'{"," if count else ""}\n"{file.sha256}": {entry}')
        count += 1
    target.write("\n}}\n")
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFile:
    """An entry of a mapping file that was not taken, and why."""

    sha256: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedMapping:
    """What became of the entries of a mapping file."""

    files: tuple[MappedFile, ...]
    """Known to downloads from now on: they exist and have the hash that was said."""
    refused: tuple[RefusedFile, ...]


class _RefusedError(Exception):
    """Says what is wrong with an entry."""


def import_mapping(
    store: Store, path: str | Path, *, progress: Progress = silent
) -> ImportedMapping:
    """Hash the files that a mapping file names, and let downloads know those that are right.

    It is one that `export_json` wrote, or a plain {sha256: path}; HubError if it is neither. The
    folders count as merely discovered: no file that is named is ever changed.
    """
    taken: list[MappedFile] = []
    refused: list[RefusedFile] = []
    entries = _read(Path(path), refused)
    with progress("Hashing", sum(_size_now(file) for _, file, _ in entries), "bytes") as job:
        for sha256, file, size in entries:
            reason = ""
            try:
                taken.append(_take(store, sha256, file, size))
            except (_RefusedError, FileSkippedError) as error:
                reason = str(error)
            except StoreError:
                raise  # about the store, as a full disk: it would be said of every file
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
            if reason:
                refused.append(RefusedFile(sha256=sha256, path=str(file), reason=reason))
            job.advance(_size_now(file))
    return ImportedMapping(files=tuple(taken), refused=tuple(refused))


def _size_now(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: Path, refused: list[RefusedFile]) -> list[_Entry]:
    """Return the entries of a mapping file that can be meant; the others are refused."""
    hint = 'It has to be {sha256: path}, or what "smartcache hub mapping --output" writes.'
    with open(path, "rb") as file:
        text = file.read(_MOST + 1)
    if len(text) > _MOST:
        raise HubError(f"{path} is too large for a mapping", hint="Divide it into several files.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HubError(f"{path} is not a JSON document", hint=hint) from error
    if isinstance(document, dict) and "format" in document:
        if document["format"] != FORMAT:
            newer = f"{path} is a mapping of format {document['format']!r}"
            raise HubError(newer, hint=f"This smartcache reads format {FORMAT}.")
        document = document.get("files")
    if not isinstance(document, dict):
        raise HubError(f"{path} is not a mapping of files", hint=hint)
    found = []
    for key, value in document.items():
        place, size = value, None
        if isinstance(value, dict):
            place, size = value.get("path"), value.get("size")
        reason = _fault_of(key, place, size)
        if reason:
            shown = place if isinstance(place, str) else ""
            refused.append(RefusedFile(sha256=key, path=shown, reason=reason))
        else:
            found.append((key.lower(), Path(place), size))
    return found


def _fault_of(key: str, path: object, size: object) -> str:
    """Return what is wrong with an entry that cannot be meant; "" if it can."""
    if not is_digest(key.lower()):
        return "its key is not a sha256"
    if not isinstance(path, str) or "\0" in path or not os.path.isabs(path):
        return "its path is not absolute"
    if size is not None and (type(size) is not int or size < 0):
        return "its size is not a number of bytes"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return "its path cannot exist here"
    return ""


def _take(store: Store, sha256: str, path: Path, size: int | None) -> MappedFile:
    """Hash a file, unless that was done before, and remember where it is, if it is right."""
    path = Path(os.path.realpath(path))
    st = os.stat(path)
    if not stat.S_ISREG(st.st_mode):
        raise _RefusedError("it is not a regular file")
    if size not in (None, st.st_size):
        raise _RefusedError(f"it has {st.st_size} bytes, not {size}")
    hashes, key = hashes_of(store.volume, path, ("sha256",))
    if hashes.values["sha256"] != sha256:
        raise _RefusedError(f"its sha256 is {hashes.values['sha256']}")
    seen = sighting_of(path)
    if seen.key != key:
        raise _RefusedError("it changed while it was read")
    if not _is_of_a_store(store, path, hashes):
        store.catalog.add_sighting(seen)
    return MappedFile(sha256=sha256, path=path, size=seen.size)


def _is_of_a_store(store: Store, path: Path, hashes: Hashes) -> bool:
    """Say whether a file lies in a store of ours; if it is a blob there, its hash is an alias."""
    for each in store.stores():
        if not path.is_relative_to(os.path.realpath(each.root)):
            continue
        blob = each.volume.index.blob(hashes.digest)
        if blob is not None and blob.inode == signed(os.stat(path).st_ino):
            each.volume.index.add_aliases(blob.digest, {"sha256": hashes.values["sha256"]})
            return True
        raise _RefusedError("it is a file of the store, but not a blob")
    return False
