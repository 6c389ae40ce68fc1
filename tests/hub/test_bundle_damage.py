"""Bundles that are damaged or mean harm: refused, and nothing wrong or foreign is written."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.errors import BundleError, DigestMismatchError, FileChangedError, StoreError
from smartcache.hub.care import bundle as hub_bundle
from smartcache.hub.care.bundle import (
    COMPLETE,
    MANIFEST,
    MOST_MANIFEST,
    Manifest,
    TarSink,
    checksum,
    decode,
    encode,
    opened,
)
from smartcache.store.store import Store
from tests.hub.bundles import (
    ENCODER,
    FIRST,
    UNET,
    Way,
    add_repo,
    bring,
    everything,
    export,
    faults_of,
    planned,
)
from tests.hub_server import etag_of, git_sha1

FORMS = ("bundle", "bundle.tar")
Document = dict[str, Any]
"""A manifest as JSON."""
Change = Callable[[Document], None]

SHA256 = etag_of("x.bin", ENCODER)


# the cache that is exported


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_ends_the_export_and_nothing_is_left(form: str, way: Way) -> None:
    before = sorted(os.listdir(way.root))
    for name in ("model_index.json", "text_encoder/model.safetensors"):
        blob = way.cache / "models--org--first" / "blobs" / etag_of(name, FIRST[name])
        flip(blob, len(FIRST[name]) // 2)
        with pytest.raises(DigestMismatchError, match=f"{name} of model/org/first is damaged"):
            way.export(form, "org/first")
        flip(blob, len(FIRST[name]) // 2)
    assert sorted(os.listdir(way.root)) == before


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_changes_its_size_ends_the_export(form: str, way: Way) -> None:
    plan = planned(way.cache, "org/first")
    before = sorted(os.listdir(way.root))
    for size in (10, len(ENCODER) + 10):
        os.truncate(way.cache / "models--org--first" / "blobs" / SHA256, size)
        with pytest.raises(FileChangedError, match=r"text_encoder.* of model/org/first changed"):
            (plan.write_tar if form.endswith("tar") else plan.write_folder)(way.root / form)
    assert sorted(os.listdir(way.root)) == before


def test_a_cut_file_beside_a_whole_one_of_the_same_name_is_found(way: Way) -> None:
    os.truncate(way.cache / "models--org--first" / "blobs" / SHA256, 10)
    with pytest.raises(DigestMismatchError, match="not the same size"):
        planned(way.cache, "org/first", "org/second")


def test_a_listing_that_contradicts_the_snapshot_is_left_out(way: Way) -> None:
    (listing,) = (way.cache / "models--org--first" / "trees").iterdir()
    listing.write_text(listing.read_text().replace(SHA256, "0" * 64))
    way.bring(way.export())
    listing.unlink()
    way.assert_arrived()


def test_a_file_at_the_destination_that_appears_meanwhile_is_kept(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(manifest: bytes) -> bytes:
        (way.root / "bundle.tar").write_text("mine")
        return checksum(manifest)

    before = os.listdir(way.root)
    monkeypatch.setattr(hub_bundle, "checksum", appear)
    with pytest.raises(StoreError, match="exists already"):
        way.export("bundle.tar")
    assert (way.root / "bundle.tar").read_text() == "mine"
    assert sorted(os.listdir(way.root)) == sorted([*before, "bundle.tar"])


# bytes of a bundle


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_is_refused_and_nothing_points_at_it(form: str, way: Way) -> None:
    bundle = way.export(form)
    for data in (FIRST["model_index.json"], ENCODER):
        file, position = bundle / "blobs" / hashlib.sha256(data).hexdigest(), 5
        if bundle.is_file():
            file, position = bundle, bundle.read_bytes().index(data) + 5
        flip(file, position)
        with pytest.raises(BundleError, match="damaged"):
            way.bring(bundle)
        flip(file, position)
        way.assert_nothing_arrived()
        assert not way.store.verify(full=True).has_damage


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


def test_what_arrived_of_a_cut_tar_is_not_read_again(way: Way) -> None:
    bundle = way.export("bundle.tar")
    whole = bundle.read_bytes()
    os.truncate(bundle, len(whole) - 60_000)
    with pytest.raises(BundleError, match="ends early"):
        way.bring(bundle)
    bundle.write_bytes(whole)
    assert way.bring(bundle).present_size > 0
    way.assert_arrived()


def instead(blob: Path, make: Callable[[Path], object]) -> None:
    blob.unlink()
    make(blob)


def another_manifest(bundle: Path) -> None:
    text = (bundle / MANIFEST).read_bytes()
    (bundle / MANIFEST).write_bytes(text.replace(b"org/first", b"org/thief"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no complete": lambda bundle: (bundle / COMPLETE).unlink(),
    "other manifest": another_manifest,
    "no manifest": lambda bundle: (bundle / MANIFEST).unlink(),
    "missing blob": lambda bundle: (bundle / "blobs" / SHA256).unlink(),
    "short blob": lambda bundle: os.truncate(bundle / "blobs" / SHA256, 100),
    "long blob": lambda bundle: os.truncate(bundle / "blobs" / SHA256, len(ENCODER) + 1),
    "symlink": lambda bundle: instead(
        bundle / "blobs" / SHA256, lambda blob: blob.symlink_to(bundle.parent / "outside")
    ),
    "fifo": lambda bundle: instead(bundle / "blobs" / SHA256, os.mkfifo),
}


def test_a_folder_that_is_not_whole_is_refused_before_anything_is_written(way: Way) -> None:
    (way.root / "outside").write_bytes(ENCODER)
    for fault, spoil in DAMAGE.items():
        bundle = way.export(fault)
        spoil(bundle)
        refused(way, bundle, fault)
        assert not way.there.exists(), fault
        assert list(way.store.blobs()) == [], fault


def refused(way: Way, bundle: Path, fault: str, match: str = "") -> None:
    try:
        way.bring(bundle)
    except BundleError as error:
        assert re.search(match, str(error)), fault  # noqa: PT017
    else:
        pytest.fail(f"taken in spite of {fault}")


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
def test_a_hostile_tar_is_refused(how: int, way: Way) -> None:
    members = members_of(way.export("bundle.tar"))
    around = {*os.listdir(way.root), "to", "hostile.tar", "stores"}
    for fault, spoilt in HOSTILE.items():
        bundle = write_tar(way.root / "hostile.tar", spoilt(members), how)
        with Store(way.root / "stores" / fault) as store:
            anew = Way(way.root, store)
            refused(anew, bundle, fault)
        assert set(os.listdir(way.root)) <= around, fault
        anew.assert_nothing_arrived()
        shutil.rmtree(way.there, ignore_errors=True)


def test_a_tar_repacked_by_another_program_in_the_same_order_is_read(way: Way) -> None:
    members = members_of(way.export("bundle.tar"))
    way.bring(write_tar(way.root / "again.tar", members, tarfile.PAX_FORMAT))
    way.assert_arrived()


def test_what_is_no_tar_is_no_bundle(tmp_path: Path) -> None:
    for data in (b"", b"\0" * 1024, b"PK\3\4 no tar" * 100, b"x"):
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
    files = {
        "a.json": {"etag": sha1, "size": 2},
        "b/c.safetensors": {"etag": SHA256, "size": len(ENCODER)},
    }
    return {
        "format": "smartcache-bundle",
        "format_version": 1,
        "created_at": "2026-11-16T16:00:00Z",
        "repos": [{
            "type": "model", "id": "org/name", "refs": {"main": commit, "refs/pr/1": commit},
            "revisions": {commit: {"files": files, "tree": listing}},
        }],
        "blobs": {
            sha1: {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
            SHA256: {"size": len(ENCODER), "sha256": SHA256},
            listing: {"size": 7, "sha256": listing},
        },
    }  # fmt: skip


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


def is_refused(text: bytes) -> bool:
    try:
        decode(text)
    except BundleError:
        return True
    return False


def test_a_bad_manifest_is_refused() -> None:
    for fault, change in BAD.items():
        document = copy.deepcopy(good())
        change(document)
        assert is_refused(json.dumps(document).encode()), fault
    for text in (
        b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"format": 1, "format": 2}',
        b"1" * 9999,
    ):  # fmt: skip
        assert is_refused(text), text[:99]


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


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "in the store"])
def test_a_wrong_git_name_is_found_though_the_sha256_is_right(is_known: bool, way: Way) -> None:
    """Else a bundle could put any bytes in the place of a file that git names."""
    for data in (b"small", ENCODER):
        if is_known:
            way.store.put_stream([data], algorithms=("sha256",))
        bundle = bundle_of(way.root / "lie.tar", lying(git_sha1(b"other"), data), [data])
        with pytest.raises(BundleError, match="git-sha1"):
            way.bring(bundle)
        way.assert_nothing_arrived()


def test_a_listing_that_cannot_be_true_is_refused(way: Way) -> None:
    for listing in (
        b"no json",
        b'{"format_version": 2, "files": {}}',
        b'{"format_version": 1, "files": {"../evil": {"size": 1, "blob_id": "x"}}}',
        b'{"format_version": 1, "files": {"a.safetensors": {"size": 1, "blob_id": "x"}}}',
    ):
        manifest = lying(SHA256, ENCODER, listing)
        contents = sorted([ENCODER, listing], key=lambda data: hashlib.sha256(data).hexdigest())
        bundle = bundle_of(way.root / "lie.tar", manifest, contents)
        refused(way, bundle, repr(listing), "tree listing")
        assert list(way.there.glob("*/trees/*")) == []
        assert list(way.there.glob("*/snapshots/*")) == []
