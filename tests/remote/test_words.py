"""A word means a repo, a blob, a set or a dataset, for push and for pull; and what is cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smartcache.cache import SmartCache
from smartcache.errors import BadDigestError, MissingObjectError, RepoNotCachedError, TierError
from tests.hub.bundles import FIRST, add_repo, everything
from tests.hub.clients import Client, weights
from tests.remote import places, test_datasets
from tests.remote.test_repos import pull, push


def put_latents(cache: SmartCache) -> None:
    with cache.artifacts("latents", fingerprint={"vae": "1"}) as latents:
        latents.put("cat", {"latent": np.arange(6.0)})


def test_a_set_is_pushed_and_pulled_by_its_name(here: Client, there: Client) -> None:
    put_latents(here.smart)
    sent = here.smart.push("nas", "latents")
    assert sent.objects > 0
    assert here.smart.push("nas", "latents").objects == 0
    assert there.smart.pull("nas", "latents").objects == 1
    with there.smart.artifacts("latents", fingerprint={"vae": "1"}, read_only=True) as latents:
        assert latents.get("cat")["latent"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_dataset_is_pushed_and_pulled_by_its_name(
    here: Client, there: Client, tmp_path: Path
) -> None:
    test_datasets.fill(tmp_path / "photos", 4)
    with test_datasets.opened(here.smart, tmp_path / "photos") as dataset:
        dataset.build()
    here.smart.push("nas", "photos")
    assert here.smart.push("nas", "photos").objects == 0
    assert there.smart.pull("nas", "photos").objects > 0
    with there.smart.open_dataset("photos") as dataset:
        assert len(dataset) == 4


def test_a_repo_a_set_and_a_blob_go_together(here: Client, there: Client, folder: Path) -> None:
    add_repo(here.cache, "org/first", FIRST)
    put_latents(here.smart)
    (folder / "x.gguf").write_bytes(weights(8))
    digest = here.store.put_file(folder / "x.gguf").digest
    push(here, "org/first", "latents", digest)
    assert pull(there, "org/first", "latents", digest) > 0
    assert everything(there.cache) == everything(here.cache)
    assert there.store.find("blake3", digest) is not None


def test_a_word_that_means_nothing_is_said_with_what_there_is(here: Client) -> None:
    put_latents(here.smart)
    with pytest.raises(RepoNotCachedError) as caught:
        push(here, "latent")
    assert caught.value.hint == "There is latents."


def test_the_beginning_of_several_digests_is_not_enough(here: Client, there: Client) -> None:
    found: dict[str, list[str]] = {}
    for number in range(400):  # two of them begin with the same digit, and the same next one
        digest = here.store.put_stream([b"%d" % number]).digest
        found.setdefault(digest[:2], []).append(digest)
        if len(found[digest[:2]]) > 1:
            break
    one, other = found[digest[:2]]
    push(here, one, other)
    with pytest.raises(BadDigestError, match="start of several digests"):
        pull(there, digest[:2])
    with pytest.raises(MissingObjectError):
        pull(there, "0" * 64)


def test_a_pull_whose_connection_is_cut_goes_on(
    here: Client, there: Client, rclone: str, tmp_path: Path
) -> None:
    """In the middle of a file, again and again; what has arrived whole is not fetched again."""
    files = {f"{n}.safetensors": weights(20 + n, 300_000) for n in range(4)}
    add_repo(here.cache, "org/name", files)
    here.smart.remotes.remove("nas")
    with places.Wire(int(rclone.rpartition(":")[2])) as wire:
        options = {"endpoint": f"http://127.0.0.1:{wire.port}", "region": "us-east-1"}
        here.smart.remotes.add("nas", f"s3://bucket/{tmp_path.name}", options)
        push(here, "org/name")
        wire.left = 700_000
        with pytest.raises(TierError):
            pull(there, "org/name")
        assert wire.cuts
        assert not (there.cache / "models--org--name" / "snapshots").exists()
        assert not there.store.verify(full=True).has_damage
        wire.left = None
        pull(there, "org/name")
    assert everything(there.cache) == everything(here.cache)
