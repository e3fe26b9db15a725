"""Which strategies end with bitwise identical weights, and which roundings cause the differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from committed_runs import CPU
from wording import STRATEGY_NAMES, number_of, tabulate

from study.compare import bits
from study.records import find as records
from study.running import studies
from zero_study.engines.strategy_names import in_order
from zero_study.files import ROOT
from zero_study.strategy.file import names as strategy_names
from zero_study.terminal import scientific


@cache
def exact_report() -> dict[str, Any]:
    """Return the committed results of the trainings in exact arithmetic."""
    return json.loads((ROOT / "reports" / "exact.json").read_text())


def cells_that_trained() -> list[dict[str, Any]]:
    return [cell for cell in exact_report()["cells"] if not cell["outcome"].startswith("refused")]


@cache
def with_digests() -> list[records.RecordFile]:
    """Return the runs of the study `bits` that ended well and recorded digests of their weights."""
    return [file for file in records.find([CPU / "bits"]) if file.record.status == "ok" and file.record.digests]


def exact() -> str:
    """Numbers of trainings in exact arithmetic that equal the reference or were refused, and the planted faults."""
    report, trained = exact_report(), cells_that_trained()
    num_matching = sum(cell["outcome"] == "same bits" for cell in trained)
    trained_strategies = {cell["strategy"] for cell in trained}
    never_trained = {cell["strategy"] for cell in report["cells"]} - trained_strategies
    faults = {fault["fault"] for fault in report["faults"]}
    engines = in_order(fault["strategy"] for fault in report["faults"])
    num_seen = sum(fault["seen"] for fault in report["faults"])
    rows = [
        ["trainings that are bitwise identical to the reference", f"{num_matching} of {len(trained)}"],
        ["strategies that were trained", ", ".join(in_order(trained_strategies))],
        ["strategies that cannot be trained on a CPU", ", ".join(in_order(never_trained))],
        [
            f"detected cases of {len(faults)} planted faults, each under {', '.join(engines)}",
            f"{num_seen} of {len(report['faults'])}",
        ],
    ]
    return tabulate(["test", "result"], rows)


def roundings() -> str:
    """List the causes of differences: what removes each, and how far pairs with only this cause end apart."""
    files = with_digests()
    rows, single = [], bits.single_roundings(files)
    met = {name for file in files for name in bits.roundings(file.record)}
    for name in (cause for cause in bits.ROUNDINGS if cause in met):
        pin, effect = f"`{bits.PIN_OF[name]}`" if name in bits.PIN_OF else "nothing", single.get(name)
        pairs = "no such pair" if effect is None else f"{effect.num_pairs - effect.num_same} of {effect.num_pairs}"
        largest = "" if effect is None or effect.largest is None else scientific(effect.largest)
        rows.append([f"**{name}**", bits.ROUNDINGS[name], pin, pairs, largest])
    head = ["cause", "explanation", "removed by", "pairs of runs with only this cause: how many differ",
            "largest relative difference of their held-out losses"]  # fmt: skip
    return tabulate(head, rows)


def plain(cell: bits.Cell | None) -> str:
    """Say what a cell of the view `bits` says, in the words of the guides."""
    if cell is None or cell.step is not None:
        return bits.cell_text(cell)
    return "(reference)" if cell.is_reference else "identical"


# Model, and the head of the setting's column in the view `bits`; then what the guide calls the setting.
WEIGHTS = {
    ("gpt-wikitext", "2 processes"): "GPT",
    ("gpt-wikitext", "2 processes, fixed order"): "GPT, fixed order",
    ("gpt-wikitext", "2 processes, clipped at 1"): "GPT, gradient clipping",
    ("gpt-wikitext", "2 processes, clipped at 1, fixed order"): "GPT, gradient clipping, fixed order",
    ("gpt-wikitext", "2 processes, 3 micro batches"): "GPT, three micro batches",
    ("gpt-wikitext", "2 processes, 3 micro batches, fixed order"): "GPT, three micro batches, fixed order",
    ("gpt-wikitext", "3 processes"): "GPT, three processes",
    ("gpt-wikitext", "3 processes, fixed order"): "GPT, three processes, fixed order",
    ("gpt-wikitext", "4 processes"): "GPT, four processes",
    ("gpt-wikitext", "4 processes, fixed order"): "GPT, four processes, fixed order",
    ("gpt-wikitext", "4 processes, fixed: collectives"): "GPT, four processes, fixed order of the collectives only",
    ("bert-imdb", "2 processes"): "BERT",
    ("bert-imdb", "2 processes, fixed order"): "BERT, fixed order",
    ("bert-imdb", "2 processes, clipped at 1"): "BERT, gradient clipping",
    ("bert-imdb", "2 processes, clipped at 1, fixed order"): "BERT, gradient clipping, fixed order",
    ("bert-imdb", "2 processes, 3 micro batches"): "BERT, three micro batches",
    ("bert-imdb", "2 processes, 3 micro batches, fixed order"): "BERT, three micro batches, fixed order",
    ("bert-imdb", "3 processes"): "BERT, three processes",
    ("bert-imdb", "3 processes, fixed order"): "BERT, three processes, fixed order",
    ("bert-imdb", "4 processes"): "BERT, four processes",
    ("bert-imdb", "4 processes, fixed order"): "BERT, four processes, fixed order",
}


SHARDED = ("zero1", "zero2", "zero3", "fsdp2")


@cache
def cells_in_fp32() -> dict[tuple[str, str], dict[str, bits.Cell | None]]:
    """Return how each strategy compares with DDP in fp32, by model and head of the setting's column."""
    columns = {
        (heading.split()[0], head): column
        for heading, column_groups in bits.settings([CPU / "bits"]).items()
        if ", fp32, " in heading
        for group in column_groups
        for head, column in zip(bits.column_headings(group), group, strict=True)
    }
    return {
        setting: {strategy: row[0] for strategy, row in bits.grid([columns[setting]]).items()} for setting in WEIGHTS
    }


def weights() -> str:
    """Say for each setting in fp32 which strategies train the weights of DDP, and why the others do not."""
    rows = [
        [WEIGHTS[setting], *(same_weights(cells.get(strategy)) for strategy in SHARDED)]
        for setting, cells in cells_in_fp32().items()
    ]
    return tabulate(["setting", *(STRATEGY_NAMES[name] for name in SHARDED)], rows)


# The setting's column in the view `bits`, and what the guide calls the setting.
SETTINGS_IN_SHORT = {
    "2 processes": "two processes",
    "2 processes, clipped at 1": "two processes, gradient clipping",
    "2 processes, 3 micro batches": "two processes, three micro batches",
    "3 processes": "three processes",
    "4 processes": "four processes",
}


def identical() -> str:
    """Name the strategies that train the weights of DDP, by setting, model and order of additions."""
    columns = {
        f"{model}{words}": (workload, suffix)
        for suffix, words in (("", ""), (", fixed order", ", fixed order"))
        for workload, model in (("gpt-wikitext", "GPT"), ("bert-imdb", "BERT"))
    }
    rows = [
        [words, *(_identical(cells_in_fp32()[workload, head + suffix]) for workload, suffix in columns.values())]
        for head, words in SETTINGS_IN_SHORT.items()
    ]
    return tabulate(["setting", *columns], rows)


def _identical(cells: dict[str, bits.Cell | None]) -> str:
    run = {name: cell for name in SHARDED if (cell := cells.get(name))}
    same = [name for name, cell in run.items() if cell.step is None]
    names = {0: "none", len(run): "all"}.get(len(same), ", ".join(STRATEGY_NAMES[name] for name in same))
    not_run = ", ".join(STRATEGY_NAMES[name] for name in SHARDED if name not in run)
    return f"{names} ({not_run} not run)" if not_run else names


def same_weights(cell: bits.Cell | None) -> str:
    """Say whether weights are those of DDP, or name the causes of the difference."""
    if cell is None:
        return "not run"
    return "identical" if cell.step is None else f"differs: {', '.join(cell.roundings)}"


def learned_bits() -> str:
    """Compare the long trainings of the study `bits-learned` with DDP's."""
    cells_by_setting: dict[str, dict[str, str]] = {}
    for heading, column_groups in bits.settings([CPU / "bits-learned"]).items():
        workload, precision, steps, seed = heading.split(", ")[:4]
        for columns in column_groups:
            for head, column in zip(bits.column_headings(columns), columns, strict=True):
                pins = "fixed order" if "fixed order" in head else "unmodified"
                cells_by_setting[f"{workload.split('-')[0].upper()}, {steps}, {seed}, {precision}, {pins}"] = {
                    name: plain(cells[0]) for name, cells in bits.grid([column]).items()
                }
    names = in_order({name for cells in cells_by_setting.values() for name in cells})
    rows = [[name, *(cells.get(name, "") for cells in cells_by_setting.values())] for name in names]
    return tabulate(["strategy", *cells_by_setting], rows)


def largest_difference(study: str, precision: str) -> str:
    """Return the largest difference from DDP's held-out loss in a study with digests, without planted faults."""
    settings = bits.settings([CPU / study]).items()
    columns = [
        column for heading, groups in settings if f", {precision}, " in heading for group in groups for column in group
    ]
    rows = [row for column in columns for row in bits.grid([column]).items()]
    return scientific(max(cell.held_out or 0 for name, (cell,) in rows if name in strategy_names()))


def bits_recorded() -> str:
    return str(len(with_digests()))


def bits_planned() -> str:
    """Return the number of runs of the study `bits`, rounded to ten."""
    return f"about {round(len(studies.runs(studies.find('bits'))), -1)}"


def exact_trainings() -> str:
    """Say how many trainings in exact arithmetic have the result of the reference."""
    trained = cells_that_trained()
    same = sum(cell["outcome"] == "same bits" for cell in trained)
    return f"All {same} trainings" if same == len(trained) else f"{same} of {len(trained)} trainings"


def planted_faults() -> str:
    """Say how many planted faults the trainings in exact arithmetic show."""
    faults = exact_report()["faults"]
    seen = sum(fault["seen"] for fault in faults)
    return (
        f"We planted {len({fault['fault'] for fault in faults})} faults, each under DDP, ZeRO-2, ZeRO-3 and FSDP2. "
        f"The test detected the fault in {number_of(seen, len(faults))} of these trainings"
    )


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/losses.md", "identical"): identical,
    ("reports/losses.md", "weights"): weights,
    ("reports/losses.md", "roundings"): roundings,
    ("reports/losses.md", "exact"): exact,
    ("reports/losses.md", "learned_bits"): learned_bits,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/losses.md", "planned"): bits_planned,
    ("docs/losses.md", "recorded"): bits_recorded,
    ("docs/losses.md", "short"): partial(largest_difference, "bits", "fp32"),
    ("docs/losses.md", "autocast"): partial(largest_difference, "bits", "bf16-autocast"),
    ("docs/losses.md", "fp64"): partial(largest_difference, "bits-learned", "fp64"),
    ("docs/losses.md", "exact"): exact_trainings,
    ("docs/one-gpu-or-several.md", "exact"): exact_trainings,
    ("docs/losses.md", "faults"): planted_faults,
}
