"""Make the public runs of one source again, from a clone of its repository.

    git clone https://github.com/KellerJordan/modded-nanogpt
    python tools/collect/public_runs.py modded-nanogpt modded-nanogpt

Writes reports/public/SOURCE.jsonl.gz, and the table of all sources in reports/public/README.md. Only facts and figures
are kept, not the texts of the logs.
"""

from __future__ import annotations

import resource
import time
from functools import partial
from pathlib import Path

import click
from public_sources import (
    automodel,
    deepspeed_examples,
    ds_verify_loss,
    fms_acceleration,
    fsdp_qlora,
    lai_project,
    lightning,
    llm_foundry,
    megatron,
    mlperf,
    modded_nanogpt,
    opentau,
    parameter_golf,
    peft_adapters,
    prime_rl,
    ptd_benchmark,
    readme,
    torchtitan,
)
from public_sources.checkout import Checkout, Repository

from study.public_runs import archive
from zero_study import errors
from zero_study.errors import Refusal
from zero_study.files import write_whole

APACHE, MIT, BSD = "Apache-2.0", "MIT", "BSD-3-Clause"
NONE = "none"  # only numbers are kept, with their address
LATER = "2026-11-30"  # the day on which these files were read
MLCOMMONS = "mlcommons/training_results_"
MINGPT, MIT_BY_README = "e1be576acc04357ee54a501fc8299f0937b0864c", "MIT by its README"
SOURCES: dict[str, list[Repository]] = {  # a source may need several repositories, in this order
    "mlperf-llama2-lora": [Repository(f"{MLCOMMONS}v4.0", "6fe95437", APACHE, mlperf.llama2_lora)],
    "mlperf-bert": [
        Repository(f"{MLCOMMONS}v2.0", "8437fbb7", APACHE, partial(mlperf.bert, release="2.0")),
        Repository(f"{MLCOMMONS}v2.1", "158189d4", APACHE, partial(mlperf.bert, release="2.1")),
        Repository(f"{MLCOMMONS}v3.0", "63e326c4", APACHE, partial(mlperf.bert, release="3.0")),
    ],
    "modded-nanogpt": [Repository("KellerJordan/modded-nanogpt", "f411b3d3", MIT, modded_nanogpt.runs)],
    "modded-nanogpt-repeats": [Repository("KellerJordan/modded-nanogpt", "f411b3d3", MIT, modded_nanogpt.repeats)],
    "megatron": [Repository("NVIDIA/Megatron-LM", "adc69dba2dec6c9014d51b6cad3edf1020731786", BSD, megatron.runs)],
    "lightning-minigpt": [Repository("tnachen/minGPT", MINGPT, MIT_BY_README, lightning.runs)],
    "lightning-largest": [Repository("tnachen/minGPT", MINGPT, MIT_BY_README, lightning.largest_models)],
    "automodel": [Repository("NVIDIA-NeMo/Automodel", "f7b98a299", APACHE, automodel.runs)],
    "ptd-benchmark": [Repository("mrshenli/ptd_benchmark", "cdff0b9c", NONE, ptd_benchmark.runs)],
    "prime-rl": [Repository("PrimeIntellect-ai/prime-rl", "559b447", APACHE, prime_rl.runs)],
    "opentau": [Repository("TensorAuto/OpenTau", "0b153a92", APACHE, opentau.runs)],
    "fsdp-qlora": [Repository("AnswerDotAI/fsdp_qlora", "05ed9f2a", APACHE, fsdp_qlora.runs)],
    "lai-project": [Repository("baraql/lai-proj", "e755fea9", NONE, lai_project.runs)],
    "torchtitan": [Repository("pytorch/torchtitan", "b5bcd76c", BSD, torchtitan.runs)],
    "deepspeed-examples": [Repository("deepspeedai/DeepSpeedExamples", "45b4b715", APACHE, deepspeed_examples.runs)],
    "llm-foundry": [Repository("mosaicml/llm-foundry", "8c8dd48f", APACHE, llm_foundry.runs, "2026-11-30")],
    "peft-adapters": [Repository("huggingface/peft", "5d602fdb", APACHE, peft_adapters.runs)],
    "mlperf-llama2-lora-dell": [Repository(f"{MLCOMMONS}v4.1", "b87b9e39", APACHE, mlperf.llama2_lora_dell, LATER)],
    "fms-acceleration": [
        Repository("foundation-model-stack/fms-acceleration", "876e2ed6", APACHE, fms_acceleration.runs, LATER)
    ],
    "parameter-golf": [Repository("openai/parameter-golf", "4908dc46", MIT, parameter_golf.runs, LATER)],
    "ds-verify-loss": [Repository("tohtana/ds_verify_loss", "ab4d4b8", NONE, ds_verify_loss.runs, LATER)],
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
        checkout = Checkout(clone, repository.name, repository.commit, repository.license, repository.retrieved)
        runs += list(repository.runs(checkout))
        for reason in checkout.left_out:
            print(f"left out: {reason}")
    path = archive.ARCHIVE / f"{source}{archive.COLLECTED}"
    archive.write(path, runs)
    archive.source.cache_clear()
    write_whole(archive.ARCHIVE / "README.md", readme.page(SOURCES).encode())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{path}: {len(runs)} runs, {path.stat().st_size / 2**10:,.0f} KiB, {time.monotonic() - started:.0f} s, "
        f"at most {memory:.0f} MiB of memory"
    )


if __name__ == "__main__":
    errors.run_command(main)
