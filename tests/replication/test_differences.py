"""Test that only comparable runs are compared, and that verdicts on the control and on planted differences hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from study.compare import differences, pairs, table

NUM_STUDIES = 200

ALIKE = {
    "status": "ok", "device": "cuda", "workload": "bert-imdb", "size": "tiny", "precision": "bf16",
    "data_digest": "data", "init": "scratch", "sequence_length": 64.0, "gradient_clipping": 1.0,
    "config_digest": "settings", "libraries": "torch 2.13.0", "global_batch_size": 8, "num_steps": 40.0,
    "world_size": 2, "micro_batch_size": 4.0, "dropout": 0.0, "oversubscribed": False, "share_device": False,
    "threads_per_process": 1.0,
    "settings": None, "run_id": "", "message": "",
}  # fmt: skip


def studies(
    *, num_seeds: int, num_repeats: int, loss_noise: float, time_noise: float, shift: float = 0.0, slower: float = 0.0
) -> pd.DataFrame:
    """Many studies of ddp and zero2 with a planted difference; seeds differ in loss far more than repeats."""
    generator = np.random.default_rng(20261120)
    shape = (NUM_STUDIES, num_seeds, num_repeats)
    study, seed, repeat = np.indices(shape).reshape(3, -1)
    seconds = generator.lognormal(np.log(0.5), 0.3, (NUM_STUDIES, 1, 1))
    loss = generator.normal(2.0, 0.1, (NUM_STUDIES, num_seeds, 1))
    sides = []
    for strategy, more, longer in (("ddp", 0.0, 0.0), ("zero2", shift, slower)):
        losses = loss * (1 + more + generator.normal(0, loss_noise, shape))
        times = seconds * (1 + longer) * np.exp(generator.normal(0, time_noise, shape))
        facts = {"box": study.astype(str), "seed": seed, "repeat": repeat, "strategy": strategy,
                 "initial_sha256": seed.astype(str), "mean_final_loss": losses.ravel(),
                 "seconds_per_step": times.ravel(), **ALIKE}  # fmt: skip
        sides.append(pd.DataFrame(facts))
    return pd.concat(sides, ignore_index=True)


def verdicts(rows: pd.DataFrame) -> dict[str, dict[str, int]]:
    """How many studies came to which verdict, by metric."""
    compared = differences.compare(rows, metrics=["mean_final_loss", "seconds_per_step"])
    assert (compared.groupby("metric").size() == NUM_STUDIES).all()
    return {metric: result.value_counts().to_dict() for metric, result in compared.groupby("metric")["verdict"]}


def test_the_control_does_not_differ_from_itself():
    """Two halves of its repeats, two per seed each: rarely a difference, and nearly always a clear no."""
    result = verdicts(studies(num_seeds=5, num_repeats=2, loss_noise=5e-4, time_noise=4e-3))
    losses = result["mean_final_loss"]
    assert losses.get("higher", 0) + losses.get("lower", 0) <= 0.05 * NUM_STUDIES  # 5 when this was written
    assert losses["no difference"] >= 185  # 191
    assert set(result["seconds_per_step"]) == {"no difference", "inconclusive"}
    assert result["seconds_per_step"]["no difference"] >= 170  # 179
    drifting = verdicts(studies(num_seeds=5, num_repeats=4, loss_noise=1e-2, time_noise=3e-2))
    assert drifting["seconds_per_step"] == {"inconclusive": NUM_STUDIES}


def test_the_spread_of_repeats_does_not_hide_a_difference_of_losses():
    """The planted difference is smaller than the margin, and was called no difference."""
    losses = verdicts(studies(num_seeds=5, num_repeats=2, loss_noise=5e-4, time_noise=4e-3, shift=1e-3))
    assert losses["mean_final_loss"]["higher"] >= 170  # 179 when this was written


@pytest.mark.parametrize("sign", [1, -1])
def test_planted_differences_are_found(sign):
    """With the noise of a quiet box a slow-down of 3 % and losses 0.5 % higher; in more noise never the other way."""
    result = verdicts(studies(num_seeds=3, num_repeats=3, loss_noise=5e-4, time_noise=4e-3, shift=sign * 0.005,
                             slower=sign * 0.03))  # fmt: skip
    noisy = verdicts(studies(num_seeds=3, num_repeats=2, loss_noise=6e-3, time_noise=2e-2, shift=sign * 0.02,
                             slower=sign * 0.03))  # fmt: skip
    expected = "higher" if sign > 0 else "lower"
    for metric in result:
        assert set(result[metric]) <= {expected, "inconclusive"}
        assert result[metric][expected] >= 195
        assert set(noisy[metric]) == {expected, "inconclusive"}


def runs(**columns: Any) -> pd.DataFrame:
    """Rows by hand; a list per column."""
    rows = pd.DataFrame(columns)
    message = {"box": "box", "initial_sha256": rows["seed"].astype(str), "repeat": 0, **ALIKE}
    return rows.assign(**{name: value for name, value in message.items() if name not in rows})


def one(rows: pd.DataFrame, metric: str, **options: Any) -> pd.Series:
    compared = differences.compare(rows, metrics=[metric], **options)
    assert len(compared) == 1
    return compared.iloc[0]


def halves(mine: list[float], theirs: list[float], metric: str, seeds: bool = True, **facts: Any) -> pd.DataFrame:
    """The values of zero2 and of ddp, by seed, or repeats of one seed."""
    number = [*range(len(mine)), *range(len(theirs))]
    zero = [0] * len(number)
    which = {"seed": number, "repeat": zero} if seeds else {"seed": zero, "repeat": number}
    strategies = ["zero2"] * len(mine) + ["ddp"] * len(theirs)
    return runs(strategy=strategies, **which, **{metric: [*mine, *theirs]}, **facts)


def test_seeds_are_compared_in_pairs():
    mine, theirs = np.array([2.1, 2.5, 2.4, 3.0]), np.array([2.0, 2.3, 2.4, 2.8])
    result = one(halves(mine, theirs, "mean_final_loss"), "mean_final_loss")
    low, high = stats.ttest_rel(mine, theirs).confidence_interval(0.95)
    assert result[["low", "high"]].tolist() == pytest.approx([low, high])
    assert result["difference"] == pytest.approx((mine - theirs).mean())
    assert result[["relative_low", "relative_high"]].tolist() == pytest.approx([low / 2.375, high / 2.375])
    assert result["relative_difference"] == pytest.approx(mine.mean() / theirs.mean() - 1)
    assert (result["n_pairs"], result["n_repeats"], result["interval"]) == (4, 1, "4 seeds, t")


def test_times_are_compared_as_ratios():
    theirs = np.array([0.5, 0.9, 2.0])
    mine = theirs * np.array([1.10, 1.12, 1.11])
    result = one(halves(mine, theirs, "seconds_per_step"), "seconds_per_step")
    bounds = np.expm1(stats.ttest_rel(np.log(mine), np.log(theirs)).confidence_interval(0.95))
    assert result["relative_difference"] == pytest.approx(0.11, abs=1e-4)
    assert result[["relative_low", "relative_high"]].tolist() == pytest.approx(bounds)
    assert result["value"] / result["control_value"] - 1 == pytest.approx(result["relative_difference"])
    assert result[["low", "high"]].tolist() == pytest.approx(bounds * result["control_value"])
    assert (result["verdict"], result["interval"]) == ("higher", "3 pairs of launches, t")


def test_launches_that_share_a_control_count_once():
    rows = runs(strategy=["ddp", "ddp", "zero2", "zero2", "zero2"], seed=[0, 1, 0, 0, 1], repeat=[0, 0, 0, 1, 0],
                seconds_per_step=[1.0, 1.0, 1.2, 1.2, 1.25])  # fmt: skip
    result = one(rows, "seconds_per_step")
    assert (result["n_pairs"], result["n_repeats"]) == (2, 2)
    assert result["relative_difference"] == pytest.approx((1.2 * 1.25) ** 0.5 - 1)


def test_times_of_one_seed_are_compared_by_welch():
    mine, theirs = [2.0, 2.01, 1.99, 2.02], [2.1, 2.11, 2.10]
    result = one(halves(mine, theirs, "seconds_per_step", seeds=False), "seconds_per_step")
    low, high = np.expm1(stats.ttest_ind(np.log(mine), np.log(theirs), equal_var=False).confidence_interval(0.95))
    assert result[["relative_low", "relative_high"]].tolist() == pytest.approx([low, high])
    assert (result["verdict"], result["n_pairs"]) == ("lower", 3)
    assert result["interval"] == "one seed, 4 against 3 repeats, Welch"


@pytest.mark.parametrize(
    ("metric", "mine", "theirs", "why"),
    [
        # However often it was repeated: other seeds may come out otherwise.
        (
            "mean_final_loss",
            [2.0, 2.01, 1.99, 2.02],
            [2.1, 2.11, 2.10],
            "there is no interval, because there is only one seed",
        ),
        (
            "seconds_per_step",
            [2.0],
            [3.0],
            "there is no interval, because there is one seed without repeats of both strategies",
        ),
        (
            "seconds_per_step",
            [2.0, 2.0],
            [3.0, 3.0],
            "one seed, 2 against 2 repeats; there is no interval, because repeats are equal",
        ),
    ],
)
def test_without_an_interval_nothing_is_concluded(metric, mine, theirs, why):
    result = one(halves(mine, theirs, metric, seeds=False), metric)
    assert result[["low", "high", "relative_low", "relative_high"]].isna().all()
    assert result["relative_difference"] == pytest.approx(np.mean(mine) / np.mean(theirs) - 1)
    assert (result["verdict"], result["why"]) == ("inconclusive", why)


def test_many_seeds_are_bootstrapped_and_the_same_each_time():
    generator = np.random.default_rng(0)
    theirs = generator.normal(2, 0.1, 24)
    rows = halves(theirs + generator.normal(0.05, 0.02, 24), theirs, "mean_final_loss")
    result = one(rows, "mean_final_loss")
    assert (result["interval"], result["verdict"]) == ("24 seeds, bootstrap (BCa)", "higher")
    assert result["low"] < 0.05 < result["high"]
    assert result["low"] == one(rows, "mean_final_loss")["low"]


@pytest.mark.parametrize("metric", ["mean_final_loss", "seconds_per_step"])
def test_margin_is_the_repeatability_limit_pooled(metric):
    """As ISO 5725-6 has it; of times that of their logarithms."""
    values = [[2.00, 2.02, 2.01], [3.00, 3.03]]
    rows = runs(
        strategy=["ddp"] * 5, seed=[0, 0, 0, 1, 1], repeat=[0, 1, 2, 0, 1], **{metric: [*values[0], *values[1]]}
    )
    is_loss = metric == "mean_final_loss"
    deviations = [np.array(v) / np.mean(v) - 1 if is_loss else np.log(v) - np.mean(np.log(v)) for v in values]
    limit = stats.t.ppf(0.975, 3) * (2 * (np.concatenate(deviations) ** 2).sum() / 3) ** 0.5
    (margin,) = differences.margins(rows, metric).values()
    assert margin.relative == pytest.approx(limit if is_loss else np.expm1(limit))
    assert margin.num_runs == 5


def test_identical_repeats_give_the_floor():
    """Losses on a CPU: then what the order of sums makes is allowed, and no more."""
    rows = halves([2.000004, 2.2, 2.1], [2.0, 2.2, 2.1], "mean_final_loss")
    repeats = rows[rows["strategy"] == "ddp"].assign(repeat=1)
    result = one(pd.concat([rows, repeats], ignore_index=True), "mean_final_loss")
    assert (result["relative_margin"], result["verdict"]) == (differences.FLOOR["learned"], "no difference")
    assert result["why"] == "within 0.001 %, the margin from 6 repeats of ddp"
    further = rows["mean_final_loss"] * np.where(rows["strategy"] == "zero2", 1 + 1e-4, 1)
    rows = pd.concat([rows.assign(mean_final_loss=further), repeats], ignore_index=True)
    assert one(rows, "mean_final_loss")["verdict"] == "higher"


def test_the_control_on_other_processes_is_a_repeat_of_what_is_learned():
    """Only the order of sums differs; not so with dropout, and never of times."""
    rows = runs(strategy=["ddp"] * 4, seed=[0, 0, 1, 1], world_size=[2, 4, 2, 4], mean_final_loss=[2.0, 2.02, 3.0, 3.0],
                seconds_per_step=[1.0, 0.6, 1.0, 0.6])  # fmt: skip
    (margin,) = differences.margins(rows, "mean_final_loss").values()
    assert margin.relative > 0.01
    assert differences.margins(rows.assign(dropout=0.1), "mean_final_loss") == {}
    assert differences.margins(rows, "seconds_per_step") == {}


def test_without_repeats_the_interval_decides():
    result = one(halves([2.0, 2.5, 3.1], [2.1, 2.4, 3.0], "mean_final_loss"), "mean_final_loss")
    assert (result["verdict"], result["why"].partition(";")[0]) == ("inconclusive", "the interval contains 0")
    assert pd.isna(result["margin"])
    result = one(halves([2.2, 2.51, 3.1], [2.1, 2.4, 3.0], "mean_final_loss"), "mean_final_loss")
    assert (result["verdict"], result["why"]) == ("higher", "the interval does not contain 0 (3 seeds, t)")
    result = one(halves([2.00002, 2.50002, 3.00002], [2.0, 2.5, 3.0], "mean_final_loss"), "mean_final_loss")
    assert result["relative_low"] > 0  # however sure, it is rounding
    assert result["verdict"] == "no difference"


def test_a_margin_that_is_too_wide_does_not_make_runs_equal():
    rows = halves([1.01, 1.0, 0.99] * 3, [1.06, 0.97, 0.97] * 3, "seconds_per_step", seeds=False)
    result = one(rows, "seconds_per_step")
    assert result["relative_margin"] > differences.CEILING["times"]
    assert (result["verdict"], "a margin above 2 %" in result["why"]) == ("inconclusive", True)


@pytest.mark.parametrize(
    ("mine", "theirs", "verdict"),
    [
        ([100, 100], [100, 100], "no difference"),
        ([101, 101], [100, 100], "higher"),
        ([90, 99], [100, 100], "lower"),
        ([90, 101], [100, 100], "inconclusive"),
        ([100, 100], [0, 0], "higher"),  # a process alone sends none
    ],
)
def test_bytes_are_compared_exactly(mine, theirs, verdict):
    result = one(halves(mine, theirs, "model_state_bytes"), "model_state_bytes")
    assert (result["verdict"], result["margin"]) == (verdict, 0)
    assert result["difference"] == np.median(mine) - theirs[0]
    assert pd.isna(result["relative_difference"]) == (not theirs[0])
    assert pd.isna(result["low"])


@pytest.mark.parametrize("oversubscribed", [True, [False, True, False, False]])
def test_times_of_crowded_processes_are_not_compared(oversubscribed):
    """One launch among others limits them all."""
    rows = halves([1.2, 1.3], [1.0, 1.0], "seconds_per_step", oversubscribed=oversubscribed)
    result = one(rows, "seconds_per_step")
    assert (result["verdict"], result["why"]) == ("inconclusive", "not comparable: 2 processes on fewer GPUs")
    assert pd.isna(result["relative_difference"])
    assert result["value"] > 1  # the fact stays


def test_beside_a_control_on_other_processes_only_losses_are_compared():
    """Twice the processes are no merit of the strategy; `single` has no more than one."""
    values = {"mean_final_loss": [2.0, 2.1], "seconds_per_step": [0.5, 1.0], "model_state_bytes": [8.0, 16.0]}
    for name, value in values.items():
        rows = runs(strategy=["zero2", "ddp"], seed=[0, 0], world_size=[4, 2], **{name: value})
        result = one(rows, name)
        assert pd.notna(result["relative_difference"]) == (name == "mean_final_loss")
        assert (result["why"] == "not comparable: processes 4 against 2") == (name != "mean_final_loss")
    alone = runs(strategy=["single", "ddp"], seed=[0, 0], world_size=[1, 2], model_state_bytes=[16.0, 16.0])
    assert one(alone, "model_state_bytes")["verdict"] == "no difference"
    cut = alone.assign(world_size=2, micro_batch_size=[4.0, 2.0], peak_allocated_bytes=[5.0, 3.0])
    assert one(cut, "peak_allocated_bytes")["why"] == "not comparable: micro batch 4 against 2"
    assert one(cut, "model_state_bytes")["verdict"] == "no difference"


def test_with_other_dropout_masks_repeats_are_no_margin():
    rows = runs(strategy=["single", "single", "ddp", "ddp", "ddp"], seed=[0, 1, 0, 1, 0], repeat=[0, 0, 0, 0, 1],
                world_size=[1, 1, 2, 2, 2], dropout=0.1, mean_final_loss=[2.0, 2.11, 2.01, 2.1, 2.01])  # fmt: skip
    result = one(rows, "mean_final_loss")
    assert result["verdict"] == "inconclusive"
    assert "the interval contains 0" in result["why"]
    assert "1 and 2 processes draw different masks" in result["why"]
    assert pd.isna(result["margin"])


def test_a_metric_that_one_side_lacks():
    result = one(halves([0.4, 0.41], [float("nan")] * 2, "mfu"), "mfu")
    assert (result["verdict"], result["why"]) == ("inconclusive", "not measured on both sides")
    assert (result["value"], result["n_pairs"]) == (pytest.approx(0.405, abs=1e-3), 0)
    assert differences.compare(halves([2.0], [2.0], "mean_final_loss", mfu=float("nan")), metrics=["mfu"]).empty


def test_equal_losses_are_equal_however_far_the_control_is_from_itself():
    """On other processes the control leaves a plateau at other steps; what is bit-identical to it does not differ."""
    rows = halves([2.0, 2.5, 3.1], [2.0, 2.5, 3.1], "mean_final_loss")
    controls = rows[rows["strategy"] == "ddp"]
    apart = controls.assign(world_size=4, micro_batch_size=2.0, mean_final_loss=[2.4, 2.2, 3.0])
    result = one(pd.concat([rows, apart], ignore_index=True), "mean_final_loss")
    assert result["relative_margin"] > differences.CEILING["learned"]
    assert (result["verdict"], result["n_pairs"]) == ("no difference", 3)
    assert result["why"].startswith("the interval is within 1 %, although 6 repeats of ddp differ by ")


# ---------------------------------------------------------------- what is compared, and why the rest is not


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
        ({"box": "8 x NVIDIA H200"}, "different machines: Synthetic CPU, 8 cores and 8 x NVIDIA H200"),
        ({"device": "cuda"}, "cpu and cuda"),
        ({"workload": "bert-imdb"}, "gpt-wikitext and bert-imdb"),
        ({"size": "mini"}, "sizes tiny and mini"),
        ({"precision": "bf16"}, "precisions fp32 and bf16"),
        ({"data_digest": "f" * 64}, "different data"),
        ({"init": "pretrained"}, "init scratch and pretrained"),
        ({"sequence_length": 128.0}, "sequence lengths 64 and 128"),
        ({"gradient_clipping": 0.0}, "clipping at 1 and 0"),
        ({"config_digest": "f" * 64, "settings": {"learning_rate": 0.1}}, "learning_rate 5e-05 against 0.1"),
        ({"libraries": LIBRARIES.format("2.12.0")}, "torch 2.13.0 against torch 2.12.0"),
        ({"global_batch_size": 16}, "global batches of 8 and 16"),
        ({"num_steps": 30.0}, "40 and 30 steps"),
        ({"initial_sha256": "f" * 64}, "different initial weights"),
        ({"status": "killed"}, "zero2: killed"),
        (
            {"mixed_code": "parts of it were trained by different code"},
            "zero2: parts of it were trained by different code",
        ),
        ({"is_unproven": True}, "zero2: its proof does not say what was sharded. Run it again"),
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
MASKS = "dropout is on, and runs with {} draw different masks"
MICRO = "micro batch 4 against 2"
DAY = "2026-01-01T{:02}:00:00"


@pytest.mark.parametrize(
    ("facts", "other", "limits"),
    [
        ({}, {}, {}),
        ({}, HALVES, {}),
        ({}, ALONE, {}),
        ({}, {"strategy": "ddp"} | HALVES, dict.fromkeys(("speed", "memory", "states"), "processes 2 against 4")),
        ({"dropout": 0.1}, HALVES, {"losses": MASKS.format("2 and 4 processes")}),
        ({"dropout": 0.1}, {"micro_batch_size": 2.0},
         {"losses": MASKS.format("micro batches of 4 and 2"), "speed": MICRO, "memory": MICRO}),
        ({}, {"oversubscribed": True, "world_size": 16}, {"speed": "16 processes on too few cores"}),
        ({"device": "cuda", "oversubscribed": True}, {}, {"speed": "2 processes on fewer GPUs"}),
        ({"device": "cuda", "oversubscribed": True, "share_device": True}, ALONE | {"oversubscribed": False},
         {"speed": "2 processes on one device"}),
        ({}, {"threads_per_process": 4.0}, {"speed": "threads per process 1 against 4"}),
        ({"device": "cuda"}, {"threads_per_process": 4.0}, {}),
        ({"started_at": DAY.format(0)}, {"started_at": DAY.format(11)}, {}),
        ({"started_at": DAY.format(0)}, {"started_at": DAY.format(20)}, {"speed": "started 20 hours apart"}),
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
    created = pairs.pair(rows)
    names = ["strategy", "world_size", "seed", "repeat"]
    assert {
        (*rows.loc[one.run, names], *rows.loc[one.control_run, names]) for one in created.compared.itertuples()
    } == {
        ("zero2", 2, 0, 0, "ddp", 2, 0, 0),
        ("zero2", 2, 0, 1, "ddp", 2, 0, 1),
        ("zero2", 2, 0, 2, "ddp", 2, 0, 0),  # the control has no third
        ("zero2", 2, 1, 0, "ddp", 2, 1, 0),
        ("zero2", 4, 0, 0, "ddp", 4, 0, 0),
        ("zero2", 4, 1, 0, "ddp", 4, 1, 0),
        ("single", 1, 0, 0, "ddp", 2, 0, 0),  # the fewest that the control has
        ("single", 1, 1, 0, "ddp", 2, 1, 0),
    }
    assert created.refused.empty


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
    created = pairs.pair(rows)
    assert len(created.compared) == 1
    reasons = {(one.strategy, one.seed, one.box): one.reason for one in created.refused.itertuples()}
    cpu, gpu = "Synthetic CPU, 8 cores", "8 x NVIDIA H200"
    assert reasons == {
        ("zero2", 5, cpu): "zero2: skipped",
        ("ddp", 0, cpu): "a further repeat of ddp, which is used for the margin",
        ("ddp", 1, cpu): "no other strategy was run with the same options as this run of ddp",
        ("ddp", 9, cpu): "no other strategy was run with the same options as this run of ddp",
        ("zero2", 0, cpu): "global batches of 16 and 8",
        ("zero2", 9, cpu): "different initial weights",
        ("zero3", 7, cpu): "there is no run of ddp with seed 7",
        ("zero3", 0, gpu): f"different machines: {gpu} and {cpu}",
        ("zero1", 1, cpu): "zero1: out_of_memory",
        ("ddp", 3, cpu): "ddp: crashed",
    }
    paired = {*created.compared["run"], *created.compared["control_run"]}
    assert paired.isdisjoint(created.refused.index)
    assert paired | set(created.refused.index) == set(rows.index)


def test_without_a_control_that_is_ok_nothing_is_compared(tmp_path):
    synthetic.write_run(tmp_path, strategy="zero2")
    synthetic.write_run(tmp_path, strategy="ddp", status="failed")
    created = pairs.pair(table.read([tmp_path]))
    assert created.compared.empty
    assert set(created.refused["reason"]) == {"there is no finished run of ddp", "ddp: failed"}


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
