"""The published protocol: what is compared with what, effects and their words, and its programs run for real."""

from __future__ import annotations

import json
import re
import sys

import launching
import pytest

from study import cli
from study.config import build_config
from study.engines.this_machine import Machine
from study.errors import Refusal, RunFailed
from study.published import effects
from study.published import protocol as experiment
from study.published.effects import DEFECTS, METRICS, PROGRAMS
from study.report.pages import published as pages

COMPARISONS = {(title, name): one for title, group in pages.GROUPS for name, one in group.items()}
COMMITTED = launching.ROOT / "reports" / "cpu" / "published" / "protocol.json"


def arm(name: str, loss: float, **other) -> dict:
    return {
        "arm": name,
        "ran": {"batch_size": int(name.split("-")[1])},
        "logged_eval_loss": loss,
        "logged_train_loss": loss,
        "held_out_loss": loss,
        "epoch_losses": [9.0, loss],
        "seconds": 80.0,
        "cpu_seconds": 8.0,
        "step_seconds": 1.0,
        "step_cpu_seconds": 0.1,
        "peak_bytes": 100,
        "life_peak_bytes": 200,
        **other,
    }


def results(*losses: tuple[float, float], gpus=(), **other) -> dict:
    """Repeats of the published program, whose first and last arm had these losses."""
    runs = {
        f"published/{repeat}": {
            "arms": [arm("plain-8", plain), arm("zero-8", plain), arm("zero-16", zero, **other)],
        }
        for repeat, (plain, zero) in enumerate(losses)
    }
    return {"runs": runs, "machine": {"gpus": list(gpus)}}


# ---------------------------------------------------------------- what is compared


@pytest.mark.parametrize("place", COMPARISONS)
def test_a_comparison_is_of_arms_that_there_are(place):
    one = COMPARISONS[place]
    (plain, first), (zero, second) = one.plain, one.zero
    assert PROGRAMS[plain].arms[first].startswith("plain-")
    assert PROGRAMS[zero].arms[second].startswith("zero-")
    assert set(one.reading) == set(METRICS)


def test_every_program_is_compared():
    used = {name for one in COMPARISONS.values() for name, _ in (one.plain, one.zero)}
    assert used == set(PROGRAMS)


def test_every_defect_is_mended_alone_and_left_alone():
    assert set(effects.MENDED_ALONE) == set(DEFECTS)
    assert set(effects.LEFT_ALONE) == set(DEFECTS) - {"one-seed", "fixed-order"}


def test_one_thing_differs_where_one_defect_is_mended_or_left():
    """Each comparison differs from the published, or the mended one, in its programs or in its reading, not in both."""
    for base, group in ((effects.AS_PUBLISHED, effects.MENDED_ALONE), (effects.MENDED, effects.LEFT_ALONE)):
        for name, one in group.items():
            read_otherwise = one.reading != base.reading
            assert read_otherwise == (name in effects.READING_OF)
            assert one != base


# ---------------------------------------------------------------- effects


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([(1.0, 0.90), (1.0, 0.91), (1.0, 0.92)], "better"),
        ([(1.0, 1.10), (1.0, 1.09), (1.0, 1.08)], "worse"),
        ([(1.0, 1.10), (1.0, 0.90), (1.0, 1.02)], "not told apart"),
        ([(1.0, 1.0000001), (1.0, 0.9999999)], "no difference"),
        ([(1.0, 1.0), (2.0, 2.0)], "no difference"),
        ([(1.0, 0.9)], "one repeat"),
    ],
)
def test_an_effect_has_a_word(losses, word):
    assert effects.effect(results(*losses), effects.AS_PUBLISHED, "validation loss").word == word


def test_an_effect_is_taken_repeat_by_repeat():
    found = effects.effect(results((1.0, 0.9), (2.0, 1.6)), effects.AS_PUBLISHED, "training loss")
    assert found.values == pytest.approx({0: -0.1, 1: -0.2})
    assert found.mean == pytest.approx(-0.15)
    assert found.low < -0.15 < found.high


def test_repeats_of_one_training_are_no_evidence():
    """With seed 42 and an equal head nothing is drawn anew: on a GPU they would differ by rounding alone."""
    found = results((1.0, 0.9), (1.0, 0.9 + 1e-7))
    found["runs"] = {name.replace("published", "seeded-head"): run for name, run in found["runs"].items()}
    one = effects.MENDED_ALONE["head-unseeded"]
    assert effects.effect(found, one, "validation loss").word == "the same each time"
    assert effects.effect(found, one, "peak memory").word == "no difference"
    assert effects.added({**results((1.0, 0.9), (1.0, 0.9)), **found}, "head-unseeded", "training loss") is None


def test_what_a_defect_adds_is_taken_repeat_by_repeat():
    found = results((1.0, 0.9), (1.0, 0.8))
    mended = results((1.0, 1.0), (1.0, 0.95))["runs"]
    found["runs"] |= {name.replace("published", "fresh"): run for name, run in mended.items()}
    adds = effects.added(found, "same-model", "validation loss")
    assert adds.values == pytest.approx({0: -0.1, 1: -0.15})
    assert effects.added(found, "one-seed", "validation loss") is None  # was not run


def test_times_are_the_processors_on_a_cpu_and_of_a_review():
    times = {"cpu_seconds": 16.0, "seconds": 20.0, "step_seconds": 1.0, "step_cpu_seconds": 0.4}
    on_cpu, on_gpu = results((1, 1), **times), results((1, 1), gpus=["one"], **times)
    assert effects.effect(on_cpu, effects.AS_PUBLISHED, "time").mean == pytest.approx(1.0)
    assert effects.effect(on_gpu, effects.AS_PUBLISHED, "time").mean == pytest.approx(-0.75)
    by_step = effects.MENDED_ALONE["timing-span"]
    assert effects.effect(on_cpu, by_step, "time").mean == pytest.approx(1.0)  # 0.4 s of 16 against 0.1 s of 8
    assert effects.effect(on_gpu, by_step, "time").mean == pytest.approx(-0.5)


def test_an_arm_that_failed_has_no_effect():
    found = results((1.0, 0.9))
    found["runs"]["published/0"]["arms"][2] = {"arm": "zero-16", "error": "RuntimeError: it broke"}
    assert effects.effect(found, effects.AS_PUBLISHED, "time") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("machine"), "machine is missing"),
        (lambda c: c.update(extra=1), "unknown key 'extra'"),
        (lambda c: c["runs"]["published/0"].pop("arms"), "runs.published/0.arms is missing"),
        (lambda c: c["runs"]["published/0"]["arms"][0].pop("seconds"), "runs.published/0.arms.0.ended.seconds is"),
        (lambda c: c["runs"].update({"best/0": c["runs"]["published/0"]}), "runs: best is no program; take it out"),
    ],
)
def test_results_that_are_none_are_refused(change, message, tmp_path):
    content = json.loads(COMMITTED.read_text())
    content["runs"] = {"published/0": content["runs"]["published/0"]}
    change(content)
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps(content))
    with pytest.raises(Refusal, match=re.escape(f"{path}: {message}")) as refusal:
        effects.read(path)
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------- the experiment


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats 0: must be a whole number of at least 1"),
        (["--program", "best"], "--program best: is unknown; take one of published, honoured"),
        (["--size", "huge"], "size 'huge' is not one of bert-imdb's"),
        (["--size", "large"], "--size large: its body would be trained from scratch, which works for tiny, micro,"),
        (["--data", "files"], "--data files and --data-dir FOLDER belong together"),
        (["--num-train-examples", "100000"], "num_train_examples 100000 is more than"),
        (["--num-train-examples", "80"], "--num-train-examples 80: is too few for the program to log a loss; give at"),
    ],
)
def test_a_wrong_request_is_refused(words, message, tmp_path):
    with pytest.raises(Refusal, match=re.escape(message)):
        cli.run(["protocol", *words, "--output", str(tmp_path / "out.json")])
    assert not list(tmp_path.iterdir())


def test_results_of_another_experiment_are_kept(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text(COMMITTED.read_text())
    with pytest.raises(Refusal, match="holds another experiment; name another file"):
        cli.run(["protocol", "--output", str(path)])
    assert path.read_text() == COMMITTED.read_text()


def test_repeats_begin_with_other_programs():
    assert experiment._rotated(["a", "b", "c"], 4) == ["b", "c", "a"]


def test_a_folder_that_is_not_there_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(Refusal, match=r"there is no folder .*; make it"):
        cli.run(["protocol", "--output", str(tmp_path / "none" / "out.json")])


def test_the_protocol_is_of_one_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(experiment.this_machine, "find", lambda: Machine((1, 1), 1))
    with pytest.raises(
        Refusal, match=re.escape("runs on one GPU, this machine has 2; hide the others (CUDA_VISIBLE_DEVICES=0)")
    ):
        cli.run(["protocol", "--output", str(tmp_path / "out.json")])


def test_runs_of_two_machines_are_not_put_into_one_file(tmp_path):
    path = tmp_path / "out.json"
    one = dict.fromkeys(experiment.SAME, "one")
    assert experiment._same_machine(path, None, one) == one
    assert experiment._same_machine(path, one, {**one, "git_commit": "another"}) == one
    with pytest.raises(Refusal, match="has runs with cpu one, this machine has other; name another file"):
        experiment._same_machine(path, one, {**one, "cpu": "other"})


@pytest.mark.launches
@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("from study.errors import Refusal; raise Refusal('no hub')", Refusal, "^no hub$"),
        ("raise ValueError('no sense')", RunFailed, "^published, repeat 1: ValueError: no sense$"),
        ("raise SystemExit(3)", RunFailed, "^published, repeat 1: ended with status 3$"),
        ("import time; time.sleep(60)", RunFailed, "^published, repeat 1: not done after 3 s; try a smaller"),
    ],
)
def test_a_start_that_does_not_end_well_says_why_in_one_line(code, error, message, monkeypatch, tmp_path):
    program = tmp_path / "study_of_errors.sh"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(experiment, "TIMEOUT_SECONDS", 3)
    with pytest.raises(error, match=message):
        experiment._start(build_config("paper"), None, "published", 1, tmp_path)


@pytest.fixture
def run_small() -> dict:
    """The published program and the two arms of the mended one, for real, on the synthetic text."""
    return effects.read(launching.once("protocol", measure) / "out.json")


def measure(folder) -> None:
    path = folder / "out.json"
    words = ["--num-train-examples", "160", "--num-eval-examples", "16", "--repeats", "1", "--output", str(path)]
    for name in ("published", "mended-plain-8", "mended-zero-8"):
        words += ["--program", name]
    done = launching.attempt(["zero-study", "protocol", *words])
    assert done.returncode == 0, done.stderr
    again = launching.attempt(["zero-study", "protocol", *words])
    assert (again.returncode, again.stdout) == (0, "")  # all of it is kept


def test_the_published_program_runs_no_zero(run_small):
    arms = run_small["runs"]["published/0"]["arms"]
    assert [one["arm"] for one in arms] == ["plain-8", "zero-8", "zero-16"]
    assert {(one["ran"]["zero_stage"], one["ran"]["optimizer_class"]) for one in arms} == {(None, "AdamW")}
    assert [one["ran"]["num_steps"] for one in arms] == [20, 20, 10]
    assert len({one["first_weights"] for one in arms}) == 3  # each goes on from what the one before has learned
    assert all(one["checkpoint_bytes"] > 0 for one in arms)  # in the time that is measured


def test_the_mended_program_runs_zero_and_learns_the_same(run_small):
    plain, zero = (run_small["runs"][f"mended-{name}-8/0"]["arms"][0] for name in ("plain", "zero"))
    assert zero["ran"] == {
        **plain["ran"],
        "engine_class": "DeepSpeedEngine",
        "optimizer_class": "DeepSpeedCPUAdam",
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
    }
    assert zero["first_weights"] == plain["first_weights"]
    assert abs(effects.effect(run_small, effects.MENDED, "validation loss").mean) < effects.WITHIN
    assert abs(effects.effect(run_small, effects.MENDED, "training loss").mean) < effects.WITHIN


def test_the_pages_parts_are_made_of_it(run_small):
    text = pages.what_ran(run_small)._repr_html_()
    assert "no ZeRO, BertForSequenceClassification, AdamW" in text
    assert "what Standard BS=8 left" in text
    assert "unknown" in pages.effects_table(run_small)._repr_html_()  # most programs were not run
    assert "no value" in pages.effects_drawn(run_small, "time").svg


# ---------------------------------------------------------------- the committed results


def test_sentences_name_faults_in_words_before_their_labels():
    said = pages.protocol_in_words(effects.read(COMMITTED))._repr_html_()
    assert "one model for all arms (same-model) is enough to make ZeRO look better" in said
    assert "gone once one of these is mended: one model for all arms (same-model), all arms in one process" in said
    assert "the printed one, and every other that hands over the settings in the printed way" in said


def test_the_committed_results_are_whole():
    found = effects.read(COMMITTED)
    assert found["settings"]["data"] == "files"
    repeats = {
        name: {int(key.partition("/")[2]) for key in found["runs"] if key.partition("/")[0] == name}
        for name in PROGRAMS
    }
    assert all(len(done) >= 5 for done in repeats.values()), repeats
    for metric in ("validation loss", "training loss"):
        assert effects.effect(found, effects.MENDED, metric).word == "no difference"
    assert effects.effect(found, effects.AS_PUBLISHED, "validation loss").word == "better"
