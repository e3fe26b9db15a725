"""MosaicML's benchmark tables of LLM Foundry: the rate of one FSDP training per row, on A100 and H100."""

from __future__ import annotations

from collections.abc import Iterator

from public_sources.checkout import Checkout
from public_sources.reading import number_in, of_totals
from zero_study.public_runs.schema import PublicRun

TABLES = "scripts/train/benchmarking/README.md"
GPUS_PER_NODE = 8
TOTALS = {
    "tokens_per_second_per_gpu": "Throughput (T/s/GPU)",
    "mfu_percent": "MFU",
    "hfu_percent": "HFU",
    "model_tflops": "Model TFLOP",
}


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the rows of all tables. The name of a run has the settings that distinguish it from the others."""
    head: list[str] = []
    for number, line in enumerate(checkout.read(TABLES).decode().splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[0] == "Model":
            head = cells
        elif line.startswith("|") and set(cells[0]) != {"-"}:
            row = dict(zip(head, cells, strict=True))
            yield _run(checkout, number, row)


def _run(checkout: Checkout, number: int, row: dict[str, str]) -> PublicRun:
    model, gpu, precision = row["Model"], row["GPU"], row["Precision"]
    length, num_gpus, micro, steps = (
        int(row[name]) for name in ("SeqLen (T)", "# GPUs", "MicroBatchSize", "GradAccum")
    )
    return of_totals(
        checkout, TABLES, f"{gpu}-{num_gpus}x-{model}-{length}-{micro}x{steps}-{precision}", "markdown",
        {name: number_in(row[column]) for name, column in TOTALS.items()},
        lines=[number, number],
        entry=f"{model}, {length} tokens, {micro} x {steps} x {num_gpus} sequences",
        model=f"mpt-{model}",
        parameters=int(row["NumParams"]),
        gpu=gpu,
        num_gpus=num_gpus,
        num_nodes=-(-num_gpus // GPUS_PER_NODE),
        program="LLM Foundry",
        engine="FSDP1",
        strategy=row["Sharding Strategy"],
        offload={"True": "activations", "False": "nothing"}[row["Activation CPUOffload"]],
        precision=precision,
        activation_checkpointing={"True": True, "False": False}[row["Activation Checkpointing"]],
        micro_batch_size=micro,
        accumulation_steps=steps,
        global_batch_size=int(row["GlobalBatchSize"]),
        sequence_length=length,
        mixed_precision=row["MP Mode"],
    )  # fmt: skip
