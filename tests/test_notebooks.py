"""What is committed as a notebook: thin, parameterised, without outputs, and free of what only a run needs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from study.report import build as report
from study.report import colab

NOTEBOOKS = sorted(report.NOTEBOOKS.glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def tagged(path: Path, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if tag in cell.metadata.get("tags", [])]


def parameters(path: Path) -> dict[str, Any]:
    """What a notebook's parameters cell says; raises ValueError where that is no literal."""
    (cell,) = tagged(path, "parameters")
    assigned = ast.parse(cell.source).body
    return {statement.targets[0].id: ast.literal_eval(statement.value) for statement in assigned}


def test_there_are_at_most_eight_and_those_of_runs_among_them():
    assert len(NOTEBOOKS) <= 8
    assert {*report.OF_RUNS, report.OF_AN_ARTICLE} <= {path.stem for path in NOTEBOOKS}


@each
def test_is_valid_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert len(cell.source.splitlines()) <= 20
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@each
def test_parameters_are_literals(path):
    found = parameters(path)
    if path.stem in report.OF_RUNS:
        assert found["control"] == "ddp"
        for name in ("records", "by_size", "fixed"):
            folders = found.get(name, [])
            for folder in [folders] if isinstance(folders, str) else folders:
                assert (report.ROOT / folder).is_dir()


@each
def test_has_one_set_up_cell_and_a_badge_where_the_project_is_published(path):
    *badges, set_up = tagged(path, "colab")
    published = colab.repository()
    assert re.findall(r"\]\((\S+)\)\Z", "".join(cell.source for cell in badges)) == (
        [colab.address(path.stem)] if published else []
    )
    assert f'repository = "{published}"' in set_up.source
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert cells.index(tagged(path, "parameters")[0].source) < cells.index(set_up.source)


def test_set_up_is_the_same_everywhere():
    found = {path.stem: tagged(path, "colab")[-1].source for path in NOTEBOOKS}
    (trains,) = {found.pop(name) for name in report.OF_RUNS}
    # What reads no runs trains none and needs nothing to train with.
    (others,) = set(found.values())
    assert trains.replace("[train,report]", "[report]").startswith(others.rstrip())
    assert "colab.train" in trains
