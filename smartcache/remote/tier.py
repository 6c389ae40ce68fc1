"""A tier: a place beyond this machine that has objects by their content, and says what they are.

It is a folder of a NAS, or a bucket of S3, Google or Azure. Below its URL:

    smartcache.json                    marks the place as ours, and says its format
    objects/<aa>/<digest>              bytes, named by their BLAKE3 digest: blobs, and sealed packs
    names/<algorithm>/<aa>/<value>     which object has this sha256, or git's sha1
    documents/<kind>/<name>/<n>.json   what a repo, a set or a dataset needs; the highest n counts

An object has its name only when all of its bytes have arrived and were hashed on the way; so it
does no harm to push twice, or to be killed in the middle. Documents come last and change by making
the next number, which only one of several writers can do, where the server honours "create only".
Whatever is read is hashed by whoever keeps it: the tier is not believed.

Credentials are those that obstore finds (environment, instance, files); none is kept here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from smartcache.errors import (
    ConfigError,
    DamagedObjectError,
    MissingObjectError,
    TierError,
    install_hint,
)
from smartcache.progress import Progress, silent
from smartcache.remote.folder import Files, Listed, is_place_of_folder, odd
from smartcache.remote.forked import Readers
from smartcache.store.sources import Found

FORMAT: Final = 1
KINDS: Final = ("repos", "blobs", "sets", "datasets")
PIECE: Final = 8 << 20
"""Bytes that go to the server, or come from it, in one request."""
THREADS: Final = 8
"""Objects that are sent or fetched at once."""
_AHEAD: Final = 4
"""Pieces of one object that are on their way at once."""
_MOST_PARTS: Final = 9000
"""Of one upload; S3 takes 10,000."""
_MOST_DOCUMENT: Final = 1 << 28
MOST_NAME: Final = 4096
_TRIES: Final = 20
_MARK: Final = "smartcache.json"
_MARKED: Final = json.dumps({"format": FORMAT})
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DOCUMENT: Final = re.compile(
    rf"documents/({'|'.join(KINDS)})/({_NAME.pattern})/([0-9]{{8,18}})\.json"
)
_OBJECT: Final = re.compile(r"objects/([0-9a-f]{2})/\1[0-9a-f]{62}")
_OBJECT_NAME: Final = re.compile(
    r"names/(?:sha256/([0-9a-f]{2})/\1[0-9a-f]{62}|git-sha1/([0-9a-f]{2})/\2[0-9a-f]{38})"
)
_BEGUN: Final = re.compile(rf"({re.escape(_MARK)}|probe-[0-9a-f]{{16}})(#[0-9]+)?")
"""What whoever makes a tier of an empty folder writes there."""
_NUMBERED: Final = re.compile(r"(.*)#[0-9]+", re.DOTALL)
"""A file of a folder that obstore is writing, or was when it was killed."""
_SECRET: Final = re.compile("key|secret|token|password|sas|credential", re.IGNORECASE)
_SCHEMES: Final = ("s3", "gs", "az", "file")

T = TypeVar("T")
R = TypeVar("R")
Document = dict[str, Any]
Advance = Callable[[int], object]


@dataclass(slots=True, kw_only=True)
class Sent:
    """What was sent, or fetched, and what was there already."""

    objects: int = 0
    size: int = 0
    skipped: int = 0
    skipped_size: int = 0

    def __add__(self, other: Sent) -> Sent:
        mine, theirs = asdict(self), asdict(other)
        return Sent(**{name: mine[name] + theirs[name] for name in mine})


def check_url(url: str) -> str:
    """Return the URL of a tier; ConfigError if it is none, or has a password in it.

    A path is that of a folder.
    """
    text = os.fspath(url)
    if "://" not in text:
        path = Path(text).expanduser()
        if not text or not path.is_absolute():
            hint = "Write the whole path of a folder, or s3://bucket/prefix, gs://... or az://..."
            raise ConfigError(f"{text!r} is not the place of a tier", hint=hint)
        return path.as_uri()
    parts = urlsplit(text)
    if parts.scheme not in _SCHEMES:
        hint = f"It begins with {', '.join(f'{each}://' for each in _SCHEMES)}."
        raise ConfigError(f"{text} is not the place of a tier", hint=hint)
    if parts.username or parts.password or parts.query or parts.fragment:
        hint = "Give credentials in the environment, as the tools of the server want them."
        raise ConfigError("A URL with credentials or a query is not kept", hint=hint)
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(
            f"{text} is not the path of a folder", hint="Write file:///mnt/nas/cache."
        )
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"{text} names no bucket", hint="Write s3://bucket/prefix.")
    return text.rstrip("/")


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a tier; ConfigError if one would keep a secret."""
    for name in options:
        if _SECRET.search(name):
            hint = "Give it in the environment, for instance as AWS_ACCESS_KEY_ID."
            raise ConfigError(f"The option {name} holds a secret: it is not kept", hint=hint)
    return dict(options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a server was seen to do."""

    creates: bool = True
    """It refuses to make what is there already: writers of one document cannot lose a change."""
    ranges: bool = True
    """It sends a part of an object."""


@dataclass(slots=True)
class Tier:
    """A place beyond this machine, open. For any number of threads; goes to other processes."""

    name: str
    url: str
    options: Mapping[str, str] = field(default_factory=dict)
    abilities: Abilities = field(default_factory=Abilities)
    _opened: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        return Tier, (self.name, self.url, dict(self.options), self.abilities)

    def described(self) -> Document:
        """Return what `connected` makes it from again."""
        return {
            "name": self.name, "url": self.url, "options": dict(self.options),
            "creates": self.abilities.creates, "ranges": self.abilities.ranges,
        }  # fmt: skip

    @property
    def has_ranges(self) -> bool:
        """Whether it sends a part of an object."""
        return self.abilities.ranges

    # talking to the server

    @property
    def _store(self) -> Any:  # noqa: ANN401 - one of obstore's classes
        if self._opened is None:
            self._opened = self._connect()
        return self._opened

    @property
    def folder(self) -> Path | None:
        """The folder that it is; None: a server is asked."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    @property
    def _files(self) -> Files | None:
        folder = self.folder
        return None if folder is None else Files(folder)

    def _connect(self) -> Any:  # noqa: ANN401
        obstore = _obstore()
        if self.folder is not None:
            return obstore.store.LocalStore(self.folder)
        options = {**self.options}
        try:
            # Nothing is asked for hours: a server that is silent for half a minute is not there.
            return obstore.store.from_url(
                self.url, config=options,
                client_options={
                    "allow_http": True, "connect_timeout": timedelta(seconds=5),
                    "read_timeout": timedelta(seconds=30), "timeout": timedelta(hours=12),
                },
                retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
            )  # fmt: skip
        except obstore.exceptions.BaseError as error:
            raise ConfigError(f"{self.url} cannot be used: {_first_line(error)}") from error

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Let errors of the server be ours; `what` is the object or document."""
        try:
            yield
        except TierError:
            raise
        except FileNotFoundError as error:
            message = f"The tier {self.name} has no {what}"
            raise MissingObjectError(message, tier=self.name) from error
        except Exception as error:
            if not isinstance(error, (OSError, _server_error())):
                raise
            message = f"The tier {self.name} did not give or take {what}: {_first_line(error)}"
            raise TierError(message, tier=self.name) from error

    def _put(self, path: str, data: bytes | Iterator[bytes], **options: object) -> None:
        if (files := self._files) is not None:
            files.check_way(path)
        _obstore().put(self._store, path, data, **options)

    def _get(self, path: str, most: int) -> bytes:
        """Return a small file, and a byte more than `most` if it is longer."""
        if (files := self._files) is not None:
            return files.read(path, 0, most + 1)
        return bytes(_obstore().get(self._store, path).bytes())

    def _part(self, path: str, start: int, length: int) -> bytes:
        if (files := self._files) is not None:
            return files.read(path, start, length)
        return bytes(_obstore().get_range(self._store, path, start=start, length=length))

    # objects

    def size_of(self, digest: str) -> int | None:
        """Return the size of an object; None: it is not there."""
        with suppress(MissingObjectError), self._asking(f"object {digest}"):
            if (files := self._files) is not None:
                return files.size(_object(digest))
            return int(_obstore().head(self._store, _object(digest))["size"])
        return None

    def sizes(self, digests: Iterable[str], progress: Progress = silent) -> dict[str, int]:
        """Return the sizes of those objects that are there."""
        wanted = list(dict.fromkeys(digests))
        found: dict[str, int] = {}
        with progress("Looking at the tier", len(wanted)) as job:
            for digest, size in in_parallel(lambda each: (each, self.size_of(each)), wanted):
                if size is not None:
                    found[digest] = size
                job.advance()
        return found

    def put_file(
        self,
        digest: str,
        path: str | Path,
        *,
        advance: Advance | None = None,
        is_missing: bool = False,
    ) -> bool:
        """Send a file; False: the object was there. `is_missing`: that was looked at before.

        It is hashed on the way: DamagedObjectError, and no object, if the file has other bytes.
        """
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not is_missing and self.size_of(digest) == size:
                return False
            made = blake3()

            def pieces() -> Iterator[bytes]:
                left = size
                while left > 0:
                    piece = file.read(min(PIECE, left))
                    left -= len(piece)
                    if not piece:
                        break
                    made.update(piece)
                    if left == 0:
                        self._refuse_wrong(made.hexdigest(), digest, f"{path}")
                    yield piece
                    if advance is not None:
                        advance(len(piece))
                if left > 0 or size == 0:
                    self._refuse_wrong(made.hexdigest(), digest, f"{path}")

            with self._asking(f"object {digest}"):
                if size <= PIECE:
                    data = b"".join(pieces())
                    self._put(_object(digest), data, use_multipart=False)
                else:
                    part = max(PIECE, -(-size // _MOST_PARTS))
                    self._put(
                        _object(digest), pieces(), use_multipart=True, chunk_size=part,
                        max_concurrency=_AHEAD,
                    )  # fmt: skip
        return True

    def put_bytes(self, data: bytes) -> str:
        """Send some bytes; return their digest."""
        digest = blake3(data).hexdigest()
        if self.size_of(digest) != len(data):
            with self._asking(f"object {digest}"):
                self._put(_object(digest), data, use_multipart=False)
        return digest

    def send(
        self,
        files: Mapping[str, tuple[Path, int]],
        progress: Progress = silent,
        *,
        are_missing: bool = False,
    ) -> Sent:
        """Send files, by digest and size, that are not there; the largest first.

        `are_missing`: that was looked at before.
        """
        sent = Sent()
        stopping = threading.Event()
        todo = sorted(files.items(), key=lambda each: -each[1][1])
        with progress("Pushing", sum(size for _, size in files.values()), "bytes") as job:
            advance = unless(stopping, job.advance)

            def one(each: tuple[str, tuple[Path, int]]) -> tuple[bool, int]:
                digest, (path, size) = each
                job.describe(path.name)
                is_new = self.put_file(digest, path, advance=advance, is_missing=are_missing)
                if not is_new:
                    job.advance(size)
                return is_new, size

            for is_new, size in in_parallel(one, todo, stopping=stopping):
                if is_new:
                    sent.objects += 1
                    sent.size += size
                else:
                    sent.skipped += 1
                    sent.skipped_size += size
        return sent

    def chunks(self, digest: str, *, size: int | None = None) -> Iterator[bytes]:
        """Go through the bytes of an object; who keeps them hashes them.

        Some pieces are on their way ahead of the one that is given. MissingObjectError; TierError
        if the connection is cut; DamagedObjectError if there are fewer or more bytes than `size`.
        """
        if size is not None and size <= PIECE:  # many of them are small: one request is enough
            yield from self._whole(digest, size)
            return
        found = self.size_of(digest)
        if found is None:
            raise MissingObjectError(f"The tier {self.name} has no object {digest}", tier=self.name)
        self._refuse_size(digest, found, size)
        if not self.abilities.ranges or found <= PIECE:
            yield from self._whole(digest, found)
            return
        waiting: deque[Future[bytes]] = deque()
        starts = iter(range(0, found, PIECE))
        with ThreadPoolExecutor(_AHEAD, "smartcache-tier") as pool:
            try:
                for start in starts:
                    waiting.append(pool.submit(self.read, digest, start, min(PIECE, found - start)))
                    if len(waiting) >= _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for each in waiting:
                    each.cancel()

    def _whole(self, digest: str, size: int) -> Iterator[bytes]:
        if (files := self._files) is not None:
            with self._asking(f"object {digest}"):
                self._refuse_size(digest, files.size(_object(digest)), size)
                for start in range(0, size, PIECE):
                    yield files.read(_object(digest), start, min(PIECE, size - start))
            return
        with self._asking(f"object {digest}"):
            answer = _obstore().get(self._store, _object(digest))
            self._refuse_size(digest, int(answer.meta["size"]), size)
            for piece in answer.stream(PIECE):
                yield bytes(piece)

    def _refuse_size(self, digest: str, found: int, size: int | None) -> None:
        if size is not None and found != size:
            message = f"The tier {self.name} has {found:,} bytes of object {digest}, not {size:,}"
            raise DamagedObjectError(message, tier=self.name, digest=digest)

    def read(self, digest: str, start: int, length: int) -> bytes:
        """Return a part of an object; only where the server sends parts."""
        if self._files is None and _is_forked():
            return _readers().read(self.described(), digest, start, length)
        with self._asking(f"object {digest}"):
            data = self._part(_object(digest), start, length)
        if len(data) != length:
            message = (
                f"The tier {self.name} gave {len(data):,} bytes of object {digest}, not {length:,}"
            )
            raise DamagedObjectError(message, tier=self.name, digest=digest)
        return data

    def _refuse_wrong(self, found: str, digest: str, what: str) -> None:
        if found != digest:
            message = f"{what} does not have the digest {digest}"
            hint = "It has changed, or is damaged: run 'smartcache verify'. Nothing was kept."
            raise DamagedObjectError(message, hint=hint, tier=self.name, digest=digest)

    # names of objects

    def find(self, algorithm: str, value: str) -> Found | None:
        """Return the object that has a hash; None: the tier knows of none."""
        if algorithm == "blake3":
            size = self.size_of(value)
            return None if size is None else Found(value, size)
        try:
            with self._asking(f"{algorithm} {value}"):
                raw = self._get(_name(algorithm, value), MOST_NAME)
            said = json.loads(raw)
            found = Found(str(said["digest"]), int(said["size"]))
        except MissingObjectError:
            return None
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return None  # who wrote it was cut off: it is as if it were not there
        return found if _DIGEST.fullmatch(found.digest) else None

    def add_names(self, found: Found, values: Mapping[Any, str]) -> None:
        """Say which other hashes an object has."""
        data = json.dumps({"digest": found.digest, "size": found.size}).encode()
        for algorithm, value in values.items():
            if algorithm != "blake3":
                with self._asking(f"{algorithm} {value}"):
                    self._put(_name(algorithm, value), data)

    # documents

    def document(self, kind: str, name: str) -> Document | None:
        """Return what is said of a repo, a set or a dataset; None: nothing is."""
        return self._document(kind, name)[0]

    def _document(self, kind: str, name: str) -> tuple[Document | None, int]:
        """Return the newest document and its number; 0: there is none."""
        for _ in range(_TRIES):
            number = max(self._numbers(kind, name), default=0)
            if not number:
                return None, 0
            path = _document(kind, name, number)
            # One that was replaced meanwhile is gone.
            with suppress(MissingObjectError), self._asking(f"{kind} {name}"):
                raw = self._get(path, _MOST_DOCUMENT)
                return self._decoded(raw, path, kind), number
        raise TierError(f"{name} changes all the time on the tier {self.name}", tier=self.name)

    def _decoded(self, raw: bytes, path: str, kind: str) -> Document:
        try:
            if len(raw) > _MOST_DOCUMENT:
                raise ValueError("too long")
            found = json.loads(raw)
            objects = found["objects"]
            if not all(
                _DIGEST.fullmatch(digest) and type(size) is int and size >= 0
                for digest, size in objects.items()
            ):
                raise ValueError("objects")
            if found["kind"] != kind or not isinstance(found["content"], dict):
                raise ValueError("kind")
            version = found["format"]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            message = f"{path} of the tier {self.name} is damaged"
            raise DamagedObjectError(message, tier=self.name) from error
        if version != FORMAT:
            message = f"{path} of the tier {self.name} has format {version!r}"
            raise TierError(message, hint="Update smartcache.", tier=self.name)
        return dict(found)

    def _numbers(self, kind: str, name: str) -> list[int]:
        prefix = _document(kind, name, 0).rpartition("/")[0]
        found = (_DOCUMENT.fullmatch(each.path) for each in self._listed(prefix))
        return [int(each[3]) for each in found if each is not None]

    def change(
        self,
        kind: str,
        name: str,
        change: Callable[[Document | None], tuple[Mapping[str, int], Document]],
    ) -> Document:
        """Write a document anew; one that stays as it is, is not written.

        `change` gets the content there is, and returns the objects and the content that shall be.
        It is called again, if another writer was faster.
        """
        exists = _obstore().exceptions.AlreadyExistsError
        for _ in range(_TRIES):
            before, number = self._document(kind, name)
            objects, content = change(None if before is None else before["content"])
            if before is not None and (before["objects"], before["content"]) == (objects, content):
                return before
            document: Document = {
                "format": FORMAT, "kind": kind, "name": name,
                "updated_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "objects": dict(sorted(objects.items())), "content": content,
            }  # fmt: skip
            data = json.dumps(document, separators=(",", ":")).encode()
            try:
                with self._asking(f"{kind} {name}"):
                    self._create(_document(kind, name, number + 1), data)
            except TierError as error:
                if not isinstance(error.__cause__, exists):
                    raise
                continue
            numbers = self._numbers(kind, name)
            if not self.abilities.creates and self._document(kind, name)[0] != document:
                continue  # the last writer wins: this makes it less likely to be another one
            if max(numbers, default=0) > number + 1:
                # Ours may be one that was replaced and removed before we made it again: then
                # nobody has read it. What was changed already stays as it is.
                continue
            with suppress(TierError):  # the one before stays for those who are reading it
                self._delete([_document(kind, name, each) for each in numbers if each < number])
            return document
        raise TierError(f"{name} changes all the time on the tier {self.name}", tier=self.name)

    def _create(self, path: str, data: bytes) -> None:
        self._put(path, data, mode="create" if self.abilities.creates else "overwrite")

    def documents(self, kind: str | None = None) -> Iterator[tuple[str, str]]:
        """Go through kind and name of all documents.

        What is no folder at the place of one is a document that cannot be read. DamagedObjectError
        if that of a whole kind is none: nobody knows then what is needed.
        """
        prefix = "documents" if kind is None else f"documents/{kind}"
        seen: set[tuple[str, str]] = set()
        for each in self._listed(prefix):
            match = _DOCUMENT.fullmatch(each.path)
            if match is not None and match.group(1, 2) not in seen:
                seen.add((match[1], match[2]))
                yield match[1], match[2]
            elif not each.is_file and is_place_of_folder(each.path):
                _, *found = each.path.split("/")
                if len(found) == len(("kind", "name")):
                    yield found[0], found[1]
                else:
                    raise odd(self.folder or Path(), each.path, "folder")

    def remove_document(self, kind: str, name: str) -> None:
        """Remove a document; what only it needed goes with the next `gc`."""
        self._delete([_document(kind, name, each) for each in self._numbers(kind, name)])

    # all of it

    def listed(self) -> Iterator[Listed]:
        """Go through all that is there beside the mark; of a bucket, what is where we write."""
        for prefix in ("",) if self.folder is not None else ("objects", "names", "documents"):
            yield from (each for each in self._listed(prefix) if each.path != _MARK)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove objects and names, as `listed` lists them."""
        self._delete(list(paths))

    def _listed(self, prefix: str) -> Iterator[Listed]:
        with self._asking(f"list of {prefix}"):
            if (files := self._files) is not None:
                yield from files.listed(prefix)
                return
            for some in _obstore().list(self._store, prefix=prefix, chunk_size=1000):
                for each in some:
                    yield Listed(each["path"], int(each["size"]), each["last_modified"])

    def _delete(self, paths: list[str]) -> None:
        if not paths:
            return
        with self._asking(paths[0]), suppress(FileNotFoundError):
            if (files := self._files) is not None:
                for each in paths:
                    files.remove(each)
            else:
                _obstore().delete(self._store, paths)

    # beginning

    def begin(self) -> Tier:
        """Mark the place as ours, and find out what its server does; returns the tier that knows.

        A folder is made if it is not there. TierError if something else is there, or if the place
        has another format.
        """
        obstore = _obstore()
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                message = f"{self.folder} cannot be made: {error.strerror}"
                raise TierError(message, tier=self.name, path=self.folder) from error
        if not self.check(must_exist=False) and (files := self._files) is not None:
            self._refuse_full(files)
        probe = f"probe-{secrets.token_hex(8)}"
        creates = ranges = False
        with self._asking("a new object"):
            self._put(probe, b"0123456789", mode="overwrite")
        try:
            with suppress(TierError), self._asking("a range"):
                ranges = self._part(probe, 3, 4) == b"3456"
            try:
                with self._asking("what is there"):
                    self._put(probe, b"0123456789", mode="create")
            except TierError as error:
                creates = isinstance(error.__cause__, obstore.exceptions.AlreadyExistsError)
        finally:
            self._delete([probe])
        made = Tier(
            self.name, self.url, self.options, Abilities(creates=creates, ranges=ranges),
            self._opened,
        )  # fmt: skip
        with self._asking(_MARK):
            self._put(_MARK, _MARKED.encode())
        return made

    def _refuse_full(self, files: Files) -> None:
        """Raise TierError if other things are in a folder that is not marked."""
        with self._asking(f"list of {files.root}"), os.scandir(files.root) as entries:
            found = next((each.name for each in entries if not _BEGUN.fullmatch(each.name)), None)
        if found is not None:
            hint = f"Give an empty or new folder, such as {files.root / 'smartcache'}."
            message = f"{files.root} is neither empty nor a smartcache remote: it has {found!r}"
            raise TierError(message, hint=hint, tier=self.name, path=files.root)

    def for_reading(self) -> Tier:
        """Return the tier for somebody who may not write there; TierError if it is none."""
        self.check()
        ranges = False
        with suppress(TierError), self._asking("a range"):
            ranges = self._part(_MARK, 1, 4) == self._get(_MARK, MOST_NAME)[1:5]
        abilities = Abilities(creates=False, ranges=ranges)
        return Tier(self.name, self.url, self.options, abilities, self._opened)

    def check(self, *, must_exist: bool = True) -> bool:
        """Return whether it is marked; TierError if this is not a tier that can be used."""
        try:
            with self._asking(_MARK):
                raw = self._get(_MARK, MOST_NAME)
        except MissingObjectError as error:
            if not must_exist:
                return False
            hint = (
                f"Mount its drive. New: 'smartcache remote add {self.name or 'NAME'} {self.url}'."
                f" If only its {_MARK} was lost, write it again: {_MARKED}"
            )
            message = f"{self.url} is not the place of a tier"
            raise TierError(message, hint=hint, tier=self.name) from error
        try:
            version = json.loads(raw)["format"]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            message = f"{_MARK} of {self.url} is damaged"
            hint = f"If that is a remote of smartcache, write the file again: {_MARKED}"
            raise DamagedObjectError(message, hint=hint, tier=self.name) from error
        if version != FORMAT:
            message = f"The tier {self.name} has format {version!r}; this smartcache reads {FORMAT}"
            raise TierError(message, hint="Update smartcache.", tier=self.name)
        return True


_connections: dict[str, Tier] = {}


def connected(description: Mapping[str, Any]) -> Tier:
    """Return the tier that `Tier.described` told of; one for all of this process."""
    url, options = check_url(description["url"]), check_options(description["options"])
    known = json.dumps([url, options])
    if known not in _connections:
        abilities = Abilities(
            creates=bool(description["creates"]), ranges=bool(description["ranges"])
        )
        _connections[known] = Tier(str(description["name"]), url, options, abilities)
    return _connections[known]


def _obstore() -> Any:  # noqa: ANN401 - the package
    if _is_forked():
        hint = "Open sets before the fork, or start the process with the method 'spawn'."
        raise TierError("A forked process cannot ask a tier for anything but packs", hint=hint)
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        hint = install_hint("remote")
        raise ConfigError("Tiers need obstore, which is not installed", hint=hint) from error
    _Process.pid = os.getpid()
    return obstore


def _server_error() -> type[Exception]:
    """Return the base of what obstore raises."""
    module = sys.modules.get("obstore.exceptions")
    found: type[Exception] = OSError if module is None else module.BaseError
    return found


class _Process:
    """What is particular to this process."""

    pid = 0
    """That in which obstore was first used: it does not work in children that are forked later."""
    readers: Readers | None = None


def _is_forked() -> bool:
    return _Process.pid not in (0, os.getpid())


def _readers() -> Readers:
    if _Process.readers is None or not _Process.readers.is_of_this_process():
        _Process.readers = Readers()
    return _Process.readers


def _first_line(error: BaseException) -> str:
    """Return what an error says, without the tables that obstore adds."""
    return str(error).strip().partition("\n")[0]


def _object(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise DamagedObjectError(f"{digest[:80]!r} is not a digest")
    return f"objects/{digest[:2]}/{digest}"


def _name(algorithm: str, value: str) -> str:
    return f"names/{algorithm}/{value[:2]}/{value}"


def _document(kind: str, name: str, number: int) -> str:
    if kind not in KINDS or not _NAME.fullmatch(name):
        raise ConfigError(f"{kind}/{name!r} cannot be the name of a document")
    return f"documents/{kind}/{name}/{number:08}.json"


def kind_of(listed: Listed) -> Literal["object", "name", "document", "leftover"] | None:
    """Return what is listed by the shape of its path; None: it is not the tier's."""
    if not listed.is_file:
        return None
    number = _NUMBERED.fullmatch(listed.path)
    path = listed.path if number is None else number[1]
    kinds: dict[Literal["object", "name", "document"], re.Pattern[str]] = {
        "object": _OBJECT, "name": _OBJECT_NAME, "document": _DOCUMENT
    }  # fmt: skip
    found = next((kind for kind, shape in kinds.items() if shape.fullmatch(path)), None)
    return found if found is None or number is None else "leftover"


def in_parallel(
    act: Callable[[T], R],
    items: Iterable[T],
    threads: int = THREADS,
    *,
    stopping: threading.Event | None = None,
) -> Iterator[R]:
    """Do something for each of many, some at once; the first error ends it, and is raised.

    Results come as they are there. No more is begun than is being done. `stopping` is set when
    nothing more is wanted, be it after Ctrl-C: what takes long looks at it, by `unless`.
    """
    pool = ThreadPoolExecutor(threads, "smartcache-tier")
    waiting: set[Future[R]] = set()
    todo = iter(items)
    try:
        is_more = True
        while is_more or waiting:
            while is_more and len(waiting) < threads:
                try:
                    waiting.add(pool.submit(act, next(todo)))
                except StopIteration:
                    is_more = False
            if waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in done:
                    yield each.result()
    finally:
        if stopping is not None:
            stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)


def unless(stopping: threading.Event, advance: Advance) -> Advance:
    """Return what tells of bytes that have moved, and ends what moves them when it is to stop."""

    def moved(size: int) -> None:
        if stopping.is_set():
            raise InterruptedError("it was stopped")
        advance(size)

    return moved
