"""A bundle: repos of an HF cache in one folder or tar file, for a machine without network.

    smartcache-bundle.json   the manifest, first; what is in here and how it is hashed
    blobs/<sha256>           each content once, whichever repos, revisions and names have it
    complete                 last: the sha256 of the manifest. Without it, the bundle is not whole

A tar bundle is a plain, uncompressed tar of the same names, in this order (blobs by name). The
manifest is JSON:

    {"format": "smartcache-bundle", "format_version": 1, "created_at": "2026-11-16T16:00:00Z",
     "repos": [{"type": "model", "id": "org/name", "refs": {"main": <commit>}, "revisions":
         {<commit>: {"files": {<path>: {"etag": <etag>, "size": 1}}, "tree": <sha256> or null}}}],
     "blobs": {<etag>: {"size": 1, "sha256": <sha256>}}}

`tree` is the content of `trees/<commit>.json`. Nothing in a manifest is believed: `decode` returns
one only if every name is safe, every number fits, and all that is named is described.

Only the members that the manifest names are read, each once, as plain files of the size it says; a
tar with anything else in it (links, devices, a second member of a name) is refused where that is
met. No name of a bundle is ever a path to write to.

A folder or file that is written gets its name as the last step, when all of it is on the disk;
until then it has a hidden name beside it, which the next export to the same place removes if this
one is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, cast

from smartcache.errors import BundleError, DestinationExistsError, FileChangedError, HubError
from smartcache.hub import REPO_TYPES, layout
from smartcache.hub.records import Repo, announced_by
from smartcache.store.layout import explained
from smartcache.system.faults import reached
from smartcache.system.filesystems import need_room
from smartcache.system.hashing import Advance, Algorithm, Hasher, Hashes, hash_file, is_digest
from smartcache.system.kernel import clone, exchange, sync_directory
from smartcache.system.locks import claim

MANIFEST = "smartcache-bundle.json"
COMPLETE = "complete"
BLOBS = "blobs"
MOST_MANIFEST = 1 << 28
"""Bytes of a manifest that are read: a million files are some 150 MB."""

_MOST_LISTING = 1 << 29
_FORMAT = "smartcache-bundle"
_VERSION = 1
_LONGEST_NAME = 255
_ID = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_KINDS: dict[type, str] = {str: "text", dict: "an object", list: "a list"}
_CHUNK = 1 << 20
_RECORD = 10_240
"""What tar programs pad an archive to."""
_MOST_AFTER = 1 << 20
"""Bytes after the end of a tar that are read away, so that the program that pipes it can end."""

_T = TypeVar("_T")
Chunks = Callable[[], Iterator[bytes]]
"""Starts to read a content; it may be called once, before the next content is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Bytes of the bundle, by size and sha256."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The files that a snapshot had, path -> etag, and the sha256 of its tree listing."""

    files: Mapping[str, str]
    tree: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledRepo:
    """A repo of the bundle: its branches and tags, and its revisions by commit."""

    repo: Repo
    refs: Mapping[str, str]
    revisions: Mapping[str, Revision]

    def blobs(self) -> set[str]:
        """Return every blob that it needs: the etags of files, and tree listings."""
        found = {etag for each in self.revisions.values() for etag in each.files.values()}
        return found | {each.tree for each in self.revisions.values() if each.tree is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a bundle holds. `blobs` has every etag and every tree listing of the repos."""

    created_at: datetime
    repos: tuple[BundledRepo, ...]
    blobs: Mapping[str, Content]

    def contents(self) -> dict[str, int]:
        """Return sha256 -> size of each content, in the order in which a bundle has them."""
        return dict(sorted((each.sha256, each.size) for each in self.blobs.values()))

    def expected(self) -> dict[str, dict[Algorithm, str]]:
        """Return sha256 -> every hash that this content must have by the names it goes by."""
        found: dict[str, dict[Algorithm, str]] = {}
        for etag, content in self.blobs.items():
            hashes = found.setdefault(content.sha256, {"sha256": content.sha256})
            hashes.update(announced_by(etag))
        return found

    @property
    def size(self) -> int:
        """The bytes of all contents, each once."""
        return sum(self.contents().values())


def checksum(manifest: bytes) -> bytes:
    """Return what the file `complete` of a bundle with this manifest contains."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest; BundleError if no machine would import it."""
    document = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "created_at": manifest.created_at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "repos": [
            {
                "type": each.repo.type,
                "id": each.repo.id,
                "refs": dict(sorted(each.refs.items())),
                "revisions": {
                    commit: {
                        "files": {
                            path: {"etag": etag, "size": manifest.blobs[etag].size}
                            for path, etag in sorted(revision.files.items())
                        },
                        "tree": revision.tree,
                    }
                    for commit, revision in sorted(each.revisions.items())
                },
            }
            for each in manifest.repos
        ],
        "blobs": {
            etag: {"size": content.size, "sha256": content.sha256}
            for etag, content in sorted(manifest.blobs.items())
        },
    }
    text = json.dumps(document, indent=1).encode("ascii") + b"\n"
    if len(text) > MOST_MANIFEST:
        raise BundleError("There are too many files for one bundle", hint="Export fewer repos.")
    decode(text)  # what cannot be imported must not be exported
    return text


def decode(text: bytes) -> Manifest:
    """Return the manifest of a bundle, checked; BundleError if it is damaged or means harm."""
    try:
        document = json.loads(text, object_pairs_hook=_unique)
        if _item(document, "format", object) != _FORMAT:
            raise ValueError("it was not written by smartcache")
        version = _item(document, "format_version", object)
        if version != _VERSION:
            message = f"The bundle has format {version!r}; this smartcache reads {_VERSION}"
            raise BundleError(message, hint="Update smartcache.")
        blobs = {
            name: _content(name, entry) for name, entry in _item(document, "blobs", dict).items()
        }
        created_at = datetime.fromisoformat(_item(document, "created_at", str))
        if created_at.tzinfo is None:
            raise ValueError("its time has no zone")
        repos = tuple(_repo(entry, blobs) for entry in _item(document, "repos", list))
        _check_whole(repos, blobs)
    except BundleError:
        raise
    except (ValueError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "it is not readable JSON"
        raise BundleError(f"The manifest of the bundle cannot be used: {reason}") from error
    return Manifest(created_at=created_at, repos=repos, blobs=blobs)


def _check_whole(repos: Iterable[BundledRepo], blobs: Mapping[str, Content]) -> None:
    """Raise unless what is named and what is described is the same, and nothing is said twice."""
    folders = [each.repo.folder_name.casefold() for each in repos]
    if len(set(folders)) != len(folders):
        raise ValueError("a repo appears twice")
    if {name for each in repos for name in each.blobs()} != blobs.keys():
        raise ValueError("its list of blobs does not match its files")
    said: dict[str, tuple[int, dict[Algorithm, str]]] = {}
    for etag, content in blobs.items():
        size, hashes = said.setdefault(content.sha256, (content.size, {"sha256": content.sha256}))
        for name, value in announced_by(etag).items():
            if hashes.setdefault(name, value) != value or size != content.size:
                raise ValueError(f"it contradicts itself about {content.sha256}")


def _repo(entry: object, blobs: Mapping[str, Content]) -> BundledRepo:
    kind, name = _item(entry, "type", str), _item(entry, "id", str)
    found = [each for each in REPO_TYPES if each == kind]
    if not found:
        raise ValueError(f"{kind!r} is not a type of repo")
    repo = Repo(found[0], name)
    if not is_safe_id(repo):
        raise ValueError(f"{name!r} is not a repo id")
    revisions: dict[str, Revision] = {}
    for commit, revision in _item(entry, "revisions", dict).items():
        if not layout.is_commit(commit):
            raise ValueError(f"{commit[:100]!r} is not a commit")
        revisions[commit] = _revision(revision, blobs)
    refs = _item(entry, "refs", dict)
    _check_names(refs)
    for commit in refs.values():
        if not isinstance(commit, str) or commit not in revisions:
            raise ValueError(f"a ref of {name} names a revision that is not there")
    return BundledRepo(repo=repo, refs=refs, revisions=revisions)


def is_safe_id(repo: Repo) -> bool:
    """Say whether a repo has an id that the Hub could have given, and a folder of its own."""
    is_plain = _ID.fullmatch(repo.id) is not None and ".." not in repo.id
    name = repo.folder_name
    return is_plain and Repo.of_folder(name) == repo and len(name) <= _LONGEST_NAME


def _revision(entry: object, blobs: Mapping[str, Content]) -> Revision:
    files: dict[str, str] = {}
    table = _item(entry, "files", dict)
    _check_names(table)
    for path, file in table.items():
        etag = _item(file, "etag", str)
        content = blobs.get(etag)
        if content is None or _item(file, "size", object) != content.size:
            raise ValueError(f"{path!r} is not described as its blob is")
        files[path] = etag
    listing = _item(entry, "tree", object)
    if listing is None:
        return Revision(files=files)
    if not isinstance(listing, str) or listing not in blobs:
        raise ValueError("a tree listing is not described")
    if blobs[listing].sha256 != listing:
        raise ValueError("a tree listing is not named by its sha256")
    if blobs[listing].size > _MOST_LISTING:
        raise ValueError("a tree listing is too large to be one")
    return Revision(files=files, tree=listing)


def _check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless files of these names can be below one folder, and only there."""
    taken: set[str] = set()
    folders: set[str] = set()
    for name in names:
        if layout.safe_parts(name) is None:
            raise ValueError(f"{name!r} leads outside its folder")
        taken.add(name)
        parts = name.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    both = taken & folders
    if both:
        raise ValueError(f"{min(both)!r} is both a file and a folder")


def _content(name: str, entry: object) -> Content:
    size, sha256 = _item(entry, "size", object), _item(entry, "sha256", str)
    announced = announced_by(name)
    if not announced:
        raise ValueError(f"{name[:100]!r} is not a hash")
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise ValueError(f"{name} has no size")
    if not is_digest(sha256) or announced.get("sha256", sha256) != sha256:
        raise ValueError(f"{name} has another sha256 than its name")
    return Content(size=size, sha256=sha256)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _item(entry: object, name: str, kind: type[_T]) -> _T:
    if not isinstance(entry, dict) or name not in entry:
        raise ValueError(f"{name!r} is missing")
    value = entry[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name!r} is not {_KINDS[kind]}")  # noqa: TRY004 - about the manifest, not the code
    return value


def _exactly(
    read: Callable[[int], bytes], size: int, wrong: Exception, *, ends: bool
) -> Iterator[bytes]:
    """Yield so many bytes; the error if there are fewer or (`ends`) more."""
    while size:
        chunk = read(min(_CHUNK, size))
        if not chunk:
            raise wrong
        size -= len(chunk)
        yield chunk
    if ends and read(1):
        raise wrong


def open_plainly(path: Path, more: int = 0) -> BinaryIO:
    """Open a file for reading, without a buffer; a FIFO is not waited for. `more`: flags."""
    flags = more | getattr(os, "O_NONBLOCK", 0)
    return open(path, "rb", 0, opener=lambda name, how: os.open(name, how | flags))


def new_file(path: Path, mode: str) -> BinaryIO:
    """Open a file for writing that nobody but its owner may write to, whatever the umask is."""
    return cast("BinaryIO", open(path, mode, opener=lambda name, how: os.open(name, how, 0o644)))


# reading


class Source(Protocol):
    """An open bundle. `contents` goes through all of it and then says that it is whole."""

    manifest: Manifest

    def contents(self) -> Iterator[tuple[str, Chunks]]:
        """Go through the contents, each by its sha256; BundleError at the end if one is missing."""
        ...


@contextmanager
def opened(place: Path | BinaryIO) -> Iterator[Source]:
    """Open a folder, a tar file or a stream of one, and read its manifest."""
    if not isinstance(place, Path):
        yield TarSource(place, name="The stream")
    elif place.is_dir():
        yield FolderSource(place)
    else:
        with open_plainly(place) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise BundleError(f"{place} is neither a folder nor a file", hint="Name a bundle.")
            yield TarSource(stream, name=str(place))


class FolderSource:
    """A bundle that is a folder; it is known to be whole from the start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        text = self._text(MANIFEST, MOST_MANIFEST)
        if self._text(COMPLETE, 1024) != checksum(text):
            raise BundleError(f"{folder} is incomplete: its manifest was changed")
        self.manifest = decode(text)
        for sha256, size in self.manifest.contents().items():
            found = self._size_of(f"{BLOBS}/{sha256}")
            if found != size:
                path = folder / BLOBS / sha256
                raise BundleError(f"{path} has {found} bytes instead of {size}")

    def contents(self) -> Iterator[tuple[str, Chunks]]:
        """Go through the contents; a file that is not asked for is not read."""
        for sha256, size in self.manifest.contents().items():
            yield sha256, partial(self._chunks, f"{BLOBS}/{sha256}", size)

    def _chunks(self, name: str, size: int) -> Iterator[bytes]:
        changed = BundleError(f"{self._folder / name} changed while it was read")
        with self._open(name) as file:
            yield from _exactly(file.read, size, changed, ends=True)

    def _text(self, name: str, most: int) -> bytes:
        size = self._size_of(name)
        if size > most:
            raise BundleError(f"{self._folder / name} is too large for a bundle")
        return b"".join(self._chunks(name, size))

    def _size_of(self, name: str) -> int:
        with self._open(name) as file:
            return os.fstat(file.fileno()).st_size

    def _open(self, name: str) -> BinaryIO:
        path = self._folder / name
        try:
            file = open_plainly(path, getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError as error:
            what = "is not a bundle" if name == MANIFEST else "is incomplete"
            raise BundleError(f"{self._folder} {what}: {name} is missing") from error
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise BundleError(f"{path} is not a plain file")
        return file


class TarSource:
    """A bundle that is a tar. That it is whole is known when all of it was gone through."""

    def __init__(self, stream: BinaryIO, *, name: str) -> None:
        self._stream = stream
        self._name = name
        self._left = 0
        """Bytes of the current member, with its padding, that were not read."""
        self._cut = BundleError(
            f"{name} is incomplete: it ends early",
            hint="Copy or export it again; what has arrived will not be read a second time.",
        )
        member = self._next()
        if member is None or member.name != MANIFEST:
            raise BundleError(f"{name} is not a bundle: it does not begin with {MANIFEST}")
        if member.size > MOST_MANIFEST:
            raise BundleError(f"The manifest of {name} is too large to be one")
        text = b"".join(self._chunks(member.size))
        self._complete = checksum(text)
        self.manifest = decode(text)

    def contents(self) -> Iterator[tuple[str, Chunks]]:
        """Go through the contents in the order of the tar; what is not asked for is passed over."""
        missing = self.manifest.contents()
        while (member := self._next()) is not None and member.name != COMPLETE:
            folder, _, sha256 = member.name.partition("/")
            size = missing.pop(sha256, None) if folder == BLOBS else None
            if size is None:
                message = f"{self._name} has a member that does not belong there: {member.name!r}"
                raise BundleError(message)
            if size != member.size:
                raise BundleError(f"{member.name} has {member.size} bytes instead of {size}")
            yield sha256, partial(self._chunks, size)
        if member is None or missing:
            raise self._cut
        is_whole = member.size == len(self._complete)
        if not is_whole or b"".join(self._chunks(member.size)) != self._complete:
            raise BundleError(f"{self._name} is incomplete: its manifest was changed")
        if self._next() is not None:
            raise BundleError(f"{self._name} continues after its end")
        left = _MOST_AFTER
        while left > 0 and (chunk := self._stream.read(min(left, _CHUNK))):
            left -= len(chunk)

    def _next(self) -> tarfile.TarInfo | None:
        """Return the next member, a plain file; None at the end of the archive."""
        if self._left > _CHUNK:
            with suppress(OSError, ValueError):  # a pipe cannot be sought in
                self._stream.seek(self._left, os.SEEK_CUR)
                self._left = 0
        for _ in self._chunks(self._left):
            pass
        header = b""
        while len(header) < tarfile.BLOCKSIZE and (
            more := self._stream.read(tarfile.BLOCKSIZE - len(header))
        ):
            header += more
        if not any(header):  # the end, or nothing at all
            return None
        try:
            member = tarfile.TarInfo.frombuf(header, "ascii", "surrogateescape")
        except tarfile.HeaderError as error:
            if len(header) < tarfile.BLOCKSIZE:
                raise self._cut from error
            raise BundleError(f"{self._name} is damaged, or not a plain tar file") from error
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            message = f"{self._name} has a member that is not a plain file: {member.name!r}"
            hint = "smartcache writes none; unpack the tar, look, and import the folder."
            raise BundleError(message, hint=hint)
        self._left = member.size + -member.size % tarfile.BLOCKSIZE
        return member

    def _chunks(self, size: int) -> Iterator[bytes]:
        for chunk in _exactly(self._stream.read, size, self._cut, ends=False):
            self._left -= len(chunk)
            yield chunk


# writing


def _copy(
    source: int,
    size: int,
    wanted: tuple[Algorithm, ...],
    advance: Advance,
    write: Callable[[bytes], object],
) -> Hashes:
    """Copy an open file that must have this size; return the hashes of what was written."""
    hasher = Hasher(wanted, size=size)
    changed = FileChangedError("A file changed its size while it was read")
    for chunk in _exactly(partial(os.read, source), size, changed, ends=True):
        hasher.update(chunk)
        write(chunk)
        advance(len(chunk))
    return hasher.finish()


class FolderSink:
    """A bundle that is a folder. Blobs share blocks with the cache where the filesystem can."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._left = size
        self._can_clone = True
        os.mkdir(folder)
        os.mkdir(folder / BLOBS)

    def text(self, name: str, data: bytes) -> None:
        """Write a small file."""
        write_file(self._folder / name, data)

    def blob(
        self, sha256: str, source: int, size: int, wanted: tuple[Algorithm, ...], advance: Advance
    ) -> Hashes:
        """Write a blob by reflink or copy, never by hard link: the user may edit a bundle."""
        with new_file(self._folder / BLOBS / sha256, "x+b") as target:
            if self._can_clone and size and clone(source, target.fileno()):
                hashes, _ = hash_file(target.fileno(), wanted, advance=advance)
            else:
                if self._can_clone and size:
                    # Said early, as soon as it is known that bytes must be copied.
                    self._can_clone = False
                    need_room(self._folder, self._left, "The bundle")
                hashes = _copy(source, size, wanted, advance, target.write)
                target.flush()
            os.fsync(target.fileno())
        self._left -= size
        return hashes

    def finish(self) -> None:
        """Bring the names to the disk."""
        sync_directory(self._folder / BLOBS)
        sync_directory(self._folder)


class TarSink:
    """A bundle that is a tar: plain files, sizes above 8 GB as GNU tar writes them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._written = 0

    def text(self, name: str, data: bytes) -> None:
        """Write a small member."""
        self._header(name, len(data))
        self._write(data)
        self._pad(tarfile.BLOCKSIZE)

    def blob(
        self, sha256: str, source: int, size: int, wanted: tuple[Algorithm, ...], advance: Advance
    ) -> Hashes:
        """Write a blob. If its file is too short, what was written is no bundle any more."""
        self._header(f"{BLOBS}/{sha256}", size)
        hashes = _copy(source, size, wanted, advance, self._write)
        self._pad(tarfile.BLOCKSIZE)
        return hashes

    def finish(self) -> None:
        """Write the end of the archive."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._pad(_RECORD)
        self._stream.flush()

    def _header(self, name: str, size: int) -> None:
        member = tarfile.TarInfo(name)
        member.size = size
        self._write(member.tobuf(tarfile.GNU_FORMAT))

    def _pad(self, unit: int) -> None:
        self._write(bytes(-self._written % unit))

    def _write(self, data: bytes) -> None:
        self._written += len(data)
        self._stream.write(data)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, on the disk when this returns."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_destination(path: Path, *, is_tar: bool, force: bool) -> None:
    """Raise unless a bundle may be written there; `force` replaces another bundle, never more."""
    if not path.parent.is_dir():
        hint = "Make it first, or choose another place."
        raise HubError(f"There is no folder {path.parent}", hint=hint)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not is_tar and stat.S_ISDIR(mode) and not os.listdir(path):
        return
    if not force:
        hint = "Choose another name, or replace it with --force."
        raise DestinationExistsError(f"{path} exists already", path=path, hint=hint)
    if is_tar:
        is_bundle = stat.S_ISREG(mode) and _is_tar_bundle(path)
    else:
        is_bundle = stat.S_ISDIR(mode) and _is_folder_bundle(path)
    if not is_bundle:
        message = f"{path} exists and is more than a bundle; it was not replaced"
        raise DestinationExistsError(message, path=path, hint="Choose another name.")


def _is_tar_bundle(path: Path) -> bool:
    """Say whether a file begins as a bundle does."""
    with open(path, "rb") as file:
        start = file.read(tarfile.BLOCKSIZE)
    try:
        return tarfile.TarInfo.frombuf(start, "ascii", "surrogateescape").name == MANIFEST
    except tarfile.HeaderError:
        return False


def _is_folder_bundle(path: Path) -> bool:
    """Say whether a folder has the files of a bundle alone: only such a one may be replaced."""
    names = set(os.listdir(path))
    if MANIFEST not in names or not names <= {MANIFEST, BLOBS, COMPLETE}:
        return False
    if BLOBS not in names:
        return True  # somebody has removed it, or copied no more than this
    is_folder = stat.S_ISDIR(os.lstat(path / BLOBS).st_mode)
    return is_folder and all(map(is_digest, os.listdir(path / BLOBS)))


@contextmanager
def named_at_last(path: Path, *, force: bool) -> Iterator[Path]:
    """Give a hidden name beside `path` to write to; at the end of the block it becomes `path`.

    If the block raises, nothing is left, and what was at `path` is as it was.
    """
    start = os.fsdecode(os.fsencode(path.name)[:100])
    holder = claim(path.with_name(f".{start}.smartcache-export"))
    if holder is None:
        hint = "Wait for it to end, or choose another name."
        raise HubError(f"Another process is writing {path}", hint=hint)
    part = path.with_name(f".{start}.smartcache-part")
    try:
        remove(part)
        reached("export: begun")
        with explained(path.parent):
            yield part
            reached("export: written")
            _rename(part, path, force=force)
            sync_directory(path.parent)
            reached("export: named")
    finally:
        with suppress(OSError):
            remove(part)
        holder.release()


def _rename(part: Path, path: Path, *, force: bool) -> None:
    """Let what was written have its name, in place of the bundle that may be replaced."""
    is_folder = part.is_dir()
    check_destination(path, is_tar=not is_folder, force=force)  # somebody may have been faster
    if not is_folder:
        os.replace(part, path)
        return
    aside = part.with_name(f"{part.name}.old")
    if not os.path.lexists(path) or not os.listdir(path):
        os.rename(part, path)  # onto an empty folder, and no other
    elif not exchange(part, path):
        os.rename(path, aside)  # a filesystem that cannot exchange names
        os.rename(part, path)
    remove(aside)


def remove(path: Path) -> None:
    """Remove a file or folder of ours, whatever a killed process has left of it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
