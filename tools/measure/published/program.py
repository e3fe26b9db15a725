"""Run the program of the source a100-replication once, as its appendix prints it or with some defects corrected.

    PYTHONPATH=tools/measure python -m published.program SPEC

One process runs the program once, with its arms one after another as in the appendix. SPEC is a JSON file with one of
PROGRAMS in study/claims/defects.py, the repeat, the configuration and the pretrained weights. The result has the
observations of each arm.

The appendix prints its function in two blocks, the second without indentation. Here, it is one function again. Some
things differ from the appendix even if no defect is corrected. Random weights come from known seeds, so that they can
be reproduced. On a CPU, `use_cpu` is set, and the peak is the resident memory that the kernel reports. No cache is
emptied before an arm.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from published.protocol import BODY_SHARE
from study.claims.defects import Program
from study.config import RunConfig
from study.running.launch import QUIET_ENVIRONMENT
from zero_study import processes
from zero_study.engines import extensions

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from published.watched_trainer import Watched
    from study.workloads.sources import Examples, Splits

PUBLISHED_SEED = 42  # of split, order and dropout, in every run of the published program
# The dictionary of the appendix. If it takes effect, DeepSpeed needs a batch size, which Trainer fills in for "auto".
SETTINGS = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
BATCH_SIZE = {"train_micro_batch_size_per_gpu": "auto"}
WARMUP_STEPS = 5  # steps that are excluded from the median step time
MOST_HELD_OUT = 2000  # the most reviews that a corrected evaluation uses
# How the pretrained weights are trained if there are no published ones, on reviews that the protocol does not use.
BODY_SEED = 0
BODY_TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 10,
    "save_strategy": "no",
}


class ArmFailed(Exception):
    """Trainer failed to train an arm.

    This is a result of the program, because the arms before it ran in the same process.
    """

    def __init__(self, error: Exception) -> None:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        super().__init__(f"{type(error).__name__}: {first.strip()}")


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")  # the engine warns in every step
    extensions.use_own_folder()
    extensions.use_built()
    os.environ.update(QUIET_ENVIRONMENT | dict(os.environ))
    config, body = RunConfig(**spec["config"]), Path(spec["body"]) if spec["body"] else None
    if spec["program"] is not None:
        facts = run(Program(**spec["program"]), spec["repeat"], config, body)
    else:
        assert body is not None
        facts = train_body(config, body)
    processes.send_result(facts)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # train.py ends in the same way, for the same reason


def run(program: Program, repeat: int, config: RunConfig, body: Path | None) -> dict[str, Any]:
    """Run the arms of a program and return the observations of each.

    The program ends with the first arm that fails. This arm has an "error" instead of observations.
    """
    from study.records import machine

    # No repeat has BODY_SEED, because the pretrained weights suit the head of that seed.
    seed = repeat + 1 if program.own_seeds else PUBLISHED_SEED
    splits, held_out = load(config, seed, body is not None)
    model = None
    arms: list[dict[str, Any]] = []
    life_peak = 0
    for position, arm in enumerate(program.arms):
        if model is None or program.fresh_model:
            # The appendix draws the head before it sets a seed, so each run and each new model gets another head.
            unseeded = 1000 * (repeat + 1) + 10 * program.start + position
            model = build(config, splits, body, seed if program.seeded_head else unseeded)
        try:
            facts = train(model, arm, program, seed, config, splits, held_out)
        except ArmFailed as failure:
            arms.append({"arm": arm, "error": str(failure)})
            break
        life_peak = max(life_peak, facts["peak_bytes"])
        arms.append({"arm": arm, **facts, "life_peak_bytes": life_peak})
    return {"arms": arms, "data": splits.description["digest"], "machine": machine.describe()}


# ---------------------------------------------------------------- data and weights


def _reviews(config: RunConfig, of_body: bool | None) -> Any:
    """Return labeled reviews: those for pretraining if True, the others if False, or all if None."""
    from study.workloads import sources

    reviews = sources.load_reviews(config)
    if of_body is None:
        return reviews
    shuffled, share = reviews.shuffle(seed=BODY_SEED), len(reviews) // BODY_SHARE
    return shuffled.select(range(share) if of_body else range(share, len(reviews)))


def load(config: RunConfig, seed: int, has_body: bool) -> tuple[Splits, Examples]:
    """Return the reviews that the appendix draws, and more held-out reviews for a better evaluation.

    The appendix splits the reviews 80/20, shuffles each part and takes the first of each. The additional held-out
    reviews do not include reviews that are also in the training data.
    """
    from study.workloads import bert_imdb, sources

    tokenizer = sources.load_tokenizer(config)
    parts = _reviews(config, False if has_body else None).train_test_split(test_size=sources.HELD_OUT, seed=seed)
    train = parts["train"].shuffle(seed=seed).select(range(config.num_train_examples))
    held_out = parts["test"].shuffle(seed=seed)
    trained_on = set(train["text"])
    others = [number for number, text in enumerate(held_out["text"]) if text not in trained_on]
    drawn = {
        "train": train,
        "eval": held_out.select(range(config.num_eval_examples)),
        "held_out": held_out.select(others[:MOST_HELD_OUT]),
    }
    examples = {name: bert_imdb.tokenise(part, tokenizer, config.sequence_length) for name, part in drawn.items()}
    description = sources.describe(config, examples)
    splits = sources.Splits(
        train=examples["train"],
        evaluation=examples["eval"],
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        description=description,
    )
    return splits, examples["held_out"]


def build(config: RunConfig, splits: Splits, body: Path | None, head_seed: int) -> Any:
    """Return the classifier with published or pretrained weights, and with a random head of this seed."""
    import torch

    from study.workloads import bert_imdb

    torch.manual_seed(head_seed)
    model: Any = bert_imdb.build_model(config, splits)
    if body is not None:
        model.bert.load_state_dict(torch.load(body, weights_only=True))
    return model


def train_body(config: RunConfig, path: Path) -> dict[str, Any]:
    """Train a classifier on the reviews for pretraining, and write its weights without the head to `path`."""
    import torch
    from transformers import Trainer, TrainingArguments, set_seed

    from study.workloads import bert_imdb, sources

    tokenizer = sources.load_tokenizer(config)
    examples = bert_imdb.tokenise(_reviews(config, True), tokenizer, config.sequence_length)
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    splits = sources.Splits(train=examples, evaluation=examples, description={}, **vocabulary)
    set_seed(BODY_SEED)
    # With random weights and dropout, BERT stays at chance for a long time.
    model: Any = bert_imdb.build_model(config.model_copy(update={"dropout": 0.0}), splits)
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, Any] = {"use_cpu": not torch.cuda.is_available(), "report_to": "none", "disable_tqdm": True}
        settings = TrainingArguments(output_dir=folder, **BODY_TRAINING, **own)
        trained = Trainer(model, settings, train_dataset=examples).train()
    torch.save(model.bert.cpu().state_dict(), path)
    return {"num_reviews": len(examples), "loss": trained.training_loss}


# ---------------------------------------------------------------- one arm


def train(
    model: Any, arm: str, program: Program, seed: int, config: RunConfig, splits: Splits, held_out: Examples
) -> dict[str, Any]:
    """Train one arm as `train_model` of the appendix does, and return what was observed.

    Raises ArmFailed if Trainer fails.
    """
    from published.watched_trainer import StepEdges, Watched
    from study.training.memory import PhaseMemory
    from study.training.optimizer_steps import make_clock

    with tempfile.TemporaryDirectory() as folder:
        try:
            training_args = _training_arguments(arm, program, seed, config, folder)
            edges = StepEdges(make_clock(training_args.device))
            memory = PhaseMemory(training_args.device, enabled=True)
            data = {"train_dataset": splits.train, "eval_dataset": splits.evaluation}
            trainer = Watched(model=model, args=training_args, callbacks=[edges], **data)
            # A single number that differs if the weights differ.
            first_weights = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
            memory.begin("arm")
            started, started_cpu = time.time(), time.process_time()
            trainer.train()
            seconds, cpu_seconds = time.time() - started, time.process_time() - started_cpu
            memory.begin(None)
        except Exception as error:
            raise ArmFailed(error) from error
        written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    peak = memory.phases()["arm"]
    steps, cpu_steps = edges.seconds()
    return {
        "ran": _read_back(trainer),
        "first_weights": first_weights,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "step_seconds": statistics.median(steps[WARMUP_STEPS:]),
        "step_cpu_seconds": statistics.median(cpu_steps[WARMUP_STEPS:]),
        "peak_bytes": peak.resident_bytes if peak.allocated_bytes is None else peak.allocated_bytes,
        "checkpoint_bytes": written,
        **_learned(trainer, held_out),
    }


def _training_arguments(arm: str, program: Program, seed: int, config: RunConfig, folder: str) -> TrainingArguments:
    """Return the appendix's TrainingArguments for an arm.

    The published program sets the DeepSpeed settings where Trainer ignores them. `program.honoured` corrects that.
    """
    import torch
    from transformers import TrainingArguments

    kind, batch_size = arm.split("-")
    honoured: dict[str, Any] = {}
    if kind == "zero" and program.honoured:
        # The variables that a launcher sets for one process. Without them, DeepSpeed tries to use MPI.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        honoured = {"deepspeed": {**SETTINGS, **BATCH_SIZE}}
    training_args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=int(batch_size),
        per_device_eval_batch_size=int(batch_size),
        num_train_epochs=config.epochs,
        eval_strategy="steps",
        logging_strategy="steps",
        logging_steps=10,
        eval_steps=50,
        save_total_limit=1,
        report_to="none",
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        **honoured,
    )
    if kind == "zero" and not program.honoured:
        training_args.deepspeed = SETTINGS  # as published; nothing reads this attribute afterwards
    return training_args


def _read_back(trainer: Watched) -> dict[str, Any]:
    """Return the actual settings of the arm, read from the engine."""
    from zero_study.engines.readback.facts import base_optimizer

    engine: Any = trainer.model_wrapped
    facts = {
        "engine_class": type(engine).__name__,
        "optimizer_class": type(base_optimizer(trainer.optimizer)).__name__,
        "zero_stage": None,
        "offload_optimizer_device": "none",
        "gradient_clipping": trainer.args.max_grad_norm,
        "batch_size": trainer.args.train_batch_size,
        "num_steps": trainer.state.global_step,
        "num_evaluations": sum("eval_loss" in entry for entry in trainer.state.log_history),
    }
    if hasattr(engine, "zero_optimization_stage"):
        offload = engine.zero_offload_optimizer()
        facts["zero_stage"] = engine.zero_optimization_stage()
        device = getattr(offload, "device", "none")  # a string, or a member of an enumeration
        facts["offload_optimizer_device"] = str(getattr(device, "value", device))
        facts["gradient_clipping"] = engine.gradient_clipping()
        facts["batch_size"] = engine.train_micro_batch_size_per_gpu()
    return facts


def _learned(trainer: Watched, held_out: Examples) -> dict[str, Any]:
    """Return the last losses that Trainer logs, and corrected losses.

    The corrected losses are the mean training loss of each epoch, and the loss over many held-out reviews.
    """
    import torch

    history = trainer.state.log_history
    step_losses: Any = torch.stack(trainer.seen_losses).double()
    steps_per_epoch = len(step_losses) // int(trainer.args.num_train_epochs)
    reviews: Any = held_out
    predicted: Any = trainer.predict(reviews)
    return {
        "logged_train_loss": next(entry["loss"] for entry in reversed(history) if "loss" in entry),
        "logged_eval_loss": next(entry["eval_loss"] for entry in reversed(history) if "eval_loss" in entry),
        "epoch_losses": [epoch.mean().item() for epoch in step_losses.split(steps_per_epoch)],
        "held_out_loss": predicted.metrics["test_loss"],
    }


if __name__ == "__main__":
    main()
