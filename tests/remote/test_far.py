"""What reads through from a tier, where the disk, the network or somebody else gets in the way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from smartcache import SmartCache
from smartcache.artifacts import ArtifactSet
from smartcache.artifacts.engine.far import FarPack, Skeleton
from smartcache.errors import DamagedObjectError, SmartcacheError
from smartcache.remote import Delivery, Tier, attach_set, pull_set, push_set
from tests.remote.places import s3_tier
from tests.remote.test_sets import HERE, MIB, check, chunks_of, fill, keys_of, opened


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond a size: a write stops in the middle, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_loses_no_artifact(nas: Tier, a: SmartCache, b: SmartCache) -> None:
    keys = keys_of(100)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        with files_up_to(3 * MIB):
            check(theirs, keys)
        assert sorted(theirs) == keys
        sizes = {path.stat().st_size for path in chunks_of(theirs)}
        assert all(size <= 3 * MIB for size in sizes), "what was not written whole has no name"
        check(theirs, keys)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_something_else_where_a_chunk_should_be(
    nas: Tier, a: SmartCache, b: SmartCache, what: str
) -> None:
    keys = keys_of(60)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        folder = theirs.path / "far" / next(iter(theirs.far_packs()))
        if what == "folder":
            (folder / "00000000").mkdir(parents=True)
        else:
            folder.parent.mkdir()
            folder.write_bytes(b"something else")
        check(theirs, keys)


ENDING = """
import sys, time
from smartcache import SmartCache
from smartcache.remote import Tier
home, url = sys.argv[1:]
read = Tier.read
def slowly(self, *args):
    time.sleep(0.5)
    return read(self, *args)
Tier.read = slowly
cache = SmartCache(home)
opened = cache.artifacts("latents", fingerprint={"vae": "x"}, tier=Tier("nas", url))
selection = opened.select(sorted(opened))
selection.announce(range(len(selection)))
print("ends", flush=True)
"""


def test_a_program_that_ends_does_not_wait_for_all_that_was_announced(
    nas: Tier, a: SmartCache, tmp_path: Path
) -> None:
    with opened(a) as mine:
        mine.put_many((f"k{n}", {"tensor": bytes(4 * MIB)}) for n in range(40))
        push_set(mine, nas)
    command = [sys.executable, "-c", ENDING, str(tmp_path / "b"), nas.url]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ends\n"
        running.wait(timeout=60)
    assert running.returncode == 0
    kept = [path for path in (tmp_path / "b").rglob("far/*/*") if path.is_file()]
    assert len(kept) < 24, "those that were on their way, and not all 40"


def packs_in(tier: Tier, opened: ArtifactSet) -> dict[str, Any]:
    document = tier.document("sets", f"latents.{opened.id}")
    assert document is not None
    packs: dict[str, Any] = document["content"]["packs"]
    return packs


def test_a_pack_that_was_taken_in_unfinished_is_pushed(
    nas: Tier, a: SmartCache, b: SmartCache, tmp_path: Path
) -> None:
    keys = keys_of(20)
    with SmartCache(tmp_path / "worker") as worker:
        with opened(worker) as theirs:
            fill(theirs, keys[:10])
        (left,) = theirs.path.glob("*.pack")
        with opened(a) as mine:
            fill(mine, keys[5:15])
            mine.take_in(left)
            push_set(mine, nas)
            assert left.stem not in packs_in(nas, mine), "it may grow where it comes from"
        with opened(b, nas) as readers:
            check(readers, keys[:15])
        with opened(worker) as theirs:
            fill(theirs, keys[15:])
            push_set(theirs, nas)
    with opened(b, nas) as theirs:
        assert sorted(theirs) == keys
        check(theirs, keys)


@pytest.mark.parametrize("how", ["pull", "attach"])
def test_a_copied_store_that_went_on_loses_nothing(nas: Tier, tmp_path: Path, how: str) -> None:
    """Both go on with the same pack: it has one name, and two contents."""
    keys = keys_of(30)
    with SmartCache(tmp_path / "a") as cache, opened(cache) as mine:
        fill(mine, keys[:10])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with SmartCache(tmp_path / "a") as a, SmartCache(tmp_path / "b") as b:
        for cache, some in ((a, keys[10:15]), (b, keys[15:])):
            with opened(cache) as mine:
                fill(mine, some)
                push_set(mine, nas)
        for cache in (a, b):
            if how == "pull":
                pull_set(cache.sets, nas, "latents")
            with opened(cache, nas if how == "attach" else None) as mine:
                assert sorted(mine) == keys
                check(mine, keys)
    with SmartCache(tmp_path / "c") as c, opened(c, nas) as theirs:
        check(theirs, keys)


def test_nothing_comes_back_where_a_pull_was_killed_at_its_end(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:
    keys = keys_of(10)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        (far,) = theirs.path.glob("*.far")
        data = far.read_bytes()
        pull_set(b.sets, nas, "latents")
        far.write_bytes(data)  # as if the pull had been killed before it removed it
        check(theirs, keys)
        assert theirs.delete(keys[0])
        theirs.compact(force=True)
        assert not theirs.far_packs()
        assert sorted(theirs) == keys[1:]


KILLED_PULL = """
import os, signal, sys
from smartcache import SmartCache
from smartcache.remote import Tier, pull_set
home, url = sys.argv[1:]
chunks = Tier.chunks
def killed(self, digest, size=None):
    data = b"".join(chunks(self, digest, size=size))
    yield data[:-1]
    os.kill(os.getpid(), signal.SIGKILL)
Tier.chunks = killed
with SmartCache(home) as cache:
    pull_set(cache.sets, Tier("nas", url), "latents")
"""


def test_killed_pulls_leave_nothing_for_ever(
    nas: Tier, a: SmartCache, b: SmartCache, tmp_path: Path
) -> None:
    keys = keys_of(10)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    command = [sys.executable, "-c", KILLED_PULL, str(tmp_path / "b"), nas.url]
    left = 0
    for _ in range(3):
        done = subprocess.run(command, cwd=HERE, check=False)
        assert done.returncode == -signal.SIGKILL
        (folder,) = (b.sets.root / "latents").iterdir()
        left = len([path for path in folder.iterdir() if path.stat().st_size > 20_000])
        assert left == 1
    pull_set(b.sets, nas, "latents")
    assert [path.suffix for path in folder.iterdir() if path.stat().st_size > 20_000] == [".pack"]
    with opened(b) as theirs:
        check(theirs, keys)


@contextmanager
def while_it_is_noted(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> Iterator[None]:  # fmt: skip
    """Do something else once, just before a document is changed."""
    change = Tier.change
    todo = [act]

    def changed(self: Tier, *args: Any) -> object:  # noqa: ANN401
        if todo:
            todo.pop()()
        return change(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Tier, "change", changed)
        yield
    assert not todo


def delivered(nas: Tier, cache: SmartCache, keys: list[str]) -> tuple[Delivery, Any]:
    """Have a worker encode something, and send it."""
    with opened(cache) as theirs:
        fill(theirs, keys)
        delivery = Delivery(nas, theirs.id)
        with theirs.sealed() as sealed:
            return delivery, delivery.deliver(sealed.packs[-1])


def test_what_is_delivered_is_not_taken_for_what_was_taken_off(
    nas: Tier, a: SmartCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(30)
    with (
        SmartCache(tmp_path / "v") as v, SmartCache(tmp_path / "w") as w,
        opened(a) as mine, opened(a) as beside,
    ):  # fmt: skip
        fill(mine, keys[20:])
        push_set(mine, nas)
        delivery, first = delivered(nas, v, keys[:10])
        _, second = delivered(nas, w, keys[10:20])
        with while_it_is_noted(monkeypatch, lambda: attach_set(beside, nas)):
            delivery.accept(mine, first)
        assert sorted(mine) == keys[:10] + keys[20:]
        with while_it_is_noted(monkeypatch, lambda: delivery.accept(beside, second)):
            push_set(mine, nas)
        assert {first["name"], second["name"]} <= packs_in(nas, mine).keys()
        assert sorted(mine) == keys


def test_a_pack_that_the_tier_has_lost_is_not_noted_again(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:
    keys = keys_of(20)
    assert nas.folder is not None
    with opened(a) as mine, opened(b) as theirs:
        fill(mine, keys)
        push_set(mine, nas)
        attach_set(theirs, nas)
        (old,) = packs_in(nas, mine).items()
        fill(mine, keys)
        mine.compact(force=True)
        push_set(mine, nas)
        digest = old[1]["digest"]
        (nas.folder / "objects" / digest[:2] / digest).unlink()
        fill(theirs, ["other"])
        push_set(theirs, nas)
        assert old[0] not in packs_in(nas, mine)
        attach_set(theirs, nas)
        check(theirs, keys)


def crafted(skeleton: Skeleton, what: str) -> bytes:
    """Return a skeleton as somebody makes it who knows how."""
    import struct

    about: dict[str, Any] = {
        "origin": {}, "digest": skeleton.digest, "size": skeleton.size, "chunk": skeleton.chunk,
        "hashes": skeleton.hashes.hex(),
    }  # fmt: skip
    tail, text = skeleton.tail, None
    if what == "a huge chunk":
        about["chunk"], about["hashes"] = 1 << 45, skeleton.hashes[:16].hex()
    elif what == "an endless size":
        about["size"] = float("inf")
    elif what == "a negative size":
        about["size"] = -1
    elif what == "no footer":
        tail = bytes(len(tail))
    elif what == "less of the footer":
        tail = tail[-64:]
    elif what == "deep":
        text = b"[" * 100_000
    data = json.dumps(about).encode() if text is None else text
    body = b"smartcache far 1" + struct.pack("<II", len(data), len(tail))
    body += data + skeleton.header + tail
    return body + blake3(body).digest()


@pytest.mark.parametrize(
    "what",
    [
        "a huge chunk",
        "an endless size",
        "a negative size",
        "no footer",
        "less of the footer",
        "deep",
    ],
)
def test_a_crafted_skeleton_is_refused_before_anything_is_fetched(
    nas: Tier, a: SmartCache, b: SmartCache, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    keys = keys_of(10)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
        with mine.sealed() as sealed:
            (pack,) = sealed.packs
        data = crafted(Skeleton.of(pack, bytes.fromhex(mine.id), {}), what)
        digest = nas.put_bytes(data)

        def change(content: Any) -> Any:  # noqa: ANN401
            (entry,) = content["packs"].values()
            entry |= {"skeleton": digest, "skeleton_size": len(data)}
            return {entry["digest"]: entry["size"], digest: len(data)}, content

        nas.change("sets", f"latents.{mine.id}", change)
    read = []
    monkeypatch.setattr(Tier, "read", lambda *args: read.append(args))
    with opened(b) as theirs:
        with pytest.raises(SmartcacheError):
            attach_set(theirs, nas)
        assert len(theirs) == 0
    assert not read


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        (
            b'{"format":1,"kind":"sets","objects":{},"content":{"packs":{"x":{"digest":"","size":'
            b'Infinity,"skeleton":"","skeleton_size":1,"from":""}}}}'
        ),
    ],
)
def test_a_crafted_document_is_refused(nas: Tier, a: SmartCache, text: bytes) -> None:
    assert nas.folder is not None
    with opened(a) as mine:
        fill(mine, keys_of(3))
        folder = nas.folder / "documents" / "sets" / f"latents.{mine.id}"
        folder.mkdir(parents=True)
        (folder / "00000001.json").write_bytes(text)
        for act in (attach_set, push_set):
            with pytest.raises(DamagedObjectError):
                act(mine, nas)


def test_the_last_number_of_a_document_is_not_the_last_change(nas: Tier) -> None:
    assert nas.folder is not None
    nas.change("sets", "x", lambda _: ({}, {"n": 1}))
    folder = nas.folder / "documents" / "sets" / "x"
    (folder / "00000001.json").rename(folder / "99999999.json")
    for n in (2, 3):
        nas.change("sets", "x", lambda _, n=n: ({}, {"n": n}))  # type: ignore[misc]
    found = nas.document("sets", "x")
    assert found is not None
    assert found["content"] == {"n": 3}


FORKED = """
import json, os, sys
from smartcache import SmartCache
from smartcache.remote import connected
home, tier = sys.argv[1], connected(json.loads(sys.argv[2]))
with SmartCache(home) as cache:
    with cache.artifacts("latents", fingerprint={"vae": "x"}, tier=tier) as opened:
        child = os.fork()
        if not child:
            code = 1
            try:
                code = 0 if opened.get("key0001")["name"] == "key0001" else 2
            finally:
                os._exit(code)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("kind", ["folder", "moto"])
def test_a_forked_child_reads_and_takes_no_modules_from_the_folder_it_is_in(
    request: pytest.FixtureRequest, a: SmartCache, tmp_path: Path, kind: str
) -> None:
    tier = (
        Tier("nas", (tmp_path / "nas").as_uri()).begin()
        if kind == "folder"
        else s3_tier(request.getfixturevalue("moto"), tmp_path.name)
    )
    with opened(a) as mine:
        fill(mine, keys_of(3))
        push_set(mine, tier)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "base64.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "script.py").write_text(FORKED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), tmp_path / "b", json.dumps(tier.described())],
        cwd=tmp_path / "work", env={**os.environ, "PYTHONPATH": str(HERE)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0


def test_a_pack_that_is_detached_while_it_is_measured(
    nas: Tier, a: SmartCache, b: SmartCache
) -> None:
    keys = keys_of(10)
    with opened(a) as mine:
        fill(mine, keys)
        push_set(mine, nas)
    with opened(b, nas) as theirs:
        check(theirs, keys)
        (path,) = theirs.path.glob("*.far")
        found = FarPack.open(path)
        assert found.kept_size > sum(each.stat().st_size for each in chunks_of(theirs)) > 0
        theirs.detach(path.stem)
        assert found.kept_size == 0
