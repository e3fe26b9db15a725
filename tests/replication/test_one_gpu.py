"""Test the list of runs for one GPU: its order, its time limit, how it is resumed and packed, and small real runs."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path

import fake_train
import launching
import one_gpu
import pytest
from click.testing import CliRunner
from one_gpu import Place, Runs

from study.compare import table
from study.records import pack, schema
from study.records.schema import Record
from study.running import checks, launch, plan, runner, studies
from study.running.estimate import Estimate, History
from study.running.runner import Slot
from zero_study import files
from zero_study.engines import this_machine
from zero_study.engines.this_machine import Machine
from zero_study.errors import Refusal
from zero_study.strategy import file

H200 = Machine((150_754_820_096,), 10**12, "NVIDIA H200")
LIST = (Runs("first", "a"), Runs("second", "b", "zero2"), Runs("third", "a2"))


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    """Three studies of two fake runs each, and nothing of this machine's."""
    for name, label in (("a", "one"), ("b", "two"), ("a2", "three")):
        (tmp_path / f"{name}.yaml").write_text(
            f"question: q\nparts: [{{flags: {{max_steps: 8}}, strategies: [ddp, zero2], label: {label}}}]\n"
        )
    monkeypatch.setattr(studies, "STUDIES", tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.setattr(one_gpu.extensions, "check", lambda *_: None)
    # Fake runs load no extension. On a clean machine a real build would take longer than the slots of these tests.
    monkeypatch.setattr(one_gpu.extensions, "provide", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    fakes(monkeypatch, Place(Path("runs"), None, True))
    return Place(Path("runs"), None, True)


def fakes(monkeypatch, place: Place, endings: dict[str, str] | None = None) -> None:
    runs = [run for item in LIST for run in item.chosen(place)[1]]
    fake_train.prepare(Path("fakes.json"), runs, endings)
    monkeypatch.setattr(launch, "command", fake_train.command(Path("fakes.json").resolve()))


def expect(monkeypatch, **seconds: float) -> None:
    """Say how long a run is expected to take, by the label of its part."""
    label = lambda run: run.run_id.rpartition("-")[2]  # noqa: E731
    monkeypatch.setattr(History, "estimate", lambda _, run: Estimate(seconds.get(label(run), 0.0), 1))


def done(place: Place) -> list[str]:
    """The runs that have an outcome, in the order in which they were started."""
    found = [schema.read_outcome(path) for path in place.folder.glob("*/*/outcome.json")]
    ordered = sorted(found, key=lambda one: (one.started_at, ["a", "b", "a2"].index(one.study), one.position))
    return [f"{one.study} {one.strategy}" for one in ordered]


def packed(place: Place) -> int:
    """Merge the pack into a new folder, and return the number of its runs."""
    verdict = pack.merge(place.folder / one_gpu.PACK, place.folder.parent / f"home{time.monotonic()}")
    return next(checked.number for checked in verdict.checked if checked.noun == "run")


# ---------------------------------------------------------------- the order, the time, the pack


@pytest.mark.slow
@pytest.mark.launches
def test_the_list_is_gone_down_in_order_and_packed(place, capsys):
    assert one_gpu.run(LIST, place, Slot(600)) == runner.ALL_OK
    assert done(place) == ["a ddp", "a zero2", "b zero2", "a2 ddp", "a2 zero2"]
    out = capsys.readouterr().out
    assert re.findall(r"^== (./3 \w+)", out, re.MULTILINE) == ["1/3 first", "2/3 second", "3/3 third"]
    assert out.count("Packed 2 runs on") == 1  # after the first item there is a pack
    assert packed(place) == 5
    assert (place.folder / one_gpu.PAGE).read_text().startswith("# Acceptance")
    before = {path: path.read_bytes() for path in Path("runs").rglob("*.json*")}
    assert one_gpu.run(LIST, place, Slot(60)) == runner.ALL_OK
    assert {path: path.read_bytes() for path in Path("runs").rglob("*.json*")} == before


@pytest.mark.launches
def test_nothing_is_started_that_will_not_end_in_time(place, monkeypatch, capsys):
    expect(monkeypatch, one=100, three=100)
    assert one_gpu.run(LIST, place, Slot(50)) == runner.SOME_WITHOUT_OUTCOME
    assert done(place) == ["b zero2"]  # not even the first; what is short still is
    out = capsys.readouterr().out
    assert "bert-imdb-tiny-ddp-2x-seed0-one: the run was not started, because it takes about 2 min" in out
    assert "some of the list is left; the same command goes on with it" in out
    assert packed(place) == 1
    expect(monkeypatch, three=100)
    assert one_gpu.run(LIST, place, Slot(50)) == runner.SOME_WITHOUT_OUTCOME
    assert sorted(done(place)) == ["a ddp", "a zero2", "b zero2"]  # begun within a second
    assert one_gpu.run(LIST, place, Slot(200)) == runner.ALL_OK
    assert packed(place) == 5


@pytest.mark.launches
def test_what_is_interrupted_is_packed_and_gone_on_with(place, monkeypatch, capsys):
    launched = launch.launch

    def interrupted(run, *options):
        if run.strategy.name == "zero2":
            raise KeyboardInterrupt
        return launched(run, *options)

    monkeypatch.setattr(launch, "launch", interrupted)
    assert one_gpu.run(LIST, place, Slot(600)) == runner.SOME_WITHOUT_OUTCOME
    assert done(place) == ["a ddp"]
    assert "== 2/3" not in capsys.readouterr().out
    assert packed(place) == 1
    monkeypatch.setattr(launch, "launch", launched)
    assert one_gpu.run(LIST, place, Slot(600)) == runner.ALL_OK
    assert packed(place) == 5


@pytest.mark.launches
def test_what_fails_or_is_refused_keeps_nothing_else_waiting(place, monkeypatch, capsys):
    fakes(monkeypatch, place, {"bert-imdb-tiny-ddp-2x-seed0-one": "crashed"})

    def refuse(*_, **__):
        raise Refusal("--data-dir data: no such folder")

    fail = {"error": refuse}
    whole = Runs.run

    def run(item, place, slot):
        return fail["error"]() if item.title == "trainer" else whole(item, place, slot)

    monkeypatch.setattr(Runs, "run", run)
    listed = (*LIST[:2], Runs("trainer", "a", "none"), LIST[2])
    assert one_gpu.run(listed, place, Slot(60)) == runner.SOME_NOT_OK
    assert len(done(place)) == 5
    assert "zero-study: --data-dir data: no such folder" in capsys.readouterr().err
    assert one_gpu.run(listed, place, Slot(60)) == runner.SOME_NOT_OK  # what failed keeps its outcome in a slot
    fail["error"] = lambda: 1 / 0  # a fault of the program's own
    assert one_gpu.run(listed, place, Slot(60)) == runner.SOME_NOT_OK
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert packed(place) == 5
    fakes(monkeypatch, place)
    assert one_gpu.run(LIST, place, Slot(60)) == runner.SOME_NOT_OK
    assert "**failed**" in (place.folder / one_gpu.PAGE).read_text()


# ---------------------------------------------------------------- the list itself


def test_every_strategy_is_accepted_in_at_most_25_launches_and_5_minutes(monkeypatch, tmp_path):
    monkeypatch.setattr(this_machine, "find", lambda: Machine((), 10**12))
    acceptance = one_gpu.ITEMS[0]
    place = Place(tmp_path, None, False)
    _, runs = acceptance.chosen(place)
    later = {run.strategy.name for run in one_gpu.ITEMS[1].chosen(place)[1]}
    left_out = set(file.names()) - {run.strategy.name for run in runs}
    assert left_out == {"zero2_cpu_offload"} <= later
    assert len(runs) <= 25
    assert acceptance.state(place).seconds < 300


def test_the_list_in_order_of_value(monkeypatch, tmp_path):
    monkeypatch.setattr(this_machine, "find", lambda: H200)
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("COLUMNS", "120")  # each title on one line
    place = Place(tmp_path, Path("data"), False)
    states = [item.state(place) for item in one_gpu.ITEMS]
    assert [state.to_run for state in states] == [21, 20, 9, 16, 13, 6, 18, 9]
    assert {(state.kept, state.skipped) for state in states} == {(0, 0)}
    displayed = one_gpu.show(one_gpu.ITEMS, place)
    rows = displayed.splitlines()[2 : 2 + len(states)]
    assert [row.split("  ")[1].strip() for row in rows] == [item.title for item in one_gpu.ITEMS]
    assert "minutes are predicted for NVIDIA H200: launches of 12 s" in displayed
    assert not list(tmp_path.iterdir())


def test_the_list_says_for_which_gpu_its_minutes_are(monkeypatch, tmp_path):
    monkeypatch.setattr(this_machine, "find", lambda: Machine((), 10**12))
    options = ["--plan", "--runs-dir", str(tmp_path)]
    displayed = CliRunner().invoke(one_gpu.main, [*options, "--gpu", "a100-40gb"])
    assert displayed.exit_code == 0
    assert "predicted for a100-40gb" in displayed.output
    unknown = CliRunner().invoke(one_gpu.main, [*options, "--gpu", "a1000-40gb"])
    assert unknown.exit_code == 2


# ---------------------------------------------------------------- real runs, in the small


# Of each item what tells most, and of the first what a CPU cannot do; the other studies are below.
REHEARSED = {
    "gpu-acceptance": r"(single|zero2)-1x-seed0-fp32|-fp16$",
    "gpu-bert-large": r"zero3-1x-seed0-bf16$",
    "gpu-gpt2-xl": r"ddp-1x-seed0-\w+-autocast",
    "gpu-lora": r"gpt-wikitext-tiny-(ddp|zero2)-1x-seed0-in_4_bits$",
}


@pytest.mark.nightly
@pytest.mark.launches
def test_the_list_in_the_small(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)  # no earlier runs
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    listed = [replace(item, ids=REHEARSED[item.study]) for item in one_gpu.ITEMS[:4]]
    monkeypatch.setattr(one_gpu, "ITEMS", tuple(listed))
    launching.use()
    done = CliRunner().invoke(one_gpu.main, ["--small", "--runs-dir", str(tmp_path / "runs")])
    assert done.exit_code == runner.ALL_OK, done.output
    place = Place(tmp_path / "runs" / "small", None, True)
    states = [item.state(place) for item in listed]
    counts = [(state.to_run, state.kept, state.skipped) for state in states]
    assert counts == [(0, 2, 1), (0, 1, 0), (0, 1, 0), (0, 2, 0)]
    assert pack.merge(place.folder / one_gpu.PACK, tmp_path / "home").checked[1].number == 6
    page = (place.folder / one_gpu.PAGE).read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `zero2` "))
    assert row == "| `zero2` | ok |  |  |  |  | ok | not run | not run | not run | not run |"
    assert "- not run: fp16 of `zero3`: --precision fp16 needs a GPU" in page
    assert "- not run: NCCL, energy, NVML, batches of `single`, `zero2`: on a CPU" in page


# ---------------------------------------------------------------- the studies of GPUs, as planned and on a CPU

ONE_GPU = ("single-gpu", "model-size", "offload", "buckets", "batch-size", "shared-gpu")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder without earlier runs, seen from the project's."""
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def make(study: studies.Study, folder: Path) -> plan.Plan:
    return plan.make_plan(study, studies.runs(study, folder=folder), folder, 1800)


@pytest.mark.parametrize("name", [*ONE_GPU, "gpu-acceptance", "gpu-bert-large", "gpu-gpt2-xl", "gpu-lora"])
def test_one_gpu_runs_what_needs_one(name, home, monkeypatch):
    """All of its one-process runs, and those that share it; the rest waits for a larger box, and is no obstacle."""
    monkeypatch.setattr(this_machine, "find", lambda: H200)
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.setattr(plan, "_blind_torch", lambda _: None)
    for one in make(studies.find(name), home).runs:
        if one.run.world_size == 1 or one.run.config.share_device:
            assert one.to_run, one
        else:
            assert one.skipped == f"needs {one.run.world_size} GPUs, found 1"


def test_every_adapter_has_a_run_without_adapter_to_compare_it_with():
    """In the batch, precision and number of steps of a run of gpu-bert-large or gpu-gpt2-xl."""
    whole = [run for name in ("gpu-bert-large", "gpu-gpt2-xl") for run in studies.runs(studies.find(name))]
    without = {"lora_rank", "load_in_4bit", "output_dir"}
    keys = {(run.strategy.name, run.config.model_dump_json(exclude=without)) for run in whole}
    adapted = studies.runs(studies.find("gpu-lora"))
    for run in adapted:
        assert (run.strategy.name, run.config.model_dump_json(exclude=without)) in keys
    assert {run.config.size for run in adapted} == {"large", "1.5b"}


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_shrunken_study_asks_nothing_that_a_cpu_has_not(name, home, monkeypatch):
    monkeypatch.setattr(
        checks.extensions, "check", lambda names: None
    )  # of which machines without a compiler have none
    whole = studies.find(name)
    shrunken = one_gpu.shrink(whole)
    skipped = {one.run.strategy.name for one in make(shrunken, home).runs if one.skipped}
    assert skipped <= {"fsdp2_cpu_offload"}  # PyTorch moves shards between a GPU and the host, DeepSpeed needs none
    assert {run.strategy.name for run in studies.runs(shrunken)} == {run.strategy.name for run in studies.runs(whole)}


def run(name: str, wanted: list[str], folder: Path, slot_seconds: float = math.inf) -> dict[str, Record]:
    """Run some of a shrunken study to their ends and return their records by the names that were asked for."""
    study = one_gpu.shrink(studies.find(name))
    by_id = {one.run_id: one for one in studies.runs(study, folder=folder)}
    chosen = {word: next(run for run_id, run in by_id.items() if f"-tiny-{word}" in run_id) for word in wanted}
    status = runner.SOME_WITHOUT_OUTCOME
    while status == runner.SOME_WITHOUT_OUTCOME:  # in slots
        status = runner.run(study, list(chosen.values()), folder, 300, False, runner.Slot(slot_seconds))
    assert status == runner.ALL_OK
    return {word: schema.read(folder / planned.run_id) for word, planned in chosen.items()}


@pytest.mark.nightly
@pytest.mark.launches
def test_single_gpu_in_slots_and_home(home):
    """One strategy of each kind of engine. All of them run on simulated GPUs (test_simulated_gpu.py)."""
    names = ["single", "ddp", "zero2", "zero3"]
    found = run("single-gpu", [f"{name}-1x" for name in names], home / "runs", slot_seconds=60)
    engines = {one.strategy: one.proof.engine_class for one in found.values()}
    expected = dict.fromkeys(names, "DeepSpeedEngine")
    assert engines == expected | {"single": "BertForSequenceClassification", "ddp": "DistributedDataParallel"}
    assert {one.proof.world_size for one in found.values()} == {1}
    alike = [one.final_loss for one in found.values() if one.config["global_batch_size"] == 4]
    assert alike == pytest.approx([alike[0]] * len(alike), rel=1e-5)

    pack.pack([home / "runs"], home / "box.zip")
    assert pack.merge(home / "box.zip", home / "records").checked[1].number == len(found)
    assert set(table.read([home / "records"])["strategy"]) == set(names)


@pytest.mark.nightly
@pytest.mark.launches
@pytest.mark.parametrize(
    ("name", "wanted", "proof"),
    [
        ("offload", "zero3_cpu_offload-1x", {"precision": "bf16", "offload_param_device": "cpu"}),
        ("buckets", "zero3_live_0-1x", {"precision": "bf16", "max_live_parameters": 0}),
        ("batch-size", "zero2-1x-seed0-batch8", {"precision": "bf16-autocast", "gradient_accumulation_steps": 4}),
    ],
)  # fmt: skip
def test_others_in_the_small(home, name, wanted, proof):
    (found,) = run(name, [wanted], home / "runs").values()
    assert found.status == "ok"
    assert {key: getattr(found.proof, key) for key in proof} == proof


@pytest.mark.slow
@pytest.mark.launches
def test_ranks_that_share_a_device_are_marked(home):
    """As on a GPU: each rank the first of its machine, in a group of gloo's that was there before the engine."""
    found = run("shared-gpu", ["single-1x", "ddp-2x", "zero3_tuned-2x"], home / "runs")
    ddp, zero3 = found["ddp-2x"], found["zero3_tuned-2x"]
    assert {one.proof.backend for one in (ddp, zero3)} == {"gloo"}
    assert ddp.final_loss == pytest.approx(zero3.final_loss, rel=1e-5)
    assert max(rank.model_states for rank in zero3.model_state_bytes) < 0.8 * ddp.model_state_bytes[0].model_states
    rows = table.read([home / "runs"]).set_index("strategy")
    assert rows["oversubscribed"].to_dict() == {"single": False, "ddp": True, "zero3_tuned": True}
    assert rows["rank_tensor_bytes"].map(len).to_dict() == {"single": 1, "ddp": 2, "zero3_tuned": 2}
