"""The page in a browser: no error, no request, all by keyboard, nothing serious for axe."""

import shutil

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from autoshard.cli.main import app
from tests.report.net import MODEL

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "net.py").write_text(MODEL)
    done = CliRunner().invoke(
        app, ["report", str(folder / "net.py"), "-d", "2x560KiB,1x300KiB", "-o", str(folder / "report.html")]
    )
    assert done.exit_code == 0, done.output
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as player:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = player.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


def opened(browser, report):
    """The page, and what went wrong while it was open."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else troubles.append(request.url))
    page.goto(report.as_uri())
    return page, troubles


def test_nothing_is_cut_off(browser, report):
    page, troubles = opened(browser, report)
    for width in (390, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => document.querySelector('#lanes svg').clientWidth < width", arg=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = page.evaluate(
            """() => [...document.querySelectorAll("section *")].filter(e => !e.closest(".scroll, svg, .hidden")
            && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
        )
        assert not wide and not troubles
    page.close()


def test_axe_finds_nothing_serious(browser, report):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page, _ = opened(browser, report)
    page.click("#open-all")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.run(page).response["violations"]
        assert not [f"{row['id']}: {row['nodes'][0]['html'][:120]}" for row in found
                    if row["impact"] in ("serious", "critical")]  # fmt: skip
    page.close()


def test_the_tree_opens(browser, report):
    page, troubles = opened(browser, report)
    inner = page.locator(".tree .name", has_text="up").first
    assert not inner.is_visible()
    page.locator(".tree summary", has_text="Block").last.press("Enter")
    assert page.locator(".tree .name", has_text="up").last.is_visible()
    page.click("#open-all")
    assert inner.is_visible()
    assert not troubles
    page.close()


def test_timeline_by_keyboard_and_mouse(browser, report):
    page, troubles = opened(browser, report)
    chart = page.locator("#lanes")
    end = page.evaluate("END")
    chart.focus()
    for key in ("+", "+", "ArrowRight"):
        chart.press(key)
    begin, until = page.evaluate("view")
    assert until - begin == pytest.approx(end / 4) and begin > end / 4
    chart.press("0")
    chart.press(".")
    assert page.inner_text("#event").startswith("cuda:0 · forward · embed")
    chart.press("ArrowDown")
    chart.press(".")
    assert "cuda:0 · forward" not in page.inner_text("#event")
    page.click("button:text('Zoom in')")
    assert page.evaluate("view[1] - view[0]") == pytest.approx(end / 2)
    box = chart.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 22 + 11)
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    assert not troubles
    page.close()


def test_ticks_differ_when_zoomed_and_a_phone_sees_whole_lanes_and_that_tables_scroll(browser, report):
    page, _ = opened(browser, report)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.querySelector('#lanes svg').clientWidth < 390 && document.querySelector('.more')")
    assert page.evaluate("[...document.querySelectorAll('#lanes text')].every(one => !one.textContent.includes('…'))")
    for _ in range(9):
        ticks = page.locator("#lanes .tick").all_text_contents()
        assert len(set(ticks)) == len(ticks) > 0
        page.click("button:text('Zoom in')")
    page.close()


def test_the_keyboard_reaches_everything(browser, report):
    page, _ = opened(browser, report)
    wanted = page.evaluate(
        """() => { const all = [...document.querySelectorAll("a, button, input, select, summary, [tabindex='0']")]
        .filter(e => e.checkVisibility()); all.forEach((e, i) => e.dataset.n = i);
        return all.length; }"""
    )
    reached = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.n"))
    assert {str(number) for number in range(wanted)} <= reached
    page.close()
