"""The view `communication`: what an optimizer step sent, beside theory and the paper, and by the rate of a network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study.compare import expected, network, words
from study.compare.expected import Messages
from study.compare.facts import model_heading, proven
from study.records import find as records

TOLERANCE = 0.01  # of a step's bytes
WORDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "subgroup_all_gather": "all-gather in a group of ranks",
    "reduce_scatter": "reduce-scatter",
    "subgroup_reduce_scatter": "reduce-scatter in a group of ranks",
    "subgroup_all_reduce": "all-reduce in a group of ranks",
}

EXPLANATION = """\
Ranks exchange gradients and parameters in every step. Sent: how many times the bytes of all parameters rank 0 sent in a
steady step. Theory: how many it should send, followed message by message. Paper: what the ZeRO paper says."""
COLUMNS = """\
Sent counts an all-reduce twice (arXiv:1910.02054, sec. 7.1), without a ring's factor (N - 1) / N: two ranks send half.
By gloo, over which CPUs talk: its reduce-scatter is an all-reduce. Paper: its section 7, carried on to accumulation.
Error: bytes in which theory differs, kind by kind, over all. Collectives: messages of each kind; where theory has
another number, that in parentheses. Not in either: DeepSpeed's all-reduce of 4 bytes for the norm at stage 0."""


def table(folders: Sequence[Path]) -> str:
    """Make the page: by model and precision, one block per number of processes; then runs of several machines."""
    record_files = records.find(folders)
    finished = [file.record for file in record_files if file.record.status == "ok"]
    measured = [r for r in finished if r.collectives_per_step is not None]
    found = [(r, expected.messages(r)) for r in measured]
    communicating = [c for _, c in found if c is not None and (c.measured or c.predicted)]
    lines = [*_summary(communicating), "", COLUMNS, ""] if communicating else []
    head = ["strategy", "sent", "theory", "paper", "error", "by gloo", "collectives"]
    for heading, members in groupby(sorted(communicating, key=_order), key=lambda c: model_heading(c.record)):
        lines += [f"## {words.shown(heading)}", ""]
        for title, block in groupby(members, key=_title):
            lines += [f"### {title}", "", *words.markdown(head, _rows(list(block))), ""]
    unknown = [r.run_id for r, c in found if c is None]
    lines += [f"No shape is known of the models of: {', '.join(unknown)}.", ""] if unknown else []
    unmeasured = [r.run_id for r in finished if r.collectives_per_step is None]
    lines += [f"Not measured (`--no-measure`): {', '.join(unmeasured)}.", ""] if unmeasured else []
    lines += network.sections(record_files)
    title = "What does a step send?"
    return words.page(title, EXPLANATION, lines, "--view communication", folders, record_files)


def _summary(cells: list[Messages]) -> list[str]:
    """How far theory is off, and where."""
    worst = max(cells, key=lambda c: c.error)
    beyond = [c for c in cells if c.error > TOLERANCE]
    other = [c for c in cells if not c.is_equal_in_counts]
    equal = len(cells) - len(other)
    lines = [f"{len(cells)} runs: bytes within {TOLERANCE:.0%} in {len(cells) - len(beyond)}, counts equal in {equal}."]
    if worst.error:
        lines.append(f"The worst in bytes is {worst.record.run_id}, {worst.error:.4%} off.")
    else:
        lines.append("No byte differs in any.")
    lines += [f"- beyond {TOLERANCE:.0%}: {c.record.run_id}, {c.error:.2%}" for c in beyond]
    lines += [f"- other counts: {c.record.run_id}, {words.shown(_counts(c))}" for c in other]
    return lines


def _title(c: Messages) -> str:
    r, accumulation = c.record, proven(c.record).gradient_accumulation_steps
    said = [f"{r.workload} {r.size}, {proven(r).precision}: {words.processes(r.world_size)}"]
    said += [f"{accumulation} micro steps"] if accumulation > 1 else []
    said += ["checkpointed"] if r.config["activation_checkpointing"] else []
    return ", ".join(said)


def _order(c: Messages) -> tuple[object, ...]:
    r, proof = c.record, proven(c.record)
    way = (r.world_size, r.config["activation_checkpointing"], proof.gradient_accumulation_steps)
    stage = -1 if proof.zero_stage is None else proof.zero_stage
    return proof.precision, r.workload, r.num_params, model_heading(r), way, stage, r.strategy, r.run_id


def _rows(block: list[Messages]) -> list[list[str]]:
    """One row per strategy; runs of one strategy with other collectives have rows of their own, under their ids."""
    kept: dict[str, list[Messages]] = {}
    for c in block:
        members = kept.setdefault(c.record.strategy, [])
        if all((c.measured, c.predicted) != (other.measured, other.predicted) for other in members):
            members.append(c)
    return [
        [name if len(members) == 1 else c.record.run_id, f"{c.sent.measured:.3f}", f"{c.predicted_sent:.3f}",
         f"{c.sent.paper:.0f}", f"{c.error:.3%}", f"{c.sent.by_gloo:.3f}", _counts(c)]
        for name, members in kept.items()
        for c in members
    ]  # fmt: skip


def _counts(c: Messages) -> str:
    said = []
    for kind in sorted({*c.measured, *c.predicted}):
        count, predicted = c.measured.get(kind, (0, 0))[0], c.predicted.get(kind, (0, 0))[0]
        other = "" if count == predicted else f" ({predicted})"
        said.append(f"{count} {WORDS.get(kind, kind)}{other}")
    return ", ".join(said)
