"""Models on machines with GPUs: predictions, measurements by others, and records that replace predictions."""

from __future__ import annotations

import json
import math
import re

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import synthetic
from matplotlib.text import Text
from synthetic import change, write_run

from study.records.simulation import SIMULATED_GPUS
from study.report import by_machine, machine_plots, sentences
from zero_study import cli
from zero_study.errors import Refusal
from zero_study.theory import hardware, measured_by_others

pytestmark = pytest.mark.pages

A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 85_174_583_296, "capability": "8.0"}
ONE_A100 = {"models": {"bert-large": 512}, "machines": [("a100-80gb", 1)]}


@pytest.fixture(scope="module")
def compared():
    """The comparison of the notebook, which is computed once for all tests."""
    return by_machine.compare()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write a record of BERT-large on one A100, with the settings of a prediction unless a test changes them."""
    monkeypatch.setitem(synthetic.NUM_PARAMS, ("bert-imdb", "large"), 335_143_938)

    def write(**changes):
        settings = {"workload": "bert-imdb", "size": "large", "strategy": "single", "world_size": 1, "box": "gpu"}
        settings |= {"precision": "bf16-autocast", "sequence_length": 512, "global_batch_size": 32}
        return write_run(tmp_path, **{**settings, "machine": {"gpus": [A100]}, **changes})

    return write


def row_of(table, **values) -> pd.Series:
    (row,) = (row for _, row in table.iterrows() if all(row[name] == value for name, value in values.items()))
    return row


# ---------------------------------------------------------------- predicted


def test_every_strategy_is_shown_and_what_does_not_fit_has_only_its_memory(compared):
    rows = compared.rows
    for (model, machine), advice in compared.advices.items():
        here = rows[(rows["model"] == model) & (rows["machine"] == machine)]
        possible = {each.strategy.name for each in advice.options}.intersection(by_machine.STRATEGIES)
        assert set(here["strategy"]) == possible | {advice.recommended.strategy.name}
    assert rows["memory"].notna().all()
    fits = rows["fits"].astype(bool)
    assert not fits.all()
    assert rows.loc[~fits, ["speed", "cost"]].isna().all(axis=None)
    assert rows.loc[fits, ["speed", "cost"]].notna().all(axis=None)
    assert (rows.loc[~fits, "lacks"] != "").all()
    too_large = rows["lacks"] == "GPU memory"
    assert (rows.loc[too_large, "memory"] > rows.loc[too_large, "capacity"]).all()


def test_the_recommended_strategies_are_those_of_the_command(compared, capsys):
    """Not the best of those that are shown: the notebook recommended ZeRO-2, and `zero-study advise` ZeRO-1."""
    for model, length in (("bert-large", 512), ("qwen2.5-32b", 4096)):
        request = ["--gpu", "h100-sxm", "--gpus", "8", "--sequence-length", str(length)]
        request += ["--global-batch-size", str(by_machine.TOKENS_PER_STEP // length)]
        cli.run(["advise", "--model", model, *request, "--json"])
        answer = json.loads(capsys.readouterr().out)
        row = row_of(compared.best, model=model, machine="8 x h100-sxm")
        assert row["strategy"] == answer["recommended"]
        change = answer["recommended_change"]
        assert row["change"] == (f"{change['options']}: {change['strategy']}" if change else "")
        assert row["strategy"] in sentences.fitting(compared.best, [model], "8 x h100-sxm")
        assert row["change"] in sentences.fitting(compared.best, [model], "8 x h100-sxm")


def test_a_strategy_is_shown_if_it_is_recommended(compared):
    rows = by_machine.predicted({key: compared.advices[key] for key in [("bert-large", "8 x h100-sxm")]}, ["ddp"])
    assert list(rows["strategy"]) == ["ddp", "zero1"]


def test_values_are_within_their_intervals(compared):
    for value, low, high in by_machine.ENDS.values():
        rows = compared.rows.dropna(subset=[value])
        assert (rows[low].isna() | (rows[low] < rows[value])).all()
        assert (rows[high].isna() | (rows[high] > rows[value])).all()


def test_the_cost_is_the_price_of_the_machine_divided_by_its_speed(compared):
    row = row_of(compared.rows, model="llama-3.1-8b", machine="8 x h100-sxm", strategy="fsdp2")
    price = hardware.find_gpu("h100").price_per_hour
    assert row["cost"] == pytest.approx(8 * price / 3600 / row["speed"] * 1e9)
    assert row["cost_low"] == pytest.approx(8 * price / 3600 / row["speed_high"] * 1e9)
    half = by_machine.predicted(compared.advices, prices={"h100-sxm": price / 2})
    cheaper = row_of(half, model="llama-3.1-8b", machine="8 x h100-sxm", strategy="fsdp2")
    assert cheaper["cost"] == pytest.approx(row["cost"] / 2)
    assert "h100-sxm: 1.00 (given)" in by_machine.prices_text(prices={"h100-sxm": 1})
    assert hardware.find_gpu("a100-80gb").price_date in by_machine.prices_text()


def test_a_part_of_a_node_has_that_part_of_its_host(compared):
    one, eight = (compared.advices["bert-large", f"{count} x a100-80gb"].box for count in (1, 8))
    assert one.host_memory_bytes == pytest.approx(eight.host_memory_bytes / 8)
    assert one.host_cores == eight.host_cores / 8


def test_a_step_that_no_machine_can_divide_is_refused():
    with pytest.raises(Refusal, match="cannot be divided equally among --gpus 16"):
        by_machine.ask({"bert-large": 512}, [("h100-sxm", 16)], tokens_per_step=512 * 10)


# ---------------------------------------------------------------- measured by others


def test_published_points_are_of_the_same_model_gpu_and_count(compared):
    cases = (*measured_by_others.cases("times"), *measured_by_others.cases("memory"))
    known = {(case.url, f"{case.box.num_gpus} x {case.box.gpu.name}", case.engine.precision) for case in cases}
    assert len(compared.others) > 0
    for row in compared.others.to_dict("records"):
        precision = row["setting"].partition(": ")[2].partition(",")[0]
        assert (row["url"], row["machine"], precision) in known
        assert precision in by_machine.IN_16_BITS
        assert row["grade"] in by_machine.GRADES
        assert row["differences"]  # none has exactly the settings of a prediction, as the notebook says
    of_llama = compared.others[compared.others["model"] == "llama-3.1-8b"]
    assert set(of_llama["setting"].str.partition(":")[0]) <= {"llama-3-8b", "llama-3.1-8b"}


def test_every_published_value_is_shown_or_counted_as_left_out(compared):
    everything = sum(len(by_machine._all_cases_of(advice)) for advice in compared.advices.values())
    assert everything == len(compared.others) + sum(by_machine.left_out(compared.advices).values())


def test_a_model_with_other_heads_is_another_model():
    shapes = {case.shape.name: case.shape for case in (*measured_by_others.cases("memory"),)}
    assert by_machine.is_same_model(shapes["llama-3-8b"], shapes["llama-3.1-8b"])
    assert not by_machine.is_same_model(shapes["qwen3-32b"], shapes["qwen2.5-32b"])  # as many layers and parameters


def test_what_nobody_published_is_said(compared):
    output = sentences.unpublished(compared.others, compared.advices)
    assert "gpt2-xl on 1 x a100-80gb, 8 x a100-80gb, 8 x h100-sxm and 16 x h100-sxm" in output
    assert "others" not in by_machine.head(compared.of_model("gpt2-xl")).kind
    assert "measured by others" in by_machine.head(compared.of_model("llama-3.1-8b")).kind


# ---------------------------------------------------------------- measured by this project


def test_records_replace_the_prediction_of_their_strategy(run, tmp_path):
    """The speed counts padding, as predictions do, and is the median of all runs."""
    for seed, seconds in enumerate((0.4, 0.5, 0.8)):
        change(run(seed=seed, seconds=seconds), timing={"tokens_per_second": 1.0})
    result = by_machine.compare(**ONE_A100, records=[tmp_path])
    row = row_of(result.rows, strategy="single")  # the prediction is gone
    assert row["source"] == by_machine.MEASURED
    assert row["speed"] == pytest.approx(32 * 512 / 0.5, rel=0.05)
    assert row["speed_low"] == pytest.approx(32 * 512 / 0.8, rel=0.05)
    assert row["cost"] == pytest.approx(hardware.find_gpu("a100-80gb").price_per_hour / 3600 / row["speed"] * 1e9)
    assert row["memory"] < 20
    assert "batch 32 x 1, 3 runs" in row["setting"]
    assert list(result.rows["strategy"]) == ["single", "zero3_cpu_offload"]  # in the order of the predictions
    assert row_of(result.rows, strategy="zero3_cpu_offload")["source"] == by_machine.PREDICTED
    best = row_of(result.best, strategy="single")
    assert (best["speed_source"], best["speed"]) == (by_machine.MEASURED, row["speed"])
    assert "predicted" in (kind := by_machine.head(result).kind)
    assert "measured by this project" in kind
    assert "measured by others" in kind
    assert "lowest measured cost" in sentences.cheapest(result.best, "bert-large")
    figure = machine_plots.of_model(result.rows, result.others, by_machine.head(result))
    words = {text.get_text() for text in figure.findobj(Text)}
    assert {"predicted, with interval", "measured by this project", "measured by others"} <= words


def test_the_fastest_batch_of_several_is_taken(run, tmp_path):
    run(global_batch_size=32, seconds=0.5)
    run(global_batch_size=64, seconds=0.7)
    row = row_of(by_machine.compare(**ONE_A100, records=[tmp_path]).rows, strategy="single")
    assert "batch 64 x 1, 1 run" in row["setting"]
    assert row["speed"] == pytest.approx(64 * 512 / 0.7, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_length": 128},
        {"precision": "fp32"},
        {"strategy": "ddp"},  # not a strategy for one GPU
        {"machine": {"gpus": [synthetic.GPU]}},
        {"machine": {"gpus": [{**A100, "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"}]}},
        {"world_size": 2, "strategy": "ddp", "machine": {"gpus": [A100] * 2}},
        {"workload": "gpt-wikitext", "size": "tiny"},
        {"box": "cpu"},
        {"status": "out_of_memory"},
        {"compile": True},
        {"machine": {"gpus": [A100], "environment": {SIMULATED_GPUS: "{}"}}},
        {"lora_rank": 16},
    ],
    ids=str,
)
def test_runs_with_other_settings_replace_nothing(run, tmp_path, changes):
    run(**changes)
    rows = by_machine.compare(**ONE_A100, records=[tmp_path]).rows
    assert set(rows["source"]) == {by_machine.PREDICTED}
    assert len(rows) == 2


def test_ranks_that_share_a_gpu_replace_nothing(run, tmp_path):
    change(
        run(strategy="zero2", precision="bf16", world_size=2, machine={"gpus": [A100] * 2}),
        config={"share_device": True},
    )
    two = by_machine.compare({"bert-large": 512}, [("a100-80gb", 2)], records=[tmp_path])
    assert set(two.rows["source"]) == {by_machine.PREDICTED}


def test_a_run_without_times_replaces_only_the_memory(run, tmp_path):
    change(run(), timing=None)
    result = by_machine.compare(**ONE_A100, records=[tmp_path])
    rows = result.rows[result.rows["strategy"] == "single"].set_index("source")
    assert math.isnan(rows.loc[by_machine.MEASURED, "speed"])
    assert math.isnan(rows.loc[by_machine.PREDICTED, "memory"])
    best = row_of(result.best, strategy="single")
    assert (best["memory_source"], best["speed_source"]) == (by_machine.MEASURED, by_machine.PREDICTED)


def test_committed_records_are_those_of_gpus():
    assert all(path.parent.name != "cpu" for path in by_machine.committed_on_gpus())


# ---------------------------------------------------------------- sentences


def best_of(**costs) -> pd.DataFrame:
    """Return a table of the recommended strategies, with (cost, low, high) by machine."""
    rows = []
    for machine, (cost, low, high) in costs.items():
        row = {"model": "m", "machine": machine, "strategy": "ddp", "speed": 1000 / cost, "speed_source": "predicted"}
        rows.append({**row, "cost": cost, "cost_low": low, "cost_high": high, "change": ""})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("second", "part"),
    [
        ((12.0, 8.0, 18.0), "overlap, so these numbers do not show"),
        ((50.0, 30.0, 70.0), "The cost on one is lower for m"),
        ((2.0, 1.0, 3.0), "The cost on two is lower for m"),
        ((2.0, 1.0, math.nan), "overlap, so these numbers do not show"),  # without an upper end
    ],
)
def test_costs_differ_only_if_their_intervals_do_not_overlap(second, part):
    text = sentences.faster_and_cheaper(best_of(one=(10.0, 7.0, 15.0), two=second), "one", "two")
    assert part in text
    assert ("overlap, so" in text) != ("is lower" in text)


def test_the_lowest_cost_with_the_machines_that_may_cost_as_little():
    text = sentences.cheapest(best_of(one=(10.0, 7.0, 15.0), two=(12.0, 8.0, 18.0), three=(90.0, 60.0, 120.0)), "m")
    assert "10 (7 to 15) US dollars per billion tokens, on one" in text
    assert re.search(r"intervals of two overlap.*intervals of three are above", text)
    assert "none of the strategies" in sentences.cheapest(best_of(one=(10.0, 7.0, 15.0)), "other")
    assert sentences.cost({"cost": 1439.2, "cost_low": 612.3, "cost_high": math.nan}) == "1,439 (at least 612)"


def test_models_that_fit_on_a_machine_are_named_with_their_strategy():
    text = sentences.fitting(best_of(one=(10.0, 7.0, 15.0)), ["m", "n"], "one")
    assert "m with `ddp`" in text
    assert "fits n" in text
    nothing = sentences.faster_and_cheaper(best_of(one=(10.0, 7.0, 15.0)), "one", "two")
    assert "cannot be compared" in nothing


# ---------------------------------------------------------------- figures


def test_the_overview_says_what_it_shows(compared):
    headings = {model: by_machine.heading(advice) for (model, _), advice in compared.advices.items()}
    head = by_machine.head(compared)
    figure = machine_plots.models_on_machines(compared.rows, compared.others, compared.best, headings, head)
    words = "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_visible())
    for part in ("bf16", "A100", "H100", "predicted", "measured by others", "does not fit", "ZeRO-3"):
        assert part in words
    assert "llama-3.1-8b: 8 billion parameters, 4,096 tokens" in words
    assert "bert-large: 335 million parameters, 512 tokens" in words
    best = row_of(compared.best, model="llama-3.1-8b", machine="8 x h100-sxm")
    assert f"{best['cost']:,.0f}" in words


@pytest.mark.parametrize("limits", [(3e3, 2e5), (7.0, 80.0), (150.0, 1e3), (2.5e3, 9.8e5), (1.0, 1e6)])
def test_a_logarithmic_axis_has_at_least_two_labels(limits):
    figure, axes = plt.subplots(figsize=(1.3, 1))
    plt.close(figure)
    axes.set(xscale="log", xlim=limits)
    assert len(machine_plots._ticks(axes, 10.5)) > 1


def test_a_figure_of_one_model_is_readable_on_a_phone(compared):
    for model in by_machine.MODELS:
        part = compared.of_model(model)
        figure = machine_plots.of_model(part.rows, part.others, by_machine.head(part))
        figure.canvas.draw()
        texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
        words = " ".join(text.get_text() for text in texts)
        for name in (model, "bf16", "predicted", "16 x h100-sxm", "zero3_cpu_offload"):
            assert name in words
        missing = part.rows.loc[~part.rows["fits"].astype(bool), by_machine.KEY].merge(part.others, how="left")
        assert words.count("does not fit ") >= missing.groupby(by_machine.KEY)["speed"].max().isna().sum()
        assert min(text.get_fontsize() for text in texts) * 390 / (72 * figure.get_figwidth()) > 10


@pytest.mark.parametrize(
    ("value", "text"), [(9.4, "9"), (999, "999"), (1000, "1k"), (2440, "2.4k"), (579_895, "580k"), (2.3e6, "2.3M")]
)
def test_numbers_in_few_letters(value, text):
    assert machine_plots.thousands(value) == text
