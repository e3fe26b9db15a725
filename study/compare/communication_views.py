"""Make the view `communication`: what an optimizer step sends, and the step time at different network rates.

The first part compares each run's collectives with theory and with the ZeRO paper.

The second part covers runs on several machines. It shows the bytes that were counted, those that were calculated, and
those that passed the network interface. It also compares the measured step time with a prediction, which was fixed
before the first run at a limited rate (study/studies/network.yaml). The predicted time is the step time on an unlimited
network, plus the time in which the bytes of one machine pass the limited network. These bytes follow from the
algorithms of the backend. The prediction assumes that communication does not overlap with computation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from study.compare import parity, predicted
from study.compare.facts import model_heading, require_proof
from study.compare.predicted import Messages
from study.compare.view import View, finished, tables
from study.records.find import RecordFile
from study.records.schema import Record
from zero_study import terminal

# ---------------------------------------------------------------- the collectives of a step

TOLERANCE = 0.01  # relative error of the bytes of a step
WORDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "subgroup_all_gather": "all-gather in a group of ranks",
    "reduce_scatter": "reduce-scatter",
    "subgroup_reduce_scatter": "reduce-scatter in a group of ranks",
    "subgroup_all_reduce": "all-reduce in a group of ranks",
}

EXPLANATION = """\
Ranks exchange gradients and parameters in every step. The tables show the bytes that rank 0 sent in a step after the
warm-up, divided by the bytes of all parameters: as measured (sent), as our formulas predict them message by message
(theory), and according to the ZeRO paper (paper)."""
COLUMNS = """\
- "sent" counts an all-reduce twice (arXiv:1910.02054, sec. 7.1). The column leaves out the factor (N - 1) / N of a
  ring of N ranks, so two ranks really send half of this value.
- "paper" extends section 7 of the ZeRO paper to gradient accumulation.
- "error" is the number of bytes that theory predicts wrongly, divided by all bytes.
- "by gloo" is what gloo, the backend for CPUs, sends. Instead of a reduce-scatter, gloo runs an all-reduce.
- "collectives" counts the messages of each kind. If theory predicts another number, it follows in parentheses.
- Measurement and theory leave out DeepSpeed's all-reduce of 4 bytes for the gradient norm at stage 0.
- For adapters (LoRA), theory leaves out messages of a few bytes, so its number of messages can be too low."""
HEAD = ["strategy", "sent", "theory", "paper", "error", "by gloo", "collectives"]


def _sections(record_files: list[RecordFile]) -> list[str]:
    """Return the lines of the page: tables by model, precision and processes, then runs on several machines."""
    runs = [file.record for file in finished(record_files)]
    unmeasured = [r for r in runs if r.collectives_per_step is None]
    compared = [(r, predicted.messages(r)) for r in runs if r.collectives_per_step is not None]
    return [
        *_compared([c for _, c in compared if c is not None and (c.measured or c.predicted)]),
        *_named(
            "Not predicted, because the shapes of their models are unknown",
            [r for r, messages in compared if messages is None],
        ),
        *_named("Not measured (`--no-measure`)", unmeasured),
        *network_sections(record_files),
    ]


def _compared(communicating: list[Messages]) -> list[str]:
    """Return a summary of the prediction errors, and tables of the runs that sent something or were predicted to."""
    if not communicating:
        return []
    lines = [*_summary(communicating), "", COLUMNS, ""]
    for heading, members in groupby(sorted(communicating, key=_order), key=lambda c: model_heading(c.record)):
        lines += [f"## {terminal.escape_markdown(heading)}", "", *tables(members, _order, _title, HEAD, _rows)]
    return lines


def _named(reason: str, runs: Sequence[Record]) -> list[str]:
    """Return a line that names the runs without a table row and the reason. Empty if there are no such runs."""
    return [f"{reason}: {', '.join(r.run_id for r in runs)}.", ""] if runs else []


def _summary(cells: list[Messages]) -> list[str]:
    """Return lines that say how large the prediction errors are, and for which runs."""
    worst = max(cells, key=lambda c: c.error)
    beyond = [c for c in cells if c.error > TOLERANCE]
    deviating = [c for c in cells if not c.is_equal_in_counts]
    equal = len(cells) - len(deviating)
    lines = [
        f"Theory predicts the bytes within {TOLERANCE:.0%} for {len(cells) - len(beyond)} of {len(cells)} runs, and "
        f"the number of messages for {equal}."
    ]
    if worst.error:
        lines.append(f"The largest error in bytes is {worst.error:.4%}, of {worst.record.run_id}.")
    else:
        lines.append("The bytes of all runs are exact.")
    lines += [f"- beyond {TOLERANCE:.0%}: {c.record.run_id}, {c.error:.2%}" for c in beyond]
    lines += [f"- other counts: {c.record.run_id}, {terminal.escape_markdown(_counts(c))}" for c in deviating]
    return lines


def _title(c: Messages) -> str:
    r, proof = c.record, require_proof(c.record)
    accumulation = proof.gradient_accumulation_steps
    parts = [f"### {r.workload} {r.size}, {proof.precision}: {terminal.count(r.world_size, 'process', 'processes')}"]
    parts += [f"{accumulation} micro steps"] if accumulation > 1 else []
    parts += ["checkpointed"] if r.config["activation_checkpointing"] else []
    return ", ".join(parts)


def _order(c: Messages) -> tuple[object, ...]:
    r, proof = c.record, require_proof(c.record)
    way = (r.world_size, r.config["activation_checkpointing"], proof.gradient_accumulation_steps)
    stage = -1 if proof.zero_stage is None else proof.zero_stage
    return proof.precision, r.workload, r.num_params, model_heading(r), way, stage, r.strategy, r.run_id


def _rows(block: list[Messages]) -> list[list[str]]:
    """Return the table rows of runs, one row per strategy.

    If runs of one strategy have different collectives, each variant has a row of its own, named by the run's id.
    """
    distinct_cells: dict[str, list[Messages]] = {}
    for c in block:
        members = distinct_cells.setdefault(c.record.strategy, [])
        if all((c.measured, c.predicted) != (reference.measured, reference.predicted) for reference in members):
            members.append(c)
    return [
        [name if len(members) == 1 else c.record.run_id, f"{c.sent.measured:.3f}", f"{c.predicted_sent:.3f}",
         f"{c.sent.paper:.0f}", f"{c.error:.3%}", f"{c.sent.by_gloo:.3f}", _counts(c)]
        for name, members in distinct_cells.items()
        for c in members
    ]  # fmt: skip


def _counts(c: Messages) -> str:
    parts = []
    for kind in sorted({*c.measured, *c.predicted}):
        count, by_theory = c.measured.get(kind, (0, 0))[0], c.predicted.get(kind, (0, 0))[0]
        predicted_count = "" if count == by_theory else f" ({by_theory})"
        parts.append(f"{count} {WORDS.get(kind, kind)}{predicted_count}")
    return ", ".join(parts)


COMMUNICATION = View("communication", "Traffic of a step", EXPLANATION, _sections)


# ---------------------------------------------------------------- steps over a network of a given rate

NETWORK_EXPLANATION = """\
These tables show what a machine sends per step, and how long a step takes on a slower network. The runs are on CPUs
with gloo. Simulated machines are network namespaces on one computer. Bytes are those of one machine in one step,
divided by the bytes of all parameters.

- counted: the bytes that one rank requested. An all-reduce counts twice (arXiv:1910.02054, sec. 7.1).
- by gloo: the bytes that gloo's algorithms send to other machines for these requests.
- on the wire: the counter of the network interface. This counter counts one header per segment that the
  kernel passes on whole.
- by theory: the bytes that gloo sends for the predicted collectives.
- NCCL's rings: the bytes that NCCL's rings would send for the predicted collectives. No GPU has run this, and NCCL
  may use trees.
- loss, from one machine: the largest relative difference of a step's loss from the same run on one machine.
- seconds: the median step of the slowest rank, over all repeats. In parentheses: the error of the prediction.
- rate: the network rate that `tc` shows, or for which the laboratory was configured.

reports/machines.md explains why stages 1 and 2 take longer than predicted."""

PAYS = 1.25  # times the control's step time; also fixed before the first run
CONTROL = "ddp"


class Layout(NamedTuple):
    """The properties in which runs must agree before their times are compared, besides strategy and network rate."""

    machines: int
    ranks: int  # per machine
    micro_steps: int
    training: str = ""  # the key from `parity.same_training`


@dataclass(frozen=True)
class NetworkCell:
    """The repeated runs of one strategy at one network rate, with their times and bytes."""

    layout: Layout
    strategy: str
    rate: float  # bits per second in each direction; infinite if unlimited, 0 if not known
    seconds: tuple[float, ...]  # median step time of each repeat, in ascending order
    counted: float  # bytes divided by the bytes of all parameters, like the following fields
    by_gloo: float
    on_the_wire: float
    by_theory: float | None  # None if theory does not know the model
    by_nccl: float
    parameter_bytes: int  # bytes of all parameters
    runs: tuple[str, ...]  # ids of the runs
    from_one_machine: float | None  # largest relative loss difference from the same run on one machine

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


_Key = tuple[Layout, str, float]  # layout, strategy, and the negative rate, so that the fastest network is first


def network_cells(record_files: Iterable[RecordFile]) -> list[NetworkCell]:
    """Group runs on several machines by layout, strategy and network rate, with the fastest network first.

    Runs on one machine, runs without a timed step and runs without counted collectives are left out.
    """
    runs = finished(record_files)
    on_one = {_twin(f): f for f in runs if f.record.proof and len(f.record.proof.ranks_of_machines or [1]) == 1}
    keyed = [(key, file) for file in runs if (key := _key(file))]
    groups = groupby(sorted(keyed, key=lambda each: each[0]), key=lambda each: each[0])
    return [_network_cell(key, [file for _, file in members], on_one) for key, members in groups]


def _twin(file: RecordFile) -> tuple[Hashable, ...]:
    """Return a key that is equal for a run on several machines and for the same training on one machine."""
    r = file.record
    return r.strategy, r.world_size, r.config.get("micro_batch_size"), parity.same_training(file)


def _key(file: RecordFile) -> _Key | None:
    """Return the key by which repeats are grouped. None if the run cannot be compared with others.

    A run cannot be compared if it used one machine, if it did not run on CPUs (and thus over gloo), if its record lacks
    the traffic or the step time, or if it used a collective whose traffic on the wire is not known.
    """
    r, proof = file.record, file.record.proof
    if proof is None or not (proof.ranks_of_machines and r.network and r.num_params and _seconds_of(r)):
        return None
    if r.collectives_per_step is None or proof.device != "cpu" or not predicted.is_known(r.collectives_per_step):
        return None
    ranks = proof.ranks_of_machines
    layout = Layout(len(ranks), ranks[0], proof.gradient_accumulation_steps, parity.same_training(file))
    return layout, r.strategy, -(r.network_rate or 0.0)


def _seconds_of(r: Record) -> float | None:
    return r.timing.median_seconds if r.timing else None


def _network_cell(
    key: _Key, repeats: list[RecordFile], on_one: Mapping[tuple[Hashable, ...], RecordFile]
) -> NetworkCell:
    (layout, strategy, below_0), first = key, repeats[0].record
    collectives, size = first.collectives_per_step or [], predicted.all_parameter_bytes(first)
    sent = predicted.machine_bytes(first, collectives, layout.machines)
    twins = [(file, on_one[twin]) for file in repeats if (twin := _twin(file)) in on_one]
    differences = [parity.largest_loss_difference(*both) for both in twins]
    return NetworkCell(
        layout=layout,
        strategy=strategy,
        rate=-below_0,
        seconds=tuple(sorted(seconds for file in repeats if (seconds := _seconds_of(file.record)))),
        counted=sum(each.moved_bytes for each in collectives) / size,
        by_gloo=sent.by_gloo / size,
        on_the_wire=statistics.mean(n.sent_bytes / n.num_steps for f in repeats for n in f.record.network or []) / size,
        by_theory=None if sent.by_theory is None else sent.by_theory / size,
        by_nccl=sent.by_nccl / size,
        parameter_bytes=size,
        runs=tuple(file.record.run_id for file in repeats),
        from_one_machine=max((each for each in differences if each is not None), default=None),
    )


def predicted_seconds(free: NetworkCell, rate: float) -> float:
    """Return the predicted step time in seconds on a network of this rate, in bits per second.

    The prediction is the step time of `free`, the runs on an unlimited network, plus the time in which the bytes that
    theory predicts pass the network. If theory does not know the model, the bytes that gloo sends for the counted
    collectives are used.
    """
    worth = free.by_gloo if free.by_theory is None else free.by_theory
    return free.median_seconds + 8 * worth * free.parameter_bytes / rate


def prediction_error(cell: NetworkCell, free: NetworkCell) -> float:
    """Return the relative error of the predicted step time. It is positive if the predicted time is too long."""
    return predicted_seconds(free, cell.rate) / cell.median_seconds - 1


def breaks_even(cell: NetworkCell, control: NetworkCell) -> bool:
    """Return whether a step takes at most `PAYS` times as long as a step of the baseline at the same network rate."""
    return cell.median_seconds <= PAYS * control.median_seconds


def network_sections(record_files: Iterable[RecordFile]) -> list[str]:
    """Return the sections of the page about runs on several machines.

    Each layout of machines has a table of bytes, a table of seconds by rate, and a line that names the strategies and
    rates that pay (`breaks_even`).
    """
    cells = network_cells(record_files)
    lines = (
        ["## Several machines: bytes and seconds by the rate of the network", "", NETWORK_EXPLANATION, ""]
        if cells
        else []
    )
    for layout, members in groupby(cells, key=lambda cell: cell.layout):
        block = list(members)
        ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''} on each"
        micro = f", {layout.micro_steps} micro steps" if layout.micro_steps > 1 else ""
        lines += [f"### {layout.machines} machines, {ranks}{micro}", ""]
        lines += [*_bytes(block), "", *_seconds(block), "", *_paying(block)]
    return lines


def shown_rate(rate: float) -> str:
    if rate == 0:
        return "rate not known"
    megabits = rate / 1e6
    return "no limit" if math.isinf(rate) else f"{megabits:,.0f} Mbit/s" if megabits >= 10 else f"{megabits:.2g} Mbit/s"


def _by_strategy(block: Iterable[NetworkCell]) -> dict[str, list[NetworkCell]]:
    return {name: list(cells) for name, cells in groupby(block, key=lambda cell: cell.strategy)}


def _bytes(block: list[NetworkCell]) -> list[str]:
    """Return the table of communicated bytes, with one row per strategy.

    The columns about the wire show the smallest and the largest value over the rates.
    """
    head = ["strategy", "counted", "by gloo", "by theory", "on the wire", "over gloo's", "NCCL's rings, predicted"]
    has_twin = any(cell.from_one_machine is not None for cell in block)
    rows = []
    for strategy, cells in _by_strategy(block).items():
        wire = [cell.on_the_wire for cell in cells]
        over = [cell.on_the_wire / cell.by_gloo - 1 for cell in cells if cell.by_gloo]
        theirs = cells[0].by_theory
        differs = max((cell.from_one_machine for cell in cells if cell.from_one_machine is not None), default=None)
        rows.append(
            [f"`{strategy}`", f"{cells[0].counted:.3f}", f"{cells[0].by_gloo:.3f}",
             "unknown" if theirs is None else f"{theirs:.3f}", _range(wire, ".3f"), _range(over, "+.1%"),
             f"{cells[0].by_nccl:.3f}", *(["not run" if differs is None else f"{differs:.0e}"] if has_twin else [])]
        )  # fmt: skip
    return terminal.markdown([*head, *(["loss, from one machine"] if has_twin else [])], rows)


def _range(values: list[float], form: str) -> str:
    if not values:
        return "none"
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _seconds(block: list[NetworkCell]) -> list[str]:
    rates, rows = sorted({cell.rate for cell in block}, reverse=True), []
    for strategy, cells in _by_strategy(block).items():
        of_rate = {cell.rate: cell for cell in cells}
        rows.append([f"`{strategy}`", *(_second(of_rate.get(rate), of_rate.get(math.inf)) for rate in rates)])
    return terminal.markdown(["seconds per step", *map(shown_rate, rates)], rows)


def _second(cell: NetworkCell | None, free: NetworkCell | None) -> str:
    if cell is None:
        return "not run"
    text = f"{cell.median_seconds:.3f}"
    if free is None or cell.rate in (0, math.inf):
        return text
    return f"{text} ({prediction_error(cell, free):+.0%})"


def _paying(block: list[NetworkCell]) -> list[str]:
    """Return a line that names the strategies and rates that pay (`breaks_even`). Empty if nothing can be compared."""
    of_control = {cell.rate: cell for cell in block if cell.strategy == CONTROL and cell.rate}
    rest = [cell for cell in block if cell.strategy != CONTROL and cell.rate in of_control]
    paying = [
        f"`{cell.strategy}`, {shown_rate(cell.rate)}" for cell in rest if breaks_even(cell, of_control[cell.rate])
    ]
    if not rest:
        return []
    if not paying:
        return [f"Under every other strategy, a step takes more than {PAYS:g} times as long as under `{CONTROL}`.", ""]
    return [f"A step takes at most {PAYS:g} times as long as under `{CONTROL}` with: {'; '.join(paying)}.", ""]
