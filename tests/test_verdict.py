"""Is the verdict on a study that was fixed in advance what its numbers say? Studies made up, with known differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic

from study.compare import admitted, pilot, verdict, verdict_text
from study.compare.admitted import Runs, Trained, Wanted
from study.config import RunConfig
from study.errors import Refusal
from study.records import schema
from study.running import studies
from study.running.studies import Protocol

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 10
LOSS = {"metric": "loss", "step": 100, "margin": 0.01, "primary": True, "planned_sd": 0.003}
PROTOCOL = {
    "fixed_on": "2026-11-21",
    "pilot": "three seeds of ddp",
    "neighbours": ["nudged1", "nudged2", "nudged3"],
    "endpoints": [LOSS, {"metric": "accuracy", "step": 100, "margin": 0.01, "planned_sd": 0.004}],
    "target": {"loss": 0.55, "every": 50},
    "same_as": {"ddp": ["fsdp2"]},
    "once": "once",
    "exclusions": ["runs that did not end"],
    "weights_sha256": "a" * 64,
}


def protocol(**changes) -> Protocol:
    return Protocol.model_validate({**PROTOCOL, **changes})


def trained(strategy="ddp", seed=0, loss=0.5, world_size=2, label="", final="", accuracy=0.8) -> Trained:
    name = f"bert-imdb-tiny-{strategy}-{world_size}x-seed{seed}" + (f"-{label}" if label else "")
    held_out = {50: {"loss": 1.2 * loss, "accuracy": accuracy}, 100: {"loss": loss, "accuracy": accuracy}}
    start = f"start {seed}"
    return Trained(name, strategy, world_size, seed, label, held_out, loss, final or name, start, "2026-11-21", "c")


def made_up(taken, missing=()) -> Runs:
    return Runs(list(taken), {}, list(missing), len(taken) + len(missing))


def study(shift=0.0, spread=0.002, arm_spread=None, arm="zero3") -> Runs:
    """DDP, its neighbours, and an arm that is shifted: each `spread` of the loss away from DDP's own run."""
    draw = np.random.default_rng(1)
    taken = []
    for seed in range(SEEDS):
        level = 0.5 + 0.02 * draw.normal()
        taken.append(trained("ddp", seed, level))
        for label in PROTOCOL["neighbours"]:
            taken.append(trained("ddp", seed, level * (1 + spread * draw.normal()), label=label))
        wide = spread if arm_spread is None else arm_spread
        taken.append(trained(arm, seed, level * (1 + shift + wide * draw.normal())))
    return made_up(taken)


def on_loss(runs: Runs) -> verdict.Judged:
    return verdict.judge(runs, protocol(), "ddp")[0]


@pytest.mark.parametrize(
    ("shift", "spread", "expected"),
    [
        (0.0, 0.002, "same within the margin"),
        (0.03, 0.002, "higher"),
        (-0.03, 0.002, "lower"),
        (0.0, 0.05, "undecided"),
    ],
)
def test_equivalence(shift, spread, expected):
    assert on_loss(study(shift, spread)).equivalence == expected


def test_a_small_shift_is_within_the_margin_and_further_than_a_neighbour():
    """Neither test stands for the other."""
    found = on_loss(study(shift=0.004, spread=0.0005))
    assert found.equivalence == "same within the margin"
    assert found.further
    assert found.mean == pytest.approx(0.004, abs=0.001)
    assert found.distance > 5


def test_an_arm_that_only_scatters_more_is_further_than_a_neighbour():
    """Its mean is the control's: the distance of each run says it."""
    found = on_loss(study(spread=0.0005, arm_spread=0.004))
    assert found.further
    assert found.low < 0 < found.high


def test_an_arm_that_is_a_neighbour_is_called_further_as_seldom_as_it_says():
    """At most one in twenty, where DDP's own run is in the midst of them all, and where it is not."""
    draw = np.random.default_rng(2)
    for level in (0.0, 3.0):
        ps = np.array([verdict.exchange(level + draw.normal(size=(SEEDS, 4)))[1] for _ in range(300)])
        assert np.mean(ps < 0.05) < 0.08
    found = [on_loss(study_of(draw)).p_neighbour for _ in range(200)]
    assert np.mean(np.array(found) < 0.05) < 0.09


def study_of(draw) -> Runs:
    """As the reader of the guide has it: neighbours and the arm are perturbations of DDP's own run."""
    taken = []
    for seed in range(SEEDS):
        taken.append(trained("ddp", seed, 0.5))
        for label in PROTOCOL["neighbours"]:
            taken.append(trained("ddp", seed, 0.5 + 0.001 * draw.normal(), label=label))
        taken.append(trained("zero3", seed, 0.5 + 0.001 * draw.normal()))
    return made_up(taken)


@pytest.mark.parametrize(("shift", "scatter", "seen"), [(1, 1, 0.65), (2, 1, 1.0), (0, 2, 0.55)])
def test_what_ten_seeds_see(shift, scatter, seen):
    """The guide's figures: how often is an arm called further that is shifted, or scatters, in neighbours' spreads?"""
    draw = np.random.default_rng(5)
    columns = draw.normal(size=(200, SEEDS, 4)) * np.array([1, 1, 1, scatter]) + np.array([0, 0, 0, shift])
    assert np.mean([verdict.exchange(each)[1] < 0.05 for each in columns]) == pytest.approx(seen, abs=0.08)


def test_runs_that_are_all_equal_are_no_further():
    assert verdict.exchange(np.ones((SEEDS, 4))) == (1.0, 1.0)
    found, p = verdict.exchange(np.ones((SEEDS, 4)) + np.array([0, 0, 0, 1e-7]))
    assert found == float("inf")
    assert p < 0.01


def test_holm():
    """By hand: 0.01 x 3, 0.02 x 2, 0.04 x 1, never below one before it."""
    assert verdict.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert verdict.holm([0.6, 0.7]) == [1.0, 1.0]


def test_power_is_that_of_simulated_studies():
    """Of studies without a difference: in how many do both one-sided tests pass?"""
    draw = np.random.default_rng(3)
    for sd in (0.006, 0.012):
        passed = [
            verdict._equivalence(sd * draw.normal(size=SEEDS), 0.01, 0.05) == "same within the margin"
            for _ in range(500)
        ]
        assert np.mean(passed) == pytest.approx(verdict.power(sd, 0.01, SEEDS, 0.05), abs=0.08)
    assert verdict.power(0.0, 0.01, SEEDS, 0.05) == 1.0


def test_what_trains_the_same_is_shown_once():
    runs = study().taken
    same = made_up([*runs, trained("fsdp2", 0, label="once", final="bert-imdb-tiny-ddp-2x-seed0")])
    assert verdict.same_weights(same, protocol()) == {("ddp", "fsdp2"): True}
    assert verdict.same_weights(made_up([*runs, trained("fsdp2", 0, label="once")]), protocol()) == {
        ("ddp", "fsdp2"): False
    }
    assert verdict.same_weights(study(), protocol()) == {("ddp", "fsdp2"): None}
    assert verdict.arms_of_same(same, protocol()) == {"fsdp2": "ddp"}
    assert not verdict.arms_of_same(study(), protocol())
    assert {row.strategy for row in verdict.judge(same, protocol(), "ddp")} == {"zero3"}


def test_steps_to_the_target():
    assert verdict.reached(trained(loss=0.45), protocol()) == 50
    assert verdict.reached(trained(loss=0.5), protocol()) == 100
    assert verdict.reached(trained(loss=0.6), protocol()) is None


def test_what_is_not_whole_is_not_judged():
    alone = made_up([trained("ddp", seed) for seed in range(3)])
    with pytest.raises(Refusal, match="neighbours of ddp are here on 0 numbers of processes"):
        verdict.judge(alone, protocol(), "ddp")
    with pytest.raises(Refusal, match="1 planned runs have no outcome yet, x among them"):
        verdict.judge(study()._replace(missing=["x"]), protocol(), "ddp")
    few = [run for run in study().taken if run.strategy == "ddp" or run.seed == 0]
    with pytest.raises(Refusal, match="zero3 on 2 processes: 1 seeds have a control"):
        verdict.judge(made_up(few), protocol(), "ddp")


def decided(runs: Runs) -> verdict_text.Decided:
    facts = {"name": "mine", "question": "Same?", "parts": [{"strategies": ["ddp", "zero3"]}], "sha256": "f" * 64}
    return verdict_text.Decided(
        studies.Study.model_validate(facts), runs, verdict.judge(runs, protocol(), "ddp"), protocol()
    )


# ---------------------------------------------------------------- which runs are let in

WEIGHTS = {"weights": "b", "dropout": 0.0}
STEPS = 100


def write(folder, strategy="ddp", seed=0, label="", study="mine", **changes):
    """A run of the study as its runner leaves it; `changes` of its record, and of its outcome's digest."""
    digest = changes.pop("study_sha256", "f" * 64)
    flags = WEIGHTS | changes.pop("flags", {}) | ({"nudge_seed": int(label[-1])} if label.startswith("nudged") else {})
    run_dir = folder / "tmp"
    path = synthetic.write_run(
        run_dir, workload="bert-imdb", strategy=strategy, seed=seed, num_steps=STEPS, study=study, **flags
    ).parent
    name = name_of(strategy, seed, label)
    record = schema.read(path)
    start = schema.Checksum(absolute_sum=1, square_sum=1, sha256=f"{seed}{label}".ljust(64, "0"))
    facts = {
        "run_id": name, "weights_sha256": "a" * 64, "initial_parameters": start, "final_parameters": start,
        "evaluation": [{"step": step, "loss": 0.5, "accuracy": 0.8} for step in (50, 100)],
        "machine": record.machine | {"git_dirty": False, "git_commit": "c"},
    } | changes  # fmt: skip
    (path / "record.json").write_text(record.model_copy(update=facts).model_dump_json())
    outcome = schema.read_outcome(path / "outcome.json")
    outcome = outcome.model_copy(update={"run_id": name, "study_sha256": digest})
    (path / "outcome.json").write_text(outcome.model_dump_json())
    path.rename(folder / name)


def name_of(strategy, seed, label=""):
    return f"bert-imdb-tiny-{strategy}-2x-seed{seed}" + (f"-{label}" if label else "")


def wanted(seeds=(0, 1)):
    config = RunConfig(max_steps=STEPS, num_train_examples=256, **WEIGHTS)
    labels = [("zero3", ""), *(("ddp", label) for label in ("", *PROTOCOL["neighbours"]))]
    for seed in seeds:
        for strategy, label in labels:
            nudge = {"nudge_seed": int(label[-1])} if label else {}
            yield Wanted(name_of(strategy, seed, label), strategy, 2, config.model_copy(update={"seed": seed, **nudge}))


def all_of_it(folder, seeds=(0, 1), without=(), **changes):
    for run in wanted(seeds):
        if run.run_id not in without:
            label = run.run_id.rpartition("-")[2]
            write(folder, run.strategy, run.config.seed, label if label.startswith("nudged") else "", **changes)


def let_in(folder, **changes) -> Runs:
    return admitted.read([folder], wanted(), protocol(**changes), "mine", "f" * 64)


def test_what_was_planned_is_let_in(tmp_path):
    all_of_it(tmp_path)
    found = let_in(tmp_path)
    assert (len(found.taken), found.left_out, found.missing, found.num_planned) == (10, {}, [], 10)
    assert {run.label for run in found.taken} == {"", *PROTOCOL["neighbours"]}
    twice = admitted.read([tmp_path, tmp_path], wanted(), protocol(), "mine", "f" * 64)
    assert len(twice.taken) == 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"study_sha256": "e" * 64}, "begun under another text"),
        ({"study_sha256": None}, "begun under another text"),
        ({"weights_sha256": "b" * 64}, "from another body"),
        ({"flags": {"learning_rate": 0.9}}, "learning_rate was 0.9, the study says"),
        ({"evaluation": [{"step": 50, "loss": 0.5}]}, "no held-out loss at step 100"),
        ({"evaluation": [{"step": 100, "loss": None, "accuracy": 0.5}]}, "no held-out loss at step 100"),
        ({"machine": {"git_dirty": True}}, "its code was changed"),
        (
            {"machine": {"git_dirty": False, "libraries": {"torch": "1.0"}, "cpu": "A", "num_cores": 2}},
            "is another than",
        ),
        (
            {"machine": synthetic._machine("cpu") | {"git_commit": "c", "environment": {"MKL_CBWR": "AVX2"}}},
            "its arithmetic is another than",
        ),
        ({"initial_parameters": schema.Checksum(absolute_sum=1, square_sum=1, sha256="9" * 64)}, "initial weights"),
        ({"data": {"digest": "0" * 64}}, "its text is another than"),
        ({"continues": schema.Continued(run_id="x", strategy="ddp", world_size=2, step=1)}, "another run's checkpoint"),
    ],
)
def test_what_is_not_as_planned_is_left_out_with_the_reason(tmp_path, changes, said):
    name = name_of("zero3", 1)
    all_of_it(tmp_path, without=[name])
    write(tmp_path, "zero3", 1, **changes)
    found = let_in(tmp_path)
    assert list(found.left_out) == [name]
    assert said in found.left_out[name]
    assert len(found.taken) == 9


def test_a_body_of_each_machine_is_one_within_a_start(tmp_path):
    """Start 1 was made on a machine of its own; one of its runs has the body of the other."""
    name = name_of("zero3", 1)
    all_of_it(tmp_path, seeds=(0,))
    all_of_it(tmp_path, seeds=(1,), without=[name], weights_sha256="b" * 64)
    write(tmp_path, "zero3", 1, weights_sha256="a" * 64)
    found = let_in(tmp_path, weights_sha256=None)
    assert found.left_out == {name: "its body is another than that of most"}
    assert len(found.taken) == 9
    # Under a protocol that names a body the whole of start 1 but that run is another's.
    assert set(let_in(tmp_path).left_out) == {run.run_id for run in wanted((1,))} - {name}


def test_a_neighbour_that_starts_where_another_run_does_is_none(tmp_path):
    name = name_of("ddp", 1, "nudged2")
    all_of_it(tmp_path, without=[name])
    plain = schema.Checksum(absolute_sum=1, square_sum=1, sha256="1".ljust(64, "0"))
    write(tmp_path, "ddp", 1, "nudged2", initial_parameters=plain)
    assert "are no neighbours" in let_in(tmp_path).left_out[name]


def test_strays_and_runs_of_others_are_not_taken(tmp_path):
    all_of_it(tmp_path)
    write(tmp_path, "zero2", 0)
    write(tmp_path, "zero3", 7, study="another")
    found = let_in(tmp_path)
    assert found.left_out == {name_of("zero2", 0): "the study plans no such run"}
    assert len(found.taken) == 10


def test_a_pilot_says_how_far_runs_of_a_seed_are_apart(tmp_path):
    """By hand: losses 1, 1.02, 0.98, and a cut 0.01 above the mean; the other seed the same."""
    losses = {"": 1.0, "nudged1": 1.02, "nudged2": 0.98, "cut": 1.01}
    for seed in (0, 1):
        for label, loss in losses.items():
            looked = [{"step": 50, "loss": 9.0}, {"step": 100, "loss": loss}]
            write(tmp_path, "ddp", seed, label, evaluation=looked)
    planned = {name_of("ddp", seed, label) for seed in (0, 1) for label in losses}
    step, found = pilot.spreads([tmp_path], planned, set(losses), "mine")
    assert step == 100
    assert [(row.metric, row.what, row.seeds) for row in found] == [("loss", "a neighbour", 2), ("loss", "cut", 2)]
    assert [row.rms for row in found] == [pytest.approx(0.04), pytest.approx(0.01)]
    assert [row.largest for row in found] == [pytest.approx(0.04), pytest.approx(0.01)]
    assert found[0].power[0] == pytest.approx(verdict.power(0.04, 0.01, 10, 0.05))


# ---------------------------------------------------------------- the protocol


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fixed_on": "yesterday"}, "Invalid isoformat"),
        ({"endpoints": []}, "endpoints"),
        ({"weights_sha256": "no"}, "weights_sha256"),
        ({"marign": 1}, "marign"),
        ({"endpoints": [LOSS, LOSS]}, "2 are primary"),
        ({"endpoints": [LOSS | {"primary": False}]}, "0 are primary"),
        ({"neighbours": ["nudged1"]}, "neighbours"),
        ({"once": "nowhere"}, "no part has the label 'nowhere'"),
    ],
)
def test_a_protocol_is_read_strictly(tmp_path: Path, change, said):
    import yaml

    labelled = [{"strategies": ["ddp"], "label": f"nudged{n}", "flags": {"nudge_seed": n}} for n in (1, 2, 3)]
    parts = [{"strategies": ["ddp"]}, *labelled, {"strategies": ["fsdp2"], "label": "once"}]
    content = {"question": "?", "parts": parts, "protocol": {**PROTOCOL, **change}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(Refusal, match=said):
        studies.find(str(path))
