"""Predict memory, largest micro batch, step time and price of one strategy on machines with GPUs."""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass

from zero_study.theory import communication, computation, peaks, step_time
from zero_study.theory.communication import ExpectedCollective
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.hardware import Cluster, product_flops_per_second, usable_memory_bytes
from zero_study.theory.measured_by_others import AllocatorUse, MeasuredCase
from zero_study.theory.peaks import Peak
from zero_study.theory.shapes import ModelShape
from zero_study.theory.step_time import StepTime

# Memory that torch's allocator needs beyond the peak of the tensors, because freed blocks do not always fit later
# tensors. In forward and backward, this is the smallest share with which all published configurations that ran out of
# memory are predicted not to fit. The rows of measured_by_others/mpt_throughput.yaml would allow up to 0.09.
ALLOCATOR_SLACK = 0.08
# The same in the optimizer step. Activations are freed then, and temporary tensors have the sizes of parameters, whose
# gradients were just freed, so less is lost. Five published configurations whose peak is in the optimizer step trained
# with a peak of 0.951 to 0.958 of the usable memory, which 0.043 and less allow.
OPTIMIZER_SLACK = 0.04
# Memory that torch's allocator reserves if the GPU has enough, relative to the predicted peak of the tensors. Training
# does not need that much. torch.cuda.max_memory_reserved reports it, and nvidia-smi shows it together with the context
# and NCCL. RESERVED is the middle of the medians of all published sources, which are 1.1 to 1.6
# (`published_rows.fitted_reserve`). We found no rule that predicts where in this range a run is: factors by engine or
# by the moment of the peak, and sums with activations or with the GPU's memory, are no better on sources that they were
# not fitted to. RESERVED_RANGE begins lower, with the least that a compiled run with sequences of one length reserved
# (torchtitan). Other such runs of torchtitan reserved up to 1.6 times the predicted peak. So the whole card does not
# always show more than the predicted peak.
RESERVED = 1.33
RESERVED_RANGE = (0.9, 1.6)

# The same factor under adapters if the lengths of the batches vary, and if the program empties the allocator's cache
# every few steps. Both apply to the tensors beyond the frozen weights, which are allocated once and stay. The first is
# the median of every second row of ms-swift in measured_by_others/adapters.yaml. In the second case, little more is
# reserved than a step needs.
RESERVED_IF_LENGTHS_VARY = 3.07
RESERVED_BY: dict[AllocatorUse, float] = {
    "equal lengths": RESERVED,
    "varying lengths": RESERVED_IF_LENGTHS_VARY,
    "emptied": 1 + ALLOCATOR_SLACK,
}

LARGEST_MICRO_BATCH = 1 << 16


@dataclass(frozen=True)
class Prediction:
    """The prediction for one strategy on one kind of machine."""

    engine: Engine
    job: StepConfig
    box: Cluster
    peak: Peak
    step: StepTime
    collectives: list[ExpectedCollective]  # collectives of one step
    model_flops_per_step: float  # per GPU, without recomputation

    @property
    def needed_bytes(self) -> float:
        return needed_for(self.peak)

    @property
    def usable_bytes(self) -> int:
        return usable_memory_bytes(self.box.gpu, self.box.num_gpus)

    @property
    def free_bytes(self) -> float:
        return free_bytes(self.peak, self.box)

    @property
    def host_bytes_per_node(self) -> float:
        return self.peak.host_bytes * self.box.gpus_of_node

    @property
    def disk_bytes_per_node(self) -> float:
        return self.peak.disk_bytes * self.box.gpus_of_node

    @property
    def lacking(self) -> str | None:
        return lacking(self.peak, self.box)

    @property
    def fits(self) -> bool:
        return fits(self.peak, self.box)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return step_time.tokens_per_second_per_gpu(self.job, self.step.total)

    @property
    def mfu(self) -> float:
        """Model FLOPs per second, divided by the GPU's dense peak of the data type (arXiv:2204.02311, appendix B)."""
        peak = product_flops_per_second(self.box.gpu, self.engine.precision)
        return self.model_flops_per_step / self.step.total / peak

    @property
    def communicated_bytes(self) -> float:
        """Bytes that a rank sends in a step, without the factor (N - 1) / N of a ring. 0 for one process."""
        return sum(collective.moved_bytes for collective in self.collectives) if self.engine.world_size > 1 else 0

    @property
    def dollars_per_hour(self) -> float | None:
        """The price of all GPUs per hour in US dollars. None if the price of the GPU is unknown."""
        price = self.box.gpu.price_per_hour
        return None if price is None else price * self.box.num_gpus

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        price = self.box.gpu.price_per_hour
        return None if price is None else price / 3600 / self.tokens_per_second_per_gpu * 1e9


def predict(shape: ModelShape, engine: Engine, job: StepConfig, box: Cluster) -> Prediction:
    """Return the predicted memory, communication and time of one configuration."""
    return Prediction(
        engine=engine,
        job=job,
        box=box,
        peak=peaks.peak(shape, engine, job),
        step=step_time.seconds(shape, engine, job, box),
        collectives=communication.collectives(engine, shape, job),
        model_flops_per_step=computation.model_flops_per_sequence(shape, job.sequence_length)
        * job.micro_batch_size
        * job.gradient_accumulation_steps
        / job.sequence_ranks,
    )


def lacking(peak: Peak, box: Cluster) -> str | None:
    """Return "host memory" or "disk" if a node has too little of it for offload, else None.

    None is also returned if the size of the node's memory or disk is unknown.
    """
    for resource, needed, available in (
        ("host memory", peak.host_bytes, box.host_memory_bytes),
        ("disk", peak.disk_bytes, box.disk_bytes),
    ):
        if available is not None and needed * box.gpus_of_node > available:
            return resource
    return None


def fits(peak: Peak, box: Cluster) -> bool:
    """Return whether the GPU has enough memory, and the node has enough memory and disk for offloaded data."""
    return free_bytes(peak, box) >= 0 and lacking(peak, box) is None


def predicted_memory(case: MeasuredCase) -> float | bool:
    """Return the predicted value of the kind of memory that a source published, such as the peak of the tensors."""
    if case.quantity == "allocated_bytes":
        return float(sum(peaks.states(case.engine, case.shape, "resting").device.values()))
    peak = peaks.peak(case.shape, case.engine, case.job)
    if case.quantity == "fits":
        return bool(fits(peak, case.box))
    if case.quantity in ("peak_allocated_bytes", "peak_unknown_bytes"):
        return float(peak.total)
    factor = RESERVED_BY[case.allocator]
    return shown_bytes(peak, case.box, whole_card=case.quantity == "used_bytes", factor=factor)


def shown_bytes(peak: Peak, box: Cluster, whole_card: bool = True, factor: float = RESERVED) -> float:
    """Return the bytes that nvidia-smi shows for a GPU, or that torch's allocator reserves if `whole_card` is False.

    `factor` is the reserved memory relative to the peak of the tensors. Frozen weights are not multiplied by it,
    because they are allocated once, and never freed and allocated again. The result is never more than the GPU has.
    """
    usable = usable_memory_bytes(box.gpu, box.num_gpus)
    reserved = peak.frozen_bytes + (peak.total - peak.frozen_bytes) * factor
    return min(float(reserved), usable) + (outside_bytes(box) if whole_card else 0)


def outside_bytes(box: Cluster) -> int:
    """Return the bytes of a GPU that are used outside torch's allocator: driver, CUDA context and NCCL."""
    return box.gpu.memory_bytes - usable_memory_bytes(box.gpu, box.num_gpus)


def needed_bytes(peak_bytes: float) -> float:
    """Return the bytes that one GPU needs if the peak of its tensors is known, but not the moment of the peak.

    They are the peak, plus a share for the allocator.
    """
    return peak_bytes * (1 + ALLOCATOR_SLACK)


def needed_for(peak: Peak) -> float:
    """Return the bytes that one GPU needs for a predicted peak: the tensors, plus a share for the allocator."""
    *others, stepping = peak.totals
    return max(stepping * (1 + OPTIMIZER_SLACK), *map(needed_bytes, others))


def free_bytes(peak: Peak, box: Cluster) -> float:
    """Return the bytes of a GPU's memory that stay free. Negative if memory is missing."""
    return usable_memory_bytes(box.gpu, box.num_gpus) - needed_for(peak)


def largest_micro_batch(shape: ModelShape, engine: Engine, job: StepConfig, box: Cluster) -> int:
    """Return the largest micro batch that fits a GPU, in sequences. 0 if not even one sequence fits.

    The result is at most LARGEST_MICRO_BATCH.
    """

    def is_too_large(batch: int) -> bool:
        return free_bytes(peaks.peak(shape, engine, dataclasses.replace(job, micro_batch_size=batch)), box) < 0

    batches = range(1, LARGEST_MICRO_BATCH + 1)
    return bisect.bisect_left(batches, True, key=is_too_large)  # if a batch does not fit, larger ones do not either


def splits(sequences_per_gpu: int) -> list[tuple[int, int]]:
    """Return all ways to split a GPU's share of the global batch into (micro batch, accumulation steps).

    The split with the largest micro batch is the first.
    """
    small = [n for n in range(1, math.isqrt(sequences_per_gpu) + 1) if not sequences_per_gpu % n]
    divisors = {n for divisor in small for n in (divisor, sequences_per_gpu // divisor)}
    return [(micro, sequences_per_gpu // micro) for micro in sorted(divisors, reverse=True)]
