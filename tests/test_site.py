"""The pages in a browser: nothing asked from elsewhere, nothing said on the console, readable on a phone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import reported

from study import report

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}

# Elements that are wider than the page, but for what lies in a container that scrolls.
TOO_WIDE = """() => [...document.querySelectorAll('body *')].filter(element =>
    !element.closest('.table, pre, svg') && element.getBoundingClientRect().right > innerWidth + 1
).map(element => element.outerHTML.slice(0, 120))"""

PICTURES = """() => [...document.querySelectorAll('figure, img, svg')].map(element => ({
    tag: element.tagName.toLowerCase(),
    width: element.getBoundingClientRect().width,
    height: element.getBoundingClientRect().height,
    words: element.getAttribute('alt') || element.getAttribute('aria-label')
        || element.querySelector('title, figcaption')?.textContent || '',
}))"""

# How far each pair of colours is apart, by WCAG 2.2: text and what it stands on.
CONTRAST = """() => {
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = light(getComputedStyle(document.body).backgroundColor);
    return ['body', '.lead, main p', 'caption small, figcaption', 'main a, footer a', 'thead th'].map(one => {
        const element = document.querySelector(one);
        if (!element) return [one, 21];
        const ink = light(getComputedStyle(element).color);
        return [one, (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)];
    });
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return reported.site(tmp_path_factory)


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium found, and CI must look at the pages; install Debian's chromium")
        pytest.skip("needs Chromium, found none on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page, and all that the browser said and asked for on the way."""

    def __init__(self, context, site: Path, file: str) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.failed: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", lambda request: self.failed.append(request.url))
        self.page.goto((site / file).as_uri())

    def width(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth")


@pytest.fixture
def visit(browser, site):
    contexts = []

    def make(name: str, **settings) -> Visit:
        contexts.append(browser.new_context(**settings))
        return Visit(contexts[-1], site, report.PAGES[name].file)

    yield make
    for context in contexts:
        context.close()


each = pytest.mark.parametrize("name", report.PAGES)


@each
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_page(visit, site, name, scheme, viewport):
    seen = visit(name, viewport=viewport, color_scheme=scheme)
    assert seen.said == []
    assert seen.failed == []
    assert set(seen.asked) <= {(site / file).as_uri() for file in (report.PAGES[name].file, "style.css")}
    assert (site / "style.css").as_uri() in seen.asked
    assert seen.width() <= viewport["width"]
    assert seen.page.evaluate(TOO_WIDE) == []
    assert all(ratio >= 4.5 for _, ratio in seen.page.evaluate(CONTRAST)), seen.page.evaluate(CONTRAST)
    for picture in seen.page.evaluate(PICTURES):
        assert picture["width"] > 100, picture
        assert picture["height"] > 50, picture
        assert len(picture["words"]) > 20, picture


def test_light_and_dark_differ(visit):
    colours = [
        visit("summary", color_scheme=scheme).page.evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


@each
def test_without_javascript(visit, name):
    seen = visit(name, viewport=PHONE, java_script_enabled=False)
    assert (seen.said, seen.failed) == ([], [])
    assert seen.page.locator("h1").count() == 1
    assert seen.page.locator("main").is_visible()


def test_links_lead_to_pages(visit):
    seen = visit("summary", viewport=DESKTOP)
    for page in list(report.PAGES.values())[1:]:
        seen.page.locator("nav a", has_text=page.label).click()
        assert seen.page.url.endswith(page.file)
        assert seen.page.locator("nav a[aria-current]").inner_text() == page.label
    assert seen.failed == []


def test_keyboard_reaches_wide_tables(visit):
    """On a phone the answer is wider than the screen: it takes the focus, shows it, and scrolls."""
    seen = visit("summary", viewport=PHONE)
    table = seen.page.locator(".table").first
    table.focus()
    assert table.evaluate("element => element === document.activeElement")
    assert table.evaluate("element => element.scrollWidth > element.clientWidth")
    seen.page.keyboard.press("ArrowRight")
    seen.page.wait_for_function("document.querySelector('.table').scrollLeft > 0")
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@each
def test_print(visit, name):
    """Black on white whatever the screen's scheme, without navigation, and no table cut off."""
    seen = visit(name, viewport={"width": 1016, "height": 700}, color_scheme="dark")  # A4, landscape
    seen.page.emulate_media(media="print", color_scheme="dark")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert seen.page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert not seen.page.locator("nav").is_visible()
    assert seen.width() <= 1016
