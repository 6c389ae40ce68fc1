"""Where programs keep models: variables, config files and default places, on a made-up machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.folders import discover as apps
from smartcache.folders.discover import discover_folders as discover
from smartcache.folders.discover import places
from smartcache.folders.programs import PROGRAMS, TABLE, identify, identify_names
from tests.folders import trees
from tests.processes.children import NOBODY, Child, folder_of

if sys.platform == "win32":
    pytest.skip("places and symlinks as POSIX has them", allow_module_level=True)

Entry = str | tuple[str, str | bytes]
"""A folder to make, or a file and its text; HOME, ROOT and AT are those of the machine."""
Case = tuple[Sequence[Entry], Mapping[str, str], Sequence[str]]
"""What is there, the variables, and what is found: "program: path (how)"."""


class Bare:
    """A machine without anything, in a folder of its own."""

    def __init__(self, top: Path, patch: pytest.MonkeyPatch) -> None:
        self.home, self.root, self.at = top / "home", top / "root", top / "at"
        self.home.mkdir(parents=True)
        for name in trees.VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(self.home))
        patch.setattr(apps, "ROOT", self.root)
        self._patch = patch

    def text(self, text: str) -> str:
        places = {"HOME": self.home, "ROOT": self.root, "AT": self.at}
        return re.sub(r"\b(HOME|ROOT|AT)\b", lambda found: str(places[found[0]]), text)

    def make(self, there: Sequence[Entry], variables: Mapping[str, str]) -> None:
        for entry in there:
            if isinstance(entry, str):
                Path(self.text(entry)).mkdir(parents=True, exist_ok=True)
            else:
                data = self.text(entry[1]) if isinstance(entry[1], str) else entry[1]
                trees.write(Path(self.text(entry[0])), data)
        for name, value in variables.items():
            self._patch.setenv(name, self.text(value))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Bare]:
    """Gives a new machine each time."""
    return lambda: Bare(tmp_path / str(len(os.listdir(tmp_path))), monkeypatch)


@pytest.fixture
def home(bare: Callable[[], Bare]) -> Path:
    """The home of a machine without anything else."""
    return bare().home


def found() -> list[str]:
    """What is found, when nothing was wrong."""
    discovery = discover()
    assert discovery.warnings == ()
    return [f"{each.program}: {each.path} ({each.found_by})" for each in discovery.folders]


# a whole machine


def test_every_program_of_a_machine_is_found_named_and_in_order(home: Path) -> None:
    assert found() == []
    machine = trees.make_machine(home)
    models = [*machine.unique.values(), *(p for s in machine.shared.values() for p in s.paths)]
    for path in models:
        os.utime(path, (1, 1))
    folders = discover().folders
    assert {path.stat().st_atime for path in models} == {1}, "no model is opened"
    by_path = {each.path: each.program for each in folders}
    assert {machine.folder[name]: name for name in PROGRAMS}.items() <= by_path.items()
    programs = [each.program for each in folders]
    assert programs == sorted(programs, key=PROGRAMS.index)
    assert len(by_path) == len(folders), "each once"
    assert not any(each.is_given for each in folders)
    extra = [each.path for each in folders if each.found_by.startswith("extra_model_paths.yaml")]
    assert extra == [machine.comfyui_extra], "siblings of the extra paths are one folder"


def test_the_places_for_a_hint_are_those_in_force(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", "/srv/ollama")
    shown = places()
    assert {program for program, _ in shown} == set(PROGRAMS)
    assert len(shown) <= 15
    assert ("Ollama", Path("/srv/ollama")) in shown
    assert ("Ollama", home / ".ollama/models") in shown
    assert ("ComfyUI", home / "ComfyUI/models") in shown


def test_every_variable_of_the_table_is_unset_by_the_tests() -> None:
    """Else they would find the models of whoever runs them."""
    roots = [place for program in TABLE for place in program.roots]
    named = {place[1:].partition("/")[0] for place in roots if place.startswith("$")}
    assert named <= set(trees.VARIABLES)


# where it is looked

VARIABLES = {
    "HF_HUB_CACHE": ("", "Hugging Face"),
    "HUGGINGFACE_HUB_CACHE": ("", "Hugging Face"),
    "HF_HOME": ("/hub", "Hugging Face"),
    "XDG_CACHE_HOME": ("/huggingface/hub", "Hugging Face"),
    "OLLAMA_MODELS": ("", "Ollama"),
    "COMFYUI_PATH": ("/models", "ComfyUI"),
    "COMFYUI_MODEL_PATH": ("", "ComfyUI"),
    "INVOKEAI_ROOT": ("/models", "InvokeAI"),
    "MODELSCOPE_CACHE": ("", "ModelScope"),
    "XDG_DATA_HOME": ("/nomic.ai/GPT4All", "GPT4All"),
}
DEFAULTS = {
    "HOME/comfyui/models": "ComfyUI",
    "HOME/Documents/ComfyUI/models": "ComfyUI",
    "HOME/comfy/ComfyUI/models": "ComfyUI",
    "ROOT/opt/ComfyUI/models": "ComfyUI",
    "ROOT/workspace/ComfyUI/models": "ComfyUI",
    "ROOT/workspace/stable-diffusion-webui/models": "A1111",
    "ROOT/workspace/stable-diffusion-webui-forge/embeddings": "Forge",
    "ROOT/usr/share/ollama/.ollama/models": "Ollama",
    "ROOT/var/lib/ollama": "Ollama",
    "HOME/.cache/lm-studio/models": "LM Studio",
    "HOME/Library/Application Support/nomic.ai/GPT4All": "GPT4All",
    "HOME/pinokio/cache": "Pinokio",
    "HOME/pinokio/api/some.git/models": "Pinokio",
}

UNIT = "ROOT/etc/systemd/system/ollama.service"
HUB, DEFAULT = "HOME/.cache/huggingface/hub", "default place"
INVOKEAI, DESKTOP = "HOME/invokeai/invokeai.yaml", "HOME/.config/ComfyUI"
EXTRA, HOW = "HOME/ComfyUI/extra_model_paths.yaml", "(extra_model_paths.yaml of HOME/ComfyUI)"
OWN = f"ComfyUI: HOME/ComfyUI/models ({DEFAULT})"
CASES: dict[str, Case] = {
    **{
        name: ([f"AT{below}"], {name: "AT"}, [f"{program}: AT{below} ({name})"])
        for name, (below, program) in VARIABLES.items()
    },
    **{
        place: ([place], {}, [f"{program}: {place} ({DEFAULT})"])
        for place, program in DEFAULTS.items()
    },
    # several places of one program
    "the default place besides that of the variable": (
        [HUB, "AT/hub"], {"HF_HOME": "AT"},
        ["Hugging Face: AT/hub (HF_HOME)", f"Hugging Face: {HUB} ({DEFAULT})"],
    ),
    "of two variables that say the same the one that wins": (
        ["AT/hub"], {"HF_HOME": "AT", "HF_HUB_CACHE": "AT/hub"},
        ["Hugging Face: AT/hub (HF_HUB_CACHE)"],
    ),
    "a folder in another one is left to that one": (
        ["ROOT/var/lib/ollama/models"], {"OLLAMA_MODELS": "ROOT/var/lib/ollama/models"},
        [f"Ollama: ROOT/var/lib/ollama ({DEFAULT})"],
    ),
    "a tilde is the home": (
        ["HOME/ollama"], {"OLLAMA_MODELS": "~/ollama"},
        ["Ollama: HOME/ollama (OLLAMA_MODELS)"],
    ),
    "nothing there": ([], {"OLLAMA_MODELS": "AT/none"}, []),
    "a file": ([("AT/file", "")], {"OLLAMA_MODELS": "AT/file"}, []),
    "relative directories of XDG, in silence": (
        ["AT/cache/huggingface/hub"], {"XDG_CACHE_HOME": "cache"}, [],
    ),
    "a user without a home": (
        ["ROOT/var/lib/ollama"], {"HOME": "not absolute"},
        [f"Ollama: ROOT/var/lib/ollama ({DEFAULT})"],
    ),
    # config files lead to more
    **{
        line: (
            ["AT", (f"{UNIT}.d/override.conf", f"[Service]\n{line}\n")], {},
            [f"Ollama: AT (override.conf of {UNIT}.d)"],
        )
        for line in (
            'Environment="OLLAMA_MODELS=AT"',
            "Environment=OLLAMA_HOST=0.0.0.0 OLLAMA_MODELS=AT",
            "  Environment = 'PATH=/bin' 'OLLAMA_MODELS=AT'",
        )
    },
    **{
        config: (
            ["AT", (f"HOME/{config}/settings.json", '{"downloadsFolder": "AT", "x": 1}')], {},
            [f"LM Studio: AT (settings.json of HOME/{config})"],
        )
        for config in (".lmstudio", ".config/LM Studio")
    },
    "a service that cannot be understood": (
        [(UNIT, b'Environment="OLLAMA_MODELS=/x\nEnvironment=A\n\xff\nExecStart=x\n')],
        {}, [],
    ),
    "the pointer of LM Studio": (
        ["AT/models", ("HOME/.lmstudio-home-pointer", "AT\n")], {},
        ["LM Studio: AT/models (.lmstudio-home-pointer)"],
    ),
    "the library of Stability Matrix": (
        ["AT/Models", "AT/Packages/ui/models", "AT/Packages/ui/modules",
         "AT/Packages/ui/extensions",
         ("HOME/.config/StabilityMatrix/library.json", '{"LibraryPath": "AT"}')], {},
        ["A1111: AT/Packages/ui/models (Stability Matrix in AT)",
         "Stability Matrix: AT/Models (library.json of HOME/.config/StabilityMatrix)"],
    ),
    "the models of InvokeAI": (
        ["AT", (INVOKEAI, "schema_version: 4.0.2\nmodels_dir: AT\n")], {},
        ["InvokeAI: AT (invokeai.yaml of HOME/invokeai)"],
    ),
    "relative ones, in the old sections": (
        ["HOME/invokeai/weights",
         (INVOKEAI, "InvokeAI:\n  Paths:\n    models_dir: weights\n")], {},
        ["InvokeAI: HOME/invokeai/weights (invokeai.yaml of HOME/invokeai)"],
    ),
    "the desktop app of ComfyUI": (
        ["AT/base/models", "AT/base/custom_nodes", "AT/extra/loras",
         (f"{DESKTOP}/config.json", '{"basePath": "AT/base"}'),
         (f"{DESKTOP}/extra_models_config.yaml", "x:\n  base_path: AT/extra\n  a: loras")],
        {},
        [f"ComfyUI: AT/base/models (config.json of {DESKTOP})",
         f"ComfyUI: AT/extra/loras (extra_models_config.yaml of {DESKTOP})"],
    ),
    "settings without the one that matters": (
        [("HOME/.lmstudio/settings.json", '{"downloadsFolder": null}')], {}, [],
    ),
    "no settings": ([("HOME/.lmstudio/settings.json", "{}")], {}, []),
    "an empty file": ([("HOME/.lmstudio/settings.json", "\n")], {}, []),
    # ComfyUI's example file shares the models of A1111, whose cache is keyed by mtime
    "a single one is taken as it is": (
        ["AT/loras", "AT/private", (EXTRA, "x:\n  base_path: AT\n  loras: loras\n")],
        {}, [f"ComfyUI: AT/loras {HOW}"],
    ),
    "siblings in the home do not make the home one": (
        ["HOME/ComfyUI/models", "HOME/a", "HOME/b",
         (EXTRA, "x:\n  base_path: HOME\n  a: a\n  b: b\n")],
        {}, [OWN, f"ComfyUI: HOME/a {HOW}", f"ComfyUI: HOME/b {HOW}"],
    ),
    "what another program has stays that program's": (
        ["HOME/ComfyUI/models", "HOME/sd-webui/models/Stable-diffusion",
         (EXTRA, "a111:\n  base_path: HOME/sd-webui\n  a: models/Stable-diffusion\n")],
        {}, [OWN, "A1111: HOME/sd-webui/models (default place)"],
    ),
    "and so does a folder in it": (
        ["HOME/ComfyUI/models", "HOME/.lmstudio/models/me/clip",
         (EXTRA, "x:\n  clip: HOME/.lmstudio/models/me/clip\n")],
        {}, [OWN, "LM Studio: HOME/.lmstudio/models (default place)"],
    ),
    "a webui that only ComfyUI knows is called by its name": (
        ["AT/models/Stable-diffusion", "AT/models/Lora", "AT/modules", "AT/extensions",
         (EXTRA, "a111:\n  base_path: AT\n  a: models/Stable-diffusion\n")],
        {}, [f"A1111: AT/models/Stable-diffusion {HOW}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_variables_default_places_and_config_files_lead_to_programs(
    bare: Callable[[], Bare], what: str
) -> None:
    there, variables, expected = CASES[what]
    machine = bare()
    machine.make(there, variables)
    assert found() == [machine.text(each) for each in expected]


def test_a_symlinked_folder_is_found_once_by_its_real_path(home: Path, tmp_path: Path) -> None:
    real = tmp_path / "disk/models"
    real.mkdir(parents=True)
    for name in ("ComfyUI", "comfyui"):
        (home / name).mkdir()
        (home / name / "models").symlink_to(real)
    (home / "stable-diffusion-webui").symlink_to("nowhere")
    assert found() == [f"ComfyUI: {real} (default place)"]


def test_a_webui_is_forge_if_it_looks_like_forge_wherever_it_is(home: Path) -> None:
    for place in ("stable-diffusion-webui", "pinokio/api/forge.git/app"):
        models = trees.webui(home / place, is_forge=True)
        assert f"Forge: {models} (default place)" in found()
    embeddings = home / "stable-diffusion-webui/embeddings"
    assert f"Forge: {embeddings} (default place)" in found()


def test_a_variable_that_cannot_be_meant_is_ignored_with_a_warning(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one; the home, or what holds it."""
    (tmp_path / "models").mkdir()
    (home / "link").symlink_to(home)
    monkeypatch.chdir(tmp_path)
    for value in ("models", "./models", "~nobody-here/models", "/", f"{home}", f"{home}/..",
                  f"{home}/link"):  # fmt: skip
        monkeypatch.setenv("OLLAMA_MODELS", value)
        discovery = discover()
        assert (discovery.folders, len(discovery.warnings)) == ((), 1), value
        assert "OLLAMA_MODELS" in discovery.warnings[0]
        said = os.path.realpath(value) if os.path.isabs(value) else value
        assert said in discovery.warnings[0]


def test_a_place_that_may_not_be_looked_at_is_a_warning() -> None:
    def look() -> tuple[int, tuple[str, ...]]:
        discovery = discover()
        return len(discovery.folders), discovery.warnings

    with folder_of(None) as place, pytest.MonkeyPatch.context() as patch:
        machine = Bare(place / "machine", patch)
        machine.make(["AT/closed/hub"], {"HF_HUB_CACHE": "AT/closed/hub"})
        (machine.at / "closed").chmod(0)
        with Child(look, user=NOBODY if os.geteuid() == 0 else None) as child:
            count, warnings = child.result()
        (machine.at / "closed").chmod(0o755)
    assert count == 0
    assert warnings == (f"{machine.at / 'closed/hub'}: cannot be looked at: Permission denied",)


# config files


def test_a_strange_config_file_is_a_warning_that_names_it(bare: Callable[[], Bare]) -> None:
    settings = ".lmstudio/settings.json"
    cases = [
        (settings, b"{"),
        (settings, b"[]"),
        (settings, b'{"downloadsFolder": 7}'),
        (settings, b'{"downloadsFolder": "\\u0000/"}'),
        (settings, b'{"downloadsFolder": "models"}'),
        (settings, b"[" * 200_000),
        (settings, b" " * (1 << 21)),
        (".lmstudio-home-pointer", b"relative"),
        (".config/StabilityMatrix/library.json", b'{"LibraryPath": []}'),
        (".config/ComfyUI/config.json", b"\xff\xfe"),
        (".config/ComfyUI/extra_models_config.yaml", b"\xff\xfe"),
        ("ComfyUI/extra_model_paths.yaml", b"a: [b"),
        ("invokeai/invokeai.yaml", b"{"),
    ]
    for file, data in cases:
        home = bare().home
        trees.write(home / file, data)
        discovery = discover()
        what = f"{file}: {data[:40]!r}"
        assert (discovery.folders, len(discovery.warnings)) == ((), 1), what
        assert str(home / file) in discovery.warnings[0], what
        assert "\n" not in discovery.warnings[0], what


@pytest.mark.timeout(20)
def test_a_fifo_in_place_of_a_config_file_is_not_waited_for(home: Path) -> None:
    (home / ".lmstudio").mkdir()
    os.mkfifo(home / ".lmstudio/settings.json")
    (warning,) = discover().warnings
    assert warning == f"{home}/.lmstudio/settings.json: cannot be read: not a regular file"


# whose folder a directory is

IDENTIFIED = {
    ".cache/huggingface": "Hugging Face",
    ".cache/huggingface/hub/models--openai--clip-vit-large-patch14": "Hugging Face",
    "ComfyUI": "ComfyUI",
    "stable-diffusion-webui": "A1111",
    "stable-diffusion-webui/embeddings": "A1111",
    "stable-diffusion-webui-forge": "Forge",
    ".ollama": "Ollama",
    ".lmstudio": "LM Studio",
    "invokeai": "InvokeAI",
    "StabilityMatrix": "Stability Matrix",
    "StabilityMatrix/Packages/ComfyUI": "ComfyUI",
    ".cache/modelscope/hub/models/AI-ModelScope/clip-vit-large-patch14": "ModelScope",
    "pinokio": "Pinokio",
    "big disk/models": "ComfyUI",
    "": "",
    "big disk": "",
    "ComfyUI/models/checkpoints": "",
    "missing": "",
    "ComfyUI/main.py": "",
}


def test_the_folders_of_a_machine_are_identified_even_copied_where_a_listing_tells(
    home: Path, tmp_path: Path
) -> None:
    machine = trees.make_machine(home)
    assert {name: identify(path) for name, path in machine.folder.items()} == {
        name: name for name in PROGRAMS
    }
    assert {root: identify(home / root) for root in IDENTIFIED} == IDENTIFIED
    told_by_place = dict.fromkeys(("LM Studio", "InvokeAI", "ModelScope", "GPT4All"), "")
    expected = {name: name for name in PROGRAMS} | told_by_place | {"Pinokio": "ComfyUI"}
    for name, path in machine.folder.items():
        moved = tmp_path / "moved" / name.replace("GPT4All", "x")
        shutil.copytree(path, moved, symlinks=True)
        assert identify(moved) == expected[name], name


def test_an_empty_models_folder_is_known_by_what_lies_beside_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    assert identify(models) == ""
    (tmp_path / "databases").mkdir()
    assert identify(models) == "InvokeAI"


@given(st.frozensets(st.text()), st.text())
def test_any_names_are_answered_with_a_program_or_nothing(
    names: frozenset[str], basename: str
) -> None:
    assert identify_names(names, basename) in {"", *PROGRAMS}


def test_ordinary_folders_are_nobody_s() -> None:
    for names in ({"models"}, {"src", "tests", "api"}, {"vae"}, {"checkpoints"}, {"blobs"}, set()):
        assert identify_names(frozenset(names), "project") == ""
