"""How notebooks are executed: strictly, in a kernel of this Python, and whole or not at all."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from matplotlib.text import Text
from synthetic import change, write_outcome, write_run

from study.claims import defects, ledger, traps, verdicts
from study.claims import sentences as claims
from study.compare import differences, memory_views
from study.report import article, captions, drawing, plots, sentences, tables
from study.report import build as report
from study.report.pages import results, step_times
from zero_study.errors import Refusal
from zero_study.files import ROOT


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
    completed = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert completed.cells[-1].outputs[0].text == f"{sys.executable} False\n"
    assert completed.cells[1].source == "# Parameters\na = 2\n"


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


@pytest.mark.slow
@pytest.mark.launches
def test_refusal_of_a_cell_is_a_refusal(one_page, tmp_path):
    with pytest.raises(Refusal, match=r"^records/x: no such folder; pass another$"):
        one_page("from study.config import Refusal", "raise Refusal('records/x: no such folder; pass another')")
    assert [path.name for path in tmp_path.iterdir()] == ["notebooks"]


@pytest.mark.slow
@pytest.mark.launches
def test_two_executions_are_equal_to_the_byte_and_the_first_figure_is_beside_them(one_page, tmp_path):
    cells = (
        "import pandas as pd; pd.DataFrame({'a': [1]}).style",
        "import matplotlib.pyplot as plt; figure, _ = plt.subplots(); plt.close(figure); figure",
    )
    assert one_page(*cells).read_bytes() == one_page(*cells, output=tmp_path / "again").read_bytes()
    assert (tmp_path / "out" / "answer.png").read_bytes().startswith(b"\x89PNG")


def test_runs_with_one_process_have_no_notebook_about_more(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "_make", lambda notebooks, _: made.append(set(notebooks)))
    (tmp_path / f"{report.OF_RUNS[0]}.ipynb").write_text('{"cells": []}')
    made: list[set[str]] = []
    for world_size in (1, 2):
        write_run(tmp_path / "runs", strategy="zero2", world_size=world_size)
        report.build("smoke", [tmp_path / "runs"], tmp_path)
    assert made == [set(report.OF_RUNS) - {report.OF_SEVERAL_PROCESSES}, set(report.OF_RUNS)]


@pytest.mark.launches
@pytest.mark.parametrize("box", ["gpu", pytest.param("cpu", marks=pytest.mark.slow)])
def test_runs_on_gpus_replace_predictions(one_page, tmp_path, box):
    write_run(tmp_path / "runs", box=box)
    notebook(tmp_path / "notebooks" / f"{report.OF_GPUS}.ipynb", "print(records)")
    assert str(tmp_path) in one_page("print(records)").read_text()
    executed = tmp_path / "out" / f"{report.OF_GPUS}.ipynb"
    assert executed.exists() == (box == "gpu")
    assert box == "cpu" or f"['{tmp_path}']" in executed.read_text()


@pytest.mark.launches
@pytest.mark.slow
def test_the_notebooks_of_runs_take_any_studys(tmp_path):
    """Where nothing was timed, one strategy alone ran that no stored study has, or some did not end well, too."""
    write_run(tmp_path / "one", strategy="zero3_hpz")
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
    articles = {source.source: source.title for source in ledger.read() if source.sentences}
    assert set(executed) == plain | set(articles)
    for name, notebook in executed.items():
        source = report.NOTEBOOKS / f"{name if name in plain else report.OF_AN_ARTICLE}.ipynb"
        asked = source.read_text(encoding="utf-8")
        asked = report.with_title(asked, articles[name]) if name in articles else asked
        requested = without(nbformat.reads(asked, as_version=4), "colab")
        assert without(notebook, "injected-parameters") == requested, f"{name}: make it again with `zero-study report`"
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


def test_captions_name_model_precision_processes_hardware_and_source(folder):
    runs = tables.runs(folder)
    caption = captions.figure("Peak memory", runs, captions.PREDICTED)
    assert caption.startswith(
        "**Peak memory.** GPT with 1.6 million parameters, fp32, 2 processes, 8 sequences per step,"
    )
    assert f"on a CPU ({runs['box'].iloc[0]}). Predicted" in caption
    scope = captions.scope(runs)
    for part in ("9 runs", "study s", "40 steps", "2 seeds"):
        assert part in scope


OPTIONS = {
    "all weights": {},
    "adapter": {"lora_rank": 16},
    "4 bits": {"lora_rank": 16, "load_in_4bit": True},
    "compiled": {"compile": True},
    "checkpointing": {"activation_checkpointing": True},
    "on one GPU": {"share_device": True},
}


def test_runs_with_other_options_are_not_compared(tmp_path):
    """One GPU's records have all of these, of one model, precision and batch."""
    for name, options in OPTIONS.items():
        for strategy in ("ddp", "zero2"):
            write_run(tmp_path / name, strategy=strategy, **options)
    settings = tables.settings(tables.runs([tmp_path / name for name in OPTIONS]), "ddp")
    assert len(settings) == len(OPTIONS)
    assert all(tables.relative(rows, "ddp")["runs"].to_list() == [1, 1] for rows in settings)
    assert len({captions.setting(rows) for rows in settings}) == len(OPTIONS)


def test_losses_are_compared_in_a_setting_of_the_control(tmp_path):
    """gpu-bert-large has as many strategies in bf16, in which single was not run, as in bf16-autocast."""
    for precision, strategies in {"bf16": ("zero2", "zero3", "fsdp2"), "bf16-autocast": ("single", "zero2")}.items():
        for strategy in strategies:
            write_run(tmp_path, strategy=strategy, world_size=1, precision=precision)
    runs = tables.runs(tmp_path)
    assert set(tables.of_one_setting(runs, "single")["precision"]) == {"bf16-autocast"}
    assert set(tables.of_one_setting(runs, "zero2")["precision"]) == {"bf16"}
    (apart,) = tables.without_control(runs, "single")
    assert set(apart["strategy"]) == {"zero2", "zero3", "fsdp2"}


def test_ranks_that_share_a_gpu_have_no_time(tmp_path):
    write_run(tmp_path / "one", strategy="ddp", share_device=True)
    write_run(tmp_path / "two", strategy="ddp")
    runs = tables.runs([tmp_path / "one", tmp_path / "two"])
    assert runs["why_untimed"].notna().tolist() == (runs["options"] != "").tolist()
    assert runs["why_untimed"].notna().sum() == 1


def test_a_ratio_to_nothing_is_left_out(tmp_path):
    """One process without an engine sends nothing."""
    for strategy in ("single", "ddp"):
        write_run(tmp_path, strategy=strategy, world_size=1)
    (rows,) = tables.settings(tables.runs(tmp_path), "single")
    rows["sent_gib_per_step"] = rows["strategy"].map({"single": 0.0, "ddp": 1.0})
    assert "data sent" not in tables.relative(rows, "single")
    assert "peak memory" in tables.relative(rows, "single")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"parameters": [1.5e6, 124.4e6]}, "GPT with 1.5 to 124 million parameters"),
        ({"parameters": [None, None]}, "GPT large and tiny"),
        (
            {"workload": ["gpt-wikitext", "bert-imdb"]},
            "GPT with 1.5 million parameters and BERT with 335 million parameters",
        ),
        ({"workload": ["other", "other"]}, "other with 1.5 to 335 million parameters"),
    ],
)
def test_models_are_named_in_words(values, expected):
    rows = {"workload": ["gpt-wikitext"] * 2, "size": ["tiny", "large"], "parameters": [1.5e6, 335e6]} | values
    assert captions.model(pd.DataFrame(rows)) == expected


def test_ratios_to_the_control_and_their_sentences(folder):
    (rows,) = tables.settings(plots.filter_runs(tables.runs(folder), status="ok"), "ddp")
    ratios = tables.relative(rows, "ddp")
    assert list(ratios.index) == ["ddp", "zero2", "zero3", "zero3_tuned"]
    assert (ratios.loc["ddp"].drop(["loss difference", "runs"]) == 1).all()
    assert ratios.loc["zero3", "step time"] == pytest.approx(1.6, rel=0.02)
    assert tables.lowest(ratios, "step time", "ddp") == f"{ratios.loc['zero2', 'step time']:.2f}x (zero2)"
    said = sentences.comparison(rows, "ddp")
    assert f"{ratios.loc['zero3', 'step time']:.2f} times (zero3) as long" in said
    assert "After 40 steps" in said
    assert "Only ddp" in sentences.comparison(plots.filter_runs(rows, strategy="ddp"), "ddp")


def test_the_result_is_computed_from_the_runs(tmp_path):
    """One process is compared with two, the picture has only timed strategies, and what differs or failed is named."""
    for name in ("ddp", "zero1", "zero2_tuned"):
        path = write_run(tmp_path, strategy=name)
        change(path, proof={"reduce_bucket_size": {"zero1": 500_000_000, "zero2_tuned": 16384}.get(name)})
    change(path, timing=None)
    write_run(tmp_path, strategy="single", world_size=1)
    write_outcome(
        tmp_path, "skipped", strategy="fsdp2_cpu_offload", message="fsdp2_cpu_offload needs a GPU, because it"
    )
    page = results.Results([str(tmp_path)], "ddp")
    ratios = tables.relative(page.first, "ddp")["peak memory"]
    result = page.result()
    loss = f"{page.first['loss'].iloc[0]:.4f}"
    for part in (
        "4 of 5 strategies trained (fsdp2_cpu_offload needs a GPU).",
        f"on 1 and 2 processes under 4 strategies: {loss}.",
        f"{ratios.min():.2f} times that of ddp", "500 million elements",
        f"{ratios['zero2_tuned']:.2f} times (zero2_tuned)",
    ):  # fmt: skip
        assert part in result
    labels = [{label.get_text() for label in axes.get_yticklabels()} for axes in page.overview().axes]
    assert labels[1:] == [{"single", "ddp", "zero1"}] * 2
    write_run(tmp_path, strategy="zero3", loss_shift=0.5)
    write_run(tmp_path, strategy="zero1", status="out_of_memory", workload="bert-imdb")
    result = results.Results([str(tmp_path)], "ddp").result()
    assert "5 of 6 strategies trained (zero1: out of memory in 1 of 2 runs; fsdp2_cpu_offload needs a GPU)" in result
    assert "1 and 2 processes differ" in result
    assert "(zero3). " in result


def test_the_result_compares_memory_and_times_only_between_equal_numbers_of_processes(tmp_path):
    for name, world_size, seconds in (("ddp", 2, 0.1), ("fsdp2", 2, 0.15), ("zero1", 4, 0.5)):
        write_run(tmp_path, strategy=name, world_size=world_size, seconds=seconds)
    page = results.Results([str(tmp_path)], "ddp")
    result = page.result()
    assert "on 2 and 4 processes under 3 strategies" in result
    assert "(zero1)" not in result
    ratios = tables.relative(page.first[page.first["processes"] == 2], "ddp")
    assert f"{ratios.loc['fsdp2', 'step time']:.2f} times (fsdp2) as long as under ddp" in result


def test_own_runs_of_three_strategies_have_a_figure_of_times_or_a_reason(tmp_path):
    for name, world_size in {"single": 1, "ddp": 2, "zero3_tuned": 2}.items():
        path = write_run(tmp_path, strategy=name, world_size=world_size)
    (rows,) = step_times.StepTimes([str(tmp_path)], "ddp").settings
    assert set(rows.loc[rows["ratio"].notna(), "strategy"]) == {"single", "ddp", "zero3_tuned"}
    change(path, timing=None)
    untimed = step_times.StepTimes([str(tmp_path)], "ddp")
    assert not untimed.settings
    assert "1 of 3 runs have no time: no step was timed." in untimed.answer().data


def test_losses_say_after_how_many_steps_and_which_strategy():
    differences = pd.Series({"zero2": 1e-7, "zero3": 0.0})
    assert "3 steps" in (said := sentences.losses(differences, 3, "ddp"))
    assert "1e-7 (zero2)" in said
    assert "are equal to ddp's" in sentences.losses(differences * 0, 3, "ddp")
    assert sentences.losses(differences * float("nan"), 3, "ddp") == ""
    by_seed = pd.DataFrame({"zero2": [1e-4, 0.1]}, index=[0, 1])
    assert "1e-4 with seed 0 and 1e-1 with seed 1" in sentences.losses_by_seed("BERT", by_seed, 160, "ddp")
    assert "1e-4 with each of 2 seeds" in sentences.losses_by_seed("BERT", by_seed.assign(zero2=1e-4), 160, "ddp")


def test_memory_and_processes_in_words():
    peaks = pd.DataFrame({"peak_gib": [2.0, 3.0, 1.0], "peak_process_gib": [4.0, 5.0, None]}, ["ddp", "zero2", "fsdp2"])
    said = sentences.memory(peaks, "ddp")
    assert "Of the 2 other strategies, 1 use" in said
    assert "between 0.50 times (fsdp2) and 1.50 times (zero2)" in said
    assert "1.25 times (zero2)" in said  # of whole processes, where it is known
    falling = pd.DataFrame({2: [2.0, 4.0], 4: [2.0, 1.0]}, index=["ddp", "zero3"])
    assert "75 % under zero3" in (said := sentences.more_processes(falling))
    assert "0 % under ddp" in said
    assert "No strategy" in sentences.more_processes(falling[[2]])


def test_crossings_name_each_strategy_with_its_size():
    measured = ["from the smallest", "27m", "not up to the largest", "from the smallest"]
    rows = pd.DataFrame({"strategy": ["fsdp2", "ddp_tuned", "zero3", "zero3_tuned"], "measured": measured})
    every, larger, none = sentences.crossings(rows, "ddp").removesuffix(".").split(". ")
    assert every.endswith("fsdp2 and zero3_tuned")
    assert "27m" in larger
    assert larger.endswith("ddp_tuned")
    assert none.endswith("zero3")


def test_neighbouring_equal_rows_are_merged():
    table = pd.DataFrame({"wrong": [0, 0, 3, 0]}, index=["0.1", "0.2", "0.3", "0.4"])
    assert tables.merged(table)["wrong"].to_dict() == {"0.1 to 0.2": 0, "0.3": 3, "0.4": 0}


def test_releases_and_crashes_in_words():
    counts = pd.DataFrame({"wrong": [0, 3, 1], "crashed": [0, 2, 0]}, index=["0.1", "0.2", "0.3"])
    said = sentences.releases("deepspeed", counts, 112)
    for part in (
        "3 releases",
        "In 2 of them",
        "In 1 of them",
        "112 cases",
        "0.3, 1 case trains wrongly.",
        "0.2: there, 3 ",
    ):
        assert part in said
    assert sentences.engines_of(["zero0/bf16/a", "zero0/bf16/b"]).endswith("use zero0 in bf16.")
    assert "- 2 crashes in releases 0.1 to 0.2: `E`" in sentences.crashes({"E": ["0.1", "0.2"]})
    assert sentences.crashes({}) == "No case crashed."


def test_times_of_the_nearest_runs_of_the_control():
    rows = pd.DataFrame({"strategy": ["ddp", "ddp", "zero2", "zero2"], "step_seconds": [2.0, 4.0, 3.0, 8.0]})
    speeds = pd.DataFrame({"equal_seconds": [(3.0, 8.0)], "equal_ratios": [(1.0, 4.0)]})
    compared = tables.with_ratios(rows, speeds, "ddp")
    assert list(compared["ratio"]) == [1.0, 1.0, 1.0, 4.0]
    assert tables.centers(compared).to_dict() == {"ddp": 1.0, "zero2": pytest.approx(2.0)}  # the geometric mean
    alone = tables.with_ratios(rows, speeds.iloc[:0], "ddp")
    assert list(alone["ratio"]) == pytest.approx([2 / 3, 4 / 3, 1.0, 8 / 3])
    assert tables.centers(alone)["zero2"] == pytest.approx(11 / 6)  # the median
    assert [tables.millions("124m"), tables.millions("1.3b")] == [124, 1300]


def test_a_view_becomes_a_part_of_a_notebook():
    assert sentences.page_body("# Title\n\nText\n\n## Part\n") == "Text\n\n### Part"


def test_every_sentence_of_an_article_has_a_row():
    articles = [entry for entry in ledger.read() if entry.sentences]
    assert len(articles) >= 9
    for about in articles:
        check_article(about)


def check_article(about):
    judged = claims.read(about.source)
    rows = article.verdict_table(judged).splitlines()[2:]
    assert len(rows) == len(judged)
    for row, sentence in zip(rows, judged, strict=True):
        assert row.count(" | ") == 1  # nothing in it ends a cell
        assert f"**{sentence.word}" in row
    counts = article.verdict_counts(judged)
    assert all(f"| {kind.word} | " in counts and kind.meaning in counts for kind in verdicts.Conclusion)
    assert article.main_faults(judged, 2).count("\n1. ") <= 1
    written = (report.NOTEBOOKS / f"{report.OF_AN_ARTICLE}.ipynb").read_text(encoding="utf-8")
    first = nbformat.reads(report.with_title(written, about.title), as_version=4).cells[0].source
    assert first.startswith(f"# {about.title}\n")
    (link,) = re.findall(rf"\[(.+)\]\({about.source}\.ipynb\)", (COMMITTED / "README.md").read_text(encoding="utf-8"))
    assert about.title.startswith(link)


def test_the_tables_of_the_article_that_prints_its_program():
    published = ROOT / "reports" / "cpu" / "published"
    defect_rows = article.defect_table(published / "protocol.json").splitlines()[2:]
    assert len(defect_rows) == 2 + len(defects.LEFT_ALONE)
    effect = defects.effect(defects.read(published / "protocol.json"), defects.AS_PUBLISHED, "validation loss")
    assert effect is not None
    assert f"{100 * effect.mean:+.1f} %" in defect_rows[0]
    trap_rows = article.trap_table(published / "traps.json").splitlines()[2:]
    assert len(trap_rows) == len(traps.read(published / "traps.json")["traps"])


def test_the_picture_of_memory_and_time_says_what_it_shows_and_is_readable_on_a_phone():
    values = pd.Series({"ddp": 2.6, "zero3": 4.1, "zero3_tuned": 1.8, "fsdp2": 1.5})
    figure = plots.first_screen(values, values, "#000000", "GPT, fp32, two processes (measured)")
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    words = {text.get_text() for text in texts} | {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert {"GPT, fp32, two processes (measured)", "ZeRO-3\nsmaller buffers", "ZeRO-3\ndefault buffers", "DDP"} <= words
    pixels_per_point = 390 / (72 * figure.get_figwidth())
    assert min(text.get_fontsize() for text in texts if text.get_visible()) * pixels_per_point > 10


def test_repeats_of_a_seed_count_once():
    runs = pd.DataFrame({"strategy": "ddp", "seed": [0, 0, 0, 1], "step": 1, "loss": [1.0, 1.0, 1.0, 3.0]})
    assert tables.mean(runs, "loss").loc["ddp", "loss"] == 2
    assert plots.loss_curves(runs, HEAD).axes[0].lines[0].get_ydata() == [2]
    without_control = plots.loss_curves(runs, HEAD, control="single")  # which runs in one process only
    assert without_control.axes[0].lines[0].get_ydata() == [2]


def test_figures_draw_every_strategy_that_has_what_they_show(folder):
    ended = plots.filter_runs(tables.runs(folder), status="ok")
    (rows,) = tables.settings(ended, "ddp")
    drawn = [
        plots.loss_curves(tables.steps(folder), HEAD),
        plots.peak_by_part(ended, HEAD),
        plots.relative_time(tables.with_ratios(rows, tables.speeds(folder), "ddp"), HEAD),
    ]
    for figure in drawn:
        figure.canvas.draw()
        words = " ".join(text.get_text() for text in figure.findobj(Text))
        words += " ".join(label.get_text() for label in figure.axes[0].get_yticklabels())
        for name in ("ddp", "zero2", "zero3", "zero3_tuned"):
            assert name in words
        assert "zero1" not in words


# ---------------------------------------------------------------- what every figure has in itself

HEAD = captions.Head("Peak memory", captions.MEASURED, "GPT, fp32")


def test_a_finished_figure_says_what_it_shows_and_has_dark_text_on_white():
    figure, axes = drawing.panel(2)
    axes.set(xlabel="optimizer step", ylabel="memory (GiB)")
    drawing.finish(figure, HEAD)
    texts = {text.get_text(): text for text in figure.texts}
    assert set(texts) == {"Peak memory", "Measured by this project.\nGPT, fp32"}
    assert {text.get_color() for text in texts.values()} == {drawing.INK}
    assert figure.get_facecolor() == (1, 1, 1, 1)


@pytest.mark.parametrize(("title", "kind"), [("", captions.MEASURED), ("Peak memory", "From records.")])
def test_a_head_has_a_title_and_the_kind_of_its_numbers(title, kind):
    with pytest.raises(ValueError, match="needs a title"):
        captions.Head(title, kind)


def test_an_axis_without_a_unit_is_no_figure():
    figure, axes = drawing.panel(2)
    axes.set(xlabel="optimizer step", ylabel="memory")
    with pytest.raises(ValueError, match="without a unit: 'memory'"):
        drawing.finish(figure, HEAD)


def test_text_that_is_too_small_on_a_phone_is_no_figure():
    figure, axes = drawing.panel(2)
    axes.barh(["ddp"], [1.0])
    axes.set(xlabel="memory (GiB)")
    axes.text(0, 0, "tiny", fontsize=7)
    with pytest.raises(ValueError, match=r"'tiny' is 6\.7 pixels high"):
        drawing.finish(figure, HEAD)


# The picture of a Markdown page, which is drawn for light and for dark pages: it has an ink and a title of its own.
OF_PAGES = {"first_screen"}


def test_every_figure_is_finished():
    """Each function that returns a figure finishes it, or gets it from one that does; and notebooks draw nothing."""
    modules = {path: ast.parse(path.read_text()) for path in (ROOT / "study/report").rglob("*.py")}
    functions = {
        node.name: node
        for module in modules.values()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and "Figure" in ast.unparse(node.returns or ast.Constant(""))
    }
    # Helpers return axes, too, and their callers finish the figure.
    whole = {name for name, node in functions.items() if "Axes" not in ast.unparse(node.returns)} - OF_PAGES
    assert len(whole) > 15
    for name in whole - {"finish"}:
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(functions[name])
            if isinstance(node, ast.Call)
        }
        assert called & (whole - {name}), name
    for path in report.NOTEBOOKS.glob("*.ipynb"):
        code = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
        assert not re.search(r"matplotlib|\baxes\.|\bplt\.|\.plot\b", code), path.name


def test_a_notebook_begins_with_its_question_and_a_short_cell_that_answers():
    for path in report.NOTEBOOKS.glob("*.ipynb"):
        question, _, *rest = nbformat.read(path, as_version=4).cells
        answer = next(cell for cell in rest if "colab" not in cell.metadata.get("tags", []))
        assert "**Question:**" in question.source
        assert answer.cell_type == "code"
        assert len(answer.source.splitlines()) <= 8


def test_a_refusal_is_shown_in_a_notebook_without_a_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr("zero_study.files.ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="only in a clone") as refusal:
        tables.folders("reports/cpu/records/cpu")
    assert refusal.value._render_traceback_() == [str(refusal.value)]
