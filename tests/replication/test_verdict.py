"""Test the verdict on a study whose margins were fixed in advance, with synthetic studies of known differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic

from study.compare import eligible_runs, verdict, verdict_text
from study.compare.eligible_runs import AdmittedRun, PlannedRun, Runs
from study.config import RunConfig
from study.running import studies
from study.running.studies import Protocol
from zero_study import cli, files
from zero_study.errors import Refusal

STARTS = 12
NULL = ("single", "cut", "rounding")
PROTOCOL = {
    "fixed_on": "2026-11-24", "pilot": "four starts of ddp", "step": 100, "margin": 0.01, "variants": NULL,
    "broken": ["scaled"], "noticed": 0.0001, "falls_to": 0.9, "exclusions": ["runs that did not end"],
}  # fmt: skip


def protocol(**changes) -> Protocol:
    return Protocol.model_validate({**PROTOCOL, **changes})


def trained(strategy="ddp", seed=0, loss=0.5, label="", first=0.7, learns=True) -> AdmittedRun:
    held_out = {0: {"loss": first}, 100: {"loss": loss}}
    name = name_of(strategy, seed, label)
    return AdmittedRun(name, strategy, seed, label, held_out, (0.7, loss if learns else 0.7), "2026-11-24", "c")


def name_of(strategy, seed, label="") -> str:
    return f"bert-imdb-tiny-{strategy}-2x-seed{seed}" + (f"-{label}" if label else "")


def made_up(taken, missing=()) -> Runs:
    return Runs(list(taken), {}, list(missing), len(taken) + len(missing))


def study(shift=0.0, scatter=1.0, spread=0.002, broken=0.05, first=0.7, learns=True) -> Runs:
    """DDP and its null, `spread` apart; zero3, shifted, or as many times further away; a fault, shifted by `broken`."""
    draw = np.random.default_rng(1)
    taken = []
    for seed in range(STARTS):
        level = 0.5 + 0.02 * draw.normal()
        near = lambda factor=1.0: level * (1 + factor * spread * draw.normal())  # noqa: B023, E731
        taken += [trained("ddp", seed, level, first=first, learns=learns or seed > 0), trained("single", seed, near())]
        taken += [trained("ddp", seed, near(), label) for label in ("cut", "rounding")]
        taken += [trained("zero3", seed, near(scatter) + shift * level)]
        taken += [trained("ddp", seed, near() + broken * level, "scaled")] if seed < 8 else []
    return made_up(taken)


def judged(runs: Runs, **changes) -> verdict.Verdict:
    return verdict.judge(runs, protocol(**changes), "ddp")


@pytest.mark.parametrize(
    ("shift", "scatter", "is_further", "is_within"),
    [(0, 1, False, True), (0.004, 1, True, True), (0, 8, True, True), (0.03, 1, True, False), (-0.03, 1, True, False)],
)
def test_an_arm_is_further_by_a_small_shift_or_by_more_scatter(shift, scatter, is_further, is_within):
    result = judged(study(shift, scatter))
    arm, broken = result.arms
    assert (arm.name, arm.is_further, arm.is_within, result.lacks) == ("zero3", is_further, is_within, [])
    assert (broken.name, broken.is_broken, broken.is_further, len(broken.differences)) == ("scaled", True, True, 8)


def test_an_arm_that_is_one_of_the_null_is_called_further_as_seldom_as_it_says():
    draw = np.random.default_rng(2)
    for tail in (draw.standard_normal, lambda size: draw.standard_t(1.5, size)):
        ps = np.array([verdict.permutation_test(each[:, 0], each[:, 1:])[1] for each in tail((300, STARTS, 4))])
        assert np.mean(ps < 0.05) < 0.08


def test_one_start_that_parts_outweighs_no_others():
    """Ten times as far in every start but one, in which all runs are a thousand times further: still seen."""
    draw = np.random.default_rng(3)
    both = 1e-5 * draw.normal(size=(24, 4))
    both[:, 0] *= 10
    both[0] = 1e-2 * draw.normal(size=4)
    assert verdict.permutation_test(both[:, 0], both[:, 1:])[1] < 0.01


def test_runs_that_are_all_equal_are_no_further():
    assert verdict.permutation_test(np.zeros(STARTS), np.zeros((STARTS, 3))) == (1.0, 1.0)
    distance, p = verdict.permutation_test(np.full(STARTS, 1e-7), np.zeros((STARTS, 3)))
    assert (distance, p < 0.01) == (pytest.approx(100), True)


def test_what_parts_is_counted_and_bounded():
    """By hand: none of 24 starts excludes that more than 1 - 0.05^(1/24) = 11.7 % part."""
    runs = [trained("ddp", seed) for seed in range(24)]
    runs += [trained("ddp", seed, 0.5 * (1 + 0.001 * (seed - 11.5)), label) for seed in range(24) for label in NULL]
    runs += [trained("zero3", seed, 0.5 * (1.0115 if seed == 5 else 1.0114)) for seed in range(24)]
    runs += [trained("zero2", seed, 0.5 * (1.012 if seed == 5 else 1.0)) for seed in range(24)]
    zero2, zero3 = judged(made_up(runs), broken=[]).arms
    assert (zero3.num_parted, zero3.most_parted) == (0, pytest.approx(1 - 0.05 ** (1 / 24)))
    assert (zero2.num_parted, zero2.most_parted) == (1, pytest.approx(0.1829, abs=1e-3))


@pytest.mark.parametrize(
    ("changes", "of", "lack"),
    [
        ({"broken": 0.0}, {}, "did not detect the planted fault scaled"),
        ({}, {"broken": ["scaled", "moment"]}, "fault moment was not run"),
        ({}, {"broken_study": "old"}, "fault old was not run"),
        ({"spread": 1e-5}, {}, "too rare"),
        ({"first": 0.5}, {}, "held-out loss of ddp does not fall"),
        ({"learns": False}, {}, "training loss of ddp does not fall with seed 0"),
    ],
)
def test_there_is_no_verdict_where_the_test_could_not_have_failed(changes, of, lack):
    result = judged(study(**changes), **of)
    assert len(result.lacks) >= 1
    assert any(lack in each for each in result.lacks)


def test_holm():
    """By hand: 0.01 x 3, 0.02 x 2, 0.04 x 1, never below one before it."""
    assert verdict.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert verdict.holm([0.6, 0.7]) == [1.0, 1.0]


def test_power_grows_with_what_parts():
    null = 1e-3 * np.random.default_rng(4).normal(size=(4, 3))
    seen = [
        verdict.power(null, 24, share, by, protocol(), studies=60) for share, by in ((0, 0.0), (0.1, 0.02), (1, 0.02))
    ]
    assert seen[0] < seen[1] < seen[2] == 1.0
    assert seen[1] == pytest.approx(1 - 0.9**24, abs=0.12)  # that one of 24 starts parts at all


def test_what_is_not_whole_is_not_judged():
    for runs, match in (
        (study()._replace(missing=["x"]), "1 planned runs have no outcome yet, x among them"),
        (made_up([trained("ddp", seed) for seed in range(3)]), "variation 'cut' was found"),
        (
            made_up([run for run in study().taken if run.strategy != "zero3" or not run.seed]),
            "zero3: .* with 1 of its seeds",
        ),
    ):
        with pytest.raises(Refusal, match=match):
            judged(runs)


def test_a_start_without_all_of_the_null_is_left_out():
    taken = [run for run in study().taken if (run.seed, run.label) != (3, "cut")]
    assert 3 not in judged(made_up(taken)).arms[0].differences


def test_the_answer_says_what_was_found():
    facts = {"name": "mine", "question": "Same?", "parts": [{"strategies": ["ddp", "zero3"]}], "sha256": "f" * 64}
    chosen = studies.Study.model_validate(facts).model_copy(update={"protocol": protocol()})

    def said(**changes):
        runs = study(**changes)
        return verdict_text.answer(verdict_text.Decided(chosen, runs, judged(runs), {}))

    assert "less than 1 %" in said()
    assert "zero3" in said(shift=0.03).partition("does not show")[2]
    assert "scaled" in said(broken=0.0).partition(": ")[2]


@pytest.mark.parametrize(
    ("changes", "without", "status"),
    [
        ({}, (), 0),
        ({"shift": 0.03}, (), 1),
        ({"broken": 0.0}, (), 3),  # the planted fault is not seen, so the test could not have failed
        ({}, ("zero3",), 3),  # planned, and none of its runs counts
        ({"shift": 0.03, "broken": 0.0}, (), 3),
    ],
)
def test_a_study_without_comparison_is_not_sound(changes, without, status):
    facts = {"name": "mine", "question": "Same?", "parts": [{"strategies": ["ddp", "zero3"]}], "sha256": "f" * 64}
    chosen = studies.Study.model_validate(facts).model_copy(update={"protocol": protocol()})
    runs = study(**changes)
    runs = runs._replace(taken=[run for run in runs.taken if run.label or run.strategy not in without])
    decided = verdict_text.Decided(chosen, runs, judged(runs), {})
    checked = verdict_text._check(decided)
    assert checked.status == status
    assert (checked.num_checked > 0) == (not without)
    assert verdict_text.answer(decided).startswith("There is no verdict") == (status == 3)
    assert verdict_text.table_of_arms(decided)


def test_without_a_protocol_there_is_no_verdict(tmp_path):
    synthetic.write_run(tmp_path, study="smoke")
    with pytest.raises(Refusal, match=r"smoke.*has no protocol that was fixed before its runs"):
        cli.run(["compare", "--verdict", "smoke", str(tmp_path)])


WEIGHTS = {"weights": "b", "dropout": 0.0}
STEPS = 100


def write(folder, strategy="ddp", seed=0, label="", study="mine", **changes):
    """A run of the study as its runner leaves it; `changes` of its record, and of its outcome's digest."""
    digest = changes.pop("study_sha256", "f" * 64)
    flags = WEIGHTS | changes.pop("flags", {})
    path = synthetic.write_run(
        folder / "tmp", workload="bert-imdb", strategy=strategy, seed=seed, num_steps=STEPS, study=study, **flags
    )
    name = name_of(strategy, seed, label)
    start = {"absolute_sum": 1, "square_sum": 1, "sha256": str(seed).ljust(64, "0")}
    facts = {
        "run_id": name, "weights_sha256": "a" * 64, "initial_parameters": start, "final_parameters": start,
        "evaluation": [{"step": step, "loss": 0.5, "accuracy": 0.8} for step in (0, 100)],
        "machine": {"git_dirty": False, "git_commit": "c"},
    }  # fmt: skip
    synthetic.change(path, **facts | changes)
    synthetic.change(path.with_name("outcome.json"), run_id=name, study_sha256=digest)
    path.parent.rename(folder / name)


def wanted(seeds=(0, 1)):
    config = RunConfig(max_steps=STEPS, num_train_examples=256, **WEIGHTS)
    for seed in seeds:
        for strategy, label in (("zero3", ""), ("ddp", ""), ("ddp", "cut"), ("ddp", "rounding"), ("ddp", "scaled")):
            yield PlannedRun(name_of(strategy, seed, label), strategy, 2, config.model_copy(update={"seed": seed}))


def all_of_it(folder, seeds=(0, 1), without="", **changes):
    """Every run that the study plans, but one."""
    for run in wanted(seeds):
        if run.run_id != without:
            write(
                folder, run.strategy, run.config.seed, eligible_runs.label_of(run.run_id, [*NULL, "scaled"]), **changes
            )


def let_in(folder) -> Runs:
    return eligible_runs.read([folder], wanted(), protocol(), "mine", "f" * 64)


def test_what_was_planned_is_let_in(tmp_path):
    all_of_it(tmp_path)
    for folders in ([tmp_path], [tmp_path, tmp_path]):
        result = eligible_runs.read(folders, wanted(), protocol(), "mine", "f" * 64)
        assert (len(result.taken), result.left_out, result.missing, result.num_planned) == (10, {}, [], 10)
        assert {run.label for run in result.taken} == {"", "cut", "rounding", "scaled"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"study_sha256": "e" * 64}, "had a different text"),
        ({"study_sha256": None}, "had a different text"),
        ({"flags": {"learning_rate": 0.9}}, "learning_rate was 0.9, but the study plans"),
        ({"evaluation": [{"step": 100, "loss": 0.5}]}, "not measured at step 0"),
        ({"evaluation": [{"step": 0, "loss": 0.5}]}, "not measured at step 100"),
        ({"machine": {"git_dirty": True}}, "its code was changed"),
        ({"code": [{"commit": "a" * 40, "is_dirty": True, "sha256": "a" * 64}]}, "its code was changed"),
        (
            {"code": [{"commit": each * 40, "is_dirty": False, "sha256": each * 64} for each in "ab"]},
            "parts of it were trained by different code (aaaaaaa, then bbbbbbb)",
        ),
        ({"machine": {"git_dirty": False, "libraries": {"torch": "1.0"}}}, "differs from most runs in its libraries"),
        ({"machine": {"git_dirty": False, "num_cores": 2}}, "differs from most runs in its machine"),
        (
            {"machine": {"git_dirty": False, "environment": {"MKL_CBWR": "AVX2"}}},
            "differs from most runs in its arithmetic",
        ),
        ({"initial_parameters": {"sha256": "9" * 64}}, "initial weights"),
        ({"weights_sha256": "b" * 64}, "differs from most runs in its pretrained weights"),
        ({"data": {"digest": "0" * 64}}, "differs from most runs in its text"),
        (
            {"continues": {"run_id": "x", "strategy": "ddp", "world_size": 2, "step": 1}},
            "the checkpoint of another run",
        ),
    ],
)
def test_what_is_not_as_planned_is_left_out_with_the_reason(tmp_path, changes, said):
    name = name_of("zero3", 1)
    all_of_it(tmp_path, without=name)
    write(tmp_path, "zero3", 1, **changes)
    result = let_in(tmp_path)
    assert list(result.left_out) == [name]
    assert said in result.left_out[name]
    assert len(result.taken) == 9


def test_a_start_may_have_a_body_of_its_own(tmp_path):
    all_of_it(tmp_path, seeds=(0,))
    all_of_it(tmp_path, seeds=(1,), weights_sha256="b" * 64)
    assert not let_in(tmp_path).left_out


def test_strays_and_runs_of_others_are_not_taken(tmp_path):
    all_of_it(tmp_path)
    write(tmp_path, "zero2", 0)
    write(tmp_path, "zero3", 7, study="another")
    result = let_in(tmp_path)
    assert result.left_out == {name_of("zero2", 0): "the study does not plan this run"}
    assert len(result.taken) == 10
    write(tmp_path / "second", "zero3", 0, wall_seconds=3.0)
    with pytest.raises(Refusal, match="is in two folders, and the two runs differ"):
        let_in(tmp_path)


PARTS = [{"strategies": ["ddp", "single", "zero3"]}] + [
    {"strategies": ["ddp"], "label": label} for label in ("cut", "rounding", "scaled")
]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fixed_on": "yesterday"}, "Invalid isoformat"),
        ({"falls_to": 1.5}, "falls_to"),
        ({"marign": 1}, "marign"),
        ({"variants": ["nowhere"]}, "no part has the label or the strategy 'nowhere'"),
        ({"broken": ["nothing"]}, "no part has the label or the strategy 'nothing'"),
    ],
)
def test_a_protocol_is_read_strictly(tmp_path: Path, change, said):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"question": "?", "parts": PARTS, "protocol": {**PROTOCOL, **change}}))
    with pytest.raises(Refusal, match=said):
        studies.find(str(path))


def test_the_guide_shows_a_protocol_that_is_one(tmp_path: Path):
    block = (files.ROOT / "reports" / "losses.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "mine.yaml").write_text(block)
    result = studies.find(str(tmp_path / "mine.yaml"))
    assert {part.label for part in result.parts} >= {*result.protocol.broken}


def test_a_study_knows_the_digest_of_its_file(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    for text in ("question: why\nparts: [{strategies: [ddp]}]\n", "question: how\nparts: [{strategies: [ddp]}]\n"):
        path.write_text(text)
        assert studies.find(str(path)).sha256 == files.sha256(path)
