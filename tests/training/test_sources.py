"""What sources there are, how they are known again, and what has become of them since."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from PIL import Image, ImageOps, PngImagePlugin

from smartcache.cache import SmartCache
from smartcache.errors import ConfigError, DatasetError, SourcesVanishedError
from smartcache.training import Encoder, Sources
from smartcache.training.look import Listing, stat_key
from smartcache.training.table import SourceTable
from tests.training.conftest import Counting, Looker, Photos, age, names_of, opening

PassTime = Callable[[float], None]


def texts_of(listing: Listing, read: str = "caption") -> list[object]:
    return [
        listing.value(number, read) if listing.has(number, read) else None
        for number in range(len(listing))
    ]


@contextmanager
def nothing_written(looked: Looker) -> Iterator[None]:
    """Check that no transaction is committed meanwhile."""
    with closing(sqlite3.connect(looked.path)) as other:
        version = other.execute("PRAGMA data_version").fetchone()
        yield
        assert other.execute("PRAGMA data_version").fetchone() == version


def changes_of(listing: Listing) -> dict[str, int]:
    return {name: count for name, count in listing.changes.items() if count}


class TestWhere:
    def test_a_folder_is_all_images_below_it_in_order(self, looked: Looker, photos: Photos) -> None:
        for name in ("b.png", "a.jpg", "deep/er/c.webp", "deep.png", "z/a.PNG"):
            photos.add(name)
        (photos.path / "notes.txt").write_text("no image")
        expected = ["a.jpg", "b.png", "deep.png", "deep/er/c.webp", "z/a.PNG"]
        assert looked.names(photos.path) == expected

    def test_hidden_files_and_folders_are_left_out(self, looked: Looker, photos: Photos) -> None:
        for name in ("a.png", ".b.png", ".trash/c.png", "d/.e/f.png"):
            photos.add(name)
        with opening(photos.path) as opened:
            assert looked.names(photos.path) == ["a.png"]
        assert set(opened) == {"a.png"}

    def test_suffixes_say_what_is_an_item(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        (photos.path / "b.TXT").write_text("words")
        (photos.path / "noextension").write_text("words")
        assert looked.names(Sources(photos.path, suffixes=".txt")) == ["b.TXT"]
        assert looked.names(Sources(photos.path, suffixes=(".txt", ".PNG"))) == ["a.png", "b.TXT"]

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*.png", ["a1.png", "a2.png", "b.png"]),
            ("*/*.png", ["sub/a3.png", "sub/c.png"]),
            ("**/*.png", ["a1.png", "a2.png", "b.png", "sub/a3.png", "sub/c.png", "sub/x/a4.png"]),
            ("**/a*.png", ["a1.png", "a2.png", "sub/a3.png", "sub/x/a4.png"]),
            ("**", ["a1.png", "a2.png", "b.png", "sub/a3.png", "sub/c.png", "sub/x/a4.png"]),
            ("s*/**", ["sub/a3.png", "sub/c.png", "sub/x/a4.png"]),
            ("a?.png", ["a1.png", "a2.png"]),
            ("a[13].png", ["a1.png"]),
            ("[!a]*.png", ["b.png"]),
            ("sub/*.png", ["a3.png", "c.png"]),
            ("*.jpg", []),
        ],
    )
    def test_a_pattern_chooses_files(
        self, looked: Looker, photos: Photos, pattern: str, expected: list[str]
    ) -> None:
        for name in ("a1.png", "a2.png", "b.png", "sub/a3.png", "sub/c.png", "sub/x/a4.png"):
            photos.add(name)
        assert looked.names(Sources(f"{photos.path}/{pattern}")) == expected

    def test_a_star_stops_at_a_folder(self, looked: Looker, photos: Photos) -> None:
        photos.add("albums/b.png")
        photos.add("albums/a.png")
        assert looked.names(Sources(f"{photos.path}/**/a*.png")) == ["albums/a.png"]

    def test_what_does_not_fit_a_pattern_is_not_read(self, looked: Looker, photos: Photos) -> None:
        """A pattern in a home folder must not hash all images below it."""
        for name in ("a.png", "b.png", "sub/a.png", "sub/deep/a.png"):
            photos.add(name, "words")
        sources = Sources(f"{photos.path}/a*.png", sidecars={"caption": ".txt"})
        with opening(photos.path) as opened:
            assert texts_of(looked(sources, "caption")) == ["words"]
        assert set(opened) == {"a.png", "a.txt"}

    @pytest.mark.parametrize(
        ("pattern", "entered"),
        [
            ("*.png", ["."]),
            ("*/*.png", [".", "a", "b"]),
            ("a/*.png", ["a"]),
            ("[a]/*/*.png", [".", "a", "a/x"]),
            ("?/**/*.png", [".", "a", "a/x", "a/x/y", "b", "b/z"]),
            ("**/*.png", [".", "a", "a/x", "a/x/y", "b", "b/z"]),
        ],
    )
    def test_folders_that_cannot_fit_a_pattern_are_not_listed(
        self,
        looked: Looker,
        photos: Photos,
        monkeypatch: pytest.MonkeyPatch,
        pattern: str,
        entered: list[str],
    ) -> None:
        for name in ("a/x/y", "b/z"):
            (photos.path / name).mkdir(parents=True)
        real, listed = os.scandir, []

        def scandir(path: bytes) -> AbstractContextManager[Iterator[os.DirEntry[bytes]]]:
            listed.append(os.path.relpath(os.fsdecode(path), photos.path))
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scandir)
            looked(Sources(f"{photos.path}/{pattern}"))
        assert listed == entered

    def test_a_folder_named_like_a_pattern_is_a_folder(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("best [2024]/a.png")
        photos.add("best 2/b.png")
        assert looked.names(photos.path / "best [2024]") == ["a.png"]

    def test_a_relative_path_means_the_same_from_everywhere(
        self, looked: Looker, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        photos.add("a.png")
        monkeypatch.chdir(photos.path.parent)
        sources = Sources("photos")
        monkeypatch.chdir("/")
        assert looked.names(sources) == ["a.png"]

    def test_a_list_of_files_keeps_its_order_and_takes_any_suffix(
        self, looked: Looker, photos: Photos
    ) -> None:
        paths = [photos.add("b.png"), photos.add("a.png"), photos.path / "c.dat"]
        paths[2].write_bytes(b"data")
        expected = [str(path) for path in paths]
        assert looked.names(Sources(paths)) == expected
        assert looked.names(Sources(str(path) for path in paths)) == expected

    def test_a_file_listed_twice_is_two_items_and_read_once(
        self, looked: Looker, photos: Photos
    ) -> None:
        path = photos.add("a.png", "words")
        with opening(photos.path) as opened:
            listing = looked(Sources([path, path], sidecars={"caption": ".txt"}), "caption")
        assert texts_of(listing) == ["words", "words"]
        assert Counter(opened)["a.txt"] == 1
        assert listing.reads["file"][0].tolist() == listing.reads["file"][1].tolist()

    def test_the_same_folder_twice_is_its_items_twice(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        with opening(photos.path) as opened:
            listing = looked(Sources(photos.path) + Sources(photos.path, repeats=3))
        once = len(opened)
        with opening(photos.path) as opened:
            looked(photos.path)
        assert len(opened) == once
        assert names_of(listing) == ["a.png", "a.png"]
        assert listing.repeats.tolist() == [1.0, 3.0]

    def test_folders_whose_names_begin_alike_are_told_apart(
        self, looked: Looker, photos: Photos
    ) -> None:
        for name in ("one/a.png", "one-more/b.png", "one2/c.png"):
            photos.add(name)
        sources = Sources(photos.path / "one-more") + Sources(photos.path / "one")
        assert names_of(looked(sources)) == ["b.png", "a.png"]
        assert names_of(looked(sources, trust=True)) == ["b.png", "a.png"]

    def test_several_kinds_are_added_in_order(self, looked: Looker, photos: Photos) -> None:
        photos.add("one/a.png")
        listed = photos.add("two/b.png")
        sources = (
            Sources(photos.path / "one", repeats=2)
            + Sources.table([{"caption": "words", "name": "mine"}], repeats=0.5)
            + Sources([listed])
        )
        listing = looked(sources)
        assert names_of(listing) == ["a.png", "mine", str(listed)]
        assert listing.repeats.tolist() == [2.0, 0.5, 1.0]

    def test_a_hidden_file_that_is_listed_is_an_item_of_the_list_alone(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        hidden = [photos.add(".b.png"), photos.add(".c/d.png")]
        listing = looked(Sources(photos.path) + Sources(hidden))
        assert names_of(listing) == ["a.png", *map(str, hidden)]

    def test_sources_without_items_are_warned_of(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        sources = Sources(photos.path) + Sources(photos.path, suffixes=".wav") + Sources([])
        assert looked(sources).warnings == [f"{photos.path} has no items", "the list has no items"]

    def test_a_folder_that_never_was_is_an_error(self, looked: Looker, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match="There is no folder") as caught:
            looked(tmp_path / "nowhere")
        assert not isinstance(caught.value, SourcesVanishedError)
        assert caught.value.hint

    def test_a_file_is_no_folder(self, looked: Looker, photos: Photos) -> None:
        with pytest.raises(DatasetError, match="There is no folder"):
            looked(photos.add("a.png"))


class TestRows:
    def test_a_jsonl_names_files_beside_itself(self, looked: Looker, photos: Photos) -> None:
        photos.add("images/a.png")
        photos.add("b.png")
        rows = [
            {"file": "images/a.png", "caption": "first"},
            {"file_name": "b.png", "caption": "second"},
            {"caption": "third"},
            {"file": None, "caption": None, "name": "nothing"},
        ]
        path = photos.path / "list.jsonl"
        path.write_text("\ufeff" + "\r\n\n".join(map(json.dumps, rows)), "utf-8")
        listing = looked(Sources.jsonl(path), "caption")
        assert names_of(listing) == ["images/a.png", "b.png", "list.jsonl:3", "nothing"]
        assert texts_of(listing) == ["first", "second", "third", None]
        assert [listing.path(number) for number in range(4)] == [
            photos.path / "images" / "a.png", photos.path / "b.png", None, None
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"a": 1', "list.jsonl:2 is not JSON"),
            ("[1]", "list.jsonl:2 is not a JSON object"),
            ("[" * 100_000, "list.jsonl:2 is not JSON"),
            ('{"a": ' + "9" * 5000 + "}", "list.jsonl:2 is not JSON"),
        ],
    )
    def test_a_line_that_is_no_object_is_named(
        self, looked: Looker, tmp_path: Path, line: str, message: str
    ) -> None:
        path = tmp_path / "list.jsonl"
        path.write_text('{"a": 1}\n' + line)
        with pytest.raises(DatasetError, match=message):
            looked(Sources.jsonl(path), "a")

    def test_a_jsonl_in_another_encoding_is_an_error(self, looked: Looker, tmp_path: Path) -> None:
        path = tmp_path / "list.jsonl"
        path.write_bytes('{"a": "Käse"}'.encode("latin-1"))
        with pytest.raises(DatasetError, match="cannot be read"):
            looked(Sources.jsonl(path), "a")

    def test_a_jsonl_that_is_not_there_is_said_so(self, looked: Looker, tmp_path: Path) -> None:
        with pytest.raises(SourcesVanishedError, match="There is no file"):
            looked(Sources.jsonl(tmp_path / "list.jsonl"))

    def test_an_unchanged_jsonl_is_not_read_again_and_an_edited_one_is(
        self, looked: Looker, tmp_path: Path, pass_time: PassTime
    ) -> None:
        path = tmp_path / "lists" / "list.jsonl"
        path.parent.mkdir()
        path.write_text('{"caption": "one"}\n')
        pass_time(60)
        looked(Sources.jsonl(path), "caption")
        with opening(path.parent) as opened:
            assert texts_of(looked(Sources.jsonl(path), "caption")) == ["one"]
        assert opened == []
        path.write_text('{"caption": "two"}\n')
        assert texts_of(looked(Sources.jsonl(path), "caption")) == ["two"]

    def test_another_list_of_the_same_size_is_read(
        self, looked: Looker, tmp_path: Path, pass_time: PassTime
    ) -> None:
        for name in ("one", "two"):
            (tmp_path / name).write_text(json.dumps({"caption": name}))
        pass_time(60)
        assert texts_of(looked(Sources.jsonl(tmp_path / "one"), "caption")) == ["one"]
        assert texts_of(looked(Sources.jsonl(tmp_path / "two"), "caption")) == ["two"]
        assert texts_of(looked(Sources.jsonl(tmp_path / "one"), "caption")) == ["one"]

    def test_values_of_rows_keep_their_kind(self, looked: Looker) -> None:
        values: list[object] = ["x", 1, 1.5, True, [1, [2]], {"a": None}, "", 0]
        listing = looked(Sources.table({"value": each} for each in values), "value")
        assert texts_of(listing, "value") == values
        assert len({digest.tobytes() for digest in listing.reads["value"]}) == len(values)

    def test_a_text_is_never_taken_for_another_value(self, looked: Looker) -> None:
        rows = [{"value": each} for each in (1, "1", "\x001", [1], "[1]", "\x00[1]", None, "null")]
        listing = looked(Sources.table(rows), "value")
        assert len({digest.tobytes() for digest in listing.reads["value"]}) == len(rows)

    def test_half_a_character_is_kept(self, looked: Looker) -> None:
        """JSON can say it, and so can names of files; SQLite and UTF-8 cannot."""
        rows = [{"caption": "\ud83d", "more": ["\udcff"]}]
        listing = looked(Sources.table(rows), "caption")
        assert texts_of(listing) == ["\ud83d"]
        assert listing.values(0) == rows[0]

    def test_paths_in_rows_are_relative_to_the_root(self, looked: Looker, photos: Photos) -> None:
        path = photos.add("sub/a.png")
        given = (Path("sub/a.png"), "./sub/../sub/a.png", str(path))
        rows = [{"file": each} for each in given]
        listing = looked(Sources.table(rows, root=photos.path))
        assert [listing.path(number) for number in range(3)] == [path] * 3

    @pytest.mark.parametrize("file", [5, "", "a\0b", "\ud83d", ["a.png"]])
    def test_what_is_no_path_is_an_error(self, looked: Looker, file: object) -> None:
        with pytest.raises(ConfigError, match="is not a path"):
            looked(Sources.table([{"file": file}]))

    def test_a_row_can_have_sidecars_and_its_own_fields_go_first(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png", "of the file")
        photos.add("b.png", "not this one")
        rows = [{"file": "a.png"}, {"file": "b.png", "caption": "of the row"}]
        sources = Sources.table(rows, root=photos.path, sidecars={"caption": ".txt"})
        assert texts_of(looked(sources, "caption")) == ["of the file", "of the row"]

    def test_a_row_is_found_among_many(self, looked: Looker) -> None:
        """Rows are kept by blocks."""
        rows = [{"caption": f"line\n{number}"} for number in range(600)]
        listing = looked(Sources.table(rows), "caption")
        for number in (0, 255, 256, 511, 512, 599):
            assert listing.values(number) == rows[number]

    def test_a_listing_keeps_its_rows_whatever_others_look_at(self, looked: Looker) -> None:
        """A training goes on while the list is edited, and somebody plans the next one."""
        rows = [{"caption": f"words {number}", "weight": number} for number in range(300)]
        listing = looked(Sources.table(rows), "caption")
        looked(Sources.table([{"caption": "new first"}, *rows[100:]]), "caption")
        assert [listing.values(number) for number in range(300)] == rows
        assert texts_of(listing) == [row["caption"] for row in rows]

    def test_one_changed_row_is_written_with_its_block_alone(self, looked: Looker) -> None:
        rows = [{"caption": f"words {number}"} for number in range(1000)]
        looked(Sources.table(rows), "caption")
        before = looked.contents()["rows"]
        with nothing_written(looked):
            looked(Sources.table(rows), "caption")
        rows[700] = {"caption": "other words"}
        looked(Sources.table(rows), "caption")
        assert len(looked.contents()["rows"] - before) == 1
        looked(Sources.table(rows[:300]), "caption")
        assert sum(data.count("\n") + 1 for _, _, data in looked.contents()["rows"]) == 300  # type: ignore[attr-defined]

    def test_rows_of_a_list_that_is_no_source_any_more_are_forgotten(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        rows = Sources.table([{"caption": "words"}])
        looked(Sources(photos.path) + rows)
        looked(Sources(photos.path))
        assert looked.contents()["rows"] == set()

    def test_a_field_that_no_row_has_is_an_error(self, looked: Looker) -> None:
        with pytest.raises(ConfigError, match="no 'prompt' to read") as caught:
            looked(Sources.table([{"caption": "words"}]), "prompt")
        assert "caption" in str(caught.value.hint)

    def test_a_trusted_list_is_what_it_was(self, looked: Looker, photos: Photos) -> None:
        """Also if some of its files were never there."""
        paths = [photos.add("a.png"), photos.path / "no.png", photos.path / "none.png"]
        before = looked(Sources(paths))
        shutil.rmtree(photos.path)
        after = looked(Sources(paths), trust=True)
        assert names_of(after) == names_of(before)
        assert after.problems == before.problems
        assert set(after.problems) == {1, 2}
        other = Sources([photos.path / "new.png"])
        assert names_of(looked(other, trust=True)) == names_of(before)

    def test_a_trusted_list_whose_files_nobody_has_read_yet_is_one_of_problems(
        self, looked: Looker, photos: Photos
    ) -> None:
        """A process that is killed while it reads has written down the rows, and not all files."""
        paths = [photos.add("a.png"), photos.add("b.png"), photos.add("c.png")]
        looked(Sources(paths))
        (number,) = looked.table.folders().values()
        looked.table.drop_files([(number, b"a.png"), (number, b"c.png")])
        assert set(looked(Sources(paths), trust=True).problems) == {0, 2}
        assert looked(Sources(paths)).problems == {}


class TestLinks:
    def test_a_linked_folder_is_followed(self, looked: Looker, photos: Photos) -> None:
        elsewhere = Photos(photos.path.parent / "elsewhere")
        elsewhere.add("a.png")
        (photos.path / "link").symlink_to(elsewhere.path)
        assert looked.names(photos.path) == ["link/a.png"]

    def test_loops_and_second_ways_to_a_folder_are_walked_once(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("real/a.png")
        (photos.path / "real" / "up").symlink_to(photos.path)
        (photos.path / "z-again").symlink_to(photos.path / "real")
        assert looked.names(photos.path) == ["real/a.png"]

    def test_a_link_to_itself_hurts_nobody(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        (photos.path / "loop").symlink_to("loop")
        (photos.path / "loop.png").symlink_to("loop.png")
        listing = looked(photos.path)
        assert names_of(listing) == ["a.png", "loop.png"]
        assert list(listing.problems) == [1]

    def test_a_link_to_a_file_is_that_file(self, looked: Looker, photos: Photos) -> None:
        path = photos.add("a.png")
        (photos.path / "b.png").symlink_to(path)
        listing = looked(photos.path)
        assert listing.reads["file"][0].tolist() == listing.reads["file"][1].tolist()

    def test_a_broken_link_is_named_and_tried_again_when_it_leads_somewhere(
        self, looked: Looker, photos: Photos
    ) -> None:
        (photos.path / "a.png").symlink_to(photos.path / "later")
        assert looked(photos.path).problems == {0: "No such file or directory"}
        with opening(photos.path) as opened:
            assert looked(photos.path).problems == {0: "No such file or directory"}
        assert opened == []
        photos.add("b.png").rename(photos.path / "later")
        assert looked(photos.path).problems == {}

    def test_what_is_no_file_is_not_opened(self, looked: Looker, photos: Photos) -> None:
        """Opening a pipe would wait for ever."""
        photos.add("a.png")
        os.mkfifo(photos.path / "a.txt")
        os.mkfifo(photos.path / "b.png")
        captions = {"caption": ".txt"}
        assert texts_of(looked(Sources(photos.path, sidecars=captions), "caption")) == [None]
        paths = [photos.path / name for name in ("a.png", "b.png", "a.txt")]
        listing = looked(Sources(paths, sidecars=captions), "caption")
        assert set(listing.problems) == {0, 1, 2}

    def test_what_is_no_file_is_not_tried_again(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        sources = Sources([photos.add("a.png")], sidecars={"caption": ".txt"})
        (photos.path / "a.txt").mkdir()
        pass_time(60)
        assert looked(sources, "caption").problems == {0: "a.txt: it is not a file"}
        with nothing_written(looked):
            assert looked(sources, "caption").problems == {0: "a.txt: it is not a file"}

    def test_a_folder_with_the_suffix_of_an_image_is_a_folder(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("folder.png/a.png")
        assert looked.names(photos.path) == ["folder.png/a.png"]


ODD = (
    b"a:b", b"a b", b"a\nb", b"x.json:y", b"x.json", b"a.b.c", b"\xff\xfe", "ä😀".encode(),
    b"%s'\"",
)  # fmt: skip
"""Names of files, without their suffixes."""


class TestOddNames:
    @pytest.mark.parametrize("stem", ODD)
    def test_a_name_is_a_name(
        self, looked: Looker, photos: Photos, stem: bytes, pass_time: PassTime
    ) -> None:
        folder = os.fsdecode(os.path.join(os.fsencode(photos.path), b"in " + stem))
        path = Photos(Path(folder)).add(os.fsdecode(stem + b".png"), "words")
        sidecars = {"caption": (".json:prompt", ".txt")}
        pass_time(60)
        for sources in (
            Sources(folder, sidecars=sidecars),
            Sources([path], sidecars=sidecars),
            Sources.table([{"file": path.name}], root=folder, sidecars=sidecars),
        ):
            listing = looked(sources, "caption")
            assert listing.path(0) == path
            assert listing.problems == {}
            assert texts_of(listing) == ["words"]
            assert listing.size.tolist() == [[8, 8]]
            with opening(Path(folder)) as opened:
                looked(sources, "caption")
            assert opened == []

    def test_a_dataset_of_odd_names_can_be_built_and_read(
        self, cache: SmartCache, photos: Photos
    ) -> None:
        for stem in ODD:
            photos.add(os.fsdecode(stem + b".png"), f"words of {stem!r}")
        sources = Sources(photos.path, sidecars={"caption": ".txt"})
        encoder = Encoder(Counting("file", "caption"), reads=("file", "caption"), depends_on=1)
        with cache.dataset("odd", sources, both=encoder) as dataset:
            assert dataset.build().encoded == {"both": len(ODD)}
            found = {dataset[number]["name"] for number in range(len(dataset))}
        assert found == {os.fsdecode(stem + b".png") for stem in ODD}

    def test_a_folder_whose_name_is_not_utf_8_can_be_a_dataset(
        self, cache: SmartCache, tmp_path: Path
    ) -> None:
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
        Photos(folder).add("a.png")
        encoder = Encoder(Counting(), reads="file", depends_on=1)
        with cache.dataset("odd", folder, latent=encoder) as dataset:
            assert dataset.build().encoded == {"latent": 1}
        with cache.open_dataset("odd") as again:
            assert again[0]["name"] == "a.png"


def with_sidecar(photos: Photos, name: str, content: str | bytes) -> None:
    photos.add(Path(name).stem.removesuffix("-mask") + ".png")
    data = content if isinstance(content, bytes) else content.encode()
    (photos.path / name).write_bytes(data)


class TestSidecars:
    SIDECARS = {"caption": (".txt", ".json:prompt", ".json:more.text")}  # noqa: RUF012

    def caption(self, looked: Looker, photos: Photos) -> object:
        listing = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption")
        assert len(listing) == 1
        assert not listing.problems
        return texts_of(listing)[0]

    def problem(self, looked: Looker, photos: Photos) -> str:
        listing = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption")
        assert list(listing.problems) == [0]
        return listing.problems[0]

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"words", "words"),
            (b" \n words \t\r\n", "words"),
            (b"\xef\xbb\xbfwords", "words"),
            (b"", ""),
            (b" \n", ""),
            ("Käse 😀".encode(), "Käse 😀"),
            (b"two\nlines", "two\nlines"),
            (b"nul\0inside", "nul\0inside"),
        ],
    )
    def test_a_text_is_its_words(
        self, looked: Looker, photos: Photos, content: bytes, expected: str
    ) -> None:
        with_sidecar(photos, "a.txt", content)
        assert self.caption(looked, photos) == expected

    def test_equal_words_are_one_text(self, looked: Looker, photos: Photos) -> None:
        """In files of any kind, and in rows."""
        for number, content in enumerate(("words", "words\n", "\ufeffwords")):
            with_sidecar(photos, f"{number}.txt", content)
        with_sidecar(photos, "3.json", '{"prompt": " words"}')
        sources = Sources(photos.path, sidecars=self.SIDECARS)
        listing = looked(sources + Sources.table([{"caption": "words"}]), "caption")
        assert len({digest.tobytes() for digest in listing.reads["caption"]}) == 1
        assert len(looked.contents()["texts"]) == 1

    def test_no_text_differs_from_an_empty_one(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        photos.add("b.png", "")
        listing = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption")
        assert texts_of(listing) == [None, ""]

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"a.txt": "one", "a.json": '{"prompt": "two"}'}, "one"),
            ({"a.json": '{"prompt": "two", "more": {"text": "three"}}'}, "two"),
            ({"a.json": '{"more": {"text": "three"}}'}, "three"),
            ({"a.json": '{"prompt": null, "more": {"text": "three"}}'}, "three"),
            ({"a.json": '{"more": "text"}'}, None),
            ({"a.json": "[]"}, None),
            ({"a.json": "{}"}, None),
            ({"a.json": '{"prompt": ""}'}, ""),
            ({}, None),
        ],
    )
    def test_the_first_that_exists_is_taken(
        self, looked: Looker, photos: Photos, files: dict[str, str], expected: str | None
    ) -> None:
        photos.add("a.png")
        for name, content in files.items():
            with_sidecar(photos, name, content)
        assert self.caption(looked, photos) == expected

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("a.txt", b"\xff\xfe", "a.txt: it is not a text in UTF-8"),
            ("a.json", b'{"prompt": ', "a.json: it is not JSON"),
            ("a.json", b'{"prompt": 5}', "a.json: its field prompt is not a text"),
            ("a.json", b'{"prompt": ["a"]}', "a.json: its field prompt is not a text"),
            ("a.json", b'{"prompt": "\xff"}', "a.json: it is not a text in UTF-8"),
            ("a.json", b'{"prompt": "\\ud83d"}', "a.json: it is not a text in UTF-8"),
            ("a.json", b"[" * 100_000, "a.json: it is not JSON"),
            ("a.json", b'{"n": ' + b"9" * 5000 + b"}", "a.json: it is not JSON"),
            ("a.json", b"", "a.json: it is not JSON"),
        ],
    )
    def test_one_that_cannot_be_read_is_a_problem_of_its_item(
        self, looked: Looker, photos: Photos, name: str, content: bytes, reason: str
    ) -> None:
        with_sidecar(photos, name, content)
        assert self.problem(looked, photos).startswith(reason)

    def test_a_mended_one_is_read(self, looked: Looker, photos: Photos) -> None:
        with_sidecar(photos, "a.json", "{")
        self.problem(looked, photos)
        with_sidecar(photos, "a.json", '{"prompt": "words"}')
        assert self.caption(looked, photos) == "words"

    def test_a_later_one_that_appears_first_in_the_order_is_taken(
        self, looked: Looker, photos: Photos
    ) -> None:
        with_sidecar(photos, "a.json", '{"prompt": "json"}')
        assert self.caption(looked, photos) == "json"
        with_sidecar(photos, "a.txt", "text")
        assert self.caption(looked, photos) == "text"
        (photos.path / "a.txt").unlink()
        assert self.caption(looked, photos) == "json"

    def test_one_that_no_encoder_reads_hurts_nobody(self, looked: Looker, photos: Photos) -> None:
        with_sidecar(photos, "a.json", "{")
        assert looked(Sources(photos.path, sidecars=self.SIDECARS)).problems == {}

    def test_a_read_that_sources_do_not_have_is_an_error(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        with pytest.raises(ConfigError, match="has no 'mask' to read") as caught:
            looked(Sources(photos.path, sidecars=self.SIDECARS), "mask")
        assert "caption" in str(caught.value.hint)


class TestMasks:
    MASKS = {"mask": "-mask.png"}  # noqa: RUF012

    def test_a_mask_belongs_to_its_image_and_is_no_item(
        self, looked: Looker, photos: Photos
    ) -> None:
        for name in ("a.png", "a-mask.png", "b.jpg", "b-mask.png", "c.png"):
            photos.add(name)
        listing = looked(Sources(photos.path, sidecars=self.MASKS), "mask")
        assert names_of(listing) == ["a.png", "b.jpg", "c.png"]
        found = [listing.path(number, "mask") for number in range(3)]
        assert found == [photos.path / "a-mask.png", photos.path / "b-mask.png", None]
        assert listing.warnings == []

    def test_a_mask_without_its_image_is_warned_of_and_is_no_item(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        orphan = photos.add("sub/b-mask.png")
        listing = looked(Sources(photos.path, sidecars=self.MASKS), "mask")
        assert names_of(listing) == ["a.png"]
        assert listing.warnings == [f"1 file named like a sidecar of no item, such as {orphan}"]

    def test_an_empty_mask_is_a_problem(self, looked: Looker, photos: Photos) -> None:
        with_sidecar(photos, "a-mask.png", b"")
        listing = looked(Sources(photos.path, sidecars=self.MASKS), "mask")
        assert listing.problems == {0: "a-mask.png: it is empty"}

    def test_sidecars_may_have_the_suffix_of_images(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.jpg")
        photos.add("a.png")
        listing = looked(Sources(photos.path, sidecars={"mask": ".png"}), "mask")
        assert names_of(listing) == ["a.jpg"]
        assert listing.path(0, "mask") == photos.path / "a.png"


class TestMetadata:
    def test_values_for_all(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        sources = Sources(photos.path, metadata={"weight": 0.5, "tags": ("a", "b")})
        sources += Sources.table([{"weight": 2}, {}], metadata={"weight": 1})
        listing = looked(sources)
        expected = [{"weight": 0.5, "tags": ["a", "b"]}, {"weight": 2}, {"weight": 1}]
        assert [listing.values(number) for number in range(3)] == expected


class TestKnownAgain:
    SIDECARS = {"caption": (".txt", ".json:prompt"), "mask": "-mask.png"}  # noqa: RUF012

    def sources(self, photos: Photos) -> Sources:
        return Sources(photos.path, sidecars=self.SIDECARS)

    def test_unchanged_files_are_not_opened_and_nothing_is_written(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        photos.fill(5)
        photos.add("deep/a.png")
        photos.add("deep/a-mask.png")
        (photos.path / "deep" / "a.json").write_text("{}")
        (photos.path / "bad.png").write_bytes(b"")
        (photos.path / "noheader.png").write_bytes(b"no image")
        (photos.path / "broken.png").symlink_to("nowhere")
        pass_time(60)
        first = looked(self.sources(photos), "caption", "mask", sizes=True)
        before = looked.contents()
        with opening(photos.path) as opened, nothing_written(looked):
            second = looked(self.sources(photos), "caption", "mask", sizes=True)
        assert opened == []
        assert looked.contents() == before
        assert changes_of(second) == {}
        assert names_of(second) == names_of(first)
        assert second.problems == first.problems
        for read in ("file", "caption", "mask"):
            assert second.reads[read].tolist() == first.reads[read].tolist()

    def test_a_young_file_is_read_again_and_that_is_no_change(
        self, looked: Looker, photos: Photos
    ) -> None:
        """It may have been written again within the same tick of the clock."""
        photos.add("a.png")
        looked(photos.path)
        with opening(photos.path) as opened:
            listing = looked(photos.path)
        assert "a.png" in opened
        assert changes_of(listing) == {}

    def test_a_touched_file_is_read_and_its_row_alone_is_written(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        photos.fill(20)
        pass_time(60)
        looked(self.sources(photos), "caption")
        before = looked.contents()
        (photos.path / "007.txt").touch()
        with opening(photos.path) as opened:
            listing = looked(self.sources(photos), "caption")
        after = looked.contents()
        assert opened == ["007.txt"]
        assert changes_of(listing) == {}
        assert {row[1] for row in after["files"] - before["files"]} == {b"007.txt"}
        assert {name: rows for name, rows in after.items() if name != "files"} == {
            name: rows for name, rows in before.items() if name != "files"
        }

    def test_an_edited_caption_writes_its_row_and_its_text(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        photos.fill(20)
        pass_time(60)
        looked(self.sources(photos), "caption")
        before = looked.contents()
        (photos.path / "007.txt").write_text("other words")
        with opening(photos.path) as opened:
            listing = looked(self.sources(photos), "caption")
        after = looked.contents()
        assert opened == ["007.txt"]
        assert changes_of(listing) == {"edited": 1}
        assert texts_of(listing)[7] == "other words"
        assert sum(len(after[name] - before[name]) for name in after) == 2

    def test_an_edit_that_keeps_size_and_modification_time_is_noticed(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        path = photos.add("a.png")
        pass_time(60)
        digest = looked(photos.path).reads["file"].tobytes()
        st, data = path.stat(), bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (st.st_size, st.st_mtime_ns)
        assert looked(photos.path).reads["file"].tobytes() != digest

    def test_an_edit_in_the_same_tick_is_noticed(self, looked: Looker, photos: Photos) -> None:
        """Times may be as coarse as two seconds: another content may have the same stat key."""
        path = photos.path / "a.txt"
        photos.add("a.png")
        for words in ("one", "two", "six", "ten"):
            path.write_text(words)
            assert texts_of(looked(self.sources(photos), "caption")) == [words]

    def test_sizes_that_are_asked_for_later_are_read(
        self, looked: Looker, photos: Photos, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever installs imagesize has sizes of old files, in folders and in lists."""
        path = photos.add("a.png", size=(30, 20))
        pass_time(60)
        for sources in (Sources(photos.path), Sources([path])):
            monkeypatch.setitem(__import__("sys").modules, "imagesize", None)
            (photos.path / "a.png").touch()
            pass_time(60)
            assert looked(sources, sizes=True).size.tolist() == [[0, 0]]
            monkeypatch.undo()
            assert looked(sources, sizes=True).size.tolist() == [[30, 20]]

    def test_trust_looks_at_nothing(self, looked: Looker, photos: Photos) -> None:
        photos.fill(3)
        first = looked(self.sources(photos), "caption")
        shutil.rmtree(photos.path)
        second = looked(self.sources(photos), "caption", trust=True)
        assert names_of(second) == names_of(first)
        assert texts_of(second) == texts_of(first)
        assert second.size.tolist() == first.size.tolist()

    def test_many_files_are_known_again(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        for folder in range(5):
            (photos.path / str(folder)).mkdir()
            for number in range(200):
                (photos.path / str(folder) / f"{number:03}.txt").write_text(f"{number % 7}")
        pass_time(60)
        sources = Sources(photos.path, suffixes=".txt")
        assert changes_of(looked(sources)) == {"added": 1000}
        assert len(looked.contents()["texts"]) == 7
        (photos.path / "3" / "100.txt").write_text("new")
        with opening(photos.path) as opened:
            assert changes_of(looked(sources)) == {"edited": 1}
        assert opened == ["3/100.txt"]


class TestChanges:
    SIDECARS = {"caption": (".txt", ".json:prompt", ".json:other")}  # noqa: RUF012

    def changes(self, looked: Looker, photos: Photos) -> dict[str, int]:
        listing = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption")
        return changes_of(listing)

    def test_each_kind_is_told_apart(self, looked: Looker, photos: Photos) -> None:
        photos.fill(6)
        assert self.changes(looked, photos) == {"added": 12}
        photos.add("new.png")
        (photos.path / "000.txt").write_text("other words")
        (photos.path / "001.png").rename(photos.path / "renamed.png")
        (photos.path / "sub").mkdir()
        (photos.path / "002.png").rename(photos.path / "sub" / "002.png")
        (photos.path / "003.png").unlink()
        (photos.path / "004.png").touch()
        expected = {"added": 1, "edited": 1, "renamed": 1, "moved": 1, "removed": 1}
        assert self.changes(looked, photos) == expected
        assert self.changes(looked, photos) == {}

    def test_a_moved_folder_is_not_even_read(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        for number in range(4):
            photos.add(f"old/{number}.png", f"words {number}")
        photos.add("old/deep/5.png")
        pass_time(60)
        before = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption")
        (photos.path / "old").rename(photos.path / "new")
        with opening(photos.path) as opened:
            after = looked(Sources(photos.path, sidecars=self.SIDECARS), "caption")
        assert opened == []
        assert changes_of(after) == {"moved": 9}
        assert texts_of(after) == texts_of(before)
        assert looked.table.gone() == {}

    def test_a_folder_that_moves_while_its_files_are_young_is_read(
        self, looked: Looker, photos: Photos
    ) -> None:
        """They may have been edited before they moved, within the same tick of the clock."""
        photos.add("old/a.png")
        looked(photos.path)
        (photos.path / "old").rename(photos.path / "new")
        with opening(photos.path) as opened:
            assert changes_of(looked(photos.path)) == {"moved": 1}
        assert "new/a.png" in opened

    def test_a_file_that_cannot_be_read_moves_with_its_reason(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        photos.add("old/a.png")
        (photos.path / "old" / "b.png").write_bytes(b"")
        pass_time(60)
        assert looked(photos.path).problems == {1: "it is empty"}
        (photos.path / "old").rename(photos.path / "new")
        assert looked(photos.path).problems == {1: "it is empty"}

    def test_a_link_of_another_suffix_is_another_kind_of_file(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        """Of what was no image, nobody has asked the size."""
        target = photos.add("real", size=(30, 20))
        link = photos.path / "a.dat"
        link.symlink_to(target)
        pass_time(60)
        looked(Sources(photos.path, suffixes=(".dat", ".png")))
        link.rename(photos.path / "a.png")
        listing = looked(Sources(photos.path, suffixes=(".dat", ".png")))
        assert changes_of(listing) == {"renamed": 1}
        assert listing.size.tolist() == [[30, 20]]

    def test_a_whole_dataset_that_moved_is_not_even_read(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        photos.fill(4)
        pass_time(60)
        looked(Sources(photos.path, sidecars=self.SIDECARS), "caption")
        moved = photos.path.rename(photos.path.with_name("elsewhere"))
        with opening(moved) as opened:
            listing = looked(Sources(moved, sidecars=self.SIDECARS), "caption")
        assert opened == []
        assert changes_of(listing) == {"moved": 8}
        assert looked.table.gone() == {}

    def test_a_copied_dataset_is_read_and_has_the_same_content(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.fill(3)
        before = looked(photos.path)
        copy = photos.path.with_name("copy")
        shutil.copytree(photos.path, copy)
        shutil.rmtree(photos.path)
        after = looked(copy)
        assert changes_of(after) == {"moved": 3}
        assert after.reads["file"].tolist() == before.reads["file"].tolist()
        assert looked.table.gone() == {}

    @pytest.mark.parametrize("is_on_the_same_disk", [True, False])
    def test_equal_files_move_each_once(
        self, looked: Looker, photos: Photos, is_on_the_same_disk: bool
    ) -> None:
        """Hard links have one stat key, copies one digest: no file is removed twice."""
        first = photos.add("old/0.png")
        for number in range(1, 5):
            target = photos.path / "old" / f"{number}.png"
            target.hardlink_to(first) if is_on_the_same_disk else shutil.copy(first, target)
        assert self.changes(looked, photos) == {"added": 5}
        (photos.path / "new").mkdir()
        for number in range(3):
            old = photos.path / "old" / f"{number}.png"
            new = photos.path / "new" / f"{number}.png"
            old.rename(new) if is_on_the_same_disk else shutil.move(shutil.copy(old, new), new)
            old.unlink(missing_ok=True)
        (photos.path / "old" / "3.png").unlink()
        assert self.changes(looked, photos) == {"moved": 3, "removed": 1}

    def test_links_to_one_file_move_each_once(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        target = photos.add("real.png")
        (photos.path / "old").mkdir()
        for name in ("a.png", "b.png"):
            (photos.path / "old" / name).symlink_to(target)
        pass_time(60)
        self.changes(looked, photos)
        (photos.path / "old").rename(photos.path / "new")
        (photos.path / "new" / "c.png").symlink_to(target)
        assert self.changes(looked, photos) == {"moved": 2, "added": 1}

    def test_a_file_that_moved_and_was_copied_is_moved_once(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        photos.add("old/a.png")
        pass_time(60)
        self.changes(looked, photos)
        (photos.path / "old").rename(photos.path / "new")
        shutil.copy(photos.path / "new" / "a.png", photos.path / "b.png")
        assert self.changes(looked, photos) == {"moved": 1, "added": 1}

    def test_what_cannot_be_read_is_not_taken_for_something_else_of_that_kind(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        (photos.path / "b.png").write_bytes(b"")
        self.changes(looked, photos)
        (photos.path / "b.png").unlink()
        (photos.path / "c.jpg").write_bytes(b"")
        assert self.changes(looked, photos) == {"removed": 1, "added": 1}

    def test_fields_of_one_json_are_one_file(self, looked: Looker, photos: Photos) -> None:
        path = photos.path / "a.json"
        photos.add("a.png")
        path.write_text('{"prompt": "one", "other": "two"}')
        assert self.changes(looked, photos) == {"added": 2}
        path.write_text('{"prompt": "one", "other": "three"}')
        assert self.changes(looked, photos) == {"edited": 1}
        path.write_text('{"prompt": "four", "other": "five"}')
        assert self.changes(looked, photos) == {"edited": 1}
        path.rename(photos.path / "b.json")
        assert self.changes(looked, photos) == {"renamed": 1}
        (photos.path / "b.json").unlink()
        assert self.changes(looked, photos) == {"removed": 1}

    def test_two_files_that_change_places_are_edited(self, looked: Looker, photos: Photos) -> None:
        one, two = photos.add("1.png"), photos.add("2.png")
        before = looked(photos.path).reads["file"].tolist()
        one.rename(photos.path / "x")
        two.rename(one)
        (photos.path / "x").rename(two)
        listing = looked(photos.path)
        assert listing.reads["file"].tolist() == before[::-1]
        assert changes_of(listing) == {"edited": 2}


class TestVanished:
    def test_a_folder_that_is_gone_is_an_error_and_nothing_is_forgotten(
        self, looked: Looker, photos: Photos, pass_time: PassTime
    ) -> None:
        photos.fill(3)
        pass_time(60)
        looked(photos.path)
        before = looked.contents()
        photos.path.rename(photos.path.with_name("unmounted"))
        with pytest.raises(SourcesVanishedError, match="it had 3 files") as caught:
            looked(photos.path)
        assert caught.value.hint
        assert looked.contents() == before
        photos.path.with_name("unmounted").rename(photos.path)
        with opening(photos.path) as opened:
            assert changes_of(looked(photos.path)) == {}
        assert opened == []

    def test_an_empty_mount_point_is_the_same(self, looked: Looker, photos: Photos) -> None:
        photos.fill(3)
        looked(photos.path)
        before = looked.contents()
        photos.path.rename(photos.path.with_name("unmounted"))
        photos.path.mkdir()
        with pytest.raises(SourcesVanishedError):
            looked(photos.path)
        assert looked.contents() == before

    def test_one_of_several_that_is_gone_is_an_error(self, looked: Looker, photos: Photos) -> None:
        photos.add("one/a.png")
        photos.add("two/b.png")
        sources = Sources(photos.path / "one") + Sources(photos.path / "two")
        looked(sources)
        before = looked.contents()
        photos.add("one/new.png")
        shutil.rmtree(photos.path / "two")
        with pytest.raises(SourcesVanishedError):
            looked(sources)
        assert looked.contents() == before

    def test_a_pattern_that_fits_nothing_any_more_is_the_same(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("sub/a.png")
        photos.add("other.png")
        looked(Sources(f"{photos.path}/sub/*.png"))
        (photos.path / "sub" / "a.png").unlink()
        with pytest.raises(SourcesVanishedError):
            looked(Sources(f"{photos.path}/sub/*.png"))

    def test_a_list_whose_files_are_all_gone_is_the_same(
        self, looked: Looker, photos: Photos
    ) -> None:
        sources = Sources(photos.fill(3), sidecars={"caption": ".txt"})
        looked(sources, "caption")
        before = looked.contents()
        shutil.rmtree(photos.path)
        with pytest.raises(SourcesVanishedError, match="None of the 3 files"):
            looked(sources, "caption")
        assert looked.contents() == before

    def test_a_list_whose_files_never_were_is_not(self, looked: Looker, photos: Photos) -> None:
        photos.add("other.png")
        sources = Sources([photos.path / "no.png"])
        for _ in range(3):
            assert looked(sources).problems == {0: "No such file or directory"}

    def test_a_list_that_is_empty_now_is_the_same(self, looked: Looker, tmp_path: Path) -> None:
        """`Sources(glob(...))` of a drive that is not mounted is one."""
        path = tmp_path / "list.jsonl"
        path.write_text('{"caption": "words"}')
        looked(Sources.jsonl(path), "caption")
        before = looked.contents()
        path.write_text("")
        with pytest.raises(SourcesVanishedError, match="it had 1 row"):
            looked(Sources.jsonl(path), "caption")
        with pytest.raises(SourcesVanishedError, match="it had 1 row"):
            looked(Sources([]))
        path.unlink()
        with pytest.raises(SourcesVanishedError, match="There is no file"):
            looked(Sources.jsonl(path), "caption")
        assert looked.contents() == before

    def test_a_subfolder_that_vanished_is_remembered(self, looked: Looker, photos: Photos) -> None:
        photos.add("a.png")
        photos.add("sub/b.png", "words")
        sources = Sources(photos.path, sidecars={"caption": ".txt"})
        looked(sources, "caption")
        shutil.rmtree(photos.path / "sub")
        assert changes_of(looked(sources, "caption")) == {"removed": 2}
        gone = {os.fsencode(photos.path / "sub"): 2}
        assert looked.table.gone() == gone
        assert names_of(looked(sources, "caption")) == ["a.png"]
        assert looked.table.gone() == gone
        photos.add("sub/b.png", "words")
        looked(sources, "caption")
        assert looked.table.gone() == {}

    def test_a_subfolder_that_is_empty_now_is_remembered(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("a.png")
        path = photos.add("sub/b.png")
        looked(photos.path)
        path.unlink()
        looked(photos.path)
        assert looked.table.gone() == {os.fsencode(path.parent): 1}

    def test_a_folder_that_is_no_source_any_more_is_not(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("one/a.png")
        photos.add("two/b.png")
        looked(photos.path)
        looked(photos.path / "two")
        assert looked.table.gone() == {}
        assert looked.names(photos.path) == ["one/a.png", "two/b.png"]

    def test_an_empty_mount_point_that_is_no_source_any_more_is(
        self, looked: Looker, photos: Photos
    ) -> None:
        """A list made by `glob` does not name the files of a drive that is not mounted."""
        paths = [photos.add("one/a.png"), photos.add("two/b.png")]
        looked(Sources(paths))
        paths[0].unlink()
        looked(Sources(paths[1:]))
        assert looked.table.gone() == {os.fsencode(paths[0].parent): 1}

    def test_force_takes_it_that_it_was_removed_on_purpose(
        self, looked: Looker, photos: Photos
    ) -> None:
        photos.add("one/a.png")
        listed = photos.add("two/b.png")
        path = photos.path / "list.jsonl"
        path.write_text('{"caption": "words"}')
        sources = Sources(photos.path / "one") + Sources([listed]) + Sources.jsonl(path)
        looked(sources)
        shutil.rmtree(photos.path)
        with pytest.raises(SourcesVanishedError):
            looked(sources)
        for _ in range(2):
            listing = looked(sources, force=True)
            assert names_of(listing) == [str(listed)]
            assert set(listing.problems) == {0}
            assert set(looked.table.gone()) == {os.fsencode(photos.path / "one")}
        with pytest.raises(SourcesVanishedError, match="it had 1 file"):
            looked(sources)
        looked.table.forget_gone()
        with pytest.raises(DatasetError, match="There is no folder"):
            looked(sources)

    def test_a_folder_that_cannot_be_listed_is_an_error(
        self, looked: Looker, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its files are out of reach, not gone. Played: root can list everything."""
        photos.add("sub/a.png")
        looked(photos.path)
        real = os.scandir

        def scandir(path: bytes) -> AbstractContextManager[Iterator[os.DirEntry[bytes]]]:
            if path.endswith(b"/sub"):
                raise PermissionError(13, "Permission denied")
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scandir)
            with pytest.raises(DatasetError, match="sub cannot be listed: Permission denied"):
                looked(photos.path)

    def test_a_folder_that_is_removed_meanwhile_is_no_error(
        self, looked: Looker, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        photos.add("a.png")
        photos.add("sub/b.png")
        real = os.scandir

        def scandir(path: bytes) -> AbstractContextManager[Iterator[os.DirEntry[bytes]]]:
            if path.endswith(b"/sub"):
                (photos.path / "sub" / "b.png").unlink()
                (photos.path / "sub").rmdir()
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scandir)
            assert looked.names(photos.path) == ["a.png"]


class TestMeanwhile:
    def test_a_file_that_changes_between_look_and_read_is_read_again(
        self, looked: Looker, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is remembered is never the old stat key with the new content."""
        path = photos.add("a.png", "one")
        sources = Sources(photos.path, sidecars={"caption": ".txt"})
        real = SourceTable.add_folder

        def add_folder(self: SourceTable, folder: bytes) -> int:
            path.write_bytes(path.read_bytes() + b"more")
            path.with_suffix(".txt").write_text("another")
            return real(self, folder)

        monkeypatch.setattr(SourceTable, "add_folder", add_folder)
        first = looked(sources, "caption")
        monkeypatch.undo()
        fresh = Looker(photos.path.parent / "fresh")
        digest = fresh(sources, "caption").reads["file"].tobytes()
        fresh.table.close()
        for listing in (first, looked(sources, "caption")):
            assert listing.problems == {}
            assert texts_of(listing) == ["another"]
            assert listing.reads["file"].tobytes() == digest
            assert listing.stat(0, "file") == stat_key(path)
            assert listing.stat(0, "caption") == stat_key(path.with_suffix(".txt"))

    def test_a_file_that_vanishes_between_look_and_read_is_a_problem(
        self, looked: Looker, photos: Photos, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        photos.add("a.png", "one")
        photos.add("b.png", "two")
        sources = Sources(photos.path, sidecars={"caption": ".txt"})
        real = SourceTable.add_folder

        def add_folder(self: SourceTable, folder: bytes) -> int:
            (photos.path / "a.png").unlink()
            (photos.path / "b.txt").unlink()
            return real(self, folder)

        monkeypatch.setattr(SourceTable, "add_folder", add_folder)
        listing = looked(sources, "caption")
        expected = ["No such file or directory", "b.txt: No such file or directory"]
        assert list(listing.problems.values()) == expected
        monkeypatch.undo()
        listing = looked(sources, "caption")
        assert listing.problems == {}
        assert names_of(listing) == ["b.png"]
        assert texts_of(listing) == [None]


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


class TestSizes:
    @pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
    @pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif", ".avif"])
    def test_a_size_is_that_of_the_image_as_it_is_shown(
        self, looked: Looker, photos: Photos, suffix: str, orientation: int
    ) -> None:
        path = photos.path / f"a{suffix}"
        Image.new("RGB", (40, 20)).save(path, exif=turned(orientation))
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).size
        assert looked(photos.path).size.tolist() == [list(upright)]

    def test_where_a_png_says_how_it_is_turned_does_not_matter(
        self, looked: Looker, photos: Photos
    ) -> None:
        """Some programs write it behind the pixels."""
        path = photos.path / "a.png"
        Image.new("RGB", (40, 20)).save(path, exif=turned(6))
        data = path.read_bytes()
        start, pixels, end = (data.index(kind) - 4 for kind in (b"eXIf", b"IDAT", b"IEND"))
        path.write_bytes(data[:start] + data[pixels:end] + data[start:pixels] + data[end:])
        with Image.open(path) as image:
            assert ImageOps.exif_transpose(image).size == (20, 40)
        assert looked(photos.path).size.tolist() == [[20, 40]]

    def test_how_a_webp_is_turned_is_found_behind_other_chunks(
        self, looked: Looker, photos: Photos
    ) -> None:
        """Those of odd sizes have a byte more."""
        path = photos.path / "a.webp"
        Image.new("RGB", (40, 20)).save(path, exif=turned(6))
        data = path.read_bytes()
        at = data.index(b"VP8X") + 18
        data = data[:at] + b"mine\x03\0\0\0abc\0" + data[at:]
        path.write_bytes(b"RIFF" + (len(data) - 8).to_bytes(4, "little") + data[8:])
        with Image.open(path) as image:
            assert ImageOps.exif_transpose(image).size == (20, 40)
        assert looked(photos.path).size.tolist() == [[20, 40]]

    def test_how_a_png_is_turned_may_stand_in_xmp_alone(
        self, looked: Looker, photos: Photos
    ) -> None:
        """So photo editors write it."""
        path, info = photos.path / "a.png", PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>')
        Image.new("RGB", (40, 20)).save(path, pnginfo=info)
        with Image.open(path) as image:
            assert ImageOps.exif_transpose(image).size == (20, 40)
        assert looked(photos.path).size.tolist() == [[20, 40]]

    @pytest.mark.parametrize(
        "data",
        [
            b"no image",
            b"\x89PNG\r\n\x1a\n",
            b"RIFF\0\0\0\0WEBP",
            b"\xff\xd8\xff\xe1",
            b"\x89PNG\r\n\x1a\n" + bytes(1000),
        ],
    )
    def test_an_image_without_a_header_has_no_size(
        self, looked: Looker, photos: Photos, data: bytes
    ) -> None:
        for suffix in (".png", ".jpg", ".webp", ".heic"):
            (photos.path / f"a{suffix}").write_bytes(data)
        listing = looked(photos.path)
        assert listing.size.tolist() == [[0, 0]] * 4
        assert listing.problems == {}

    def test_broken_exif_does_not_hide_an_image(self, looked: Looker, photos: Photos) -> None:
        info = PngImagePlugin.PngInfo()
        info.add(b"eXIf", b"MM\0*\xff\xff\xff\xff")
        Image.new("RGB", (40, 20)).save(photos.path / "a.png", pnginfo=info)
        assert looked(photos.path).size.tolist() == [[40, 20]]


MAKERS: list[Callable[..., Sources]] = [
    partial(Sources, "photos"),
    partial(Sources.jsonl, "list.jsonl"),
    partial(Sources.table, []),
]


class TestArguments:
    @pytest.mark.parametrize("where", ["", 5, None, b"photos", [5], [""], [None]])
    def test_what_is_no_path_is_refused(self, where: object) -> None:
        with pytest.raises(ConfigError, match="is not a path") as caught:
            Sources(where)  # type: ignore[arg-type]
        assert caught.value.hint

    @pytest.mark.parametrize("suffixes", ["png", ".", "", ".tar.gz", (), [5], ("",), "./x"])
    def test_what_is_no_suffix_is_refused(self, suffixes: object) -> None:
        with pytest.raises(ConfigError, match="is not a suffix") as caught:
            Sources("photos", suffixes=suffixes)  # type: ignore[arg-type]
        assert caught.value.hint

    @pytest.mark.parametrize(
        "sidecars",
        [".txt", [".txt"], {"a": "txt"}, {"a": 5}, {"a": [5]}, {"a": ".txt:field"}, {"a": ""},
         {"a": "../b.txt"}, {"a": [".txt", "json"]}],
    )  # fmt: skip
    def test_what_is_no_sidecar_is_refused(self, sidecars: object) -> None:
        for make in MAKERS:
            with pytest.raises(ConfigError) as caught:
                make(sidecars=sidecars)
            assert caught.value.hint

    def test_a_sidecar_called_file_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="cannot be called"):
            Sources("photos", sidecars={"file": ".txt"})

    @pytest.mark.parametrize("repeats", [-1, float("nan"), float("inf"), "2", None, True])
    def test_what_is_no_number_of_repeats_is_refused(self, repeats: object) -> None:
        with pytest.raises(ConfigError, match="repeats is a number"):
            Sources("photos", repeats=repeats)  # type: ignore[arg-type]

    @pytest.mark.parametrize("metadata", [5, "a", [1], {"a": object()}, {"a": {1, 2}}, dict])
    def test_metadata_that_cannot_be_kept_is_refused(self, metadata: object) -> None:
        for make in MAKERS:
            with pytest.raises(ConfigError) as caught:
                make(metadata=metadata)
            assert caught.value.hint

    @pytest.mark.parametrize("row", [5, "a", ["a"], {1: "a"}])
    def test_what_is_no_row_is_refused(self, row: object) -> None:
        with pytest.raises(ConfigError, match="Row 1 "):
            Sources.table([{}, row])  # type: ignore[list-item]

    def test_a_row_that_cannot_be_kept_is_refused(self, looked: Looker) -> None:
        with pytest.raises(ConfigError, match="cannot be kept"):
            looked(Sources.table([{"a": object()}]))

    def test_a_pattern_that_makes_no_sense_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="is not a pattern"):
            Sources("photos/[z-a].png")

    def test_sources_are_added_to_sources_only(self) -> None:
        with pytest.raises(TypeError):
            Sources("photos") + "more"

    def test_what_is_kept_of_sources_is_what_they_were(self) -> None:
        sources = Sources("photos", sidecars={"a": (".txt", ".json:b.c")}, repeats=2.5)
        sources += Sources("photos/*.png", suffixes=".png", metadata={"x": [1]})
        sources += Sources.jsonl("list.jsonl")
        again = Sources.from_json(json.loads(json.dumps(sources.to_json())))
        assert again.parts == sources.parts


def test_a_file_that_was_modified_just_now_by_its_own_account_is_young(
    looked: Looker, photos: Photos, pass_time: PassTime
) -> None:
    """Where the change time tells something else, as on Windows."""
    path = photos.add("a.png")
    age(path, -60)
    pass_time(60)
    looked(photos.path)
    with opening(photos.path) as opened:
        looked(photos.path)
    assert "a.png" in opened


def test_a_file_with_an_old_modification_time_is_no_younger(
    looked: Looker, photos: Photos, pass_time: PassTime
) -> None:
    """The change time tells when it came here: that of archives is years back."""
    age(photos.add("a.png"), 1e8)
    looked(photos.path)
    with opening(photos.path) as opened:
        looked(photos.path)
    assert opened != []
    pass_time(60)
    looked(photos.path)
    with opening(photos.path) as opened:
        looked(photos.path)
    assert opened == []
