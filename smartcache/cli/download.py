"""Downloading repos: `download`."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from smartcache import __version__
from smartcache.cli._command import FILE, command, dry_run
from smartcache.cli._downloads import cautions, commit_in, plan_document, say_changes, show_plan
from smartcache.cli._failures import BadUsageError
from smartcache.cli._hub_failures import (
    is_denial,
    is_missing_file,
    is_of_hub,
    is_refusal,
    words_for,
)
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.errors import HubError, NoSpaceError, SmartcacheError
from smartcache.hub import REPO_TYPES
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.cache import SmartCache
    from smartcache.hub import Call, DownloadPlan, DownloadResult, Repo

_MOST_NAMED = 3
_WILD = "*?["


@command(
    "download",
    examples=(
        ("smartcache download org/name", "all files of a model, into the HF cache"),
        ("smartcache download org/name --dry-run", "only look: what is here, what is not"),
        ("smartcache download org/name config.json vae/", "a file, and all files of a folder"),
        ("smartcache download org/name --include '*.safetensors' --exclude '*fp32*'", "by name"),
        ("smartcache download datasets/org/name --revision v1.0", "a dataset at a tag"),
        ("smartcache download org/name --local-dir models/name", "as plain files in a folder"),
        ("smartcache download org/name --also /mnt/old/models", "reuse files that are there"),
        ("path=$(smartcache download -q org/name)", "for scripts: the path, nothing else"),
    ),
)  # fmt: skip
@click.argument("repo")
@click.argument("files", nargs=-1)
@click.option("--revision", metavar="REV", help="A branch, tag or commit.  [default: main]")
@click.option(
    "--include", metavar="PATTERN", multiple=True,
    help="Only files like this, as '*.json' or 'unet/*'. Repeatable.",
)  # fmt: skip
@click.option("--exclude", metavar="PATTERN", multiple=True, help="No files like this. Repeatable.")
@click.option(
    "--repo-type", "--type", "repo_type", type=click.Choice(REPO_TYPES),
    help="What REPO is, if it does not say so itself.  [default: model]",
)  # fmt: skip
@click.option(
    "--local-dir", type=FILE, metavar="DIR",
    help="Put plain files here, in place of snapshots in the HF cache.",
)  # fmt: skip
@click.option(
    "--cache-dir", type=FILE, metavar="DIR", help="The HF cache.  [default: $HF_HUB_CACHE]"
)
@click.option(
    "--token", metavar="TOKEN", help="For gated and private repos.  [default: as 'hf auth login']"
)
@click.option(
    "--max-workers", type=click.IntRange(min=1), default=8, metavar="N", show_default=True,
    help="Files fetched at the same time.",
)  # fmt: skip
@click.option(
    "--also", metavar="FOLDER", multiple=True,
    help="Look for files in this folder too, this time only. Repeatable.",
)  # fmt: skip
@click.option("--force-download", is_flag=True, help="Fetch everything again, whatever is here.")
@click.option("-v", "--verbose", is_flag=True, help="Show every file of the plan.")
@dry_run
@click.pass_context
def download_command(
    ctx: click.Context,
    *,
    repo: str,
    files: tuple[str, ...],
    revision: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    repo_type: str | None,
    local_dir: Path | None,
    cache_dir: Path | None,
    token: str | None,
    max_workers: int,
    also: tuple[str, ...],
    force_download: bool,
    verbose: bool,
    dry_run: bool,
) -> None:
    """Download a repo without fetching what this machine already has.

    The result is what 'hf download' makes, and its path is printed: a snapshot in the HF cache, the
    file if FILES is one, or --local-dir. FILES are paths in the repo; one that ends with a slash is
    a folder.

    First the plan is shown. A file is "present" if it is where it is wanted. Else it is taken from
    the store ("link"), or from a file of the same size in a known folder, once its hash is known to
    be right ("reuse"; "copy" if it lies on another disk). Known folders are those of programs, HF
    caches and those you named ('smartcache folders ls'); --also adds others for this download. What
    no folder has is asked of your remotes ("tier"; 'smartcache remote ls'). Only the rest comes
    from the Hub ("fetch"). Every large file is compared with the hash that the Hub announces.

    Nothing is written if there is not enough room for all of it. At the end you are told what was
    linked, which files became read-only, and how to undo that.
    """
    from smartcache.cli._hub_output import hub_through_out

    session = ctx.ensure_object(Session)
    _refuse_files(local_dir=local_dir, cache_dir=cache_dir)
    wanted = _Wanted.read(repo, repo_type, files, include, exclude)
    arguments: dict[str, object] = {
        "repo_type": wanted.repo.type, "revision": revision, "cache_dir": cache_dir,
        "local_dir": local_dir, "token": token, "force_download": force_download,
        "library_name": "smartcache", "library_version": __version__,
    }  # fmt: skip
    given = {name: value for name, value in arguments.items() if value is not None}
    call = wanted.call(given, max_workers)
    with session.cache(only_look=dry_run) as cache, hub_through_out():
        run = _Run(session, cache, wanted, call, also, dry_run=dry_run)
        plan = run.plan()
        if plan is None:
            run.answer_from_cache(dry_run=dry_run)
            return
        run.go(plan, verbose=verbose, dry_run=dry_run)


def _refuse_files(**folders: Path | None) -> None:
    for name, path in folders.items():
        if path is not None and path.exists() and not path.is_dir():
            option = f"--{name.replace('_', '-')}"
            hint = f"{option} takes a folder, which is made if there is none."
            raise BadUsageError(f"{path} is a file, not a folder.", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the words of the command line ask for."""

    repo: Repo
    files: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        repo: str,
        repo_type: str | None,
        files: tuple[str, ...],
        include: tuple[str, ...],
        exclude: tuple[str, ...],
    ) -> _Wanted:
        """Return it, or say what cannot be meant."""
        from smartcache.hub import Repo, safe_parts

        parsed = Repo.parse(repo, repo_type)
        if repo_type is not None and parsed.type != repo_type:
            message = f"{repo} is a {parsed.type}, but --repo-type says {repo_type}."
            raise BadUsageError(message, hint="Leave --repo-type out.")
        if files and (include or exclude):
            hint = "Write them all as --include; a folder is --include 'folder/*'."
            raise BadUsageError("FILES exclude --include and --exclude.", hint=hint)
        for file in files:
            if safe_parts(file.removesuffix("/")) is None:
                hint = "FILES are names as the Hub shows them, such as vae/config.json."
                raise BadUsageError(f"{file!r} is not a path in a repo.", hint=hint)
        return cls(repo=parsed, files=files, include=include, exclude=exclude)

    @property
    def one_file(self) -> str | None:
        """The file, if it is one alone: then its own path is the result."""
        is_one = len(self.files) == 1 and not self.files[0].endswith("/")
        return self.files[0] if is_one else None

    def call(self, arguments: dict[str, object], max_workers: int) -> Call:
        """Return the call of huggingface_hub that this stands for."""
        import glob

        from smartcache.hub import Call

        if self.one_file is not None:
            return Call(repo_id=self.repo.id, filename=self.one_file, arguments=arguments)
        named = [glob.escape(file) + "*" * file.endswith("/") for file in self.files]
        patterns = {"allow_patterns": named or list(self.include) or None,
                    "ignore_patterns": list(self.exclude) or None}  # fmt: skip
        given = {name: value for name, value in patterns.items() if value is not None}
        more = {**arguments, **given, "max_workers": max_workers}
        return Call(repo_id=self.repo.id, arguments=more)

    def missing(self, paths: list[str]) -> list[str]:
        """Return the files and folders that are not among these paths."""
        known = set(paths)
        return [
            file
            for file in self.files
            if not (
                any(path.startswith(file) for path in paths)
                if file.endswith("/")
                else file in known
            )
        ]


class _Run:
    """One run of the command."""

    def __init__(
        self,
        session: Session,
        cache: SmartCache,
        wanted: _Wanted,
        call: Call,
        also: tuple[str, ...],
        *,
        dry_run: bool,
    ) -> None:
        self._dry_run = dry_run
        self._session = session
        self._cache = cache
        self._wanted = wanted
        self._call = call
        self._also = also
        self._error: Exception | None = None

    def plan(self) -> DownloadPlan | None:
        """Plan it; None if the Hub cannot be asked, and perhaps the HF cache can answer."""
        try:
            plan = self._cache.plan_download(self._call, also=self._also, progress=bars)
        except Exception as error:
            if is_missing_file(error):
                raise self._no_such_file(list(self._wanted.files)) from error
            has_no_say = "local_dir" in self._call.arguments or not is_denial(error)
            is_final = is_refusal(error) and has_no_say
            if not is_of_hub(error) or (is_final and not self._is_pulled()):
                raise
            self._error = error
            return None
        missing = self._wanted.missing([each.file.path for each in plan.files])
        if missing:
            raise self._no_such_file(missing)
        if not plan.files:
            raise self._nothing_selected()
        return plan

    def go(self, plan: DownloadPlan, *, verbose: bool, dry_run: bool) -> None:
        """Show a plan, carry it out and say where the files are."""
        notes = cautions(plan, dry_run=dry_run)
        if not dry_run and out.mode == "human":
            if plan.is_done:
                out.talk(f"{plan.repo}: everything is there already.")
            else:
                show_plan(plan, verbose=verbose, dry_run=False)
        for note in notes:
            out.warn(note)
        result = None if dry_run else self._execute(plan)
        out.show(
            human=lambda: (
                show_plan(plan, verbose=verbose, dry_run=True)
                if result is None
                else out.line(result.path)
            ),
            document=lambda: {**plan_document(plan, result), "warnings": notes},
            ids=lambda: [_planned_path(plan) if result is None else result.path],
        )

    def _execute(self, plan: DownloadPlan) -> DownloadResult:
        """Carry out a plan, and say what was done."""
        from smartcache.cli._hub_output import stopping_soon

        self._session.how_far = _how_to_go_on
        # Then all is huggingface_hub's work, which tells nobody how far it is: the time is shown.
        watch = bars("Fetching everything again") if plan.request.force else nullcontext()
        try:
            with stopping_soon(), watch:
                result = plan.execute(progress=bars)
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename or isinstance(error, SmartcacheError):
                raise
            raise _no_space(plan) from error
        fetched, reused = format_size(result.fetched_size), format_size(result.reused_size)
        if result.fetched_size or result.reused_size or result.taken_size:
            more = f"; {reused} came from this machine" if result.reused_size else ""
            if result.taken_size:
                more += f"; {format_size(result.taken_size)} came from tiers"
            out.talk(f"Fetched {fetched}{more}.")
        say_changes(result, plan.store)
        return result

    def answer_from_cache(self, *, dry_run: bool) -> None:
        """Answer with what the HF cache has, as huggingface_hub does where it cannot ask."""
        from smartcache.hub import DownloadResult

        call, error = self._call, self._error
        assert error is not None  # noqa: S101 - for the type checker
        if dry_run:
            raise error
        arguments = {**call.arguments, "force_download": False, "local_files_only": True}
        local = replace(call, arguments=arguments)
        try:
            try:
                path = local.from_cache(self._cache.store)
            except Exception:
                if not self._is_pulled():
                    raise
                path = local.from_cache(self._cache.store)
        except Exception as missing:
            if is_refusal(error):
                raise error from None
            raise missing from error
        words = words_for(error)
        note = (
            f"{error if words is None else words[0]}. This is what is here, perhaps not the newest."
        )
        out.warn(note)
        document = {
            "repo": call.repo_id, "type": self._wanted.repo.type,
            "revision": call.arguments.get("revision", "main"), "commit": commit_in(path),
            "files": None, "present_size": None, "saved_size": 0, "fetch_size": 0,
            "tier_size": 0,
            "needed_size": 0, "unproven_size": None, "dry_run": False, "warnings": [note],
            **picked(DownloadResult(path=path)),
        }  # fmt: skip
        out.show(human=lambda: out.line(path), document=lambda: document, ids=lambda: [path])

    def _is_pulled(self) -> bool:
        """Say whether a tier has what the Hub does not give: then it is in the HF cache now."""
        from smartcache.hub import pull_without_hub

        if self._dry_run:
            return False
        return pull_without_hub(self._cache.store, self._call.request(), progress=bars)

    # what the user asked for and the repo does not have

    def _no_such_file(self, missing: list[str]) -> HubError:
        repo, revision = self._wanted.repo, self._call.arguments.get("revision", "main")
        names = " and no ".join(
            f"{'folder' if name.endswith('/') else 'file'} {name!r}" for name in missing
        )
        message = f"{repo} has no {names} at {revision}; nothing was downloaded"
        if any(sign in name for name in missing for sign in _WILD):
            hint = f"For patterns write --include {missing[0]!r}."
        else:
            hint = _nearest(missing, self._all_paths())
        return HubError(message, hint=hint, missing=missing)

    def _nothing_selected(self) -> HubError:
        repo, revision = self._wanted.repo, self._call.arguments.get("revision", "main")
        paths = self._all_paths()
        if not paths:
            return HubError(f"{repo} has no files at {revision}", hint="Check --revision.")
        options = [f"--include {each!r}" for each in self._wanted.include]
        options += [f"--exclude {each!r}" for each in self._wanted.exclude]
        message = f"No file of {repo} at {revision} is selected by {' '.join(options)}"
        shown = ", ".join(paths[:_MOST_NAMED])
        more = f" and {len(paths) - _MOST_NAMED:,} more" if paths[_MOST_NAMED:] else ""
        return HubError(message, hint=f"It has {shown}{more}.")

    def _all_paths(self) -> list[str]:
        """Return all files of the repo; none if the Hub does not say."""
        try:
            return [file.path for file in self._call.all_files()]
        except Exception as error:
            if is_of_hub(error):
                return []
            raise


def _no_space(plan: DownloadPlan) -> NoSpaceError:
    hint = "Free some space, or choose another place with --cache-dir or --local-dir. Run again, it"
    message = f"No space left at {plan.folder}; files that are whole stay"
    return NoSpaceError(message, hint=f"{hint} goes on.")


def _planned_path(plan: DownloadPlan) -> Path:
    is_one = plan.request.filename is not None
    return plan.place.visible(plan.files[0].file) if is_one else plan.place.root


def _nearest(missing: list[str], paths: list[str]) -> str:
    """Return a hint with the names that were most likely meant."""
    from difflib import get_close_matches
    from pathlib import PurePosixPath

    folders = {f"{parent}/" for path in paths for parent in PurePosixPath(path).parents[:-1]}
    found: list[str] = []
    for name in missing:
        known = sorted(folders) if name.endswith("/") else paths
        found += get_close_matches(name, known, n=_MOST_NAMED)
        last = PurePosixPath(name).name
        by_last = {path: PurePosixPath(path).name for path in known}
        close = get_close_matches(last, set(by_last.values()), n=_MOST_NAMED)
        found += [path for each in close for path in known if by_last[path] == each]
    shown = list(dict.fromkeys(found))[:_MOST_NAMED]
    if shown:
        return f"Did you mean {' or '.join(shown)}?"
    return "'smartcache download REPO --dry-run -v' shows all files of a repo."


def _how_to_go_on() -> str:
    return "Run the same command again to go on: finished files are not fetched again."
