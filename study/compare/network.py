"""What did a step cost on a network of a given rate, and what did it send there: counted, by theory, on the wire?

The prediction was fixed before the first run at a limited rate (study/studies/network.yaml): a step takes what it takes
on an unlimited network, and the time in which a machine's bytes, by the backend's algorithm, pass the limited one.
Nothing is taken to be hidden behind the arithmetic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from study.compare import markdown, parity
from study.compare.cases import engine_of, job_of, shape_of
from study.records import find as records
from study.records.find import RecordFile
from study.records.schema import Collective, Network, Record
from study.theory import communication as theory
from study.theory import step_time
from study.theory.communication import on_wire

EXPLANATION = """\
Runs on CPUs, over gloo. The rate is that of the token bucket which `tc` shows on the interface, or what the laboratory
was told; where neither says one, it is not known. In a laboratory, whose machines are network namespaces of one box
and share its processors, it holds each way. Bytes are of a machine and a step, over those of all parameters. Counted:
what one rank asked for, an all-reduce twice (arXiv:1910.02054, sec. 7.1), whatever sends it. By gloo: what its
algorithms send to other machines for that. On the wire: the interface's own counter; of headers it has one for each
segment that the kernel passes on whole. By theory: the collectives as theory expects them, by gloo. NCCL's rings: the
same as those would send it; predicted, for no GPU has run it, and NCCL may take trees. Loss, from one machine: the
largest relative difference of a step's loss from the run that did the same on one machine. Seconds: the median step of
the slowest rank, over all repeats; in parentheses by how much the prediction misses."""

PAYS = 1.25  # times the control's step, fixed before the first run too; that it may end at a rate was added afterwards
RIGHT = 0.25  # by which a prediction may miss
TOLD = 0.05  # by which two must differ at least to be told apart; set when the runs were known


class Layout(NamedTuple):
    """What runs must have in common for their times to be compared, but strategy and rate."""

    machines: int
    ranks: int  # on each
    micro_steps: int
    training: str = ""  # as `parity.same_training`


class Rates(NamedTuple):
    """Between these rates, in bits per second, one strategy takes no longer than another, or than so many times it."""

    low: float = 0.0  # 0: however slow, of those that were tried
    high: float = math.inf  # infinite: without a limit, too


@dataclass(frozen=True)
class Cell:
    """The runs of one strategy on one network: its repeats."""

    layout: Layout
    strategy: str
    rate: float  # bits per second, each way; infinite: unlimited; 0: not known
    seconds: tuple[float, ...]  # a median step of each repeat, ascending
    counted: float  # parameters' worth of bytes, as are the others
    by_gloo: float
    on_the_wire: float
    by_theory: float | None  # None: theory knows no such model
    by_nccl: float
    parameter_bytes: int
    overlaps: bool  # by its engine collectives may run beside computing, as the planner takes it
    runs: tuple[str, ...]  # their ids
    from_one_machine: float | None  # the largest relative difference of a step's loss; None: no such run on one

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


class _Told(NamedTuple):
    """What a run of several machines tells of its steps."""

    layout: Layout
    strategy: str
    rate: float
    seconds: float
    asked: list[Collective]
    carried: list[Network]
    num_params: int
    from_one_machine: float | None
    record: Record

    @property
    def key(self) -> tuple[Layout, str, float]:
        return self.layout, self.strategy, -self.rate


def cells(found: Iterable[RecordFile]) -> list[Cell]:
    """Bring runs of several machines together, layout by layout, strategy by strategy, the fastest network first.

    Runs without a timed step, without counted collectives, or of one machine are left out.
    """
    files = [file for file in found if file.record.status == "ok"]
    on_one = {_twin(f): f for f in files if f.record.proof and len(f.record.proof.ranks_of_machines or [1]) == 1}
    told = sorted((one for file in files if (one := _told(file, on_one))), key=lambda one: one.key)
    return [_cell(list(repeats)) for _, repeats in groupby(told, key=lambda one: one.key)]


def comparable(cells: Iterable[Cell], control: str) -> dict[Layout, dict[str, list[Cell]]]:
    """By layout and strategy, what can be compared: each with a limit and without, and the control at the same rates.

    What ran on a network of a rate that is not known cannot.
    Layouts of which only the control is left are none.
    """
    found: dict[Layout, dict[str, list[Cell]]] = {}
    for layout, members in groupby(cells, key=lambda cell: cell.layout):
        of = {name: list(each) for name, each in groupby(members, key=lambda cell: cell.strategy)}
        rates = {cell.rate for cell in of.get(control, []) if cell.rate}
        kept = {name: [cell for cell in each if cell.rate in rates] for name, each in of.items()}
        whole = {name: each for name, each in kept.items() if math.inf in {c.rate for c in each} and len(each) > 1}
        if control in whole and len(whole) > 1:
            found[layout] = whole
    return found


def _twin(file: RecordFile) -> tuple[str, int, int | None, str]:
    """What is equal of a run and the one that did the same on one machine."""
    r = file.record
    return r.strategy, r.world_size, r.config.get("micro_batch_size"), parity.same_training(file)


def _told(file: RecordFile, on_one: Mapping[tuple, RecordFile]) -> _Told | None:
    """What a run tells; None where something of it is missing, of one machine, or sent in a way that is not known."""
    r = file.record
    asked, proof = r.collectives_per_step, r.proof
    seconds = r.timing.median_seconds if r.timing else None
    if proof is None or not (proof.ranks_of_machines and r.network and r.num_params and seconds):
        return None
    if asked is None or not on_wire.is_known(asked) or proof.device != "cpu":  # which talks over gloo
        return None
    ranks, micro_steps = proof.ranks_of_machines, proof.gradient_accumulation_steps
    layout = Layout(len(ranks), ranks[0], micro_steps, parity.same_training(file))
    rate = records.rate_of(r) or 0.0
    twin = on_one.get(_twin(file))
    differs = None if twin is None else parity.largest_loss_difference(file, twin)
    return _Told(layout, r.strategy, rate, seconds, asked, r.network, r.num_params, differs, r)


def _cell(repeats: list[_Told]) -> Cell:
    first = repeats[0]
    num_machines = first.layout[0]
    engine, shape = engine_of(first.record), shape_of(first.record)
    size = engine.parameter_bytes * first.num_params
    expected = None if shape is None else theory.collectives(engine, shape, job_of(first.record))
    return Cell(
        layout=first.layout,
        strategy=first.strategy,
        rate=first.rate,
        seconds=tuple(sorted(one.seconds for one in repeats)),
        counted=sum(each.moved_bytes for each in first.asked) / size,
        by_gloo=on_wire.sent_bytes(first.asked, engine, num_machines, "gloo") / size,
        on_the_wire=statistics.mean(n.sent_bytes / n.num_steps for one in repeats for n in one.carried) / size,
        by_theory=None if expected is None else on_wire.sent_bytes(expected, engine, num_machines, "gloo") / size,
        by_nccl=on_wire.sent_bytes(first.asked, engine, num_machines, "nccl") / size,
        parameter_bytes=size,
        overlaps=engine.kind != "deepspeed" or engine.overlap_comm,
        runs=tuple(one.record.run_id for one in repeats),
        from_one_machine=max(
            (one.from_one_machine for one in repeats if one.from_one_machine is not None), default=None
        ),
    )


def predicted_seconds(free: Cell, rate: float) -> float:
    """A step at a rate, of what one on an unlimited network took and of the bytes that theory expects."""
    return free.median_seconds + sending_seconds(free, rate)


def prediction_error(cell: Cell, free: Cell) -> float:
    """By how much the predicted step is longer than the measured one, relative."""
    return predicted_seconds(free, cell.rate) / cell.median_seconds - 1


def planner_error(cell: Cell, free: Cell) -> float:
    """The same where collectives vanish behind computing as the planner takes it; no part of what was fixed."""
    if not free.overlaps:
        return prediction_error(cell, free)
    added = step_time.exposed(free.median_seconds, sending_seconds(free, cell.rate), step_time.UNHIDDEN)
    return float(free.median_seconds + added) / cell.median_seconds - 1


def unlimited(each: Iterable[Cell]) -> Cell:
    """Of one strategy's cells the one without a limit, which `comparable` has seen to."""
    return next(cell for cell in each if math.isinf(cell.rate))


def added_seconds(cell: Cell, free: Cell) -> float:
    """What the limit adds to a step."""
    return cell.median_seconds - free.median_seconds


def sending_seconds(free: Cell, rate: float) -> float:
    """What a limit is predicted to add: the time in which a machine's bytes pass it."""
    return _bits(free) / rate


def pays(strategy: Sequence[Cell], control: Sequence[Cell], times: float = PAYS) -> list[Rates]:
    """Between which rates a step takes so many times the control's at most, by lines between the measured rates.

    The fastest network that has a limit is an edge where a step takes less on one side of it and more without a limit:
    between the two nothing was tried.
    """
    of_control = {cell.rate: cell.median_seconds for cell in control}
    ratios = sorted((c.rate, c.median_seconds / of_control[c.rate]) for c in strategy if c.rate in of_control)
    found: list[Rates] = []
    for index, (rate, ratio) in enumerate(ratios):
        if ratio > times:
            continue
        low = _edge(ratios[index - 1], (rate, ratio), times) if index else 0.0
        high = _edge((rate, ratio), ratios[index + 1], times) if index + 1 < len(ratios) else math.inf
        if found and found[-1].high == rate:  # the rate before goes on to this one
            low = found.pop().low
        found.append(Rates(low, high))
    return found


def _edge(slow: tuple[float, float], fast: tuple[float, float], times: float) -> float:
    """The rate between two, at which a line between them passes so many times; where it does not, the faster."""
    (low, low_ratio), (high, high_ratio) = slow, fast
    if (low_ratio > times) == (high_ratio > times):
        return high
    if math.isinf(high):
        return low
    share = (low_ratio - times) / (low_ratio - high_ratio)
    return float(low * (high / low) ** share)


def predicted_to_pay(strategy: Cell, control: Cell, times: float = PAYS) -> Rates | None:
    """The same of the predictions, from what each took on an unlimited network; None where no rate will do."""
    more = _bits(strategy) - times * _bits(control)
    less = times * control.median_seconds - strategy.median_seconds
    if more > 0:
        return Rates(low=more / less) if less > 0 else None
    if less >= 0:
        return Rates()
    return Rates(high=more / less) if more < 0 else None


def changes_places(ours: Sequence[Cell], theirs: Sequence[Cell]) -> bool:
    """Whether one strategy is faster on one network and the other on another, told apart in all repeats."""
    of_theirs = {cell.rate: cell for cell in theirs}
    both = [(cell, of_theirs[cell.rate]) for cell in ours if cell.rate in of_theirs]
    return any(_is_faster(a, b) for a, b in both) and any(_is_faster(b, a) for a, b in both)


def _is_faster(one: Cell, other: Cell) -> bool:
    return one.seconds[-1] < other.seconds[0] and (1 + TOLD) * one.median_seconds <= other.median_seconds


def shown_rates(found: Rates | None, fastest: float) -> str:
    """Say between which rates; `fastest`: of those that have a limit and were tried, 0 for a prediction."""
    if found is None:
        return "at no rate"
    low, high = found
    if math.isinf(high):
        if low == 0:
            return "at every rate"
        return f"above {shown_rate(low)}" if low == fastest else f"from {shown_rate(low)} on"
    end = f"{shown_rate(high)}, and not without a limit" if high == fastest else shown_rate(high)
    return f"up to {end}" if low == 0 else f"from {shown_rate(low)} to {end}"


def _bits(cell: Cell) -> float:
    """What a machine sends in a step, as the prediction takes it."""
    return 8 * (cell.by_gloo if cell.by_theory is None else cell.by_theory) * cell.parameter_bytes


def table(folders: Sequence[Path]) -> str:
    """Make the page: a block per layout, with the bytes and the seconds of each strategy."""
    record_files = records.find(folders)
    found = cells(record_files)
    lines = ["# Several machines: bytes and seconds by the rate of the network", "", EXPLANATION, ""]
    if not found:
        lines += ["No run of several machines tells its steps and its bytes; `zero-study run network` makes some.", ""]
    for layout, members in groupby(found, key=lambda each: each.layout):
        block = list(members)
        rates = sorted({each.rate for each in block}, reverse=True)
        lines += [f"## {title(layout)}", "", *_bytes(block), "", *_seconds(block, rates), ""]
    lines += [*markdown.not_ok(record_files), f"Made by `{markdown.command('compare --view network', folders)}`."]
    return "\n".join(lines)


def title(layout: Layout) -> str:
    """Say where ranks were, and in how many micro steps."""
    micro = f", {layout.micro_steps} micro steps" if layout.micro_steps > 1 else ""
    return f"{layout.machines} machines, {layout.ranks} rank{'s' if layout.ranks > 1 else ''} on each{micro}"


def shown_rate(rate: float) -> str:
    if rate == 0:
        return "rate not known"
    megabits = rate / 1e6
    return "no limit" if math.isinf(rate) else f"{megabits:,.0f} Mbit/s" if megabits >= 10 else f"{megabits:.2g} Mbit/s"


def _bytes(block: list[Cell]) -> list[str]:
    """One row per strategy; of the wire, the smallest and the largest over the rates."""
    head = ["strategy", "loss, from one machine", "counted", "by gloo", "on the wire", "over gloo's", "by theory",
            "NCCL's rings, predicted"]  # fmt: skip
    rows = []
    for strategy, members in groupby(block, key=lambda each: each.strategy):
        each = list(members)
        wire = [cell.on_the_wire for cell in each]
        over = [cell.on_the_wire / cell.by_gloo - 1 for cell in each if cell.by_gloo]
        theirs = each[0].by_theory
        differs = max((cell.from_one_machine for cell in each if cell.from_one_machine is not None), default=None)
        rows.append(
            [f"`{strategy}`", "no such run" if differs is None else f"{differs:.0e}", f"{each[0].counted:.3f}",
             f"{each[0].by_gloo:.3f}", _range(wire, ".3f"), _range(over, "+.1%"),
             "unknown" if theirs is None else f"{theirs:.3f}", f"{each[0].by_nccl:.3f}"]
        )  # fmt: skip
    return markdown.markdown(head, rows)


def _range(values: list[float], form: str) -> str:
    if not values:
        return "none"
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _seconds(block: list[Cell], rates: list[float]) -> list[str]:
    rows = []
    for strategy, members in groupby(block, key=lambda each: each.strategy):
        of_rate = {each.rate: each for each in members}
        rows.append([f"`{strategy}`", *(_second(of_rate.get(rate), of_rate.get(math.inf)) for rate in rates)])
    return markdown.markdown(["seconds a step", *map(shown_rate, rates)], rows)


def _second(cell: Cell | None, free: Cell | None) -> str:
    if cell is None:
        return "not run"
    text = f"{cell.median_seconds:.3f}"
    if free is None or cell.rate in (0, math.inf):
        return text
    return f"{text} ({prediction_error(cell, free):+.0%})"
