"""Golden values of Megatron-LM's functional tests: loss, time and memory of each step on 8 A100 and 8 H100."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from public_sources.checkout import Checkout
from public_sources.reading import read_if_possible, with_few_steps, without
from zero_study.public_runs.schema import COLUMNS, PublicRun

CASES = "tests/functional_tests/test_cases/"
MODELS = ("gpt", "bert", "t5", "moe", "hybrid", "multimodal-llava")
FILE = re.compile(r"golden_values_(dev|lts)_dgx_?([ah]100)(?:_(coreweave|eos|dracooci|dracooci-ord))?(_2nd)?\.json")

MOST_STEPS = 400  # the trainings of a release have thousands


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the recordings. A recording "2nd" is of the second half of a training, after a resumption."""
    for path in checkout.under(*(f"{CASES}{model}/" for model in MODELS), suffix=".json"):
        folder, _, file = path.rpartition("/")
        match = FILE.fullmatch(file)
        if match is None or "inference" in folder:
            continue
        container, card, cluster, is_second = match.groups()
        case = folder.removeprefix(CASES)
        arguments = _arguments(checkout, f"{folder}/model_config.yaml")
        name = f"{case.replace('/', '-')}-{card}-{container}{f'-{cluster}' if cluster else ''}{is_second or ''}"
        run = read_if_possible(
            checkout, path, name,
            entry=case,
            system=cluster,
            gpu={"a100": "A100", "h100": "H100"}[card],
            num_nodes=1,
            num_gpus=8,
            program="Megatron-LM",
            engine="Megatron-LM",
            strategy=_strategy(arguments),
            precision="bf16" if arguments.get("--bf16") else "fp16" if arguments.get("--fp16") else None,
            micro_batch_size=arguments.get("--micro-batch-size"),
            global_batch_size=arguments.get("--global-batch-size"),
            sequence_length=arguments.get("--seq-length") or arguments.get("--encoder-seq-length"),
            learning_rate=arguments.get("--lr"),
            planned_steps=arguments.get("--train-iters"),
            container=container,
            after_resumption=bool(is_second),
            tensor_parallel=arguments.get("--tensor-model-parallel-size"),
            pipeline_parallel=arguments.get("--pipeline-model-parallel-size"),
            layers=arguments.get("--num-layers"),
            hidden=arguments.get("--hidden-size"),
        )  # fmt: skip
        if run is not None:
            unknown = set() if run.training is None else run.training.columns.keys() - COLUMNS.keys()
            yield with_few_steps(without(run, unknown), MOST_STEPS)


def _arguments(checkout: Checkout, path: str) -> dict[str, Any]:
    if path not in checkout.paths_set:
        return {}
    return yaml.safe_load(checkout.read(path)).get("MODEL_ARGS") or {}


def _strategy(arguments: dict[str, Any]) -> str | None:
    """Return the idea of how model states are distributed over data-parallel ranks, in the words of Megatron-LM."""
    if not arguments:
        return None
    if arguments.get("--use-torch-fsdp2"):
        return "FSDP2"
    if arguments.get("--use-megatron-fsdp") or arguments.get("--use-custom-fsdp"):
        return f"Megatron FSDP, {arguments.get('--data-parallel-sharding-strategy', 'no_shard')}"
    return "sharded optimizer" if arguments.get("--use-distributed-optimizer") else "DDP"
