"""What the Hub says about repos, and how little of it is believed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from smartcache.errors import DigestMismatchError, UnsafeNameError
from smartcache.hub import patches, remote
from smartcache.hub.records import RemoteFile, Repo
from smartcache.hub.remote import Access
from tests.hub.clients import Client, sha256, weights
from tests.hub_server import Hub, git_sha1

REPO = Repo("model", "org/name")
FILES = {"config.json": b"{}", "unet/model.safetensors": weights(1), "a b#ü%.bin": weights(2)}


@pytest.fixture
def access(hub: Hub) -> Access:
    return Access(endpoint=hub.url, token=False)


def test_a_commit_costs_one_request_or_none(hub: Hub, access: Access) -> None:
    commit = hub.add("org/name", FILES, tags=["v1"]).sha
    other = hub.add("org/name", {}, revision="refs/pr/1").sha
    assert remote.commit_of(access, REPO, commit) == commit
    assert list(hub.requests) == []
    for revision, expected in (("main", commit), ("v1", commit), ("refs/pr/1", other)):
        hub.clear()
        assert remote.commit_of(access, REPO, revision) == expected
        assert len(hub.requests) == 1


def test_a_listing_has_sizes_and_hashes_of_all_pages(hub: Hub, access: Access) -> None:
    commit = hub.add("org/name", FILES, xet={"unet/model.safetensors": "d" * 64}).sha
    for page_size in (1, 2, 1000):
        hub.page_size = page_size
        hub.clear()
        found = remote.files_of(access, REPO, commit)
        assert sorted(found, key=lambda each: each.path) == [
            RemoteFile(path="a b#ü%.bin", size=100_000, etag=sha256(weights(2))),
            RemoteFile(path="config.json", size=2, etag=git_sha1(b"{}")),
            RemoteFile(
                path="unet/model.safetensors", size=100_000, etag=sha256(weights(1)), xet="d" * 64
            ),
        ]
        assert len(hub.requests) == -(-4 // page_size)  # three files and a folder


def test_one_file_costs_one_request(hub: Hub, access: Access) -> None:
    """The Hub announces it, also behind a redirect."""
    commit = hub.add("org/name", FILES, tags=["v1"]).sha
    for hub.cdn in (False, True):
        for path, data in FILES.items():
            hub.clear()
            found = remote.announced_file(access, REPO, "v1", path)
            assert found is not None
            assert (found[0], found[1].size) == (commit, len(data))
            assert found[1].etag in (sha256(data), git_sha1(data))
            assert [each.method for each in hub.requests if "cdn" not in str(each)] == ["HEAD"]


def test_other_types_of_repos_are_asked_for_by_their_type(hub: Hub, access: Access) -> None:
    types: tuple[Literal["dataset", "space"], ...] = ("dataset", "space")
    for repo_type in types:
        hub.add("org/name", {"x.bin": weights(3)}, repo_type=repo_type)
        repo = Repo(repo_type, "org/name")
        commit = remote.commit_of(access, repo, "main")
        assert [each.path for each in remote.files_of(access, repo, commit)] == ["x.bin"]
        assert remote.announced_file(access, repo, "main", "x.bin") is not None
    with pytest.raises(hub_errors.RepositoryNotFoundError):
        remote.commit_of(access, REPO, "main")


def test_errors_of_the_hub_pass(hub: Hub, access: Access) -> None:
    hub.add("org/name", FILES)
    hub.add("org/gated", FILES, gated=True)
    with pytest.raises(hub_errors.RevisionNotFoundError):
        remote.commit_of(access, REPO, "nowhere")
    with pytest.raises(hub_errors.RevisionNotFoundError):
        remote.files_of(access, REPO, "1" * 40)
    with pytest.raises(hub_errors.RepositoryNotFoundError):
        remote.commit_of(access, Repo("model", "org/none"), "main")
    with pytest.raises(hub_errors.EntryNotFoundError):
        remote.announced_file(access, REPO, "main", "none.bin")
    with pytest.raises(hub_errors.GatedRepoError):
        remote.announced_file(access, Repo("model", "org/gated"), "main", "config.json")


ESCAPES = ["../x.bin", "a/../../x.bin", "/etc/x.bin", "a\\b.bin", "C:/x.bin", "a//b.bin", "a/./b"]


def test_a_listing_with_an_unsafe_name_is_refused_whole(hub: Hub, access: Access) -> None:
    for path in ESCAPES:
        commit = hub.add_raw_listing("org/name", {"good.bin": weights(1), path: weights(2)}).sha
        with pytest.raises(UnsafeNameError, match=re.escape(repr(path))):
            remote.files_of(access, REPO, commit)
        with pytest.raises(UnsafeNameError):
            remote.announced_file(access, REPO, "main", path)


ODD_ENTRIES: list[dict[str, object]] = [
    {"type": "file", "path": "x.bin", "size": 5},
    {"type": "file", "oid": "a" * 40, "size": 5},
    {"type": "file", "path": "x.bin", "oid": "a" * 40},
    {"type": "file", "path": "x.bin", "oid": "a" * 40, "size": 5, "lfs": {"size": 5}},
    {"type": "file", "path": None, "oid": "a" * 40, "size": 5},
    {"type": "file", "path": 7, "oid": "a" * 40, "size": 5},
]


def test_a_listing_that_cannot_be_understood_brings_no_file(client: Client, hub: Hub) -> None:
    """Whether we or the client meet it first."""
    for entry in ODD_ENTRIES:
        hub.add_raw_listing("org/name", {"good.bin": weights(1)}, [entry])
        with pytest.raises(Exception, match=r".+"):
            client.snapshot()
        assert not list(client.cache.rglob("*.bin")), entry


DEEP = b"[" * 200_000 + b"]" * 200_000
INFO = {"_id": "1", "id": "org/name", "sha": "a" * 40, "siblings": [], "tags": []}
ODD_ANSWERS = {
    "siblings are no list": ("/revision/", {**INFO, "siblings": 7}),
    "siblings are no objects": ("/revision/", {**INFO, "siblings": [7]}),
    "the commit is a number": ("/revision/", {**INFO, "sha": 7}),
    "the commit is a list": ("/revision/", {**INFO, "sha": ["a" * 40]}),
    "the commit is a path": ("/revision/", {**INFO, "sha": "../../../evil"}),
    "there is not a commit": ("/revision/", {**INFO, "sha": None}),
    "a list in place of a repo": ("/revision/", [7]),
    "a repo that is no UTF-8": ("/revision/", b'{"id": "\xff\xfe"}'),
    "a repo that is deep": ("/revision/", DEEP),
    "a web page": ("/revision/", b"<html>Please log in</html>"),
    "a listing that is not a list": ("/tree/", {"error": 7}),
    "a listing of numbers": ("/tree/", [1, 2]),
    "a listing that is a number": ("/tree/", 7),
    "a listing that is no UTF-8": ("/tree/", b'[{"path": "\xff\xfe"}]'),
    "a listing that is deep": ("/tree/", DEEP),
    "a path that is deep": (
        "/tree/", [{"type": "file", "path": "a/" * 2000 + "a", "oid": "a" * 40, "size": 5}]
    ),
    "a name that is long": (
        "/tree/", [{"type": "file", "path": "a" * 256, "oid": "a" * 40, "size": 5}]
    ),
}  # fmt: skip


def test_an_answer_that_makes_no_sense_is_an_error_and_makes_nothing(
    client: Client, hub: Hub
) -> None:
    hub.add("org/name", {"good.bin": weights(1)})
    for name, (part, answer) in ODD_ANSWERS.items():
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        hub.faults.answer(part, data)
        with pytest.raises(Exception, match=r".+"):
            client.snapshot()
        assert not list(client.cache.rglob("*.*")), name
        hub.faults.clear()


ODD_HASHES: list[dict[str, object]] = [
    {"oid": "x", "size": 5},
    {"oid": "../../../x", "size": 5},
    {"oid": "A" * 64, "size": 5},
    {"oid": "a" * 64, "size": -5},
    {"oid": "a" * 64, "size": "5"},
    {"oid": "a" * 64, "size": 1 << 70},
]


def test_odd_hashes_and_sizes_never_lead_a_file_out_of_the_cache(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    roots = (client.cache, client.store.root)
    before = outside(tmp_path, *roots)
    for lfs in ODD_HASHES:
        entry = {
            "type": "file", "path": "odd.bin", "oid": "a" * 40, "size": lfs["size"],
            "lfs": {**lfs, "pointerSize": 10},
        }  # fmt: skip
        hub.add_raw_listing("org/name", {"good.bin": weights(1)}, [entry])
        with pytest.raises(Exception, match=r".+"):
            client.snapshot()
        assert outside(tmp_path, *roots) == before, lfs
        assert list(client.cache.glob("*/snapshots/*/odd.bin")) == [], lfs


def outside(folder: Path, *roots: Path) -> set[Path]:
    """Everything in a folder but some folders there."""
    return {path for path in folder.rglob("*") if not {*roots} & {path, *path.parents}}


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("is_one", [False, True])
def test_an_etag_that_is_a_path_leads_nowhere(
    client: Client, hub: Hub, tmp_path: Path, is_local: bool, is_one: bool
) -> None:
    """huggingface_hub names blobs by what the server says."""
    hub.add("org/name", {"m.bin": weights(1)})
    more = {"local_dir": tmp_path / "local"} if is_local else {}
    call = client.call("org/name", "m.bin" if is_one else None, **more)
    for etag in ("../../../../evil", f"{tmp_path}/evil", "..", "a/b", "a\\\\b"):
        hub.faults.wrong_sha("m.bin", etag, in_head=True)
        with pytest.raises(UnsafeNameError):
            client.smart.download(call)
        assert [path for path in tmp_path.iterdir() if path != client.store.root] == [], etag
        hub.faults.clear()
    assert hub.gets() == []


@pytest.mark.parametrize("is_local", [False, True])
def test_an_etag_that_only_the_file_itself_has_leads_nowhere(
    client: Client, hub: Hub, tmp_path: Path, is_local: bool
) -> None:
    """The listing is sound: huggingface_hub reads the ETag when it fetches the file."""
    roots = (client.cache, client.store.root, tmp_path / "local")
    before = outside(tmp_path, *roots)
    etags = {"m.bin": "../../../../evil", "small.bin": f"{tmp_path}/hf/evil", "a.json": ".evil"}
    for number, (name, etag) in enumerate(etags.items()):
        repo = f"org/{number}"
        files = {"m.bin": weights(number), "small.bin": b"%d" % number, "a.json": b"[%d]" % number}
        hub.add(repo, files)
        hub.faults.other_etag(name, etag)
        more = {"local_dir": tmp_path / "local" / name} if is_local else {}
        with pytest.raises(UnsafeNameError, match=name):
            client.snapshot(repo, **more)
        assert hub.gets(f"{repo}/{name}") == []
        assert list(tmp_path.rglob("*evil*")) == []
        assert outside(tmp_path, *roots) == before
        hub.faults.clear()
        path = client.snapshot(repo, **more)
        assert {each: (path / each).read_bytes() for each in files} == files


def test_only_plain_names_are_names() -> None:
    """Hashes and the etags of mirrors are."""
    for name in ("", ".", "..", "a/b", "a\\b", "a\0b", "e" * 200, "evil\x7f", None, 7):
        with pytest.raises(UnsafeNameError, match=r"m\.bin"):
            patches.refuse_unsafe(name, "m.bin")
    for name in ("a" * 40, "0" * 64, "an-etag", "5d41402abc4b2a76b9719d911017c592-12"):
        patches.refuse_unsafe(name, "m.bin")


@pytest.mark.parametrize("name", ["m.bin", "small.bin"])
def test_a_file_must_come_under_the_hash_that_was_listed(
    client: Client, hub: Hub, name: str
) -> None:
    """Small files too, which huggingface_hub fetches in threads of its own."""
    hub.add("org/name", {"m.bin": weights(1), "small.bin": b"small"})
    hub.faults.other_etag(name, sha256(weights(9)))
    with pytest.raises(DigestMismatchError, match=f"lists {name} as"):
        client.snapshot()
    assert hub.gets(name) == []
    assert list(client.cache.rglob(f"*{sha256(weights(9))}*")) == []
    hub.faults.clear()
    assert (client.snapshot() / name).is_file()


def test_what_the_hub_calls_a_commit_leads_nowhere(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    """huggingface_hub makes a directory of it, even for a file that does not exist."""
    hub.add("org/name", {"m.bin": weights(1)})
    hub.faults.header("/resolve/", "X-Repo-Commit", "../../../evil")
    for name in ("m.bin", "missing.bin"):
        with pytest.raises(UnsafeNameError):
            client.file("org/name", name)
    assert list(tmp_path.rglob("*evil*")) == []


def test_a_listing_on_disk_gives_no_file_an_unsafe_name(
    client: Client, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Xet, huggingface_hub reads the ETag of a file from there and asks the Hub no more."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    commit = hub.add("org/name", {"m.bin": weights(1)}).sha
    entry = {"size": 5, "blob_id": "a" * 40, "lfs_sha256": "../../../../evil", "lfs_size": 5}
    files = {"m.bin": {**entry, "xet_hash": "a" * 64}}
    trees = client.cache / "models--org--name" / "trees"
    trees.mkdir(parents=True)
    trees.joinpath(f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    with pytest.raises(UnsafeNameError):
        client.call("org/name", "m.bin", revision=commit).delegate()
    assert list(tmp_path.rglob("*evil*")) == []


def test_names_are_checked_without_a_further_request(client: Client, hub: Hub) -> None:
    hub.add("org/name", {"m.bin": weights(1), "config.json": b"{}"})
    client.snapshot()
    assert len(hub.heads("m.bin")) == len(hub.heads("config.json")) == 1


def test_a_wrong_announcement_is_never_believed(client: Client, hub: Hub) -> None:
    """The listing promises other bytes than the Hub sends."""
    hub.add("org/name", {"m.bin": weights(1)})
    hub.faults.wrong_sha("m.bin", sha256(weights(9)), in_head=True)
    with pytest.raises(Exception, match=r"(?i)sha256|digest|announced"):
        client.snapshot()
    assert client.store.find("sha256", sha256(weights(9))) is None
    assert list(client.cache.rglob("m.bin")) == []


def test_a_listing_and_a_header_that_disagree_leave_nothing_wrong(client: Client, hub: Hub) -> None:
    hub.add("org/name", {"m.bin": weights(1)})
    hub.faults.wrong_sha("m.bin", sha256(weights(9)))
    try:
        path = client.snapshot()
    except Exception:  # noqa: BLE001 - refusing is right, too
        assert list(client.cache.rglob("m.bin")) == []
    else:
        assert (path / "m.bin").read_bytes() == weights(1)
    for each in client.cache.glob("*/blobs/*"):
        if len(each.name) == 64:
            assert sha256(each.read_bytes()) == each.name
    assert client.store.find("sha256", sha256(weights(9))) is None


def test_patterns_select_what_huggingface_hub_selects(
    hub: Hub, access: Access, tmp_path: Path
) -> None:
    commit = hub.add("org/name", FILES).sha
    files = remote.files_of(access, REPO, commit)
    patterns: list[tuple[str | list[str] | None, str | list[str] | None]] = [
        (None, None), ("*.json", None), (["unet/"], None), (None, "*.json"), ([], None), (None, []),
        (["*"], ["unet/*"]), ("*.JSON", None), (["*.json", "*.bin"], ["a*"]), ("nothing", None),
    ]  # fmt: skip
    for number, (allow, ignore) in enumerate(patterns):
        path = Path(
            huggingface_hub.snapshot_download(
                "org/name", cache_dir=tmp_path / str(number), endpoint=hub.url,
                allow_patterns=allow, ignore_patterns=ignore,
            )
        )  # fmt: skip
        expected = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
        found = {each.path for each in remote.select(files, allow, ignore)}
        assert found == expected, (allow, ignore)
    assert remote.select(files, ("*.json", "*.bin"), ("a*",)) == remote.select(
        files, ["*.json", "*.bin"], ["a*"]
    )
