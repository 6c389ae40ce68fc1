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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast

from smartcache.errors import ConfigError
from smartcache.sizes import parse_age, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_MOST_THREADS = 1024

_T = TypeVar("_T")


def _default_threads() -> int:
    return min(os.cpu_count() or 1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set. `home` is absolute; a `lock_timeout` of None waits for ever."""

    home: Path
    threads: int = field(default_factory=_default_threads)
    keep_writable: bool = False
    link_min_size: int = 65_536
    lock_timeout: float | None = None
    everywhere: bool = False
    artifacts_max_size: int | None = None
    artifacts_ttl: float | None = None
    remote_max_size: int = 64 << 30
    """What a set may keep of artifacts that it reads through from a tier."""
    skip_validation: bool = False


class Overrides(TypedDict, total=False):
    """The arguments of `load_settings`; None counts as not given."""

    home: str | Path | None
    threads: int | str | None
    keep_writable: bool | str | None
    link_min_size: int | str | None
    lock_timeout: float | str | None
    everywhere: bool | str | None
    artifacts_max_size: int | str | None
    artifacts_ttl: float | str | None
    remote_max_size: int | str | None
    skip_validation: bool | str | None


def load_settings(**overrides: Unpack[Overrides]) -> Settings:
    """Return the settings in force: argument > environment > config file > default.

    `lock_timeout=math.inf` (or "none") waits for ever, whatever the other sources say. Raises
    `ConfigError` naming the source of a value that cannot be used, and for unknown arguments and
    unknown keys of the config file.
    """
    values = {name: found.value for name, found in resolve(**overrides).items()}
    return Settings(**values)  # type: ignore[arg-type]  # each value went through the parser of its field


Source = Literal["argument", "variable", "file", "default"]


class Resolved(NamedTuple):
    """The value of a setting, and where it comes from: that is where it can be changed."""

    value: object
    source: Source
    place: str = ""
    """The name of the variable, or the path of the file."""


def resolve(**overrides: Unpack[Overrides]) -> dict[str, Resolved]:
    """Return every setting with its value and its source; raises as `load_settings` does."""
    given = cast("Mapping[str, object]", overrides)
    _refuse_unknown(given, "argument")
    path, stored = _read_file()
    _refuse_unknown(stored, f"{path}")
    found: dict[str, Resolved] = {}
    for name, setting in SETTINGS.items():
        parse, variable_name = setting.parse, setting.variable
        if (value := given.get(name)) is not None:
            parsed = _parsed(parse, value, f"argument {name}", Path())
            found[name] = Resolved(parsed, "argument")
        elif (value := variable(variable_name)) is not None:
            parsed = _parsed(parse, value, variable_name, Path())
            found[name] = Resolved(parsed, "variable", variable_name)
        elif (value := stored.get(name)) is not None:
            parsed = _parsed(parse, value, f"{path}: {name}", path.parent)
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
        return _parsed(_path, named, "SMARTCACHE_CONFIG", Path())
    return _xdg("XDG_CONFIG_HOME", ".config") / "smartcache" / "config.toml"


def ignore_file() -> Path:
    """Return where the list of folders and patterns to leave alone is (`folders/ignored.py`)."""
    return _xdg("XDG_CONFIG_HOME", ".config") / "smartcache" / "ignore"


def remotes_file() -> Path:
    """Return where the remotes are kept that the user has named (`remote/remotes.py`)."""
    return _xdg("XDG_CONFIG_HOME", ".config") / "smartcache" / "remotes.json"


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
    known = list(SETTINGS)
    for name in names:
        if name in known:
            continue
        from difflib import get_close_matches  # for the hint alone

        near = get_close_matches(name.casefold().replace("-", "_"), known, n=1, cutoff=0)
        raise ConfigError(
            f"{source}: unknown setting {name!r}",
            hint=f"Did you mean {near[0]!r}? The settings are {', '.join(known)}.",
        )


def _parsed(parse: Callable[[object, Path], _T], value: object, source: str, base: Path) -> _T:
    try:
        return parse(value, base)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", hint=error.hint) from None


def _path(value: object, base: Path) -> Path:
    """Return an absolute path: a later `chdir` must not move the store."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"not a path: {value!r}")
    text = os.fsdecode(value)
    if "\0" in text:
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
    hint = f"Write a whole number from 1 to {_MOST_THREADS}."
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ConfigError(f"not a number: {value!r}", hint=hint)
        number = int(value)
    except ValueError:
        raise ConfigError(f"not a number: {value!r}", hint=hint) from None
    if not 1 <= number <= _MOST_THREADS:
        raise ConfigError(f"out of range: {number}", hint=hint)
    return number


def _flag(value: object, _base: Path) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().casefold() if isinstance(value, str) else None
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ConfigError(f"neither yes nor no: {value!r}", hint="Write true or false.")


def _size(value: object, _base: Path) -> int:
    if isinstance(value, int | str):
        return parse_size(value)
    raise ConfigError(f"not a size: {value!r}", hint='Write a size like 65536 or "64KiB".')


def _timeout(value: object, _base: Path) -> float | None:
    hint = 'Write seconds, a time like "5m", or "none" to wait forever.'
    if isinstance(value, str):
        value = _seconds(value.strip().casefold(), hint)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"not a time: {value!r}", hint=hint)
    if math.isnan(value) or value < 0:
        raise ConfigError(f"not a time to wait: {value!r}", hint=hint)
    return None if value == math.inf else float(value)


def _lifetime(value: object, base: Path) -> float | None:
    seconds = _timeout(value, base)
    if seconds == 0:
        raise ConfigError("a time of 0: nothing would be kept", hint='Write a time like "30d".')
    return seconds


def _seconds(text: str, hint: str) -> float:
    if text == "none":
        return math.inf
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_age(text).total_seconds()
    except ConfigError:
        raise ConfigError(f"not a time: {text!r}", hint=hint) from None


def _xdg(name: str, below_home: str) -> Path:
    """Return an XDG directory; a relative value is ignored, as the XDG specification asks."""
    named = variable(name)
    if named is not None and os.path.isabs(named):
        return Path(named)
    return _expand("~") / below_home


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
    "threads": Setting(
        _count, "SMARTCACHE_THREADS",
        "How many threads hash files at once.",
    ),
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
        _lifetime, "SMARTCACHE_ARTIFACTS_TTL",
        "How long a computed tensor is kept at most.",
    ),
    "remote_max_size": Setting(
        _size, "SMARTCACHE_REMOTE_MAX_SIZE",
        "The most that a set keeps here of what it reads through from a tier.",
    ),
    "skip_validation": Setting(
        _flag, "SMARTCACHE_SKIP_VALIDATION",
        "Take it that the sources of datasets are as they were, and do not look.",
    ),
}  # fmt: skip
"""Every setting, in the order in which it is shown."""
