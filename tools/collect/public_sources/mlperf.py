"""Logs of MLPerf Training: Llama 2 70B with LoRA under ZeRO-3 and in NeMo, and BERT-large on A100 and H100 machines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from public_sources.checkout import Checkout
from public_sources.reading import read_run
from zero_study.public_runs.schema import PublicRun

LLAMA = "JuniperNetworks/results/"
# The names that submitters gave to the same card.
CARDS = {
    r"A100-SXM4?-80GB": "A100-SXM4-80GB",
    r"A100-SXM4?-40GB": "A100-SXM4-40GB",
    r"A100-PCI[Ee]-80GB": "A100-PCIe-80GB",
    r"A100-PCI[Ee]-40GB": "A100-PCIe-40GB",
    r"H100-SXM5?-80GB": "H100-SXM5-80GB",
    r"H100-PCI[Ee]-80GB": "H100-PCIe-80GB",
}


def llama2_lora(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings of Llama 2 70B with LoRA, accelerate and ZeRO-3."""
    for path in checkout.under(LLAMA):
        if "/llama2_70b_lora/result_" in path:
            machine = _machine(checkout, path)
            assert machine is not None
            yield read_run(
                checkout, path, f"juniper-{machine['entry'].partition('_ngc')[0]}-{_number(path)}",
                **machine,
                benchmark="MLPerf Training 4.0 llama2_70b_lora closed",
                model="Llama 2 70B",
                program="transformers Trainer with PEFT, started by accelerate",
                engine="DeepSpeed",
                strategy="zero3",
                precision="bf16",
                optimizer="AdamW",
                adapter="LoRA of qkv_proj and o_proj, rank 16, alpha 32, dropout 0.1",
                activation_checkpointing=True,
                micro_batch_size=1,
                sequence_length=8192,
                versions={"deepspeed": "0.13.2", "flash-attn": "2.4.1", "container": "pytorch:24.01-py3"},
            )  # fmt: skip


def llama2_lora_dell(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield Dell's trainings of Llama 2 70B with LoRA in NeMo on 4 to 64 H100 with one global batch."""
    for path in checkout.under("Dell/results/"):
        # The logs of the system "POWER" have the time stamps of those of the same system without it.
        if "H100-SXM-80GB/llama2_70b_lora/result_" in path:
            machine = _machine(checkout, path)
            assert machine is not None
            yield read_run(
                checkout, path, f"dell-{machine['entry']}-{_number(path)}",
                **machine,
                benchmark="MLPerf Training 4.1 llama2_70b_lora closed",
                model="Llama 2 70B",
                program="NeMo",
                engine="Megatron Core",
                strategy="tensor, context and data parallelism",
                precision="FP8 and bf16",
                optimizer="AdamW",
                adapter="LoRA, rank 16, alpha 32",
                micro_batch_size=1,
                sequence_length=8192,
            )  # fmt: skip


def bert(checkout: Checkout, release: str) -> Iterator[PublicRun]:
    """Yield the trainings of BERT-large on A100 and H100 of one release of the benchmark, closed division."""
    for path in checkout.paths:
        if re.search(r"/results/[^/]+/bert/result_\d+\.txt$", path):
            machine = _machine(checkout, path)
            if machine is None:
                continue
            name = f"{machine['submitter']}-{machine['entry']}-{release}-{_number(path)}"
            yield read_run(
                checkout, path, re.sub(r"[^A-Za-z0-9_.-]", "-", name),
                **machine, benchmark=f"MLPerf Training {release} bert {machine['division']}", model="BERT-large",
            )  # fmt: skip


def _number(path: str) -> str:
    return path.rpartition("_")[2].removesuffix(".txt")


def _machine(checkout: Checkout, path: str) -> dict[str, Any] | None:
    """Return the machine of a log by its description. None if there is none, or if its cards are not A100 or H100."""
    submitter, _, entry, *_ = path.split("/")
    described = f"{submitter}/systems/{entry}.json"
    if described not in checkout.paths_set:
        return None
    system = json.loads(checkout.read(described))
    card = next(
        (name for pattern, name in CARDS.items() if re.search(pattern, system.get("accelerator_model_name", ""))), None
    )
    if card is None:
        return None
    nodes, per_node = (int(float(system[key])) for key in ("number_of_nodes", "accelerators_per_node"))
    return {
        "submitter": submitter,
        "division": system.get("division"),
        "entry": entry,
        "system": system.get("system_name"),
        "gpu": card,
        "num_gpus": nodes * per_node,
        "num_nodes": nodes,
        "network": system.get("accelerator_interconnect" if submitter == "JuniperNetworks" else "host_networking")
        or None,
        "framework": system.get("framework"),
    }
