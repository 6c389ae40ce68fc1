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

from smartcache.hub import tree
from smartcache.hub.records import RemoteFile, Repo
from smartcache.store.kernel import effective_user
from smartcache.store.links import Kind
from smartcache.store.records import Owner


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
    def owner(self) -> Owner:
        """Who keeps the blobs of this revision alive."""
        name = f"{self.repo}@{self.commit}"
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

    def look_all(self, files: list[RemoteFile]) -> dict[str, tuple[Path | None, bool]]:
        """Look at all files, by path; at none if there is nothing of this repo yet."""
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

    def unfinished(self) -> Path:
        """Return where huggingface_hub writes what it downloads."""
        return self.folder / "blobs"

    def settled(self, file: RemoteFile) -> None:
        """Take note that a file was put at its spot by us: huggingface_hub makes the pointer."""
        self.drop_wrong_pointer(file)

    def drop_wrong_pointer(self, file: RemoteFile) -> None:
        """Remove a pointer to other bytes: huggingface_hub would believe it."""
        pointer = f"{self._snapshot}{file.path}"
        try:
            name = os.path.basename(os.readlink(pointer))
        except OSError:
            return
        if file.announced and name != file.etag:
            with suppress(FileNotFoundError):
                os.unlink(pointer)

    def hide(self, file: RemoteFile) -> list[Path]:
        """Remove every pointer to a file's blob, in all snapshots of the repo; return them."""
        removed = []
        for commit in tree.commits_of(self.folder):
            for _, pointer in tree.pointers(self.folder, commit):
                blob = tree.blob_behind(pointer)
                if blob is not None and blob.name == file.etag:
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
        """Nobody: a link keeps its bytes by itself."""
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

    def look_all(self, files: list[RemoteFile]) -> dict[str, tuple[Path | None, bool]]:
        """Look at all files, by path: what is found is visible."""
        found = {file.path: self.found(file) for file in files}
        return {path: (each, each is not None) for path, each in found.items()}

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

    def unfinished(self) -> Path:
        """Return where huggingface_hub writes what it downloads."""
        return self.memory / "download"

    def settled(self, file: RemoteFile) -> None:
        """Tell huggingface_hub which version was put here; else it would hash or overwrite it."""
        note = self._note(file)
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{note.name}.{os.getpid()}.tmp")
        temporary.write_text(f"{self.commit}\n{file.etag}\n{time.time()}\n", encoding="ascii")
        os.replace(temporary, note)

    def hide(self, file: RemoteFile) -> list[Path]:
        """Remove what huggingface_hub believes about a file; the file itself is its only name."""
        with suppress(FileNotFoundError):
            os.unlink(self._note(file))
        return []

    def detach(self, file: RemoteFile) -> None:
        """Give a file that shares its inode, or is a symlink, bytes of its own.

        huggingface_hub writes into stale files of a `local_dir` in place: never through a link.
        """
        spot = self.spot(file)
        try:
            st = os.lstat(spot)
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(st.st_mode) and (st.st_nlink == 1 or not stat.S_ISREG(st.st_mode)):
            return
        if not os.path.isfile(spot):
            os.unlink(spot)  # a symlink to nothing
            return
        temporary = spot.with_name(f".{spot.name}.{os.getpid()}.smartcache")
        try:
            shutil.copyfile(spot, temporary)
            mode = os.stat(spot).st_mode & 0o777
            os.chmod(temporary, mode | stat.S_IWUSR)
            os.replace(temporary, spot)
        finally:
            temporary.unlink(missing_ok=True)

    def _note(self, file: RemoteFile) -> Path:
        parts = tree.safe_parts(file.path) or ()
        return self.unfinished().joinpath(*parts[:-1], f"{parts[-1]}.metadata")


Target = CacheTarget | LocalTarget


def _file_behind(path: str | Path) -> Path | None:
    """Return the file that a path leads to; None if there is none."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return Path(os.path.realpath(path)) if os.path.isfile(path) else None
    return Path(path) if stat.S_ISREG(mode) else None
