"""Parity traps: what their effects are derived from, and one real trap."""

from __future__ import annotations

import json
import re
import subprocess

import launching
import pytest

from study import cli
from study.errors import Refusal, RunFailed
from study.published import trap_effects as compared
from study.published import traps
from study.report import protocol_page


def arm(*losses: float, **ran: float) -> dict:
    learned = {"eval_loss": 1.0, "losses": [], "initial_weights": "", "samples": ""}
    seeds = {str(seed): {**learned, "train_loss": loss} for seed, loss in enumerate(losses)}
    return {"asked": {}, "ran": ran, "seeds": seeds}


def trap(**changes) -> dict:
    names = {"control": "plain", "trapped": "other", "matched": "same", "matched_control": None}
    return {"what": "one and the other", "quantities": ["train_loss"], **names, **changes}


@pytest.fixture
def measured(tmp_path):
    """Write a file of measured traps and return its path."""

    def write(**traps_in_it):
        arms = {
            "plain": arm(0.5, 0.4, 0.8, optimizer_steps=40),
            "other": arm(0.55, 0.46, 0.84, optimizer_steps=80),
            "same": arm(0.5, 0.4 + 1e-8, 0.8, optimizer_steps=40),
            "noisy": arm(0.6, 0.3, 0.8),
            "one seed": arm(0.6),
        }
        path = tmp_path / "traps.json"
        settings = {"size": "tiny", "num_train_examples": 64, "sequence_length": 8, "epochs": 1}
        content = {"command": "", "date": "2026-01-01", "machine": {}, "settings": settings}
        content |= {"data": {"source": "bundled"}, "arms": arms, "traps": traps_in_it}
        path.write_text(json.dumps(content))
        return path

    return write


def effect(path, quantity="train_loss", kind="trapped"):
    found = compared.effects(path)
    (row,) = found[(found.quantity == quantity) & (found.arm == kind)].itertuples()
    return row


def test_effect_is_paired_by_seed(measured):
    row = effect(measured(a=trap()))  # +10, +15 and +5 %, of which t's interval is 10 +- 4.303 x 5 / sqrt(3)
    assert row.difference == pytest.approx(0.10)
    assert (row.low, row.high) == pytest.approx((0.10 - 0.12421, 0.10 + 0.12421), abs=1e-5)
    assert row.verdict == "not told from 0 (-2.42 % to +22.4 %)"
    assert row.n_seeds == 3


def test_matched_arm_is_equal_but_for_rounding(measured):
    assert effect(measured(a=trap()), kind="matched").verdict == "no difference"
    assert effect(measured(a=trap(matched="noisy")), kind="matched").verdict.startswith("not told from 0")


def test_matched_arm_may_have_a_control_of_its_own(measured):
    row = effect(measured(a=trap(matched="noisy", matched_control="noisy")), kind="matched")
    assert (row.against, row.difference) == ("noisy", 0)


def test_what_the_engine_says_is_a_quantity_too(measured):
    row = effect(measured(a=trap(quantities=["optimizer_steps"])), "optimizer_steps")
    assert (row.low, row.high, row.verdict) == (1, 1, "makes a difference of +100 %")


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (None, None, "one seed: no interval"),
        (-1e-6, 9e-6, "no difference"),
        (-2e-5, 1e-6, "not told from 0 (-0.002 % to +0.0001 %)"),
        (-0.19, -0.01, "makes a difference of -19 % to -1 %"),
    ],
)
def test_verdict(low, high, word):
    assert compared.verdict(low, high) == word


def test_one_seed_has_no_interval(measured):
    row = effect(measured(a=trap(trapped="one seed")))
    assert (row.n_seeds, row.verdict) == (1, "one seed: no interval")


def test_the_pages_table(measured):
    text = protocol_page.trapped(str(measured(a=trap(), b=trap(trapped="same"))))
    assert "<span>a: one and the other</span>" in text
    assert '<td class="number">+10 %<small>not told from 0' in text
    assert text.count("no difference") == 3
    assert "over 3 seeds. BERT tiny from scratch, 64 reviews of 8 tokens (bundled), 1 epoch, " in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trapped": "nowhere"}, "traps.a: arm nowhere is missing"),
        ({"quantities": ["optimizer_steps"], "matched": "noisy"}, "traps.a: optimizer_steps of arm noisy is missing"),
        ({"why": "unknown"}, "unknown key 'traps.a.why'"),
    ],
)
def test_a_trap_that_does_not_fit_the_file_is_refused(measured, changes, message):
    path = measured(a=trap(**changes))
    with pytest.raises(Refusal, match=re.escape(f"{path}: {message}; measure again")):
        compared.effects(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("settings"), "settings is missing"),
        (lambda content: content["arms"]["plain"]["seeds"]["0"].pop("eval_loss"), "arms.plain.seeds.0.eval_loss is"),
        (lambda content: content["arms"]["plain"]["seeds"]["0"].update(train_loss="low"), "arms.plain.seeds.0.train_"),
        (lambda content: content.update(arms=[]), "arms=[]: "),
    ],
)
def test_a_file_of_something_else_is_refused(measured, change, message):
    path = measured(a=trap())
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(Refusal, match=re.escape(f"{path}: {message}")) as refusal:
        traps.read_or_begin(path, False)
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------- the traps themselves


def test_every_trap_has_its_arms_and_every_arm_a_trap():
    assert {name for trap in traps.TRAPS.values() for name in traps.arms_of(trap)} == set(traps.ARMS)


@pytest.mark.parametrize("name", traps.ARMS)
def test_arms_train_on_sixteen_sequences_a_step_and_say_known_things(name):
    asked = traps.asked_of(name)
    program = asked["program"]
    assert set(program) == set(traps.PROGRAM)
    sequences = program["micro_batch_size"] * program["gradient_accumulation_steps"]
    assert sequences * asked["accelerate_file"]["num_processes"] == 16
    if asked["deepspeed_json"] and name != "zero2-2x-engine-clips":
        assert asked["deepspeed_json"]["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--output"),
        (["--output", "here.json", "--trap", "nonsense"], "--trap nonsense: is unknown; take one of unmatched"),
        (["--output", "here.json", "--seeds", "0"], "--seeds 0: must be a whole number of at least 1"),
        (["--output", "nowhere/here.json"], "there is no folder nowhere; make it"),
        (["--output", "here.json", "--data-dir", "nowhere"], "data_dir nowhere does not exist"),
    ],
)
def test_bad_input_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=message) as refused:
        cli.run(["traps", *arguments])
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_other_settings_are_refused(tmp_path):
    path = tmp_path / "traps.json"
    path.write_text(json.dumps({**traps.read_or_begin(path, False), "settings": {"size": "mini"}}))
    with pytest.raises(Refusal, match="made with other settings"):
        cli.run(["traps", "--output", str(path)])


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        (
            ["[rank0]: Traceback", "[rank0]:   x()", "[rank0]: ValueError: no such thing", "ChildFailedError: it said"],
            RunFailed,
            "single: ValueError: no such thing",
        ),
        (["OSError: no network", "study.errors.Refusal: no hub; take files"], Refusal, "no hub; take files"),
        ([], RunFailed, "single: ended with status 1"),
    ],
)
def test_a_launch_that_failed_says_why(lines, error, message, monkeypatch):
    ended = subprocess.CompletedProcess([], 1, stderr="\n".join(lines))
    monkeypatch.setattr(traps.child.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(error, match=f"^{message}$"):
        traps.start("single", [0], None)


TRAP = ["zero-study", "traps", "--seeds", "1", "--trap", "one-process-instead-of-two", "--output"]


@pytest.fixture
def one_process_instead_of_two():
    return launching.once("traps", measure) / "traps.json"


def measure(folder) -> None:
    done = launching.attempt([*TRAP, folder / "traps.json"])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_a_trap_differs_and_its_matched_arm_does_not(one_process_instead_of_two):
    path = one_process_instead_of_two
    arms = compared.read(path)["arms"]
    assert {name: facts["ran"]["world_size"] for name, facts in arms.items()} == {
        "single": 1,
        "multi-cpu-2x": 1,  # though its file says two
        "ddp-2x": 2,
    }
    found = compared.effects(path).set_index(["quantity", "arm"]).difference
    assert abs(found["train_loss", "trapped"]) > 0.01
    assert abs(found["train_loss", "matched"]) < 1e-5
    assert found["sequences_per_program_step", "trapped"] == -0.5
    assert found["optimizer_steps", "trapped"] == 1


def test_what_is_in_the_file_is_kept(one_process_instead_of_two):
    before = one_process_instead_of_two.read_bytes()
    again = launching.attempt([*TRAP, one_process_instead_of_two])
    assert (again.returncode, again.stdout) == (0, "")
    assert one_process_instead_of_two.read_bytes() == before
