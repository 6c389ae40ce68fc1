"""Groups, reports and their parts, for tests of what is said about them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from smartcache.artifacts import SetInfo
from smartcache.artifacts.setfolder import Options
from smartcache.folders.checks import Copy, Name
from smartcache.folders.groups import Group
from smartcache.folders.programs import ModelFolder
from smartcache.report.figures import Report, Sums
from smartcache.store.records import KnownFile
from tests.folders.counting import Unhindered

COMFYUI = ModelFolder(path=Path("/c/models"), program="ComfyUI")
PLAIN = ModelFolder(path=Path("/p"))
GB = 1_000_000_000


def copy(
    inode: int,
    *names: str,
    folder: ModelFolder = COMFYUI,
    filesystem: str = "uuid:1",
    links: int | None = None,
    shares_with: int | None = None,
    is_blob: bool = False,
) -> Copy:
    """A copy of one gigabyte."""
    paths = [Path(name) for name in names]
    return Copy(
        filesystem=filesystem,
        inode=inode,
        names=tuple(Name(path=path, folder=folder) for path in paths),
        links=len(paths) + is_blob if links is None else links,
        allocated=GB,
        mtime_ns=0,
        is_blob=is_blob,
        shares_with=shares_with,
    )


def group(*copies: Copy, elsewhere: int = 0) -> Group:
    verdicts = Unhindered().verdicts(copies)
    return Group(digest="ab" * 32, size=GB, copies=copies, elsewhere=elsewhere, verdicts=verdicts)


def report(**parts: object) -> Report:
    """A report of nothing, but for the parts given."""
    empty = {
        "at": datetime(2025, 1, 2, tzinfo=UTC),
        "folders": (COMFYUI,),
        "total": Sums(label="total"),
        "programs": (),
        "kinds": (),
        "repos": (),
        "most_shared": (),
        "across": (),
        "elsewhere": 0,
        "min_size": 1,
        "uncompared": 0,
        "problems": (),
        "warnings": (),
    }
    return Report(**(empty | parts))  # type: ignore[arg-type]


HOSTILE = (
    "</script><img src=x onerror=document.title='owned'>",
    "</title></style><script>document.title='owned'</script>.gguf",
    "\"quotes' & <b>tags</b> &lt;.pt",
    "right to left\u202egpj.bin",
    "line\nbreak \x1b[31m\u2028\u2029.ckpt",
    "no utf-8 \udcff\udcfe.pt",
    "{{script}} {{data}} $& $' $(id) `id`",
)
"""Names of files that would like to be more than that; the slash in some makes folders of them."""


def seen(
    path: str,
    size: int,
    *,
    inode: int,
    folder: ModelFolder = COMFYUI,
    links: int = 1,
    allocated: int | None = None,
) -> KnownFile:
    """A name of a file in a folder."""
    return KnownFile(
        path=folder.path / path,
        folder=folder.path,
        size=size,
        allocated=size if allocated is None else allocated,
        links=links,
        filesystem="uuid:1",
        inode=inode,
    )


def set_info(
    name: str,
    *,
    artifacts: int = 1,
    live: int = 2,
    on_disk: int = 3,
    problem: str = "",
    at: datetime | None = None,
) -> SetInfo:
    """A set of tensors, made and used at one time."""
    label, _, id_ = name.partition("/")
    return SetInfo(
        name=label, id=id_, fingerprint=None, path=Path("/store/sets", name), created_at=at,
        used_at=at, options=Options(), artifacts=artifacts, live=live, on_disk=on_disk,
        problem=problem,
    )  # fmt: skip
