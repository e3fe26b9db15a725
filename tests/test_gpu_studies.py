"""Do the studies of GPUs run: on a box with one GPU as planned, and on a CPU with tiny models by the same code?"""

from __future__ import annotations

import math
from pathlib import Path

import one_gpu
import pytest

from study import files
from study.compare import table
from study.engines import this_machine
from study.engines.this_machine import Machine
from study.records import pack, schema
from study.records.schema import Record
from study.running import checks, plan, runner, studies
from study.strategy import file

ONE_GPU = ("single-gpu", "model-size", "offload", "buckets", "batch-size", "shared-gpu")
H200 = 150_754_820_096


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder without earlier runs, seen from the project's."""
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def make(study: studies.Study, folder: Path) -> plan.Plan:
    return plan.make(study, studies.runs(study, folder=folder), folder, 1800)


@pytest.mark.parametrize("name", [*ONE_GPU, "gpu-acceptance", "gpu-bert-large", "gpu-gpt2-xl"])
def test_one_gpu_runs_what_needs_one(name, home, monkeypatch):
    """All of its one-process runs, and those that share it; the rest waits for a larger box, and is no obstacle."""
    monkeypatch.setattr(this_machine, "find", lambda: Machine((H200,), 10**12))
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.setattr(plan, "_blind_torch", lambda _: None)
    for one in make(studies.find(name), home).runs:
        if one.run.world_size == 1 or one.run.config.share_device:
            assert one.to_run, one
        else:
            assert one.skipped == f"needs {one.run.world_size} GPUs, found 1"


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_shrunken_study_asks_nothing_that_a_cpu_has_not(name, home):
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


@pytest.mark.slow
@pytest.mark.launches
def test_single_gpu_in_slots_and_home(home):
    asked = {name for part in studies.find("single-gpu").parts for name in part.strategies}
    names = [name for name in file.names() if name in asked]
    found = run("single-gpu", [f"{name}-1x" for name in names], home / "runs", slot_seconds=150)
    assert len(found) == 12
    engines = {one.strategy: one.proof.engine_class for one in found.values()}
    expected = dict.fromkeys(names, "DeepSpeedEngine")
    assert engines == expected | {"single": "BertForSequenceClassification", "ddp": "DistributedDataParallel"}
    assert {one.proof.world_size for one in found.values()} == {1}
    alike = [one.final_loss for one in found.values() if one.config["global_batch_size"] == 4]
    assert alike == pytest.approx([alike[0]] * len(alike), rel=1e-5)

    pack.pack([home / "runs"], home / "box.zip")
    assert pack.merge(home / "box.zip", home / "records") == len(found)
    assert set(table.read([home / "records"])["strategy"]) == set(names)


@pytest.mark.slow
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
