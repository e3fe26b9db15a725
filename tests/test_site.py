"""The site in a browser: nothing asked from elsewhere, nothing said on the console, readable on a phone."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from launching import ROOT

pytestmark = pytest.mark.slow

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


def pages() -> list[str]:
    return sorted(str(path.parent.relative_to(SITE)) for path in Path(SITE).rglob("index.html"))


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
        shown = page.locator("main").inner_text()
        assert not page.evaluate("([text, odd]) => new RegExp(odd).test(text)", [shown, NOT_SHOWN]), name
        assert page.locator("nav a").count() > 20, name  # the way to the guides, from every page
    assert said == []
    assert all(url.startswith((address, "data:", "blob:")) for url in asked)
    context.close()
