"""Where programs keep models: variables, config files and default places, on a made-up machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api import PROGRAMS, TABLE, discover, identify, identify_names, places
from tests.api import folders_apps as apps
from tests.folders import trees
from tests.processes.children import NOBODY, Child, folder_of

if sys.platform == "win32":
    pytest.skip("places and symlinks as POSIX has them", allow_module_level=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home on a machine without anything else."""
    for name in trees.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setattr(apps, "ROOT", tmp_path / "root")
    return path


@pytest.fixture
def root(home: Path, tmp_path: Path) -> Path:
    """Stands for "/"."""
    return tmp_path / "root"


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def found() -> list[tuple[str, Path, str]]:
    """Program, path and how it was found, when nothing was wrong."""
    discovery = discover()
    assert discovery.warnings == ()
    return [(each.program, each.path, each.found_by) for each in discovery.folders]


def paths() -> list[Path]:
    return [path for _, path, _ in found()]


# a whole machine


def test_nothing_is_found_on_an_empty_machine(home: Path) -> None:
    assert found() == []


def test_every_program_of_a_machine_is_found_and_named(home: Path) -> None:
    machine = trees.make_machine(home)
    by_path = {path: program for program, path, _ in found()}
    assert {machine.folder[name]: name for name in PROGRAMS}.items() <= by_path.items()


def test_folders_come_in_the_order_of_the_programs_and_each_once(home: Path) -> None:
    trees.make_machine(home)
    programs = [program for program, _, _ in found()]
    assert programs == sorted(programs, key=PROGRAMS.index)
    assert set(programs) == set(PROGRAMS)
    assert len(set(paths())) == len(paths())


def test_folders_are_discovered_not_given(home: Path) -> None:
    trees.make_machine(home)
    assert not any(each.is_given for each in discover().folders)


def test_discovery_opens_no_model(home: Path) -> None:
    machine = trees.make_machine(home)
    models = [*machine.unique.values(), *(p for s in machine.shared.values() for p in s.paths)]
    for path in models:
        os.utime(path, (1, 1))
    discover()
    assert {path.stat().st_atime for path in models} == {1}


def test_a_user_without_a_home_still_has_the_places_of_the_machine(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "not absolute")
    models = folder(root / "usr/share/ollama/.ollama/models")
    assert found() == [("Ollama", models, "default place")]


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


# variables


@pytest.mark.parametrize(
    ("name", "below", "program"),
    [
        ("HF_HUB_CACHE", "", "Hugging Face"),
        ("HUGGINGFACE_HUB_CACHE", "", "Hugging Face"),
        ("HF_HOME", "hub", "Hugging Face"),
        ("XDG_CACHE_HOME", "huggingface/hub", "Hugging Face"),
        ("OLLAMA_MODELS", "", "Ollama"),
        ("COMFYUI_PATH", "models", "ComfyUI"),
        ("COMFYUI_MODEL_PATH", "", "ComfyUI"),
        ("INVOKEAI_ROOT", "models", "InvokeAI"),
        ("MODELSCOPE_CACHE", "", "ModelScope"),
        ("XDG_DATA_HOME", "nomic.ai/GPT4All", "GPT4All"),
        ("APPDATA", "StabilityMatrix/Models", "Stability Matrix"),
    ],
)
def test_a_variable_says_where_a_program_keeps_models(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, below: str, program: str
) -> None:
    models = folder(tmp_path / "elsewhere" / below)
    monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    assert found() == [(program, models, name)]


def test_every_variable_of_the_table_is_unset_by_the_tests() -> None:
    """Else they would find the models of whoever runs them."""
    roots = [place for program in TABLE for place in program.roots]
    named = {place[1:].partition("/")[0] for place in roots if place.startswith("$")}
    assert named <= set(trees.VARIABLES)


def test_what_lies_in_the_default_place_is_found_besides_that_of_the_variable(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = folder(home / ".cache/huggingface/hub")
    new = folder(tmp_path / "new/hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "new"))
    assert found() == [
        ("Hugging Face", new, "HF_HOME"),
        ("Hugging Face", old, "default place"),
    ]


def test_the_variable_that_wins_is_named_when_two_say_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = folder(tmp_path / "hf/hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_CACHE", str(models))
    assert found() == [("Hugging Face", models, "HF_HUB_CACHE")]


@pytest.mark.parametrize("value", ["models", "./models", "~nobody-here/models"])
def test_a_relative_variable_is_ignored_with_a_warning(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    folder(tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLLAMA_MODELS", value)
    discovery = discover()
    assert discovery.folders == ()
    assert len(discovery.warnings) == 1
    assert "OLLAMA_MODELS" in discovery.warnings[0]
    assert value in discovery.warnings[0]


def test_relative_xdg_directories_are_ignored_in_silence(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "cache/huggingface/hub")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert found() == []


def test_a_tilde_in_a_variable_is_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = folder(home / "ollama")
    monkeypatch.setenv("OLLAMA_MODELS", "~/ollama")
    assert found() == [("Ollama", models, "OLLAMA_MODELS")]


@pytest.mark.parametrize("made", ["missing", "a file", "dangling"])
def test_a_variable_that_names_no_directory_finds_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    place = tmp_path / "place"
    if made == "a file":
        place.write_bytes(b"")
    elif made == "dangling":
        place.symlink_to("nowhere")
    monkeypatch.setenv("OLLAMA_MODELS", str(place))
    assert found() == []


# default places


@pytest.mark.parametrize(
    ("place", "program"),
    [
        ("~/comfyui/models", "ComfyUI"),
        ("~/Documents/ComfyUI/models", "ComfyUI"),
        ("~/comfy/ComfyUI/models", "ComfyUI"),
        ("/opt/ComfyUI/models", "ComfyUI"),
        ("/workspace/ComfyUI/models", "ComfyUI"),
        ("/workspace/stable-diffusion-webui/models", "A1111"),
        ("/workspace/stable-diffusion-webui-forge/embeddings", "Forge"),
        ("/usr/share/ollama/.ollama/models", "Ollama"),
        ("/var/lib/ollama", "Ollama"),
        ("~/.cache/lm-studio/models", "LM Studio"),
        ("~/Library/Application Support/nomic.ai/GPT4All", "GPT4All"),
        ("~/pinokio/cache", "Pinokio"),
        ("~/pinokio/api/some.git/models", "Pinokio"),
    ],
)
def test_default_places(home: Path, root: Path, place: str, program: str) -> None:
    models = folder((home if place.startswith("~") else root) / place.lstrip("~/"))
    assert found() == [(program, models, "default place")]


def test_a_symlinked_folder_is_found_once_by_its_real_path(home: Path, tmp_path: Path) -> None:
    real = folder(tmp_path / "disk/models")
    for name in ("ComfyUI", "comfyui"):
        folder(home / name)
        (home / name / "models").symlink_to(real)
    assert found() == [("ComfyUI", real, "default place")]


def test_a_webui_is_forge_if_it_looks_like_forge(home: Path) -> None:
    models = trees.webui(home / "stable-diffusion-webui", is_forge=True)
    assert found() == [
        ("Forge", models, "default place"),
        ("Forge", models.with_name("embeddings"), "default place"),
    ]


def test_a_folder_in_another_one_of_the_same_program_is_left_to_that_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = folder(root / "var/lib/ollama")
    monkeypatch.setenv("OLLAMA_MODELS", str(folder(outer / "models")))
    assert found() == [("Ollama", outer, "default place")]


def test_programs_that_pinokio_installed_keep_their_own_name(home: Path) -> None:
    models = trees.webui(home / "pinokio/api/forge.git/app", is_forge=True)
    assert ("Forge", models, "default place") in found()


@pytest.mark.parametrize("value", ["/", "HOME", "HOME/..", "HOME/link"])
def test_the_home_and_what_holds_it_are_never_model_folders(
    home: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    (home / "link").symlink_to(home)
    place = value.replace("HOME", str(home))
    monkeypatch.setenv("OLLAMA_MODELS", place)
    discovery = discover()
    assert discovery.folders == ()
    assert len(discovery.warnings) == 1
    assert os.path.realpath(place) in discovery.warnings[0]
    assert "OLLAMA_MODELS" in discovery.warnings[0]


def test_a_place_that_may_not_be_looked_at_is_a_warning() -> None:
    def look() -> tuple[int, tuple[str, ...]]:
        discovery = discover()
        return len(discovery.folders), discovery.warnings

    with folder_of(None) as place, pytest.MonkeyPatch.context() as patch:
        folder(place / "closed/hub")
        (place / "closed").chmod(0)
        for name in trees.VARIABLES:
            patch.delenv(name, raising=False)
        patch.setattr(apps, "ROOT", place / "root")
        patch.setenv("HOME", str(place / "home"))
        patch.setenv("HF_HUB_CACHE", str(place / "closed/hub"))
        with Child(look, user=NOBODY if os.geteuid() == 0 else None) as child:
            count, warnings = child.result()
        (place / "closed").chmod(0o755)
    assert count == 0
    assert warnings == (f"{place / 'closed/hub'}: cannot be looked at: Permission denied",)


# config files


@pytest.mark.parametrize(
    "line",
    [
        'Environment="OLLAMA_MODELS={}"',
        "Environment=OLLAMA_HOST=0.0.0.0 OLLAMA_MODELS={}",
        "  Environment = 'PATH=/bin' 'OLLAMA_MODELS={}'",
    ],
)
def test_the_service_of_ollama_says_where_its_models_are(
    root: Path, tmp_path: Path, line: str
) -> None:
    models = folder(tmp_path / "srv")
    drop_in = root / "etc/systemd/system/ollama.service.d/override.conf"
    trees.write(drop_in, "[Service]\n" + line.format(models) + "\n")
    assert found() == [("Ollama", models, f"override.conf of {drop_in.parent}")]


def test_a_service_file_that_cannot_be_understood_names_nothing(root: Path) -> None:
    unit = root / "etc/systemd/system/ollama.service"
    trees.write(unit, b'Environment="OLLAMA_MODELS=/x\nEnvironment=A\n\xff\nExecStart=x\n')
    assert found() == []


def test_the_pointer_file_of_lm_studio_leads_to_its_home(home: Path, tmp_path: Path) -> None:
    models = folder(tmp_path / "lms/models")
    (home / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'lms'}\n")
    assert found() == [("LM Studio", models, ".lmstudio-home-pointer")]


@pytest.mark.parametrize("config", [".lmstudio", ".config/LM Studio"])
def test_the_downloads_folder_of_lm_studio_is_found(
    home: Path, tmp_path: Path, config: str
) -> None:
    models = folder(tmp_path / "llm")
    settings = {"downloadsFolder": str(models), "language": "en"}
    trees.write(home / config / "settings.json", json.dumps(settings))
    assert found() == [("LM Studio", models, f"settings.json of {home / config}")]


def test_the_library_of_stability_matrix_is_found(home: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    models = folder(library / "Models")
    package = trees.webui(library / "Packages/my webui")
    config = home / ".config/StabilityMatrix/library.json"
    trees.write(config, json.dumps({"LibraryPath": str(library)}))
    assert ("Stability Matrix", models, f"library.json of {config.parent}") in found()
    assert ("A1111", package, f"Stability Matrix in {library}") in found()


def test_the_models_dir_of_invokeai_is_found(home: Path, tmp_path: Path) -> None:
    there = folder(tmp_path / "there")
    trees.write(home / "invokeai/invokeai.yaml", f"schema_version: 4.0.2\nmodels_dir: {there}\n")
    assert found() == [("InvokeAI", there, f"invokeai.yaml of {home / 'invokeai'}")]


def test_the_models_dir_of_invokeai_may_be_relative_and_in_the_old_sections(home: Path) -> None:
    there = folder(home / "invokeai/weights")
    text = "InvokeAI:\n  Paths:\n    models_dir: weights\n"
    trees.write(home / "invokeai/invokeai.yaml", text)
    assert found() == [("InvokeAI", there, f"invokeai.yaml of {home / 'invokeai'}")]


def test_the_desktop_app_of_comfyui_is_found(home: Path, tmp_path: Path) -> None:
    models = trees.comfyui(tmp_path / "base")
    extra = folder(tmp_path / "extra/loras")
    config = home / ".config/ComfyUI"
    trees.write(config / "config.json", json.dumps({"basePath": str(tmp_path / "base")}))
    text = f"comfyui_desktop:\n  base_path: {tmp_path / 'extra'}\n  loras: loras\n"
    trees.write(config / "extra_models_config.yaml", text)
    assert found() == [
        ("ComfyUI", models, f"config.json of {config}"),
        ("ComfyUI", extra, f"extra_models_config.yaml of {config}"),
    ]


@pytest.mark.parametrize(
    ("file", "data"),
    [
        (".lmstudio/settings.json", b"{"),
        (".lmstudio/settings.json", b"[]"),
        (".lmstudio/settings.json", b'{"downloadsFolder": 7}'),
        (".lmstudio/settings.json", b'{"downloadsFolder": "\\u0000/"}'),
        (".lmstudio/settings.json", b'{"downloadsFolder": "models"}'),
        (".lmstudio/settings.json", b"[" * 200_000),
        (".lmstudio/settings.json", b" " * (1 << 21)),
        (".lmstudio-home-pointer", b"relative"),
        (".config/StabilityMatrix/library.json", b'{"LibraryPath": []}'),
        (".config/ComfyUI/config.json", b"\xff\xfe"),
        (".config/ComfyUI/extra_models_config.yaml", b"\xff\xfe"),
        ("ComfyUI/extra_model_paths.yaml", b"a: [b"),
        ("invokeai/invokeai.yaml", b"{"),
    ],
)
def test_a_strange_config_file_is_a_warning_that_names_it(
    home: Path, file: str, data: bytes
) -> None:
    trees.write(home / file, data)
    discovery = discover()
    assert discovery.folders == ()
    assert len(discovery.warnings) == 1
    assert str(home / file) in discovery.warnings[0]
    assert "\n" not in discovery.warnings[0]


@pytest.mark.parametrize("data", [b"", b"\n", b"{}", b'{"downloadsFolder": null}'])
def test_a_config_file_without_the_setting_is_no_reason_to_warn(home: Path, data: bytes) -> None:
    trees.write(home / ".lmstudio/settings.json", data)
    assert found() == []


@pytest.mark.timeout(20)
def test_a_fifo_in_place_of_a_config_file_is_not_waited_for(home: Path) -> None:
    folder(home / ".lmstudio")
    os.mkfifo(home / ".lmstudio/settings.json")
    assert len(discover().warnings) == 1


# what ComfyUI's own file names


def test_sibling_folders_of_the_extra_paths_are_one_folder(home: Path) -> None:
    machine = trees.make_machine(home)
    extra = [each for each in found() if each[2].startswith("extra_model_paths.yaml")]
    assert extra == [
        ("ComfyUI", machine.comfyui_extra, f"extra_model_paths.yaml of {home / 'ComfyUI'}")
    ]


def test_a_single_extra_path_is_taken_as_it_is(home: Path, tmp_path: Path) -> None:
    loras = folder(tmp_path / "disk/loras")
    folder(tmp_path / "disk/private")
    trees.comfyui(home / "ComfyUI", f"x:\n  base_path: {tmp_path / 'disk'}\n  loras: loras\n")
    assert loras in paths()
    assert tmp_path / "disk" not in paths()


def test_siblings_in_the_home_do_not_make_the_home_a_model_folder(home: Path) -> None:
    both = [folder(home / "checkpoints"), folder(home / "loras")]
    text = f"x:\n  base_path: {home}\n  checkpoints: checkpoints\n  loras: loras\n"
    trees.comfyui(home / "ComfyUI", text)
    assert set(paths()) == {home / "ComfyUI/models", *both}


def test_folders_of_another_program_stay_that_program_s(home: Path) -> None:
    """ComfyUI's example file shares the models of A1111, whose cache is keyed by mtime."""
    models = trees.webui(home / "stable-diffusion-webui")
    text = f"a111:\n  base_path: {models.parent}\n  checkpoints: models/Stable-diffusion\n"
    text += "  loras: models/Lora\n  embeddings: embeddings\n"
    trees.comfyui(home / "ComfyUI", text)
    assert sorted(found()) == [
        ("A1111", models.with_name("embeddings"), "default place"),
        ("A1111", models, "default place"),
        ("ComfyUI", home / "ComfyUI/models", "default place"),
    ]


def test_a_folder_in_that_of_a_program_is_not_comfyui_s(home: Path) -> None:
    inside = folder(home / ".lmstudio/models/me/clip")
    trees.comfyui(home / "ComfyUI", f"x:\n  clip: {inside}\n")
    assert paths() == [home / "ComfyUI/models", home / ".lmstudio/models"]


def test_a_webui_that_only_comfyui_knows_is_called_by_its_name(home: Path, tmp_path: Path) -> None:
    models = trees.webui(tmp_path / "elsewhere")
    text = f"a111:\n  base_path: {models.parent}\n  checkpoints: models/Stable-diffusion\n"
    trees.comfyui(home / "ComfyUI", text)
    by_path = {path: program for program, path, _ in found()}
    assert by_path[models / "Stable-diffusion"] == "A1111"


# whose folder a directory is


def test_the_folders_of_a_machine_are_identified(home: Path) -> None:
    machine = trees.make_machine(home)
    assert {name: identify(path) for name, path in machine.folder.items()} == {
        name: name for name in PROGRAMS
    }


@pytest.mark.parametrize(
    ("root", "program"),
    [
        (".cache/huggingface", "Hugging Face"),
        (".cache/huggingface/hub/models--openai--clip-vit-large-patch14", "Hugging Face"),
        ("ComfyUI", "ComfyUI"),
        ("stable-diffusion-webui", "A1111"),
        ("stable-diffusion-webui/embeddings", "A1111"),
        ("stable-diffusion-webui-forge", "Forge"),
        (".ollama", "Ollama"),
        (".lmstudio", "LM Studio"),
        ("invokeai", "InvokeAI"),
        ("StabilityMatrix", "Stability Matrix"),
        ("StabilityMatrix/Packages/ComfyUI", "ComfyUI"),
        (".cache/modelscope/hub/models/AI-ModelScope/clip-vit-large-patch14", "ModelScope"),
        ("pinokio", "Pinokio"),
        ("big disk/models", "ComfyUI"),
        ("", ""),
        ("big disk", ""),
        ("ComfyUI/models/checkpoints", ""),
        ("missing", ""),
        ("ComfyUI/main.py", ""),
    ],
)
def test_the_folder_of_a_program_is_identified_too(home: Path, root: str, program: str) -> None:
    trees.make_machine(home)
    assert identify(home / root) == program


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_copied_model_folder_is_known_by_its_listing_where_it_has_one(
    home: Path, tmp_path: Path, name: str
) -> None:
    machine = trees.make_machine(home)
    moved = tmp_path / "moved"
    shutil.copytree(machine.folder[name], moved, symlinks=True)
    told_by_place = {"LM Studio", "InvokeAI", "ModelScope", "GPT4All"}
    expected = "" if name in told_by_place else "ComfyUI" if name == "Pinokio" else name
    assert identify(moved) == expected


def test_an_empty_models_folder_is_known_by_what_lies_beside_it(tmp_path: Path) -> None:
    models = folder(tmp_path / "models")
    assert identify(models) == ""
    folder(tmp_path / "databases")
    assert identify(models) == "InvokeAI"


@given(st.frozensets(st.text()), st.text())
def test_any_names_are_answered_with_a_program_or_nothing(
    names: frozenset[str], basename: str
) -> None:
    assert identify_names(names, basename) in {"", *PROGRAMS}


def test_ordinary_folders_are_nobody_s() -> None:
    for names in ({"models"}, {"src", "tests", "api"}, {"vae"}, {"checkpoints"}, {"blobs"}, set()):
        assert identify_names(frozenset(names), "project") == ""
