"""Ranks that are pretended beside ranks that are there: the same training, of small models, in test_dry_run.py.

`python tests/dry_run_program.py FOLDER/checked.json`: every strategy on 2, 4 and 8 ranks, worlds of 64 to 4,096 beside
theory, hangs. `.../published.json`: published peaks beside traced ones. `.../scaling.json`: 2 to 4,096 ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from study.accuracy import published_rows
from zero_study import files
from zero_study.dryrun import deadlock, script, trace, world
from zero_study.dryrun.models import of_shape
from zero_study.dryrun.traced import check_traceable
from zero_study.dryrun.tracker import Call
from zero_study.engines import extensions
from zero_study.errors import Refusal
from zero_study.ranks import forks
from zero_study.strategy import file
from zero_study.strategy.theory_engine import engine_of_strategy
from zero_study.theory import measured_by_others, peaks, shapes
from zero_study.theory.engine import StepConfig
from zero_study.theory.model_states import StatePart

MODELS = {
    "gpt2": shapes.decoder_shape("gpt2", "gpt2", 2, 64, 4, 32, 256),
    "bert": shapes.decoder_shape("bert", "bert", 2, 64, 4, 32, 256),
    "gpt2 of one layer": shapes.decoder_shape("gpt2", "gpt2", 1, 64, 4, 32, 256),
    "gpt2 of two layers": shapes.replace_parts(shapes.find("gpt2"), layers=2),
}
DEEPSPEED = ("zero1", "zero2", "zero3", "zero2_tuned", "zero3_tuned", "zero3_hpz", "zero2_cpu_offload")
STRATEGIES = ("ddp", *DEEPSPEED, "fsdp2", "fsdp2_hybrid")
HANGS = ("skipped", "twice", "uneven", "frozen", "continued", "evaluated", "unequal")
STATES: tuple[StatePart, ...] = ("parameters", "gradients", "optimizer_states")
COUNTER = 4  # bytes of Adam's, of one flat parameter

extensions.use_own_folder()
extensions.use_built()


@contextmanager
def together(rank: int, world_size: int, variables: dict[str, str], port: int) -> Iterator[None]:
    """Be one of ranks that are all there, over gloo."""
    os.environ.update(variables)
    os.environ.update(world.rank_environment(rank, world_size, world_size) | {"MASTER_PORT": str(port)})
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    with world.accelerate_on_cpu(variables):
        yield


def ask(
    strategy: str, model: str, world_size: int, asked: Sequence[int], *, port: int | None = None,
    precision: str | None = None, accumulation: int = 1, checkpointing: bool = False, has_memory: bool = True,
) -> dict[int, dict[str, Any]]:  # fmt: skip
    """What these ranks say; all of a world that is there, where a port is given."""
    variables = world.launch_environment(file.find_strategy(strategy), world_size, precision)
    program = trace.trainer(of_shape(MODELS[model], 32), StepConfig(2, 32, accumulation, checkpointing), has_memory)
    if port is None:
        local = min(8, world_size)
        return forks.run(program, {rank: world.rank_of_many(rank, world_size, local, variables) for rank in asked})
    places = {rank: together(rank, world_size, variables, port) for rank in range(world_size)}
    return forks.run(program, places, at_once=world_size)


def differences(pretended: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """In what a pretended rank differs from one that was there."""
    calls = [[call | {"line": ""} for call in one["calls"]] for one in (pretended, there)]  # of different lines
    found = ["calls"] if calls[0] != calls[1] else []
    return found + [name for name in ("states", "before_bytes", "peak_bytes") if pretended[name] != there[name]]


def held(said: dict[str, Any]) -> int:
    """Bytes of a rank's model states, without the counter of steps."""
    return sum(said["states"][name] for name in STATES) - COUNTER


def in_theory(strategy: str, world_size: int) -> float:
    """The same of the last rank, by the planner's formulas."""
    shape = MODELS["gpt2"]
    engine = engine_of_strategy(file.read_strategy(file.find_strategy(strategy)), shape.hidden, world_size, "fp32")
    states = peaks.states(engine, shape, "stepping", world_size - 1).device
    return float(sum(states[name] for name in STATES))


def mismatches(strategy: str, which: str, world_size: int = 4) -> list[deadlock.Mismatch]:
    """Where the calls of ranks 0 and 1 do not match in dry_run_script.py."""
    variables = world.launch_environment(file.find_strategy(strategy), world_size)
    places = {rank: world.rank_of_many(rank, world_size, world_size, variables) for rank in (0, 1)}
    said = forks.run(lambda: script.run(Path(__file__).with_name("dry_run_script.py"), [which]), places)
    assert not (any if which == "sound" else all)(one["raised"] for one in said.values()), said  # DDP does in a hang
    return deadlock.first_mismatches({rank: [Call.read(call) for call in one["calls"]] for rank, one in said.items()})


def checked(target: Path) -> None:
    """Write what test_dry_run.py asks a part of, for all."""
    equal: list[Any] = []
    theory: list[Any] = []
    hangs: dict[str, Any] = {}
    content = {"made_by": "python tests/dry_run_program.py", "hangs": hangs, "theory": theory, "equal": equal}
    for which in ("sound", *HANGS):
        hangs[which] = {strategy: bool(mismatches(strategy, which)) for strategy in ("ddp", "zero2", "zero3", "fsdp2")}
    for size, strategy in product((64, 256, 1024, 4096), ("ddp", "zero1", "zero2", "zero3", "fsdp2")):
        (said,) = ask(strategy, "gpt2", size, [size - 1]).values()
        cost = [round(said["seconds"], 1), said["resident_bytes"]]
        theory.append([strategy, size, held(said), in_theory(strategy, size), *cost])
        files.write_json(target, content)
    plain = [(model, size, {}) for model in ("gpt2", "bert") for size in (2, 4, 8)]
    varied = [{"precision": "bf16"}, {"accumulation": 2}, {"checkpointing": True}]
    ports = count(29700)
    for strategy, (model, size, how) in product(STRATEGIES, [*plain, *(("gpt2", 2, how) for how in varied)]):
        if strategy == "fsdp2_hybrid" and size != 4:  # which its file is for
            continue
        asked = sorted({0, size - 1})
        there = ask(strategy, model, size, asked, port=next(ports), **how)
        for rank, one in ask(strategy, model, size, asked, **how).items():
            more = one["peak_bytes"] - there[rank]["peak_bytes"]
            equal.append([strategy, model, size, rank, how, differences(one, there[rank]), more])
        files.write_json(target, content)


def published(target: Path) -> None:
    """Write what can be traced of published memory of grades A and B, beside it and what the planner predicts of it."""
    rows: list[Any] = []
    refused: dict[str, list[str]] = {}
    content = {"made_by": "python tests/dry_run_program.py", "rows": rows, "refused": refused}
    for case in [*published_rows.amounts(), *(c for c in measured_by_others.cases("memory") if c.quantity == "fits")]:
        if case.grade == "C" or case.quantity == "allocated_bytes":  # between steps
            continue
        try:
            check_traceable(case.shape, case.engine, case.job)
            if case.engine.kind == "deepspeed":
                said = trace.trace_deepspeed(case.shape, case.engine, case.job)
            else:  # a fork too, with which what it held goes, and no thread of a backward comes into the next
                program = partial(trace.trace_torch, case.shape, case.engine, case.job)
                said = forks.run(program, {0: nullcontext()})[0]
            row = [case.family, case.name, case.grade, case.quantity, case.published]
            rows.append([*row, published_rows.without_its_source(case), said["peak_bytes"], said["reserved_bytes"]])
        except Refusal as refusal:
            refused.setdefault(str(refusal), []).append(case.name)
        files.write_json(target, content)


def scaling(target: Path) -> None:
    """Write what the last of 2 to 4,096 ranks holds between steps and at its peak, and sends in rings."""
    rows: list[Any] = []
    for strategy, size in product(("ddp", "zero1", "zero2_tuned", "zero3_tuned", "fsdp2"), (2, 8, 64, 512, 4096)):
        (said,) = ask(strategy, "gpt2 of two layers", size, [size - 1]).values()
        calls = [(len(call["ranks"]) or size, call) for call in said["calls"]]
        sent = sum((1 + (c["kind"] == "all_reduce")) * (n - 1) / n * c["num_bytes"] for n, c in calls)
        rows.append([strategy, size, said["before_bytes"], said["peak_bytes"], round(sent), said["reserved_bytes"]])
        files.write_json(target, {"made_by": "python tests/dry_run_program.py", "rows": rows})


if __name__ == "__main__":
    path = Path(sys.argv[1])
    {"checked": checked, "published": published, "scaling": scaling}[path.stem](path)
