"""The last lines of a run that ended well: its proof, losses, model states, messages and step time."""

from __future__ import annotations

from pathlib import Path

from study.compare import expected
from study.compare.facts import proven
from study.records import schema
from study.records.schema import Proof, Record

ENGINES = {"MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "NO": "no distribution", "FSDP": "FSDP2"}


def text(folder: Path) -> str:
    """Say of a run that is ok what was proven, learned, held, sent, and how long a step took; and what to do next."""
    record = schema.read(folder)
    first_loss = schema.read_steps(folder)[0]["loss"]
    lines = [_proven(record), _learned(record, first_loss), _held(record), _sent(record), _time(record)]
    other = "zero2" if record.strategy == "ddp" else "ddp"
    lines.append(f"record    {folder / 'record.json'}")
    lines.append(f"next      zero-study train --strategy {other}; then both: zero-study compare {folder.parent}")
    return "\n".join(lines)


def _proven(record: Record) -> str:
    proof = proven(record)
    processes = "1 process" if record.world_size == 1 else f"{record.world_size} processes"
    return f"proven    {record.strategy}: {_engine(proof)}, {processes} on {proof.device}, {proof.precision}"


def _engine(proof: Proof) -> str:
    if proof.zero_stage is None:
        return ENGINES.get(proof.distributed_type, proof.distributed_type)
    offloads = {"optimizer": proof.offload_optimizer_device, "parameters": proof.offload_param_device}
    words = [f"{what} on {device}" for what, device in offloads.items() if device != "none"]
    return ", ".join([f"DeepSpeed's ZeRO stage {proof.zero_stage}", *words])


def _learned(record: Record, first_loss: float) -> str:
    line = f"learned   loss {first_loss:.4f} at first, {record.final_loss:.4f} after {record.steps_done} steps"
    line += " of synthetic text" if record.config["data"] == "bundled" else ""
    if not record.evaluation:
        return line
    last = {name: value for name, value in record.evaluation[-1].items() if name != "step"}
    return f"{line}; held out: " + ", ".join(
        f"{name} {'beyond a float' if value is None else f'{value:.4g}'}" for name, value in last.items()
    )


def _held(record: Record) -> str:
    if record.model_state_bytes is None or record.num_params is None:
        return "held      not measured (--no-measure)"
    fullest = max(rank.model_states for rank in record.model_state_bytes) / record.num_params
    buffers = max(rank.communication_buffers for rank in record.model_state_bytes)
    paper = expected.paper_states(record, "stepping").total / record.num_params
    return (
        f"held      {fullest:.2f} bytes of model states per parameter on the fullest rank (arXiv:1910.02054: "
        f"{paper:.2f}), and {buffers / 1e9:.3g} GB of the engine's buffers"
    )


def _sent(record: Record) -> str:
    if (sent := expected.sent(record)) is None:
        return "sent      not measured (--no-measure)"
    line = f"sent      {sent.measured:.2f} times the parameters' bytes per step and rank"
    line += f" (arXiv:1910.02054: {sent.paper:.2f})"
    more = proven(record).backend == "gloo" and sent.by_gloo != sent.measured
    return line + (f"; over gloo, as it ran, {sent.by_gloo:.2f}" if more else "")


def _time(record: Record) -> str:
    timing = record.timing
    if timing is None or timing.median_seconds is None:
        return "took      too few steps to time one"
    line = f"took      {timing.median_seconds:.3g} s a step, median of {timing.num_steps}"
    if timing.lower_quartile_seconds is None or timing.upper_quartile_seconds is None:
        return line
    return f"{line} (quartiles {timing.lower_quartile_seconds:.3g} to {timing.upper_quartile_seconds:.3g})"
