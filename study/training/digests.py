"""Which bits has a step left? Digests of all weights and of both of Adam's moments, whole, of every engine alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from study.engines import whole
from study.records.schema import StepDigest
from study.training.proof import base_optimizer, innermost
from study.training.weights import plain_name

DIGITS = 16


def take(step: int, model: Any, optimizer: Any) -> StepDigest:
    """Digest what is there after a step. Collective; the same on every rank."""
    named = sorted(
        (plain_name(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    whole.link_states(innermost(optimizer))
    states = base_optimizer(optimizer).state

    def weight(parameter: Any) -> torch.Tensor | None:
        master = whole.master(parameter) if parameter.dtype in (torch.bfloat16, torch.float16) else None
        return whole.weight(parameter) if master is None else master

    def moment(key: str) -> Callable[[Any], torch.Tensor | None]:
        return lambda parameter: whole.state(parameter, key, states)

    return StepDigest(
        step=step,
        weights=_digest(named, weight) or "",
        first_moments=_digest(named, moment("exp_avg")),
        second_moments=_digest(named, moment("exp_avg_sq")),
    )


def _digest(named: list[tuple[str, Any]], read: Callable[[Any], torch.Tensor | None]) -> str | None:
    """Digest what is read of each parameter; None: of one there is nothing, or it is not of its shape."""
    digest, is_whole = hashlib.sha256(), True
    for name, parameter in named:
        found = read(parameter)  # on every rank, also after one that lacks it
        if found is None or found.numel() != getattr(parameter, "ds_numel", parameter.numel()):
            is_whole = False
            continue
        digest.update(name.encode())
        digest.update(found.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:DIGITS] if is_whole else None
