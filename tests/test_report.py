"""How notebooks are executed: strictly, in a kernel of this Python, and whole or not at all."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from matplotlib.text import Text
from synthetic import change, write_outcome, write_run

from study.claims import ledger
from study.compare import differences, memory_views
from study.errors import Refusal
from study.files import ROOT
from study.report import build as report
from study.report import plots, tables


def notebook(path: Path, *cells: str, parameters: str = "records = []") -> Path:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    made.cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    made.cells += [nbformat.v4.new_code_cell(source) for source in cells]
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"
    nbformat.write(made, path)
    return path


@pytest.fixture
def one_page(tmp_path, monkeypatch):
    """A report of a single notebook, made of the cells that a test gives; returns what builds it."""
    monkeypatch.setattr(report, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(report, "OF_RUNS", ("answer",))
    (tmp_path / "notebooks").mkdir()

    def build(*cells: str, output: Path = tmp_path / "out") -> Path:
        notebook(tmp_path / "notebooks" / "answer.ipynb", *cells, parameters='records = []\ncontrol = ""')
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
    report.execute(path, tmp_path / "done.ipynb", {"a": 2})
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert done.cells[-1].outputs[0].text == f"{sys.executable} False\n"
    assert done.cells[1].source == "# Parameters\na = 2\n"


@pytest.mark.launches
def test_failed_cell_is_one_line_and_keeps_the_notebook(one_page, tmp_path):
    """And the other files of the folder."""
    (tmp_path / "out" / "records").mkdir(parents=True)
    (first := tmp_path / "out" / "answer.ipynb").write_text("old")
    with pytest.raises(RuntimeError, match=r"^answer.ipynb, cell 3: ZeroDivisionError: division by zero; ") as failure:
        one_page("1 + 1", "1 / 0")
    kept = tmp_path / "out" / "answer.failed.ipynb"
    assert str(failure.value).endswith(f"the executed notebook is {kept}")
    assert "ZeroDivisionError" in kept.read_text()
    assert first.read_text() == "old"
    assert sorted(path.name for path in tmp_path.glob("out/*")) == [kept.name, first.name, "records"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notebooks", "out"]
    assert "whole again" in one_page("'whole again'").read_text()
    assert not kept.exists()


@pytest.mark.launches
def test_refusal_of_a_cell_is_a_refusal(one_page, tmp_path):
    with pytest.raises(Refusal, match=r"^records/x: no such folder; pass another$"):
        one_page("from study.config import Refusal", "raise Refusal('records/x: no such folder; pass another')")
    assert [path.name for path in tmp_path.iterdir()] == ["notebooks"]


@pytest.mark.launches
def test_two_executions_are_equal_to_the_byte_and_the_first_figure_is_beside_them(one_page, tmp_path):
    cells = (
        "import pandas as pd; pd.DataFrame({'a': [1]}).style",
        "import matplotlib.pyplot as plt; figure, _ = plt.subplots(); plt.close(figure); figure",
    )
    assert one_page(*cells).read_bytes() == one_page(*cells, output=tmp_path / "again").read_bytes()
    assert (tmp_path / "out" / "answer.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.launches
@pytest.mark.slow
def test_the_notebooks_of_runs_take_any_studys(tmp_path):
    """Where nothing was timed, one strategy alone ran, or some did not end well, too."""
    write_run(tmp_path / "one", strategy="zero2")
    for name in ("ddp", "zero2", "zero3"):
        write_run(tmp_path / "several", strategy=name)
    write_outcome(tmp_path / "several", "killed", strategy="fsdp2")
    for runs in ("one", "several"):
        made = report.build("smoke", [tmp_path / runs], tmp_path / f"{runs}-report")
        assert made.exists()


COMMITTED = ROOT / "reports"


def without(notebook: nbformat.NotebookNode, tag: str) -> list[str]:
    """Its cells, but for those of a tag: of the set-up, or of what papermill adds."""
    return [cell.source for cell in notebook.cells if tag not in cell.metadata.get("tags", [])]


def test_every_notebook_is_committed_executed():
    executed = {path.stem: nbformat.read(path, as_version=4) for path in COMMITTED.glob("*.ipynb")}
    plain = {path.stem for path in report.NOTEBOOKS.glob("*.ipynb")} - {report.OF_AN_ARTICLE}
    articles = {source.source for source in ledger.read() if source.sentences}
    assert set(executed) == plain | articles
    for name, notebook in executed.items():
        source = report.NOTEBOOKS / f"{name if name in plain else report.OF_AN_ARTICLE}.ipynb"
        asked = without(nbformat.read(source, as_version=4), "colab")
        assert without(notebook, "injected-parameters") == asked, f"{name}: make it again with `zero-study report`"
        text = json.dumps(notebook)
        assert not re.search(r"Traceback|<[\w.]+ object at|/home/|/root/|nan%", text), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two seeds of four strategies on two processes; one ended for want of memory."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        for name, seconds in {"ddp": 0.5, "zero2": 0.4, "zero3": 0.8, "zero3_tuned": 0.6}.items():
            write_run(folder, strategy=name, seed=seed, seconds=seconds, study="s")
    write_run(folder, strategy="zero1", status="out_of_memory", study="s")
    return folder


def test_tables_are_tidy(folder):
    runs = tables.runs(str(folder))
    assert list(runs["strategy"].unique()) == ["ddp", "zero1", "zero2", "zero3", "zero3_tuned"]
    for as_papermill_has_it in ([folder], json.dumps([str(folder)])):
        assert len(tables.runs(as_papermill_has_it)) == len(runs) == 9
    steps = tables.steps(folder)
    assert not steps.duplicated(["run", "step"]).any()
    states = tables.states(folder)
    assert (states["bytes_per_parameter"].dropna() >= 0).all()
    assert set(states["moment"]) == {"updating", "resting"}


def test_what_a_record_says_is_no_html(tmp_path):
    """A merged record's message went into the notebook and the site as it stood."""
    script = "<script>alert(1)</script>"
    change(write_outcome(tmp_path, "killed", message=script), size=script)
    write_run(tmp_path, strategy="ddp")
    runs = tables.runs(tmp_path)
    assert script not in runs.drop(columns=["record", "curve"]).to_html(escape=False)
    assert "&lt;script" in runs.set_index("status").loc["killed", "message"]
    for page in (
        memory_views.PEAKS.page([tmp_path]),
        memory_views.MODEL_STATES.page([tmp_path]),
        differences.page([tmp_path], "ddp"),
    ):
        assert "<script" not in page


def test_repeats_of_a_seed_count_once():
    runs = pd.DataFrame({"strategy": "ddp", "seed": [0, 0, 0, 1], "step": 1, "loss": [1.0, 1.0, 1.0, 3.0]})
    assert tables.mean(runs, "loss").loc["ddp", "loss"] == 2
    assert plots.loss_curves(runs).axes[0].lines[0].get_ydata() == [2]


def test_figures_draw_every_strategy_that_has_what_they_show(folder):
    ended = plots.only(tables.runs(folder), status="ok")
    drawn = [
        plots.loss_curves(tables.steps(folder)),
        plots.peak_by_part(ended),
        plots.relative_time(ended.assign(ratio=ended["step_seconds"])),
        plots.bars(tables.mean(ended, "step_seconds")["step_seconds"], "seconds")[0],
    ]
    for figure in drawn:
        figure.canvas.draw()
        words = [text.get_text() for text in figure.findobj(Text)]
        words += [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert {"ddp", "zero2", "zero3", "zero3_tuned"} <= set(words)
        assert "zero1" not in words
        assert figure.axes[0].get_xlabel()
