"""What the Hub says about repos: commits, and size and hashes of every file, before any download.

All of it comes through huggingface_hub's public functions, so that endpoints, tokens, proxies,
retries, offline mode and errors are what its users know. Nothing that the Hub says is believed
blindly: a file whose name leads outside its folder is refused here, before anything is made of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from smartcache.errors import HubError, UnsafeNameError
from smartcache.hub import patches
from smartcache.hub.layout import is_commit, safe_parts
from smartcache.hub.records import RemoteFile, Repo, announced_by, xet_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Patterns = Sequence[str] | str | None
_MOST_SIZE = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the Hub is reached: what every call of huggingface_hub is given, under its names."""

    token: bool | str | None = None
    endpoint: str | None = None
    headers: dict[str, str] | None = None
    user_agent: dict[str, str] | str | None = None
    library_name: str | None = None
    library_version: str | None = None
    etag_timeout: float = 10

    def api(self) -> HfApi:
        """Return huggingface_hub's client."""
        from huggingface_hub import HfApi

        return HfApi(
            endpoint=self.endpoint, token=self.token, headers=self.headers,
            user_agent=self.user_agent, library_name=self.library_name,
            library_version=self.library_version,
        )  # fmt: skip

    def options(self) -> dict[str, object]:
        """Return the arguments that huggingface_hub's download functions take."""
        return asdict(self)


def download_file(repo: Repo, path: str, options: Mapping[str, object]) -> Path:
    """Let huggingface_hub download one file; return where it is."""
    from huggingface_hub import hf_hub_download

    download = cast("Callable[..., str]", hf_hub_download)
    known = inspect.signature(hf_hub_download).parameters
    return Path(download(repo.id, path, **{k: v for k, v in options.items() if k in known}))


def download_snapshot(repo: Repo, options: Mapping[str, object]) -> Path:
    """Let huggingface_hub download the files of a revision; return the folder they are in."""
    from huggingface_hub import snapshot_download

    download = cast("Callable[..., str]", snapshot_download)
    return Path(download(repo.id, **options))


def commit_of(access: Access, repo: Repo, revision: str) -> str:
    """Return the commit a branch, tag or commit stands for: one request, or none for a commit."""
    if is_commit(revision):
        return revision
    sha: object = access.api().repo_info(repo.id, repo_type=repo.type, revision=revision).sha
    if not isinstance(sha, str) or not is_commit(sha):
        message = f"The Hub names no commit for {repo} at {revision}: {str(sha)[:100]!r}"
        hint = "The server is broken or not a Hub: check HF_ENDPOINT and the proxy."
        raise HubError(message, hint=hint)
    return sha


def files_of(access: Access, repo: Repo, commit: str) -> list[RemoteFile]:
    """Return all files of a commit as the Hub lists them: a request per thousand files."""
    from huggingface_hub.hf_api import RepoFile

    entries = access.api().list_repo_tree(
        repo.id, repo_type=repo.type, revision=commit, recursive=True
    )
    listed = [_remote(repo, entry) for entry in entries if isinstance(entry, RepoFile)]
    # Of a path that is listed twice the last counts, as for the client.
    return list({file.path: file for file in listed}.values())


def _remote(repo: Repo, entry: object) -> RemoteFile:
    path, size, lfs = (getattr(entry, name, None) for name in ("path", "size", "lfs"))
    refuse_unsafe(repo, path)
    sha256 = None if lfs is None else lfs.sha256
    etag = str(sha256 or getattr(entry, "blob_id", ""))
    patches.refuse_unsafe(etag, str(path))
    size = size if lfs is None else lfs.size
    if size is not None and (not isinstance(size, int) or not 0 <= size < _MOST_SIZE):
        raise HubError(f"{repo} lists {path} with an impossible size: {size!r}")
    return RemoteFile(
        path=str(path), size=size, etag=etag, blob_id=str(getattr(entry, "blob_id", "")),
        xet=xet_of(getattr(entry, "xet_hash", None)),
    )  # fmt: skip


def write_listing(memory: Path, commit: str, files: Iterable[RemoteFile]) -> None:
    """Let huggingface_hub remember a listing, so that it does not ask for it again."""
    with suppress(ImportError, TypeError):  # a version without such a memory, or with another
        from huggingface_hub import _tree_cache

        entries = {
            file.path: _tree_cache.TreeCacheEntry(
                size=cast("int", file.size), blob_id=file.blob_id, xet_hash=file.xet,
                lfs_sha256=file.etag if file.is_lfs else None,
                lfs_size=file.size if file.is_lfs else None,
            )
            for file in files
        }  # fmt: skip
        _tree_cache.write_tree_cache(str(memory), commit, entries)


def refuse_unsafe(repo: Repo, path: object) -> None:
    """Raise if a path of a listing is not a plain relative one."""
    if not isinstance(path, str) or safe_parts(path) is None:
        message = f"{repo} lists a file with an unsafe name: {path!r}; nothing was downloaded"
        raise UnsafeNameError(message, repo=str(repo), path=path)


def select(files: list[RemoteFile], allow: Patterns, ignore: Patterns) -> list[RemoteFile]:
    """Return the files that huggingface_hub's patterns select."""
    if allow is None and ignore is None:
        return files
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    allowed = [allow] if isinstance(allow, str) else None if allow is None else list(allow)
    ignored = [ignore] if isinstance(ignore, str) else None if ignore is None else list(ignore)
    return list(
        filter_repo_objects(
            files, allow_patterns=allowed, ignore_patterns=ignored, key=lambda file: file.path
        )
    )


def announced_file(
    access: Access, repo: Repo, revision: str, path: str
) -> tuple[str, RemoteFile] | None:
    """Return commit, size and hash of one file: one HEAD request. None: the Hub names no commit."""
    from huggingface_hub import constants, file_download, hf_hub_url

    refuse_unsafe(repo, path)
    patches.apply()
    url = hf_hub_url(
        repo.id, path, repo_type=repo.type, revision=revision, endpoint=access.endpoint
    )
    # As for huggingface_hub, its variable wins.
    is_set = constants.HF_HUB_ETAG_TIMEOUT != constants.DEFAULT_ETAG_TIMEOUT
    found = file_download.get_hf_file_metadata(
        url, timeout=constants.HF_HUB_ETAG_TIMEOUT if is_set else access.etag_timeout,
        token=access.token, headers=access.headers,
        user_agent=access.user_agent, library_name=access.library_name,
        library_version=access.library_version, endpoint=access.endpoint,
    )  # fmt: skip
    if found.commit_hash is None or not is_commit(found.commit_hash):
        return None
    etag = found.etag if found.etag is not None and announced_by(found.etag) else ""
    xet = None if found.xet_file_data is None else found.xet_file_data.file_hash
    file = RemoteFile(path=path, size=found.size, etag=etag, xet=xet_of(xet))
    return found.commit_hash, file
