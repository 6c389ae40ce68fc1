"""What every command promises, whichever it is: tables of all of them, in one world.

Nothing here may change that world: it is made once, and each test looks at all of it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.folders import discover as apps
from tests.cli.computed import Made, fill
from tests.cli.running import Here, Smartcache
from tests.cli.test_help import LEAVES, load
from tests.folders.trees import VARIABLES
from tests.hub.caches import commit_of, make_repo
from tests.store.files import OTHER, WEIGHTS, digest_of, edit, snapshot, write

DIGEST, PINNED = digest_of(OTHER), digest_of(WEIGHTS)
TWICE = b"m" * 100_000
HUB = "--cache-dir hub"
OWN = {
    "download", "folders add", "folders rm", "folders ignore", "remote add", "remote rm",
}  # fmt: skip
"""Commands that have all of this in tests of their own, or only write down what they are told."""

OF_THE_MACHINE = ("versions", "kinds", "metadata", "fingerprint", "items_by_bucket")
"""Parts of documents whose names are not ours."""

CHANGES = {
    "dedup models --min-size 4KiB": "Replace 1 duplicate file, freeing ",
    "undo --last": "Undo 1 change?",
    "undo adopted.gguf": "Undo 1 change?",
    f"hub rm org/a {HUB}": "Remove 1 repo for good and free",
    f"hub prune {HUB}": "Remove 1 revision and 1 partial download for good and free",
    f"hub verify org/c --repair {HUB}": "Move 1 damaged file",
    f"hub export org/a out.tar {HUB}": "",
    "hub import bundle.tar --cache-dir other": "",
    f"remote push nas org/b {HUB}": "",
    "remote pull nas org/a --cache-dir other": "",
    "remote gc nas --older-than 0s": "Remove ",
    "artifacts rm latents": "Remove 1 set with 8 artifacts for good",
    "artifacts prune --unused-for 0s": "Remove ",
    "artifacts verify --rebuild": "Read ",
    "artifacts compact --force": "",
    "artifacts export latents --folder out": "",
    "--home other artifacts import exported-latents": "",
    "datasets clean photos": "Remove 6 artifacts and free ",
    "datasets export photos out": "",
    "--home other datasets import exported": "",
    "add models/a.safetensors": "",
    "add --adopt -r models": "",
    f"link {DIGEST} new.pt": "",
    f"pin {DIGEST}": "",
    f"unpin {PINNED}": "",
    f"rm {DIGEST}": "Remove 1 blob (70 KB)?",
    "prune": "Remove 1 blob for good and free ",
    "verify --rebuild": "Make the index again?",
    "eject --drop-pinned --drop-artifacts": "Remove the store?",
}
"""What each would do, and what it asks before."""

LOOKS = (
    "scan models --min-size 4KiB", "undo", "report models", "folders ls", f"hub ls {HUB}",
    f"hub ls --revisions {HUB}", f"hub verify org/a {HUB}", "remote ls",
    "remote ls nas", "remote verify nas", "artifacts ls", "artifacts show latents",
    "artifacts show latents key-3", "artifacts verify", "datasets ls", "datasets show photos",
    "datasets plan photos", "df", "ls", "ls -v", "verify", "dir", "config", "completion bash",
    "doctor models",
)  # fmt: skip
"""What only looks."""

WITHOUT_STORE = {
    "undo": "There is nothing to undo.",
    "report empty": "No file is here twice: there is nothing to free.",
    "folders ls": "No folder is known, and no program's was found.",
    "hub ls --cache-dir empty": "No repo is cached.",
    "hub verify --cache-dir empty": "Checked 0 files of 0 repos",
    "remote ls": "There are no remotes",
    "artifacts ls": "There are no artifacts.",
    "artifacts prune -y": "Nothing to prune.",
    "artifacts verify": "There are no artifacts.",
    "artifacts compact": "Nothing is worth compacting",
    "datasets ls": "There are no datasets.",
    "df": "",
    "ls": "",
    "prune -y": "Nothing to prune.",
    "verify": "",
    "verify --rebuild -y": "",
    "add -n x.bin": "Would add 1 file",
    "add -n --adopt x.bin": "Would add 1 file",
    "dir": "/store\n",
    "doctor": "/store (store, does not exist)",
    "config": "/store ",
}
REFUSED_WITHOUT_STORE = {
    "undo --last": "There is nothing to undo",
    "undo 9f3a61c2": "There is no change 9f3a61c2 to undo",
    "folders rm empty": "There is no store at",
    "artifacts show x": "There is no set 'x'",
    "artifacts rm x": "There is no set 'x'",
    "artifacts export x --folder x": "no set 'x'",
    "datasets show x": "There is no dataset 'x'",
    "datasets plan x": "There is no dataset 'x'",
    "datasets clean x": "There is no dataset 'x'",
    "datasets export x y": "There is no dataset 'x'",
    "link ab12 x": "There is no store at",
    "pin ab12": "There is no store at",
    "unpin ab12": "There is no store at",
    "rm ab12": "There is no store at",
    "eject -y": "There is no store at",
}


ABOUT_THE_STORE = {
    "undo", "artifacts rm", "artifacts export", "datasets clean", "datasets export",
    "link", "pin", "unpin", "rm", "eject",
}  # fmt: skip
"""Changes that are refused where there is no store: they are about something in it."""
OF_ANY_STORE = "undo adopted.gguf"
"""A file that shares its bytes, with whatever: it can have its own without a store."""


def split(line: str) -> list[str]:
    return shlex.split(line)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world in which every command has something to do."""
    root = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        enter(root, patch)
        sc = Here()
        write(root / "models/a.safetensors", TWICE)
        write(root / "models/b.safetensors", TWICE)
        sc("add", write(root / "pinned.bin", WEIGHTS))
        sc("add", "--no-pin", write(root / "alone.bin", OTHER))
        sc("add", "--adopt", write(root / "adopted.gguf", b"a" * 90_000))
        make_repo(root / "hub", {"m.safetensors": WEIGHTS}, name="models--org--a")
        old = make_repo(root / "hub", {"m.bin": WEIGHTS}, name="models--org--b", ref="")
        make_repo(root / "hub", {"m.bin": OTHER}, name="models--org--b", commit=commit_of(2))
        for pointer in (old / "snapshots" / commit_of(1)).iterdir():
            os.utime(pointer, (1_600_000_000,) * 2, follow_symlinks=False)
        write(old / "blobs" / f"{'a' * 64}.12345678.incomplete", OTHER)
        damaged = make_repo(root / "hub", {"m.safetensors": OTHER}, name="models--org--c")
        edit(next((damaged / "blobs").iterdir()))
        sc("hub", "export", "org/a", "bundle.tar", *split(HUB))
        sc("remote", "add", "nas", "nas")
        sc("remote", "push", "nas", "org/a", "org/b", *split(HUB))
        for path in (root / "nas/documents/repos/models--org--b").iterdir():
            path.unlink()
        fill(root / "store", count=10)
        sc("artifacts", "rm", "latents", "key-8", "key-9", "-y")
        sc("artifacts", "export", "latents", "--folder", "exported-latents")
        photos = Made(root / "store", root / "photos")
        photos.build()
        photos.build(version=1)
        sc("datasets", "export", "photos", "exported")
        sc("scan", "models", "--min-size", "4KiB")
    return root


def enter(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root)
    patch.setenv("HOME", str(root / "home"))
    patch.setenv("SMARTCACHE_HOME", str(root / "store"))
    patch.setattr(apps, "ROOT", root / "root")
    for name in VARIABLES:
        patch.delenv(name, raising=False)


@pytest.fixture
def world(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    enter(made, monkeypatch)
    before = everything(made)
    yield made
    assert everything(made) == before


def everything(root: Path) -> dict[str, tuple[object, ...]]:
    """All files but the databases, which remember what was hashed, and locks."""
    found = snapshot(root)
    return {
        name: each
        for name, each in found.items()
        if ".sqlite3" not in name and not name.endswith("/lock")
    }


def leaf_of(line: str) -> str:
    words = split(line)[2 if line.startswith("--home") else 0 :]
    return next(name for name in (" ".join(words[:2]), words[0]) if name in LEAVES)


def test_every_command_is_in_a_table_here() -> None:
    changing = {name for name in LEAVES if has(name, "--dry-run")} - OWN
    assert {leaf_of(line) for line in CHANGES} == changing
    assert {leaf_of(line) for line in LOOKS} | changing == {*LEAVES} - OWN


def has(name: str, option: str) -> bool:
    return any(option in parameter.opts for parameter in load(name).params)


def test_what_can_be_tried_can_be_scripted() -> None:
    """Who has --dry-run has -n; who asks, -y; and no option is hidden."""
    for name in LEAVES:
        assert has(name, "--dry-run") == has(name, "-n"), name
        assert not [each for each in load(name).params if getattr(each, "hidden", False)], name
    asks = {leaf_of(line) for line, question in CHANGES.items() if question}
    assert [name for name in asks if not (has(name, "-y") and has(name, "--yes"))] == []


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(world: Path) -> None:
    sc = Here()
    for line in CHANGES:
        code = 3 if line.startswith("hub verify") else 0
        before = everything(world)
        said = sc(*split(line), "-n", code=code).stdout
        assert any(words in said for words in ("Would ", " could ", " to be given back")), line
        document = sc(*split(line), "--dry-run", "--json", code=code).json
        assert document.get("dry_run", document.get("repair", document)["dry_run"]) is True, line
        talk = sc(*split(line), "-n", "-q", code=code).stderr.splitlines()
        assert [words for words in talk if not words.startswith("Warning: ")] == [], line
        assert everything(world) == before, line


@pytest.mark.parametrize("line", CHANGES)
def test_a_dry_run_in_an_empty_home_leaves_nothing(
    line: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`download`, which is in no table, has this in tests of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SMARTCACHE_HOME")
    shutil.copytree(world / "home/.config", tmp_path / ".config")  # the remote
    before = snapshot(tmp_path)
    is_refused = leaf_of(line) in ABOUT_THE_STORE and line != OF_ANY_STORE
    code = 3 if line.startswith("hub verify") else int(is_refused)
    done = Here()(*split(line.removeprefix("--home other ")), "-n", code=code)
    if is_refused:
        assert done.error.startswith("There is n"), line
    assert snapshot(tmp_path) == before


def test_where_nobody_can_be_asked_it_refuses(world: Path) -> None:
    sc = Here()
    for line in filter(CHANGES.get, CHANGES):
        for more in ([], ["--json"], ["-q"]):
            done = sc(*split(line), *more, code=1)
            assert ("not a terminal" in done.error, "-y" in done.hint) == (True, True), line


def test_at_a_terminal_it_asks_and_no_means_no(world: Path) -> None:
    program = Smartcache(cwd=world)
    for line, question in CHANGES.items():
        if question:
            done = program.at_terminal(*split(line), answer="n\n", columns=200)
            assert question in done.stdout, line
            assert "Aborted; nothing was changed" in done.stdout, line
            assert done.code == 1, line


@pytest.mark.usefixtures("world")
def test_for_programs_there_is_no_talk_and_ids_can_be_told_apart() -> None:
    sc = Here()
    for line in LOOKS:
        quiet = sc(*split(line), "-q")
        assert (quiet.stderr, sc(*split(line), "--json").stderr) == ("", ""), line
        assert sc(*split(line), "-0").stdout == quiet.stdout.replace("\n", "\0"), line


def test_without_a_store_there_is_nothing_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "x.bin")
    before = snapshot(tmp_path)
    sc = Here()
    for line, answer in WITHOUT_STORE.items():
        assert answer in sc(*split(line)).stdout, line
        sc(*split(line), "-q")
        assert sc(*split(line), "--json").stdout, line
    for line, error in REFUSED_WITHOUT_STORE.items():
        done = sc(*split(line), code=1)
        assert error in done.error, line
        if error == "There is no store at":
            assert "'smartcache scan' makes one" in done.hint, line
    assert snapshot(tmp_path) == before


def names(value: object) -> str:
    """The names in a document, in their order; of a list those of its first element."""
    if isinstance(value, list):
        return f"[{names(value[0])}]" if value and isinstance(value[0], dict | list) else "[]"
    if not isinstance(value, dict):
        return ""
    found = (key if key in OF_THE_MACHINE else f"{key}{names(each)}" for key, each in value.items())
    return f"{{{' '.join(found)}}}"


def ids(text: str, world: Path) -> str:
    """What was printed for programs, without what is another on each machine."""
    text = re.sub(r"[0-9a-f]{8,}", "<hex>", text.replace(str(world), "~"))
    return " ".join(sorted(set(text.split())))


def test_documents_have_the_names_that_programs_know_and_ids_are_what_commands_take(
    world: Path,
) -> None:
    """What changes there breaks somebody's program. Without the golden file it is written."""
    sc = Here()
    found = []
    for line in (*LOOKS, *CHANGES):
        code = 3 if line in CHANGES and line.startswith("hub verify") else 0
        words = [*split(line), *(["-n"] if line in CHANGES else [])]
        found.append(f"{line}: {names(sc(*words, '--json', code=code).json)}\n")
        found.append(f"{line} -q: {ids(sc(*words, '-q', code=code).stdout, world)}\n")
    golden = Path(__file__).with_name("documents.txt")
    if not golden.exists():
        golden.write_text("".join(found), "utf-8")
        pytest.fail(f"{golden} is new: look at it")
    assert found == golden.read_text("utf-8").splitlines(keepends=True)
