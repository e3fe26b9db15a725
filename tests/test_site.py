"""The pages in a browser: nothing asked from elsewhere, nothing said on the console, readable on a phone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import planned_answers
import pytest
import reported

from study.claims import sentences
from study.planner.asked import PLANNED

pytestmark = pytest.mark.slow  # opens a browser

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}

# Elements that are wider than the page, but for what lies in a container that scrolls.
TOO_WIDE = """() => [...document.querySelectorAll('body *')].filter(element =>
    !element.closest('.table, pre, svg') && element.getBoundingClientRect().right > innerWidth + 1
).map(element => element.outerHTML.slice(0, 120))"""

# How far each pair of colours is apart, by WCAG 2.2: text and what it stands on.
CONTRAST = """(selectors) => {
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = light(getComputedStyle(document.body).backgroundColor);
    return selectors.map(one => {
        const element = document.querySelector(one);
        if (!element) return [one, 21];
        const ink = light(getComputedStyle(element).color);
        return [one, (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)];
    });
}"""

TEXT = ["body", ".lead, main p", "caption .note, figcaption", "main a, footer a", "thead th"]


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

    def __init__(self, context, site: Path, file: str, fragment: str = "") -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.failed: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", lambda request: self.failed.append(request.url))
        self.page.goto((site / file).as_uri() + fragment)

    def width(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth")


@pytest.fixture
def visit(browser, site):
    contexts = []

    def make(name: str, fragment: str = "", **settings) -> Visit:
        contexts.append(browser.new_context(**settings))
        return Visit(contexts[-1], site, reported.PLACES[name], fragment)

    yield make
    for context in contexts:
        context.close()


each = pytest.mark.parametrize("name", reported.PLACES)


@each
@pytest.mark.parametrize(("viewport", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")], ids=["phone", "desktop"])
def test_page(visit, site, name, scheme, viewport):
    seen = visit(name, viewport=viewport, color_scheme=scheme)
    assert seen.said == []
    assert seen.failed == []
    assert set(seen.asked) <= {(site / file).as_uri() for file in (reported.PLACES[name], "style.css")}
    assert (site / "style.css").as_uri() in seen.asked
    assert seen.width() <= viewport["width"]
    assert seen.page.evaluate(TOO_WIDE) == []
    ratios = seen.page.evaluate(CONTRAST, TEXT)
    assert all(ratio >= 4.5 for _, ratio in ratios), ratios


@pytest.mark.parametrize("name", ["summary", "planner", "claims"])
def test_without_javascript(visit, name):
    seen = visit(name, viewport=PHONE, java_script_enabled=False)
    assert (seen.said, seen.failed) == ([], [])
    assert seen.page.locator("h1").count() == 1
    assert seen.page.locator("main").is_visible()
    assert not seen.page.locator("main form:visible").count()
    assert seen.page.locator("#list > details:visible").count() == (counted() if name == "claims" else 0)


# ---------------------------------------------------------------- the planner that answers in the page


def test_the_planner_answers_without_a_server_as_the_command_does(visit):
    seen = visit("planner", viewport=DESKTOP)
    assert not [url for url in seen.asked if url.endswith(".js")]  # before anybody asks
    page = seen.page
    for name, value in (("model", "llama-3-8b"), ("gpu", "h100-sxm"), ("gpus", "16"), ("network", "100")):
        page.locator(f"#asked [name={name}]").select_option(value)
    key = planned_answers.Key("h100-sxm", 16, PLANNED.lengths[0], PLANNED.per_gpu[0], 100)
    expected = planned_answers.answer("llama-3-8b", key)
    page.wait_for_selector("#answered tbody tr")
    rows = page.locator("#answered tbody tr")
    assert rows.count() == len(expected["rows"])
    for row, cells in zip(expected["rows"], rows.all_inner_texts(), strict=True):
        said = cells.replace("\n", "\t").split("\t")
        assert (said[0], said[2], said[5].replace(",", "")) == (row[0], f"{row[3]:g}", str(row[11]))
    assert expected["reason"] in page.locator("#answered").inner_text()
    assert "--gpu h100-sxm --gpus 16 --sequence-length 512 --global-batch-size 128 --network-gbps 100" in (
        page.locator("#answered pre").inner_text()
    )
    assert (seen.said, seen.failed) == ([], [])


# ---------------------------------------------------------------- the list of claims

CLAIM = "hf-analysis.memory.peak.zero0.measured"


class Claims:
    """The list of claims as a reader has it."""

    def __init__(self, seen: Visit) -> None:
        self.seen = seen
        self.page = seen.page
        self.shown = seen.page.locator("#list > details:visible")

    def said(self) -> str:
        return self.page.locator("#shown").inner_text()

    def claim(self, name: str = CLAIM):
        return self.page.locator(f'[id="{name}"]')

    def filter(self, name: str):
        return self.page.get_by_role("combobox", name=name, exact=True)

    def fragment(self) -> str:
        return self.page.evaluate("location.hash")


@pytest.fixture
def claims(visit):
    seen = []

    def make(fragment: str = "", **settings) -> Claims:
        seen.append(visit("claims", fragment, **{"viewport": DESKTOP, **settings}))
        return Claims(seen[-1])

    yield make
    for one in seen:
        assert (one.said, one.failed) == ([], [])
        assert all(url.startswith("file://") for url in one.asked)


def counted(**asked: str) -> int:
    found = [one for one in sentences.read(asked.get("source")) if asked.get("verdict") in (None, one.word)]
    return len([one for one in found if asked.get("kind") in (None, one.head.claim.kind)])


def test_filters_reduce_the_list_and_say_to_what(claims):
    listed = claims()
    every = counted()
    assert (listed.shown.count(), listed.said()) == (every, f"{every} of {every} sentences")
    asked = {}
    for label, value in (("source", "hf-analysis"), ("verdict", "needs hardware"), ("kind", "memory")):
        asked[label] = value
        listed.filter(label).select_option(value)
        assert 0 < listed.shown.count() == counted(**asked)
        assert listed.said() == f"{counted(**asked)} of {every} sentences"
    assert listed.fragment() == "#source=hf-analysis&verdict=needs+hardware&kind=memory"
    listed.filter("decided by").select_option("undecidable")
    assert set(listed.shown.evaluate_all("all => all.map(one => one.dataset.rule)")) == {"undecidable"}
    listed.page.get_by_role("button", name="Show all").click()
    listed.page.wait_for_function("location.hash === ''")
    assert listed.shown.count() == every


def test_anchor_opens_its_claim_though_a_filter_hides_it(claims):
    listed = claims("#source=papers&verdict=contradicted+by+theory")
    number = listed.shown.count()
    assert not listed.claim().is_visible()
    listed.page.evaluate(f"location.hash = '#{CLAIM}'")
    listed.claim().locator("dl").wait_for(state="visible")
    assert listed.page.evaluate("document.activeElement.parentElement.id") == CLAIM
    assert listed.shown.count() == number + 1
    assert listed.said() == f"{number} of {counted()} sentences, and the one that was linked to"
    listed.page.go_back()
    listed.claim().wait_for(state="hidden")
    assert listed.said() == f"{number} of {counted()} sentences"
