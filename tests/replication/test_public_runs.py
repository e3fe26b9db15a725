"""Runs that others measured: schema, archive, quantities and comparisons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from study.accuracy import public_errors
from study.compare import public_comparisons, public_pairs, public_table
from study.compare.public_comparisons import Comparison, Evaluations, Group
from study.compare.public_pairs import PairedComparison
from study.public_runs import archive
from study.report import public_figures
from zero_study.errors import Refusal
from zero_study.public_runs import folder, quantities
from zero_study.public_runs.schema import PublicRun, Series, Setting, Source


def make(name: str, loss: float = 2.0, seconds: float = 10.0, ending: Any = "finished", **setting: Any) -> PublicRun:
    """Return a run of four steps of 8 samples, with one evaluation."""
    steps = [1, 2, 3, 4]
    return PublicRun(
        made_by="a test",
        name=name,
        log_format="csv",
        source=Source(path=f"{name}.csv", sha256="0" * 64),
        setting=Setting(**{"num_gpus": 8, "gpu": "H100", **setting}),
        ending=ending,
        training=Series(
            columns={
                "step": steps,
                "samples": [8 * step for step in steps],
                "seconds": [seconds * step for step in steps],
                "loss": [loss / step for step in steps],
                "peak_allocated_bytes": [100 + step for step in steps],
            }
        ),
        evaluation=Series(columns={"samples": [32], "evaluation_loss": [loss]}),
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    runs = [make("b", seed=1), make("a", seed=2, versions={"torch": "2.13"})]
    path = tmp_path / f"source{archive.COLLECTED}"
    archive.write(path, runs)
    assert archive.read([path]) == [runs[1], runs[0]]
    folder.write([runs[0]], tmp_path)
    assert archive.read(archive.find([tmp_path])) == [runs[0]]


@pytest.mark.parametrize("content", ["", "{", '{"kind": "record"}', "[]", '{"kind": "public run", "name": 3}'])
def test_what_is_no_public_run_is_refused(content: str, tmp_path: Path) -> None:
    path = folder.path_of(tmp_path, "a")
    path.write_text(content)
    with pytest.raises(Refusal, match=r"a\.run\.json"):
        archive.read([path])


def test_columns_are_equally_long_and_finite() -> None:
    with pytest.raises(ValidationError, match="different lengths"):
        Series(columns={"step": [1, 2], "loss": [1.0]})
    with pytest.raises(ValidationError):
        Series(columns={"loss": [math.nan]})


def test_quantities() -> None:
    run = make("a")
    assert quantities.gpu_seconds_per_sample(run) == 10.0 / 8 * 8
    assert quantities.gpu_seconds_per_sample_with_evaluation(run) is None
    assert quantities.seconds_per_step(run) == 10.0
    assert quantities.gpu_seconds(run) == 40.0 * 8
    assert quantities.last_evaluation_loss(run) == 2.0
    assert quantities.QUANTITIES["peak of tensors"](run) == 104
    assert quantities.seconds_to_target(run) is None
    assert quantities.gpu_seconds(make("b", num_gpus=None)) is None
    assert [quantities.at(run.evaluation, "samples", 33, "evaluation_loss", close) for close in (0.0, 0.1)] == [
        None,
        2.0,
    ]


def test_time_of_an_evaluation_is_not_time_of_training() -> None:
    """Most intervals of one system had an evaluation, which made it look slower."""
    slow = [10.0, 20.0, 130.0, 240.0]  # two of three intervals have an evaluation of 100 s
    training = Series(columns={"samples": [8, 16, 24, 32], "seconds": slow, "loss": [1.0] * 4})
    evaluation = Series(columns={"samples": [20, 28], "seconds": [125.0, 235.0], "evaluation_loss": [1.0, 1.0]})
    run = make("a").model_copy(update={"training": training, "evaluation": evaluation})
    assert quantities.gpu_seconds_per_sample(run) == 10.0
    assert quantities.gpu_seconds_per_sample_with_evaluation(run) == 110.0


def groups(losses: list[float], others: list[float], seconds: float = 10.0) -> list[PublicRun]:
    return [
        *(make(f"a{n}", loss, 10.0 + n / 100, entry="a", seed=n) for n, loss in enumerate(losses)),
        *(make(f"b{n}", loss, seconds + n / 100, entry="b", seed=n, gpu="A100") for n, loss in enumerate(others)),
    ]


COMPARISON = Comparison(
    name="a-b",
    question="?",
    source="none",
    quantities=["GPU seconds per sample", "peak of tensors"],
    evaluations=Evaluations(column="evaluation_loss", by="samples", positions=[32, 64]),
    margin=0.02,
    control=Group(name="a", where={"entry": "a"}),
    arms=[Group(name="b", where={"entry": "b"})],
    varied=["num_gpus"],
)


def test_a_comparison_judges_losses_by_its_margin() -> None:
    noise = np.random.default_rng(0).normal(2.0, 0.005, 10).tolist()
    result = public_comparisons.answer(COMPARISON, groups(noise, [x + 0.001 for x in noise], 20.0))
    time, peak, loss = result.differences  # nothing was evaluated after 64 samples
    assert time.verdict == "higher"
    assert time.low is not None
    assert time.high is not None
    assert time.low < time.relative < time.high
    assert time.relative == pytest.approx(1.0, abs=0.02)
    assert peak.verdict == "equal"
    assert (loss.verdict, time.margin, peak.margin) == ("equivalent", None, None)
    assert loss.margin == pytest.approx(0.02 / np.mean(noise))
    assert result.not_compared == ["evaluation loss after 64 samples of b"]
    assert any("after 64 samples of b" in line for line in public_figures.other_differences(result))
    assert result.also_differs == ["GPU: H100 (a) and A100 (b)"]
    assert result.num_runs == {"a": 10, "b": 10}


@pytest.mark.parametrize("comparison", public_comparisons.comparisons(), ids=lambda comparison: comparison.name)
def test_every_committed_comparison_compares_all_that_it_asks_for(comparison: Comparison) -> None:
    result = public_comparisons.answer(comparison)
    assert {each.arm_name for each in result.differences} == {arm.name for arm in comparison.arms}
    assert result.not_compared == []


@pytest.mark.parametrize("comparison", public_comparisons.paired(), ids=lambda comparison: comparison.name)
def test_every_committed_comparison_of_pairs_has_a_pair(comparison: PairedComparison) -> None:
    pairs = public_pairs.pairs_of(comparison, archive.source(comparison.source))
    assert any((pair.time, pair.peak, pair.mean) != (None, None, None) for pair in pairs)


def test_a_large_difference_is_not_within_the_margin_and_one_run_decides_nothing() -> None:
    noise = np.random.default_rng(1).normal(2.0, 0.01, 10).tolist()
    loss = public_comparisons.answer(COMPARISON, groups(noise, [x + 0.5 for x in noise])).differences[-1]
    assert loss.verdict == "higher, by more than the margin"
    loss = public_comparisons.answer(COMPARISON, groups(noise, [2.5])).differences[-1]
    assert (loss.low, loss.verdict) == (None, public_comparisons.ONE_RUN)


def test_equal_repeats_and_a_wide_margin_do_not_hide_a_difference() -> None:
    """Two-decimal losses of repeats can be equal, and a wide margin is no reason to call a difference undecided."""
    assert public_comparisons.difference("last loss", [2.0] * 3, [3.0] * 3, "b").verdict == "higher in every run"
    assert public_comparisons.difference("last loss", [2.0] * 3, [2.0] * 3, "b").verdict == "equal in all logged digits"


def test_the_spread_of_repeats_hides_no_difference_and_a_detected_one_can_be_within_the_margin() -> None:
    noise = np.random.default_rng(2).normal(2.0, 0.06, 10)

    def verdict(shift: float, margin: float | None, values: Any = noise) -> str:
        return public_comparisons.difference("last loss", values, values + shift, "b", margin).verdict

    precise = 2.0 + (noise - 2.0) / 1000
    assert [verdict(0.08, margin) for margin in (None, 0.06)] == ["higher", "higher"]
    assert verdict(0.08, 0.5) == "higher, by less than the margin"
    assert [verdict(-0.08, margin, precise) for margin in (0.01, 0.1)] == [
        "lower, by more than the margin",
        "lower, by less than the margin",
    ]
    assert [verdict(0.0, margin) for margin in (None, 0.01, 0.5)] == ["undecided", "undecided", "equivalent"]


def test_two_programs_that_differ_are_called_different() -> None:
    """The positive control. By the spread of single runs, the two programs counted as equal at the end."""
    (comparison,) = (each for each in public_comparisons.comparisons() if each.name == "modded-programs")
    *others, last = public_comparisons.answer(comparison).differences
    assert public_comparisons.earlier_verdict(last).startswith("within the margin")
    assert last.is_detected
    assert last.relative == pytest.approx(-0.00094, abs=1e-5)
    assert others[0].verdict == "higher, by more than the margin"


def test_repeats_of_one_program_are_rarely_called_different() -> None:
    repeats = public_comparisons.of_repeats("loss", quantities.QUANTITIES["last evaluation loss"], splits=10)
    assert repeats.num_programs > 60
    assert 0.03 < public_comparisons.share_detected(repeats.halves) < 0.07
    assert public_comparisons.share_detected(repeats.programs) > 0.1


def test_a_run_whose_log_ended_early_is_not_averaged() -> None:
    runs = [*groups([2.0, 2.1], [2.0, 2.1]), make("early", 100.0, ending="ended early", entry="b")]
    result = public_comparisons.answer(COMPARISON, runs)
    assert result.num_runs == {"a": 2, "b": 2}
    assert result.left_out == ["early: its log ended early"]


def test_a_group_without_runs_or_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(Refusal, match="no run has the values that 'b' requires"):
        public_comparisons.answer(COMPARISON, [make("a", entry="a")])
    unknown = COMPARISON.model_copy(update={"control": Group(name="a", where={"card": "a"})})
    with pytest.raises(Refusal, match="the field 'card'"):
        public_comparisons.answer(unknown, [make("a", entry="a")])


def test_pairs_are_formed_by_case() -> None:
    runs = [
        make("a1", 2.0, 10.0, gpu="H100", entry="one"),
        make("a2", 2.2, 30.0, gpu="A100", entry="one"),
        make("a3", 2.0, 10.0, gpu="H100", entry="without a partner"),
    ]
    comparison = PairedComparison(name="x", label="x", source="s", control={"gpu": "H100"}, arm={"gpu": "A100"})
    (pair,) = public_pairs.pairs_of(comparison, runs)
    assert (pair.entry, pair.num_steps, pair.peak) == ("one", 4, 1.0)
    assert pair.first == pytest.approx(0.1)
    assert pair.last == pytest.approx(0.1)
    assert public_pairs.spread([None]) is None


def test_pairs_by_fields_of_runs_that_have_totals_only() -> None:
    totals = {"seconds_per_step": 2.0, "peak_allocated_bytes": 100}
    runs = [
        make("a", entry="a", model="m", num_nodes=1).model_copy(update={"training": None, "totals": totals}),
        make("b", entry="b", model="m", num_nodes=4).model_copy(
            update={"training": None, "totals": {"seconds_per_step": 3.0, "peak_allocated_bytes": 100}}
        ),
    ]
    comparison = PairedComparison(
        name="x", label="x", source="s", control={"num_nodes": 1}, arm={"num_nodes": 4}, by=["model"]
    )
    (pair,) = public_pairs.pairs_of(comparison, runs)
    assert pair == ("a against b", 0, None, None, None, 1.5, 1.0, True, None, None, "m")
    assert quantities.seconds_per_step(runs[0]) == 2.0


def test_a_margin_of_pairs_is_in_nats() -> None:
    losses = {1: [2.0, 2.0, 2.0], 2: [2.004, 1.999, 2.006]}  # the mean losses that the source states
    runs = [
        make(f"{gpus}-{n}", entry=f"{n}", num_gpus=gpus).model_copy(update={"training": None, "totals": {"loss": loss}})
        for gpus, of_gpus in losses.items()
        for n, loss in enumerate(of_gpus)
    ]
    comparison = PairedComparison(
        name="x", label="x", source="s", control={"num_gpus": 1}, arm={"num_gpus": 2}, margin=0.005
    )
    pairs = public_pairs.pairs_of(comparison, runs)
    assert [pair.nats for pair in pairs] == pytest.approx([0.004, -0.001, 0.006])
    (row,) = public_figures.table_of_pairs([(comparison, pairs)]).to_dict("records")
    cell = row[public_figures.NATS]
    assert cell == "+0.0030 (\N{MINUS SIGN}0.0060 to +0.0120), 2 of 3 within 0.005"


def test_one_control_in_several_pairs() -> None:
    runs = [make("a", 2.0, entry="a"), make("b", 2.2, entry="b"), make("c", 1.8, entry="c")]
    comparison = PairedComparison(
        name="x", label="x", source="s", control={}, arm={}, pairs={"a": ["b", "c", "absent"], "absent": "a"}
    )
    pairs = public_pairs.pairs_of(comparison, runs)
    assert [pair.entry for pair in pairs] == ["a against b", "a against c"]
    assert [pair.mean for pair in pairs] == [pytest.approx(0.1), pytest.approx(-0.1)]


def test_the_committed_comparisons_are_valid() -> None:
    names = [each.name for each in (*public_comparisons.comparisons(), *public_comparisons.paired())]
    assert len(names) == len(set(names)) > 0
    for comparison in public_comparisons.comparisons():
        assert set(comparison.quantities) <= set(quantities.QUANTITIES)


@pytest.mark.parametrize("comparison", public_comparisons.comparisons(), ids=lambda each: each.name)
def test_the_archive_has_runs_on_both_sides(comparison: Comparison) -> None:
    result = public_comparisons.answer(comparison)
    assert {each.arm_name for each in result.differences} == {arm.name for arm in comparison.arms}


@pytest.mark.parametrize("comparison", public_comparisons.paired(), ids=lambda each: each.name)
def test_the_archive_has_every_pair(comparison: PairedComparison) -> None:
    pairs = public_pairs.pairs_of(comparison, archive.source(comparison.source))
    expected = sum(1 if isinstance(each, str) else len(each) for each in comparison.pairs.values())
    assert len(pairs) == expected if expected else pairs


def test_the_table_names_what_differs_and_what_is_odd() -> None:
    runs = [
        make("a", 2.0, model="m", seed=1),
        make("b", 2.2, model="m", gpu="A100"),
        make("c", ending="ended early", model="m"),
    ]
    page = public_table.page(runs)
    assert "so this project did not measure them" in page
    assert "These settings differ: gpu." in page
    assert "- c: its log ended early" in page
    assert "| 10 % |" in page
    assert "MLPerf" not in page
    mixed = [*runs, make("d", benchmark="MLPerf Training 4.0 x closed")]
    assert "must not be ranked" in public_table.page(mixed)


def with_losses(name: str, losses: list[float | None], **changes: Any) -> PublicRun:
    """Return a run with these losses, of which None stands for one that is not finite."""
    columns: dict[str, Any] = {"step": [10 * n for n in range(1, len(losses) + 1)], "loss": losses}
    not_finite = [place for place, loss in enumerate(losses) if loss is None]
    training = Series(columns=columns, not_finite={"loss": not_finite} if not_finite else {})
    return make(name).model_copy(update={"training": training, **changes})


def row_of(page: str, name: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_diverged_training_is_not_shown_as_a_finite_one() -> None:
    diverged = with_losses("diverged", [3.0, 2.0, *[None] * 98])
    assert (diverged.not_finite_since, diverged.counts) == ("step 30", False)
    assert diverged.why_not_counted == "its loss is not finite from step 30 on"
    assert quantities.last_loss(diverged) is None
    page = public_table.page([with_losses("a", [3.0, 2.0, 1.5]), diverged])
    since = "not finite from step 30 on"
    assert row_of(page, "diverged")[4:9] == ["100", since, since, "not finite", since]
    assert "- diverged: its loss is not finite from step 30 on" in page
    recovered = with_losses("recovered", [3.0, None, 1.5])
    assert (recovered.not_finite_since, recovered.counts, quantities.last_loss(recovered)) == (None, True, 1.5)
    golden = diverged.model_copy(update={"log_format": "megatron"})  # NaN at the steps that were not made
    assert golden.counts


def test_a_diverged_repeat_is_a_row_of_its_own() -> None:
    setting = Setting(entry="e")
    runs = [with_losses("a", [3.0, 2.0], setting=setting), with_losses("b", [3.0, None], setting=setting)]
    page = public_table.page(runs)
    assert row_of(page, "a")[5] == "2"
    assert row_of(page, "b")[5] == "not finite from step 20 on"


def test_a_last_evaluation_that_is_not_finite_is_not_replaced_by_an_earlier_one() -> None:
    evaluation = Series(columns={"evaluation_loss": [2.0, None]}, not_finite={"evaluation_loss": [1]})
    run = make("a").model_copy(update={"evaluation": evaluation})
    assert quantities.last_evaluation_loss(run) is None


def test_a_reference_has_enough_losses() -> None:
    runs = [with_losses("short", [3.0]), with_losses("a", [3.0, 2.0]), with_losses("b", [3.0, 2.5])]
    page = public_table.page(runs)
    assert "The reference is a, because short logged only 1 training loss." in page
    assert (row_of(page, "a")[8], row_of(page, "b")[8]) == ("", "25 %")
    long = [with_losses(name, [2.0 + n / 100 for n in range(100)]) for name in ("a", "b")]
    page = public_table.page([with_losses("short", [3.0, 2.0]), *long])
    assert "The reference is a, because short logged only 2 training losses." in page
    assert "because x has a loss that is not finite" in public_table.page([with_losses("x", [1.0, None]), *long])
    assert "The reference is a," not in public_table.page(runs[1:])


def test_imported_runs_keep_the_order_in_which_they_were_given(tmp_path: Path) -> None:
    runs = [make("b", model="z"), make("a", model="z"), make("c", model="y")]
    folder.write(runs, tmp_path)
    paths = archive.find([folder.path_of(tmp_path, run.name) for run in runs])
    page = public_table.page(archive.read(paths))
    assert page.index("## z") < page.index("| b |") < page.index("| a |") < page.index("## y") < page.index("| c |")


@pytest.mark.parametrize("error", [None, 0.1, -0.5])
def test_an_expectation_of_errors_is_not_met_if_nothing_was_compared_or_it_was_missed(error: float | None) -> None:
    """Steps of these runs should take at least 1.5 times as long as predicted."""
    group, quantity = "Megatron-LM golden values of H100", "seconds_per_step"
    measured = None if error is None else 1.0 / (1 + error)
    row = public_errors.Compared("a", group, quantity, 1.0, measured, None, None)
    assert public_errors._summary(group, quantity, [row]).is_met is (error == -0.5)
