"""Make the view `bits`: compare trained weights bit by bit, and name the roundings that make strategies differ.

The expectations are in this module. They were written before the runs that they are compared with. Engines round
differently, for example because they add the same numbers in different orders. `roundings` returns the choices that the
engine of a run makes. If two runs of one setting make the same choices, their weights and moments must be equal in
every bit after every step. If the choices differ, the bits may differ, and the differing roundings are the possible
causes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, NamedTuple

from study.compare.facts import require_proof, shown_adapter
from study.compare.view import View, finished
from study.config import NOT_TRAINED, PINS
from study.records import find as records
from study.records.find import RecordFile
from study.records.schema import Record
from zero_study import terminal
from zero_study.engines.strategy_names import in_order

ROUNDINGS = {
    "last elements": "PyTorch's fused AdamW for CPUs processes elements in vector registers. The last elements of a "
    "tensor, which do not fill a register, go through a different code path, which rounds differently. "
    "ZeRO's partitions and FSDP2's shards do not end at the same elements as DDP's whole parameters, so "
    "a different set of elements is rounded in this way.",
    "CPU Adam": "With offload, DeepSpeed uses its own Adam kernel.",
    "linear": "ZeRO-3 replaces PyTorch's linear layer with one that adds the bias in a separate operation.",
    "grouping": "ZeRO-3 puts autograd nodes around modules. Some tensors are used several times, such as the input of "
    "BERT's attention. Because of the nodes, autograd adds the contributions to the gradient of such a tensor "
    "in another order.",
    "norm": "With clipping, each engine adds the squares for the global gradient norm in another order.",
    "order of ranks": "With more than two processes, the order in which gloo adds the values of an element depends "
    "on the element's position in the buffer. Each strategy arranges its buffers differently.",
    "division by 3": "If the number of processes, N, is not a power of two, a division by N has to be rounded. The "
    "result "
    "then depends on whether gradients are divided before or after the sum, and on whether they are divided by N or "
    "multiplied by 1/N.",
    "micro batches": "With several micro batches, ZeRO-2, ZeRO-3 and FSDP2 add over the ranks after each micro batch. "
    "DDP, ZeRO-0 and ZeRO-1 first add the gradients of all micro batches.",
    "16 bits": "In bf16, FSDP2 reduces gradients in fp32, and the ZeRO stages reduce them in bf16.",
    "missed gradients": "This cause is not rounding, but a fault of DeepSpeed: with offload to a disk, DeepSpeed can "
    "leave out some gradients.",
}
# The pin of --fixed-order that removes a cause. A cause without a pin is a design decision of the engine, or a fault.
PIN_OF = {
    "last elements": "optimizer",
    "CPU Adam": "optimizer",
    "linear": "linear",
    "grouping": "grouping",
    "norm": "norm",
    "order of ranks": "collectives",
}
HEAD = "strategy"
SAME = "same bits"


class _Engine(NamedTuple):
    """The properties of a run's engine that determine how it rounds."""

    strategy: str
    world_size: int
    stage: int | None  # the ZeRO stage; None if the engine is not DeepSpeed
    is_fsdp: bool
    offload: str  # where the optimizer states are offloaded to: none, cpu, nvme
    precision: str
    micro_batches: int
    is_bert: bool
    clips: bool

    @property
    def is_odd(self) -> bool:
        """Whether the number of processes is not a power of two."""
        return self.world_size & (self.world_size - 1) != 0


def _engine_of(r: Record) -> _Engine:
    proof = require_proof(r)
    return _Engine(
        strategy=r.strategy,
        world_size=r.world_size,
        stage=proof.zero_stage,
        is_fsdp=proof.sharding is not None,
        offload=proof.offload_optimizer_device,
        precision=proof.precision,
        micro_batches=proof.gradient_accumulation_steps,
        is_bert=r.workload == "bert-imdb",
        clips=bool(r.config["gradient_clipping"]),
    )


def _last_elements(engine: _Engine) -> str | None:
    if engine.stage and engine.offload == "none" and (engine.is_bert or engine.is_odd):
        # BERT's head has a bias of two elements.
        return "of the partitions of stages 1 and 2" if engine.stage < 3 else "of stage 3's partitions"
    return "of shards" if engine.is_fsdp and engine.is_odd else None


def _replaced_modules(engine: _Engine) -> str | None:
    """Return "stage 3's" if ZeRO-3 changes how the model's modules compute. Otherwise None.

    This is so for BERT. GPT-2 is not affected: its projections are not linear layers, and one projection computes
    query, key and value.
    """
    return "stage 3's" if engine.stage == 3 and engine.is_bert else None


def _norm(engine: _Engine) -> str | None:
    if not engine.clips:
        return None
    if engine.is_fsdp:
        return "of shards"
    if not engine.stage:
        return "of whole tensors"
    on_host = ", on the host" if engine.offload != "none" else ""
    return f"of stage {'3' if engine.stage == 3 else '1 and 2'}{on_host}"


def _division(engine: _Engine) -> str | None:
    if not engine.is_odd:
        return None
    if engine.is_fsdp:
        return "after"
    return "before, by division" if engine.stage else "before, by a product"


def _micro_batches(engine: _Engine) -> str | None:
    if engine.micro_batches == 1:
        return None
    return "ranks first" if engine.is_fsdp or (engine.stage or 0) >= 2 else "micro batches first"


# For each rounding, a function that returns the variant that an engine uses. None if this rounding plays no role.
_WAY_OF: dict[str, Callable[[_Engine], str | None]] = {
    "last elements": _last_elements,
    "CPU Adam": lambda engine: "DeepSpeed's" if engine.stage and engine.offload != "none" else None,
    "linear": _replaced_modules,
    "grouping": _replaced_modules,
    "norm": _norm,
    "order of ranks": lambda engine: engine.strategy if engine.world_size > 2 else None,
    "division by 3": _division,
    "micro batches": _micro_batches,
    "16 bits": lambda engine: "gradients reduced in fp32" if engine.is_fsdp and engine.precision == "bf16" else None,
    "missed gradients": lambda engine: "of a disk" if engine.offload == "nvme" else None,
}


def roundings(r: Record) -> dict[str, str]:
    """Return how one run rounds: for each kind of rounding, the variant that the engine uses.

    Roundings that play no role in the run, and those that --fixed-order removes, are left out.
    """
    engine, fixed_order = _engine_of(r), r.config.get("fixed_order")
    pins = set(PINS if fixed_order == "all" else (fixed_order or "").split(","))
    ways = {name: _WAY_OF[name](engine) for name in ROUNDINGS if PIN_OF.get(name) not in pins}
    return {name: way for name, way in ways.items() if way is not None}


# ---------------------------------------------------------------- the page


EXPLANATION = (
    "Each cell compares a run with the DDP run that has the same options, by the digests of the weights and of both "
    "Adam moments, at every step for which both runs have digests. *Same bits* means that all digests are equal. "
    "Otherwise, the cell lists the causes of the difference, the first step with other bits, and the relative "
    "difference of the final held-out losses, which is 0 if only the weights differ. "
    "An empty cell means that this combination was not run."
)


def _sections(record_files: list[RecordFile]) -> list[str]:
    """Return the lines of the page: the causes of differences, the tables, and the expectations with their outcomes.

    There is a table for each model and precision. Its rows are strategies, and its columns are settings.
    """
    usable = _with_digests(record_files)
    occurring = {name for file in usable for name in roundings(file.record)}
    lines = [*(f"- **{name}**: {text}" for name, text in ROUNDINGS.items() if name in occurring), ""]
    for heading, (shipped, pinned) in _settings(usable).items():
        lines += [f"## {heading}", ""]
        lines += ["### Unmodified engines", "", *_table(shipped), ""] if shipped else []
        lines += ["### With --fixed-order", "", *_table(pinned), ""] if pinned else []
    return [*lines, *_against_shipped(usable), *_expectations(usable)]


def _with_digests(record_files: Iterable[RecordFile]) -> list[RecordFile]:
    return [file for file in finished(record_files) if file.record.digests]


def _heading(file: RecordFile) -> str:
    r = file.record
    return f"{r.workload} {r.size}, {require_proof(r).precision}, {r.steps_done} steps, seed {r.seed}, {r.box}"


def _setting(file: RecordFile, ignored: Collection[str] = ("perturb",)) -> str:
    """Return a key that is equal for runs in the same column of a table.

    The key covers everything that determines what a run trains, except for the strategy and the configuration keys in
    `ignored`.
    """
    r = file.record
    decisive = {name: value for name, value in r.config.items() if name not in NOT_TRAINED and name not in ignored}
    return json.dumps([_heading(file), r.world_size, decisive, (r.data or {}).get("digest")], sort_keys=True)


def _column(file: RecordFile) -> str:
    """Return the heading of a run's column: processes, adapter, micro batches, clipping and fixed orders."""
    r, proof = file.record, require_proof(file.record)
    parts = [terminal.count(r.world_size, "process", "processes")]
    parts += shown_adapter(r)
    if proof.gradient_accumulation_steps > 1:
        parts.append(f"{proof.gradient_accumulation_steps} micro batches")
    if r.config["gradient_clipping"]:
        parts.append(f"clipped at {r.config['gradient_clipping']:g}")
    fixed = r.config.get("fixed_order")
    if fixed:
        parts.append("fixed order" if fixed == "all" else f"fixed: {fixed.replace(',', ', ')}")
    return ", ".join(parts)


def _columns(files: Sequence[RecordFile]) -> list[list[RecordFile]]:
    """Group runs by setting. The more orders a setting fixes, the later it comes."""

    def place(column: list[RecordFile]) -> tuple[Any, ...]:
        config = column[0].record.config
        fixed = config.get("fixed_order")
        number = 0 if not fixed else len(PINS) if fixed == "all" else len(fixed.split(","))
        return number, column[0].record.world_size != 2, column[0].record.world_size, _column(column[0])

    by_setting = sorted(files, key=_setting)
    return sorted(([*members] for _, members in groupby(by_setting, key=_setting)), key=place)


def is_faulty(r: Record) -> bool:
    """Return whether a run trained with an injected fault (an error that was made on purpose)."""
    return bool(r.config.get("perturb"))


def _name(r: Record) -> str:
    return r.strategy + (f", {r.config['perturb']}" if is_faulty(r) else "")


def _control(column: Sequence[RecordFile]) -> RecordFile:
    sound = [file for file in column if not is_faulty(file.record)] or list(column)
    return next((file for file in sound if file.record.strategy == "ddp"), sound[0])


Column = Sequence[RecordFile]  # the runs of one setting


def settings(folders: Sequence[Path]) -> dict[str, tuple[list[Column], list[Column]]]:
    """Return groups of runs that can be compared bit by bit, because they differ only in strategy or fault.

    For each model and precision there is a list of groups without --fixed-order, and a list of groups with it. The keys
    are headings, which also contain the number of steps, the seed and the machine. Runs without digests are left out.
    """
    return _settings(_with_digests(records.find(folders)))


def _settings(files: Sequence[RecordFile]) -> dict[str, tuple[list[Column], list[Column]]]:
    ordered = sorted(files, key=_heading)
    split = {heading: _shipped_and_pinned(list(members)) for heading, members in groupby(ordered, key=_heading)}
    return {heading: column_groups for heading, column_groups in split.items() if any(column_groups)}


def column_headings(columns: Sequence[Column]) -> list[str]:
    """Return the heading of each column of a table. Each column has runs of the same training."""
    return [_column(column[0]) for column in columns]


def _shipped_and_pinned(files: Sequence[RecordFile]) -> tuple[list[Column], list[Column]]:
    """Return the settings with at least two strategies or faults to compare: without --fixed-order, and with it."""
    columns: list[Column] = [column for column in _columns(files) if len({_name(file.record) for file in column}) > 1]
    shipped = [column for column in columns if not column[0].record.config.get("fixed_order")]
    return shipped, [column for column in columns if column not in shipped]


def _table(columns: Sequence[Column]) -> list[str]:
    cells = grid(columns)
    return list(
        terminal.markdown(
            [HEAD, *column_headings(columns)],
            [[name, *(cell_text(cell) for cell in row)] for name, row in cells.items()],
        )
    )


@dataclass(frozen=True)
class Cell:
    """The result of comparing the bits of one run with those of its reference run."""

    step: int | None  # the first step after which weights or moments differ; None if they never differ
    roundings: tuple[str, ...]  # in which the two runs differ
    held_out: float | None  # relative difference of the held-out losses at the end
    is_reference: bool = False


def grid(columns: Sequence[Column]) -> dict[str, list[Cell | None]]:
    """Return a table of comparisons of runs: one row for each strategy, then one row for each injected fault.

    A cell is None if there is no such run in that setting.
    """
    files = [file for column in columns for file in column]
    names = in_order(file.record.strategy for file in files)
    faults = sorted({_name(file.record) for file in files} - {*names})
    rows = {}
    for name in [*names, *faults]:
        runs = [next((file for file in column if _name(file.record) == name), None) for column in columns]
        if any(runs):
            pairs = zip(runs, columns, strict=True)
            rows[name] = [None if file is None else _cell(file, _control(column)) for file, column in pairs]
    return rows


def _cell(file: RecordFile, control: RecordFile) -> Cell:
    r, reference = file.record, control.record
    step = first_differing_step(r, reference)
    names = () if step is None else tuple(differing_roundings(r, reference))
    return Cell(step, names, _held_out_difference(r, reference), file is control)


def cell_text(cell: Cell | None) -> str:
    """Return a text that says how a run differs from its reference run. Empty if the run does not exist."""
    if cell is None:
        return ""
    if cell.step is None:
        return "(the reference)" if cell.is_reference else SAME
    names = ", ".join(cell.roundings) or "**unknown cause**"
    return f"{names}; {_from_step(cell.step, cell.held_out)}"


def _from_step(step: int, held_out: float | None) -> str:
    return f"from step {step}" + ("" if held_out is None else f"; {terminal.scientific(held_out)}")


def first_differing_step(r: Record, reference: Record) -> int | None:
    """Return the first step after which the weights or moments of two runs differ. None if they never differ.

    Only steps for which both runs have digests are compared. Returns 0 if one of the runs has no digests.
    """
    if r.digests is None or reference.digests is None:
        return 0
    theirs = {digest.step: digest for digest in reference.digests}
    for own in r.digests:
        if own.step in theirs and own != theirs[own.step]:
            return own.step
    return None


def differing_roundings(r: Record, partner: Record) -> list[str]:
    """Return the names of the roundings in which two runs differ.

    If `r` has a planted fault, return only a description of the fault.
    """
    if is_faulty(r):
        return [f"a fault: {r.config['perturb']}"]
    mine, theirs = roundings(r), roundings(partner)
    return [name for name in ROUNDINGS if mine.get(name) != theirs.get(name)]


def _held_out_difference(r: Record, reference: Record) -> float | None:
    if not r.evaluation or not reference.evaluation:
        return None
    mine, theirs = r.evaluation[-1].get("loss"), reference.evaluation[-1].get("loss")
    return None if mine is None or not theirs else abs(mine - theirs) / abs(theirs)


def _against_shipped(files: Sequence[RecordFile]) -> list[str]:
    """Return a table that compares each strategy with --fixed-order with the same strategy without it.

    Only runs that fix all orders are compared. Empty if there are no such runs.
    """

    def place(file: RecordFile) -> tuple[str, str]:
        return _setting(file, ("perturb", "fixed_order")), file.record.strategy

    sound = sorted((file for file in files if not is_faulty(file.record)), key=place)
    rows = []
    for _, members in groupby(sound, key=place):
        by_pins = {file.record.config.get("fixed_order"): file for file in members}
        if {None, "all"} <= by_pins.keys():
            shipped, pinned = by_pins[None], by_pins["all"]
            step = first_differing_step(pinned.record, shipped.record)
            difference = _held_out_difference(pinned.record, shipped.record)
            text = SAME if step is None else _from_step(step, difference)
            rows.append([f"{_heading(shipped).split(',')[0]}, {_column(shipped)}", shipped.record.strategy, text])
    if not rows:
        return []
    return [
        "## Each strategy with fixed order, compared with the same strategy without it",
        "",
        *terminal.markdown(["setting", HEAD, "bits"], rows),
        "",
    ]


# ---------------------------------------------------------------- expectations and outcomes


def pairs_by_outcome(files: Sequence[RecordFile]) -> Mapping[str, list[tuple[str, str]]]:
    """Return pairs of runs of the same training, grouped by whether their bits are as expected.

    Each pair has the ids of its runs. The outcomes are:

    - same, broken: two strategies with the same roundings have the same bits, or different bits.
    - named: two strategies with different roundings have different bits.
    - repeated, not repeated: two runs of one strategy have the same bits, or different bits.
    - seen, not seen: a planted fault changes the bits, or does not change them.
    """
    result: dict[str, list[tuple[str, str]]] = {
        kind: [] for kind in ("same", "broken", "repeated", "not repeated", "named", "seen", "not seen")
    }
    for column in _columns(files):
        for r, partner in combinations([file.record for file in column], 2):
            if kind := _kind_of_pair(r, partner):
                result[kind].append((r.run_id, partner.run_id))
    return result


def _kind_of_pair(r: Record, partner: Record) -> str | None:
    """Return whether the bits of two runs of one setting are as expected. None if nothing was expected."""
    is_equal, strategies_equal = first_differing_step(r, partner) is None, r.strategy == partner.strategy
    num_faulty = is_faulty(r) + is_faulty(partner)
    if num_faulty:
        if num_faulty == 2 or not strategies_equal:
            return None
        return "not seen" if is_equal else "seen"
    if strategies_equal:
        return "repeated" if is_equal else "not repeated"
    if not differing_roundings(r, partner):
        return "same" if is_equal else "broken"
    return None if is_equal else "named"


@dataclass(frozen=True)
class SingleRounding:
    """The effect of one rounding, measured on pairs of runs that differ only in this rounding."""

    num_pairs: int
    num_same: int  # pairs whose bits are equal nevertheless
    largest: float | None  # largest relative difference of the final held-out losses


def single_roundings(files: Sequence[RecordFile]) -> dict[str, SingleRounding]:
    """Return the effect of each rounding on the trained bits, in the order of `ROUNDINGS`.

    A rounding is left out if no pair of runs differs only in it.
    """
    pairs: dict[str, list[tuple[bool, float | None]]] = {}
    for column in _columns(files):
        sound = [file.record for file in column if not is_faulty(file.record)]
        for first, r in combinations(sound, 2):
            names = differing_roundings(r, first)
            if len(names) == 1:
                is_equal = first_differing_step(r, first) is None
                pairs.setdefault(names[0], []).append((is_equal, _held_out_difference(r, first)))
    return {
        name: SingleRounding(
            len(pairs[name]),
            sum(is_equal for is_equal, _ in pairs[name]),
            max(
                (relative for is_equal, relative in pairs[name] if not is_equal and relative is not None), default=None
            ),
        )
        for name in ROUNDINGS
        if name in pairs
    }


def _expectations(files: Sequence[RecordFile]) -> list[str]:
    pairs = pairs_by_outcome(files)

    def of(good: str, bad: str) -> str:
        return f"{len(pairs[good])} of {len(pairs[good]) + len(pairs[bad])}"

    def fulfilled(good: str, bad: str, text: str, none: str) -> str:
        return f"- {text}: {of(good, bad)}." if pairs[good] or pairs[bad] else f"- {none}."

    lines = [
        "## Expectations",
        "",
        fulfilled(
            "repeated",
            "not repeated",
            "Pairs of runs that repeat the same training and are identical in every bit",
            "No training was repeated",
        ),
        fulfilled(
            "same",
            "broken",
            "Pairs of strategies that were expected to be identical and are identical",
            "No two strategies were expected to be identical",
        ),
        "- Pairs of strategies whose bits differ, as expected from a cause that was named before the runs: "
        f"{len(pairs['named'])}.",
        fulfilled(
            "seen",
            "not seen",
            "Runs with a planted fault that differ from the correct run",
            "No run had a planted fault",
        ),
    ]
    for kind, meaning in (
        ("not repeated", "a repeated training has different bits"),
        ("broken", "the bits differ without a known cause"),
        ("not seen", "a planted fault changes no bit"),
    ):
        lines += [f"- **{meaning}**: {first} and {second}" for first, second in pairs[kind]]
    return [*lines, ""]


BITS = View("bits", "Which strategies train the same bits?", EXPLANATION, _sections)
