"""Make the public runs of one source again, from a clone of its repository.

    git clone https://github.com/KellerJordan/modded-nanogpt
    python tools/public_runs.py modded-nanogpt modded-nanogpt

Writes reports/public/SOURCE.jsonl.gz. Only facts and figures are kept, not the texts of the logs.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from public_sources import automodel, lightning, megatron, mlperf, modded_nanogpt
from public_sources.checkout import Checkout

from study import errors
from study.errors import Refusal
from study.public_runs import archive
from study.public_runs.schema import PublicRun

RETRIEVED = "2026-11-28"


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, and the function that reads its runs."""

    name: str
    commit: str
    license: str
    runs: Callable[[Checkout], Iterator[PublicRun]]


APACHE, MIT = "Apache-2.0", "MIT"
MLCOMMONS = "mlcommons/training_results_"
SOURCES: dict[str, list[Repository]] = {  # a source may need several repositories, in this order
    "mlperf-llama2-lora": [Repository(f"{MLCOMMONS}v4.0", "6fe95437", APACHE, mlperf.llama2_lora)],
    "mlperf-bert": [
        Repository(f"{MLCOMMONS}v2.0", "8437fbb7", APACHE, partial(mlperf.bert, release="2.0")),
        Repository(f"{MLCOMMONS}v2.1", "158189d4", APACHE, partial(mlperf.bert, release="2.1")),
        Repository(f"{MLCOMMONS}v3.0", "63e326c4", APACHE, partial(mlperf.bert, release="3.0")),
    ],
    "modded-nanogpt": [Repository("KellerJordan/modded-nanogpt", "f411b3d3", MIT, modded_nanogpt.runs)],
    "megatron": [
        Repository("NVIDIA/Megatron-LM", "adc69dba2dec6c9014d51b6cad3edf1020731786", "BSD-3-Clause", megatron.runs)
    ],
    "lightning-minigpt": [
        Repository("tnachen/minGPT", "e1be576acc04357ee54a501fc8299f0937b0864c", "MIT by its README", lightning.runs)
    ],
    "automodel": [Repository("NVIDIA-NeMo/Automodel", "f7b98a299", APACHE, automodel.runs)],
}


@click.command(help=__doc__)
@click.argument("source", type=click.Choice([*SOURCES]))
@click.argument("clones", type=click.Path(path_type=Path), nargs=-1, required=True)
def main(source: str, clones: tuple[Path, ...]) -> None:
    repositories = SOURCES[source]
    if len(clones) != len(repositories):
        raise Refusal(f"{source} needs clones of {', '.join(each.name for each in repositories)}, in this order")
    started = time.monotonic()
    runs = []
    for repository, clone in zip(repositories, clones, strict=True):
        checkout = Checkout(clone, repository.name, repository.commit, repository.license, RETRIEVED)
        runs += list(repository.runs(checkout))
        for reason in checkout.left_out:
            print(f"left out: {reason}")
    path = archive.ARCHIVE / f"{source}{archive.COLLECTED}"
    archive.write(path, runs)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{path}: {len(runs)} runs, {path.stat().st_size / 2**20:.2f} MiB, {time.monotonic() - started:.0f} s, "
        f"at most {memory:.0f} MiB of memory"
    )


if __name__ == "__main__":
    errors.run_command(main)
