"""Documents of datasets and sets from elsewhere: whatever they say, the answer is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.computed import Made, fill
from tests.cli.running import Here
from tests.store.files import row

Change = Callable[[dict[str, Any]], object]


def put(value: object, *steps: str | int) -> Change:
    """Return a change of what a document has behind some steps."""

    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for step in steps[:-1]:
            inner = inner[step]
        inner[steps[-1]] = value

    return change


def nested(depth: int) -> list[object]:
    made: list[object] = []
    for _ in range(depth):
        made = [made]
    return made


LATENT = ("outputs", "latent")
SOURCE = ("sources", 0)
CHANGES: dict[str, Change] = {
    "a list as the name": put([["photos"]], "name"),
    "no name": lambda document: document.pop("name"),
    "a name that leads away": put("../photos", "name"),
    "NUL in the name": put("pho\0tos", "name"),
    "a number as the format": put(10**30, "format"),
    "no sources": lambda document: document.pop("sources"),
    "sources as a text": put("photos", "sources"),
    "a list as a source": put([[[]]], "sources"),
    "NUL in a folder": put("/photos\0", *SOURCE, "root"),
    "half a character in a folder": put("/photos\ud800", *SOURCE, "root"),
    "a list as a folder": put([["/"]], *SOURCE, "root"),
    "a pattern that is none": put("[z-a]", *SOURCE, "pattern"),
    "no repeats": put(None, *SOURCE, "repeats"),
    "many repeats": put(10**400, *SOURCE, "repeats"),
    "repeats that are no number": put(float("nan"), *SOURCE, "repeats"),
    "a number as a suffix": put([5], *SOURCE, "suffixes"),
    "a dict as sidecars": put({"caption": ".txt"}, *SOURCE, "sidecars"),
    "nested sidecars": put([["caption", [[[".txt"], []]]]], *SOURCE, "sidecars"),
    "NUL in a sidecar": put([["caption", [[".t\0xt", ""]]]], *SOURCE, "sidecars"),
    "a list as metadata": put([1], *SOURCE, "metadata"),
    "a list as outputs": put([], "outputs"),
    "a list as an output": put([[]], *LATENT),
    "NUL in an output": lambda document: document["outputs"].update(
        {"la\0tent": document["outputs"].pop("latent")}
    ),
    "a list as a set": put([["x"]], *LATENT, "set"),
    "a set that leads away": put("../../x", *LATENT, "set"),
    "another id": put("0" * 32, *LATENT, "id"),
    "a list as the id": put([[0]], *LATENT, "id"),
    "no fingerprint": put(None, *LATENT, "fingerprint"),
    "nested reads": put([["file"]], *LATENT, "reads"),
    "no reads": put([], *LATENT, "reads"),
    "a text as reads": put("file", *LATENT, "reads"),
    "0 variations": put(0, *LATENT, "variations"),
    "many variations": put(10**18, *LATENT, "variations"),
    "true variations": put(True, *LATENT, "variations"),
    "half a variation": put(1.5, *LATENT, "variations"),
    "buckets that are none": put("area:0", *LATENT, "buckets"),
    "huge buckets": put("area:99999999999999999999 step:1", *LATENT, "buckets"),
    "a list as buckets": put([[64, 48]], *LATENT, "buckets"),
    "a list as trim": put([], *LATENT, "trim"),
    "failures that are no keys": put({"zz": "no"}, *LATENT, "failed"),
    "failures without reasons": put({"0" * 64: []}, *LATENT, "failed"),
    "nested sets": put([["a"], {}], "sets"),
    "a number as the time": put(5, "created_at"),
    "a text that is no time": put("yesterday\n", "created_at"),
    "a list as what was built": put([1], "built"),
    "nested, as deep as can be read": put(nested(900), "built"),
}
TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a list": b"[]",
    "null": b"null",
    "10,000 levels": b'{"format": 1, "built": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "a number of 10,000 digits": b'{"format": ' + b"9" * 10_000 + b"}",
}


def hostile(good: str) -> dict[str, bytes]:
    found = dict(TEXTS)
    for name, change in CHANGES.items():
        document = json.loads(good)
        change(document)
        found[name] = json.dumps(document).encode()
    return found


def refused(done: Any, what: str) -> None:  # noqa: ANN401 - a result
    """It is an error of one line, and no bug of ours."""
    assert len(done.error) < 500, what
    assert "bug" not in done.stderr.lower(), what


@pytest.fixture
def photos(home: Path, tmp_path: Path) -> Made:
    made = Made(home, tmp_path / "photos")
    made.build()
    return made


@pytest.mark.usefixtures("photos")
def test_a_dataset_from_a_folder(sc: Here, tmp_path: Path) -> None:
    sc("datasets", "export", "photos", "out")
    path = tmp_path / "out/photos/dataset/dataset.json"
    good = path.read_text()
    for what, data in hostile(good).items():
        path.write_bytes(data)
        with row(what):
            for more in ((), ("-n",), ("--json",)):
                refused(
                    sc("--home", tmp_path / "other", "datasets", "import", "out", *more, code=1),
                    what,
                )
            assert not (tmp_path / "other/sets/photos/dataset/dataset.json").exists()
    path.write_text(good)
    sc("--home", tmp_path / "other", "datasets", "import", "out")


@pytest.mark.usefixtures("photos")
def test_a_dataset_that_was_edited(sc: Here, home: Path) -> None:
    path = home / "sets/photos/dataset/dataset.json"
    for what, data in hostile(path.read_text()).items():
        before = path.read_bytes()
        path.write_bytes(data)
        with row(what):
            for words in (("show", "photos"), ("plan", "photos"), ("clean", "photos", "-n")):
                refused(sc("datasets", *words, code=1), what)
            assert "Traceback" not in sc("datasets", "ls").stderr
        path.write_bytes(before)


@pytest.mark.usefixtures("photos")
def test_a_dataset_from_a_remote(sc: Here, tmp_path: Path) -> None:
    sc("remote", "add", "nas", "nas")
    sc("remote", "push", "nas", "photos")
    other = ("--home", tmp_path / "other")
    sc(*other, "remote", "add", "nas", "nas")
    (path,) = (each for each in (tmp_path / "nas/documents/datasets").rglob("*") if each.is_file())
    good = path.read_text()
    inner = json.dumps(json.loads(good)["content"]["document"])
    documents = dict(TEXTS)
    for what, data in hostile(inner).items():
        if what not in TEXTS:
            whole = json.loads(good)
            whole["content"]["document"] = json.loads(data)
            documents[what] = json.dumps(whole).encode()
    for name in ("document", "table"):
        whole = json.loads(good)
        whole["content"][name] = [[]]
        documents[f"a list as the {name}"] = json.dumps(whole).encode()
    for what, data in documents.items():
        path.write_bytes(data)
        with row(what):
            refused(sc(*other, "remote", "pull", "nas", "photos", code=1), what)
    path.write_text(good)
    sc(*other, "remote", "pull", "nas", "photos")


def test_a_set_from_a_folder(sc: Here, home: Path, tmp_path: Path) -> None:
    id_ = fill(home)
    sc("artifacts", "export", "latents", "--folder", "out")
    path = tmp_path / "out/latents" / id_ / "set.json"
    good = path.read_text()
    documents = dict(TEXTS)
    value: object
    for name in json.loads(good):
        for value in (None, [["x"]], {"x": []}, 10**400, "\0", -1, True, float("nan"), nested(900)):
            if (name, value) != ("options", {"x": []}):  # another release may have more of them
                whole = json.loads(good) | {name: value}
                documents[f"{name}: {value!r:.30}"] = json.dumps(whole).encode()
    for name in json.loads(good)["options"]:
        for value in ([["x"]], {"x": []}, 10**400, "\0", -1, nested(900)):
            whole = json.loads(good)
            whole["options"][name] = value
            documents[f"{name}: {value!r:.30}"] = json.dumps(whole).encode()
    other = ("--home", tmp_path / "other")
    for what, data in documents.items():
        path.write_bytes(data)
        with row(what):
            refused(sc(*other, "artifacts", "import", "out", "-n", code=1), what)
    path.write_text(good)
    sc(*other, "artifacts", "import", "out")
