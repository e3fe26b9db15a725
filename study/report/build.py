"""How do notebooks become the pages of a report? Papermill executes them strictly; a static site comes of it."""

from __future__ import annotations

import html
import os
import shutil
import string
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from study import files
from study.errors import Refusal
from study.files import ROOT
from study.report import colab
from study.running import studies

if TYPE_CHECKING:
    import pandas as pd

NOTEBOOKS = ROOT / "notebooks"
STYLE = Path(__file__).with_name("style.css")
SCRIPT = Path(__file__).with_name("filter.js")  # of the pages that are filtered
CELL_TIMEOUT_SECONDS = 600


class Page(NamedTuple):
    file: str
    label: str  # in the navigation
    description: str


# By the notebook that each is made from, in the order of the navigation.
PAGES = {
    "summary": Page("index.html", "Answer", "The question, the answer in one table, and how to reproduce it."),
    "loss_curves": Page("loss_curves.html", "Losses", "Does the strategy change what is learned?"),
    "peak_memory": Page("peak_memory.html", "Memory", "What does a rank hold, measured and by the paper?"),
    "runtime": Page("runtime.html", "Time", "How long does a step take, and how sure is that?"),
    "single_vs_multi": Page("single_vs_multi.html", "Processes", "What does a larger world cost and save?"),
    "strategies": Page("strategies.html", "Proof", "Which strategy was asked, and which one ran?"),
    "planner": Page("planner.html", "Planner", "What would a model need on GPUs that nobody here has? Predicted."),
    "protocol": Page("protocol.html", "Protocol", 'Which defects of a published program make "ZeRO is better"?'),
    "claims": Page("claims.html", "Claims", "What became of each published claim, and where do the sources disagree?"),
}

OF_A_STUDY = ("summary", "loss_curves", "runtime")  # the notebooks that ask what the study says
OF_NO_RUNS = ("planner", "protocol", "claims")  # those that read no records
FILTERED = ("claims",)  # those with a list that a reader filters

# Cells that are for a notebook and not for a page: the badge, the set-up, and what papermill was given.
NOT_SHOWN = {"colab", "parameters", "injected-parameters"}

SHELL = string.Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="description" content="$description">
<title>$title</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="style.css">
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<p><a href="index.html">ZeRO replication study: $study</a></p>
<nav aria-label="Pages of this report"><ul>
$links
</ul></nav>
</header>
<main id="content">
$body
</main>
<footer>
<details>
<summary>How this page was made</summary>
<p>By <code>$command</code>, from <a href="$notebook">notebooks/$name.ipynb</a>
(<a href="$colab">open it in Colab</a>); what follows is its code.</p>
$code
</details>
</footer>
$script</body>
</html>
""")


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
            said = studies.find(name).control
        except Refusal:
            continue
        if said in there:
            return said
    return next((plain for plain in ("ddp", "single") if plain in there), there[0])


def build(study: str, folders: Sequence[Path], output: Path) -> Path:
    """Execute the notebooks on the records in these folders and write the site into `output`; return its first page.

    The pages there are replaced when all new ones are made; other files stay. Raises Refusal for what the notebooks
    refuse, and RuntimeError where a cell fails: then the executed notebook is kept in `output`.
    """
    if output.exists() and not output.is_dir():
        raise Refusal(f"--output {output}: is not a folder; name another one")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        made = Path(scratch)
        for name, page in PAGES.items():
            started = time.monotonic()
            parameters: dict[str, Any] = {}
            if name not in OF_NO_RUNS:
                parameters["records"] = [str(folder) for folder in folders]
            if name in OF_A_STUDY:
                parameters["study"] = study
            executed = made / f"{name}.ipynb"
            try:
                execute(NOTEBOOKS / f"{name}.ipynb", executed, parameters)
            except RuntimeError as error:
                output.mkdir(exist_ok=True)
                kept = output / f"{name}.failed.ipynb"
                os.replace(executed, kept)
                raise RuntimeError(f"{error}; the executed notebook is {kept}") from None
            (made / page.file).write_text(convert(executed, name, study, folders, output), encoding="utf-8")
            print(f"{output / page.file}: {time.monotonic() - started:.0f} s", flush=True)
        shutil.copyfile(STYLE, made / "style.css")
        output.mkdir(exist_ok=True)
        for file in ("style.css", *(page.file for page in PAGES.values())):
            os.replace(made / file, output / file)
    for name in PAGES:
        (output / f"{name}.failed.ipynb").unlink(missing_ok=True)
    return output / PAGES["summary"].file


def execute(notebook: Path, target: Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook with these parameters in a kernel of this Python; write it to `target`, executed.

    Raises Refusal for a parameter that the notebook does not declare and for what a cell refuses; RuntimeError where a
    cell fails otherwise. `target` is then written too.
    """
    import papermill
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    declared = papermill.inspect_notebook(notebook)
    if unknown := sorted(set(parameters) - set(declared)):
        raise Refusal(
            f"{notebook.name}: no parameter is named {', '.join(unknown)}; its cell tagged `parameters` declares "
            f"{', '.join(declared) or 'none'}"
        )
    with tempfile.TemporaryDirectory(prefix="zero-study-") as private:

        class OwnKernel(AsyncKernelManager):
            """Starts the Python that runs this, whatever kernel the user has registered, and leaves no file behind."""

            transport = "ipc"
            connection_file = str(Path(private) / "kernel.json")

            def _kernel_spec_manager_default(self) -> KernelSpecManager:
                return KernelSpecManager(kernel_dirs=[])

        try:
            papermill.execute_notebook(
                notebook,
                target,
                dict(parameters),
                kernel_name="python3",
                progress_bar=False,
                kernel_manager_class=OwnKernel,
                # The user's start-up files are no part of a report; that it is asked to end is no error to the kernel.
                extra_arguments=[f"--ipython-dir={private}", "--log-level=CRITICAL"],
                execution_timeout=CELL_TIMEOUT_SECONDS,
            )
        except PapermillExecutionError as error:
            if error.ename == "Refusal":
                raise Refusal(error.evalue) from None
            first = next(iter(error.evalue.splitlines()), "")
            raise RuntimeError(f"{notebook.name}, cell {error.cell_index}: {error.ename}: {first}") from None
        except (CellTimeoutError, DeadKernelError) as error:
            first = next(iter(str(error).splitlines()), "")
            raise RuntimeError(f"{notebook.name}: {type(error).__name__}: {first}") from None


def convert(executed: Path, name: str, study: str, folders: Sequence[Path], output: Path) -> str:
    """Make the page of an executed notebook: its text and its outputs; its code is folded at the foot."""
    import nbformat

    cells = [
        cell
        for cell in nbformat.read(executed, as_version=4).cells
        if not NOT_SHOWN.intersection(cell.metadata.get("tags", []))
    ]
    page = PAGES[name]
    body = [part for cell in cells for part in _shown_cell(cell)]
    if name == "summary":
        others = [other for other in PAGES.values() if other != page]
        links = "\n".join(f'<li><a href="{o.file}">{o.label}</a>: {html.escape(o.description)}</li>' for o in others)
        body.append(f"<h2>The other pages</h2>\n<ul>\n{links}\n</ul>")
    code = "\n\n".join(cell.source for cell in cells if cell.cell_type == "code")
    words = [
        "zero-study",
        "report",
        files.shown_path(Path(study)),
        *(w for f in folders for w in ("--records", files.shown_path(f))),
    ]
    shown = html.escape(Path(study).stem)
    return SHELL.substitute(
        study=shown,
        title=f"{page.label}: {shown}, ZeRO replication study",
        description=html.escape(f"{question(study)} {page.description}"),
        links="\n".join(_link(other, other == page) for other in PAGES.values()),
        body="\n".join(body),
        command=html.escape(" ".join([*words, "--output", files.shown_path(output)])),
        name=name,
        notebook=f"{colab.REPOSITORY}/blob/main/notebooks/{name}.ipynb",
        colab=colab.address(name),
        code=f'<pre tabindex="0"><code>{html.escape(code)}</code></pre>',
        script=f"<script>\n{SCRIPT.read_text(encoding='utf-8')}</script>\n" if name in FILTERED else "",
    )


def _link(page: Page, current: bool) -> str:
    mark = ' aria-current="page"' if current else ""
    return f'<li><a href="{page.file}"{mark}>{page.label}</a></li>'


def _shown_cell(cell: Any) -> list[str]:
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark").enable("table")
    if cell.cell_type == "markdown":
        return [markdown.render(cell.source)]
    parts = []
    for output in cell.get("outputs", []):
        content = output.get("data", {})
        if "text/html" in content:
            parts.append(content["text/html"])
        elif "text/markdown" in content:
            parts.append(markdown.render(content["text/markdown"]))
        else:
            text = output.get("text", content.get("text/plain", ""))
            parts.append(f'<pre tabindex="0">{html.escape(text)}</pre>')
    return parts
