"""A report as one page: a map of the disk, tables, and the commands that free room.

The page asks nobody for anything: style, script and data are in it, and its Content-Security-Policy
lets nothing else run. Names of files are data from first to last: `document` makes them printable,
`render` writes them as JSON that no HTML parser can mistake for markup, and the script puts them
into the page as text only.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import os
import shlex
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from smartcache import __version__
from smartcache.errors import DestinationExistsError, SmartcacheError
from smartcache.folders.groups import Group
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import Figures
from smartcache.hub import Census, Key, scan_caches, used
from smartcache.report.figures import Report
from smartcache.report.names import Namer
from smartcache.report.naming import Naming, from_home, is_hash, left_options, left_words
from smartcache.report.roles import roles
from smartcache.store.records import KnownFile
from smartcache.store.store import Store
from smartcache.system.ownfiles import atomically

MOST_FILES = 50_000
"""Names in the page, the largest; the others are counted together, model by model."""
MOST_GROUPS = 1_000
MARK = '<meta name="generator" content="smartcache report">'
"""What tells a page of ours from any other file; near its beginning."""
_HEAD = 1024
_HUGGING_FACE = "Hugging Face"
_TEMPLATE = resources.files("smartcache.report")
_HARMLESS = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
"""Nothing in JSON needs these as they are; U+2028 and its like are escaped anyway: it is ASCII."""

Clean = Callable[[str], str]
Row = dict[str, Any]
"""A row of a table, before its names are clean."""
Node = dict[str, Any]
"""A box of the map: a file, or a name with children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What the page shows that is in no folder's figures."""

    repos: Sequence[Row] = ()
    """Repos of the HF caches: size, and disk blocks."""
    components: Sequence[Row] = ()
    """Files that several repos have in common, each once on the disk."""
    only_smartcache: int = 0
    """Disk blocks that have no name outside the store."""


def look_beside(store: Store, report: Report) -> Beside:
    """Ask the store and the HF caches of the report for their figures."""
    caches = [folder.path for folder in report.folders if folder.program == _HUGGING_FACE]
    census = Census(scan_caches(caches), store)
    # By the links there are now: what was deleted since the last look is only in the store.
    return Beside(
        repos=[*_repos(census)],
        components=_components(census),
        only_smartcache=store.usage().only_smartcache,
    )


def _repos(census: Census) -> Iterator[Row]:
    for repo in census.repos:
        share = census.share_of_repo(repo)
        yield {
            "name": str(repo.repo), "size": repo.size, "own": share.own, "shared": share.shared,
            "accessed": repo.accessed_at.isoformat(),
        }  # fmt: skip


def _components(census: Census) -> list[Row]:
    """Return what repos have in common, by component: the folder in the repo, or the file."""
    found: defaultdict[tuple[str, tuple[str, ...]], dict[Key, int]] = defaultdict(dict)
    for repo in census.repos:
        bodies = used(repo)
        for pointer in (each for revision in repo.revisions for each in revision.pointers):
            if pointer.body is None or pointer.body.key not in bodies:
                continue
            repos = tuple(sorted(census.users_of(pointer.body.key)))
            if len(repos) > 1 and pointer.body.allocated:
                component = pointer.path.partition("/")[0]
                found[component, repos][pointer.body.key] = pointer.body.allocated
    rows: list[Row] = [
        {"name": name, "files": len(files), "size": sum(files.values()), "repos": repos}
        for (name, repos), files in found.items()
    ]
    return sorted(rows, key=lambda row: (-row["size"], row["name"]))


# the data of the page


def document(
    report: Report,
    beside: Beside,
    *,
    program: Sequence[str] = ("smartcache",),
    options: Sequence[str] = (),
    folders: Sequence[str] = (),
    clean: Clean,
) -> dict[str, object]:
    """Return all that the page shows.

    The commands in it look at what this report looked at: `program` are the words they begin with,
    `options` and `folders` those that were given. `clean` makes names harmless that have strange
    bytes.
    """
    groups = [group for group in report.groups if group.freeable or group.elsewhere or _left(group)]
    groups.sort(key=lambda group: (-group.freeable, -group.elsewhere, group.digest))
    shown = groups[:MOST_GROUPS]
    naming = Naming()
    least = [word for word in options if word.startswith("--min-size")]
    total = report.total
    return {
        "version": __version__,
        "at": report.at.isoformat(),
        "total": {
            "files": total.files,
            "folders": len(report.folders),
            "logical": total.logical,
            "physical": total.physical,
            "saved": total.saved,
            "freeable": total.freeable,
            "store": beside.only_smartcache,
        },
        "map": [*_Map(report, clean).nodes(), *_of_store(report, beside, clean)],
        "disks": [
            {"path": clean(str(each.path)), "free": each.free, "prunable": each.prunable}
            for each in report.disks
        ],
        "actions": list(_actions(report, program, [*options, *folders])),
        "folders": [
            _folder(each.folder, each, clean)
            for each in report.figures
            if each.folder is not None and each.logical
        ],
        "groups": [_group(each, naming, [*program, "dedup", *least], clean) for each in shown],
        "more_groups": len(groups) - len(shown),
        "components": [
            {**row, "name": clean(row["name"]), "repos": [*map(clean, row["repos"])]}
            for row in beside.components
        ],
        "repos": [
            {
                **row,
                "name": clean(row["name"]),
                "command": shell([*program, "hub", "rm", row["name"]]),
            }
            for row in beside.repos
        ],
        "sets": [
            {
                "name": clean(info.full_name),
                "artifacts": info.artifacts,
                "live": info.live,
                "on_disk": info.on_disk,
                "reclaimable": freeable,
                "created": _iso(info.created_at),
                "used": _iso(info.used_at),
                "problem": clean(info.problem),
            }
            for info, freeable in report.artifact_sets
        ],
        "warnings": [
            clean(f"{from_home(each.path)}: {each.reason}")
            for each in (*report.damaged, *report.problems)
        ],
    }


@dataclass(slots=True)
class _Branch:
    """A program, model or folder of the map while files are added to it."""

    children: dict[str, _Branch] = field(default_factory=dict)
    leaves: list[Node] = field(default_factory=list)
    others: int = 0
    """Names too small to be told apart."""
    others_bytes: int = 0

    def nodes(self, clean: Clean, *, is_top: bool = False) -> list[Node]:
        found = [*self.leaves]
        for label, child in self.children.items():
            node: Node = {"name": clean(label), "children": child.nodes(clean)}
            below = node["children"]
            # A folder with nothing but a folder in it is one step, not two.
            if not is_top and len(below) == 1 and "children" in below[0]:
                node = {**below[0], "name": f"{node['name']}/{below[0]['name']}"}
            found.append(node)
        if self.others:
            name = f"{self.others:,} smaller file{'' if self.others == 1 else 's'}"
            found.append({"name": name, "bytes": self.others_bytes, "state": "rest"})
        return found


class _Map:
    """The tree of what takes room: program, model (or folders), file.

    A file with several names is on the disk once, and each name gets an equal part of it: all parts
    add up to what the disk holds.
    """

    def __init__(self, report: Report, clean: Clean) -> None:
        self._report = report
        self._clean = clean
        self._namer = Namer()
        self._folders = {folder.path: folder for folder in report.folders}
        self._shown = {folder.path: from_home(folder.path) for folder in report.folders}
        programs = Counter(folder.program for folder in report.folders)
        self._several = {program for program, count in programs.items() if program and count > 1}
        self._duplicates = {
            (copy.filesystem, copy.inode)
            for group in report.groups
            for copy, role in roles(group)
            if role == "duplicate"
        }
        sizes = (same[0].allocated // len(same) for same in report.files for _ in same)
        self._least = min(heapq.nlargest(MOST_FILES, sizes), default=0)
        self._room = MOST_FILES

    def nodes(self) -> list[Node]:
        """Return the programs, each with all that is in it."""
        root = _Branch()
        for number, same in enumerate(self._report.files):
            allocated, count = same[0].allocated, len(same)
            for position, name in enumerate(same):
                share = allocated // count + (position < allocated % count)
                shown, parts = self._shown_as(name)
                *above, label = self._place(name, parts)
                branch = root
                for part in above:
                    branch = branch.children.setdefault(part, _Branch())
                if not self._room or share < self._least:
                    branch.others += 1
                    branch.others_bytes += share
                    continue
                self._room -= 1
                branch.leaves.append({
                    "name": self._clean(label),
                    "bytes": share,
                    "path": self._clean(shown),
                    "size": name.size,
                    "disk": name.allocated,
                    "state": self._state(name),
                    **({"file": number} if count > 1 else {}),
                })  # fmt: skip
        return root.nodes(self._clean, is_top=True)

    def _state(self, name: KnownFile) -> str:
        if (name.filesystem, name.inode) in self._duplicates:
            return "duplicate"
        return "shared" if name.links > 1 else "own"

    def _shown_as(self, name: KnownFile) -> tuple[str, list[str]]:
        """Return the path of a file from the home, and its steps from the folder it was met in."""
        path, inside = str(name.path), os.path.join(name.folder, "")
        if path.startswith(inside):
            below = path[len(inside) :]
            return os.path.join(self._shown[name.folder], below), below.split("/")
        # A symlink in the folder led out of it.
        shown = from_home(name.path)
        return shown, list(os.path.split(shown))

    def _place(self, name: KnownFile, parts: list[str]) -> list[str]:
        """Return where a file stands in the tree: program, model or folders, its own name."""
        folder = self._folders[name.folder]
        top = [folder.program or self._shown[name.folder]]
        if folder.program in self._several:
            top.append(self._shown[name.folder])
        if repo := self._namer.repo_of(name.path, folder):
            called = self._namer.name(name.path, folder).partition(" \N{MIDDLE DOT} ")[2]
            return [*top, repo, called or (repo if is_hash(parts[-1]) else parts[-1])]
        return [*top, *parts]


def _of_store(report: Report, beside: Beside, clean: Clean) -> Iterator[Node]:
    """Go through what smartcache itself keeps: tensors, and blobs that nothing else has."""
    sets: list[Node] = [
        {"name": clean(f"{info.name}/{info.id[:12]}"), "bytes": info.on_disk, "state": "set"}
        for info, _ in report.artifact_sets
        if info.on_disk
    ]
    if sets:
        yield {"name": "Computed tensors", "children": sets}
    if beside.only_smartcache:
        name = "Held only by smartcache"
        kept: Node = {"name": name, "bytes": beside.only_smartcache, "state": "kept"}
        yield {"name": "smartcache", "children": [kept]}


def _folder(folder: ModelFolder, each: Figures, clean: Clean) -> dict[str, object]:
    return {
        "program": clean(folder.program),
        "path": clean(from_home(folder.path)),
        "files": each.files,
        "logical": each.logical,
        "physical": each.physical,
        "shared": each.shared,
        "only": each.physical - each.shared,
        "freeable": each.freeable,
    }


def _group(group: Group, naming: Naming, dedup: list[str], clean: Clean) -> dict[str, object]:
    """Return a group of copies, and the command that looks at the folders they are in."""
    copies = [
        {
            "role": "same file" if number and role != "duplicate" else role,
            "program": clean(name.folder.program),
            "path": clean(from_home(name.path)),
        }
        for copy, role in roles(group)
        for number, name in enumerate(copy.names)
    ]
    folders = (
        str(name.folder.path)
        for copy in group.copies
        for name in copy.names
        if not copy.is_only_in_store
    )
    allowed = [] if group.freeable else left_options(group.skipped)
    may_free = group.freeable or allowed
    return {
        "name": clean(str(naming.of(group))),
        "size": group.size,
        "freeable": group.freeable,
        "elsewhere": group.elsewhere,
        "left": _left(group),
        "reasons": sorted({skip.reason for skip in group.skipped if skip.size}),
        "copies": copies,
        "command": shell([*dedup, *allowed, *dict.fromkeys(folders)]) if may_free else "",
    }


def _left(group: Group) -> int:
    """Return what `dedup` leaves alone of a group, in bytes."""
    return sum(skip.size for skip in group.skipped)


def _actions(
    report: Report, program: Sequence[str], options: Sequence[str]
) -> Iterator[dict[str, object]]:
    """Go through what would free room: how much, what happens, and the command to paste."""

    def action(
        title: str,
        text: str,
        words: Sequence[str] = (),
        size: int | None = None,
        *,
        is_certain: bool = False,
    ) -> dict[str, object]:
        command = shell([*program, *words]) if words else ""
        return {
            "title": title, "size": size, "certain": is_certain, "text": text, "command": command,
        }  # fmt: skip

    if report.total.freeable:
        groups = sum(group.freeable > 0 for group in report.groups)
        many = "1 file is" if groups == 1 else f"{groups:,} files are"
        yield action(
            "Replace duplicates with links",
            f"{many} stored more than once. Every path stays and keeps its bytes. The command "
            "shows its plan and asks first, and 'smartcache undo' takes it back.",
            ["dedup", *options],
            report.total.freeable,
            is_certain=True,
        )
    if report.left:
        allowed = left_options(report.left)
        yield action(
            "Duplicates that dedup leaves alone",
            " ".join(left_words(report.left)),
            ["dedup", *allowed, *options] if allowed else (),
            sum(each.size for each in report.left if each.options or not allowed),
        )
    if report.prunable:
        yield action(
            "Remove what nothing uses any more",
            "Blobs whose files and repos are gone, and tensors that are past their time. The "
            "command shows what would go and asks first.",
            ["prune"],
            report.prunable,
            is_certain=True,
        )
    if report.uncompared:
        files = "1 file has" if report.uncompared == 1 else f"{report.uncompared:,} files have"
        yield action(
            "Compare more files",
            f"{files} the size of another file and may be a duplicate. A scan reads and compares "
            "them; it changes nothing. Then make this page again.",
            ["scan", *options],
        )
    if report.elsewhere:
        yield action(
            "Copies on other filesystems",
            "The same file on two disks. A link cannot reach from one to the other: delete one of "
            "them in its program if you do not need both.",
            size=report.elsewhere,
        )


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def shell(words: Iterable[str]) -> str:
    r"""Return words as a shell takes them; what cannot be shown is written as in `$'\xff'`."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    raw = os.fsencode(word)
    return "$'" + "".join(map(_ansi, raw)) + "'"


def _ansi(byte: int) -> str:
    character = chr(byte)
    if character in "\\'":
        return f"\\{character}"
    # Octal has three digits at most: no character behind it can be taken for a fourth.
    return character if character.isascii() and character.isprintable() else f"\\{byte:03o}"


# the page


def render(data: dict[str, object]) -> str:
    """Return the page: the template with style, script and data in it, and their hashes."""
    style, script = _read("page.css"), _read("page.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":")).translate(_HARMLESS)
    page = _read("page.html")
    # The data comes last: whatever is in it, nothing looks for a place in it any more.
    for name, value in (
        ("mark", MARK), ("policy", policy), ("style", style), ("script", script), ("data", text),
    ):  # fmt: skip
        page = page.replace(f"{{{{{name}}}}}", value, 1)
    return page


def _read(name: str) -> str:
    return (_TEMPLATE / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def check_target(path: Path, *, force: bool = False) -> None:
    """Raise if a page may not be written here: nothing is overwritten but an older page."""
    try:
        st = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink() or path.parent.is_dir():
            return
        hint = "Make it first, or name another place."
        raise SmartcacheError(f"There is no folder {path.parent}", hint=hint) from None
    if stat.S_ISDIR(st.st_mode):
        raise SmartcacheError(f"{path} is a folder", hint=f"Name a file: {path / 'report.html'}")
    if not stat.S_ISREG(st.st_mode):
        raise SmartcacheError(f"{path} is not a file", hint="'--html -' writes to stdout.")
    if force:
        return
    with open(path, "rb") as file:
        if MARK.encode() not in file.read(_HEAD):
            hint = "Name another file, or replace this one with --force."
            raise DestinationExistsError(f"{path} exists and is not a report", hint=hint)


def write(page: str, path: Path) -> Path:
    """Write a page: it appears whole or not at all. Return where it is."""
    target = Path(os.path.realpath(path))
    with atomically(target, is_private=False) as file:
        file.write(page.encode())
    return target
