"""The site in a browser: nothing asked from elsewhere, nothing said on the console, readable on a phone."""

from __future__ import annotations

import base64
import functools
import http.server
import io
import json
import math
import os
import re
import subprocess
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import ROOT
from PIL import Image
from web_form import LABELS, wait_for_answer

from zero_study import cli
from zero_study.cli import web
from zero_study.errors import Refusal
from zero_study.planner import request as planner_request

pytestmark = pytest.mark.nightly

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
SITE = ROOT / "build" / "site"
# Figures over their frame.
TOO_WIDE = """[...document.querySelectorAll('main img')].filter(
    element => element.getBoundingClientRect().right > innerWidth + 1).length"""
# What a reader must not meet: an object's repr, a traceback, a path of the machine that made it.
NOT_SHOWN = r"[ \w]object at 0x|Traceback \(most|<pandas\.|/root/|/home/"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and says nothing of it."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address():
    """Where the site is served from, newly made."""
    if not os.environ.get("CI") and not (ROOT / ".venv" / ".site").exists():
        pytest.skip("the site's tools are not installed; `make site` does")
    subprocess.run(["make", "-o", "setup", "site"], cwd=ROOT, check=True, capture_output=True, text=True)
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def pages() -> list[str]:
    """All pages, but of the hundreds of pages of single releases, which are made alike, only every tenth."""
    found = sorted(str(path.parent.relative_to(SITE)) for path in Path(SITE).rglob("index.html"))
    of_releases = [name for name in found if name.startswith("reference/releases/")]
    return sorted({*found} - {*of_releases} | {*of_releases[::10]})


@pytest.mark.parametrize(("viewport", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")], ids=["phone", "desktop"])
def test_every_page(address, browser, viewport, scheme):
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    found = pages()
    assert len(found) > 40
    for name in found:
        page.goto(f"{address}/{name}/")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], name
        assert page.evaluate(TOO_WIDE) == 0, name
        displayed = page.locator("main").inner_text()
        assert not page.evaluate("([text, odd]) => new RegExp(odd).test(text)", [displayed, NOT_SHOWN]), name
        assert page.locator("nav a").count() > 20, name  # the way to the guides, from every page
    assert said == []
    assert all(url.startswith((address, "data:", "blob:")) for url in asked)
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_of_notebooks_have_the_ground_of_the_page_and_readable_text(address, browser, scheme):
    context = browser.new_context(viewport=DESKTOP, color_scheme=scheme)
    page = context.new_page()
    names = sorted(path.name.removesuffix("_files") for path in SITE.glob("reports/*_files"))
    assert len(names) > 8
    for name in names:
        page.goto(f"{address}/reports/{name}/")
        shot = page.locator("main img[src*='_files/']").first.screenshot()
        colors = Image.open(io.BytesIO(shot)).convert("RGB").getcolors(1 << 24)
        ground = np.array(max(colors)[1])
        of_page = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert np.abs(ground - [int(part) for part in re.findall(r"\d+", of_page)[:3]]).max() <= 2, name
        assert (ground.mean() < 100) == (scheme == "dark"), name
        farthest = max(np.abs(ground - np.array(color)).min() for _, color in colors)
        assert farthest > 190, name  # text and axes
    context.close()


# ---------------------------------------------------------------- the planner's page

PAGE = "docs/web/choose/"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "vocab_size": 32000,
         "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
         "num_key_value_heads": 4}  # fmt: skip
# Known models of several kinds, one GPU and many, a question for which nothing fits, every part of the form, and an
# option that the form does not have.
QUESTIONS = [
    {"model": "llama-3.1-8b", "gpu": "h100-sxm", "gpus": "8"},
    {"model": "llama-3.1-8b", "gpu": "a100-80gb", "gpus": "8", "global-batch-size": "32"},
    {"model": "gpt2-xl", "gpu": "a100-40gb", "gpus": "1", "sequence-length": "512"},
    {"model": "bert-large", "gpu": "v100-32gb", "gpus": "4", "stack": "trainer", "optimizer": "sgd"},
    {"model": "qwen2.5-32b", "gpu": "h100-sxm", "gpus": "16", "sequence-length": "4096", "stack": "torchtitan"},
    {"model": "qwen2.5-32b", "gpu": "rtx-4090", "gpus": "1"},
    {"model": "deepseek-v3", "gpu": "h200", "gpus": "256", "activation-checkpointing": "full"},
    {"model": "t5-base", "gpu": "l40s", "gpus": "2", "precision": "fp32"},
    {"model": "mistralai/Mistral-7B-v0.1", "gpu": "mi300x", "gpus": "8", "micro-batch-size": "2", "strategy": "zero3"},
    {"config": json.dumps(LLAMA), "gpu": "a100-80gb", "gpus": "4", "stack": "deepspeed"},
    {"model": "llama-3.1-8b", "gpu": "a100-80gb", "stack": "trainer"},  # how many GPUs?
    # Longer than the number of arguments that a function of JavaScript can have.
    {
        "config": json.dumps(LLAMA | {"id2label": {str(i): f"label {i}" for i in range(12_000)}}),
        "gpu": "a100-80gb",
        "gpus": "4",
    },
]
# The names of the numbers on the page, and the columns of the command that show the same.
CELLS = {"needs": "GiB", "free": "free", "batch": "batch", "s/step": "s/step", "tokens/s per GPU": "tokens/s/GPU",
         "$ per 1e9 tokens": "$/1e9 tok"}  # fmt: skip
DIGITS = 1e-9  # relative: Python 3.12 and newer add a list of numbers with another rounding than Python 3.11


def ask(page, address: str, question: dict[str, str]) -> None:
    """Open the page with a question in its address, and wait for the answer."""
    before = page.evaluate("document.getElementById('status')?.dataset.number ?? ''")
    if "config" in question:
        question = question | {"config": base64.urlsafe_b64encode(question["config"].encode()).decode()}
    page.goto(f"{address}/{PAGE}#{urllib.parse.urlencode(question)}")
    wait_for_answer(page, before)


def command_line(question: dict[str, str]) -> list[str]:
    """Return the command line that asks the same question. The pasted configuration is in config.json."""
    words = ["--model", "config.json"] if "config" in question else []
    return words + [word for name, value in question.items() if name != "config" for word in (f"--{name}", value)]


def is_equal(a: Any, b: Any) -> bool:
    """Whether two contents of JSON are equal, up to the last digits of numbers."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float) and not isinstance(a, bool):
        return math.isclose(a, b, rel_tol=DIGITS)
    return bool(a == b)


@pytest.fixture(scope="module")
def planner(address, browser):
    """The planner's page in a browser, and a list of everything that it requests or prints."""
    context = browser.new_context(viewport=DESKTOP, permissions=["clipboard-read", "clipboard-write"])
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page, said, asked
    context.close()


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.get("model", "config.json"))
def test_the_page_answers_as_the_command(address, planner, question, tmp_path, monkeypatch, capsys):
    page, said, asked = planner
    ask(page, address, question)
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(question.get("config", ""), encoding="utf-8")
    words = command_line(question)
    status = cli.run(["advise", *words, "--json"])
    of_command = json.loads(capsys.readouterr().out)
    assert status == of_command["exit_status"] in (0, 1)  # 1: no strategy fits

    expected = web.answer(words[2:] if "config" in question else words, question.get("config"), LABELS)
    assert page.locator("#status.recommendation").inner_text() == expected["answer"]
    for place, strategy in enumerate(expected["strategies"]):
        row = page.locator("#answer [data-strategy]").nth(place)
        for label, cell in CELLS.items():
            displayed = row.locator(f'[data-column="{label}"] b').text_content()
            assert displayed.removesuffix(" GiB") == strategy["cells"][cell], (strategy["name"], label)

    page.get_by_role("button", name="Copy the answer as JSON").click()
    page.get_by_text("Copied").wait_for()
    of_page = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert is_equal(of_page, of_command)
    assert said == []
    assert all(url.startswith((address, "data:", "blob:")) for url in asked)


@pytest.mark.parametrize(
    "question",
    [
        {"config": "{", "gpu": "h100-sxm", "gpus": "8"},
        {"config": "no JSON", "gpu": "h100-sxm", "gpus": "8"},
        {"config": "[]", "gpu": "h100-sxm", "gpus": "8"},
        {"config": json.dumps({"model_type": "no-such-model"}), "gpu": "h100-sxm", "gpus": "8"},
        {"config": json.dumps(LLAMA | {"num_attention_heads": 7}), "gpu": "h100-sxm", "gpus": "8"},
        {"model": "llama-3.1-9b", "gpu": "h100-sxm", "gpus": "8"},
        {"model": "gpt2", "gpu": "h100-sxm", "gpus": "8", "global-batch-size": "7"},
        {"model": "gpt2", "gpu": "no-gpu", "gpus": "8"},
        {"model": "gpt2", "gpu": "h100-sxm", "gpus": "8", "no-such-option": "1"},
        # A field for numbers would drop what is not a number, and the answer would be for the default.
        {"model": "gpt2", "gpu": "h100-sxm", "gpus": "8", "sequence-length": "4k"},
        {"model": "gpt2", "gpu": "h100-sxm", "gpus": "8", "global-batch-size": "1 024"},
    ],
    ids=lambda question: "-".join(question.values())[:30],
)
def test_the_page_refuses_as_the_command(address, planner, question, tmp_path, monkeypatch):
    page, said, _ = planner
    ask(page, address, question)
    monkeypatch.chdir(tmp_path)
    # Like the page, an installation without PyTorch does not trace models that it has no formulas for.
    monkeypatch.setattr(planner_request, "find_spec", lambda name: None)
    Path("config.json").write_text(question.get("config", ""), encoding="utf-8")
    with pytest.raises(Refusal) as refusal:
        cli.run(["advise", *command_line(question)])
    # Only the command that installs PyTorch is another one, because the page does not know where the wheel is.
    texts = [page.locator("#status.refusal").text_content(), web.labeled(str(refusal.value), LABELS)]
    assert len({re.sub(r"pip install .*", "", text) for text in texts}) == 1, texts
    assert page.locator("#answer").inner_text() == ""
    assert said == []


def test_the_page_answers_while_one_types(address, planner):
    page, _, _ = planner
    ask(page, address, QUESTIONS[0])
    page.locator("#gpus").press("Control+a")
    page.keyboard.type("16")
    page.get_by_text("on 16 x h100-sxm in 2 nodes").wait_for()
    assert "gpus=16" in page.url
    # By keyboard alone: from the first field to the button that shows the other strategies.
    page.locator("#model").focus()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"gpu", "gpus", "sequence-length", "global-batch-size", "stack"} <= set(reached)
    (button,) = [text for text in dict.fromkeys(reached) if text.startswith("Show")]
    page.get_by_role("button", name=button).focus()
    hidden = page.locator("#answer [data-strategy]:not([hidden])").count()
    page.keyboard.press("Enter")
    assert page.locator("#answer [data-strategy]:not([hidden])").count() > hidden


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_answer_is_on_the_first_screen(address, browser, viewport):
    """On a desktop, it stands beside the fields. On a phone, it follows the first three of them."""
    context = browser.new_context(viewport=viewport)
    page = context.new_page()
    ask(page, address, QUESTIONS[0])
    form, first, answer = (page.locator(name).bounding_box() for name in ("#question", "#question .first", "#status"))
    assert answer["y"] + 50 < viewport["height"]
    if viewport is DESKTOP:
        assert answer["x"] >= form["x"] + form["width"]
    else:
        assert page.locator("#gpus").is_visible()
        assert not page.locator("#sequence-length").is_visible()
        assert answer["y"] - (first["y"] + first["height"]) < 200
    assert not page.locator("#answer .legend").is_visible()
    page.get_by_text("What the colors and lines mean").click()
    assert page.locator("#answer .legend").is_visible()
    context.close()


def test_lora_is_suggested_if_nothing_fits(address, planner):
    page, _, _ = planner
    ask(page, address, {"model": "qwen2.5-32b", "gpu": "rtx-4090", "gpus": "1"})
    before = page.locator("#status").get_attribute("data-number")
    page.locator("button[data-options*='--load-in-4bit']").click()
    wait_for_answer(page, before)
    assert page.locator("#lora-rank").input_value() == "16"
    assert page.locator("#load-in-4bit").input_value() == "yes"
    assert "load-in-4bit" in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_on_a_phone_and_in_print(address, browser, scheme):
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)
    page = context.new_page()
    ask(page, address, QUESTIONS[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for name in ("#status.recommendation", "#answer .numbers b"):
        assert page.locator(name).first.evaluate("element => parseFloat(getComputedStyle(element).fontSize)") >= 10
    page.emulate_media(media="print")
    assert page.locator("#answer .bar").first.is_visible()
    assert not page.get_by_role("button", name="Copy the command").is_visible()
    context.close()


def test_a_flag_in_the_address(address, planner):
    page, _, _ = planner
    ask(page, address, QUESTIONS[0] | {"compile": ""})
    assert "zero-study advise --compile" in page.locator("#answer").inner_text()
    assert "compile=" in page.url


def test_links_to_headings_keep_the_question(address, planner):
    page, _, _ = planner
    ask(page, address, QUESTIONS[1])
    asked, answer = page.url, page.locator("#status").inner_text()
    page.evaluate("location.hash = '#about-this-page'")
    page.wait_for_url(asked)
    assert page.locator("#gpu").input_value() == QUESTIONS[1]["gpu"]
    assert page.locator("#status").inner_text() == answer


def test_slow_strategies_are_not_drawn_as_if_they_took_less_time(address, planner):
    page, _, _ = planner
    ask(page, address, QUESTIONS[0])
    answer = web.answer(command_line(QUESTIONS[0]))
    displayed = [each for each in answer["strategies"] if each["fits"] and each["name"] in answer["shown"]]
    end = max(strategy["seconds"][2] for strategy in displayed)
    fitting = [strategy for strategy in answer["strategies"] if strategy["fits"]]
    assert any(strategy["seconds"][1] > end for strategy in fitting)
    for strategy in fitting:
        line = page.locator(f'#answer [data-strategy="{strategy["name"]}"] .time')
        assert line.evaluate("element => element.classList.contains('cut')") == (strategy["seconds"][1] > end)


def test_a_screen_reader_reads_the_recommendation_only(address, planner):
    page, _, _ = planner
    ask(page, address, QUESTIONS[2])
    recommendation = web.answer(command_line(QUESTIONS[2]))["answer"]
    assert page.locator("main [role=status], main [aria-live]").all_inner_texts() == [recommendation]


@pytest.mark.parametrize("is_aborted", [True, False], ids=["no-connection", "404"])
@pytest.mark.parametrize(
    "name", ["choices.json", "worker.js", "pyodide.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "program.zip"]
)
def test_a_file_that_does_not_load(address, browser, name, is_aborted):
    context = browser.new_context()
    page = context.new_page()
    page.route(f"**/{name}", lambda route: route.abort() if is_aborted else route.fulfill(status=404, body="no"))
    page.goto(f"{address}/{PAGE}")
    page.get_by_text("Load the page again").wait_for(timeout=60_000)
    message = page.locator("#status.refusal").inner_text()
    assert name in message or name == "pyodide.mjs"  # a module that the worker imports is reported without its name
    assert "undefined" not in message
    page.locator("#gpus").fill("16")
    page.wait_for_timeout(100)
    assert page.locator("#status.refusal").inner_text() == message
    context.close()


@pytest.mark.parametrize("name", ["Copy the command", "Copy the answer as JSON"])
def test_a_browser_that_does_not_copy(address, browser, name):
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    ask(page, address, QUESTIONS[0])
    page.get_by_role("button", name=name).click()
    page.get_by_role("button", name="The text is selected").wait_for()
    selected = page.evaluate("getSelection().toString()")
    answer = web.answer(command_line(QUESTIONS[0]))
    if "JSON" in name:
        assert json.loads(selected)["recommended"] in answer["answer"]
    else:
        assert selected == answer["launch"]["command"]
    context.close()


def test_the_page_without_javascript(address, browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}/{PAGE}")
    assert page.locator("#status").text_content() == ""
    assert "zero-study advise" in page.locator("main").inner_text()
    context.close()
