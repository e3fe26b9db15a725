"""Memory of this project's runs by strategy, compared with DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from committed_runs import CPU, largest_models, peak_runs, runs_by_strategy, speeds_by_strategy
from wording import tabulate, whole_percent

from study.compare import frontier
from study.report import plots, tables
from zero_study.engines.strategy_names import in_order
from zero_study.theory.model_states import paper_bytes_per_parameter

SHOWN = ["ddp", "zero1", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"]


def overview() -> str:
    """Give memory, time and largest model of each strategy together, for a GPT of 124M parameters in fp32."""
    runs = runs_by_strategy("124m")
    times = {
        name: "{:.2f}x ({:.2f} to {:.2f})".format(*frontier.mean_over_series(row.equal_ratios))
        for name, row in speeds_by_strategy().items()
        if len(row.equal_ratios) > 1
    }

    def compared_with_ddp(strategy: str, column: str) -> str:
        return f"{runs[column][strategy]:.2f} GiB ({runs[column][strategy] / runs[column]['ddp']:.2f}x)"

    rows = [
        [f"`{name}`", compared_with_ddp(name, "peak_gib"), compared_with_ddp(name, "peak_process_gib"),
         times.get(name, "1.00x"), f"{str(largest_models()[3, name]).removesuffix('m')} million"]
        for name in SHOWN
    ]  # fmt: skip
    head = [
        "strategy",
        "peak memory of the tensors, 4 sequences per step",
        "peak memory of the whole process, 4 sequences per step",
        "time per step compared with DDP (95 % interval), 8 sequences per step",
        "parameters of the largest model with 3 GiB per process, 2 sequences per step",
    ]
    return tabulate(head, rows)


BY_SIZE = {
    "GPT 11M, fp32": ("11m", "fp32"), "GPT 62M, fp32": ("62m", "fp32"), "GPT 124M, fp32": ("124m", "fp32"),
    "GPT 254M, fp32": ("254m", "fp32"), "BERT-large 335M, fp32": ("large", "fp32"),
    "GPT 124M, bf16": ("124m", "bf16"), "BERT-large 335M, bf16": ("large", "bf16"),
}  # fmt: skip


def by_size() -> str:
    """Compare the peak of tensors with DDP's by model and precision, on two processes."""
    columns = [runs_by_strategy(size, precision)["peak_gib"] for size, precision in BY_SIZE.values()]
    rows = [[f"`{name}`", *(f"{column[name] / column['ddp']:.2f}x" for column in columns)] for name in SHOWN[1:]]
    return tabulate(["strategy", *BY_SIZE], rows)


def real_peaks() -> str:
    """List the peaks of tensors in GiB, and the predicted ones in parentheses, by model, precision and processes."""
    runs = peak_runs()
    runs["cell"] = [f"{row.peak_gib:.2f} ({row.theory_peak_gib:.2f})" for row in runs.itertuples()]
    blocks = []
    for sizes in ({"124m": "GPT-124M"}, {"large": "BERT-large", "base": "BERT-base"}):
        selected = runs[(runs["processes"] > 1) & runs["size"].isin(sizes)]
        pivoted = selected.pivot(index="strategy", columns=["size", "precision", "processes"], values="cell").fillna("")
        columns = sorted(
            pivoted.columns, key=lambda column: (list(sizes).index(column[0]), column[1] != "fp32", column[2])
        )
        head = [
            "strategy",
            *(f"{sizes[size]}, {precision}, {processes} processes" for size, precision, processes in columns),
        ]
        names = in_order(pivoted.index)
        blocks.append(tabulate(head, [[name, *(pivoted.loc[name, column] for column in columns)] for name in names]))
    return "\n\n".join(blocks)


def crossings() -> str:
    """Say from which model size on each strategy needs less memory than DDP: measured, and predicted."""
    rows = [[row.strategy, row.measured, row.by_theory] for row in tables.crossings(CPU / "peaks-real").itertuples()]
    return tabulate(["strategy", "less than DDP from this size on, measured", "predicted"], rows)


def states_by_strategy() -> str:
    """Bytes of model states per parameter that each of eight processes keeps, by the ZeRO paper; FSDP2 as it is."""
    stages = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
    rows = [
        [name, *(_states_in_words(stage, precision) for precision in ("fp32", "bf16"))]
        for name, stage in stages.items()
    ]
    fsdp2 = _states_in_words(3, "fp32")  # its parameters stay in fp32 if it computes in bf16
    return tabulate(["strategy", "fp32", "bf16 with fp32 master weights"], [*rows, ["FSDP2", fsdp2, fsdp2]])


def _states_in_words(stage: int, precision: str) -> str:
    states = paper_bytes_per_parameter(stage, 8, precision)
    return f"{states.parameters:g} + {states.gradients:g} + {states.optimizer_states:g} = {states.total:g}"


# Their buffers are as large as the gradients or smaller, so that every page of them is written.
WITHOUT_DEFAULT_BUFFERS = ("single", "ddp", "ddp_tuned", "zero2_tuned", "zero3_tuned", "fsdp2")


def tuned_zero3_below_fsdp2() -> str:
    """Return the largest share that tuned ZeRO-3 saves compared with FSDP2, on four processes in bf16."""
    runs = plots.filter_runs(peak_runs(), precision="bf16", processes=4)
    peaks = runs.pivot(index="size", columns="strategy", values="peak_gib")
    return whole_percent(float((1 - peaks["zero3_tuned"] / peaks["fsdp2"]).max()))


def beside_tensors() -> str:
    """Return the least and the most memory of a process that is not in tensors."""
    runs = peak_runs()
    runs = runs[runs["strategy"].isin(WITHOUT_DEFAULT_BUFFERS)]
    rest = runs["peak_process_gib"] - runs["peak_gib"]
    return f"{rest.min():.1f} to {rest.max():.1f} GiB"


def with_offload() -> str:
    """Say how much memory a whole process needs under ZeRO-2 with offload to the CPU, and without it."""
    gib = runs_by_strategy("124m")["peak_process_gib"]
    return (
        f"{gib['zero2_cpu_offload']:.2f} GiB under ZeRO-2 with CPU offload, and {gib['zero2']:.2f} GiB under ZeRO-2 "
        "without offload"
    )


def ddp_without_buckets() -> str:
    """Give the peak of DDP with `gradient_as_bucket_view`, and compare it with DDP."""
    gib = runs_by_strategy("124m")["peak_gib"]
    return f"{gib['ddp_tuned']:.2f} GiB ({gib['ddp_tuned'] / gib['ddp']:.2f} times the memory of DDP)"


def ratio(size: str, strategy: str) -> str:
    """Return the peak of tensors of `peaks-real` in fp32 on two processes, divided by DDP's."""
    peaks = runs_by_strategy(size)["peak_gib"]
    return f"{peaks[strategy] / peaks['ddp']:.2f}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/concepts.md", "states"): states_by_strategy,
    ("docs/memory-and-time.md", "overview"): overview,
    ("docs/memory-and-time.md", "by_size"): by_size,
    ("reports/memory-and-time.md", "peaks"): real_peaks,
    ("reports/memory-and-time.md", "crossings"): crossings,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/concepts.md", "zero3_peak"): partial(ratio, "124m", "zero3"),
    ("docs/concepts.md", "zero3_tuned_peak"): partial(ratio, "124m", "zero3_tuned"),
    ("docs/memory-and-time.md", "tuned_zero3"): tuned_zero3_below_fsdp2,
    ("docs/memory-and-time.md", "zero3_large"): partial(ratio, "large", "zero3"),
    ("docs/memory-and-time.md", "beside_tensors"): beside_tensors,
    ("docs/memory-and-time.md", "ddp_tuned"): ddp_without_buckets,
    ("docs/memory-and-time.md", "offload"): with_offload,
}
