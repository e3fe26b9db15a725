"""The study's licence to compare at all: every strategy trains the same run, within 1e-5 in fp32, step by step.

So do one process, one with accumulation and two. `zero-study run parity` does the whole grid. Most of these trainings
are forked: what `accelerate launch` starts leaves the same record.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import launching
import pytest

from study.records.schema import Sharding
from study.running import studies
from zero_study.strategy import file

pytestmark = pytest.mark.launches

TOLERANCE = 1e-5
SHARDED = [name for name in file.names() if name.startswith("zero") or name in ("fsdp2", "fsdp2_no_reshard")]
# One of each kind of engine; and of each device that something of it is offloaded to.
KINDS = ("ddp", "zero2", "zero3", "fsdp2", "zero2_cpu_offload", "zero3_nvme_offload")
SWAPPED = ("swap_bytes_read", "swap_bytes_written")
CLIPPED = {"workload": "bert-imdb", "gradient_clipping": 0.5, "dropout": 0.1}
# Batches of 8, 8 and 2, or of four 4 and a 2: a mean of their means would be another loss.
UNEVEN_EVALUATION = {"num_eval_examples": 18}
UNCLIPPED = {"workload": "gpt-wikitext", "gradient_clipping": 0, "dropout": 0}
# Of one process with two micro batches per step, in test_train.py too.
WHOLE = {"workload": "bert-imdb", "gradient_clipping": 0.5, "dropout": 0, "global_batch_size": 8, **UNEVEN_EVALUATION}
ACCUMULATED = {**WHOLE, "micro_batch_size": 4}


def test_the_first_study_shows_equal_losses_and_times_on_one_process_and_on_two():
    flags = studies.find("smoke").parts[-1].flags
    single, ddp = (launching.run(name, num, **flags).record for name, num in (("single", 1), ("ddp", 2)))
    assert f"{single.final_loss:.4f}" == f"{ddp.final_loss:.4f}"
    assert None not in (single.timing.median_seconds, ddp.timing.median_seconds)


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def assert_same_run(run: launching.Run, reference: launching.Run) -> None:
    assert run.record.initial_parameters.sha256 == reference.record.initial_parameters.sha256
    assert len(run.steps) == len(reference.steps) > 0
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        assert relative(mine["loss"], theirs["loss"]) < TOLERANCE, mine["step"]
        assert relative(mine["grad_norm"], theirs["grad_norm"]) < TOLERANCE, mine["step"]
        assert mine["learning_rate"] == theirs["learning_rate"]
        assert (mine["tokens"], mine["samples"]) == (theirs["tokens"], theirs["samples"])
    mine, theirs = run.record.final_parameters, reference.record.final_parameters
    assert relative(mine.absolute_sum, theirs.absolute_sum) < TOLERANCE
    assert relative(mine.square_sum, theirs.square_sum) < TOLERANCE
    assert mine.sha256 != run.record.initial_parameters.sha256


def kinds(names: Iterable[str], quick: Collection[str] = KINDS, slow: Collection[str] = ()) -> list[Any]:
    """Parameters of a test: those among the fast tests as they are, the others marked `slow` or `nightly`."""
    marks = {name: pytest.mark.slow if name in slow else pytest.mark.nightly for name in names if name not in quick}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def facts_and_peaks(run: launching.Run) -> tuple[dict[str, Any], list[int]]:
    """All that a run left but times, memory of whole processes, and the digests over these; peaks and bytes swapped.

    A peak hangs on when gloo's threads let go of a tensor, by some bytes, and what is read from a disk on which buffers
    a prefetch still finds in memory, by 4 % of all as seen. DeepSpeed sets a variable as it is imported:
    a fork has it under DDP too, and the tests' own process from some moment on.
    """
    content = json.loads(run.record.model_dump_json().replace(run.run_dir.name, "RUN"))
    assert content["machine"]["imports"]["libraries"].pop("deepspeed", {"changed": []})["changed"] == []
    content["machine"]["environment"].pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    of_a_moment = {"started_at", "wall_seconds", "timing", "load"}
    digests = {"config_sha256", "steps_sha256", "record_sha256"}
    peaks = [bytes_ for name in SWAPPED for bytes_ in content["proof"].pop(name) or ()]
    for rank in content["peak_memory"]:
        assert all(phase.pop("resident_bytes") > 0 for phase in rank.values())
        peaks += [phase.pop("tensor_bytes") or 0 for phase in rank.values()]
        assert all((phase.pop("unreleased_bytes") or 0) >= 0 for phase in rank.values())  # of those threads
    facts = {name: value for name, value in content.items() if name not in of_a_moment | digests}
    facts["steps"] = [{name: value for name, value in line.items() if "seconds" not in name} for line in run.steps]
    facts["files"] = sorted(path.name for path in run.run_dir.iterdir())
    return facts, peaks


@pytest.mark.parametrize("name", kinds(KINDS, (), slow=["zero3"]))
def test_a_forked_training_leaves_what_a_launch_leaves(name):
    """To the last bit: losses, states, collectives, proof, environment; so other tests need no launch."""
    num_processes = file.read_strategy(file.find_strategy(name)).num_processes
    forked, peaks = facts_and_peaks(launching.run(name, num_processes, **CLIPPED))
    launched, peaks_launched = facts_and_peaks(launching.launch(name, num_processes, **CLIPPED))
    assert forked == launched
    assert peaks == pytest.approx(peaks_launched, rel=0.1 if name == "zero3_nvme_offload" else 1e-2)


# Each kind of engine is among the fast tests once: with clipping and dropout, or without.
@pytest.mark.parametrize("name", kinds(SHARDED, {"zero2", "zero3", "fsdp2"}, slow=KINDS))
def test_every_strategy_trains_what_ddp_trains_with_clipping_and_dropout(name):
    reference = launching.run("ddp", **CLIPPED)
    assert max(line["grad_norm"] for line in reference.steps) > CLIPPED["gradient_clipping"]  # it clips
    assert_same_run(launching.run(name, **CLIPPED), reference)


@pytest.mark.parametrize("name", kinds(SHARDED, {"fsdp2"}, slow=KINDS))
def test_every_strategy_trains_what_ddp_trains_without_clipping_and_dropout(name):
    reference = launching.run("ddp", **UNCLIPPED)
    assert max(line["grad_norm"] for line in reference.steps) > 1  # so the engine's own default of 1.0 would show
    run = launching.run(name, **UNCLIPPED)
    assert run.record.proof.gradient_clipping == 0
    assert_same_run(run, reference)


@pytest.mark.parametrize("flags", [CLIPPED, pytest.param({**UNCLIPPED, "micro_batch_size": 2}, marks=pytest.mark.slow)])
def test_ddp_with_views_trains_what_ddp_trains_to_the_bit(flags):
    run, reference = launching.run("ddp_tuned", **flags), launching.run("ddp", **flags)
    assert_same_run(run, reference)
    assert run.record.final_parameters == reference.record.final_parameters
    assert run.record.collectives_per_step == reference.record.collectives_per_step


@pytest.mark.parametrize("workload", kinds(["bert-imdb", "gpt-wikitext"], {"bert-imdb"}, slow={"gpt-wikitext"}))
def test_world_size_and_accumulation_do_not_change_the_run(workload):
    flags = {**WHOLE, "workload": workload}
    whole = launching.run("single", num_processes=1, **flags)
    accumulated = launching.run("single", num_processes=1, **{**ACCUMULATED, "workload": workload})
    assert accumulated.record.proof.gradient_accumulation_steps == 2
    spread = launching.run("ddp", **flags)
    for run in (accumulated, spread):
        assert_same_run(run, whole)
        assert relative(run.record.evaluation[-1]["loss"], whole.record.evaluation[-1]["loss"]) < TOLERANCE


@pytest.mark.parametrize("name", kinds(["zero2", "zero3", "fsdp2"], {"zero3"}, slow={"zero2", "fsdp2"}))
def test_accumulation_of_shards(name):
    whole = launching.run("single", num_processes=1, **WHOLE)
    more = {"activation_checkpointing": True} if name == "fsdp2" else {}
    run = launching.run(name, micro_batch_size=2, **WHOLE, **more)
    assert run.record.proof.gradient_accumulation_steps == 2
    assert_same_run(run, whole)


@pytest.mark.parametrize("key", ["loss", "grad_norm", "learning_rate", "tokens"])
def test_one_step_that_differs_makes_another_run(key):
    """The comparison can fail."""
    run = launching.run("ddp", **CLIPPED)
    steps = [{**line, key: line[key] * (1 + 2 * TOLERANCE * (line["step"] == 5))} for line in run.steps]
    with pytest.raises(AssertionError):
        assert_same_run(replace(run, steps=steps), run)


@pytest.mark.slow
def test_clipping_changes_the_run():
    """A run that clips elsewhere is another run."""
    other = launching.run("ddp", **{**CLIPPED, "gradient_clipping": 0})
    with pytest.raises(AssertionError):
        assert_same_run(other, launching.run("ddp", **CLIPPED))


# ---------------------------------------------------------------- PyTorch's own sharding


def test_bert_is_sharded_block_by_block():
    """transformers names BertEmbeddings as a unit too, and accelerate shards its table once more: a TypeError."""
    run = launching.run("fsdp2", **CLIPPED)
    assert run.record.proof.sharding == Sharding(
        units={"BertForSequenceClassification": 1, "Embedding": 1, "BertLayer": 2}, reshard_after_forward=True,
        sharded_parameters=41, unsharded_parameters=0, mesh=[2], compute_dtypes=["float32"],
        reduce_dtypes=["float32"], offloads=False,
    )  # fmt: skip
    held = [states.model_states for states in run.record.model_state_bytes]
    assert held == pytest.approx([8 * run.record.num_params] * 2, rel=1e-3)  # 16 bytes a parameter, halved


@pytest.mark.slow
def test_parameters_that_are_kept_are_gathered_once():
    gathers, kept = (
        next(c for c in launching.run(name, **CLIPPED).record.collectives_per_step if c.kind == "all_gather")
        for name in ("fsdp2", "fsdp2_no_reshard")
    )
    assert gathers.bytes > 1.5 * kept.bytes
    assert launching.run("fsdp2_no_reshard", **CLIPPED).record.proof.sharding.reshard_after_forward is False


@pytest.mark.slow
def test_replicas_of_shards_train_the_same():
    run = launching.run("fsdp2_hybrid", 4, **UNCLIPPED)
    assert_same_run(run, launching.run("ddp", **UNCLIPPED))
    assert run.record.proof.sharding.mesh == [2, 2]
    assert run.record.proof.world_size == 4
    held = [states.model_states for states in run.record.model_state_bytes]
    assert held == pytest.approx([8 * run.record.num_params] * 4, rel=1e-3)  # of the two in a replica, not of four


def test_bf16_is_of_fp32_shards():
    """DeepSpeed's class: fp32 masters that begin rounded, bf16 products. But gradients are reduced in fp32."""
    run = launching.run("fsdp2", precision="bf16", **{**CLIPPED, "max_steps": 6})
    result = run.record.proof
    assert (result.precision, result.parameter_dtypes, result.moment_dtypes) == ("bf16", ["float32"], ["float32"])
    assert (result.sharding.compute_dtypes, result.sharding.reduce_dtypes) == (["bfloat16"], ["float32"])


@pytest.mark.slow
def test_bf16_begins_and_trains_as_deepspeeds():
    run = launching.run("fsdp2", precision="bf16", **UNCLIPPED)
    other = launching.run("zero3", precision="bf16", **UNCLIPPED)
    assert run.record.initial_parameters.sha256 == other.record.initial_parameters.sha256
    for mine, theirs in zip(run.steps, other.steps, strict=True):
        assert relative(mine["loss"], theirs["loss"]) < 1e-3, mine["step"]
    assert run.record.initial_parameters.sha256 != launching.run("fsdp2", **UNCLIPPED).record.initial_parameters.sha256
