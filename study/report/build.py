"""A study's report, and the site around all reports: papermill executes notebooks, Jinja2 frames their pages."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from study import files
from study.claims import ledger
from study.compare import verdict_text
from study.errors import Refusal
from study.files import ROOT
from study.planner.asked import PLANNED
from study.report import colab, markup, notebook
from study.report.markup import Html
from study.running import studies

if TYPE_CHECKING:
    import pandas as pd

NOTEBOOKS = ROOT / "notebooks"
_HERE = Path(__file__).parent
STYLE = _HERE / "style.css"
# The scripts of pages that have one, by notebook: a list that a reader filters, and the planner that she asks.
SCRIPTS = {"claims": _HERE / "filter.js", "planner": _HERE / "planner.js"}
PROJECT = "ZeRO replication study"
FIRST = "index.html"


class Page(NamedTuple):
    file: str
    label: str  # in the navigation
    description: str


class Frame(NamedTuple):
    """What the pages of one folder share: those of a report alone, of a report in a site, or the site's own."""

    command: str  # that made them
    report: str = ""  # its name
    question: str = ""
    of_report: Sequence[Page] = ()
    of_site: Sequence[Page] = ()  # the first leads to all reports
    to_site: str = ""  # from this folder to the site's

    def around(self, page: Page, body: str, source: str, code: str = "", script: str = "") -> str:
        """The whole page: a body with its head, the navigation, and at its foot how it was made."""
        return str(
            markup.render(
                "page.html",
                frame=self,
                page=page,
                project=PROJECT,
                title=f"{page.label}: {self.report}, {PROJECT}" if self.report else f"{page.label}, {PROJECT}",
                description=" ".join(text for text in (self.question, page.description) if text),
                body=Html(body),
                source=source,
                code=markup.code_block(code) if code else "",
                script=Html(script),
            )
        )


INDEX = Page(FIRST, "All reports", "What it costs and saves to spread a training over several processors.")
# By the notebook that each is made from, in the order of the navigation: the pages of a report, which read its runs,
REPORT_PAGES = {
    "summary": Page(FIRST, "Answer", "The question, the answer in one table, the proof, and how to reproduce it."),
    "loss_curves": Page("loss_curves.html", "Losses", "Does the strategy change what is learned?"),
    "peak_memory": Page("peak_memory.html", "Memory", "What does a rank hold, measured and by the paper?"),
    "runtime": Page("runtime.html", "Time", "How long does a step take, and how sure is that?"),
    "single_vs_multi": Page("single_vs_multi.html", "Processes", "What does a larger world cost and save?"),
}
# and those that belong to none, which a site has once.
SITE_PAGES = {
    "planner": Page("planner.html", "Planner", "What would a model need on GPUs that nobody here has? Predicted."),
    "others": Page("others.html", "Others", "What did others measure on one GPU and on many, and what can be checked?"),
    "protocol": Page("protocol.html", "Protocol", 'Which defects of a published program make "ZeRO is better"?'),
    "conformance": Page("conformance.html", "Versions", "Which releases of the engines train what they say?"),
    "claims": Page("claims.html", "Claims", "What became of each published claim, and where do the sources disagree?"),
}

PAGES = REPORT_PAGES | SITE_PAGES
OF_SITE = [INDEX, *SITE_PAGES.values()]  # in the order of its navigation

OF_A_STUDY = ("summary", "loss_curves", "runtime")  # the notebooks that ask what the study says
OF_TIMES = ("summary", "runtime")  # those that may take times from other records
OF_FIXED = ("summary", "loss_curves")  # those that show studies fixed in advance


def question(study: str) -> str:
    """The question of a study; its name where no such study is known here."""
    try:
        return studies.find(study).question
    except Refusal:
        return study


def control(runs: pd.DataFrame, study: str = "") -> str:
    """The strategy that the others are compared with: as the study says, or the runs' own, else the plainest."""
    there = list(runs["strategy"].unique())
    for name in (study, *runs["study"].dropna().unique()):
        try:
            strategy = studies.find(name).control
        except Refusal:
            continue
        if strategy in there:
            return strategy
    return next((plain for plain in ("ddp", "single") if plain in there), there[0])


def build(
    study: str, folders: Sequence[Path], output: Path, times: Sequence[Path] = (), fixed: Sequence[Path] = ()
) -> Path:
    """Make a report of the records in these folders and write it into `output`; return its first page.

    `times`: folders whose times count instead. `fixed`: those of studies that were fixed in advance, which decide what
    was learned; the report's own study is one of them where it has a protocol.
    In the folder of a site its pages lead to the site's, and the site's index to it; elsewhere it stands alone.
    """
    name = Path(study).stem
    if _is_site(output):
        raise Refusal(f"--output {output}: holds the site of all reports; name a folder in it, such as {output / name}")
    fixed = fixed or _own_verdict(study, folders)
    given = [("--records", folders), ("--times", times), ("--fixed", fixed)]
    words = [files.shown_path(Path(study))]
    words += [word for option, chosen in given for folder in chosen for word in (option, files.shown_path(folder))]
    frame = Frame(_command(*words, output=output), name, question(study), list(REPORT_PAGES.values()))
    site = Path(os.path.abspath(output)).parent
    if _is_site(site):
        frame = frame._replace(of_site=OF_SITE, to_site="../")
    records = [str(folder) for folder in folders]
    parameters: dict[str, dict[str, Any]] = {page: {"records": records} for page in REPORT_PAGES}
    for page in OF_A_STUDY:
        parameters[page]["study"] = study
    for pages, name, chosen in ((OF_TIMES, "times", times), (OF_FIXED, "fixed", fixed)):
        for page in parameters.keys() & set(pages) if chosen else ():
            parameters[page][name] = [str(folder) for folder in chosen]
    _make(frame, parameters, output, REPORT_PAGES)
    if frame.of_site:
        write_index(site)
    else:
        shutil.copyfile(STYLE, output / STYLE.name)
    return output / FIRST


def _own_verdict(study: str, folders: Sequence[Path]) -> Sequence[Path]:
    """The folders, where the report's own study has a protocol and its runs can be held to it already."""
    try:
        chosen = studies.find(study)
    except Refusal:
        return ()
    if chosen.protocol is None:
        return ()
    try:
        verdict_text.decide(folders, chosen)
    except Refusal as refusal:
        print(f"no verdict yet: {refusal}", flush=True)
        return ()
    return folders


def build_site(output: Path) -> Path:
    """Make the pages that belong to no report, and the index of the reports in `output`; return the index."""
    first = output / FIRST
    if first.exists() and not _is_site(output):
        raise Refusal(f"--output {output}: its {first.name} is not that of a site; name the folder of all reports")
    parameters: dict[str, dict[str, Any]] = {name: {} for name in SITE_PAGES}
    parameters |= {name: {"source": name} for name in article_pages()}
    _make(Frame(_command(output=output), of_site=OF_SITE), parameters, output, SITE_PAGES | article_pages())
    planned, copied = (reports / PLANNED.folder for reports in (ROOT / "reports", output))
    if planned.is_dir() and planned.resolve() != copied.resolve():
        shutil.copytree(planned, copied, dirs_exist_ok=True)
    write_index(output)
    return first


def article_pages() -> dict[str, Page]:
    """The page of each article that is sorted into sentences, by the article's name."""
    return {
        source.source: Page(
            f"{source.source}.html", source.title, "Which of its sentences hold, and what to do instead."
        )
        for source in ledger.read()
        if source.sentences
    }


def _notebook_of(name: str) -> str:
    """The notebook that a page is made from; articles have that of all claims."""
    return name if name in PAGES else "claims"


def _command(*words: str, output: Path) -> str:
    return " ".join(["zero-study", "report", *words, "--output", files.shown_path(output)])


def _is_site(folder: Path) -> bool:
    """Whether this folder has all pages of a site: its index, which says so in its title, is written last."""
    first = folder / FIRST
    return first.is_file() and f"<title>{INDEX.label}," in first.read_text("utf-8")


def reports(site: Path) -> list[tuple[str, str]]:
    """The reports in the folders of a site: the name of each, and its question, which is its first page's heading."""
    first_pages = sorted(site.glob(f"[!.]*/{FIRST}"))  # without those that are being made
    found = {page.parent.name: re.search("<h1>(.+?)</h1>", page.read_text("utf-8")) for page in first_pages}
    return [(name, Html(heading[1]).unescape()) for name, heading in found.items() if heading]


def write_index(site: Path) -> None:
    """Write the index of the reports in a site's folders, and the style that they share."""
    frame = Frame("zero-study report", of_site=OF_SITE)
    body = markup.render("index.html", reports=reports(site), pages=OF_SITE[1:])
    shutil.copyfile(STYLE, site / STYLE.name)
    files.write_whole(site / FIRST, frame.around(INDEX, body, "the first page of each report").encode())


def _make(frame: Frame, parameters: Mapping[str, Mapping[str, Any]], output: Path, pages: Mapping[str, Page]) -> None:
    """Execute these notebooks with their parameters, and write their pages into `output`.

    The pages there are replaced when all new ones are made; other files stay. Raises Refusal for what the notebooks
    refuse, and RuntimeError where a cell fails: then the executed notebook is kept in `output`.
    """
    if output.exists() and not output.is_dir():
        raise Refusal(f"--output {output}: is not a folder; name another one")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        made = Path(scratch)
        for name in parameters:
            started = time.monotonic()
            executed = made / f"{name}.ipynb"
            try:
                notebook.execute(NOTEBOOKS / f"{_notebook_of(name)}.ipynb", executed, parameters[name])
            except RuntimeError as error:
                output.mkdir(exist_ok=True)
                kept = output / f"{name}.failed.ipynb"
                os.replace(executed, kept)
                raise RuntimeError(f"{error}; the executed notebook is {kept}") from None
            (made / pages[name].file).write_text(convert(executed, name, pages[name], frame), encoding="utf-8")
            print(f"{output / pages[name].file}: {time.monotonic() - started:.0f} s", flush=True)
        output.mkdir(exist_ok=True)
        for name in parameters:
            os.replace(made / pages[name].file, output / pages[name].file)
    for name in parameters:
        (output / f"{name}.failed.ipynb").unlink(missing_ok=True)


def convert(executed: Path, name: str, page: Page, frame: Frame) -> str:
    """The page of an executed notebook: its text and its outputs; its code is folded at the foot."""
    body, code = notebook.shown(executed)
    made_from = _notebook_of(name)
    source = f"notebooks/{made_from}.ipynb"
    if published := colab.repository():
        links = Html('<a href="{}/blob/main/{}">{}</a> (<a href="{}">open it in Colab</a>)')
        source = links.format(published, source, source, colab.address(made_from))
    script = SCRIPTS[made_from].read_text("utf-8") if made_from in SCRIPTS else ""
    return frame.around(page, body, source, code, script)
