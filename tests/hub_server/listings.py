"""The Hub's JSON about a repo: its info, its tree, its refs.

    assert tree_of(commit, "vae") == ["vae/config.json", "vae/model.safetensors"]

A fault that is about what is announced (size, sha256) is taken here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from tests.hub_server.faults import LISTING, Faults
from tests.hub_server.repos import Commit, HubFile, JsonObject, Repository

DATE = "2026-01-02T03:04:05.000Z"


def entry_of(commit: Commit, path: str, faults: Faults, *, is_expanded: bool = False) -> JsonObject:
    """Return what the tree says of a file."""
    file = commit.files[path]
    size, sha256 = announced(commit, path, faults)
    entry: JsonObject = {"type": "file", "oid": file.oid, "size": size, "path": path}
    if file.is_lfs:
        entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": len(file.pointer)}
    if file.xet is not None:
        entry["xetHash"] = file.xet
    return entry | (_expansion(commit) if is_expanded else {})


def announced(commit: Commit, path: str, faults: Faults) -> tuple[int | None, str]:
    """Return the size and the sha256 that a listing has for a file of LFS."""
    file, name = commit.files[path], f"{commit.repo}/{path}"
    fault = faults.take("wrong_sha", name, LISTING)
    sha256 = fault.sha256 if fault else (file.sha256 if file.is_lfs else "")
    return announced_size(file, name, faults), sha256


def announced_size(file: HubFile, name: str, faults: Faults) -> int | None:
    """Return the size that the listing and HEAD have; None: they have none."""
    if faults.take("no_size", name):
        return None
    fault = faults.take("wrong_size", name)
    return file.size + (fault.by if fault else 0)


def tree_of(commit: Commit, folder: str, *, is_recursive: bool = False) -> list[str] | None:
    """Return the paths in a folder ("" is the whole repo); None if there is no such folder."""
    inside = f"{folder}/" if folder else ""
    found: dict[str, None] = {}
    for path in commit.files:
        if path.startswith(inside):
            steps = [*_parents(path, inside), path]
            found.update(dict.fromkeys(steps if is_recursive else steps[:1]))
    return list(found) if found or not folder else None


def entries_of(
    commit: Commit, paths: Sequence[str], faults: Faults, *, is_expanded: bool = False
) -> list[JsonObject]:
    """Return what the tree says of each file or folder."""
    return [
        (entry_of if path in commit.files else _folder_entry)(
            commit, path, faults, is_expanded=is_expanded
        )
        for path in paths
    ]


def paths_info(commit: Commit, paths: Sequence[str], faults: Faults) -> list[JsonObject]:
    """Return the entries of those paths that exist."""
    known = {parent for path in commit.files for parent in _parents(path, "")}.union(commit.files)
    return entries_of(commit, [path for path in paths if path in known], faults)


def info_of(
    repo: Repository, commit: Commit, faults: Faults, *, has_blobs: bool = False
) -> JsonObject:
    """Return what the Hub says of a repo at a commit."""
    siblings = [_sibling(commit, path, faults, has_blobs=has_blobs) for path in commit.files]
    about: JsonObject = {
        "_id": commit.sha[:24],
        "id": repo.id,
        "author": repo.id.partition("/")[0],
        "sha": commit.sha,
        "lastModified": DATE,
        "createdAt": DATE,
        "private": repo.is_private,
        "gated": "auto" if repo.is_gated else False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
    }
    if repo.type == "model":
        about["modelId"] = repo.id
    elif repo.type == "space":
        about["sdk"] = "static"
    return about


def refs_of(repo: Repository) -> JsonObject:
    """Return branches, tags, pull requests and conversions."""
    found: dict[str, list[JsonObject]] = {
        "branches": [], "tags": [], "converts": [], "pullRequests": []
    }  # fmt: skip
    for name, sha in repo.branches.items():
        special = {"refs/pr/": "pullRequests", "refs/convert/": "converts"}
        start = next((start for start in special if name.startswith(start)), None)
        ref = name if start else f"refs/heads/{name}"
        where = found[special[start] if start else "branches"]
        where.append({"name": name, "ref": ref, "targetCommit": sha})
    for name, sha in repo.tags.items():
        found["tags"].append({"name": name, "ref": f"refs/tags/{name}", "targetCommit": sha})
    return {**found}


def _sibling(commit: Commit, path: str, faults: Faults, *, has_blobs: bool) -> JsonObject:
    if not has_blobs:
        return {"rfilename": path}
    file = commit.files[path]
    size, sha256 = announced(commit, path, faults)
    found: JsonObject = {"rfilename": path, "size": size, "blobId": file.oid}
    if file.is_lfs:
        found["lfs"] = {"sha256": sha256, "size": size, "pointerSize": len(file.pointer)}
    return found


def _folder_entry(commit: Commit, path: str, _: Faults, *, is_expanded: bool = False) -> JsonObject:
    oid = hashlib.sha1(f"{commit.sha} {path}".encode()).hexdigest()  # noqa: S324 - as git does
    entry: JsonObject = {"type": "directory", "oid": oid, "size": 0, "path": path}
    return entry | (_expansion(commit) if is_expanded else {})


def _expansion(commit: Commit) -> JsonObject:
    return {"lastCommit": {"id": commit.sha, "title": "Publish", "date": DATE}}


def _parents(path: str, inside: str) -> Iterator[str]:
    """Go through the folders of a path below `inside`, outermost first."""
    for index in range(len(inside), len(path)):
        if path[index] == "/" and index > len(inside):
            yield path[:index]
