"""The planner's web page in a browser, with this Python in place of the one that the page loads.

tests/both/test_site.py asks the page of the site, which is made in minutes.
"""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
from typing import Any

import pytest
from launching import ROOT
from web_form import LABELS, PAGE, wait_for_answer

from zero_study.cli import web

pytestmark = pytest.mark.computes

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
WORKER = """
onmessage = async ({ data }) => {
  const response = await fetch("answer", { method: "POST", body: JSON.stringify(data) });
  postMessage({ kind: data.kind, number: data.number, seconds: 0, content: await response.json() });
};
postMessage({ ready: true });
"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the page's folder, and answers questions when `may_answer` is set."""

    may_answer = threading.Event()

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.may_answer.wait(60)
        content = json.dumps(web.answer(asked["words"], asked["config"], asked["labels"])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory):
    """Where the page is served: its form, without the theme of the site."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("choose.js", "choose.css"):
        shutil.copy(ROOT / "docs" / "web" / name, folder)
    (folder / "worker.js").write_text(WORKER)
    (folder / "choices.json").write_text(json.dumps(web.choices()))
    form = re.search(r'<div id="planner">.*</section>\n</div>', PAGE, re.DOTALL)
    head = '<!doctype html><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    style = "<style>* {box-sizing: border-box} html {font-size: 20px} :root {--md-default-bg-color: white}</style>"
    links = PAGE[PAGE.index('<link rel="stylesheet"') :]
    (folder / "index.html").write_text("\n".join([head, style, form[0], links]))

    def handler(*arguments: Any) -> Handler:
        return Handler(*arguments, directory=str(folder))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture
def open_page(address, browser):
    """A function that opens the page, and checks at the end of the test that the browser reported nothing."""
    Handler.may_answer.set()
    contexts, reported = [], []

    def opened(viewport: dict[str, int], question: str = "", **settings: Any) -> Any:
        contexts.append(browser.new_context(viewport=viewport, **settings))
        page = contexts[-1].new_page()
        page.on("console", lambda message: reported.append(message.text))
        page.on("pageerror", lambda error: reported.append(str(error)))
        page.goto(f"{address}{question}")
        wait_for_answer(page, "")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert reported == []


def bottom(page: Any, selector: str) -> float:
    return page.locator(selector).evaluate("element => element.getBoundingClientRect().bottom")


@pytest.mark.parametrize("stack", ["", "#model=gpt2&gpu=t4&gpus=1&stack=accelerate"], ids=["first", "default"])
def test_the_answer_follows_the_first_fields_on_a_phone(open_page, stack):
    page = open_page(PHONE, stack)
    assert not page.locator("#sequence-length").is_visible()
    between = page.locator("#status").bounding_box()["y"] - bottom(page, "#question .first")
    assert between < 200


def test_settings_that_differ_from_the_default_are_visible(open_page):
    question = "#model=gpt2&gpu=t4&gpus=1"
    page = open_page(PHONE, f"{question}&sequence-length=512")
    assert page.locator("#sequence-length").is_visible()
    assert not page.locator("#lora-rank").is_visible()
    page = open_page(PHONE, f"{question}&lora-rank=8&load-in-4bit=")
    assert page.locator("#load-in-4bit").input_value() == "yes"
    assert page.locator("#load-in-4bit").is_visible()


def test_the_first_answer_needs_no_program(open_page):
    Handler.may_answer.clear()
    page = open_page(DESKTOP)
    expected = web.choices()["first"]["answer"]
    assert page.locator("#status.recommendation").inner_text() == expected["answer"]
    assert expected["launch"]["command"] in page.locator("#answer").inner_text()


def test_the_first_field_has_the_focus_with_a_keyboard(open_page):
    page = open_page(DESKTOP)
    page.wait_for_function("document.activeElement.id === 'model'")
    page.keyboard.type("gpt2-xl")
    page.get_by_text("gpt2-xl on 8 x h100-sxm (").wait_for()
    page = open_page(PHONE, is_mobile=True, has_touch=True)
    assert page.evaluate("document.activeElement === document.body")
    assert page.evaluate("scrollY") == 0


def test_an_old_answer_is_gray_until_the_new_one_comes(open_page):
    page = open_page(DESKTOP)

    def opacities() -> set[float]:
        parts = page.locator("#status, #answer")
        return set(parts.evaluate_all("parts => parts.map(part => Number(getComputedStyle(part).opacity))"))

    assert opacities() == {1}
    Handler.may_answer.clear()
    page.locator("#gpus").fill("16")
    page.wait_for_function("getComputedStyle(document.getElementById('answer')).opacity < 1")
    assert opacities() == {0.5}
    page.get_by_text("Predicting").wait_for()
    assert page.locator("#status").evaluate("element => getComputedStyle(element).opacity") == "1"
    Handler.may_answer.set()
    page.get_by_text("llama-3.1-8b on 16 x h100-sxm in 2 nodes (").wait_for()
    assert opacities() == {1}


def test_how_many_gpus(open_page):
    page = open_page(PHONE)
    page.locator("#gpus").fill("")
    expected = web.answer(["--model", "llama-3.1-8b", "--gpu", "h100-sxm"])
    page.get_by_text(expected["answer"]).wait_for()
    counts = [machine["num_gpus"] for machine in expected["machines"]]
    assert page.locator("#answer .name").count() == len(counts)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_role("button", name=f"Show {counts[1]} x").click()
    page.get_by_text(f"llama-3.1-8b on {counts[1]} x h100-sxm (").wait_for()
    assert page.locator("#gpus").input_value() == str(counts[1])


def test_a_change_is_named_and_put_into_the_form(open_page):
    question = {"model": "llama-3.1-8b", "gpu": "rtx-4090", "gpus": "1"}
    page = open_page(PHONE, "#" + "&".join(f"{name}={value}" for name, value in question.items()))
    before = page.locator("#status").get_attribute("data-number")
    button = page.locator("button[data-options*='--load-in-4bit']").first
    options = dict(re.findall(r"--([a-z0-9-]+)(?: ([^-]\S*))?", button.get_attribute("data-options")))
    assert "--" not in page.locator("#status").inner_text() + page.locator("#answer .changes").first.inner_text()
    button.click()
    wait_for_answer(page, before)
    assert set(options) <= set(LABELS)
    for name, value in options.items():
        assert page.locator(f"#{name}").input_value() == (value or "yes")
        assert page.locator(f"#{name}").is_visible()
