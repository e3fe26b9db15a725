"""What the pages say: every number is a run's, what is unknown says so, and boxes stay apart."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from reported import read as text_of
from reported import row_of
from synthetic import write_outcome, write_run

from study.compare import differences, table
from study.compare.expected import with_theory
from study.errors import Refusal
from study.report import figures, markup, pages
from study.report.pages import cells, planner
from study.report.pages import runs as sections

METRICS = ["final_loss", "seconds_per_step"]


def write_study(folder: Path, box: str = "cpu", seconds: float = 0.5, **settings) -> Path:
    """Two strategies beside a control with repeats, three seeds."""
    for seed in range(3):
        write_run(folder, strategy="single", world_size=1, seed=seed, box=box, seconds=2 * seconds, **settings)
        for repeat in range(3):
            write_run(folder, strategy="ddp", seed=seed, repeat=repeat, box=box, seconds=seconds, **settings)
        write_run(folder, strategy="zero2", seed=seed, box=box, seconds=1.5 * seconds, **settings)
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return with_theory(table.read([write_study(tmp_path_factory.mktemp("study"), dropout=0.0)]))


@pytest.fixture(scope="module")
def two_boxes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    write_study(folder / "a", "cpu", seconds=0.5, dropout=0.0)
    write_study(folder / "b", "gpu", seconds=0.125, dropout=0.0)
    return with_theory(table.read([folder]))


# ---------------------------------------------------------------- runs


def test_load_filters(tmp_path):
    write_run(tmp_path, workload="bert-imdb", strategy="ddp")
    write_run(tmp_path, workload="gpt-wikitext", strategy="ddp")
    write_run(tmp_path / "gpu", workload="gpt-wikitext", strategy="ddp", box="gpu")
    assert len(pages.load([str(tmp_path)])) == 3
    assert set(pages.load([str(tmp_path)], workload="bert-imdb")["workload"]) == {"bert-imdb"}
    assert set(pages.load([str(tmp_path)], box="8 x NVIDIA H200")["device"]) == {"cuda"}
    with pytest.raises(Refusal, match=r"workload 'gpt' has no run here; the workloads are 'bert-imdb', 'gpt-wikitext'"):
        pages.load([str(tmp_path)], workload="gpt")
    with pytest.raises(Refusal, match=r"box 'A100' has no run here; the boxes are "):
        pages.load([str(tmp_path)], box="A100")


def test_load_finds_the_projects_records_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(pages.load(["tests/fixtures/records"]))
    (tmp_path / "tests/fixtures/records").mkdir(parents=True)  # now there is one here, and it comes first
    with pytest.raises(Refusal, match="tests/fixtures/records"):
        pages.load(["tests/fixtures/records"])


def test_settings_of_the_same_words_are_told_apart(tmp_path):
    for dropout in (0.0, 0.1):
        write_run(tmp_path, strategy="ddp", dropout=dropout)
    found = sections.blocks(table.read([tmp_path]))
    assert [block.words for block in found] == [
        "gpt-wikitext tiny, fp32, 8 sequences per step, dropout 0",
        "gpt-wikitext tiny, fp32, 8 sequences per step, dropout 0.1",
    ]


def test_a_run_without_settings_joins_where_it_may_belong(tmp_path):
    write_run(tmp_path, strategy="ddp", workload="bert-imdb")
    write_run(tmp_path, strategy="ddp")
    write_outcome(tmp_path, "skipped", strategy="zero3")
    bert, gpt = sections.blocks(table.read([tmp_path]))
    assert list(bert.runs["strategy"]) == ["ddp"]
    assert list(gpt.runs["strategy"]) == ["ddp", "zero3"]


def test_single_stands_beside_every_number_of_processes(study):
    assert [(size, sorted(set(runs["strategy"]))) for size, runs in sections.worlds(study)] == [
        (2, ["ddp", "single", "zero2"])
    ]
    alone = study[study["strategy"] == "single"]
    assert [(size, len(runs)) for size, runs in sections.worlds(alone)] == [(1, 3)]


# ---------------------------------------------------------------- the answer


def test_answer(study):
    compared = differences.compare(study, "ddp", METRICS)
    shown = pages.answer(study, compared, "ddp")
    assert row_of(shown, "ddp").startswith("2 | ")
    assert row_of(shown, "ddp").count("the control") == 2
    found = row_of(shown, "zero2")
    assert re.match(r"2 \| [\d.]+ \| no difference [^|]*\[[^|]*\] \| 0\.7\d\d \| slower \+\d\d", found)
    mine = study[study["strategy"] == "zero2"]
    rest = markup.Html(shown.text.partition("More columns")[2])
    assert row_of(rest, "zero2").startswith(f"2 | 3 | {mine['final_loss'].mean():.4f} |")
    assert f"{(mine['model_state_bytes'] / mine['num_params']).max():.2f} (" in found


def test_memory_has_its_price(study):
    said = text_of(pages.memory_and_price(study, differences.compare(study, "ddp", METRICS), "ddp"))
    assert said.count(". ") == 0
    assert re.match(
        r"Sharing a model and what its training keeps between 2 processes left each with as little as", said
    )
    assert "as long as where every process holds a full copy (ddp)" in said


def noisy(compared):
    return compared.assign(relative_margin=compared["relative_margin"].mask(compared["metric"] == METRICS[1], 1.11))


def test_times_that_decide_nothing_are_not_drawn(study):
    compared = noisy(differences.compare(study, "ddp", METRICS))
    first = pages.time_first(compared, "ddp")
    assert text_of(first).startswith("These times decide nothing, as two equal runs may differ by 111")
    assert pages.times_drawn(study, compared).text == ""
    assert "<details" in pages.times(study, compared, "ddp").text
    assert "slower" not in pages.answer(study, compared, "ddp").text.partition("More columns")[0]
    assert "Speed per process" not in pages.worlds_drawn(study, compared).text
    assert "as long as where" not in pages.memory_and_price(study, compared, "ddp").text
    assert "seconds per step" not in pages.answer(study, compared, "ddp", with_times=False).text


def test_accuracy_has_the_interval_of_its_examples(tmp_path):
    write_study(tmp_path, workload="bert-imdb")
    runs = with_theory(table.read([tmp_path]))
    runs = runs.assign(accuracy=0.77, settings=[{**one, "num_eval_examples": 500} for one in runs["settings"]])
    shown = pages.answer(runs, differences.compare(runs, "ddp", METRICS), "ddp")
    assert "| 0.770 0.731 to 0.805, of 500 |" in row_of(shown, "zero2")  # +-3.7 points


def test_what_failed_is_in_the_table_and_never_a_number(tmp_path):
    write_study(tmp_path)
    for seed in range(2):
        write_run(tmp_path, strategy="zero1", seed=seed, status="out_of_memory", study="synthetic")
    write_outcome(tmp_path, "killed", strategy="zero3", message="killed, host memory is full")
    runs = with_theory(table.read([tmp_path]))
    compared = differences.compare(runs, "ddp", METRICS)
    shown = pages.answer(runs, compared, "ddp")
    assert row_of(shown, "zero1").startswith("2 | unknown | not comparable | unknown |")
    rest = markup.Html(shown.text.partition("More columns")[2])
    assert row_of(rest, "zero1").startswith("2 | 2 2 out of memory | unknown |")
    assert "1 1 killed" in row_of(rest, "zero3")
    for piece in (
        shown,
        pages.other_losses(runs, compared, "ddp", []),
        pages.times(runs, compared, "ddp"),
        pages.memory(runs),
    ):
        assert "nan" not in text_of(piece).lower().split()
    listed = text_of(pages.without_result(runs))
    assert "killed killed, host memory is full" in listed
    assert listed.count("out of memory") == 1
    assert listed.count("gpt-wikitext-tiny-zero1-2x-") == 2


def test_no_run_without_a_result_is_said(study):
    assert text_of(pages.without_result(study)) == f"None: all {len(study)} runs here ended with a result."


def test_boxes_stand_apart(two_boxes):
    compared = differences.compare(two_boxes, "ddp", METRICS)
    shown = pages.answer(two_boxes, compared, "ddp").text
    gpu, cpu = shown.split("<section>")[1:]
    assert "<h3>8 x NVIDIA H200</h3>" in gpu
    assert "<h3>Synthetic CPU, 8 cores</h3>" in cpu
    for half, device in ((gpu, "cuda"), (cpu, "cpu")):
        mine = two_boxes[(two_boxes["device"] == device) & (two_boxes["strategy"] == "zero2")]
        assert cells.number(mine["seconds_per_step"].median()) in row_of(markup.Html(half), "zero2")
    both = pages.drawn(two_boxes, figures.runtime).text
    assert len(re.findall('<div class="beside">', both)) == 1
    assert both.count("<figure") == 2


def test_settings_of_one_box_stand_side_by_side(tmp_path):
    write_study(tmp_path)
    write_study(tmp_path, workload="bert-imdb")
    shown = pages.drawn(table.read([tmp_path]), figures.runtime).text
    assert shown.count('<div class="beside">') == 1
    assert shown.count("<section>") == shown.count("<figure") == 2


def test_figure_of_nothing_says_so(tmp_path):
    write_run(tmp_path, strategy="zero1", status="out_of_memory")
    runs = with_theory(table.read([tmp_path]))
    assert "No figure for Synthetic CPU, 8 cores, 2 processes: " in text_of(pages.drawn(runs, figures.runtime))
    assert text_of(pages.compared_drawn(runs, differences.compare(runs, "ddp"), figures.differences, "mfu")) == ""


def test_the_answer_says_what_was_run(study):
    said = text_of(pages.basis(study))
    assert said.startswith(f"From {len(study)} runs of 3 strategies on Synthetic CPU, 8 cores, 2026-01-01.")
    assert text_of(pages.title("Is 1 < 2?", markup.Html("Yes."))) == "Is 1 < 2? Yes."


def test_what_a_study_decides_is_told_by_it_alone(study):
    compared = differences.compare(study, "ddp", METRICS)
    shown = pages.answer(study, compared, "ddp", with_losses=False)
    assert "held out" not in shown.text
    assert "final loss" not in shown.text.lower()
    assert "Seconds: median" in shown.text
    assert "Seconds" not in pages.answer(study, compared, "ddp", with_times=False).text


def test_the_lead_rests_on_losses_that_can_be_compared(tmp_path):
    """Not on those of other dropout masks: `single` has others than two processes, whatever the strategy does."""
    for strategy, world_size, shift in (("ddp", 2, 0.0), ("zero2", 2, 0.02), ("single", 1, 1.0)):
        write_run(tmp_path, strategy=strategy, world_size=world_size, loss_shift=shift)
    compared = differences.compare(table.read([tmp_path]), "ddp", ["final_loss"])
    apart = compared.set_index("strategy")["relative_difference"]
    assert apart["single"] > 0.1 > apart["zero2"] > 0.001
    assert f"at most {100 * apart['zero2']:.1f} %" in text_of(pages.losses_first(compared, "ddp"))
    alone = compared[compared["strategy"] == "single"]
    assert "could not be compared" in text_of(pages.losses_first(alone, "ddp"))


# ---------------------------------------------------------------- each page's own


def test_what_ended_bit_identical_is_one_row_and_one_mark(study):
    compared = differences.compare(study, "ddp", ["final_loss"])
    shown = pages.other_losses(study, compared, "ddp", [])
    same = study.copy()
    reference = same[same["strategy"] == "ddp"].drop_duplicates("seed").set_index("seed")["final_sha256"]
    zero2 = same["strategy"] == "zero2"
    same.loc[zero2, "final_sha256"] = same.loc[zero2, "seed"].map(reference)
    assert row_of(shown, "zero2").startswith("2 | 3 |")
    together = pages.other_losses(same, compared, "ddp", []).text
    assert '<th scope="row">ddp, zero2<small>bit-identical</small></th>' in together
    assert together.count("zero2") == 1
    twins = study[study["strategy"] == "zero2"].assign(strategy="zero2_tuned")
    three = pd.concat([study, twins.set_axis(twins.index + len(study))])
    marks = sections.once(differences.compare(three, "ddp", ["final_loss"]), three)
    assert sorted(marks["same"]) == ["single", "zero2, zero2_tuned"]
    twins["final_sha256"] = "0" * 64  # one other bit, in one run or in all
    assert sections.bit_identical(pd.concat([study, twins]))[-2:] == [["zero2"], ["zero2_tuned"]]


def test_the_least_that_a_process_holds_is_one_strategys(study):
    said = text_of(pages.processes_first(study))
    assert "on 2 processes as little as 75" in said
    assert "(zero2)." in said  # one strategy, no range
    fsdp2 = study[study["strategy"] == "zero2"].assign(strategy="fsdp2", model_state_bytes=8 * study["num_params"])
    held = pd.concat([study, fsdp2.set_axis(fsdp2.index + len(study))])
    assert re.search(
        r"as little as 50.% \(fsdp2\), and by other ways up to 75.% \(zero2\)", text_of(pages.processes_first(held))
    )
    assert re.search(r"as little as 50.% of what a full copy takes \(fsdp2\)", text_of(pages.memory_first(held)))


def test_memory_is_of_the_largest_rank(study):
    shown = pages.memory(study)
    mine = study[study["strategy"] == "zero2"]
    unit = cells.unit_of(study, "model_state_bytes")
    assert cells.number(mine["model_state_bytes"].max() / unit.size) in row_of(shown, "zero2").split(" | ")
    assert "hold what the paper's formula says" in text_of(pages.memory_in_words(study))


def test_equal_totals_of_other_parts_are_not_what_the_paper_says(study):
    said = text_of(pages.memory_in_words(study))
    assert re.match(r"2 of 3 strategies hold .* in every part to within 1.%: single and ddp. Furthest", said)
    halves = {
        "gradient_bytes": 2,
        "optimizer_state_bytes": 6,
        "paper_gradient_bytes": 4,
        "paper_optimizer_state_bytes": 4,
    }
    zero2 = study["strategy"] == "zero2"
    by_chance = study.assign(
        **{name: study[name].mask(zero2, each * study["num_params"]) for name, each in halves.items()}
    )
    by_chance["paper_state_bytes"] = by_chance["model_state_bytes"]
    said = text_of(pages.memory_in_words(by_chance))
    assert "Of zero2 the total agrees and the parts do not: it holds 0.5 times the gradients and 1.5 times" in said
    shown = text_of(pages.answer(by_chance, differences.compare(by_chance, "ddp", METRICS), "ddp"))
    assert "Of zero2 the total alone is the paper's" in shown


def test_columns_that_nothing_fills_are_left_out_and_named(study):
    compared = differences.compare(study, "ddp", ["seconds_per_step"])
    shown = text_of(pages.times(study, compared, "ddp"))
    assert "Not measured here: MFU, joules per token." in shown


def test_mfu_and_energy_of_gpus_are_shown(two_boxes):
    compared = differences.compare(two_boxes, "ddp", ["seconds_per_step"])
    gpu = pages.times(two_boxes, compared, "ddp").text.split("<section>")[1]
    assert "Not measured" not in gpu
    mine = two_boxes[(two_boxes["device"] == "cuda") & (two_boxes["strategy"] == "zero2")]
    assert cells.number(mine["joules_per_token"].median()) in row_of(markup.Html(gpu), "zero2")


def test_crowded_times_are_not_shown(tmp_path):
    for processes in (2, 4):
        write_run(tmp_path, strategy="ddp", world_size=processes, machine={"num_cores": 2})
    write_run(tmp_path, strategy="single", world_size=1, machine={"num_cores": 2})
    runs = with_theory(table.read([tmp_path]))
    compared = differences.compare(runs, "ddp", METRICS)
    shown = pages.scaling(runs, compared).text
    assert "4 processes on too few cores" in shown
    rate = runs.loc[runs["world_size"] == 4, "tokens_per_second_per_gpu"].item()
    assert cells.number(rate) not in shown
    assert shown.count('<td class="number"></td>') == 1
    assert "Times on 4 processes are left out" in text_of(pages.scaling_in_words(runs, compared))


def test_efficiency_in_words_is_of_one_process(tmp_path):
    for size in (2, 4):
        write_run(tmp_path, strategy="ddp", world_size=size, machine={"num_cores": 64})
    runs = with_theory(table.read([tmp_path]))
    compared = differences.compare(runs, "ddp", METRICS)
    assert text_of(pages.scaling_in_words(runs, compared)) == "No time can be compared with that of one process."
    write_run(tmp_path, strategy="single", world_size=1, machine={"num_cores": 64})
    said = text_of(pages.scaling_in_words(table.read([tmp_path]), compared))
    assert said.endswith("of what single on 1 process does.")


def test_scaling_efficiency(study):
    shown = row_of(pages.scaling(study, differences.compare(study, "ddp", METRICS)), "ddp")
    rate = study.groupby("strategy")["tokens_per_second_per_gpu"].median()
    assert f"| {100 * rate['ddp'] / rate['single']:.0f} % | single on 1 process |" in shown


def test_largest_batch(tmp_path):
    for batch in (8, 16):
        write_run(tmp_path, strategy="zero3", global_batch_size=batch, box="gpu")
    write_run(tmp_path, strategy="zero3", global_batch_size=32, box="gpu", status="out_of_memory")
    row = row_of(pages.largest_batch(table.read([tmp_path])), "zero3").split(" | ")
    assert (row[1], row[-2:]) == ("16.0", ["32.0", "out of memory"])


def test_one_batch_is_no_choice(study):
    assert pages.largest_batch(study).text == ""


def test_proof(tmp_path):
    for strategy in ("ddp", "zero2", "zero3_cpu_offload"):
        write_run(tmp_path, strategy=strategy)
    write_outcome(tmp_path, "skipped", strategy="zero1")
    runs = with_theory(table.read([tmp_path]))
    assert text_of(pages.proof_in_words(runs)) == (
        "A file that asks for a way to train may be read otherwise by the programs below it. So each training reads "
        "back what was really built before it takes a step: 3 of 4 runs did, and 2 of the 2 by DeepSpeed have the "
        "stage that was asked. In 3 of 3 every process counted what it holds."
    )
    shown = pages.proof(runs)
    assert row_of(shown, "zero3_cpu_offload on 2").startswith("3 | DeepSpeedEngine | cpu | cpu |")
    assert ">zero1 on 2</th>" not in shown.text
    other = runs.assign(zero_stage=runs["zero_stage"].where(runs["strategy"] != "zero2", 1))
    assert "and 1 of the 2 by DeepSpeed" in text_of(pages.proof_in_words(other))


# ---------------------------------------------------------------- trust


def test_what_is_not_comparable(tmp_path):
    write_study(tmp_path, dropout=0.1)
    write_run(tmp_path, strategy="zero3", precision="bf16-autocast", dropout=0.1)
    shown = pages.not_comparable(table.read([tmp_path]), "ddp").text
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", shown)[1:]]
    assert ["everything", "precision bf16-autocast against fp32", "zero3", "1"] in rows
    assert ["losses", "dropout is on and processes 1 against 2: other masks", "single", "3"] in rows
    assert not [row for row in rows if row[2] == "ddp"]  # its repeats are for the margin


def test_everything_comparable_is_said(study):
    assert text_of(pages.not_comparable(study, "ddp")).startswith("Every run with a result is compared with ddp")


def test_what_was_fixed_and_what_varied(study):
    assert text_of(pages.varied(study)) == (
        "gpt-wikitext tiny, fp32, 8 sequences per step. single, ddp and zero2; processes: 1 and 2; seeds: 0, 1 and 2; "
        "up to 3 equal runs."
    )
    shown = pages.held_fixed(study)
    assert row_of(shown, "learning_rate") == "5e-05"
    assert row_of(shown, "activation_checkpointing") == "no"
    assert row_of(shown, "num_steps") == "40"
    assert len(row_of(shown, "data digest")) == 12


def test_reproduce_names_commands_and_no_place_of_the_machine(study, tmp_path):
    shown = pages.reproduce(study, "cpu", ["reports/cpu/records", str(tmp_path)])
    assert str(tmp_path) not in shown.text
    lines = re.search("<pre.*?><code>(.*?)</code>", shown.text, re.DOTALL)[1].splitlines()
    assert lines == [
        f"git checkout {'0' * 40}",
        "make setup",
        "zero-study run cpu",
        "zero-study collect runs/cpu reports/cpu/records",
        "zero-study collect runs/cpu FOLDER2",
        "zero-study report cpu --records reports/cpu/records --records FOLDER2",
    ]
    assert shown.text.count("accelerate launch --config_file accelerate_configs/zero2.yaml") == 1
    assert "3 launches, one of each kind" in shown.text


def test_boxes_show_every_value_that_changed(tmp_path):
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        write_run(tmp_path, strategy="ddp", seed=seed, machine={"git_commit": commit, "git_dirty": seed == 1})
    write_run(tmp_path / "gpu", strategy="ddp", box="gpu")
    shown = pages.boxes(table.read([tmp_path]))
    assert row_of(shown, "commit") == f"{'0' * 12} | {'a' * 12}; {'b' * 12} with changes"
    assert row_of(shown, "GPUs") == "8 x NVIDIA H200, 140 GiB | none"


# ---------------------------------------------------------------- cells and markup


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.47, "0.470"), (12.0, "12.0"), (123.4, "123"), (4567.8, "4,568"), (0, "0"), (float("nan"), None)],
)
def test_number(value, shown):
    assert cells.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.031, "+3.1 %"), (-0.5, "\N{MINUS SIGN}50 %"), (0.0, "0 %"), (2e-6, "+2e-6"), (-4.1e-5, "-4.1e-5")],
)
def test_relative(value, shown):
    assert cells.relative(value) == shown


def test_a_piece_of_html_is_no_text():
    """Its repr would be shown in its place, as on the planner's page, where a table was lost."""
    for show in (str, format, "{}".format):
        with pytest.raises(TypeError, match="text"):
            show(markup.Html("<b>"))
    assert "Memory that others published" in text_of(planner.memory_cases())


def test_table_escapes_and_says_unknown():
    shown = markup.table("a < b", ["name", "x", "y"], [("g & h", [["<i>", None, 1], ["k", 2, None]])], note="1 < 2")
    assert "<i>" not in shown
    assert shown.count('<span class="missing">unknown</span>') == 2
    assert '<caption><span>a &lt; b</span><div class="note">1 &lt; 2</div></caption>' in shown
    assert '<th colspan="3" scope="rowgroup"><span>g &amp; h</span></th>' in shown


def test_table_leaves_out_what_nothing_fills():
    shown = markup.table("t", ["name", "x", "y"], [("", [["a", None, 1]])])
    assert ">x</th>" not in shown
    assert "Not measured here: x." in shown
