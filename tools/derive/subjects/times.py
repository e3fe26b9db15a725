"""Step times, throughput and messages of this project's runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import first_screen
from committed_runs import CPU, runs_by_strategy, speeds_by_strategy
from wording import number_of, one_of, tabulate, whole_percent

from study.compare import frontier
from study.compare.communication_views import NetworkCell, network_cells
from study.records import find as records
from study.report import plots, tables
from subjects import memory
from zero_study.engines.strategy_names import in_order


def speeds() -> str:
    """List the largest batch of each strategy under 3 GiB, its time at DDP's batch, and its throughput at its own."""
    largest = {row.strategy: row.trained for row in frontier.largest([CPU / "equal-memory-batches"])}
    timed = {row.strategy: row.cells() for row in frontier.speeds([CPU / "equal-memory"])}
    columns = "time per step at DDP's batch, compared with DDP", "throughput at its largest batch, compared with DDP"
    head = ["strategy", "largest batch", *columns]
    names = in_order({*largest, *timed})
    cells_of = {name: [largest.get(name), *(timed.get(name, [""] * 6)[at] for at in (2, 5))] for name in names}
    return tabulate(head, [[name, *(cell or "" for cell in cells)] for name, cells in cells_of.items()])


def series() -> str:
    """List the same ratios over several series of runs, with the interval for one more series."""

    def with_interval(ratios: tuple[float, ...]) -> str:
        if len(ratios) < 2:
            return ", ".join(f"{ratio:.2f}" for ratio in ratios)
        middle, low, high = frontier.mean_over_series(ratios)
        return f"{middle:.2f} ({low:.2f} to {high:.2f}; {len(ratios)})"

    table_rows = [
        [name, with_interval(row.equal_ratios), str(row.batch or ""), with_interval(row.own_ratios)]
        for name, row in speeds_by_strategy().items()
    ]
    of_what = "(95 % prediction interval; number of series)"
    step, throughput = (f"{name} compared with DDP {of_what}" for name in ("time per step", "throughput"))
    return tabulate(["strategy", step, "largest batch", throughput], table_rows)


def batches() -> str:
    """Give the largest batch of each strategy under 3 GiB, and its throughput with this batch, compared with DDP."""
    largest = {row.strategy: row.trained for row in frontier.largest([CPU / "equal-memory-batches"])}
    rows = speeds_by_strategy()
    cells = [["`ddp`", largest["ddp"], "1.00x"]]
    for name in memory.SHOWN[1:]:
        if ratios := rows[name].own_ratios:
            num_series = len(rows[name].equal_ratios)
            failed = num_series - len(ratios)
            batch = f"{rows[name].batch}" + f" (out of memory in {failed} of {num_series} series)" * bool(failed)
            cells.append([f"`{name}`", batch, "{:.2f}x ({:.2f} to {:.2f})".format(*frontier.mean_over_series(ratios))])
    head = "strategy", "largest batch, in sequences per step", "throughput compared with DDP (95 % interval)"
    return tabulate(head, cells)


def step_time(strategy: str) -> str:
    """Return a step time compared with DDP: the mean over all series of runs."""
    return f"{first_screen.times()[strategy]:.2f}"


def identical_runs(strategy: str) -> str:
    """Return the largest difference between the times of identical runs of `cpu-time`."""
    runs = plots.filter_runs(tables.runs(CPU / "cpu-time"), status="ok", strategy=strategy)
    seconds = runs["step_seconds"].groupby(runs["run"].str.replace(r"-repeat\d+", "", regex=True))
    return whole_percent(float((seconds.max() / seconds.min() - 1).max()))


def sent(strategy: str) -> float:
    """Return the bytes that a step of the GPT sends, divided by the bytes of all parameters."""
    run = runs_by_strategy("124m").loc[strategy]
    return float(run.sent_gib_per_step * 2**30 / (4 * run.parameters))


def sent_bytes(*strategies: str) -> str:
    return one_of(f"{sent(name):.2f}" for name in strategies)


@cache
def on_a_network() -> list[tuple[NetworkCell, float]]:
    """Return the results of the study `network`, each with its step time compared with DDP on the same network."""
    cells = network_cells(records.find([CPU / "network"]))
    ddp = {(cell.layout, cell.rate): cell.median_seconds for cell in cells if cell.strategy == "ddp"}
    return [(cell, cell.median_seconds / ddp[cell.layout, cell.rate]) for cell in cells if cell.strategy != "ddp"]


def one_rank_per_machine() -> str:
    """Return the shortest step time of all strategies with one rank per machine, compared with DDP."""
    return f"{min(ratio for cell, ratio in on_a_network() if cell.layout.ranks == 1):.2f}"


def hybrid(megabits: int) -> str:
    """Return the step time of hybrid FSDP2 on a network of this rate, compared with DDP."""
    kind = "fsdp2_hybrid", 1e6 * megabits
    (ratio,) = (ratio for cell, ratio in on_a_network() if (cell.strategy, cell.rate) == kind)
    return f"{ratio:.2f}"


def equal_on_several_machines() -> str:
    """Count the runs of the study `machines` whose losses are those of the same run on one machine."""
    cells = network_cells(records.find([CPU / "machines"]))
    return number_of(sum(cell.from_one_machine == 0 for cell in cells), len(cells))


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/memory-and-time.md", "batches"): batches,
    ("reports/memory-and-time.md", "speeds"): speeds,
    ("reports/memory-and-time.md", "series"): series,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/concepts.md", "sent_ddp"): partial(sent_bytes, "ddp"),
    ("docs/concepts.md", "sent_zero2"): partial(sent_bytes, "zero1", "zero2"),
    ("docs/concepts.md", "sent_zero2_tuned"): partial(sent_bytes, "zero2_tuned"),
    ("docs/concepts.md", "sent_zero3"): partial(sent_bytes, "zero3"),
    ("docs/concepts.md", "sent_zero3_tuned"): partial(sent_bytes, "zero3_tuned"),
    ("docs/concepts.md", "sent_fsdp2"): partial(sent_bytes, "fsdp2"),
    ("docs/machines.md", "equal"): equal_on_several_machines,
    ("reports/machines.md", "equal"): equal_on_several_machines,
    ("reports/machines.md", "one_rank"): one_rank_per_machine,
    ("reports/machines.md", "hybrid_300"): partial(hybrid, 300),
    ("reports/machines.md", "hybrid_100"): partial(hybrid, 100),
    **{
        ("docs/memory-and-time.md", f"{name}_peak"): partial(memory.ratio, "124m", name)
        for name in ("zero3", "zero3_tuned", "fsdp2")
    },
    **{
        ("docs/memory-and-time.md", f"{name}_time"): partial(step_time, name)
        for name in ("zero2_tuned", "zero3_tuned", "fsdp2")
    },
    ("docs/memory-and-time.md", "identical_zero1"): partial(identical_runs, "zero1"),
    ("docs/memory-and-time.md", "identical_ddp"): partial(identical_runs, "ddp"),
}
