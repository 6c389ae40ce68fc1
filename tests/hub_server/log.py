"""What was asked: one `Request` per request, in order of arrival.

    assert [request.file for request in log.gets("vae")] == ["org/name/vae/model.safetensors"]

Bytes are counted before they are handed to the system, and corrected when that fails: a client that
has the last byte finds it counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

Origin: TypeAlias = Literal["hub", "cdn"]


@dataclass(slots=True, kw_only=True)
class Request:
    """One request and how far its answer got."""

    method: str
    path: str
    """Decoded, without the query."""
    query: dict[str, str] = field(default_factory=dict)
    origin: Origin = "hub"
    range: str | None = None
    authorized: bool = False
    """Whether a token came with it, good or bad."""
    user_agent: str = ""
    file: str | None = None
    """`org/name/path/in/repo` if it asks for a file that exists."""
    status: int = 0
    sent: int = 0
    """Bytes of the body that were sent."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Log(list[Request]):
    """All requests since the last `clear`."""

    def files(self, method: str, part: str = "") -> list[Request]:
        """Return the requests for files with `part` in `org/name/path`, redirects left out."""
        return [
            each for each in list(self)
            if each.method == method and each.file is not None and part in each.file
            and each.status not in (301, 302, 307, 308)
        ]  # fmt: skip

    def gets(self, part: str = "") -> list[Request]:
        """Return the requests for the bytes of files."""
        return self.files("GET", part)

    def heads(self, part: str = "") -> list[Request]:
        return [
            each for each in list(self)
            if each.method == "HEAD" and each.file is not None and part in each.file
        ]  # fmt: skip

    def api(self, part: str = "") -> list[Request]:
        """Return the requests for listings and the like."""
        return [each for each in list(self) if each.path.startswith("/api/") and part in each.path]

    def fetched_bytes(self, part: str = "") -> int:
        """Return how many bytes of files were sent."""
        return sum(each.sent for each in self.gets(part))
