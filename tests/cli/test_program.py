"""The program as others meet it: signals, pipes, full and read-only disks, other users."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from smartcache.cli import main
from smartcache.store.store import Store
from smartcache.system import faults
from tests.cli.running import (
    PATIENCE,
    Here,
    Result,
    Smartcache,
    Terminal,
    command,
    ended_by,
    environment,
)
from tests.store.files import OTHER, WEIGHTS, digest_of, mode_of, snapshot, write

GIGABYTE = 10**9
NOBODY = 65534


@pytest.fixture
def program(home: Path, tmp_path: Path) -> Iterator[Smartcache]:
    """Really started, as others start it."""
    program = Smartcache(cwd=tmp_path, is_warm=False)
    yield program
    program.end()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def sparse(path: Path, size: int) -> Path:
    """A large file that takes no room."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def open_files(pid: int) -> list[str]:
    """The paths of the files that a process has open."""
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry.path))
    return found


class TestInterrupt:
    def test_in_the_middle_of_a_copy_leaves_nothing(
        self, program: Smartcache, tmp_path: Path, home: Path
    ) -> None:
        file = sparse(tmp_path / "big.bin", GIGABYTE)
        process = program.start("add", file)
        written = home / "tmp"
        wait_until(lambda: any(str(written) in each for each in open_files(process.pid)))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert stderr == "Interrupted; what was finished stays, and nothing is left half done.\n"
        assert os.listdir(written) == []
        assert program("ls", "-q").ids == []
        assert program("verify").code == 0

    def test_in_the_middle_of_hashing_clears_the_bar(
        self, program: Smartcache, tmp_path: Path
    ) -> None:
        """The file is not read-only, not linked, not in the history."""
        file = sparse(tmp_path / "big.bin", 12 * GIGABYTE)
        with Terminal(program, "add", "--adopt", file) as terminal:
            terminal.read_until("Adopting")
            terminal.process.send_signal(signal.SIGINT)
            text = terminal.read_to_end()
            assert terminal.process.wait(PATIENCE) == 130
        last = "Interrupted; what was finished stays, and nothing is left half done.\n0 files.*"
        assert re.search(rf"\r[ \r]*\n{last}\n$", text)
        assert mode_of(file) == 0o644
        assert program("undo", "--list", "-q").ids == []

    @pytest.mark.skipif(sys.platform != "linux", reason="/proc")
    def test_in_the_middle_of_verify(self, program: Smartcache, tmp_path: Path, home: Path) -> None:
        file = sparse(tmp_path / "big.bin", GIGABYTE)
        (digest,) = program("add", "--adopt", "-q", file).ids
        process = program.start("verify", "--full")
        wait_until(lambda: str(home / "blobs" / digest[:2] / digest) in open_files(process.pid))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert stderr.startswith("Interrupted; ")
        assert program("ls", "-q").ids == [digest]

    @pytest.mark.parametrize("how", ["--copy", "--adopt"])
    def test_between_any_two_steps_of_add_leaves_no_half(
        self, how: str, sc: Here, models: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At every point: the file is as before, or undo makes it so; the store is sound."""
        before = snapshot(models)
        for number in range(100):
            is_cut = interrupt_at(number, ["add", how, str(models / "a.safetensors")], monkeypatch)
            assert sc("verify", "--full", "--json").json["has_damage"] is False
            assert os.listdir(home / "tmp") == []
            if snapshot(models) != before:
                sc("undo", "--all", "-y")
            assert snapshot(models) == before
            if not is_cut:
                return
            for digest in sc.digests():
                sc("unpin", digest)
            sc("prune", "-y")
        pytest.fail("it never came to an end")

    def test_while_it_waits_for_another_process(
        self, program: Smartcache, sc: Here, models: Path, home: Path
    ) -> None:
        sc("add", "--no-pin", models / "a.safetensors")
        with Store(home) as store, store.locked("test"):
            process = program.start("prune", "-y")
            assert process.stderr is not None
            assert "Waiting: " in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            wait_until(lambda: process.poll() is not None)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert sc.digests() == [digest_of(WEIGHTS)]

    def test_at_a_question(self, sc: Here, program: Smartcache, models: Path) -> None:
        sc("add", "--no-pin", models / "a.safetensors")
        with Terminal(program, "prune") as terminal:
            terminal.read_until("[y/N]")
            assert ended_by(signal.SIGINT, terminal.process) == 130
            assert "Interrupted; " in terminal.read_to_end()
        assert len(sc.digests()) == 1


def interrupt_at(number: int, words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a command with Ctrl-C at its n-th step; say whether it came that far."""
    left = number
    is_cut = False

    def hook(_: str) -> None:
        nonlocal left, is_cut
        left -= 1
        if left == -1:
            is_cut = True
            raise KeyboardInterrupt

    monkeypatch.setattr(faults, "hook", hook)
    done = CliRunner().invoke(main, words)
    monkeypatch.setattr(faults, "hook", None)
    assert done.exit_code == (130 if is_cut else 0), done.output
    assert ("Interrupted; " in done.stderr) == is_cut
    return is_cut


class TestPipes:
    def test_a_reader_that_stops_early_is_no_error(
        self, program: Smartcache, home: Path, tmp_path: Path
    ) -> None:
        files = [write(tmp_path / f"files/{n}", f"{n}".encode()) for n in range(1500)]
        with Store(home) as store:
            assert len(list(store.link_many(files, label="add"))) == len(files)
        for words in (["ls"], ["ls", "-q"], ["ls", "--json"], ["ls", "-v"], ["--help"]):
            process = program.start(*words)
            assert process.stdout is not None
            if words != ["--help"]:
                process.stdout.readline()
            process.stdout.close()
            assert process.stderr is not None
            assert process.stderr.read() == ""
            process.stderr.close()
            assert process.wait(PATIENCE) in (0, 1)

    def test_a_closed_stream_is_no_fault(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        for closed in (">&-", "2>&-", ">&- 2>&-"):
            line = f"{' '.join(command('ls'))} {closed}"
            subprocess.run(["sh", "-c", line], check=True, env=environment(None))

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
    def test_output_that_cannot_be_written_is_an_error(
        self, sc: Here, program: Smartcache, models: Path
    ) -> None:
        sc("add", models / "a.safetensors")
        for words, unbuffered in (
            (["ls"], ""), (["ls", "-q"], "1"), (["ls", "--json"], ""), (["--help"], "1"),
        ):  # fmt: skip
            with open("/dev/full", "w") as full:
                env = {"PYTHONUNBUFFERED": unbuffered}
                process = program.start(*words, stdout=full.fileno(), env=env)
                _, stderr = process.communicate(timeout=PATIENCE)
            assert process.returncode == 1
            assert stderr.startswith("Error: No space left")
            assert [line[:6] for line in stderr.splitlines()] == ["Error:", "Hint: "]

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
    def test_talk_that_cannot_be_written_stops_nothing(
        self, program: Smartcache, models: Path
    ) -> None:
        """The work is done, and the exit code says whether it was; also if the reader is gone."""
        env = {"PYTHONUNBUFFERED": ""}
        with open("/dev/full", "w") as full:
            for words, code in ((["add", "-r", models], 0), (["rm", "-y", "zzzz"], 1)):
                process = program.start(*words, stderr=full.fileno(), env=env)
                process.communicate(timeout=PATIENCE)
                assert process.returncode == code
            process = program.start("zzzz", stdout=full.fileno(), stderr=full.fileno(), env=env)
            assert process.wait(PATIENCE) == 2
        process = program.start("add", write(models / "new.pt", b"new"), stdout=subprocess.DEVNULL)
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(PATIENCE) == 0
        assert len(program("ls", "-q").ids) == 3

    def test_ids_compose_in_a_shell(self, sc: Here, models: Path) -> None:
        sc("add", "--no-pin", "-r", models)
        run = " ".join(command())
        line = f'{run} rm -y $({run} ls -q --filter "size<80KB")'
        subprocess.run(["sh", "-c", line], check=True, env=environment(None), capture_output=True)
        assert sc.digests() == [digest_of(WEIGHTS)]


class TestErrors:
    def test_a_store_of_a_newer_format_is_left_alone(self, sc: Here, home: Path) -> None:
        home.mkdir()
        (home / "format").write_text("2\n")
        for line in ("ls", "df", "verify", "prune -y", "undo", "rm -y abcd1234"):
            done = sc(*line.split(), code=1)
            assert "has format '2'" in done.error, line
            assert "Update smartcache" in done.hint, line
        assert os.listdir(home) == ["format"]

    def test_add_does_not_take_a_folder_of_other_things_for_a_store(
        self, sc: Here, models: Path
    ) -> None:
        before = snapshot(models)
        done = sc("--home", models, "add", models / "a.safetensors", code=1)
        assert "is not a smartcache store" in done.error
        assert snapshot(models) == before

    def test_a_home_that_is_a_file(self, sc: Here, models: Path) -> None:
        home = models / "a.safetensors"
        before = snapshot(models)
        assert str(home) in sc("--home", home, "add", models / "b.safetensors", code=1).error
        assert "There is no store" in sc("--home", home, "ls").stderr
        assert snapshot(models) == before

    def test_a_bad_home_or_setting_is_bad_usage_that_names_its_source(
        self, sc: Here, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for value in ("", "~nobody-of-this-name/x"):
            assert "home" in sc("--home", value, "ls", code=2).error
        monkeypatch.setenv("SMARTCACHE_THREADS", "many")
        done = sc("ls", code=2)
        assert "SMARTCACHE_THREADS" in done.error
        assert done.hint

    def test_debug_shows_the_traceback_and_the_line(self, sc: Here) -> None:
        stderr = sc("--debug", "rm", "-y", "zzzz", code=1).stderr
        assert "Traceback (most recent call last)" in stderr
        assert "\nError: There is no store" in stderr
        assert stderr.count("Hint: ") == 1

    def test_a_global_option_after_the_command_is_refused_with_its_place(self, sc: Here) -> None:
        for option in ("--home", "--debug", "--color"):
            done = sc("ls", option, "x", code=2)
            assert done.hint == f"Write it before the command: 'smartcache {option} ...'."

    def test_debug_shows_what_is_decided(
        self, sc: Here, models: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = logging.getLogger("smartcache.store.test")
        monkeypatch.setattr(faults, "hook", lambda point: log.debug("at %s", point))
        assert "Debug: at put: linked\n" in sc("--debug", "add", models / "a.safetensors").stderr
        assert "Debug: " not in sc("add", models / "sub/c.gguf").stderr

    def test_warnings_of_the_library_are_shown_in_every_mode(
        self, sc: Here, models: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = logging.getLogger("smartcache.store.test")
        monkeypatch.setattr(faults, "hook", lambda point: log.warning("at %s", point))
        for number, option in enumerate(("--json", "-q", "--no-pin")):
            file = write(models / f"{number}.pt", b"%d" % number)
            assert "Warning: at put: linked\n" in sc("add", option, file).stderr

    def test_a_fault_of_ours_is_a_line_too(
        self, sc: Here, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Store(home).close()

        def fail(_: str) -> None:
            raise AssertionError("impossible")

        monkeypatch.setattr(faults, "hook", fail)
        write(home.parent / "x.bin")
        done = sc("add", "x.bin", code=1)
        assert done.error == "AssertionError: impossible"
        assert "--debug" in done.hint


def as_nobody(*words: str | Path) -> Result:
    """Run the program in a child process that has given up all rights."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            done = CliRunner().invoke(main, [str(word) for word in words])
            with os.fdopen(writing, "w") as pipe:
                json.dump([done.exit_code, done.stdout, done.stderr], pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        code, stdout, stderr = json.load(pipe)
    os.waitpid(child, 0)
    return Result(code, stdout, stderr)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can")
class TestOtherUsers:
    @pytest.fixture
    def public(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A directory that everybody can reach, unlike those of pytest."""
        context = click.Context(main)
        for name in main.list_commands(context):  # nobody may not read the source
            main.get_command(context, name)
        with tempfile.TemporaryDirectory() as name:
            os.chmod(name, 0o755)
            monkeypatch.setenv("HOME", name)
            yield Path(name)

    def test_a_home_that_may_not_be_made(self, public: Path) -> None:
        file = write(public / "x.pt")
        done = as_nobody("--home", public / "store", "add", file)
        assert done.code == 1
        assert f"Cannot use the store {public}/store: Permission denied" in done.error
        assert done.hint
        assert os.listdir(public) == ["x.pt"]

    def test_a_store_of_another_user_is_not_written(self, public: Path) -> None:
        home = public / "store"
        file = write(public / "x.pt")
        Here()("--home", home, "add", file)
        file = write(public / "y.pt", OTHER)
        for words in (["add", file], ["prune", "-y"], ["rm", "-y", digest_of(WEIGHTS)]):
            done = as_nobody("--home", home, *words)
            assert done.code == 1
            assert done.error
            assert done.hint
        assert Here()("--home", home, "ls", "-q").ids == [digest_of(WEIGHTS)]

    def test_a_store_that_may_not_be_entered(self, public: Path) -> None:
        home = public / "store"
        Here()("--home", home, "add", write(public / "x.pt"))
        home.chmod(0o700)
        for words in (["ls"], ["df"], ["verify"], ["add", public / "x.pt"], ["dir"], ["undo"]):
            done = as_nobody("--home", home, *words)
            if words != ["dir"]:
                assert done.code == 1
                assert done.error

    def test_a_file_that_may_not_be_read_or_belongs_to_another_is_left(self, public: Path) -> None:
        public.chmod(0o777)
        secret = write(public / "secret.pt", mode=0o600)
        done = as_nobody("--home", public / "store", "add", secret)
        assert done.code == 1
        assert f"{secret}: Permission denied; left as it is" in done.stderr
        theirs = write(public / "theirs.pt")
        done = as_nobody("--home", public / "store", "add", "--adopt", theirs)
        assert done.code == 1
        assert "belongs to another user" in done.stderr
        assert mode_of(theirs) == 0o644

    def test_a_folder_that_may_not_be_listed_is_named(self, public: Path) -> None:
        public.chmod(0o777)
        write(public / "models/x.pt")
        write(public / "models/closed/y.pt")
        (public / "models/closed").chmod(0)
        done = as_nobody("--home", public / "store", "add", "-r", public / "models")
        assert done.code == 1
        assert f"Warning: {public}/models/closed: Permission denied" in done.stderr

    def test_a_link_into_a_directory_that_may_not_be_written(self, public: Path) -> None:
        closed = public / "closed"
        closed.mkdir()
        public.chmod(0o777)
        home = public / "store"
        file = public / "x.pt"
        file.write_bytes(WEIGHTS)
        file.chmod(stat.S_IRUSR | stat.S_IROTH)
        assert as_nobody("--home", home, "add", "-q", file).code == 0
        done = as_nobody("--home", home, "link", digest_of(WEIGHTS), closed / "y.pt")
        assert done.code == 1
        assert "Permission denied" in done.error
        assert os.listdir(closed) == []


@pytest.mark.skipif(sys.platform != "linux", reason="mount namespaces")
class TestSmallDisk:
    def in_namespace(self, where: Path, options: str, script: str) -> Result:
        """Run a shell script in which `$SC` is the program and `where` a filesystem of its own."""
        where.mkdir(exist_ok=True)
        unshare = ["unshare", "--mount"]
        if os.geteuid() != 0:
            unshare += ["--user", "--map-root-user"]
        setup = f"mount -t tmpfs -o {options} tmpfs '{where}' || exit 77\n"
        env = environment({"SC": " ".join(command()), "SMARTCACHE_HOME": str(where / "store")})
        done = subprocess.run(
            [*unshare, "sh", "-c", setup + script],
            cwd=where.parent,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 77 or "unshare" in done.stderr:
            pytest.skip(f"no mount namespace: {done.stderr.strip()}")
        return Result(done.returncode, done.stdout, done.stderr)

    def test_what_fitted_before_the_disk_was_full_is_told_and_kept(self, tmp_path: Path) -> None:
        write(tmp_path / "small.bin", b"s" * 100_000)
        write(tmp_path / "big.bin", b"x" * 3_000_000)
        script = """
            $SC add --json small.bin big.bin; code=$?
            $SC ls -q | wc -l >&2; ls disk/store/tmp >&2; exit $code
        """
        done = self.in_namespace(tmp_path / "disk", "size=2m", script)
        assert done.code == 1
        assert [each["outcome"] for each in done.json["files"]] == ["copied"]
        assert "Error: No space left" in done.stderr
        assert "\nHint: " in done.stderr
        assert done.stderr.endswith("\n1\n")  # and nothing half done

    def test_prune_works_on_a_full_disk(self, tmp_path: Path) -> None:
        write(tmp_path / "x.bin", b"x" * 3_000_000)
        script = """
            $SC add -q --no-pin x.bin > /dev/null && cat /dev/zero > disk/zeros 2> /dev/null
            $SC prune -y --json && $SC ls -q
        """
        done = self.in_namespace(tmp_path / "disk", "size=80m", script)
        assert done.code == 0, done
        assert done.json["freed_size"] >= 3_000_000

    def test_a_disk_too_full_for_the_store_itself(self, tmp_path: Path) -> None:
        write(tmp_path / "x.bin", b"x" * 3000)
        script = "head -c 60000 /dev/zero > disk/zeros; $SC add x.bin"
        done = self.in_namespace(tmp_path / "disk", "size=64k", script)
        assert done.code == 1
        assert done.error
        assert done.hint

    def test_a_link_that_does_not_fit_leaves_nothing(self, tmp_path: Path) -> None:
        write(tmp_path / "big.bin", b"x" * 3_000_000)
        script = """
            export SMARTCACHE_HOME=$PWD/store
            id=$($SC add -q big.bin) && $SC link $id disk/y.bin
            code=$?; ls -A disk; exit $code
        """
        done = self.in_namespace(tmp_path / "disk", "size=1m", script)
        assert done.code == 1
        assert "is free there; nothing was changed" in done.error
        assert done.stdout == ""

    def test_a_store_on_a_read_only_filesystem_or_none(self, tmp_path: Path) -> None:
        write(tmp_path / "x.bin", b"x" * 3000)
        write(tmp_path / "y.bin", b"y" * 3000)
        script = "$SC add -q x.bin && mount -o remount,ro disk && $SC add y.bin"
        done = self.in_namespace(tmp_path / "disk", "size=8m", script)
        assert done.code == 1
        assert done.error
        assert done.hint
        done = self.in_namespace(tmp_path / "disk", "size=8m,ro", "$SC add x.bin")
        assert done.code == 1
        assert "Read-only file system" in done.error
        assert done.hint

    def test_eject_without_room_changes_nothing(self, tmp_path: Path) -> None:
        """Two names that share their bytes would be two files, and there is no room for them."""
        script = """
            head -c 3000000 /dev/urandom > disk/m.bin; touch -d '1 hour ago' disk/m.bin
            id=$($SC add -q --adopt disk/m.bin) && head -c 6300000 /dev/zero > disk/zeros
            $SC link $id disk/copy.bin --kind hardlink > /dev/null
            $SC eject -y; code=$?; $SC ls -q | wc -l; exit $code
        """
        done = self.in_namespace(tmp_path / "disk", "size=10m", script)
        assert done.code == 1
        assert "is free there" in done.error
        assert done.stdout == "1\n"
