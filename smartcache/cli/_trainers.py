"""Files of other trainers: `datasets import --from` and `datasets export --to`.

What the files do not say comes from options: which encoder has made them, and what of its output
they are. On a terminal it is asked for. It becomes the encoder of a dataset, which a program opens
with the same words; the line that does so is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

import click

from smartcache.cli._artifacts import all_sets
from smartcache.cli._command import FILE
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._words import counted, near
from smartcache.errors import DestinationExistsError, SetFormatError

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.cli._session import Session
    from smartcache.integrations.trainers import Imported, ImportPlan
    from smartcache.training import Dataset, Encoder, Sources

TRAINERS: Final = (
    "sd-scripts", "musubi", "ai-toolkit", "simpletuner", "diffusion-pipe", "mgds",
)  # fmt: skip
TARGETS: Final = ("sd-scripts", "musubi")
_STATISTICS: Final = ("sample", "mean", "mode", "mean and std", "unknown")
_MOST_NAMED: Final = 10
_F = TypeVar("_F", bound=Callable[..., object])
_OPTIONS: Final = (
    click.option(
        "--from",
        "trainer",
        type=click.Choice(TRAINERS),
        help="The trainer that has written FOLDER.",
    ),
    click.option(
        "--images", type=FILE, metavar="FOLDER", help="Where the images are, if not in FOLDER."
    ),
    click.option("--name", metavar="NAME", help="Of the dataset; else that of the images' folder."),
    click.option(
        "--encoder",
        metavar="FILE|TEXT",
        help="What has made the latents: its file, or any name for it.",
    ),
    click.option(
        "--text-encoder",
        metavar="FILE|TEXT",
        help="What has made the text embeddings; without it, they are left alone.",
    ),
    click.option(
        "--statistic",
        type=click.Choice(_STATISTICS),
        help="What of the encoder's distribution the latents are.",
    ),
    click.option("--scale", type=float, help="What the latents were multiplied by."),
    click.option("--shift", type=float, help="What was subtracted from the latents before that."),
    click.option("--buckets", metavar="TEXT", help='Sizes of the dataset: "area:1024 step:64".'),
    click.option("--caption", metavar="ENDING", help="How files of captions end. [default: .txt]"),
    click.option("--arch", metavar="TEXT", help="Take only files of this architecture: sdxl, wan."),
    click.option("--factor", type=int, help="Pixels for each place of a latent. [default: 8]"),
    click.option("--older", is_flag=True, help="Take files that are older than their images, too."),
)


def options(function: _F) -> _F:
    """Add what an import from a trainer has to be told."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def refuse_options(given: Mapping[str, object]) -> None:
    """Refuse what only means something with --from."""
    for name, value in given.items():
        if value not in (None, False):
            raise click.UsageError(f"--{name.replace('_', '-')} needs --from.")


def import_files(
    session: Session,
    folder: Path,
    trainer: str,
    *,
    images: Path | None,
    name: str | None,
    encoder: str | None,
    text_encoder: str | None,
    statistic: str | None,
    scale: float | None,
    shift: float | None,
    buckets: str | None,
    caption: str | None,
    arch: str | None,
    factor: int | None,
    older: bool,
    dry_run: bool,
) -> None:
    """Take over what a trainer has encoded."""
    from smartcache.integrations.trainers import plan_import
    from smartcache.training import Encoder, Sources

    where = os.path.abspath(images or folder)
    name = name or os.path.basename(where)
    if encoder is None and text_encoder is None:
        encoder = _ask("Which VAE has made the latents? Its file, or a name:", "--encoder")
    if encoder is not None and statistic is None:
        known = f"What are they: {', '.join(_STATISTICS)}?"
        statistic = _ask(known, "--statistic")
        if statistic not in _STATISTICS:
            raise click.UsageError(f"{statistic!r} is none of {', '.join(_STATISTICS)}.")
    encoders: dict[str, Encoder] = {}
    lines = []
    if encoder is not None:
        said = {
            "statistic": None if statistic == "unknown" else statistic, "scale": scale,
            "shift": shift, "buckets": buckets,
        }  # fmt: skip
        depends, shown = _depends_on(encoder)
        encoders["latent"] = Encoder(_refuse, reads="file", depends_on=depends, **said)  # type: ignore[arg-type]
        more = "".join(f", {key}={each!r}" for key, each in said.items() if each is not None)
        lines.append(f'latent=Encoder(function, reads="file", depends_on={shown}{more})')
    if text_encoder is not None:
        depends, shown = _depends_on(text_encoder)
        encoders["text"] = Encoder(_refuse, reads="caption", depends_on=depends)
        lines.append(f'text=Encoder(function, reads="caption", depends_on={shown})')
    sources = Sources(where, sidecars={"caption": caption or ".txt"})
    session.how_far = lambda _: "What was taken is kept; run the same command again to continue."
    with _dataset(session, name, sources, encoders, dry_run=dry_run) as dataset:
        plan = plan_import(
            dataset, trainer, folder, latent="latent" if encoder is not None else None,  # type: ignore[arg-type]
            text="text" if text_encoder is not None else None, arch=arch, factor=factor or 8,
            older=older, progress=bars,
        )  # fmt: skip
        done: ImportPlan | Imported
        done = _without_known(session, dataset, plan) if dry_run else plan.execute(bars)
    session.how_far = None
    counts = (
        done.taken if not hasattr(done, "outputs") else {n: len(k) for n, k in done.outputs.items()}
    )
    verb = "Would import" if dry_run else "Imported"

    def say() -> None:
        out.line(f"{verb} {name} from {trainer}: {done}.")
        for each in done.skipped[:_MOST_NAMED]:
            out.talk(f"Skipped {each.file}: {each.reason}")
        if len(done.skipped) > _MOST_NAMED:
            out.talk(f"... and {len(done.skipped) - _MOST_NAMED:,} more; --json names all.")

    out.show(
        human=say,
        document=lambda: {
            "dry_run": dry_run, "name": name, "trainer": trainer, "taken": counts,
            "present": done.present, "skipped": [each._asdict() for each in done.skipped],
        },
        ids=lambda: [name],
    )  # fmt: skip
    if not dry_run:
        out.talk(f"In Python: cache.dataset({name!r}, sources, {', '.join(lines)})")


def export_files(dataset: Dataset, trainer: str, folder: Path, *, dry_run: bool) -> None:
    """Write what was imported from a trainer as its files."""
    from smartcache.integrations import trainers

    done = trainers.export_files(dataset, trainer, folder, dry_run=dry_run, progress=bars)  # type: ignore[arg-type]
    verb = "Would export" if dry_run else "Exported"
    out.show(
        human=lambda: out.line(
            f"{verb} {dataset.name} to {near(folder)} for {trainer}:"
            f" {counted(len(done.files), 'file')}, {len(done.skipped):,} skipped."
        ),
        document=lambda: {
            "dry_run": dry_run, "name": dataset.name, "trainer": trainer, "files": done.files,
            "skipped": [each._asdict() for each in done.skipped], "path": folder,
        },
        ids=lambda: done.files,
    )  # fmt: skip
    for reason in dict.fromkeys(each.reason for each in done.skipped):
        count = sum(each.reason == reason for each in done.skipped)
        out.talk(f"Skipped {count:,}: {reason}")


@contextmanager
def _dataset(
    session: Session,
    name: str,
    sources: Sources,
    encoders: Mapping[str, Encoder],
    *,
    dry_run: bool,
) -> Iterator[Dataset]:
    """Open the dataset, made if it is not there; a dry run has one of its own that is removed."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from smartcache.artifacts import ArtifactSets
    from smartcache.cache import sets_of
    from smartcache.training import dataset_folder, open_dataset, stored_dataset

    if dry_run:
        with (
            TemporaryDirectory(prefix="smartcache-") as temporary,
            open_dataset(ArtifactSets(Path(temporary)), name, sources, encoders) as dataset,
        ):
            yield dataset
        return
    with session.store(create=True) as store:
        sets = sets_of(store)

        def digest_of(path: Path) -> str:
            return store.digest_of(path.resolve()).digest

        folder = dataset_folder(sets.root, name)
        if (folder / "dataset.json").exists():
            with stored_dataset(folder, sets) as known:
                old = {
                    each: spec["fingerprint"] for each, spec in known.document["outputs"].items()
                }
            if old != {key: each.fingerprint(digest_of) for key, each in encoders.items()}:
                message = f"There is a dataset {name!r} in the store with other outputs"
                hint = "Choose another --name, or import in Python, where the dataset is opened."
                raise DestinationExistsError(message, hint=hint, path=folder)
        threads = session.settings.threads
        with open_dataset(
            sets, name, sources, encoders, threads=threads, digest_of=digest_of
        ) as dataset:
            yield dataset


def _without_known(session: Session, dataset: Dataset, plan: ImportPlan) -> ImportPlan:
    """Leave out of a plan what the store has: a dry run knows nothing of it."""
    with all_sets(session) as sets, ExitStack() as stack:
        known = {}
        for name, output in dataset.outputs.items():
            with suppress(SetFormatError):  # there is none yet
                opened = sets.open(output.spec["set"], output.spec["fingerprint"], read_only=True)
                known[name] = stack.enter_context(opened)
        return plan.without(known)


def _ask(question: str, option: str) -> str:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{option} is needed: the files do not say it.")
    return out.ask(question)


def _depends_on(text: str) -> tuple[object, str]:
    """Return what an encoder depends on, and how that is written in Python."""
    from pathlib import Path

    path = Path(os.path.abspath(text))
    return (path, f"Path({str(path)!r})") if path.exists() else (text, repr(text))


def _refuse(_: object) -> object:
    raise AssertionError("a command encodes nothing")
