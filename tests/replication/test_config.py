"""What one run is: flags, presets, checks, and the batch arithmetic that refuses to round."""

from __future__ import annotations

import pytest
from refusing import refusal

from study.config import PRESETS, RunConfig, build_config, parse_flags


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "expected"),
    [(8, None, 1, (8, 1)), (8, None, 4, (2, 1)), (8, 2, 2, (2, 2)), (24, 2, 3, (2, 4))],
)
def test_batches(global_batch_size, micro_batch_size, world_size, expected):
    config = build_config(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    assert config.batches(world_size) == expected


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "expected"),
    [
        (8, None, 3, "global_batch_size=8 cannot be divided equally among 3 processes. Change --global-batch-size or"),
        (8, None, 16, "global_batch_size=8 cannot be divided equally among 16 processes"),
        (8, 8, 2, "global_batch_size=8 is not a multiple of micro_batch_size=8 x world_size=2"),
    ],
)
def test_batches_are_never_rounded(global_batch_size, micro_batch_size, world_size, expected):
    config = build_config(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    assert refusal(config.batches, world_size).startswith(expected)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate(schedule, expected):
    config = build_config(learning_rate=1, schedule=schedule, warmup_steps=2, max_steps=6)
    rates = [config.learning_rate_at(step) for step in range(1, 7)]
    assert rates == pytest.approx(expected, abs=1e-6)


def test_presets():
    assert {build_config(preset).workload for preset in PRESETS} == {"bert-imdb"}
    paper = build_config("paper")
    assert (paper.size, paper.num_steps, paper.sequence_length) == ("large", 500, 128)
    assert build_config("paper-large-batch").model_dump() == {**paper.model_dump(), "global_batch_size": 16}
    assert build_config("paper", size="tiny").size == "tiny"
    assert build_config().learning_rate == 1e-3
    assert "can be paper or paper-large-batch" in refusal(build_config, preset="pape")
    assert refusal(build_config, preset="papr").startswith("preset 'papr' is unknown. Did you mean paper")
    assert "['paper'] is unknown" in refusal(build_config, preset=["paper"])  # as a study's file may say it


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"sizes": "tiny"}, "unknown key 'sizes'"),
        ({"size": "124m"}, "bert-imdb's size '124m' is unknown. --size takes tiny, "),
        ({"precision": "fp8"}, "precision='fp8': input should be 'fp64', "),
        ({"dropout": 1}, "dropout=1: input should be less than 1. Change --dropout"),
        ({"learning_rate": 0}, "learning_rate=0: input should be greater than 0. Change --learning-rate"),
        ({"learning_rate": "inf"}, "learning_rate='inf': input should be a finite number"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1: input should be greater than or equal to 0"),
        ({"sequence_length": 4096}, "sequence_length 4096 is longer than the 512 positions of bert-imdb tiny"),
        ({"num_train_examples": 7}, "num_train_examples 7 is less than one global batch of 8. Raise"),
        ({"warmup_steps": 32}, "warmup_steps 32 must be less than the 32 steps of the run. Lower --warmup-steps"),
        ({"data_dir": "data"}, "--data files and --data-dir FOLDER need each other"),
    ],
)
def test_checks(flags, expected):
    assert refusal(build_config, **flags).startswith(expected)


def test_flags_are_the_fields():
    words = "--preset paper --size tiny --no-measure --compile --learning-rate 3e-4 --eval-every=5".split()  # noqa: SIM905
    flags = parse_flags(words)
    assert set(flags) == {"preset", "size", "measure", "compile", "learning_rate", "eval_every"}
    config = build_config(**flags)
    assert (config.size, config.measure, config.compile) == ("tiny", False, True)
    assert (config.learning_rate, config.eval_every) == (3e-4, 5)
    assert build_config(**parse_flags([])) == RunConfig(**PRESETS["smoke"])
