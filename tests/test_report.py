"""How notebooks become pages: strictly, in a kernel of this Python, and whole or not at all."""

from __future__ import annotations

import html
import html.parser
import json
import os
import re
import shutil
import sys
import urllib.parse
from pathlib import Path

import nbformat
import pytest
import reported

from study.errors import Refusal
from study.report import build as report
from study.report import notebook as executing

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Elements(html.parser.HTMLParser):
    """The elements of a page, with their attributes and what they lie in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes), tuple(self.open)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.found if name == tag]


@pytest.mark.parametrize("name", reported.PLACES)
def test_page_is_whole_semantic_and_asks_for_nothing_from_elsewhere(site, name):
    text = reported.text_of(site, name)
    page = Elements(text)
    assert page.open == []
    assert page.all("html") == [{"lang": "en"}]
    assert [len(page.all(tag)) for tag in ("h1", "nav", "main", "header", "footer")] == [1] * 5
    here = [] if name in report.article_pages() else [Path(reported.PLACES[name]).name]  # those are no part of the way
    assert [a["href"] for a in page.all("a") if a.get("aria-current")] == here
    tables = [div for div in page.all("div") if div.get("class") == "table"]
    assert len(page.all("table")) == len(page.all("caption")) == len(tables)
    assert all(div["tabindex"] == "0" and div["aria-label"] for div in tables)
    assert all(th.get("scope") for th in page.all("th"))
    assert len(page.all("figure")) == len(page.all("figcaption"))
    ids = [a["id"] for _, a, _ in page.found if "id" in a]
    assert len(set(ids)) == len(ids)

    assert page.all("script") == ([{}] if name in (*report.SCRIPTS, *report.article_pages()) else [])
    style = "../style.css" if name in report.REPORT_PAGES else "style.css"
    assert {link["href"] for link in page.all("link")} == {style, "data:,"}
    assert not re.search(r"<iframe|<img|@import|url\((?!#)", text + (site / "style.css").read_text())
    assert not [place for place in (report.ROOT, site, Path.home()) if str(place) in text]

    shown, _, folded = text.partition("<summary>How this page was made</summary>")
    assert "from study" not in shown
    assert ("from study" in folded) is (name != "index")
    assert "google.colab" not in text
    assert "Traceback" not in shown


# ---------------------------------------------------------------- executing


def notebook(path: Path, *cells: str, parameters: str = "records = []") -> Path:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    made.cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    made.cells += [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(made, path)
    return path


@pytest.fixture
def one_page(tmp_path, monkeypatch):
    """A report of a single notebook, made of the cells that a test gives; returns what builds it."""
    monkeypatch.setattr(report, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(report, "REPORT_PAGES", {"summary": report.PAGES["summary"]})
    monkeypatch.setattr(report, "OF_A_STUDY", ("summary",))
    (tmp_path / "notebooks").mkdir()

    def build(*cells: str, output: Path = tmp_path / "out") -> Path:
        notebook(tmp_path / "notebooks" / "summary.ipynb", *cells, parameters='records = []\nstudy = ""')
        return report.build("smoke", [tmp_path], output)

    return build


@pytest.mark.launches
def test_kernel_is_of_this_python(tmp_path, monkeypatch):
    """Whatever kernel a user has registered as python3, and without the user's start-up files."""
    spec = tmp_path / "data" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "Not this", "language": "python"}))
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("records = ['of the user']")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "data"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    path = notebook(tmp_path / "one.ipynb", "import sys; print(sys.executable, 'records' in dir())", parameters="a = 1")
    executing.execute(path, tmp_path / "done.ipynb", {"a": 2})
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert done.cells[-1].outputs[0].text == f"{sys.executable} False\n"
    assert done.cells[1].source == "# Parameters\na = 2\n"


@pytest.mark.launches
def test_failed_cell_is_one_line_and_keeps_the_notebook(one_page, tmp_path):
    first = one_page("'whole'")
    page = first.read_bytes()
    with pytest.raises(RuntimeError, match=r"^summary.ipynb, cell 3: ZeroDivisionError: division by zero; ") as failure:
        one_page("1 + 1", "1 / 0")
    kept = tmp_path / "out" / "summary.failed.ipynb"
    assert str(failure.value).endswith(f"the executed notebook is {kept}")
    assert "ZeroDivisionError" in kept.read_text()
    assert first.read_bytes() == page
    assert sorted(path.name for path in tmp_path.glob("out/*")) == ["index.html", "style.css", kept.name]
    one_page("'whole again'")
    assert not kept.exists()


@pytest.mark.launches
def test_refusal_of_a_cell_is_a_refusal(one_page, tmp_path):
    with pytest.raises(Refusal, match=r"^records/x: no such folder; pass another$"):
        one_page("from study.config import Refusal", "raise Refusal('records/x: no such folder; pass another')")
    assert [path.name for path in tmp_path.iterdir()] == ["notebooks"]


@pytest.mark.launches
def test_other_files_stay(one_page, tmp_path):
    (tmp_path / "out" / "records").mkdir(parents=True)
    (tmp_path / "out" / "records" / "a.json").write_text("{}")
    (tmp_path / "out" / "index.html").write_text("old")
    one_page("'new'")
    assert (tmp_path / "out" / "records" / "a.json").read_text() == "{}"
    assert "new" in (tmp_path / "out" / "index.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notebooks", "out"]


# ---------------------------------------------------------------- the site

COMMITTED = report.ROOT / "reports"
OPENING = "from study.report.markup import Html; Html('<h1>Why &amp; how?</h1>')"


def dead_links(folder: Path) -> list[str]:
    """The links of a folder's pages that lead to no file in it, or to no anchor of the page."""
    pages = {path: Elements(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    anchors = {path: {a["id"] for _, a, _ in page.found if "id" in a} for path, page in pages.items()}
    dead = []
    for path, page in pages.items():
        for link in page.all("a") + page.all("link"):
            address = urllib.parse.urlsplit(link["href"])
            target = Path(os.path.normpath(path.parent / urllib.parse.unquote(address.path))) if address.path else path
            if address.scheme:
                continue
            is_filter = target.name == "claims.html" and "=" in address.fragment  # which filter.js reads
            leads = is_filter or address.fragment in {"", *anchors.get(target, ())}
            if not (leads and target.is_file() and target.is_relative_to(folder)):
                dead.append(f"{path.relative_to(folder)}: {link['href']}")
    return dead


def shown_of(page: Path) -> str:
    """A page without its drawings, whose last digits are the machine's."""
    return re.sub(r"<svg.*?</svg>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_links_of_the_committed_site_are_not_dead():
    assert dead_links(COMMITTED) == []


def test_links_of_a_new_site_are_not_dead(site):
    assert dead_links(site) == []


def test_committed_index_is_what_is_made_now(tmp_path):
    for name, _ in report.reports(COMMITTED):
        (tmp_path / name).mkdir()
        shutil.copy(COMMITTED / name / "index.html", tmp_path / name)
    report.write_index(tmp_path)
    for name in ("index.html", "style.css"):
        made, committed = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path, COMMITTED))
        assert made == committed, f"{name}: make it again with `zero-study report`, and commit it"


@pytest.mark.parametrize("name", [*report.SITE_PAGES, *report.article_pages()])
def test_committed_pages_of_no_runs_are_what_is_made_now(site, name):
    place = reported.PLACES[name]
    assert shown_of(site / place) == shown_of(COMMITTED / place), (
        "make it again with `zero-study report`, and commit it"
    )


@pytest.mark.launches
def test_report_elsewhere_stands_alone(one_page, tmp_path):
    page = one_page("'alone'")
    assert {link["href"] for link in Elements(page.read_text()).all("link")} == {"style.css", "data:,"}
    assert "All reports" not in page.read_text()
    assert dead_links(tmp_path / "out") == []


def test_report_in_a_site_joins_it(one_page, site, tmp_path):
    mine = tmp_path / "site"
    shutil.copytree(site, mine)
    page = one_page(OPENING, output=mine / "my first")
    assert {link["href"] for link in Elements(page.read_text()).all("link")} == {"../style.css", "data:,"}
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]
    assert report.reports(mine)[-1] == ("my first", "Why & how?")
    assert '<a href="my%20first/index.html">Why &amp; how?</a>' in (mine / "index.html").read_text()
    assert dead_links(mine) == []


# ---------------------------------------------------------------- the study
