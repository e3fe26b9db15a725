"""Describe the adapters (LoRA, DoRA) of a model. theory/adapters.py computes what they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zero_study.theory.engine import Engine

AdapterKind = Literal["lora", "dora"]
# The type of the frozen weights. fp32: as the precision of the training has parameters. 16-bit: bf16 or fp16. nf4:
# four bits in Linear modules of blocks, and 16 bits elsewhere.
FrozenType = Literal["fp32", "16-bit", "nf4"]
# The type of the weights that are not quantized, if the others are. fp32 norms: as TRL before release 1 casts them.
# fp32: as PEFT's prepare_model_for_kbit_training casts all of them. Both leave a residual stream in fp32. Neither is
# applied under FSDP or DeepSpeed.
UnquantizedType = Literal["16-bit", "fp32 norms", "fp32"]
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapter:
    """Adapters on the Linear modules of a model, and the type of the frozen weights under them."""

    rank: int
    targets: tuple[str, ...] | None = None  # names of modules, or ALL_LINEAR; None: PEFT's default for the model type
    kind: AdapterKind = "lora"
    has_dropout: bool = False
    in_fp32: bool = True  # PEFT casts adapters of a 16-bit model to fp32 (autocast_adapter_dtype)
    frozen: FrozenType = "16-bit"
    unquantized: UnquantizedType = "16-bit"
    modules_to_save: tuple[str, ...] = ()  # modules that are copied and trained in whole

    @property
    def is_quantized(self) -> bool:
        return self.frozen == "nf4"

    def has_fp32_stream(self, engine: Engine) -> bool:
        """Return whether blocks exchange fp32 activations, because the weights that are not quantized are fp32."""
        return self.is_quantized and self.unquantized != "16-bit" and engine.kind in ("torch", "ddp")
