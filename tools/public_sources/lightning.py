"""Lightning's comparison of strategies on eight A100: one row of a table per training, without its course."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from public_sources.checkout import Checkout
from study import __version__
from study.public_runs.schema import PublicRun, Setting

FILES = {"250m": 0.25e9, "500m": 0.5e9, "1": 1e9, "4.1": 4.1e9, "16": 16e9}  # parameters by the name of the file
STRATEGIES = {"DDP": "ddp", "DeepSpeed ZeRO Stage 2": "zero2", "DeepSpeed ZeRO Stage 3": "zero3"}
MIB = 1 << 20


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the rows of the five sizes. Empty cells stay unknown."""
    for file, parameters in FILES.items():
        path = f"results/{file}.csv"
        content = checkout.read(path)
        for number, row in enumerate(csv.DictReader(io.StringIO(content.decode())), 2):
            title = row["Plugin"].strip()
            has_checkpointing = title.endswith("w checkpointing")
            plugin = title.removesuffix("w checkpointing").strip()
            base, _, rest = plugin.partition(" Offload")
            seconds, peak, batch = (
                float(row[name]) if row[name].strip() else None
                for name in ("Time per iteration (s)", "Peak Memory (MiB)", "Max Per GPU Batch Size")
            )
            totals = {
                "seconds_per_step": seconds,
                "peak_allocated_bytes": None if peak is None else round(peak * MIB),
                "largest_micro_batch_size": None if batch is None else int(batch),
            }
            yield PublicRun(
                made_by=f"zero-study {__version__}",
                name=f"{file}-{title}".replace(" ", "-"),
                log_format="csv",
                source=checkout.source(path, content).model_copy(update={"lines": [number, number]}),
                setting=Setting(
                    entry=file,
                    model="minGPT",
                    parameters=round(parameters),
                    gpu="A100",
                    num_gpus=8,
                    num_nodes=1,
                    program="Lightning with minGPT",
                    engine="DeepSpeed" if "DeepSpeed" in plugin else "DDP" if plugin == "DDP" else "FairScale",
                    strategy=STRATEGIES.get(base, base),
                    offload="optimizer states and parameters" if "3" in base and "Offload" in plugin
                    else "optimizer states" if "Offload" in plugin else "nothing",
                    precision="fp16",
                    activation_checkpointing=has_checkpointing,
                    micro_batch_size=8,
                    sequence_length=128,
                    other={"plugin": row["Plugin Alias"], "note": rest.strip() or None},
                ),
                totals={name: value for name, value in totals.items() if value is not None},
            )  # fmt: skip
