"""Words for the errors of huggingface_hub and of the HTTP library below it.

Classes are known by name: nothing of huggingface_hub is imported here, and the names are the same
in all its versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_LIBRARIES = ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")
_LOG_IN = "'hf auth login' remembers a token, --token or HF_TOKEN gives one"
_AGAIN = "Run it again: finished files are not fetched again."
_WRONG_SIZE = "Consistency check failed"
"""How huggingface_hub begins what it says of a file that is longer or shorter than announced."""
_FINAL = {
    "RevisionNotFoundError", "RemoteEntryNotFoundError", "HFValidationError", "BadRequestError",
    "DisabledRepoError",
}  # fmt: skip
_IN_ADDRESS = re.compile(
    r"/((api/)?(?P<kind>models|datasets|spaces|kernels)/)?(?P<name>[^/]+/[^/]+)/(resolve|revision|tree)/"
)
_REFUSED = (401, 403)
_BUSY = 429
_BROKEN = 500


def is_of_hub(error: BaseException) -> bool:
    """Say whether an error is one of huggingface_hub or of the HTTP library it uses."""
    return any(_library(kind) for kind in type(error).__mro__)


def is_refusal(error: BaseException) -> bool:
    """Say whether the Hub has answered, and the answer is no: it would be no again."""
    return is_denial(error) or bool(_names(error) & _FINAL)


def is_denial(error: BaseException) -> bool:
    """Say whether the Hub does not show the repo: it is unknown, private or gated."""
    return "RepositoryNotFoundError" in _names(error) or _status(error) in _REFUSED


def is_missing_file(error: BaseException) -> bool:
    """Say whether the Hub has the revision, but not the file that was asked for."""
    return "RemoteEntryNotFoundError" in _names(error)


def words_for(error: BaseException) -> tuple[str, str] | None:
    """Return message and hint for an error of the Hub; None if it is none."""
    for kind in type(error).__mro__:
        if _library(kind) and kind.__name__ in _WORDS:
            return _WORDS[kind.__name__](error)
    if type(error) is OSError and str(error).startswith(_WRONG_SIZE):
        hint = "Run it again; if this happens again, the server has a wrong size for this file."
        return first_line(error), hint
    return None


def first_line(error: BaseException) -> str:
    """Return what an error says, without what follows on further lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__ if _library(kind)}


def _library(kind: type) -> bool:
    return kind.__module__.partition(".")[0].rstrip("0123456789") in _LIBRARIES


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _which(error: BaseException) -> str:
    """Return the repo that an error is about; older versions say only which address was asked."""
    name, kind = (getattr(error, key, None) for key in ("repo_id", "repo_type"))
    if not name and (found := _IN_ADDRESS.search(_address(error))) is not None:
        name, kind = found["name"], (found["kind"] or "models").removesuffix("s")
    return f"{kind or 'model'}/{name}" if name else "this repo"


def _address(error: BaseException) -> str:
    """Return the address that was asked, without what may be a secret in it."""
    return str(getattr(getattr(error, "response", None), "url", "")).partition("?")[0]


def _gated(error: BaseException) -> tuple[str, str]:
    message = f"{_which(error)} is gated: the Hub gives it only to people with access"
    return message, f"Ask for access on the page of the repo, then log in: {_LOG_IN}."


def _no_repo(error: BaseException) -> tuple[str, str]:
    message = f"The Hub has no {_which(error)}, or does not show it to you"
    return message, f"Check the name and --repo-type; if it is private, log in: {_LOG_IN}."


def _no_revision(error: BaseException) -> tuple[str, str]:
    said = str(getattr(error, "server_message", "") or "").strip()
    message = f"{_which(error)} has no such revision{f' ({said})' if said else ''}"
    return message, "--revision takes a branch, a tag or a whole commit; default: main."


def _no_file(error: BaseException) -> tuple[str, str]:
    return f"There is no such file on the Hub: {_address(error)}", "Check its name and --revision."


def _bad_name(error: BaseException) -> tuple[str, str]:
    said = str(error).partition(" Use `repo_type`")[0].rstrip(".")
    return said, "A repo is written org/name, datasets/org/name or spaces/org/name."


def _not_here(error: BaseException) -> tuple[str, str]:
    """Word it that the Hub could not be asked, and that the cache cannot replace it."""
    cause = error.__cause__ or error.__context__
    if cause is not None and type(cause).__name__ == "OfflineModeIsEnabled":
        message = "Offline (HF_HUB_OFFLINE is set), and not all of the files are in the HF cache"
        return (
            message,
            "Unset HF_HUB_OFFLINE to ask the Hub; 'smartcache hub ls' shows what is here.",
        )
    reason = "" if cause is None else f" ({_reason(cause)})"
    message = f"Cannot reach the Hub{reason}, and not all of the files are in the HF cache"
    return message, f"Check the connection, the proxy and HF_ENDPOINT. {_AGAIN}"


def _reason(error: BaseException) -> str:
    status = _status(error)
    return first_line(error) if status is None else f"it answers {status}"


def _offline(error: BaseException) -> tuple[str, str]:
    del error
    return "Offline: HF_HUB_OFFLINE is set", "Unset HF_HUB_OFFLINE to ask the Hub."


def _no_dry_run(error: BaseException) -> tuple[str, str]:
    cause = error.__cause__ or error.__context__
    known = None if cause is None else words_for(cause)
    if known is not None:
        return known
    return "Cannot reach the Hub", "Check the connection and HF_ENDPOINT."


def _answer(error: BaseException) -> tuple[str, str]:
    status = _status(error)
    if status is None:
        return _no_answer(error)
    said = str(getattr(error, "server_message", "") or "").strip()
    where = _address(error)
    message = f"The Hub answers {status}{f' ({said})' if said else ''}: {where}"
    if status in _REFUSED:
        return message, f"The token is wrong or lacks a permission: {_LOG_IN}."
    if status == _BUSY:
        return message, f"Wait a few minutes: the Hub limits requests. {_AGAIN}"
    if status >= _BROKEN:
        return message, f"The Hub has a problem; wait a while. {_AGAIN}"
    return message, "Run it again with 'smartcache --debug ...' to see what was asked."


def _no_answer(error: BaseException) -> tuple[str, str]:
    message = f"The connection to the Hub failed: {first_line(error)}"
    return message, f"Check the connection, the proxy and HF_ENDPOINT. {_AGAIN}"


def _odd_metadata(error: BaseException) -> tuple[str, str]:
    message = f"The Hub did not say what it has: {first_line(error)}"
    return message, "Check HF_ENDPOINT and the proxy: the server is broken or not a Hub."


def _no_token(error: BaseException) -> tuple[str, str]:
    return f"No token: {first_line(error)}", f"Log in: {_LOG_IN}."


_WORDS: dict[str, Callable[[BaseException], tuple[str, str]]] = {
    "GatedRepoError": _gated,
    "RepositoryNotFoundError": _no_repo,
    "RevisionNotFoundError": _no_revision,
    "RemoteEntryNotFoundError": _no_file,
    "LocalEntryNotFoundError": _not_here,
    "HFValidationError": _bad_name,
    "OfflineModeIsEnabled": _offline,
    "DryRunError": _no_dry_run,
    "LocalTokenNotFoundError": _no_token,
    "FileMetadataError": _odd_metadata,
    "HfHubHTTPError": _answer,
    "HTTPError": _no_answer,
    "RequestError": _no_answer,
    "InvalidURL": _no_answer,
}
"""By the name of a class; the nearest one in the order of bases counts."""
