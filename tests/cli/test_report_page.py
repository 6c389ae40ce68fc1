"""The page in a real browser: what it draws, what it answers, and that no name runs in it.

Run by `scripts/test --browser`, which installs what drives the browser. Its own waiting for a
condition does not work here: that needs `eval`, which the page's policy forbids.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smartcache.cli._output import printable
from smartcache.folders.groups import Left
from smartcache.report import html
from smartcache.report.figures import Disk
from smartcache.sizes import format_size
from tests.cli.running import Here
from tests.folders.trees import Machine, safetensors, write
from tests.report.values import COMFYUI, HOSTILE, PLAIN, report, seen, set_info

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome")
Open = Callable[[str], Any]
WEIGHTS = (40, 25, 15, 10, 5, 3, 2)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = importlib.import_module("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)))
    with playwright.sync_playwright() as started:
        # No sandbox: root has none, and the pages are ours.
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:  # noqa: ANN401
    """Open a page. In the end it has complained of nothing and asked nobody for anything."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    heard: list[str] = []

    def open_page(text: str) -> Any:  # noqa: ANN401
        path = tmp_path / "page.html"
        path.write_text(text, "utf-8")
        page = context.new_page()
        page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("dialog", lambda dialog: heard.append(f"dialog: {dialog.message}"))
        page.on("request", lambda each: heard.append(each.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#nav a")
        return page

    yield open_page
    context.close()
    assert set(heard) <= {(tmp_path / "page.html").as_uri()}


def page_of(*sizes: int, **parts: object) -> str:
    """A page of files "0.pt" ... in two folders in turn."""
    files = tuple(
        (seen(f"{n}.pt", size, inode=n, folder=(COMFYUI, PLAIN)[n % 2]),)
        for n, size in enumerate(sizes)
    )
    made = report(folders=(COMFYUI, PLAIN), files=files, **parts)
    return html.render(html.document(made, html.Beside(), clean=printable))


def boxes(page: Any) -> dict[str, tuple[float, float, bool]]:  # noqa: ANN401
    """The area and bytes of each box of the map, and whether it is a group."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".box")].map((box) => {
            const area = box.getBoundingClientRect();
            const group = Boolean(box.node.children);
            return [box.node.name, area.width * area.height, box.node.bytes, group];
        })"""
    )
    return {name: (area, size, is_group) for name, area, size, is_group in found}


def column(page: Any, table: str, number: int) -> list[str]:  # noqa: ANN401
    cells: list[str] = page.locator(f"#{table} tbody td:nth-child({number})").all_inner_texts()
    return cells


def rows(page: Any, count: int) -> None:  # noqa: ANN401
    """Wait until the table of files has so many rows."""
    playwright = importlib.import_module("playwright.sync_api")
    playwright.expect(page.locator("#files tbody tr")).to_have_count(count)


class TestMap:
    def test_a_box_for_each_and_areas_in_proportion_to_bytes(self, opened: Open) -> None:
        page = opened(page_of(*(weight * 1_000_000 for weight in WEIGHTS)))
        found = boxes(page)
        assert set(found) == {"ComfyUI", "/p", *(f"{n}.pt" for n in range(len(WEIGHTS)))}
        ours = {f"{n}.pt" for n in range(0, len(WEIGHTS), 2)}
        for together in ({"ComfyUI", "/p"}, ours, set(found) - ours - {"ComfyUI", "/p"}):
            densities = [found[name][0] / found[name][1] for name in together]
            assert max(densities) / min(densities) < 1.02

    def test_a_click_goes_in_and_the_trail_leads_back(self, opened: Open) -> None:
        page = opened(page_of(*WEIGHTS))
        page.locator(".box.group").first.click(position={"x": 40, "y": 8})
        assert set(boxes(page)) == {f"{n}.pt" for n in range(0, len(WEIGHTS), 2)}
        page.locator("#crumbs button").click()
        assert "ComfyUI" in boxes(page)

    def test_the_keyboard_does_it_too(self, opened: Open) -> None:
        page = opened(page_of(*WEIGHTS))
        page.locator(".box[tabindex='0']").focus()
        page.keyboard.press("Enter")
        assert "ComfyUI" not in boxes(page)
        assert page.evaluate("document.activeElement.node.name") == "0.pt"
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.node.name") != "0.pt"
        assert page.locator("#tip").is_visible()
        page.keyboard.press("Enter")
        name, path, figures = page.locator("#detail").inner_text().split("\n\n")
        assert (path, figures[:13]) == (f"/c/models/{name}", "Apparent size")
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.node.name") == "ComfyUI"

    def test_a_box_says_what_it_is_when_pointed_at(self, opened: Open) -> None:
        page = opened(page_of(3_000_000, 1_000_000))
        page.locator(".box", has_text="0.pt").last.hover()
        text = page.locator("#tip").inner_text()
        assert "3 MB, 75 % of Everything" in text
        assert "/c/models/0.pt" in text

    def test_without_any_file_it_says_so(self, opened: Open) -> None:
        page = opened(page_of())
        assert page.locator("#treemap").inner_text() == "There is nothing here that takes room."
        assert page.locator("#actions").inner_text().startswith("Nothing: no file is here twice")
        assert "No file is here twice" in page.locator("#cards").inner_text()

    def test_says_how_a_file_with_several_names_is_drawn(self, opened: Open) -> None:
        same = tuple(seen(f"{name}.pt", 100, inode=9, links=2) for name in "ab")
        words = "A file with several names is drawn at each of them, at an equal part of its size."
        for files, is_said in (((same,), True), ((same[:1],), False)):
            made = report(files=files)
            page = opened(html.render(html.document(made, html.Beside(), clean=printable)))
            assert (words in page.locator("#map .head").inner_text()) == is_said


def test_what_dedup_leaves_alone_is_not_nothing(opened: Open) -> None:
    left = Left(reason="", options=("mode",), files=1, size=20_000_000)
    page = opened(page_of(*WEIGHTS, left=(left,)))
    assert "twice" not in page.locator("main").inner_text()
    (action,) = page.locator(".action").all_inner_texts()
    assert "20 MB more with --allow mode (1 file differs in permissions)." in action
    assert "smartcache dedup --allow mode" in action


def test_free_room_is_a_line_for_each_disk(opened: Open) -> None:
    disks = (
        Disk(path=Path("/"), free=5_000_000_000, prunable=0),
        Disk(path=Path("/mnt/a b"), free=1000, prunable=2000),
    )
    lines = opened(page_of(*WEIGHTS, disks=disks)).locator("#disks p").all_inner_texts()
    assert lines == ["Disk /: 5 GB free", "Disk /mnt/a b: 1 KB free; prune would free 2 KB more"]


class TestTables:
    def test_sizes_read_as_on_the_command_line(self, opened: Open) -> None:
        sizes = (
            1, 999, 1000, 999_499, 999_500, 1_005_000, 1_048_576, 123_456_789, 999_949_999_999,
        )  # fmt: skip
        page = opened(page_of(*sizes))
        assert column(page, "files", 3) == [format_size(n) for n in sorted(sizes, reverse=True)]

    def test_a_heading_sorts_both_ways(self, opened: Open) -> None:
        page = opened(page_of(*WEIGHTS))
        heading = page.locator("#files th").first
        heading.locator("button").click()
        paths = column(page, "files", 1)
        assert paths == sorted(paths)
        assert heading.get_attribute("aria-sort") == "ascending"
        heading.locator("button").click()
        assert column(page, "files", 1) == paths[::-1]

    def test_the_search_filters_and_dims(self, opened: Open) -> None:
        page = opened(page_of(*WEIGHTS))
        page.keyboard.press("/")
        page.keyboard.type("MODELS 2.pt")
        rows(page, 1)
        assert column(page, "files", 1) == ["/c/models/2.pt"]
        lit = page.evaluate(
            "[...document.querySelectorAll('.box:not(.dim)')].map((box) => box.node.name).sort()"
        )
        assert lit == ["2.pt", "ComfyUI"]
        page.locator("#search").fill("")
        rows(page, len(WEIGHTS))
        assert page.locator(".dim").count() == 0

    def test_sets_show_size_and_age(self, opened: Open) -> None:
        info = set_info("latents/ab", artifacts=3, live=4000, on_disk=5000)
        page = opened(page_of(*WEIGHTS, artifact_sets=((info, 1000),)))
        (row,) = page.locator("#tensors tbody tr").all_inner_texts()
        assert row.split("\t") == ["latents/ab", "3", "5 KB", "4 KB", "1 KB", "never", "never"]


class TestTheme:
    def test_follows_the_system_until_one_is_chosen(self, opened: Open) -> None:
        page = opened(page_of(*WEIGHTS))

        def colours() -> list[float]:
            found: list[float] = page.evaluate(
                """["backgroundColor", "color"].map((name) => {
                    const parts = getComputedStyle(document.body)[name].match(/[0-9]+/g);
                    return Math.max(...parts.slice(0, 3).map(Number));
                })"""
            )
            return found

        light = colours()
        assert light[0] - light[1] > 150
        page.emulate_media(color_scheme="dark")
        dark = colours()
        assert dark[1] - dark[0] > 150
        page.get_by_role("button", name="Light").click()
        assert colours() == light
        page.reload()
        assert colours() == light
        page.get_by_role("button", name="Auto").click()
        assert colours() == dark


class TestRealFolders:
    @pytest.fixture
    def page(self, opened: Open, sc: Here, machine: Machine) -> Any:  # noqa: ANN401
        """Of the folders of every program. A title and names in it would like to be markup."""
        data = safetensors(99, metadata={"modelspec.title": HOSTILE[0]})
        for name in HOSTILE:
            write(machine.comfyui / "loras" / name.replace("/", "_"), data)
        sc("scan", "--min-size", "4KiB", "-q")
        return opened(sc("report", "--min-size", "4KiB", "--html", "-").stdout)

    def test_names_appear_as_text_and_nothing_of_them_runs(self, page: Any) -> None:  # noqa: ANN401
        first = page.locator(".dup", has_text="onerror").first
        first.locator("summary").click()
        assert HOSTILE[0] in first.locator(".title").inner_text()
        shown = "\n".join(first.locator("li .paths").all_inner_texts())
        for name in HOSTILE:
            assert printable(name.replace("/", "_")) in shown
        page.locator("#search").fill("onerror")
        rows(page, 1)
        assert page.title() == "Model files on this machine"
        assert page.locator("img, iframe, main script").count() == 0

    def test_the_command_of_a_group_is_copied(self, page: Any) -> None:  # noqa: ANN401
        first = page.locator(".dup").first
        first.locator("summary").click()
        text = first.locator("code").inner_text()
        assert text.startswith("smartcache dedup --min-size=4096 /")
        first.get_by_role("button", name="Copy").click()
        first.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text

    def test_every_part_is_there_and_fits_a_phone(self, page: Any) -> None:  # noqa: ANN401
        titles = page.locator("h2").all_inner_texts()
        assert titles == [
            "Where the room goes", "What can be freed", "Folders", "Duplicates",
            "Hugging Face repos", "All files",
        ]  # fmt: skip
        page.set_viewport_size({"width": 360, "height": 700})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

    def test_everything_has_a_name_for_those_who_hear_it(self, page: Any) -> None:  # noqa: ANN401
        silent = page.evaluate(
            """[...document.querySelectorAll("button, input, [role=button], [tabindex='0']")]
                .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim()
                    || (each.labels && each.labels.length)))
                .map((each) => each.outerHTML)"""
        )
        assert silent == []


def test_twenty_thousand_files_stay_usable(opened: Open) -> None:
    page = opened(page_of(*(1000 + 37 * n % 100_000 for n in range(20_000))))
    assert page.locator("#files .foot").inner_text().startswith("20,000 files, the first 100 shown")
    assert page.locator("*").count() < 10_000
    page.evaluate("document.querySelector('#files .frame').scrollTo(0, 1e6)")
    rows(page, 200)
    page.locator("#search").fill("/19999.pt")
    rows(page, 1)
