"""What Tab offers: quick, from the disk, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.running import ROOT, Here, Smartcache
from tests.store.files import write


def offered(program: Smartcache, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """The words that bash is told for the last one."""
    code = "from smartcache.cli import main; main(prog_name='smartcache')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=program.cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "_SMARTCACHE_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("smartcache", *words)),
            "COMP_CWORD": str(len(words)),
            **(env or {}),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


def test_commands_settings_and_programs(program: Smartcache) -> None:
    assert offered(program, "de") == ["dedup"]
    assert offered(program, "config", "get", "artifacts_t") == ["artifacts_ttl"]
    assert "Hugging-Face" in offered(program, "scan", "--only", "Hugg")


def test_ids_of_undo_without_a_store_and_with_one(
    sc: Here, program: Smartcache, models: Path, home: Path
) -> None:
    assert offered(program, "undo", "") == []
    assert not home.exists()
    sc("add", "--adopt", models / "a.safetensors")
    assert offered(program, "undo", "") == sc("undo", "-q").ids
    (home / "journal.jsonl").write_text("no journal\n")
    assert offered(program, "undo", "") == []


def test_repos_of_the_hf_cache_and_of_one_that_is_named(
    program: Smartcache, tmp_path: Path
) -> None:
    write(tmp_path / "hf/hub/models--org--name/refs/main", b"x")
    write(tmp_path / "hf/hub/datasets--org--data/refs/main", b"x")
    write(tmp_path / "other/models--gpt2/refs/main", b"x")
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": ""}
    assert offered(program, "hub", "rm", "", env=env) == ["datasets/org/data", "org/name"]
    words = ("hub", "rm", "--cache-dir", str(tmp_path / "other"), "")
    assert offered(program, *words, env=env) == ["gpt2"]


def test_names_of_sets(program: Smartcache, home: Path) -> None:
    assert offered(program, "artifacts", "show", "") == []
    (home / "sets" / "latents" / "1a2b").mkdir(parents=True)
    assert offered(program, "artifacts", "show", "") == ["latents"]


def test_the_script_of_each_shell(sc: Here) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_SMARTCACHE_COMPLETE" in sc("completion", shell).stdout
        assert f"completion {shell}" in sc("completion", shell, "--json").json["line"]
    assert sc("completion", code=2).error.endswith("Choose from: bash, zsh, fish")


def test_bash_completes_with_the_script(program: Smartcache, sc: Here, tmp_path: Path) -> None:
    """A real bash takes the script and completes a word of a real command line."""
    script = sc("completion", "bash").stdout
    tool = tmp_path / "smartcache"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from smartcache.cli import main\nmain(prog_name='smartcache')\n"
    )
    tool.chmod(0o755)
    lines = f"""{script}
COMP_WORDS=(smartcache config get artifacts_m); COMP_CWORD=3
_smartcache_completion {tool} artifacts_m get
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["artifacts_max_size"]
