"""Short summaries: the view `short`, which has one line for each run, and the last lines that one run prints.

`table`: each run beside the plainest of its group: the loss, the peak of memory, the time of a step.
`of_run`: of one run that ended well its proof, losses, model states, messages and step time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study import formatting
from study.compare import facts, parity, predicted, view
from study.compare.facts import proven
from study.errors import Refusal
from study.records import find as records
from study.records import schema
from study.records.find import RecordFile
from study.records.schema import Proof, Record
from study.records.steps import read_steps

HEAD = ["strategy", "ranks", "loss", "", "peak", "", "s/step", ""]
LEGEND = f"""\
Each row is compared with the first of its block, "vs".
loss: of the last step. same: no step's loss differs by more than {parity.WITHIN:g};
  a number: the largest relative difference; masks, steps: the runs drew other
  dropout masks, or took other steps, so that their losses cannot be compared.
peak: of the tensors of the fullest rank.
More: --view differences, parity, parts, model-states or communication."""
WIDTH = 80  # of a terminal, in columns
MOST_GROUPS = 8  # that are shown


def table(folders: Sequence[Path]) -> str:
    """Make the text: a block for each group of runs that train the same."""
    files = records.find(folders)
    runs = sorted(view.finished(files), key=parity.same_training)
    groups = [sorted(members, key=parity.order) for _, members in groupby(runs, key=parity.same_training)]
    groups.sort(key=len, reverse=True)
    several_machines = len({file.record.box for file in runs}) > 1
    lines = [line for group in groups[:MOST_GROUPS] for line in _block(group, several_machines)]
    if len(groups) > MOST_GROUPS:
        lines += [f"{len(groups) - MOST_GROUPS} more groups of runs that train the same; name fewer folders."]
    return "\n".join([*lines, LEGEND if lines else "No run here ended well.", *view.not_ok(files)])


def _block(group: list[RecordFile], several_machines: bool) -> list[str]:
    """The heading and the table of runs that train the same, and why some of their times are in parentheses."""
    first = group[0].record
    rows = [_row(file, group[0]) for file in group]
    columns = len(HEAD) if any(row[6] for row in rows) else 6  # without times if none was taken
    ratio = f"vs {first.strategy if len(first.strategy) <= len('ddp') else '1st'}"
    machine = f", {first.box}" if several_machines else ""
    reasons = dict.fromkeys(row[-1] for row in rows if row[-1])
    return [
        textwrap.fill(formatting.shown(parity.heading(first) + machine), WIDTH),
        "",
        _fitting([row[:columns] for row in rows], [name or ratio for name in HEAD[:columns]]),
        "",
        *(textwrap.fill(f"(): {reason}", WIDTH) for reason in reasons),
    ]


def _fitting(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Make a table that fits into the terminal: a long name of a strategy goes on in the next line."""
    columns = [*zip(head, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    widths[0] = max(len(head[0]), min(widths[0], WIDTH - sum(2 + width for width in widths[1:])))
    lines = []
    for name, *remaining in (head, *rows):
        first, *more = textwrap.wrap(name, widths[0])
        cells = [f"{cell:<{width}}" for cell, width in zip((first, *remaining), widths, strict=True)]
        lines += ["  ".join(cells).rstrip(), *more]
    return "\n".join(lines)


def _row(file: RecordFile, first: RecordFile) -> list[str]:
    """The cells of a run, and why its time is no measure of its strategy; empty if it is one."""
    r = file.record
    is_first = file is first
    peak, first_peak = _peak(r), _peak(first.record)
    seconds, first_seconds = _seconds(r), _seconds(first.record)
    why_untimed = facts.why_untimed(r) if seconds else None
    are_comparable = not why_untimed and not facts.why_untimed(first.record)
    return [
        r.strategy + (" (mixed code)" if r.mixed_code else ""),
        str(r.world_size),
        "" if r.final_loss is None else f"{r.final_loss:.4f}",
        "" if is_first else _same(file, first),
        "" if peak is None else formatting.bytes_text(peak),
        "" if is_first else _times(peak, first_peak),
        _seconds_text(seconds, why_untimed is not None),
        "" if is_first or not are_comparable else _times(seconds, first_seconds),
        why_untimed or "",
    ]


def _peak(r: Record) -> float | None:
    """Bytes of the tensors of the fullest rank."""
    peak = predicted.step_peak(r)
    return float(peak.measured) if peak else None


def _seconds(r: Record) -> float | None:
    return r.timing.median_seconds if r.timing else None


def _seconds_text(seconds: float | None, is_disturbed: bool) -> str:
    if seconds is None:
        return ""
    return f"({seconds:.3g})" if is_disturbed else f"{seconds:.3g}"


def _same(file: RecordFile, first: RecordFile) -> str:
    if parity.incomparable(file.record, first.record):
        return "masks"
    try:
        difference = parity.largest_loss_difference(file, first)
    except Refusal:
        return "steps"
    if difference is None:
        return "unknown"
    return "same" if difference <= parity.WITHIN else f"{difference:.1e}"


def _times(value: float | None, reference: float | None) -> str:
    """How many times the first one's."""
    return "" if value is None or not reference else f"{value / reference:.2f} x"


# ---------------------------------------------------------------- one run

ENGINE_NAMES = {"MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "NO": "no distribution", "FSDP": "FSDP2"}


def of_run(folder: Path) -> str:
    """Say of a run that is ok what was proven, learned, held, sent, and how long a step took; and what to do next."""
    record = schema.read(folder)
    first_loss = read_steps(folder)[0]["loss"]
    lines = [
        _proof_line(record),
        _learning_line(record, first_loss),
        _states_line(record),
        _messages_line(record),
        _time_line(record),
    ]
    next_strategy = "zero2" if record.strategy == "ddp" else "ddp"
    lines.append(f"record    {folder / 'record.json'}")
    lines.append(
        f"next      zero-study train --strategy {next_strategy}; then both: zero-study compare {folder.parent}"
    )
    return "\n".join(lines)


def _proof_line(record: Record) -> str:
    proof = proven(record)
    processes = "1 process" if record.world_size == 1 else f"{record.world_size} processes"
    return f"proven    {record.strategy}: {_engine(proof)}, {processes} on {proof.device}, {proof.precision}"


def _engine(proof: Proof) -> str:
    if proof.zero_stage is None:
        return ENGINE_NAMES.get(proof.distributed_type, proof.distributed_type)
    offloads = {"optimizer": proof.offload_optimizer_device, "parameters": proof.offload_param_device}
    words = [f"{part} on {device}" for part, device in offloads.items() if device != "none"]
    return ", ".join([f"DeepSpeed's ZeRO stage {proof.zero_stage}", *words])


def _learning_line(record: Record, first_loss: float) -> str:
    line = f"learned   loss {first_loss:.4f} at first, {record.final_loss:.4f} after {record.steps_done} steps"
    line += " of synthetic text" if record.config["data"] == "bundled" else ""
    if not record.evaluation:
        return line
    last = {name: value for name, value in record.evaluation[-1].items() if name != "step"}
    return f"{line}; held out: " + ", ".join(
        f"{name} {'beyond a float' if value is None else f'{value:.4g}'}" for name, value in last.items()
    )


def _states_line(record: Record) -> str:
    if record.model_state_bytes is None or record.num_params is None:
        return "held      not measured (--no-measure)"
    fullest = max(rank.model_states for rank in record.model_state_bytes) / record.num_params
    buffers = max(rank.communication_buffers for rank in record.model_state_bytes)
    paper = predicted.paper_states(record, "stepping").total / record.num_params
    return (
        f"held      {fullest:.2f} bytes of model states per parameter on the fullest rank (arXiv:1910.02054: "
        f"{paper:.2f}), and {buffers / 1e9:.3g} GB of the engine's buffers"
    )


def _messages_line(record: Record) -> str:
    if (sent := predicted.sent(record)) is None:
        return "sent      not measured (--no-measure)"
    line = f"sent      {sent.measured:.2f} times the parameters' bytes per step and rank"
    line += f" (arXiv:1910.02054: {sent.paper:.2f})"
    more = proven(record).backend == "gloo" and sent.by_gloo != sent.measured
    return line + (f"; over gloo, as it ran, {sent.by_gloo:.2f}" if more else "")


def _time_line(record: Record) -> str:
    timing = record.timing
    if timing is None or timing.median_seconds is None:
        return "took      too few steps to time one"
    line = f"took      {timing.median_seconds:.3g} s a step, median of {timing.num_steps}"
    if timing.lower_quartile_seconds is None or timing.upper_quartile_seconds is None:
        return line
    return f"{line} (quartiles {timing.lower_quartile_seconds:.3g} to {timing.upper_quartile_seconds:.3g})"
