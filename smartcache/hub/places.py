"""Where files of the Hub go: into a repo's folder of an HF cache, or into a `local_dir`.

`spot` is where the bytes of a file are to be; `visible` is where programs look for it. In the HF
cache these differ: a blob may be there before any snapshot points at it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from filelock import FileLock, Timeout

from smartcache.hub import layout
from smartcache.hub.records import RemoteFile, Repo, announced_by
from smartcache.store import Kind
from smartcache.store.layout import Pool
from smartcache.system.kernel import effective_user, take_lease

_MOST_NOTE = 4096
PARTIAL = ".incomplete"
_YOUNG = 60.0
"""Seconds for which what is written in one go, without a lock, may still be somebody's."""
_log = logging.getLogger(__name__)

Seen = tuple[Path | None, bool]
"""The file that is there, symlinks resolved, and whether programs find it."""


@dataclass(frozen=True, kw_only=True)
class CachePlace:
    """A revision of a repo in an HF cache; `commit` is "" where nobody knows it."""

    cache_dir: Path
    repo: Repo
    commit: str = ""

    @cached_property
    def folder(self) -> Path:
        """The folder of the repo."""
        return self.cache_dir / self.repo.folder_name

    @cached_property
    def root(self) -> Path:
        """What the user gets: the snapshot."""
        return self.folder / "snapshots" / self.commit

    @property
    def memory(self) -> Path:
        """Where huggingface_hub keeps listings."""
        return self.folder

    def spot(self, file: RemoteFile) -> Path:
        """Return where the bytes of a file are to be."""
        return self.folder / "blobs" / file.etag

    def visible(self, file: RemoteFile) -> Path:
        """Return where programs look for a file."""
        return layout.pointer(self.folder, self.commit, file.path)

    def unfinished(self, file: RemoteFile) -> Path:
        """Return the directory where huggingface_hub writes a file while it downloads."""
        del file
        return self.folder / "blobs"

    def found(self, file: RemoteFile) -> Path | None:
        """Return the file that is there already, symlinks resolved; its bytes are not looked at."""
        return self.look(file)[0]

    seen = found

    def look(self, file: RemoteFile) -> Seen:
        """Look at one file. A pointer that leads to another blob than the announced does not count.

        One to a blob that is named by no hash does: the server may have none.
        A repo may have ten thousand files: plain text, a readlink and a stat for each.
        """
        pointer = f"{self._snapshot}{file.path}"
        found: Path | None = None
        try:
            blob = os.path.join(os.path.dirname(pointer), os.readlink(pointer))
        except OSError:  # no symlink: a file where there are none, or nothing
            found = _file_behind(pointer)
        else:
            name = os.path.basename(blob)
            if not file.announced or name == file.etag or not announced_by(name):
                found = _file_behind(os.path.normpath(blob))
        if found is not None or not file.announced:
            return found, found is not None
        return _file_behind(f"{self._blobs}{file.etag}"), False

    def look_all(self, files: list[RemoteFile], min_size: int) -> dict[str, Seen]:
        """Look at all files, by path; at none if there is nothing of this repo yet."""
        del min_size
        if not os.path.isdir(self.folder):
            return {}
        return {file.path: self.look(file) for file in files}

    @cached_property
    def _snapshot(self) -> str:
        return os.path.join(self.root, "")

    @cached_property
    def _blobs(self) -> str:
        return os.path.join(self.folder, "blobs", "")

    def kinds(self, *, is_weight: bool) -> tuple[Kind, ...]:
        """Return how a blob is placed here: huggingface_hub never writes into a blob in place."""
        return ("auto",) if is_weight else ("reflink", "copy")

    def settled(self, file: RemoteFile) -> None:
        """Do nothing: huggingface_hub makes the pointer."""

    def holds(self, file: RemoteFile, path: Path) -> bool:
        """Say whether a file is this repo's own: only then may it become a blob or be moved.

        Somebody may have put a symlink to a file of theirs in its place.
        """
        del file
        real = os.path.realpath(path)
        if real.startswith(os.path.join(os.path.realpath(self.folder), "")):
            return True
        shared = os.path.join(os.path.realpath(self.cache_dir), "blobs", "")
        return real.startswith(shared) and layout.has_shared_store(self.cache_dir)

    def hide(self, file: RemoteFile) -> None:
        """Remove every pointer to a file's blob, in all snapshots, and this one's to another."""
        self.drop_other_pointer(file)
        for commit in layout.commits_of(self.folder):
            for _, pointer in layout.pointers(self.folder, commit):
                blob = layout.blob_behind(pointer)
                if blob is not None and blob.name == file.etag:
                    with suppress(FileNotFoundError):
                        os.unlink(pointer)

    def drop_other_pointer(self, file: RemoteFile) -> None:
        """Remove a pointer that leads to another blob: huggingface_hub would believe it."""
        pointer = f"{self._snapshot}{file.path}"
        with suppress(OSError):
            if os.path.basename(os.readlink(pointer)) != file.etag:
                os.unlink(pointer)

    def weights(self, inside: str = "") -> dict[str, str]:
        """Return the weight files that programs see, below a folder: path -> hash of the blob.

        "" where no name tells it, as where there are no symlinks. A loading looks at thousands of
        pointers: plain text, and no more system calls than it takes.
        """
        found: dict[str, str] = {}
        for directory, _, names in os.walk(os.path.join(self.root, inside)):
            for name in names:
                path = os.path.join(directory, name)
                try:
                    blob = os.path.basename(os.readlink(path))
                except OSError:
                    blob = ""
                short = path[len(self._snapshot) :]
                if RemoteFile(path=short, size=None, etag=blob).is_weight_name:
                    found[short] = blob if announced_by(blob) else ""
        return found

    def clear(self) -> None:
        """Remove what killed clients have left half-made in the repo's folder."""
        with suppress(OSError):
            for name in os.listdir(self.folder / "blobs"):
                if layout.is_half_made(name) and name.endswith(PARTIAL):
                    with suppress(OSError):
                        remove_partial(self.folder / "blobs" / name)
        _clear_old(self.folder / "refs")
        _clear_old(self.folder / "trees")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlace:
    """A folder of the user's own, as huggingface_hub's `local_dir`."""

    local_dir: Path
    commit: str = ""

    @property
    def root(self) -> Path:
        """What the user gets."""
        return self.local_dir

    def spot(self, file: RemoteFile) -> Path:
        """Return where the bytes of a file are to be."""
        parts = layout.safe_parts(file.path)
        if parts is None:
            raise ValueError(file.path)
        return self.local_dir.joinpath(*parts)

    def visible(self, file: RemoteFile) -> Path:
        """Return where programs look for a file: the same place."""
        return self.spot(file)

    def seen(self, file: RemoteFile) -> Path | None:
        """Return the file that is there, whatever it is."""
        return _file_behind(self.spot(file))

    def found(self, file: RemoteFile) -> Path | None:
        """Return the file that is there if its size is right; its bytes are not looked at."""
        found = self.seen(file)
        is_right = found is not None and file.size in (None, os.stat(found).st_size)
        return found if is_right else None

    def look_all(self, files: list[RemoteFile], min_size: int) -> dict[str, Seen]:
        """Look at all files, by path; of small ones only those huggingface_hub calls current."""
        looked: dict[str, Seen] = {}
        for file in files:
            is_current = self.noted_etag(file) == file.etag
            is_text = is_current and not file.is_weight(min_size)
            # A text that huggingface_hub calls current is left alone, edited or not.
            found = self.seen(file) if is_text else self.found(file)
            if found is not None and (is_current or file.is_large(min_size)):
                looked[file.path] = found, is_current
        return looked

    def noted_etag(self, file: RemoteFile) -> str:
        """Return which version huggingface_hub believes the file to be; "" if it does not know.

        As it does, nothing is believed of a file that was changed after that was written.
        """
        try:
            with open(self._note(file), "rb") as note:
                lines = note.read(_MOST_NOTE).decode("ascii", "replace").split("\n")
            is_newer = os.stat(self.spot(file)).st_mtime - 1 > float(lines[2])
        except (OSError, ValueError, IndexError):
            return ""
        return "" if is_newer else lines[1].strip()

    def holds(self, file: RemoteFile, path: Path) -> bool:
        """Say whether a file lies in this folder: only then may it become a blob or be moved."""
        inside = os.path.join(os.path.realpath(self.local_dir), "")
        return os.path.realpath(path).startswith(inside) and not os.path.islink(self.spot(file))

    def kinds(self, *, is_weight: bool) -> tuple[Kind, ...]:
        """Return how a blob is placed here.

        huggingface_hub overwrites a stale file of a `local_dir` in place. The mode of a hard link
        keeps an ordinary user from that; root would write into the blob, so root gets own bytes.
        """
        is_safe = is_weight and effective_user() != 0
        return ("auto",) if is_safe else ("reflink", "copy")

    @property
    def memory(self) -> Path:
        """Where huggingface_hub keeps what it knows about this folder."""
        return self.local_dir / ".cache" / "huggingface"

    def unfinished(self, file: RemoteFile) -> Path:
        """Return the directory where huggingface_hub writes a file while it downloads."""
        return self._note(file).parent

    def settled(self, file: RemoteFile) -> None:
        """Tell huggingface_hub which version was put here; else it would hash or overwrite it."""
        note = self._note(file)
        note.parent.mkdir(parents=True, exist_ok=True)
        # In place, as it does itself: it takes a torn one for none.
        note.write_text(f"{self.commit}\n{file.etag}\n{time.time()}\n", encoding="ascii")

    def hide(self, file: RemoteFile) -> None:
        """Remove what huggingface_hub believes about a file; the file itself is its only name."""
        with suppress(FileNotFoundError):
            os.unlink(self._note(file))

    @contextmanager
    def making_room(self, file: RemoteFile, known: str | None, pool: Pool) -> Iterator[None]:
        """Let another file come in this block to where a stale one is.

        huggingface_hub writes through links there, and deletes what is stale. So what is the
        user's own (`known` is its hash, if that is known) or has other names moves to `bad/` of a
        pool before. It comes back if nothing has come; what was from the Hub does not stay there.
        """
        spot = self.spot(file)
        try:
            mode, links = os.lstat(spot).st_mode, os.lstat(spot).st_nlink
        except FileNotFoundError:
            yield
            return
        is_file, noted = stat.S_ISREG(mode), self.noted_etag(file)
        is_own = is_file and (not noted or known not in (None, noted))
        if not (is_own or stat.S_ISLNK(mode) or (is_file and links > 1)):
            yield
            return
        pool.create()
        kept = pool.new_bad(file.etag)
        is_near = os.lstat(spot).st_dev == os.stat(kept.parent).st_dev
        aside = kept if is_near else self._note(file).with_name(kept.name)
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.rename(spot, aside)  # within its filesystem: it can always come back
        try:
            yield
        finally:
            if not os.path.lexists(spot):
                os.rename(aside, spot)
            elif not is_own:
                os.unlink(aside)
            else:
                with suppress(OSError):  # no room there: it stays beside
                    aside = Path(shutil.move(aside, kept))
                _log.warning("%s was not from the Hub; it is kept as %s", spot, aside)

    def clear(self) -> None:
        """Remove what killed clients have left half-made."""
        _clear_old(self.memory / "download")
        _clear_old(self.memory / "trees")

    def _note(self, file: RemoteFile) -> Path:
        """Return where huggingface_hub writes which version a file is."""
        parts = layout.safe_parts(file.path) or ()
        return self.memory.joinpath("download", *parts[:-1], f"{parts[-1]}.metadata")


Place = CachePlace | LocalPlace


def half_made(directory: Path, name: str) -> Path:
    """Return a name for a file that is not whole yet: one that huggingface_hub gives only to such.

    What a killed process leaves of it is removed by the next download.
    """
    return directory / f"{name}.{secrets.token_hex(4)}{PARTIAL}"


def is_dead(partial: Path) -> bool:
    """Say whether surely nobody is at work on an unfinished download in `blobs/` of a repo."""
    with _held(partial) as is_held:
        return is_held


def remove_partial(partial: Path) -> bool:
    """Remove an unfinished download; False: it stays, because somebody may be at work on it."""
    with _held(partial) as is_held:
        if is_held:
            os.unlink(partial)
            _log.info("%s of a killed download is removed", partial)
        return is_held


@contextmanager
def _held(partial: Path) -> Iterator[bool]:
    """Keep everybody from an unfinished download inside the block; False: somebody is at it."""
    blobs = partial.parent
    name = partial.name.removesuffix(PARTIAL)
    etag = name.rpartition(".")[0] if layout.is_half_made(partial.name) else name
    lock = FileLock(
        blobs.parent.parent / ".locks" / blobs.parent.name / f"{etag}.lock", timeout=0, mode=0o664
    )
    is_free = False
    try:
        if os.path.exists(lock.lock_file):  # whoever writes holds it
            lock.acquire()
        is_free = _is_unwritten(partial)
    except (Timeout, NotImplementedError, OSError):
        pass
    try:
        yield is_free
    finally:
        lock.release()


def _clear_old(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in filter(layout.is_half_made, names):
            path = Path(directory, name)
            with suppress(OSError):
                is_old = time.time() - os.lstat(path).st_mtime > _YOUNG
                if is_old and _is_unwritten(path):
                    os.unlink(path)
                    _log.info("%s of a killed download is removed", path)


def _is_unwritten(path: Path) -> bool:
    """Say whether nobody has a file open for writing; where that cannot be asked, its age tells."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        lease = take_lease(descriptor)
        age = time.time() - os.fstat(descriptor).st_mtime
        return lease == "held" or (lease == "unsupported" and age > _YOUNG)
    finally:
        os.close(descriptor)


def _file_behind(path: str | Path) -> Path | None:
    """Return the file that a path leads to; None if there is none."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return Path(os.path.realpath(path)) if os.path.isfile(path) else None
    return Path(path) if stat.S_ISREG(mode) else None
