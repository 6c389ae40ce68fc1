"""Bundles that are damaged or mean harm: refused, and nothing wrong or foreign is written."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api import (
    COMPLETE,
    MANIFEST,
    MOST_MANIFEST,
    BundleError,
    DigestMismatchError,
    FileChangedError,
    Manifest,
    Store,
    StoreError,
    TarSink,
    decode,
    hub_exporting,
    opened,
)
from tests.api import bundle_checksum as checksum
from tests.api import bundle_encode as encode
from tests.hub.bundles import (
    ENCODER,
    FIRST,
    UNET,
    add_repo,
    bring,
    everything,
    export,
    faults_of,
    planned,
    two_repos,
)
from tests.hub_server import etag_of, git_sha1

FORMS = ("bundle", "bundle.tar")
Document = dict[str, Any]
"""A manifest as JSON."""
Change = Callable[[Document], None]

SHA256 = etag_of("x.bin", ENCODER)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "from"
    two_repos(path)
    return path


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "to"


# the cache that is exported


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["text_encoder/model.safetensors", "model_index.json"])
def test_a_damaged_file_ends_the_export_and_nothing_is_left(
    form: str, name: str, cache: Path, tmp_path: Path
) -> None:
    blob = cache / "models--org--first" / "blobs" / etag_of(name, FIRST[name])
    data = bytearray(FIRST[name])
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DigestMismatchError, match=f"{name} of model/org/first is damaged"):
        export(cache, tmp_path / form, "org/first")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [10, len(ENCODER) + 10])
def test_a_file_that_changes_its_size_ends_the_export(
    form: str, size: int, cache: Path, tmp_path: Path
) -> None:
    plan = planned(cache, "org/first")
    os.truncate(cache / "models--org--first" / "blobs" / SHA256, size)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileChangedError, match=r"text_encoder.* of model/org/first changed"):
        (plan.write_tar if form.endswith("tar") else plan.write_folder)(tmp_path / form)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_cut_file_beside_a_whole_one_of_the_same_name_is_found(cache: Path) -> None:
    os.truncate(cache / "models--org--first" / "blobs" / SHA256, 10)
    with pytest.raises(DigestMismatchError, match="not the same size"):
        planned(cache, "org/first", "org/second")


def test_a_listing_that_contradicts_the_snapshot_is_left_out(
    tmp_path: Path, there: Path, store: Store
) -> None:
    cache = tmp_path / "from"
    commit = add_repo(cache, "org/first", FIRST)
    listing = cache / "models--org--first" / "trees" / f"{commit}.json"
    listing.write_text(listing.read_text().replace(SHA256, "0" * 64))
    bring(store, export(cache, tmp_path / "bundle"), there)
    listing.unlink()
    assert everything(there) == everything(cache)


def test_a_file_at_the_destination_that_appears_meanwhile_is_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(manifest: bytes) -> bytes:
        (tmp_path / "bundle.tar").write_text("mine")
        return checksum(manifest)

    monkeypatch.setattr(hub_exporting, "checksum", appear)
    with pytest.raises(StoreError, match="exists already"):
        export(cache, tmp_path / "bundle.tar")
    assert (tmp_path / "bundle.tar").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["bundle.tar", "from"]


# bytes of a bundle


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("data", [ENCODER, FIRST["model_index.json"]], ids=["weights", "small"])
@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_is_refused_and_nothing_points_at_it(
    form: str, data: bytes, cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bundle = export(cache, tmp_path / form)
    if bundle.is_dir():
        flip(bundle / "blobs" / hashlib.sha256(data).hexdigest(), 5)
    else:
        flip(bundle, bundle.read_bytes().index(data) + 5)
    with pytest.raises(BundleError, match="damaged"):
        bring(store, bundle, there)
    assert faults_of(there) == []
    assert list(there.glob("*/refs/*")) == []
    assert list(there.glob("*/snapshots/*")) == []
    assert not store.verify(full=True).has_damage


@given(data=st.data())
def test_no_flipped_bit_of_a_tar_brings_wrong_bytes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("flipped")
    add_repo(root / "from", "org/name", {"a.json": b"{}", "b.safetensors": UNET[:70_000]})
    bundle = export(root / "from", root / "bundle.tar")
    flip(bundle, data.draw(st.integers(0, bundle.stat().st_size - 1)))
    with Store(root / "store") as store:
        try:
            bring(store, bundle, root / "to")
        except BundleError:
            assert list((root / "to").glob("*/refs/*")) == []
        else:  # the bit was of the padding, or of a header's field that means nothing here
            assert everything(root / "to") == everything(root / "from")
    assert faults_of(root / "to") == []


@given(data=st.data())
def test_no_cut_tar_is_taken_for_a_whole_one(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("cut")
    add_repo(root / "from", "org/name", {"a.json": b"{}", "b.safetensors": UNET[:70_000]})
    bundle = export(root / "from", root / "bundle.tar")
    end = bundle.read_bytes().rindex(b"complete\0") + 512 + 65
    os.truncate(bundle, data.draw(st.integers(0, end - 1)))
    with Store(root / "store") as store, pytest.raises(BundleError):
        bring(store, bundle, root / "to")
    assert list((root / "to").glob("*/snapshots/*")) == []
    assert faults_of(root / "to") == []


def test_what_arrived_of_a_cut_tar_is_not_read_again(
    cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bundle = export(cache, tmp_path / "bundle.tar")
    whole = bundle.read_bytes()
    os.truncate(bundle, len(whole) - 60_000)
    with pytest.raises(BundleError, match="ends early"):
        bring(store, bundle, there)
    bundle.write_bytes(whole)
    plan = bring(store, bundle, there)
    assert plan.present_size > 0
    assert everything(there) == everything(cache)


def damaged_folder(bundle: Path, fault: str) -> None:
    blob = bundle / "blobs" / SHA256
    if fault == "no complete":
        (bundle / COMPLETE).unlink()
    elif fault == "other manifest":
        text = (bundle / MANIFEST).read_bytes()
        (bundle / MANIFEST).write_bytes(text.replace(b"org/first", b"org/thief"))
    elif fault == "no manifest":
        (bundle / MANIFEST).unlink()
    elif fault == "missing blob":
        blob.unlink()
    elif fault == "short blob":
        os.truncate(blob, 100)
    elif fault == "long blob":
        os.truncate(blob, len(ENCODER) + 1)
    else:
        outside = bundle.parent / "outside"
        outside.write_bytes(ENCODER)
        blob.unlink()
        if fault == "symlink":
            blob.symlink_to(outside)
        else:
            os.mkfifo(blob)


@pytest.mark.parametrize(
    "fault",
    [
        "no complete", "other manifest", "no manifest", "missing blob", "short blob", "long blob",
        "symlink", "fifo",
    ],
)  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused_before_anything_is_written(
    fault: str, cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    bundle = export(cache, tmp_path / "bundle")
    damaged_folder(bundle, fault)
    with pytest.raises(BundleError):
        bring(store, bundle, there)
    assert not there.exists()
    assert list(store.blobs()) == []


# members of a tar

Member = tuple[tarfile.TarInfo, bytes]


def file_member(name: str, data: bytes) -> Member:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member, data


def other_member(name: str, kind: bytes, target: str = "") -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def members_of(path: Path) -> list[Member]:
    with tarfile.open(path, "r:") as tar:
        found = []
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            found.append((member, file.read()))
    return found


def write_tar(path: Path, members: list[Member], how: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w:", format=how) as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))
    return path


HOSTILE: dict[str, Callable[[list[Member]], list[Member]]] = {
    "parent": lambda all_: [all_[0], file_member("../evil", b"x"), *all_[1:]],
    "parent in blobs": lambda all_: [all_[0], file_member("blobs/../../evil", b"x"), *all_[1:]],
    "absolute": lambda all_: [all_[0], file_member("/tmp/evil", b"x"), *all_[1:]],  # noqa: S108
    "backslash": lambda all_: [all_[0], file_member("blobs\\..\\evil", b"x"), *all_[1:]],
    "unknown blob": lambda all_: [all_[0], file_member(f"blobs/{'0' * 64}", b"x"), *all_[1:]],
    "second member": lambda all_: [all_[0], all_[1], *all_[1:]],
    "second manifest": lambda all_: [all_[0], all_[0], *all_[1:]],
    "missing member": lambda all_: [all_[0], *all_[2:]],
    "manifest not first": lambda all_: [all_[1], all_[0], *all_[2:]],
    "nothing after the manifest": lambda all_: all_[:1],
    "no complete": lambda all_: all_[:-1],
    "wrong complete": lambda all_: [*all_[:-1], file_member(COMPLETE, b"0" * 64 + b"\n")],
    "long complete": lambda all_: [*all_[:-1], file_member(COMPLETE, all_[-1][1] + b"x")],
    "more after the end": lambda all_: [*all_, file_member("more", b"x")],
    "symlink": lambda all_: [
        all_[0], other_member(f"blobs/{SHA256}", tarfile.SYMTYPE, "/etc/passwd"),
        *[each for each in all_[1:] if SHA256 not in each[0].name],
    ],
    "hard link": lambda all_: [
        all_[0], other_member(f"blobs/{SHA256}", tarfile.LNKTYPE, "/etc/passwd"),
        *[each for each in all_[1:] if SHA256 not in each[0].name],
    ],
    "device": lambda all_: [all_[0], other_member("blobs/null", tarfile.CHRTYPE), *all_[1:]],
    "fifo": lambda all_: [all_[0], other_member("blobs/pipe", tarfile.FIFOTYPE), *all_[1:]],
    "directory": lambda all_: [all_[0], other_member("blobs", tarfile.DIRTYPE), *all_[1:]],
    "short member": lambda all_: [
        (file_member(each[0].name, each[1][:-1]) if SHA256 in each[0].name else each)
        for each in all_
    ],
    "long member": lambda all_: [
        (file_member(each[0].name, each[1] + b"x") if SHA256 in each[0].name else each)
        for each in all_
    ],
    "swapped bytes": lambda all_: [
        (file_member(each[0].name, bytes(len(each[1]))) if SHA256 in each[0].name else each)
        for each in all_
    ],
    "long name": lambda all_: [all_[0], file_member(f"blobs/{'a' * 300}", b"x"), *all_[1:]],
}  # fmt: skip


@pytest.mark.parametrize("how", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_tar_is_refused(
    fault: str, how: int, cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    members = members_of(export(cache, tmp_path / "bundle.tar"))
    bundle = write_tar(tmp_path / "hostile.tar", HOSTILE[fault](members), how)
    around = set(os.listdir(tmp_path)) | {"to"}
    with pytest.raises(BundleError):
        bring(store, bundle, there)
    assert set(os.listdir(tmp_path)) <= around
    assert faults_of(there) == []
    assert list(there.glob("*/refs/*")) == []
    assert list(there.glob("*/snapshots/*")) == []


def test_a_tar_repacked_by_another_program_in_the_same_order_is_read(
    cache: Path, there: Path, tmp_path: Path, store: Store
) -> None:
    members = members_of(export(cache, tmp_path / "bundle.tar"))
    bring(store, write_tar(tmp_path / "again.tar", members, tarfile.PAX_FORMAT), there)
    assert everything(there) == everything(cache)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 1024, b"PK\3\4 no tar" * 100, b"x"], ids=["empty", "zeros", "zip", "x"]
)
def test_what_is_no_tar_is_no_bundle(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.tar").write_bytes(data)
    with pytest.raises(BundleError), opened(tmp_path / "file.tar"):
        pass


def test_a_device_is_no_bundle() -> None:
    with pytest.raises(BundleError, match="neither"), opened(Path("/dev/null")):
        pass


def test_a_huge_manifest_is_refused_unread(tmp_path: Path) -> None:
    member = tarfile.TarInfo(MANIFEST)
    member.size = MOST_MANIFEST + 1
    header = member.tobuf(tarfile.GNU_FORMAT)

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert self.tell() < len(header)
            return super().read(size)

    with pytest.raises(BundleError, match="too large"), opened(Stream(header)):
        pass
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / MANIFEST).touch()
    os.truncate(bundle / MANIFEST, MOST_MANIFEST + 1)
    with pytest.raises(BundleError, match="too large"), opened(bundle):
        pass


# the manifest


def good() -> Document:
    commit, sha1 = "1" * 40, git_sha1(b"{}")
    listing = hashlib.sha256(b"listing").hexdigest()
    return {
        "format": "smartcache-bundle",
        "format_version": 1,
        "created_at": "2026-11-16T16:00:00Z",
        "repos": [
            {
                "type": "model",
                "id": "org/name",
                "refs": {"main": commit, "refs/pr/1": commit},
                "revisions": {
                    commit: {
                        "files": {
                            "a.json": {"etag": sha1, "size": 2},
                            "b/c.safetensors": {"etag": SHA256, "size": len(ENCODER)},
                        },
                        "tree": listing,
                    }
                },
            }
        ],
        "blobs": {
            sha1: {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
            SHA256: {"size": len(ENCODER), "sha256": SHA256},
            listing: {"size": 7, "sha256": listing},
        },
    }


def revision(document: Document) -> Document:
    found: Document = document["repos"][0]["revisions"]["1" * 40]
    return found


def renamed(name: str) -> Change:
    def change(document: Document) -> None:
        files = revision(document)["files"]
        files[name] = files.pop("a.json")

    return change


def with_ref(name: object, commit: object = "1" * 40) -> Change:
    return lambda document: document["repos"][0]["refs"].update({name: commit})


def with_id(name: object, kind: object = "model") -> Change:
    return lambda document: document["repos"][0].update({"id": name, "type": kind})


def with_blob(name: str, entry: object) -> Change:
    return lambda document: document["blobs"].update({name: entry})


def with_commit(commit: str) -> Change:
    def change(document: Document) -> None:
        repo = document["repos"][0]
        repo["revisions"][commit] = repo["revisions"].pop("1" * 40)
        repo["refs"] = {}

    return change


BAD: dict[str, Change] = {
    **{
        f"file {name!r}": renamed(name)
        for name in (
            "../evil", "a/../../evil", "/etc/evil", "a\\b", "..", ".", "", "a//b", "a/", "C:evil",
            "a\0b", "x" * 256, "b", "b/c.safetensors/d", "\ud800",
        )
    },
    **{
        f"ref {name!r}": with_ref(name)
        for name in ("../main", "/main", "a\\b", "", "main/x", "..", "a/../b")
    },
    "ref to nothing": with_ref("v1", "2" * 40),
    "ref to no text": with_ref("v1", ["1" * 40]),
    **{
        f"id {name!r}": with_id(name)
        for name in (
            "../evil", "org/..", "a/b/c", "", "org/", "/name", "org--x/name", ".hidden/x", "a\\b/c",
            "org/na me", "org/" + "x" * 250, 7, None,
        )
    },
    **{f"type {kind!r}": with_id("org/name", kind) for kind in ("models", "..", "", 1)},
    **{f"commit {name!r}": with_commit(name) for name in ("main", "1" * 39, "A" * 40, "../" * 13)},
    **{
        f"blob {name[:9]!r}": with_blob(name, {"size": 1, "sha256": "0" * 64})
        for name in ("../evil", "0" * 40, "A" * 64, "")
    },
    **{
        f"size {size!r}": with_blob(SHA256, {"size": size, "sha256": SHA256})
        for size in (-1, 1, 1 << 62, True, 2.0, "2", None)
    },
    "other sha256": with_blob(SHA256, {"size": len(ENCODER), "sha256": "0" * 64}),
    "sha256 in capitals": with_blob(git_sha1(b"{}"), {"size": 2, "sha256": "A" * 64}),
    "another size of a content": with_blob(git_sha1(b"{}"), {"size": 2, "sha256": SHA256}),
    "blob is not an object": with_blob(SHA256, []),
    "listing is unknown": lambda document: revision(document).update(tree="3" * 64),
    "listing is huge": lambda document: document["blobs"][revision(document)["tree"]].update(
        size=1 << 40
    ),
    "listing is no name": lambda document: revision(document).update(tree=[]),
    "listing named by sha1": lambda document: revision(document).update(tree=git_sha1(b"{}")),
    "file without etag": lambda document: revision(document)["files"].update({"x": {"size": 1}}),
    "repo twice": lambda document: document["repos"].append(document["repos"][0]),
    "repo in other letters": lambda document: document["repos"].append(
        {**document["repos"][0], "id": "Org/Name"}
    ),
    "version": lambda document: document.update(format_version=2),
    "format": lambda document: document.update(format="zip"),
    "no time": lambda document: document.update(created_at="yesterday"),
    "time without zone": lambda document: document.update(created_at="2026-11-16T16:00:00"),
    "no repos": lambda document: document.pop("repos"),
    "repos is a table": lambda document: document.update(repos={}),
    "files is a list": lambda document: revision(document).update(files=[]),
}  # fmt: skip


def test_the_manifest_that_is_spoilt_below_is_good() -> None:
    manifest = decode(json.dumps(good()).encode())
    assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_manifest_is_refused(fault: str) -> None:
    document = copy.deepcopy(good())
    BAD[fault](document)
    with pytest.raises(BundleError):
        decode(json.dumps(document).encode())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff",
        b'{"format": 1, "format": 2}',
        b"1" * 9999,
    ],
    ids=repr,
)
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(BundleError):
        decode(text)


def test_two_files_of_one_name_are_refused() -> None:
    text = json.dumps(good()).replace("b/c.safetensors", "a.json")
    with pytest.raises(BundleError, match="twice"):
        decode(text.encode())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.sampled_from(["format", "created_at", "repos", "blobs"]),
)
def test_no_manifest_ends_in_another_error(value: object, key: str) -> None:
    document = good()
    document[key] = value
    with pytest.raises(BundleError):
        decode(json.dumps(document).encode())


# a manifest that lies


def bundle_of(path: Path, manifest: Manifest, contents: list[bytes]) -> Path:
    """Write a tar with a manifest of which the bytes know nothing."""
    text = encode(manifest)
    with path.open("wb") as out:
        sink = TarSink(out)
        sink.text(MANIFEST, text)
        for data in contents:
            sink.text(f"blobs/{hashlib.sha256(data).hexdigest()}", data)
        sink.text(COMPLETE, checksum(text))
        sink.finish()
    return path


def lying(etag: str, data: bytes, listing: bytes = b"") -> Manifest:
    """Say that a file has some etag, though its bytes have only the sha256."""
    sha256 = hashlib.sha256(data).hexdigest()
    document = good()
    document["blobs"] = {etag: {"size": len(data), "sha256": sha256}}
    revision(document)["files"] = {"a.safetensors": {"etag": etag, "size": len(data)}}
    revision(document)["tree"] = None
    if listing:
        name = hashlib.sha256(listing).hexdigest()
        revision(document)["tree"] = name
        document["blobs"][name] = {"size": len(listing), "sha256": name}
    return decode(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"small", ENCODER], ids=["small", "weights"])
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "in the store"])
def test_a_wrong_git_name_is_found_though_the_sha256_is_right(
    data: bytes, is_known: bool, there: Path, tmp_path: Path, store: Store
) -> None:
    """Else a bundle could put any bytes in the place of a file that git names."""
    if is_known:
        store.put_stream([data], algorithms=("sha256",))
    bundle = bundle_of(tmp_path / "lie.tar", lying(git_sha1(b"other"), data), [data])
    with pytest.raises(BundleError, match="git-sha1"):
        bring(store, bundle, there)
    assert faults_of(there) == []
    assert list(there.glob("*/snapshots/*")) == []


@pytest.mark.parametrize(
    "listing",
    [
        b"no json",
        b'{"format_version": 2, "files": {}}',
        b'{"format_version": 1, "files": {"../evil": {"size": 1, "blob_id": "x"}}}',
        b'{"format_version": 1, "files": {"a.safetensors": {"size": 1, "blob_id": "x"}}}',
    ],
)
def test_a_listing_that_cannot_be_true_is_refused(
    listing: bytes, there: Path, tmp_path: Path, store: Store
) -> None:
    manifest = lying(SHA256, ENCODER, listing)
    contents = sorted([ENCODER, listing], key=lambda data: hashlib.sha256(data).hexdigest())
    bundle = bundle_of(tmp_path / "lie.tar", manifest, contents)
    with pytest.raises(BundleError, match="tree listing"):
        bring(store, bundle, there)
    assert list(there.glob("*/trees/*")) == []
    assert list(there.glob("*/snapshots/*")) == []
