"""How is a shape made a model of transformers again, and what is it trained on?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import masking_utils

from study.theory.case import Job
from study.theory.residual import is_eager
from study.theory.shapes import ModelShape
from study.theory.shapes.model_types import MODEL_TYPES

LARGEST_ROTARY = 64  # of GPT-J, as published


def model_config(shape: ModelShape, job: Job) -> Any:
    """Describe the model as transformers does, without dropout; what no shape has is as published, or the default."""
    model_type, known = next(
        (name, kind) for name, kind in MODEL_TYPES.items() if kind.architecture == shape.architecture
    )
    settings = {key: getattr(shape, part) for part, key in known.keys.items()}
    if shape.architecture == "gpt-neo":
        settings["attention_types"] = [[["global", "local"], shape.layers // 2], [["global"], shape.layers % 2]]
    if shape.architecture == "gpt-j":
        settings["rotary_dim"] = min(LARGEST_ROTARY, shape.head_size)
    if shape.architecture == "mistral":
        settings["sliding_window"] = None  # which the planner ignores too
    config = transformers.AutoConfig.for_model(
        model_type,
        num_labels=shape.labels,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="eager" if is_eager(shape, job) else job.attention,
        **settings,
    )
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def build_model(shape: ModelShape, job: Job, dtype: torch.dtype) -> Any:
    """Build the model, in training mode; its blocks are checkpointed where the job says so."""
    classes = next(kind.classes for kind in MODEL_TYPES.values() if kind.architecture == shape.architecture)
    name = next(name for name, head in classes.items() if head == shape.head)
    model = getattr(transformers, name)._from_config(model_config(shape, job), dtype=dtype).train()
    if shape.head == "tokens" and not shape.is_encoder:
        model.loss_type = "ForCausalLM"  # transformers finds none for GPT2LMHeadModel, warns, and takes this one
    if job.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def block_class(model: nn.Module, shape: ModelShape) -> str:
    """Name the class of the model's blocks: what its one list of as many modules as there are layers holds."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == shape.layers]
    return type(lists[0][0]).__name__


def make_batch(shape: ModelShape, job: Job) -> dict[str, Tensor]:
    """Make one rank's micro batch: (micro_batch_size, sequence_length). An encoder's is padded, as reviews are."""
    ids = torch.zeros(int(job.micro_batch_size), int(job.sequence_length), dtype=torch.long)
    labels = ids[:, 0] if shape.head == "sequence classes" else ids
    mask = {"attention_mask": torch.ones_like(ids)} if shape.is_encoder else {}
    return {"input_ids": ids, "labels": labels, **mask}


def loss(model: nn.Module, batch: dict[str, Tensor], shape: ModelShape) -> Any:
    """Take the loss as the study's workloads do: of tokens transformers' own, of classes cross-entropy in fp32."""
    if shape.head == "tokens":
        return model(**batch).loss
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return functional.cross_entropy(model(**inputs).logits.float().flatten(0, -2), batch["labels"].flatten())


@contextmanager
def one_document_a_sequence() -> Iterator[None]:
    """Let transformers ask no values of fake positions whether several documents share a sequence: none do here.

    Where it cannot ask, it makes a mask, with which attention takes another kernel than in a run.
    """
    kept = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = kept
