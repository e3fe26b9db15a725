"""One site for all tests that look at one, with a report of the committed records.

Its kernels cannot import what a run imports.
"""

from __future__ import annotations

import ast
import html
import os
import re
from pathlib import Path
from typing import Any

import launching
import nbformat
import pytest

from study.compare import table
from study.report import build as report

HEAVY = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "evaluate")
NOTEBOOKS = sorted(report.NOTEBOOKS.glob("*.ipynb"))

# Where in the site each page is: the index, and by their notebooks those of the site and those of its report.
PLACES = (
    {"index": report.INDEX.file}
    | {name: page.file for name, page in (report.SITE_PAGES | report.article_pages()).items()}
    | {name: f"cpu/{page.file}" for name, page in report.REPORT_PAGES.items()}
)

# Python imports a module of this name whenever it starts.
BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is not on a laptop")

sys.meta_path.insert(0, Blocked())
"""


def site() -> Path:
    """The folder of the site, built at the first call."""
    return launching.once("site", _build) / "reports"  # as the committed one is called, which its pages name


def _build(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        report.build_site(folder / "reports")
        times = [report.ROOT / "reports" / "cpu" / "records" / "cpu-time"]
        fixed = [report.ROOT / "reports" / "cpu" / "records" / name for name in ("learning-bert", "learning-gpt")]
        report.build("cpu", records(), folder / "reports" / "cpu", times, fixed)


def text_of(site: Path, name: str) -> str:
    return (site / PLACES[name]).read_text(encoding="utf-8")


def read(piece: str) -> str:
    """What a reader reads of a piece of a page."""
    return html.unescape(" ".join(re.sub("<[^>]*>", " ", piece).split()))


def row_of(piece: str, name: str) -> str:
    """A row of a table, cell by cell."""
    row = re.search(rf'<tr><th scope="row">{name}</th>(.*?)</tr>', piece)[1]
    return " | ".join(read(cell) for cell in row.split("</td>")[:-1])


def records() -> list[Path]:
    """The committed records that the notebooks read unless they are told otherwise."""
    return [report.ROOT / folder for folder in parameters(report.NOTEBOOKS / "summary.ipynb")["records"]]


def num_runs() -> int:
    return len(table.read(records()))


def tagged(path: Path, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if tag in cell.metadata.get("tags", [])]


def parameters(path: Path) -> dict[str, Any]:
    """What a notebook's parameters cell says; raises ValueError where that is no literal."""
    (cell,) = tagged(path, "parameters")
    assigned = ast.parse(cell.source).body
    return {statement.targets[0].id: ast.literal_eval(statement.value) for statement in assigned}
