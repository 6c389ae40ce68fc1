"""The HTTP of it: what a request asks for, and the answer as the Hub gives it.

Both origins use the same class; on the CDN's port there are only the bytes of files, and no token
is asked for. Connections are kept.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit

from tests.hub_server import listings
from tests.hub_server.bodies import Body, range_of, send_body, take_time
from tests.hub_server.log import Origin, Request
from tests.hub_server.repos import REPO_TYPES, Commit, HubFile, Repository

if TYPE_CHECKING:
    from tests.hub_server.server import Hub

CONTROL = "/control/"
"""Requests of `HubProcess` to its child; not logged."""

_KINDS = {f"{kind}s": kind for kind in REPO_TYPES}
_VERBS = ("revision", "tree", "refs", "paths-info", "xet-read-token")


class Answer(BaseHTTPRequestHandler):
    """One connection, with its requests one after another."""

    hub: Hub
    origin: Origin
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024
    """Headers and a small body leave together."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing: the log of requests is the hub's."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        address = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        self._posted = self.rfile.read(length) if length else b""
        self._query = dict(parse_qsl(address.query, keep_blank_values=True))
        self._token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self._request = Request(
            method=self.command,
            path=unquote(address.path),
            query=self._query,
            origin=self.origin,
            range=self.headers.get("Range"),
            authorized=bool(self._token),
            user_agent=self.headers.get("User-Agent", ""),
        )
        if address.path.startswith(CONTROL) and self.hub.control is not None:
            verb = address.path.removeprefix(CONTROL)
            self._send_json(self.hub.control(verb, json.loads(self._posted or b"{}")))
            return
        self.hub.requests.append(self._request)
        parts = address.path.removeprefix("/").split("/")
        if parts[0] == "api":
            self._answer_api([unquote(part) for part in parts[1:]])
        else:
            self._answer_resolve(parts)

    def _find(self, kind: str, name: str, revision: str) -> tuple[Repository, Commit] | None:
        """Return the repo and the commit; None if the client was told why not."""
        hub, token = self.hub, self._token
        repo = hub.repositories.get((kind, name))
        is_open = self.origin == "cdn" or name in hub.tokens.get(token, ())
        if token and hub.tokens and token not in hub.tokens:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repo is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
        elif repo.is_private and not is_open:
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif (commit := repo.find(revision)) is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif repo.is_gated and not is_open and not self.path.startswith("/api/"):
            message = f"Access to {kind} {name} is restricted."
            self._refuse(403 if token else 401, "GatedRepo", message)
        else:
            return repo, commit
        return None

    def _fails(self, name: str) -> bool:
        """Do what goes wrong before any answer; say whether that was the answer."""
        faults = self.hub.faults
        for kind in ("slow", "hold"):
            if fault := faults.take(kind, name, self.command, is_at_start=True):
                take_time(fault)
        if fault := faults.take("status", name, self.command):
            self._refuse(fault.status, "", "Something went wrong")
        elif fault := faults.take("answer", name, self.command):
            self._send(200, fault.body, {"Content-Type": "application/json", **fault.headers})
        return fault is not None

    def _answer_api(self, words: list[str]) -> None:
        if self._fails(self._request.path):
            return
        if len(words) < 2 or words[0] not in _KINDS or self.origin == "cdn":
            self._refuse(404, "", "No such page")
            return
        end = 2 if len(words) == 2 or words[2] in _VERBS else 3
        name, verb, rest = "/".join(words[1:end]), words[end : end + 1], words[end + 1 :]
        found = self._find(_KINDS[words[0]], name, rest[0] if rest else "main")
        if found is not None:
            self._answer_listing(*found, verb[0] if verb else "revision", "/".join(rest[1:]))

    def _answer_listing(self, repo: Repository, commit: Commit, verb: str, path: str) -> None:
        faults = self.hub.faults
        if verb == "revision":
            has_blobs = _is_true(self._query.get("blobs"))
            self._send_json(listings.info_of(repo, commit, faults, has_blobs=has_blobs))
        elif verb == "refs":
            self._send_json(listings.refs_of(repo))
        elif verb == "paths-info" and self.command == "POST":
            self._send_json(listings.paths_info(commit, _paths_in(self._posted), faults))
        elif verb == "tree":
            is_recursive = _is_true(self._query.get("recursive"))
            paths = listings.tree_of(commit, path, is_recursive=is_recursive)
            if paths is None:
                self._refuse(404, "EntryNotFound", f"{path} does not exist on {commit.sha}")
            else:
                self._send_page(commit, paths)
        else:
            self._refuse(404, "", "No such page")

    def _send_page(self, commit: Commit, paths: list[str]) -> None:
        start = int(self._query.get("cursor", "0"))
        end = start + self.hub.page_size
        is_expanded = _is_true(self._query.get("expand"))
        page = listings.entries_of(
            commit, paths[start:end], self.hub.faults, is_expanded=is_expanded
        )
        if end < len(paths):
            query = urlencode({**self._query, "cursor": end})
            address = f"{self.hub.url}{urlsplit(self.path).path}?{query}"
            self._send_json(page, {"Link": f'<{address}>; rel="next"'})
        else:
            self._send_json([*page, *commit.extra])

    def _answer_resolve(self, parts: list[str]) -> None:
        kind = _KINDS.get(parts[0], "")
        words = parts[1:] if kind else parts
        where = words.index("resolve", 1) if "resolve" in words[1:3] else 0
        if not where or len(words) < where + 3:
            self._refuse(404, "", "No such page")
            return
        name = unquote("/".join(words[:where]))
        found = self._find(kind or "model", name, unquote(words[where + 1]))
        if found is None:
            return
        repo, commit = found
        path = unquote("/".join(words[where + 2 :]))
        if path in commit.files:
            self._request.file = f"{name}/{path}"
            self._answer_file(repo, commit, path)
        else:
            headers = {"X-Repo-Commit": commit.sha}
            self._refuse(404, "EntryNotFound", "Entry not found", headers)

    def _answer_file(self, repo: Repository, commit: Commit, path: str) -> None:
        file, name = commit.files[path], f"{repo.id}/{path}"
        is_elsewhere = self.hub.cdn and file.is_lfs and self.origin == "hub"
        if not (is_elsewhere and self.command == "GET") and self._fails(name):
            return
        size: int | None = file.size
        if is_elsewhere or self.command == "HEAD":
            size = listings.announced_size(file, name, self.hub.faults)
        headers = self._headers_of(repo, commit, path, size)
        if is_elsewhere:
            headers["Location"] = self.hub.cdn_address(repo, commit, path)
            self._send(302, b"", headers)
        elif self.command == "HEAD":
            self._start(200, headers | ({} if size is None else {"Content-Length": str(size)}))
        else:
            self._send_file(file, name, headers)

    def _headers_of(
        self, repo: Repository, commit: Commit, path: str, size: int | None
    ) -> dict[str, str]:
        file = commit.files[path]
        if self.origin == "cdn":
            return {"ETag": f'"{file.oid[:32]}"', "Accept-Ranges": "bytes"}
        fault = self.hub.faults.take("wrong_sha", f"{repo.id}/{path}", self.command)
        etag = fault.sha256 if fault else file.etag
        headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes", "ETag": f'"{etag}"'}
        if file.is_lfs:
            headers["X-Linked-Etag"] = f'"{etag}"'
            headers |= {} if size is None else {"X-Linked-Size": str(size)}
        if self.hub.xet_headers and file.xet is not None:
            route = f"{self.hub.url}/api/{repo.type}s/{repo.id}/xet-read-token/{commit.sha}"
            headers |= {"X-Xet-Hash": file.xet, "Link": f'<{route}>; rel="xet-auth"'}
        return headers

    def _send_file(self, file: HubFile, name: str, headers: dict[str, str]) -> None:
        part = range_of(self._request.range, file.size)
        if part is None:
            self._refuse(416, "", "No such range", {"Content-Range": f"bytes */{file.size}"})
            return
        faults = self.hub.faults
        taken = [faults.take(kind, name, "GET") for kind in ("slow", "hold", "cut")]
        body = Body(
            file, *part,
            stops=tuple(fault for fault in taken if fault),
            is_false=faults.take("wrong_bytes", name, "GET") is not None,
            is_chunked=faults.take("no_size", name) is not None,
        )  # fmt: skip
        is_part = self._request.range is not None
        if is_part:
            headers["Content-Range"] = f"bytes {body.first}-{body.end - 1}/{file.size}"
        if body.is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Content-Length"] = str(body.size)
        self._start(206 if is_part else 200, headers)
        self.wfile.flush()
        if not send_body(body, self.connection, self._request, self.hub.limit):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _refuse(
        self, status: int, code: str, message: str, more: Mapping[str, str] | None = None
    ) -> None:
        headers = {"X-Error-Message": message, "Content-Type": "application/json", **(more or {})}
        if code:
            headers["X-Error-Code"] = code
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send_json(self, document: object, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self._send(200, body, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._start(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self._request.sent += len(body)
            self.wfile.write(body)

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._request.status = status
        self.send_response(status)
        fault = self.hub.faults.take("header", self._request.path)
        for name, value in {**headers, **(fault.headers if fault else {})}.items():
            self.send_header(name, value)
        self.end_headers()


def _is_true(text: str | None) -> bool:
    return text is not None and text.lower() in ("", "1", "true")


def _paths_in(posted: bytes) -> list[str]:
    """Return the paths of a form or of a JSON document."""
    if posted.startswith(b"{"):
        return [str(path) for path in json.loads(posted)["paths"]]
    return parse_qs(posted.decode(), keep_blank_values=True).get("paths", [])
