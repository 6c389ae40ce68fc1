"""Sets of artifacts and datasets in a tier: pushed pack by pack, read through or pulled.

A set's document lists packs by name. A pack is two objects: all of it, and its *skeleton* (header,
footer and a hash of every chunk), from which another machine knows what it has before it fetches
anything. Packs are sealed and never change, so what was pushed once is not pushed again.

Each machine answers for the packs that it has pushed. One that it has compacted away is taken off
the document only when it still has an artifact for every key of it: a machine that has lost a pack
takes nothing away from others. (`exact` says that nothing was lost.) A machine that reads through
has its own artifacts first, and of those in the tier the one that was put last.

A dataset's document has its dataset.json, and names the table of its sources; its outputs are sets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from blake3 import blake3

from smartcache.artifacts import ArtifactSet, ArtifactSets, Fingerprint, Skeleton
from smartcache.errors import (
    ArtifactError,
    DamagedObjectError,
    MissingObjectError,
    SetFormatError,
    TierError,
)
from smartcache.progress import Progress, silent
from smartcache.remote.tier import Advance, Document, Sent, Tier, in_parallel, unless
from smartcache.training import (
    Dataset,
    dataset_folder,
    pack_up,
    read_document,
    stored_dataset,
    unpack,
)

_log = logging.getLogger(__name__)
_MOST_SKELETON: Final = 256 << 20


def document_name(name: str, number: str) -> str:
    """Return the name of the document of a set."""
    return f"{name}.{number}"


def push_set(
    opened: ArtifactSet, tier: Tier, progress: Progress = silent, *, exact: bool = False
) -> Sent:
    """Send the packs of a set that are not in the tier, and say there that they are.

    `exact` takes it that what this machine has pushed and does not have any more was deleted on
    purpose: it goes from the tier, too.
    """
    set_id = bytes.fromhex(opened.id)
    name = document_name(opened.name, opened.id)
    there = _packs(tier.document("sets", name))
    with opened.sealed(_sizes(there)) as sealed:
        if sealed.left_out:
            _log.warning(
                "%s: %d packs that others write are left for the next push",
                opened.name, sealed.left_out,
            )  # fmt: skip
        new = [path for path in sealed.packs if path.stem not in there]
        entries: dict[str, Document] = {}
        files: dict[str, tuple[Path, int]] = {}
        with progress("Hashing", sum(path.stat().st_size for path in new), "bytes") as job:
            for path in new:
                skeleton = Skeleton.of(path, set_id, {})
                job.advance(skeleton.size)
                entries[path.stem] = _entry(tier, skeleton, opened)
                files[skeleton.digest] = path, skeleton.size
        sent = tier.send(files, progress)
        here = {path.stem for path in sealed.packs}
        for number in there.keys() & here:
            sent.skipped += 1
            sent.skipped_size += there[number]["size"]
        # Those of other machines that this one reads through are theirs to take away.
        for number, skeleton in opened.far_packs().items():
            is_missed = number not in there and _is_in(skeleton, tier)
            if is_missed and tier.size_of(skeleton.digest) == skeleton.size:
                entries[number] = _entry(tier, skeleton, opened)
        _note(tier, opened, entries, exact=exact)
        # What was there before, a `gc` may have removed that had begun before the document came.
        passed = {path.stem: path for path in sealed.packs if path.stem in there}
        again = {there[each]["digest"]: (passed[each], there[each]["size"]) for each in passed}
        sent.objects += tier.send(again, progress).objects
    return sent


def _entry(tier: Tier, skeleton: Skeleton, opened: ArtifactSet) -> Document:
    """Send a skeleton, and return what the document says of its pack."""
    return {
        "digest": skeleton.digest, "size": skeleton.size,
        "skeleton": tier.put_bytes(skeleton._replace(origin={}).to_bytes()),
        "skeleton_size": len(skeleton._replace(origin={}).to_bytes()),
        "from": opened.instance,
    }  # fmt: skip


def _note(
    tier: Tier, opened: ArtifactSet, entries: Mapping[str, Document], *, exact: bool = False
) -> None:
    """Add packs to the document of a set; those that this machine has compacted away go."""

    def change(content: Document | None) -> tuple[dict[str, int], Document]:
        packs = _packs_in(content)
        for number, entry in entries.items():
            if packs.setdefault(number, entry)["digest"] != entry["digest"]:
                message = f"Another machine has pushed another pack {number} in this moment"
                raise TierError(message, hint="Push again.", tier=tier.name)
        # Looked at after the document: what others of this machine have noted there is here.
        kept = {*entries, *opened.far_packs(), *(path.stem for path in opened.path.glob("*.pack"))}
        for number, entry in list(packs.items()):
            if entry["from"] == opened.instance and number not in kept:
                with suppress(TierError, SetFormatError):
                    if exact or opened.has_all_of(_skeleton(tier, number, entry)):
                        del packs[number]
        objects = {
            digest: size
            for entry in packs.values()
            for digest, size in (
                (entry["digest"], entry["size"]), (entry["skeleton"], entry["skeleton_size"])
            )
        }  # fmt: skip
        return objects, {
            "name": opened.name, "id": opened.id, "packs": dict(sorted(packs.items())),
            "fingerprint": opened.fingerprint.to_json(),
        }  # fmt: skip

    tier.change("sets", document_name(opened.name, opened.id), change)


def _packs(document: Document | None) -> dict[str, Document]:
    return {} if document is None else _packs_in(document["content"])


def _packs_in(content: Document | None) -> dict[str, Document]:
    """Return the packs that a document lists; DamagedObjectError if it makes no sense."""
    if content is None:
        return {}
    try:
        packs = {
            str(number): {
                "digest": str(entry["digest"]), "size": int(entry["size"]),
                "skeleton": str(entry["skeleton"]), "skeleton_size": int(entry["skeleton_size"]),
                "from": str(entry["from"]),
            }
            for number, entry in content["packs"].items()
        }  # fmt: skip
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise DamagedObjectError("The document of a set makes no sense") from error
    return packs


def _sizes(packs: Mapping[str, Document]) -> dict[str, int]:
    return {number: entry["size"] for number, entry in packs.items()}


def _skeleton(tier: Tier, number: str, entry: Document) -> Skeleton:
    """Fetch the skeleton of a pack; DamagedObjectError if it is another one's."""
    digest, size = entry["skeleton"], entry["skeleton_size"]
    if size > _MOST_SKELETON:
        raise DamagedObjectError(f"The skeleton of {number} is too large", tier=tier.name)
    data = _whole(tier, digest, size)
    found = Skeleton.parse(data)
    if (found.name, found.digest, found.size) != (number, entry["digest"], entry["size"]):
        message = f"The skeleton of {number} in the tier {tier.name} is that of another pack"
        raise DamagedObjectError(message, tier=tier.name, digest=digest)
    return found._replace(origin=tier.described())


def _whole(tier: Tier, digest: str, size: int) -> bytes:
    data = b"".join(tier.chunks(digest, size=size))
    if blake3(data).hexdigest() != digest:
        message = f"The tier {tier.name} has other bytes than object {digest}"
        raise DamagedObjectError(message, tier=tier.name, digest=digest)
    return data


def _is_in(skeleton: Skeleton, tier: Tier) -> bool:
    return skeleton.origin.get("url") == tier.url


def attach_set(opened: ArtifactSet, tier: Tier, progress: Progress = silent) -> int:
    """Have a set read through what a tier has of it; return how many packs are new here.

    Where the tier cannot be reached, what was attached before stays, and a warning says so.
    """
    name = document_name(opened.name, opened.id)
    known = {
        number for number, skeleton in opened.far_packs().items() if _is_in(skeleton, tier)
    }  # fmt: skip
    try:
        document = tier.document("sets", name)
        if document is None:
            _log.info("The tier %s has nothing of %s so far", tier.name, opened.name)
            return 0
        packs = _packs(document)
        here = opened.packs_here(_sizes(packs))
        new = [(number, packs[number]) for number in packs if number not in known | here]
        with progress(f"Looking at {opened.name}", len(new)) as job:
            for skeleton in in_parallel(lambda each: _skeleton(tier, *each), new):
                opened.attach(skeleton)
                job.advance()
    except TierError as error:
        if not known or isinstance(error, DamagedObjectError):
            raise
        _log.warning("%s is as it was when %s was last reached: %s", opened.name, tier.name, error)
        return 0
    for number in known - packs.keys():  # compacted by whoever pushed it: others have its artifacts
        opened.detach(number)
    return len(new)


def pull_set(
    sets: ArtifactSets, tier: Tier, name: str, progress: Progress = silent
) -> Sent:  # fmt: skip
    """Bring all packs of a set to this disk; `name` is its name, or name/id."""
    sent = Sent()
    for each in set_documents(tier, name):
        document = tier.document("sets", each)
        if document is None:
            continue
        with _made(sets, tier, document["content"]) as opened:
            packs = _packs(document)
            here = opened.packs_here(_sizes(packs))
            todo = [(number, entry) for number, entry in packs.items() if number not in here]
            for number in packs.keys() & here:
                sent.skipped += 1
                sent.skipped_size += packs[number]["size"]
            total = sum(entry["size"] for _, entry in todo)
            stopping = threading.Event()
            with progress(f"Pulling {opened.name}", total, "bytes") as job:
                advance = unless(stopping, job.advance)

                def one(each: tuple[str, Document], advance: Advance = advance) -> int:
                    number, entry = each
                    size = int(entry["size"])
                    chunks = _told(tier.chunks(entry["digest"], size=size), advance)
                    opened.bring(number, chunks, size=size, digest=entry["digest"])
                    return size

                for size in in_parallel(one, todo, stopping=stopping):
                    sent.objects += 1
                    sent.size += size
    return sent


def _told(chunks: Iterable[bytes], advance: Advance) -> Iterable[bytes]:
    for each in chunks:
        yield each
        advance(len(each))


def set_documents(tier: Tier, name: str) -> list[str]:
    """Return the documents of the sets that a text names: a name, or name/id."""
    name, _, number = name.partition("/")
    found = [
        each
        for _, each in tier.documents("sets")
        if each.rpartition(".")[0] == name and each.rpartition(".")[2].startswith(number)
    ]
    if not found:
        hint = "'smartcache remote ls NAME' shows what is there."
        raise MissingObjectError(
            f"The tier {tier.name} has no set {name}", hint=hint, tier=tier.name
        )
    return found


def _made(sets: ArtifactSets, tier: Tier, content: Document) -> ArtifactSet:
    """Open the set that a document is of, made if it is not there."""
    try:
        fingerprint = Fingerprint.from_json(content["fingerprint"])
        if fingerprint.id(content["name"]) != content["id"]:
            raise ValueError(content["id"])
        return sets.open(content["name"], fingerprint)
    except (ValueError, TypeError, LookupError, ArtifactError) as error:
        message = f"The document of a set in the tier {tier.name} makes no sense: {error}"
        raise DamagedObjectError(message, tier=tier.name) from error


@dataclass(frozen=True, slots=True)
class Delivery:
    """Sends packs that workers have made straight to a tier; goes to other processes."""

    tier: Tier
    set_id: str

    def deliver(self, pack: Path) -> Document:
        """Send a sealed pack; return what `accept` needs. In a worker."""
        skeleton = Skeleton.of(pack, bytes.fromhex(self.set_id), {})
        self.tier.put_file(skeleton.digest, pack)
        data = skeleton.to_bytes()
        return {
            "name": skeleton.name, "digest": skeleton.digest, "size": skeleton.size,
            "skeleton": self.tier.put_bytes(data), "skeleton_size": len(data),
        }  # fmt: skip

    def accept(self, opened: ArtifactSet, delivered: Document) -> None:
        """Have a set read a pack through that was delivered. In the process that builds."""
        number = str(delivered["name"])
        skeleton = _skeleton(self.tier, number, delivered)
        skeleton.check(bytes.fromhex(opened.id))
        entry = {**delivered, "from": opened.instance}
        del entry["name"]
        # Noted first: another process detaches what the document does not have.
        _note(self.tier, opened, {number: entry})
        opened.attach(skeleton, take_in=True)


# datasets


def push_dataset(
    sets: ArtifactSets, tier: Tier, name: str, progress: Progress = silent, *, exact: bool = False
) -> Sent:
    """Send a dataset of this store: its table of sources, and the sets of its outputs.

    OutputMissingError if not everything was encoded.
    """
    with stored_dataset(dataset_folder(sets.root, name), sets) as dataset:
        sent = Sent()
        with TemporaryDirectory(prefix="smartcache-") as folder:
            document = pack_up(dataset, Path(folder))
            data = Path(folder, "index.sqlite3").read_bytes()
        for output in dataset.outputs.values():
            sent += push_set(output.set, tier, progress, exact=exact)
        digest = tier.put_bytes(data)
        content = {"document": document, "table": digest}
        tier.change("datasets", name, lambda _: ({digest: len(data)}, content))
    return sent


def _fetch(sets: ArtifactSets, tier: Tier, name: str) -> None:
    """Write dataset.json and the table of a dataset, as the tier has them."""
    document = tier.document("datasets", name)
    if document is None:
        hint = "'smartcache remote ls NAME' shows what is there."
        message = f"The tier {tier.name} has no dataset {name}"
        raise MissingObjectError(message, hint=hint, tier=tier.name)
    try:
        digest = str(document["content"]["table"])
        told = dict(document["content"]["document"])
        size = document["objects"][digest]
    except (ValueError, TypeError, LookupError) as error:
        message = f"The document of the dataset {name} makes no sense"
        raise DamagedObjectError(message, tier=tier.name) from error
    data = _whole(tier, digest, size)
    if told.get("name") != name:
        message = f"The tier {tier.name} has another dataset than {name}"
        raise DamagedObjectError(message, tier=tier.name, digest=digest)
    unpack(sets.root, {**told, "from": tier.name}, data)


def attached_dataset(
    sets: ArtifactSets, tier: Tier, name: str, progress: Progress = silent, *, threads: int = 2
) -> Dataset:
    """Open a dataset of a tier, without its sources: its outputs are read through.

    One that was made here stays as it is, and its outputs are read through. Where the tier cannot
    be reached, one that was opened before is as it was.
    """
    folder = dataset_folder(sets.root, name)
    known = read_document(folder, must_exist=False)
    if not known or "from" in known:
        try:
            _fetch(sets, tier, name)
        except TierError as error:
            if not known or isinstance(error, DamagedObjectError):
                raise
            _log.warning("%s is as it was when %s was last reached: %s", name, tier.name, error)
    dataset = stored_dataset(folder, sets, threads=threads)
    try:
        attach_outputs(dataset, tier, progress)
    except BaseException:
        dataset.close()
        raise
    return dataset


def pull_dataset(
    sets: ArtifactSets, tier: Tier, name: str, progress: Progress = silent
) -> Sent:  # fmt: skip
    """Bring a dataset to this disk: its table of sources, and all packs of its outputs."""
    sent = Sent()
    with attached_dataset(sets, tier, name, progress) as dataset:
        for output in dataset.outputs.values():
            sent += pull_set(sets, tier, f"{output.set.name}/{output.set.id}", progress)
    return sent


def attach_outputs(dataset: Dataset, tier: Tier, progress: Progress = silent) -> None:
    """Have all outputs of a dataset read through what a tier has of them."""
    for output in dataset.outputs.values():
        attach_set(output.set, tier, progress)
