"""Immutable blobs on disk, named by the digest of their bytes: written, believed, proven, copied.

A blob is written without a name, hashed while written, made read-only and then linked to its name.
So what gets a name under `blobs/` is complete and verified: there is no state between absent and
whole.

Whether it still is, is asked by `checked` and `open_blob`, which stand between the store and
everybody who wants bytes: what is not believed (`hashes.believed`) is hashed before it is used. A
wrong one goes to `bad/`, by inode, so that a good file that took its name meanwhile is never the
one that goes; so does what is not a regular file. Copies are hashed while they are made: wrong
bytes are never handed on.

Our own links and unlinks move the change time of an inode. Who makes them does so in `relinking`,
under the lock: what was believed right before is believed right after.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, Self

from smartcache import errors
from smartcache.progress import Progress, silent
from smartcache.store.catalog import RACY, FileRow, Known
from smartcache.store.hashes import Read, believed, boot_for, recall, with_digest
from smartcache.store.home import Home
from smartcache.store.layout import Pool, Work, explained, listed
from smartcache.store.records import LINKED_SUFFIXES, Blob
from smartcache.store.userfile import is_same, look
from smartcache.system import kernel
from smartcache.system.faults import reached
from smartcache.system.filesystems import nearest_existing
from smartcache.system.hashing import Advance, Algorithm, Hasher, Hashes, check_hex, hash_file
from smartcache.system.kernel import StatKey
from smartcache.system.ownfiles import create_own, open_own

CHUNK = 1 << 20
READ_ONLY = 0o444
_TOUCH_SECONDS = 3600
_PATIENCE = 1.0
"""Seconds to wait until a damaged blob can be moved away: nobody is given it meanwhile."""
_log = logging.getLogger(__name__)

Expected = Mapping[Algorithm, str]


# written


def put_stream(
    home: Home,
    pool: Pool,
    chunks: Iterable[bytes | bytearray | memoryview],
    *,
    size: int | None = None,
    expected: Expected | None = None,
    algorithms: Iterable[Algorithm] = (),
    advance: Advance | None = None,
    durable: bool = True,
) -> str:
    """Write a stream into a pool; return its digest. Nothing becomes a blob unless it checks.

    One that is not `durable` is hashed again before it is used after the next start of the machine:
    for bytes that can be had again.
    """
    announced = checked_hex(expected)
    wanted = with_digest((*announced, *algorithms))

    def fill(fd: int) -> Hashes:
        return _write(fd, chunks, size, wanted, advance)

    return _put(home, pool, fill, announced, durable=durable)


def _put(
    home: Home, pool: Pool, fill: Callable[[int], Hashes], announced: Expected, *,
    like: os.stat_result | None = None, durable: bool = True,
) -> str:  # fmt: skip
    """Let a new file be filled and hashed, and make it a blob; whatever goes wrong, it is gone.

    Of the file it is a copy of, it has the time, and of the mode the right to read. Full disks and
    denials are explained.
    """
    home.ready()
    with explained(pool.root), ExitStack() as stack:
        path = ""
        fd = kernel.open_unnamed(pool.tmp)
        if fd is None:
            work = Work(pool)
            stack.callback(work.close)
            path = work / "new"
            fd = create_own(path, os.O_RDWR)
        stack.callback(os.close, fd)

        def give_name(target: str) -> None:
            if path:
                os.link(path, target)
                os.unlink(path)
            else:
                kernel.link_fd(fd, Path(target))

        reached("put: made")
        hashes = fill(fd)
        check_expected(hashes, announced, what="The file" if like else "The stream")
        os.fchmod(fd, READ_ONLY if like is None else like.st_mode & READ_ONLY | stat.S_IRUSR)
        # A write within one clock tick of the recorded time would leave the stat key unchanged: so
        # it is set into the past.
        latest = time.time_ns() - 2 * kernel.RACY_NS
        stamp = latest if like is None else min(like.st_mtime_ns, latest)
        os.utime(fd, ns=(stamp, stamp))
        if durable:
            os.fsync(fd)
        reached("put: synced")
        return _commit(home, pool, hashes, give_name, durable=durable)


def _write(
    fd: int, chunks: Iterable[bytes | bytearray | memoryview], size: int | None,
    algorithms: tuple[Algorithm, ...], advance: Advance | None,
) -> Hashes:  # fmt: skip
    """Write and hash a stream; SizeMismatchError if it is not as long as announced."""
    if size:
        kernel.preallocate(fd, size)
    hasher = Hasher(algorithms, size=size)
    written = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        hasher.update(view)
        written += len(view)
        if size is not None and written > size:
            message = f"{size} bytes were announced, but more than {size} arrived"
            raise errors.SizeMismatchError(message, expected=size, found=written)
        write_all(fd, view)
        if advance is not None:
            advance(len(view))
    reached("put: written")
    hashes = hasher.finish()
    if hasher.needs_file:
        late, _ = hash_file(fd, hasher.needs_file)
        hashes = Hashes(size=hashes.size, values={**hashes.values, **late.values})
    return hashes


def write_all(fd: int, view: memoryview | bytes) -> None:
    """Write all of some bytes: one write may take fewer."""
    view = memoryview(view)
    while view:
        view = view[os.write(fd, view) :]


def checked_hex(expected: Expected | None) -> dict[Algorithm, str]:
    """Return announced hashes in lower case; BadDigestError if one cannot be any."""
    return {name: check_hex(name, value) for name, value in (expected or {}).items()}


def check_expected(hashes: Hashes, expected: Expected, *, what: str) -> None:
    """Raise unless every announced hash is the one that was computed."""
    for name, value in expected.items():
        found = hashes.values[name]
        if found != value:
            message = f"{what} has {name} {found}, but {value} was announced"
            raise errors.DigestMismatchError(message, algorithm=name, expected=value, found=found)


def _commit(
    home: Home, pool: Pool, hashes: Hashes, give_name: Callable[[str], None], *, durable: bool
) -> str:
    """Give finished, read-only bytes their name under `blobs/`; the first to come wins."""
    digest, target, is_new = hashes.digest, pool.blob(hashes.digest), False
    while not is_new:
        try:
            give_name(target)
            is_new = True
        except FileNotFoundError:
            pool.make_folder_of(digest)
        except FileExistsError:
            try:
                _keep(home, pool, digest, durable=durable)
                break
            except errors.BlobNotFoundError:
                continue
            except errors.DamagedBlobError:
                if os.path.lexists(target):
                    raise
    reached("put: linked")
    renew_pins(pool, digest)
    kernel.sync_directory(Path(os.path.dirname(target)))
    reached("put: directory synced")
    # A memory: without it the blob is hashed again.
    with suppress(errors.StoreError, FileNotFoundError):
        boot = "" if durable else home.boot
        rows = [FileRow.of(pool.filesystem, os.lstat(target), digest, boot, [target])]
        home.catalog.remember(rows if is_new else [], [hashes])
        home.catalog.touch([digest])
    reached("put: remembered")
    return digest


def _keep(home: Home, pool: Pool, digest: str, *, durable: bool) -> None:
    """See that a blob is what it should be and, if the same bytes are put now, as `durable`."""
    file, st = _opened(home, pool, digest, None)
    with file:
        known = _known(home, pool, st)
        if durable and (known is None or known.boot):  # it was adopted, or could be had again
            kernel.sync_data(file.fileno())
            kernel.sync_directory(Path(os.path.dirname(pool.blob(digest))))
            if believed(known, st, home.boot) == digest:
                with suppress(errors.StoreError):
                    home.catalog.remember([FileRow.of(pool.filesystem, st, digest)])


def put_file(
    home: Home,
    path: str | Path,
    *,
    expected: Expected | None = None,
    algorithms: Iterable[Algorithm] = (),
    pool: Pool | None = None,
    progress: Progress = silent,
) -> Blob:
    """Copy a file into the store (by reflink where that works); the file itself is not touched."""
    path, announced = Path(os.path.abspath(path)), checked_hex(expected)
    wanted = with_digest((*announced, *algorithms))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        st = os.fstat(descriptor)
        if not stat.S_ISREG(st.st_mode) or not st.st_size:
            reason = "empty" if stat.S_ISREG(st.st_mode) else "not a regular file"
            raise errors.FileSkippedError(f"{path}: {reason}", reason=reason, path=path)
        target = pool or home.pool_on(st.st_dev) or home.layout
        values = recall(home, [(path, st)])[path]
        if all(name in values for name in wanted):
            known = Hashes(size=st.st_size, values=values)
            check_expected(known, announced, what=str(path))
            with suppress(errors.BlobNotFoundError, errors.DamagedBlobError):
                _keep(home, target, known.digest, durable=True)
                return get(home, known.digest, pool=target)
        with progress(path.name, st.st_size, "bytes") as job:

            def fill(fd: int) -> Hashes:
                if st.st_dev == target.device and kernel.clone(descriptor, fd):
                    return hash_file(fd, wanted, threads=home.settings.threads)[0]
                return _write(fd, read_chunks(descriptor), st.st_size, wanted, job.advance)

            digest = _put(home, target, fill, announced, like=st)
        now = os.fstat(descriptor)
        # A blob's own inode may have got its mode back from us, and lost a name that a pin had.
        is_ours = is_same(now, target.stat(digest)) or now.st_nlink != st.st_nlink
        is_as_read = kernel.StatKey.of(now) == kernel.StatKey.of(st)
        if not (is_as_read or (is_ours and _has_same_bytes(now, st))):
            message = f"{path} changed while it was copied; the store has what was read"
            raise errors.FileChangedError(message, path=path)
    finally:
        os.close(descriptor)
    # People know their files by name.
    with suppress(errors.StoreError):
        boot = boot_for(now, time.time_ns())
        home.catalog.remember([FileRow.of(home.filesystem(path, now), now, digest, boot, [path])])
    return get(home, digest, pool=target)


def read_chunks(descriptor: int) -> Iterator[memoryview]:
    """Read a file from its beginning through one reused buffer; the position does not move."""
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        yield view[:count]
        offset += count


def copy_hashed(
    source: int,
    target: int,
    advance: Advance | None = None,
    *,
    algorithm: Literal["blake3", "sha256"] = "blake3",
) -> str:
    """Copy a file to another descriptor; return the digest, or sha256, of what was copied."""
    hasher = Hasher((algorithm,))
    for view in read_chunks(source):
        hasher.update(view)
        write_all(target, view)
        reached("copying")
        if advance is not None:
            advance(len(view))
    return hasher.finish().values[algorithm]


# remembered


@contextmanager
def relinking(
    home: Home, pool: Pool, digests: Collection[str], names: Collection[Path] = ()
) -> Iterator[None]:
    """Make or remove links of blobs in this block: what was believed of them stays believed.

    `names` are those that the one blob gets.
    """
    before = {digest: st for digest in digests if (st := pool.stat(digest)) is not None}
    known = home.catalog.known(pool.filesystem, [st.st_ino for st in before.values()])
    yield
    rows = []
    for digest, seen in before.items():
        row, st = known.get(seen.st_ino), pool.stat(digest)
        is_trusted = row is not None and believed(row, seen, home.boot) == digest
        if st is None or not (is_trusted or names) or not _has_same_bytes(st, seen):
            continue
        boot = row.boot if row is not None and is_trusted else RACY
        rows.append(FileRow.of(pool.filesystem, st, digest, boot, names))
    if rows:
        with suppress(errors.StoreError):
            home.catalog.remember(rows)


def pins_of(home: Home, digest: str) -> tuple[str, ...]:
    """Return the names of the pins of a blob."""
    places = ((pool.pins, name) for pool in home.pools() for name in listed(pool.pins))
    return tuple(sorted({name for pins, name in places if os.path.lexists(pins / name / digest)}))


def renew_pins(pool: Pool, digest: str) -> None:
    """Let the pins of a blob that was damaged or lost keep the one that came in its place."""
    for name in listed(pool.pins):
        place, new = pool.pins / name / digest, pool.tmp / f"pin-{name}-{digest}"
        if (st := look(place)) is not None and not is_same(st, pool.stat(digest)):
            with suppress(FileNotFoundError, FileExistsError):  # swept, or another's
                os.link(pool.blob(digest), new)
                os.replace(new, place)


def blob_of(
    pool: Pool,
    digest: str,
    st: os.stat_result,
    pins: tuple[str, ...] = (),
    uses: tuple[int, int] | None = None,
) -> Blob:
    """Return a blob as it is now; `uses`: when it was added and used."""
    added, used = uses or (st.st_ctime_ns // 10**9,) * 2
    return Blob(
        digest=digest, size=st.st_size, allocated=kernel.allocated_bytes(st), links=st.st_nlink,
        inode=st.st_ino, mtime_ns=st.st_mtime_ns, path=Path(pool.blob(digest)), pool=pool.root,
        pins=pins, added=added, used=used,
    )  # fmt: skip


def is_there(home: Home, digest: str) -> bool:
    """Say whether any pool has a blob."""
    return any(pool.stat(digest) is not None for pool in home.pools())


def pools_with(home: Home, digest: str, *, near: Path | None = None) -> list[Pool]:
    """Return the pools that have a blob, the one nearest to a path first; at least one."""
    pools = [pool for pool in home.pools() if pool.stat(digest) is not None]
    if not pools:
        raise absent(home.layout, digest)
    if near is not None and len(pools) > 1:
        device = os.stat(nearest_existing(near)).st_dev
        pools.sort(key=lambda pool: pool.device != device)
    return pools


def get(home: Home, digest: str, *, pool: Pool | None = None) -> Blob:
    """Return a blob by its digest, from any pool or the one given."""
    digest = check_hex("blake3", digest)
    pool = pool or pools_with(home, digest)[0]
    st = pool.stat(digest)
    if st is None:
        raise absent(pool, digest)
    uses = home.catalog.uses([digest]).get(digest)
    return blob_of(pool, digest, st, pins_of(home, digest), uses)


def linked_blob(home: Home, st: os.stat_result) -> tuple[Pool, str] | None:
    """Return pool and digest of the blob that a file is a hard link of, proven or not."""
    pool = home.pool_on(st.st_dev) if st.st_nlink > 1 else None
    if pool is None:
        return None
    known = _known(home, pool, st)
    return (pool, known.digest) if known and is_same(pool.stat(known.digest), st) else None


# believed, or proven


def checked(home: Home, pool: Pool, digest: str) -> os.stat_result:
    """Return the stat of a blob whose bytes may be used now: believed, or just hashed."""
    st = pool.stat(digest)
    if st is None:
        raise absent(pool, digest)
    return st if is_believed(home, pool, digest, st) else prove(home, pool, digest)


def absent(pool: Pool, digest: str) -> errors.BlobNotFoundError:
    """Return the error for a blob that a pool does not have."""
    return errors.BlobNotFoundError(f"No blob {digest} in {pool.root}", digest=digest)


def open_blob(home: Home, pool: Pool, digest: str) -> BinaryIO:
    """Open a blob for reading; the very file that is handed out was found to be what it should."""
    return _opened(home, pool, digest, None)[0]


def prove(
    home: Home,
    pool: Pool,
    digest: str,
    *,
    read: Read | None = None,
    advance: Advance | None = None,
) -> os.stat_result:
    """Hash a blob again: it is remembered, or it goes to `bad/` and DamagedBlobError comes.

    One that this run has `read` as it is now is not hashed again.
    """
    file, st = _opened(home, pool, digest, Read() if read is None else read, advance)
    file.close()
    return st


def _opened(
    home: Home, pool: Pool, digest: str, read: Read | None, advance: Advance | None = None
) -> tuple[BinaryIO, os.stat_result]:
    """Return an open blob and its stat, hashed unless this run has `read` it.

    None: or unless it is believed.
    """
    while True:
        try:
            file = os.fdopen(open_own(pool.blob(digest)), "rb")
        except FileNotFoundError as error:
            raise absent(pool, digest) from error
        except errors.UnsafeFileError:
            there = pool.stat(digest)
            is_ours = there is not None and there.st_uid == kernel.effective_user()
            if there is not None and not (is_ours and stat.S_ISREG(there.st_mode)):
                _set_aside(home, pool, digest, there)
            continue
        with ExitStack() as stack:
            stack.enter_context(file)
            st = os.fstat(file.fileno())
            if read is None:
                is_known = is_believed(home, pool, digest, st)
            else:
                is_known = read.digest_of(pool.filesystem, st.st_ino, StatKey.of(st)) == digest
            proven = st if is_known else _proven(home, pool, digest, file, advance)
            if proven is not None:
                if read is not None:
                    read.add(pool.filesystem, proven.st_ino, StatKey.of(proven), digest)
                stack.pop_all()
                return file, proven


def _known(home: Home, pool: Pool, st: os.stat_result) -> Known | None:
    return home.catalog.known(pool.filesystem, [st.st_ino]).get(st.st_ino)


def is_believed(home: Home, pool: Pool, digest: str, st: os.stat_result) -> bool:
    """Say whether a blob needs not be hashed before it is used."""
    if believed(_known(home, pool, st), st, home.boot) != digest:
        return False
    uses = home.catalog.uses([digest]).get(digest)
    if uses is None or time.time() - uses[1] > _TOUCH_SECONDS:
        with home.in_passing():  # whoever reads need not be able to write
            home.catalog.touch([digest])
    return True


def _proven(
    home: Home, pool: Pool, digest: str, file: BinaryIO, advance: Advance | None
) -> os.stat_result | None:
    """Hash an open blob, remember it and return its stat; None: it has to be looked at once more.

    Another file may be at its name now, or what moved the change time since was a write behind the
    hash, with the time set back: only a link or an unlink explains it.
    """
    fd = file.fileno()
    seen = os.fstat(fd)
    lease = kernel.take_lease(fd)
    try:
        found = hash_file(fd, threads=home.settings.threads, advance=advance)[0].digest
    except errors.FileChangedError:  # perhaps links were made or removed, which does not matter
        hasher = Hasher(("blake3",))
        for chunk in read_chunks(fd):
            hasher.update(chunk)
        found = hasher.finish().digest
    st = os.fstat(fd)
    if not _has_same_bytes(st, seen):
        path = pool.blob(digest)
        raise errors.FileChangedError(f"Blob {path} is being written to", path=path)
    if found != digest:
        _set_aside(home, pool, digest, seen)
        return None
    is_explained = st.st_ctime_ns == seen.st_ctime_ns or st.st_nlink != seen.st_nlink
    if not (is_explained and is_same(pool.stat(digest), st)):
        return None
    if st.st_mode & 0o222:
        os.fchmod(fd, st.st_mode & 0o7555)
        st = os.fstat(fd)
    key, now, known = StatKey.of(st), time.time_ns(), _known(home, pool, st)
    if believed(known, st, home.boot) != digest:  # else it was right to be
        was_synced = known is not None and known.boot == "" and known.key[:2] == key[:2]
        boot = RACY if lease == "busy" else boot_for(seen, now, is_durable=was_synced)
        with home.in_passing():
            row = FileRow.of(pool.filesystem, st, digest, boot, [pool.blob(digest)])
            home.catalog.remember([row])
    if lease == "held":
        kernel.drop_lease(fd)
    file.seek(0)
    return st


def _has_same_bytes(one: os.stat_result, other: os.stat_result) -> bool:
    """Say whether two looks at an inode differ in nothing but change time and links."""
    first, second = ((st.st_ino, st.st_size, st.st_mtime_ns) for st in (one, other))
    return first == second


def _set_aside(home: Home, pool: Pool, digest: str, seen: os.stat_result) -> None:
    """Move a damaged blob to `bad/` and raise DamagedBlobError; files that share it are left alone.

    Nothing is done if the name stands for another file than the one that was `seen`.
    """
    target = pool.new_bad(digest)
    try:
        with home.locked("move a damaged blob away", patience=_PATIENCE):
            now = pool.stat(digest)
            if now is None or not _has_same_bytes(seen, now):
                return
            os.rename(pool.blob(digest), target)
    except errors.LockTimeoutError as error:
        message = f"Blob {digest} is damaged and could not be moved away: {error}"
        raise errors.DamagedBlobError(message, digest=digest) from error
    with home.in_passing():
        home.catalog.forget_names([pool.blob(digest)])
    _log.warning("blob %s is damaged; moved to %s", digest, target)
    message = f"Blob {digest} is damaged; it was moved to {pool.bad}"
    raise errors.DamagedBlobError(message, digest=digest)


def look_for_damage(home: Home, folder: Path) -> list[Path]:
    """Return the weight files in a folder, or one below, that were written to through a link.

    Their blobs are set aside. The mode of a blob keeps ordinary users from writing, root ignores
    it. A file is looked at itself.
    """
    paths = [folder] if folder.is_file() else [
        path for path in (*folder.glob("*"), *folder.glob("*/*"))
        if path.suffix.lower() in LINKED_SUFFIXES
    ]  # fmt: skip
    written = []
    for path in paths:
        try:
            st = os.stat(path)
            if (blob := linked_blob(home, st)) is not None:
                checked(home, *blob)
            if not _is_set_aside(home, st):
                continue
        except (errors.DamagedBlobError, errors.BlobNotFoundError, errors.FileChangedError):
            pass
        except FileNotFoundError:
            continue
        written.append(path)
        _log.warning("%s was written to through a link; its blob was set aside", path)
    return written


def _is_set_aside(home: Home, st: os.stat_result) -> bool:
    """Say whether a file is a name of an inode in `bad/`: of a blob that was damaged before."""
    return any(
        is_same(look(pool.bad / name), st) for pool in home.pools() for name in listed(pool.bad)
    )


# held


class Holding:
    """Blobs that prune leaves alone in a block, because a link of ours holds each."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._works: dict[Path, tuple[Pool, Work]] = {}

    def hold(self, digest: str, pool: Pool) -> None:
        """Hold a blob; BlobNotFoundError if it is not there."""
        if pool.root not in self._works:
            self._works[pool.root] = pool, Work(pool)
        held = self._works[pool.root][1] / digest
        with relinking(self._home, pool, [digest]):
            hold(pool, digest, held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for pool, work in self._works.values():
            with self._home.locked("let go"), relinking(self._home, pool, work.names()):
                work.close()


def hold(pool: Pool, digest: str, held: str) -> None:
    """Make a link of a blob; what prune was just removing gets its name back from it."""
    try:
        os.link(pool.blob(digest), held)
    except FileExistsError:
        return
    except FileNotFoundError as error:
        raise absent(pool, digest) from error
    with suppress(FileExistsError):
        if pool.stat(digest) is None:
            os.link(held, pool.blob(digest))
