"""Memory, FLOPs and moved bytes of a traced model, from its counts.

activations.py, flops.py and step_time.py call these functions for shapes that have counts, and have formulas for the
others. Every function is about one micro step of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from study.theory.engine import Job
from study.theory.shapes.counts import ModelCounts, PartCounts, Polynomial, SettingCounts

Arithmetic = Literal["fp32", "autocast", "half"]


def setting_of(part: PartCounts, arithmetic: Arithmetic, job: Job) -> SettingCounts:
    """Return the counts of a part in the setting of a job. Models have only the attention that transformers has."""
    settings = part.settings
    wanted = f"{arithmetic} {'eager' if job.attention == 'eager' else 'sdpa'}"
    return settings[wanted] if wanted in settings else settings[f"{arithmetic} sdpa"]


def saved_bytes(part: PartCounts, arithmetic: Arithmetic, size: int, job: Job) -> float:
    """Return the bytes that a part saves for the backward pass.

    With fused kernels, only the inputs of norms and activation functions are saved, and in 16 bits no fp32 casts.
    """
    batch, length = job.micro_batch_size, job.sequence_length
    saved = setting_of(part, arithmetic, job).saved
    if not job.is_fused:
        return saved.of(batch, length)
    if arithmetic == "half":  # what is saved in fp32, in half the bytes; but softmax stays in fp32
        full = setting_of(part, "fp32", job).saved
        saved = Polynomial(full.constant * size / 4, full.per_token * size / 4, saved.per_pair)
    return saved.of(batch, length) - size * part.composed.of(batch, length)


def _mean(counts: ModelCounts, value: Callable[[PartCounts], float]) -> float:
    """Return the mean of a value over all blocks."""
    blocks = counts.executed
    if not blocks:
        return 0.0
    return sum(blocks.count(kind) / len(blocks) * value(part) for kind, part in enumerate(counts.kinds))


def block_bytes(counts: ModelCounts, arithmetic: Arithmetic, size: int, job: Job) -> float:
    """Return the bytes that a block saves for the backward pass, as a mean over all blocks."""
    return _mean(counts, lambda part: saved_bytes(part, arithmetic, size, job))


def largest_block_bytes(counts: ModelCounts, arithmetic: Arithmetic, size: int, job: Job) -> float:
    """Return the bytes that the block that saves most saves for the backward pass."""
    return max((saved_bytes(part, arithmetic, size, job) for part in _executed(counts)), default=0.0)


def outside_bytes(counts: ModelCounts, arithmetic: Arithmetic, job: Job) -> float:
    """Return the bytes that everything outside the blocks saves for the backward pass, without the loss."""
    return setting_of(counts.outside, arithmetic, job).saved.of(job.micro_batch_size, job.sequence_length)


def _executed(counts: ModelCounts) -> list[PartCounts]:
    return [counts.kinds[kind] for kind in sorted(set(counts.executed))]


def temporary_bytes(counts: ModelCounts, arithmetic: Arithmetic, job: Job) -> float:
    """Return the temporary bytes at the peak of the backward pass of the block that needs most."""
    batch, length = job.micro_batch_size, job.sequence_length
    size = 2 if arithmetic == "half" else 4

    def temporary(part: PartCounts) -> float:
        # The matrices of eager attention are needed at another time than the largest tensors of fused attention's step.
        settings = (setting_of(part, arithmetic, job), part.settings[f"{arithmetic} sdpa"])
        peaks = [peak for setting in settings for peak in (setting.temporary, setting.temporary_elsewhere)]
        highest = max(peak.of(batch, length) for peak in peaks)
        # A single kernel needs the gradients of its input and its output. Several kernels need those of each result.
        return max(highest - size * part.composed.of(batch, length), highest / 2) if job.is_fused else highest

    return max(temporary(part) for part in _executed(counts) or [counts.outside])


def selective_op_bytes(counts: ModelCounts, arithmetic: Arithmetic, size: int, job: Job) -> float:
    """Return the bytes that a block saves with torchtitan's selective checkpointing of operators.

    Its products read and write about as many elements, and the outputs of half of them are saved, besides the block's
    input and the output of attention, which has the width of the input.
    """
    batch, length = job.micro_batch_size, job.sequence_length
    outputs = _mean(counts, lambda part: part.product_elements.of(batch, length) / 2)
    entering = checkpoint_bytes(counts, arithmetic, job)
    return size * outputs / 2 + 2 * entering


def checkpoint_bytes(counts: ModelCounts, arithmetic: Arithmetic, job: Job) -> float:
    """Return the bytes of a block's input, as a mean over all blocks."""
    batch, length = job.micro_batch_size, job.sequence_length
    return _mean(counts, lambda part: setting_of(part, arithmetic, job).entering.of(batch, length))


def cast_bytes(counts: ModelCounts) -> int:
    """Return the bytes of autocast's 16-bit copies of all weights."""
    blocks = sum(
        copies * kind.settings["autocast sdpa"].casts for copies, kind in zip(counts.copies, counts.kinds, strict=True)
    )
    return counts.outside.settings["autocast sdpa"].casts + blocks


def moved_bytes(part: PartCounts, arithmetic: Arithmetic, size: int, job: Job) -> tuple[float, float]:
    """Return the bytes that a part's kernels move in forward and backward, without products and fused attention."""
    batch, length = job.micro_batch_size, job.sequence_length
    counts = setting_of(part, arithmetic, job)
    if job.is_fused:
        pairs = batch * length * length
        # With one kernel for scaling, mask and softmax, eager attention moves 4 of 9 times the bytes in forward, and 6
        # of 8 in backward (step_time.py, _attention).
        forward = size * part.fused_forward.of(batch, length) + 4 / 9 * counts.moved_forward.per_pair * pairs
        return forward, size * part.fused_backward.of(batch, length) + 6 / 8 * counts.moved_backward.per_pair * pairs
    return counts.moved_forward.of(batch, length), counts.moved_backward.of(batch, length)


def blocks_flops(counts: ModelCounts, batch: float, length: float) -> float:
    """Return the FLOPs of the forward pass of all blocks."""
    return len(counts.executed) * _mean(
        counts, lambda part: part.products.of(batch, length) + part.attention.of(batch, length)
    )


def attention_flops(counts: ModelCounts, batch: float, length: float) -> float:
    """Return the FLOPs of attention in the forward pass of all blocks."""
    return len(counts.executed) * _mean(counts, lambda part: part.attention.of(batch, length))


def head_flops(counts: ModelCounts, batch: float, length: float) -> float:
    """Return the FLOPs of the forward pass outside the blocks."""
    return counts.outside.products.of(batch, length) + counts.outside.attention.of(batch, length)
