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
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TextIO

from smartcache.errors import DamagedBlobError, FileSkippedError, HubError, StoreError
from smartcache.progress import Progress, silent
from smartcache.store import RememberedFile, Sighting, Store, hashes_of
from smartcache.system import Hashes, StatKey, allocated_bytes, filesystem_id, signed

FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 28
"""Bytes of a mapping file that are read: a million files are some 200 MB."""
_Candidate = tuple[str, tuple[Store, str] | RememberedFile]
"""A sha256, and what may have it: the volume and digest of a blob, or a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """A file that is known by its sha256."""

    sha256: str
    path: Path
    size: int


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
        found = _first(self._candidates(key)) if _SHA256.fullmatch(key) else None
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
                yield sha256, (store, blob.digest)
        for file in self._store.catalog.files_with_sha256(sha256):
            yield sha256, file

    def _all_candidates(self) -> Iterator[_Candidate]:
        """Yield the candidates of all hashes, in the order of the hashes, blobs first."""
        streams: list[Iterator[_Candidate]] = [_aliased(each) for each in self._store.stores()]
        files = self._store.catalog.files_by_sha256()
        streams.append((file.sha256, file) for file in files)
        return heapq.merge(*streams, key=lambda each: each[0])


def cache_mapping(store: Store) -> CacheMapping:
    """Return the {sha256: path} mapping of everything a store knows."""
    return CacheMapping(store)


def _aliased(store: Store) -> Iterator[_Candidate]:
    aliases = store.volume.index.digests_by_sha256()
    return ((value, (store, digest)) for value, digest in aliases)


def _first(candidates: Iterable[_Candidate]) -> MappedFile | None:
    """Return the first candidate whose bytes are vouched for."""
    for sha256, candidate in candidates:
        if isinstance(candidate, RememberedFile):
            found = _unchanged(candidate)
        else:
            found = _sound(sha256, *candidate)
        if found is not None:
            return found
    return None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    sha256: str
    path: Path
    size: int | None


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
    with progress("Hashing", sum(map(_size_now, entries)), "bytes") as job:
        for entry in entries:
            try:
                taken.append(_take(store, entry))
            except (_RefusedError, OSError) as error:
                if isinstance(error, StoreError) and not isinstance(error, FileSkippedError):
                    raise  # about the store, as a full disk: it would be said of every file
                refused.append(
                    RefusedFile(sha256=entry.sha256, path=str(entry.path), reason=_reason(error))
                )
            job.advance(_size_now(entry))
    return ImportedMapping(files=tuple(taken), refused=tuple(refused))


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
        try:
            found.append(_entry(key, value))
        except _RefusedError as error:
            refused.append(RefusedFile(sha256=key, path=_shown(value), reason=str(error)))
    return found


def _entry(key: str, value: object) -> _Entry:
    """Return an entry that can be meant; _RefusedError says what is wrong with it."""
    path, size = (
        (value.get("path"), value.get("size")) if isinstance(value, dict) else (value, None)
    )
    if not _SHA256.fullmatch(key.lower()):
        raise _RefusedError("its key is not a sha256")
    if not isinstance(path, str) or "\0" in path or not os.path.isabs(path):
        raise _RefusedError("its path is not absolute")
    if size is not None and (type(size) is not int or size < 0):
        raise _RefusedError("its size is not a number of bytes")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise _RefusedError("its path cannot exist here") from None
    return _Entry(sha256=key.lower(), path=Path(path), size=size)


def _shown(value: object) -> str:
    path = value.get("path") if isinstance(value, dict) else value
    return path if isinstance(path, str) else ""


def _size_now(entry: _Entry) -> int:
    try:
        return os.stat(entry.path).st_size
    except OSError:
        return 0


def _take(store: Store, entry: _Entry) -> MappedFile:
    """Hash a file, unless that was done before, and remember where it is, if it is right."""
    path = Path(os.path.realpath(entry.path))
    st = os.stat(path)
    if not stat.S_ISREG(st.st_mode):
        raise _RefusedError("it is not a regular file")
    if entry.size not in (None, st.st_size):
        raise _RefusedError(f"it has {st.st_size} bytes, not {entry.size}")
    hashes, key = hashes_of(store.volume, path, ("sha256",))
    if hashes.values["sha256"] != entry.sha256:
        raise _RefusedError(f"its sha256 is {hashes.values['sha256']}")
    st = os.stat(path)
    if StatKey.of(st) != key:
        raise _RefusedError("it changed while it was read")
    if not _is_of_a_store(store, path, hashes):
        store.catalog.add_sighting(
            Sighting(
                path=path, size=st.st_size, filesystem=filesystem_id(path, st), inode=st.st_ino,
                key=key, links=st.st_nlink, allocated=allocated_bytes(st),
            )
        )  # fmt: skip
    return MappedFile(sha256=entry.sha256, path=path, size=st.st_size)


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


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, StoreError):
        return (error.strerror or str(error)).lower()
    return str(error)
