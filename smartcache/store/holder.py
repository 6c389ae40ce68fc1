"""What a layer keeps in the store besides blobs, as `df`, `prune` and `verify` see it.

The hub and the folders hold blobs, as owners: the store measures, prunes and verifies those by
itself. Artifacts lie in folders of their own whose form the store does not know, so their layer
gives a `Holder`, and whoever shows a store combines the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from smartcache.progress import Progress, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that a holder keeps, such as a set of artifacts; in bytes but for `items`."""

    name: str
    items: int
    live: int
    """What is wanted."""
    on_disk: int
    reclaimable: int
    """What `prune` would free: past its time, or dead."""
    used_at: datetime | None = None
    problem: str = ""
    """Why nothing more is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderUsage:
    """What a holder takes, part by part."""

    parts: tuple[Part, ...]

    @property
    def items(self) -> int:
        """How many things are kept in all parts."""
        return sum(part.items for part in self.parts)

    @property
    def live(self) -> int:
        """Bytes that are wanted."""
        return sum(part.live for part in self.parts)

    @property
    def on_disk(self) -> int:
        """Bytes on the disk."""
        return sum(part.on_disk for part in self.parts)

    @property
    def reclaimable(self) -> int:
        """Bytes that `prune` would free."""
        return sum(part.reclaimable for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeable:
    """What of a part would be freed, and why."""

    name: str
    reason: str
    items: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderResult:
    """What was freed."""

    items: int = 0
    freed_size: int = 0
    """What the filesystem has given back."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderPlan:
    """What would be freed: nothing that anybody wants."""

    victims: tuple[Freeable, ...]
    warnings: tuple[str, ...] = ()
    _execute: Callable[[Progress], HolderResult] = field(repr=False, compare=False)

    @property
    def items(self) -> int:
        """How many things would go."""
        return sum(victim.items for victim in self.victims)

    @property
    def freed_size(self) -> int:
        """The bytes that are expected to come back."""
        return sum(victim.size for victim in self.victims)

    def execute(self, progress: Progress = silent) -> HolderResult:
        """Free it, each looked at again right before."""
        return self._execute(progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What verifying a part has found."""

    name: str
    items: int = 0
    read_size: int = 0
    damage: tuple[str, ...] = ()
    """A phrase for each thing that is not as it was put."""
    damaged: tuple[str, ...] = ()
    """Names of the items that are lost."""
    cure: str = ""
    """What helps against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderReport:
    """What verifying has found, part by part."""

    parts: tuple[PartReport, ...]

    @property
    def has_damage(self) -> bool:
        """Whether anything is not as it was put."""
        return any(part.damage for part in self.parts)


class Holder(Protocol):
    """A layer that keeps something in the store besides blobs."""

    @property
    def noun(self) -> str:
        """What its parts are called: "artifact set"."""
        ...

    @property
    def item(self) -> str:
        """What is in a part: "artifact"."""
        ...

    def usage(self) -> HolderUsage:
        """Return what it takes."""
        ...

    def plan_prune(self) -> HolderPlan:
        """Plan to free what nobody wants: what is past its time, and dead room."""
        ...

    def verify(self, *, full: bool = False, progress: Progress = silent) -> HolderReport:
        """Check everything that shows without reading; with `full` every byte."""
        ...
