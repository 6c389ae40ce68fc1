"""The operations of a store: the world before, and what is done in it.

`tests.processes.test_operations` disturbs each of them in every way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from smartcache.errors import BlobNotFoundError, DestinationExistsError
from smartcache.store import Kind
from smartcache.store.store import Store
from smartcache.store.userfile import Allowance
from tests.folders.deduping import scanned
from tests.processes.worlds import Operation, World, content, undo_everything
from tests.store.files import digest_of

LARGE = content(1, 1_100_000)
"""More than one step of a copy."""
MEDIUM, SMALL, OTHER = content(2, 70_001), content(3, 5_000), content(4, 66_000)
ALL: frozenset[Allowance] = frozenset(("group", "mode", "xattr"))

Act = Callable[[World, Store], None]


class NotDoneError(Exception):
    """An operation says that it did not do all of it."""


def _link(world: World, store: Store, names: Iterable[str], *, replace: bool) -> None:
    paths = [world.at(name) for name in names]
    for result in store.link_many(paths, label="link", replace=replace, allow=ALL):
        if result.error is not None:
            raise result.error


def adopting(*names: str) -> Act:
    return lambda world, store: _link(world, store, names, replace=False)


def linking(*names: str) -> Act:
    return lambda world, store: _link(world, store, names, replace=True)


def stored(world: World, store: Store, name: str, data: bytes) -> str:
    return store.put_file(world.write(name, data)).digest


def _before_put(world: World, store: Store) -> None:
    world.write("old.bin", MEDIUM)
    adopting("old.bin")(world, store)
    world.write("new.bin", LARGE)


def _put_copy(world: World, store: Store) -> None:
    store.put_file(world.at("new.bin"), algorithms=("sha256",))


def _put_stream(_: World, store: Store) -> None:
    chunks = (LARGE[at : at + 500_000] for at in range(0, len(LARGE), 500_000))
    store.put_stream(chunks, size=len(LARGE), algorithms=("sha256", "git-sha1"))


def _before_adopt(world: World, _: Store) -> None:
    """There is no store yet."""
    world.write("one.bin", MEDIUM, mode=0o664)
    world.link("twin.bin", to="one.bin")
    world.write("same.bin", MEDIUM)
    world.write("two.bin", SMALL, mode=0o600, attribute=b"mine")


def _before_dedup(world: World, store: Store) -> None:
    """Three contents: one is no blob yet, one is, of one a file has two names."""
    world.write("a/one.bin", LARGE, mode=0o640)
    world.write("b/two.bin", LARGE, attribute=b"of two")
    world.write("c/three.bin", LARGE, mode=0o600)
    world.link("a/twin.bin", to="c/three.bin")
    stored(world, store, "a/four.bin", MEDIUM)
    world.write("b/five.bin", MEDIUM, mode=0o664, attribute=b"of five")
    world.write("c/alone.bin", SMALL)


DEDUPED = (
    "a/one.bin", "b/two.bin", "c/three.bin", "a/twin.bin", "a/four.bin", "b/five.bin",
)  # fmt: skip
_dedup = linking(*DEDUPED)


def _before_dedup_of_a_drive(world: World, store: Store) -> None:
    assert world.drive is not None
    store.add_pool(world.drive / "pool")
    for name in ("here.bin", "also here.bin", "drive/there.bin", "drive/also there.bin"):
        world.write(name, MEDIUM)


_dedup_drive = linking("here.bin", "also here.bin", "drive/there.bin", "drive/also there.bin")


# at free paths, and over files


def _before_place(*, overwrite: bool, name: str) -> Act:
    def prepare(world: World, store: Store) -> None:
        stored(world, store, "one.bin", LARGE)
        if overwrite:
            world.write(name, OTHER)
            world.given_up.add(name)

    return prepare


def _place(name: str, kind: Kind, *, overwrite: bool, keep: bool) -> Act:
    def run(world: World, store: Store) -> None:
        path = world.at(name)
        with suppress(DestinationExistsError):  # the copy of before
            store.place(digest_of(LARGE), path, kind=kind, overwrite=overwrite, keep=keep)

    return run


def _places() -> Iterator[Operation]:
    kinds: tuple[Kind, ...] = ("hardlink", "copy")
    for kind, overwrite, keep in ((k, o, e) for k in kinds for o in (0, 1) for e in (0, 1)):
        where = "drive/placed.bin" if kind == "copy" and keep else "placed.bin"
        yield Operation(
            name=f"place {kind}{' over a file' * overwrite}{' that others know' * keep}",
            prepare=_before_place(overwrite=bool(overwrite), name=where),
            run=_place(where, kind, overwrite=bool(overwrite), keep=bool(keep)),
            needs="drive" if "drive" in where else "",
            is_unwritten=bool(keep and not overwrite),
        )


# kept and let go


def _before_removing(world: World, store: Store) -> None:
    for number, data in enumerate((LARGE, MEDIUM, SMALL)):
        stored(world, store, f"{number}.bin", data)
    store.pin(digest_of(SMALL), "mine")


def _remove(_: World, store: Store) -> None:
    with suppress(BlobNotFoundError):
        store.remove(digest_of(LARGE))


def _prune(_: World, store: Store) -> None:
    store.plan_prune().execute()


def _pin(_: World, store: Store) -> None:
    store.pin(digest_of(MEDIUM), "mine")


def _unpin(_: World, store: Store) -> None:
    store.unpin(digest_of(SMALL))


# the way back


def _before_undo(world: World, store: Store) -> None:
    _before_dedup(world, store)
    _dedup(world, store)
    store.place(digest_of(LARGE), world.at("placed.bin"), kind="hardlink")
    store.place(digest_of(MEDIUM), world.at("copied.bin"), kind="copy")
    store.place(digest_of(MEDIUM), world.at("given.bin"), kind="hardlink", keep=True)


def _undo(_: World, store: Store) -> None:
    if problems := undo_everything(store):
        raise NotDoneError(problems)


def _before_undo_of_never_linked(world: World, _: Store) -> None:
    world.write("one of two.bin", OTHER, attribute=b"of both")
    world.link("the other.bin", to="one of two.bin")
    world.given_up |= {"one of two.bin", "the other.bin"}  # they are two files then


def _before_leaving_with_twins(world: World, store: Store) -> None:
    """Of an adopted file with two names one has no row."""
    _before_adopt(world, store)
    adopting("one.bin", "twin.bin", "two.bin")(world, store)
    scanned(store, world.files)  # it remembers all names
    store.place(digest_of(SMALL), world.at("placed.bin"), kind="hardlink")


def undoing(*names: str) -> Act:
    def run(world: World, store: Store) -> None:
        paths = [world.at(name) for name in names]
        for each in store.plan_undo(paths=paths, recursive=True).execute():
            if not each.is_undone:
                raise NotDoneError(each)

    return run


def _eject(_: World, store: Store) -> None:
    store.plan_eject(drop_pinned=True).execute()


# looking after it


def _before_repair(world: World, store: Store) -> None:
    """A blob is damaged of which a copy is outside."""
    _before_put(world, store)
    world.spoiled = stored(world, store, "copy.bin", OTHER)
    blob = Path(store.layout.blob(world.spoiled))
    blob.unlink()
    blob.write_bytes(OTHER[:-1] + b"?")
    blob.chmod(0o444)


def _repair(_: World, store: Store) -> None:
    if store.verify(full=True, repair=True).has_damage:
        raise NotDoneError("no space, or nothing to heal from")


def _rebuild(_: World, store: Store) -> None:
    store.rebuild()


def _before_share(world: World, _: Store) -> None:
    for name in ("one.bin", "same.bin", "again.bin"):
        world.write(name, LARGE)


def _share(world: World, store: Store) -> None:
    one, *others = (world.at(name) for name in ("one.bin", "same.bin", "again.bin"))
    for result in store.share_many((one, other, digest_of(LARGE)) for other in others):
        if result.error is not None:
            raise result.error


OPERATIONS = [
    Operation(name="put a stream", prepare=_before_put, run=_put_stream),
    Operation(name="put a copy", prepare=_before_put, run=_put_copy),
    Operation(name="adopt", prepare=_before_adopt, run=adopting("one.bin", "twin.bin", "two.bin")),
    Operation(name="replace by links", prepare=_before_dedup, run=_dedup),
    Operation(
        name="replace by links on a drive, too",
        prepare=_before_dedup_of_a_drive,
        run=_dedup_drive,
        needs="drive",
    ),
    Operation(name="share blocks", prepare=_before_share, run=_share, needs="reflinks"),
    *_places(),
    Operation(name="pin", prepare=_before_removing, run=_pin),
    Operation(name="unpin", prepare=_before_removing, run=_unpin),
    Operation(name="rm", prepare=_before_removing, run=_remove),
    Operation(name="prune", prepare=_before_removing, run=_prune),
    Operation(name="undo", prepare=_before_undo, run=_undo),
    Operation(name="undo paths", prepare=_before_undo, run=undoing("b", "a/one.bin", "placed.bin")),
    Operation(
        name="undo a path that was never linked",
        prepare=_before_undo_of_never_linked,
        run=undoing("one of two.bin"),
        is_unwritten=True,
    ),
    Operation(name="eject", prepare=_before_undo, run=_eject, ends_store=True),
    Operation(
        name="eject with names that have no row",
        prepare=_before_leaving_with_twins,
        run=_eject,
        ends_store=True,
    ),
    Operation(name="repair", prepare=_before_repair, run=_repair),
    Operation(name="rebuild", prepare=_before_undo, run=_rebuild),
]
