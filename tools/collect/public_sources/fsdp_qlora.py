"""fsdp_qlora, March 2024: LoRA and QLoRA of Llama 2 and Yi with FSDP on RTX 3090, A100 and H100."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from public_sources.checkout import Checkout
from public_sources.reading import number_in, of_totals
from zero_study.public_runs.schema import PublicRun

FILE = "benchmarks_03_2024.md"
# Other cards are kept apart, as a test of predictions that nobody has seen. Their section is cut away unread.
OTHER_CARDS = re.compile(r"^## Case Study: A Dual 4090 .*?(?=^## Recommendations )", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^(\|.*\|)\n\|[ :|-]+\|\n((?:\|.*\|\n)+)\n\*(.+)\*$", re.MULTILINE)
CARDS = {"A100 40GB SMX": "A100-SXM4-40GB", "H100 80GB SXM": "H100-SXM5-80GB"}
MODELS = {"Llama-2 7B": ("Llama 2 7B", "7b"), "Yi 34B": ("Yi 34B", "34b"), "Llama-2 70B": ("Llama 2 70B", "70b")}
ALLOCATED = re.compile(r"peak allocated memory is ([\d.]+) GiB vs ([\d.]+) GiB, respectively")  # 512 and 2048 tokens
SAMPLES = 1024  # in each training, by the commands
GIB = 1 << 30


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the rows of three cards. Rows that were predicted have the names of the committed predictions."""
    whole = checkout.read(FILE).decode()
    text = OTHER_CARDS.sub(lambda cut: "\n" * cut[0].count("\n"), whole)
    assert text != whole
    allocated = ALLOCATED.search(text)
    assert allocated is not None
    for table in TABLE.finditer(text):
        head = _cells(table[1])
        for offset, line in enumerate(table[2].splitlines()):
            row = dict(zip(head, _cells(line), strict=True))
            gpu = CARDS.get(row["Accelerator"]) if "Accelerator" in row else "RTX 3090"
            model = next((each for name, each in MODELS.items() if table[3].startswith(name)), None)
            if gpu is None or model is None:
                continue
            number = text[: table.start(2)].count("\n") + 1 + offset
            kind, length = row.get("Train Type", "QLoRA"), int(row.get("Context Length", 2048))
            batch, is_ddp = int(row.get("Batch Size", 1)), row.get("DDP") == "True"
            is_offloaded = "True" in (row.get("CPU Offload"), row.get("CPU+Activation Offload"))
            name = _name(row, gpu, model[1], kind, batch, is_ddp, is_offloaded)
            totals: dict[str, float] = {"samples": SAMPLES, "seconds": number_in(row["Time (s)"])}
            if "Peak Memory (GiB)" in row:
                totals["peak_reserved_bytes"] = round(float(row["Peak Memory (GiB)"]) * GIB)
            if name in ("fq-3090-7b-lora-512", "fq-3090-7b-lora-2k"):
                totals["peak_allocated_bytes"] = round(float(allocated[1 + name.endswith("2k")]) * GIB)
            yield of_totals(
                checkout, FILE, name, "text", totals, lines=[number, number],
                entry=name,
                model=model[0],
                data="random tokens" if gpu == "RTX 3090" else None,
                gpu=gpu,
                num_gpus=int(row.get("GPUs", 2)),
                num_nodes=1,
                network=None,
                program="fsdp_qlora",
                engine="FSDP1",
                strategy="no_shard" if is_ddp else "fsdp",
                offload=_offload(row) if is_offloaded else "nothing",
                precision="bf16",
                adapter=kind,
                activation_checkpointing=True,
                micro_batch_size=batch,
                sequence_length=length,
            )  # fmt: skip


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _offload(row: dict[str, Any]) -> str:
    return "parameters" if "CPU Offload" in row else "parameters and activations"


def _name(
    row: dict[str, Any], gpu: str, size: str, kind: str, batch: int, is_ddp: bool, is_offloaded: bool
) -> str:  # fmt: skip
    """Return the name of a row. It says what the row's table varies."""
    if "Accelerator" in row:
        return f"fq-{gpu.partition('-')[0].lower()}-{size}-x{row['GPUs']}"
    start = f"fq-3090-{size}-{kind.lower()}-"
    if "Context Length" in row:
        return start + {"512": "512", "2048": "2k"}[row["Context Length"]]
    return start + ("ddp" if is_ddp else f"offload-b{batch}" if is_offloaded else f"b{batch}")
