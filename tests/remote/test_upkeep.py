"""Remotes by name; what a tier lacks, and what nobody there needs."""

from __future__ import annotations

import errno
import json
import os
import stat
from datetime import timedelta
from pathlib import Path

import obstore
import pytest

from smartcache.config import remotes_file as config_remotes_file
from smartcache.errors import ConfigError, DamagedObjectError, TierError
from smartcache.remote import Remotes, Tier, plan_gc, plan_push, verify_tier
from tests.hub.bundles import ENCODER, FIRST, SECOND, UNET, add_repo
from tests.hub.clients import Client, sha256
from tests.remote.places import s3_tier

AT_ONCE = timedelta(0)


def push(client: Client, tier: Tier, *words: str) -> None:
    smart = client.smart
    for step in plan_push(smart.store, smart.sets, tier, words, caches=[client.cache]):
        step.execute()


def object_path(tier: Tier, data: bytes) -> str:
    found = tier.find("sha256", sha256(data))
    assert found is not None
    return f"objects/{found.digest[:2]}/{found.digest}"


class TestRemotes:
    def test_what_is_added_is_kept_for_this_user_alone(self, tmp_path: Path) -> None:
        made = Remotes().add("nas", str(tmp_path / "new" / "folder"))
        assert Remotes().all() == [made]
        assert made.creates
        assert made.ranges
        assert stat.S_IMODE(os.stat(config_remotes_file()).st_mode) == 0o600
        assert (tmp_path / "new" / "folder" / "smartcache.json").exists()

    def test_a_relative_folder_is_kept_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert Remotes().add("nas", "x y").url == f"file://{tmp_path}/x%20y"

    def test_what_is_forgotten_is_not_removed(self, tmp_path: Path) -> None:
        Remotes().add("nas", str(tmp_path / "nas"))
        Remotes().remove("nas")
        assert Remotes().all() == []
        assert (tmp_path / "nas" / "smartcache.json").exists()

    def test_an_unknown_remote_is_said_with_those_there_are(self, tmp_path: Path) -> None:
        Remotes().add("nas", str(tmp_path / "nas"))
        with pytest.raises(ConfigError) as caught:
            Remotes().tier("nsa")
        assert caught.value.hint == "There is nas."

    def test_a_name_is_not_given_twice(self, tmp_path: Path) -> None:
        Remotes().add("nas", str(tmp_path / "nas"))
        Remotes().add("nas", str(tmp_path / "nas"))
        with pytest.raises(ConfigError, match="already"):
            Remotes().add("nas", str(tmp_path / "other"))

    @pytest.mark.parametrize(
        ("name", "url", "options"),
        [
            ("nas", "s3://user:password@bucket", {}),
            ("nas", "s3://bucket?sig=secret", {}),
            ("nas", "s3://bucket", {"aws_secret_access_key": "x"}),
            ("nas", "s3://bucket", {"token": "x"}),
            ("nas", "ftp://host/x", {}),
            ("../nas", "s3://bucket", {}),
        ],
    )
    def test_secrets_and_odd_names_are_refused(
        self, name: str, url: str, options: dict[str, str]
    ) -> None:
        with pytest.raises(ConfigError):
            Remotes().add(name, url, options)
        assert not config_remotes_file().exists()

    def test_a_server_that_is_not_there_is_not_added(self) -> None:
        with pytest.raises(TierError):
            Remotes().add("s3", "s3://b", {"endpoint": "http://127.0.0.1:9", "region": "x"})
        assert Remotes().all() == []

    def test_who_may_not_write_adds_it_for_reading(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the system would say to another user; these tests may run as root."""
        Remotes().add("nas", str(tmp_path / "nas"))

        def denied(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(obstore, "put", denied)
        made = Remotes().add("reader", str(tmp_path / "nas"))
        assert (made.writes, made.ranges) == (False, True)
        assert Remotes().get("reader") == made
        with pytest.raises(TierError, match="Permission denied"):
            Remotes().add("other", str(tmp_path / "no tier"))

    def test_what_the_server_does_is_kept(self, rclone: str, tmp_path: Path) -> None:
        options = {"endpoint": rclone, "region": "us-east-1"}
        made = Remotes().add("s3", f"s3://bucket/{tmp_path.name}", options)
        assert not made.creates
        assert not made.ranges
        assert Remotes().tier("s3").abilities.ranges is False

    def test_a_damaged_list_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        Remotes().add("nas", str(tmp_path / "nas"))
        config_remotes_file().write_text("{")
        with pytest.raises(ConfigError, match=r"remotes\.json"):
            Remotes().all()

    def test_a_damaged_list_does_not_stop_a_download(self, there: Client) -> None:
        config_remotes_file().write_text("{")
        there.hub.add("org/name", {"config.json": b"{}"})
        assert (there.snapshot() / "config.json").read_bytes() == b"{}"


class TestVerify:
    @pytest.fixture(autouse=True)
    def _pushed(self, here: Client, shared: Tier) -> None:
        add_repo(here.cache, "org/first", FIRST)
        add_repo(here.cache, "org/second", SECOND)
        push(here, shared, "org/first", "org/second")

    def test_a_tier_that_is_whole_has_no_findings(self, shared: Tier) -> None:
        report = verify_tier(shared)
        assert report.findings == ()
        assert report.documents == 2
        objects = [each for each in shared.listed() if each.path.startswith("objects/")]
        assert report.objects == len(objects)
        assert report.read_size == report.size == sum(each.size for each in objects)

    def test_what_is_missing_is_named_with_who_needs_it(self, shared: Tier, share: Path) -> None:
        path = share / object_path(shared, ENCODER)
        path.unlink()
        for fast in (True, False):
            (found,) = verify_tier(shared, fast=fast).findings
            assert (found.kind, found.digest) == ("missing", path.name)
            assert found.needed_by == ("repos/model/org/first", "repos/model/org/second")

    def test_a_wrong_byte_is_found_by_reading(self, shared: Tier, share: Path) -> None:
        path = share / object_path(shared, UNET)
        path.write_bytes(UNET[::-1])
        assert verify_tier(shared, fast=True).findings == ()
        (found,) = verify_tier(shared).findings
        assert (found.kind, found.digest) == ("damaged", path.name)

    def test_an_object_that_was_cut_is_found_by_size(self, shared: Tier, share: Path) -> None:
        (share / object_path(shared, UNET)).write_bytes(UNET[:-1])
        (found,) = verify_tier(shared, fast=True).findings
        assert found.kind == "damaged"

    def test_a_damaged_document_is_found(self, shared: Tier, share: Path) -> None:
        (path,) = (share / "documents" / "repos" / "models--org--first").iterdir()
        path.write_text("{")
        (found,) = verify_tier(shared).findings
        assert found.kind == "document"
        assert found.needed_by == ("repos/model/org/first",)


class TestGc:
    @pytest.fixture(autouse=True)
    def _pushed(self, here: Client, shared: Tier) -> None:
        add_repo(here.cache, "org/first", FIRST)
        add_repo(here.cache, "org/second", SECOND)
        push(here, shared, "org/first", "org/second")

    def test_what_documents_need_stays(self, shared: Tier) -> None:
        assert plan_gc(shared, older_than=AT_ONCE).is_empty

    def test_what_no_document_needs_goes_with_its_names(self, shared: Tier, share: Path) -> None:
        first = share / object_path(shared, UNET)
        both = share / object_path(shared, ENCODER)
        shared.remove_document("repos", "models--org--first")
        assert plan_gc(shared).is_empty
        plan = plan_gc(shared, older_than=AT_ONCE)
        assert len(UNET) <= plan.freed_size
        result = plan.execute()
        assert result.freed_size == plan.freed_size
        assert not first.exists()
        assert both.exists()
        assert shared.find("sha256", sha256(UNET)) is None
        assert verify_tier(shared).findings == ()

    def test_what_came_into_use_meanwhile_stays(self, here: Client, shared: Tier) -> None:
        shared.remove_document("repos", "models--org--first")
        plan = plan_gc(shared, older_than=AT_ONCE)
        push(here, shared, "org/first")
        result = plan.execute()
        assert result.removed == 0
        assert result.kept > 0
        assert verify_tier(shared).findings == ()

    def test_nothing_goes_while_a_document_cannot_be_read(self, shared: Tier, share: Path) -> None:
        shared.remove_document("repos", "models--org--first")
        (path,) = (share / "documents" / "repos" / "models--org--second").iterdir()
        path.write_text(json.dumps({"format": 1}))
        with pytest.raises(DamagedObjectError, match="nothing is removed"):
            plan_gc(shared, older_than=AT_ONCE)

    def test_of_a_bucket_only_what_has_the_shape_of_ours_goes(
        self, moto: str, tmp_path: Path
    ) -> None:
        tier = s3_tier(moto, tmp_path.name)
        foreign = ["objects/Track#1", f"objects/ab/{'cd' * 32}", f"names/md5/ab/{'ab' * 16}",
                   f"objects/ab/x/{'ab' * 32}", "documents/notes.txt"]  # fmt: skip
        ours = [f"names/sha256/ab/{'ab' * 32}", f"objects/ab/{'ab' * 32}"]
        for path in (*foreign, *ours):
            obstore.put(tier._store, path, b"x")  # noqa: SLF001
        plan = plan_gc(tier, older_than=AT_ONCE)
        assert sorted(plan.foreign) == sorted(foreign)
        assert plan.execute().removed == 2
        assert sorted(each.path for each in tier.listed()) == sorted(foreign)

    def test_what_a_killed_push_was_writing_goes(self, shared: Tier, share: Path) -> None:
        left = share / "objects" / "aa" / f"{'a' * 64}#1"
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(b"half")
        assert plan_gc(shared).leftovers == ()
        plan_gc(shared, older_than=AT_ONCE).execute()
        assert not left.exists()
