"""What is known of the run behind a row: model, card, strategy, precision, optimizer? None, or several, where in doubt.

Nothing is looked up elsewhere: a table can name any file or hub id.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from study.planner.check.table import Row, short
from study.theory import hardware, shapes
from study.theory.case import Precision
from study.theory.hardware import Gpu
from study.theory.model_states import MOMENTS_BYTES, STATE_SHARE, Parts, paper_bytes_per_parameter
from study.theory.shapes import ModelShape

SAME_PARAMS = 0.01  # relative; heads and padded vocabularies differ by less
ROUNDED = 0.02  # beyond the last digit: names are rounded, too
# What is kept in 32 bits: nothing (all in 16), the masters of what is computed in 16 bits, everything.
Masters = Literal["pure", "masters", "fp32"]
# The classes of the paper's formulas; masters are beside 16-bit parameters, or are the parameters (autocast, FSDP).
CLASSES: dict[Masters, tuple[Precision, ...]] = {"pure": ("pure-bf16",), "masters": ("bf16", "fp32"), "fp32": ("fp32",)}
IN_WORDS: dict[Masters, str] = {"pure": "all in 16 bits", "masters": "with fp32 masters", "fp32": "all in fp32"}

# What these words are about is not in the formulas; rows that have them are left out, rightly or not.
_PARTLY_TRAINED = re.compile(
    r"lora|peft|adapter|frozen|freez|quanti[sz]|[48][-_ ]?bit|int[48]\b|nf4|gptq|awq|"
    r"galore|apollo|adam-?mini|lomo|badam|unsloth|in.backward"
)
_SPLIT_OTHERWISE = re.compile(
    r"tensor[- _]?parallel|model[- _]?parallel|pipeline|context[- _]?parallel|sequence[- _]?parallel|ulysses|"
    r"expert[- _]?parallel|\b3d\b|\b(?:tp|pp|cp|sp|ep|mp)[ =:_-]?(?:[2-9]|1\d)"
)
_OFFLOADED = re.compile(r"offload|nvme|infinity|\bpaged|zenflow")
_EXPERTS = re.compile(r"moe\b|mixture|mixtral|experts|\d+x\d+(?:\.\d+)?b\b|-a\d+(?:\.\d+)?b\b|deepseek-v|dbrx|switch-")
_IN_GROUPS = re.compile(r"hybrid|hsdp|node[- _]?local|hpz|mics|zero\+\+")
_IN_16_BITS = ("mixed", "amp", "autocast", "master", "16")
_FULL_CHECKPOINTING = {"full", "true", "yes", "1"}
_NO_CHECKPOINTING = {"none", "no", "false", "0"}

# Bytes of states per parameter in fp32, beside parameters and masters: the least as theory counts them, the most both
# of Adam's moments, or the one that some may have. Lion, which theory does not know, has one.
_MOST = {"adafactor": 4.0, "sgd": 4.0}
OPTIMIZERS: dict[str, tuple[float, float]] = {
    **{name: (share * MOMENTS_BYTES, _MOST.get(name, MOMENTS_BYTES)) for name, share in STATE_SHARE.items()},
    "lion": (4, 4),
}
OPTIMIZERS["adam"] = OPTIMIZERS["adamw"]
ADAM = ("adam", "adamw", "lamb")


def billions(params: float) -> str:
    """A number of parameters, such as 3.086e9."""
    return f"{params / 1e9:.4g}e9"


@dataclass(frozen=True)
class Sharding:
    """How model states are split."""

    kind: Literal["none", "ddp", "deepspeed", "fsdp"]
    stage: int  # FSDP is stage 3 between steps
    keeps_parameters: bool = False  # FSDP, from forward to backward
    in_groups: bool = False  # over fewer ranks than there are


@dataclass(frozen=True)
class Reported:
    """A row, and what its words stand for."""

    row: Row

    @cached_property
    def shape(self) -> ModelShape | None:
        """A known model of as many parameters as the row has."""
        name = self.row.cells["model"]
        spelled = "-".join(re.sub(r"\(.*?\)", "", name.casefold()).split())
        plain = re.sub(r"^.*/|-(?:hf|base|instruct|chat|it)$", "", spelled)
        shape = next(filter(None, map(shapes.find_known, (name, spelled, plain))), None)
        if shape is None:
            return None
        length, params = self.row.whole("seq_len") or 0, self.row.params
        if length > shape.positions:
            if length > _LONGEST:
                return None
            shape = dataclasses.replace(shape, positions=length)
        near = params is None or abs(params.value / shape.num_params - 1) <= SAME_PARAMS
        return shape if near else None

    @cached_property
    def num_params(self) -> float | None:
        params = self.row.params
        return params.value if params else float(self.shape.num_params) if self.shape else None

    @cached_property
    def least_params(self) -> float:
        """The fewest parameters that are printed so: 70B may be 69e9."""
        least = self.row.params.low if self.row.params else self.num_params or 0.0
        return (1 - ROUNDED) * (float(self.shape.num_params) if self.shape else least)

    @cached_property
    def cards(self) -> tuple[Gpu, ...]:
        """The cards that a name may mean: a100 is one of four."""
        name = re.sub(r"\(.*?\)", "", self.row.cells["gpu"].casefold()).strip()
        name = re.sub(r"^\d+ ?x ?", "", name)
        for spelled in dict.fromkeys((name, re.sub(r"[- ]?sxm\d?", "", name))):
            try:
                return (hardware.find_gpu(spelled),)
            except ValueError:
                start = "-".join(re.split(r"[\s_-]+", spelled.removeprefix("nvidia ").strip()))
                near = tuple(gpu for key, gpu in hardware.GPUS.items() if start and key.startswith(f"{start}-"))
                if near:
                    return near
        return ()

    @property
    def num_gpus(self) -> int | None:
        found = self.row.whole("num_gpus")
        return found if found is not None and found <= _MOST_GPUS else None

    @cached_property
    def sharding(self) -> Sharding | None:
        """None: the strategy is not understood, or not said."""
        text = self.row.cells["strategy"].casefold()
        groups = bool(_IN_GROUPS.search(self.row.said))
        if found := re.search(r"(?:zero|stage)[\s_-]*(?:stage)?[\s_-]*([0-3])\b", text):
            stage = int(found[1])
            return Sharding("deepspeed", stage, in_groups=groups)
        if re.search(r"no[-_ ]?shard", text):
            return Sharding("ddp", 0)
        if re.search(r"fsdp|full[-_ ]shard|fully[-_ ]shard|shard[-_ ]grad|hsdp", text):
            return Sharding("fsdp", 3, bool(re.search(r"grad|no[-_ ]reshard|=false", text)), groups)
        if re.search(r"\bddp\b|data[- ]?parallel", text):
            return Sharding("ddp", 0)
        if re.search(r"\bsingle\b|^(?:none|no|baseline|1 gpu)$", text) or (not text and self.num_gpus == 1):
            return Sharding("none", 0)
        return None

    @property
    def num_shards(self) -> int | None:
        """Over how many ranks states are split at most: where no strategy is said, over all."""
        return 1 if self.sharding and not self.sharding.stage else self.num_gpus

    @cached_property
    def masters(self) -> tuple[Masters, ...]:
        """What may be kept in 32 bits, by the words of the precision."""
        text = self.row.cells["precision"].casefold()
        if "pure" in text:
            return ("pure",)
        if re.search(r"master|mixed|autocast|amp|fp8", text):
            return ("masters",)
        if re.search(r"fp16|bf16|float16|half|16", text):
            return ("pure", "masters")
        return ("fp32",) if re.search(r"fp32|float32|tf32|32", text) else ("pure", "masters", "fp32")

    @cached_property
    def multiplies_in(self) -> tuple[str, ...]:
        """The types in which products may be; all where the precision does not say."""
        text = self.row.cells["precision"].casefold()
        found: tuple[str, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")
        for word, kinds in (
            ("fp8", ("fp8",)), ("bf16", ("bf16",)), ("bfloat16", ("bf16",)), ("fp16", ("fp16",)),
            ("float16", ("fp16",)), *((word, ("fp16", "bf16")) for word in _IN_16_BITS), ("32", ("fp32", "tf32")),
        ):  # fmt: skip
            if word in text:
                return kinds
        return found

    @property
    def says_fp32(self) -> bool:
        """Whether products should be in fp32, though some call TF32 so."""
        return self.multiplies_in == ("fp32", "tf32") and "tf32" not in self.row.cells["precision"].casefold()

    @property
    def is_timed(self) -> bool:
        """Whether the planner's times are for this precision: not in fp8, nor where fp32 may be TF32."""
        has_tf32 = any("tf32" in gpu.peak_flops_per_second for gpu in self.cards)
        return "fp8" not in self.multiplies_in and not (has_tf32 and "fp32" in self.multiplies_in)

    @cached_property
    def optimizer(self) -> str | None:
        """The one optimizer that the row names, in its own column or elsewhere; None: none, or several."""
        text = self.row.cells["optimizer"].casefold() or self.row.said
        words = {word.partition("_")[0] for word in re.findall(r"[a-z0-9_]+", text)}
        words = {word.removeprefix("fused").removeprefix("cpu") for word in words}
        found = [name for name in OPTIMIZERS if name in words]
        if {*found} == {"adam", "adamw"}:
            return "adamw"
        other = self.row.cells["optimizer"] and not found
        return "other" if other or len(found) > 1 else (found[0] if found else None)

    @property
    def is_adam(self) -> bool:
        """Whether Adam's states may be taken for those of the row: it names it, or names none."""
        return self.optimizer is None or self.optimizer in ADAM

    @property
    def says_no_optimizer(self) -> bool:
        """Whether a run has a result and no optimizer is named: what fits on small cards has small or no states."""
        return self.optimizer is None and self.row.result is not None

    @property
    def has_whole_states(self) -> bool:
        """Whether the formulas of states are for this row: all is trained, and nothing moved or split otherwise."""
        said = self.row.said
        return not (_PARTLY_TRAINED.search(said) or _SPLIT_OTHERWISE.search(said) or _OFFLOADED.search(said))

    @property
    def is_split_otherwise(self) -> bool:
        return bool(_SPLIT_OTHERWISE.search(self.row.said))

    @property
    def computes_all(self) -> bool:
        """Whether every parameter meets every token forward and backward."""
        return not (_PARTLY_TRAINED.search(self.row.said) or _EXPERTS.search(self.row.said))

    @property
    def checkpointing(self) -> bool | None:
        """Whether every block is computed twice; None: not known, or some."""
        said = self.row.cells["act_ckpt"].casefold()
        return True if said in _FULL_CHECKPOINTING else False if said in _NO_CHECKPOINTING else None

    @property
    def unread(self) -> list[str]:
        """The cells whose words are not understood."""
        found = {"gpu": bool(self.cards), "strategy": self.sharding is not None}
        return [f"{name} {short(self.row.cells[name])}" for name in found if self.row.cells[name] and not found[name]]

    def states(self, masters: Masters) -> list[Parts]:
        """Model states of one GPU by the paper, in bytes per parameter: one for each way to keep masters."""
        stage = self.sharding.stage if self.sharding else 3
        ranks = self.num_shards or 1
        return [paper_bytes_per_parameter(stage, ranks, precision) for precision in CLASSES[masters]]


_MOST_GPUS = 1_000_000
_LONGEST = 10_000_000  # tokens of a sequence; nobody's is longer
