"""Test random configurations (cells), and reduce each failure to the simplest configuration that fails in the same way.

A drawn cell may combine any variations that the toy and the reference support. The fixed cells of the matrix have one
variation each, or one of a few pairs.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..files import ROOT, parse_yaml
from ..upgrade import faults
from . import cells, results
from .cells import ADAMW, PLAIN, Cell
from .optimizers import NAMES_IN_FILE

KNOWN = ROOT / "reports" / "conformance" / "fuzzing" / "known.yaml"

# Offload through accelerate has no fixed cells. A disk is too slow here.
OFFLOADED = {f"accelerate_zero{stage}_cpu_offload": ("fp32", "bf16") for stage in (1, 2, 3)}
ENGINES = {name: kinds for name, kinds in (cells.ENGINES | OFFLOADED).items() if "nvme" not in name}
# torchao is left out, because each cell takes half a minute.
OPTIMIZERS = (ADAMW, *(name for name in cells.OPTIMIZERS if name != "torchao_adamw8bit"))
ACCUMULATIONS = (1, 2, 3, 4, 5)  # five do not divide the batch
VARIATIONS = tuple(
    dict.fromkeys(
        word
        for variation in (*cells.VARIATIONS, *cells.NEWER_VARIATIONS, *cells.OPTIMIZER_VARIATIONS)
        for word in variation.split("+")
    )
)
MOST_VARIATIONS = 5
# The flat partitions of ZeRO 1 to 3 change what these optimizers compute. The reference knows only whole parameters.
UNLIKE_THE_REFERENCE = ("torch_muon", "adafactor", "bitsandbytes_adamw8bit")
# The share of cells with a known fault that are kept. Drawn often, they would hide other faults.
SHARE_OF_KNOWN_FAULTS = 0.15
EXCLUSIVE = (
    {"checkpointing", "reentrant"},
    # The second loss of each is of the last hidden states, which a part outside replaces.
    {"two_backward", "part_outside"},
    {"two_backward", "one_output"},
    {"loader", "uneven"},
    {"loader", "resume"},  # a new loader starts with the first batch
    {"loader", "dropout"},  # a loader draws from the generator that dropout uses
)

Verdicts = Mapping[str, dict[str, Any]]  # by name of the cell
Examine = Callable[[Sequence[Cell]], Verdicts]


class KnownFailure(NamedTuple):
    """An entry of known.yaml, which explains why the minimal configurations with a certain name fail."""

    cells: str  # a regular expression for the whole name
    kind: str  # how they fail, as the first words of `kind_of`
    reason: str
    faults: Sequence[str] = ()  # ids of the known faults of releases (`upgrade.faults`) that this is; may be empty


def variations(cell: Cell) -> set[str]:
    return set(cell.variation.split("+")) - {PLAIN}


def with_variations(cell: Cell, words: Iterable[str]) -> Cell:
    """Return a configuration with these variations instead of its own, in the order of VARIATIONS."""
    chosen = set(words)
    return dataclasses.replace(cell, variation="+".join(word for word in VARIATIONS if word in chosen) or PLAIN)


# ---------------------------------------------------------------- valid cells


def precisions(engine: str) -> tuple[str, ...]:
    """Return the precision classes that are tested with an engine. fp16 requires DeepSpeed without accelerate."""
    return (*ENGINES[engine], "fp16") if engine.startswith("zero") else ENGINES[engine]


def optimizers(engine: str) -> tuple[str, ...]:
    """Return the optimizers that are tested with an engine."""
    if "zero" not in engine:
        without: tuple[str, ...] = cells.OF_DEEPSPEED_ALONE
    else:
        without = ("torch_muon",) if engine == "zero0" else UNLIKE_THE_REFERENCE
    return tuple(name for name in OPTIMIZERS if name not in without)


def is_valid(cell: Cell) -> bool:
    """Return whether a configuration can be tested. The engine may still refuse it.

    It can be if the test model, the adapters and the reference support it.
    """
    words = variations(cell)
    return (
        cell.precision in precisions(cell.engine)
        and cell.optimizer in optimizers(cell.engine)
        and not any(pair <= words for pair in EXCLUSIVE)
        and all(_supports(cell, word) for word in words)
    )


def _supports(cell: Cell, variation: str) -> bool:
    """Return whether a configuration allows a variation, without regard to its other variations."""
    if variation == "buckets":
        return cell.engine not in cells.WITHOUT_BUCKETS
    if variation == "loader":
        return cell.through_accelerate and cell.batch_size % (cell.num_ranks * cell.accumulation) == 0
    if variation == "schedule":  # accelerate wants a scheduler of DeepSpeed's file beside an optimizer of that file
        return not (cell.through_accelerate and cell.is_deepspeed and cell.optimizer in NAMES_IN_FILE)
    if variation == "clipping_absent":
        return cell.is_deepspeed and not cell.clipping
    if variation == "zero_init":
        return "zero3" in cell.engine
    if variation == "skipped":
        return cell.precision == "fp16"
    return True


# ---------------------------------------------------------------- drawing


def drawn(seed: int) -> Iterator[Cell]:
    """Yield random valid configurations without end. The seed determines the sequence, and none is repeated."""
    generator = random.Random(seed)
    before: set[Cell] = set()
    while True:
        cell = _draw(generator)
        # Most cells that are like one of these in one respect fail.
        is_muon_clipped = cell.optimizer == "muon" and cell.max_norm < math.inf
        has_known_fault = cell.does("two_backward") or is_stage_0_in_16_bits(cell) or is_muon_clipped
        if cell in before or (has_known_fault and generator.random() > SHARE_OF_KNOWN_FAULTS):
            continue
        before.add(cell)
        yield cell


def _draw(generator: random.Random) -> Cell:
    engine = generator.choice(tuple(ENGINES))
    cell = Cell(
        engine,
        generator.choice(precisions(engine)),
        num_ranks=generator.choice((1, 2, 2)),
        accumulation=generator.choice(ACCUMULATIONS),
        clipping=generator.random() < 1 / 3,
        optimizer=ADAMW if generator.random() < 1 / 2 else generator.choice(optimizers(engine)),
    )
    if cell.precision == "fp16" and generator.random() < 1 / 2:  # no other class can have this variation
        cell = with_variations(cell, {"skipped"})
    num_variations = generator.randrange(MOST_VARIATIONS + 1)
    for word in generator.sample(VARIATIONS, len(VARIATIONS)):
        if len(variations(cell)) < num_variations and is_valid(
            candidate := with_variations(cell, {*variations(cell), word})
        ):
            cell = candidate
    return cell


# ---------------------------------------------------------------- shrinking


def simpler(cell: Cell) -> list[Cell]:
    """Return valid configurations that are simpler than a given one, the simplest first.

    First come cells that keep no more than one of its features, then those that lack one of its features.
    """
    plain = dataclasses.replace(cell, accumulation=1, clipping=False, variation=PLAIN, optimizer=ADAMW)
    alone = [plain]
    alone += [with_variations(plain, {word}) for word in VARIATIONS if cell.does(word)]
    alone += [dataclasses.replace(plain, **{name: getattr(cell, name)}) for name in ("accumulation", "clipping")]
    alone += [dataclasses.replace(plain, optimizer=cell.optimizer)]
    without = [with_variations(cell, variations(cell) - {word}) for word in VARIATIONS if cell.does(word)]
    without += [dataclasses.replace(cell, clipping=False), dataclasses.replace(cell, optimizer=ADAMW)]
    without += [dataclasses.replace(cell, accumulation=number) for number in (1, 2) if number < cell.accumulation]
    without += [dataclasses.replace(cell, num_ranks=1)]
    without += [dataclasses.replace(cell, precision=precision) for precision in _simpler_precisions(cell.precision)]
    without += [dataclasses.replace(cell, engine=engine) for engine in _simpler_engines(cell.engine)]
    candidates = dict.fromkeys((*alone, *without))
    # Every cell of stage 0 in 16 bits fails. It does not explain why a cell of another stage fails.
    return [
        candidate
        for candidate in candidates
        if candidate != cell and is_valid(candidate) and is_stage_0_in_16_bits(candidate) <= is_stage_0_in_16_bits(cell)
    ]


def is_stage_0_in_16_bits(cell: Cell) -> bool:
    return cell.engine == "zero0" and cell.precision in ("bf16", "fp16")


def _simpler_precisions(precision: str) -> tuple[str, ...]:
    return {"fp32": (), "bf16_fp32_sum": ("fp32", "bf16")}.get(precision, ("fp32",))


def _simpler_engines(engine: str) -> list[str]:
    """Return the engines that are one step simpler: without accelerate, without offload, or at a lower ZeRO stage."""
    names = [engine.removeprefix("accelerate_"), engine.removesuffix("_cpu_offload")]
    names += [re.sub(r"zero\d", f"zero{stage - 1}", engine) for stage in (1, 2, 3) if f"zero{stage}" in engine]
    return [name for name in dict.fromkeys(names) if name != engine and name in ENGINES]


def kind_of(verdict: Mapping[str, Any]) -> str:
    """Return how a configuration failed, as a text that is equal for two failures of the same kind.

    It is empty if the cell did not fail. Wrong cells differ in whether the ranks have different weights, in whether
    otherwise the weights are wrong or only the reported norm, and in whether states have a wrong type. Crashed cells
    differ in the error, without the numbers in its message.
    """
    if verdict["verdict"] == "crashed":
        message = re.sub(r"\d+", "#", verdict["message"])
        return f"crashed while {verdict['stage']}: {message[:60]}"
    if verdict["verdict"] != "wrong":
        return ""
    words = ["states of a wrong type"] if verdict.get("wrong_states") else []
    if verdict["ranks_apart"]:  # in 16 bits, each rank alone may be within its bound
        words.insert(0, "wrong: different ranks")
    elif verdict["beyond"]:
        words.insert(0, "wrong norm" if verdict["beyond"] == ["norm"] else "wrong training")
    return ", ".join(words)


def shrink(failed: Collection[Cell], verdicts: dict[str, dict[str, Any]], examine: Examine) -> dict[Cell, Cell]:
    """Return the simplest configuration that fails in the same way, for each failed configuration.

    `verdicts` has the verdicts on these cells. Cells that it lacks are examined, and their verdicts are added to it.
    """
    current = {cell: cell for cell in failed}
    pending = set(failed)
    while pending:
        candidates = dict.fromkeys(c for cell in current if cell in pending for c in simpler(current[cell]))
        if missing := [candidate for candidate in candidates if candidate.name not in verdicts]:
            verdicts.update(examine(missing))
        for cell in sorted(pending, key=lambda cell: cell.name):
            kind = kind_of(verdicts[cell.name])
            failing = [c for c in simpler(current[cell]) if kind_of(verdicts[c.name]) == kind]
            if failing:
                current[cell] = failing[0]
            else:
                pending.remove(cell)
    return current


def has_all_features(cell: Cell, simple: Cell) -> bool:
    """Return whether a configuration has all features of a simpler one, so that the same fault may make both fail."""
    return (
        variations(simple) <= variations(cell)
        and simple.accumulation in (1, 2, cell.accumulation)
        and simple.accumulation <= cell.accumulation
        and simple.clipping <= cell.clipping
        and simple.num_ranks <= cell.num_ranks
        and simple.optimizer in (ADAMW, cell.optimizer)
        and simple.precision in (cell.precision, *_simpler_precisions(cell.precision))
        and simple.engine in _all_simpler_engines(cell.engine)
        and is_stage_0_in_16_bits(simple) <= is_stage_0_in_16_bits(cell)
    )


def _all_simpler_engines(engine: str) -> set[str]:
    return {engine}.union(*map(_all_simpler_engines, _simpler_engines(engine)))


# ---------------------------------------------------------------- known failures


@cache
def read_known() -> list[KnownFailure]:
    """Return the entries of known.yaml, which explain known failures."""
    return [KnownFailure(**entry) for entry in parse_yaml(KNOWN.read_text())]


def known_reason(cell: Cell, kind: str) -> str | None:
    """Return why a minimal configuration fails. None if the reason is not known. `kind` is the result of `kind_of`."""
    for entry in read_known():
        if re.fullmatch(entry.cells, cell.name) and kind.startswith(entry.kind):
            return entry.reason
    newest = _newest()
    if cell.is_deepspeed and kind.startswith("wrong"):
        version = newest["versions"]["deepspeed"]
        for fault in faults.faults_of(version, cell.engine, [cell.precision], variations(cell)):
            return fault.what
    for name, fixed in newest["cells"].items():
        if _differs_in_numbers(cell.name, name) and kind_of(fixed) == kind:
            return f"the fixed cell {name} fails in the same way"
    return None


@cache
def _newest() -> dict[str, Any]:
    return results.newest()


def _differs_in_numbers(name: str, fixed: str) -> bool:
    """Return whether the names of two configurations differ only in the numbers of ranks and micro batches."""
    numbers = r"/\d-ranks?/accumulation-\d"
    return re.sub(numbers, "", name) == re.sub(numbers, "", fixed)


# ---------------------------------------------------------------- a run


class Campaign:
    """A series of tests of random configurations, with the minimal configurations to which failures were reduced."""

    def __init__(self, seed: int, examine: Examine) -> None:
        self.seed, self.examine = seed, examine
        self.cells = drawn(seed)
        self.drawn: list[Cell] = []
        self.minimal: dict[Cell, list[Cell]] = {}  # the drawn cells that shrank to each minimal cell
        self.verdicts: dict[str, dict[str, Any]] = {}  # of every cell that was examined, by name

    def draw(self, number: int) -> None:
        """Draw and test `number` further configurations, and reduce each failure to a minimal configuration.

        A failed cell that has all features of an earlier minimal cell, and fails in the same way, is not reduced again.
        """
        batch = [next(self.cells) for _ in range(number)]
        self.drawn += batch
        if missing := [cell for cell in batch if cell.name not in self.verdicts]:
            self.verdicts.update(self.examine(missing))
        unexplained = []
        for cell in batch:
            if not (kind := kind_of(self.verdicts[cell.name])):
                continue
            causes = [simple for simple in self.minimal if kind == self.kind(simple) and has_all_features(cell, simple)]
            if causes:
                self.minimal[causes[0]].append(cell)
            else:
                unexplained.append(cell)
        for cell, simple in shrink(unexplained, self.verdicts, self.examine).items():
            self.minimal.setdefault(simple, []).append(cell)

    def kind(self, cell: Cell) -> str:
        return kind_of(self.verdicts[cell.name])

    def reason(self, simple: Cell) -> str | None:
        """Return why a minimal configuration fails. None if the reason is not known."""
        return known_reason(simple, self.kind(simple))

    def report(self) -> dict[str, Any]:
        """Return the counts for JSON, and each minimal configuration with the reason why it fails."""
        verdicts = [self.verdicts[cell.name] for cell in self.drawn]
        counts = Counter(verdict["verdict"] for verdict in verdicts)
        refusals = Counter(verdict["message"] for verdict in verdicts if verdict["verdict"] == "refused")
        return {
            "seed": self.seed,
            "cells_drawn": len(self.drawn),
            "cells_examined": len(self.verdicts),
            "verdicts": {name: counts[name] for name in results.VERDICTS},
            "failures": [
                {
                    "cell": simple.name,
                    "cells_drawn": len(origins),
                    "first_drawn": origins[0].name,
                    "kind": self.kind(simple),
                    "explanation": results.explanation(self.verdicts[simple.name]),
                    "known": self.reason(simple),
                }
                for simple, origins in sorted(self.minimal.items(), key=lambda item: -len(item[1]))
            ],
            "refusals": dict(refusals.most_common()),
        }
