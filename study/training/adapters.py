"""Add a LoRA adapter to the model of a run, with PEFT. The model's weights are frozen, and only the adapter is trained.

The adapter's initial weights depend only on the seed, not on the strategy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from study.config import RunConfig
from zero_study.errors import Refusal

if TYPE_CHECKING:
    from peft import LoraConfig

# The names by which PEFT knows the two tasks. With the first one, the new classification head is trained as well.
TASKS = {"bert-imdb": "SEQ_CLS", "gpt-wikitext": "CAUSAL_LM"}
ALL_LINEAR = "all-linear"
# Modules that PEFT trains as a whole beside an adapter for the first task. They get no adapter.
_TRAINED_WHOLE = ("classifier",)
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BASE = "base"  # folder in an exported adapter's folder, for the model that the adapter belongs to


def add(model: torch.nn.Module, config: RunConfig) -> torch.nn.Module:
    """Add an adapter to the model if the run requests one, and freeze all other weights. Return the model.

    Raises Refusal if the model has no modules of the requested names.
    """
    if config.lora_rank is None:
        return model
    _check_targets(model, config)
    torch.manual_seed(config.seed * 1_000_003 - 1)  # the adapter's first weights
    return adapted(model, settings(model, config))


def adapted(model: torch.nn.Module, lora: LoraConfig) -> torch.nn.Module:
    """Return the model with its weights frozen, and with a new adapter that has the data type of these weights.

    PEFT would keep the adapter of 16-bit weights in fp32, although the engine has fp32 masters of it anyway. On weights
    in 4 bits, PEFT makes an adapter in the type in which they are multiplied. If this type has 16 bits because of
    autocast, the adapter would have no fp32 masters. The type of the other weights decides in both cases.
    """
    import peft

    lora.base_model_name_or_path = None  # otherwise PEFT warns if the model was loaded from another folder
    is_fp32 = next(weight.dtype for weight in model.parameters() if weight.is_floating_point()) == torch.float32
    with _without_warning():
        whole: torch.nn.Module = peft.get_peft_model(model, lora, autocast_adapter_dtype=is_fp32)
    return whole


def loaded(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Return the model with the adapter that a folder contains."""
    import peft

    with _without_warning():
        whole: torch.nn.Module = peft.PeftModel.from_pretrained(model, str(folder))
    return whole


@contextmanager
def _without_warning() -> Iterator[None]:
    """Hide a warning in a `with` block: PEFT 0.21.2 reads a property of transformers 5.23 that will be renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


def quantization(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that keep the model's matrices in 4 bits. Empty without quantization.

    The settings are those of QLoRA: the data type NF4, whose scales are quantized too. Embeddings, norms and the head
    stay as they are.
    """
    if not config.load_in_4bit:
        return {}
    from transformers import BitsAndBytesConfig

    settings: Any = BitsAndBytesConfig
    return {
        "quantization_config": settings(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=_TYPES.get(config.precision.removesuffix("-autocast"), torch.float32),
            # For a language model, transformers finds the head itself.
            llm_int8_skip_modules=list(_TRAINED_WHOLE) if config.workload == "bert-imdb" else None,
        )
    }


def settings(model: torch.nn.Module, config: RunConfig) -> LoraConfig:
    """Return the run's adapter as a configuration for PEFT."""
    import peft
    from transformers.pytorch_utils import Conv1D

    assert config.lora_rank is not None
    targets: Any = config.lora_target
    alpha: Any = config.lora_alpha or 2 * config.lora_rank
    if targets not in (None, ALL_LINEAR):
        targets = _names(config)
    return peft.LoraConfig(
        task_type=TASKS[config.workload],
        r=config.lora_rank,
        lora_alpha=alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        # GPT-2's matrices are stored with the inputs first.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )


def keep_scales(model: torch.nn.Module) -> None:
    """Make a model with 4-bit weights keep its own quantization scales when a checkpoint is loaded.

    PyTorch refuses the scales in a checkpoint as unknown, because bitsandbytes saves them but does not load them. The
    weights are frozen, so the model has the same scales already. On a CPU with AVX-512 for bf16, bitsandbytes 0.50.2
    also rounds the scales to bf16 in the first evaluation, which would change the training after it.
    """
    linear: Any
    for linear in model.modules():
        if hasattr(linear, "support_avx512bf16_for_cpu"):
            linear.support_avx512bf16_for_cpu = False

    def remove_scales(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        quantized = [name for name, parameter in module.named_parameters() if hasattr(parameter, "quant_state")]
        for key in list(state):
            if any(key.startswith(f"{prefix}{name}.") for name in quantized):
                del state[key]

    model.register_load_state_dict_pre_hook(remove_scales)  # type: ignore[no-untyped-call]


def _names(config: RunConfig) -> list[str]:
    return [name.strip() for name in (config.lora_target or "").split(",") if name.strip()]


def _check_targets(model: torch.nn.Module, config: RunConfig) -> None:
    """Raise Refusal if a requested name is not the end of the name of a matrix. PEFT would ignore it."""
    from transformers.pytorch_utils import Conv1D

    if config.lora_target in (None, ALL_LINEAR):
        return
    matrices = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, matrices)]
    names = [name for name in names if name.rpartition(".")[2] not in _TRAINED_WHOLE]
    for target in _names(config) or [""]:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise Refusal(
                f"--lora-target {target!r}: {config.workload} {config.size} has no matrix of this name that can get an "
                f"adapter. Use {ALL_LINEAR}, or some of: {', '.join(ends)}."
            )
