"""Every exception of smartcache.

    SmartcacheError
    ├── ArtifactError
    │   ├── ArtifactNotFoundError(KeyError) no artifact of that key is in the set
    │   │   └── ArtifactGoneError           what a handle stood for was deleted, replaced or evicted
    │   ├── DamagedArtifactError(OSError)   the bytes of an artifact are not those that were put
    │   ├── UnsupportedValueError(TypeError)  a value that cannot be kept, and where it is
    │   ├── LayoutError(ValueError)         the description of an artifact is malformed
    │   ├── UnknownCodecError(LookupError)  a value that needs a codec nobody has registered
    │   ├── MissingCompressionError         compressed with a package that is not installed
    │   ├── BadKeyError(ValueError)         no key, or a config of which no key can be made
    │   ├── BadSetNameError(ValueError)
    │   ├── BatchShapeError(ValueError)     artifacts that do not fit into one batch, or a buffer
    │   ├── RememberedFailureError(RuntimeError)  computing it failed before; not tried again yet
    │   └── SetFormatError                  a set of another format, or none
    ├── DatasetError
    │   ├── SourcesVanishedError(FileNotFoundError)  a folder of sources is gone, or empty now
    │   ├── OutputMissingError(LookupError)  an item whose output was not encoded, or is damaged
    │   ├── DatasetChangedError(RuntimeError)  the sources are not those that were meant any more
    │   └── EncoderError(RuntimeError)      an encoder returned what cannot be kept
    ├── ConfigError(ValueError)             a setting, size, age or filter that cannot be read
    ├── HubError
    │   ├── UnsafeNameError(ValueError)     the name of a file of a repo leads outside its folder
    │   ├── RepoNotCachedError(LookupError) no HF cache here has this repo or revision
    │   └── BundleError(ValueError)         an exported bundle is damaged or not one of ours
    ├── PretrainedError
    │   ├── MissingWeightsError(ValueError, FileNotFoundError)
    │   ├── WrongVariantError(ValueError, OSError)
    │   ├── UnreadableConfigError(ValueError, OSError)
    │   ├── UnknownClassError(ValueError, AttributeError)
    │   └── SharedComponentError(RuntimeError)  what would change other pipelines too
    ├── TierError(OSError)                  a remote that cannot be reached, or is none
    │   ├── MissingObjectError              it does not have what was asked for
    │   └── DamagedObjectError              other bytes than the name of the object says
    └── StoreError
        ├── StoreFormatError                the store was written by a newer smartcache, or is none
        ├── StoreUnwritableError(OSError)   read-only filesystem or missing permission
        │   └── UnsafeStoreError            somebody else could change it
        ├── IndexDamagedError               the index is no readable SQLite file
        ├── BadDigestError(ValueError)      no digest, or a prefix that names several blobs
        ├── BlobNotFoundError(FileNotFoundError)
        ├── BlobInUseError                  the blob is pinned
        ├── DigestMismatchError(OSError)    the bytes that arrived are not the bytes announced
        ├── SizeMismatchError(OSError)      more or fewer bytes than announced
        ├── DamagedBlobError(OSError)       a blob no longer has the bytes its name says
        ├── UnsafeFileError(OSError)        something else is where a file of the store should be
        ├── FileSkippedError(OSError)       a file that must not be adopted or replaced, and why
        │   ├── FileBusyError               somebody has it open for writing
        │   └── FileChangedError            it changed while it was read
        ├── DestinationExistsError(FileExistsError)
        ├── CannotLinkError(OSError)        the link kind asked for does not work here
        ├── NoSpaceError(OSError)           the filesystem or a quota is full
        ├── NothingToUndoError(LookupError)
        └── LockTimeoutError(TimeoutError)

A message says what failed and on which thing; `hint` says what to do about it, and tracebacks show
it as a note. Data a program may want travels as attributes; `errno` is that of the system's error
from which ours was raised. Every error survives pickling, so it can cross a process pool.
"""

from __future__ import annotations

import errno as _errno
from functools import partial
from typing import Any, ClassVar

_HINT = "Hint: "
DISTRIBUTION = "smartcache-hub"
"""What pip installs. `smartcache` on PyPI is somebody else's, with the same import name."""
ONLY_THIS_PACKAGE = (
    "Run 'pip uninstall smartcache', which removes files of both, and then"
    f" 'pip install --force-reinstall --no-deps {DISTRIBUTION}'."
)
"""What to do where both are installed."""


def install_hint(extra: str) -> str:
    """Return how to install what an extra brings."""
    return f"Install it: pip install '{DISTRIBUTION}[{extra}]'."


class SmartcacheError(Exception):
    """Base of all errors of this package: a message, a hint, and the data that belongs to it."""

    default_hint: ClassVar[str] = ""
    default_errno: ClassVar[int | None] = None

    def __init__(self, message: str, *, hint: str | None = None, **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self._data = data
        more = {"strerror": message} if isinstance(self, OSError) else {}
        for name, value in {**more, **data}.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        """Return the message alone: OSError and KeyError would decorate it."""
        return self.message

    @property
    def hint(self) -> str:
        """What to do about it: also a note, so that a traceback shows it."""
        return self._hint

    @hint.setter
    def hint(self, value: str) -> None:
        self._hint = value
        others = [each for each in getattr(self, "__notes__", ()) if not each.startswith(_HINT)]
        self.__notes__ = [*others, *([f"{_HINT}{value}"] if value else [])]

    @property
    def errno(self) -> int | None:
        """The number of the system's error behind this one: given, of the cause, or the class's."""
        known = (self._data.get("errno"), getattr(self.__cause__, "errno", None))
        return next((each for each in known if isinstance(each, int)), self.default_errno)

    @errno.setter
    def errno(self, value: int | None) -> None:
        self._data["errno"] = value

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild by a partial call, because keyword-only arguments do not survive `args`."""
        data: dict[str, Any] = {**self._data, "hint": self.hint}
        if self.errno is not None:
            data["errno"] = self.errno
        return partial(type(self), **data), (self.message,)


class ConfigError(SmartcacheError, ValueError):
    """A setting, size, age or filter cannot be understood."""


class ArtifactError(SmartcacheError):
    """Something about a set of artifacts, or about a value that was to become one."""


class ArtifactNotFoundError(ArtifactError, KeyError):
    """The set has no artifact of that key."""

    default_hint = "Compute it: get_or_compute(key, fn) looks it up and computes it if needed."
    keys: tuple[str, ...] = ()


class ArtifactGoneError(ArtifactNotFoundError):
    """What a handle stood for was deleted, replaced or evicted since."""

    default_hint = "Ask the set for the key again."


class DamagedArtifactError(ArtifactError, OSError):
    """The bytes of an artifact are not those that were put; it counts as missing from now on."""

    default_hint = "Compute it again: get_or_compute(key, fn) does so by itself."


class UnsupportedValueError(ArtifactError, TypeError):
    """A value that cannot be kept; `path` says where in the artifact it is."""

    default_hint = "Leave it out, or register a codec for its type: register_codec(...)."
    path: str = ""


class LayoutError(ArtifactError, ValueError):
    """The description of an artifact is malformed; nothing was made of it."""

    default_hint = "Run 'smartcache artifacts verify'."


class UnknownCodecError(ArtifactError, LookupError):
    """An artifact holds a value for which this program has registered no codec."""

    default_hint = "Register the codec of that name before reading: register_codec(...)."
    name: str = ""


class MissingCompressionError(ArtifactError):
    """A part of an artifact is, or is to be, compressed with a package that is not here."""

    name: str = ""


class BadKeyError(ArtifactError, ValueError):
    """The key cannot be used, or no key can be made of the config; `path` says of what in it."""

    path: str = ""


class BadSetNameError(ArtifactError, ValueError):
    """The name of a set is no plain name."""

    default_hint = "Use letters, digits, '.', '_' and '-', at most 100, a letter or digit first."


class BatchShapeError(ArtifactError, ValueError):
    """Artifacts that do not fit into one batch, or an output buffer that does not fit them."""


class RememberedFailureError(ArtifactError, RuntimeError):
    """Computing the artifact failed before, and it is not time to try again."""

    default_hint = "Fix the cause and call forget_failure(key), or wait until it is tried again."
    reason: str = ""
    count: int = 0


class SetFormatError(ArtifactError):
    """The folder holds a set of another format, or none at all."""

    default_hint = "Update smartcache, or remove the set: 'smartcache artifacts rm'."


class DatasetError(SmartcacheError):
    """Something about a dataset or its sources."""

    items: tuple[str, ...] = ()
    """The names of the items it is about."""


class SourcesVanishedError(DatasetError, FileNotFoundError):
    """A folder of sources that had files is gone, or empty now; nothing was forgotten."""

    default_hint = (
        "Is a drive not mounted? To go on without the sources: validate='trust'. If they are"
        " removed for good, open the dataset with other sources."
    )
    default_errno = _errno.ENOENT


class OutputMissingError(DatasetError, LookupError):
    """An item has no such output: it was not encoded, or is damaged."""

    default_hint = "Build it: dataset.build(). With dataset.miss = 'encode', reading does so."


class DatasetChangedError(DatasetError, RuntimeError):
    """The dataset is not the one that was meant any more."""

    default_hint = "Open it again."


class EncoderError(DatasetError, RuntimeError):
    """An encoder returned something that cannot be its output."""


class HubError(SmartcacheError):
    """Something about a repo of the Hub, or about an HF cache."""


class UnsafeNameError(HubError, ValueError):
    """The name of a file of a repo would lead out of its folder; nothing was written."""

    default_hint = "Do not use this repo: its owner or the server is malicious or broken."


class RepoNotCachedError(HubError, LookupError):
    """No HF cache on this machine has the repo or revision."""

    default_hint = "'smartcache hub ls' shows what is there."


class BundleError(HubError, ValueError):
    """An exported bundle is damaged, incomplete or not one of ours."""

    default_hint = "Export it again; nothing that was not verified has been kept."


class PretrainedError(SmartcacheError):
    """Something about a model or pipeline that was to be loaded."""


class MissingWeightsError(PretrainedError, ValueError, FileNotFoundError):
    """There is no such model, or it or a component has no weights that its library can load."""

    default_hint = "Check the name, the subfolder, the revision, and that the download is complete."
    default_errno = _errno.ENOENT


class WrongVariantError(PretrainedError, ValueError, OSError):
    """There are weights, but none of the variant that was asked for."""

    default_hint = "Leave out `variant`, or choose one that exists."


class UnreadableConfigError(PretrainedError, ValueError, OSError):
    """A file that describes a model or pipeline is not the JSON object that it should be."""

    default_hint = "Get the file again, or name the class: from_pretrained(..., cls=...)."


class UnknownClassError(PretrainedError, ValueError, AttributeError):
    """Nobody knows with which class this is loaded, or the libraries have no such class."""

    default_hint = "Name the class: from_pretrained(..., cls=...)."


class SharedComponentError(PretrainedError, RuntimeError):
    """It would change a component that other pipelines use too."""

    default_hint = "Call smartcache.unshare(pipeline) first, or load it with share=False."


class TierError(SmartcacheError, OSError):
    """A remote cannot be reached, refuses what is asked of it, or is none."""

    default_hint = "Check network, credentials and 'smartcache remote ls', and run it again."
    tier: str = ""


class MissingObjectError(TierError):
    """A remote does not have what was asked for."""

    default_hint = "Push it again from where it is; 'smartcache remote verify' finds more."


class DamagedObjectError(TierError):
    """The bytes that a remote has, or that are to go there, are not those that their name says."""

    default_hint = "Nothing of it was kept. 'smartcache remote verify' finds out what is damaged."


class StoreError(SmartcacheError):
    """Something about the store or a file it was asked to work on."""


class StoreFormatError(StoreError):
    """The directory is a store of a newer format, or is no store at all."""

    default_hint = "Update smartcache, or point SMARTCACHE_HOME at another directory."


class StoreUnwritableError(StoreError, OSError):
    """The store cannot be written: read-only filesystem or missing permission."""

    default_hint = "Check the owner and mode of the directory, or set SMARTCACHE_HOME to another."


class UnsafeStoreError(StoreUnwritableError):
    """A store, or a part of it, belongs to somebody else or could be written by others."""

    default_hint = (
        "Use a store of your own (set SMARTCACHE_HOME); a folder that several users share can be a"
        " remote: 'smartcache remote add'."
    )


class IndexDamagedError(StoreError):
    """A database is no SQLite file any more, or of an older version."""

    default_hint = "Run 'smartcache verify --rebuild': it makes the index again from the blobs."


class BadDigestError(StoreError, ValueError):
    """The text is not a digest, or is a prefix of several."""

    default_hint = (
        "A digest is 64 hexadecimal characters; 'smartcache ls' shows them. The first 8 are"
        " enough if no other digest begins with them."
    )


class BlobNotFoundError(StoreError, FileNotFoundError):
    """No blob of that digest or hash is in the store."""

    default_hint = "'smartcache ls' shows what is in the store."
    default_errno = _errno.ENOENT


class BlobInUseError(StoreError):
    """The blob is pinned."""

    default_hint = "Unpin it first; 'smartcache ls -v' shows its pins."


class DigestMismatchError(StoreError, OSError):
    """The bytes that arrived are not the bytes that were announced."""

    default_hint = "Get the file again; if this happens again, the source is damaged."


class SizeMismatchError(StoreError, OSError):
    """The stream was longer or shorter than announced."""

    default_hint = "Get the file again; the transfer was cut or the source changed."


class DamagedBlobError(StoreError, OSError):
    """A blob no longer has the bytes its name says; it was moved to `bad/`."""

    default_hint = "Run 'smartcache verify --repair', or get the file again."


class UnsafeFileError(StoreError, OSError):
    """Where a file of the store should be there is a symlink, a FIFO, a device or a directory."""

    default_hint = "Look at what it is and remove it. 'smartcache verify --repair' moves it aside."


class FileSkippedError(StoreError, OSError):
    """The file must not be adopted or replaced; `reason` is a short word for it."""

    default_hint = "The file was left as it is."
    reason: str = "unsuitable"


class FileBusyError(FileSkippedError):
    """Somebody has the file open for writing."""

    default_hint = "Try again when the program that is writing it has finished."
    reason = "busy"


class FileChangedError(FileSkippedError):
    """The file changed while it was read; nothing was done to it."""

    default_hint = "Try again when no program is writing it."
    reason = "changed"


class DestinationExistsError(StoreError, FileExistsError):
    """There is another file at the destination already."""

    default_hint = "Choose another path, or allow overwriting."
    default_errno = _errno.EEXIST


class CannotLinkError(StoreError, OSError):
    """The kind of link asked for does not work between these two places."""

    default_hint = "'smartcache doctor PATH' shows what works there; kind 'auto' takes what does."


class NoSpaceError(StoreError, OSError):
    """The filesystem or a quota is full, or would be."""

    default_hint = "Delete a file you do not need; then 'smartcache prune' can free more."
    default_errno = _errno.ENOSPC


class NothingToUndoError(StoreError, LookupError):
    """The journal has no such change, or it was undone already."""

    default_hint = "'smartcache undo --list' shows what can be undone."


class LockTimeoutError(StoreError, TimeoutError):
    """Another process or thread held the lock longer than the caller would wait."""

    default_hint = "Wait for that process to end, or allow more time."
    default_errno = _errno.ETIMEDOUT
    key: str = ""
    holder: str = ""
