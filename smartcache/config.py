"""Settings: argument > environment > config file > default, each value with its source.

This is the only module that reads `os.environ`; others ask `variable`. A value that cannot be used
raises `ConfigError` naming where it came from (argument, variable or file), because that
is where the user has to correct it. An empty variable counts as unset.

`SETTINGS` is the table of them all; docs/settings.md says the same to users.

The file is `$SMARTCACHE_CONFIG`, or `smartcache/config.toml` in `$XDG_CONFIG_HOME` or `~/.config`.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from smartcache.errors import ConfigError
from smartcache.sizes import parse_age, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_YES, _NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_MOST_THREADS = 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set. `home` is absolute; a `lock_timeout` of None waits for ever."""

    home: Path
    threads: int = field(default_factory=lambda: min(os.cpu_count() or 1, 8))
    keep_writable: bool = False
    link_min_size: int = 65_536
    lock_timeout: float | None = None
    everywhere: bool = False
    artifacts_max_size: int | None = None
    artifacts_ttl: float | None = None
    remote_max_size: int = 64 << 30
    """What a set may keep of artifacts that it reads through from a remote."""
    skip_validation: bool = False


def load_settings(**overrides: object) -> Settings:
    """Return the settings in force: argument > environment > config file > default.

    Arguments are named like the fields of `Settings` and may be written as in the file; None counts
    as not given. `lock_timeout=math.inf` (or "none") waits for ever, whatever the other sources
    say. Raises `ConfigError` naming the source of a value that cannot be used, and for unknown
    arguments and unknown keys of the config file.
    """
    values = {name: found.value for name, found in resolve(**overrides).items()}
    return Settings(**values)  # type: ignore[arg-type]  # each value went through the parser of its field


class Resolved(NamedTuple):
    """The value of a setting, and where it comes from: that is where it can be changed."""

    value: object
    source: Literal["argument", "variable", "file", "default"]
    place: str = ""
    """The name of the variable, or the path of the file."""


def resolve(**overrides: object) -> dict[str, Resolved]:
    """Return every setting with its value and its source; raises as `load_settings` does."""
    _refuse_unknown(overrides, "argument")
    path, stored = _read_file()
    _refuse_unknown(stored, f"{path}")
    found: dict[str, Resolved] = {}
    for name, setting in SETTINGS.items():
        if (value := overrides.get(name)) is not None:
            parsed = _parsed(setting.parse, value, f"argument {name}")
            found[name] = Resolved(parsed, "argument")
        elif (value := variable(setting.variable)) is not None:
            parsed = _parsed(setting.parse, value, setting.variable)
            found[name] = Resolved(parsed, "variable", setting.variable)
        elif (value := stored.get(name)) is not None:
            parsed = _parsed(setting.parse, value, f"{path}: {name}", path.parent)
            found[name] = Resolved(parsed, "file", str(path))
        else:
            found[name] = Resolved(_default_of(name), "default")
    return found


def with_home(settings: Settings | None, home: str | Path | None) -> Settings:
    """Return given settings (or those in force) with a home given beside them, which wins."""
    if settings is None:
        return load_settings(home=home)
    return settings if home is None else replace(settings, home=Path(os.path.abspath(home)))


def variable(name: str) -> str | None:
    """Return an environment variable, None if it is unset or empty."""
    return os.environ.get(name) or None


def config_file() -> Path:
    """Return where the config file is looked for, whether or not it exists."""
    named = variable("SMARTCACHE_CONFIG")
    if named is not None:
        return _parsed(_path, named, "SMARTCACHE_CONFIG")
    return _config_folder() / "config.toml"


def ignore_file() -> Path:
    """Return where the list of folders and patterns to leave alone is (`folders/programs.py`)."""
    return _config_folder() / "ignore"


def remotes_file() -> Path:
    """Return where the remotes are kept that the user has named (`remote/remotes.py`)."""
    return _config_folder() / "remotes.json"


def _config_folder() -> Path:
    return _xdg("XDG_CONFIG_HOME", ".config") / "smartcache"


def _xdg(name: str, below_home: str) -> Path:
    """Return an XDG directory; a relative value is ignored, as the XDG specification asks."""
    named = variable(name)
    return Path(named) if named and os.path.isabs(named) else _expand("~") / below_home


def _read_file() -> tuple[Path, Mapping[str, object]]:
    path = config_file()
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        if variable("SMARTCACHE_CONFIG") is None:
            return path, {}
        raise ConfigError(
            f"SMARTCACHE_CONFIG names a file that does not exist: {path}",
            hint="Create it, or unset SMARTCACHE_CONFIG.",
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason}") from None
    import tomllib  # some ms that only the owner of a config file has to pay

    try:
        return path, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _refuse_unknown(names: Iterable[str], source: str) -> None:
    """Raise for the first name that no setting has, with the nearest that one has."""
    for name in names:
        if name not in SETTINGS:
            from difflib import get_close_matches  # for the hint alone

            word = name.casefold().replace("-", "_")
            (near,) = get_close_matches(word, SETTINGS, n=1, cutoff=0)
            hint = f"Did you mean {near!r}? The settings are {', '.join(SETTINGS)}."
            raise ConfigError(f"{source}: unknown setting {name!r}", hint=hint)


def _parsed(
    parse: Callable[[object, Path], T], value: object, source: str, base: Path = Path()
) -> T:
    try:
        return parse(value, base)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", hint=error.hint) from None


def _path(value: object, base: Path) -> Path:
    """Return an absolute path: a later `chdir` must not move the store."""
    text = os.fsdecode(value) if isinstance(value, str | os.PathLike) else ""
    if not text or "\0" in text:
        raise ConfigError(f"not a path: {value!r}")
    return Path(os.path.abspath(base / _expand(text)))


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # "~user" of nobody, or no home directory at all
        raise ConfigError(
            f"{text!r} needs a home directory that cannot be found", hint="Write the path in full."
        ) from None


def _count(value: object, _base: Path) -> int:
    text = "" if isinstance(value, bool | float) else str(value).strip()
    # So long only: `int` refuses thousands of digits with an error of its own.
    if not (text.isdecimal() and len(text) < 6 and 1 <= int(text) <= _MOST_THREADS):  # noqa: PLR2004
        hint = f"Write a whole number from 1 to {_MOST_THREADS}."
        raise ConfigError(f"not such a number: {value!r}", hint=hint)
    return int(text)


def _flag(value: object, _base: Path) -> bool:
    text = str(value).strip().casefold() if isinstance(value, bool | str) else ""
    if text not in _YES | _NO:
        raise ConfigError(f"neither yes nor no: {value!r}", hint="Write true or false.")
    return text in _YES


def _size(value: object, _base: Path) -> int:
    if isinstance(value, int | str):
        return parse_size(value)
    raise ConfigError(f"not a size: {value!r}", hint='Write a size like 65536 or "64KiB".')


def _timeout(value: object, _base: Path) -> float | None:
    seconds = value
    if isinstance(value, str):
        text = value.strip().casefold()
        seconds = math.inf if text == "none" else None
        with suppress(ConfigError):
            seconds = parse_age(text).total_seconds()
        with suppress(ValueError):
            seconds = float(text)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        hint = 'Write seconds, a time like "5m", or "none" to wait forever.'
        raise ConfigError(f"not a time: {value!r}", hint=hint)
    return None if seconds == math.inf else float(seconds)


def _lifetime(value: object, base: Path) -> float | None:
    seconds = _timeout(value, base)
    if seconds == 0:
        raise ConfigError("a time of 0: nothing would be kept", hint='Write a time like "30d".')
    return seconds


def _default_of(name: str) -> object:
    """Return the value of a setting that nobody has set."""
    if name != "home":
        return getattr(Settings(home=Path()), name)
    # Not the cache directory, which people empty: the journal is there, and computed tensors.
    return _xdg("XDG_DATA_HOME", ".local/share") / "smartcache"


class Setting(NamedTuple):
    """How a setting is read, what its variable is called, and what it is for."""

    parse: Callable[[object, Path], object]
    variable: str
    text: str


SETTINGS: Mapping[str, Setting] = {
    "home": Setting(_path, "SMARTCACHE_HOME", "Where the store is."),
    "threads": Setting(_count, "SMARTCACHE_THREADS", "How many threads hash files at once."),
    "keep_writable": Setting(
        _flag, "SMARTCACHE_KEEP_WRITABLE",
        "Let `dedup` share blocks (reflinks), which keeps files writable, instead of hard links.",
    ),
    "link_min_size": Setting(
        _size, "SMARTCACHE_LINK_MIN_SIZE",
        "Copy files of repos that are smaller than this instead of linking them.",
    ),
    "lock_timeout": Setting(
        _timeout, "SMARTCACHE_LOCK_TIMEOUT",
        "How long to wait for another process: seconds, a time like `5m`, or `none`.",
    ),
    "everywhere": Setting(
        _flag, "SMARTCACHE",
        "Let `import smartcache.auto` change the loaders of diffusers and transformers.",
    ),
    "artifacts_max_size": Setting(
        _size, "SMARTCACHE_ARTIFACTS_MAX_SIZE",
        "The most that all computed tensors together may take.",
    ),
    "artifacts_ttl": Setting(
        _lifetime, "SMARTCACHE_ARTIFACTS_TTL", "How long a computed tensor is kept at most."
    ),
    "remote_max_size": Setting(
        _size, "SMARTCACHE_REMOTE_MAX_SIZE",
        "The most that a set keeps here of what it reads through from a remote.",
    ),
    "skip_validation": Setting(
        _flag, "SMARTCACHE_SKIP_VALIDATION",
        "Skip checking the source files of datasets for changes.",
    ),
}  # fmt: skip
"""Every setting, in the order in which it is shown."""
