"""What Tab offers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.running import ROOT, Here, Smartcache


def offered(program: Smartcache, *words: str) -> list[str]:
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
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


def test_commands_and_options(program: Smartcache) -> None:
    assert offered(program, "de") == ["dedup"]
    assert offered(program, "folders", "ig") == ["ignore"]
    assert offered(program, "scan", "--qui") == ["--quick", "--quiet"]
    assert offered(program, "dedup", "--allow", "m") == ["mode"]


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
COMP_WORDS=(smartcache completion fi); COMP_CWORD=2
_smartcache_completion {tool} fi completion
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fish"]
