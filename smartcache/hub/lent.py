"""What was lent to a repo's cache and is not yet settled, so that a killed process leaves nothing.

A loan is noted with the batches that placed its links. Whoever finds the note of a process that is
dead settles it: links that a snapshot uses by now stay, all others go.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from filelock import FileLock, Timeout

from smartcache.hub import tree
from smartcache.hub.snapshot import used_names
from smartcache.store import Store, withdraw
from smartcache.system import reached

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Loan:
    """Names of blobs that were lent, and where their placement is recorded."""

    key: str
    batches: dict[str, str] = field(default_factory=dict)
    """Root of a store -> the batch of its journal."""
    names: list[str] = field(default_factory=list)
    copies: dict[str, int] = field(default_factory=dict)
    """Names of copies that are no link of any store, and their inodes."""


class Settled(NamedTuple):
    """What became of a loan: names that are used, that were taken back, that could not be."""

    used: set[str]
    taken: set[str]
    left: set[str]


class Loans:
    """The loans to one repo folder of an HF cache. All of it happens under the folder's lock."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.paths: dict[str, list[str]] = {}
        """Where snapshots would show a blob, by its name, as far as that is known."""
        self._store = store
        self._index = store.volume.index
        self.folder = folder
        self._beginning = f"loan:{blake3(os.fsencode(folder)).hexdigest()[:32]}:"

    def new(self) -> Loan:
        """Return an empty loan."""
        return Loan(key=f"{self._beginning}{secrets.token_hex(8)}")

    def note(self, loan: Loan) -> None:
        """Write down what is going to be lent, before it is."""
        value = {"batches": loan.batches, "names": loan.names, "copies": loan.copies}
        self._index.set_note(loan.key, json.dumps(value, separators=(",", ":")))

    def unsettled(self) -> list[Loan]:
        """Return the loans of processes that have died: who has the lock has no rival."""
        return [_parse(key, self._index.note(key)) for key in self._index.notes(self._beginning)]

    def settle(self, loan: Loan) -> Settled:
        """Take back what no snapshot uses; what cannot be taken back now stays noted."""
        used = used_names(self.folder) & set(loan.names)
        taken = self._take_back(loan, self._free(set(loan.names) - used))
        reached("loan: taken back")
        blobs = self.folder / "blobs"
        left = {name for name in loan.names if os.path.lexists(blobs / name)} - used
        loan.names = sorted(left)
        if left:
            self.note(loan)
        else:
            self._index.set_note(loan.key, None)
        return Settled(used=used, taken=taken, left=left)

    def _take_back(self, loan: Loan, names: set[str]) -> set[str]:
        blobs = self.folder / "blobs"
        paths = {blobs / name for name in names}
        stores = {str(each.root): each for each in self._store.stores()}
        gone: set[str] = set()
        for root, batch in loan.batches.items():
            store = stores.get(root)
            if store is not None:
                taken = withdraw(store.volume, batch, paths, self._is_wanted)
                gone.update(path.name for path in taken)
        for name in names & loan.copies.keys():
            with suppress(OSError):
                is_ours = os.lstat(blobs / name).st_ino == loan.copies[name]
                if is_ours and not self._is_wanted(blobs / name):
                    os.unlink(blobs / name)
                    gone.add(name)
        return gone

    def _is_wanted(self, blob: Path) -> bool:
        """Say whether a snapshot has come to show a blob since it was last looked for."""
        return any(
            os.path.lexists(os.path.join(self.folder, "snapshots", commit, path))
            for path in self.paths.get(blob.name, ())
            for commit in tree.commits_of(self.folder)
        )

    def _free(self, names: set[str]) -> set[str]:
        """Return the names that no huggingface_hub is busy with.

        The lock is not kept: whoever saw the blob and waits for the lock would point at nothing
        when it gets it.
        """
        directory = self.folder.parent / ".locks" / self.folder.name
        free: set[str] = set()
        for name in names:
            path = directory / f"{name}.lock"
            try:
                if path.exists():
                    with FileLock(path, timeout=0):
                        pass
            except (Timeout, NotImplementedError, OSError) as error:
                _log.debug("%s stays lent: %s", name, error)
            else:
                free.add(name)
        return free


def _parse(key: str, note: str | None) -> Loan:
    loan = Loan(key=key)
    with suppress(ValueError, TypeError, AttributeError):
        value = json.loads(note or "{}")
        loan.batches = {str(root): str(batch) for root, batch in value["batches"].items()}
        loan.names = [str(name) for name in value["names"] if "/" not in str(name)]
        loan.copies = {str(name): int(inode) for name, inode in value["copies"].items()}
    return loan
