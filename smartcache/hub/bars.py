"""How far a download is: one bar over all bytes that are fetched or read, and a way to stop.

huggingface_hub tells a progress bar class about every chunk it has received. The class made here
passes that on to one bar for all files, and raises when the download is no longer wanted, which is
the only moment at which a running transfer can be ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Self

from smartcache.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator


class StoppedError(KeyboardInterrupt):
    """The download was interrupted; it never leaves this package.

    For huggingface_hub it is a Ctrl-C in the thread that downloads: it ends Xet transfers.
    """


class _Part:
    """What huggingface_hub takes as the progress bar of one file."""

    advance: Callable[[int], None]
    arrived: Callable[[int], None]
    is_stopping: threading.Event

    def __init__(self, *args: object, initial: int = 0, **options: object) -> None:
        del args, options
        self.n = 0
        self.total: int | None = None
        if initial:  # of an earlier attempt
            self.n = initial
            self.advance(initial)

    def update(self, n: float | None = 1) -> None:
        """Count bytes that were written."""
        self.update_transfer()
        self.n += int(n or 0)
        self.advance(int(n or 0))
        self.arrived(int(n or 0))

    def update_transfer(self, n: float | None = 1) -> None:
        """Hear of bytes that came (Xet), which are not counted a second time."""
        del n
        if self.is_stopping.is_set():
            raise StoppedError

    def close(self) -> None:
        """Do nothing: the bar of all files goes on."""

    refresh = reset = close

    def set_postfix_str(self, *args: object, **options: object) -> None:
        """Show nothing of a single file."""

    set_description = set_description_str = set_postfix = set_postfix_str
    set_transfer_postfix_str = set_postfix_str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def bar_class(
    advance: Callable[[int], None], arrived: Callable[[int], None], is_stopping: threading.Event
) -> type:
    """Return a class that huggingface_hub takes as a progress bar for one file.

    `advance` is told of all bytes of the file, `arrived` of those that come now.
    """
    members = {
        "advance": staticmethod(advance), "arrived": staticmethod(arrived),
        "is_stopping": is_stopping,
    }  # fmt: skip
    return type("Part", (_Part,), members)


def hidden_class() -> type:
    """Return a progress bar class of tqdm that shows nothing."""
    from tqdm.auto import tqdm

    class Hidden(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Hidden


def bringing(
    fetched: Sequence[str],
    read: Sequence[str],
    size: int,
    progress: Progress | None,
    tqdm_class: type | None,
) -> AbstractContextManager[Callable[[int], None]]:
    """Show one bar for files to fetch and files of this disk to read, given by name.

    The block gets a function that advances it by bytes.
    """
    verb = "Fetching and hashing" if fetched and read else "Fetching" if fetched else "Hashing"
    names = [*fetched, *read]
    label = f"{verb} {names[0] if len(names) == 1 else f'{len(names):,} files'}"
    if not names:
        label = "Linking files"
    if progress is not None:
        return _own_bar(label, size, progress)
    return _hub_bar(label, size, tqdm_class)


@contextmanager
def _own_bar(label: str, size: int, progress: Progress) -> Iterator[Callable[[int], None]]:
    with progress(label, size, "bytes") as job:
        yield job.advance


@contextmanager
def _hub_bar(label: str, size: int, tqdm_class: type | None) -> Iterator[Callable[[int], None]]:
    from huggingface_hub.utils import tqdm as hub_bar  # type: ignore[attr-defined]

    make = tqdm_class or hub_bar
    # None: off where no terminal watches, as huggingface_hub's own bars are.
    options = {} if tqdm_class is not None else {"disable": None}
    gate = threading.Lock()
    with make(desc=label, total=size, unit="B", unit_scale=True, **options) as bar:

        def advance(count: int) -> None:
            with gate:
                bar.update(count)

        yield advance
