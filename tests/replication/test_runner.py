"""Test that a study runs to its end, whatever happens to its runs and to its runner. Uses fake runs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import fake_train
import launching
import pytest

from study.records import schema
from study.records.schema import Outcome
from study.records.simulation import SIMULATED_GPUS
from study.running import checks, launch, lock, runner, studies
from study.running.estimate import Estimate, History
from zero_study import cli, files
from zero_study.errors import Refusal

STUDY = """\
question: Which one?
parts:
  - flags: {max_steps: 8}
    strategies: [single, zero2, zero3]
    seeds: [0, 1]
"""
ONE = STUDY.replace("[0, 1]", "[0]").replace("[single, zero2, zero3]", "[single]")
LADDER = """\
question: Which one?
parts:
  - flags: {num_train_examples: 512}
    strategies: [ddp]
    global_batch_sizes: [8, 16, 32]
    seeds: [0, 1]
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of six fake runs, and nothing of this machine's."""
    (tmp_path / "mine.yaml").write_text(STUDY)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.yaml"


def run(path: Path, monkeypatch, endings: dict[str, str] | None = None, **options) -> int:
    study = studies.find(str(path))
    runs = studies.runs(study)
    fakes = path.with_suffix(".json")
    fake_train.prepare(fakes, runs, endings)
    monkeypatch.setattr(launch, "command", fake_train.command(fakes))
    slot = runner.Slot(options.pop("slot_seconds", math.inf))
    options = {"timeout_seconds": 60, "fail_fast": False, "slot": slot, **options}
    return runner.run(study, runs, Path("runs") / study.name, **options)


def outcomes(folder: Path) -> dict[str, Outcome]:
    result = [schema.read_outcome(path) for path in folder.glob("*/outcome.json")]
    return {outcome.run_id: outcome for outcome in result}


# ---------------------------------------------------------------- outcomes


@pytest.mark.launches
def test_every_run_has_an_outcome_and_finished_ones_are_kept(study, monkeypatch, capsys):
    assert run(study, monkeypatch) == runner.ALL_OK
    first = outcomes(Path("runs/mine"))
    planned = studies.runs(studies.find("mine.yaml"))
    assert [first[one.run_id].position for one in planned] == list(range(1, 7))
    assert [first[one.run_id].round for one in planned] == [one.round for one in planned]
    one = first["bert-imdb-tiny-zero2-2x-seed1"]
    assert (one.study, one.status, one.message) == ("mine", "ok", "final loss 0.6210")
    assert (one.workload, one.size, one.strategy, one.world_size, one.seed) == ("bert-imdb", "tiny", "zero2", 2, 1)
    assert (one.global_batch_size, one.returncode, one.stderr_tail) == (8, 0, [])
    assert one.command[-2:] == ["--output-dir", "runs/mine/bert-imdb-tiny-zero2-2x-seed1"]
    assert one.wall_seconds > 0
    assert "6 to run, 0 kept, 0 skipped; about 2 min, which is a guess" in capsys.readouterr().out

    before = {path: path.read_bytes() for path in Path("runs").rglob("*.json*")}
    assert run(study, monkeypatch) == runner.ALL_OK
    assert {path: path.read_bytes() for path in Path("runs").rglob("*.json*")} == before
    out = capsys.readouterr().out
    assert "0 to run, 6 kept, 0 skipped" in out
    assert "[3/6] bert-imdb-tiny-zero3-2x-seed0: kept, ok" in out


@pytest.mark.parametrize("simulated", [False, True])
def test_an_outcome_says_whether_gpus_were_simulated(simulated, study, monkeypatch):
    def refuse(_):
        raise Refusal("not here")

    monkeypatch.setattr(checks, "check", refuse)
    if simulated:
        monkeypatch.setenv(SIMULATED_GPUS, "{}")
    run(study, monkeypatch)
    result = outcomes(Path("runs/mine")).values()
    assert {(one.status, one.simulated_gpus) for one in result} == {("skipped", simulated)}


@pytest.mark.launches
def test_a_run_whose_extension_does_not_build_is_skipped_with_the_reason(study, monkeypatch, capsys):
    def provide(run, say):
        say(f"Building for {run.strategy.name}")
        if run.strategy.name == "zero2":
            raise Refusal("it does not build here:\n  | fatal error")

    monkeypatch.setattr(checks, "provide_extensions", provide)
    assert run(study, monkeypatch) == runner.ALL_OK
    result = {one.strategy: (one.status, one.message) for one in outcomes(Path("runs/mine")).values()}
    assert result["zero2"] == ("skipped", "it does not build here:")
    assert {result[name][0] for name in ("single", "zero3")} == {"ok"}
    assert "[3/6] bert-imdb-tiny-zero3-2x-seed0: Building for zero3" in capsys.readouterr().out


@pytest.mark.launches
def test_runs_that_end_badly_have_their_outcomes_and_are_run_again(study, monkeypatch, capsys):
    cases = {
        "single-1x-seed0": ("crashed", "crashed", "RuntimeError: broken", 1),
        "single-1x-seed1": ("out_of_memory", "out_of_memory", "OutOfMemoryError: CUDA out of memory", 1),
        "zero2-2x-seed0": ("killed", "killed", "the launcher was ended by SIGKILL, ", -9),
        "zero2-2x-seed1": ("failed", "failed", "step 2: the loss is nan", 1),
        "zero3-2x-seed0": ("refused", "misconfigured", "./data cannot be read; mend it", 2),
        "zero3-2x-seed1": ("crashed_after_result", "crashed", "exit status 1, after its record was written", 1),
    }
    endings = {f"bert-imdb-tiny-{name}": ending for name, (ending, *_) in cases.items()}
    assert run(study, monkeypatch, endings) == runner.SOME_NOT_OK
    result = outcomes(Path("runs/mine"))
    for name, (ending, status, message, returncode) in cases.items():
        one = result[f"bert-imdb-tiny-{name}"]
        assert (one.status, one.returncode) == (status, returncode)
        assert one.message.startswith(message)
        assert bool(one.stderr_tail) == (ending in ("crashed", "refused"))
        assert str(study.parent) not in one.model_dump_json()
    assert result["bert-imdb-tiny-single-1x-seed0"].stderr_tail[-1] == "RuntimeError: broken"
    assert "RuntimeError: broken" in capsys.readouterr().out.partition("\n\n")[2]  # in the table

    # The next call runs again what is no result; positions go on.
    assert run(study, monkeypatch) == runner.SOME_NOT_OK  # what ran out of memory did, and is kept
    again = outcomes(Path("runs/mine"))
    assert {one.status for one in again.values()} == {"ok", "crashed", "out_of_memory"}
    assert again["bert-imdb-tiny-zero3-2x-seed1"] == result["bert-imdb-tiny-zero3-2x-seed1"]
    assert again["bert-imdb-tiny-single-1x-seed0"].position == 7
    assert sorted(one.position for one in again.values() if one.position > 6) == [7, 8, 9, 10]


@pytest.mark.launches
def test_out_of_memory_ends_a_ladder_of_batches(study, monkeypatch, capsys):
    Path("ladder.yaml").write_text(LADDER)
    middle = "bert-imdb-tiny-ddp-2x-seed{}-batch16"
    endings = dict.fromkeys(map(middle.format, (0, 1)), "out_of_memory")
    assert run(Path("ladder.yaml"), monkeypatch, endings) == runner.SOME_NOT_OK
    result = outcomes(Path("runs/ladder"))
    ended = {"batch8": "ok", "batch16": "out_of_memory", "batch32": "skipped"}
    assert {name.partition("2x-")[2]: one.status for name, one in result.items()} == {
        f"seed{seed}-{batch}": status for seed in (0, 1) for batch, status in ended.items()
    }
    skipped = result["bert-imdb-tiny-ddp-2x-seed1-batch32"]
    assert skipped.message == f"{middle.format(0)} ran out of memory with a smaller batch"
    assert (skipped.wall_seconds, skipped.returncode) == (None, None)
    place = ["--output-dir", f"runs/ladder/{skipped.run_id}"]
    assert skipped.command[-6:] == ["--global-batch-size", "32", "--seed", "1", *place]  # had it been run
    assert (skipped.config["data"], skipped.config["seed"]) == ("bundled", 1)
    assert [path.name for path in Path("runs/ladder", skipped.run_id).iterdir()] == ["outcome.json"]
    capsys.readouterr()
    run(Path("ladder.yaml"), monkeypatch)
    assert "0 to run, 4 kept, 2 skipped" in capsys.readouterr().out
    assert outcomes(Path("runs/ladder")) == result


@pytest.fixture
def expected(monkeypatch):
    """Say how long every run is expected to take."""

    def expect(seconds: float) -> None:
        monkeypatch.setattr(History, "estimate", lambda *_: Estimate(seconds, 1))

    return expect


@pytest.mark.launches
def test_a_slot_starts_nothing_that_would_not_end_in_it(study, monkeypatch, expected, capsys):
    expected(15)
    for completed in range(1, 6):  # the first has the whole slot, and the next one then not
        assert run(study, monkeypatch, slot_seconds=15) == runner.SOME_WITHOUT_OUTCOME
        assert len(outcomes(Path("runs/mine"))) == completed
    out = capsys.readouterr().out
    assert (
        "[2/6] bert-imdb-tiny-zero2-2x-seed0: the run was not started, because it takes about 15 s, and only 1" in out
    )
    assert "1 of 6 runs have no outcome yet" in " ".join(out.split())
    assert run(study, monkeypatch, slot_seconds=15) == runner.ALL_OK
    expected(1)
    more = Path("more.yaml")
    more.write_text(STUDY)
    assert run(more, monkeypatch, slot_seconds=60) == runner.ALL_OK  # all of them in one


@pytest.mark.launches
def test_what_a_slot_ends_is_a_result_only_if_it_had_all_of_it(study, monkeypatch, expected):
    expected(1)
    slow = "bert-imdb-tiny-zero2-2x-seed0"
    assert run(study, monkeypatch, {slow: "hanging"}, slot_seconds=3) == runner.SOME_WITHOUT_OUTCOME
    assert list(outcomes(Path("runs/mine"))) == ["bert-imdb-tiny-single-1x-seed0"]
    assert run(study, monkeypatch, {slow: "hanging"}, slot_seconds=3) == runner.SOME_WITHOUT_OUTCOME
    result = outcomes(Path("runs/mine"))[slow]
    assert (result.status, result.message) == ("timed_out", "ended at its time limit of 3 s")
    while run(study, monkeypatch, slot_seconds=3) == runner.SOME_WITHOUT_OUTCOME:
        pass
    assert outcomes(Path("runs/mine"))[slow] == result
    assert run(study, monkeypatch, slot_seconds=30) == runner.ALL_OK  # more time


@pytest.mark.launches
def test_a_slot_that_ends_a_run_after_its_record_loses_nothing_and_blames_nobody(study, monkeypatch, expected, capsys):
    expected(1)
    slow = "bert-imdb-tiny-zero2-2x-seed0"
    assert run(study, monkeypatch, {slow: "hanging_after_result"}, slot_seconds=3) == runner.SOME_WITHOUT_OUTCOME
    assert slow not in outcomes(Path("runs/mine"))
    assert run(study, monkeypatch) == runner.ALL_OK
    assert f"{slow}: kept, ok, final loss 0.6200" in capsys.readouterr().out
    # What has its own time, and does not end in it, is not ok.
    own = {"bert-imdb-tiny-single-1x-seed0": "hanging_after_result"}
    more = Path("more.yaml")
    more.write_text(ONE)
    assert run(more, monkeypatch, own, timeout_seconds=2) == runner.SOME_NOT_OK
    assert outcomes(Path("runs/more"))["bert-imdb-tiny-single-1x-seed0"].status == "crashed"


@pytest.mark.launches
def test_fail_fast_starts_nothing_more(study, monkeypatch, capsys):
    endings = {"bert-imdb-tiny-single-1x-seed0": "out_of_memory", "bert-imdb-tiny-zero2-2x-seed0": "crashed"}
    assert run(study, monkeypatch, endings, fail_fast=True) == runner.SOME_WITHOUT_OUTCOME
    assert len(outcomes(Path("runs/mine"))) == 2  # memory that ends is no fault
    assert "4 of 6 runs have no outcome yet" in " ".join(capsys.readouterr().out.split())


@pytest.mark.launches
def test_ctrl_c_leaves_the_run_without_an_outcome(study, monkeypatch, capsys):
    hanging = "bert-imdb-tiny-zero2-2x-seed0"
    launched = launch.launch

    def interrupted(run, *options):
        if run.run_id == hanging:
            raise KeyboardInterrupt
        return launched(run, *options)

    monkeypatch.setattr(launch, "launch", interrupted)
    assert run(study, monkeypatch) == runner.SOME_WITHOUT_OUTCOME
    assert list(outcomes(Path("runs/mine"))) == ["bert-imdb-tiny-single-1x-seed0"]
    assert "Interrupted." in capsys.readouterr().out


@pytest.mark.launches
def test_nothing_of_an_earlier_attempt_is_taken_for_the_next_ones(study, monkeypatch):
    name = "bert-imdb-tiny-single-1x-seed0"
    run(study, monkeypatch, {name: "failed"})
    run_dir = Path("runs/mine") / name
    (run_dir / "failure-rank1.json").write_text(json.dumps({"at": 0, "status": "failed", "step": 1, "error": "E: old"}))
    (run_dir / "record.json.part").write_text("half")
    (run_dir / "model.part").mkdir()
    run(study, monkeypatch, {name: "crashed"})
    assert outcomes(Path("runs/mine"))[name].message == "RuntimeError: broken"
    left = {path.name for path in run_dir.iterdir()}
    assert left == {"outcome.json", "stderr.log", "stdout.log", "steps.jsonl"}
    run(study, monkeypatch, {name: "refused"})
    assert [path.name for path in run_dir.iterdir()] == ["outcome.json"]


# ---------------------------------------------------------------- two runners, and one that is killed


@pytest.mark.launches
def test_a_second_runner_is_refused(study, monkeypatch):
    output = rf"runs/mine: process {os.getpid()} on .* is running this study in this folder.* pass another --runs-dir"
    with lock.locked_study(Path("runs/mine")), pytest.raises(Refusal, match=output):
        run(study, monkeypatch)
    assert run(study, monkeypatch) == runner.ALL_OK


@pytest.mark.launches
def test_a_runner_killed_between_record_and_outcome(study, monkeypatch):
    run(study, monkeypatch)
    name = "bert-imdb-tiny-single-1x-seed0"
    path = Path("runs/mine") / name / "outcome.json"
    before = outcomes(Path("runs/mine"))[name]
    written = (path.parent / "record.json").read_bytes()
    path.unlink()
    assert run(study, monkeypatch) == runner.ALL_OK
    result = outcomes(Path("runs/mine"))[name]
    assert (result.status, result.message) == ("ok", "final loss 0.6200")
    assert result.returncode is result.wall_seconds is None
    assert (result.position, result.command) == (7, before.command)
    assert (path.parent / "record.json").read_bytes() == written


# ---------------------------------------------------------------- the command, and the benchmark


@pytest.mark.launches
def test_commands_plan_and_run(study, monkeypatch, capsys):
    fake_train.prepare(Path("fakes.json"), studies.runs(studies.find("mine.yaml")))
    monkeypatch.setattr(launch, "command", fake_train.command(Path("fakes.json").resolve()))
    assert cli.run(["plan", "mine.yaml", "--only", "zero2", "--runs-dir", "elsewhere"]) == 0
    assert not Path("elsewhere").exists()
    assert cli.run(["run", "mine.yaml", "--only", "zero2", "--runs-dir", "elsewhere", "--fail-fast"]) == 0
    assert len(outcomes(Path("elsewhere/mine"))) == 2
    assert capsys.readouterr().out.count("\nmine: Which one?\n") == 1  # of the second, after the first's last line


@pytest.mark.launches
@pytest.mark.parametrize("ignored", [True, False])
def test_nohup_is_respected(ignored):
    """What the parent ignores stays ignored; else the end of the terminal is as Ctrl-C."""
    code = (
        "import signal; from zero_study import __main__, cli\n"
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})\n"
        "cli.run = lambda _: signal.raise_signal(signal.SIGHUP); __main__.main()"
    )
    completed = launching.attempt(["python", "-c", code])
    assert completed.returncode == (0 if ignored else 130), completed.stderr


@pytest.mark.launches
def test_an_outcome_that_cannot_be_written_is_said_and_the_study_goes_on(study, monkeypatch, capsys):
    write = runner.write_json

    def refuse_the_first(path: Path, content) -> None:
        if "single" in str(path) and "seed0" in str(path):
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(runner, "write_json", refuse_the_first)
    assert run(study, monkeypatch) == runner.ALL_OK
    output = capsys.readouterr().out
    assert "seed0/outcome.json: not written (No space left on device)" in output
    assert len(list(study.parent.glob("runs/mine/*/outcome.json"))) == 5
