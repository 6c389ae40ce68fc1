from __future__ import annotations

import copy
import errno
import inspect
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache import errors
from smartcache.errors import SmartcacheError, StoreError

CLASSES = [
    found
    for _, found in sorted(vars(errors).items())
    if inspect.isclass(found) and issubclass(found, SmartcacheError)
]
BUILTINS: dict[str, type[Exception]] = {
    "ArtifactNotFoundError": KeyError,
    "ArtifactGoneError": KeyError,
    "DamagedArtifactError": OSError,
    "TierError": OSError,
    "MissingObjectError": OSError,
    "DamagedObjectError": OSError,
    "UnsupportedValueError": TypeError,
    "LayoutError": ValueError,
    "UnknownCodecError": LookupError,
    "BadKeyError": ValueError,
    "BadSetNameError": ValueError,
    "BatchShapeError": ValueError,
    "RememberedFailureError": RuntimeError,
    "ConfigError": ValueError,
    "SourcesVanishedError": FileNotFoundError,
    "OutputMissingError": LookupError,
    "DatasetChangedError": RuntimeError,
    "EncoderError": RuntimeError,
    "UnsafeNameError": ValueError,
    "RepoNotCachedError": LookupError,
    "BundleError": ValueError,
    "MissingWeightsError": ValueError,
    "WrongVariantError": ValueError,
    "UnreadableConfigError": ValueError,
    "UnknownClassError": ValueError,
    "SharedComponentError": RuntimeError,
    "StoreUnwritableError": OSError,
    "UnsafeStoreError": OSError,
    "BadDigestError": ValueError,
    "BlobNotFoundError": FileNotFoundError,
    "DigestMismatchError": OSError,
    "SizeMismatchError": OSError,
    "DamagedBlobError": OSError,
    "UnsafeFileError": OSError,
    "FileSkippedError": OSError,
    "FileBusyError": OSError,
    "FileChangedError": OSError,
    "DestinationExistsError": FileExistsError,
    "CannotLinkError": OSError,
    "NoSpaceError": OSError,
    "NothingToUndoError": LookupError,
    "LockTimeoutError": TimeoutError,
}
MORE_BUILTINS: dict[str, type[Exception]] = {
    "MissingWeightsError": FileNotFoundError,
    "UnreadableConfigError": OSError,
    "WrongVariantError": OSError,
    "UnknownClassError": AttributeError,
}
"""What diffusers and transformers raise in the same case, each of them another one."""
NUMBERS = {
    "BlobNotFoundError": errno.ENOENT,
    "SourcesVanishedError": errno.ENOENT,
    "DestinationExistsError": errno.EEXIST,
    "LockTimeoutError": errno.ETIMEDOUT,
    "MissingWeightsError": errno.ENOENT,
    "NoSpaceError": errno.ENOSPC,
}
INHERITED = {
    "ArtifactGoneError", "DamagedObjectError", "FileBusyError", "FileChangedError",
    "MissingObjectError", "UnsafeStoreError",
}  # fmt: skip
"""Their builtin is that of the error above them in the tree."""


def every_class(check: Callable[[type[SmartcacheError]], None]) -> Callable[[], None]:
    """One test of all classes; the one that fails is seen in the traceback."""

    def test() -> None:
        for cls in CLASSES:
            check(cls)

    return test


def facts(error: SmartcacheError) -> tuple[object, ...]:
    data = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return type(error), str(error), error.args, error.hint, data


@every_class
def test_an_error_survives_pickling_with_all_it_carries(cls: type[SmartcacheError]) -> None:
    error = cls("It failed", hint="Do this", path=Path("a/b"), digest="ff", size=3)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own bytes
        assert facts(back) == facts(error)
        again = pickle.loads(pickle.dumps(back, protocol))  # noqa: S301
        assert facts(again) == facts(error)


@every_class
def test_an_error_can_be_copied(cls: type[SmartcacheError]) -> None:
    error = cls("It failed", reason="because")
    assert facts(copy.copy(error)) == facts(error)
    assert facts(copy.deepcopy(error)) == facts(error)


@every_class
def test_the_message_is_said_undecorated(cls: type[SmartcacheError]) -> None:
    assert str(cls("Blob 'x' is gone")) == "Blob 'x' is gone"
    assert cls("m").message == "m"


@every_class
def test_the_hint_is_the_classes_own_unless_given(cls: type[SmartcacheError]) -> None:
    assert cls("m").hint == cls.default_hint
    assert cls("m", hint="").hint == ""
    assert cls("m", hint="other").hint == "other"


@every_class
def test_a_traceback_shows_the_hint_once(cls: type[SmartcacheError]) -> None:
    """However it came there: pickled, copied, raised again, raised from another."""
    error = cls("It failed", hint="Do this")

    def again() -> SmartcacheError:
        with pytest.raises(cls):
            raise error
        with pytest.raises(cls) as raised:
            raise error
        return raised.value

    def of_another() -> SmartcacheError:
        with pytest.raises(cls) as raised:
            raise cls("It failed", hint="Do this") from OSError("why")
        return raised.value

    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    for each in (
        error, pickled, pickle.loads(pickle.dumps(pickled)), copy.copy(error),  # noqa: S301
        copy.deepcopy(error), again(), of_another(),
    ):  # fmt: skip
        lines = "".join(traceback.format_exception(each)).splitlines()
        assert lines.count("Hint: Do this") == 1
        assert lines[-2].endswith(": It failed")
        assert str(each) == "It failed"


@every_class
def test_a_traceback_shows_the_hint_of_the_class_and_that_of_today(
    cls: type[SmartcacheError],
) -> None:
    error = cls("It failed")
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Hint: ") == bool(cls.default_hint)
    assert cls.default_hint in shown
    error.add_note("In a worker")
    error.hint = "Do that"
    shown = "".join(traceback.format_exception(error))
    assert shown.endswith("In a worker\nHint: Do that\n")
    assert shown.count("Hint: ") == 1
    error.hint = ""
    assert "Hint: " not in "".join(traceback.format_exception(error))


@every_class
def test_data_travels_as_attributes(cls: type[SmartcacheError]) -> None:
    error = cls("m", needed=5, path=Path("x"))
    assert vars(error)["needed"] == 5
    assert vars(error)["path"] == Path("x")


@every_class
def test_an_error_is_the_builtin_a_caller_expects(cls: type[SmartcacheError]) -> None:
    promised = BUILTINS.get(cls.__name__)
    bases = {base for base in cls.__mro__ if base.__module__ == "builtins"}
    if promised is None:
        assert bases == {Exception, BaseException, object}
    else:
        assert issubclass(cls, promised)
        assert issubclass(cls, MORE_BUILTINS.get(cls.__name__, promised))


@every_class
def test_the_tree_in_the_docstring_names_it_and_its_builtin(cls: type[SmartcacheError]) -> None:
    word = re.compile(rf"\b{cls.__name__}\b")
    lines = [line for line in (errors.__doc__ or "").splitlines() if word.search(line)]
    assert len(lines) == 1
    tables = (BUILTINS, MORE_BUILTINS)
    promised = [table[cls.__name__].__name__ for table in tables if cls.__name__ in table]
    if promised and cls.__name__ not in INHERITED:
        assert f"{cls.__name__}({', '.join(promised)})" in lines[0]


@every_class
def test_an_error_is_of_settings_or_of_one_layer(cls: type[SmartcacheError]) -> None:
    layers = (
        errors.ConfigError, errors.HubError, errors.ArtifactError, errors.DatasetError,
        errors.PretrainedError, errors.TierError, StoreError,
    )  # fmt: skip
    assert [issubclass(cls, each) for each in layers].count(True) == (cls is not SmartcacheError)


@every_class
def test_an_error_has_the_number_of_the_systems_error_behind_it(
    cls: type[SmartcacheError],
) -> None:
    """In another process too, where there is no cause any more."""
    with pytest.raises(cls) as raised:
        raise cls("m") from OSError(errno.EDQUOT, "quota exceeded")
    error = raised.value
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301
        assert each.errno == errno.EDQUOT
        assert str(each) == "m"
        if isinstance(each, OSError):
            assert each.strerror == "m"


@every_class
def test_without_one_an_error_has_the_number_of_its_builtin(cls: type[SmartcacheError]) -> None:
    assert cls("m").errno == NUMBERS.get(cls.__name__)
    assert cls("m", errno=errno.EIO).errno == errno.EIO


def test_a_skipped_file_has_a_reason() -> None:
    reasons = {
        errors.FileSkippedError: "unsuitable",
        errors.FileBusyError: "busy",
        errors.FileChangedError: "changed",
    }
    for cls, reason in reasons.items():
        assert cls("m").reason == reason
        other = cls("m", reason="other")
        assert other.reason == "other"
        assert pickle.loads(pickle.dumps(other)).reason == "other"  # noqa: S301
