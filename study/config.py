"""What is one run? Every knob with its unit, its default and its check, and the batch arithmetic.

A run is this configuration times a strategy (an accelerate file) times a world size. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import augment_usage_errors
from pydantic import BaseModel, ConfigDict, Field, model_validator

from study.errors import Refusal, describe_usage, refusing, unknown_name_message
from study.models import OWN_SIZES, SIZES

# Knobs that say where things lie and how processes are kept: the record is the same. Of a text it has the digest.
OF_THE_PROCESS = {"output_dir", "data_dir", "swap_dir", "checkpoint_every", "keep", "resume", "resume_with_other_code"}
OF_THE_PROCESS |= {"collective_timeout"}
# And those that leave every trained number as it is, and say what more there is of the run.
NOT_TRAINED = OF_THE_PROCESS | {"memory_cap", "measure", "timing_warmup_steps", "log_with", "save_model"}
NOT_TRAINED |= {"digest_every"}

Precision = Literal["fp64", "fp32", "bf16-autocast", "fp16-autocast", "bf16", "fp16"]

# What --fixed-order fixes, one by one: see training/fixed_order.py.
PINS = ("optimizer", "linear", "grouping", "norm", "collectives")


LARGEST_NUMBER = 1_000_000_000
LARGEST_SEED = 2**32 - 1  # that numpy takes


class RunConfig(BaseModel):
    """Every knob of one run. The world size is the launcher's and the distribution is the accelerate file's."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    # What is trained
    workload: Literal["bert-imdb", "gpt-wikitext"] = Field("bert-imdb", description="what is trained")
    size: str = Field("tiny", description="model size: " + "; ".join(f"{w}: {', '.join(s)}" for w, s in SIZES.items()))
    data: Literal["hub", "files", "bundled"] = Field(
        "bundled", description="where text and tokenizer come from: the hub, --data-dir, or the synthetic sample"
    )
    data_dir: Path | None = Field(None, description="folder with imdb/, wikitext-2/ and tokenizers/, for --data files")
    init: Literal["pretrained", "scratch"] | None = Field(
        None, description="initial weights; unset: pretrained with --data hub, scratch otherwise"
    )
    weights: Path | None = Field(
        None,
        description="folder of a model to start from, as save_pretrained writes it: what `zero-study run STUDY` "
        "trained first, or a run's model/; a head that it lacks is drawn from --seed",
    )
    nudge_seed: int | None = Field(
        None,
        ge=0,
        description="seed by which every initial weight moves to a neighbouring number, up or down: how far "
        "does the smallest change carry a training?; unset: none moves",
    )
    perturb: Literal["rounding", "scaled-gradient", "lost-moment", "dropped-micro-batch", "bad-release"] | None = Field(
        None,
        description="what ddp does otherwise on purpose: rounding noise in every step, or a fault that a comparison of "
        "trainings must find; bad-release: what DeepSpeed's own release does wrong; unset: nothing",
    )
    num_train_examples: int = Field(256, ge=1, description="examples (reviews or blocks) drawn for training")
    num_eval_examples: int = Field(64, ge=1, description="examples held out for evaluation")
    split_seed: int = Field(42, ge=0, description="seed of the train/held-out split and of the draw from it")
    sequence_length: int = Field(64, ge=8, description="tokens per example, padding included")
    dropout: float = Field(0.1, ge=0, lt=1, description="probability, in hidden layers, embeddings and attention")

    # How long, and in which batches
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; unset: as many as --epochs gives")
    epochs: int = Field(1, ge=1, description="passes over the training examples, where --max-steps is unset")
    global_batch_size: int = Field(8, ge=1, description="sequences per optimizer step, over all ranks")
    micro_batch_size: int | None = Field(
        None, ge=1, description="sequences per rank and forward pass; unset: no accumulation"
    )
    eval_every: int | None = Field(
        None, ge=1, description="optimizer steps between evaluations; unset: once, at the end"
    )
    seed: int = Field(0, ge=0, description="seed of initial weights, sample order and dropout")

    # The optimizer: AdamW, decoupled weight decay on matrices only
    learning_rate: float = Field(5e-5, gt=0, description="peak learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="shape after warm-up, down to 0")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay; biases and norms have none")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first moment decay")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW second moment decay")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW epsilon")
    gradient_clipping: float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")

    # Arithmetic and memory
    precision: Precision = Field(
        "fp32",
        description="fp64 and fp32: parameters and computation in that type; *-autocast: fp32 parameters with "
        "autocast; bf16, fp16: 16-bit parameters with fp32 master weights; fp64 does not work with DeepSpeed",
    )
    accumulation_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="type in which gradients of micro batches add up"
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation of transformers")
    activation_checkpointing: bool = Field(False, description="recompute activations of each block in backward")
    compile: bool = Field(False, description="torch.compile the model with inductor")
    fixed_order: str | None = Field(
        None,
        description="use the same order of floating-point operations under every strategy, to check that nothing else "
        f"differs: all, or a comma-separated list of {','.join(PINS)}; unset: engines are not modified",
    )
    share_device: bool = Field(
        False, description="all ranks of a machine on its first GPU, over gloo: for bytes; times then mean nothing"
    )

    memory_cap: float | None = Field(
        None,
        gt=0,
        description="GiB that each process may have: of its GPU, or of the host by a control group or RLIMIT_DATA; "
        "unset: what there is",
    )

    # What is observed and left behind
    digest_every: int | None = Field(
        None,
        ge=1,
        description="record SHA-256 digests of the weights and of Adam's moments after every so many optimizer steps; "
        "unset: only of the final weights",
    )
    measure: bool = Field(True, description="probe memory and collectives on one designated step")
    timing_warmup_steps: int = Field(5, ge=1, description="first steps, kept in steps.jsonl but left out of timing")
    output_dir: Path | None = Field(None, description="run directory; unset: runs/<workload>-<size>-<strategy>-...")
    collective_timeout: int = Field(
        600, ge=1, description="seconds that ranks wait for one another; then the run ends, and names who did not come"
    )
    swap_dir: Path | None = Field(
        None, description="existing folder for NVMe offload; unset: swap/ in the run directory"
    )
    checkpoint_every: int | None = Field(
        None, ge=1, description="optimizer steps between checkpoints, of which the last step has one too; unset: none"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints to keep")
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: go on from this run's newest whole checkpoint; never: begin anew; or the folder of a "
        "checkpoint, which may be another run's of this training",
    )
    resume_with_other_code: bool = Field(
        False, description="go on from a checkpoint that other code of the study has written; the record lists both"
    )
    save_model: bool = Field(
        False, description="write the trained model to model/ in the run directory, as from_pretrained loads it"
    )
    log_with: Literal["tensorboard", "wandb", "mlflow", "trackio", "none"] = Field(
        "none", description="experiment tracker, through accelerate"
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> RunConfig:
        for name, value in self:
            largest = LARGEST_SEED if name in ("seed", "split_seed", "nudge_seed") else LARGEST_NUMBER
            if isinstance(value, int) and value > largest:
                raise ValueError(f"{name} {value} is more than {largest:,}; lower --{name.replace('_', '-')}")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        sizes = SIZES[self.workload]
        if self.size not in sizes:
            raise ValueError(unknown_name_message(f"{self.workload}'s size", self.size, sizes, "--size takes"))
        positions = sizes[self.size]["positions"]
        if self.sequence_length > positions:
            raise ValueError(
                f"sequence_length {self.sequence_length} is longer than the {positions} positions of "
                f"{self.workload} {self.size}; lower --sequence-length"
            )
        if (self.data == "files") != (self.data_dir is not None):
            raise ValueError("--data files and --data-dir FOLDER belong together; give both or neither")
        if self.init == "pretrained" and self.data == "bundled":
            raise ValueError(
                "--init pretrained needs a published tokenizer; add --data hub or --data files --data-dir FOLDER"
            )
        if self.init == "pretrained" and self.size in OWN_SIZES and self.workload == "gpt-wikitext":
            raise ValueError(
                f"gpt-wikitext {self.size} is the study's own and has no published weights; use --init scratch"
            )
        if self.weights is not None and self.init is not None:
            raise ValueError(f"--init {self.init} and --weights {self.weights} are two starts; give one of them")
        if self.num_train_examples < self.global_batch_size:
            raise ValueError(
                f"num_train_examples {self.num_train_examples} is less than one global batch of "
                f"{self.global_batch_size}; raise --num-train-examples or lower --global-batch-size"
            )
        if self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves nothing of {self.num_steps} steps; lower --warmup-steps"
            )
        return self

    @model_validator(mode="after")
    def _check_fixed_order(self) -> RunConfig:
        if self.fixed_order not in (None, "all"):
            for name in self.fixed_order.split(","):
                if name not in PINS:
                    raise ValueError(
                        unknown_name_message("fixed_order", name, PINS, "--fixed-order takes all, or a list of")
                    )
        return self

    @model_validator(mode="after")
    def _check_digests(self) -> RunConfig:
        if self.digest_every is not None and self.checkpoint_every is not None:
            raise ValueError(
                "--digest-every and --checkpoint-every: a run that goes on from a checkpoint would lose the digests of "
                "the steps before it; leave one of them out"
            )
        return self

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run; an epoch's incomplete last global batch is not trained."""
        return self.max_steps or self.epochs * (self.num_train_examples // self.global_batch_size)

    @property
    def effective_init(self) -> Literal["pretrained", "scratch", "weights"]:
        if self.weights is not None:
            return "weights"
        return self.init or ("pretrained" if self.data == "hub" else "scratch")

    def batches(self, world_size: int) -> tuple[int, int]:
        """Return (micro_batch_size, gradient_accumulation_steps) for a world size; refuse to round."""
        micro = self.micro_batch_size
        if micro is None:
            micro, remainder = divmod(self.global_batch_size, world_size)
            if remainder or micro == 0:
                raise Refusal(
                    f"global_batch_size={self.global_batch_size} does not divide over {world_size} processes; change "
                    "--global-batch-size or --num_processes"
                )
        steps, remainder = divmod(self.global_batch_size, micro * world_size)
        if remainder or steps == 0:
            raise Refusal(
                f"global_batch_size={self.global_batch_size} is not a multiple of micro_batch_size={micro} x "
                f"world_size={world_size}; change --micro-batch-size or --num_processes, not the global batch, so that "
                "runs stay comparable"
            )
        return micro, steps

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step` (1-based), a function of the step alone and so of no world size.

        Written out because a scheduler given to accelerate's `prepare` advances once per process.
        """
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - 1 - self.warmup_steps) / (self.num_steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.learning_rate * (1 - progress)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


_PAPER = {
    "workload": "bert-imdb",
    "size": "large",
    "data": "hub",
    "num_train_examples": 800,
    "num_eval_examples": 200,
    "split_seed": 42,
    "sequence_length": 128,
    "epochs": 5,
    "global_batch_size": 8,
}

# `paper` is the a100-replication protocol: its appendix's data, lengths and batch, and the five epochs of its figure 1.
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"learning_rate": 1e-3},
    "paper": _PAPER,
    "paper-large-batch": {**_PAPER, "global_batch_size": 16},
}


def build_config(preset: str = "smoke", **overrides: Any) -> RunConfig:
    """Build a RunConfig from a preset and what the user changed. Raises Refusal naming the key and the remedy."""
    if preset not in list(PRESETS):  # a study's file may say a list, which no key of a dict can be
        raise Refusal(unknown_name_message("preset", preset, PRESETS, "--preset takes"))
    with refusing():
        return RunConfig(**{**PRESETS[preset], **overrides})


class Command(click.Command):
    """A command that every error about its options names."""

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        with augment_usage_errors(context):
            return super().parse_args(context, words)


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = [
        click.Option(["--preset"], metavar="NAME", help=f"values to start from: {', '.join(PRESETS)} [default: smoke]")
    ]
    for name, field in RunConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            names, metavar, default = f"{flag}/--no-{flag[2:]}", None, "on" if field.default else "off"
        else:
            names, metavar, default = flag, _metavar(field.annotation), field.default
        text = field.description if default is None else f"{field.description} [default: {default}]"
        options.append(click.Option([names, name], default=None, metavar=metavar, help=text))
    return options


def _metavar(annotation: Any) -> str:
    """What stands for a value in the help: its choices, or its type."""
    if get_origin(annotation) is not Literal:  # X | None is X
        annotation = next((kind for kind in get_args(annotation) if kind is not NoneType), annotation)
    if get_origin(annotation) is Literal:
        return f"[{'|'.join(get_args(annotation))}]"
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(annotation, "NAME")


# The flags of a run, one for each field of RunConfig: click knows their names, pydantic checks their values.
OPTIONS = _options()
_FLAGS = Command("study/train.py", params=OPTIONS, help="Train one run, as `accelerate launch` starts it.")


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the flags that are given, by the names of RunConfig's fields.

    Raises Refusal, and SystemExit once it has printed what --help asks for.
    """
    try:
        return given(_FLAGS.make_context(_FLAGS.name, list(arguments)).params)
    except click.UsageError as error:
        raise Refusal(describe_usage(error)) from None
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value: what a command line leaves out is None."""
    return {name: value for name, value in options.items() if value is not None}
