"""The places where smartcache steps into huggingface_hub.

huggingface_hub names blobs, locks and unfinished files by the ETag of a file, and directories by
the commit, as the server sends them: "../../x" would lead out of the HF cache. Its two readers, the
answer to HEAD and the listing on disk, refuse what is no plain name from the first call of ours on.
While a file is downloaded whose sha256 was announced, its ETag must be that.

It downloads a file under a lock. What we do about the same file that may have to wait is done
inside that lock, in the same thread: whoever waits for huggingface_hub holds nothing of ours, so
that no two programs can wait for each other.

It waits for ever for a server that does not answer a listing, and follows a page that links to
itself: requests for listings have a timeout, and no page is asked for twice.

What another version does not have is left alone.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from urllib.parse import unquote, urlsplit

from smartcache.errors import DigestMismatchError, HubError, UnsafeNameError
from smartcache.hub.records import RemoteFile

BROKEN = "The server is broken or not a Hub: check HF_ENDPOINT and the proxy."
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
"""Hashes, and the ETags of mirrors; with what huggingface_hub appends, a name on any disk."""
_COMMIT_HEADER = "X-Repo-Commit"
_announced: dict[object, tuple[str, dict[str, str]]] = {}
"""The commits that are being downloaded, with the sha256 of their files by path. No lock guards it:
each step is one operation of a dict, and a fork could leave a lock held."""
_of_thread = threading.local()
_UNSPOKEN = 1.0
"""Seconds a wait for a lock lasts before it is worth a word."""
_PATIENCE = 10.0
"""Seconds to wait for an answer, where no caller of ours has said."""


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


@contextmanager
def inside_lock(
    block: AbstractContextManager[object], on_wait: Callable[[], None]
) -> Iterator[None]:
    """Enter a block when huggingface_hub has its lock for the next file, and leave it before that.

    Only for what this thread downloads. An error of the block ends the download. `on_wait` is
    called, in another thread, when somebody else has the lock for a while.
    """
    apply()
    _of_thread.block, _of_thread.on_wait = block, on_wait
    try:
        yield
    finally:
        _of_thread.block = _of_thread.on_wait = None


@contextmanager
def answered_within(seconds: float | None) -> Iterator[None]:
    """Let this thread wait no longer for an answer to a listing than this; None: the default."""
    apply()
    before = getattr(_of_thread, "patience", _PATIENCE)
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
        (file_download, "get_hf_file_metadata", _checked_answer),
        (file_download, "_xet_file_metadata_from_tree_cache", _checked_listing),
        (file_download, "WeakFileLock", _shared_lock),
        (_local_folder, "WeakFileLock", _spoken_lock),
        (hf_api.HfApi, "repo_info", _impatient),
        (hf_api, "paginate", _ending),
        (hf_api, "_paginate_pages", _ending),
        (_pagination, "http_backoff", _asking_once),
        (_pagination, "_get_next_page", _new_page),
    ):
        original = getattr(place, name, None)
        if original is not None and not hasattr(original, "is_ours"):
            function = functools.wraps(original)(changed(original))
            function.is_ours = True  # type: ignore[attr-defined]
            setattr(place, name, function)


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


def _shared_lock(lock: _Lock) -> _Lock:
    spoken = _spoken_lock(lock)

    @contextmanager
    def locking(*args: object, **kwargs: object) -> Iterator[object]:
        with spoken(*args, **kwargs) as held:
            block, _of_thread.block = getattr(_of_thread, "block", None), None
            with block or nullcontext():
                yield held

    return locking


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
        if kwargs.get("timeout") is None:
            kwargs["timeout"] = getattr(_of_thread, "patience", _PATIENCE)
        return ask(*args, **kwargs)

    return asking


def _asking_once(ask: Callable[..., object]) -> Callable[..., object]:
    """Ask a silent server once: five times more, with pauses, would take minutes."""
    from huggingface_hub.utils import _http

    known: tuple[type[Exception], ...] = getattr(_http, "_DEFAULT_RETRY_ON_EXCEPTIONS", ())
    others = tuple(kind for kind in known if "Timeout" not in kind.__name__)
    asking = _impatient(ask)
    return lambda *args, **kwargs: asking(*args, **{"retry_on_exceptions": others, **kwargs})


def _ending(paginate: Callable[..., Iterable[object]]) -> Callable[..., Iterator[object]]:
    def paginating(*args: object, **kwargs: object) -> Iterator[object]:
        if kwargs.get("timeout") is None:
            kwargs["timeout"] = getattr(_of_thread, "patience", _PATIENCE)
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
    known = list(_announced.values())
    wanted = [files[path] for of, files in known if of == commit and path in files]
    if any(each != etag for each in wanted):
        message = f"The Hub lists {path} as {wanted[0]}, but then calls it {etag}"
        hint = "Run the download again; if this happens again, the server is broken."
        raise DigestMismatchError(message, hint=hint, path=path, listed=wanted[0])


def _path_in(url: str) -> str:
    """Return which file of a repo an address is of: .../resolve/<revision>/<path>."""
    return unquote(urlsplit(url).path.partition("/resolve/")[2].partition("/")[2])
