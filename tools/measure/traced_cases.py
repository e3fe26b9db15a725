"""Trace the study's models over fake tensors, as a reference for the planner's peaks.

    python tools/measure/traced_cases.py [--output FILE] [--only TEXT]

The grid has both workloads and every size, on one to eight ranks, small models first. An interrupted call continues
where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from study import run_in_theory
from study.config import Precision, RunConfig, build_config
from study.records.schema import Facts
from zero_study import files
from zero_study.dryrun.traced import Moment, Part, Traced
from zero_study.errors import Refusal, refusing
from zero_study.models import SIZES
from zero_study.strategy import file, theory_engine
from zero_study.theory import peaks
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.peaks import Peak
from zero_study.theory.shapes import ModelShape

# Strategies that can be traced, with numbers of ranks: DDP's bytes are the same on any number of them.
RANKS = {"single": (1,), "ddp": (2,), "fsdp2": (1, 2, 4, 8), "fsdp2_no_reshard": (4,), "fsdp2_hybrid": (4,)}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
# Sequences and tokens of a rank's micro batch.
BATCHES = {"bert-imdb": (8, 128), "gpt-wikitext": (2, 512)}
LIBRARIES = ("torch", "transformers", "accelerate")  # whose operators, modules and sharding are traced
TRACES = files.ROOT / "reports" / "predicted" / "validation" / "traces.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TRACES, help="JSON file; what it has already is kept")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    options = parser.parse_args()
    for line in run(options.output, options.only):
        print(line, flush=True)


class TracedPoint(Facts):
    """One case of the grid, with its trace."""

    workload: str
    size: str
    strategy: str
    world_size: int
    precision: Precision
    micro_batch_size: int
    sequence_length: int
    activation_checkpointing: bool
    parts: dict[Part, int]  # bytes of rank 0 at the highest moment of a step
    moment: Moment
    seconds: float  # that the trace took

    @property
    def traced(self) -> Traced:
        return Traced(self.parts, self.moment, self.seconds)


class TracedGrid(Facts):
    """A file of traced cases."""

    traces_version: Literal[1] = 1  # no record, which a schema_version would make it
    status: Literal["traced"] = "traced"
    made_with: dict[str, str]  # versions of LIBRARIES
    traces: list[TracedPoint]


@dataclass(frozen=True)
class Point:
    """One case of the grid: a run's configuration, a strategy, a number of ranks."""

    config: RunConfig
    strategy: str
    world_size: int

    @property
    def name(self) -> str:
        checkpointed = "-checkpointed" if self.config.activation_checkpointing else ""
        config = self.config
        return f"{config.workload}-{config.size}-{self.strategy}-{self.world_size}x-{config.precision}{checkpointed}"

    @property
    def shape(self) -> ModelShape:
        return run_in_theory.shape_of(self.config)

    @property
    def engine(self) -> Engine:
        chosen = file.read_by_name(self.strategy)
        return theory_engine.advised_engine(chosen, self.shape.hidden, self.world_size, self.config.precision)

    @property
    def job(self) -> StepConfig:
        return run_in_theory.job_of(self.config, self.world_size, "gpu")

    @property
    def predicted(self) -> Peak:
        return peaks.peak(self.shape, self.engine, self.job)


def point(
    workload: str, size: str, strategy: str, world_size: int, precision: Precision, activation_checkpointing: bool
) -> Point:
    """Make a case with the workload's batch, its published vocabulary, and no dropout."""
    micro_batch_size, length = BATCHES[workload]
    sequences = micro_batch_size * world_size
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": sequences, "num_train_examples": sequences}
    settings = {"precision": precision, "activation_checkpointing": activation_checkpointing, "sequence_length": length}
    config = build_config(workload=workload, size=size, data="hub", dropout=0.0, **batch, **settings)
    return Point(config, strategy, world_size)


def points() -> list[Point]:
    """List the grid, small models first."""
    every = [
        point(workload, size, strategy, world_size, precision, checkpointed)
        for workload, sizes in SIZES.items()
        for size in sizes
        for strategy, counts in RANKS.items()
        for world_size in counts
        for precision in PRECISIONS
        for checkpointed in (False, True)
    ]
    return sorted(every, key=lambda case: case.shape.num_params)


def point_of(traced: TracedPoint) -> Point:
    """Return the case to which an entry of a file belongs."""
    names = ("workload", "size", "strategy", "world_size", "precision", "activation_checkpointing")
    return point(**{name: getattr(traced, name) for name in names})


def read(path: Path) -> TracedGrid:
    """Read a file of traced cases. Raises Refusal if it is not one."""
    content = files.load(path, "traced cases")
    with refusing(str(path)):
        return TracedGrid.model_validate(content)


def run(path: Path, only: str) -> Iterator[str]:
    """Trace the cases that the file lacks, write the file after each case, and yield a line for it.

    `only` is a part of the cases' names. Raises Refusal if the file was made with other versions of the libraries.
    """
    made_with = {name: importlib.metadata.version(name) for name in LIBRARIES}
    every = points()
    chosen = [case for case in every if only in case.name]
    if not chosen:
        raise Refusal(f"--only {only}: is in no case's name, such as {every[0].name}; correct it")
    existing = read(path) if path.exists() else TracedGrid(made_with=made_with, traces=[])
    if existing.made_with != made_with:
        then, now = (", ".join(map(" ".join, case.items())) for case in (existing.made_with, made_with))
        raise Refusal(f"{path}: was made with {then}, here is {now}; move it away")
    from zero_study.dryrun.trace import trace

    traces = {point_of(entry).name: entry for entry in existing.traces}
    missing = [case for case in chosen if case.name not in traces]
    yield f"{len(chosen)} cases, {len(missing)} of them to be traced"
    for place, case in enumerate(missing, 1):
        traced = trace(case.shape, case.engine, case.job)
        own = case.config.model_dump(include=set(TracedPoint.model_fields))
        counted = {"parts": traced.parts, "moment": traced.moment, "seconds": round(traced.seconds, 1)}
        traces[case.name] = TracedPoint(**own, strategy=case.strategy, world_size=case.world_size, **counted)
        ordered = [traces[case_known.name] for case_known in every if case_known.name in traces]
        files.write_whole(path, _text(TracedGrid(made_with=made_with, traces=ordered)).encode())
        error = 100 * (case.predicted.total / traced.total - 1)
        summary = f"traced {traced.total / 2**30:.3f} GiB, predicted {error:+.1f} %; {traced.seconds:.1f} s"
        yield f"{place}/{len(missing)} {case.name}: {summary}"


def _text(grid: TracedGrid) -> str:
    """Format the cases as JSON with one line for each."""
    head = grid.model_dump(mode="json", exclude={"traces"})
    keys = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines = ",\n".join(f"  {json.dumps(entry.model_dump(mode='json'), separators=(',', ':'))}" for entry in grid.traces)
    return "{\n" + ",\n".join([*keys, f' "traces": [\n{lines}\n ]']) + "\n}\n"


if __name__ == "__main__":
    main()
