"""What would have come of the published decision trees over a grid of models and boxes, by the planner?

Every model trains in the precision class of its strategy with 16-bit products, at the fastest split of the batch that
fits, checkpointed or not. The strategies are those that the sources know: no FSDP2, no tuned buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from study.strategy import engines, file
from study.theory import decision_trees, hardware, on_box, peaks, shapes, step_time
from study.theory.case import Engine, Job
from study.theory.decision_trees import TREES, Kind, Question, TreeOutcome
from study.theory.hardware import Box
from study.theory.shapes import ModelShape

MODELS = tuple(f"mpt-{size}" for size in ("125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b"))
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
GPUS = ("a100-40gb", "h100-sxm")
BATCHES = (64, 128, 256, 512)  # sequences per step: one in each row of hf-analysis' table of batches
SEQUENCE_LENGTH = 1024
STRATEGIES = (
    "single", "ddp", "zero1", "zero2", "zero3", "zero1_cpu_offload", "zero2_cpu_offload", "zero3_cpu_offload",
    "zero3_nvme_offload",
)  # fmt: skip
SOURCES = ("hf-analysis", "zero3-blog", "stages-analysis")
JUDGED = ("agrees", "slower", "out of memory", "no answer")


@dataclass(frozen=True)
class TreeCase:
    """A model on a box at a batch, and what the planner finds of every strategy."""

    shape: ModelShape
    box: Box
    has_fast_link: bool
    global_batch_size: int
    results: dict[str, tuple[bool, float]]  # by strategy: fits, and its tokens per second and GPU

    def questions(self) -> Iterator[Question]:
        """Ask for every purpose and priority, since neither changes what the planner finds."""
        for purpose, speed_critical in itertools.product(("production", "research"), (True, False)):
            yield Question(
                num_params=self.shape.num_params,
                num_gpus=self.box.num_gpus,
                gpu_memory_bytes=self.box.gpu.memory_bytes,
                has_fast_link=self.has_fast_link,
                fits={name: fits for name, (fits, _) in self.results.items()},
                purpose=purpose,
                speed_critical=speed_critical,
                num_nodes=self.box.num_nodes,
                global_batch_size=self.global_batch_size,
            )


class Judged(NamedTuple):
    """What came of one tree's advice in one case."""

    case: TreeCase
    outcome: TreeOutcome


@dataclass(frozen=True)
class Grid:
    """All cases, and what came of each tree's advice in those that something fits."""

    cases: list[TreeCase]
    judged: dict[str, list[Judged]]


def evaluate() -> Grid:
    """Let the planner and every tree answer the whole grid."""
    cases = [case for model in MODELS for num_gpus in GPU_COUNTS for case in _cases(shapes.find(model), num_gpus)]
    judged: dict[str, list[Judged]] = {name: [] for name in TREES}
    for case in cases:
        if not any(fits for fits, _ in case.results.values()):
            continue  # then no advice could have been right
        questions = list(case.questions())
        for name, tree in TREES.items():
            judged[name] += [
                Judged(case, decision_trees.compare(tree(question), case.results)) for question in questions
            ]
    return Grid(cases, judged)


def _cases(shape: ModelShape, num_gpus: int) -> list[TreeCase]:
    """Predict a model on so many GPUs of each kind, with each link, at each batch."""
    splits = [(batch, *split) for batch in BATCHES for split in on_box.splits(batch // num_gpus)]
    batches, micro, accumulation = (np.array(column) for column in zip(*splits, strict=True))
    boxes = [(fast, box) for gpu in GPUS for fast, box in _boxes(gpu, num_gpus)]
    by_place: dict[tuple[int, int], dict[str, tuple[bool, float]]] = {}
    for name in STRATEGIES:
        if name == ("ddp" if num_gpus == 1 else "single"):
            continue
        chosen = file.read_by_name(name)
        engine = engines.advised_engine(chosen, shape.hidden, num_gpus, "bf16")
        jobs = [
            Job(micro, SEQUENCE_LENGTH, accumulation, checkpointed, kernels="fused") for checkpointed in (False, True)
        ]
        for index, speeds in enumerate(_speeds(shape, engine, jobs, [box for _, box in boxes])):
            for batch in BATCHES:
                best = float(speeds[:, batches == batch].max())
                by_place.setdefault((index, batch), {})[name] = best > 0, best
    return [
        TreeCase(shape, boxes[index][1], boxes[index][0], batch, results)
        for (index, batch), results in by_place.items()
    ]


def _boxes(gpu: str, num_gpus: int) -> list[tuple[bool, Box]]:
    """The box that one rents, and one whose GPUs have PCIe only between them."""
    box = hardware.typical_box(hardware.GPUS[gpu], num_gpus)
    slow = dataclasses.replace(box.gpu, link="PCIe", link_bandwidth=box.gpu.pcie_bandwidth)
    return [(True, box), (False, dataclasses.replace(box, gpu=slow))]


def _speeds(shape: ModelShape, engine: Engine, jobs: list[Job], boxes: list[Box]) -> Iterator[np.ndarray]:
    """Predict tokens per second and GPU on each box, a row per job; 0 where it does not fit."""
    held = [peaks.peak(shape, engine, job) for job in jobs]
    for box in boxes:
        rows = []
        for job, peak in zip(jobs, held, strict=True):
            fits = on_box.fits(peak, box)
            seconds = step_time.seconds(shape, engine, job, box).total
            rows.append(np.where(fits, step_time.tokens_per_second_per_gpu(job, seconds), 0.0))
        yield np.array(rows)


def usual(judged: list[Judged]) -> dict[tuple[str, int], Kind]:
    """The commonest outcome of each model on each number of GPUs."""
    kinds: dict[tuple[str, int], Counter[Kind]] = {}
    for advice in judged:
        kinds.setdefault((advice.case.shape.name, advice.case.box.num_gpus), Counter())[advice.outcome.kind] += 1
    return {place: counts.most_common(1)[0][0] for place, counts in kinds.items()}
