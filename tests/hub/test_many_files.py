"""A repo with very many files costs no request per file beyond those of huggingface_hub."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from tests.hub.clients import Client, contents, plain_snapshot, weights
from tests.hub_server import Hub

MANY = 10_000
DOWNLOADED = 400
FEWER = 200
LARGE = 3


def files_of(count: int) -> dict[str, bytes | Path]:
    """As many files as that: tiny texts in some folders, and a few weights."""
    small = {f"part{n // 250}/{n}.json": b'{"number": %d}' % n for n in range(count - LARGE)}
    large = {f"model-{n}.safetensors": weights(n) for n in range(LARGE)}
    return {**small, **large}


def pages_of(hub: Hub, count: int) -> int:
    """Return how many pages the listing of so many files has; folders are entries too."""
    return math.ceil(
        (count + len({Path(name).parent for name in files_of(count)}) - 1) / hub.page_size
    )


def requests_of(hub: Hub) -> Counter[str]:
    """Count and forget what was asked for: files by method, listings by what they list."""
    counted = Counter(
        each.method if each.file is not None else each.path.split("/")[5] for each in hub.requests
    )
    assert all(each.status == 200 for each in hub.requests)
    hub.clear()
    return counted


def test_a_plan_of_ten_thousand_files_asks_for_the_commit_and_the_listing_only(
    client: Client, hub: Hub
) -> None:
    hub.add("org/many", files_of(MANY))
    plan = client.plan("org/many")
    assert len(plan.files) == MANY
    assert {each.source for each in plan.files} == {"fetch"}
    assert requests_of(hub) == {"revision": 1, "tree": pages_of(hub, MANY)}


def test_a_plan_does_not_ask_more_often_than_a_dry_run_of_huggingface_hub(
    client: Client, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/many", files_of(DOWNLOADED))
    client.plan("org/many")
    ours = requests_of(hub)
    plain_snapshot_dry(hub, tmp_path / "plain")
    plain = requests_of(hub)
    assert plain["revision"] >= 1
    assert ours["HEAD"] == ours["GET"] == 0
    assert ours.total() <= plain.total()


def plain_snapshot_dry(hub: Hub, cache: Path) -> None:
    """Let huggingface_hub alone say what it would download."""
    import huggingface_hub

    found = huggingface_hub.snapshot_download(
        "org/many", cache_dir=cache, endpoint=hub.url, dry_run=True
    )
    assert len(found) == DOWNLOADED


class TestDownload:
    def test_asks_for_each_file_as_often_as_huggingface_hub(
        self, client: Client, hub: Hub, tmp_path: Path
    ) -> None:
        """The listing is read twice: for the plan, and by huggingface_hub."""
        hub.page_size = 100
        hub.add("org/many", files_of(DOWNLOADED))
        snapshot = plain_snapshot(hub, tmp_path / "plain", "org/many")
        plain = requests_of(hub)
        made = client.snapshot("org/many")
        ours = requests_of(hub)
        assert contents(made) == contents(snapshot)
        assert (ours["GET"], plain["GET"]) == (DOWNLOADED, DOWNLOADED)
        assert ours["HEAD"] <= plain["HEAD"]
        assert ours["revision"] <= plain["revision"] + 1
        assert ours["tree"] <= plain["tree"] + pages_of(hub, DOWNLOADED)
        assert set(ours) <= {"GET", "HEAD", "revision", "tree"}

    def test_repeated_asks_no_more_than_huggingface_hub_does(
        self, client: Client, hub: Hub
    ) -> None:
        hub.add("org/many", files_of(FEWER))
        client.snapshot("org/many")
        if not (client.cache / "models--org--many" / "trees").is_dir():
            pytest.skip("this huggingface_hub keeps no listings")
        hub.clear()
        plain_snapshot(hub, client.cache, "org/many")
        plain = requests_of(hub)
        client.snapshot("org/many")
        ours = requests_of(hub)
        assert ours["HEAD"] == ours["GET"] == 0
        assert ours.total() <= plain.total()

    def test_of_another_repo_with_the_same_weights_asks_for_the_small_files_only(
        self, client: Client, hub: Hub
    ) -> None:
        hub.add("org/many", files_of(FEWER))
        hub.add("org/other", files_of(FEWER) | {"part0/0.json": b"{}"})
        client.snapshot("org/many")
        hub.clear()
        client.snapshot("org/other")
        assert hub.gets(".safetensors") == []
        assert requests_of(hub)["GET"] == FEWER - LARGE
