"""Is the verdict on a study that was fixed in advance what its numbers say? Studies made up, with known differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic

from study import cli, files
from study.compare import admitted, pilot, verdict, verdict_text
from study.compare.admitted import Runs, Trained, Wanted
from study.config import RunConfig
from study.errors import Refusal
from study.running import studies
from study.running.studies import Protocol

SEEDS = 10
LOSS = {"metric": "loss", "step": 100, "margin": 0.01, "primary": True, "planned_sd": 0.003}
PROTOCOL = {
    "fixed_on": "2026-11-21", "pilot": "three seeds of ddp", "neighbours": ["nudged1", "nudged2", "nudged3"],
    "endpoints": [LOSS, {"metric": "accuracy", "step": 100, "margin": 0.01, "planned_sd": 0.004}],
    "target": {"loss": 0.55, "every": 50}, "same_as": {"ddp": ["fsdp2"]}, "once": "once",
    "exclusions": ["runs that did not end"], "weights_sha256": "a" * 64,
}  # fmt: skip


def protocol(**changes) -> Protocol:
    return Protocol.model_validate({**PROTOCOL, **changes})


def trained(strategy="ddp", seed=0, loss=0.5, world_size=2, label="", final="", accuracy=0.8) -> Trained:
    name = name_of(strategy, seed, label, world_size)
    held_out = {50: {"loss": 1.2 * loss, "accuracy": accuracy}, 100: {"loss": loss, "accuracy": accuracy}}
    start = f"start {seed}"
    return Trained(name, strategy, world_size, seed, label, held_out, loss, final or name, start, "2026-11-21", "c")


def name_of(strategy, seed, label="", world_size=2) -> str:
    return f"bert-imdb-tiny-{strategy}-{world_size}x-seed{seed}" + (f"-{label}" if label else "")


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
    [(0, 0.002, "same within the margin"), (0.03, 0.002, "higher"), (-0.03, 0.002, "lower"), (0, 0.05, "undecided")],
)
def test_equivalence(shift, spread, expected):
    assert on_loss(study(shift, spread)).equivalence == expected


def test_an_arm_is_further_than_a_neighbour_by_a_small_shift_or_by_more_scatter():
    """Neither test stands for the other."""
    found = on_loss(study(shift=0.004, spread=0.0005))
    assert (found.equivalence, found.further) == ("same within the margin", True)
    assert found.mean == pytest.approx(0.004, abs=0.001)
    assert found.distance > 5
    found = on_loss(study(spread=0.0005, arm_spread=0.004))
    assert found.further
    assert found.low < 0 < found.high


def test_an_arm_that_is_a_neighbour_is_called_further_as_seldom_as_it_says():
    """At most one in twenty, where DDP's own run is in the midst of them all, and where it is not."""
    draw = np.random.default_rng(2)
    for level in (0.0, 3.0):
        ps = np.array([verdict.exchange(level + draw.normal(size=(SEEDS, 4)))[1] for _ in range(300)])
        assert np.mean(ps < 0.05) < 0.08
    found = []
    for _ in range(200):
        taken = [trained("ddp", seed, 0.5) for seed in range(SEEDS)]
        for label in (*PROTOCOL["neighbours"], ""):  # all perturbations of DDP's own run, the arm too
            strategy = "ddp" if label else "zero3"
            losses = 0.5 + 0.001 * draw.normal(size=SEEDS)
            taken += [trained(strategy, seed, float(loss), label=label) for seed, loss in enumerate(losses)]
        found.append(on_loss(made_up(taken)).p_neighbour)
    assert np.mean(np.array(found) < 0.05) < 0.09


@pytest.mark.parametrize(("shift", "scatter", "seen"), [(1, 1, 0.65), (2, 1, 1.0), (0, 2, 0.55)])
def test_what_ten_seeds_see(shift, scatter, seen):
    """The guide's figures: how often is an arm called further that is shifted, or scatters, in neighbours' spreads?"""
    draw = np.random.default_rng(5)
    columns = draw.normal(size=(200, SEEDS, 4)) * np.array([1, 1, 1, scatter]) + np.array([0, 0, 0, shift])
    assert np.mean([verdict.exchange(each)[1] < 0.05 for each in columns]) == pytest.approx(seen, abs=0.08)


def test_runs_that_are_all_equal_are_no_further():
    assert verdict.exchange(np.ones((SEEDS, 4))) == (1.0, 1.0)
    found, p = verdict.exchange(np.ones((SEEDS, 4)) + np.array([0, 0, 0, 1e-7]))
    assert (found, p < 0.01) == (float("inf"), True)


def test_holm():
    """By hand: 0.01 x 3, 0.02 x 2, 0.04 x 1, never below one before it."""
    assert verdict.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert verdict.holm([0.6, 0.7]) == [1.0, 1.0]


def test_power_is_that_of_simulated_studies():
    """Of studies without a difference: in how many do both one-sided tests pass?"""
    draw = np.random.default_rng(3)
    for sd in (0.006, 0.012):
        found = [verdict._equivalence(sd * draw.normal(size=SEEDS), 0.01, 0.05) for _ in range(500)]
        passed = np.mean([each == "same within the margin" for each in found])
        assert passed == pytest.approx(verdict.power(sd, 0.01, SEEDS, 0.05), abs=0.08)
    assert verdict.power(0.0, 0.01, SEEDS, 0.05) == 1.0


def test_more_processes_of_the_control_are_an_arm():
    four = [trained("ddp", seed, 0.5, world_size=4) for seed in range(SEEDS)]
    judged = verdict.judge(made_up([*study().taken, *four]), protocol(), "ddp")
    assert [(row.strategy, row.world_size) for row in judged[:2]] == [("zero3", 2), ("ddp", 4)]


def test_what_trains_the_same_is_shown_once():
    runs = study().taken
    same = made_up([*runs, trained("fsdp2", 0, label="once", final="bert-imdb-tiny-ddp-2x-seed0")])
    other = made_up([*runs, trained("fsdp2", 0, label="once")])
    for each, shown in ((same, True), (other, False), (study(), None)):
        assert verdict.same_weights(each, protocol()) == {("ddp", "fsdp2"): shown}
        assert verdict.arms_of_same(each, protocol()) == ({"fsdp2": "ddp"} if shown else {})
    assert {row.strategy for row in verdict.judge(same, protocol(), "ddp")} == {"zero3"}


def test_steps_to_the_target():
    assert [verdict.reached(trained(loss=loss), protocol()) for loss in (0.45, 0.5, 0.6)] == [50, 100, None]


def test_what_is_not_whole_is_not_judged():
    few = made_up([run for run in study().taken if run.strategy == "ddp" or not run.seed])
    for runs, match in (
        (made_up([trained("ddp", seed) for seed in range(3)]), "neighbours of ddp are here on 0 numbers of processes"),
        (study()._replace(missing=["x"]), "1 planned runs have no outcome yet, x among them"),
        (few, "zero3 on 2 processes: 1 seeds have a control"),
    ):
        with pytest.raises(Refusal, match=match):
            verdict.judge(runs, protocol(), "ddp")


def test_a_seed_without_a_neighbour_is_left_out_of_its_ensemble():
    taken = [run for run in study().taken if (run.seed, run.label) != (3, "nudged2")]
    assert on_loss(made_up(taken)).seeds == tuple(seed for seed in range(SEEDS) if seed != 3)


def decided(runs: Runs) -> verdict_text.Decided:
    facts = {"name": "mine", "question": "Same?", "parts": [{"strategies": ["ddp", "zero3"]}], "sha256": "f" * 64}
    return verdict_text.Decided(
        studies.Study.model_validate(facts), runs, verdict.judge(runs, protocol(), "ddp"), protocol()
    )


def test_the_answer_says_what_was_found():
    said = verdict_text.answer(decided(study()))
    assert "1 of 1 arms" in said
    assert "below 1 %" in said
    assert "Of none was it shown that its runs are further" in said
    said = verdict_text.answer(decided(study(shift=0.03)))
    assert "0 of 1 arms" in said
    assert "`zero3` on 2 processes higher" in said
    assert "`zero3` on 2 processes is further" in said
    assert "one start of" not in verdict_text.answer(decided(study(spread=0.0, arm_spread=0.0)))  # nothing moved


def test_without_a_protocol_there_is_no_verdict(tmp_path):
    synthetic.write_run(tmp_path, study="smoke")
    with pytest.raises(Refusal, match=r"nothing was fixed before its runs.* nor is it a pilot"):
        cli.run(["compare", "--verdict", "smoke", str(tmp_path)])


WEIGHTS = {"weights": "b", "dropout": 0.0}
STEPS = 100


def write(folder, strategy="ddp", seed=0, label="", study="mine", **changes):
    """A run of the study as its runner leaves it; `changes` of its record, and of its outcome's digest."""
    digest = changes.pop("study_sha256", "f" * 64)
    flags = WEIGHTS | changes.pop("flags", {}) | ({"nudge_seed": int(label[-1])} if label.startswith("nudged") else {})
    path = synthetic.write_run(
        folder / "tmp", workload="bert-imdb", strategy=strategy, seed=seed, num_steps=STEPS, study=study, **flags
    )
    name = name_of(strategy, seed, label)
    start = {"absolute_sum": 1, "square_sum": 1, "sha256": f"{seed}{label}".ljust(64, "0")}
    facts = {
        "run_id": name, "weights_sha256": "a" * 64, "initial_parameters": start, "final_parameters": start,
        "evaluation": [{"step": step, "loss": 0.5, "accuracy": 0.8} for step in (50, 100)],
        "machine": {"git_dirty": False, "git_commit": "c"},
    }  # fmt: skip
    synthetic.change(path, **facts | changes)
    synthetic.change(path.with_name("outcome.json"), run_id=name, study_sha256=digest)
    path.parent.rename(folder / name)


def wanted(seeds=(0, 1)):
    config = RunConfig(max_steps=STEPS, num_train_examples=256, **WEIGHTS)
    labels = [("zero3", ""), *(("ddp", label) for label in ("", *PROTOCOL["neighbours"]))]
    for seed in seeds:
        for strategy, label in labels:
            nudge = {"nudge_seed": int(label[-1])} if label else {}
            yield Wanted(name_of(strategy, seed, label), strategy, 2, config.model_copy(update={"seed": seed, **nudge}))


def all_of_it(folder, seeds=(0, 1), without="", **changes):
    """Every run that the study plans, but one."""
    for run in wanted(seeds):
        if run.run_id != without:
            label = run.run_id.rpartition("-")[2]
            write(folder, run.strategy, run.config.seed, label if label.startswith("nudged") else "", **changes)


def let_in(folder, **changes) -> Runs:
    return admitted.read([folder], wanted(), protocol(**changes), "mine", "f" * 64)


def test_what_was_planned_is_let_in(tmp_path):
    all_of_it(tmp_path)
    for folders in ([tmp_path], [tmp_path, tmp_path]):
        found = admitted.read(folders, wanted(), protocol(), "mine", "f" * 64)
        assert (len(found.taken), found.left_out, found.missing, found.num_planned) == (10, {}, [], 10)
        assert {run.label for run in found.taken} == {"", *PROTOCOL["neighbours"]}


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
        ({"machine": {"git_dirty": False, "libraries": {"torch": "1.0"}}}, "its libraries is another than"),
        ({"machine": {"git_dirty": False, "num_cores": 2}}, "its box is another than"),
        ({"machine": {"git_dirty": False, "environment": {"MKL_CBWR": "AVX2"}}}, "its arithmetic is another than"),
        ({"initial_parameters": {"sha256": "9" * 64}}, "initial weights"),
        ({"data": {"digest": "0" * 64}}, "its text is another than"),
        ({"continues": {"run_id": "x", "strategy": "ddp", "world_size": 2, "step": 1}}, "another run's checkpoint"),
    ],
)
def test_what_is_not_as_planned_is_left_out_with_the_reason(tmp_path, changes, said):
    name = name_of("zero3", 1)
    all_of_it(tmp_path, without=name)
    write(tmp_path, "zero3", 1, **changes)
    found = let_in(tmp_path)
    assert list(found.left_out) == [name]
    assert said in found.left_out[name]
    assert len(found.taken) == 9


def test_a_body_of_each_machine_is_one_within_a_start(tmp_path):
    """Start 1 was made on a machine of its own; one of its runs has the body of the other."""
    name = name_of("zero3", 1)
    all_of_it(tmp_path, seeds=(0,))
    all_of_it(tmp_path, seeds=(1,), without=name, weights_sha256="b" * 64)
    write(tmp_path, "zero3", 1, weights_sha256="a" * 64)
    found = let_in(tmp_path, weights_sha256=None)
    assert found.left_out == {name: "its body is another than that of most"}
    assert len(found.taken) == 9
    # Under a protocol that names a body the whole of start 1 but that run is another's.
    assert set(let_in(tmp_path).left_out) == {run.run_id for run in wanted((1,))} - {name}


def test_a_neighbour_that_starts_where_another_run_does_is_none(tmp_path):
    name = name_of("ddp", 1, "nudged2")
    all_of_it(tmp_path, without=name)
    assert let_in(tmp_path).missing == [name]
    write(tmp_path, "ddp", 1, "nudged2", initial_parameters={"sha256": "1".ljust(64, "0")})
    assert "are no neighbours" in let_in(tmp_path).left_out[name]


def test_strays_and_runs_of_others_are_not_taken(tmp_path):
    all_of_it(tmp_path)
    write(tmp_path, "zero2", 0)
    write(tmp_path, "zero3", 7, study="another")
    found = let_in(tmp_path)
    assert found.left_out == {name_of("zero2", 0): "the study plans no such run"}
    assert len(found.taken) == 10
    write(tmp_path / "second", "zero3", 0, wall_seconds=3.0)
    with pytest.raises(Refusal, match="is there twice, and the two are not copies"):
        let_in(tmp_path)


def test_a_pilot_says_how_far_runs_of_a_seed_are_apart(tmp_path):
    """By hand: losses 1, 1.02, 0.98, and a cut 0.01 above the mean; the other seed the same."""
    losses = {"": 1.0, "nudged1": 1.02, "nudged2": 0.98, "cut": 1.01}
    for seed in (0, 1):
        for label, loss in losses.items():
            write(tmp_path, "ddp", seed, label, evaluation=[{"step": 50, "loss": 9.0}, {"step": 100, "loss": loss}])
    planned = {name_of("ddp", seed, label) for seed in (0, 1) for label in losses}
    step, found = pilot.spreads([tmp_path], planned, set(losses), "mine")
    assert step == 100
    assert [(row.metric, row.what, row.seeds) for row in found] == [("loss", "a neighbour", 2), ("loss", "cut", 2)]
    for name in ("rms", "largest"):
        assert [getattr(row, name) for row in found] == pytest.approx([0.04, 0.01])
    assert found[0].power[0] == pytest.approx(verdict.power(0.04, 0.01, 10, 0.05))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fixed_on": "yesterday"}, "Invalid isoformat"),
        ({"endpoints": []}, "endpoints"),
        ({"weights_sha256": "no"}, "weights_sha256"),
        ({"marign": 1}, "marign"),
        ({"endpoints": [LOSS, LOSS]}, "2 are primary"),
        ({"neighbours": ["nudged1"]}, "neighbours"),
        ({"once": "nowhere"}, "no part has the label 'nowhere'"),
    ],
)
def test_a_protocol_is_read_strictly(tmp_path: Path, change, said):
    labelled = [{"strategies": ["ddp"], "label": f"nudged{n}", "flags": {"nudge_seed": n}} for n in (1, 2, 3)]
    parts = [{"strategies": ["ddp"]}, *labelled, {"strategies": ["fsdp2"], "label": "once"}]
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"question": "?", "parts": parts, "protocol": {**PROTOCOL, **change}}))
    with pytest.raises(Refusal, match=said):
        studies.find(str(path))


def test_the_guide_shows_a_protocol_that_is_one(tmp_path: Path):
    block = (files.ROOT / "docs" / "fixed-in-advance.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "mine.yaml").write_text(block.replace("that of the body", "a" * 64))
    found = studies.find(str(tmp_path / "mine.yaml"))
    assert found.protocol.endpoints[0].primary
    assert {part.label for part in found.parts} >= {*found.protocol.neighbours, found.protocol.once}


def test_a_study_knows_the_digest_of_its_file(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    for text in ("question: why\nparts: [{strategies: [ddp]}]\n", "question: how\nparts: [{strategies: [ddp]}]\n"):
        path.write_text(text)
        assert studies.find(str(path)).sha256 == files.sha256(path)
    path.write_text("question: why\nsha256: a\nparts: [{strategies: [ddp]}]\n")
    with pytest.raises(Refusal, match="sha256 is not a key"):
        studies.find(str(path))
