"""The published program and the parity traps: what is compared with what, effects and their words, and real starts."""

from __future__ import annotations

import json

import launching
import pytest
from published import __main__ as commands
from published import traps as measuring
from refusing import refusal

from study.claims import defects, traps
from study.claims.defects import METRICS, PROGRAMS

pytestmark = pytest.mark.measurements

COMPARISONS = [one for group in defects.GROUPS.values() for one in group.values()]
COMMITTED = launching.ROOT / "reports" / "cpu" / "published"


# ---------------------------------------------------------------- the program


def test_comparisons_are_of_arms_that_there_are_and_every_program_is_in_one():
    for one in COMPARISONS:
        (plain, first), (zero, second) = one.plain, one.zero
        assert PROGRAMS[plain].arms[first].startswith("plain-")
        assert PROGRAMS[zero].arms[second].startswith("zero-")
        assert set(one.reading) == set(METRICS)
    assert {name for one in COMPARISONS for name, _ in (one.plain, one.zero)} == set(PROGRAMS)


def arm(name: str, loss: float) -> dict:
    return {
        "arm": name, "ran": {"batch_size": int(name.split("-")[1])}, "logged_eval_loss": loss,
        "logged_train_loss": loss, "held_out_loss": loss, "epoch_losses": [9.0, loss], "seconds": 80.0,
        "cpu_seconds": 8.0, "step_seconds": 1.0, "step_cpu_seconds": 0.1, "peak_bytes": 100, "life_peak_bytes": 200,
    }  # fmt: skip


def results(*losses: tuple[float, float]) -> dict:
    """Repeats of the published program, whose first and last arm had these losses."""
    runs = {
        f"published/{repeat}": {"arms": [arm("plain-8", plain), arm("zero-8", plain), arm("zero-16", zero)]}
        for repeat, (plain, zero) in enumerate(losses)
    }
    return {"runs": runs, "machine": {"gpus": []}}


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([(1.0, 0.90), (1.0, 0.91), (1.0, 0.92)], "better"),
        ([(1.0, 1.10), (1.0, 1.09), (1.0, 1.08)], "worse"),
        ([(1.0, 1.10), (1.0, 0.90), (1.0, 1.02)], "inconclusive"),
        ([(1.0, 1.0000001), (1.0, 0.9999999)], "no difference"),
        ([(1.0, 0.9)], "one repeat"),
    ],
)
def test_an_effect_has_a_word(losses, word):
    assert defects.effect(results(*losses), defects.AS_PUBLISHED, "validation loss").word == word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--program", "best"], "--program best"),
        (["--size", "large"], "--size large"),
        (["--data", "files"], "--data files"),
        (["--num-train-examples", "100000"], "num_train_examples 100000"),
        (["--num-train-examples", "80"], "give at least 160"),
    ],
)
def test_a_wrong_request_is_refused(words, message, tmp_path):
    asked = ["protocol", *words, "--output", str(tmp_path / "out.json")]
    assert message in refusal(commands.published.main, args=asked, standalone_mode=False)
    assert not list(tmp_path.iterdir())


PUBLISHED = ["python", launching.ROOT / "tools" / "measure" / "published"]


@pytest.fixture
def run_small() -> dict:
    """The published program and the two arms of the mended one, for real, on the synthetic text."""
    return defects.read(launching.once("protocol", measure) / "out.json")


def measure(folder) -> None:
    path = folder / "out.json"
    words = ["--num-train-examples", "160", "--num-eval-examples", "16", "--repeats", "1", "--output", str(path)]
    for name in ("published", "mended-plain-8", "mended-zero-8"):
        words += ["--program", name]
    completed = launching.attempt([*PUBLISHED, "protocol", *words])
    assert completed.returncode == 0, completed.stderr
    again = launching.attempt([*PUBLISHED, "protocol", *words])
    assert (again.returncode, again.stdout) == (0, "")  # all of it is kept


@pytest.mark.nightly
def test_the_published_program_runs_no_zero(run_small):
    arms = run_small["runs"]["published/0"]["arms"]
    assert [one["arm"] for one in arms] == ["plain-8", "zero-8", "zero-16"]
    assert {(one["ran"]["zero_stage"], one["ran"]["optimizer_class"]) for one in arms} == {(None, "AdamW")}
    assert [one["ran"]["num_steps"] for one in arms] == [20, 20, 10]
    assert len({one["first_weights"] for one in arms}) == 3  # each goes on from what the one before has learned
    assert all(one["checkpoint_bytes"] > 0 for one in arms)  # in the time that is measured


@pytest.mark.nightly
def test_the_mended_program_runs_zero_and_learns_the_same(run_small):
    plain, zero = (run_small["runs"][f"mended-{name}-8/0"]["arms"][0] for name in ("plain", "zero"))
    engine = {"engine_class": "DeepSpeedEngine", "optimizer_class": "DeepSpeedCPUAdam"}
    assert zero["ran"] == {**plain["ran"], **engine, "zero_stage": 3, "offload_optimizer_device": "cpu"}
    assert zero["first_weights"] == plain["first_weights"]
    for metric in defects.LOSSES:
        assert abs(defects.effect(run_small, defects.MENDED, metric).mean) < defects.WITHIN


def test_the_committed_results_are_whole():
    result = defects.read(COMMITTED / "protocol.json")
    assert result["settings"]["data"] == "files"
    repeats = {name: {key for key in result["runs"] if key.partition("/")[0] == name} for name in PROGRAMS}
    assert all(len(completed) >= 5 for completed in repeats.values()), repeats
    for metric in defects.LOSSES:
        assert defects.effect(result, defects.MENDED, metric).word == "no difference"
    assert defects.effect(result, defects.AS_PUBLISHED, "validation loss").word == "better"


# ---------------------------------------------------------------- traps


def trapped(*losses: float, **ran: float) -> dict:
    learned = {"eval_loss": 1.0, "losses": [], "initial_weights": "", "samples": ""}
    seeds = {str(seed): {**learned, "train_loss": loss} for seed, loss in enumerate(losses)}
    return {"asked": {}, "ran": ran, "seeds": seeds}


@pytest.fixture
def effect_of(tmp_path):
    """Write a file with one measured trap; return one row of its effects."""

    def write(quantity="train_loss", kind="trapped", **changes):
        arms = {
            "plain": trapped(0.5, 0.4, 0.8, optimizer_steps=40),
            "other": trapped(0.55, 0.46, 0.84, optimizer_steps=80),
            "same": trapped(0.5, 0.4 + 1e-8, 0.8, optimizer_steps=40),
            "noisy": trapped(0.6, 0.3, 0.8),
            "one seed": trapped(0.6),
        }
        names = {"control": "plain", "trapped": "other", "matched": "same", "matched_control": None}
        trap = {"what": "one and the other", "quantities": [quantity], **names, **changes}
        path = tmp_path / "traps.json"
        path.write_text(json.dumps({"settings": {}, "data": {}, "arms": arms, "traps": {"a": trap}}))
        result = traps.effects(path)
        return next(result[result.arm == kind].itertuples())

    return write


def test_a_traps_effect_is_paired_by_seed(effect_of):
    row = effect_of()  # +10, +15 and +5 %, of which t's interval is 10 +- 4.303 x 5 / sqrt(3)
    assert row.difference == pytest.approx(0.10)
    assert (row.low, row.high) == pytest.approx((0.10 - 0.12421, 0.10 + 0.12421), abs=1e-5)
    assert (row.n_seeds, row.verdict) == (3, "not distinguishable from 0 (-2.42 % to +22.4 %)")
    steps = effect_of("optimizer_steps")  # what the engine says is a quantity too
    assert (steps.low, steps.high, steps.verdict) == (1, 1, "makes a difference of +100 %")
    alone = effect_of(trapped="one seed")
    assert (alone.n_seeds, alone.verdict) == (1, "one seed: no interval")


def test_a_matched_arm_is_equal_but_for_rounding(effect_of):
    assert effect_of(kind="matched").verdict == "no difference"
    assert effect_of(kind="matched", matched="noisy").verdict.startswith("not distinguishable from 0")
    own = effect_of(kind="matched", matched="noisy", matched_control="noisy")
    assert (own.against, own.difference) == ("noisy", 0)


def test_traps_and_arms_are_those_that_were_measured():
    assert {name for trap in measuring.TRAPS.values() for name in trap.arms} == set(measuring.ARMS)
    committed = traps.read(COMMITTED / "traps.json")
    asked = {name: facts["asked"] for name, facts in committed["arms"].items()}
    assert asked == {name: measuring.asked_of(name) for name in measuring.ARMS}
    assert committed["traps"] == {name: json.loads(json.dumps(one._asdict())) for name, one in measuring.TRAPS.items()}
    assert committed["settings"] == measuring.SETTINGS


TRAP = [*PUBLISHED, "traps", "--seeds", "1", "--trap", "one-process-instead-of-two", "--output"]


def measure_trap(folder) -> None:
    completed = launching.attempt([*TRAP, folder / "traps.json"])
    assert completed.returncode == 0, completed.stderr
    assert len(completed.stdout.splitlines()) == 3
    before = (folder / "traps.json").read_bytes()
    again = launching.attempt([*TRAP, folder / "traps.json"])
    assert (again.returncode, again.stdout) == (0, "")
    assert (folder / "traps.json").read_bytes() == before


@pytest.mark.nightly
@pytest.mark.launches
def test_a_trap_differs_and_its_matched_arm_does_not():
    path = launching.once("traps", measure_trap) / "traps.json"
    ranks = {name: facts["ran"]["world_size"] for name, facts in traps.read(path)["arms"].items()}
    assert ranks == {"single": 1, "multi-cpu-2x": 1, "ddp-2x": 2}  # though the second's file says two
    result = traps.effects(path).set_index(["quantity", "arm"]).difference
    assert abs(result["train_loss", "trapped"]) > 0.01
    assert abs(result["train_loss", "matched"]) < 1e-5
    assert result["sequences_per_program_step", "trapped"] == -0.5
    assert result["optimizer_steps", "trapped"] == 1
