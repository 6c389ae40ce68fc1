"""The operations of a store: the world before, and what is done in it.

`tests.processes.test_operations` disturbs each of them in every way. `OPENINGS` are what the
opening of a store has to put right.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from smartcache.errors import BlobNotFoundError, DestinationExistsError, NothingToUndoError
from smartcache.store import Kind
from smartcache.store import volume as store_volume
from smartcache.store.owners import pin
from smartcache.store.records import Owner
from smartcache.store.store import Store
from tests.folders.deduping import deduplicated
from tests.processes.killing import Moment, die_at, in_child, was_killed
from tests.processes.worlds import NotDoneError, Operation, World, content

LARGE = content(1, 200_000)
MEDIUM = content(2, 70_001)
SMALL = content(3, 5_000)
OTHER = content(4, 66_000)


def adopted(world: World, store: Store, name: str, data: bytes, *, mode: int = 0o644) -> str:
    """Make a user's file and adopt it."""
    return store.adopt(world.write(name, data, mode=mode)).digest


def stored(world: World, store: Store, name: str, data: bytes) -> str:
    """Make a user's file and copy it into the store."""
    return store.put_file(world.write(name, data)).digest


# put


def _before_put(world: World, store: Store) -> None:
    adopted(world, store, "bystander.bin", MEDIUM)
    world.write("new.bin", LARGE)


def _put_stream(world: World, store: Store) -> None:
    chunks = (LARGE[at : at + 50_000] for at in range(0, len(LARGE), 50_000))
    store.put_stream(chunks, size=len(LARGE), algorithms=("sha256", "git-sha1"))


def _put_copy(world: World, store: Store) -> None:
    store.put_file(world.at("new.bin"), algorithms=("sha256",))


def _put_unannounced(world: World, store: Store) -> None:
    store.put_stream([LARGE[:100], LARGE[100:]])


# adopt and replace


def _before_adopt(world: World, store: Store) -> None:
    adopted(world, store, "bystander.bin", OTHER)
    world.write("one.bin", LARGE, mode=0o664)
    world.write("same.bin", LARGE, mode=0o644)
    world.write("two.bin", MEDIUM, mode=0o600)
    world.write("known.bin", OTHER, mode=0o640)
    world.write("three.bin", SMALL)


def _before_adopt_twins(world: World, store: Store) -> None:
    world.write("one.bin", LARGE, mode=0o664)
    world.link("twin.bin", to="one.bin")
    world.write("two.bin", MEDIUM)


def _adopt(*names: str) -> Callable[[World, Store], None]:
    def run(world: World, store: Store) -> None:
        owner = Owner(kind="folder", name="models", path=world.files)
        for adoption in store.adopt_many(map(world.at, names), owner=owner):
            if adoption.error is not None:
                raise adoption.error

    return run


def _before_replace(world: World, store: Store) -> None:
    adopted(world, store, "one.bin", LARGE)
    adopted(world, store, "two.bin", MEDIUM)
    world.write("same.bin", LARGE, mode=0o664)
    world.write("again.bin", LARGE)
    world.write("second.bin", MEDIUM, mode=0o644)


def _before_replace_twins(world: World, store: Store) -> None:
    _before_replace(world, store)
    world.link("twin.bin", to="again.bin")


def _replace(*names: str) -> Callable[[World, Store], None]:
    def run(world: World, store: Store) -> None:
        owner = Owner(kind="folder", name="models", path=world.files)
        files = [(world.at(name), world.digests[name]) for name in names]
        for result in store.replace_many(files, owner=owner):
            if result.error is not None:
                raise result.error

    return run


# share


def _before_share(world: World, store: Store) -> None:
    """Some have a blob as their source, some a user's file; one has two names."""
    adopted(world, store, "one.bin", LARGE)
    world.write("same.bin", LARGE, mode=0o664)
    world.write("again.bin", LARGE, mode=0o444)
    world.write("two.bin", MEDIUM, mode=0o600)
    world.write("second.bin", MEDIUM)
    world.link("twin.bin", to="second.bin")


SHARED = {"same.bin": "one.bin", "again.bin": "one.bin", "second.bin": "two.bin"}


def _share(world: World, store: Store) -> None:
    files = [(world.at(a), world.at(b), world.digests[b]) for b, a in SHARED.items()]
    for result in store.share_many(files):
        if result.error is not None:
            raise result.error


# place


def _before_place(*, overwrite: bool, name: str = "placed.bin") -> Callable[[World, Store], None]:
    def prepare(world: World, store: Store) -> None:
        adopted(world, store, "one.bin", LARGE)
        if overwrite:
            world.write(name, OTHER)
            world.allowed[name] = {OTHER, LARGE}
            world.originals.pop(name)
        else:
            world.allowed[name] = {None, LARGE}

    return prepare


def _place(
    kind: Kind, *, overwrite: bool, name: str = "placed.bin"
) -> Callable[[World, Store], None]:
    def run(world: World, store: Store) -> None:
        digest = world.digests["one.bin"]
        try:
            store.place(digest, world.at(name), kind=kind, overwrite=overwrite)
        except DestinationExistsError:
            # A link is recognised as one; a copy that is there must be one the store knows of.
            link = store.volume.index.link(world.at(name))
            if overwrite or link is None or (link.kind, link.digest) != ("copy", digest):
                raise

    return run


def _places() -> Iterator[Operation]:
    kinds: tuple[Kind, ...] = ("hardlink", "copy")
    for kind in kinds:
        for overwrite in (False, True):
            yield Operation(
                name=f"place {kind}{' over a file' if overwrite else ''}",
                prepare=_before_place(overwrite=overwrite),
                run=_place(kind, overwrite=overwrite),
                is_one_step=True,
            )
    for overwrite in (False, True):
        yield Operation(
            name=f"place on another filesystem{' over a file' if overwrite else ''}",
            prepare=_before_place(overwrite=overwrite, name="far/placed.bin"),
            run=_place("copy", overwrite=overwrite, name="far/placed.bin"),
            is_one_step=True,
            needs_elsewhere=True,
        )


# remove


def _before_remove(world: World, store: Store) -> None:
    adopted(world, store, "bystander.bin", MEDIUM)
    stored(world, store, "doomed.bin", LARGE)


def _remove(world: World, store: Store) -> None:
    digest = world.digests["doomed.bin"]
    try:
        store.remove(digest)
    except BlobNotFoundError:
        if os.path.lexists(store.volume.layout.blob(digest)):
            raise


def _before_prune(world: World, store: Store) -> None:
    adopted(world, store, "bystander.bin", MEDIUM)
    for seed in range(3):
        stored(world, store, f"unowned{seed}.bin", content(10 + seed, 20_000))
    store.pin(stored(world, store, "pinned.bin", LARGE))


def _prune(world: World, store: Store) -> None:
    store.plan_prune().execute()


# dedup


def _before_dedup(world: World, store: Store) -> None:
    """Three groups: one has two names, one a blob, one is plain; and bystanders."""
    world.write("first/a.bin", LARGE)
    world.write("second/b.bin", LARGE)
    world.write("third/c.bin", LARGE, mode=0o664)
    world.link("first/d.bin", to="second/b.bin")
    adopted(world, store, "first/e.bin", MEDIUM)
    world.write("second/f.bin", MEDIUM)
    world.write("first/g.bin", OTHER)
    world.write("third/h.bin", OTHER)
    world.write("second/alone.bin", SMALL)
    world.write("second/notes.txt", SMALL)


def _dedup(world: World, store: Store) -> None:
    result = deduplicated(store, *(world.files / name for name in ("first", "second", "third")))
    for skip in result.skipped:
        raise NotDoneError(str(skip))


def _before_undoing_dedup(world: World, store: Store) -> None:
    _before_dedup(world, store)
    _dedup(world, store)


def _before_pin(world: World, store: Store) -> None:
    stored(world, store, "one.bin", LARGE)


def _pin(world: World, store: Store) -> None:
    store.pin(world.digests["one.bin"], "mine")


# undo, eject


def _before_leaving(world: World, store: Store) -> None:
    """Make one of everything: adopted, replaced, twins, each kind of link."""
    one = adopted(world, store, "one.bin", LARGE)
    world.write("same.bin", LARGE, mode=0o664)
    world.write("again.bin", LARGE)
    world.link("twin.bin", to="again.bin")
    for name in ("same.bin", "again.bin", "twin.bin"):
        store.replace(world.at(name), one)
    for kind in ("hardlink", "copy"):
        store.place(one, world.at(f"{kind}.bin"), kind=kind)
        world.allowed[f"{kind}.bin"] = {LARGE}
    adopted(world, store, "alone.bin", SMALL, mode=0o600)
    two = adopted(world, store, "two.bin", MEDIUM)
    store.place(two, world.at("linked.bin"), kind="hardlink")
    world.allowed["linked.bin"] = {MEDIUM}
    three = stored(world, store, "three.bin", content(21, 10_000))
    store.place(three, world.at("only.bin"), kind="hardlink")
    world.allowed["only.bin"] = {content(21, 10_000)}


def _before_undo(world: World, store: Store) -> None:
    _before_leaving(world, store)
    for name in ("hardlink.bin", "copy.bin", "linked.bin", "only.bin"):
        world.may_vanish(name)


def _undo(world: World, store: Store) -> None:
    try:
        undone = store.plan_undo().execute()
    except NothingToUndoError:
        return
    left = [f"{result.change.op} {result.change.path.name}: {result.note}" for result in undone
            if not result.is_undone]  # fmt: skip
    if left:
        raise NotDoneError(f"not undone: {left}")


def _eject(world: World, store: Store) -> None:
    store.plan_eject().execute()


# verify and rebuild


def _before_repair(world: World, store: Store) -> None:
    """Damage a blob that a file outside still has, remove one that has a copy, forget one's row."""
    layout, index = store.volume.layout, store.volume.index
    spoiled = adopted(world, store, "one.bin", LARGE)
    os.unlink(layout.blob(spoiled))
    Path(layout.blob(spoiled)).write_bytes(LARGE[:-1] + b"?")
    os.chmod(layout.blob(spoiled), 0o444)
    missing = stored(world, store, "two.bin", MEDIUM)
    store.place(missing, world.at("copy.bin"), kind="copy")
    world.allowed["copy.bin"] = {MEDIUM}
    os.unlink(layout.blob(missing))
    orphan = stored(world, store, "three.bin", SMALL)
    index.drop_blob(store.get(orphan).id)
    world.spoiled = {spoiled, missing}


def _repair(world: World, store: Store) -> None:
    report = store.verify(full=True, repair=True)
    if report.has_damage:
        raise NotDoneError(f"not healed: {report}")


def _before_rebuild(world: World, store: Store) -> None:
    _before_leaving(world, store)
    store.own(pin("kept too"), [world.digests["two.bin"]])


def _rebuild(world: World, store: Store) -> None:
    store.rebuild()


def _nothing(world: World, store: Store) -> None:
    pass


ADOPTED = ("one.bin", "same.bin", "two.bin", "known.bin", "three.bin")
ADOPTED_TWINS = ("one.bin", "twin.bin", "two.bin")
REPLACED = ("same.bin", "again.bin", "second.bin")
REPLACED_TWINS = (*REPLACED, "twin.bin")

OPERATIONS = [
    Operation(name="put a stream", prepare=_before_put, run=_put_stream, is_one_step=True),
    Operation(
        name="put a stream of unknown size",
        prepare=_before_put,
        run=_put_unannounced,
        is_one_step=True,
    ),
    Operation(name="put a copy", prepare=_before_put, run=_put_copy, is_one_step=True),
    Operation(name="adopt", prepare=_before_adopt, run=_adopt(*ADOPTED), takes=ADOPTED),
    Operation(
        name="adopt two names of a file",
        prepare=_before_adopt_twins,
        run=_adopt(*ADOPTED_TWINS),
        takes=ADOPTED_TWINS,
    ),
    *_places(),
    Operation(name="replace", prepare=_before_replace, run=_replace(*REPLACED), takes=REPLACED),
    Operation(
        name="replace two names of a file",
        prepare=_before_replace_twins,
        run=_replace(*REPLACED_TWINS),
        takes=REPLACED_TWINS,
    ),
    Operation(
        name="share",
        prepare=_before_share,
        run=_share,
        takes=tuple(SHARED),
        needs_reflinks=True,
    ),
    Operation(name="dedup", prepare=_before_dedup, run=_dedup),
    Operation(name="undo of dedup", prepare=_before_undoing_dedup, run=_undo),
    Operation(name="pin", prepare=_before_pin, run=_pin, is_one_step=True),
    Operation(name="rm", prepare=_before_remove, run=_remove, is_one_step=True),
    Operation(name="prune", prepare=_before_prune, run=_prune),
    Operation(name="undo", prepare=_before_undo, run=_undo),
    Operation(name="eject", prepare=_before_leaving, run=_eject, ends_store=True),
    Operation(name="verify and repair", prepare=_before_repair, run=_repair),
    Operation(name="rebuild", prepare=_before_rebuild, run=_rebuild),
]


def _kill_at(operation: Operation, moment: Moment) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        def run() -> None:
            store = world.open()
            die_at(moment)
            operation.run(world, store)

        if not was_killed(in_child(run)):
            raise AssertionError(f"{operation} did not reach {moment}")

    return spoil


def _recoveries() -> Iterator[Operation]:
    """Yield the opening of a store after an operation was killed: recovery can be killed, too."""
    moments = {
        "adopt": Moment("adopt: linked", 2),
        "replace": Moment("replace: exchanged", 3),
        "place hardlink over a file": Moment("place: temporary made", 1),
        "place copy": Moment("place: linked", 1),
        "rm": Moment("rm: row removed", 1),
        "undo": Moment("own copy: written", 2),
        "eject": Moment("eject: files restored", 1),
    }
    for operation in OPERATIONS:
        if moment := moments.get(operation.name):
            spoil = _kill_at(operation, moment)
            yield replace(operation, name=f"recover from {operation}", spoil=spoil)


def _lose_index(world: World) -> None:
    for path in world.root.glob("index.sqlite3*"):
        path.unlink()


def _lengthen_journal(world: World) -> None:
    with open(world.root / "journal.jsonl", "ab") as file:
        file.write((b" " * 4095 + b"\n") * (store_volume.FOLD_SIZE // 4096))


OPENINGS = [
    *_recoveries(),
    Operation(
        name="open for the first time",
        prepare=_nothing,
        run=_nothing,
        spoil=lambda world: shutil.rmtree(world.root),
    ),
    Operation(
        name="open without an index", prepare=_before_rebuild, run=_rebuild, spoil=_lose_index
    ),
    Operation(
        name="open with a long journal",
        prepare=_before_leaving,
        run=_nothing,
        spoil=_lengthen_journal,
    ),
]
