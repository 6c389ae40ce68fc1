"""What a download, an import or a loading says of the files it has changed, and that it is true."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from smartcache.cache import SmartCache
from smartcache.errors import NoSpaceError
from smartcache.hub.care.carry import plan_import
from smartcache.hub.outcome import DownloadResult
from tests.hub.bundles import export
from tests.hub.clients import Client, plain_snapshot, state_of, weights
from tests.hub_server import Hub
from tests.store.files import Watch, mode_of, write
from tests.store.small_disks import Disk, in_own_namespace

WANTED, OTHER = weights(1, 300_000), weights(2, 200_000)
NAME = "model.safetensors"


@pytest.fixture
def repo(hub: Hub) -> None:
    hub.add("org/name", {NAME: WANTED, "other.safetensors": OTHER, "config.json": b"{}"})


def given(client: Client, folder: Path, data: bytes = WANTED, *, mode: int = 0o644) -> Path:
    """Put a file with the wanted bytes into a folder that was given to smartcache."""
    path = write(folder / "any name.safetensors", data)
    path.chmod(mode)
    client.store.add_folder(folder, program="ComfyUI")
    return path


def blob(client: Client, name: str = NAME) -> Path:
    (found,) = {path.resolve() for path in client.cache.glob(f"*/snapshots/*/{name}")}
    return found


@pytest.mark.usefixtures("repo")
class TestDownload:
    def test_the_result_names_what_was_done(self, client: Client, tmp_path: Path) -> None:
        found = given(client, tmp_path / "given")
        result = client.plan().execute()
        assert result.read_only == (found,)
        assert result.linked == (blob(client),)
        assert set(result.new_read_only) == {blob(client), blob(client, "other.safetensors")}
        assert (result.copied, result.narrow, result.freed_size) == ((), (), 0)
        assert result.fetched_size == len(OTHER) + len(b"{}")
        assert result.reused_size == len(WANTED)
        assert Path(result) == Path(result.path) == client.cache.glob("*/snapshots/*").__next__()

    def test_all_is_one_entry_of_the_history(self, client: Client, tmp_path: Path) -> None:
        found = given(client, tmp_path / "given")
        result = client.plan().execute()
        (entry,) = client.store.history()
        assert (entry.label, (entry.id,)) == ("download", result.undo_ids)
        client.store.plan_undo(result.undo_ids).execute()
        assert mode_of(found) == mode_of(blob(client)) == 0o644
        assert client.store.history() == []

    def test_what_another_program_has_downloaded_shares_its_bytes_and_frees_them(
        self, client: Client, hub: Hub
    ) -> None:
        blocks = client.store.put_stream([WANTED], algorithms=["sha256"]).allocated
        plain_snapshot(hub, client.cache)
        path = blob(client)
        os.utime(path, ns=(1, 1))
        result = client.plan().execute()
        assert (result.linked, result.freed_size) == ((path,), blocks)
        assert set(result.read_only) == {path, blob(client, "other.safetensors")}
        assert result.new_read_only == ()

    def test_where_nothing_is_done_nothing_is_said(self, client: Client) -> None:
        client.plan().execute()
        again = client.plan().execute()
        assert again == DownloadResult(path=again.path)
        assert again.sentence() == ""

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
    def test_who_can_read_a_file_stays_as_it_is(
        self, client: Client, tmp_path: Path, mode: int
    ) -> None:
        found = given(client, tmp_path / "given", mode=mode)
        result = client.plan().execute()
        assert mode_of(found) == mode_of(blob(client)) == mode & 0o444
        is_narrow = mode != 0o664
        assert result.narrow == ((blob(client),) if is_narrow else ())
        assert ("other users cannot read" in result.sentence()) == is_narrow

    def test_a_private_file_of_a_stranger_does_not_become_public(
        self, client: Client, tmp_path: Path
    ) -> None:
        found = write(tmp_path / "seen" / "x.safetensors", WANTED)
        found.chmod(0o600)
        client.smart.scan(tmp_path / "seen")
        before = state_of(found)
        result = client.plan().execute()
        assert state_of(found) == before
        assert mode_of(blob(client)) == 0o400
        assert (result.read_only, result.narrow) == ((), (blob(client),))

    def test_python_hears_of_it_in_the_log(
        self, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "smartcache.hub.outcome")
        found = given(client, tmp_path / "given")
        client.snapshot()
        (entry,) = client.store.history()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"1 file of ComfyUI is now read-only: {found}" in record.message
        assert f"'smartcache undo {entry.id}'" in record.message

    def test_progress_counts_what_is_fetched_and_what_is_read(
        self, client: Client, tmp_path: Path
    ) -> None:
        given(client, tmp_path / "given")
        watch = Watch()
        client.plan().execute(progress=watch)
        assert watch.done == watch.total == len(WANTED) + len(OTHER)

    def test_folders_can_be_named_for_one_download(self, client: Client, tmp_path: Path) -> None:
        found = write(tmp_path / "elsewhere" / "x" / "y.bin", WANTED)
        before = state_of(found)
        plan = client.smart.plan_download(client.call("org/name"), also=[tmp_path / "elsewhere"])
        assert {each.source for each in plan.files if each.file.path == NAME} == {"reuse"}
        assert plan.execute().reused_size == len(WANTED)
        assert state_of(found) == before
        assert [each.path for each in client.store.folders()] == [client.cache]


@pytest.mark.usefixtures("repo")
class TestLoading:
    def load(self, client: Client) -> None:
        with client.smart.attending(client.call("org/name")):
            plain_snapshot(client.hub, client.cache)

    def test_files_of_other_programs_are_a_warning(
        self, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "smartcache.hub.outcome")
        found = given(client, tmp_path / "given")
        self.load(client)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"1 file of ComfyUI is now read-only: {found}" in record.message
        ids = [each.id for each in client.store.history()]
        assert record.message.endswith(f"'smartcache undo {' '.join(ids)}'.")
        self.load(client)
        assert len(caplog.records) == 1, "once is enough"

    def test_files_of_the_hf_cache_are_none(
        self, client: Client, hub: Hub, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "smartcache.hub.outcome")
        plain_snapshot(hub, client.cache)
        self.load(client)
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert "2 files of Hugging Face are now read-only" in record.message


def test_an_import_names_what_it_has_linked(client: Client, hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", {NAME: WANTED, "config.json": b"{}"})
    plain_snapshot(hub, tmp_path / "source")
    bundle = export(tmp_path / "source", tmp_path / "bundle")
    with plan_import(client.store, bundle, client.cache) as plan:
        changes = plan.execute()
    assert changes.linked == changes.new_read_only == (blob(client),)
    (entry,) = client.store.history()
    assert (entry.label, (entry.id,)) == ("hub import", changes.undo_ids)


@pytest.mark.usefixtures("repo")
class TestRoom:
    """On a real disk that is too small."""

    def test_a_download_is_refused_before_a_byte_is_fetched(self, hub: Hub, tmp_path: Path) -> None:
        def work() -> tuple[int, int, list[str]]:
            disk = Disk(tmp_path / "disk", 1 << 20)
            with SmartCache(tmp_path / "store") as smart:
                disk.fill(but=100)
                client = Client(smart, hub, disk.point / "hf")
                with pytest.raises(NoSpaceError) as caught:
                    client.snapshot()
                needed, free = vars(caught.value)["needed"], vars(caught.value)["free"]
                return needed, free, os.listdir(disk.point)

        assert in_own_namespace(work) == (500_002, 100 * 4096, ["filler"])
        assert hub.gets() == []

    @pytest.mark.parametrize("is_given", [True, False])
    def test_a_file_to_be_copied_needs_room_and_one_to_be_linked_none(
        self, hub: Hub, tmp_path: Path, *, is_given: bool
    ) -> None:
        wanted = weights(1, 3_000_000)  # far more than what the databases take meanwhile
        hub.add("org/one", {NAME: wanted})

        def work() -> str:
            disk = Disk(tmp_path / "disk", 16 << 20)
            with SmartCache(disk.point / "store") as smart:
                client = Client(smart, hub, disk.point / "hf")
                if is_given:
                    given(client, disk.point / "models", wanted)
                else:
                    write(disk.point / "models" / "x.safetensors", wanted)
                    smart.scan(disk.point / "models")
                disk.fill(but=500)
                plan = client.plan("org/one")
                assert plan.fetch_size == 0
                try:
                    plan.execute()
                except NoSpaceError as error:
                    return str(error)
                return ""

        message = in_own_namespace(work)
        assert message == "" if is_given else "needs 3 MB" in message, message

    def test_an_import_of_a_blob_of_another_disk_needs_room(self, hub: Hub, tmp_path: Path) -> None:
        hub.add("org/one", {NAME: WANTED})
        plain_snapshot(hub, tmp_path / "source", "org/one")
        bundle = export(tmp_path / "source", tmp_path / "bundle")

        def work() -> None:
            disk = Disk(tmp_path / "disk", 4 << 20)
            with SmartCache(tmp_path / "another") as smart:
                smart.store.put_stream([WANTED], algorithms=["sha256"])
                smart.store.add_pool(disk.point / "pool")
                disk.fill(but=50)
                with (
                    pytest.raises(NoSpaceError, match="The import needs 300 KB"),
                    plan_import(smart.store, bundle, disk.point / "hf"),
                ):
                    pass

        in_own_namespace(work)
