"""The rules that no single module can keep: direction of imports, packaging, the test run."""

from __future__ import annotations

import email
import fnmatch
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import click
import pytest

import smartcache
from smartcache import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "smartcache"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = (
    "torch", "huggingface_hub", "numpy", "diffusers", "transformers", "safetensors", "hf_xet",
    "obstore", "ray",
)  # fmt: skip

NAMES: list[str] = vars(smartcache)["__all__"]
MAX_PUBLIC_NAMES = 20
PUBLIC = (
    "smartcache.auto",
    "smartcache.integrations",
    "smartcache.integrations.comfyui",
    "smartcache.integrations.diffusion_pipe",
    "smartcache.integrations.easydata",
    "smartcache.integrations.mgds",
    "smartcache.integrations.simpletuner",
    "smartcache.integrations.trainers",
    "smartcache.remote",
    "smartcache.training",
)
"""Modules that users import from, besides the package itself."""

TOP_LEVEL = {
    ".ci", ".git", ".gitignore", "LICENSE", "README.md", "docs", "pyproject.toml", "scripts",
    "smartcache", "tests",
}  # fmt: skip


def project() -> dict[str, object]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert isinstance(table, dict)
    return table


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


class TestLayers:
    def test_imports_point_down(self) -> None:
        done = lint_imports(ROOT)
        assert done.returncode == 0, done.stdout

    def test_wrong_imports_are_found(self, tmp_path: Path) -> None:
        """The contracts themselves: each names a fault that they must see."""
        shutil.copytree(PACKAGE, tmp_path / "smartcache")
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        complaints = []
        for module, line, complaint in (
            ("errors.py", "import smartcache.store", "errors is not allowed to import"),
            ("store/statkey.py", "import smartcache.cache", "store is not allowed to import"),
            ("store/statkey.py", "import torch", "not allowed to import torch"),
            ("store/statkey.py", "def f(): import huggingface_hub", "statkey -> huggingface_hub"),
            ("config.py", "import click", "not allowed to import click"),
            ("sizes.py", "import smartcache.progress", "sizes is not allowed to import"),
            (
                "cli/df.py",
                "def f(): import smartcache.artifacts.sets",
                "df -> smartcache.artifacts",
            ),
            ("helpers.py", "", "not listed as layers:\n\n- smartcache.helpers"),
        ):
            with (tmp_path / "smartcache" / module).open("a", encoding="utf-8") as stream:
                stream.write(f"\n{line}\n")
            complaints.append(complaint)
        done = lint_imports(tmp_path)
        assert done.returncode == 1
        assert [each for each in complaints if each not in done.stdout] == []


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False
    )


class TestImport:
    def test_what_must_not_be_loaded_is_installed(self) -> None:
        """Else the tests below would pass for nothing."""
        assert all(map(importlib.util.find_spec, ("torch", "huggingface_hub", "numpy")))

    def test_importing_the_package_loads_none_of_its_modules_and_nothing_heavy(self) -> None:
        loaded = run_python("import sys, smartcache; print(*sys.modules)").split()
        ours = [name for name in loaded if name.startswith("smartcache.")]
        assert (ours, set(HEAVY) & set(loaded)) == ([], set())

    def test_the_public_names_load_nothing_heavy(self) -> None:
        """All in one process: what any of them loads stays loaded."""
        names = ", ".join(NAMES)
        assert loaded_by(f"from smartcache import {names}") == set()

    def test_the_help_text_loads_nothing_heavy(self) -> None:
        assert loaded_by(HELP) == set()

    def test_the_module_runs_as_a_program(self) -> None:
        command = [sys.executable, "-m", "smartcache", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("Usage: ")


HELP = """
import contextlib
from smartcache.cli import main
with contextlib.suppress(SystemExit):
    main(["--help"])
"""


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def loaded_by(code: str) -> set[str]:
    """Which of the heavy packages are in memory after the code has run."""
    output = run_python(f"{code}\nimport sys; print(); print(*sys.modules)")
    return set(HEAVY) & set(output.splitlines()[-1].split())


class TestPublicNames:
    def test_there_are_few(self) -> None:
        """Besides the errors that a program catches."""
        assert len(NAMES) <= MAX_PUBLIC_NAMES

    def test_each_one_exists_and_is_listed(self) -> None:
        """So is every error."""
        assert [name for name in NAMES if getattr(smartcache, name) is None] == []
        assert smartcache.NoSpaceError is errors.NoSpaceError
        assert {*NAMES, "NoSpaceError", "SmartcacheError"} <= set(dir(smartcache))

    def test_another_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = smartcache.nonsense  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="no attribute 'NonsenseError'"):
            _ = smartcache.NonsenseError  # type: ignore[attr-defined]


class TestPackaging:
    def test_it_claims_no_system_on_which_it_was_never_tested(self) -> None:
        classifiers = project()["classifiers"]
        assert isinstance(classifiers, list)
        systems = [each for each in classifiers if each.startswith("Operating System")]
        assert systems == ["Operating System :: POSIX :: Linux"]

    def test_the_installed_version_is_the_one_in_the_source(self) -> None:
        assert importlib.metadata.version(errors.DISTRIBUTION) == smartcache.__version__

    def test_the_command_starts_the_cli(self) -> None:
        (command,) = importlib.metadata.entry_points(group="console_scripts", name="smartcache")
        assert command.value == "smartcache.cli:main"

    def test_torch_comes_only_when_asked_for(self) -> None:
        dependencies = project()["dependencies"]
        assert isinstance(dependencies, list)
        names = {text.split(">")[0] for text in dependencies}
        assert names == {
            "blake3", "click", "filelock", "huggingface_hub", "numpy", "pyyaml", "safetensors",
            "xxhash",
        }  # fmt: skip

    def test_torch_is_pinned_for_the_scripts(self) -> None:
        assert "torch==2.13.0" in (ROOT / "scripts/constraints.txt").read_text("utf-8").split()

    def test_the_wheel_holds_the_package_and_nothing_else(self, tmp_path: Path) -> None:
        wheel = build("wheel", tmp_path)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = f"smartcache_hub-{smartcache.__version__}.dist-info"
            headers = email.message_from_bytes(archive.read(f"{metadata}/METADATA"))
        assert {name.split("/")[0] for name in names} == {"smartcache", metadata}
        assert {relative(path) for path in MODULES} < set(names)
        assert "smartcache/py.typed" in names
        assert {f"smartcache/report/page.{kind}" for kind in ("html", "css", "js")} < set(names)
        assert f"{metadata}/licenses/LICENSE" in names
        assert headers["License-Expression"] == "Apache-2.0"
        assert headers["Requires-Python"] == ">=3.11"
        extras = headers.get_all("Provides-Extra") or []
        assert set(extras) == {
            "torch", "diffusers", "training", "compression", "datasets", "remote", "ray", "test",
            "docs", "all",
        }  # fmt: skip

    def test_a_wheel_of_the_source_archive_runs_in_an_empty_environment(
        self, tmp_path: Path
    ) -> None:
        """With click, and nothing else: neither pip nor the packages that the work needs."""
        for name in ("tree", "sdist", "wheel", "packages"):
            (tmp_path / name).mkdir()
        with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
            archive.extractall(tmp_path, filter="data")
        (source,) = tmp_path.glob("smartcache_hub-*")
        wheel = build("wheel", tmp_path / "wheel", source)
        ours = build("wheel", tmp_path / "tree")
        with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(ours) as other:
            assert sorted(one.namelist()) == sorted(other.namelist())
        python = tmp_path / "env" / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
        pip = (sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-index")
        run(*pip, "--no-deps", wheel)
        (tmp_path / "packages" / "click").symlink_to(Path(click.__file__).parent)
        done = run(python.with_name("smartcache"), "--help", path=tmp_path / "packages")
        assert done.startswith("Usage: smartcache ")
        # The package that has the name `smartcache` on PyPI is installed after it.
        (theirs,) = (tmp_path / "env").glob("lib/*/site-packages/smartcache/__init__.py")
        theirs.write_text('version = "0.0.2"\n')
        with pytest.raises(subprocess.CalledProcessError) as failed:
            run(python.with_name("smartcache"), "doctor", path=tmp_path / "packages")
        assert failed.value.stderr.startswith("Error: Another package called smartcache is in ")
        assert "\nHint: Run 'pip uninstall smartcache'" in failed.value.stderr

    def test_the_source_archive_can_run_its_own_tests(self, tmp_path: Path) -> None:
        with tarfile.open(build("sdist", tmp_path)) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"scripts/test", "scripts/_venv.sh", "tests/conftest.py", "LICENSE"} < names
        assert not {name for name in names if name.startswith(".venv")}


def build(kind: str, directory: Path, source: Path = ROOT) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "-d", str(directory)]
    subprocess.run(command, cwd=source, capture_output=True, check=True)
    (archive,) = directory.iterdir()
    return archive


def run(*command: str | Path, path: Path | None = None) -> str:
    """Run a program outside the project; return what it prints."""
    env = {"PATH": os.environ["PATH"], **({} if path is None else {"PYTHONPATH": str(path)})}
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=True)
    return done.stdout


class TestName:
    def test_what_pip_installs_is_the_name_in_the_hints(self) -> None:
        assert project()["name"] == errors.DISTRIBUTION
        assert importlib.metadata.version(errors.DISTRIBUTION) == smartcache.__version__

    def test_no_text_lets_somebody_install_the_other_package_of_that_name(self) -> None:
        """`smartcache` on PyPI is somebody else's."""
        texts = [
            *ROOT.glob("docs/**/*.md"), *ROOT.glob("scripts/**/*"), *PACKAGE.rglob("*.py"),
            ROOT / "README.md", ROOT / "pyproject.toml",
        ]  # fmt: skip
        found = [
            f"{relative(path)}: {match[0]}"
            for path in texts
            if path.is_file() and path.suffix != ".pyc"
            for match in WRONG_NAME.finditer(path.read_text("utf-8"))
        ]
        assert found == []

    @pytest.mark.parametrize("text", [
        "pip install smartcache", "pip install -U 'smartcache'", "smartcache[torch]",
        "uvx smartcache scan", "uvx --from smartcache smartcache", "pipx install smartcache",
        "uv tool install smartcache", "uv add smartcache", 'pip install "smartcache>=0.1"',
        "pip install --upgrade\n smartcache",
    ])  # fmt: skip
    def test_each_way_to_say_so_is_found(self, text: str) -> None:
        assert WRONG_NAME.search(text)
        assert not WRONG_NAME.search(text.replace("smartcache", errors.DISTRIBUTION, 1))


WRONG_NAME = re.compile(
    r"\bsmartcache\[|"
    r"(?:\binstall|\buvx|\buv add|--from)\s+(?:-\S+\s+)*['\"]?smartcache(?![\w-])"
)


class TestTree:
    def test_nothing_lies_about_at_the_top(self) -> None:
        lines = (ROOT / ".gitignore").read_text("utf-8").split()
        ignored = [line.rstrip("/") for line in lines]
        names = {
            name
            for name in os.listdir(ROOT)
            if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
        }
        assert names <= TOP_LEVEL


def test_collecting_the_tests_loads_nothing_heavy(loaded_by_collecting: list[str]) -> None:
    """Each worker collects all of them, and each fork of a process with torch is slow."""
    assert loaded_by_collecting == []


PLAIN_TESTS = """
def test_passes(): pass
def test_fails(): assert False
"""
TORCH_TESTS = """
import pytest
def test_passes(): pass
def test_errs(no_such_fixture): pass
def test_is_skipped(): pytest.skip("")
"""
FIXTURES = {
    "api.py": "Store = mount_of = None",
    "hub_server/__init__.py": "Hub = None",
    "hub_server/pipelines.py": "Models = make_models = None",
}
"""What the real conftest.py imports: of no use to these tests, and slow to load."""
PYTHON = """#!/bin/sh
if [ "$2 $3" = "pytest -n" ]; then shift 4; set -- -m pytest -n 0 "$@"; fi
exec '{}' "$@"
"""


def make_copy_with_tests(root: Path) -> None:
    """A project with five tests and an environment that is ready; one process runs them."""
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("pretrained", "hub_server"):
        (root / "tests" / name).mkdir(parents=True)
    for name in ("tests/__init__.py", "tests/conftest.py"):
        (root / name).symlink_to(ROOT / name)
    for name, text in FIXTURES.items():
        (root / "tests" / name).write_text(text, "utf-8")
    (root / "tests/test_plain.py").write_text(PLAIN_TESTS, "utf-8")
    (root / "tests/pretrained/test_torch.py").write_text(TORCH_TESTS, "utf-8")
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(sys.executable), "utf-8")
    python.chmod(0o755)
    code = "source scripts/_venv.sh && _wanted >.venv/.installed-test"
    subprocess.run(["bash", "-c", code], cwd=root, check=True)


class TestScripts:
    def test_each_is_executable_and_parses(self) -> None:
        for name in (".ci/run", "scripts/test", "scripts/check", "scripts/mutants"):
            assert os.access(ROOT / name, os.X_OK), name
            subprocess.run(["bash", "-n", str(ROOT / name)], check=True)

    def test_the_whole_run_sees_no_variable_of_the_machine(self, tmp_path: Path) -> None:
        """A variable that happened to be set has hidden a fault before."""
        shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
        (tmp_path / "scripts").mkdir()
        for name in ("check", "test"):
            script = tmp_path / "scripts" / name
            script.write_text("#!/bin/sh\nexec env\n")
            script.chmod(0o755)
        needed = {"PATH": os.environ["PATH"], "HOME": "/a home", "PIP_INDEX_URL": "https://x/ y"}
        done = subprocess.run(
            [tmp_path / ".ci" / "run"],
            env={**needed, "PYTHONUNBUFFERED": "1", "SMARTCACHE_HOME": "/elsewhere"},
            capture_output=True,
            text=True,
            check=True,
        )
        shell_makes = ("PWD=", "SHLVL=", "_=", "OLDPWD=")
        lines = [line for line in done.stdout.splitlines() if not line.startswith(shell_makes)]
        runs = 3 if shutil.which("chromium") else 2
        assert sorted(lines) == sorted(f"{key}={needed[key]}" for key in [*needed] * runs)

    def test_tests_of_ctrl_c_pass_where_ctrl_c_is_ignored(self) -> None:
        """As in a job in the background: processes inherit it."""
        words = "-m pytest -q -n 0 -p no:cacheprovider tests/cli/test_program.py -k at_a_question"
        line = f"trap '' INT; exec '{sys.executable}' {words}"
        done = subprocess.run(
            ["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout

    def test_each_mutant_still_breaks_a_line_of_the_product(self) -> None:
        """`scripts/mutants` runs them; here, that its list fits the code."""
        listed = tomllib.loads((ROOT / "tests/mutants.toml").read_text("utf-8"))["mutant"]
        assert len({each["name"] for each in listed}) == len(listed) >= 40
        for each in listed:
            text = (ROOT / each["file"]).read_text("utf-8")
            assert text.count(each["old"]) == 1, each["name"]
            assert each["new"] != each["old"], each["name"]
            compile(text.replace(each["old"], each["new"]), each["file"], "exec")
            words = itertools.takewhile(lambda word: word != "-k", shlex.split(each["tests"]))
            paths = [ROOT / word.partition("::")[0] for word in words]
            assert paths, each["name"]
            assert all(path.is_file() for path in paths), each["name"]

    def test_help_needs_no_environment(self, tmp_path: Path) -> None:
        """In a copy without .venv, which it must not make."""
        copy = tmp_path / "a copy"
        shutil.copytree(ROOT / "scripts", copy / "scripts")
        for name in ("test", "check", "mutants"):
            command = [str(copy / "scripts" / name), "-h"]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
            assert done.stdout.startswith(f"Usage: scripts/{name} ")
        assert os.listdir(copy) == ["scripts"]

    def test_both_runs_of_the_tests_count(self, tmp_path: Path) -> None:
        """The worse status is the script's, and its last line has the sums, whatever is asked."""
        make_copy_with_tests(tmp_path)

        def run(*words: str) -> tuple[int, list[str]]:
            command = [str(tmp_path / "scripts/test"), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            return done.returncode, [re.sub(r"=+ | in .*", "", line) for line in lines]

        status, lines = run()
        assert (status, lines[-1]) == (1, "2 passed, 2 failed, 1 skipped")
        assert "1 failed, 1 passed, 3 deselected" in lines
        assert lines[-2] == "1 passed, 1 skipped, 2 deselected, 1 error"
        status, lines = run("-k", "passes")
        assert (status, lines[-2:]) == (
            0,
            ["2 passed, 3 deselected", "2 passed, 0 failed, 0 skipped"],
        )
        status, lines = run("--no-such-option")
        assert (status, lines[-1]) == (4, "0 passed, 1 failed, 0 skipped")

    def test_a_machine_without_python_is_told_what_to_install(self, tmp_path: Path) -> None:
        bash = shutil.which("bash")
        assert bash
        code = f"source '{ROOT}/scripts/_venv.sh' && find_python"
        environment = {"PATH": str(tmp_path)}
        command = [bash, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("Error: no Python 3.11 or newer was found.\nHint: ")
