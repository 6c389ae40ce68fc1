"""How fast duplicates are found and linked, against the programs that do the same.

Usage: python scripts/bench/dedup.py [--scale 1.0] [--folder DIR] [--keep TREE] [--json]

The tree has 20,000 files, 5 GB and 40 % duplicates, always the same ones. It is read once before
anything is timed. Peers that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import _measure
from _measure import Run, Table, measured, median_run

FILES = 20_000
SIZE = 5_000_000_000
DUPLICATES = 0.4
SAME_SIZE = 0.1
"""Of the other files, so many have the size of another one, and half of those its first bytes too,
as models of one architecture do."""
HEADER = 4096
SPREAD = 2.0
"""Sigma of the lognormal sizes: half the files are below 14 % of the mean, a few are very large."""
SEED = 1
ROWS = 1_000_000
NEWEST = 1_700_000_000
OLD = NEWEST * 10**9
DAY = 86_400
YOUNG = 2.1
"""A file younger than two seconds is hashed again by the next scan; real ones are older."""
FOLDERS = (
    ("ComfyUI/models/{kind}", ("checkpoints", "loras", "vae", "text_encoders", "controlnet")),
    ("stable-diffusion-webui/models/{kind}", ("Stable-diffusion", "Lora", "VAE", "ControlNet")),
    ("hub/models--org--model{number}/snapshots/main", ()),
    ("lmstudio/models/publisher{number}/model{number}", ()),
    ("training/run{number}", ()),
)
SUFFIXES = (".safetensors", ".safetensors", ".gguf", ".ckpt", ".bin", ".pt", ".onnx")


@dataclass(frozen=True, slots=True)
class File:
    """A file to be made: `seed` decides its bytes, so that equal seeds are equal files."""

    name: str
    size: int
    seed: int
    header: int
    """Seed of its first bytes."""
    time: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a tree holds, and so what everybody must find."""

    files: int
    size: int
    duplicates: int
    duplicate_size: int
    groups: int
    one: str
    """A duplicate of about the mean size."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another program: how it is told to find, and to link."""

    find: tuple[str, ...]
    link: tuple[str, ...] = ()
    count: str = ""
    """Where its summary says how many files are duplicates."""
    size: str = ""
    """Where it says how many bytes."""
    is_proof: bool = True
    counts_originals: bool = False

    @property
    def name(self) -> str:
        """The program."""
        return self.find[0]


# No size floor, no check of times or names: all do the same work. -t: hardlink leaves files alone
# whose times differ, unless it is told to ignore them.
PEERS = (
    Peer(
        find=("hardlink", "-t", "-n"),
        link=("hardlink", "-t"),
        count=r"^Linked:\s+(\d+) files",
        size=r"^Saved:\s+([\d.]+) (\w+)",
    ),
    Peer(
        find=("jdupes", "-r", "-q", "-m"),
        link=("jdupes", "-r", "-q", "-L"),
        count=r"^(\d+) duplicate files",
        size=r"occupying ([\d.]+) (\w+)",
    ),
    Peer(
        find=("rdfind", "-dryrun", "true", "-makeresultsfile", "false"),
        link=("rdfind", "-makehardlinks", "true", "-makeresultsfile", "false"),
        count=r"you have (\d+) files that are not unique",
        size=r"Totally, ([\d.]+) (\w+) can be reduced",
        counts_originals=True,
    ),
    Peer(
        find=("rmlint", "-T", "df", "-o", "summary:stdout"),
        count=r"whereof (\d+) are duplicates",
        size=r"This equals ([\d.]+) (\w+) of duplicates",
    ),
    Peer(
        find=("fdupes", "-r", "-q", "-m"),
        count=r"^(\d+) duplicate files",
        size=r"occupying ([\d.]+) (\w+)",
    ),
    Peer(find=("duperemove", "-r"), is_proof=False),
)


def main() -> None:
    """Make the tree, run everything, and print one table."""
    arguments = parsed()
    if arguments.child:
        CHILDREN[arguments.child](arguments.folder, arguments.files, arguments.size)
        return
    _measure.rounds = arguments.rounds
    table = Table("Duplicates")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        room = Path(name)
        (room / "home").mkdir()
        tree = arguments.keep or room / "tree"
        count = max(20, int(arguments.files * arguments.scale))
        size = int(arguments.size * arguments.scale)
        facts = Facts(**json.loads(in_child("make", tree, count, size)))
        peers = [peer for peer in PEERS if shutil.which(peer.name)]
        describe(table, facts, peers)
        finding(room, tree, table, facts, peers)
        linking(room, tree, table, facts, peers, arguments.link_rounds or arguments.rounds)
        million_rows(room, table, max(1000, int(ROWS * arguments.scale)))
        compare_counts(room, tree, table, facts, peers)
    table.show(as_json=arguments.json)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of files and bytes")
    parser.add_argument("--files", type=int, default=FILES, help="files of the tree")
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of the tree")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument(
        "--link-rounds", type=int, help="the same for linking, which needs a copy of the tree each"
    )
    parser.add_argument("--folder", type=Path, help="where to work (default: the temporary folder)")
    parser.add_argument(
        "--keep", type=Path, metavar="TREE", help="make the tree there and keep it, or use it again"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    return parser.parse_args()


def plan(count: int, size: int) -> Iterator[File]:
    """Decide name, size and content of every file; always the same for the same arguments."""
    dice = random.Random(SEED)
    sizes = [dice.lognormvariate(0, SPREAD) for _ in range(count)]
    originals: list[tuple[float, int, int]] = []
    contents: list[tuple[float, int, int]] = []
    for number in range(count):
        if originals and dice.random() < DUPLICATES:
            contents.append(dice.choice(originals))
            continue
        header = number
        if originals and dice.random() < SAME_SIZE:
            sizes[number], _, other = dice.choice(originals)
            header = dice.choice((number, other))
        originals.append((sizes[number], number, header))
        contents.append(originals[-1])
    share = size / sum(weight for weight, _, _ in contents)
    for number, (weight, seed, header) in enumerate(contents):
        when = NEWEST - dice.randrange(DAY, 900 * DAY)
        yield File(name_of(dice, number), 1 + int(weight * share), seed, header, when)


def name_of(dice: random.Random, number: int) -> str:
    """Return a path as a program would have it."""
    folder, kinds = dice.choice(FOLDERS)
    kind = dice.choice(kinds) if kinds else ""
    inside = folder.format(kind=kind, number=dice.randrange(40))
    return f"{inside}/model-{number:06}{dice.choice(SUFFIXES)}"


def facts_of(planned: list[File]) -> Facts:
    """Count what there is to find."""
    names: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for file in planned:
        names[file.seed] = names.get(file.seed, 0) + 1
        sizes[file.seed] = file.size
    size = sum(file.size for file in planned)
    copies = [file for file in planned if names[file.seed] > 1]
    return Facts(
        files=len(planned),
        size=size,
        duplicates=len(planned) - len(names),
        duplicate_size=sum(sizes[seed] * (count - 1) for seed, count in names.items()),
        groups=sum(count > 1 for count in names.values()),
        one=min(copies, key=lambda file: abs(file.size - size / len(planned))).name,
    )


def make(tree: Path, count: int, size: int) -> None:
    """Write the tree, or see that the one of an earlier run is the same; read it once.

    Prints its facts.
    """
    planned = list(plan(count, size))
    if tree.exists():
        found = {str(path.relative_to(tree)): path.stat().st_size for path in walk(tree)}
        if found != {file.name: file.size for file in planned}:
            raise SystemExit(f"{tree} was made with other arguments")
    else:
        for file in planned:
            path = tree / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, file)
        os.sync()
    for path in walk(tree):
        with path.open("rb", buffering=0) as stream:
            while stream.read(1 << 20):
                pass
    print(json.dumps(asdict(facts_of(planned))))


def write(path: Path, file: File) -> None:
    """Write a file in pieces, so that this process stays small."""
    header = random.Random(-1 - file.header).randbytes(min(HEADER, file.size // 2))
    body = random.Random(file.seed)
    left = file.size - len(header)
    with path.open("wb") as stream:
        stream.write(header)
        while left:
            left -= stream.write(body.randbytes(min(left, 1 << 20)))
    os.utime(path, (file.time, file.time))


def walk(tree: Path) -> Iterator[Path]:
    """Go through the files of a tree."""
    for folder, _, names in os.walk(tree):
        for name in names:
            yield Path(folder, name)


def describe(table: Table, facts: Facts, peers: list[Peer]) -> None:
    """Say what the tree is and who is compared."""
    table.notes.append(
        f"The tree: {facts.files:,} files, {facts.size / 1e9:.1f} GB; {facts.duplicates:,} files"
        f" with {facts.duplicate_size / 1e9:.1f} GB are duplicates, in {facts.groups:,} groups."
    )
    table.notes.append(
        "Seconds are those a user waits, CPU what all threads took together, MB the most memory."
    )
    commands = ", ".join(f"`{' '.join(peer.find)}`" for peer in peers)
    table.notes.append(
        f"Peers: {commands or 'none'}. Without `-t`, hardlink passes over files whose times differ."
    )
    missing = [peer.name for peer in PEERS if peer not in peers]
    if missing:
        table.notes.append(f"Not installed here: {', '.join(missing)}.")


def finding(room: Path, tree: Path, table: Table, facts: Facts, peers: list[Peer]) -> None:
    """Find duplicates, side by side: in each round everybody once."""
    ours: dict[str, list[Run]] = {"first": [], "again": [], "changed": []}
    theirs: dict[str, list[Run]] = {peer.name: [] for peer in peers}
    with store_of(room) as home:
        smartcache(home, *scan(room / "home"))  # compiles our modules
    for _ in range(_measure.rounds):
        time.sleep(YOUNG)
        with store_of(room) as home:
            ours["first"].append(smartcache(home, *scan(tree)))
            ours["again"].append(smartcache(home, *scan(tree)))
            with one_change(tree / facts.one):
                ours["changed"].append(smartcache(home, *scan(tree)))
        for peer in peers:
            command = [*peer.find, str(tree)]
            theirs[peer.name].append(measured(command, environment=environment(room)))
    medians = {name: median_run(runs) for name, runs in theirs.items()}
    first, again, changed = (median_run(ours[key]) for key in ("first", "again", "changed"))
    compare(table, "find duplicates, first time", first, medians, aim=1.0)
    compare(table, "find again, nothing changed", again, fastest(medians), aim=0.1)
    compare(table, "find again, one file changed", changed, fastest(medians))


def fastest(medians: dict[str, Run]) -> dict[str, Run]:
    """Return the fastest of all, whether it proves anything or not."""
    names = sorted(medians, key=lambda name: medians[name].seconds)[:1]
    return {name: medians[name] for name in names}


def compare(
    table: Table, job: str, ours: Run, medians: dict[str, Run], aim: float | None = None
) -> None:
    """Add a row for each peer: those that prove content first, the fastest of them on top."""
    proven = {peer.name for peer in PEERS if peer.is_proof}
    order = sorted(medians, key=lambda name: (name not in proven, medians[name].seconds))
    if not order:
        table.add(job, str(ours))
    for place, name in enumerate(order):
        ratio = ours.seconds / medians[name].seconds
        is_judged = aim is not None and place == 0
        table.add(
            (job if place == 0 else "the same") + ("" if name in proven else ", without proof"),
            str(ours), peer=f"{name}: {medians[name]}", ratio=ratio,
            aim=f"<= {aim:.2f}" if is_judged else "",
            holds=ratio <= (aim or 0) if is_judged else None,
        )  # fmt: skip


def compare_counts(room: Path, tree: Path, table: Table, facts: Facts, peers: list[Peer]) -> None:
    """Note who finds something else than there is."""
    said = room / "said"
    with store_of(room) as home, said.open("wb") as stream:
        smartcache(home, *scan(tree), "--json", output=stream.fileno())
    count, size = map(int, in_child("count", said).split())
    if (count, size) != (facts.duplicates, facts.duplicate_size):
        table.notes.append(
            f"smartcache finds {count} files with {size} bytes,"
            f" not {facts.duplicates} with {facts.duplicate_size}."
        )
    for peer in peers:
        check_peer(room, tree, table, facts, peer)


def check_peer(room: Path, tree: Path, table: Table, facts: Facts, peer: Peer) -> None:
    """Note it if a peer finds something else than there is."""
    said = room / "said"
    with said.open("wb") as stream:
        command = [*peer.find, str(tree)]
        measured(command, environment=environment(room), output=stream.fileno())
    text = said.read_text("utf-8", errors="replace")
    if not peer.count:
        table.notes.append(f"{peer.name} counts extents with equal checksums, not files.")
        return
    wanted = facts.duplicates + facts.groups * peer.counts_originals
    count = re.search(peer.count, text, re.MULTILINE)
    if count is None or int(count[1]) != wanted:
        found = count[1] if count else "an unknown number of"
        table.notes.append(f"{peer.name} finds {found} files, not {wanted}.")
    size = re.search(peer.size, text, re.MULTILINE)
    if size is None or not is_about(size[1], size[2], facts.duplicate_size):
        found = " ".join(size.groups()) if size else "an unknown number of bytes"
        table.notes.append(f"{peer.name} finds {found}, not {facts.duplicate_size} bytes.")


def count_ours(file: Path, _: int, __: int) -> None:
    """Print how many files, bytes and groups a scan has found."""
    groups = json.loads(file.read_bytes())["groups"]
    copies = [(group["size"], len(group["copies"]) - 1) for group in groups]
    print(sum(count for _, count in copies), sum(size * count for size, count in copies))


def is_about(number: str, unit: str, wanted: int) -> bool:
    """Whether a rounded size may be this one, in powers of 1000 or of 1024."""
    power = " kmgt".index(unit[0].lower()) if unit[0].lower() in "kmgt" else 0
    digits = len(number.partition(".")[2])
    return any(
        abs(float(number) * base**power - wanted) <= base**power / 10**digits
        for base in (1000, 1024)
    )


def linking(
    room: Path, tree: Path, table: Table, facts: Facts, peers: list[Peer], rounds: int
) -> None:
    """Replace duplicates by hard links, each time in a fresh copy of the tree."""
    runs: dict[str, list[Run]] = {}
    for _ in range(rounds):
        for key in ("after", "without"):
            with copy_of(room, tree) as copy, store_of(room) as home:
                time.sleep(YOUNG)
                if key == "after":
                    smartcache(home, *scan(copy))
                run = smartcache(home, "dedup", "-y", "--min-size", "1", str(copy))
                runs.setdefault(key, []).append(run)
                check_links(table, "smartcache dedup", copy, facts)
        for peer in peers:
            if peer.link:
                with copy_of(room, tree) as copy:
                    run = measured([*peer.link, str(copy)], environment=environment(room))
                    runs.setdefault(peer.name, []).append(run)
                    check_links(table, peer.name, copy, facts)
    medians = {name: median_run(found) for name, found in runs.items()}
    after, without = medians.pop("after"), medians.pop("without")
    compare(table, "link duplicates, nothing known before", without, medians)
    compare(table, "link duplicates, after a scan", after, fastest(medians))
    if rounds != _measure.rounds:
        table.notes.append(f"Linking was measured in {rounds} round(s) only.")


def check_links(table: Table, name: str, copy: Path, facts: Facts) -> None:
    """Note it if some duplicates are not one file afterwards."""
    inodes = len({path.stat().st_ino for path in walk(copy)})
    note = f"{name} leaves {inodes} different files, not {facts.files - facts.duplicates}."
    if inodes != facts.files - facts.duplicates and note not in table.notes:
        table.notes.append(note)


def million_rows(room: Path, table: Table, rows: int) -> None:
    """Scan in a store that has seen a million files, and find the duplicates among them.

    The files exist only as rows: what is measured is everything a scan does but the walk. Nothing
    is hashed, since every digest is remembered.
    """
    with store_of(room) as home:
        in_child("fill", home, rows)
        small = room / "small"
        in_child("make", small, 20, 20 * HEADER)
        time.sleep(YOUNG)
        ours = median_run([smartcache(home, *scan(small)) for _ in range(_measure.rounds)])
        command = child("find", home, rows)
        runs = [measured(command, environment=environment(room)) for _ in range(_measure.rounds)]
        passed = median_run(runs)
    for job, run in (
        (f"scan 20 files beside {rows:,} sightings", ours),
        (f"find the duplicates among {rows:,} sightings", passed),
    ):
        table.add(job, str(run), aim="< 150 MB", holds=run.peak < 150)


def child(name: str, folder: Path, count: int = 0, size: int = 0) -> list[str]:
    """Return the command that runs a function of this script in a process of its own.

    This process stays small: what it uses is the least that can be measured of others.
    """
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    return [*command, "--files", str(count), "--size", str(size)]


def in_child(name: str, folder: Path, count: int = 0, size: int = 0) -> str:
    """Run a function of this script elsewhere and return what it prints."""
    command = child(name, folder, count, size)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def fill(home: Path, rows: int, _: int) -> None:
    """Write sightings and their digests as scans of large folders would have."""
    from smartcache.store.catalog import Learned
    from smartcache.store.store import Store
    from smartcache.system.kernel import StatKey

    with Store(home) as store:
        index = store.catalog
        with index.write():
            folder = index.set_folder(Path("/nowhere"), program="ComfyUI")
            filesystem = index.filesystem_number(store.layout.filesystem)
            for start in range(0, rows, 1000):
                directory = index.set_directory(b"/nowhere/%d" % start, folder)
                files = [row_of(number) for number in range(start, min(rows, start + 1000))]
                index.put_seen(
                    (
                        directory,
                        b"%d.bin" % inode,
                        (filesystem, inode, size, OLD, OLD, 1, size, 0o644, 0),
                        0,
                    )
                    for inode, size, _ in files
                )
                index.learn(
                    Learned(filesystem, inode, StatKey(size, OLD, OLD), 0, digest, None, "")
                    for inode, size, digest in files
                )


def row_of(number: int) -> tuple[int, int, bytes]:
    """Return inode, size and digest of a made-up file: four in ten are duplicates."""
    content = number if number % 10 < 6 else number - number % 10
    size = (1 + content // 10) << 20
    return 1_000_000_000 + number, size, content.to_bytes(32, "big")


def find(home: Path, rows: int, _: int) -> None:
    """Do what a scan does after its walk, over every sighting there is."""
    from smartcache.folders import scan as scanning
    from smartcache.folders.checks import Checks
    from smartcache.folders.programs import ModelFolder
    from smartcache.folders.walk import Walked
    from smartcache.store.catalog import Scope
    from smartcache.store.store import Store

    class Unseen(Checks):
        """Takes files as they are in the index: there is nothing to look at."""

        def is_ordinary(self, filesystem: str, folder: str) -> bool:
            del filesystem, folder
            return True

    place = Path("/nowhere")
    with Store(home) as store:
        number = store.catalog.set_folder(place, program="")
        walked = Walked(folders={number: ModelFolder(path=place)})
        vars(scanning).update(Checks=Unseen, look=lambda *_, **__: (walked, Scope((number,))))
        found = scanning.scan_folders(store, [])
        largest = list(found.largest(10))
    if found.total.files != rows or found.groups != rows // 10 or len(largest) != 10:
        raise SystemExit(f"{found.total.files} files, {found.groups} groups: not what was written")


CHILDREN = {"make": make, "count": count_ours, "fill": fill, "find": find}


def scan(tree: Path) -> tuple[str, ...]:
    """Return the command that finds duplicates of any size."""
    return ("scan", "--min-size", "1", str(tree))


def smartcache(home: Path, *words: str, output: int = subprocess.DEVNULL) -> Run:
    """Run our program with this store."""
    command = [sys.executable, "-m", "smartcache", *words]
    found = environment(home.parent) | {"SMARTCACHE_HOME": str(home)}
    return measured(command, environment=found, output=output)


def environment(room: Path) -> dict[str, str]:
    """Return an environment that leads nobody out of the room."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(room / "home"),
        "TMPDIR": str(room),
        "LC_ALL": "C.UTF-8",
        "PYTHONPYCACHEPREFIX": str(room / "compiled"),  # as an installed program has them
    }


@contextmanager
def store_of(room: Path) -> Iterator[Path]:
    """Give the root of a store that does not exist yet; it is removed afterwards."""
    home = room / "store"
    yield home
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def copy_of(room: Path, tree: Path) -> Iterator[Path]:
    """Give a copy of the tree, all of it on the disk; it is removed afterwards."""
    copy = room / "copy"
    subprocess.run(["cp", "-a", str(tree), str(copy)], check=True)
    os.sync()
    yield copy
    shutil.rmtree(copy)
    os.sync()


@contextmanager
def one_change(path: Path) -> Iterator[None]:
    """Let one byte of a file be another one for a while; its times of modification stay."""
    before = path.stat()
    data = path.read_bytes()
    middle = len(data) // 2
    rewrite(path, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], before)
    try:
        time.sleep(YOUNG)
        yield
    finally:
        rewrite(path, data, before)


def rewrite(path: Path, data: bytes, before: os.stat_result) -> None:
    """Give a file other bytes and its old time."""
    path.write_bytes(data)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))


if __name__ == "__main__":
    main()
