"""The operations that the kill tests interrupt: the world before, and what is done in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.api import (
    BlobNotFoundError,
    DestinationExistsError,
    NothingToUndoError,
    Owner,
    Store,
    pin,
    rotate,
)
from tests.api import links_Kind as Kind
from tests.processes.kill_worlds import Operation, World, content

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


def _before_move_in(world: World, store: Store) -> None:
    _before_put(world, store)
    world.may_vanish("new.bin")


def _before_duplicate_move_in(world: World, store: Store) -> None:
    _before_move_in(world, store)
    store.put_stream([LARGE])


def _before_far_move_in(world: World, store: Store) -> None:
    adopted(world, store, "bystander.bin", MEDIUM)
    world.write("far/new.bin", LARGE)
    world.may_vanish("far/new.bin")


def _move_in(name: str) -> Callable[[World, Store], None]:
    def run(world: World, store: Store) -> None:
        if os.path.lexists(world.at(name)):
            store.put_file(world.at(name), how="move")

    return run


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


def _before_undoing_shares(world: World, store: Store) -> None:
    _before_share(world, store)
    _share(world, store)


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
    kinds: tuple[Kind, ...] = ("hardlink", "symlink", "copy")
    for kind in kinds:
        for overwrite in (False, True):
            yield Operation(
                name=f"place {kind}{' over a file' if overwrite else ''}",
                prepare=_before_place(overwrite=overwrite),
                run=_place(kind, overwrite=overwrite),
            )
    yield Operation(
        name="place on another filesystem",
        prepare=_before_place(overwrite=False, name="far/placed.bin"),
        run=_place("copy", overwrite=False, name="far/placed.bin"),
        needs_elsewhere=True,
    )


# remove


def _before_forget(world: World, store: Store) -> None:
    adopted(world, store, "bystander.bin", MEDIUM)
    stored(world, store, "doomed.bin", LARGE)


def _forget(*, to_trash: bool) -> Callable[[World, Store], None]:
    def run(world: World, store: Store) -> None:
        digest = world.digests["doomed.bin"]
        try:
            store.forget(digest, to_trash=to_trash)
        except BlobNotFoundError:
            if os.path.lexists(store.volume.layout.blob(digest)):
                raise

    return run


def _before_prune(world: World, store: Store) -> None:
    adopted(world, store, "bystander.bin", MEDIUM)
    for seed in range(3):
        stored(world, store, f"unowned{seed}.bin", content(10 + seed, 20_000))
    store.pin(stored(world, store, "pinned.bin", LARGE))
    store.forget(stored(world, store, "trashed.bin", SMALL))


def _prune(world: World, store: Store) -> None:
    store.plan_prune().execute()


def _before_rotate(world: World, store: Store) -> None:
    digest = adopted(world, store, "one.bin", LARGE)
    store.place(digest, world.at("placed.bin"), kind="hardlink")
    world.allowed["placed.bin"] = {LARGE}


def _rotate(world: World, store: Store) -> None:
    rotate(store.volume, world.digests["one.bin"])


# undo, eject, move


def _before_leaving(world: World, store: Store) -> None:
    """Make one of everything: adopted, replaced, twins, each kind of link, moved in, pinned."""
    one = adopted(world, store, "one.bin", LARGE)
    world.write("same.bin", LARGE, mode=0o664)
    world.write("again.bin", LARGE)
    world.link("twin.bin", to="again.bin")
    for name in ("same.bin", "again.bin", "twin.bin"):
        store.replace(world.at(name), one)
    for kind in ("hardlink", "symlink", "copy"):
        store.place(one, world.at(f"{kind}.bin"), kind=kind)
        world.allowed[f"{kind}.bin"] = {LARGE}
    adopted(world, store, "alone.bin", SMALL, mode=0o600)
    two = adopted(world, store, "two.bin", MEDIUM)
    store.place(two, world.at("linked.bin"), kind="hardlink")
    world.allowed["linked.bin"] = {MEDIUM}
    three = stored(world, store, "three.bin", content(21, 10_000))
    store.place(three, world.at("only.bin"), kind="hardlink")
    world.allowed["only.bin"] = {content(21, 10_000)}
    store.put_file(world.write("moved.bin", OTHER, mode=0o640), how="move")
    world.may_vanish("moved.bin")


def _before_undo(world: World, store: Store) -> None:
    _before_leaving(world, store)
    for name in ("hardlink.bin", "symlink.bin", "copy.bin", "linked.bin", "only.bin"):
        world.may_vanish(name)
    store.forget(stored(world, store, "trashed.bin", content(20, 3_000)))


def _undo(world: World, store: Store) -> None:
    try:
        undone = store.plan_undo().execute()
    except NothingToUndoError:
        return
    left = [f"{result.change.op} {result.change.path.name}: {result.note}" for result in undone
            if not result.is_undone]  # fmt: skip
    if left:
        raise AssertionError(f"not undone: {left}")


def _before_sharing_eject(world: World, store: Store) -> None:
    _before_leaving(world, store)
    world.may_share = True


def _eject(*, keep_shared: bool) -> Callable[[World, Store], None]:
    def run(world: World, store: Store) -> None:
        store.plan_eject(keep_shared=keep_shared).execute()

    return run


def _before_move(world: World, store: Store) -> None:
    _before_leaving(world, store)
    store.forget(stored(world, store, "trashed.bin", content(20, 3_000)))


def _move(to: Callable[[World], Path]) -> Callable[[World, Store], None]:
    def run(world: World, store: Store) -> None:
        if store.root != to(world):
            store.plan_move(to(world)).execute()

    return run


def _far_root(world: World) -> Path:
    if world.elsewhere is None:
        raise AssertionError("there is no other filesystem")
    return world.elsewhere / "store"


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
        raise AssertionError(f"not healed: {report}")


def before_rebuild(world: World, store: Store) -> None:
    _before_leaving(world, store)
    store.own(pin("kept too"), [world.digests["two.bin"]])


def rebuild(world: World, store: Store) -> None:
    store.rebuild()


ADOPTED_NAMES = ("one.bin", "same.bin", "two.bin", "known.bin", "three.bin")

OPERATIONS = [
    Operation(name="put a stream", prepare=_before_put, run=_put_stream),
    Operation(name="put a copy", prepare=_before_put, run=_put_copy),
    Operation(name="put by moving", prepare=_before_move_in, run=_move_in("new.bin")),
    Operation(
        name="put by moving a duplicate",
        prepare=_before_duplicate_move_in,
        run=_move_in("new.bin"),
    ),
    Operation(
        name="put by moving from another filesystem",
        prepare=_before_far_move_in,
        run=_move_in("far/new.bin"),
        needs_elsewhere=True,
    ),
    Operation(name="adopt", prepare=_before_adopt, run=_adopt(*ADOPTED_NAMES)),
    Operation(
        name="adopt two names of a file",
        prepare=_before_adopt_twins,
        run=_adopt("one.bin", "twin.bin", "two.bin"),
    ),
    *_places(),
    Operation(
        name="replace",
        prepare=_before_replace,
        run=_replace("same.bin", "again.bin", "second.bin"),
    ),
    Operation(
        name="replace two names of a file",
        prepare=_before_replace_twins,
        run=_replace("same.bin", "again.bin", "second.bin", "twin.bin"),
    ),
    Operation(name="share", prepare=_before_share, run=_share, needs_reflinks=True),
    Operation(name="undo shares", prepare=_before_undoing_shares, run=_undo, needs_reflinks=True),
    Operation(name="rm", prepare=_before_forget, run=_forget(to_trash=True)),
    Operation(name="rm for good", prepare=_before_forget, run=_forget(to_trash=False)),
    Operation(name="prune", prepare=_before_prune, run=_prune),
    Operation(name="rotate", prepare=_before_rotate, run=_rotate),
    Operation(name="undo", prepare=_before_undo, run=_undo),
    Operation(
        name="eject", prepare=_before_leaving, run=_eject(keep_shared=False), ends_store=True
    ),
    Operation(
        name="eject and keep sharing",
        prepare=_before_sharing_eject,
        run=_eject(keep_shared=True),
        ends_store=True,
    ),
    Operation(name="mv", prepare=_before_move, run=_move(lambda world: world.directory / "moved")),
    Operation(
        name="mv to another filesystem",
        prepare=_before_move,
        run=_move(_far_root),
        needs_elsewhere=True,
    ),
    Operation(name="verify and repair", prepare=_before_repair, run=_repair),
    Operation(name="rebuild", prepare=before_rebuild, run=rebuild),
]
