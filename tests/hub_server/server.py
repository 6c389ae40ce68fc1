"""The Hub itself: two servers on the loopback, what they serve and what they were asked.

    with Hub() as hub:
        hub.add("org/one", {"model.safetensors": Path("/big/file")}, tags=["v1"])
        hub.add("org/secret", {"config.json": b"{}"}, gated=True)
        hub.tokens = {"hf_good": {"org/secret"}}
        hub.cdn, hub.bandwidth, hub.page_size = True, 125_000_000, 100

Everything may be changed while clients are at work; each request sees what holds when it comes.
"""

from __future__ import annotations

import fnmatch
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from tests.hub_server.answers import Answer
from tests.hub_server.faults import Faults
from tests.hub_server.limit import Limit
from tests.hub_server.log import Log, Origin, Request
from tests.hub_server.repos import (
    Commit,
    HubFile,
    JsonObject,
    Repository,
    RepoType,
    is_large,
)

PAGE_SIZE = 1000
_PATIENCE = 10.0


class Hub:
    """Serves from its making on; it ends with the `with` block or with `close`."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests = Log()
        self.faults = Faults()
        self.limit = Limit()
        self.tokens: dict[str, Collection[str]] = {}
        """Token -> the gated and private repos it opens. If there are any, another token is bad."""
        self.cdn = False
        """LFS files are redirected to the second origin."""
        self.xet_headers = False
        """Files with a xet hash carry X-Xet-Hash; there is no Xet server behind it."""
        self.page_size = PAGE_SIZE
        self.control: Callable[[str, JsonObject], object] | None = None
        self._servers = {origin: _Server(self, origin) for origin in ("hub", "cdn")}

    @property
    def url(self) -> str:
        return self._servers["hub"].url

    @property
    def cdn_url(self) -> str:
        return self._servers["cdn"].url

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of all files together; None: no limit."""
        return self.limit.rate

    @bandwidth.setter
    def bandwidth(self, rate: float | None) -> None:
        self.limit.rate = rate

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send a client process here, and nowhere else."""
        return environment_for(self.url)

    def add(
        self,
        name: str,
        files: Mapping[str, bytes | Path],
        *,
        repo_type: RepoType = "model",
        revision: str = "main",
        tags: Sequence[str] = (),
        gated: bool = False,
        private: bool = False,
        xet: Mapping[str, str] | None = None,
        lfs: Sequence[str] = (),
        git: Sequence[str] = (),
    ) -> Commit:
        """Publish a commit with exactly these files; what was published before is still served.

        `xet` has the xet hashes to announce. `lfs` and `git` are patterns of paths for which the
        rule of names (weights are LFS, small texts are git's) is not to hold.
        """
        odd = [path for path in files if path.startswith("/") or ".." in path.split("/")]
        if odd:
            raise ValueError(f"use add_raw_listing for {odd}")
        repo = self._repository(repo_type, name)
        repo.is_gated, repo.is_private = gated, private
        made = {
            path: HubFile(data, is_lfs=_is_lfs(path, data, lfs, git), xet=(xet or {}).get(path))
            for path, data in files.items()
        }
        return repo.publish(made, revision=revision, tags=tags)

    def add_folder(self, name: str, folder: Path, **how: object) -> Commit:
        """Publish the files of a folder, served from there; arguments as of `add`."""
        files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return self.add(name, files, **how)  # type: ignore[arg-type]

    def add_raw_listing(
        self,
        name: str,
        files: Mapping[str, bytes],
        extra: Sequence[JsonObject] = (),
        *,
        repo_type: RepoType = "model",
    ) -> Commit:
        """Publish a commit whose paths are listed as they are, "../x", "/etc/x" and such too.

        `extra` are further entries of the tree, word for word.
        """
        made = {path: HubFile(data, is_lfs=is_large(path)) for path, data in files.items()}
        return self._repository(repo_type, name).publish(made, extra=extra)

    def tag(self, name: str, tag: str, revision: str, *, repo_type: RepoType = "model") -> None:
        """Give a commit another name."""
        repo = self.repositories[repo_type, name]
        commit = repo.find(revision)
        if commit is None:
            raise KeyError(revision)
        repo.tags[tag] = commit.sha

    def gets(self, part: str = "") -> list[Request]:
        """Return the requests for the bytes of files with `part` in `org/name/path`."""
        return self.requests.gets(part)

    def heads(self, part: str = "") -> list[Request]:
        return self.requests.heads(part)

    def api(self, part: str = "") -> list[Request]:
        """Return the requests for listings and the like."""
        return self.requests.api(part)

    def fetched_bytes(self, part: str = "") -> int:
        """Return how many bytes of files were sent."""
        return self.requests.fetched_bytes(part)

    def clear(self) -> None:
        """Forget the requests, not the faults."""
        self.requests.clear()

    def cdn_address(self, repo: Repository, commit: Commit, path: str) -> str:
        """Return where the bytes are when they are not here; signed, so that no token is needed."""
        place = f"{repo.prefix}{repo.id}/resolve/{commit.sha}/{quote(path)}"
        return f"{self.cdn_url}/{place}?Signature={commit.etag(path)[:16]}"

    def close(self) -> None:
        """End both servers, whatever they are doing."""
        self.faults.clear()
        for server in self._servers.values():
            server.close()

    def _repository(self, repo_type: RepoType, name: str) -> Repository:
        return self.repositories.setdefault((repo_type, name), Repository(repo_type, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def environment_for(url: str) -> dict[str, str]:
    """Return the variables that send a client process to a Hub, and nowhere else."""
    return {
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "DISABLE_SAFETENSORS_CONVERSION": "1",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "NO_COLOR": "1",
    }


def _is_lfs(path: str, data: bytes | Path, lfs: Sequence[str], git: Sequence[str]) -> bool:
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in lfs):
        return True
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in git):
        return False
    return is_large(path, len(data) if isinstance(data, bytes) else data.stat().st_size)


class _Server(ThreadingHTTPServer):
    """One origin, with a thread per connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, origin: Origin) -> None:
        answer = type("Answer", (Answer,), {"hub": hub, "origin": origin})
        super().__init__(("127.0.0.1", 0), answer)
        self._origin = origin
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        # Some versions of huggingface_hub compare names without ports: the CDN needs its own.
        host = "127.0.0.1" if self._origin == "hub" else "localhost"
        return f"http://{host}:{self.server_address[1]}"

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        assert isinstance(request, socket.socket)
        with self._changed:
            self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._open.discard(request)
                self._changed.notify_all()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error of ours; anything else is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        with self._changed:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
            self._changed.wait_for(lambda: not self._open, _PATIENCE)
        self.server_close()
