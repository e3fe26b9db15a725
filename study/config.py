"""The configuration of one run: every option with its unit, default and validation, and the batch arithmetic.

A run is defined by this configuration, a strategy (an accelerate file) and a number of processes. This module does not
import torch.
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

# Options that do not change the record: where files are, and how processes and checkpoints are managed.
OF_THE_PROCESS = {"output_dir", "data_dir", "swap_dir", "checkpoint_every", "keep", "resume", "resume_with_other_code"}
OF_THE_PROCESS |= {"collective_timeout"}
# Options that do not change any trained number. Some of them change what the record contains.
NOT_TRAINED = OF_THE_PROCESS | {"memory_cap", "measure", "timing_warmup_steps", "log_with", "save_model"}
NOT_TRAINED |= {"digest_every"}

Precision = Literal["fp64", "fp32", "bf16-autocast", "fp16-autocast", "bf16", "fp16"]

# The parts of --fixed-order; see training/fixed_order.py.
PINS = ("optimizer", "linear", "grouping", "norm", "collectives")


LARGEST_NUMBER = 1_000_000_000
LARGEST_SEED = 2**32 - 1  # the largest seed of numpy


class RunConfig(BaseModel):
    """All options of one run.

    The number of processes and the strategy are not options: the launcher sets the first, and the strategy's file
    describes the second.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    # What is trained
    workload: Literal["bert-imdb", "gpt-wikitext"] = Field("bert-imdb", description="Model and task to train.")
    size: str = Field(
        "tiny", description="Size of the model. " + " ".join(f"{w}: {', '.join(s)}." for w, s in SIZES.items())
    )
    data: Literal["hub", "files", "bundled"] = Field(
        "bundled",
        description="Source of text and tokenizer: the Hugging Face hub, the files of --data-dir, or the bundled "
        "synthetic sample.",
    )
    data_dir: Path | None = Field(None, description="Folder with imdb/, wikitext-2/ and tokenizers/, for --data files.")
    init: Literal["pretrained", "scratch"] | None = Field(
        None, description="Initial weights. [default: pretrained with --data hub, otherwise scratch]"
    )
    weights: Path | None = Field(
        None,
        description="Folder of a model to start from, as save_pretrained writes it. It may be the model/ of another "
        "run. "
        "A missing head is initialized from --seed.",
    )
    nudge_seed: int | None = Field(
        None,
        ge=0,
        description="Move every initial weight to a neighboring number, up or down by this seed. This shows how far "
        "the smallest change carries a training. [default: no weight is moved]",
    )
    perturb: Literal["rounding", "scaled-gradient", "lost-moment", "dropped-micro-batch", "bad-release"] | None = Field(
        None,
        description="Change the training of ddp on purpose. rounding adds harmless rounding noise to every step. All "
        "other values plant a fault, which a comparison of trainings must find. bad-release uses the known fault of "
        "the installed DeepSpeed release. [default: nothing is changed]",
    )
    num_train_examples: int = Field(
        256, ge=1, description="Number of examples (reviews or blocks of text) for training."
    )
    num_eval_examples: int = Field(64, ge=1, description="Number of examples held out for evaluation.")
    split_seed: int = Field(42, ge=0, description="Seed that selects and splits the examples.")
    sequence_length: int = Field(64, ge=8, description="Tokens per example, padding included.")
    dropout: float = Field(
        0.1, ge=0, lt=1, description="Dropout probability in hidden layers, embeddings and attention."
    )

    # An adapter, instead of all weights
    lora_rank: int | None = Field(
        None,
        ge=1,
        description="Freeze the model's weights, and train a LoRA adapter of this rank (PEFT, arXiv:2106.09685). "
        "[default: all weights are trained]",
    )
    lora_target: str | None = Field(
        None,
        description="Modules that get an adapter: names, separated by commas, or all-linear. [default: those that PEFT "
        "chooses for the model, such as query and value of BERT]",
    )
    lora_alpha: float | None = Field(
        None,
        gt=0,
        description="The adapter's output is multiplied by this number and divided by the rank. [default: twice the "
        "rank]",
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the adapter's input.")
    load_in_4bit: bool = Field(
        False,
        description="Keep the frozen matrices in 4 bits (NF4 of bitsandbytes), as QLoRA does (arXiv:2305.14314).",
    )

    # Length and batches
    max_steps: int | None = Field(
        None, ge=1, description="Number of optimizer steps. [default: as many as --epochs gives]"
    )
    epochs: int = Field(1, ge=1, description="Passes over the training examples, if --max-steps is not given.")
    global_batch_size: int = Field(8, ge=1, description="Sequences per optimizer step, over all processes.")
    micro_batch_size: int | None = Field(
        None, ge=1, description="Sequences per process and forward pass. [default: no gradient accumulation]"
    )
    eval_every: int | None = Field(
        None, ge=1, description="Number of optimizer steps between evaluations. [default: one evaluation at the end]"
    )
    seed: int = Field(0, ge=0, description="Seed of initial weights, sample order and dropout.")

    # The optimizer: AdamW, decoupled weight decay on matrices only
    learning_rate: float = Field(5e-5, gt=0, description="Highest learning rate.")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="Shape of the learning rate after warm-up. linear and cosine end at 0."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW. Biases and norms have none.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Epsilon of AdamW.")
    gradient_clipping: float = Field(1.0, ge=0, description="Largest global gradient norm. 0 switches clipping off.")

    # Arithmetic and memory
    precision: Precision = Field(
        "fp32",
        description="fp64 and fp32: parameters and computation in that type. bf16-autocast, fp16-autocast: fp32 "
        "parameters with autocast. bf16, fp16: 16-bit parameters with fp32 master weights. fp64 does not "
        "work with DeepSpeed.",
    )
    accumulation_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Type in which the gradients of micro batches are added."
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="Implementation of attention in transformers.")
    activation_checkpointing: bool = Field(
        False, description="Recompute the activations of each block in the backward pass."
    )
    compile: bool = Field(False, description="Compile the model with torch.compile.")
    fixed_order: str | None = Field(
        None,
        description="Use the same order of floating-point operations under every strategy, to check that nothing else "
        f"differs. Takes all, or a comma-separated list of {','.join(PINS)}. [default: engines are not modified]",
    )
    share_device: bool = Field(
        False,
        description="Run all processes of a machine on its first GPU, with gloo, to measure memory and traffic. "
        "Times of "
        "such runs mean nothing.",
    )

    memory_cap: float | None = Field(
        None,
        gt=0,
        description="Limit of the memory of each process in GiB: on a GPU, its share of the GPU; on a CPU, by a "
        "control "
        "group or RLIMIT_DATA. [default: no limit]",
    )

    # Measurements and files
    digest_every: int | None = Field(
        None,
        ge=1,
        description="Record SHA-256 digests of the weights and of Adam's moments after every so many optimizer steps. "
        "[default: only of the final weights]",
    )
    measure: bool = Field(True, description="Measure memory and collectives in one step.")
    timing_warmup_steps: int = Field(
        5, ge=1, description="Number of first steps that do not count for the time per step."
    )
    output_dir: Path | None = Field(None, description="Run directory. [default: runs/WORKLOAD-SIZE-STRATEGY-...]")
    collective_timeout: int = Field(
        600,
        ge=1,
        description="Number of seconds that processes wait for each other. Then the run ends and names the missing "
        "ones.",
    )
    swap_dir: Path | None = Field(
        None, description="Existing folder for NVMe offload. [default: swap/ in the run directory]"
    )
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        description="Number of optimizer steps between checkpoints. The last step also has one. [default: no "
        "checkpoints]",
    )
    keep: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: resume from the newest complete checkpoint of this run. never: start again. Otherwise the "
        "folder of a checkpoint, which may belong to another run of the same training.",
    )
    resume_with_other_code: bool = Field(
        False,
        description="Resume from a checkpoint that a different version of this project wrote. The record lists both "
        "versions.",
    )
    save_model: bool = Field(
        False, description="Write the trained model to model/ in the run directory, for from_pretrained."
    )
    log_with: Literal["tensorboard", "wandb", "mlflow", "trackio", "none"] = Field(
        "none", description="Experiment tracker, used through accelerate."
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> RunConfig:
        for name, value in self:
            largest = LARGEST_SEED if name in ("seed", "split_seed", "nudge_seed") else LARGEST_NUMBER
            if isinstance(value, int) and value > largest:
                raise ValueError(f"{name} {value} is more than {largest:,}. Lower --{name.replace('_', '-')}.")
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
                f"{self.workload} {self.size}. Lower --sequence-length."
            )
        if (self.data == "files") != (self.data_dir is not None):
            raise ValueError("--data files and --data-dir FOLDER need each other. Give both or neither.")
        if self.init == "pretrained" and self.data == "bundled":
            raise ValueError(
                "--init pretrained needs a published tokenizer. Add --data hub, or --data files --data-dir FOLDER."
            )
        if self.init == "pretrained" and self.size in OWN_SIZES and self.workload == "gpt-wikitext":
            raise ValueError(
                f"gpt-wikitext {self.size} is a size of this project, so it has no pretrained weights. Use --init "
                "scratch."
            )
        if self.weights is not None and self.init is not None:
            raise ValueError(
                f"--init {self.init} and --weights {self.weights} both set the initial weights. Leave one of them out."
            )
        if self.num_train_examples < self.global_batch_size:
            raise ValueError(
                f"num_train_examples {self.num_train_examples} is less than one global batch of "
                f"{self.global_batch_size}. Raise --num-train-examples or lower --global-batch-size."
            )
        if self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be less than the {self.num_steps} steps of the run. Lower "
                "--warmup-steps."
            )
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> RunConfig:
        if self.lora_rank is not None:
            return self
        for name in ("lora_target", "lora_alpha", "lora_dropout", "load_in_4bit"):
            if getattr(self, name) != RunConfig.model_fields[name].default:
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--{flag} describes an adapter, but --lora-rank is not given, so all weights would be trained. "
                    f"Add --lora-rank 16, or leave --{flag} out."
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
                "--digest-every and --checkpoint-every cannot be combined, because a resumed run would lose the "
                "digests "
                "of its earlier steps. Leave one of them out."
            )
        return self

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps of the whole run.

        If the number follows from the epochs, the incomplete last global batch of each epoch is not counted.
        """
        return self.max_steps or self.epochs * (self.num_train_examples // self.global_batch_size)

    @property
    def effective_init(self) -> Literal["pretrained", "scratch", "weights"]:
        if self.weights is not None:
            return "weights"
        return self.init or ("pretrained" if self.data == "hub" else "scratch")

    def batches(self, world_size: int) -> tuple[int, int]:
        """Return (micro_batch_size, gradient_accumulation_steps) for a number of processes.

        Raises Refusal if the global batch cannot be divided equally.
        """
        micro = self.micro_batch_size
        if micro is None:
            micro, remainder = divmod(self.global_batch_size, world_size)
            if remainder or micro == 0:
                raise Refusal(
                    f"global_batch_size={self.global_batch_size} cannot be divided equally among {world_size} "
                    "processes. "
                    "Change --global-batch-size or --num_processes."
                )
        steps, remainder = divmod(self.global_batch_size, micro * world_size)
        if remainder or steps == 0:
            raise Refusal(
                f"global_batch_size={self.global_batch_size} is not a multiple of micro_batch_size={micro} x "
                f"world_size={world_size}. Change --micro-batch-size or --num_processes. Runs stay comparable if the "
                "global batch is the same."
            )
        return micro, steps

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1.

        The rate depends only on the step, not on the number of processes. It is computed here because a scheduler that
        is passed to accelerate's `prepare` advances once per process.
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

# `paper` is the protocol of a100-replication: the data, lengths and batch of its appendix, and the five epochs of its
# figure 1.
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"learning_rate": 1e-3},
    "paper": _PAPER,
    "paper-large-batch": {**_PAPER, "global_batch_size": 16},
}


def build_config(preset: str = "smoke", **overrides: Any) -> RunConfig:
    """Build a RunConfig from a preset and the values that override it.

    Raises Refusal if a value is invalid. The message names the key and the remedy.
    """
    if preset not in list(PRESETS):  # a study's file may contain a list here, which is not hashable
        raise Refusal(unknown_name_message("preset", preset, PRESETS, "--preset takes"))
    with refusing():
        return RunConfig(**{**PRESETS[preset], **overrides})


class Command(click.Command):
    """A click command whose name appears in every error about its options."""

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        with augment_usage_errors(context):
            return super().parse_args(context, words)


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = [
        click.Option(
            ["--preset"], metavar="NAME", help=f"Set of default values: {', '.join(PRESETS)}. [default: smoke]"
        )
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
    """Return the placeholder for an option's value in the help: its choices, or its type."""
    if get_origin(annotation) is not Literal:  # read X | None as X
        annotation = next((kind for kind in get_args(annotation) if kind is not NoneType), annotation)
    if get_origin(annotation) is Literal:
        return f"[{'|'.join(get_args(annotation))}]"
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(annotation, "NAME")


# The options of a run, one for each field of RunConfig. click parses their names, and pydantic checks their values.
OPTIONS = _options()
_FLAGS = Command(
    "study/train.py", params=OPTIONS, help="Train one model, as a process that `accelerate launch` starts."
)


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that the command line sets: field name of RunConfig -> value.

    Raises Refusal if the command line is invalid. Raises SystemExit after --help has printed its text.
    """
    try:
        return given(_FLAGS.make_context(_FLAGS.name, list(arguments)).params)
    except click.UsageError as error:
        raise Refusal(describe_usage(error)) from None
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have a value. An option that is missing on the command line has the value None."""
    return {name: value for name, value in options.items() if value is not None}
