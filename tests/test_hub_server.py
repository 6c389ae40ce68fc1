"""The Hub that the tests are served by, asked by the real huggingface_hub, hf and diffusers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPResponse
from pathlib import Path
from typing import cast

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from tests.hub.shared_stores import has_shared_store
from tests.hub_server import Hub, HubProcess, git_sha1
from tests.hub_server import limit as limiting

WEIGHTS = random.Random(1).randbytes(200_000)
FILES = {"config.json": b'{"a": 1}', "vae/model.safetensors": WEIGHTS, "vae/config.json": b"{}"}
HF = Path(sys.executable).with_name("hf")
PATIENCE = 100.0


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


@pytest.fixture
def download(hub: Hub, tmp_path: Path) -> Callable[..., Path]:
    """`snapshot_download` of huggingface_hub, from the Hub of the test, into an empty cache."""

    def run(name: str, **options: object) -> Path:
        words = {"endpoint": hub.url, "cache_dir": tmp_path / "cache", "token": False, **options}
        return Path(snapshot_download(name, **words))  # type: ignore[call-overload]

    return run


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run_child(code: str, **variables: str) -> str:
    """Run Python in a process that reads its variables afresh."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class TestFiles:
    def test_a_repo_arrives_whole(self, hub: Hub, download: Callable[..., Path]) -> None:
        hub.add("org/name", {**FILES, "empty.txt": b"", "odd näme #1%20?.txt": b"odd"})
        folder = download("org/name")
        assert contents(folder) == hub_contents(hub, "org/name")
        blobs = {path.name for path in (folder.parent.parent / "blobs").iterdir()}
        assert {sha256(WEIGHTS), git_sha1(b"{}")} <= blobs
        assert hub.fetched_bytes("model.safetensors") == len(WEIGHTS)
        assert hub.fetched_bytes("org/name") == hub.fetched_bytes()

    @pytest.mark.parametrize("on_disk", [True, False])
    def test_parts_of_a_file(self, hub: Hub, tmp_path: Path, on_disk: bool) -> None:
        (tmp_path / "model").write_bytes(WEIGHTS)
        hub.add("org/name", {"model.bin": tmp_path / "model" if on_disk else WEIGHTS})
        for wanted, data in (
            ("bytes=0-9", WEIGHTS[:10]),
            ("bytes=199990-", WEIGHTS[-10:]),
            ("bytes=-10", WEIGHTS[-10:]),
            ("bytes=199990-999999", WEIGHTS[-10:]),
        ):
            with open_address(f"{hub.url}/org/name/resolve/main/model.bin", wanted) as answer:
                assert (answer.status, answer.read()) == (206, data)
            assert hub.gets()[-1].range == wanted
        with pytest.raises(urllib.error.HTTPError, match="416") as caught:
            open_address(f"{hub.url}/org/name/resolve/main/model.bin", "bytes=200000-")
        caught.value.close()


def open_address(address: str, part: str = "") -> HTTPResponse:
    headers = {"Range": part} if part else {}
    request = urllib.request.Request(address, headers=headers)  # noqa: S310 - the loopback
    return cast("HTTPResponse", urllib.request.urlopen(request))  # noqa: S310


def hub_contents(hub: Hub, name: str) -> dict[str, bytes]:
    commit = hub.repositories["model", name].find("main")
    assert commit is not None
    return {path: file.read() for path, file in commit.files.items()}


class TestCdn:
    def test_large_files_come_from_the_other_origin(
        self, hub: Hub, download: Callable[..., Path]
    ) -> None:
        hub.cdn = True
        hub.add("org/name", FILES)
        assert contents(download("org/name")) == FILES
        assert {(each.file, each.origin) for each in hub.gets()} == {
            ("org/name/config.json", "hub"),
            ("org/name/vae/config.json", "hub"),
            ("org/name/vae/model.safetensors", "cdn"),
        }

    def test_the_token_stays_at_home(self, hub: Hub, download: Callable[..., Path]) -> None:
        hub.cdn, hub.tokens = True, {"hf_good": {"org/name"}}
        hub.add("org/name", FILES, private=True)
        assert contents(download("org/name", token="hf_good")) == FILES  # noqa: S106 - made up
        tokens = {each.origin: each.authorized for each in hub.requests}
        assert tokens == {"hub": True, "cdn": False}


class TestAccess:
    @pytest.fixture(autouse=True)
    def _repos(self, hub: Hub) -> None:
        hub.add("org/gated", FILES, gated=True)
        hub.add("org/private", FILES, private=True)
        hub.add("org/open", FILES)
        hub.tokens = {"hf_good": {"org/gated", "org/private"}, "hf_other": set()}

    def test_a_gated_repo_can_be_listed_only_and_a_private_one_is_hidden(
        self, api: HfApi, download: Callable[..., Path]
    ) -> None:
        for token, gated, private in ((False, 401, 401), ("hf_other", 403, 404)):
            assert api.model_info("org/gated", token=token).gated == "auto"
            with pytest.raises(GatedRepoError) as caught:
                download("org/gated", token=token)
            assert caught.value.response.status_code == gated
            with pytest.raises(RepositoryNotFoundError) as hidden:
                download("org/private", token=token)
            assert hidden.value.response.status_code == private
            assert not isinstance(hidden.value, GatedRepoError)
        for name in ("org/gated", "org/private", "org/open"):
            assert contents(download(name, token="hf_good")) == FILES  # noqa: S106 - made up

    def test_a_bad_token_is_refused_everywhere(self, api: HfApi) -> None:
        with pytest.raises(HfHubHTTPError, match="Invalid credentials") as caught:
            api.model_info("org/open", token="hf_bad")  # noqa: S106 - made up
        assert not isinstance(caught.value, RepositoryNotFoundError)

    def test_what_does_not_exist(self, hub: Hub, api: HfApi, tmp_path: Path) -> None:
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("org/nothing")
        with pytest.raises(EntryNotFoundError):
            hf_hub_download(
                "org/open", "nothing.json", endpoint=hub.url, cache_dir=tmp_path, token=False
            )


class TestFaults:
    NAME = "vae/model.safetensors"

    @pytest.fixture(autouse=True)
    def _repo(self, hub: Hub) -> None:
        hub.add("org/name", FILES)

    def test_wrong_bytes_of_the_right_length_come_once(
        self, hub: Hub, download: Callable[..., Path]
    ) -> None:
        hub.faults.wrong_bytes(self.NAME)
        got = (download("org/name") / self.NAME).read_bytes()
        assert len(got) == len(WEIGHTS)
        assert sum(one != two for one, two in zip(got, WEIGHTS, strict=True)) == 1
        assert contents(download("org/name", force_download=True)) == FILES

    @pytest.mark.parametrize("on_disk", [True, False])
    def test_a_cut_download_goes_on_where_it_was(
        self, hub: Hub, download: Callable[..., Path], tmp_path: Path, on_disk: bool
    ) -> None:
        """huggingface_hub writes pieces of 10 MiB, and forgets what was less."""
        data = random.Random(3).randbytes(12 << 20)
        (tmp_path / "big").write_bytes(data)
        hub.add("org/big", {"model.bin": tmp_path / "big" if on_disk else data})
        hub.faults.cut("model.bin", after=11 << 20)
        assert contents(download("org/big")) == {"model.bin": data}
        cut, rest = hub.gets()
        assert (cut.range, cut.status, cut.sent) == (None, 200, 11 << 20)
        assert (rest.range, rest.status, rest.sent) == (f"bytes={10 << 20}-", 206, 2 << 20)

    def test_an_error_instead_of_the_bytes(self, hub: Hub, download: Callable[..., Path]) -> None:
        for status in (500, 503):
            hub.faults.status("org/name/vae", status, times=2)
            with pytest.raises(HfHubHTTPError) as caught:
                download("org/name")
            assert caught.value.response.status_code == status
            hub.faults.clear()
        assert contents(download("org/name")) == FILES

    def test_an_error_instead_of_the_listing(self, hub: Hub, download: Callable[..., Path]) -> None:
        """Some versions of huggingface_hub try again by themselves."""
        hub.faults.status("/api/models/org/name/tree", 503)
        with contextlib.suppress(HfHubHTTPError):
            download("org/name")
        assert contents(download("org/name")) == FILES
        assert [each.status for each in hub.api("/tree/")] == [503, 200]

    def test_a_wrong_size_is_announced(
        self, hub: Hub, api: HfApi, download: Callable[..., Path]
    ) -> None:
        hub.faults.wrong_size(self.NAME, by=5)
        (found,) = api.get_paths_info("org/name", [self.NAME])
        assert isinstance(found, RepoFile)
        assert found.size == len(WEIGHTS) + 5
        with pytest.raises(OSError, match=f"should be of size {len(WEIGHTS) + 5}"):
            download("org/name")

    def test_no_size_is_announced(
        self, hub: Hub, api: HfApi, download: Callable[..., Path]
    ) -> None:
        address = f"{hub.url}/org/name/resolve/main/{self.NAME}"
        for hub.cdn in (False, True):
            hub.faults.no_size("org/name/")
            (found,) = api.get_paths_info("org/name", [self.NAME])
            assert isinstance(found, RepoFile)
            assert found.size is None
            assert api.get_hf_file_metadata(url=address).size is None
            with open_address(address) as answer:
                assert hub.cdn or answer.headers["Content-Length"] is None
                assert answer.read() == WEIGHTS
            hub.faults.clear()
        assert contents(download("org/name")) == FILES

    def test_a_wrong_sha_is_announced(self, hub: Hub, api: HfApi) -> None:
        hub.faults.wrong_sha(self.NAME, "1" * 64)
        (found,) = api.get_paths_info("org/name", [self.NAME])
        assert isinstance(found, RepoFile)
        assert found.lfs is not None
        assert found.lfs.sha256 == "1" * 64
        address = f"{hub.url}/org/name/resolve/main/{self.NAME}"
        assert api.get_hf_file_metadata(url=address).etag == sha256(WEIGHTS)
        hub.faults.clear()
        hub.faults.wrong_sha(self.NAME, "2" * 64, in_head=True)
        assert api.get_hf_file_metadata(url=address).etag == "2" * 64

    @pytest.mark.parametrize("after", [0, 70_000])
    def test_a_body_can_be_held(self, hub: Hub, download: Callable[..., Path], after: int) -> None:
        hold = hub.faults.hold(self.NAME, after=after)
        folders: list[Path] = []
        client = threading.Thread(target=lambda: folders.append(download("org/name")))
        client.start()
        try:
            assert hold.reached.wait(PATIENCE)
            assert hub.fetched_bytes(self.NAME) == after
            assert folders == []
        finally:
            hold.release()
            client.join()
        assert contents(folders[0]) == FILES

    def test_a_slow_answer_runs_into_the_time_limit_of_the_client(self, hub: Hub) -> None:
        """Much longer than the limit, so that a busy machine changes nothing."""
        hub.faults.slow("config.json", 2, method="HEAD")
        code = """
        from huggingface_hub import get_hf_file_metadata
        try:
            get_hf_file_metadata("%s/org/name/resolve/main/config.json", timeout=0.2)
        except Exception as error:
            print(type(error).__name__)
        """
        lines = [line.removeprefix("        ") for line in (code % hub.url).splitlines()]
        assert run_child("\n".join(lines)) == "ReadTimeout\n"


class TestLimit:
    def test_all_connections_share_the_rate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Clock:
            now = 1000.0

            def monotonic(self) -> float:
                return self.now

            def sleep(self, seconds: float) -> None:
                self.now += seconds

        clock = Clock()
        monkeypatch.setattr(limiting, "time", clock)
        limit = limiting.Limit(1_000_000)
        for _ in range(200):
            limit.wait_for(50_000)
        assert clock.now - 1000.0 == pytest.approx(10, abs=0.1)
        limit.rate = None
        limit.wait_for(1 << 40)
        assert clock.now - 1000.0 == pytest.approx(10, abs=0.1)


class TestXet:
    XET = sha256(b"any hash will do")

    def test_hashes_are_announced(self, hub: Hub, api: HfApi) -> None:
        hub.add("org/name", FILES, xet={"vae/model.safetensors": self.XET})
        (found,) = api.get_paths_info("org/name", ["vae/model.safetensors"])
        assert isinstance(found, RepoFile)
        assert found.xet_hash == self.XET
        address = f"{hub.url}/org/name/resolve/main/vae/model.safetensors"
        assert api.get_hf_file_metadata(url=address).xet_file_data is None
        hub.xet_headers = True
        data = api.get_hf_file_metadata(url=address).xet_file_data
        assert data is not None
        assert data.file_hash == self.XET
        assert data.refresh_route.startswith(hub.url)

    @has_shared_store
    def test_a_client_finds_the_file_in_its_shared_store(self, hub: Hub, tmp_path: Path) -> None:
        pytest.importorskip("huggingface_hub.utils._shared_blobs", reason="from 2.4 on")
        hub.add("org/name", FILES, xet={"vae/model.safetensors": self.XET})
        shared = tmp_path / "cache" / "blobs"
        (shared / self.XET[:2]).mkdir(parents=True)
        (shared / ".huggingface-shared-blobs").write_text("1\n", "utf-8")
        (shared / self.XET[:2] / self.XET).write_bytes(WEIGHTS)
        code = "from huggingface_hub import snapshot_download; snapshot_download('org/name')"
        cache = {"HF_HUB_DISABLE_XET": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
        run_child(code, **(hub.environment | cache))
        assert sorted(str(each.file) for each in hub.gets()) == [
            "org/name/config.json",
            "org/name/vae/config.json",
        ]
        (snapshot,) = (tmp_path / "cache" / "models--org--name" / "snapshots").iterdir()
        assert contents(snapshot) == FILES


class TestProcess:
    def test_a_folder_is_served_by_a_process_of_its_own(self, tmp_path: Path) -> None:
        for kind, name in (("models", "one"), ("datasets", "two")):
            (tmp_path / "root" / kind / "org" / name).mkdir(parents=True)
            (tmp_path / "root" / kind / "org" / name / "x.bin").write_bytes(WEIGHTS)
        with HubProcess(tmp_path / "root", bandwidth=50_000_000) as hub:
            assert hub.environment["HF_ENDPOINT"] == hub.url
            options = {"endpoint": hub.url, "cache_dir": tmp_path / "cache", "token": False}
            one = snapshot_download("org/one", **options)  # type: ignore[call-overload]
            assert contents(Path(one)) == {"x.bin": WEIGHTS}
            assert hub.fetched_bytes("org/one") == len(WEIGHTS)
            hub.set(bandwidth=None, cdn=True)
            hub.clear()
            two = snapshot_download("org/two", repo_type="dataset", **options)  # type: ignore[call-overload]
            assert contents(Path(two)) == {"x.bin": WEIGHTS}
            assert [each.origin for each in hub.gets()] == ["cdn"]
            (tmp_path / "more.d").mkdir()
            (tmp_path / "more.d" / "y.json").write_bytes(b"{}")
            commit = hub.add_folder("org/more", tmp_path / "more.d")
            assert Path(snapshot_download("org/more", **options)).name == commit  # type: ignore[call-overload]
            address = hub.url
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(address)  # noqa: S310 - the loopback

    def test_it_needs_nothing_but_the_standard_library(self) -> None:
        code = "import sys; import tests.hub_server.process; print(*sys.modules)"
        root = str(Path(__file__).resolve().parent.parent)
        program = f"import sys; sys.path.append({root!r})\n{code}"
        command = [sys.executable, "-I", "-S", "-c", program]
        loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert "tests.hub_server.server" in loaded
