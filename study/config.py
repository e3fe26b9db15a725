"""Define the configuration of one run: every option with its unit, default and validation, and the batch arithmetic.

A run is defined by this configuration, a strategy (an accelerate file) and a number of processes. This module does not
import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import BaseModel, ConfigDict, model_validator

from zero_study.command_line import LARGEST_NUMBER, Command, Option, given, option, options_of
from zero_study.errors import Refusal, describe_usage, refusing, unknown_name_message
from zero_study.models import OWN_SIZES, SIZES

# Options that do not change the record: where files are, and how processes and checkpoints are managed.
OF_THE_PROCESS = {"output_dir", "data_dir", "swap_dir", "checkpoint_every", "keep", "resume", "resume_with_other_code"}
OF_THE_PROCESS |= {"collective_timeout"}
# Options that do not change any trained number. Some of them change what the record contains.
NOT_TRAINED = OF_THE_PROCESS | {"memory_cap", "measure", "timing_warmup_steps", "log_with", "save_model"}
NOT_TRAINED |= {"digest_every"}

Precision = Literal["fp64", "fp32", "bf16-autocast", "fp16-autocast", "bf16", "fp16"]

# The parts of --fixed-order; see training/fixed_order.py.
PINS = ("optimizer", "linear", "grouping", "norm", "collectives")


LARGEST_SEED = 2**32 - 1  # the largest seed of numpy

# The groups of options in the help.
TRAINED = "Model and data"
ADAPTER = "Adapter, instead of all weights"
LENGTH = "Length and batches"
OPTIMIZER = "Optimizer: AdamW, with decoupled weight decay on matrices only"
ARITHMETIC = "Arithmetic and memory"
FILES = "Measurements and files"


class RunConfig(BaseModel):
    """The values of all options of one run.

    The number of processes and the strategy are not options: the launcher sets the first, and the strategy's file
    describes the second.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    workload: Literal["bert-imdb", "gpt-wikitext"] = option(
        "bert-imdb", "Model and task to train.", TRAINED, is_common=True
    )
    size: str = option(
        "tiny",
        "Size of the model. " + " ".join(f"{w}: {', '.join(s)}." for w, s in SIZES.items()),
        TRAINED,
        is_common=True,
    )
    data: Literal["hub", "files", "bundled"] = option(
        "bundled",
        "Source of text and tokenizer: the Hugging Face hub, the files of --data-dir, or the bundled synthetic sample.",
        TRAINED,
        is_common=True,
    )
    data_dir: Path | None = option(
        None, "Folder with the subfolders imdb/, wikitext-2/ and tokenizers/, for --data files.", TRAINED
    )
    init: Literal["pretrained", "scratch"] | None = option(
        None, "Initial weights. [default: pretrained with --data hub, otherwise scratch]", TRAINED
    )
    weights: Path | None = option(
        None,
        "Folder with the initial weights, as save_pretrained writes it, for instance the folder model/ of another run. "
        "If the folder contains no weights of the model's head, the head is initialized from --seed.",
        TRAINED,
    )
    nudge_seed: int | None = option(
        None,
        "Change every initial weight to the next larger or the next smaller floating-point number. This seed decides "
        "which of the two. Such a run shows how much the smallest possible change affects a training. [default: no "
        "weight is changed]",
        TRAINED,
        ge=0,
    )
    perturb: Literal["rounding", "scaled-gradient", "lost-moment", "dropped-micro-batch", "bad-release"] | None = (
        option(
            None,
            "Change the training of ddp on purpose, to test a comparison of trainings. rounding adds harmless rounding "
            "noise to every step. Every other value adds a fault, which the comparison must find. bad-release uses the "
            "known fault of the installed DeepSpeed release. [default: nothing is changed]",
            TRAINED,
        )
    )
    num_train_examples: int = option(256, "Number of examples (reviews or blocks of text) for training.", TRAINED, ge=1)
    num_eval_examples: int = option(64, "Number of examples held out for evaluation.", TRAINED, ge=1)
    split_seed: int = option(42, "Seed that selects and splits the examples.", TRAINED, ge=0)
    sequence_length: int = option(64, "Number of tokens per example, including padding.", TRAINED, is_common=True, ge=8)
    dropout: float = option(0.1, "Dropout probability in hidden layers, embeddings and attention.", TRAINED, ge=0, lt=1)

    lora_rank: int | None = option(
        None,
        "Freeze the model's weights, and train a LoRA adapter of this rank (PEFT, arXiv:2106.09685). [default: all "
        "weights are trained]",
        ADAPTER,
        ge=1,
    )
    lora_target: str | None = option(
        None,
        "Modules that get an adapter: their names, separated by commas, or all-linear. [default: the modules that PEFT "
        "chooses for the model, such as query and value of BERT]",
        ADAPTER,
    )
    lora_alpha: float | None = option(
        None,
        "The adapter's output is multiplied by this number and divided by the rank. [default: twice the rank]",
        ADAPTER,
        gt=0,
    )
    lora_dropout: float = option(0.0, "Dropout probability of the adapter's input.", ADAPTER, ge=0, lt=1)
    load_in_4bit: bool = option(
        False, "Keep the frozen matrices in 4 bits (NF4 of bitsandbytes), as QLoRA does (arXiv:2305.14314).", ADAPTER
    )

    max_steps: int | None = option(
        None, "Number of optimizer steps. [default: as many as --epochs gives]", LENGTH, is_common=True, ge=1
    )
    epochs: int = option(1, "Number of passes over the training examples, if --max-steps is not used.", LENGTH, ge=1)
    global_batch_size: int = option(
        8, "Number of sequences per optimizer step, over all processes.", LENGTH, is_common=True, ge=1
    )
    micro_batch_size: int | None = option(
        None,
        "Number of sequences per process and forward pass. [default: no gradient accumulation]",
        LENGTH,
        is_common=True,
        ge=1,
    )
    eval_every: int | None = option(
        None, "Number of optimizer steps between evaluations. [default: one evaluation at the end]", LENGTH, ge=1
    )
    seed: int = option(0, "Seed of initial weights, sample order and dropout.", LENGTH, is_common=True, ge=0)

    learning_rate: float = option(5e-5, "Highest learning rate.", OPTIMIZER, is_common=True, gt=0)
    schedule: Literal["linear", "cosine", "constant"] = option(
        "linear",
        "Schedule of the learning rate after warm-up. With linear and cosine, the learning rate ends at 0.",
        OPTIMIZER,
    )
    warmup_steps: int = option(0, "Number of optimizer steps of linear warm-up.", OPTIMIZER, ge=0)
    weight_decay: float = option(0.01, "Weight decay of AdamW. Biases and norms have no weight decay.", OPTIMIZER, ge=0)
    adam_beta1: float = option(0.9, "Decay of AdamW's first moment.", OPTIMIZER, ge=0, lt=1)
    adam_beta2: float = option(0.999, "Decay of AdamW's second moment.", OPTIMIZER, ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "Epsilon of AdamW.", OPTIMIZER, gt=0)
    gradient_clipping: float = option(1.0, "Largest global gradient norm. 0 switches clipping off.", OPTIMIZER, ge=0)

    precision: Precision = option(
        "fp32",
        "Type of parameters and computation. fp64 and fp32: parameters and computation in this type. bf16-autocast, "
        "fp16-autocast: fp32 parameters with autocast. bf16, fp16: 16-bit parameters with fp32 master weights. fp64 "
        "does not work with DeepSpeed.",
        ARITHMETIC,
        is_common=True,
    )
    accumulation_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", "Type in which the gradients of micro batches are added.", ARITHMETIC
    )
    attention: Literal["sdpa", "eager"] = option("sdpa", "Implementation of attention in transformers.", ARITHMETIC)
    activation_checkpointing: bool = option(
        False, "Recompute the activations of each block in the backward pass.", ARITHMETIC
    )
    compile: bool = option(False, "Compile the model with torch.compile.", ARITHMETIC)
    fixed_order: str | None = option(
        None,
        "Use the same order of floating-point operations under every strategy, to check that the strategies differ in "
        f"nothing else. The value is all, or some of {','.join(PINS)}, separated by commas. [default: engines are not "
        "modified]",
        ARITHMETIC,
    )
    share_device: bool = option(
        False,
        "Run all processes of a machine on its first GPU, with gloo, to measure memory and communication. The times of "
        "such runs mean nothing.",
        ARITHMETIC,
    )

    memory_cap: float | None = option(
        None,
        "Largest memory of each process in GiB. On a GPU, PyTorch enforces this limit. On a CPU, a control group or "
        "RLIMIT_DATA enforces it. [default: no limit]",
        ARITHMETIC,
        gt=0,
    )

    digest_every: int | None = option(
        None,
        "Number of optimizer steps between recorded SHA-256 digests of the weights and of Adam's moments. [default: "
        "only digests of the final weights]",
        FILES,
        ge=1,
    )
    measure: bool = option(True, "Measure memory and collectives in one step.", FILES)
    timing_warmup_steps: int = option(5, "Number of first steps that do not count for the time per step.", FILES, ge=1)
    output_dir: Path | None = option(
        None, "Run directory. [default: runs/WORKLOAD-SIZE-STRATEGY-...]", FILES, is_common=True
    )
    collective_timeout: int = option(
        600,
        "Number of seconds that processes wait for each other. After this time, the run ends and names the missing "
        "processes.",
        FILES,
        ge=1,
    )
    swap_dir: Path | None = option(
        None, "Existing folder for NVMe offload. [default: swap/ in the run directory]", FILES
    )
    checkpoint_every: int | None = option(
        None,
        "Number of optimizer steps between checkpoints. A checkpoint is also written after the last step. [default: no "
        "checkpoints]",
        FILES,
        ge=1,
    )
    keep: int = option(2, "Number of newest checkpoints to keep.", FILES, ge=1)
    resume: str = option(
        "auto",
        "auto: resume from the newest complete checkpoint of this run. never: start again. Any other value: "
        "resume from the checkpoint in this folder, which may belong to another run of the same training.",
        FILES,
        min_length=1,
    )
    resume_with_other_code: bool = option(
        False,
        "Resume from a checkpoint that another version of zero-study wrote. The run's record lists both versions.",
        FILES,
    )
    save_model: bool = option(
        False, "Save the trained model in model/ in the run directory, so that from_pretrained can load it.", FILES
    )
    log_with: Literal["tensorboard", "wandb", "mlflow", "trackio", "none"] = option(
        "none", "Experiment tracker, used through accelerate.", FILES
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
                f"only this project defines the size {self.size} of gpt-wikitext, so there are no pretrained "
                "weights. Use --init scratch."
            )
        if self.weights is not None and self.init is not None:
            raise ValueError(
                f"--init {self.init} and --weights {self.weights} both set the initial weights. Use only one of them."
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
                "of its earlier steps. Use only one of them."
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
        """Return the micro batch size and the gradient accumulation steps for a number of processes.

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


# The options of a run, one for each field of RunConfig. click parses their names, and pydantic checks their values.
OPTIONS: list[click.Parameter] = [
    Option(
        ["--preset"],
        group=TRAINED,
        is_common=True,
        metavar="NAME",
        help=f"Set of default values for the other options: {', '.join(PRESETS)}. [default: smoke]",
    ),
    *options_of(RunConfig, has_presets=True),
]
_FLAGS = Command(
    "study/train.py", params=OPTIONS, help="Train one model, as a process that `accelerate launch` starts."
)


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options in a command line of train.py, by the names of RunConfig's fields.

    Raises Refusal if the command line is invalid. Raises SystemExit after --help has printed its text.
    """
    try:
        return given(_FLAGS.make_context(_FLAGS.name, list(arguments)).params)
    except click.UsageError as error:
        raise Refusal(describe_usage(error)) from None
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
