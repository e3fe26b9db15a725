"""The planner: what is asked, what nothing beats, how far published rows are off, and trees judged case by case."""

from __future__ import annotations

import json
import re

import pytest

from study import planner
from study.errors import Refusal
from study.planner import accuracy as planner_accuracy
from study.planner import say, sweeps, trees
from study.theory import measured_by_others, step_time
from study.theory.decision_trees import TREES, TreeOutcome


def asked(gpu: str = "a100-80gb", num_gpus: int = 8, batch: int = 16, length: int = 1024, **more) -> planner.Asked:
    return planner.Asked(gpu=gpu, num_gpus=num_gpus, sequence_length=length, global_batch_size=batch, **more)


@pytest.fixture(scope="module")
def advice():
    """A model of which some strategies fit and others do not."""
    return planner.advise("gpt-j-6b", asked("a100-40gb"))


@pytest.fixture(scope="module")
def found():
    return planner_accuracy.load()


@pytest.fixture(scope="module")
def grid():
    """Two models instead of nine: what fits in any way, and what is too large for most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "MODELS", ("mpt-125m", "mpt-30b"))
        patch.setattr(trees, "GPU_COUNTS", (1, 16))
        patch.setattr(trees, "BATCHES", (64,))
        yield trees.evaluate()


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("gpt2-xxl", {}, "unknown model 'gpt2-xxl': near are gpt2-xl"),
        ("gpt2", {"gpu": "a100"}, "unknown GPU 'a100': near are a100"),
        ("gpt2", {"batch": 12}, "12 does not divide over"),
        ("gpt2", {"num_gpus": 12, "batch": 24}, "12 GPUs do not fill nodes of 8"),
    ],
)
def test_bad_parameters_are_refused_in_a_line(model, settings, said):
    with pytest.raises(Refusal, match=re.escape(said)) as refused:
        planner.advise(model, asked(**settings))
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------- tables


def test_front_is_beaten_by_nothing_that_fits(advice):
    every = sweeps.choices(advice)
    front = sweeps.pareto(every)
    assert 1 < len(front) < len(every)
    for kept in front:
        one = kept.prediction
        assert one.fits
        assert not [
            other
            for other in every
            if other.prediction.fits
            and other.prediction.peak.total < one.peak.total
            and other.prediction.tokens_per_second_per_gpu > one.tokens_per_second_per_gpu
        ]
    assert max(choice.prediction.tokens_per_second_per_gpu for choice in every if choice.prediction.fits) == (
        front[-1].prediction.tokens_per_second_per_gpu
    )


# ---------------------------------------------------------------- figures


def test_memory_falls_with_more_gpus_only_where_something_is_sharded(advice):
    needed = sweeps.needed_by_gpus(advice)
    assert set(needed["single"]) == {1}
    assert needed["zero3"][64] < needed["zero3"][2] / 4
    assert needed["ddp"][64] == needed["ddp"][2]


# ---------------------------------------------------------------- trust


def test_validation_is_of_the_models_as_they_are(found):
    """What the command wrote is what theory says now; where this fails, run it again and commit what it writes."""
    for row, entry in zip(found.rows, found.content["rows"], strict=True):
        time = step_time.seconds(row.shape, row.engine, row.job, row.box)
        now = step_time.tokens_per_second_per_gpu(row.job, time.total)
        assert entry["predicted"] == pytest.approx(float(now), rel=1e-3), f"stale: run {planner_accuracy.COMMAND}"
        assert entry["error"] == pytest.approx(row.tokens_per_second_per_gpu / now - 1, abs=1e-3)
    assert [case["name"] for case in found.content["cases"]] == [case.name for case in measured_by_others.cases()]


def test_an_answer_says_which_errors_its_times_rest_on(advice, capsys):
    sentences = {option.prediction.step.evidence.sentence for option in advice.options}
    assert len(sentences) >= 3  # FSDP, other engines, offload; and of each what no published row has
    said = " ".join(say.text(advice).split())
    content = say.content(advice)
    for option, entry in zip(advice.options, content["strategies"], strict=True):
        sentence = option.prediction.step.evidence.sentence
        assert entry["seconds_per_step_rests_on"] == sentence
        assert sentence in said


def test_memory_counts_what_was_measured_twice_alike_once():
    cases = planner_accuracy.amounts()
    peaks_of_tensors = [case for case in cases if case.quantity == "peak_allocated_bytes" and case.grade == "A"]
    assert len(peaks_of_tensors) == 29
    assert 0 < sum(map(planner_accuracy.activations_decide, peaks_of_tensors)) < 29


def test_what_trained_and_is_said_not_to_fit_is_counted():
    wrong = [one for one in planner_accuracy.fits_verdicts() if one.trained != one.predicted]
    assert wrong
    assert all(one.trained for one in wrong)  # none that ran out of memory is said to fit
    assert {"fms-acceleration liger", "BigScience GPT"} <= {one.case.family for one in wrong}


def test_validation_of_something_else_is_refused(tmp_path):
    path = tmp_path / "there.json"
    with pytest.raises(Refusal, match=r"^there.json: No such file or directory; run zero-study accuracy"):
        planner_accuracy.load(path)
    for content in ("{", "{}", "[1]"):
        path.write_text(content)
        with pytest.raises(Refusal, match=r"^there.json: not what zero-study accuracy writes; run "):
            planner_accuracy.load(path)
    path.write_text(json.dumps({"rows": [{"row": "another"}]}))
    with pytest.raises(Refusal, match=r"^there.json: has other rows than mpt_throughput.csv; run "):
        planner_accuracy.load(path)


# ---------------------------------------------------------------- decision trees


def test_grid_has_every_box_and_judges_where_something_fits(grid):
    assert len(grid.cases) == 2 * 2 * len(trees.GPUS) * 2
    fitting = [case for case in grid.cases if any(fits for fits, _ in case.results.values())]
    assert len(fitting) > 0
    assert all(len(judged) == 4 * len(fitting) for judged in grid.judged.values())
    assert set(grid.judged) == set(TREES)
    for case in grid.cases:
        assert set(case.results) == set(trees.STRATEGIES) - {"ddp" if case.box.num_gpus == 1 else "single"}


def test_grid_is_what_the_planner_says(grid):
    """The grid goes round the planner for speed; here is one cell of it through the planner."""
    case = next(
        case
        for case in grid.cases
        if (case.shape.name, case.box.num_gpus, case.box.gpu.name, case.has_fast_link)
        == ("mpt-30b", 16, "h100-sxm", True)
    )
    through = planner.advise("mpt-30b", asked("h100-sxm", 16, batch=64, strategy="zero3"))
    (option,) = through.options
    fits, speed = case.results["zero3"]
    assert fits
    assert speed == pytest.approx(option.prediction.tokens_per_second_per_gpu)
    assert case.results["ddp"] == (False, 0.0)


def test_slow_links_are_slower(grid):
    fast, slow = (
        next(
            case.results["zero3"][1]
            for case in grid.cases
            if case.shape.name == "mpt-125m" and case.box.num_gpus == 16 and case.has_fast_link is link
        )
        for link in (True, False)
    )
    assert slow < fast


def test_usual_outcome_is_the_commonest(grid):
    case = grid.cases[0]
    judged = [trees.Judged(case, TreeOutcome(kind, "ddp", "ddp", None)) for kind in ("slower", "agrees", "slower")]
    assert trees.usual(judged) == {(case.shape.name, case.box.num_gpus): "slower"}
