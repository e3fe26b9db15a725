"""Logs of parameter-golf: one program with DDP on two and on eight H100."""

from __future__ import annotations

import re
from collections.abc import Iterator

from public_sources.checkout import Checkout
from public_sources.reading import numbers_in, of_totals, with_few_steps
from zero_study.public_runs.schema import PublicRun, Series

ENTRY = "2026-03-17_LoRA_TTT"
FOLDER = f"records/track_10min_16mb/{ENTRY}/"
STEP = re.compile(r"^step:(\d+)/\d+ (train|val)_loss:([\d.]+).*? train_time:([\d.]+)ms", re.MULTILINE)
PEAKS = re.compile(r"^peak memory allocated: (\d+) MiB reserved: (\d+) MiB", re.MULTILINE)
SIZES = re.compile(r"^train_batch_tokens:(\d+) train_seq_len:(\d+) iterations:(\d+)", re.MULTILINE)
GPUS = re.compile(r"^world_size:(\d+) grad_accum_steps:(\d+)", re.MULTILINE)
PARAMETERS = re.compile(r"^model_params:(\d+)", re.MULTILINE)
SEED = re.compile(r"^seed:(\d+)", re.MULTILINE)
MOST = 150  # training steps that are kept; every evaluation is kept
MIB = 1 << 20


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the four trainings. The losses after a compression of the model and after its fine-tuning are left out."""
    for path in checkout.under(f"{FOLDER}train_v", suffix=".txt"):
        text = checkout.read(path).decode(errors="replace")
        log = text[text.rindex("\n====") :] if "\n====" in text else text  # the log begins with the program
        torch = re.search(r"^Running PyTorch (\S+)", text, re.MULTILINE)
        tokens, length, planned, gpus, accumulation, parameters, seed, allocated, reserved = (
            int(number) for pattern in (SIZES, GPUS, PARAMETERS, SEED, PEAKS) for number in numbers_in(log, pattern)
        )
        batch = tokens // length
        columns: dict[str, dict[str, list[float | int | None]]] = {"train": {}, "val": {}}
        for step, kind, loss, milliseconds in STEP.findall(log):
            values = {
                "step": int(step),
                "samples": int(step) * batch,
                "seconds": float(milliseconds) / 1000,
                "loss" if kind == "train" else "evaluation_loss": float(loss),
            }
            for name, value in values.items():
                columns[kind].setdefault(name, []).append(value)
        run = of_totals(
            checkout, path, f"{ENTRY}-{path.rpartition('_')[2].removesuffix('.txt')}", "parameter-golf",
            {"peak_allocated_bytes": allocated * MIB, "peak_reserved_bytes": reserved * MIB},
            ending="finished",
            entry=ENTRY,
            model="GPT of parameter-golf",
            parameters=parameters,
            data="FineWeb",
            gpu="H100-SXM5-80GB",
            num_gpus=gpus,
            num_nodes=1,
            program="parameter-golf",
            engine="DDP",
            strategy="ddp",
            precision="bf16",
            optimizer="Muon and Adam",
            compiled=True,
            accumulation_steps=accumulation,
            micro_batch_size=batch // (gpus * accumulation),
            global_batch_size=batch,
            sequence_length=length,
            planned_steps=planned,
            seed=seed,
            versions={"torch": torch[1]} if torch else {},
        )  # fmt: skip
        series = {"training": Series(columns=columns["train"]), "evaluation": Series(columns=columns["val"])}
        yield with_few_steps(run.model_copy(update=series), MOST)
