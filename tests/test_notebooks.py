"""What is committed as a notebook: thin, parameterised, without outputs, and free of what only a run needs."""

from __future__ import annotations

import re

import nbformat
import pytest
import reported

from study.report import build as report
from study.report import colab

each = pytest.mark.parametrize("path", reported.NOTEBOOKS, ids=lambda path: path.stem)


def test_every_notebook_is_a_page():
    assert {path.stem for path in reported.NOTEBOOKS} == set(report.PAGES)


@each
def test_is_valid_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_parameters_are_literals():
    of_runs = {"records": ["reports/cpu/records/cpu"], "box": "", "workload": ""}
    expected = dict.fromkeys(report.REPORT_PAGES, of_runs) | {
        "planner": {
            "model": "gpt2-xl",
            "gpu": "a100-80gb",
            "gpus": 8,
            "sequence_length": 1024,
            "global_batch_size": 64,
        },
        "protocol": {
            "results": "reports/cpu/published/protocol.json",
            "traps": "reports/cpu/published/traps.json",
        },
        "claims": {"source": ""},
        "others": {},
        "conformance": {},
    }
    expected["summary"] = {**of_runs, "study": "cpu", "times": [], "fixed": []}
    expected["loss_curves"] = {**of_runs, "study": "", "fixed": []}
    expected["peak_memory"] = {**of_runs, "predicted": ["reports/predicted"]}
    expected["runtime"] = {**of_runs, "study": "", "predicted": ["reports/predicted"], "times": []}
    assert {path.stem: reported.parameters(path) for path in reported.NOTEBOOKS} == expected


@each
def test_has_one_set_up_cell_and_a_badge_where_the_project_is_published(path):
    *badges, set_up = reported.tagged(path, "colab")
    published = colab.repository()
    assert re.findall(r"\]\((\S+)\)\Z", "".join(cell.source for cell in badges)) == (
        [colab.address(path.stem)] if published else []
    )
    assert f'repository = "{published}"' in set_up.source
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert cells.index(reported.tagged(path, "parameters")[0].source) < cells.index(set_up.source)


def test_set_up_is_the_same_everywhere():
    found = {path.stem: reported.tagged(path, "colab")[-1].source for path in reported.NOTEBOOKS}
    *common, last = found.pop("summary").splitlines()
    assert last.strip().startswith("study = ")
    # What reads no runs trains none and needs nothing to train with.
    (set_up,) = {found.pop(name) for name in report.SITE_PAGES}
    _, *lines = set_up.splitlines()
    assert lines == [line.replace("[train,report]", "[report]") for line in common[1 : len(lines) + 1]]
    assert "colab.train" in "".join(common[len(lines) + 1 :])
    assert set(found.values()) == {"\n".join(common)}
