"""Pretrain the weights that a fine-tuning study starts from, if no published weights are available.

`zero-study run STUDY` first pretrains the models that its runs start from (`--weights`). BERT is trained on masked
words and GPT on next tokens, without labels, on the part of the text that none of the runs uses. There is one process
and one seed, so that the same command gives the same weights on the same machine. Every record has their digest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from study.config import RunConfig
from study.run import Run
from study.workloads import sources
from zero_study import files
from zero_study.errors import Refusal

SEED = 0
BATCH_SIZE = 32  # windows of the runs' sequence length
LEARNING_RATE = 1e-3  # suits models with a few million parameters
WARMUP_SHARE = 0.05
EPOCHS = {"bert-imdb": 2, "gpt-wikitext": 1}
FACTS = "body.json"  # describes how the weights were trained; in the same folder


def train_missing(runs: Sequence[Run], study: Sequence[Run]) -> None:
    """Train the missing pretrained weights that these runs of a study start from. Runs that have a record are skipped.

    `study` has all runs of the study. If another process is training the same weights, this function waits for it.
    Raises Refusal if a folder contains weights with other settings.
    """
    for folder in dict.fromkeys(run.config.weights for run in runs if not (run.folder / "record.json").exists()):
        if folder is not None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f"{folder.name}.lock")):
                _train_missing(folder, [run.config for run in study if run.config.weights == folder])


def _train_missing(folder: Path, configs: Sequence[RunConfig]) -> None:
    config = max(configs, key=lambda config: config.num_train_examples)
    for candidate in configs:
        if _settings(candidate) | {"num_train_examples": config.num_train_examples} != _settings(config):
            raise Refusal(
                f"{folder}: runs with different models, splits or lengths use this folder. Give each of "
                "these runs its own folder"
            )
    if not (folder / sources.WEIGHTS).exists():
        print(f"{folder}: training the pretrained weights that the runs start from ...", flush=True)
        facts = train(config, folder)
        print(f"{folder}: {facts['num_steps']} steps, loss {facts['last_loss']:.3f}, {facts['sha256']}", flush=True)
        return
    # empty for a model that the user provided
    facts = files.load(folder / FACTS, "JSON") if (folder / FACTS).exists() else {}
    if facts.get("settings", _settings(config)) != _settings(config):
        there = facts["settings"]
        raise Refusal(
            f"{folder}: this folder contains pretrained weights with different settings ({there}). Move "
            "them, or use another folder"
        )


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that identify pretrained weights."""
    names = {"workload", "size", "data", "split_seed", "num_train_examples", "num_eval_examples", "sequence_length"}
    return config.model_dump(mode="json", include=names)


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Train pretrained weights on the text that runs of this configuration do not use, and write them to `folder`.

    Returns a description of the training: settings, digests and loss. Raises Refusal if the text is missing, or if too
    little of it is left.
    """
    import torch
    from transformers import Trainer, TrainingArguments, set_seed

    from study.workloads import WORKLOADS

    # With dropout, small randomly initialized models take long until they learn anything.
    config = config.model_copy(update={"dropout": 0.0, "weights": None, "init": "scratch"})
    workload = WORKLOADS[config.workload]
    examples = workload.left_over(config)
    if len(examples) < BATCH_SIZE:
        raise sources.nothing_left(config)
    set_seed(SEED)
    model, body, collator = workload.body(config)
    num_steps = EPOCHS[config.workload] * -(-len(examples) // BATCH_SIZE)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=scratch,
            seed=SEED,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=num_steps,
            learning_rate=LEARNING_RATE,
            warmup_steps=round(WARMUP_SHARE * num_steps),
            logging_steps=min(50, num_steps),
            save_strategy="no",
            report_to="none",
        )
        trainer = Trainer(model, settings, train_dataset=examples, data_collator=collator)
        trainer.train()
    part = folder.with_name(f"{folder.name}.part")
    body.cpu().save_pretrained(part)
    facts = {
        "settings": _settings(config),
        "text_sha256": sources.digest(examples),
        "num_windows": len(examples),
        "epochs": EPOCHS[config.workload],
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
        "num_steps": num_steps,
        "last_loss": next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry),
        "seconds": round(time.perf_counter() - began),
        "num_threads": torch.get_num_threads(),
        "sha256": sources.weights_sha256(part),
    }
    files.write_json(part / FACTS, facts)
    part.rename(folder)
    return facts
