"""The comparison of A100 with H100 over all sources of public runs."""

from __future__ import annotations

import itertools
import statistics

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from study.compare import public_cards, public_comparisons, public_pairs
from study.compare.public_pairs import PairedComparison
from study.public_runs import archive
from study.report import public_answers, public_figures
from zero_study.public_runs.schema import PublicRun, Setting, Source

PAIRED = {each.name: each for each in public_comparisons.paired()}


def find(name: str, quantity: str) -> public_cards.Row:
    (found,) = (row for row in public_cards.rows() if (row.comparison.name, row.quantity) == (name, quantity))
    return found


def test_a_rate_of_tokens_gives_the_time_of_a_step() -> None:
    def run(gpu: str, rate: float) -> PublicRun:
        setting = Setting(gpu=gpu, num_gpus=8, entry="one", global_batch_size=16, sequence_length=100)
        totals = {"tokens_per_second_per_gpu": rate}
        source = Source(path="a", sha256="0" * 64)
        return PublicRun(made_by="a test", name=gpu, log_format="csv", source=source, setting=setting, totals=totals)

    comparison = PairedComparison(name="x", label="x", source="s", control={"gpu": "H100"}, arm={"gpu": "A100"})
    runs = [run("H100", 300.0), run("A100", 100.0)]
    (pair,) = public_pairs.pairs_of(comparison, runs)
    assert pair.time == pytest.approx(3.0)
    left_out = comparison.model_copy(update={"left_out": {"one": "for a reason"}})
    assert public_pairs.pairs_of(left_out, runs) == []


def test_mosaicml_pairs_differ_in_nothing_but_the_card() -> None:
    row = find("a100-h100-foundry", "seconds per step")
    assert len(row.ratios) == 34
    assert row.also_differs == []
    comparison = PAIRED["a100-h100-foundry"]
    runs = archive.source(comparison.source)
    rates = {}
    for run in runs:
        setting = run.setting
        if setting.num_gpus == 8 and setting.precision == "amp_bf16":
            rest = setting.model_dump_json(exclude={"gpu", "other"}) + str(setting.other)
            rates.setdefault(rest, {})[setting.gpu] = run.totals["tokens_per_second_per_gpu"]
    ratios = [each["h100_80gb"] / each["a100_80gb"] for each in rates.values() if len(each) == 2]
    assert sorted(ratios) == pytest.approx(sorted(row.ratios))


def test_all_sources_have_both_clusters_and_both_machines() -> None:
    assert {row.comparison.source for row in public_cards.rows()} == {
        "llm-foundry",
        "megatron",
        "mlperf-llama2-lora",
        "mlperf-bert",
    }
    eos, coreweave = (find(f"a100-h100-{name}", "seconds per step").spread for name in ("eos", "coreweave"))
    assert eos.num == coreweave.num
    assert coreweave.median / eos.median > 1.1
    assert {row.baseline for row in public_cards.rows() if row.comparison.source == "mlperf-llama2-lora"} == {
        "Juniper, 8 H100",
        "Juniper, 32 H100",
    }


def test_the_pair_that_is_left_out_is_of_one_card() -> None:
    comparison = PAIRED["a100-h100"]
    (entry,) = comparison.left_out
    runs = archive.source(comparison.source)
    every = public_pairs.pairs_of(comparison.model_copy(update={"left_out": {}}), runs)
    (found,) = (pair for pair in every if pair.entry == entry)
    others = [pair.largest for pair in every if pair.entry != entry and pair.largest is not None]
    assert found.largest is not None
    assert found.time is not None
    assert found.largest < 2e-5 < min(others) / 10
    assert abs(found.time - 1) < 0.03
    assert entry not in [pair.entry for pair in public_pairs.pairs_of(comparison, runs)]


def test_most_tests_of_megatron_are_small() -> None:
    a100 = [
        run
        for run in archive.source("megatron")
        if (run.setting.gpu, run.setting.system, run.setting.other["container"]) == ("A100", None, "dev")
    ]
    assert statistics.mean(run.setting.other["hidden"] == 512 for run in a100) > 0.5
    assert statistics.median(seconds for run in a100 if (seconds := public_pairs._seconds(run))) < 1


def test_the_registered_definition_has_the_intervals_with_evaluations() -> None:
    now, registered = (
        find("zero3-a100-h100", quantity).spread.median
        for quantity in ("GPU seconds per sample", public_answers.REGISTERED)
    )
    assert (round(now, 2), round(registered, 2)) == (2.13, 1.81)


def test_four_gpus_are_as_fast_as_eight_in_machines_of_one_vendor() -> None:
    quantity = "GPU seconds per sample, with evaluation"
    own, other = (
        next(each for each in public_answers.result(name).differences if each.quantity == quantity)
        for name in ("bert-4-and-8-dell", "bert-4-and-8")
    )
    assert own.arm_name == other.arm_name == "Dell, 4 A100, one node"
    assert own.low < 0 < own.high
    assert other.high < 0


def test_no_interval_of_repeats_is_shown_for_the_cards() -> None:
    table = public_figures.table_of_cards(public_cards.rows())
    machines = table[table["runs"] != "one run each"]
    assert len(machines) == sum(bool(row.repeats) for row in public_cards.rows()) > 0
    assert set(machines["all pairs"]) == set(machines["eight of ten pairs"]) == {""}


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    """Return the two figures of the notebook `gpus` that show ratios, and those of its second notebook."""
    rows = public_cards.rows()
    pairs = [(each, public_pairs.pairs_of(each, archive.source(each.source))) for each in PAIRED.values()]
    overview = [pair for pair in pairs if pair[0].in_overview]
    return [public_figures.cards(rows), *map(public_figures.ratios, (overview, pairs))]


def test_no_two_texts_of_a_figure_overlap_and_none_leaves_it(figures: list[Figure]) -> None:
    for figure in figures:
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
        boxes = [text.get_window_extent() for text in texts]
        assert len(boxes) > 10
        for box, text in zip(boxes, texts, strict=True):
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text
        for (box, text), (other, word) in itertools.combinations(zip(boxes, texts, strict=True), 2):
            assert not box.overlaps(other), (text, word)


def test_figures_have_labels_in_words_and_no_row_without_a_value(figures: list[Figure]) -> None:
    cards, overview, every = (" ".join(text.get_text() for text in figure.findobj(Text)) for figure in figures)
    for name, comparison in PAIRED.items():
        assert comparison.label
        assert name not in cards + overview + every
        pairs = public_pairs.pairs_of(comparison, archive.source(comparison.source))
        is_shown = any(pair.time or pair.peak for pair in pairs)
        assert (comparison.label in every.replace("\n", " ")) == is_shown
    assert PAIRED["cuda-rocm"].label not in every
    assert "81 pairs" in cards


def test_the_speed_of_an_h100_has_one_value_in_texts_and_tables() -> None:
    row = find("a100-h100-foundry", "seconds per step")
    assert f"An H100 is {row.spread.median:.2f} times as fast" in public_answers.cards()
    (cells,) = public_figures.table_of_cards([row]).to_dict("records")
    assert cells["speed of H100 relative to A100 (median)"] == f"{row.spread.median:.2f}x"


def test_losses_by_number_of_gpus_have_their_intervals_and_margins() -> None:
    rows = {row["comparison"]: row for row in public_answers.losses()}
    found = public_answers.difference(public_answers.MORE_GPUS, "last evaluation loss")
    loss = public_answers.of_groups(found)
    assert loss.mean == pytest.approx(statistics.mean(found.arm) - statistics.mean(found.control))
    eight = rows["modded-nanogpt, 1,375 steps: 8 H100, relative to 1 H100"]
    assert (eight["difference (nats)"], eight["within the margin"]) == (f"{loss.mean:+.4f}", "yes (0.005)")
    assert eight["difference (nats)"] in public_answers.eight()
    two = rows[PAIRED["fms-full-one-two"].label]
    assert two["difference (nats)"] in public_answers.one_and_two()
    assert two["95 % interval"] in public_answers.one_and_two()
    assert rows[PAIRED["fms-adapters-one-two"].label]["within the margin"] == "no (0.005)"


def test_each_model_counts_once_in_a_difference_of_pairs() -> None:
    pair = public_pairs.Pair("a", 1, None, None, None, None, None, True)
    pairs = [pair._replace(nats=nats, model=model) for nats, model in [(0.1, "m"), (0.3, "m"), (0.0, "n"), (None, "o")]]
    found = public_pairs.in_nats(pairs)
    assert found is not None
    assert (found.mean, found.num_pairs, found.num_models) == (pytest.approx(0.1), 3, 2)
    assert public_pairs.in_nats([pair]) is None


def test_comparisons_that_were_added_when_values_were_known_say_so() -> None:
    late = {each.name for each in (*public_comparisons.comparisons(), *PAIRED.values()) if each.is_late}
    assert {"bert-1-4-and-8", "bert-2-and-8", "allreduce-reduce-scatter"} < late
    assert public_figures.LATE in public_figures.other_differences(public_answers.result("bert-2-and-8"))
    assert public_figures.LATE not in public_figures.other_differences(public_answers.result("bert-8-and-16"))
    assert any(public_figures.LATE in text for text in public_figures.caveats_of_pairs([PAIRED["a100-h100-foundry"]]))
