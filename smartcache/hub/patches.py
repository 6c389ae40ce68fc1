"""The places where smartcache steps into huggingface_hub.

**Answering.** All its downloads meet in one function, `_download_to_tmp_and_move`, with the
announced hash, the size and the destination known, under its lock of the file, and before any
pointer to it exists. A wrapper around that function lets whoever is registered bring the file
instead: out of the store, from this machine, or by the function itself to a name that nobody looks
for, so that what comes is proven before it is seen. It is put there once and never swapped;
without anybody registered it passes everything through. The original lives in a closure. A version
with another signature is left alone. `uninstall` gives the very function back, unless somebody has
put theirs over ours.

What was answered must not go on to huggingface_hub's own shared blob store, which would change the
mode of a blob; what was fetched goes there first and is then shared from there.

**Checking.** huggingface_hub names blobs, locks and unfinished files by the ETag of a file, and
directories by the commit, as the server sends them: "../../x" would lead out of the HF cache. Its
two readers, the answer to HEAD and the listing on disk, refuse what is no plain name from the first
call of ours on. While a file is downloaded whose sha256 was announced, its ETag must be that, or no
hash: then huggingface_hub downloads the file as if we were not there.

What another version does not have is left alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from smartcache.errors import DigestMismatchError, UnsafeNameError
from smartcache.hub import layout
from smartcache.hub.places import CachePlace, LocalPlace, Place
from smartcache.hub.records import RemoteFile, Repo, announced_by, xet_of
from smartcache.hub.transfer import Followed
from smartcache.system.hashing import Hashes

_log = logging.getLogger(__name__)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
"""Hashes, and the ETags of mirrors; with what huggingface_hub appends, a name on any disk."""
_COMMIT_HEADER = "X-Repo-Commit"
_announced: dict[object, tuple[str, dict[str, str]]] = {}
"""The commits that are being downloaded, with the sha256 of files by path. No lock guards it:
each step is one operation of a dict, and a fork could leave a lock held."""
_of_thread = threading.local()
_installed: list[tuple[str, object, object]] = []
"""The functions that `uninstall` gives back: the name, the original, ours."""
_NEEDED = {
    "incomplete_path", "destination_path", "expected_size", "filename", "force_download", "etag",
}  # fmt: skip
"""What the wrapper of downloads must know."""
_WORTH_FOLLOWING = 1 << 20
"""Bytes: what is smaller is hashed as fast when it is whole."""


@contextmanager
def announcing(commit: str, files: Iterable[RemoteFile]) -> Iterator[None]:
    """Hold huggingface_hub to what the Hub has listed, in all threads, in this block."""
    apply()
    key = object()
    _announced[key] = commit, {file.path: file.etag for file in files if file.is_lfs}
    try:
        yield
    finally:
        del _announced[key]


def refuse_unsafe(name: object, what: str) -> None:
    """Raise if what the server calls a file or a commit is not a plain name."""
    if not isinstance(name, str) or _PLAIN.fullmatch(name) is None:
        shown = name if not isinstance(name, str) else name[:100]
        message = f"The server gives {what} an unsafe name: {shown!r}; it was not downloaded"
        raise UnsafeNameError(message, path=what)


def apply() -> None:
    """Make sure that the changes are in place in this process."""
    from huggingface_hub import file_download

    for name, changed in (
        ("_download_to_tmp_and_move", _answered),
        ("publish_blob_to_shared_store", _published),
        ("get_hf_file_metadata", _checked_answer),
        ("_xet_file_metadata_from_tree_cache", _checked_listing),
    ):
        original = getattr(file_download, name, None)
        if original is None or hasattr(original, "is_ours"):
            continue
        if changed is _answered and not inspect.signature(original).parameters.keys() >= _NEEDED:
            _log.debug(
                "the downloads of this huggingface_hub are not answered: it is too different"
            )
            continue
        function = functools.wraps(original)(changed(original))
        function.is_ours = True  # type: ignore[attr-defined]
        setattr(file_download, name, function)
        _installed.append((name, original, function))


def _checked_answer(read: Callable[..., object]) -> Callable[..., object]:
    def reader(*args: object, **kwargs: object) -> object:
        path = _path_in(str(kwargs.get("url", args[0] if args else "")))
        try:
            found = read(*args, **kwargs)
        except Exception as error:
            # That a file does not exist is remembered in a directory named by the commit.
            headers = getattr(getattr(error, "response", None), "headers", {})
            _check(path, None, headers.get(_COMMIT_HEADER))
            raise
        _check(path, getattr(found, "etag", None), getattr(found, "commit_hash", None))
        return found

    return reader


def _checked_listing(read: Callable[..., object]) -> Callable[..., object]:
    def reader(*args: object, **kwargs: object) -> object:
        found = read(*args, **kwargs)
        if isinstance(found, tuple) and len(found) > 2:  # noqa: PLR2004 - url, etag, commit, ...
            _check(str(kwargs.get("filename", "")), found[1], found[2])
        return found

    return reader


def _check(path: str, etag: object, commit: object) -> None:
    """Raise if a name is unsafe or not the announced one; what is missing, huggingface_hub says."""
    if commit is not None:
        refuse_unsafe(commit, f"the commit of {path}")
    if etag is None:
        return
    refuse_unsafe(etag, path)
    _of_thread.told = etag, commit
    for of, sha256s in list(_announced.values()):
        listed = sha256s.get(path, etag) if of == commit else etag
        if listed != etag and announced_by(str(etag)):
            message = f"The Hub lists {path} as {listed}, but then calls it {etag}"
            hint = "Run the download again; if this happens again, the server is broken."
            raise DigestMismatchError(message, hint=hint, path=path, listed=listed)


def _path_in(url: str) -> str:
    """Return which file of a repo an address is of: .../resolve/<revision>/<path>."""
    return unquote(urlsplit(url).path.partition("/resolve/")[2].partition("/")[2])


# answering


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A file that huggingface_hub is about to download."""

    file: RemoteFile
    place: Place
    is_forced: bool
    """It is to be fetched, whoever has the bytes."""
    download: Callable[[Path], None]
    """Lets huggingface_hub download the file to a path that is free."""
    will_be_moved: bool
    """huggingface_hub will move it from there: to its shared blob store, or, where there are no
    symlinks, into the snapshot."""

    def fetch(self, path: Path) -> Hashes | None:
        """Let huggingface_hub download to a path; return hashes of what it wrote, if there are."""
        file = self.file
        if not file.size or file.size < _WORTH_FOLLOWING:
            self.download(path)
            return None
        algorithms = ("blake3", *file.announced)
        with Followed(self.place.unfinished(file), file.etag, algorithms, file.size) as followed:
            self.download(path)
            return followed.finish(path)


Answer = Callable[[Arrival], Callable[[], None] | None]
"""Brings a file. Returns what is to be done when huggingface_hub has published it, if it does."""


class Answering:
    """Somebody who answers downloads in a block, and for which of them."""

    def __init__(
        self,
        answer: Answer,
        *,
        covers: Callable[[Place, RemoteFile], bool],
        home: Path | None,
        is_lasting: bool,
    ) -> None:
        self.covers = covers
        self.home = home
        self.thread = threading.get_ident()
        self.is_lasting = is_lasting
        """It is there in forked children too: it opens what it needs in the process that asks."""
        self._answer = answer
        self.forget_threads()

    def forget_threads(self) -> None:
        """Begin with nobody at work; in a forked child too, where no such thread is."""
        self._at_work = 0
        self._changed = threading.Condition()

    def answer(self, arrival: Arrival) -> Callable[[], None] | None:
        """Answer a download, in the thread that makes it."""
        with self._changed:
            self._at_work += 1
        try:
            return self._answer(arrival)
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait for threads of others that it is answering: what they use must not end before."""
        with self._changed:
            self._changed.wait_for(lambda: not self._at_work)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let what this thread downloads in the block be answered by this one, if it can."""
        before, _of_thread.answering = getattr(_of_thread, "answering", None), self
        try:
            yield
        finally:
            _of_thread.answering = before


_registered: list[Answering] = []
_pauses: list[object] = []


@contextmanager
def answering(
    answer: Answer,
    *,
    covers: Callable[[Place, RemoteFile], bool] = lambda _place, _file: True,
    home: Path | None = None,
    is_lasting: bool = False,
) -> Iterator[Answering]:
    """Let the downloads that are covered be answered in this block, in all threads.

    Of several that cover a file that counts which the thread has chosen, then the one at `home` in
    the repo's folder, then that of the same thread, then the last.
    """
    entry = Answering(answer, covers=covers, home=home, is_lasting=is_lasting)
    _registered.append(entry)  # first: from now on nobody takes the wrapper away
    try:
        apply()
        yield entry
    except BaseException:
        _registered.remove(entry)
        raise
    _registered.remove(entry)
    entry.wait()


@contextmanager
def pausing() -> Iterator[None]:
    """Let huggingface_hub download as it would alone in this block, in all threads."""
    entry = object()
    _pauses.append(entry)
    try:
        yield
    finally:
        _pauses.remove(entry)


def uninstall() -> None:
    """Give huggingface_hub its own functions back, unless somebody answers or has wrapped ours.

    The next call of ours puts the changes in place again.
    """
    if _registered:
        return
    if _installed:
        from huggingface_hub import file_download
    while _installed:
        name, original, ours = _installed.pop()
        if getattr(file_download, name, None) is ours:
            setattr(file_download, name, original)


def _answered(download: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(download)

    def answering(*args: object, **kwargs: object) -> None:
        _of_thread.after = None
        if not _registered or _pauses or getattr(_of_thread, "is_answering", False):
            download(*args, **kwargs)
            return
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = cast("dict[str, object]", bound.arguments)
        arrival = _arrival(download, given)
        found = None if arrival is None else _who(arrival)
        if arrival is None or found is None:
            download(*args, **kwargs)
            return
        _of_thread.is_answering = True
        try:
            _of_thread.after = found.answer(arrival)
        finally:
            _of_thread.is_answering = False

    return answering


def _who(arrival: Arrival) -> Answering | None:
    found = [each for each in list(_registered) if each.covers(arrival.place, arrival.file)]
    chosen, thread = getattr(_of_thread, "answering", None), threading.get_ident()
    folder = getattr(arrival.place, "folder", None)
    for is_meant in (
        lambda each: each is chosen,
        lambda each: each.home is not None and each.home == folder,
        lambda each: each.thread == thread,
        lambda _: True,
    ):
        near = [each for each in found if is_meant(each)]
        if near:
            return near[-1]
    return None


def _arrival(download: Callable[..., None], given: dict[str, object]) -> Arrival | None:
    """Return what is about to come; None: it is there, or nobody could prove it."""
    destination = Path(cast("Path", given["destination_path"]))
    etag, path, size = str(given["etag"]), str(given["filename"]), given["expected_size"]
    is_forced = bool(given["force_download"])
    place = _place(destination, path, etag, _commit_of(etag))
    if place is None or not announced_by(etag) or (destination.exists() and not is_forced):
        return None
    xet = getattr(given.get("xet_file_data"), "file_hash", None)
    file = RemoteFile(
        path=path, size=size if isinstance(size, int) else None, etag=etag, xet=xet_of(xet)
    )
    return Arrival(
        file=file, place=place, is_forced=is_forced,
        download=lambda to: download(**{**given, "destination_path": to}),
        will_be_moved=isinstance(place, CachePlace) and _moves(place, is_xet=xet is not None),
    )  # fmt: skip


def _commit_of(etag: str) -> str:
    """Return the commit that the Hub has named to this thread with the ETag of a file."""
    told, commit = getattr(_of_thread, "told", ("", ""))
    return str(commit or "") if told == etag else ""


def _place(destination: Path, path: str, etag: str, commit: str) -> Place | None:
    """Return where huggingface_hub puts a file: a repo of an HF cache, or a `local_dir`."""
    folder = destination.parent.parent
    repo = Repo.of_folder(folder.name) if destination.parent.name == "blobs" else None
    if repo is not None and destination.name == etag:
        return CachePlace(cache_dir=folder.parent, repo=repo, commit=commit)
    parts = layout.safe_parts(path)
    if parts is None or destination.parts[-len(parts) :] != parts:
        return None
    return LocalPlace(local_dir=destination.parents[len(parts) - 1], commit=commit)


def _moves(place: CachePlace, *, is_xet: bool) -> bool:
    """Say whether huggingface_hub moves what it has downloaded to an HF cache."""
    from huggingface_hub import file_download

    def says(name: str, *words: object, otherwise: bool) -> bool:
        function = getattr(file_download, name, None)
        return otherwise if function is None else bool(function(*words))

    if not says("are_symlinks_supported", str(place.cache_dir), otherwise=True):
        return True
    is_shared = is_xet and says("shared_blobs_enabled", otherwise=False)
    return is_shared and says("is_xet_available", otherwise=False)


def _published(publish: Callable[..., bool]) -> Callable[..., bool]:
    def publishing(*args: object, **kwargs: object) -> bool:
        after, _of_thread.after = getattr(_of_thread, "after", None), None
        if after is None:
            return publish(*args, **kwargs)
        is_shared = after is not ANSWERED and publish(*args, **kwargs)
        after()
        return is_shared

    return publishing


def ANSWERED() -> None:  # noqa: N802 - a constant: what an answer returns for a link to a blob
    """Do nothing: what was answered must not be published."""


def _forget_threads() -> None:
    """Let a forked child be answered by none that belongs to its parent's work."""
    _registered[:] = [each for each in _registered if each.is_lasting]
    for each in _registered:
        each.forget_threads()
    _pauses.clear()


os.register_at_fork(after_in_child=_forget_threads)
