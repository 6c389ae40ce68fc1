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
call of ours on. While a file is downloaded whose sha256 was announced, its ETag must be that.

**Patience.** It waits for ever for a server that does not answer a listing, and follows a page that
links to itself: in calls of ours requests for listings have a timeout, and no page is asked for
twice.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from smartcache.errors import DigestMismatchError, HubError, UnsafeNameError
from smartcache.hub import layout
from smartcache.hub.places import CachePlace, LocalPlace, Place, half_made
from smartcache.hub.records import RemoteFile, Repo, announced_by, xet_of
from smartcache.hub.transfer import Followed
from smartcache.system import Hashes, hash_file

_log = logging.getLogger(__name__)
_BROKEN_AGAIN = "Run the download again; if this happens again, the server is broken."
BROKEN = "The server is broken or not a Hub: check HF_ENDPOINT and the proxy."
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
"""Hashes, and the ETags of mirrors; with what huggingface_hub appends, a name on any disk."""
_SHA256 = 64
_COMMIT_HEADER = "X-Repo-Commit"
_announced: dict[object, tuple[str, dict[str, str]]] = {}
"""The commits that are being downloaded, with the hashes of their files by path. No lock guards it:
each step is one operation of a dict, and a fork could leave a lock held."""
_of_thread = threading.local()
_installed: list[tuple[object, str, object, object]] = []
"""The functions that `uninstall` gives back: whose, its name, the original, ours."""
_NEEDED = {
    "incomplete_path", "destination_path", "expected_size", "filename", "force_download", "etag",
}  # fmt: skip
"""What the wrapper of downloads must know."""
_WORTH_FOLLOWING = 1 << 20
"""Bytes: what is smaller is hashed as fast when it is whole."""
_UNSPOKEN = 1.0
"""Seconds a wait for a lock lasts before it is worth a word."""
_PATIENCE = 10.0
"""Seconds to wait for an answer, where no caller of ours has said."""


@contextmanager
def announcing(commit: str, files: Iterable[RemoteFile]) -> Iterator[None]:
    """Hold huggingface_hub to what the Hub has listed, in all threads, in this block."""
    apply()
    key = object()
    _announced[key] = commit, {file.path: file.etag for file in files}
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


@contextmanager
def saying_who(on_wait: Callable[[], None]) -> Iterator[None]:
    """Let `on_wait` be called when somebody else has huggingface_hub's lock for a while.

    Only for what this thread downloads in the block; it is called in another thread.
    """
    apply()
    _of_thread.on_wait = on_wait
    try:
        yield
    finally:
        _of_thread.on_wait = None


@contextmanager
def answered_within(seconds: float | None) -> Iterator[None]:
    """Let this thread wait no longer for an answer to a listing than this; None: the default."""
    apply()
    before = getattr(_of_thread, "patience", None)
    _of_thread.patience = seconds or _PATIENCE
    try:
        yield
    finally:
        _of_thread.patience = before


def apply() -> None:
    """Make sure that the changes are in place in this process."""
    from huggingface_hub import _local_folder, file_download, hf_api
    from huggingface_hub.utils import _pagination

    for place, name, changed in (
        (file_download, "_download_to_tmp_and_move", _answered),
        (file_download, "publish_blob_to_shared_store", _published),
        (file_download, "get_hf_file_metadata", _checked_answer),
        (file_download, "_xet_file_metadata_from_tree_cache", _checked_listing),
        (file_download, "WeakFileLock", _spoken_lock),
        (_local_folder, "WeakFileLock", _spoken_lock),
        (hf_api.HfApi, "repo_info", _impatient),
        (hf_api, "paginate", _ending),
        (hf_api, "_paginate_pages", _ending),
        (_pagination, "http_backoff", _asking_once),
        (_pagination, "_get_next_page", _new_page),
    ):
        original = getattr(place, name, None)
        if original is None or hasattr(original, "is_ours"):
            continue
        if changed is _answered and not inspect.signature(original).parameters.keys() >= _NEEDED:
            _log.debug(
                "the downloads of this huggingface_hub are not answered: it is too different"
            )
            continue
        function = functools.wraps(original)(changed(original))
        function.is_ours = True  # type: ignore[attr-defined]
        setattr(place, name, function)
        _installed.append((place, name, original, function))


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


_Lock = Callable[..., AbstractContextManager[object]]


def _spoken_lock(lock: _Lock) -> _Lock:
    @contextmanager
    def locking(*args: object, **kwargs: object) -> Iterator[object]:
        on_wait = getattr(_of_thread, "on_wait", None)
        timer = None if on_wait is None else threading.Timer(_UNSPOKEN, on_wait)
        if timer is not None:
            timer.daemon = True
            timer.start()
        with ExitStack() as stack:
            try:
                held = stack.enter_context(lock(*args, **kwargs))
            finally:
                if timer is not None:
                    timer.cancel()
            yield held

    return locking


def _impatient(ask: Callable[..., object]) -> Callable[..., object]:
    def asking(*args: object, **kwargs: object) -> object:
        patience = getattr(_of_thread, "patience", None)
        if patience is not None and kwargs.get("timeout") is None:
            kwargs["timeout"] = patience
        return ask(*args, **kwargs)

    return asking


def _asking_once(ask: Callable[..., object]) -> Callable[..., object]:
    """Ask a silent server once: five times more, with pauses, would take minutes."""
    from huggingface_hub.utils import _http

    known: tuple[type[Exception], ...] = getattr(_http, "_DEFAULT_RETRY_ON_EXCEPTIONS", ())
    others = tuple(kind for kind in known if "Timeout" not in kind.__name__)
    asking = _impatient(ask)

    def once(*args: object, **kwargs: object) -> object:
        if getattr(_of_thread, "patience", None) is not None:
            kwargs = {"retry_on_exceptions": others, **kwargs}
        return asking(*args, **kwargs)

    return once


def _ending(paginate: Callable[..., Iterable[object]]) -> Callable[..., Iterator[object]]:
    is_timed = "timeout" in inspect.signature(paginate).parameters

    def paginating(*args: object, **kwargs: object) -> Iterator[object]:
        patience = getattr(_of_thread, "patience", None)
        if is_timed and patience is not None and kwargs.get("timeout") is None:
            kwargs["timeout"] = patience
        entries = iter(paginate(*args, **kwargs))
        pages: set[str] = set()
        while True:
            _of_thread.pages = pages
            try:
                entry = next(entries)
            except StopIteration:
                return
            finally:
                _of_thread.pages = None
            yield entry

    return paginating


def _new_page(find: Callable[..., str | None]) -> Callable[..., str | None]:
    def finding(*args: object, **kwargs: object) -> str | None:
        page, pages = find(*args, **kwargs), getattr(_of_thread, "pages", None)
        if page is not None and pages is not None:
            if page in pages:
                message = f"The Hub's listing has no end: {page[:200]} keeps coming back"
                raise HubError(message, hint=BROKEN)
            pages.add(page)
        return page

    return finding


def _check(path: str, etag: object, commit: object) -> None:
    """Raise if a name is unsafe or not the announced one; what is missing, huggingface_hub says."""
    if commit is not None:
        refuse_unsafe(commit, f"the commit of {path}")
    if etag is None:
        return
    refuse_unsafe(etag, path)
    _of_thread.told = etag, commit
    wanted = [each for each in _listed(path, commit) if len(each) == _SHA256]
    if any(each != etag for each in wanted):
        message = f"The Hub lists {path} as {wanted[0]}, but then calls it {etag}"
        raise DigestMismatchError(message, hint=_BROKEN_AGAIN, path=path, listed=wanted[0])


def _listed(path: str, commit: object) -> list[str]:
    """Return the hashes that the Hub has listed for a file, as far as downloads announce them."""
    known = list(_announced.values())
    return [files[path] for of, files in known if of == commit and path in files]


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
    while _installed:
        place, name, original, ours = _installed.pop()
        if getattr(place, name, None) is ours:
            setattr(place, name, original)


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
        if _is_unnamed(given):
            _prove_listed(download, given)
            return
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


def _is_unnamed(given: dict[str, object]) -> bool:
    """Say whether a file has an ETag that is no hash, but a listing that has one."""
    etag = str(given["etag"])
    return not announced_by(etag) and bool(_listed(str(given["filename"]), _commit_of(etag)))


def _prove_listed(download: Callable[..., None], given: dict[str, object]) -> None:
    """Let a file come that only the listing has a hash of, as behind some mirrors."""
    path, destination = str(given["filename"]), Path(cast("Path", given["destination_path"]))
    (etag, *_) = _listed(path, _commit_of(str(given["etag"])))
    part = half_made(Path(cast("Path", given["incomplete_path"])).parent, etag)
    try:
        download(**{**given, "destination_path": part})
        ((algorithm, wanted),) = announced_by(etag).items()
        if hash_file(part, (algorithm,))[0].get(algorithm) != wanted:
            message = f"The Hub lists {path} as {etag}, but sends other bytes"
            raise DigestMismatchError(message, hint=_BROKEN_AGAIN, path=path, listed=etag)
        os.replace(part, destination)
    finally:
        part.unlink(missing_ok=True)


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
