"""One process compared with several, by this project's runs on CPUs and by public runs on GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from committed_runs import CPU, learned, peak_runs
from wording import percent, tabulate, whole_percent

from study.compare import parity
from study.records import find as records
from study.report import plots, public_answers, sentences, tables
from zero_study.terminal import scientific


def memory() -> str:
    """Compare the peak of tensors of one process with that of each of two and of four, for a GPT in fp32."""
    runs = plots.filter_runs(peak_runs(), size="124m", precision="fp32")
    peaks = {(run.strategy, run.processes): run.peak_gib for run in runs.itertuples()}

    def cell(strategy: str, processes: int) -> str:
        peak = peaks.get((strategy, processes))
        return "" if peak is None else f"{peak:.2f} GiB ({peak / peaks['single', 1]:.2f}x)"

    shown = ("single", "ddp", "zero3_tuned", "fsdp2")
    rows = [[f"`{name}`", *(cell(name, processes) for processes in (1, 2, 4))] for name in shown]
    return tabulate(["strategy", "1 process", "2 processes", "4 processes"], rows)


def losses() -> str:
    """Count the runs of `parity` on several processes without dropout, and say how far they are from one process."""
    alone: dict[str, records.RecordFile] = {}
    several: list[records.RecordFile] = []
    for file in parity.finished(records.find([CPU / "parity"])):
        if file.record.world_size > 1 and not file.record.config["dropout"]:
            several.append(file)
        elif file.record.run_id.endswith("-single-1x-seed0"):
            alone[parity.same_training(file)] = file
    differences = [parity.largest_loss_difference(file, alone[parity.same_training(file)]) or 0 for file in several]
    strategies = {file.record.strategy for file in several}
    return (
        f"In {len(several)} trainings with {len(strategies)} strategies on two or four processes, without dropout, the "
        f"loss of every step differs from that of one process by at most {scientific(max(differences))} (relative)"
    )


def learned_loss() -> str:
    """Say how far the held-out losses of one process and of two are apart after a long training."""
    differences = learned().verdict.null["single"].values()
    return (
        f"With {len(differences)} seeds, the held-out losses of one and of two processes differ by "
        f"{percent(abs(statistics.mean(differences)))} in the mean, and by up to "
        f"{whole_percent(max(map(abs, differences)))} with one seed"
    )


def speed(strategy: str) -> str:
    """Return the sequences per second of two processes, divided by those of one process, in runs of `cpu-time`."""
    runs = plots.filter_runs(tables.runs(CPU / "cpu-time"), status="ok", steps=45)
    rates = runs.groupby("strategy")["sequences_per_second"].median()
    return f"{rates[strategy] / rates['single']:.2f}"


def public() -> str:
    """Return the sentences about public runs on one GPU and on several."""
    two, eight = public_answers.one_and_two(), public_answers.eight()
    return sentences.bullets([f"**One A100 and two:** {two}", f"**One H100 and eight:** {eight}"])


PAGE = "docs/one-gpu-or-several.md"
TABLES: dict[tuple[str, str], Callable[[], str]] = {(PAGE, "memory"): memory, (PAGE, "public"): public}
NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    (PAGE, "losses"): losses,
    (PAGE, "learned"): learned_loss,
    **{(PAGE, f"speed_{name}"): partial(speed, name) for name in ("ddp", "zero2", "zero3")},
}
