"""Make the view `parity`: losses, gradient norms and final weights of each run, compared with DDP.

Its last table shows what each run learned: its first and last losses, and the held-out metric.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any

from study.compare.facts import NOT_COMPARED, STEPS_AT_AN_END, require_proof, shown_adapter, steps_at_an_end
from study.compare.view import View, finished, tables
from study.records import machine
from study.records.find import RecordFile
from study.records.schema import Checksum, Record
from study.records.steps import steps_of
from zero_study import terminal
from zero_study.engines.strategy_names import StrategyName
from zero_study.errors import Refusal
from zero_study.terminal import escape_markdown, gib, markdown

WITHIN = 1e-5

EXPLANATION = f"""\
The same training should give the same losses and weights under every strategy, except for rounding. Each run is
compared with a run that has the same data, configuration and seed: a DDP run or, if there is none, the first run.

- "within {WITHIN:g}": "yes" if no relative difference is larger.
- "loss" and "gradient norm": the largest relative difference over all steps.
- "sums": the relative difference of the final parameters' sum of absolute values, or of squares if it is larger.
- "weights at first, at last": whether the initial and the final weights are bit-identical to those of the run in
  "compared with".
- Runs with dropout draw different masks, and cannot be compared, if they differ in the number of processes, the
  micro batch or the device."""

HEAD = ["run", f"within {WITHIN:g}", "loss", "gradient norm", "sums", "weights at first, at last",
        "processes x micro batch", "compared with"]  # fmt: skip

LEARNED = f"""\
- "first losses" and "last losses": the mean training loss over the first and the last {STEPS_AT_AN_END} steps. In a
  short run it is the mean over a third of the steps. If the losses rise under all strategies, no strategy is the cause.
- "held out": the accuracy or perplexity on examples that the run did not train on.
- "s/step": the median seconds per step of the slowest rank, without warm-up and without the step in which memory is
  measured. On a shared machine, times cannot be compared."""

LEARNED_HEAD = ["strategy", "processes", "seed", "held out", "first losses", "last losses", "steps", "s/step",
                "peak RSS, GiB"]  # fmt: skip


def _sections(record_files: list[RecordFile]) -> list[str]:
    """Return the lines of the page: a table per group of runs of the same training, then what each run learned."""
    runs = finished(record_files)
    lines = []
    groups = [list(members) for _, members in groupby(sorted(runs, key=same_training), key=same_training)]
    several_machines = len({f.record.box for f in runs}) > 1
    for group in groups:
        if len(group) > 1:
            ordered = sorted(group, key=order)
            rows = [_row(file, ordered) for file in ordered]
            box = f", {ordered[0].record.box}" if several_machines else ""
            lines += [f"## {escape_markdown(heading(ordered[0].record))}{box}", "", *markdown(HEAD, rows), ""]
    if alone := [f"{r.run_id}{shown_arithmetic(r)}" for r in (group[0].record for group in groups if len(group) == 1)]:
        lines += [f"These runs have no run to compare with: {escape_markdown(', '.join(alone))}.", ""]
    return lines + _learned(runs)


# ---------------------------------------------------------------- what trains the same


def same_training(file: RecordFile) -> str:
    """Return a key that is equal for runs which train the same model on the same data with the same settings.

    The key contains the machine, model, precision, seed, text and configuration.
    """
    r = file.record
    return _training([r.box, r.workload, r.size, r.config.get("precision"), r.seed], r, settings(r))


def same_training_of_any_seed(file: RecordFile) -> str:
    """Return a key that is equal for runs which train the same model on the same data, with any seed."""
    r = file.record
    decisive = {name: value for name, value in settings(r).items() if name != "seed"}
    return _training([r.box, r.workload, r.size, r.config.get("precision")], r, decisive)


def _training(place: list[Any], r: Record, decisive: dict[str, Any]) -> str:
    return json.dumps([*place, (r.data or {}).get("digest"), decisive], sort_keys=True)


def settings(r: Record) -> dict[str, Any]:
    """Return what determines a run's result: its options, and the machine's properties that change arithmetic."""
    started = {} if r.continues is None else {"continues": r.continues.model_dump()}
    decisive = {name: value for name, value in r.config.items() if name not in NOT_COMPARED} | {"init": r.init}
    if decisive.get("fixed_order") is None:
        decisive.pop("fixed_order", None)  # older records do not have this setting
    return decisive | started | machine.arithmetic(r.machine)


def shown_arithmetic(r: Record) -> str:
    """Return a text about the properties of a run's machine that change its arithmetic. Empty if there are none.

    The text follows the run's name.
    """
    parts = [f"{name}={value}" for name, value in machine.arithmetic(r.machine).items()]
    return f" with {', '.join(parts)}" if parts else ""


def heading(r: Record, seeds: Sequence[int] = ()) -> str:
    """Return a heading that describes a group of runs with the same training. `r` is one of these runs.

    `seeds`: the seeds of all runs, if there are several.
    """
    dropout = f"dropout {r.config['dropout']:g}"
    steps = f"{r.steps_done} steps of {r.config['global_batch_size']} sequences"
    seed = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {r.seed}"
    adapter = "".join(f", {part}" for part in shown_adapter(r))
    return (
        f"{r.workload} {r.size}{adapter}, {require_proof(r).precision}, {seed}, {dropout}, {steps}{shown_arithmetic(r)}"
    )


def order(file: RecordFile) -> tuple[bool, int, int, int, str, str]:
    """Return a sort key for runs of the same training. The best reference for the other runs comes first.

    The order is ddp, single, the other strategies, and FSDP2 last.

    Runs that different code or processors trained in parts come last, so that they are not used as the reference.
    """
    r, proof = file.record, require_proof(file.record)
    plainness = {"ddp": 0, "single": 1}.get(r.strategy, 3 if proof.sharding else 2)
    mixed = bool(r.mixed_code or r.mixed_processors)
    return mixed, plainness, r.world_size, proof.zero_stage or 0, r.strategy, r.run_id


def incomparable(r: Record, partner: Record) -> str | None:
    """Return why two runs of the same training cannot be compared. None if they can."""
    run, reference = (
        {**each.config, **require_proof(each).model_dump(), "world_size": each.world_size} for each in (r, partner)
    )
    return other_masks(run, reference)


def other_masks(run: Mapping[Any, Any], reference: Mapping[Any, Any]) -> str | None:
    """Return why two runs use different dropout masks. None if they use the same masks.

    Different masks lead to different losses, whatever the strategy.
    """
    settings = {"world_size": "{:g} and {:g} processes", "micro_batch_size": "micro batches of {:g} and {:g}"}
    for name, setting in settings.items():
        if run["dropout"] and run[name] != reference[name]:
            return f"dropout is on, and runs with {setting.format(run[name], reference[name])} draw different masks"
    return None


# ---------------------------------------------------------------- how far from the reference


def _row(file: RecordFile, group: Sequence[RecordFile]) -> list[str]:
    r, cut = file.record, f"{file.record.world_size} x {require_proof(file.record).micro_batch_size}"
    others = [candidate for candidate in group if candidate is not file]
    comparable = [candidate for candidate in group if incomparable(r, candidate.record) is None]
    if comparable == [file]:
        return [_short(r), "not comparable", *[""] * 4, cut, incomparable(r, others[0].record) or ""]
    reference = comparable[0]
    if reference is file:
        return [_short(r), "(the reference)", *[""] * 4, cut, ""]
    weights = list(zip(_weights(file), _weights(reference), strict=True))
    _, (ours, theirs) = weights  # at the end
    sums = (_relative(ours.absolute_sum, theirs.absolute_sum), _relative(ours.square_sum, theirs.square_sum))
    differences = [*_steps(file, reference), max(sums)]
    return [
        _short(r),
        "yes" if all(difference is not None and difference <= WITHIN for difference in differences) else "**no**",
        *map(terminal.difference, differences),
        ", ".join("identical" if ours.sha256 == theirs.sha256 else "differ" for ours, theirs in weights),
        cut,
        _short(reference.record),
    ]


def _short(r: Record) -> str:
    """Return a run's id without the model's name, which is in the heading of its table.

    "(mixed code)" is added if different code trained parts of the run.
    """
    return r.run_id.removeprefix(f"{r.workload}-{r.size}-") + (" (mixed code)" if r.mixed_code else "")


def _weights(file: RecordFile) -> tuple[Checksum, Checksum]:
    """Return the checksums of the initial and the final weights of a run. Raises Refusal if the record has none."""
    initial, final = file.record.initial_parameters, file.record.final_parameters
    if initial is None or final is None:
        raise Refusal(f"{file.where}: the record has no checksum of the weights. Run it again.")
    return initial, final


def largest_loss_difference(file: RecordFile, reference: RecordFile) -> float | None:
    """Return the largest relative difference between the losses of two runs at the same step.

    None if, at some step, only one of the runs has a loss. Raises Refusal if steps are missing or were altered, or if
    the runs have different steps.
    """
    return _steps(file, reference)[0]


def _steps(file: RecordFile, reference: RecordFile) -> tuple[float | None, float | None]:
    """Return the largest relative differences of the loss and of the gradient norm.

    A difference is None if, at some step, only one of the runs has a value.
    """
    steps, reference_steps = (steps_of(run_file) for run_file in (file, reference))
    if [line["step"] for line in steps] != [line["step"] for line in reference_steps]:
        raise Refusal(
            f"{file.where} has {len(steps)} steps, but {reference.where} has {len(reference_steps)}. Run "
            "the shorter training again."
        )
    pairs = list(zip(steps, reference_steps, strict=True))
    loss, grad_norm = (_largest([(a[key], b[key]) for a, b in pairs]) for key in ("loss", "grad_norm"))
    return loss, grad_norm


def _largest(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    unskipped = [(a, b) for a, b in pairs if (a, b) != (None, None)]  # both skipped the step because of an overflow
    complete = [(a, b) for a, b in unskipped if a is not None and b is not None]
    if not complete or len(complete) < len(unskipped):
        return None
    return max(_relative(a, b) for a, b in complete)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference) if reference else abs(value)


# ---------------------------------------------------------------- what each run learned


def _learned(runs: Sequence[RecordFile]) -> list[str]:
    """Return tables of what each run learned: one per model, precision, global batch and machine."""

    def block(file: RecordFile) -> str:
        r = file.record
        batch = f"{r.config['global_batch_size']} sequences per step"
        return f"### {r.workload} {r.size}, {require_proof(r).precision}, {batch}, {r.box}"

    def place(file: RecordFile) -> tuple[Hashable, ...]:
        r = file.record
        return block(file), StrategyName.parse(r.strategy).position, r.world_size, r.seed

    lines = ["## What each run learned", "", LEARNED, ""] if runs else []
    return lines + tables(runs, place, block, LEARNED_HEAD, lambda members: map(_learned_by, members))


def _learned_by(file: RecordFile) -> list[str]:
    r = file.record
    losses = [line["loss"] for line in steps_of(file)]
    some = steps_at_an_end(len(losses))
    held_out = r.evaluation[-1] if r.evaluation else {}
    name = "accuracy" if "accuracy" in held_out else "perplexity"
    figure = held_out.get(name)
    seconds = r.timing and r.timing.median_seconds
    # The largest resident set of any rank in any phase. A machine with GPUs does not record it.
    resident = [p.resident_bytes for phases in r.peak_memory or () for p in phases.values() if p.resident_bytes]
    return [
        r.strategy,
        str(r.world_size),
        str(r.seed),
        f"{name} " + ("unknown" if figure is None else format(figure, ".3f" if name == "accuracy" else ".1f")),
        f"{statistics.mean(losses[:some]):.3f}",
        f"{statistics.mean(losses[-some:]):.3f}",
        str(r.steps_done),
        "" if seconds is None else f"{seconds:.2f}",
        gib(max(resident, default=None)),
    ]


PARITY = View("parity", "Losses and weights compared with DDP", EXPLANATION, _sections)
