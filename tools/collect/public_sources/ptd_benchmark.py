"""ptd_benchmark, 2021: seconds per iteration and peaks of DDP and FSDP on 8 to 128 A100, without losses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from public_sources.checkout import Checkout
from public_sources.reading import of_totals
from zero_study.public_runs.schema import PublicRun

FILE = re.compile(
    r"delay/(ddp|fsdp)_((GPT\w+?)_ws(\d+)_bs(\d+)_vs(\d+)_blk(\d+)_(noop|checkpoint)_fp16(?:_np(\d+))?)(_transformer)?\.txt"
)
RESULT = re.compile(r"delays = ([\d.]+) \([\d.]+\)\s+max mem = ([\d.]+)MB\s*")
MEGABYTE = 10**6  # the program divides by 1e6


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the settings that were measured with DDP and with FSDP of blocks.

    The names of files do not show whether parameters were offloaded. DDP cannot do that, so a setting that has both is
    less likely to be one of those that were.
    """
    for path in checkout.under("delay/ddp_", "delay/fsdp_", suffix=".txt"):
        match = FILE.fullmatch(path)
        if match is None:
            continue
        engine, entry, model, processes, batch, vocabulary, length, activations, per_node, _ = match.groups()
        both = {f"delay/ddp_{entry}.txt", f"delay/fsdp_{entry}_transformer.txt"}
        if path not in both or not both <= checkout.paths_set:
            continue
        result = RESULT.fullmatch(checkout.read(path).decode())
        if result is None:
            checkout.left_out.append(f"{path}: it has other lines")
            continue
        yield of_totals(
            checkout, path, f"{engine}-{entry}", "ptd_benchmark",
            {"seconds_per_step": float(result[1]), "peak_allocated_bytes": round(float(result[2]) * MEGABYTE)},
            entry=entry,
            model=model,
            data="random numbers",
            gpu="A100-SXM4-40GB",
            num_gpus=int(processes),
            num_nodes=int(processes) // int(per_node) if per_node else None,
            program="ptd_benchmark",
            engine="DDP" if engine == "ddp" else "FSDP1",
            strategy="ddp" if engine == "ddp" else "fsdp",
            precision="fp16",
            optimizer="SGD",
            activation_checkpointing=activations == "checkpoint",
            micro_batch_size=int(batch),
            sequence_length=int(length),
            vocabulary=int(vocabulary),
        )  # fmt: skip
