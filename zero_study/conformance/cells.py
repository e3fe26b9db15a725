"""Define the cells: the configurations in which conformance trains a small model with each engine.

A cell consists of an engine, a precision class, ranks, accumulation, clipping and a variation. This module needs only
Python's standard library, because training processes import it under any release of the engines.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

NUM_STEPS = 4
BATCH_SIZE = 12  # sequences per step: divisible by 1, 2 and 3 micro batches on 1 or 2 ranks
BATCH_SIZE_BY_FOUR = 16  # with four micro batches
ODD_BATCH_SIZE = 11  # not divisible by any of these products but 1
MAX_NORM = 0.1  # below every gradient norm of the toy: clipping always acts
HIGH_MAX_NORM = 100.0  # above every gradient norm of the toy: clipping must not act
DEFAULT_MAX_NORM = 1.0  # at which DeepSpeed clips since 0.19.3, if gradient_clipping is not written in its file

# The type of parameters, forward and backward passes, and the type of gradient sums. Master weights are always fp32.
#   fp32           all of it in fp32
#   autocast       fp32 parameters, matrix products in bf16
#   bf16           bf16 parameters and gradients, summed in bf16
#   bf16_fp32_sum  bf16 parameters and gradients, summed in fp32
PRECISIONS = ("fp32", "autocast", "bf16", "bf16_fp32_sum")
# Classes with a loss scale, which have their own cells, with DeepSpeed only.
#   fp16           fp16 parameters and gradients
#   autocast_fp16  fp32 parameters, matrix products in fp16
# With DeepSpeed, autocast and autocast_fp16 use its key torch_autocast, and no torch.autocast in the script.
WITH_LOSS_SCALE = ("fp16", "autocast_fp16")

# The engines, and the precision classes that each offers. DDP has no masters. FSDP2's are its sharded parameters.
# Engines named accelerate_* are used through accelerate, as its documentation shows. Its policy for FSDP2 sums
# gradients in bf16.
ENGINES = {
    "ddp": ("fp32", "autocast"),
    "fsdp2": ("fp32", "bf16_fp32_sum"),
    **dict.fromkeys(
        (
            "zero0", "zero1", "zero1_cpu_offload", "zero2", "zero2_cpu_offload", "zero3", "zero3_cpu_offload",
            "zero3_nvme_offload",
        ),
        PRECISIONS,
    ),
    "accelerate_ddp": ("fp32", "autocast"),
    "accelerate_fsdp2": ("fp32", "bf16"),
    **dict.fromkeys(("accelerate_zero1", "accelerate_zero2", "accelerate_zero3"), ("fp32", "bf16")),
}  # fmt: skip

# The 16-bit class for testing newer variations, if it is not bf16. In bf16, stage 0 is wrong even in plain cells.
SIXTEEN_BITS = {"ddp": "autocast", "fsdp2": "bf16_fp32_sum", "zero0": "autocast", "accelerate_ddp": "autocast"}

# What a script may do in addition to the plain step.
VARIATIONS = {
    "tied": "the output layer shares the embedding's weights",
    "frozen": "some parameters are not trained",
    "two_backward": "two losses of one forward pass, each with its own backward pass",
    "uneven": "a batch that cannot be divided equally, so that micro batches have different sizes",
    "checkpointing": "activation checkpointing",
    "resume": "saved after two steps, and resumed by a new engine",
}
# Topics of this year's public threads: tested on several ranks, in two classes, with a toy that has one output.
NEWER_VARIATIONS = {
    "one_output": "the model returns only logits, while in all tests above it returns hidden states as well",
    "buckets": "small buckets: the gradients fill several, and two gradients are larger than a bucket",
    "used_twice": "the block is used twice in the forward pass",
    "part_outside": "a second loss of the block, called outside the engine's forward pass",
    "reentrant": "reentrant activation checkpointing",
    "groups": "two parameter groups with different learning rates and weight decays",
    "schedule": "a learning rate that changes with every step",
    "dropout": "dropout, with different masks on each rank",
    "loader": "a data loader that accelerate prepared: whether each step gets the right rows",
    **dict.fromkeys(("frozen+checkpointing", "frozen+reentrant"), "both"),
    **dict.fromkeys(("used_twice+reentrant", "dropout+checkpointing"), "both"),
}
CLIPPING_ABSENT = {"clipping_absent": "gradient_clipping is not written in DeepSpeed's file"}
# What DeepSpeed's file says in addition in the cells with a loss scale and, for clipping, under autocast.
LOSS_SCALE_VARIATIONS = {
    **CLIPPING_ABSENT,
    "clipping_above": "gradients are clipped at a norm that none of them reaches, so that nothing may change",
    "scale_grows": "the loss scale of fp16 doubles in the fourth step, as it does by default after a thousand steps",
}
# What a script may do in addition in the cells of optimizers.
OPTIMIZER_VARIATIONS = {
    **CLIPPING_ABSENT,
    "zero_init": "the model is built under deepspeed.zero.Init",
    "skipped": "the gradients of the second step overflow in fp16, so this step has to be skipped",
}
# What a script may do in the cells of adapters.
ADAPTER_VARIATIONS = {
    "adapter": "only a LoRA adapter of the block is trained, and all other parameters are frozen",
    "adapter+checkpointing": "an adapter with activation checkpointing",
    "adapter+reentrant": "an adapter with reentrant checkpointing, whose inputs then have to require gradients",
    "adapter+resume": "an adapter, saved after two steps and resumed by a new engine",
    "adapter+zero_init": "an adapter, with the model built under deepspeed.zero.Init",
}
PLAIN = "plain"
WITHOUT_BUCKETS = ("fsdp2", "zero0", "accelerate_ddp", "accelerate_fsdp2")  # no bucket size is set for them
# These change no number.
OF_NO_REFERENCE = {"checkpointing", "reentrant", "resume", "buckets", "one_output", "loader", "zero_init"}
OF_NO_REFERENCE |= {"clipping_above", "scale_grows"}
SAVED_AFTER = 2  # steps
SKIPPED = 1  # the index of the step whose gradients overflow

ADAMW = "adamw"
# The optimizers that are tested in cells of their own. Where DeepSpeed's file can name an optimizer, DeepSpeed builds
# it. The others are built by the script.
OPTIMIZERS = {
    "deepspeed_adamw": "AdamW that DeepSpeed builds from its file: FusedAdam, or DeepSpeed's CPU Adam under offload",
    "adamw_fused": "torch.optim.AdamW(fused=True)",
    "sgd": "torch.optim.SGD with momentum",
    "adafactor": "torch.optim.Adafactor",
    "lion": "Lion with states in fp32: that of DeepSpeed with CPU offload, and that of bitsandbytes without",
    "muon": "DeepSpeed's Muon for the matrices of the block and the head, and Adam for the other parameters",
    "torch_muon": "torch.optim.Muon for all matrices; vectors are not trained",
    "bitsandbytes_adamw8bit": "bitsandbytes' AdamW with states in 8 bits",
    "torchao_adamw8bit": "torchao's AdamW with states in 8 bits",
}
OF_ADAMW = (ADAMW, "deepspeed_adamw", "adamw_fused")  # these share one formula
IN_8_BITS = tuple(name for name in OPTIMIZERS if name.endswith("8bit"))
BLOCK = 256  # elements that are quantized together
SMALLEST_IN_8_BITS = 4096  # elements: both libraries keep the states of smaller tensors in fp32
LIBRARY_OF = {"lion": "bitsandbytes", "bitsandbytes_adamw8bit": "bitsandbytes", "torchao_adamw8bit": "torchao"}
OF_DEEPSPEED_ALONE = ("deepspeed_adamw", "muon")
# The engines under which optimizers are tested. Stage 0 takes part because Muon was wrong there.
UNDER = (
    "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "zero1_cpu_offload", "zero2_cpu_offload", "zero3_cpu_offload",
    "accelerate_zero1", "accelerate_zero2", "accelerate_zero3",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One cell of the conformance matrix: a configuration in which a small model is trained and checked."""

    engine: str
    precision: str
    num_ranks: int
    accumulation: int
    clipping: bool
    variation: str = PLAIN
    optimizer: str = ADAMW

    @property
    def name(self) -> str:
        """The name of the configuration, for instance zero2/bf16/2-ranks/accumulation-2/clipped/tied."""
        ranks = "1-rank" if self.num_ranks == 1 else f"{self.num_ranks}-ranks"
        words = [self.engine, self.precision, ranks, f"accumulation-{self.accumulation}"]
        if self.clipping:
            words.append("clipped")
        if self.variation != PLAIN:
            words.append(self.variation)
        if self.optimizer != ADAMW:
            words.append(self.optimizer)
        return "/".join(words)

    def does(self, variation: str) -> bool:
        """Return whether the configuration has this variation, alone or combined with another one."""
        return variation in self.variation.split("+")

    @property
    def is_deepspeed(self) -> bool:
        return "zero" in self.engine

    @property
    def through_accelerate(self) -> bool:
        return self.engine.startswith("accelerate_")

    @property
    def is_large(self) -> bool:
        """Whether the test model must be large. DeepSpeed only swaps tensors of at least 1 MiB per rank."""
        return "nvme" in self.engine

    @property
    def extensions(self) -> tuple[str, ...]:
        """The names of DeepSpeed's compiled extensions that the configuration needs."""
        if not self.is_deepspeed:
            return ()
        is_offloaded = "offload" in self.engine
        if self.optimizer == "lion":
            return ("cpu_lion",) if is_offloaded else ()
        has_adam = self.optimizer in (ADAMW, *OF_DEEPSPEED_ALONE)
        needs: tuple[str, ...] = ("cpu_adam",) if is_offloaded and has_adam else ()
        needs += ("async_io",) if "nvme" in self.engine else ()
        needs += ("fused_adam",) if not is_offloaded and self.optimizer in OF_DEEPSPEED_ALONE else ()
        return needs

    @property
    def batch_size(self) -> int:
        if self.does("uneven"):
            return ODD_BATCH_SIZE
        return BATCH_SIZE_BY_FOUR if self.accumulation == 4 else BATCH_SIZE

    @property
    def max_norm(self) -> float:
        """The gradient norm at which this configuration clips. Infinity if it does not clip."""
        if self.clipping:
            return MAX_NORM
        if self.does("clipping_above"):
            return HIGH_MAX_NORM
        return DEFAULT_MAX_NORM if self.does("clipping_absent") else math.inf

    @property
    def returns_logits_alone(self) -> bool:
        """Whether the test model returns only its logits, and not the last hidden states as well."""
        words = ("one_output", "part_outside", "adapter")
        return self.variation in NEWER_VARIATIONS or any(self.does(word) for word in words)

    @property
    def reference_key(self) -> Cell:
        """The same configuration without the settings that do not change the reference training.

        Configurations with the same key share one reference. The class bf16_fp32_sum uses the reference and the bound
        of bf16.
        """
        changed = {"engine": self._engine_of_reference, "precision": self.precision.removesuffix("_fp32_sum")}
        changed["variation"] = (
            "+".join(word for word in self.variation.split("+") if word not in OF_NO_REFERENCE) or PLAIN
        )
        changed["optimizer"] = ADAMW if self.optimizer in OF_ADAMW else self.optimizer
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]

    @property
    def _engine_of_reference(self) -> str:
        """What the reference depends on in the engine: the size of the model, and whether states are of partitions."""
        if self.is_large:
            return "nvme"
        return "zero" if self.optimizer in IN_8_BITS and self.has_flat_partitions else ""

    @property
    def has_flat_partitions(self) -> bool:
        """Whether the engine passes flat parts of all parameters to the optimizer, instead of the parameters."""
        return self.is_deepspeed and "zero0" not in self.engine

    def micro_batches(self, rank: int) -> list[range]:
        """Return the sequences of one step that a rank processes, as one range of indices per micro batch."""
        num_parts = self.num_ranks * self.accumulation
        size, remainder = divmod(self.batch_size, num_parts)
        ends = list(itertools.accumulate((size + (i < remainder) for i in range(num_parts)), initial=0))
        parts = [range(first, end) for first, end in itertools.pairwise(ends)]
        return parts[rank :: self.num_ranks]


def matrix(num_ranks: Sequence[int] = (1, 2), engines: Sequence[str] = tuple(ENGINES)) -> list[Cell]:
    """Return all configurations to test for these engines and numbers of ranks.

    Plain cells have 1, 2 or 3 micro batches, with and without clipping. Each variation has one cell per precision class
    and number of ranks, with two micro batches. The variation `two_backward` has one micro batch, so that both backward
    passes belong to the last one. The variation `one_output` also has a cell with three. Newer variations only have
    cells on several ranks and in two precision classes. Classes with a loss scale have the cells of `of_loss_scales`.
    """
    cells = of_loss_scales(num_ranks, engines)
    for engine in engines:
        for precision, ranks in itertools.product(ENGINES[engine], num_ranks):
            plain = itertools.product((1, 2, 3), (False, True))
            cells += [Cell(engine, precision, ranks, *settings) for settings in plain]
            cells += [
                Cell(engine, precision, ranks, 1 if variation == "two_backward" else 2, False, variation)
                for variation in VARIATIONS
            ]
            if ranks > 1 and "nvme" not in engine and precision in ("fp32", SIXTEEN_BITS.get(engine, "bf16")):
                without = {"buckets"} if engine in WITHOUT_BUCKETS else set()
                without |= set() if engine.startswith("accelerate_") else {"loader"}
                newer = [variation for variation in NEWER_VARIATIONS if variation not in without]
                cells += [Cell(engine, precision, ranks, 2, False, variation) for variation in newer]
                cells.append(Cell(engine, precision, ranks, 3, False, "one_output"))
    return cells


def of_loss_scales(num_ranks: Collection[int], engines: Collection[str]) -> list[Cell]:
    """Return the configurations that test DeepSpeed's loss scale, and its clipping under autocast.

    In both classes with a loss scale, stages 0 to 3 are tested without clipping, with clipping that acts and that must
    not act, and without a key for it. Cells on one rank have one micro batch, the others also two. Autocast in bf16 has
    cells for what its other cells lack. CPU offload has cells with and without clipping.
    """
    clipping = [(False, PLAIN), (True, PLAIN), (False, "clipping_absent"), (False, "clipping_above")]
    cells = []
    for engine, ranks in itertools.product(engines, sorted(num_ranks)):
        if engine in ("zero0", "zero1", "zero2", "zero3"):
            for precision, accumulation in itertools.product(WITH_LOSS_SCALE, (1, 2) if ranks > 1 else (1,)):
                cells += [Cell(engine, precision, ranks, accumulation, *settings) for settings in clipping]
            if ranks > 1:
                cells.append(Cell(engine, "fp16", ranks, 1, False, "scale_grows"))
                for accumulation, settings in itertools.product((1, 2), clipping[2:]):
                    cells.append(Cell(engine, "autocast", ranks, accumulation, *settings))
        elif engine in ("zero1_cpu_offload", "zero2_cpu_offload", "zero3_cpu_offload") and ranks > 1:
            for precision, clips in itertools.product(WITH_LOSS_SCALE, (False, True)):
                cells.append(Cell(engine, precision, ranks, 1, clips))
    return cells


def of_optimizers(optimizers: Collection[str], engines: Collection[str] = UNDER) -> list[Cell]:
    """Return the configurations on two ranks that test these optimizers.

    In fp32, each optimizer has cells with one and four micro batches and clipping written, absent and 0, and one for
    each variation. In bf16, it has the cells without clipping. In fp16, it has one with and one without a step that is
    skipped.
    """
    return [
        Cell(engine, precision, 2, accumulation, clipping, variation, optimizer)
        for optimizer, engine in itertools.product(optimizers, engines)
        if "zero" in engine or optimizer not in OF_DEEPSPEED_ALONE
        for precision, accumulation, clipping, variation in _settings_for_optimizers(engine)
    ]


def _settings_for_optimizers(engine: str) -> list[tuple[str, int, bool, str]]:
    """Return the settings with which one optimizer is tested: precision, accumulation, clipping and variation."""
    in_16_bits = SIXTEEN_BITS.get(engine, "bf16") if engine != "zero0" else "bf16"
    settings = []
    for accumulation in (1, 4):
        settings += [("fp32", accumulation, False, PLAIN), (in_16_bits, accumulation, False, PLAIN)]
        settings.append(("fp32", accumulation, True, PLAIN))
        if "zero" in engine:
            settings.append(("fp32", accumulation, False, "clipping_absent"))
        if "zero3" in engine:
            settings.append(("fp32", accumulation, False, "zero_init"))
    settings += [("fp32", 1, False, "groups"), ("fp32", 1, False, "resume")]
    if "zero" in engine and "accelerate" not in engine:
        settings += [("fp16", 1, False, PLAIN), ("fp16", 1, False, "skipped")]
    return settings


def of_adapters() -> list[Cell]:
    """Return the configurations on two ranks that test LoRA adapters, in fp32 and in one 16-bit precision.

    Without a variation, there are cells with one micro batch and two, and one that is clipped.
    """
    cells = []
    for engine, precisions in ENGINES.items():
        if "nvme" in engine:
            continue
        in_16_bits = SIXTEEN_BITS.get(engine, "bf16")
        for precision in ("fp32", *(name for name in precisions if name == in_16_bits)):
            cells += [
                Cell(engine, precision, 2, accumulation, clipping, "adapter")
                for accumulation, clipping in ((1, False), (2, False), (2, True))
            ]
            cells += [
                Cell(engine, precision, 2, 2, False, variation)
                for variation in ADAPTER_VARIATIONS
                if variation != "adapter" and ("zero3" in engine or "zero_init" not in variation)
            ]
    return cells


# The engines and classes that are tested with other releases of a package: those that use it, in minutes.
OF_RELEASE = {
    "deepspeed": {
        engine: classes if "offload" in engine else (*classes, *WITH_LOSS_SCALE)
        for engine, classes in ENGINES.items()
        if engine.startswith("zero")
    },
    "accelerate": {engine: classes for engine, classes in ENGINES.items() if engine.startswith("accelerate_")},
    "torch": {
        "ddp": ENGINES["ddp"],
        "fsdp2": ENGINES["fsdp2"],
        **dict.fromkeys(("zero1", "zero2", "zero3"), ("fp32", "bf16")),
    },
}
PACKAGES = tuple(OF_RELEASE)
# The engines under which optimizers are tested with other releases of a package.
OPTIMIZERS_UNDER = {
    "deepspeed": ("zero0", "zero1", "zero2", "zero3"),
    "accelerate": ("accelerate_zero1", "accelerate_zero2", "accelerate_zero3"),
    "torch": ("ddp", "fsdp2", "zero2"),
}


def of_release(packages: Collection[str], variations: Collection[str] = (PLAIN,)) -> list[Cell]:
    """Return the configurations on two ranks that are tested with other releases of these packages.

    Engines with offload only have cells without a variation.
    """
    return [
        cell
        for cell in matrix((2,))
        if cell.variation in variations
        and (cell.accumulation < 3 or cell.variation != PLAIN)
        and not cell.is_large
        and (cell.variation == PLAIN or "offload" not in cell.engine)
        and any(cell.precision in OF_RELEASE[package].get(cell.engine, ()) for package in packages)
    ]
