"""Measure how long it takes to save a run, to resume it, and to export its model, by strategy (GPT-124M in fp32).

    python tools/measure/saving.py [--repeats 3] [--data-dir DIR] [--output FILE]

For each strategy, one run on two processes writes two checkpoints. Two runs resume from the first checkpoint, on two
processes and on one. The model of the second checkpoint is exported. Files that are read were written just before, so
they come from the memory of the operating system, not from a disk.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pairs
import soak
from soak_other_ranks import launch

from study.records import schema
from study.training import export, manifest

FLAGS: dict[str, Any] = {
    "workload": "gpt-wikitext", "size": "124m", "init": "scratch", "sequence_length": 32, "global_batch_size": 4,
    "num_train_examples": 16, "num_eval_examples": 2, "max_steps": 4, "checkpoint_every": 2, "keep": 9,
    "measure": False,
}  # fmt: skip
STRATEGIES = ("ddp", "zero1", "zero2", "zero2_cpu_offload", "zero3", "zero3_cpu_offload", "zero3_nvme_offload",
              "zero3_tuned", "fsdp2")  # fmt: skip


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--repeats", type=click.IntRange(1), default=3, help="of every strategy, one round after another")
@click.option("--data-dir", type=click.Path(path_type=Path), help="folder with wikitext-2/ and tokenizers/")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write, and to go on with")
def main(repeats: int, data_dir: Path | None, output: Path | None) -> None:
    pairs.share_cores(num_processes=2)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in STRATEGIES} | dict(soak.kept(output, "strategies"))
    text = {"data": "files", "data_dir": data_dir} if data_dir else {}
    for number in range(repeats):
        for name in STRATEGIES:
            if len(results[name]) == number:
                with tempfile.TemporaryDirectory(prefix="zero-study-saving-") as folder:
                    results[name].append(measure(name, Path(folder), **text))
                print(name, json.dumps(results[name][-1]), flush=True)
                soak.keep(output, "saving", "python tools/measure/saving.py", strategies=results)


def measure(strategy: str, folder: Path, **text: Any) -> dict[str, Any]:
    """Measure seconds and bytes of a checkpoint, of resuming, and of the model. `refused`: a refusal's message."""
    saved = folder / "saved"
    if refused := launch(strategy, 2, saved, **FLAGS, **text):
        raise SystemExit(refused)
    first, last = (saved / f"checkpoints/step-{step:08d}" for step in (2, 4))
    wrote = schema.read(saved).checkpointing
    assert wrote is not None
    result: dict[str, Any] = {"save_seconds": wrote.seconds / wrote.count, "checkpoint_bytes": wrote.last_bytes}
    for ranks in (2, 1):
        target = folder / f"on-{ranks}"
        refused = launch(strategy, ranks, target, resume=first, **FLAGS, **text)
        took = None if refused else schema.read(target).checkpointing
        result[f"load_seconds_on_{ranks}"] = took and took.load_seconds
        if refused:
            result[f"refused_on_{ranks}"] = refused.rpartition(": ")[2]
        shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    export.export(manifest.read_complete(last), folder / "model")
    result["export_seconds"] = time.perf_counter() - began
    result["model_bytes"] = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    return result


if __name__ == "__main__":
    main()
