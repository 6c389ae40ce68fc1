from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smartcache import config as smartcache_config
from smartcache.config import Settings, config_file, load_settings, variable
from smartcache.errors import ConfigError

NAMES = [field.name for field in dataclasses.fields(Settings)]


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with a home directory and no setting at all."""
    home = tmp_path / "user"
    home.mkdir()
    for name in list(os.environ):
        if name.startswith(("SMARTCACHE", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    return home


def variable_of(name: str) -> str:
    return "SMARTCACHE" if name == "everywhere" else f"SMARTCACHE_{name.upper()}"


def write_config(user: Path, text: str) -> Path:
    path = user / ".config" / "smartcache" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(match: str) -> ConfigError:
    """Let the settings be refused with these words."""
    with pytest.raises(ConfigError, match=match) as caught:
        load_settings()
    return caught.value


def test_defaults_need_neither_environment_nor_file(user: Path) -> None:
    assert load_settings() == Settings(
        home=user / ".local" / "share" / "smartcache",
        threads=min(os.cpu_count() or 1, 8),
        keep_writable=False,
        link_min_size=65536,
        lock_timeout=None,
        everywhere=False,
        artifacts_max_size=None,
        artifacts_ttl=None,
    )


def test_settings_cannot_be_changed() -> None:
    settings = load_settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.threads = 3  # type: ignore[misc]


def test_every_setting_can_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "home": str(tmp_path / "store"), "threads": "3", "keep_writable": "yes",
        "link_min_size": "1MiB", "lock_timeout": "2.5", "everywhere": "1",
        "artifacts_max_size": "2TB", "artifacts_ttl": "30d", "remote_max_size": "1TB",
        "skip_validation": "1",
    }  # fmt: skip
    assert {*texts} == {*NAMES}
    for name, text in texts.items():
        monkeypatch.setenv(variable_of(name), text)
    assert load_settings() == Settings(
        home=tmp_path / "store",
        threads=3,
        keep_writable=True,
        link_min_size=2**20,
        lock_timeout=2.5,
        everywhere=True,
        artifacts_max_size=2 * 10**12,
        artifacts_ttl=30 * 86400,
        remote_max_size=10**12,
        skip_validation=True,
    )


def test_every_setting_can_come_from_the_file(user: Path) -> None:
    write_config(
        user,
        """
        home = "/data/store"
        threads = 3
        keep_writable = true
        link_min_size = "1MiB"
        lock_timeout = "5m"
        everywhere = true
        artifacts_max_size = "500 GB"
        artifacts_ttl = 3600
        remote_max_size = "1TB"
        skip_validation = true
        """,
    )
    assert load_settings() == Settings(
        home=Path(os.path.abspath("/data/store")),
        threads=3,
        keep_writable=True,
        link_min_size=2**20,
        lock_timeout=300,
        everywhere=True,
        artifacts_max_size=500 * 10**9,
        artifacts_ttl=3600,
        remote_max_size=10**12,
        skip_validation=True,
    )


def test_every_setting_can_come_from_an_argument(tmp_path: Path) -> None:
    as_written = {
        "link_min_size": "1MiB", "artifacts_max_size": "1GB", "artifacts_ttl": "5m",
        "remote_max_size": "1TB", "home": str(tmp_path / "store"),
    }  # fmt: skip
    as_meant = {
        "link_min_size": 2**20, "artifacts_max_size": 10**9, "artifacts_ttl": 300,
        "remote_max_size": 10**12, "home": tmp_path / "store",
    }  # fmt: skip
    same = {
        "threads": 3, "keep_writable": True, "lock_timeout": 0, "everywhere": True,
        "skip_validation": True,
    }  # fmt: skip
    settings = load_settings(**as_written, **same)
    assert dataclasses.asdict(settings) == as_meant | same
    assert {*NAMES} == as_meant.keys() | same


def test_argument_beats_environment_beats_file_beats_default(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings().link_min_size == 65536
    write_config(user, "link_min_size = 1\n")
    assert load_settings().link_min_size == 1
    monkeypatch.setenv("SMARTCACHE_LINK_MIN_SIZE", "2")
    assert load_settings().link_min_size == 2
    assert load_settings(link_min_size=3).link_min_size == 3


def test_a_false_argument_beats_a_true_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTCACHE_KEEP_WRITABLE", "true")
    assert load_settings(keep_writable=False).keep_writable is False


def test_sources_are_combined_setting_by_setting(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(user, "threads = 2\neverywhere = true\n")
    monkeypatch.setenv("SMARTCACHE_THREADS", "3")
    settings = load_settings(keep_writable=True)
    assert (settings.threads, settings.everywhere, settings.keep_writable) == (3, True, True)


def test_none_as_argument_counts_as_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTCACHE_THREADS", "3")
    monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", "7")
    settings = load_settings(home=None, threads=None, lock_timeout=None)
    assert (settings.threads, settings.lock_timeout) == (3, 7)


def test_an_endless_timeout_as_argument_beats_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", "7")
    assert load_settings(lock_timeout=math.inf).lock_timeout is None


def test_a_timeout_is_seconds_a_time_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {
        "0": 0, "1.5": 1.5, "30s": 30, "5m": 300, "none": None, "None": None, "inf": None,
    }  # fmt: skip
    for text, meant in seconds.items():
        monkeypatch.setenv("SMARTCACHE_LOCK_TIMEOUT", text)
        assert load_settings().lock_timeout == meant, text


def test_flags_are_read_in_the_usual_words(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"1": True, "TRUE": True, "on": True, "0": False, "No": False, "off": False}
    for text, meant in flags.items():
        monkeypatch.setenv("SMARTCACHE_KEEP_WRITABLE", text)
        assert load_settings().keep_writable is meant, text


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = load_settings()
    for name in NAMES:
        monkeypatch.setenv(variable_of(name), "")
        assert load_settings() == unset, name
        assert variable(variable_of(name)) is None


BAD_VALUES = {
    "threads": ["many", "0", "-1", "1.5", "100000", "9" * 5000],
    "keep_writable": ["perhaps", "2"],
    "link_min_size": ["big", "-1"],
    "lock_timeout": ["soon", "-1", "nan"],
    "home": ["~nobody-has-this-name/x"],
    "everywhere": ["sometimes"],
    "skip_validation": ["perhaps"],
    "remote_max_size": ["plenty"],
    "artifacts_max_size": ["plenty", "-1"],
    "artifacts_ttl": ["long", "0"],
}


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*BAD_VALUES} == {*NAMES}
    for name, values in BAD_VALUES.items():
        for value in values:
            with monkeypatch.context() as patch:
                patch.setenv(variable_of(name), value)
                assert refusal(f"^{variable_of(name)}: ").hint, value


def test_a_bad_key_of_the_file_is_named_with_the_file(user: Path) -> None:
    for name, values in BAD_VALUES.items():
        for value in values:
            path = write_config(user, f'{name} = "{value}"\n')
            refusal(f"^{re.escape(str(path))}: {name}: ")


def test_a_value_of_the_wrong_type_in_the_file_is_refused(user: Path) -> None:
    for line in (
        "threads = true", "threads = 2.0", "link_min_size = true", "link_min_size = 1.5",
        "keep_writable = 1", "lock_timeout = true", "lock_timeout = [1]",
        "artifacts_max_size = true", "artifacts_max_size = 1.5",
        "home = 3", 'home = ""', 'home = "a\\u0000b"',
        "[threads]",
    ):  # fmt: skip
        path = write_config(user, line)
        refusal(f"^{re.escape(str(path))}: {line.split()[0].strip('[]')}: ")


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^argument threads: "):
        load_settings(threads=0)


def test_a_bad_value_that_is_overridden_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTCACHE_THREADS", "many")
    assert load_settings(threads=2).threads == 2


def test_an_unknown_key_is_refused_with_the_nearest_known_one(user: Path) -> None:
    for written, meant in (
        ("thread", "threads"),
        ("keep-writable", "keep_writable"),
        ("Home", "home"),
        ("link_size", "link_min_size"),
        ("timeout", "lock_timeout"),
    ):
        path = write_config(user, f"{written} = 1\n")
        error = refusal(f"^{re.escape(str(path))}: unknown setting {written!r}\n")
        assert f"Did you mean {meant!r}?" in error.hint


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="argument: unknown setting 'thread'"):
        load_settings(thread=3)


def test_the_named_config_file_is_read_instead_of_the_usual_one(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(user, "threads = 2\n")
    other = tmp_path / "other.toml"
    other.write_text("keep_writable = true\n")
    monkeypatch.setenv("SMARTCACHE_CONFIG", str(other))
    settings = load_settings()
    assert settings.keep_writable
    assert settings.threads == min(os.cpu_count() or 1, 8)


def test_a_named_config_file_that_does_not_exist_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMARTCACHE_CONFIG", str(tmp_path / "absent.toml"))
    refusal("SMARTCACHE_CONFIG names a file that does not exist")


def test_xdg_directories_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configs"))
    assert load_settings().home == tmp_path / "data" / "smartcache"
    assert config_file() == tmp_path / "configs" / "smartcache" / "config.toml"


def test_relative_xdg_directories_are_ignored(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    monkeypatch.setenv("XDG_CONFIG_HOME", "configs")
    assert load_settings().home == user / ".local" / "share" / "smartcache"
    assert config_file() == user / ".config" / "smartcache" / "config.toml"


def test_home_is_absolute_whatever_was_written(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(home="store").home == tmp_path / "store"
    assert load_settings(home=Path("a/../store")).home == tmp_path / "store"
    monkeypatch.setenv("SMARTCACHE_HOME", "~/store")
    assert load_settings().home == user / "store"


def test_a_relative_home_in_the_file_is_relative_to_the_file(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_config(user, 'home = "store"\n')
    assert load_settings().home == path.parent / "store"


def test_a_file_that_is_no_toml_is_named_with_the_line(user: Path) -> None:
    path = write_config(user, "threads = 2\nthreads == 3\n")
    refusal(f"^{re.escape(str(path))}: not TOML: .*line 2")


def test_a_file_that_is_no_text_is_named(user: Path) -> None:
    path = write_config(user, "")
    path.write_bytes(b"home = '\xff'\n")
    refusal(f"^{re.escape(str(path))}: not UTF-8 text")


def test_a_byte_order_mark_is_no_error(user: Path) -> None:
    write_config(user, "").write_bytes(b"\xef\xbb\xbfthreads = 2\n")
    assert load_settings().threads == 2


def test_a_directory_in_place_of_the_file_is_named(user: Path) -> None:
    path = user / ".config" / "smartcache" / "config.toml"
    path.mkdir(parents=True)
    refusal(f"^{re.escape(str(path))}: cannot be read: ")


def test_a_file_where_the_config_directory_would_be_means_no_config(user: Path) -> None:
    (user / ".config").write_text("")
    assert load_settings().threads == min(os.cpu_count() or 1, 8)


def test_no_home_directory_at_all_is_a_config_error_only_if_one_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run under a user id that has no entry in /etc/passwd."""
    monkeypatch.setattr(Path, "expanduser", _no_home)
    refusal("home directory")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_settings(home=tmp_path / "store").home == tmp_path / "store"


def _no_home(path: Path) -> Path:
    if str(path).startswith("~"):
        raise RuntimeError("Could not determine home directory.")
    return path


def test_reading_settings_loads_no_toml_parser_without_a_file(user: Path) -> None:
    program = (
        "import sys; from smartcache.config import load_settings; load_settings();"
        "print([name for name in ('tomllib', 'difflib', 'ctypes') if name in sys.modules])"
    )
    root = Path(smartcache_config.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
