"""Is only what is comparable compared, and is the rest told with its reason?"""

from __future__ import annotations

import pandas as pd
import pytest
import synthetic

from study.compare import pairs, table


@pytest.fixture(scope="module")
def row(tmp_path_factory) -> dict:
    """One row of the table, to be changed."""
    folder = tmp_path_factory.mktemp("records")
    synthetic.write_run(folder)
    return table.read([folder]).iloc[0].to_dict()


LIBRARIES = "torch {}, accelerate 1.15.0, deepspeed 0.19.8, transformers 5.23.0"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"box": "8 x NVIDIA H200"}, "another box: Synthetic CPU, 8 cores against 8 x NVIDIA H200"),
        ({"device": "cuda"}, "cpu against cuda"),
        ({"workload": "bert-imdb"}, "gpt-wikitext against bert-imdb"),
        ({"size": "mini"}, "size tiny against mini"),
        ({"precision": "bf16"}, "precision fp32 against bf16"),
        ({"data_digest": "f" * 64}, "other data"),
        ({"init": "pretrained"}, "init scratch against pretrained"),
        ({"sequence_length": 128.0}, "sequence length 64 against 128"),
        ({"gradient_clipping": 0.0}, "clipping at 1 against 0"),
        ({"config_digest": "f" * 64, "settings": {"learning_rate": 0.1}}, "learning_rate 5e-05 against 0.1"),
        ({"libraries": LIBRARIES.format("2.12.0")}, "torch 2.13.0 against torch 2.12.0"),
        ({"global_batch_size": 16}, "global batch 8 against 16"),
        ({"num_steps": 30.0}, "40 steps against 30"),
        ({"initial_sha256": "f" * 64}, "other initial weights"),
        ({"status": "killed"}, "zero2: killed"),
        ({"is_unproven": True}, "zero2: its proof does not say what was sharded; run it again"),
        ({"data_digest": None}, "data unknown"),
        ({"num_steps": float("nan")}, "num steps unknown"),
        ({"seed": 1, "initial_sha256": "f" * 64}, None),
        ({"strategy": "ddp", "world_size": 4, "micro_batch_size": 2.0, "repeat": 3}, None),
    ],
)
def test_comparable(row, facts, reason):
    merged = {name: row[name] | value if isinstance(value, dict) else value for name, value in facts.items()}
    assert pairs.comparable(row, {**row, **merged}) == reason


HALVES = {"world_size": 4, "micro_batch_size": 2.0}
ALONE = {"strategy": "single", "world_size": 1, "micro_batch_size": 8.0}
MASKS = "dropout is on and {} against {}: other masks"
MICRO = "micro batch 4 against 2"
DAY = "2026-01-01T{:02}:00:00"


@pytest.mark.parametrize(
    ("facts", "other", "limits"),
    [
        ({}, {}, {}),
        ({}, HALVES, {}),
        ({}, ALONE, {}),
        ({}, {"strategy": "ddp"} | HALVES, dict.fromkeys(("speed", "memory", "states"), "processes 2 against 4")),
        ({"dropout": 0.1}, HALVES, {"losses": MASKS.format("processes 2", 4)}),
        ({"dropout": 0.1}, {"micro_batch_size": 2.0}, {"losses": MASKS.format("micro batch 4", 2), "speed": MICRO,
                                                       "memory": MICRO}),
        ({}, {"oversubscribed": True, "world_size": 16}, {"speed": "16 processes on too few cores"}),
        ({"device": "cuda", "oversubscribed": True}, {}, {"speed": "2 processes on fewer GPUs"}),
        ({"device": "cuda", "oversubscribed": True, "share_device": True}, ALONE | {"oversubscribed": False},
         {"speed": "2 processes on one device"}),
        ({}, {"threads_per_process": 4.0}, {"speed": "threads per process 1 against 4"}),
        ({"device": "cuda"}, {"threads_per_process": 4.0}, {}),
        ({"started_at": DAY.format(0)}, {"started_at": DAY.format(11)}, {}),
        ({"started_at": DAY.format(0)}, {"started_at": DAY.format(20)}, {"speed": "begun 20 hours apart"}),
    ],
)  # fmt: skip
def test_limits(row, facts, other, limits):
    one = {**row, "dropout": 0.0, **facts}
    assert pairs.limits(one, {**one, **other}) == {**dict.fromkeys(pairs.LIMITS), **limits}


def test_pairs_are_of_one_seed_as_many_processes_and_one_repeat(tmp_path):
    for strategy, world_size in (("ddp", 2), ("ddp", 4), ("zero2", 2), ("zero2", 4), ("single", 1)):
        for seed in (0, 1):
            synthetic.write_run(tmp_path, strategy=strategy, world_size=world_size, seed=seed)
    synthetic.write_run(tmp_path, strategy="ddp", repeat=1)
    for repeat in (1, 2):
        synthetic.write_run(tmp_path, strategy="zero2", repeat=repeat)
    rows = table.read([tmp_path])
    made = pairs.pair(rows)
    names = ["strategy", "world_size", "seed", "repeat"]
    assert {(*rows.loc[one.run, names], *rows.loc[one.control_run, names]) for one in made.compared.itertuples()} == {
        ("zero2", 2, 0, 0, "ddp", 2, 0, 0),
        ("zero2", 2, 0, 1, "ddp", 2, 0, 1),
        ("zero2", 2, 0, 2, "ddp", 2, 0, 0),  # the control has no third
        ("zero2", 2, 1, 0, "ddp", 2, 1, 0),
        ("zero2", 4, 0, 0, "ddp", 4, 0, 0),
        ("zero2", 4, 1, 0, "ddp", 4, 1, 0),
        ("single", 1, 0, 0, "ddp", 2, 0, 0),  # the fewest that the control has
        ("single", 1, 1, 0, "ddp", 2, 1, 0),
    }
    assert made.refused.empty


def test_an_equal_micro_batch_is_preferred(tmp_path):
    for micro_batch_size in (4, 2):
        synthetic.write_run(tmp_path, strategy="ddp", micro_batch_size=micro_batch_size)
    synthetic.write_run(tmp_path, micro_batch_size=2)
    rows = table.read([tmp_path])
    (one,) = pairs.pair(rows).compared.itertuples()
    assert rows.loc[one.control_run, "micro_batch_size"] == 2
    assert (one.losses, one.speed, one.memory) == (None, None, None)


def test_every_run_is_in_a_pair_or_refused_with_a_reason(tmp_path):
    for seed, repeat in ((0, 0), (0, 1), (1, 0), (9, 0)):
        synthetic.write_run(tmp_path, strategy="ddp", seed=seed, repeat=repeat)
    synthetic.write_run(tmp_path, strategy="zero1")
    synthetic.write_run(tmp_path, strategy="zero2", global_batch_size=16)
    synthetic.write_run(tmp_path, strategy="zero3", seed=7)
    synthetic.write_run(tmp_path / "gpu", strategy="zero3", box="gpu")
    synthetic.write_run(tmp_path, strategy="zero1", seed=1, status="out_of_memory")
    synthetic.write_run(tmp_path, strategy="ddp", seed=3, study="s", outcome="crashed_after_result")
    synthetic.write_outcome(tmp_path, "skipped", strategy="zero2", seed=5)
    synthetic.change(synthetic.write_run(tmp_path, strategy="zero2", seed=9), initial_parameters={"sha256": "f" * 64})
    rows = table.read([tmp_path])
    made = pairs.pair(rows)
    assert len(made.compared) == 1
    reasons = {(one.strategy, one.seed, one.box): one.reason for one in made.refused.itertuples()}
    cpu, gpu = "Synthetic CPU, 8 cores", "8 x NVIDIA H200"
    assert reasons == {
        ("zero2", 5, cpu): "zero2: skipped",
        ("ddp", 0, cpu): "a further repeat of ddp: for the margin",
        ("ddp", 1, cpu): "no run of another strategy is like this one of ddp",
        ("ddp", 9, cpu): "no run of another strategy is like this one of ddp",
        ("zero2", 0, cpu): "global batch 16 against 8",
        ("zero2", 9, cpu): "other initial weights",
        ("zero3", 7, cpu): "no run of ddp with seed 7",
        ("zero3", 0, gpu): f"another box: {gpu} against {cpu}",
        ("zero1", 1, cpu): "zero1: out_of_memory",
        ("ddp", 3, cpu): "ddp: crashed",
    }
    paired = {*made.compared["run"], *made.compared["control_run"]}
    assert paired.isdisjoint(made.refused.index)
    assert paired | set(made.refused.index) == set(rows.index)


def test_without_a_control_that_is_ok_nothing_is_compared(tmp_path):
    synthetic.write_run(tmp_path, strategy="zero2")
    synthetic.write_run(tmp_path, strategy="ddp", status="failed")
    made = pairs.pair(table.read([tmp_path]))
    assert made.compared.empty
    assert set(made.refused["reason"]) == {"no run of ddp is ok", "ddp: failed"}


def test_scaling_is_against_single_or_the_fewest(tmp_path, tmp_path_factory):
    without = tmp_path_factory.mktemp("without")
    synthetic.write_run(tmp_path, strategy="single", world_size=1, seconds=1.0)
    for world_size, seconds in ((2, 0.6), (4, 0.4)):
        synthetic.write_run(tmp_path, strategy="ddp", world_size=world_size, seconds=seconds)
        synthetic.write_run(without, strategy="zero2", world_size=world_size, seconds=seconds)
    view = pairs.scaling(table.read([tmp_path])).set_index("world_size")
    assert view["scaling_efficiency"].to_dict() == pytest.approx({1: 1, 2: 1 / 2 / 0.6, 4: 1 / 4 / 0.4}, rel=0.05)
    assert set(view["base"]) == {"single on 1 process"}
    view = pairs.scaling(table.read([without])).set_index("world_size")
    assert view.loc[4, "scaling_efficiency"] == pytest.approx(0.6 * 2 / (0.4 * 4), rel=0.05)
    assert (view.loc[4, "base"], set(view["base_world_size"])) == ("zero2 on 2 processes", {2})


def test_no_efficiency_where_processes_share_cores(tmp_path):
    for strategy, world_size in (("single", 1), ("ddp", 2), ("ddp", 4)):
        synthetic.write_run(tmp_path, strategy=strategy, world_size=world_size, machine={"num_cores": 2})
    view = pairs.scaling(table.read([tmp_path])).set_index("world_size")
    assert view.loc[2, "scaling_efficiency"] > 0
    assert pd.isna(view.loc[4, "scaling_efficiency"])
    assert view.loc[4, "why"] == "4 processes on too few cores"
    assert view.loc[4, "tokens_per_second_per_gpu"] > 0  # the fact stays
