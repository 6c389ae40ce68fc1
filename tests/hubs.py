"""A small Hub on the loopback, for unmodified clients: repositories, their trees and their files.

    with Hub() as hub:
        hub.add("org/name", {"config.json": b"{}", "model.safetensors": weights})
        subprocess.run(["hf", "download", "org/name"], env={**os.environ, **hub.environment})

Files are named as the Hub names them: weights by sha256 (LFS), small files by git's sha1. There is
no Xet. `requests` has every request as "METHOD path".
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

SMALL_SUFFIXES = (".json", ".txt", ".md", ".gitattributes")
"""Kept by git itself; everything else is LFS."""

_API = re.compile(
    r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/(revision|tree|refs)(?:/(.+))?)?"
)
_RESOLVE = re.compile(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass(slots=True)
class Repository:
    """The files of one commit."""

    name: str
    commit: str
    files: dict[str, bytes] = field(default_factory=dict)

    def describe(self, path: str) -> dict[str, object]:
        """Return an entry of the tree."""
        data = self.files[path]
        entry: dict[str, object] = {
            "type": "file", "path": path, "size": len(data), "oid": git_sha1(data),
        }  # fmt: skip
        if is_large(path):
            oid = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
        return entry


def is_large(path: str) -> bool:
    return not path.endswith(SMALL_SUFFIXES)


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's name


def etag_of(path: str, data: bytes) -> str:
    """Return what the client names its blob by."""
    return hashlib.sha256(data).hexdigest() if is_large(path) else git_sha1(data)


class Hub:
    """A server of its own thread; it ends with the `with` block."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send a client here, and nowhere else."""
        return {
            "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1", "NO_PROXY": "127.0.0.1", "NO_COLOR": "1",
        }  # fmt: skip

    def add(self, name: str, files: Mapping[str, bytes], *, kind: str = "models") -> Repository:
        """Publish a repository, or a new commit of it."""
        text = json.dumps([name, {path: etag_of(path, data) for path, data in files.items()}])
        commit = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - as git does
        made = self.repositories[kind, name] = Repository(name, commit, dict(files))
        return made

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server_hub.requests.append(f"{self.command} {path}")
        if found := _API.fullmatch(path):
            self._answer_api(*found.groups())
        elif found := _RESOLVE.fullmatch(path):
            self._answer_file(*found.groups())
        else:
            self._refuse("EntryNotFound")

    def _find(self, kind: str | None, name: str, revision: str | None) -> Repository | None:
        repository = self.server_hub.repositories.get((kind or "models", name))
        if repository is None:
            self._refuse("RepoNotFound")
        elif revision not in (None, "main", repository.commit):
            self._refuse("RevisionNotFound")
        else:
            return repository
        return None

    def _answer_api(self, kind: str, name: str, verb: str | None, rest: str | None) -> None:
        revision = (rest or "main").partition("/")[0] if verb in ("revision", "tree") else None
        repository = self._find(kind, name, revision)
        if repository is None:
            return
        if verb == "tree":
            self._send_json([repository.describe(path) for path in repository.files])
        elif verb == "refs":
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commit}
            self._send_json({"branches": [main], "tags": [], "converts": []})
        else:
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
                for path, data in repository.files.items()
            ]
            about = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}
            self._send_json({**about, "private": False, "tags": [], "downloads": 0, "likes": 0})

    def _answer_file(self, kind: str | None, name: str, revision: str, path: str) -> None:
        repository = self._find(kind, name, revision)
        if repository is None:
            return
        data = repository.files.get(path)
        if data is None:
            self._refuse("EntryNotFound", commit=repository.commit)
            return
        headers = {"ETag": f'"{etag_of(path, data)}"', "X-Repo-Commit": repository.commit}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._send(200, data, {**headers, "Accept-Ranges": "bytes"})
            return
        first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206, data[first : last + 1], headers)

    def _refuse(self, code: str, *, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self._send(404, b"{}", headers | ({"X-Repo-Commit": commit} if commit else {}))

    def _send_json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
