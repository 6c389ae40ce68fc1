"""What goes wrong between the Hub and us: its own errors where huggingface_hub raises, else ours.

Most faults are met twice, by huggingface_hub alone and by us, each with a cache of its own.
Whatever happens, nothing wrong is visible, and the next call does what is left.
"""

from __future__ import annotations

import errno
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

import smartcache
from smartcache.errors import DigestMismatchError, NoSpaceError, UnsafeNameError
from tests.hub_server import Commit, Hub
from tests.hub_server.faults import ALWAYS
from tests.store.small_disks import Disk, in_own_namespace

WEIGHTS = random.Random(1).randbytes(300_000)
OTHER = random.Random(2).randbytes(200_000)
FILES = {"config.json": b'{"a": 1}', "unet/model.safetensors": WEIGHTS, "vae/m.safetensors": OTHER}
UNET = "unet/model.safetensors"


class Client:
    """Calls one of the two libraries, with a cache of its own."""

    def __init__(self, hub: Hub, cache: Path, *, is_ours: bool) -> None:
        self.hub = hub
        self.cache = cache
        self._library = smartcache if is_ours else huggingface_hub

    def snapshot(self, name: str = "org/one", **options: object) -> Path:
        where = {"endpoint": self.hub.url, "cache_dir": self.cache, **options}
        return Path(self._library.snapshot_download(name, **where))

    def file(self, path: str, name: str = "org/one", **options: object) -> Path:
        where = {"endpoint": self.hub.url, "cache_dir": self.cache, **options}
        return Path(self._library.hf_hub_download(name, path, **where))

    def visible(self) -> dict[str, bytes]:
        """What programs find in snapshots, by path in the repo."""
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for folder in self.cache.glob("*/snapshots/*")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def ours(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / "store"))
    return Client(hub, tmp_path / "ours", is_ours=True)


@pytest.fixture
def plain(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path / "plain", is_ours=False)


@pytest.fixture
def one(hub: Hub) -> Commit:
    return hub.add("org/one", FILES)


def raised(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - compared with another one
        return error
    return None


def same(ours: Callable[[], object], plain: Callable[[], object]) -> BaseException:
    """Return our error, which is of the very class that huggingface_hub raises alone."""
    expected, found = raised(plain), raised(ours)
    assert expected is not None
    assert type(found) is type(expected), f"{found!r} instead of {expected!r}"
    assert found is not None
    return found


class TestRefused:
    """What the Hub says no to."""

    @pytest.mark.usefixtures("one")
    def test_what_does_not_exist(self, ours: Client, plain: Client) -> None:
        for kind, call in {
            "repo": lambda client: client.snapshot("org/none"),
            "repo of a file": lambda client: client.file("x", "org/none"),
            "revision": lambda client: client.snapshot(revision="v9"),
            "revision of a file": lambda client: client.file("config.json", revision="v9"),
            "file": lambda client: client.file("no.bin"),
        }.items():
            error = same(partial(call, ours), partial(call, plain))
            expected = {
                "repo": errors.RepositoryNotFoundError,
                "revision": errors.RevisionNotFoundError,
                "file": errors.EntryNotFoundError,
            }[kind.split()[0]]
            assert isinstance(error, expected), kind
            assert not ours.visible(), kind

    def test_what_no_repo_can_be_called_or_be(self, ours: Client, plain: Client) -> None:
        for name in ("a/b/c", "org/na me", "org/..", "", "org//x", "a--b/c"):
            error = same(partial(ours.snapshot, name), partial(plain.snapshot, name))
            assert isinstance(error, errors.HFValidationError), name
            same(partial(ours.file, "x", name), partial(plain.file, "x", name))
        same(
            partial(ours.snapshot, repo_type="moddel"), partial(plain.snapshot, repo_type="moddel")
        )
        assert not ours.cache.exists()

    def test_a_gated_repo_without_a_token(self, ours: Client, plain: Client, hub: Hub) -> None:
        hub.add("org/one", FILES, gated=True)
        error = same(ours.snapshot, plain.snapshot)
        assert isinstance(error, errors.GatedRepoError)
        same(partial(ours.file, UNET), partial(plain.file, UNET))
        assert not ours.visible()

    @pytest.mark.usefixtures("one")
    def test_a_gated_repo_whose_bytes_are_known_all_the_same(self, ours: Client, hub: Hub) -> None:
        """The small file has to come from the Hub, which gives it to nobody."""
        ours.snapshot()
        hub.add("org/two", {**FILES, "config.json": b"another"}, gated=True)
        with pytest.raises(errors.GatedRepoError):
            ours.snapshot("org/two")
        hub.tokens = {"hf_good": {"org/two"}}
        path = ours.snapshot("org/two", token="hf_good")  # noqa: S106 - of the test's own Hub
        assert (path / UNET).read_bytes() == WEIGHTS

    def test_a_private_repo(self, ours: Client, plain: Client, hub: Hub) -> None:
        hub.add("org/one", FILES, private=True)
        hub.tokens = {"hf_other": set(), "hf_good": {"org/one"}}
        for token in (None, "hf_other", "hf_bad"):
            same(partial(ours.snapshot, token=token), partial(plain.snapshot, token=token))
            same(partial(ours.file, UNET, token=token), partial(plain.file, UNET, token=token))
            assert not ours.visible(), token
        ours.snapshot(token="hf_good")  # noqa: S106 - of the test's own Hub
        assert ours.visible() == FILES


@pytest.mark.usefixtures("one")
class TestNoAnswer:
    NOWHERE = "http://127.0.0.1:9"

    def test_what_is_cached_whole_is_the_answer(
        self, ours: Client, plain: Client, one: Commit
    ) -> None:
        calls = [partial(client.snapshot, endpoint=self.NOWHERE) for client in (ours, plain)]
        assert isinstance(same(*calls), errors.LocalEntryNotFoundError)
        for client in (ours, plain):
            client.snapshot(allow_patterns="*.json")
        same(*calls)
        path = ours.snapshot()
        assert calls[0]() == path
        assert path.name == one.sha

    @pytest.mark.parametrize("status", [500, 503, 429])
    def test_the_server_has_trouble(
        self, ours: Client, plain: Client, hub: Hub, status: int
    ) -> None:
        hub.faults.status("/revision/", status, times=ALWAYS)
        error = same(ours.snapshot, plain.snapshot)
        assert isinstance(error, errors.LocalEntryNotFoundError)
        hub.faults.clear()
        ours.snapshot()
        assert ours.visible() == FILES

    def test_a_file_cannot_be_had_but_the_others_can(
        self, ours: Client, plain: Client, hub: Hub
    ) -> None:
        hub.faults.status(UNET, 500, times=ALWAYS)
        error = same(ours.snapshot, plain.snapshot)
        assert isinstance(error, errors.HfHubHTTPError)
        assert UNET not in ours.visible()
        hub.faults.clear()
        hub.clear()
        ours.snapshot()
        assert ours.visible() == FILES
        assert hub.gets("vae") == []

    def test_a_listing_comes_at_the_second_attempt(self, ours: Client, hub: Hub) -> None:
        hub.faults.status("/tree/", 503)
        ours.snapshot()
        assert ours.visible() == FILES

    def test_what_huggingface_hub_fetched_after_all_is_proven(self, ours: Client, hub: Hub) -> None:
        """The Hub fails when we ask, and answers when huggingface_hub does, with wrong bytes."""
        hub.faults.status("/revision/", 500)
        hub.faults.wrong_bytes(UNET)
        with pytest.raises(DigestMismatchError, match=UNET):
            ours.snapshot()
        assert UNET not in ours.visible()
        ours.snapshot()
        assert ours.visible() == FILES

    def test_a_cut_transfer_is_tried_again(self, ours: Client, hub: Hub) -> None:
        hub.faults.cut(UNET, after=100_000)
        ours.snapshot()
        assert ours.visible() == FILES
        assert len(hub.gets(UNET)) == 2


@pytest.mark.usefixtures("one")
class TestWrong:
    """What arrives is not what was announced."""

    @pytest.mark.parametrize("path", [UNET, "config.json"])
    def test_bytes(self, ours: Client, hub: Hub, tmp_path: Path, path: str) -> None:
        hub.faults.wrong_bytes(path)
        with pytest.raises(DigestMismatchError, match=path) as caught:
            ours.snapshot()
        kept = caught.value.kept  # type: ignore[attr-defined]
        assert kept.parent == tmp_path / "store" / "bad"
        assert len(kept.read_bytes()) == len(FILES[path])
        assert path not in ours.visible()
        assert FILES.items() >= ours.visible().items()
        ours.snapshot()
        assert ours.visible() == FILES

    def test_bytes_of_one_file(self, ours: Client, hub: Hub) -> None:
        hub.faults.wrong_bytes(UNET)
        with pytest.raises(DigestMismatchError, match=UNET):
            ours.file(UNET)
        assert not ours.visible()
        assert ours.file(UNET).read_bytes() == WEIGHTS

    def test_bytes_in_a_local_dir(self, ours: Client, hub: Hub, tmp_path: Path) -> None:
        hub.faults.wrong_bytes(UNET)
        with pytest.raises(DigestMismatchError, match=UNET):
            ours.snapshot(local_dir=tmp_path / "mine")
        assert not (tmp_path / "mine" / UNET).exists()
        ours.snapshot(local_dir=tmp_path / "mine")
        assert (tmp_path / "mine" / UNET).read_bytes() == WEIGHTS

    @pytest.mark.parametrize(("path", "by"), [(UNET, 1000), (UNET, -1000), ("config.json", 1)])
    def test_size(self, ours: Client, plain: Client, hub: Hub, path: str, by: int) -> None:
        hub.faults.wrong_size(path, by=by)
        error = same(ours.snapshot, plain.snapshot)
        assert isinstance(error, OSError)
        assert path not in ours.visible()
        hub.faults.clear()

    def test_no_size_is_no_obstacle(self, ours: Client, hub: Hub) -> None:
        for path in (UNET, "config.json"):
            hub.faults.no_size(path)
        ours.snapshot()
        assert ours.visible() == FILES

    def test_no_size_and_wrong_bytes(self, ours: Client, hub: Hub) -> None:
        hub.faults.no_size(UNET)
        hub.faults.wrong_bytes(UNET)
        with pytest.raises(DigestMismatchError, match=UNET):
            ours.snapshot()
        assert UNET not in ours.visible()


class TestUnsafe:
    def test_a_name_that_leads_elsewhere_is_refused(
        self, ours: Client, hub: Hub, tmp_path: Path
    ) -> None:
        before = sorted(tmp_path.rglob("*"))
        for name in (
            "../evil.bin", "a/../../evil.bin", "/etc/evil.bin", "..\\evil.bin", "C:\\evil.bin",
            "C:/evil.bin", "a//evil.bin", "./evil.bin", "a/..", "",
        ):  # fmt: skip
            hub.add_raw_listing("org/evil", {name: WEIGHTS, "config.json": b"{}"})
            with pytest.raises(UnsafeNameError, match=re.escape(repr(name))):
                ours.snapshot("org/evil")
            with pytest.raises(UnsafeNameError):
                ours.snapshot("org/evil", local_dir=tmp_path / "deep" / "down" / "here")
            after = [path for path in sorted(tmp_path.rglob("*")) if "store" not in path.parts]
            assert after == before, name
        assert hub.gets() == []

    @pytest.mark.usefixtures("one")
    def test_a_file_asked_for_by_such_a_name_is_refused(self, ours: Client) -> None:
        for name in ("../config.json", "/config.json", "a\\..\\b"):
            with pytest.raises((UnsafeNameError, ValueError)):
                ours.file(name)
        assert not ours.visible()


class TestContradiction:
    def test_bytes_that_the_listing_did_not_announce_are_not_visible(
        self, ours: Client, hub: Hub, one: Commit
    ) -> None:
        """The listing says one hash, the answer to HEAD another: huggingface_hub believes that."""
        hub.faults.wrong_sha(UNET)
        with pytest.raises(DigestMismatchError, match=f"lists {UNET} as"):
            ours.snapshot()
        assert UNET not in ours.visible()
        hub.faults.clear()
        assert ours.snapshot().name == one.sha
        assert ours.visible() == FILES

    def test_a_size_that_only_the_listing_has_wrong_is_no_obstacle(
        self, ours: Client, hub: Hub, tmp_path: Path, one: Commit
    ) -> None:
        hub.faults.wrong_size(UNET, by=1000, times=1)
        assert ours.snapshot().name == one.sha
        assert ours.visible() == FILES
        hub.faults.wrong_size(UNET, by=-1000, times=1)
        path = ours.snapshot(local_dir=tmp_path / "mine")
        assert (path / UNET).read_bytes() == WEIGHTS

    @pytest.mark.usefixtures("one")
    def test_a_wrong_size_in_the_listing_does_not_hide_wrong_bytes(
        self, ours: Client, hub: Hub, tmp_path: Path
    ) -> None:
        """By its size, the file in the `local_dir` is not the one that was announced."""
        hub.faults.wrong_size(UNET, by=1000, times=1)
        hub.faults.wrong_bytes(UNET)
        with pytest.raises(DigestMismatchError, match=UNET):
            ours.snapshot(local_dir=tmp_path / "mine")
        assert not (tmp_path / "mine" / UNET).exists()


@pytest.mark.usefixtures("one")
class TestDisk:
    def test_a_cache_that_is_a_file(self, ours: Client, plain: Client) -> None:
        for client in (ours, plain):
            client.cache.write_text("mine")
        assert isinstance(raised(plain.snapshot), OSError)
        assert isinstance(raised(ours.snapshot), NotADirectoryError)
        assert ours.cache.read_text() == "mine"

    def test_a_disk_that_is_full(self, ours: Client, tmp_path: Path) -> None:
        def work() -> tuple[int | None, dict[str, bytes], dict[str, bytes]]:
            disk = Disk(tmp_path / "disk", 1 << 20)
            disk.fill(but=70)
            ours.cache = disk.point / "hf"
            with warnings.catch_warnings(action="ignore"):
                error = raised(ours.snapshot)
            seen = ours.visible()
            disk.clear()
            ours.snapshot()
            return getattr(error, "errno", None), seen, ours.visible()

        number, seen, after = in_own_namespace(work)
        assert number == errno.ENOSPC
        assert UNET not in seen
        assert FILES.items() >= seen.items()
        assert after == FILES

    def test_a_disk_that_cannot_be_written(self, ours: Client, tmp_path: Path) -> None:
        def work() -> tuple[int | None, list[str]]:
            disk = Disk(tmp_path / "disk", 1 << 20)
            disk.make_read_only()
            ours.cache = disk.point / "hf"
            error = raised(ours.snapshot)
            return getattr(error, "errno", None), [path.name for path in disk.point.iterdir()]

        assert in_own_namespace(work) == (errno.EROFS, [])

    def test_a_store_on_a_full_disk(
        self, ours: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing can be remembered, so nothing is begun; the HF cache stays as it was."""
        monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / "disk" / "store"))

        def work() -> tuple[bool, dict[str, bytes], dict[str, bytes]]:
            disk = Disk(tmp_path / "disk", 4 << 20)
            ours.file("config.json")
            disk.fill()
            error = raised(ours.snapshot)
            seen = ours.visible()
            disk.clear()
            ours.snapshot()
            return isinstance(error, NoSpaceError), seen, ours.visible()

        is_no_space, seen, after = in_own_namespace(work)
        assert is_no_space
        assert FILES.items() >= seen.items()
        assert after == FILES
