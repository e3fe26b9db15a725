"""Runs that others measured: schema, archive, quantities and comparisons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from study.compare import public_comparisons, public_pairs, public_table
from study.compare.public_comparisons import Comparison, Evaluations, Group
from study.compare.public_pairs import PairedComparison
from study.errors import Refusal
from study.public_runs import archive, folder, quantities
from study.public_runs.schema import PublicRun, Series, Setting, Source


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
    control=Group(name="a", where={"entry": "a"}),
    arms=[Group(name="b", where={"entry": "b"})],
    varied=["num_gpus"],
)


def test_a_comparison_has_the_margin_of_the_controls_repeats() -> None:
    noise = np.random.default_rng(0).normal(2.0, 0.005, 10).tolist()
    result = public_comparisons.answer(COMPARISON, groups(noise, [x + 0.001 for x in noise], 20.0))
    time, peak, loss = result.differences  # nothing was evaluated after 64 samples
    assert time.verdict == "higher"
    assert time.low is not None
    assert time.high is not None
    assert time.low < time.relative < time.high
    assert time.relative == pytest.approx(1.0, abs=0.02)
    assert peak.verdict == "equal"
    assert loss.verdict == "within the margin"
    assert loss.margin == pytest.approx(2.262 * 2**0.5 * np.std(noise, ddof=1) / np.mean(noise), rel=1e-3)
    assert result.also_differs == ["gpu (a: H100; b: A100)"]
    assert result.num_runs == {"a": 10, "b": 10}


def test_a_large_difference_is_not_within_the_margin_and_one_run_decides_nothing() -> None:
    noise = np.random.default_rng(1).normal(2.0, 0.01, 10).tolist()
    loss = public_comparisons.answer(COMPARISON, groups(noise, [x + 0.5 for x in noise])).differences[-1]
    assert loss.verdict == "higher"
    loss = public_comparisons.answer(COMPARISON, groups(noise, [2.5])).differences[-1]
    assert (loss.low, loss.verdict) == (None, "one run on a side")


def test_equal_repeats_and_a_wide_margin_do_not_hide_a_difference() -> None:
    """Two-decimal losses of repeats can be equal, and a wide margin is no reason to call a difference undecided."""
    assert public_comparisons.difference("last loss", [2.0] * 3, [3.0] * 3, "b").verdict == "higher in every run"
    assert public_comparisons.difference("last loss", [2.0] * 3, [2.0] * 3, "b").verdict == "equal in all logged digits"
    noise = np.random.default_rng(2).normal(2.0, 0.06, 10)
    assert public_comparisons.difference("last loss", noise, noise + 0.08, "b").verdict == "higher"
    assert public_comparisons.difference("last loss", [2.0, 2.1], [2.2, 2.3], "b").margin is None


def test_a_run_whose_log_ended_early_is_not_averaged() -> None:
    runs = [*groups([2.0, 2.1], [2.0, 2.1]), make("early", 100.0, ending="ended early", entry="b")]
    result = public_comparisons.answer(COMPARISON, runs)
    assert result.num_runs == {"a": 2, "b": 2}
    assert result.left_out == ["early: ended early"]


def test_a_group_without_runs_or_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(Refusal, match="no run has the setting of 'b'"):
        public_comparisons.answer(COMPARISON, [make("a", entry="a")])
    unknown = COMPARISON.model_copy(update={"control": Group(name="a", where={"card": "a"})})
    with pytest.raises(Refusal, match="no field 'card'"):
        public_comparisons.answer(unknown, [make("a", entry="a")])


def test_pairs_are_formed_by_case() -> None:
    runs = [
        make("a1", 2.0, 10.0, gpu="H100", entry="one"),
        make("a2", 2.2, 30.0, gpu="A100", entry="one"),
        make("a3", 2.0, 10.0, gpu="H100", entry="without a partner"),
    ]
    comparison = PairedComparison(name="x", question="?", source="s", control={"gpu": "H100"}, arm={"gpu": "A100"})
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
        name="x", question="?", source="s", control={"num_nodes": 1}, arm={"num_nodes": 4}, by=["model"]
    )
    (pair,) = public_pairs.pairs_of(comparison, runs)
    assert pair == ("a against b", 0, None, None, None, 1.5, 1.0, True, None)
    assert quantities.seconds_per_step(runs[0]) == 2.0


def test_one_control_in_several_pairs() -> None:
    runs = [make("a", 2.0, entry="a"), make("b", 2.2, entry="b"), make("c", 1.8, entry="c")]
    comparison = PairedComparison(
        name="x", question="?", source="s", control={}, arm={}, pairs={"a": ["b", "c", "absent"], "absent": "a"}
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
    assert "measured by others" in page
    assert "These settings differ: gpu." in page
    assert "- c: ended early" in page
    assert "| 10 % |" in page
    assert "MLPerf" not in page
    mixed = [*runs, make("d", benchmark="MLPerf Training 4.0 x closed")]
    assert "must not be ranked" in public_table.page(mixed)
