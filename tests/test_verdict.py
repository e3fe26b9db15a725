"""Is the verdict on a study that was fixed in advance what its numbers say? Studies made up, with known differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from study import cli
from study.compare import verdict, verdict_text
from study.compare.verdict import Runs, Trained
from study.errors import Refusal
from study.records.protocol import Protocol
from study.running import studies

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 10
LOSS = {"metric": "loss", "step": 100, "margin": 0.01, "primary": True, "planned_sd": 0.003}
PROTOCOL = {
    "fixed_on": "2026-11-21",
    "pilot": "three seeds of ddp",
    "neighbours": ["nudged1", "nudged2"],
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
    flags = label.startswith("nudged"), label == "once"
    return Trained(name, strategy, world_size, seed, *flags, held_out, final or name, f"start {seed}", "2026-11-21T1")


def study(shift=0.0, spread=0.002, arm_spread=None, arm="zero3") -> Runs:
    """DDP and its neighbours, each `spread` of the loss from the seed's; an arm that is shifted, too."""
    draw = np.random.default_rng(1)
    taken = []
    for seed in range(SEEDS):
        level = 0.5 + 0.02 * draw.normal()
        for label in ("", "nudged1", "nudged2"):
            taken.append(trained("ddp", seed, level * (1 + spread * draw.normal()), label=label))
        wide = spread if arm_spread is None else arm_spread
        taken.append(trained(arm, seed, level * (1 + shift + wide * draw.normal())))
    return Runs(taken, {}, {})


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


def test_a_small_shift_is_within_the_margin_and_further_than_rounding():
    """Neither test stands for the other."""
    found = on_loss(study(shift=0.004, spread=0.0005))
    assert found.equivalence == "same within the margin"
    assert found.further
    assert found.mean == pytest.approx(0.004, abs=0.001)
    assert found.distance > 5


def test_an_arm_that_only_scatters_more_is_further_than_rounding():
    """Its mean is the control's: the distance of each run says it."""
    found = on_loss(study(spread=0.0005, arm_spread=0.004))
    assert found.further
    assert found.low < 0 < found.high


def test_the_null_is_rejected_as_often_as_it_says():
    """Of arms that are members of the ensemble, one in twenty is called further than rounding."""
    draw = np.random.default_rng(2)
    ps = [verdict.exchange(draw.normal(size=(SEEDS, 4)))[1] for _ in range(300)]
    assert 0.02 < np.mean(np.array(ps) < 0.05) < 0.09
    assert 0.4 < np.mean(ps) < 0.6


def test_runs_that_are_all_equal_are_no_further():
    assert verdict.exchange(np.ones((SEEDS, 4))) == (0.0, 1.0)


def test_holm():
    """By hand: 0.01 x 3, 0.02 x 2, 0.04 x 1, never below one before it."""
    assert verdict.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert verdict.holm([0.6, 0.7]) == [1.0, 1.0]


def test_power_is_that_of_simulated_studies():
    """Of studies without a difference: in how many do both one-sided tests pass?"""
    draw = np.random.default_rng(3)
    for sd in (0.006, 0.012):
        passed = [
            verdict._equivalence(sd * draw.normal(size=SEEDS), 0.01, 0.05, -1, 1) == "same within the margin"
            for _ in range(500)
        ]
        assert np.mean(passed) == pytest.approx(verdict.power(sd, 0.01, SEEDS, 0.05), abs=0.08)
    assert verdict.power(0.0, 0.01, SEEDS, 0.05) == 1.0


def test_more_processes_of_the_control_are_an_arm():
    runs = study()
    four = [trained("ddp", seed, 0.5, world_size=4) for seed in range(SEEDS)]
    judged = verdict.judge(runs._replace(taken=[*runs.taken, *four]), protocol(), "ddp")
    assert [(row.strategy, row.world_size) for row in judged[:2]] == [("zero3", 2), ("ddp", 4)]


def test_what_trains_the_same_is_shown_once():
    runs = study()
    once = [trained("fsdp2", 0, label="once", final="bert-imdb-tiny-ddp-2x-seed0")]
    same = runs._replace(taken=[*runs.taken, *once])
    assert verdict.same_weights(same, protocol(), "ddp") == {"ddp": {"fsdp2": True}}
    other = runs._replace(taken=[*runs.taken, trained("fsdp2", 0, label="once", final="other")])
    assert verdict.same_weights(other, protocol(), "ddp") == {"ddp": {"fsdp2": False}}
    assert {row.strategy for row in verdict.judge(same, protocol(), "ddp")} == {"zero3"}


def test_steps_to_the_target():
    assert verdict.reached(trained(loss=0.45), protocol()) == 50
    assert verdict.reached(trained(loss=0.5), protocol()) == 100
    assert verdict.reached(trained(loss=0.6), protocol()) is None


def test_without_neighbours_nothing_is_judged():
    runs = Runs([trained("ddp", seed) for seed in range(3)], {}, {})
    with pytest.raises(Refusal, match="nothing is known of rounding"):
        verdict.judge(runs, protocol(), "ddp")


def test_the_answer_says_what_was_found():
    judged = verdict.judge(study(), protocol(), "ddp")
    said = verdict_text.answer(judged, protocol(), "ddp")
    assert said.startswith("None of 1 arms differs from DDP in held-out loss after 100 steps by as much as 1 %")
    assert "none is further from it than rounding alone" in said
    judged = verdict.judge(study(shift=0.03), protocol(), "ddp")
    said = verdict_text.answer(judged, protocol(), "ddp")
    assert "0 of 1 arms differ from DDP" in said
    assert "`zero3` on 2 processes higher" in said
    assert "`zero3` on 2 processes: further from it than rounding alone" in said


def test_a_study_without_protocol_has_no_verdict():
    with pytest.raises(Refusal, match="nothing was fixed before its runs"):
        cli.run(["verdict", "smoke", "reports/cpu/records"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fixed_on": "yesterday"}, "Invalid isoformat"),
        ({"endpoints": []}, "endpoints"),
        ({"weights_sha256": "no"}, "weights_sha256"),
        ({"marign": 1}, "marign"),
    ],
)
def test_a_protocol_is_read_strictly(tmp_path: Path, change, said):
    import yaml

    content = {"question": "?", "parts": [{"strategies": ["ddp"]}], "protocol": {**PROTOCOL, **change}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(Refusal, match=said):
        studies.find(str(path))


def test_the_guide_shows_a_protocol_that_is_one(tmp_path: Path):
    guide = (ROOT / "docs" / "fixed-in-advance.md").read_text()
    block = guide.split("```yaml\n")[1].split("```")[0].replace("that of the body", "a" * 64)
    path = tmp_path / "mine.yaml"
    path.write_text(block)
    found = studies.find(str(path))
    assert found.protocol.endpoints[0].primary
    assert {part.label for part in found.parts} >= {*found.protocol.neighbours, found.protocol.once}


def test_a_study_knows_the_digest_of_its_file(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("question: why\nparts: [{strategies: [ddp]}]\n")
    first = studies.find(str(path)).sha256
    path.write_text("question: how\nparts: [{strategies: [ddp]}]\n")
    assert studies.find(str(path)).sha256 != first
    path.write_text("question: why\nsha256: a\nparts: [{strategies: [ddp]}]\n")
    with pytest.raises(Refusal, match="sha256 is not a key"):
        studies.find(str(path))
