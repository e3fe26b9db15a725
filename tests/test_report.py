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
from synthetic import write_run

from study.compare import table
from study.errors import Refusal
from study.report import build as report
from study.report import notebook as executing
from study.running import studies

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


def test_first_page_has_the_question_the_figure_and_the_answer_in_this_order(site):
    text = reported.text_of(site, "summary")
    assert f"<h1>{studies.find('cpu').question}</h1>" in text
    assert text.index("<figure") < text.index("The answer") < text.index("<table>")
    assert f'<th scope="row">runs</th><td>{reported.num_runs()}</td>' in text
    assert "zero-study run cpu" in text


def test_times_are_those_of_the_quiet_runs(site):
    measured = reported.text_of(site, "runtime").partition("Predicted, not measured")[0]
    assert "bert-imdb mini" in measured
    assert "bert-imdb micro" not in measured


@pytest.mark.parametrize("name", ["peak_memory", "runtime"])
def test_predictions_come_last_and_look_predicted(name, site):
    measured, _, after = reported.text_of(site, name).partition("<h2>Predicted, not measured</h2>")
    assert "\N{ALMOST EQUAL TO}" not in measured
    assert 'class="predicted' not in measured
    assert after.count('<section class="predicted">') == len(list((report.ROOT / "reports/predicted").glob("*x")))


def test_pages_have_figures(site):
    for name in (*report.REPORT_PAGES, "planner", "others", "conformance"):
        assert "<figure" in reported.text_of(site, name), name


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


def test_unknown_parameter_is_refused(tmp_path):
    path = notebook(tmp_path / "one.ipynb", "records", parameters='records = []\nbox = ""')
    with pytest.raises(
        Refusal, match=r"^one.ipynb: no parameter is named recods; its cell tagged `parameters` declares records, box$"
    ):
        executing.execute(path, tmp_path / "done.ipynb", {"recods": ["a"], "box": ""})
    assert not (tmp_path / "done.ipynb").exists()


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


@pytest.mark.launches
def test_outputs_of_every_kind(one_page):
    text = one_page(
        "print('1 < 2')",
        "from IPython.display import Markdown; Markdown('**bold**')",
        "from study.report.markup import Html; Html('<p>kept</p>')",
    ).read_text()
    assert '<pre tabindex="0"><code>1 &lt; 2\n</code></pre>' in text
    assert "<strong>bold</strong>" in text
    assert "<p>kept</p>" in text


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


def test_index_lists_every_report():
    folders = {path.parent.name for path in COMMITTED.glob("*/index.html")}
    found = report.reports(COMMITTED)
    assert {name for name, _ in found} == folders >= {"cpu"}
    page = (COMMITTED / "index.html").read_text(encoding="utf-8")
    for name, question in found:
        assert f'<dt><a href="{name}/index.html">{html.escape(question)}</a></dt>' in page


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


def test_report_does_not_replace_a_site_nor_a_site_a_report(one_page, site):
    with pytest.raises(
        Refusal, match=r"holds the site of all reports; name a folder in it, such as \S+/reports/smoke$"
    ):
        one_page("'x'", output=site)
    with pytest.raises(Refusal, match=r"its index.html is not that of a site; name the folder of all reports$"):
        report.build_site(site / "cpu")


# ---------------------------------------------------------------- the study


def test_question_of_an_unknown_study_is_its_name():
    assert report.question("elsewhere") == "elsewhere"
    assert report.question("offload") == studies.find("offload").question


def test_control_is_the_studys(tmp_path):
    for strategy in ("single", "ddp", "zero3"):
        write_run(tmp_path, strategy=strategy, world_size=1 if strategy == "single" else 2, study="offload")
    runs = table.read([tmp_path])
    assert report.control(runs) == "zero3"  # of the study offload
    assert report.control(runs.assign(study=None)) == "ddp"
    mine = tmp_path / "mine.yaml"  # of which the runs say the name only
    mine.write_text("question: Which one?\ncontrol: single\nparts: [{strategies: [single, ddp]}]\n")
    assert report.control(runs.assign(study="mine"), str(mine)) == "single"
    assert report.control(runs[runs["strategy"] == "single"]) == "single"
    assert report.control(runs.assign(study="elsewhere", strategy="fsdp2")) == "fsdp2"
