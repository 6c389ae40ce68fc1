"""What goes wrong on demand, for which files and how often.

    hub.faults.cut("unet/model.safetensors", after=1000)           # once, then all is well
    hub.faults.status("org/name/config.json", 503, times=2)
    hub.faults.wrong_size("model.safetensors", by=1)               # until hub.faults.clear()
    hold = hub.faults.hold("model.safetensors", after=70_000)      # the body stops there ...
    hold.reached.wait(60); client.kill(); hold.release()           # ... until released

`part` is any part of `org/name/path/in/repo`, or of `/api/...` for the listings (status, slow, hold
and answer only). Faults of the transfer count requests for the body (GET) unless `method` says
otherwise.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal[
    "wrong_bytes",
    "cut",
    "slow",
    "hold",
    "status",
    "no_size",
    "wrong_size",
    "wrong_sha",
    "header",
    "answer",
]
ALWAYS = 1 << 60
LISTING = "listing"
"""Stands for the method where a file is announced in a listing."""


class Hold:
    """A body that stops in the middle until it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def wait(self) -> None:
        """Called by the server: say that the point is reached, and stay there."""
        self.reached.set()
        self._released.wait()


@dataclass(slots=True, kw_only=True)
class Fault:
    kind: Kind
    part: str
    times: int
    method: str = ""
    """Empty: any."""
    after: int = 0
    seconds: float = 0.0
    status: int = 500
    by: int = 0
    sha256: str = ""
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hold: Hold = field(default_factory=Hold)


class Faults:
    """The faults still to come."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def wrong_bytes(self, part: str, *, times: int = 1) -> None:
        """One byte in the middle is another one; the length is right."""
        self._add(Fault(kind="wrong_bytes", part=part, times=times, method="GET"))

    def cut(self, part: str, *, after: int, times: int = 1) -> None:
        """The connection ends after so many bytes of the body."""
        self._add(Fault(kind="cut", part=part, times=times, method="GET", after=after))

    def slow(
        self, part: str, seconds: float, *, after: int = 0, times: int = 1, method: str = "GET"
    ) -> None:
        """The server sleeps after so many bytes of the body; after 0: before the answer."""
        fault = Fault(
            kind="slow", part=part, times=times, method=method, after=after, seconds=seconds
        )
        self._add(fault)

    def hold(self, part: str, *, after: int = 0, times: int = 1, method: str = "GET") -> Hold:
        """The body stops after so many bytes until the returned hold is released."""
        fault = Fault(kind="hold", part=part, times=times, method=method, after=after)
        self._add(fault)
        return fault.hold

    def status(self, part: str, status: int = 500, *, times: int = 1, method: str = "GET") -> None:
        """The answer is this error; `method=""` for HEAD and GET alike."""
        self._add(Fault(kind="status", part=part, times=times, method=method, status=status))

    def no_size(self, part: str, *, times: int = ALWAYS) -> None:
        """No size in the listing, no length in HEAD, a body in chunks."""
        self._add(Fault(kind="no_size", part=part, times=times))

    def wrong_size(self, part: str, *, by: int, times: int = ALWAYS) -> None:
        """The listing and HEAD announce `by` bytes more than are sent."""
        self._add(Fault(kind="wrong_size", part=part, times=times, by=by))

    def wrong_sha(
        self, part: str, sha256: str = "0" * 64, *, times: int = ALWAYS, in_head: bool = False
    ) -> None:
        """The listing announces another sha256; with `in_head` HEAD does so too."""
        method = "" if in_head else LISTING
        self._add(Fault(kind="wrong_sha", part=part, times=times, method=method, sha256=sha256))

    def other_etag(self, part: str, etag: str) -> None:
        """HEAD and GET name another hash than the listing, as some mirrors do."""
        for method in ("HEAD", "GET"):
            self._add(Fault(kind="wrong_sha", part=part, times=ALWAYS, method=method, sha256=etag))

    def header(self, part: str, name: str, value: str) -> None:
        """Every answer has this header, word for word."""
        self._add(Fault(kind="header", part=part, times=ALWAYS, headers={name: value}))

    def answer(self, part: str, body: bytes, *, times: int = ALWAYS, **headers: str) -> None:
        """The answer is 200 with these bytes; `Link="..."` and the like are further headers."""
        fault = Fault(kind="answer", part=part, times=times, body=body, headers=headers)
        self._add(fault)

    def clear(self) -> None:
        """All is well again; what is held goes on."""
        with self._lock:
            gone, self._faults = self._faults, []
        for fault in gone:
            fault.hold.release()

    def take(
        self, kind: Kind, name: str, method: str = "", *, is_at_start: bool = False
    ) -> Fault | None:
        """Return the first fault of this kind that applies, and count it."""
        with self._lock:
            for fault in self._faults:
                if (
                    fault.kind == kind and fault.part in name and fault.times > 0
                    and fault.method in ("", method) and not (is_at_start and fault.after)
                ):  # fmt: skip
                    fault.times -= 1
                    return fault
        return None

    def _add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)
