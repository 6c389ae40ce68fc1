"""Every change to a user's file is one operation: its row, then its names, then the row again.

`become`: the file's own inode becomes the blob. `exchange`: the file is swapped with a link of the
blob. (`create`, `give` and `copy` put something at a free path: `place`.) Files are opened, leased
and hashed outside the lock, in chunks; rows, a last look, names and pauses are inside it. Bytes
that are let go of were hashed in this run, and the ones that stay too.

The name exists at every moment and always shows the same bytes. The order of steps closes the
windows in which a write could be lost: a read lease proves that nobody writes; the row comes first;
names are exchanged, not removed; the old file is kept under a temporary name until, at the end of
the chunk, a second lease proves that no writer slipped in. A writer who did gets the file back,
with everything that was written. Before the first old file goes, the bytes that stay are on the
disk.

A row that is `begun` or `undoing` when somebody gets the lock was left by a dead process. `finish`
looks what is so, and writes that down.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from smartcache import errors
from smartcache.progress import Progress, silent
from smartcache.store import hashes as _hashes
from smartcache.store.blobs import (
    Expected,
    check_expected,
    checked,
    copy_hashed,
    hold,
    prove,
    renew_pins,
)
from smartcache.store.catalog import RACY, FileRow
from smartcache.store.hashes import Read, boot_for
from smartcache.store.home import Home
from smartcache.store.journal import Batch, Change, State
from smartcache.store.layout import Pool, Work, explained
from smartcache.store.userfile import (
    TICK_NS,
    Allowance,
    Folders,
    Spot,
    UserFile,
    as_skipped,
    beside,
    is_same,
    look,
    prove_all,
    read_attributes,
    refuse_visible_change,
    write_attributes,
)
from smartcache.system import kernel
from smartcache.system.faults import reached
from smartcache.system.filesystems import Mounts
from smartcache.system.hashing import Algorithm, Hashes, check_hex, hash_file
from smartcache.system.locks import try_lock

CHUNK_FILES = 256
CHUNK_BYTES = 4 << 30
PAUSE = 0.01
"""A writer may wait for the scheduler between looking a name up and opening it."""
PATIENCE = 2.0
"""Seconds that a writer who came too late may take until its bytes are copied as they are then."""
_MANY = 8
"""So many files are synced one by one; for more the whole filesystem is, once."""
_TRIES = 3
_PERHAPS_NEVER = {("begun", "create"), ("begun", "give")}
"""Where nothing is now, perhaps nothing ever was."""
_OF_THE_STORE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_OF_ONE_FILE = errors.FileSkippedError, errors.DigestMismatchError, errors.DamagedBlobError
_log = logging.getLogger(__name__)

Outcome = Literal["became", "linked", "present", "duplicate", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """What became of one file. `freed` is what the filesystem gave back.

    "became": its inode is the blob now. "linked": it is a link of the blob now. "present": it was
    one already. "duplicate": its bytes are a blob already, in another inode; it was not touched.
    """

    path: Path
    outcome: Outcome
    digest: str = ""
    size: int = 0
    freed: int = 0
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """A file about to become a blob or a link, and what has become of it."""

    file: UserFile
    pool: Pool
    digest: str
    change: Change
    state: State | Literal["", "look"] = ""
    outcome: Outcome | Literal["again"] = "again"
    error: Exception | None = None
    freed: int = 0


@dataclass(slots=True, kw_only=True)
class Linking:
    """One call of `link_many`."""

    home: Home
    batch: Batch
    digests: Mapping[Path, str] = field(default_factory=dict)
    expected: Expected = field(default_factory=dict)
    algorithms: tuple[Algorithm, ...] = ()
    replace: bool = False
    allow: frozenset[Allowance] = frozenset()
    follow: bool = True
    read: Read = field(default_factory=Read)
    progress: Progress = silent
    _proven: dict[tuple[Path, str], os.stat_result] = field(default_factory=dict)
    """Blobs that were there before, as they were when they were proven."""
    _synced: set[str] = field(default_factory=set)
    """Digests whose bytes are on the disk."""
    _synced_at: dict[Path, int] = field(default_factory=dict)
    """When the filesystem of a pool was synced as a whole."""
    _mounts: Mounts = field(default_factory=Mounts)
    _fatal: OSError | None = None

    def run(self, paths: Iterable[Path]) -> Iterator[Linked]:
        """Link files, a chunk at a time; what cannot be is returned with its reason."""
        remaining = iter(paths)
        waiting: list[Path] = []
        while waiting := waiting + list(islice(remaining, CHUNK_FILES - len(waiting))):
            again, waiting = waiting, []
            for _ in range(_TRIES):
                results, again, left = self._chunk(again)
                waiting += left
                yield from results
                if not again:
                    break
            for path in again:
                error = errors.FileChangedError(f"{path} changes all the time", path=path)
                yield Linked(path=path, outcome="skipped", error=error)

    # outside the lock: opened, leased, hashed

    def _chunk(self, paths: list[Path]) -> tuple[list[Linked], list[Path], list[Path]]:
        """Return what became of a chunk, what to try once more, and what was too much for it."""
        results: list[Linked] = []
        files: list[UserFile] = []
        folders, works, size, left = Folders(), dict[Path, Work](), 0, list[Path]()
        try:
            for number, path in enumerate(paths):
                if size >= CHUNK_BYTES:
                    left = paths[number:]
                    break
                found = self._open(path, folders)
                if isinstance(found, UserFile):
                    files.append(found)
                    size += found.st.st_size
                else:
                    results.append(found)
            files = self._without_known(files, results)
            wanted = tuple(dict.fromkeys((*self.expected, *self.algorithms)))
            learned = prove_all(self.home, files, wanted, read=self.read, progress=self.progress)
            jobs = [job for file in files if (job := self._job(file, results)) is not None]
            jobs = self._beside_blobs(jobs, works, results)
            if jobs:
                self._sync(jobs)
                self._change(jobs, works)
            known = {job.file for job in jobs if job.state == "done"}  # by `_remember`
            now = time.time_ns()
            new = [
                (f.path, f.st, f.hashes, boot_for(f.st, now, is_durable=f.is_durable))
                for f in learned
                if f not in known
            ]
            _hashes.remember(self.home, new)
            results += [_result(job) for job in jobs if job.outcome != "again"]
            return results, [job.file.path for job in jobs if job.outcome == "again"], left
        finally:
            for file in files:
                file.close()
            folders.close()
            for work in works.values():
                work.close()

    def _open(self, path: Path, folders: Folders) -> UserFile | Linked:
        """Open a file that can be linked, of a symlink the one behind it; else say why not."""
        try:
            st = os.lstat(path)
            if self.follow and stat.S_ISLNK(st.st_mode):
                path = Path(os.path.realpath(path))
                st = os.lstat(path)
            if self.home.pool_on(st.st_dev) is None:
                message = f"{path} is on another filesystem than the store {self.home.layout.root}"
                hint = "Copy it, or make a pool there: smartcache add --adopt --make-pool."
                raise errors.FileSkippedError(
                    message, hint=hint, reason="other filesystem", path=path
                )
            return UserFile(path, folders.spot(path, follow=self.follow))
        except FileNotFoundError as error:
            return Linked(path=path, outcome="skipped", error=error)
        except OSError as error:
            return self._skipped(path, error)

    def _skipped(self, path: Path, error: Exception, digest: str = "") -> Linked:
        """Return the result for one file; an error about the store as a whole is raised."""
        is_general = is_of_store(error)
        if isinstance(error, errors.StoreError):
            is_general = not isinstance(error, _OF_ONE_FILE)
        if is_general:
            with explained(self.home.layout.root):
                raise error
        error = as_skipped(path, error)
        return Linked(path=path, outcome="skipped", digest=digest, error=error)

    def _without_known(self, files: list[UserFile], results: list[Linked]) -> list[UserFile]:
        """Return the files that have to be read; of the others it is known that they can stay."""
        home, left = self.home, []
        asked = [file for file in files if not self.replace or file.st.st_nlink > 1]  # else no blob
        digests = _hashes.digests_of(home, [(file.path, file.st) for file in asked])
        known = dict(zip(asked, digests, strict=True))
        for file in files:
            digest = known.get(file, "")
            pool = home.pool_on(file.st.st_dev)
            blob = pool.stat(digest) if pool is not None and digest else None
            is_it = is_same(blob, file.st)
            if pool is None or blob is None or not (is_it or not self.replace):
                left.append(file)
                continue
            try:
                values = home.catalog.hashes_of([digest])[digest]
                if any(name not in values for name in (*self.expected, *self.algorithms)):
                    left.append(file)
                    continue
                file.hashes = Hashes(size=file.st.st_size, values=values)
                file.digest = digest
                self._check(file)
                checked(home, pool, digest)
            except (errors.BlobNotFoundError, errors.DamagedBlobError):
                left.append(file)
            except OSError as error:
                results.append(self._skipped(file.path, error, digest))
                file.close()
            else:
                outcome: Outcome = "present" if is_it else "duplicate"
                results.append(_plain(file, outcome))
                file.close()
        return left

    def _check(self, file: UserFile) -> None:
        """Raise unless a file has the hashes that it must have."""
        must = dict(self.expected)
        if (digest := self.digests.get(file.path)) is not None:
            must["blake3"] = digest
        check_expected(file.hashes, must, what=str(file.path))

    def _job(self, file: UserFile, results: list[Linked]) -> _Job | None:
        """Return what is to be done with a file whose bytes are known; None: nothing can be."""
        error, pool = file.error, self.home.pool_on(file.st.st_dev)
        if error is None:
            try:
                self._check(file)
            except errors.DigestMismatchError as mismatch:
                error = mismatch
        if error is None and not file.is_proven and self.replace:
            error = errors.FileChangedError(f"{file.path} was changed a moment ago", path=file.path)
        if error is not None or pool is None:
            results.append(self._skipped(file.path, error or OSError(errno.EXDEV, ""), file.digest))
            return None
        st, mode, ours = file.st, file.st.st_mode & 0o777, 0
        if st.st_nlink > 1:
            names = self.home.catalog.files(inode=(pool.filesystem, st.st_ino))
            blobs = (each.path for each in names if each.path.is_relative_to(pool.root))
            ours = sum(is_same(look(path), st) for path in blobs)
        if ours:  # a blob that was written to: the store's name and mode are not the user's
            mode |= stat.S_IWUSR
        change = Change(
            how="become", path=file.spot.path, digest=file.digest, size=st.st_size,
            temporary=beside(file.spot.name), mode=mode, gid=st.st_gid, mtime_ns=st.st_mtime_ns,
            xattrs=json.dumps(read_attributes(file.fd)), inode=st.st_ino,
            links=st.st_nlink - ours, folder=os.fstat(file.spot.fd).st_ino,
        )  # fmt: skip
        return _Job(file, pool, file.digest, change)

    def _beside_blobs(
        self, jobs: list[_Job], works: dict[Path, Work], results: list[Linked]
    ) -> list[_Job]:
        """Return the jobs that are left when it is known which blobs there are.

        A blob that files are going to be replaced by is proven in this run, and held by a link of
        ours, so that prune leaves it.
        """
        blobs: dict[tuple[Path, str], os.stat_result | None] = {}
        firsts: dict[tuple[Path, str], UserFile] = {}
        left = []
        for job in jobs:
            file, pool, key = job.file, job.pool, (job.pool.root, job.digest)
            try:
                if file.st.st_nlink > 1 and is_same(file.st, pool.stat(job.digest)):
                    results.append(self._present(job))
                    continue
                if key not in blobs:
                    blobs[key] = self._blob(job, works, results)
                other = blobs[key]
                if other is not None and not self.replace:
                    with suppress(errors.StoreError):
                        self.home.catalog.add_hashes([(job.digest, file.hashes.values)])
                    results.append(_plain(file, "duplicate"))
                    continue
                first = firsts.setdefault(key, file)
                than = other or first.st
                if (other or first is not file) and self.replace and not is_same(than, file.st):
                    refuse_visible_change(file.path, file.st, than, file.fd, self.allow)
            except (OSError, errors.BlobNotFoundError) as error:
                results.append(self._skipped(file.path, error, job.digest))
                continue
            left.append(job)
        return left

    def _blob(
        self, job: _Job, works: dict[Path, Work], results: list[Linked]
    ) -> os.stat_result | None:
        """Return the blob that a file has the bytes of, proven; None: there is none."""
        home, pool, digest = self.home, job.pool, job.digest
        try:
            if not self.replace:
                return checked(home, pool, digest)
            if pool.stat(digest) is None:
                return None
            if pool.root not in works:
                works[pool.root] = Work(pool)
            hold(pool, digest, works[pool.root] / digest)
            st = prove(home, pool, digest, read=self.read)
            row = home.catalog.known(pool.filesystem, [st.st_ino]).get(st.st_ino)
            if row is not None and not row.boot:
                self._synced.add(digest)
            self._proven[pool.root, digest] = st
            return st
        except (errors.BlobNotFoundError, errors.DamagedBlobError) as error:
            if pool.root in works:  # else `_choose` would give the damaged one its name back
                with suppress(FileNotFoundError):
                    os.unlink(works[pool.root] / digest)
            for number, each in enumerate(results):  # believed until now
                is_it = isinstance(error, errors.DamagedBlobError) and each.outcome == "present"
                if is_it and each.digest == digest and home.pool_of(each.path).root == pool.root:
                    results[number] = self._skipped(each.path, error, digest)
            return None

    def _present(self, job: _Job) -> Linked:
        """Remember one more name of a blob."""
        file, st = job.file, job.file.st
        boot = boot_for(st, time.time_ns(), is_durable=file.is_durable)
        with suppress(errors.StoreError):
            row = FileRow.of(job.pool.filesystem, st, job.digest, boot, [file.path])
            self.home.catalog.remember([row], [file.hashes])
        return _plain(file, "present")

    def _sync(self, jobs: list[_Job]) -> None:
        """Bring to the disk what other files of the chunk will be links of: it may take long."""
        same: dict[tuple[Path, str], list[_Job]] = {}
        for job in jobs if self.replace else ():
            same.setdefault((job.pool.root, job.digest), []).append(job)
        with ExitStack() as stack:
            opened: list[tuple[_Job, int]] = []
            for each in same.values():
                if (fd := self._unsynced(each[0], has_victims=len(each) > 1)) >= 0:
                    stack.callback(os.close, fd)
                    opened.append((each[0], fd))
            if len(opened) > _MANY:
                for root, fd in {job.pool.root: fd for job, fd in opened}.items():
                    self._synced_at[root] = time.time_ns()
                    kernel.sync_filesystem(fd)
            for job, fd in opened:
                if len(opened) <= _MANY:
                    kernel.sync_data(fd)
                job.file.is_durable = True
                self._synced.add(job.digest)

    def _unsynced(self, job: _Job, *, has_victims: bool) -> int:
        """Open what others become links of; -1: it is on the disk, or nobody becomes one."""
        file, blob = job.file, job.pool.stat(job.digest)
        if job.digest in self._synced or (blob is None and not has_victims):
            return -1
        if blob is not None:
            with suppress(FileNotFoundError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                return os.open(job.pool.blob(job.digest), flags)
            return -1
        # A mapping cannot write to a page that was synced without a new time of the file.
        since = self._synced_at.get(job.pool.root, 0) - TICK_NS
        if file.is_durable or max(file.st.st_mtime_ns, file.st.st_ctime_ns) < since:
            file.is_durable = True
            self._synced.add(job.digest)
            return -1
        return os.dup(file.fd)

    # inside the lock

    def _change(self, jobs: list[_Job], works: Mapping[Path, Work]) -> None:
        home = self.home
        try:
            with explained(home.layout.root), home.changing(self.batch.label):
                chosen = list(self._choose(jobs, works))
                if chosen:
                    home.journal.begin(self.batch, [job.change for job in chosen], self._mounts)
                    self._carry_out(chosen)
                    home.journal.note((_state(job), job.change.id) for job in chosen)
                    for work in works.values():  # now: it moves ctime once more
                        work.clear()
                    self._remember(chosen)
        except BaseException:
            for job in jobs:
                job.file.close()  # the lease too: recovery takes its own
            with suppress(errors.SmartcacheError, OSError):
                home.finish_open()
            self.batch.changes[:] = home.journal.done([self.batch.id])
            raise
        self.batch.changes += [job.change for job in chosen if job.state == "done"]
        self.batch.freed += sum(job.freed for job in chosen)
        if self._fatal is not None:
            with explained(home.layout.root):
                raise self._fatal

    def _choose(self, jobs: list[_Job], works: Mapping[Path, Work]) -> Iterator[_Job]:
        """Choose what each file is to be, by a last look before any name of the chunk moves."""
        becoming: dict[tuple[Path, str], _Job] = {}
        blobs: dict[tuple[Path, str], tuple[os.stat_result | None, os.stat_result | None]] = {}
        for job in jobs:
            pool, file, key = job.pool, job.file, (job.pool.root, job.digest)
            if key not in blobs:
                held = works[pool.root] / job.digest if pool.root in works else ""
                blob, keeping = pool.stat(job.digest), look(held) if held else None
                if blob is None and keeping is not None:  # prune looked right before we held it
                    pool.make_folder_of(job.digest)
                    os.link(held, pool.blob(job.digest))
                    blob = keeping
                blobs[key] = blob, keeping
            blob, keeping = blobs[key]
            now = os.fstat(file.fd)
            if kernel.StatKey.of(now) != kernel.StatKey.of(file.st) or not is_same(
                file.spot.stat(), now
            ):
                # Linked by another process of ours: once more. Written to: left alone.
                if not (_is_as_hashed(job, now) and is_same(file.spot.stat(), now)):
                    job.outcome = "skipped"
                    job.error = errors.FileChangedError(
                        f"{file.path} was written to", path=file.path
                    )
                continue
            if blob is not None and not is_same(blob, keeping):
                continue  # made by somebody else meanwhile: to be proven first
            if blob is None and key in becoming and not self.replace:
                is_one = is_same(now, becoming[key].file.st)
                job.outcome = "present" if is_one else "duplicate"
                continue
            if blob is not None or key in becoming:
                job.change.how = "exchange"
            else:
                becoming[key] = job
            yield job

    def _carry_out(self, jobs: list[_Job]) -> None:
        self._each(self._become, [job for job in jobs if job.change.how == "become"])
        victims = [job for job in jobs if job.change.how == "exchange"]
        # The bytes are on the disk (`_sync`). Of the new names one folder is enough: journaling
        # filesystems bring all that came before to the disk with it; and should a name under
        # blobs/ be lost, the inode still has the names of the user.
        for job in {job.pool.root: job for job in victims}.values():
            with suppress(FileNotFoundError):
                kernel.sync_directory(Path(job.pool.blob(job.digest)).parent)
        reached("survivors on the disk")
        self._each(self._exchange, victims)
        _pause(job for job in victims if not job.state)
        self._each(self._let_go, [job for job in victims if not job.state])
        _pause(job for job in victims if job.state == "done")
        self._each(self._rescue, [job for job in victims if job.state == "done"])
        for job in jobs:
            if job.state == "look":
                state = finish_or_leave(self.home, job.change)
                job.state = "begun" if state == "hash" else state  # for the next who has the lock

    def _each(self, step: Callable[[_Job], None], jobs: list[_Job]) -> None:
        """Do one step for every job; one that fails is looked at afterwards and stops no other."""
        for job in jobs:
            if self._fatal is not None and step in (self._become, self._exchange):
                job.state, job.outcome, job.error = "back", "skipped", self._fatal
                continue
            try:
                step(job)
            except OSError as error:
                job.state, job.outcome, job.error = "look", "skipped", error
                if is_of_store(error):
                    self._fatal = error

    def _become(self, job: _Job) -> None:
        file, blob, change = job.file, job.pool.blob(job.digest), job.change
        try:
            os.fchmod(file.fd, change.mode & 0o555)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            # A part of the store's own disk that is mounted read-only; the store can be written.
            raise OSError(errno.EPERM, os.strerror(errno.EPERM)) from error
        reached("read-only")
        try:
            try:
                file.spot.link_to(blob)
            except FileNotFoundError:
                job.pool.make_folder_of(job.digest, sync=False)
                file.spot.link_to(blob)
        except FileExistsError:  # put in this moment, which takes no lock
            os.fchmod(file.fd, change.mode)
            job.state = "back"
            return
        reached("linked")
        now = os.fstat(file.fd)
        is_ours = is_same(look(blob), now) and _is_as_hashed(job, now)
        if not is_ours or (file.lease == "held" and not kernel.lease_intact(file.fd)):
            os.unlink(blob)
            os.fchmod(file.fd, change.mode)
            _leave(job)
            return
        renew_pins(job.pool, job.digest)
        job.state, job.outcome = "done", "became"

    def _exchange(self, job: _Job) -> None:
        change, file, spot = job.change, job.file, job.file.spot
        blob = job.pool.stat(job.digest)
        if blob is None or is_same(os.fstat(file.fd), blob):
            # Its survivor was written to; or it is this very inode.
            job.state, job.outcome = "back", "again" if blob is None else "present"
            return
        spot.take(job.pool.blob(job.digest), change.temporary)
        reached("temporary")
        _swap_names(spot, change.temporary, file)
        reached("exchanged")
        job.outcome = "linked"
        now = os.fstat(file.fd)
        if not is_same(spot.stat(change.temporary), now) or not _is_as_hashed(job, now):
            job.outcome = "skipped"
        if file.lease == "held" and not kernel.lease_intact(file.fd):
            job.outcome = "skipped"
        if job.outcome == "skipped":
            self._give_back(job)  # before the writer goes on, who would find the blob next
        if file.lease == "held":  # who looked the name up before may open it now, in the pause
            kernel.drop_lease(file.fd)

    def _let_go(self, job: _Job) -> None:
        file = job.file
        if file.lease == "held" and kernel.take_lease(file.fd) != "held":
            job.outcome = "skipped"
        if job.outcome == "skipped" or not _is_as_hashed(job, os.fstat(file.fd)):
            self._give_back(job)
            return
        file.spot.unlink(job.change.temporary)
        reached("old removed")
        job.state = "done"
        now = os.fstat(file.fd)
        job.freed = kernel.allocated_bytes(now) if now.st_nlink == 0 else 0

    def _give_back(self, job: _Job) -> None:
        """Let what is beside have the name again; a plain one if that is somebody else's now."""
        spot, blob = job.file.spot, job.pool.stat(job.digest)
        reached("giving back")
        if blob is None or not spot.swap_in(job.change.temporary, blob.st_ino):
            keep(self.home, job.change, spot)
        _leave(job)

    def _rescue(self, job: _Job) -> None:
        """Who was late wrote into a file without a name: its bytes get one again."""
        file, change = job.file, job.change
        if file.lease != "held" or kernel.lease_intact(file.fd):
            return
        kernel.drop_lease(file.fd)
        deadline = time.monotonic() + PATIENCE
        while kernel.take_lease(file.fd) == "busy" and time.monotonic() < deadline:
            time.sleep(0.001)
        kernel.drop_lease(file.fd)
        target = file.spot.create(change.temporary)
        try:
            copy_hashed(file.fd, target)
            st = os.fstat(file.fd)
            dress(target, change)
            os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))
            os.fsync(target)
        finally:
            os.close(target)
        job.freed = 0
        self._give_back(job)

    def _remember(self, jobs: list[_Job]) -> None:
        """Our own links moved the ctime of inodes: write down what they are now, once per chunk."""
        now, rows = time.time_ns(), list[FileRow]()
        done: dict[tuple[Path, str], list[_Job]] = {}
        for job in jobs:
            if job.state == "done":
                done.setdefault((job.pool.root, job.digest), []).append(job)
        for where, same in done.items():
            job, pool = same[0], same[0].pool  # the first became the blob, if one did
            if (st := pool.stat(job.digest)) is None:
                continue
            key, inode = kernel.StatKey.of(st), (pool.filesystem, st.st_ino)
            has_become = job.change.how == "become"
            names: list[str | Path] = [each.file.spot.path for each in same]
            names += [pool.blob(job.digest)] if has_become else []
            before = job.file.st if has_become else self._proven.get(where)
            if before is None or key[:2] != kernel.StatKey.of(before)[:2]:
                # Written to since it was hashed; without a lease nobody was kept out.
                rows.append(FileRow.of(pool.filesystem, st, names=names))
                continue
            is_durable = job.digest in self._synced or (has_become and job.file.is_durable)
            boot = "" if is_durable else self.home.boot
            # A write in this tick would show nowhere, unless the file was held meanwhile; of the
            # ctime alone we know whose it is.
            is_sure = has_become and job.file.is_proven
            if is_sure or abs(now - key.mtime_ns) > kernel.RACY_NS:
                self.read.add(*inode, key, job.digest)
            else:
                boot = RACY
            rows.append(FileRow.of(pool.filesystem, st, job.digest, boot, names))
        with suppress(errors.StoreError), self.home.catalog.write():
            self.home.catalog.remember(rows, [same[0].file.hashes for same in done.values()])
            self.home.catalog.touch(digest for _, digest in done)


def is_of_store(error: Exception) -> bool:
    """Say whether the system refused what it would refuse for every other file, too."""
    is_ours = isinstance(error, errors.StoreError)
    return not is_ours and getattr(error, "errno", None) in _OF_THE_STORE


def _plain(file: UserFile, outcome: Outcome) -> Linked:
    return Linked(path=file.path, outcome=outcome, digest=file.digest, size=file.st.st_size)


def _result(job: _Job) -> Linked:
    error = None if job.error is None else as_skipped(job.file.path, job.error)
    outcome = "skipped" if job.outcome == "again" else job.outcome
    return Linked(
        path=job.file.path, outcome=outcome, digest=job.digest, size=job.file.st.st_size,
        freed=job.freed if job.state == "done" else 0, error=error,
    )  # fmt: skip


def _state(job: _Job) -> State:
    return "begun" if job.state in ("", "look") else job.state  # type: ignore[return-value]


def _leave(job: _Job) -> None:
    message = f"{job.file.path} was opened for writing; it was left as it is"
    job.state, job.outcome = "back", "skipped"
    job.error = errors.FileBusyError(message, path=job.file.path)


def _is_as_hashed(job: _Job, now: os.stat_result) -> bool:
    return (now.st_size, now.st_mtime_ns) == (job.change.size, job.change.mtime_ns)


def _pause(jobs: Iterator[_Job]) -> None:
    if any(True for _ in jobs):
        time.sleep(PAUSE)


def _swap_names(spot: Spot, temporary: str, file: UserFile) -> None:
    """Let the name and the temporary one change places; the name exists at every moment."""
    if kernel.exchange(temporary, spot.name, dir_fd=spot.fd):
        return
    # No RENAME_EXCHANGE here: keep the old file under a third name, rename over, rename that.
    spare = f"{temporary}-old"
    spot.link(spot.name, spare)
    try:
        if not is_same(spot.stat(spare), os.fstat(file.fd)):
            raise errors.FileChangedError(f"{file.path} was replaced meanwhile", path=file.path)
        spot.rename(temporary)
        spot.rename(spare, temporary)
    except BaseException:
        spot.unlink(spare)
        spot.unlink(temporary)
        raise


def dress(fd: int, change: Change) -> None:
    """Give a file the group, attributes, mode and time that a row remembers; no special mode."""
    if change.gid >= 0:
        with suppress(PermissionError):  # a group this user has left since
            os.fchown(fd, -1, change.gid)
    write_attributes(fd, change.attributes)
    os.fchmod(fd, change.mode & 0o777)
    if change.mtime_ns:
        os.utime(fd, ns=(change.mtime_ns, change.mtime_ns))


# what a dead process left


Proof = tuple[int, bool]
"""An open, leased file, and whether it has the bytes of the blob."""


def recover(home: Home) -> None:
    """Finish what dead processes left. Files beside are hashed outside the lock, like any other."""
    with home.locked("recovery"):
        left = home.journal.open_changes(Mounts())
        needed = [change for change in left if _close(home, change, None) == "hash"]
    for change in needed:
        fd = -1
        try:
            fd, is_equal = _suspect(home, change)
            reached("hashed beside")
            with home.locked("recovery"):
                for now in home.journal.open_changes(Mounts(), change.id):  # else another did it
                    if _close(home, now, (fd, is_equal)) == "hash":
                        home.stuck[change.id] = f"{change.path}: is being written; later"
        except OSError as error:
            home.stuck[change.id] = f"{change.path}: {error}"
        finally:
            if fd >= 0:
                os.close(fd)


def _suspect(home: Home, change: Change) -> tuple[int, bool]:
    """Open and hash what has to be known: a blob that nobody proved, a copy, or the file beside."""
    if change.how == "become" and change.state == "begun":
        pool = home.pool_of(change.path.parent)
        fd = os.open(pool.blob(change.digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    else:
        with Spot(change.path) as spot:
            fd = spot.open(None if change.how == "copy" else change.temporary)
    try:
        lease = kernel.take_lease(fd)
        return fd, lease != "busy" and hash_file(fd)[0].digest == change.digest
    except BaseException:
        os.close(fd)
        raise


def _close(home: Home, change: Change, proof: Proof | None) -> State | Literal["hash"]:
    state = finish_or_leave(home, change, proof)
    if state != "hash" and state != change.state:  # noqa: PLR1714 - for mypy
        home.journal.note([(state, change.id)])
    return state


def finish_or_leave(
    home: Home, change: Change, proof: Proof | None = None
) -> State | Literal["hash"]:
    """Finish a change as far as it can be looked at; else it stays open, is named, stops nobody."""
    try:
        state = finish(home, change, proof)
    except OSError as error:  # renamed, a symlink above, no permission, a drive away
        home.stuck[change.id] = f"{change.path}: {error}"
        _log.warning("unfinished: %s", home.stuck[change.id])
        return change.state
    home.stuck.pop(change.id, None)
    return state


def finish(home: Home, change: Change, proof: Proof | None = None) -> State | Literal["hash"]:
    """Say the state a change is in, by looking; "hash": a proof is needed first. Needs the lock."""
    if change.away:
        raise errors.FileSkippedError(change.away, reason=change.away, path=change.path)
    with Spot(change.path) as spot:
        folder = os.fstat(spot.fd)
        if change.folder not in (-1, folder.st_ino):
            raise FileNotFoundError(errno.ENOENT, "is in another folder now", str(change.path))
        if change.how == "copy":
            return _finish_copy(change, spot, proof)
        if change.how == "own":  # beside is our copy, or one more name of the old file
            return _settle_beside(home, change, spot, None, proof) or "undone"
        pool = home.pool_on(folder.st_dev)
        if pool is None:
            message = f"{change.path} has no pool on its filesystem now"
            raise errors.FileSkippedError(message, reason="other filesystem", path=change.path)
        return _finish_link(home, change, spot, pool, proof)


def _finish_link(
    home: Home, change: Change, spot: Spot, pool: Pool, proof: Proof | None
) -> State | Literal["hash"]:
    if change.state == "begun" and change.how in ("create", "give"):
        spot.unlink(change.temporary)  # nothing of the user's was ever beside
    elif state := _settle_beside(home, change, spot, pool, proof):
        return state
    blob, here = pool.stat(change.digest), spot.stat()
    if change.state == "begun" and change.how == "become" and blob is not None:
        return _finish_become(change, spot, pool, blob, proof)
    if here is not None and is_same(here, blob):
        if here.st_mode & 0o222:  # killed while it got its mode back
            spot.give_mode(here.st_mode & 0o555, inode=here.st_ino, links=here.st_nlink)
        return "done"
    if here is None and (change.state, change.how) not in _PERHAPS_NEVER:
        return "done"  # gone, or moved: the row keeps the way back, and undo says which
    was = change.inode, change.size, change.mtime_ns
    if here is not None and (here.st_ino, here.st_size, here.st_mtime_ns) == was:
        spot.give_mode(change.mode, inode=change.inode, links=max(change.links, here.st_nlink))
    return "undone" if change.state == "undoing" else "back"


def _settle_beside(
    home: Home, change: Change, spot: Spot, pool: Pool | None, proof: Proof | None
) -> State | Literal["", "hash"]:
    """Let nothing be beside a file any more; "hash": what is there has to be hashed first."""
    spare = f"{change.temporary}-old"
    if (second := spot.stat(spare)) is not None:  # there was no way to exchange names
        if is_same(second, spot.stat()):
            spot.unlink(spare)
        else:
            spot.rename(spare, change.temporary)
    left = spot.stat(change.temporary)
    if left is None:
        return ""
    here, fd, is_equal = spot.stat(), *(proof or (-1, False))
    is_proof = fd >= 0 and is_same(os.fstat(fd), left)
    blob = None if pool is None else pool.stat(change.digest)
    is_ours = pool is not None and (
        is_same(left, blob)
        or any(is_same(left, look(pool.tmp / n / change.temporary)) for n in os.listdir(pool.tmp))
    )
    is_old = change.state == "begun" and left.st_ino == change.inode  # and under our random name
    if not is_ours and not is_proof:
        return "hash"
    if is_ours or (is_equal and _is_still(fd) and (blob is not None or not is_old)):
        spot.unlink(change.temporary)
        if is_old and not is_same(here, blob):
            return "done"  # exchanged, and the link was moved since: undo will say so
    elif kernel.take_lease(fd) == "busy":
        return "hash"
    elif not (is_old and _give_name(change, spot, here, blob)):
        keep(home, change, spot)
    reached("finish: beside settled")
    return ""


def _is_still(fd: int) -> bool:
    """Say whether nobody has opened a file for writing since it was leased, where that shows."""
    return kernel.lease_intact(fd) or kernel.take_lease(fd) == "unsupported"


def _finish_become(
    change: Change, spot: Spot, pool: Pool, blob: os.stat_result, proof: Proof | None
) -> State | Literal["hash"]:
    fd, is_equal = proof or (-1, False)
    if fd < 0 or not is_same(os.fstat(fd), blob):
        return "hash"  # killed before it could look whether a writer had come
    if is_equal and _is_still(fd):
        return "done"
    if is_same(spot.stat(), blob):  # the user's own file, and it has other bytes by now
        os.unlink(pool.blob(change.digest))
        spot.give_mode(change.mode, inode=blob.st_ino, links=change.links)
    else:
        os.rename(pool.blob(change.digest), pool.new_bad(change.digest))
    return "back"


def _finish_copy(change: Change, spot: Spot, proof: Proof | None) -> State | Literal["hash"]:
    """A copy is beside until it is whole; nothing of the user's ever was."""
    with suppress(FileNotFoundError, errors.FileChangedError):
        fd = spot.open(change.temporary)
        try:
            if not try_lock(fd, exclusive=False):
                raise errors.FileBusyError("is being copied", path=change.path)
        finally:
            os.close(fd)
    spot.unlink(change.temporary)
    here = spot.stat() if change.links else None  # 0: others know of it, and undo leaves it
    if here is None and change.state == "undoing":
        return "done"
    if here is None or not stat.S_ISREG(here.st_mode) or here.st_size != change.size:
        return "undone" if change.state == "undoing" else "back"
    fd, is_equal = proof or (-1, False)
    if fd < 0 or not is_same(os.fstat(fd), here):
        return "hash"
    return "done" if is_equal else "back"


def _give_name(
    change: Change, spot: Spot, here: os.stat_result | None, blob: os.stat_result | None
) -> bool:
    """Let the old file have its name again; False: somebody has it."""
    if here is None:
        with suppress(FileExistsError):
            spot.link(change.temporary, spot.name)
            spot.unlink(change.temporary)
            return True
        return False
    return blob is not None and spot.swap_in(change.temporary, blob.st_ino)


def keep(home: Home, change: Change, spot: Spot) -> None:
    """Give a file beside that is not ours to delete a plain name, and say so."""
    for number in range(1, 1000):
        which = f" {number}" if number > 1 else ""
        plain = f"{change.path.stem} (kept by smartcache{which}){change.path.suffix}"
        with suppress(FileExistsError):
            spot.link(change.temporary, plain)
            spot.unlink(change.temporary)
            home.kept.append(change.path.with_name(plain))
            _log.warning("kept: %s", home.kept[-1])
            return


def check_digests(digests: Mapping[Path, str] | None) -> dict[Path, str]:
    """Return digests that some files must have, in lower case."""
    return {path: check_hex("blake3", digest) for path, digest in (digests or {}).items()}
