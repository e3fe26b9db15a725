"""Add predictions to recorded runs: model states, collectives, peak memory and FLOP/s.

`with_theory` adds them to the table of all runs. Only this module of the package imports `zero_study.theory`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from study.compare import facts
from study.compare.facts import require_proof
from study.records.schema import Collective, PeakMemory, Record
from zero_study.models import SIZES, swap_buffer_size
from zero_study.theory import adapters, communication, hardware, model_states, peaks, shapes
from zero_study.theory.adapters import Adapter
from zero_study.theory.communication import on_wire
from zero_study.theory.engine import Engine, StepConfig, parameter_bytes
from zero_study.theory.model_states import Difference
from zero_study.theory.model_states import StateBytes as StateBytes
from zero_study.theory.model_states import StatePart as StatePart
from zero_study.theory.model_states import StepPhase as StepPhase
from zero_study.theory.shapes import ModelShape

if TYPE_CHECKING:
    import pandas as pd

STEP_PHASES: tuple[StepPhase, ...] = model_states.STEP_PHASES
STATE_PARTS: tuple[StatePart, ...] = model_states.STATE_PARTS
REASONS = model_states.REASONS
is_known = on_wire.is_known

# The columns that `with_theory` adds, in this order. A value is NaN if the record lacks the data to compute it.
COLUMNS: dict[str, str] = {
    "peak_flops_per_second": "float64",  # of one GPU, in the run's precision
    "mfu": "float64",
    "paper_state_bytes": "float64",
    "paper_parameter_bytes": "float64",
    "paper_gradient_bytes": "float64",
    "paper_optimizer_state_bytes": "float64",
    "predicted_peak_bytes": "float64",  # of the largest rank in a steady step; NaN if theory does not know the model
    "gloo_bytes": "float64",  # that gloo sends for a step's collectives; NaN if the backend is not gloo
}


def with_theory(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of all runs with the predictions for each run added as columns (`COLUMNS`)."""
    import pandas as pd

    rows = [{} if record is None else _columns(record) for record in table["record"]]
    kinds: dict[str, Any] = dict(COLUMNS)
    joined = {
        name: pd.Series([row.get(name) for row in rows], index=table.index, dtype=kind) for name, kind in kinds.items()
    }
    utilization = table["model_flops_per_second"] / table["world_size"] / joined["peak_flops_per_second"]
    joined["mfu"] = utilization.where(~table["oversubscribed"])
    return table.assign(**joined)


def _columns(r: Record) -> dict[str, Any]:
    row: dict[str, Any] = {"peak_flops_per_second": peak_flops_per_second(r)}
    if r.model_state_bytes and r.proof and r.num_params:
        paper = paper_states(r, "stepping")
        row["paper_state_bytes"] = paper.total
        row["paper_parameter_bytes"] = paper.parameters
        row["paper_gradient_bytes"] = paper.gradients
        row["paper_optimizer_state_bytes"] = paper.optimizer_states
    if peak := step_peak(r):
        row["predicted_peak_bytes"] = peak.predicted
    if r.collectives_per_step is not None and r.proof and r.proof.backend == "gloo":
        row["gloo_bytes"] = on_wire.moved_by_gloo(r.collectives_per_step, r.world_size)
    return row


def peak_flops_per_second(r: Record) -> float | None:
    """Return the peak FLOP/s of one GPU in the run's precision.

    None on a CPU, if the GPUs are not known, or if they differ from each other.
    """
    names = {gpu["name"] for gpu in r.machine.get("gpus", [])}
    if r.proof is None or r.proof.device == "cpu" or len(names) != 1:
        return None
    if (gpu := hardware.find(names.pop())) is None:
        return None
    return hardware.peak_flops_per_second(gpu, r.proof.precision, r.machine.get("tf32"))


# ---------------------------------------------------------------- a run as the input of theory


def engine_of(r: Record) -> Engine:
    """Return a description of the engine that a run used, as an input of the predictions."""
    proof = require_proof(r)
    sharding, is_fsdp = proof.sharding, proof.distributed_type == "FSDP"
    accumulation = "fp32" if parameter_bytes(proof.precision) == 4 else r.config["accumulation_dtype"]
    swap = swap_buffer_size(facts.hidden_size(r), r.world_size) if proof.offload_param_device == "nvme" else 0
    settings = {field.name: getattr(proof, field.name, None) for field in dataclasses.fields(Engine)}
    settings |= {
        "kind": facts.engine_kind(proof),
        "zero_stage": 3 if is_fsdp else proof.zero_stage or 0,
        "accumulation_bytes": 4 if accumulation == "fp32" else 2,
        "offload_optimizer": proof.offload_optimizer_device,
        "offload_param": proof.offload_param_device,
        "persistence_threshold": proof.param_persistence_threshold,
        "param_swap_buffer_size": swap,
        "multi_rank_allreduce": proof.use_multi_rank_bucket_allreduce,
        "reshard_after_forward": sharding and sharding.reshard_after_forward,
        "replicas": facts.num_replicas(proof),
        "reduces_in_fp32": sharding is not None and sharding.reduce_dtypes == ["float32"],
    }
    return Engine(**{name: value for name, value in settings.items() if value is not None})


def shape_of(r: Record) -> ModelShape | None:
    """Return the shape of a run's model, as an input of the predictions. None if it is not known.

    None if the number of parameters in the record is not that of the workload's model. Also None if FSDP2 ran and its
    proof does not say what was sharded, because the prediction then does not know with which engine to compare.
    """
    size = SIZES.get(r.workload, {}).get(r.size)
    if size is None or r.num_params is None or facts.is_unproven(r):
        return None
    shape = (shapes.architecture_of(r.workload, r.size), size["layers"], size["hidden"])
    # What was trained beside the model's own parameters. A head that was trained is a copy.
    num_added = 0 if r.config["lora_rank"] is None else r.num_trainable_params or 0
    try:
        vocabulary = shapes.vocabulary_of(*shape, size["positions"], r.num_params - num_added)
        plain = shapes.decoder_shape(f"{r.workload} {r.size}", *shape, size["heads"], size["positions"], vocabulary)
        return adapters.with_adapter(plain, _adapter_of(r, plain.head))
    except ValueError:
        return None


def _adapter_of(r: Record, head: str) -> Adapter | None:
    return adapters.from_options(
        r.config["lora_rank"],
        r.config["lora_target"],
        dropout=r.config["lora_dropout"],
        load_in_4bit=r.config["load_in_4bit"],
        head=head,
        frozen="fp32"
        if require_proof(r).parameter_dtypes == ["float32"]
        else "16-bit",  # under FSDP2, fp32 also in bf16
    )


def job_of(r: Record) -> StepConfig:
    """Return a description of one step of a run (batch, sequence length and so on), as an input of the predictions."""
    proof = require_proof(r)
    return StepConfig(
        micro_batch_size=proof.micro_batch_size,
        sequence_length=r.config["sequence_length"],
        gradient_accumulation_steps=proof.gradient_accumulation_steps,
        activation_checkpointing=r.config["activation_checkpointing"],
        attention=r.config["attention"],
        dropout=r.config["dropout"] > 0,
        device="cpu" if proof.device == "cpu" else "gpu",
    )


# ---------------------------------------------------------------- model states


def paper_states(r: Record, phase: StepPhase) -> StateBytes:
    """Return the bytes of model states on one rank of a run, as the ZeRO paper's formula gives them.

    The formula is in arXiv:1910.02054, sec. 5. Frozen parameters have neither gradients nor optimizer states, and may
    be quantized or, under FSDP2, in fp32. The paper does not state this case.
    """
    assert r.num_params is not None
    engine = engine_of(r)
    states = model_states.paper_bytes(engine, r.num_params, phase)
    if r.num_trainable_params in (None, r.num_params):
        return states
    trained = model_states.paper_bytes(engine, r.num_trainable_params, phase)
    if (shape := shape_of(r)) is None or shape.adapter is None:
        return dataclasses.replace(trained, parameters=states.parameters)
    return dataclasses.replace(trained, parameters=trained.parameters + adapters.frozen_bytes_of_rank(shape, engine))


def state_differences(r: Record, phase: StepPhase) -> list[list[Difference]] | None:
    """Return how and why the engine's model states differ from the paper's formula, for each rank of a run.

    None if the shape of the model is not known.
    """
    if (shape := shape_of(r)) is None:
        return None
    engine, accumulates = engine_of(r), require_proof(r).gradient_accumulation_steps > 1
    return [
        model_states.engine_differences(engine, adapters.trained_sizes(shape), rank, phase, accumulates)
        for rank in range(r.world_size)
    ]


def states_error(r: Record) -> float | None:
    """Return the relative error of the predicted model states and buffers, for the rank with the largest error.

    None if it is not known.
    """
    if not r.model_state_bytes or not r.resting_state_bytes:
        return None
    errors: list[float] = []
    for phase, ranks in zip(STEP_PHASES, (r.model_state_bytes, r.resting_state_bytes), strict=True):
        if (differences_of_ranks := state_differences(r, phase)) is None:
            return None
        paper = paper_states(r, phase).total
        for states, differences in zip(ranks, differences_of_ranks, strict=True):
            predicted = paper + sum(difference.num_bytes for difference in differences)
            errors.append(predicted / sum(getattr(states, part) for part in STATE_PARTS) - 1)
    return max(errors, key=abs)


# ---------------------------------------------------------------- messages


class Sent(NamedTuple):
    """The bytes that a rank sent in a step divided by the bytes of all parameters, as measured and by two formulas."""

    measured: float
    by_gloo: float  # what gloo sends for the same collectives
    paper: float  # arXiv:1910.02054, sec. 7, extended to gradient accumulation


class Messages(NamedTuple):
    """The measured and the predicted collectives of a run in one step."""

    record: Record
    measured: dict[str, tuple[int, int]]  # kind -> count, bytes
    predicted: dict[str, tuple[int, int]]
    sent: Sent
    predicted_sent: float
    error: float  # in bytes, summed over the kinds, relative to all measured bytes

    @property
    def is_equal_in_counts(self) -> bool:
        counts, predicted = ({kind: count for kind, (count, _) in c.items()} for c in (self.measured, self.predicted))
        return counts == predicted


class MachineBytes(NamedTuple):
    """The bytes that a machine sends to other machines in a step, by the algorithms of a backend."""

    by_gloo: float
    by_nccl: float
    by_theory: float | None  # the predicted collectives, sent by gloo; None if theory does not know the model


def sent(r: Record) -> Sent | None:
    """Return the bytes that a rank sent in a step, divided by the bytes of all parameters. None if not measured."""
    if r.collectives_per_step is None or r.num_params is None:
        return None
    engine, paper = engine_of(r), 0.0
    if r.world_size > 1:
        volume = communication.paper_volume(
            engine.zero_stage, r.num_params, require_proof(r).gradient_accumulation_steps
        )
        paper = float(volume) / r.num_params
    moved = sum(c.moved_bytes for c in r.collectives_per_step)
    by_gloo = on_wire.moved_by_gloo(r.collectives_per_step, r.world_size)
    size = all_parameter_bytes(r)
    return Sent(moved / size, by_gloo / size, paper)


def all_parameter_bytes(r: Record) -> int:
    assert r.num_params is not None
    return r.num_params * parameter_bytes(require_proof(r).precision)


def messages(r: Record) -> Messages | None:
    """Return the measured and the predicted collectives of a run. None if one of them is not known.

    They are not known if they were not measured, or if the shape of the model is not known.
    """
    shape, recorded = shape_of(r), r.collectives_per_step
    if shape is None or recorded is None or (of_step := sent(r)) is None:
        return None
    predicted = communication.collectives(engine_of(r), shape, job_of(r))
    counted = {c.kind: (c.count, c.bytes) for c in recorded}
    expected = {c.kind: (c.count, c.bytes) for c in predicted}
    differing = sum(abs(expected.get(k, (0, 0))[1] - counted.get(k, (0, 0))[1]) for k in {*counted, *expected})
    return Messages(
        record=r,
        measured=counted,
        predicted=expected,
        sent=of_step,
        predicted_sent=float(sum(c.moved_bytes for c in predicted)) / all_parameter_bytes(r),
        error=differing / max(sum(num_bytes for _, num_bytes in counted.values()), 1),
    )


def machine_bytes(r: Record, collectives: list[Collective], num_machines: int) -> MachineBytes:
    """Return the bytes that a machine sends to other machines to carry out these collectives.

    The kind of every collective must be known (`is_known`).
    """
    engine, shape = engine_of(r), shape_of(r)
    by_gloo, by_nccl = (on_wire.sent_bytes(collectives, engine, num_machines, backend) for backend in ("gloo", "nccl"))
    if shape is None:
        return MachineBytes(by_gloo, by_nccl, None)
    expected = communication.collectives(engine, shape, job_of(r))
    return MachineBytes(by_gloo, by_nccl, on_wire.sent_bytes(expected, engine, num_machines, "gloo"))


# ---------------------------------------------------------------- peaks


class StepPeak(NamedTuple):
    """The measured and the predicted peak memory of a step after the warm-up, in bytes."""

    record: Record
    measured: int
    overcount: int  # upper bound of what the measurement counts too much; 0 if it is exact
    predicted: float
    parts: dict[str, float]  # of the prediction, without the examples that are counted on a CPU
    moment: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def error_beyond(self) -> float:
        """The error of the prediction that remains if the measurement is `overcount` bytes too large.

        If the prediction is above the measurement, this is the whole error.
        """
        least = self.measured - self.overcount
        return self.error if self.error > 0 else min(0.0, self.predicted / least - 1) if least > 0 else 0.0


def step_peak(r: Record) -> StepPeak | None:
    """Return the measured and the predicted peak memory of a run. None if one of them is not known.

    They are not known if the peak was not measured, or if the shape of the model is not known.
    """
    shape = shape_of(r)
    if shape is None or not r.peak_memory or r.proof is None:
        return None
    measured = _measured_peak(r)
    if measured is None:
        return None
    on_cpu, engine = r.proof.device == "cpu", engine_of(r)
    largest = max(
        (peaks.peak(shape, engine, job_of(r), rank) for rank in range(r.world_size)),
        key=lambda peak: _counted(peak, on_cpu),
    )
    total = _counted(largest, on_cpu) + (_text_bytes(r) if on_cpu else 0)
    parts: dict[str, float] = {part: float(value) for part, value in largest.parts.items()}
    parts["offloaded"] = float(largest.host_bytes_then) if on_cpu else 0.0
    return StepPeak(r, measured, _overcount(r), total, parts, peaks.PEAK_MOMENTS[largest.moment])


def _measured_peak(r: Record) -> int | None:
    """Return the peak of tensors in a step after the warm-up, on the rank that uses the most memory.

    None if a rank did not measure it. On a CPU, the measurement does not count DDP's buckets if no gradient is stored
    in them. They are added here.
    """
    proof, steady = require_proof(r), _steady(r)
    on_cpu = proof.device == "cpu"
    tensors = [peak.tensor_bytes if on_cpu else peak.allocated_bytes for peak in steady]
    measured = [num_bytes for num_bytes in tensors if num_bytes is not None]
    if not measured or len(measured) < len(tensors):
        return None
    if not on_cpu or facts.engine_kind(proof) != "ddp":
        return max(measured)
    if r.model_state_bytes is None:
        return None
    ranks = zip(measured, r.model_state_bytes, strict=True)
    return max(peak + states.communication_buffers for peak, states in ranks)


def _steady(r: Record) -> list[PeakMemory]:
    """Return the peaks of each rank in the steps after the warm-up."""
    return [phases["steady_steps"] for phases in r.peak_memory or () if "steady_steps" in phases]


def _text_bytes(r: Record) -> int:
    """Return the bytes of all training examples, which stay in host memory during the run.

    An example consists of its tokens. A review of `bert-imdb` also has a mask that marks its padding.
    """
    examples = sum((r.data or {}).get(name, 0) for name in ("num_train_examples", "num_eval_examples"))
    return int(8 * examples * r.config["sequence_length"] * (2 if r.workload == "bert-imdb" else 1))


def _overcount(r: Record) -> int:
    """Return an upper bound of the bytes by which a measured peak is too large.

    On a CPU, a tensor that a thread of gloo releases is counted until the end of the step. Newer records say how many
    bytes this was. For older records, the bound is the bytes that the collectives of the step worked on. 0 if the peak
    is exact.
    """
    if require_proof(r).device != "cpu" or r.world_size == 1:
        return 0
    unreleased = [peak.unreleased_bytes for peak in _steady(r)]
    counted = [value for value in unreleased if value is not None]
    if len(counted) == len(unreleased):
        return max(counted)
    return sum(collective.bytes for collective in r.collectives_per_step or [])


def _counted(predicted: peaks.Peak, on_cpu: bool) -> float:
    """Return the bytes of a predicted peak that the measurement counts. On a GPU, host memory is not counted."""
    return float(predicted.total + (predicted.host_bytes_then if on_cpu else 0.0))
