"""What one real run observes of itself and leaves behind; the launches are those of the parity tests."""

from __future__ import annotations

import json
import math
import sys

import launching
import pytest
from test_parity import ACCUMULATED, CLIPPED, SHARDED, UNCLIPPED, kinds

from study.compare import predicted
from study.records import steps
from study.running.memory_limits import THRESHOLD
from zero_study import files
from zero_study.strategy import file, theory_engine
from zero_study.theory.model_states import STATE_PARTS

pytestmark = pytest.mark.launches

STEP_KEYS = steps.STEP_KEYS | {"elapsed_seconds", "data_wait_seconds", "samples"}


def volume(run: launching.Run) -> float:
    """Bytes per step, all-reduce counted twice as the paper does, over the bytes of the parameters."""
    moved = sum(c.bytes * (2 if c.kind == "all_reduce" else 1) for c in run.record.collectives_per_step)
    return moved / (4 * run.record.num_params)


def gathered(run: launching.Run) -> tuple[int, float]:
    """How many gathers there are in a step, and their bytes over those of the parameters."""
    gathers = [c for c in run.record.collectives_per_step if c.kind == "all_gather"]
    return sum(c.count for c in gathers), sum(c.bytes for c in gathers) / (4 * run.record.num_params)


NIGHTLY = {"zero1_cpu_offload", "zero3_hpz"}
FAST = {"ddp", "zero2", "zero3", "fsdp2"}  # whose runs test_parity.py has as well


@pytest.mark.parametrize("name", kinds(["ddp", *SHARDED], FAST, slow={*SHARDED} - NIGHTLY))
def test_the_record_is_complete_and_proves_the_strategy(name):
    run = launching.run(name, **CLIPPED)
    requested = file.read_strategy(file.find_strategy(name))
    facts, proof = run.record, run.record.proof
    assert facts.strategy == name
    assert facts.launcher[:4] == ["accelerate", "launch", "--config_file", f"accelerate_configs/{name}.yaml"]
    assert proof.zero_stage == requested.zero_stage
    assert proof.offload_optimizer_device == requested.offload_optimizer_device
    assert proof.offload_param_device == requested.offload_param_device
    assert proof.optimizer_class == ("AdamW" if requested.offload_optimizer_device == "none" else "DeepSpeedCPUAdam")
    assert proof.gradient_clipping == CLIPPED["gradient_clipping"]
    assert (proof.world_size, proof.backend, proof.device) == (2, "gloo", "cpu")
    assert proof.moment_dtypes == proof.gradient_dtypes == ["float32"]
    assert len(facts.model_state_bytes) == len(facts.resting_state_bytes) == len(facts.peak_memory) == 2
    phases = {"built", "prepared", "first_step", "settling_steps", "steady_steps", "evaluation"}
    assert set(facts.peak_memory[0]) == phases
    assert facts.timing.num_steps == 2  # eight, without five of warm-up and the probed one
    assert facts.timing.probed_steps == [6]
    assert [set(line) for line in run.steps] == [STEP_KEYS] * 8
    assert facts.steps_sha256 == files.sha256(run.run_dir / "steps.jsonl")
    assert facts.config_sha256 == files.sha256(run.run_dir / "config.json")
    assert json.loads((run.run_dir / "config.json").read_text())["strategy"]["yaml"] == requested.content
    assert facts.machine.get("malloc_thresholds") == (str(THRESHOLD) if sys.platform == "linux" else None)
    assert not list(run.run_dir.glob("failure-rank*"))
    assert not (run.run_dir / "swap").exists()


def test_ddps_buckets_are_measured_and_are_the_gradients_where_these_are_views():
    for name, stepping, view in (("ddp", 4, False), ("ddp_tuned", 0, True)):
        facts = launching.run(name, **CLIPPED).record
        assert facts.proof.gradient_as_bucket_view is view
        assert predicted.engine_of(facts) == theory_engine.engine_of_strategy(file.read_by_name(name), 128, 2, "fp32")
        for rank, later in zip(facts.model_state_bytes, facts.resting_state_bytes, strict=True):
            assert rank.gradients == 4 * facts.num_params
            assert rank.communication_buffers == stepping * facts.num_params
            assert (later.gradients, later.communication_buffers) == (0, 4 * facts.num_params)


def held(name: str) -> int:
    states = launching.run(name, **CLIPPED).record.model_state_bytes[0]
    return states.parameters + states.gradients + states.optimizer_states


def test_stages_2_and_3_hold_less_than_ddp():
    assert held("ddp") > held("zero2") > held("zero3")


@pytest.mark.slow
def test_model_states_fall_with_the_stage():
    assert held("ddp") == held("zero0") > held("zero1") >= held("zero2") > held("zero3")


def test_the_states_of_every_rank_are_its_own():
    """Of unlike ranks: at stage 2 the parameter across the edge of the partitions is in one rank's buffer whole."""
    record = launching.run("zero2", **CLIPPED).record
    first, second = ([getattr(rank, part) for part in STATE_PARTS] for rank in record.model_state_bytes)
    assert first != second
    assert predicted.states_error(record) == pytest.approx(0, abs=1e-5)  # of any rank; steps are counted in a few bytes


# DDP and stage 0 move 2 Psi; stages 1 and 2 all-reduce and all-gather, 3 Psi; tuned ones reduce to owners.
VOLUMES = {"ddp": 2, "zero2": 3, "zero0": 2, "zero1": 3, "zero2_tuned": 2}


@pytest.mark.parametrize("name", kinds(VOLUMES, {"ddp", "zero2"}, slow=VOLUMES))
def test_communication_is_what_the_engine_does(name):
    assert volume(launching.run(name, **CLIPPED)) == pytest.approx(VOLUMES[name], rel=0.01)


def test_ddp_on_one_process_is_ddp():
    """Accelerate alone builds none on a GPU, and has no `no_sync` on any device: each micro step would be reduced."""
    run = launching.run("ddp", 1, **ACCUMULATED)
    proof = run.record.proof
    assert (proof.engine_class, proof.world_size, proof.backend) == ("DistributedDataParallel", 1, "gloo")
    single = launching.run("single", 1, **ACCUMULATED)
    assert [step["loss"] for step in run.steps] == pytest.approx([step["loss"] for step in single.steps], rel=1e-5)
    sent = sum(one.moved_bytes for one in run.record.collectives_per_step if one.kind == "all_reduce")
    assert sent == 2 * 4 * run.record.num_params


@pytest.mark.slow
def test_zero3_tuned_releases_parameters_between_forward_and_backward():
    """It gathers them again in backward; the engine's defaults keep a small model whole until then."""
    assert gathered(launching.run("zero3", **CLIPPED))[1] == pytest.approx(1, rel=0.01)
    assert gathered(launching.run("zero3_tuned", **CLIPPED))[1] > 1.9


@pytest.mark.slow
def test_a_secondary_partition_keeps_backward_within_its_ranks():
    """On four processes hpZ of two gathers for backward among two of them, and holds half a copy more meanwhile."""
    run, plain = launching.run("zero3_hpz", 4, **CLIPPED).record, launching.run("zero3_tuned", 4, **CLIPPED).record
    assert (run.proof.secondary_partition_size, plain.proof.secondary_partition_size) == (2, 1)
    sent, sent_plain = ({c.kind: c.bytes for c in r.collectives_per_step} for r in (run, plain))
    assert sent["all_gather"] == sent["subgroup_all_gather"] == sent_plain["all_gather"] / 2
    more = run.model_state_bytes[0].parameters - plain.model_state_bytes[0].parameters
    assert more == pytest.approx(4 * run.num_params / 2, rel=1e-3)
    assert run.resting_state_bytes == plain.resting_state_bytes
    assert run.final_parameters.sha256 == plain.final_parameters.sha256


@pytest.mark.slow
def test_nvme_offload_really_swaps():
    run = launching.run("zero3_nvme_offload", **CLIPPED)
    proof = run.record.proof
    assert proof.swap_folder.endswith(f"{run.run_dir.name}/swap")
    assert not (launching.ROOT / "none").exists()  # where swap files went before
    states = 4 * run.record.num_params // 2
    assert all(written > 8 * states for written in proof.swap_bytes_written)  # eight steps, more than one tensor each
    assert all(states.swapped > 0 for states in run.record.model_state_bytes)


def test_measuring_can_be_switched_off():
    run = launching.run("ddp", **CLIPPED, measure=False)
    facts = run.record
    assert facts.model_state_bytes is facts.peak_memory is facts.collectives_per_step is None
    assert facts.timing.probed_steps == []
    measured = launching.run("ddp", **CLIPPED)
    assert facts.final_parameters == measured.record.final_parameters  # measuring changes nothing


# ---------------------------------------------------------------- flags that change how a step is computed


@pytest.mark.slow
def test_activation_checkpointing_changes_no_loss_and_gathers_parameters_once_more():
    """Under zero3_tuned, which keeps no gathered parameter: by default so small a model stays whole until backward."""
    plain = launching.run("zero3_tuned", **CLIPPED)
    recomputed = launching.run("zero3_tuned", activation_checkpointing=True, **CLIPPED)
    losses = [[line["loss"] for line in run.steps] for run in (plain, recomputed)]
    assert len(losses[0]) == launching.DEFAULTS["max_steps"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert gathered(recomputed)[0] > gathered(plain)[0] > 0


@pytest.mark.slow
def test_compiled_model_learns():
    run = launching.run("single", num_processes=1, compile=True, **UNCLIPPED)
    losses = [line["loss"] for line in run.steps]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
