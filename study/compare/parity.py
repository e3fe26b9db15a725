"""How far is each strategy's training from ddp's, step by step and in the weights it ends with?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from study.compare import markdown
from study.config import NOT_TRAINED
from study.errors import Refusal
from study.records import find as records
from study.records import machine
from study.records.find import RecordFile
from study.records.schema import Record

WITHIN = 1e-5

# Where a run writes, what it observes and how its global batch is cut do not decide what is trained; nor does the
# folder that the data came from: the data's digest does.
NOT_COMPARED = NOT_TRAINED | {"micro_batch_size"}

EXPLANATION = f"""\
Each run beside the run of equal data, configuration and seed that it is compared with: the ddp one, or the first where
there is none. Loss and gradient norm: the largest relative difference over all steps. Sums: the relative difference of
the final parameters' sums of absolute values and of squares. Initial and final weights: bit-identical or not. Within
{WITHIN:g}: all four differences are. With dropout, runs draw other masks on another number of processes, with another
micro batch or on another device, and are then not comparable."""

HEAD = ["run", "processes x micro batch", "compared with", "loss", "gradient norm", "absolute sum", "square sum",
        "initial weights", "final weights", f"within {WITHIN:g}"]  # fmt: skip


def table(folders: Sequence[Path]) -> str:
    """Make the page: one table per group of runs that train the same thing."""
    record_files = records.find(folders)
    finished = [f for f in record_files if f.record.status == "ok"]
    lines = ["# Parity: does the strategy change what is trained?", "", EXPLANATION, ""]
    groups = [list(members) for _, members in groupby(sorted(finished, key=same_training), key=same_training)]
    alone = [f"{r.run_id}{shown_arithmetic(r)}" for r in (group[0].record for group in groups if len(group) == 1)]
    several = len({records.box_of(f.record) for f in finished}) > 1
    for group in groups:
        if len(group) > 1:
            ordered = sorted(group, key=_order)
            rows = [_row(file, ordered) for file in ordered]
            box = f", {records.box_of(ordered[0].record)}" if several else ""
            lines += [f"## {markdown.shown(_heading(ordered[0].record))}{box}", "", *markdown.markdown(HEAD, rows), ""]
    if alone:
        lines += [f"Nothing to compare with: {markdown.shown(', '.join(alone))}.", ""]
    lines += [*markdown.not_ok(record_files), f"Made by `{markdown.command('compare --view parity', folders)}`."]
    return "\n".join(lines)


def same_training(file: RecordFile) -> str:
    """What is equal of runs that train the same thing: box, model, precision, start, text and configuration."""
    r = file.record
    digest = (r.data or {}).get("digest")
    place = [records.box_of(r), r.workload, r.size, r.config.get("precision"), r.seed]
    return json.dumps([*place, digest, settings(r)], sort_keys=True)


def settings(r: Record) -> dict[str, Any]:
    """What decides what a run trains: its knobs, and what changes its machine's arithmetic."""
    begun = {} if r.continues is None else {"continues": r.continues.model_dump()}
    decisive = {name: value for name, value in r.config.items() if name not in NOT_COMPARED}
    return decisive | begun | machine.arithmetic(r.machine)


def shown_arithmetic(r: Record) -> str:
    """What changes the arithmetic of a run's machine, to follow its name; empty: nothing."""
    said = [f"{name}={value}" for name, value in machine.arithmetic(r.machine).items()]
    return f" with {', '.join(said)}" if said else ""


def _heading(r: Record) -> str:
    dropout = f"dropout {r.config['dropout']:g}"
    steps = f"{r.steps_done} steps of {r.config['global_batch_size']} sequences"
    return f"{r.workload} {r.size}, {r.proof.precision}, seed {r.seed}, {dropout}, {steps}{shown_arithmetic(r)}"


def _order(file: RecordFile) -> tuple:
    """References first: ddp, then the plainest run."""
    r = file.record
    plainness = {"ddp": 0, "single": 1}.get(r.strategy, 3 if r.proof.sharding else 2)
    return plainness, r.world_size, r.proof.zero_stage or 0, r.strategy, r.run_id


def _incomparable(r: Record, other: Record) -> str | None:
    """Why two runs of one group cannot be compared; None where they can."""
    return other_masks(
        *({**each.config, **each.proof.model_dump(), "world_size": each.world_size} for each in (r, other))
    )


def other_masks(run: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Say why two runs drew other dropout masks, so that losses differ for that alone; None: the same ones."""
    for name, words in {"world_size": "processes", "micro_batch_size": "micro batch"}.items():
        if run["dropout"] and run[name] != other[name]:
            return f"dropout is on and {words} {run[name]:g} against {other[name]:g}: other masks"
    return None


def _row(file: RecordFile, group: Sequence[RecordFile]) -> list[str]:
    r = file.record
    start = [r.run_id, f"{r.world_size} x {r.proof.micro_batch_size}"]
    others = [other for other in group if other is not file]
    comparable = [other for other in group if _incomparable(r, other.record) is None]
    if comparable == [file]:
        return [*start, f"not comparable: {_incomparable(r, others[0].record)}", *[""] * (len(HEAD) - 3)]
    reference = comparable[0]
    if reference is file:
        return [*start, "(the reference)", *[""] * (len(HEAD) - 3)]
    differences = [
        *_steps(file, reference),
        _relative(r.final_parameters.absolute_sum, reference.record.final_parameters.absolute_sum),
        _relative(r.final_parameters.square_sum, reference.record.final_parameters.square_sum),
    ]
    return [
        *start,
        reference.record.run_id,
        *("unknown" if difference is None else f"{difference:.1e}" for difference in differences),
        _identity(r.initial_parameters.sha256, reference.record.initial_parameters.sha256),
        _identity(r.final_parameters.sha256, reference.record.final_parameters.sha256),
        "yes" if all(difference is not None and difference <= WITHIN for difference in differences) else "**no**",
    ]


def largest_loss_difference(file: RecordFile, reference: RecordFile) -> float | None:
    """The largest relative difference between two runs' losses of a step; None where one of them has none.

    Raises Refusal where steps are missing, altered, or of another number.
    """
    return _steps(file, reference)[0]


def _steps(file: RecordFile, reference: RecordFile) -> tuple[float | None, float | None]:
    """Largest relative differences of loss and gradient norm; None where one has a value and the other has not."""
    steps, reference_steps = (records.steps_of(each) for each in (file, reference))
    if [line["step"] for line in steps] != [line["step"] for line in reference_steps]:
        raise Refusal(
            f"{file.where}: {len(steps)} steps, {reference.where} has {len(reference_steps)}; run the shorter one again"
        )
    pairs = list(zip(steps, reference_steps, strict=True))
    loss, grad_norm = (_largest([(a[key], b[key]) for a, b in pairs]) for key in ("loss", "grad_norm"))
    return loss, grad_norm


def _largest(pairs: Sequence[tuple[Any, Any]]) -> float | None:
    known = [(a, b) for a, b in pairs if (a, b) != (None, None)]  # both skipped the step: a scaler's overflow
    if not known or any(None in pair for pair in known):
        return None
    return max(_relative(a, b) for a, b in known)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference) if reference else abs(value)


def _identity(sha256: str, reference: str) -> str:
    return "identical" if sha256 == reference else "differ"
