"""Decide whether an engine refused a configuration (cell) or failed in it.

An engine refuses a cell if it reports, while it is built, that it does not support the cell. After that, only the
errors of `TABLE` are refusals. Any other error of a training step or of a resume is a crash, so that a regression that
raises an exception is never taken for a refusal.

This module needs only Python's standard library.
"""

from __future__ import annotations

from typing import NamedTuple

from .cells import ADAMW, OPTIMIZERS

# The types of errors by which engines report, while they are built, that they do not support something.
WHILE_BUILDING = ("AssertionError", "NotImplementedError", "NotOffered", "ValueError", "DeepSpeedConfigError")

BUILT, TRAINED, RESUMED = "built", "trained", "saved and taken up"  # stages of a cell; another one is "ended"


class Named(NamedTuple):
    """An error with which an engine refuses a configuration although the engine could be built."""

    error: str  # type of the exception
    words: str  # a part of its message
    stage: str = TRAINED
    optimizers: tuple[str, ...] = (ADAMW, *OPTIMIZERS)  # the cells of other optimizers are not refused in this way


_WITHOUT_ADAMW = tuple(OPTIMIZERS)  # PyTorch's sharded tensors support everything that AdamW needs
TABLE = (
    # accelerate's `accumulate` uses no_sync, which DeepSpeed does not support at stages 2 and 3, nor together with a
    # step of its engine inside.
    Named("AssertionError", "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"),
    Named("AssertionError", "It is illegal to call Engine.step() inside no_sync context manager"),
    # A module that is used twice under reentrant checkpointing, at stages 1 and 2.
    Named("AssertionError", "Multiple gradient reduction is currently not supported"),
    Named("AssertionError", "Multiple gradient reductions are currently not supported"),
    # Optimizers whose operations PyTorch does not support for the sharded tensors of FSDP2.
    Named("NotImplementedError", "does not have a sharding strategy registered", optimizers=_WITHOUT_ADAMW),
    Named(
        "RuntimeError",
        "in-place operations that require placement changes are not supported",
        optimizers=_WITHOUT_ADAMW,
    ),
    Named("RuntimeError", "got mixed torch.Tensor and DTensor", optimizers=_WITHOUT_ADAMW),
    # PyTorch's Muon gets ZeRO's flat partitions.
    Named("ValueError", "Param gradient must be a 2D matrix", optimizers=("torch_muon",)),
    # PyTorch does not load states that are tensor subclasses in the way in which DeepSpeed asks for them.
    Named(
        "RuntimeError",
        "Callable map_location not supported with _rebuild_wrapper_subclass",
        RESUMED,
        ("torchao_adamw8bit",),
    ),
)


def is_refusal(message: str, stage: str, optimizer: str = ADAMW) -> bool:
    """Return whether an error means that the engine does not support a configuration.

    `message` begins with the type of the exception. A message without any words refuses nothing.
    """
    error, _, words = message.partition(": ")
    if not words.strip():
        return False
    if stage == BUILT:
        return error in WHILE_BUILDING
    return any(
        (error, stage) == (entry.error, entry.stage) and entry.words in words and optimizer in entry.optimizers
        for entry in TABLE
    )
