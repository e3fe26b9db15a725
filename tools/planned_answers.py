"""The planner's answers for common models and boxes, for a page that has no Python.

    python tools/planned_answers.py [FOLDER]

A file for each model, which the page loads when it is chosen: a script that calls `planned`, as a page that lies in a
folder may load scripts and nothing else. Every answer is that of `zero-study advise` with the same options. Takes some
minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from study import files
from study.errors import Refusal
from study.planner.asked import PLANNED, Asked
from study.planner.choose import Option, advise

COLUMNS = (
    "strategy", "precision", "fits", "GiB a GPU", "free", "micro batch", "accumulation", "checkpointed", "s/step",
    "low", "high", "tokens/s a GPU", "MFU",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=files.ROOT / "reports" / PLANNED.folder)
    for path in write(parser.parse_args().folder):
        print(path)


class Key(NamedTuple):
    """What is asked of one model."""

    gpu: str
    num_gpus: int
    sequence_length: int
    per_gpu: int
    network_gbps: int | None

    @property
    def text(self) -> str:
        return "|".join("" if value is None else str(value) for value in self)

    def asked(self) -> Asked:
        return Asked(
            gpu=self.gpu,
            num_gpus=self.num_gpus,
            sequence_length=self.sequence_length,
            global_batch_size=self.per_gpu * self.num_gpus,
            network_gbps=self.network_gbps,
        )


def asked_for() -> Iterator[Key]:
    """List what is asked; networks differ only where there are several nodes."""
    every = itertools.product(PLANNED.gpus, PLANNED.counts, PLANNED.lengths, PLANNED.per_gpu, PLANNED.networks)
    for gpu, count, length, each, network in every:
        if network is None or count > 8:
            yield Key(gpu, count, length, each, network)


def answer(model: str, key: Key) -> dict[str, Any]:
    """One answer: rows as COLUMNS have them, and the sentence of the recommendation; or why there is none."""
    try:
        advice = advise(model, key.asked())
    except Refusal as why:
        return {"why": str(why)}
    return {"rows": [_row(option) for option in advice.options], "reason": advice.reason}


def _row(option: Option) -> list[Any]:
    found, job = option.prediction, option.prediction.job
    return [
        option.strategy.name,
        found.engine.precision,
        int(found.fits),
        _short(found.needed_bytes / 2**30),
        _short(found.free_bytes / 2**30),
        int(job.micro_batch_size),
        int(job.gradient_accumulation_steps),
        int(job.recomputed),
        _short(found.step.total),
        _short(found.step.low),
        None if option.is_short else _short(found.step.high),
        round(float(found.tokens_per_second_per_gpu)),
        round(100 * float(found.mfu)),
    ]


def _short(value: Any) -> float:
    return float(f"{float(value):.3g}")


def write(folder: Path) -> list[Path]:
    """Write FOLDER/<model>.js for every model."""
    folder.mkdir(parents=True, exist_ok=True)  # before the minutes that the answers take
    paths = []
    for model in PLANNED.models:
        answers = {key.text: answer(model, key) for key in asked_for()}
        content = json.dumps({"model": model, "answers": answers}, separators=(",", ":"), allow_nan=False)
        paths.append(folder / f"{model}.js")
        files.write_whole(paths[-1], f"planned({content});\n".encode())
    return paths


if __name__ == "__main__":
    main()
