"""Settings: argument > environment > config file > default, each value with its source.

This is the only module that reads `os.environ`; others ask `variable`. A value that cannot be used
raises `ConfigError` naming where it came from (argument, variable or file), because that
is where the user has to correct it. An empty variable counts as unset.

    argument, file key   variable                    value
    home                 SMARTCACHE_HOME             a path; in the file, relative to the file
    threads              SMARTCACHE_THREADS          a number from 1
    keep_writable        SMARTCACHE_KEEP_WRITABLE    1/0, true/false, yes/no, on/off
    link_min_size        SMARTCACHE_LINK_MIN_SIZE    a size: 65536, "64KiB"
    lock_timeout         SMARTCACHE_LOCK_TIMEOUT     seconds, "5m", or "none": wait for ever
    everywhere           SMARTCACHE                  as keep_writable; `import smartcache.auto` asks
    artifacts_max_size   SMARTCACHE_ARTIFACTS_MAX_SIZE  a size: bound of all artifacts together
    artifacts_ttl        SMARTCACHE_ARTIFACTS_TTL    as lock_timeout: no artifact lives longer
    shared_stores        SMARTCACHE_SHARED_STORES    paths, as PATH has them; in the file, a list
    shared_store_owners  SMARTCACHE_SHARED_STORE_OWNERS  users by name or number: "ann,1002", a list

The file is `$SMARTCACHE_CONFIG`, or `smartcache/config.toml` in `$XDG_CONFIG_HOME` or `~/.config`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack, cast

from smartcache.errors import ConfigError
from smartcache.sizes import parse_age, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
    shared_stores: tuple[Path, ...] = ()
    """Stores that others have published, to take bytes from."""
    shared_store_owners: tuple[int, ...] = ()
    """The users besides root whose published stores may be used."""


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
    shared_stores: Sequence[str | Path] | str | None
    shared_store_owners: Sequence[str | int] | str | None


def load_settings(**overrides: Unpack[Overrides]) -> Settings:
    """Return the settings in force: argument > environment > config file > default.

    `lock_timeout=math.inf` (or "none") waits for ever, whatever the other sources say. Raises
    `ConfigError` naming the source of a value that cannot be used, and for unknown arguments and
    unknown keys of the config file.
    """
    given = cast("Mapping[str, object]", overrides)
    _refuse_unknown(given, "argument")
    path, stored = _read_file()
    _refuse_unknown(stored, f"{path}")
    values: dict[str, object] = {}
    for name, parse in _PARSERS.items():
        variable_name = _VARIABLES.get(name, f"SMARTCACHE_{name.upper()}")
        if (value := given.get(name)) is not None:
            values[name] = _parsed(parse, value, f"argument {name}", Path())
        elif (value := variable(variable_name)) is not None:
            values[name] = _parsed(parse, value, variable_name, Path())
        elif (value := stored.get(name)) is not None:
            values[name] = _parsed(parse, value, f"{path}: {name}", path.parent)
    if "home" not in values:
        # Not the cache directory, which people empty: the journal is there, and computed tensors.
        values["home"] = _xdg("XDG_DATA_HOME", ".local/share") / "smartcache"
    return Settings(**values)  # type: ignore[arg-type]  # each value went through the parser of its field


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
    known = [each.name for each in fields(Settings)]
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


def _paths(value: object, base: Path) -> tuple[Path, ...]:
    """Return absolute paths, each once: of a list, or of a text like that of PATH."""
    given = [each for each in value.split(os.pathsep) if each] if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ConfigError(f"not a list of paths: {value!r}", hint='Write a list: ["/srv/models"].')
    return tuple(dict.fromkeys(_path(each, base) for each in given))


def _users(value: object, _base: Path) -> tuple[int, ...]:
    """Return the numbers of users: of a list, or of a text with commas between them."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise ConfigError(f"not a list of users: {value!r}", hint='Write a list: ["ann", 1002].')
    return tuple(dict.fromkeys(_user(each) for each in given))


def _user(value: object) -> int:
    import pwd

    name = value.strip() if isinstance(value, str) else value
    try:
        if isinstance(name, str):
            return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
        if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
            return name
        raise KeyError(name)
    except (KeyError, ValueError):  # ValueError: a NUL, or thousands of digits
        hint = "Write the name or the number of a user of this machine: 'id -u NAME' shows it."
        raise ConfigError(f"there is no user {value!r}", hint=hint) from None


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


_PARSERS: Mapping[str, Callable[[object, Path], object]] = {
    "home": _path,
    "threads": _count,
    "keep_writable": _flag,
    "link_min_size": _size,
    "lock_timeout": _timeout,
    "everywhere": _flag,
    "artifacts_max_size": _size,
    "artifacts_ttl": _lifetime,
    "shared_stores": _paths,
    "shared_store_owners": _users,
}
_VARIABLES = {"everywhere": "SMARTCACHE"}
"""The settings whose variable is not called after them."""
