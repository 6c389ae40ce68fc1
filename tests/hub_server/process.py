"""The Hub in a process of its own, so that a benchmark's client does not share its interpreter.

    with HubProcess(root, bandwidth=125_000_000) as hub:
        subprocess.run(["hf", "download", "org/name"], env={**os.environ, **hub.environment})
        print(hub.fetched_bytes())
        hub.set(bandwidth=None)

It serves the folders `<root>/models/<org>/<name>`, and `datasets` and `spaces` likewise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hub_server.answers import CONTROL
from tests.hub_server.log import Log, Request
from tests.hub_server.repos import REPO_TYPES, JsonObject
from tests.hub_server.server import Hub, environment_for

ROOT = Path(__file__).resolve().parent.parent.parent
_PATIENCE = 60.0


class HubProcess:
    """A child that serves a folder; it ends with the `with` block, or when this process ends."""

    def __init__(
        self, root: Path | None = None, *, bandwidth: float | None = None, cdn: bool = False
    ) -> None:
        command = [sys.executable, "-m", "tests.hub_server"]
        command += [str(root)] if root is not None else []
        command += ["--bandwidth", str(bandwidth)] if bandwidth is not None else []
        command += ["--cdn"] if cdn else []
        self._child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self.url = self._child.stdout.readline().strip()
        if not self.url:
            self.close()
            raise RuntimeError("the Hub did not start")

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send a client process here, and nowhere else."""
        return environment_for(self.url)

    @property
    def requests(self) -> Log:
        """All requests since the last `clear`."""
        found = self._ask("log")
        assert isinstance(found, list)
        return Log(Request(**each) for each in found)

    def gets(self, part: str = "") -> list[Request]:
        return self.requests.gets(part)

    def fetched_bytes(self, part: str = "") -> int:
        return self.requests.fetched_bytes(part)

    def clear(self) -> None:
        self._ask("clear")

    def set(self, **settings: float | bool | None) -> None:
        """Change `bandwidth`, `cdn` or `page_size`."""
        self._ask("set", **settings)

    def add_folder(
        self, name: str, folder: Path, *, repo_type: str = "model", revision: str = "main"
    ) -> str:
        """Publish the files of a folder and return the commit."""
        where = {"name": name, "folder": str(folder), "repo_type": repo_type, "revision": revision}
        return str(self._ask("add", **where))

    def close(self) -> None:
        """End the child. It ends by itself when its standard input does."""
        try:
            self._child.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
            raise

    def _ask(self, verb: str, **words: object) -> object:
        data = json.dumps(words).encode()
        request = urllib.request.Request(f"{self.url}{CONTROL}{verb}", data)  # noqa: S310 - ours
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_PATIENCE) as answer:
            found: object = json.load(answer)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve_folder(hub: Hub, root: Path) -> None:
    """Publish every `<root>/<type>s/<org>/<name>`, hashed before the first request."""
    for repo_type in REPO_TYPES:
        for folder in sorted(root.glob(f"{repo_type}s/*/*")):
            name = "/".join(folder.parts[-2:])
            commit = hub.add_folder(name, folder, repo_type=repo_type)
            for path in commit.files:
                commit.etag(path)


def control(hub: Hub, verb: str, words: JsonObject) -> object:
    """Do what the parent asks for."""
    if verb == "log":
        return [each.as_dict() for each in list(hub.requests)]
    if verb == "clear":
        hub.clear()
    elif verb == "set":
        for name, value in words.items():
            if name not in ("bandwidth", "cdn", "page_size"):
                raise ValueError(f"no setting: {name}")
            setattr(hub, name, value)
    elif verb == "add":
        name, folder = str(words.pop("name")), Path(str(words.pop("folder")))
        return hub.add_folder(name, folder, **words).sha
    return None
