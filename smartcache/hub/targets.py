"""Where a download puts files: into a repo's folder of an HF cache, or into a `local_dir`.

`spot` is where the bytes of a file are to be; `visible` is where programs look for it. In the HF
cache these differ: a blob may be there before any snapshot points at it.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from smartcache.hub import sharedstore, tree
from smartcache.hub.records import RemoteFile, Repo
from smartcache.store import Kind, Owner
from smartcache.system import StatKey, effective_user

_MOST_NOTE = 4096


@dataclass(frozen=True, kw_only=True)
class CacheTarget:
    """A revision of a repo in an HF cache."""

    cache_dir: Path
    repo: Repo
    commit: str

    @cached_property
    def folder(self) -> Path:
        """The folder of the repo."""
        return self.cache_dir / self.repo.folder_name

    @cached_property
    def root(self) -> Path:
        """What the user gets: the snapshot."""
        return self.folder / "snapshots" / self.commit

    @property
    def listing(self) -> Path:
        """Where huggingface_hub keeps what the Hub listed for this commit."""
        return self.folder / "trees" / f"{self.commit}.json"

    @property
    def owner(self) -> Owner:
        """Who keeps the blobs of this revision alive."""
        name = f"{self.repo}@{self.commit} in {_shown(self.cache_dir)}"
        return Owner(kind="repo", name=name, path=self.root, root=self.cache_dir)

    def spot(self, file: RemoteFile) -> Path:
        """Return where the bytes of a file are to be."""
        return self.folder / "blobs" / file.etag

    def visible(self, file: RemoteFile) -> Path:
        """Return where programs look for a file."""
        return tree.pointer(self.folder, self.commit, file.path)

    def found(self, file: RemoteFile) -> Path | None:
        """Return the file that is there already, symlinks resolved; its bytes are not looked at.

        A pointer that leads to another blob than the announced one does not count.
        """
        return self.look(file)[0]

    def look(self, file: RemoteFile) -> tuple[Path | None, bool]:
        """Return `found`, and whether programs find it too: the pointer leads there.

        A repo may have ten thousand files: plain text, a readlink and a stat for each.
        """
        pointer = f"{self._snapshot}{file.path}"
        found: Path | None = None
        try:
            blob = os.path.join(os.path.dirname(pointer), os.readlink(pointer))
        except OSError:  # no symlink: a file where there are none, or nothing
            found = _file_behind(pointer)
        else:
            if not file.announced or os.path.basename(blob) == file.etag:
                found = _file_behind(os.path.normpath(blob))
        if found is not None or not file.announced:
            return found, found is not None
        return _file_behind(f"{self._blobs}{file.etag}"), False

    def look_all(
        self, files: list[RemoteFile], min_size: int
    ) -> dict[str, tuple[Path | None, bool]]:
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

    def unfinished(self, file: RemoteFile) -> Path:
        """Return the directory where huggingface_hub writes a file while it downloads."""
        del file
        return self.folder / "blobs"

    def settled(self, file: RemoteFile) -> None:
        """Take note that a file was put at its spot by us: huggingface_hub makes the pointer."""
        self.drop_wrong_pointer(file)

    def seen(self, file: RemoteFile) -> Path | None:
        """Return the file that is there, whatever it is."""
        return self.look(file)[0]

    def elsewhere(self, file: RemoteFile) -> Path | None:
        """Return what the pointer leads to, if that is not named as the Hub announced."""
        pointer = f"{self._snapshot}{file.path}"
        try:
            blob = os.path.join(os.path.dirname(pointer), os.readlink(pointer))
        except OSError:
            return None
        is_other = bool(file.announced) and os.path.basename(blob) != file.etag
        return _file_behind(os.path.normpath(blob)) if is_other else None

    def drop_wrong_pointer(self, file: RemoteFile) -> None:
        """Remove a pointer to other bytes: huggingface_hub would believe it."""
        if self.elsewhere(file) is not None:
            with suppress(FileNotFoundError):
                os.unlink(f"{self._snapshot}{file.path}")

    def holds(self, file: RemoteFile, path: Path) -> bool:
        """Say whether a file is this repo's own: only then may it become a blob or be moved.

        Somebody may have put a symlink to a file of theirs in its place.
        """
        del file
        real = os.path.realpath(path)
        if real.startswith(os.path.join(os.path.realpath(self.folder), "")):
            return True
        shared = os.path.join(os.path.realpath(self.cache_dir), "blobs", "")
        return real.startswith(shared) and sharedstore.is_usable(self.cache_dir)

    def hide(self, file: RemoteFile) -> list[Path]:
        """Remove every pointer to a file's blob, in all snapshots of the repo; return them."""
        removed = []
        for commit in tree.commits_of(self.folder):
            for _, pointer in tree.pointers(self.folder, commit):
                blob = tree.blob_behind(pointer)
                if blob is not None and blob.name == file.etag:
                    with suppress(FileNotFoundError):
                        os.unlink(pointer)
                    removed.append(pointer)
        return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTarget:
    """A folder of the user's own, as huggingface_hub's `local_dir`."""

    local_dir: Path
    cache_dir: Path
    repo: Repo
    commit: str

    @property
    def root(self) -> Path:
        """What the user gets."""
        return self.local_dir

    @property
    def owner(self) -> Owner | None:
        """Nobody: hard links keep their bytes by themselves, and copies need none."""
        return None

    def spot(self, file: RemoteFile) -> Path:
        """Return where the bytes of a file are to be."""
        parts = tree.safe_parts(file.path)
        if parts is None:
            raise ValueError(file.path)
        return self.local_dir.joinpath(*parts)

    def visible(self, file: RemoteFile) -> Path:
        """Return where programs look for a file: the same place."""
        return self.spot(file)

    def found(self, file: RemoteFile) -> Path | None:
        """Return the file that is there if its size is right; its bytes are not looked at."""
        found = _file_behind(self.spot(file))
        is_right = found is not None and file.size in (None, os.stat(found).st_size)
        return found if is_right else None

    def look_all(
        self, files: list[RemoteFile], min_size: int
    ) -> dict[str, tuple[Path | None, bool]]:
        """Look at all files, by path; of small ones only those huggingface_hub calls current."""
        seen: dict[str, tuple[Path | None, bool]] = {}
        for file in files:
            is_current = self.noted_etag(file) == file.etag
            is_text = is_current and not file.is_weight(min_size)
            # A text that huggingface_hub calls current is left alone, edited or not.
            found = self.seen(file) if is_text else self.found(file)
            if found is not None and (is_current or file.is_large(min_size)):
                seen[file.path] = found, is_current
        return seen

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

    @property
    def listing(self) -> Path:
        """Where it keeps what the Hub listed for this commit."""
        return self.memory / "trees" / f"{self.commit}.json"

    @property
    def notes(self) -> Path:
        """Where it writes which version each file is."""
        return self.memory / "download"

    def unfinished(self, file: RemoteFile) -> Path:
        """Return the directory where huggingface_hub writes a file while it downloads."""
        return self._note(file).parent

    def settled(self, file: RemoteFile) -> None:
        """Tell huggingface_hub which version was put here; else it would hash or overwrite it."""
        note = self._note(file)
        note.parent.mkdir(parents=True, exist_ok=True)
        # In place, as it does itself: it takes a torn one for none.
        note.write_text(f"{self.commit}\n{file.etag}\n{time.time()}\n", encoding="ascii")

    def hide(self, file: RemoteFile) -> list[Path]:
        """Remove what huggingface_hub believes about a file; the file itself is its only name."""
        with suppress(FileNotFoundError):
            os.unlink(self._note(file))
        return []

    def is_own(self, file: RemoteFile, known: str | None) -> bool:
        """Say whether a file is no version from the Hub, as far as anybody knows.

        `known` is its hash, if that is known.
        """
        spot = self.spot(file)
        if os.path.islink(spot) or not os.path.isfile(spot):
            return False
        noted = self.noted_etag(file)
        return not noted or known not in (None, noted)

    def seen(self, file: RemoteFile) -> Path | None:
        """Return the file that is there, whatever it is."""
        return _file_behind(self.spot(file))

    def is_shared(self, file: RemoteFile) -> bool:
        """Say whether a name stands for bytes that others have too: a symlink, or one of several.

        huggingface_hub writes into stale files of a `local_dir` in place: never through a link.
        """
        try:
            st = os.lstat(self.spot(file))
        except FileNotFoundError:
            return False
        return stat.S_ISLNK(st.st_mode) or (stat.S_ISREG(st.st_mode) and st.st_nlink > 1)

    def detach(self, file: RemoteFile, temporary: Path) -> None:
        """Give a file that is shared bytes of its own, by way of a name beside it."""
        spot = self.spot(file)
        if not os.path.isfile(spot):
            os.unlink(spot)  # a symlink to nothing
            return
        before = os.stat(spot)
        shutil.copyfile(spot, temporary)
        with suppress(PermissionError):  # only root may give files away
            os.chown(temporary, before.st_uid, before.st_gid)
        os.chmod(temporary, before.st_mode & 0o777 | stat.S_IWUSR)
        os.utime(temporary, ns=(before.st_atime_ns, before.st_mtime_ns))
        if StatKey.of(os.stat(spot)) == StatKey.of(before):
            os.replace(temporary, spot)

    def _note(self, file: RemoteFile) -> Path:
        parts = tree.safe_parts(file.path) or ()
        return self.notes.joinpath(*parts[:-1], f"{parts[-1]}.metadata")


Target = CacheTarget | LocalTarget


def _shown(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _file_behind(path: str | Path) -> Path | None:
    """Return the file that a path leads to; None if there is none."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return Path(os.path.realpath(path)) if os.path.isfile(path) else None
    return Path(path) if stat.S_ISREG(mode) else None
