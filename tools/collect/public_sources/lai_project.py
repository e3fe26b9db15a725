"""A course project on GH200: trainings on one GPU, and with FSDP on 2 to 16 GPUs that all have the same sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from public_sources.checkout import Checkout
from public_sources.reading import of_totals
from zero_study.public_runs.schema import PublicRun, Series

TIMESTAMP = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - root - INFO - (?:\[RANK \d+ / \d+\] )?"
STARTS = re.compile(TIMESTAMP + "Starting training!", re.MULTILINE)
STEP = re.compile(TIMESTAMP + r"Step: (\d+) \| Loss: ([\d.]+) \| Tokens per second: ([\d.]+) \|", re.MULTILINE)
ARGUMENT = re.compile(
    r"\b(sequence_length|batch_size|learning_rate|lr_warmup_steps|training_steps|scal\w+)=<?([\w.-]+)"
)
PARAMETERS = re.compile(r"Total (?:model parameters|params): ([\d,]+)")
SHAPE = re.compile(r"TransformerModelArgs\(dim=(\d+), n_layers=(\d+), n_heads=(\d+)")
OF_SCALE_1 = 8_053_329_920  # "scale=1" of the first days, by the logs that state both
# Commits with the last program that has no offload and with the first one that offloads. In between it is not known.
WITHOUT_OFFLOAD, WITH_OFFLOAD = datetime(2025, 5, 22, 1, 14, 14), datetime(2025, 5, 22, 14, 46, 49)


class Step(NamedTuple):
    """What the program logs about a step."""

    moment: datetime
    number: int
    loss: float
    rate: float  # tokens per second of one GPU since the last logged step


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings of at least one step. A log without FSDP can have several trainings at the same time."""
    for path in checkout.under("logs/", suffix=".out"):
        text = checkout.read(path).decode(errors="replace")
        steps = [
            Step(_moment(timestamp), int(step), float(loss), float(rate))
            for timestamp, step, loss, rate in STEP.findall(text)
        ]
        if not steps:
            checkout.left_out.append(f"{path}: no step of a training")
            continue
        stated = _stated(path, text)
        tokens = stated["sequence_length"] * stated["micro_batch_size"]
        starts = [_moment(timestamp) for timestamp in STARTS.findall(text)]
        courses = courses_of(steps, starts, tokens)
        marks = ["out of memory"] if "OutOfMemoryError" in text or "CUDA out of memory" in text else []
        if stated["num_gpus"] > 1 and len(courses) > 1:  # the first rank of each node logs the same training
            marks.append(f"{len(courses)} ranks log their steps, of which one is kept")
            courses = courses[:1]
        for number, (start, course) in enumerate(courses, 1):
            entry = path.removeprefix("logs/").removesuffix(".out") + (f" {number}" if number > 1 else "")
            is_whole = course[-1].number == stated["planned_steps"]
            run = of_totals(
                checkout, path, re.sub("[^A-Za-z0-9_.-]", "-", entry), "text", {},
                ending="finished" if is_whole else "ended early", marks=marks, entry=entry, **stated,
            )  # fmt: skip
            columns: dict[str, list[float | int | None]] = {
                "step": [step.number for step in course],
                "seconds": [round((step.moment - start).total_seconds(), 3) for step in course],
                "seconds_per_step": [float(f"{tokens / step.rate:.5g}") for step in course],
                "loss": [step.loss for step in course],
                "tokens_per_second_per_gpu": [step.rate for step in course],
            }
            yield run.model_copy(update={"training": Series(columns=columns)})


def courses_of(
    steps: list[Step], starts: list[datetime], tokens: int
) -> list[tuple[datetime, list[Step]]]:  # fmt: skip
    """Separate trainings that log to one file at the same time, with the moment at which each began.

    A step belongs to the training whose last logged moment fits the step's rate best.
    """
    num = max(sum(step.number == other.number for other in steps) for step in steps)
    starts = [*starts, *starts[-1:] * (num - len(starts))][:num] if starts else [steps[0].moment] * num
    courses: list[tuple[datetime, list[Step]]] = [(start, []) for start in starts]
    for step in steps:
        open_courses = [course for course in courses if not course[1] or course[1][-1].number < step.number]
        _, course = min(open_courses or courses, key=lambda pair: _misfit(step, *pair, tokens))
        course.append(step)
    return [course for course in courses if course[1]]


def _misfit(step: Step, start: datetime, course: list[Step], tokens: int) -> float:
    last, number = (course[-1].moment, course[-1].number) if course else (start, 0)
    return abs((step.moment - last).total_seconds() - (step.number - number) * tokens / step.rate)


def _moment(timestamp: str) -> datetime:
    return datetime.strptime(timestamp, "%Y-%m-%d %H:%M:%S,%f")


def _stated(path: str, text: str) -> dict[str, Any]:
    """Return what the log states, and what the programs of its day do."""
    arguments = dict(ARGUMENT.findall(text))
    world = re.search(r"world size: (\d+)", text)
    num_gpus = int(world[1]) if world else 1
    began = _moment(STEP.findall(text)[0][0])
    shape, seed = SHAPE.search(text), re.search(r"Setting seed to (\d+)", text)
    parameters = PARAMETERS.search(text)
    total = int(parameters[1].replace(",", "")) if parameters else OF_SCALE_1 if arguments.get("scale") == "1" else None
    offload = "nothing" if num_gpus == 1 or began < WITHOUT_OFFLOAD else None
    return {
        "model": f"Transformer with {total:,} parameters" if total else None,
        "parameters": total,
        "gpu": "GH200",
        "num_gpus": num_gpus,
        "program": "lai-proj",
        "engine": "FSDP1" if num_gpus > 1 else "one GPU",
        "strategy": "fsdp" if num_gpus > 1 else "one GPU",
        "offload": "parameters" if num_gpus > 1 and began > WITH_OFFLOAD else offload,
        "precision": "bf16",
        "optimizer": "AdamW",
        "compiled": False,
        "micro_batch_size": int(arguments["batch_size"]),
        "sequence_length": int(arguments["sequence_length"]),
        "learning_rate": float(arguments["learning_rate"]),
        "warmup_steps": int(arguments["lr_warmup_steps"]),
        "planned_steps": int(arguments["training_steps"]),
        "seed": int(seed[1]) if seed else None,
        "width": int(shape[1]) if shape else None,
        "layers": int(shape[2]) if shape else None,
        "date": f"{began:%Y-%m-%d}",
        "log": PurePosixPath(path).stem,
    }
