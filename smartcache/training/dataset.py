"""Datasets: sources and the outputs of their encoders, each encoded once.

    photos = cache.dataset("photos", Sources("photos"), latent=Encoder(encode, reads="file", ...))
    photos.build()
    photos.batch([3, 5])["latent"]

What a dataset has on the disk lies beside the sets of artifacts, and moves with them:

    sets/<name>/dataset/
      dataset.json       sources, and of each output its set and how its keys are made
      index.sqlite3      the table of sources (sources.py)
      lock               flock: who reads sources, or removes outputs that none wants
      dataset.json.lock  flock: who changes dataset.json
    sets/<name>.<output>/<id>/   the outputs of one encoder, artifacts by the keys of encoder.py

A dataset knows its sources as columns: the keys of all outputs, 32 bytes each, and what the disk
has of them. Items that cannot be read or encoded are left out, and named; the others are numbered
from 0. To another process it travels as its folder, and is opened there from the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

import numpy as np
from blake3 import blake3

from smartcache.artifacts import ArtifactSet, ArtifactSets, Digests, Selection, check_name
from smartcache.errors import (
    ArtifactNotFoundError,
    ConfigError,
    DamagedArtifactError,
    DatasetChangedError,
    DatasetError,
    DestinationExistsError,
    IndexDamagedError,
    OutputMissingError,
    install_hint,
)
from smartcache.progress import Progress, bars, silent
from smartcache.system.filesystems import is_network
from smartcache.system.hashing import hash_file
from smartcache.system.ownfiles import make_own
from smartcache.training.build import (
    Build,
    BuildPlan,
    BuildReport,
    Failed,
    OnError,
    OnNan,
    missing,
    reasons_of,
)
from smartcache.training.document import FILE as DOCUMENT
from smartcache.training.document import FORMAT, changing, read_document, set_of, write_document
from smartcache.training.encoder import (
    SIDE,
    SINGLE,
    DigestOf,
    Encoder,
    Item,
    Keys,
    as_kept,
    nan_in,
    pad,
)
from smartcache.training.engines import Engine
from smartcache.training.look import Column, Listing, look
from smartcache.training.sources import FILE, Sources
from smartcache.training.table import SourceTable
from smartcache.training.upkeep import CleanPlan, copy_dataset, plan_clean

_TABLE: Final = "index.sqlite3"
_FOLDER: Final = "dataset"
_TAKEN: Final = frozenset(("name", "path"))
_NAMED: Final = 3
Validate = Literal["full", "trust"]
Miss = Literal["raise", "encode"]


def file_digest(path: Path) -> str:
    """Return the digest of a file, read anew."""
    return hash_file(path)[0].digest


class Output:
    """One output of a dataset: its set, the keys of all items, and what is there of them."""

    def __init__(self, name: str, spec: dict[str, Any], opened: ArtifactSet) -> None:
        self.name = name
        self.spec = spec
        self.set = opened
        self.encoder: Encoder | None = None
        self.variations = int(spec["variations"])
        self.keys = Keys(Keys.of_empty(spec), np.zeros((0, 2), np.int32))
        self.failures: dict[int, str] = {}
        """Items that cannot be encoded, and why."""
        self._selection: Selection | None = None

    @property
    def empty(self) -> int:
        """The number of the output of the empty text, behind those of all items."""
        return len(self.keys.data) // 32 - 1

    def key(self, number: int) -> str:
        """Return a key by its number."""
        return self.keys.data[32 * number : 32 * number + 32].hex()

    def find(self, listing: Listing) -> None:
        """Compute the keys of all items, and look for them."""
        self.keys = Keys.of(listing, self.spec)
        self.look()

    def look(self) -> None:
        """Look again at what is there, and what has failed."""
        self._selection = None
        self.failures = {}
        failed = {bytes.fromhex(each.key): each.reason for each in self.set.failures()}
        exported: dict[str, str] = self.spec.get("failed", {})
        failed |= {bytes.fromhex(key): reason for key, reason in exported.items()}
        if failed:
            numbers = np.frombuffer(self.keys.data, "<u8")[::4]
            wanted = np.array([int.from_bytes(key[:8], "little") for key in failed], np.uint64)
            for number in np.flatnonzero(np.isin(numbers, wanted)).tolist():
                reason = failed.get(self.keys.data[32 * number : 32 * number + 32])
                if reason is not None and number < self.empty:
                    self.failures.setdefault(number // self.variations, reason)

    @property
    def selection(self) -> Selection:
        """What is there, by number: of each item, one for each variation; last the empty text."""
        if self._selection is None:
            self._selection = self.set.select(Digests(self.keys.data))
        return self._selection

    @property
    def missing(self) -> Column:
        """The numbers that have no output."""
        found: Column = self.selection.missing
        return found[found < self.empty]

    def item(self, listing: Listing, number: int, used: set[tuple[str, str]]) -> Item:
        """Return an item on its way into the encoder."""
        at = number // self.variations
        width, height = self.keys.bucket[at].tolist()
        return Item(
            listing, at, bucket=(width, height) if width else None,
            variation=number % self.variations,
            key=self.keys.data[32 * number : 32 * number + 32], used=used,
            reads=self.spec["reads"],
        )  # fmt: skip

    def about(self, listing: Listing, number: int, item: Item) -> dict[str, object]:
        """Return what is kept with an output: what it was made of."""
        made: dict[str, object] = {
            "name": item.name,
            "content": [
                listing.reads[read][number // self.variations].tobytes().hex()
                for read in self.spec["reads"]
            ],
            "variation": item.variation,
        }
        if item.size is not None:
            made["original_size"] = list(item.size)
        if item.bucket is not None:
            made["bucket"] = list(item.bucket)
        if item.crop is not None:
            made["crop"] = list(item.crop)
        return made


class Dataset:
    """Sources and their outputs: made by `SmartCache.dataset`, read by index, built by `build`."""

    def __init__(  # noqa: PLR0913 - made by the functions below
        self,
        folder: Path,
        sets: ArtifactSets,
        document: dict[str, Any],
        *,
        sources: Sources,
        encoders: Mapping[str, Encoder] | None = None,
        trust: bool = False,
        miss: Miss = "raise",
        threads: int = 2,
        read_only: bool = False,
        signature: str | None = None,
        digest_of: DigestOf = file_digest,
    ) -> None:
        self.path = folder
        self.name: str = document["name"]
        self.sources = sources
        self.trust = trust
        self.miss: Miss = miss
        """What reading does with what is missing: "raise" an error, or "encode" it."""
        self.threads = threads
        self.digest_of = digest_of
        self.before: Callable[[], object] | None = None
        """Called before reading encodes something that is missing."""
        self._sets = sets
        self.document = document
        """What dataset.json says."""
        self._read_only = read_only
        self._expected = signature
        self._listing: Listing | None = None
        self._usable: Column = np.zeros(0, np.int64)
        self._is_good: Column = np.zeros(0, bool)
        self._problems: dict[int, str] = {}
        self._release = ExitStack()
        self.outputs: dict[str, Output] = {}
        try:
            self.table = open_table(folder, read_only=read_only)
            self._release.callback(self.table.close)
            for name, spec in document["outputs"].items():
                opened = sets.open(
                    spec["set"], spec["fingerprint"], read_only=read_only,
                    evictable=None if read_only else False,
                )  # fmt: skip
                self._release.callback(opened.close)
                output = self.outputs[name] = Output(name, spec, opened)
                output.encoder = (encoders or {}).get(name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the table and the sets."""
        self._release.close()

    def __repr__(self) -> str:
        outputs = ", ".join(self.outputs)
        count = "" if self._listing is None else f": {len(self._usable):,} items"
        return f"<Dataset {self.name} ({outputs}){count}>"

    def __reduce__(self) -> tuple[object, ...]:
        """Go to another process as a folder, and a digest of what is meant."""
        spec = {name: self.document[name] for name in ("name", "sources", "outputs")}
        signature = self.signature if self._listing is not None else None
        return _reopened, (
            self.path, self._sets, spec, self.threads, self._read_only, signature
        )  # fmt: skip

    # what there is

    @property
    def listing(self) -> Listing:
        """The sources, as they were when they were last looked at."""
        if self._listing is None:
            self.refresh()
        return cast("Listing", self._listing)

    @property
    def numbers(self) -> Column:
        """Of each item its number among all sources, those that are left out included."""
        return self._all()

    @property
    def is_good(self) -> Column:
        """Say of each source whether it can be read and encoded."""
        self._all()
        return self._is_good

    def refresh(self, progress: Progress = silent, *, force: bool = False) -> None:
        """Look at the sources again: new and changed files are read, and nothing is encoded.

        `force` takes it that sources which have vanished as a whole were removed on purpose.
        """
        listing = self.look_at(self.table, progress, force=force)
        self._problems = {
            number: f"unreadable: {reason}" for number, reason in listing.problems.items()
        }
        for output in self.outputs.values():
            output.find(listing)
            if output.spec["buckets"]:
                for number in np.flatnonzero(output.keys.bucket[:, 0] == 0).tolist():
                    self._problems.setdefault(number, "unreadable: no image size in its header")
        self._listing = listing
        self._sort_out()
        if self._expected is not None and self._expected != self.signature:
            message = f"The dataset {self.name} has changed since it was sent to this process"
            raise DatasetChangedError(message)

    def look_at(self, table: SourceTable, progress: Progress, *, force: bool = False) -> Listing:
        """Look at the sources, and take note of them in a table; nothing else changes."""
        reads = dict.fromkeys(
            read for output in self.outputs.values() for read in output.spec["reads"]
        )
        has_buckets = any(output.spec["buckets"] for output in self.outputs.values())
        return look(
            table, self.sources, reads, sizes=has_buckets, trust=self.trust or self._read_only,
            force=force, threads=self.threads, progress=progress,
        )  # fmt: skip

    def look(self) -> None:
        """Look again at what is encoded, and what has failed; the sources are not looked at."""
        for output in self.outputs.values():
            output.look()
        self._sort_out()

    def _sort_out(self) -> None:
        """Number the items that are not left out."""
        self._is_good = np.ones(len(self.listing), bool)
        for number in self._problems:
            self._is_good[number] = False
        for output in self.outputs.values():
            for number in output.failures:
                self._is_good[number] = False
        self._usable = np.flatnonzero(self._is_good)

    @property
    def signature(self) -> str:
        """A digest of all items and keys: equal where every number means the same."""
        made = blake3(self._all().tobytes())
        for name, output in self.outputs.items():
            made.update(name.encode() + b"\0" + bytes([output.variations & 255]))
            made.update(output.keys.data)
        return made.hexdigest()[:32]

    def _all(self) -> Column:
        if self._listing is None:
            self.refresh()
        return self._usable

    def __len__(self) -> int:
        """Count the items that are not left out."""
        return len(self._all())

    @property
    def failed(self) -> list[Failed]:
        """The items that are left out, and why."""
        listing = self.listing
        found = [
            Failed(listing.name(number), "", reason) for number, reason in self._problems.items()
        ]
        for output in self.outputs.values():
            found += [
                Failed(listing.name(number), output.name, reason)
                for number, reason in output.failures.items()
                if number not in self._problems
            ]
        return found

    def record(self, index: int) -> dict[str, Any]:
        """Return what is known of an item: name, path, size, buckets, texts and metadata."""
        number = self._number(index)
        listing = self.listing
        path = listing.path(number)
        width, height = listing.size[number].tolist()
        made: dict[str, Any] = {
            **listing.values(number),
            "name": listing.name(number),
            "path": None if path is None else str(path),
            "size": (width, height) if width and height else None,
            "repeats": float(listing.parts[listing.part[number]].repeats),
        }
        for read in listing.reads:
            if read != FILE and listing.has(number, read):
                is_file = listing.is_file(number, read)
                made[read] = str(listing.path(number, read)) if is_file else listing.value(
                    number, read
                )  # fmt: skip
        buckets = {
            output.name: tuple(output.keys.bucket[number].tolist())
            for output in self.outputs.values()
            if output.spec["buckets"]
        }
        return made | ({"bucket": buckets} if buckets else {})

    def _number(self, index: int) -> int:
        usable = self._all()
        if not -len(usable) <= index < len(usable):
            raise IndexError(f"{self.name} has {len(usable):,} items, and no item {index}")
        return int(usable[index])

    # building

    def plan(self, progress: Progress = bars) -> BuildPlan:
        """Say what `build` would encode, and why. Looks at the sources; known ones are not read."""
        self.refresh(progress)
        listing = self.listing
        is_ready = self._is_good.copy()
        encode: dict[str, dict[str, int]] = {}
        for output in self.outputs.values():
            is_ready[output.missing // output.variations] = False
            numbers = missing(output, self._is_good)
            encode[output.name] = reasons_of(self, output, numbers, self.document.get("built", {}))
        return BuildPlan(
            items=len(listing), ready=int(is_ready.sum()), encode=encode,
            failed=tuple(self.failed), changes=dict(listing.changes),
            warnings=tuple(listing.warnings), _execute=self._build,
        )  # fmt: skip

    def build(  # noqa: PLR0913 - one argument per wish
        self,
        *,
        on_error: OnError = "record",
        nan: OnNan = "record",
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        stop: Callable[[], object] | None = None,
        retry: bool = False,
        progress: Progress = bars,
        threads: int | None = None,
        engine: Engine | None = None,
    ) -> BuildReport:
        """Encode what is missing, and nothing else.

        `before` is called once, and only if something is really encoded (it moves the model to the
        GPU), `after` at the end of that. `stop` is asked again and again; when it says yes, what is
        done is kept. An item that cannot be read or encoded, or whose output has a NaN, is left out
        and named in the report; with "raise" it is an error. `retry` tries those again that failed
        before. Several processes may build at once: they share the work. With an `engine` the
        encoders work in processes of this machine (`ProcessEngine`) or of a cluster (`RayEngine`);
        `before`, `after` and `stop` are called here. Bars are drawn on a terminal;
        `progress=silent` of `smartcache.progress` draws none.
        """
        self.refresh(progress)
        return self._build(
            on_error=on_error, nan=nan, before=before, after=after, stop=stop, retry=retry,
            progress=progress, threads=threads, engine=engine,
        )  # fmt: skip

    def _build(self, *, retry: bool = False, **options: Any) -> BuildReport:  # noqa: ANN401
        if retry:
            for output in self.outputs.values():
                output.set.forget_failure(*(each.key for each in output.set.failures()))
            self.look()
        if self.before is not None and options.get("before") is None:
            options["before"] = self.before
        work = Build(self, **options)
        try:
            work.run()
        finally:
            self.look()
        report = work.report
        # Those that changed while they were encoded are not remembered; the others are.
        known = {(each.item, each.output) for each in self.failed}
        report.failed = self.failed + [
            each for each in report.failed if (each.item, each.output) not in known
        ]
        if not report.is_stopped and not self._read_only:
            built = {
                name: {each: output.spec[each] for each in ("id", "buckets", "variations")}
                for name, output in self.outputs.items()
            }
            if self.document.get("built") != built:
                self.change_document(lambda known: known | {"built": built})
        return report

    def take(self, name: str, number: int, value: object, claim: Mapping[str, object]) -> str:
        """Keep an output that another program has made, with what is claimed of it.

        `number` is that of the item among all sources, times the variations. Returns why it was
        not kept; "": it was, or there is one by now.
        """
        output = self._output(name)
        key, item = output.key(number), output.item(self.listing, number, set())
        kept = as_kept(value, output.spec["trim"], name)
        if nan_in(kept) is not None:
            return "it has a NaN"
        with output.set.claim([key]) as mine:
            if item.has_changed():
                return "the source has changed since it was looked at"
            if mine.keys:
                about = output.about(self.listing, number, item) | {"claimed": dict(claim)}
                output.set.put(key, kept, metadata=about)
                output.set.forget_failure(key)
        return "another process encodes it" if mine.busy else ""

    # reading

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an item: its outputs by name, its name and its metadata."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return items, read all at once: what PyTorch's DataLoader asks for."""
        batch = self.batch(indices, ragged="list")
        return [
            {name: _row(each, at) for name, each in batch.items()} for at in range(len(indices))
        ]

    def batch(
        self,
        indices: Sequence[int] | np.ndarray[Any, Any],
        *,
        variations: int | Sequence[int] | np.ndarray[Any, Any] = 0,
        drop: Mapping[str, Column] | None = None,
        outputs: Iterable[str] | None = None,
        out: Mapping[str, Any] | None = None,
        pinned: bool = False,
        ragged: Literal["raise", "list"] = "raise",
    ) -> dict[str, Any]:
        """Return items stacked: {output: tensor, or dict of tensors}, their names and metadata.

        `variations` says which variation of each; of an output that has fewer, they begin anew.
        `drop` says, by output, whose texts are left out: these get the output of the empty text.
        `out` gives an earlier batch whose memory is reused.
        """
        usable = self._all()
        try:
            numbers = usable[np.asarray(indices, np.int64)]
        except IndexError:
            bad = next(each for each in indices if not -len(usable) <= each < len(usable))
            self._number(int(bad))
            raise
        chosen = np.broadcast_to(np.asarray(variations, np.int64), numbers.shape)
        made: dict[str, Any] = {}
        for name in self.outputs if outputs is None else outputs:
            output = self._output(name)
            into = None if out is None else out.get(name)
            which = numbers * output.variations + chosen % output.variations
            if drop is not None and name in drop:
                which[drop[name]] = output.empty
            made[name] = self.read(
                output, which,
                out=into if into is None or isinstance(into, dict) else {SINGLE: into},
                pinned=pinned, ragged=ragged,
            )  # fmt: skip
        listing = self.listing
        values = listing.values_of(numbers.tolist()) if self._has_values else []
        for name in dict.fromkeys(name for each in values for name in each):
            made.setdefault(name, [each.get(name) for each in values])
        made["name"] = [listing.name(number) for number in numbers.tolist()]
        return made

    @property
    def _has_values(self) -> bool:
        return any(part.is_list or part.metadata for part in self.sources.parts)

    def _output(self, name: str) -> Output:
        if name not in self.outputs:
            raise ConfigError(
                f"{self.name} has no output {name!r}", hint=f"It has: {', '.join(self.outputs)}."
            )
        return self.outputs[name]

    def read(
        self,
        output: Output,
        numbers: np.ndarray[Any, Any],
        *,
        out: Mapping[Any, object] | None = None,
        pinned: bool = False,
        ragged: Literal["raise", "list"] = "raise",
    ) -> Any:  # noqa: ANN401 - a tensor, or a dict of tensors
        """Return one output, by the numbers of items and variations in its selection."""
        trim = output.spec["trim"] is not None
        for is_last in (False, False, True):
            try:
                found = output.selection.read(
                    numbers, out, pinned=pinned, ragged="list" if trim else ragged
                )
                break
            except (ArtifactNotFoundError, DamagedArtifactError) as error:
                lost = self._lost(output, numbers)
                if is_last:
                    raise
                if not lost:  # another process has encoded it meanwhile
                    continue
                names = [
                    "the empty text" if number == output.empty
                    else self.listing.name(number // output.variations)
                    for number in lost
                ]  # fmt: skip
                if self.miss != "encode" or output.encoder is None or output.empty in lost:
                    message = f"{self.name} has no {output.name} of some items"
                    raise missing_error(message, names) from error
                Build(self, on_error="raise", before=self.before).run(only={output.name: lost})
                output.look()
        if trim:
            if ragged == "list":
                found.pop(SIDE)
            else:
                found = pad(found)
        return found.get(SINGLE, found)

    def _lost(self, output: Output, numbers: np.ndarray[Any, Any]) -> list[int]:
        """Look again which of some outputs are missing."""
        output.look()
        wanted = dict.fromkeys(numbers.tolist())
        return [number for number in wanted if output.key(number) not in output.set]

    # looking after it

    def clean(self, *, force: bool = False, progress: Progress = silent) -> CleanPlan:
        """Plan to remove outputs that no source wants any more; what other datasets use stays.

        Refused while a folder that had sources is gone as a whole: a drive may not be mounted.
        `force` takes it that it was removed on purpose.
        """
        if self._read_only:
            raise DatasetError(f"{self.name} was opened for reading only", path=self.path)
        return plan_clean(self, self._sets, force=force, progress=progress)

    def export(self, path: str | os.PathLike[str], progress: Progress = silent) -> int:
        """Write the outputs of all items, and what is known of them, to a folder of their own.

        `cache.open_dataset(path)` reads it, on any machine, without the sources. Returns how many
        artifacts were written; run again, it goes on where it stopped. OutputMissingError if not
        everything was encoded.
        """
        others = [
            folder for folder in dataset_folders(Path(path)) if folder.parent.name != self.name
        ]
        if others:
            hint = "Choose another folder: an export has one of its own."
            message = f"{os.fspath(path)} holds the dataset {others[0].parent.name} already"
            raise DestinationExistsError(message, hint=hint, path=path)
        return copy_dataset(self, Path(path), progress)

    def change_document(
        self, change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:  # fmt: skip
        """Change what dataset.json says; what others have written there meanwhile stays."""
        with changing(self.path):
            known = read_document(self.path)
            changed = change(known)
            if changed != known:
                write_document(self.path, changed)
        self.document |= {name: changed[name] for name in ("built", "sets") if name in changed}


def missing_error(message: str, names: Sequence[str]) -> OutputMissingError:
    """Return the error for items that are not encoded."""
    some = ", ".join(names[:_NAMED]) + (" ..." if names[_NAMED:] else "")
    return OutputMissingError(f"{message}: {some}", items=tuple(names))


def _row(value: Any, at: int) -> Any:  # noqa: ANN401 - of whatever a batch is made of
    if isinstance(value, dict):
        return {name: each[at] for name, each in value.items()}
    return value[at]


# opening


def open_dataset(
    sets: ArtifactSets,
    name: str,
    sources: Sources | str | os.PathLike[str],
    encoders: Mapping[str, Encoder],
    *,
    validate: Validate = "full",
    miss: Miss = "raise",
    threads: int = 2,
    digest_of: DigestOf = file_digest,
) -> Dataset:
    """Open the dataset of a name with these sources and outputs; it is made if it is not there.

    `digest_of` is asked for the content of files that encoders depend on.
    """
    check_name(name)
    if validate not in ("full", "trust"):
        raise ConfigError(f'validate is "full" or "trust", not {validate!r}')
    if miss not in ("raise", "encode"):
        raise ConfigError(f'miss is "raise" or "encode", not {miss!r}')
    if not encoders:
        hint = "Name at least one: latent=Encoder(function, reads='file', depends_on=vae)."
        raise ConfigError(f"The dataset {name} has no outputs", hint=hint)
    given = sources if isinstance(sources, Sources) else Sources(sources)
    outputs: dict[str, dict[str, Any]] = {}
    for output, encoder in encoders.items():
        if not isinstance(encoder, Encoder):
            hint = "Write latent=Encoder(function, reads='file', depends_on=vae)."
            raise ConfigError(f"The output {output} is no Encoder", hint=hint)
        if output in _TAKEN:
            raise ConfigError(f"An output cannot be called {output!r}")
        if encoder.buckets is not None:
            _need_imagesize()
        fingerprint = encoder.fingerprint(digest_of)
        where = check_name(encoder.shared or f"{name}.{output}")
        with sets.open(where, fingerprint, evictable=False) as opened:
            number = opened.id
        outputs[output] = {
            "set": where, "id": number, "fingerprint": fingerprint, **encoder.to_json(),
        }  # fmt: skip
    folder = dataset_folder(sets.root, name)
    make_own(folder.parent)
    make_own(folder)
    with changing(folder):
        before = read_document(folder, must_exist=False)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        document = {
            "format": FORMAT,
            "name": name,
            "created_at": before.get("created_at") or now,
            "sources": given.to_json(),
            "outputs": outputs,
            "built": before.get("built", {}),
            "sets": sorted({*before.get("sets", ()), *map(set_of, outputs.values())}),
        }
        if document != before:
            write_document(folder, document)
    return Dataset(
        folder, sets, document, sources=given, encoders=encoders, miss=miss, threads=threads,
        trust=validate == "trust" and "sources" in before, digest_of=digest_of,
    )  # fmt: skip


def stored_dataset(
    folder: Path, sets: ArtifactSets, *, trust: bool = True, read_only: bool = False,
    threads: int = 2,
) -> Dataset:  # fmt: skip
    """Open a dataset that is there, without its encoders."""
    document = read_document(folder)
    return Dataset(
        folder, sets, document, sources=Sources.from_json(document["sources"]), trust=trust,
        threads=threads, read_only=read_only,
    )  # fmt: skip


def exported_dataset(path: Path, *, threads: int = 2) -> Dataset:
    """Open a dataset that was exported to a folder."""
    folders = dataset_folders(path)
    if len(folders) != 1:
        what = "no dataset" if not folders else f"{len(folders)} datasets"
        hint = "Name a folder that was made by dataset.export or 'smartcache datasets export'."
        raise DatasetError(f"{path} holds {what}", hint=hint, path=path)
    return stored_dataset(folders[0], ArtifactSets(path, threads=threads), read_only=True)


def dataset_folder(root: Path, name: str) -> Path:
    """Return where the dataset of a name is among sets."""
    return root / name / _FOLDER


def dataset_folders(root: Path) -> list[Path]:
    """Return the folders of all datasets among sets."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = (root / name / _FOLDER for name in sorted(os.listdir(root)))
        return [folder for folder in found if (folder / DOCUMENT).is_file()]
    return []


def _reopened(
    path: Path,
    sets: ArtifactSets,
    document: dict[str, Any],
    threads: int,
    read_only: bool,  # noqa: FBT001
    signature: str | None,
) -> Dataset:
    return Dataset(
        path, sets, document, sources=Sources.from_json(document["sources"]), trust=True,
        threads=threads, read_only=read_only, signature=signature,
    )  # fmt: skip


def open_table(folder: Path, *, read_only: bool = False) -> SourceTable:
    """Open the table of sources of a dataset, made if it is not there."""
    path = folder / _TABLE
    try:
        if read_only:
            return SourceTable(path, wal=False, read_only=True)
        return SourceTable(path, wal=not is_network(folder))
    except IndexDamagedError as error:
        hint = "Remove it: sources are read again, and nothing that was encoded is lost."
        raise DatasetError(f"{path} is damaged: {error}", hint=hint, path=path) from error


def _need_imagesize() -> None:
    try:
        import imagesize  # noqa: F401
    except ImportError as error:
        hint = install_hint("training")
        raise ConfigError(
            "Buckets need imagesize, to read the sizes of images", hint=hint
        ) from error
