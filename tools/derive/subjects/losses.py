"""How far the final losses of the strategies are from those of DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import committed_runs
import first_screen
from committed_runs import CPU
from wording import STRATEGY_NAMES, percent, tabulate

from study.compare import verdict_text
from study.records import find as records
from study.records.steps import steps_of
from zero_study import terminal


def learned(study: str) -> str:
    """List the strategies and planted faults of a study of losses: how far they end from DDP, and the test's p."""
    table = verdict_text.table_of_arms(committed_runs.learned(study))
    head = "| trained with | seeds | mean difference | 90 % interval | largest difference | p | "
    rows = [" | ".join(line.split(" | ")[at] for at in (0, 1, 2, 3, 4, 6)) + " |" for line in table[1:]]
    return "\n".join([head.strip(), *rows]).replace(", wrong on purpose", " (planted fault)")


WITH_MARGINS = {
    "learned": "BERT of two layers, fp32",
    "learned-gpt": "GPT of two layers, fp32",
    "learned-bf16": "the same GPT, bf16 under autocast",
}


def margins() -> str:
    """Say what the studies found whose margins were fixed in advance."""
    rows = []
    for name, model in WITH_MARGINS.items():
        study, _, verdict, _ = committed_runs.learned(name)
        arms = [arm for arm in verdict.arms if not arm.is_broken]
        alike = [arm for arm in arms if arm.is_within and not arm.is_further]
        *others, last = (STRATEGY_NAMES[arm.name] for arm in alike)
        names = f"{', '.join(others)} and {last}"
        faults = [arm.is_further for arm in verdict.arms if arm.is_broken]
        result = "**No difference detected.**" if alike == arms else "**A difference was detected.**"
        if verdict.lacks:
            result = f"**No verdict**, because {'; '.join(verdict.lacks)}."
        cells = [
            f"[`{name}`](../study/studies/{name}.yaml)",
            f"{model}, {max(len(arm.differences) for arm in arms)} seeds, {study.protocol.step} steps",
            f"{result} The test detected {sum(faults)} of {len(faults)} planted faults, and no difference for {names}. "
            f"Their mean losses are within {terminal.percent(study.protocol.margin)} of DDP's.",
        ]
        rows.append(cells)
    return tabulate(["study", "model", "result"], rows)


def furthest_strategies() -> str:
    """Name the three largest differences from DDP's final loss, each with its strategy and seed."""
    arms = [arm for arm in committed_runs.learned().verdict.arms if not arm.is_broken]
    differences = [(value, arm.name, seed) for arm in arms for seed, value in arm.differences.items()]
    largest = sorted(differences, key=lambda each: -abs(each[0]))[:3]
    texts = [f"{100 * value:+.2f} % ({STRATEGY_NAMES[name]}, seed {seed})" for value, name, seed in largest]
    return f"{texts[0]}, {texts[1]} and {texts[2]}"


def equal_weights() -> str:
    """Count the seeds of `learned` with which FSDP2 and DDP end with the same weights, bit by bit."""
    weights = {name: file.record.final_parameters for name, file in runs_of_learned().items()}
    seeds = [seed for strategy, seed in weights if strategy == "fsdp2"]
    return f"{sum(weights['fsdp2', seed] == weights['ddp', seed] for seed in seeds)} of {len(seeds)}"


@cache
def runs_of_learned() -> dict[tuple[str, int], records.RecordFile]:
    """Return the runs of `learned` that are no variations of DDP, by strategy and seed."""
    files = records.find([CPU / "learned"])
    plain = [file for file in files if file.record.run_id.endswith(f"-seed{file.record.seed}")]
    return {(file.record.strategy, file.record.seed): file for file in plain}


def norms_of_seed_24() -> str:
    """Name the first step in which the gradient norms of DDP and FSDP2 differ, and these norms."""
    steps = zip(*(steps_of(runs_of_learned()[name, 24]) for name in ("ddp", "fsdp2")), strict=True)
    ddp, fsdp2 = next(pair for pair in steps if pair[0]["grad_norm"] != pair[1]["grad_norm"])
    return f"step {ddp['step']} was {ddp['grad_norm']:.9g} under DDP and {fsdp2['grad_norm']:.9g} under FSDP2"


def difference_of_seed_24() -> str:
    (fsdp2,) = (arm for arm in committed_runs.learned().verdict.arms if arm.name == "fsdp2")
    return percent(abs(fsdp2.differences[24]))


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/losses.md", "margins"): margins,
    ("reports/losses.md", "learned"): partial(learned, "learned"),
    ("reports/losses.md", "gpt"): partial(learned, "learned-gpt"),
    ("reports/losses.md", "bf16"): partial(learned, "learned-bf16"),
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/losses.md", "rounding"): first_screen.largest_difference,
    ("reports/losses.md", "furthest"): furthest_strategies,
    ("docs/losses.md", "ddp_again"): first_screen.variants_of_ddp,
    ("docs/losses.md", "equal_weights"): equal_weights,
    ("docs/losses.md", "norms"): norms_of_seed_24,
    ("docs/losses.md", "seed_24"): difference_of_seed_24,
}
