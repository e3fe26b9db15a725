"""The planner: what is asked, what nothing beats, how far published rows are off, and trees judged case by case."""

from __future__ import annotations

import re

import pytest

from study import planner
from study.errors import Refusal
from study.planner import choose, published_rows
from study.theory import measured_by_others, step_time


def asked(gpu: str = "a100-80gb", num_gpus: int = 8, batch: int = 16, length: int = 1024, **more) -> planner.Asked:
    return planner.Asked(gpu=gpu, num_gpus=num_gpus, sequence_length=length, global_batch_size=batch, **more)


@pytest.fixture(scope="module")
def advice():
    """A model of which some strategies fit and others do not."""
    return planner.advise("gpt-j-6b", asked("a100-40gb"))


@pytest.fixture(scope="module")
def found():
    return published_rows.load()


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
    every = choose.choices(advice)
    front = choose.pareto(every)
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


# ---------------------------------------------------------------- trust


def test_validation_is_of_the_models_as_they_are(found):
    """What the command wrote is what theory says now; where this fails, run it again and commit what it writes."""
    for row, entry in zip(found.rows, found.content["rows"], strict=True):
        time = step_time.seconds(row.shape, row.engine, row.job, row.box)
        now = step_time.tokens_per_second_per_gpu(row.job, time.total)
        assert entry["predicted"] == pytest.approx(float(now), rel=1e-3), f"stale: run {published_rows.COMMAND}"
        assert entry["error"] == pytest.approx(row.tokens_per_second_per_gpu / now - 1, abs=1e-3)
    assert [case["name"] for case in found.content["cases"]] == [case.name for case in measured_by_others.cases()]
