"""Check a saved folder against what was trained: `assert_saved_is_complete`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Refusal
from . import outcomes, programs

if TYPE_CHECKING:
    import torch


def check(
    folder: Path,
    trained: torch.nn.Module | Mapping[str, torch.Tensor] | str | os.PathLike[str],
    model: Path | None,
    missing: str | None,
) -> None:
    """Raise AssertionError unless a saved folder is complete and holds what was trained."""
    __tracebackhide__ = True
    if not programs.is_installed("torch"):
        outcomes.skip_or_fail(f"not checked: {folder} (torch is not installed).", missing)
    from ..saved import against, command, text

    recording = Path(trained) if isinstance(trained, (str, os.PathLike)) else None
    state = _state(trained) if recording is None else None
    saved, compared = command.examine(folder, recording, model)
    if state is not None:
        compared += [against.compare(part, state, "what was trained") for part in saved if part.tensors]
    verdict = text.verdict(saved, compared, False)
    if verdict.result == "found":
        raise AssertionError(
            f"{folder} does not contain the trained weights.\n{text.text(folder, saved, compared, False)}"
        )
    if verdict.result == "unknown":
        raise outcomes.CouldNotBeChecked(
            f"{folder} could not be compared with the trained weights.\n{text.text(folder, saved, compared, False)}"
        )


def _state(trained: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model or of a state by name. Raises Refusal for something else."""
    import torch

    state = trained.state_dict() if isinstance(trained, torch.nn.Module) else trained
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise Refusal(
            "trained= is neither a model nor tensors by name. Pass the trained model, its state_dict(), or the folder "
            "of a recording by zero-study diff."
        )
    if not state:
        raise Refusal("trained= has no tensor, so there is nothing to compare with. Pass the trained model.")
    if sharded := [name for name, value in state.items() if hasattr(value, "full_tensor") or not value.numel()]:
        raise Refusal(
            f"trained= has only a shard of {sharded[0]}, so it cannot be compared. Gather the parameters, and pass the "
            "whole state."
        )
    return dict(state)
