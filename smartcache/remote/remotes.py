"""The remotes: the tiers that a user has given names.

They are kept beside the settings, in `remotes.json`, which outlives any store, moved or ejected:

    {"format": 1, "remotes": {"nas": {"url": "file:///mnt/nas/smartcache", "options": {},
                                      "creates": true, "ranges": true, "writes": true}}}

What the server was seen to do, or to allow, is kept with it. Credentials are not: an option or URL
with one is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from smartcache.config import remotes_file
from smartcache.errors import ConfigError, TierError
from smartcache.remote.tier import Abilities, Tier, check_options, check_url
from smartcache.system.ownfiles import atomically

_FORMAT = 1
_MOST_FILE = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A tier as it is kept: where it is, and what its server was seen to do."""

    name: str
    url: str
    options: Mapping[str, str] = field(default_factory=dict)
    creates: bool = True
    ranges: bool = True
    writes: bool = True
    """This user may push there, and not only pull."""

    def tier(self) -> Tier:
        """Return the tier; nothing is asked of it yet."""
        abilities = Abilities(creates=self.creates, ranges=self.ranges)
        return Tier(self.name, self.url, dict(self.options), abilities)


class Remotes:
    """The remotes of this user. A change by another process is seen at the next look."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = remotes_file() if path is None else path
        self._opened: dict[str, tuple[Remote, Tier]] = {}

    def all(self) -> list[Remote]:
        """Return the remotes, by name; ConfigError if the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                text = file.read(_MOST_FILE)
        except FileNotFoundError:
            return []
        try:
            document = json.loads(text)
            version = document["format"]
            found = [_remote(name, entry) for name, entry in document["remotes"].items()]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            hint = "Correct it, or remove it and add the remotes again."
            raise ConfigError(f"{self.path} cannot be read: {error}", hint=hint) from error
        if version != _FORMAT:
            message = f"{self.path} has format {version!r}; this smartcache reads {_FORMAT}"
            raise ConfigError(message, hint="Update smartcache.")
        return sorted(found, key=lambda each: each.name)

    def get(self, name: str) -> Remote:
        """Return a remote; ConfigError if there is none of that name."""
        found = {each.name: each for each in self.all()}
        if name not in found:
            known = ", ".join(found) or "none yet: 'smartcache remote add NAME URL' makes one"
            raise ConfigError(f"There is no remote {name!r}", hint=f"There is {known}.")
        return found[name]

    def add(self, name: str, url: str, options: Mapping[str, str] | None = None) -> Remote:
        """Mark a place as a tier, find out what its server does, and keep it under a name.

        Who may not write there gets one to read from, if it is a tier already. TierError if it
        cannot be used. A remote that is there already is tried again.
        """
        if not _NAME.fullmatch(name):
            hint = "Letters, digits, dots, - and _ make a name, such as nas or team-bucket."
            raise ConfigError(f"{name!r} cannot be the name of a remote", hint=hint)
        place = url if "://" in url or not url else os.path.abspath(os.path.expanduser(url))
        wanted = Remote(name=name, url=check_url(place), options=check_options(options or {}))
        self._refuse_other(wanted)
        writes = True
        try:
            tier = wanted.tier().begin()
        except TierError as error:
            try:
                tier, writes = wanted.tier().for_reading(), False
            except TierError:
                raise error from None
        made = Remote(
            name=name, url=wanted.url, options=wanted.options,
            creates=tier.abilities.creates, ranges=tier.abilities.ranges, writes=writes,
        )  # fmt: skip
        with self._changing() as remotes:
            self._refuse_other(made)
            remotes[name] = made
        return made

    def remove(self, name: str) -> Remote:
        """Forget a remote; nothing is removed there."""
        with self._changing() as remotes:
            gone = self.get(name)
            del remotes[name]
        return gone

    def tier(self, name: str) -> Tier:
        """Return the tier of a remote."""
        return self._tier(self.get(name))

    def tiers(self) -> list[Tier]:
        """Return the tiers of all remotes."""
        return [self._tier(each) for each in self.all()]

    def _tier(self, remote: Remote) -> Tier:
        known, tier = self._opened.get(remote.name, (None, None))
        if tier is None or known != remote:
            tier = remote.tier()
            self._opened[remote.name] = remote, tier
        return tier

    def _refuse_other(self, wanted: Remote) -> None:
        for each in self.all():
            if each.name == wanted.name and (each.url, dict(each.options)) != (
                wanted.url,
                dict(wanted.options),
            ):
                hint = f"Choose another name, or forget it: smartcache remote rm {each.name}"
                raise ConfigError(f"{each.name} is {each.url} already", hint=hint)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Remote]]:
        """Give the remotes to be changed; at the end of the block they are written, in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", mode=0o600):
            remotes = {each.name: each for each in self.all()}
            yield remotes
            entries = {
                name: {
                    "url": each.url, "options": dict(each.options), "creates": each.creates,
                    "ranges": each.ranges, "writes": each.writes,
                }
                for name, each in sorted(remotes.items())
            }  # fmt: skip
            text = json.dumps({"format": _FORMAT, "remotes": entries}, indent=1) + "\n"
            with atomically(self.path) as file:
                file.write(text.encode())


def _remote(name: str, entry: Mapping[str, object]) -> Remote:
    options = entry["options"]
    if not _NAME.fullmatch(name) or not isinstance(options, dict):
        raise ValueError(f"{name!r} is not a remote")
    return Remote(
        name=name, url=check_url(str(entry["url"])),
        options=check_options({str(key): str(value) for key, value in options.items()}),
        creates=entry["creates"] is True, ranges=entry["ranges"] is True,
        writes=entry["writes"] is True,
    )  # fmt: skip
