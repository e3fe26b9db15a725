"""Which bits has a step left? Digests of all weights and of both of Adam's moments, whole, of every engine alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from study.engines import whole
from study.records.schema import StepDigest
from study.training.proof import base_optimizer, innermost

DIGITS = 16


def take(step: int, model: Any, optimizer: Any) -> StepDigest:
    """Digest what is there after a step. Collective; the same on every rank."""
    named = sorted((_plain(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    if any(whole.is_of_zero(parameter) and not hasattr(parameter, "ds_id") for _, parameter in named):
        whole.have_moments(innermost(optimizer), [parameter for _, parameter in named])  # ties them to parameters
    states = base_optimizer(optimizer).state

    def weight(parameter: Any) -> torch.Tensor | None:
        master = whole.master(parameter) if parameter.dtype in (torch.bfloat16, torch.float16) else None
        return whole.weight(parameter) if master is None else master

    def moment(key: str) -> Callable[[Any], torch.Tensor | None]:
        def read(parameter: Any) -> torch.Tensor | None:
            if whole.is_of_zero(parameter):
                from deepspeed.utils import safe_get_full_optimizer_state

                return safe_get_full_optimizer_state(parameter, key)  # type: ignore[no-any-return]
            found = states.get(parameter, {}).get(key)
            return found.full_tensor() if hasattr(found, "full_tensor") else found  # type: ignore[no-any-return]

        return read

    return StepDigest(
        step=step,
        weights=_digest(named, weight) or "",
        first_moments=_digest(named, moment("exp_avg")),
        second_moments=_digest(named, moment("exp_avg_sq")),
    )


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "").removeprefix("module.")


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
